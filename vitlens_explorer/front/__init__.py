"""The front end's files: one script and one style sheet for the notebook, the app and pages."""

import json
import struct
from collections.abc import Sequence
from pathlib import Path

from vitlens.plot.scales import ATTENTION, UNIFORM

FRONT = Path(__file__).parent
FRONT_SCRIPTS = (
    "values",
    "elements",
    "controls",
    "pictures",
    "charts",
    "source",
    "models",
    "address",
    "details",
    "challenge",
    "tour",
    "page",
)
"""Names of the scripts in the order in which they are joined. They share one scope."""


def join_scripts(folder: Path = FRONT, names: Sequence[str] = FRONT_SCRIPTS) -> str:
    """The scripts of a folder as one text. Those of the front end begin with the numbers of `vitlens.plot.scales`."""
    scripts = [(folder / f"{name}.js").read_text(encoding="utf-8") for name in names]
    if folder == FRONT:
        rule = {"map": UNIFORM, "attention": ATTENTION, "similarity": 0, "norms": 0}
        scripts.insert(0, f"const UNIFORM = {json.dumps(rule)}; // departures of uniform maps")
    return "\n".join(scripts)


def script() -> str:
    """The scripts as one JavaScript module, whose default export has anywidget's `render`."""
    return join_scripts() + "\nexport default { render, Source, unpack };\n"


def style() -> str:
    """The style sheet."""
    return (FRONT / "front.css").read_text(encoding="utf-8")


def pack(name: str, value: object) -> bytes:
    """Message of the length of its header, the header as JSON, and byte strings, {"$": number} in the header."""
    parts: list[bytes] = []
    sizes: list[int] = []

    def place(part: bytes | memoryview) -> dict:
        parts.append(bytes(part))
        sizes.append(len(parts[-1]))
        return {"$": len(parts) - 1}

    # json.dumps serializes in this order, so the sizes are complete before they are written
    head = json.dumps({"name": name, "value": value, "sizes": sizes}, default=place).encode()
    return b"".join([struct.pack("<I", len(head)), head, *parts])
