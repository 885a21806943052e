"""One's own results beside those of Tables 2, 5 and 9, in lines of at most WIDTH characters."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from vitlens.paper.models import CALLED, origin
from vitlens.paper.records import Record, aligned
from vitlens.paper.tables import (
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
    "imagenet": IMAGENET, "imagenet1k": IMAGENET, "ilsvrc2012": IMAGENET, "imagenetreal": REAL,
    "cifar10": CIFAR10, "cifar100": CIFAR100,
    "pets": PETS, "oxfordiiitpet": PETS, "oxfordiiitpets": PETS,
    "flowers": FLOWERS, "flowers102": FLOWERS, "oxfordflowers102": FLOWERS,
}  # fmt: skip
VTAB_ROWS = {"vtab": "VTAB"} | {name: f"VTAB {row}" for name, row in VTAB_NAMES.items()}
TEST_IMAGES = {IMAGENET: 50_000, REAL: 46_837, CIFAR10: 10_000, CIFAR100: 10_000, PETS: 3_669, FLOWERS: 6_149}
"""Of the data sets of the tables. One in a hundred may be missing, as damaged; other numbers are other data."""
TRANSFER = ("top1", "finetune", "vtab")
"""The protocols that measure what these tables do; few-shot, neighbors and a probe are something else."""


@dataclass
class Column:
    """What was measured of one system: the latest record of each row."""

    name: str
    """The name given with `--as`, or "" for a single model."""
    found: dict[str, Record] = field(default_factory=dict)


def row_of(record: Record) -> str | None:
    """The data set of Tables 2 and 5 that was measured, or "VTAB" with a group or task of Table 9; None if it was none
    of theirs, or by another measure."""
    if record.protocol not in TRANSFER:
        return None
    if row := VTAB_ROWS.get(record.data.lower()):
        return row if record.metric in ("mean", "top1") else None
    row = ROWS.get(re.sub("[^a-z0-9]", "", record.data.lower().removeprefix("torch/")))
    if record.metric == "real":
        row = REAL if row in (IMAGENET, REAL) else None
    elif record.metric != "top1" or row == REAL:
        row = None
    whole = TEST_IMAGES.get(row, 0)
    return row if 0.99 * whole <= record.images <= whole else None


def table_2(records: Iterable[Record], systems: Mapping[str, Sequence[str]] | None = None) -> str:
    """Table 2 as text: what the paper printed, and after it what was measured, a column for each system.

    A system is a model; or, with `systems`, what has a name there: several models (or weights, by their SHA-256), as a
    network is one thing before it is fine-tuned on ImageNet and another thing after that. Raises ValueError for a model
    there that no record is of.
    """
    rows = TABLE_2[0].accuracy
    columns, left_out = _columns(records, rows, systems)
    title = (
        "Table 2: top-1, %. Published: mean ± standard deviation of three fine-tunings, ViTs on ImageNet at 512 or 518 "
        "pixels. Measured: value [95 % interval]."
    )
    published = [
        (CALLED.get(p.model, (p.model,))[0], p.data, *(_printed(p, row) for row in rows), f"{p.core_days:,}")
        for p in TABLE_2
    ]
    measured = [("", *(_cell(column, row) for row in rows), "") for column in columns]
    text = _laid_out(title, ["", "", *rows, "TPUv3-core-days"], published, measured)
    first = "; ".join(
        f"{p.model} {', '.join(f'{row} {_printed(p, row)}' for row in p.accuracy)}" for p in FIRST_SUBMISSION
    )
    note = f"The first submission of the paper (October 2020) has other numbers, which these replaced: {first}."
    return "\n".join([*text, "", *_filled(note), *_notes(columns, left_out)])


def table_5(records: Iterable[Record], systems: Mapping[str, Sequence[str]] | None = None) -> str:
    """Table 5 as text, with what was measured after it, in the lines of the data that each system was pre-trained on.

    A system whose name does not tell that data has lines of its own at the end. systems: see `table_2`.
    """
    rows = TABLE_5[0].accuracy
    columns, left_out = _columns(records, rows, systems)
    origins = [_pretrained_on(column) for column in columns]
    names = list(dict.fromkeys(p.model for p in TABLE_5))
    labels, published, measured = ["pre-trained on"], [[name] for name in names], [[] for _ in columns]
    for data in (*dict.fromkeys(p.data for p in TABLE_5), *([None] if None in origins else [])):
        printed = {p.model: p for p in TABLE_5 if p.data == data}
        here = [column if o == data else Column("") for column, o in zip(columns, origins, strict=True)]
        shown = [row for row in rows if printed or any(row in column.found for column in here)]
        labels += [data or "not told by the name", *(f"  {row}" for row in shown)]
        for name, cells in zip(names, published, strict=True):
            cells += ["", *(_printed(printed.get(name), row) for row in shown)]
        for column, cells in zip(here, measured, strict=True):
            cells += ["", *(_cell(column, row) for row in shown)]
    title = "Table 5: top-1 after fine-tuning at 384 pixels, %. Measured: value [95 % interval]."
    return "\n".join([*_laid_out(title, labels, published, measured), *_notes(columns, left_out)])


def table_9(records: Iterable[Record], systems: Mapping[str, Sequence[str]] | None = None) -> str:
    """Table 9 as text, the tasks of VTAB-1k with the means of its groups, and after it what was measured.

    systems: see `table_2`, whose text also names what is in no table.
    """
    rows = [row for group in VTAB for row in (*(f"VTAB {task}" for task in VTAB[group]), f"VTAB {group}")] + ["VTAB"]
    columns, _ = _columns(records, rows, systems)
    labels = ["", ""]
    for group in VTAB:
        labels += [*(f"  {task}" for task in VTAB[group]), group]
    published = []
    for p in TABLE_9:
        values = {**p.accuracy, **groups(p.accuracy), "VTAB": p.accuracy["VTAB"]}
        published.append((p.model, p.data, *(f"{values[row.removeprefix('VTAB ')]:.1f}" for row in rows)))
    measured = [("", *(_cell(column, row) for row in rows)) for column in columns]
    title = "Table 9: top-1 on the tasks of VTAB-1k, %, and below each group its mean. Measured: value [95 % interval]."
    return "\n".join([*_laid_out(title, [*labels, "all 19"], published, measured), *_notes(columns, [])])


def _printed(published: Published | None, row: str) -> str:
    if published is None or row not in published.accuracy:
        return "–"
    spread = f" ± {published.spread[row]:.2f}" if row in published.spread else ""
    return f"{published.accuracy[row]:.2f}{spread}"


def _cell(column: Column, row: str) -> str:
    return column.found[row].cell if row in column.found else "–"


def _laid_out(
    title: str, labels: Sequence[str], published: Sequence[Sequence[str]], measured: Sequence[Sequence[str]]
) -> list[str]:
    """The columns side by side; those that do not fit follow below, with the row labels repeated.

    Above the columns stands what they are; measured ones get numbers, for the notes.
    """
    strips = [("published", cells) for cells in published]
    strips += [("measured", (f"({n})", *cells)) for n, cells in enumerate(measured, 1)]
    first = max(map(len, labels))
    blocks, room = [], 0
    for kind, cells in strips:
        width = 2 + max(map(len, (kind, *cells)))
        if width > room:
            blocks.append([])
            room = WIDTH - first
        blocks[-1].append((kind, cells))
        room -= width
    lines = _filled(title)
    for block in blocks:
        kinds = [kind if n == 0 or kind != block[n - 1][0] else "" for n, (kind, _) in enumerate(block)]
        rows = zip(labels, *(cells for _, cells in block), strict=True)
        if block is not blocks[0]:
            rows = _told(list(rows))
        lines += ["", *aligned([("", *kinds), *rows])]
    return lines


def _told(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The rows in which something was measured, with the headings above them."""
    kept, heading = rows[:1], None
    for row in rows[1:]:
        if not any(row[1:]):
            heading = row if row[0] else None
        elif {*row[1:]} - {"–", ""}:
            kept += [heading, row] if heading else [row]
            heading = None
    return kept


def _columns(
    records: Iterable[Record], rows: Iterable[str], systems: Mapping[str, Sequence[str]] | None
) -> tuple[list[Column], list[Record]]:
    """One column per system (several if it was measured in several ways), and the records that fit in no table.

    All results of one manner (model, weights, protocol, recipe) stand in one column.
    """
    records, rows = sorted(records, key=lambda r: r.when), set(rows)
    named = {}
    for name, models in (systems or {}).items():
        for model in models:
            fits = {(r.model, r.weights) for r in records if model in (r.model, r.weights)}
            if not fits:
                known = ", ".join(sorted({r.model for r in records})) or "none"
                raise ValueError(f"No result is of {model!r}, which {name!r} is to be made of. They are of: {known}.")
            named |= dict.fromkeys(fits, name)
    manners: dict[tuple[str, ...], dict[str, Record]] = {}
    for record in records:
        if (row := row_of(record)) in rows:
            system = named.get((record.model, record.weights), "")
            own = (record.model, record.weights)
            key = (system, *(("", "") if system else own), record.recipe or "", *own, record.protocol)
            manners.setdefault(key, {})[row] = record
    columns: dict[tuple[str, ...], list[Column]] = {}
    for key in sorted(manners):
        of_system, found = columns.setdefault(key[:3], []), manners[key]
        free = next((column for column in of_system if not found.keys() & column.found.keys()), None)
        if free is None:
            of_system.append(free := Column(key[0]))
        free.found |= found
    every = [column for several in columns.values() for column in several]
    return every, [record for record in records if row_of(record) is None]


def _pretrained_on(column: Column) -> str | None:
    known = {weights.data for r in column.found.values() if (weights := origin(r.model)[1])}
    return known.pop() if len(known) == 1 else None


def _filled(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=f"{indent}    ", break_on_hyphens=False)


def _notes(columns: Sequence[Column], left_out: Sequence[Record]) -> list[str]:
    lines = [""] if columns or left_out else []
    for number, column in enumerate(columns, 1):
        indent = "    " * bool(column.name)
        lines += _filled(f"({number}) {column.name}") if column.name else []
        for (model, weights), records in _grouped(column.found.items(), lambda r: (r.model, r.weights)):
            said = f"{model}: {_described(model)}{f', SHA-256 {weights}' if weights else ''}"
            lines += _filled(said if column.name else f"({number}) {said}", indent)
            for (protocol, recipe), same in _grouped(records, lambda r: (r.protocol, r.recipe)):
                counts = ", ".join(f"{row}: {record.images:,} images" for row, record in same)
                days = sorted({record.when[:10] for _, record in same})
                versions = ", ".join(f"{name} {version}" for name, version in sorted(same[0][1].versions.items()))
                manner = ", ".join(filter(None, (protocol, recipe)))
                lines += _filled(f"protocol {manner}; {counts}; {' and '.join(days)}; {versions}", indent + "    ")
    for r in left_out:
        lines += _filled(f"Not in this table: {r.model} on {r.data}, {r.manner}, {r.metric}: {r.cell}")
    return lines


def _grouped(found: Iterable[tuple[str, Record]], key: Callable) -> list[tuple[tuple, list[tuple[str, Record]]]]:
    parts: dict[tuple, list[tuple[str, Record]]] = {}
    for row, record in found:
        parts.setdefault(key(record), []).append((row, record))
    return list(parts.items())


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
