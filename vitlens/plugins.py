"""Commands, data sets, recipes and models of other packages, which reach vitlens by entry points.

A package that extends vitlens names a function for each kind in its `pyproject.toml`:

    [project.entry-points."vitlens.recipes"]
    mine = "my_package.recipes:register_recipes"

The kinds are `commands` (the function gets the Typer application), `data`, `recipes` (also objectives and choices in
the model) and `models` (architectures for timm, and adapters that capture them).
"""

from functools import cache
from importlib.metadata import entry_points

__all__ = ["load_plugins"]
__dir__ = __all__.copy


@cache
def load_plugins(kind: str, *arguments: object) -> None:
    """Call the function of each installed package for a kind, in the order of the packages' names, once in a process.

    >>> vitlens.plugins.load_plugins("recipes")
    """
    points = entry_points(group=f"vitlens.{kind}")
    for point in sorted(points, key=lambda point: point.name):
        register = point.load()
        register(*arguments)
