// The forward of a plain pre-norm Vision Transformer, as timm and transformers compute it, which keeps every query, key
// and token.
//
// Shapes: T tokens = R prefix + P patches, D width, H heads, K = D / H, F width of the MLP. Matrices in the memory that
// WebAssembly shares have rows in multiples of 4 and columns in multiples of 8; what is beyond T is never read.

import { isEqual, sumOf } from "../front/values.js";
import { resizePositions } from "./positions.js";
import { refuse } from "./refuse.js";
import { describeSize, gridShape, mostTokens } from "./sizes.js";

const HIDDEN = -1e30; // added to the scores of the keys beyond T, so that their softmax is 0
const WASM_PAGE = 65536; // bytes
const LARGEST_MEMORY = 2 ** 32; // bytes

export const roundUp = (count, to) => Math.ceil(count / to) * to;
const rowsFor = (tokens) => roundUp(tokens, 4) + 4; // of a matrix with a row for each token

// Writes a matrix (depth, cols) as gemm reads it: panels of 8 columns, the last filled with zeros. `down` and `across`
// are the steps in `source` to the next row and column, so that they also transpose.
export function pack(source, from, down, across, depth, cols, target, factor = 1) {
  let to = 0;
  for (let panel = 0; panel < cols; panel += 8) {
    for (let row = 0; row < depth; row += 1) {
      let at = from + row * down + panel * across;
      for (let col = panel; col < panel + 8; col += 1) {
        target[to] = col < cols ? source[at] * factor : 0;
        at += across;
        to += 1;
      }
    }
  }
}

// The mean of D numbers, and 1 / their deviation.
export function moments(x, start, D, eps) {
  let mean = 0;
  let variance = 0;
  for (let i = start; i < start + D; i += 1) mean += x[i] / D;
  for (let i = start; i < start + D; i += 1) variance += (x[i] - mean) ** 2;
  return [mean, 1 / Math.sqrt(variance / D + eps)];
}

// Memory for WebAssembly. Refuses sizes that it cannot have, and those for which there is no room.
function newMemory(bytes) {
  const size = Math.ceil(bytes / 2 ** 20).toLocaleString("en");
  if (!(bytes <= LARGEST_MEMORY)) refuse("too large", { size });
  try {
    return new WebAssembly.Memory({ initial: Math.ceil(bytes / WASM_PAGE) });
  } catch {
    return refuse("no memory", { size });
  }
}

// Arrays of the given sizes by name, in one memory for WebAssembly.
function allocate(sizes) {
  const total = sumOf(Object.values(sizes).map((count) => roundUp(count, 4)));
  const memory = newMemory(4 * total);
  const held = {};
  let at = 0;
  for (const [name, count] of Object.entries(sizes)) {
    held[name] = new Float32Array(memory.buffer, at, count);
    at += 4 * roundUp(count, 4);
  }
  return { memory, held };
}

// Approximations of GELU: x·σ(u) with u(x), and its slope.
const GELU_SCALE = Math.sqrt(8 / Math.PI);
const GELU_CUBE = 0.044715;
const APPROXIMATIONS = {
  gelu_tanh: {
    bend: (x) => GELU_SCALE * (x + GELU_CUBE * x ** 3),
    slope: (x) => GELU_SCALE * (1 + 3 * GELU_CUBE * x ** 2),
  },
  quick_gelu: { bend: (x) => 1.702 * x, slope: () => 1.702 },
};

const sigmoid = (x) => 1 / (1 + Math.exp(-x));

export class Vit {
  // A model from its description, its tensors by name ({shape, values()}, also as promises) and kernels.wasm. A tensor
  // is packed and let go before the next is read. Calls report(share) after each.
  static async open(about, tensors, wasm, report = () => {}) {
    const vit = new Vit();
    Object.assign(vit, about, { about });
    vit.shapes = new Map(Object.entries(tensors).map(([name, { shape }]) => [name, shape]));
    vit.K = vit.width / vit.heads;
    const { memory, held } = allocate(vit.sizes());
    vit.held = held;
    vit.copies = { middles: [], qkv: [], hidden: [] };
    const matrices = vit.matrices();
    for (const [number, matrix] of matrices.entries()) {
      const [cols, depth] = vit.shapes.get(`${matrix}.weight`);
      pack(await tensors[`${matrix}.weight`].values(), 0, 1, depth, depth, cols, held[matrix]);
      held[`${matrix}.bias`].set(await tensors[`${matrix}.bias`].values());
      report((number + 1) / matrices.length);
    }
    for (const name of vit.shapes.keys()) {
      if (/norm|prefix|positions/.test(name)) held[name] = await tensors[name].values();
    }
    vit.places = held.positions;
    vit.fit(about.image);
    const { instance } = await WebAssembly.instantiate(wasm, { page: { memory } });
    vit.kernels = instance.exports;
    return vit;
  }

  // Names of the linear layers.
  matrices() {
    const names = [...this.shapes.keys()].filter((name) => !name.includes("norm"));
    return names
      .filter((name) => name.endsWith(".weight"))
      .map((name) => name.slice(0, -".weight".length));
  }

  // Takes inputs of a size [height, width] from here on, by default the model's own. Positions are resized from those
  // of the model's own size.
  fit(image = this.about.image) {
    if (isEqual(image, this.fitted)) return;
    const { about, held, width: D } = this;
    this.fitted = image;
    Object.assign(this, describeSize(about, image));
    this.M = rowsFor(this.tokens);
    this.N = roundUp(this.tokens, 8);
    held.absent.fill(0).fill(HIDDEN, this.tokens);
    const own = gridShape(about, about.image);
    const grid = gridShape(about, image);
    const isOwn = own.every((count, axis) => count === grid[axis]);
    held.positions = isOwn ? this.places : resizePositions(this.places, D, own, grid, about.smooth);
  }

  // Sizes of the arrays in the memory by name: work space for the largest input, and the weights and biases of the
  // linear layers.
  sizes() {
    const { about, width: D, hidden: F, patch, classes, readouts, shapes, K } = this;
    const M = rowsFor(mostTokens(about));
    const N = roundUp(mostTokens(about), 8);
    const pixels = 3 * patch[0] * patch[1]; // of a patch
    const [pooled = 0] = shapes.get("pooled.weight") ?? [];
    const wide = M * Math.max(F, 3 * D, readouts.length * D);
    const sizes = {
      x: M * D,
      y: M * Math.max(D, roundUp(classes, 8), roundUp(pooled, 8)),
      o: Math.max(M, 4 * readouts.length) * D,
      g: M * D,
      small: N * K,
      spare: wide,
      wide: Math.max(wide, M * pixels),
      scores: M * N,
      slopes: M * N,
      turned: M * N,
      back: Math.max(F, 3 * D) * D,
      zeros: Math.max(N, F, D),
      absent: N,
    };
    for (const matrix of this.matrices()) {
      const [cols, depth] = shapes.get(`${matrix}.weight`);
      sizes[matrix] = depth * roundUp(cols, 8);
      sizes[`${matrix}.bias`] = roundUp(cols, 8);
    }
    return sizes;
  }

  // c (rows, cols) = a (rows, depth) · matrix + bias. `from` and `to` are the columns at which a and c begin in
  // matrices of `aCols` and `cCols` columns.
  multiply(a, matrix, c, shape) {
    const { rows, cols, depth, bias = this.held.zeros } = shape;
    const { aCols = depth, cCols = cols, from = 0, to = 0 } = shape;
    const atA = a.byteOffset + 4 * from;
    const atC = c.byteOffset + 4 * to;
    const sizes = [roundUp(rows, 4), roundUp(cols, 8), depth];
    this.kernels.gemm(atA, 4 * aCols, matrix.byteOffset, atC, 4 * cCols, bias.byteOffset, ...sizes);
  }

  // c = a · weightsᵀ + bias, as a linear layer computes it.
  linear(a, name, c, rows = this.tokens, to = 0) {
    const { held, shapes } = this;
    const [cols, depth] = shapes.get(`${name}.weight`);
    const bias = held[`${name}.bias`];
    this.multiply(a, held[name], c, { rows, cols, depth, bias, cCols: roundUp(cols, 8), to });
  }

  norm(from, to, name, rows = this.tokens) {
    const { width: D, eps, held } = this;
    const weight = held[`${name}.weight`];
    const bias = held[`${name}.bias`];
    for (let start = 0; start < rows * D; start += D) {
      const [mean, scale] = moments(from, start, D, eps);
      for (let i = 0; i < D; i += 1) {
        to[start + i] = (from[start + i] - mean) * scale * weight[i] + bias[i];
      }
    }
  }

  // The attention (T, N) of a head, from the (T, 3·D) of `qkv`: softmax of q·k·scale over the keys.
  attention(qkv, head) {
    const { width: D, tokens: T, K, N, scale, held } = this;
    const { scores, small, absent } = held;
    const shape = { rows: T, cols: N, depth: K, aCols: 3 * D, from: head * K, bias: absent };
    pack(qkv, D + head * K, 1, 3 * D, K, T, small, scale);
    this.multiply(qkv, small, scores, shape);
    this.kernels.softmax(scores.byteOffset, T, N);
    return scores;
  }

  // The pixels of the patches (P, 3·height·width), from those (3, height, width) of a normalized image.
  cutPatches(input, patches) {
    const [down, across] = this.patch;
    const side = this.image[1];
    const count = this.tokens - this.prefix;
    const channel = input.length / 3;
    const cols = Math.floor(side / across);
    let to = 0;
    for (let patch = 0; patch < count; patch += 1) {
      const top = Math.floor(patch / cols) * down;
      const left = (patch % cols) * across;
      for (let color = 0; color < 3; color += 1) {
        for (let row = 0; row < down; row += 1) {
          const at = color * channel + (top + row) * side + left;
          patches.set(input.subarray(at, at + across), to);
          to += across;
        }
      }
    }
  }

  // Tokens from the pixels (3, height, width) of a normalized image: patches, prefix tokens and positions.
  embed(input, x) {
    const { width: D, tokens: T, prefix: R, held } = this;
    this.cutPatches(input, held.wide);
    this.linear(held.wide, "embed", x, T - R, R * D);
    x.set(held.prefix);
    for (let i = 0; i < (T - R) * D; i += 1) x[R * D + i] += held.positions[i];
    if (held["norm_pre.weight"]) this.norm(x, x, "norm_pre");
  }

  // The weight of a linear layer at an output and input, from its packed matrix.
  weightAt(name, output, input) {
    const [, depth] = this.shapes.get(`${name}.weight`);
    return this.held[name][(output - (output % 8)) * depth + 8 * input + (output % 8)];
  }

  // Packs the transposed weights (cols, depth) of a linear layer, for products with gradients.
  packTransposed(name, target) {
    const [cols, depth] = this.shapes.get(`${name}.weight`);
    const matrix = this.held[name];
    let to = 0;
    for (let panel = 0; panel < depth; panel += 8) {
      for (let output = 0; output < cols; output += 1) {
        const from = (output - (output % 8)) * depth + (output % 8);
        for (let input = panel; input < panel + 8; input += 1) {
          target[to] = input < depth ? matrix[from + 8 * input] : 0;
          to += 1;
        }
      }
    }
  }

  // The vector (D) of a read-out, from tokens (T, D) and their shares.
  pool(tokens, readout) {
    const { width: D } = this;
    const pooled = new Float32Array(D);
    readout.forEach((share, t) => {
      if (!share) return;
      for (let i = 0; i < D; i += 1) pooled[i] += share * tokens[t * D + i];
    });
    return pooled;
  }

  // What the head reads, (D) for each read-out one after another, normalized before or after the tokens are pooled.
  features(x) {
    const { width: D, readouts, held } = this;
    const { wide, o } = held;
    const normalizes = Boolean(held["norm.weight"]);
    if (normalizes) this.norm(x, wide, "norm");
    readouts.forEach((readout, k) => o.set(this.pool(normalizes ? wide : x, readout), k * D));
    if (held["fc_norm.weight"]) this.norm(o, o, "fc_norm", readouts.length);
    return o.slice(0, readouts.length * D);
  }

  // The output of a model without a classifier, from the tokens of the last layer: the features, or what the pooler or
  // the projection makes of them.
  output(x) {
    const features = this.features(x);
    if (!this.shapes.has("pooled.weight")) return features;
    const { held, bends } = this;
    const [size] = this.shapes.get("pooled.weight");
    held.o.set(features);
    this.linear(held.o, "pooled", held.y, 1);
    const pooled = held.y.slice(0, size);
    return bends ? pooled.map(Math.tanh) : pooled;
  }

  // Logits from the tokens of the last layer, none of a model without a head.
  read(x) {
    const { held, classes } = this;
    held.o.set(this.features(x));
    if (!classes) return new Float32Array(0);
    this.linear(held.o, "head", held.y, 1);
    return held.y.slice(0, classes);
  }

  // The activation of `count` values of the MLP, in place.
  activate(values, count) {
    if (this.activation === "gelu") {
      this.kernels.gelu(values.byteOffset, count);
      return;
    }
    const { bend } = APPROXIMATIONS[this.activation];
    for (let i = 0; i < count; i += 1) values[i] *= sigmoid(bend(values[i]));
  }

  // Multiplies `count` gradients by the slope of the activation at `inputs`.
  activateBackward(gradients, inputs, count) {
    if (this.activation === "gelu") {
      this.kernels.gelu_slope(gradients.byteOffset, inputs.byteOffset, count);
      return;
    }
    const { bend, slope } = APPROXIMATIONS[this.activation];
    for (let i = 0; i < count; i += 1) {
      const x = inputs[i];
      const share = sigmoid(bend(x));
      gradients[i] *= share * (1 + x * (1 - share) * slope(x));
    }
  }

  // Runs the model. `off` lists the [layer, head] that give zero, or their mean over other photos if `mean`. Returns
  // {layers: [{q, k: (H, T, K), scale}], tokens: [(T, D) after each layer], features, output, logits} with scaled q,
  // and keeps it.
  forward(input, off = [], mean = false) {
    const { width: D, tokens: T, scale } = this;
    const { x } = this.held;
    const kept = { off, begins: [], ...this.copies };
    const record = { layers: [], tokens: [] };
    this.kept = kept;
    this.embed(input, x);
    kept.begins.push(x.slice(0, T * D));
    for (let layer = 0; layer < this.layers; layer += 1) {
      this.attend(layer, mean);
      this.runMlp(layer);
      record.layers.push({ scale, ...this.split(kept.qkv[layer]) });
      record.tokens.push(kept.begins[layer + 1]);
    }
    record.features = this.features(x);
    record.output = this.output(x);
    record.logits = this.read(x);
    return record;
  }

  // Adds (T, D) to the tokens `x`.
  add(from) {
    const { x } = this.held;
    const size = this.tokens * this.width;
    for (let i = 0; i < size; i += 1) x[i] += from[i];
  }

  // Keeps values of a layer for gradients, in the memory that those of the forward before had.
  keep(part, layer, values) {
    const copies = this.copies[part];
    if (copies[layer]?.length !== values.length) copies[layer] = new Float32Array(values.length);
    copies[layer].set(values);
  }

  // The attention of a layer, from the tokens `x` to themselves.
  attend(layer, mean) {
    const { width: D, tokens: T, heads: H, K, N } = this;
    const { x, y, wide, o, small } = this.held;
    this.norm(x, y, `${layer}.norm1`);
    this.linear(y, `${layer}.qkv`, wide);
    this.keep("qkv", layer, wide.subarray(0, T * 3 * D));
    for (let head = 0; head < H; head += 1) {
      const attention = this.attention(wide, head);
      const shape = { rows: T, cols: K, depth: T, aCols: N, cCols: D, to: head * K };
      pack(wide, 2 * D + head * K, 3 * D, 1, T, K, small);
      this.multiply(attention, small, o, shape);
    }
    this.visitOutputs?.(o, layer);
    this.replace(o, layer, mean);
    this.linear(o, `${layer}.proj`, y);
    this.add(y);
    this.keep("middles", layer, x.subarray(0, T * D));
  }

  // The MLP of a layer, from the tokens `x` to themselves.
  runMlp(layer) {
    const { width: D, tokens: T, hidden: F, kept } = this;
    const { x, y, wide } = this.held;
    this.norm(x, y, `${layer}.norm2`);
    this.linear(y, `${layer}.fc1`, wide);
    this.keep("hidden", layer, wide.subarray(0, T * F));
    this.activate(wide, T * F);
    this.linear(wide, `${layer}.fc2`, y);
    this.add(y);
    kept.begins.push(x.slice(0, T * D));
  }

  // {token (D) of a patch that enters the first layer, position (D) or null, lengths (L + 1) before and after layers,
  // added (L, 2): lengths of what attention and MLP add}.
  stream(patch) {
    const { width: D, prefix: R, held } = this;
    const { begins, middles } = this.kept;
    const rowOf = (x, row) => [...x.subarray(row * D, (row + 1) * D)];
    const tokenOf = (x) => rowOf(x, R + patch);
    const distance = (to, from) => {
      const start = tokenOf(from);
      return Math.hypot(...tokenOf(to).map((value, i) => value - start[i]));
    };
    const position = rowOf(held.positions, patch);
    return {
      token: tokenOf(begins[0]),
      position: position.some(Boolean) ? position : null,
      lengths: begins.map((x) => Math.hypot(...tokenOf(x))),
      added: middles.map((middle, layer) => [
        distance(middle, begins[layer]),
        distance(begins[layer + 1], middle),
      ]),
    };
  }

  // Measures the outputs (L, T, D) of all heads on average over some inputs, for `replace`.
  measureMeans(inputs) {
    const size = this.tokens * this.width;
    const means = new Float32Array(this.layers * size);
    this.visitOutputs = (o, layer) => {
      for (let i = 0; i < size; i += 1) means[layer * size + i] += o[i] / inputs.length;
    };
    for (const input of inputs) this.forward(input);
    this.visitOutputs = null;
    this.held.means = means;
  }

  // Sets the outputs (T, D) of the heads of a layer that are off to zero, or to their means.
  replace(o, layer, mean) {
    const { width: D, tokens: T, K } = this;
    const { means } = this.held;
    const first = layer * T * D; // of the layer's means
    for (const [at, head] of this.kept.off) {
      if (at !== layer) continue;
      for (let to = head * K; to < T * D; to += D) {
        if (mean) o.set(means.subarray(first + to, first + to + K), to);
        else o.fill(0, to, to + K);
      }
    }
  }

  // {q · scale, k}, each (H, T, K), from the (T, 3·D) of a layer.
  split(qkv) {
    const { width: D, tokens: T, heads: H, K, scale } = this;
    const q = new Float32Array(T * D);
    const k = new Float32Array(T * D);
    let to = 0;
    for (let head = 0; head < H; head += 1) {
      for (let t = 0; t < T; t += 1) {
        const from = t * 3 * D + head * K;
        for (let i = from; i < from + K; i += 1) {
          q[to] = qkv[i] * scale;
          k[to] = qkv[i + D];
          to += 1;
        }
      }
    }
    return { q, k };
  }
}
