"""Captured and refused models of timm, on the meta device at full size.

    python -m experiments.timm_support --out data/results/timm-support.csv

It takes a few minutes for all names. Tests compare single rows with the table.
"""

import csv
from collections.abc import Sequence
from pathlib import Path

import timm
import torch

from experiments.results import command, parser, write
from vitlens.recorder.record import capture
from vitlens.recorder.supported import UnsupportedModelError, attention_modules
from vitlens.stream import require_pre_norm

TABLE = Path(__file__).parent.parent / "data" / "results" / "timm-support.csv"
COLUMNS = [
    "model",
    "captured",
    "class",
    "layers",
    "heads",
    "prefix",
    "rows",
    "cols",
    "patch",
    "readout",
    "stream",
    "reason",
]


def survey(name: str) -> dict:
    """A row of the table: the shapes of a capture, or the reason of its refusal; the same for `vitlens.stream`."""
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
        "captured": "yes",
        "layers": str(len(attn)),
        "heads": str(attn[0].q.shape[1]),
        "prefix": str(grid.prefix),
        "rows": str(grid.rows),
        "cols": str(grid.cols),
        "patch": str(grid.patch[0]),
        "readout": kind(attn),
    }


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
    for size in (
        small | dict(embed_dim=128),
        small | dict(embed_dim=128, num_kv_heads=(1, 2)),
        small,
    ):
        try:
            torch.manual_seed(0)
            return timm.create_model(name, num_classes=7, **size).eval()
        except (TypeError, AssertionError, RuntimeError, ValueError):
            continue
    raise AssertionError(f"{name} cannot be built")


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__).parse_args(arguments)
    names = timm.list_models("vit_tiny*" if options.tiny else "", exclude_filters="vitlens_*")
    made_by = {
        "command": f"{command('experiments.timm_support', arguments)}, timm {timm.__version__}"
    }
    write(options.out, (survey(name) | made_by for name in names))


if __name__ == "__main__":
    main()
