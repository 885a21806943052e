"""The explorer as a web page for this machine only: one process, one model, and a WebSocket for each page.

The server starts before PyTorch and the model are loaded in the quick lane. The WebSocket carries the same messages as
anywidget in a notebook. Only the files named here are served, only to the browser that opened the printed address.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import getpass
import hmac
import io
import json
import os
import re
import secrets
import signal
import socket
import struct
import sys
import tempfile
import threading
import webbrowser
from collections.abc import Callable
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from PIL import Image
from tornado import httpserver, netutil, web, websocket

from vitlens import files
from vitlens.images import load_image, samples
from vitlens_explorer import front
from vitlens_explorer.front import pack
from vitlens_explorer.lanes import QUICK, Connection, Task, is_message

PAGES, MESSAGE = 16, 2**20
"""Largest number of open pages, and of bytes in a message. Uploads come in parts."""
APP_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' blob: data:; "
    "connect-src 'self' ws://{host}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy: the browser may load from this server only."""
APP_HTML = (
    '<!DOCTYPE html><html lang="en" class="vitlens-page"><meta charset="utf-8"><title>vitlens</title>'
    '<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">'
    '<link rel="stylesheet" href="/front.css">'
    '<main id="page"><div class="opening"><p role="status">Connecting …</p><img src="/photograph" alt=""></div></main>'
    '<script type="module" src="/app.js"></script></html>'
)
PLAIN = '<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>vitlens</title><p role="alert">{}</p></html>'
CLEAN = (
    '<!DOCTYPE html><html lang="en" class="vitlens-page"><meta http-equiv="refresh" content="0; url=/">'
    '<title>vitlens</title><link rel="icon" href="data:,"><link rel="stylesheet" href="/front.css"></html>'
)
"""Response to an address with the token. It sets the cookie and loads the address without the token. A redirect would
fail, because a browser that was opened from a file does not send a SameSite=Strict cookie with it."""
SENTENCES = {
    421: "This page is served under the names <code>127.0.0.1</code> and <code>localhost</code> only. From another "
    "machine, open a tunnel with <code>ssh -L {port}:127.0.0.1:{port} SERVER</code> there, and then the address that "
    "<code>vitlens app</code> printed.",
    403: "This page needs the token of its address. Open the address that <code>vitlens app</code> printed.",
    404: 'This page does not exist. Go to <a href="/">the explorer</a>.',
}


def serve(
    model: str | None = None,
    image: str | os.PathLike | None = None,
    *,
    checkpoint: str | os.PathLike | None = None,
    head: str | None = None,
    outputs: str | None = None,
    port: int = 0,
    browser: bool = True,
) -> None:
    """Serve the explorer of a model until interrupted, then end the process.

    model, checkpoint, head, outputs: as for `load_model`. port: 0 for a free one. Prints the address with the token
    that the page needs. Raises OSError for a port in use, and the errors of `load_image` and `load_model`.
    """
    notes: list[str] = []
    photograph = None if image is None else load_image(image, on_note=notes.append)
    if photograph:
        photograph.filename = os.fspath(image)
        photograph.note = " ".join(notes)
    app = App(model, photograph, checkpoint, head, outputs)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def began(address: str) -> None:
        for number in before:
            signal.signal(number, end)
        print(address, flush=True)  # also into a pipe
        if line := ssh_line(address):
            print(f"On the machine that you came from, type: {line}", flush=True)
        if browser:  # in a thread, because opening may take long
            threading.Thread(target=_open, args=(address,), daemon=True).start()

    def end(*_) -> None:
        for number in before:
            signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must not interrupt the exit
        app.end()

    gc.disable()  # until the model is open, because collection takes a sixth of the import time
    try:
        asyncio.run(app.run(listening_sockets(port), began))
    except BaseException:
        gc.enable()
        for number, handler in before.items():
            signal.signal(number, handler)
        raise
    sys.stdout.flush()
    os._exit(0)  # without waiting for a download in a lane, or seconds for unloading PyTorch


def ssh_line(address: str) -> str:
    """Command that makes the address work on the machine from which this one is used by SSH, or ""."""
    connection = os.environ.get("SSH_CONNECTION", "").split()  # client, its port, server, its port
    if len(connection) != 4:
        return ""
    port = urlsplit(address).port
    tunnel = f"{port}:127.0.0.1:{port}"
    number = "" if connection[3] == "22" else f"-p {connection[3]} "
    return f"ssh -L {tunnel} {number}{getpass.getuser()}@{connection[2]}"


def is_loopback(host: str) -> bool:
    """True for a Host header that names the machine of the browser, with any port, such as that of a tunnel.

    Other names are those of other sites, whose address may point here (DNS rebinding).
    """
    match = re.fullmatch(r"(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?", host.lower())
    return match is not None


def listening_sockets(port: int) -> list[socket.socket]:
    """Sockets that listen on a port of this machine, 0 for a free one. Raises OSError for a port in use."""
    try:
        return netutil.bind_sockets(port, "127.0.0.1")
    except OSError as error:
        raise OSError(
            f"Port {port} cannot be used ({error.strerror}). Give another --port or none."
        ) from error


class App:
    """State that all pages share, owned by the thread of the event loop."""

    def __init__(
        self,
        model: str | None,
        photograph=None,
        checkpoint: str | os.PathLike | None = None,
        head: str | None = None,
        outputs: str | None = None,
    ):
        self.name = model
        self.photograph = photograph
        self.checkpoint = checkpoint
        self.head = head
        self.outputs = outputs
        self.token = secrets.token_urlsafe(24)  # in the printed address
        self.secret = secrets.token_urlsafe(24)  # in the cookie
        self.model: object = None
        self.step = "Importing PyTorch …"
        self.error: BaseException | None = None
        self.sockets: list[Socket] = []
        script = "text/javascript; charset=utf-8"
        self.files = {
            "": ("text/html; charset=utf-8", APP_HTML),
            "photograph": ("image/jpeg", preview(photograph or samples()["chelsea"])),
            "app.js": (script, Path(__file__).with_name("app.js").read_bytes()),
            "front.js": (script, front.script().encode()),
            "front.css": ("text/css; charset=utf-8", front.style().encode()),
        }

    async def run(self, listening: list[socket.socket], began: Callable[[str], None]) -> None:
        """Serve on listening sockets until `end` is called. Raises the errors of opening the model."""
        self.loop = asyncio.get_running_loop()
        self.over = asyncio.Event()
        self.port = listening[0].getsockname()[1]
        self.host = f"127.0.0.1:{self.port}"
        self.cookie = f"vitlens-{self.port}"
        handlers = [("/socket", Socket, {"app": self}), ("/(.*)", File, {"app": self})]
        application = web.Application(
            handlers, websocket_max_message_size=MESSAGE, log_function=lambda handler: None
        )
        server = httpserver.HTTPServer(application, max_body_size=MESSAGE)
        server.add_sockets(listening)
        began(f"http://{self.host}/?token={self.token}")
        QUICK.submit(self._open_model, lambda task: self.post(partial(self._model_opened, task)))
        await self.over.wait()
        server.stop()
        for page in [*self.sockets]:
            page.close(1011 if self.error else 1001)
            page.on_close()
        if self.error:
            raise self.error

    def end(self) -> None:
        """Make `run` return. Safe in a signal handler."""
        self.post(self.over.set)

    def post(self, function: Callable[[], None]) -> None:
        """Call a function in the thread of the event loop, unless the loop has ended."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function)

    def _open_model(self, check: Callable[[], None]) -> object:
        """The model, opened in the quick lane."""
        from vitlens.models.opening import load_vit
        from vitlens.recorder.supported import attention_modules, unwrap

        check()
        self.post(partial(self._report, f"Opening {self.name or 'the bundled model'} …"))
        model = load_vit(
            self.name, checkpoint=self.checkpoint, head=self.head, outputs=self.outputs
        )
        attention_modules(unwrap(model))  # raises for models without maps
        self.post(partial(self._report, "Drawing the first map …"))
        import vitlens_explorer.explorer  # noqa: F401

        if not gc.isenabled():
            gc.freeze()  # exclude module objects from collection
            gc.enable()
        return model

    def _report(self, step: str) -> None:
        """Show the current step on all pages."""
        self.step = step
        for page in self.sockets:
            page.tell("step", step)

    def _model_opened(self, task: Task) -> None:
        if error := task.exception():
            self.error = error
            self._report(str(error))
            self.loop.call_later(0.3, self.over.set)  # after the message was sent
            return
        self.model = task.result()
        for page in self.sockets:
            page.begin()


def preview(photograph: Image.Image) -> bytes:
    """JPEG file of a photograph, which the page shows before the first map."""
    small = photograph.copy()
    small.thumbnail((448, 448))
    file = io.BytesIO()
    small.save(file, "JPEG", quality=90)
    return file.getvalue()


class Guarded(web.RequestHandler):
    """Handler that requires the cookie or token and the server's host name."""

    def initialize(self, app: App) -> None:
        self.app = app

    def set_default_headers(self) -> None:
        self.set_header("Referrer-Policy", "no-referrer")
        self.set_header("Cache-Control", "no-store")
        self.set_header("X-Content-Type-Options", "nosniff")

    def prepare(self) -> None:
        if not is_loopback(self.request.host):
            raise web.HTTPError(421)
        self.set_header("Content-Security-Policy", APP_POLICY.format(host=self.request.host))
        self.invited = self.request.path == "/" and equal_secrets(
            self.get_query_argument("token", ""), self.app.token
        )
        known = equal_secrets(self.get_cookie(self.app.cookie, ""), self.app.secret)
        if not (known or self.invited):
            raise web.HTTPError(403)

    def write_error(self, status_code: int, **_) -> None:
        self.set_header("Content-Type", "text/html; charset=utf-8")
        sentence = SENTENCES.get(status_code, SENTENCES[404])
        self.finish(PLAIN.format(sentence.format(port=self.app.port)))

    def log_exception(self, kind, error, trace) -> None:
        if not isinstance(error, web.HTTPError):
            super().log_exception(kind, error, trace)


class File(Guarded):
    """Handler of the page, the front end's files and the photograph that is shown before the first map."""

    def get(self, name: str) -> None:
        if self.invited:
            self.set_cookie(
                self.app.cookie, self.app.secret, httponly=True, samesite="Strict", path="/"
            )
        if name not in self.app.files:
            raise web.HTTPError(404)
        kind, content = self.app.files[name]
        self.set_header("Content-Type", kind)
        self.finish(CLEAN if "token" in self.request.query_arguments else content)


class Socket(Guarded, websocket.WebSocketHandler):
    """The connection of one page."""

    connection: Connection | None = None
    task: Task | None = None
    pictures: dict[str, bytes] | None = None

    def check_origin(self, origin: str) -> bool:
        return origin == f"http://{self.request.host}"

    def open(self) -> None:
        self.set_nodelay(True)
        if len(self.app.sockets) >= PAGES:
            self.tell(
                "step",
                f"{PAGES} pages are open, the largest number. Close one and reload this page.",
            )
            self.close(1013)
            return
        self.app.sockets.append(self)
        self.tell("step", self.app.step)
        if self.app.model is not None:
            self.begin()

    def begin(self) -> None:
        """Create the page of this socket in the quick lane."""

        def made(check):
            from vitlens_explorer.explorer import Explorer
            from vitlens_explorer.in_page import write_page

            page = Explorer(self.app.model, self.app.photograph)
            page.write_page = write_page
            return page, page.first(check)

        self.task = QUICK.submit(made, lambda task: self.app.post(partial(self._page_made, task)))

    def _page_made(self, task: Task) -> None:
        if self not in self.app.sockets:
            return
        if error := task.exception():
            self.tell("step", f"{error}" or type(error).__name__)
            return
        page, answer = task.result()

        def send(content, buffers):
            self.tell("custom", {"content": content, "buffers": buffers})

        self.connection = Connection(page, self._show, send, self.app.post)
        self.connection.start(answer)

    def on_message(self, message: str | bytes) -> None:
        buffers = []
        try:
            if isinstance(message, bytes):
                (length,) = struct.unpack("<I", message[:4])
                message, buffers = message[4 : 4 + length], [message[4 + length :]]
            content = json.loads(message)
            if not is_message(content, buffers):
                content = None
        except (ValueError, RecursionError, struct.error):
            content = None
        if content is None:
            self.close(1003)
        elif "ping" in content:
            self.tell("pong", True)
        elif self.connection is not None:
            self.connection.receive(content, buffers)

    def on_close(self) -> None:
        if self in self.app.sockets:
            self.app.sockets.remove(self)
        if self.task:
            self.task.stop()
        if self.connection:
            self.connection.close()
        self.connection = self.task = self.pictures = None

    def tell(self, name: str, value: object) -> None:
        """Send a value to the page if it is open."""
        if self.ws_connection is not None:
            future = self.ws_connection.write_message(pack(name, value), binary=True)
            future.add_done_callback(
                lambda future: future.exception()
            )  # ignore a page that was closed meanwhile

    def _show(self, frame: dict, pictures: dict[str, bytes]) -> None:
        if pictures != self.pictures:
            self.pictures = pictures
            self.tell("pictures", pictures)
        self.tell("frame", frame)


def equal_secrets(given: str, secret: str) -> bool:
    return hmac.compare_digest(given.encode(), secret.encode())


def _open(address: str) -> None:
    """Open an address in a browser through a private file, because process arguments are visible to other users."""
    file = Path(tempfile.mkdtemp(prefix="vitlens-"), "explorer.html")  # mkdtemp: for this user only
    files.write(file, f'<meta http-equiv="refresh" content="0; url={address}">')
    webbrowser.open(file.as_uri())
