// Weights in safetensors files: u64 length of the header, header in JSON, data. A header has {name: {dtype, shape,
// data_offsets: [first byte, byte after the last] in the data}}. Files are read in slices: the header, then one tensor
// at a time.

import { parseJson, readJson } from "./json.js";
import { clip, codeName, isCount, isObject, refuse, refuseOther } from "./refuse.js";

const LONGEST_HEADER = 16 * 2 ** 20; // bytes
const MOST_SIDES = 8; // of a tensor
const INDEX = "model.safetensors.index.json";
const TYPES = {
  1: ["BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"],
  2: ["I16", "U16", "F16", "BF16"],
  4: ["I32", "U32", "F32"],
  8: ["I64", "U64", "F64"],
}; // by bytes of a value
const WIDTHS = new Map(
  Object.entries(TYPES).flatMap(([bytes, types]) => types.map((type) => [type, Number(bytes)])),
);
const FORMATS = ["F32", "F16", "BF16"]; // types of weights

const bytesAt = async (file, from, to) => new Uint8Array(await file.slice(from, to).arrayBuffer());

// The header of a file as an object, and the place where its data begin.
async function readHeader(file, name) {
  const start = await bytesAt(file, 0, Math.min(64, file.size));
  refuseOther(start, name);
  if (file.size < 8) refuse("short weights", { file: name, size: file.size });
  const length = Number(new DataView(start.buffer).getBigUint64(0, true));
  const limits = { file: name, length: length.toLocaleString("en") };
  if (length > LONGEST_HEADER) refuse("long header", limits);
  if (8 + length > file.size) refuse("cut header", limits);
  return { header: parseJson(await bytesAt(file, 8, 8 + length), name), begin: 8 + length };
}

// {dtype, shape, from, to: bytes in the file} of an entry of a header.
function readEntry(entry, fields, begin, end) {
  if (!isObject(entry)) refuse("bad entry", fields);
  const { dtype, shape, data_offsets: offsets } = entry;
  if (!WIDTHS.has(dtype)) {
    refuse("bad type", { ...fields, type: clip(dtype) });
  }
  if (!Array.isArray(shape) || shape.length > MOST_SIDES || !shape.every(isCount)) {
    refuse("bad shape", { ...fields, shape: clip(shape) });
  }
  if (!Array.isArray(offsets) || offsets.length !== 2 || !offsets.every(isCount)) {
    refuse("bad offsets", { ...fields, offsets: clip(offsets) });
  }
  const [from, to] = offsets.map((offset) => offset + begin);
  if (from > to || to > end) refuse("outside", { ...fields, offsets: clip(offsets) });
  const bytes = shape.reduce((product, side) => product * side, WIDTHS.get(dtype));
  if (bytes !== to - from) {
    const counts = { bytes: bytes.toLocaleString("en"), held: (to - from).toLocaleString("en") };
    refuse("bad size", { ...fields, ...counts });
  }
  return { dtype, shape, from, to };
}

// Refuses tensors that share bytes, and bytes that belong to no tensor.
function checkLayout(tensors, name, begin, end) {
  const sorted = [...tensors].sort(([, a], [, b]) => a.from - b.from || a.to - b.to);
  let at = begin;
  for (const [tensor, { from, to }] of sorted) {
    if (from < at) refuse("overlap", { file: name, tensor: clip(tensor) });
    if (from > at) refuse("gap", { file: name });
    at = to;
  }
  if (at < end) refuse("gap", { file: name });
}

// The tensors of a file by name: {file, dtype, shape, from, to}.
async function readTensors(file) {
  const name = clip(file.name);
  const { header, begin } = await readHeader(file, name);
  const tensors = new Map();
  for (const [tensor, entry] of Object.entries(header)) {
    if (tensor === "__metadata__") continue;
    const fields = { file: name, tensor: clip(tensor) };
    tensors.set(tensor, { file, ...readEntry(entry, fields, begin, file.size) });
  }
  if (!tensors.size) refuse("no tensors", { file: name });
  checkLayout(tensors, name, begin, file.size);
  return tensors;
}

// The tensors of the files that an index lists, which has {weight_map: {name: file}}.
async function readShards(index, files) {
  const { weight_map: map } = index;
  if (!isObject(map)) refuse("bad index", { file: INDEX });
  const tensors = new Map();
  for (const name of new Set(Object.values(map))) {
    const file = files.find((each) => each.name === name);
    if (!file) refuse("no shard", { file: clip(name) });
    for (const [tensor, entry] of await readTensors(file)) {
      const expected = Object.hasOwn(map, tensor) ? map[tensor] : null;
      if (expected !== name) refuse("wrong shard", { file: clip(name), tensor: clip(tensor) });
      tensors.set(tensor, entry);
    }
  }
  for (const tensor of Object.keys(map)) {
    if (!tensors.has(tensor))
      refuse("lost tensor", { file: clip(map[tensor]), tensor: clip(tensor) });
  }
  return tensors;
}

// The weights among dropped files: tensors by name.
export async function readCheckpoint(files) {
  const index = files.find((file) => file.name === INDEX);
  if (index) return readShards(await readJson(index), files);
  const weights = files.filter((file) => file.name.endsWith(".safetensors"));
  const [pickle] = files.filter((file) => /\.(bin|pt|pth|ckpt|pkl|pickle|tar)$/.test(file.name));
  if (!weights.length && pickle) {
    const file = clip(pickle.name);
    refuse("pickle", { file, code: codeName(file) });
  }
  if (!weights.length) refuse("no weights");
  if (weights.length > 1) refuse("several weights", { count: weights.length });
  if (/-\d+-of-\d+\.safetensors$/.test(weights[0].name)) refuse("no index", { file: INDEX });
  return readTensors(weights[0]);
}

// The value of each of the 65,536 half-precision numbers. Not every browser has Float16Array.
let halves = null;

function tableOfHalves() {
  const table = new Float32Array(65536);
  for (let bits = 0; bits < 65536; bits += 1) {
    const exponent = (bits >> 10) & 31;
    const fraction = bits & 1023;
    let value = (1024 + fraction) * 2 ** (exponent - 25);
    if (exponent === 0) value = fraction * 2 ** -24;
    if (exponent === 31) value = fraction ? NaN : Infinity;
    table[bits] = bits & 0x8000 ? -value : value;
  }
  return table;
}

// Float32 numbers of a buffer of a type in `FORMATS`.
function decodeWeights(buffer, dtype) {
  if (dtype === "F32") return new Float32Array(buffer);
  const short = new Uint16Array(buffer);
  if (dtype === "BF16")
    return new Float32Array(Uint32Array.from(short, (bits) => bits << 16).buffer);
  halves ||= tableOfHalves();
  return Float32Array.from(short, (bits) => halves[bits]);
}

// Float32 numbers of a tensor of `readCheckpoint`. Refuses weights that are not finite.
export async function loadTensor(name, { file, dtype, from, to }) {
  const fields = { file: clip(file.name), tensor: clip(name) };
  if (!FORMATS.includes(dtype)) refuse("other type", { ...fields, type: dtype });
  const bytes = await bytesAt(file, from, to);
  if (bytes.length !== to - from) refuse("changed file", fields);
  const values = decodeWeights(bytes.buffer, dtype);
  let sum = 0; // of zeros, unless a value is not finite
  for (let i = 0; i < values.length; i += 1) sum += values[i] * 0;
  if (sum !== 0) refuse("not finite", fields);
  return values;
}
