"""Front ends for the browser tests, the actions and texts of a user, and Python's numbers to compare with.

JupyterLab and Notebook 7 get a separate home directory each.
"""

import base64
import contextlib
import functools
import io
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import matplotlib as mpl
import nbformat
import numpy as np
import psutil
import pytest
import torch
from axe_playwright_python.sync_playwright import Axe
from PIL import Image
from support import Served, unfused_maps

from vitlens import load_model
from vitlens.faithfulness import curves
from vitlens.models import preprocess, restore
from vitlens.recorder.supported import token_grid
from vitlens_explorer import in_page, live
from vitlens_explorer.drawing import enlarged_png
from vitlens_explorer.explorer import Explorer

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
MARKS = pytest.mark.skipif(
    os.environ.get("NO_BROWSER") == "1", reason="NO_BROWSER=1 leaves out what needs a browser"
)
START, PATIENCE = 180_000, 60_000
"""Milliseconds until a page that does not come up, or does not answer, counts as broken."""
PYTHON = ("app", "lab", "notebook")
"""Front ends whose model runs in Python."""
READY = """() => {
    const session = window.jupyterapp?.shell?.currentWidget?.sessionContext;
    return session?.isReady && session.session?.kernel?.connectionStatus === "connected"
        && session.session.kernel.status === "idle";
}"""


def notebook(*cells: str) -> str:
    """An .ipynb file with these code cells."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    made = [nbformat.v4.new_code_cell(cell) for cell in cells]
    return nbformat.writes(nbformat.v4.new_notebook(cells=made, metadata={"kernelspec": kernel}))


def chromium(playwright):
    """$CHROMIUM, then `chromium` on the path, then Playwright's own."""
    path = os.environ.get("CHROMIUM") or shutil.which("chromium")
    return playwright.chromium.launch(executable_path=path, args=FLAGS)


SETTINGS = {
    "apputils-extension/notification": {
        "fetchNews": "false"
    },  # a toast of news would cover the page
    "notebook-extension/tracker": {
        "windowingMode": "none"
    },  # cells out of sight keep their outputs
    "docmanager-extension/plugin": {"autosave": False},  # files change when a test saves them
}
"""Settings of JupyterLab and Notebook by their place."""


def press_share(root, name):
    """Press a button of the fold "Save or share" of a page or a widget."""
    root.locator(".sharing").first.evaluate("fold => { fold.open = true; }")
    root.locator(".sharing").get_by_role("button", name=name, exact=True).click()


class Front:
    """A running application. kind: "lab" or "notebook"."""

    def __init__(self, kind: str, folder: Path):
        self.kind, self.folder, self.token = kind, folder, secrets.token_hex(8)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        home = folder / ".home"
        names = (
            "HOME",
            "JUPYTER_CONFIG_DIR",
            "JUPYTER_DATA_DIR",
            "JUPYTER_RUNTIME_DIR",
            "IPYTHONDIR",
        )
        places = {name: str(home / name.lower()) for name in names}
        for place in places.values():
            Path(place).mkdir(parents=True, exist_ok=True)
        user = Path(places["JUPYTER_CONFIG_DIR"], "lab/user-settings/@jupyterlab")
        for name, settings in SETTINGS.items():
            path = user / f"{name}.jupyterlab-settings"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(settings))
        common = [
            f"--ServerApp.port={self.port}",
            "--ServerApp.port_retries=0",
            "--ServerApp.ip=127.0.0.1",
        ]
        common += [
            f"--IdentityProvider.token={self.token}",
            f"--ServerApp.root_dir={folder}",
            "--no-browser",
        ]
        command = {
            "lab": [
                "jupyterlab",
                *common,
                "--allow-root",
                "--LabApp.expose_app_in_browser=True",
                "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
                "--LabApp.extension_manager=readonly",
            ],
            "notebook": [
                "notebook",
                *common,
                "--allow-root",
                "--JupyterNotebookApp.expose_app_in_browser=True",
            ],
        }[kind]
        self.log = open(folder / f"{kind}.log", "w")  # noqa: SIM115
        environment = (
            os.environ | places | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2")}
        )
        self.process = subprocess.Popen(
            [sys.executable, "-m", *command],
            env=environment,
            start_new_session=True,
            stdout=self.log,
            stderr=self.log,
        )
        for _ in range(240):
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", self.port), 1),
            ):
                return
            assert self.process.poll() is None, (
                f"{kind} stopped:\n{(folder / f'{kind}.log').read_text()[-2000:]}"
            )
            time.sleep(0.5)
        raise AssertionError(f"{kind} did not answer within two minutes")

    def open(self, page, name: str, ready: str = ".vitlens[data-answers]"):
        """Open a notebook of the folder, run all its cells and wait for a widget."""
        page.set_default_timeout(START)
        place = "lab/tree" if self.kind == "lab" else "notebooks"
        page.goto(
            f"{self.address}/{place}/{name}?token={self.token}" + "&reset" * (self.kind == "lab")
        )
        page.wait_for_function(READY)
        page.evaluate("void window.jupyterapp.commands.execute('notebook:run-all-cells')")
        failed = "[data-mime-type='application/vnd.jupyter.error']"
        page.wait_for_selector(f"{ready}, {failed}")
        assert not page.locator(failed).count(), page.locator(failed).first.inner_text()
        page.set_default_timeout(PATIENCE)

    def kernels(self) -> list[psutil.Process]:
        """The processes of its kernels."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [each for each in children if "ipykernel" in " ".join(each.cmdline())]

    def stop(self) -> None:
        """End the kernels and the server."""
        with contextlib.suppress(OSError):
            for kernel in json.load(
                urllib.request.urlopen(f"{self.address}/api/kernels?token={self.token}")
            ):
                address = f"{self.address}/api/kernels/{kernel['id']}?token={self.token}"
                urllib.request.urlopen(urllib.request.Request(address, method="DELETE"))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.log.close()


def move(place, control, value):
    """Move a slider of a page, or of a part of it, as a person does."""
    place.locator(f"[data-control={control}] input").evaluate(
        "(node, value) => { node.value = value; node.dispatchEvent(new Event('input')); }", value
    )


def see(place, view):
    """Choose a view, by its button or in the menu of its question."""
    place.locator("[data-control=view]").evaluate(
        """(node, view) => {
            const choice = node.querySelector(`[data-view="${view}"]`), select = choice.closest("select");
            if (select) choice.selected = true;
            (select || choice).dispatchEvent(new Event(select ? "change" : "click"));
        }""",
        view,
    )


def tile(root, layer, head, button="left"):
    """Click a head in the mosaic of all heads."""
    stage = root.locator(".stage")
    stage.scroll_into_view_if_needed()
    box, rows = stage.bounding_box(), root.locator(".down span").count()
    columns = root.locator(".across span").count()
    place = {"x": (layer + 0.5) / columns * box["width"], "y": (head + 2.5) / rows * box["height"]}
    stage.click(position=place, button=button)


def assert_covered(page, root, model, x, maps, target, against=None):
    """Compare the covered photos of a score's chart with the images that `curves` runs the model on, to the pixel."""
    grid, inputs = token_grid(model, tuple(x.shape[-2:])), []
    hook = model.patch_embed.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    both = curves(model, x, maps, target, against=against, step=-(-grid.patches // 14))
    hook.remove()
    full, empty, *between = torch.cat(inputs)[-2 * len(both.counts) + 2 :]
    half = len(both.counts) - 2
    images = {"covered": [full, *between[:half], empty], "revealed": [empty, *between[half:], full]}
    picture = np.asarray(Image.open(io.BytesIO(enlarged_png(restore(model, x)[0]))).convert("RGB"))
    factor, fill = len(picture) // x.shape[-2], restore(model, empty[None, :, :1, :1])[0, 0, 0]
    chart, line = root.locator(".score .plot"), root.locator(".covered p")
    chart.focus()
    for done, values in (("covered", both.deletion[0]), ("revealed", both.insertion[0])):
        for _ in both.counts:
            page.keyboard.press("ArrowLeft")
        for count, seen, value in zip(
            both.counts.tolist(), images[done], values.tolist(), strict=True
        ):
            line.filter(
                has_text=f"{int(100 * count / grid.patches + 0.5)}% of the patches {done}: "
            ).wait_for()
            assert float(line.inner_text().split()[-1]) == pytest.approx(value, rel=0.006)
            data = root.locator(".covered canvas").evaluate(
                "node => node.toDataURL().split(',')[1]"
            )
            found = np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"))
            hidden = (seen == empty).all(0).numpy().repeat(factor, 0).repeat(factor, 1)
            assert hidden.any() == (seen is not full)
            assert np.array_equal(found, np.where(hidden[..., None], fill, picture)), (done, count)
            page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowLeft")  # the pointer finds the same points
    words, box = line.inner_text(), root.locator(".score circle").bounding_box()
    place = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowLeft")
    line.filter(has_text="% of the patches revealed").wait_for()
    page.mouse.move(*place)
    line.filter(has_text=words).wait_for()
    shown = [
        root.locator(f"{kind} canvas").first.evaluate("node => node.toDataURL()")
        for kind in (".picture", ".covered")
    ]
    assert shown[0] == shown[1] and words == root.locator(".under").first.inner_text()
    page.mouse.move(
        *(at - 3 * box["width"] for at in (place[0], root.locator(".score").bounding_box()["y"]))
    )
    chart.blur()
    map_ = root.locator(".picture canvas").first.evaluate("node => node.toDataURL()")
    assert map_ not in shown and root.locator(".picture svg path").count()


class App:
    """`vitlens app` on a model, in a `with` block. Asserts that it ends without an error and with an empty log."""

    killed = False

    def __init__(self, model: Path, folder: Path, *options):
        self.log = folder / f"app-{secrets.token_hex(4)}.log"
        command = [
            sys.executable,
            "-m",
            "vitlens",
            "app",
            str(model),
            "--no-browser",
            *map(str, options),
        ]
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
            )
        self.opening = self.process.stdout.readline().strip()
        self.address = self.opening.split("?")[0]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """End it as Ctrl-C does, unless a test has killed it."""
        if self.killed:
            return
        self.process.send_signal(signal.SIGINT)
        try:
            assert self.process.wait(60) == 0 and self.log.read_text() == ""
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


def faults(page, part: str | None = None) -> list[str]:
    """Rules of axe-core that a page, or a part of it, violates, each with the elements."""
    axe = Axe()
    if page.evaluate("'axe' in window"):
        axe.axe_script = "null"  # a document evaluates the script of 500 kB once
    found = axe.run(page, part).response["violations"]
    return [
        f"{each['id']}: {', '.join(node['html'][:200] for node in each['nodes'])}" for each in found
    ]


opened_model = functools.cache(load_model)


class Widget:
    """The widget of the page with this number, with the actions and texts of a user."""

    def __init__(self, page, number=0, levels=1):
        """number: of the widget in the page. levels: largest difference of a color."""
        self.page, self.root = page, page.locator(".vitlens").nth(number)
        self.levels = levels

    def settle(self):
        """Wait until everything that was requested is shown."""
        node = self.root.element_handle()
        self.page.wait_for_function("node => node.dataset.answers === node.dataset.sent", arg=node)

    def act(self, action):
        """Do something that runs the model, and wait for the answer."""
        before, node = self.root.get_attribute("data-answers"), self.root.element_handle()
        action()
        self.page.wait_for_function(
            "([node, before]) => node.dataset.answers !== before", arg=[node, before]
        )
        self.settle()

    def press(self, *keys):
        for key in keys:
            self.act(lambda key=key: self.page.keyboard.press(key))

    def click(self, row, col, rows=8, cols=8, panel="picture"):
        canvas = self.root.locator(f"[data-panel={panel}] .picture")
        canvas.scroll_into_view_if_needed()
        box = canvas.bounding_box()
        place = {"x": (col + 0.5) / cols * box["width"], "y": (row + 0.5) / rows * box["height"]}
        self.act(lambda: canvas.click(position=place))

    def point(self, row, col):
        """Move the pointer to the middle of a patch of the picture."""
        canvas = self.root.locator("[data-panel=picture] .picture canvas")
        canvas.scroll_into_view_if_needed()
        box = canvas.bounding_box()
        x = box["x"] + (col + 0.5) / 8 * box["width"]
        self.page.mouse.move(x, box["y"] + (row + 0.5) / 8 * box["height"])

    def look(self, layer, head="mean", query=(2, 2)):
        """Show the attention of a layer from a patch. head: a number or "mean"."""
        if not self.text("figcaption .exact").startswith("Attention from the patch"):
            self.act(lambda: see(self.root, "attention"))
        chosen = {"layer": layer, "head": 0 if head == "mean" else 2 + head}
        for control, value in chosen.items():  # the mean and the largest come before head 0
            if self.root.locator(f"[data-control={control}] input").input_value() != str(value):
                self.slide(control, value)
        if query != self.query:
            self.click(*query)

    @property
    def query(self):
        """Row and column of the patch in the caption, or None."""
        found = re.search(r"row (\d+), column (\d+)", self.text("figcaption .exact"))
        return found and (int(found[1]), int(found[2]))

    def choose(self, control, label):
        self.act(
            lambda: self.root.locator(f"[data-control={control}] select").select_option(label=label)
        )

    def slide(self, control, value):
        self.act(lambda: move(self.root, control, value))

    def unfold(self, group):
        """Open a group of controls."""
        self.root.locator(f"[data-fold={group}]").evaluate("node => { node.open = true; }")

    def pixels(self, panel="picture"):
        """(H, W, 3) of the canvas itself."""
        canvas = self.root.locator(f"[data-panel={panel}] .picture canvas")
        data = canvas.evaluate("node => node.toDataURL('image/png').split(',')[1]")
        return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")).astype(int)

    def text(self, part):
        found = self.root.locator(part).first
        return found.text_content() if part.endswith(".exact") else found.inner_text()

    def upload(self, path):
        self.root.locator("input[type=file]").set_input_files(path)

    def until(self, words, part="figcaption"):
        """Wait until a part has these words."""
        self.root.locator(part, has_text=words).first.wait_for()

    def shows(self, wanted):
        """Assert that every pixel is equal, to some levels."""
        found = self.pixels()
        assert found.shape == wanted.shape and np.abs(found - wanted).max() <= self.levels


class Fronts:
    """The explorer of one model in each front end, opened when a test first needs it and then kept."""

    def __init__(self, browser, folder):
        self.browser, self.folder = browser, folder
        self.opened, self.jupyter, self.app, self.errors = {}, {}, None, []

    def __getitem__(self, name):
        """A widget by the name of its front end: "app", "lab", "notebook", "saved" or "live"."""
        if name not in self.opened:
            widget = Widget(self.open(name), levels=1 if name in PYTHON else 2)
            widget.settle()
            widget.name = name
            widget.first = widget.pixels(), widget.text("figcaption .exact")
            self.opened[name] = widget
        return self.opened[name]

    def open(self, name):
        """A page with the explorer."""
        page = self.browser.new_page(viewport={"width": 1400, "height": 1100})
        if name in ("lab", "notebook"):
            self.jupyter[name] = Front(name, self.folder.parent)
            self.jupyter[name].open(page, f"{name}.ipynb", ".jupyter-widgets img")
            page.wait_for_function(
                "() => document.querySelectorAll('.vitlens[data-answers]').length === 3"
            )
        # from now on: Jupyter may have errors while it starts
        page.on("pageerror", lambda error: self.errors.append(f"{name}: {error}"))
        if name == "app":
            page.goto(self.served.opening)
        elif name in ("saved", "live"):
            address = self.written(name).as_uri()
            page.on("console", lambda message: self.errors.append(f"{name}: {message.text}"))
            page.on("request", lambda request: self.visit(request.url, address))
            page.goto(address)
        page.wait_for_selector(".vitlens[data-answers]", timeout=START)
        page.set_default_timeout(PATIENCE)
        return page

    def visit(self, url, address):
        """Count a request of a page as an error, unless it is for the page itself or for a part of it."""
        if url.partition("#")[0] != address and not url.startswith("blob:"):
            self.errors.append(f"{address} requested {url}")

    @property
    def served(self):
        """An app in this process, for as many pages as tests open."""
        if self.app is None:
            self.app = Served(self.folder)
        return self.app

    def written(self, name):
        """The file of a saved or a live page."""
        model, path = opened_model(self.folder), self.folder.parent / f"{name}.html"
        if name == "saved":
            return in_page.write_page(Explorer(model), ["chelsea"], path)
        return live.save_live_page(model, None, path)

    def end_python(self, name):
        """End the process that runs the model of a front end, as a fault would."""
        if name == "app":
            self.app.end()
        else:
            for kernel in self.jupyter[name].kernels():
                kernel.kill()

    def close(self, name):
        """Close a front end; the next test that needs it opens a new one."""
        self.opened.pop(name).page.close()
        if name in self.jupyter:
            self.jupyter.pop(name).stop()
        if name == "app":
            app, self.app = self.app, None
            app.end()
            assert app.error is None


def digits(value):
    """A number in the format of the front end."""
    return f"{float(f'{value:.3g}'):g}"


def weights_of(folder, picture, layer, head, query):
    """Attention (8, 8) from a patch, or from the class token, by timm's unfused path. head: a number or "mean"."""
    model = opened_model(folder)
    maps = unfused_maps(model, preprocess(model, picture))[layer][0].numpy()
    row = 0 if query is None else 1 + query[0] * 8 + query[1]
    weights = maps.mean(0) if head == "mean" else maps[head]
    return weights[row, 1:].reshape(8, 8).astype(np.float32)


def expected(folder, picture, layer, head, query, strength=0.75, smooth=True, even=False):
    """The overlay as it has to be: attention by timm's unfused path over the gray picture, in viridis from 0."""
    model, weights = opened_model(folder), weights_of(folder, picture, layer, head, query)
    return painted(model, preprocess(model, picture), weights, strength, smooth, even)


def painted(model, x, weights, strength=0.75, smooth=True, even=False):
    """The overlay of a map from 0 to its largest value: picture · (1 − a) + color · a."""
    config = model.pretrained_cfg
    seen = x[0].permute(1, 2, 0).numpy() * config["std"] + config["mean"]
    side = 128 * 3
    gray = Image.fromarray(np.rint(seen * 255).clip(0, 255).astype(np.uint8)).resize(
        (side, side), Image.Resampling.BICUBIC
    )
    gray = np.asarray(gray.convert("L")).astype(float)[..., None]
    if smooth:  # linear between the middles of patches, in float64
        places = (np.arange(side) + 0.5) * 8 / side - 0.5
        large = np.array(
            [np.interp(places, np.arange(8), line) for line in weights.astype(np.float64)]
        )
        large = np.array([np.interp(places, np.arange(8), line) for line in large.T]).T
    else:
        large = np.kron(weights.astype(np.float64), np.ones((side // 8, side // 8)))
    table = (
        mpl.colormaps["viridis"](np.arange(256))[:, :3] * 255
    )  # between its colors, in proportion
    share = large / weights.max()
    color = np.stack([np.interp(share * 255, np.arange(256), channel) for channel in table.T], -1)
    a = strength * (1 if even else share[..., None])
    return np.rint(gray * (1 - a) + color * a).astype(int)
