// Where controls stand: in the form, above the panels, under the mosaic or a panel, or in a closed group of that name.
function placeOf(place, { controls, top, folds, heads, panels }) {
  const known = new Map();
  if (!place) return { known, parent: controls, show: () => {} };
  if (place === "top") return { known, parent: top, show: () => {} };
  const parent = make("div", { class: "controls", role: "group", "aria-label": place });
  const above = place === "heads" ? heads : panels.get(place)?.node;
  const around = above ? parent : make("details", { class: "fold", "data-fold": place }, make("summary", {}, place), parent);
  (above || folds).append(around);
  return { known, parent, show: (some) => (around.hidden = !some) };
}

function control(described, send) {
  const id = `vitlens-${(number += 1)}`;
  const { name, label, kind, options } = described;
  const set = (value) => send({ set: { [name]: value } });
  let input, output, update;
  if (kind === "select") {
    let choices = options.map(([text], index) => make("option", { value: index }, text));
    const rest = [...choices];
    if (described.groups?.length) choices = described.groups.map(([label, count]) => make("optgroup", { label }, ...rest.splice(0, count)));
    input = make("select", { id, onchange: () => set(options[input.selectedIndex][1]) }, ...choices);
    update = (value) => (input.selectedIndex = options.findIndex((option) => same(option[1], value)));
  } else if (kind === "check") {
    input = make("input", { id, type: "checkbox", onchange: () => set(input.checked) });
    update = (value) => (input.checked = value);
  } else if (kind === "range") {
    const [low, high, step] = options.length ? [0, options.length - 1, 1] : [0, described.high, described.step];
    const text = () => (options.length ? options[input.value][0] : input.value);
    const say = () => {
      output.textContent = text();
      input.setAttribute("aria-valuetext", text());
    };
    output = make("output", { for: id });
    const oninput = () => {
      say();
      set(options.length ? options[input.value][1] : Number(input.value));
    };
    input = make("input", { id, type: "range", min: low, max: high, step, oninput });
    update = (value) => {
      input.value = options.length ? Math.max(0, options.findIndex((option) => same(option[1], value))) : value;
      say();
    };
  } else if (kind === "text") {
    let told; // last value from Python: keep typed text, also while an error about it is shown
    const onchange = () => (input.value.trim() || told) && set(input.value.trim());
    input = make("input", { id, type: "text", placeholder: described.hint, autocomplete: "off", onchange });
    update = (value, message) => {
      if (value !== told || (!message && !input.matches(":focus"))) input.value = told = value;
    };
  } else {
    let told; // as above
    const onchange = () => input.value !== "" && set(Number(input.value));
    input = make("input", { id, type: "number", min: 0, max: described.high, step: 1, onchange });
    update = (value) => {
      if (value !== told || !input.matches(":focus")) input.value = told = value;
    };
  }
  input.disabled = described.disabled;
  const node = make("div", { class: `control ${kind}`, "data-control": name, hidden: described.hidden }, make("label", { for: id }, label), input);
  if (output) node.append(output);
  update(described.value);
  return { node, update, fixed: { ...described, value: null } };
}
