"""Fine-tuning a pre-trained ViT on a small image folder, compared with a linear probe and nearest neighbors.

    python -m experiments.finetune --model deit-tiny --data flowers5 --out data/results/finetune-flowers5.csv

Fine-tuning is `vitlens train --recipe finetune-small`, once for each seed, in a separate process. Accuracy is that of
the last step. The probe is `evaluate.linear_probe` on the input of the head. The five nearest neighbors vote by
their cosine on the same features. Neither is trained on augmented images.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import torch
from sklearn.neighbors import KNeighborsClassifier

from experiments.results import about, command, parser, rounded, write
from vitlens import data as datasets
from vitlens import load_model
from vitlens.train.recipes import Recipe, recipe
from vitlens_paper.evaluate import features, linear_probe

RECIPE = "finetune-small"


def neighbors(
    train: tuple[torch.Tensor, torch.Tensor], valid: tuple[torch.Tensor, torch.Tensor]
) -> float:
    return 100 * KNeighborsClassifier(5, metric="cosine", weights="distance").fit(*train).score(
        *valid
    )


def tuned(options: Namespace, plan: Recipe, seed: int) -> dict:
    with tempfile.TemporaryDirectory() as out:
        words = [
            sys.executable,
            "-m",
            "vitlens",
            "train",
            "--recipe",
            RECIPE,
            "--model",
            options.model,
            "--data",
            options.data,
            "--out",
            out,
            "--device",
            "cpu",
            "--seed",
            str(seed),
            "--watch",
            "0",
        ]
        for setting in options.set:
            words += ["--set", setting]
        start = time.perf_counter()
        subprocess.run(words, check=True)
        taken = time.perf_counter() - start
        account = json.loads((Path(out) / "training.json").read_text(encoding="utf-8"))
    top1 = account["validation"]["top1_average" if plan.average else "top1"]
    return {"method": "fine-tuning", "seed": seed, "top1": top1, "seconds": taken}


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__, data=True)
    options.add_argument(
        "--model", required=True, help="a timm name, or a folder in timm's hub layout"
    )
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change the recipe"
    )
    options = options.parse_args(arguments)
    if options.tiny:
        options.seeds, options.set = 2, [*options.set, "epochs=1", "batch_size=4"]
    start, plan, model = (
        time.perf_counter(),
        recipe(RECIPE).override(*options.set),
        load_model(options.model),
    )
    train, valid = (
        features(
            model, datasets.load(options.data, split, size=plan.image_size, squash=plan.squash)
        )
        for split in ("train", "valid")
    )
    extracted, rows = time.perf_counter() - start, []
    for name, measure in (("linear probe", linear_probe), ("nearest neighbors", neighbors)):
        start = time.perf_counter()
        score = measure(train, valid)
        rows.append(
            {
                "method": name,
                "seed": "",
                "top1": score,
                "seconds": extracted + time.perf_counter() - start,
            }
        )
    for seed in range(options.seeds):
        rows.append(tuned(options, plan, seed))
        print(rows[-1], flush=True)
    scores, times = zip(
        *((row["top1"], row["seconds"]) for row in rows if row["method"] == "fine-tuning"),
        strict=True,
    )
    for name, of in (("mean", statistics.mean), ("std", statistics.stdev)):
        rows.append(
            {"method": "fine-tuning", "seed": name, "top1": of(scores), "seconds": of(times)}
        )
    how = {
        "images": len(train[1]),
        "valid_images": len(valid[1]),
        **about(command("experiments.finetune", arguments)),
    }
    write(options.out, [rounded(row, lambda v: round(v, 2)) | how for row in rows])


if __name__ == "__main__":
    main()
