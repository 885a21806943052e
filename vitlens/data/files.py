"""Atomic writes, folder locks, and downloads from the Hugging Face hub."""

from __future__ import annotations

import os
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout


def write(path: Path, content: bytes) -> None:
    """Write a file atomically: a reader finds the old content or the new, whatever happens."""
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


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep a folder for this process in this block. Raises ValueError if another process has it."""
    lock = FileLock(folder / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(f"Another process is at work in {folder}. Wait for it, or give another folder.") from None
    try:
        yield
    finally:
        lock.release()


def writable(folder: Path, option: str) -> None:
    """Raise ValueError, which names the option, if a folder cannot be written to, or cannot be made."""
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as problem:
        raise ValueError(
            f"Results go to {folder}, which cannot be written to ({problem.strerror}); give another {option}."
        ) from problem


def reach() -> None:
    """Raise OSError at once if the hub cannot be reached. Its own libraries retry for half a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise OSError("HF_HUB_OFFLINE is set")
    with suppress(urllib.error.HTTPError):  # whatever it answers, it is there
        urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=10).close()


def announce(what: str, where: object) -> None:
    """Print what was stored where: "Fetched torch/cifar10 into …"."""
    print(f"{what} into {where}, to be kept there.", file=sys.stderr, flush=True)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the hub's warnings about its retries in this block; a final failure is still raised."""
    from huggingface_hub.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
