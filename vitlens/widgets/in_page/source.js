// A source for the front end that answers in the page, from records, in place of Python: get, on, off, send. It keeps the
// state, checks values by the controls, and makes the frame, as explorer.py does.
//
// page: {words, tables, views, controls, state, about, records: Map from the name of a photo to its record}. `prepare`,
// optional, is awaited after each message, before the drawing, with the source, the message and its buffers.

const BARS = 5;

class PageSource {
  static formats = { number, percent };
  near = true; // answers cost no message

  constructor(page) {
    WORDS = page.words;
    Object.assign(this, { page, state: page.state, handlers: new Map(), traits: {}, turn: Promise.resolve(), answers: 0 });
    this.draw("");
  }

  get(name) {
    return this.traits[name];
  }

  on(event, handler) {
    if (!this.handlers.has(event)) this.handlers.set(event, new Set());
    this.handlers.get(event).add(handler);
  }

  off(event, handler) {
    this.handlers.get(event)?.delete(handler);
  }

  emit(event, ...values) {
    [...(this.handlers.get(event) || [])].forEach((handler) => handler(...values));
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
    else if ("why" in content) this.change({ view: this.view.explains ? this.state.view : this.explaining, target: content.why });
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

  get view() {
    return this.page.views[this.state.view];
  }

  // The first view of a class by an attribution method.
  get explaining() {
    return Object.keys(this.page.views).find((name) => this.page.views[name].explains && !this.page.views[name].layered);
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
    const named = record.likeliest.map((k) => [say("named", { name: record.label(k), score: scoreWords(record, record.shares[k]) }), k]);
    const options = [[say("predicted"), "predicted"], ...named];
    return this.page.controls[state.view].map((control) => {
      if (control.name === "head") return { ...control, value: head };
      if (control.name === "layer") return { ...control, value: state.layer, disabled: this.view.head === "added" && head === "every" };
      if (control.name === "target") return { ...control, value: state.target, options, groups: [[say("a class"), options.length]] };
      return { ...control, value: state[control.name] };
    });
  }

  draw(message) {
    const { page, record, choice } = this;
    const map = this.map(choice);
    if (this.pictured !== record.picture)
      this.traits.pictures = { picture: (this.pictured = record.picture) };
    const { score = null, beside = {} } = map;
    this.traits.frame = {
      panels: [this.panel(choice, map)], controls: this.controls(), model: page.model,
      bars: this.bars(choice), dots: this.dots(choice), score, parts: null, lens: null, ...beside,
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
      const bar = { number: k, name: record.label(k), share: record.shares[k], now: this.view.explains && k === target, plain: record.outputs === "value" };
      return whole ? { ...bar, before: whole.shares[k] } : bar;
    });
  }

  // Mean attention distances of the heads, when all layers have been swept.
  dots({ layer, head }) {
    const { record, view } = this;
    if (record.layers.includes(undefined)) return null;
    const next = record.layers.findIndex((each) => !swept.has(each));
    if (next >= 0) this.measure(record);
    if (view.explains || next >= 0) return null;
    const picks = view.head === "each";
    return {
      title: say("distances"), values: record.layers.map((_, l) => sweep(record, l).distances),
      uniform: uniformDistance(record.grid), layer, head: picks && typeof head === "number" ? head : null, picks,
    };
  }

  // Sweeps one layer after the other between two messages, and draws when all are done.
  measure(record) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => {
      this.timer = 0;
      const next = record.layers.findIndex((each) => !swept.has(each));
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
