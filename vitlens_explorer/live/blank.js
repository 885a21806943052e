// The page without a model: its one screen says what to drop, until a model was opened.

import { make, makeButton, makeSmallButton } from "../front/elements.js";
import { chooseModel, holdsModel, readDrop } from "../front/models.js";
import { say } from "../in_page/numbers.js";
import { startLive } from "./page.js";

// The parts of the screen: {node, report(text, share), fail(sentence)}. take({files, folder}) opens files.
function makeBlank(take, cancel) {
  const alert = make("p", { class: "alert", role: "alert" });
  const amount = make("span", { role: "status" });
  const meter = make("progress", { "aria-label": "Progress" });
  const running = make(
    "p",
    { class: "progress", hidden: true },
    amount,
    meter,
    makeSmallButton("Cancel", cancel),
  );
  const buttons = make(
    "p",
    { class: "tools" },
    makeButton("Choose files", () => chooseModel(take)),
    makeButton("Choose a folder", () => chooseModel(take, true)),
  );
  const zone = make(
    "section",
    { class: "zone", "aria-label": "Files of a model" },
    make("p", { class: "drop" }, say("blank drop")),
    buttons,
    running,
    alert,
    make("p", {}, say("blank private")),
  );
  const notes = ["blank files", "blank kinds", "blank more"];
  const node = make(
    "div",
    { class: "vitlens blank" },
    make("h1", { class: "headline" }, say("blank")),
    make("p", { class: "lead" }, say("lead")),
    zone,
    ...notes.map((name) => make("p", {}, say(name))),
  );
  const fail = (sentence) => {
    running.hidden = true;
    buttons.inert = false;
    alert.textContent = sentence;
  };
  const report = (text, share) => {
    alert.textContent = "";
    running.hidden = false;
    buttons.inert = true;
    amount.textContent = `${text} …`;
    if (share) meter.value = share;
    else meter.removeAttribute("value");
  };
  return { node, report, fail };
}

// Shows the screen. Resolves to the page of PageSource when a model was opened.
export async function openBlank(stored, element) {
  const live = await startLive(stored);
  let isOpening = false;
  return new Promise((done) => {
    const take = async ({ files, folder }) => {
      if (isOpening) return;
      isOpening = true;
      try {
        await live.open(files, folder, blank.report);
        await live.showFirst();
        for (const [event, handler] of Object.entries(handlers)) {
          document.removeEventListener(event, handler);
        }
        done(stored);
      } catch (error) {
        blank.fail(error.message);
      }
      isOpening = false;
    };
    const hold = (event) => {
      event.preventDefault();
      blank.node.classList.add("dropping");
    };
    const leave = ({ relatedTarget }) => {
      if (!relatedTarget) blank.node.classList.remove("dropping");
    };
    const drop = (event) => {
      event.preventDefault(); // the browser would leave the page for the file
      blank.node.classList.remove("dropping");
      const { dataTransfer } = event;
      if (holdsModel(dataTransfer)) {
        readDrop(dataTransfer).then(take, () => blank.fail(say("blank folder")));
      } else blank.fail(say("blank photo"));
    };
    const blank = makeBlank(take, () => live.cancel());
    const handlers = { dragover: hold, dragleave: leave, drop };
    for (const [event, handler] of Object.entries(handlers)) {
      document.addEventListener(event, handler);
    }
    element.replaceChildren(blank.node);
  });
}
