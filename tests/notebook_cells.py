"""Runs cells of a notebook without a kernel, by a fresh IPython in a process that has imported torch already.

A kernel spends most of its time on imports. `fresh_processes` imports once, in a server that then forks a process for
every notebook; a process runs one notebook and ends, so nothing of one is seen by the next.
"""

import contextlib
import multiprocessing
import os
import tempfile
from pathlib import Path

import torch
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

PRELOADED = [
    "timm",
    "seaborn",
    "sklearn.neighbors",
    "captum.attr",
    "vitlens.attribution",
    "vitlens.faithfulness",
    "vitlens.plot",
    "vitlens.report",
    "vitlens_explorer",
]


class Shell(InteractiveShell):
    """IPython with figures inline, as in a notebook."""

    def enable_gui(self, gui=None):
        """Skip the event loop, because figures are inline."""


@contextlib.contextmanager
def fresh_processes():
    """A pool whose `apply` calls a function in a fresh process, forked from one that has imported `PRELOADED`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with context.Pool(1, maxtasksperchild=1) as pool:
        yield pool


def run(cells: list[str], folder: Path) -> list[str]:
    """Lines that code cells write to stderr, run one by one in a folder. A cell that fails raises its error."""
    torch.set_num_threads(1)  # models are small, and several workers share the cores
    # Without the variable, chapter 2b takes crops of photographs, as in a clone.
    os.environ.pop("VITLENS_REAL_DATA", None)
    os.chdir(folder)
    with tempfile.TemporaryDirectory() as profile, tempfile.TemporaryFile("w+") as errors:
        os.environ["IPYTHONDIR"] = profile  # nobody's own settings
        os.dup2(errors.fileno(), 2)
        shell = Shell.instance(config=Config(HistoryManager={"enabled": False}))
        shell.run_line_magic("matplotlib", "inline")
        for number, cell in enumerate(cells, 1):
            shell.run_cell(cell, store_history=True).raise_error()
            assert shell.execution_count == number + 1
        errors.seek(0)
        return errors.readlines()
