// Draws the page of an audit from the content that audit_page/__init__.py writes.

import { make, makeButton, makeFrame } from "../front/elements.js";
import { readContent } from "../front/source.js";
import { formatNumber } from "../front/values.js";
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

class AuditPage {
  constructor(stored) {
    Object.assign(this, stored);
    this.axis = axisOf(this.groups);
    this.addresses = new Map(); // of the images, by position
    this.sections = new Map(); // of the classes, by number
  }

  // The address of an image, which is made once.
  addressOf(position) {
    if (!this.addresses.has(position)) {
      const blob = new Blob([this.images[position].file], { type: "image/jpeg" });
      this.addresses.set(position, URL.createObjectURL(blob));
    }
    return this.addresses.get(position);
  }

  // A part of an image [x, y, width, height], with frames around patches.
  makeImage({ image, patches }, box, frames = true) {
    const { cols, patch, width, height } = this.grid;
    const whole = { href: this.addressOf(image), width, height, preserveAspectRatio: "none" };
    const nodes = [make("image", whole)];
    if (frames) {
      for (const number of patches) {
        const corner = { x: (number % cols) * patch[1], y: Math.floor(number / cols) * patch[0] };
        nodes.push(...makeFrame({ ...corner, width: patch[1], height: patch[0] }));
      }
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
    picture.removeAttribute("aria-hidden");
    picture.setAttribute("role", "img");
    picture.setAttribute("aria-label", this.altOf(group, member, "Image"));
    const words = [`Predicted: ${predicted}.`];
    if (label !== null) words.unshift(`Label: ${label}, probability ${share(probability)}.`);
    const framed = `Framed: the patches of group ${group.group} (${group.name}, ${group.verdict}).`;
    this.dialogBody.replaceChildren(
      make("h2", {}, name),
      picture,
      make("p", {}, `${framed} ${words.join(" ")}`),
      ...makeOpening(command),
    );
    this.count.textContent = `${number + 1} of ${group.members.length}`;
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
