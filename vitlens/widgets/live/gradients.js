// The backward of the last forward: the maps of a class that `vitlens.attribution` makes from one backward.

// Adds to `sum` the gradient at x (rows, D), given the gradient of the layer norm of x. `fixed` takes its deviation as
// a constant, so that the norm is linear.
function normBackward(vit, x, gradient, name, sum, { rows = vit.tokens, fixed = false } = {}) {
  const { width: D, eps, held } = vit, weight = held[`${name}.weight`];
  for (let start = 0; start < rows * D; start += D) {
    let mean = 0, variance = 0, slope = 0, along = 0;
    for (let i = 0; i < D; i += 1) mean += x[start + i];
    mean /= D;
    for (let i = 0; i < D; i += 1) variance += (x[start + i] - mean) ** 2;
    const scale = 1 / Math.sqrt(variance / D + eps);
    for (let i = 0; i < D; i += 1) {
      const weighted = gradient[start + i] * weight[i];
      slope += weighted / D;
      along += (weighted * (x[start + i] - mean) * scale) / D;
    }
    for (let i = 0; i < D; i += 1) {
      const normal = (x[start + i] - mean) * scale;
      sum[start + i] += scale * (gradient[start + i] * weight[i] - slope - (fixed ? 0 : normal * along));
    }
  }
}

// c = gradient · weights, the gradient at the input of a linear layer.
function linearBackward(vit, gradient, name, c) {
  const { shape: [depth, cols], values } = vit.weights[`${name}.weight`];
  pack(values(), 0, cols, 1, depth, cols, vit.held.back);
  vit.multiply(gradient, vit.held.back, c, { rows: vit.tokens, cols, depth });
}

// The gradient (T, D) of the logit of a class, or of its difference to another, at tokens x that are read by the head.
function readBackward(vit, x, target, against, fixed = false) {
  const { width: D, readout, held, weights } = vit, head = weights["head.weight"].values();
  let gradient = head.slice(target * D, (target + 1) * D);
  if (against !== null) gradient = gradient.map((value, i) => value - head[against * D + i]);
  if (held["fc_norm.weight"]) {
    const given = gradient;
    gradient = new Float32Array(D);
    normBackward(vit, vit.pool(x), given, "fc_norm", gradient, { rows: 1, fixed });
  }
  const each = new Float32Array(x.length), sum = new Float32Array(x.length);
  readout.forEach((share, t) => share && each.set(gradient.map((value) => value * share), t * D));
  if (!held["norm.weight"]) return each;
  normBackward(vit, x, each, "norm", sum, { fixed });
  return sum;
}

// From the gradient `g` at the tokens after a layer to those before its MLP, in place.
function throughMlp(vit, layer) {
  const { tokens: T, hidden: F, kernels, kept, held: { g, y, wide, spare } } = vit;
  spare.set(kept.hidden[layer]);
  linearBackward(vit, g, `${layer}.fc2`, wide);
  kernels.gelu_slope(wide.byteOffset, spare.byteOffset, T * F);
  linearBackward(vit, wide, `${layer}.fc1`, y);
  normBackward(vit, kept.middles[layer], y, `${layer}.norm2`, g);
}

// From the gradient `g` at the tokens after a layer's attention to `o`, that of the outputs of its heads. Leaves the
// layer's queries, keys and values in `spare`.
function toHeads(vit, layer) {
  const { width: D, tokens: T, K, kept, held: { g, o, spare } } = vit;
  linearBackward(vit, g, `${layer}.proj`, o);
  for (const [, head] of kept.off.filter(([at]) => at === layer)) { // what they compute reaches nothing
    for (let t = 0; t < T; t += 1) o.fill(0, t * D + head * K, t * D + (head + 1) * K);
  }
  spare.set(kept.qkv[layer]);
}

// ∇A (T, N) of a head, in `slopes`: the gradient of its output times its values.
function weightsGradient(vit, head) {
  const { width: D, tokens: T, K, N, held: { spare, o, small, slopes } } = vit;
  pack(spare, 2 * D + head * K, 1, 3 * D, K, T, small);
  vit.multiply(o, small, slopes, { rows: T, cols: N, depth: K, aCols: D, from: head * K });
  return slopes;
}

// From A and ∇A of a head to the gradients of its queries, keys and values, in their columns of `wide`.
function headBackward(vit, head, attention, slopes) {
  const { width: D, tokens: T, K, N, scale, held: { spare, o, small, turned, wide } } = vit;
  const sizes = { rows: T, cols: K, depth: T, aCols: N, cCols: 3 * D };
  const turn = (matrix) => {
    for (let i = 0; i < T; i += 1) for (let j = 0; j < T; j += 1) turned[j * N + i] = matrix[i * N + j];
  };
  turn(attention);
  pack(o, head * K, D, 1, T, K, small);
  vit.multiply(turned, small, wide, { ...sizes, to: 2 * D + head * K });
  for (let start = 0; start < T * N; start += N) { // of the softmax: A ⊙ (∇A − the row's sum of A ⊙ ∇A)
    let sum = 0;
    for (let i = start; i < start + T; i += 1) sum += attention[i] * slopes[i];
    for (let i = start; i < start + T; i += 1) slopes[i] = attention[i] * (slopes[i] - sum);
  }
  pack(spare, D + head * K, 3 * D, 1, T, K, small, scale);
  vit.multiply(slopes, small, wide, { ...sizes, to: head * K });
  turn(slopes);
  pack(spare, head * K, 3 * D, 1, T, K, small, scale);
  vit.multiply(turned, small, wide, { ...sizes, to: D + head * K });
}

// Calls each(layer, {mean, positive}) from the last layer to the first: the mean over heads of A ⊙ ∇A, and of its
// positive part, both (T, T). Returns the gradient (T, D) at the output of the last layer's first norm.
function backward(vit, target, against, each) {
  const { width: D, tokens: T, heads: H, N, layers: L, kept, held: { g, y, wide, spare } } = vit;
  let atNorm;
  g.set(readBackward(vit, kept.begins[L], target, against));
  for (let layer = L - 1; layer >= 0; layer -= 1) {
    const mean = new Float32Array(T * T), positive = new Float32Array(T * T);
    throughMlp(vit, layer);
    toHeads(vit, layer);
    for (let head = 0; head < H; head += 1) {
      const attention = vit.attention(spare, head), slopes = weightsGradient(vit, head);
      for (let i = 0; i < T * T; i += 1) {
        const at = Math.floor(i / T) * N + (i % T), product = attention[at] * slopes[at];
        mean[i] += product / H;
        positive[i] += Math.max(0, product) / H;
      }
      headBackward(vit, head, attention, slopes);
    }
    each(layer, { mean, positive });
    linearBackward(vit, wide, `${layer}.qkv`, y);
    atNorm ||= y.slice(0, T * D);
    normBackward(vit, kept.begins[layer], y, `${layer}.norm1`, g);
  }
  return atNorm;
}

// Maps (P) of a class, or of its difference to another, by method: those of `vitlens.attribution` of these names.
function why(vit, target, against = null) {
  const { width: D, tokens: T, prefix: R, heads: H, layers: L, readout, kept, held: { g, spare } } = vit;
  const read = Float64Array.from(readout), still = read.slice(), relevance = new Float64Array(T);
  let passed = new Float64Array(T), first; // gradient rollout: what has passed an attention, besides what stood `still`
  const gradient = backward(vit, target, against, (layer, { mean, positive }) => {
    const pulled = new Float64Array(T), next = new Float64Array(T);
    for (let q = 0; q < T; q += 1) {
      const weight = read[q] + relevance[q];
      let total = 1;
      for (let k = q * T; k < q * T + T; k += 1) total += Math.max(0, mean[k]);
      const share = (still[q] + passed[q]) / total;
      for (let k = 0; k < T && (weight || share); k += 1) {
        pulled[k] += weight * positive[q * T + k];
        next[k] += share * Math.max(0, mean[q * T + k]);
      }
      next[q] += passed[q] / total;
      still[q] /= total;
    }
    for (let k = 0; k < T; k += 1) relevance[k] += pulled[k];
    first ||= pulled;
    passed = next;
  });

  const input = new Float32Array(T * D), channels = new Float64Array(D), cam = new Float64Array(T);
  vit.norm(kept.begins[L - 1], input, `${L - 1}.norm1`);
  for (let i = R * D; i < T * D; i += 1) channels[i % D] += gradient[i] / (T - R);
  for (let i = R * D; i < T * D; i += 1) cam[Math.floor(i / D)] += channels[i % D] * input[i];

  const legrad = new Float64Array(T); // every layer's tokens, read as if it were the last
  for (let layer = 0; layer < L; layer += 1) {
    g.set(readBackward(vit, kept.begins[layer + 1], target, against));
    throughMlp(vit, layer);
    toHeads(vit, layer);
    for (let head = 0; head < H; head += 1) {
      const slopes = weightsGradient(vit, head);
      for (let q = 0; q < T; q += 1) {
        for (let k = 0; k < T; k += 1) legrad[k] += Math.max(0, slopes[q * vit.N + k]) / (T * H * L);
      }
    }
  }
  const grad_cam = cam.map((value) => Math.max(0, value)), direct = new Float64Array(T);
  contributions(vit, target, against).written.forEach((value, i) => (direct[i % T] += value));
  const maps = { relevance, gradient_rollout: passed, attention_gradient: first, grad_cam, legrad, direct };
  return Object.fromEntries(Object.entries(maps).map(([name, map]) => [name, Float32Array.from(map.subarray(R))]));
}

// What each part of the model adds to the logit of a class, as `vitlens.stream.apart`: {logit, embedding, heads (L, H),
// mlps (L), biases, written (L·H·T): what heads take from each token}.
function contributions(vit, target, against = null) {
  const { tokens: T, heads: H, layers: L, N, kept, held: { g, spare } } = vit;
  const logits = vit.read(kept.begins[L]), logit = logits[target] - (against === null ? 0 : logits[against]);
  const along = (from, less) => g.subarray(0, from.length).reduce((sum, v, i) => sum + v * (from[i] - less[i]), 0);
  g.set(readBackward(vit, kept.begins[L], target, against, true));
  const embedding = along(kept.begins[0], new Float32Array(kept.begins[0].length));
  const mlps = kept.middles.map((middle, layer) => along(kept.begins[layer + 1], middle));
  const written = new Float32Array(L * H * T), heads = mlps.map(() => []);
  for (let layer = 0; layer < L; layer += 1) {
    toHeads(vit, layer);
    for (let head = 0; head < H; head += 1) {
      const attention = vit.attention(spare, head), slopes = weightsGradient(vit, head), at = (layer * H + head) * T;
      for (let q = 0; q < T * N; q += N) {
        for (let k = 0; k < T; k += 1) written[at + k] += attention[q + k] * slopes[q + k];
      }
      heads[layer].push(written.subarray(at, at + T).reduce((sum, value) => sum + value, 0));
    }
  }
  const biases = [...heads.flat(), ...mlps].reduce((rest, part) => rest - part, logit - embedding);
  return { logit, embedding, heads, mlps, biases, written };
}

// The raw lens after a layer, as `vitlens.stream.lens`: the likeliest class of the read-out and of each token alone,
// its share, and the shares that each patch gives some classes: {classes (1 + T), shares (1 + T), of: {class: (P)}}.
function lens(vit, layer, targets) {
  const { tokens: T, prefix: R, classes: C, kept, held, held: { y, wide } } = vit, cols = up(C, 8);
  const tokens = kept.begins[layer + 1], whole = vit.read(tokens);
  const name = ["norm", "fc_norm"].find((each) => held[`${each}.weight`]);
  if (name) vit.norm(tokens, wide, name);
  else wide.set(tokens);
  vit.linear(wide, "head", y);
  const each = Array.from({ length: T }, (_, t) => y.slice(t * cols, t * cols + C));
  const rows = [whole, ...each].map((row) => vit.shares(row));
  const classes = rows.map((row) => row.indexOf(Math.max(...row))), patches = rows.slice(1 + R);
  const of = Object.fromEntries(targets.map((target) => [target, Float32Array.from(patches, (row) => row[target])]));
  return { classes, shares: Float32Array.from(rows, (row, t) => row[classes[t]]), of };
}
