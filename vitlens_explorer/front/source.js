// ---------------------------------------------------------------- the kernel

const GONE = ["restarting", "autorestarting", "terminating", "dead"]; // a new kernel has no model
const ENDED =
  "The kernel of this widget has ended. Run the cell again, after the cells that it needs.";
const AWAY =
  "The kernel cannot be reached. If this message stays, restart it and run the notebook again.";

// Calls tell(message) when the kernel has ended or cannot be reached, and tell("") when it is back.
function watch(model, tell) {
  let ended = false;
  const end = (sentence) => {
    ended = true;
    tell(sentence);
  };
  model.on("lost", end);
  const kernel = model.widget_manager?.kernel; // undefined in some front ends
  const slots = {
    statusChanged: (_, status) => GONE.includes(status) && end(ENDED),
    disposed: () => end(ENDED),
    connectionStatusChanged: (_, status) => ended || tell(status === "connected" ? "" : AWAY),
  };
  for (const [signal, slot] of Object.entries(slots)) kernel?.[signal]?.connect(slot);
  return () => {
    model.off("lost", end);
    for (const [signal, slot] of Object.entries(slots)) kernel?.[signal]?.disconnect(slot);
  };
}

// The interface of anywidget's model, for the app and pages, which define `send`.
class Source {
  traits = {};
  handlers = {};
  get = (name) => this.traits[name];
  on = (event, handler) => (this.handlers[event] ||= new Set()).add(handler);
  off = (event, handler) => this.handlers[event]?.delete(handler);
  emit = (event, ...values) =>
    [...(this.handlers[event] || [])].forEach((handler) => handler(...values));
}

// Message: length of the header, header, and byte strings, {"$": number} in the header. revive: maps all values.
function unpacked(data, revive = (each) => each) {
  const length = new DataView(data).getUint32(0, true);
  const text = new TextDecoder().decode(new Uint8Array(data, 4, length));
  let at = 4 + length;
  const parts = JSON.parse(text).sizes.map((size) => new DataView(data, (at += size) - size, size));
  const { name, value } = JSON.parse(text, (_, each) =>
    each?.$ === undefined ? revive(each) : parts[each.$],
  );
  return [name, value];
}
