// The numbers behind one attention weight, from a record: the same as `details.value` in Python.
//
// record: { grid: { rows, cols, prefix, readout }, layers: [{ q, k, heads, scale, mean }] } with q·scale and k as
// Float32Array (heads, tokens, K). mean (heads, K), if present, was subtracted from k.
// query: "readout", a position, or [row, col]. key: a position, [row, col], or none for the patch with the largest weight.
function valueOf(record, { layer, head, query, key }) {
  const { rows, cols, prefix, readout } = record.grid;
  const { q, k, heads, scale, mean } = record.layers[layer];
  const tokens = prefix.length + rows * cols;
  const width = q.length / heads / tokens;
  const positionOf = (place) => (Array.isArray(place) ? prefix.length + place[0] * cols + place[1] : place);
  const every = Array.from({ length: heads }, (_, h) => h);
  const vector = (values, h, at, factor = 1, shift = null) =>
    Array.from({ length: width }, (_, i) => values[(h * tokens + at) * width + i] * factor + (shift ? shift[h * width + i] : 0));
  const productsOf = (h, at) => {
    const one = vector(q, h, at);
    const offset = mean ? one.reduce((sum, value, i) => sum + value * mean[h * width + i], 0) : 0;
    return Array.from({ length: tokens }, (_, to) => {
      let sum = offset;
      for (let i = 0, from = (h * tokens + to) * width; i < width; i += 1) sum += one[i] * k[from + i];
      return sum;
    });
  };
  const row = new Map(query === "readout" ? [...readout].entries() : [[positionOf(query), 1]]);
  row.forEach((share, at) => share || row.delete(at));
  const combined = every.map((h) => {
    const sums = new Float64Array(tokens);
    for (const [at, share] of row) softmax(productsOf(h, at)).forEach((weight, to) => (sums[to] += share * weight));
    return sums;
  });
  const most = (values) => values.reduce((best, value, i) => (value > values[best] ? i : best), 0);
  const patches = (h) => [...combined[h].slice(prefix.length)];
  const mixed = () => patches(0).map((_, i) => every.reduce((sum, h) => sum + combined[h][prefix.length + i], 0));
  const largest = typeof head !== "number";
  const to = key ?? prefix.length + most(largest ? mixed() : patches(head));
  const position = positionOf(to);
  const opened = largest ? most(every.map((h) => combined[h][position])) : head;
  const queries = [...row.keys()];
  const from = queries[most(queries.map((at) => row.get(at) * softmax(productsOf(opened, at))[position]))];
  const logits = productsOf(opened, from);
  return {
    prefix, rows, cols, layer, head: opened, largest, averaged: queries.length, query: from, key: position,
    heads: every.map((h) => combined[h][position]), q: vector(q, opened, from, 1 / scale),
    k: vector(k, opened, position, 1, mean), scale, mask: 0, logits, weight: softmax(logits)[position],
  };
}

function softmax(logits) {
  const most = Math.max(...logits.filter((value) => value !== null));
  const raised = logits.map((value) => (value === null ? 0 : Math.exp(value - most)));
  const sum = raised.reduce((total, value) => total + value, 0);
  return raised.map((value) => value / sum);
}
