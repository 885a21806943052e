// The state in the address of a page: #view=rollout&layer=8&head=mean&patch=5,7&off=0.2&sample=coffee

const valuesOf = (frame) =>
  Object.fromEntries(frame.controls.map(({ name, value }) => [name, value]));
const RARE = ["way", "target", "against"]; // in the address only where they differ from the first frame

// first: the values of the first frame. uploads: names of photos that are not in the address.
function addressOf(frame, first, uploads) {
  const values = valuesOf(frame);
  const { query, row, column, off = [], photograph } = values;
  const used = (name) =>
    frame.controls.some((each) => each.name === name && !each.hidden && !each.disabled);
  const given = {};
  for (const name of ["view", "layer", "head"].filter(used)) given[name] = values[name];
  if (used("query")) Object.assign(given, query === "patch" ? { patch: [row, column] } : { query });
  if (off.length) given.off = off.map((place) => place.join("."));
  for (const name of RARE.filter(used))
    if (!same(values[name], first[name])) given[name] = [values[name]].flat().join(":");
  if (photograph !== first.photograph && !uploads.has(photograph)) given.sample = photograph;
  return `#${new URLSearchParams(given)}`
    .replaceAll("%2C", ",")
    .replaceAll("%3A", ":")
    .replaceAll("+", "%20");
}

// The values that an address sets, in an order that Page.change takes.
function valuesIn(address, first) {
  const given = new URLSearchParams(address.slice(1));
  const one = (text) => (/^\d+$/.test(text) ? Number(text) : text);
  const read = (text) => text.match(/^(\w+):(.+)$/s)?.slice(1) || one(text); // a kind and its value, or a value
  const values = { photograph: given.get("sample") ?? first.photograph };
  for (const name of ["view", "layer", "head", "query", "row", "column", "off", ...RARE])
    values[name] = given.has(name) ? read(given.get(name)) : first[name];
  if (!given.has("head")) delete values.head; // each view has its own
  const patch = given.get("patch")?.split(",").map(one);
  if (patch) [values.query, values.row, values.column] = ["patch", ...patch];
  values.off = given.get("off")
    ? given
        .get("off")
        .split(",")
        .map((place) => place.split(".").map(one))
    : [];
  for (const name of Object.keys(values)) if (!(name in first)) delete values[name];
  return values;
}

// Keeps the address of the page and the state of the source equal. Returns the function to call after a drawing.
function addressed(model, uploads, send, notice) {
  const first = valuesOf(model.get("frame"));
  let how = "replaceState"; // for the first address, and after a state that came from an address
  let timer;
  const restore = (state) => {
    how = "replaceState";
    const values = valuesIn(location.hash, first);
    const lost = state?.upload && !uploads.has(state.upload);
    if (state?.upload && !lost) values.photograph = state.upload;
    send({ set: values });
    if (lost)
      notice(
        `“${state.upload}” was uploaded and is not in the address of this page. Upload it again.`,
      );
  };
  const onpopstate = ({ state }) => restore(state);
  window.addEventListener("popstate", onpopstate);
  if (location.hash.length > 1 || history.state?.upload) restore(history.state);
  const write = () => {
    const frame = model.get("frame");
    const { photograph } = valuesOf(frame);
    const [address, upload] = [
      addressOf(frame, first, uploads),
      uploads.has(photograph) ? photograph : "",
    ];
    if (address !== location.hash || upload !== (history.state?.upload || ""))
      history[how]({ upload }, "", address);
    how = "pushState";
  };
  return {
    drawn() {
      clearTimeout(timer);
      timer = setTimeout(write, 300); // a drag is one entry of the history
    },
    stop: () => window.removeEventListener("popstate", onpopstate),
  };
}
