// Photos and models that a user drops, pastes or chooses.

import { ALONE, MEGABYTE, PART, nextNumber } from "./elements.js";
import { formatMegabytes } from "./messages.js";
import { holdsModel, readDrop } from "./models.js";

const UNREAD = "This browser could not read the folder. Choose its files with Open a model.";

export class Uploads {
  names = new Set(); // of the photos that were uploaded

  // surroundings: the node in which files are dropped and pasted.
  constructor(model, messages, root, surroundings) {
    this.model = model;
    this.messages = messages;
    this.root = root;
    this.surroundings = surroundings;
    this.handlers = {
      dragover: (event) => this.hover(event),
      dragleave: (event) => this.leave(event),
      drop: (event) => this.drop(event),
      paste: (event) => this.paste(event),
    };
  }

  start() {
    for (const [event, handler] of Object.entries(this.handlers)) {
      this.surroundings.addEventListener(event, handler);
    }
  }

  stop() {
    for (const [event, handler] of Object.entries(this.handlers)) {
      this.surroundings.removeEventListener(event, handler);
    }
  }

  // Sends a part of an upload. Returns {received, problem}, or null if a new file has replaced this one.
  async sendPart(upload, chosen) {
    const { messages, model } = this;
    const at = upload.received;
    const end = model.near ? chosen.size : at + PART;
    let data;
    try {
      data = await chosen.slice(at, end).arrayBuffer();
    } catch (error) {
      if (messages.upload !== upload) return null;
      return { problem: `${chosen.name} could not be read by this browser (${error.message}).` };
    }
    if (messages.upload !== upload) return null;
    const content = { upload: chosen.name, file: upload.id, at, of: chosen.size };
    const confirmed = new Promise((done) => {
      upload.confirm = done;
    });
    if (end < chosen.size) model.send(content, undefined, [data]);
    else messages.send(content, [data], messages.complaint);
    const answer = await confirmed;
    if (messages.upload !== upload) return null;
    if (answer.problem) messages.forgetLast();
    return answer;
  }

  // Takes the answer to a part.
  receive(content) {
    const { upload } = this.messages;
    if (content.file === upload?.id) upload.confirm(content);
  }

  // Sends a file, to Python in parts, each after the last was confirmed. A new file replaces it.
  async sendFile(chosen) {
    const { messages } = this;
    const upload = { id: nextNumber(), received: 0, size: chosen.size };
    messages.upload = upload;
    const most = this.model.get("frame").uploads;
    if (chosen.size > most) {
      const limit = `${most / MEGABYTE} MB, the upload limit`;
      const size = `${chosen.name} (${formatMegabytes(chosen.size)} MB)`;
      messages.complain(`${size} is larger than ${limit}. Make it smaller.`);
      return;
    }
    this.names.add(chosen.name);
    do {
      messages.notify();
      const answer = await this.sendPart(upload, chosen);
      if (!answer) return;
      if (answer.problem) {
        messages.complain(answer.problem);
        return;
      }
      upload.received = answer.received;
    } while (upload.received < upload.size);
    messages.upload = null;
    messages.notify();
    if (ALONE) this.root.querySelector(".picture")?.scrollIntoView({ block: "nearest" });
  }

  // Photos that were dropped, pasted or chosen: the first one is uploaded.
  takeFiles({ files }, missing) {
    const { messages } = this;
    const [first] = files;
    messages.hush();
    if (files.length > 1) {
      messages.complaint = `${files.length} files were given. The first one, ${first.name}, is used.`;
    }
    if (!first) messages.complain(missing);
    else if (ALONE && /hei[cf]$/i.test(first.type || first.name)) {
      messages.complain("HEIC photos cannot be opened here. Export it as JPEG.");
    } else this.sendFile(first);
  }

  takePhoto = (source) => this.takeFiles(source, "");

  // Opens the files of a model.
  takeModel = ({ files, folder }) => {
    this.messages.hush();
    this.messages.send({ open: folder }, files);
  };

  takeCompanion = ({ files, folder }) => {
    this.messages.hush();
    this.messages.send({ open: folder, beside: true }, files);
  };

  // True for a drop or pasted photo that this page takes. It then does not reach others.
  accept(event) {
    const most = this.model.get("frame").uploads;
    if (this.messages.gone || !(ALONE || most)) return false;
    event.preventDefault(); // also where the browser would leave the page for the photo
    if (event.type !== "dragover") event.stopPropagation();
    if (!most && event.type !== "dragover") {
      this.messages.complain("A saved page takes no other photos. Use vitlens app.");
    }
    return most > 0;
  }

  hover(event) {
    if (!this.accept(event)) return;
    this.root.classList.toggle("dropping", event.dataTransfer.types.includes("Files"));
  }

  leave({ relatedTarget }) {
    const inside = Boolean(relatedTarget && this.surroundings.contains(relatedTarget));
    this.root.classList.toggle("dropping", inside);
  }

  // Opens a model that was dropped, or uploads a photo.
  drop(event) {
    this.root.classList.remove("dropping");
    if (!this.accept(event)) return;
    const source = event.dataTransfer;
    if (this.model.get("frame").opens && holdsModel(source)) {
      readDrop(source).then(this.takeModel, () => this.messages.complain(UNREAD));
    } else this.takeFiles(source, "A link or a text was dropped. Drop the file of a photo.");
  }

  paste(event) {
    const isField = event.target.matches?.("input, select, textarea");
    if (isField && !event.clipboardData.files.length) return; // pasted text
    if (!this.accept(event)) return;
    this.takeFiles(
      event.clipboardData,
      "The clipboard has no photo. Copy one, and paste it again.",
    );
  }
}
