"""Hooks of modules for the length of a block, in one thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator


@contextlib.contextmanager
def thread_hooks(hooks: Iterable[tuple[Callable, Callable]]) -> Iterator[None]:
    """Register hooks, (method of a module that registers one, hook), for this block and this thread."""
    thread = threading.get_ident()

    def here(hook: Callable) -> Callable:
        return lambda *args: hook(*args) if threading.get_ident() == thread else None

    with contextlib.ExitStack() as stack:
        for register, hook in hooks:
            stack.enter_context(register(here(hook)))
        yield
