// Models of timm and transformers from their own files, compared with PyTorch's numbers in cases.json.

import assert from "node:assert/strict";
import { readdirSync, readFileSync } from "node:fs";
import path from "node:path";
import { test } from "node:test";
import { folder, kernels, loadScripts, SlicedFile } from "./scripts.mjs";

const { Vit, openFiles, explain, say } = loadScripts();
const { cases, bound } = JSON.parse(readFileSync(path.join(folder, "cases.json")));

const filesOf = (name) => {
  const model = path.join(folder, name);
  return readdirSync(model)
    .filter((file) => /\.(json|safetensors|txt)$/.test(file))
    .map((file) => new SlicedFile(file, readFileSync(path.join(model, file))));
};

function floats(name) {
  const bytes = readFileSync(path.join(folder, name));
  return new Float32Array(bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length));
}

// The largest difference, as a share of the largest expected value.
function errorOf(values, expected) {
  assert.equal(values.length, expected.length);
  let most = 0;
  let scale = 0;
  for (let i = 0; i < expected.length; i += 1) {
    const difference = Math.abs(values[i] - expected[i]);
    most = difference <= most ? most : difference; // NaN stays
    scale = Math.max(scale, Math.abs(expected[i]));
  }
  return most / scale;
}

// Attention (H, T, T) of a layer from its queries and keys.
function attentionOf({ q, k }, H, T, K) {
  const weights = new Float32Array(H * T * T);
  for (let row = 0; row < H * T; row += 1) {
    const head = Math.floor(row / T);
    const logits = Array.from({ length: T }, (_, t) => {
      let sum = 0;
      for (let i = 0; i < K; i += 1) sum += q[row * K + i] * k[(head * T + t) * K + i];
      return sum;
    });
    const most = Math.max(...logits);
    const powers = logits.map((logit) => Math.exp(logit - most));
    const sum = powers.reduce((total, power) => total + power, 0);
    weights.set(
      powers.map((power) => power / sum),
      row * T,
    );
  }
  return weights;
}

for (const {
  name,
  files,
  size,
  outputs,
  maps,
  notes,
  about: expected,
  labels,
  imagenet,
  image,
} of cases) {
  test(name, async () => {
    const dropped = filesOf(files);
    const model = await openFiles(dropped, size);
    const vit = await Vit.open(model.about, model.tensors, kernels());
    const errors = {};
    vit.fit([3 * vit.patch[0], 2 * vit.patch[1]]);
    vit.forward(new Float32Array(18 * vit.patch[0] * vit.patch[1])); // an image of another size comes before
    vit.fit(image);
    const record = vit.forward(floats(outputs.input));
    for (const part of ["logits", "features", "output"]) {
      if (outputs[part]) errors[part] = errorOf(record[part], floats(outputs[part]));
    }
    if (!outputs.logits) assert.equal(record.logits.length, 0);
    record.tokens.forEach((tokens, layer) => {
      if (outputs.tokens)
        errors[`tokens ${layer}`] = errorOf(tokens, floats(outputs.tokens[layer]));
    });
    const attention = outputs.attention || {};
    for (const [layer, file] of Object.entries(attention)) {
      const weights = attentionOf(record.layers[layer], vit.heads, vit.tokens, vit.K);
      errors[`attention ${layer}`] = errorOf(weights, floats(file));
    }
    const methods = Object.entries(maps);
    const explained = methods.length ? explain(vit, { target: 1, against: null }) : {};
    for (const [method, file] of methods) {
      errors[method] = errorOf(explained[method], floats(file));
    }
    for (const [part, error] of Object.entries(errors)) {
      assert.ok(error <= bound, `${part} differ by ${error} of their largest value`);
    }
    const sentences = model.notes.map(([note, fields]) => say(note, fields));
    assert.deepEqual(sentences, notes);
    for (const [key, value] of Object.entries(expected || {})) {
      assert.deepEqual(model.about[key], value, key);
    }
    assert.deepEqual(model.labels, labels);
    assert.equal(model.imagenet, imagenet);
    for (const file of dropped.filter((each) => each.name.endsWith(".safetensors"))) {
      assert.ok(file.largest < file.size, "the file was read at once");
    }
    const worst = Math.max(...Object.values(errors));
    console.log(`${name}: ${worst.toExponential(1)}`);
  });
}
