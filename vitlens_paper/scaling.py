"""The paper's figures of accuracy against pre-training, from its tables: Fig. 2, 3 and 5, and Fig. 4 of your runs."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter
from matplotlib.transforms import offset_copy

import vitlens_paper as paper
from vitlens.plot.style import array, canvas, charts, palette, rule, series_name, use_style
from vitlens_paper.tables import Published

KINDS = {"ViT": ("#0173b2", "o"), "hybrid": ("#029e73", "D"), "ResNet": ("0.45", "^")}
NAMES = {"ViT": "ViT", "hybrid": "hybrid, on an R50", "ResNet": "ResNet (BiT)"}
STYLES = ("-", "--", ":", "-.")
"""Lines of the curves of one kind, in their order."""
LEFT = {"ViT-B/32", "ViT-L/32", "R50+ViT-B/32", "R50+ViT-L/32", "R50+ViT-L/16", "R152x1"}
"""Models of Table 6 whose names are left of their points in Fig. 5. The other names are on the right."""
LIMITS = {"VTAB": (65, 80), "Natural": (70, 90), "Specialized": (80, 90), "Structured": (50, 70)}
"""Limits of the paper's panels in percent. Points beyond them widen them."""

SIZES = {
    "ViT-B/32": ("#0173b2", "white"),
    "ViT-B/16": ("#0173b2", "#0173b2"),
    "ViT-L/32": ("#de8f05", "white"),
    "ViT-L/16": ("#de8f05", "#de8f05"),
    "ViT-H/14": ("#029e73", "#029e73"),
}


def count(value: float, _=None) -> str:
    """Text of a number of images, such as 1.3 M, as a Matplotlib formatter, too."""
    unit = ""
    if value >= 1e6:
        value = value / 1e6
        unit = " M"
    elif value >= 1e3:
        value = value / 1e3
        unit = " k"
    return f"{value:.3g}{unit}"


def transfer() -> plt.Figure:
    """Accuracy after fine-tuning against the compute of pre-training, from Table 6 (paper, Fig. 5).

    Left the average over the five data sets of `paper.FIVE`, right ImageNet.

    >>> figure = vitlens_paper.transfer()
    """
    with use_style():
        figure, axes = charts(("Average of five data sets", "ImageNet"), 900, 430)
        values = (
            [row.average for row in paper.TABLE_6],
            [row.accuracy["ImageNet"] for row in paper.TABLE_6],
        )
        for ax, accuracies in zip(axes, values, strict=True):
            ax.set(xscale="log", xlabel="Compute of pre-training (exaFLOPs)")
            for row, value in zip(paper.TABLE_6, accuracies, strict=True):
                _draw_model(ax, row, value)
            ax.margins(0.1, 0.08)
            ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=9))
            ax.xaxis.set_minor_locator(NullLocator())
            ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        axes[0].set_ylabel("Top-1 after fine-tuning (%)")
        kinds = {NAMES[kind]: look for kind, look in KINDS.items()}
        kinds["small: 7 epochs of JFT-300M, large: 14"] = ("none", "")
        handles = []
        for color, marker in kinds.values():
            handle = plt.Line2D([], [], color=color, marker=marker, ls="", ms=8, mec="white")
            handles.append(handle)
        figure.legend(
            handles, kinds, loc="outside lower left", ncols=4, frameon=False, handletextpad=0.2
        )
    return figure


def _draw_model(ax: plt.Axes, row: Published, accuracy: float) -> None:
    """Draw the point of a model of Table 6, with its name beside it."""
    kind = paper.MODELS[row.model].kind
    color, marker = KINDS[kind]
    size = 5 if row.epochs == 7 else 7.5
    ax.plot(row.exaflops, accuracy, marker, color=color, ms=size, mec="white", mew=0.6)
    left = row.model in LEFT
    ax.annotate(
        row.model.replace("ViT-", ""),
        (row.exaflops, accuracy),
        (-4, 0) if left else (5, 0),
        textcoords="offset points",
        ha="right" if left else "left",
        va="bottom" if left else "top",
        color=color,
        size=7.5,
    )


def vtab() -> plt.Figure:
    """Accuracy on VTAB-1k, over all 19 tasks and by group (paper, Fig. 2, whose bars have no printed numbers).

    Drawn from Table 9 and, for BiT, the public BiT-M.

    >>> figure = vitlens_paper.vtab()
    """
    rows = {f"{p.model}, {p.data}": paper.groups(p.accuracy) for p in paper.TABLE_9}
    rows["BiT-M R152x4, ImageNet-21k"] = paper.BIT_M_VTAB
    bars = len(rows)
    colors = ("#0173b2", "#0173b2", "#56b4e9", "#949494")
    with use_style():
        titles = ["All 19 tasks"]
        titles += [f"{group} ({len(tasks)})" for group, tasks in paper.VTAB.items()]
        height = 34 * bars + 88
        figure, axes = charts(titles, 900, height, sharey=True)
        for ax, (group, limits) in zip(axes, LIMITS.items(), strict=True):
            values = [accuracy[group] for accuracy in rows.values()]
            rule(ax, "x")
            ax.hlines(range(bars), 0, values, color="0.85", linewidth=1, zorder=1)
            ax.set_xlim(_widen(limits, values))
            ax.set(ylim=(bars - 0.5, -0.5), xlabel="Top-1 (%)")
            ax.set_yticks(range(bars), rows)
            ax.tick_params(axis="y", length=0)
            for y, (value, color) in enumerate(zip(values, colors, strict=True)):
                ax.plot(value, y, "o", color=color, ms=7, mec="white", mew=0.6)
                ax.annotate(
                    f"{value:.1f}",
                    (value, y),
                    (0, 6),
                    textcoords="offset points",
                    ha="center",
                    size=8,
                )
    return figure


def _widen(limits: tuple[float, float], values: Sequence[float]) -> tuple[float, float]:
    """Limits with room for values beyond them."""
    low = min(limits[0], *values)
    high = max(limits[1], *values)
    room = 0.16 * (high - low)
    if low < limits[0]:
        low -= room
    if high > limits[1]:
        high += room
    return low, high


def pretraining_size(*, ax: plt.Axes | None = None) -> plt.Figure | plt.Axes:
    """Top-1 on ImageNet after fine-tuning against the images of pre-training, from Table 5 (paper, Fig. 3).

    The curve of BiT is its largest ResNet, R152x4, from its paper and Table 2, because the paper shades the range of
    all sizes without numbers.

    >>> figure = vitlens_paper.pretraining_size()
    """
    with canvas(ax, 900, 420) as (ax, result):
        rule(ax)
        ax.set(
            xscale="log",
            xlabel="Images of pre-training",
            ylabel="ImageNet top-1 after fine-tuning (%)",
        )
        largest = [p for p in paper.TABLE_2 if p.model == "R152x4"]
        images, accuracies = _on_imagenet([*paper.BIT, *largest])
        ax.plot(images, accuracies, "-^", color="0.6", ms=6, label="BiT R152x4", zorder=1)
        for k, (model, (edge, face)) in enumerate(SIZES.items()):
            rows = [p for p in paper.TABLE_5 if p.model == model]
            images, accuracies = _on_imagenet(rows)
            offset = 9 * (k - 2)
            aside = offset_copy(ax.transData, ax.figure, x=offset, units="points")
            # Matplotlib does not update the limits for shifted points.
            ax.update_datalim(np.column_stack([images, accuracies]))
            ax.plot(
                images,
                accuracies,
                "o",
                mec=edge,
                mfc=face,
                ms=7.5,
                mew=1.6,
                label=series_name(model),
                transform=aside,
            )
        ax.margins(0.12, 0.07)
        sizes = list(paper.IMAGES.values())
        labels = [f"{name}\n{count(images)}" for name, images in paper.IMAGES.items()]
        ax.set_xticks(sizes, labels)
        ax.xaxis.set_minor_locator(NullLocator())
        ax.yaxis.set_major_locator(MaxNLocator(8, integer=True))
        ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, labelspacing=0.8)
    return result


def _on_imagenet(rows: Sequence[Published]) -> tuple[list[int], list[float]]:
    """Images of pre-training and accuracies on ImageNet."""
    images = [paper.IMAGES[row.data] for row in rows]
    accuracies = [row.accuracy["ImageNet"] for row in rows]
    return images, accuracies


def few_shot(
    curves: Mapping[str, Sequence[Sequence[float]]],
    *,
    xlabel: str = "Images of pre-training",
    ylabel: str = "Few-shot top-1 (%)",
    ax: plt.Axes | None = None,
) -> plt.Figure | plt.Axes:
    """Few-shot accuracy against the images of pre-training, a curve for each model (paper, Fig. 4).

    curves: by name, rows of (images, accuracy) or (images, accuracy, low, high), in percent.

    The interval from low to high is a band for up to three curves, and error bars for more. Only your curves are drawn,
    because the paper prints no numbers. The legend lists the curves by their last accuracy. Curves whose names all tell
    the kind of their model, such as "ViT, patch 4" and "ResNet", have the color of the kind and differ by their lines.

    >>> figure = vitlens_paper.few_shot({"ViT": [(1_000_000, 40.0), (10_000_000, 55.0)]})
    """
    series = {name: _sort_rows(rows) for name, rows in curves.items()}
    with canvas(ax, 900, 400) as (ax, result):
        rule(ax)
        ax.set(xscale="log", xlabel=xlabel, ylabel=ylabel)
        lines = []
        for (color, line), (name, rows) in zip(_looks(series), series.items(), strict=True):
            images = rows[:, 0]
            accuracies = rows[:, 1]
            lines += ax.plot(
                images,
                accuracies,
                line,
                marker="o",
                color=color,
                ms=6,
                mec="white",
                mew=0.6,
                lw=1.6,
                label=series_name(name),
            )
            if rows.shape[1] < 4:
                continue
            low = rows[:, 2]
            high = rows[:, 3]
            if len(series) <= 3:
                ax.fill_between(images, low, high, color=color, alpha=0.15, lw=0)
            else:
                ax.vlines(images, low, high, color=color, alpha=0.5, lw=2)
        ax.margins(0.05, 0.08)
        _ticks(ax, series.values())
        lines = sorted(lines, key=lambda line: -line.get_ydata()[-1])
        ax.legend(handles=lines, loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    return result


def _looks(names: Collection[str]) -> list[tuple[str, str]]:
    """(color, line) of curves: one color for each kind of model if all names tell it, else one for each curve."""
    kinds = [_kind(name) for name in names]
    most = max((kinds.count(kind) for kind in kinds), default=0)
    if None in kinds or most > len(STYLES):
        return [(color, "-") for color in palette(len(names))]
    looks = []
    for place, kind in enumerate(kinds):
        color, _ = KINDS[kind]
        earlier = kinds[:place].count(kind)
        looks.append((color, STYLES[earlier]))
    return looks


def _kind(name: str) -> str | None:
    """Kind of a model in `KINDS` by its name, such as "R50+ViT-B/16", "hybrid", "R152x4" or "ViT, patch 4"."""
    has_resnet = re.search(r"resnet|\bbit\b|\br\d+", name, re.IGNORECASE)
    has_vit = re.search(r"\bvit", name, re.IGNORECASE)
    if "hybrid" in name.lower() or (has_resnet and has_vit):
        return "hybrid"
    if has_resnet:
        return "ResNet"
    return "ViT" if has_vit else None


def _sort_rows(rows) -> np.ndarray:
    """(n, 2 or 4) rows of (images, accuracy, …), sorted by images. Raises ValueError unless images are above 0."""
    rows = array(rows, 2, "Rows (images, accuracy)")
    images = rows[:, 0]
    if not (np.isfinite(rows).all() and (images > 0).all()):
        raise ValueError(
            f"Images and accuracies must be finite, the first above 0, got {rows.tolist()}."
        )
    return rows[images.argsort()]


def _ticks(ax: plt.Axes, series: Iterable[np.ndarray]) -> None:
    """Put a tick at each size, or at round numbers if some sizes lack room."""
    ax.autoscale_view()
    ax.xaxis.set_minor_locator(NullLocator())
    sizes = sorted({float(n) for rows in series for n in rows[:, 0]})
    low, high = np.log(ax.get_xlim())
    extent = high - low
    gaps = np.diff(np.log(sizes)) / extent
    if (gaps >= 0.08).all():
        ax.set_xticks(sizes, map(count, sizes))
    else:
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        ax.xaxis.set_major_formatter(count)
