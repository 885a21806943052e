import { makeCaption } from "./caption.js";
import {
  cellUnder,
  make,
  makeButton,
  makeFrame,
  makeSteered,
  putImage,
  renew,
  setPressed,
} from "./elements.js";
import { bytesOf, floatsOf, formatNumber, formatPercent, isEqual } from "./values.js";

const SMALL = 180; // largest side of the photo in small maps, in pixels
const WIDE = 1.8; // shape of photos whose panel takes the whole width
const LEVELS = 256; // entries of a color table

const decodedPhotos = new WeakMap();

// Levels of an image in a size, by default its own.
function readLevels(image, width = image.width, height = image.height) {
  const context = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
  context.drawImage(image, 0, 0, width, height);
  return context.getImageData(0, 0, width, height);
}

// {whole, small} levels of a photo.
export async function readPixels(view) {
  if (!decodedPhotos.has(view)) {
    const plain = { colorSpaceConversion: "none", premultiplyAlpha: "none" };
    const image = await createImageBitmap(new Blob([bytesOf(view)], { type: "image/png" }), plain);
    const scale = SMALL / Math.max(image.width, image.height);
    const width = Math.round(image.width * scale);
    const height = Math.round(image.height * scale);
    const levels = { whole: readLevels(image), small: readLevels(image, width, height) };
    decodedPhotos.set(view, levels);
  }
  return decodedPhotos.get(view);
}

// For each of `length` pixels over `count` cells: the offsets of the two neighboring cells, `size` apart, and the
// weight of the second.
function interpolate(length, count, size, smooth) {
  const first = new Int32Array(length);
  const next = new Int32Array(length);
  const weights = new Float64Array(length);
  const last = count - 1;
  for (let pixel = 0; pixel < length; pixel += 1) {
    const middle = ((pixel + 0.5) * count) / length;
    const place = smooth ? Math.min(Math.max(middle - 0.5, 0), last) : middle;
    first[pixel] = Math.floor(place) * size;
    next[pixel] = Math.min(first[pixel] + size, last * size);
    weights[pixel] = smooth ? place % 1 : 0;
  }
  return [first, next, weights];
}

// Makes the gray pixels of an image, and an image for the maps over it.
function addGray(base) {
  const { width, height, data } = base;
  base.over = new ImageData(width, height);
  base.gray = new Uint32Array(width * height);
  let i = 0;
  for (let p = 0; p < base.gray.length; p += 1) {
    const level = (data[i] * 19595 + data[i + 1] * 38470 + data[i + 2] * 7471 + 32768) >> 16;
    base.gray[p] = (data[i + 3] << 24) | (0x010101 * level);
    i += 4;
  }
}

// A map over the gray image, as in plot.overlay, valid until the next one over this image. One loop without closures,
// because it runs at every click.
export function paintMap(base, panel) {
  const { width, height } = base;
  const { rows, cols, strength, scale, smooth } = panel;
  if (!strength) return base;
  if (!base.gray) addGray(base);
  const gray = base.gray;
  const out = new Uint32Array(base.over.data.buffer);
  out.set(gray);
  const values = floatsOf(panel.values);
  if ((scale?.uniform ?? null) !== null) values.fill(scale.uniform);
  if (panel.hides) {
    for (const [row, col] of panel.sinks) values[row * cols + col] = Math.max(scale.low, 0);
  }
  const channels = values.length / (rows * cols);
  const table = scale && Float64Array.from(bytesOf(scale.colors)); // red, green, blue and opacity
  const steps = table?.map((value, i) => (table[i + 4] ?? value) - value); // to the next entry
  const low = scale ? scale.low : 0;
  const range = scale ? scale.high - scale.low || 1 : 1;
  const across = Math.round(cols * panel.cell[1] * width); // pixels of the map
  const down = Math.round(rows * panel.cell[0] * height);
  const [left, right, beside] = interpolate(across, cols, channels, smooth);
  const [top, bottom, below] = interpolate(down, rows, cols * channels, smooth);
  const w = Math.min(width, across);
  const h = Math.min(height, down);
  const line = new Float64Array(cols * channels); // the values at the height of a pixel
  for (let y = 0; y < h; y += 1) {
    const t = top[y];
    const b = bottom[y];
    const v = below[y];
    for (let i = 0; i < line.length; i += 1) {
      line[i] = ((values[t + i] * (1 - v) + values[b + i] * v - low) / range) * 255;
    }
    let p = y * width;
    for (let x = 0; x < w; x += 1) {
      const l = left[x];
      const r = right[x];
      const u = beside[x];
      let red = line[l] + (line[r] - line[l]) * u;
      let green = 0;
      let blue = 0;
      let opacity = strength;
      if (table) {
        let place = red > 0 ? red : 0;
        if (place > 255) place = 255;
        const entry = place | 0;
        const part = place - entry;
        const k = 4 * entry;
        red = table[k] + steps[k] * part;
        green = table[k + 1] + steps[k + 1] * part;
        blue = table[k + 2] + steps[k + 2] * part;
        opacity = (table[k + 3] + steps[k + 3] * part) / 255;
      } else {
        green = line[l + 1] + (line[r + 1] - line[l + 1]) * u;
        blue = line[l + 2] + (line[r + 2] - line[l + 2]) * u;
      }
      const photo = (gray[p] & 255) * (1 - opacity) + 0.5;
      const third = (blue * opacity + photo) << 16;
      const second = (green * opacity + photo) << 8;
      const first = red * opacity + photo;
      out[p] = (gray[p] & 0xff000000) | third | second | first;
      p += 1;
    }
  }
  return base.over;
}

// Draws a photo with some patches of a panel filled with a color. The last row and column include the margins.
export function coverPatches(canvas, base, { rows, cols, cell }, patches, fill) {
  const context = putImage(canvas, base).getContext("2d");
  context.fillStyle = `rgb(${fill})`;
  const height = cell[0] * base.height;
  const width = cell[1] * base.width;
  for (const patch of patches) {
    const row = Math.floor(patch / cols);
    const col = patch % cols;
    const across = col === cols - 1 ? base.width : width;
    const down = row === rows - 1 ? base.height : height;
    context.fillRect(col * width, row * height, across, down);
  }
}

// Lines between the cells [height, width] of a grid, as shares of the image.
export function makeGrid({ rows, cols, cell: [height, width], lines = true }) {
  const across = Array.from({ length: rows + 1 }, (_, r) => `M0 ${r * height}H${cols * width}`);
  const down = Array.from({ length: cols + 1 }, (_, c) => `M${c * width} 0V${rows * height}`);
  return make("path", { class: `grid ${lines ? "" : "faint"}`, d: [...across, ...down].join("") });
}

// A token outside the photo, as a button that makes it the query.
function makeToken({ query, name, share, now }, send) {
  const title = `Look from ${name.replace(/^(?!the )/, "the ")}`;
  const token = makeButton(name, () => send({ set: { query } }), { class: "token", title });
  token.append(" ", make("b", {}, share));
  setPressed(token, now);
  return token;
}

// A photo with its map, tokens, legend and caption. Returns functions for the page: `cell` is the [row, col] under the
// pointer, and `panel` what the frame describes.
export function makePanel(name, send) {
  let panel; // what the frame describes
  let values; // of its map
  let base; // levels of its photo
  let hovered = null; // cell under the pointer
  let asked = null; // cell that the pointer has picked since it is down
  let looking = null; // map from the patch under the pointer
  let pressed = false; // pointer is down on this image
  let aim = null; // picked cell without an answer yet
  let updates = 0;

  const isInside = (place) => {
    if (!place) return false;
    const [row, col] = place;
    return row >= 0 && row < panel.rows && col >= 0 && col < panel.cols;
  };
  const findCell = (event) => {
    if (!panel) return null;
    const place = cellUnder(event, canvas, panel.cell);
    return isInside(place) ? place : null;
  };
  // The line under the photo.
  const describeCell = () => {
    const place = panel && (hovered || panel.selected);
    if (!place) return "\u00a0";
    if (looking) return `From row ${looking.selected.join(", column ")}. Click to stay here.`;
    const where = `row ${place.join(", column ")}`;
    const channels = values.length / (panel.rows * panel.cols);
    if (!channels) return where;
    const at = (place[0] * panel.cols + place[1]) * channels;
    if (panel.even) {
      const share = formatPercent(values[at]);
      return `${where}: ${share} of the attention (even: ${formatPercent(panel.even)})`;
    }
    const numbers = [...values.subarray(at, at + channels)].map(formatNumber).join(", ");
    return `${where}: ${numbers} ${panel.unit}`.trim();
  };
  const writeLine = () => {
    under.textContent = describeCell();
  };
  const drawMarks = () => {
    const [height, width] = panel.cell;
    const { selected } = looking || panel;
    const boxOf = ([row, col]) => ({ x: col * width, y: row * height, width, height });
    const sinks = panel.sinks.map((place) => make("rect", { class: "sink", ...boxOf(place) }));
    const frame = selected ? makeFrame(boxOf(selected)) : [];
    marks.replaceChildren(makeGrid(panel), ...sinks, ...frame);
  };
  const pick = (place) => {
    if (!place || !panel.picks || isEqual(place, asked)) return;
    asked = place;
    aim = place;
    panel = { ...panel, selected: place }; // before the answer
    drawMarks();
    writeLine();
    send({ pick: name, row: place[0], col: place[1] });
  };
  const hover = (place) => {
    hovered = place;
    writeLine();
  };
  const move = (...step) => {
    if (!panel?.picks) return false;
    asked = null;
    hovered = null;
    const ends = [panel.rows - 1, panel.cols - 1];
    const moved = panel.selected?.map((at, i) => Math.min(Math.max(at + step[i], 0), ends[i]));
    pick(moved || ends.map((end) => Math.ceil(end / 2)));
    return true;
  };

  const title = make("h3");
  const canvas = make("canvas", { role: "img" });
  const marks = make("svg", {
    viewBox: "0 0 1 1",
    preserveAspectRatio: "none",
    "aria-hidden": "true",
  });
  const picture = makeSteered({ class: "picture" }, move, canvas, marks);
  const under = make("p", { class: "under", "aria-live": "off" });
  const tokens = make("div", {
    class: "tokens",
    role: "group",
    "aria-label": "Look from a token outside the photo",
  });
  const beneath = make("div", { class: "beneath" }, under, tokens);
  const gradient = make("canvas");
  const least = make("span");
  const most = make("span");
  const unit = make("span", { class: "unit" });
  const hidden = { "aria-hidden": "true" };
  const legend = make("div", { class: "legend", ...hidden }, least, gradient, most, unit);
  const caption = makeCaption("figcaption");
  const parts = [title, picture, beneath, legend, caption.node];
  const node = make("figure", { class: "panel", "data-panel": name }, ...parts);

  picture.addEventListener("pointerdown", (event) => {
    asked = null;
    pressed = event.button === 0;
    if (pressed) pick(findCell(event));
  });
  picture.addEventListener("pointermove", (event) => {
    pressed = pressed && event.buttons === 1;
    if (pressed) pick(findCell(event));
    hover(findCell(event));
  });
  picture.addEventListener("pointerleave", () => hover(null));

  const paint = (described) => {
    const { ends, scale } = described;
    putImage(canvas, paintMap(base, described));
    legend.hidden = !ends;
    if (ends) {
      const colors = new Uint8ClampedArray(bytesOf(scale.colors));
      putImage(gradient, new ImageData(colors, LEVELS, 1));
      least.textContent = ends[0];
      most.textContent = ends[1];
      unit.textContent = described.legend || described.unit;
    }
    drawMarks();
    writeLine();
  };
  // Shows another map of the same image. null: the map of the last frame again.
  const peek = (other) => {
    if (!base || !(other || looking)) return;
    looking = other && { ...panel, ...other };
    node.classList.toggle("peeking", Boolean(looking));
    caption.node.ariaLive = looking ? "off" : "polite"; // it follows the pointer
    caption.show(looking || panel);
    paint(looking || panel);
  };
  // Shows the photo with these patches covered, and a line about it. null: the map of the last frame again.
  const reveal = (patches, fill, line) => {
    if (!patches) {
      paint(panel);
      return;
    }
    coverPatches(canvas, base, panel, patches, fill);
    marks.replaceChildren();
    under.textContent = line;
  };

  const update = async (next, pictures, isWaiting) => {
    updates += 1;
    const own = updates;
    const { whole } = await readPixels(pictures[next.picture]);
    if (own !== updates) return;
    panel = next;
    base = whole;
    looking = null;
    node.classList.remove("peeking");
    asked = null;
    if (!isWaiting() || !isInside(aim)) aim = null;
    if (!isInside(hovered)) hovered = null; // the pointer may be outside the new grid
    if (aim) panel = { ...next, selected: aim }; // keep a later pick than the answered one
    values = floatsOf(panel.values);
    node.style.setProperty("--shape", base.width / base.height);
    node.classList.toggle("wide", base.width > WIDE * base.height);
    title.textContent = panel.title;
    caption.show(panel);
    canvas.setAttribute("aria-label", `${panel.title}. ${panel.words}`);
    const how = panel.picks ? `Click, or use the arrow keys, to choose ${panel.picks}.` : "";
    picture.setAttribute("aria-label", `${panel.title}. ${how}`);
    picture.title = how;
    picture.classList.toggle("picks", Boolean(panel.picks));
    renew(tokens, panel.tokens, (described) => described.map((token) => makeToken(token, send)));
    paint(panel);
  };
  return { node, update, peek, reveal, cell: () => hovered, panel: () => panel };
}

// Small maps side by side, each with its score. A click enlarges one.
export function makeSix(send) {
  const title = make("h3");
  const list = make("div", { class: "maps" });
  const reason = make("p", { class: "note" });
  const node = make("section", { class: "six" }, title, reason, list);
  const makeTile = () => {
    const canvas = make("canvas", { "aria-hidden": "true" });
    const name = make("span", { class: "name" });
    const ends = make("span", { class: "ends" });
    return make("button", { type: "button", class: "map" }, canvas, name, make("b"), ends);
  };
  const showTile = (button, tile, base) => {
    const [canvas, name, words, ends] = button.children;
    putImage(canvas, paintMap(base, tile.values ? tile : { ...tile, strength: 0 }));
    name.textContent = tile.title;
    ends.textContent = tile.ends ? tile.ends.join(" to ") : "";
    const lacks = tile.values ? "not scored" : "no map";
    words.textContent = tile.failed ? lacks : tile.words || "…";
    button.title = tile.failed || tile.title;
    button.classList.toggle("coming", !tile.values);
    setPressed(button, tile.now);
    button.onclick = () => send({ set: { view: tile.view } });
  };
  const update = async (described, pictures) => {
    node.hidden = !described;
    if (!described) return;
    const { small } = await readPixels(pictures[described.picture]);
    const { tiles } = described;
    title.textContent = described.title;
    // a reason that all of them share is written out, and others are in tooltips
    const shared = tiles[0]?.failed && tiles.every(({ failed }) => failed === tiles[0].failed);
    reason.hidden = !shared;
    reason.textContent = shared ? tiles[0].failed : "";
    while (list.children.length < tiles.length) list.append(makeTile());
    while (list.children.length > tiles.length) list.lastChild.remove();
    tiles.forEach((tile, k) => showTile(list.children[k], tile, small));
  };
  return { node, update };
}
