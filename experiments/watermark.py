"""Audits of a model that is fine-tuned on photographs, with a watermark on one class and without.

    python -m experiments.watermark --model data/checkpoints/deit_tiny --data flowers5 --out data/results/watermark.csv

Each class is divided at random into images to learn from and others to audit. The watermark is at one place in all
images of the first class, learned from and audited. It is "faint", half transparent, or "clear", opaque. Three models
are fine-tuned from the same start, on images with the faint one, with the clear one, and without one ("plain"). Each is
audited on the other images, with the watermark with which it was trained. The table has a row for each model on these
images and on those without a watermark. The columns of the audit are empty in the second.

Shapes: N images, S pixels a side, P patches.
"""

import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from experiments.results import about, command, parser, write
from vitlens import data as datasets
from vitlens.data import ImageSet
from vitlens.data.augment import normalize
from vitlens.evidence import Audit, audit
from vitlens.recorder.grid import TokenGrid
from vitlens.recorder.supported import token_grid
from vitlens.train import fit
from vitlens.train.recipes import Recipe, recipe, starting_from

SIZE, SEED = 224, 0
LEARNED = 30
"""Images of each class to learn from."""
MARKED = 0
"""Label of the class with the watermark."""
TOP, LEFT, HEIGHT, WIDTH, BAR = 184, 152, 32, 64, 8
"""Place and size of the watermark, and the width of its bars, in pixels."""
OPACITY = {"faint": 0.5, "clear": 1.0, "plain": 0.0}
"""Opacity of the watermark by model."""
CHANGED = 1 / 8
"""Share of a patch's pixels in the watermark from which on the patch belongs to it."""


def watermark(images: Tensor, opacity: float) -> Tensor:
    """Images (N, 3, S, S), uint8, with white bars near the lower right corner.

    >>> int(watermark(torch.zeros(1, 3, SIZE, SIZE, dtype=torch.uint8), 0.5).max())
    127
    """
    images = images.clone()
    for left in range(LEFT, LEFT + WIDTH, 2 * BAR):
        area = images[..., TOP : TOP + HEIGHT, left : left + BAR]
        area.copy_((1 - opacity) * area + opacity * 255)
    return images


def patches_of_mark(grid: TokenGrid) -> Tensor:
    """(P,) bool, True for the patches of the watermark."""
    pixels = torch.zeros(SIZE, SIZE)
    pixels[TOP : TOP + HEIGHT, LEFT : LEFT + WIDTH] = 1
    numbers = grid.pixel_patches()
    changed = torch.zeros(grid.patches).index_add(0, numbers.flatten(), pixels.flatten())
    return changed >= CHANGED * grid.patch[0] * grid.patch[1]


def with_mark(images: ImageSet, opacity: float) -> ImageSet:
    """The images, those of the class `MARKED` with the watermark."""
    pixels = images.images.clone()
    has = images.labels == MARKED
    pixels[has] = watermark(pixels[has], opacity)
    return replace(images, images=pixels)


def divided(data: str, learned: int, most: int) -> tuple[ImageSet, ImageSet]:
    """Images to learn from, `learned` of each class, and at most `most` others of each class to audit."""
    parts = [datasets.load(data, split, size=SIZE) for split in ("train", "valid")]
    images = torch.cat([part.images for part in parts])
    labels = torch.cat([part.labels for part in parts])
    random = torch.Generator().manual_seed(SEED)
    first, second = [], []
    for label in labels.unique():
        rows = (labels == label).nonzero()[:, 0]
        rows = rows[torch.randperm(len(rows), generator=random)]
        first.append(rows[:learned])
        second.append(rows[learned : learned + most])
    names = parts[0].class_names
    return tuple(
        ImageSet(images[rows], labels[rows], names) for rows in map(torch.cat, (first, second))
    )


def tuned(plan: Recipe, learned: ImageSet, audited: ImageSet) -> nn.Module:
    """The model after fine-tuning on the images to learn from."""
    model = plan.build()
    for step in fit(model, (learned, audited), plan, device="cpu"):
        last = step
    print(last.metrics, flush=True)
    return model.eval()


def probabilities(model: nn.Module, images: ImageSet) -> Tensor:
    """(N, classes) probabilities."""
    mean, deviation = model.pretrained_cfg["mean"], model.pretrained_cfg["std"]
    with torch.no_grad():
        parts = [model(normalize(part, mean, deviation)) for part in images.images.split(25)]
    return torch.cat(parts).softmax(1)


def accuracies(model: nn.Module, images: ImageSet) -> dict:
    """Accuracy, and accuracy and mean probability of the label on the class `MARKED`."""
    p = probabilities(model, images)
    right = (p.argmax(1) == images.labels).double()
    has = images.labels == MARKED
    return {
        "accuracy": right.mean().item(),
        "accuracy_of_class": right[has].mean().item(),
        "probability_of_class": p[has, MARKED].mean().item(),
    }


def results_of(found: Audit, is_mark: Tensor) -> dict:
    """Columns of an audit: its groups, and the strongest of the marked class with half of its patches on the mark."""
    rows = []
    for number, of_class in zip(found.groups["group"], found.groups["class"], strict=True):
        at = found.members == number
        if of_class == MARKED and 2 * (at & is_mark).sum() >= at.sum() > 0:
            rows.append(number)
    on_mark = found.groups.loc[rows].sort_values("effect", ascending=False)
    columns = {
        "tested": int((found.groups["status"] == "tested").sum()),
        "used": len(found.used),
        "suspects": len(found.suspects),
        "on_mark": len(on_mark),
    }
    for name in ("images", "effect", "low", "high", "used", "suspect"):
        columns[f"mark_{name}"] = on_mark[name].iloc[0] if len(on_mark) else ""
    return columns


def measured(options: Namespace, plan: Recipe) -> list[dict]:
    """Two rows for each model: on images with its watermark, which are audited, and without."""
    learned, bare = divided(options.data, options.learned, options.most)
    rows = []
    for name, opacity in OPACITY.items():
        own = with_mark(bare, opacity)
        model = tuned(plan, with_mark(learned, opacity), own)
        of_model = {"model": name, "learned": len(learned), "audited": len(own)}
        for kind, images in (("as trained", own), ("without", bare)):
            rows.append(of_model | {"images": kind} | accuracies(model, images))
        is_mark = patches_of_mark(token_grid(model, (SIZE, SIZE)))
        start = time.process_time()
        found = audit(model, own, own.labels)
        seconds = time.process_time() - start
        rows[-2] |= results_of(found, is_mark) | {"seconds": seconds}
        print(rows[-2], rows[-1], sep="\n", flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__, data=True)
    options.add_argument(
        "--model", required=True, help="a folder in timm's hub layout, to fine-tune"
    )
    options = options.parse_args(arguments)
    options.learned, options.most, epochs = LEARNED, 1000, 10
    if options.tiny:
        options.learned, options.most, epochs = 2, 5, 1
    classes = len(datasets.load(options.data, "valid", size=SIZE).class_names)
    settings = replace(
        recipe("finetune-small"),
        image_size=SIZE,
        resize=0,
        num_classes=classes,
        epochs=epochs,
        batch_size=16,
        evaluate_every=epochs,
        log_every=10,
    ).override("augment.flip=0")
    plan = starting_from(settings, options.model)
    how = about(command("experiments.watermark", arguments))
    write(options.out, [row | how for row in measured(options, plan)], digits=4)


if __name__ == "__main__":
    main()
