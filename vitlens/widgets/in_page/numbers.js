// Sentences and number formats of words.py, and arrays of a file. The scripts of this folder share one scope, in the
// order of `SCRIPTS` in __init__.py, within that of the front end.

let WORDS = {}; // the table of words.py
const say = (name, fields = {}) => WORDS[name].replace(/\{(\w+)\}/g, (_, field) => fields[field]);

// Three significant digits as Python's ".3g", with a proper minus sign. Ties go to the even digit.
function number(value) {
  const tie = value.toExponential(50).match(/^(-?\d\.\d[02468])50*(e.+)/);
  const text = tie ? tie[1] + tie[2] : value.toExponential(2);
  const [digits, power] = text.split("e");
  const wide = power < -4 || power >= 3;
  const shown = wide ? `${Number(digits)}e${power[0]}${power.slice(1).padStart(2, "0")}` : String(Number(text));
  return shown.replaceAll("-", "−");
}

function percent(share) {
  const up = Math.round(100 * share);
  return share > 0 && share < 0.005 ? "< 0.5%" : `${up - 100 * share === 0.5 ? up - (up % 2) : up}%`;
}

let halves; // the number of each half-precision bit pattern
function halfTable() {
  return Float32Array.from({ length: 65536 }, (_, bits) => {
    const [exponent, fraction] = [(bits >> 10) & 31, bits & 1023];
    const size = exponent ? (1 + fraction / 1024) * 2 ** (exponent - 15) : fraction * 2 ** -24;
    return bits >> 15 ? -size : size;
  });
}

// Float32 numbers of a stored array: {type: "f2" or "f4", data, factor}.
function floats({ type, data, factor = 1 }) {
  if (type === "f4") return floatsOf(data);
  halves ||= halfTable();
  const stored = new Uint16Array(bytesOf(data).slice().buffer);
  const values = new Float32Array(stored.length);
  for (let i = 0; i < values.length; i += 1) values[i] = factor * halves[stored[i]]; // faster than Float32Array.from
  return values;
}

// Scores of the logits, as `models.scores`.
function sharesOf(logits, outputs) {
  if (outputs === "classes" && logits.length > 1) return softmax([...logits]);
  return outputs === "independent" ? Array.from(logits, (logit) => 1 / (1 + Math.exp(-logit))) : [...logits];
}
