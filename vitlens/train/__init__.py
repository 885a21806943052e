"""Training: recipes, one loop with its optimizers, checkpoints that survive being killed, and timm's hub layout."""

from vitlens.names import unknown_name
from vitlens.processes import World, join
from vitlens.train import snapshots
from vitlens.train.criteria import accuracy, build_criterion
from vitlens.train.loop import Step, fit
from vitlens.train.processes import hardware, versions
from vitlens.train.recipes import RECIPES, Recipe, read_recipe, recipe, register, starting_from
from vitlens.train.run_folder import export
from vitlens.train.runs import run

__all__ = [
    "RECIPES",
    "Recipe",
    "Step",
    "World",
    "accuracy",
    "build_criterion",
    "export",
    "fit",
    "hardware",
    "join",
    "read_recipe",
    "recipe",
    "register",
    "run",
    "snapshots",
    "starting_from",
    "versions",
]
__dir__ = __all__.copy
__getattr__ = unknown_name(__name__, __all__)
