"""Read files of weights by their content, and name the reason when a file holds something else."""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import pathlib
import re
import types
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitlens.files import read_text

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
"""Names of the files that list the parts of weights in several files."""

_WHOLE = ("model.safetensors", "open_clip_model.safetensors", "pytorch_model.bin")
"""Names of the weights in the folder of a model, in the order of preference."""

SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".tar", ".npz")
"""Endings of files of weights."""

_HELP = "Save the model's state_dict()"

_BEGINNINGS = (
    (
        rb"version https://git-lfs",
        "it is a pointer of Git LFS, not the weights. Run `git lfs pull`",
    ),
    (
        rb"(\xef\xbb\xbf)?\s*<(!doctype|html|\?xml|head|body|error)",
        "it is a web page, not the weights. Open its address in a browser, and download the file again",
    ),
    (rb"\x1f\x8b|BZh|\xfd7zXZ|\x28\xb5\x2f\xfd", "it is compressed. Unpack it first"),
    (rb"7z\xbc\xaf|Rar!|(?s:.{257})ustar", "it is an archive. Unpack it first"),
    (
        rb"\x89HDF",
        "it is an HDF5 file of Keras, which vitlens does not read. Convert it to PyTorch",
    ),
    (rb"GGUF", "it is a GGUF file, whose weights are quantized. Use those of the original model"),
    (rb"\x93NUMPY", "it is a single NumPy array. Weights are a dictionary of arrays (.npz)"),
)
"""Beginnings of files that hold no weights, as regular expressions, and what they are."""


class UnreadableWeightsError(ValueError):
    """A file without weights that can be read. The message names the file and the cause."""

    def __init__(self, file: Path, reason: str):
        super().__init__(f"{file} cannot be read: {reason}.")


def read_weights(file: Path) -> dict:
    """The content of a file of weights: nested dictionaries with tensors and settings.

    file: a file of PyTorch, safetensors or NumPy (.npz), whatever its name, an index of several files, or a folder with
    either. Raises ValueError with the cause for anything else.
    """
    if file.is_dir():
        return read_weights(_weights_in(file))
    require_file(file)
    if file.name.endswith(".index.json"):
        return _read_parts(file)
    with file.open("rb") as opened:
        start = opened.read(512)
    _require_weights(file, start)
    if _is_safetensors(start):
        return _read_safetensors(file)
    if is_numpy(file):
        return _read_arrays(file)
    return _read_torch(file, start)


def require_file(file: Path) -> None:
    """Raise ValueError for a path that is not a file, with what it is."""
    if file.is_file():
        return
    if file.is_symlink():
        raise UnreadableWeightsError(file, f"it is a link to {file.readlink()}, which is missing")
    if file.exists():
        raise UnreadableWeightsError(
            file, "it is a pipe or a device, not a file. Write the weights to a file first"
        )
    if re.match(r"\w+:/", str(file)):
        raise ValueError(f"The checkpoint {file} is an address. Download it, and give the file.")
    raise ValueError(f"Found no checkpoint {file}.")


def is_numpy(file: Path) -> bool:
    """True for an archive of NumPy arrays, whatever its name."""
    if not zipfile.is_zipfile(file):
        return False
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
    return bool(names) and all(name.endswith(".npy") for name in names)


def _weights_in(folder: Path) -> Path:
    """The only weights in a folder."""
    for name in (*_INDEXES, *_WHOLE):
        if (folder / name).is_file():
            return folder / name
    names = sorted(path.name for path in folder.iterdir())
    if any(name.endswith(".distcp") for name in names):
        raise UnreadableWeightsError(
            folder,
            "it is a distributed checkpoint. Convert it by `python -m "
            "torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER FILE.pth`",
        )
    if "zero_to_fp32.py" in names or any(
        "_model_states" in name or name.startswith("zero_pp_rank") for name in names
    ):
        raise UnreadableWeightsError(
            folder,
            "it is a checkpoint of DeepSpeed, whose weights are in parts. Join them by its zero_to_fp32.py",
        )
    if "adapter_config.json" in names:
        raise UnreadableWeightsError(
            folder, "it holds a LoRA adapter. Call merge_and_unload() of peft, and save the result"
        )
    files = [name for name in names if name.endswith(SUFFIXES)]
    if len(files) == 1:
        return folder / files[0]
    listed = f"several files of weights: {', '.join(files[:6])}" if files else "no file of weights"
    raise UnreadableWeightsError(folder, f"it is a folder with {listed}. Name a file")


def _read_parts(index: Path) -> dict:
    """The weights in several files, which an index lists."""
    try:
        parts = json.loads(read_text(index))["weight_map"]
        names = sorted(set(parts.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnreadableWeightsError(
            index, "it is not an index of weights (no weight_map)"
        ) from error
    content = {}
    for name in names:
        part = index.parent / name
        if not part.is_file():
            raise UnreadableWeightsError(index, f"its part {name} is missing from {index.parent}")
        content |= read_weights(part)
    lacking = sorted(set(parts) - set(content))
    if lacking:
        raise UnreadableWeightsError(
            index, f"its parts lack {len(lacking)} tensors, such as {lacking[0]}"
        )
    return content


def _require_weights(file: Path, start: bytes) -> None:
    """Raise ValueError for a file that begins as something else than weights."""
    if not start:
        raise UnreadableWeightsError(file, "it is empty. Download or save it again")
    for beginning, reason in _BEGINNINGS:
        if re.match(beginning, start, re.IGNORECASE):
            raise UnreadableWeightsError(file, reason)
    if file.suffix == ".msgpack":
        raise UnreadableWeightsError(
            file, "it holds weights of Flax, which vitlens does not read. Convert them to PyTorch"
        )
    if start.lstrip()[:1] in (b"{", b"[") and b"\0" not in start:
        raise UnreadableWeightsError(file, "it is JSON, not weights")


def _is_safetensors(start: bytes) -> bool:
    return len(start) > 8 and start[8:9] == b"{"


def _read_safetensors(file: Path) -> dict:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except (SafetensorError, ValueError, KeyError) as error:
        reason = str(error).rstrip(".")
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
        size = file.stat().st_size
        cut = re.search(r"(?i)invalid ?offset|incomplete|not fully covered", reason)
        damaged = length + 8 > size or cut
        if damaged:
            reason = (
                f"it ends after {size:,} bytes, before its last tensor. Download or copy it again"
            )
        raise UnreadableWeightsError(file, reason) from error


def _read_arrays(file: Path) -> dict:
    """The arrays of a NumPy archive as tensors."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            return {name: _tensor_of(arrays[name]) for name in arrays.files}
    except (ValueError, TypeError, OSError, zipfile.BadZipFile) as error:
        raise UnreadableWeightsError(
            file, f"its arrays are damaged or objects ({error})"
        ) from error


def _tensor_of(array: np.ndarray) -> Tensor:
    """A NumPy array of any byte order as a tensor."""
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(np.ascontiguousarray(native).reshape(array.shape))


def damaged_entries(file: Path) -> list[str]:
    """Names of the entries of a file of torch.save whose bytes differ from their checksums. torch.load reads none.

    >>> damaged_entries(Path("intact.pth"))
    []
    """
    if not (file.is_file() and zipfile.is_zipfile(file)):
        return []
    damaged = []
    with zipfile.ZipFile(file) as archive:
        for name in archive.namelist():
            try:
                with archive.open(name) as entry:
                    while entry.read(2**20):
                        pass
            except zipfile.BadZipFile:
                damaged.append(name)
    return damaged


def _read_torch(file: Path, start: bytes) -> dict:
    """The content of a file of torch.save, without running any code in it."""
    zipped = start.startswith(b"PK")
    if zipped and not zipfile.is_zipfile(file):
        raise UnreadableWeightsError(
            file,
            f"it ends after {file.stat().st_size:,} bytes, before its end. Download or copy it again",
        )
    if zipped:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
        if any(name.endswith("/constants.pkl") for name in names):
            raise UnreadableWeightsError(
                file,
                "it is a TorchScript program. Save the weights: "
                "torch.save(torch.jit.load(FILE).state_dict(), 'weights.pth')",
            )
        if not any(name.endswith("data.pkl") for name in names):
            raise UnreadableWeightsError(
                file, "it is a ZIP archive without weights. Unpack it first"
            )
    elif not start.startswith(b"\x80"):
        raise UnreadableWeightsError(
            file, "it is not a file of PyTorch, safetensors or NumPy. Download or save it again"
        )
    elif not start.startswith(_LEGACY):
        raise UnreadableWeightsError(
            file,
            "it is a pickle that torch.save did not write, and loading it would run code. Save the weights as tensors: "
            "torch.save(weights, 'weights.pth')",
        )
    try:
        with torch.serialization.safe_globals(_plain_classes()):
            content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UnreadableWeightsError(file, _reason_of(file, error)) from error
    if isinstance(content, Tensor):
        raise UnreadableWeightsError(file, f"it holds a single tensor. {_HELP}")
    if not isinstance(content, dict):
        raise UnreadableWeightsError(file, f"it holds a {type(content).__name__}. {_HELP}")
    return content


_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""First bytes of a file that torch.save wrote before PyTorch 1.6."""


def _plain_classes() -> list:
    """Classes without code of their own that training programs store beside the weights."""
    scalar = np.float64(0).__reduce__()[0]
    array = np.zeros(1).__reduce__()[0]
    numpy = [
        (function, f"{module}.multiarray.{function.__name__}")
        for function in (scalar, array)
        for module in ("numpy.core", "numpy._core")
    ]
    kinds = {type(np.dtype(kind)) for kind in np.sctypeDict.values() if kind is not np.object_}
    paths = [
        (pathlib.PosixPath, name) for name in ("pathlib.PosixPath", "pathlib._local.PosixPath")
    ]
    times = [datetime.datetime, datetime.date, datetime.timedelta, datetime.timezone]
    containers = [argparse.Namespace, types.SimpleNamespace, defaultdict, list, dict, int, float]
    return [*containers, *paths, *times, np.dtype, np.ndarray, *numpy, *kinds]


def _global_name(kind: type | tuple[object, str]) -> str:
    """Full name of a class, or the name that is given beside it."""
    return kind[1] if isinstance(kind, tuple) else f"{kind.__module__}.{kind.__qualname__}"


def _reason_of(file: Path, error: Exception) -> str:
    """The cause of an error of torch.load."""
    try:
        logging.disable(logging.WARNING)
        classes = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        known = {_global_name(kind) for kind in _plain_classes()}
    except Exception:
        classes = []
        known = set()
    finally:
        logging.disable(logging.NOTSET)
    others = [name for name in classes if name not in known]
    quantized = [name for name in others if "quantized" in name or "PerChannel" in name]
    if quantized or "quantized" in str(error).lower():
        return f"its weights are quantized. {_HELP} before quantization"
    modules = [name for name in others if re.search(r"(?i)module|torch\.nn\.|transformer", name)]
    if modules:
        return f"it is a whole pickled model ({modules[0]}), and loading it would run its code. {_HELP}"
    if others:
        return (
            f"it holds pickled objects of {', '.join(others[:3])} beside the weights, and loading them would run code. "
            f"{_HELP} alone"
        )
    text = " ".join(str(error).split())[:160].rstrip(".")
    return f"it is damaged ({type(error).__name__}: {text}). Download or save it again"


def flat_tensors(content: dict, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of nested dictionaries, with dots between the names. The states of optimizers are left out.

    Sparse tensors become dense. Arrays count as tensors in a dictionary of nothing else.
    """
    of_optimizer = "param_groups" in content
    only_arrays = all(isinstance(value, np.ndarray) for value in content.values())
    for name, value in content.items():
        if not isinstance(name, str) or (of_optimizer and name == "state"):
            continue
        if isinstance(value, Tensor):
            yield path + name, value if value.layout == torch.strided else value.to_dense()
        elif isinstance(value, np.ndarray) and only_arrays and value.dtype.kind in "fiub":
            yield path + name, _tensor_of(value)
        elif isinstance(value, dict):
            yield from flat_tensors(value, f"{path}{name}.")


def hidden_tensors(content: object) -> int:
    """Number of tensors in a file, including those in lists and under numbers.

    >>> hidden_tensors({"models": [{"weight": torch.ones(1)}]})
    1
    """
    if isinstance(content, Tensor):
        return 1
    if isinstance(content, dict):
        content = list(content.values())
    if isinstance(content, list | tuple):
        return sum(hidden_tensors(value) for value in content)
    return 0


_NAMESPACES = (argparse.Namespace, types.SimpleNamespace)


def plain_settings(content: dict) -> dict[str, object]:
    """Settings that a training program stored beside the weights, by their last name. The outermost comes first.

    >>> plain_settings({"arch": "vit_small", "args": {"img_size": 384}})["img_size"]
    384
    """
    settings: dict[str, object] = {}
    level = [content]
    for _ in range(4):
        below = []
        for part in level:
            values = part if isinstance(part, dict) else vars(part)
            for name, value in values.items():
                if isinstance(value, (dict, *_NAMESPACES)):
                    below.append(value)
                stated = value is not None and not isinstance(value, Tensor)
                if isinstance(name, str) and stated:
                    settings.setdefault(name, value)
        level = below
    return {name: value for name, value in settings.items() if not isinstance(value, _NAMESPACES)}
