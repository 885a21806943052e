// The page of a frame: its panels, controls and charts, and what a user does with them.

import { syncAddress } from "./address.js";
import { makeChallenge } from "./challenge.js";
import { makeBars, makeContributions, makeCurves, makeLayerBars, makeNames } from "./charts.js";
import { makeControl, makePlace } from "./controls.js";
import { ALONE, MEGABYTE, download, make, makeUploader, putImage, renew } from "./elements.js";
import { Guide } from "./guide.js";
import { Messages } from "./messages.js";
import { makeCompanion, makeOpener } from "./models.js";
import { Mosaic } from "./mosaic.js";
import { makePanel, makeSix, paintMap, readPixels } from "./pictures.js";
import { makeShare } from "./share.js";
import { watchKernel } from "./source.js";
import { Uploads } from "./uploads.js";
import { bytesOf, isEqual } from "./values.js";

const BARS_TITLE = "Most likely classes";

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

const OLD =
  "This browser lacks styles of this page, which may look wrong. Its numbers are right. Update the browser.";

const makePart = (kind, ...nodes) => make("div", { class: kind }, ...nodes);
const makeSection = (kind, attributes) => make("section", { class: `dots ${kind}`, ...attributes });

class Page {
  panels = new Map(); // parts by name
  places = new Map(); // of controls, by name
  aim = { at: null }; // chosen bar of the contributions without an answer yet
  saving = 0; // number of the last message that asked for a file
  drawings = 0; // number of drawings that have begun

  constructor(model) {
    this.model = model;
    this.root = makePart("vitlens");
    this.messages = new Messages(model, this.root);
    const surroundings = ALONE ? document : this.root;
    this.uploads = new Uploads(model, this.messages, this.root, surroundings);
    this.makeHeader();
    this.makeChoices();
    this.makeCharts();
    this.panelsNode = makePart("panels");
    this.top = makePart("top");
    this.body = makePart("body", this.panelsNode, makePart("side", this.choices, this.charts));
    const age = make("p", { class: "note age" }, OLD); // the styles hide it where they are supported
    this.root.append(age, ...this.intro, this.header, this.messages.node, this.top, this.body);
    this.root.addEventListener("keydown", (event) => event.stopPropagation()); // avoid shortcuts of the notebook
    this.guide = new Guide({
      model,
      root: this.root,
      messages: this.messages,
      takePhoto: this.uploads.takePhoto,
      panels: this.panels,
    });
    this.tools.append(this.guide.tourButton, this.messages.busy);
  }

  // Draws frames and takes files until `stop` is called.
  start() {
    const { model, messages } = this;
    this.stopWatching = watchKernel(model, (sentence, reloads) => {
      this.body.inert = Boolean(sentence);
      messages.loseKernel(sentence, ALONE && reloads);
    });
    this.uploads.start();
    model.on("change:frame", this.draw);
    model.on("msg:custom", this.receive);
    messages.notify();
    this.address = null;
    if (ALONE) {
      this.address = syncAddress({
        model,
        uploads: this.uploads.names,
        send: messages.send,
        isWaiting: messages.isWaiting,
        notice: (problem) => messages.complain(problem),
      });
    }
    this.draw();
  }

  stop() {
    this.stopWatching();
    this.address?.stop();
    this.messages.stop();
    this.uploads.stop();
    this.guide.stop();
    this.model.off("change:frame", this.draw);
    this.model.off("msg:custom", this.receive);
  }

  // ---------------------------------------------------------------- nodes

  makeHeader() {
    const { messages, uploads } = this;
    this.headline = make("h1", { class: "headline" });
    this.lead = make("p", { class: "lead" });
    this.intro = ALONE ? [makePart("intro", this.headline, this.lead)] : [];
    this.heading = make("p", { class: "heading" });
    const ways = make("span", {}, ", drop, or paste");
    this.uploader = makeUploader(uploads.takePhoto, "Upload", ways, " a photo");
    this.share = makeShare({
      model: this.model,
      request: (name) => this.requestFile(name),
      findMap: this.findMap,
      isUploaded: this.isUploaded,
    });
    this.opener = makeOpener(uploads.takeModel);
    this.companion = makeCompanion(uploads.takeCompanion, {
      twin: () => {
        messages.hush();
        messages.send({ press: "twin" });
      },
      close: () => messages.send({ press: "alone" }),
    });
    this.tools = makePart(
      "tools",
      this.uploader,
      this.opener,
      this.companion.node,
      this.share.node,
    );
    this.header = makePart("header", this.heading, this.tools);
  }

  makeChoices() {
    this.bars = make("ol", { class: "bars", "aria-label": BARS_TITLE });
    this.doubt = make("p", { class: "note doubt" });
    this.known = makeNames(this.model, this.messages.send);
    this.controls = make("form", {
      class: "controls",
      "aria-label": ALONE && "Controls", // forms with a name are landmarks, which a page has once
      onsubmit: (event) => event.preventDefault(),
    });
    this.folds = makePart("folds");
    this.about = make("p", { class: "note about", "aria-live": "polite" });
    const nodes = [this.bars, this.doubt, this.known.node, this.controls, this.folds, this.about];
    this.choices = makePart("choices", ...nodes);
  }

  makeCharts() {
    const { send, drag } = this.messages;
    this.contributions = makeSection("parts");
    this.lens = makeSection("lens");
    this.score = makeSection("score", { "aria-live": "polite" });
    this.mosaic = new Mosaic(drag);
    this.glimpse = make("canvas", { class: "glimpse", "aria-hidden": "true" }); // of the map, on a phone
    this.heads = make("section", { class: "heads" }, this.glimpse, this.mosaic.node);
    this.six = makeSix(send);
    this.challenge = makeChallenge(this.model, this.findMap, this.isUploaded);
    const explained = [this.challenge.node, this.six.node];
    const counted = [this.contributions, this.lens, this.score];
    this.charts = makePart("charts", this.heads, ...explained, ...counted);
  }

  // Name of the photo of the frame.
  findPhoto() {
    return this.model.get("frame").controls.find(({ name }) => name === "photograph")?.value;
  }

  // The canvas of the map. Functions that are passed on keep their object.
  findMap = () => this.panelsNode.querySelector(".picture canvas");

  isUploaded = () => this.uploads.names.has(this.findPhoto());

  requestFile(name) {
    this.messages.send({ press: name });
    this.saving = this.messages.sent;
  }

  // ---------------------------------------------------------------- drawing

  // Draws the frame. A later drawing that was faster replaces it.
  draw = async () => {
    this.drawings += 1;
    const own = this.drawings;
    const { messages, panels } = this;
    const frame = this.model.get("frame");
    const pictures = this.model.get("pictures");
    const makeOne = ({ name }) => makePanel(name, messages.drag);
    keepParts(panels, this.panelsNode, frame.panels, makeOne, () => true);
    this.drawControls(frame);
    this.body.classList.toggle("several", frame.panels.length > 1);
    this.drawCharts(frame, pictures);
    this.drawTools(frame);
    const updates = frame.panels.map((panel) =>
      panels.get(panel.name).update(panel, pictures, messages.isWaiting),
    );
    await Promise.all(updates);
    const { small } = await readPixels(pictures[frame.panels[0].picture]);
    if (own !== this.drawings) return;
    messages.notify();
    putImage(this.glimpse, paintMap(small, frame.panels[0]));
    this.drawHeading(frame);
    this.address?.afterDrawing();
    this.about.textContent = frame.about || "";
    this.guide.afterDrawing();
    this.root.dataset.answers = frame.answers;
    this.root.dataset.sent = messages.sent;
  };

  drawControls(frame) {
    const { controls, top, folds, heads, panels } = this;
    const { isWaiting, send, drag } = this.messages;
    const names = new Set([...this.places.keys(), ...frame.controls.map((each) => each.place)]);
    const makeOne = (each) => makeControl(each, each.kind === "range" ? drag : send);
    for (const name of names) {
      if (!this.places.has(name)) {
        this.places.set(name, makePlace(name, { controls, top, folds, heads, panels }));
      }
      const { known, parent, show } = this.places.get(name);
      const here = frame.controls.filter((each) => each.place === name && each.kind !== "switches");
      keepParts(known, parent, here, makeOne, stayWithOtherValue);
      // While an answer is outstanding, keep the controls as the user set them.
      if (!isWaiting()) {
        for (const each of here) known.get(each.name).update(each.value, frame.message);
      }
      show(here.some(({ hidden }) => !hidden));
    }
  }

  drawCharts(frame, pictures) {
    const isChanged = frame.bars?.some(({ before }) => before !== undefined);
    this.bars.ariaLabel = isChanged ? `${BARS_TITLE} with heads off` : BARS_TITLE;
    const { isWaiting, send } = this.messages;
    const [panel] = frame.panels;
    const reveal = (...values) => this.panels.get(panel.name).reveal(...values);
    const makeScore = (each) => makeCurves(each, panel, pictures.picture, reveal, send);
    if (!isWaiting()) this.aim.at = null;
    renew(this.bars, frame.bars?.length ? frame.bars : null, (each) => makeBars(each, send));
    this.doubt.textContent = frame.doubt || "";
    this.doubt.hidden = !frame.doubt;
    this.known.update(frame.knows, frame.models);
    renew(this.contributions, frame.parts, (each) => makeContributions(each, send, this.aim));
    renew(this.lens, frame.lens, (each) => makeLayerBars(each, send));
    renew(this.score, frame.score, makeScore);
    this.mosaic.update(frame.mosaic, isWaiting);
    this.challenge.update(frame.challenge, Boolean(frame.mosaic));
    this.six.update(frame.six, pictures);
  }

  drawTools(frame) {
    const limit = frame.uploads / MEGABYTE;
    this.uploader.hidden = !frame.uploads;
    this.uploader.title = frame.uploads ? `Up to ${limit} MB, uploaded unchanged` : "";
    this.opener.hidden = !frame.opens;
    this.companion.update(frame);
    this.share.update(frame);
  }

  drawHeading(frame) {
    const names = [this.findPhoto(), frame.model].filter(Boolean);
    this.heading.hidden = !frame.model;
    this.heading.textContent = names.join(" · ");
    this.headline.textContent = frame.headline || "";
    this.lead.textContent = frame.lead || "";
    if (!ALONE) return;
    document.title = [...names, "vitlens"].join(" · ");
    writeFooter(frame.opened || "");
  }

  // Takes a message of the source besides frames.
  receive = (content, buffers) => {
    if (content.ask === "names") this.known.receive(content.answer);
    else if (content.ask) this.guide.receive(content, buffers);
    else if ("file" in content) this.uploads.receive(content);
    else if ("progress" in content) this.messages.showProgress(content.progress);
    if (content.download && content.asked === this.saving) {
      const [name] = content.download;
      download(name, bytesOf(buffers[0]));
      this.messages.report(`Saved ${name}`);
    }
  };
}

// Draws the frames of a source in an element. Returns a function that ends this.
export function render({ model, el }) {
  const page = new Page(model);
  el.append(page.root);
  page.start();
  return () => page.stop();
}
