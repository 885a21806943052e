"""What a page says and shows to somebody who opens it for the first time."""

import functools
import re
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from PIL import Image
from support import SPECIMEN

from browser.fronts import MARKS, press_share
from browser.test_page import FRAME, opened
from vitlens import load_model, samples
from vitlens_explorer import explore
from vitlens_explorer.explorer import Explorer
from vitlens_explorer.in_page import save_page
from vitlens_explorer.live import save_live_page
from vitlens_explorer.words import say

pytestmark = MARKS


@pytest.fixture(scope="module")
def live_page(tmp_path_factory):
    return save_live_page(load_model(SPECIMEN), None, tmp_path_factory.mktemp("page") / "page.html")


def test_page_says_what_it_is_and_what_the_model_knows(browser, live_page):
    page, _, errors = opened(browser, live_page)
    assert page.locator("main h1").all_inner_texts() == [say("headline")]
    assert page.locator(".lead").inner_text() == say("lead")
    under = page.locator(".under").inner_text()
    assert re.fullmatch(r"row 5, column 4: [\d.]+% of the attention \(even: 0\.5%\)", under), under
    fold = page.locator(".knows")
    assert fold.locator("summary").inner_text() == "The model knows 200 names"
    fold.locator("summary").click()
    page.wait_for_function("() => document.querySelectorAll('.knows li').length === 60")
    assert fold.locator(".note").inner_text() == "and 140 more"
    fold.locator("input").fill("CAT")
    names = fold.locator("li").all_inner_texts()
    assert 1 < len(names) < 60 and all("cat" in name.lower() for name in names), names
    fold.locator("li button", has_text=re.compile("^Persian cat$")).click()
    page.wait_for_function(
        "() => /Persian cat/.test(document.querySelector('figcaption').textContent)"
    )
    fold.locator("input").fill("zzz")
    assert fold.locator(".note").inner_text() == "None of them has these letters."
    assert errors == []


def test_page_says_when_no_class_stands_out(browser, tmp_path, vit):
    sure, unsure, torn = (vit(num_classes=40) for _ in range(3))
    with torch.no_grad():
        sure.head.bias[3] = 10
        torn.head.weight.zero_()
        torn.head.bias[:4] = 20
    shown = {}
    for name, model in {"sure": sure, "unsure": unsure, "torn": torn}.items():
        doubt = explore(model, samples()["chelsea"]).frame["doubt"]
        path = save_page(model, {"cat": samples()["chelsea"]}, tmp_path / f"{name}.html")
        page, _, errors = opened(browser, path)
        shown[name] = (
            page.locator(".doubt").inner_text() if page.locator(".doubt").is_visible() else ""
        )
        assert errors == [] and shown[name] == doubt
    assert shown == {
        "sure": "",
        "unsure": say("doubt", count="40"),
        "torn": say("doubt shared", share="75%"),
    }


def map_of(page):
    return page.evaluate("() => document.querySelector('.panel canvas').toDataURL()")


@pytest.mark.slow
def test_map_wanders_once_and_comes_back(browser, live_page):
    """Not after a reload, not for a link, and not with reduced motion."""
    page, _, errors = opened(browser, live_page)
    page.wait_for_function("() => document.querySelector('.glancing')")
    first = map_of(page)
    page.wait_for_function(
        "(first) => document.querySelector('.panel canvas').toDataURL() !== first", arg=first
    )
    page.wait_for_function("() => !document.querySelector('.glancing')", timeout=10_000)
    assert map_of(page) == first
    page.reload()
    page.wait_for_selector(".vitlens[data-answers]")
    page.wait_for_timeout(1500)
    assert not page.locator(".glancing").count() and map_of(page) == first
    assert errors == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, hash", [({"reduced_motion": "reduce"}, ""), ({}, "#view=attention&layer=3")]
)
def test_map_stays_with_reduced_motion_and_for_links(browser, live_page, options, hash):
    page = browser.new_context(**options).new_page()
    page.goto(live_page.as_uri() + hash)
    page.wait_for_selector(".vitlens[data-answers]")
    page.wait_for_timeout(1200)
    assert not page.locator(".glancing").count()


@pytest.mark.slow
def test_first_gesture_ends_with_the_first_click(browser, live_page):
    page, _, errors = opened(browser, live_page)
    page.wait_for_function("() => document.querySelector('.glancing')")
    page.get_by_role("button", name="Rollout", exact=True).click()
    page.wait_for_function(
        "() => /Rollout from/.test(document.querySelector('figcaption').textContent)"
    )
    page.wait_for_timeout(2500)
    assert not page.locator(".glancing").count() and errors == []


def test_phone_shows_photo_classes_and_a_line_first(browser, live_page):
    page = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True).new_page()
    page.goto(live_page.as_uri())
    page.wait_for_selector(".vitlens[data-answers]")
    ends = page.evaluate(
        """() => ['.panel .picture', '.bars li:nth-child(3)'].map((which) => {
            const box = document.querySelector(which).getBoundingClientRect();
            return [box.top, box.bottom];
        })"""
    )
    photo, bars = ends
    assert 0 < photo[0] < photo[1] < bars[1] <= 844, ends
    small = page.evaluate(
        """() => [...document.querySelectorAll('.vitlens button')]
            .filter((each) => each.offsetParent && each.matches('.button, .tabs button, .modes button'))
            .map((each) => each.getBoundingClientRect().height).filter((height) => height < 44)"""
    )
    assert small == []
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.locator(".heads .glimpse").is_visible()


def test_phone_scrolls_to_an_uploaded_photo(browser, live_page, tmp_path):
    page = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True).new_page()
    page.goto(live_page.as_uri())
    page.wait_for_selector(".vitlens[data-answers]")
    page.get_by_role("button", name="Tour", exact=True).scroll_into_view_if_needed()
    page.evaluate("() => scrollTo(0, document.body.scrollHeight)")
    top = "() => document.querySelector('.picture').getBoundingClientRect().top"
    assert page.evaluate(top) < -300
    samples()["coffee"].save(photo := tmp_path / "mine.png")
    page.locator(".tools input[type=file]").first.set_input_files(photo)
    page.locator(".heading", has_text="mine").wait_for()
    assert 0 <= page.evaluate(top) <= 844


def test_exact_caption_is_a_fold_that_stays_open(browser, live_page):
    page, _, errors = opened(browser, live_page)
    plain, exact = page.locator("figcaption .plain"), page.locator("figcaption .exact")
    assert "the framed patch (the query) looks most at " in plain.inner_text()
    assert exact.is_hidden()
    page.locator(".exactly > summary").click()
    assert exact.inner_text().startswith("Attention from the patch in row 5, column 4")
    page.get_by_role("button", name="Rollout").click()
    page.locator("figcaption .exact", has_text="Rollout from").wait_for()
    assert plain.inner_text().startswith("An estimate through layers 0 to ")
    with page.expect_download() as saved:
        press_share(page, "Save")
    name = saved.value.suggested_filename
    page.locator(".busy", has_text=f"Saved {name}").wait_for()
    page.get_by_role("button", name="Received").click()
    page.locator(".busy", has_text="Saved").wait_for(state="hidden")
    assert errors == []


def test_map_is_shared_as_a_picture_with_its_sentence_and_frame(browser, live_page):
    page, _, errors = opened(browser, live_page)
    ways = page.locator(".sharing .ways")
    assert not ways.is_visible()
    page.locator(".sharing > summary").click()
    names = ways.locator("p:not([hidden]) button").all_inner_texts()
    assert names == ["Copy picture", "Save", "Save photo page", "Save page"], "no link to a file"
    page.evaluate("() => { navigator.clipboard.write = () => Promise.reject(Error()); }")
    with page.expect_download() as saved:
        ways.get_by_role("button", name="Copy picture").click()
    picture = Image.open(saved.value.path()).convert("RGB")
    assert picture.size == (1200, 630) and len(picture.getcolors(10**6)) > 1000
    rows = cols = 14
    left, top = 40 + 550 * 4 / cols, 40 + 550 * 5 / rows
    for x in (left, left + 550 / cols):
        columns = range(round(x) - 3, round(x) + 4)
        line = [sum(picture.getpixel((column, round(top + 20)))) for column in columns]
        assert min(line) < 60 and max(line) > 700, "a white line on black"
    page.keyboard.press("Escape")
    assert not ways.is_visible() and page.locator(".sharing > summary").evaluate(
        "node => node === document.activeElement"
    )
    assert errors == []


@pytest.mark.slow
def test_challenge_tells_what_heads_do_and_ends_in_a_picture(browser, live_page):
    page, _, errors = opened(browser, live_page)
    words = page.locator(".challenge .words")
    assert words.inner_text().startswith("How few heads must be off until the model stops seeing “")
    assert not page.locator(".challenge").get_by_role("button", name="Copy picture").is_visible()
    python = Explorer(load_model(SPECIMEN), samples()["chelsea"])
    python.first(lambda *_: None)
    told = set()
    for number, off in enumerate([[[8, 2]], [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1]]], 1):
        answer = python.answer(
            [({"set": {"off": off, "way": "mean"}, "number": number}, [])], lambda *_: None
        )
        frame = page.evaluate(
            FRAME, [{"set": {"off": off, "way": "mean"}, "number": 10**15 + number}]
        )
        assert frame["challenge"] == answer.frame["challenge"] and frame["challenge"]["change"]
        page.wait_for_function(
            "(text) => document.querySelector('.challenge').textContent.includes(text)",
            arg=frame["challenge"]["words"],
        )
        told.add(frame["challenge"]["won"])
    assert told == {True, False}
    assert not page.get_by_role("button", name="Copy link").first.is_visible(), (
        "of a file on this machine"
    )
    page.evaluate("() => { navigator.clipboard.write = () => Promise.reject(Error()); }")
    with page.expect_download() as saved:
        page.locator(".challenge").get_by_role("button", name="Copy picture").click()
    picture = Image.open(saved.value.path())
    assert picture.size == (1200, 630) and len(picture.convert("RGB").getcolors(10**6)) > 1000
    page.get_by_role("button", name="Turn all on").click()
    page.wait_for_function(
        "() => /^How few heads must be off/.test(document.querySelector('.challenge').textContent)"
    )
    assert errors == []


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        """Print nothing."""


@pytest.mark.slow
def test_copy_link_is_hidden_for_an_uploaded_photo(browser, tmp_path, vit):
    """Also if its classes are those of the photo before, so that the sentence of the challenge stays."""
    photo = samples()["chelsea"]
    photo.save(tmp_path / "same.png")
    save_live_page(vit(num_classes=5), {"chelsea": photo}, tmp_path / "page.html")
    handler = functools.partial(Quiet, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{server.server_port}/page.html")
        page.wait_for_selector(".vitlens[data-answers]")
        page.evaluate(FRAME, [{"set": {"off": [[1, 0]], "way": "zero"}}])
        link = page.get_by_role("button", name="Copy link")
        link.wait_for()
        page.set_input_files("input[type=file]", tmp_path / "same.png")
        page.locator(".heading", has_text="same.png").wait_for()
        link.wait_for(state="hidden")
        page.close()
        server.shutdown()


def test_page_without_scripts_shows_a_still_image(browser, live_page):
    page = browser.new_context(java_script_enabled=False).new_page()
    page.goto(live_page.as_uri())
    still = page.locator("#page img")
    assert still.is_visible() and "Attention from the patch" in still.get_attribute("alt")
    assert still.evaluate("node => node.naturalWidth") > 400
    assert "needs scripts" in page.locator("#page").inner_text()
    described = page.locator("meta[name=description]").get_attribute("content")
    assert described.startswith(say("headline")) and say("lead") in described


def test_old_browser_is_told_that_styles_are_missing(browser, live_page, tmp_path):
    """A remark, which the styles hide where the browser has them. An unknown color function stands for a new one."""
    text = live_page.read_text(encoding="utf-8")
    assert "light-dark(red, red)" in text
    old = tmp_path / "old.html"
    old.write_text(text.replace("light-dark(red, red)", "unknown(red)"), encoding="utf-8")
    for file, is_old in ((live_page, False), (old, True)):
        page, _, _ = opened(browser, file)
        assert page.get_by_text("This browser lacks styles").is_visible() == is_old
        page.close()
