"""Tables 2, 5 and 9 of the paper as text, with measured results beside the published ones."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from vitlens_paper.evaluate.records import Record
from vitlens_paper.models import CALLED, origin
from vitlens_paper.tables import (
    CIFAR10,
    CIFAR100,
    FIRST_SUBMISSION,
    FLOWERS,
    IMAGENET,
    PETS,
    REAL,
    TABLE_2,
    TABLE_5,
    TABLE_9,
    VTAB,
    VTAB_NAMES,
    Published,
    groups,
)

WIDTH = 120
ROWS = {
    "imagenet": IMAGENET,
    "imagenet1k": IMAGENET,
    "ilsvrc2012": IMAGENET,
    "cifar10": CIFAR10,
    "cifar100": CIFAR100,
    "pets": PETS,
    "oxfordiiitpet": PETS,
    "oxfordiiitpets": PETS,
    "flowers": FLOWERS,
    "flowers102": FLOWERS,
    "oxfordflowers102": FLOWERS,
}
VTAB_ROWS = {"vtab": "VTAB"} | {name: f"VTAB {row}" for name, row in VTAB_NAMES.items()}
TEST_IMAGES = {
    IMAGENET: 50_000,
    REAL: 46_837,
    CIFAR10: 10_000,
    CIFAR100: 10_000,
    PETS: 3_669,
    FLOWERS: 6_149,
}
"""Number of test images of each data set. A result on under 99 % of them counts as other data."""
TRANSFER = ("top1", "finetune", "vtab")
"""Protocols of the paper's tables, without few-shot, neighbors and probe."""


def row_of(record: Record) -> str | None:
    """Row of Table 2, 5 or 9 for a record: a data set, "VTAB" with a group or task, or None for other measurements.

    >>> record = vitlens_paper.evaluate.Record("vit", "torch/cifar10", "top1", "top1", 90, 89, 91, 10_000, "", {})
    >>> vitlens_paper.row_of(record)
    'CIFAR-10'
    """
    if record.protocol not in TRANSFER:
        return None
    data = record.data.lower()
    if data in VTAB_ROWS:
        return VTAB_ROWS[data] if record.metric in ("mean", "top1") else None
    name = data.removeprefix("torch/")
    letters = re.sub("[^a-z0-9]", "", name)
    row = ROWS.get(letters)
    if row == IMAGENET and record.metric == "real":
        row = REAL
    elif record.metric != "top1":
        row = None
    if row is None:
        return None
    whole = TEST_IMAGES[row]
    complete = 0.99 * whole <= record.images <= whole
    return row if complete else None


def table_2(records: Iterable[Record]) -> str:
    """Table 2 as text: published columns, a column for each measured model, and notes.

    >>> print(vitlens_paper.table_2([])[:13])
    Table 2: top-
    """
    records = list(records)
    data_sets = list(TABLE_2[0].accuracy)
    cost = "TPUv3-core-days"
    published = {}
    for p in TABLE_2:
        name = p.model
        if name in CALLED:
            name = CALLED[name][0]  # Table 2's name of the model
        cells = _accuracy_cells(p, data_sets)
        cells[cost] = f"{p.core_days:,}"
        published[name, p.data] = cells
    title = (
        "Table 2: top-1, %. Published: mean ± standard deviation of three fine-tunings, ViTs on ImageNet at 512 or 518 "
        "pixels.\nMeasured: value [95 % interval]."
    )
    first = []
    for p in FIRST_SUBMISSION:
        accuracies = [f"{row} {cell}" for row, cell in _accuracy_cells(p).items()]
        listed = ", ".join(accuracies)
        first.append(f"{p.model} {listed}")
    numbers = "; ".join(first)
    notes = [f"The first submission of the paper (October 2020) had other numbers: {numbers}."]
    for r in records:
        if row_of(r) is None:
            protocol = f"{r.manner}, {r.metric}"
            measured = f"{r.model} on {r.data}, {protocol}: {r.cell}"
            notes.append(f"Not in this table: {measured}")
    columns = _columns(records, data_sets)
    return _text(title, [*data_sets, cost], published, columns, notes)


def table_5(records: Iterable[Record]) -> str:
    """Table 5 as text: rows by pre-training data and data set, published columns, then measured ones.

    A measured model is in the rows of its pre-training data, or of "unknown data".

    >>> print(vitlens_paper.table_5([])[:7])
    Table 5
    """
    data_sets = list(TABLE_5[0].accuracy)
    sources = []
    published: dict[tuple[str, str], dict] = {}
    for p in TABLE_5:
        if p.data not in sources:
            sources.append(p.data)
        column = published.setdefault((p.model, ""), {})
        for data, cell in _accuracy_cells(p, data_sets).items():
            column[p.data, data] = cell
    columns = []
    for by_data in _columns(records, data_sets):
        record = _first(by_data)
        _, weights = origin(record.model)
        source = weights.data if weights else "unknown data"
        columns.append({(source, data): record for data, record in by_data.items()})
        if not weights and source not in sources:
            sources.append(source)
    title = "Table 5: top-1 after fine-tuning at 384 pixels, %. Measured: value [95 % interval]."
    rows = [(source, data) for source in sources for data in data_sets]
    return _text(title, rows, published, columns, [])


def table_9(records: Iterable[Record]) -> str:
    """Table 9 as text: tasks of VTAB-1k and means of its groups, published columns, then measured ones.

    >>> print(vitlens_paper.table_9([])[:7])
    Table 9
    """
    rows = []
    for group, tasks in VTAB.items():
        rows += [f"VTAB {task}" for task in tasks]
        rows.append(f"VTAB {group}")
    rows.append("VTAB")
    published = {}
    for p in TABLE_9:
        values = groups(p.accuracy)
        values |= p.accuracy  # with "VTAB", the mean over all tasks, as the paper prints it
        cells = {}
        for row in rows:
            name = row.removeprefix("VTAB ")  # leaves the row "VTAB" as it is
            cells[row] = f"{values[name]:.1f}"
        published[p.model, p.data] = cells
    title = "Table 9: top-1 on the tasks of VTAB-1k, %, and below each group its mean. Measured: value [95 % interval]."
    columns = _columns(records, rows)
    return _text(title, rows, published, columns, [])


def _accuracy_cells(published: Published, rows: Iterable[str] = ()) -> dict[str, str]:
    """Published accuracies as "value ± spread" by row, for `rows` or, if empty, all rows."""
    cells = {}
    for row in rows or published.accuracy:
        if row in published.accuracy:
            cells[row] = f"{published.accuracy[row]:.2f}"
        if row in published.spread:
            cells[row] += f" ± {published.spread[row]:.2f}"
    return cells


def _columns(records: Iterable[Record], rows: Iterable[str]) -> list[dict[str, Record]]:
    """Columns of the measured part: the latest record of each row.

    Records of one column share their model, weights and recipe, and all or none are from the unchanged model.
    """
    columns: dict[tuple, dict[str, Record]] = {}
    in_order = sorted(records, key=lambda record: record.when)
    for record in in_order:
        row = row_of(record)
        if row in rows:
            untrained = record.protocol == "top1"  # other protocols fine-tune first
            key = (record.model, record.weights, record.recipe or "", untrained)
            column = columns.setdefault(key, {})
            column[row] = record
    return [columns[key] for key in sorted(columns)]


def _first(column: Mapping[object, Record]) -> Record:
    """First record of a column."""
    return next(iter(column.values()))


def _text(
    title: str,
    rows: Sequence,
    published: dict[tuple[str, str], dict],
    measured: Sequence[dict],
    notes: Sequence[str],
) -> str:
    """The table as lines of at most `WIDTH` characters, with a note about each measured column."""
    from pandas import DataFrame

    cells = {("published", *name): column for name, column in published.items()}
    for number, column in enumerate(measured, 1):
        texts = {row: record.cell for row, record in column.items()}
        cells["measured", f"({number})", ""] = texts
    frame = DataFrame(cells).reindex(rows).fillna("–")
    frame.index.names = [None] * frame.index.nlevels
    lines = [title, ""]
    lines.append(frame.to_string(line_width=WIDTH - 2))
    lines.append("")
    for number, column in enumerate(measured, 1):
        lines += _notes_on_column(number, column)
    lines += notes
    return "\n".join(lines)


def _notes_on_column(number: int, column: Mapping[object, Record]) -> list[str]:
    """Two lines about a measured column: its model and protocol, and its images, day and versions."""
    record = _first(column)
    weights = _describe_weights(record)
    counts = []
    for row, r in column.items():
        data = row if isinstance(row, str) else row[1]  # rows of Table 5: (source, data)
        counts.append(f"{data}: {r.images:,}")
    images = ", ".join(counts)
    day = record.when[:10]
    in_order = sorted(record.versions.items())
    versions = [f"{name} {version}" for name, version in in_order]
    libraries = ", ".join(versions)
    return [
        f"({number}) {record.model}: {weights}; {record.manner}",
        f"    images: {images}; {day}; {libraries}",
    ]


def _describe_weights(record: Record) -> str:
    """Description of a record's model and weights, with the weights' digest."""
    model, weights = origin(record.model)
    digest = f", SHA-256 {record.weights}" if record.weights else ""
    if model is None:
        return f"not a model of the paper{digest}"
    if weights is None:
        return f"{model.name}, with unknown weights{digest}"
    whose = "the paper's weights"
    if weights.source != "paper":
        whose = f"weights of {weights.source}, not the paper's"
    return f"{model.name} pre-trained on {weights.data}, {whose}{digest}"
