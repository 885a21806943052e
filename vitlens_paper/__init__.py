"""The paper as data: "An Image is Worth 16x16 Words", Dosovitskiy et al., ICLR 2021, arXiv 2010.11929v2.

`MODELS` are its models, which `build` builds through timm. `TABLE_1`, `TABLE_3` and `TABLE_4` hold architectures and
training settings, `COSTS` parameters and FLOPs, and the other tables results.
"""

from vitlens import lazily

PLACES = {
    "models": ("COSTS", "MODELS", "Cost", "Model", "Weights", "build", "exaflops", "find", "origin"),
    "records": ("row_of", "table_2", "table_5", "table_9"),
    "scaling": ("few_shot", "pretraining_size", "transfer", "vtab"),
    "tables": (
        "BIT", "BIT_M_VTAB", "CLASSES", "FIRST_SUBMISSION", "FIVE", "IMAGES", "TABLE_1", "TABLE_2", "TABLE_3",
        "TABLE_4", "TABLE_5", "TABLE_6", "TABLE_7", "TABLE_8", "TABLE_9", "VTAB", "FineTuning", "Pretraining", "groups",
    ),
}  # fmt: skip
NAMES = {name: module for module, names in PLACES.items() for name in names}

__all__ = [*NAMES]
__getattr__, __dir__ = lazily(__name__, NAMES)
