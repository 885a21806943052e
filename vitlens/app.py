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
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

CELL = """\
import vitlens
from vitlens.widgets import explore

explore(vitlens.load_model({model!r}){image})"""


def serve(
    model: str, image: str | os.PathLike | None = None, *, port: int = 0, browser: bool = True,
    ready: Callable[[str], None] = print,
) -> int:  # fmt: skip
    """Serve the explorer of a model until interrupted; returns Voila's exit code.

    model: a timm name or a folder, as `load_model` takes. port: 0 for a free one. ready: called with the address, which
    holds a token; without it nothing is shown, and the server listens on the loopback interface only. Raises
    ModuleNotFoundError without Voila and OSError for a port that is taken.
    """
    if find_spec("voila") is None:
        raise ModuleNotFoundError(
            "The page needs Voila, which is not installed; run `pip install voila` and try again."
        )
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            free.bind(("127.0.0.1", port))
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
            *([] if browser else ["--no-browser"]),
        ]  # fmt: skip
        # In the environment, not among the arguments, which every user of the machine can read.
        with _interruptible(), subprocess.Popen(command, env=os.environ | {"JUPYTER_TOKEN": token}) as server:
            try:
                while server.poll() is None and not _answers(port):
                    time.sleep(0.1)
                if server.poll() is None:
                    ready(f"http://127.0.0.1:{port}/?token={token}")
                return server.wait()
            except KeyboardInterrupt:
                server.terminate()
                server.wait()
                return 0


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
