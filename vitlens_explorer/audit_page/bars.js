// Charts of a group: its effects beside the effects of random patches, and its place in the image.

import { make } from "../front/elements.js";
import { largestOf } from "../front/values.js";

const WIDE = 320; // units of a chart
const NAMES = 88; // of the names at its left
const ROW = 24;

export const share = (value) => (value === null ? "–" : `${Math.round(100 * value)} %`);

// A difference of probabilities with its sign and two digits.
function signed(value) {
  const text = Math.abs(value).toFixed(2);
  if (Number(text) === 0) return text;
  return (value < 0 ? "−" : "+") + text;
}

// The ends of an axis for the effects of all groups, in steps of 0.1.
export function axisOf(groups) {
  const ends = [0, 0.1];
  for (const { ways } of groups) {
    for (const { low, high, band = 0 } of ways) ends.push(low, high, band, -band);
  }
  const least = Math.floor(10 * Math.min(...ends)) / 10;
  return [least, Math.ceil(10 * Math.max(...ends)) / 10];
}

function wordsOfWay({ words, effect, low, high, band }) {
  const interval = `95 % interval ${signed(low)} to ${signed(high)}`;
  return `Covered ${words}: ${signed(effect)}, ${interval}, random patches ${signed(-band)} to ${signed(band)}.`;
}

// Effects as bars, with their intervals as lines and the bands of random patches, if any. Effects of the ways of
// covering a group have the words of wordsOfWay.
export function makeBars(ways, [least, most], wordsOf = wordsOfWay) {
  const height = ROW * ways.length + 20;
  const place = (value) => NAMES + ((value - least) / (most - least)) * (WIDE - NAMES - 14);
  const bottom = height - 18;
  const nodes = [make("line", { class: "zero", x1: place(0), x2: place(0), y1: 0, y2: bottom })];
  ways.forEach((way, number) => {
    const middle = ROW * number + ROW / 2;
    const [from, to] = [0, way.effect].map(place).sort((a, b) => a - b);
    const interval = { x1: place(way.low), x2: place(way.high) };
    const half = way.band ?? 0;
    const band = { x: place(-half), width: place(half) - place(-half) };
    nodes.push(
      make(
        "g",
        {},
        make("title", {}, wordsOf(way)),
        make("text", { x: 0, y: middle + 4 }, way.name),
        make("rect", { class: "band", ...band, y: middle - 9, height: 18 }),
        make("rect", { class: "effect", x: from, width: to - from, y: middle - 5, height: 10 }),
        make("line", { class: "interval", ...interval, y1: middle, y2: middle }),
      ),
    );
  });
  for (const tick of new Set([least, 0, most])) {
    const anchor = tick === most ? "end" : "middle";
    const at = { x: place(tick), y: height - 4, "text-anchor": anchor };
    nodes.push(make("text", { class: "tick", ...at }, signed(tick)));
  }
  return makeChart("bars-of-group", WIDE, height, ways.map(wordsOf).join(" "), nodes);
}

// The share of a group's images that have it at each patch.
export function makePlace(place, { rows, cols }) {
  const most = largestOf(place);
  const at = place.indexOf(most);
  const cells = [make("rect", { class: "ground", width: cols, height: rows })];
  place.forEach((value, number) => {
    if (!value) return;
    const corner = { x: number % cols, y: Math.floor(number / cols), width: 1, height: 1 };
    cells.push(make("rect", { class: "cell", ...corner, "fill-opacity": value / most }));
  });
  const where = `row ${Math.floor(at / cols) + 1} of ${rows}, column ${(at % cols) + 1} of ${cols}`;
  const label = `Most frequent place: ${where}, in ${share(most)} of its images.`;
  cells.push(make("title", {}, label));
  return makeChart("place", cols, rows, label, cells);
}

function makeChart(name, width, height, label, nodes) {
  const attributes = { class: name, viewBox: `0 0 ${width} ${height}`, role: "img" };
  return make("svg", { ...attributes, "aria-label": label }, ...nodes);
}

export function makeFigure(title, chart) {
  return make("figure", {}, make("figcaption", {}, title), chart);
}
