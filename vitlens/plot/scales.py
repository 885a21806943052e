"""The rule of colors of every map, in figures, in the explorer and in the scripts of its pages.

1. A scale starts at 0, or is symmetric about 0 for maps with negative values. Cosines of positions have −1 to 1.
2. The scale is shown: a color bar, or its ends in words next to the map.
3. A map whose colors start elsewhere is stretched. The figure states how many times larger its differences look.
4. A map that departs from uniform by no more than maps of random weights is drawn as uniform, and the figure says so.

The departure of a map is max |v − mean| / |mean| over its patches, which a single patch decides, on a grid of any size.
Both bounds are read from `data/results/uniform.csv` (`experiments/uniform.py`), four photographs in each of five ViTs
of widths 128 to 768 whose random weights are normal with standard deviation 0.02, as in timm and transformers.
`UNIFORM` is for rollouts and for maps of unknown kind: 19 of the 20 rollouts of random weights are within it, and the
nearest one of a trained model is at 0.24. `ATTENTION` is for heads of a single layer, where logits of random weights
have the standard deviation s = 0.02² · D, so the largest of P weights is about exp(s · √(2 ln P)) times their mean,
1.28 for D = 192 and P = 196. Of heads up to that width, 94 to 100 % are within it. Of two trained models none is, but
one map of 288 of attention received.

No bound separates wider heads, rollouts of Xavier's weights (0.09 to 0.56) and gradients (0.3 to 700) of random weights
from those of trained ones. These maps are drawn from 0, with their largest value, and next to single maps its factor to
the mean. Token norms and cosines were not measured: the explorer draws only constant ones as uniform.

Principal components of tokens and of filters are no maps. Each component is scaled by itself and has no unit.
"""

from __future__ import annotations

import matplotlib as mpl
import numpy as np

from vitlens.formatting import number
from vitlens.names import suggestion

UNIFORM = 0.1
"""Largest departure of a map that is drawn as uniform."""
ATTENTION = 0.3
"""Largest departure of the attention of a single layer that is drawn as uniform."""
SIGNED = 1 / 3
"""Lowest opacity of a map with both signs, as a share of the highest. Lower ones show dark images as rings at 0."""
MISSING = "0.65"
"""The gray of NaN."""


def departure(values: np.ndarray) -> float:
    """Largest distance of a value from the mean, as a share of the mean's size: 0 for a uniform map.

    NaN and infinite values are left out. It is infinite for a map with a mean of 0 that is not 0 everywhere.

    >>> vitlens.plot.scales.departure(np.array([[1.0, 1.0], [1.0, 3.0]]))
    1.0
    """
    finite = values[np.isfinite(values)].astype(float)
    if not finite.size:
        return 0.0
    mean = finite.mean()
    farthest = np.abs(finite - mean).max()
    if farthest == 0:
        return 0.0
    return float(farthest / abs(mean)) if mean else np.inf


def uniform_value(values: np.ndarray, bound: float = UNIFORM) -> float | None:
    """The mean of a map whose departure is at most `bound`, to be drawn in place of its values, else None."""
    finite = values[np.isfinite(values)].astype(float)
    if not finite.size or departure(values) > bound:
        return None
    return float(finite.mean())


def as_drawn(values: np.ndarray, bound: float = UNIFORM) -> np.ndarray:
    """The values of a map as they are drawn: their mean if the map is uniform. NaN and infinite values stay.

    >>> vitlens.plot.scales.as_drawn(np.array([[1.0, 1.02]]))
    array([[1.01, 1.01]])
    """
    mean = uniform_value(values, bound)
    if mean is None:
        return values
    return np.where(np.isfinite(values), mean, values)


def colormap(cmap: str | mpl.colors.Colormap) -> mpl.colors.Colormap:
    """Matplotlib's color map of a name, or the one given. Raises ValueError for unknown names.

    >>> vitlens.plot.scales.colormap("viridis").N
    256
    """
    if isinstance(cmap, mpl.colors.Colormap):
        return cmap
    if cmap not in mpl.colormaps:
        hint = suggestion(str(cmap), mpl.colormaps)
        raise ValueError(
            f"cmap must be a Colormap or the name of one in Matplotlib, such as magma, got {cmap!r}.{hint}"
        )
    return mpl.colormaps[cmap]


def without_signs(values: np.ndarray, cmap):
    """The color map for a map of a figure, or None for one with negative values, which stays red and blue."""
    if cmap is not None:
        colormap(cmap)  # raises for unknown names
    return None if np.nanmin(values, initial=0) < 0 else cmap


def colors(
    values: np.ndarray, cmap: str | mpl.colors.Colormap | None = None, signed: bool | None = None
) -> dict:
    """Color map and limits for the values: 0…max in viridis, or ±max in red and blue if some are negative."""
    finite = values[np.isfinite(values)]
    high = np.abs(finite).max(initial=0) or 1.0
    if signed is None:
        signed = finite.min(initial=0) < 0
    default = "RdBu_r" if signed else "viridis"
    chosen = colormap(default if cmap is None else cmap).with_extremes(bad=MISSING)
    low = -high if signed else 0.0
    return {"cmap": chosen, "vmin": low, "vmax": high}


def translucent(
    cmap: str | mpl.colors.Colormap,
    low: float,
    high: float,
    alpha: float,
    opacity: str,
    power: float = 1,
) -> mpl.colors.Colormap:
    """256 colors of `cmap`, as in `colormap`, for an overlay of values from low to high, with NaN in opaque gray.

    opacity "value": proportional to the distance from 0, or from the end nearest to 0 if 0 is not between low and high,
    with `alpha` at the farthest value, and at least `SIGNED` · `alpha` for low < 0 < high. "even": `alpha` everywhere.
    power: exponent of the distance's share. Below 1, small values become more opaque.
    """
    opaque = colormap(cmap)
    table = opaque(np.linspace(0, 1, 256))
    table[:, 3] = alpha
    if opacity == "value":
        clear = np.clip(0, low, high)
        distance = np.abs(np.linspace(low, high, 256) - clear)
        share = (distance / (distance.max() or 1)) ** power
        lowest = SIGNED if low < 0 < high else 0
        table[:, 3] = alpha * np.maximum(share, lowest)
    return mpl.colors.ListedColormap(table, opaque.name).with_extremes(bad=MISSING)


def stretching(low: float, high: float) -> float:
    """Factor by which differences look larger between low and high than on a scale from 0 or symmetric about 0.

    >>> vitlens.plot.scales.stretching(0.9, 1.0).__round__(3), vitlens.plot.scales.stretching(-2, 2)
    (10.0, 1.0)
    """
    farthest = max(abs(low), abs(high))
    if not high > low:
        return 1.0
    if low < 0 < high:
        return float(2 * farthest / (high - low))
    return float(farthest / (high - low))


def peak(values: np.ndarray) -> float | None:
    """Factor from the mean of a map to its largest value. None for a map with negative values, or of zeros."""
    finite = values[np.isfinite(values)].astype(float)
    if not finite.size or finite.min() < 0 or not finite.max() > 0:
        return None
    return float(finite.max() / finite.mean())


def uniform_words(bound: float = UNIFORM) -> str:
    """Words for a map that is drawn as uniform."""
    return f"uniform within {bound:.0%}"


def stretched_words(low: float, high: float) -> str:
    """Words for a stretched scale, or ""."""
    factor = stretching(low, high)
    return f"stretched {number(factor)} times" if factor > 1.001 else ""


def bar_words(values: np.ndarray, low: float, high: float, bound: float = UNIFORM) -> str:
    """Words next to the color bar of a map from low to high: uniform, stretched, or its largest value against its mean.

    "" for a map with negative values that is not stretched.
    """
    finite = values[np.isfinite(values)]
    if finite.size and uniform_value(values, bound) is not None:
        return uniform_words(bound) if finite.any() else "0 everywhere"
    factor = peak(values)
    words = stretched_words(low, high)
    if not words and factor is not None:
        words = f"largest {number(factor)} × mean"
    return words


def range_words(values: np.ndarray, bound: float = UNIFORM) -> str:
    """Words below a map without a color bar: the end of its scale, and its largest value against its mean.

    >>> vitlens.plot.scales.range_words(np.array([[0.0, 0.5, 1.0]]))
    'max 1, 2\xa0×\xa0mean'
    """
    scale = colors(values)
    if scale["vmin"] < 0:
        ends = f"±{number(scale['vmax'])}"
    else:
        ends = f"max {number(np.nanmax(values, initial=0, where=np.isfinite(values)))}"
    if not np.any(values[np.isfinite(values)]):
        return ends
    if uniform_value(values, bound) is not None:
        return f"{ends}, {uniform_words(bound)}"
    factor = peak(values)
    return ends if factor is None else f"{ends}, {number(factor)}\u00a0×\u00a0mean"
