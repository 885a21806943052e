// The state in the address of a page: #view=rollout&layer=8&head=mean&patch=5,7&off=0.2&sample=coffee

import { isEqual } from "./values.js";

const RARE = ["way", "target", "against"]; // in the address only where they differ from the first frame
const SETTLED = 300; // milliseconds without a drawing until the address is written: a drag is one entry of the history

// Values of the controls of a frame by name.
export function valuesOf(frame) {
  return Object.fromEntries(frame.controls.map(({ name, value }) => [name, value]));
}

// first: the values of the first frame. uploads: names of photos that are not in the address.
function addressOf(frame, first, uploads) {
  const values = valuesOf(frame);
  const { query, row, column, off = [], photograph } = values;
  const isUsed = (name) =>
    frame.controls.some((each) => each.name === name && !each.hidden && !each.disabled);
  const given = {};
  for (const name of ["view", "layer", "head"].filter(isUsed)) given[name] = values[name];
  if (isUsed("query")) {
    if (query === "patch") given.patch = [row, column];
    else given.query = query;
  }
  if (off.length) given.off = off.map((place) => place.join("."));
  const isUpload = (value) => Array.isArray(value) && uploads.has(value[1]); // as the target
  for (const name of RARE.filter(isUsed)) {
    if (isUpload(values[name])) continue;
    if (!isEqual(values[name], first[name])) given[name] = [values[name]].flat().join(":");
  }
  if (photograph !== first.photograph && !uploads.has(photograph)) given.sample = photograph;
  const text = new URLSearchParams(given).toString();
  return `#${text.replaceAll("%2C", ",").replaceAll("%3A", ":").replaceAll("+", "%20")}`;
}

// A number or a text of an address.
const parseWord = (text) => (/^\d+$/.test(text) ? Number(text) : text);

// A value of an address: a number, a text, or [kind, value].
function parseValue(text) {
  const pair = text.match(/^(\w+):(.+)$/s);
  return pair ? pair.slice(1) : parseWord(text);
}

// Heads that are off, [layer, head] each.
function parsePlaces(text) {
  if (!text) return [];
  return text.split(",").map((place) => place.split(".").map(parseWord));
}

// The values that an address sets, in an order in which they can be set one by one: a row or column alone makes the
// patch the query.
function valuesIn(address, first) {
  const given = new URLSearchParams(address.slice(1));
  const values = { photograph: given.get("sample") ?? first.photograph };
  for (const name of ["view", "layer", "head", "row", "column", "query", "off", ...RARE]) {
    values[name] = given.has(name) ? parseValue(given.get(name)) : first[name];
  }
  if (!given.has("head")) delete values.head; // each view has its own
  if (!given.has("target") && Array.isArray(first.target)) values.target = "predicted"; // of any photo
  const patch = given.get("patch")?.split(",").map(parseWord);
  if (patch) {
    values.query = "patch";
    const [row = "", column = ""] = patch;
    Object.assign(values, { row, column });
  }
  values.off = parsePlaces(given.get("off"));
  for (const name of Object.keys(values)) {
    if (!(name in first)) delete values[name];
  }
  return values;
}

// Keeps the address of the page and the state of the source equal. Returns {afterDrawing, stop}, functions to call.
export function syncAddress({ model, uploads, send, isWaiting, notice }) {
  let first = valuesOf(model.get("frame"));
  let shown = model.get("frame").models; // another model begins with other values
  let how = "replaceState"; // for the first address, and after a state that came from an address
  let timer;
  const restore = (state) => {
    how = "replaceState";
    clearTimeout(timer);
    const values = valuesIn(location.hash, first);
    const upload = state?.upload;
    const photos = model.get("frame").controls.find(({ name }) => name === "photograph")?.options;
    const isKept = uploads.has(upload) && photos?.some(([, name]) => name === upload);
    const lost = upload && !isKept;
    if (upload && !lost) values.photograph = upload;
    send({ set: values, nearest: true }); // another model or photo may lack some of them
    if (lost) {
      notice(`“${upload}” was uploaded and is not in the address of this page. Upload it again.`);
    }
  };
  const write = () => {
    if (isWaiting()) return; // the frame may be that before an address that is being restored
    const frame = model.get("frame");
    const { photograph } = valuesOf(frame);
    const address = addressOf(frame, first, uploads);
    const upload = uploads.has(photograph) ? photograph : "";
    if (address !== location.hash || upload !== (history.state?.upload || "")) {
      history[how]({ upload }, "", address);
    }
    how = "pushState";
  };
  const afterDrawing = () => {
    const frame = model.get("frame");
    if (frame.models !== shown) first = { ...valuesOf(frame), photograph: first.photograph };
    shown = frame.models;
    clearTimeout(timer);
    timer = setTimeout(write, SETTLED);
  };
  const onpopstate = (event) => restore(event.state);
  const stop = () => window.removeEventListener("popstate", onpopstate);
  window.addEventListener("popstate", onpopstate);
  if (location.hash.length > 1 || history.state?.upload) restore(history.state);
  return { afterDrawing, stop };
}
