"""Studies by name, each a row of `STUDIES`; `register` adds one.

Numbers stand here with their reasons, so that the name of a study says what was done.
"""

from __future__ import annotations

from dataclasses import replace

from vitlens.data.augment import Augment
from vitlens.paper.studies.grid import Study
from vitlens.paper.studies.networks import Network, Variant
from vitlens.train.recipes import Recipe, recipe

STUDIES: dict[str, Study] = {}
"""All studies by name."""


def register(study: Study) -> Study:
    """Add a study, or replace the one of the same name; returns it."""
    STUDIES[study.name] = study
    return study


# fmt: off
STANDARD = dict(
    # Table 3 of the paper, for JFT-300M: Adam, weight decay 0.1, linear decay of the rate, no dropout. One rate for all
    # models, that of its R50x1; its ViT-B has 8e-4.
    optimizer="adamw", lr=1e-3, weight_decay=0.1, schedule="linear", warmup=0.05, clip=1.0,
    # The paper's crops and flips, and nothing else that could stand in for data; 64-px images are crops already.
    augment=Augment(flip=0.5, scale=(0.35, 1.0), ratio=(3 / 4, 4 / 3)),
)
register(Study(
    name="data-size", title="Fig. 3 and 4 in miniature, on all of Tiny-ImageNet: 48 trainings",
    networks=(
        Network("ViT-Ti/8", patch=8, width=192, depth=12, heads=3),  # 0.73 GFLOPs
        Network("ViT-S/8", patch=8, width=384, depth=12, heads=6),  # 2.8, to see what size gains
        # Layers of ViT-Ti on three stages that reduce by 8, as the patches do: the same 8×8 tokens, 0.73 GFLOPs.
        Network("R10+ViT/8", width=192, depth=9, heads=3, stages=(1, 1, 1), channels=128),
        Network("R23x0.75", stages=(2, 2, 2, 1), channels=192),  # 0.75: the paper compares at equal compute
    ),
    sizes=(5_000, 10_000, 30_000, 100_000),  # apart as the paper's 9, 30, 90 and 303 million are, about
    classes=200,
    # 3,000 steps of 512: 15 epochs of all images, 307 of the fewest. All trainings of a model cost the same.
    recipe=Recipe(
        name="data-size", image_size=64, batch_size=512, epochs=0, steps=3000, log_every=50, **STANDARD
    ),
))
register(replace(
    STUDIES["data-size"], name="data-size-epochs", equal="epochs",
    title="the same in 15 epochs each, so that fewer images also mean fewer steps",
))
# The same on one core. In a pilot of 1,500 steps on 25,000 images with one seed, AdamW brought the ViT to 20.1 %, the
# hybrid to 17.0 and the ResNet to 24.7 (better of two rates each), and Muon to 31.4, 25.2 and 26.5.
register(Study(
    name="data-size-cpu", title="the same question in 80 minutes of one core, with fifty classes at 24 px",
    networks=(
        Network("ViT, patch 4", patch=4, width=64, depth=4, heads=2),  # 16.2 MFLOPs
        Network("hybrid", width=64, depth=3, heads=2, stages=(1, 1), channels=64),  # 16.7, with the same 6×6 tokens
        Network("ResNet", stages=(2, 2, 2, 2), channels=64),  # 15.7: the paper compares at equal compute
    ),
    sizes=(2_500, 7_500, 25_000),  # a tenth, three tenths, all there are of fifty classes
    classes=50,
    recipe=Recipe(
        name="data-size-cpu", image_size=24, batch_size=64, epochs=0, steps=2500, log_every=100,  # 6.4 epochs of all
        precision="fp32",  # as fast as bf16 in models this narrow, and the same on every machine
        **STANDARD | dict(optimizer="muon", muon_lr=3e-3),
    ),
))
# There, 2,500 steps are 21 epochs of 7,500 images; so those are left out here.
register(replace(
    STUDIES["data-size-cpu"], name="data-size-cpu-epochs", equal="epochs", sizes=(2_500, 25_000),
    title="the same for 21 epochs, with the fewest and the most images, in 2.5 hours of one core",
    recipe=replace(STUDIES["data-size-cpu"].recipe, steps=8333),
))
# Two models with the same tokens, one of them with a small ResNet before its transformer, to be looked into.
register(Study(
    name="hybrid-cpu", title="Fig. 11, right: a ViT and a hybrid trained alike, in 90 minutes of one core",
    networks=(
        Network("ViT, patch 8", patch=8, width=128, depth=6, heads=4),  # 0.17 GFLOPs
        Network("R10+ViT/8", width=128, depth=6, heads=4, stages=(1, 1, 1), channels=64),  # 0.22
    ),
    sizes=(100_000,),
    classes=200,
    seeds=(0,),
    # The bundled model's recipe, but for what a long run wants: three epochs do not overfit.
    recipe=replace(
        recipe("tiny-imagenet-cpu"), epochs=0, steps=1170, average=0.0,
        augment=Augment(flip=0.5, scale=(0.5, 1.0), ratio=(3 / 4, 4 / 3)), mix_until=1.0, patch_drop_until=0.7,
    ),
))
register(Study(
    name="data-size-digits", title="a minute a seed on a laptop, on scikit-learn's handwritten digits",
    networks=(
        Network("ViT, patch 2", patch=2, width=96, depth=3, heads=3),  # 11.7 MFLOPs
        Network("ResNet", stages=(2, 2), channels=256),  # 10.9: the paper compares at equal compute
    ),
    sizes=(50, 200, 1_000),
    classes=10,
    recipe=Recipe(
        name="data-size-digits", image_size=8, batch_size=25, epochs=0, steps=600, log_every=50,
        precision="fp32", mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5),
        **STANDARD | dict(
            lr=2e-3, warmup=0.1,  # in so few steps, the ViT learns little at 1e-3
            augment=Augment(scale=(0.8, 1.2), ratio=(3 / 4, 4 / 3)),  # a mirrored digit is none
        ),
    ),
))
# Table 7: what ResNets and ViTs gain by the optimizer.
def by_optimizer(*networks: Network, batch: int, more: tuple[int, ...] = ()) -> tuple[Network, ...]:
    """Each network with Adam, Muon, and SGD at BiT's settings for that batch; `more` adds multiples of SGD's rate."""
    bit = ("optimizer=sgd", "momentum=0.9", "weight_decay=1e-4", "schedule=stairs")
    sgd = {f"SGD, rate × {k}" if k > 1 else "SGD": (*bit, f"lr={k * 0.03 * batch / 256:g}") for k in (1, *more)}
    return tuple(
        replace(network, name=f"{network.name}, {name}", settings=settings)
        for network in networks for name, settings in {"Adam": (), **sgd, "Muon": ("optimizer=muon",)}.items()
    )  # fmt: skip


register(Study(
    name="optimizers", title="Table 7 in miniature, on all of Tiny-ImageNet: a ResNet and a ViT", figure="models",
    networks=by_optimizer(STUDIES["data-size"].networks[3], STUDIES["data-size"].networks[0], batch=512),
    sizes=(100_000,), classes=200, recipe=replace(STUDIES["data-size"].recipe, name="optimizers", steps=11_700),
))
# Models, images and length of data-size-cpu. In a pilot with one seed, the ResNet's loss at BiT's rate was that of
# chance, 3.91, even after 300 steps, and at ten times the rate 3.82 after 100; so both rates are there. In another with
# three seeds, 1,000 steps (2.6 epochs of 25,000 images) had the same signs, with SGD far from done.
register(Study(
    name="optimizers-cpu", title="the same with fifty classes at 24 px, in 80 minutes of one core", figure="models",
    networks=by_optimizer(*STUDIES["data-size-cpu"].networks[::-2], batch=64, more=(10,)),
    sizes=(7_500,), classes=50, validations=1,
    recipe=replace(STUDIES["data-size-cpu"].recipe, name="optimizers-cpu", optimizer="adamw", steps=2500),
))
# The choices of the paper's appendix and of later work: one recipe, one setting changed. On a GPU, a ViT of 12 layers
# on all of Tiny-ImageNet, long enough to converge.
CONVERGED = replace(
    recipe("tiny-imagenet"), patch_size=8, epochs=0, steps=11_700, batch_size=512,  # 60 epochs
    patch_drop=0.0, patch_drop_until=0.0, average=0.0,  # positions within attention need all patches
)
# On two cores, Fashion-MNIST: thumbnails whose class is in their shape. In a pilot with one seed and 10,000 validation
# images, learned positions led none by 4.7 points after 1,500 steps on 6,000 images (80.7 %) and by 3.6 after 3,000
# (83.8 %); on 60,000 images by 2.7 (81.0 %) and 3.2 (83.9 %). So more images change little, and more steps the level.
SHAPES = Recipe(
    name="positions-cpu", image_size=20, patch_size=4, width=48, depth=3, heads=3,  # 25 patches, 0.1 M parameters
    epochs=0, steps=3000, batch_size=50,  # 25 epochs of 6,000 images, a minute of one core
    optimizer="muon", lr=2e-3, muon_lr=8e-3, schedule="linear", warmup=0.1,
    augment=Augment(pad=2), mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5),
    precision="fp32",  # as fast as bf16 in models this narrow, and the same on every machine
    valid_images=10_000, log_every=100,
)
POSITIONS = {
    "none": "none", "learned, 1-D": "learned-1d", "learned, 2-D": "learned-2d", "relative, 1-D": "relative-1d",
}  # fmt: skip
PLACES = tuple(
    Variant(f"{name}, {title}", (f"positions={positions}", f"positions_at={at}"))
    for name, positions in list(POSITIONS.items())[1:3]
    for at, title in (("every-layer", "every layer"), ("every-layer-shared", "every layer, shared"))
)
BY_POSITION = (*(Variant(name, (f"positions={value}",)) for name, value in POSITIONS.items()), *PLACES)
register(Study(
    name="positions", title="Table 8 in miniature, on all of Tiny-ImageNet", figure="models", baseline="none",
    networks=BY_POSITION, sizes=(100_000,), classes=200, seeds=(0, 1, 2, 3, 4), recipe=CONVERGED,
))
register(Study(
    name="positions-cpu", title="Table 8 in miniature, on Fashion-MNIST, in an hour of one core", figure="models",
    baseline="none", networks=BY_POSITION, sizes=(6_000,), classes=10, seeds=(0, 1, 2, 3, 4), validations=1,
    recipe=SHAPES,
))


def readouts(rates: tuple[float, ...]) -> tuple[Variant, ...]:
    """Class token and mean of patches, each at every one of the rates of AdamW."""
    return tuple(
        Variant(f"{title}, {rate:g}", (f"readout={value}", f"lr={rate}"))
        for title, value in (("class token", "class-token"), ("mean of patches", "mean")) for rate in rates
    )  # fmt: skip


ADAM = dict(optimizer="adamw", weight_decay=0.1)  # one rate for all weights, as in the paper
register(Study(
    name="readout", title="Fig. 9 in miniature, on all of Tiny-ImageNet: a sweep of rates", figure="rates",
    networks=readouts((1e-4, 3e-4, 8e-4, 2e-3, 5e-3)), sizes=(100_000,), classes=200,
    recipe=replace(CONVERGED, **ADAM, betas=(0.9, 0.999), schedule="linear"),
))
# The sizes of positions-cpu, and of bias-cpu but for its thousand images; no pilot of their own is recorded.
register(Study(
    name="readout-cpu", title="Fig. 9 in miniature, on Fashion-MNIST, in 45 minutes of one core", figure="rates",
    networks=readouts((5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)), sizes=(6_000,), classes=10, validations=1,
    recipe=replace(SHAPES, **ADAM),
))


# Learning without labels (B.1.2), then tuning on a tenth of the labels; beside them random weights.
def pretrained(*lengths: int, batch: int) -> tuple[Variant, ...]:
    """Random weights, and masked patches for each number of steps."""
    return Variant("random weights"), *(
        Variant(
            f"{name.replace('-', ' ')}, {steps:,} steps",
            pretraining=(name, "epochs=0", f"steps={steps}", f"batch_size={batch}"),
        )
        for name in ("masked-patches",) for steps in lengths
    )  # fmt: skip


# No pilot of its own, but the lengths of an earlier benchmark, which found a lead after 1,000 steps and 10 epochs of
# tuning, none after 40 epochs, and one of the autoencoder after 8,000 steps and 40 epochs.
TUNING = replace(
    recipe("masked-tuning"), continues=False, readout="mean",  # nothing trains a class token without labels
    patch_size=8, width=96, depth=4, heads=3, epochs=0, steps=1560,  # 40 epochs of 2,500 images
    precision="fp32",  # of SHAPES
)
register(Study(
    name="masked", title="B.1.2 in miniature: all of Tiny-ImageNet without labels, then a tenth with", figure="models",
    baseline="random weights", networks=pretrained(20_000, 80_000, batch=512), sizes=(10_000,), classes=200,
    recipe=replace(TUNING, image_size=64, width=192, depth=12, batch_size=256, precision="auto"),  # 40 epochs, too
))
register(Study(
    name="masked-cpu", title="the same with 50 classes at 32 px, in 80 minutes of one core", figure="models",
    baseline="random weights", networks=pretrained(1_000, 8_000, batch=64), sizes=(2_500,), classes=50,
    seeds=(0, 1, 2, 3), validations=2, recipe=TUNING,
))
register(replace(
    STUDIES["masked-cpu"], name="masked-cpu-short", networks=pretrained(1_000, batch=64),
    title="the same, tuned for 10 epochs in place of 40", recipe=replace(TUNING, steps=390),
))


def scaled(**values: tuple[str, ...]) -> tuple[Variant, ...]:
    """A model called "base", and larger variants of it, one dimension at a time.

    values: for each dimension, the settings of each larger variant, such as "depth=12"; spaces separate several.
    """
    steps = [Variant(f"{name.replace('_', ' ')}, {k}", tuple(each.split()))
             for name, larger in values.items() for k, each in enumerate(larger, 1)]
    return Variant("base"), *steps


register(Study(
    name="scaling", title="Fig. 8 in miniature, on all of Tiny-ImageNet: which dimension to scale", figure="scaling",
    baseline="base", sizes=(100_000,), classes=200,
    recipe=replace(CONVERGED, patch_size=16, width=96, depth=6, heads=3, mlp_ratio=2.0),  # the paper's ratio, too
    networks=scaled(
        depth=("depth=12", "depth=24"),
        patch_size=("patch_size=8", "patch_size=4"),
        MLP_width=("mlp_ratio=4", "mlp_ratio=8"),
        width=("width=192 heads=6", "width=384 heads=12"),
        all=("depth=12 patch_size=8 width=192 heads=6 mlp_ratio=4",),
    ),
))
# SHAPES from a smaller base. In a pilot with three seeds and 1,000 steps on 60,000 images, the base came to 75.9 %, and
# only the largest width, and all dimensions together, were ahead of it by more than their intervals.
register(Study(
    name="scaling-cpu", title="the same on Fashion-MNIST, in 40 minutes of one core", figure="scaling",
    baseline="base", sizes=(6_000,), classes=10, validations=1,
    recipe=replace(SHAPES, name="scaling-cpu", patch_size=5, width=24, depth=2, heads=3, mlp_ratio=2.0),
    networks=scaled(
        depth=("depth=4", "depth=8"),
        patch_size=("patch_size=4", "patch_size=2"),
        MLP_width=("mlp_ratio=4", "mlp_ratio=8"),
        width=("width=48 heads=6", "width=96 heads=12"),
        all=("depth=4 patch_size=4 width=48 heads=6 mlp_ratio=4",),
    ),
))
# fmt: on


def study(name: str) -> Study:
    """The study of that name; ValueError if there is none."""
    if name not in STUDIES:
        raise ValueError(f"There is no study {name!r}. The studies are: {', '.join(STUDIES)}.")
    return STUDIES[name]
