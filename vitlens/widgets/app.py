"""The explorer as a web page for this machine only: one process, one model, and a WebSocket for each page.

The server starts first; PyTorch and the model follow in the quick lane. The WebSocket carries the messages that
anywidget carries in a notebook. Nothing is served but the files that are named here, and only to the browser that
opened the printed address.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import io
import json
import os
import secrets
import signal
import socket
import struct
import tempfile
import threading
import webbrowser
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from tornado import httpserver, web, websocket

from vitlens.images import load_image, samples
from vitlens.widgets.lanes import LONG, QUICK, Connection, Task

HERE = Path(__file__).parent
FILES = {
    "app.js": "text/javascript; charset=utf-8", "front.js": "text/javascript; charset=utf-8",
    "front.css": "text/css; charset=utf-8",
}  # fmt: skip
PAGES, MESSAGE = 16, 2**20
"""The most pages that may be open, and the largest message in bytes; uploads come in parts."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' blob: data:; "
    "connect-src 'self' ws://{host}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy: the browser may load from this server only."""
PAGE = (
    '<!DOCTYPE html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    '<title>vitlens</title><link rel="icon" href="data:,"><link rel="stylesheet" href="/front.css">'
    '<main id="page"><div class="opening"><p role="status">Connecting …</p><img src="/photograph" alt=""></div></main>'
    '<script type="module" src="/app.js"></script></html>'
)
PLAIN = '<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>vitlens</title><p role="alert">{}</p></html>'
CLEAN = '<!DOCTYPE html><meta http-equiv="refresh" content="0; url=/"><title>vitlens</title>'
"""The answer to an address with the token: it sets the cookie and loads the address without the token. A redirection
would not do, because a browser opened from a file does not send a SameSite=Strict cookie along with it."""
SENTENCES = {
    403: "This page is for the person who started it. Open the address that <code>vitlens app</code> printed.",
    404: 'There is nothing here. <a href="/">The explorer</a> is one page.',
}


def serve(model: str, image: str | os.PathLike | None = None, *, port: int = 0, browser: bool = True) -> None:
    """Serve the explorer of a model until interrupted.

    model: a timm name or a folder, as `load_model` takes. port: 0 for a free one. Prints the address with a token,
    without which nothing is shown. Raises what `load_image` and `load_model` raise, and OSError for a port in use.
    """
    photograph = None if image is None else load_image(image)
    with _listening(port) as listening:
        app = App(model, photograph, listening.getsockname()[1])

        def began(address: str) -> None:
            print(address, flush=True)  # also into a pipe
            if browser:  # in a thread, because opening may take long
                threading.Thread(target=_open, args=(address,), daemon=True).start()

        loop = asyncio.new_event_loop()
        try:
            with _interruptible(app.end):
                loop.run_until_complete(app.run(listening, began))
        finally:
            for lane in (QUICK, LONG):
                lane.close()
            loop.close()


class App:
    """The state that all pages share. It belongs to the thread of the event loop."""

    def __init__(self, name: str, photograph, port: int):
        self.name, self.photograph, self.port = name, photograph, port
        self.token, self.secret = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
        self.host, self.cookie = f"127.0.0.1:{port}", f"vitlens-{port}"
        self.model, self.step, self.error = None, "Importing PyTorch …", None
        self.sockets: list[Socket] = []
        self.loop: asyncio.AbstractEventLoop | None = None
        shown = (photograph or next(iter(samples().values()))).copy()
        shown.thumbnail((448, 448))
        shown.save(preview := io.BytesIO(), "JPEG", quality=90)
        self.preview = preview.getvalue()

    async def run(self, listening: socket.socket, began: Callable[[str], None]) -> None:
        """Serve on a listening socket until `end` is called or the model cannot be opened."""
        self.loop, self.over = asyncio.get_running_loop(), asyncio.Event()
        arguments = {"app": self}
        paths = [("/", Home), ("/photograph", Preview), (r"/(app\.js|front\.js|front\.css)", File), ("/socket", Socket)]
        application = web.Application(
            [(path, handler, arguments) for path, handler in paths], default_handler_class=Missing,
            default_handler_args=arguments, websocket_max_message_size=MESSAGE, log_function=lambda handler: None,
        )  # fmt: skip
        server = httpserver.HTTPServer(application, max_body_size=MESSAGE)
        server.add_socket(listening)
        began(f"http://{self.host}/?token={self.token}")
        QUICK.submit(self._opened, lambda task, future: self.post(partial(self._ready, future)))
        await self.over.wait()
        server.stop()
        for page in [*self.sockets]:
            page.close(1011 if self.error else 1001)
            page.on_close()
        if self.error:
            raise self.error

    def end(self) -> None:
        """Make `run` return. Safe to call from a signal handler."""
        if self.loop is None:
            raise KeyboardInterrupt
        self.loop.call_soon_threadsafe(self.over.set)

    def post(self, function: Callable[[], None]) -> None:
        """Call a function in the thread of the event loop, unless the loop has ended."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function)

    def _opened(self, check: Callable[[], None]) -> object:
        """The model, opened in the quick lane."""
        from vitlens.models import load_model
        from vitlens.recorder.supported import attention_modules, unwrap

        check()
        self.post(partial(self._tell_step, f"Opening {self.name} …"))
        model = load_model(self.name)
        attention_modules(unwrap(model))  # raises for models without maps
        check()
        self.post(partial(self._tell_step, "Drawing the first map …"))
        import vitlens.widgets.explorer  # noqa: F401

        return model

    def _tell_step(self, step: str) -> None:
        self.step = step
        for page in self.sockets:
            page.tell("step", step)

    def _ready(self, future: Future) -> None:
        if error := future.exception():
            self.error = error
            self._tell_step(f"{error}")
            self.loop.call_later(0.3, self.over.set)  # time to send the sentence
            return
        self.model = future.result()
        for page in self.sockets:
            page.begin()


class Guarded(web.RequestHandler):
    """A request of the browser that has the cookie, under the server's own host name."""

    def initialize(self, app: App) -> None:
        self.app = app

    def set_default_headers(self) -> None:
        self.set_header("Referrer-Policy", "no-referrer")
        self.set_header("Cache-Control", "no-store")
        self.set_header("X-Content-Type-Options", "nosniff")

    def prepare(self) -> None:
        self.set_header("Content-Security-Policy", POLICY.format(host=self.app.host))
        known = self.get_cookie(self.app.cookie, "")
        if self.request.host != self.app.host or not (same(known, self.app.secret) or self.invited()):
            raise web.HTTPError(403)

    def invited(self) -> bool:
        """Whether the request has the token in its address."""
        return False

    def write_error(self, status_code: int, **_) -> None:
        self.set_header("Content-Type", "text/html; charset=utf-8")
        self.finish(PLAIN.format(SENTENCES.get(status_code, SENTENCES[404])))

    def log_exception(self, kind, error, trace) -> None:
        if not isinstance(error, web.HTTPError):
            super().log_exception(kind, error, trace)


class Home(Guarded):
    """The page."""

    def invited(self) -> bool:
        return same(self.get_query_argument("token", ""), self.app.token)

    def get(self) -> None:
        if self.invited():
            self.set_cookie(self.app.cookie, self.app.secret, httponly=True, samesite="Strict", path="/")
        self.finish(CLEAN if "token" in self.request.query_arguments else PAGE)


class Preview(Guarded):
    """The photograph, shown until the first map is there."""

    def get(self) -> None:
        self.set_header("Content-Type", "image/jpeg")
        self.finish(self.app.preview)


class File(Guarded):
    """The files of the front end."""

    def get(self, name: str) -> None:
        self.set_header("Content-Type", FILES[name])
        self.finish((HERE / name).read_bytes())


class Missing(Guarded):
    """Any other address."""

    def prepare(self) -> None:
        super().prepare()
        raise web.HTTPError(404)


class Socket(Guarded, websocket.WebSocketHandler):
    """The connection of one page."""

    connection: Connection | None = None
    task: Task | None = None

    def check_origin(self, origin: str) -> bool:
        return origin == f"http://{self.app.host}"

    def open(self) -> None:
        self.set_nodelay(True)
        if len(self.app.sockets) >= PAGES:
            self.tell("step", f"{PAGES} pages are open, as many as are allowed. Close one and reload this page.")
            self.close(1013)
            return
        self.app.sockets.append(self)
        self.tell("step", self.app.step)
        if self.app.model is not None:
            self.begin()

    def begin(self) -> None:
        """Make the page of this socket in the quick lane."""

        def made(check):
            from vitlens.widgets.explorer import Explorer

            page = Explorer(self.app.model, self.app.photograph)
            return page, page.first(check)

        then = lambda task, future: self.app.post(partial(self._begun, future))  # noqa: E731
        self.task, _ = QUICK.submit(made, then)

    def _begun(self, future: Future) -> None:
        if self not in self.app.sockets:
            return
        if error := future.exception():
            self.tell("step", f"{error}" or type(error).__name__)
            return
        page, answer = future.result()
        self.connection = Connection(page, self._show, self._custom, self.app.post)
        self.connection.start(answer)

    def on_message(self, message: str | bytes) -> None:
        buffers = []
        try:
            if isinstance(message, bytes):
                (length,) = struct.unpack("<I", message[:4])
                message, buffers = message[4 : 4 + length], [message[4 + length :]]
            content = json.loads(message)
        except (ValueError, struct.error):
            content = None
        if not isinstance(content, dict) or {"job", "failed"} & content.keys():
            self.close(1003)
        elif self.connection is not None:
            self.connection.receive(content, buffers)

    def on_close(self) -> None:
        if self in self.app.sockets:
            self.app.sockets.remove(self)
        if self.task:
            self.task.cancel()
        if self.connection:
            self.connection.close()
        self.connection = self.task = self._pictures = None

    def tell(self, name: str, value: object) -> None:
        """Send a value, unless the page has gone."""
        if self.ws_connection is not None:
            future = self.ws_connection.write_message(packed(name, value), binary=True)
            future.add_done_callback(lambda future: future.exception())  # the page has gone meanwhile

    def _show(self, frame: dict, pictures: dict[str, bytes]) -> None:
        if pictures != getattr(self, "_pictures", None):
            self._pictures = pictures
            self.tell("pictures", pictures)
        self.tell("frame", frame)

    def _custom(self, content: dict, buffers: list[bytes]) -> None:
        self.tell("custom", {"content": content, "buffers": buffers})


def same(given: str, secret: str) -> bool:
    return hmac.compare_digest(given.encode(), secret.encode())


def packed(name: str, value: object) -> bytes:
    """A message: the length of its head, the head as JSON, and the bytes that the head names by {"$": number}."""
    parts: list[bytes] = []

    def plain(each: object) -> object:
        if isinstance(each, bytes | bytearray | memoryview):
            parts.append(bytes(each))
            return {"$": len(parts) - 1}
        if isinstance(each, dict):
            return {key: plain(item) for key, item in each.items()}
        return [plain(item) for item in each] if isinstance(each, list | tuple) else each

    head = {"name": name, "value": plain(value)}
    head = json.dumps(head | {"sizes": [len(part) for part in parts]}).encode()
    return b"".join([struct.pack("<I", len(head)), head, *parts])


def _listening(port: int) -> socket.socket:
    """A socket that listens on a port of the loopback interface."""
    listening = socket.socket()
    if os.name == "posix":
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(("127.0.0.1", port))
        listening.listen(128)
        listening.setblocking(False)
    except (OSError, OverflowError) as error:
        listening.close()
        if isinstance(error, OverflowError):
            raise ValueError(f"Expected a port from 1 to 65535, or 0 for a free one, got {port}.") from error
        if isinstance(error, PermissionError):
            raise OSError(f"Port {port} may not be used here; give another --port, above 1023.") from error
        raise OSError(f"Port {port} is taken; give another --port, or none to use a free one.") from error
    return listening


def _open(address: str) -> None:
    """Open an address in a browser, through a private file: others can see the arguments of a process."""
    file = Path(tempfile.mkdtemp(prefix="vitlens-"), "explorer.html")  # mkdtemp: for this user only
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

    before = {each: signal.signal(each, once) for each in signals}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
