"""Five-fold cross-validation of the recipe "digits" over all 1,797 images of scikit-learn's digits.

    python -m experiments.digits --out data/results/digits.csv
    ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 python -m experiments.digits --out data/results/digits-avx2.csv

One row per fold: top-1 of the raw and of the averaged weights after the last step, and the seconds of training and
validation. The last rows are mean and standard deviation.
"""

import statistics
import time
from collections.abc import Sequence

import torch

from experiments.results import about, command, parser, rounded, write
from vitlens import data as datasets
from vitlens.train import fit
from vitlens.train.recipes import recipe


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change the recipe"
    )
    options = options.parse_args(arguments)
    plan, rows = recipe("digits").override(*options.set), []
    plan = plan.tiny() if options.tiny else plan
    for fold in range(5):
        data = tuple(datasets.load("digits", split, fold=fold) for split in ("train", "valid"))
        if options.tiny:
            data = tuple(split.subset(64) for split in data)
        model, start = plan.build(), time.perf_counter()
        for step in fit(model, data, plan, device="cpu"):  # noqa: B007
            pass
        rows.append(
            {
                "fold": fold,
                "images": len(data[1]),
                **step.metrics,
                "seconds": time.perf_counter() - start,
            }
        )
        print(rows[-1], flush=True)
    columns = list(rows[0])[2:]
    for name, of in (("mean", statistics.mean), ("std", statistics.stdev)):
        summary = {column: of([row[column] for row in rows[:5]]) for column in columns}
        rows.append({"fold": name, "images": sum(row["images"] for row in rows[:5]), **summary})
    how = {
        "processor": torch.backends.cpu.get_cpu_capability(),
        **about(command("experiments.digits", arguments)),
    }
    write(options.out, [rounded(row, lambda v: round(v, 2)) | how for row in rows])


if __name__ == "__main__":
    main()
