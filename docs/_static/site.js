// A button above a still image puts the live page in its place, which nothing loads before.
const root = document.documentElement;
for (const place of document.querySelectorAll(".live[data-page]")) {
  place.querySelector("button").onclick = ({ target }) => {
    const frame = document.createElement("iframe");
    frame.src = place.dataset.page;
    frame.title = "The explorer with the model in the page";
    const paint = () => {
      // not in a site opened from disk, where frames have origins of their own
      if (frame.contentDocument)
        frame.contentDocument.documentElement.style.colorScheme = root.dataset.theme;
    };
    frame.onload = paint;
    new MutationObserver(paint).observe(root, { attributeFilter: ["data-theme"] });
    place.querySelector("img").replaceWith(frame);
    target.remove();
  };
}
// A site opened from disk may not read its pages for the excerpts of a search.
if (location.protocol === "file:" && typeof DOCUMENTATION_OPTIONS !== "undefined") {
  DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
}
// On a narrow screen a tap enlarges a figure, and another one makes it small again.
for (const figure of document.querySelectorAll(".cell_output img, .bd-article section > p > img"))
  figure.onclick = () => figure.classList.toggle("full");
// What scrolls sideways can be reached with the keyboard, also formulas, which are drawn late.
const reach = new ResizeObserver(() => {
  for (const region of document.querySelectorAll(
    ".bd-article :is(.cell_output, .output, div.math, mjx-container)",
  ))
    if (region.scrollWidth > region.clientWidth) region.tabIndex = 0;
});
for (const article of document.querySelectorAll(".bd-article")) reach.observe(article);
