"""Named recipes, with a reason beside each number."""

from __future__ import annotations

import types

from vitlens.data.augment import Augment
from vitlens.train.recipes.paper import paper_recipes
from vitlens.train.recipes.recipe import Recipe

# fmt: off
SMALL = (
    # As accurate as about 15 minutes on one H200 allow, on a grid fine enough to look at.
    Recipe(
        name="tiny-imagenet",
        image_size=64, patch_size=4,  # a 16×16 grid: maps worth looking at; more accurate than patch 8, for 4× the cost
        width=192, depth=12, heads=3,  # ViT-Ti of Touvron et al. 2021: 5.4 M parameters, 11 MB in fp16
        epochs=150,  # fitted to the time at hand with --fit-minutes
        batch_size=1024,  # 97 steps an epoch; the batch of DeiT and of big_vision's small ViTs
        optimizer="muon",  # ahead of AdamW on small ViTs from the first epochs, at about 1 % of a step's time
        lr=1e-3,  # AdamW's part: embeddings, head, norms, biases. DeiT's 5e-4 · batch / 512
        muon_lr=3e-3,  # on a small subset 3e-3 and 1e-2 did equally well after 3 epochs; a long run wants the lower
        weight_decay=0.1,  # big_vision's 1e-4 at its learning rate of 1e-3
        betas=(0.9, 0.99),  # a shorter memory of squares for a shorter run
        warmup=0.05,  # some 7 epochs; 5 in DeiT
        drop_path=0.1, label_smoothing=0.1,  # DeiT, and SPT_LSA on this data set
        augment=Augment(
            flip=0.5, rotate=10,
            scale=(0.35, 1.0), ratio=(3 / 4, 4 / 3),  # 64-px images are crops already: milder than ImageNet's 0.08
            jitter=0.3, policy=0.3,  # DeiT III
            erase=0.1,
            cutmix=0.5, mixup=0.2,  # the rest, 0.3, stays unmixed
        ),
        mix_until=0.8,  # CCT gained from an end without mixing
        # 127 of 256 patches and the class token make 128 tokens: half the price while the rate is high.
        patch_drop=0.502, patch_drop_until=0.65,
        average=0.999,  # some 10 epochs
        evaluate_every=10,
    ),
    # Time to accuracy: 61 % in two minutes of one H200.
    Recipe(
        name="tiny-imagenet-2min",
        image_size=64, patch_size=8,  # 65 tokens, a quarter of the price of patch 4
        width=384, depth=12, heads=6,  # ViT-S: matrix products wide enough to keep an H200 busy
        epochs=30,  # fitted to the time at hand with --fit-minutes
        batch_size=1024,
        optimizer="muon", lr=1e-3, muon_lr=5e-3,  # the fewer steps, the larger
        betas=(0.9, 0.99),  # as above
        schedule="linear",  # spends more of a short run at middling rates than cosine
        drop_path=0.1, label_smoothing=0.1,  # as above
        augment=Augment(  # lighter: every image is seen some 30 times
            flip=0.5, scale=(0.4, 1.0), ratio=(3 / 4, 4 / 3), jitter=0.2, policy=0.1, cutmix=0.4
        ),
        mix_until=0.75,
        average=0.995,  # some 2 epochs
        evaluate_every=3,
        save_every=1e9,  # nothing is written in a race
    ),
    # CIFAR-10 and -100 on a GPU: what tiny-imagenet has, at half the side and with half the images. Not tuned on them.
    Recipe(
        name="cifar",
        image_size=32, patch_size=4,  # 65 tokens: with patch 8 a ViT would see 16 pieces of 8 × 8 pixels
        width=192, depth=9, heads=6,  # 4.0 M parameters; the width and depth of SPT_LSA's ViT
        num_classes=10,
        epochs=100,  # as SPT_LSA; fitted to the time at hand with --fit-minutes
        batch_size=512,  # 97 steps an epoch, as tiny-imagenet
        optimizer="muon", lr=1e-3, muon_lr=3e-3,  # of tiny-imagenet
        weight_decay=0.1, betas=(0.9, 0.99), warmup=0.05,  # of tiny-imagenet
        drop_path=0.1, label_smoothing=0.1,  # SPT_LSA
        augment=Augment(
            flip=0.5, pad=4,  # the field's custom on these images: moved by up to 4 pixels, not zoomed
            jitter=0.3, policy=0.3,  # of tiny-imagenet; AutoAugment in SPT_LSA
            erase=0.25,  # SPT_LSA
            cutmix=0.5, mixup=0.2,  # of tiny-imagenet
        ),
        mix_until=0.8,  # of tiny-imagenet
        average=0.999,  # some 10 epochs
        evaluate_every=10,
    ),
    # MNIST, Fashion-MNIST, KMNIST: 28 px, black and white.
    Recipe(
        name="mnist",
        image_size=28, patch_size=4,  # 7×7 patches
        width=96, depth=6, heads=3,  # 0.7 M parameters, as for digits
        num_classes=10,
        epochs=20, batch_size=256,  # 234 steps an epoch
        optimizer="muon", lr=2e-3, muon_lr=4e-3,  # of digits
        warmup=0.1, drop_path=0.1, label_smoothing=0.1,  # of digits
        augment=Augment(scale=(0.65, 1.4), ratio=(3 / 4, 4 / 3), rotate=15),  # of digits; never mirrored
        average=0.998,  # ~2 epochs
        mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5),  # pixels in [−1, 1]
        evaluate_every=2,
    ),
    # The bundled model, on two cores of a CPU in about three hours: half the layers, an 8×8 grid.
    Recipe(
        name="tiny-imagenet-cpu",
        image_size=64, patch_size=8,  # 65 tokens: about 310 images/s with half of the patches, 170 with all
        width=192, depth=6, heads=6,  # 2.7 M parameters; heads of 32 give more dots to look at than heads of 64
        epochs=30, batch_size=256,  # 390 steps an epoch; --fit-minutes 60 for a first look
        optimizer="muon", lr=1e-3, muon_lr=3e-3,  # Muon learned fastest in a short trial on 40 classes
        weight_decay=0.05,  # DeiT's
        betas=(0.9, 0.99), warmup=0.05, schedule="linear",  # as above
        clip=1.0,  # the paper's for ImageNet
        label_smoothing=0.1,  # of tiny-imagenet, as crops, jitter and mixing
        augment=Augment(
            flip=0.5, scale=(0.35, 1.0), ratio=(3 / 4, 4 / 3), jitter=0.3,
            cutmix=0.5, mixup=0.2,  # without, 18 epochs overfit: 45.2 % before their end, 44.8 % at it
        ),
        mix_until=0.9,
        patch_drop=0.5, patch_drop_until=0.88,  # twice the pictures a second; all patches for the last 4 epochs
        average=0.998,  # ~1 epoch
        evaluate_every=3, save_every=120,
    ),
    # Fine-tuning on some hundred photographs with a CPU: the paper's protocol (Table 4) scaled down.
    Recipe(
        name="finetune-small",
        continues=True,
        image_size=224, resize=256,  # 7/8; 384 of 448 in the paper, 6/7
        epochs=10, batch_size=32,  # the paper's batch of 512 would be more than there is
        optimizer="sgd", momentum=0.9, lr=0.01, weight_decay=0.0,  # Table 4; of its grid, what served best
        warmup=0.1,  # 9 steps for 300 photographs; 500 of 10,000 in the official code
        schedule="cosine", clip=1.0, augment=Augment(flip=0.5),  # the paper's
        evaluate_every=4,
    ),
    # Handwritten digits, 8×8: a minute on a laptop.
    Recipe(
        name="digits",
        image_size=8, patch_size=2,  # a 4×4 grid
        width=96, depth=6, heads=3,  # 0.7 M parameters: less than the million that 1,437 images could still fill
        num_classes=10,
        epochs=40, batch_size=64,  # 22 steps an epoch; 40 end above 98.5 % in cross-validation
        optimizer="muon", lr=2e-3, muon_lr=4e-3,  # twice those of large runs: the run is short, the model narrow
        warmup=0.1, drop_path=0.1, label_smoothing=0.1,  # as a large run would have them
        # A mirrored digit is none; wider, narrower and slanted ones are what writers differ in.
        augment=Augment(scale=(0.65, 1.4), ratio=(3 / 4, 4 / 3), rotate=15),
        average=0.99,  # ~5 epochs
        mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5),  # pixels in [−1, 1]
        evaluate_every=5, log_every=22,
        precision="fp32",  # nearly as fast as bf16 in a model this narrow, and the same on every processor
    ),
)
# fmt: on
RECIPES = types.MappingProxyType({recipe.name: recipe for recipe in (*SMALL, *paper_recipes())})


def recipe(name: str) -> Recipe:
    """The recipe of that name."""
    if name not in RECIPES:
        raise ValueError(f"There is no recipe {name!r}. The recipes are: {', '.join(RECIPES)}.")
    return RECIPES[name]
