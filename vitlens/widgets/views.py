"""What there is to see of a picture in a model: each view a map of the patches, and a sentence that says what it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitlens import tokens
from vitlens.widgets.subject import Subject

READOUT, MEAN, MAX = "readout", "mean", "max"


@dataclass(frozen=True)
class Choice:
    """What is looked at. layer: from 0. head: a number, MEAN or MAX. query: READOUT, the position of a prefix token, or
    (row, column) of a patch. target: the class that is explained, None for the predicted one; against: the class that
    it is contrasted with."""

    layer: int = 0
    head: int | str = MEAN
    query: str | int | tuple[int, int] = READOUT
    target: int | None = None
    against: int | None = None


@dataclass(frozen=True)
class View:
    """One view. values: (rows, cols), or (rows, cols, 3) where they are three components. words: what they are, to be
    continued. limit: the end of the color scale, where it is known."""

    values: np.ndarray
    words: str
    limit: float | None = None


def number(value: float) -> str:
    """Three digits, with a minus sign."""
    return f"{value:.3g}".replace("-", "−")


def percent(share: float) -> str:
    """As "12 %"; what is above 0 is not called 0."""
    return "< 0.5 %" if 0 < share < 0.005 else f"{100 * share:.0f} %"


def query_row(subject: Subject, query: str | int | tuple[int, int]) -> Tensor:
    """(T,) what the query reads: one-hot for a token. Raises ValueError where the read-out is no sum of tokens."""
    if query == READOUT:
        if subject.grid.readout is None:
            raise ValueError(
                f"{subject.name} reads no weighted sum of its tokens, so there is no read-out to look from; choose a "
                "patch or another token."
            )
        return subject.grid.readout.float().reshape(-1, subject.grid.tokens)[0].cpu()
    row = torch.zeros(subject.grid.tokens)
    row[subject.grid.position(query)] = 1.0
    return row


def query_words(subject: Subject, query: str | int | tuple[int, int]) -> str:
    """A query as it is called in a sentence."""
    if query == READOUT:
        return f"the read-out ({readout_words(subject)})"
    if isinstance(query, tuple):
        return f"the patch in row {query[0]}, column {query[1]}"
    return f"the {subject.prefix[query]}"


def readout_words(subject: Subject) -> str:
    """What the head reads."""
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
    """(H, …) values of all heads → those of one head, or their mean or largest."""
    if head == MEAN:
        return values.mean(0)
    return values.amax(0) if head == MAX else values[head]


def _head_words(head: int | str) -> str:
    return {MEAN: "mean of the heads", MAX: "largest of the heads"}.get(head, f"head {head}")


def _attention(subject: Subject, choice: Choice, wanted) -> View:
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
    return View(values.numpy(), words + _gate_words(subject))


def _gate_words(subject: Subject) -> str:
    """What happens to attention afterwards and is in no map."""
    return ". A learned gate on the output of attention is not part of it" if subject.attn.gated else ""


def _prefix_words(subject: Subject) -> str:
    return f"the {subject.prefix[0]}" if len(subject.prefix) == 1 else f"the {len(subject.prefix)} prefix tokens"


def _received(subject: Subject, choice: Choice, wanted) -> View:
    values = _fused(subject.received(choice.layer, wanted), choice.head).unflatten(0, _shape(subject))
    words = f"Attention received, the mean over all queries, layer {choice.layer}, {_head_words(choice.head)}"
    return View(values.numpy(), words + "; not renormalized" * bool(subject.grid.prefix) + _gate_words(subject))


def _rollout(subject: Subject, choice: Choice, wanted) -> View:
    row = query_row(subject, choice.query)  # refuses a read-out that there is not
    query = None if choice.query == READOUT else int(row.argmax())
    fusion = choice.head if choice.head == MAX else MEAN
    values = subject.rollout(choice.layer, query, fusion, wanted)
    through = "all layers" if choice.layer == len(subject.attn) - 1 else f"layers 0 to {choice.layer}"
    words = f"Rollout from {query_words(subject, choice.query)} through {through}, {_head_words(fusion)}"
    rest = f". {percent(1 - values.sum())} stays with {_prefix_words(subject)}" if subject.grid.prefix else ""
    return View(values.numpy(), words + rest + "; the rest is not renormalized" * bool(rest) + _gate_words(subject))


def _similarity(subject: Subject, choice: Choice, wanted) -> View:
    cosines = tokens.similarity(subject.tokens[choice.layer][0].float().cpu(), query_row(subject, choice.query))
    words = f"Cosine similarity of the tokens after layer {choice.layer} to {query_words(subject, choice.query)}"
    return View(subject.grid.image_map(cosines).numpy(), words, limit=1.0)


def _components(subject: Subject, choice: Choice, wanted) -> View:
    patches = subject.tokens[choice.layer][0, subject.grid.prefix :]
    scores, variance = tokens.components(patches.float().cpu())
    values = tokens.colors(scores).unflatten(0, _shape(subject))
    shares = ", ".join(map(percent, variance))
    words = (
        f"First three principal components of the patch tokens after layer {choice.layer} as red, green and blue, each "
        f"from its least to its largest value; they hold {shares} of the variance of this picture’s patches"
    )
    return View(values.numpy(), words)


def _norms(subject: Subject, choice: Choice, wanted) -> View:
    lengths = tokens.norms(subject.tokens[choice.layer][0].float().cpu())
    patches = lengths[subject.grid.prefix :]
    words = f"Length of the patch tokens after layer {choice.layer}; the median is {number(patches.median())}"
    if subject.prefix:
        words += f", that of the {subject.prefix[0]} {number(lengths[0])}"
    return View(subject.grid.image_map(lengths).numpy(), words)


def _shape(subject: Subject) -> tuple[int, int]:
    return subject.grid.rows, subject.grid.cols


@dataclass(frozen=True)
class Kind:
    """A kind of view. make: (subject, choice, wanted) → View; wanted() says whether it is still asked for."""

    title: str
    make: Callable[[Subject, Choice, Callable[[], bool]], View]


VIEWS = {
    "attention": Kind("Attention from the query", _attention),
    "received": Kind("Attention received", _received),
    "rollout": Kind("Rollout from the query", _rollout),
    "similarity": Kind("Similarity of tokens to the query", _similarity),
    "components": Kind("Principal components of tokens", _components),
    "norms": Kind("Length of tokens", _norms),
}
HAS_QUERY = {"attention", "rollout", "similarity"}
HAS_HEAD = {"attention", "received", "rollout"}
