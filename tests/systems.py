"""Needs of tests on the operating system, read from their code. A test is skipped where one is missing."""

from __future__ import annotations

import ast
import functools
import re
import sys
from pathlib import Path

NEEDS = {
    "linux": {
        r"/proc/": "files in /proc",
        r"/dev/(full|shm|fd)": "devices of Linux",
        r"\bunshare\b|\bmount\b|\bprlimit\b": "namespaces and limits of Linux",
        r"fsdecode\(b|\\udc|surrogateescape": "names of files that are not Unicode",
    },
    "posix": {
        r"\bmkfifo\b|AF_UNIX|\bO_NONBLOCK\b": "named pipes and sockets",
        r"SIGHUP|SIGKILL|SIGSTOP|\bkillpg\b|start_new_session|send_signal|os\.kill\b": "signals",
        r"/dev/": "devices in /dev",
        r"\bos\.fork\b|\"fork\"|\bforkserver\b|\bforked\b": "processes that fork",
        r"symlink_to\(|os\.symlink\(": "symbolic links without special rights",
        r"\bsetrlimit\b|\bpreexec_fn\b|\bresource\.": "limits of resources",
        r"\bchmod\b|\bgeteuid\b|\bumask\b": "permissions of POSIX",
        r"fcntl\.|\btermios\b|\bpty\b": "locks and terminals of POSIX",
        r"\"make\"|\"bash\"|\"sh\"": "programs of a POSIX shell",
        r"\btzset\b": "time zones of POSIX",
    },
}
"""Patterns in the code of tests that run on Linux only, and on Linux and macOS only, with what they need."""


def missing(file: Path, test: str, platform: str = sys.platform) -> str:
    """Sentence about what a test in a file needs and this system lacks, or "".

    Reads the code of the test, and of the functions and classes of its module that it names, directly or not.
    """
    if platform == "linux":
        return ""
    code = needed_code(file, test)
    needs = NEEDS["linux"] if platform == "darwin" else NEEDS["linux"] | NEEDS["posix"]
    for pattern, need in needs.items():
        if re.search(pattern, code):
            system = {"darwin": "macOS", "win32": "Windows"}.get(platform, platform)
            return f"It needs {need}. {system} has none."
    return ""


@functools.cache
def parts(file: Path) -> dict[str, tuple[str, set[str]]]:
    """Code of each function, class and constant of a module, and the names in it."""
    text = file.read_text(encoding="utf-8")
    found = {}
    for node in ast.parse(text).body:
        names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        names |= {part.arg for part in ast.walk(node) if isinstance(part, ast.arg)}  # fixtures
        code = ast.get_source_segment(text, node) or ""
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        own = [node.name] if hasattr(node, "name") else [getattr(t, "id", "") for t in targets]
        for name in own:
            found[name] = code, names
    return found


def needed_code(file: Path, name: str) -> str:
    """Code of a function of a module and of all that it names in the module."""
    module = parts(file)
    waiting, seen = [name], set()
    while waiting:
        current = waiting.pop()
        if current in module and current not in seen:
            seen.add(current)
            waiting += module[current][1]
    return "\n".join(module[current][0] for current in sorted(seen))
