// A source for the front end that answers in the page, from records, in place of Python. It keeps the state, checks
// values by the controls, and makes the frame, as explorer.py does. `page` is as in docs/front-end.md.

const [BARS, TYPED] = [5, 10];
const pairOf = (target, against) => (against === null ? String(target) : `${target}-${against}`); // in maps of classes

class PageSource extends Source {
  static formats = { number, percent };
  near = true; // answers cost no message
  answers = 0;
  turn = Promise.resolve();

  constructor(page) {
    super();
    WORDS = page.words;
    Object.assign(this, { page, state: { typed: [], against: "none", ...page.state } });
    this.draw("");
  }

  send(content, _, buffers = []) {
    if ("ask" in content) return this.reply(content);
    this.turn = this.turn.then(() => this.answer(content, buffers));
  }

  async answer(content, buffers) {
    const { state, record } = this;
    this.answers = Math.max(this.answers, content.number || 0);
    try {
      this.take(content);
      await this.page.prepare?.(this, content, buffers);
      if (content.press === "save") await this.save(content.number);
      this.draw("");
    } catch (error) {
      this.state = state;
      this.page.records.set(state.photograph, record); // that of another state may have replaced it
      this.draw(error.message);
    }
  }

  // Answers a question without a drawing, as `Explorer.look_up`.
  async reply({ ask, number = 0, row, col, ...about }) {
    const { record, choice, query, page } = this;
    let [answer, buffers] = [
      null,
      [colorsOf({ low: 0, high: 1 }, page.tables.maps.viridis, 0.9, (value) => value)],
    ];
    try {
      if (ask === "look") {
        const panel = this.panel({ ...choice, query: [row, col] });
        buffers = [panel.values, panel.scale.colors];
        answer = { ...panel, values: null, scale: { ...panel.scale, colors: null } };
      } else if (ask === "tour") answer = record.tour || (await page.tour(this));
      else answer = valueOf(record, { ...choice, query, key: null, ...about });
    } catch (error) {
      answer = { problem: error.message };
    }
    this.emit("msg:custom", { ask, number, answer }, buffers);
  }

  take(content) {
    const view = this.view.explains ? this.state.view : this.methods[0];
    if ("pick" in content) this.change({ row: content.row, column: content.col });
    else if ("why" in content) this.change({ view, target: content.why });
    else this.change(content.set || {});
  }

  change(values) {
    if (("row" in values || "column" in values) && !("query" in values))
      values = { ...values, query: "patch" };
    if (values.another?.trim()) values = { ...values, target: this.classOf(values.another.trim()) };
    else if ("target" in values && "another" in this.state) values = { another: "", ...values };
    const fresh = [values.target, values.against].filter(
      (k) => k in this.record.shares && !this.classes.includes(k),
    );
    if (this.page.prepare)
      this.state = { ...this.state, typed: [...fresh, ...this.state.typed].slice(0, TYPED) };
    for (const [name, value] of Object.entries(values)) {
      const control = this.controls().find((each) => each.name === name);
      if (!control || !fits(control, value))
        throw Error(
          say("no such value", { name: control?.label || name, value: JSON.stringify(value) }),
        );
      this.state = { ...this.state, [name]: value };
    }
    const { rows, cols } = this.record.grid;
    const [row, column] = [
      Math.min(this.state.row, rows - 1),
      Math.min(this.state.column, cols - 1),
    ];
    const lost = this.record.likeliest.length && !this.classes.includes(this.state.target);
    this.state = { ...this.state, row, column, ...(lost && { target: "predicted" }) };
    if (this.state.against === this.target) this.state = { ...this.state, against: "none" };
  }

  // The class with a number or name, or the likeliest whose name has these whole words.
  classOf(text) {
    const { shares, label, full } = this.record;
    const wordsOf = (name) => name.toLowerCase().match(/[\p{L}\p{N}_]+/gu) || [];
    const every = [...shares.keys()];
    const namesOf = (k) => [label(k), full(k), String(k)];
    const equal = every.filter((k) =>
      namesOf(k).some((name) => same(wordsOf(name), wordsOf(text))),
    );
    const part = every.filter((k) =>
      wordsOf(text).every((word) => wordsOf(full(k)).includes(word)),
    );
    const [best] = (equal.length ? equal : part).sort((a, b) => shares[b] - shares[a]);
    if (best === undefined || !wordsOf(text).length) throw Error(say("no class", { name: text }));
    return best;
  }

  // Classes of the menus.
  get classes() {
    const {
      record: { likeliest, shares },
      state: { typed, target, against },
    } = this;
    const more = this.page.prepare ? [...typed, target, against].filter((k) => k in shares) : [];
    return [...new Set([...likeliest, ...more])];
  }

  get record() {
    return this.page.records.get(this.state.photograph);
  }
  get view() {
    return this.page.views[this.state.view];
  }
  get query() {
    return this.state.query === "patch" ? [this.state.row, this.state.column] : this.state.query;
  }
  get target() {
    return this.state.target === "predicted" ? this.record.likeliest[0] : this.state.target;
  }

  // Names of the views of a class by an attribution method.
  get methods() {
    return Object.entries(this.page.views).flatMap(([name, view]) =>
      view.explains && !view.layered ? name : [],
    );
  }

  get choice() {
    const { state, view, query, target, page } = this;
    const heads = page.controls[state.view]
      .find(({ name }) => name === "head")
      .options.map(([, choice]) => choice);
    const head = heads.includes(state.head) ? state.head : heads[0]; // each view has its own
    const against = view.contrasts && state.against !== "none" ? state.against : null;
    return { layer: state.layer, head, query: view.query ? query : "readout", target, against };
  }

  map(choice) {
    return (MAPS[this.state.view] || explained)(this.record, choice, this.state.view);
  }
  panel(choice, map = this.map(choice)) {
    return panelOfMap(this.record, this.view, choice, map, this.state, this.page.tables);
  }

  // The controls of the view as Python described them, with the values of this state and the classes of this photo.
  controls() {
    const {
      state,
      record,
      classes,
      target,
      choice: { head },
    } = this;
    const named = (k) => [
      say("named", { name: record.label(k), score: scoreWords(record, record.shares[k]) }),
      k,
    ];
    const options = [[say("predicted"), "predicted"], ...classes.map(named)];
    const others = classes.filter((k) => k !== target).map(named);
    const changed = {
      head: { value: head },
      layer: { disabled: this.view.head === "added" && head === "every" },
      target: { options, groups: [[say("a class"), options.length]] },
      against: { options: [[say("nothing"), "none"], ...others] },
    };
    return this.page.controls[state.view].map((each) => ({
      ...each,
      value: state[each.name],
      ...changed[each.name],
    }));
  }

  draw(message) {
    const { page, record, choice, state, view } = this;
    const map = this.map(choice);
    const looks = view.query && !view.explains;
    this.traits.pictures = { picture: record.picture };
    this.traits.frame = {
      panels: [this.panel(choice, map)],
      controls: this.controls(),
      model: page.model,
      bars: this.bars(choice),
      mosaic: this.mosaic(choice),
      six: this.six(choice),
      score: map.score || null,
      parts: null,
      lens: null,
      ...map.beside,
      about: [record.about, page.about].filter(Boolean).join(" "),
      uploads: page.uploads || 0,
      saves: true,
      answers: this.answers,
      message,
      tour: false,
      asks: ["tour", ...(looks ? ["look"] : []), ...(state.view === "attention" ? ["value"] : [])],
    };
    this.emit("change:frame");
  }

  // Sends the picture, the model's input, the numbers and the settings as one zip file.
  async save(asked) {
    const {
      page,
      state,
      record,
      traits: {
        pictures: { picture },
      },
    } = this;
    const panel = this.panel(this.choice);
    const { values, selected, words, rows, cell } = panel;
    const canvas = put(new OffscreenCanvas(1, 1), painted((await pixelsOf(picture)).whole, panel));
    const [height, width] = [cell[0] * canvas.height, cell[1] * canvas.width];
    const context = Object.assign(canvas.getContext("2d"), { strokeStyle: "white", lineWidth: 3 });
    if (selected) context.strokeRect(selected[1] * width, selected[0] * height, width, height);
    const visible = this.controls().filter(
      ({ hidden, disabled, kind }) => !hidden && !disabled && kind !== "text",
    );
    const about = {
      model: page.model,
      weights: page.hash,
      vitlens: page.versions,
      words,
      score: this.traits.frame.score,
      ...Object.fromEntries(visible.map(({ name, value }) => [name, value])),
    };
    const [numbers, count] = [floatsOf(values), values.byteLength / 4 / rows];
    const line = (_, row) => numbers.subarray(row * count, (row + 1) * count).join();
    const photo = state.photograph
      .replace(/\.\w+$/, "")
      .replace(/[^\p{L}\p{N}_]+/gu, "-")
      .replace(/^-|-$/g, "");
    const name = `vitlens-${photo}-${state.view}${this.view.layered ? `-layer${state.layer}` : ""}`;
    const file = await zipped({
      [`${name}.png`]: await canvas.convertToBlob(),
      [`${name}-input.png`]: bytesOf(record.picture),
      [`${name}.csv`]: Array.from({ length: rows }, line).join("\n"),
      [`${name}.json`]: JSON.stringify(about, null, 2),
    });
    this.emit("msg:custom", { download: [`${name}.zip`], asked }, [file]);
  }

  // The likeliest classes, with their probabilities before heads were switched off in record.whole.
  bars({ target }) {
    const { record, view } = this;
    const { whole, likeliest, label, full, shares } = record;
    const shown = new Set([
      ...likeliest.slice(0, BARS),
      ...(whole ? whole.likeliest.slice(0, 1) : []),
    ]);
    return [...shown].map((k) => {
      const [now, plain] = [view.explains && k === target, record.outputs === "value"];
      const before = whole && { before: whole.shares[k] };
      return { number: k, name: label(k), full: full(k), share: shares[k], now, plain, ...before };
    });
  }

  // The maps of six methods for a class, each with its score.
  six(choice) {
    const {
      record,
      view,
      state,
      page: { views, tables },
    } = this;
    if (!view.explains || view.layered) return null;
    const tiles = this.methods.slice(0, 6).map((name) => {
      const tile = {
        view: name,
        title: views[name].entry.split(" (")[0],
        now: name === state.view,
        words: "",
      };
      const map = record.maps[name]?.[pairOf(choice.target, choice.against)];
      if (!map) return tile;
      const panel = panelOfMap(record, view, choice, map, state, tables);
      const { rows, cols, cell, values, scale, strength, smooth } = panel;
      const score = map.score?.short ? { words: map.score.short } : { failed: map.score?.words };
      return { ...tile, rows, cols, cell, values, scale, strength, smooth, ...score };
    });
    const title = say(tiles.every(({ failed }) => failed) ? "six unscored" : "six");
    return { title, picture: "picture", tiles };
  }

  // The maps of all heads from the query, and their mean distances when all layers have been swept.
  mosaic({ layer, head }) {
    const { record, view, query, page } = this;
    if (record.layers.some((each) => each && !swept.has(each))) this.measure(record);
    const done = record.layers.every((each) => swept.has(each));
    const distances = done ? record.layers.map((each) => swept.get(each).distances) : null;
    if (!view.layered) return null;
    const key = String(query);
    if (record.tiles?.key !== key)
      record.tiles = { key, ...tilesOfHeads(record, queryRow(record, query)) };
    const { maps, tops, rows, cols } = record.tiles;
    const names = Array.from({ length: record.heads }, (_, h) =>
      h ? String(h) : say("head", { head: 0 }),
    );
    const single = names.map((_, h) => (["each", "added"].includes(view.head) ? h : null));
    const picks = { "": [null, null], added: ["sum", null] }[view.head] || ["mean", "max"];
    return {
      titles: [say("mosaic", { source: queryWords(record, query) }), say("distances")],
      layers: record.layers.length,
      rows,
      cols,
      maps,
      tops,
      colors: colorsOf({ low: 0, high: 1 }, page.tables.maps.viridis, 1, () => 1),
      names: [say("mean row"), say("max row"), ...names],
      picks: [...picks, ...single],
      layer: head === "every" ? null : layer,
      head: view.head ? head : null,
      distances,
      uniform: record.grid.uniform,
      off: this.state.off || null,
      pool: 0,
    };
  }

  // Sweeps one layer after the other between two messages, and draws when all are done.
  measure(record) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => {
      this.timer = 0;
      sweep(
        record,
        record.layers.findIndex((each) => each && !swept.has(each)),
      );
      if (this.record !== record) return;
      if (record.layers.some((each) => each && !swept.has(each))) this.measure(record);
      else this.turn = this.turn.then(() => this.draw(this.traits.frame.message)); // not before a state is complete
    });
  }
}

function fits({ kind, options, high, step }, value) {
  if (kind === "switches")
    return value.every((each) => options.some(([, choice]) => same(choice, each)));
  if (options.length) return options.some(([, choice]) => same(choice, value));
  if (kind === "check") return typeof value === "boolean";
  if (kind === "text") return typeof value === "string";
  return (
    typeof value === "number" &&
    value >= 0 &&
    value <= high &&
    (step !== 1 || Number.isInteger(value))
  );
}

// A zip file of {name: bytes or text}. gzip writes the deflated bytes behind 10 others, and then their checksum.
async function zipped(files) {
  const [entries, directory] = [[], []];
  for (const [name, data] of Object.entries(files)) {
    const [content, label] = [new Blob([data]), new TextEncoder().encode(name)];
    const gzip = content.stream().pipeThrough(new CompressionStream("gzip"));
    const packed = new Uint8Array(await new Response(gzip).arrayBuffer());
    const sizes = [packed.slice(-8, -4), Uint32Array.of(packed.length - 18, content.size)];
    const common = [Uint16Array.of(20, 2048, 8, 0, 33), ...sizes, Uint16Array.of(label.length, 0)];
    const at = new Blob(entries).size;
    entries.push(Uint32Array.of(0x04034b50), ...common, label, packed.slice(10, -8));
    directory.push(Uint32Array.of(0x02014b50), Uint16Array.of(20), ...common, new Uint16Array(3));
    directory.push(Uint32Array.of(0, at), label);
  }
  const [count, at, size] = [
    Object.keys(files).length,
    new Blob(entries).size,
    new Blob(directory).size,
  ];
  const end = [
    Uint32Array.of(0x06054b50),
    Uint16Array.of(0, 0, count, count),
    Uint32Array.of(size, at),
  ];
  return new DataView(
    await new Blob([...entries, ...directory, ...end, new Uint16Array(1)]).arrayBuffer(),
  );
}
