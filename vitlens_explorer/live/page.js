// What the file of a saved page holds of a photo comes from the model here, in a worker, when it is needed. Photos
// never leave the page, whose policy forbids every request.

import { bytesOf, isEqual } from "../front/values.js";
import { describeTour } from "../in_page/details.js";
import { classWords, headsWords, pairOf, patchIndex, targetWords } from "../in_page/maps.js";
import { formatLikePython, namesOf, say, setWords, sharesOf } from "../in_page/numbers.js";
import { adaptPage, firstState, gridOf } from "./adapt.js";
import { Beside } from "./beside.js";
import { keepPage } from "./kept.js";
import { keepPhoto } from "./photo_page.js";
import { measureEffects, scoreMap } from "./scores.js";
import { describeSize } from "./sizes.js";

const LIKELIEST = 10; // classes that can be explained
const FORWARDS = 3; // photos whose forwards are kept: 12 MB each for a ViT-Ti
const UPLOADS = 40; // uploaded photos whose files are kept
const ADDITIVE = ["contributions", "balanced_gradients"]; // views whose parts add up to the logit
const SQUEEZED = 1.2; // smallest change of proportions that is named

// Starts the worker. Returns ask(task, given, report), which resolves to its answer. Calls report(share) on the way.
// ask.end() ends the worker.
function startWorker(script) {
  const thread = new Worker(URL.createObjectURL(new Blob([script], { type: "text/javascript" })));
  const ask = (task, given, report = () => {}) =>
    new Promise((done, fail) => {
      const { port1, port2 } = new MessageChannel();
      port1.onmessage = ({ data: { share, result, error, ...more } }) => {
        if (share !== undefined) report(share);
        else if (error === undefined) done(result);
        else fail(Object.assign(Error(error), more));
      };
      thread.postMessage({ ...given, task, port: port2 }, [port2]);
    });
  ask.end = () => thread.terminate();
  return ask;
}

class Live {
  photos = new Map();
  count = 0; // number of photos that were read
  running = null; // the scoring that is going on
  latest = []; // names of the photos whose forwards are kept, the latest first
  coming = null; // the Beside that is being opened
  files = []; // of the model
  folder = ""; // from which they were opened
  own = []; // [name, file] of the page's own photos, which an upload of the same name does not replace

  constructor(stored, ask) {
    this.stored = stored;
    this.ask = ask;
    this.reference = { views: stored.views, controls: stored.controls };
    this.measured = false; // the mean outputs of heads
    stored.records = new Map();
    for (const { name, file, ready, about, uploaded = false } of stored.photos) {
      const photo = { file: new Blob([bytesOf(file)]), ready, about, uploaded };
      if (!uploaded) this.own.push([name, photo.file]);
      this.photos.set(name, photo);
      this.dropForward(name);
    }
    this.listPhotos();
  }

  // Stops the scoring of a map and the opening of a model.
  cancel() {
    if (this.running) this.running.isCanceled = true;
    this.ask("cancel");
    this.coming?.live.cancel();
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

  // Reads a photo for the model. `ready` ones are model inputs of the page's own photos, which are only normalized.
  // whole: without a crop.
  async read(name, { file, ready, about, uploaded }, whole = false) {
    const bytes = await file.arrayBuffer();
    const photo = await this.ask("photo", { bytes, ready, whole }).catch(({ problem, fields }) => {
      throw Error(say(problem || "no image", { name, ...fields }));
    });
    this.count += 1;
    const note = ready ? about : this.describe(name, photo, whole);
    return { ...photo, number: this.count, file, ready, about: note, uploaded, isWhole: whole };
  }

  // Reads a photo if the model has not, or has with another crop.
  async load(name, whole = false) {
    const photo = this.photos.get(name);
    if (photo.input && photo.isWhole === whole) return;
    this.photos.set(name, await this.read(name, photo, whole));
  }

  // True if the model can see a photo without a crop: the page has more of it than the model's input.
  canShowWhole(name) {
    return Boolean(this.stored.network?.stretches && !this.photos.get(name).ready);
  }

  // True if the model sees a photo without a crop in a state.
  isWhole(name, { whole }) {
    return Boolean(whole) && this.canShowWhole(name);
  }

  // Adds an uploaded photo.
  async add(name, bytes) {
    const photo = await this.read(name, { file: new Blob([bytes]), ready: false, uploaded: true });
    this.photos.delete(name);
    this.photos = new Map([[name, photo], ...this.photos]);
    this.forgetLikeness(name);
    this.dropForward(name);
    const uploads = [...this.photos.keys()].filter((each) => this.photos.get(each).uploaded);
    for (const oldest of uploads.slice(UPLOADS)) {
      this.photos.delete(oldest);
      this.stored.records.delete(oldest);
    }
    this.listPhotos();
  }

  // Writes the names of the photos into their menu.
  listPhotos() {
    const options = [...this.photos.keys()].map((each) => [each, each]);
    for (const controls of Object.values(this.stored.controls)) {
      controls.find((each) => each.name === "photograph").options = options;
    }
  }

  // Notes on an uploaded photo.
  describe(name, { clear, turned, frames, gray, exact, plain, width, height }, whole) {
    const notes = [];
    if (clear) notes.push(say("over white", { name }));
    if (turned) notes.push(say("turned", { name }));
    if (frames > 1) notes.push(say("frames", { name, count: frames }));
    if (gray) notes.push(say("ends gray", { name }));
    if (!exact) notes.push(say(plain ? "other decoder" : "other levels", { name }));
    if (!whole) notes.push(cropWords(this.stored.network, width, height));
    return notes.filter(Boolean).join(" ");
  }

  // Forgets what the model gave for a photo. It runs again when the photo is chosen.
  dropForward(name) {
    const empty = { likeliest: [], layers: [], shares: [], key: "" };
    this.photos.get(name).whole = null;
    this.stored.records.set(name, { ...this.stored.base, ...empty });
  }

  // Forgets the maps of the similarity to a photo, in whose place another came.
  forgetLikeness(name) {
    const key = pairOf(["picture", name], null);
    for (const { maps = {} } of this.stored.records.values()) {
      for (const pairs of Object.values(maps)) delete pairs[key];
    }
  }

  // Forgets what was read of a photo besides its file, and what the model gave for it, until it is chosen again.
  forget(name) {
    Object.assign(this.photos.get(name), { input: null, seen: null, picture: null });
    this.dropForward(name);
  }

  // Keeps the record of a photo, and forgets photos that were not shown lately.
  keep(name, record) {
    this.stored.records.set(name, record);
    const others = this.latest.filter((each) => each !== name && this.photos.has(each));
    this.latest = [name, ...others];
    for (const each of this.latest.splice(FORWARDS)) this.forget(each);
  }

  // The key of a forward: its photo, and the heads that are off in this state.
  key(name, { off, way }) {
    return JSON.stringify([this.photos.get(name).number, off, off.length && way]);
  }

  // What all records of a photo have: the model's, with the grid of a photo that is not cropped.
  baseOf({ isWhole, image }) {
    const { base, network } = this.stored;
    if (!isWhole) return base;
    return { ...base, grid: gridOf({ ...network, ...describeSize(network, image) }) };
  }

  // The record of a photo with some heads off, and that of the whole model beside it.
  async record(name, state) {
    const { stored } = this;
    const { off, way } = state;
    await this.load(name, this.isWhole(name, state));
    const photo = this.photos.get(name);
    if (off.length && way === "mean") await this.prepareMeans(photo);
    const key = this.key(name, { off, way });
    const given = { key, input: photo.input, image: photo.image, off, mean: way === "mean" };
    let whole = null;
    if (off.length) {
      photo.whole ||= await this.record(name, { ...state, off: [] });
      whole = photo.whole;
    }
    const { logits, layers, tokens } = await this.ask("forward", given);
    const shares = sharesOf(logits, stored.base.outputs);
    const classes = [...shares.keys()].sort((a, b) => shares[b] - shares[a]);
    const notes = [off.length ? offWords(off, stored.ways[way]) : "", squeezedWords(photo)];
    return {
      ...this.baseOf(photo),
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
      note: notes.join(""),
      ...namesOf(stored),
    };
  }

  // Computes what the view of the new state needs, before it is drawn. Resolves to a sentence on a value that the view
  // has changed, or "".
  async prepare(source, content, buffers) {
    if (content.press === "alone") this.showAlone();
    if (content.press === "twin") await this.showTwin(source);
    else if (content.beside) await this.showBeside(source, content, buffers);
    else if ("open" in content) await this.show(source, content, buffers);
    if ("upload" in content) await this.receive(source, content, buffers[0]);
    this.sortOff(source);
    const remark = this.replaceByZero(source);
    const { state } = source;
    const name = state.photograph;
    const { records } = source.page;
    await this.load(name, this.isWhole(name, state));
    if (records.get(name).key !== this.key(name, state)) {
      const photo = this.photos.get(name);
      const isOther = photo.picture !== source.traits.pictures?.picture;
      if (isOther && source.traits.frame) this.preview(source, photo);
      this.keep(name, await this.record(name, state));
      source.change({});
    }
    await this.explain(source.record, source.state.view, source.view, source.choice);
    await this.stored.beside?.follow(source);
    return remark;
  }

  // Replaces heads by zero in a view whose parts add up only then. Returns a sentence about it, or "".
  replaceByZero(source) {
    const { off, way, view } = source.state;
    if (!off.length || way !== "mean" || !ADDITIVE.includes(view)) return "";
    source.state = { ...source.state, way: "zero" };
    return say("zero now");
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
    const running = { strength: 0, words: say("running"), plain: "" };
    const { model, opened = "" } = this.stored;
    const panels = traits.frame.panels.map((panel) => ({ ...panel, ...running }));
    traits.pictures = Object.fromEntries(panels.map((panel) => [panel.picture, picture]));
    traits.frame = {
      ...traits.frame,
      model,
      opened,
      panels,
      bars: [],
      score: null,
      parts: null,
      lens: null,
      mosaic: null,
    };
    source.emit("change:frame");
  }

  // Opens the files of a model, which the page shows from here on. After an error it has the model before.
  // facts: as for `adaptPage`.
  async open(files, folder, report, facts = null) {
    if (this.running) this.running.isCanceled = true; // it scores a map of the model before
    const weights = files.find(({ name }) => name.endsWith(".safetensors"));
    const name = folder || weights?.name || say("files");
    const words = say("opening", { name });
    report(words);
    const given = { files, wasm: bytesOf(this.stored.wasm).slice().buffer };
    const shows = (share) => report(words, share);
    const model = await this.ask("read", given, shows).catch(({ problem, fields, message }) => {
      throw Error(problem ? say(problem, fields) : say("not opened", { name, error: message }));
    });
    const isFirst = !this.stored.network; // only photos for the model before are its inputs
    adaptPage(this.stored, this.reference, model, folder, this.own.length, facts);
    if (facts) await this.ask("replacements", { means: facts.means });
    this.measured = Boolean(facts);
    this.latest = [];
    for (const photo of this.photos.values()) {
      photo.input = null;
      photo.ready = isFirst && photo.ready;
    }
    for (const each of this.photos.keys()) this.dropForward(each);
    this.listPhotos();
    this.files = files;
    this.folder = folder;
    this.stored.keep = (source) => keepPage(this, source.state);
    this.stored.keepPhoto = (source, report) => keepPhoto(this, source, report);
  }

  // Opens the model of the page a second time beside itself.
  showTwin(source) {
    const { files, folder } = this;
    return this.showBeside(source, { open: folder, isTwin: true }, files);
  }

  // Opens a model beside that of the page.
  async showBeside(source, { open: folder, isTwin = false }, files) {
    const beside = new Beside(await this.startCompanion(), this, isTwin);
    this.coming = beside;
    try {
      await source.withProgress((report) => beside.open(files, folder, report, source));
    } catch (error) {
      beside.close();
      throw error;
    } finally {
      this.coming = null;
    }
    this.showAlone();
    this.stored.beside = beside;
    source.state = { ...source.state, ...beside.firstChoices() };
  }

  // A Live for a model beside that of the page, without its files yet.
  startCompanion() {
    const { stored, reference } = this;
    const controls = structuredClone(reference.controls); // each model writes its limits into its own
    return startLive({ ...stored, ...reference, controls, beside: null });
  }

  // Shows the model of the page alone.
  showAlone() {
    this.stored.beside?.close();
    this.stored.beside = null;
  }

  // Opens a model in a page that shows another one.
  async show(source, { open: folder }, files) {
    const { grid } = this.stored.base;
    await source.withProgress((report) => this.open(files, folder, report));
    if (this.stored.beside?.isTwin) this.showAlone();
    const photograph = await this.findReadable(source.state.photograph);
    source.state = firstState(this.stored, { ...source.state, photograph }, grid);
  }

  // Makes the state and the record of the first photo after the first model of a page was opened.
  async showFirst() {
    const { stored } = this;
    const state = firstState(stored, stored.state, null);
    stored.state = state;
    this.keep(state.photograph, await this.record(state.photograph, state));
  }

  // A photo that the model takes: that of the name, else the page's own. A strip is too narrow for some sizes.
  async findReadable(name) {
    try {
      await this.load(name);
      return name;
    } catch {
      const [own = name] = this.own[0] || []; // a kept page may have uploads alone
      return own;
    }
  }

  // Prepares the mean outputs of heads for a photo.
  async prepareMeans({ isWhole }) {
    if (isWhole) throw Error(say("no means of whole"));
    await this.measureMeans();
  }

  // Measures the mean outputs of heads over the page's own photos, once for a model.
  async measureMeans() {
    if (this.measured) return;
    const inputs = [];
    for (const [name, file] of this.own) inputs.push((await this.read(name, { file })).input);
    await this.ask("means", { inputs });
    this.measured = true;
  }

  // Fills in what a record lacks for a view.
  async explain(record, name, view, { target, against }) {
    const { off, mean } = record.given;
    const replaced = mean && off.length; // by vectors that no head has written
    if (view.explains && target === undefined) throw Error(say("no other photo"));
    const isWhole = record.grid !== this.stored.base.grid;
    if (isWhole && Array.isArray(target)) throw Error(say("no similarity of whole"));
    const key = pairOf(target, against);
    if (name === "lens") {
      if (!record.lens[0]?.of[target]) await this.addLens(record, target);
    } else if (name === "contributions") {
      if (!record.contributions[key]) await this.addContributions(record, target, against);
    } else if (view.explains && !view.layered && !record.maps[name]?.[key]) {
      await this.addMaps(record, { target, against }, replaced);
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

  // What a photo gives the head, scaled to length 1, with the same heads off as in a forward.
  async likenessTo(name, { off, mean }) {
    await this.load(name);
    const { input, image } = this.photos.get(name);
    const way = mean ? "mean" : "zero";
    return this.ask("features", { key: this.key(name, { off, way }), input, image, off, mean });
  }

  // Adds the maps of all methods for a class, or for the similarity to another photo. replaced: without those that this
  // does not allow.
  async addMaps(record, { target, against }, replaced) {
    const key = pairOf(target, against);
    const isLikeness = Array.isArray(target);
    const other = against === null ? null : classWords(record, against);
    const rather = other === null ? "" : say("rather than", { target: other });
    const score = { title: say("trust"), words: say("live unscored"), starts: say("score it") };
    const like = isLikeness ? await this.likenessTo(target[1], record.given) : null;
    const of = isLikeness ? { like } : { target, against };
    const maps = await this.ask("why", { ...record.given, ...of }).catch(({ problem, message }) => {
      throw Error(problem ? say(problem, { name: target[1] }) : message);
    });
    for (const [name, values] of Object.entries(maps)) {
      if (name === "balanced_gradients" && replaced) continue;
      const { entry: method, similar } = this.stored.views[name] || {};
      const words = say("for", { method, target: targetWords(record, target) }) + rather;
      record.maps[name] ||= {};
      record.maps[name][key] = { values, words, score, like, title: isLikeness ? similar : "" };
    }
  }
}

// A sentence about the part of a photo that the model sees, as `crop_words`, and about its proportions.
function cropWords({ image, resized, squeezed }, width, height) {
  const sides = squeezed ? [width, height] : Array(2).fill(Math.min(width, height));
  const [cols, rows] = sides.map((side) => Math.round((side * image[0]) / resized));
  const times = Math.max(width / height, height / width);
  let words = "";
  if (cols < width || rows < height) {
    const fields = Object.entries({ cols, rows, width, height });
    const shown = fields.map(([name, count]) => [name, count.toLocaleString("en")]);
    words = say("cropped", Object.fromEntries(shown));
  }
  if (squeezed && times > SQUEEZED) words += say("squeezed", { times: times.toFixed(1) });
  return words.trim();
}

// A sentence about the proportions of a photo that is not cropped, or "".
function squeezedWords({ isWhole, image, width, height }) {
  if (!isWhole) return "";
  const ratio = (width * image[0]) / (height * image[1]);
  const times = Math.max(ratio, 1 / ratio);
  return times > SQUEEZED ? say("squeezed", { times: times.toFixed(1) }) : "";
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
  const { grid, given } = record;
  const query = [state.row, state.column];
  const { seen } = live.photos.get(state.photograph);
  const stream = await live.ask("stream", { ...given, at: patchIndex(grid, query) });
  if (record.likeliest.length) await live.explain(record, "lens", {}, choice);
  return describeTour(record, state, { ...stream, pixels: pixelsOfPatch(seen, query, grid) });
}

// Names the heads that are off, and what replaces them.
function offWords(off, way) {
  const how = way.replace("their", "its");
  return say(off.length === 1 ? "off" : "all off", { heads: headsWords(off), way: how });
}

// The worker and the photos of a page, which gets what PageSource needs from them.
export async function startLive(stored) {
  setWords(stored.words);
  const live = new Live(stored, startWorker(stored.worker));
  Object.assign(stored, {
    opens: true,
    ask: live.ask, // for scripts that drive the page
    tour: (source) => tourOf(live, source),
    prepare: (...message) => live.prepare(...message),
    score: (source) => scoreMap(live, source),
    effects: (source) => measureEffects(live, source),
    cancel: () => live.cancel(),
    canShowWhole: (name) => live.canShowWhole(name),
  });
  const copy = (part) => bytesOf(part).slice();
  const probes = stored.probes.map(({ kind, file, levels }) => ({
    kind,
    file: copy(file).buffer,
    levels: copy(levels),
  }));
  await live.ask("prove", { probes });
  return live;
}
