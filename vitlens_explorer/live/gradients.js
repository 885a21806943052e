// The backward of the last forward: the maps of a class that `vitlens.attribution` makes from it.

// Adds to `sum` the gradient at x (rows, D), given the gradient of the layer norm of x. `fixed` takes its deviation as
// a constant, so that the norm is linear.
function normBackward(vit, x, gradient, name, sum, { rows = vit.tokens, fixed = false } = {}) {
  const { width: D, eps, held } = vit,
    weight = held[`${name}.weight`];
  for (let start = 0; start < rows * D; start += D) {
    const [mean, scale] = moments(x, start, D, eps);
    let slope = 0,
      along = 0;
    for (let i = 0; i < D; i += 1) {
      const weighted = gradient[start + i] * weight[i];
      slope += weighted / D;
      along += (weighted * (x[start + i] - mean) * scale) / D;
    }
    for (let i = 0; i < D; i += 1) {
      const normal = (x[start + i] - mean) * scale;
      sum[start + i] +=
        scale * (gradient[start + i] * weight[i] - slope - (fixed ? 0 : normal * along));
    }
  }
}

// c = gradient · weights, the gradient at the input of a linear layer.
function linearBackward(vit, gradient, name, c) {
  const {
    shape: [depth, cols],
    values,
  } = vit.weights[`${name}.weight`];
  pack(values(), 0, cols, 1, depth, cols, vit.held.back);
  vit.multiply(gradient, vit.held.back, c, { rows: vit.tokens, cols, depth });
}

// The gradient (T, D) of the logit of a class, or of its difference to another, at tokens x that are read by the head.
function readBackward(vit, x, { target, against }, fixed = false) {
  const { width: D, readout, held, weights } = vit,
    head = weights["head.weight"].values();
  let gradient = head.slice(target * D, (target + 1) * D);
  if (against !== null) gradient = gradient.map((value, i) => value - head[against * D + i]);
  if (held["fc_norm.weight"]) {
    const given = gradient;
    gradient = new Float32Array(D);
    normBackward(vit, vit.pool(x), given, "fc_norm", gradient, { rows: 1, fixed });
  }
  const each = new Float32Array(x.length),
    sum = new Float32Array(x.length);
  readout.forEach(
    (share, t) =>
      share &&
      each.set(
        gradient.map((value) => value * share),
        t * D,
      ),
  );
  if (!held["norm.weight"]) return each;
  normBackward(vit, x, each, "norm", sum, { fixed });
  return sum;
}

// From the gradient `g` at the tokens after a layer to those before its MLP, in place. `fixed` takes Φ(x) in GELU's
// x·Φ(x) as a constant, too.
function throughMlp(vit, layer, fixed = false) {
  const {
      tokens: T,
      hidden: F,
      kernels,
      kept,
      held: { g, y, wide, spare },
    } = vit,
    inputs = kept.hidden[layer];
  spare.set(inputs);
  linearBackward(vit, g, `${layer}.fc2`, wide);
  if (fixed) {
    kernels.gelu(spare.byteOffset, T * F);
    for (let i = 0; i < T * F; i += 1) wide[i] *= inputs[i] ? spare[i] / inputs[i] : 0.5;
  } else kernels.gelu_slope(wide.byteOffset, spare.byteOffset, T * F);
  linearBackward(vit, wide, `${layer}.fc1`, y);
  normBackward(vit, kept.middles[layer], y, `${layer}.norm2`, g, { fixed });
}

// From the gradient `g` at the tokens after a layer's attention to `o`, that of the outputs of its heads. Calls
// each(head, A, ∇A) with (T, N), ∇A being the gradient of a head's output times its values. `spare` holds the layer's
// queries, keys and values.
function throughHeads(vit, layer, each) {
  const {
    width: D,
    tokens: T,
    heads: H,
    K,
    N,
    kept,
    held: { g, o, spare, small, slopes },
  } = vit;
  linearBackward(vit, g, `${layer}.proj`, o);
  vit.replace(o, layer, false); // what heads that are off compute reaches nothing
  spare.set(kept.qkv[layer]);
  for (let head = 0; head < H; head += 1) {
    const attention = vit.attention(spare, head);
    pack(spare, 2 * D + head * K, 1, 3 * D, K, T, small);
    vit.multiply(o, small, slopes, { rows: T, cols: N, depth: K, aCols: D, from: head * K });
    each(head, attention, slopes);
  }
}

// From A and ∇A of a head to the gradients of its queries, keys and values, in their columns of `wide`. `fixed` takes A
// as a constant.
function headBackward(vit, head, attention, slopes, fixed = false) {
  const {
    width: D,
    tokens: T,
    K,
    N,
    scale,
    held: { spare, o, small, turned, wide },
  } = vit;
  const sizes = { rows: T, cols: K, depth: T, aCols: N, cCols: 3 * D };
  const turn = (matrix) => {
    for (let i = 0; i < T; i += 1)
      for (let j = 0; j < T; j += 1) turned[j * N + i] = matrix[i * N + j];
  };
  turn(attention);
  pack(o, head * K, D, 1, T, K, small);
  vit.multiply(turned, small, wide, { ...sizes, to: 2 * D + head * K });
  for (let start = 0; start < T * N; start += N) {
    // of the softmax: A ⊙ (∇A − the row's sum of A ⊙ ∇A)
    let sum = 0;
    for (let i = start; i < start + T; i += 1) sum += attention[i] * slopes[i];
    for (let i = start; i < start + T; i += 1)
      slopes[i] = fixed ? 0 : attention[i] * (slopes[i] - sum);
  }
  pack(spare, D + head * K, 3 * D, 1, T, K, small, scale);
  vit.multiply(slopes, small, wide, { ...sizes, to: head * K });
  turn(slopes);
  pack(spare, head * K, 3 * D, 1, T, K, small, scale);
  vit.multiply(turned, small, wide, { ...sizes, to: D + head * K });
}

// The gradient of a logit at the tokens before each layer, in `g`. Calls each(layer, {mean, positive, atNorm}) from the
// last layer to the first: the mean over heads of A ⊙ ∇A, and of its positive part, both (T, T), and the gradient at
// the output of the first norm.
function backward(vit, of, each, fixed = false) {
  const {
    tokens: T,
    heads: H,
    N,
    layers: L,
    kept,
    held: { g, y, wide },
  } = vit;
  g.set(readBackward(vit, kept.begins[L], of, fixed));
  for (let layer = L - 1; layer >= 0; layer -= 1) {
    const mean = new Float32Array(T * T),
      positive = new Float32Array(T * T);
    throughMlp(vit, layer, fixed);
    throughHeads(vit, layer, (head, attention, slopes) => {
      for (let i = 0; i < T * T; i += 1) {
        const at = Math.floor(i / T) * N + (i % T),
          product = attention[at] * slopes[at];
        mean[i] += product / H;
        positive[i] += Math.max(0, product) / H;
      }
      headBackward(vit, head, attention, slopes, fixed);
    });
    linearBackward(vit, wide, `${layer}.qkv`, y);
    normBackward(vit, kept.begins[layer], y, `${layer}.norm1`, g, { fixed });
    each(layer, { mean, positive, atNorm: y });
  }
}

// The product of a row (T) with a matrix (T, T).
function times(row, matrix) {
  const product = new Float64Array(row.length);
  row.forEach((weight, q) => {
    for (let k = 0; weight && k < row.length; k += 1)
      product[k] += weight * matrix[q * row.length + k];
  });
  return product;
}

// Maps (P) of a class, or of its difference to another, by method: those of `vitlens.attribution` of these names.
function why(vit, of) {
  const {
    width: D,
    tokens: T,
    prefix: R,
    heads: H,
    layers: L,
    N,
    readout,
    kept,
    held: { g },
  } = vit;
  const added = (row, more) => row.map((value, k) => value + more[k]);
  const [channels, cam] = [new Float64Array(D), new Float64Array(T)];
  let relevance = Float64Array.from(readout),
    passed = relevance,
    still = relevance,
    first;
  backward(vit, of, (layer, { mean, positive, atNorm }) => {
    if (layer === L - 1) {
      const input = new Float32Array(T * D);
      vit.norm(kept.begins[layer], input, `${layer}.norm1`);
      for (let i = R * D; i < T * D; i += 1) channels[i % D] += atNorm[i] / (T - R);
      for (let i = R * D; i < T * D; i += 1) cam[Math.floor(i / D)] += channels[i % D] * input[i];
    }
    const pulled = times(relevance, positive),
      gradients = mean.map((value) => Math.max(0, value));
    const totals = readout.map((_, q) => 1 + sumOf(gradients.subarray(q * T, q * T + T)));
    first ||= pulled;
    relevance = added(relevance, pulled);
    passed = passed.map((value, q) => value / totals[q]);
    passed = added(passed, times(passed, gradients));
    still = still.map((value, q) => value / totals[q]); // what has not passed an attention
  });
  const balanced = new Float64Array(T);
  backward(
    vit,
    of,
    (layer) => {
      for (let i = 0; i < T * D; i += 1)
        balanced[Math.floor(i / D)] += g[i] * kept.begins[layer][i];
    },
    true,
  );
  const legrad = new Float64Array(T); // every layer's tokens, read as if it were the last
  for (let layer = 0; layer < L; layer += 1) {
    g.set(readBackward(vit, kept.begins[layer + 1], of));
    throughMlp(vit, layer);
    throughHeads(vit, layer, (head, attention, slopes) => {
      for (let q = 0; q < T * N; q += N)
        for (let k = 0; k < T; k += 1) legrad[k] += Math.max(0, slopes[q + k]) / (T * H * L);
    });
  }
  const minus = (row, less) => row.map((value, k) => value - less[k]);
  const grad_cam = cam.map((value) => Math.max(0, value));
  const maps = {
    relevance: minus(relevance, readout),
    gradient_rollout: minus(passed, still),
    attention_gradient: first,
    grad_cam,
    legrad,
    balanced_gradients: balanced,
  };
  return Object.fromEntries(
    Object.entries(maps).map(([name, map]) => [name, Float32Array.from(map.subarray(R))]),
  );
}

// What each part of the model adds to the logit of a class, as `vitlens.stream.contributions_by_token`:
// {logit, embedding, heads (L, H), mlps (L), biases, written (L·H·T): what heads take from each token}.
function contributions(vit, of) {
  const {
      tokens: T,
      heads: H,
      layers: L,
      N,
      kept,
      held: { g },
    } = vit,
    logits = vit.read(kept.begins[L]);
  const logit = logits[of.target] - (of.against === null ? 0 : logits[of.against]);
  const along = (to, from) =>
    g.subarray(0, to.length).reduce((sum, value, i) => sum + value * (to[i] - from[i]), 0);
  g.set(readBackward(vit, kept.begins[L], of, true));
  const embedding = along(kept.begins[0], new Float32Array(kept.begins[0].length));
  const mlps = kept.middles.map((middle, layer) => along(kept.begins[layer + 1], middle));
  const written = new Float32Array(L * H * T),
    heads = mlps.map(() => []);
  for (let layer = 0; layer < L; layer += 1) {
    throughHeads(vit, layer, (head, attention, slopes) => {
      const own = written.subarray((layer * H + head) * T, (layer * H + head + 1) * T);
      for (let q = 0; q < T * N; q += N)
        for (let k = 0; k < T; k += 1) own[k] += attention[q + k] * slopes[q + k];
      heads[layer].push(sumOf(own));
    });
  }
  const biases = [...heads.flat(), ...mlps].reduce((rest, part) => rest - part, logit - embedding);
  return { logit, embedding, heads, mlps, biases, written };
}

// The raw lens after a layer, as `vitlens.stream.lens`: the likeliest class of the read-out and of each token alone,
// its share, and the shares that each patch gives some classes: {classes (1 + T), shares (1 + T), of: {class: (P)}}.
function lens(vit, layer, targets) {
  const {
      tokens: T,
      prefix: R,
      classes: C,
      outputs,
      kept,
      held,
      held: { y, wide },
    } = vit,
    cols = up(C, 8);
  const tokens = kept.begins[layer + 1],
    whole = vit.read(tokens);
  const name = ["norm", "fc_norm"].find((each) => held[`${each}.weight`]);
  if (name) vit.norm(tokens, wide, name);
  else wide.set(tokens);
  vit.linear(wide, "head", y);
  const each = Array.from({ length: T }, (_, t) => y.slice(t * cols, t * cols + C));
  const rows = [whole, ...each].map((row) => sharesOf(row, outputs));
  const classes = rows.map((row) => row.indexOf(largestOf(row))),
    patches = rows.slice(1 + R);
  const of = Object.fromEntries(
    targets.map((target) => [target, Float32Array.from(patches, (row) => row[target])]),
  );
  return { classes, shares: Float32Array.from(rows, (row, t) => row[classes[t]]), of };
}
