"""The table of tests/field: kinds of faults, the doors they come through, and the forms tried at each door.

`python tests/test_field.py` prints it.
"""

import importlib.util
from pathlib import Path

from forms import CLOSED, FORMS, KINDS


def _import_all() -> None:
    """Import the tests in tests/field, which add their rows to the table."""
    for file in sorted((Path(__file__).parent / "field").glob("test_*.py")):
        spec = importlib.util.spec_from_file_location(f"table_{file.stem}", file)
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


FEWEST = 5
"""Smallest number of doors at which each kind is tried."""


def test_each_kind_is_tried_at_several_doors():
    FORMS.clear()
    _import_all()
    for kind, name in KINDS.items():
        doors = {row.door for row in FORMS if row.kind == kind}
        assert len(doors) >= FEWEST, f"{name}: {sorted(doors)}"
    for row in FORMS:
        assert row.kind in KINDS, row
        assert row.door and row.case and row.right, row
    closed = {door for _, door in CLOSED}
    assert not closed & {row.door for row in FORMS if (row.kind, row.door) in CLOSED}


if __name__ == "__main__":
    _import_all()
    for kind, name in KINDS.items():
        print(f"\n{kind}. {name}")
        for row in FORMS:
            if row.kind == kind:
                print(f"   {row.door}: {row.case} → {row.right} ({row.test})")
        for (number, door), reason in CLOSED.items():
            if number == kind:
                print(f"   {door}: cannot occur, {reason}")
