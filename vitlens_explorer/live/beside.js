// A second model beside that of the page, or the same one in another state: the same view of the same photo, from the
// same place of it. It runs in a worker of its own. Its layer and its heads are chosen alone, and all heads are on.

import { isEqual } from "../front/values.js";
import { classWords } from "../in_page/maps.js";
import { say } from "../in_page/numbers.js";
import { PageSource } from "../in_page/source.js";
import { firstState } from "./adapt.js";

const BESIDE = "beside"; // name of its panel, and of the place of its controls
const OWN = { layer: "layer_beside", head: "head_beside" }; // names of its controls on the page

// What a panel without a map has in place of one.
const NO_MAP = {
  rows: 0,
  cols: 0,
  strength: 0,
  lines: false,
  scale: null,
  ends: null,
  sinks: [],
  picks: "",
  selected: null,
  values: new DataView(new ArrayBuffer(0)),
};

const NO_CLASSES = { target: "predicted", against: "none" };

// The part of a photo that a model sees, in pixels of the photo.
function seenPart({ network }, { ready, isWhole, width, height }) {
  if (ready || isWhole || network.squeezed) return { left: 0, top: 0, width, height }; // `ready` ones are model inputs
  const share = Math.min(width, height) / network.resized;
  const seen = { width: share * network.image[1], height: share * network.image[0] };
  return { left: (width - seen.width) / 2, top: (height - seen.height) / 2, ...seen };
}

// The patch [row, column] of a model at the middle of a patch of another model, of the same photo, or the nearest one.
// from, to: {grid, part: seenPart}. Returns {place, outside: true if the model does not see the middle}.
function samePatch([row, column], from, to) {
  const { grid, part } = from;
  const shares = [
    ((row + 0.5) * grid.patch[0]) / grid.image[0],
    ((column + 0.5) * grid.patch[1]) / grid.image[1],
  ];
  const y = (part.top + shares[0] * part.height - to.part.top) / to.part.height;
  const x = (part.left + shares[1] * part.width - to.part.left) / to.part.width;
  const found = [
    Math.floor((y * to.grid.image[0]) / to.grid.patch[0]),
    Math.floor((x * to.grid.image[1]) / to.grid.patch[1]),
  ];
  const ends = [to.grid.rows - 1, to.grid.cols - 1];
  const place = found.map((at, i) => Math.min(Math.max(at, 0), ends[i]));
  return { place, outside: !isEqual(place, found) };
}

// The number of a class of one page in another, by its name, or -1.
function sameClass(k, from, to) {
  const name = from.names?.[k];
  if (name === undefined) return -1;
  const found = Object.entries(to.names || {}).find(([, other]) => other === name);
  return found ? Number(found[0]) : -1;
}

// The source of a panel that the page draws.
class PanelSource extends PageSource {
  drawLater() {}
}

export class Beside {
  clicked = null; // {own, first}: a patch that was clicked in this model's panel, and that of the first model
  problem = ""; // why there is no map
  note = ""; // what differs from the first model's map

  // live: its Live, without files yet. first: that of the first model.
  // isTwin: true for the same model in another state.
  constructor(live, first, isTwin) {
    Object.assign(this, { live, first, isTwin });
    this.source = null;
  }

  get model() {
    return this.live.stored.model;
  }

  // Its name for a person.
  get name() {
    return this.isTwin ? say("second state") : this.model;
  }

  get opened() {
    return this.isTwin ? "" : say("beside opened", { name: this.model });
  }

  // The photo as the model sees it, by the name of its panel. record: that of the first model.
  pictures(record) {
    return { [BESIDE]: this.problem ? record.picture : this.source.record.picture };
  }

  // Opens the files of the model for the photo in view.
  async open(files, folder, report, source) {
    const { live } = this;
    await live.open(files, folder, report);
    this.takePhotos();
    const photograph = await live.findReadable(source.state.photograph);
    const { layer, head } = source.state;
    const state = firstState(live.stored, { ...source.state, photograph }, source.record.grid);
    [state.view] = Object.keys(live.stored.views); // `show` computes what the view of the page needs
    state.whole = false;
    if (this.isTwin) Object.assign(state, { layer, head });
    live.keep(photograph, await live.record(photograph, state));
    live.stored.state = state;
    this.source = new PanelSource(live.stored);
  }

  close() {
    this.live.cancel();
    this.live.ask.end();
  }

  // Takes the photos of the first model.
  takePhotos() {
    const { photos, stored } = this.live;
    for (const name of [...photos.keys()]) {
      if (this.first.photos.has(name)) continue;
      photos.delete(name);
      stored.records.delete(name);
    }
    for (const [name, { file, about, uploaded, ready }] of this.first.photos) {
      if (photos.get(name)?.file === file) continue;
      photos.set(name, { file, about, uploaded, ready: this.isTwin && ready }); // an input of the same model
      this.live.dropForward(name);
    }
    this.live.listPhotos();
  }

  // Makes the state of the page that of this model too, and computes what its panel needs.
  async follow(source) {
    this.problem = "";
    this.note = "";
    try {
      await this.show(source);
    } catch (error) {
      this.problem = error.message;
    }
  }

  async show(source) {
    const { live, source: own } = this;
    const { state } = source;
    this.takePhotos();
    await live.load(state.photograph, live.isWhole(state.photograph, state));
    const isOfClass = source.view.explains || state.view === "lens";
    const lacksClasses = isOfClass && !live.stored.network.classes && !Array.isArray(state.target);
    if (lacksClasses || !(state.view in live.stored.views))
      throw Error(say("beside no view", { name: this.model }));
    own.state = {
      ...state,
      layer: state[OWN.layer],
      head: state[OWN.head],
      ...this.findQuery(state),
      off: [],
      typed: [],
      ...this.findClasses(isOfClass ? state : NO_CLASSES),
    };
    await live.prepare(own, {}, []);
  }

  // Layer and heads for the state of the page, from which `show` takes them.
  firstChoices() {
    const { layer, head } = this.source.state;
    return { [OWN.layer]: layer, [OWN.head]: head };
  }

  // What `samePatch` needs of each model.
  sides(photograph) {
    return [this.first, this.live].map((live) => {
      const photo = live.photos.get(photograph);
      return { grid: live.baseOf(photo).grid, part: seenPart(live.stored, photo) };
    });
  }

  // The query of the first model's state in this one.
  findQuery({ query, row, column, photograph }) {
    const [first, own] = this.sides(photograph);
    if (query === "readout" && own.grid.readout) return { query };
    if (query !== "patch") {
      const name = query === "readout" ? first.grid.reads : first.grid.prefix[query];
      const position = own.grid.prefix.indexOf(name);
      if (position < 0) throw Error(say("beside no query", { name: this.model, query: name }));
      return { query: position };
    }
    const { clicked } = this;
    if (clicked && isEqual(clicked.first, [row, column])) {
      return { query, row: clicked.own[0], column: clicked.own[1] };
    }
    const { place, outside } = samePatch([row, column], first, own);
    if (outside) this.note = say("beside outside", { name: this.model });
    return { query, row: place[0], column: place[1] };
  }

  // The classes of the first model's state in this one.
  findClasses({ target, against }) {
    const classes = { target, against };
    for (const [name, k] of Object.entries(classes)) {
      if (typeof k !== "number") continue;
      classes[name] = sameClass(k, this.first.stored, this.live.stored);
      if (classes[name] >= 0) continue;
      const label = this.first.stored.names?.[k] ?? String(k);
      throw Error(say("beside no class", { name: this.model, label }));
    }
    return classes;
  }

  // The patch of the first model for a click in this model's panel.
  pick(place, photograph) {
    const [first, own] = this.sides(photograph);
    const matched = samePatch(place, own, first).place;
    this.clicked = { own: place, first: matched };
    return matched;
  }

  // The three likeliest classes, or "".
  sees() {
    const { record } = this.source;
    if (!record.likeliest.length) return "";
    const classes = record.likeliest
      .slice(0, 3)
      .map((k) => classWords(record, k))
      .join(", ");
    return say("beside sees", { classes });
  }

  // The panels of both models. panel: that of the first.
  panels(panel, name) {
    const first = { ...panel, title: `${this.isTwin ? say("first state") : name}: ${panel.title}` };
    const place = { name: BESIDE, picture: BESIDE, tokens: [] };
    if (this.problem) {
      const captions = { words: this.problem, plain: "" };
      return [first, { ...panel, ...NO_MAP, ...place, title: this.name, ...captions }];
    }
    const own = this.source.panel(this.source.choice);
    const title = `${this.isTwin ? say("all on") : this.model}: ${own.title}`;
    const after = (caption) => [this.sees(), this.note, caption].filter(Boolean).join(" ");
    const captions = { words: after(own.words), plain: after(own.plain) };
    return [first, { ...own, ...place, title, ...captions }];
  }

  // The controls of layer and heads, under the panel.
  controls() {
    if (this.problem) return [];
    const own = this.source.controls().filter(({ name }) => name in OWN);
    return own.map((control) => ({ ...control, name: OWN[control.name], place: BESIDE }));
  }
}
