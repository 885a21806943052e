// What the file of a saved page holds of a photo comes from the model here, in a worker, when it is needed. Photos
// never leave the page, whose policy forbids every request.

const LIKELIEST = 10;

// The worker: ask(task, given) resolves to its answer.
class Model {
  constructor(script) {
    this.worker = new Worker(URL.createObjectURL(new Blob([script], { type: "text/javascript" })));
    this.asked = new Map();
    this.worker.onmessage = ({ data: { number, result, error } }) => {
      const { done, fail } = this.asked.get(number);
      this.asked.delete(number);
      if (error === undefined) done(result);
      else fail(Error(error));
    };
    this.worker.onerror = ({ message }) => this.asked.forEach(({ fail }) => fail(Error(message)));
  }

  ask(task, given) {
    return new Promise((done, fail) => {
      const number = (this.count = (this.count || 0) + 1);
      this.asked.set(number, { done, fail });
      this.worker.postMessage({ number, task, ...given });
    });
  }
}

class Live {
  constructor(stored, model) {
    Object.assign(this, { stored, model, photos: new Map(), parts: [] });
  }

  // Reads a file. `ready` files are model inputs of the page's own photos, which are only normalized.
  async add(name, bytes, { about = "", tour = null, ready = false } = {}) {
    const photo = await this.model.ask("photo", { bytes, ready }).catch(() => {
      throw Error(say("no image", { name }));
    });
    if (photo.clear) about += say("over white", { name });
    if (!photo.exact) about += say("other levels", { name });
    Object.assign(photo, { about, tour, number: (this.read = (this.read || 0) + 1) });
    this.photos.delete(name);
    this.photos = new Map(ready ? [...this.photos, [name, photo]] : [[name, photo], ...this.photos]);
    for (const controls of Object.values(this.stored.controls))
      controls.find((each) => each.name === "photograph").options = [...this.photos.keys()].map((each) => [each, each]);
    this.stored.records.set(name, { ...this.stored.base, likeliest: [], layers: [], shares: [], key: "" });
  }

  // The key of a forward: its photo, and the heads that are off in this state.
  key(name, { off, way }) {
    return JSON.stringify([this.photos.get(name).number, off, off.length && way]);
  }

  async record(name, { off, way }) {
    const { stored, photos } = this, { input, picture, about, tour } = photos.get(name);
    const key = this.key(name, { off, way }), given = { key, input, off, mean: way === "mean" };
    const whole = off.length ? (photos.get(name).whole ||= await this.record(name, { off: [] })) : null;
    const { logits, layers, tokens } = await this.model.ask("forward", given);
    const shares = sharesOf(logits, stored.base.outputs);
    const likeliest = [...shares.keys()].sort((a, b) => shares[b] - shares[a]).slice(0, LIKELIEST);
    return {
      ...stored.base, key, given, picture, about, layers, tokens, shares, likeliest, whole, maps: {}, contributions: {},
      lens: [], tour: off.length ? null : tour, note: off.length ? offWords(off, way) : "",
      label: (k) => stored.labels?.[k] ?? String(k),
    };
  }

  // Computes what the view of the new state needs, before it is drawn.
  async prepare(source, content, [buffer]) {
    if ("upload" in content && !(await this.receive(source, content, buffer))) return;
    const places = source.controls().find((each) => each.name === "off").options.map(([, place]) => place);
    const off = places.filter((place) => source.state.off.some((each) => same(each, place))); // in the order of layers
    const state = (source.state = { ...source.state, off }), name = state.photograph, { records } = source.page;
    if (records.get(name).key !== this.key(name, state)) {
      if (source.traits.frame) this.preview(source, this.photos.get(name));
      records.set(name, await this.record(name, state));
      source.change({});
    }
    await this.explain(source.record, state.view, source.view, source.choice.target);
  }

  // Collects the parts of a file, and reads it after the last. Returns whether it was the last.
  async receive(source, { upload, file, at, of }, buffer) {
    if (at === 0) this.parts = [];
    this.parts.push(buffer);
    const bytes = await new Blob(this.parts).arrayBuffer();
    source.emit("msg:custom", { file, received: bytes.byteLength }, []);
    if (bytes.byteLength < of) return false;
    await this.add(upload, bytes);
    source.state = { ...source.state, photograph: upload };
    return true;
  }

  // Shows a photo before the model has run on it.
  preview(source, { picture }) {
    const { traits } = source, running = { strength: 0, words: say("running") };
    const panels = traits.frame.panels.map((panel) => ({ ...panel, ...running }));
    traits.pictures = { picture: (source.pictured = picture) };
    traits.frame = { ...traits.frame, panels, bars: [], score: null, parts: null, lens: null, mosaic: null };
    source.emit("change:frame");
  }

  async explain(record, name, view, target) {
    const { model } = this, given = { ...record.given, target, against: null };
    const replaced = given.mean && given.off.length;
    if (["contributions", "direct"].includes(name) && replaced) throw Error(say("not additive"));
    if (name === "lens" && !record.lens.length) {
      const targets = [...new Set([...record.likeliest, ...(record.whole?.likeliest || [])])];
      record.lens = await model.ask("lens", { ...record.given, targets });
    } else if (name === "contributions" && !record.contributions[target]) {
      const { embedding, biases, ...made } = await model.ask("contributions", given);
      const note = say("parts note", { logit: number(made.logit) });
      const others = [[say("embedding"), embedding], [say("biases"), biases]];
      record.contributions[target] = { ...made, title: say("parts"), others, note };
    } else if (view.explains && !view.layered && !record.maps[name]?.[target]) {
      const named = say("class", { name: record.label(target), score: scoreWords(record, record.shares[target]) });
      const score = { title: say("trust"), words: say("live unscored") };
      for (const [method, values] of Object.entries(await model.ask("why", given))) {
        if (method === "direct" && replaced) continue;
        const words = say("for", { method: this.stored.views[method]?.entry, target: named });
        (record.maps[method] ||= {})[target] = { values, words, score };
      }
    }
  }
}

function offWords(off, way) {
  const heads = off.map(([layer, head]) => say("head of", { head, layer: say("layer", { layer }) }));
  const which = heads.length <= 4 ? heads.join(", ") : say("count of heads", { count: heads.length });
  const each = say(`by ${way}`, { count: 6 }).replace("their", "its");
  return say(heads.length === 1 ? "off" : "all off", { heads: which, way: each });
}

// The page of PageSource, after the forward of its first photo.
async function live(stored) {
  WORDS = stored.words;
  const model = new Model(stored.worker), photos = new Live(stored, model);
  const copy = (part) => bytesOf(part).slice().buffer;
  await model.ask("open", { about: stored.network, weights: copy(stored.weights), wasm: copy(stored.wasm) });
  stored.base.grid.readout = floats(stored.base.grid.readout);
  stored.records = new Map();
  for (const { name, png, ...more } of stored.photos) await photos.add(name, copy(png), { ...more, ready: true });
  const first = stored.photos[0].name;
  stored.records.set(first, await photos.record(first, { off: [] }));
  return { ...stored, prepare: (...message) => photos.prepare(...message) };
}
