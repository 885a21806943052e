// The backward of the last forward: the maps of a class, or of the similarity to another photo, that
// `vitlens.attribution` makes from it. `of` is {target, against}, numbers of classes, or {like}, a unit vector of
// features.

import { largestOf, sumOf } from "../front/values.js";
import { sharesOf } from "../in_page/numbers.js";
import { refuse } from "./refuse.js";
import { moments, pack, roundUp } from "./vit.js";

// Adds to `sum` the gradient at x (rows, D), given the gradient of the layer norm of x. `fixed` takes its deviation as
// a constant, so that the norm is linear.
function normBackward(vit, x, gradient, name, sum, { rows = vit.tokens, fixed = false } = {}) {
  const { width: D, eps, held } = vit;
  const weight = held[`${name}.weight`];
  for (let start = 0; start < rows * D; start += D) {
    const [mean, scale] = moments(x, start, D, eps);
    let slope = 0;
    let along = 0;
    for (let i = 0; i < D; i += 1) {
      const weighted = gradient[start + i] * weight[i];
      slope += weighted / D;
      along += (weighted * (x[start + i] - mean) * scale) / D;
    }
    for (let i = 0; i < D; i += 1) {
      const normal = (x[start + i] - mean) * scale;
      const bent = fixed ? 0 : normal * along; // by the deviation
      sum[start + i] += scale * (gradient[start + i] * weight[i] - slope - bent);
    }
  }
}

// c = gradient · weights, the gradient at the input of a linear layer.
function linearBackward(vit, gradient, name, c) {
  const [depth, cols] = vit.shapes.get(`${name}.weight`);
  const { back } = vit.held;
  vit.packTransposed(name, back);
  vit.multiply(gradient, back, c, { rows: vit.tokens, cols, depth });
}

export const lengthOf = (vector) => Math.hypot(...vector);
const productOf = (vector, other) => sumOf(vector.map((value, i) => value * other[i]));

const MOST_ALIKE = 2 ** -11.5; // the part of a unit vector across another at which a cosine is 1 but for rounding

// The gradient of the cosine of some features with a unit vector. `fixed` takes their length as a constant. Refuses
// features that are alike, where the gradient is rounding.
function cosineGradient(features, unit, fixed) {
  const length = lengthOf(features);
  if (fixed) return unit.map((value) => value / length);
  const cosine = productOf(features, unit) / length;
  const across = unit.map((value, i) => value - (cosine * features[i]) / length);
  if (lengthOf(across) <= MOST_ALIKE) refuse("alike");
  return across.map((value) => value / length);
}

// The gradient of the cosine with a unit vector at what the pooler or the head reads.
function likenessGradient(vit, x, unit, fixed) {
  const output = vit.output(x);
  const gradient = cosineGradient(output, unit, fixed);
  if (!vit.shapes.has("pooled.weight")) return gradient;
  const before = new Float32Array(vit.width);
  gradient.forEach((value, row) => {
    const slope = vit.bends ? value * (1 - output[row] ** 2) : value;
    for (let i = 0; i < vit.width; i += 1) before[i] += slope * vit.weightAt("pooled", row, i);
  });
  return before;
}

// The gradient (D) of what is explained at what the head reads of a read-out, from tokens x: of the logit of a class,
// of its difference to another, or of the cosine with the unit vector `like`.
function readoutGradient(vit, x, { target, against, like = null }, k, fixed) {
  const { width: D } = vit;
  if (like) return likenessGradient(vit, x, like, fixed).slice(k * D, (k + 1) * D);
  const gradient = new Float32Array(D);
  for (let i = 0; i < D; i += 1) {
    gradient[i] = vit.weightAt("head", target, k * D + i);
    if (against !== null) gradient[i] -= vit.weightAt("head", against, k * D + i);
  }
  return gradient;
}

// The gradient (D) of what is explained at the pooled tokens of a read-out.
function pooledBackward(vit, x, of, k, fixed) {
  const { width: D, readouts, held } = vit;
  const gradient = readoutGradient(vit, x, of, k, fixed);
  if (!held["fc_norm.weight"]) return gradient;
  const sum = new Float32Array(D);
  normBackward(vit, vit.pool(x, readouts[k]), gradient, "fc_norm", sum, { rows: 1, fixed });
  return sum;
}

// The gradient (T, D) of what is explained at tokens x that are read by the head.
function readBackward(vit, x, of, fixed = false) {
  const { width: D, readouts, held } = vit;
  const shared = new Float32Array(x.length); // the gradient of each token by its share of the read-outs
  readouts.forEach((readout, k) => {
    const gradient = pooledBackward(vit, x, of, k, fixed);
    readout.forEach((share, t) => {
      if (!share) return;
      for (let i = 0; i < D; i += 1) shared[t * D + i] += gradient[i] * share;
    });
  });
  if (!held["norm.weight"]) return shared;
  const sum = new Float32Array(x.length);
  normBackward(vit, x, shared, "norm", sum, { fixed });
  return sum;
}

// From the gradient `g` at the tokens after a layer to those before its MLP, in place. `fixed` takes Φ(x) in GELU's
// x·Φ(x) as a constant, too.
function mlpBackward(vit, layer, fixed = false) {
  const { kept } = vit;
  const { g, y, wide, spare } = vit.held;
  const inputs = kept.hidden[layer];
  const size = vit.tokens * vit.hidden;
  spare.set(inputs);
  linearBackward(vit, g, `${layer}.fc2`, wide);
  if (fixed) {
    vit.activate(spare, size);
    for (let i = 0; i < size; i += 1) wide[i] *= inputs[i] ? spare[i] / inputs[i] : 0.5;
  } else {
    vit.activateBackward(wide, spare, size);
  }
  linearBackward(vit, wide, `${layer}.fc1`, y);
  normBackward(vit, kept.middles[layer], y, `${layer}.norm2`, g, { fixed });
}

// From the gradient `g` at the tokens after a layer's attention to `o`, that of the outputs of its heads. Calls
// visit(head, A, ∇A) with (T, N), ∇A being the gradient of a head's output times its values. `spare` holds the layer's
// queries, keys and values.
function visitHeads(vit, layer, visit) {
  const { width: D, tokens: T, heads: H, K, N } = vit;
  const { g, o, spare, small, slopes } = vit.held;
  linearBackward(vit, g, `${layer}.proj`, o);
  vit.replace(o, layer, false); // what heads that are off compute reaches nothing
  spare.set(vit.kept.qkv[layer]);
  for (let head = 0; head < H; head += 1) {
    const attention = vit.attention(spare, head);
    pack(spare, 2 * D + head * K, 1, 3 * D, K, T, small);
    vit.multiply(o, small, slopes, { rows: T, cols: N, depth: K, aCols: D, from: head * K });
    visit(head, attention, slopes);
  }
}

// Writes the transpose of a matrix (T, N).
function transpose(matrix, T, N, target) {
  for (let i = 0; i < T; i += 1) {
    for (let j = 0; j < T; j += 1) target[j * N + i] = matrix[i * N + j];
  }
}

// From the gradient of A (T, N) to that of the scores before the softmax, in place: A ⊙ (∇A − the row's sum of A ⊙ ∇A).
function softmaxBackward(attention, slopes, T, N) {
  for (let start = 0; start < T * N; start += N) {
    let sum = 0;
    for (let i = start; i < start + T; i += 1) sum += attention[i] * slopes[i];
    for (let i = start; i < start + T; i += 1) slopes[i] = attention[i] * (slopes[i] - sum);
  }
}

// From A and ∇A of a head to the gradients of its queries, keys and values, in their columns of `wide`. `fixed` takes A
// as a constant.
function headBackward(vit, head, attention, slopes, fixed = false) {
  const { width: D, tokens: T, K, N, scale } = vit;
  const { spare, o, small, turned, wide } = vit.held;
  const shape = { rows: T, cols: K, depth: T, aCols: N, cCols: 3 * D };
  const queries = head * K; // columns
  const keys = D + head * K;
  const values = 2 * D + head * K;
  transpose(attention, T, N, turned);
  pack(o, head * K, D, 1, T, K, small);
  vit.multiply(turned, small, wide, { ...shape, to: values });
  if (fixed) slopes.fill(0);
  else softmaxBackward(attention, slopes, T, N);
  pack(spare, keys, 3 * D, 1, T, K, small, scale);
  vit.multiply(slopes, small, wide, { ...shape, to: queries });
  transpose(slopes, T, N, turned);
  pack(spare, queries, 3 * D, 1, T, K, small, scale);
  vit.multiply(turned, small, wide, { ...shape, to: keys });
}

// The gradient of what is explained at the tokens before each layer, in `g`. Calls visit(layer, {mean, positive,
// atNorm}) from the last layer to the first: the mean over heads of A ⊙ ∇A, and of its positive part, both (T, T), and
// the gradient at the output of the first norm.
function backward(vit, of, visit, fixed = false) {
  const { tokens: T, heads: H, N, layers: L, kept } = vit;
  const { g, y, wide } = vit.held;
  g.set(readBackward(vit, kept.begins[L], of, fixed));
  for (let layer = L - 1; layer >= 0; layer -= 1) {
    const mean = new Float32Array(T * T);
    const positive = new Float32Array(T * T);
    mlpBackward(vit, layer, fixed);
    visitHeads(vit, layer, (head, attention, slopes) => {
      for (let i = 0; i < T * T; i += 1) {
        const at = Math.floor(i / T) * N + (i % T);
        const product = attention[at] * slopes[at];
        mean[i] += product / H;
        positive[i] += Math.max(0, product) / H;
      }
      headBackward(vit, head, attention, slopes, fixed);
    });
    linearBackward(vit, wide, `${layer}.qkv`, y);
    normBackward(vit, kept.begins[layer], y, `${layer}.norm1`, g, { fixed });
    visit(layer, { mean, positive, atNorm: y });
  }
}

// The product of a row (T) with a matrix (T, T).
function multiplyRow(row, matrix) {
  const product = new Float64Array(row.length);
  row.forEach((weight, q) => {
    if (!weight) return;
    for (let k = 0; k < row.length; k += 1) product[k] += weight * matrix[q * row.length + k];
  });
  return product;
}

const addRows = (row, other) => row.map((value, k) => value + other[k]);
const subtractRows = (row, other) => row.map((value, k) => value - other[k]);
const positivePart = (row) => row.map((value) => Math.max(0, value));

// Grad-CAM (T) of the last layer, from the gradient at the output of its first norm.
function gradCam(vit, atNorm) {
  const { width: D, tokens: T, prefix: R, kept } = vit;
  const layer = vit.layers - 1;
  const input = new Float32Array(T * D);
  vit.norm(kept.begins[layer], input, `${layer}.norm1`);
  const channels = new Float64Array(D);
  for (let i = R * D; i < T * D; i += 1) channels[i % D] += atNorm[i] / (T - R);
  const cam = new Float64Array(T);
  for (let i = R * D; i < T * D; i += 1) cam[Math.floor(i / D)] += channels[i % D] * input[i];
  return positivePart(cam);
}

// Maps (T) from the gradients of attention: relevance, gradient rollout and those of the last layer alone. A head that
// reads several vectors beside each other has no single row to begin with, so only Grad-CAM remains.
function gradientMaps(vit, of) {
  const { tokens: T, readout } = vit;
  const last = vit.layers - 1;
  if (!readout) {
    let only;
    backward(vit, of, (layer, { atNorm }) => {
      if (layer === last) only = gradCam(vit, atNorm);
    });
    return { grad_cam: only };
  }
  let relevance = Float64Array.from(readout);
  let passed = relevance;
  let still = relevance; // what has not passed an attention
  let attentionGradient;
  let cam;
  backward(vit, of, (layer, { mean, positive, atNorm }) => {
    const pulled = multiplyRow(relevance, positive);
    if (layer === last) {
      attentionGradient = pulled;
      cam = gradCam(vit, atNorm);
    }
    relevance = addRows(relevance, pulled);
    const gradients = positivePart(mean);
    const totals = readout.map((_, q) => 1 + sumOf(gradients.subarray(q * T, q * T + T)));
    passed = passed.map((value, q) => value / totals[q]);
    passed = addRows(passed, multiplyRow(passed, gradients));
    still = still.map((value, q) => value / totals[q]);
  });
  return {
    relevance: subtractRows(relevance, readout),
    gradient_rollout: subtractRows(passed, still),
    attention_gradient: attentionGradient,
    grad_cam: cam,
  };
}

// The sum over layers of token times gradient (T), with the nonlinear parts taken as constants.
function balancedGradients(vit, of) {
  const { width: D, tokens: T, kept } = vit;
  const { g } = vit.held;
  const balanced = new Float64Array(T);
  const visit = (layer) => {
    const begins = kept.begins[layer];
    for (let i = 0; i < T * D; i += 1) balanced[Math.floor(i / D)] += g[i] * begins[i];
  };
  backward(vit, of, visit, true);
  return balanced;
}

// LeGrad (T): the tokens of every layer are read as if it were the last.
function legrad(vit, of) {
  const { tokens: T, heads: H, layers: L, N, kept } = vit;
  const map = new Float64Array(T);
  for (let layer = 0; layer < L; layer += 1) {
    vit.held.g.set(readBackward(vit, kept.begins[layer + 1], of));
    mlpBackward(vit, layer);
    visitHeads(vit, layer, (head, attention, slopes) => {
      for (let q = 0; q < T * N; q += N) {
        for (let k = 0; k < T; k += 1) map[k] += Math.max(0, slopes[q + k]) / (T * H * L);
      }
    });
  }
  return map;
}

// Maps (P) of what is explained by method: those of `vitlens.attribution` of these names. Behind a tanh no parts add
// up, so there are no balanced gradients.
export function explain(vit, of) {
  const maps = { ...gradientMaps(vit, of), legrad: legrad(vit, of) };
  if (!vit.bends) maps.balanced_gradients = balancedGradients(vit, of);
  for (const [name, map] of Object.entries(maps)) {
    maps[name] = Float32Array.from(map.subarray(vit.prefix));
  }
  return maps;
}

// What each part of the model adds to the logit of a class, as `vitlens.stream.contributions_by_token`:
// {logit, embedding, heads (L, H), mlps (L), biases, written (L·H·T): what heads take from each token}.
export function decompose(vit, of) {
  const { tokens: T, heads: H, layers: L, N, kept } = vit;
  const { g } = vit.held;
  const logits = vit.read(kept.begins[L]);
  let logit = logits[of.target];
  if (of.against !== null) logit -= logits[of.against];
  // What the difference of two states of the tokens adds to the logit.
  const along = (to, from) => {
    let sum = 0;
    for (let i = 0; i < to.length; i += 1) sum += g[i] * (to[i] - from[i]);
    return sum;
  };
  g.set(readBackward(vit, kept.begins[L], of, true));
  const embedding = along(kept.begins[0], new Float32Array(kept.begins[0].length));
  const mlps = kept.middles.map((middle, layer) => along(kept.begins[layer + 1], middle));
  const written = new Float32Array(L * H * T);
  const heads = mlps.map(() => []);
  for (let layer = 0; layer < L; layer += 1) {
    visitHeads(vit, layer, (head, attention, slopes) => {
      const start = (layer * H + head) * T;
      const own = written.subarray(start, start + T);
      for (let q = 0; q < T * N; q += N) {
        for (let k = 0; k < T; k += 1) own[k] += attention[q + k] * slopes[q + k];
      }
      heads[layer].push(sumOf(own));
    });
  }
  let biases = logit - embedding; // the rest
  for (const part of [...heads.flat(), ...mlps]) biases -= part;
  return { logit, embedding, heads, mlps, biases, written };
}

// Repeats each token (D) for every read-out, in place: a head that reads several vectors reads the same token in each.
function repeatTokens({ width: D, tokens: T, readouts }, tokens) {
  const count = readouts.length;
  for (let t = T - 1; t >= 0 && count > 1; t -= 1) {
    const token = tokens.slice(t * D, (t + 1) * D);
    for (let k = 0; k < count; k += 1) tokens.set(token, (t * count + k) * D);
  }
}

// The raw lens after a layer, as `vitlens.stream.lens`: the likeliest class of the read-out and of each token alone,
// its share, and the shares that each patch gives some classes: {classes (1 + T), shares (1 + T), of: {class: (P)}}.
export function readLens(vit, layer, targets) {
  const { tokens: T, prefix: R, classes: C, outputs, kept } = vit;
  const { y, wide } = vit.held;
  const tokens = kept.begins[layer + 1];
  const logits = [vit.read(tokens)];
  const norm = ["norm", "fc_norm"].find((name) => vit.held[`${name}.weight`]);
  if (norm) vit.norm(tokens, wide, norm);
  else wide.set(tokens);
  repeatTokens(vit, wide);
  vit.linear(wide, "head", y);
  const cols = roundUp(C, 8);
  for (let t = 0; t < T; t += 1) logits.push(y.slice(t * cols, t * cols + C));
  const rows = logits.map((row) => sharesOf(row, outputs));
  const classes = rows.map((row) => row.indexOf(largestOf(row)));
  const shares = Float32Array.from(rows, (row, t) => row[classes[t]]);
  const patches = rows.slice(1 + R);
  const of = {};
  for (const target of targets) of[target] = Float32Array.from(patches, (row) => row[target]);
  return { classes, shares, of };
}
