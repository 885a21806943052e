// From the bytes of an image file to the model's input, as `vitlens.models.preprocess` gives it: the browser decodes,
// and the rest is Pillow's arithmetic. PNG of 8 bits and baseline JPEG without a color profile give Python's bits.

// {plain: a PNG of 8 bits or a baseline JPEG, profile: with a color profile}, from the header of a file.
function kindOf(bytes) {
  const view = new DataView(bytes),
    two = (at) => view.getUint16(at),
    end = bytes.byteLength - 12;
  const kind = { plain: false, profile: false };
  if (end > 16 && view.getUint32(0) === 0x89504e47) {
    // PNG: chunks of {size, name, data, checksum}
    kind.plain = view.getUint8(24) <= 8;
    for (
      let at = 8;
      at < end && view.getUint32(at + 4) !== 0x49444154;
      at += view.getUint32(at) + 12
    ) {
      // until IDAT
      kind.profile ||= view.getUint32(at + 4) === 0x69434350; // iCCP
    }
  } else if (end > 0 && two(0) === 0xffd8) {
    // JPEG: segments of {marker, size, data}
    for (let at = 2; at < end && two(at) !== 0xffda; at += two(at + 2) + 2) {
      // until the scan
      kind.plain ||= two(at) === 0xffc0; // a baseline frame
      kind.profile ||= two(at) === 0xffe2 && view.getUint32(at + 4) === 0x4943435f; // ICC_
    }
  }
  return kind;
}

// A file's image, upright: {data: RGB levels over white, width, height, clear: was transparent somewhere, exact: with
// Pillow's levels}. Throws for files that the browser does not decode.
async function decoded(bytes) {
  const { plain, profile } = kindOf(bytes),
    colorSpaceConversion = profile ? "default" : "none";
  const bitmap = await createImageBitmap(new Blob([bytes]), {
    colorSpaceConversion,
    premultiplyAlpha: "none",
  });
  const { width, height } = bitmap,
    context = new OffscreenCanvas(width, height).getContext("2d");
  context.drawImage(bitmap, 0, 0);
  const { data } = context.getImageData(0, 0, width, height),
    rgb = new Uint8Array(3 * width * height);
  let clear = false;
  for (let from = 0, to = 0; from < data.length; from += 4, to += 3) {
    const alpha = data[from + 3];
    for (let i = 0; i < 3; i += 1)
      rgb[to + i] = alpha === 255 ? data[from + i] : overWhite(data[from + i], alpha);
    clear ||= alpha < 255;
  }
  return { data: rgb, width, height, clear, exact: plain && !profile };
}

// A level with `alpha` over white, as Pillow's alpha_composite rounds it.
function overWhite(level, alpha) {
  const sum = (level * alpha + 255 * (255 - alpha)) * 128 + 0x4000;
  return ((sum >> 8) + sum) >> 15;
}

const FILTERS = {
  // {support in pixels of the source, weight at a distance}, as Pillow's
  bilinear: [1, (x) => Math.max(0, 1 - x)],
  bicubic: [
    2,
    (x) => (x < 1 ? (1.5 * x - 2.5) * x * x + 1 : x < 2 ? (((x - 5) * x + 8) * x - 4) * -0.5 : 0),
  ],
};

// For each of `to` pixels: the first of the `from` pixels that it sums, and their weights in units of 2⁻²².
function weightsOf(from, to, [reach, weight]) {
  const scale = from / to,
    filter = Math.max(scale, 1),
    support = reach * filter,
    nearer = 1 / filter;
  return Array.from({ length: to }, (_, i) => {
    const center = (i + 0.5) * scale,
      first = Math.max(0, Math.trunc(center - support + 0.5));
    const last = Math.min(from, Math.trunc(center + support + 0.5));
    const distance = (k) => Math.abs((k + first - center + 0.5) * nearer);
    const weights = Array.from({ length: last - first }, (_, k) => weight(distance(k)));
    const sum = weights.reduce((a, b) => a + b, 0),
      round = (w) => Math.trunc((w < 0 ? -0.5 : 0.5) + w * 2 ** 22);
    return [first, weights.map((w) => round(w / sum))];
  });
}

// One pass of Pillow's resize. `lines` lines lie `line` values apart, their pixels `step` values.
function pass(source, target, weights, lines, [line, step], [toLine, toStep]) {
  for (let y = 0; y < lines; y += 1)
    weights.forEach(([first, shares], x) => {
      for (let color = 0; color < 3; color += 1) {
        let sum = 2 ** 21,
          at = y * line + first * step + color;
        for (let k = 0; k < shares.length; k += 1, at += step) sum += source[at] * shares[k];
        target[y * toLine + x * toStep + color] = Math.min(255, Math.max(0, sum >> 22));
      }
    });
}

// RGB levels of an image in another size: first across, then down, each rounded to whole levels.
function resized(data, width, height, across, down, interpolation) {
  const filter = FILTERS[interpolation],
    half = new Uint8Array(3 * across * height);
  const whole = new Uint8Array(3 * across * down);
  pass(data, half, weightsOf(width, across, filter), height, [3 * width, 3], [3 * across, 3]);
  pass(half, whole, weightsOf(height, down, filter), across, [3, 3 * across], [3, 3 * across]);
  return whole;
}

// {input (3, side, side), seen: its RGB levels} from decoded levels: the shorter side resized, and the middle cut out.
// A `ready` image is the model's input already, and only normalized.
function prepared(
  { data, width, height },
  { image: [side], resized: short, interpolation, mean, std },
  ready,
) {
  const least = Math.min(width, height),
    longer = (length) => Math.trunc((short * length) / least);
  const across = width === least ? short : longer(width),
    down = height === least ? short : longer(height);
  const levels = ready ? data : resized(data, width, height, across, down, interpolation);
  const even = (x) => (Math.abs(x % 1) === 0.5 ? 2 * Math.round(x / 2) : Math.round(x)); // Python rounds halves to even
  const [left, top] = ready ? [0, 0] : [even((across - side) / 2), even((down - side) / 2)],
    f = Math.fround;
  const input = new Float32Array(3 * side * side),
    seen = new Uint8Array(3 * side * side);
  for (let i = 0; i < 3 * side * side; i += 1) {
    const color = i % 3,
      pixel = (i - color) / 3,
      x = pixel % side,
      y = (pixel - x) / side;
    seen[i] = levels[3 * ((y + top) * (ready ? side : across) + x + left) + color];
    input[color * side * side + pixel] = f(f(f(seen[i] / 255) - f(mean[color])) / f(std[color]));
  }
  return { input, seen };
}

// The model's input as a PNG file, enlarged as `vitlens_explorer.drawing.enlarged` does it.
async function pictured(seen, side) {
  const wide = Math.max(1, Math.floor(448 / side)) * side,
    levels = resized(seen, side, side, wide, wide, "bicubic");
  const canvas = new OffscreenCanvas(wide, wide),
    image = new ImageData(wide, wide);
  for (let i = 0; i < 4 * wide * wide; i += 1)
    image.data[i] = i % 4 === 3 ? 255 : levels[(i >> 2) * 3 + (i % 4)];
  canvas.getContext("2d").putImageData(image, 0, 0);
  return new Uint8Array(await (await canvas.convertToBlob()).arrayBuffer());
}
