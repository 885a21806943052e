// What Python writes for the model of a page, made here for a model that a person opened. Its controls are those of a
// model with everything, with the limits of this one, and without those of views that it lacks.

import { say } from "../in_page/numbers.js";
import { gridShape } from "./sizes.js";

const IN_LAYER = 2 / 3; // place of the first layer that is shown

// Whether a model has what a view needs: classes, if it cannot explain the similarity to a photo, and a read-out that
// is a weighted sum of tokens.
function hasView({ classes, readout, bends }, view, name, readable) {
  if (view.explains && view.layered && !classes) return false;
  if (bends && name === "balanced_gradients") return false; // no parts add up behind a tanh
  return Boolean(readout) || !readable.includes(name);
}

// The mean distance of uniform attention in pixels, as `TokenGrid.uniform_distance`.
function uniformDistance(rows, cols, [height, width], tokens) {
  const pairs = (count, step) => (step ? 2 : 1) * (count - step);
  let total = 0;
  for (let dy = 0; dy < rows; dy += 1) {
    for (let dx = 0; dx < cols; dx += 1) {
      total += Math.hypot(dy * height, dx * width) * pairs(rows, dy) * pairs(cols, dx);
    }
  }
  return total / (rows * cols * tokens);
}

// Name of what the head reads, as `Forward.readout`.
function readName({ readout, prefix, special }) {
  if (!readout) return "no sum of tokens";
  const read = [...readout.keys()].filter((t) => readout[t]);
  if (read.at(-1) < prefix) return read.map((t) => special[t]).join(" and ");
  return read[0] >= prefix ? "the mean of the patches" : "the mean of all tokens";
}

// The grid of a record, of a model's own size or of another (`describeSize`).
export function gridOf(about) {
  const { image, patch, tokens, special, readout } = about;
  const [rows, cols] = gridShape(about, image);
  return {
    rows,
    cols,
    prefix: special,
    patch,
    image,
    reads: readName(about),
    uniform: uniformDistance(rows, cols, patch, tokens),
    readout: readout && Float32Array.from(readout),
  };
}

// The part of a record that all photos share.
function baseOf(about) {
  return { grid: gridOf(about), heads: about.heads, gated: false, outputs: about.outputs };
}

// A size of the model, if the name of its architecture contains another one.
function otherSize(name, pattern, size, words) {
  const stated = name.split(".")[0].match(pattern)?.[1];
  return stated && Number(stated) !== size ? words : "";
}

// The name of a model for the heading: the title in its config.json, else its architecture in timm and sizes that
// differ from those in it, else its folder, else its class in transformers.
function nameModel({ title, architecture, kind, about }, folder) {
  if (title) return title;
  if (!architecture) return folder || kind;
  const [patch] = about.patch;
  const [side] = about.image;
  const sizes = [
    otherSize(architecture, /patch(\d+)/, patch, `patch ${patch}`),
    otherSize(architecture, /_(\d{2,4})$/, side, `${side} px`),
  ];
  return [architecture, ...sizes.filter(Boolean)].join(", ");
}

// Short names of classes, as `short_names` in photographs.py: the first synonym, if no other class has it.
function shortNames(names) {
  const synonyms = names.map((name) => name.split(",").map((each) => each.trim()));
  const counts = new Map();
  for (const each of synonyms.flatMap((list) => [...new Set(list)])) {
    counts.set(each, (counts.get(each) || 0) + 1);
  }
  return names.map((name, k) => (counts.get(synonyms[k][0]) === 1 ? synonyms[k][0] : name));
}

const layerWords = (layer) => say("layer", { layer });

// Options of the query, as `query_controls`.
function queryOptions({ prefix, reads, readout }) {
  const options = prefix.map((name, position) => [name, position]);
  const others = readout ? options.filter(([name]) => name !== reads) : options;
  const first = readout ? [[`${reads} (read-out)`, "readout"]] : [];
  return [...first, ...others, ["patch", "patch"]];
}

// The menu of views with those that the model has.
export function viewMenu({ options, groups }, views) {
  let at = 0;
  const left = groups.map(([question, count, ...line]) => {
    const own = options.slice(at, at + count).filter(([, name]) => name in views);
    at += count;
    return [question, own.length, ...line];
  });
  return {
    options: options.filter(([, name]) => name in views),
    groups: left.filter(([, count]) => count),
  };
}

// A control of the reference for this model, or null if the model lacks what it needs.
function adaptControl(control, view, { about, grid, views, ways }) {
  const { layers, heads, classes } = about;
  const numbers = (count) => Array.from({ length: count }, (_, number) => number);
  const places = numbers(layers).flatMap((layer) =>
    numbers(heads).map((head) => [`${layerWords(layer)}, ${say("head", { head })}`, [layer, head]]),
  );
  const fused = control.options.filter(([, value]) => typeof value !== "number");
  const single = view.head === "mixed" ? [] : numbers(heads).map((head) => [String(head), head]);
  const changes = {
    view: () => viewMenu(control, views),
    layer: () => ({ high: layers - 1 }),
    head: () => ({ options: [...fused, ...single] }),
    query: () => ({ options: queryOptions(grid) }),
    row: () => ({ high: grid.rows - 1 }),
    column: () => ({ high: grid.cols - 1 }),
    off: () => ({ options: places }),
    way: () => ({ options: Object.entries(ways).map(([way, words]) => [words, way]) }),
  };
  if (["another", "against"].includes(control.name) && !classes) return null;
  if (control.name === "whole" && !about.stretches) return null;
  return { ...control, ...changes[control.name]?.() };
}

// What replaces a head that is off, by its name in Python. One photo alone has no mean over others.
function waysOf(photos, facts) {
  const zero = say("by zero");
  if (facts) return { mean: facts.way, zero };
  return photos > 1 ? { mean: say("by mean here", { count: photos }), zero } : { zero };
}

// Describes an opened model in the content of the page. folder: name of its folder, or "". reference: {views, controls}
// of a model with everything. photos: number of those that the page brings. facts: {hash: digest of its weights, means:
// mean outputs (L, T, D) of its heads, way: words about them} of a model that Python knows, or null.
export function adaptPage(stored, reference, model, folder, photos, facts) {
  const { about } = model;
  const base = baseOf(about);
  const ways = waysOf(photos, facts);
  const views = {};
  for (const [name, view] of Object.entries(reference.views)) {
    if (hasView(about, view, name, stored.readable)) views[name] = view;
  }
  const controls = {};
  for (const [name, view] of Object.entries(views)) {
    const given = { about, grid: base.grid, views, ways };
    const adapted = reference.controls[name].map((each) => adaptControl(each, view, given));
    controls[name] = adapted.filter(Boolean);
  }
  const names = model.labels || (model.imagenet ? stored.imagenet.split("\n") : null);
  const name = nameModel(model, folder);
  const notes = model.notes.map(([name, fields]) => say(name, fields));
  Object.assign(stored, {
    network: about,
    base,
    ways,
    views,
    controls,
    names,
    labels: names && shortNames(names),
    model: name,
    models: (stored.models || 0) + 1,
    opened: say("runs opened", { name }),
    facts,
    hash: facts?.hash, // reading all weights again would take seconds
    about: [...notes, say("live")].join(" "),
  });
}

// The state in which an opened model is shown. The patch is at the same place of the photo as before.
export function firstState(stored, state, before) {
  const { grid } = stored.base;
  const place = (at, from, to) => Math.min(to - 1, Math.floor(((at + 0.5) / from) * to));
  const { rows, cols } = before || { rows: 1, cols: 1 };
  return {
    ...state,
    view: state.view in stored.views ? state.view : Object.keys(stored.views)[0],
    layer: Math.floor(IN_LAYER * stored.network.layers),
    head: "mean",
    query: "patch",
    row: place(before ? state.row : 0, rows, grid.rows),
    column: place(before ? state.column : 0, cols, grid.cols),
    off: [],
    way: state.way in stored.ways ? state.way : Object.keys(stored.ways)[0],
    typed: [],
    target: "predicted",
    against: "none",
    another: "",
  };
}
