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
  const shown = wide
    ? `${Number(digits)}e${power[0]}${power.slice(1).padStart(2, "0")}`
    : String(Number(text));
  return shown.replaceAll("-", "−");
}

function percent(share) {
  const up = Math.round(100 * share);
  return share > 0 && share < 0.005
    ? "< 0.5%"
    : `${up - 100 * share === 0.5 ? up - (up % 2) : up}%`;
}

// Float32 numbers of a stored array: {type: "f2" or "f4", data}.
const floats = ({ type, data }) =>
  type === "f4" ? floatsOf(data) : new Float32Array(new Float16Array(bytesOf(data).slice().buffer));

// Scores of the logits, as `models.scores`.
function sharesOf(logits, outputs) {
  if (outputs === "classes" && logits.length > 1) return softmax([...logits]);
  return outputs === "independent"
    ? Array.from(logits, (logit) => 1 / (1 + Math.exp(-logit)))
    : [...logits];
}
