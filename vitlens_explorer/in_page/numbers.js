// Sentences and number formats of words.py, arrays of a file, and names of classes.

import { bytesOf, floatsOf, formatPercent, softmax } from "../front/values.js";

export let WORDS = {}; // the table of words.py

export function setWords(words) {
  WORDS = words;
}

export function say(name, fields = {}) {
  return WORDS[name].replace(/\{(\w+)\}/g, (_, field) => fields[field]);
}

// Three significant digits as Python's ".3g", with a proper minus sign. Ties go to the even digit.
export function formatLikePython(value) {
  const tie = value.toExponential(50).match(/^(-?\d\.\d[02468])50*(e.+)/);
  const rounded = tie ? tie[1] + tie[2] : value.toExponential(2);
  const [digits, power] = rounded.split("e");
  let text = String(Number(rounded));
  if (power < -4 || power >= 3) {
    const sign = power[0];
    text = `${Number(digits)}e${sign}${power.slice(1).padStart(2, "0")}`;
  }
  return text.replaceAll("-", "−");
}

// A share in whole percent. Ties go to the even number, as in Python.
export function formatShare(share) {
  if (share > 0 && share < 0.005) return "< 0.5%";
  const rounded = Math.round(100 * share);
  const tie = rounded - 100 * share === 0.5;
  return tie ? `${rounded - (rounded % 2)}%` : `${rounded}%`;
}

// A share in percent with one decimal.
export function formatFineShare(share) {
  return share > 0 && share < 0.0005 ? "< 0.1%" : formatPercent(share);
}

// Float32 numbers of a stored array: {type: "f2" or "f4", data}.
export function decodeFloats({ type, data }) {
  if (type === "f4") return floatsOf(data);
  return new Float32Array(new Float16Array(bytesOf(data).slice().buffer));
}

// Scores of the logits, as `models.scores`.
export function sharesOf(logits, outputs) {
  if (outputs === "classes" && logits.length > 1) return softmax([...logits]);
  if (outputs === "independent") return Array.from(logits, (logit) => 1 / (1 + Math.exp(-logit)));
  return [...logits];
}

// Functions of a class's number: its short name, and its whole one.
export function namesOf({ labels, names }) {
  return { label: (k) => labels?.[k] ?? String(k), full: (k) => names?.[k] ?? String(k) };
}
