"""The published results, Tables 2, 5, 6, 7 and 9: top-1 in per cent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

IMAGENET, REAL, CIFAR10, CIFAR100 = "ImageNet", "ImageNet ReaL", "CIFAR-10", "CIFAR-100"
PETS, FLOWERS = "Oxford-IIIT Pets", "Oxford Flowers-102"
FIVE = (IMAGENET, CIFAR10, CIFAR100, PETS, FLOWERS)
"""What "Average-5" of Fig. 5 and the averages of Table 7 are the mean of."""

VTAB = {
    "Natural": ("Caltech101", "CIFAR-100", "DTD", "Flowers102", "Pets", "Sun397", "SVHN"),
    "Specialized": ("Camelyon", "EuroSAT", "Resisc45", "Retinopathy"),
    "Structured": (
        "Clevr-Count", "Clevr-Dist", "DMLab", "dSpr-Loc", "dSpr-Ori", "KITTI-Dist", "sNORB-Azim", "sNORB-Elev",
    ),
}  # fmt: skip
"""The 19 tasks of VTAB-1k by group, in the order of Table 9."""


@dataclass(frozen=True)
class Published:
    """What the paper printed of one model.

    model: a name of `MODELS`. data: of pre-training. accuracy: by data set. spread: standard deviation over three
    runs of fine-tuning. epochs, exaflops, core_days (TPUv3) and optimizer of pre-training; each where it is printed.
    """

    model: str
    data: str
    accuracy: Mapping[str, float]
    spread: Mapping[str, float] = field(default_factory=dict)
    epochs: int | None = None
    exaflops: int | None = None
    core_days: int | None = None
    optimizer: str | None = None

    @property
    def average(self) -> float:
        """The mean over the five data sets of `FIVE`. Raises ValueError where one of them was not printed."""
        if missing := [name for name in FIVE if name not in self.accuracy]:
            raise ValueError(f"The average of {self.model} needs five data sets, but {', '.join(missing)} is missing.")
        return sum(self.accuracy[name] for name in FIVE) / len(FIVE)


def _table_2(model: str, data: str, core_days: int, *pairs: tuple[float, float]) -> Published:
    names = (IMAGENET, REAL, CIFAR10, CIFAR100, PETS, FLOWERS, "VTAB")
    found = dict(zip(names, pairs, strict=False))
    spread = {name: pair[1] for name, pair in found.items() if len(pair) > 1}
    return Published(model, data, {name: pair[0] for name, pair in found.items()}, spread, core_days=core_days)


# ImageNet at 512 pixels (ViT-L/16) and 518 (ViT-H/14), and a moving average of the weights; the others as in Table 4.
TABLE_2 = (
    _table_2("ViT-H/14", "JFT-300M", 2500, (88.55, 0.04), (90.72, 0.05), (99.50, 0.06), (94.55, 0.04), (97.56, 0.03),
             (99.68, 0.02), (77.63, 0.23)),
    _table_2("ViT-L/16", "JFT-300M", 680, (87.76, 0.03), (90.54, 0.03), (99.42, 0.03), (93.90, 0.05), (97.32, 0.11),
             (99.74, 0.00), (76.28, 0.46)),
    _table_2("ViT-L/16", "ImageNet-21k", 230, (85.30, 0.02), (88.62, 0.05), (99.15, 0.03), (93.25, 0.05),
             (94.67, 0.15), (99.61, 0.02), (72.72, 0.21)),
    _table_2("R152x4", "JFT-300M", 9900, (87.54, 0.02), (90.54,), (99.37, 0.06), (93.51, 0.08), (96.62, 0.23),
             (99.63, 0.03), (76.29, 1.70)),
    # The paper also prints 88.5, of the same network tuned at another resolution by Touvron et al. 2020.
    _table_2("EfficientNet-L2", "JFT-300M", 12_300, (88.4,), (90.55,)),
)  # fmt: skip

FIRST_SUBMISSION = (
    Published("ViT-H/14", "JFT-300M", {IMAGENET: 88.36, REAL: 90.77, "VTAB": 77.16}, {"VTAB": 0.29}),
    Published("ViT-L/16", "JFT-300M", {IMAGENET: 87.61, REAL: 90.24, "VTAB": 75.91},
              {IMAGENET: 0.03, REAL: 0.03, "VTAB": 0.18}),
)  # fmt: skip
"""Table 2 of the first submission (October 2020), where it differs from the final `TABLE_2`."""


def _table_5(data: str, rows: Mapping[str, tuple[float, ...]]) -> tuple[Published, ...]:
    columns = zip(*rows.values(), strict=True)
    return tuple(
        Published(model, data, dict(zip(rows, column, strict=True)))
        for model, column in zip(("ViT-B/16", "ViT-B/32", "ViT-L/16", "ViT-L/32", "ViT-H/14"), columns, strict=False)
    )


TABLE_5 = (
    *_table_5("ImageNet", {
        CIFAR10: (98.13, 97.77, 97.86, 97.94),
        CIFAR100: (87.13, 86.31, 86.35, 87.07),
        IMAGENET: (77.91, 73.38, 76.53, 71.16),
        REAL: (83.57, 79.56, 82.19, 77.83),
        FLOWERS: (89.49, 85.43, 89.66, 86.36),
        PETS: (93.81, 92.04, 93.64, 91.35),
    }),
    *_table_5("ImageNet-21k", {
        CIFAR10: (98.95, 98.79, 99.16, 99.13, 99.27),
        CIFAR100: (91.67, 91.97, 93.44, 93.04, 93.82),
        IMAGENET: (83.97, 81.28, 85.15, 80.99, 85.13),
        REAL: (88.35, 86.63, 88.40, 85.65, 88.70),
        FLOWERS: (99.38, 99.11, 99.61, 99.19, 99.51),
        PETS: (94.43, 93.02, 94.73, 93.09, 94.82),
    }),
    *_table_5("JFT-300M", {
        CIFAR10: (99.00, 98.61, 99.38, 99.19, 99.50),
        CIFAR100: (91.87, 90.49, 94.04, 92.52, 94.55),
        IMAGENET: (84.15, 80.73, 87.12, 84.37, 88.04),
        REAL: (88.85, 86.27, 89.99, 88.28, 90.33),
        FLOWERS: (99.56, 99.27, 99.56, 99.45, 99.68),
        PETS: (95.80, 93.40, 97.11, 95.83, 97.56),
    }),
)  # fmt: skip


def _table_6(model: str, epochs: int, exaflops: int, *values: float) -> Published:
    accuracy = dict(zip((IMAGENET, REAL, CIFAR10, CIFAR100, PETS, FLOWERS), values, strict=True))
    return Published(model, "JFT-300M", accuracy, epochs=epochs, exaflops=exaflops)


TABLE_6 = (
    _table_6("ViT-B/32", 7, 55, 80.73, 86.27, 98.61, 90.49, 93.40, 99.27),
    _table_6("ViT-B/16", 7, 224, 84.15, 88.85, 99.00, 91.87, 95.80, 99.56),
    _table_6("ViT-L/32", 7, 196, 84.37, 88.28, 99.19, 92.52, 95.83, 99.45),
    _table_6("ViT-L/16", 7, 783, 86.30, 89.43, 99.38, 93.46, 96.81, 99.66),
    _table_6("ViT-L/16", 14, 1567, 87.12, 89.99, 99.38, 94.04, 97.11, 99.56),
    _table_6("ViT-H/14", 14, 4262, 88.08, 90.36, 99.50, 94.71, 97.11, 99.71),
    _table_6("R50x1", 7, 50, 77.54, 84.56, 97.67, 86.07, 91.11, 94.26),
    _table_6("R50x2", 7, 199, 82.12, 87.94, 98.29, 89.20, 93.43, 97.02),
    _table_6("R101x1", 7, 96, 80.67, 87.07, 98.48, 89.17, 94.08, 95.95),
    _table_6("R152x1", 7, 141, 81.88, 87.96, 98.82, 90.22, 94.17, 96.94),
    _table_6("R152x2", 7, 563, 84.97, 89.69, 99.06, 92.05, 95.37, 98.62),
    _table_6("R152x2", 14, 1126, 85.56, 89.89, 99.24, 91.92, 95.75, 98.75),
    _table_6("R200x3", 14, 3306, 87.22, 90.15, 99.34, 93.53, 96.32, 99.04),
    _table_6("R50+ViT-B/32", 7, 106, 84.90, 89.15, 99.01, 92.24, 95.75, 99.46),
    _table_6("R50+ViT-B/16", 7, 274, 85.58, 89.65, 99.14, 92.63, 96.65, 99.40),
    _table_6("R50+ViT-L/32", 7, 246, 85.68, 89.04, 99.24, 92.93, 96.97, 99.43),
    _table_6("R50+ViT-L/16", 7, 859, 86.60, 89.72, 99.18, 93.64, 97.03, 99.40),  # half of 1668 would be 834
    _table_6("R50+ViT-L/16", 14, 1668, 87.12, 89.76, 99.31, 93.89, 97.36, 99.11),
)


def _table_7(model: str, optimizer: str, *values: float) -> Published:
    accuracy = dict(zip((*FIVE, "Average"), values, strict=True))
    return Published(model, "JFT-300M", accuracy, epochs=7, optimizer=optimizer)


TABLE_7 = (
    _table_7("R50x1", "Adam", 77.54, 97.67, 86.07, 91.11, 94.26, 89.33),
    _table_7("R50x1", "SGD", 78.24, 97.46, 85.17, 91.00, 92.06, 88.79),
    _table_7("R152x2", "Adam", 84.97, 99.06, 92.05, 95.37, 98.62, 94.01),
    _table_7("R152x2", "SGD", 84.37, 99.07, 91.06, 94.79, 99.32, 93.72),
)


def _table_9(model: str, data: str, *values: float) -> Published:
    names = (*(task for tasks in VTAB.values() for task in tasks), "VTAB")
    return Published(model, data, dict(zip(names, values, strict=True)))


TABLE_9 = (
    _table_9("ViT-H/14", "JFT-300M", 95.3, 85.5, 75.2, 99.7, 97.2, 65.0, 88.9, 83.3, 96.7, 91.4, 76.6, 91.7, 63.8,
             53.1, 79.4, 63.3, 84.5, 33.2, 51.2, 77.6),
    _table_9("ViT-L/16", "JFT-300M", 95.4, 81.9, 74.3, 99.7, 96.7, 63.5, 87.4, 83.6, 96.5, 89.7, 77.1, 86.4, 63.1,
             49.7, 74.5, 60.5, 82.2, 36.2, 51.1, 76.3),
    _table_9("ViT-L/16", "ImageNet-21k", 90.8, 84.1, 74.1, 99.3, 92.7, 61.0, 80.9, 82.5, 95.6, 85.2, 75.3, 70.3, 56.1,
             41.9, 74.7, 64.9, 79.9, 30.5, 41.7, 72.7),
)  # fmt: skip


def _bit(data: str, *values: float) -> Published:
    return Published("R152x4", data, dict(zip((*FIVE, "VTAB"), values, strict=True)))


BIT = (
    _bit("ImageNet", 81.30, 97.51, 86.21, 93.97, 89.89, 66.87),
    _bit("ImageNet-21k", 85.39, 98.91, 92.17, 94.46, 99.30, 70.64),
)
"""BiT-S and BiT-M, siblings of Table 2's BiT-L, in their own paper (Kolesnikov et al. 2020), by its fine-tuning."""

BIT_M_VTAB = {"VTAB": 73.51, "Natural": 80.77, "Specialized": 85.67, "Structured": 61.08}
"""The public BiT-M R152x4 by the groups of VTAB, as its authors' code has it."""


def groups(accuracy: Mapping[str, float]) -> dict[str, float]:
    """Means over the tasks of VTAB's three groups and, as "VTAB", over all 19. Raises ValueError if a task is missing.

    accuracy: by task, named as in `VTAB`.
    """
    tasks = [task for names in VTAB.values() for task in names]
    if missing := [task for task in tasks if task not in accuracy]:
        raise ValueError(f"The groups of VTAB need its 19 tasks, but there is no accuracy of {', '.join(missing)}.")
    means = {group: sum(accuracy[task] for task in names) / len(names) for group, names in VTAB.items()}
    return {"VTAB": sum(accuracy[task] for task in tasks) / len(tasks), **means}


def results(model: str) -> dict[str, tuple[Published, ...]]:
    """What the paper printed of a model of `MODELS`, by table: {"Table 5": (…), …}."""
    tables = {"Table 2": TABLE_2, "Table 5": TABLE_5, "Table 6": TABLE_6, "Table 7": TABLE_7, "Table 9": TABLE_9}
    found = {name: tuple(row for row in table if row.model == model) for name, table in tables.items()}
    return {name: rows for name, rows in found.items() if rows}
