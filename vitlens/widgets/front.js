// Draws the page that page.py describes and sends user actions to Python. Only colors are computed here.
//
// `model` is anywidget's model or one with the same interface: get(name) gives the traits "frame" and "pictures",
// on(event, handler) and off(event, handler) are for "change:frame", "msg:custom" and "lost", and
// send(content, _, buffers) reaches Python.

const PART = 2 ** 19; // bytes of a file in one message, below the limits of all front ends
const PACE = 40; // milliseconds between two messages of a drag
let number = Date.now(); // message counter, unique over all widgets of the page and later visits

function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "path", "rect", "circle", "line", "text", "g", "polyline"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  // Keep notebooks from intercepting keys of the focused element.
  if (attributes.tabindex === 0 || ["input", "select", "button"].includes(tag)) node.dataset.lmSuppressShortcuts = "true";
  node.append(...children);
  return node;
}

const bytesOf = (view) => new Uint8Array(view.buffer, view.byteOffset, view.byteLength);
const floatsOf = (view) => new Float32Array(bytesOf(view).slice().buffer);
const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);
const shown = (value) => (Math.abs(value) >= 1e-3 || value === 0 ? Number(value.toPrecision(3)) : value.toExponential(1));

// ---------------------------------------------------------------- controls

function control(described, send) {
  if (described.kind === "switches") return switches(described, send);
  const id = `vitlens-${(number += 1)}`;
  const { name, label, kind, options } = described;
  const set = (value) => send({ set: { [name]: value } });
  let input, output, update;
  if (kind === "select") {
    let choices = options.map(([text], index) => make("option", { value: index }, text));
    const rest = [...choices];
    if (described.groups?.length) choices = described.groups.map(([label, count]) => make("optgroup", { label }, ...rest.splice(0, count)));
    input = make("select", { id, onchange: () => set(options[input.selectedIndex][1]) }, ...choices);
    update = (value) => (input.selectedIndex = options.findIndex((option) => same(option[1], value)));
  } else if (kind === "check") {
    input = make("input", { id, type: "checkbox", onchange: () => set(input.checked) });
    update = (value) => (input.checked = value);
  } else if (kind === "range") {
    const [low, high, step] = options.length ? [0, options.length - 1, 1] : [0, described.high, described.step];
    const text = () => (options.length ? options[input.value][0] : input.value);
    const say = () => {
      output.textContent = text();
      input.setAttribute("aria-valuetext", text());
    };
    output = make("output", { for: id });
    const oninput = () => {
      say();
      set(options.length ? options[input.value][1] : Number(input.value));
    };
    input = make("input", { id, type: "range", min: low, max: high, step, oninput });
    update = (value) => {
      input.value = options.length ? Math.max(0, options.findIndex((option) => same(option[1], value))) : value;
      say();
    };
  } else if (kind === "text") {
    let told; // last value from Python: keep typed text, also while an error about it is shown
    const onchange = () => (input.value.trim() || told) && set(input.value.trim());
    input = make("input", { id, type: "text", placeholder: described.hint, autocomplete: "off", onchange });
    update = (value, message) => {
      if (value !== told || (!message && !input.matches(":focus"))) input.value = told = value;
    };
  } else {
    let told; // as above
    const onchange = () => input.value !== "" && set(Number(input.value));
    input = make("input", { id, type: "number", min: 0, max: described.high, step: 1, onchange });
    update = (value) => {
      if (value !== told || !input.matches(":focus")) input.value = told = value;
    };
  }
  input.disabled = described.disabled;
  const node = make("div", { class: `control ${kind}`, "data-control": name, hidden: described.hidden }, make("label", { for: id }, label), input);
  if (output) node.append(output);
  update(described.value);
  return { node, update, fixed: { ...described, value: null } };
}

// Switches with a column for each layer and a row for each head. Arrow keys move the focus.
function switches(described, send) {
  const { name, label, options } = described;
  const columns = [...new Set(options.map(([, [layer]]) => layer))];
  const rows = 1 + Math.max(...options.map(([, [, head]]) => head));
  let off = [];
  const count = make("span");
  const summary = make("summary", {}, label, count);
  const cells = new Map();
  const tell = () => {
    count.textContent = off.length ? ` (${off.length} off)` : "";
    none.hidden = !off.length;
    for (const [text, place] of options) {
      const on = !off.some((each) => same(each, place));
      const cell = cells.get(String(place));
      cell.setAttribute("aria-checked", String(on));
      cell.title = `${text} is ${on ? "on" : "off"}. Click to switch it ${on ? "off" : "on"}.`;
    }
  };
  const set = (next) => {
    off = next;
    tell();
    send({ set: { [name]: off } });
  };
  const turn = (places) => {
    const left = off.filter((each) => !places.some((place) => same(each, place)));
    set(off.length - left.length === places.length ? left : [...left, ...places]);
  };
  const onkeydown = (event) => {
    const step = { ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] }[event.key];
    if (!step || event.target.dataset.at === undefined) return;
    event.preventDefault();
    const [column, row] = event.target.dataset.at.split(" ").map(Number);
    const next = cells.get(`${columns[column + step[0]]},${row + step[1]}`);
    if (!next) return;
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  };
  const style = `--columns: ${columns.length}`;
  const grid = make("div", { class: "switches", role: "group", "aria-label": `${label}: heads by layer`, style, onkeydown });
  for (let row = 0; row < rows; row += 1) {
    grid.append(make("span", { class: "of" }, row));
    columns.forEach((layer, column) => {
      const option = options.find(([, place]) => same(place, [layer, row]));
      if (!option) return grid.append(make("span"));
      const turned = { class: "switch", type: "button", role: "switch", "aria-label": option[0], "data-at": `${column} ${row}` };
      const cell = make("button", { ...turned, onclick: () => turn([option[1]]) });
      cell.tabIndex = column || row ? -1 : 0;
      cells.set(String(option[1]), cell);
      grid.append(cell);
    });
  }
  grid.append(make("span", { class: "of" }, "all"));
  for (const layer of columns) {
    const places = options.map(([, place]) => place).filter((place) => place[0] === layer);
    const where = layer === "pool" ? "the pool" : `layer ${layer}`;
    const whole = { class: "whole", type: "button", title: `Switch all heads of ${where} off, or on again`, "aria-label": `All heads of ${where}` };
    grid.append(make("button", { ...whole, onclick: () => turn(places) }, layer === "pool" ? "p" : layer));
  }
  const none = make("button", { type: "button", class: "button small", onclick: () => set([]) }, "All on");
  const how = "Rows are heads, columns layers. Click a head to switch it off. Classes and maps then show the model without it.";
  const node = make("details", { class: "control heads", "data-control": name }, summary, make("p", { class: "note" }, how), grid, none);
  const update = (value) => {
    off = value;
    if (off.length && !node.seen) node.open = node.seen = true;
    tell();
  };
  update(described.value);
  return { node, update, fixed: { ...described, value: null } };
}

// ---------------------------------------------------------------- pictures

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

// ---------------------------------------------------------------- bars, curves and dots

const inPercent = (share) => `${(100 * share).toFixed(1)} %`;

// plain: the score is a value instead of a probability.
function line({ name, share, before, now, tip, plain }, message, send) {
  const text = plain ? shown : inPercent;
  const place = make("span", { class: "bar", style: `--share: ${plain ? 0 : share}`, "aria-hidden": "true" });
  const parts = [make("span", { class: "name" }, name), place, make("span", { class: "share" }, text(share))];
  if (before !== undefined) {
    if (!plain) place.append(make("i", { style: `--share: ${before}` }));
    parts.push(make("span", { class: "before" }, `was ${text(before)}`));
  }
  const button = { type: "button", title: tip, "aria-pressed": String(Boolean(now)), onclick: () => send(message) };
  return make("li", { class: before === undefined ? "" : "changed" }, make("button", button, ...parts));
}

function bars(list, send) {
  return list.map((each) => line({ ...each, tip: `Why “${each.name}”?` }, { why: each.number }, send));
}

// The most probable class after each layer. A click selects the layer.
function classes({ title, rows, layer, note }, send) {
  const lines = rows.map((row) => {
    const tip = `After layer ${row.layer}: ${row.name}, ${row.plain ? shown(row.share) : inPercent(row.share)}`;
    const item = line({ ...row, tip, now: row.layer === layer }, { set: { layer: row.layer } }, send);
    item.firstChild.prepend(make("span", { class: "layer" }, row.layer));
    return item;
  });
  return [make("h3", {}, title), make("ol", { class: "bars layers" }, ...lines), make("p", { class: "note" }, note)];
}

// The score while patches are covered or shown in the order of the map, and in random orders.
function curves({ title, words, scale, shares, curves: lines }) {
  const found = [make("h3", {}, title)];
  if (lines) {
    const [width, height, left, top, bottom] = [320, 188, 30, 22, 34];
    const every = Object.values(lines).flat();
    const upTo = (value) => {
      if (!(value > 0)) return 0;
      const wanted = Math.max(value, 0.02);
      const power = 10 ** Math.floor(Math.log10(wanted));
      return [1, 2, 5, 10].map((k) => k * power).find((end) => end >= wanted);
    };
    const [most, least] = [upTo(Math.max(...every)), -upTo(-Math.min(...every))];
    const x = (share) => left + share * (width - left - 6);
    const y = (value) => ((most - value) / (most - least || 1)) * (height - top - bottom) + top;
    const plot = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title}. ${words}` });
    plot.append(make("text", { x: 0, y: 10 }, scale));
    plot.append(...rules(most, least, y, left));
    for (const share of [0, 0.25, 0.5, 0.75, 1])
      plot.append(make("text", { x: x(share), y: height - 19, "text-anchor": "middle" }, `${100 * share} %`));
    plot.append(make("text", { x: (width + left) / 2, y: height - 4, "text-anchor": "middle" }, "patches covered or shown"));
    for (const [name, values] of Object.entries(lines)) {
      const line = values.map((value, k) => `${x(shares[k])},${y(value)}`).join(" ");
      plot.append(make("polyline", { class: `curve ${name}`, points: line }));
    }
    const key = ["deletion", "insertion", "random"].map((name) => make("span", { class: `key ${name}` }, name));
    found.push(plot, make("p", { class: "keys" }, ...key));
  }
  return [...found, make("p", { class: "note" }, words)];
}

const WIDTH = 320; // width of charts in SVG units

// Grid lines and labels of an axis.
function rules(most, least, y, left) {
  const span = most - least || 1;
  const power = 10 ** Math.floor(Math.log10(span));
  const step = power * (span / power < 3 ? 0.5 : 2);
  const found = [];
  for (let k = Math.ceil(least / step); k * step <= most; k += 1) {
    const at = y(k * step);
    found.push(make("line", { class: k ? "rule" : "rule zero", x1: left, x2: WIDTH - 6, y1: at, y2: at }));
    found.push(make("text", { x: left - 5, y: at + 3.5, "text-anchor": "end" }, shown(k * step)));
  }
  return found;
}

// A chart with keyboard focus. Arrow keys select another layer or head.
function steered(plot, title, hint, { layer, head }, go, aim) {
  const onkeydown = (event) => {
    const [dk, dh] = { ArrowUp: [0, 1], ArrowDown: [0, -1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] }[event.key] || [];
    if (dk === undefined) return;
    event.preventDefault();
    const [k, h] = aim.at || [layer, head];
    if (k === null) go(0, 0);
    else go(k + dk, h === null ? 0 : h + dh);
  };
  return make("div", { class: "plot", tabindex: 0, role: "application", "aria-label": `${title}. ${hint}`, onkeydown }, plot);
}

// The value of each head by layer. A click or an arrow key selects a head.
function dots(described, send, aim) {
  const { values, uniform, layer, head, title, picks } = described;
  const [height, left, bottom] = [176, 30, 34];
  const most = 1.08 * Math.max(uniform, ...values.flat());
  const x = (k) => left + ((k + 0.5) / values.length) * (WIDTH - left - 6);
  const y = (value) => (1 - value / most) * (height - bottom - 8) + 8;
  const go = (k, h) => {
    if (!picks || !values[k] || values[k][h] === undefined) return;
    aim.at = [k, h];
    send({ set: { layer: k, head: h } });
  };
  const plot = make("svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": title });
  plot.append(...rules(most, 0, y, left));
  const each = Math.ceil(values.length / 12);
  values.forEach((_, k) => k % each || plot.append(make("text", { x: x(k), y: height - 19, "text-anchor": "middle" }, k)));
  plot.append(make("text", { x: (WIDTH + left) / 2, y: height - 4, "text-anchor": "middle" }, "layer"));
  plot.append(make("line", { class: "even", x1: left, x2: WIDTH - 6, y1: y(uniform), y2: y(uniform) }));
  values.forEach((heads, k) =>
    heads.forEach((value, h) => {
      const now = k === layer && (head === null || h === head);
      const dot = make("circle", { class: now ? "dot now" : "dot", cx: x(k), cy: y(value), r: now ? 5 : 3.5 });
      dot.append(make("title", {}, `layer ${k}, head ${h}: ${shown(value)} pixels`));
      dot.addEventListener("click", () => go(k, h));
      plot.append(dot);
    }),
  );
  const hint = picks ? "Click a dot, or use the arrow keys, to select a head." : "";
  const now = head === null ? `layer ${layer}` : `layer ${layer}, head ${head}: ${shown(values[layer][head])} pixels`;
  const note = make("p", { class: "note" }, `${now}. Dashed: uniform attention. ${hint}`);
  return [make("h3", {}, title), steered(plot, title, hint, described, go, aim), note];
}

// Contribution of each part to a logit: heads and MLP of each layer, and other parts at the right.
function contributions(described, send, aim) {
  const { heads, mlps, others, layer, head, title, note } = described;
  const [height, left, bottom] = [200, 34, 34];
  const values = [...heads.flat(), ...mlps, ...others.map(([, value]) => value), 0];
  const [least, most] = [1.05 * Math.min(...values), 1.05 * Math.max(...values, 1e-9)];
  const y = (value) => ((most - value) / (most - least)) * (height - bottom - 8) + 8;
  const slots = heads.length * (heads[0].length + 2) + 2 * others.length;
  const wide = (WIDTH - left - 6) / slots;
  const plot = make("svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": `${title}. ${note}` });
  plot.append(...rules(most, least, y, left));
  const go = (k, h) => {
    if (!heads[k] || heads[k][h] === undefined) return;
    aim.at = [k, h];
    send({ set: { layer: k, head: h } });
  };
  let slot = 0.5;
  const bar = (kind, name, value, act) => {
    const x = left + slot * wide;
    slot += 1;
    const mark = { class: `part ${kind}`, x: x + 0.08 * wide, width: 0.84 * wide };
    const group = make("g", { class: act ? "goes" : "" }, make("title", {}, `${name}: ${value > 0 ? "+" : ""}${shown(value)} logits`));
    group.append(make("rect", { class: "reach", x, width: wide, y: 8, height: height - bottom - 8 }));
    group.append(make("rect", { ...mark, y: Math.min(y(value), y(0)), height: Math.max(0.7, Math.abs(y(value) - y(0))) }));
    if (act) group.addEventListener("click", act);
    plot.append(group);
  };
  const label = (from, text) => {
    const x = left + ((from + slot) / 2) * wide;
    plot.append(make("text", { x, y: height - 19, "text-anchor": "middle" }, text));
  };
  const each = Math.ceil(heads.length / 12);
  heads.forEach((row, k) => {
    const from = slot;
    row.forEach((value, h) => {
      const now = k === layer && (head === null || h === head);
      bar(now ? "head now" : "head", `layer ${k}, head ${h}`, value, () => go(k, h));
    });
    bar("mlp", `layer ${k}, MLP`, mlps[k]);
    if (k % each === 0) label(from, k);
    slot += 1;
  });
  for (const [name, value] of others) {
    bar("other", name, value);
    slot += 1;
  }
  plot.append(make("text", { x: left + heads.length * (heads[0].length + 2) * wide * 0.5, y: height - 4, "text-anchor": "middle" }, "layer"));
  const hint = "Click the bar of a head, or use the arrow keys, to see its map.";
  const key = [["head", "heads"], ["mlp", "MLPs"], ["other", others.map(([name]) => name).join(", ")]];
  const keys = make("p", { class: "keys" }, ...key.map(([kind, text]) => make("span", { class: `key part ${kind}` }, text)));
  const now = head === null ? "" : `Layer ${layer}, head ${head}: ${shown(heads[layer][head])} logits. `;
  const caption = make("p", { class: "note" }, `${now}${note} ${hint}`);
  return [make("h3", {}, title), steered(plot, title, hint, described, go, aim), keys, caption];
}

// ---------------------------------------------------------------- downloads

function save(names, buffers) {
  names.forEach(async (name, i) => {
    await new Promise((done) => setTimeout(done, 400 * i)); // browsers drop the second of two simultaneous downloads
    const address = URL.createObjectURL(new Blob([bytesOf(buffers[i])]));
    const link = make("a", { href: address, download: name });
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(address), 60000);
  });
}

// ---------------------------------------------------------------- the kernel

const GONE = ["restarting", "autorestarting", "terminating", "dead"]; // a new kernel has no model
const ENDED = "The kernel of this widget has ended or was restarted. Run the cell again, after the cells that it needs.";
const AWAY = "The kernel cannot be reached. Wait a moment. If this message stays, restart it and run the notebook again.";

// Calls tell(message) when the kernel has ended or cannot be reached, and tell("") when it is back.
function watch(model, tell) {
  let ended = false;
  const end = (sentence) => {
    ended = true;
    tell(sentence);
  };
  model.on("lost", end);
  const kernel = model.widget_manager?.kernel; // undefined in some front ends
  const slots = {
    statusChanged: (_, status) => GONE.includes(status) && end(ENDED),
    disposed: () => end(ENDED),
    connectionStatusChanged: (_, status) => ended || tell(status === "connected" ? "" : AWAY),
  };
  for (const [signal, slot] of Object.entries(slots)) kernel?.[signal]?.connect(slot);
  return () => {
    model.off("lost", end);
    for (const [signal, slot] of Object.entries(slots)) kernel?.[signal]?.disconnect(slot);
  };
}

// ---------------------------------------------------------------- the page

function render({ model, el }) {
  const alert = make("p", { class: "alert", role: "alert" });
  const busy = make("span", { class: "busy", role: "status" });
  const tools = make("div", { class: "tools" });
  const panels = make("div", { class: "panels" });
  const controls = make("form", { class: "controls", "aria-label": "Controls", onsubmit: (event) => event.preventDefault() });
  const about = make("p", { class: "note about", "aria-live": "polite" });
  const list = make("ol", { class: "bars", "aria-label": "Most likely classes" });
  const trust = make("section", { class: "dots score", "aria-live": "polite" });
  const depth = make("section", { class: "dots" });
  const written = make("section", { class: "dots parts" });
  const said = make("section", { class: "dots lens" });
  const side = make("div", { class: "side" }, tools, about, controls, list, written, said, trust, depth);
  const body = make("div", { class: "body" }, panels, side);
  const root = make("div", { class: "vitlens" }, alert, body);
  const made = { controls: new Map(), panels: new Map() };
  let sent = 0;
  let saving = 0;
  let turns = 0;
  let coming = null; // current upload
  let complaint = ""; // error about a file that was not sent
  let gone = ""; // the alert while there is no kernel
  const stop = watch(model, (sentence) => {
    gone = sentence;
    alert.textContent = gone || complaint || model.get("frame").message;
    body.inert = Boolean(gone);
    if (gone) busy.textContent = "";
  });
  const aim = { at: null };

  const waiting = () => sent > model.get("frame").answers;
  const send = (content, buffers = []) => {
    root.dataset.sent = sent = number += 1;
    complaint = "";
    setTimeout(() => waiting() && status(), 150);
    model.send({ ...content, number: sent }, undefined, buffers);
  };
  // While dragging over the image or along a slider, only the last message counts.
  let paced, next;
  const drag = (content) => {
    if (paced) return (next = content);
    send(content);
    paced = setTimeout(() => {
      paced = null;
      const last = next;
      next = null;
      if (last) drag(last);
    }, PACE);
  };
  const megabytes = (bytes) => (bytes / 2 ** 20).toFixed(1);
  const status = () => {
    const progress = () => `receiving ${megabytes(coming.received)} of ${megabytes(coming.size)} MB …`;
    busy.textContent = gone ? "" : coming ? progress() : waiting() ? "working …" : "";
  };
  const complain = (problem) => {
    coming = null;
    status();
    alert.textContent = complaint = problem;
  };
  // Sends the file in parts, each after Python confirmed the last. A new file replaces it.
  const upload = async (file) => {
    if (!file) return;
    const mine = (coming = { id: (number += 1), file, received: 0, size: file.size });
    const most = model.get("frame").uploads;
    if (file.size > most) {
      const limit = `is larger than ${most / 2 ** 20} MB, the upload limit. Make it smaller`;
      return complain(`${file.name} (${megabytes(file.size)} MB) ${limit}.`);
    }
    alert.textContent = complaint = "";
    sendPart(mine);
  };
  const sendPart = async (mine) => {
    status();
    const { id, file, received, size } = mine;
    const data = await file.slice(received, received + PART).arrayBuffer().catch((error) => error);
    if (coming !== mine) return;
    if (data instanceof Error) return complain(`${file.name} could not be read by this browser (${data.message}).`);
    const part = { upload: file.name, file: id, at: received, of: size };
    if (received + PART < size) model.send(part, undefined, [data]);
    else send(part, [data]);
  };
  const confirmed = ({ file, received, problem }) => {
    if (file !== coming?.id) return;
    if (problem) {
      root.dataset.sent = sent = model.get("frame").answers; // the last message will not be answered
      return complain(problem);
    }
    coming.received = received;
    if (received < coming.size) return sendPart(coming);
    coming = null;
    status();
  };

  const file = make("input", { type: "file", accept: "image/*", "aria-label": "Upload an image", onchange: () => {
    upload(file.files[0]);
    file.value = "";
  } });
  const uploader = make("label", { class: "button" }, "Upload an image", file);
  const saver = make("button", { type: "button", class: "button", onclick: () => {
    send({ press: "save" });
    saving = sent;
  } }, "Save");
  tools.append(uploader, saver, busy);
  root.addEventListener("keydown", (event) => event.stopPropagation()); // avoid shortcuts of the notebook
  root.addEventListener("dragover", (event) => {
    if (!model.get("frame").uploads) return;
    event.preventDefault();
    root.classList.add("dropping");
  });
  root.addEventListener("dragleave", () => root.classList.remove("dropping"));
  root.addEventListener("drop", (event) => {
    root.classList.remove("dropping");
    if (!model.get("frame").uploads) return;
    event.preventDefault();
    event.stopPropagation();
    upload(event.dataTransfer.files[0]);
  });

  const keep = (known, parent, described, fresh, stays) => {
    const names = described.map((each) => each.name);
    for (const each of described)
      if (!known.has(each.name) || !stays(known.get(each.name), each)) {
        const next = fresh(each);
        if (known.has(each.name)) {
          const old = known.get(each.name).node;
          const held = old.matches(":focus-within");
          old.replaceWith(next.node);
          if (held) next.node.querySelector("input, select")?.focus();
        }
        known.set(each.name, next);
      }
    for (const name of [...known.keys()].filter((name) => !names.includes(name))) {
      known.get(name).node.remove();
      known.delete(name);
    }
    const nodes = names.map((name) => known.get(name).node);
    if (nodes.length !== parent.children.length || nodes.some((node, i) => parent.children[i] !== node))
      parent.replaceChildren(...nodes);
  };

  // Replaces a part only if it changed, so that clicks and focus are kept.
  const renew = (node, described, fresh) => {
    node.hidden = !described;
    if (same(node.told, described)) return;
    node.told = described;
    const stops = () => [...node.querySelectorAll("button, [tabindex]")];
    const held = stops().indexOf(document.activeElement);
    node.replaceChildren(...(described ? fresh(described) : []));
    stops()[held]?.focus();
  };

  const draw = async () => {
    const turn = (turns += 1);
    const frame = model.get("frame");
    const pictures = model.get("pictures");
    const fixed = (old, next) => same(old.fixed, { ...next, value: null });
    keep(made.controls, controls, frame.controls, (each) => control(each, each.kind === "range" ? drag : send), fixed);
    // While an answer is outstanding, keep the controls as the user set them.
    if (!waiting()) for (const each of frame.controls) made.controls.get(each.name).update(each.value, frame.message);
    keep(made.panels, panels, frame.panels, (each) => panelOf(each.name, (content) => drag(content)), () => true);
    body.classList.toggle("several", frame.panels.length > 1);
    if (!waiting()) aim.at = null;
    renew(list, frame.bars?.length ? frame.bars : null, (each) => bars(each, send));
    renew(written, frame.parts || null, (each) => contributions(each, send, aim));
    renew(said, frame.lens || null, (each) => classes(each, send));
    renew(trust, frame.score || null, curves);
    renew(depth, frame.dots || null, (each) => dots(each, send, aim));
    uploader.hidden = !frame.uploads;
    uploader.title = frame.uploads ? `An image of up to ${frame.uploads / 2 ** 20} MB` : "";
    saver.hidden = !frame.saves;
    await Promise.all(frame.panels.map((each) => made.panels.get(each.name).update(each, pictures, waiting)));
    if (turn !== turns) return; // a later frame was faster
    alert.textContent = gone || complaint || frame.message;
    if (!waiting()) status();
    about.textContent = frame.about || "";
    root.dataset.answers = frame.answers;
    root.dataset.sent = sent;
  };
  const custom = (content, buffers) => {
    if (content.file) confirmed(content);
    else if (content.download && content.asked === saving) save(content.download, buffers);
  };
  model.on("change:frame", draw);
  model.on("msg:custom", custom);
  el.append(root);
  draw();
  return () => {
    stop();
    model.off("change:frame", draw);
    model.off("msg:custom", custom);
  };
}

export default { render };
