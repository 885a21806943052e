"""The protocols by name, readable without PyTorch; `register` adds one."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Protocol:
    """A way to measure a model."""

    name: str
    title: str
    """What it measures, for people."""
    answers: Callable | str
    """Function from a `Question` to an iterator of `Record`s, or its place as "module:function", imported when used."""
    reads: tuple[str, ...]
    """The settings that it reads, by their command-line options; others are refused."""

    def __call__(self, question):
        """The records that answer a question, each as soon as it is known."""
        function = pkgutil.resolve_name(self.answers) if isinstance(self.answers, str) else self.answers
        return function(question)


PROTOCOLS: dict[str, Protocol] = {}
"""All protocols by name, in the order of help texts."""

OPTIONS = {"data": "data", "shots": "shots", "neighbors": "neighbors", "tasks": "tasks", "recipe": "recipe",
           "set": "overrides", "seeds": "seeds"}  # fmt: skip
"""Fields of `Question` that only some protocols read, by their command-line options."""


def register(protocol: Protocol) -> Protocol:
    """Add a protocol, or replace the one of the same name; returns it."""
    PROTOCOLS[protocol.name] = protocol
    return protocol


HERE = "vitlens.evaluate.protocols:"
register(Protocol("top1", "top-1, top-5 and ReaL accuracy as it is", f"{HERE}top1", ("data",)))
register(Protocol("fewshot", "least squares on few images of each class", f"{HERE}fewshot", ("data", "shots", "seeds")))
register(Protocol("knn", "nearest neighbors", f"{HERE}knn", ("data", "neighbors")))
register(Protocol("probe", "logistic regression on features", f"{HERE}probe", ("data",)))
register(Protocol("finetune", "top-1 after fine-tuning", f"{HERE}finetune", ("data", "recipe", "set", "seeds")))
register(Protocol("vtab", "fine-tuning on the 19 tasks of VTAB-1k", f"{HERE}vtab", ("tasks", "recipe", "set", "seeds")))
