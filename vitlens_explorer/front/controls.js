import { make, makeButton, nextNumber, setPressed } from "./elements.js";
import { isEqual } from "./values.js";

const MOST_BUTTONS = 4; // views of a question as buttons. More are in a menu

export function makeGroup(kind, label, attributes, ...nodes) {
  return make("div", { class: kind, role: "group", "aria-label": label, ...attributes }, ...nodes);
}

// Where controls stand: in the form, above the panels, under the mosaic or a panel, or in a closed group of that name.
export function makePlace(place, { controls, top, folds, heads, panels }) {
  const known = new Map();
  if (!place) return { known, parent: controls, show: () => {} };
  if (place === "top") return { known, parent: top, show: () => {} };
  const parent = makeGroup("controls", place);
  const above = place === "heads" ? heads : panels.get(place)?.node;
  let around = parent;
  if (above) {
    above.append(around);
  } else {
    const summary = make("summary", {}, place);
    around = make("details", { class: "fold", "data-fold": place }, summary, parent);
    folds.append(around);
  }
  const show = (some) => {
    around.hidden = !some;
  };
  return { known, parent, show };
}

// A question: its tab, and a row with a line about it and its views, which are buttons or a menu.
function makeQuestion(question, line, options, choose) {
  const values = options.map(([, value]) => value);
  const part = { values, last: values[0], buttons: [], menu: null };
  part.tab = makeButton(question, () => choose(part.last), { class: "tab" });
  if (options.length > MOST_BUTTONS) {
    const items = options.map(([text, value]) => make("option", { "data-view": value }, text));
    const onchange = () => choose(values[part.menu.selectedIndex]);
    part.menu = make("select", { "aria-label": question, onchange }, ...items);
  } else {
    part.buttons = options.map(([text, value]) =>
      makeButton(text, () => choose(value), { "data-view": value }),
    );
  }
  const choices = part.menu ? [part.menu] : part.buttons;
  const views = makeGroup("modes", question, { hidden: options.length === 1 }, ...choices);
  part.row = make("div", { class: "asked" }, make("p", { class: "line" }, line), views);
  return part;
}

// Questions in a row, and in a second row a line about the current one and its views.
function makeQuestions({ name, label, options, groups, hidden, value: first }, send) {
  const choose = (value) => {
    update(value);
    send({ set: { [name]: value } });
  };
  const rest = [...options];
  const parts = groups.map(([question, count, line]) =>
    makeQuestion(question, line, rest.splice(0, count), choose),
  );
  const update = (value) => {
    for (const part of parts) {
      const at = part.values.indexOf(value);
      if (at >= 0) part.last = value;
      setPressed(part.tab, at >= 0);
      part.row.hidden = at < 0;
      if (part.menu) part.menu.selectedIndex = at;
      part.buttons.forEach((button, k) => setPressed(button, k === at));
    }
  };
  update(first);
  const tabs = parts.map((part) => part.tab);
  const rows = parts.map((part) => part.row);
  const attributes = { "data-control": name, hidden };
  const node = makeGroup(
    "questions",
    label,
    attributes,
    makeGroup("tabs", label, {}, ...tabs),
    ...rows,
  );
  return { node, update };
}

const indexOfValue = (options, value) => options.findIndex((option) => isEqual(option[1], value));

// The field of a control, by kind: {input, update(value, message)}, and for a range its output. set: sends a value.
const FIELDS = {
  select({ options, groups }, shared, set) {
    const choices = options.map(([text]) => make("option", {}, text));
    const grouped = groups.map(([label, count]) =>
      make("optgroup", { label }, ...choices.splice(0, count)),
    );
    const onchange = () => set(options[input.selectedIndex][1]);
    const input = make("select", { ...shared, onchange }, ...grouped, ...choices);
    const update = (value) => {
      input.selectedIndex = indexOfValue(options, value);
    };
    return { input, update };
  },

  check(described, shared, set) {
    const onchange = () => set(input.checked);
    const input = make("input", { ...shared, type: "checkbox", onchange });
    const update = (value) => {
      input.checked = value;
    };
    return { input, update };
  },

  range({ options, high, step }, shared, set) {
    const output = make("output", { for: shared.id });
    // Text and value of the slider's place.
    const readPlace = () => options[input.value] ?? [input.value, Number(input.value)];
    const writeText = () => {
      const [text] = readPlace();
      output.textContent = text;
      input.setAttribute("aria-valuetext", text);
    };
    const oninput = () => {
      writeText();
      set(readPlace()[1]);
    };
    const ends = options.length ? { max: options.length - 1 } : { max: high, step };
    const input = make("input", { ...shared, type: "range", min: 0, ...ends, oninput });
    const update = (value) => {
      input.value = options.length ? Math.max(0, indexOfValue(options, value)) : value;
      writeText();
    };
    return { input, output, update };
  },

  text({ hint }, shared, set) {
    let last; // value from Python: keep typed text, also while an error about it is shown
    const onchange = () => {
      const typed = input.value.trim();
      if (typed || last) set(typed);
    };
    const own = { type: "text", placeholder: hint, autocomplete: "off", onchange };
    const input = make("input", { ...shared, ...own });
    const update = (value, message) => {
      const idle = !message && !input.matches(":focus");
      if (value === last && !idle) return;
      last = value;
      input.value = value;
    };
    return { input, update };
  },
};

// A control of controls.py: {node, update(value, message)}.
export function makeControl(described, send) {
  if (described.kind === "questions") return makeQuestions(described, send);
  const { name, label, kind, disabled, hidden, value: first } = described;
  const id = `vitlens-${nextNumber()}`;
  const set = (value) => send({ set: { [name]: value } });
  const { input, output = "", update } = FIELDS[kind](described, { id, disabled }, set);
  const attributes = { class: `control ${kind}`, "data-control": name, hidden };
  const node = make("div", attributes, make("label", { for: id }, label), input, output);
  update(first);
  return { node, update };
}
