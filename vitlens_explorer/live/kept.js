// Writes the page itself as one file, with the files of the model that was opened in it and the photos of this moment,
// as Python writes pages that contain a model.

import { make } from "../front/elements.js";
import { say } from "../in_page/numbers.js";
import { stemOf } from "../in_page/source.js";

const MOST_KEPT = 100e6; // bytes of a model's files: a page holds them as text, by a third longer
const CHUNK = 3 * 2 ** 13; // bytes that are encoded at once: a multiple of 3, so the parts join
const START = '<script type="application/octet-stream" id="data">'; // of the content in the HTML

// The HTML of the page before anything was drawn, without its content.
function copyShell() {
  const shell = document.documentElement.cloneNode(true);
  const isText = (node) => node.matches("[role=status], noscript");
  for (const node of [...shell.querySelectorAll(".opening > *")]) {
    if (!isText(node)) node.remove(); // the still image of another model
  }
  return shell;
}

// A message as `front.pack` makes it, for `unpack`.
function pack(name, value) {
  const parts = [];
  const place = (_, each) => {
    if (each instanceof Float32Array) return { type: "f4", data: viewOf(each) };
    if (!(each instanceof DataView)) return each;
    parts.push(each);
    return { $: parts.length - 1 };
  };
  const text = JSON.stringify({ name, value }, place);
  const sizes = JSON.stringify(parts.map(({ byteLength }) => byteLength));
  const head = new TextEncoder().encode(`${text.slice(0, -1)},"sizes":${sizes}}`);
  return new Blob([Uint32Array.of(head.length), head, ...parts]);
}

export const viewOf = ({ buffer, byteOffset, byteLength }) =>
  new DataView(buffer, byteOffset, byteLength);

// The bytes of a Blob, compressed, as parts of base64.
async function encode(blob) {
  const stream = blob.stream().pipeThrough(new CompressionStream("gzip"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  const texts = [];
  for (let at = 0; at < bytes.length; at += CHUNK) {
    texts.push(btoa(String.fromCharCode(...bytes.subarray(at, at + CHUNK))));
  }
  return texts;
}

const readView = async (blob) => new DataView(await blob.arrayBuffer());

// The photos of the page as a file has them, with the one in view first.
function readPhotos({ photos }, first) {
  const names = [first, ...[...photos.keys()].filter((name) => name !== first)];
  const read = async (name) => {
    const { file, ready, about, uploaded } = photos.get(name);
    return { name, file: await readView(file), ready, about, uploaded }; // means are of photos not uploaded
  };
  return Promise.all(names.map(read));
}

// The HTML before and after the content, with what the file is. words: of the footer.
function describeShell(shell, model, names, words) {
  const document = shell.cloneNode(true);
  const title = [names.join(", "), model].join(" · ");
  document.querySelector("title").textContent = title;
  document.querySelector("meta[property='og:title']").content = title;
  for (const meta of document.querySelectorAll("[name=description], [property='og:description']")) {
    meta.content = `${say("headline")}: ${title}. ${say("lead")}`;
  }
  const footer = document.querySelector("footer");
  const home = footer.querySelector("a");
  footer.textContent = words;
  if (home) footer.append(" ", home);
  const data = make("script", { type: "application/octet-stream", id: "data" });
  document.querySelector("body > script").before(data);
  const html = `<!DOCTYPE html>${document.outerHTML}\n`;
  const at = html.indexOf(START) + START.length;
  return [html.slice(0, at), html.slice(at)];
}

// {name, file: DataView} of the page with the model that it runs. state: of the source. What the address has of it
// comes from there.
export async function keepPage(live, state) {
  const { stored, files, folder } = live;
  const size = files.reduce((sum, file) => sum + file.size, 0);
  if (size > MOST_KEPT) {
    const [megabytes, most] = [size, MOST_KEPT].map((bytes) => Math.round(bytes / 1e6));
    throw Error(say("too large to keep", { name: stored.model, size: megabytes, most }));
  }
  const read = async (file) => {
    const bytes = await readView(file).catch(() => {
      throw Error(say("file is gone", { name: file.name }));
    });
    return { name: file.name, bytes };
  };
  const photos = await readPhotos(live, state.photograph);
  const content = {
    ...stored.first,
    photos,
    state: { ...state, view: stored.first.state.view },
    files: await Promise.all(files.map(read)),
    folder,
    facts: stored.facts,
    address: location.hash,
  };
  const names = photos.map((photo) => photo.name);
  const { model, versions } = stored;
  const footer = say("kept footer", { name: model, versions, photos: names.join(", ") });
  return writePage(stored, content, names, footer, `vitlens-${model}`);
}

// {name, file: DataView} of a page with a content. names: of its photos. title: name of the file.
export async function writePage({ shell, model }, content, names, footer, title) {
  const [before, after] = describeShell(shell, model, names, footer);
  const parts = await encode(pack("page", content));
  const file = await readView(new Blob([before, ...parts, after]));
  return { name: `${stemOf(title)}.html`, file };
}

// Keeps of a content what its copies need: all but the files of a model, before the page changes it.
export function keepFirst(stored) {
  stored.shell = copyShell();
  stored.first = { ...stored, files: null, shell: null };
}
