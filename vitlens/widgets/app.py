"""The explorer as a web page, served by Voila to this machine only."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import webbrowser
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

CELL = """\
import vitlens
from vitlens.widgets import explore

explore(vitlens.load_model({model!r}){image})"""


def serve(
    model: str, image: str | os.PathLike | None = None, *, port: int = 0, browser: bool = True, sessions: int = 8,
    linger: float = 30,
) -> None:  # fmt: skip
    """Serve the explorer of a model until interrupted.

    model: a timm name or a folder, as `load_model` takes. port: 0 for a free one. sessions: the most pages that may be
    open, each with a kernel of its own. linger: seconds until a kernel without a connected page ends; it ends at once
    if the browser says that the page was closed. Prints the address with a token, without which nothing is shown. The
    server listens on the loopback interface only. Raises ModuleNotFoundError without Voila, ValueError for an invalid
    port or number of sessions, and OSError for a port that is taken.
    """
    if missing := [package for package in ("voila", "anywidget", "ipykernel") if find_spec(package) is None]:
        raise ModuleNotFoundError(
            f"The page needs {', '.join(missing)}, not installed here; run `pip install {' '.join(missing)}`."
        )
    if not 0 <= port <= 65535:
        raise ValueError(f"Expected a port from 1 to 65535, or 0 for a free one, got {port}.")
    if sessions < 1:
        raise ValueError(f"sessions is the number of pages that may be open: 1 or more, got {sessions}.")
    with _listening(port) as listening, tempfile.TemporaryDirectory(dir=_short()) as folder:
        sys.modules.setdefault("rfc3987_syntax", None)  # jsonschema's check of addresses, which takes 3 s to import
        from vitlens.widgets.server import Server

        page = Path(folder, "explorer.ipynb")
        page.write_text(notebook(model, image), encoding="utf-8")
        token = secrets.token_urlsafe(24)
        server = Server(page, folder, token, linger=linger, sessions=sessions)
        server.initialize()

        def began() -> None:
            address = f"http://127.0.0.1:{listening.getsockname()[1]}/?token={token}"
            print(address, flush=True)  # also into a pipe
            if browser:  # in a thread: opening it may take long, and asks for the page
                threading.Thread(target=_open, args=(address, Path(folder, "explorer.html")), daemon=True).start()

        loop = asyncio.new_event_loop()  # `asyncio.run` would wait for unfinished pages
        try:
            with _interruptible(server.end):
                loop.run_until_complete(server.run(listening, began))
        finally:
            loop.close()


def _listening(port: int) -> socket.socket:
    """A socket that listens on a port of the loopback interface."""
    listening = socket.socket()
    if os.name == "posix":
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(("127.0.0.1", port))
        listening.listen(128)
        listening.setblocking(False)
    except OSError as error:
        listening.close()
        if isinstance(error, PermissionError):
            raise OSError(f"Port {port} may not be used here; give another --port, above 1023.") from error
        raise OSError(f"Port {port} is taken; give another --port, or none to use a free one.") from error
    return listening


def _short() -> str | None:
    """Where the folder of the sockets goes: /tmp if the usual place is long, because socket paths have ~100 bytes."""
    return "/tmp" if os.name == "posix" and len(os.fsencode(tempfile.gettempdir())) > 30 else None


def _open(address: str, file: Path) -> None:
    """Open an address in a browser, through a private file: others can see the arguments of a process."""
    file.touch(mode=0o600)
    file.write_text(f'<meta http-equiv="refresh" content="0; url={address}">', encoding="utf-8")
    webbrowser.open(file.as_uri())


@contextlib.contextmanager
def _interruptible(end: Callable[[], None]):
    """Call `end` at the first Ctrl-C or SIGTERM in this block, and ignore later ones."""
    signals = (signal.SIGINT, signal.SIGTERM)

    def once(*_):
        for each in signals:
            signal.signal(each, signal.SIG_IGN)
        end()

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {each: signal.signal(each, once) for each in signals}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def notebook(model: str, image: str | os.PathLike | None) -> str:
    """A notebook file with one cell, the explorer. Paths become absolute, because the kernel runs elsewhere."""
    import nbformat

    model = model.removeprefix("local-dir:")
    model = str(Path(model).resolve()) if Path(model).exists() else model
    argument = "" if image is None else f", {str(Path(image).resolve())!r}"
    cell = nbformat.v4.new_code_cell(CELL.format(model=model, image=argument))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return nbformat.writes(nbformat.v4.new_notebook(cells=[cell], metadata={"kernelspec": kernel}))
