// From the bytes of an image file to the model's input, as `vitlens.models.preprocess` gives it: the browser decodes,
// and the rest is Pillow's arithmetic. PNG of 8 bits and baseline JPEG without a color profile give Python's bits where
// the browser decoded the probes of live/__init__.py so.

import { sumOf } from "../front/values.js";
import { readFile } from "./files.js";
import { refuse } from "./refuse.js";
import { roundLikePython } from "./sizes.js";

const FRACTION = 22; // bits of a weight after the binary point
const PICTURE = 448; // largest side of the picture for the page, if the model's input is not larger
const ELONGATION = 100; // largest ratio of the sides of an image
const MOST_PIXELS = 80e6;
const EDGE = 8; // side of a block of a JPEG
const GRAY = 128; // level of the blocks that a JPEG lacks
let proven = new Set(); // kinds of files that this browser decodes as Pillow

// Decodes a small file of each kind, and compares it with Pillow's levels.
export async function prove(probes) {
  const found = new Set();
  for (const { kind, file, levels } of probes) {
    const image = await decode(file).catch(() => null);
    const isEqualTo = (level, i) => level === levels[i];
    if (image && image.data.length === levels.length && image.data.every(isEqualTo)) {
      found.add(kind);
    }
  }
  proven = found;
}

// A level with `alpha` over white, as Pillow's alpha_composite rounds it.
function overWhite(level, alpha) {
  const sum = (level * alpha + 255 * (255 - alpha)) * 128 + 0x4000;
  return ((sum >> 8) + sum) >> 15;
}

// RGB levels over white of RGBA levels, and whether some were transparent: {data, clear}.
function blend(levels, pixels) {
  const data = new Uint8Array(3 * pixels);
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
  return { data, clear };
}

// True if the last block of a JPEG is an even gray, as decoders fill in blocks that are missing.
function endsGray({ data, width, height }) {
  for (let y = Math.max(0, height - EDGE); y < height; y += 1) {
    const start = 3 * (y * width + Math.max(0, width - EDGE));
    const end = 3 * (y + 1) * width;
    if (data.subarray(start, end).some((level) => level !== GRAY)) return false;
  }
  return true;
}

// [x, y] in an image of a pixel of the upright one, by its EXIF orientation. right, bottom: its last pixels.
const SOURCES = {
  2: (x, y, right) => [right - x, y],
  3: (x, y, right, bottom) => [right - x, bottom - y],
  4: (x, y, right, bottom) => [x, bottom - y],
  5: (x, y) => [y, x],
  6: (x, y, right, bottom) => [y, bottom - x],
  7: (x, y, right, bottom) => [right - y, bottom - x],
  8: (x, y, right) => [right - y, x],
};

// An image turned upright, as Pillow's exif_transpose. Browsers do it for some kinds of files only.
function turn({ data, width, height }, turned) {
  if (turned === 1) return { data, width, height };
  const sourceOf = SOURCES[turned];
  const [across, down] = turned > 4 ? [height, width] : [width, height];
  const upright = new Uint8Array(data.length);
  let to = 0;
  for (let y = 0; y < down; y += 1) {
    for (let x = 0; x < across; x += 1) {
      const [column, row] = sourceOf(x, y, width - 1, height - 1);
      const from = 3 * (row * width + column);
      upright[to] = data[from];
      upright[to + 1] = data[from + 1];
      upright[to + 2] = data[from + 2];
      to += 3;
    }
  }
  return { data: upright, width: across, height: down };
}

// RGBA levels of a file as the browser decodes it, without turning: {levels, width, height}.
async function readLevels(bytes, { profile, tag }) {
  const file = new DataView(bytes.slice(0));
  if (tag) file.setUint16(tag[0], 1, tag[1]);
  const colorSpaceConversion = profile ? "default" : "none";
  const options = { colorSpaceConversion, premultiplyAlpha: "none" };
  const bitmap = await createImageBitmap(new Blob([file]), options);
  const { width, height } = bitmap;
  const size = { width, height };
  if (Math.max(width, height) > ELONGATION * Math.min(width, height)) refuse("strip", size);
  if (width * height > MOST_PIXELS) refuse("too many pixels", size);
  const context = new OffscreenCanvas(width, height).getContext("2d");
  context.drawImage(bitmap, 0, 0);
  bitmap.close();
  return { ...size, levels: context.getImageData(0, 0, width, height).data };
}

// A file's image, upright: {data: RGB levels over white, width, height, clear: was transparent somewhere, exact: with
// Pillow's levels, plain: of a kind that could be exact, turned: was turned upright, frames, gray: may lack its last
// rows}. Throws for files that the browser does not decode, that are cut, and for strips.
export async function decode(bytes) {
  const file = readFile(bytes);
  if (!file.whole) refuse("broken off");
  const { levels, width, height } = await readLevels(bytes, file);
  const { data, clear } = blend(levels, width * height);
  const plain = file.plain && !file.profile && file.frames === 1;
  const kinds = clear ? [file.kind, "alpha"] : [file.kind];
  return {
    ...turn({ data, width, height }, file.turned),
    clear,
    plain,
    exact: plain && kinds.every((kind) => proven.has(kind)),
    turned: file.turned > 1,
    frames: file.frames,
    gray: file.kind === "jpeg" && endsGray({ data, width, height }),
  };
}

function bicubicWeight(x) {
  if (x < 1) return (1.5 * x - 2.5) * x * x + 1;
  if (x < 2) return (((x - 5) * x + 8) * x - 4) * -0.5;
  return 0;
}

// The filters of Pillow: {reach in pixels of the source, weightAt: weight at a distance}.
export const FILTERS = {
  bilinear: { reach: 1, weightAt: (x) => Math.max(0, 1 - x) },
  bicubic: { reach: 2, weightAt: bicubicWeight },
};

// A weight in units of 2⁻²², rounded as Pillow does it.
function fixWeight(weight) {
  const scaled = weight * 2 ** FRACTION;
  return Math.trunc((weight < 0 ? -0.5 : 0.5) + scaled);
}

// For each of `to` pixels: the first of the `from` pixels that it sums, and their weights, whose sum is 1.
export function sharesOfPixels(from, to, { reach, weightAt }) {
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
    return [first, weights.map((weight) => weight / sum)];
  });
}

// `sharesOfPixels` with weights in units of 2⁻²².
function weightsOf(from, to, filter) {
  const shares = sharesOfPixels(from, to, filter);
  return shares.map(([first, weights]) => [first, weights.map(fixWeight)]);
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

// RGB levels of an image in another width.
function resizeAcross(data, width, height, across, filter) {
  const target = new Uint8Array(3 * across * height);
  const columns = weightsOf(width, across, filter);
  resizeLines(data, target, columns, height, [3 * width, 3], [3 * across, 3]);
  return target;
}

// RGB levels of an image in another height.
function resizeDown(data, width, height, down, filter) {
  const target = new Uint8Array(3 * width * down);
  const rows = weightsOf(height, down, filter);
  resizeLines(data, target, rows, width, [3, 3 * width], [3, 3 * width]);
  return target;
}

// RGB levels of an image in another size, each side after the other and rounded to whole levels. Pillow takes the
// height first if it shrinks by more than twice as many pixels as the width.
function resize(data, width, height, across, down, interpolation) {
  const filter = FILTERS[interpolation];
  const lessDown = height - down;
  const lessAcross = width - across;
  if (lessDown > 0 && lessDown > 2 * lessAcross) {
    const low = resizeDown(data, width, height, down, filter);
    return resizeAcross(low, width, down, across, filter);
  }
  const narrow = resizeAcross(data, width, height, across, filter);
  return resizeDown(narrow, across, height, down, filter);
}

// Width and height to which an image is resized: its shorter side, or both sides if the photo is `squeezed`.
function resizedSides({ width, height }, { resized: short, squeezed }) {
  if (squeezed) return [short, short];
  const least = Math.min(width, height);
  const across = width === least ? short : Math.trunc((short * width) / least);
  const down = height === least ? short : Math.trunc((short * height) / least);
  return [across, down];
}

// RGB levels of the middle of an image that was resized.
function cutMiddle(photo, vit) {
  const { data, width, height } = photo;
  const {
    image: [side],
    interpolation,
  } = vit;
  const [across, down] = resizedSides(photo, vit);
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

// The RGB levels of a decoded photo that a model sees. A `ready` one is the model's input already. whole: [height,
// width] of the input that shows it without a crop, or null.
function seenLevels(photo, about, ready, whole) {
  if (ready) return photo.data;
  if (!whole) return cutMiddle(photo, about);
  const { data, width, height } = photo;
  return resize(data, width, height, whole[1], whole[0], about.interpolation);
}

// {input (3, height, width), seen: its RGB levels, image: [height, width]} from decoded levels. ready, whole: as for
// `seenLevels`.
export function preprocess(photo, about, ready, whole = null) {
  const { mean, std } = about;
  const seen = seenLevels(photo, about, ready, whole);
  const pixels = seen.length / 3;
  const round = Math.fround;
  const input = new Float32Array(3 * pixels);
  for (let pixel = 0; pixel < pixels; pixel += 1) {
    for (let color = 0; color < 3; color += 1) {
      const level = round(seen[3 * pixel + color] / 255);
      const centered = round(level - round(mean[color]));
      input[color * pixels + pixel] = centered / round(std[color]);
    }
  }
  return { input, seen, image: whole ?? about.image };
}

// An input (3, H, W) whose patches that are not shown (P) have its mean color. Pixels beyond the last patch belong to
// it.
export function coverPatches({ image: [height, width], patch }, input, shown) {
  const rows = Math.floor(height / patch[0]);
  const cols = Math.floor(width / patch[1]);
  const pixels = height * width;
  const covered = Float32Array.from(input);
  for (let color = 0; color < 3; color += 1) {
    const start = color * pixels;
    let sum = 0;
    for (let i = start; i < start + pixels; i += 1) sum += input[i];
    const mean = sum / pixels;
    for (let y = 0; y < height; y += 1) {
      const row = Math.min(Math.floor(y / patch[0]), rows - 1);
      for (let x = 0; x < width; x += 1) {
        const col = Math.min(Math.floor(x / patch[1]), cols - 1);
        if (!shown[row * cols + col]) covered[start + y * width + x] = mean;
      }
    }
  }
  return covered;
}

// The model's input as a PNG file, enlarged as `vitlens_explorer.drawing.enlarged` does it.
export async function encodePicture(seen, [height, width]) {
  const factor = Math.max(1, Math.floor(PICTURE / Math.max(height, width)));
  const wide = factor * width;
  const high = factor * height;
  const levels = resize(seen, width, height, wide, high, "bicubic");
  const image = new ImageData(wide, high);
  for (let pixel = 0; pixel < wide * high; pixel += 1) {
    for (let color = 0; color < 3; color += 1) {
      image.data[4 * pixel + color] = levels[3 * pixel + color];
    }
    image.data[4 * pixel + 3] = 255;
  }
  const canvas = new OffscreenCanvas(wide, high);
  canvas.getContext("2d").putImageData(image, 0, 0);
  const file = await canvas.convertToBlob();
  return new Uint8Array(await file.arrayBuffer());
}
