// The weight under the map, of the patch that was last under the pointer or of the one with the largest weight, and how
// it comes about.

import { makeValue } from "./details.js";
import { make, makeSmallButton } from "./elements.js";
import { floatsOf, formatNumber, largestOf } from "./values.js";

export class Weight {
  key = null; // patch that was last under the pointer

  // guide: the Guide, with its questions and its map.
  constructor(guide) {
    this.guide = guide;
    const open = () => this.open({ key: this.findKey() });
    this.button = makeSmallButton("", open, { class: "button small how" });
    this.detail = make("section", {
      class: "detail",
      "aria-label": "How this weight comes about",
      hidden: true,
      onkeydown: (event) => {
        if (event.key === "Escape") this.close();
      },
    });
  }

  findKey() {
    if (this.key) return this.key;
    const { cols, values } = this.guide.findMap().panel();
    const { pinned } = this.guide.looking;
    const weights = floatsOf(values);
    const query = pinned && pinned[0] * cols + pinned[1];
    const others = weights.filter((_, at) => !pinned || at !== query);
    const most = weights.indexOf(largestOf(others));
    return [Math.floor(most / cols), most % cols];
  }

  // Writes the question of the button.
  draw() {
    this.button.hidden = !this.guide.canAsk("value");
    if (this.button.hidden) {
      this.detail.hidden = true;
      return;
    }
    const [row, col] = this.findKey();
    const { values, cols } = this.guide.findMap().panel();
    const weight = formatNumber(floatsOf(values)[row * cols + col]);
    this.button.textContent = `${weight} of the attention on row ${row}, column ${col}: how?`;
  }

  close = () => {
    this.detail.hidden = true;
    this.detail.replaceChildren();
    this.button.focus();
  };

  // Asks how a weight comes about. content: its key, [row, column].
  open = (content) => {
    this.key = content.key;
    this.draw();
    if (this.detail.hidden) this.detail.replaceChildren();
    this.detail.hidden = false;
    this.guide.ask("value", content);
  };

  receive(answer, base) {
    const fresh = !this.detail.firstChild;
    const focused = this.detail.querySelector(".picture:focus");
    this.detail.replaceChildren(...makeValue(answer, base, this.open, this.close));
    if (fresh) this.detail.scrollIntoView({ block: "nearest" });
    if (focused) this.detail.querySelector(".picture").focus();
  }

  // Asks again after a frame with other weights.
  update() {
    this.draw();
    if (!this.detail.hidden && !this.guide.isWaiting()) {
      this.guide.ask("value", { key: this.findKey() });
    }
  }
}
