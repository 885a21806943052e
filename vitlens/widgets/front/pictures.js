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

// For each of `length` pixels over `count` cells: the two neighboring cells, and the weight of the second.
function between(length, count, smooth) {
  return Array.from({ length }, (_, pixel) => {
    const place = ((pixel + 0.5) * count) / length - (smooth ? 0.5 : 0);
    const clamped = Math.min(Math.max(place, 0), count - 1);
    const first = Math.floor(smooth ? clamped : Math.min(place, count - 1));
    return [first, Math.min(first + 1, count - 1), smooth ? clamped - first : 0];
  });
}

// A map over the gray image, as in plot.overlay.
function painted(base, panel) {
  const { width, height } = base;
  const result = new ImageData(new Uint8ClampedArray(base.data), width, height);
  const out = result.data;
  const { rows, cols, strength, scale } = panel;
  if (!strength) return result;
  for (let i = 0; i < out.length; i += 4)
    out[i] = out[i + 1] = out[i + 2] = (out[i] * 19595 + out[i + 1] * 38470 + out[i + 2] * 7471 + 32768) >> 16;
  const values = floatsOf(panel.values);
  const channels = values.length / (rows * cols);
  const table = scale && bytesOf(scale.colors); // red, green, blue and opacity
  const across = between(Math.round(cols * panel.cell[1] * width), cols, panel.smooth);
  const down = between(Math.round(rows * panel.cell[0] * height), rows, panel.smooth);
  const at = (row, col, channel) => values[(row * cols + col) * channels + channel];
  for (let y = 0; y < Math.min(height, down.length); y += 1) {
    const [top, bottom, v] = down[y];
    for (let x = 0; x < Math.min(width, across.length); x += 1) {
      const [left, right, h] = across[x];
      const pixel = 4 * (y * width + x);
      const value = (channel) => {
        const upper = at(top, left, channel) * (1 - h) + at(top, right, channel) * h;
        const lower = at(bottom, left, channel) * (1 - h) + at(bottom, right, channel) * h;
        return upper * (1 - v) + lower * v;
      };
      let color = (channel) => value(channel) * 255;
      let opacity = strength;
      if (table) {
        const place = Math.min(255, Math.max(0, ((value(0) - scale.low) / (scale.high - scale.low || 1)) * 255));
        const below = Math.floor(place);
        const next = Math.min(below + 1, 255);
        color = (channel) => table[4 * below + channel] * (1 - place + below) + table[4 * next + channel] * (place - below);
        opacity = color(3) / 255;
      }
      for (let channel = 0; channel < 3; channel += 1)
        out[pixel + channel] = out[pixel + channel] * (1 - opacity) + color(channel) * opacity;
    }
  }
  return result;
}

function panelOf(name, send) {
  const title = make("h3");
  const canvas = make("canvas", { role: "img" });
  const marks = make("svg", { viewBox: "0 0 1 1", preserveAspectRatio: "none", "aria-hidden": "true" });
  const picture = make("div", { class: "picture", tabindex: 0, role: "application" }, canvas, marks);
  const under = make("p", { class: "under", "aria-live": "off" });
  const gradient = make("canvas", { width: 256, height: 1 });
  const ends = [make("span"), make("span")];
  const unit = make("span", { class: "unit" });
  const legend = make("div", { class: "legend", "aria-hidden": "true" }, ends[0], gradient, ends[1], unit);
  const words = make("figcaption", { "aria-live": "polite" });
  const node = make("figure", { class: "panel", "data-panel": name }, title, picture, under, legend, words);
  let panel, values, hovered, asked;
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
    const [row, col] = place;
    const channels = values.length / (panel.rows * panel.cols);
    const found = Array.from({ length: channels }, (_, k) => shown(values[(row * panel.cols + col) * channels + k]));
    under.textContent = `${panel.axes[0]} ${row}, ${panel.axes[1]} ${col}` + (channels ? `: ${found.join(", ")}${panel.unit ? ` ${panel.unit}` : ""}` : "");
  };
  const mark = () => {
    const [height, width] = panel.cell;
    marks.replaceChildren();
    if (panel.lines) {
      const lines = [];
      for (let r = 0; r <= panel.rows; r += 1) lines.push(`M0 ${r * height}H${panel.cols * width}`);
      for (let c = 0; c <= panel.cols; c += 1) lines.push(`M${c * width} 0V${panel.rows * height}`);
      marks.append(make("path", { class: "grid", d: lines.join("") }));
    }
    if (panel.selected) {
      const [row, col] = panel.selected;
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
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step || !panel || !panel.picks) return;
    event.preventDefault();
    asked = hovered = null;
    const [row, col] = panel.selected || [Math.floor(panel.rows / 2), Math.floor(panel.cols / 2)];
    const moved = panel.selected ? [row + step[0], col + step[1]] : [row, col];
    pick([Math.min(Math.max(moved[0], 0), panel.rows - 1), Math.min(Math.max(moved[1], 0), panel.cols - 1)]);
  });

  const update = async (next, pictures, waiting) => {
    const turn = (wanted += 1);
    const base = await pixelsOf(pictures[next.picture]);
    if (turn !== wanted) return;
    const inside = (place) => place && place[0] < next.rows && place[1] < next.cols;
    if (!waiting() || !inside(aim)) aim = null;
    if (!inside(hovered)) hovered = null; // the pointer may be outside the new grid
    panel = aim ? { ...next, selected: aim } : next; // keep a later pick than the answered one
    asked = null;
    values = floatsOf(panel.values);
    [canvas.width, canvas.height] = [base.width, base.height];
    canvas.getContext("2d", { willReadFrequently: true }).putImageData(painted(base, panel), 0, 0);
    node.style.setProperty("--shape", base.width / base.height);
    node.classList.toggle("wide", base.width > 1.8 * base.height);
    title.textContent = panel.title;
    words.textContent = panel.words;
    canvas.setAttribute("aria-label", `${panel.title}. ${panel.words}`);
    const how = panel.picks ? `Click, or use the arrow keys, to choose ${panel.picks}.` : "";
    picture.setAttribute("aria-label", `${panel.title}. ${how}`);
    picture.title = how;
    picture.classList.toggle("picks", Boolean(panel.picks));
    legend.hidden = !panel.ends;
    if (panel.ends) {
      const strip = new ImageData(new Uint8ClampedArray(bytesOf(panel.scale.colors)), 256, 1);
      gradient.getContext("2d").putImageData(strip, 0, 0);
      panel.ends.forEach((text, i) => (ends[i].textContent = text));
      unit.textContent = panel.unit || "";
    }
    mark();
    tell();
  };
  return { node, update };
}
