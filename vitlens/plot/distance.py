"""Mean attention distance of every head (paper, Fig. 7 right and Fig. 11)."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np

from vitlens.plot.style import REFERENCE, SERIES, array, page, rule, styled


def attention_distance(
    mean_distance, *, uniform=None, control=None, image_size=None, ax: plt.Axes | None = None, title=None
) -> plt.Axes:
    """Mean attention distance, one dot per layer and head (paper, Fig. 7 right and Fig. 11).

    mean_distance: (L, H) in pixels, or (B, L, H), of which the mean over B is drawn. uniform: the distance of uniform
    attention (`TokenGrid.uniform_distance`, renormalized if the dots are), a dashed line. control: the same of a model
    with random weights, gray crosses. image_size: (height, width) of the input, or one number for both; the axis names
    it. Layers and heads count from 0.
    """
    values, chance = (None if given is None else _by_head(given) for given in (mean_distance, control))
    layers, heads = values.shape
    top = max(np.nanmax(values, initial=0), 0 if chance is None else np.nanmax(chance), uniform or 0) or 1.0
    size = (image_size, image_size) if np.ndim(image_size) == 0 else image_size
    of = "" if image_size is None else f" of {size[0]} × {size[1]}"
    with styled(ax):
        if ax is None:
            ax = plt.subplots(figsize=(6.4, 4.2), layout="constrained")[1]
        strip(ax, values, size=6)
        if chance is not None:
            layer = np.repeat(np.arange(len(chance)) + 0.2, chance.shape[1])
            ax.plot(layer, chance.ravel(), "x", color="0.6", markersize=4, label="untrained")
        if uniform is not None:
            ax.axhline(uniform, **REFERENCE, label="uniform attention")
        ax.set(xlabel="Network depth (layer)", ylabel=f"Mean attention distance (pixels{of})", title=title)
        ax.set(ylim=(0, 1.08 * top), xticks=range(0, layers, -(-layers // 16)))
        rule(ax)
        handles, labels = ax.get_legend_handles_labels()
        columns = 1 if len(labels) < 6 else 2
        of_many = None if heads <= len(SERIES) else "Head"
        ax.legend(handles, labels, ncols=columns, title=of_many, framealpha=0.9, edgecolor="0.85")
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
                ax.get_legend().remove()
        axes[0].set_ylim(0, 1.08 * max(*(np.nanmax(values) for values in panels.values()), *uniform.values()))
    return figure


def strip(ax: plt.Axes, values: np.ndarray, size: float) -> None:
    """The distances (L, H) as dots: a column for each layer, a color for each head."""
    import seaborn as sns

    layers, heads = values.shape
    layer, head = np.indices(values.shape).reshape(2, -1)
    few = heads <= len(SERIES)
    names = [f"Head {number}" for number in head] if few else head
    palette = list(SERIES[:heads]) if few else "viridis"
    sns.stripplot(
        x=layer, y=values.ravel(), hue=names, palette=palette, jitter=False, native_scale=True, size=size,
        edgecolor="white", linewidth=0.5, legend="auto" if few else "brief", ax=ax,
    )  # fmt: skip
    ax.set(xlim=(-0.6, layers - 0.4), xlabel="", ylabel="")


def _by_head(mean_distance) -> np.ndarray:
    """(L, H): the distances given, or their mean over images."""
    wanted = "Mean distances of shape (layers, heads) or (images, layers, heads)"
    values = array(mean_distance, (2, 3), wanted, "Give what `vitlens.attention.mean_distance` returns")
    return values.mean(0) if values.ndim == 3 else values
