// The maps of all heads from the query, a column for each layer, or their mean attention distances. A click or an arrow
// key chooses a layer and a head. A right click or X switches heads off.
//
// Places are [layer, row], with the mean and the maximum over heads in rows 0 and 1. In another order than by layer the
// heads alone are shown, from the smallest value to the largest, line by line. Cells are [column, line].

import {
  cellUnder,
  make,
  makeFrame,
  makeSmallButton,
  makeSteered,
  putImage,
  renew,
  setPressed,
} from "./elements.js";
import { bytesOf, formatNumber, isEqual, largestOf, smallestOf } from "./values.js";

const BLANK = 0x5a808080; // gray with 35 % opacity, as a pixel: a tile without a map
const LABELED = 16; // largest number of columns with numbers in their tiles, and of labels along a side
const REDUCED = 2; // rows of the mosaic before those of the heads: the mean and the maximum over heads
const SORTED_COLUMNS = 8; // of the mosaic in an order other than by layer: wide enough for the names of heads
const MOST_OFF = 24; // buttons of heads that are off
const ORDERS = {
  layer: { name: "by layer" },
  distances: { name: "by attention distance", unit: "pixels" },
  entropies: { name: "by entropy", unit: "nats" },
  effects: { name: "by effect" },
};

const HIDDEN = { "aria-hidden": "true" };
const isSame = (place) => (other) => isEqual(place, other);
const includes = (heads, head) => heads.some(isSame(head));
const makeSpans = (texts) => texts.map((text) => make("span", {}, text));

function nameOf([layer, head]) {
  return layer === "pool" ? `Pool, head ${head}` : `Layer ${layer}, head ${head}`;
}

export class Mosaic {
  described = null; // what the frame describes
  far = false; // tiles show distances
  order = "layer"; // what the user chose of ORDERS
  sorted = null; // places in the order of a statistic. null: by layer
  hovered = null; // place under the pointer
  aim = null; // chosen place without an answer yet
  cursor = null; // place of the last choice, which views without heads do not keep
  off = []; // heads that are off, [layer, head] each

  constructor(send) {
    this.send = send;
    this.makeStage();
    this.makeActions();
    this.list = make("div", {
      class: "actions",
      role: "group",
      "aria-label": "Heads that are off",
    });
    this.title = make("h3");
    this.note = make("p", { class: "note" });
    const parts = [this.title, this.tiles, this.actions, this.list, this.note];
    this.node = make("div", { class: "mosaic" }, ...parts);
  }

  makeStage() {
    this.canvas = make("canvas");
    this.marks = make("svg", { ...HIDDEN, preserveAspectRatio: "none" });
    const move = (down, across) => this.move(down, across);
    const attributes = {
      class: "stage",
      onclick: (event) => this.choose(this.placeUnder(event)),
      oncontextmenu: (event) => {
        event.preventDefault();
        this.turn(this.placeUnder(event));
      },
      onpointermove: (event) => this.hover(this.placeUnder(event)),
      onpointerleave: () => this.hover(null),
    };
    this.stage = makeSteered(attributes, move, this.canvas, this.marks);
    this.stage.addEventListener("keydown", (event) => {
      if (["x", "X", "Delete"].includes(event.key)) this.turn(this.findChosen());
    });
    this.down = make("div", { class: "down", ...HIDDEN });
    this.across = make("div", { class: "across", ...HIDDEN });
    this.corner = make("div", { class: "corner", ...HIDDEN }, "layer");
    const sides = [this.down, this.across, this.corner];
    this.tiles = make("div", { class: "tiles" }, this.stage, ...sides);
  }

  makeActions() {
    this.near = makeSmallButton("Attention", () => this.showDistances(false));
    this.distant = makeSmallButton("Distance", () => this.showDistances(true));
    const group = { class: "modes", role: "group", "aria-label": "Tiles show" };
    const mode = make("span", group, this.near, this.distant);
    const onchange = () => this.sort(Object.keys(ORDERS)[this.menu.selectedIndex]);
    const choices = Object.values(ORDERS).map(({ name }) => make("option", {}, name));
    this.menu = make("select", { "aria-label": "Order of the heads", onchange }, ...choices);
    this.measurer = makeSmallButton("Measure effects", () => this.measureEffects());
    this.turner = makeSmallButton("", () => this.turn(this.findChosen()));
    this.reset = makeSmallButton("Turn all on", () => this.turnAllOn());
    const kind = { class: "actions" };
    const buttons = [this.measurer, this.turner, this.reset];
    this.actions = make("div", kind, mode, this.menu, ...buttons);
  }

  // Shows what a frame describes. isWaiting(): whether the frame is older than the user's choice.
  update(described, isWaiting) {
    this.node.hidden = !described;
    if (!described) return;
    this.described = described;
    if (!isWaiting()) {
      this.aim = null;
      this.off = described.off || [];
    }
    // Another model may have fewer layers and heads.
    const exists = (place) => place && this.isInside([place[0], Math.max(place[1], 0)]);
    if (!exists(this.hovered)) this.hovered = null;
    if (!exists(this.aim)) this.aim = null;
    const isThere = ([layer, head]) => layer === "pool" || exists([layer, head + REDUCED]);
    this.off = this.off.filter(isThere);
    this.draw();
  }

  // ---------------------------------------------------------------- places and cells

  findChosen() {
    if (this.aim) return this.aim;
    const { layer, head, picks } = this.described;
    return [layer, picks.findIndex((pick) => pick !== null && pick === head)];
  }

  // The places that the choice frames in a sorted mosaic: a head, or all of a layer, also for their mean or maximum.
  listChosen() {
    const [layer, row] = this.findChosen();
    return this.sorted.filter(([k, r]) => k === layer && (row < REDUCED || r === row));
  }

  countColumns() {
    if (this.sorted) return Math.min(SORTED_COLUMNS, this.sorted.length);
    return this.described.layers + (this.described.pool ? 1 : 0);
  }

  countLines() {
    if (this.sorted) return Math.ceil(this.sorted.length / this.countColumns());
    return this.described.names.length;
  }

  isInside([k, r]) {
    const { layers, pool, names } = this.described;
    if (k === layers) return r >= REDUCED && r < REDUCED + pool;
    return k >= 0 && k < layers && r >= 0 && r < names.length;
  }

  listHeads() {
    const { layers, names } = this.described;
    const heads = names.slice(REDUCED);
    const columns = [...Array(layers).keys()];
    return columns.flatMap((k) => heads.map((_, head) => [k, head + REDUCED]));
  }

  listPlaces() {
    if (this.sorted) return this.sorted;
    const columns = [...Array(this.countColumns()).keys()];
    const places = columns.flatMap((k) => this.described.names.map((_, r) => [k, r]));
    return places.filter((place) => this.isInside(place));
  }

  cellOf(place) {
    if (!this.sorted) return place;
    const at = this.sorted.findIndex(isSame(place));
    return at < 0 ? null : [at % SORTED_COLUMNS, Math.floor(at / SORTED_COLUMNS)];
  }

  // The place of a cell, or null.
  placeAt([column, line]) {
    const isColumn = column >= 0 && column < this.countColumns();
    if (this.sorted) return (isColumn && this.sorted[line * SORTED_COLUMNS + column]) || null;
    return this.isInside([column, line]) ? [column, line] : null;
  }

  placeUnder(event) {
    const shares = [1 / this.countLines(), 1 / this.countColumns()];
    const [line, column] = cellUnder(event, this.canvas, shares);
    return this.placeAt([column, line]);
  }

  // The heads of a tile: one, or those of its layer for the rows of mean and maximum.
  headsOf([k, r]) {
    if (k === null) return [];
    const { layers, pool, names } = this.described;
    const layer = k < layers ? k : "pool";
    if (r >= REDUCED) return [[layer, r - REDUCED]];
    const count = layer === "pool" ? pool : names.length - REDUCED;
    return Array.from({ length: count }, (_, head) => [layer, head]);
  }

  // Sorts the heads by a statistic, if its numbers are there. Heads of equal values are in the order of layers.
  sortHeads() {
    const values = this.order === "layer" ? null : this.described[this.order];
    const valueOf = ([k, r]) => values[k][r - REDUCED];
    this.sorted = values ? this.listHeads().sort((a, b) => valueOf(a) - valueOf(b)) : null;
  }

  // ---------------------------------------------------------------- what a user does

  set(values) {
    this.draw();
    this.send({ set: values });
  }

  sort(order) {
    this.order = order;
    if (this.lacksEffects()) this.measureEffects();
    this.draw();
  }

  // True while the chosen order needs the effects of heads, which take a forward each.
  lacksEffects() {
    const { effects, measures } = this.described;
    return this.order === "effects" && measures && !effects;
  }

  measureEffects() {
    this.send({ press: "effects" });
  }

  showDistances(far) {
    this.far = far;
    this.draw();
  }

  isOff(head) {
    return includes(this.off, head);
  }

  // Turns the heads of a place off, or on if all of them are off.
  turn(place) {
    if (!this.described.off || !place) return; // saved pages run no model
    const heads = this.headsOf(place);
    const others = this.off.filter((each) => !includes(heads, each));
    this.off = heads.every((head) => this.isOff(head)) ? others : [...others, ...heads];
    this.set({ off: this.off });
  }

  turnAllOn() {
    this.off = [];
    this.set({ off: [] });
  }

  turnOn(head) {
    this.off = this.off.filter((each) => !isEqual(each, head));
    this.set({ off: this.off });
    if (!this.off.length) this.stage.focus(); // the last button is gone
  }

  choose(place) {
    if (!place || !this.isInside(place)) return;
    const [layer, row] = place;
    this.cursor = place;
    if (layer === this.described.layers) {
      this.turn(place); // heads of the pool have no map
      return;
    }
    const head = this.described.picks[row];
    this.aim = head === null ? [layer, -1] : place;
    this.set(head === null ? { layer } : { layer, head });
  }

  // Goes on by rows and columns.
  move(down, across) {
    if (this.sorted) {
      this.moveSorted(down, across);
      return;
    }
    const [k, r] = this.findChosen();
    if (k === null) this.choose([0, REDUCED]);
    else this.choose([k + across, r < 0 ? 0 : r + down]);
  }

  // Goes through the heads of a sorted mosaic, to its ends.
  moveSorted(down, across) {
    const chosen = this.listChosen();
    const from = chosen.find(isSame(this.cursor)) || chosen[0];
    if (!from) {
      this.choose(this.sorted[0]);
      return;
    }
    const to = this.sorted.findIndex(isSame(from)) + across + down * SORTED_COLUMNS;
    this.choose(this.sorted[to]);
  }

  hover(place) {
    this.hovered = place;
    const uniform = `Uniform attention: ${formatNumber(this.described.uniform)} pixels.`;
    const sentences = [`${this.describePlace(place || this.findChosen())}.`];
    if (this.far) sentences.push(uniform);
    if (this.sorted) sentences.push("Tiles are named layer.head.");
    this.note.textContent = sentences.join(" ");
  }

  // ---------------------------------------------------------------- words

  describePlace([k, r]) {
    const { layers, names, tops, distances, entropies } = this.described;
    if (k === null) return "All heads of all layers";
    if (k === layers) return `Pool, head ${r - REDUCED}`;
    if (r < 0) return `Layer ${k}`;
    const weight = `largest weight ${formatNumber(tops[k][r])}`;
    if (r < REDUCED) return `Layer ${k}, ${names[r]} over heads: ${weight}`;
    const head = r - REDUCED;
    const parts = [`Layer ${k}, head ${head}: ${weight}`];
    if (distances) {
      parts.push(`mean distance ${formatNumber(distances[k][head])} pixels`);
      parts.push(`entropy ${formatNumber(entropies[k][head])} nats`);
    }
    if (this.isOff([k, head])) parts.push("off");
    else if (this.described.effects) parts.push(this.describeEffect(k, head));
    return parts.join(", ");
  }

  // What turning a head off alone does to the likeliest class.
  describeEffect(k, head) {
    const { effects, affected } = this.described;
    return `without it “${affected}” changes by ${formatNumber(effects[k][head])}`;
  }

  // The order of a sorted mosaic, and its ends.
  describeOrder() {
    if (!this.sorted) return "";
    const values = this.described[this.order].flat();
    const { name, unit = `of “${this.described.affected}”` } = ORDERS[this.order];
    const ends = `${formatNumber(smallestOf(values))} to ${formatNumber(largestOf(values))}`;
    return `, ${name}, ${ends} ${unit}`;
  }

  // ---------------------------------------------------------------- drawing

  draw() {
    this.sortHeads();
    this.drawTiles();
    this.drawMarks();
    this.drawLabels();
    this.drawActions();
    renew(this.list, this.off.length ? this.off : null, (heads) => this.makeList(heads));
    this.hover(this.hovered);
  }

  // Sizes of the canvas in cells. Between tiles is a gap of one.
  measure() {
    const wide = this.described.cols + 1;
    const high = this.described.rows + 1;
    const width = this.countColumns() * wide - 1;
    const height = this.countLines() * high - 1;
    return { wide, high, width, height };
  }

  findLargestDistance() {
    const { uniform, distances } = this.described;
    return largestOf([uniform, ...(distances || []).flat()]);
  }

  distanceOf([k, r]) {
    return this.described.distances?.[k]?.[r - REDUCED];
  }

  drawTiles() {
    const { layers, rows, cols, names } = this.described;
    const { wide, high, width, height } = this.measure();
    const maps = bytesOf(this.described.maps);
    const colors = new Uint32Array(bytesOf(this.described.colors).slice().buffer);
    const most = this.findLargestDistance();
    const image = new ImageData(width, height);
    const out = new Uint32Array(image.data.buffer);
    for (const place of this.listPlaces()) {
      const [k, r] = place;
      const distance = this.distanceOf(place);
      let color = 0; // of the whole tile, 0 for its map
      if (k === layers || (this.far && distance === undefined)) color = BLANK;
      else if (this.far) color = colors[Math.round((255 * distance) / most)];
      const [column, line] = this.cellOf(place);
      let i = (k * names.length + r) * rows * cols;
      for (let y = 0; y < rows; y += 1) {
        const start = (line * high + y) * width + column * wide;
        for (let x = 0; x < cols; x += 1) {
          out[start + x] = color || colors[maps[i]];
          i += 1;
        }
      }
    }
    putImage(this.canvas, image);
  }

  // The box of a place on the canvas.
  boxOf(place) {
    const [column, line] = this.cellOf(place);
    const { wide, high } = this.measure();
    const { rows, cols } = this.described;
    return { x: column * wide, y: line * high, width: cols, height: rows };
  }

  // Texts in the tiles, crosses over the heads that are off, and a frame around the chosen place.
  drawMarks() {
    const { width, height } = this.measure();
    const crosses = this.off.flatMap((head) => this.makeCross(head));
    this.marks.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.marks.replaceChildren(...this.makeTexts(), ...crosses, ...this.makeChosen());
  }

  // Names of heads if they are sorted, else the distances that the tiles show.
  makeTexts() {
    const { layers, distances } = this.described;
    if (this.sorted) return this.sorted.map((place) => this.makeName(place));
    if (!this.far || !distances || this.countColumns() > LABELED) return [];
    const isHead = ([k, r]) => k < layers && r >= REDUCED;
    const places = this.listPlaces().filter(isHead);
    const most = this.findLargestDistance();
    return places.map((place) => this.makeDistance(place, most));
  }

  makeDistance(place, most) {
    const { x, y, width, height } = this.boxOf(place);
    const value = this.distanceOf(place);
    const kind = value > 0.6 * most ? "dark" : "";
    const at = { x: x + width / 2, y: y + height / 2 };
    return make("text", { ...at, "font-size": 0.42 * width, class: kind }, Math.round(value));
  }

  makeName(place) {
    const { x, y, width, height } = this.boxOf(place);
    const [k, r] = place;
    const at = { x: x + width / 2, y: y + 0.78 * height };
    return make("text", { ...at, "font-size": 0.3 * width, class: "name" }, `${k}.${r - REDUCED}`);
  }

  makeCross([layer, head]) {
    const place = [layer === "pool" ? this.described.layers : layer, head + REDUCED];
    if (!this.cellOf(place)) return []; // sorted heads are those of layers
    const box = this.boxOf(place);
    const { x, y, width, height } = box;
    const d = `M${x} ${y}l${width} ${height}m0 ${-height}l${-width} ${height}`;
    return [make("rect", { class: "veil", ...box }), make("path", { class: "cross", d })];
  }

  // The frame around the chosen place.
  makeChosen() {
    if (this.sorted) {
      return this.listChosen().flatMap((place) => makeFrame(this.boxOf(place)));
    }
    const [layer, row] = this.findChosen();
    if (layer === null) return [];
    const box = this.boxOf([layer, Math.max(row, 0)]);
    const isWholeLayer = row < 0;
    return makeFrame(isWholeLayer ? { ...box, y: 0, height: this.measure().height } : box);
  }

  drawLabels() {
    const { layers, names, titles, off } = this.described;
    const { width, height } = this.measure();
    const step = Math.ceil(this.countColumns() / LABELED);
    const labelOf = (k) => {
      if (k === layers) return "pool";
      return k % step ? "" : k;
    };
    const columns = Array.from({ length: this.countColumns() }, (_, k) => labelOf(k));
    const rows = names.map((name, r) => (r < REDUCED || r % step === 0 ? name : ""));
    renew(this.across, this.sorted ? null : columns, makeSpans);
    renew(this.down, this.sorted ? null : rows, makeSpans);
    this.corner.hidden = Boolean(this.sorted);
    this.tiles.classList.toggle("sorted", Boolean(this.sorted));
    const counts = `--columns: ${this.countColumns()}; --rows: ${this.countLines()}`;
    this.tiles.style.cssText = `${counts}; --shape: ${width / height}`;
    this.title.textContent = titles[Number(this.far)] + this.describeOrder();
    const turns = off ? ", X turns it off or on" : "";
    const how = `Arrow keys choose a layer and a head${turns}.`;
    const chosen = this.describePlace(this.findChosen());
    this.stage.setAttribute("aria-label", `${this.title.textContent}. ${chosen}. ${how}`);
  }

  drawActions() {
    const { distances, off } = this.described;
    const [layer, row] = this.findChosen();
    const heads = this.headsOf([layer, row]);
    const single = heads.length === 1;
    const what = single ? `head ${row - REDUCED} of layer ${layer}` : `layer ${layer}`;
    const allOff = heads.every((head) => this.isOff(head));
    setPressed(this.near, !this.far);
    setPressed(this.distant, this.far);
    this.menu.selectedIndex = Object.keys(ORDERS).indexOf(this.order);
    this.menu.disabled = !distances;
    const byEffect = this.menu.options[Object.keys(ORDERS).indexOf("effects")];
    byEffect.hidden = !this.described.measures;
    byEffect.disabled = !this.described.measures;
    this.measurer.hidden = !this.lacksEffects();
    this.menu.title = distances ? "" : "Sorting needs the distances and entropies of all layers";
    this.turner.hidden = !heads.length || !off;
    this.turner.textContent = allOff ? `Turn ${what} on` : `× Turn ${what} off`;
    this.reset.hidden = !this.off.length;
  }

  // A button for each head that is off, which turns it on.
  makeList(heads) {
    const buttons = heads.slice(0, MOST_OFF).map((head) => {
      const label = `Turn on: ${nameOf(head)}`;
      const attributes = { title: label, "aria-label": label };
      return makeSmallButton(`${nameOf(head)} ×`, () => this.turnOn(head), attributes);
    });
    const rest = heads.length - buttons.length;
    return rest ? [...buttons, `and ${rest} more`] : buttons;
  }
}
