// A live page, which makes the records of its photos with a model: that of the files in it, or in a blank page that of
// the files that a person opens.

import { openPage, readRecords } from "../in_page/opening.js";
import { openBlank } from "./blank.js";
import { keepFirst } from "./kept.js";
import { startLive } from "./page.js";

// The page of PageSource for a file that contains the files of its model.
async function openKept(stored, element) {
  const live = await startLive(stored);
  const files = stored.files.map(({ name, bytes }) => new File([bytes], name));
  const { facts = null } = stored;
  const { layer, row, column, query } = stored.state;
  stored.files = null;
  const status = element.querySelector("[role=status]");
  const report = (text) => {
    status.textContent = `${text} …`;
  };
  await live.open(files, stored.folder, report, facts);
  stored.opened = ""; // this file contains the model
  await live.showFirst();
  stored.state = { ...stored.state, layer, row, column, query };
  if (location.hash.length < 2) history.replaceState(null, "", stored.address || "#");
  return stored;
}

function preparePage(stored, element) {
  if (stored.records) return readRecords(stored); // a page of a photo that a live page wrote
  keepFirst(stored);
  return stored.files ? openKept(stored, element) : openBlank(stored, element);
}

openPage(preparePage);
