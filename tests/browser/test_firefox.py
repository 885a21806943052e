"""A saved page in Debian's Firefox, driven by its Marionette protocol, which Playwright does not use."""

import json
import shutil
import socket
import subprocess
import time

import numpy as np
import pytest

from browser.fronts import MARKS
from vitlens.images import samples
from vitlens_explorer import save_page

FIREFOX = shutil.which("firefox-esr")
pytestmark = [MARKS, pytest.mark.skipif(not FIREFOX, reason="needs firefox-esr")]
DRAWN = """
const canvas = document.querySelector(".vitlens[data-answers] .panel canvas");
if (!canvas || canvas.width < 16) return null;
const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
return [document.querySelector(".panel figcaption").textContent, Array.from(data.filter((_, k) => k % 1009 === 0))];
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


def test_saved_page_draws_in_firefox(vit, tmp_path):
    save_page(vit(), {"chelsea": samples()["chelsea"]}, tmp_path / "page.html")
    (tmp_path / "profile").mkdir()
    with Marionette(tmp_path / "profile") as firefox:
        firefox.send("WebDriver:Navigate", url=(tmp_path / "page.html").as_uri())
        for _ in range(120):
            if drawn := firefox.send("WebDriver:ExecuteScript", script=DRAWN, args=[])["value"]:
                break
            time.sleep(0.25)
        words, levels = drawn
        assert words.startswith("Attention from")
        assert len(np.unique(levels)) > 20, "an image, not one color"
