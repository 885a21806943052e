"""What a model is worth by the protocols of the paper: accuracy, few-shot, nearest neighbors, probe, fine-tuning.

`evaluate` measures a model by a protocol of `PROTOCOLS` and yields `Record`s, as `vitlens evaluate` does. Below it lie
the parts: outputs of a model for every image (`features`, `read`), classifiers on features (`few_shot`, `nearest`,
`linear_probe`), counts (`top_k`, `real`) and their confidence intervals. `vitlens.ablation`, a module
here, says what single heads do.

Names are imported when they are first used, so that `vitlens evaluate --help` does not wait for PyTorch.
"""

from vitlens import lazily

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
RECORDS = {
    name: f"vitlens.paper.records:{there}"
    for name, there in {"Record": "Record", "read_results": "read", "table": "table", "write": "write"}.items()
}
NAMES = RECORDS | {name: module for module, names in MODULES.items() for name in names}

__all__ = list(NAMES)
__getattr__, __dir__ = lazily(__name__, NAMES)
