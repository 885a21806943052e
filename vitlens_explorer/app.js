// The explorer as a page: a source for the front end over a WebSocket.

import front from "/front.js";

const LOST =
  "The server of this page has ended. Start it again, and open the address that it prints.";
const BROKEN =
  "The connection to the server of this page is gone. If the server runs, reload this page. " +
  "Otherwise start it again, and open the address that it prints.";
const SILENT =
  "The server does not answer. It may be stopped or busy, or the connection to it is gone. " +
  "This page goes on when the server answers. If it runs and this message stays, reload the page.";
const ENDED = 1001; // code of a connection that the server has closed before its end
const CUT = 1006; // code of one that broke
const PULSE = 2000; // milliseconds between two questions whether the server answers
const SILENCE = 8000; // milliseconds without an answer until the page says so

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

// Asks the server from time to time whether it answers.
let asked = 0; // time of the question without an answer
let silent = false;
let opening = step.textContent; // step of opening the model
const announce = (sentence) => {
  silent = Boolean(sentence);
  step.textContent = sentence || opening;
  if (model.get("frame")) model.emit("away", sentence);
};
const hear = () => {
  asked = 0;
  if (silent) announce("");
};
const ask = () => {
  if (socket.readyState !== WebSocket.OPEN) return;
  if (!asked) {
    asked = performance.now();
    socket.send(JSON.stringify({ ping: true }));
  } else if (!silent && performance.now() - asked >= SILENCE) {
    announce(SILENT);
  }
};
const pulse = setInterval(ask, PULSE);

socket.onmessage = ({ data }) => {
  const [name, value] = front.unpack(data);
  const isFirst = name === "frame" && !model.get("frame");
  if (name === "step") {
    opening = value;
    step.textContent = value;
  }
  if (name === "pong") hear();
  else if (name === "custom") model.emit("msg:custom", value.content, value.buffers);
  else if (name !== "step") model.traits[name] = value;
  if (isFirst) {
    page.replaceChildren();
    front.render({ model, el: page });
  } else {
    model.emit(`change:${name}`);
  }
};

socket.onclose = ({ code }) => {
  clearInterval(pulse);
  const sentence = code === ENDED ? LOST : BROKEN;
  if (model.get("frame")) model.emit("lost", sentence, code !== ENDED);
  else if ([ENDED, CUT].includes(code)) step.textContent = sentence;
};
