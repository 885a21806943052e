"""The two lanes of a page, which run models concurrently."""

import copy
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from support import PICTURE, given, refuses, values

import vitlens_explorer as widgets
from vitlens import capture, intervene
from vitlens.recorder.forward import eager_mode, eval_mode
from vitlens_explorer import lanes as lanes_module
from vitlens_explorer.lanes import LONG, QUICK, Answer, Cancelled, Connection, Job, Lane

PATIENCE = 60  # seconds, for a busy machine


class Page:
    """A page whose drawings wait until they may go on."""

    def __init__(self):
        self.may, self.begun, self.taken, self.job = threading.Event(), threading.Event(), [], None

    def answer(self, messages, check):
        self.begun.set()
        self.may.wait(PATIENCE)
        check()
        self.taken.append([content for content, _ in messages])
        self.may.clear()
        return Answer({"thread": threading.current_thread().name}, {}, self.job)


@pytest.fixture
def lanes():
    made = Lane("test quick"), Lane("test long")
    yield made
    for lane in made:
        lane.close()


@pytest.fixture
def connected(lanes):
    """A connection, its frames, and a function that runs the posted calls of the lanes until a condition holds."""
    page, shown, posted = Page(), [], []
    come = threading.Condition()

    def post(function):
        with come:
            posted.append(function)
            come.notify()

    def until(condition):
        while not condition():
            with come:
                assert come.wait_for(lambda: posted, PATIENCE)
                function = posted.pop(0)
            function()

    show = lambda frame, pictures: shown.append((frame, threading.current_thread()))  # noqa: E731
    yield Connection(page, show, lambda *_: None, post, lanes), page, shown, until
    page.may.set()


def test_connection_cancels_superseded_drawing(connected):
    connection, page, shown, until = connected
    connection.receive({"set": 1})
    assert page.begun.wait(PATIENCE)
    connection.receive({"set": 2})
    page.may.set()
    until(lambda: shown)
    assert page.taken == [[{"set": 1}, {"set": 2}]] and len(shown) == 1
    frame, thread = shown[0]
    assert frame["thread"].startswith("vitlens test quick") and thread is threading.current_thread()


def test_connection_stops_after_close(connected):
    connection, page, shown, until = connected
    page.job = Job(("long",), lambda check: None)
    connection.receive({"set": 1})
    assert page.begun.wait(PATIENCE)
    connection.close()
    page.may.set()
    until(lambda: connection._drawing is None)
    assert not shown and not page.taken and connection.idle


def test_connection_keeps_job_while_key_is_equal(connected):
    connection, page, shown, until = connected
    begun, ended, runs = threading.Event(), threading.Event(), []

    def work(check):
        runs.append(1)
        begun.set()
        try:
            while True:
                threading.Event().wait(0.001)
                check()
        except Cancelled:
            ended.set()
            raise

    page.job = Job(("map",), work)
    for number in range(2):
        page.may.set()
        connection.receive({"set": number})
        until(lambda number=number: len(shown) == number + 1)
    assert begun.wait(PATIENCE) and not ended.is_set() and not connection.idle
    page.job = Job(("other",), lambda check: "value")
    page.may.set()
    connection.receive({"set": 2})
    until(lambda: len(shown) == 3)
    assert ended.wait(PATIENCE) and len(runs) == 1
    page.job = None
    page.may.set()
    until(lambda: len(shown) == 4)
    assert page.taken[-1] == [{"job": ("other",)}], "of the first nothing came"


def test_lane_continues_after_failure_and_closes():
    lane, started = Lane("test"), threading.Event()
    with pytest.raises(ZeroDivisionError):
        lane.run(lambda check: 1 / 0)
    assert lane.run(lambda check: 3) == 3

    def endless(check):
        started.set()
        while True:
            check()

    tasks = lane.submit(endless), lane.submit(endless)
    assert started.wait(PATIENCE)
    lane.close()
    assert all(isinstance(task.exception(), Cancelled) for task in tasks)
    code = "from vitlens_explorer.lanes import LONG\ndef endless(check):\n    while True: check()\nLONG.submit(endless)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, ""), "a process may end while a lane works"


LARGE = {"img_size": 160}  # 10 × 10 patches, whose occlusion takes six forwards


class Slow:
    """An explorer whose occlusion, or another long map, waits in the given forward of its model."""

    def __init__(self, model, at=3):
        self.explorer, self.forwards, self.at = widgets.explore(model, PICTURE), 0, at
        assert self.explorer.wait(PATIENCE, settled=True)
        self.inside, self.may = threading.Event(), threading.Event()
        self.hook = model.register_forward_hook(self.ran)

    def ran(self, *_):
        if threading.current_thread().name.startswith("vitlens long"):
            self.forwards += 1
            if self.forwards == self.at:
                self.inside.set()
                assert self.may.wait(PATIENCE)

    def start(self):
        self.explorer.connection.receive({"set": {"view": "occlusion"}})
        while not self.inside.is_set():
            self.explorer.wait(0.01)
        return self

    def finish(self):
        self.may.set()
        assert self.explorer.wait(PATIENCE)
        self.hook.remove()
        return values(self.explorer)


def drawn():
    return [(torch.rand(3), np.random.rand(3)) for _ in range(2)]


def test_explorer_responds_to_clicks_during_long_map(vit):
    """Another page's heads off do not reach the map, and the random numbers of a cell stay as they were."""
    model = vit(**LARGE)
    explorer = widgets.explore(copy.deepcopy(model), PICTURE)
    explorer.set(view="occlusion")
    slow = Slow(model)
    for seed in (torch.manual_seed, np.random.seed):
        seed(3)
    expected = drawn()
    for seed in (torch.manual_seed, np.random.seed):
        seed(3)
    slow.start()
    assert all(
        torch.equal(a, c) and np.array_equal(b, d)
        for (a, b), (c, d) in zip(drawn(), expected, strict=True)
    )
    other = widgets.explore(model, PICTURE)
    other.set(layer=0)
    other.set(off=[(0, 1)], way="zero")
    assert slow.forwards == 3 and other.page.state["layer"] == 0
    assert np.array_equal(slow.finish(), values(explorer))


def test_explorer_new_setting_cancels_long_map(vit):
    slow = Slow(vit(**LARGE)).start()
    slow.explorer.connection.receive({"set": {"view": "norms"}})
    assert slow.explorer.wait(PATIENCE) and slow.explorer.page.state["view"] == "norms"
    slow.may.set()
    LONG.run(lambda check: None)  # behind the cancelled map
    assert slow.forwards == 3 and slow.explorer.wait(PATIENCE, settled=True)
    assert slow.explorer.frame["panels"][0]["title"] == "Token norms"


def test_explorer_cancel_restores_last_map(vit):
    slow = Slow(vit(**LARGE))
    before = values(slow.explorer)
    slow.start().explorer.connection.receive({"cancel": True, "number": 7})
    assert slow.explorer.wait(PATIENCE) and np.array_equal(values(slow.explorer), before)
    frame = slow.explorer.frame
    assert (frame["answers"], frame["message"], slow.explorer.page.state["view"]) == (
        7,
        "",
        "attention",
    )
    slow.may.set()
    LONG.run(lambda check: None)
    assert slow.forwards == 3


def test_explorer_cancel_of_score_lasts_until_next_choice(vit):
    slow = Slow(vit())
    slow.explorer.connection.receive({"set": {"view": "relevance"}})
    while not slow.inside.is_set():
        slow.explorer.wait(0.01, settled=True)
    refuses(
        "score of this map is still being computed",
        slow.explorer.page.requested,
        {"press": "save"},
        [],
    )
    slow.explorer.connection.receive({"cancel": True, "number": 7})
    assert (
        slow.explorer.wait(PATIENCE, settled=True)
        and slow.explorer.page.state["view"] == "relevance"
    )
    assert slow.explorer.frame["score"]["words"].startswith("Canceled")
    slow.explorer.page.requested({"press": "save"}, [])
    slow.may.set()
    slow.explorer.set(strength=0.5)
    assert (
        slow.explorer.wait(PATIENCE, settled=True) and "curves" not in slow.explorer.frame["score"]
    )
    slow.explorer.set(target=1)
    assert slow.explorer.wait(PATIENCE, settled=True) and "curves" in slow.explorer.frame["score"]


def test_connection_drops_messages_before_cancel(connected):
    connection, page, shown, until = connected
    connection.receive({"set": 1})
    assert page.begun.wait(PATIENCE)
    connection.receive({"cancel": True})
    page.may.set()
    until(lambda: shown)
    assert page.taken == [[{"cancel": None}]]


def test_explorer_reports_progress_of_long_map(vit, monkeypatch):
    monkeypatch.setattr(lanes_module, "PATIENCE", 0.0)
    monkeypatch.setattr(lanes_module, "PACE", 0.0)
    explorer, reports = widgets.explore(vit(), PICTURE), []
    explorer.set(view="received")
    assert explorer.wait(PATIENCE, settled=True)
    explorer.connection._send = lambda content, buffers: reports.append(content["progress"])
    explorer.set(view="integrated_gradients")
    *some, end = reports[: reports.index(None) + 1]
    done = [each["done"] for each in some]
    assert done == [1, 2, 18, 34, 50, 50], (
        "two forwards and their batches of 16 points, but never beyond the end"
    )
    assert (
        all((each["what"], each["of"]) == ("Integrated Gradients", 50) for each in some)
        and end is None
    )
    assert 0 < some[-3]["left"] < some[0]["left"] * 10


def test_explorer_shows_error_of_long_map(vit, monkeypatch):
    explorer = widgets.explore(vit(), PICTURE)
    before = values(explorer)

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    hook = explorer.page.model.register_forward_hook(full)
    refuses("not enough memory", explorer.set, view="occlusion")
    hook.remove()
    assert explorer.page.state["view"] == "attention" and np.array_equal(values(explorer), before)
    explorer.set(view="occlusion")
    assert explorer.frame["message"] == ""


def test_heads_off_captures_and_modes_are_thread_local(vit):
    model, x = vit(), given(vit())
    with torch.no_grad(), capture(model) as before:
        logits = model(x)
    inside, may = threading.Event(), threading.Event()

    def other(check):
        with (
            eval_mode(model),
            eager_mode(),
            intervene(model, heads={(0, 1): "zero"}),
            torch.no_grad(),
        ):
            inside.set()
            assert may.wait(PATIENCE)
            return model(x)

    model.train()
    task = QUICK.submit(other)
    assert inside.wait(PATIENCE)
    with eval_mode(model), eager_mode():
        with torch.no_grad(), capture(model) as attn:
            assert torch.equal(model(x), logits)
        assert all(torch.equal(a.weights(), b.weights()) for a, b in zip(attn, before, strict=True))
        may.set()
        assert not torch.equal(task.result(PATIENCE), logits)
        assert not model.training, "this block is still in eval mode"
    assert model.training


def test_widget_callback_sets_another_widget(vit):
    first, second = widgets.explore(vit(), PICTURE), widgets.explore(vit(seed=1), PICTURE)
    first.observe(lambda change: second.set(layer=first.page.state["layer"]), "frame")
    first.set(layer=1)
    assert second.page.state["layer"] == 1
    done = threading.Thread(target=lambda: first.set(layer=0))  # as a button in a subshell
    done.start()
    while done.is_alive():
        first.wait(0.01)
        first._call_posted(0.01)
    assert first.page.state["layer"] == 0
