"""`vitlens app` in a real browser: whose page it is, what it asks for, and what becomes of its kernels."""

import contextlib
import http.client
import json
import os
import re
import signal
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

from browser.fronts import START, App, Front, chromium

pytestmark = [
    pytest.mark.skipif(os.environ.get("NO_BROWSER") == "1", reason="NO_BROWSER=1 leaves out what needs a browser"),
    pytest.mark.xdist_group("browser"),
]


@pytest.fixture
def app(model, tmp_path):
    started = App(model, tmp_path, sessions=10)
    yield started
    started.stop()
    assert started.process.returncode == 0 and started.log.read_text() == ""


@pytest.fixture
def visitor(browser):
    """A person with a browser window of their own."""
    context = browser.new_context(viewport={"width": 1300, "height": 1000})
    context.set_default_timeout(START)
    yield context
    context.close()


def move(page, layer=1):
    page.locator("[data-control=layer] input").evaluate(
        "(node, value) => { node.value = value; node.dispatchEvent(new Event('input')); }", layer
    )


SLOW = "import time\nfrom ipywidgets import Label\ntime.sleep(2)\nLabel('here I am')"
"""A cell for tests of many pages, which need not load a model ten times. It is seen once the page is connected."""
SHOWN = "text=here I am"


def test_kernels_end_with_their_pages(model, tmp_path, visitor):
    app = App(model, tmp_path, SLOW, sessions=10, linger=20)  # a busy machine may take as long to connect
    try:
        check_kernels(app, visitor)
    finally:
        app.stop()
    assert app.log.read_text() == ""


def check_kernels(app, visitor):
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
    eleventh = visitor.new_page()
    assert eleventh.goto(app.address).status == 503
    assert "As many pages are open as are allowed (10)" in eleventh.locator("[role=alert]").inner_text()
    for page in others:  # while their cells still run, too
        page.close()
    app.wait(1)
    assert app.kernels() == kept
    eleventh.reload()
    eleventh.wait_for_selector(SHOWN)
    app.wait(2)
    first.close()
    eleventh.close()
    app.wait(0)


def test_a_reload_needs_no_place_of_its_own(model, tmp_path, visitor):
    app = App(model, tmp_path, SLOW, sessions=1)
    try:
        page = visitor.new_page()
        page.goto(app.opening)
        for _ in range(3):
            page.wait_for_selector(SHOWN)
            assert page.reload(wait_until="commit").status == 200
        page.wait_for_selector(SHOWN)
        app.wait(1)
    finally:
        app.stop()


def test_kernels_of_browsers_that_vanish_end_even_at_work(model, tmp_path, playwright):
    """Without a goodbye, and while a map is computed that takes minutes."""
    app = App(model, tmp_path, linger=10)
    before = set(psutil.Process().children(recursive=True))
    page = chromium(playwright).new_page()
    started = [each for each in psutil.Process().children(recursive=True) if each not in before]
    app.open(page)
    page.locator("[data-control=view] select").select_option(label="Why this class: KernelSHAP")
    page.wait_for_timeout(500)
    try:
        for end in (psutil.Process.suspend, psutil.Process.kill):  # all at once, or one says goodbye for another
            for each in started:
                with contextlib.suppress(psutil.NoSuchProcess):
                    end(each)
        assert len(app.kernels()) == 1  # one that might come back has a while
        app.wait(0)
    finally:
        app.stop()


def test_nothing_is_asked_of_other_machines(app, visitor):
    asked, failed = [], []
    visitor.on("request", lambda request: asked.append(request.url))
    visitor.on("requestfailed", lambda request: failed.append(request.url))
    visitor.on("response", lambda response: failed.append(response.url) if response.status >= 400 else None)
    page = visitor.new_page()
    app.open(page)
    page.wait_for_load_state("networkidle")
    move(page)
    page.wait_for_function("() => document.querySelector('figcaption').textContent.includes('layer 1')")
    assert len(asked) > 10 and [url for url in asked if not url.startswith((app.address, "data:", "blob:"))] == []
    assert failed == []
    elsewhere = "http://vitlens.example/"  # nor could it be: the browser is told so
    found = page.evaluate(f"fetch('{elsewhere}').then(() => 'sent', () => 'refused')")
    assert found == "refused" and "default-src 'self'" in visitor.request.get(app.address + "nothing").headers.get(
        "content-security-policy"
    )


def test_a_converted_notebook_asks_nothing_of_other_machines_if_told_so(model, visitor, tmp_path):
    """With the options that the README names; without them nbconvert alone asks, and nothing of ours."""
    book = nbformat.read(model.parent / "explorer.ipynb", 4)
    NotebookClient(book, resources={"metadata": {"path": str(model.parent)}}).execute()
    assert "widgets" in book.metadata  # the widget's state is in the file
    options = re.findall(r"--HTMLExporter\.(\w+)=(\S*)", (Path(__file__).parents[2] / "README.md").read_text())
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


def test_the_address_is_clean_and_the_cookie_for_this_page_alone(app, visitor, model, tmp_path):
    (opener := tmp_path / "opener.html").write_text(f'<meta http-equiv="refresh" content="0; url={app.opening}">')
    page = visitor.new_page()
    page.goto(opener.as_uri())  # as a browser is opened
    page.wait_for_selector(".vitlens[data-answers]")
    assert page.url == app.address
    token = app.opening.split("=")[1]
    assert token not in page.evaluate("() => document.referrer + document.documentElement.outerHTML")
    page.go_back()
    assert token not in page.url
    port = app.address.split(":")[-1].strip("/")
    cookies = visitor.cookies(app.address)
    assert cookies and all(each["sameSite"] == "Strict" and port in each["name"] for each in cookies)
    (tmp_path / "other").mkdir()
    other = App(model, tmp_path / "other")
    try:
        page.goto(other.opening, wait_until="commit")
        page.wait_for_url(other.address)
        assert visitor.request.get(app.address + "nothing").status == 404  # known still: 403 for others
    finally:
        other.stop()


def test_without_the_token_there_is_a_sentence(app, visitor):
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


@pytest.fixture(scope="module")
def served(model, tmp_path_factory):
    """The app, and the cookie of somebody who opened it."""
    app = App(model, tmp_path_factory.mktemp("served"))
    cookie = urllib.request.urlopen(app.opening).headers["Set-Cookie"].split(";")[0]
    yield app, cookie
    app.stop()


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
def test_only_their_owner_can_listen_to_a_kernel(app, visitor):
    page = visitor.new_page()
    app.open(page)
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
        move(page)
        page.wait_for_function("() => document.querySelector('figcaption').textContent.includes('layer 1')")
        assert other.poll(500) == 0  # no map was heard


@pytest.mark.parametrize("pause", [0.05, 0.5])
@pytest.mark.parametrize("pages", [0, 1])
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


SAYS = {"app": "Reload the page to begin anew.", "lab": "Run the cell again", "notebook": "Run the cell again"}


@pytest.mark.parametrize("kind", SAYS)
def test_it_is_said_when_the_kernel_is_gone(kind, model, visitor, tmp_path):
    """Also in JupyterLab and Notebook, which start another kernel that knows nothing of the model."""
    front = App(model, tmp_path) if kind == "app" else Front(kind, model.parent)
    page = visitor.new_page()
    try:
        front.open(page, *["explorer.ipynb"] * (kind != "app"))
        page.wait_for_selector(".vitlens .dots svg")
        if kind == "lab":
            assert_patient(page)
        body, alert = page.locator(".vitlens .body").first, page.locator(".vitlens [role=alert]").first
        assert alert.inner_text() == "" and not body.evaluate("node => node.inert")
        (kernel,) = front.kernels()
        kernel.kill()
        move(page)
        in_time = 10_000  # two seconds, and what a busy machine adds
        page.wait_for_function("() => document.querySelector('.vitlens .body').inert", timeout=in_time)
        assert re.match("The (kernel|program)", alert.inner_text())
        page.wait_for_function(
            "says => document.querySelector('.vitlens .alert').textContent.includes(says)", arg=SAYS[kind]
        )
        page.wait_for_timeout(3000)  # another kernel has come, or not
        assert body.evaluate("node => node.inert") and SAYS[kind] in alert.inner_text()
        assert "working" not in page.locator(".vitlens .busy").inner_text()
        if kind == "app":
            page.reload()
        else:
            page.get_by_role("button", name="Ok", exact=True).click()
            page.evaluate("void window.jupyterapp.commands.execute('notebook:run-all-cells')")
        page.wait_for_function("() => document.querySelector('.vitlens .body')?.inert === false")
        move(page, 2)
        page.wait_for_function("() => document.querySelector('figcaption').textContent.includes('layer 2')")
        assert alert.inner_text() == ""
    finally:
        front.stop()


def assert_patient(page):
    """Nothing is said of a kernel that runs a cell for long."""
    page.evaluate("""() => {
        window.said = [];
        const node = document.querySelector(".vitlens .alert");
        new MutationObserver(() => said.push(node.textContent)).observe(node, { childList: true });
        void window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.requestExecute({
            code: "import time; time.sleep(4)"
        });
    }""")
    page.wait_for_timeout(500)
    for _ in range(3):
        move(page)
        page.wait_for_timeout(900)
    page.wait_for_function("() => document.querySelector('figcaption').textContent.includes('layer 1')")
    assert not any(page.evaluate("said"))


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
