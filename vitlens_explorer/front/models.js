// The files of a model that a person drops or chooses. `source` of a drop is its DataTransfer.

import { make, makeButton } from "./elements.js";

const MODEL_FILE = /\.(json|safetensors|bin|pt|pth|ckpt|pkl|pickle|tar|gguf|h5|onnx|npz|txt)$/i;
const OF_FOLDER =
  /^(preprocessor_)?config\.json$|\.safetensors(\.index\.json)?$|\.(bin|pt|pth|ckpt)$/;
const SINGLE = "model.safetensors";

const entriesOf = ({ items }) =>
  [...items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);

// True if a folder or a file of a model was dropped, and not a photo.
export function holdsModel(source) {
  if (entriesOf(source).some(({ isDirectory }) => isDirectory)) return true;
  return [...source.files].some(({ name }) => MODEL_FILE.test(name));
}

// The files of a folder that the reader may need. One whole file of weights comes before others.
function chooseFromFolder(files) {
  const needed = files.filter(({ name }) => OF_FOLDER.test(name));
  const isSharded = needed.some(({ name }) => name.endsWith(".index.json"));
  const isWhole = needed.some(({ name }) => name === SINGLE);
  if (isSharded || !isWhole) return needed;
  return needed.filter(({ name }) => name === SINGLE || !name.endsWith(".safetensors"));
}

async function readHandle(handle) {
  const files = [];
  for await (const each of handle.values()) {
    if (each.kind === "file") files.push(await each.getFile());
  }
  return files;
}

async function readEntry(entry) {
  const reader = entry.createReader();
  const entries = [];
  let next = [];
  do {
    next = await new Promise((done, fail) => {
      reader.readEntries(done, fail);
    });
    entries.push(...next);
  } while (next.length); // browsers give up to 100 at a time
  const fileOf = (each) =>
    new Promise((done, fail) => {
      each.file(done, fail);
    });
  return Promise.all(entries.filter(({ isFile }) => isFile).map(fileOf));
}

// {files, folder: name of the folder, or ""} of a drop. Chromium does not read the entries of a folder in a page from
// disk, so its handles come first. Both are gone after the event, so they are taken at once.
export async function readDrop(source) {
  const dropped = [...source.files];
  const items = [...source.items];
  const at = items.findIndex((item) => item.webkitGetAsEntry?.()?.isDirectory);
  if (at < 0) return { files: dropped, folder: "" };
  const entry = items[at].webkitGetAsEntry();
  const handle = await items[at].getAsFileSystemHandle?.();
  const files = handle ? await readHandle(handle) : await readEntry(entry);
  return { files: chooseFromFolder(files), folder: entry.name };
}

// Opens the browser's dialog, and calls take({files, folder}).
export function chooseModel(take, webkitdirectory = false) {
  const input = make("input", { type: "file", multiple: true, webkitdirectory });
  input.addEventListener("change", () => {
    const files = [...input.files];
    const [folder = ""] = webkitdirectory ? (files[0]?.webkitRelativePath.split("/") ?? []) : [];
    const isDirect = ({ webkitRelativePath: path }) => path.split("/").length === 2;
    take({ files: folder ? chooseFromFolder(files.filter(isDirect)) : files, folder });
  });
  input.click();
}

// The button of a page with a model.
export function makeOpener(take) {
  return makeButton("Open a model", () => chooseModel(take), {
    title:
      "config.json and model.safetensors. They can also be dropped on the page, or their folder",
  });
}

// The buttons that show a second model beside that of the page, or the same one in another state, and that which closes
// it. Returns {node, update}.
export function makeCompanion(take, { twin, close }) {
  const compare = makeButton("Compare", () => chooseModel(take), {
    title: "Open a second model beside this one",
  });
  const states = makeButton("Two states", twin, {
    title: "Show this model twice: two layers or heads, or with and without the heads that are off",
  });
  const closer = makeButton("", close, { title: "Show one map alone" });
  const node = make("span", { class: "companion" }, compare, states, closer);
  const update = ({ opens, beside = "" }) => {
    node.hidden = !opens;
    closer.hidden = !beside;
    compare.hidden = Boolean(beside);
    states.hidden = Boolean(beside);
    closer.textContent = `Close ${beside}`;
  };
  return { node, update };
}
