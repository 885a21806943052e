"""Saved and live pages in Debian's Firefox, driven by its Marionette protocol, which Playwright does not use."""

import base64
import io
import json
import shutil
import socket
import subprocess
import time

import numpy as np
import pytest
import torch
from PIL import Image, PngImagePlugin

from browser.fronts import MARKS
from vitlens.images import samples
from vitlens.models import preprocess
from vitlens_explorer import save_page
from vitlens_explorer.live import save_live_page

FIREFOX = shutil.which("firefox-esr")
pytestmark = [MARKS, pytest.mark.skipif(not FIREFOX, reason="needs firefox-esr")]
DRAWN = """
const canvas = document.querySelector(".vitlens[data-answers] .panel canvas");
if (!canvas || canvas.width < 16) return null;
const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
return [document.querySelector(".panel .exact").textContent, Array.from(data.filter((_, k) => k % 1009 === 0))];
"""


class Marionette:
    """A headless Firefox with an empty profile, in a `with` block."""

    def __init__(self, folder):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        (folder / "user.js").write_text(f'user_pref("marionette.port", {self.port});\n')
        command = [FIREFOX, "--headless", "--no-remote", "--marionette", "--profile", str(folder)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def __enter__(self):
        for _ in range(120):
            try:
                self.file = socket.create_connection(("127.0.0.1", self.port), 60).makefile("rwb")
                break
            except OSError:
                time.sleep(0.5)
        self._read()
        self.send("WebDriver:NewSession")
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(30)

    def send(self, name: str, **values):
        """The result of a command."""
        message = json.dumps([0, 1, name, values]).encode()
        self.file.write(b"%d:%s" % (len(message), message))
        self.file.flush()
        _, _, error, result = self._read()
        assert error is None, error
        return result

    def _read(self):
        length = b""
        while (letter := self.file.read(1)) != b":":
            length += letter
        return json.loads(self.file.read(int(length)))


@pytest.fixture(scope="module")
def firefox(tmp_path_factory):
    with Marionette(tmp_path_factory.mktemp("profile")) as firefox:
        firefox.send("WebDriver:SetTimeouts", script=60_000)
        yield firefox


def drawn(firefox, path):
    """Caption and levels of the map of a page, when it is drawn."""
    firefox.send("WebDriver:Navigate", url=path.as_uri())
    for _ in range(240):
        if found := firefox.send("WebDriver:ExecuteScript", script=DRAWN, args=[])["value"]:
            return found
        time.sleep(0.25)
    raise AssertionError("The page was not drawn within a minute.")


def test_saved_page_draws_in_firefox(vit, firefox, tmp_path):
    save_page(vit(), {"chelsea": samples()["chelsea"]}, tmp_path / "page.html")
    words, levels = drawn(firefox, tmp_path / "page.html")
    assert words.startswith("Attention from")
    assert len(np.unique(levels)) > 20, "an image, not one color"


UPLOAD = """
const [name, data, done] = arguments;
const { source } = document.querySelector("#page");
const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0)).buffer;
window.number = (window.number || Date.now()) + 1;
source.send({ upload: name, file: window.number, of: 1, number: window.number }, undefined, [bytes]);
source.turn.then(() => {
  const { about, message } = source.traits.frame;
  const { given, logits } = source.record;
  done([about, message, Array.from(given.input), Array.from(logits)]);
});
"""


def upload(firefox, name, file):
    """About, message, model input and logits of a live page after a file was uploaded."""
    args = [name, base64.b64encode(file).decode()]
    answer = firefox.send("WebDriver:ExecuteAsyncScript", script=UPLOAD, args=args)["value"]
    about, message, pixels, logits = answer
    return about, message, np.array(pixels, np.float32), np.array(logits)


def test_live_page_runs_in_firefox(vit, firefox, tmp_path):
    """The worker, WebAssembly and the decoder: inputs to the bit where the page does not say otherwise."""
    model, photo = vit(num_classes=5), samples()["chelsea"]
    save_live_page(model, {"rocket": samples()["rocket"]}, tmp_path / "live.html")
    words, levels = drawn(firefox, tmp_path / "live.html")
    assert words.startswith("Attention from") and len(np.unique(levels)) > 20
    alpha = np.random.default_rng(0).integers(0, 256, photo.size[::-1], np.uint8)
    upright = Image.Exif()
    upright[0x0112] = 6
    gamma = PngImagePlugin.PngInfo()
    gamma.add(b"gAMA", (100_000).to_bytes(4, "big"))
    files = {
        "plain.png": file_of(photo, "PNG"),
        "gamma.png": file_of(photo, "PNG", pnginfo=gamma),
        "plain.jpg": file_of(photo, "JPEG"),
        "turned.jpg": file_of(photo, "JPEG", exif=upright),
        "turned.webp": file_of(photo, "WEBP", lossless=True, exif=upright),
        "alpha.png": file_of(Image.fromarray(np.dstack([np.asarray(photo), alpha])), "PNG"),
    }
    for name, file in files.items():
        about, message, pixels, logits = upload(firefox, name, file)
        exact = preprocess(model, file, size=(64, 64))
        assert message == ""
        assert ("was turned upright" in about) == name.startswith("turned"), about
        off = np.abs(pixels.reshape(exact.shape) - exact.numpy()).max()
        if "may differ" not in about:
            assert off == 0, name
            with torch.inference_mode():
                np.testing.assert_allclose(logits, model(exact)[0], atol=1e-4)
        assert off < 0.1, f"{name}: {about}"  # of levels with a deviation of about 0.25
    assert ("decodes files such as “alpha.png”" in about) == (off > 0)
    half = {
        "cut.jpg": files["plain.jpg"][: len(files["plain.jpg"]) // 2],
        "cut.png": files["plain.png"][: len(files["plain.png"]) // 2],
        "cut.gif": file_of(photo, "GIF")[:20_000],
        "cut.webp": files["turned.webp"][:20_000],
    }
    for name, file in half.items():
        _, message, _, after = upload(firefox, name, file)
        assert f"“{name}” ends before its image does" in message
        assert np.array_equal(after, logits), "the last photo stays"


def file_of(image, kind, **options):
    image.save(file := io.BytesIO(), kind, **options)
    return file.getvalue()
