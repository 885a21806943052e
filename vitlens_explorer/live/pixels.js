// From the bytes of an image file to the model's input, as `vitlens.models.preprocess` gives it: the browser decodes,
// and the rest is Pillow's arithmetic. PNG of 8 bits and baseline JPEG without a color profile give Python's bits.

const PNG = { signature: 0x89504e47, data: 0x49444154, profile: 0x69434350 }; // names of the chunks IDAT and iCCP
const JPEG = {
  signature: 0xffd8,
  frame: 0xffc0,
  application: 0xffe2,
  scan: 0xffda,
  profile: 0x4943435f,
}; // ICC_
const FRACTION = 22; // bits of a weight after the binary point
const PICTURE = 448; // largest side of the picture for the page, if the model's input is not larger

// {plain: a PNG of 8 bits, profile} from the chunks of a PNG: {size, name, data, checksum}.
function kindOfPng(view, end) {
  const kind = { plain: view.getUint8(24) <= 8, profile: false };
  let at = 8;
  while (at < end && view.getUint32(at + 4) !== PNG.data) {
    if (view.getUint32(at + 4) === PNG.profile) kind.profile = true;
    at += view.getUint32(at) + 12;
  }
  return kind;
}

// {plain: a baseline JPEG, profile} from the segments of a JPEG: {marker, size, data}.
function kindOfJpeg(view, end) {
  const kind = { plain: false, profile: false };
  let at = 2;
  while (at < end && view.getUint16(at) !== JPEG.scan) {
    const marker = view.getUint16(at);
    if (marker === JPEG.frame) kind.plain = true;
    if (marker === JPEG.application && view.getUint32(at + 4) === JPEG.profile) kind.profile = true;
    at += view.getUint16(at + 2) + 2;
  }
  return kind;
}

// {plain: a PNG of 8 bits or a baseline JPEG, profile: with a color profile}, from the header of a file.
function kindOf(bytes) {
  const view = new DataView(bytes);
  const end = bytes.byteLength - 12;
  if (end > 16 && view.getUint32(0) === PNG.signature) return kindOfPng(view, end);
  if (end > 0 && view.getUint16(0) === JPEG.signature) return kindOfJpeg(view, end);
  return { plain: false, profile: false };
}

// A level with `alpha` over white, as Pillow's alpha_composite rounds it.
function overWhite(level, alpha) {
  const sum = (level * alpha + 255 * (255 - alpha)) * 128 + 0x4000;
  return ((sum >> 8) + sum) >> 15;
}

// A file's image, upright: {data: RGB levels over white, width, height, clear: was transparent somewhere, exact: with
// Pillow's levels}. Throws for files that the browser does not decode.
async function decode(bytes) {
  const { plain, profile } = kindOf(bytes);
  const colorSpaceConversion = profile ? "default" : "none";
  const options = { colorSpaceConversion, premultiplyAlpha: "none" };
  const bitmap = await createImageBitmap(new Blob([bytes]), options);
  const { width, height } = bitmap;
  const context = new OffscreenCanvas(width, height).getContext("2d");
  context.drawImage(bitmap, 0, 0);
  const levels = context.getImageData(0, 0, width, height).data;
  const data = new Uint8Array(3 * width * height);
  let clear = false;
  let to = 0;
  for (let from = 0; from < levels.length; from += 4) {
    const alpha = levels[from + 3];
    if (alpha < 255) clear = true;
    for (let i = 0; i < 3; i += 1) {
      const level = levels[from + i];
      data[to + i] = alpha === 255 ? level : overWhite(level, alpha);
    }
    to += 3;
  }
  return { data, width, height, clear, exact: plain && !profile };
}

function bicubicWeight(x) {
  if (x < 1) return (1.5 * x - 2.5) * x * x + 1;
  if (x < 2) return (((x - 5) * x + 8) * x - 4) * -0.5;
  return 0;
}

// The filters of Pillow: {reach in pixels of the source, weightAt: weight at a distance}.
const FILTERS = {
  bilinear: { reach: 1, weightAt: (x) => Math.max(0, 1 - x) },
  bicubic: { reach: 2, weightAt: bicubicWeight },
};

// A weight in units of 2⁻²², rounded as Pillow does it.
function fixWeight(weight) {
  const scaled = weight * 2 ** FRACTION;
  return Math.trunc((weight < 0 ? -0.5 : 0.5) + scaled);
}

// For each of `to` pixels: the first of the `from` pixels that it sums, and their weights in units of 2⁻²².
function weightsOf(from, to, { reach, weightAt }) {
  const scale = from / to;
  const stretch = Math.max(scale, 1);
  const support = reach * stretch;
  const nearer = 1 / stretch;
  return Array.from({ length: to }, (_, i) => {
    const center = (i + 0.5) * scale;
    const first = Math.max(0, Math.trunc(center - support + 0.5));
    const last = Math.min(from, Math.trunc(center + support + 0.5));
    const weights = [];
    for (let k = 0; k < last - first; k += 1) {
      weights.push(weightAt(Math.abs((k + first - center + 0.5) * nearer)));
    }
    const sum = sumOf(weights);
    return [first, weights.map((weight) => fixWeight(weight / sum))];
  });
}

// One pass of Pillow's resize. `lines` lines lie `line` values apart, their pixels `step` values.
function resizeLines(source, target, weights, lines, [line, step], [toLine, toStep]) {
  for (let y = 0; y < lines; y += 1) {
    weights.forEach(([first, shares], x) => {
      for (let color = 0; color < 3; color += 1) {
        let at = y * line + first * step + color;
        let sum = 2 ** (FRACTION - 1);
        for (let k = 0; k < shares.length; k += 1) {
          sum += source[at] * shares[k];
          at += step;
        }
        const level = Math.min(255, Math.max(0, sum >> FRACTION));
        target[y * toLine + x * toStep + color] = level;
      }
    });
  }
}

// RGB levels of an image in another size: first across, then down, each rounded to whole levels.
function resize(data, width, height, across, down, interpolation) {
  const filter = FILTERS[interpolation];
  const half = new Uint8Array(3 * across * height);
  const whole = new Uint8Array(3 * across * down);
  const columns = weightsOf(width, across, filter);
  const rows = weightsOf(height, down, filter);
  resizeLines(data, half, columns, height, [3 * width, 3], [3 * across, 3]);
  resizeLines(half, whole, rows, across, [3, 3 * across], [3, 3 * across]);
  return whole;
}

// Rounds halves to even, as Python.
function roundLikePython(x) {
  return Math.abs(x % 1) === 0.5 ? 2 * Math.round(x / 2) : Math.round(x);
}

// RGB levels of the middle of an image, whose shorter side is resized.
function cutMiddle({ data, width, height }, { image: [side], resized: short, interpolation }) {
  const least = Math.min(width, height);
  const across = width === least ? short : Math.trunc((short * width) / least);
  const down = height === least ? short : Math.trunc((short * height) / least);
  const levels = resize(data, width, height, across, down, interpolation);
  const left = roundLikePython((across - side) / 2);
  const top = roundLikePython((down - side) / 2);
  const middle = new Uint8Array(3 * side * side);
  for (let y = 0; y < side; y += 1) {
    const start = 3 * ((y + top) * across + left);
    middle.set(levels.subarray(start, start + 3 * side), 3 * y * side);
  }
  return middle;
}

// {input (3, side, side), seen: its RGB levels} from decoded levels. A `ready` image is the model's input already, and
// only normalized.
function preprocess(image, vit, ready) {
  const { mean, std } = vit;
  const seen = ready ? image.data : cutMiddle(image, vit);
  const pixels = vit.image[0] ** 2;
  const round = Math.fround;
  const input = new Float32Array(3 * pixels);
  for (let pixel = 0; pixel < pixels; pixel += 1) {
    for (let color = 0; color < 3; color += 1) {
      const level = round(seen[3 * pixel + color] / 255);
      const centered = round(level - round(mean[color]));
      input[color * pixels + pixel] = centered / round(std[color]);
    }
  }
  return { input, seen };
}

// The model's input as a PNG file, enlarged as `vitlens_explorer.drawing.enlarged` does it.
async function encodePicture(seen, side) {
  const wide = Math.max(1, Math.floor(PICTURE / side)) * side;
  const levels = resize(seen, side, side, wide, wide, "bicubic");
  const image = new ImageData(wide, wide);
  for (let pixel = 0; pixel < wide * wide; pixel += 1) {
    for (let color = 0; color < 3; color += 1) {
      image.data[4 * pixel + color] = levels[3 * pixel + color];
    }
    image.data[4 * pixel + 3] = 255;
  }
  const canvas = new OffscreenCanvas(wide, wide);
  canvas.getContext("2d").putImageData(image, 0, 0);
  const file = await canvas.convertToBlob();
  return new Uint8Array(await file.arrayBuffer());
}
