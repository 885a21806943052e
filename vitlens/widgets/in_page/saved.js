// Opens the page of a file that in_page wrote, in the element #page.

// The record of a photo, whose arrays become Float32Array when they are needed.
function recordOf(stored, labels) {
  const lazily = (object, names) => {
    const target = Array.isArray(object) ? [] : { ...object };
    names.forEach((name) => {
      let made;
      Object.defineProperty(target, name, { get: () => (made ||= floats(object[name])) });
    });
    return target;
  };
  const each = (values, change) => Object.fromEntries(Object.entries(values).map(([key, it]) => [key, change(it)]));
  return {
    ...stored, tokens: lazily(stored.tokens, stored.tokens.keys()),
    layers: stored.layers.map((layer) => (layer ? lazily(layer, ["q", "k"]) : undefined)),
    grid: { ...stored.grid, readout: stored.grid.readout && floats(stored.grid.readout) },
    shares: sharesOf(floats(stored.logits), stored.outputs), label: (k) => labels[k] ?? String(k),
    lens: stored.lens.map((lens) => lens && { ...lens, shares: floats(lens.shares), of: each(lens.of, floats) }),
    contributions: each(stored.contributions, (parts) => ({ ...parts, written: floats(parts.written) })),
    maps: each(stored.maps, (classes) => each(classes, (map) => ({ ...map, values: floats(map.values) }))),
  };
}

async function opened(id) {
  const element = document.getElementById(id);
  const packed = Uint8Array.from(atob(element.textContent), (letter) => letter.charCodeAt(0));
  element.remove();
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return unpacked(await new Response(stream).arrayBuffer())[1];
}

// A live page makes its records from the weights that it holds (live/page.js).
opened("data").then(async (stored) => {
  const records = () => new Map(stored.records.map((record) => [record.name, recordOf(record, stored.labels)]));
  const source = new PageSource(stored.weights ? await live(stored) : { ...stored, records: records() });
  const page = document.getElementById("page");
  page.replaceChildren();
  page.source = source; // for scripts that drive the page
  render({ model: source, el: page });
});
