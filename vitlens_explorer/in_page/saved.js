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

// The page of PageSource. A live page makes its records with a model (live/page.js): that of the files in it
// (live/kept.js), or in a blank page that of the files that a person opens (live/blank.js).
function preparePage(stored, element) {
  if (!stored.worker) return readRecords(stored);
  keepFirst(stored);
  return stored.files ? openKept(stored, element) : openBlank(stored, element);
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
