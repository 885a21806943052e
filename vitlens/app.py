"""The explorer as a web page of its own, served by Voila on this machine alone."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import webbrowser
from importlib.util import find_spec
from pathlib import Path

CELL = """\
import vitlens
from vitlens.widgets import explore

explore(vitlens.load_model({model!r}){image})"""


def serve(model: str, image: str | os.PathLike | None = None, *, port: int = 0, browser: bool = True) -> int:
    """Serve the explorer of a model until interrupted; returns Voila's exit code.

    model: a timm name or a folder, as `load_model` takes. port: 0 for a free one. The address is printed. It holds a
    token; without that nothing is shown, and the server listens on the loopback interface only. Raises
    ModuleNotFoundError without Voila, ValueError for what is no port and OSError for one that cannot be had.
    """
    if missing := [package for package in ("voila", "anywidget", "ipykernel") if find_spec(package) is None]:
        raise ModuleNotFoundError(
            f"The page needs {', '.join(missing)}, not installed here; run `pip install {' '.join(missing)}` and try "
            "again."
        )
    if not 0 <= port <= 65535:
        raise ValueError(f"A port is a number from 1 to 65535, or 0 for a free one, but {port} came.")
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            free.bind(("127.0.0.1", port))
        except PermissionError as error:
            raise OSError(f"Port {port} may not be used here; give another --port, above 1023.") from error
        except OSError as error:
            raise OSError(f"Port {port} is taken; give another --port, or none to use a free one.") from error
        port = free.getsockname()[1]
    token = secrets.token_urlsafe(24)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "explorer.ipynb")
        page.write_text(notebook(model, image), encoding="utf-8")
        command = [
            sys.executable, "-m", "voila", str(page), f"--port={port}", "--Voila.port_retries=0",
            "--Voila.ip=127.0.0.1", "--Voila.auto_token=True", "--show_tracebacks=True", "--Voila.log_level=WARN",
            "--no-browser",  # its own opening knows no token
        ]  # fmt: skip
        # In the environment, not among the arguments, which every user of the machine can read.
        with _interruptible(), subprocess.Popen(command, env=os.environ | {"JUPYTER_TOKEN": token}) as server:
            try:
                while server.poll() is None and not _answers(port):
                    time.sleep(0.1)
                if server.poll() is None:
                    address = f"http://127.0.0.1:{port}/?token={token}"
                    print(address, flush=True)  # or a pipe would keep it
                    if browser:
                        _open(address, Path(folder, "explorer.html"))
                return server.wait()
            except KeyboardInterrupt:
                server.terminate()
                server.wait()
                return 0


def _open(address: str, file: Path) -> None:
    """Open an address in a browser, by way of a file that nobody else can read: what is asked for is an argument."""
    file.touch(mode=0o600)
    file.write_text(f'<meta http-equiv="refresh" content="0; url={address}">', encoding="utf-8")
    webbrowser.open(file.as_uri())


@contextlib.contextmanager
def _interruptible():
    """A scheduler's SIGTERM ends the page as Ctrl-C does."""

    def interrupt(*_):
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def notebook(model: str, image: str | os.PathLike | None) -> str:
    """An .ipynb file of one cell, the explorer. Paths are made absolute: the server runs elsewhere."""
    model = model.removeprefix("local-dir:")
    model = str(Path(model).resolve()) if Path(model).exists() else model
    picture = "" if image is None else f", {str(Path(image).resolve())!r}"
    cell = {
        "cell_type": "code", "id": "explorer", "metadata": {}, "execution_count": None, "outputs": [],
        "source": CELL.format(model=model, image=picture),
    }  # fmt: skip
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return json.dumps({"cells": [cell], "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5})
