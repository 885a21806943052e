"""Long work of one widget, and what others may do meanwhile: counted in forwards of the model, not in seconds."""

import copy
import itertools
import threading

import numpy as np
import pytest
import torch
from test_explorer import PICTURE, browser, values
from test_reasons import given, until_scored

from vitlens import capture, widgets
from vitlens.attribution import METHODS
from vitlens.attribution.maps import explaining
from vitlens.widgets import reasons, worker
from vitlens.widgets.worker import RUNNING

PATIENCE = 60  # seconds, for a machine that is busy


class Long:
    """An explorer, and what happens at some of the forwards of its model: {number: function}."""

    def __init__(self, model, happens, view="kernel_shap"):
        self.explorer, self.view = widgets.explore(model, PICTURE), view
        until(lambda: not (worker._asked or worker._later or worker._busy))  # also what other tests left to be scored
        reasons.seconds(self.explorer.subject)
        self.happens, self.forwards, self.count = happens, 0, itertools.count(1)
        self.hook = model.register_forward_hook(self.ran)

    def ran(self, *_):
        self.forwards = next(self.count)
        self.happens.pop(self.forwards, lambda: None)()

    def start(self):
        self.explorer._receive(self.explorer, {"set": {"view": self.view}}, [])

    def finish(self):
        assert self.explorer.wait(PATIENCE)
        self.hook.remove()
        return values(self.explorer)


def until(true):
    """Wait for what other threads do."""
    for _ in range(PATIENCE * 1000):
        if true():
            return
        threading.Event().wait(0.001)
    raise AssertionError("It did not happen.")


def undisturbed(model, view="kernel_shap"):
    explorer = widgets.explore(copy.deepcopy(model), PICTURE)  # nothing that it makes is kept for the model itself
    explorer.set(view=view)
    return values(explorer)


@pytest.mark.parametrize("view", ["kernel_shap", "occlusion", "integrated_gradients", "gradient_shap"])
def test_a_click_on_another_widget_is_answered_between_two_forwards(vit, view):
    model, answered = vit(), []
    alone = undisturbed(model, view)
    other = widgets.explore(vit(seed=1), PICTURE)
    click = lambda: other._receive(other, {"set": {"layer": 0}}, [])  # noqa: E731
    long = Long(model, {2: click}, view)
    other.observe(lambda change: answered.append(long.forwards), "frame")
    long.start()
    assert other.wait(PATIENCE) and np.array_equal(long.finish(), alone), "to the bit"
    assert other.state["layer"] == 0 and answered[0] == 2 and long.forwards > 2


def test_a_cell_has_its_turn_between_two_forwards(vit):
    model, held = vit(), threading.Event()
    alone = undisturbed(model)

    def hold():
        held.set()
        until(lambda: RUNNING.waiting)  # the cell has asked

    long = Long(model, {3: hold})
    long.start()
    assert held.wait(PATIENCE)
    other, when = vit(seed=1), []
    other.blocks[0].register_forward_hook(lambda *_: when.append(long.forwards))
    widgets.explore(other, PICTURE)  # as a cell does
    assert when == [3]
    assert np.array_equal(long.finish(), alone)


def test_a_cell_may_capture_at_any_time(vit):
    """Also in the midst of a forward, and of the very model."""
    model, held, done = vit(), threading.Event(), threading.Event()
    alone, x = undisturbed(model), given(model)
    with torch.no_grad(), capture(model) as before:
        logits = model(x)

    def hold():
        held.set()
        assert done.wait(PATIENCE)

    long = Long(model, {3: hold})
    long.start()
    assert held.wait(PATIENCE)
    with torch.no_grad(), capture(model) as attn:
        assert torch.equal(model(x), logits)
    assert all(torch.equal(a.weights(), b.weights()) for a, b in zip(attn, before, strict=True))
    done.set()
    assert np.array_equal(long.finish(), alone)


def test_the_next_click_ends_the_long_work(vit):
    long = Long(vit(), {})
    long.happens[3] = lambda: long.explorer._receive(long.explorer, {"set": {"view": "norms"}}, [])
    long.start()
    long.finish()
    assert long.forwards == 3 and long.explorer.state["view"] == "norms"


def test_what_stands_still_is_ended_by_its_own_click_and_not_by_others(vit):
    """Two long works take turns; a click on the one whose turn it is not ends that one alone."""
    models = vit(), vit(seed=1)
    alone = undisturbed(models[1])
    first = Long(models[0], {})
    second = Long(models[1], {})
    turns, threads = [], []
    for name, each in (("first", first), ("second", second)):
        each.explorer.model.register_forward_hook(lambda *_, name=name: turns.append(name))

    def both():
        until(lambda: RUNNING.waiting)
        threads.append(len(worker._threads))
        first.explorer._receive(first.explorer, {"set": {"view": "norms"}}, [])

    first.happens[2] = second.start
    second.happens[4] = both
    first.start()
    until(lambda: second.forwards >= 1)
    first.finish()
    assert np.array_equal(second.finish(), alone)
    assert turns[:9] == ["first", "first", *["first", "second"] * 3, "first"] and "first" not in turns[10:]
    assert threads == [2]
    until(lambda: len(worker._threads) == 1)  # the one that helped is gone


def test_random_numbers_of_a_cell_and_of_a_map_do_not_meet(vit):
    """Both draw from the global generators, and each gets what it would get alone."""
    model, drawn = vit(), []
    for view in ("kernel_shap", "gradient_shap"):
        alone = undisturbed(model, view)
        long = Long(model, {}, view)

        def draw():
            drawn.append((torch.rand(3), np.random.rand(3)))

        torch.manual_seed(3)
        np.random.seed(3)
        wanted = [(torch.rand(3), np.random.rand(3)) for _ in range(3)]
        torch.manual_seed(3)
        np.random.seed(3)
        drawn.clear()
        long.happens.update({1: draw, 2: draw, 3: draw})
        long.start()
        assert np.array_equal(long.finish(), alone)
        assert all(torch.equal(a, c) and np.array_equal(b, d) for (a, b), (c, d) in zip(drawn, wanted, strict=True))


def test_a_map_of_two_sets_of_weights_is_none(vit):
    """Weights that change while the work stands still: it begins anew."""
    model, held = vit(), threading.Event()
    fresh = undisturbed(vit(seed=1))

    def hold():
        held.set()
        until(lambda: RUNNING.waiting)

    long = Long(model, {3: hold})
    long.start()
    assert held.wait(PATIENCE)
    with RUNNING:
        model.load_state_dict(vit(seed=1).state_dict())
    assert np.array_equal(long.finish(), fresh)


def test_checkpointing_comes_back_whoever_ends_last(vit):
    model = vit()
    model.set_grad_checkpointing(True)
    inside, done = threading.Event(), threading.Event()

    def other():
        with explaining(model):
            inside.set()
            done.wait(PATIENCE)
            assert not model.grad_checkpointing and not model.training

    thread = threading.Thread(target=other)
    with explaining(model):
        thread.start()
        assert inside.wait(PATIENCE) and not model.grad_checkpointing
    assert not model.grad_checkpointing, "the other thread is still at it"
    done.set()
    thread.join()
    assert model.grad_checkpointing


def test_the_time_of_a_forward_is_that_of_no_pause(vit):
    """It says how long a map would take, and others may have their turn before it."""
    explorer = widgets.explore(vit(), PICTURE)
    explorer.wait(PATIENCE)
    explorer.subject.small.clear()

    def wanted():
        threading.Event().wait(1.0)
        return True

    assert reasons.seconds(explorer.subject, wanted) < 0.9


def test_scores_of_one_page_wait_for_nobody_and_nobody_for_them(vit):
    first, second = (widgets.explore(vit(seed=seed), PICTURE) for seed in (0, 1))
    for each in (first, second):
        each._receive(each, {"set": {"view": "relevance"}}, [])
    assert first.wait(PATIENCE) and second.wait(PATIENCE)
    assert "curves" in until_scored(first) and "curves" in until_scored(second)


def test_a_widget_that_is_at_long_work_may_be_moved_by_another(vit):
    """From a callback: the thread that works waits for the other, which ends what is not wanted any more."""
    mover = widgets.explore(vit(seed=1), PICTURE)
    long = Long(vit(), {})
    mover.observe(lambda change: long.explorer.set(view="norms"), "frame")
    long.happens[3] = lambda: mover._receive(mover, {"set": {"layer": 0}}, [])
    long.start()
    assert mover.wait(PATIENCE)
    long.finish()
    assert long.explorer.state["view"] == "norms" and mover.state["layer"] == 0 and long.forwards == 3


def test_large_models_are_run_on_few_images_at_once(vit, monkeypatch):
    model = vit()
    subject = widgets.explore(model, PICTURE).subject
    sliced = lambda name: reasons._sliced(subject, reasons.METHODS[name])  # noqa: E731
    assert sliced("kernel_shap") == {"internal_batch_size": 16} and sliced("relevance") == sliced("gradient_shap") == {}
    work = sum(p.numel() for p in model.parameters()) * 17
    for slices, count in ((5.5, 5), (0.1, 1)):
        monkeypatch.setattr(reasons, "SLICE", int(slices * work))
        assert sliced("occlusion") == {"internal_batch_size": count}
    seen = []
    model.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    browser(explorer := widgets.explore(model, PICTURE), {"set": {"view": "occlusion"}})
    assert max(seen) == 1
    found = METHODS["occlusion"](model, given(model), explorer.subject.likeliest[0])
    np.testing.assert_allclose(values(explorer), found[0], atol=1e-6)
