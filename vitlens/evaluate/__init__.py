"""What a model is worth by the protocols of the paper: accuracy, few-shot, nearest neighbors, probe, fine-tuning.

`evaluate` measures a model by a protocol of `PROTOCOLS` and yields `Record`s, as `vitlens evaluate` does. Below it lie
the parts: outputs of a model for every image (`features`, `read`), classifiers on features (`few_shot`, `nearest`,
`linear_probe`), counts (`top_k`, `real`) and their confidence intervals.

Names are imported when they are first used, so that `vitlens evaluate --help` does not wait for PyTorch.
"""

import importlib

MODULES = {
    "classes": ("class_numbers", "matched"),
    "classifiers": ("few_shot", "least_squares", "linear_probe", "nearest", "support", "supports"),
    "protocols": ("evaluate",),
    "question": ("Question", "command_of"),
    "reading": ("Reading", "features", "named_classes", "opened", "read"),
    "registry": ("PROTOCOLS", "Protocol", "register"),
    "scores": ("Score", "another_order", "mean_of", "of_seeds", "over_seeds", "proportion", "real", "real_labels",
               "rematched", "student", "top_k", "validation_numbers"),
    "tuning": ("fine_tuned", "group_means", "recipe_of"),
}  # fmt: skip
RECORDS = {"Record": "Record", "read_results": "read", "table": "table", "write": "write"}
"""From `vitlens.paper.records`, by their names here."""

__all__ = [*RECORDS, *(name for names in MODULES.values() for name in names)]


def __getattr__(name: str):
    if name in RECORDS:
        return getattr(importlib.import_module("vitlens.paper.records"), RECORDS[name])
    for module, names in MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"vitlens.evaluate.{module}"), name)
    raise AttributeError(f"module 'vitlens.evaluate' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
