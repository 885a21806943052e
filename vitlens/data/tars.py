"""Images in tar files: of class folders, or of WebDataset samples.

An image in an uncompressed tar file is a stretch of its bytes. Where each begins is read once, from the headers; after
that a sample is one seek and one read, in any order and by any process. `webdataset` streams through a shuffle buffer,
which a run could not resume exactly (its indexed `wids` needs an index made first); timm's reader knows no splits and
no links.
"""

from __future__ import annotations

import json
import re
import tarfile
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from posixpath import dirname, join, normpath

import numpy as np

from vitlens.data.files import announce, quiet
from vitlens.data.samples import (
    EVERY_SPLIT,
    NO_CLASS,
    SPLITS,
    SUFFIXES,
    Listing,
    Named,
    beside,
    check_known,
    divided,
    first_of,
    is_image,
    is_split,
    labeled,
    names_beside,
    numbers_as_names,
    packed,
    parsed,
)
from vitlens.data.sources import Request

LOOSE = "{} holds {}, which lies in no folder that names its class. Use paths such as rose/1.jpg."


@dataclass(frozen=True)
class Members(Named):
    """Files in tar `archives`; `spans` int64 (N, 3) is the number of the archive, where the file begins, its bytes."""

    archives: Sequence[Path]
    spans: np.ndarray

    def content(self, i: int) -> bytes:
        archive, start, length = self.spans[i].tolist()
        with open(self.archives[archive], "rb") as file:
            file.seek(start)
            return file.read(length)


def members(archive: Path) -> Iterator[tuple[str, int, int]]:
    """Each file in a tar file, and in tar files within it: its path, where it begins and its length, in bytes."""
    try:
        with tarfile.open(archive, "r:") as tar:
            yield from _walk(tar, "", 0)
    except (tarfile.TarError, OSError) as problem:
        raise ValueError(
            f"{archive} is not a whole, uncompressed tar file ({problem}). Fetch it again, or decompress it."
        ) from problem


def _walk(tar: tarfile.TarFile, folder: str, start: int) -> Iterator[tuple[str, int, int]]:
    spans: dict[str, tuple[int, int]] = {}
    links: dict[str, str] = {}
    for member in tar:
        name, to = normpath(member.name), normpath(member.linkname)
        if member.issym():  # to a path from where it lies, which may come later
            links[name] = normpath(join(dirname(name), member.linkname))
            continue
        if member.islnk():  # a further name of what came before
            if to in links:
                links[name] = to
                continue
            if to not in spans:
                raise tarfile.TarError(f"{name} is a link to {to}, which does not come before it")
            spans[name] = spans[to]
        elif member.isfile():
            spans[name] = start + member.offset_data, member.size
        else:
            continue
        if name.endswith(".tar"):
            with tarfile.open(fileobj=tar.extractfile(member), mode="r:") as inner:
                yield from _walk(inner, folder + name.removesuffix(".tar") + "/", spans[name][0])
        else:
            yield folder + name, *spans[name]
    for name, to in links.items():
        for _ in range(40):  # links to links, as many as Linux follows
            to = links.get(to, to)
        if to in spans or is_image(name):  # a link to nothing is an empty image, which counts as damaged
            yield folder + name, *spans.get(to, (start, 0))


# Class folders


def in_tars(archives: Sequence[Path], root: Path, request: Request) -> Listing:
    """Tar files of class folders: the class of an image is the innermost folder or tar around it, as in timm.

    Splits are folders or tar files with the names that `load` lists; without them each class is divided.
    """
    found, loose, inside = {}, set(), set()
    for number, archive in enumerate(archives):
        # A lone file is no level of its own: pets.tar is no class.
        prefix = "" if archive == root else archive.relative_to(root).with_suffix("").as_posix() + "/"
        for name, start, length in members(archive):
            if is_image(name):
                found[str(PurePosixPath(prefix + name))] = (number, start, length)
                (inside if PurePosixPath(name).parent.name else loose).add(archive.name)
    splits = _by_split(found, root)
    note = ""
    if named := set(splits) & EVERY_SPLIT:
        if not any(splits[name] for name in named):
            raise ValueError(NO_CLASS.format(root, min(named)))
        names, labels, class_names = _of_split(splits, request.part, root)
        note = beside(root, named, sorted(splits.get(None, ())))
    else:
        if loose and inside:
            raise ValueError(
                f"In {root}, the images of {min(loose)} lie loose but those of {min(inside)} in folders or tar files, "
                "so their classes cannot be told. Give each class a folder of its own; ImageNet's own archives are "
                "read by name: imagenet, with this folder as root."
            )
        by_class = dict(sorted(splits[None].items()))
        names, labels, note = divided(by_class, request.split, root)
        class_names = tuple(by_class)
    return Listing(Members(packed(names), archives, np.array([found[n] for n in names])), labels, class_names, note)


def _by_split(found: dict[str, tuple], root: Path) -> dict[str | None, dict[str, list[str]]]:
    """Names of images by split (None where there is none) and class."""
    splits: dict[str | None, dict[str, list[str]]] = {}
    for name in sorted(found):
        folders = PurePosixPath(name).parts[:-1]
        if folders and is_split(folders[-1]):  # without labels, as test images may be
            splits.setdefault(folders[-1].lower(), {})
        elif folders:
            side = next((part.lower() for part in folders[:-1] if is_split(part)), None)
            splits.setdefault(side, {}).setdefault(folders[-1], []).append(name)
        else:
            raise ValueError(LOOSE.format(root, name))
    if not splits:
        raise ValueError(f"{root} holds no image. A tar file of class folders has members such as rose/1.jpg.")
    if not any(splits.values()):
        raise ValueError(LOOSE.format(root, min(found)))
    return splits


def _of_split(splits: dict, split: str, root: Path) -> tuple[list[str], list[int], tuple[str, ...]]:
    present = first_of(split, splits)
    if present is None:
        raise ValueError(
            f"{root} holds {', '.join(sorted(filter(None, splits)))}, but nothing named {' or '.join(SPLITS[split])}, "
            f"which the {split} split is read from."
        )
    train = first_of("train", splits) or present
    class_names = sorted(splits[train])
    check_known(splits[present], f"{present} of {root}", class_names, train)
    return *labeled(splits[present].get(name, ()) for name in class_names), tuple(class_names)


# WebDataset


class MissingShards(ValueError):
    """The shards of a split are missing, some or all of them."""


def in_shards(folder: Path, split: str) -> Listing:
    """WebDataset shards: tar files of `KEY.jpg` (or another image) beside `KEY.cls` or `KEY.json`.

    `_info.json`, as timm has it, says which shards belong to a split; else their names do, or the folders train, val
    (valid, validation) and test that they lie in, where `nshards.txt` may say how many there are. The label is the
    number in the `.cls` file, or under `label` (or the split's `alt_label`) in the `.json`; samples with a label below
    0 are left out. Class names: `classes.json` or, one a line, `classnames.txt` in the folder, else numbers.
    """
    archives, label_key = _shards(folder, split)
    names, labels, spans = [], [], []
    for number, archive in enumerate(archives):
        samples: dict[str, dict[str, tuple[int, int]]] = {}
        for name, start, length in members(archive):
            stem, _, kind = PurePosixPath(name).name.partition(".")
            if stem:  # hidden files are no samples
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
    class_names = names_beside(folder) or parsed(
        folder / "classnames.txt", lambda text: tuple(text.splitlines()), "the names of classes, one a line"
    )
    if not class_names:
        training = []
        if split != "train":
            with suppress(ValueError):  # missing or damaged, they are not what was asked for
                training = in_shards(folder, "train").labels
        class_names = numbers_as_names(labels, training)
    return Listing(Members(packed(names), archives, np.array(spans, np.int64).reshape(-1, 3)), labels, class_names)


def webdataset(request: Request) -> Listing:
    """`wds/NAME`: shards in `root/NAME` or in `root` itself; `wds/OWNER/SET` is fetched from the hub if missing."""
    name, split, folder = request.name, request.part, request.root / request.name
    try:
        return in_shards(folder if folder.is_dir() or "/" in name else request.root, split)
    except MissingShards:
        if name.count("/") != 1:  # no data set of the hub
            raise
    _fetch(name, folder, split)
    return in_shards(folder, split)


def _fetch(name: str, folder: Path, split: str) -> None:
    from huggingface_hub import snapshot_download

    patterns = ["*.txt", "*.json"]
    for word in SPLITS[split]:
        patterns += [f"{word}/*", f"*{word}*.tar"]
    try:
        with quiet():
            snapshot_download(name, repo_type="dataset", local_dir=folder, allow_patterns=patterns)
        _shards(folder, split)  # where there is no network, half a download is returned as if it were whole
    except Exception as problem:  # the network, the hub, the disk
        reason = textwrap.shorten(str(problem), 160, placeholder=" …").rstrip(".")
        raise ValueError(
            f"wds/{name} is not in {folder} and cannot be fetched from here ({type(problem).__name__}: {reason}). Run "
            f"`hf download {name} --repo-type dataset --local-dir {folder}` where there is a network, and copy the "
            "result there."
        ) from problem
    announce(f"Fetched wds/{name}", folder)


def _shards(folder: Path, split: str) -> tuple[list[Path], str]:
    """The shards of a split, and the key of the labels in `.json` files if it is not `label`."""
    info = next((folder / name for name in ("_info.json", "info.json") if (folder / name).is_file()), None)
    label_key = ""
    if info is None:
        by_split = _by_name(folder)
        shards = by_split.get(first_of(split, by_split), [])
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


def _by_name(folder: Path) -> dict[str, list[Path]]:
    """Shards by split, as their names or folders say, without splits that lack some of those in `nshards.txt`."""
    by_split: dict[str, list[Path]] = {}
    for shard in sorted(folder.glob("*.tar")):
        for word in set(re.split(r"[-_.]", shard.stem)) & EVERY_SPLIT:
            by_split.setdefault(word, []).append(shard)
    for word in EVERY_SPLIT:
        if inside := sorted((folder / word).glob("*.tar"), key=lambda p: (len(p.name), p)):
            by_split.setdefault(word, []).extend(inside)
    counts = {
        word: parsed(shards[0].parent / "nshards.txt", int, "the number of the shards beside it")
        for word, shards in by_split.items()
    }
    return {word: shards for word, shards in by_split.items() if counts[word] in (None, len(shards))}


def _described(text: str) -> dict[str, tuple[list[Path], str]]:
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
            f"{key} has no label: expected a number in a .cls file, or under {label_key or 'label'!r} in a .json file."
        ) from problem
