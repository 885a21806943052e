// The thread in which the model runs. Answers {task, port, …given} on its port with {result} or {error}.

let vit = null;
let lastKey = ""; // of the latest forward: its photo and switched-off heads

function runForward({ key, input, off, mean }) {
  lastKey = key;
  return vit.forward(input, off, mean);
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
  async open({ about, weights, wasm, probes }) {
    vit = await Vit.open(about, tensorsOf(about.tensors, weights), wasm);
    await prove(probes);
  },

  // The description of a dropped model, which the worker runs from here on: {about, notes, labels, imagenet}. After a
  // refusal it runs the model before.
  async read({ files, size = null, wasm }) {
    const { tensors, ...model } = await openFiles(files, size);
    vit = await Vit.open(model.about, tensors, wasm);
    lastKey = "";
    return model;
  },

  // A file as the model's input, its picture for the page, and what to say about it.
  async photo({ bytes, ready }) {
    const image = await decode(bytes);
    const { input, seen } = preprocess(image, vit, ready);
    const picture = await encodePicture(seen, vit.image[0]);
    return { ...image, data: null, input, seen, picture };
  },

  forward: runForward,
  // The logits of an image with only some patches shown, the others in its mean color.
  covered({ input, shown, off, mean }) {
    lastKey = "";
    const { logits } = vit.forward(coverPatches(vit, input, shown), off, mean);
    return { logits };
  },
  why: withClasses((given) => explainClass(vit, given)),
  contributions: withClasses((given) => decompose(vit, given)),
  stream: afterForward(({ at }) => vit.stream(at)),
  lens: withClasses(({ targets }) =>
    Array.from({ length: vit.layers }, (_, layer) => readLens(vit, layer, targets)),
  ),
};

addEventListener("message", async ({ data: { task, port, ...given } }) => {
  try {
    port.postMessage({ result: await TASKS[task](given) });
  } catch (error) {
    lastKey = "";
    const { message, problem, fields } = error;
    port.postMessage({ error: message, problem, fields });
  }
});
