"""The pictures of the README: the inspection of the bundled model, and the explorer in motion.

    python -m experiments.readme_picture

The inspection has two pixels for each of the page's, so the README shows it at half its width. Of the sample
photographs it takes those whose class the model predicts right. The explorer is recorded in Chromium.
"""

import argparse
import io
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from PIL import Image, ImageDraw
from playwright.sync_api import Page, sync_playwright

from experiments.explorer import CHOOSE, MENU

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from browser.fronts import App, chromium, move  # the tests' own way to open an application

from vitlens import load_model, plot, report
from vitlens.images import samples
from vitlens.report import SHARP

RIGHT = ("chelsea", "coffee", "china")
"""Samples whose class the bundled model predicts right: a cat, an espresso, a palace."""
SIZE = {"width": 1180, "height": 880}
SHOWN = 1.7
"""Seconds of a frame."""


def inspection(model: str, out: Path) -> None:
    found = report.inspect(load_model(model), [(name, samples()[name]) for name in RIGHT])
    figure = plot.inspected({found.model: found})
    figure.savefig(pixels := io.BytesIO(), dpi=SHARP)
    picture = Image.open(pixels).convert("RGB")
    picture.save(
        out, quality=76, subsampling=0, optimize=True, progressive=True
    )  # a quarter of a PNG


def explorer(model: str, out: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        samples()["chelsea"].save(cat := Path(folder) / "cat.png")
        page = chromium(playwright).new_page(viewport=SIZE)
        page.set_default_timeout(120_000)
        with App(model, Path(folder), cat) as app:
            page.goto(app.opening)
            page.wait_for_selector(".vitlens .stage")
            frames = [frame.convert("RGB") for frame in recorded(page)]
            page.close()
    first, *others = frames
    first.save(
        out,
        save_all=True,
        append_images=others,
        duration=int(1000 * SHOWN),
        loop=0,
        quality=80,
        method=6,
    )


def recorded(page: Page) -> Iterator[Image.Image]:
    """A frame after each action: clicks on patches, other layers, a head, other views."""
    place = [0.5, 0.5]

    def frame() -> Image.Image:
        page.wait_for_timeout(900)  # the animations of the page
        image = Image.open(io.BytesIO(page.screenshot()))
        box = page.locator(".picture canvas").bounding_box()
        x, y = box["x"] + place[0] * box["width"], box["y"] + place[1] * box["height"]
        pointer = [(0, 0), (0, 17), (4, 13), (7, 20), (10, 19), (7, 12), (12, 12)]
        ImageDraw.Draw(image).polygon([(x + dx, y + dy) for dx, dy in pointer], "white", "black")
        return image

    def click(x: float, y: float) -> Image.Image:
        place[:] = x, y
        box = page.locator(".picture canvas").bounding_box()
        page.mouse.click(box["x"] + x * box["width"], box["y"] + y * box["height"])
        return frame()

    move(page, "layer", 8)
    yield click(0.32, 0.4)
    yield click(0.78, 0.44)
    yield click(0.56, 0.8)
    for layer in (2, 10):
        move(page, "layer", layer)
        yield frame()
    for view in ("rollout", "lens", "contributions"):
        page.evaluate(CHOOSE, ["view", MENU[view]])
        yield frame()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--out", type=Path, default=Path("data/results"))
    options = parser.parse_args(arguments)
    for draw, name in ((inspection, "inspection.jpg"), (explorer, "explorer.webp")):
        draw(options.model, options.out / name)
        print(f"Wrote {options.out / name}, {(options.out / name).stat().st_size // 1000} kB.")


if __name__ == "__main__":
    main()
