import { readPixels } from "../front/pictures.js";
import { formatPercent, isEqual, largestOf, smallestOf, softmax, sumOf } from "../front/values.js";
import { attend, readAttention } from "./attention.js";
import { fuse, patchIndex, patchesOf, queryRow } from "./maps.js";
import { formatFineShare, formatLikePython, formatShare, say } from "./numbers.js";

const NEVER = -1; // below all weights: in place of those of tokens that cannot be the key

// Index of a token: a patch is [row, column], and other tokens are numbers. undefined and null stay as they are.
function tokenAt(grid, place) {
  return Array.isArray(place) ? grid.prefix.length + patchIndex(grid, place) : place;
}

// The token other than the queries and the prefix tokens that gets the largest weight.
function findKey(weights, row, head, prefixCount) {
  const fused = fuse(weights, head);
  const others = fused.map((weight, t) => (row[t] === 1 ? NEVER : weight));
  others.fill(NEVER, 0, prefixCount);
  return others.indexOf(largestOf(others));
}

// The numbers behind one attention weight from a record, as `value` in details.py. Keys are stored without their mean.
export function explainWeight(record, { layer, head, query, key }) {
  const { grid, heads, layers } = record;
  const { q, k, scale = 1, mean = null } = layers[layer];
  const { prefix, rows, cols, patch, image } = grid;
  const row = queryRow(record, query);
  const tokens = row.length;
  const width = q.length / heads / tokens;
  const weights = readAttention(record, layer, row);
  const largest = typeof head !== "number"; // the head with the largest weight is opened
  const to = tokenAt(grid, key) ?? findKey(weights, row, largest ? "mean" : head, prefix.length);
  const received = weights.map((values) => values[to]);
  const opened = largest ? received.indexOf(largestOf(received)) : head;

  const weightFrom = (t) => attend(record, layer, opened, t, new Float64Array(tokens))[to];
  const shares = row.map((share, t) => share && share * weightFrom(t));
  const from = shares.indexOf(largestOf(shares));

  const vectorOf = (values, t) => {
    const start = (opened * tokens + t) * width;
    return [...values.subarray(start, start + width)];
  };
  const keyOf = (t) => vectorOf(k, t).map((value, i) => value + (mean?.[opened * width + i] ?? 0));
  const scaled = vectorOf(q, from);
  const logits = Array.from(row, (_, t) => sumOf(keyOf(t).map((value, i) => value * scaled[i])));
  return {
    prefix,
    rows,
    cols,
    patch,
    image,
    layer,
    head: opened,
    largest,
    averaged: row.filter(Boolean).length,
    query: from,
    key: to,
    heads: received,
    q: scaled.map((value) => value / scale),
    k: keyOf(to),
    scale,
    mask: 0,
    logits,
    weight: softmax(logits)[to],
  };
}

const MOST_REACHES = 4; // heads whose largest weights a sentence lists

// True if the tour of a file is that of the patch, layer and head of a state.
export function isTourOf(tour, { row, column, layer, head }) {
  if (!tour || !isEqual([tour.row, tour.col, tour.layer], [row, column, layer])) return false;
  return typeof head === "number" ? tour.value.head === head : tour.value.largest;
}

// RGB levels of a patch, a list of pixels for each row, from the model's input as a PNG file.
async function readPatch(seen, [row, col], [height, width]) {
  const { whole } = await readPixels(seen);
  const pixelAt = (y, x) => {
    const start = 4 * (y * whole.width + x);
    return [...whole.data.subarray(start, start + 3)];
  };
  const lineAt = (y) => Array.from({ length: width }, (_, x) => pixelAt(y, col * width + x));
  return Array.from({ length: height }, (_, y) => lineAt(row * height + y));
}

// The numbers of the tour for the patch, layer and head of a state, as `tour` in details.py. numbers: `pixels`, and
// those of the patch's token. Of layers that a file left out, depth and lens are null.
export function describeTour(record, { row, column, layer, head }, numbers) {
  const { grid, layers, outputs, label } = record;
  const { prefix, rows, cols, patch, image } = grid;
  const query = [row, column];
  const opened = typeof head === "number" ? head : "mean";
  const weightsIn = (l) => {
    const heads = readAttention(record, l, queryRow(record, query));
    return heads.map((values) => [...patchesOf(record, values)]);
  };
  const meanIn = (stored, l) => (stored ? [...fuse(weightsIn(l), "mean")] : null);
  const lensIn = (lens) => (lens ? [label(lens.classes[0]), lens.shares[0]] : null);
  const about = {
    prefix,
    rows,
    cols,
    patch,
    image,
    layer,
    row,
    col: column,
    ...numbers,
    value: explainWeight(record, { layer, head: opened, query, key: null }),
    heads: weightsIn(layer),
    depth: layers.map(meanIn),
    lens: record.lens.map(lensIn),
    plain: outputs === "value",
  };
  return { ...about, ...wordsOfTour(about, grid.reads) };
}

// The tour of a state from the record of a file.
export async function tourOfRecord(record, state) {
  const { grid, streams, layers } = record;
  const { channels, table, parts } = streams;
  const query = [state.row, state.column];
  const at = patchIndex(grid, query);
  const count = grid.rows * grid.cols;
  const vectorOf = (vectors) => {
    const width = vectors.length / count;
    return [...vectors.subarray(at * width, (at + 1) * width)];
  };
  const addedIn = (l) => {
    const start = (l * count + at) * parts;
    return [...streams.added.subarray(start, start + parts)];
  };
  return describeTour(record, state, {
    pixels: await readPatch(streams.seen || record.picture, query, grid.patch),
    channels,
    token: vectorOf(streams.tokens),
    table,
    position: streams.positions && vectorOf(streams.positions),
    lengths: Array.from({ length: layers.length + 1 }, (_, l) => streams.lengths[l * count + at]),
    added: layers.map((_, l) => addedIn(l)),
  });
}

// The classes that the head reads after the first and the last layer, as `_answer_words` in details.py.
function wordsOfAnswer(lens, plain, reads) {
  const known = lens.filter(Boolean);
  if (!known.length) return say("tour no answer");
  const format = plain ? formatLikePython : formatPercent;
  const [first, before] = known[0];
  const [last, after] = known.at(-1);
  const readout = /^(the|what|no) /.test(reads) ? reads : `the ${reads}`;
  return say("tour answer", {
    readout,
    first,
    before: format(before),
    last,
    after: format(after),
  });
}

// What a layer adds to a token, of a length before it.
function wordsOfChange(length, [first, second]) {
  const fields = { before: formatLikePython(length), first: formatLikePython(first) };
  if (second === undefined) return say("tour layer", fields);
  return say("tour parts", { ...fields, second: formatLikePython(second) });
}

function wordsOfPrefix(prefix) {
  if (!prefix.length) return "";
  return prefix.length === 1 ? ` with the ${prefix[0]}` : ` with ${prefix.length} prefix tokens`;
}

// The sentences of the tour, exact and in plain words. reads: name of what the classifier head reads.
export function wordsOfTour(about, reads) {
  return { sentences: sentencesOfTour(about, reads), simply: plainSentencesOfTour(about) };
}

// A sentence for each step of the tour, as `_sentences` in details.py.
function sentencesOfTour(about, reads) {
  const { image, rows, cols, patch, pixels, token, position, prefix, layer, value } = about;
  const { channels = 3, table = position, lengths, added, heads, lens, plain } = about;
  const [height, width] = patch;
  const most = heads.map(largestOf);
  let reach = most.map(formatLikePython).join(", ");
  if (most.length > MOST_REACHES) {
    reach = [smallestOf(most), largestOf(most)].map(formatLikePython).join(" to ");
  }
  const fields = {
    image: image.join(" × "),
    channels: channels === 1 ? "1 number" : `${channels} numbers`,
    middle: pixels[height >> 1][width >> 1].slice(0, channels).join(", "),
    rows,
    cols,
    patches: rows * cols,
    patch: patch.join(" × "),
    size: channels * height * width,
    width: token.length,
    table: table ? "a" : "no",
    extra: wordsOfPrefix(prefix),
    ...fieldsOfPair(about),
    weight: formatLikePython(value.weight),
    heads: heads.length,
    reach,
    added: wordsOfChange(lengths[layer], added[layer]),
    after: formatLikePython(lengths[layer + 1]),
    answer: wordsOfAnswer(lens, plain, reads),
  };
  const steps = ["pixels", "patches", "tokens", "product", "softmax", "heads", "stream", "depth"];
  return steps.map((step) => say(`tour ${step}`, fields));
}

// Sentences in plain words for the steps that need them, as `_plain_sentences` in details.py.
function plainSentencesOfTour(about) {
  const { token, position, table = position, prefix, layer, value, lengths, added } = about;
  const fields = {
    width: token.length,
    place: say(table ? "plain tour place" : "plain tour no place"),
    summary: prefix.length === 1 ? say("plain tour summary", { token: prefix[0] }) : "",
    ...fieldsOfPair(about),
    rank: wordsOfRank(value),
    share: formatFineShare(value.weight),
    even: formatFineShare(1 / value.logits.length),
  };
  const sayStep = (step) => say(`plain tour ${step}`, fields);
  const stream = plainWordsOfChange(layer, lengths[layer], added[layer]);
  return ["", "", sayStep("tokens"), sayStep("product"), sayStep("softmax"), "", stream, ""];
}

// Fields of the sentences about a query and a key.
function fieldsOfPair({ cols, prefix, layer, value }) {
  const key = value.key - prefix.length;
  return {
    tokens: value.logits.length,
    layer,
    head: value.head,
    row: Math.floor(key / cols),
    column: key % cols,
    products: value.q.length,
    logit: formatLikePython(value.logits[value.key]),
  };
}

// Place of a logit among those of the query.
function wordsOfRank({ logits, key }) {
  const below = logits.filter((logit) => logit === null || logit < logits[key]).length;
  const others = logits.length - 1;
  if (below === others) return say("plain tour first", { tokens: logits.length });
  return say("plain tour rank", { below, others });
}

// Sentence about the vectors that a layer adds to a token, "" for a token of length 0.
function plainWordsOfChange(layer, before, added) {
  if (!before) return "";
  const [first, second] = added.map((length) => formatShare(length / before));
  const name = second === undefined ? "plain tour layer" : "plain tour parts";
  return say(name, { layer, first, second });
}
