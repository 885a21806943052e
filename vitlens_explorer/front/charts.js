import {
  cellUnder,
  make,
  makeButton,
  makeFrame,
  makeSmallButton,
  makeSteered,
  nextNumber,
  putImage,
  renew,
  setPressed,
} from "./elements.js";
import { coverPatches, readPixels } from "./pictures.js";
import { bytesOf, formatNumber, formatPercent, isEqual, largestOf, smallestOf } from "./values.js";

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
const MOST_OFF = 24; // buttons of heads that are off

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

const BLANK = 0x5a808080; // gray with 35 % opacity, as a pixel: a tile without a map
const LABELED = 16; // largest number of columns with numbers in their tiles, and of labels along a side
const REDUCED = 2; // rows of the mosaic before those of the heads: the mean and the maximum over heads
const SORTED_COLUMNS = 8; // of the mosaic in an order other than by layer: wide enough for the names of heads
const ORDERS = {
  layer: { name: "by layer" },
  distances: { name: "by attention distance", unit: "pixels" },
  entropies: { name: "by entropy", unit: "nats" },
};

// The maps of all heads from the query, a column for each layer, or their mean attention distances. A click or an arrow
// key chooses a layer and a head. A right click or X switches heads off. Places are [layer, row], with the mean and the
// maximum over heads in rows 0 and 1. In another order the heads alone are shown, from the smallest value to the
// largest, line by line. Cells are [column, line].
export function makeMosaic(send) {
  let all = null; // what the frame describes
  let far = false; // tiles show distances
  let hovered = null; // place under the pointer
  let aim = null; // chosen place without an answer yet
  let off = []; // heads that are off, [layer, head] each
  let order = "layer"; // what the user chose of ORDERS
  let sorted = null; // places in the order of a statistic. null: by layer
  let cursor = null; // place of the last choice, which views without heads do not keep

  const findChosen = () => {
    if (aim) return aim;
    return [all.layer, all.picks.findIndex((pick) => pick !== null && pick === all.head)];
  };
  const countColumns = () => {
    if (sorted) return Math.min(SORTED_COLUMNS, sorted.length);
    return all.layers + (all.pool ? 1 : 0);
  };
  const countLines = () => (sorted ? Math.ceil(sorted.length / countColumns()) : all.names.length);
  const isInside = ([k, r]) => {
    if (k === all.layers) return r >= REDUCED && r < REDUCED + all.pool;
    return k >= 0 && k < all.layers && r >= 0 && r < all.names.length;
  };
  const listHeads = () => {
    const layers = [...Array(all.layers).keys()];
    return layers.flatMap((k) => all.names.slice(REDUCED).map((_, head) => [k, head + REDUCED]));
  };
  const listPlaces = () => {
    if (sorted) return sorted;
    const columns = [...Array(countColumns()).keys()];
    return columns.flatMap((k) => all.names.map((_, r) => [k, r])).filter(isInside);
  };
  const indexOf = (place) => sorted.findIndex((each) => isEqual(each, place));
  // Sorts the heads by a statistic, if its numbers are there. Heads of equal values are in the order of layers.
  const sortHeads = () => {
    const values = order === "layer" ? null : all[order];
    const valueOf = ([k, r]) => values[k][r - REDUCED];
    sorted = values ? listHeads().sort((a, b) => valueOf(a) - valueOf(b)) : null;
  };
  const cellOf = (place) => {
    if (!sorted) return place;
    const at = indexOf(place);
    return at < 0 ? null : [at % SORTED_COLUMNS, Math.floor(at / SORTED_COLUMNS)];
  };
  // The place of a cell, or null.
  const placeAt = ([column, line]) => {
    const isColumn = column >= 0 && column < countColumns();
    if (sorted) return (isColumn && sorted[line * SORTED_COLUMNS + column]) || null;
    return isInside([column, line]) ? [column, line] : null;
  };
  // The places that the choice frames in a sorted mosaic: a head, or all of a layer, also for their mean or maximum.
  const listChosen = () => {
    const [layer, row] = findChosen();
    return sorted.filter(([k, r]) => k === layer && (row < REDUCED || r === row));
  };
  // The heads of a tile: one, or those of its layer for the rows of mean and maximum.
  const headsOf = ([k, r]) => {
    if (k === null) return [];
    const layer = k < all.layers ? k : "pool";
    if (r >= REDUCED) return [[layer, r - REDUCED]];
    const count = layer === "pool" ? all.pool : all.names.length - REDUCED;
    return Array.from({ length: count }, (_, head) => [layer, head]);
  };
  const includes = (heads, head) => heads.some((each) => isEqual(each, head));
  const isOff = (head) => includes(off, head);

  const set = (values) => {
    draw();
    send({ set: values });
  };
  const turn = (place) => {
    if (!all.off || !place) return; // saved pages run no model
    const heads = headsOf(place);
    const others = off.filter((each) => !includes(heads, each));
    off = heads.every(isOff) ? others : [...others, ...heads];
    set({ off });
  };
  const turnAllOn = () => {
    off = [];
    set({ off });
  };
  const turnOn = (head) => {
    off = off.filter((each) => !isEqual(each, head));
    set({ off });
    if (!off.length) stage.focus(); // the last button is gone
  };
  const choose = (place) => {
    if (!place || !isInside(place)) return;
    const [layer, row] = place;
    cursor = place;
    if (layer === all.layers) {
      turn(place); // heads of the pool have no map
      return;
    }
    const head = all.picks[row];
    aim = head === null ? [layer, -1] : place;
    set(head === null ? { layer } : { layer, head });
  };
  // Goes through the heads of a sorted mosaic, to its ends.
  const moveSorted = (down, across) => {
    const chosen = listChosen();
    const from = chosen.find((place) => isEqual(place, cursor)) || chosen[0];
    if (!from) {
      choose(sorted[0]);
      return;
    }
    const to = indexOf(from) + across + down * SORTED_COLUMNS;
    choose(sorted[to]);
  };
  const move = (down, across) => {
    if (sorted) {
      moveSorted(down, across);
      return;
    }
    const [k, r] = findChosen();
    if (k === null) choose([0, REDUCED]);
    else choose([k + across, r < 0 ? 0 : r + down]);
  };

  const placeWords = ([k, r]) => {
    if (k === null) return "All heads of all layers";
    if (k === all.layers) return `Pool, head ${r - REDUCED}`;
    if (r < 0) return `Layer ${k}`;
    const weight = `largest weight ${formatNumber(all.tops[k][r])}`;
    if (r < REDUCED) return `Layer ${k}, ${all.names[r]} over heads: ${weight}`;
    const head = r - REDUCED;
    const turned = isOff([k, head]) ? ", off" : "";
    let statistics = "";
    if (all.distances) {
      const distance = formatNumber(all.distances[k][head]);
      const entropy = formatNumber(all.entropies[k][head]);
      statistics = `, mean distance ${distance} pixels, entropy ${entropy} nats`;
    }
    return `Layer ${k}, head ${head}: ${weight}${statistics}${turned}`;
  };
  const hover = (place) => {
    hovered = place;
    const uniform = far ? ` Uniform attention: ${formatNumber(all.uniform)} pixels.` : "";
    const names = sorted ? " Tiles are named layer.head." : "";
    note.textContent = `${placeWords(hovered || findChosen())}.${uniform}${names}`;
  };

  const hidden = { "aria-hidden": "true" };
  const title = make("h3");
  const canvas = make("canvas");
  const note = make("p", { class: "note" });
  const marks = make("svg", { ...hidden, preserveAspectRatio: "none" });
  const stage = makeSteered({ class: "stage" }, move, canvas, marks);
  const down = make("div", { class: "down", ...hidden });
  const across = make("div", { class: "across", ...hidden });
  const corner = make("div", { class: "corner", ...hidden });
  corner.textContent = "layer";
  const tiles = make("div", { class: "tiles" }, stage, down, across, corner);
  const showDistances = (distances) => {
    far = distances;
    draw();
  };
  const near = makeSmallButton("Attention", () => showDistances(false));
  const distant = makeSmallButton("Distance", () => showDistances(true));
  const group = { class: "modes", role: "group", "aria-label": "Tiles show" };
  const mode = make("span", group, near, distant);
  const sort = (name) => {
    order = name;
    draw();
  };
  const onchange = () => sort(Object.keys(ORDERS)[menu.selectedIndex]);
  const choices = Object.values(ORDERS).map(({ name }) => make("option", {}, name));
  const menu = make("select", { "aria-label": "Order of the heads", onchange }, ...choices);
  const turner = makeSmallButton("", () => turn(findChosen()));
  const reset = makeSmallButton("Turn all on", turnAllOn);
  const actions = make("div", { class: "actions" }, mode, menu, turner, reset);
  const list = make("div", { class: "actions", role: "group", "aria-label": "Heads that are off" });
  const node = make("div", { class: "mosaic" }, title, tiles, actions, list, note);

  // Sizes of the canvas in cells. Between tiles is a gap of one.
  const measure = () => {
    const wide = all.cols + 1;
    const high = all.rows + 1;
    const width = countColumns() * wide - 1;
    const height = countLines() * high - 1;
    return { wide, high, width, height };
  };
  const findLargestDistance = () => largestOf([all.uniform, ...(all.distances || []).flat()]);

  const drawTiles = () => {
    const { layers, rows, cols, names, distances } = all;
    const { wide, high, width, height } = measure();
    const maps = bytesOf(all.maps);
    const colors = new Uint32Array(bytesOf(all.colors).slice().buffer);
    const most = findLargestDistance();
    const image = new ImageData(width, height);
    const out = new Uint32Array(image.data.buffer);
    for (const [k, r] of listPlaces()) {
      const distance = distances?.[k]?.[r - REDUCED];
      let color = 0; // of the whole tile, 0 for its map
      if (k === layers || (far && distance === undefined)) color = BLANK;
      else if (far) color = colors[Math.round((255 * distance) / most)];
      const [column, line] = cellOf([k, r]);
      let i = (k * names.length + r) * rows * cols;
      for (let y = 0; y < rows; y += 1) {
        const start = (line * high + y) * width + column * wide;
        for (let x = 0; x < cols; x += 1) {
          out[start + x] = color || colors[maps[i]];
          i += 1;
        }
      }
    }
    putImage(canvas, image);
  };

  // Distances in the tiles, or names of heads if they are sorted, crosses over the heads that are off, and a frame
  // around the chosen place.
  const drawMarks = () => {
    const { layers, rows, cols, distances } = all;
    const { wide, high, width, height } = measure();
    const most = findLargestDistance();
    const boxOf = (place) => {
      const [column, line] = cellOf(place);
      return { x: column * wide, y: line * high, width: cols, height: rows };
    };
    const makeText = (place) => {
      const [k, r] = place;
      const value = distances[k][r - REDUCED];
      const box = boxOf(place);
      const at = { x: box.x + cols / 2, y: box.y + rows / 2 };
      const kind = value > 0.6 * most ? "dark" : "";
      return make("text", { ...at, "font-size": 0.42 * cols, class: kind }, Math.round(value));
    };
    const makeName = (place) => {
      const [k, r] = place;
      const box = boxOf(place);
      const at = { x: box.x + cols / 2, y: box.y + 0.78 * rows };
      return make("text", { ...at, "font-size": 0.3 * cols, class: "name" }, `${k}.${r - REDUCED}`);
    };
    const makeCross = ([layer, head]) => {
      const place = [layer === "pool" ? layers : layer, head + REDUCED];
      if (!cellOf(place)) return []; // sorted heads are those of layers
      const box = boxOf(place);
      const d = `M${box.x} ${box.y}l${cols} ${rows}m0 ${-rows}l${-cols} ${rows}`;
      return [make("rect", { class: "veil", ...box }), make("path", { class: "cross", d })];
    };
    let texts = [];
    if (sorted) {
      texts = sorted.map(makeName);
    } else if (far && distances && countColumns() <= LABELED) {
      texts = listPlaces()
        .filter(([k, r]) => k < layers && r >= REDUCED)
        .map(makeText);
    }
    let frame = [];
    const [layer, row] = findChosen();
    if (sorted) {
      frame = listChosen().flatMap((place) => makeFrame(boxOf(place)));
    } else if (layer !== null) {
      const column = row < 0 ? { y: 0, height } : {}; // a layer without a head
      frame = makeFrame({ ...boxOf([layer, Math.max(row, 0)]), ...column });
    }
    marks.setAttribute("viewBox", `0 0 ${width} ${height}`);
    marks.replaceChildren(...texts, ...off.flatMap(makeCross), ...frame);
  };

  // The order of a sorted mosaic, and its ends.
  const orderWords = () => {
    if (!sorted) return "";
    const values = all[order].flat();
    const { name, unit } = ORDERS[order];
    const ends = `${formatNumber(smallestOf(values))} to ${formatNumber(largestOf(values))}`;
    return `, ${name}, ${ends} ${unit}`;
  };

  const drawLabels = () => {
    const { layers, names } = all;
    const { width, height } = measure();
    const step = Math.ceil(countColumns() / LABELED);
    const layerLabel = (k) => {
      if (k === layers) return "pool";
      return k % step ? "" : k;
    };
    const columns = Array.from({ length: countColumns() }, (_, k) => layerLabel(k));
    const rows = names.map((name, r) => (r < REDUCED || r % step === 0 ? name : ""));
    const makeSpans = (texts) => texts.map((text) => make("span", {}, text));
    renew(across, sorted ? null : columns, makeSpans);
    renew(down, sorted ? null : rows, makeSpans);
    corner.hidden = Boolean(sorted);
    tiles.classList.toggle("sorted", Boolean(sorted));
    const shape = `--shape: ${width / height}`;
    tiles.style.cssText = `--columns: ${countColumns()}; --rows: ${countLines()}; ${shape}`;
    title.textContent = all.titles[Number(far)] + orderWords();
    const turns = all.off ? ", X turns it off or on" : "";
    const how = `Arrow keys choose a layer and a head${turns}.`;
    const words = `${title.textContent}. ${placeWords(findChosen())}. ${how}`;
    stage.setAttribute("aria-label", words);
  };

  const drawActions = () => {
    const [layer, row] = findChosen();
    const heads = headsOf([layer, row]);
    const single = heads.length === 1;
    const what = single ? `head ${row - REDUCED} of layer ${layer}` : `layer ${layer}`;
    setPressed(near, !far);
    setPressed(distant, far);
    menu.selectedIndex = Object.keys(ORDERS).indexOf(order);
    menu.disabled = !all.distances;
    menu.title = all.distances ? "" : "Sorting needs the distances and entropies of all layers";
    turner.hidden = !heads.length || !all.off;
    turner.textContent = heads.every(isOff) ? `Turn ${what} on` : `× Turn ${what} off`;
    reset.hidden = !off.length;
  };

  // A button for each head that is off, which turns it on.
  const makeList = (heads) => {
    const nameOf = ([layer, head]) => {
      return layer === "pool" ? `Pool, head ${head}` : `Layer ${layer}, head ${head}`;
    };
    const buttons = heads.slice(0, MOST_OFF).map((head) => {
      const label = `Turn on: ${nameOf(head)}`;
      const attributes = { title: label, "aria-label": label };
      return makeSmallButton(`${nameOf(head)} ×`, () => turnOn(head), attributes);
    });
    const rest = heads.length - buttons.length;
    return rest ? [...buttons, `and ${rest} more`] : buttons;
  };

  const draw = () => {
    sortHeads();
    drawTiles();
    drawMarks();
    drawLabels();
    drawActions();
    renew(list, off.length ? off : null, makeList);
    hover(hovered);
  };

  const placeUnder = (event) => {
    const [line, column] = cellUnder(event, canvas, [1 / countLines(), 1 / countColumns()]);
    return placeAt([column, line]);
  };
  stage.addEventListener("click", (event) => choose(placeUnder(event)));
  stage.addEventListener("contextmenu", (event) => {
    event.preventDefault();
    turn(placeUnder(event));
  });
  stage.addEventListener("pointermove", (event) => hover(placeUnder(event)));
  stage.addEventListener("pointerleave", () => hover(null));
  stage.addEventListener("keydown", (event) => {
    if (["x", "X", "Delete"].includes(event.key)) turn(findChosen());
  });

  const update = (described, isWaiting) => {
    node.hidden = !described;
    if (!described) return;
    all = described;
    if (!isWaiting()) {
      aim = null;
      off = described.off || [];
    }
    // Another model may have fewer layers and heads.
    const exists = (place) => place && isInside([place[0], Math.max(place[1], 0)]);
    if (!exists(hovered)) hovered = null;
    if (!exists(aim)) aim = null;
    off = off.filter(([layer, head]) => layer === "pool" || exists([layer, head + REDUCED]));
    draw();
  };
  return { node, update };
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
