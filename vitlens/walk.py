"""The walk of folders: all files below a folder, each real file and folder once, and a note about what is left out.

Data sets, image folders and folders of archives are listed here. Files and folders are told apart by device and inode,
so hard links, symbolic links and bind mounts count once. A walk goes into linked folders, but not into the folders that
contain its own, and at most `MAX_DEPTH` levels down.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitlens.texts import shown
from vitlens.waiting import announced

MAX_DEPTH = 100
"""Levels of folders that are read below a folder."""
MAX_FRUITLESS = 100_000
"""Files and folders after which a walk ends that has not found a wanted file."""

SYSTEM_FOLDERS = {
    "__MACOSX",  # in archives of macOS
    "lost+found",  # on disks of Linux
    "$RECYCLE.BIN",
    "System Volume Information",  # on disks of Windows
    "@eaDir",
    "#recycle",  # of Synology, with thumbnails and deleted files
}
"""Folders that systems add to archives, disks and folders of images."""

HIDDEN = "hidden"
REPEATED = "repeated"
LOOP = "loop"
DANGLING = "dangling"
SPECIAL = "special"
CLOSED = "closed"
VANISHED = "vanished"
DEEP = "deep"
_SENTENCES = {
    HIDDEN: ("1 file is hidden", "{} files are hidden"),
    REPEATED: (
        "1 file is another name of a file that is read",
        "{} files are other names of files that are read",
    ),
    LOOP: (
        "1 link leads to a folder that is read already or contains this one",
        "{} links lead to folders that are read already or contain this one",
    ),
    DANGLING: ("1 link leads nowhere", "{} links lead nowhere"),
    SPECIAL: ("1 entry is a pipe, socket or device", "{} entries are pipes, sockets or devices"),
    CLOSED: ("1 file or folder cannot be opened", "{} files or folders cannot be opened"),
    VANISHED: (
        "1 file was removed while its folder was read",
        "{} files were removed while their folder was read",
    ),
    DEEP: (
        f"1 folder is more than {MAX_DEPTH} levels down",
        f"{{}} folders are more than {MAX_DEPTH} levels down",
    ),
}

Identity = tuple[int, int]
"""Device and inode of a file or folder, equal for all its names."""


class Entry(NamedTuple):
    """A file or folder in a folder. about: its `os.stat`, None if `reason` is given. is_link: for symbolic links."""

    name: str
    about: os.stat_result | None
    is_link: bool
    reason: str = ""

    @property
    def is_folder(self) -> bool:
        return self.about is not None and stat.S_ISDIR(self.about.st_mode)


@dataclass
class Walk:
    """Files below a folder, by their names relative to it, with "/" or the system's separator.

    names: wanted files, sorted by folder and name. identities: int (n, 2), device and inode of each. others: files that
    are not wanted. left_out: names of everything else by the reason. originals: the name that is read, by a repeated
    one. has_links: True if a wanted file has several names or is reached through a link. folders: identities of all
    folders that were read.
    """

    names: list[str] = field(default_factory=list)
    identities: np.ndarray = field(default_factory=lambda: np.empty((0, 2), np.uint64))
    others: list[str] = field(default_factory=list)
    left_out: dict[str, list[str]] = field(default_factory=dict)
    originals: dict[str, str] = field(default_factory=dict)
    has_links: bool = False
    folders: set[Identity] = field(default_factory=set)

    def leave_out(self, reason: str, name: str) -> None:
        self.left_out.setdefault(reason, []).append(name)

    def add(self, other: Walk, below: str) -> None:
        """Add what another walk left out, in the folder `below` of this one."""
        self.others += [os.path.join(below, name) for name in other.others]
        for reason, names in other.left_out.items():
            for name in names:
                self.leave_out(reason, os.path.join(below, name))
        for name, original in other.originals.items():
            self.originals[os.path.join(below, name)] = os.path.join(below, original)

    def sentences(self, *, without: Iterable[str] = ()) -> str:
        """Sentences with the number and the names of what was left out, without some reasons, or ""."""
        sentences = []
        for reason, (singular, plural) in _SENTENCES.items():
            names = sorted(self.left_out.get(reason, ()))
            if not names or reason in without:
                continue
            if reason == REPEATED:
                names = [f"{name} is {self.originals[name]}" for name in names]
            count = singular if len(names) == 1 else plural.format(f"{len(names):,}")
            sentences.append(f"{count}: {list_names(names)}.")
        return " ".join(sentences)


def list_names(names: list[str], more: str = " and {:,} more") -> str:
    """The first five of some names, as text."""
    text = ", ".join(map(shown, names[:5]))
    rest = len(names) - 5
    return text + more.format(rest) if rest > 0 else text


def hidden(path: str | os.PathLike) -> bool:
    """True for a relative path with a hidden file or folder, or one of `SYSTEM_FOLDERS`."""
    return any(map(_hidden_name, Path(path).parts))


def _hidden_name(name: str) -> bool:
    return name.startswith(".") or name in SYSTEM_FOLDERS


def identity(about: os.stat_result) -> Identity:
    """Device and inode of a result of `os.stat`."""
    return about.st_dev, about.st_ino & (2**64 - 1)


def surroundings(folder: str | os.PathLike) -> set[Identity]:
    """Identities of a folder and of all folders that contain it, by the path as given and by the real one."""
    found = set()
    for path in (Path(os.path.abspath(folder)), Path(os.path.realpath(folder))):
        for outer in (path, *path.parents):
            try:
                found.add(identity(os.stat(outer)))
            except OSError:
                continue
    return found


def entries(folder: str | os.PathLike) -> Iterator[Entry]:
    """The files and folders in a folder, sorted by name. Raises OSError for a folder that cannot be read."""
    with os.scandir(folder) as listed:
        listed = sorted(listed, key=_name)
    for entry in listed:
        is_link = entry.is_symlink()
        try:
            about = os.stat(entry.path)  # entry.stat() has no device and inode on Windows
        except OSError as problem:
            yield Entry(entry.name, None, is_link, _reason(problem, is_link))
            continue
        is_plain = stat.S_ISDIR(about.st_mode) or stat.S_ISREG(about.st_mode)
        if is_plain:
            yield Entry(entry.name, about, is_link)
        else:
            yield Entry(entry.name, None, is_link, SPECIAL)


def _name(entry: os.DirEntry) -> str:
    return entry.name


def _reason(problem: OSError, is_link: bool) -> str:
    """The reason why an entry is left out."""
    if problem.errno == errno.ELOOP:
        return DANGLING
    if isinstance(problem, FileNotFoundError):
        return DANGLING if is_link else VANISHED
    return CLOSED


def walk(
    folder: str | os.PathLike, wanted: Callable[[str], bool], most: float = MAX_FRUITLESS
) -> Walk:
    """All files below a folder that are `wanted` (a function of the path), each real file once.

    Of several names of a file, the first one outside links is read, or the first one. Raises ValueError for a folder
    that cannot be read, and after `most` files and folders without a wanted file, not counting hidden ones. A list that
    takes long is announced.
    """
    what = f"the list of files in {shown(folder)}"
    with announced(what, "The disk may be slow, or the folder large. Ctrl-C ends it."):
        return _walk(os.fspath(folder), wanted, most)


def _walk(folder: str, wanted: Callable[[str], bool], most: float) -> Walk:
    root = _with_separator(folder)
    result = Walk(folders=surroundings(folder))
    found = []  # (is behind a link, folder, name, identity, number of names)
    number = 0
    waiting = [("", False)]  # folders to read, and whether they are behind a link
    links = []  # links to folders, for after the real folders
    while waiting or links:
        if not waiting:
            links.sort(reverse=True)
            place, about = links.pop()
            if about in result.folders:
                result.leave_out(LOOP, place)
                continue
            result.folders.add(about)
            waiting.append((place, True))
        below, behind_link = waiting.pop()
        try:
            inside = list(entries(os.path.join(folder, below)))
        except OSError as problem:
            if not below:
                raise ValueError(
                    f"The folder {shown(folder)} cannot be read ({problem.strerror})."
                ) from problem
            result.leave_out(CLOSED, below)
            continue
        depth = below.count(os.sep) + bool(below)
        is_hidden = hidden(below)
        prefix = _with_separator(below)
        number += 0 if is_hidden else len(inside)
        for entry in inside:
            place = prefix + entry.name
            if entry.reason:
                result.leave_out(entry.reason, place)
            elif entry.is_folder:
                about = identity(entry.about)
                if depth == MAX_DEPTH:
                    result.leave_out(DEEP, place)
                elif entry.is_link:
                    links.append((place, about))
                elif about in result.folders:  # a mount of a folder in another one
                    result.leave_out(LOOP, place)
                else:
                    result.folders.add(about)
                    waiting.append((place, behind_link))
            elif is_hidden or _hidden_name(entry.name):
                result.leave_out(HIDDEN, place)
            elif wanted(root + place):
                is_linked = behind_link or entry.is_link
                names = entry.about.st_nlink
                found.append((is_linked, below, entry.name, identity(entry.about), names))
            else:
                result.others.append(place)
        if number > most and not found:
            raise ValueError(
                f"The first {number:,} files and folders below {shown(folder)} hold no images. Give a folder of images."
            )
    _keep_one_name(result, found)
    result.others.sort()
    return result


def _with_separator(folder: str) -> str:
    """A folder as the beginning of paths below it."""
    return folder if not folder or folder.endswith(os.sep) else folder + os.sep


def _keep_one_name(result: Walk, found: list[tuple]) -> None:
    """Set the wanted files of a walk: one name of each file in `found`."""
    found.sort()
    first_names: dict[Identity, str] = {}
    kept = []
    for is_linked, below, name, about, names in found:
        place = _with_separator(below) + name
        result.has_links |= is_linked or names > 1
        if about in first_names:
            result.leave_out(REPEATED, place)
            result.originals[place] = first_names[about]
        else:
            first_names[about] = place
            kept.append((below, name, about))
    kept.sort()
    result.names = [_with_separator(below) + name for below, name, _ in kept]
    pairs = [about for _, _, about in kept]
    result.identities = np.array(pairs, np.uint64).reshape(-1, 2)


def archives(folder: str | os.PathLike, suffix: str) -> tuple[list[Path], Walk]:
    """Files in a folder, not below it, whose names end with a suffix in any case, and what was left out."""
    result = Walk()
    files: list[Path] = []
    try:
        inside = list(entries(folder))
    except OSError:
        return files, result
    for entry in inside:
        if not entry.name.lower().endswith(suffix):
            continue
        if entry.reason:
            result.leave_out(entry.reason, entry.name)
        elif hidden(entry.name):
            result.leave_out(HIDDEN, entry.name)
        elif not entry.is_folder:
            files.append(Path(folder, entry.name))
    return files, result


def unique_files(files: Iterable[Path]) -> tuple[list[Path], Walk]:
    """The first of the names of each real file, in order, and what was left out: the other names."""
    result = Walk()
    first_names: dict[object, Path] = {}
    for file in files:
        try:
            about = identity(os.stat(file))
        except OSError:
            about = file
        first = first_names.setdefault(about, file)
        if first is not file:
            here = os.fspath(file)
            result.leave_out(REPEATED, here)
            result.originals[here] = os.fspath(first)
    return list(first_names.values()), result


def note_on_overlap(files: Iterable[Path], others: Iterable[Path], title: str) -> str:
    """Sentence about files that are also in the split `title`, which has the files `others`, or ""."""
    there = {identity(os.stat(file)) for file in others}
    same = [str(file) for file in files if identity(os.stat(file)) in there]
    if not same:
        return ""
    return f"The {title} split has the same images, because files of both are the same: {list_names(same)}."


def in_several(groups: list[np.ndarray]) -> list[tuple[int, int]]:
    """(group, position) of every file that is in several groups of `Walk.identities`, the same ones together."""
    if not groups:
        return []
    owners = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    positions = np.concatenate([np.arange(len(group)) for group in groups])
    every = np.concatenate(groups)
    order = np.lexsort((owners, every[:, 1], every[:, 0]))
    same = (every[order[1:]] == every[order[:-1]]).all(1)
    is_shared = np.zeros(len(order), bool)
    is_shared[1:] |= same
    is_shared[:-1] |= same
    chosen = order[is_shared]
    return list(zip(owners[chosen].tolist(), positions[chosen].tolist(), strict=True))


def has_link(folder: str | os.PathLike, most: int = 50_000) -> bool:
    """True if a symbolic link is among the first `most` files and folders below a folder."""
    number = 0
    for below, folders, files in os.walk(folder):
        for name in (*folders, *files):
            number += 1
            if os.path.islink(os.path.join(below, name)):
                return True
        if number > most:
            break
    return False
