"""One training run from beginning to end: what ``vitlens train`` does."""

from vitlens.train.runs.account import hardware, versions
from vitlens.train.runs.plan import fitted, read_recipe
from vitlens.train.runs.run import run

__all__ = ["fitted", "hardware", "read_recipe", "run", "versions"]
