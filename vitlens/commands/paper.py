"""`vitlens models` and `vitlens table`: the paper's models and their cost, and its tables with your own results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def models(
    only: Annotated[str, typer.Argument(help="Part of a name, the paper's or timm's; without it, all.")] = "",
    weights: Annotated[bool, typer.Option("--weights", help="Name the nearest public weights and their data.")] = False,
) -> None:
    """List the models of the paper: parameters, FLOPs, exaFLOPs of pre-training, timm's weights."""
    from vitlens.paper import COSTS, MODELS, TABLE_6, matching

    chosen = matching(only)
    if not chosen:
        raise ValueError(f"No model of the paper has {only!r} in its name; there are {', '.join(MODELS)}.")
    line = "{:<15} {:>10} {:>8}  {:<30} {}"
    print(line.format("model", "parameters", "GFLOPs", "epochs: exaFLOPs (Table 6)", "weights in timm"))
    for model in chosen:
        cost = COSTS[model.name]
        printed = [(row.epochs, row.exaflops) for row in TABLE_6 if row.model == model.name]
        spent = ", ".join(f"{epochs}: {cost.pretraining(epochs):.0f} ({exaflops})" for epochs, exaflops in printed)
        names = [each.timm for each in model.weights]
        shown = "none" if not names else f"{len(names)}:" if weights else names[0]
        shown += f" and {len(names) - 1} more" if len(names) > 1 and not weights else ""
        row = (model.name, f"{cost.parameters / 1e6:.1f} M", f"{cost.flops / 1e9:.1f}", spent or "–", shown)
        print(line.format(*row).rstrip(), flush=True)
        for each in model.weights if weights else ():
            use = "ImageNet's classes" if each.classifies else "as pre-trained"
            print(f"    {each.timm}: {each.data}, {each.source}, {use}")
    print(
        "\nParameters with a head of 1,000 classes; FLOPs of one image of 224 pixels (EfficientNet-L2: 800), a "
        "multiply-add as two.\nexaFLOPs of pre-training on JFT-300M: counted as three forwards a picture, in brackets "
        "those that the paper prints; – where its Table 6 has none."
    )


def table(
    results: Annotated[list[Path], typer.Argument(help="JSON files that `vitlens evaluate` wrote.")],
) -> None:
    """Print the paper's Tables 2, 5 and 9 with your own results beside the published ones."""
    from vitlens import paper
    from vitlens.paper import records

    found = [record for path in results for record in records.read(path)]
    tables = [paper.table_2, paper.table_5]
    if any((paper.row_of(record) or "").startswith("VTAB") for record in found):
        tables.append(paper.table_9)
    print("\n\n".join(table(found) for table in tables))
