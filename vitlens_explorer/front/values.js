// Numbers of messages and maps. A live page's worker uses this file, too.

import { UNIFORM } from "./scales.js";

export const bytesOf = (view) => new Uint8Array(view.buffer, view.byteOffset, view.byteLength);
export const floatsOf = (view) => new Float32Array(bytesOf(view).slice().buffer);
export const isEqual = (a, b) => JSON.stringify(a) === JSON.stringify(b);
export const sumOf = (values) => values.reduce((sum, value) => sum + value, 0);
export const largestOf = (values) =>
  values.reduce((most, value) => Math.max(most, value), -Infinity);
export const smallestOf = (values) =>
  values.reduce((least, value) => Math.min(least, value), Infinity);

// The mean of a map that departs from it by no more than `bound`, as `uniform_value` in scales.py, or null.
export function uniformOf(values, bound) {
  if (!values.length) return null;
  const mean = sumOf(values) / values.length;
  const farthest = Math.max(largestOf(values) - mean, mean - smallestOf(values));
  return farthest <= bound * Math.abs(mean) ? mean : null;
}

// The factor from the mean of a map to its largest value, or null if some are negative, or all 0.
export function peakOf(values) {
  const most = largestOf(values);
  if (!(most > 0) || smallestOf(values) < 0) return null;
  return (most * values.length) / sumOf(values);
}

// The ends of the colors of a map of attention, in words.
export function rangeWords(values) {
  const ends = `0 to ${formatNumber(largestOf(values))}`;
  if (uniformOf(values, UNIFORM.attention) === null) return ends;
  return `${ends}, uniform within ${Math.round(100 * UNIFORM.attention)}%`;
}

// A number with three significant digits and a proper minus sign.
export function formatNumber(value) {
  const exponential = value && Math.abs(value) < 1e-4;
  const text = exponential ? value.toExponential(2) : String(Number(value.toPrecision(3)));
  return text.replaceAll("-", "−");
}

// Logits with -Infinity in place of null, which stands for a hidden token.
export const fillHidden = (logits) => logits.map((value) => value ?? -Infinity);

export function softmax(logits) {
  const filled = fillHidden(logits);
  const most = largestOf(filled);
  const raised = filled.map((value) => Math.exp(value - most));
  const sum = sumOf(raised);
  return raised.map((value) => value / sum);
}

// A share in percent with one decimal. Halves are rounded to the even digit, as in Python.
export function formatPercent(share) {
  const percent = 100 * share;
  const isTie = percent % 1 === 0.25; // toFixed rounds it up, and 0.75 to the even digit
  return `${(isTie ? percent - 0.05 : percent).toFixed(1)}%`;
}
