// A source for the front end that answers in the page, from records, in place of Python. It keeps the state, checks
// values by the controls, and makes the frame, as explorer.py does. `page` is as in docs/front-end.md.

import { putImage } from "../front/elements.js";
import { paintMap, readPixels } from "../front/pictures.js";
import { Source } from "../front/source.js";
import { bytesOf, floatsOf, isEqual, sumOf } from "../front/values.js";
import { sweep, swept } from "./attention.js";
import { explainWeight, isTourOf, wordsOfTour, tourOfRecord } from "./details.js";
import { describePanel } from "./captions.js";
import {
  MAPS,
  colorsOf,
  findExplanation,
  headsWords,
  pairOf,
  predictionBeside,
  queryRow,
  queryWords,
  scoreWords,
  tilesOfHeads,
} from "./maps.js";
import { formatFineShare, formatLikePython, formatShare, say, setWords } from "./numbers.js";

const BARS = 5; // likeliest classes in the list
const TYPED = 10; // largest number of typed classes in the menus
const STANDS_OUT = 0.3; // smallest probability of the likeliest class without a remark that none stands out
const SHARED = 0.5; // smallest probability of the three likeliest together with which the remark names it
const SIX = 6; // maps side by side
const PANEL = "picture"; // name of the model's own panel
const ORDERED = ["layer", "head", "row", "column"]; // controls whose numbers have neighbors
const ZIP_HEADER = 10; // bytes of gzip before the deflated data
const ZIP_FOOTER = 8; // bytes of gzip after it: checksum and size

// Words of a name, in lower case.
const wordsOf = (name) => name.toLowerCase().match(/[\p{L}\p{N}_]+/gu) || [];

// Index of the first layer of a record that is stored, but not swept yet, or -1.
const findUnswept = (record) => record.layers.findIndex((layer) => layer && !swept.has(layer));

export class PageSource extends Source {
  static formats = {
    number: formatLikePython,
    percent: formatShare,
    finePercent: formatFineShare,
    predictionBeside,
  };
  near = true; // answers cost no message
  answers = 0;
  turn = Promise.resolve();

  constructor(page) {
    super();
    setWords(page.words);
    this.page = page;
    this.state = { typed: [], against: "none", ...page.state };
    this.draw("");
  }

  send(content, _, buffers = []) {
    if (content.cancel) this.page.cancel?.();
    // A question waits for the messages before it, as their state is incomplete until they are answered.
    if ("ask" in content) this.turn.then(() => this.reply(content));
    else this.turn = this.turn.then(() => this.answer(content, buffers));
  }

  async answer(content, buffers) {
    const { state, record } = this;
    this.answers = Math.max(this.answers, content.number || 0);
    try {
      const problems = content.nearest ? await this.restore(content.set) : [];
      if (!content.nearest) this.take(content);
      const remark = await this.page.prepare?.(this, content, buffers);
      if (content.press === "save") await this.save(content.number);
      if (content.press === "page") await this.keep(content.number, this.page.keep);
      if (content.press === "photo") await this.keep(content.number, this.page.keepPhoto);
      if (content.press === "score") this.page.score?.(this); // other messages do not wait for it
      if (content.press === "effects") this.page.effects?.(this);
      this.draw([...problems, remark].filter(Boolean).join(" "));
    } catch (error) {
      this.state = state;
      this.page.records.set(state.photograph, record); // that of another state may have replaced it
      this.draw(error.message);
    }
  }

  // Answers a question without a drawing, as `Explorer.look_up`.
  async reply({ ask, number = 0, row, col, ...question }) {
    const { record, choice, query } = this;
    let answer;
    let buffers = [this.weightColors(0.9, (weight) => weight)];
    try {
      if (ask === "look") {
        const panel = this.panel({ ...choice, query: [row, col] });
        buffers = [panel.values, panel.scale.colors];
        answer = { ...panel, values: null, scale: { ...panel.scale, colors: null } };
      } else if (ask === "tour") {
        answer = await this.tour(question);
      } else if (ask === "names") {
        answer = { names: [...record.shares.keys()].map(record.full) };
      } else {
        answer = explainWeight(record, { ...choice, query, key: null, ...question });
      }
    } catch (error) {
      answer = { problem: error.message };
    }
    this.emit("msg:custom", { ask, number, answer }, buffers);
  }

  // The numbers of the tour. A file has those of its first state as Python computed them.
  async tour({ head = null, key = null }) {
    const { record, state } = this;
    if (key === null && isTourOf(record.tour, state)) return record.tour;
    const about = await (record.streams ? tourOfRecord(record, state) : this.page.tour(this));
    if (key === null) return about;
    const place = [state.row, state.column];
    const value = explainWeight(record, { layer: state.layer, head, query: place, key });
    const other = { ...about, value };
    return { ...other, ...wordsOfTour(other, record.grid.reads) };
  }

  // Colors of attention weights from 0 to 1.
  weightColors(strength, opacityOf = () => 1) {
    return colorsOf({ low: 0, high: 1 }, this.page.tables.maps.viridis, strength, opacityOf);
  }

  // Changes the state as a message asks for it.
  take(content) {
    const view = this.view.explains ? this.state.view : this.methods[0];
    if ("pick" in content) this.pick(content);
    else if ("why" in content) this.change({ view, target: content.why });
    else this.change(content.set || {});
  }

  // A click on a patch of a panel.
  pick({ pick, row, col }) {
    const { beside } = this.page;
    const isOther = beside && pick !== PANEL;
    const place = isOther ? beside.pick([row, col], this.state.photograph) : [row, col];
    this.change({ row: place[0], column: place[1] });
  }

  change(values) {
    const completed = this.complete(values);
    this.keepTyped([completed.target, completed.against]);
    for (const [name, value] of Object.entries(completed)) {
      this.check(name, value);
      this.state = { ...this.state, [name]: value };
    }
    this.settle();
  }

  // Sets the values of an address one by one. Those that the page does not take are set to the nearest that it takes.
  // Returns sentences about them.
  async restore(values) {
    const rejected = Object.entries(values).filter((each) => this.refusal(...each));
    if (!rejected.length) return [];
    await this.page.prepare?.(this, {}, []); // the classes of a photo are known after its forward
    const problems = [];
    for (const [name, value] of rejected) {
      const problem = this.refusal(name, value);
      if (!problem) continue;
      problems.push(problem);
      const control = this.controls().find((each) => each.name === name);
      if (control) this.setAlone(name, nearestOf(control, value));
    }
    return problems.length ? [...problems, say("nearest")] : [];
  }

  // Sets a value, and for a row or column not the query.
  setAlone(name, value) {
    this.change({ query: this.state.query, [name]: value });
  }

  // Sets a value. Returns the sentence of its refusal, or "".
  refusal(name, value) {
    const { state } = this;
    try {
      this.setAlone(name, value);
      return "";
    } catch ({ message }) {
      this.state = state;
      return message;
    }
  }

  // Values of a message with those that follow from them.
  complete(values) {
    let completed = values;
    const picks = "row" in values || "column" in values;
    if (picks && !("query" in values)) completed = { ...completed, query: "patch" };
    const typed = values.another?.trim();
    if (typed) return { ...completed, target: this.classOf(typed) };
    const hasText = this.controls().some(({ name }) => name === "another");
    if ("target" in values && hasText) return { another: "", ...completed };
    return completed;
  }

  // Keeps classes that are not in the menus, which add them.
  keepTyped(classes) {
    if (!this.page.prepare) return;
    const fresh = classes.filter((k) => this.hasClass(k) && !this.classes.includes(k));
    this.state = { ...this.state, typed: [...fresh, ...this.state.typed].slice(0, TYPED) };
  }

  // True for the number of a class. An address may hold any word, such as "length".
  hasClass(k) {
    return Number.isInteger(k) && k in this.record.shares;
  }

  // Raises an error for a value that a control does not take.
  check(name, value) {
    const control = this.controls().find((each) => each.name === name);
    if (control && isAllowed(control, value)) return;
    if (control && name === "target" && value === "predicted") return; // a photo's, of a model without classes
    if (name === "off") {
      const isAbsent = (place) => !control || !isAllowed(control, [place]);
      throw Error(say("no such head", { value: placeWords([value].flat().filter(isAbsent)) }));
    }
    const label = control?.label || name;
    const words = typeof value === "string" ? `“${value}”` : JSON.stringify(value);
    throw Error(say("no such value", { name: label, value: words }));
  }

  // Moves the values of the state into the limits of its photo.
  settle() {
    const { grid, layers } = this.record; // without layers its forward is still to come
    const row = Math.min(this.state.row, grid.rows - 1);
    const column = Math.min(this.state.column, grid.cols - 1);
    this.state = { ...this.state, row, column };
    if (layers.length) this.state = { ...this.state, target: this.fitTarget() };
    if (this.state.against === this.target) this.state = { ...this.state, against: "none" };
  }

  // The target of the state if the photo has it, else the predicted class, or of a model without classes the similarity
  // to the first other photo.
  fitTarget() {
    const { target } = this.state;
    const { likeliest } = this.record;
    const targets = [...this.classes, ...this.likenesses];
    if (targets.some((each) => isEqual(each, target))) return target;
    return likeliest.length ? "predicted" : (this.likenesses[0] ?? "predicted");
  }

  // The class with a number or name, or the likeliest whose name has these whole words.
  classOf(text) {
    const { shares, label, full } = this.record;
    const words = wordsOf(text);
    const every = [...shares.keys()];
    const isNamed = (k) =>
      [label(k), full(k), String(k)].some((name) => isEqual(wordsOf(name), words));
    const hasWords = (k) => words.every((word) => wordsOf(full(k)).includes(word));
    let classes = every.filter(isNamed);
    if (!classes.length) classes = every.filter(hasWords);
    if (!classes.length || !words.length) throw Error(say("no class", { name: text }));
    classes.sort((a, b) => shares[b] - shares[a]);
    return classes[0];
  }

  // Classes of the menus.
  get classes() {
    const { likeliest } = this.record;
    if (!this.page.prepare) return [...new Set(likeliest)];
    const { typed, target, against } = this.state;
    const more = [...typed, target, against].filter((k) => this.hasClass(k));
    return [...new Set([...likeliest, ...more])];
  }

  // The similarities to other photos, which a page with the model explains.
  get likenesses() {
    const { page, state } = this;
    if (!page.prepare) return [];
    const others = [...page.records.keys()].filter((name) => name !== state.photograph);
    return others.map((name) => ["picture", name]);
  }

  get record() {
    return this.page.records.get(this.state.photograph);
  }

  get view() {
    return this.page.views[this.state.view];
  }

  get query() {
    const { query, row, column } = this.state;
    return query === "patch" ? [row, column] : query;
  }

  get target() {
    const { target } = this.state;
    const isSimilarity = Array.isArray(target) && this.view.explains && !this.view.layered;
    const isClass = typeof target === "number";
    return isClass || isSimilarity ? target : this.record.likeliest[0];
  }

  // Names of the views of a class by an attribution method.
  get methods() {
    const { views } = this.page;
    return Object.keys(views).filter((name) => views[name].explains && !views[name].layered);
  }

  // What the map of the view depends on.
  get choice() {
    const { state, view, query, target, page } = this;
    const contrasts = view.contrasts && !Array.isArray(target) && state.against !== "none";
    const control = page.controls[state.view].find(({ name }) => name === "head");
    const heads = control.options.map(([, head]) => head);
    return {
      layer: state.layer,
      head: heads.includes(state.head) ? state.head : heads[0], // each view has its own
      query: view.query ? query : "readout",
      target,
      against: contrasts ? state.against : null,
    };
  }

  map(choice) {
    const { view } = this.state;
    const makeMapOf = MAPS[view] || findExplanation;
    return makeMapOf(this.record, choice, view);
  }

  panel(choice, map = this.map(choice)) {
    return describePanel(this.record, this.view, choice, map, this.state, this.page.tables);
  }

  // The controls of the view as Python described them, with the values of this state and the classes of this photo.
  controls() {
    const { page, state, record, classes, target } = this;
    const { head } = this.choice;
    const optionOf = (k) => {
      const score = scoreWords(record, record.shares[k]);
      return [say("named", { name: record.label(k), score }), k];
    };
    const ofClasses = [[say("predicted"), "predicted"], ...classes.map(optionOf)];
    const mayHaveClasses = record.likeliest.length || !record.layers.length; // before its forward
    const isOfClass = this.view.explains && this.view.layered; // such a view has no similarity
    const ofPhotos = isOfClass ? [] : this.likenesses.map(likenessOption);
    const groups = [
      [say("a class"), mayHaveClasses ? ofClasses : []],
      [say("to an image"), ofPhotos],
    ].filter(([, options]) => options.length);
    const others = classes.filter((k) => k !== target).map(optionOf);
    const changes = {
      head: { value: head },
      layer: { disabled: this.view.head === "added" && head === "every" },
      target: {
        value: isOfClass && Array.isArray(state.target) ? "predicted" : state.target,
        options: groups.flatMap(([, options]) => options),
        groups: groups.map(([title, options]) => [title, options.length]),
      },
      against: { options: [[say("nothing"), "none"], ...others] },
      row: { high: record.grid.rows - 1 },
      column: { high: record.grid.cols - 1 },
      whole: { hidden: !page.canShowWhole?.(state.photograph) },
    };
    if (Array.isArray(target)) changes.against.hidden = true;
    const own = page.controls[state.view].map((control) => {
      const { name } = control;
      return { ...control, value: state[name], ...changes[name] };
    });
    return [...own, ...(page.beside?.controls() || [])];
  }

  // The panels of the view: that of the model, and that of a model beside it.
  panels(choice, map) {
    const { beside, model } = this.page;
    const own = this.panel(choice, map);
    return beside ? beside.panels(own, model) : [own];
  }

  // Questions that the view answers.
  get asks() {
    const asks = ["tour"];
    if (this.view.query && !this.view.explains) asks.push("look");
    if (this.state.view === "attention") asks.push("value");
    return asks;
  }

  draw(message) {
    const { page, record, choice } = this;
    const map = this.map(choice);
    this.traits.pictures = { picture: record.picture, ...page.beside?.pictures(record) };
    this.traits.frame = {
      panels: this.panels(choice, map),
      controls: this.controls(),
      model: page.model,
      models: page.models || 0,
      opened: [page.opened, page.beside?.opened].filter(Boolean).join(""),
      beside: page.beside?.name || "",
      headline: say("headline"),
      lead: say("lead"),
      doubt: this.doubt(),
      knows: this.knows(),
      bars: this.bars(choice),
      challenge: this.challenge(),
      mosaic: this.mosaic(choice),
      six: this.six(choice),
      score: map.score || null,
      parts: null,
      lens: null,
      ...map.beside,
      about: [record.about, page.about].filter(Boolean).join(" "),
      uploads: page.uploads || 0,
      opens: Boolean(page.opens),
      saves: true,
      pages: Boolean(page.keep),
      photoPages: Boolean(page.keepPhoto),
      answers: this.answers,
      message,
      tour: false,
      asks: this.asks,
    };
    this.emit("change:frame");
  }

  // A sentence if no class stands out, or "".
  doubt() {
    const { likeliest, outputs, shares } = this.record;
    if (!likeliest.length || outputs === "value") return "";
    if (shares[likeliest[0]] >= STANDS_OUT) return "";
    const together = sumOf(likeliest.slice(0, 3).map((k) => shares[k]));
    if (outputs === "classes" && together >= SHARED) {
      return say("doubt shared", { share: formatShare(together) });
    }
    return say("doubt", { count: shares.length.toLocaleString("en") });
  }

  // The heading of the list of classes, or "" if the file does not have all their names.
  knows() {
    const { names } = this.page;
    const count = this.record.shares.length;
    if (!count || !names || Object.keys(names).length < count) return "";
    return say("knows", { count: count.toLocaleString("en") });
  }

  // What heads that are off did to the likeliest class, as `_challenge` in explorer.py.
  challenge() {
    const { record, state } = this;
    if (!this.page.prepare || record.outputs !== "classes" || record.shares.length < 2) return null;
    const whole = record.whole || record;
    const seen = whole.likeliest[0];
    const now = record.likeliest[0];
    const before = formatShare(whole.shares[seen]);
    const after = formatShare(record.shares[seen]);
    const fields = { name: record.label(seen), before, after };
    let sentence = "challenge";
    if (state.off.length) {
      fields.heads = headsWords(state.off);
      sentence = "challenge on";
    }
    if (now !== seen) {
      fields.other = record.label(now);
      fields.share = formatShare(record.shares[now]);
      sentence = "challenge won";
    }
    const change = state.off.length ? `${before} → ${after}` : "";
    return { words: say(sentence, fields), change, won: now !== seen };
  }

  // Sends a page. write(source, report): resolves to its {name, file}.
  async keep(asked, write) {
    await this.withProgress(async (report) => {
      report(say("keeping"));
      const { name, file } = await write(this, report);
      this.emit("msg:custom", { download: [name], asked }, [file]);
    });
  }

  // Calls run(report), and shows what it reports, a text and the share that is done, until it ends.
  async withProgress(run) {
    const send = (progress) => this.emit("msg:custom", { progress }, []);
    try {
      await run((what, share) => send({ what, share }));
    } finally {
      send(null);
    }
  }

  // Sends the picture, the model's input, the numbers and the settings as one zip file.
  async save(asked) {
    const { state, record } = this;
    const { beside } = this.page;
    const [panel, other] = this.panels(this.choice, this.map(this.choice));
    const photo = stemOf(state.photograph.replace(/\.\w+$/, ""));
    const layer = this.view.layered ? `-layer${state.layer}` : "";
    const name = `vitlens-${photo}-${state.view}${layer}`;
    const files = {
      [`${name}.png`]: await this.drawPicture(panel),
      [`${name}-input.png`]: bytesOf(record.picture),
      [`${name}.csv`]: tableOf(panel),
      [`${name}-heads.csv`]: tableOfHeads(record),
      [`${name}.json`]: JSON.stringify(this.settings(panel, other), null, 2),
    };
    if (other?.rows) {
      files[`${name}-beside.png`] = await this.drawPicture(other);
      files[`${name}-beside-input.png`] = bytesOf(beside.pictures(record)[other.picture]);
      files[`${name}-beside.csv`] = tableOf(other);
      files[`${name}-beside-heads.csv`] = tableOfHeads(beside.source.record);
    }
    const file = await zip(files);
    this.emit("msg:custom", { download: [`${name}.zip`], asked }, [file]);
  }

  // The map over the photo as a PNG file, with a frame around the selected cell.
  async drawPicture(panel) {
    const { whole } = await readPixels(this.traits.pictures[panel.picture]);
    const canvas = putImage(new OffscreenCanvas(1, 1), paintMap(whole, panel));
    if (panel.selected) {
      const [row, column] = panel.selected;
      const height = panel.cell[0] * canvas.height;
      const width = panel.cell[1] * canvas.width;
      const context = canvas.getContext("2d");
      context.strokeStyle = "white";
      context.lineWidth = 3;
      context.strokeRect(column * width, row * height, width, height);
    }
    return canvas.convertToBlob();
  }

  // Values of the controls that a saved file names. other: the panel of a model beside this one.
  settings(panel, other) {
    const settings = {
      model: this.page.model,
      weights: this.page.hash,
      vitlens: this.page.versions,
      words: panel.words,
      score: this.traits.frame.score,
    };
    if (other) settings.beside = { model: this.page.beside.name, words: other.words };
    for (const { name, value, hidden, disabled, kind } of this.controls()) {
      if (!hidden && !disabled && kind !== "text") settings[name] = value;
    }
    return settings;
  }

  // The likeliest classes, with their probabilities before heads were switched off in record.whole.
  bars({ target }) {
    const { record, view } = this;
    const { whole, likeliest, label, full, shares } = record;
    const classes = new Set(likeliest.slice(0, BARS));
    if (whole) whole.likeliest.slice(0, 1).forEach((k) => classes.add(k));
    return [...classes].map((k) => {
      const bar = {
        number: k,
        name: label(k),
        full: full(k),
        share: shares[k],
        now: view.explains && k === target,
        plain: record.outputs === "value",
      };
      if (whole) bar.before = whole.shares[k];
      return bar;
    });
  }

  // The maps of six methods for a class, each with its score.
  six(choice) {
    if (!this.view.explains || this.view.layered) return null;
    const tiles = this.methods.slice(0, SIX).map((name) => this.tile(name, choice));
    const unscored = tiles.every(({ failed }) => failed);
    return { title: say(unscored ? "six unscored" : "six"), picture: "picture", tiles };
  }

  // A small map of a method, or only its title while the map is not there.
  tile(name, choice) {
    const { record, view, state, page } = this;
    const [title] = page.views[name].entry.split(" (");
    const tile = { view: name, title, now: name === state.view, words: "" };
    const map = record.maps[name]?.[pairOf(choice.target, choice.against)];
    if (!map) return tile;
    const panel = describePanel(record, view, choice, map, state, page.tables);
    const { rows, cols, cell, values, scale, strength, smooth, ends } = panel;
    const score = map.score?.short ? { words: map.score.short } : { failed: map.score?.words };
    return { ...tile, rows, cols, cell, values, scale, strength, smooth, ends, ...score };
  }

  // The maps of all heads from the query, and their mean distances and entropies when all layers have been swept.
  mosaic({ layer, head }) {
    const { record, view, query } = this;
    if (findUnswept(record) >= 0) this.measure(record);
    if (!view.layered) return null;
    const isComplete = record.layers.every((each) => swept.has(each));
    const statisticsOf = (name) =>
      isComplete ? record.layers.map((each) => swept.get(each)[name]) : null;
    const key = String(query);
    if (record.tiles?.key !== key) {
      record.tiles = { key, ...tilesOfHeads(record, queryRow(record, query)) };
    }
    const { maps, tops, rows, cols } = record.tiles;
    const names = Array.from({ length: record.heads }, (_, h) => String(h));
    names[0] = say("head", { head: 0 });
    return {
      titles: [say("mosaic", { source: queryWords(record, query) }), say("distances")],
      layers: record.layers.length,
      rows,
      cols,
      maps,
      tops,
      colors: this.weightColors(1),
      names: [say("mean row"), say("max row"), ...names],
      picks: this.picks(),
      layer: head === "every" ? null : layer,
      head: view.head ? head : null,
      distances: statisticsOf("distances"),
      entropies: statisticsOf("entropies"),
      ...(this.page.effects ? this.effects() : {}),
      uniform: record.grid.uniform,
      off: this.state.off || null,
      pool: 0,
    };
  }

  // The changes of the likeliest class without each head (L, H), or null until they were measured.
  effects() {
    const { record, state } = this;
    const measured = record.effects?.way === state.way ? record.effects : null;
    const measures = record.likeliest.length > 0;
    return { effects: measured?.values ?? null, affected: measured?.name ?? "", measures };
  }

  // The value of the control of heads that each row of the mosaic sets, or null.
  picks() {
    const kind = this.view.head;
    let rows = ["mean", "max"];
    if (kind === "") rows = [null, null];
    if (kind === "added") rows = ["sum", null];
    const takesOne = ["each", "added"].includes(kind);
    const heads = Array.from({ length: this.record.heads }, (_, h) => (takesOne ? h : null));
    return [...rows, ...heads];
  }

  // Sweeps one layer after the other between two messages, and draws when all are done.
  measure(record) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => {
      this.timer = 0;
      const layer = findUnswept(record);
      if (layer >= 0) sweep(record, layer); // a view may have swept the last one
      if (this.record !== record) return;
      if (findUnswept(record) >= 0) {
        this.measure(record);
        return;
      }
      this.drawLater();
    });
  }

  // Draws when the messages so far are answered, as their state is incomplete before. message: null keeps the last one.
  drawLater(message = null) {
    const drawAgain = () => this.draw(message ?? this.traits.frame.message);
    this.turn = this.turn.then(drawAgain);
  }
}

// Heads as an address has them, such as "0.2,4.1", as `place_words` in heads_off.py.
const placeWords = (heads) =>
  [heads]
    .flat()
    .map((place) => [place].flat().join("."))
    .join(",");

// A name as a part of the name of a file.
export const stemOf = (name) => name.replace(/[^\p{L}\p{N}_]+/gu, "-").replace(/^-|-$/g, "");

// True for a value that a control takes.
function isAllowed({ kind, options, high, step }, value) {
  const isOption = (each) => options.some(([, choice]) => isEqual(choice, each));
  if (kind === "switches") return Array.isArray(value) && value.every(isOption);
  if (options.length) return isOption(value);
  if (kind === "check") return typeof value === "boolean";
  if (kind === "text") return typeof value === "string";
  if (typeof value !== "number" || (step === 1 && !Number.isInteger(value))) return false;
  return value >= 0 && value <= high;
}

// The option of the similarity to a photo.
const likenessOption = (target) => [say("like an image", { name: target[1] }), target];

// The value that a control takes instead of one that it does not take.
function nearestOf({ name, kind, options, high, value: own }, value) {
  const choices = options.map(([, choice]) => choice);
  if (kind === "switches") {
    const places = Array.isArray(value) ? value : [];
    return places.filter((place) => choices.some((choice) => isEqual(choice, place)));
  }
  if (!ORDERED.includes(name) || typeof value !== "number") return own;
  if (!options.length) return Math.min(Math.max(Math.round(value), 0), high);
  const numbers = choices.filter((choice) => typeof choice === "number");
  if (!numbers.length) return own;
  const distance = (choice) => Math.abs(choice - value);
  return numbers.reduce((best, choice) => (distance(choice) < distance(best) ? choice : best));
}

// The values of a panel as CSV.
function tableOf({ values, rows }) {
  const numbers = floatsOf(values);
  const count = numbers.length / rows;
  const lineOf = (_, row) => numbers.subarray(row * count, (row + 1) * count).join();
  return Array.from({ length: rows }, lineOf).join("\n");
}

// A line for each head of the layers that a record has, as CSV: its mean distance in pixels and its entropy in nats.
function tableOfHeads(record) {
  const lines = ["layer,head,mean_distance,entropy"];
  record.layers.forEach((stored, layer) => {
    if (!stored) return;
    const { distances, entropies } = sweep(record, layer);
    distances.forEach((distance, head) => {
      lines.push([layer, head, distance, entropies[head]].join());
    });
  });
  return lines.join("\n");
}

// A zip file of {name: bytes or text}. gzip writes the deflated bytes behind 10 others, and then their checksum.
async function zip(files) {
  const entries = [];
  const directory = [];
  for (const [name, data] of Object.entries(files)) {
    const content = new Blob([data]);
    const label = new TextEncoder().encode(name);
    const gzip = content.stream().pipeThrough(new CompressionStream("gzip"));
    const packed = new Uint8Array(await new Response(gzip).arrayBuffer());
    const deflated = packed.slice(ZIP_HEADER, -ZIP_FOOTER);
    const checksum = packed.slice(-ZIP_FOOTER, -ZIP_FOOTER + 4);
    const common = [
      Uint16Array.of(20, 2048, 8, 0, 33), // version, names in UTF-8, deflated, time and date
      checksum,
      Uint32Array.of(deflated.length, content.size),
      Uint16Array.of(label.length, 0),
    ];
    const at = new Blob(entries).size;
    entries.push(Uint32Array.of(0x04034b50), ...common, label, deflated);
    directory.push(Uint32Array.of(0x02014b50), Uint16Array.of(20), ...common, new Uint16Array(3));
    directory.push(Uint32Array.of(0, at), label);
  }
  const count = Object.keys(files).length;
  const start = new Blob(entries).size;
  const size = new Blob(directory).size;
  const end = [
    Uint32Array.of(0x06054b50),
    Uint16Array.of(0, 0, count, count),
    Uint32Array.of(size, start),
    new Uint16Array(1),
  ];
  return new DataView(await new Blob([...entries, ...directory, ...end]).arrayBuffer());
}
