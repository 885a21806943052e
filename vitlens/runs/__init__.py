"""One training run from beginning to end: what ``vitlens train`` does."""

from vitlens.runs.account import hardware, versions
from vitlens.runs.plan import fitted, read_recipe
from vitlens.runs.run import run

__all__ = ["fitted", "hardware", "read_recipe", "run", "versions"]
