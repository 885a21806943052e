"""What learning without labels is worth where labels are few: pre-training, then fine-tuning, beside training anew.

    python benchmarks/masked.py --data tiny-imagenet --runs RUNS --out data/results/masked.csv

50 classes are drawn with seed 0; of these, all images are learned from without labels and a tenth of each class, drawn
by the seed of the training, with labels. Three models of one architecture are tuned on that tenth by the recipe
`masked-tuning`: one from random weights, one after `masked-patches` (the paper's B.1.2), one after
`masked-autoencoder`. --steps is the length of pre-training. SIZES are what a pilot found to fit into a quarter of an
hour of one core.

Before tuning, a linear probe and 20 nearest neighbors read the features of the same tenth. Accuracies are on all
validation images of the classes, after the last step. In each row `gain` is by how much a way is ahead of random
weights with the same seed. In rows about heads, `mean_distance` is in pixels, a mean over 256 validation images. A file
.npz beside the table holds the principal components of each patch embedding, before and after tuning: (seeds, k, p, p,
3).

A killed run goes on by the same command. --runs receives a folder for each training, with its model and snapshots.
"""

import argparse
import json
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from results import about, rounded, write
from tqdm import tqdm

from vitlens import attention, capture, data, filters, load_model
from vitlens.data import ImageSet
from vitlens.data.augment import normalized
from vitlens.evaluate import features, linear_probe, nearest, support
from vitlens.train import export, fit, recipe, snapshots, starting_from

CLASSES, LABELED = 50, 50
SIZES = {"image_size": 32, "patch_size": 8, "depth": 4}
BATCH = 64
COMPONENTS = 28
WAYS = {"random weights": "", "masked patches": "masked-patches", "masked autoencoder": "masked-autoencoder"}


def images_of(source: str, split: str) -> ImageSet:
    """All images of the drawn classes, numbered from 0."""
    every = data.load(source, split, size=SIZES["image_size"], stream=False)
    kept = torch.randperm(len(every.class_names), generator=torch.Generator().manual_seed(0))[:CLASSES].sort().values
    rows = torch.isin(every.labels, kept).nonzero()[:, 0]
    names = tuple(every.class_names[k] for k in kept.tolist())
    return ImageSet(every.images[rows], torch.searchsorted(kept, every.labels[rows]), names)


def trained(plan, splits, folder: Path, watch: int = 0) -> Path:
    """The folder of the exported model of a training by `plan`, which goes on where it was killed."""
    done = folder / "model" / "config.json"
    if done.exists():
        return done.parent
    model, start = plan.build(), time.monotonic()
    due, path = set(), folder / "snapshots.npz"
    steps, probe = plan.length(len(splits[0])), snapshots.probe(splits[1], plan)
    if watch:
        due = set(snapshots.schedule(steps, watch))
        if not path.exists():
            snapshots.save(path, 0, snapshots.record(model, probe))
    with closing(fit(model, splits, plan, out=folder, resume=True)) as training, tqdm(total=steps, disable=None) as bar:
        for step in training:
            bar.update(step.step - bar.n)
            if step.step in due:
                snapshots.save(path, step.step, snapshots.record(model, probe))
    export(model, folder / "model", plan, splits[0].class_names)
    print(folder.name, {**step.metrics, "loss": step.loss}, f"{time.monotonic() - start:.0f} s", flush=True)
    return done.parent


def distances(folder: Path, images) -> torch.Tensor:
    """(L, H) mean distances in pixels over 256 images."""
    model = load_model(folder)
    config = model.pretrained_cfg
    with torch.inference_mode(), capture(model) as attn:
        model(normalized(images[:256], config["mean"], config["std"]))
    return attention.mean_distance(attn).mean(0)


def of_seed(seed: int, train: ImageSet, valid: ImageSet, options, arrays: dict[str, list]) -> list[dict]:
    """The rows of one seed; its filters are added to `arrays`."""
    few = train.chosen(support(train.labels, LABELED, seed))
    rows, first = [], None
    for way, name in WAYS.items():
        folder = options.runs / f"{way.replace(' ', '-')}-{seed}"
        about_it = {"way": way, "seed": seed, "pretraining_steps": 0, "labeled": len(few), "unlabeled": 0}
        plan = replace(
            recipe(name or "masked-patches"), **SIZES, seed=seed, num_classes=CLASSES, epochs=0,
            steps=options.steps, batch_size=BATCH, evaluate_every=1,
        )  # fmt: skip
        if name:
            source = trained(plan, (train, valid), folder, watch=12)
            about_it |= {"pretraining_steps": options.steps, "unlabeled": len(train)}
        else:  # the same initial weights
            source = export(plan.build(), folder / "model", plan, train.class_names, dtype=torch.float32)
        model = load_model(source)
        seen = [features(model, split) for split in (few, valid)]
        voted = (nearest(seen[0], seen[1][0]) == seen[1][1]).double().mean().item()
        tuning = replace(
            recipe("masked-tuning").override(*options.set), image_size=SIZES["image_size"], seed=seed,
            num_classes=CLASSES,
        )  # fmt: skip
        tuned = folder.with_name(folder.name + "-tuned")
        trained(starting_from(tuning, source), (few, valid), tuned)
        log = [json.loads(line) for line in (tuned / "log.jsonl").read_text().splitlines()]
        top1 = log[-1]["metrics"]["top1"]
        first = top1 if first is None else first
        rows.append({**about_it, "quantity": "accuracy", "top1": top1, "gain": top1 - first, "knn": 100 * voted,
                     "probe": linear_probe(*seen), "validation_images": len(valid)})  # fmt: skip
        print(rows[-1], flush=True)
        for stage, place in {"before tuning": source, "after tuning": tuned / "model"}.items():
            components = filters.components(load_model(place), COMPONENTS)[0]
            arrays.setdefault(f"{way}, {stage}", []).append(components.half().numpy())
            for layer, heads in enumerate(distances(place, valid.images)):
                rows += [{"way": way, "seed": seed, "quantity": f"mean_distance {stage}", "layer": layer, "head": h,
                          "mean_distance": float(value)} for h, value in enumerate(heads)]  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", required=True, help="a data set with 50 classes or more")
    parser.add_argument("--runs", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--out", type=Path, required=True, help="CSV to write")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1000, help="steps of pre-training")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change masked-tuning")
    options = parser.parse_args()
    options.runs.mkdir(parents=True, exist_ok=True)
    train, valid = (images_of(options.data, split) for split in ("train", "valid"))
    command = f"python benchmarks/masked.py --data {Path(options.data).name} --runs RUNS --out {options.out}"
    command += f" --seeds {options.seeds} --steps {options.steps}" + "".join(f" --set {s}" for s in options.set)
    rows, arrays = [], {}
    for seed in range(options.seeds):
        rows += of_seed(seed, train, valid, options, arrays)
        np.savez_compressed(options.out.with_suffix(".npz"), **{name: np.stack(each) for name, each in arrays.items()})
        found = [rounded(row | about(command), lambda value: f"{value:.4g}") for row in rows]
        write(options.out, found)


if __name__ == "__main__":
    main()
