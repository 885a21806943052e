"""The views of a picture: a registry of rows, each of which makes a map over the patches and a sentence about it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from vitlens import tokens
from vitlens.recorder.supported import family, unwrap
from vitlens.tokens import median
from vitlens.widgets.subjects import Subject
from vitlens.widgets.worker import Superseded

READOUT, MEAN, MAX = "readout", "mean", "max"
SUM, EVERY = "sum", "every"
HEADS = {
    "each": (("mean of heads", MEAN), ("largest of heads", MAX)),
    "mixed": (("mean of heads", MEAN), ("largest of heads", MAX)),
    "added": (("all of all layers", EVERY), ("all of the layer", SUM)),
}
"""What the heads of a view can be put together to. Single heads come after these, but not where heads are mixed."""
LOOKS, HOLDS, WRITES, WHY, SLOWER = (
    "Where heads look", "What tokens hold", "What heads write", "Why?", "Why? (slower)",
)  # fmt: skip
"""The groups of the menu."""


@dataclass(frozen=True)
class Choice:
    """What a view is asked for.

    layer: from 0. head: a number, or a way of `HEADS`. query: READOUT, the position of a prefix token, or (row, column)
    of a patch. target: the class to explain, None for the predicted one, or a `Likeness`. against: the class or
    `Likeness` to contrast it with, or None.
    """

    layer: int = 0
    head: int | str = MEAN
    query: str | int | tuple[int, int] = READOUT
    target: object = None
    against: object = None


@dataclass(frozen=True)
class Map:
    """What a view shows. values: (rows, cols), or (rows, cols, 3) for three color channels. words: a description
    without its final period. limit: the end of the color scale, where it is known. unit: of the values. title: another
    one than the view's. beside: what stands beside the picture, as stage.js takes it. arrays: more numbers to save."""

    values: np.ndarray
    words: str
    limit: float | None = None
    unit: str = ""
    title: str = ""
    beside: dict = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class View:
    """A row of the list of views.

    title: its name above the picture. make: (subject, choice, wanted) → Map; it calls `wanted()` during long work and
    raises Superseded once that is False. group: where it stands in the menu, and entry: its name there, if it is
    another. query: whether the map depends on it. head: what can be chosen of the heads, a key of `HEADS`, or "" for
    nothing. layered: whether the map is of a layer. explains: whether it is about a class; likes: or a `Likeness` in
    its place; contrasts: and maybe about that one rather than another.
    """

    title: str
    make: Callable[[Subject, Choice, Callable[[], bool]], Map]
    group: str = LOOKS
    entry: str = ""
    query: bool = False
    head: str = ""
    layered: bool = True
    explains: bool = False
    likes: bool = False
    contrasts: bool = False

    def heads(self, count: int) -> tuple[tuple[str, str | int], ...]:
        """Names and values of what can be chosen of so many heads."""
        single = () if self.head == "mixed" else tuple((str(head), head) for head in range(count))
        return (*HEADS[self.head or "each"], *single)

    def fitted(self, head: str | int) -> str | int:
        """The head, if it can be chosen in this view; otherwise the first choice that can."""
        single = self.head != "mixed" and isinstance(head, int)
        choices = [value for _, value in HEADS[self.head or "each"]]
        return head if single or head in choices else choices[0]


def number(value: float) -> str:
    """Three significant digits, with a proper minus sign."""
    return f"{value:.3g}".replace("-", "−")


def percent(share: float) -> str:
    """As in "12 %", or "< 0.5 %" for less than that."""
    return "< 0.5 %" if 0 < share < 0.005 else f"{100 * share:.0f} %"


def asked(subject: Subject, choice: Choice) -> tuple[object, object]:
    """What to explain, a class or a `Likeness`, and what to contrast it with, or None."""
    return subject.likeliest[0] if choice.target is None else choice.target, choice.against


@contextlib.contextmanager
def until(model: nn.Module, wanted: Callable[[], bool]) -> Iterator[None]:
    """Before each forward of the model in this block and thread, let other work run by calling `wanted()`, and raise
    Superseded if it returns False. The hook is on the patch embedding, because computing features skips the head."""
    thread = threading.get_ident()

    def ask(module, args) -> None:
        if threading.get_ident() == thread and not wanted():
            raise Superseded

    with family(unwrap(model)).embedding.register_forward_pre_hook(ask):
        yield


def query_row(subject: Subject, query: str | int | tuple[int, int]) -> Tensor:
    """(T,) weights of the tokens that a query reads: one-hot for a token. Raises ValueError for the read-out of a model
    whose head reads no weighted sum of tokens."""
    if query == READOUT:
        if subject.grid.readout is None:
            raise ValueError(
                f"{subject.name} has no read-out to look from, because its head reads no weighted sum of tokens. "
                "Choose a patch or another token."
            )
        return subject.grid.readout.float().reshape(-1, subject.grid.tokens)[0].cpu()
    row = torch.zeros(subject.grid.tokens)
    row[subject.grid.position(query)] = 1.0
    return row


def query_words(subject: Subject, query: str | int | tuple[int, int]) -> str:
    """The name of a query in a sentence."""
    if query == READOUT:
        return f"the read-out ({readout_words(subject)})"
    if isinstance(query, tuple):
        return f"the patch in row {query[0]}, column {query[1]}"
    return f"the {subject.prefix[query]}"


def readout_words(subject: Subject) -> str:
    """The name of what the head reads."""
    readout, grid = subject.grid.readout, subject.grid
    if readout is None:
        return "no sum of tokens"
    if readout.dim() == 2:
        return "what the attention pool reads"
    read = readout.nonzero().squeeze(-1).tolist()
    if read[-1] < grid.prefix:
        return " and ".join(subject.prefix[i] for i in read)
    return "the mean of the patches" if read[0] >= grid.prefix else "the mean of all tokens"


def _fused(values: Tensor, head: int | str) -> Tensor:
    """The values of one head out of (H, …), or the mean or maximum over the heads."""
    if head == MEAN:
        return values.mean(0)
    return values.amax(0) if head == MAX else values[head]


def _head_words(head: int | str) -> str:
    return {MEAN: "mean of the heads", MAX: "largest of the heads"}.get(head, f"head {head}")


def _attention(subject: Subject, choice: Choice, wanted) -> Map:
    row = query_row(subject, choice.query)
    weights = _fused(subject.attn[choice.layer].read(row)[0], choice.head).cpu()
    values = subject.grid.image_map(weights)
    source = query_words(subject, choice.query)
    if row.count_nonzero() > 1:
        source = f"what {source} reads, averaged as it is read"
    words = f"Attention from {source}, layer {choice.layer}, {_head_words(choice.head)}"
    if subject.grid.prefix and choice.head != MAX:
        rest = weights[: subject.grid.prefix].sum()
        words += f". {percent(rest)} goes to {_prefix_words(subject)}; the rest is not renormalized"
    elif subject.grid.prefix:
        words += "; not renormalized"
    return Map(values.numpy(), words + _gate_words(subject), unit="of the attention")


def _gate_words(subject: Subject) -> str:
    """A note about gated attention, whose gate is in no map."""
    return ". A learned gate on the output of attention is not part of it" if subject.attn.gated else ""


def _prefix_words(subject: Subject) -> str:
    return f"the {subject.prefix[0]}" if len(subject.prefix) == 1 else f"the {len(subject.prefix)} prefix tokens"


def _received(subject: Subject, choice: Choice, wanted) -> Map:
    values = _fused(subject.received(choice.layer, wanted), choice.head).unflatten(0, _shape(subject))
    words = f"Attention received, the mean over all queries, layer {choice.layer}, {_head_words(choice.head)}"
    words += "; not renormalized" * bool(subject.grid.prefix) + _gate_words(subject)
    return Map(values.numpy(), words, unit="of the attention")


def _rollout(subject: Subject, choice: Choice, wanted) -> Map:
    row = query_row(subject, choice.query)  # refuses a read-out that there is not
    query = None if choice.query == READOUT else int(row.argmax())
    values = subject.rollout(choice.layer, query, choice.head, wanted)
    through = "all layers" if choice.layer == len(subject.attn) - 1 else f"layers 0 to {choice.layer}"
    words = f"Rollout from {query_words(subject, choice.query)} through {through}, {_head_words(choice.head)}"
    rest = f". {percent(1 - values.sum())} stays with {_prefix_words(subject)}" if subject.grid.prefix else ""
    words += rest + "; the rest is not renormalized" * bool(rest) + _gate_words(subject)
    return Map(values.numpy(), words, unit="of the rollout")


def _similarity(subject: Subject, choice: Choice, wanted) -> Map:
    cosines = tokens.similarity(subject.tokens[choice.layer][0].float().cpu(), query_row(subject, choice.query))
    words = f"Cosine similarity of the tokens after layer {choice.layer} to {query_words(subject, choice.query)}"
    return Map(subject.grid.image_map(cosines).numpy(), words, limit=1.0, unit="cosine")


def _components(subject: Subject, choice: Choice, wanted) -> Map:
    patches = subject.tokens[choice.layer][0, subject.grid.prefix :]
    scores, variance = tokens.components(patches.float().cpu())
    values = tokens.colors(scores).unflatten(0, _shape(subject))
    shares = ", ".join(map(percent, variance))
    words = (
        f"First three principal components of the patch tokens after layer {choice.layer} as red, green and blue, each "
        f"from its least to its largest value; they hold {shares} of the variance of this picture’s patches"
    )
    return Map(values.numpy(), words)


def _norms(subject: Subject, choice: Choice, wanted) -> Map:
    lengths = tokens.norms(subject.tokens[choice.layer][0].float().cpu())
    patches = lengths[subject.grid.prefix :]
    words = f"Length of the patch tokens after layer {choice.layer}; the median is {number(median(patches))}"
    if subject.prefix:
        words += f", that of the {subject.prefix[0]} {number(lengths[0])}"
    return Map(subject.grid.image_map(lengths).numpy(), words, unit="length")


def _shape(subject: Subject) -> tuple[int, int]:
    return subject.grid.rows, subject.grid.cols


VIEWS = {
    "attention": View("Attention from the query", _attention, query=True, head="each"),
    "received": View("Attention received", _received, head="each"),
    "rollout": View("Rollout from the query", _rollout, query=True, head="mixed"),
    "similarity": View("Similarity of tokens to the query", _similarity, HOLDS, query=True),
    "components": View("Principal components of tokens", _components, HOLDS),
    "norms": View("Length of tokens", _norms, HOLDS),
}
"""The views of a layer that are about no class; `vitlens.widgets.reasons.views` adds those that are."""
