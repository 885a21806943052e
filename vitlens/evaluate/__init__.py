"""Evaluation by the protocols of the paper: accuracy, few-shot, nearest neighbors, probe, fine-tuning, VTAB-1k.

`evaluate` measures a model by a protocol of `PROTOCOLS` and yields `Record`s, as `vitlens evaluate` does. Its parts are
public too: outputs of a model for every image (`features`, `read`), classifiers on features (`few_shot`, `nearest`,
`linear_probe`), counts (`top_k`, `real`) and their confidence intervals.

Names are imported when they are first used, so that `vitlens evaluate --help` does not wait for PyTorch.
"""

from collections.abc import Callable
from dataclasses import dataclass

from vitlens import lazily

MODULES = {
    "classes": ("class_numbers", "matched"),
    "classifiers": ("few_shot", "least_squares", "linear_probe", "nearest", "support", "supports"),
    "protocols": ("Evaluation", "command_of", "evaluate", "fine_tuned", "group_means", "recipe_of"),
    "reading": ("Reading", "features", "named_classes", "opened", "read"),
    "scores": ("Score", "another_order", "mean_of", "of_seeds", "over_seeds", "proportion", "real", "real_labels",
               "rematched", "student", "top_k", "validation_numbers"),
}  # fmt: skip
RECORDS = {
    name: f"vitlens.paper.records:{there}"
    for name, there in {"Record": "Record", "read_results": "read", "table": "table", "write": "write"}.items()
}
NAMES = RECORDS | {name: module for module, names in MODULES.items() for name in names}


@dataclass(frozen=True)
class Protocol:
    """A way to measure a model.

    title: what it measures, in words. reads: the fields of `Evaluation` that it reads; others are refused. function:
    from an `Evaluation` to an iterator of `Record`s; by default the function of the same name in `protocols`.
    """

    name: str
    title: str
    reads: tuple[str, ...]
    function: Callable | None = None


PROTOCOLS: dict[str, Protocol] = {}
"""All protocols by name, in the order of help texts."""


def register(protocol: Protocol) -> Protocol:
    """Add a protocol, or replace the one of the same name; returns it."""
    PROTOCOLS[protocol.name] = protocol
    return protocol


register(Protocol("top1", "top-1, top-5 and ReaL accuracy as it is", ("data",)))
register(Protocol("fewshot", "least squares on few images of each class", ("data", "shots", "seeds")))
register(Protocol("knn", "nearest neighbors", ("data", "neighbors")))
register(Protocol("probe", "logistic regression on features", ("data",)))
register(Protocol("finetune", "top-1 after fine-tuning", ("data", "recipe", "settings", "seeds")))
register(Protocol("vtab", "fine-tuning on the 19 tasks of VTAB-1k", ("tasks", "recipe", "settings", "seeds")))

__all__ = ["PROTOCOLS", "Protocol", "register", *NAMES]
__getattr__, __dir__ = lazily(__name__, NAMES)
