"""Times and memory of models that are opened in a blank page from their own files, in Chromium.

    python -m experiments.page_models --out data/results/page-models.csv

Models have random weights, stored in float32, at 224 pixels. "open" counts from the drop of the files to the first map,
"photo" from the upload of a photo to its first map, "forward" is the model alone on one thread. Times are in
milliseconds. "CPU" is the processor time of the tab for the same, which depends less on what else the machine does.
Memory is the peak of the tab over that of the blank page, in MB and as a share of the weights: "open" with the first
photo, "photos" after all of them. load: of the minute before.
"""

import base64
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil
import timm
import torch
import transformers
from playwright.sync_api import Browser, Page, sync_playwright
from timm.models import save_for_hf
from torch import nn

from experiments.page import WATCH, chromium
from experiments.results import about, command, parser, write
from vitlens_explorer.live import save_blank_page
from vitlens_explorer.photos import FOLDER as PHOTOS

PROCESSOR = {
    "image_processor_type": "BitImageProcessor",
    "size": {"shortest_edge": 256},
    "crop_size": {"height": 224, "width": 224},
}
WATCH_DROP = "addEventListener('drop', () => (window.dropped = performance.now()), true);"
UPLOAD = """async ([text, number]) => {
    const { source } = document.querySelector("#page");
    const bytes = Uint8Array.from(atob(text), (sign) => sign.charCodeAt(0));
    const start = performance.now();
    const upload = { upload: `${number}.jpg`, file: number, at: 0, of: bytes.length, number };
    source.send(upload, undefined, [new DataView(bytes.buffer)]);
    while (source.get("frame").answers !== number) await new Promise((done) => setTimeout(done, 5));
    return lastWrite(start); // the photo itself is drawn before its map
}"""
FORWARD = """async () => {
    const { ask, photos } = document.querySelector("#page").source.page;
    const { buffer, byteOffset, byteLength } = photos[0].file;
    const bytes = buffer.slice(byteOffset, byteOffset + byteLength);
    window.input ||= (await ask("photo", { bytes })).input;
    const start = performance.now();
    await ask("forward", { key: "", input, off: [], mean: false });
    return performance.now() - start;
}"""
FIRST_NUMBER = 10**15
"""Number of the first message, larger than those of the page."""
OPENINGS = 2
READY = ".vitlens[data-answers]"
TIMED = "open", "photo", "forward"
QUANTITIES = [*TIMED, *(f"{name}, CPU" for name in TIMED), "open, memory", "photos, memory"]


def write_timm(name: str, folder: Path) -> nn.Module:
    model = timm.create_model(name)
    save_for_hf(model, folder, safe_serialization=True)
    return model


def write_dinov2(name: str, folder: Path) -> nn.Module:
    config = transformers.Dinov2Config(
        hidden_size=384, num_attention_heads=6, image_size=518, patch_size=14
    )
    model = transformers.Dinov2Model(config)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR), encoding="utf-8")
    return model


Writer = Callable[[str, Path], nn.Module]
MODELS: dict[str, Writer] = {
    "vit_tiny_patch16_224": write_timm,
    "vit_base_patch16_224": write_timm,
    "Dinov2Model, S/14": write_dinov2,
}
TINY: dict[str, Writer] = {"test_vit": write_timm}


def drop(page: Page, folder: Path) -> None:
    """Drop a folder on the page as a person does."""
    session = page.context.new_cdp_session(page)
    data = {"items": [], "files": [str(folder)], "dragOperationsMask": 1}
    for step in ("dragEnter", "dragOver", "drop"):
        session.send("Input.dispatchDragEvent", {"type": step, "x": 300, "y": 200, "data": data})
    session.detach()


def tab_process(browser: Browser) -> int:
    """Process number of the tab that holds the most memory."""
    session = browser.new_browser_cdp_session()
    processes = session.send("SystemInfo.getProcessInfo")["processInfo"]
    session.detach()
    tabs = [process["id"] for process in processes if process["type"] == "renderer"]
    return max(tabs, key=lambda number: psutil.Process(number).memory_info().rss)


def peak_memory(process: int) -> float:
    """Peak resident size of a process in MB (Linux only)."""
    status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e6


class Tab:
    """A blank page with a Chromium process of its own."""

    def __init__(self, browser: Browser, blank: Path):
        size = {"width": 1400, "height": 1000}
        self.page = browser.new_page(viewport=size, reduced_motion="reduce")  # no first gesture
        self.page.add_init_script(WATCH + WATCH_DROP)
        self.page.goto(blank.as_uri())
        self.page.wait_for_selector(".blank")
        self.process = tab_process(browser)
        self.before = peak_memory(self.process)

    def grown(self) -> float:
        """MB by which the peak has grown since the page was blank."""
        return peak_memory(self.process) - self.before

    def cpu(self) -> float:
        """Processor time of all threads so far, in milliseconds."""
        times = psutil.Process(self.process).cpu_times()
        return 1000 * (times.user + times.system)

    def open(self, folder: Path) -> float:
        """Milliseconds from the drop of a model to its first map."""
        drop(self.page, folder)
        self.page.wait_for_selector(READY, timeout=120_000)
        return self.page.evaluate("lastWrite(dropped)")

    def upload(self, photo: str, number: int) -> float:
        """Milliseconds from the upload of a photo to its first map."""
        return self.page.evaluate(UPLOAD, [photo, number])

    def forward(self) -> float:
        """Milliseconds of a forward."""
        return self.page.evaluate(FORWARD)


def measured(
    browser: Browser, blank: Path, folder: Path, photo: str, count: int
) -> Iterator[tuple[str, list[float]]]:
    """(quantity, values). photo: a file in base64. count: number of photos and of forwards."""
    values: dict[str, list[float]] = {name: [] for name in QUANTITIES}
    for _ in range(OPENINGS):
        tab = Tab(browser, blank)
        time_call(values, "open", tab, lambda tab=tab: tab.open(folder))
        values["open, memory"].append(tab.grown())
        for number in range(FIRST_NUMBER, FIRST_NUMBER + count):
            time_call(values, "photo", tab, lambda tab=tab, n=number: tab.upload(photo, n))
        values["photos, memory"].append(tab.grown())
        tab.forward()  # reads the photo
        for _ in range(count):
            time_call(values, "forward", tab, tab.forward)
        tab.page.close()
    yield from values.items()


def time_call(
    values: dict[str, list[float]], what: str, tab: Tab, call: Callable[[], float]
) -> None:
    """Append the milliseconds that a call returns, and the processor time of the tab in it."""
    before = tab.cpu()
    values[what].append(call())
    values[f"{what}, CPU"].append(tab.cpu() - before)


def rows_of(
    model: str, weights: float, quantities: Iterator[tuple[str, list[float]]]
) -> Iterator[dict]:
    """A row for each quantity of a model, and one for its memory as a share of its weights, in MB."""
    for what, values in quantities:
        yield row_of(model, what, values, digits=1)
        if "memory" in what:
            yield row_of(
                model, f"{what} / weights", [value / weights for value in values], digits=2
            )


def row_of(model: str, what: str, values: list[float], digits: int) -> dict:
    median, p95 = np.percentile(values, [50, 95]).round(digits)
    load = round(os.getloadavg()[0], 2)
    return dict(model=model, what=what, median=median, p95=p95, times=len(values), load=load)


def weights_size(model: nn.Module) -> float:
    """Size of a model's parameters in float32, in MB."""
    return sum(parameter.numel() for parameter in model.parameters()) * 4 / 1e6


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__).parse_args(arguments)
    models, count = (TINY, 2) if options.tiny else (MODELS, 3)
    photo = base64.b64encode((PHOTOS / "dog.jpg").read_bytes()).decode()
    rows = []
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        blank = save_blank_page(Path(temporary, "blank.html"))
        browser = chromium(playwright)
        how = {"browser": f"Chromium {browser.version}"}
        for number, (name, write_model) in enumerate(models.items()):
            torch.manual_seed(0)
            folder = Path(temporary, f"model{number}")
            model = write_model(name, folder)
            quantities = measured(browser, blank, folder, photo, count)
            rows += rows_of(name, weights_size(model), quantities)
        browser.close()
    how |= {"transformers": transformers.__version__}
    how |= about(command("experiments.page_models", arguments))
    write(options.out, [row | how for row in rows])


if __name__ == "__main__":
    main()
