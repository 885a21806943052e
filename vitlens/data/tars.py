"""Images in tar files of class folders.

An image in an uncompressed tar file is a stretch of its bytes. Where each begins is read once, from the headers; after
that a sample is one seek and one read, in any order and by any process.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from posixpath import dirname, join, normpath

import numpy as np

from vitlens.data.division import divided, refuse_unknown
from vitlens.data.samples import EVERY_SPLIT, SPLITS, Listing, first_of, is_image, packed, part


@dataclass(frozen=True)
class Members:
    """Files in tar ``archives``; ``spans`` int64 (N, 3) is the number of the archive, where it begins, its bytes."""

    archives: Sequence[Path]
    names: np.ndarray
    spans: np.ndarray

    def __len__(self) -> int:
        return len(self.names)

    def name(self, i: int) -> str:
        return os.fsdecode(self.names[i])

    def content(self, i: int) -> bytes:
        archive, start, length = self.spans[i].tolist()
        with open(self.archives[archive], "rb") as file:
            file.seek(start)
            return file.read(length)


def in_tars(archives: Sequence[Path], root: Path, split: str) -> Listing:
    """Tar files of class folders, as timm's reader sees them: a class is the innermost folder or tar around an image.

    Splits are folders or tar files named train and val (valid, validation, test); without them each class is divided.
    """
    found, loose, inside = {}, set(), set()
    for number, archive in enumerate(archives):
        # A lone file is no level of its own: pets.tar is no class.
        prefix = "" if archive == root else archive.relative_to(root).with_suffix("").as_posix() + "/"
        for name, start, length in members(archive):
            if is_image(name):
                found[str(PurePosixPath(prefix + name))] = (number, start, length)
                (inside if PurePosixPath(name).parent.name else loose).add(archive.name)
    splits: dict[str | None, dict[str, list[str]]] = {}
    for name in sorted(found):
        folders = PurePosixPath(name).parts[:-1]
        if not folders:
            raise ValueError(f"{root} holds {name}, which lies in no folder that names its class.")
        if folders[-1] in EVERY_SPLIT:  # without labels, as test images may be
            splits.setdefault(folders[-1], {})
            continue
        side = next((part for part in folders[:-1] if part in EVERY_SPLIT), None)
        splits.setdefault(side, {}).setdefault(folders[-1], []).append(name)
    if splits and not any(splits.values()):
        raise ValueError(f"{root} holds {min(found)}, which lies in no folder that names its class.")
    if set(splits) & EVERY_SPLIT:
        names, labels, class_names, note = *_side(splits, part(split), root), ""
    elif splits:
        if loose and inside:
            raise ValueError(
                f"In {root}, images of {min(loose)} lie loose, but those of {min(inside)} in folders or tar files of "
                "classes, so what makes a class cannot be told. Give each class a folder of its own; ImageNet's own "
                "archives are read by name: imagenet, with this folder as root."
            )
        by_class = dict(sorted(splits[None].items()))
        names, labels, note = divided(by_class, split, root)
        class_names = tuple(by_class)
    else:
        raise ValueError(f"{root} holds no image. A tar file of class folders has members such as rose/1.jpg.")
    return Listing(Members(archives, packed(names), np.array([found[n] for n in names])), labels, class_names, note)


def _side(splits: dict, split: str, root: Path) -> tuple[list[str], list[int], tuple[str, ...]]:
    present = first_of(split, splits)
    if present is None:
        raise ValueError(
            f"{root} holds {', '.join(sorted(filter(None, splits)))}, but nothing named {' or '.join(SPLITS[split])}, "
            f"which the {split} split is read from."
        )
    train = first_of("train", splits) or present
    class_names = sorted(splits[train])
    refuse_unknown(set(splits[present]) - set(class_names), f"{present} of {root}", train)
    pairs = [(name, label) for label, c in enumerate(class_names) for name in splits[present].get(c, ())]
    return [name for name, _ in pairs], [label for _, label in pairs], tuple(class_names)


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
        if to in spans or is_image(name):  # an image that links to nothing is an empty, so a damaged one
            yield folder + name, *spans.get(to, (start, 0))
