"""Fine-tuning a pre-trained ViT on a small image folder, beside a linear probe and nearest neighbors on its features.

    python -m experiments.finetune --model deit-tiny --data flowers5 --out data/results/finetune-flowers5.csv

Fine-tuning is `vitlens train --recipe finetune-small`, once for each seed, in a process of its own; accuracy is that of
the last step. The probe is `vitlens.evaluate.linear_probe` on what the head would read; of the same features the five
nearest neighbors vote, the nearer by cosine the more. Neither sees augmented images.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from sklearn.neighbors import KNeighborsClassifier

from experiments.results import rounded, sentence, write
from vitlens import data as datasets
from vitlens import load_model
from vitlens.evaluate import features, linear_probe
from vitlens.train.recipes import Recipe, recipe

RECIPE = "finetune-small"


def neighbors(train: tuple[torch.Tensor, torch.Tensor], valid: tuple[torch.Tensor, torch.Tensor]) -> float:
    return 100 * KNeighborsClassifier(5, metric="cosine", weights="distance").fit(*train).score(*valid)


def tuned(options: argparse.Namespace, plan: Recipe, seed: int) -> dict:
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "vitlens", "train", "--recipe", RECIPE, "--model", options.model, "--data",
                   options.data, "--out", out, "--device", "cpu", "--seed", str(seed)]  # fmt: skip
        for setting in options.set:
            command += ["--set", setting]
        start = time.perf_counter()
        subprocess.run(command, check=True)
        taken = time.perf_counter() - start
        account = json.loads((Path(out) / "training.json").read_text())
    top1 = account["validation"]["top1_average" if plan.average else "top1"]
    return {"method": "fine-tuning", "seed": seed, "top1": top1, "seconds": taken}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="a timm name, or a folder in timm's hub layout")
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, required=True, help="CSV to write")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the recipe")
    options = parser.parse_args()
    start, plan, model = time.perf_counter(), recipe(RECIPE).override(*options.set), load_model(options.model)
    train, valid = (
        features(model, datasets.load(options.data, split, size=plan.image_size, squash=plan.squash))
        for split in ("train", "valid")
    )
    extracted, rows = time.perf_counter() - start, []
    for name, measure in (("linear probe", linear_probe), ("nearest neighbors", neighbors)):
        start = time.perf_counter()
        score = measure(train, valid)
        rows.append({"method": name, "seed": "", "top1": score, "seconds": extracted + time.perf_counter() - start})
    for seed in range(options.seeds):
        rows.append(tuned(options, plan, seed))
        print(rows[-1], flush=True)
    scores, times = zip(*((row["top1"], row["seconds"]) for row in rows if row["method"] == "fine-tuning"), strict=True)
    for name, of in (("mean", statistics.mean), ("std", statistics.stdev)):
        rows.append({"method": "fine-tuning", "seed": name, "top1": of(scores), "seconds": of(times)})
    command = f"python -m experiments.finetune --model {Path(options.model).name} --data {Path(options.data).name}"
    command += "".join(f" --set {s}" for s in options.set)
    note = f"{sentence(command)}, {len(train[1])} + {len(valid[1])} images"
    write(options.out, [rounded(row, lambda v: round(v, 2)) for row in rows], note)
    print(*rows, sep="\n")


if __name__ == "__main__":
    main()
