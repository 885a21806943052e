"""How the transformers are made and trained: Tables 1, 3 and 4, and the sets of images for pre-training."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Variant:
    """One row of Table 1, and the timm model built like it.

    width, mlp: hidden dimensions. parameters: in millions, as printed. timm: name of the model with 224-pixel images.
    """

    name: str
    layers: int
    width: int
    mlp: int
    heads: int
    parameters: int
    timm: str

    def tokens(self, patch: int, image: int = 224) -> int:
        """Length of the sequence for square images, class token included; a rest smaller than a patch is cut."""
        return (image // patch) ** 2 + 1


TABLE_1 = (
    Variant("ViT-Base", 12, 768, 3072, 12, 86, "vit_base_patch16_224"),
    Variant("ViT-Large", 24, 1024, 4096, 16, 307, "vit_large_patch16_224"),
    Variant("ViT-Huge", 32, 1280, 5120, 16, 632, "vit_huge_patch14_224"),
)


IMAGES = {"JFT-300M": 303_000_000, "ImageNet-21k": 14_000_000, "ImageNet": 1_300_000}
"""Sizes of the sets for pre-training, rounded as in the paper."""

CLASSES = {"JFT-300M": 18_291, "ImageNet-21k": 21_843, "ImageNet": 1_000}
"""Their classes: JFT's from BiT's paper, ImageNet-21k's from the official code."""


@dataclass(frozen=True)
class Pretraining:
    """One row of Table 3. Everywhere: batch 4,096, Adam with β = (0.9, 0.999), 10,000 steps of warm-up, 224 pixels.

    epochs: one number, or the two that the row gives. lr: peak. schedule: of the learning rate after warm-up.
    """

    models: tuple[str, ...]
    data: str
    epochs: tuple[int, ...]
    lr: float
    schedule: str
    weight_decay: float
    dropout: float


TABLE_3 = (
    Pretraining(("ViT-B/16", "ViT-B/32"), "JFT-300M", (7,), 8e-4, "linear", 0.1, 0.0),
    Pretraining(("ViT-L/32",), "JFT-300M", (7,), 6e-4, "linear", 0.1, 0.0),
    Pretraining(("ViT-L/16",), "JFT-300M", (7, 14), 4e-4, "linear", 0.1, 0.0),
    Pretraining(("ViT-H/14",), "JFT-300M", (14,), 3e-4, "linear", 0.1, 0.0),
    Pretraining(("R50x1", "R50x2"), "JFT-300M", (7,), 1e-3, "linear", 0.1, 0.0),
    Pretraining(("R101x1",), "JFT-300M", (7,), 8e-4, "linear", 0.1, 0.0),
    Pretraining(("R152x1", "R152x2"), "JFT-300M", (7,), 6e-4, "linear", 0.1, 0.0),
    Pretraining(("R50+ViT-B/16", "R50+ViT-B/32"), "JFT-300M", (7,), 8e-4, "linear", 0.1, 0.0),
    Pretraining(("R50+ViT-L/32",), "JFT-300M", (7,), 2e-4, "linear", 0.1, 0.0),
    Pretraining(("R50+ViT-L/16",), "JFT-300M", (7, 14), 4e-4, "linear", 0.1, 0.0),
    Pretraining(("ViT-B/16", "ViT-B/32"), "ImageNet-21k", (90,), 1e-3, "linear", 0.03, 0.1),
    Pretraining(("ViT-L/16", "ViT-L/32"), "ImageNet-21k", (30, 90), 1e-3, "linear", 0.03, 0.1),
    Pretraining(("ViT-*",), "ImageNet", (300,), 3e-3, "cosine", 0.3, 0.1),
)


@dataclass(frozen=True)
class FineTuning:
    """One row of Table 4. Everywhere: SGD with momentum 0.9, batch 512, cosine decay, no weight decay, 384 pixels.

    lr: the peaks that were tried, the best one on ``held_out`` (a share of the training images, or a number) kept.
    """

    data: tuple[str, ...]
    steps: int
    lr: tuple[float, ...]
    held_out: float


TABLE_4 = (
    FineTuning(("ImageNet",), 20_000, (0.003, 0.01, 0.03, 0.06), 0.01),
    FineTuning(("CIFAR-100", "CIFAR-10"), 10_000, (0.001, 0.003, 0.01, 0.03), 0.02),
    FineTuning(("Oxford-IIIT Pets", "Oxford Flowers-102"), 500, (0.001, 0.003, 0.01, 0.03), 0.1),
    FineTuning(("VTAB",), 2_500, (0.01,), 200),
)
