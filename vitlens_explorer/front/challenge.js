// The challenge: heads off until the model sees something else, and a picture of what that did.

import { make } from "./elements.js";
import { makeCopies } from "./share.js";

const HINT =
  "Click one of the small maps, and then “Turn head off” below them. " +
  "Sorted by effect, the heads that matter come first.";

// The sentence of the challenge with its buttons. findMap: the canvas of the map. isUploaded: of the photo, which links
// do not have.
export function makeChallenge(model, findMap, isUploaded) {
  let described;
  const words = make("p", { class: "words", "aria-live": "polite" });
  const hint = make("p", { class: "note" }, HINT);
  const copies = makeCopies({
    model,
    describe: () => described,
    findMap,
    isUploaded,
    name: "vitlens-challenge.png",
  });
  const { picture, link, said } = copies;
  const buttons = make("p", { class: "buttons" }, picture, " ", link, " ", said);
  const node = make("section", { class: "challenge" }, words, hint, buttons);
  // hasMaps: the small maps are there.
  const update = (next, hasMaps) => {
    node.hidden = !next;
    hint.hidden = !hasMaps || Boolean(next?.change);
    copies.update();
    if (!next || next.words === described?.words) return;
    described = next;
    words.textContent = next.words;
    node.classList.toggle("won", next.won);
    buttons.hidden = !next.change;
  };
  return { node, update };
}
