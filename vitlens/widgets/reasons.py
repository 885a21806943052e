"""Why a class: the maps of `vitlens.attribution` as views, each with what insertion and deletion say of it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from vitlens import faithfulness
from vitlens.attribution import METHODS
from vitlens.recorder.families import unwrap
from vitlens.recorder.running import evaluating
from vitlens.widgets.subject import Subject
from vitlens.widgets.views import Choice, Kind, View, number, percent
from vitlens.widgets.worker import Superseded

POINTS, ORDERS, BASELINE = 14, 8, "mean"
LONGEST, LONGEST_MAP = 120.0, 20.0
"""Seconds that a score may take, and minutes that a map; beyond, the page says how long it would."""
SLICE = 4 * 10**10
"""Multiplications between two pauses: about half a second on a CPU."""


@dataclass(frozen=True)
class Score:
    """Deletion and insertion of the map, (S,), and of random orders, (orders, S). among: which classes the probability
    is among, in words."""

    own: faithfulness.Curves
    chance: faithfulness.Curves
    among: str

    @property
    def sigmas(self) -> float:
        """Standard deviations of the random orders by which insertion − deletion lies above their mean."""
        own, chance = (each.insertion_area - each.deletion_area for each in (self.own, self.chance))
        return ((own - chance.mean()) / chance.std()).item()

    def message(self) -> dict:
        """What the page draws."""
        own, chance, sigmas = self.own, self.chance, self.sigmas
        above = f"{number(abs(sigmas))} σ {'above' if sigmas >= 0 else 'below'} {len(chance.deletion)} random orders"
        return {
            "title": "How far to trust it",
            "scale": f"probability of the class{self.among}",
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


def _reason(name: str) -> Kind:
    title = METHODS[name].title
    begin = title[0].upper() + title[1:]

    def make(subject: Subject, choice: Choice, wanted: Callable[[], bool]) -> View:
        target, against = asked(subject, choice)
        if (each := METHODS[name].forwards_per_patch) and not subject.has("reason", name, target, against):
            forwards = each * subject.grid.patches
            taking = forwards * seconds(subject, wanted) / 60
            if taking > LONGEST_MAP:
                raise ValueError(
                    f"{begin} takes {forwards:,} forwards, here about {taking:,.0f} minutes. "
                    f"Choose a smaller size, or let `vitlens explain --methods {name}` make it."
                )
        with until(model := subject.model, wanted):
            values = subject.once(
                ("reason", name, target, against),
                lambda: METHODS[name](model, subject.batch, target, against=against, **_sliced(subject, name))[0],
            )
        words = f"{begin} for “{subject.label(target)}” ({percent(subject.share(target))})"
        words += (
            "" if against is None else f" rather than “{subject.label(against)}” ({percent(subject.share(against))})"
        )
        return View(values.numpy(), words)

    return Kind(f"Why this class: {title}", make)


def _sliced(subject: Subject, name: str) -> dict[str, int]:
    """How many images a method that runs the model many times takes at once: on a CPU no more than do `SLICE`
    multiplications, so that others need not wait long. One that draws different numbers for another count is left
    alone."""
    if "internal_batch_size" not in (known := METHODS[name].options) or "stdevs" in known:
        return {}
    usual = known["internal_batch_size"].default
    if subject.batch.device.type != "cpu":
        return {"internal_batch_size": usual}
    work = sum(p.numel() for p in subject.model.parameters()) * subject.grid.tokens
    return {"internal_batch_size": max(1, min(usual, SLICE // work))}


REASONS = {name: _reason(name) for name, method in METHODS.items() if method.knows_class}
_FROM_READOUT = {name for name in REASONS if "query" in METHODS[name].options}


def reasons(subject: Subject) -> dict[str, Kind]:
    """Those that its model takes: none without classes; without a read-out only those that do not begin there."""
    if not subject.likeliest:
        return {}
    return {name: k for name, k in REASONS.items() if subject.grid.readout is not None or name not in _FROM_READOUT}


def asked(subject: Subject, choice: Choice) -> tuple[int, int | None]:
    """The class that is explained, and what it is contrasted with."""
    return subject.likeliest[0] if choice.target is None else choice.target, choice.against


def seconds(subject: Subject, wanted: Callable[[], bool] = lambda: True) -> float:
    """What a forward takes. Not the first one, which is slow."""

    def measured() -> Tensor:
        if not wanted():
            raise Superseded
        start = time.perf_counter()
        with evaluating(subject.model):
            subject.model(subject.batch).cpu()
        return torch.tensor(time.perf_counter() - start)

    return subject.once(("seconds",), measured).item()


def long(subject: Subject, choice: Choice) -> float:
    """How many seconds a score takes, roughly; 0 before it is known what a forward takes."""
    if not subject.has("seconds"):
        return 0.0
    orders = 1 if subject.has("random", *asked(subject, choice)) else 1 + ORDERS
    return 2 * POINTS * orders * seconds(subject)


def is_scored(subject: Subject, view: str, choice: Choice) -> bool:
    """Whether all that a score is made of is there; a subject keeps so much and no more."""
    classes = asked(subject, choice)
    return all(subject.has(*key, *classes) for key in (("reason", view), ("random",), ("score", view)))


def scored(subject: Subject, view: str, choice: Choice, wanted: Callable[[], bool]) -> Score:
    """Made now, or kept from before; Superseded where it is no longer wanted."""
    target, against = asked(subject, choice)
    grid, values = subject.grid, REASONS[view].make(subject, choice, wanted).values
    counts = torch.tensor([*range(0, grid.patches, step := -(-grid.patches // POINTS)), grid.patches])

    def curves(maps: Tensor) -> Tensor:
        """(2, maps, S) deletion and insertion."""
        found = faithfulness.curves(
            subject.model, subject.batch, maps[:, None], target, against=against, baseline=BASELINE, step=step,
            grid=grid, internal_batch_size=min(32, max(1, int(0.5 / seconds(subject)))),
        )  # fmt: skip
        return torch.stack([found.deletion[:, 0], found.insertion[:, 0]])

    with until(subject.model, wanted):
        chance = subject.once(
            ("random", target, against), lambda: curves(faithfulness.random_maps(grid, ORDERS).to(subject.batch.device))
        )
        own = subject.once(("score", view, target, against), lambda: curves(torch.from_numpy(values)[None]))
    both = (faithfulness.Curves(counts, *each) for each in (own[:, 0], chance))
    return Score(*both, "" if against is None else " among the two")


@contextlib.contextmanager
def until(model: nn.Module, wanted: Callable[[], bool]) -> Iterator[None]:
    """In this block and thread, before each forward of the model others have their turn, and what is not wanted any
    more ends."""
    thread = threading.get_ident()

    def ask(module, args) -> None:
        if threading.get_ident() == thread and not wanted():
            raise Superseded

    with unwrap(model).register_forward_pre_hook(ask):
        yield
