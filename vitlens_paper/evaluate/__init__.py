"""Evaluation by the protocols of the paper: accuracy, few-shot, nearest neighbors, probe, fine-tuning, VTAB-1k.

`evaluate` measures a model by a protocol of `PROTOCOLS` and yields `Record`s, as `vitlens evaluate` does. Its parts are
public too: `features` of images, classifiers on features (`few_shot`, `nearest`, `linear_probe`) and confidence
intervals (`proportion`, `of_seeds`, `student`).

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
    "classifiers": ("few_shot", "linear_probe", "nearest", "support", "supports"),
    "protocols": ("Evaluation", "evaluate"),
    "reading": ("features",),
}
SCORES = {name: f"vitlens.scores:{name}" for name in ("Score", "of_seeds", "proportion", "student")}
RECORDS = {
    name: f"vitlens_paper.records:{there}"
    for name, there in {"Record": "Record", "read_results": "read", "table": "table", "write": "write"}.items()
}
NAMES = RECORDS | SCORES | {name: module for module, names in MODULES.items() for name in names}

__all__ = ["PROTOCOLS", *NAMES]
__getattr__, __dir__ = lazily(__name__, NAMES)
