"""Tables of measurements, with the machine, the versions and the command in each."""

import csv
import datetime
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import torch

from vitlens.train.runs import hardware, versions


def about(command: str, device: str | torch.device = "cpu") -> dict[str, str]:
    """The columns of a row that say how it was measured: device, versions, date and command."""
    return {"device": hardware(device), **versions(), "date": datetime.date.today().isoformat(), "command": command}


def sentence(command: str) -> str:
    """The same of a whole table, for the note above it."""
    how = about(command)
    return f"{command}, {how['date']}, {how['device']}, torch {how['torch']}, timm {how['timm']}"


def rounded(row: Mapping, to: Callable[[float], object]) -> dict:
    """A row whose floats are written shorter."""
    return {name: to(value) if isinstance(value, float) else value for name, value in row.items()}


def kept(path: Path, only: Collection[str], same: Mapping[str, object]) -> list[dict]:
    """The rows of a table that stay when single methods are measured: those of all others, or none without `only`.

    same: columns in which new rows are like them. Raises ValueError if they are not.
    """
    if not only or not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["method"] not in only]
    for name, value in same.items():
        if unlike := {row[name] for row in rows} - {str(value)}:
            raise ValueError(f"{path} has {name} {unlike.pop()}, and new rows have {value}. Give another --out.")
    return rows


def write(path: Path, rows: Iterable[Mapping], note: str = "") -> None:
    """A CSV file of rows, its columns in the order in which they first appear; what a row does not have stays empty.

    note: lines above the table, each behind a #.
    """
    rows = list(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        file.writelines(f"# {line}\n" for line in note.splitlines())
        columns = dict.fromkeys(name for row in rows for name in row)
        table = csv.DictWriter(file, list(columns), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
