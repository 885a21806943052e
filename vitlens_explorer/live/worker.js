// The thread in which the model runs. Answers {task, port, …given} on its port with {result} or {error}, after any
// number of {share}, the part that is done.

import { openFiles } from "./architectures.js";
import { decompose, explain, lengthOf, readLens } from "./gradients.js";
import { coverPatches, decode, encodePicture, preprocess, prove } from "./pixels.js";
import { refuse } from "./refuse.js";
import { wholeImage } from "./sizes.js";
import { Vit } from "./vit.js";

let vit = null;
let lastKey = ""; // of the latest forward: its photo and switched-off heads
let canceled = false; // the opening of a model

function runForward({ key, input, image, off, mean }) {
  lastKey = key;
  vit.fit(image);
  return vit.forward(input, off, mean);
}

// The record of a forward for the page. The worker keeps its own tokens, which gradients need.
function forwardForPage(given) {
  const record = runForward(given);
  return { ...record, tokens: record.tokens.map((tokens) => tokens.slice()) };
}

// Buffers of the arrays of a record, which move to the page without a copy.
function buffersOf({ layers, tokens }) {
  const projections = layers.flatMap(({ q, k }) => [q, k]);
  return [...projections, ...tokens].map(({ buffer }) => buffer);
}

// The task of a function of the latest forward. If another came between, that with this key runs again.
function afterForward(compute) {
  return (given) => {
    if (lastKey !== given.key) runForward(given);
    return compute(given);
  };
}

// The task of a function that needs classes.
function withClasses(compute) {
  return afterForward((given) => {
    if (!vit.classes) refuse("no classes");
    return compute(given);
  });
}

const TASKS = {
  // Tries which kinds of files this browser decodes as Pillow.
  prove: ({ probes }) => prove(probes),

  // The description of a model from its files, which the worker runs from here on: {about, notes, labels, imagenet,
  // title, architecture, kind}. After a refusal, and when it was canceled, it runs the model before.
  async read({ files, size = null, wasm }, report) {
    canceled = false;
    const { tensors, ...model } = await openFiles(files, size);
    const opened = await Vit.open(model.about, tensors, wasm, (share) => {
      if (canceled) refuse("canceled");
      report(share);
    });
    vit = opened;
    lastKey = "";
    return model;
  },

  cancel() {
    canceled = true;
  },

  // Measures what heads give on average over some photos, for those that are off.
  means({ inputs }) {
    lastKey = "";
    vit.fit();
    vit.measureMeans(inputs);
  },

  // Takes the mean outputs (L, T, D) of heads over other photos.
  replacements({ means }) {
    lastKey = "";
    vit.held.means = means;
  },

  // A file as the model's input, its picture for the page, and what to say about it.
  async photo({ bytes, ready, whole }) {
    const photo = await decode(bytes);
    const shown = whole ? wholeImage(vit.about, photo) : null;
    const { input, seen, image } = preprocess(photo, vit.about, ready, shown);
    const picture = await encodePicture(seen, image);
    return { ...photo, data: null, input, seen, image, picture };
  },

  forward: forwardForPage,

  // The features of an image, scaled to length 1.
  features(given) {
    const { output } = runForward(given);
    const length = lengthOf(output);
    return output.map((value) => value / length);
  },

  // The logits and features of an image with only some patches shown, the others in its mean color.
  covered({ input, image, shown, off, mean }) {
    lastKey = "";
    vit.fit(image);
    const { logits, output } = vit.forward(coverPatches(vit, input, shown), off, mean);
    return { logits, output };
  },
  why: afterForward((given) => {
    if (!given.like && !vit.classes) refuse("no classes");
    return explain(vit, given);
  }),
  contributions: withClasses((given) => decompose(vit, given)),
  stream: afterForward(({ at }) => vit.stream(at)),
  lens: withClasses(({ targets }) =>
    Array.from({ length: vit.layers }, (_, layer) => readLens(vit, layer, targets)),
  ),
};

addEventListener("message", async ({ data: { task, port, ...given } }) => {
  const report = (share) => port.postMessage({ share });
  try {
    const result = await TASKS[task](given, report);
    const moved = task === "forward" ? buffersOf(result) : [];
    port.postMessage({ result }, moved);
  } catch (error) {
    lastKey = "";
    const { message, problem, fields } = error;
    port.postMessage({ error: message, problem, fields });
  }
});
