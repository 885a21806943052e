"""Training: one loop, optimisers, checkpoints that survive being killed, export in timm's hub layout."""

from vitlens.train.export import export
from vitlens.train.loop import Step, accuracy, compiled, fit

__all__ = ["Step", "accuracy", "compiled", "export", "fit"]
