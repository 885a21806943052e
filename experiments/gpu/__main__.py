"""Measurements that need a GPU, first things first. --tiny tries the same path on a CPU.

python -m experiments.gpu 1 --out data/results/kernels-h200.csv      # ways to compute statistics of attention
python -m experiments.gpu 2 --out data/results/gpu-tests.json        # the tests of tests/gpu
python -m experiments.gpu 3 --out data/results/attention-h200.csv    # time and memory of attention statistics
python -m experiments.gpu 4 --out data/results/throughput-h200.csv   # images a second in training
python -m experiments.gpu 5 --data tiny-imagenet --out choice.csv    # accuracy after two minutes, by settings
python -m experiments.gpu 6 --data tiny-imagenet --out data/results/time-to-accuracy.csv    # three seeds
python -m experiments.gpu 7 --data tiny-imagenet --out runs/10min    # a run of ten minutes, which continues
python -m experiments.gpu 9 --data tiny-imagenet --out data/results/data-size.csv    # accuracy by number of images

Row 8 is a chapter of the book: `python notebooks/execute.py`.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch

from experiments.results import about, command, parser, write
from vitlens.train import run
from vitlens.train.runs import holds_run

ROOT = Path(__file__).parents[2]
TEN_MINUTES = 9.5
"""Minutes of row 7, a little less than a device is often lent for one command."""


def write_statistics(out: Path, tiny: bool, device: torch.device, how: dict) -> None:
    """Write the table after each case, so that a device that is taken away leaves the first ones."""
    from experiments.gpu.statistics import CASES, REPEATS, TINY, measured

    rows = []
    for case in TINY if tiny else CASES:
        rows += [row | how for row in measured(case, device, 1 if tiny else REPEATS)]
        write(out, rows, digits=4)


def run_tests(out: Path, tiny: bool, device: torch.device, how: dict) -> None:
    """Run the GPU tests in another process. Without a GPU they are skipped."""
    script = ROOT / "tests" / "gpu" / "run.py"
    without_interpreter = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, str(script), "--out", str(out)]
    sys.exit(subprocess.run(command, cwd=ROOT, env=without_interpreter).returncode)


def write_attention(out: Path, tiny: bool, device: torch.device, how: dict) -> None:
    """Write the table of time and memory, with the ratio of the statistics to the forward with and without it."""
    from experiments.attention import write_gpu

    write_gpu(out, how, tiny)


def write_throughput(out: Path, tiny: bool, device: torch.device, how: dict) -> None:
    from experiments.training import main as measure

    measure(["--out", str(out), "--device", device.type, *["--tiny"] * tiny])


NARROW = [
    *["width=256", "heads=8", "depth=9", "mlp_ratio=3", "drop_path=0.05"],
    *["augment.rotate=15", "augment.jitter=0.3", "augment.erase=0.2"],
    *["patch_drop=0.5", "patch_drop_until=0.6", "average=0.998"],
]
FORMER = ["model.class_token=true", "model.global_pool=token", "augment.scale=0.4,1"]
CHOICES = {
    "as the recipe": [],
    "class token, crops from 0.4": FORMER,
    "patch dropout": ["patch_drop=0.5", "patch_drop_until=0.6"],
    "narrow": NARROW,
    "narrow, batch of 2048": [*NARROW, "batch_size=2048", "average=0.996"],
}
"""Changes of the recipe tiny-imagenet-2min that a device compares, with one seed each.

With batches of 512 the narrow model reached 46.9 % in 34 epochs, because the host set the pace.
"""


def write_choices(out: Path, tiny: bool, device: torch.device, data: str, settings: list) -> None:
    """Accuracy after two minutes for each of `CHOICES`, in one table."""
    for number, changes in enumerate(CHOICES.values()):
        table = out.with_stem(f"{out.stem}-{number}")
        write_accuracy(table, tiny, device, data, [*changes, *settings], "--seeds", "1")
    tables = [out.with_stem(f"{out.stem}-{number}") for number in range(len(CHOICES))]
    pd.concat([pd.read_csv(table) for table in tables]).to_csv(out, index=False)
    for table in tables:
        table.unlink()


def write_accuracy(
    out: Path, tiny: bool, device: torch.device, data: str, settings: list, *options: str
) -> None:
    """Accuracy after two minutes of the recipe tiny-imagenet-2min, by default with three seeds."""
    from experiments.time_to_accuracy import main as measure

    changes = [word for setting in settings for word in ("--set", setting)]
    place = ["--data", data, "--out", str(out), "--device", device.type]
    measure([*place, *["--tiny"] * tiny, *options, *changes])


def train_longer(out: Path, tiny: bool, device: torch.device, data: str, settings: list) -> None:
    """Train the recipe tiny-imagenet-10min into the folder `out`, or continue there, and export its model."""
    run(
        "tiny-imagenet-10min",
        data,
        out,
        overrides=settings,
        device=device.type,
        tiny=tiny,
        resume=holds_run(out),
        max_minutes=TEN_MINUTES,
        export=True,
    )


def write_data_size(out: Path, tiny: bool, device: torch.device, data: str, settings: list) -> None:
    """Train ViTs, a hybrid and a ResNet on 5,000 to 100,000 images, or continue in `runs/data-size`."""
    from experiments.studies import main as train_study

    runs = out.parent / "runs" if tiny else Path("runs/data-size")
    place = ["--data", data, "--out", str(out), "--runs", str(runs), "--device", device.type]
    train_study(["data-size", *place, *["--tiny"] * tiny])


ROWS = {1: write_statistics, 2: run_tests, 3: write_attention, 4: write_throughput}
WITH_DATA = {5: write_choices, 6: write_accuracy, 7: train_longer, 9: write_data_size}


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__)
    rows = [*ROWS, *WITH_DATA]
    options.add_argument("row", type=int, choices=rows, help="number of the measurement")
    options.add_argument("--data", help="Tiny-ImageNet, for rows 5 to 9")
    options.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = options.parse_args(arguments)
    if options.row in WITH_DATA and options.data is None:
        sys.exit(f"Row {options.row} trains on images. Add --data tiny-imagenet, or its folder.")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.tiny:
        sys.exit("PyTorch finds no CUDA device here. Add --tiny to try the same path on a CPU.")
    if options.row == 1 and device.type == "cpu" and "TRITON_INTERPRET" not in os.environ:
        # Triton reads the variable when it is imported, so another process runs the same command
        words = sys.argv[1:] if arguments is None else map(str, arguments)
        again = [sys.executable, "-m", "experiments.gpu", *words]
        sys.exit(subprocess.run(again, env=os.environ | {"TRITON_INTERPRET": "1"}).returncode)
    how = about(command("experiments.gpu", arguments), device)
    out = options.out.absolute()
    if options.row in WITH_DATA:
        WITH_DATA[options.row](out, options.tiny, device, options.data, options.set)
    else:
        ROWS[options.row](out, options.tiny, device, how)


if __name__ == "__main__":
    main()
