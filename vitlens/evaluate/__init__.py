"""Evaluation by the protocols of the paper: accuracy, few-shot, nearest neighbors, probe, fine-tuning, VTAB-1k.

`evaluate` measures a model by a protocol of `PROTOCOLS` and yields `Record`s, as `vitlens evaluate` does. Its parts are
public too: outputs of a model for every image (`features`, `read`), classifiers on features (`few_shot`, `nearest`,
`linear_probe`), accuracies (`top_k`, `real`) and their confidence intervals.

Names are imported on first use, so that `vitlens evaluate --help` does not load PyTorch.
"""

from vitlens import lazily

PROTOCOLS = {
    "top1": ("data",),
    "fewshot": ("data", "shots", "seeds"),
    "knn": ("data", "neighbors"),
    "probe": ("data",),
    "finetune": ("data", "recipe", "settings", "seeds"),
    "vtab": ("tasks", "recipe", "settings", "seeds"),
}
"""Fields of `Evaluation` that each protocol reads, by its name, which is a function in `evaluate.protocols`."""

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

__all__ = ["PROTOCOLS", *NAMES]
__getattr__, __dir__ = lazily(__name__, NAMES)
