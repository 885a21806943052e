// Opens the page of a file that in_page wrote, in the element #page.

// Functions of a class's number: its short name, and its whole one.
function namesOf({ labels, names }) {
  return { label: (k) => labels?.[k] ?? String(k), full: (k) => names?.[k] ?? String(k) };
}

// Draws the page. A live page makes its records from the weights that it holds (live/page.js).
async function opened() {
  const data = document.getElementById("data");
  const packed = Uint8Array.from(atob(data.textContent), (letter) => letter.charCodeAt(0));
  data.remove();
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const revive = (each) => (each?.data instanceof DataView ? floats(each) : each);
  const [, stored] = unpacked(await new Response(stream).arrayBuffer(), revive);
  const recordOf = (record) => ({
    ...record,
    shares: sharesOf(record.logits, record.outputs),
    ...namesOf(stored),
  });
  const records = () => new Map(stored.records.map((record) => [record.name, recordOf(record)]));
  const source = new PageSource(
    stored.weights ? await live(stored) : { ...stored, records: records() },
  );
  const page = document.getElementById("page");
  page.replaceChildren();
  page.source = source; // for scripts that drive the page
  render({ model: source, el: page });
}

opened().catch(({ message }) => {
  document.getElementById("page").textContent =
    `This page could not be opened: ${message}. It needs a newer browser.`;
});
