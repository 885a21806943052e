// The explorer as a page: anywidget's model interface (get, on, off, send) for front.js over a WebSocket.

import front from "/front.js";

const page = document.querySelector("#page");
const step = page.querySelector("[role=status]");
const state = {};
const handlers = new Map();
const socket = new WebSocket(`ws://${location.host}/socket`);
socket.binaryType = "arraybuffer";
const LOST = "The server of this page has ended. Start it again, and open the address that it prints.";

const emit = (event, ...values) => [...(handlers.get(event) || [])].forEach((handler) => handler(...values));

const model = {
  get: (name) => state[name],
  on(event, handler) {
    if (!handlers.has(event)) handlers.set(event, new Set());
    handlers.get(event).add(handler);
  },
  off: (event, handler) => handlers.get(event)?.delete(handler),
  send(content, _, buffers = []) {
    if (socket.readyState !== WebSocket.OPEN) return;
    const text = JSON.stringify(content);
    if (!buffers.length) return socket.send(text);
    const head = new TextEncoder().encode(text);
    const length = new DataView(new ArrayBuffer(4));
    length.setUint32(0, head.length, true);
    socket.send(new Blob([length.buffer, head, buffers[0]]));
  },
};

socket.onmessage = ({ data }) => {
  const [name, value] = front.unpacked(data);
  if (name === "step") step.textContent = value;
  else if (name === "custom") emit("msg:custom", value.content, value.buffers);
  else {
    const first = name === "frame" && !state.frame;
    state[name] = value;
    if (first) {
      page.replaceChildren();
      front.render({ model, el: page });
    } else emit(`change:${name}`);
  }
};
socket.onclose = ({ code }) => {
  if (state.frame) emit("lost", LOST);
  else if (code === 1006 || code === 1001) step.textContent = LOST;
};
