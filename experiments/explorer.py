"""The explorer's latency with a kernel, from a click or an upload to the last write to a canvas.

    python -m experiments.explorer --out data/results/explorer.csv

JupyterLab and Chromium run on this machine. A click counts from the pointer's event, in the browser's own clock, an
upload from the choice of the file. Every number is a median. load: of the minute before. ViT-Ti/16 at 224 pixels and
ViT-B/16 at 1024 (random weights: they cost the same), the second beside one plain forward of the same model in the same
kernel. Of the first also what heads write, the classes by layer and the switches of heads: each click turns one more
head, so the model runs anew. Memory is the resident size of the kernel before, after 50 and after 200 interactions.
"""

import base64
import io
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil
from playwright.sync_api import Page, sync_playwright

from experiments.results import about, command, parser, write

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from browser.fronts import Front, chromium, notebook  # the tests' own way to open an application

from vitlens.images import samples
from vitlens_explorer.heads_off import WAYS, replacement_words
from vitlens_explorer.views import INSIDE, VIEWS

CELL = """
import json, os, time, timm, torch
import vitlens_explorer as widgets
from vitlens.models import preprocess
from vitlens.images import samples
model = timm.create_model({name!r}, img_size={size}, num_classes=1000).eval()
explorer = widgets.explore(model)
explorer
"""
FORWARD = """
x = preprocess(model, samples()["astronaut"], size=({size}, {size}))
def once():
    start = time.perf_counter()
    with torch.inference_mode():
        model(x)
    return time.perf_counter() - start
once(); taken = sorted(once() for _ in range(5))[2]
open("forward.json", "w").write(json.dumps([taken, os.getpid()]))
"""
CHANGED = """
    const root = document.querySelector(".vitlens"), before = root.dataset.answers;
    const changed = new Promise((done) => new MutationObserver((_, observer) => {
        if (root.dataset.answers === before) return; // it is set after the last write to a canvas
        observer.disconnect();
        done(performance.now());
    }).observe(root, { attributes: true }));
"""
CLICK = f"""async ([row, col, rows, cols]) => {{ {CHANGED}
    const canvas = root.querySelector(".picture canvas"), box = canvas.getBoundingClientRect();
    const x = box.left + ((col + 0.5) / cols) * box.width, y = box.top + ((row + 0.5) / rows) * box.height;
    const start = performance.now();
    canvas.dispatchEvent(
        new PointerEvent("pointerdown", {{ clientX: x, clientY: y, button: 0, buttons: 1, bubbles: true }}));
    return (await changed) - start;
}}"""
PRESS = f"""async ([selector, index]) => {{ {CHANGED}
    const node = root.querySelectorAll(selector)[index];
    const start = performance.now();
    node.dispatchEvent(new MouseEvent("click", {{ bubbles: true }}));
    return (await changed) - start;
}}"""
TURN = f"""async ([layer, head]) => {{ {CHANGED}
    const stage = root.querySelector(".stage"), box = stage.getBoundingClientRect();
    const [columns, rows] = [".across span", ".down span"].map((tiles) => root.querySelectorAll(tiles).length);
    const clientX = box.left + ((layer + 0.5) / columns) * box.width;
    const clientY = box.top + ((head + 2.5) / rows) * box.height;
    const start = performance.now();
    stage.dispatchEvent(new MouseEvent("contextmenu", {{ clientX, clientY, bubbles: true, cancelable: true }}));
    return (await changed) - start;
}}"""
CHOOSE = f"""async ([control, text]) => {{ {CHANGED}
    const nodes = root.querySelectorAll(`[data-control=${{control}}] :is(option, [data-view])`);
    const node = [...nodes].find((each) => each.textContent === text);
    if (!node) throw new Error(`${{control}} has no ${{text}}`);
    const select = node.closest("select");
    if (select ? node.selected : node.ariaPressed === "true") return 0;
    const start = performance.now();
    if (select) node.selected = true;
    (select || node).dispatchEvent(new Event(select ? "change" : "click", {{ bubbles: true }}));
    return (await changed) - start;
}}"""
SLIDE = f"""async (layer) => {{ {CHANGED}
    const input = root.querySelector("[data-control=layer] input");
    input.value = layer;
    const start = performance.now();
    input.dispatchEvent(new Event("input"));
    return (await changed) - start;
}}"""
UPLOAD = f"""async (bytes) => {{ {CHANGED}
    const moved = new DataTransfer();
    const data = Uint8Array.from(atob(bytes), (c) => c.charCodeAt(0));
    moved.items.add(new File([data], "photo.jpg", {{ type: "image/jpeg" }}));
    const start = performance.now();
    root.dispatchEvent(new DragEvent("drop", {{ dataTransfer: moved, bubbles: true, cancelable: true }}));
    return (await changed) - start;
}}"""
MENU = {name: view.entry or view.title for name, view in (VIEWS | INSIDE).items()}
SWITCHES = 30
CASES = {
    "vit_tiny_patch16_224": (224, 30, 5),
    "vit_base_patch16_224": (1024, 7, 1),
}  # pixels, clicks, uploads


def clicks(page: Page, rng: np.random.Generator, side: int, count: int) -> list[float]:
    """Seconds from a click on a random patch to the new picture."""
    return [
        page.evaluate(CLICK, [*map(int, rng.integers(side, size=2)), side, side]) / 1000
        for _ in range(count)
    ]


def inside(
    page: Page, rng: np.random.Generator, side: int, count: int, switches: int = SWITCHES
) -> Iterator[tuple[str, list[float]]]:
    """(action, seconds) of the views of heads and classes and of the switches."""

    def pressed(selector: str, numbers: Iterable[int]) -> list[float]:
        return [page.evaluate(PRESS, [selector, int(number)]) / 1000 for number in numbers]

    page.evaluate(CHOOSE, ["view", MENU["lens"]])
    yield "click, classes by layer", clicks(page, rng, side, count)
    page.evaluate(CHOOSE, ["view", MENU["contributions"]])
    yield "another class, contributions", pressed(".bars:not(.layers) button", range(1, 5))
    yield "bar of a head, contributions", pressed(".parts .goes", rng.permutation(36)[:count])
    page.evaluate(CHOOSE, ["view", MENU["attention"]])

    def turned(numbers):
        return [page.evaluate(TURN, [*divmod(int(number), 3)]) / 1000 for number in numbers]

    turned([0, 35])  # the means are taken with the first
    for way in WAYS:
        page.evaluate(CHOOSE, ["way", replacement_words(way)])
        yield f"switch of a head, {way}", turned(rng.permutation(35)[:switches])
    pressed(".mosaic .actions > .button", [1])


def photographs(count: int) -> list[str]:
    """Pictures of 4 megapixels, each another, as base64."""
    found = []
    for k, image in enumerate(list(samples().values())[:count]):
        image.resize((2400 + k, 1700)).save(file := io.BytesIO(), "JPEG", quality=85)
        found.append(base64.b64encode(file.getvalue()).decode())
    return found


def measured(name: str, front: Front, page: Page, tiny: bool) -> list[dict]:
    """One row for each thing that was timed, and the memory after numbers of interactions."""
    size, count, uploads = CASES[name]
    marks, switches = (0, 50, 200), SWITCHES
    if tiny:
        count, uploads, marks, switches = 2, 1, (0, 2, 6), 2
    side, rng, rows = size // 16, np.random.default_rng(0), []
    front.open(page, f"{name}.ipynb")
    page.set_default_timeout(600_000)
    page.wait_for_selector(".vitlens .stage")
    while not (front.folder / "forward.json").exists():
        page.wait_for_timeout(200)
    page.wait_for_timeout(500)
    forward, pid = json.loads((front.folder / "forward.json").read_text(encoding="utf-8"))
    (front.folder / "forward.json").unlink()

    def row(what: str, seconds: list[float]) -> None:
        middle = statistics.median(seconds)
        rows.append(
            {
                "model": name,
                "pixels": size,
                "what": what,
                "seconds": round(middle, 3),
                "of_a_forward": round(middle / forward, 3),
                "slowest": round(max(seconds), 3),
                "times": len(seconds),
                "mib": "",
                "load": os.getloadavg()[0],
            }
        )
        print(rows[-1], flush=True)

    row("forward", [forward])
    for view in ("attention", "similarity", "rollout"):
        page.evaluate(CHOOSE, ["view", MENU[view]])
        row(f"click, {view}", clicks(page, rng, side, count))
    page.evaluate(CHOOSE, ["view", MENU["received"]])
    row("another layer, received", [page.evaluate(SLIDE, k) / 1000 for k in range(10)])
    page.evaluate(CHOOSE, ["view", MENU["attention"]])
    row("upload", [page.evaluate(UPLOAD, each) / 1000 for each in photographs(uploads)])
    if size == 224:
        for what, seconds in inside(page, rng, side, count, switches):
            row(what, seconds)
        memory, kernel = {0: psutil.Process(pid).memory_info().rss}, psutil.Process(pid)
        for k in range(1, marks[-1] + 1):
            if k % 5 == 0:
                page.evaluate(CHOOSE, ["view", MENU[str(rng.choice(list(VIEWS)))]])
            elif k % 7 == 0:
                page.evaluate(SLIDE, int(rng.integers(12)))
            elif page.locator(".vitlens .picture.picks").count():
                clicks(page, rng, side, 1)
            memory[k] = kernel.memory_info().rss
        for k in marks:
            rows.append(
                {
                    "model": name,
                    "pixels": size,
                    "what": f"memory after {k} interactions",
                    "mib": round(memory[k] / 2**20, 1),
                }
            )
            print(rows[-1], flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--model", choices=list(CASES), action="append", help="one of them only")
    options = options.parse_args(arguments)
    options.model = ["vit_tiny_patch16_224"] if options.tiny else options.model
    rows = []
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        for name in options.model or CASES:
            size = CASES[name][0]
            cells = CELL.format(name=name, size=size), FORWARD.format(size=size)
            Path(folder, f"{name}.ipynb").write_text(notebook(*cells), encoding="utf-8")
        front, browser = Front("lab", Path(folder)), chromium(playwright)
        try:
            for name in options.model or CASES:
                page = browser.new_page(viewport={"width": 1400, "height": 1000})
                rows += measured(name, front, page, options.tiny)
                page.close()
        finally:
            browser.close()
            front.stop()
    how = about(command("experiments.explorer", arguments))
    write(options.out, [row | how for row in rows])


if __name__ == "__main__":
    main()
