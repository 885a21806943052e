"""The data sets that the paper transfers to, by name, as data that can be listed and shown.

CIFAR, Pets, Flowers and DTD are torchvision's. Fifteen tasks of VTAB-1k are read from the copies that CLIP benchmark
keeps on the Hugging Face hub, `clip-benchmark/wds_vtab-…`, made with VTAB's own code, so their splits have its sizes.
dSprites keeps its 32 positions and 40 orientations there; VTAB puts them into 16 bins each. Of Sun397 that owner has
only the test images, so it is `dpdl-benchmark/sun397`, with the splits of TensorFlow Datasets, which VTAB takes.
ImageNet cannot be fetched by a program: its two archives and that of its development kit, or folders `train/` and
`val/` of its classes, must be there.

ObjectNet is left out: only its authors' archive says which of its classes are ImageNet's, and labels are not guessed.
With that archive at hand, folders renamed to WordNet ids are scored like any other, one class of ImageNet each.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Task:
    """A data set to measure on, and what may be done to its training images (for VTAB, as BiT's paper says)."""

    name: str
    group: str
    """"", or of VTAB-1k: "natural", "specialized" or "structured"."""
    classes: int
    source: str
    """What `load` reads it from."""
    recipe: str
    """The recipe it is fine-tuned by: the row of the paper's Table 4."""
    flip: bool = True
    """Whether a mirrored image keeps its label."""
    crop: bool = True
    """Whether a random crop keeps the label of the image."""
    raw_classes: int = 0
    """Classes of the source where `classes` bins of equal width are made of them; 0 where they are the same."""


def _vtab(group: str, name: str, classes: int, source: str = "", **more) -> Task:
    return Task(
        f"vtab/{name}", group, classes, source or f"wds/clip-benchmark/wds_vtab-{more.pop('copy', name)}",
        "finetune-vtab", **more,
    )  # fmt: skip


# fmt: off
_ALL = (
    Task("imagenet", "", 1000, "torch/imagenet", "finetune-imagenet"),
    Task("imagenet-real", "", 1000, "torch/imagenet", "finetune-imagenet"),
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
