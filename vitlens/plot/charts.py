"""Curves, dots with intervals, and charts of training runs, attention distances and tests of maps."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import NullLocator, PercentFormatter, StrMethodFormatter

from vitlens.plot import style
from vitlens.plot.style import (
    DPI,
    REFERENCE,
    SERIES,
    array,
    canvas,
    charts,
    colors,
    rule,
    scale_bar,
    styled,
)

LOCAL = 1 / 3
"""Heads below this share of the distance of uniform attention are called local, by convention."""
CHANCE = {"color": "0.5", "lw": 1.2, "ls": (0, (4, 3))}


def lines(
    table,
    *,
    dotted=None,
    bands=None,
    level: float | None = None,
    log: str = "",
    palette=SERIES,
    marker: str = "o",
    xlabel: str = "",
    ylabel: str = "",
    ax: plt.Axes | None = None,
) -> plt.Figure | plt.Axes:
    """A curve for each column of a table against its index, with its name at its right end.

    table: a pandas DataFrame of numbers with a numeric index. dotted: another one, for dotted lines in the colors of
    the columns with the same names, or else the same positions. bands: two more, the lower and the upper ends of a
    band around each curve, in the same columns. level: value of a dashed horizontal line. log: "x" or "xy" for
    logarithmic axes. With "xy" the ticks are those of the index. palette: colors, or the name of a seaborn palette.
    Evenly spaced hues replace a palette of fewer colors than columns.

    >>> import pandas as pd
    >>> figure = vitlens.plot.lines(pd.DataFrame({"accuracy": [50.0, 80.0]}, index=[1, 2]), xlabel="Epoch")
    """
    import seaborn as sns

    tables = {"-": table} if dotted is None else {"-": table, ":": dotted}
    count = max(len(each.columns) for each in tables.values())
    if isinstance(palette, str):
        palette = sns.color_palette(palette, count)
    palette = style.palette(count) if len(palette) < count else palette
    named = dict(zip(table, palette, strict=False))
    with canvas(ax, 720, 360) as (ax, result):
        for line, each in tables.items():
            for color, name in zip(palette, each, strict=False):
                label = name if line == "-" or name not in table else None
                look = {
                    "color": named.get(name, color),
                    "label": label,
                    "marker": marker,
                    "markersize": 4,
                }
                ax.plot(each.index, each[name], line, **look)
        for name, color in named.items() if bands is not None else ():
            ax.fill_between(
                table.index, *(end[name] for end in bands), color=color, alpha=0.25, linewidth=0
            )
        if level is not None:
            ax.axhline(level, **REFERENCE)
        if log:
            ax.set(xscale="log", yscale="log" if log == "xy" else "linear")
            ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        if log == "xy":
            ax.set_xticks(table.index, table.index)
            ax.xaxis.set_minor_locator(NullLocator())
        ax.set(xlabel=xlabel, ylabel=ylabel)
        rule(ax)
        _name_curves(ax)
    return result


def _name_curves(ax: plt.Axes) -> None:
    """Write the label of each curve to the right of the axes, at the height of its last point, in its color."""
    ax.figure.draw_without_rendering()  # sets the limits and the size of the axes
    down, ends = ax.transData + ax.transAxes.inverted(), {}
    for curve in ax.lines:
        if (
            not curve.get_label().startswith("_")
            and (known := np.isfinite(curve.get_ydata())).any()
        ):
            ends[curve] = down.transform(curve.get_xydata()[known][-1])[1]
    curves, room = sorted(ends, key=ends.get), 13 / 72 * ax.figure.dpi / ax.bbox.height
    heights = [ends[curve] for curve in curves]
    for k in range(
        len(curves) - 2, -1, -1
    ):  # from the top: no label less than `room` below the next one
        heights[k] = min(heights[k], heights[k + 1] - room)
    for k, curve in enumerate(curves):  # from the bottom: none below the axes
        heights[k] = max(heights[k], heights[k - 1] + room if k else 0)
        look = {
            "xycoords": "axes fraction",
            "textcoords": "offset points",
            "color": curve.get_color(),
            "size": 9,
        }
        ax.annotate(
            curve.get_label(), (1, heights[k]), (5, 0), va="center", annotation_clip=False, **look
        )


def intervals(
    values: Mapping[str, float],
    errors: Mapping[str, float],
    *,
    points: Mapping[str, Iterable[float]] | None = None,
    level: float | None = None,
    xlabel: str = "",
    ax: plt.Axes | None = None,
) -> plt.Figure | plt.Axes:
    """A dot with an error bar for each name, the first one on top.

    values: by name, as a dictionary or a pandas Series. errors: by the same names, half the length of each interval, or
    its lengths below and above the value.
    points: single measurements of each value, drawn as small gray dots. level: value of a dashed vertical line.

    >>> figure = vitlens.plot.intervals({"ViT": 80.1, "ResNet": 78.5}, {"ViT": 1.0, "ResNet": 1.2})
    """
    import seaborn as sns

    names = list(values.keys())
    with canvas(ax, 800, 90 + 26 * len(names)) as (ax, result):
        single = [
            (value, name)
            for name in names
            for value in ({} if points is None else points).get(name, ())
        ]
        if single:
            x, y = zip(*single, strict=True)
            sns.stripplot(
                x=x, y=y, order=names, orient="h", color="0.7", jitter=False, size=4, ax=ax
            )
        look = {"fmt": "o", "color": SERIES[0], "capsize": 3}
        sides = np.transpose([errors[name] for name in names])
        ax.errorbar([values[name] for name in names], range(len(names)), xerr=sides, **look)
        if level is not None:
            ax.axvline(level, **REFERENCE)
        ax.set_yticks(range(len(names)), names)
        ax.set(xlabel=xlabel, ylabel="", ylim=(len(names) - 0.5, -0.5))
        ax.tick_params(axis="y", length=0)
        rule(ax, "x")
    return result


def training(records, *, marks: Mapping[str, int] | None = None) -> plt.Figure:
    """Loss, validation accuracy (or loss, without labels) and learning rate of a run against its steps.

    records: the directory of a run, its `log.jsonl`, or the `Step`s of `vitlens.train.fit` in order. The x-axes end at
    the last step of the whole run, so a figure that is redrawn during training keeps its scale. Without records the
    axes are empty. The legend at the foot has the last accuracy. marks: steps by label, drawn as dashed lines in the
    first panel. Raises ValueError without a log.

    >>> figure = vitlens.plot.training([{"step": 1, "steps": 2, "loss": 2.3, "rate": 1.0}])
    """
    import pandas as pd

    if isinstance(records, str | Path):
        path = Path(records) / "log.jsonl" if Path(records).is_dir() else Path(records)
        if not path.is_file():
            raise ValueError(
                f"Found no log at {path}. Give the directory of a run, or its log.jsonl."
            )
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    table = pd.json_normalize(
        [record if isinstance(record, Mapping) else vars(record) for record in records]
    )
    if "lr" in table:
        table["rate"] = table["rate"].fillna(table["lr"]) if "rate" in table else table["lr"]
    unlabeled = "metrics.valid_loss" in table
    metric, unit, measured = "top1", "{:.1f} %", "Accuracy on validation images (%)"
    if unlabeled:
        metric, unit, measured = "valid_loss", "{:.3g}", "Loss on validation images"
    with styled():
        titles = "Loss of the batch", measured, "Learning rate, share of its peak"
        figure, (loss, valid, rate) = charts(titles, 900, 300)
        for ax, column, color, name in (
            (loss, "loss", SERIES[0], ""),
            (rate, "rate", "0.35", ""),
            (valid, f"metrics.{metric}", SERIES[0], "weights"),
            (valid, f"metrics.{metric}_average", SERIES[1], "their moving average"),
        ):
            if column in table and (curve := table[["step", column]].dropna().astype(float)).size:
                look = {"marker": "o", "markersize": 3, "clip_on": False} if name else {}
                label = f"{name}: {unit.format(curve[column].iloc[-1])}"
                ax.plot(curve["step"], curve[column], color=color, label=label, **look)
        for name, step in (marks or {}).items():
            loss.axvline(step, **REFERENCE)
            where = {"xycoords": ("data", "axes fraction"), "annotation_clip": True}
            loss.annotate(f"{name} ", (step, 0.04), ha="right", size=8.5, **where)
        for ax in (loss, valid, rate):
            ax.set(xlim=(0, table["steps"].iloc[-1] if len(table) else 1), xlabel="Step")
        if valid.lines:
            figure.legend(
                *valid.get_legend_handles_labels(),
                loc="outside lower center",
                ncols=2,
                frameon=False,
            )
        highest = table.filter(regex="^loss$|valid_loss").max().max() if len(table) else np.nan
        loss.set_ylim(0, 1.08 * highest if highest > 0 else 1.08)
        valid.set_ylim(*loss.get_ylim() if unlabeled else (0, 100))
        rate.set_ylim(0, 1.05)
    return figure


def attention_distance(
    mean_distance,
    *,
    uniform=None,
    control=None,
    image_size=None,
    ax: plt.Axes | None = None,
    title=None,
) -> plt.Axes:
    """Mean attention distance, one dot per layer and head (paper, Fig. 7 right and Fig. 11).

    The heads of a layer lie side by side, head 0 on the left. mean_distance: (L, H) in pixels, (B, L, H), of which the
    mean over B is drawn, or several of these by the name of their model, each in a color. uniform: the distance of
    uniform attention (`TokenGrid.uniform_distance`, renormalized if the dots are), a dashed line. Heads below a third
    of it are local, by convention, and their range is gray. control: the distances of a model with random weights, gray
    crosses. image_size: (height, width) of the input, or one number for both, for the label of the axis. Layers and
    heads count from 0.

    >>> distance = vitlens.attention.mean_distance(attn)
    >>> ax = vitlens.plot.attention_distance(distance, uniform=attn.grid.uniform_distance())
    """
    several = mean_distance if isinstance(mean_distance, Mapping) else {"": mean_distance}
    several, chance = (
        {n: _by_head(each) for n, each in several.items()},
        None if control is None else _by_head(control),
    )
    top = max(
        np.nanmax(each, initial=0)
        for each in (*several.values(), *([] if chance is None else [chance]))
    )
    top = max(top, uniform or 0) or 1.0
    of = "" if image_size is None else " of {} × {}".format(*np.broadcast_to(image_size, 2))
    with styled(ax):
        if ax is None:
            ax = plt.subplots(figsize=(6.4, 4.2), layout="constrained")[1]
        for k, (name, values) in enumerate(several.items()):
            strip(ax, values, 6, SERIES[k], (k, len(several)), name)
        layers = max(len(values) for values in several.values())
        if len(several) > 1:
            ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(several), frameon=False)
        low, high = -0.6, layers - 0.4
        if (
            uniform is not None or chance is not None
        ):  # room for words at the right of the dots, inside the axes
            high = low + (high - low) / (1 - min(0.4, 62 * ax.figure.dpi / DPI / ax.bbox.width))
        number_layers(ax, layers, high)
        where = {"textcoords": "offset points", "size": 8, "color": "0.35", "ha": "right"}
        if chance is not None:
            layer = np.repeat(np.arange(len(chance)) + 0.2, chance.shape[1])
            ax.plot(layer, chance.ravel(), "x", color="0.6", markersize=4)
            level, below = (chance.mean(), 0) if uniform is None else (uniform, -23)
            ax.annotate("× untrained", (high, level), (-3, below), va="center", **where)
        if uniform is not None:
            ax.axhspan(0, LOCAL * uniform, color="0.94", linewidth=0, zorder=0)
            ax.axhline(uniform, **REFERENCE)
            words = ax.annotate("uniform\nattention", (high, uniform), (0, 0), va="center", **where)
            words.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1})
            room = ax.bbox.width * DPI / ax.figure.dpi
            ax.annotate(
                style.wrapped("gray: local, below a third of uniform", room, 5.5),
                (high, 0),
                (-4, 4),
                **where,
            )
        ax.set(
            xlabel="Network depth (layer)",
            ylabel=f"Mean attention distance (pixels{of})",
            title=title,
        )
        ax.set(ylim=(0, 1.08 * top))
        rule(ax)
    return ax


def attention_distances(
    panels: Mapping[str, object],
    *,
    uniform: float | Mapping[str, float],
    controls: Mapping[str, object] | None = None,
) -> plt.Figure:
    """Panels of `attention_distance` side by side on one scale, for several models or measurements.

    panels: (L, H) by title. uniform: one distance for all, or one by title. controls: (L, H) of models with random
    weights, by title.

    >>> distance, uniform = vitlens.attention.mean_distance(attn), attn.grid.uniform_distance()
    >>> figure = vitlens.plot.attention_distances({"cat": distance[0], "rocket": distance[1]}, uniform=uniform)
    """
    uniform = uniform if isinstance(uniform, Mapping) else dict.fromkeys(panels, uniform)
    with styled():
        (figure, axes), tops = charts(panels, 900, 350, sharey=True), []
        for ax, (title, values) in zip(axes, panels.items(), strict=True):
            control = (controls or {}).get(title)
            attention_distance(values, uniform=uniform[title], control=control, ax=ax, title=title)
            ax.label_outer()
            tops.append(ax.get_ylim()[1])
        axes[0].set_ylim(0, max(tops))
    return figure


def strip(
    ax: plt.Axes,
    values: np.ndarray,
    size: float,
    color: str = SERIES[0],
    place: tuple[int, int] = (0, 1),
    name="",
) -> None:
    """Draw distances (L, H) as dots: a column for each layer, its heads side by side from left to right.

    place: number of the model among those that share a column, and their number.
    """
    layers, heads = values.shape
    number, count = place
    center = np.arange(layers)[:, None] + (number - (count - 1) / 2) * 0.8 / count
    at = center + (np.arange(heads) - (heads - 1) / 2) * 0.5 / count / max(heads - 1, 1)
    look = {
        "color": color,
        "markersize": size,
        "markeredgecolor": "white",
        "markeredgewidth": 0.5,
        "label": name,
    }
    ax.plot(at.ravel(), values.ravel(), "o", **look)


def number_layers(ax: plt.Axes, layers: int, high: float | None = None) -> None:
    """Set the x-limits, up to `high` or the last layer, and ticks at as many layers as have room for their numbers."""
    low, high = -0.6, layers - 0.4 if high is None else high
    step = int(np.ceil(20 * ax.figure.dpi / DPI * (high - low) / ax.bbox.width))
    ax.set(xlim=(low, high), xticks=range(0, layers, step))


def contributions(
    parts: Mapping[str, object], *, ax: plt.Axes | None = None
) -> plt.Figure | plt.Axes:
    """Contribution of each head and MLP to a logit: a row for each layer, a column for each head, the MLP in the last.

    parts: (L, H + 1) of one model by the title of the image, the MLP last. Red adds to the logit and blue subtracts
    from it, in units of the logit, on one scale for all images. ax: for a single image.

    >>> added = vitlens.stream.contributions(model, images[:1])
    >>> figure = vitlens.plot.contributions({"cat": torch.cat([added.heads[0], added.mlps[0, :, None]], 1)})
    """
    values = {
        name: array(each, 2, "Contributions of shape (layers, heads + 1)")
        for name, each in parts.items()
    }
    layers, columns = next(iter(values.values())).shape
    side = min(800, max(250, 70 + 26 * columns))
    rows = -(-len(values) // min(3, max(1, 860 // side)))
    cols = -(-len(values) // rows)
    titles = [style.wrapped(name, side - 40, 6.2) for name in values]
    text = 16 * max(len(title.splitlines()) for title in titles)
    look = colors(np.concatenate([*values.values()]), signed=True)
    with styled(ax):
        size = max(420, 90 + cols * side), 30 + rows * (60 + text + 20 * layers)
        axes = np.ravel(style.page(*size).subplots(rows, cols) if ax is None else [ax])
        for panel, title, each in zip(axes, titles, values.values(), strict=False):
            shown = panel.imshow(each, **look, interpolation="nearest", aspect="auto")
            panel.set_title(title, size=9, pad=5, loc="left", parse_math=False)
            step = 1 if columns < 14 else 4
            heads = range(0, columns - 1 - step // 2, step)
            panel.set_xticks([*heads, columns - 1], [*heads, "MLP"])
            panel.set_yticks(range(0, layers, -(-layers // 12)))
            panel.tick_params(length=0, labelsize=8)
            panel.set(xlabel="Head", ylabel="Layer")
        for panel in axes[len(values) :]:
            panel.axis("off")
        scale_bar(
            shown,
            ax=list(axes),
            shrink=min(1, 300 / (20 * layers * rows)),
            label="In units of the logit",
        )
    return axes[0].figure if ax is None else ax


def insertion_deletion(
    curves: Mapping[str, tuple], control: tuple, *, shares, score: str = ""
) -> plt.Figure:
    """The score of a class while patches are covered (deletion) or shown (insertion) in the order of each map.

    curves: (deletion (S,), insertion (S,)) by name of the map. control: (orders, S) of both for random orders, drawn
    as a band from the lowest to the highest and their mean, dashed. shares: (S,) of the patches, 0 to 1. score: its
    name, for the axis.

    >>> curve, orders = np.linspace(1, 0, 5), np.ones((3, 5))
    >>> figure = vitlens.plot.insertion_deletion({"map": (curve, curve)}, (orders, orders), shares=np.linspace(0, 1, 5))
    """
    chance = np.stack([np.asarray(orders, dtype=float) for orders in control])
    every = np.concatenate(
        [np.ravel(values) for both in (*curves.values(), chance) for values in both]
    )
    limits = min(0.0, 1.05 * every.min()), max(0.0, 1.05 * every.max())  # logits may lie below 0
    with styled():
        figure, axes = charts(("Deletion: low is good", "Insertion: high is good"), 900, 310)
        for k, (ax, xlabel) in enumerate(
            zip(axes, ("Patches covered", "Patches shown"), strict=True)
        ):
            ax.fill_between(shares, chance[k].min(0), chance[k].max(0), color="0.9", lw=0)
            ax.plot(shares, chance[k].mean(0), label="random orders", **CHANCE)
            for color, (name, both) in zip(style.palette(len(curves)), curves.items(), strict=True):
                ax.plot(shares, both[k], color=color, lw=1.7, label=name)
            ax.set(xlim=(0, 1), ylim=limits, xlabel=xlabel)
            ax.xaxis.set_major_formatter(PercentFormatter(1))
        axes[0].set_ylabel(score)
        axes[1].legend(loc="upper left", bbox_to_anchor=(1.02, 1.0), frameon=False)
    return figure


def randomized(results: Mapping[str, Sequence], *, titles: Sequence[str] = ()) -> plt.Figure:
    """Similarity of maps to those of the trained model after parts of its weights became random: a panel for each part.

    results: `vitlens.faithfulness.Randomization`s of the same parts by the name of their method, one for each draw of
    the weights. A dot is the mean over images of |rank correlation| of one draw, a bar the mean over the draws. titles:
    of the panels, by default the names of the parts. The dashed line is the threshold.

    >>> rho = torch.tensor([[0.9], [0.4]])
    >>> result = vitlens.faithfulness.Randomization(("head", "norm"), rho, ssim=rho, threshold=0.5)
    >>> figure = vitlens.plot.randomized({"relevance": [result]})
    """
    first = next(iter(results.values()))[0]
    with styled():
        figure, axes = charts(titles or first.parts, 900, 80 + 26 * len(results), sharey=True)
        for part, ax in enumerate(axes):
            for row, draws in enumerate(results.values()):
                values = [draw.rank_correlation[part].abs().mean().item() for draw in draws]
                ax.barh(row, np.mean(values), color=SERIES[0], alpha=0.3, height=0.7)
                ax.plot(
                    values, np.full(len(values), row), "o", color=SERIES[0], ms=3.5, clip_on=False
                )
            ax.axvline(first.threshold, **CHANCE)
            ax.set(xlim=(0, 1), ylim=(len(results) - 0.5, -0.5), xlabel="|rank correlation|")
            ax.tick_params(axis="y", length=0)
            rule(ax, "x")
        axes[0].set_yticks(range(len(results)), [*results])
    return figure


def _by_head(mean_distance) -> np.ndarray:
    """(L, H) distances, averaged over images, also from the table of `Summary.to_pandas`."""
    if hasattr(mean_distance, "columns"):
        mean_distance = mean_distance.pivot(index="layer", columns="head", values="mean_distance")
    values = array(
        mean_distance, (2, 3), "Mean distances of shape (layers, heads) or (images, layers, heads)"
    )
    return values.mean(0) if values.ndim == 3 else values
