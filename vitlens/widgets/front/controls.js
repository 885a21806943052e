// Where controls stand: in the form, above the panels, under a panel, or in a closed group with the name of the place.
function placeOf(place, { controls, top, folds, panels }) {
  const known = new Map();
  if (!place) return { known, parent: controls, show: () => {} };
  if (place === "top") return { known, parent: top, show: () => {} };
  const parent = make("div", { class: "controls", role: "group", "aria-label": place });
  const around = panels.has(place) ? parent : make("details", { class: "fold", "data-fold": place }, make("summary", {}, place), parent);
  (panels.get(place)?.node || folds).append(around);
  return { known, parent, show: (some) => (around.hidden = !some) };
}

function control(described, send) {
  if (described.kind === "switches") return switches(described, send);
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

// Switches with a column for each layer and a row for each head. Arrow keys move the focus.
function switches(described, send) {
  const { name, label, options } = described;
  const columns = [...new Set(options.map(([, [layer]]) => layer))];
  const rows = 1 + Math.max(...options.map(([, [, head]]) => head));
  let off = [];
  const count = make("span");
  const summary = make("summary", {}, label, count);
  const cells = new Map();
  const tell = () => {
    count.textContent = off.length ? ` (${off.length} off)` : "";
    none.hidden = !off.length;
    for (const [text, place] of options) {
      const on = !off.some((each) => same(each, place));
      const cell = cells.get(String(place));
      cell.setAttribute("aria-checked", String(on));
      cell.title = `${text} is ${on ? "on" : "off"}. Click to switch it ${on ? "off" : "on"}.`;
    }
  };
  const set = (next) => {
    off = next;
    tell();
    send({ set: { [name]: off } });
  };
  const turn = (places) => {
    const left = off.filter((each) => !places.some((place) => same(each, place)));
    set(off.length - left.length === places.length ? left : [...left, ...places]);
  };
  const onkeydown = (event) => {
    const step = { ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] }[event.key];
    if (!step || event.target.dataset.at === undefined) return;
    event.preventDefault();
    const [column, row] = event.target.dataset.at.split(" ").map(Number);
    const next = cells.get(`${columns[column + step[0]]},${row + step[1]}`);
    if (!next) return;
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  };
  const style = `--columns: ${columns.length}`;
  const grid = make("div", { class: "switches", role: "group", "aria-label": `${label}: heads by layer`, style, onkeydown });
  for (let row = 0; row < rows; row += 1) {
    grid.append(make("span", { class: "of" }, row));
    columns.forEach((layer, column) => {
      const option = options.find(([, place]) => same(place, [layer, row]));
      if (!option) return grid.append(make("span"));
      const turned = { class: "switch", type: "button", role: "switch", "aria-label": option[0], "data-at": `${column} ${row}` };
      const cell = make("button", { ...turned, onclick: () => turn([option[1]]) });
      cell.tabIndex = column || row ? -1 : 0;
      cells.set(String(option[1]), cell);
      grid.append(cell);
    });
  }
  grid.append(make("span", { class: "of" }, "all"));
  for (const layer of columns) {
    const places = options.map(([, place]) => place).filter((place) => place[0] === layer);
    const where = layer === "pool" ? "the pool" : `layer ${layer}`;
    const whole = { class: "whole", type: "button", title: `Switch all heads of ${where} off, or on again`, "aria-label": `All heads of ${where}` };
    grid.append(make("button", { ...whole, onclick: () => turn(places) }, layer === "pool" ? "p" : layer));
  }
  const none = make("button", { type: "button", class: "button small", onclick: () => set([]) }, "All on");
  const how = "Rows are heads, columns layers. Click a head to switch it off. Classes and maps then show the model without it.";
  const node = make("details", { class: "control heads", "data-control": name }, summary, make("p", { class: "note" }, how), grid, none);
  const update = (value) => {
    off = value;
    if (off.length && !node.seen) node.open = node.seen = true;
    tell();
  };
  update(described.value);
  return { node, update, fixed: { ...described, value: null } };
}
