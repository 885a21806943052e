"""What the parts of a model write into a logit, as a table of colors."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib.pyplot as plt

from vitlens.plot.style import WIDTH, array, colors, page, scale_bar, styled


def contributions(parts: Mapping[str, object]) -> plt.Figure:
    """What every head and MLP adds to a logit: a line for each layer, a column for each head, the MLP in the last one.

    parts: (L, H + 1) by the name of the picture, the MLP last; all of the same model, at most twelve. Red adds to the
    logit and blue takes away from it, in units of the logit, on one scale for all pictures. Raises ValueError for
    other axes or shapes, and for none.
    """
    wanted = "Contributions of shape (layers, heads + 1)", "Give one for each picture"
    values = {name: array(each, 2, *wanted) for name, each in parts.items()}
    shapes = {each.shape for each in values.values()}
    if len(shapes) != 1 or len(values) > 12:
        raise ValueError(f"1 to 12 pictures of one model expected, got {len(values)} with shapes {sorted(shapes)}.")
    ((layers, columns),) = shapes
    cols = min(len(values), max(1, (WIDTH - 40) // (70 + 26 * columns)))
    rows = -(-len(values) // cols)
    with styled():
        figure = page(max(420, 90 + cols * (70 + 26 * columns)), 60 + rows * (70 + 20 * layers), "constrained")
        axes = list(figure.subplots(rows, cols, squeeze=False).flat)
        limit = max(abs(each).max() for each in values.values()) or 1.0
        for ax, (name, each) in zip(axes, values.items(), strict=False):
            look = colors(each, signed=True) | {"vmin": -limit, "vmax": limit}
            shown = ax.imshow(each, **look, interpolation="nearest", aspect="auto")
            ax.set_title(name, size=9.5, pad=5, parse_math=False)
            step = max(1, layers // 12)
            ax.set_yticks(range(0, layers, step))
            every = 1 if columns < 14 else 4
            heads = [*range(0, columns - 1 - every // 2, every)]
            ax.set_xticks([*heads, columns - 1], [*heads, "MLP"])
            ax.tick_params(length=0, labelsize=8)
            ax.set(xlabel="Head", ylabel="Layer")
        for ax in axes[len(values) :]:
            ax.axis("off")
        scale_bar(shown, ax=axes, shrink=0.8, label="Added to the logit")
    return figure
