// Norms, cosines and principal components of the tokens (T, D) of a layer.

function rowsOf(tokens, grid) {
  const width = tokens.length / tokenCount(grid);
  return Array.from({ length: tokenCount(grid) }, (_, t) =>
    tokens.subarray(t * width, (t + 1) * width),
  );
}

function dotOf(a, b) {
  let sum = 0;
  for (let i = 0; i < a.length; i += 1) sum += a[i] * b[i];
  return sum;
}

const norms = (tokens, grid) =>
  Float64Array.from(rowsOf(tokens, grid), (row) => Math.hypot(...row));

// (T) cosines of all tokens with their sum weighted by `weights` (T).
function cosines(tokens, grid, weights) {
  const rows = rowsOf(tokens, grid);
  const used = [...rows.keys()].filter((t) => weights[t]);
  const sum = Float64Array.from(rows[0], (_, i) => sumOf(used.map((t) => weights[t] * rows[t][i])));
  const size = Math.max(Math.hypot(...sum), 1e-8);
  return Float64Array.from(
    rows,
    (row) => dotOf(sum, row) / size / Math.max(Math.hypot(...row), 1e-8),
  );
}

// Makes the columns of a matrix, each an array, orthonormal. Returns the sum of their lengths.
function orthonormal(columns) {
  let total = 0;
  columns.forEach((column, k) => {
    for (const before of [...columns.slice(0, k), ...columns.slice(0, k)]) {
      // twice, for the rounding
      const dot = dotOf(column, before);
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
        for (let k = 0; k < n; k += 1)
          [matrix[p][k], matrix[q][k]] = rotate(matrix[p][k], matrix[q][k]);
      }
  const pairs = matrix.map((row, k) => [row[k], vectors.map((vector) => vector[k])]);
  return pairs.sort((a, b) => b[0] - a[0]);
}

// The first three principal components of the patches by subspace iteration: {colors: (P·3) from 0 to 1, shares: (3)}.
function components(tokens, grid) {
  const patches = rowsOf(tokens, grid).slice(grid.prefix.length);
  const [count, width] = [patches.length, patches[0].length];
  const means = Float64Array.from(patches[0], (_, i) =>
    sumOf(patches.map((row) => row[i] / count)),
  );
  const X = patches.map((row) => Float64Array.from(row, (value, i) => value - means[i]));
  const times = (vector) => Float64Array.from(X, (row) => dotOf(row, vector));
  const turned = (vector) => {
    // Xᵀ·v
    const result = new Float64Array(width);
    for (let p = 0; p < count; p += 1)
      for (let i = 0; i < width; i += 1) result[i] += X[p][i] * vector[p];
    return result;
  };
  const start = (_, k) =>
    Float64Array.from({ length: width }, (_, i) => Math.cos(1 + i * (k + 1.3)));
  let V = Array.from({ length: Math.min(12, count, width) }, start);
  let [before, size] = [-1, orthonormal(V)];
  for (let turn = 0; turn < 200 && Math.abs(size - before) > 1e-11 * size; turn += 1) {
    V = V.map((vector) => turned(times(vector)));
    [before, size] = [size, orthonormal(V)];
  }
  const Z = V.map(times);
  const pairs = eigen(Z.map((a) => Z.map((b) => dotOf(a, b)))).slice(0, 3);
  const total = sumOf(X.map((row) => dotOf(row, row))) || 1;
  const colors = new Float32Array(3 * count);
  pairs.forEach(([, vector], k) => {
    const scores = Z[0].map((_, p) => vector.reduce((sum, weight, j) => sum + weight * Z[j][p], 0));
    const [low, high] = [Math.min(...scores), Math.max(...scores)];
    const up = -low > high ? (score) => high - score : (score) => score - low; // the largest score is positive
    scores.forEach((score, p) => (colors[3 * p + k] = up(score) / Math.max(high - low, 1e-12)));
  });
  return { colors, shares: pairs.map(([value]) => value / total) };
}
