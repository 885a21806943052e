"""Mean attention distance of every head (paper, Fig. 7 right and Fig. 11)."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np

from vitlens.plot.style import REFERENCE, SERIES, array, page, rule, styled

LOCAL = 1 / 3
"""Share of the distance of uniform attention below which a head is called local here. A convention, for orientation."""


def attention_distance(
    mean_distance, *, uniform=None, control=None, image_size=None, ax: plt.Axes | None = None, title=None
) -> plt.Axes:
    """Mean attention distance, one dot per layer and head (paper, Fig. 7 right and Fig. 11).

    The heads of a layer lie beside each other, head 0 on the left. mean_distance: (L, H) in pixels, or (B, L, H), of
    which the mean over B is drawn. uniform: the distance of uniform attention (`TokenGrid.uniform_distance`,
    renormalized if the dots are), a dashed line; below a third of it heads are local, which is shaded. control: the
    same of a model with random weights, gray crosses. image_size: (height, width) of the input, or one number for both;
    the axis names it. Layers and heads count from 0.
    """
    values, chance = (None if given is None else _by_head(given) for given in (mean_distance, control))
    layers = len(values)
    top = max(np.nanmax(values, initial=0), 0 if chance is None else np.nanmax(chance), uniform or 0) or 1.0
    size = (image_size, image_size) if np.ndim(image_size) == 0 else image_size
    of = "" if image_size is None else f" of {size[0]} × {size[1]}"
    with styled(ax):
        if ax is None:
            ax = plt.subplots(figsize=(6.4, 4.2), layout="constrained")[1]
        strip(ax, values, size=6)
        where = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "size": 8, "color": "0.35"}
        if chance is not None:
            layer = np.repeat(np.arange(len(chance)) + 0.2, chance.shape[1])
            ax.plot(layer, chance.ravel(), "x", color="0.6", markersize=4)
            level, below = (chance.mean(), 0) if uniform is None else (uniform, -19)
            ax.annotate("× untrained", (1, level), (4, below), va="center", **where)
        if uniform is not None:
            ax.axhspan(0, LOCAL * uniform, color="0.94", linewidth=0, zorder=0)
            ax.axhline(uniform, **REFERENCE)
            ax.annotate("uniform\nattention", (1, uniform), (4, 0), va="center", **where)
            ax.annotate("local: under a third of it", (1, 0), (-4, 4), ha="right", **where)
        ax.set(xlabel="Network depth (layer)", ylabel=f"Mean attention distance (pixels{of})", title=title)
        ax.set(ylim=(0, 1.08 * top), xticks=range(0, layers, -(-layers // 16)))
        rule(ax)
    return ax


def attention_distances(
    panels: Mapping[str, object], *, uniform: float | Mapping[str, float], controls: Mapping[str, object] | None = None
) -> plt.Figure:
    """Several models, or several ways to measure one, beside each other on one scale, as `attention_distance`.

    panels: (L, H) by title. uniform: one distance for all, or one by title. controls: (L, H) of models with random
    weights, by title.
    """
    panels = {title: _by_head(values) for title, values in panels.items()}
    uniform = dict.fromkeys(panels, uniform) if np.ndim(uniform) == 0 and not isinstance(uniform, Mapping) else uniform
    with styled():
        figure = page(900, 350, "constrained")
        axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for ax, (title, values) in zip(axes, panels.items(), strict=True):
            control = (controls or {}).get(title)
            attention_distance(values, uniform=uniform[title], control=control, ax=ax, title=title)
            if ax is not axes[0]:
                ax.set_ylabel("")
        axes[0].set_ylim(0, 1.08 * max(*(np.nanmax(values) for values in panels.values()), *uniform.values()))
    return figure


def strip(ax: plt.Axes, values: np.ndarray, size: float) -> None:
    """The distances (L, H) as dots: a column for each layer, its heads beside each other from left to right."""
    layers, heads = values.shape
    place = np.arange(layers)[:, None] + (np.arange(heads) - (heads - 1) / 2) * 0.5 / max(heads - 1, 1)
    look = {"color": SERIES[0], "markersize": size, "markeredgecolor": "white", "markeredgewidth": 0.5}
    ax.plot(place.ravel(), values.ravel(), "o", **look)
    ax.set(xlim=(-0.6, layers - 0.4))


def _by_head(mean_distance) -> np.ndarray:
    """(L, H): the distances given, or their mean over images."""
    wanted = "Mean distances of shape (layers, heads) or (images, layers, heads)"
    values = array(mean_distance, (2, 3), wanted, "Give what `vitlens.attention.mean_distance` returns")
    return values.mean(0) if values.ndim == 3 else values
