"""`vitlens app` in a real browser."""

import base64
import io
import signal
import time

import numpy as np
import pytest
from PIL import Image

from browser.fronts import MARKS, START, App, faults, move, press_share, see
from vitlens.images import samples
from vitlens_explorer.views import views
from vitlens_explorer.words import say

pytestmark = MARKS


def test_app_shows_maps_uploads_and_stays_quick(large_model, browser, tmp_path):
    """A click is answered while occlusion runs, and a new setting cancels it. An alert names the end."""
    samples()["coffee"].save(cup := tmp_path / "cup.png")
    context, requests, errors = (
        browser.new_context(viewport={"width": 1300, "height": 1000}),
        [],
        [],
    )
    context.set_default_timeout(START)
    page = context.new_page()
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))

    def shows(words):
        page.wait_for_function(
            "words => document.querySelector('figcaption')?.textContent.includes(words)", arg=words
        )

    with App(large_model, tmp_path, cup) as app:
        page.goto(app.opening)
        page.wait_for_selector("img[src='/photograph'], .vitlens")
        page.wait_for_selector(".vitlens[data-answers]")
        assert page.url.split("#")[0] == app.address, "the token leaves the address bar"
        assert [
            url for url in requests if not url.startswith((app.address, "data:", "blob:"))
        ] == []
        chosen = (
            "document.querySelector('[data-control=photograph] select').selectedOptions[0].text"
        )
        assert page.evaluate(chosen) == "cup.png"
        shows("Attention from class token (read-out), layer 2")
        box = page.locator(".picture canvas").bounding_box()
        page.mouse.click(box["x"] + 0.7 * box["width"], box["y"] + 0.3 * box["height"])
        shows("row 9, column 22")
        move(page, "layer", 1)
        shows("layer 1")
        page.wait_for_selector(".mosaic .stage")
        see(page, "occlusion")
        page.wait_for_timeout(300)
        second, started = context.new_page(), time.monotonic()
        second.goto(app.address)
        second.wait_for_selector(".vitlens[data-answers]")
        print(f"a second page beside occlusion: {time.monotonic() - started:.2f} s")
        see(page, "norms")
        shows("Norm of the patch tokens")
        noise = np.random.default_rng(0).integers(0, 256, (800, 900, 3), np.uint8)
        Image.fromarray(noise).save(file := io.BytesIO(), "PNG")
        (path := tmp_path / "noise.png").write_bytes(file.getvalue())
        assert path.stat().st_size > 2**20
        page.locator("input[type=file]").set_input_files(path)
        page.wait_for_function(f"() => {chosen} === 'noise.png'")
        (path := tmp_path / "notes.png").write_text("no image")
        page.locator("input[type=file]").set_input_files(path)
        page.wait_for_function(
            "() => document.querySelector('.alert').textContent.includes('notes.png')"
        )
        shows("Norm of the patch tokens")
        with page.expect_download() as saved:
            press_share(page, "Save")
        assert saved.value.suggested_filename.startswith("vitlens-noise-norms-layer1.zip")
        page.screenshot(path=tmp_path / "app.png")
    page.wait_for_function(
        "() => document.querySelector('.alert').textContent.includes('has ended')"
    )
    assert page.locator(".body").evaluate("node => node.inert") and errors == []
    context.close()


class Tab:
    """A page of an app, with the actions and texts of a user. Asserts that it has no errors."""

    def __init__(self, browser, served, address="", **options):
        self.context = browser.new_context(
            **{"viewport": {"width": 1440, "height": 900}, **options}
        )
        self.context.grant_permissions(["clipboard-read", "clipboard-write"])
        self.page, self.address, self.errors = self.context.new_page(), served.address, []
        self.page.set_default_timeout(START)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.goto(served.opening)
        self.settle()
        if address:
            self.page.goto(self.address + address)
            self.settle()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.context.close()
        assert self.errors == []

    def settle(self):
        """Wait until everything that was requested is shown, and the address is written."""
        self.page.wait_for_selector(".vitlens[data-answers]")
        self.page.wait_for_function(
            "() => { const { dataset } = document.querySelector('.vitlens'); return dataset.sent === dataset.answers }"
        )
        # in the page: a timer of the browser that is later than that of the address, also on a busy machine
        self.page.evaluate(
            "() => new Promise((done) => requestAnimationFrame(() => setTimeout(done, 350)))"
        )

    def act(self, action):
        action()
        self.settle()

    def click(self, row, col):
        box = self.page.locator(".picture canvas").first.bounding_box()
        place = (
            box["x"] + (col + 0.5) / 8 * box["width"],
            box["y"] + (row + 0.5) / 8 * box["height"],
        )
        self.act(lambda: self.page.mouse.click(*place))

    def choose(self, control, value):
        """Choose a value of a control, as `Page.change` takes it."""
        self.page.goto(f"{self.address}#{control}={value}")
        self.settle()

    def says(self, words):
        self.page.wait_for_function(
            "words => document.querySelector('.alert').textContent.includes(words)", arg=words
        )

    def shown(self, words):
        self.page.wait_for_function(
            "words => document.querySelector('figcaption').textContent.includes(words)", arg=words
        )

    @property
    def hash(self):
        return self.page.url.removeprefix(self.address)

    def drop(self, target, files=(), **text):
        """Drop files, by their name, or texts, by their type with _ for /, on an element. True if it was taken."""
        return self.page.locator(target).first.evaluate(
            """(node, [files, texts]) => {
                const dataTransfer = new DataTransfer();
                for (const [name, data] of files)
                    dataTransfer.items.add(new File([Uint8Array.from(atob(data), (c) => c.charCodeAt(0))], name));
                for (const [type, text] of Object.entries(texts)) dataTransfer.setData(type.replace("_", "/"), text);
                const fire = (kind, more = {}) => node.dispatchEvent(
                    new DragEvent(kind, { dataTransfer, bubbles: true, cancelable: true, ...more }));
                fire("dragover");
                const outlined = [document.querySelector(".vitlens").matches(".dropping")];
                fire("dragleave", { relatedTarget: document.querySelector("figcaption") });
                outlined.push(document.querySelector(".vitlens").matches(".dropping"));
                fire("dragleave", { relatedTarget: null });
                outlined.push(document.querySelector(".vitlens").matches(".dropping"));
                return [!fire("drop"), outlined];
            }""",
            [[[name, base64.b64encode(photo(k)).decode()] for k, name in enumerate(files)], text],
        )


def photo(seed=0, side=40):
    """PNG file of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8)
    Image.fromarray(pixels).save(file := io.BytesIO(), "PNG")
    return file.getvalue()


def test_app_takes_pasted_and_dropped_photos(browser, served):
    copy = """async (data) => {
        const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
        await navigator.clipboard.write([new ClipboardItem({ "image/png": new Blob([bytes], { type: "image/png" }) })]);
    }"""
    with Tab(browser, served) as tab:
        tab.page.evaluate(copy, base64.b64encode(photo()).decode())
        tab.act(lambda: tab.page.keyboard.press("Control+V"))
        tab.page.wait_for_function(
            "() => document.querySelector('.heading').textContent.startsWith('image.png')"
        )
        tab.page.evaluate("navigator.clipboard.writeText('a cat')")
        tab.page.keyboard.press("Control+V")
        tab.says("The clipboard has no photo")
        tab.page.get_by_role("button", name="Close").click()
        assert not tab.page.locator(".notice .alert").is_visible()
        for target in (".picture", "html"):
            taken, outlined = tab.drop(target, [f"{target[1:]}.png"])
            assert taken and outlined == [True, True, False]
            tab.page.wait_for_function(
                "name => document.querySelector('.heading').textContent.startsWith(name)",
                arg=f"{target[1:]}.png",
            )
        tab.settle()
        before = tab.hash
        assert tab.drop("body", text_uri_list="https://example.org/cat.jpg")[0]
        tab.says("A link or a text was dropped")
        assert tab.hash == before
        tab.drop("body", ["first.png", "second.png"])
        tab.says("2 files were given. The first one, first.png, is used.")
        tab.page.wait_for_function("() => document.title.startsWith('first.png · vit')")


@pytest.mark.slow
def test_app_address_restores_state(browser, served):
    with Tab(
        browser, served, "#view=rollout&layer=2&patch=5,6&off=0.2,1.0&way=zero&sample=coffee"
    ) as tab:
        first = tab.hash
        tab.shown("Rollout from the patch in row 5, column 6 through layers 0 to 2")
        tab.shown("head 2 of layer 0, head 0 of layer 1")
        tab.click(1, 2)
        second = tab.hash
        assert "patch=1,2" in second and "sample=coffee" in second and "off=0.2,1.0" in second
        tab.act(lambda: move(tab.page, "layer", 1))
        tab.act(lambda: tab.page.go_back())
        assert tab.hash == second
        tab.shown("row 1, column 2 through layers 0 to 2")
        tab.act(lambda: tab.page.go_back())
        assert tab.hash == first
        tab.shown("row 5, column 6")
        tab.act(lambda: tab.page.go_forward())
        tab.act(lambda: tab.page.reload())
        assert tab.hash == second
        tab.shown("row 1, column 2 through layers 0 to 2")
        assert "coffee" in tab.page.title()
        tab.choose("view", "norms")
        assert tab.hash == "#view=norms&layer=2", "the rest is as in the first frame"
        tab.act(
            lambda: tab.page.locator("input[type=file]").set_input_files(
                {"name": "mine.png", "mimeType": "image/png", "buffer": photo()}
            )
        )
        assert "mine" not in tab.hash and tab.page.title().startswith("mine.png")
        tab.act(lambda: tab.page.reload())
        tab.says("“mine.png” was uploaded and is not in the address")
        assert tab.page.title().startswith("chelsea")
        tab.choose("layer", "99")
        tab.says("must be a whole number from 0 to 3, got 99")
        assert "layer=2" in tab.hash


@pytest.mark.slow
def test_app_says_when_its_server_is_silent(model, browser, tmp_path):
    """A click is answered when the server goes on. Without it the page says that the connection is gone."""
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(START)
    with App(model, tmp_path) as app:
        page.goto(app.opening)
        page.wait_for_selector(".vitlens[data-answers]")
        app.process.send_signal(signal.SIGSTOP)
        try:
            see(page, "norms")
            page.locator(".alert", has_text="The server does not answer.").wait_for()
            assert page.get_by_role("button", name="Reload").is_visible()
            assert page.locator(".body").evaluate("node => node.inert")
        finally:
            app.process.send_signal(signal.SIGCONT)
        page.locator("figcaption", has_text="Norm of the patch tokens").wait_for()
        page.locator(".alert").wait_for(state="hidden")
        assert not page.locator(".body").evaluate("node => node.inert")
        page.screenshot(path=tmp_path / "back.png")
        page.evaluate("window.kept = true")
        cut = "document.querySelector('.alert').textContent"
        app.process.kill()
        page.wait_for_function(f"() => {cut}.includes('The connection to the server')")
        assert page.get_by_role("button", name="Reload").is_visible()
        app.process.wait(60)
        app.killed = True
    context.close()


@pytest.mark.slow
def test_app_shows_progress_and_cancels(browser, served):
    """The old map is dimmed, and stays after a cancel. A score that is not finished is not saved."""
    with Tab(browser, served, "#view=norms") as tab:
        hook = served.app.model.register_forward_hook(
            lambda *_: time.sleep(2)
        )  # in each of four forwards
        try:
            see(tab.page, "occlusion")
            tab.page.wait_for_function(
                "() => /Occlusion: [\\d,]+ of 64 forwards, about \\d+ s left/"
                ".test(document.querySelector('.progress').textContent)"
            )
            assert tab.page.locator(".vitlens.stale").count() == 1
            assert 0 < tab.page.locator("progress").evaluate("node => node.value") < 1
            tab.act(tab.page.get_by_role("button", name="Cancel").click)
            assert (
                not tab.page.locator(".progress").is_visible()
                and not tab.page.locator(".vitlens.stale").count()
            )
            tab.shown("Norm of the patch tokens")
            assert tab.page.locator(".alert").inner_text() == ""
        finally:
            hook.remove()


@pytest.mark.slow
def test_app_layout_stays_put(browser, served):
    """Bars have one place in all views, and an alert moves nothing."""
    box = "node => { const { x, y } = node.getBoundingClientRect(); return [Math.round(x), Math.round(y)] }"
    with Tab(browser, served) as tab:
        places = set()
        for view in ("attention", "received", "norms", "lens", "contributions", "relevance"):
            tab.choose("view", view)
            assert tab.hash.startswith(f"#view={view}")
            places.add(tuple(tab.page.locator(".bars:not(.layers)").first.evaluate(box)))
        assert len(places) == 1
        before = tab.page.locator(".picture").first.evaluate(box)
        tab.drop("body", text_plain="x")
        tab.says("A link")
        assert tab.page.locator(".picture").first.evaluate(box) == before
        tab.choose("view", "similarity")
        for width in (390, 720, 1440, 1920):
            tab.page.set_viewport_size({"width": width, "height": 900})
            assert tab.page.evaluate("document.documentElement.scrollWidth") <= width
            assert tab.page.locator(".legend canvas").bounding_box()["width"] >= 100, (
                "beside a long unit, too"
            )
            assert len(
                {tuple(tile.evaluate(box))[1] for tile in tab.page.locator(".tab").all()}
            ) <= 1 + (width < 720)
        tab.choose("view", "relevance")
        tab.page.set_viewport_size({"width": 1000, "height": 560})
        tab.page.evaluate(
            "document.querySelectorAll('.side details').forEach((node) => (node.open = true))"
        )
        tab.page.evaluate("scrollTo(0, 1e6)")
        assert tab.page.evaluate("scrollY") > 50
        assert tab.page.locator(".panels").evaluate(box)[1] == 8, "the picture stays in view"
        assert tab.page.locator("main h1").inner_text() == say("headline")
        assert tab.page.locator(".heading").inner_text() == "chelsea · vit"


@pytest.mark.slow
def test_app_follows_color_preferences(browser, served):
    ground = "() => getComputedStyle(document.documentElement, null).colorScheme"
    for options in ({"color_scheme": "dark"}, {"forced_colors": "active"}):
        with Tab(browser, served, **options) as tab:
            assert tab.page.evaluate(ground) == "light dark"
            bar = tab.page.locator(".bars .bar").first
            shot = np.asarray(Image.open(io.BytesIO(bar.screenshot())).convert("L")).astype(int)
            assert abs(shot[5, 3] - shot[5, -3]) > 60, "the bar differs from its ground"
            corner = np.asarray(Image.open(io.BytesIO(tab.page.screenshot())).convert("L"))[-1, 0]
            assert (corner < 60) == ("color_scheme" in options)


DARK = {"color_scheme": "dark"}
PHONE = {"viewport": {"width": 390, "height": 800}}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, *(pytest.param(each, marks=pytest.mark.slow) for each in (DARK, PHONE))],
)
def test_app_has_no_accessibility_fault(browser, served, options):
    with Tab(browser, served, **options) as tab:
        for view in views():
            if view == "occlusion":
                continue  # a page like those of the others
            tab.choose("view", view)
            tab.page.evaluate(
                "document.querySelectorAll('details').forEach((node) => (node.open = true))"
            )
            assert faults(tab.page) == [], view
        tab.drop("body", text_plain="x")
        tab.says("A link")
        assert faults(tab.page) == []


def test_app_saves_page(browser, served, tmp_path):
    """The page opens from its file, and takes the state from its address."""
    with Tab(browser, served, "#sample=coffee") as tab:
        with tab.page.expect_download() as saved:
            press_share(tab.page, "Save page")
        assert saved.value.suggested_filename == "vitlens-coffee.html"
        saved.value.save_as(path := tmp_path / "page.html")
        tab.page.goto(f"{path.as_uri()}#view=rollout&layer=2&patch=5,6")
        tab.settle()
        tab.shown("Rollout from the patch in row 5, column 6 through layers 0 to 2")
        assert (
            tab.page.title().startswith("coffee · vit") and tab.page.locator("main h1").count() == 1
        )
        tab.click(1, 2)
        tab.act(lambda: tab.page.go_back())
        tab.shown("row 5, column 6 through layers 0 to 2")
        assert faults(tab.page) == []


@pytest.mark.slow
def test_app_saves_page_beside_clicks_and_cancels(browser, served):
    """A click is answered while the page is written, and nothing is saved after a cancel."""
    with Tab(browser, served) as tab:
        downloads = []
        tab.page.on("download", lambda download: downloads.append(download))
        hook = served.app.model.register_forward_hook(lambda *_: time.sleep(0.1))
        try:
            press_share(tab.page, "Save page")
            tab.page.locator(".progress", has_text="Page: ").wait_for()
            tab.click(1, 2)
            tab.shown("row 1, column 2")
            assert tab.page.locator(".progress").is_visible()
            tab.page.get_by_role("button", name="Cancel").click()
            tab.page.locator(".progress").wait_for(state="hidden")
        finally:
            hook.remove()
        tab.settle()
        assert downloads == [] and tab.page.locator(".alert").inner_text() == ""
        with tab.page.expect_download():
            press_share(tab.page, "Save page")


def test_app_arrow_keys_choose_layers_of_views_without_heads(browser, served):
    with Tab(browser, served, "#view=norms&layer=1") as tab:
        tab.page.locator(".stage").focus()
        tab.act(lambda: tab.page.keyboard.press("ArrowRight"))
        assert tab.hash.endswith("layer=2")
        tab.shown("after layer 2")


def test_app_names_heic(browser, served):
    with Tab(browser, served) as tab:
        tab.drop("body", ["phone.HEIC"])
        tab.says("HEIC photos cannot be opened here. Export it as JPEG.")
        assert tab.page.title().startswith("chelsea")
