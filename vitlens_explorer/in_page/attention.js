// Attention and its statistics from the queries and keys of a record: softmax(q·kᵀ) of a query over all T tokens.

import { sumOf } from "../front/values.js";

export const countTokens = ({ prefix, rows, cols }) => prefix.length + rows * cols;

// Writes the attention of one query in one head to `out`.
export function attend(record, layer, head, query, out) {
  const { q, k } = record.layers[layer];
  const tokens = out.length;
  const width = q.length / record.heads / tokens;
  const from = (head * tokens + query) * width;
  let at = head * tokens * width;
  let most = -Infinity;
  let sum = 0;
  for (let t = 0; t < tokens; t += 1) {
    let dot = 0;
    for (let i = from; i < from + width; i += 1) {
      dot += q[i] * k[at];
      at += 1;
    }
    out[t] = dot;
    if (dot > most) most = dot;
  }
  for (let t = 0; t < tokens; t += 1) {
    out[t] = Math.exp(out[t] - most);
    sum += out[t];
  }
  for (let t = 0; t < tokens; t += 1) out[t] /= sum;
  return out;
}

// (H) maps (T): the attention of all queries, weighted.
export function readAttention(record, layer, weights) {
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

// Distances in pixels between two patches, by how many rows and columns they are apart.
function distancesOf({ rows, cols, patch }) {
  const distances = new Float64Array(rows * cols);
  for (let i = 0; i < distances.length; i += 1) {
    distances[i] = Math.hypot(Math.floor(i / cols) * patch[0], (i % cols) * patch[1]);
  }
  return distances;
}

// The mean distance of a patch from the patches that it attends to. row: its attention.
function distanceFrom(place, row, { rows, cols, prefix }, distances) {
  const y = Math.floor(place / cols);
  const x = place % cols;
  let distance = 0;
  let t = prefix.length;
  for (let r = 0; r < rows; r += 1) {
    for (let c = 0; c < cols; c += 1) {
      distance += row[t] * distances[Math.abs(r - y) * cols + Math.abs(c - x)];
      t += 1;
    }
  }
  return distance;
}

export const swept = new WeakMap(); // statistics by layer

// Statistics of all queries of a layer: attention received (H) of (T), mean distance and entropy (H), and mean and max
// over heads, (T·T) each. They are kept.
export function sweep(record, layer) {
  const stored = record.layers[layer];
  if (!swept.has(stored)) swept.set(stored, measureLayer(record, layer));
  return swept.get(stored);
}

function measureLayer(record, layer) {
  const { grid, heads } = record;
  const tokens = countTokens(grid);
  const patches = grid.rows * grid.cols;
  const between = distancesOf(grid);
  const row = new Float64Array(tokens);
  const mean = new Float32Array(tokens * tokens);
  const max = new Float32Array(tokens * tokens);
  const received = [];
  const distances = [];
  const entropies = [];
  for (let head = 0; head < heads; head += 1) {
    const sum = new Float64Array(tokens);
    let distance = 0;
    let entropy = 0;
    for (let query = 0; query < tokens; query += 1) {
      attend(record, layer, head, query, row);
      let at = query * tokens;
      for (let t = 0; t < tokens; t += 1) {
        sum[t] += row[t] / tokens;
        mean[at] += row[t] / heads;
        if (row[t] > max[at]) max[at] = row[t];
        if (row[t] > 0) entropy -= (row[t] * Math.log(row[t])) / tokens;
        at += 1;
      }
      const place = query - grid.prefix.length;
      if (place >= 0) distance += distanceFrom(place, row, grid, between);
    }
    received.push(sum);
    distances.push(distance / patches);
    entropies.push(entropy);
  }
  return { received, distances, entropies, mean, max };
}

// (T) row of the product of (A + I) / row sum over layers `layer` … 0, with A the mean or maximum over heads.
export function rollOut(record, layer, weights, fusion) {
  let row = Float64Array.from(weights);
  for (let l = layer; l >= 0; l -= 1) {
    const fused = sweep(record, l)[fusion];
    const next = new Float64Array(row.length);
    row.forEach((weight, query) => {
      if (!weight) return;
      const attention = fused.subarray(query * row.length, (query + 1) * row.length);
      const rowSum = fusion === "mean" ? 2 : 1 + sumOf(attention);
      const share = weight / rowSum;
      for (let t = 0; t < row.length; t += 1) next[t] += share * attention[t];
      next[query] += share;
    });
    row = next;
  }
  return row;
}
