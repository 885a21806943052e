"""The three panels of the paper's Fig. 7: embedding filters, position similarity, attention distance."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.legend_handler import HandlerTuple

from vitlens.plot.style import WIDTH, array, color_map, page, place, show, styled, write

# Eight colors that the color-blind tell apart: seaborn's "colorblind" without the two lightest.
HEADS = ("#0173b2", "#de8f05", "#029e73", "#d55e00", "#cc78bc", "#ca9161", "#56b4e9", "#949494")


def head_colors(heads: int) -> Sequence:
    """A color for each head: eight that are easily told apart, or as many of a sequence as there are heads."""
    return HEADS[:heads] if heads <= len(HEADS) else mpl.colormaps["viridis"](np.linspace(0, 0.95, heads))


def about_gray(tiles: np.ndarray) -> np.ndarray:
    """Tiles (n, p, q, C) as colors (n, p, q, 3), each scaled on its own: v → ½ + ½·v / max|v|."""
    largest = np.abs(tiles).max((1, 2, 3), keepdims=True)
    return (0.5 + 0.5 * tiles / np.where(largest > 0, largest, 1)).repeat(3 // tiles.shape[-1], -1)


def filters(components, explained_variance=None, *, cols: int = 7) -> plt.Figure:
    """Principal components of the patch-embedding filters as small pictures (paper, Fig. 7 left).

    components: (k, p, q, C), C = 3 (colors) or 1 (grays), as `vitlens.filters.components` returns them.
    explained_variance: (k,) shares of the variance, written under the tiles. cols: tiles in a line.
    Every tile is scaled on its own, symmetrically about zero: v → ½ + ½·v / max|v|, so zero is middle gray in all of
    them, and brightness says nothing about which of two tiles is larger.
    """
    tiles = array(components, 4, "Filters of shape (k, p, q, C)", "give what vitlens.filters.components returns")
    count, p, q, channels = tiles.shape
    if channels not in (1, 3):
        raise ValueError(f"Filters of 1 or 3 channels were wanted, but {channels} channels came; choose some of them.")
    if not np.isfinite(tiles).all():
        raise ValueError("Filters of finite numbers were wanted, but some are not; look for NaN in the weights.")
    shares = None
    if explained_variance is not None:
        shares = array(explained_variance, 1, "One share of the variance per component", "give both from one call")
        if len(shares) != count or not 0 <= shares.min() <= shares.max() <= 1:
            raise ValueError(
                f"{count} shares of the variance between 0 and 1 were wanted, but {len(shares)} from "
                f"{shares.min():.3g} to {shares.max():.3g} came; give both from one call of vitlens.filters.components."
            )
    tiles = about_gray(tiles)

    cols = min(cols, count)
    lines = -(-count // cols)
    gap = 10
    cell = max(1, int(min(100, (WIDTH - 28) / cols - gap) / q))  # a whole number of pixels, so that cells are equal
    width, height = q * cell, p * cell
    line = height + (26 if shares is not None else gap)
    wide, tall = cols * (width + gap) - gap, lines * line - (0 if shares is not None else gap)
    across = max(wide, 400) + 28
    with styled():
        figure = page(across, 40 + tall + (34 if shares is not None else 14))
        ax = place(figure, (across - wide) // 2, 40, wide, tall)
        for index, tile in enumerate(tiles):
            x, y = index % cols * (width + gap), index // cols * line
            show(ax, tile, x, y, width, height)
            if shares is not None:
                text = f"{shares[index]:.1%}" if shares[index] >= 0.01 else f"{shares[index]:.2%}"
                ax.text(x + width / 2, y + height + 4, text, ha="center", va="top", size=7.5, color="0.35")
        ax.set(xlim=(0, wide), ylim=(tall, 0))
        kind = "RGB embedding filters" if channels == 3 else "Embedding filters"
        ax.set_title(f"{kind} (first {count} principal components)")
        if shares is not None:
            note = f"Below each: its share of the filters’ variance, {shares.sum():.1%} together."
            write(figure, across / 2, 40 + tall + 6, note, ha="center", va="top", size=8.5)
    return figure


def position_similarity(similarity, *, every: int | None = None) -> plt.Figure:
    """Cosine similarity of position embeddings, one tile per patch position (paper, Fig. 7 center and Fig. 10).

    similarity: (rows, cols, rows, cols), as `vitlens.positions.similarity` returns it. Positions count from 1, as in
    the paper. every: show every so-many-th row and column of tiles; by default as many as stay readable, at most 14
    each way. The axes say so. The tiles themselves are always complete.
    """
    values = array(
        similarity,
        4,
        "Similarity of shape (rows, cols, rows, cols)",
        "give what vitlens.positions.similarity returns",
    )
    rows, cols = values.shape[:2]
    if values.shape[2:] != (rows, cols):
        raise ValueError(
            f"Similarity of shape (rows, cols, rows, cols) was wanted, but an array of shape {values.shape} came; give "
            "what vitlens.positions.similarity returns."
        )
    if np.nanmax(np.abs(values), initial=0) > 1.001:
        raise ValueError(
            f"Cosines between −1 and 1 were wanted, but values up to {np.nanmax(np.abs(values)):.3g} came; divide the "
            "dot products by the norms, as vitlens.positions.similarity does."
        )
    if every is None:  # at most 14 tiles in a line, and two pixels for every cell of them on a page
        most = max(rows, cols)
        every = next((n for n in range(1, most) if -(-most // n) <= min(14, 352 // most)), most)
    if every < 1:
        raise ValueError(f"Every first, second or later tile can be shown, but every={every} came; give 1 or more.")
    down, across = (range((n - 1) % every // 2, n, every) for n in (rows, cols))
    # A whole number of pixels per cell, or cells of one size would be drawn in two.
    cells = max(len(down) * rows, len(across) * cols)
    cell = max(1, min(2, 704 // cells), min(640, max(220, 20 * cells)) // cells)
    gap = min(max(cell, 2), 6)
    height, width = rows * cell, cols * cell
    tall, wide = len(down) * (height + gap) - gap, len(across) * (width + gap) - gap
    room = max(tall, 120), max(wide, 240)
    with styled():
        figure = page(room[1] + 170, room[0] + 106)
        ax = place(figure, 62 + (room[1] - wide) // 2, 40 + (room[0] - tall) // 2, wide, tall)
        ax.set_facecolor("0.82")
        scale = {"cmap": color_map("RdBu_r"), "vmin": -1.0, "vmax": 1.0}
        for i, row in enumerate(down):
            for j, col in enumerate(across):
                tile = show(ax, values[row, col], j * (width + gap), i * (height + gap), width, height, **scale)
        some = "" if every == 1 else f" (every {({2: '2nd', 3: '3rd'}).get(every, f'{every}th')})"
        ax.set(xlim=(0, wide), ylim=(tall, 0), xlabel=f"Input patch column{some}", ylabel=f"Input patch row{some}")
        ax.set_xticks([j * (width + gap) + width / 2 for j in range(len(across))], [col + 1 for col in across])
        ax.set_yticks([i * (height + gap) + height / 2 for i in range(len(down))], [row + 1 for row in down])
        ax.tick_params(length=0)
        ax.set_title("Position embedding similarity")
        bar = figure.colorbar(tile, cax=place(figure, 62 + room[1] + 22, 40, 14, room[0]), label="Cosine similarity")
        bar.set_ticks([-1, -0.5, 0, 0.5, 1], labels=["−1", "−0.5", "0", "0.5", "1"])
        bar.outline.set_visible(False)
    return figure


def attention_distance(mean_distance, *, uniform=None, image_size=None, ax=None, title=None) -> plt.Axes:
    """Mean attention distance, one dot per layer and head (paper, Fig. 7 right and Fig. 11).

    mean_distance: (L, H) in pixels, or (B, L, H), of which the mean over B is drawn. uniform: the distance of attention
    spread evenly (`TokenGrid.uniform_distance`, renormalized where the dots are), a dashed line. image_size: (height,
    width) of the input, or one number for both, named at the axis so that the pixels mean something. Layers and heads
    count from 0.
    """
    wanted = "Mean distance of shape (layers, heads) or (images, layers, heads)"
    values = array(mean_distance, (2, 3), wanted, "give what vitlens.attention.mean_distance returns")
    values = values.mean(0) if values.ndim == 3 else values
    layers, heads = values.shape
    top = max(np.nanmax(values, initial=0), uniform or 0) or 1.0
    with styled(ax):
        if ax is None:
            ax = plt.subplots(figsize=(6.4, 4.2), layout="constrained")[1]
        dots = [
            ax.plot(values[:, head], "o", color=color, markersize=6, mec="white", mew=0.5, alpha=0.9)[0]
            for head, color in enumerate(head_colors(heads))
        ]
        entries = {f"Head {head}": dot for head, dot in enumerate(dots)}
        if heads > len(HEADS):
            entries = {f"Heads 0 … {heads - 1}": tuple(dots)}
        if uniform is not None:
            entries["uniform attention"] = ax.axhline(uniform, color="0.35", linestyle="--", linewidth=1, zorder=1)
        size = (image_size, image_size) if np.ndim(image_size) == 0 else image_size
        of = "" if image_size is None else f" of {size[0]} × {size[1]}"
        ax.set(xlabel="Network depth (layer)", ylabel=f"Mean attention distance (pixels{of})", title=title)
        ax.set(xlim=(-0.6, layers - 0.4), ylim=(0, 1.08 * top), xticks=range(0, layers, -(-layers // 16)))
        ax.grid(axis="y", color="0.92", linewidth=0.8)
        ax.set_axisbelow(True)
        ax.legend(
            entries.values(),
            entries,
            ncols=1 if len(entries) < 6 else 2,
            handlelength=2.2 if heads <= len(HEADS) else 6,
            handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
            framealpha=0.9,
            edgecolor="0.85",
        )
    return ax
