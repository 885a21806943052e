"""Modules that have left this package: each way to ask for one ends in a sentence with the new place."""

from importlib.machinery import ModuleSpec

MOVED = {
    "widgets": "import vitlens_explorer",
    "evaluate": "from vitlens_paper import evaluate",
    "paper": "import vitlens_paper",
    "variants": "from vitlens_paper import variants",
    "ablation": "from vitlens_paper.evaluate import ablation",
}
"""The statement that imports each module now, by its former name."""


def new_place(name: str) -> str:
    """Sentence for a name in `MOVED`.

    >>> new_place("widgets")
    'vitlens.widgets has moved. Use `import vitlens_explorer`.'
    """
    return f"vitlens.{name} has moved. Use `{MOVED[name]}`."


class MovedFinder:
    """A finder of modules that raises ImportError for those in `MOVED`. It finds nothing itself."""

    @staticmethod
    def find_spec(full_name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        package, _, name = full_name.partition(".")
        if package == "vitlens" and name in MOVED:
            raise ImportError(new_place(name))
        return None
