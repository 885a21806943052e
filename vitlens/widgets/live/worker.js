// The thread in which the model runs. Answers {number, task, ...given} with {number, result} or {number, error}.

let vit = null;
let ran = ""; // the key of the latest forward: its photo and switched-off heads

const TASKS = {
  async open({ about, weights, wasm }) {
    vit = await Vit.open(about, weights, wasm);
  },

  // A file as the model's input, its picture for the page, and what to say about it.
  async photo({ bytes, ready }) {
    const image = await decoded(bytes), { input, seen } = prepared(image, vit, ready);
    return { input, picture: await pictured(seen, vit.image[0]), clear: image.clear, exact: image.exact };
  },

  forward({ key, input, off, mean }) {
    ran = key;
    return vit.forward(input, off, mean);
  },

  // What is made from the latest forward. If another came between, that with this key runs again.
  why({ target, against, ...forward }) {
    if (ran !== forward.key) TASKS.forward(forward);
    return why(vit, target, against);
  },
  contributions({ target, against, ...forward }) {
    if (ran !== forward.key) TASKS.forward(forward);
    return contributions(vit, target, against);
  },
  lens({ targets, ...forward }) {
    if (ran !== forward.key) TASKS.forward(forward);
    return Array.from({ length: vit.layers }, (_, layer) => lens(vit, layer, targets));
  },
};

addEventListener("message", async ({ data: { number, task, ...given } }) => {
  try {
    postMessage({ number, result: await TASKS[task](given) });
  } catch (error) {
    ran = "";
    postMessage({ number, error: error.message });
  }
});
