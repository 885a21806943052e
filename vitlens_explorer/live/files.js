// What the bytes of an image file tell before a browser decodes it: whether it is whole, and what decoders treat
// differently. A file is {kind: name of its probe, plain: of a kind that the page decodes as Python if its probe was,
// profile: with a color profile, turned: its EXIF orientation, tag: where that is, frames, whole: false for a file that
// ends before its image does}.

const PNG = 0x89504e47;
const JPEG = 0xffd8;
const GIF = 0x47494638;
const RIFF = 0x52494646;
const WEBP = 0x57454250;
const BOX = 0x66747970; // ftyp, of AVIF and HEIC
const EXIF = 0x45786966;
const ICC = 0x4943435f;
const ORIENTATION = 0x0112; // the tag of EXIF
const UPRIGHT = { turned: 1, tag: null };
const OTHER = { kind: "", plain: false, profile: false, ...UPRIGHT, frames: 1, whole: true };

const tagOf = (view, at) => String.fromCharCode(...[0, 1, 2, 3].map((k) => view.getUint8(at + k)));

// {turned, tag: place of the number in the file, and its order of bytes} from EXIF data that begin at a byte.
function orientationOf(view, start, end) {
  if (end - start < 10) return UPRIGHT;
  const small = view.getUint16(start) === 0x4949; // little-endian
  const first = start + view.getUint32(start + 4, small);
  if (first + 2 > end) return UPRIGHT;
  const count = view.getUint16(first, small);
  for (let k = 0; k < count && first + 14 + 12 * k <= end; k += 1) {
    const entry = first + 2 + 12 * k;
    if (view.getUint16(entry, small) === ORIENTATION) {
      const turned = view.getUint16(entry + 8, small);
      return turned > 1 && turned <= 8 ? { turned, tag: [entry + 8, small] } : UPRIGHT;
    }
  }
  return UPRIGHT;
}

// Chunks of a PNG: {size, name, data, checksum}.
function readPng(view, end) {
  const file = { ...OTHER, kind: "png", plain: view.getUint8(24) <= 8, whole: false };
  let at = 8;
  while (at + 8 <= end) {
    const size = view.getUint32(at);
    const name = tagOf(view, at + 4);
    const next = at + size + 12;
    if (name === "IEND") file.whole = true;
    if (name === "iCCP" || name === "cICP") file.profile = true;
    if (name === "gAMA" || name === "cHRM") file.kind = "gamma";
    if (name === "eXIf" && next <= end) {
      Object.assign(file, orientationOf(view, at + 8, next - 4));
    }
    if (name === "acTL" && next <= end) file.frames = view.getUint32(at + 8);
    if (name === "IEND" || next > end) break;
    at = next;
  }
  return file;
}

// Where the next marker begins in the coded data of a JPEG, or the end.
function findMarker(bytes, from) {
  let at = bytes.indexOf(0xff, from);
  while (at >= 0 && at + 1 < bytes.length) {
    const code = bytes[at + 1];
    const isData = code === 0 || code === 0xff || (code >= 0xd0 && code <= 0xd7);
    if (!isData) return at;
    at = bytes.indexOf(0xff, at + 1);
  }
  return bytes.length;
}

// Segments of a JPEG: {marker, size, data}, and the coded data after each scan.
function readJpeg(view, end) {
  const bytes = new Uint8Array(view.buffer);
  const file = { ...OTHER, kind: "jpeg", whole: false };
  let at = 2;
  while (at + 4 <= end) {
    at = findMarker(bytes, at);
    if (at + 2 > end) break;
    const marker = view.getUint16(at);
    if (marker === 0xffd9) {
      file.whole = true;
      break;
    }
    if (at + 4 > end) break;
    const next = at + 2 + view.getUint16(at + 2);
    if (next > end) break;
    if (marker === 0xffc0) file.plain = true; // baseline
    if (marker === 0xffe2 && view.getUint32(at + 4) === ICC) file.profile = true;
    if (marker === 0xffe1 && next - at > 20 && view.getUint32(at + 4) === EXIF) {
      Object.assign(file, orientationOf(view, at + 10, next));
    }
    at = next;
  }
  return file;
}

// Blocks of a GIF. Data come in parts, each after its size, and end with a part of no bytes.
function readGif(view, end) {
  const file = { ...OTHER, kind: "gif", frames: 0, whole: false };
  const tableSize = (flags) => (flags & 0x80 ? 3 * 2 ** ((flags & 7) + 1) : 0);
  let at = 13 + tableSize(view.getUint8(10));
  while (at < end) {
    const isImage = view.getUint8(at) === 0x2c;
    const isExtension = view.getUint8(at) === 0x21;
    if (!isImage && !isExtension) break;
    if (isImage && at + 9 >= end) break;
    at += isImage ? 11 + tableSize(view.getUint8(at + 9)) : 2;
    while (at < end && view.getUint8(at)) at += view.getUint8(at) + 1;
    const isWhole =
      at < end && (at + 1 === end || [0x21, 0x2c, 0x3b].includes(view.getUint8(at + 1)));
    if (isImage && isWhole) {
      file.frames += 1;
      file.whole = true; // the first frame is
    }
    at += 1;
  }
  return file;
}

// Chunks of a WebP: {name, size, data}.
function readWebp(view, end) {
  const file = { ...OTHER, kind: "webp", frames: 0, whole: view.getUint32(4, true) + 8 <= end };
  let at = 12;
  while (at + 8 <= end) {
    const name = tagOf(view, at);
    const next = at + 8 + view.getUint32(at + 4, true);
    if (name === "ANMF") file.frames += 1;
    if (name === "ICCP") file.profile = true;
    if (name === "EXIF" && next <= end) {
      const start = view.getUint32(at + 8) === EXIF ? at + 14 : at + 8;
      Object.assign(file, orientationOf(view, start, next));
    }
    at = next + (next % 2);
  }
  return { ...file, frames: Math.max(1, file.frames) };
}

// Boxes of an AVIF file: {size, name, data}.
function readBoxes(view, end) {
  let at = 0;
  while (at + 8 <= end) {
    const size = view.getUint32(at);
    if (size < 8) break; // to the end of the file, or a large one
    at += size;
  }
  return { ...OTHER, kind: "avif", whole: at <= end };
}

// What the bytes of a file tell.
export function readFile(bytes) {
  const view = new DataView(bytes);
  const end = bytes.byteLength;
  if (end < 26) return OTHER;
  if (view.getUint32(0) === PNG) return readPng(view, end);
  if (view.getUint16(0) === JPEG) return readJpeg(view, end);
  if (view.getUint32(0) === GIF) return readGif(view, end);
  if (view.getUint32(0) === RIFF && view.getUint32(8) === WEBP) return readWebp(view, end);
  if (view.getUint32(4) === BOX) return readBoxes(view, end);
  return OTHER;
}
