const ARROWS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }; // steps by row and column
const decoded = new WeakMap();

async function pixelsOf(view) {
  if (!decoded.has(view)) {
    const plain = { colorSpaceConversion: "none", premultiplyAlpha: "none" };
    const bitmap = await createImageBitmap(new Blob([bytesOf(view)], { type: "image/png" }), plain);
    const canvas = make("canvas", { width: bitmap.width, height: bitmap.height });
    const context = canvas.getContext("2d", { willReadFrequently: true });
    context.drawImage(bitmap, 0, 0);
    decoded.set(view, context.getImageData(0, 0, bitmap.width, bitmap.height));
  }
  return decoded.get(view);
}

// For each of `length` pixels over `count` cells: the offsets of the two neighboring cells, `size` apart, and the weight
// of the second.
function between(length, count, size, smooth) {
  const [first, next, weight] = [new Int32Array(length), new Int32Array(length), new Float64Array(length)];
  for (let pixel = 0; pixel < length; pixel += 1) {
    const middle = ((pixel + 0.5) * count) / length;
    const place = smooth ? Math.min(Math.max(middle - 0.5, 0), count - 1) : middle;
    const cell = Math.floor(place);
    first[pixel] = cell * size;
    next[pixel] = Math.min(cell + 1, count - 1) * size;
    weight[pixel] = smooth ? place - cell : 0;
  }
  return [first, next, weight];
}

// A map over the gray image, as in plot.overlay. One loop without closures, because it runs at every click.
function painted(base, panel) {
  const { width, height, data } = base;
  const result = new ImageData(width, height);
  const out = result.data;
  const { rows, cols, strength, scale, smooth } = panel;
  out.set(data);
  if (!strength) return result;
  if (!base.gray) {
    base.gray = new Uint8Array(width * height);
    for (let p = 0, i = 0; i < data.length; p += 1, i += 4)
      base.gray[p] = (data[i] * 19595 + data[i + 1] * 38470 + data[i + 2] * 7471 + 32768) >> 16;
  }
  const gray = base.gray;
  for (let p = 0, i = 0; i < out.length; p += 1, i += 4) out[i] = out[i + 1] = out[i + 2] = gray[p];
  const values = floatsOf(panel.values);
  if (panel.hides) for (const [row, col] of panel.sinks) values[row * cols + col] = Math.max(scale.low, 0);
  const channels = values.length / (rows * cols);
  const table = scale && bytesOf(scale.colors); // red, green, blue and opacity
  const [low, range] = scale ? [scale.low, scale.high - scale.low || 1] : [0, 1];
  const [left, right, beside] = between(Math.round(cols * panel.cell[1] * width), cols, channels, smooth);
  const [top, bottom, below] = between(Math.round(rows * panel.cell[0] * height), rows, cols * channels, smooth);
  const [w, h] = [Math.min(width, left.length), Math.min(height, top.length)];
  for (let y = 0; y < h; y += 1) {
    const [t, b, v] = [top[y], bottom[y], below[y]];
    for (let x = 0, i = 4 * y * width; x < w; x += 1, i += 4) {
      const [l, r, u] = [left[x], right[x], beside[x]];
      if (table) {
        const upper = values[t + l] * (1 - u) + values[t + r] * u;
        const lower = values[b + l] * (1 - u) + values[b + r] * u;
        const place = Math.min(255, Math.max(0, ((upper * (1 - v) + lower * v - low) / range) * 255));
        const color = Math.floor(place);
        const part = place - color;
        const rest = 1 - place + color;
        const [k, n] = [4 * color, 4 * Math.min(color + 1, 255)];
        const opacity = (table[k + 3] * rest + table[n + 3] * part) / 255;
        const photo = gray[i >> 2] * (1 - opacity);
        out[i] = photo + (table[k] * rest + table[n] * part) * opacity;
        out[i + 1] = photo + (table[k + 1] * rest + table[n + 1] * part) * opacity;
        out[i + 2] = photo + (table[k + 2] * rest + table[n + 2] * part) * opacity;
      } else
        for (let c = 0; c < channels; c += 1) {
          const upper = values[t + l + c] * (1 - u) + values[t + r + c] * u;
          const lower = values[b + l + c] * (1 - u) + values[b + r + c] * u;
          out[i + c] = gray[i >> 2] * (1 - strength) + (upper * (1 - v) + lower * v) * 255 * strength;
        }
    }
  }
  return result;
}

// Lines between the cells [height, width] of a grid, as shares of the image.
function gridLines(rows, cols, [height, width]) {
  const across = Array.from({ length: rows + 1 }, (_, r) => `M0 ${r * height}H${cols * width}`);
  const down = Array.from({ length: cols + 1 }, (_, c) => `M${c * width} 0V${rows * height}`);
  return make("path", { class: "grid", d: [...across, ...down].join("") });
}

function panelOf(name, send) {
  const title = make("h3");
  const canvas = make("canvas", { role: "img" });
  const marks = make("svg", { viewBox: "0 0 1 1", preserveAspectRatio: "none", "aria-hidden": "true" });
  const picture = make("div", { class: "picture", tabindex: 0, role: "application" }, canvas, marks);
  const under = make("p", { class: "under", "aria-live": "off" });
  const tokens = make("div", { class: "tokens", role: "group", "aria-label": "Look from a token outside the photo" });
  const gradient = make("canvas", { width: 256, height: 1 });
  const ends = [make("span"), make("span")];
  const unit = make("span", { class: "unit" });
  const legend = make("div", { class: "legend", "aria-hidden": "true" }, ends[0], gradient, ends[1], unit);
  const words = make("figcaption", { "aria-live": "polite" });
  const node = make("figure", { class: "panel", "data-panel": name }, title, picture, make("div", { class: "beneath" }, under, tokens), legend, words);
  let panel, values, hovered, asked, base;
  let looking = null; // map from the patch under the pointer
  let pressed = false; // pointer is down on this image
  let aim = null; // picked cell without an answer yet
  let wanted = 0;

  const cell = (event) => {
    if (!panel) return null;
    const box = canvas.getBoundingClientRect();
    const row = Math.floor((event.clientY - box.top) / box.height / panel.cell[0]);
    const col = Math.floor((event.clientX - box.left) / box.width / panel.cell[1]);
    return row >= 0 && row < panel.rows && col >= 0 && col < panel.cols ? [row, col] : null;
  };
  const tell = () => {
    const place = panel && (hovered || panel.selected);
    if (!place) return (under.textContent = "\u00a0");
    if (looking) return (under.textContent = `From row ${looking.selected.join(", column ")}. Click to stay here.`);
    const [row, col] = place;
    const channels = values.length / (panel.rows * panel.cols);
    const found = Array.from({ length: channels }, (_, k) => shown(values[(row * panel.cols + col) * channels + k]));
    under.textContent = `${panel.axes[0]} ${row}, ${panel.axes[1]} ${col}` + (channels ? `: ${found.join(", ")}${panel.unit ? ` ${panel.unit}` : ""}` : "");
  };
  const tileOf = ({ query, name, share, now }) => {
    const title = `Look from ${name.replace(/^(?!the )/, "the ")}`;
    const tile = { type: "button", class: "token", title, "aria-pressed": String(now), onclick: () => send({ set: { query } }) };
    return make("button", tile, name, make("b", {}, share));
  };
  const mark = () => {
    const [height, width] = panel.cell;
    const { selected } = looking || panel;
    marks.replaceChildren();
    if (panel.lines) marks.append(gridLines(panel.rows, panel.cols, panel.cell));
    for (const [row, col] of panel.sinks || []) marks.append(make("rect", { class: "sink", x: col * width, y: row * height, width, height }));
    if (selected) {
      const [row, col] = selected;
      const place = { x: col * width, y: row * height, width, height };
      marks.append(make("rect", { class: "rim", ...place }), make("rect", { class: "frame", ...place }));
    }
  };
  const pick = (place) => {
    if (!place || !panel.picks || same(place, asked)) return;
    asked = aim = place;
    panel = { ...panel, selected: place }; // before the answer
    mark();
    tell();
    send({ pick: name, row: place[0], col: place[1] });
  };
  picture.addEventListener("pointerdown", (event) => {
    asked = null;
    pressed = event.button === 0;
    if (pressed) pick(cell(event));
  });
  picture.addEventListener("pointermove", (event) => {
    hovered = cell(event);
    pressed = pressed && event.buttons === 1;
    if (pressed) pick(hovered);
    tell();
  });
  picture.addEventListener("pointerleave", () => {
    hovered = null;
    tell();
  });
  picture.addEventListener("keydown", (event) => {
    const step = ARROWS[event.key];
    if (!step || !panel || !panel.picks) return;
    event.preventDefault();
    asked = hovered = null;
    const [row, col] = panel.selected || [Math.floor(panel.rows / 2), Math.floor(panel.cols / 2)];
    const moved = panel.selected ? [row + step[0], col + step[1]] : [row, col];
    pick([Math.min(Math.max(moved[0], 0), panel.rows - 1), Math.min(Math.max(moved[1], 0), panel.cols - 1)]);
  });

  const paint = ({ ends: texts, scale, ...next }) => {
    canvas.getContext("2d", { willReadFrequently: true }).putImageData(painted(base, { scale, ...next }), 0, 0);
    legend.hidden = !texts;
    if (texts) {
      const strip = new ImageData(new Uint8ClampedArray(bytesOf(scale.colors)), 256, 1);
      gradient.getContext("2d").putImageData(strip, 0, 0);
      texts.forEach((text, i) => (ends[i].textContent = text));
      unit.textContent = next.legend || next.unit || "";
    }
    mark();
    tell();
  };
  // Shows another map of the same image, without its caption. null: the map of the last frame again.
  const peek = (other) => {
    if (!base || !(other || looking)) return;
    looking = other && { ...panel, ...other };
    paint(looking || panel);
  };

  const update = async (next, pictures, waiting) => {
    const turn = (wanted += 1);
    const decoded = await pixelsOf(pictures[next.picture]);
    if (turn !== wanted) return;
    [base, looking] = [decoded, null];
    const inside = (place) => place && place[0] < next.rows && place[1] < next.cols;
    if (!waiting() || !inside(aim)) aim = null;
    if (!inside(hovered)) hovered = null; // the pointer may be outside the new grid
    panel = aim ? { ...next, selected: aim } : next; // keep a later pick than the answered one
    asked = null;
    values = floatsOf(panel.values);
    [canvas.width, canvas.height] = [base.width, base.height];
    node.style.setProperty("--shape", base.width / base.height);
    node.classList.toggle("wide", base.width > 1.8 * base.height);
    title.textContent = panel.title;
    words.textContent = panel.words;
    canvas.setAttribute("aria-label", `${panel.title}. ${panel.words}`);
    const how = panel.picks ? `Click, or use the arrow keys, to choose ${panel.picks}.` : "";
    picture.setAttribute("aria-label", `${panel.title}. ${how}`);
    picture.title = how;
    picture.classList.toggle("picks", Boolean(panel.picks));
    if (!same(tokens.told, panel.tokens)) {
      const held = [...tokens.children].indexOf(document.activeElement);
      tokens.told = panel.tokens;
      tokens.replaceChildren(...panel.tokens.map(tileOf));
      tokens.children[held]?.focus();
    }
    paint(panel);
  };
  return { node, update, peek, cell: () => hovered, panel: () => panel };
}

const reduced = new WeakMap();

// A smaller copy of a photo, for small maps over it.
async function smallOf(view, side) {
  if (!reduced.has(view)) {
    const base = await pixelsOf(view);
    const scale = side / Math.max(base.width, base.height);
    const [from, to] = [[base.width, base.height], [base.width * scale, base.height * scale]].map(([width, height]) => make("canvas", { width: Math.round(width), height: Math.round(height) }));
    from.getContext("2d").putImageData(new ImageData(base.data, base.width, base.height), 0, 0);
    const context = to.getContext("2d", { willReadFrequently: true });
    context.drawImage(from, 0, 0, to.width, to.height);
    reduced.set(view, context.getImageData(0, 0, to.width, to.height));
  }
  return reduced.get(view);
}

// Small maps side by side, each with its score. A click enlarges one.
function sixOf(send) {
  const title = make("h3");
  const list = make("div", { class: "maps" });
  const node = make("section", { class: "six" }, title, list);
  const update = async (described, pictures) => {
    node.hidden = !described;
    if (!described) return;
    const base = await smallOf(pictures[described.picture], 180);
    title.textContent = described.title;
    while (list.children.length < described.tiles.length) {
      const [canvas, name, words] = [make("canvas", { "aria-hidden": "true" }), make("span", { class: "name" }), make("b")];
      list.append(Object.assign(make("button", { type: "button", class: "map" }, canvas, name, words), { canvas, name_: name, words }));
    }
    while (list.children.length > described.tiles.length) list.lastChild.remove();
    described.tiles.forEach((tile, k) => {
      const button = list.children[k];
      [button.canvas.width, button.canvas.height] = [base.width, base.height];
      const panel = tile.values ? tile : { ...tile, strength: 0 };
      button.canvas.getContext("2d").putImageData(painted(base, panel), 0, 0);
      button.name_.textContent = tile.title;
      button.words.textContent = tile.failed ? "–" : tile.words || "…";
      button.title = tile.failed || tile.title;
      button.classList.toggle("coming", !tile.values);
      button.setAttribute("aria-pressed", String(tile.now));
      button.onclick = () => send({ set: { view: tile.view } });
    });
  };
  return { node, update };
}
