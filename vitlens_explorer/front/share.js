// What a user takes along: a picture to paste into a message, a link, and files.

import { ALONE, download, make, makeSmallButton } from "./elements.js";

const CARD = [1200, 630]; // pixels of the picture, the size of previews of links
const PHOTO = 550; // side of the map in it
const ON_WEB = ALONE && location.protocol.startsWith("http");

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

// Frames the query on a map that was drawn in a box.
function drawFrame(context, { selected, cell }, { left, top, width, height }) {
  const [row, column] = selected;
  const sides = [cell[1] * width, cell[0] * height];
  const place = [left + column * sides[0], top + row * sides[1], ...sides];
  context.strokeStyle = "black";
  context.lineWidth = 6;
  context.strokeRect(...place);
  context.strokeStyle = "white";
  context.lineWidth = 3;
  context.strokeRect(...place);
}

// The picture as a PNG file: the map of a frame, a change in large, such as "56% → 12%" or "", and a sentence.
async function drawCard({ words, change }, map, { model, panels }) {
  const [width, height] = CARD;
  const canvas = new OffscreenCanvas(width, height);
  const context = canvas.getContext("2d");
  context.fillStyle = "white";
  context.fillRect(0, 0, width, height);
  const scale = PHOTO / Math.max(map.width, map.height);
  const box = { left: 40, top: 40, width: scale * map.width, height: scale * map.height };
  context.drawImage(map, box.left, box.top, box.width, box.height);
  if (panels[0].selected) drawFrame(context, panels[0], box);
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

// Buttons that copy a picture and the link of the page: {picture, link, said, update}. describe(): the {words, change}
// of the picture. findMap(): its canvas. isUploaded(): true for a photo that links do not have. name: of the file of a
// picture that cannot be copied.
export function makeCopies({ model, describe, findMap, isUploaded, name }) {
  const said = make("span", { class: "note", role: "status" });
  const say = (text) => {
    said.textContent = text;
  };
  const copyPicture = async () => {
    const picture = await drawCard(describe(), findMap(), model.get("frame"));
    try {
      await navigator.clipboard.write([new ClipboardItem({ "image/png": picture })]);
      say("Copied. Paste it into a message.");
    } catch {
      download(name, await picture.arrayBuffer());
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
  const picture = makeSmallButton("Copy picture", copyPicture);
  const link = makeSmallButton("Copy link", copyLink);
  const update = () => {
    link.hidden = !ON_WEB || isUploaded();
    say("");
  };
  return { picture, link, said, update };
}

// The fold with all ways to take along what is shown: {node, update}. request(name): asks for a file.
export function makeShare({ model, request, findMap, isUploaded }) {
  const describe = () => {
    const [panel] = model.get("frame").panels;
    return { words: panel.plain || panel.words, change: "" };
  };
  const copies = makeCopies({ model, describe, findMap, isUploaded, name: "vitlens.png" });
  const makeFile = (text, file) => makeSmallButton(text, () => request(file));
  const zip = makeFile("Save", "save");
  const page = makeFile("Save page", "page");
  const photo = makeFile("Save photo page", "photo");
  const rows = [
    [copies.picture, "The photo with its map and the sentence below it"],
    [copies.link, "Opens this state"],
    [zip, "The map, its numbers and the settings, as a zip file"],
    [photo, "One file with this photo and its maps, without the model"],
    [page, "One file that opens in a browser, without Python"],
  ].map(([button, words]) => make("p", {}, button, make("span", { class: "note" }, words)));
  const list = make("div", { class: "ways" }, ...rows, copies.said);
  const summary = make("summary", { class: "button" }, "Save or share");
  const onkeydown = (event) => {
    if (event.key !== "Escape" || !node.open) return;
    node.open = false;
    summary.focus();
  };
  const onfocusout = ({ relatedTarget }) => {
    if (relatedTarget && !node.contains(relatedTarget)) node.open = false;
  };
  // Moves the list to the left where it would reach beyond the right edge.
  const ontoggle = () => {
    const { right } = node.closest(".vitlens").getBoundingClientRect();
    const room = right - node.getBoundingClientRect().left;
    list.style.left = `${Math.min(0, room - list.offsetWidth)}px`;
  };
  const events = { onkeydown, onfocusout, ontoggle };
  const node = make("details", { class: "sharing", ...events }, summary, list);

  const update = (frame) => {
    node.hidden = !frame.saves;
    page.hidden = !frame.pages;
    photo.hidden = !frame.photoPages;
    copies.update();
    for (const row of rows) row.hidden = row.firstChild.hidden;
  };
  return { node, update };
}
