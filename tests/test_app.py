"""The server of `vitlens app`, by bare requests: its door, its pages and its end."""

import asyncio
import contextlib
import http.client
import io
import json
import signal
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
import timm
import torch
from PIL import Image, ImageChops, ImageStat
from support import PATIENCE, Served
from timm.models import save_for_hf
from tornado.httpclient import HTTPClientError

from vitlens_explorer.app import ssh_line
from vitlens_explorer.lanes import QUICK
from vitlens_explorer.photographs import sample_photographs


def run(coroutine):
    """Result of a coroutine in a separate thread, because the browser of other tests has a loop in this one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


async def message(socket):
    """Name and value of the next message, or None once the socket is closed."""
    if (data := await asyncio.wait_for(socket.read_message(), PATIENCE)) is None:
        return None
    (length,) = struct.unpack("<I", data[:4])
    head = json.loads(data[4 : 4 + length])
    return head["name"], head["value"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder, arguments = (
        tmp_path_factory.mktemp("app") / "vit",
        {"img_size": 64, "embed_dim": 48, "depth": 2},
    )
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", num_heads=3, num_classes=10, **arguments)
    save_for_hf(model, folder, model_args=arguments | {"num_heads": 3}, safe_serialization=True)
    return folder


@pytest.fixture(scope="module")
def served(folder):
    served = Served(folder)
    yield served
    served.end()
    assert served.error is None and not served.app.sockets


def refused(served, path="", **headers):
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(urllib.request.Request(served.address + path, headers=headers))
    assert "Traceback" not in error.value.read().decode()
    return error.value.code


def test_app_requires_cookie_and_serves_named_files(served):
    cookie = served.cookie()
    for path in ("", "?token=wrong", "front.js", "app.js", "photograph", "socket", "nothing"):
        assert refused(served, path) == 403
    name, token = cookie.split("=")[0], served.opening.split("=")[1]
    assert refused(served, Cookie=f"{name}={token}") == 403, "the token is no cookie"
    for path, kind in {
        "": "text/html",
        "front.js": "text/javascript",
        "photograph": "image/jpeg",
    }.items():
        answer = urllib.request.urlopen(
            urllib.request.Request(served.address + path, headers={"Cookie": cookie})
        )
        assert answer.headers["Content-Type"].startswith(kind)
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    for path in ("nothing", "app.py", "%2e%2e/app.py", "front.js/x", "%00", "static/front.js"):
        assert refused(served, path, Cookie=cookie) == 404
    connection = http.client.HTTPConnection(served.app.host)
    with contextlib.suppress(ConnectionError):
        connection.request("POST", "/", body=bytes(2**20 + 1), headers={"Cookie": cookie})
        assert connection.getresponse().status >= 400


LOCAL = ("127.0.0.1:9000", "localhost:{port}", "localhost:9000", "LOCALHOST", "[::1]:9000", "[::1]")
FOREIGN = (
    "vitlens.example",
    "vitlens.example:{port}",
    "localhost.vitlens.example",
    "127.0.0.1.vitlens.example:{port}",
    "vitlens.example:127.0.0.1",
    "localhost@vitlens.example",
    "localhost:80:80",
    "0.0.0.0:{port}",
    "192.168.0.2:{port}",
    "[::]:{port}",
    "notlocalhost:{port}",
    "",
)


def test_app_serves_names_of_this_machine_only(served):
    """With any port, which may be that of a tunnel. The token is needed under all of them."""
    cookie = served.cookie()
    for name in LOCAL:
        host = name.format(port=served.app.port)
        assert refused(served, Host=host) == 403
        request = urllib.request.Request(served.address, headers={"Cookie": cookie, "Host": host})
        answer = urllib.request.urlopen(request)
        assert f"ws://{host};" in answer.headers["Content-Security-Policy"]
    for name in FOREIGN:
        host = name.format(port=served.app.port)
        connection = http.client.HTTPConnection(served.app.host)
        connection.putrequest("GET", f"/?token={served.app.token}", skip_host=True)
        connection.putheader("Host", host)
        connection.putheader("Cookie", cookie)
        connection.endheaders()
        answer = connection.getresponse()
        assert answer.status >= 400 and "Set-Cookie" not in answer.headers, host
        if answer.status == 421:
            words = answer.read().decode()
            assert f"ssh -L {served.app.port}:127.0.0.1:{served.app.port} SERVER" in words
    assert "token of its address" in refusal(served, Host="localhost:1")


def refusal(served, **headers):
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(urllib.request.Request(served.address, headers=headers))
    return error.value.read().decode()


def test_ssh_line(monkeypatch):
    monkeypatch.setattr("getpass.getuser", lambda: "me")
    for connection, line in (
        ("10.0.0.1 5022 10.0.0.2 22", "ssh -L 8000:127.0.0.1:8000 me@10.0.0.2"),
        ("fe80::1 5022 fe80::2 2222", "ssh -L 8000:127.0.0.1:8000 -p 2222 me@fe80::2"),
        ("", ""),
    ):
        monkeypatch.setenv("SSH_CONNECTION", connection)
        assert ssh_line("http://127.0.0.1:8000/?token=x") == line


def test_socket_answers_pings_and_refuses_messages_of_wrong_types(served, caplog):
    """Without an error in the log, and without an effect on other pages."""

    def packed(content, buffer=b""):
        head = json.dumps(content).encode()
        return struct.pack("<I", len(head)) + head + buffer

    wrong = (
        json.dumps({"upload": "a.png", "file": 1, "at": 0, "of": 9}),  # as text, without a buffer
        json.dumps({"upload": "a.png"}),
        '{"number": "x"}',
        '{"number": 1e400}',
        '{"number": -1, "cancel": true}',
        '{"set": [1]}',
        "[" * 5000,
        '{"set": {"off": ' + "[" * 5000 + "]" * 5000 + "}}",
        packed({"upload": 3, "file": 1, "at": 0, "of": 9}, b"x"),
        packed({"upload": "a.png", "file": "1", "at": 0, "of": 9}, b"x"),
        packed({"upload": "a.png", "file": 1, "at": 0, "of": None}, b"x"),
        packed({"upload": "a.png", "file": 1, "at": 0}, b"x"),
        b"",
    )

    async def begun(socket):
        while (await message(socket))[0] != "frame":
            pass

    async def talk():
        cookie = served.cookie()
        other = await served.socket(cookie)
        await begun(other)
        for sent in wrong:
            socket = await served.socket(cookie)
            await begun(socket)
            await socket.write_message(sent, binary=isinstance(sent, bytes))
            while await message(socket):
                pass
        await other.write_message('{"ping": true}')
        while (received := await message(other)) != ("pong", True):
            pass
        for values, words in (
            ({"off": [["x"]]}, "There is no head “x”. A head is its layer and its number"),
            ({"off": 3}, "There is no head “3”"),
            ({"off": [[0, 99]]}, "(layer, head) must be from"),
            ({"view": "zzz"}, "'View' must be one of its menu, got 'zzz'."),
            ({"view": "norm"}, "Did you mean norms?"),
            ({"view": {}}, "'View' must be one of its menu, got {}."),
        ):
            await other.write_message(json.dumps({"set": values, "number": 7}))
            while (received := await message(other))[0] != "frame":
                pass
            assert words in received[1]["message"], values
        other.close()

    run(talk())
    assert not caplog.records


def test_socket_checks_cookie_origin_and_size(served):
    async def talk():
        cookie = served.cookie()
        for given, origin in (
            ("", None),
            (cookie, "http://vitlens.example"),
            (cookie, "http://127.0.0.1:1"),
        ):
            with pytest.raises(HTTPClientError, match="403"):
                await served.socket(given, origin)
        for wrong in (b"x" * (2**20 + 1), "no json", "[]", '{"job": [1]}', b"x"):
            socket = await served.socket(cookie)
            assert (await message(socket))[0] == "step"
            await socket.write_message(wrong, binary=isinstance(wrong, bytes))
            while await message(socket):
                pass

    run(talk())


def test_app_pages_share_one_model_and_are_limited(served):
    async def talk():
        cookie = served.cookie()
        sockets = [await served.socket(cookie) for _ in range(17)]
        assert "16 pages are open" in (await message(sockets.pop()))[1]
        for socket in sockets:
            while (received := await message(socket))[0] != "frame":
                pass
            assert received[1]["panels"] and received[1]["message"] == ""
        assert {id(socket.connection.page.model) for socket in served.app.sockets} == {
            id(served.app.model)
        }
        for socket in sockets:
            socket.close()
        while served.app.sockets:
            await asyncio.sleep(0.01)

    run(talk())


def test_app_shows_step_while_opening(folder):
    may = threading.Event()
    QUICK.submit(lambda check: may.wait(PATIENCE))
    served = Served(folder)

    async def talk():
        cookie = served.cookie()
        photograph = urllib.request.Request(
            served.address + "photograph", headers={"Cookie": cookie}
        )
        preview = Image.open(io.BytesIO(urllib.request.urlopen(photograph).read()))
        expected = next(iter(sample_photographs().values())).image.resize(preview.size)
        assert preview.format == "JPEG" and ImageStat.Stat(
            ImageChops.difference(preview, expected)
        ).mean < [8, 8, 8]
        socket = await served.socket(cookie)
        assert await message(socket) == ("step", "Importing PyTorch …")
        may.set()
        received = [await message(socket) for _ in range(4)]
        assert [value.split()[0] for name, value in received[:2] if name == "step"] == [
            "Opening",
            "Drawing",
        ]
        assert [name for name, _ in received[2:]] == ["pictures", "frame"]

    run(talk())
    served.end()


def test_app_shows_error_of_opening(tmp_path):
    may = threading.Event()
    QUICK.submit(lambda check: may.wait(PATIENCE))
    served = Served(tmp_path)

    async def talk():
        socket = await served.socket(served.cookie())
        may.set()
        received = []
        while (each := await message(socket)) is not None:
            received.append(each)
        return received

    received = run(talk())
    served.thread.join(PATIENCE)
    assert served.error and received[-1] == ("step", str(served.error))


def test_app_interrupt_ends_download():
    code = (
        "import sys, time, types\n"
        "from vitlens_explorer.app import serve\n"
        "def load_vit(name, **_):\n"
        "    print('downloading', flush=True)\n"
        "    time.sleep(600)\n"
        "sys.modules['vitlens.models.opening'] = types.SimpleNamespace(load_vit=load_vit)\n"
        "sys.modules['vitlens.recorder.supported'] = types.SimpleNamespace(attention_modules=None, unwrap=None)\n"
        "serve('a model', browser=False)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        lines = [process.stdout.readline() for _ in range(2)]
        assert lines[0].startswith("http://127.0.0.1:") and lines[1] == "downloading\n"
        started = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=PATIENCE)[1] == "" and process.returncode == 0
        assert time.monotonic() - started < 5
