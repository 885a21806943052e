"""`vitlens app` in a real browser and by bare requests: its maps, its lanes and its door."""

import asyncio
import http.client
import io
import json
import struct
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
from PIL import Image
from tornado.httpclient import HTTPClientError, HTTPRequest
from tornado.websocket import websocket_connect

from browser.fronts import MARKS, START, App, move
from vitlens.images import samples

pytestmark = MARKS


@pytest.fixture(scope="module")
def app(model, tmp_path_factory):
    with App(model, tmp_path_factory.mktemp("app")) as app:
        yield app


@pytest.fixture(scope="module")
def cookie(app):
    answer = urllib.request.urlopen(app.opening)
    header = answer.headers["Set-Cookie"]
    assert "HttpOnly" in header and "SameSite=Strict" in header and app.opening.split("=")[1] not in header
    return header.split(";")[0]


@pytest.fixture
def visitor(browser):
    with browser.new_context(viewport={"width": 1300, "height": 1000}) as context:
        context.set_default_timeout(START)
        yield context


def shows(page, words):
    page.wait_for_function("words => document.querySelector('figcaption')?.textContent.includes(words)", arg=words)


def test_app_shows_maps_uploads_and_stays_quick(app, visitor, tmp_path):
    """A click is answered while KernelSHAP runs, and a new setting cancels it."""
    page, requests, errors = visitor.new_page(), [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    app.open(page)
    assert page.url == app.address, "the token leaves the address bar"
    assert [url for url in requests if not url.startswith((app.address, "data:", "blob:"))] == []
    shows(page, "Attention from the read-out (class token), layer 3")
    box = page.locator(".picture canvas").bounding_box()
    page.mouse.click(box["x"] + 0.7 * box["width"], box["y"] + 0.3 * box["height"])
    shows(page, "row 2, column 5")
    move(page, "layer", 1)
    shows(page, "layer 1")
    page.wait_for_selector(".dots svg")
    page.locator("[data-control=view] select").select_option(label="KernelSHAP")
    page.wait_for_timeout(300)
    second = visitor.new_page()
    started = time.monotonic()
    second.goto(app.address)
    second.wait_for_selector(".vitlens[data-answers]")
    print(f"a second page beside KernelSHAP: {time.monotonic() - started:.2f} s")
    page.locator("[data-control=view] select").select_option(label="Length of tokens")
    shows(page, "Length of the patch tokens")
    (file := tmp_path / "noise.png").write_bytes(noise := _noise())
    assert len(noise) > 2**20
    page.locator("input[type=file]").set_input_files(file)
    chosen = "document.querySelector('[data-control=photograph] select').selectedOptions[0].text"
    page.wait_for_function(f"() => {chosen} === 'noise.png'")
    (file := tmp_path / "notes.png").write_text("no image")
    page.locator("input[type=file]").set_input_files(file)
    page.wait_for_function("() => document.querySelector('.alert').textContent.includes('notes.png')")
    shows(page, "Length of the patch tokens")
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save").click()
    assert saved.value.suggested_filename.startswith("vitlens-norms")
    assert errors == []


def _noise():
    pixels = np.random.default_rng(0).integers(0, 256, (800, 900, 3), np.uint8)
    Image.fromarray(pixels).save(file := io.BytesIO(), "PNG")
    return file.getvalue()


def test_app_holds_one_model_for_all_pages(app, visitor):
    app.open(visitor.new_page())
    process = psutil.Process(app.process.pid)
    before, pages = process.memory_info().rss, [visitor.new_page() for _ in range(9)]
    for page in pages:
        page.goto(app.address)
        page.wait_for_selector(".vitlens[data-answers]")
    assert process.children() == []
    assert process.memory_info().rss - before < 300 * 2**20, "the small model's captures, six photographs a page"


def test_app_names_what_ended(model, visitor, tmp_path):
    samples()["coffee"].save(cup := tmp_path / "cup.png")
    with App(model, tmp_path, cup) as app:
        page = visitor.new_page()
        app.open(page)
        assert page.locator("[data-control=photograph] option:checked").inner_text() == "the image given"
    page.wait_for_function("() => document.querySelector('.alert').textContent.includes('has ended')")
    assert page.locator(".body").evaluate("node => node.inert")


def refused(app, path="", **headers):
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(urllib.request.Request(app.address + path, headers=headers))
    words = error.value.read().decode()
    assert "Traceback" not in words
    return error.value.code


def test_app_serves_nothing_without_token_cookie_and_own_host(app, cookie):
    for path in ("", "?token=wrong", "front.js", "app.js", "photograph", "socket", "nothing"):
        assert refused(app, path) == 403
    assert refused(app, Cookie=cookie, Host="vitlens.example") == 403
    assert refused(app, Cookie=f"{cookie.split('=')[0]}={app.opening.split('=')[1]}") == 403, "the token is no cookie"


def test_app_serves_only_named_files(app, cookie):
    for name, kind in {"": "text/html", "front.js": "text/javascript", "photograph": "image/jpeg"}.items():
        answer = urllib.request.urlopen(urllib.request.Request(app.address + name, headers={"Cookie": cookie}))
        assert answer.headers["Content-Type"].startswith(kind)
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    for path in ("nothing", "app.py", "%2e%2e/app.py", "front.js/x", "%00", "static/front.js"):
        assert refused(app, path, Cookie=cookie) == 404
    connection = http.client.HTTPConnection(app.host)
    try:
        connection.request("POST", "/", body=bytes(2**20 + 1), headers={"Cookie": cookie})
        assert connection.getresponse().status >= 400
    except ConnectionError:
        pass


def connect(app, cookie, origin=None):
    headers = {"Cookie": cookie, "Origin": origin or app.address.rstrip("/")}
    return websocket_connect(HTTPRequest(app.address.replace("http", "ws") + "socket", headers=headers))


def test_socket_checks_cookie_origin_and_size(app, cookie):
    async def talk():
        for given, origin in (("", None), (cookie, "http://vitlens.example"), (cookie, "http://127.0.0.1:1")):
            with pytest.raises(HTTPClientError, match="403"):
                await connect(app, given, origin)
        for message in (b"x" * (2**20 + 1), "no json", "[]", '{"job": [1]}', b"x"):
            socket = await connect(app, cookie)
            assert b'"step"' in await socket.read_message()
            await socket.write_message(message, binary=isinstance(message, bytes))
            while await socket.read_message() is not None:
                pass
        sockets = [await connect(app, cookie) for _ in range(17)]
        (length,) = struct.unpack("<I", (first := await sockets[-1].read_message())[:4])
        assert "16 pages are open" in json.loads(first[4 : 4 + length])["value"]
        for socket in sockets:
            socket.close()

    with ThreadPoolExecutor(1) as pool:  # Playwright's loop runs in this thread
        pool.submit(asyncio.run, talk()).result(120)
    assert app.log.read_text() == ""
