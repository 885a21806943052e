// A source for the front end that answers in the page, from records, in place of Python: get, on, off, send. It keeps
// the state, checks values by the controls, and makes the frame, as explorer.py does. `page` is as in docs/front-end.md.

const BARS = 5;

class PageSource {
  static formats = { number, percent };
  near = true; // answers cost no message
  handlers = {};
  traits = {};
  get = (name) => this.traits[name];
  on = (event, handler) => (this.handlers[event] ||= new Set()).add(handler);
  off = (event, handler) => this.handlers[event]?.delete(handler);
  emit = (event, ...values) => [...(this.handlers[event] || [])].forEach((handler) => handler(...values));

  constructor(page) {
    WORDS = page.words;
    Object.assign(this, { page, state: page.state, answers: 0, turn: Promise.resolve() });
    this.draw("");
  }

  send(content, _, buffers = []) {
    if ("ask" in content) return this.reply(content);
    this.turn = this.turn.then(() => this.answer(content, buffers));
  }

  async answer(content, buffers) {
    const before = this.state;
    this.answers = Math.max(this.answers, content.number || 0);
    try {
      this.take(content);
      if (this.page.prepare) await this.page.prepare(this, content, buffers);
      this.draw("");
    } catch (error) {
      this.state = before;
      this.draw(error.message);
    }
  }

  // Answers a question without a drawing, as `Explorer.look_up`.
  reply({ ask, number = 0, row, col, ...about }) {
    const { record, choice, query } = this;
    let [answer, buffers] = [null, []];
    try {
      if (ask === "look") {
        const panel = this.panel({ ...choice, query: [row, col] });
        buffers = [panel.values, panel.scale.colors];
        answer = { ...panel, values: null, scale: { ...panel.scale, colors: null } };
      } else answer = ask === "tour" ? record.tour : valueOf(record, { ...choice, query, key: null, ...about });
    } catch (error) {
      answer = { problem: error.message };
    }
    this.emit("msg:custom", { ask, number, answer }, buffers);
  }

  get asks() {
    const { query, explains } = this.view;
    const some = { tour: this.record.tour, look: query && !explains, value: this.state.view === "attention" };
    return Object.keys(some).filter((kind) => some[kind]);
  }

  take(content) {
    if ("pick" in content) this.change({ row: content.row, column: content.col });
    else if ("why" in content)
      this.change({ view: this.view.explains ? this.state.view : this.methods[0], target: content.why });
    else this.change(content.set || {});
  }

  change(values) {
    if (("row" in values || "column" in values) && !("query" in values)) values = { ...values, query: "patch" };
    for (const [name, value] of Object.entries(values)) {
      const control = this.controls().find((each) => each.name === name);
      if (!control || !fits(control, value))
        throw Error(say("no such value", { name: control?.label || name, value: JSON.stringify(value) }));
      this.state = { ...this.state, [name]: value };
    }
    const { rows, cols } = this.record.grid;
    const [row, column] = [Math.min(this.state.row, rows - 1), Math.min(this.state.column, cols - 1)];
    const target = this.record.likeliest.includes(this.state.target) ? this.state.target : "predicted";
    this.state = { ...this.state, row, column, target };
  }

  get record() {
    return this.page.records.get(this.state.photograph);
  }

  // Names of the views of a class by an attribution method.
  get methods() {
    const { views } = this.page;
    return Object.keys(views).filter((name) => views[name].explains && !views[name].layered);
  }

  get view() {
    return this.page.views[this.state.view];
  }

  // The head if the view has it, else the view's first choice.
  get head() {
    const choices = this.page.controls[this.state.view].find(({ name }) => name === "head").options;
    return choices.some(([, choice]) => choice === this.state.head) ? this.state.head : choices[0][1];
  }

  get query() {
    const { query, row, column } = this.state;
    return query === "patch" ? [row, column] : query;
  }

  get choice() {
    const { state, record, view, head, query } = this;
    const target = state.target === "predicted" ? record.likeliest[0] : state.target;
    return { layer: state.layer, head, query: view.query ? query : "readout", target };
  }

  map(choice) {
    return (MAPS[this.state.view] || explained)(this.record, choice, this.state.view);
  }

  panel(choice, map = this.map(choice)) {
    return panelOfMap(this.record, this.view, choice, map, this.state, this.page.tables);
  }

  // The controls of the view as Python described them, with the values of this state and the classes of this photo.
  controls() {
    const { state, record, head } = this;
    const score = (k) => scoreWords(record, record.shares[k]);
    const named = record.likeliest.map((k) => [say("named", { name: record.label(k), score: score(k) }), k]);
    const options = [[say("predicted"), "predicted"], ...named];
    const changed = {
      head: { value: head },
      layer: { disabled: this.view.head === "added" && head === "every" },
      target: { options, groups: [[say("a class"), options.length]] },
    };
    return this.page.controls[state.view].map((each) => ({ ...each, value: state[each.name], ...changed[each.name] }));
  }

  draw(message) {
    const { page, record, choice } = this;
    const map = this.map(choice);
    if (this.pictured !== record.picture)
      this.traits.pictures = { picture: (this.pictured = record.picture) };
    const { score = null, beside = {} } = map;
    this.traits.frame = {
      panels: [this.panel(choice, map)], controls: this.controls(), model: page.model,
      bars: this.bars(choice), mosaic: this.mosaic(choice), six: this.six(choice), score, parts: null,
      lens: null, ...beside,
      about: [record.about, page.about].filter(Boolean).join(" "), uploads: page.uploads || 0, saves: false,
      answers: this.answers, message, asks: this.asks, tour: false,
    };
    this.emit("change:pictures");
    this.emit("change:frame");
  }

  // The likeliest classes, with their probabilities before heads were switched off in record.whole.
  bars({ target }) {
    const { record } = this;
    const { whole } = record;
    const shown = new Set([...record.likeliest.slice(0, BARS), ...(whole ? whole.likeliest.slice(0, 1) : [])]);
    return [...shown].map((k) => {
      const before = whole && { before: whole.shares[k] };
      const [now, plain] = [this.view.explains && k === target, record.outputs === "value"];
      return { number: k, name: record.label(k), share: record.shares[k], now, plain, ...before };
    });
  }

  // The maps of six methods for a class, each with its score.
  six(choice) {
    const { record, view, state, page: { views, tables } } = this;
    if (!view.explains || view.layered) return null;
    const tiles = this.methods.slice(0, 6).map((name) => {
      const tile = { view: name, title: views[name].entry.split(" (")[0], now: name === state.view, words: "" };
      const map = record.maps[name]?.[choice.target];
      if (!map) return tile;
      const panel = panelOfMap(record, view, choice, map, state, tables);
      const { rows, cols, cell, values, scale, strength, smooth } = panel;
      const score = map.score?.short ? { words: map.score.short } : { failed: map.score?.words };
      return { ...tile, rows, cols, cell, values, scale, strength, smooth, ...score };
    });
    return { title: say("six"), picture: "picture", tiles };
  }

  // The maps of all heads from the query, and their mean distances when all layers have been swept.
  mosaic({ layer, head }) {
    const { record, view, query, page } = this;
    if (record.layers.some((each) => each && !swept.has(each))) this.measure(record);
    const done = record.layers.every((each) => swept.has(each));
    const distances = done ? record.layers.map((each) => swept.get(each).distances) : null;
    if (!view.layered) return null;
    const key = String(query);
    if (record.tiles?.key !== key) record.tiles = { key, ...tilesOfHeads(record, queryRow(record, query)) };
    const { maps, tops, rows, cols } = record.tiles;
    const names = Array.from({ length: record.heads }, (_, h) => (h ? String(h) : say("head", { head: 0 })));
    const single = names.map((_, h) => (["each", "added"].includes(view.head) ? h : null));
    const picks = { "": [null, null], added: ["sum", null] }[view.head] || ["mean", "max"];
    return {
      titles: [say("mosaic", { source: queryWords(record, query) }), say("distances")], layers: record.layers.length,
      rows, cols, maps, tops, colors: colorsOf({ low: 0, high: 1 }, page.tables.maps.viridis, 1, () => 1),
      names: [say("mean row"), say("max row"), ...names], picks: [...picks, ...single],
      layer: head === "every" ? null : layer, head: view.head ? head : null, distances,
      uniform: record.grid.uniform, off: this.state.off || null, pool: 0,
    };
  }

  // Sweeps one layer after the other between two messages, and draws when all are done.
  measure(record) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => {
      this.timer = 0;
      const next = record.layers.findIndex((each) => each && !swept.has(each));
      if (next >= 0) sweep(record, next);
      if (this.record !== record) return;
      if (next >= 0) this.measure(record);
      else this.draw(this.traits.frame.message);
    });
  }
}

function fits({ kind, options, high, step }, value) {
  if (kind === "switches") return value.every((each) => options.some(([, choice]) => same(choice, each)));
  if (options.length) return options.some(([, choice]) => same(choice, value));
  if (kind === "check") return typeof value === "boolean";
  return typeof value === "number" && value >= 0 && value <= high && (step !== 1 || Number.isInteger(value));
}
