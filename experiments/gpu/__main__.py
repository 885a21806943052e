"""Measurements that need a GPU, first things first. --tiny tries the same path on a CPU.

python -m experiments.gpu 1 --out data/results/kernels-h200.csv      # ways to compute statistics of attention
python -m experiments.gpu 2 --out data/results/gpu-tests.json        # the tests of tests/gpu
    python -m experiments.gpu 3 --out data/results/attention-h200.csv    # time and memory of attention statistics
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from experiments.results import about, command, parser, write

ROOT = Path(__file__).parents[2]


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


ROWS = {1: write_statistics, 2: run_tests, 3: write_attention}


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("row", type=int, choices=ROWS, help="number of the measurement")
    options = options.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.tiny:
        sys.exit("PyTorch finds no CUDA device here. Add --tiny to try the same path on a CPU.")
    if options.row == 1 and device.type == "cpu" and "TRITON_INTERPRET" not in os.environ:
        # Triton reads the variable when it is imported, so another process runs the same command
        words = sys.argv[1:] if arguments is None else map(str, arguments)
        again = [sys.executable, "-m", "experiments.gpu", *words]
        sys.exit(subprocess.run(again, env=os.environ | {"TRITON_INTERPRET": "1"}).returncode)
    how = about(command("experiments.gpu", arguments), device)
    ROWS[options.row](options.out.absolute(), options.tiny, device, how)


if __name__ == "__main__":
    main()
