// Playing through the layers.

import { STILL, makeSmallButton } from "./elements.js";

export const LAYER = 600; // milliseconds for which playing shows a layer
const BUSY = "button, select, input, textarea, summary, a, dialog, [contenteditable=true]"; // which take the space key

// Numbers of the layers that the control of layers takes.
export function layersOf({ options, high }) {
  if (options.length) return options.map((option) => option[1]);
  return [...Array(high + 1).keys()];
}

// Playing through the layers: a button, and functions for the guide. findLayer: the control of the layer in the frame.
export function makePlayer(findLayer, send) {
  let playing = false;
  let timer;
  const play = (now) => {
    playing = now;
    clearTimeout(timer);
    button.textContent = now ? "❚❚ Pause" : "▶ Play layers";
  };
  const forward = () => {
    const { value } = findLayer();
    const layers = layersOf(findLayer());
    let layer = layers[layers.indexOf(value) + 1];
    if (layer === undefined && !playing) layer = layers[0]; // from the last, the first follows
    if (layer === undefined || button.hidden) play(false);
    else send({ set: { layer } });
  };
  const toggle = () => {
    if (!playing) forward();
    play(!playing && !STILL.matches);
  };
  const button = makeSmallButton("▶ Play layers", toggle, { title: "Space" });
  const pause = () => {
    if (playing) play(false);
  };
  const onSpace = (event) => {
    if (event.key !== " " || event.target.closest(BUSY) || button.hidden) return;
    event.preventDefault();
    toggle();
  };
  // Called after each drawing. The next layer follows after a while.
  const continueAfter = (isWaiting) => {
    clearTimeout(timer);
    if (playing && !isWaiting()) timer = setTimeout(forward, LAYER);
  };
  return { button, pause, onSpace, continueAfter };
}
