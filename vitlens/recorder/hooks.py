"""Hooks of modules for the length of a block, in one thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator


@contextlib.contextmanager
def thread_hooks(hooks: Iterable[tuple[Callable, Callable]]) -> Iterator[None]:
    """Register hooks, (method of a module that registers one, hook), for this block and this thread."""
    thread = threading.get_ident()

    def in_this_thread(hook: Callable) -> Callable:
        def call(*args):
            if threading.get_ident() == thread:
                return hook(*args)
            return None

        return call

    with contextlib.ExitStack() as stack:
        for register, hook in hooks:
            stack.enter_context(register(in_this_thread(hook)))
        yield
