const inPercent = (share) => `${(100 * share).toFixed(1)}%`;

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
function curves({ title, verdict, words, scale, shares, curves: lines }) {
  const found = [make("h3", {}, title), ...(verdict ? [make("p", { class: "verdict" }, verdict)] : [])];
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
      plot.append(make("text", { x: x(share), y: height - 19, "text-anchor": "middle" }, `${100 * share}%`));
    plot.append(make("text", { x: (width + left) / 2, y: height - 4, "text-anchor": "middle" }, "share of patches covered / revealed"));
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

// The maps of all heads from the query, a column for each layer, or their mean attention distances. A click or an arrow
// key chooses a layer and a head. A right click or X switches heads off.
function mosaicOf(send) {
  const title = make("h3");
  const canvas = make("canvas");
  const marks = make("svg", { "aria-hidden": "true", preserveAspectRatio: "none" });
  const stage = make("div", { class: "stage", tabindex: 0, role: "application" }, canvas, marks);
  const [across, down] = [make("div", { class: "across", "aria-hidden": "true" }), make("div", { class: "down", "aria-hidden": "true" })];
  const tiles = make("div", { class: "tiles" }, make("span", { class: "corner", "aria-hidden": "true" }, "layer"), stage, down, across);
  const note = make("p", { class: "note" });
  const action = (text, onclick) => make("button", { type: "button", class: "button small", onclick }, text);
  const modes = ["Attention", "Distance"].map((text, k) => action(text, () => { far = k === 1; draw(); }));
  const turner = action("", () => turn(chosen()));
  const reset = action("Turn all on", () => set([]));
  const actions = make("div", { class: "actions" }, make("span", { class: "modes", role: "group", "aria-label": "Tiles show" }, ...modes), turner, reset);
  const node = make("div", { class: "mosaic" }, title, tiles, actions, note);
  let [all, far, hovered, aim, off] = [null, false, null, null, []];

  const chosen = () => aim || [all.layer, all.picks.findIndex((pick) => pick !== null && pick === all.head)];
  const columns = () => all.layers + (all.pool ? 1 : 0);
  const inside = ([k, r]) => (k >= 0 && k < all.layers && r >= 0 && r < all.names.length) || (all.pool && k === all.layers && r >= 2 && r < 2 + all.pool);
  // The heads of a tile: one, or those of its layer for the rows of mean and maximum.
  const headsOf = ([k, r]) => {
    if (k === null || k === undefined) return [];
    const layer = k < all.layers ? k : "pool";
    const count = layer === "pool" ? all.pool : all.names.length - 2;
    return r >= 2 ? [[layer, r - 2]] : Array.from({ length: count }, (_, head) => [layer, head]);
  };
  const isOff = (head) => off.some((each) => same(each, head));
  const set = (next) => {
    off = next;
    draw();
    send({ set: { off } });
  };
  const turn = (place) => {
    if (!all.off) return; // this page runs no model
    const heads = headsOf(place);
    set(heads.every(isOff) ? off.filter((each) => !heads.some((head) => same(each, head))) : [...off, ...heads.filter((head) => !isOff(head))]);
  };
  const choose = (place) => {
    if (!place || !inside(place)) return;
    if (place[0] === all.layers) return turn(place); // heads of the pool have no map
    const pick = all.picks[place[1]];
    aim = pick === null ? [place[0], -1] : place;
    draw();
    send({ set: pick === null ? { layer: place[0] } : { layer: place[0], head: pick } });
  };
  const words = (place) => {
    const [k, r] = place;
    if (k === null || k === undefined) return "All heads of all layers";
    if (k === all.layers) return `Pool, head ${r - 2}`;
    const name = r < 0 ? `Layer ${k}` : `Layer ${k}, ${r < 2 ? `${all.names[r]} over heads` : `head ${r - 2}`}`;
    const distance = r >= 2 && all.distances ? `, mean distance ${shown(all.distances[k][r - 2])} pixels` : "";
    return name + (r < 0 ? "" : `: largest weight ${shown(all.tops[k][r])}${distance}`) + (r >= 2 && isOff([k, r - 2]) ? ", off" : "");
  };
  const tell = () => {
    note.textContent = `${words(hovered || chosen())}.` + (far ? ` Uniform attention: ${shown(all.uniform)} pixels.` : "");
  };

  const draw = () => {
    const { layers, rows, cols, names, pool } = all;
    const [maps, table] = [bytesOf(all.maps), bytesOf(all.colors)];
    const [w, h] = [cols + 1, rows + 1]; // a gap of one cell between tiles
    const [width, height] = [columns() * w - 1, names.length * h - 1];
    const image = new ImageData(width, height);
    const most = all.distances ? Math.max(all.uniform, ...all.distances.flat()) : 1;
    for (let k = 0; k < columns(); k += 1)
      for (let r = 0; r < names.length; r += 1) {
        if (!inside([k, r])) continue;
        const distance = r >= 2 ? all.distances?.[k]?.[r - 2] : undefined;
        for (let y = 0; y < rows; y += 1)
          for (let x = 0; x < cols; x += 1) {
            const at = 4 * ((r * h + y) * width + k * w + x);
            const value = far ? Math.round((255 * (distance || 0)) / most) : maps[((k * names.length + r) * rows + y) * cols + x];
            const blank = k === layers || (far && distance === undefined);
            if (blank) image.data.set([128, 128, 128, 90], at);
            else image.data.set([table[4 * value], table[4 * value + 1], table[4 * value + 2], 255], at);
          }
      }
    [canvas.width, canvas.height] = [width, height];
    canvas.getContext("2d").putImageData(image, 0, 0);
    marks.setAttribute("viewBox", `0 0 ${width} ${height}`);
    marks.replaceChildren();
    const box = ([k, r], more) => make("rect", { x: k * w, y: r * h, width: cols, height: rows, ...more });
    if (far && columns() <= 16)
      all.distances?.forEach((heads, k) => heads.forEach((value, head) => {
        const place = { x: k * w + cols / 2, y: (head + 2) * h + rows / 2, "font-size": 0.42 * cols };
        marks.append(make("text", { ...place, class: value > 0.6 * most ? "dark" : "" }, Math.round(value)));
      }));
    for (const [layer, head] of off) {
      const place = [layer === "pool" ? layers : layer, head + 2];
      const [x, y] = [place[0] * w, place[1] * h];
      marks.append(box(place, { class: "veil" }), make("path", { class: "cross", d: `M${x} ${y}L${x + cols} ${y + rows}M${x + cols} ${y}L${x} ${y + rows}` }));
    }
    const [layer, row] = chosen();
    if (layer !== null) {
      const ring = row < 0 ? { y: 0, height: names.length * h - 1 } : {};
      for (const name of ["rim", "frame"]) marks.append(box([layer, Math.max(row, 0)], { class: name, ...ring }));
    }
    const step = Math.ceil(columns() / 16);
    across.replaceChildren(...Array.from({ length: columns() }, (_, k) => make("span", {}, k === layers ? "pool" : k % step ? "" : k)));
    down.replaceChildren(...names.map((name, r) => make("span", {}, r < 2 || r % step === 0 ? name : "")));
    tiles.style.cssText = `--columns: ${columns()}; --rows: ${names.length}; --shape: ${width / height}`;
    title.textContent = all.titles[Number(far)];
    stage.setAttribute("aria-label", `${title.textContent}. Arrow keys choose a layer and a head${all.off ? ", X turns it off or on" : ""}.`);
    modes.forEach((each, k) => each.setAttribute("aria-pressed", String(far === (k === 1))));
    const heads = headsOf(chosen());
    const what = heads.length === 1 ? `head ${heads[0][1]} of layer ${layer}` : `layer ${layer}`;
    turner.hidden = !heads.length || !all.off;
    turner.textContent = heads.length && heads.every(isOff) ? `Turn ${what} on` : `× Turn ${what} off`;
    reset.hidden = !off.length;
    tell();
  };
  const under = (event) => {
    const area = canvas.getBoundingClientRect();
    const place = [Math.floor(((event.clientX - area.left) / area.width) * columns()), Math.floor(((event.clientY - area.top) / area.height) * all.names.length)];
    return inside(place) ? place : null;
  };
  stage.addEventListener("click", (event) => choose(under(event)));
  stage.addEventListener("contextmenu", (event) => {
    event.preventDefault();
    const place = under(event);
    if (place) turn(place);
  });
  stage.addEventListener("pointermove", (event) => {
    hovered = under(event);
    tell();
  });
  stage.addEventListener("pointerleave", () => {
    hovered = null;
    tell();
  });
  stage.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] }[event.key];
    const [k, r] = chosen();
    if (step) choose(k === null ? [0, 2] : [k + step[0], r < 0 ? r + !r : r + step[1]]);
    else if (["x", "X", "Delete"].includes(event.key)) turn([k, r]);
    else return;
    event.preventDefault();
  });
  const update = (described, waiting) => {
    node.hidden = !described;
    if (!described) return;
    all = described;
    if (!waiting()) [aim, off] = [null, described.off || []];
    draw();
  };
  return { node, actions, update };
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
