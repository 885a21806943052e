// The tour of eight steps, and what follows the pointer and the space bar.

const STILL = window.matchMedia("(prefers-reduced-motion: reduce)");
const LOOKS = 84; // milliseconds between two maps that follow the pointer: 12 in a second
const LAYER = 600; // milliseconds that a layer is shown
const quoted = (name) => `“${name.split(",")[0]}”`;

// Steps of the tour: title, sentence, and nodes of the picture. about: the answer to {ask: "tour"}.
function stepsOf(about, base) {
  const { rows, cols, patch, image, row, col, layer, pixels, channels, token, position, table, prefix, lens, value } = about;
  const here = { frame: [row, col] };
  const middle = pixels[Math.floor(pixels.length / 2)][Math.floor(pixels[0].length / 2)];
  const color =
    channels === 3
      ? `a red, a green and a blue number: the middle of the framed patch has ${middle.join(", ")}`
      : `${channels} number${channels > 1 ? "s" : ""}: the middle of the framed patch has ${middle[0]}`;
  const size = { width: pixels[0].length, height: pixels.length };
  const near = make("canvas", { class: "pixels", ...size, role: "img", "aria-label": "The pixels of the patch" });
  const enlarged = new ImageData(size.width, size.height);
  pixels.flat().forEach((pixel, i) => enlarged.data.set([...pixel, 255], 4 * i));
  near.getContext("2d").putImageData(enlarged, 0, 0);
  const photo = (marks, label) => mapOf(base, about, [], marks, label);
  const cut = () => {
    const [height, width] = [patch[0] / image[0], patch[1] / image[1]];
    const across = Array.from({ length: rows + 1 }, (_, r) => `M0 ${r * height}H${cols * width}`);
    const down = Array.from({ length: cols + 1 }, (_, c) => `M${c * width} 0V${rows * height}`);
    const node = photo(here, "The photo, cut into patches");
    node.lastChild.prepend(make("path", { class: "grid", d: [...across, ...down].join("") }));
    return [node];
  };
  const others = prefix.length > 1 ? ` with ${prefix.length} prefix tokens` : prefix.length ? ` with the ${prefix[0]}` : "";
  const place = table ? "adds a vector for its place" : "adds no vector for its place here";
  const pair = { ...here, key: patchAt(value, value.key) };
  const [logit, weights] = [shown(value.logits[value.key]), softmax(value.logits)];
  const patches = weights.slice(prefix.length);
  const first = largestOf(patches) === weights[value.key] ? ", the largest on a patch" : "";
  const [before, after] = about.lengths.slice(layer, layer + 2).map(shown);
  const added = about.added[layer].map(shown);
  const moved =
    added.length === 2
      ? `In layer ${layer}, attention adds a vector of length ${added[0]} to the token of length ${before}, and the MLP ` +
        `one of length ${added[1]}`
      : `Layer ${layer} changes the token of length ${before} by a vector of length ${added[0]}`;
  const tops = about.heads.map(largestOf);
  const reach =
    tops.length > 4
      ? `from ${shown(-largestOf(tops.map((top) => -top)))} to ${shown(largestOf(tops))}`
      : tops.map(shown).join(", ");
  const [start, end] = [lens[0], lens.at(-1)].map((each) => each && `${quoted(each[0])} (${each[1]})`);
  const result = lens.length
    ? `the head, reading after each layer, goes from ${start} to ${end}, the model's answer`
    : "as the model has no classes, its tokens are the result";
  const ofHead = (values, head) => {
    const picture = mapOf(base, about, values, here, `Attention of head ${head}`);
    return make("figure", {}, picture, make("figcaption", {}, `head ${head}`));
  };
  return [
    [
      "Pixels",
      `The model sees ${image[0]} × ${image[1]} pixels, each with ${color}.`,
      () => [photo(here, "The model's input"), near],
    ],
    [
      "Patches",
      `The photo is cut into ${rows} × ${cols} = ${rows * cols} patches of ${patch[0]} × ${patch[1]} pixels, ` +
        `${patch[0] * patch[1] * channels} numbers each.`,
      cut,
    ],
    [
      "Tokens and positions",
      `The model turns each patch into a token of ${token.length} numbers and ${place}; there are ` +
        `${weights.length} tokens${others}.`,
      () => {
        const strips = [strip("token", token), ...(position ? [strip("position", position)] : [])];
        return [photo(here, "The framed patch"), make("div", {}, ...strips)];
      },
    ],
    [
      "A query meets a key",
      `In layer ${value.layer}, head ${value.head}, the patch has a query and ${tokenName(value, value.key)} a key: the ` +
        `${value.q.length} products of their numbers, summed and scaled, give ${logit}.`,
      () => [photo(pair, "The two patches"), make("div", {}, ...products(value))],
    ],
    [
      "Softmax",
      `Softmax turns the ${weights.length} results of this query into weights that sum to 1: ${logit} becomes ` +
        `${shown(value.weight)}${first}.`,
      () => {
        const words = make("p", { class: "sum" }, softmaxWords(value));
        return [mapOf(base, about, patches, pair, "Weights of the patches"), make("div", {}, weightBars(value), words)];
      },
    ],
    [
      "Values, heads side by side",
      `Each of the ${tops.length} heads mixes the values of all tokens by weights of its own; the largest on a patch: ` +
        `${reach}.`,
      () => [make("div", { class: "row" }, ...about.heads.map(ofHead))],
    ],
    ["Residual stream and MLP", `${moved}; its length is then ${after}.`, () => [streamChart(about)]],
    [
      "Through the layers",
      `Layer by layer the patch looks elsewhere, and ${result}.`,
      () => depthOf(about, base, here),
    ],
  ];
}

// Lengths of a token after each layer as a line, and of the additions of each layer as bars.
function streamChart({ lengths, added }) {
  const [height, left, bottom] = [190, 30, 34];
  const most = 1.08 * Math.max(...lengths, ...added.flat());
  const x = (k) => left + ((k + 0.5) / added.length) * (WIDTH - left - 6);
  const y = (value) => (1 - value / most) * (height - bottom - 8) + 8;
  const wide = ((WIDTH - left - 6) / added.length) * 0.3;
  const label = `Length of the token after each layer, ${lengths.slice(1).map(shown).join(", ")}`;
  const plot = make("svg", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": label });
  plot.append(...rules(most, 0, y, left));
  const each = Math.ceil(added.length / 12);
  const kinds = added[0].length === 2 ? [["attention", "head"], ["the MLP", "mlp"]] : [["the layer", "head"]];
  added.forEach((parts, k) => {
    parts.forEach((value, i) => {
      const box = { x: x(k) + (i - parts.length / 2) * wide, width: 0.9 * wide, y: y(value), height: y(0) - y(value) };
      const bar = make("rect", { class: `part ${kinds[i][1]}`, ...box });
      bar.append(make("title", {}, `layer ${k}, ${kinds[i][0]}: ${shown(value)}`));
      plot.append(bar);
    });
    if (k % each === 0) plot.append(make("text", { x: x(k), y: height - 19, "text-anchor": "middle" }, k));
  });
  const points = lengths.slice(1).map((value, k) => `${x(k)},${y(value)}`);
  plot.append(make("polyline", { class: "curve", points: points.join(" ") }));
  plot.append(make("text", { x: (WIDTH + left) / 2, y: height - 4, "text-anchor": "middle" }, "layer"));
  const keys = kinds.map(([name, kind]) => make("span", { class: `key part ${kind}` }, `added by ${name}`));
  const line = make("span", { class: "key" }, "length after the layer");
  return make("div", { class: "dots" }, plot, make("p", { class: "keys" }, line, ...keys));
}

// The patch's map in each layer, beside the class after each layer. Plays once, unless motion is reduced.
function depthOf(about, base, marks) {
  const map = make("div", {});
  const show = (layer) => {
    map.replaceChildren(mapOf(base, about, about.depth[layer], marks, `Layer ${layer}, mean of the heads`));
    lines.forEach((line, k) => line.firstChild.setAttribute("aria-pressed", String(k === layer)));
  };
  let timer;
  const lines = about.depth.map((_, layer) => {
    const [name, score] = about.lens[layer] || ["", ""];
    const texts = { layer, name: name.split(",")[0], share: score };
    const parts = Object.entries(texts).map(([kind, text]) => make("span", { class: kind }, text));
    const onclick = () => {
      clearInterval(timer);
      show(layer);
    };
    return make("li", {}, make("button", { type: "button", title: `Layer ${layer}`, onclick }, ...parts));
  });
  const list = make("ol", { class: "bars layers" }, ...lines);
  const end = about.depth.length - 1;
  let at = STILL.matches ? end : 0;
  show(at);
  timer = setInterval(() => (!list.isConnected || at === end ? clearInterval(timer) : show((at += 1))), LAYER);
  return [map, list];
}

// Buttons and panels of this file for a page. send, waiting: of the page. panels: its panels by name.
function guide({ model, root, send, waiting, panels }) {
  const numbers = {}; // of the last question of each kind
  const ask = (kind, content = {}) => model.send({ ask: kind, number: (numbers[kind] = number += 1), ...content }, undefined, []);
  const can = (kind) => Boolean(model.get("frame").asks?.includes(kind));
  const controlled = (name) => model.get("frame").controls.find((each) => each.name === name);
  const panel = () => panels.get("picture");
  const image = () => pixelsOf(model.get("pictures").picture);

  // The map follows the pointer
  let [target, asked, seen, last, pinned] = [null, null, null, 0, null];
  const look = () => {
    if (!target || asked || waiting() || [seen, panel().panel().selected].some((each) => same(target, each))) return;
    const rest = model.near ? 0 : last + LOOKS - performance.now();
    if (rest > 0) return setTimeout(look, rest);
    [asked, seen, last] = [target, target, performance.now()];
    ask("look", { row: asked[0], col: asked[1] });
  };
  const leave = () => {
    [target, seen] = [null, null];
    panel()?.peek(null);
  };
  root.addEventListener("pointermove", (event) => {
    const over = panel()?.node.querySelector(".picture").contains(event.target);
    const follows = over && can("look") && controlled("hover")?.value && event.pointerType !== "touch" && !event.buttons;
    const cell = follows && !event.shiftKey && !STILL.matches ? panel().cell() : null;
    if (over && (event.shiftKey || !follows)) key = panel().cell() || key;
    if (same(cell, target)) return;
    target = cell;
    if (!cell || same(cell, panel().panel().selected)) {
      seen = null;
      panel()?.peek(null);
    }
    look();
    line();
  });
  root.addEventListener("pointerleave", leave);
  root.addEventListener("keydown", leave);

  // The value under the picture
  let key = null; // the patch that was last under the pointer, else the one with the largest weight
  const how = make("button", { type: "button", class: "button small how", onclick: () => openValue({ key: chosen() }) });
  const detail = make("section", { class: "detail", "aria-label": "How this weight comes about", hidden: true });
  const chosen = () => {
    const { rows, cols, values, selected } = panel().panel();
    if (key && key[0] < rows && key[1] < cols) return key;
    const weights = floatsOf(values);
    if (selected) weights[selected[0] * cols + selected[1]] = 0;
    const most = weights.indexOf(largestOf(weights));
    return [Math.floor(most / cols), most % cols];
  };
  const line = () => {
    how.hidden = !can("value");
    if (how.hidden) return (detail.hidden = true);
    const [row, col] = chosen();
    const { values, cols } = panel().panel();
    how.textContent = `${shown(floatsOf(values)[row * cols + col])} of the attention on row ${row}, column ${col}: how?`;
  };
  const closeValue = () => {
    detail.hidden = true;
    detail.replaceChildren();
    how.focus();
  };
  const openValue = (content) => {
    key = content.key;
    line();
    detail.hidden = false;
    ask("value", content);
  };
  detail.addEventListener("keydown", (event) => event.key === "Escape" && closeValue());
  root.addEventListener("pointerdown", (event) => {
    if (!event.shiftKey || !can("value") || !panel()?.node.querySelector(".picture").contains(event.target)) return;
    event.stopPropagation();
    if (panel().cell()) openValue({ key: panel().cell() });
  }, true);

  // The tour
  const dialog = make("dialog", { class: "tour", "aria-label": "Tour" });
  let [steps, step] = [[], 0];
  const go = (to) => {
    step = Math.min(Math.max(to, 0), steps.length - 1);
    const [title, sentence, draw] = steps[step];
    const label = make("p", { class: "note" }, `Step ${step + 1} of ${steps.length}`);
    const dots = steps.map(([name], k) => {
      const current = k === step ? "step" : null;
      const dot = { type: "button", class: "stop", title: name, "aria-label": `Step ${k + 1}: ${name}` };
      return make("button", { ...dot, "aria-current": current, onclick: () => go(k) });
    });
    const plain = { type: "button", class: "button" };
    const button = (text, onclick, disabled) => make("button", { ...plain, onclick, disabled }, text);
    const { tour: inline } = model.get("frame");
    const end = inline ? button("Start again", () => go(0)) : button("Close", () => dialog.close());
    const next = step === steps.length - 1 ? end : button("Next", () => go(step + 1));
    const closer = make("button", { ...plain, class: "button small", "aria-label": "Close the tour", onclick: () => dialog.close() }, "×");
    const held = !inline || dialog.contains(document.activeElement);
    dialog.replaceChildren(
      make("header", {}, make("h3", {}, title), label, ...(inline ? [] : [closer])),
      make("p", { class: "sentence", "aria-live": "polite" }, sentence),
      make("div", { class: "stage" }, ...draw()),
      make("nav", {}, button("Back", () => go(step - 1), !step), make("span", { class: "stops" }, ...dots), next),
    );
    if (held) next.focus();
  };
  dialog.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    go(step + by);
  });
  const tour = make("button", { type: "button", class: "button", onclick: () => ask("tour") }, "Tour");

  // Playing through the layers
  let playing = false;
  let timer;
  const pause = (now = false) => {
    playing = now;
    clearTimeout(timer);
    player.textContent = playing ? "⏸ Pause" : "▶ Play layers";
  };
  const forward = () => {
    const { value, high, hidden, disabled } = controlled("layer");
    if (hidden || disabled || value >= high) return pause();
    send({ set: { layer: value + 1 } });
  };
  const play = () => {
    if (playing) return pause();
    const { value, high } = controlled("layer");
    if (value >= high) send({ set: { layer: 0 } });
    else forward();
    pause(!STILL.matches);
  };
  const player = make("button", { type: "button", class: "button", title: "Space", onclick: play }, "▶ Play layers");
  const space = (event) => {
    const busy = event.target.closest("button, select, input, textarea, summary, a, dialog, [contenteditable=true]");
    if (event.key !== " " || busy || player.hidden || !root.isConnected) return;
    event.preventDefault();
    play();
  };
  const listening = document.documentElement.classList.contains("vitlens-page") ? document : root;
  listening.addEventListener("keydown", space, true);

  root.append(dialog);
  return {
    buttons: [tour, player],
    drawn() {
      const { controls, tour: inline } = model.get("frame");
      const layer = controls.find(({ name }) => name === "layer");
      [tour.hidden, player.hidden] = [!can("tour"), !layer || layer.hidden || layer.disabled || !can("tour")];
      if (!panel()) return;
      if (!how.isConnected) panel().node.querySelector(".beneath").after(how);
      if (!detail.isConnected) panel().node.append(detail);
      const { selected } = panel().panel();
      if (!same(selected, pinned)) [target, key, pinned] = [null, null, selected];
      seen = null;
      line();
      if (!detail.hidden && !waiting()) ask("value", { key: chosen() });
      look();
      clearTimeout(timer);
      if (playing && !waiting()) timer = setTimeout(forward, LAYER);
      if (inline && !steps.length) ask("tour");
    },
    async answered({ ask: kind, number: asking, answer }, buffers) {
      if (kind === "look") {
        asked = null;
        const [values, colors] = buffers;
        if (target && !answer.problem) panel().peek({ ...answer, values, scale: { ...answer.scale, colors } });
        return look();
      }
      if (asking !== numbers[kind] || answer.problem) return;
      const base = await image();
      if (kind === "value") {
        const held = detail.querySelector(".picture:focus");
        detail.replaceChildren(...openedValue(answer, base, openValue, closeValue));
        if (held) detail.querySelector(".picture").focus();
        return;
      }
      steps = stepsOf(answer, base);
      const { tour: inline } = model.get("frame");
      root.classList.toggle("touring", Boolean(inline));
      if (!dialog.open && inline) dialog.show();
      else if (!dialog.open) dialog.showModal();
      go(0);
    },
    stop: () => listening.removeEventListener("keydown", space, true),
  };
}
