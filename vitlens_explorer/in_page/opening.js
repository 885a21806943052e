// Opens the page of a file that Python wrote, in the element #page.

import { render } from "../front/page.js";
import { readContent } from "../front/source.js";
import { decodeFloats, namesOf, sharesOf } from "./numbers.js";
import { PageSource } from "./source.js";

// A value of a file, with float32 in place of encoded numbers.
const decodePart = (each) => (each?.data instanceof DataView ? decodeFloats(each) : each);

// The page of PageSource, from the records of a file.
export function readRecords(stored) {
  const records = new Map();
  for (const record of stored.records) {
    const shares = sharesOf(record.logits, record.outputs);
    records.set(record.name, { ...record, shares, ...namesOf(stored) });
  }
  return { ...stored, records };
}

async function drawPage(prepare) {
  const stored = await readContent(document.getElementById("data"), decodePart);
  const page = document.getElementById("page");
  const source = new PageSource(await prepare(stored, page));
  page.replaceChildren();
  page.source = source; // for scripts that drive the page
  render({ model: source, el: page });
}

// Draws the page. prepare(stored, element): the page of PageSource from the content of the file.
export function openPage(prepare) {
  drawPage(prepare).catch(({ message }) => {
    document.getElementById("page").textContent =
      `This page could not be opened: ${message}. It needs a newer browser.`;
  });
}
