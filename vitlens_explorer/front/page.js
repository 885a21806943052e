import { syncAddress } from "./address.js";
import { makeChallenge } from "./challenge.js";
import {
  makeBars,
  makeContributions,
  makeCurves,
  makeLayerBars,
  makeMosaic,
  makeNames,
} from "./charts.js";
import { makeControl, makePlace } from "./controls.js";
import {
  ALONE,
  PACE,
  PART,
  download,
  make,
  makeButton,
  makeSmallButton,
  makeUploader,
  nextNumber,
  putImage,
  renew,
} from "./elements.js";
import { holdsModel, makeCompanion, makeOpener, readDrop } from "./models.js";
import { makePanel, makeSix, paintMap, readPixels } from "./pictures.js";
import { watchKernel } from "./source.js";
import { makeGuide } from "./tour.js";
import { bytesOf, isEqual } from "./values.js";

const SLOW = 1000; // milliseconds until a page shows progress, and dims a map that is no longer the chosen one
const SOON = 150; // milliseconds until a page is marked as computing
const MEGABYTE = 2 ** 20;
const UNREAD = "This browser could not read the folder. Choose its files with Open a model.";

const formatMegabytes = (bytes) => (bytes / MEGABYTE).toFixed(1);
const formatForwards = (count) => `${count.toLocaleString("en")} forward${count === 1 ? "" : "s"}`;

function formatSeconds(seconds) {
  return seconds < 90 ? `${Math.ceil(seconds)} s` : `${Math.round(seconds / 60)} minutes`;
}

// [text, share] of what takes long, from the message {progress}.
function describeProgress({ what, share, done, of, left }) {
  if (!done) return [`${what} …`, share];
  const count = of ? `${done.toLocaleString("en")} of ${formatForwards(of)}` : formatForwards(done);
  const rest = left ? `, about ${formatSeconds(left)} left` : "";
  return [`${what}: ${count}${rest}`, of && done / of];
}

// A function that sends messages of a drag over the image or along a slider: of those within PACE, the last one.
function makePaced(send) {
  let timer = null;
  let next = null;
  const sendNext = () => {
    const content = next;
    timer = null;
    next = null;
    if (content) sendPaced(content);
  };
  const sendPaced = (content) => {
    if (timer) {
      next = content;
      return;
    }
    send(content);
    timer = setTimeout(sendNext, PACE);
  };
  return sendPaced;
}

// Puts the nodes of described parts in a parent, in their order. Those that do not stay are made anew, with the focus.
// known: the parts by name, {node, described, …}.
function keepParts(known, parent, described, makePart, stays) {
  for (const each of described) {
    const old = known.get(each.name);
    if (old && stays(old.described, each)) continue;
    const next = { ...makePart(each), described: each };
    known.set(each.name, next);
    if (!old) continue;
    const focused = old.node.matches(":focus-within");
    old.node.replaceWith(next.node);
    if (focused) next.node.querySelector("input, select")?.focus();
  }
  const names = described.map(({ name }) => name);
  for (const name of [...known.keys()]) {
    if (names.includes(name)) continue;
    known.get(name).node.remove();
    known.delete(name);
  }
  const nodes = names.map((name) => known.get(name).node);
  const ordered = nodes.every((node, i) => parent.children[i] === node);
  if (!ordered) parent.replaceChildren(...nodes);
}

const stayWithOtherValue = (old, next) =>
  isEqual({ ...old, value: null }, { ...next, value: null });

// Writes a sentence before those of the footer, about a model that was opened in this page.
function writeFooter(sentence) {
  const footer = document.querySelector("footer");
  const node = footer?.querySelector(".opened");
  if (node) node.textContent = sentence;
  else if (sentence) footer?.prepend(make("b", { class: "opened" }, sentence));
}

export function render({ model, el }) {
  const knownPanels = new Map(); // by name
  const places = new Map(); // of controls, by name
  const uploads = new Set(); // names of the photos that were uploaded
  const aim = { at: null }; // chosen bar of the contributions without an answer yet
  let sent = 0; // number of the last message
  let since = 0; // time of the first message without an answer
  let saving = 0; // number of the last message that asked for a file
  let drawings = 0;
  let coming = null; // current upload
  let long = null; // progress of a map, score or page
  let complaint = ""; // message of this page, such as of a file that was not sent
  let hushed = {}; // the frame whose message was closed
  let gone = ""; // the alert while there is no kernel
  let timer; // of the next notification

  // ---------------------------------------------------------------- messages

  const isWaiting = () => sent > model.get("frame").answers;
  const setSent = (value) => {
    sent = value;
    root.dataset.sent = sent;
  };
  const send = (content, buffers = [], kept = "") => {
    if (!isWaiting()) since = performance.now();
    setSent(nextNumber());
    complaint = kept;
    setTimeout(() => {
      if (isWaiting()) notify();
    }, SOON);
    model.send({ ...content, number: sent }, undefined, buffers);
  };
  const drag = makePaced(send);

  // [text, share] of what takes long. Empty if nothing does.
  const describeWork = () => {
    if (gone) return [];
    if (coming?.received) {
      const { received, size } = coming;
      const count = `${formatMegabytes(received)} of ${formatMegabytes(size)} MB`;
      return [`Uploading: ${count}`, received / size];
    }
    if (long) return describeProgress(long);
    const taken = isWaiting() ? performance.now() - since : 0;
    return taken < SLOW ? [] : [`Computing: ${formatSeconds(taken / 1000)}`];
  };
  const describeProblem = () => {
    if (gone) return gone;
    const { answers, message } = model.get("frame");
    const isHushed = answers === hushed.answers && message === hushed.message;
    const parts = [complaint, isHushed ? "" : message];
    return parts.filter(Boolean).join(" ");
  };
  // Shows the alert, and what takes long.
  const notify = () => {
    const problem = describeProblem();
    if (problem !== alert.textContent) alert.textContent = problem;
    warning.hidden = !problem;
    close.hidden = Boolean(gone);
    const [text, share] = describeWork();
    const isComputing = !gone && (isWaiting() || coming || long);
    busy.textContent = isComputing ? "Computing …" : "";
    progress.hidden = !text;
    root.classList.toggle("stale", isWaiting() && performance.now() - since >= SLOW);
    clearTimeout(timer);
    if (isWaiting() && !gone) timer = setTimeout(notify, SLOW);
    amount.textContent = text;
    if (share) meter.value = share;
    else meter.removeAttribute("value");
  };
  // Shows a problem in place of the current upload.
  const complain = (problem) => {
    coming = null;
    complaint = problem;
    notify();
  };
  const hush = () => {
    complaint = "";
    hushed = model.get("frame");
    notify();
  };
  const cancel = () => {
    if (coming) complain("");
    else send({ cancel: true });
  };
  const requestFile = (name) => {
    send({ press: name });
    saving = sent;
  };

  // ---------------------------------------------------------------- photos

  // Sends a part of an upload. Returns {received, problem}, or null if a new file has replaced this one.
  const sendPart = async (upload, chosen) => {
    const at = upload.received;
    const end = model.near ? chosen.size : at + PART;
    let data;
    try {
      data = await chosen.slice(at, end).arrayBuffer();
    } catch (error) {
      if (coming !== upload) return null;
      return { problem: `${chosen.name} could not be read by this browser (${error.message}).` };
    }
    if (coming !== upload) return null;
    const content = { upload: chosen.name, file: upload.id, at, of: chosen.size };
    const confirmed = new Promise((done) => {
      upload.confirm = done;
    });
    if (end < chosen.size) model.send(content, undefined, [data]);
    else send(content, [data], complaint);
    const answer = await confirmed;
    if (coming !== upload) return null;
    if (answer.problem) setSent(model.get("frame").answers); // the last message will not be answered
    return answer;
  };
  // Sends a file, to Python in parts, each after the last was confirmed. A new file replaces it.
  const sendFile = async (chosen) => {
    const upload = { id: nextNumber(), received: 0, size: chosen.size };
    coming = upload;
    const most = model.get("frame").uploads;
    if (chosen.size > most) {
      const limit = `is larger than ${most / MEGABYTE} MB, the upload limit. Make it smaller`;
      complain(`${chosen.name} (${formatMegabytes(chosen.size)} MB) ${limit}.`);
      return;
    }
    uploads.add(chosen.name);
    do {
      notify();
      const answer = await sendPart(upload, chosen);
      if (!answer) return;
      if (answer.problem) {
        complain(answer.problem);
        return;
      }
      upload.received = answer.received;
    } while (upload.received < upload.size);
    coming = null;
    notify();
  };
  // Photos that were dropped, pasted or chosen: the first one is uploaded.
  const takeFiles = ({ files }, missing) => {
    const [first] = files;
    hush();
    if (files.length > 1) {
      complaint = `${files.length} files were given. The first one, ${first.name}, is used.`;
    }
    if (!first) complain(missing);
    else if (ALONE && /hei[cf]$/i.test(first.type || first.name)) {
      complain("HEIC photos cannot be opened here. Export it as JPEG.");
    } else sendFile(first);
  };
  // Opens the files of a model.
  const takeModel = ({ files, folder }) => {
    hush();
    send({ open: folder }, files);
  };
  const takeCompanion = ({ files, folder }) => {
    hush();
    send({ open: folder, beside: true }, files);
  };
  // Opens a model that was dropped, or uploads a photo.
  const takeDrop = (source) => {
    if (model.get("frame").opens && holdsModel(source)) {
      readDrop(source).then(takeModel, () => complain(UNREAD));
    } else takeFiles(source, "A link or a text was dropped. Drop the file of a photo.");
  };
  const takePhoto = (source) => takeFiles(source, "");
  // True for a drop or pasted photo that this page takes. It then does not reach others.
  const accept = (event) => {
    const most = model.get("frame").uploads;
    if (gone || !(ALONE || most)) return false;
    event.preventDefault(); // also where the browser would leave the page for the photo
    if (event.type !== "dragover") event.stopPropagation();
    if (!most && event.type !== "dragover") {
      complain("A saved page takes no other photos. Use vitlens app.");
    }
    return most > 0;
  };
  const handlers = {
    dragover(event) {
      if (!accept(event)) return;
      root.classList.toggle("dropping", event.dataTransfer.types.includes("Files"));
    },
    dragleave({ relatedTarget }) {
      const inside = Boolean(relatedTarget && surroundings.contains(relatedTarget));
      root.classList.toggle("dropping", inside);
    },
    drop(event) {
      root.classList.remove("dropping");
      if (!accept(event)) return;
      takeDrop(event.dataTransfer);
    },
    paste(event) {
      const isField = event.target.matches?.("input, select, textarea");
      if (isField && !event.clipboardData.files.length) return; // pasted text
      if (!accept(event)) return;
      takeFiles(event.clipboardData, "The clipboard has no photo. Copy one, and paste it again.");
    },
  };

  // ---------------------------------------------------------------- nodes

  const part = (kind, ...nodes) => make("div", { class: kind }, ...nodes);
  const makeSection = (kind, attributes) =>
    make("section", { class: `dots ${kind}`, ...attributes });
  const alert = make("p", { class: "alert", role: "alert" });
  const close = makeSmallButton("Close", hush);
  const reload = makeSmallButton("Reload", () => location.reload(), { hidden: true });
  const warning = part("notice", alert, reload, close);
  const amount = make("span", { "aria-hidden": "true" });
  const meter = make("progress", { "aria-label": "Progress" });
  const progress = part("notice progress", amount, meter, makeSmallButton("Cancel", cancel));

  const headline = make("h1", { class: "headline" });
  const lead = make("p", { class: "lead" });
  const heading = make("p", { class: "heading" });
  const busy = make("span", { class: "busy", role: "status" });
  const ways = make("span", {}, ", drop, or paste");
  const uploader = makeUploader(takePhoto, "Upload", ways, " a photo");
  const saver = makeButton("Save", () => requestFile("save"), {
    title: "A zip file with the map, its numbers and the settings",
  });
  const pager = makeButton("Save page", () => requestFile("page"), {
    title: "One file that opens in a browser, without Python",
  });
  const opener = makeOpener(takeModel);
  const companion = makeCompanion(takeCompanion, {
    twin: () => {
      hush();
      send({ press: "twin" });
    },
    close: () => send({ press: "alone" }),
  });
  const tools = part("tools");

  const panels = part("panels");
  const top = part("top");
  const folds = part("folds");
  const controls = make("form", {
    class: "controls",
    "aria-label": ALONE && "Controls", // forms with a name are landmarks, which a page has once
    onsubmit: (event) => event.preventDefault(),
  });
  const about = make("p", { class: "note about", "aria-live": "polite" });
  const bars = make("ol", { class: "bars", "aria-label": "Most likely classes" });
  const doubt = make("p", { class: "note doubt" });
  const known = makeNames(model, send);
  const contributions = makeSection("parts");
  const lens = makeSection("lens");
  const score = makeSection("score", { "aria-live": "polite" });
  const mosaic = makeMosaic(drag);
  const glimpse = make("canvas", { class: "glimpse", "aria-hidden": "true" }); // of the map, on a phone
  const heads = make("section", { class: "heads" }, glimpse, mosaic.node);
  const six = makeSix(send);
  const findMap = () => panels.querySelector(".picture canvas");
  const findPhoto = () => model.get("frame").controls.find(({ name }) => name === "photograph");
  const challenge = makeChallenge(model, findMap, () => uploads.has(findPhoto()?.value));
  const charts = part("charts", heads, challenge.node, six.node, contributions, lens, score);
  const side = part(
    "side",
    part("choices", bars, doubt, known.node, controls, folds, about),
    charts,
  );
  const body = part("body", panels, side);
  const header = part("header", heading, tools);
  const intro = ALONE ? [part("intro", headline, lead)] : [];
  const root = part("vitlens", ...intro, header, part("notices", warning, progress), top, body);

  const surroundings = ALONE ? document : root;
  const guide = makeGuide({ model, root, send, isWaiting, takePhoto, panels: knownPanels });
  tools.append(uploader, opener, companion.node, saver, pager, guide.tourButton, busy);
  root.addEventListener("keydown", (event) => event.stopPropagation()); // avoid shortcuts of the notebook

  // ---------------------------------------------------------------- drawing

  const drawControls = (frame) => {
    const names = new Set([...places.keys(), ...frame.controls.map((each) => each.place)]);
    const parents = { controls, top, folds, heads, panels: knownPanels };
    const makeOne = (each) => makeControl(each, each.kind === "range" ? drag : send);
    for (const name of names) {
      if (!places.has(name)) places.set(name, makePlace(name, parents));
      const { known, parent, show } = places.get(name);
      const here = frame.controls.filter((each) => each.place === name && each.kind !== "switches");
      keepParts(known, parent, here, makeOne, stayWithOtherValue);
      // While an answer is outstanding, keep the controls as the user set them.
      if (!isWaiting()) {
        for (const each of here) known.get(each.name).update(each.value, frame.message);
      }
      show(here.some(({ hidden }) => !hidden));
    }
  };
  const drawCharts = (frame, pictures) => {
    const reveal = (...values) => knownPanels.get(frame.panels[0].name).reveal(...values);
    const makeScore = (each) => makeCurves(each, frame.panels[0], pictures.picture, reveal, send);
    if (!isWaiting()) aim.at = null;
    renew(bars, frame.bars?.length ? frame.bars : null, (each) => makeBars(each, send));
    doubt.textContent = frame.doubt || "";
    doubt.hidden = !frame.doubt;
    known.update(frame.knows, frame.models);
    renew(contributions, frame.parts, (each) => makeContributions(each, send, aim));
    renew(lens, frame.lens, (each) => makeLayerBars(each, send));
    renew(score, frame.score, makeScore);
    mosaic.update(frame.mosaic, isWaiting);
    challenge.update(frame.challenge);
    six.update(frame.six, pictures);
  };
  const drawTools = (frame) => {
    const limit = frame.uploads / MEGABYTE;
    uploader.hidden = !frame.uploads;
    uploader.title = frame.uploads ? `Up to ${limit} MB, uploaded unchanged` : "";
    opener.hidden = !frame.opens;
    companion.update(frame);
    saver.hidden = !frame.saves;
    pager.hidden = !frame.pages;
  };
  const drawHeading = (frame) => {
    const photo = frame.controls.find(({ name }) => name === "photograph")?.value;
    const names = [photo, frame.model].filter(Boolean);
    heading.hidden = !frame.model;
    heading.textContent = names.join(" · ");
    headline.textContent = frame.headline || "";
    lead.textContent = frame.lead || "";
    if (!ALONE) return;
    document.title = [...names, "vitlens"].join(" · ");
    writeFooter(frame.opened || "");
  };
  const draw = async () => {
    drawings += 1;
    const own = drawings;
    const frame = model.get("frame");
    const pictures = model.get("pictures");
    const makeOne = ({ name }) => makePanel(name, drag);
    keepParts(knownPanels, panels, frame.panels, makeOne, () => true);
    drawControls(frame);
    body.classList.toggle("several", frame.panels.length > 1);
    drawCharts(frame, pictures);
    drawTools(frame);
    const updates = frame.panels.map((panel) =>
      knownPanels.get(panel.name).update(panel, pictures, isWaiting),
    );
    await Promise.all(updates);
    const { small } = await readPixels(pictures[frame.panels[0].picture]);
    if (own !== drawings) return; // a later frame was faster
    notify();
    putImage(glimpse, paintMap(small, frame.panels[0]));
    drawHeading(frame);
    address?.afterDrawing();
    about.textContent = frame.about || "";
    guide.afterDrawing();
    root.dataset.answers = frame.answers;
    root.dataset.sent = sent;
  };

  // ---------------------------------------------------------------- the model

  const receive = (content, buffers) => {
    if (content.ask === "names") known.receive(content.answer);
    else if (content.ask) guide.receive(content, buffers);
    else if (content.file && content.file === coming?.id) coming.confirm(content);
    else if ("progress" in content) {
      long = content.progress;
      notify();
    }
    if (content.download && content.asked === saving) {
      download(content.download[0], bytesOf(buffers[0]));
    }
  };
  const stopWatching = watchKernel(model, (sentence, reloads) => {
    gone = sentence;
    body.inert = Boolean(gone);
    reload.hidden = !(ALONE && gone && reloads);
    notify();
  });
  for (const [event, handler] of Object.entries(handlers)) {
    surroundings.addEventListener(event, handler);
  }
  model.on("change:frame", draw);
  model.on("msg:custom", receive);
  el.append(root);
  notify();
  const parts = { model, uploads, send, isWaiting, notice: complain };
  const address = ALONE ? syncAddress(parts) : null;
  draw();
  return () => {
    stopWatching();
    address?.stop();
    clearTimeout(timer);
    for (const [event, handler] of Object.entries(handlers)) {
      surroundings.removeEventListener(event, handler);
    }
    guide.stop();
    model.off("change:frame", draw);
    model.off("msg:custom", receive);
  };
}
