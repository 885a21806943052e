"""Protocols of an evaluation, and the options that each of them reads.

This file does not import PyTorch, because help texts list the protocols.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from vitlens.names import require_known

if TYPE_CHECKING:
    from torch import nn


class Protocol(NamedTuple):
    """A protocol of `PROTOCOLS`."""

    function: str
    """Function from a `Session` and the options to an iterator over `Record`s, as "module:name"."""
    options: tuple[str, ...]
    """Options that it reads, with the data and the checkpoint of the model among them."""


PROTOCOLS = {
    "top1": Protocol(
        "vitlens_paper.evaluate.protocols:top1",
        ("data", "checkpoint", "classes"),
    ),
    "fewshot": Protocol(
        "vitlens_paper.evaluate.protocols:fewshot",
        ("data", "checkpoint", "shots", "seeds"),
    ),
    "knn": Protocol(
        "vitlens_paper.evaluate.protocols:knn",
        ("data", "checkpoint", "neighbors"),
    ),
    "probe": Protocol(
        "vitlens_paper.evaluate.protocols:probe",
        ("data", "checkpoint"),
    ),
    "finetune": Protocol(
        "vitlens_paper.evaluate.protocols:finetune",
        ("data", "recipe", "settings", "seeds", "runs"),
    ),
    "vtab": Protocol(
        "vitlens_paper.evaluate.protocols:vtab",
        ("tasks", "recipe", "settings", "seeds", "runs"),
    ),
}
"""Protocols by name."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A measurement: a model, a data set, a protocol, and options that the protocol reads.

    Raises ValueError for options that the protocol does not read.

    >>> knn = vitlens_paper.evaluate.Evaluation(model=model, data="digits", protocol="knn", options={"neighbors": 5})
    """

    model: str | os.PathLike | nn.Module
    """A timm name, a directory, or a timm model."""
    data: str = ""
    """A data set of `data.load`, or "" for the protocol vtab."""
    protocol: str = "top1"
    """A name of `PROTOCOLS`."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Keyword arguments of the protocol's function."""
    checkpoint: str | os.PathLike | None = None
    """A file with the model's weights, as in `load_model`."""
    head: str | None = None
    """Name of the classifier in the checkpoint, as in `load_model`."""

    def __post_init__(self):
        check_options(self.protocol, given_options(self.data, self.checkpoint, self.options))
        if not isinstance(self.model, str | os.PathLike) and self.protocol in protocols_with(
            "recipe"
        ):
            raise _untrainable(self.protocol, "a module")


def protocols_with(option: str) -> list[str]:
    """Names of the protocols that read an option."""
    return [name for name, protocol in PROTOCOLS.items() if option in protocol.options]


def given_options(
    data: str, checkpoint: str | os.PathLike | None, options: Mapping[str, object]
) -> list[str]:
    """Names of the options with a value, with "data" and "checkpoint" among them."""
    given = [*options]
    if data:
        given.append("data")
    if checkpoint:
        given.append("checkpoint")
    return given


def argument_name(option: str) -> str:
    """Name of an option in the errors of Python."""
    return f"the argument {option}"


def check_options(
    protocol: str, given: Collection[str], name: Callable[[str], str] = argument_name
) -> None:
    """Raise ValueError for options that a protocol does not read, and for images that it lacks.

    given: the options with a value. name: function from an option to its name in the message.

    >>> check_options("knn", ["data", "neighbors"])
    """
    require_known(protocol, PROTOCOLS, "The protocol")
    reads = PROTOCOLS[protocol].options
    for option in given:
        if option in reads:
            continue
        if option == "checkpoint":
            raise _untrainable(protocol, name(option))
        others = protocols_with(option)
        if not others:
            require_known(option, reads, "An option")
        raise ValueError(
            f"The protocol {protocol} does not read {name(option)}, which is for {', '.join(others)}."
        )
    if "data" in reads and "data" not in given:
        raise ValueError(
            f"The protocol {protocol} needs images. Name a data set or a folder with {name('data')}."
        )


def _untrainable(protocol: str, source: str) -> ValueError:
    return ValueError(
        f"The protocol {protocol} trains from a timm name or a model folder, got {source}. Name one."
    )
