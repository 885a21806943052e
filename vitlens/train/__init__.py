"""Training: one loop, its optimizers, checkpoints that survive being killed, and export to timm's hub layout."""

from vitlens.train.export import export
from vitlens.train.loop import Step, fit
from vitlens.train.losses import compiled
from vitlens.train.processes import World, join
from vitlens.train.validation import accuracy, validation

__all__ = ["Step", "World", "accuracy", "compiled", "export", "fit", "join", "validation"]
