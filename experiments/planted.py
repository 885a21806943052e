"""A planted truth: how often each method points at the one patch that decides the class.

    python -m experiments.planted --out data/results/planted.csv
    python -m experiments.planted --weights data/checkpoints/planted     # the model of seed 1, for the tests

For each seed a small ViT learns pictures of `vitlens.data.marks`, in which the color of one patch is the
class. Then every method explains new pictures, and its highest patch is compared with the planted one: `one`, pictures
with one mark; `two`, pictures with two marks of different classes, asked for each of the two; `contrast`, the same, why
the first rather than the second. Shares over all pictures of all seeds, and the least share of a seed; chance is 1/64.
Of two marks a map that knows no class can be right about one of the two questions only. --only measures single methods,
and puts their rows into the table that is there.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch

from experiments.results import about, kept, write
from vitlens.attribution import METHODS
from vitlens.data.augment import normalized
from vitlens.data.marks import planted
from vitlens.train import export, fit
from vitlens.train.planted import RECIPE

COVERS = 1024  # of KernelSHAP, in pairs: its default for 64 patches
SETTINGS = {"kernel_shap": {"n_samples": COVERS}, "occlusion": {"window": 1}}
NAMES = tuple(METHODS)


def trained(seed: int, train, valid) -> torch.nn.Module:
    plan = RECIPE.override(f"seed={seed}")
    model = plan.build()
    *_, last = fit(model, (train.data, valid.data), plan, device="cpu")
    print(f"seed {seed}: {last.metrics['top1']:.1f} % of new pictures are named right", flush=True)
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--out", type=Path, help="CSV to write")
    wanted.add_argument("--weights", type=Path, help="folder to write the model of seed 1 to, and no table")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=[], help="single methods to measure")
    options = parser.parse_args()
    how = {"seeds": options.seeds, "images": options.images}
    rows, names = kept(options.out, options.only, how) if options.out else [], options.only or NAMES
    train, valid = planted(4000, 0), planted(400, 1)
    if options.weights:
        export(trained(1, train, valid), options.weights, RECIPE, train.data.class_names)
        return
    one, two = planted(options.images, 2), planted(options.images, 3, marks=2)
    cases = {"one": [(one, 0, None)], "two": [(two, 0, None), (two, 1, None)], "contrast": [(two, 0, 1)]}
    hits: dict[str, dict[str, list[float]]] = {name: {case: [] for case in cases} for name in names}
    seconds = dict.fromkeys(names, 0.0)
    for seed in range(options.seeds):
        model = trained(seed, train, valid)
        for name in names:
            method, start = METHODS[name], time.perf_counter()
            for case, asked in cases.items():
                found = []
                for pictures, mark, other in asked:
                    x = normalized(pictures.data.images, model.pretrained_cfg["mean"], model.pretrained_cfg["std"])
                    against = None if other is None else pictures.classes[:, other]
                    maps = method(model, x, pictures.classes[:, mark], against=against, **SETTINGS.get(name, {}))
                    found.append(pictures.hits(maps, mark).float().mean().item())
                hits[name][case].append(statistics.mean(found))
            seconds[name] += time.perf_counter() - start
            print(name, {case: round(values[-1], 3) for case, values in hits[name].items()}, flush=True)
    how |= about(f"python -m experiments.planted{' --only ' * bool(options.only)}{' '.join(options.only)}")
    for name in names:
        row = {"method": name}
        for case, values in hits[name].items():
            row |= {case: round(statistics.mean(values), 4), f"{case}_least": round(min(values), 4)}
        row["ms_per_map"] = round(1000 * seconds[name] / (4 * options.images * options.seeds), 1)
        rows.append(row | {"covers": f"{COVERS} in pairs" if name == "kernel_shap" else ""} | how)
    rows.sort(key=lambda row: -float(row["two"]))
    write(options.out, rows)


if __name__ == "__main__":
    main()
