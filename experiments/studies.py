"""The paper in miniature: the models, the data and the choices of its figures and tables on small images.

    python -m experiments.studies positions-cpu --data torch/fashion_mnist --out data/results/positions-cpu.csv

trains the models of a study, seed by seed, in --runs (by default `runs/NAME`), where the same command continues after a
stop. It writes a row for each training to --out and, with --inside, the filters, position similarity, attention
distances and rollouts of each model to an NPZ file. `designs.STUDIES` has the studies, with reasons for their numbers.
"""

import io
import json
import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from PIL import ImageOps
from torch import nn

import vitlens_paper as paper
from experiments.designs import STUDIES, Cell, Study, study
from experiments.results import about, command, parser, write
from experiments.small_data import change_under
from vitlens import plot, samples
from vitlens.data import ImageSet, load
from vitlens.data.augment import normalize
from vitlens.images import ModelInput
from vitlens.scores import of_seeds, proportion, student
from vitlens.train import export, fit, snapshots
from vitlens.train.criteria import ObjectiveLoss
from vitlens.train.recipes import Recipe
from vitlens.train.run_folder import pretraining_prefixes
from vitlens_paper.evaluate import compute, features, few_shot, linear_probe, support

SHOTS, DRAWS = 5, 3
PROBED = 100
"""Validation images that attention distances, with those of the photograph, and changes under flips are means of."""
KEPT = ("filters", "filters_variance", "positions", "distances", "rollout")
PICTURE, PHOTOGRAPH = "picture", "chelsea"
COLUMNS = {
    "filters": "Embedding filters",
    "positions": "Position similarity",
    "distances": "Attention distance by head (px)",
    "rollout": "Rollout",
}
ROW = 168
"""Height of a row of `variants` in pixels."""


def run_study(
    study: Study,
    data: str,
    out: Path | str,
    *,
    device: str | None = None,
    command: str = "",
    **options,
) -> list[dict]:
    """The records of all trainings of a study, in the order of its cells; those that `out` has are read from there.

    data, options: for `vitlens.data.load`. A record has the model's name, kind, parameters and FLOPs of one image;
    images, seed, steps, epochs and precision; accuracies in per cent: `top1` after the last step with the 95 % interval
    `low` to `high` of the validation images, `best`, the highest top-1 on the way, and `five_shot`; exaFLOPs without
    dropped patches and seconds, both without validation and with the pre-training; the machine, versions and the
    command. After a pre-training, `probe` is top-1 of a linear probe before the labels.
    """
    out, cells = Path(out), list(study.cells())
    splits = [
        chosen(
            load(data, split, size=study.recipe.image_size, stream=False, **options), study.classes
        )
        for split in ("train", "valid")
    ]
    if study.recipe.valid_images:
        splits[1] = splits[1].subset(min(study.recipe.valid_images, len(splits[1])))
    for number, cell in enumerate(cells, 1):
        path = out / "cells" / f"{cell.name}.json"
        if not path.exists():
            print(f"{number} of {len(cells)}: {cell}", flush=True)
            record = trained(study, cell, splits, out, device) | about(command, device or "cpu")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(record, indent=1, ensure_ascii=False), encoding="utf-8")
        shutil.rmtree(out / "runs" / cell.name, ignore_errors=True)
    return [
        json.loads((out / "cells" / f"{cell.name}.json").read_text(encoding="utf-8"))
        for cell in cells
    ]


def trained(
    study: Study, cell: Cell, splits: Sequence[ImageSet], out: Path, device: str | None
) -> dict:
    """Train one cell from its newest checkpoint, export it, store its snapshot, and return its record."""
    variant, plan, (train, valid) = study.models[cell.model], study.plan(cell), splits
    folder, model = out / "runs" / cell.name, variant.build(plan)
    inside = out / "cells" / f"{cell.name}.npz"
    data = train.select_rows(support(train.labels, cell.images // study.classes, cell.seed)), valid
    trainings, extra = {folder: plan}, {}
    if before := variant.before(plan):
        learner = variant.build(before)
        for _ in fit(
            learner, (train, valid), before, out=folder / "before", resume=True, device=device
        ):
            pass
        head = ("head.", *pretraining_prefixes(learner, before))
        state = {
            name: each for name, each in learner.state_dict().items() if not name.startswith(head)
        }
        model.load_state_dict({**model.state_dict(), **state})
        trainings[folder / "before"] = before
    if any(each.pretraining for each in study.models.values()):
        look(inside, 0, model, valid, plan)
        probe = linear_probe(*(features(model.to(device or "cpu"), split) for split in data))
        extra = {
            "pretraining": before.name if before else "",
            "pretraining_steps": before.steps if before else 0,
            "unlabeled": len(train) if before else 0,
            "probe": round(probe, 3),
        }
    for _ in fit(model, data, plan, out=folder, resume=True, device=device):
        pass
    if variant.kind != "ResNet":
        look(inside, plan.steps, model, valid, plan)
    if not variant.network:
        export(model, out / "models" / cell.name, plan, valid.class_names)
    elif variant.kind != "ResNet":
        variant.network.save(model, out / "models" / cell.name, plan, valid.class_names)
    logs = {
        path: [
            json.loads(line)
            for line in (path / "log.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        for path in trainings
    }
    reached = [line["metrics"]["top1"] for line in logs[folder] if line["metrics"]]
    shares = proportion(round(reached[-1] * len(valid) / 100), len(valid))
    return {
        "study": study.name,
        "model": cell.model,
        "kind": variant.kind,
        "settings": f"{variant.settings} {variant.choices}".strip(),
        "lr": plan.lr,
        "parameters": compute.parameters(model),
        "flops": flops(model, plan),
        "images": cell.images,
        "classes": study.classes,
        "seed": cell.seed,
        "steps": plan.steps,
        "epochs": round(plan.steps * plan.batch_size / cell.images, 2),
        "precision": plan.precision,
        **{
            name: round(value, 3)
            for name, value in zip(("top1", "low", "high"), shares, strict=True)
        },
        "best": round(max(reached), 3),
        "five_shot": round(five_shot(model, valid, plan.num_classes), 3),
        "validation_images": len(valid),
        "exaflops": sum(exaflops(variant.build(each), each) for each in trainings.values()),
        "seconds": round(sum(seconds(logs[path], each) for path, each in trainings.items()), 1),
        **extra,
        **{
            f"{group}_{quantity}_{when}": float(f"{value:.3g}")
            for group in study.turns
            for when, change in change_under(
                group, model, snapshots.probe(valid, plan, PROBED)
            ).items()
            for quantity, value in vars(change).items()
        },
    }


def chosen(images: ImageSet, classes: int) -> ImageSet:
    """Images of `classes` random classes, renumbered from 0. The choice depends on the number only."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(images.class_names), generator=generator)
    return images.select_classes(sorted(order[:classes].tolist()))


def look(path: Path, step: int, model: nn.Module, valid: ImageSet, plan: Recipe) -> None:
    """Store the arrays of `snapshots.record` after so many steps with labels, and the image of the first rollout."""
    photograph = free_photograph(plan.image_size)
    probe = torch.cat(
        [
            normalize(photograph[None], plan.mean, plan.std),
            snapshots.probe(valid, plan, PROBED),
        ]
    )
    seen = snapshots.record(model, probe.to(next(model.parameters()).device))
    seen[PICTURE] = photograph.permute(1, 2, 0).numpy()
    snapshots.save(path, step, seen)


def free_photograph(size: int) -> torch.Tensor:
    """(3, size, size) uint8 photograph for the rollout, because images of most data sets may not be shown."""
    square = ImageOps.fit(samples()[PHOTOGRAPH], (size, size))
    return torch.from_numpy(np.array(square)).permute(2, 0, 1)


def flops(model: nn.Module, plan: Recipe, patch_drop: float = 0.0) -> int:
    """FLOPs of one forward pass of one image in a training by `plan`, with the parts of its objective."""
    whole = model if not hasattr(model, "objective") else ObjectiveLoss(model)
    return compute.flops(whole, plan.image_size, patch_drop=patch_drop)


def exaflops(model: nn.Module, plan: Recipe) -> float:
    """ExaFLOPs of a training by `plan`; patches that it drops are embedded and go no further."""
    dropping = sum(step / plan.steps < plan.patch_drop_until for step in range(plan.steps))
    part, whole = (flops(model, plan, share) for share in (plan.patch_drop, 0.0))
    return compute.exaflops(dropping * part + (plan.steps - dropping) * whole, plan.batch_size, 1)


def seconds(log: list[dict], plan: Recipe) -> float:
    """Seconds of a training without validation, by its log."""
    # Steps and speed of each reading but the first, in which a model may be compiled.
    taken = [
        (b["step"] - a["step"], b["images_per_second"]) for a, b in pairwise([{"step": 0}, *log])
    ]
    taken = taken[1:] or taken
    return (
        sum(n / speed for n, speed in taken)
        * plan.steps
        * plan.batch_size
        / sum(n for n, _ in taken)
    )


def five_shot(model: nn.Module, valid: ImageSet, classes: int) -> float:
    """Top-1 (%) of least squares on the features of 5 validation images of each class, on all others; mean of 3 draws.

    Unlike in the paper's Fig. 4, the model was trained on these classes, without transfer to another data set.
    """
    x, y = features(model, valid)
    scores = []
    for seed in range(DRAWS):
        rows = support(y, SHOTS, seed)
        rest = torch.ones(len(y), dtype=torch.bool).index_fill(0, rows, False)
        scores += few_shot((x, y), (x[rest], y[rest]), {SHOTS: [rows]}, classes)[SHOTS]
    return sum(scores) / DRAWS


def insides(
    study: Study, folder: Path | str
) -> tuple[dict[str, dict[str, np.ndarray]], np.ndarray]:
    """By model, the arrays of all its trainings with the most images, and the image of the first rollout.

    The first axis of each array is the seed (S, …). Arrays that a model lacks are left out. A study with
    pre-training has each model twice, the second time as "NAME, before tuning". The image is uint8 (h, w, 3).
    """
    stages, found = {"": -1}, {}
    if any(model.pretraining for model in study.models.values()):
        stages[", before tuning"] = 0
    for name, model in study.models.items():
        if model.kind == "ResNet":
            continue
        cells = [Cell(name, max(study.sizes), seed) for seed in study.seeds]
        each = [snapshots.load(Path(folder) / "cells" / f"{cell.name}.npz") for cell in cells]
        for title, k in stages.items():
            arrays = {
                key: np.stack([one[key][k] for one in each]) for key in KEPT if key in each[0]
            }
            if "rollout" in arrays:
                arrays["rollout"] = arrays["rollout"][:, :1]  # that of the stored image
            found[name + title] = arrays
    return found, each[0][PICTURE][0]


def write_insides(
    path: Path | str, found: Mapping[str, Mapping[str, np.ndarray]], picture: np.ndarray
) -> None:
    """Write the result of `insides` as a compressed `.npz`."""
    arrays = {
        f"{model}/{name}": array
        for model, arrays in found.items()
        for name, array in arrays.items()
    }
    np.savez_compressed(buffer := io.BytesIO(), **{PICTURE: picture}, **arrays)
    Path(path).write_bytes(buffer.getvalue())


def read_insides(path: Path | str) -> tuple[dict[str, dict[str, np.ndarray]], np.ndarray | None]:
    """Arrays by model, and the image or None, of a file that `write_insides` wrote."""
    arrays, found = snapshots.load(path), {}
    picture = arrays.pop(PICTURE, None)
    for key, array in arrays.items():
        model, _, name = key.rpartition("/")
        found.setdefault(model, {})[name] = array
    return found, picture


def read_table(path: Path | str) -> list[dict]:
    """The rows of a table, numbers as numbers, exactly as they were written."""
    rows = pd.read_csv(path, dtype=str, keep_default_na=False).to_dict("records")
    return [{name: _number(text) for name, text in row.items()} for row in rows]


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def curves(
    records: Iterable[dict], metric: str = "top1", over: str = "seeds"
) -> dict[str, list[tuple]]:
    """By model, rows of (training images, mean over the seeds, low, high), for `paper.few_shot`.

    over: of the 95 % interval. "seeds": other seeds, Student's interval of the mean; "images": other validation images,
    Wilson's, a mean over the seeds; of `top1` alone.
    """
    curves: dict[str, list[tuple]] = {}
    for (model, images), cells in pd.DataFrame(records).groupby(["model", "images"], sort=False):
        shares = (
            of_seeds(cells[metric])
            if over == "seeds"
            else cells[["top1", "low", "high"]].mean().tolist()
        )
        curves.setdefault(model, []).append((int(images), *shares))
    return {model: sorted(rows) for model, rows in curves.items()}


def rates(records: Iterable[dict], metric: str = "top1") -> dict[str, list[tuple]]:
    """By model, which is called "NAME, RATE", rows of (learning rate, mean over the seeds, low, high)."""
    curves: dict[str, list[tuple]] = {}
    for (model, rate), cells in pd.DataFrame(records).groupby(["model", "lr"], sort=False):
        curves.setdefault(model.rpartition(", ")[0], []).append(
            (float(rate), *of_seeds(cells[metric]))
        )
    return {model: sorted(rows) for model, rows in curves.items()}


def scales(records: Iterable[dict], baseline: str, metric: str = "top1") -> dict[str, list[tuple]]:
    """A curve for each scaled dimension, from the models called "DIMENSION, STEP" and the baseline.

    Rows are (FLOPs of one image divided by the baseline's, mean over the seeds, low, high).
    """
    groups = pd.DataFrame(records).groupby("model", sort=False)
    points = {
        model: (float(cells["flops"].iloc[0]), *of_seeds(cells[metric])) for model, cells in groups
    }
    whole = points[baseline][0]
    points = {model: (flops / whole, *shares) for model, (flops, *shares) in points.items()}
    start, curves = points.pop(baseline), {}
    for model, point in points.items():
        curves.setdefault(model.rpartition(", ")[0], [start]).append(point)
    return {name: sorted(rows) for name, rows in curves.items()}


def lead(records: Iterable[dict], first: str, second: str, metric: str = "top1") -> list[tuple]:
    """Difference of two models: rows of (training images, mean, low, high), in points.

    Trainings with the same seed saw the same images, so differences are taken within seeds; the 95 % interval of their
    mean is Student's, infinite for a single seed.
    """
    paired = pd.DataFrame(records).pivot_table(metric, ["images", "seed"], "model", aggfunc="last")
    rows = []
    for images, ahead in (paired[first] - paired[second]).dropna().groupby(level="images"):
        mean, half = float(ahead.mean()), student(ahead)
        rows.append((int(images), mean, mean - half, mean + half))
    return rows


def against(
    records: Iterable[dict], baseline: str, metric: str = "top1"
) -> list[tuple[str, float, float, float, int]]:
    """Lead of each other model of a table of one size over `baseline`: rows of (model, mean, low, high, seeds).

    Means and intervals are those of `lead`; seeds: `seeds_needed`. In the order of the table.
    """
    table = pd.DataFrame(records)
    paired, rows = table.pivot_table(metric, "seed", "model", aggfunc="last"), []
    for model in table["model"].unique():
        if model != baseline:
            ((_, mean, low, high),) = lead(records, model, baseline, metric)
            rows.append(
                (model, mean, low, high, seeds_needed((paired[model] - paired[baseline]).dropna()))
            )
    return rows


def seeds_needed(differences: Sequence[float], power: float = 0.8, most: int = 10_000) -> int:
    """Number of seeds with which a paired t-test at 5 % finds a mean difference like this one, with that chance.

    As if the mean and the standard deviation (n - 1) of `differences` were the true ones: an order of magnitude. `most`
    stands for more.
    """
    from scipy.stats import (
        f,
        ncf,
    )  # t² is F; the two tails of a noncentral t are not always numbers in SciPy

    mean, std = np.mean(differences), np.std(differences, ddof=1)
    if not mean:
        return most
    effect = np.inf if std == 0 else (mean / std) ** 2
    for n in range(2, most):
        if effect == np.inf or ncf.sf(f.ppf(0.95, 1, n - 1), 1, n - 1, effect * n) >= power:
            return n
    return most


def models_figure(records: list[dict], baseline: str):
    """Accuracy of each model with its interval over the seeds and every single seed; the baseline's is dashed."""
    points = {
        model: [r["top1"] for r in records if r["model"] == model]
        for model in {r["model"]: 0 for r in records}
    }
    values = {model: sum(found) / len(found) for model, found in points.items()}
    errors = {model: student(found) if len(found) > 1 else 0.0 for model, found in points.items()}
    label = "Top-1 (%): mean, 95 % interval, single seeds"
    dashed = f"; dashed: mean of “{baseline}”" if baseline else ""
    return plot.intervals(
        values, errors, points=points, level=values.get(baseline), xlabel=label + dashed
    )


FIGURES = {
    "sizes": lambda records, _: paper.few_shot(
        curves(records), xlabel="Training images", ylabel="Top-1 (%)"
    ),
    "models": models_figure,
    "rates": lambda records, _: paper.few_shot(
        rates(records), xlabel="Learning rate", ylabel="Top-1 (%)"
    ),
    "scaling": lambda records, baseline: paper.few_shot(
        scales(records, baseline),
        xlabel=f"FLOPs of an image, as a multiple of those of the {baseline} model",
        ylabel="Top-1 (%)",
    ),
}


def figure(study: Study, records: Iterable[dict]):
    """The Matplotlib figure of a study's records."""
    return FIGURES[study.figure](list(records), study.baseline)


def variants(
    found: Mapping[str, Mapping[str, np.ndarray]],
    *,
    picture: np.ndarray,
    image: int = 0,
    uniform: float | None = None,
) -> plt.Figure:
    """Rows of models by columns of filters, position similarity, distance by head and rollout (paper, Fig. 6 and 7).

    found: by model the arrays of `snapshots.record`; where one is missing, its panel is "none". picture: the image of
    rollout number `image`. uniform: the distance of uniform attention, a dashed line. Distances share one scale,
    similarities are cosines from −1 (blue) to 1 (red), every filter and every rollout is scaled on its own.
    """
    measured = [
        np.nanmax(arrays["distances"]) for arrays in found.values() if "distances" in arrays
    ]
    with plt.style.context(plot.STYLE):
        height = (ROW * len(found) + 34) / 100
        page = plt.figure(figsize=(9, height), layout="constrained")
        grid = page.subplots(len(found), 5, width_ratios=[104, 300, 150, 230, 120], squeeze=False)
        for (label, *axes), (name, arrays) in zip(grid, found.items(), strict=True):
            label.axis("off")
            label.text(0, 0.5, textwrap.fill(name, 15), va="center", size=10, parse_math=False)
            for ax, key in zip(axes, COLUMNS, strict=True):
                if key not in arrays:
                    ax.axis("off")
                    ax.text(0.5, 0.5, "none", ha="center", va="center", color="0.45")
                    continue
                values = np.asarray(arrays[key], np.float32)
                if key == "filters":
                    plot.filters(
                        values[np.abs(values).max((1, 2, 3)) > 0][:21], cols=7, ax=ax
                    )  # not the padding
                    ax.set_xlabel("")
                elif key == "positions":
                    plot.position_similarity(values.clip(-1, 1), ax=ax)
                    ax.child_axes[0].remove()
                    ax.set(xlabel="", ylabel="", xticks=[], yticks=[])
                elif key == "distances":
                    plot.attention_distance(values, ax=ax)
                    ax.set(ylim=(0, 1.08 * max(*measured, uniform or 0)), ylabel="", xlabel="Layer")
                    if uniform:
                        ax.axhline(uniform, color="0.5", linestyle="--", linewidth=0.9)
                else:
                    plot.overlay(ModelInput(picture[None])[0], values[image], ax=ax, colorbar=False)
                ax.set_title("")
        for ax, title in zip(grid[0][1:], COLUMNS.values(), strict=True):
            ax.set_title(title, size=9.5, loc="center")
        for ax in grid[:-1, 3]:
            ax.set_xlabel("")
    return page


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("study", choices=list(STUDIES))
    options.add_argument("--data", required=True, help="a data set, as for `vitlens train`")
    options.add_argument("--runs", type=Path, help="folder of its trainings, which continue there")
    options.add_argument(
        "--inside", type=Path, help="NPZ file to write: filters, positions, attention of each model"
    )
    options.add_argument("--figure", type=Path, help="image file to write, such as study.png")
    options.add_argument("--device", help="cuda or cpu")
    options = options.parse_args(arguments)
    chosen = study(options.study).tiny() if options.tiny else study(options.study)
    runs = options.runs or Path("runs", options.study)
    made_by = command("experiments.studies", arguments)
    records = run_study(chosen, options.data, runs, device=options.device, command=made_by)
    write(options.out, records)
    if options.inside:
        write_insides(options.inside, *insides(chosen, runs))
    if options.figure:
        figure(chosen, records).savefig(options.figure)


if __name__ == "__main__":
    main()
