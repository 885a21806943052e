"""What a model trained without labels predicts for hidden patches, at several steps of its training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np

from vitlens.plot.style import WIDTH, array, page, place, show, styled, write

HIDDEN = (0.5, 0.5, 0.5)
SHARP = 8
"""Pixels that a cell of a prediction is drawn with."""


def filled_in(pictures, snapshots: Mapping, indices: Sequence[int] | None = None) -> plt.Figure:
    """Pictures, what the model saw of them, and what it said at several snapshots of its training, side by side.

    pictures: (N, H, W, 3) in 0…1, the first probe images of the run. snapshots: what `vitlens.train.snapshots.load`
    returns of a run without labels: `steps` (S,), `corrupted` and `source` (S, N, rows, cols) and `predicted`
    (S, N, h, w, 3), of which h and w are multiples of rows and cols. indices: which snapshots, at most six; by default
    five spread evenly. Gray patches were hidden; a patch that stands at the place of another is shown there. Predicted
    patches are drawn in full, the others, which the model was not asked about, smaller and as the target has them. The
    last column is the target, the picture averaged to the resolution of the predictions.
    """
    pictures = np.clip(array(pictures, 4, "Pictures of shape (N, H, W, 3)", "Give the probe images"), 0, 1)
    lacking = [name for name in ("steps", "corrupted", "source", "predicted") if name not in snapshots]
    if lacking:
        raise ValueError(
            f"The snapshots lack {' and '.join(lacking)}, which only a run without labels has. Give those of one."
        )
    steps = np.asarray(snapshots["steps"])
    if indices is None:
        indices = np.unique(np.linspace(0, len(steps) - 1, min(5, len(steps))).round().astype(int))
    if not 1 <= len(indices) <= 6:
        raise ValueError(f"Expected one to six snapshots, got {len(indices)}.")
    predicted = np.asarray(snapshots["predicted"], dtype=float)
    corrupted, source = (np.asarray(snapshots[name])[0].astype(int) for name in ("corrupted", "source"))
    count = min(len(pictures), len(corrupted))
    rows, cols = corrupted.shape[1:]
    size = predicted.shape[2:4]
    if size[0] % rows or size[1] % cols or any(n % m for n, m in zip(pictures.shape[1:3], size, strict=True)):
        raise ValueError(
            f"Predictions of {size[0]} × {size[1]} fit neither {rows} × {cols} patches nor pictures of "
            f"{pictures.shape[1]} × {pictures.shape[2]}. Give pictures and snapshots of one run."
        )
    target = _averaged(pictures[:count], size)
    columns = [("picture", pictures[:count]), ("input", _seen(pictures[:count], source[:count]))]
    columns += [(f"step {steps[k]:,}", _told(predicted[k][:count], target, corrupted[:count])) for k in indices]
    columns += [("target", target)]
    side = min(150, (WIDTH - 20) // len(columns) - 6)
    tall = round(side * pictures.shape[1] / pictures.shape[2])
    with styled():
        figure = page(20 + len(columns) * (side + 6), 36 + count * (tall + 6))
        for column, (title, images) in enumerate(columns):
            x = 10 + column * (side + 6)
            write(figure, x + side / 2, 24, title, size=9, ha="center")
            for row, image in enumerate(images):
                ax = place(figure, x, 32 + row * (tall + 6), side, tall)
                show(ax, image, 0, 0, 1, 1)
                ax.set(xlim=(0, 1), ylim=(1, 0))
    return figure


def _averaged(pictures: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """(N, h, w, 3) the means of the pixels of each cell."""
    n, height, width, _ = pictures.shape
    return pictures.reshape(n, size[0], height // size[0], size[1], width // size[1], 3).mean((2, 4))


def _told(predicted: np.ndarray, target: np.ndarray, corrupted: np.ndarray) -> np.ndarray:
    """(N, SHARP · h, SHARP · w, 3) predictions of corrupted patches; the others smaller, on white, as in the target."""
    cells = np.ones((1, SHARP, SHARP, 1))
    height, width = (n * SHARP // m for n, m in zip(target.shape[1:3], corrupted.shape[1:], strict=True))
    inside = np.zeros((height, width))
    inside[height // 4 : -(height // 4), width // 4 : -(width // 4)] = 1
    asked = np.kron(corrupted, np.ones((1, height, width)))[..., None] > 0
    small = np.tile(inside, corrupted.shape[1:])[..., None] > 0
    return np.where(asked, np.kron(predicted, cells), np.where(small, np.kron(target, cells), 1.0))


def _seen(pictures: np.ndarray, source: np.ndarray) -> np.ndarray:
    """(N, H, W, 3) pictures whose patches are those of `source` (N, rows, cols), gray where it is −1."""
    (n, height, width, _), (rows, cols) = pictures.shape, source.shape[1:]
    patches = pictures.reshape(n, rows, height // rows, cols, width // cols, 3).swapaxes(2, 3)
    patches = patches.reshape(n, rows * cols, *patches.shape[3:])
    found = patches[np.arange(n)[:, None], source.reshape(n, -1)]
    found[source.reshape(n, -1) < 0] = HIDDEN
    return found.reshape(n, rows, cols, *found.shape[2:]).swapaxes(2, 3).reshape(pictures.shape)
