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
function explainWeight(record, { layer, head, query, key }) {
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
