"""Training recipes as data, with a reason beside each number."""

from vitlens.train.recipes.models import FROM_MODEL, model_args, pixels, starting_from
from vitlens.train.recipes.named import RECIPES, recipe
from vitlens.train.recipes.recipe import Recipe

__all__ = ["FROM_MODEL", "RECIPES", "Recipe", "model_args", "pixels", "recipe", "starting_from"]
