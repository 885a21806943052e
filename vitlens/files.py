"""A file that is written is written whole; a folder that cannot be written to is told of beforehand."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write(path: Path, content: bytes) -> None:
    """Replace ``path`` by ``content`` so that a reader finds the old file or the new one, whatever happens."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    if os.name == "posix":  # the rename itself must reach the disk too
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def writable(folder: Path, option: str) -> None:
    """Make ``folder`` if it is missing. Raises ``ValueError``, which names ``option``, if it cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as problem:
        raise ValueError(
            f"What is found goes to {folder}, which cannot be written to ({problem.strerror}); give another {option}."
        ) from problem
