"""The real applications for the browser tests: JupyterLab, Notebook 7 and Voila, each with a home of its own."""

import contextlib
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

import nbformat
import psutil
import pytest

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run",
]  # fmt: skip
MARKS = [
    pytest.mark.skipif(os.environ.get("NO_BROWSER") == "1", reason="NO_BROWSER=1 leaves out what needs a browser"),
    pytest.mark.xdist_group("browser"),
]
START, PATIENCE = 180_000, 60_000
"""Milliseconds until a page that does not come up, or does not answer, counts as broken."""
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


class Front:
    """A running application. kind: "lab", "notebook" or "voila"."""

    def __init__(self, kind: str, folder: Path):
        self.kind, self.folder, self.token = kind, folder, secrets.token_hex(8)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        home = folder / ".home"
        names = ("HOME", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
        places = {name: str(home / name.lower()) for name in names}
        for place in places.values():
            Path(place).mkdir(parents=True, exist_ok=True)
        if kind == "lab":  # a toast of news would cover the page
            settings = Path(places["JUPYTER_CONFIG_DIR"], "lab/user-settings/@jupyterlab/apputils-extension")
            settings.mkdir(parents=True)
            (settings / "notification.jupyterlab-settings").write_text('{"fetchNews": "false"}')
        common = [f"--ServerApp.port={self.port}", "--ServerApp.port_retries=0", "--ServerApp.ip=127.0.0.1"]
        common += [f"--IdentityProvider.token={self.token}", f"--ServerApp.root_dir={folder}", "--no-browser"]
        command = {
            "lab": ["jupyterlab", *common, "--allow-root", "--LabApp.expose_app_in_browser=True",
                    "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
                    "--LabApp.extension_manager=readonly"],
            "notebook": ["notebook", *common, "--allow-root", "--JupyterNotebookApp.expose_app_in_browser=True"],
            "voila": ["voila", f"--port={self.port}", "--no-browser", f"--token={self.token}", str(folder)],
        }[kind]  # fmt: skip
        self.log = open(folder / f"{kind}.log", "w")  # noqa: SIM115
        environment = os.environ | places | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", *command], env=environment, start_new_session=True, stdout=self.log, stderr=self.log
        )
        for _ in range(240):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            assert self.process.poll() is None, f"{kind} stopped:\n{(folder / f'{kind}.log').read_text()[-2000:]}"
            time.sleep(0.5)
        raise AssertionError(f"{kind} did not answer within two minutes")

    def open(self, page, name: str):
        """Open a notebook of the folder, run all its cells and wait for a widget."""
        page.set_default_timeout(START)
        if self.kind == "voila":
            page.goto(f"{self.address}/voila/render/{name}?token={self.token}")
        else:
            place = "lab/tree" if self.kind == "lab" else "notebooks"
            page.goto(f"{self.address}/{place}/{name}?token={self.token}" + "&reset" * (self.kind == "lab"))
            page.wait_for_function(READY)
            page.evaluate("void window.jupyterapp.commands.execute('notebook:run-all-cells')")
        failed = "[data-mime-type='application/vnd.jupyter.error']"
        page.wait_for_selector(f".vitlens[data-answers], {failed}")
        assert not page.locator(failed).count(), page.locator(failed).first.inner_text()
        page.set_default_timeout(PATIENCE)

    def memory(self) -> int:
        """Bytes that the kernels hold."""
        return sum(each.memory_info().rss for each in self.kernels())

    def kernels(self) -> list[psutil.Process]:
        """The processes of its kernels."""
        return _kernels(self.process)

    def stop(self) -> None:
        """End the kernels and the server."""
        if self.kind != "voila":
            with contextlib.suppress(OSError):
                for kernel in json.load(urllib.request.urlopen(f"{self.address}/api/kernels?token={self.token}")):
                    address = f"{self.address}/api/kernels/{kernel['id']}?token={self.token}"
                    urllib.request.urlopen(urllib.request.Request(address, method="DELETE"))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.log.close()


def move(page, control, value):
    """Move a slider, as a person does."""
    page.locator(f"[data-control={control}] input").evaluate(
        "(node, value) => { node.value = value; node.dispatchEvent(new Event('input')); }", value
    )


def assert_gone_and_back(page, kernel, says, again):
    """Once its kernel was killed, a page is switched off and `says` what to do; after `again()` it works."""
    page.set_default_timeout(START)
    body, alert = page.locator(".vitlens .body").first, page.locator(".vitlens [role=alert]").first
    assert alert.inner_text() == "" and not body.evaluate("node => node.inert")
    kernel.kill()
    move(page, "layer", 1)
    page.wait_for_function("() => document.querySelector('.vitlens .body').inert")
    assert re.match("The (kernel|program)", alert.inner_text())
    page.wait_for_function("says => document.querySelector('.vitlens .alert').textContent.includes(says)", arg=says)
    page.wait_for_timeout(3000)  # another kernel has come, or not
    assert body.evaluate("node => node.inert") and says in alert.inner_text()
    assert "working" not in page.locator(".vitlens .busy").inner_text()
    again()
    page.wait_for_function("() => document.querySelector('.vitlens .body')?.inert === false")
    move(page, "layer", 2)
    page.wait_for_function("() => document.querySelector('figcaption').textContent.includes('layer 2')")
    assert alert.inner_text() == ""


SERVE = """import json, sys
from vitlens.widgets import app
app.CELL = json.loads(sys.argv[3]) or app.CELL
app.serve(sys.argv[1], browser=False, **json.loads(sys.argv[2]))"""


class App:
    """`vitlens app` on a model, in a `with` block, after which it must have ended well and logged nothing.

    cell: another one for its page. options: of `serve`; by default kernels without a page end soon.
    """

    def __init__(self, model: Path, folder: Path, cell: str | None = None, **options):
        self.log = folder / f"app-{secrets.token_hex(4)}.log"
        command = [sys.executable, "-c", SERVE, str(model), json.dumps({"linger": 3, **options}), json.dumps(cell)]
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
            )
        self.opening = self.process.stdout.readline().strip()
        self.address = self.opening.split("?")[0]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """End it as Ctrl-C does."""
        self.process.send_signal(signal.SIGINT)
        try:
            assert self.process.wait(60) == 0 and self.log.read_text() == ""
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def kernels(self) -> list[psutil.Process]:
        """The processes of its kernels."""
        return _kernels(self.process)

    def wait(self, count: int, seconds: float = 120) -> None:
        """Wait until there are so many kernels."""
        until = time.monotonic() + seconds
        while len(self.kernels()) != count:
            assert time.monotonic() < until, f"{len(self.kernels())} kernels and not {count} after {seconds} seconds"
            time.sleep(0.2)

    def open(self, page) -> None:
        """Open the page and wait for the explorer."""
        page.goto(self.opening)
        page.wait_for_selector(".vitlens[data-answers]", timeout=START)


def _kernels(server: subprocess.Popen) -> list[psutil.Process]:
    return [
        each for each in psutil.Process(server.pid).children(recursive=True) if "ipykernel" in " ".join(_command(each))
    ]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it has just ended
        return []
