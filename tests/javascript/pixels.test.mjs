// A photo that is squeezed and cut, compared with Pillow's levels.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import path from "node:path";
import { test } from "node:test";
import { folder, loadScripts } from "./scripts.mjs";

const { preprocess } = loadScripts();

test("a squeezed photo", () => {
  const text = readFileSync(path.join(folder, "photo.json"), "utf-8");
  const { width, height, levels, about } = JSON.parse(text);
  const photo = { width, height, data: Uint8Array.from(levels) };
  const { input } = preprocess(photo, about, false);
  const expected = readFileSync(path.join(folder, "expected.bin"));
  assert.ok(expected.equals(Buffer.from(input.buffer)));
});
