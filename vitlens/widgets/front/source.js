// A file to download. Browsers ask before a second one, so what is saved together is one file.
function save(name, bytes) {
  const address = URL.createObjectURL(new Blob([bytes]));
  const link = make("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 60000);
}

// ---------------------------------------------------------------- the kernel

const GONE = ["restarting", "autorestarting", "terminating", "dead"]; // a new kernel has no model
const ENDED = "The kernel of this widget has ended or was restarted. Run the cell again, after the cells that it needs.";
const AWAY = "The kernel cannot be reached. Wait a moment. If this message stays, restart it and run the notebook again.";

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

// Message: length of the header, header, and byte strings, {"$": number} in the header.
function unpacked(data) {
  const length = new DataView(data).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(data, 4, length)));
  let at = 4 + length;
  const parts = head.sizes.map((size) => new DataView(data, (at += size) - size, size));
  const whole = (value) => {
    if (Array.isArray(value)) return value.map(whole);
    if (!value || typeof value !== "object") return value;
    if ("$" in value) return parts[value.$];
    return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, whole(item)]));
  };
  return [head.name, whole(head.value)];
}
