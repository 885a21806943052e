from .classifiers import few_shot, linear_probe, nearest, support, supports
from .options import PROTOCOLS, Evaluation
from .protocols import evaluate
from .reading import features
from .records import Record, read_results, table, write

__all__ = [
    "Evaluation",
    "PROTOCOLS",
    "Record",
    "evaluate",
    "features",
    "few_shot",
    "linear_probe",
    "nearest",
    "read_results",
    "support",
    "supports",
    "table",
    "write",
]
