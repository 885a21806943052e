"""Curves, categories with intervals, and the figures that are made of them: a training run, tests of maps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import NullLocator, PercentFormatter, StrMethodFormatter

from vitlens.plot.naming import at_the_right
from vitlens.plot.style import REFERENCE, SERIES, array, canvas, charts, rule, styled

METRICS = {"": ("weights", SERIES[0]), "_average": ("their moving average", SERIES[1])}
"""Whose validation it is, by the ending of the metric's name: the name of the curve and its color."""


def lines(
    table, *, dotted=None, bands=None, level: float | None = None, log: str = "", palette=SERIES, marker: str = "o",
    xlabel: str = "", ylabel: str = "", ax: plt.Axes | None = None,
) -> plt.Figure | plt.Axes:  # fmt: skip
    """A curve for each column of a table against its index.

    table: a pandas DataFrame of numbers, its index numeric. dotted: another one, whose columns are dotted lines in the
    colors of the same names, or else of the same places, where they are named. bands: two more, the lower and the upper
    ends of what is shaded about each curve, in the same columns. level: a dashed line across. log: "x" or "xy" for
    logarithmic axes; with "xy" the ticks are those of the index. palette: colors, or the name of a seaborn palette; if
    there are fewer colors than columns, evenly spaced hues take their place.
    """
    import seaborn as sns

    count = max(len(each.columns) for each in (table, dotted) if each is not None)
    if isinstance(palette, str) or len(palette) < count:
        palette = sns.color_palette(palette if isinstance(palette, str) else "husl", count)
    named = dict(zip(table, palette, strict=False))
    with canvas(ax, 720, 360) as (ax, result):
        for name, color in named.items():
            ax.plot(table.index, table[name], color=color, marker=marker, markersize=4, label=name)
            if bands is not None:
                ax.fill_between(table.index, *(end[name] for end in bands), color=color, alpha=0.25, linewidth=0)
        for color, name in zip(palette, () if dotted is None else dotted, strict=False):
            style = {"color": named.get(name, color), "label": None if name in table else name}
            ax.plot(dotted.index, dotted[name], ":", marker=marker, markersize=4, **style)
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
        ax.legend(framealpha=0.9, edgecolor="0.85")
    return result


def intervals(
    values: Mapping[str, float], errors: Mapping[str, float], *, points: Mapping[str, Iterable[float]] | None = None,
    level: float | None = None, xlabel: str = "", ax: plt.Axes | None = None,
) -> plt.Figure | plt.Axes:  # fmt: skip
    """A dot with an error bar for each name, the first one on top.

    values: by name, as a dictionary or a pandas Series. errors: half the length of each interval, by the same names.
    points: the single measurements behind each value, small gray dots. level: a dashed line to compare with.
    """
    import seaborn as sns

    names, points = list(values.keys()), {} if points is None else points
    with canvas(ax, 800, 90 + 26 * len(names)) as (ax, result):
        single = [(value, name) for name in names for value in points.get(name, ())]
        if single:
            values_of, rows = zip(*single, strict=True)
            sns.stripplot(x=values_of, y=rows, order=names, orient="h", color="0.7", jitter=False, size=4, ax=ax)
        half = [errors[name] for name in names]
        ax.errorbar([values[name] for name in names], range(len(names)), xerr=half, fmt="o", color=SERIES[0], capsize=3)
        if level is not None:
            ax.axvline(level, **REFERENCE)
        ax.set_yticks(range(len(names)), names)
        ax.set(xlabel=xlabel, ylabel="", ylim=(len(names) - 0.5, -0.5))
        ax.tick_params(axis="y", length=0)
        rule(ax, "x")
    return result


def training(records, *, marks: Mapping[str, int] | None = None) -> plt.Figure:
    """Loss, validation accuracy and learning rate of a run against its steps; without labels, the validation loss.

    records: what `vitlens.train.fit` yields, in order, or the lines of its `log.jsonl` as dictionaries; those without a
    loss add to the learning rate only. The x-axes end at the last step of the whole run, so a figure that is redrawn
    during training keeps its scale; without records the axes are empty. The legend at the foot has the last
    accuracy. Logs without `rate` have it in `lr`. marks: steps by what happens there, dashed lines in the first panel.
    """
    if isinstance(records, str | Path):
        raise ValueError(
            f"Expected the records of a run, got {str(records)!r}. Read them from a file with "
            '`pandas.read_json(file, lines=True).to_dict("records")`.'
        )
    records = [record if isinstance(record, Mapping) else vars(record) for record in records]
    losses = [(r["step"], r["loss"]) for r in records if r["loss"] is not None]
    steps = records[-1]["steps"] if records else 1
    unlabeled = any("valid_loss" in r["metrics"] for r in records)
    measured = "Loss on validation images" if unlabeled else "Accuracy on validation images (%)"
    titles = ("Loss of the batch", measured, "Learning rate, share of its peak")
    with styled():
        figure, (loss, accuracy, rate) = charts(titles, 900, 300)
        if records:
            rate.plot([r["step"] for r in records], [r.get("rate", r["lr"]) for r in records], color="0.35")
        if losses:
            loss.plot(*zip(*losses, strict=True), color=SERIES[0])
        for name, step in (marks or {}).items():
            loss.axvline(step, **REFERENCE)
            loss.annotate(f"{name} ", (step, 0.04), xycoords=("data", "axes fraction"), ha="right", size=8.5)
        for ending, (name, color) in METRICS.items():
            metric = ("valid_loss" if unlabeled else "top1") + ending
            points = [(r["step"], r["metrics"][metric]) for r in records if metric in r["metrics"]]
            if points:
                label = f"{name}: {points[-1][1]:.3g}" if unlabeled else f"{name}: {points[-1][1]:.1f} %"
                accuracy.plot(*zip(*points, strict=True), "o-", markersize=3, color=color, label=label, clip_on=False)
        for ax in (loss, accuracy, rate):
            ax.set(xlim=(0, steps), xlabel="Step")
        if accuracy.lines:
            figure.legend(*accuracy.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
        values = [value for _, value in losses]
        values += [value for line in accuracy.lines for value in line.get_ydata()] * unlabeled
        loss.set_ylim(0, 1.08 * max(values, default=1))
        accuracy.set_ylim(*loss.get_ylim() if unlabeled else (0, 100))
        rate.set_ylim(0, 1.05)
    return figure


def insertion_deletion(curves: Mapping[str, tuple], control: tuple, *, shares, score: str = "") -> plt.Figure:
    """The score of a class while patches are covered (deletion) or shown (insertion) in the order of each map.

    curves: by name of the map, (deletion (S,), insertion (S,)); at most eight. control: (orders, S) of both for random
    orders, drawn as a band from the lowest to the highest and their mean, dashed. shares: (S,) of the patches, 0 to 1.
    score: its name, for the axis. Raises ValueError for other shapes.
    """
    _check_count(curves, "maps")
    shares = array(shares, 1, "Shares of shape (S,)", "Give those at which the curves were read")

    def checked(part, ndim: int, wanted: str) -> np.ndarray:
        values = array(part, ndim, wanted, "Give as many values as shares")
        if values.shape[-1] != len(shares):
            raise ValueError(f"Expected {len(shares)} values, one for each share, got {values.shape[-1]}.")
        return values

    curves = {name: [checked(part, 1, "Curves of shape (S,)") for part in both] for name, both in curves.items()}
    chance = [checked(part, 2, "Random orders of shape (orders, S)") for part in control]
    every = np.concatenate([part.ravel() for both in (*curves.values(), chance) for part in both])
    limits = min(0.0, 1.05 * every.min()), max(0.0, 1.05 * every.max())  # logits may lie below 0
    with styled():
        figure, axes = charts(("Deletion: low is good", "Insertion: high is good"), 900, 310)
        for k, (ax, xlabel) in enumerate(zip(axes, ("Patches covered", "Patches shown"), strict=True)):
            ax.fill_between(shares, chance[k].min(0), chance[k].max(0), color="0.9", lw=0)
            ax.plot(shares, chance[k].mean(0), color="0.5", lw=1.2, ls=(0, (4, 3)), label="random orders")
            for color, (name, both) in zip(SERIES, curves.items(), strict=False):
                ax.plot(shares, both[k], color=color, lw=1.7, label=name)
            ax.set(xlim=(0, 1), ylim=limits, xlabel=xlabel)
            ax.xaxis.set_major_formatter(PercentFormatter(1))
        axes[0].set_ylabel(score)
        axes[1].legend(loc="upper left", bbox_to_anchor=(1.02, 1.0), frameon=False)
    return figure


def randomized(
    found: Mapping[str, object], *, threshold: float | None = None, ax: plt.Axes | None = None
) -> plt.Figure | plt.Axes:
    """How similar each map stays while the model's weights are replaced by random ones, from the head down.

    found: by name of the method, a `vitlens.faithfulness.Randomization` of one model; at most eight. Drawn is the mean
    over images of |rank correlation| with the map of the trained model, after each part. threshold: a dashed line; by
    default that of the first. Raises ValueError for other numbers of methods, or several models.
    """
    _check_count(found, "methods")
    parts = [tuple(each.parts) for each in found.values()]
    if any(each != parts[0] for each in parts):
        raise ValueError("All methods must have been tried on one model, but its parts differ.")
    names = ["none", *parts[0]]
    level = next(iter(found.values())).threshold if threshold is None else threshold
    with canvas(ax, 900, 350) as (ax, result):
        several = any(each.rank_correlation.shape[1] > 1 for each in found.values())
        title = f"|Rank correlation| with the map of the trained model{', mean over images' * several}"
        ax.set_title(title, size=10)
        ax.axhline(level, color="0.5", lw=1.0, ls=(0, (4, 3)))
        ends = []
        for color, (name, each) in zip(SERIES, found.items(), strict=False):
            values = np.array([1.0, *each.rank_correlation.abs().mean(1).tolist()])
            ax.plot(values, "o-", color=color, ms=4, lw=1.6)
            ends.append((values[-1], name, color))
        ax.set(xlim=(-0.2, len(names) - 0.8), ylim=(0, 1.03), xlabel="Random from the head down to and with …")
        ax.set_xticks(range(len(names)), names, rotation=40, ha="right", rotation_mode="anchor")
        rule(ax)
        at_the_right(ax, ends)
    return result


def _check_count(given: Mapping, what: str) -> None:
    if not 0 < len(given) <= len(SERIES):
        raise ValueError(f"Expected 1 to {len(SERIES)} {what} for one figure, got {len(given)}.")
