"""Times of a live page in Chromium: from an event to the last write to a canvas, and the forward of its model.

    python -m experiments.page --out data/results/page.csv

The bundled ViT-Ti/16 at 224 pixels, opened from disk. "ready" counts from the start of the navigation, a click from the
pointer's event. The forward runs on one thread, in a worker. Times are in milliseconds. load: of the minute before.
"""

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from playwright.sync_api import Browser, sync_playwright

from experiments.results import about, command, parser, write

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from browser.fronts import chromium

from vitlens import load_model
from vitlens.images import samples
from vitlens_explorer.live import save_live_page

WATCH = """
window.written = 0;
for (const name of ["putImageData", "drawImage"]) {
    const draw = CanvasRenderingContext2D.prototype[name];
    CanvasRenderingContext2D.prototype[name] = function (...given) {
        draw.apply(this, given);
        if (this.canvas.isConnected) window.written = performance.now();
    };
}
window.lastWrite = async (start) => { // when no canvas has changed for 300 ms
    do await new Promise((done) => setTimeout(done, 5));
    while (written <= start || performance.now() - written < 300);
    return written - start;
};
"""
CLICK = """([row, col]) => {
    const canvas = document.querySelector(".picture canvas"), box = canvas.getBoundingClientRect();
    const clientX = box.left + ((col + 0.5) / 14) * box.width, clientY = box.top + ((row + 0.5) / 14) * box.height;
    const start = performance.now();
    canvas.dispatchEvent(new PointerEvent("pointerdown", { clientX, clientY, button: 0, buttons: 1, bubbles: true }));
    canvas.dispatchEvent(new PointerEvent("pointerup", { clientX, clientY, button: 0, bubbles: true }));
    return lastWrite(start);
}"""
VIEW = "view => (document.querySelector('#page').source.send({ set: { view } }), lastWrite(performance.now()))"
FORWARDS = """async (count) => {
    const { ask, photos } = document.querySelector("#page").source.page;
    const copy = ({ buffer, byteOffset, byteLength }) => buffer.slice(byteOffset, byteOffset + byteLength), times = [];
    const { input } = await ask("photo", { bytes: copy(photos[0].file), ready: true });
    for (let k = 0; k < count; k += 1) {
        const start = performance.now();
        await ask("forward", { key: String(k), input, off: [], mean: false });
        times.push(performance.now() - start);
    }
    return times.slice(10); // without those before the browser has compiled the code a second time
}"""


def measured(browser: Browser, path: Path, count: int) -> Iterator[tuple[str, list[float]]]:
    """(action, milliseconds of each time)."""
    ready = []
    for _ in range(max(2, count // 10)):
        size = {"width": 1400, "height": 1000}
        page = browser.new_page(viewport=size, reduced_motion="reduce")  # without the first gesture
        page.add_init_script(WATCH)
        page.goto(path.as_uri())
        ready.append(page.evaluate("lastWrite(0)"))
    yield "ready", ready
    for view in ("attention", "rollout"):
        page.evaluate(VIEW, view)
        page.evaluate(CLICK, [0, 0])  # computes what later clicks use
        places = np.random.default_rng(0).integers(14, size=(count, 2)).tolist()
        yield f"click, {view}", [page.evaluate(CLICK, place) for place in places]
    yield "forward", page.evaluate(FORWARDS, count + 10)


def main(arguments: Sequence[str] | None = None) -> None:
    options, rows = parser(__doc__).parse_args(arguments), []
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        save_live_page(
            load_model(), {"chelsea": samples()["chelsea"]}, path := Path(folder, "page.html")
        )
        browser = chromium(playwright)
        for what, times in measured(browser, path, 2 if options.tiny else 50):
            median, p95 = np.percentile(times, [50, 95]).round(1)
            rows.append(
                {
                    "what": what,
                    "median": median,
                    "p95": p95,
                    "times": len(times),
                    "load": os.getloadavg()[0],
                }
            )
        how = {"browser": f"Chromium {browser.version}"} | about(
            command("experiments.page", arguments)
        )
        write(options.out, [row | how for row in rows])


if __name__ == "__main__":
    main()
