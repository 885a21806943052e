from .audit_page import save_audit_page
from .in_page import save_page
from .notebook import compare, explore, positions, tour
from .training_slider import training

__all__ = [
    "compare",
    "explore",
    "positions",
    "save_audit_page",
    "save_page",
    "tour",
    "training",
]
