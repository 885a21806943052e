"""Panels of a page: images divided into cells, with a map over them in the colors of a scale."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vitlens.plot.scales import UNIFORM, colors, stretching, translucent, uniform_value

MAPS = ("viridis", "magma", "cividis", "gray", "RdBu_r")
"""Color maps of the menu."""


@dataclass(frozen=True)
class Scale:
    """A Matplotlib color map from low to high. uniform: value that is drawn in all cells of a uniform map, or None."""

    cmap: str
    low: float
    high: float
    uniform: float | None = None

    @property
    def stretching(self) -> float:
        """Factor by which differences look larger than on a scale from 0."""
        return stretching(self.low, self.high)

    def drawn(self, values: np.ndarray) -> np.ndarray:
        """The values of a map (rows, cols) as they are drawn."""
        return values if self.uniform is None else np.full_like(values, self.uniform)

    def table(self, alpha: float = 1.0, opacity: str = "even") -> np.ndarray:
        """RGBA colors (256, 4) uint8 from low to high, with the opacity of `plot.overlay`."""
        colormap = translucent(self.cmap, self.low, self.high, alpha, opacity)
        return (colormap(np.arange(256)) * 255).round().astype(np.uint8)


def scale_of(
    values: np.ndarray,
    *,
    cmap: str = "",
    stretch: bool = False,
    limit: float | None = None,
    bound: float = UNIFORM,
) -> Scale:
    """Color scale of a map from 0 to its largest value, or ±largest in red and blue if some values are negative.

    limit: end of a signed scale, such as 1 for cosines. stretch: from the smallest to the largest value instead, unless
    the map is uniform. bound: largest departure of a uniform map (`vitlens.plot.scales`). cmap: another color map.
    """
    mean = uniform_value(values, bound)
    if stretch and mean is None:
        return Scale(cmap or "viridis", float(values.min()), float(values.max()))
    signed = None if limit is None else True
    chosen = colors(values, cmap or None, signed=signed)
    high = float(limit or chosen["vmax"])
    low = -high if chosen["vmin"] < 0 else 0.0
    return Scale(chosen["cmap"].name, low, high, mean)


@dataclass(frozen=True)
class Panel:
    """An image divided into cells, with a map over it.

    picture: name of the image in `pictures`. cell: (height, width) as shares of the image. words: exact caption. plain:
    caption in plain words, or "". selected: (row, col)
    or None. picks: noun for the target of a click, or "". values: (rows, cols) or (rows, cols, 3). scale: color scale,
    or None for RGB values and panels without a map. strength: largest opacity of the map. opacity: "value", growing
    with the value, or "even". ends: labels of the color scale. tokens: tiles that choose a token outside the image as
    the query. even: weight of each cell if attention were even, or None. legend: unit and rule of the color scale.
    sinks: cells to mark. hides: True to leave the map out there.
    """

    name: str
    title: str
    picture: str
    rows: int
    cols: int
    cell: tuple[float, float]
    words: str = ""
    plain: str = ""
    selected: tuple[int, int] | None = None
    picks: str = ""
    values: np.ndarray | None = None
    scale: Scale | None = None
    unit: str = ""
    strength: float = 0.0
    opacity: str = "even"
    smooth: bool = False
    lines: bool = False
    ends: tuple[str, str] | None = None
    tokens: tuple[dict, ...] = ()
    legend: str = ""
    even: float | None = None
    sinks: tuple[tuple[int, int], ...] = ()
    hides: bool = False

    def message(self) -> dict:
        """The panel in the format of the front end, with arrays as bytes."""
        values, scale = b"", None
        if self.values is not None:
            values = np.ascontiguousarray(self.values, "<f4").tobytes()
        if self.scale:
            scale = {
                "low": self.scale.low,
                "high": self.scale.high,
                "uniform": self.scale.uniform,
                "colors": self.scale.table(self.strength, self.opacity).tobytes(),
            }
        return vars(self) | {"values": values, "scale": scale}
