// JSON files that a person drops on the page. They come from anywhere, so they are measured before they are parsed.

import { clip, isObject, refuse, refuseOther } from "./refuse.js";

export const LONGEST_JSON = 16 * 2 ** 20; // bytes
const DEEPEST_JSON = 32; // objects and lists within each other
const MOST_STRINGS = 200_000; // of a JSON text

// The end of a JSON string whose quote is at `start`: the place after its closing quote.
function endOfString(text, start) {
  let at = text.indexOf('"', start + 1);
  while (at >= 0) {
    let slashes = 0;
    while (text[at - 1 - slashes] === "\\") slashes += 1;
    if (slashes % 2 === 0) return at + 1;
    at = text.indexOf('"', at + 1);
  }
  return text.length;
}

// True if a colon follows after spaces, so that the string before is a name.
function isBeforeColon(text, end) {
  let at = end;
  while (at < text.length && " \t\n\r".includes(text[at])) at += 1;
  return text[at] === ":";
}

// Refuses JSON that is nested too deep, has too many strings or gives a name twice, which `JSON.parse` would accept.
function checkJson(text, file) {
  const open = []; // names of each object and list around the current place
  let count = 0;
  let at = 0;
  while (at < text.length) {
    const sign = text[at];
    if (sign === '"') {
      const end = endOfString(text, at);
      if (isBeforeColon(text, end)) addName(open.at(-1), text.slice(at + 1, end - 1), file);
      count += 1;
      if (count > MOST_STRINGS) refuse("many names", { file });
      at = end;
      continue;
    }
    if (sign === "{" || sign === "[") open.push(new Set());
    if (sign === "}" || sign === "]") open.pop();
    if (open.length > DEEPEST_JSON) refuse("deep JSON", { file });
    at += 1;
  }
}

// Adds a name of an object, as it is written in the text.
function addName(names, written, file) {
  const name = written.includes("\\") ? JSON.parse(`"${written}"`) : written;
  if (names?.has(name)) refuse("name twice", { file, name: clip(name) });
  names?.add(name);
}

// The value of a JSON text in UTF-8. `file` is its name for sentences.
export function parseJson(bytes, file) {
  let value;
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
    checkJson(text, file);
    value = JSON.parse(text);
  } catch (error) {
    if (error.problem) throw error;
    refuse("no JSON", { file });
  }
  if (!isObject(value)) refuse("no JSON", { file });
  return value;
}

// The object of a dropped JSON file.
export async function readJson(file) {
  const name = clip(file.name);
  if (file.size > LONGEST_JSON) refuse("long JSON", { file: name });
  const bytes = new Uint8Array(await file.arrayBuffer());
  refuseOther(bytes, name);
  return parseJson(bytes, name);
}
