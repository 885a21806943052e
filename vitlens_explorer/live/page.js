// What the file of a saved page holds of a photo comes from the model here, in a worker, when it is needed. Photos
// never leave the page, whose policy forbids every request.

const LIKELIEST = 10; // classes that can be explained
const LISTED = 4; // largest number of heads that a sentence lists
const FORWARDS = 3; // photos whose forwards are kept: 12 MB each for a ViT-Ti
const UPLOADS = 40; // uploaded photos that are kept: 3 MB each

// Starts the worker. Returns ask(task, given), which resolves to its answer.
function startWorker(script) {
  const thread = new Worker(URL.createObjectURL(new Blob([script], { type: "text/javascript" })));
  return (task, given) =>
    new Promise((done, fail) => {
      const { port1, port2 } = new MessageChannel();
      port1.onmessage = ({ data: { result, error, ...more } }) => {
        if (error === undefined) done(result);
        else fail(Object.assign(Error(error), more));
      };
      thread.postMessage({ ...given, task, port: port2 }, [port2]);
    });
}

class Live {
  photos = new Map();
  read = 0; // number of photos that were read
  latest = []; // names of the photos whose forwards are kept, the latest first

  constructor(stored, ask) {
    this.stored = stored;
    this.ask = ask;
  }

  running = null; // the scoring that is going on

  cancel() {
    if (this.running) this.running.isCanceled = true;
  }

  // Levels of the mean color of a photo as the model sees it.
  meanColor(name) {
    const { seen } = this.photos.get(name);
    return [0, 1, 2].map((color) => {
      let sum = 0;
      for (let i = color; i < seen.length; i += 3) sum += seen[i];
      return Math.round((3 * sum) / seen.length);
    });
  }

  // Reads a file. `ready` files are model inputs of the page's own photos, which are only normalized.
  async add(name, bytes, { about = "", ready = false } = {}) {
    const photo = await this.ask("photo", { bytes, ready }).catch(({ problem, fields }) => {
      throw Error(say(problem || "no image", { name, ...fields }));
    });
    this.read += 1;
    photo.number = this.read;
    photo.about = ready ? about : this.describe(name, photo);
    photo.uploaded = !ready;
    this.photos.delete(name);
    const others = [...this.photos];
    this.photos = new Map(ready ? [...others, [name, photo]] : [[name, photo], ...others]);
    this.dropForward(name);
    const uploads = [...this.photos.keys()].filter((each) => this.photos.get(each).uploaded);
    for (const oldest of uploads.slice(UPLOADS)) {
      this.photos.delete(oldest);
      this.stored.records.delete(oldest);
    }
    const options = [...this.photos.keys()].map((each) => [each, each]);
    for (const controls of Object.values(this.stored.controls)) {
      controls.find((each) => each.name === "photograph").options = options;
    }
  }

  // Notes on an uploaded photo.
  describe(name, { clear, turned, frames, gray, exact, plain, width, height }) {
    const notes = [];
    if (clear) notes.push(say("over white", { name }));
    if (turned) notes.push(say("turned", { name }));
    if (frames > 1) notes.push(say("frames", { name, count: frames }));
    if (gray) notes.push(say("ends gray", { name }));
    if (!exact) notes.push(say(plain ? "other decoder" : "other levels", { name }));
    const { image, resized } = this.stored.network;
    const side = Math.round((Math.min(width, height) * image[0]) / resized);
    if (side < Math.max(width, height)) {
      const [cols, rows, across, down] = [side, side, width, height].map((each) =>
        each.toLocaleString("en"),
      );
      notes.push(say("cropped", { cols, rows, width: across, height: down }));
    }
    return notes.join(" ");
  }

  // Forgets what the model gave for a photo. It runs again when the photo is chosen.
  dropForward(name) {
    const empty = { likeliest: [], layers: [], shares: [], key: "" };
    this.photos.get(name).whole = null;
    this.stored.records.set(name, { ...this.stored.base, ...empty });
  }

  // Keeps the record of a photo, and forgets those of photos that were not shown lately.
  keep(name, record) {
    this.stored.records.set(name, record);
    const others = this.latest.filter((each) => each !== name && this.photos.has(each));
    this.latest = [name, ...others];
    for (const each of this.latest.splice(FORWARDS)) this.dropForward(each);
  }

  // The key of a forward: its photo, and the heads that are off in this state.
  key(name, { off, way }) {
    return JSON.stringify([this.photos.get(name).number, off, off.length && way]);
  }

  // The record of a photo with some heads off, and that of the whole model beside it.
  async record(name, { off, way }) {
    const { stored } = this;
    const photo = this.photos.get(name);
    const key = this.key(name, { off, way });
    const given = { key, input: photo.input, off, mean: way === "mean" };
    let whole = null;
    if (off.length) {
      photo.whole ||= await this.record(name, { off: [] });
      whole = photo.whole;
    }
    const { logits, layers, tokens } = await this.ask("forward", given);
    const shares = sharesOf(logits, stored.base.outputs);
    const classes = [...shares.keys()].sort((a, b) => shares[b] - shares[a]);
    return {
      ...stored.base,
      key,
      given,
      picture: photo.picture,
      about: photo.about,
      layers,
      tokens,
      logits,
      shares,
      likeliest: classes.slice(0, LIKELIEST),
      whole,
      maps: {},
      contributions: {},
      lens: [],
      note: off.length ? offWords(off, way) : "",
      ...namesOf(stored),
    };
  }

  // Computes what the view of the new state needs, before it is drawn.
  async prepare(source, content, [buffer]) {
    if ("upload" in content) await this.receive(source, content, buffer);
    this.sortOff(source);
    const { state } = source;
    const name = state.photograph;
    const { records } = source.page;
    if (records.get(name).key !== this.key(name, state)) {
      if (source.traits.frame) this.preview(source, this.photos.get(name));
      this.keep(name, await this.record(name, state));
      source.change({});
    }
    await this.explain(source.record, source.state.view, source.view, source.choice);
  }

  // Puts the heads that are off in the order of layers.
  sortOff(source) {
    const control = source.controls().find((each) => each.name === "off");
    const places = control.options.map(([, place]) => place);
    const off = places.filter((place) => source.state.off.some((each) => isEqual(each, place)));
    source.state = { ...source.state, off };
  }

  async receive(source, { upload, file, of }, buffer) {
    source.emit("msg:custom", { file, received: of }, []);
    await this.add(upload, buffer);
    source.state = { ...source.state, photograph: upload };
  }

  // Shows a photo before the model has run on it.
  preview(source, { picture }) {
    const { traits } = source;
    const running = { strength: 0, words: say("running") };
    traits.pictures = { picture };
    traits.frame = {
      ...traits.frame,
      panels: traits.frame.panels.map((panel) => ({ ...panel, ...running })),
      bars: [],
      score: null,
      parts: null,
      lens: null,
      mosaic: null,
    };
    source.emit("change:frame");
  }

  // Fills in what a record lacks for a view.
  async explain(record, name, view, { target, against }) {
    const { off, mean } = record.given;
    const replaced = mean && off.length; // by vectors that no head has written
    if (replaced && ["contributions", "balanced_gradients"].includes(name)) {
      throw Error(say("not additive"));
    }
    const key = pairOf(target, against);
    if (name === "lens") {
      if (!record.lens[0]?.of[target]) await this.addLens(record, target);
    } else if (name === "contributions") {
      if (!record.contributions[key]) await this.addContributions(record, target, against);
    } else if (view.explains && !view.layered && !record.maps[name]?.[key]) {
      await this.addMaps(record, target, against, replaced);
    }
  }

  async addLens(record, target) {
    const whole = record.whole?.likeliest || [];
    const targets = [...new Set([...record.likeliest, ...whole, target])];
    record.lens = await this.ask("lens", { ...record.given, targets });
  }

  async addContributions(record, target, against) {
    const given = { ...record.given, target, against };
    const { embedding, biases, ...parts } = await this.ask("contributions", given);
    const others = [
      [say("embedding"), embedding],
      [say("biases"), biases],
    ];
    const title = say(against === null ? "parts" : "parts difference");
    const note = say("parts note", { logit: formatLikePython(parts.logit) });
    record.contributions[pairOf(target, against)] = { ...parts, title, others, note };
  }

  // Adds the maps of all methods. replaced: without those that this does not allow.
  async addMaps(record, target, against, replaced) {
    const key = pairOf(target, against);
    const other = against === null ? null : classWords(record, against);
    const rather = other === null ? "" : say("rather than", { target: other });
    const score = { title: say("trust"), words: say("live unscored"), starts: say("score it") };
    const maps = await this.ask("why", { ...record.given, target, against });
    for (const [name, values] of Object.entries(maps)) {
      if (name === "balanced_gradients" && replaced) continue;
      const method = this.stored.views[name]?.entry;
      const words = say("for", { method, target: classWords(record, target) }) + rather;
      record.maps[name] ||= {};
      record.maps[name][key] = { values, words, score };
    }
  }
}

// RGB levels of a patch: rows of pixels, from the levels of the model's input.
function pixelsOfPatch(seen, [row, col], { patch: [height, width], image }) {
  const pixelAt = (y, x) => {
    const start = 3 * (y * image[1] + x);
    return [...seen.subarray(start, start + 3)];
  };
  const rowAt = (y) => Array.from({ length: width }, (_, x) => pixelAt(y, col * width + x));
  return Array.from({ length: height }, (_, y) => rowAt(row * height + y));
}

// The numbers of the tour for the patch, layer and head of a state, as `tour` in details.py.
async function tourOf(live, { record, choice, state }) {
  const { photograph, layer, row, column } = state;
  const { grid, outputs, given } = record;
  const { prefix, rows, cols, patch, image } = grid;
  const query = [row, column];
  const { seen } = live.photos.get(photograph);
  const stream = await live.ask("stream", { ...given, at: patchIndex(grid, query) });
  await live.explain(record, "lens", {}, choice);
  const head = typeof state.head === "number" ? state.head : "mean";
  const weights = record.layers.map((_, l) => {
    const heads = readAttention(record, l, queryRow(record, query));
    return heads.map((values) => [...patchesOf(record, values)]);
  });
  const about = {
    prefix,
    rows,
    cols,
    patch,
    image,
    layer,
    row,
    col: column,
    ...stream,
    plain: outputs === "value",
    pixels: pixelsOfPatch(seen, query, grid),
    value: explainWeight(record, { layer, head, query, key: null }),
    heads: weights[layer],
    depth: weights.map((maps) => fuse(maps, "mean")),
    lens: record.lens.map(({ classes, shares }) => [record.label(classes[0]), shares[0]]),
  };
  return { ...about, sentences: tourWords(about, grid.reads) };
}

function extraWords(prefix) {
  if (!prefix.length) return "";
  return prefix.length === 1 ? ` with the ${prefix[0]}` : ` with ${prefix.length} prefix tokens`;
}

// A sentence for each step of the tour, as `_sentences` in details.py. reads: name of what the classifier head reads.
function tourWords(about, reads) {
  const { image, rows, cols, patch, pixels, token, position, prefix, layer, value } = about;
  const { lengths, added, heads, lens, plain } = about;
  const [height, width] = patch;
  const key = value.key - prefix.length;
  const tops = heads.map(largestOf);
  const lowest = formatLikePython(smallestOf(tops));
  const highest = formatLikePython(largestOf(tops));
  const isShort = tops.length <= LISTED;
  const reach = isShort ? tops.map(formatLikePython).join(", ") : `${lowest} to ${highest}`;
  const format = plain ? formatLikePython : formatPercent;
  const before = formatLikePython(lengths[layer]);
  const [attention, mlp] = added[layer].map(formatLikePython);
  const [first, firstScore] = lens[0];
  const [last, lastScore] = lens.at(-1);
  const fields = {
    image: image.join(" × "),
    channels: "3 numbers",
    middle: pixels[height >> 1][width >> 1].join(", "),
    rows,
    cols,
    patches: rows * cols,
    patch: patch.join(" × "),
    size: 3 * height * width,
    width: token.length,
    table: position ? "a" : "no",
    tokens: value.logits.length,
    extra: extraWords(prefix),
    layer,
    head: value.head,
    row: Math.floor(key / cols),
    column: key % cols,
    products: value.q.length,
    logit: formatLikePython(value.logits[value.key]),
    weight: formatLikePython(value.weight),
    heads: tops.length,
    reach,
    added: say("tour parts", { before, first: attention, second: mlp }),
    after: formatLikePython(lengths[layer + 1]),
    answer: say("tour answer", {
      readout: /^(the|what|no) /.test(reads) ? reads : `the ${reads}`,
      first,
      before: format(firstScore),
      last,
      after: format(lastScore),
    }),
  };
  const steps = ["pixels", "patches", "tokens", "product", "softmax", "heads", "stream", "depth"];
  return steps.map((step) => say(`tour ${step}`, fields));
}

// Names of up to four heads, or the number of more.
function headsWords(heads) {
  if (heads.length > LISTED) return say("count of heads", { count: heads.length });
  const names = heads.map(([layer, head]) =>
    say("head of", { head, layer: say("layer", { layer }) }),
  );
  return names.join(", ");
}

// Names the heads that are off, and how.
function offWords(off, way) {
  const how = say(`by ${way}`, { count: 6 }).replace("their", "its");
  return say(off.length === 1 ? "off" : "all off", { heads: headsWords(off), way: how });
}

// The page of PageSource, after the forward of its first photo.
async function openLive(stored) {
  WORDS = stored.words;
  const ask = startWorker(stored.worker);
  const live = new Live(stored, ask);
  const copy = (part) => bytesOf(part).slice().buffer;
  const weights = copy(stored.weights);
  const probes = stored.probes.map(({ kind, file, levels }) => ({
    kind,
    file: copy(file),
    levels: new Uint8Array(copy(levels)),
  }));
  await ask("open", { about: stored.network, weights, wasm: copy(stored.wasm), probes });
  stored.records = new Map();
  for (const { name, png, ...more } of stored.photos) {
    await live.add(name, copy(png), { ...more, ready: true });
  }
  const first = stored.photos[0].name;
  live.keep(first, await live.record(first, { off: [] }));
  const tour = (source) => tourOf(live, source);
  const prepare = (...message) => live.prepare(...message);
  const score = (source) => scoreMap(live, source);
  return { ...stored, tour, prepare, score, cancel: () => live.cancel() };
}
