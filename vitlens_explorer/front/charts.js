import {
  cellUnder,
  make,
  makeButton,
  makeSmallButton,
  makeSteered,
  nextNumber,
  setPressed,
} from "./elements.js";
import { coverPatches, readPixels } from "./pictures.js";
import { formatNumber, formatPercent, largestOf, smallestOf } from "./values.js";

// A button in a list, of a name and its share as a bar. plain: the score is a value instead of a probability.
function makeBar({ name, share, before, now, tip, plain }, message, send) {
  const format = plain ? formatNumber : formatPercent;
  const style = `--share: ${plain ? 0 : share}`;
  const bar = make("span", { class: "bar", style, "aria-hidden": "true" });
  const parts = [
    make("span", { class: "name" }, name),
    bar,
    make("span", { class: "share" }, format(share)),
  ];
  const changed = before !== undefined;
  if (changed) {
    if (!plain) bar.append(make("i", { style: `--share: ${before}` }));
    parts.push(make("span", { class: "before" }, `was ${format(before)}`));
  }
  const onclick = () => send(message);
  const button = make("button", { type: "button", title: tip, onclick }, ...parts);
  setPressed(button, now);
  return make("li", { class: changed ? "changed" : "" }, button);
}

// The most probable classes. A click explains one.
export function makeBars(rows, send) {
  return rows.map((row) => {
    const tip = `Why “${row.full}”?`;
    return makeBar({ ...row, tip }, { why: row.number }, send);
  });
}

const MOST_NAMES = 60; // names in the list at once

// The names that a model knows, as a fold with a search. A click explains the class.
export function makeNames(model, send) {
  let names = null;
  let owner; // number of the model that has these names
  const search = make("input", { type: "search", "aria-label": "Search the names" });
  const list = make("ul", {});
  const rest = make("p", { class: "note" });
  const summary = make("summary", {});
  const ask = () => model.send({ ask: "names", number: nextNumber() }, undefined, []);
  const draw = () => {
    const wanted = search.value.trim().toLowerCase();
    const found = names.flatMap((name, k) =>
      name.toLowerCase().includes(wanted) ? [[k, name]] : [],
    );
    const items = found.slice(0, MOST_NAMES).map(([k, name]) => {
      const title = `Why “${name}”?`;
      return make(
        "li",
        {},
        makeButton(name, () => send({ why: k }), { class: "name", title }),
      );
    });
    list.replaceChildren(...items);
    const more = found.length - items.length;
    rest.textContent = more > 0 ? `and ${more.toLocaleString("en")} more` : "";
    if (!found.length) rest.textContent = "None of them has these letters.";
  };
  const ontoggle = () => {
    if (node.open && !names) ask();
  };
  search.addEventListener("input", () => names && draw());
  const node = make("details", { class: "knows", ontoggle }, summary, search, list, rest);
  const receive = (answer) => {
    names = answer.names;
    draw();
  };
  // models: number of models that were opened in the page. Each has its own names.
  const update = (words, models) => {
    node.hidden = !words;
    summary.textContent = words || "";
    if (models === owner) return;
    owner = models;
    names = null;
    list.replaceChildren();
    rest.textContent = "";
    if (node.open && words) ask();
  };
  return { node, receive, update };
}

// The most probable class after each layer. A click selects the layer.
export function makeLayerBars({ title, rows, layer, note }, send) {
  const items = rows.map((row) => {
    const score = row.plain ? formatNumber(row.share) : formatPercent(row.share);
    const tip = `After layer ${row.layer}: ${row.name}, ${score}`;
    const message = { set: { layer: row.layer } };
    const item = makeBar({ ...row, tip, now: row.layer === layer }, message, send);
    item.firstChild.prepend(make("span", { class: "layer" }, row.layer));
    return item;
  });
  return [
    make("h3", {}, title),
    make("ol", { class: "bars layers" }, ...items),
    make("p", { class: "note" }, note),
  ];
}

// Sizes of charts in SVG units: the whole, the margins, and the space above the plot with and without a unit.
const WIDTH = 320;
export const HEIGHT = 200;
const LEFT = 34;
const RIGHT = 6;
export const BOTTOM = 34;
export const TOP = 8;
const TOP_WITH_UNIT = 22;

// A chart whose vertical axis includes some values and 0: {plot, x(share), y(value), tick(share, text)}. axis: label of
// the horizontal one. unit: of the vertical one.
export function makeChart(label, values, axis, unit = "") {
  const plot = make("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label });
  const least = 1.05 * smallestOf([...values, 0]);
  const most = 1.05 * largestOf([...values, 1e-9]);
  const top = unit ? TOP_WITH_UNIT : TOP;
  const x = (share) => LEFT + share * (WIDTH - LEFT - RIGHT);
  const y = (value) => ((most - value) / (most - least)) * (HEIGHT - BOTTOM - top) + top;
  const write = (left, bottom, text, anchor) => {
    plot.append(make("text", { x: left, y: bottom, "text-anchor": anchor }, text));
  };
  const tick = (share, text) => write(x(share), HEIGHT - 19, text, "middle");
  const power = 10 ** Math.floor(Math.log10(most - least));
  const step = power * ((most - least) / power < 3 ? 0.5 : 2);
  for (let k = Math.ceil(least / step); k * step <= most; k += 1) {
    const at = y(k * step);
    const kind = k ? "rule" : "rule zero";
    plot.append(make("line", { class: kind, x1: LEFT, x2: WIDTH - RIGHT, y1: at, y2: at }));
    write(LEFT - 5, at + 3.5, formatNumber(k * step), "end");
  }
  write(0, 10, unit, "start");
  write(x(0.5), HEIGHT - 4, axis, "middle");
  return { plot, x, y, tick };
}

// The legend of a chart, of [name, class] each.
export function makeKeys(kinds) {
  const keys = kinds.map(([name, kind]) => make("span", { class: `key ${kind}` }, name));
  return make("p", { class: "keys" }, ...keys);
}

const CURVES = ["deletion", "insertion"]; // of the map itself

// The score while patches are covered or revealed in the order of the map, and in random orders. The pointer and the
// arrow keys choose a point of the map's own curves, whose photo is shown, also in place of the map. panel, picture: of
// the map. reveal: of its panel.
export function makeCurves(described, panel, picture, reveal, send) {
  const { title, verdict, words, scale, shares, curves, name, order, fill, starts } = described;
  if (!curves) {
    const start = () => send({ press: "score" });
    const button = starts ? [makeSmallButton(starts, start)] : [];
    return [make("h3", {}, title), make("p", { class: "note" }, words), ...button];
  }
  const values = [...Object.values(curves).flat(), 0.02];
  const axis = "share of patches covered / revealed";
  const { plot, x, y, tick } = makeChart(`${title}. ${words}`, values, axis, scale);
  for (const share of [0, 0.25, 0.5, 0.75, 1]) tick(share, `${100 * share}%`);
  for (const [curve, scores] of Object.entries(curves)) {
    const points = scores.map((score, k) => `${x(shares[k])},${y(score)}`).join(" ");
    plot.append(make("polyline", { class: `curve ${curve}`, points }));
  }
  const dot = make("circle", { r: 4 });
  const canvas = make("canvas", { role: "img" });
  const line = make("p", { class: "sum" });
  let kind = "deletion"; // the curve of the chosen point
  let at = Math.floor(shares.length / 2); // its place on the curve

  const show = async (enlarged = true) => {
    const { whole } = await readPixels(picture);
    const count = Math.round(shares[at] * order.length);
    const score = curves[kind][at];
    const covers = kind === "deletion";
    const patches = covers ? order.slice(0, count) : order.slice(count);
    coverPatches(canvas, whole, panel, patches, fill);
    dot.setAttribute("cx", x(shares[at]));
    dot.setAttribute("cy", y(score));
    dot.setAttribute("class", `part ${kind}`);
    const share = `${Math.round(100 * shares[at])}% of the patches`;
    const effect = covers ? "covered" : "revealed";
    line.textContent = `${share} ${effect}: ${name} ${formatNumber(score)}`;
    canvas.setAttribute("aria-label", `The photo with ${line.textContent}`);
    if (enlarged) reveal(patches, fill, line.textContent);
  };
  const indexOfNearest = (distances) => distances.indexOf(smallestOf(distances));
  const point = (event) => {
    const [top, left] = cellUnder(event, plot, [1 / HEIGHT, 1 / WIDTH]);
    at = indexOfNearest(shares.map((share) => Math.abs(x(share) - left)));
    const distances = CURVES.map((curve) => Math.abs(y(curves[curve][at]) - top));
    kind = CURVES[indexOfNearest(distances)];
    show();
  };
  const move = (other, step) => {
    if (other) kind = CURVES[1 - CURVES.indexOf(kind)];
    at = Math.min(Math.max(at + step, 0), shares.length - 1);
    show();
  };
  const leave = () => reveal(null);

  plot.append(dot);
  show(false);
  const hint = "Point at a curve, or use the arrow keys, to see the photo at that point.";
  const attributes = {
    class: "plot",
    "aria-label": `${title}. ${hint}`,
    onpointermove: point,
    onpointerdown: point,
    onpointerleave: leave,
    onblur: leave,
  };
  return [
    make("h3", {}, title),
    make("p", { class: "verdict" }, verdict),
    makeSteered(attributes, move, plot),
    makeKeys([...CURVES, "random"].map((curve) => [curve, curve])),
    make("div", { class: "covered" }, canvas, line),
    make("p", { class: "note" }, `${words} ${hint}`),
  ];
}

export const MOST_TICKS = 12; // numbers of layers below a chart

// Contribution of each part to a logit: heads and MLP of each layer, and other parts at the right. A click on a bar or
// an arrow key chooses the head.
export function makeContributions({ heads, mlps, others, layer, head, title, note }, send, aim) {
  const values = [...heads.flat(), ...mlps, ...others.map(([, value]) => value)];
  const { plot, x, y, tick } = makeChart(`${title}. ${note}`, values, "layer");
  // Bars stand in slots of equal width: after each layer and each other part one is empty.
  const slots = heads.length * (heads[0].length + 2) + 2 * others.length;
  let slot = 0.5;
  const choose = (k, h) => {
    if (heads[k]?.[h] === undefined) return;
    aim.at = [k, h];
    send({ set: { layer: k, head: h } });
  };
  const addBar = (kind, name, value, onclick) => {
    const from = x(slot / slots);
    const width = x((slot + 1) / slots) - from;
    const top = Math.min(y(value), y(0));
    const height = Math.max(0.7, Math.max(y(value), y(0)) - top);
    slot += 1;
    const text = `${name}: ${value > 0 ? "+" : ""}${formatNumber(value)} logits`;
    const reach = { class: "reach", x: from, width, y: TOP, height: HEIGHT - BOTTOM - TOP };
    const mark = { x: from + 0.08 * width, width: 0.84 * width, y: top, height };
    const group = make(
      "g",
      { class: onclick && "goes", onclick },
      make("title", {}, text),
      make("rect", reach),
      make("rect", { class: `part ${kind}`, ...mark }),
    );
    plot.append(group);
  };
  heads.forEach((row, k) => {
    const from = slot;
    row.forEach((value, h) => {
      const now = k === layer && (head === null || h === head);
      addBar(now ? "head now" : "head", `layer ${k}, head ${h}`, value, () => choose(k, h));
    });
    addBar("mlp", `layer ${k}, MLP`, mlps[k]);
    if (k % Math.ceil(heads.length / MOST_TICKS) === 0) tick((from + slot) / 2 / slots, k);
    slot += 1;
  });
  for (const [name, value] of others) {
    addBar("other", name, value);
    slot += 1;
  }
  const move = (down, across) => {
    const [k, h] = aim.at || [layer, head];
    if (k === null) choose(0, 0);
    else choose(k + across, h === null ? 0 : h - down);
  };
  const hint = "Click the bar of a head, or use the arrow keys, to see its map.";
  const otherNames = others.map(([name]) => name).join(", ");
  let now = "";
  if (head !== null) {
    now = `Layer ${layer}, head ${head}: ${formatNumber(heads[layer][head])} logits. `;
  }
  return [
    make("h3", {}, title),
    makeSteered({ class: "plot", "aria-label": `${title}. ${hint}` }, move, plot),
    makeKeys([
      ["heads", "part head"],
      ["MLPs", "part mlp"],
      [otherNames, "part other"],
    ]),
    make("p", { class: "note" }, `${now}${note} ${hint}`),
  ];
}
