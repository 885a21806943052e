// Numbers behind an attention weight, drawn from the answer to {ask: "value"}, and small maps and strips of numbers.

const VIRIDIS = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
const MAPPED = Uint8Array.from({ length: 1024 }, (_, i) => {
  const share = Math.floor(i / 4) / 255;
  const [at, part] = [Math.min(3, Math.floor(4 * share)), i % 4];
  if (part === 3) return 230 * share;
  return VIRIDIS[at][part] + (VIRIDIS[at + 1][part] - VIRIDIS[at][part]) * (4 * share - at);
}); // colors whose opacity grows with the value

const sumOf = (values) => values.reduce((sum, value) => sum + value, 0);
const largestOf = (values) => values.reduce((most, value) => Math.max(most, value), -Infinity);

// Softmax of logits, in which null is a hidden token.
function softmax(logits) {
  const most = largestOf(logits.map((value) => value ?? -Infinity));
  const raised = logits.map((value) => (value === null ? 0 : Math.exp(value - most)));
  const sum = sumOf(raised);
  return raised.map((value) => value / sum);
}

// [row, col] of a token, or null for a prefix token.
function patchAt({ prefix, cols }, at) {
  const patch = at - prefix.length;
  return patch < 0 ? null : [Math.floor(patch / cols), patch % cols];
}

const tokenName = (about, at) =>
  at < about.prefix.length ? `the ${about.prefix[at]}` : `row ${patchAt(about, at).join(", column ")}`;

// Numbers as colored cells: red above 0, blue below, white at 0. The number under the pointer is the tooltip.
function strip(name, values) {
  const most = largestOf(values.map(Math.abs)) || 1;
  const height = Math.ceil(values.length / 128);
  const width = Math.ceil(values.length / height);
  const range = `${shown(-largestOf(values.map((value) => -value)))} to ${shown(largestOf(values))}`;
  const label = { role: "img", "aria-label": `${name}: ${values.length} numbers from ${range}` };
  const canvas = make("canvas", { class: "strip", width, height, style: `--rows: ${height}`, ...label });
  const image = new ImageData(width, height);
  values.forEach((value, i) => {
    const share = Math.abs(value) / most;
    const color = value < 0 ? [33, 102, 172] : [178, 24, 43];
    image.data.set([...color.map((part) => 255 + (part - 255) * share), 255], 4 * i);
  });
  canvas.getContext("2d").putImageData(image, 0, 0);
  canvas.addEventListener("pointermove", ({ offsetX, offsetY }) => {
    const [row, col] = [(offsetY / canvas.clientHeight) * height, (offsetX / canvas.clientWidth) * width].map(Math.floor);
    const at = row * width + col;
    canvas.title = at in values ? `${name}, number ${at}: ${shown(values[at])}` : "";
  });
  return make("div", { class: "vector" }, make("span", {}, name), canvas, make("span", { class: "range" }, range));
}

// Weights of the patches over the photo, with frames around the patches in `marks`: {name: [row, col]}. pick: called with
// the patch of a click, or of an arrow key from marks.key.
function mapOf(base, { rows, cols, patch, image }, values, marks = {}, label = "", pick = null) {
  const cell = [patch[0] / image[0], patch[1] / image[1]];
  const scale = { low: 0, high: largestOf(values) || 1, colors: MAPPED };
  const panel = { rows, cols, cell, strength: 1, scale, smooth: false, values: Float32Array.from(values) };
  const canvas = make("canvas", { width: base.width, height: base.height, role: "img", "aria-label": label });
  canvas.getContext("2d").putImageData(values.length ? painted(base, panel) : base, 0, 0);
  const svg = make("svg", { viewBox: "0 0 1 1", preserveAspectRatio: "none", "aria-hidden": "true" });
  for (const [name, place] of Object.entries(marks).filter(([, place]) => place)) {
    const at = { x: place[1] * cell[1], y: place[0] * cell[0], width: cell[1], height: cell[0] };
    svg.append(make("rect", { class: "rim", ...at }), make("rect", { class: `frame ${name}`, ...at }));
  }
  if (!pick) return make("div", { class: "picture small" }, canvas, svg);
  const go = (row, col) => row >= 0 && row < rows && col >= 0 && col < cols && pick([row, col]);
  const aim = `${label} Click, or use the arrow keys, to open another patch.`;
  const node = make("div", { class: "picture small picks", tabindex: 0, role: "application", "aria-label": aim }, canvas, svg);
  node.addEventListener("click", ({ clientX, clientY }) => {
    const box = canvas.getBoundingClientRect();
    go(Math.floor((clientY - box.top) / box.height / cell[0]), Math.floor((clientX - box.left) / box.width / cell[1]));
  });
  node.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step || !marks.key) return;
    event.preventDefault();
    event.stopPropagation();
    go(marks.key[0] + step[0], marks.key[1] + step[1]);
  });
  return node;
}

// The weights of a query as a bar for each token, with the key's in orange.
function weightBars({ logits, key, ...about }) {
  const weights = softmax(logits);
  const [height, top] = [64, 8];
  const x = (at) => ((at + 0.5) / weights.length) * WIDTH;
  const y = (at) => height - (weights[at] / largestOf(weights)) * (height - top);
  const label = `Weights of ${weights.length} tokens. ${tokenName(about, key)}: ${shown(weights[key])}.`;
  const plot = make("svg", { class: "weights", viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": label });
  const wide = Math.max(0.5, (0.7 * WIDTH) / weights.length);
  plot.append(make("path", { d: weights.map((_, at) => `M${x(at)} ${height}V${y(at)}`).join(""), "stroke-width": wide }));
  const bar = { class: "now", d: `M${x(key)} ${height}V${Math.min(y(key), height - 1)}` };
  plot.append(make("path", { ...bar, "stroke-width": Math.max(2, wide) }));
  plot.append(make("path", { class: "place", d: `M${x(key)} ${y(key) - 1}l-3 -6h6z` }));
  return plot;
}

// Query, key and their products, and the logit in words.
function products({ q, k, scale, mask, logits, key }) {
  const found = q.map((value, i) => value * k[i]);
  const sum = sumOf(found);
  const add = mask ? ` + ${shown(mask)} (mask)` : "";
  const words = `Sum of the ${q.length} products ${shown(sum)} × scale ${shown(scale)}${add} = `;
  const result = make("b", {}, logits[key] === null ? "hidden" : shown(logits[key]));
  return [strip("query", q), strip("key", k), strip("products", found), make("p", { class: "sum" }, words, result)];
}

function softmaxWords({ logits, key, weight }) {
  if (logits[key] === null) return "The mask hides this token, so its weight is 0.";
  const most = largestOf(logits.map((value) => value ?? -Infinity));
  const power = logits[key] - most;
  const sum = sumOf(logits.map((value) => (value === null ? 0 : Math.exp(value - most))));
  const how = power ? `${shown(-power)} below the largest of the row` : "the largest of the row";
  const raised = `e^${shown(power)} = ${shown(Math.exp(power))}`;
  const over = `divided by ${shown(sum)}, the sum over ${logits.length} tokens`;
  return `Softmax: ${shown(logits[key])} is ${how}; ${raised}, ${over}, is ${shown(weight)}.`;
}

// The opened value. open: asks for the value of another key, {key: [row, col]}.
function openedValue(answer, base, open, close) {
  const { layer, head, heads, largest, averaged, query, key } = answer;
  const notes = [];
  if (largest) notes.push(` Of ${heads.length} heads, head ${head} has the largest weight here, ${shown(heads[head])}.`);
  if (averaged > 1) notes.push(` Of the ${averaged} queries that the read-out averages, this one adds most.`);
  const title = `${shown(answer.weight)}: how much ${tokenName(answer, query)} attends to ${tokenName(answer, key)}`;
  const weights = softmax(answer.logits).slice(answer.prefix.length);
  const marks = { frame: patchAt(answer, query), key: patchAt(answer, key) };
  const label = `Attention in layer ${layer}, head ${head}.`;
  const map = mapOf(base, answer, weights, marks, label, (place) => open({ key: place }));
  const closer = make("button", { type: "button", class: "button small", "aria-label": "Close", onclick: close }, "×");
  return [
    make("header", {}, make("h3", {}, title), closer),
    make("p", { class: "note" }, `Layer ${layer}, head ${head}.`, ...notes),
    ...products(answer),
    make("div", { class: "stage" }, make("div", {}, make("p", { class: "sum" }, softmaxWords(answer)), weightBars(answer)), map),
    make("p", { class: "note" }, "White: the query. Orange: the key. Click a patch to open its weight."),
  ];
}
