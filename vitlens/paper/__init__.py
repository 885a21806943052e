"""The paper as data: "An Image is Worth 16x16 Words", Dosovitskiy et al., ICLR 2021, arXiv 2010.11929v2.

`MODELS` are its models, which `build` builds through timm. `TABLE_1`, `TABLE_3` and `TABLE_4` hold architectures and
training settings, `COSTS` parameters and FLOPs, and the other tables results.
"""

from vitlens.paper.models import COSTS, MODELS, Cost, Model, Weights, build, exaflops, find, origin
from vitlens.paper.records import row_of, table_2, table_5, table_9
from vitlens.paper.tables import (
    BIT,
    BIT_M_VTAB,
    CLASSES,
    FIRST_SUBMISSION,
    FIVE,
    IMAGES,
    TABLE_1,
    TABLE_2,
    TABLE_3,
    TABLE_4,
    TABLE_5,
    TABLE_6,
    TABLE_7,
    TABLE_8,
    TABLE_9,
    VTAB,
    FineTuning,
    Pretraining,
    groups,
)

__all__ = [
    "BIT", "BIT_M_VTAB", "CLASSES", "COSTS", "FIRST_SUBMISSION", "FIVE", "IMAGES", "MODELS", "TABLE_1", "TABLE_2",
    "TABLE_3", "TABLE_4", "TABLE_5", "TABLE_6", "TABLE_7", "TABLE_8", "TABLE_9", "VTAB", "Cost", "FineTuning", "Model",
    "Pretraining", "Weights", "build", "exaflops", "find", "groups", "origin", "row_of", "table_2",
    "table_5", "table_9",
]  # fmt: skip
__dir__ = __all__.copy
