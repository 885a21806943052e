"""What a model is worth, by the protocols of the paper: accuracy, few-shot, nearest neighbors, probe, fine-tuning.

``evaluate`` answers a ``Question`` with ``Record``s, as ``vitlens evaluate`` does. Below it lie the parts: what a model
says of every image (``features``, ``read``), classifiers on features (``few_shot``, ``nearest``, ``linear_probe``),
counts (``top_k``, ``real``) and their confidence intervals.
"""

from vitlens.evaluate.accuracy import another_order, real, real_labels, rematched, top_k, validation_numbers
from vitlens.evaluate.classes import class_numbers, matched
from vitlens.evaluate.fewshot import few_shot, least_squares, supports
from vitlens.evaluate.intervals import Score, mean_of, of_seeds, over_seeds, proportion, student
from vitlens.evaluate.knn import nearest
from vitlens.evaluate.probe import linear_probe
from vitlens.evaluate.protocols import Question, command_of, evaluate
from vitlens.evaluate.reading import Reading, features, named_classes, opened, read
from vitlens.evaluate.tuning import fine_tuned, group_means, recipe_of
from vitlens.paper.records import Record, table, write
from vitlens.paper.records import read as read_results

__all__ = [
    "Question", "Reading", "Record", "Score", "another_order", "class_numbers", "command_of", "evaluate", "features",
    "few_shot", "fine_tuned", "group_means", "least_squares", "linear_probe", "matched", "mean_of", "named_classes",
    "nearest", "opened", "of_seeds", "over_seeds", "proportion", "read", "read_results", "real", "real_labels",
    "recipe_of", "rematched", "student", "supports", "table", "top_k", "validation_numbers", "write",
]  # fmt: skip
