// Norms, cosines and principal components of the tokens (T, D) of a layer.

import { sumOf } from "../front/values.js";
import { countTokens } from "./attention.js";

const TINY = 1e-12;
const SMALLEST_NORM = 1e-8;

function rowsOf(tokens, grid) {
  const count = countTokens(grid);
  const width = tokens.length / count;
  return Array.from({ length: count }, (_, t) => tokens.subarray(t * width, (t + 1) * width));
}

function dotOf(a, b) {
  let sum = 0;
  for (let i = 0; i < a.length; i += 1) sum += a[i] * b[i];
  return sum;
}

export function normsOf(tokens, grid) {
  return Float64Array.from(rowsOf(tokens, grid), (row) => Math.hypot(...row));
}

// (T) cosines of all tokens with their sum weighted by `weights` (T).
export function cosinesOf(tokens, grid, weights) {
  const rows = rowsOf(tokens, grid);
  const used = [...rows.keys()].filter((t) => weights[t]);
  const sum = Float64Array.from(rows[0], (_, i) => sumOf(used.map((t) => weights[t] * rows[t][i])));
  const size = Math.max(Math.hypot(...sum), SMALLEST_NORM);
  return Float64Array.from(rows, (row) => {
    const norm = Math.max(Math.hypot(...row), SMALLEST_NORM);
    return dotOf(sum, row) / size / norm;
  });
}

// Subtracts from a column its part along another one of length 1.
function removePart(column, other) {
  const dot = dotOf(column, other);
  for (let i = 0; i < column.length; i += 1) column[i] -= dot * other[i];
}

// Makes the columns of a matrix, each an array, orthonormal. Returns the sum of their lengths.
function orthonormalize(columns) {
  let total = 0;
  columns.forEach((column, k) => {
    const before = columns.slice(0, k);
    for (const other of before) removePart(column, other);
    for (const other of before) removePart(column, other); // again, for the rounding
    const size = Math.hypot(...column);
    total += size;
    if (!size) return;
    for (let i = 0; i < column.length; i += 1) column[i] /= size;
  });
  return total;
}

// Turns columns p and q of a row by an angle, given as its cosine and sine.
function rotateRow(row, p, q, cosine, sine) {
  const first = row[p];
  const second = row[q];
  row[p] = cosine * first - sine * second;
  row[q] = sine * first + cosine * second;
}

// Turns rows p and q of a matrix.
function rotateRows(matrix, p, q, cosine, sine) {
  for (let k = 0; k < matrix.length; k += 1) {
    const first = matrix[p][k];
    const second = matrix[q][k];
    matrix[p][k] = cosine * first - sine * second;
    matrix[q][k] = sine * first + cosine * second;
  }
}

// Diagonalizes a small symmetric matrix (Jacobi): [[eigenvalue, eigenvector], …], largest first.
function diagonalize(matrix) {
  const n = matrix.length;
  const vectors = matrix.map((_, i) => matrix.map((__, j) => Number(i === j)));
  for (let turn = 0; turn < 30; turn += 1) {
    for (let p = 0; p < n; p += 1) {
      for (let q = p + 1; q < n; q += 1) {
        const angle = Math.atan2(2 * matrix[p][q], matrix[q][q] - matrix[p][p]) / 2;
        const cosine = Math.cos(angle);
        const sine = Math.sin(angle);
        for (const row of matrix) rotateRow(row, p, q, cosine, sine);
        for (const row of vectors) rotateRow(row, p, q, cosine, sine);
        rotateRows(matrix, p, q, cosine, sine);
      }
    }
  }
  const pairs = matrix.map((row, k) => [row[k], vectors.map((vector) => vector[k])]);
  return pairs.sort((a, b) => b[0] - a[0]);
}

// Columns that span the directions in which rows (P, D) vary most, by subspace iteration. Each has D numbers.
function subspaceOf(rows) {
  const count = rows.length;
  const width = rows[0].length;
  const multiply = (vector) => Float64Array.from(rows, (row) => dotOf(row, vector));
  const multiplyTransposed = (vector) => {
    const result = new Float64Array(width);
    for (let p = 0; p < count; p += 1) {
      for (let i = 0; i < width; i += 1) result[i] += rows[p][i] * vector[p];
    }
    return result;
  };
  const start = (_, k) =>
    Float64Array.from({ length: width }, (__, i) => Math.cos(1 + i * (k + 1.3)));
  let columns = Array.from({ length: Math.min(12, count, width) }, start);
  let before = -1;
  let size = orthonormalize(columns);
  for (let turn = 0; turn < 200 && Math.abs(size - before) > 1e-11 * size; turn += 1) {
    columns = columns.map((column) => multiplyTransposed(multiply(column)));
    before = size;
    size = orthonormalize(columns);
  }
  return columns;
}

// The first three principal components of the patches: {colors: (P·3) from 0 to 1, shares: (3)}.
export function principalOf(tokens, grid) {
  const patches = rowsOf(tokens, grid).slice(grid.prefix.length);
  const count = patches.length;
  const means = Float64Array.from(patches[0], (_, i) =>
    sumOf(patches.map((row) => row[i] / count)),
  );
  const centered = patches.map((row) => Float64Array.from(row, (value, i) => value - means[i]));
  const projected = subspaceOf(centered).map((column) =>
    Float64Array.from(centered, (row) => dotOf(row, column)),
  );
  const products = projected.map((a) => projected.map((b) => dotOf(a, b)));
  const pairs = diagonalize(products).slice(0, 3);
  const total = sumOf(centered.map((row) => dotOf(row, row))) || 1;
  const colors = new Float32Array(3 * count);
  pairs.forEach(([, vector], k) => {
    const scores = new Float64Array(count);
    vector.forEach((weight, j) => {
      for (let p = 0; p < count; p += 1) scores[p] += weight * projected[j][p];
    });
    const low = Math.min(...scores);
    const high = Math.max(...scores);
    const range = Math.max(high - low, TINY);
    const flipped = -low > high; // the largest score is positive
    for (let p = 0; p < count; p += 1) {
      colors[3 * p + k] = (flipped ? high - scores[p] : scores[p] - low) / range;
    }
  });
  return { colors, shares: pairs.map(([value]) => value / total) };
}
