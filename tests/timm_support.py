"""Which of timm's models are captured and which are refused, found out on the meta device at full size.

    python tests/timm_support.py data/results/timm-support.csv

writes the table that `test_timm.py` compares with. Takes a few minutes for all names.
"""

import csv
import sys
from pathlib import Path

import timm
import torch

from vitlens.recorder.record import capture
from vitlens.recorder.supported import UnsupportedModelError, attention_modules
from vitlens.stream import require_pre_norm

TABLE = Path(__file__).parent.parent / "data" / "results" / "timm-support.csv"
COLUMNS = [
    "model", "captured", "class", "layers", "heads", "prefix", "rows", "cols", "patch", "readout", "stream", "reason",
]  # fmt: skip


def survey(name: str) -> dict:
    """One row of the table: what a capture of one forward says, or why it is refused; and whether `vitlens.stream`
    takes the model apart, or why not."""
    with torch.device("meta"):
        model = timm.create_model(name).eval()
    row = dict.fromkeys(COLUMNS, "") | {"model": name, "class": type(model).__name__}
    try:
        attention_modules(model)
        images = torch.empty(1, *model.pretrained_cfg["input_size"], device="meta")
        with torch.no_grad(), capture(model) as attn:
            model(images)
    except UnsupportedModelError as error:
        return row | {"captured": "no", "reason": str(error)}
    grid, row = attn.grid, row | {"stream": "yes"}
    try:
        require_pre_norm(model)
    except UnsupportedModelError as error:
        row |= {"stream": "no", "reason": str(error)}
    return row | {
        "captured": "yes", "layers": str(len(attn)), "heads": str(attn[0].q.shape[1]), "prefix": str(grid.prefix),
        "rows": str(grid.rows), "cols": str(grid.cols), "patch": str(grid.patch[0]), "readout": kind(attn),
    }  # fmt: skip


def kind(attn) -> str:
    """The read-out in a word."""
    readout, grid = attn.grid.readout, attn.grid
    if readout is None:
        return "none"
    if attn.pool is not None:
        return "attention pool"
    if readout[0] == 1:
        return "class token"
    if readout[0] == 0.5 and grid.prefix >= 2:
        return "class and distillation token"
    return "mean of all tokens" if readout[0] > 0 and grid.prefix else "mean of patches"


def read_table() -> tuple[str, dict[str, dict]]:
    """(timm version, rows by model name) of the committed table."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        rows = {row["model"]: row for row in csv.DictReader(file)}
    (command,) = {row.pop("command") for row in rows.values()}
    return command.rsplit(" ", 1)[-1], rows


def shrunk(name: str):
    """A small model of the same kind with random weights: two blocks, two heads, where its constructor allows."""
    small = dict(depth=2, num_heads=2)
    for size in (small | dict(embed_dim=128), small | dict(embed_dim=128, num_kv_heads=(1, 2)), small):
        try:
            torch.manual_seed(0)
            return timm.create_model(name, num_classes=7, **size).eval()
        except (TypeError, AssertionError, RuntimeError, ValueError):
            continue
    raise AssertionError(f"{name} cannot be built")


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else TABLE
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*COLUMNS, "command"], lineterminator="\n")
        writer.writeheader()
        command = {"command": f"python tests/timm_support.py, timm {timm.__version__}"}
        writer.writerows(survey(name) | command for name in timm.list_models(exclude_filters="vitlens_*"))
    print(f"Wrote {path}.")
