const decoded = new WeakMap();

// Levels of an image in a size, by default its own.
function levelsOf(image, width = image.width, height = image.height) {
  const context = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
  context.drawImage(image, 0, 0, width, height);
  return context.getImageData(0, 0, width, height);
}

// {whole, small: of at most 180 pixels a side} levels of a photo.
async function pixelsOf(view) {
  if (!decoded.has(view)) {
    const plain = { colorSpaceConversion: "none", premultiplyAlpha: "none" };
    const image = await createImageBitmap(new Blob([bytesOf(view)], { type: "image/png" }), plain);
    const scale = 180 / Math.max(image.width, image.height);
    const reduced = [image.width, image.height].map((side) => Math.round(side * scale));
    decoded.set(view, { whole: levelsOf(image), small: levelsOf(image, ...reduced) });
  }
  return decoded.get(view);
}

// For each of `length` pixels over `count` cells: the offsets of the two neighboring cells, `size` apart, and the
// weight of the second.
function between(length, count, size, smooth) {
  const middles = Float64Array.from({ length }, (_, pixel) => ((pixel + 0.5) * count) / length);
  const places = middles.map((place) =>
    smooth ? Math.min(Math.max(place - 0.5, 0), count - 1) : place,
  );
  const first = Int32Array.from(places, (place) => Math.floor(place) * size);
  const next = first.map((cell) => Math.min(cell + size, (count - 1) * size));
  return [first, next, places.map((place) => (smooth ? place % 1 : 0))];
}

// A map over the gray image, as in plot.overlay, valid until the next one over this image. One loop without closures,
// because it runs at every click.
function painted(base, panel) {
  const { width, height, data } = base;
  const { rows, cols, strength, scale, smooth } = panel;
  if (!strength) return base;
  if (!base.gray) {
    base.over = new ImageData(width, height);
    base.gray = new Uint32Array(width * height);
    for (let p = 0, i = 0; i < data.length; p += 1, i += 4) {
      const level = (data[i] * 19595 + data[i + 1] * 38470 + data[i + 2] * 7471 + 32768) >> 16;
      base.gray[p] = (data[i + 3] << 24) | (0x010101 * level);
    }
  }
  const [gray, out] = [base.gray, new Uint32Array(base.over.data.buffer)];
  out.set(gray);
  const values = floatsOf(panel.values);
  if (panel.hides)
    for (const [row, col] of panel.sinks) values[row * cols + col] = Math.max(scale.low, 0);
  const channels = values.length / (rows * cols);
  const table = scale && Float64Array.from(bytesOf(scale.colors)); // red, green, blue and opacity
  const steps = table?.map((value, i) => (table[i + 4] ?? value) - value);
  const [low, range] = scale ? [scale.low, scale.high - scale.low || 1] : [0, 1];
  const [left, right, beside] = between(
    Math.round(cols * panel.cell[1] * width),
    cols,
    channels,
    smooth,
  );
  const [top, bottom, below] = between(
    Math.round(rows * panel.cell[0] * height),
    rows,
    cols * channels,
    smooth,
  );
  const [w, h] = [Math.min(width, left.length), Math.min(height, top.length)];
  const line = new Float64Array(cols * channels); // the values at the height of a pixel
  for (let y = 0; y < h; y += 1) {
    const [t, b, v] = [top[y], bottom[y], below[y]];
    for (let i = 0; i < line.length; i += 1)
      line[i] = ((values[t + i] * (1 - v) + values[b + i] * v - low) / range) * 255;
    for (let x = 0, p = y * width; x < w; x += 1, p += 1) {
      const [l, r, u] = [left[x], right[x], beside[x]];
      let [red, green, blue, opacity] = [line[l] + (line[r] - line[l]) * u, 0, 0, strength];
      if (table) {
        const place = red > 255 ? 255 : red > 0 ? red : 0;
        const k = 4 * (place | 0);
        const part = place - (place | 0);
        red = table[k] + steps[k] * part;
        green = table[k + 1] + steps[k + 1] * part;
        blue = table[k + 2] + steps[k + 2] * part;
        opacity = (table[k + 3] + steps[k + 3] * part) / 255;
      } else {
        green = line[l + 1] + (line[r + 1] - line[l + 1]) * u;
        blue = line[l + 2] + (line[r + 2] - line[l + 2]) * u;
      }
      const photo = (gray[p] & 255) * (1 - opacity) + 0.5;
      const [high, middle] = [(blue * opacity + photo) << 16, (green * opacity + photo) << 8];
      out[p] = (gray[p] & 0xff000000) | high | middle | (red * opacity + photo);
    }
  }
  return base.over;
}

// Draws a photo with some patches of a panel filled with a color. The last row and column include the margins.
function cover(canvas, base, { rows, cols, cell: [height, width] }, patches, fill) {
  const context = put(canvas, base).getContext("2d");
  context.fillStyle = `rgb(${fill})`;
  const [w, h] = [width * base.width, height * base.height];
  for (const patch of patches) {
    const [row, col] = [Math.floor(patch / cols), patch % cols];
    context.fillRect(
      col * w,
      row * h,
      col === cols - 1 ? base.width : w,
      row === rows - 1 ? base.height : h,
    );
  }
}

// Lines between the cells [height, width] of a grid, as shares of the image.
function gridLines({ rows, cols, cell: [height, width], lines = true }) {
  const across = Array.from({ length: rows + 1 }, (_, r) => `M0 ${r * height}H${cols * width}`);
  const down = Array.from({ length: cols + 1 }, (_, c) => `M${c * width} 0V${rows * height}`);
  return make("path", { class: `grid ${lines ? "" : "faint"}`, d: [...across, ...down].join("") });
}

function panelOf(name, send) {
  const title = make("h3");
  const canvas = make("canvas", { role: "img" });
  const marks = make("svg", {
    viewBox: "0 0 1 1",
    preserveAspectRatio: "none",
    "aria-hidden": "true",
  });
  const picture = steered(
    { class: "picture" },
    (...step) => (panel?.picks ? move(step) : false),
    canvas,
    marks,
  );
  const under = make("p", { class: "under", "aria-live": "off" });
  const tokens = make("div", {
    class: "tokens",
    role: "group",
    "aria-label": "Look from a token outside the photo",
  });
  const beneath = make("div", { class: "beneath" }, under, tokens);
  const gradient = make("canvas");
  const [least, most, unit] = [make("span"), make("span"), make("span", { class: "unit" })];
  const legend = make(
    "div",
    { class: "legend", "aria-hidden": "true" },
    least,
    gradient,
    most,
    unit,
  );
  const words = make("figcaption", { "aria-live": "polite" });
  const node = make(
    "figure",
    { class: "panel", "data-panel": name },
    title,
    picture,
    beneath,
    legend,
    words,
  );
  let panel, values, hovered, asked, base;
  let looking = null; // map from the patch under the pointer
  let pressed = false; // pointer is down on this image
  let aim = null; // picked cell without an answer yet
  let wanted = 0;

  const inside = (place) => place?.every((at, i) => at >= 0 && at < [panel.rows, panel.cols][i]);
  const cell = (event) => {
    const place = panel && cellUnder(event, canvas, panel.cell);
    return inside(place) ? place : null;
  };
  const tell = () => {
    const place = panel && (hovered || panel.selected);
    if (!place) return (under.textContent = "\u00a0");
    if (looking)
      return (under.textContent = `From row ${looking.selected.join(", column ")}. Click to stay here.`);
    const channels = values.length / (panel.rows * panel.cols);
    const at = (place[0] * panel.cols + place[1]) * channels;
    const found = [...values.subarray(at, at + channels)].map(shown).join(", ");
    const where = `row ${place.join(", column ")}`;
    under.textContent = channels ? `${where}: ${found} ${panel.unit}`.trim() : where;
  };
  const tileOf = ({ query, name, share, now }) => {
    const title = `Look from ${name.replace(/^(?!the )/, "the ")}`;
    const tile = button(name, () => send({ set: { query } }), { class: "token", title });
    tile.append(make("b", {}, share));
    press(tile, now);
    return tile;
  };
  const mark = () => {
    const [height, width] = panel.cell;
    const { selected } = looking || panel;
    const boxOf = ([row, col]) => ({ x: col * width, y: row * height, width, height });
    const sinks = panel.sinks.map((place) => make("rect", { class: "sink", ...boxOf(place) }));
    marks.replaceChildren(gridLines(panel), ...sinks, ...(selected ? framed(boxOf(selected)) : []));
  };
  const pick = (place) => {
    if (!place || !panel.picks || same(place, asked)) return;
    asked = aim = place;
    panel = { ...panel, selected: place }; // before the answer
    mark();
    tell();
    send({ pick: name, row: place[0], col: place[1] });
  };
  const hover = (place) => {
    hovered = place;
    tell();
  };
  picture.addEventListener("pointerdown", (event) => {
    asked = null;
    pressed = event.button === 0;
    if (pressed) pick(cell(event));
  });
  picture.addEventListener("pointermove", (event) => {
    pressed = pressed && event.buttons === 1;
    if (pressed) pick(cell(event));
    hover(cell(event));
  });
  picture.addEventListener("pointerleave", () => hover(null));
  const move = (step) => {
    asked = hovered = null;
    const ends = [panel.rows - 1, panel.cols - 1];
    const moved = panel.selected?.map((at, i) => Math.min(Math.max(at + step[i], 0), ends[i]));
    pick(moved || ends.map((end) => Math.ceil(end / 2)));
  };

  const paint = ({ ends, scale, ...next }) => {
    put(canvas, painted(base, { scale, ...next }));
    legend.hidden = !ends;
    if (ends) {
      put(gradient, new ImageData(new Uint8ClampedArray(bytesOf(scale.colors)), 256, 1));
      [least.textContent, most.textContent] = ends;
      unit.textContent = next.legend || next.unit;
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

  // Shows the photo with these patches covered, and a line about it. null: the map of the last frame again.
  const reveal = (patches, fill, line) => {
    if (!patches) return paint(panel);
    cover(canvas, base, panel, patches, fill);
    marks.replaceChildren();
    under.textContent = line;
  };

  const update = async (next, pictures, waiting) => {
    const turn = (wanted += 1);
    const { whole } = await pixelsOf(pictures[next.picture]);
    if (turn !== wanted) return;
    [panel, base, looking, asked] = [next, whole, null, null];
    if (!waiting() || !inside(aim)) aim = null;
    if (!inside(hovered)) hovered = null; // the pointer may be outside the new grid
    if (aim) panel = { ...next, selected: aim }; // keep a later pick than the answered one
    values = floatsOf(panel.values);
    node.style.setProperty("--shape", base.width / base.height);
    node.classList.toggle("wide", base.width > 1.8 * base.height);
    title.textContent = panel.title;
    words.textContent = panel.words;
    canvas.setAttribute("aria-label", `${panel.title}. ${panel.words}`);
    const how = panel.picks ? `Click, or use the arrow keys, to choose ${panel.picks}.` : "";
    picture.setAttribute("aria-label", `${panel.title}. ${how}`);
    picture.title = how;
    picture.classList.toggle("picks", Boolean(panel.picks));
    renew(tokens, panel.tokens, (tiles) => tiles.map(tileOf));
    paint(panel);
  };
  return { node, update, peek, reveal, cell: () => hovered, panel: () => panel };
}

// Small maps side by side, each with its score. A click enlarges one.
function sixOf(send) {
  const title = make("h3");
  const list = make("div", { class: "maps" });
  const node = make("section", { class: "six" }, title, list);
  const fresh = () => {
    const parts = [
      make("canvas", { "aria-hidden": "true" }),
      make("span", { class: "name" }),
      make("b"),
    ];
    return make("button", { type: "button", class: "map" }, ...parts);
  };
  const update = async (described, pictures) => {
    node.hidden = !described;
    if (!described) return;
    const { small: base } = await pixelsOf(pictures[described.picture]);
    const { tiles } = described;
    title.textContent = described.title;
    while (list.children.length < tiles.length) list.append(fresh());
    while (list.children.length > tiles.length) list.lastChild.remove();
    tiles.forEach((tile, k) => {
      const node = list.children[k];
      const [canvas, name, words] = node.children;
      put(canvas, painted(base, tile.values ? tile : { ...tile, strength: 0 }));
      name.textContent = tile.title;
      words.textContent = tile.failed ? "–" : tile.words || "…";
      node.title = tile.failed || tile.title;
      node.classList.toggle("coming", !tile.values);
      press(node, tile.now);
      node.onclick = () => send({ set: { view: tile.view } });
    });
  };
  return { node, update };
}
