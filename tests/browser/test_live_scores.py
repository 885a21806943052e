"""Scores in a live page: those of Python, their progress, Cancel, and the covered photo under the pointer."""

import numpy as np
import pytest

from browser.fronts import MARKS
from browser.test_page import FRAME, opened
from vitlens import samples
from vitlens_explorer.explorer import Explorer
from vitlens_explorer.live import save_live_page
from vitlens_explorer.photographs import Photograph
from vitlens_explorer.words import say

pytestmark = MARKS

NAME, OTHER = "chelsea", "coffee"
PRESS = """async () => {
    const { source } = document.querySelector("#page");
    source.send({ press: "score", number: Date.now() });
    await source.turn;
    const isOver = () => source.get("frame").score?.curves;
    while (!isOver()) await new Promise((done) => setTimeout(done, 20));
}"""


def python_score(model, photo, **values):
    """The score that Python's explorer computes for a state."""
    page = Explorer(model, photo)
    photographs = {NAME: Photograph.read(photo), OTHER: Photograph.read(samples()[OTHER])}
    page.state |= {"photographs": photographs, "photograph": NAME}
    answer = page.first(lambda *_: None)
    answer = page.answer([({"set": values, "number": 1}, [])], lambda *_: None)
    while answer.job:
        page.results[answer.job.key] = answer.job.function(lambda *_: None)
        answer = page.answer([], lambda *_: None)
    return answer.frame["score"], answer.frame["six"]


@pytest.mark.parametrize("against", ["none", 1])
@pytest.mark.parametrize("off", [[], [[1, 0]]])
def test_scores_equal_python(browser, tmp_path, vit, off, against):
    model, photo = vit(num_classes=5), samples()[NAME]
    path = save_live_page(model, {NAME: photo}, tmp_path / "page.html")
    page, _, errors = opened(browser, path)
    state = {"view": "relevance", "target": 2, "against": against, "off": off, "way": "zero"}
    before = page.evaluate(FRAME, [{"set": state, "number": 10**15}])["score"]
    assert before == {
        "title": say("trust"),
        "words": say("live unscored"),
        "starts": say("score it"),
    }
    assert_score(page, *python_score(model, photo, **state))
    assert errors == []


@pytest.mark.parametrize("classes", [0, 5])
def test_scores_of_a_similarity_equal_python(browser, tmp_path, vit, classes):
    """To another photo, with a head off in both, of a model with classes and of one without."""
    model, photo = vit(num_classes=classes), samples()[NAME]
    path = save_live_page(model, {NAME: photo, OTHER: samples()[OTHER]}, tmp_path / "page.html")
    page, _, errors = opened(browser, path)
    state = {"view": "relevance", "target": ["picture", OTHER], "off": [[1, 0]], "way": "zero"}
    frame = page.evaluate(FRAME, [{"set": state, "number": 10**15}])
    assert frame["panels"][0]["title"].startswith(say("why similar", method="relevance"))
    assert_score(page, *python_score(model, photo, **state))
    assert errors == []


def assert_score(page, score, six):
    """Score the map in view, and assert that this is Python's score of relevance."""
    page.evaluate(PRESS)
    frame = page.evaluate(FRAME, [])
    found = frame["score"]
    assert sorted(found) == sorted(score)
    for name, curve in score["curves"].items():
        np.testing.assert_allclose(found["curves"][name], curve, atol=1e-4)
    for name in ("title", "name", "order", "shares", "scale", "verdict"):
        assert found[name] == score[name], name
    assert np.abs(np.subtract(found["fill"], score["fill"])).max() <= 1
    words = {tile["view"]: tile["words"] for tile in six["tiles"]}
    (tile,) = [tile for tile in frame["six"]["tiles"] if tile["view"] == "relevance"]
    assert tile["words"] == words["relevance"] and tile["words"].endswith("σ")


def test_similarity_is_to_the_photo_of_this_moment(browser, tmp_path, vit):
    """One that is the same to the model, one that takes the name of another, and none beside the only photo."""
    model, photo = vit(num_classes=0), samples()[NAME]
    only = save_live_page(model, {NAME: photo}, tmp_path / "only.html")
    page, _, errors = opened(browser, only)
    before = page.evaluate(FRAME, [])
    frame = page.evaluate(FRAME, [{"set": {"view": "relevance"}, "number": 10**15}])
    assert frame["message"] == say("no other photo") and frame["panels"] == before["panels"]
    photo.save(tmp_path / "a.png")
    page.set_input_files("input[type=file]", tmp_path / "a.png")
    page.locator(".heading", has_text="a.png").wait_for()
    frame = page.evaluate(FRAME, [{"set": {"photograph": NAME}, "number": 10**15 + 1}])
    frame = page.evaluate(FRAME, [{"set": {"view": "relevance"}, "number": 10**15 + 2}])
    assert frame["message"] == say("alike", name="a.png")
    samples()[OTHER].save(tmp_path / "a.png")
    page.set_input_files("input[type=file]", tmp_path / "a.png")
    page.wait_for_timeout(500)
    page.evaluate(FRAME, [{"set": {"photograph": NAME}, "number": 10**15 + 3}])
    frame = page.evaluate(FRAME, [{"set": {"view": "relevance"}, "number": 10**15 + 4}])
    assert frame["message"] == "" and "similarity to “a.png”" in frame["panels"][0]["words"]
    first = frame["panels"][0]["values"]
    samples()["rocket"].save(tmp_path / "a.png")
    page.set_input_files("input[type=file]", tmp_path / "a.png")
    page.wait_for_timeout(500)
    page.evaluate(FRAME, [{"set": {"photograph": NAME}, "number": 10**15 + 5}])
    frame = page.evaluate(FRAME, [])
    assert frame["message"] == "" and frame["panels"][0]["values"] != first
    assert errors == []


def test_score_can_be_canceled_and_the_page_goes_on_meanwhile(browser, tmp_path, vit):
    model, photo = vit(num_classes=5, depth=6), samples()[NAME]
    path = save_live_page(model, {NAME: photo}, tmp_path / "page.html")
    page, _, errors = opened(browser, path)
    page.evaluate(FRAME, [{"set": {"view": "relevance"}, "number": 10**15}])
    cancel_at_once = """() => {
        const { source } = document.querySelector("#page");
        const { emit } = source;
        window.reports = [];
        source.emit = (event, content, ...more) => {
            if (content?.progress !== undefined) window.reports.push(content.progress);
            emit.call(source, event, content, ...more);
            if (content?.progress?.done !== 2 || window.seen) return;
            const notice = document.querySelector(".notice.progress");
            window.seen = notice.hidden ? "nothing" : notice.textContent;
            notice.querySelector("button").click(); // a pointer would come after the last forward
        };
    }"""
    page.evaluate(cancel_at_once)
    page.get_by_role("button", name=say("score it")).click()
    page.wait_for_function("() => window.reports.at(-1) === null")
    assert page.evaluate("() => window.seen").startswith("Score of Relevance: 2 of ")
    assert page.evaluate("() => window.reports.filter(Boolean).length") < 5
    assert page.locator(".score .note").inner_text() == say("live unscored")
    page.get_by_role("button", name=say("score it")).click()
    frame = page.evaluate(FRAME, [{"set": {"view": "rollout"}, "number": 10**15 + 1}])
    assert frame["panels"][0]["title"].startswith("Rollout") or frame["score"] is None
    page.evaluate(FRAME, [{"set": {"view": "relevance"}, "number": 10**15 + 2}])
    page.wait_for_selector(".score svg")
    report = page.evaluate("() => window.reports.filter(Boolean).at(-1)")
    assert (
        report["done"]
        == report["of"]
        == page.evaluate("() => window.reports.filter(Boolean)[0].of")
    )
    page.locator(".score svg").hover()
    page.wait_for_function(
        "() => /patches (covered|revealed): /.test(document.querySelector('.under').textContent)"
    )
    assert errors == []


SCORE_AND_LEAVE = """async (other) => {
    const { source } = document.querySelector("#page");
    const problems = [];
    addEventListener("unhandledrejection", ({ reason }) => problems.push(String(reason)));
    const ended = new Promise((done) => {
        source.on("msg:custom", ({ progress }) => {
            if (progress?.done === 2) source.send({ set: { photograph: other } });
            if (progress?.done === 2) source.send({ cancel: true });
            if (progress === null) done();
        });
    });
    source.send({ press: "score" });
    await ended;
    await source.turn;
    await new Promise((done) => setTimeout(done, 100));
    return [problems, source.get("frame").message, source.state.photograph];
}"""
"""Chooses another photo during a score, and cancels the score at once."""


@pytest.fixture
def two_photos(browser, tmp_path, vit):
    """A live page with two photos, in the view of relevance."""
    photos = {name: samples()[name] for name in (NAME, "rocket")}
    path = save_live_page(vit(num_classes=5, depth=6), photos, tmp_path / "page.html")
    page, _, errors = opened(browser, path)
    page.evaluate(FRAME, [{"set": {"view": "relevance"}}])
    yield page
    assert errors == []


def test_score_that_ends_while_another_photo_runs_draws_when_it_is_there(two_photos):
    assert two_photos.evaluate(SCORE_AND_LEAVE, "rocket") == [[], "", "rocket"]
    assert two_photos.evaluate(FRAME, [])["bars"]
    frame = two_photos.evaluate(FRAME, [{"set": {"photograph": NAME}}])
    assert frame["score"]["starts"] == say("score it")


def test_score_can_start_again_after_two_presses_and_cancel(two_photos):
    press_twice = """async () => {
        const { source } = document.querySelector("#page");
        let ends = 0;
        source.on("msg:custom", ({ progress }) => {
            ends += progress === null;
            if (progress?.done === 2) source.send({ cancel: true });
        });
        source.send({ press: "score" });
        source.send({ press: "score" });
        while (!ends) await new Promise((done) => setTimeout(done, 10));
        await new Promise((done) => setTimeout(done, 300));
        await source.turn;
        return source.get("frame").score;
    }"""
    assert two_photos.evaluate(press_twice)["starts"] == say("score it")


@pytest.mark.parametrize("kind", ["tour", "value", "look", "names"])
def test_question_waits_for_the_messages_before_it(two_photos, kind):
    """Such as Tour, right after another photo was chosen."""
    ask = """(ask) => new Promise((done, fail) => {
        setTimeout(() => fail(Error("no answer")), 20000);
        const { source } = document.querySelector("#page");
        source.on("msg:custom", ({ answer }) => answer && done(answer));
        source.send({ set: { view: "attention", photograph: "rocket" } });
        setTimeout(() => source.send({ ask, layer: 1, row: 1, col: 1 }));
    })"""
    answer = two_photos.evaluate(ask, kind)
    assert "problem" not in answer
    if kind == "names":
        assert answer["names"] == list("01234")
