"""Results of finished batches in a folder, so that a second call goes on where a stopped one ended."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitlens import files
from vitlens.names import unknown_name

__all__ = ["Finished"]
__dir__ = __all__.copy
__getattr__ = unknown_name(__name__, __all__)

FILE = re.compile(r"[0-9a-f]{12}-[a-z]+-\d+\.npz")
"""Names of the files."""


class Finished:
    """Results of batches by name, each as one npz file.

    folder: created with the first result, None to keep nothing. fingerprint: 12 hexadecimal digits of everything on
    which the results depend. Results with another fingerprint are not read.

    >>> finished = vitlens.finished.Finished("parts", "0123456789ab")
    >>> finished.write("explore-0", {"classes": torch.tensor([1, 2])})
    >>> finished.read("explore-0")["classes"]
    tensor([1, 2])
    >>> finished.others()
    []
    >>> finished.remove()
    >>> finished.read("explore-0")
    """

    def __init__(self, folder: str | Path | None, fingerprint: str = ""):
        self.folder = None if folder is None else Path(folder)
        self.fingerprint = fingerprint

    def read(self, name: str) -> dict[str, Tensor] | None:
        """The tensors of a result, or None if it is missing or damaged."""
        if self.folder is None:
            return None
        with suppress(Exception):  # NumPy raises many types
            return _tensors(self._path(name))
        return None

    def write(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Write the tensors of a result. Raises OSError with one sentence, such as for a full disk."""
        if self.folder is None:
            return
        file = io.BytesIO()
        np.savez(file, **{key: tensor.numpy() for key, tensor in tensors.items()})
        self.folder.mkdir(parents=True, exist_ok=True)
        files.write(self._path(name), file.getvalue())

    def others(self) -> list[Path]:
        """Files of results with other fingerprints."""
        return [path for path in self._files() if not path.name.startswith(self.fingerprint)]

    def remove(self) -> None:
        """Remove the results of all fingerprints, and the folder if nothing else is in it."""
        if self.folder is None or not self.folder.is_dir():
            return
        for path in self.folder.iterdir():
            files.remove_ours(path, _is_ours)
        files.remove_folder(self.folder)

    def _files(self) -> list[Path]:
        """Files of results of all fingerprints, by their names."""
        if self.folder is None or not self.folder.is_dir():
            return []
        return [path for path in self.folder.iterdir() if _is_ours(path)]

    def _path(self, name: str) -> Path:
        return self.folder / f"{self.fingerprint}-{name}.npz"


def _is_ours(path: Path) -> bool:
    """True for a file of results by its name."""
    return FILE.fullmatch(path.name) is not None


def _tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of an npz file."""
    with np.load(path, allow_pickle=False) as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays}
