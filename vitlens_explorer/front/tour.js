// The tour of eight steps.

import { makeCaption } from "./caption.js";
import { BOTTOM, HEIGHT, MOST_TICKS, TOP, makeChart, makeKeys, makeLayerBars } from "./charts.js";
import { makeGroup } from "./controls.js";
import { makeCanvas, makeMap, makeProducts, makeSoftmax, makeStrip, patchAt } from "./details.js";
import { STILL, make, makeButton, makeSmallButton, setPressed } from "./elements.js";
import { makeGrid } from "./pictures.js";
import { LAYER } from "./player.js";
import { formatNumber, formatPercent, largestOf, rangeWords, softmax } from "./values.js";

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
export function makeTour(model, root, acts, makeNext) {
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
  const caption = makeCaption("div", { class: "sentence" });
  const payoff = make("p", { class: "payoff" });
  const hint = make("p", { class: "hint" });
  const scene = make("div", { class: "scene" });
  const next = makeGroup("next", "Try next", {});
  // Draws the numbers of the step. What steers the tour stays, so that no click on it is lost.
  const draw = () => {
    const [, words, makeScene] = steps[step];
    caption.show({ words: about.sentences[step], plain: about.simply[step] });
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
      caption.node,
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
