// A saved page, which `in_page` wrote with all that its views show.

import { namesOf, sharesOf } from "./numbers.js";
import { openPage } from "./opening.js";

// The page of PageSource, from the records of a file.
function readRecords(stored) {
  const records = new Map();
  for (const record of stored.records) {
    const shares = sharesOf(record.logits, record.outputs);
    records.set(record.name, { ...record, shares, ...namesOf(stored) });
  }
  return { ...stored, records };
}

openPage(readRecords);
