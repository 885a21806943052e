"""The writer of all result files: whole or not at all, changed under a lock, and nothing of others removed.

* `write` replaces a file at once. Readers, a full disk and a killed process find the old content or the new.
* `update` reads, changes and writes a file while no other process does. `lock` and `lock_folder` hold it for longer.
* `require_ours` and `remove_ours` keep files that vitlens did not write.

A lock belongs to an open file, so that it ends with its process. The lock file names its owner and is removed.
"""

from __future__ import annotations

import csv
import errno
import hashlib
import json
import os
import re
import select
import socket
import stat
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from vitlens import waiting
from vitlens.texts import encode

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

TEMPORARY = ".vitlens-{}.tmp"
"""Name of a file that is being written, in the folder of its target."""
TRIES = 5
"""Number of times that a temporary file may vanish while it is written."""
RENAMES = 100
"""Number of attempts to replace a file on Windows that another program holds open, within two seconds."""
NAME_LENGTH = 255
"""Bytes of the longest name of a file, on all common file systems."""
WINDOWS = os.name == "nt"
DEVICES = {"CON", "PRN", "AUX", "NUL"} | {
    f"{port}{n}" for port in ("COM", "LPT") for n in range(10)
}
"""Names of devices on Windows, where CON.json is one, too."""
LONGEST_PATH = 259
"""Characters of a path that Windows opens in its usual settings."""
BUSY = {errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES, errno.EDEADLK}
"""Errors of `flock` for a file that another process has locked."""
MARK = "vitlens"
"""First word of a lock file's text, of the creator of a PDF or SVG figure, and "Software" of a PNG figure."""
FORMATS = ("png", "pdf", "svg")
"""Formats of figures. Each is the suffix of its files, too."""
UNSEALED = f"{MARK} {'0' * 16}"
"""Creator of a PDF or SVG figure before `seal` replaces the zeros by the digest of the file."""


# Writing


def write(path: str | os.PathLike, content: bytes | str) -> None:
    """Write a file atomically: its bytes, or its text in UTF-8.

    The file keeps its permissions. A link is followed, and its target is replaced. Raises OSError with one sentence,
    and the earlier content is unchanged then.
    """
    data = encode(content) if isinstance(content, str) else content
    path = Path(path)
    try:
        _require_valid_on_windows(path)
        _write(_target(path), data)
    except OSError as problem:
        raise _unwritten(path, problem) from problem


def append(path: str | os.PathLike, text: str) -> None:
    """Add text to the end of a file, which must reach the disk. The caller holds the lock of its folder."""
    try:
        with open(path, "a", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as problem:
        raise _unwritten(Path(path), problem) from problem


def update(
    path: str | os.PathLike, change: Callable[[bytes | None], bytes | str], option: str = "file"
) -> None:
    """Replace the content of a file by `change(content)`, or by `change(None)` if there is no file.

    Other processes that update the file wait meanwhile. option: name of the file's option in messages.
    """
    with lock(path, option):
        target = _target(Path(path))
        before = target.read_bytes() if target.is_file() else None
        write(target, change(before))


def _target(path: Path) -> Path:
    """The file that a path names, behind all links."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def _write(path: Path, data: bytes) -> None:
    try:
        before = path.stat()
    except FileNotFoundError:
        before = None
    if before and not stat.S_ISREG(before.st_mode):
        _write_into(path, data)
        return
    _remove_leftovers(path.parent)
    for attempt in range(TRIES):
        temporary, descriptor = _open_temporary(path.parent)
        try:
            with open(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                if before:
                    _copy_permissions(before, file.fileno())
                os.fsync(file.fileno())
                if fcntl is not None:  # while it is locked, so that no one takes it for a leftover
                    os.replace(temporary, path)
            if fcntl is None:  # Windows renames closed files only
                _replace_closed(temporary, path)
            break
        except FileNotFoundError:
            # On a file system whose locks do not reach other machines, one of them may have removed it.
            if attempt == TRIES - 1 or not path.parent.is_dir():
                raise
        finally:
            temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def _replace_closed(temporary: Path, path: Path) -> None:
    """Rename a file on Windows, where a program that reads the target, such as a virus scanner, delays it."""
    for attempt in range(RENAMES):
        try:
            os.replace(temporary, path)
            return
        except PermissionError:
            if attempt == RENAMES - 1:
                raise
            waiting.sleep(waiting.PAUSE)


def _write_into(path: Path, data: bytes) -> None:
    """Write into a device or a pipe, such as /dev/stdout, which must not be replaced by a file."""
    try:
        descriptor = os.open(path, os.O_WRONLY | getattr(os, "O_NONBLOCK", 0))
    except OSError as problem:
        if problem.errno == errno.ENXIO:
            raise OSError(errno.ENXIO, "no process reads this pipe") from problem
        raise
    if hasattr(os, "set_blocking"):
        os.set_blocking(descriptor, True)
    with open(descriptor, "wb") as file:
        file.write(data)


def _open_temporary(folder: Path) -> tuple[Path, int]:
    """A new file, and its descriptor with a lock that ends with this process."""
    while True:
        path = folder / TEMPORARY.format(uuid.uuid4().hex)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        if fcntl is None:
            return path, descriptor
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink:  # not yet removed as a leftover, before it was locked
            return path, descriptor
        os.close(descriptor)


def _copy_permissions(before: os.stat_result, descriptor: int) -> None:
    if not hasattr(os, "fchmod"):
        return
    if hasattr(os, "fchown"):
        with suppress(OSError):  # only root may
            os.fchown(descriptor, before.st_uid, before.st_gid)
    with suppress(OSError):
        os.fchmod(descriptor, stat.S_IMODE(before.st_mode))


def _sync_folder(folder: Path) -> None:
    """Make a rename reach the disk, where the file system can."""
    if os.name != "posix":
        return
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


_searched: set[Path] = set()
"""Folders in which this process has looked for leftovers."""


def _remove_leftovers(folder: Path) -> None:
    """Remove temporary files of processes that were killed. Those of running processes are locked."""
    if fcntl is None or folder.absolute() in _searched:
        return
    _searched.add(folder.absolute())
    for path in folder.glob(TEMPORARY.format("*")):
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)


def _unwritten(path: Path, problem: OSError) -> OSError:
    """The error of a file that could not be written, with one sentence."""
    if problem.strerror is None:  # it has a sentence already
        return problem
    kept = "Its earlier content is unchanged. " if os.path.isfile(path) else ""
    remedy = "Give another place"
    if problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        remedy = "Make space there, or give another place"
    elif WINDOWS and kept and isinstance(problem, PermissionError):
        remedy = "Close the programs that have it open, or give another place"
    elif WINDOWS and len(os.path.abspath(path)) + len(TEMPORARY) + 32 > LONGEST_PATH:
        remedy = f"Give a shorter path. Windows allows {LONGEST_PATH} characters"
    error = OSError(f"{shortened(path)} cannot be written ({problem.strerror}). {kept}{remedy}.")
    error.errno = problem.errno
    return error


def shortened(path: str | os.PathLike) -> str:
    """A path for a message. The middle of a long one is left out."""
    text = os.fspath(path)
    return text if len(text) <= 200 else f"{text[:100]} … {text[-60:]}"


# Reading


def read_text(
    path: str | os.PathLike,
    *,
    encoding: str = "utf-8",
    errors: str = "strict",
    pipes: bool = False,
) -> str:
    """Text of a file, as `read`. Raises OSError for a pipe or a device unless `pipes`, and UnicodeDecodeError."""
    text = read(path, pipes=pipes).decode(encoding, errors)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_names(path: str | os.PathLike) -> str:
    """Text of a file of names in UTF-8, also behind a byte order mark. Raises ValueError for other encodings."""
    try:
        return read_text(path, encoding="utf-8-sig")
    except UnicodeDecodeError as problem:
        raise ValueError(
            f"{path} must be text in UTF-8 ({problem}). Save it in UTF-8."
        ) from problem


def read(path: str | os.PathLike, *, pipes: bool = True) -> bytes:
    """Content of a file, or all that another process writes into a pipe.

    Waiting for a pipe is announced, and ends after minutes without data. pipes: False to refuse anything but a file.
    """
    if not hasattr(select, "poll"):  # Windows
        return Path(path).read_bytes()
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb", buffering=0) as file:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISREG(mode):
            return file.readall()
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not pipes or not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or file.isatty()):
            raise OSError(errno.EINVAL, "it is a device or a pipe, not a file")
        return _read_pipe(path, descriptor)


def is_file_or_missing(path: str | os.PathLike) -> bool:
    """False for pipes and devices, which open() may wait for."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return True


def require_file(path: str | os.PathLike) -> None:
    """Raise OSError for a pipe or a device, which open() may wait for."""
    if not is_file_or_missing(path):
        raise OSError(errno.EINVAL, "it is a device or a pipe, not a file")


def _read_pipe(path: str | os.PathLike, descriptor: int) -> bytes:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    wait = waiting.Wait(f"data from {path}", "Write into it, or give a file.")
    parts: list[bytes] = []
    while True:
        events = poll.poll(waiting.PAUSE * 1000)
        if events and events[0][1] & select.POLLIN:
            part = os.read(descriptor, 2**20)
            if not part:
                return b"".join(parts)
            parts.append(part)
        elif events:  # all writers have closed it
            return b"".join(parts)
        wait.check(len(parts))


# Locks


_held: set[tuple[str, int]] = set()
"""Locked files, each with the number of the thread that holds it."""
_descriptors: set[int] = set()
_unlockable: set[Path] = set()
"""Folders without locks, which have been announced."""


def _forget_locks() -> None:
    """In a child: close the parent's locks, so that they end with the parent."""
    for descriptor in _descriptors:
        with suppress(OSError):
            os.close(descriptor)
    _descriptors.clear()
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_locks)


@contextmanager
def lock(path: str | os.PathLike, option: str = "file", *, waits: bool = True) -> Iterator[None]:
    """Lock a file for this thread in a block, whether the file exists or not. The same thread may lock it again.

    option: name of the file's option in messages. waits: False to raise ValueError if another process has locked it.
    Waiting ends with a TimeoutError after minutes in which the owner of the lock neither changed nor did anything. On
    a file system without locks, the block runs unlocked, and a sentence is printed.
    """
    path = Path(path)
    target = _target(path)
    special = target.exists() and not target.is_file()
    if special:  # such as /dev/stdout
        yield
        return
    name = f".{target.name}.lock"
    if len(os.fsencode(name)) > 250:
        name = f".{hashlib.sha256(os.fsencode(target.name)).hexdigest()[:16]}.lock"
    file = target.with_name(name)
    key = (os.path.realpath(file), threading.get_ident())
    if key in _held:
        yield
        return
    _held.add(key)
    try:
        with _locked(file, path, option, waits):
            yield
    finally:
        _held.discard(key)


@contextmanager
def lock_folder(folder: str | os.PathLike, option: str = "folder") -> Iterator[None]:
    """Lock a folder in a block. Raises ValueError if another process, or another block, has locked it."""
    folder = Path(folder)
    with _locked(folder / ".lock", folder, option, waits=False):
        yield


@contextmanager
def _locked(file: Path, guarded: Path, option: str, waits: bool) -> Iterator[None]:
    try:
        descriptor = _acquire(file, guarded, option, waits)
    except TimeoutError:
        raise
    except OSError as problem:
        raise _unwritten(guarded, problem) from problem
    process = os.getpid()
    try:
        yield
    finally:
        if os.getpid() == process:
            _release(file, descriptor)


def _acquire(file: Path, guarded: Path, option: str, waits: bool) -> int | None:
    """Descriptor of the locked file, or None on a file system without locks."""
    found: list[int | None] = []

    def take() -> bool:
        taken, descriptor = _try_lock(file)
        if taken:
            found.append(descriptor)
        return taken

    if not waits:
        if not take():
            raise ValueError(
                f"Another process is writing to {guarded}{owner_of(file, ' (', ')')}. Wait for it, or give another "
                f"{option}."
            )
        return found[0]

    def movement() -> object:
        """Owner of the lock, and what changes while it works or when the file is written."""
        with suppress(OSError):
            state = guarded.stat()
            return owner_of(file), waiting.work_of_owner(file), state.st_mtime_ns, state.st_ino
        return owner_of(file), waiting.work_of_owner(file)

    waiting.until(
        take,
        what=lambda: (
            f"{owner_of(file) or 'another process'}, which writes to {guarded} (lock: {file})"
        ),
        instead=f"To go on without it, end it, or press Ctrl-C and give another {option}.",
        state=movement,
    )
    return found[0]


def _try_lock(file: Path) -> tuple[bool, int | None]:
    """(True, descriptor) of the locked file, or (True, None) without locks. (False, None) if another has locked it."""
    if fcntl is None:
        return _try_filelock(file)
    while True:
        descriptor = _open_lock(file)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as problem:
            if problem.errno in BUSY:
                os.close(descriptor)
                return False, None
            _say_unlockable(file, descriptor, problem)
            os.close(descriptor)
            return True, None
        try:
            if os.path.samestat(os.fstat(descriptor), os.stat(file)):
                break
        except FileNotFoundError:
            pass
        os.close(descriptor)  # its last owner removed this one
    _descriptors.add(descriptor)
    if _may_remove(descriptor):
        command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])[:200]
        text = f"{MARK}: process {os.getpid()} on {socket.gethostname()} ({command})"
        with suppress(OSError):  # a full disk
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, text.encode(errors="replace"), 0)
    return True, descriptor


def _open_lock(file: Path) -> int:
    """Descriptor of a lock file, which another user may own."""
    try:
        return os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except PermissionError:
        if not file.exists():
            raise
    return os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _say_unlockable(file: Path, descriptor: int, problem: OSError) -> None:
    """Print once for each folder that its file system has no locks, and remove the file that was to be locked."""
    if _may_remove(descriptor):
        file.unlink(missing_ok=True)
    if file.parent in _unlockable:
        return
    _unlockable.add(file.parent)
    waiting.say(
        f"{file.parent} is on a file system without locks ({problem.strerror}), so files are written there without "
        "one. Let only one process write to it."
    )


def _may_remove(descriptor: int) -> bool:
    """True for a lock file that is empty or of vitlens."""
    with suppress(OSError):
        return os.pread(descriptor, len(MARK), 0) in (b"", MARK.encode())
    return False


def _release(file: Path, descriptor: int | None) -> None:
    if descriptor is None:
        return
    if fcntl is None:
        _filelocks.pop(descriptor).release()
        return
    _descriptors.discard(descriptor)
    with suppress(OSError):
        if _may_remove(descriptor):
            file.unlink(missing_ok=True)
    os.close(descriptor)


_filelocks: dict = {}


def _try_filelock(file: Path) -> tuple[bool, int | None]:
    """As `_try_lock`, on Windows."""
    from filelock import FileLock, Timeout

    held = FileLock(file, timeout=0)
    try:
        held.acquire()
    except Timeout:
        return False, None
    number = id(held)
    _filelocks[number] = held
    return True, number


def owner_of(file: Path, before: str = "", after: str = "") -> str:
    """Process that has a lock file, such as "process 123 on host (vitlens train …)", or "" if it is unknown."""
    try:
        text = file.read_bytes()[:1000].decode(errors="replace")
    except OSError:
        return ""
    mark, _, owner = text.partition(": ")
    return f"{before}{owner}{after}" if mark == MARK and owner else ""


# Files of vitlens and of others


def require_ours(ours: Mapping[Path, Callable[[Path], bool]], option: str = "--out") -> None:
    """Raise ValueError if one of these files exists, but was not written by vitlens.

    ours: for each file a function that returns True for a file of vitlens, such as `is_figure`. Files that a person
    names as a whole need no such test: only names that vitlens chooses can meet a file of another kind.
    """
    for path, is_ours in ours.items():
        if os.path.lexists(path) and not is_ours(path):
            raise ValueError(
                f"{path} is not known as a file of vitlens, so it is not replaced. Move it away, or give another "
                f"{option}."
            )


def remove_ours(path: Path, is_ours: Callable[[Path], bool]) -> bool:
    """Remove a file if vitlens wrote it. Returns True if it was removed."""
    if not path.is_file() or not is_ours(path):
        return False
    path.unlink(missing_ok=True)
    return True


def remove_folder(folder: Path) -> None:
    """Remove a folder if it is empty."""
    with suppress(OSError):
        folder.rmdir()


def read_object(path: Path) -> dict:
    """The object in a JSON file, or {} for any other file."""
    with suppress(OSError, ValueError):
        content = json.loads(path.read_bytes()) if path.is_file() else {}
        if isinstance(content, dict):
            return content
    return {}


def read_header(path: Path) -> list[str]:
    """Names of the columns of a CSV file, or [] for another kind of file."""
    with suppress(OSError, ValueError, csv.Error):
        if path.is_file():
            with open(path, encoding="utf-8", newline="") as file:
                return next(csv.reader(file), [])
    return []


def seal(figure: bytes) -> bytes:
    """A PDF or SVG file with its digest in the mark of vitlens, which a file lacks after it is edited."""
    return figure.replace(UNSEALED.encode(), _sealed_mark(figure), 1)


def _sealed_mark(unsealed: bytes) -> bytes:
    digest = hashlib.sha256(unsealed).hexdigest()
    return f"{MARK} {digest[:16]}".encode()


def _is_sealed(path: Path) -> bool:
    """True for a PDF or SVG file that vitlens wrote and nobody has edited since."""
    with suppress(OSError):
        data = path.read_bytes()
        mark = re.search(rb"\b%s [0-9a-f]{16}\b" % MARK.encode(), data)
        if mark is None:
            return False
        unsealed = data.replace(mark[0], UNSEALED.encode(), 1)
        return mark[0] == _sealed_mark(unsealed)
    return False


def is_figure(path: Path, software: str = MARK, dpi: int | None = None) -> bool:
    """True for a figure of vitlens, or for a PNG file of another software with these dots per inch."""
    from PIL import Image

    if not path.is_file():
        return False
    if path.suffix in (".pdf", ".svg"):
        return software == MARK and _is_sealed(path)
    try:
        with Image.open(path) as image:
            same_dpi = dpi is None or round(image.info.get("dpi", (0,))[0]) == dpi
            return same_dpi and str(image.info.get("Software", "")).split(" ")[0] == software
    except (OSError, ValueError, SyntaxError):
        return False


def check_writable(folder: Path, option: str) -> None:
    """Raise ValueError that names the option if a folder cannot be created or written to."""
    try:
        _check_name(folder)
        if folder.is_symlink() and not folder.exists():
            raise OSError(errno.ENOENT, f"it is a link to {os.readlink(folder)}, which is missing")
        existing = _absolute(folder)
        while not os.path.exists(existing):
            existing = existing.parent
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as problem:
        raise ValueError(
            f"{shortened(folder)} cannot be written to ({problem.strerror}). Give another {option}."
        ) from problem


def check_file(path: Path, option: str) -> None:
    """Raise ValueError that names the option if a file cannot be created or replaced, also behind a link."""
    target = _target(path)
    try:
        _check_name(target)
    except OSError as problem:
        raise ValueError(
            f"{shortened(path)} cannot be written ({problem.strerror}). Give another {option}."
        ) from problem
    if target != path and not target.parent.is_dir():
        raise ValueError(
            f"{shortened(path)} is a link to {shortened(target)}, whose folder is missing. Give another {option}."
        )
    if is_file_or_missing(target):  # a device needs no temporary file beside it
        check_writable(target.parent, option)


def _absolute(path: Path) -> Path:
    try:
        return path.absolute()
    except FileNotFoundError as problem:
        raise OSError(errno.ENOENT, "the current folder has been removed") from problem


def _check_name(path: Path) -> None:
    """Raise OSError for a name that no file can have: one that is too long, or of a link that leads to itself."""
    _require_valid_on_windows(path)
    if any(len(os.fsencode(part)) > NAME_LENGTH for part in path.parts):
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    with suppress(FileNotFoundError, NotADirectoryError):
        os.stat(path)


def _require_valid_on_windows(path: Path) -> None:
    """Raise OSError for a name that Windows takes for another file or a device, where its content would be lost."""
    if not WINDOWS:
        return
    for name in path.parts:
        if name in (path.anchor, ".", "..") or name.upper() == "NUL":  # NUL is as /dev/null
            continue
        if name.split(".")[0].rstrip().upper() in DEVICES:
            raise OSError(errno.EINVAL, f"{name} is a device of Windows")
        if set(name) & set('<>:"|?*'):
            raise OSError(errno.EINVAL, 'a name on Windows has none of < > : " | ? *')
        if name != name.rstrip(". "):
            raise OSError(errno.EINVAL, "a name on Windows does not end with a dot or a space")


def announce(action: str, folder: object) -> None:
    """Print where data was stored, as in "Downloaded torch/cifar10 into …"."""
    print(f"{action} into {folder}, where it stays.", file=sys.stderr, flush=True)
