// The tour of eight steps, the map that follows the pointer, the opened value, and playing through the layers.

const STILL = window.matchMedia("(prefers-reduced-motion: reduce)");
const LOOKS = 84; // milliseconds between two maps that follow the pointer: 12 in a second
const GLANCE = 900; // milliseconds for which the first gesture shows the map of a patch
const LINKED = Boolean(location.hash); // the page was opened by a link to a state
const GLANCED = "vitlens-glanced"; // key of the session: the first gesture has been shown
const LAYER = 600; // milliseconds for which playing shows a layer
const BUSY = "button, select, input, textarea, summary, a, dialog, [contenteditable=true]"; // which take the space key

// The step's title, and a function that makes its nodes, for each step. about: the answer to {ask: "tour"}.
function makeScenes(about, base) {
  const { rows, cols, patch, image, row, col, pixels, token, position, prefix, value } = about;
  const here = { frame: [row, col] };
  const pair = { ...here, key: patchAt(value, value.key) };
  const makePhoto = (marks, label) => makeMap(base, about, [], marks, label);
  const makePixels = () => {
    const levels = Uint8ClampedArray.from(pixels.flat().flatMap((pixel) => [...pixel, 255]));
    const enlarged = new ImageData(levels, pixels[0].length);
    return makeCanvas(enlarged, "The pixels of the patch", { class: "pixels" });
  };
  const makePatches = () => {
    const node = makePhoto(here, "The photo, cut into patches");
    const cell = [patch[0] / image[0], patch[1] / image[1]];
    node.lastChild.prepend(makeGrid({ rows, cols, cell }));
    return node;
  };
  const makeVectors = () => {
    const added = position ? makeStrip("position", position) : "";
    return make("div", {}, makeStrip("token", token), added);
  };
  const makeWeights = () => {
    const weights = softmax(value.logits).slice(prefix.length);
    const map = makeMap(base, about, weights, pair, "Weights of the patches");
    return make("figure", {}, map, make("figcaption", {}, rangeWords(weights)));
  };
  const makeHead = (values, head) => {
    const map = makeMap(base, about, values, here, `Head ${head}`);
    return make("figure", {}, map, make("figcaption", {}, `head ${head}: ${rangeWords(values)}`));
  };
  return [
    ["Pixels", () => [makePhoto(here, "The model's input"), makePixels()]],
    ["Patches", () => [makePatches()]],
    ["Tokens and positions", () => [makePhoto(here, "The framed patch"), makeVectors()]],
    [
      "A query meets a key",
      () => [makePhoto(pair, "The two patches"), make("div", {}, ...makeProducts(value))],
    ],
    ["Softmax", () => [makeWeights(), makeSoftmax(value)]],
    [
      "Values, heads side by side",
      () => [make("div", { class: "row" }, ...about.heads.map(makeHead))],
    ],
    ["Residual stream and MLP", () => [makeStreamChart(about)]],
    ["Through the layers", () => makeDepth(about, base, here)],
  ];
}

// Lengths of a token after each layer as a line, and of the additions of each layer as bars.
function makeStreamChart({ lengths, added }) {
  const after = lengths.slice(1);
  const label = `Length of the token after each layer: ${after.map(formatNumber).join(", ")}`;
  const { plot, x, y, tick } = makeChart(label, [...lengths, ...added.flat()], "layer");
  const middleOf = (k) => (k + 0.5) / added.length;
  const wide = 0.3 / added.length; // of a bar, as a share
  let kinds = [["the layer", "head"]];
  if (added[0].length === 2) {
    kinds = [
      ["attention", "head"],
      ["the MLP", "mlp"],
    ];
  }
  added.forEach((parts, k) => {
    parts.forEach((value, i) => {
      const [name, kind] = kinds[i];
      const left = x(middleOf(k) + (i - parts.length / 2) * wide);
      const width = 0.9 * (x(wide) - x(0));
      const box = { x: left, width, y: y(value), height: y(0) - y(value) };
      const title = make("title", {}, `layer ${k}, ${name}: ${formatNumber(value)}`);
      plot.append(make("rect", { class: `part ${kind}`, ...box }, title));
    });
    if (k % Math.ceil(added.length / MOST_TICKS) === 0) tick(middleOf(k), k);
  });
  const points = after.map((value, k) => `${x(middleOf(k))},${y(value)}`).join(" ");
  plot.append(make("polyline", { class: "curve", points }));
  const keys = kinds.map(([name, kind]) => [`added by ${name}`, `part ${kind}`]);
  return make("div", { class: "dots" }, plot, makeKeys([["token", ""], ...keys]));
}

// The patch's map in each layer, beside the class after each layer. Plays once, unless motion is reduced.
function makeDepth(about, base, marks) {
  const { depth, lens, plain } = about;
  const map = make("div");
  const list = make("div", { class: "depth" });
  const rows = depth.map((values, layer) => {
    if (!lens[layer]) return { layer, name: "", share: largestOf(values), plain: true };
    const [name, share] = lens[layer];
    return { layer, name, share, plain };
  });
  const note = lens.length ? "" : "The largest weight on a patch in each layer.";
  const last = depth.length - 1;
  let timer;
  const show = (at, plays) => {
    const focused = list.contains(document.activeElement);
    map.replaceChildren(makeMap(base, about, depth[at], marks, `Layer ${at}, mean of the heads`));
    const described = { title: `After layer ${at}`, rows, layer: at, note };
    list.replaceChildren(...makeLayerBars(described, ({ set }) => show(set.layer, false)));
    if (focused) list.querySelector("[aria-pressed=true]").focus();
    clearTimeout(timer);
    if (plays && at < last) timer = setTimeout(() => playOn(at + 1), LAYER);
  };
  const playOn = (at) => {
    if (list.isConnected) show(at, true);
  };
  if (STILL.matches) show(last, false);
  else show(0, true);
  return [map, list];
}

// The dialog of the tour, which a page that is nothing but a tour shows inline: {dialog, start(answer, base)}.
function makeTour(model, root) {
  let steps = []; // title, sentence, and a function that makes the nodes of the picture
  let step = 0;
  const close = () => dialog.close();
  const onkeydown = (event) => {
    if (event.key === "ArrowRight") go(step + 1);
    if (event.key === "ArrowLeft") go(step - 1);
  };
  const dialog = make("dialog", { class: "tour", "aria-label": "Tour", onkeydown });

  const makeDot = (k) => {
    const [title] = steps[k];
    const label = `Step ${k + 1}: ${title}`;
    const current = k === step && "step";
    const attributes = { class: "stop", title, "aria-label": label, "aria-current": current };
    return makeButton("", () => go(k), attributes);
  };
  const makeNext = (inline) => {
    if (step < steps.length - 1) return makeButton("Next", () => go(step + 1));
    if (inline) return makeButton("Start again", () => go(0));
    return makeButton("Close", close);
  };
  const go = (to) => {
    const inline = model.get("frame").tour;
    step = Math.min(Math.max(to, 0), steps.length - 1);
    const [title, sentence, makeScene] = steps[step];
    const next = makeNext(inline);
    const closer = makeSmallButton("×", close, { "aria-label": "Close the tour", hidden: inline });
    const label = make("span", { class: "note" }, `Step ${step + 1} of ${steps.length}`);
    const back = makeButton("Back", () => go(step - 1), { disabled: !step });
    const dots = make("span", {}, ...steps.map((_, k) => makeDot(k)));
    const focused = !inline || dialog.contains(document.activeElement);
    dialog.replaceChildren(
      make("header", {}, make("h3", {}, title), label, closer),
      make("p", { class: "sentence", "aria-live": "polite" }, sentence),
      make("div", { class: "scene" }, ...makeScene()),
      make("nav", {}, back, dots, next),
    );
    if (focused) next.focus({ preventScroll: true });
  };
  const start = (answer, base) => {
    const inline = Boolean(model.get("frame").tour);
    const scenes = makeScenes(answer, base);
    steps = scenes.map(([title, makeScene], k) => [title, answer.sentences[k], makeScene]);
    root.classList.toggle("touring", inline);
    if (!dialog.open) {
      if (inline) dialog.show();
      else dialog.showModal();
    }
    go(0);
  };
  return { dialog, start };
}

// Playing through the layers: a button, and functions for the guide. findLayer: the control of the layer in the frame.
function makePlayer(findLayer, send) {
  let playing = false;
  let timer;
  const play = (now) => {
    playing = now;
    clearTimeout(timer);
    button.textContent = now ? "❚❚ Pause" : "▶ Play layers";
  };
  const forward = () => {
    const { value, high, options } = findLayer();
    const layers = options.length
      ? options.map((option) => option[1])
      : [...Array(high + 1).keys()];
    let layer = layers[layers.indexOf(value) + 1];
    if (layer === undefined && !playing) layer = layers[0]; // from the last, the first follows
    if (layer === undefined || button.hidden) play(false);
    else send({ set: { layer } });
  };
  const toggle = () => {
    if (!playing) forward();
    play(!playing && !STILL.matches);
  };
  const button = makeSmallButton("▶ Play layers", toggle, { title: "Space" });
  const pause = () => {
    if (playing) play(false);
  };
  const onSpace = (event) => {
    if (event.key !== " " || event.target.closest(BUSY) || button.hidden) return;
    event.preventDefault();
    toggle();
  };
  // Called after each drawing. The next layer follows after a while.
  const continueAfter = (isWaiting) => {
    clearTimeout(timer);
    if (playing && !isWaiting()) timer = setTimeout(forward, LAYER);
  };
  return { button, pause, onSpace, continueAfter };
}

// Buttons of the page for what this file does. send, isWaiting: of the page. panels: its panels by name.
function makeGuide({ model, root, send, isWaiting, panels }) {
  const numbers = {}; // of the last question of each kind
  const ask = (kind, content) => {
    numbers[kind] = nextNumber();
    model.send({ ask: kind, number: numbers[kind], ...content }, undefined, []);
  };
  const canAsk = (kind) => Boolean(model.get("frame").asks?.includes(kind));
  const findControl = (name) => model.get("frame").controls.find((each) => each.name === name);
  const findMap = () => panels.get("picture");
  const isOverMap = (event) => findMap()?.node.querySelector(".picture").contains(event.target);

  // The map follows the pointer.
  let target = null; // patch whose map is to be shown
  let asked = null; // patch of the question without an answer
  let seen = null; // patch of the last question
  let last = 0; // time of the last question
  let pinned = null; // query of the last frame
  const look = () => {
    if (!target || asked || isWaiting() || isEqual(target, seen) || isEqual(target, pinned)) return;
    const rest = model.near ? 0 : last + LOOKS - performance.now();
    if (rest > 0) {
      setTimeout(look, rest);
      return;
    }
    asked = target;
    seen = target;
    last = performance.now();
    ask("look", { row: target[0], col: target[1] });
  };
  const lookFrom = (place) => {
    target = place;
    if (place && !isEqual(place, pinned)) {
      look();
      return;
    }
    seen = null;
    findMap()?.peek(null);
  };
  const stopLooking = () => lookFrom(null);
  const followPointer = (event) => {
    const wanted = canAsk("look") && findControl("hover")?.value;
    const follows = wanted && event.pointerType !== "touch" && !STILL.matches;
    const cell = isOverMap(event) && !event.buttons ? findMap().cell() : null;
    if (cell && (event.shiftKey || !follows)) key = cell;
    lookFrom(follows && !event.shiftKey ? cell : null);
    drawQuestion();
  };

  // The first gesture: the map wanders over some patches, once in a session, until the user does anything.
  let glances = null; // patches that are still to be shown
  const endGlances = () => {
    if (!glances) return;
    glances = null;
    root.classList.remove("glancing");
    stopLooking();
  };
  const glance = () => {
    if (!glances) return;
    if (!glances.length || !canAsk("look")) {
      endGlances();
      return;
    }
    lookFrom(glances.shift());
    setTimeout(glance, GLANCE);
  };
  const startGlances = () => {
    const isFirst = ALONE && !LINKED && !isInSession(GLANCED);
    if (!isFirst || STILL.matches || !canAsk("look") || !pinned) return;
    keepInSession(GLANCED);
    const { rows, cols } = findMap().panel();
    const [row, col] = pinned;
    const middle = [Math.floor(0.7 * rows), Math.floor(0.5 * cols)];
    glances = [findKey(), [row, cols - 1 - col], middle];
    root.classList.add("glancing");
    setTimeout(glance, GLANCE);
  };
  const receiveLook = (answer, values, colors) => {
    asked = null;
    if (target && !answer.problem) {
      findMap().peek({ ...answer, values, scale: { ...answer.scale, colors } });
    }
    look();
  };

  // The value under the picture: of the patch that was last under the pointer, or of the one with the largest weight.
  let key = null; // that patch
  const findKey = () => {
    if (key) return key;
    const { cols, values } = findMap().panel();
    const weights = floatsOf(values);
    const query = pinned && pinned[0] * cols + pinned[1];
    const others = weights.filter((_, at) => !pinned || at !== query);
    const most = weights.indexOf(largestOf(others));
    return [Math.floor(most / cols), most % cols];
  };
  const drawQuestion = () => {
    how.hidden = !canAsk("value");
    if (how.hidden) {
      detail.hidden = true;
      return;
    }
    const [row, col] = findKey();
    const { values, cols } = findMap().panel();
    const weight = formatNumber(floatsOf(values)[row * cols + col]);
    how.textContent = `${weight} of the attention on row ${row}, column ${col}: how?`;
  };
  const closeValue = () => {
    detail.hidden = true;
    detail.replaceChildren();
    how.focus();
  };
  const openValue = (content) => {
    key = content.key;
    drawQuestion();
    if (detail.hidden) detail.replaceChildren();
    detail.hidden = false;
    ask("value", content);
  };
  const receiveValue = (answer, base) => {
    const fresh = !detail.firstChild;
    const focused = detail.querySelector(".picture:focus");
    detail.replaceChildren(...makeValue(answer, base, openValue, closeValue));
    if (fresh) detail.scrollIntoView({ block: "nearest" });
    if (focused) detail.querySelector(".picture").focus();
  };
  const openOnShift = (event) => {
    if (!actions.contains(event.target) && !isOverMap(event)) player.pause();
    if (!event.shiftKey || !canAsk("value") || !isOverMap(event)) return;
    event.stopPropagation(); // the query stays
    const cell = findMap().cell();
    if (cell) openValue({ key: cell });
  };
  const how = makeSmallButton("", () => openValue({ key: findKey() }), {
    class: "button small how",
  });
  const detail = make("section", {
    class: "detail",
    "aria-label": "How this weight comes about",
    hidden: true,
  });
  detail.addEventListener("keydown", (event) => {
    if (event.key === "Escape") closeValue();
  });

  const player = makePlayer(() => findControl("layer"), send);
  const actions = make("div", { class: "actions" }, player.button, how);
  const tour = makeTour(model, root);
  const tourButton = makeButton("Tour", () => ask("tour"));
  let toured = null; // name of the photo of the inline tour

  const afterDrawing = () => {
    const frame = model.get("frame");
    tourButton.hidden = !canAsk("tour");
    const layer = findControl("layer");
    player.button.hidden = !frame.asks || !layer || layer.hidden || layer.disabled;
    const map = findMap();
    if (!map) return;
    if (!how.isConnected) map.node.querySelector(".beneath").after(actions);
    if (!detail.isConnected) map.node.append(detail);
    const { selected, rows, cols } = map.panel();
    if (!canAsk("look") || !isEqual(selected, pinned)) endGlances();
    const isOutside = (place) => place?.[0] >= rows || place?.[1] >= cols;
    if (!isEqual(selected, pinned) || isOutside(key) || isOutside(target)) {
      target = null;
      key = null;
      pinned = selected;
    }
    seen = null;
    drawQuestion();
    if (!detail.hidden && !isWaiting()) ask("value", { key: findKey() });
    look();
    startGlances();
    player.continueAfter(isWaiting);
    const photo = findControl("photograph")?.value;
    if (frame.tour && photo !== toured) ask("tour");
    toured = photo;
  };
  const receive = async ({ ask: kind, number, answer }, buffers) => {
    const colors = buffers.at(-1);
    if (kind === "look") {
      receiveLook(answer, buffers[0], colors);
      return;
    }
    const { whole } = await readPixels(model.get("pictures").picture);
    if (number !== numbers[kind] || answer.problem) return;
    if (kind === "tour") tour.start({ ...answer, colors }, whole);
    else if (!detail.hidden) receiveValue({ ...answer, colors }, whole);
  };

  const keys = ALONE ? document : root;
  keys.addEventListener("keydown", player.onSpace, true);
  root.addEventListener("pointermove", followPointer);
  root.addEventListener("pointerleave", stopLooking);
  root.addEventListener("keydown", stopLooking);
  root.addEventListener("pointerdown", openOnShift, true);
  for (const event of ["pointermove", "pointerdown", "keydown"]) {
    root.addEventListener(event, endGlances);
  }
  root.append(tour.dialog);
  const stop = () => keys.removeEventListener("keydown", player.onSpace, true);
  return { tourButton, afterDrawing, receive, stop };
}
