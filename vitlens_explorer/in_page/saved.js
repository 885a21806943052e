// Opens the page of a file that in_page wrote, in the element #page.

// Functions of a class's number: its short name, and its whole one.
function namesOf({ labels, names }) {
  return { label: (k) => labels?.[k] ?? String(k), full: (k) => names?.[k] ?? String(k) };
}

// The content that a file stores in an element, as `packed` in front/__init__.py.
async function readContent(element) {
  const bytes = Uint8Array.from(atob(element.textContent), (letter) => letter.charCodeAt(0));
  element.remove();
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const revive = (each) => (each?.data instanceof DataView ? decodeFloats(each) : each);
  const [, content] = unpack(await new Response(stream).arrayBuffer(), revive);
  return content;
}

// The page of PageSource, from the records of a file.
function readRecords(stored) {
  const records = new Map();
  for (const record of stored.records) {
    const shares = sharesOf(record.logits, record.outputs);
    records.set(record.name, { ...record, shares, ...namesOf(stored) });
  }
  return { ...stored, records };
}

// The page of PageSource. A live page makes its records from the weights that it holds (live/page.js), and a blank page
// from those that a person opens (live/blank.js).
function preparePage(stored, element) {
  if (stored.weights) return openLive(stored);
  return stored.worker ? openBlank(stored, element) : readRecords(stored);
}

// Draws the page.
async function openPage() {
  const stored = await readContent(document.getElementById("data"));
  const page = document.getElementById("page");
  const source = new PageSource(await preparePage(stored, page));
  page.replaceChildren();
  page.source = source; // for scripts that drive the page
  render({ model: source, el: page });
}

openPage().catch(({ message }) => {
  document.getElementById("page").textContent =
    `This page could not be opened: ${message}. It needs a newer browser.`;
});
