// Numbers behind an attention weight, drawn from the answer to {ask: "value"}, and small maps and strips of numbers.

// [row, col] of a token, or null for a prefix token.
function patchAt({ prefix, cols }, at) {
  const patch = at - prefix.length;
  return patch < 0 ? null : [Math.floor(patch / cols), patch % cols];
}

const tokenName = (about, at) =>
  at < about.prefix.length
    ? `the ${about.prefix[at]}`
    : `row ${patchAt(about, at).join(", column ")}`;

// Numbers as colored cells: red above 0, blue below, white at 0. The number under the pointer is the tooltip.
function strip(name, values) {
  const most = largestOf(values.map(Math.abs)) || 1;
  const height = Math.ceil(values.length / 128);
  const width = Math.ceil(values.length / height);
  const range = `${shown(smallestOf(values))} to ${shown(largestOf(values))}`;
  const label = `${name}: ${values.length} numbers from ${range}`;
  const image = new ImageData(width, height);
  values.forEach((value, i) => {
    const color = value < 0 ? [33, 102, 172] : [178, 24, 43];
    image.data.set(
      [...color.map((part) => 255 + ((part - 255) * Math.abs(value)) / most), 255],
      4 * i,
    );
  });
  const canvas = canvasOf(image, label, { class: "strip", style: `--rows: ${height}` });
  canvas.addEventListener("pointermove", (event) => {
    const [row, col] = cellUnder(event, canvas, [1 / height, 1 / width]);
    const at = row * width + col;
    canvas.title = at in values ? `${name}, number ${at}: ${shown(values[at])}` : "";
  });
  return make(
    "div",
    { class: "vector" },
    make("span", {}, name),
    canvas,
    make("span", { class: "range" }, range),
  );
}

const canvasOf = (image, label, more) =>
  put(make("canvas", { role: "img", "aria-label": label, ...more }), image);

// Weights of the patches over the photo, with frames around the patches in `marks`: {name: [row, col]}. pick: called
// with the patch of a click, or of an arrow key from marks.key.
function mapOf(base, { rows, cols, patch, image, colors }, values, marks, label, pick = null) {
  const [height, width] = [patch[0] / image[0], patch[1] / image[1]];
  const scale = { low: 0, high: largestOf(values), colors };
  const panel = {
    rows,
    cols,
    cell: [height, width],
    strength: 1,
    scale,
    values: Float32Array.from(values),
  };
  const svg = make("svg", {
    viewBox: "0 0 1 1",
    preserveAspectRatio: "none",
    "aria-hidden": "true",
  });
  for (const [name, place] of Object.entries(marks).filter(([, place]) => place))
    svg.append(...framed({ x: place[1] * width, y: place[0] * height, width, height }, name));
  const canvas = canvasOf(values.length ? painted(base, panel) : base, label);
  if (!pick) return make("div", { class: "picture small" }, canvas, svg);
  const go = (row, col) =>
    void (row >= 0 && row < rows && col >= 0 && col < cols && pick([row, col]));
  const onclick = (event) => go(...cellUnder(event, canvas, panel.cell));
  const move = (down, across) =>
    marks.key ? go(marks.key[0] + down, marks.key[1] + across) : false;
  const words = `${label} Arrow keys open other patches.`;
  return steered({ class: "picture small picks", "aria-label": words, onclick }, move, canvas, svg);
}

// Query, key and their products, and the logit in words.
function products({ q, k, scale, mask, logits, key }) {
  const found = q.map((value, i) => value * k[i]);
  const add = mask ? ` + mask ${shown(mask)}` : "";
  const words = `Sum of the ${q.length} products ${shown(sumOf(found))} × scale ${shown(scale)}${add} = `;
  const result = make("b", {}, logits[key] === null ? "hidden" : shown(logits[key]));
  return [
    strip("query", q),
    strip("key", k),
    strip("products", found),
    make("p", { class: "sum" }, words, result),
  ];
}

// The softmax in words, above the weights of the row.
function weighing({ logits, key, weight }) {
  const most = largestOf(finite(logits));
  const power = logits[key] - most;
  const how = power ? `${shown(-power)} below the largest of the row` : "the largest of the row";
  const sum = sumOf(finite(logits).map((value) => Math.exp(value - most)));
  const over = `the sum over ${logits.length} tokens, ${shown(sum)}`;
  let words = `Softmax: ${shown(logits[key])} is ${how}; e^${shown(power)} divided by ${over}, is ${shown(weight)}.`;
  if (logits[key] === null) words = "The mask hides this token, so its weight is 0.";
  return make("div", {}, make("p", { class: "sum" }, words), strip("weights", softmax(logits)));
}

// The opened value. open: asks for the value of another key, {key: [row, col]}.
function openedValue(answer, base, open, close) {
  const { layer, head, heads, largest, averaged, query, key } = answer;
  const notes = [`Layer ${layer}, head ${head}.`];
  if (largest) notes.push(` Of ${heads.length} heads, head ${head} has the largest weight here.`);
  if (averaged > 1)
    notes.push(` Of the ${averaged} queries that the read-out averages, this one adds most.`);
  const title = `${shown(answer.weight)}: how much ${tokenName(answer, query)} attends to ${tokenName(answer, key)}`;
  const marks = { frame: patchAt(answer, query), key: patchAt(answer, key) };
  const patches = softmax(answer.logits).slice(answer.prefix.length);
  const map = mapOf(base, answer, patches, marks, `Layer ${layer}, head ${head}.`, (place) =>
    open({ key: place }),
  );
  return [
    make("header", {}, make("h3", {}, title), small("×", close, { "aria-label": "Close" })),
    make("p", { class: "note" }, ...notes),
    ...products(answer),
    make("div", { class: "scene" }, weighing(answer), map),
    make(
      "p",
      { class: "note" },
      "White: the query. Orange: the key. Click a patch to open its weight.",
    ),
  ];
}
