// The thread in which the model runs. Answers {task, port, …given} on its port with {result} or {error}.

let vit = null;
let ran = ""; // the key of the latest forward: its photo and switched-off heads

// The task of a function of the latest forward. If another came between, that with this key runs again.
const after = (use) => (given) => {
  if (ran !== given.key) TASKS.forward(given);
  return use(given);
};
const TASKS = {
  async open({ about, weights, wasm }) {
    vit = await Vit.open(about, weights, wasm);
  },

  // A file as the model's input, its picture for the page, and what to say about it.
  async photo({ bytes, ready }) {
    const image = await decoded(bytes),
      { input, seen } = prepared(image, vit, ready);
    return {
      input,
      seen,
      picture: await pictured(seen, vit.image[0]),
      clear: image.clear,
      exact: image.exact,
    };
  },

  forward({ key, input, off, mean }) {
    ran = key;
    return vit.forward(input, off, mean);
  },
  why: after((given) => why(vit, given)),
  contributions: after((given) => contributions(vit, given)),
  stream: after(({ at }) => vit.stream(at)),
  lens: after(({ targets }) =>
    Array.from({ length: vit.layers }, (_, layer) => lens(vit, layer, targets)),
  ),
};

addEventListener("message", async ({ data: { task, port, ...given } }) => {
  try {
    port.postMessage({ result: await TASKS[task](given) });
  } catch (error) {
    ran = "";
    port.postMessage({ error: error.message });
  }
});
