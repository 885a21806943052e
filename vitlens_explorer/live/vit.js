// The forward of a plain pre-norm Vision Transformer, as timm computes it, which keeps every query, key and token.
//
// Shapes: T tokens = R prefix + P patches, D width, H heads, K = D / H, F width of the MLP. Matrices in the memory that
// WebAssembly shares have rows in multiples of 4 and columns in multiples of 8; what is beyond T is never read.

const up = (count, to) => Math.ceil(count / to) * to;

// Tensors by name: {shape, values()}, float32 from the bytes that `vitlens_explorer.live.written` wrote.
function tensorsOf(list, bytes) {
  let at = 0;
  const tensors = list.map(({ name, shape, half }) => {
    const size = shape.reduce((product, side) => product * side, half ? 2 : 4);
    const stored = { type: half ? "f2" : "f4", data: new Uint8Array(bytes, at, size) };
    at += size;
    return [name, { shape, values: () => floats(stored) }];
  });
  return Object.fromEntries(tensors);
}

// Writes a matrix (depth, cols) as gemm reads it: panels of 8 columns, the last filled with zeros. `down` and `across`
// are the steps in `source` to the next row and column, so that they also transpose.
function pack(source, from, down, across, depth, cols, target, factor = 1) {
  for (let panel = 0, to = 0; panel < cols; panel += 8)
    for (let row = 0; row < depth; row += 1)
      for (
        let col = panel, at = from + row * down + panel * across;
        col < panel + 8;
        col += 1, at += across, to += 1
      )
        target[to] = col < cols ? source[at] * factor : 0;
}

// The mean of D numbers, and 1 / their deviation.
function moments(x, start, D, eps) {
  let mean = 0,
    variance = 0;
  for (let i = start; i < start + D; i += 1) mean += x[i] / D;
  for (let i = start; i < start + D; i += 1) variance += (x[i] - mean) ** 2;
  return [mean, 1 / Math.sqrt(variance / D + eps)];
}

class Vit {
  static async open(about, bytes, wasm) {
    const vit = Object.assign(new Vit(), about, {
      weights: tensorsOf(about.tensors, bytes),
      held: {},
    });
    const { width: D, tokens: T, hidden: F, heads: H, patch, weights, held } = vit,
      names = Object.keys(weights);
    const M = up(T, 4) + 4,
      N = up(T, 8),
      K = D / H,
      pixels = 3 * patch[0] * patch[1],
      wide = M * Math.max(F, 3 * D);
    const sizes = {
      x: M * D,
      y: M * Math.max(D, up(vit.classes, 8)),
      o: M * D,
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
    const matrices = names.flatMap((name) => name.match(/^(?!.*norm)(.*)\.weight$/)?.[1] ?? []);
    for (const matrix of matrices) {
      const [cols, depth] = weights[`${matrix}.weight`].shape;
      Object.assign(sizes, { [matrix]: depth * up(cols, 8), [`${matrix}.bias`]: up(cols, 8) });
    }
    const total = Object.values(sizes).reduce((sum, count) => sum + up(count, 4), 0);
    const memory = new WebAssembly.Memory({ initial: Math.ceil((4 * total) / 65536) });
    let at = 0;
    for (const [name, count] of Object.entries(sizes)) {
      held[name] = new Float32Array(memory.buffer, at, count);
      at += 4 * up(count, 4);
    }
    for (const matrix of matrices) {
      const {
        shape: [cols, depth],
        values,
      } = weights[`${matrix}.weight`];
      pack(values(), 0, 1, depth, depth, cols, held[matrix]);
      held[`${matrix}.bias`].set(weights[`${matrix}.bias`].values());
    }
    const plain = names.filter((name) => /norm|prefix|positions|means/.test(name));
    for (const name of plain) held[name] = weights[name].values();
    held.absent.fill(-1e30, T); // added to the scores of the keys beyond T, so that their softmax is 0
    const { exports: kernels } = (await WebAssembly.instantiate(wasm, { page: { memory } }))
      .instance;
    return Object.assign(vit, { K, M, N, pixels, kernels });
  }

  // c (rows, cols) = a (rows, depth) · matrix + bias. `from` and `to` are the columns at which a and c begin in
  // matrices of `aCols` and `cCols` columns.
  multiply(
    a,
    matrix,
    c,
    { rows, cols, depth, bias = this.held.zeros, aCols = depth, cCols = cols, from = 0, to = 0 },
  ) {
    const [atA, atC] = [a.byteOffset + 4 * from, c.byteOffset + 4 * to];
    const sizes = [up(rows, 4), up(cols, 8), depth];
    this.kernels.gemm(atA, 4 * aCols, matrix.byteOffset, atC, 4 * cCols, bias.byteOffset, ...sizes);
  }

  // c = a · weightsᵀ + bias, as a linear layer computes it.
  linear(a, name, c, rows = this.tokens, to = 0) {
    const { held, weights } = this,
      [cols, depth] = weights[`${name}.weight`].shape;
    this.multiply(a, held[name], c, {
      rows,
      cols,
      depth,
      bias: held[`${name}.bias`],
      cCols: up(cols, 8),
      to,
    });
  }

  norm(from, to, name, rows = this.tokens) {
    const { width: D, eps, held } = this,
      weight = held[`${name}.weight`],
      bias = held[`${name}.bias`];
    for (let start = 0; start < rows * D; start += D) {
      const [mean, scale] = moments(from, start, D, eps);
      for (let i = 0; i < D; i += 1)
        to[start + i] = (from[start + i] - mean) * scale * weight[i] + bias[i];
    }
  }

  // The attention (T, N) of a head, from the (T, 3·D) of `qkv`: softmax of q·k·scale over the keys.
  attention(qkv, head) {
    const {
      width: D,
      tokens: T,
      K,
      N,
      scale,
      held: { scores, small, absent },
    } = this;
    pack(qkv, D + head * K, 1, 3 * D, K, T, small, scale);
    this.multiply(qkv, small, scores, {
      rows: T,
      cols: N,
      depth: K,
      aCols: 3 * D,
      from: head * K,
      bias: absent,
    });
    this.kernels.softmax(scores.byteOffset, T, N);
    return scores;
  }

  // Tokens from the pixels (3, height, width) of a normalized image: patches, prefix tokens and positions.
  embed(input, x) {
    const {
      width: D,
      tokens: T,
      prefix: R,
      pixels,
      patch: [down, across],
      image: [, side],
      held,
    } = this;
    const channel = input.length / 3,
      patches = held.wide,
      cols = Math.floor(side / across);
    for (let row = 0, to = 0; row < (T - R) * 3 * down; row += 1, to += across) {
      // of the pixels of a patch in a color
      const p = Math.floor(row / (3 * down)),
        i = row % (3 * down),
        y = Math.floor(p / cols) * down + (i % down);
      const at = Math.floor(i / down) * channel + y * side + (p % cols) * across;
      patches.set(input.subarray(at, at + across), to);
    }
    this.linear(patches, "embed", x, T - R, R * D);
    x.set(held.prefix);
    for (let i = 0; i < (T - R) * D; i += 1) x[R * D + i] += held.positions[i];
    if (held["norm_pre.weight"]) this.norm(x, x, "norm_pre");
  }

  // The tokens (T, D) that the head reads, each with its share.
  pool(tokens) {
    const { width: D, readout } = this,
      pooled = new Float32Array(D);
    readout.forEach((share, t) => {
      for (let i = 0; share && i < D; i += 1) pooled[i] += share * tokens[t * D + i];
    });
    return pooled;
  }

  // Logits from the tokens of the last layer, normalized before or after they are pooled.
  read(x) {
    const {
      held,
      held: { wide, o, y },
    } = this;
    if (held["norm.weight"]) this.norm(x, wide, "norm");
    o.set(this.pool(held["norm.weight"] ? wide : x));
    if (held["fc_norm.weight"]) this.norm(o, o, "fc_norm", 1);
    this.linear(o, "head", y, 1);
    return y.slice(0, this.classes);
  }

  // Runs the model. `off` lists the [layer, head] that give zero, or their mean over other photos if `mean`. Returns
  // {layers: [{q, k: (H, T, K), scale}], tokens: [(T, D) after each layer], logits} with scaled q, and keeps it.
  forward(input, off = [], mean = false) {
    const { width: D, tokens: T, hidden: F, heads: H, K, N, scale, held } = this,
      { x, y, wide, o, small } = held;
    this.kept = { off, begins: [], middles: [], qkv: [], hidden: [] };
    const record = { layers: [], tokens: [] },
      kept = this.kept;
    const add = (from) => {
      for (let i = 0; i < T * D; i += 1) x[i] += from[i];
      return x.slice(0, T * D);
    };
    this.embed(input, x);
    kept.begins.push(x.slice(0, T * D));
    for (let layer = 0; layer < this.layers; layer += 1) {
      this.norm(x, y, `${layer}.norm1`);
      this.linear(y, `${layer}.qkv`, wide);
      kept.qkv.push(wide.slice(0, T * 3 * D));
      for (let head = 0; head < H; head += 1) {
        const attention = this.attention(wide, head);
        pack(wide, 2 * D + head * K, 3 * D, 1, T, K, small);
        this.multiply(attention, small, o, {
          rows: T,
          cols: K,
          depth: T,
          aCols: N,
          cCols: D,
          to: head * K,
        });
      }
      this.replace(o, layer, mean);
      this.linear(o, `${layer}.proj`, y);
      kept.middles.push(add(y));
      this.norm(x, y, `${layer}.norm2`);
      this.linear(y, `${layer}.fc1`, wide);
      kept.hidden.push(wide.slice(0, T * F));
      this.kernels.gelu(wide.byteOffset, T * F);
      this.linear(wide, `${layer}.fc2`, y);
      kept.begins.push(add(y));
      record.layers.push({ scale, ...this.split(kept.qkv[layer]) });
      record.tokens.push(kept.begins[layer + 1]);
    }
    record.logits = this.read(x);
    return record;
  }

  // {token (D) of a patch that enters the first layer, position (D) or null, lengths (L + 1) before and after layers,
  // added (L, 2): lengths of what attention and MLP add}.
  stream(patch) {
    const {
      width: D,
      prefix: R,
      kept: { begins, middles },
      held,
    } = this;
    const at = (x, row) => [...x.subarray(row * D, (row + 1) * D)],
      token = (x) => at(x, R + patch);
    const apart = (to, from) =>
      Math.hypot(...token(to).map((value, i) => value - from[(R + patch) * D + i]));
    const position = at(held.positions, patch);
    return {
      token: token(begins[0]),
      position: position.some(Boolean) ? position : null,
      lengths: begins.map((x) => Math.hypot(...token(x))),
      added: middles.map((middle, layer) => [
        apart(middle, begins[layer]),
        apart(begins[layer + 1], middle),
      ]),
    };
  }

  // Sets the outputs (T, D) of the heads of a layer that are off to zero, or to their means.
  replace(o, layer, mean) {
    const {
      width: D,
      tokens: T,
      K,
      held: { means },
      kept: { off },
    } = this;
    for (const [, head] of off.filter(([at]) => at === layer))
      for (let to = head * K; to < T * D; to += D)
        if (mean) o.set(means.subarray(layer * T * D + to, layer * T * D + to + K), to);
        else o.fill(0, to, to + K);
  }

  // {q · scale, k}, each (H, T, K), from the (T, 3·D) of a layer.
  split(qkv) {
    const { width: D, tokens: T, heads: H, K, scale } = this;
    const [q, k] = [new Float32Array(T * D), new Float32Array(T * D)];
    for (let head = 0, to = 0; head < H; head += 1)
      for (let t = 0; t < T; t += 1)
        for (let from = t * 3 * D + head * K, end = from + K; from < end; from += 1, to += 1)
          [q[to], k[to]] = [qkv[from] * scale, qkv[from + D]];
    return { q, k };
  }
}
