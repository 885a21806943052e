// Numbers of messages and maps. A live page's worker uses this file, too.

const bytesOf = (view) => new Uint8Array(view.buffer, view.byteOffset, view.byteLength);
const floatsOf = (view) => new Float32Array(bytesOf(view).slice().buffer);
const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);
const precise = (value) =>
  Math.abs(value) >= 1e-4 || !value ? Number(value.toPrecision(3)) : value.toExponential(2);
const shown = (value) => String(precise(value)).replaceAll("-", "−");
const sumOf = (values) => values.reduce((sum, value) => sum + value, 0);
const largestOf = (values) => values.reduce((most, value) => Math.max(most, value), -Infinity);
const smallestOf = (values) => values.reduce((least, value) => Math.min(least, value), Infinity);
const finite = (logits) => logits.map((value) => value ?? -Infinity); // null is a hidden token

function softmax(logits) {
  const most = largestOf(finite(logits));
  const raised = finite(logits).map((value) => Math.exp(value - most));
  const sum = sumOf(raised);
  return raised.map((value) => value / sum);
}
