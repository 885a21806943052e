const inPercent = (share) => `${(100 * share).toFixed(1)}%`;

// plain: the score is a value instead of a probability.
function line({ name, share, before, now, tip, plain }, message, send) {
  const text = plain ? shown : inPercent;
  const place = make("span", {
    class: "bar",
    style: `--share: ${plain ? 0 : share}`,
    "aria-hidden": "true",
  });
  const parts = [
    make("span", { class: "name" }, name),
    place,
    make("span", { class: "share" }, text(share)),
  ];
  if (before !== undefined) {
    if (!plain) place.append(make("i", { style: `--share: ${before}` }));
    parts.push(make("span", { class: "before" }, `was ${text(before)}`));
  }
  const node = make(
    "button",
    { type: "button", title: tip, onclick: () => send(message) },
    ...parts,
  );
  press(node, now);
  return make("li", { class: before === undefined ? "" : "changed" }, node);
}

function bars(list, send) {
  return list.map((each) =>
    line({ ...each, tip: `Why “${each.full}”?` }, { why: each.number }, send),
  );
}

// The most probable class after each layer. A click selects the layer.
function classes({ title, rows, layer, note }, send) {
  const lines = rows.map((row) => {
    const tip = `After layer ${row.layer}: ${row.name}, ${row.plain ? shown(row.share) : inPercent(row.share)}`;
    const item = line(
      { ...row, tip, now: row.layer === layer },
      { set: { layer: row.layer } },
      send,
    );
    item.firstChild.prepend(make("span", { class: "layer" }, row.layer));
    return item;
  });
  return [
    make("h3", {}, title),
    make("ol", { class: "bars layers" }, ...lines),
    make("p", { class: "note" }, note),
  ];
}

const [WIDTH, HEIGHT, LEFT, BOTTOM] = [320, 200, 34, 34]; // of charts in SVG units

// A chart whose vertical axis includes some values and 0: {plot, x(share), y(value), tick(share, text)}. axis: label of
// the horizontal one. unit: of the vertical one.
function chartOf(label, values, axis, unit = "") {
  const plot = make("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label });
  const [least, most] = [1.05 * smallestOf([...values, 0]), 1.05 * largestOf([...values, 1e-9])];
  const top = unit ? 22 : 8;
  const x = (share) => LEFT + share * (WIDTH - LEFT - 6);
  const y = (value) => ((most - value) / (most - least)) * (HEIGHT - BOTTOM - top) + top;
  const write = (x, y, text, anchor) =>
    plot.append(make("text", { x, y, "text-anchor": anchor }, text));
  const power = 10 ** Math.floor(Math.log10(most - least));
  const step = power * ((most - least) / power < 3 ? 0.5 : 2);
  for (let k = Math.ceil(least / step); k * step <= most; k += 1) {
    const at = y(k * step);
    plot.append(
      make("line", { class: k ? "rule" : "rule zero", x1: LEFT, x2: WIDTH - 6, y1: at, y2: at }),
    );
    write(LEFT - 5, at + 3.5, shown(k * step), "end");
  }
  write(0, 10, unit, "start");
  write(x(0.5), HEIGHT - 4, axis, "middle");
  return { plot, x, y, tick: (share, text) => write(x(share), HEIGHT - 19, text, "middle") };
}

const keysOf = (kinds) =>
  make(
    "p",
    { class: "keys" },
    ...kinds.map(([name, kind]) => make("span", { class: `key ${kind}` }, name)),
  );

// The score while patches are covered or revealed in the order of the map, and in random orders. The pointer and the
// arrow keys choose a point of the map's own curves, whose photo is shown, also in place of the map. panel, picture: of
// the map. reveal: of its panel.
function curves(
  { title, verdict, words, scale, shares, curves: lines, name, order, fill },
  panel,
  picture,
  reveal,
) {
  if (!lines) return [make("h3", {}, title), make("p", { class: "note" }, words)];
  const every = [...Object.values(lines).flat(), 0.02];
  const { plot, x, y, tick } = chartOf(
    `${title}. ${words}`,
    every,
    "share of patches covered / revealed",
    scale,
  );
  for (const share of [0, 0.25, 0.5, 0.75, 1]) tick(share, `${100 * share}%`);
  for (const [name, values] of Object.entries(lines)) {
    const points = values.map((value, k) => `${x(shares[k])},${y(value)}`).join(" ");
    plot.append(make("polyline", { class: `curve ${name}`, points }));
  }
  const [dot, canvas, line] = [
    make("circle", { r: 4 }),
    make("canvas", { role: "img" }),
    make("p", { class: "sum" }),
  ];
  const kinds = ["deletion", "insertion"];
  let [kind, at] = ["deletion", Math.floor(shares.length / 2)];
  const show = async (large = true) => {
    const { whole } = await pixelsOf(picture);
    const count = Math.round(shares[at] * order.length);
    const value = lines[kind][at];
    const done = kind === "deletion" ? "covered" : "revealed";
    const patches = kind === "deletion" ? order.slice(0, count) : order.slice(count);
    cover(canvas, whole, panel, patches, fill);
    for (const [key, place] of Object.entries({
      cx: x(shares[at]),
      cy: y(value),
      class: `part ${kind}`,
    }))
      dot.setAttribute(key, place);
    line.textContent = `${Math.round(100 * shares[at])}% of the patches ${done}: ${name} ${shown(value)}`;
    canvas.setAttribute("aria-label", `The photo with ${line.textContent}`);
    if (large) reveal(patches, fill, line.textContent);
  };
  const point = (event) => {
    const [top, left] = cellUnder(event, plot, [1 / HEIGHT, 1 / WIDTH]);
    const nearest = (distances) => distances.indexOf(smallestOf(distances));
    at = nearest(shares.map((share) => Math.abs(x(share) - left)));
    kind = kinds[nearest(kinds.map((each) => Math.abs(y(lines[each][at]) - top)))];
    show();
  };
  const move = (other, step) => {
    if (other) kind = kinds[1 - kinds.indexOf(kind)];
    at = Math.min(Math.max(at + step, 0), shares.length - 1);
    show();
  };
  plot.append(dot);
  show(false);
  const hint = "Point at a curve, or use the arrow keys, to see the photo at that point.";
  const [acts, away] = [{ class: "plot", "aria-label": `${title}. ${hint}` }, () => reveal(null)];
  Object.assign(acts, {
    onpointermove: point,
    onpointerdown: point,
    onpointerleave: away,
    onblur: away,
  });
  const keys = keysOf([...kinds, "random"].map((each) => [each, each]));
  return [
    make("h3", {}, title),
    make("p", { class: "verdict" }, verdict),
    steered(acts, move, plot),
    keys,
    make("div", { class: "covered" }, canvas, line),
    make("p", { class: "note" }, `${words} ${hint}`),
  ];
}

// The maps of all heads from the query, a column for each layer, or their mean attention distances. A click or an arrow
// key chooses a layer and a head. A right click or X switches heads off. Places are [layer, row], with the mean and the
// maximum over heads in rows 0 and 1.
function mosaicOf(send) {
  const hidden = { "aria-hidden": "true" };
  const [title, canvas, note] = [make("h3"), make("canvas"), make("p", { class: "note" })];
  const marks = make("svg", { ...hidden, preserveAspectRatio: "none" });
  const step = (down, across) => {
    const [k, r] = chosen();
    choose(k === null ? [0, 2] : [k + across, r < 0 ? 0 : r + down]);
  };
  const stage = steered({ class: "stage" }, step, canvas, marks);
  const [down, across, corner] = ["down", "across", "corner"].map((kind) =>
    make("div", { class: kind, ...hidden }),
  );
  const tiles = make("div", { class: "tiles" }, stage, down, across, corner);
  corner.textContent = "layer";
  const modes = ["Attention", "Distance"].map((text, k) =>
    small(text, () => {
      far = k === 1;
      draw();
    }),
  );
  const mode = make(
    "span",
    { class: "modes", role: "group", "aria-label": "Tiles show" },
    ...modes,
  );
  const [turner, reset] = [
    small("", () => turn(chosen())),
    small("Turn all on", () => set({ off: (off = []) })),
  ];
  const actions = make("div", { class: "actions" }, mode, turner, reset);
  const node = make("div", { class: "mosaic" }, title, tiles, actions, note);
  let [all, far, hovered, aim, off] = [null, false, null, null, []];

  const chosen = () =>
    aim || [all.layer, all.picks.findIndex((pick) => pick !== null && pick === all.head)];
  const columns = () => all.layers + (all.pool ? 1 : 0);
  const inside = ([k, r]) =>
    k === all.layers
      ? r >= 2 && r < 2 + all.pool
      : k >= 0 && k < all.layers && r >= 0 && r < all.names.length;
  // The heads of a tile: one, or those of its layer for the rows of mean and maximum.
  const headsOf = ([k, r]) => {
    if (k === null) return [];
    const layer = k < all.layers ? k : "pool";
    const count = layer === "pool" ? all.pool : all.names.length - 2;
    return r >= 2 ? [[layer, r - 2]] : Array.from({ length: count }, (_, head) => [layer, head]);
  };
  const has = (heads, head) => heads.some((each) => same(each, head));
  const set = (values) => {
    draw();
    send({ set: values });
  };
  const turn = (place) => {
    if (!all.off || !place) return; // saved pages run no model
    const heads = headsOf(place);
    const others = off.filter((each) => !has(heads, each));
    off = heads.every((head) => has(off, head)) ? others : [...others, ...heads];
    set({ off });
  };
  const choose = (place) => {
    if (!place || !inside(place)) return;
    const [layer, row] = place;
    if (layer === all.layers) return turn(place); // heads of the pool have no map
    const head = all.picks[row];
    aim = head === null ? [layer, -1] : place;
    set(head === null ? { layer } : { layer, head });
  };
  const words = ([k, r]) => {
    if (k === null) return "All heads of all layers";
    if (k === all.layers) return `Pool, head ${r - 2}`;
    if (r < 0) return `Layer ${k}`;
    const name = r < 2 ? `${all.names[r]} over heads` : `head ${r - 2}`;
    const distance =
      r >= 2 && all.distances ? `, mean distance ${shown(all.distances[k][r - 2])} pixels` : "";
    const turned = has(off, [k, r - 2]) ? ", off" : "";
    return `Layer ${k}, ${name}: largest weight ${shown(all.tops[k][r])}${distance}${turned}`;
  };
  const tell = (place) => {
    hovered = place;
    const uniform = far ? ` Uniform attention: ${shown(all.uniform)} pixels.` : "";
    note.textContent = `${words(hovered || chosen())}.${uniform}`;
  };

  const draw = () => {
    const { layers, rows, cols, names, distances } = all;
    const [maps, colors] = [bytesOf(all.maps), new Uint32Array(bytesOf(all.colors).slice().buffer)];
    const [w, h] = [cols + 1, rows + 1]; // a gap of one cell between tiles
    const [width, height] = [columns() * w - 1, names.length * h - 1];
    const image = new ImageData(width, height);
    const out = new Uint32Array(image.data.buffer);
    const most = largestOf([all.uniform, ...(distances || []).flat()]);
    const every = [...Array(columns()).keys()]
      .flatMap((k) => names.map((_, r) => [k, r]))
      .filter(inside);
    for (const [k, r] of every) {
      const distance = distances?.[k]?.[r - 2];
      const blank = k === layers || (far && distance === undefined);
      const color = blank ? 0x5a808080 : far && colors[Math.round((255 * distance) / most)];
      for (let y = 0, i = (k * names.length + r) * rows * cols; y < rows; y += 1)
        for (let x = 0; x < cols; x += 1, i += 1)
          out[(r * h + y) * width + k * w + x] = color || colors[maps[i]];
    }
    put(canvas, image);
    marks.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const boxOf = ([k, r]) => ({ x: k * w, y: r * h, width: cols, height: rows });
    const text = ([k, r]) => {
      const value = distances[k][r - 2];
      const place = { x: k * w + cols / 2, y: r * h + rows / 2, "font-size": 0.42 * cols };
      return make("text", { ...place, class: value > 0.6 * most ? "dark" : "" }, Math.round(value));
    };
    const crossed = ([layer, head]) => {
      const box = boxOf([layer === "pool" ? layers : layer, head + 2]);
      const d = `M${box.x} ${box.y}l${cols} ${rows}m0 ${-rows}l${-cols} ${rows}`;
      return [make("rect", { class: "veil", ...box }), make("path", { class: "cross", d })];
    };
    const texts =
      far && distances && columns() <= 16
        ? every.filter(([k, r]) => k < layers && r >= 2).map(text)
        : [];
    const [layer, row] = chosen();
    const ring = row < 0 ? { y: 0, height } : {}; // around a layer without a head
    const ringed = layer === null ? [] : framed({ ...boxOf([layer, row]), ...ring });
    marks.replaceChildren(...texts, ...off.flatMap(crossed), ...ringed);
    const step = Math.ceil(columns() / 16);
    const numbers = Array.from({ length: columns() }, (_, k) =>
      k === layers ? "pool" : k % step ? "" : k,
    );
    const spans = (texts) => texts.map((text) => make("span", {}, text));
    renew(across, numbers, spans);
    renew(
      down,
      names.map((name, r) => (r < 2 || r % step === 0 ? name : "")),
      spans,
    );
    tiles.style.cssText = `--columns: ${columns()}; --rows: ${names.length}; --shape: ${width / height}`;
    title.textContent = all.titles[Number(far)];
    const how = `Arrow keys choose a layer and a head${all.off ? ", X turns it off or on" : ""}.`;
    stage.setAttribute("aria-label", `${title.textContent}. ${how}`);
    modes.forEach((each, k) => press(each, far === (k === 1)));
    const mine = headsOf([layer, row]);
    const what = mine.length === 1 ? `head ${row - 2} of layer ${layer}` : `layer ${layer}`;
    turner.hidden = !mine.length || !all.off;
    turner.textContent = mine.every((head) => has(off, head))
      ? `Turn ${what} on`
      : `× Turn ${what} off`;
    reset.hidden = !off.length;
    tell(hovered);
  };
  const under = (event) => {
    const [r, k] = cellUnder(event, canvas, [1 / all.names.length, 1 / columns()]);
    return inside([k, r]) ? [k, r] : null;
  };
  stage.addEventListener("click", (event) => choose(under(event)));
  stage.addEventListener("contextmenu", (event) => {
    event.preventDefault();
    turn(under(event));
  });
  stage.addEventListener("pointermove", (event) => tell(under(event)));
  stage.addEventListener("pointerleave", () => tell(null));
  stage.addEventListener(
    "keydown",
    ({ key }) => ["x", "X", "Delete"].includes(key) && turn(chosen()),
  );
  const update = (described, waiting) => {
    node.hidden = !described;
    if (!described) return;
    all = described;
    if (!waiting()) [aim, off] = [null, described.off || []];
    draw();
  };
  return { node, update };
}

// Contribution of each part to a logit: heads and MLP of each layer, and other parts at the right. A click on a bar or
// an arrow key chooses the head.
function contributions({ heads, mlps, others, layer, head, title, note }, send, aim) {
  const values = [...heads.flat(), ...mlps, ...others.map(([, value]) => value)];
  const { plot, x, y, tick } = chartOf(`${title}. ${note}`, values, "layer");
  const wide = 1 / (heads.length * (heads[0].length + 2) + 2 * others.length); // of a slot, as a share
  let slot = 0.5;
  const go = (k, h) => {
    if (heads[k]?.[h] === undefined) return;
    aim.at = [k, h];
    send({ set: { layer: k, head: h } });
  };
  const bar = (kind, name, value, act) => {
    const [from, to, ends] = [
      x(slot * wide),
      x((slot + 1) * wide),
      [y(value), y(0)].sort((a, b) => a - b),
    ];
    slot += 1;
    const mark = { x: from + 0.08 * (to - from), width: 0.84 * (to - from), y: ends[0] };
    plot.append(
      make(
        "g",
        { class: act && "goes", onclick: act },
        make("title", {}, `${name}: ${value > 0 ? "+" : ""}${shown(value)} logits`),
        make("rect", {
          class: "reach",
          x: from,
          width: to - from,
          y: 8,
          height: HEIGHT - BOTTOM - 8,
        }),
        make("rect", { class: `part ${kind}`, ...mark, height: Math.max(0.7, ends[1] - ends[0]) }),
      ),
    );
  };
  heads.forEach((row, k) => {
    const from = slot;
    row.forEach((value, h) => {
      const now = k === layer && (head === null || h === head);
      bar(now ? "head now" : "head", `layer ${k}, head ${h}`, value, () => go(k, h));
    });
    bar("mlp", `layer ${k}, MLP`, mlps[k]);
    if (k % Math.ceil(heads.length / 12) === 0) tick(((from + slot) / 2) * wide, k);
    slot += 1;
  });
  for (const [name, value] of others) {
    bar("other", name, value);
    slot += 1;
  }
  const move = (down, across) => {
    const [k, h] = aim.at || [layer, head];
    if (k === null) go(0, 0);
    else go(k + across, h === null ? 0 : h - down);
  };
  const hint = "Click the bar of a head, or use the arrow keys, to see its map.";
  const keys = [
    ["heads", "head"],
    ["MLPs", "mlp"],
    [others.map(([name]) => name).join(", "), "other"],
  ];
  const now =
    head === null ? "" : `Layer ${layer}, head ${head}: ${shown(heads[layer][head])} logits. `;
  return [
    make("h3", {}, title),
    steered({ class: "plot", "aria-label": `${title}. ${hint}` }, move, plot),
    keysOf(keys.map(([name, kind]) => [name, `part ${kind}`])),
    make("p", { class: "note" }, `${now}${note} ${hint}`),
  ];
}
