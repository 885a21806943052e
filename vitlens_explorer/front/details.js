// Numbers behind an attention weight, drawn from the answer to {ask: "value"}, and small maps and strips of numbers.

import { cellUnder, make, makeFrame, makeSmallButton, makeSteered, putImage } from "./elements.js";
import { paintMap } from "./pictures.js";
import { UNIFORM } from "./scales.js";
import {
  fillHidden,
  formatNumber,
  largestOf,
  rangeWords,
  smallestOf,
  softmax,
  sumOf,
  uniformOf,
} from "./values.js";

const RED = [178, 24, 43];
const BLUE = [33, 102, 172];
const STRIP = 128; // largest number of cells in a row of a strip

// [row, col] of a token, or null for a prefix token.
export function patchAt({ prefix, cols }, at) {
  const patch = at - prefix.length;
  return patch < 0 ? null : [Math.floor(patch / cols), patch % cols];
}

function tokenName(about, at) {
  if (at < about.prefix.length) return `the ${about.prefix[at]}`;
  return `row ${patchAt(about, at).join(", column ")}`;
}

export function makeCanvas(image, label, attributes) {
  const canvas = make("canvas", { role: "img", "aria-label": label, ...attributes });
  return putImage(canvas, image);
}

// Numbers as colored cells: red above 0, blue below, white at 0. The number under the pointer is the tooltip.
export function makeStrip(name, values) {
  const most = largestOf(values.map(Math.abs)) || 1;
  const height = Math.ceil(values.length / STRIP);
  const width = Math.ceil(values.length / height);
  const range = `${formatNumber(smallestOf(values))} to ${formatNumber(largestOf(values))}`;
  const label = `${name}: ${values.length} numbers from ${range}`;
  const image = new ImageData(width, height);
  values.forEach((value, i) => {
    const color = value < 0 ? BLUE : RED;
    const levels = color.map((part) => 255 + ((part - 255) * Math.abs(value)) / most);
    image.data.set([...levels, 255], 4 * i);
  });
  const canvas = makeCanvas(image, label, { class: "strip", style: `--rows: ${height}` });
  canvas.addEventListener("pointermove", (event) => {
    const [row, col] = cellUnder(event, canvas, [1 / height, 1 / width]);
    const at = row * width + col;
    canvas.title = at in values ? `${name}, number ${at}: ${formatNumber(values[at])}` : "";
  });
  const title = make("span", {}, name);
  return make("div", { class: "vector" }, title, canvas, make("span", { class: "range" }, range));
}

// Weights of the patches over the photo, with frames around the patches in `marks`: {name: [row, col]}. pick: called
// with the patch of a click, or of an arrow key from marks.key, or from marks.frame without it.
export function makeMap(
  base,
  { rows, cols, patch, image, colors },
  values,
  marks,
  label,
  pick = null,
) {
  const height = patch[0] / image[0];
  const width = patch[1] / image[1];
  const cell = [height, width];
  const uniform = uniformOf(values, UNIFORM.attention);
  const scale = { low: 0, high: largestOf(values), colors, uniform };
  const panel = { rows, cols, cell, strength: 1, scale, values: Float32Array.from(values) };
  const svg = make("svg", {
    viewBox: "0 0 1 1",
    preserveAspectRatio: "none",
    "aria-hidden": "true",
  });
  for (const [name, place] of Object.entries(marks)) {
    if (!place) continue;
    const box = { x: place[1] * width, y: place[0] * height, width, height };
    svg.append(...makeFrame(box, name));
  }
  const canvas = makeCanvas(values.length ? paintMap(base, panel) : base, label);
  if (!pick) return make("div", { class: "picture small" }, canvas, svg);
  const pickInside = (row, col) => {
    if (row >= 0 && row < rows && col >= 0 && col < cols) pick([row, col]);
  };
  const onclick = (event) => {
    const [row, col] = cellUnder(event, canvas, cell);
    pickInside(row, col);
  };
  const from = marks.key || marks.frame;
  const move = (down, across) => {
    if (!from) return false;
    pickInside(from[0] + down, from[1] + across);
    return true;
  };
  const words = `${label} Arrow keys choose other patches.`;
  const attributes = { class: "picture small picks", "aria-label": words, onclick };
  return makeSteered(attributes, move, canvas, svg);
}

// Query, key and their products, and the logit in words.
export function makeProducts({ q, k, scale, mask, logits, key }) {
  const products = q.map((value, i) => value * k[i]);
  const sum = `Sum of the ${q.length} products ${formatNumber(sumOf(products))}`;
  const added = mask ? ` + mask ${formatNumber(mask)}` : "";
  const words = `${sum} × scale ${formatNumber(scale)}${added} = `;
  const result = make("b", {}, logits[key] === null ? "hidden" : formatNumber(logits[key]));
  return [
    makeStrip("query", q),
    makeStrip("key", k),
    makeStrip("products", products),
    make("p", { class: "sum" }, words, result),
  ];
}

// The softmax in words.
function softmaxWords({ logits, key, weight }) {
  const logit = logits[key];
  if (logit === null) return "The mask hides this token, so its weight is 0.";
  const filled = fillHidden(logits);
  const most = largestOf(filled);
  const power = logit - most;
  const sum = sumOf(filled.map((value) => Math.exp(value - most)));
  const how = power
    ? `${formatNumber(-power)} below the largest of the row`
    : "the largest of the row";
  const total = `the sum over ${logits.length} tokens, ${formatNumber(sum)}`;
  const share = `e^${formatNumber(power)} divided by ${total}, is ${formatNumber(weight)}`;
  return `Softmax: ${formatNumber(logit)} is ${how}; ${share}.`;
}

// The softmax in words, above the weights of the row.
export function makeSoftmax(answer) {
  const words = make("p", { class: "sum" }, softmaxWords(answer));
  return make("div", {}, words, makeStrip("weights", softmax(answer.logits)));
}

// The opened value. open: asks for the value of another key, {key: [row, col]}.
export function makeValue(answer, base, open, close) {
  const { layer, head, heads, largest, averaged, query, key } = answer;
  const notes = [`Layer ${layer}, head ${head}.`];
  if (largest) {
    const mean = formatNumber(sumOf(heads) / heads.length);
    notes.push(
      ` Of ${heads.length} heads, head ${head} has the largest weight here. Their mean is ${mean}.`,
    );
  }
  if (averaged > 1) {
    notes.push(` Of the ${averaged} queries that the read-out averages, this one adds most.`);
  }
  const names = `${tokenName(answer, query)} attends to ${tokenName(answer, key)}`;
  const title = `${formatNumber(answer.weight)}: how much ${names} in head ${head}`;
  const marks = { frame: patchAt(answer, query), key: patchAt(answer, key) };
  const patches = softmax(answer.logits).slice(answer.prefix.length);
  const label = `Layer ${layer}, head ${head}.`;
  const map = makeMap(base, answer, patches, marks, label, (place) => open({ key: place }));
  const closer = makeSmallButton("×", close, { "aria-label": "Close" });
  const ends = `Colors: ${rangeWords(patches)}.`;
  const hint = `White: the query. Orange: the key. Click a patch to open its weight. ${ends}`;
  return [
    make("header", {}, make("h3", {}, title), closer),
    make("p", { class: "note" }, ...notes),
    ...makeProducts(answer),
    make("div", { class: "scene" }, makeSoftmax(answer), map),
    make("p", { class: "note" }, hint),
  ];
}
