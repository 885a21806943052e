// Opens the page of a file that in_page wrote, in the element #page.

// Functions of a class's number: its short name, and its whole one.
function namesOf({ labels, names }) {
  return { label: (k) => labels?.[k] ?? String(k), full: (k) => names?.[k] ?? String(k) };
}

// A value of a file, with float32 in place of encoded numbers.
const decodePart = (each) => (each?.data instanceof DataView ? decodeFloats(each) : each);

// The page of PageSource, from the records of a file.
function readRecords(stored) {
  const records = new Map();
  for (const record of stored.records) {
    const shares = sharesOf(record.logits, record.outputs);
    records.set(record.name, { ...record, shares, ...namesOf(stored) });
  }
  return { ...stored, records };
}

// The page of PageSource. A live page makes its records from the weights that it holds (live/page.js), a blank page
// from those that a person opens (live/blank.js), and a copy of a page from the files in it (live/kept.js).
function preparePage(stored, element) {
  if (!stored.worker) return readRecords(stored);
  keepFirst(stored);
  if (stored.files) return openKept(stored, element);
  return stored.weights ? openLive(stored) : openBlank(stored, element);
}

// Draws the page.
async function openPage() {
  const stored = await readContent(document.getElementById("data"), decodePart);
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
