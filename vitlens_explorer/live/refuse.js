// Reasons why a file is not read, as errors that the page has words for.

const LONGEST_NAME = 80; // characters of a name in a sentence

// The beginnings of files that are no safetensors or JSON, by the sentence about them.
const OTHER_FORMATS = [
  ["pickle", /^(PK\x03\x04|\x80[\x02-\x05])/],
  ["pointer", /^version https:\/\/git-lfs/],
  ["web page", /^\s*<(!doctype|html|head|body|\?xml)/i],
  ["compressed", /^(\x1f\x8b|7z\xbc\xaf|Rar!|\xfd7zXZ|BZh)/],
  ["other weights", /^(GGUF|\x89HDF|\x93NUMPY)/],
];

// Raises an error that the page has words for.
export function refuse(problem, fields = {}) {
  throw Object.assign(Error(problem), { problem, fields });
}

// A name or value of a file as a sentence shows it: one line, and not longer than `LONGEST_NAME`.
export function clip(value) {
  const text = typeof value === "string" ? value : (JSON.stringify(value) ?? "nothing");
  const line = text.replace(/[\p{C}\p{Z}]+/gu, " ");
  return line.length > LONGEST_NAME ? `${line.slice(0, LONGEST_NAME)}…` : line;
}

export const isObject = (value) =>
  typeof value === "object" && value !== null && !Array.isArray(value);
export const isCount = (value) => Number.isSafeInteger(value) && value >= 0;

// Refuses bytes that begin as another format, with the reason.
export function refuseOther(bytes, file) {
  const start = String.fromCharCode(...bytes.subarray(0, 64));
  const found = OTHER_FORMATS.find(([, beginning]) => beginning.test(start));
  if (found) refuse(found[0], { file, code: codeName(file) });
}

// A file's name for lines of Python. Names with other signs could end the string that they stand in.
export const codeName = (file) => (/^[\w.-]+$/.test(file) ? file : "pytorch_model.bin");
