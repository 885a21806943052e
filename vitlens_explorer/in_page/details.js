// The numbers behind one attention weight from a record, as `value` in details.py. Keys are stored without their mean.
function valueOf(record, { layer, head, query, key }) {
  const { grid, heads, layers } = record;
  const { q, k, scale = 1, mean = null } = layers[layer];
  const { prefix, rows, cols, patch, image } = grid;
  const row = queryRow(record, query);
  const weights = read(record, layer, row);
  const width = q.length / heads / row.length;
  const position = (place) =>
    Array.isArray(place) ? prefix.length + place[0] * cols + place[1] : place;
  const largest = typeof head !== "number";
  const others = fuse(weights, largest ? "mean" : head).map((weight, t) =>
    row[t] === 1 ? -1 : weight,
  );
  const to = position(key) ?? others.fill(-1, 0, prefix.length).indexOf(largestOf(others));
  const opened = largest
    ? weights.reduce((best, values, h) => (values[to] > weights[best][to] ? h : best), 0)
    : head;
  const weightOf = (t) => attend(record, layer, opened, t, new Float64Array(row.length))[to];
  const shares = row.map((share, t) => share && share * weightOf(t));
  const from = shares.indexOf(largestOf(shares));
  const vector = (values, at) => [
    ...values.subarray((opened * row.length + at) * width).subarray(0, width),
  ];
  const whole = (at) => vector(k, at).map((value, i) => value + (mean?.[opened * width + i] ?? 0));
  const one = vector(q, from);
  const logits = Array.from(row, (_, at) => sumOf(whole(at).map((value, i) => value * one[i])));
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
    heads: weights.map((values) => values[to]),
    q: one.map((value) => value / scale),
    k: whole(to),
    scale,
    mask: 0,
    logits,
    weight: softmax(logits)[to],
  };
}
