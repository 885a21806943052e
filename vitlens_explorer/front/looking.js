// The map that follows the pointer, and the first gesture: the map wanders over some patches when a page opens.

import { ALONE, STILL, isInSession, keepInSession } from "./elements.js";
import { isEqual } from "./values.js";

const PAUSE = 84; // milliseconds between two maps that follow the pointer: 12 in a second
const GLANCE = 900; // milliseconds for which the first gesture shows the map of a patch
const LINKED = Boolean(location.hash); // the page was opened by a link to a state
const GLANCED = "vitlens-glanced"; // key of the session: the first gesture has been shown

export class Looking {
  target = null; // patch whose map is to be shown
  asked = null; // patch of the question without an answer
  seen = null; // patch of the last question
  last = 0; // time of the last question
  pinned = null; // query of the last frame
  glances = null; // patches that the first gesture is still to show

  // guide: the Guide, with its questions and its map.
  constructor(guide) {
    this.guide = guide;
  }

  get isIdle() {
    const { target, seen, pinned } = this;
    return !target || isEqual(target, seen) || isEqual(target, pinned);
  }

  // Asks for the map of the target.
  ask() {
    const { guide, target } = this;
    if (this.isIdle || this.asked || guide.isWaiting()) return;
    const rest = guide.model.near ? 0 : this.last + PAUSE - performance.now();
    if (rest > 0) {
      setTimeout(() => this.ask(), rest);
      return;
    }
    this.asked = target;
    this.seen = target;
    this.last = performance.now();
    guide.ask("look", { row: target[0], col: target[1] });
  }

  // Shows the map of a patch, or with null that of the frame.
  lookFrom(patch) {
    this.target = patch;
    if (patch && !isEqual(patch, this.pinned)) {
      this.ask();
      return;
    }
    this.seen = null;
    this.guide.findMap()?.peek(null);
  }

  stop = () => this.lookFrom(null);

  receive(answer, values, colors) {
    this.asked = null;
    const isOfQuery = Boolean(answer.selected); // false if the view has changed since the question
    if (this.target && isOfQuery) {
      this.guide.findMap().peek({ ...answer, values, scale: { ...answer.scale, colors } });
    }
    this.ask();
  }

  // Shows the patches of the first gesture one after the other, until the user does anything.
  glance() {
    if (!this.glances) return;
    if (!this.glances.length || !this.guide.canAsk("look")) {
      this.endGlances();
      return;
    }
    this.lookFrom(this.glances.shift());
    setTimeout(() => this.glance(), GLANCE);
  }

  // Starts the first gesture, once in a session. findStrongest(): the patch with the largest weight.
  startGlances(findStrongest) {
    const { guide, pinned } = this;
    const isFirst = ALONE && !LINKED && !isInSession(GLANCED);
    if (!isFirst || STILL.matches || !guide.canAsk("look") || !pinned) return;
    keepInSession(GLANCED);
    const { rows, cols } = guide.findMap().panel();
    const [row, col] = pinned;
    const middle = [Math.floor(0.7 * rows), Math.floor(0.5 * cols)];
    this.glances = [findStrongest(), [row, cols - 1 - col], middle];
    guide.root.classList.add("glancing");
    setTimeout(() => this.glance(), GLANCE);
  }

  endGlances = () => {
    if (!this.glances) return;
    this.glances = null;
    this.guide.root.classList.remove("glancing");
    this.stop();
  };

  // Takes the query of a new frame.
  afterDrawing(selected) {
    if (!this.guide.canAsk("look") || !isEqual(selected, this.pinned)) this.endGlances();
    this.pinned = selected;
    this.seen = null;
  }
}
