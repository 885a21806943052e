"""Figures: functions from arrays or tensors to Axes or a Figure.

Every plot that fits into one Axes takes `ax=`, draws there and returns it. Without `ax`, all functions return a Figure
that pyplot does not keep. A notebook shows it as the last value of a cell (elsewhere use `display`), a script calls
`savefig`, and no figure has to be closed. Only `overlay` and `attention_distance` open a figure in pyplot and return
its Axes. Values are not rescaled or clipped unless a docstring states it, NaN is gray, and the colors are safe for the
color-blind.

Without `ax`, figures are drawn in `STYLE` and leave your settings unchanged. An `ax` keeps its own style. Create it in
`with plt.style.context(STYLE)` for the same style.
"""

from vitlens.names import attach_lazily

__getattr__, __dir__, __all__ = attach_lazily(__name__, __file__)
