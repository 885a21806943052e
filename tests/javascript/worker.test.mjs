// The tasks of the worker, asked as the page asks them.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import path from "node:path";
import { test } from "node:test";
import { folder, kernels, loadScripts, SlicedFile } from "./scripts.mjs";

let handle = null;
loadScripts((event, handler) => {
  handle = handler;
});

// Sends a task. Returns its answer as the page gets it, and the buffers that moved there.
async function ask(task, given) {
  const answers = [];
  const buffers = [];
  const postMessage = (answer, transfer = []) => {
    buffers.push(...transfer);
    answers.push(structuredClone(answer, { transfer }));
  };
  await handle({ data: { task, port: { postMessage }, ...given } });
  const { result, error } = answers.at(-1);
  assert.equal(error, undefined);
  return { result, buffers };
}

const fileOf = (name) => new SlicedFile(name, readFileSync(path.join(folder, "model", name)));

const PIXELS = 3 * 32 * 32;
const imageOf = (seed) => Float32Array.from({ length: PIXELS }, (_, i) => Math.sin(seed + i * i));
const forwardOf = (key) => ({
  key: String(key),
  input: imageOf(key),
  image: [32, 32],
  off: [],
  mean: false,
});
const explanationOf = (key) => ({ ...forwardOf(key), target: 1, against: null });

test("a record moves to the page without a copy and leaves the worker its tokens", async () => {
  const files = ["config.json", "model.safetensors"].map(fileOf);
  const { result: model } = await ask("read", { files, wasm: kernels() });
  const first = await ask("forward", forwardOf(1));
  const { layers, tokens } = first.result;
  assert.equal(first.buffers.length, 2 * model.about.layers + model.about.layers);
  assert.equal(layers[0].q.length, model.about.tokens * model.about.width);
  assert.ok(
    first.buffers.every(({ byteLength }) => byteLength === 0),
    "a buffer was copied",
  );
  const { result: maps } = await ask("why", explanationOf(1));
  assert.ok(maps.legrad.some((value) => value > 0));
  const { result: other } = await ask("forward", forwardOf(2));
  assert.notDeepEqual(other.tokens, tokens);
  const { result: again } = await ask("forward", forwardOf(1));
  assert.deepEqual(again, first.result);
  const { result: mapsAgain } = await ask("why", explanationOf(1));
  assert.deepEqual(mapsAgain, maps);
});
