// The challenge: heads off until the model sees something else, and a picture of what that did.

import { ALONE, download, make, makeSmallButton } from "./elements.js";

const CARD = [1200, 630]; // pixels of the picture, the size of previews of links
const PHOTO = 550; // side of the map in it

// Writes words in lines of a width, and returns the height below the last.
function writeLines(context, words, left, top, width, size) {
  const lines = [""];
  for (const word of words.split(" ")) {
    const longer = `${lines.at(-1)} ${word}`.trim();
    if (context.measureText(longer).width <= width) lines[lines.length - 1] = longer;
    else lines.push(word);
  }
  lines.forEach((line, k) => context.fillText(line, left, top + 1.35 * size * k));
  return top + 1.35 * size * lines.length;
}

// The picture as a PNG file: the map, what changed, and the sentence.
async function drawCard({ words, change }, map, model) {
  const [width, height] = CARD;
  const canvas = new OffscreenCanvas(width, height);
  const context = canvas.getContext("2d");
  context.fillStyle = "white";
  context.fillRect(0, 0, width, height);
  const scale = PHOTO / Math.max(map.width, map.height);
  context.drawImage(map, 40, 40, scale * map.width, scale * map.height);
  const left = 40 + PHOTO + 40;
  const room = width - left - 40;
  const write = (text, top, size, weight = 400) => {
    context.font = `${weight} ${size}px system-ui, sans-serif`;
    return writeLines(context, text, left, top, room, size);
  };
  context.textBaseline = "top";
  context.fillStyle = "#262626";
  let top = write("What a Vision Transformer sees", 44, 26, 600);
  if (change) top = write(change, top + 30, 76, 700);
  write(words, top + 30, 30);
  context.fillStyle = "#595959";
  write(`${model} · vitlens`, height - 72, 22);
  return canvas.convertToBlob({ type: "image/png" });
}

const HINT =
  "Click one of the small maps, and then “Turn head off” below them. " +
  "Sorted by effect, the heads that matter come first.";

// The sentence of the challenge with its buttons. findMap: the canvas of the map. isUploaded: of the photo, which links
// do not have.
export function makeChallenge(model, findMap, isUploaded) {
  let described;
  const words = make("p", { class: "words", "aria-live": "polite" });
  const hint = make("p", { class: "note" }, HINT);
  const said = make("span", { class: "note", role: "status" });
  const say = (text) => {
    said.textContent = text;
  };
  const draw = () => drawCard(described, findMap(), model.get("frame").model);
  const copyPicture = async () => {
    const picture = await draw();
    try {
      await navigator.clipboard.write([new ClipboardItem({ "image/png": picture })]);
      say("Copied. Paste it into a message.");
    } catch {
      download("vitlens-challenge.png", await picture.arrayBuffer());
      say("This browser does not copy pictures, so it was saved as a file.");
    }
  };
  const copyLink = async () => {
    try {
      await navigator.clipboard.writeText(location.href);
      say("Copied. The link opens this state.");
    } catch {
      say(`Copy the address of this page: ${location.href}`);
    }
  };
  const onWeb = ALONE && location.protocol.startsWith("http");
  const picture = makeSmallButton("Copy picture", copyPicture);
  const link = makeSmallButton("Copy link", copyLink);
  const buttons = make("p", { class: "buttons" }, picture, " ", link, " ", said);
  const node = make("section", { class: "challenge" }, words, hint, buttons);
  const update = (next) => {
    node.hidden = !next;
    link.hidden = !onWeb || isUploaded();
    if (!next || next.words === described?.words) return;
    described = next;
    words.textContent = next.words;
    node.classList.toggle("won", next.won);
    buttons.hidden = !next.change;
    hint.hidden = Boolean(next.change);
    say("");
  };
  return { node, update };
}
