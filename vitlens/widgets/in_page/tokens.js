// Norms, cosines and principal components of the tokens (T, D) of a layer.

const widthOf = (tokens, grid) => tokens.length / tokenCount(grid);

function norms(tokens, grid) {
  const width = widthOf(tokens, grid);
  const norm = (_, t) => Math.hypot(...tokens.subarray(t * width, (t + 1) * width));
  return Float64Array.from({ length: tokens.length / width }, norm);
}

// (T) cosines of all tokens with their sum weighted by `weights` (T).
function cosines(tokens, grid, weights) {
  const width = widthOf(tokens, grid);
  const sum = new Float64Array(width);
  weights.forEach((weight, t) => {
    if (weight) for (let i = 0; i < width; i += 1) sum[i] += weight * tokens[t * width + i];
  });
  const size = Math.max(Math.hypot(...sum), 1e-8);
  return norms(tokens, grid).map((norm, t) => {
    let dot = 0;
    for (let i = 0; i < width; i += 1) dot += tokens[t * width + i] * sum[i];
    return dot / size / Math.max(norm, 1e-8);
  });
}

// Makes the columns of a matrix, each an array, orthonormal. Returns the sum of their lengths.
function orthonormal(columns) {
  let total = 0;
  columns.forEach((column, k) => {
    for (const before of [...columns.slice(0, k), ...columns.slice(0, k)]) { // twice, for the rounding
      const dot = column.reduce((sum, value, i) => sum + value * before[i], 0);
      column.forEach((value, i) => (column[i] = value - dot * before[i]));
    }
    const size = Math.hypot(...column);
    total += size;
    if (size) column.forEach((value, i) => (column[i] = value / size));
  });
  return total;
}

// Diagonalizes a small symmetric matrix (Jacobi): [[eigenvalue, eigenvector], …], largest first.
function eigen(matrix) {
  const n = matrix.length;
  const vectors = matrix.map((_, i) => matrix.map((_, j) => Number(i === j)));
  for (let turn = 0; turn < 30; turn += 1)
    for (let p = 0; p < n; p += 1)
      for (let q = p + 1; q < n; q += 1) {
        const angle = Math.atan2(2 * matrix[p][q], matrix[q][q] - matrix[p][p]) / 2;
        const [c, s] = [Math.cos(angle), Math.sin(angle)];
        const rotate = (a, b) => [c * a - s * b, s * a + c * b];
        for (const row of [...matrix, ...vectors]) [row[p], row[q]] = rotate(row[p], row[q]);
        for (let k = 0; k < n; k += 1) [matrix[p][k], matrix[q][k]] = rotate(matrix[p][k], matrix[q][k]);
      }
  const pairs = matrix.map((row, k) => [row[k], vectors.map((vector) => vector[k])]);
  return pairs.sort((a, b) => b[0] - a[0]);
}

// The first three principal components of the patches by subspace iteration: {colors: (P·3) from 0 to 1, shares: (3)}.
function components(tokens, grid) {
  const [width, count] = [widthOf(tokens, grid), grid.rows * grid.cols];
  const X = Float64Array.from(tokens.subarray(grid.prefix.length * width));
  for (let i = 0; i < width; i += 1) {
    let mean = 0;
    for (let p = 0; p < count; p += 1) mean += X[p * width + i] / count;
    for (let p = 0; p < count; p += 1) X[p * width + i] -= mean;
  }
  const times = (vector, turned) => { // X·v, or Xᵀ·v
    const result = new Float64Array(turned ? width : count);
    for (let p = 0, at = 0; p < count; p += 1)
      for (let i = 0; i < width; i += 1, at += 1) result[turned ? i : p] += X[at] * vector[turned ? p : i];
    return result;
  };
  const block = Math.min(12, count, width);
  const start = (k) => Float64Array.from({ length: width }, (_, i) => Math.cos(1 + i * (k + 1.3)));
  let V = Array.from({ length: block }, (_, k) => start(k));
  let [before, size] = [-1, orthonormal(V)];
  for (let turn = 0; turn < 200 && Math.abs(size - before) > 1e-11 * size; turn += 1) {
    V = V.map((vector) => times(times(vector), true));
    [before, size] = [size, orthonormal(V)];
  }
  const Z = V.map((vector) => times(vector));
  const pairs = eigen(Z.map((a) => Z.map((b) => a.reduce((sum, value, i) => sum + value * b[i], 0)))).slice(0, 3);
  const total = X.reduce((sum, value) => sum + value * value, 0) || 1;
  const colors = new Float32Array(3 * count);
  pairs.forEach(([, vector], k) => {
    const scores = Z[0].map((_, p) => vector.reduce((sum, weight, j) => sum + weight * Z[j][p], 0));
    const [low, high] = [Math.min(...scores), Math.max(...scores)];
    const up = -low > high ? (score) => high - score : (score) => score - low; // the largest score is positive
    scores.forEach((score, p) => (colors[3 * p + k] = up(score) / Math.max(high - low, 1e-12)));
  });
  return { colors, shares: pairs.map(([value]) => value / total) };
}
