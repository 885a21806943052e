// The panel of a map, with its captions: one in plain words, and the exact one, as in captions.py.

import { UNIFORM } from "../front/scales.js";
import { isEqual, largestOf, peakOf, smallestOf } from "../front/values.js";
import {
  patchIndex,
  predictionBeside,
  scaleOf,
  sinksOf,
  targetWords,
  tilesOf,
  whoseWords,
} from "./maps.js";
import { WORDS, formatFineShare, formatLikePython, formatShare, say } from "./numbers.js";

const SUMMARY = "class token"; // name of the token that sums up the image

// Factor by which differences look larger than on a scale from 0, as `stretching` in scales.py.
function stretchingOf({ low, high }) {
  if (!(high > low)) return 1;
  const sides = low < 0 && high > 0 ? 2 : 1;
  return (sides * Math.max(Math.abs(low), Math.abs(high))) / (high - low);
}

// Sentences about the colors of a map, as `scale_words` in captions.py.
function scaleWords(values, scale, bound) {
  let words = "";
  const times = peakOf(values);
  if (times !== null) words += say("peak", { times: formatLikePython(times) });
  if (scale.uniform !== null) return words + say("uniform", { bound: formatShare(bound) });
  const factor = stretchingOf(scale);
  if (factor > 1.001) words += say("stretched", { times: formatLikePython(factor) });
  return words;
}

// What the model's input leaves out of the photo, or adds to it, at one side.
function marginWords(size, covered, side) {
  const over = size - covered;
  if (over > 0) return say("cut", { pixels: over, where: say(side) });
  if (over < 0) return say("padded", { pixels: -over, where: say(side) });
  return "";
}

// The prediction after a caption, if it is another class than the target.
function besideWords(record, target) {
  const words = target === null ? "" : predictionBeside(record, target);
  return words && ` ${words}`;
}

// The exact caption of a map.
function captionOf(record, map, sinks, scale, bound, tables, target) {
  const { rows, cols, patch, image } = record.grid;
  let words = `${map.words}.`;
  if (scale) {
    const low = formatLikePython(smallestOf(map.values));
    const high = formatLikePython(largestOf(map.values));
    words += say("range", { low, high }) + scaleWords(map.values, scale, bound);
  }
  words += besideWords(record, target);
  words += say("input", { height: image[0], width: image[1] });
  words += marginWords(image[0], rows * patch[0], "bottom");
  words += marginWords(image[1], cols * patch[1], "right");
  if (sinks.length) {
    const times = formatLikePython(tables.sink_times_median);
    const uniform = formatLikePython(tables.sink_times_uniform);
    words += say("sinks", { count: sinks.length, times, uniform });
  }
  return words + (record.note || "");
}

// The panel of a map over its image, as `map_panel` in captions.py.
export function describePanel(record, view, choice, map, state, tables) {
  const { rows, cols, patch, image } = record.grid;
  const kind = state.view === "received" ? "attention" : state.view;
  const { values, limit, prefix = [], unit = WORDS[`${kind} unit`] || "" } = map;
  const hasScale = values.length <= rows * cols; // otherwise the values are colors
  const looking = tables.looking.includes(state.view);
  const sinks = looking ? sinksOf(record, choice.layer, tables) : [];
  const hides = Boolean(sinks.length && state.sinks && !state.stretch);
  const bound = UNIFORM[kind] ?? UNIFORM.map;
  let scale = hasScale ? scaleOf(values, limit, state, tables, bound) : null;
  const target = view.explains && !Array.isArray(choice.target) ? choice.target : null;
  const words = captionOf(record, map, sinks, scale, bound, tables, target);
  let plain = plainWords(record, view, choice, map, { scale, bound }, state);
  plain += besideWords(record, target);
  if (sinks.length) plain += say("plain sinks", { count: sinks.length });
  plain += record.note || "";
  let legend = limit && !state.stretch ? say("similarity scale", { unit }) : unit;
  if (hides) {
    const others = Float32Array.from(values);
    for (const place of sinks) others[patchIndex(record.grid, place)] = 0;
    scale = scaleOf(others, limit, state, tables, bound);
    legend = say("hidden", { unit: legend });
  }
  const { strength, opacity, smooth, lines } = state;
  const picked = view.query && Array.isArray(choice.query);
  return {
    name: "picture",
    title: map.title || view.title,
    picture: "picture",
    rows,
    cols,
    words,
    plain,
    cell: [patch[0] / image[0], patch[1] / image[1]],
    unit,
    even: unit === WORDS["attention unit"] ? 1 / (rows * cols + record.grid.prefix.length) : null,
    scale,
    strength,
    opacity,
    smooth,
    lines,
    legend,
    sinks,
    hides,
    tokens: view.query ? tilesOf(record, prefix, state.query) : [],
    picks: view.query ? say("look from") : "",
    selected: picked ? choice.query : null,
    values: new DataView(values.buffer, values.byteOffset, values.byteLength),
    ends: scale && [formatLikePython(scale.low), formatLikePython(scale.high)],
  };
}

// Sentence about the strongest patch of a map, as `plain_words` in captions.py.
function plainWords(record, view, choice, map, { scale, bound }, state) {
  const kind = view.plain;
  if (!scale) return say("plain components", { layer: choice.layer });
  if (scale.uniform !== null) return say("plain uniform", { bound: formatShare(bound) });
  const { patch, supports } = strongestOf(record, kind, choice, map.values);
  const name = supports ? `plain ${kind}` : "plain class against";
  let words = say(name, plainFields(record, view, choice, map.values, patch));
  const usual = !state.colors && !state.stretch;
  if (usual && scale.low < 0) words += WORDS[`plain ${kind} colors`] || "";
  return words;
}

// The patch that a sentence names, and false if all patches count against a class.
function strongestOf(record, kind, choice, values) {
  const compared = Float32Array.from(values);
  let supports = true;
  if (kind === "contributions") {
    compared.forEach((value, patch) => {
      compared[patch] = Math.abs(value);
    });
  } else if (kind === "similarity" && Array.isArray(choice.query) && values.length > 1) {
    compared[patchIndex(record.grid, choice.query)] = -Infinity; // the similarity of a patch to itself
  } else if (kind === "class" && largestOf(values) <= 0) {
    compared.forEach((value, patch) => {
      compared[patch] = -value;
    });
    supports = false;
  }
  return { patch: compared.indexOf(largestOf(compared)), supports };
}

// Fields of the sentences in plain words, for the patch that they name.
function plainFields(record, view, choice, values, patch) {
  const { grid, outputs } = record;
  const { layer, query } = choice;
  const place = { row: Math.floor(patch / grid.cols), column: patch % grid.cols };
  const value = values[patch];
  const isPlace = isEqual(query, [place.row, place.column]);
  const isQuery = view.query && !view.explains && isPlace;
  const tokens = grid.prefix.length + values.length;
  const hasTarget = view.explains && view.plain !== "method";
  const isShare = view.plain === "lens" && outputs !== "value";
  const format = isShare ? formatFineShare : formatLikePython;
  return {
    who: whoWords(record, query),
    where: whereWords(choice),
    place: say(isQuery ? "plain itself" : "plain place", place),
    layer,
    share: formatFineShare(value),
    even: formatFineShare(1 / tokens),
    value: format(value),
    times: view.plain === "norms" ? formatLikePython(peakOf(values)) : "",
    ...(hasTarget ? classFields(record, choice) : {}),
  };
}

// Fields about the class of a map, or about the similarity that it explains.
function classFields(record, { layer, head, target, against }) {
  if (Array.isArray(target)) {
    return { target: say("plain likeness", { target: targetWords(record, target) }) };
  }
  const name = record.label(target);
  const fields = { name, target: `“${name}”`, minus: "", whose: whoseWords(layer, head) };
  if (against === null) return fields;
  const other = record.label(against);
  return {
    ...fields,
    target: fields.target + say("rather than", { target: `“${other}”` }),
    minus: say("minus", { name: other }),
  };
}

// Name of a query in plain words.
function whoWords({ grid }, query) {
  if (Array.isArray(query)) return say("plain patch");
  const name = query === "readout" ? grid.reads : grid.prefix[query];
  if (name === SUMMARY) return say("plain summary");
  return name.startsWith("the ") ? name : say("plain token", { token: name });
}

// Name of a layer's heads in plain words.
function whereWords({ layer, head }) {
  if (typeof head === "number") return say("plain head", { head, layer });
  return WORDS[`plain ${head}`] ? say(`plain ${head}`, { layer }) : "";
}
