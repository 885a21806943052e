// Attention and its statistics from the queries and keys of a record: softmax(q·kᵀ) of a query over all T tokens.

const tokenCount = ({ prefix, rows, cols }) => prefix.length + rows * cols;

// Writes the attention of one query in one head to `out`.
function attend(record, layer, head, query, out) {
  const { q, k } = record.layers[layer];
  const tokens = out.length;
  const width = q.length / record.heads / tokens;
  const from = (head * tokens + query) * width;
  let [at, most, sum] = [head * tokens * width, -Infinity, 0];
  for (let t = 0; t < tokens; t += 1) {
    let dot = 0;
    for (let i = from; i < from + width; i += 1, at += 1) dot += q[i] * k[at];
    out[t] = dot;
    if (dot > most) most = dot;
  }
  for (let t = 0; t < tokens; t += 1) sum += out[t] = Math.exp(out[t] - most);
  for (let t = 0; t < tokens; t += 1) out[t] /= sum;
  return out;
}

// (H) maps (T): the attention of all queries, weighted.
function read(record, layer, weights) {
  const row = new Float64Array(weights.length);
  return Array.from({ length: record.heads }, (_, head) => {
    const total = new Float64Array(weights.length);
    weights.forEach((weight, query) => {
      if (!weight) return;
      attend(record, layer, head, query, row);
      for (let t = 0; t < row.length; t += 1) total[t] += weight * row[t];
    });
    return total;
  });
}

const swept = new WeakMap(); // statistics by layer

// Statistics of all queries of a layer: attention received (H) of (T), mean distance (H), and mean and max over heads,
// (T·T) each. They are kept.
function sweep(record, layer) {
  if (swept.has(record.layers[layer])) return swept.get(record.layers[layer]);
  const { rows, cols, patch, prefix } = record.grid;
  const tokens = tokenCount(record.grid);
  const distanceOf = (_, i) => Math.hypot(Math.floor(i / cols) * patch[0], (i % cols) * patch[1]);
  const apart = Float64Array.from({ length: rows * cols }, distanceOf);
  const row = new Float64Array(tokens);
  const [mean, max] = [new Float32Array(tokens * tokens), new Float32Array(tokens * tokens)];
  const [received, distances] = [[], []];
  for (let head = 0; head < record.heads; head += 1) {
    const sum = new Float64Array(tokens);
    let distance = 0;
    for (let query = 0; query < tokens; query += 1) {
      attend(record, layer, head, query, row);
      for (let t = 0, at = query * tokens; t < tokens; t += 1, at += 1) {
        sum[t] += row[t] / tokens;
        mean[at] += row[t] / record.heads;
        if (row[t] > max[at]) max[at] = row[t];
      }
      const place = query - prefix.length;
      if (place < 0) continue;
      const [y, x] = [Math.floor(place / cols), place % cols];
      for (let r = 0, t = prefix.length; r < rows; r += 1)
        for (let c = 0; c < cols; c += 1, t += 1)
          distance += row[t] * apart[Math.abs(r - y) * cols + Math.abs(c - x)];
    }
    received.push(sum);
    distances.push(distance / (rows * cols));
  }
  swept.set(record.layers[layer], { received, distances, mean, max });
  return swept.get(record.layers[layer]);
}

// (T) row of the product of (A + I) / row sum over layers `layer` … 0, with A the mean or maximum over heads.
function rollout(record, layer, weights, fusion) {
  let row = Float64Array.from(weights);
  for (let l = layer; l >= 0; l -= 1) {
    const fused = sweep(record, l)[fusion];
    const next = new Float64Array(row.length);
    row.forEach((weight, query) => {
      if (!weight) return;
      const attention = fused.subarray(query * row.length, (query + 1) * row.length);
      const share =
        weight / (fusion === "mean" ? 2 : 1 + attention.reduce((sum, value) => sum + value, 0));
      for (let t = 0; t < row.length; t += 1) next[t] += share * attention[t];
      next[query] += share;
    });
    row = next;
  }
  return row;
}
