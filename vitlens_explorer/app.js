// The explorer as a page: a source for the front end over a WebSocket.

import front from "/front.js";

const LOST =
  "The server of this page has ended. Start it again, and open the address that it prints.";
const CLOSED = [1001, 1006]; // codes of a connection that the server has left or that broke

const page = document.querySelector("#page");
const step = page.querySelector("[role=status]");
const socket = new WebSocket(`ws://${location.host}/socket`);
socket.binaryType = "arraybuffer";

const model = new front.Source();
model.send = (content, _, buffers = []) => {
  if (socket.readyState !== WebSocket.OPEN) return;
  const text = JSON.stringify(content);
  if (!buffers.length) {
    socket.send(text);
    return;
  }
  const head = new TextEncoder().encode(text);
  socket.send(new Blob([Uint32Array.of(head.length), head, buffers[0]]));
};

socket.onmessage = ({ data }) => {
  const [name, value] = front.unpack(data);
  const isFirst = name === "frame" && !model.get("frame");
  if (name === "step") step.textContent = value;
  else if (name === "custom") model.emit("msg:custom", value.content, value.buffers);
  else model.traits[name] = value;
  if (isFirst) {
    page.replaceChildren();
    front.render({ model, el: page });
  } else {
    model.emit(`change:${name}`);
  }
};

socket.onclose = ({ code }) => {
  if (model.get("frame")) model.emit("lost", LOST);
  else if (CLOSED.includes(code)) step.textContent = LOST;
};
