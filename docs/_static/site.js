// A button below a still image puts the live page in its place, which nothing loads before.
for (const place of document.querySelectorAll(".live[data-page]")) {
  place.querySelector("button").onclick = ({ target }) => {
    const frame = document.createElement("iframe");
    frame.src = place.dataset.page;
    frame.title = "The explorer with the model in the page";
    place.querySelector("img").replaceWith(frame);
    target.remove();
  };
}
