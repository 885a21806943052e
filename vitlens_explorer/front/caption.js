// A caption of two parts: a sentence in plain words, and the exact one in a fold below it.

import { make } from "./elements.js";

// {node, show({words, plain})}. Without plain words, the exact ones are shown. The fold stays as the user left it.
export function makeCaption(tag, attributes = {}) {
  const plain = make("p", { class: "plain" });
  const words = make("p", { class: "exact" });
  const fold = make("details", { class: "exactly" }, make("summary", {}, "Exactly"));
  const node = make(tag, { ...attributes, "aria-live": "polite" }, plain, fold);

  const show = (sentences) => {
    plain.hidden = !sentences.plain;
    plain.textContent = sentences.plain;
    fold.hidden = !sentences.plain;
    words.textContent = sentences.words;
    const place = sentences.plain ? fold : node;
    if (words.parentNode !== place) place.append(words);
  };
  return { node, show };
}
