"""The web server of `vitlens app`: Voila for one notebook, closed to all other users of the machine.

Each open page has a kernel of its own, which ends with the page: at once when a browser says that the page was closed,
else once nobody has been connected for a while. Nothing is asked of any other machine, and a browser is told so.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import posixpath
import re
import socket
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import zmq
from jupyter_core.utils import ensure_async
from jupyter_server import CallContext
from jupyter_server.auth.identity import IdentityProvider
from jupyter_server.services.kernels.kernelmanager import AsyncMappingKernelManager
from tornado import httpserver, web
from traitlets import Float, Integer
from traitlets.config import Config
from voila.app import Voila
from voila.configuration import VoilaConfiguration
from voila.handler import VoilaHandler
from voila.shutdown_kernel_handler import VoilaShutdownKernelHandler
from voila.static_file_handler import TemplateStaticFileHandler
from voila.tornado.handler import TornadoVoilaHandler
from voila.tornado.kernel_websocket_handler import VoilaKernelWebsocketHandler

MESSAGE, BODY = 4 * 2**20, 2**20
"""Largest websocket message and largest request body, in bytes."""
OUTSIDE = re.compile(r"<(link|script)\b[^>]*\b(href|src)=\"https?://[^>]*>(</script>)?")
"""Tags in Voila's templates that load icon fonts from a CDN. The explorer does not use them."""
POLICY = (
    "default-src 'self' blob: data: 'unsafe-inline' 'unsafe-eval'; connect-src 'self' blob: data: ws://{host}; "
    "object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy: the browser may load from this server only."""
SENTENCES = {
    403: "This page is for whoever started it. Open the address that <code>vitlens app</code> printed.",
    404: 'There is nothing here. <a href="/">The explorer</a> is one page.',
    500: "The page could not be made. Reload it, or start <code>vitlens app</code> again.",
    503: "As many pages are open as are allowed ({most}), each with a model of its own in memory. Close one of them "
    "and reload this page.",
}
PLAIN = """<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>vitlens</title><link rel="icon" href="data:,">
<style>body {{ font: 18px/1.5 system-ui, sans-serif; max-width: 36em; margin: 15vh auto; padding: 0 1em }}</style>
<p role="alert">{sentence}</p></html>"""
CLEAN = '<!DOCTYPE html><title>vitlens</title><script>location.replace("/")</script><a href="/">The explorer</a>'
"""The answer to an address with the token: it sets the cookie and loads the address without the token. A redirection
would not do, because a browser opened from a file does not send a SameSite=Strict cookie along with it."""


class Kernels(AsyncMappingKernelManager):
    """The kernels of the open pages, `most` at a time. A kernel ends `linger` seconds after its last connection did."""

    linger, most = Float(30, config=True), Integer(8, config=True)

    def __init__(self, **settings):
        super().__init__(**settings)
        self._held, self._met, self._left, self._ends = Counter(), set(), set(), {}

    def room(self) -> bool:
        """Whether one more page may be opened. Kernels without a connection are ended to make room."""
        if len(self._held) + len(self._ends) >= self.most:
            for kernel_id in self._met & self._ends.keys():
                self._end(kernel_id)
        return len(self._held.keys() - self._left) + len(self._ends) < self.most

    def hold(self, kernel_id: str) -> None:
        """Count one more page that uses the kernel."""
        if kernel_id in self._ends:
            self._ends.pop(kernel_id).cancel()
        self._held[kernel_id] += 1

    def release(self, kernel_id: str, after: float | None = None) -> None:
        """Count one page less. If it was the last, the kernel ends after `after` seconds (`linger` by default)."""
        self._held[kernel_id] -= 1
        if self._held[kernel_id] <= 0:
            del self._held[kernel_id]
            after = 0 if kernel_id in self._left else self.linger if after is None else after
            self._ends[kernel_id] = asyncio.get_running_loop().call_later(after, self._end, kernel_id)

    def leave(self, kernel_id: str) -> None:
        """The browser said that the page was closed, so the kernel ends without waiting for a reconnection."""
        if kernel_id in self._ends:
            self._end(kernel_id)
        elif kernel_id in self._held:
            self._left.add(kernel_id)

    def _end(self, kernel_id: str) -> None:
        self._ends.pop(kernel_id).cancel()
        self._left.discard(kernel_id)
        self._met.discard(kernel_id)
        if kernel_id in self:
            asyncio.ensure_future(self.shutdown_kernel(kernel_id, now=True))

    def notify_connect(self, kernel_id: str) -> None:
        super().notify_connect(kernel_id)
        self._met.add(kernel_id)
        self.hold(kernel_id)

    def notify_disconnect(self, kernel_id: str) -> None:
        super().notify_disconnect(kernel_id)
        self.release(kernel_id)

    def new_kernel_id(self, **_) -> str:
        return CallContext.get(CallContext.JUPYTER_HANDLER).kernel_id

    async def start_kernel(self, **arguments) -> str:
        kernel_id = await super().start_kernel(**arguments)
        if kernel_id not in self._held:  # the page was closed meanwhile
            await self.shutdown_kernel(kernel_id, now=True)
            raise web.HTTPError(410)
        return kernel_id


class Plain:
    """Error pages of one plain sentence, without a traceback."""

    def write_error(self, status_code: int, **_) -> None:
        sentence = SENTENCES.get(status_code, SENTENCES[404 if status_code < 500 else 500])
        self.set_header("Content-Type", "text/html; charset=utf-8")
        self.finish(PLAIN.format(sentence=sentence.format(most=self.settings["kernel_manager"].most)))

    def log_exception(self, kind, error, trace) -> None:
        if not isinstance(error, web.HTTPError):
            super().log_exception(kind, error, trace)


class File(Plain):
    """Static files of Voila and JupyterLab. Any other path gives 404."""

    async def prepare(self) -> None:
        path = self.path_args[0]
        if path != posixpath.normpath(path) or path.startswith(("..", "/")) or "\0" in path:
            raise web.HTTPError(404)
        if isinstance(self, TemplateStaticFileHandler) and not re.match("[^/]+/static/.", path):
            raise web.HTTPError(404)
        await ensure_async(super().prepare())

    def validate_absolute_path(self, root: str, absolute_path: str):
        try:
            return super().validate_absolute_path(root, absolute_path)
        except web.HTTPError:
            raise web.HTTPError(404) from None


class Page(Plain, VoilaHandler):
    """The explorer page. It needs the token or the cookie, and starts a kernel of its own."""

    kernel_id, holds, gone = "", False, False

    def get_login_url(self):
        raise web.HTTPError(403)

    @web.authenticated
    async def get(self, path: str):
        if path:
            raise web.HTTPError(404)
        self.set_header("Cache-Control", "no-store")
        if self.get_query_argument("token", None) is not None:
            self.finish(CLEAN)
            return
        if not self.kernel_manager.room():
            raise web.HTTPError(503)
        self.kernel_id, self.holds = str(uuid.uuid4()), True
        self.kernel_manager.hold(self.kernel_id)
        begun = False
        try:
            async for html in self.get_generator():
                if self.gone:
                    return
                if self.kernel_id not in self.kernel_manager:  # it died, and Voila would wait for it
                    raise web.HTTPError(500)
                self.write(OUTSIDE.sub("", html))
                self.flush()
                begun = True
        except (web.HTTPError, asyncio.CancelledError):  # the kernel has ended meanwhile, or the server ends
            if not begun:
                raise
            self.finish(f"<script>document.body.innerHTML = {json.dumps(SENTENCES[500])}</script>")

    def on_connection_close(self) -> None:
        self.gone = True
        self._release(0)

    def on_finish(self) -> None:
        self._release()

    def _release(self, after: float | None = None) -> None:
        if self.holds:
            self.holds = False
            self.kernel_manager.release(self.kernel_id, after)


class Channels(Plain, VoilaKernelWebsocketHandler):
    """The websocket between a page and its kernel."""

    async def get(self, kernel_id: str):
        if kernel_id not in self.kernel_manager:
            raise web.HTTPError(404)
        await super().get(kernel_id)

    def select_subprotocol(self, subprotocols: list[str]) -> str | None:
        if self.connection is None:  # the page went while a busy kernel was waited for
            raise web.HTTPError(404)
        return super().select_subprotocol(subprotocols)

    def on_close(self) -> None:
        if self.close_code == 1001:  # "going away", not a connection that was lost
            self.kernel_manager.leave(self.kernel_id)
        super().on_close()


class Goodbye(Plain, VoilaShutdownKernelHandler):
    """The beacon that a browser sends when it closes a page. A beacon has no XSRF header, so the cookie alone is
    checked; being SameSite=Strict, no other site can make the browser send it."""

    def check_xsrf_cookie(self) -> None:
        pass

    @web.authenticated
    async def post(self, kernel_id: str):
        self.kernel_manager.leave(kernel_id)
        self.set_status(204)


def plain(handler: type) -> type:
    """The handler with plain error pages."""
    return type(handler.__name__, (File if issubclass(handler, web.StaticFileHandler) else Plain, handler), {})


class Server(Voila):
    """Voila for one notebook, with the handlers above. folder: a short path for the kernels' sockets."""

    _loop = None

    def __init__(self, page: Path, folder: str, token: str, *, linger: float, sessions: int):
        config = Config()
        config.VoilaConfiguration.multi_kernel_manager_class = Kernels
        config.VoilaConfiguration.show_tracebacks = True
        config.Kernels.update(linger=linger, most=sessions)
        config.KernelRestarter.update(time_to_dead=1.0, restart_limit=0)  # seconds; a new one would know of no page
        config.IdentityProvider.cookie_options = {"samesite": "Strict", "expires_days": None}
        if os.name == "posix" and zmq.has("ipc"):  # unlike a port, shut to other users
            config.KernelManager.transport = "ipc"
        super().__init__(
            config=config, notebook_path=str(page), connection_dir=folder, token=token, log_level="CRITICAL",
            identity_provider_class=IdentityProvider,
        )  # fmt: skip
        logging.getLogger("tornado").setLevel(logging.ERROR)

    def initialize(self, argv=None) -> None:
        """Like Voila's own, but without configuration files and signal handlers."""
        self._init_asyncio_patch()
        self.voila_configuration = VoilaConfiguration(parent=self)
        self.setup_template_dirs()

    def application(self, host: str) -> web.Application:
        """The tornado application for `host`, an address with a port."""
        port = host.split(":")[1]
        settings = self.init_settings() | {
            "allow_remote_access": False,  # under another name, which might be anybody's
            "headers": {"Content-Security-Policy": POLICY.format(host=host), "Referrer-Policy": "no-referrer"},
            "log_function": lambda handler: None,
            "websocket_max_message_size": MESSAGE,
            "xsrf_cookie_name": f"_xsrf-{port}",
            "xsrf_cookie_kwargs": {"samesite": "Strict"},
        }
        application = web.Application(**settings)
        instead = {
            VoilaKernelWebsocketHandler: Channels, VoilaShutdownKernelHandler: Goodbye, TornadoVoilaHandler: Page,
        }  # fmt: skip
        handlers = [
            (path, instead.get(what) or plain(what), *rest)
            for path, what, *rest in self.init_handlers()
            if not path.startswith(("/login", "/logout", "/voila/files"))
        ]
        application.add_handlers(".*$", handlers)
        return application

    async def run(self, listening: socket.socket, began: Callable[[], None]) -> None:
        """Serve on a listening socket until `end` is called."""
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        server = httpserver.HTTPServer(self.application("{}:{}".format(*listening.getsockname())), max_body_size=BODY)
        server.add_socket(listening)
        self._loop.set_exception_handler(lambda loop, what: None)  # of pages that nobody looks at any more
        began()
        await self._over.wait()
        server.stop()
        await self.kernel_manager.shutdown_all(now=True)
        if pages := asyncio.all_tasks() - {asyncio.current_task()}:  # that are being made; some do not heed it
            for page in pages:
                page.cancel()
            await asyncio.wait(pages, timeout=2)
            await self.kernel_manager.shutdown_all(now=True)  # what they had begun to start

    def end(self) -> None:
        """Make `run` return. Safe to call from a signal handler."""
        if self._loop is None:  # not begun
            raise KeyboardInterrupt
        self._loop.call_soon_threadsafe(self._over.set)
