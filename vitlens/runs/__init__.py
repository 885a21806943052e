"""One training run from beginning to end: what ``vitlens train`` does."""

from vitlens.runs.account import hardware, versions
from vitlens.runs.plan import fitted
from vitlens.runs.run import run

__all__ = ["fitted", "hardware", "run", "versions"]
