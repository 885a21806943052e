// The tour of eight steps, the map that follows the pointer, the opened value, and playing through the layers.

const STILL = window.matchMedia("(prefers-reduced-motion: reduce)");
const LOOKS = 84; // milliseconds between two maps that follow the pointer: 12 in a second
const LAYER = 600; // milliseconds that a layer is shown

// Steps of the tour: title, sentence, and nodes of the picture. about: the answer to {ask: "tour"}.
function stepsOf(about, base) {
  const { rows, cols, patch, image, row, col, pixels, token, position, prefix, sentences, value } =
    about;
  const here = { frame: [row, col] };
  const pair = { ...here, key: patchAt(value, value.key) };
  const photo = (marks, label) => mapOf(base, about, [], marks, label);
  const near = Uint8ClampedArray.from(pixels.flat().flatMap((pixel) => [...pixel, 255]));
  const enlarged = canvasOf(new ImageData(near, pixels[0].length), "The pixels of the patch", {
    class: "pixels",
  });
  const cut = () => {
    const node = photo(here, "The photo, cut into patches");
    node.lastChild.prepend(
      gridLines({ rows, cols, cell: [patch[0] / image[0], patch[1] / image[1]] }),
    );
    return [node];
  };
  const patches = softmax(value.logits).slice(prefix.length);
  const vectors = () => [strip("token", token), position ? strip("position", position) : ""];
  const ofHead = (values, head) =>
    make(
      "figure",
      {},
      mapOf(base, about, values, here, `Head ${head}`),
      make("figcaption", {}, `head ${head}`),
    );
  const steps = {
    Pixels: () => [photo(here, "The model's input"), enlarged],
    Patches: cut,
    "Tokens and positions": () => [photo(here, "The framed patch"), make("div", {}, ...vectors())],
    "A query meets a key": () => [
      photo(pair, "The two patches"),
      make("div", {}, ...products(value)),
    ],
    Softmax: () => [mapOf(base, about, patches, pair, "Weights of the patches"), weighing(value)],
    "Values, heads side by side": () => [make("div", { class: "row" }, ...about.heads.map(ofHead))],
    "Residual stream and MLP": () => [streamChart(about)],
    "Through the layers": () => depthOf(about, base, here),
  };
  return Object.entries(steps).map(([title, draw], k) => [title, sentences[k], draw]);
}

// Lengths of a token after each layer as a line, and of the additions of each layer as bars.
function streamChart({ lengths, added }) {
  const label = `Length of the token after each layer: ${lengths.slice(1).map(shown).join(", ")}`;
  const { plot, x, y, tick } = chartOf(label, [...lengths, ...added.flat()], "layer");
  const [middle, wide] = [(k) => (k + 0.5) / added.length, 0.3 / added.length];
  const kinds =
    added[0].length === 2
      ? [
          ["attention", "head"],
          ["the MLP", "mlp"],
        ]
      : [["the layer", "head"]];
  added.forEach((parts, k) => {
    parts.forEach((value, i) => {
      const from = middle(k) + (i - parts.length / 2) * wide;
      const box = {
        x: x(from),
        width: 0.9 * (x(wide) - x(0)),
        y: y(value),
        height: y(0) - y(value),
      };
      const title = make("title", {}, `layer ${k}, ${kinds[i][0]}: ${shown(value)}`);
      plot.append(make("rect", { class: `part ${kinds[i][1]}`, ...box }, title));
    });
    if (k % Math.ceil(added.length / 12) === 0) tick(middle(k), k);
  });
  const points = lengths
    .slice(1)
    .map((value, k) => `${x(middle(k))},${y(value)}`)
    .join(" ");
  plot.append(make("polyline", { class: "curve", points }));
  const keys = kinds.map(([name, kind]) => [`added by ${name}`, `part ${kind}`]);
  return make("div", { class: "dots" }, plot, keysOf([["token", ""], ...keys]));
}

// The patch's map in each layer, beside the class after each layer. Plays once, unless motion is reduced.
function depthOf(about, base, marks) {
  const { depth, lens, plain } = about;
  const [map, list] = [make("div"), make("div", { class: "depth" })];
  const rows = depth.map((values, layer) => ({
    layer,
    name: "",
    share: largestOf(values),
    plain: true,
  }));
  lens.forEach(([name, share], k) => Object.assign(rows[k], { name, share, plain }));
  const note = lens.length ? "" : "The largest weight on a patch in each layer.";
  let timer;
  const show = (at, plays) => {
    const held = list.contains(document.activeElement);
    map.replaceChildren(mapOf(base, about, depth[at], marks, `Layer ${at}, mean of the heads`));
    const chosen = { title: `After layer ${at}`, rows, layer: at, note };
    list.replaceChildren(...classes(chosen, ({ set }) => show(set.layer, false)));
    if (held) list.querySelector("[aria-pressed=true]").focus();
    clearTimeout(timer);
    if (plays && at < depth.length - 1)
      timer = setTimeout(() => list.isConnected && show(at + 1, true), LAYER);
  };
  show(STILL.matches ? depth.length - 1 : 0, !STILL.matches);
  return [map, list];
}

// Buttons of the page for what this file does. send, waiting: of the page. panels: its panels by name.
function guide({ model, root, send, waiting, panels }) {
  const numbers = {}; // of the last question of each kind
  const ask = (kind, more) =>
    model.send({ ask: kind, number: (numbers[kind] = number += 1), ...more }, undefined, []);
  const can = (kind) => Boolean(model.get("frame").asks?.includes(kind));
  const controlled = (name) => model.get("frame").controls.find((each) => each.name === name);
  const map = () => panels.get("picture");
  const over = ({ target }) => map()?.node.querySelector(".picture").contains(target);

  // The map follows the pointer.
  let [target, asked, seen, last, pinned] = [null, null, null, 0, null]; // patches, and the time of the last question
  const look = () => {
    if (!target || asked || waiting() || same(target, seen) || same(target, pinned)) return;
    const rest = model.near ? 0 : last + LOOKS - performance.now();
    if (rest > 0) return setTimeout(look, rest);
    [asked, seen, last] = [target, target, performance.now()];
    ask("look", { row: asked[0], col: asked[1] });
  };
  const leave = (to = null) => {
    target = to;
    if (to && !same(to, pinned)) return look();
    seen = null;
    map()?.peek(null);
  };
  const onpointermove = (event) => {
    const follows =
      can("look") && controlled("hover")?.value && event.pointerType !== "touch" && !STILL.matches;
    const cell = over(event) && !event.buttons ? map().cell() : null;
    if (cell && (event.shiftKey || !follows)) key = cell;
    leave(follows && !event.shiftKey ? cell : null);
    line();
  };

  // The value under the picture: of the patch that was last under the pointer, or of the one with the largest weight.
  let key = null;
  const how = small("", () => openValue({ key: chosen() }), { class: "button small how" });
  const detail = make("section", {
    class: "detail",
    "aria-label": "How this weight comes about",
    hidden: true,
  });
  const chosen = () => {
    const { cols, values } = map().panel();
    const weights = floatsOf(values);
    const most = weights.indexOf(
      largestOf(weights.filter((_, at) => !pinned || at !== pinned[0] * cols + pinned[1])),
    );
    return key || [Math.floor(most / cols), most % cols];
  };
  const line = () => {
    how.hidden = !can("value");
    if (how.hidden) return (detail.hidden = true);
    const [[row, col], { values, cols }] = [chosen(), map().panel()];
    const weight = shown(floatsOf(values)[row * cols + col]);
    how.textContent = `${weight} of the attention on row ${row}, column ${col}: how?`;
  };
  const closeValue = () => {
    detail.hidden = true;
    detail.replaceChildren();
    how.focus();
  };
  const openValue = (content) => {
    key = content.key;
    line();
    if (detail.hidden) detail.replaceChildren();
    detail.hidden = false;
    ask("value", content);
  };
  detail.addEventListener("keydown", (event) => event.key === "Escape" && closeValue());
  const onpointerdown = (event) => {
    if (playing && !actions.contains(event.target) && !over(event)) play(false);
    if (!event.shiftKey || !can("value") || !over(event)) return;
    event.stopPropagation(); // the query stays
    if (map().cell()) openValue({ key: map().cell() });
  };

  // The tour.
  let [steps, step, toured] = [[], 0, null]; // toured: name of the photo
  const dialog = make("dialog", {
    class: "tour",
    "aria-label": "Tour",
    onkeydown: (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (by) go(step + by);
    },
  });
  const go = (to) => {
    const { tour: inline } = model.get("frame");
    step = Math.min(Math.max(to, 0), steps.length - 1);
    const [title, sentence, draw] = steps[step];
    const dots = steps.map(([name], k) => {
      const more = { class: "stop", title: name, "aria-label": `Step ${k + 1}: ${name}` };
      return button("", () => go(k), { ...more, "aria-current": k === step && "step" });
    });
    const end = inline ? button("Start again", () => go(0)) : button("Close", () => dialog.close());
    const next = step === steps.length - 1 ? end : button("Next", () => go(step + 1));
    const closer = small("×", () => dialog.close(), {
      "aria-label": "Close the tour",
      hidden: inline,
    });
    const label = make("span", { class: "note" }, `Step ${step + 1} of ${steps.length}`);
    const held = !inline || dialog.contains(document.activeElement);
    dialog.replaceChildren(
      make("header", {}, make("h3", {}, title), label, closer),
      make("p", { class: "sentence", "aria-live": "polite" }, sentence),
      make("div", { class: "scene" }, ...draw()),
      make(
        "nav",
        {},
        button("Back", () => go(step - 1), { disabled: !step }),
        make("span", {}, ...dots),
        next,
      ),
    );
    if (held) next.focus({ preventScroll: true });
  };

  // Playing through the layers.
  let [playing, timer] = [false, 0];
  const play = (now) => {
    playing = now;
    clearTimeout(timer);
    player.textContent = now ? "❚❚ Pause" : "▶ Play layers";
  };
  const forward = () => {
    const { value, high, options } = controlled("layer");
    const all = options.length ? options.map(([, layer]) => layer) : [...Array(high + 1).keys()];
    const layer = all[all.indexOf(value) + 1] ?? (playing ? null : all[0]); // from the last, the first follows
    if (layer === null || player.hidden) return play(false);
    send({ set: { layer } });
  };
  const toggle = () => {
    if (!playing) forward();
    play(!playing && !STILL.matches);
  };
  const player = small("▶ Play layers", toggle, { title: "Space" });
  const actions = make("div", { class: "actions" }, player, how);
  const space = (event) => {
    const busy = event.target.closest(
      "button, select, input, textarea, summary, a, dialog, [contenteditable=true]",
    );
    if (event.key !== " " || busy || player.hidden) return;
    event.preventDefault();
    toggle();
  };

  const tour = button("Tour", () => ask("tour"));
  const keys = ALONE ? document : root;
  keys.addEventListener("keydown", space, true);
  root.addEventListener("pointermove", onpointermove);
  root.addEventListener("pointerleave", () => leave());
  root.addEventListener("keydown", () => leave());
  root.addEventListener("pointerdown", onpointerdown, true);
  root.append(dialog);
  return {
    tour,
    drawn() {
      tour.hidden = !can("tour");
      const layer = controlled("layer");
      player.hidden = !model.get("frame").asks || !layer || layer.hidden || layer.disabled;
      if (!map()) return;
      if (!how.isConnected) map().node.querySelector(".beneath").after(actions);
      if (!detail.isConnected) map().node.append(detail);
      const { selected, rows, cols } = map().panel();
      const moved = !same(selected, pinned) || key?.[0] >= rows || key?.[1] >= cols;
      if (moved) [target, key, pinned] = [null, null, selected];
      seen = null;
      line();
      if (!detail.hidden && !waiting()) ask("value", { key: chosen() });
      look();
      clearTimeout(timer);
      if (playing && !waiting()) timer = setTimeout(forward, LAYER);
      const photo = controlled("photograph")?.value;
      if (model.get("frame").tour && photo !== toured) ask("tour");
      toured = photo;
    },
    async answered({ ask: kind, number: asking, answer }, buffers) {
      const [colors, values] = [buffers.at(-1), buffers[0]];
      if (kind === "look") {
        asked = null;
        if (target && !answer.problem)
          map().peek({ ...answer, values, scale: { ...answer.scale, colors } });
        return look();
      }
      const { whole: base } = await pixelsOf(model.get("pictures").picture);
      if (asking !== numbers[kind] || answer.problem || (kind === "value" && detail.hidden)) return;
      if (kind === "value") {
        const [fresh, held] = [!detail.firstChild, detail.querySelector(".picture:focus")];
        detail.replaceChildren(...openedValue({ ...answer, colors }, base, openValue, closeValue));
        if (fresh) detail.scrollIntoView({ block: "nearest" });
        return held && detail.querySelector(".picture").focus();
      }
      steps = stepsOf({ ...answer, colors }, base);
      root.classList.toggle("touring", Boolean(model.get("frame").tour));
      if (!dialog.open) dialog[model.get("frame").tour ? "show" : "showModal"]();
      go(0);
    },
    stop: () => keys.removeEventListener("keydown", space, true),
  };
}
