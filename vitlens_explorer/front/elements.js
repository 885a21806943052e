// The front end draws the page that page.py describes, and sends what the user does to its source. Only colors are
// computed here.
//
// `model` is anywidget's model or one with the same interface: get(name) gives the traits "frame" and "pictures",
// on(event, handler) and off(event, handler) are for "change:frame", "msg:custom" and "lost", and
// send(content, _, buffers) reaches Python.

import { isEqual } from "./values.js";

// A document of the class "vitlens-page" has nothing but the explorer: the app and saved pages. There, drops and pasted
// photos are taken anywhere, and the state is in the address. In a notebook only the widget itself is used.
export const ALONE = document.documentElement.classList.contains("vitlens-page");
export const MEGABYTE = 2 ** 20;
export const PART = 2 ** 19; // bytes of a file in one message, below the limits of all front ends
export const PACE = 40; // milliseconds between two messages of a drag
const KEPT = 60000; // milliseconds until a file that was offered as a download is released
const ARROWS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }; // by row and column
const SVG = [
  "svg",
  "path",
  "rect",
  "line",
  "text",
  "title",
  "g",
  "polyline",
  "circle",
  "image",
  "clipPath",
];

export const STILL = window.matchMedia("(prefers-reduced-motion: reduce)");

let lastNumber = Date.now(); // of messages, unique over all widgets of the page and later visits

export function nextNumber() {
  lastNumber += 1;
  return lastNumber;
}

export function make(tag, attributes = {}, ...children) {
  const space = SVG.includes(tag) ? "http://www.w3.org/2000/svg" : "http://www.w3.org/1999/xhtml";
  const node = document.createElementNS(space, tag);
  for (const [name, value] of Object.entries(attributes)) {
    const absent = value === null || value === undefined || value === false;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (!absent) node.setAttribute(name, value === true ? "" : value);
  }
  // Keep notebooks from intercepting keys of the focused element.
  if (attributes.tabindex === 0 || ["input", "select", "button"].includes(tag)) {
    node.dataset.lmSuppressShortcuts = "true";
  }
  if (tag === "h3") node.ariaLevel = 2; // below the h1 of a page or notebook
  node.append(...children);
  return node;
}

export function makeButton(text, onclick, attributes) {
  return make("button", { type: "button", class: "button", onclick, ...attributes }, text);
}

export function makeSmallButton(text, onclick, attributes) {
  return makeButton(text, onclick, { class: "button small", ...attributes });
}

export function setPressed(node, pressed) {
  node.setAttribute("aria-pressed", String(Boolean(pressed)));
}

// A part that takes the focus, and whose arrow keys call move(rows, columns). It returns false where they do nothing.
export function makeSteered(attributes, move, ...nodes) {
  const onkeydown = (event) => {
    if (!(event.key in ARROWS)) return;
    const moved = move(...ARROWS[event.key]);
    if (moved !== false) event.preventDefault();
  };
  return make("div", { tabindex: 0, role: "application", onkeydown, ...attributes }, ...nodes);
}

// Draws an image on a canvas of its size.
export function putImage(canvas, image) {
  if (canvas.width !== image.width || canvas.height !== image.height) {
    canvas.width = image.width;
    canvas.height = image.height;
  }
  canvas.getContext("2d", { willReadFrequently: true }).putImageData(image, 0, 0);
  return canvas;
}

// [row, column] under the pointer, of cells [height, width] as shares of a node.
export function cellUnder(event, node, [height, width]) {
  const box = node.getBoundingClientRect();
  const row = (event.clientY - box.top) / box.height / height;
  const column = (event.clientX - box.left) / box.width / width;
  return [Math.floor(row), Math.floor(column)];
}

// A frame of white, or of the color of its name, on black around a rectangle, as two nodes.
export function makeFrame(place, name = "") {
  return ["rim", `frame ${name}`].map((kind) => make("rect", { class: kind, ...place }));
}

// Replaces what a node shows only if it changed, so that clicks and focus are kept.
export function renew(node, described, makeNodes) {
  node.hidden = !described;
  if (isEqual(node.described, described)) return;
  node.described = described;
  const findStops = () => [...node.querySelectorAll("button, [tabindex]")];
  const focused = findStops().indexOf(document.activeElement);
  node.replaceChildren(...(described ? makeNodes(described) : []));
  findStops()[focused]?.focus();
}

// Whether something was kept for this session of the page. Some browsers forbid it for pages opened from disk.
export function isInSession(key) {
  try {
    return sessionStorage.getItem(key) !== null;
  } catch {
    return false;
  }
}

export function keepInSession(key) {
  try {
    sessionStorage.setItem(key, "yes");
  } catch {
    // it is then done again after a reload
  }
}

// A file to download. Browsers ask before a second one, so what is saved together is one file.
export function download(name, bytes) {
  const address = URL.createObjectURL(new Blob([bytes]));
  make("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), KEPT);
}

// A button that chooses a photo, and calls take(source) with its files.
export function makeUploader(take, ...words) {
  const onchange = () => {
    take(file);
    file.value = "";
  };
  const file = make("input", {
    type: "file",
    accept: "image/*",
    "aria-label": "Upload a photo",
    onchange,
  });
  return make("label", { class: "button" }, ...words, file);
}
