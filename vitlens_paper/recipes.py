"""The paper's recipes, with a reason for each number that it lacks.

Pre-training and fine-tuning of its Tables 3 and 4, and learning without labels, its B.1.2, on small images.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vitlens_paper import CLASSES, TABLE_1, TABLE_3, TABLE_4, FineTuning, Pretraining

if TYPE_CHECKING:
    from vitlens.train import Recipe

# Normalization of pixels to [−1, 1], as in the official code.
GRAY = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
VARIANTS = {variant.name[4]: variant for variant in TABLE_1}  # by the letter B, L or H
SHORT = {"JFT-300M": "jft", "ImageNet-21k": "imagenet21k", "ImageNet": "imagenet"}
# Epochs of a row of Table 4 on its first data set, for about ten validations a run.
EPOCHS = {"ImageNet": 8, "CIFAR-100": 100, "Oxford-IIIT Pets": 71, "VTAB": 2500}


def pretraining(row: Pretraining, model: str) -> Recipe:
    """The recipe of a row of Table 3 for a model such as ViT-B/16, with the smaller of two numbers of epochs."""
    # inside, because vitlens.train loads this file when it is imported
    from vitlens.data.augment import Augment
    from vitlens.train.settings import Recipe

    variant, patch = VARIANTS[model[4]], int(model.partition("/")[2])
    return Recipe(
        name=f"{model.lower().replace('/', '')}-{SHORT[row.data]}",
        architecture=variant.timm, image_size=224, patch_size=patch,
        width=variant.width, depth=variant.layers, heads=variant.heads,
        num_classes=CLASSES[row.data],
        head="mlp", head_bias=-10.0,  # published by the authors for ImageNet-21k
        epochs=row.epochs[0], batch_size=4096,
        optimizer="adamw",  # decoupled decay that follows the schedule (Steiner et al. 2021)
        lr=row.lr, end_lr=1e-5,  # end: published by the authors
        weight_decay=row.weight_decay, betas=(0.9, 0.999),
        warmup=0.0, warmup_steps=10_000, schedule=row.schedule,
        clip=1.0 if row.data == "ImageNet" else 0.0,
        loss="sigmoid",  # published for ImageNet-21k and JFT; for ImageNet as in Scenic's re-run
        dropout=row.dropout,
        augment=Augment(flip=0.5, scale=(0.05, 1.0), ratio=(3 / 4, 4 / 3)),  # published by the authors
        **GRAY,
    )  # fmt: skip


def fine_tuning(row: FineTuning, lr: float) -> Recipe:
    """The recipe of a row of Table 4 with one of its learning rates."""
    from vitlens.data.augment import Augment
    from vitlens.train.settings import Recipe

    return Recipe(
        name=f"finetune-{row.data[0].split()[-1].lower().replace('-100', '')}",
        continues=True,
        image_size=384, resize=448, squash=True,  # as in BiT, which the paper follows
        epochs=0, steps=row.steps, batch_size=512,
        optimizer="sgd", momentum=0.9, lr=lr, weight_decay=0.0,
        warmup=0.0, warmup_steps=100 if row.steps < 1000 else 500,  # in the official code
        schedule="cosine", clip=1.0,
        augment=Augment(flip=0.5),
        evaluate_every=EPOCHS[row.data[0]] // 10 or 1,
        average=0.9999 if row.data == ("ImageNet",) else 0.0,  # Table 2
        **GRAY,
    )  # fmt: skip


def masked_patches() -> Recipe:
    """The recipe of B.1.2 for images of 32 px and one core of a CPU."""
    from vitlens.data.augment import Augment
    from vitlens.train.settings import Recipe

    return Recipe(
        name="masked-patches",
        objective="mean-color", masked=0.5,  # B.1.2
        image_size=32, patch_size=4,  # 8×8 patches
        width=96, depth=6, heads=3,  # 0.7 M parameters
        model_kwargs={"readout": "mean"},  # nothing trains a class token without labels
        epochs=40, batch_size=128,
        # B.1.2 has Adam. In 200 steps of 128 images at 24 px Muon comes to a loss of 3.03, AdamW to 3.26.
        optimizer="muon", lr=2e-3, muon_lr=4e-3,
        weight_decay=0.05, betas=(0.9, 0.95),  # of He et al.; B.1.2 has no weight decay in print
        warmup=0.05, schedule="cosine",  # B.1.2 rises for 1 %, of a million steps
        augment=Augment(flip=0.5, scale=(0.35, 1.0), ratio=(3 / 4, 4 / 3)),  # B.1.2; the images are already crops
        evaluate_every=5,
    )  # fmt: skip


def masked_tuning() -> Recipe:
    """The recipe for fine-tuning a model of `masked_patches` with few labels."""
    from vitlens.data.augment import Augment
    from vitlens.train.settings import Recipe

    return Recipe(
        name="masked-tuning", continues=True,
        image_size=32, epochs=40, batch_size=64,
        optimizer="muon", lr=2e-3, muon_lr=4e-3,  # of masked-patches; best for random weights, too
        weight_decay=0.05, betas=(0.9, 0.99), warmup=0.1, schedule="cosine",
        label_smoothing=0.1,  # He et al.
        augment=Augment(flip=0.5, scale=(0.35, 1.0), ratio=(3 / 4, 4 / 3)),  # of masked-patches
        evaluate_every=5,
    )  # fmt: skip


def paper_recipes() -> Iterator[Recipe]:
    """All recipes of the paper.

    For every ViT of Table 3, for each row of Table 4 with learning rate 0.01, which all grids share, and for B.1.2.
    """
    every = [f"ViT-{size}" for size in ("B/16", "B/32", "L/16", "L/32", "H/14")]
    for row in TABLE_3:
        for model in every if row.models == ("ViT-*",) else row.models:
            if model in every:
                yield pretraining(row, model)
    for row in TABLE_4:
        yield fine_tuning(row, 0.01)
    yield masked_patches()
    yield masked_tuning()
