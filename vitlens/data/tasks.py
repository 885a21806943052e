"""Data sets of the paper's transfer experiments, by name.

CIFAR, Pets, Flowers and DTD are torchvision's. Fifteen tasks of VTAB-1k are read from the copies that CLIP benchmark
keeps on the Hugging Face hub, `clip-benchmark/wds_vtab-…`, made with VTAB's own code, so their splits have its sizes.
These copies keep the 32 positions and 40 orientations of dSprites, which VTAB puts into 16 bins each. They have only
the test images of Sun397, so Sun397 is `dpdl-benchmark/sun397`, with the splits of TensorFlow Datasets, as in VTAB.
ImageNet cannot be downloaded by a program. Its two archives and the archive of its development kit must be present, or
folders `train/` and `val/` of its classes.

ObjectNet is left out, because only its authors' archive maps its classes to ImageNet's, and labels are not guessed.
With that archive, folders renamed to WordNet ids are scored like any others, one class of ImageNet each.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Task:
    """A data set of the evaluation, with the augmentation of its training images (for VTAB, as in BiT's paper)."""

    name: str
    group: str
    """"", or of VTAB-1k: "natural", "specialized" or "structured"."""
    classes: int
    source: str
    """The source for `load`."""
    recipe: str
    """The recipe of its fine-tuning, a row of the paper's Table 4."""
    flip: bool = True
    """True if a mirrored image keeps its label."""
    crop: bool = True
    """True if a random crop keeps the label of the image."""
    raw_classes: int = 0
    """Number of classes of the source, put into `classes` bins of equal width, or 0 if both are the same."""


def _vtab(group: str, name: str, classes: int, source: str = "", **more) -> Task:
    return Task(
        f"vtab/{name}", group, classes, source or f"wds/clip-benchmark/wds_vtab-{more.pop('copy', name)}",
        "finetune-vtab", **more,
    )  # fmt: skip


# fmt: off
_ALL = (
    Task("imagenet", "", 1000, "torch/imagenet", "finetune-imagenet"),
    Task("cifar10", "", 10, "torch/cifar10", "finetune-cifar"),
    Task("cifar100", "", 100, "torch/cifar100", "finetune-cifar"),
    Task("pets", "", 37, "torch/oxford_iiit_pet", "finetune-pets"),
    Task("flowers102", "", 102, "torch/flowers102", "finetune-pets"),
    _vtab("natural", "caltech101", 102),
    _vtab("natural", "cifar100", 100),
    _vtab("natural", "dtd", 47, "torch/dtd"),
    _vtab("natural", "flowers102", 102, "torch/flowers102"),
    _vtab("natural", "pets", 37),
    _vtab("natural", "sun397", 397, "hfds/dpdl-benchmark/sun397"),
    _vtab("natural", "svhn", 10),
    _vtab("specialized", "pcam", 2),
    _vtab("specialized", "eurosat", 10),
    _vtab("specialized", "resisc45", 45),
    _vtab("specialized", "retinopathy", 5, copy="diabetic_retinopathy"),
    _vtab("structured", "clevr-count", 8, copy="clevr_count_all", crop=False),
    _vtab("structured", "clevr-distance", 6, copy="clevr_closest_object_distance", crop=False),
    _vtab("structured", "dmlab", 6, crop=False),
    _vtab("structured", "dsprites-location", 16, copy="dsprites_label_x_position", raw_classes=32, flip=False,
          crop=False),
    _vtab("structured", "dsprites-orientation", 16, copy="dsprites_label_orientation", raw_classes=40, flip=False),
    _vtab("structured", "kitti-distance", 4, copy="kitti_closest_vehicle_distance", crop=False),
    _vtab("structured", "smallnorb-azimuth", 18, copy="smallnorb_label_azimuth", flip=False),
    _vtab("structured", "smallnorb-elevation", 9, copy="smallnorb_label_elevation"),
)
# fmt: on
TASKS = MappingProxyType({task.name: task for task in _ALL})
VTAB = tuple(task for task in _ALL if task.group)
