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

// Questions in a row, and in a second row a line about the current one and its views.
function questions(described, send) {
  const { name, label, options, groups } = described;
  const rest = [...options];
  const set = (value) => {
    update(value);
    send({ set: { [name]: value } });
  };
  const parts = groups.map(([question, count, line]) => {
    const own = rest.splice(0, count);
    const values = own.map(([, value]) => value);
    const part = { values, last: values[0] };
    part.tab = make("button", { type: "button", class: "tab", onclick: () => set(part.last) }, question);
    part.buttons = count > 4 ? [] : own.map(([text, value]) => make("button", { type: "button", class: "button", "data-view": value, onclick: () => set(value) }, text));
    part.menu = make("select", { "aria-label": question, hidden: count <= 4, onchange: () => set(values[part.menu.selectedIndex]) });
    if (count > 4) part.menu.append(...own.map(([text, value]) => make("option", { "data-view": value }, text)));
    const views = make("div", { class: "modes", role: "group", "aria-label": question, hidden: count === 1 }, ...part.buttons, part.menu);
    part.row = make("div", { class: "asked" }, make("p", { class: "line" }, line), views);
    return part;
  });
  const tabs = make("div", { class: "tabs", role: "group", "aria-label": label }, ...parts.map(({ tab }) => tab));
  const update = (value) => {
    for (const part of parts) {
      const at = part.values.indexOf(value);
      if (at >= 0) part.last = value;
      part.tab.setAttribute("aria-pressed", String(at >= 0));
      part.row.hidden = at < 0;
      part.menu.selectedIndex = at;
      part.buttons.forEach((button, k) => button.setAttribute("aria-pressed", String(k === at)));
    }
  };
  update(described.value);
  const node = make("div", { class: "questions", role: "group", "data-control": name, "aria-label": label, hidden: described.hidden }, tabs, ...parts.map(({ row }) => row));
  return { node, update, fixed: { ...described, value: null } };
}

function control(described, send) {
  if (described.kind === "questions") return questions(described, send);
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
