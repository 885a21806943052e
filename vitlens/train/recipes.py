"""Named recipes with a reason for each number.

Add a recipe to `SMALL`, or with `register` from other packages.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from vitlens.data.augment import Augment
from vitlens.files import read_text
from vitlens.names import require_known
from vitlens.plugins import load_plugins
from vitlens.train.model import settings_of
from vitlens.train.settings import FROM_MODEL, Recipe

__all__ = ["FROM_MODEL", "RECIPES", "Recipe", "read_recipe", "recipe", "register", "starting_from"]

# fmt: off
GRAY = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}  # pixels in [−1, 1], as in the official code
# timm's keywords for a head on the mean of the patches, without a class token.
MEAN_OF_PATCHES = {"class_token": False, "global_pool": "avg", "fc_norm": False}
# For one GPU.
TINY_IMAGENET = Recipe(
    name="tiny-imagenet",
    image_size=64, patch_size=4,  # a 16×16 grid, for 4× the cost of patch 8
    width=192, depth=12, heads=3,  # ViT-Ti of Touvron et al. 2021: 5.4 M parameters, 11 MB in fp16
    epochs=150,
    batch_size=1024,  # 97 steps an epoch; the batch of DeiT and of big_vision's small ViTs
    optimizer="muon",  # for the matrices of the blocks, AdamW for the rest
    lr=1e-3,  # AdamW's part: embeddings, head, norms, biases. DeiT's 5e-4 · batch / 512
    muon_lr=3e-3,  # three times AdamW's rate
    weight_decay=0.1,  # big_vision's 1e-4 at its learning rate of 1e-3
    betas=(0.9, 0.99),  # a shorter memory of squares for a shorter run
    warmup=0.05,  # some 7 epochs; 5 in DeiT
    drop_path=0.1, label_smoothing=0.1,  # DeiT, and SPT_LSA on this data set
    augment=Augment(
        flip=0.5, rotate=10,
        scale=(0.35, 1.0), ratio=(3 / 4, 4 / 3),  # 64-px images are crops already: milder than ImageNet's 0.08
        jitter=0.3, policy=0.3,  # DeiT III
        erase=0.1, cutmix=0.5, mixup=0.2,  # the rest, 0.3, stays unmixed
    ),
    mix_until=1.0,  # with an end without mixing accuracy fell by 0.8 points (data/results/tiny-imagenet-h200.csv)
    # 127 of 256 patches and the class token make 128 tokens: half the price while the rate is high.
    patch_drop=0.502, patch_drop_until=0.65,
    average=0.999, evaluate_every=10,  # an average over some 10 epochs
)
# Handwritten digits, 8×8: a minute on a laptop.
DIGITS = Recipe(
    name="digits",
    image_size=8, patch_size=2,  # a 4×4 grid
    width=96, depth=6, heads=3, num_classes=10,  # 0.7 M parameters: less than 1,437 images could still fill
    epochs=40, batch_size=64,  # 22 steps an epoch; data/results/digits.csv has the accuracies
    optimizer="muon", lr=2e-3, muon_lr=4e-3,  # twice those of large runs: the run is short, the model narrow
    warmup=0.1, drop_path=0.1, label_smoothing=0.1,  # as in large runs
    # Mirrored digits are invalid. Writers vary the width and the slant.
    augment=Augment(scale=(0.65, 1.4), ratio=(3 / 4, 4 / 3), rotate=15),
    average=0.99, evaluate_every=5, log_every=22,  # an average over some 5 epochs
    precision="fp32",  # about as fast as bf16 at this width, and equal on every processor
    **GRAY,
)
# Fine-tuning on some hundred photographs with a CPU: the paper's protocol (Table 4) scaled down.
FINETUNE_SMALL = Recipe(
    name="finetune-small", continues=True,
    image_size=224, resize=256,  # 7/8; 384 of 448 in the paper, 6/7
    epochs=10, batch_size=32,  # the paper's batch of 512 exceeds the data set
    optimizer="sgd", momentum=0.9, lr=0.01, weight_decay=0.0,  # Table 4, with the best rate of its grid
    warmup=0.1,  # 9 steps for 300 photographs; 500 of 10,000 in the official code
    schedule="cosine", clip=1.0, augment=Augment(flip=0.5),  # the paper's
    evaluate_every=4,
)
WHOLE = {"patch_drop": 0.0, "patch_drop_until": 0.0}
SMALL = (
    TINY_IMAGENET,
    # For experiments/time_to_accuracy.py: the most accurate model after two minutes of one GPU. Read-out and scale were
    # chosen by pilots at 32 px (data/results/recipe-pilot-cpu.csv), and the two together are not measured yet.
    replace(
        TINY_IMAGENET, name="tiny-imagenet-2min", **WHOLE,
        patch_size=8,  # 64 tokens, a quarter of the price of patch 4
        width=384, heads=6,  # ViT-S: matrix products wide enough to keep a large GPU busy
        model_kwargs=MEAN_OF_PATCHES,  # 2.5 points above the class token in the pilots
        epochs=30, muon_lr=5e-3, weight_decay=0.05,  # the fewer steps, the larger the rate
        schedule="linear",  # more steps at medium rates than cosine
        augment=Augment(  # milder, because each image is used about 30 times
            flip=0.5, scale=(0.6, 1.0), ratio=(3 / 4, 4 / 3),  # 1.9 points above 0.4 in the pilots
            jitter=0.2, policy=0.3, cutmix=0.4, mixup=0.2,
        ),
        average=0.995, evaluate_every=3,  # an average over some 2 epochs
        save_every=1e9,  # no checkpoints while time is measured
        compile="default",  # measured so, at 1.9e8 tokens
    ),
    # Ten minutes of a large GPU, by the speed of tiny-imagenet-2min. Not run yet.
    replace(
        TINY_IMAGENET, name="tiny-imagenet-10min",
        patch_size=8, width=384, heads=6, model_kwargs=MEAN_OF_PATCHES,  # ViT-S/8, as tiny-imagenet-2min
        epochs=170, muon_lr=5e-3, weight_decay=0.05, drop_path=0.15,  # DeiT's 0.1 is for 13 times the images
        schedule="linear",
        augment=Augment(  # stronger than in two minutes, because each image is used 170 times
            flip=0.5, rotate=15, scale=(0.6, 1.0), ratio=(3 / 4, 4 / 3), jitter=0.3, policy=0.3,
            erase=0.25, cutmix=0.5, mixup=0.3,
        ),
        patch_drop=0.5, patch_drop_until=0.6,
        average=0.998, evaluate_every=5,
        compile="default",
    ),
    # A ViT from scratch on photographs with a free GPU: torch/imagenette160, ten classes of ImageNet, 9,469 images.
    replace(
        TINY_IMAGENET, name="photos-t4", num_classes=10,
        image_size=128, resize=160, patch_size=8,  # a 16×16 grid, cut from images of 160 px
        depth=9, heads=6,  # 4.1 M parameters, of the size of SPT_LSA's ViT for small data
        epochs=60, batch_size=128,  # 73 steps an epoch, 2.7 PFLOP: 11 minutes at 4 TFLOP/s
        muon_lr=4e-3, weight_decay=0.05,  # a shorter run than tiny-imagenet
        average=0.998, evaluate_every=5,  # an average over some 7 epochs
    ),
    # CIFAR-10 and -100 on a GPU, at half the side and with half the images of tiny-imagenet. Not tuned on them.
    replace(
        TINY_IMAGENET, name="cifar", num_classes=10, **WHOLE,
        image_size=32,  # 65 tokens; patch 8 would give 16 patches
        depth=9, heads=6,  # 4.0 M parameters; the width and depth of SPT_LSA's ViT
        epochs=100, batch_size=512,  # as SPT_LSA; 97 steps an epoch, as tiny-imagenet
        augment=Augment(
            flip=0.5, pad=4,  # the usual shift by up to 4 pixels, without zoom
            jitter=0.3, policy=0.3, cutmix=0.5, mixup=0.2,  # of tiny-imagenet; AutoAugment in SPT_LSA
            erase=0.25,  # SPT_LSA
        ),
        mix_until=0.8,  # CCT gained from an end without mixing
    ),
    # MNIST, Fashion-MNIST, KMNIST: 28 px, black and white.
    replace(
        DIGITS, name="mnist",
        image_size=28, patch_size=4,  # 7×7 patches
        epochs=20, batch_size=256, log_every=50,  # 234 steps an epoch
        average=0.998, evaluate_every=2, precision="auto",  # an average over some 2 epochs
    ),
    # The model of chapter 11, on two cores of a CPU in about three hours: half the layers, an 8×8 grid.
    replace(
        TINY_IMAGENET, name="tiny-imagenet-cpu",
        patch_size=8,  # 65 tokens: about 310 images/s with half of the patches, 170 with all
        depth=6, heads=6,  # 2.7 M parameters; head width 32 gives twice the heads of width 64
        epochs=30, batch_size=256,  # 390 steps an epoch
        weight_decay=0.05, drop_path=0.0, schedule="linear",  # DeiT's decay
        augment=replace(TINY_IMAGENET.augment, rotate=0.0, policy=0.0, erase=0.0),
        mix_until=0.9,
        patch_drop=0.5, patch_drop_until=0.88,  # twice the images a second; all patches for the last 4 epochs
        average=0.998, evaluate_every=3, save_every=120,  # an average over about one epoch
    ),
    FINETUNE_SMALL,
    # The specimen of the book, DeiT-Tiny carried over to Tiny-ImageNet with two cores.
    replace(
        FINETUNE_SMALL, name="tiny-imagenet-transfer",
        epochs=2, batch_size=128,  # 1,562 steps; the paper takes 500 to 20,000 of 512 images
        lr=0.04,  # in proportion to the batch
        layer_decay=0.75,  # the patch embedding learns at 2 % of the head's rate and stays close to its pre-training
        warmup=0.05, evaluate_every=1, save_every=300,
    ),
    DIGITS,
)
# fmt: on

RECIPES: dict[str, Recipe] = {}
"""The recipes by name, as `vitlens train --list` shows them."""


def register(recipe: Recipe) -> Recipe:
    """Add a recipe to `RECIPES`, in place of one of the same name, and return it.

    >>> vitlens.train.register(vitlens.train.Recipe(name="mine", epochs=10)).epochs
    10
    >>> del vitlens.train.RECIPES["mine"]
    """
    RECIPES[recipe.name] = recipe
    return recipe


for _recipe in SMALL:
    register(_recipe)
load_plugins("recipes")


def recipe(name: str) -> Recipe:
    """The recipe of that name. Raises ValueError with all names for an unknown one.

    >>> vitlens.train.recipe("digits").epochs
    40
    """
    require_known(name, RECIPES, "A recipe")
    return RECIPES[name]


def read_recipe(name: str | os.PathLike) -> Recipe:
    """The recipe of that name, or from that JSON file. Raises ValueError for unknown names and unreadable files.

    >>> vitlens.train.read_recipe("mnist").image_size
    28
    """
    path = Path(name)
    if path.suffix != ".json":
        return recipe(os.fspath(name))
    try:
        return Recipe.from_json(read_text(path, pipes=True))
    except (ValueError, TypeError, AttributeError, OSError) as problem:
        raise ValueError(f"{path} cannot be read as a recipe ({problem}).") from problem


def starting_from(recipe: Recipe, source: str | os.PathLike) -> Recipe:
    """The recipe for fine-tuning a trained model: a timm name or a directory in timm's hub layout.

    The model is any classifier of timm whose head can be replaced, ResNets included (Table 4). The model sets
    architecture, sizes, mean and standard deviation of the pixels. The recipe keeps its image_size. Pixels beyond whole
    patches are cut off, as in the paper: H/14 uses 27 × 14 of 384 pixels.
    Raises ValueError for models without a classifier head, for transformer settings of other models and for keywords of
    another architecture, and the errors of `load_model`.

    >>> vitlens.train.starting_from(vitlens.train.recipe("finetune-small"), "bundled").width
    192
    """
    if recipe.model_kwargs and not recipe.init:
        keyword = next(iter(recipe.model_kwargs))
        raise ValueError(
            f"model.{keyword} comes with the model that the run starts from, and cannot be set."
        )
    source = os.fspath(source)
    settings = settings_of(source, recipe.image_size)
    convolutional = (settings["patch_size"], settings["depth"], settings["heads"]) == (1, 1, 1)
    if convolutional and (recipe.dropout or recipe.optimizer == "muon"):
        setting = "dropout" if recipe.dropout else "optimizer=muon"
        raise ValueError(
            f"{setting} needs a transformer over patches, and {source} is another model. Leave it out."
        )
    return replace(recipe, **settings)
