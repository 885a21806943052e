"""The inspection of a model on one page, or of two models beside each other (paper, Fig. 6 and 7)."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib.pyplot as plt
from matplotlib.figure import SubFigure

from vitlens.plot.charts import attention_distance
from vitlens.plot.maps import overlay
from vitlens.plot.mosaics import filters, position_similarity
from vitlens.plot.pairs import wrapped
from vitlens.plot.style import WIDTH, page, styled

TITLES = {
    "filters": "Embedding filters", "positions": "Position similarity (cosine)",
    "distance": "Mean attention distance", "rollout": "Pictures, and what attention lets through",
}  # fmt: skip
GRAY = "0.35"
HEAD, EDGE = 38, 6  # pixels: above a figure, and left of its title


def inspected(found: Mapping[str, object]) -> plt.Figure:
    """The four figures of a model's inspection on one page, or those of two models, a column for each.

    found: one or two `vitlens.report.Inspection`, by the heading of their model. Above each figure stands
    what it shows in numbers; where a model lacks one, why. Of one model the rollouts of the first six pictures are
    shown, of two those of four; numbers are those of all pictures. Two models share one scale of distances, as shares
    of what uniform attention gives. Raises ValueError for more models or none.
    """
    if len(found) not in (1, 2):
        raise ValueError(f"Expected one or two models for a page, got {len(found)}. Draw several pages.")
    alone = len(found) == 1
    columns, top = 6 if alone else 4, max(1.0, *(float(_shares(each).max()) for each in found.values()))
    side = WIDTH / len(found) / columns - 12  # of a picture
    shape = max(each.grid.image[0] / each.grid.image[1] for each in found.values())
    heights = [48, *([360] if alone else [300, 400, 310]), 2 * (side * shape + 8) + 84]
    with styled():
        figure = page(WIDTH, sum(heights), "constrained")
        figure.get_layout_engine().set(w_pad=0.06, h_pad=0.04)
        rows = figure.subfigures(len(heights), len(found), height_ratios=heights, squeeze=False)
        for (head, *middle, last), (heading, each) in zip(rows.T, found.items(), strict=True):
            grid, (layers, heads) = each.grid, each.mean_distance.shape
            words = f"{grid.rows} × {grid.cols} patches, {layers} layers of {heads} heads"
            _titles(head, heading, words, size=13, weight="bold")
            charts = middle[0].subfigures(1, 3, width_ratios=[0.74, 1.17, 1.1]) if alone else middle
            for part, draw in zip(charts, (_filters, _positions, _distance), strict=True):
                draw(part, each, 4 if alone else 7, top)
            _rollouts(last, each, columns, side)
    return figure


def _filters(part: SubFigure, found, cols: int, _) -> None:
    if body := _panel(part, "filters", found):
        ax = filters(found.filters, cols=cols, ax=body.subplots())
        ax.set_aspect("equal", anchor="NW")
        ax.set_title("")


def _positions(part: SubFigure, found, *_) -> None:
    if body := _panel(part, "positions", found):
        ax = position_similarity(found.similarity, ax=body.subplots())
        ax.set_aspect("equal", anchor="NW")
        ax.set_title("")
        ax.tick_params(labelsize=7.5)
        for axis in (ax.xaxis, ax.yaxis):  # shorter, for those that are not square
            axis.set_label_text(axis.get_label_text().removeprefix("Input patch ").capitalize())
        ax.images[0].colorbar.set_label("")


def _distance(part: SubFigure, found, _, top: float) -> None:
    uniform = found.grid.uniform_distance()
    ax = attention_distance(found.mean_distance, uniform=uniform, ax=_panel(part, "distance", found).subplots())
    layers = len(found.mean_distance)
    ax.set(ylim=(0, 1.08 * top * (uniform or 1)), xticks=range(0, layers, -(-layers // 8)))


def _rollouts(part: SubFigure, found, columns: int, side: float) -> None:
    """Pictures in a line, and below each what attention lets through of it."""
    if body := _panel(part, "rollout", found):
        axes = body.subplots(2, columns)
        pictures = [picture for picture in found.pictures if picture.rollout is not None]
        for (above, below), picture in zip(axes.T, pictures, strict=False):
            above.imshow(picture.pixels)
            overlay(picture.pixels, picture.rollout, grid=found.grid, ax=below)
            caption = "\n".join(wrapped(picture.caption, side))
            below.set_title(caption, y=0, pad=-5, va="top", size=8.5, parse_math=False)
        for ax in axes.flat:
            ax.axis("off")


def _panel(part: SubFigure, name: str, found) -> SubFigure | None:
    """What is left of a part of the page below its title and what it shows, or None where it says why not."""
    head, body = part.subfigures(2, 1, height_ratios=[HEAD, part.bbox.height - HEAD])
    if name not in found.lacks:
        _titles(head, TITLES[name], found.sentences[name])
        return body
    _titles(head, TITLES[name], "none")
    text = "\n".join(wrapped(found.lacks[name], part.bbox.width - 20))
    body.text(EDGE / part.bbox.width, 0.97, text, va="top", color=GRAY, parse_math=False)
    return None


def _titles(head: SubFigure, title: str, words: str, **look) -> None:
    left = EDGE / head.bbox.width
    head.text(left, 0.94, title, va="top", parse_math=False, **({"size": 10.5} | look))
    head.text(left, 0.06, words, va="bottom", size=8.5, color=GRAY, parse_math=False)


def _shares(found):
    """(L, H) mean distances as shares of that of uniform attention; zeros where there is a single patch."""
    return found.mean_distance / (found.grid.uniform_distance() or 1)
