// What the file of a saved page holds of a photo comes from the model here, in a worker, when it is needed. Photos
// never leave the page, whose policy forbids every request.

const LIKELIEST = 10;

// Starts the worker. Returns ask(task, given), which resolves to its answer.
function worker(script) {
  const thread = new Worker(URL.createObjectURL(new Blob([script], { type: "text/javascript" })));
  return (task, given) =>
    new Promise((done, fail) => {
      const { port1, port2 } = new MessageChannel();
      port1.onmessage = ({ data: { result, error } }) =>
        error === undefined ? done(result) : fail(Error(error));
      thread.postMessage({ ...given, task, port: port2 }, [port2]);
    });
}

class Live {
  photos = new Map();
  read = 0; // number of photos that were read

  constructor(stored, ask) {
    Object.assign(this, { stored, ask });
  }

  // Reads a file. `ready` files are model inputs of the page's own photos, which are only normalized.
  async add(name, bytes, { about = "", ready = false } = {}) {
    const photo = await this.ask("photo", { bytes, ready }).catch(() => {
      throw Error(say("no image", { name }));
    });
    if (photo.clear) about += say("over white", { name });
    if (!photo.exact) about += say("other levels", { name });
    Object.assign(photo, { about, number: (this.read += 1) });
    this.photos.delete(name);
    this.photos = new Map(
      ready ? [...this.photos, [name, photo]] : [[name, photo], ...this.photos],
    );
    for (const controls of Object.values(this.stored.controls))
      controls.find((each) => each.name === "photograph").options = [...this.photos.keys()].map(
        (each) => [each, each],
      );
    this.stored.records.set(name, {
      ...this.stored.base,
      likeliest: [],
      layers: [],
      shares: [],
      key: "",
    });
  }

  // The key of a forward: its photo, and the heads that are off in this state.
  key(name, { off, way }) {
    return JSON.stringify([this.photos.get(name).number, off, off.length && way]);
  }

  async record(name, { off, way }) {
    const { stored, photos } = this,
      { input, picture, about } = photos.get(name);
    const key = this.key(name, { off, way }),
      given = { key, input, off, mean: way === "mean" };
    const whole = off.length
      ? (photos.get(name).whole ||= await this.record(name, { off: [] }))
      : null;
    const { logits, layers, tokens } = await this.ask("forward", given);
    const shares = sharesOf(logits, stored.base.outputs);
    const likeliest = [...shares.keys()].sort((a, b) => shares[b] - shares[a]).slice(0, LIKELIEST);
    return {
      ...stored.base,
      key,
      given,
      picture,
      about,
      layers,
      tokens,
      logits,
      shares,
      likeliest,
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
    const places = source
      .controls()
      .find((each) => each.name === "off")
      .options.map(([, place]) => place);
    const off = places.filter((place) => source.state.off.some((each) => same(each, place))); // in the order of layers
    const state = (source.state = { ...source.state, off }),
      name = state.photograph,
      { records } = source.page;
    if (records.get(name).key !== this.key(name, state)) {
      if (source.traits.frame) this.preview(source, this.photos.get(name));
      records.set(name, await this.record(name, state));
      source.change({});
    }
    await this.explain(source.record, state.view, source.view, source.choice);
  }

  async receive(source, { upload, file, of }, buffer) {
    source.emit("msg:custom", { file, received: of }, []);
    await this.add(upload, buffer);
    source.state = { ...source.state, photograph: upload };
  }

  // Shows a photo before the model has run on it.
  preview(source, { picture }) {
    const { traits } = source,
      running = { strength: 0, words: say("running") };
    const panels = traits.frame.panels.map((panel) => ({ ...panel, ...running }));
    traits.pictures = { picture: (source.pictured = picture) };
    traits.frame = {
      ...traits.frame,
      panels,
      bars: [],
      score: null,
      parts: null,
      lens: null,
      mosaic: null,
    };
    source.emit("change:frame");
  }

  async explain(record, name, view, { target, against }) {
    const given = { ...record.given, target, against },
      key = pairOf(target, against);
    const replaced = given.mean && given.off.length; // by vectors that no head has written
    if (replaced && ["contributions", "balanced_gradients"].includes(name))
      throw Error(say("not additive"));
    if (name === "lens" && !record.lens[0]?.of[target]) {
      const targets = [
        ...new Set([...record.likeliest, ...(record.whole?.likeliest || []), target]),
      ];
      record.lens = await this.ask("lens", { ...record.given, targets });
    } else if (name === "contributions" && !record.contributions[key]) {
      const { embedding, biases, ...made } = await this.ask("contributions", given);
      const note = say("parts note", { logit: number(made.logit) });
      const others = [
        [say("embedding"), embedding],
        [say("biases"), biases],
      ];
      const title = say(against === null ? "parts" : "parts difference");
      record.contributions[key] = { ...made, title, others, note };
    } else if (view.explains && !view.layered && !record.maps[name]?.[key]) {
      const named = (k) =>
        say("class", { name: record.label(k), score: scoreWords(record, record.shares[k]) });
      const rather = against === null ? "" : say("rather than", { target: named(against) });
      const score = { title: say("trust"), words: say("live unscored") };
      for (const [method, values] of Object.entries(await this.ask("why", given))) {
        if (method === "balanced_gradients" && replaced) continue;
        const words =
          say("for", { method: this.stored.views[method]?.entry, target: named(target) }) + rather;
        (record.maps[method] ||= {})[key] = { values, words, score };
      }
    }
  }
}

// The numbers of the tour for the patch, layer and head of a state, as `tour` in details.py.
async function tourOf(
  photos,
  { record, choice, state: { photograph, layer, head, row, column: col } },
) {
  const {
    grid: {
      prefix,
      rows,
      cols,
      patch: [height, width],
      image,
    },
    outputs,
    given,
  } = record;
  const { seen } = photos.photos.get(photograph);
  const stream = await photos.ask("stream", { ...given, at: row * cols + col });
  await photos.explain(record, "lens", {}, choice);
  const query = [row, col],
    whose = typeof head === "number" ? head : "mean";
  const weights = record.layers.map((_, l) =>
    read(record, l, queryRow(record, query)).map((values) => [...patchesOf(record, values)]),
  );
  const pixel = (y, x) => [...seen.subarray(3 * (y * image[1] + x)).subarray(0, 3)];
  const line = (_, y) =>
    Array.from({ length: width }, (_, x) => pixel(row * height + y, col * width + x));
  const about = {
    prefix,
    rows,
    cols,
    patch: [height, width],
    image,
    layer,
    row,
    col,
    ...stream,
    plain: outputs === "value",
    pixels: Array.from({ length: height }, line),
    value: valueOf(record, { layer, head: whose, query, key: null }),
    heads: weights[layer],
    depth: weights.map((maps) => fuse(maps, "mean")),
    lens: record.lens.map(({ classes, shares }) => [record.label(classes[0]), shares[0]]),
  };
  return { ...about, sentences: tourWords(about) };
}

// A sentence for each step of the tour, as `_sentences` in details.py.
function tourWords({
  image,
  rows,
  cols,
  pixels,
  token,
  position,
  prefix,
  layer,
  value,
  lengths,
  added,
  ...about
}) {
  const [[height, width], key] = [about.patch, value.key - prefix.length];
  const extra = ["", ` with the ${prefix[0]}`, ` with ${prefix.length} prefix tokens`][
    Math.min(prefix.length, 2)
  ];
  const [logit, tops] = [number(value.logits[value.key]), about.heads.map(largestOf)];
  const range = `${number(smallestOf(tops))} to ${number(largestOf(tops))}`;
  const score = about.plain ? number : inPercent;
  const [[first, before], [last, after]] = [about.lens[0], about.lens.at(-1)];
  const [attention, mlp] = added[layer].map(number);
  const fields = {
    image: image.join(" × "),
    channels: "3 numbers",
    middle: pixels[height >> 1][width >> 1].join(", "),
    rows,
    cols,
    patches: rows * cols,
    patch: about.patch.join(" × "),
    size: 3 * height * width,
    width: token.length,
    table: position ? "a" : "no",
    tokens: value.logits.length,
    extra,
    layer,
    head: value.head,
    row: Math.floor(key / cols),
    column: key % cols,
    products: value.q.length,
    logit,
    weight: number(value.weight),
    heads: tops.length,
    reach: tops.length <= 4 ? tops.map(number).join(", ") : range,
    added: say("tour parts", { before: number(lengths[layer]), first: attention, second: mlp }),
    after: number(lengths[layer + 1]),
    answer: say("tour answer", { first, before: score(before), last, after: score(after) }),
  };
  const steps = ["pixels", "patches", "tokens", "product", "softmax", "heads", "stream", "depth"];
  return steps.map((step) => say(`tour ${step}`, fields));
}

function offWords(off, way) {
  const heads = off.map(([layer, head]) =>
    say("head of", { head, layer: say("layer", { layer }) }),
  );
  const which =
    heads.length <= 4 ? heads.join(", ") : say("count of heads", { count: heads.length });
  const each = say(`by ${way}`, { count: 6 }).replace("their", "its");
  return say(heads.length === 1 ? "off" : "all off", { heads: which, way: each });
}

// The page of PageSource, after the forward of its first photo.
async function live(stored) {
  WORDS = stored.words;
  const ask = worker(stored.worker),
    photos = new Live(stored, ask);
  const copy = (part) => bytesOf(part).slice().buffer;
  await ask("open", {
    about: stored.network,
    weights: copy(stored.weights),
    wasm: copy(stored.wasm),
  });
  stored.records = new Map();
  for (const { name, png, ...more } of stored.photos)
    await photos.add(name, copy(png), { ...more, ready: true });
  const first = stored.photos[0].name;
  stored.records.set(first, await photos.record(first, { off: [] }));
  const tour = (source) => tourOf(photos, source);
  return { ...stored, tour, prepare: (...message) => photos.prepare(...message) };
}
