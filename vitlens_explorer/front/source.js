// ---------------------------------------------------------------- the kernel

const GONE = ["restarting", "autorestarting", "terminating", "dead"]; // a new kernel has no model
const ENDED =
  "The kernel of this widget has ended. Run the cell again, after the cells that it needs.";
const AWAY =
  "The kernel cannot be reached. If this message stays, restart it and run the notebook again.";

// Calls notice(message, reloads) when the kernel has ended or cannot be reached, and notice("") when it is back.
// reloads: true if it may help to reload the page. Returns a function that ends this.
export function watchKernel(model, notice) {
  let ended = false;
  const end = (sentence, reloads = false) => {
    ended = true;
    notice(sentence, reloads);
  };
  const wait = (sentence) => {
    if (!ended) notice(sentence, true);
  };
  const slots = {
    statusChanged(_, status) {
      if (GONE.includes(status)) end(ENDED);
    },
    disposed() {
      end(ENDED);
    },
    connectionStatusChanged(_, status) {
      if (!ended) notice(status === "connected" ? "" : AWAY);
    },
  };
  const kernel = model.widget_manager?.kernel; // undefined in some front ends
  model.on("lost", end);
  model.on("away", wait);
  for (const [signal, slot] of Object.entries(slots)) kernel?.[signal]?.connect(slot);
  return () => {
    model.off("lost", end);
    model.off("away", wait);
    for (const [signal, slot] of Object.entries(slots)) kernel?.[signal]?.disconnect(slot);
  };
}

// The interface of anywidget's model, for the app and pages, which define `send`.
export class Source {
  traits = {};
  handlers = {};

  get(name) {
    return this.traits[name];
  }

  on(event, handler) {
    this.handlers[event] ||= new Set();
    this.handlers[event].add(handler);
  }

  off(event, handler) {
    this.handlers[event]?.delete(handler);
  }

  emit(event, ...values) {
    const handlers = [...(this.handlers[event] || [])];
    for (const handler of handlers) handler(...values);
  }
}

// Message: length of the header, header, and byte strings, {"$": number} in the header. revive: maps all values.
export function unpack(data, revive = (each) => each) {
  const length = new DataView(data).getUint32(0, true);
  const text = new TextDecoder().decode(new Uint8Array(data, 4, length));
  const parts = [];
  let at = 4 + length;
  for (const size of JSON.parse(text).sizes) {
    parts.push(new DataView(data, at, size));
    at += size;
  }
  const reviver = (_, each) => (each?.$ === undefined ? revive(each) : parts[each.$]);
  const { name, value } = JSON.parse(text, reviver);
  return [name, value];
}

// The content that a file stores in an element, as `as_html` of in_page writes it. revive: as of `unpack`.
export async function readContent(element, revive) {
  const bytes = Uint8Array.from(atob(element.textContent), (letter) => letter.charCodeAt(0));
  element.remove();
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const [, content] = unpack(await new Response(stream).arrayBuffer(), revive);
  return content;
}
