// What of a model depends on the size of its input.

import { sumOf } from "../front/values.js";

const MOST_STRETCHED = 16; // largest aspect ratio of the grid for a whole photo

// Rounds halves to even, as Python.
export function roundLikePython(x) {
  return Math.abs(x % 1) === 0.5 ? 2 * Math.round(x / 2) : Math.round(x);
}

// Shares of the tokens (T), of which R are not patches, in each vector that the head reads.
function readoutsOf(reads, T, R) {
  const token = (place) => Array.from({ length: T }, (_, t) => Number(t === place));
  const patches = Array.from({ length: T }, (_, t) => (t < R ? 0 : 1 / (T - R)));
  const readouts = {
    token: [token(0)],
    patches: [patches],
    "two tokens": [token(0), token(1)],
    "token and patches": [token(0), patches],
  };
  return readouts[reads];
}

const meanRow = (rows) => rows[0].map((_, i) => sumOf(rows.map((row) => row[i])) / rows.length);

// Rows and columns of patches in an input [height, width].
export const gridShape = ({ patch }, image) =>
  image.map((side, axis) => Math.floor(side / patch[axis]));

// {image, tokens, readouts, readout} of a model for an input [height, width]. reads: the name of what the head reads.
export function describeSize({ patch, prefix, reads }, image) {
  const [rows, cols] = gridShape({ patch }, image);
  const tokens = prefix + rows * cols;
  const readouts = readoutsOf(reads, tokens, prefix);
  const readout = reads === "token and patches" ? null : meanRow(readouts);
  return { image, tokens, readouts, readout };
}

// [height, width] of the input that shows a whole photo with about the model's number of patches, as `size_for` in
// photographs.py.
export function wholeImage({ image, patch }, { width, height }) {
  const ratio = Math.min(Math.max(height / width, 1 / MOST_STRETCHED), MOST_STRETCHED);
  const side = Math.sqrt(image[0] * image[1]); // of a square with the same area
  const sides = [side * Math.sqrt(ratio), side / Math.sqrt(ratio)];
  return sides.map(
    (length, axis) => Math.max(1, roundLikePython(length / patch[axis])) * patch[axis],
  );
}

// Largest number of tokens of any input that a model takes. Rows and columns of `wholeImage` are rounded, by at most a
// half of a patch each.
export function mostTokens({ image, patch, prefix, tokens, stretches }) {
  if (!stretches) return tokens;
  const rows = Math.sqrt(image[0] * image[1]) / patch[0];
  const stretch = Math.sqrt(MOST_STRETCHED);
  return prefix + Math.ceil((rows * stretch + 0.5) * (rows / stretch + 0.5));
}
