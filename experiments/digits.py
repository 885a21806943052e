"""Five-fold cross-validation of the recipe "digits" over all 1,797 images of scikit-learn's digits.

    python -m experiments.digits --out data/results/digits.csv
    ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 python -m experiments.digits --out data/results/digits-avx2.csv

One row per fold: top-1 of the raw and of the averaged weights after the last step, and the seconds of training and
validation. The last rows are mean and standard deviation.
"""

import argparse
import platform
import statistics
import time
from pathlib import Path

import torch

from experiments.results import rounded, sentence, write
from vitlens import data as datasets
from vitlens.train import fit
from vitlens.train.recipes import recipe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="CSV to write")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the recipe")
    options = parser.parse_args()
    plan, rows = recipe("digits").override(*options.set), []
    for fold in range(5):
        data = tuple(datasets.load("digits", split, fold=fold) for split in ("train", "valid"))
        model, start = plan.build(), time.perf_counter()
        for step in fit(model, data, plan, device="cpu"):  # noqa: B007
            pass
        rows.append({
            "fold": fold, "images": len(data[1]), **step.metrics, "seconds": time.perf_counter() - start
        })  # fmt: skip
        print(rows[-1], flush=True)
    columns = list(rows[0])[2:]
    for name, of in (("mean", statistics.mean), ("std", statistics.stdev)):
        summary = {column: of([row[column] for row in rows[:5]]) for column in columns}
        rows.append({"fold": name, "images": sum(row["images"] for row in rows[:5]), **summary})
    parameters = sum(p.numel() for p in model.parameters())
    command = "python -m experiments.digits" + "".join(f" --set {s}" for s in options.set)
    processor = f"{platform.machine()} with {torch.backends.cpu.get_cpu_capability()}"
    note = f"{sentence(command)}, {processor}, {parameters:,} parameters, {plan.epochs} epochs"
    write(options.out, [rounded(row, lambda v: round(v, 2)) for row in rows], note)
    print(rows[-2], rows[-1], sep="\n")


if __name__ == "__main__":
    main()
