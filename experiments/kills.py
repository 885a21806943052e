"""Runs that are killed at random moments and resumed, beside one that is not: are the final weights equal to the bit?

    python -m experiments.kills --out data/results/kills.csv

Each run of the recipe "digits" (2 epochs) is killed with SIGKILL several times, after a random time that is drawn anew,
and resumed until it is done. It saves after every step, and about half of the kills wait for a save to begin.
One row per run: how often it was killed, at which steps, how often within a save (a temporary file was left, or the
tensors of a checkpoint without its JSON), how many checkpoints were passed over as damaged, and whether the weights,
their average and the log are those of the uninterrupted run.
"""

import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import safetensors.torch
import torch

from experiments.results import about, command, parser, write

CHILD = """
import sys, dataclasses
from vitlens.data import load
from vitlens.train.recipes import recipe
from vitlens.train import fit
data = [load("digits", split) for split in ("train", "valid")]
if count := int(sys.argv[2]):
    data = [split.subset(count) for split in data]
plan = dataclasses.replace(recipe("digits"), epochs=2, save_every=0.0, log_every=1)
for step in fit(plan.build(), data, plan, device="cpu", out=sys.argv[1], resume=True):
    print(step.step, flush=True)
"""


def child(folder: Path, images: int) -> subprocess.Popen:
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-c", CHILD, str(folder), str(images)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def final(folder: Path) -> tuple[dict[str, torch.Tensor], list]:
    """Tensors of the last checkpoint, and the log without its times."""
    newest = max((folder / "checkpoints").glob("*.safetensors"))
    lines = [
        json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    return safetensors.torch.load_file(newest), [
        (line["step"], line["loss"], line["metrics"]) for line in lines
    ]


def wait_for_a_save(folder: Path, seconds: float) -> None:
    """Return as soon as a file is being written."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not any(
        p.name.startswith(".") for p in (folder / "checkpoints").iterdir()
    ):
        pass


def killed(folder: Path, images: int, most: int, rng: random.Random) -> dict:
    """Kill and resume a run until it gets to its end, at most so many times."""
    steps, in_saves, damaged = [], 0, 0
    while True:
        process, deadline = child(folder, images), None
        for line in process.stdout:
            damaged += "damaged" in line
            if line.strip().isdigit() and deadline is None:
                deadline = time.monotonic() + rng.uniform(0.0, 0.9)
            if deadline is not None and time.monotonic() > deadline and len(steps) < most:
                if rng.random() < 0.5:
                    time.sleep(rng.uniform(0.0, 0.06))  # anywhere in a step or in a save
                else:
                    wait_for_a_save(folder, 2.0)
                process.send_signal(signal.SIGKILL)
                break
        else:
            if process.wait() != 0:
                raise RuntimeError(f"A resumed run ended with exit code {process.returncode}.")
            return {
                "kills": len(steps),
                "steps": " ".join(map(str, steps)),
                "in_saves": in_saves,
                "damaged": damaged,
            }
        process.wait()
        process.stdout.close()
        files = {p.name for p in (folder / "checkpoints").iterdir()}
        torn = {
            f
            for f in files
            if f.endswith(".safetensors") and f.replace(".safetensors", ".json") not in files
        }
        in_saves += bool(torn or any(not f.endswith((".json", ".safetensors")) for f in files))
        steps.append(int(max(f for f in files if f.endswith(".json"))[5:13]) if files else 0)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--runs", type=int, default=20)
    options = options.parse_args(arguments)
    runs, how = 1 if options.tiny else options.runs, about(command("experiments.kills", arguments))
    images, most = (300, 2) if options.tiny else (0, 6)
    with tempfile.TemporaryDirectory() as name:
        whole = Path(name) / "whole"
        child(whole, images).communicate()
        tensors, log = final(whole)
        rows = []
        for run in range(runs):
            row = {"run": run, **killed(Path(name) / str(run), images, most, random.Random(run))}
            ours, lines = final(Path(name) / str(run))
            row["bit_equal"] = set(ours) == set(tensors) and all(
                torch.equal(ours[n], tensors[n]) for n in tensors
            )
            row["log_equal"] = lines == log
            rows.append(row | {"compared": len(tensors)} | how)
            print(row, flush=True)
    write(options.out, rows)
    print(
        f"{sum(row['kills'] for row in rows)} kills, equal to the bit: {sum(row['bit_equal'] for row in rows)} of "
        f"{len(rows)} runs"
    )


if __name__ == "__main__":
    main()
