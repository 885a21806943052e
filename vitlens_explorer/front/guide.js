// What guides a user: the tour, the map that follows the pointer, the opened weight, and playing through the layers.

import { valuesOf } from "./address.js";
import { ALONE, STILL, make, makeButton, makeUploader, nextNumber } from "./elements.js";
import { Looking } from "./looking.js";
import { readPixels } from "./pictures.js";
import { layersOf, makePlayer } from "./player.js";
import { makeTour } from "./tour.js";
import { isEqual } from "./values.js";
import { Weight } from "./weight.js";

const FOLLOWED = ["layer", "head", "row", "column", "off", "way", "whole"]; // controls that the tour follows
const HEADS_OF_EXPLORER =
  "The explorer, vitlens_explorer.explore, turns heads off and compares them.";

export class Guide {
  numbers = {}; // of the last question of each kind
  opens = false; // the tour was asked for, and has not opened
  toured = null; // photo and values of the last question
  shown = null; // photo of the tour
  head = 0; // of the tour
  place = ""; // selector of the part that is shown after the tour

  // panels: of the page, by name. takePhoto: uploads a photo.
  constructor({ model, root, messages, takePhoto, panels }) {
    this.model = model;
    this.root = root;
    this.send = messages.send;
    this.isWaiting = messages.isWaiting;
    this.takePhoto = takePhoto;
    this.panels = panels;
    this.looking = new Looking(this);
    this.weight = new Weight(this);
    this.player = makePlayer(() => this.findControl("layer"), this.send);
    this.actions = make("div", { class: "actions" }, this.player.button, this.weight.button);
    this.tour = makeTour(model, root, this.makeActs(), (about) => this.makeNext(about));
    this.tourButton = makeButton("Tour", () => this.openTour());
    root.append(this.tour.dialog);
    this.listen();
  }

  ask(kind, content) {
    this.numbers[kind] = nextNumber();
    this.model.send({ ask: kind, number: this.numbers[kind], ...content }, undefined, []);
  }

  canAsk(kind) {
    return Boolean(this.model.get("frame").asks?.includes(kind));
  }

  findControl(name) {
    return this.model.get("frame").controls.find((each) => each.name === name);
  }

  findMap() {
    return this.panels.get("picture");
  }

  isOverMap({ target }) {
    return this.findMap()?.node.querySelector(".picture").contains(target);
  }

  // ---------------------------------------------------------------- the pointer

  listen() {
    const { root, looking, player } = this;
    this.keys = ALONE ? document : root;
    this.keys.addEventListener("keydown", player.onSpace, true);
    root.addEventListener("pointermove", (event) => this.followPointer(event));
    root.addEventListener("pointerleave", looking.stop);
    root.addEventListener("keydown", looking.stop);
    root.addEventListener("pointerdown", (event) => this.openOnShift(event), true);
    for (const event of ["pointermove", "pointerdown", "keydown"]) {
      root.addEventListener(event, looking.endGlances);
    }
  }

  stop() {
    this.keys.removeEventListener("keydown", this.player.onSpace, true);
  }

  followPointer(event) {
    const wanted = this.canAsk("look") && this.findControl("hover")?.value;
    const follows = wanted && event.pointerType !== "touch" && !STILL.matches;
    const cell = this.isOverMap(event) && !event.buttons ? this.findMap().cell() : null;
    if (cell && (event.shiftKey || !follows)) this.weight.key = cell;
    this.looking.lookFrom(follows && !event.shiftKey ? cell : null);
    this.weight.draw();
  }

  // Opens the weight on a patch that was clicked with Shift.
  openOnShift(event) {
    if (!this.actions.contains(event.target) && !this.isOverMap(event)) this.player.pause();
    if (!event.shiftKey || !this.canAsk("value") || !this.isOverMap(event)) return;
    event.stopPropagation(); // the query stays
    const cell = this.findMap().cell();
    if (cell) this.weight.open({ key: cell });
  }

  // ---------------------------------------------------------------- the tour

  // What is chosen in the tour is set in the explorer, and the tour then follows.
  makeActs() {
    const { send } = this;
    return {
      patch: ([row, column]) => send({ set: { row, column } }),
      key: (patch) => this.askTour({ key: patch, head: this.head }),
      head: (chosen) => send({ set: { view: "attention", head: chosen } }),
      layer: (layer) => send({ set: { layer } }),
      layers: () => layersOf(this.findControl("layer")),
    };
  }

  // The values that the tour shows.
  findFollowed() {
    const frame = this.model.get("frame");
    const values = valuesOf(frame);
    const others = FOLLOWED.map((name) => values[name] ?? null);
    return { photo: [frame.models || 0, values.photograph], others };
  }

  askTour(content = {}) {
    this.toured = this.findFollowed();
    this.ask("tour", content);
  }

  openTour() {
    this.opens = true;
    this.askTour();
  }

  closeTour() {
    this.opens = false;
    this.tour.dialog.close();
  }

  receiveTour(answer, base) {
    if (!this.opens && !this.tour.dialog.open && !this.model.get("frame").tour) return;
    const restarts = this.opens || !isEqual(this.shown, this.toured.photo);
    this.opens = false;
    this.shown = this.toured.photo;
    this.head = answer.value.head;
    this.tour.show(answer, base, restarts);
  }

  // Ends the tour, sets values of the explorer, and shows a part of it.
  leaveTour(values, part) {
    this.closeTour();
    this.place = part;
    this.send({ set: { view: "attention", ...values } });
  }

  // Shows the part that a button of the tour has chosen.
  showPlace() {
    if (!this.place || this.isWaiting()) return;
    const node = this.root.querySelector(this.place);
    this.place = "";
    node?.scrollIntoView({ block: "nearest" });
    node?.focus({ preventScroll: true });
  }

  // Buttons of what to try after the tour of a layer, as far as this page can do it.
  makeNext({ layer, value }) {
    const frame = this.model.get("frame");
    const off = this.findControl("off")?.value;
    const own = [layer, value.head];
    const isOn = off && !off.some((each) => isEqual(each, own));
    const turnOff = () => this.leaveTour({ off: [...off, own] }, ".challenge");
    const compare = () => this.leaveTour({}, ".mosaic .stage");
    const takeOwn = (source) => {
      if (!frame.tour) this.closeTour();
      this.takePhoto(source);
    };
    const turner = makeButton(`Turn off head ${value.head}`, turnOff, {
      title: `Turn off head ${value.head} of layer ${layer}, and see what the model then answers`,
    });
    const comparer = makeButton("Compare two heads", compare, {
      title: "Click one of the small maps, and then another",
    });
    const next = [];
    if (isOn && !frame.tour) next.push(turner);
    if (frame.uploads) next.push(makeUploader(takeOwn, "Upload your own photo"));
    if (frame.tour) next.push(make("span", { class: "note" }, HEADS_OF_EXPLORER));
    else next.push(comparer);
    return next;
  }

  // ---------------------------------------------------------------- frames and answers

  afterDrawing() {
    const frame = this.model.get("frame");
    this.tourButton.hidden = !this.canAsk("tour");
    const layer = this.findControl("layer");
    this.player.button.hidden = !frame.asks || !layer || layer.hidden || layer.disabled;
    const map = this.findMap();
    if (!map) return;
    this.drawUnderMap(map);
    this.player.continueAfter(this.isWaiting);
    const isShown = frame.tour || this.tour.dialog.open;
    const isOld = !isEqual(this.findFollowed(), this.toured);
    if (isShown && !this.isWaiting() && isOld) this.askTour();
    this.showPlace();
  }

  // The buttons and the opened weight under the map, and the map that follows the pointer.
  drawUnderMap(map) {
    const { looking, weight } = this;
    if (!weight.button.isConnected) map.node.querySelector(".beneath").after(this.actions);
    if (!weight.detail.isConnected) map.node.append(weight.detail);
    const { selected, rows, cols } = map.panel();
    const isOutside = (patch) => patch?.[0] >= rows || patch?.[1] >= cols;
    if (!isEqual(selected, looking.pinned) || [weight.key, looking.target].some(isOutside)) {
      weight.key = null;
      looking.target = null;
    }
    looking.afterDrawing(selected);
    weight.update();
    looking.ask();
    looking.startGlances(() => weight.findKey());
  }

  async receive({ ask: kind, number, answer }, buffers) {
    const colors = buffers.at(-1);
    if (kind === "look") {
      this.looking.receive(answer, buffers[0], colors);
      return;
    }
    const { whole } = await readPixels(this.model.get("pictures").picture);
    if (number !== this.numbers[kind] || answer.problem) return;
    if (kind === "tour") this.receiveTour({ ...answer, colors }, whole);
    else if (!this.weight.detail.hidden) this.weight.receive({ ...answer, colors }, whole);
  }
}
