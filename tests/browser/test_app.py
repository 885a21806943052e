"""`vitlens app` in a real browser."""

import io
import time

import numpy as np
from PIL import Image

from browser.fronts import MARKS, START, App, move
from vitlens.images import samples

pytestmark = MARKS


def test_app_shows_maps_uploads_and_stays_quick(model, browser, tmp_path):
    """A click is answered while KernelSHAP runs, and a new setting cancels it. An alert names the end."""
    samples()["coffee"].save(cup := tmp_path / "cup.png")
    context, requests, errors = browser.new_context(viewport={"width": 1300, "height": 1000}), [], []
    context.set_default_timeout(START)
    page = context.new_page()
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))

    def shows(words):
        page.wait_for_function("words => document.querySelector('figcaption')?.textContent.includes(words)", arg=words)

    with App(model, tmp_path, cup) as app:
        page.goto(app.opening)
        page.wait_for_selector("img[src='/photograph'], .vitlens")
        page.wait_for_selector(".vitlens[data-answers]")
        assert page.url.split("#")[0] == app.address, "the token leaves the address bar"
        assert [url for url in requests if not url.startswith((app.address, "data:", "blob:"))] == []
        chosen = "document.querySelector('[data-control=photograph] select').selectedOptions[0].text"
        assert page.evaluate(chosen) == "the image given"
        shows("Attention from the read-out (class token), layer 2")
        box = page.locator(".picture canvas").bounding_box()
        page.mouse.click(box["x"] + 0.7 * box["width"], box["y"] + 0.3 * box["height"])
        shows("row 2, column 5")
        move(page, "layer", 1)
        shows("layer 1")
        page.wait_for_selector(".dots svg")
        page.locator("[data-control=view] select").select_option(label="KernelSHAP")
        page.wait_for_timeout(300)
        second, started = context.new_page(), time.monotonic()
        second.goto(app.address)
        second.wait_for_selector(".vitlens[data-answers]")
        print(f"a second page beside KernelSHAP: {time.monotonic() - started:.2f} s")
        page.locator("[data-control=view] select").select_option(label="Length of tokens")
        shows("Length of the patch tokens")
        noise = np.random.default_rng(0).integers(0, 256, (800, 900, 3), np.uint8)
        Image.fromarray(noise).save(file := io.BytesIO(), "PNG")
        (path := tmp_path / "noise.png").write_bytes(file.getvalue())
        assert path.stat().st_size > 2**20
        page.locator("input[type=file]").set_input_files(path)
        page.wait_for_function(f"() => {chosen} === 'noise.png'")
        (path := tmp_path / "notes.png").write_text("no image")
        page.locator("input[type=file]").set_input_files(path)
        page.wait_for_function("() => document.querySelector('.alert').textContent.includes('notes.png')")
        shows("Length of the patch tokens")
        with page.expect_download() as saved:
            page.get_by_role("button", name="Save").click()
        assert saved.value.suggested_filename.startswith("vitlens-norms")
        page.screenshot(path=tmp_path / "app.png")
    page.wait_for_function("() => document.querySelector('.alert').textContent.includes('has ended')")
    assert page.locator(".body").evaluate("node => node.inert") and errors == []
    context.close()
