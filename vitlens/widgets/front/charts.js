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
