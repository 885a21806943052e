// Writes a photo of a live page as a file of its own, without the model: what the views show of it, for the likeliest
// classes. Such a file is a saved page, as `save_page` of in_page writes it.

import { putImage } from "../front/elements.js";
import { pairOf } from "../in_page/maps.js";
import { say } from "../in_page/numbers.js";
import { viewMenu } from "./adapt.js";
import { viewOf, writePage } from "./kept.js";

const CLASSES = 5; // likeliest classes that are explained, as BARS in explorer.py
const NEED_FORWARDS = ["whole", "another", "against", "off", "way"]; // controls that such a page does not have
const PARTS = 2; // of a layer that add to a token: attention and MLP

// A value of a record as `pack` takes it: numbers in single precision, and files as they are.
function makeStorable(value) {
  if (value instanceof Uint8Array) return viewOf(value);
  if (ArrayBuffer.isView(value))
    return value instanceof DataView ? value : Float32Array.from(value);
  if (Array.isArray(value)) return value.map(makeStorable);
  if (typeof value !== "object" || value === null) return value;
  return Object.fromEntries(
    Object.entries(value).map(([name, each]) => [name, makeStorable(each)]),
  );
}

// The model's input as a PNG file.
async function encodeSeen({ seen, image: [height, width] }) {
  const pixels = new ImageData(width, height);
  for (let i = 0; i < width * height; i += 1) {
    pixels.data.set([...seen.subarray(3 * i, 3 * i + 3), 255], 4 * i);
  }
  const canvas = putImage(new OffscreenCanvas(1, 1), pixels);
  const file = await canvas.convertToBlob();
  return new DataView(await file.arrayBuffer());
}

// The numbers of the tour for all patches, as `details.streams`. report: called with the share that is done.
async function readStreams(live, { grid, given, layers }, photo, report) {
  const { rows, cols } = grid;
  const count = rows * cols;
  const streams = [];
  for (let at = 0; at < count; at += 1) {
    streams.push(await live.ask("stream", { ...given, at }));
    report((at + 1) / count);
  }
  const lengthsOf = (layer) => streams.map(({ lengths }) => lengths[layer]);
  const addedOf = (layer) => streams.flatMap(({ added }) => added[layer]);
  const states = Array.from({ length: layers.length + 1 }, (_, layer) => layer);
  const places = streams.map(({ position }) => position);
  return {
    seen: await encodeSeen(photo),
    tokens: Float32Array.from(streams.flatMap(({ token }) => token)),
    positions: places[0] && Float32Array.from(places.flat()),
    lengths: Float32Array.from(states.flatMap(lengthsOf)),
    added: Float32Array.from(layers.flatMap((_, layer) => addedOf(layer))),
    parts: PARTS,
    channels: 3,
    table: Boolean(places[0]),
  };
}

// Computes what the views show of the likeliest classes.
async function explainClasses(live, record, classes, report) {
  const { views } = live.stored;
  const explaining = Object.keys(views).find(
    (name) => views[name].explains && !views[name].layered,
  );
  for (const [k, target] of classes.entries()) {
    const choice = { target, against: null };
    for (const name of [explaining, "contributions", "lens"].filter((name) => name in views)) {
      await live.explain(record, name, views[name], choice);
    }
    report((k + 1) / classes.length);
  }
}

// A map as a saved page has it, which cannot score.
function withoutScore({ values, words, title, score }) {
  const unscored = { title: score.title, words: say("photo unscored") };
  return { values, words, title, score: score.curves ? score : unscored };
}

// The entries of `of` for the likeliest classes.
function pickClasses(of, classes, change = (each) => each) {
  const keys = classes.map((target) => pairOf(target, null)).filter((key) => key in of);
  return Object.fromEntries(keys.map((key) => [key, change(of[key])]));
}

// The record of a photo as a file has it.
function describeRecord(record, name, classes, streams) {
  const { picture, about, gated, outputs, heads, layers, tokens, logits, grid, lens } = record;
  const maps = {};
  for (const [method, of] of Object.entries(record.maps)) {
    maps[method] = pickClasses(of, classes, withoutScore);
  }
  return makeStorable({
    name,
    picture,
    about,
    gated,
    outputs,
    heads,
    likeliest: classes,
    maps,
    contributions: pickClasses(record.contributions, classes),
    lens,
    layers,
    tokens,
    logits,
    grid,
    streams,
  });
}

// The views that a file has of a record.
function keepViews(views, { maps, contributions, lens }) {
  const isThere = (name, { explains, layered }) => {
    if (name === "contributions") return Object.keys(contributions).length > 0;
    if (name === "lens") return lens.length > 0;
    return !explains || layered || Object.keys(maps[name] || {}).length > 0;
  };
  return Object.fromEntries(Object.entries(views).filter((each) => isThere(...each)));
}

// The menu of views, whose line about heads is that of a page in which none is turned off.
function keepMenu(control, views) {
  const { options, groups } = viewMenu(control, views);
  const lineOf = (part) => (part === say("line decide") ? say("line decide saved") : part);
  return { ...control, options, groups: groups.map((group) => group.map(lineOf)) };
}

// The controls of a view without those that need forwards.
function keepControls(controls, views, photograph) {
  const left = controls.filter(({ name }) => !NEED_FORWARDS.includes(name));
  return left.map((control) => {
    if (control.name === "photograph") return { ...control, options: [[photograph, photograph]] };
    if (control.name === "view") return keepMenu(control, views);
    return control;
  });
}

// The state of a file that opens as the page is now.
function keepState(state, views, classes) {
  const kept = { ...state };
  for (const name of [...NEED_FORWARDS, "typed"]) delete kept[name];
  const view = state.view in views ? state.view : Object.keys(views)[0];
  const target = classes.includes(state.target) ? state.target : "predicted";
  return { ...kept, view, target };
}

// {name, file: DataView} of the photo in view, with all heads on. report: called with a text and the share done.
export async function keepPhoto(live, source, report) {
  const { stored } = live;
  const { photograph } = source.state;
  const record = source.record.whole || source.record;
  const classes = record.likeliest.slice(0, CLASSES);
  const words = say("keeping");
  await explainClasses(live, record, classes, (share) => report(words, share / 2));
  const photo = live.photos.get(photograph);
  const reportStreams = (share) => report(words, (1 + share) / 2);
  const streams = await readStreams(live, record, photo, reportStreams);
  const kept = describeRecord(record, photograph, classes, streams);
  const views = keepViews(stored.views, kept);
  const controls = {};
  for (const name of Object.keys(views)) {
    controls[name] = keepControls(stored.controls[name], views, photograph);
  }
  const { tables, model, hash, versions } = stored;
  const named = (names) => names && Object.fromEntries(Object.entries(names));
  const content = {
    words: stored.words,
    tables,
    views,
    controls,
    state: keepState(source.state, views, classes),
    model,
    hash,
    versions,
    about: say("photo page"),
    labels: named(stored.labels),
    names: named(stored.names),
    records: [kept],
  };
  const footer = say("photo footer", { name: model, versions, photo: photograph });
  return writePage(stored, content, [photograph], footer, `vitlens-${photograph}`);
}
