"""WebDataset shards: tar files whose members are grouped into samples by name."""

from __future__ import annotations

import json
import re
import textwrap
from contextlib import suppress
from pathlib import Path, PurePosixPath

import numpy as np

from vitlens.data.samples import (
    EVERY_SPLIT,
    SPLITS,
    SUFFIXES,
    Listing,
    first_of,
    names_beside,
    numbered,
    packed,
    parsed,
)
from vitlens.data.tars import Members, members
from vitlens.files import announce, quiet


class MissingShards(ValueError):
    """The shards of a split are not there, or not all of them."""


def in_shards(folder: Path, split: str) -> Listing:
    """WebDataset shards: tar files of ``KEY.jpg`` (or another image) beside ``KEY.cls`` or ``KEY.json``.

    Which shards belong to a split says ``_info.json``, as timm has it, else their names or the folders train, val
    (valid, validation) and test that they lie in, where ``nshards.txt`` may say how many there are. The label is the
    number in the ``.cls`` file, or under ``label`` (or the split's ``alt_label``) in the ``.json``; samples with one
    below 0 are left out. Class names: ``classes.json`` or, one a line, ``classnames.txt`` in the folder, else numbers.
    """
    archives, label_key = _shards(folder, split)
    names, labels, spans = [], [], []
    for number, archive in enumerate(archives):
        samples: dict[str, dict[str, tuple[int, int]]] = {}
        for name, start, length in members(archive):
            stem, _, kind = PurePosixPath(name).name.partition(".")
            if stem:  # a Mac, or a desktop, leaves files whose names begin with a dot
                samples.setdefault(str(PurePosixPath(name).with_name(stem)), {})[kind.lower()] = (start, length)
        with open(archive, "rb") as file:
            for key, parts in samples.items():
                kind = next((kind for kind in parts if "." + kind in SUFFIXES), None)
                if kind is None:
                    continue
                label = _label(file, parts, label_key, f"{archive.name}: {key}")
                if label >= 0:
                    names.append(f"{archive.name}: {key}.{kind}")
                    labels.append(label)
                    spans.append((number, *parts[kind]))
    samples = Members(archives, packed(names), np.array(spans, dtype=np.int64).reshape(-1, 3))
    return Listing(samples, labels, names_beside(folder) or _lines(folder) or _numbers(folder, split, labels))


def _numbers(folder: Path, split: str, labels: list[int]) -> tuple[str, ...]:
    training = []
    if split != "train":
        with suppress(ValueError):  # missing or damaged, they are not what was asked for
            training = in_shards(folder, "train").labels
    return numbered(labels, training)


def fetched(name: str, folder: Path, split: str) -> None:
    """Fetch what a split needs of a data set of the Hugging Face hub, ``OWNER/SET`` in shards, into ``folder``."""
    from huggingface_hub import snapshot_download

    wanted = [pattern for word in SPLITS[split] for pattern in (f"{word}/*", f"*{word}*.tar")]
    try:
        with quiet():
            snapshot_download(name, repo_type="dataset", local_dir=folder, allow_patterns=[*wanted, "*.txt", "*.json"])
        _shards(folder, split)  # where there is no network, half a download is returned as if it were whole
    except Exception as problem:  # the network, the hub, the disk
        reason = textwrap.shorten(str(problem), 160, placeholder=" …").rstrip(".")
        raise ValueError(
            f"wds/{name} is not in {folder} and cannot be fetched from here ({type(problem).__name__}: {reason}). To "
            f"have it, run `hf download {name} --repo-type dataset --local-dir {folder}` where there is a network, and "
            "put what that leaves there."
        ) from problem
    announce(f"Fetched wds/{name}", folder)


def _lines(folder: Path) -> tuple[str, ...] | None:
    return parsed(folder / "classnames.txt", lambda text: tuple(text.splitlines()), "the names of classes, one a line")


def _shards(folder: Path, split: str) -> tuple[list[Path], str]:
    info = next((folder / name for name in ("_info.json", "info.json") if (folder / name).is_file()), None)
    if info is None:
        by_split: dict[str, list[Path]] = {}
        for shard in sorted(folder.glob("*.tar")):
            for word in set(re.split(r"[-_.]", shard.stem)) & EVERY_SPLIT:
                by_split.setdefault(word, []).append(shard)
        for word in EVERY_SPLIT:
            by_split.setdefault(word, []).extend(sorted((folder / word).glob("*.tar"), key=lambda p: (len(p.name), p)))
        by_split = {word: _complete(shards) for word, shards in by_split.items() if shards}
        shards, label_key = by_split.get(first_of(split, by_split), []), ""
    else:
        splits = parsed(info, _described, "the splits by name, as timm has it, each a dict with its filenames")
        names, label_key = splits.get(first_of(split, splits), ([], ""))
        shards = [folder / name for name in names]
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing or not shards:
        lacking = f"{missing[0]}, which {info.name} lists" if missing else f"shards of its {split} split"
        raise MissingShards(
            f"{folder} lacks {lacking}. WebDataset shards lie in one folder, with _info.json or with "
            f"{' or '.join(SPLITS[split])} in their names, or in folders so named."
        )
    return shards, label_key


def _complete(shards: list[Path]) -> list[Path]:
    """The shards, if they are as many as ``nshards.txt`` beside them says; none if not."""
    count = parsed(shards[0].parent / "nshards.txt", int, "the number of the shards beside it")
    return shards if count in (None, len(shards)) else []


def _described(text: str) -> dict[str, tuple[list[Path], str]]:
    """Of each split the names of its shards, and under what the label lies if that is not ``label``."""
    splits = json.loads(text).get("splits", {})
    return {
        name: ([Path(shard) for shard in content.get("filenames", [])], content.get("alt_label", ""))
        for name, content in splits.items()
    }


def _label(file, parts: dict[str, tuple[int, int]], label_key: str, key: str) -> int:
    kind = "cls" if "cls" in parts and not label_key else "json"
    try:
        start, length = parts[kind]
        file.seek(start)
        content = file.read(length)
        return int(content) if kind == "cls" else int(json.loads(content)[label_key or "label"])
    except (KeyError, ValueError, TypeError) as problem:
        raise ValueError(
            f"{key} has no label: a number is wanted in a .cls file, or under {label_key or 'label'!r} in a .json file."
        ) from problem
