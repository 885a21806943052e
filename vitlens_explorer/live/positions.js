// Positions of another grid of patches, resized as the model's library does it.

import { FILTERS, sharesOfPixels } from "./pixels.js";

// The bicubic filter of PyTorch without antialiasing, which has another parameter (−0.75) than Pillow's.
function sharpWeight(x) {
  if (x < 1) return (1.25 * x - 2.25) * x * x + 1;
  if (x < 2) return ((-0.75 * x + 3.75) * x - 6) * x + 3;
  return 0;
}

// For each of `to` places: the four of the `from` places that it sums, and their weights. Places beyond the edge are
// those at the edge.
function sharpShares(from, to) {
  return Array.from({ length: to }, (_, i) => {
    const center = ((i + 0.5) * from) / to - 0.5;
    const first = Math.floor(center) - 1;
    const places = [0, 1, 2, 3].map((k) => Math.min(from - 1, Math.max(0, first + k)));
    return [places, [0, 1, 2, 3].map((k) => sharpWeight(Math.abs(center - first - k)))];
  });
}

// The same with antialiasing, which is Pillow's filter.
function smoothShares(from, to) {
  return sharesOfPixels(from, to, FILTERS.bicubic).map(([first, weights]) => [
    weights.map((_, k) => first + k),
    weights,
  ]);
}

// Vectors (rows, to, D) from (rows, from, D), whose neighbors lie `step` and whose rows lie `line` vectors apart.
function resizeVectors(source, target, shares, D, rows, { line, step, toLine, toStep }) {
  for (let row = 0; row < rows; row += 1) {
    shares.forEach(([places, weights], place) => {
      const to = (row * toLine + place * toStep) * D;
      for (let k = 0; k < places.length; k += 1) {
        const from = (row * line + places[k] * step) * D;
        for (let i = 0; i < D; i += 1) target[to + i] += weights[k] * source[from + i];
      }
    });
  }
}

// Positions (rows·cols, D) of a grid from those of another. from, to: [rows, cols] of each.
export function resizePositions(positions, D, from, to, antialias) {
  const [oldRows, oldCols] = from;
  const [rows, cols] = to;
  const sharesOf = antialias ? smoothShares : sharpShares;
  const across = new Float64Array(oldRows * cols * D);
  const both = new Float64Array(rows * cols * D);
  const steps = { line: oldCols, step: 1, toLine: cols, toStep: 1 };
  resizeVectors(positions, across, sharesOf(oldCols, cols), D, oldRows, steps);
  const next = { line: 1, step: cols, toLine: 1, toStep: cols };
  resizeVectors(across, both, sharesOf(oldRows, rows), D, cols, next);
  return Float32Array.from(both);
}
