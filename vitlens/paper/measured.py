"""One's own results beside those of Tables 2 and 5."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from vitlens.paper.models import origin
from vitlens.paper.results import CIFAR10, CIFAR100, FLOWERS, IMAGENET, PETS, REAL, TABLE_2, TABLE_5
from vitlens.records import Record, aligned

ROWS = {
    "imagenet": IMAGENET, "imagenet1k": IMAGENET, "ilsvrc2012": IMAGENET, "imagenetreal": REAL,
    "cifar10": CIFAR10, "cifar100": CIFAR100,
    "pets": PETS, "oxfordiiitpet": PETS, "oxfordiiitpets": PETS,
    "flowers": FLOWERS, "flowers102": FLOWERS, "oxfordflowers102": FLOWERS,
    "vtab": "VTAB",
}  # fmt: skip
TEST_IMAGES = {IMAGENET: 50_000, REAL: 46_837, CIFAR10: 10_000, CIFAR100: 10_000, PETS: 3_669, FLOWERS: 6_149}
"""Of the data sets of the tables. One in a hundred may be missing, as damaged; other numbers are other data."""
TRANSFER = ("top1", "finetune", "vtab")
"""The protocols that measure what Tables 2 and 5 do; few-shot, neighbours and a probe are something else."""

NAMES = {"R152x4": "BiT-L R152x4", "EfficientNet-L2": "Noisy Student L2"}


def row_of(record: Record) -> str | None:
    """The data set of Tables 2 and 5 that was measured, None if it was none of theirs or by another measure."""
    name = re.sub("[^a-z0-9]", "", record.data.lower().removeprefix("torch/"))
    row = ROWS.get(name) if record.protocol in TRANSFER else None
    if row == "VTAB":
        return row if record.metric in ("mean", "top1") else None
    if record.metric == "real":
        row = REAL if row in (IMAGENET, REAL) else None
    elif record.metric != "top1" or row == REAL:
        row = None
    whole = TEST_IMAGES.get(row, 0)
    return row if 0.99 * whole <= record.images <= whole else None


def table_2(records: Iterable[Record]) -> str:
    """Table 2 as text: what the paper printed, and right of it what was measured, a column for each model."""
    columns, left_out = _columns(records)
    head = [("", "published", *[""] * (len(TABLE_2) - 1), *(["measured"] if columns else []))]
    head += [("", *(NAMES.get(p.model, p.model) for p in TABLE_2), *(f"({n + 1})" for n in range(len(columns))))]
    head += [("", *(p.data for p in TABLE_2))]
    body = []
    for row in TABLE_2[0].accuracy:
        printed = []
        for published in TABLE_2:
            spread = f" ± {published.spread[row]:.2f}" if row in published.spread else ""
            printed.append(f"{published.accuracy[row]:.2f}{spread}" if row in published.accuracy else "–")
        body.append((row, *printed, *(column[row].cell if row in column else "–" for column in columns)))
    body.append(("TPUv3-core-days", *(f"{p.core_days:,}" for p in TABLE_2)))
    title = (
        "Table 2: top-1, %. Published: mean ± standard deviation of three fine-tunings, ViTs on ImageNet at 512 or 518 "
        "pixels. Measured: value [95 % interval]."
    )
    return "\n".join([title, "", *aligned(head + body), *_notes(columns, left_out)])


def table_5(records: Iterable[Record]) -> str:
    """Table 5 as text, with what was measured right of it, in the lines of the data that each model was pre-trained on.

    A model whose name does not tell that data has lines of its own at the end.
    """
    columns, left_out = _columns(record for record in records if row_of(record) != "VTAB")
    names = list(dict.fromkeys(p.model for p in TABLE_5))
    lines = [("", "published", *[""] * (len(names) - 1), *(["measured"] if columns else []))]
    lines += [("pre-trained on", *names, *(f"({n + 1})" for n in range(len(columns))))]
    origins = [_pretrained_on(column) for column in columns]
    known = list(dict.fromkeys(p.data for p in TABLE_5))
    for data in (*known, *([None] if None in origins else [])):
        lines.append((data or "not told by the name",))
        printed = {p.model: p.accuracy for p in TABLE_5 if p.data == data}
        here = [column if o == data else {} for column, o in zip(columns, origins, strict=True)]
        for row in (row for row in TABLE_5[0].accuracy if printed or any(row in column for column in here)):
            cells = [f"{printed[n][row]:.2f}" if n in printed else "–" for n in names]
            mine = [column[row].cell if row in column else "–" for column in here]
            lines.append((f"  {row}", *cells, *mine))
    title = "Table 5: top-1 after fine-tuning at 384 pixels, %. Measured: value [95 % interval]."
    return "\n".join([title, "", *aligned(lines), *_notes(columns, left_out)])


def _columns(records: Iterable[Record]) -> tuple[list[dict[str, Record]], list[Record]]:
    """By model, weights, protocol and recipe, the latest of each row; and what fits none."""
    columns: dict[tuple[str, ...], dict[str, Record]] = {}
    left_out = []
    for record in sorted(records, key=lambda r: r.when):
        if (row := row_of(record)) is None:
            left_out.append(record)
        else:
            what = record.model, record.weights, record.protocol, record.recipe or ""
            columns.setdefault(what, {})[row] = record
    return [columns[key] for key in sorted(columns)], left_out


def _pretrained_on(column: dict[str, Record]) -> str | None:
    weights = origin(next(iter(column.values())).model)[1]
    return weights.data if weights else None


def _notes(columns: Sequence[dict[str, Record]], left_out: Sequence[Record]) -> list[str]:
    lines = [""] if columns or left_out else []
    for number, column in enumerate(columns, 1):
        first = next(iter(column.values()))
        counts = ", ".join(f"{row}: {record.images:,} images" for row, record in column.items())
        days = sorted({record.when[:10] for record in column.values()})
        versions = ", ".join(f"{name} {version}" for name, version in sorted(first.versions.items()))
        weights = f", SHA-256 {first.weights}" if first.weights else ""
        protocol = ", ".join(filter(None, (first.protocol, first.recipe)))
        lines.append(f"({number}) {first.model}: {_described(first.model)}{weights}")
        lines.append(f"    protocol {protocol}; {counts}; {' and '.join(days)}; {versions}")
    for record in left_out:
        lines.append(
            f"Not in this table: {record.model} on {record.data}, {record.protocol}, {record.metric}: {record.cell}"
        )
    return lines


def _described(name: str) -> str:
    model, weights = origin(name)
    if model is None:
        return "not a model of the paper"
    tag = name.partition(".")[2]
    if weights is None and tag:
        return f"{model.name} with the weights {tag} of timm, which are not the paper's"
    if weights is None:
        return f"{model.name} by its name, which does not tell the weights"
    whose = {"paper": "the paper's own weights"}.get(weights.source, f"weights of {weights.source}, not the paper's")
    return f"{model.name} pre-trained on {weights.data}, {whose}"
