// Messages to the source, and what the page shows of them: the alert, the progress, and that it computes.

import { MEGABYTE, PACE, make, makeSmallButton, nextNumber } from "./elements.js";

const SLOW = 1000; // milliseconds until a page shows progress, and dims a map that is no longer the chosen one
const SOON = 150; // milliseconds until a page is marked as computing

export const formatMegabytes = (bytes) => (bytes / MEGABYTE).toFixed(1);
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

export class Messages {
  sent = 0; // number of the last message
  since = 0; // time of the first message without an answer
  upload = null; // {received, size} of the current upload
  progress = null; // of a map, score or page
  complaint = ""; // message of this page, such as of a file that was not sent
  done = ""; // what the last message did, such as saving a file
  hushed = {}; // the frame whose message was closed
  gone = ""; // the alert while there is no kernel
  timer = 0; // of the next notification

  // root: node of the page. reloads: true for a page that can be loaded again.
  constructor(model, root) {
    this.model = model;
    this.root = root;
    this.drag = makePaced(this.send);
    this.alert = make("p", { class: "alert", role: "alert" });
    this.closer = makeSmallButton("Close", this.hush);
    this.reloader = makeSmallButton("Reload", () => location.reload(), { hidden: true });
    this.warning = make("div", { class: "notice" }, this.alert, this.reloader, this.closer);
    this.amount = make("span", { "aria-hidden": "true" });
    this.meter = make("progress", { "aria-label": "Progress" });
    const canceler = makeSmallButton("Cancel", this.cancel);
    const kind = { class: "notice progress" };
    this.running = make("div", kind, this.amount, this.meter, canceler);
    this.node = make("div", { class: "notices" }, this.warning, this.running);
    this.busy = make("span", { class: "busy", role: "status" });
  }

  // Functions that are passed on keep their object.
  isWaiting = () => this.sent > this.model.get("frame").answers;

  send = (content, buffers = [], complaint = "") => {
    if (!this.isWaiting()) this.since = performance.now();
    this.setSent(nextNumber());
    this.complaint = complaint;
    this.done = "";
    setTimeout(() => {
      if (this.isWaiting()) this.notify();
    }, SOON);
    this.model.send({ ...content, number: this.sent }, undefined, buffers);
  };

  cancel = () => {
    if (this.upload) this.complain("");
    else this.send({ cancel: true });
  };

  // Shows that something is done, until the next message.
  report(done) {
    this.done = done;
    this.notify();
  }

  // Closes the alert.
  hush = () => {
    this.complaint = "";
    this.hushed = this.model.get("frame");
    this.notify();
  };

  // Shows a problem in place of the current upload.
  complain = (problem) => {
    this.upload = null;
    this.complaint = problem;
    this.notify();
  };

  setSent(number) {
    this.sent = number;
    this.root.dataset.sent = number;
  }

  // The last message will not be answered.
  forgetLast() {
    this.setSent(this.model.get("frame").answers);
  }

  // Shows that the kernel is gone, or with "" that it is back. reloads: true if it may help to reload the page.
  loseKernel(sentence, reloads) {
    this.gone = sentence;
    this.reloader.hidden = !(sentence && reloads);
    this.notify();
  }

  showProgress(progress) {
    this.progress = progress;
    this.notify();
  }

  // [text, share] of what takes long. Empty if nothing does.
  describeWork() {
    if (this.gone) return [];
    if (this.upload?.received) {
      const { received, size } = this.upload;
      const count = `${formatMegabytes(received)} of ${formatMegabytes(size)} MB`;
      return [`Uploading: ${count}`, received / size];
    }
    if (this.progress) return describeProgress(this.progress);
    const taken = this.isWaiting() ? performance.now() - this.since : 0;
    return taken < SLOW ? [] : [`Computing: ${formatSeconds(taken / 1000)}`];
  }

  describeProblem() {
    if (this.gone) return this.gone;
    const { answers, message } = this.model.get("frame");
    const isHushed = answers === this.hushed.answers && message === this.hushed.message;
    const parts = [this.complaint, isHushed ? "" : message];
    return parts.filter(Boolean).join(" ");
  }

  // Shows the alert, and what takes long.
  notify() {
    this.notifyProblem();
    this.notifyWork();
    clearTimeout(this.timer);
    if (this.isWaiting() && !this.gone) this.timer = setTimeout(() => this.notify(), SLOW);
  }

  notifyProblem() {
    const problem = this.describeProblem();
    if (problem !== this.alert.textContent) this.alert.textContent = problem;
    this.warning.hidden = !problem;
    this.closer.hidden = Boolean(this.gone);
  }

  notifyWork() {
    const [text, share] = this.describeWork();
    const isComputing = !this.gone && (this.isWaiting() || this.upload || this.progress);
    const isStale = this.isWaiting() && performance.now() - this.since >= SLOW;
    this.busy.textContent = isComputing ? "Computing …" : this.done;
    this.root.classList.toggle("stale", isStale);
    this.running.hidden = !text;
    this.amount.textContent = text;
    if (share) this.meter.value = share;
    else this.meter.removeAttribute("value");
  }

  stop() {
    clearTimeout(this.timer);
  }
}
