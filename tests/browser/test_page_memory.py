"""Memory of a live page under many uploads, of its page and its worker together."""

import json

import numpy as np
import pytest
from PIL import Image
from support import SPECIMEN

from browser.fronts import MARKS
from browser.test_open_model import READY, Opened
from vitlens import load_model, samples
from vitlens_explorer.live import save_live_page

pytestmark = [MARKS, pytest.mark.slow]
EARLY, LATE = 3, 60
"""Numbers of uploads after which the memory is compared."""
GROWTH = 1.5
"""Largest ratio of both."""


class Memory:
    """Bytes that a page and its worker hold after a collection of garbage: objects and array buffers."""

    def __init__(self, page):
        self.page, self.answers, self.number = page, {}, 0
        self.session = page.context.new_cdp_session(page)
        self.workers = []
        self.session.on("Target.attachedToTarget", self._attach)
        self.session.on("Target.receivedMessageFromTarget", self._receive)
        options = {"autoAttach": True, "waitForDebuggerOnStart": False, "flatten": False}
        self.session.send("Target.setAutoAttach", options)

    def _attach(self, event):
        self.workers.append(event["sessionId"])

    def _receive(self, event):
        answer = json.loads(event["message"])
        if "id" in answer:
            self.answers[answer["id"]] = answer

    def _ask_worker(self, worker: str, method: str) -> dict:
        self.number += 1
        message = json.dumps({"id": self.number, "method": method})
        self.session.send("Target.sendMessageToTarget", {"sessionId": worker, "message": message})
        while self.number not in self.answers:
            self.page.wait_for_timeout(20)
        return self.answers.pop(self.number)["result"]

    def held(self) -> tuple[int, int]:
        """Bytes of the page and of its worker."""
        assert len(self.workers) == 1
        page, worker = self.session.send, lambda method: self._ask_worker(self.workers[0], method)
        sizes = []
        for ask in (page, worker):
            for _ in range(2):
                ask("HeapProfiler.collectGarbage")
            usage = ask("Runtime.getHeapUsage")
            sizes.append(round(usage["usedSize"] + usage["backingStorageSize"]))
        return sizes[0], sizes[1]


def test_memory_after_sixty_uploads_is_that_after_three(browser, tmp_path):
    """Of photographs of 640 × 480 pixels with noise, which compress badly, in a page with a ViT-Ti."""
    model, random = load_model(SPECIMEN), np.random.default_rng(0)
    path = save_live_page(model, {"chelsea": samples()["chelsea"]}, tmp_path / "page.html")
    opened = Opened(browser, path, READY)
    memory, sizes = Memory(opened.page), {}
    for number in range(1, LATE + 1):
        pixels = random.integers(0, 256, (480, 640, 3), np.uint8)
        Image.fromarray(pixels).save(file := tmp_path / f"{number}.jpg", quality=80)
        opened.page.set_input_files("input[type=file]", file)
        opened.page.locator(".heading", has_text=f"{number}.jpg").wait_for()
        if number in (EARLY, LATE):
            opened.frame()
            sizes[number] = memory.held()
    early, late = sum(sizes[EARLY]), sum(sizes[LATE])
    print(f"page, worker in bytes: {sizes}")
    assert early > 20e6, "weights and forwards are counted"
    assert late <= GROWTH * early, sizes
    opened.close()
