// Files that are no models, or lie about themselves: each ends in a sentence, within a second.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import path from "node:path";
import { test } from "node:test";
import { folder, kernels, loadScripts, SlicedFile } from "./scripts.mjs";

const { Vit, openFiles, say } = loadScripts();
const LONGEST = 1000; // milliseconds
const encode = (text) => new TextEncoder().encode(text);

// A model that opens, of which all hostile ones are changed copies.
const model = path.join(folder, "model");
const config = JSON.parse(readFileSync(path.join(model, "config.json")));
const weights = readFileSync(path.join(model, "model.safetensors"));
const length = Number(weights.readBigUInt64LE(0));
const header = JSON.parse(weights.subarray(8, 8 + length));
const data = weights.subarray(8 + length);
const first = "cls_token";

// A safetensors file of a header, as an object or text, and data. `declared`: its stated length.
function pack(content, bytes = data, declared = null) {
  const text = encode(typeof content === "string" ? content : JSON.stringify(content));
  const size = Buffer.alloc(8);
  size.writeBigUInt64LE(BigInt(declared ?? text.length));
  return Buffer.concat([size, text, bytes]);
}

// The header with another entry for the first tensor.
const withEntry = (change) => pack({ ...header, [first]: { ...header[first], ...change } });

// Names with quotes and markup pass through sentences as they are, and never as HTML.
const files = (bytes, others = {}) => [
  new SlicedFile("model.safetensors", bytes),
  ...Object.entries({ "config.json": JSON.stringify(config), ...others }).map(
    ([name, text]) => new SlicedFile(name, typeof text === "string" ? encode(text) : text),
  ),
];
const withConfig = (change) =>
  files(weights, { "config.json": JSON.stringify({ ...config, ...change }) });
const withArgs = (change) => withConfig({ model_args: { ...config.model_args, ...change } });
const withPixels = (change) =>
  withConfig({ pretrained_cfg: { ...config.pretrained_cfg, ...change } });
const named = (name, bytes) => [
  new SlicedFile(name, bytes),
  new SlicedFile("config.json", encode("{}")),
];
const without = (name) => {
  const { [name]: entry, ...others } = header;
  return { entry, others };
};

// The tensors without one, with the data moved together.
function dropTensor(name) {
  const { entry, others } = without(name);
  const [from, to] = entry.data_offsets;
  const moved = Object.entries(others).map(([key, each]) => {
    if (key === "__metadata__") return [key, each];
    const shift = each.data_offsets[0] >= to ? to - from : 0;
    return [key, { ...each, data_offsets: each.data_offsets.map((offset) => offset - shift) }];
  });
  return pack(
    Object.fromEntries(moved),
    Buffer.concat([data.subarray(0, from), data.subarray(to)]),
  );
}

const addTensor = (name, dtype, bytes) => {
  const offsets = [data.length, data.length + bytes];
  const entry = { dtype, shape: [1], data_offsets: offsets };
  const text = JSON.stringify({ ...header }).slice(0, -1);
  const joined = `${text}, ${JSON.stringify(name)}: ${JSON.stringify(entry)}}`;
  return pack(joined, Buffer.concat([data, Buffer.alloc(bytes)]));
};

const setValue = (value) => {
  const bytes = Buffer.from(data);
  bytes.writeFloatLE(value, header["head.weight"].data_offsets[0]);
  return pack(header, bytes);
};

const text = JSON.stringify(header);
const [begin, end] = header[first].data_offsets;
const last = "norm.bias";
const shifted = header[last].data_offsets.map((offset) => offset - 4);
const deep = (count) => `${"[".repeat(count)}${"]".repeat(count)}`;
const index = (map) => ({ "model.safetensors.index.json": JSON.stringify({ weight_map: map }) });
const many = JSON.stringify(Object.fromEntries(Array.from({ length: 300_000 }, (_, i) => [i, 0])));
const hub = {
  architectures: ["ViTForImageClassification"],
  model_type: "vit",
  hidden_size: 48,
  num_hidden_layers: 2,
  num_attention_heads: 3,
};
const proto = '{"__proto__": {"architecture": "vit_tiny_patch16_224"}}';

// [problem that is expected, files] by what is wrong.
const HOSTILE = {
  "no files": ["no weights", []],
  "empty weights": ["short weights", files(Buffer.alloc(0))],
  "seven bytes": ["short weights", files(weights.subarray(0, 7))],
  "header of 2 GB": ["long header", files(pack(header, data, 2 ** 31))],
  "header of 2⁶³ bytes": ["long header", files(pack(header, data, 2n ** 63n))],
  "header beyond the end": ["cut header", files(pack(header, Buffer.alloc(0), 10_000_000))],
  "cut header": ["cut header", files(weights.subarray(0, 8 + length - 1))],
  "cut data": ["outside", files(weights.subarray(0, weights.length - 1))],
  "no data": ["outside", files(weights.subarray(0, 8 + length))],
  "bytes at the end": ["gap", files(Buffer.concat([weights, Buffer.alloc(4)]))],
  "header of length 0": ["no JSON", files(pack("", data, 0))],
  "no JSON": ["no JSON", files(pack("{".padEnd(100)))],
  "a list": ["no JSON", files(pack("[]"))],
  "a number": ["no JSON", files(pack("1e999"))],
  "no UTF-8": [
    "no JSON",
    files(Buffer.concat([Buffer.from([2, 0, 0, 0, 0, 0, 0, 0, 255, 254]), data])),
  ],
  "NaN as an offset": ["no JSON", files(pack(text.replace(`[${begin},${end}]`, "[NaN,NaN]")))],
  "infinite offsets": ["bad offsets", files(pack(text.replace(`[${begin},${end}]`, "[0,1e999]")))],
  "infinite shape": ["bad shape", files(pack(text.replace("[1,1,48]", "[1e999]")))],
  "no tensors": ["no tensors", files(pack("{}"))],
  "only metadata": ["no tensors", files(pack('{"__metadata__": {}}'))],
  "deep header": ["deep JSON", files(pack(`{"a": ${deep(100)}}`))],
  "header of brackets": ["deep JSON", files(pack(deep(4_000_000)))],
  "300,000 names": ["many names", files(pack(many))],
  "an open string of 15 MB": ["no JSON", files(pack(`{"${"a".repeat(15e6)}`))],
  "15 MB of backslashes": ["no JSON", files(pack(`{"${"\\".repeat(15e6)}`))],
  "15 MB of quotes": ["many names", files(pack(`{${'""'.repeat(7e6)}`))],
  "a name twice": ["name twice", files(pack(`{"a": 1, ${text.slice(1, -1)}, "a": 1}`))],
  "a name twice after spaces": [
    "name twice",
    files(pack(`{"a": 1, ${text.slice(1, -1)}, "a"${" ".repeat(99)}: 1}`)),
  ],
  "a quadratic of strings and spaces": [
    "many names",
    files(pack(`{${`""${" ".repeat(20)}`.repeat(600_000)}`)),
  ],
  "an escaped name twice": ["name twice", files(pack(`{"\\u0061": 1, "a": 2}`))],
  "an entry of null": ["bad entry", files(pack({ ...header, [first]: null }))],
  "an entry of text": ["bad entry", files(pack({ ...header, [first]: "F32" }))],
  "no type": ["bad type", files(withEntry({ dtype: undefined }))],
  "type of a tensor of an object": ["bad type", files(withEntry({ dtype: "constructor" }))],
  "type of a number": ["bad type", files(withEntry({ dtype: 4 }))],
  "negative side": ["bad shape", files(withEntry({ shape: [-1, 48] }))],
  "side of half": ["bad shape", files(withEntry({ shape: [0.5] }))],
  "nine sides": ["bad shape", files(withEntry({ shape: Array(9).fill(1) }))],
  "shape of text": ["bad shape", files(withEntry({ shape: "48" }))],
  "larger shape": ["bad size", files(withEntry({ shape: [1, 2, 48] }))],
  "shape of 2⁵³": ["bad size", files(withEntry({ shape: Array(8).fill(2 ** 52) }))],
  "three offsets": ["bad offsets", files(withEntry({ data_offsets: [0, 1, 2] }))],
  "negative offset": ["bad offsets", files(withEntry({ data_offsets: [-4, 188] }))],
  "offsets of text": ["bad offsets", files(withEntry({ data_offsets: ["0", "192"] }))],
  "offsets turned around": ["outside", files(withEntry({ data_offsets: [end, begin] }))],
  "offsets beyond the end": [
    "outside",
    files(withEntry({ data_offsets: [2 ** 31, 2 ** 31 + 192] })),
  ],
  "overlapping tensors": [
    "overlap",
    files(pack({ ...header, [last]: { ...header[last], data_offsets: shifted } })),
  ],
  "a hole": ["gap", files(pack(without(first).others))],
  "not a number": ["not finite", files(setValue(NaN))],
  "infinite weight": ["not finite", files(setValue(-Infinity))],
  "weights of whole numbers": ["other type", files(withEntry({ dtype: "I32" }))],
  "a tensor named __proto__": ["unknown tensors", files(addTensor("__proto__", "F32", 4))],
  "a tensor with markup": [
    "unknown tensors",
    files(addTensor("<img src=x onerror=alert(1)>", "F32", 4)),
  ],
  "a tensor too many": [
    "unknown tensors",
    files(addTensor("blocks.0.attn.q_norm.weight", "F32", 4)),
  ],
  "a tensor too few": ["missing tensor", files(dropTensor("blocks.1.attn.proj.bias"))],
  "no positions": ["missing tensor", files(dropTensor("pos_embed"))],
  "a layer too few": ["other size", files(dropTensor("blocks.1.norm1.weight"))],
  "a pickle": ["pickle", named("pytorch_model.bin", Buffer.from("PK\x03\x04rest of the file"))],
  "an old pickle": ["pickle", named("model.pth", Buffer.from([0x80, 2, 0x8a, 0x0a, 0, 0, 0, 0]))],
  "a pickle by another name": ["pickle", named("model.safetensors", Buffer.from("PK\x03\x04rest"))],
  "a pickle with code in its name": [
    "pickle",
    named('");import os#.bin', Buffer.from("PK\x03\x04")),
  ],
  "a web page": ["web page", files(encode("\n<!DOCTYPE html><html>Sign in</html>"))],
  "a pointer of LFS": [
    "pointer",
    files(encode("version https://git-lfs.github.com/spec/v1\noid sha256:0")),
  ],
  "a gzip": ["compressed", files(Buffer.from([0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 0]))],
  "another format": ["other weights", files(encode("GGUF0000000000000"))],
  "two models": ["several weights", [...files(weights), new SlicedFile("b.safetensors", weights)]],
  "a shard alone": ["no index", [new SlicedFile("model-00001-of-00002.safetensors", weights)]],
  "an index of nothing": ["bad index", files(weights, { "model.safetensors.index.json": "{}" })],
  "an index with numbers": ["no shard", files(weights, index({ a: 7 }))],
  "a missing shard": ["no shard", files(weights, index({ a: "../../etc/passwd" }))],
  "a tensor of another shard": ["wrong shard", files(weights, index({ a: "model.safetensors" }))],
  "a tensor of no shard": [
    "lost tensor",
    files(
      weights,
      index(
        Object.fromEntries(
          [...Object.keys(header), "a"].map((name) => [name, "model.safetensors"]),
        ),
      ),
    ),
  ],
  "no configuration": ["no config", [new SlicedFile("model.safetensors", weights)]],
  "configuration of HTML": ["web page", files(weights, { "config.json": "<html></html>" })],
  "configuration of null": ["no JSON", files(weights, { "config.json": "null" })],
  "deep configuration": ["deep JSON", files(weights, { "config.json": `{"a":${deep(1e6)}}` })],
  "configuration of 17 MB": [
    "long JSON",
    files(weights, { "config.json": Buffer.alloc(17e6, " ") }),
  ],
  "configuration by prototype": ["unknown config", files(weights, { "config.json": proto })],
  "no library": ["unknown config", files(weights, { "config.json": "{}" })],
  "another architecture": ["unknown architecture", withConfig({ architecture: "swin_tiny" })],
  "architecture of an object": [
    "unknown architecture",
    withConfig({ architecture: "constructor" }),
  ],
  "attention pool": [
    "unknown architecture",
    withConfig({ architecture: "vit_base_patch16_siglip_224" }),
  ],
  "wider architecture": [
    "other size",
    withConfig({ architecture: "vit_base_patch16_224", model_args: {} }),
  ],
  "arguments of text": ["bad value", withConfig({ model_args: "{}" })],
  "unknown argument": ["unknown argument", withArgs({ qk_norm: true })],
  "unknown activation": ["unknown activation", withArgs({ act_layer: "relu" })],
  "unknown read-out": ["unknown pool", withArgs({ global_pool: "map" })],
  "two read-outs": ["two pools", withConfig({ global_pool: "avg" })],
  "five heads": ["uneven heads", withArgs({ num_heads: 5 })],
  "heads of width 4": ["odd width", withArgs({ num_heads: 12 })],
  "no heads": ["bad number", withArgs({ num_heads: 0 })],
  "heads of text": ["bad number", withArgs({ num_heads: "3" })],
  "patches of another size": ["other size", withArgs({ patch_size: 16 })],
  "other classes": ["other size", withArgs({ num_classes: 7 })],
  "an image of a billion pixels": ["bad number", withArgs({ img_size: 1e9 })],
  "too many patches": ["many patches", withArgs({ img_size: 8 * 200 })],
  "an image that cuts patches": ["cut patches", withArgs({ img_size: 33 })],
  "an image that is no square": ["not square", withArgs({ img_size: [32, 40] })],
  "registers that are not there": ["missing tensor", withArgs({ reg_tokens: 4 })],
  "LayerScale that is not there": ["missing tensor", withArgs({ init_values: 1e-5 })],
  "no norm": ["unknown tensors", withArgs({ final_norm: false })],
  "mean of text": ["bad value", withPixels({ mean: "0.5" })],
  "deviation of 0": ["bad value", withPixels({ std: [0, 0, 0] })],
  "crop of 0": ["bad value", withPixels({ crop_pct: 0 })],
  "unknown interpolation": ["bad value", withPixels({ interpolation: "nearest" })],
  "unknown class": ["unknown class", files(weights, { "config.json": '{"model_type": "swin"}' })],
  "class of an object": [
    "unknown class",
    files(weights, { "config.json": '{"model_type": "vit", "architectures": ["__proto__"]}' }),
  ],
  "class of another type": [
    "two classes",
    files(weights, { "config.json": JSON.stringify({ ...hub, model_type: "deit" }) }),
  ],
  "type of an object": [
    "two classes",
    files(weights, { "config.json": JSON.stringify({ ...hub, model_type: "constructor" }) }),
  ],
  "code of its own": [
    "own code",
    files(weights, { "config.json": JSON.stringify({ ...hub, auto_map: {} }) }),
  ],
  "weights of another library": [
    "missing tensor",
    files(weights, { "config.json": JSON.stringify(hub) }),
  ],
  "epsilon of text": [
    "missing tensor",
    files(weights, { "config.json": JSON.stringify({ ...hub, layer_norm_eps: "1e-6" }) }),
  ],
  "too few names": ["label count", files(weights, { "names.txt": "ant\nbee\n" })],
};

test("the model itself opens", async () => {
  const { about, tensors } = await openFiles(files(weights));
  const vit = await Vit.open(about, tensors, kernels());
  assert.equal(vit.classes, 5);
});

for (const [name, [problem, dropped]] of Object.entries(HOSTILE)) {
  test(name, async () => {
    const start = performance.now();
    const error = await open(dropped).then(
      () => null,
      (reason) => reason,
    );
    const took = performance.now() - start;
    checkRefusal(error, took);
    assert.equal(error.problem, problem);
  });
}

async function open(dropped) {
  const { about, tensors } = await openFiles(dropped);
  await Vit.open(about, tensors, kernels());
}

// Refusals are sentences of one table, without gaps, and of a length that fits on a page.
function checkRefusal(error, took) {
  assert.ok(error, "the model was opened");
  assert.ok(error.problem, error.stack);
  const sentence = say(error.problem, error.fields);
  assert.ok(!/undefined|NaN|\[object/.test(sentence), sentence);
  assert.ok(sentence.length < 700, sentence);
  assert.ok(took < LONGEST, `took ${took} ms`);
}

// Numbers from a seed (mulberry32).
function random(seed) {
  let state = seed;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let value = Math.imul(state ^ (state >>> 15), 1 | state);
    value = (value + Math.imul(value ^ (value >>> 7), 61 | value)) ^ value;
    return ((value ^ (value >>> 14)) >>> 0) / 2 ** 32;
  };
}

test("200 files with changed bytes are refused or open as a whole", async () => {
  const next = random(0);
  let refused = 0;
  for (let i = 0; i < 200; i += 1) {
    const bytes = Buffer.from(weights);
    const count = 1 + Math.floor(next() * 3);
    for (let k = 0; k < count; k += 1) {
      bytes[Math.floor(next() * (8 + length))] = Math.floor(next() * 256);
    }
    const start = performance.now();
    const error = await open(files(bytes)).then(
      () => null,
      (reason) => reason,
    );
    const took = performance.now() - start;
    if (error) checkRefusal(error, took);
    if (error) refused += 1;
  }
  assert.ok(refused > 150, `${refused} refused`);
});

// A copy of a configuration with another value at a place, which may be in an object within it.
function changeOne(content, next, value) {
  const names = Object.keys(content);
  const name = names[Math.floor(next() * names.length)];
  const inner = content[name];
  const isObject = inner && typeof inner === "object" && Object.keys(inner).length;
  return { ...content, [name]: isObject && next() < 0.7 ? changeOne(inner, next, value) : value };
}

const VALUES = [null, -1, 0, 0.5, 1e300, "", "constructor", [], [[]], {}, true, false, [3, "a"]];

test("500 changed configurations of both libraries are refused or open as a whole", async () => {
  const next = random(2);
  let refused = 0;
  for (let i = 0; i < 500; i += 1) {
    const from = path.join(folder, i % 2 ? "hub" : "model");
    const names = ["config.json", "preprocessor_config.json"];
    const texts = names
      .slice(0, 1 + (i % 2))
      .map((name) => [name, readFileSync(path.join(from, name))]);
    const which = Math.floor(next() * texts.length);
    const value = VALUES[Math.floor(next() * VALUES.length)];
    texts[which][1] = JSON.stringify(changeOne(JSON.parse(texts[which][1]), next, value));
    const dropped = files(
      readFileSync(path.join(from, "model.safetensors")),
      Object.fromEntries(texts),
    );
    const start = performance.now();
    const error = await open(dropped).then(
      () => null,
      (reason) => reason,
    );
    if (error) checkRefusal(error, performance.now() - start);
    if (error) refused += 1;
  }
  assert.ok(refused > 150 && refused < 500, `${refused} refused`);
});

test("a file of any first bytes is refused", async () => {
  const next = random(1);
  for (let i = 0; i < 200; i += 1) {
    const bytes = Buffer.from(Array.from({ length: Math.floor(next() * 200) }, () => next() * 256));
    const start = performance.now();
    const error = await open(files(bytes)).then(
      () => null,
      (reason) => reason,
    );
    checkRefusal(error, performance.now() - start);
  }
});

test("lines of Python hold no name that could end their string", async () => {
  const error = await open(HOSTILE["a pickle with code in its name"][1]).catch((reason) => reason);
  const lines = say(error.problem, error.fields).split("\n").slice(1);
  assert.equal(lines.length, 5);
  assert.ok(lines.some((line) => line.includes('torch.load("pytorch_model.bin"')));
});
