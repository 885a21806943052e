// Draws the page of an audit from the content that audit_page/__init__.py writes.

import { make, makeButton, makeFrame, nextNumber } from "../front/elements.js";
import { readContent } from "../front/source.js";
import { bytesOf, formatNumber } from "../front/values.js";
import { axisOf, makeBars, makeFigure, makePlace, share } from "./bars.js";

const CROPS = 8; // of a group before it is opened
const FEW = 4; // of a group on the first screen
const BARS =
  "Line: its 95 % interval. Gray band: where 95 % of effects lie if the group matters no more than random patches.";
const SHARE = "difference as a share of the larger mean";
const USED =
  "A group is used if the interval is above 0 in at least two of three ways to cover it, and the p-value, corrected " +
  "for all groups, is at most 0.05.";
const LIMITS =
  "A group is not a concept, covered images are images that the model was not trained on, and colors over the " +
  "whole image are in no group.";

const NOT_COVERED =
  "This group was not covered in this image: at most three groups are covered in an image, the rarest first, and " +
  "none that has more than half of the patches.";

class AuditPage {
  constructor(stored) {
    Object.assign(this, stored);
    this.axis = axisOf(this.groups);
    this.addresses = new Map(); // of the stored files
    this.sections = new Map(); // of the classes, by number
  }

  // The address of a JPEG file, which is made once.
  addressOf(file) {
    if (!this.addresses.has(file)) {
      const blob = new Blob([file], { type: "image/jpeg" });
      this.addresses.set(file, URL.createObjectURL(blob));
    }
    return this.addresses.get(file);
  }

  // A stored file over the whole image.
  makeWhole(file, attributes = {}) {
    const { width, height } = this.grid;
    const place = { width, height, preserveAspectRatio: "none" };
    return make("image", { href: this.addressOf(file), ...place, ...attributes });
  }

  // The pixels of a patch. Patches at the right and lower edge reach to the end of the image.
  cornersOf(number) {
    const { rows, cols, patch, width, height } = this.grid;
    const row = Math.floor(number / cols);
    const col = number % cols;
    const [x, y] = [col * patch[1], row * patch[0]];
    const right = col === cols - 1 ? width : x + patch[1];
    const bottom = row === rows - 1 ? height : y + patch[0];
    return { x, y, width: right - x, height: bottom - y };
  }

  // A part of an image [x, y, width, height], with frames around patches.
  makeImage({ image, patches }, box, frames = true) {
    const nodes = [this.makeWhole(this.images[image].file)];
    if (frames) {
      for (const number of patches) nodes.push(...makeFrame(this.cornersOf(number)));
    }
    return make("svg", { viewBox: box.join(" "), "aria-hidden": "true" }, ...nodes);
  }

  altOf(group, { image, patches }, kind) {
    const { name, label, predicted } = this.images[image];
    const labeled = label === null ? "" : `labeled ${label}, `;
    const count = patches.length === 1 ? "1 patch" : `${patches.length} patches`;
    return `${kind} of ${name}, ${labeled}predicted ${predicted}: ${count} of group ${group.group}`;
  }

  makeTile(group, number, kind) {
    const member = group.members[number];
    const { width, height } = this.grid;
    const isCrop = kind === "Crop";
    const picture = this.makeImage(member, isCrop ? member.box : [0, 0, width, height], !isCrop);
    const onclick = () => this.openImage(group, number);
    const label = this.altOf(group, member, kind);
    const attributes = { type: "button", class: "tile", "aria-label": label, title: label };
    return make("button", { ...attributes, onclick }, picture);
  }

  makeCrops(group, count) {
    const shown = group.members.slice(0, count);
    const tiles = shown.map((_, number) => this.makeTile(group, number, "Crop"));
    return make("div", { class: "crops" }, ...tiles);
  }

  // ---------------------------------------------------------------- first screen

  makeFirst() {
    const cards = this.look.groups.map((number) => {
      const group = this.groups[number];
      const go = makeButton(`Go to group ${number}`, () => this.goTo(group));
      return make(
        "li",
        { class: "card" },
        make("h3", {}, `${group.name}: group ${number}`),
        this.makeCrops(group, FEW),
        ...group.sentences.map((words) => make("p", {}, words)),
        go,
      );
    });
    return make(
      "section",
      { class: "first", "aria-labelledby": "look" },
      make("h2", { id: "look" }, this.look.title),
      make("p", {}, this.look.words),
      make("ol", { class: "cards" }, ...cards),
    );
  }

  // ---------------------------------------------------------------- a second model

  makeBeside() {
    if (!this.beside) return "";
    const { title, lead, notes, groups, charts, heads } = this.beside;
    const figures = charts.map((chart) => makeDifferences(`${chart.title}, ${SHARE}`, chart.bars));
    if (groups.length)
      figures.unshift(makeDifferences("Effect of covering a group, difference", groups));
    const items = groups.map((row) => this.makeChange(row));
    return make(
      "section",
      { class: "beside", "aria-labelledby": "beside" },
      make("h2", { id: "beside" }, title),
      ...lead.map((words) => make("p", { class: "how" }, words)),
      ...notes.map((words) => make("p", { class: "note" }, `Note: ${words}`)),
      make(
        "p",
        { class: "how" },
        "Bar: the difference, first model less second. Line: its 95 % interval.",
      ),
      make("div", { class: "charts" }, ...figures),
      ...makeList("The largest differences of groups", items),
      ...makeList(
        "The clearest differences of heads",
        heads.map((words) => make("li", {}, words)),
      ),
    );
  }

  makeChange({ group: number, words }) {
    const group = this.groups[number];
    const go = makeButton(`Go to group ${number}`, () => this.goTo(group));
    return make("li", {}, make("p", {}, `${group.name}, group ${number}. ${words}`), go);
  }

  makeHeader() {
    const notes = this.notes.map((words) => make("p", { class: "note" }, `Note: ${words}`));
    return make(
      "header",
      {},
      make("h1", { class: "headline" }, `Which patches does ${this.model} go by?`),
      make("p", { class: "lead" }, this.lead),
      ...notes,
    );
  }

  // ---------------------------------------------------------------- classes and groups

  makeClass(about) {
    const { number, name, images, accuracy, used, suspects, groups } = about;
    const counts = [`${groups.length} ${groups.length === 1 ? "group" : "groups"}`];
    if (used) counts.push(`${used} used`);
    if (suspects) counts.push(`${suspects} to look at`);
    const facts = [`${images} tested images`];
    if (accuracy !== null) facts.push(`accuracy ${share(accuracy)}`);
    const words = `${counts.join(", ")}. ${facts.join(", ")}.`;
    const body = make("div", { class: "groups" });
    const section = make(
      "details",
      { class: "class", id: `class-${number}` },
      make("summary", {}, make("h2", {}, name), make("span", {}, words)),
      body,
    );
    section.fill = () => {
      if (body.childElementCount) return;
      body.append(...groups.map((each) => this.makeGroup(this.groups[each])));
    };
    section.addEventListener("toggle", () => section.open && section.fill());
    this.sections.set(number, section);
    return section;
  }

  howToRead() {
    const target = this.labeled ? "label" : "predicted class";
    const effect = `the probability of the ${target} falls with the group covered, beyond random patches`;
    const sentences = [`Bar: the effect, by how much ${effect} of the same images.`, BARS];
    if (this.labeled) sentences.push(USED);
    return sentences.join(" ");
  }

  makeRest() {
    if (!this.without.length) return "";
    return make("p", { class: "how" }, `No group was found for ${this.without.join(", ")}.`);
  }

  makeGroup(group) {
    const { group: number, verdict, ways, sentences, members, images } = group;
    const id = `images-${number}`;
    const gallery = make("div", { class: "gallery", id });
    gallery.hidden = true;
    const some = members.length < images ? `${members.length} of ` : "";
    const button = makeButton(
      `Show ${some}its ${images} images`,
      () => this.toggleGallery(group, gallery, button),
      {
        "aria-expanded": "false",
        "aria-controls": id,
      },
    );
    const charts = [makeFigure("Place in the image", makePlace(group.place, this.grid))];
    if (ways.length) charts.unshift(makeFigure("Effect of covering it", makeBars(ways, this.axis)));
    return make(
      "article",
      { class: `group ${verdict.replace(" ", "-")}`, id: `group-${number}`, tabindex: "-1" },
      make("h3", {}, `Group ${number} `, make("span", { class: "verdict" }, verdict)),
      this.makeCrops(group, CROPS),
      make("div", { class: "charts" }, ...charts),
      ...sentences.map((words) => make("p", {}, words)),
      this.makeFacts(group),
      members.length ? button : "",
      gallery,
    );
  }

  // Names and values of what is known of a group.
  factsOf(group) {
    const facts = [["Share of the evidence for the class, by the map", share(group.share)]];
    const having = `${group.images}, ${share(group.class_share)} of the class`;
    facts.push(["Tested half: images that have it", having]);
    if (group.shared.length) facts.push(["Also frequent in", group.shared.join(", ")]);
    facts.push(["On the border of the image", share(group.at_border)]);
    if (group.effect !== null && this.labeled) {
      const covered = `${share(group.accuracy_covered)} with it covered`;
      const control = `${share(group.accuracy_control)} with random patches covered`;
      const all = `${share(group.accuracy)} as they are, ${covered}, ${control}`;
      facts.push([`Accuracy on ${group.tested} images`, all]);
    }
    if (group.accuracy_lacking !== null && this.labeled) {
      facts.push(["Accuracy on images of the class without it", share(group.accuracy_lacking)]);
    }
    if (group.p !== null) {
      const p = group.p < 0.001 ? "< 0.001" : formatNumber(group.p);
      facts.push(["p-value, corrected for all groups", p]);
    }
    return facts;
  }

  makeFacts(group) {
    const cells = this.factsOf(group).map(([name, value]) =>
      make("div", {}, make("dt", {}, name), make("dd", {}, value)),
    );
    return make("dl", { class: "facts" }, ...cells);
  }

  toggleGallery(group, gallery, button) {
    if (!gallery.childElementCount) {
      gallery.append(...group.members.map((_, number) => this.makeTile(group, number, "Image")));
    }
    gallery.hidden = !gallery.hidden;
    button.setAttribute("aria-expanded", String(!gallery.hidden));
    const verb = gallery.hidden ? "Show" : "Hide";
    button.textContent = button.textContent.replace(/^(Show|Hide)/, verb);
  }

  goTo(group) {
    const section = this.sections.get(group.class);
    section.fill();
    section.open = true;
    const place = document.getElementById(`group-${group.group}`);
    place.scrollIntoView({ block: "start" });
    place.focus({ preventScroll: true });
  }

  // ---------------------------------------------------------------- an image in large

  openImage(group, number) {
    this.opened = { group, number };
    this.fillDialog();
    if (!this.dialog.open) this.dialog.showModal();
    this.dialog.scrollTop = 0;
  }

  step(by) {
    const { group, number } = this.opened;
    const count = group.members.length;
    this.openImage(group, (number + by + count) % count);
  }

  fillDialog() {
    const { group, number } = this.opened;
    const member = group.members[number];
    const { name, label, predicted, probability, command } = this.images[member.image];
    const { width, height } = this.grid;
    const picture = this.makeImage(member, [0, 0, width, height]);
    const words = [`Predicted: ${predicted}.`];
    if (label !== null) words.unshift(`Label: ${label}, probability ${share(probability)}.`);
    const framed = `Framed: the patches of group ${group.group} (${group.name}, ${group.verdict}).`;
    const image = makeView(
      picture,
      this.altOf(group, member, "Image"),
      `${framed} ${words.join(" ")}`,
    );
    this.dialogBody.replaceChildren(
      make("h2", {}, name),
      make("div", { class: "views" }, image, this.makeMap(member)),
      ...this.makeCovered(member),
      ...(this.opens ? makeOpening(command) : []),
    );
    this.count.textContent = `${number + 1} of ${group.members.length}`;
  }

  // The map of the predicted class over a gray image, with frames around the patches of a group.
  makeMap(member) {
    const { map: stored, file, predicted } = this.images[member.image];
    if (!stored) return "";
    const map = bytesOf(stored);
    const { width, height } = this.grid;
    const nodes = [this.makeWhole(file, { class: "gray" })];
    map.forEach((level, number) => {
      const opacity = (0.9 * level) / this.levels;
      if (level)
        nodes.push(
          make("rect", { class: "cell", ...this.cornersOf(number), "fill-opacity": opacity }),
        );
    });
    for (const number of member.patches) nodes.push(...makeFrame(this.cornersOf(number)));
    const picture = make("svg", { viewBox: `0 0 ${width} ${height}` }, ...nodes);
    const total = map.reduce((sum, level) => sum + level, 0);
    const inside = member.patches.reduce((sum, number) => sum + map[number], 0);
    const part = total ? share(inside / total) : "0 %";
    const words = `Map: the patches that raise ${predicted}, the predicted class. Within the frames: ${part} of it.`;
    return makeView(picture, words, words);
  }

  // The image with the patches covered as in the test, and the probabilities that the test measured.
  makeCovered(member) {
    const { covered, image } = member;
    const { color } = this.images[image];
    if (!covered || !color) return [make("p", {}, NOT_COVERED)];
    const views = covered.ways.map((way) => this.makeWay(member, way));
    const title = make("h3", {}, "With the framed patches covered, as in the test");
    return [title, make("div", { class: "views ways" }, ...views)];
  }

  makeWay({ image, patches, covered }, { way, words, probability, control }) {
    const { file, color, blurred, label, predicted, probability: before } = this.images[image];
    const { width, height } = this.grid;
    const other = this.others[covered.other];
    const makeBlank = {
      border: (clip) => make("rect", { width, height, fill: color, ...clip }),
      blur: (clip) => this.makeWhole(blurred, clip),
      other: (clip) => (other ? this.makeWhole(other.file, clip) : ""),
    }[way];
    const id = `covered-${nextNumber()}`;
    const outline = patches.map((number) => outlineOf(this.cornersOf(number))).join("");
    const picture = make(
      "svg",
      { viewBox: `0 0 ${width} ${height}` },
      make("clipPath", { id }, make("path", { d: outline })),
      this.makeWhole(file, { class: "exact" }),
      makeBlank({ "clip-path": `url(#${id})` }),
    );
    const from = way === "other" && other ? `, ${other.name}` : "";
    const [first, last] = [share(before), share(probability)];
    const change = probability < before ? "falls" : "rises";
    const moved = first === last ? `stays ${first}` : `${change} from ${first} to ${last}`;
    const outcome = `The probability of ${label ?? predicted} ${moved}.`;
    const alt = `Covered ${words}${from}. ${outcome} With random patches covered instead: ${share(control)}.`;
    return makeView(picture, alt, alt);
  }

  makeDialog() {
    this.dialogBody = make("div", { class: "large" });
    this.count = make("span", { role: "status" });
    const onkeydown = (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (by) this.step(by);
    };
    this.dialog = make(
      "dialog",
      { onkeydown, "aria-label": "Image" },
      this.dialogBody,
      make(
        "div",
        { class: "tools" },
        makeButton("Previous", () => this.step(-1)),
        makeButton("Next", () => this.step(1)),
        this.count,
        makeButton("Close", () => this.dialog.close()),
      ),
    );
    return this.dialog;
  }

  // ---------------------------------------------------------------- the page

  draw(page) {
    page.className = "vitlens audit";
    const classes = this.classes.map((about) => this.makeClass(about));
    page.replaceChildren(
      this.makeHeader(),
      this.makeFirst(),
      this.makeBeside(),
      make("p", { class: "how" }, this.howToRead()),
      make("p", { class: "how" }, LIMITS),
      ...classes,
      this.makeRest(),
      this.makeDialog(),
    );
    if (classes.length) classes[0].open = true;
  }
}

// A chart of differences between two models.
function makeDifferences(title, bars) {
  const axis = axisOf([{ ways: bars }]);
  return makeFigure(
    title,
    makeBars(bars, axis, ({ name, words }) => `${name}: ${words}`),
  );
}

function makeList(title, items) {
  if (!items.length) return [];
  return [make("h3", {}, title), make("ol", { class: "changes" }, ...items)];
}

// An image with words below it. alt: its text for those who do not see it.
function makeView(picture, alt, words) {
  picture.removeAttribute("aria-hidden");
  picture.setAttribute("role", "img");
  picture.setAttribute("aria-label", alt);
  return make("figure", {}, picture, make("p", {}, words));
}

// The outline of a rectangle, as a part of a path.
function outlineOf({ x, y, width, height }) {
  return `M${x} ${y}h${width}v${height}h${-width}z`;
}

// How an image is opened in the explorer.
function makeOpening(command) {
  if (!command)
    return [
      make("p", {}, "This image is in a table. Save it as a file to open it in the explorer."),
    ];
  const words = make("p", {}, "To open it in the explorer:");
  return [words, make("code", { class: "command", tabindex: 0 }, command)];
}

async function openAudit() {
  const page = document.getElementById("page");
  const stored = await readContent(document.getElementById("data"));
  page.audit = new AuditPage(stored); // for scripts that drive the page
  page.audit.draw(page);
}

openAudit().catch(({ message }) => {
  document.getElementById("page").textContent =
    `This page could not be opened: ${message}. It needs a newer browser.`;
});
