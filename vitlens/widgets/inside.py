"""Views of what heads write into the logit of a class, and of what tokens say of it after each layer.

Shapes: L layers, H heads, T tokens = R prefix + P patches.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vitlens import stream
from vitlens.models import scores
from vitlens.recorder.running import evaluating
from vitlens.recorder.supported import family
from vitlens.widgets.subjects import Subject
from vitlens.widgets.views import (
    EVERY,
    HOLDS,
    READOUT,
    SUM,
    WRITES,
    Choice,
    Map,
    View,
    asked,
    number,
    percent,
    query_words,
    readout_words,
    until,
)  # fmt: skip
from vitlens.widgets.worker import Superseded

AT_ONCE = 2**24
"""Logits of tokens that are computed at a time."""


def _contributions(subject: Subject, choice: Choice, wanted: Callable[[], bool]) -> Map:
    target, against = asked(subject, choice)
    parts, written = _apart(subject, target, against, wanted)
    layer, head = choice.layer, choice.head
    chosen = written if head == EVERY else written[layer] if head == SUM else written[layer, head]
    tokens = chosen.reshape(-1, subject.grid.tokens).sum(0)
    whose = {EVERY: "All heads of all layers", SUM: f"All heads of layer {layer}"}
    logit = f"the logit of “{subject.label(target)}”"
    if against is not None:
        logit = f"the logit of “{subject.label(target)}” minus that of “{subject.label(against)}”"
    words = (
        f"{whose.get(head, f'Head {head} of layer {layer}')}: what the model takes from each patch here and writes "
        f"directly into {logit}, {_signed(tokens[subject.grid.prefix :].sum())} in all"
    )
    if subject.grid.prefix:
        name = f"the {subject.prefix[0]}" if subject.grid.prefix == 1 else f"the {subject.grid.prefix} prefix tokens"
        words += f", and {_signed(tokens[: subject.grid.prefix].sum())} from {name}"
    words += f". The logit is {number(parts['logits'])}. What goes through later layers is not in this map"
    chart = {
        "title": "What each part adds to the logit" + (" difference" if against is not None else ""),
        "heads": parts["heads"].tolist(), "mlps": parts["mlps"].tolist(),
        "others": [[name, parts[key].item()] for key, name in OTHERS.items() if key != "pool" or parts["pool"]],
        "layer": None if head == EVERY else layer, "head": head if isinstance(head, int) else None,
        "note": f"The bars of heads, MLPs, embedding and biases add up to {number(parts['logits'])}.",
    }  # fmt: skip
    arrays = {name: part.numpy() for name, part in parts.items()}
    return Map(subject.grid.image_map(tokens).numpy(), words, unit="logits", beside={"parts": chart}, arrays=arrays)


OTHERS = {"embedding": "embedding", "pool": "MLP of the pool", "biases": "biases"}


def _apart(subject: Subject, target: int, against: int | None, wanted) -> tuple[dict[str, Tensor], Tensor]:
    """The parts of `stream.Contributions` of the picture, and (L, H, T) what heads write of each token."""
    model, off = subject.model, subject.off

    def made() -> Tensor:
        if off.heads and off.way != "zero":
            raise ValueError(
                "Contributions add up only where heads are on or give zero, because a mean is written by no part of "
                "this picture. Let heads that are off give zero, or switch them on."
            )
        with until(model, wanted), subject.switched():
            found, written = stream.apart(model, subject.batch, target, against)
        return torch.cat([found.logits, found.parts[0], written[0].flatten()])

    flat = subject.once(("apart", target, against), made)
    layers, heads, tokens = len(subject.attn), subject.attn[0].q.shape[1], subject.grid.tokens
    logits, embedding, rows, pool, biases, written = flat.split(
        [1, 1, layers * (heads + 1), 1, 1, layers * heads * tokens]
    )
    rows = rows.unflatten(0, (layers, heads + 1))
    parts = {"heads": rows[:, :-1], "mlps": rows[:, -1], "embedding": embedding[0], "pool": pool[0]}
    parts |= {"biases": biases[0], "logits": logits[0]}
    return parts, written.unflatten(0, (layers, heads, tokens))


def _signed(value: Tensor) -> str:
    return ("+" if value >= 0 else "") + number(value)


def _lens(subject: Subject, choice: Choice, wanted: Callable[[], bool]) -> Map:
    if any(layer == "pool" for layer, _ in subject.off.heads):
        raise ValueError("The raw lens needs all heads of the attention pool. Switch them on to see it.")
    target, _ = asked(subject, choice)
    layer, query = choice.layer, choice.query
    shares = subject.once(("lens", layer, target), lambda: _share(subject, layer, target, wanted))
    said = subject.once(("said", query), lambda: _said(subject, query, wanted))
    classes, top = said[:, 0].long().tolist(), said[:, 1].tolist()
    who = f"What the head reads ({readout_words(subject)})" if query == READOUT else query_words(subject, query)
    who = who[0].upper() + who[1:]
    words = (
        f"Raw lens after layer {layer}: the probability of “{subject.label(target)}” if the model ended here and read "
        f"one patch alone, by its own final norm and head. {who} says “{subject.label(classes[layer])}” "
        f"({percent(top[layer])}). Early layers do not write for this head, and may know what a raw lens does not show"
    )
    rows = [{"layer": k, "name": subject.label(each), "share": top[k]} for k, each in enumerate(classes)]
    lens = {
        "title": f"{who}, layer by layer", "rows": rows, "layer": layer,
        "note": "The likeliest class after each layer, by the raw lens. A click goes to the layer.",
    }  # fmt: skip
    arrays = {"classes": said[:, 0].long().numpy(), "shares": said[:, 1].numpy()}
    return Map(subject.grid.image_map(shares).numpy(), words, unit="probability", beside={"lens": lens}, arrays=arrays)


def _share(subject: Subject, layer: int, target: int, wanted: Callable[[], bool]) -> Tensor:
    """(T,) the probability of a class that each token after a layer gives it."""
    found = []
    for tokens in subject.tokens[layer].split(max(1, AT_ONCE // subject.classes), 1):
        if not wanted():
            raise Superseded
        with evaluating(subject.model):
            found.append(scores(subject.model, stream.read_each(subject.model, tokens)[0])[:, target].float())
    return torch.cat(found)


def _said(subject: Subject, query: str | int | tuple[int, int], wanted: Callable[[], bool]) -> Tensor:
    """(L, 2) the likeliest class after each layer and its probability, as the query says."""
    found = []
    for tokens in subject.tokens:
        if not wanted():
            raise Superseded
        with evaluating(subject.model):
            if query == READOUT:
                logits = family(subject.model).head(tokens)
            else:
                logits = stream.read_each(subject.model, tokens[:, [subject.grid.position(query)]])[:, 0]
        share, number = scores(subject.model, logits[0]).float().max(0)
        found.append(torch.stack([number.float(), share]))
    return torch.stack(found)


INSIDE = {
    "lens": View("Raw lens: who says the class already", _lens, HOLDS, "Classes by layer (raw lens)", query=True,
                 explains=True),
    "contributions": View("What heads write into the class", _contributions, WRITES, "Contributions of heads",
                          head="added", explains=True, contrasts=True),
}  # fmt: skip
"""The views of a layer that are about a class."""
