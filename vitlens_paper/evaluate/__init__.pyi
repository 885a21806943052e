from .classifiers import few_shot, linear_probe, nearest, support, supports
from .protocols import Evaluation, evaluate
from .reading import features
from .records import Record, read_results, table, write

PROTOCOLS: dict[str, tuple[str, ...]]
