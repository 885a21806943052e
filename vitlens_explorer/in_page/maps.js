// The map of a view and its caption, as in views.py: (record, {layer, head, query, target}) → {values, words, …}.

function queryRow(record, query) {
  if (query === "readout") return record.grid.readout;
  const row = new Float32Array(tokenCount(record.grid));
  row[
    Array.isArray(query)
      ? record.grid.prefix.length + query[0] * record.grid.cols + query[1]
      : query
  ] = 1;
  return row;
}

function queryWords(record, query) {
  if (query === "readout") return say("readout", { readout: record.grid.reads });
  if (Array.isArray(query)) return say("patch", { row: query[0], column: query[1] });
  return say("token", { token: record.grid.prefix[query] });
}

// One map of those of the heads, or their mean or maximum.
function fuse(maps, head) {
  if (typeof head === "number") return maps[head];
  const fused = maps[0].slice();
  for (const map of maps.slice(1))
    for (let t = 0; t < map.length; t += 1)
      fused[t] = head === "max" ? Math.max(fused[t], map[t]) : fused[t] + map[t];
  return head === "max" ? fused : fused.map((sum) => sum / maps.length);
}

const patchesOf = (record, values) => Float32Array.from(values.slice(record.grid.prefix.length));
const prefixOf = (record, values) => sumOf(values.slice(0, record.grid.prefix.length));
const headWords = (head) => (typeof head === "number" ? say("head", { head }) : say(head));
const gateWords = (record) => (record.gated ? say("gated") : "");
const scoreWords = (record, score) => (record.outputs === "value" ? number(score) : percent(score));
const prefixWords = ({ grid: { prefix } }) =>
  prefix.length === 1
    ? say("token", { token: prefix[0] })
    : say("prefix", { count: prefix.length });

const restWords = (name, record, share) =>
  say(name, { share: percent(share), rest: percent(1 - share), prefix: prefixWords(record) });

const MAPS = {
  attention(record, { layer, head, query }) {
    const row = queryRow(record, query);
    const values = fuse(read(record, layer, row), head);
    let source = queryWords(record, query);
    if (row.filter(Boolean).length > 1) source = say("averaged", { source });
    let words = say("attention", { source, layer, heads: headWords(head) });
    if (record.grid.prefix.length && head !== "max")
      words += restWords("attention prefix", record, prefixOf(record, values));
    else if (record.grid.prefix.length) words += say("not rescaled");
    const prefix = [...values.slice(0, record.grid.prefix.length)];
    return { values: patchesOf(record, values), words: words + gateWords(record), prefix };
  },
  received(record, { layer, head }) {
    const words = say("received", { layer, heads: headWords(head) });
    const rest = record.grid.prefix.length ? say("not rescaled") : "";
    const values = patchesOf(record, fuse(sweep(record, layer).received, head));
    return { values, words: words + rest + gateWords(record) };
  },
  rollout(record, { layer, head, query }) {
    const values = patchesOf(record, rollout(record, layer, queryRow(record, query), head));
    let words = say("rollout", {
      source: queryWords(record, query),
      layer,
      heads: headWords(head),
    });
    if (record.grid.prefix.length) words += restWords("rollout prefix", record, 1 - sumOf(values));
    const prefix = record.grid.prefix.length === 1 ? [1 - sumOf(values)] : [];
    return { values, words: words + gateWords(record), prefix };
  },
  similarity(record, { layer, query }) {
    const values = patchesOf(
      record,
      cosines(record.tokens[layer], record.grid, queryRow(record, query)),
    );
    const own =
      Array.isArray(query) && values.length > 1 ? query[0] * record.grid.cols + query[1] : -1;
    const limit = values.reduce(
      (most, value, patch) => (patch === own ? most : Math.max(most, Math.abs(value))),
      0,
    );
    return {
      values,
      words: say("similarity", { layer, source: queryWords(record, query) }),
      limit,
    };
  },
  components(record, { layer }) {
    const { colors, shares } = components(record.tokens[layer], record.grid);
    return {
      values: colors,
      words: say("components", { layer, shares: shares.map(percent).join(", ") }),
    };
  },
  norms(record, { layer }) {
    const lengths = norms(record.tokens[layer], record.grid);
    const values = patchesOf(record, lengths);
    const [sorted, middle] = [values.toSorted(), (values.length - 1) / 2];
    const median = (sorted[Math.floor(middle)] + sorted[Math.ceil(middle)]) / 2;
    const words = say("norms", { layer, median: number(median) });
    const [token] = record.grid.prefix;
    return {
      values,
      words: words + (token ? say("norms prefix", { token, length: number(lengths[0]) }) : ""),
    };
  },
  lens(record, { layer, query, target }) {
    const plain = record.outputs === "value";
    const quantity = say(plain ? "value" : "probability");
    const place = query === "readout" ? 0 : 1 + queryRow(record, query).indexOf(1); // the read-out is the first
    const row = (lens, layer) => ({
      layer,
      name: record.label(lens.classes[place]),
      share: lens.shares[place],
      plain,
    });
    const rows = record.lens.flatMap((lens, k) => (lens ? row(lens, k) : []));
    let who =
      query === "readout"
        ? say("lens readout", { readout: record.grid.reads })
        : queryWords(record, query);
    who = who[0].toUpperCase() + who.slice(1);
    const { name: best, share } = rows.find((row) => row.layer === layer);
    const [name, score] = [record.label(target), scoreWords(record, share)];
    const words = say("lens", { layer, quantity, name, who, best, score });
    const lens = { title: say("lens title", { who }), layer, rows, note: say("lens note") };
    return { values: record.lens[layer].of[target], words, unit: quantity, beside: { lens } };
  },
  contributions(record, { layer, head, target, against }) {
    const { written, logit, ...chart } = record.contributions[pairOf(target, against)];
    const [tokens, first] = [tokenCount(record.grid), layer * record.heads];
    const one = [first + head, first + head + 1];
    const chosen = { every: [0, Infinity], sum: [first, first + record.heads] }[head] || one;
    const sums = new Float64Array(tokens);
    written
      .subarray(...chosen.map((part) => part * tokens))
      .forEach((value, at) => (sums[at % tokens] += value));
    const whose = { every: "all layers", sum: "all heads" }[head] || "one head";
    const signed = (value) => (value >= 0 ? "+" : "") + number(value);
    const name = record.label(target);
    const minus = against === null ? "" : say("minus", { name: record.label(against) });
    const patches = signed(sumOf(patchesOf(record, sums)));
    let words = say("contributions", { whose: say(whose, { layer, head }), name, minus, patches });
    if (record.grid.prefix.length)
      words += say("contributions prefix", {
        share: signed(prefixOf(record, sums)),
        prefix: prefixWords(record),
      });
    words += say("contributions logit", { logit: number(logit) });
    const parts = {
      ...chart,
      layer: head === "every" ? null : layer,
      head: typeof head === "number" ? head : null,
    };
    return { values: patchesOf(record, sums), words, beside: { parts } };
  },
};

// A map of an attribution method, as Python or a forward in this page computed it.
const explained = (record, { target, against }, view) => record.maps[view][pairOf(target, against)];

// (256) RGBA colors of a scale from low to high, with an opacity for each value.
function colorsOf({ low, high }, map, strength, opacity) {
  const [table, levels] = [new Uint8Array(1024), bytesOf(map)];
  for (let i = 0; i < 256; i += 1) {
    table.set(levels.subarray(3 * i, 3 * i + 3), 4 * i);
    table[4 * i + 3] = Math.round(255 * strength * opacity(low + ((high - low) * i) / 255));
  }
  return new DataView(table.buffer);
}

// The color scale of a map, as `scale_of` and `Scale.table` in panels.py.
function scaleOf(
  values,
  limit,
  { colors, stretch, strength, opacity },
  { maps, plain, signed, least },
) {
  const [lowest, most] = [smallestOf(values), largestOf(values)];
  const both = !stretch && (limit !== undefined || lowest < 0);
  const high = stretch ? most : (limit ?? (Math.max(-lowest, most) || 1));
  const low = stretch ? lowest : both ? -high : 0;
  const zero = Math.min(Math.max(0, low), high);
  const farthest = Math.max(high - zero, zero - low) || 1;
  const floor = low < 0 && high > 0 ? least : 0;
  const share = (value) =>
    opacity === "value" ? Math.max(Math.abs(value - zero) / farthest, floor) : 1;
  return {
    low,
    high,
    colors: colorsOf({ low, high }, maps[colors || (both ? signed : plain)], strength, share),
  };
}

const CELLS = 16; // largest number of rows and of columns of a map in the mosaic

// Attention from a query in all heads, as `head_maps` in views.py. Layers that were left out are blank.
function tilesOfHeads(record, weights) {
  const { rows, cols } = record.grid;
  const [r, c] = [Math.min(rows, CELLS), Math.min(cols, CELLS)];
  const maps = new Uint8Array(record.layers.length * (record.heads + 2) * r * c);
  let at = 0;
  const tops = record.layers.map((stored, layer) => {
    const heads = stored
      ? read(record, layer, weights).map((values) => patchesOf(record, values))
      : [];
    const blank = Array(record.heads + 2).fill(new Float32Array(rows * cols));
    return (stored ? [fuse(heads, "mean"), fuse(heads, "max"), ...heads] : blank).map((tile) => {
      const top = largestOf(tile);
      for (let y = 0; y < r; y += 1)
        for (let x = 0; x < c; x += 1, at += 1) {
          let most = 0;
          for (let a = Math.floor((y * rows) / r); a < ((y + 1) * rows) / r; a += 1)
            for (let b = Math.floor((x * cols) / c); b < ((x + 1) * cols) / c; b += 1)
              if (tile[a * cols + b] > most) most = tile[a * cols + b];
          maps[at] = Math.round((255 * most) / Math.max(top, 1e-30));
        }
      return top;
    });
  });
  return { maps: new DataView(maps.buffer), tops, rows: r, cols: c };
}

// Tiles of the queries besides patches, with the shares of the prefix tokens.
function tilesOf({ grid: { prefix, readout, reads } }, shares, { query }) {
  const tiles = prefix.map((name, position) => {
    const share = shares.length ? percent(shares[position]) : "";
    return { query: readout && name === reads ? "readout" : position, name, share };
  });
  if (readout && !prefix.includes(reads))
    tiles.unshift({ query: "readout", name: reads, share: "" });
  return tiles.map((tile) => ({ ...tile, now: tile.query === query }));
}

// Patches that receive more than `sink` times the median attention in a layer, and `even` times an even share.
function sinksOf(record, layer, { sink, even }) {
  const received = patchesOf(record, fuse(sweep(record, layer).received, "mean"));
  const median = [...received].sort((a, b) => a - b)[Math.floor((received.length - 1) / 2)];
  const { cols, prefix } = record.grid;
  const least = Math.max(sink * median, even / (prefix.length + received.length));
  return [...received.keys()]
    .filter((i) => received[i] > least)
    .map((i) => [Math.floor(i / cols), i % cols]);
}

// The panel of a map over its image, as `map_panel` in views.py.
function panelOfMap(record, view, choice, map, state, tables) {
  const { rows, cols, patch, image } = record.grid;
  const kind = state.view === "received" ? "attention" : state.view;
  const { values, limit, prefix = [], unit = WORDS[`${kind} unit`] || "" } = map;
  let words = `${map.words}.`;
  const colored = values.length > rows * cols;
  let scale = colored ? null : scaleOf(values, limit, state, tables);
  let legend = limit && !state.stretch ? say("similarity scale", { unit }) : unit;
  const sinks = tables.looking.includes(state.view) ? sinksOf(record, choice.layer, tables) : [];
  const hides = Boolean(sinks.length && state.sinks && !state.stretch);
  if (scale)
    words += say("range", { low: number(smallestOf(values)), high: number(largestOf(values)) });
  words += say("input", { height: image[0], width: image[1] });
  [
    ["bottom", rows],
    ["right", cols],
  ].forEach(([side, count], i) => {
    const over = image[i] - count * patch[i];
    if (over > 0) words += say("cut", { pixels: over, where: say(side) });
    if (over < 0) words += say("padded", { pixels: -over, where: say(side) });
  });
  const [times, even] = [tables.sink, tables.even].map(number);
  if (sinks.length) words += say("sinks", { count: sinks.length, times, even });
  if (hides) {
    const others = Float32Array.from(values);
    for (const [row, col] of sinks) others[row * cols + col] = 0;
    [scale, legend] = [scaleOf(others, limit, state, tables), say("hidden", { unit: legend })];
  }
  const { strength, opacity, smooth, lines } = state;
  const asked = view.query && { tokens: tilesOf(record, prefix, state), picks: say("look from") };
  return {
    name: "picture",
    title: map.title || view.title,
    picture: "picture",
    rows,
    cols,
    words: words + (record.note || ""),
    cell: [patch[0] / image[0], patch[1] / image[1]],
    unit,
    scale,
    strength,
    opacity,
    smooth,
    lines,
    legend,
    sinks,
    hides,
    tokens: [],
    picks: "",
    ...asked,
    selected: asked && Array.isArray(choice.query) ? choice.query : null,
    values: new DataView(values.buffer, values.byteOffset, values.byteLength),
    ends: scale && [number(scale.low), number(scale.high)],
  };
}
