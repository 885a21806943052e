// The map of a view and its caption, as in views.py: (record, {layer, head, query, target}) → {values, words, …}.

import { UNIFORM } from "../front/scales.js";
import { bytesOf, largestOf, smallestOf, sumOf, uniformOf } from "../front/values.js";
import { countTokens, readAttention, rollOut, sweep } from "./attention.js";
import { formatLikePython, formatShare, say } from "./numbers.js";
import { cosinesOf, normsOf, principalOf } from "./tokens.js";

const LISTED = 4; // largest number of heads that a sentence lists

// Index of a patch [row, column]. A question that waited for another model may name one outside of its grid.
export function patchIndex({ rows, cols }, [row, column]) {
  const isInside = row >= 0 && row < rows && column >= 0 && column < cols;
  if (!isInside) throw Error(say("no such patch", { row, column }));
  return row * cols + column;
}

// (T) weights of the tokens that are the query.
export function queryRow(record, query) {
  const { grid } = record;
  if (query === "readout") return grid.readout;
  const row = new Float32Array(countTokens(grid));
  const at = Array.isArray(query) ? grid.prefix.length + patchIndex(grid, query) : query;
  row[at] = 1;
  return row;
}

export function queryWords({ grid }, query) {
  if (query === "readout") return say("readout", { readout: grid.reads });
  if (Array.isArray(query)) return say("patch", { row: query[0], column: query[1] });
  return say("token", { token: grid.prefix[query] });
}

// The element-wise maximum of maps.
function maximumOf(maps) {
  const fused = maps[0].slice();
  for (const map of maps.slice(1)) {
    for (let t = 0; t < map.length; t += 1) fused[t] = Math.max(fused[t], map[t]);
  }
  return fused;
}

// The element-wise mean of maps.
function meanOf(maps) {
  const fused = maps[0].slice();
  for (const map of maps.slice(1)) {
    for (let t = 0; t < map.length; t += 1) fused[t] += map[t];
  }
  return fused.map((sum) => sum / maps.length);
}

// One map of those of the heads, or their mean or maximum.
export function fuse(maps, head) {
  if (typeof head === "number") return maps[head];
  return head === "max" ? maximumOf(maps) : meanOf(maps);
}

export const patchesOf = (record, values) =>
  Float32Array.from(values.slice(record.grid.prefix.length));
const prefixOf = (record, values) => sumOf(values.slice(0, record.grid.prefix.length));
const headWords = (head) => (typeof head === "number" ? say("head", { head }) : say(head));
const gateWords = (record) => (record.gated ? say("gated") : "");
const signed = (value) => (value >= 0 ? "+" : "") + formatLikePython(value);

export function scoreWords(record, score) {
  return record.outputs === "value" ? formatLikePython(score) : formatShare(score);
}

function prefixWords({ grid: { prefix } }) {
  if (prefix.length === 1) return say("token", { token: prefix[0] });
  return say("prefix", { count: prefix.length });
}

function restWords(name, record, share) {
  const rest = formatShare(1 - share);
  return say(name, { share: formatShare(share), rest, prefix: prefixWords(record) });
}

// Key of the maps of a class, or of its difference to another.
export const pairOf = (target, against) =>
  against === null ? String(target) : `${target}-${against}`;

// What the heads of `head` of a layer write from each token (T), of `written` (L, H, T).
function sumWritten(record, written, layer, head) {
  const tokens = countTokens(record.grid);
  const first = layer * record.heads;
  let from = first + head;
  let to = first + head + 1;
  if (head === "sum") {
    from = first;
    to = first + record.heads;
  } else if (head === "every") {
    from = 0;
    to = written.length / tokens;
  }
  const sums = new Float64Array(tokens);
  for (let i = from; i < to; i += 1) {
    for (let t = 0; t < tokens; t += 1) sums[t] += written[i * tokens + t];
  }
  return sums;
}

export function whoseWords(layer, head) {
  if (head === "every") return say("all layers", { layer, head });
  if (head === "sum") return say("all heads", { layer, head });
  return say("one head", { layer, head });
}

export const MAPS = {
  attention(record, { layer, head, query }) {
    const count = record.grid.prefix.length;
    const row = queryRow(record, query);
    const values = fuse(readAttention(record, layer, row), head);
    let source = queryWords(record, query);
    if (row.filter(Boolean).length > 1) source = say("averaged", { source });
    let words = say("attention", { source, layer, heads: headWords(head) });
    if (count && head === "max") words += say("not rescaled");
    else if (count) words += restWords("attention prefix", record, prefixOf(record, values));
    words += gateWords(record);
    return { values: patchesOf(record, values), words, prefix: [...values.slice(0, count)] };
  },

  received(record, { layer, head }) {
    const values = patchesOf(record, fuse(sweep(record, layer).received, head));
    let words = say("received", { layer, heads: headWords(head) });
    if (record.grid.prefix.length) words += say("not rescaled");
    words += gateWords(record);
    return { values, words };
  },

  rollout(record, { layer, head, query }) {
    const values = patchesOf(record, rollOut(record, layer, queryRow(record, query), head));
    const rest = 1 - sumOf(values);
    const count = record.grid.prefix.length;
    const source = queryWords(record, query);
    let words = say("rollout", { source, layer, heads: headWords(head) });
    if (count) words += restWords("rollout prefix", record, rest);
    words += gateWords(record);
    return { values, words, prefix: count === 1 ? [rest] : [] };
  },

  similarity(record, { layer, query }) {
    const { grid, tokens } = record;
    const values = patchesOf(record, cosinesOf(tokens[layer], grid, queryRow(record, query)));
    const own = Array.isArray(query) && values.length > 1 ? patchIndex(grid, query) : -1;
    let limit = 0;
    values.forEach((value, patch) => {
      if (patch !== own) limit = Math.max(limit, Math.abs(value));
    });
    const words = say("similarity", { layer, source: queryWords(record, query) });
    return { values, words, limit };
  },

  components(record, { layer }) {
    const { colors, shares } = principalOf(record.tokens[layer], record.grid);
    const words = say("components", { layer, shares: shares.map(formatShare).join(", ") });
    return { values: colors, words };
  },

  norms(record, { layer }) {
    const lengths = normsOf(record.tokens[layer], record.grid);
    const values = patchesOf(record, lengths);
    const sorted = values.toSorted();
    const middle = (values.length - 1) / 2;
    const median = (sorted[Math.floor(middle)] + sorted[Math.ceil(middle)]) / 2;
    const [token] = record.grid.prefix;
    let words = say("norms", { layer, median: formatLikePython(median) });
    if (token) words += say("norms prefix", { token, length: formatLikePython(lengths[0]) });
    return { values, words };
  },

  lens(record, { layer, query, target }) {
    const plain = record.outputs === "value";
    const quantity = say(plain ? "value" : "probability");
    let place = 0; // of the read-out
    let who = say("lens readout", { readout: record.grid.reads });
    if (query !== "readout") {
      place = 1 + queryRow(record, query).indexOf(1);
      who = queryWords(record, query);
    }
    who = who[0].toUpperCase() + who.slice(1);
    const rows = [];
    record.lens.forEach((lens, k) => {
      if (!lens) return;
      const label = record.label(lens.classes[place]);
      rows.push({ layer: k, name: label, share: lens.shares[place], plain });
    });
    const { name: best, share } = rows.find((row) => row.layer === layer);
    const name = record.label(target);
    const score = scoreWords(record, share);
    const words = say("lens", { layer, quantity, name, who, best, score });
    const chart = { title: say("lens title", { who }), layer, rows, note: say("lens note") };
    const values = record.lens[layer].of[target];
    return { values, words, unit: quantity, beside: { lens: chart } };
  },

  contributions(record, { layer, head, target, against }) {
    const { written, logit, ...chart } = record.contributions[pairOf(target, against)];
    const sums = sumWritten(record, written, layer, head);
    const values = patchesOf(record, sums);
    const whose = whoseWords(layer, head);
    const name = record.label(target);
    const minus = against === null ? "" : say("minus", { name: record.label(against) });
    let words = say("contributions", { whose, name, minus, patches: signed(sumOf(values)) });
    if (record.grid.prefix.length) {
      const share = signed(prefixOf(record, sums));
      words += say("contributions prefix", { share, prefix: prefixWords(record) });
    }
    words += say("contributions logit", { logit: formatLikePython(logit) });
    const parts = {
      ...chart,
      layer: head === "every" ? null : layer,
      head: typeof head === "number" ? head : null,
    };
    return { values, words, beside: { parts } };
  },
};

// A map of an attribution method, as Python or a forward in this page computed it.
export function findExplanation(record, { target, against }, view) {
  return record.maps[view][pairOf(target, against)];
}

const ENTRIES = 256; // of a color table

// (256) RGBA colors of a scale from low to high, with an opacity for each value.
export function colorsOf({ low, high }, map, strength, opacityOf) {
  const table = new Uint8Array(4 * ENTRIES);
  const levels = bytesOf(map);
  for (let i = 0; i < ENTRIES; i += 1) {
    const value = low + ((high - low) * i) / (ENTRIES - 1);
    table.set(levels.subarray(3 * i, 3 * i + 3), 4 * i);
    table[4 * i + 3] = Math.round(255 * strength * opacityOf(value));
  }
  return new DataView(table.buffer);
}

// The ends of a color scale, true if it has both signs, and the value of all cells of a uniform map, as `scale_of`.
function rangeOf(values, limit, stretch, bound) {
  const lowest = smallestOf(values);
  const most = largestOf(values);
  const uniform = uniformOf(values, bound);
  if (stretch && uniform === null) return { low: lowest, high: most, both: false, uniform };
  const both = limit !== undefined || lowest < 0;
  const high = limit || Math.max(-lowest, most) || 1;
  return { low: both ? -high : 0, high, both, uniform };
}

// The color scale of a map, as `scale_of` and `Scale.table` in panels.py. looks: values of the controls.
export function scaleOf(values, limit, looks, tables, bound) {
  const { low, high, both, uniform } = rangeOf(values, limit, looks.stretch, bound);
  const zero = Math.min(Math.max(0, low), high);
  const farthest = Math.max(high - zero, zero - low) || 1;
  const floor = low < 0 && high > 0 ? tables.least : 0;
  const opacityOf = (value) => {
    if (looks.opacity !== "value") return 1;
    return Math.max(Math.abs(value - zero) / farthest, floor);
  };
  const usual = both ? tables.signed : tables.plain;
  const map = tables.maps[looks.colors || usual];
  const colors = colorsOf({ low, high }, map, looks.strength, opacityOf);
  return { low, high, uniform, colors };
}

const CELLS = 16; // largest number of rows and of columns of a map in the mosaic

// Writes a tile, reduced to r × c cells by their largest values, to `out` from `start`, as levels up to 255.
function writeTile(tile, { rows, cols }, [r, c], top, out, start) {
  let at = start;
  for (let y = 0; y < r; y += 1) {
    for (let x = 0; x < c; x += 1) {
      let most = 0;
      for (let a = Math.floor((y * rows) / r); a < ((y + 1) * rows) / r; a += 1) {
        for (let b = Math.floor((x * cols) / c); b < ((x + 1) * cols) / c; b += 1) {
          if (tile[a * cols + b] > most) most = tile[a * cols + b];
        }
      }
      out[at] = Math.round((255 * most) / Math.max(top, 1e-30));
      at += 1;
    }
  }
}

// Attention from a query in all heads, as `head_maps` in views.py. Layers that were left out are blank.
export function tilesOfHeads(record, weights) {
  const { grid } = record;
  const r = Math.min(grid.rows, CELLS);
  const c = Math.min(grid.cols, CELLS);
  const count = record.heads + 2; // with the mean and the maximum
  const maps = new Uint8Array(record.layers.length * count * r * c);
  const blank = Array(count).fill(new Float32Array(grid.rows * grid.cols));
  let at = 0;
  const tops = record.layers.map((stored, layer) => {
    let tiles = blank;
    if (stored) {
      const heads = readAttention(record, layer, weights);
      const own = heads.map((values) => patchesOf(record, values));
      tiles = [meanOf(own), maximumOf(own), ...own];
    }
    return tiles.map((tile) => {
      const top = largestOf(tile);
      const mean = uniformOf(tile, UNIFORM.attention);
      const shown = mean === null ? tile : tile.map(() => mean);
      writeTile(shown, grid, [r, c], top, maps, at);
      at += r * c;
      return top;
    });
  });
  return { maps: new DataView(maps.buffer), tops, rows: r, cols: c };
}

// Tiles of the queries besides patches, with the shares of the prefix tokens.
export function tilesOf({ grid: { prefix, readout, reads } }, shares, query) {
  const tiles = prefix.map((name, position) => {
    const share = shares.length ? formatShare(shares[position]) : "";
    const isReadout = readout && name === reads;
    return { query: isReadout ? "readout" : position, name, share };
  });
  if (readout && !prefix.includes(reads)) {
    tiles.unshift({ query: "readout", name: reads, share: "" });
  }
  return tiles.map((tile) => ({ ...tile, now: tile.query === query }));
}

// Sinks of a layer, as `vitlens.attention.sinks`.
export function sinksOf(record, layer, tables) {
  const { cols, prefix } = record.grid;
  const received = patchesOf(record, meanOf(sweep(record, layer).received));
  const sorted = [...received].sort((a, b) => a - b);
  const median = sorted[Math.floor((received.length - 1) / 2)];
  const timesMedian = tables.sink_times_median * median;
  const timesUniform = tables.sink_times_uniform / (prefix.length + received.length);
  const least = Math.max(timesMedian, timesUniform);
  const sinks = [];
  received.forEach((value, i) => {
    if (value > least) sinks.push([Math.floor(i / cols), i % cols]);
  });
  return sinks;
}

export function classWords(record, k) {
  return say("class", { name: record.label(k), score: scoreWords(record, record.shares[k]) });
}

// A class with its probability, or the similarity to a photo, ["picture", name].
export function targetWords(record, target) {
  return Array.isArray(target) ? say("likeness", { name: target[1] }) : classWords(record, target);
}

// A sentence with the prediction, or "" if it is the target alone, as `prediction_beside` in classes.py.
export function predictionBeside(record, target) {
  const { outputs, shares } = record;
  const count = shares.length;
  if (!count) return "";
  if (outputs === "value" || (outputs === "classes" && count === 1)) return "";
  const order = [...shares.keys()].sort((a, b) => shares[b] - shares[a]);
  let predicted = order.slice(0, 1);
  if (outputs === "independent") predicted = order.filter((k) => shares[k] > 0.5);
  if (!predicted.length) {
    if (order[0] === target) return say("no label");
    return say("highest label", { classes: classWords(record, order[0]) });
  }
  const others = predicted.filter((k) => k !== target);
  if (!others.length) return "";
  const most = 3;
  let classes = others
    .slice(0, most)
    .map((k) => classWords(record, k))
    .join(", ");
  if (others.length > most) classes = say("more classes", { classes, count: others.length - most });
  const also = others.length < predicted.length;
  return say(also ? "also predicts" : "predicts", { classes });
}

// Names of up to four heads, or the number of more.
export function headsWords(heads) {
  if (heads.length > LISTED) return say("count of heads", { count: heads.length });
  const names = heads.map(([layer, head]) =>
    say("head of", { head, layer: say("layer", { layer }) }),
  );
  return names.join(", ");
}
