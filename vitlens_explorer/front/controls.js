// Where controls stand: in the form, above the panels, under the mosaic or a panel, or in a closed group of that name.
function placeOf(place, { controls, top, folds, heads, panels }) {
  const known = new Map();
  if (!place || place === "top") return { known, parent: place ? top : controls, show: () => {} };
  const parent = make("div", { class: "controls", role: "group", "aria-label": place });
  const above = place === "heads" ? heads : panels.get(place)?.node;
  const fold =
    above ||
    make("details", { class: "fold", "data-fold": place }, make("summary", {}, place), parent);
  const around = above ? parent : fold;
  (above || folds).append(around);
  return { known, parent, show: (some) => (around.hidden = !some) };
}

// Questions in a row, and in a second row a line about the current one and its views.
function questions({ name, label, options, groups, hidden, value: first }, send) {
  const rest = [...options];
  const set = (value) => {
    update(value);
    send({ set: { [name]: value } });
  };
  const group = (kind, label, more, ...nodes) =>
    make("div", { class: kind, role: "group", "aria-label": label, ...more }, ...nodes);
  const parts = groups.map(([question, count, line]) => {
    const own = rest.splice(0, count);
    const values = own.map(([, value]) => value);
    const part = { values, last: values[0] };
    part.tab = button(question, () => set(part.last), { class: "tab" });
    const many = count > 4; // a menu in place of buttons
    const item = ([text, value]) =>
      many
        ? make("option", { "data-view": value }, text)
        : button(text, () => set(value), { "data-view": value });
    part.items = own.map(item);
    const onchange = () => set(values[part.menu.selectedIndex]);
    part.menu = many && make("select", { "aria-label": question, onchange }, ...part.items);
    const views = group(
      "modes",
      question,
      { hidden: count === 1 },
      ...(many ? [part.menu] : part.items),
    );
    part.row = make("div", { class: "asked" }, make("p", { class: "line" }, line), views);
    return part;
  });
  const update = (value) => {
    for (const part of parts) {
      const at = part.values.indexOf(value);
      if (at >= 0) part.last = value;
      press(part.tab, at >= 0);
      part.row.hidden = at < 0;
      if (part.menu) part.menu.selectedIndex = at;
      else part.items.forEach((item, k) => press(item, k === at));
    }
  };
  update(first);
  const tabs = group("tabs", label, {}, ...parts.map(({ tab }) => tab));
  const node = group(
    "questions",
    label,
    { "data-control": name, hidden },
    tabs,
    ...parts.map(({ row }) => row),
  );
  return { node, update };
}

// A control of controls.py: {node, update(value, message)}.
function control(described, send) {
  if (described.kind === "questions") return questions(described, send);
  const {
    name,
    label,
    kind,
    options,
    groups,
    high,
    step,
    hint,
    disabled,
    hidden,
    value: first,
  } = described;
  const id = `vitlens-${(number += 1)}`;
  const set = (value) => send({ set: { [name]: value } });
  const indexOf = (value) => options.findIndex((option) => same(option[1], value));
  const field = (tag, attributes, ...children) =>
    make(tag, { id, disabled, ...attributes }, ...children);
  const output = kind === "range" && make("output", { for: id });
  let input, update;
  if (kind === "select") {
    const choices = options.map(([text]) => make("option", {}, text));
    const grouped = groups.map(([label, count]) =>
      make("optgroup", { label }, ...choices.splice(0, count)),
    );
    input = field(
      "select",
      { onchange: () => set(options[input.selectedIndex][1]) },
      ...grouped,
      ...choices,
    );
    update = (value) => (input.selectedIndex = indexOf(value));
  } else if (kind === "check") {
    input = field("input", { type: "checkbox", onchange: () => set(input.checked) });
    update = (value) => (input.checked = value);
  } else if (kind === "range") {
    const chosen = () => options[input.value] ?? [input.value, Number(input.value)]; // its text and value
    const say = () => {
      output.textContent = chosen()[0];
      input.setAttribute("aria-valuetext", chosen()[0]);
    };
    const oninput = () => {
      say();
      set(chosen()[1]);
    };
    const ends = options.length ? { max: options.length - 1 } : { max: high, step };
    input = field("input", { type: "range", min: 0, ...ends, oninput });
    update = (value) => {
      input.value = options.length ? Math.max(0, indexOf(value)) : value;
      say();
    };
  } else {
    let told; // last value from Python: keep typed text, also while an error about it is shown
    const onchange = () => (input.value.trim() || told) && set(input.value.trim());
    input = field("input", { type: "text", placeholder: hint, autocomplete: "off", onchange });
    update = (value, message) => {
      if (value !== told || (!message && !input.matches(":focus"))) input.value = told = value;
    };
  }
  const around = { class: `control ${kind}`, "data-control": name, hidden };
  const node = make("div", around, make("label", { for: id }, label), input, output || "");
  update(first);
  return { node, update };
}
