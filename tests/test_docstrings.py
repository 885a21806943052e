"""The examples in docstrings run, and every public function and class has one of at most four lines."""

import doctest
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import architecture
import book
import matplotlib.pyplot as plt
import pytest

import vitlens
import vitlens_explorer
import vitlens_paper.evaluate

PACKAGES = (vitlens, vitlens_explorer, vitlens_paper)
MODULES = ["architecture", "book", *(package.__name__ for package in PACKAGES)]
for each in PACKAGES:
    MODULES += sorted(
        module.name for module in pkgutil.walk_packages(each.__path__, f"{each.__name__}.")
    )
MODULES.remove("vitlens.__main__")
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
LINES = 4


@pytest.fixture(scope="module")
def names() -> dict:
    """Names for the examples, as made by the lines in docs/reference.md."""
    page = (Path(__file__).parent.parent / "docs/reference.md").read_text(encoding="utf-8")
    names = {"architecture": architecture, "book": book}
    exec(re.search(r"```python\n(.+?)```", page, re.S)[1], names)
    return names


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_docstrings_run(name, names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    for example in doctest.DocTestFinder(exclude_empty=True).find(module, name, extraglobs=names):
        printed = []
        result = doctest.DocTestRunner(optionflags=OPTIONS, verbose=False).run(
            example, out=printed.append
        )
        plt.close("all")
        assert not result.failed, "".join(printed)


def public() -> dict:
    """Public functions and classes by their full name."""
    names = {}
    submodules = [
        getattr(vitlens, name) for name in vitlens.__all__ if not callable(getattr(vitlens, name))
    ]
    for module in [*PACKAGES, vitlens_paper.evaluate, book, *submodules]:
        for name in getattr(module, "__all__", ()):
            thing = getattr(module, name)
            home = getattr(thing, "__module__", None) or ""
            if callable(thing) and home.startswith(("vitlens", "book", "architecture")):
                names.setdefault(id(thing), (f"{module.__name__}.{name}", thing))
    return dict(names.values())


def without_example() -> list[str]:
    return sorted(
        name for name, thing in public().items() if ">>>" not in (inspect.getdoc(thing) or "")
    )


def test_every_public_callable_has_an_example():
    assert not without_example()


def test_examples_have_at_most_four_lines():
    for name, thing in public().items():
        lines = [
            line
            for line in (inspect.getdoc(thing) or "").splitlines()
            if line.startswith((">>>", "..."))
        ]
        assert len(lines) <= LINES, f"the example of {name} has {len(lines)} lines"
