// The tour of eight steps, the map that follows the pointer, the opened value, and playing through the layers.

import { valuesOf } from "./address.js";
import { BOTTOM, HEIGHT, MOST_TICKS, TOP, makeChart, makeKeys, makeLayerBars } from "./charts.js";
import { makeGroup } from "./controls.js";
import {
  makeCanvas,
  makeMap,
  makeProducts,
  makeSoftmax,
  makeStrip,
  makeValue,
  patchAt,
} from "./details.js";
import {
  ALONE,
  isInSession,
  keepInSession,
  make,
  makeButton,
  makeSmallButton,
  makeUploader,
  nextNumber,
  setPressed,
} from "./elements.js";
import { makeGrid, readPixels } from "./pictures.js";
import {
  floatsOf,
  formatNumber,
  formatPercent,
  isEqual,
  largestOf,
  rangeWords,
  softmax,
} from "./values.js";

const STILL = window.matchMedia("(prefers-reduced-motion: reduce)");
const LOOKS = 84; // milliseconds between two maps that follow the pointer: 12 in a second
const GLANCE = 900; // milliseconds for which the first gesture shows the map of a patch
const LINKED = Boolean(location.hash); // the page was opened by a link to a state
const GLANCED = "vitlens-glanced"; // key of the session: the first gesture has been shown
const LAYER = 600; // milliseconds for which playing shows a layer
const BUSY = "button, select, input, textarea, summary, a, dialog, [contenteditable=true]"; // which take the space key

// For each step its title, what to do, and a function that makes its nodes. about: the answer to {ask: "tour"}. acts:
// functions that choose a patch, key, head or layer.
function makeScenes(about, base, acts) {
  const { rows, cols, patch, image, row, col, pixels, token, position, prefix, value } = about;
  const here = { frame: [row, col] };
  const pair = { ...here, key: patchAt(value, value.key) };
  const makePhoto = (marks, label, pick = acts.patch) =>
    makeMap(base, about, [], marks, label, pick);
  const makePixels = () => {
    const levels = Uint8ClampedArray.from(pixels.flat().flatMap((pixel) => [...pixel, 255]));
    const enlarged = new ImageData(levels, pixels[0].length);
    return makeCanvas(enlarged, "The pixels of the patch", { class: "pixels" });
  };
  const makePatches = () => {
    const node = makePhoto(here, "The photo, cut into patches.");
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
    const map = makeMap(base, about, weights, pair, "Weights of the patches.", acts.key);
    return make("figure", {}, map, make("figcaption", {}, rangeWords(weights)));
  };
  const makeHead = (values, head) => {
    const map = makeMap(base, about, values, here, `Head ${head}`);
    const words = make("span", {}, `head ${head}: ${rangeWords(values)}`);
    const onclick = () => acts.head(head);
    const button = make("button", { type: "button", class: "map", onclick }, map, words);
    setPressed(button, head === value.head);
    return button;
  };
  const makeStream = () => [makeStreamChart(about, acts.layer), makeLayers(about, acts)];
  return [
    [
      "Pixels",
      "Click another patch, or use the arrow keys on the photo: its pixels appear enlarged.",
      () => [makePhoto(here, "The model's input."), makePixels()],
    ],
    [
      "Patches",
      "Click a patch that you want to follow: all other steps are about it.",
      () => [makePatches()],
    ],
    [
      "Tokens and positions",
      "Click another patch: its numbers replace these.",
      () => [makePhoto(here, "The framed patch."), makeVectors()],
    ],
    [
      "A query meets a key",
      "Click another patch: it becomes the key, and its products appear.",
      () => [
        makePhoto(pair, "The two patches.", acts.key),
        make("div", {}, ...makeProducts(value)),
      ],
    ],
    [
      "Softmax",
      "Click a dark patch, and then a bright one: compare their weights.",
      () => [makeWeights(), makeSoftmax(value)],
    ],
    [
      "Values, heads side by side",
      "Click another head: the two steps before and the explorer then show it.",
      () => [make("div", { class: "row" }, ...about.heads.map(makeHead))],
    ],
    [
      "Residual stream and MLP",
      "Choose another layer: the sentence gives what it adds.",
      makeStream,
    ],
    [
      "Through the layers",
      "Click a layer: the map shows where the patch looks in it.",
      () => makeDepth(about, base, here),
    ],
  ];
}

// What the last step will show, in a line: the model's answer, and where the patch looks.
function payoffWords({ lens, plain, depth, cols }) {
  const weights = depth.at(-1);
  const most = weights.indexOf(largestOf(weights));
  const place = `row ${Math.floor(most / cols)}, column ${most % cols}`;
  const looks = `in the last layer this patch looks most at ${place}.`;
  if (!lens.length) return `At the end: ${looks}`;
  const [name, share] = lens.at(-1);
  const score = plain ? formatNumber(share) : formatPercent(share);
  return `At the end: the model answers “${name}” (${score}), and ${looks}`;
}

// A button for each layer that can be chosen.
function makeLayers({ layer }, acts) {
  const buttons = acts.layers().map((each) => {
    const button = makeButton(String(each), () => acts.layer(each), {
      "aria-label": `Layer ${each}`,
    });
    setPressed(button, each === layer);
    return button;
  });
  return makeGroup("modes layers", "Layer", {}, make("span", {}, "Layer"), ...buttons);
}

// Lengths of a token after each layer as a line, and of the additions of each layer as bars. A click chooses a layer.
function makeStreamChart({ lengths, added, layer }, choose) {
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
    const reach = make("rect", {
      class: k === layer ? "reach here" : "reach",
      x: x(k / added.length),
      y: TOP,
      width: x(1 / added.length) - x(0),
      height: HEIGHT - BOTTOM - TOP,
    });
    const group = make("g", { class: "goes", onclick: () => choose(k) }, reach);
    plot.append(group);
    parts.forEach((value, i) => {
      const [name, kind] = kinds[i];
      const left = x(middleOf(k) + (i - parts.length / 2) * wide);
      const width = 0.9 * (x(wide) - x(0));
      const box = { x: left, width, y: y(value), height: y(0) - y(value) };
      const title = make("title", {}, `layer ${k}, ${name}: ${formatNumber(value)}`);
      group.append(make("rect", { class: `part ${kind}`, ...box }, title));
    });
    if (k % Math.ceil(added.length / MOST_TICKS) === 0) tick(middleOf(k), k);
  });
  const points = after.map((value, k) => `${x(middleOf(k))},${y(value)}`).join(" ");
  plot.append(make("polyline", { class: "curve through", points }));
  const keys = kinds.map(([name, kind]) => [`added by ${name}`, `part ${kind}`]);
  return make("div", { class: "dots" }, plot, makeKeys([["token", ""], ...keys]));
}

// The patch's map in each layer, beside the class after each layer. Plays once, unless motion is reduced. Layers that a
// file left out are null.
function makeDepth(about, base, marks) {
  const { depth, lens, plain } = about;
  const map = make("div");
  const list = make("div", { class: "depth" });
  const layers = [...depth.keys()].filter((layer) => depth[layer]);
  const rows = layers.map((layer) => {
    if (!lens[layer]) return { layer, name: "", share: largestOf(depth[layer]), plain: true };
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
    const next = layers[layers.indexOf(at) + 1];
    if (plays && at < last) timer = setTimeout(() => playOn(next), LAYER);
  };
  const playOn = (at) => {
    if (list.isConnected) show(at, true);
  };
  if (STILL.matches) show(last, false);
  else show(layers[0], true);
  return [map, list];
}

// The dialog of the tour, which a page that is nothing but a tour shows inline: {dialog, show(answer, base, restarts)}.
// acts: functions that choose a patch, key, head or layer. makeNext(): buttons of what to try after the tour.
function makeTour(model, root, acts, makeNext) {
  let about = null; // the answer to {ask: "tour"}
  let steps = []; // title, what to do, and a function that makes the nodes of the picture
  let step = 0;
  const close = () => dialog.close();
  // The content is removed, so that a page has one field for uploads.
  const onclose = () => {
    if (!dialog.open) dialog.replaceChildren();
  };
  const onkeydown = (event) => {
    if (event.defaultPrevented) return; // a key of the picture
    if (event.key === "ArrowRight") go(step + 1);
    if (event.key === "ArrowLeft") go(step - 1);
  };
  const dialog = make("dialog", { class: "tour", "aria-label": "Tour", onkeydown, onclose });

  const makeDot = (k) => {
    const [title] = steps[k];
    const label = `Step ${k + 1}: ${title}`;
    const current = k === step && "step";
    const attributes = { class: "stop", title, "aria-label": label, "aria-current": current };
    return makeButton("", () => go(k), attributes);
  };
  const makeForward = (inline) => {
    if (step < steps.length - 1) return makeButton("Next", () => go(step + 1));
    if (inline) return makeButton("Start again", () => go(0));
    return makeButton("Close", close);
  };
  const sentence = make("p", { class: "sentence", "aria-live": "polite" });
  const payoff = make("p", { class: "payoff" });
  const hint = make("p", { class: "hint" });
  const scene = make("div", { class: "scene" });
  const next = makeGroup("next", "Try next", {});
  // Draws the numbers of the step. What steers the tour stays, so that no click on it is lost.
  const draw = () => {
    const [, words, makeScene] = steps[step];
    sentence.textContent = about.sentences[step];
    payoff.hidden = step > 0;
    payoff.textContent = payoffWords(about);
    hint.textContent = words;
    next.hidden = step < steps.length - 1;
    scene.replaceChildren(...makeScene());
    next.replaceChildren(...(next.hidden ? [] : [make("b", {}, "Try next:"), ...makeNext(about)]));
  };
  const go = (to) => {
    step = Math.min(Math.max(to, 0), steps.length - 1);
    const inline = model.get("frame").tour;
    const [title] = steps[step];
    const forward = makeForward(inline);
    const closer = makeSmallButton("×", close, { "aria-label": "Close the tour", hidden: inline });
    const label = make("span", { class: "note" }, `Step ${step + 1} of ${steps.length}`);
    const back = makeButton("Back", () => go(step - 1), { disabled: !step });
    const dots = make("span", {}, ...steps.map((_, k) => makeDot(k)));
    const focused = !inline || dialog.contains(document.activeElement);
    draw();
    dialog.replaceChildren(
      make("header", {}, make("h3", {}, title), label, closer),
      sentence,
      payoff,
      hint,
      scene,
      next,
      make("div", { class: "ends" }, make("nav", {}, back, dots, forward)),
    );
    if (focused) forward.focus({ preventScroll: true });
  };
  // Draws the step with other numbers, and keeps the focus.
  const redraw = () => {
    const findStops = () => [...dialog.querySelectorAll("button, input, [tabindex]")];
    const focused = findStops().indexOf(document.activeElement);
    draw();
    findStops()[focused]?.focus({ preventScroll: true });
  };
  // restarts: true to begin with the first step.
  const show = (answer, base, restarts) => {
    const inline = Boolean(model.get("frame").tour);
    about = answer;
    steps = makeScenes(answer, base, acts);
    root.classList.toggle("touring", inline);
    const isOpen = dialog.open;
    if (!isOpen && inline) dialog.show();
    if (!isOpen && !inline) dialog.showModal();
    if (isOpen && !restarts) redraw();
    else go(0);
  };
  return { dialog, show };
}

// Numbers of the layers that the control of layers takes.
function layersOf({ options, high }) {
  if (options.length) return options.map((option) => option[1]);
  return [...Array(high + 1).keys()];
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
    const { value } = findLayer();
    const layers = layersOf(findLayer());
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

const FOLLOWED = ["layer", "head", "row", "column", "off", "way", "whole"]; // controls that the tour follows
const HEADS_OF_EXPLORER =
  "The explorer, vitlens_explorer.explore, turns heads off and compares them.";

// Buttons of the page for what this file does. send, isWaiting, takePhoto: of the page. panels: its panels by name.
export function makeGuide({ model, root, send, isWaiting, takePhoto, panels }) {
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

  // The tour. What is chosen in it is set in the explorer, and the tour then follows.
  let opens = false; // the tour was asked for, and has not opened
  let toured = null; // photo and values of the last question
  let shown = null; // photo of the tour
  let head = 0; // of the tour
  let place = ""; // selector of the part that is shown after the tour
  const findFollowed = () => {
    const frame = model.get("frame");
    const values = valuesOf(frame);
    const others = FOLLOWED.map((name) => values[name] ?? null);
    return { photo: [frame.models || 0, values.photograph], others };
  };
  const askTour = (content = {}) => {
    toured = findFollowed();
    ask("tour", content);
  };
  const openTour = () => {
    opens = true;
    askTour();
  };
  const closeTour = () => {
    opens = false;
    tour.dialog.close();
  };
  const receiveTour = (answer, base) => {
    if (!opens && !tour.dialog.open && !model.get("frame").tour) return;
    const restarts = opens || !isEqual(shown, toured.photo);
    opens = false;
    shown = toured.photo;
    head = answer.value.head;
    tour.show(answer, base, restarts);
  };
  const acts = {
    patch: ([row, column]) => send({ set: { row, column } }),
    key: (patch) => askTour({ key: patch, head }),
    head: (chosen) => send({ set: { view: "attention", head: chosen } }),
    layer: (layer) => send({ set: { layer } }),
    layers: () => layersOf(findControl("layer")),
  };
  // Ends the tour, sets values of the explorer, and shows a part of it.
  const leaveTour = (values, part) => {
    closeTour();
    place = part;
    send({ set: { view: "attention", ...values } });
  };
  const showPlace = () => {
    if (!place || isWaiting()) return;
    const node = root.querySelector(place);
    place = "";
    node?.scrollIntoView({ block: "nearest" });
    node?.focus({ preventScroll: true });
  };
  // Buttons of what to try after the tour of a layer, as far as this page can do it.
  const makeNext = ({ layer, value }) => {
    const frame = model.get("frame");
    const off = findControl("off")?.value;
    const own = [layer, value.head];
    const isOn = off && !off.some((each) => isEqual(each, own));
    const turnOff = () => leaveTour({ off: [...off, own] }, ".challenge");
    const compare = () => leaveTour({}, ".mosaic .stage");
    const takeOwn = (source) => {
      if (!frame.tour) closeTour();
      takePhoto(source);
    };
    const turner = makeButton(`Turn off head ${value.head}`, turnOff, {
      title: `Turn off head ${value.head} of layer ${layer}, and see what the model then answers`,
    });
    const comparer = makeButton("Compare two heads", compare, {
      title: "Click one of the small maps, and then another",
    });
    const next = [];
    if (isOn && !frame.tour) next.push(turner);
    if (frame.uploads) next.push(makeUploader(takeOwn, "Upload your own photo"));
    if (frame.tour) next.push(make("span", { class: "note" }, HEADS_OF_EXPLORER));
    else next.push(comparer);
    return next;
  };
  const tour = makeTour(model, root, acts, makeNext);
  const tourButton = makeButton("Tour", openTour);

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
    const isShown = frame.tour || tour.dialog.open;
    if (isShown && !isWaiting() && !isEqual(findFollowed(), toured)) askTour();
    showPlace();
  };
  const receive = async ({ ask: kind, number, answer }, buffers) => {
    const colors = buffers.at(-1);
    if (kind === "look") {
      receiveLook(answer, buffers[0], colors);
      return;
    }
    const { whole } = await readPixels(model.get("pictures").picture);
    if (number !== numbers[kind] || answer.problem) return;
    if (kind === "tour") receiveTour({ ...answer, colors }, whole);
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
