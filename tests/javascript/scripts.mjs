// The worker's scripts in this process. They are one classic script, whose names are read by `names`.

import { readFileSync } from "node:fs";
import path from "node:path";
import vm from "node:vm";

export const folder = process.env.VITLENS_FILES; // with worker.js, words.json, kernels.wasm and cases.json

const NAMES =
  "Vit, openFiles, readCheckpoint, loadTensor, explain, resizePositions, say, preprocess";

// listen: what the worker calls with the name of an event and its handler.
export function loadScripts(listen = () => {}) {
  globalThis.addEventListener = listen;
  vm.runInThisContext(readFileSync(path.join(folder, "worker.js"), "utf-8"));
  const words = readFileSync(path.join(folder, "words.json"), "utf-8");
  return vm.runInThisContext(`setWords(${words}); ({ ${NAMES} })`);
}

export const kernels = () => readFileSync(path.join(folder, "kernels.wasm"));

// A file of which only slices can be read, as a large one. `read` counts the bytes.
export class SlicedFile {
  read = 0;
  largest = 0;

  constructor(name, bytes) {
    this.name = name;
    this.bytes = bytes;
    this.size = bytes.length;
  }

  slice(from, to) {
    const part = this.bytes.subarray(from, to);
    this.read += part.length;
    this.largest = Math.max(this.largest, part.length);
    return new Blob([part]);
  }

  async arrayBuffer() {
    return this.slice(0, this.size).arrayBuffer();
  }

  async text() {
    return this.slice(0, this.size).text();
  }
}
