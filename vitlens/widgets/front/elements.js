// The front end draws the page that page.py describes, and sends what the user does to its source. Only colors are
// computed here. The scripts of this folder share one scope, in the order of `SCRIPTS`.
//
// `model` is anywidget's model or one with the same interface: get(name) gives the traits "frame" and "pictures",
// on(event, handler) and off(event, handler) are for "change:frame", "msg:custom" and "lost", and
// send(content, _, buffers) reaches Python.

// A document of the class "vitlens-page" has nothing but the explorer: the app and saved pages. There, drops and pasted
// photos are taken anywhere, and the state is in the address. In a notebook only the widget itself is used.
const ALONE = document.documentElement.classList.contains("vitlens-page");
const PART = 2 ** 19; // bytes of a file in one message, below the limits of all front ends
const PACE = 40; // milliseconds between two messages of a drag
let number = Date.now(); // message counter, unique over all widgets of the page and later visits

function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "path", "rect", "circle", "line", "text", "g", "polyline"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  // Keep notebooks from intercepting keys of the focused element.
  if (attributes.tabindex === 0 || ["input", "select", "button"].includes(tag)) node.dataset.lmSuppressShortcuts = "true";
  if (tag === "h3") node.ariaLevel = 2; // below the h1 of a page or notebook
  node.append(...children);
  return node;
}

const bytesOf = (view) => new Uint8Array(view.buffer, view.byteOffset, view.byteLength);
const floatsOf = (view) => new Float32Array(bytesOf(view).slice().buffer);
const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);
const shown = (value) => (Math.abs(value) >= 1e-3 || value === 0 ? Number(value.toPrecision(3)) : value.toExponential(1));
