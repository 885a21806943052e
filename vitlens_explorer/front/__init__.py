"""The front end's files: one script and one style sheet for the notebook, the app and pages."""

import json
import re
import struct
from pathlib import Path

FRONT = Path(__file__).parent
IMPORT = re.compile(r'^import (?:(\w+)|\{[^}]*\}) from "([^"]+)"[^;]*;\n', re.MULTILINE)
"""An import as Prettier formats it: the name of a JSON file or names of a module, and the path."""
EXPORT = re.compile(r"^export (?!default)", re.MULTILINE)
COMMENT = re.compile(r"^ *//.*\n", re.MULTILINE)
"""A line that is a comment. Files leave it out. No template of the scripts has a line that begins so."""


def join_modules(entry: Path) -> str:
    """An ES module and all that it imports as one script, in which a module stands after those that it imports.

    The modules share the scope of the script, so no two of them declare the same name. JSON files become constants.
    Lines of comments are left out.
    Raises ValueError for modules that import each other.
    """
    scripts: dict[Path, str] = {}
    _add_module(entry.resolve(), scripts, ())
    return "\n".join(scripts.values())


def _add_module(path: Path, scripts: dict[Path, str], importers: tuple[Path, ...]) -> None:
    """Add a module to those that stand before it, after those that it imports."""
    if path in importers:
        names = " → ".join(module.name for module in (*importers, path))
        raise ValueError(f"Modules of the page must not import each other, got {names}.")
    if path in scripts:
        return
    text = path.read_text(encoding="utf-8")
    for name, source in IMPORT.findall(text):
        imported = (path.parent / source).resolve()
        if name:
            value = json.loads(imported.read_text(encoding="utf-8"))
            scripts[imported] = f"const {name} = {json.dumps(value, separators=(',', ':'))};\n"
        else:
            _add_module(imported, scripts, (*importers, path))
    plain = COMMENT.sub("", IMPORT.sub("", text))
    scripts[path] = EXPORT.sub("", plain).lstrip("\n")


def script() -> str:
    """The scripts as one JavaScript module, whose default export has anywidget's `render`."""
    return join_modules(FRONT / "index.js")


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
