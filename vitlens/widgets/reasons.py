"""The views that explain a class or a likeness, one for each attribution method, and their scores by insertion and
deletion."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitlens import faithfulness
from vitlens.attribution import METHODS, Method
from vitlens.recorder.running import evaluating, run
from vitlens.widgets.inside import INSIDE
from vitlens.widgets.likeness import Likeness, called, goal
from vitlens.widgets.subjects import Subject
from vitlens.widgets.views import SLOWER, VIEWS, WHY, Choice, Map, View, asked, number, until
from vitlens.widgets.worker import Superseded

POINTS, ORDERS, BASELINE = 14, 8, "mean"
LONGEST, LONGEST_MAP = 120.0, 20.0
"""The longest score in seconds, and the longest map in minutes. For more, the page only says how long it would take."""
SLICE = 4 * 10**10
"""Multiplications between two pauses: about half a second on a CPU."""


@dataclass(frozen=True)
class Score:
    """The curves of a map, (S,), and of random orders, (orders, S). scale: what they measure."""

    own: faithfulness.Curves
    chance: faithfulness.Curves
    scale: str

    @property
    def sigmas(self) -> float:
        """Standard deviations by which insertion − deletion lies above the mean of the random orders."""
        own, chance = (each.insertion_area - each.deletion_area for each in (self.own, self.chance))
        return ((own - chance.mean()) / chance.std()).item()

    def message(self) -> dict:
        """As `curves` of stage.js takes it."""
        own, chance, sigmas = self.own, self.chance, self.sigmas
        above = f"{number(abs(sigmas))} σ {'above' if sigmas >= 0 else 'below'} {len(chance.deletion)} random orders"
        return {
            "title": "How far to trust it",
            "scale": self.scale,
            "shares": (own.counts / own.counts[-1]).tolist(),
            "curves": {
                "deletion": own.deletion.tolist(),
                "insertion": own.insertion.tolist(),
                "random deletion": chance.deletion.mean(0).tolist(),
                "random insertion": chance.insertion.mean(0).tolist(),
            },
            "words": f"Patches are covered {faithfulness.BASELINES[BASELINE]}. Areas: "
            f"deletion {number(own.deletion_area.item())} (low is good), "
            f"insertion {number(own.insertion_area.item())} (high is good). "
            f"Insertion − deletion lies {above if np.isfinite(sigmas) else 'where all orders do'}.",
        }


@functools.cache
def explaining(method: Method) -> View:
    """The view of an attribution method."""
    begin = method.title[0].upper() + method.title[1:]

    def make(subject: Subject, choice: Choice, wanted: Callable[[], bool]) -> Map:
        named = asked(subject, choice)
        key = ("reason", method.name, *named)
        if not subject.has(*key):
            _refuse_long(subject, method, begin, wanted)
        target, against = goal(subject, choice, wanted)
        with until(model := subject.model, wanted), subject.switched():
            values = subject.once(
                key, lambda: method(model, subject.batch, target, against=against, **_sliced(subject, method))[0]
            )
        if not method.knows_class:
            return Map(values.numpy(), begin)
        alike = isinstance(named[0], Likeness)
        words = f"{begin} for {'likeness to ' * alike}{called(subject, named[0], wanted)}"
        if named[1] is not None:
            words += f" rather than {'to ' * alike}{called(subject, named[1], wanted)}"
        return Map(values.numpy(), words, title=f"Why alike: {method.title}" if alike else "")

    return View(
        f"Why this class: {method.title}" if method.knows_class else begin, make, group=_group(method), entry=begin,
        layered=False, explains=True, likes=True, contrasts=True,
    )  # fmt: skip


def _group(method: Method) -> str:
    return SLOWER if method.needs in ("pixels", "patches") else WHY


def _refuse_long(subject: Subject, method: Method, begin: str, wanted: Callable[[], bool]) -> None:
    """Raise ValueError for a map that would take longer than `LONGEST_MAP`."""
    if not method.forwards_per_patch:
        return
    forwards = method.forwards_per_patch * subject.grid.patches
    minutes = forwards * seconds(subject, wanted) / 60
    if minutes > LONGEST_MAP:
        raise ValueError(
            f"{begin} takes {forwards:,} forwards, here about {minutes:,.0f} minutes. "
            f"Choose a smaller size, or let `vitlens explain --methods {method.name}` make it."
        )


def _sliced(subject: Subject, method: Method) -> dict[str, int]:
    """The batch size, as an option, of a method that runs the model many times: on a CPU at most `SLICE`
    multiplications, so that others need not wait long. Gradient SHAP keeps its own, because its noise depends on it."""
    if "internal_batch_size" not in method.options or "stdevs" in method.options:
        return {}
    usual = method.options["internal_batch_size"].default
    if subject.batch.device.type != "cpu":
        return {"internal_batch_size": usual}
    work = sum(p.numel() for p in subject.model.parameters()) * subject.grid.tokens
    return {"internal_batch_size": max(1, min(usual, SLICE // work))}


def views() -> dict[str, View]:
    """All views by name: those of a layer, and one for each attribution method that is registered now."""
    of_a_layer = VIEWS | INSIDE
    return of_a_layer | {name: explaining(method) for name, method in METHODS.items() if name not in of_a_layer}


def possible(subject: Subject) -> dict[str, View]:
    """The views that a model can show: without classes none that is about these alone, and without a read-out none that
    starts from it."""
    readable, embedded = subject.grid.readout is not None, subject.logits.dim() == 1
    return {
        name: view
        for name, view in views().items()
        if not view.explains
        or (subject.likeliest or (view.likes and embedded))
        and (view.layered or readable or "query" not in METHODS[name].options)
    }


def seconds(subject: Subject, wanted: Callable[[], bool] = lambda: True) -> float:
    """How long a forward takes. Capturing was the first one, which is slower."""

    def measured() -> Tensor:
        if not wanted():
            raise Superseded
        start = time.perf_counter()
        with evaluating(subject.model):
            run(subject.model, subject.batch).cpu()
        return torch.tensor(time.perf_counter() - start)

    return subject.once(("seconds",), measured).item()


def long(subject: Subject, choice: Choice) -> float:
    """Roughly how many seconds a score takes; 0 before a forward has been timed."""
    if not subject.has("seconds"):
        return 0.0
    orders = 1 if subject.has("random", *asked(subject, choice)) else 1 + ORDERS
    return 2 * POINTS * orders * seconds(subject)


def is_scored(subject: Subject, view: str, choice: Choice) -> bool:
    """Whether all parts of a score are there; a subject forgets the oldest of what it keeps."""
    named = asked(subject, choice)
    return all(subject.has(*key, *named) for key in (("reason", view), ("random",), ("score", view)))


def scored(subject: Subject, view: str, choice: Choice, wanted: Callable[[], bool]) -> Score:
    """The score of a view, made now or kept from before. Raises Superseded once it is no longer wanted."""
    named, (target, against) = asked(subject, choice), goal(subject, choice, wanted)
    grid, values = subject.grid, views()[view].make(subject, choice, wanted).values
    counts = torch.tensor([*range(0, grid.patches, step := -(-grid.patches // POINTS)), grid.patches])

    def curves(maps: Tensor) -> Tensor:
        """(2, maps, S) deletion and insertion."""
        found = faithfulness.curves(
            subject.model, subject.batch, maps[:, None], target, against=against, baseline=BASELINE, step=step,
            grid=grid, internal_batch_size=min(32, max(1, int(0.5 / seconds(subject)))),
        )  # fmt: skip
        return torch.stack([found.deletion[:, 0], found.insertion[:, 0]])

    with until(subject.model, wanted), subject.switched():
        chance = subject.once(
            ("random", *named), lambda: curves(faithfulness.random_maps(grid, ORDERS).to(subject.batch.device))
        )
        own = subject.once(("score", view, *named), lambda: curves(torch.from_numpy(values)[None]))
    both = (faithfulness.Curves(counts, *each) for each in (own[:, 0], chance))
    if isinstance(named[0], Likeness):
        return Score(*both, "cosine" if named[1] is None else "difference of the two cosines")
    return Score(*both, "probability of the class" + " among the two" * (named[1] is not None))
