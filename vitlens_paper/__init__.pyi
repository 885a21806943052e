from .models import COSTS, MODELS, Cost, Model, Weights, build, exaflops, find, origin
from .result_tables import row_of, table_2, table_5, table_9
from .scaling import few_shot, pretraining_size, transfer, vtab
from .tables import (
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
