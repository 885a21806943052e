"""`vitlens app` in a real browser: whose page it is, what it asks for, and what becomes of its kernels."""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import nbformat
import psutil
import pytest
import zmq
from nbclient import NotebookClient
from nbconvert import HTMLExporter

from browser.fronts import MARKS, START, App, assert_gone_and_back, chromium, move

pytestmark = MARKS


SLOW = "import time\nfrom ipywidgets import Label\ntime.sleep(1)\nLabel('here I am')"
"""A cell for tests that need pages and no model. Its text is seen once the page is connected to its kernel."""
SHOWN = "text=here I am"


def window(browser):
    """A browser window of a person's own."""
    context = browser.new_context(viewport={"width": 1300, "height": 1000})
    context.set_default_timeout(START)
    return context


@pytest.fixture
def visitor(browser):
    with window(browser) as context:
        yield context


@pytest.fixture
def start(model, tmp_path):
    """Start the app with a cell that needs no model."""
    with contextlib.ExitStack() as started:
        yield lambda **options: started.enter_context(App(model, tmp_path, SLOW, **options))


@pytest.fixture(scope="module")
def served(model, tmp_path_factory):
    """The app with a cell that needs no model, and the cookie of somebody who opened its address."""
    with App(model, tmp_path_factory.mktemp("served"), SLOW) as app:
        yield app, urllib.request.urlopen(app.opening).headers["Set-Cookie"].split(";")[0]


class Explored:
    """The explorer's app, a page of it, and what that page asked for since it was opened."""

    def __init__(self, app, context):
        self.app, self.asked, self.failed, self.page = app, [], [], context.new_page()
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("requestfailed", lambda request: self.failed.append(request.url))
        self.page.on("response", lambda response: response.status >= 400 and self.failed.append(response.url))
        app.open(self.page)

    def move(self, layer):
        move(self.page, "layer", layer)
        self.page.wait_for_function(
            "says => document.querySelector('figcaption').textContent.includes(says)", arg=f"layer {layer}"
        )


@pytest.fixture(scope="module")
def explored(model, browser, tmp_path_factory):
    with App(model, tmp_path_factory.mktemp("explored"), linger=10) as app, window(browser) as context:
        yield Explored(app, context)


def test_kernels_end_with_their_pages(start, visitor):
    app = start(sessions=10, linger=20)  # a busy machine may take as long to connect
    first = visitor.new_page()
    first.goto(app.opening)
    for _ in range(10):
        first.reload(wait_until="commit")
        first.wait_for_timeout(300)
    first.wait_for_selector(SHOWN)
    app.wait(1)
    kept = app.kernels()
    others = [visitor.new_page() for _ in range(9)]
    for page in others:
        page.goto(app.address, wait_until="commit")
    app.wait(10)
    one_more = visitor.new_page()
    assert one_more.goto(app.address).status == 503
    assert "As many pages are open as are allowed (10)" in one_more.locator("[role=alert]").inner_text()
    for page in others:  # while their cells still run, too
        page.close()
    app.wait(1)
    assert app.kernels() == kept
    one_more.reload()
    one_more.wait_for_selector(SHOWN)
    app.wait(2)
    first.close()
    one_more.close()
    app.wait(0)


def test_a_page_may_go_while_it_connects_to_a_busy_kernel(model, tmp_path):
    """The server then asks the kernel how it is and waits; nothing is logged, which `App` looks at when it ends."""
    with App(model, tmp_path, "import time\ntime.sleep(3)") as app:
        cookie = urllib.request.urlopen(app.opening).headers["Set-Cookie"].split(";")[0]
        page = urllib.request.urlopen(urllib.request.Request(app.address, headers={"Cookie": cookie}))
        text, host = "", app.address.split("/")[2]
        while not (kernel := re.search(r'"kernelId": "([-\w]+)"', text)):
            text += page.read1().decode()
        with socket.create_connection(host.split(":"), 10) as connection:
            connection.sendall(
                f"GET /api/kernels/{kernel[1]}/channels?session_id=x HTTP/1.1\r\nHost: {host}\r\nCookie: {cookie}\r\n"
                f"Origin: http://{host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
                "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode()
            )
            time.sleep(0.5)  # until the request has come
        page.read()
        time.sleep(2)
        page.close()


def test_a_reload_needs_no_place_of_its_own(start, visitor):
    app, page, sockets = start(sessions=1), visitor.new_page(), []

    def opened(socket):
        sockets.append([])
        socket.on("framereceived", lambda frame, frames=sockets[-1]: frames.append(frame))

    page.on("websocket", opened)
    page.goto(app.opening)
    for reloads in range(3):
        page.wait_for_selector(SHOWN)
        while len(sockets) <= reloads or not sockets[reloads]:  # until the page is connected to its kernel
            page.wait_for_timeout(50)
        if reloads < 2:
            del sockets[reloads + 1 :]
            assert page.reload(wait_until="commit").status == 200
    app.wait(1)


def test_nothing_is_asked_of_other_machines(explored):
    page, asked, address = explored.page, explored.asked, explored.app.address
    page.wait_for_load_state("networkidle")
    explored.move(1)
    assert len(asked) > 10 and [url for url in asked if not url.startswith((address, "data:", "blob:"))] == []
    assert explored.failed == []
    found = page.evaluate("fetch('http://vitlens.example/').then(() => 'sent', () => 'refused')")
    policy = page.request.get(address + "nothing").headers["content-security-policy"]
    assert found == "refused" and "default-src 'self'" in policy, "nor could it be: the browser is told so"


def test_kernels_of_browsers_that_vanish_end_even_at_work(explored, playwright):
    """Without a goodbye, and while a map is computed that takes minutes."""
    app, kept = explored.app, len(explored.app.kernels())
    before = set(psutil.Process().children(recursive=True))
    page = chromium(playwright).new_page()
    page.set_default_timeout(START)
    started = [each for each in psutil.Process().children(recursive=True) if each not in before]
    app.open(page)
    page.locator("[data-control=view] select").select_option(label="KernelSHAP")
    page.wait_for_timeout(500)
    for end in (psutil.Process.suspend, psutil.Process.kill):  # all at once, or one says goodbye for another
        for each in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                end(each)
    assert len(app.kernels()) == kept + 1  # one that might come back has a while
    app.wait(kept)


def test_a_converted_notebook_asks_nothing_of_other_machines_if_told_so(model, visitor, tmp_path):
    """With the options that notebooks/README.md names; without them nbconvert alone asks, and nothing of ours."""
    book = nbformat.read(model.parent / "explorer.ipynb", 4)
    NotebookClient(book, resources={"metadata": {"path": str(model.parent)}}).execute()
    assert "widgets" in book.metadata  # the widget's state is in the file
    readme = (Path(__file__).parents[2] / "notebooks/README.md").read_text()
    options = re.findall(r"--HTMLExporter\.(\w+)=(\S*)", readme)
    assert len(options) == 3
    asked = {}
    for name, told in {"stock": {}, "told": dict(options)}.items():
        (file := tmp_path / f"{name}.html").write_text(HTMLExporter(**told).from_notebook_node(book)[0], "utf-8")
        page = visitor.new_page()
        page.route("http*://**", lambda route: route.abort())
        page.on("request", lambda request, name=name: asked.setdefault(name, []).append(request.url))
        page.goto(file.as_uri())
        page.wait_for_timeout(1000)
        assert "explorer = widgets.explore(model)" in page.inner_text("body")
    assert [url for url in asked["told"] if not url.startswith(("file:", "data:"))] == []
    assert {re.sub(r"[@\d].*", "", url) for url in asked["stock"] if url.startswith("http")} <= {
        "https://cdnjs.cloudflare.com/ajax/libs/require.js/", "https://cdnjs.cloudflare.com/ajax/libs/mathjax/",
        "https://unpkg.com/",
    }  # fmt: skip


def test_the_address_is_clean_and_the_cookie_for_this_page_alone(start, visitor, tmp_path):
    app = start()
    (opener := tmp_path / "opener.html").write_text(f'<meta http-equiv="refresh" content="0; url={app.opening}">')
    page = visitor.new_page()
    page.goto(opener.as_uri())  # as a browser is opened
    page.wait_for_selector(SHOWN)
    assert page.url == app.address
    token = app.opening.split("=")[1]
    assert token not in page.evaluate("() => document.referrer + document.documentElement.outerHTML")
    page.go_back()
    assert token not in page.url
    port = app.address.split(":")[-1].strip("/")
    cookies = visitor.cookies(app.address)
    assert cookies and all(each["sameSite"] == "Strict" and port in each["name"] for each in cookies)
    other = start()
    page.goto(other.opening, wait_until="commit")
    page.wait_for_url(other.address)
    assert visitor.request.get(app.address + "nothing").status == 404  # known still: 403 for others


def test_without_the_token_there_is_a_sentence(served, visitor):
    app, _ = served
    page = visitor.new_page()
    for path in ("", "?token=wrong", "login", "login?next=/", "logout", "voila/render/x.ipynb"):
        assert page.goto(app.address + path).status == 403
        assert "for whoever started it" in page.locator("[role=alert]").inner_text()
        assert "assword" not in page.content() and page.locator("input, form").count() == 0
    assert app.kernels() == []


@pytest.mark.parametrize("path", [
    "nothing", "login", "voila/files/explorer.ipynb", "voila/templates/x", "voila/templates/lab/x/y",
    "voila/templates/lab/static/%2e%2e/%2e%2e/x", "voila/templates/lab/static/%00", "voila/static/nothing.js",
    "voila/static/%00", "voila/labextensions/nothing/x.js", "voila/labextensions/%00", "voila/api/themes/nothing/x.css",
    "api/kernels", "api/kernels/0a-0-0-0-0", "api/kernels/0a-0-0-0-0/channels", "%00",
])  # fmt: skip
def test_bad_paths_are_not_found(served, path):
    app, cookie = served
    request = urllib.request.Request(app.address + path, headers={"Cookie": cookie})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request)
    assert refused.value.code == 404
    words = refused.value.read().decode()
    assert "There is nothing here" in words and "Traceback" not in words and "Error" not in words
    assert app.log.read_text() == ""


def test_requests_have_a_size(served):
    app, cookie = served
    connection = http.client.HTTPConnection(app.address.split("/")[2])
    with contextlib.suppress(ConnectionError):  # it may be closed before all is sent
        connection.request("POST", "/voila/api/shutdown/x", body=bytes(2**20 + 1), headers={"Cookie": cookie})
        assert connection.getresponse().status >= 400
    assert urllib.request.urlopen(app.opening).status == 200


def test_other_names_are_refused(served):
    """A name of anybody's that leads to this machine would let their page read this one."""
    app, cookie = served
    request = urllib.request.Request(app.address, headers={"Cookie": cookie, "Host": "vitlens.example"})
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(request)


@pytest.mark.skipif(os.name != "posix" or not zmq.has("ipc"), reason="there are no sockets in files here")
def test_only_their_owner_can_listen_to_a_kernel(explored):
    app = explored.app
    (kernel,) = app.kernels()
    file = Path(next(word for word in kernel.cmdline() if word.endswith(".json")))
    assert json.loads(file.read_text())["transport"] == "ipc"
    assert (file.parent.stat().st_mode | file.stat().st_mode) & 0o077 == 0  # others neither list nor open
    with zmq.Context() as context, context.socket(zmq.SUB) as other:
        other.subscribe(b"")
        other.linger = 0
        for listening in kernel.net_connections("tcp"):
            if listening.status == psutil.CONN_LISTEN:
                other.connect(f"tcp://127.0.0.1:{listening.laddr.port}")
        time.sleep(0.5)
        explored.move(2)
        assert other.poll(500) == 0  # no map was heard


@pytest.mark.parametrize(("pages", "pause"), [(0, 0.5), (1, 0.05)])
def test_twice_ctrl_c_prints_no_traceback(model, tmp_path, visitor, pages, pause):
    with open(tmp_path / "log", "w") as log:
        app = subprocess.Popen(
            [sys.executable, "-m", "vitlens", "app", str(model), "--no-browser"],
            stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True,
        )  # fmt: skip
    address = app.stdout.readline().strip()
    for _ in range(pages):
        visitor.new_page().goto(address, wait_until="commit")
        time.sleep(1)  # a kernel is starting
    family = psutil.Process(app.pid).children(recursive=True)
    assert bool(family) == bool(pages)
    os.killpg(app.pid, signal.SIGINT)
    time.sleep(pause)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(app.pid, signal.SIGINT)
    assert app.wait(30) == 0 and app.stdout.read() == "" and (tmp_path / "log").read_text() == ""
    assert not psutil.wait_procs(family, 10)[1]


def test_it_is_said_when_the_kernel_is_gone(explored):
    (kernel,) = explored.app.kernels()
    assert_gone_and_back(explored.page, kernel, "Reload the page to begin anew.", explored.page.reload)


def test_the_app_opens_a_browser_and_keeps_its_token(model, browser, tmp_path):
    command = [sys.executable, "-m", "vitlens", "app", str(model)]
    (opener := tmp_path / "opener").write_text(f'#!/bin/sh\nprintf "%s" "$1" > {tmp_path}/url\ncat "${{1#file://}}"'
                                               f" > {tmp_path}/file\n")  # fmt: skip
    opener.chmod(0o700)
    quiet = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=quiet | {"BROWSER": f"{opener} %s"}) as app:
        try:
            address = app.stdout.readline().strip()
            assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{20,}", address)
            for _ in range(100):
                time.sleep(0.1)
                if (tmp_path / "file").exists() and (tmp_path / "file").read_text():
                    break
            assert f"url={address}" in (tmp_path / "file").read_text() and "token" not in (tmp_path / "url").read_text()
            opened = browser.new_page()
            opened.set_default_timeout(START)
            opened.goto(address)
            opened.wait_for_selector(".vitlens[data-answers]")
            assert "Attention from the read-out" in opened.locator("figcaption").inner_text()
            with pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(address.split("?")[0])
            family = psutil.Process(app.pid).children(recursive=True)
            token = address.split("=")[1]
            assert family and not any(token in " ".join(each.cmdline()) for each in family)
        finally:
            app.terminate()
            app.wait(30)
        assert app.returncode == 0 and not psutil.wait_procs(family, 20)[1]
