"""What every head and MLP writes into the logit of the class that a model names, picture by picture."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from torch import nn

from vitlens.models import run, top_classes
from vitlens.reports.pictures import SHARP, prepared
from vitlens.stream import Contributions, contributions

SHOWN = 12  # pictures in heads.png


def written(
    model: nn.Module, images: Iterable[tuple[str, object]], *, on_error: Callable[[str], None] | None = None
) -> dict[str, tuple[str, Contributions]]:
    """By the name of each image the class that the model names, and the `Contributions` to its logit.

    images, on_error: as in `reports.pictures.prepared`. Raises what `vitlens.stream.contributions` raises.
    """
    found = {}
    for name, image in prepared(model, images, on_error):
        logits = run(model, image).detach()
        seen = contributions(model, image)
        ((label, _), *_), *_ = top_classes(model, logits)
        found[name] = label, seen
    return found


def write(found: dict[str, tuple[str, Contributions]], out: Path) -> list[Path]:
    """Write heads.csv, a row for each image and part, and heads.png, the first pictures. Returns the paths."""
    import torch

    from vitlens import plot

    out.mkdir(parents=True, exist_ok=True)
    paths = [out / "heads.csv", out / "heads.png"]
    with paths[0].open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["image", "class", "logit", "part", "added"])
        for name, (label, seen) in found.items():
            for part, value in zip(seen.names, seen.parts[0].tolist(), strict=True):
                table.writerow([name, label, f"{seen.logits[0]:.6g}", part, f"{value:.6g}"])
    maps, files = {}, Counter(Path(name).name for name in found)
    for name, (label, seen) in list(found.items())[:SHOWN]:
        file = Path(name).name
        title = f"{file if files[file] == 1 else name}: {label.split(',')[0]}, {seen.logits[0]:.1f}"
        maps[title] = torch.cat([seen.heads[0], seen.mlps[0, :, None]], 1)
    plot.contributions(maps).savefig(paths[1], dpi=SHARP)
    return paths
