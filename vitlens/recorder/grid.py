"""Geometry of the tokens: which are patches, where they lie in the image, and which ones the head reads.

Shapes: T tokens = R prefix (class, distillation, register) + P patches (P = rows·cols). Distances in input pixels.
Everything comes from the model's metadata and the size of its input, never from the square root of a token count.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenGrid:
    """Geometry of a token sequence.

    >>> attn.grid, attn.grid.index(3, 4)
    (TokenGrid(rows=14, cols=14, patch=(16, 16), prefix=1, image=(224, 224)), 47)

    rows, cols: the patch grid. patch: (height, width) in input pixels from one token to the next, for a hybrid the
    patch size times the reduction of its backbone. prefix: R, the tokens before the first patch. image: (height,
    width) of the input in pixels. readout: weights with which the head reads the tokens. They sum to 1 and have shape
    (T,), or (B, T) after attention pooling. None for max pooling and other heads that read no weighted mean.

    >>> vitlens.TokenGrid(rows=14, cols=14, patch=(16, 16)).index(0, 0)  # after the class token
    1
    """

    rows: int
    cols: int
    patch: tuple[int, int]
    prefix: int = 1
    image: tuple[int, int] | None = None
    readout: Tensor | None = field(default=None, compare=False, repr=False)

    def __post_init__(self):
        if self.image is None:
            object.__setattr__(self, "image", self._extent())

    def _extent(self) -> tuple[int, int]:
        """(height, width) in pixels of all patches together."""
        return self.rows * self.patch[0], self.cols * self.patch[1]

    @property
    def patches(self) -> int:
        """P, the number of patches."""
        return self.rows * self.cols

    @property
    def tokens(self) -> int:
        """T = R + P, the length of the sequence."""
        return self.prefix + self.patches

    @property
    def cut(self) -> tuple[int, int]:
        """(height, width) in pixels of the margins at the bottom and right that belong to no patch."""
        height, width = self._extent()
        return max(0, self.image[0] - height), max(0, self.image[1] - width)

    @property
    def padded(self) -> tuple[int, int]:
        """(height, width) in pixels by which the last patches extend beyond the image."""
        height, width = self._extent()
        return max(0, height - self.image[0]), max(0, width - self.image[1])

    def index(self, row: int, col: int) -> int:
        """Position in the sequence of the patch at (row, col), both counted from 0. Raises IndexError outside."""
        if not (0 <= row < self.rows and 0 <= col < self.cols):
            raise IndexError(
                f"Patch (row {row}, column {col}) lies outside the {self.rows} × {self.cols} grid."
            )
        return self.prefix + row * self.cols + col

    def position(self, query: tuple[int, int] | int) -> int:
        """Position in the sequence of a patch (row, column), or of a token given by its position. Raises IndexError
        outside."""
        if hasattr(query, "tolist"):  # an array or a tensor
            query = query.tolist()
        if isinstance(query, tuple | list):
            return self.index(*[operator.index(number) for number in query])
        if not 0 <= operator.index(query) < self.tokens:
            raise IndexError(
                f"Token {query} lies outside the sequence of {self.tokens} tokens, counted from 0."
            )
        return query

    def centers(self, *, dtype=torch.float32, device=None) -> Tensor:
        """(P, 2) centers of the patches in input pixels, as (y, x), in the order of the sequence."""
        height, width = self.patch
        y = (torch.arange(self.rows, dtype=dtype, device=device) + 0.5) * height
        x = (torch.arange(self.cols, dtype=dtype, device=device) + 0.5) * width
        return torch.cartesian_prod(y, x)

    def pixel_patches(self, device=None) -> Tensor:
        """(height, width) index row·cols + col of the patch of each input pixel, the nearest patch in a margin."""
        height, width = self.image
        rows = torch.arange(height, device=device) // self.patch[0]
        cols = torch.arange(width, device=device) // self.patch[1]
        rows = rows.clamp(max=self.rows - 1)
        cols = cols.clamp(max=self.cols - 1)
        return rows[:, None] * self.cols + cols

    def distances(
        self, start: int = 0, stop: int | None = None, *, dtype=torch.float32, device=None
    ) -> Tensor:
        """(stop − start, P) Euclidean distances in input pixels from patches start…stop to all patches (paper, D.7)."""
        y, x = self.centers(dtype=dtype, device=device).T
        dy = y[start:stop, None] - y
        dx = x[start:stop, None] - x
        return torch.sqrt(dy.square_() + dx.square_())

    def uniform_distance(self, renormalize: bool = False) -> float:
        """Mean distance of uniform attention in pixels, to compare `attention.mean_distance` with.

        Attention to prefix tokens counts as distance 0, or is left out if renormalized. In closed form: a step of
        (dy, dx) rows and columns joins (rows − dy)·(cols − dx) pairs in each direction.
        """
        height, width = self.patch
        dy = torch.arange(self.rows, dtype=torch.float64, device="cpu")
        dx = torch.arange(self.cols, dtype=torch.float64, device="cpu")
        pairs_y = 2 * (self.rows - dy)
        pairs_y[0] = self.rows  # a step of 0 has one direction
        pairs_x = 2 * (self.cols - dx)
        pairs_x[0] = self.cols
        distance = torch.hypot((dy * height)[:, None], dx * width)
        total = (distance * pairs_y[:, None] * pairs_x).sum().item()
        attended = self.patches if renormalize else self.tokens
        return total / (self.patches * attended)

    def mean_readout(self, tokens: slice) -> Tensor:
        """(T,) read-out of a head that reads the mean of some tokens."""
        row = torch.zeros(self.tokens, dtype=torch.float32, device="cpu")
        row[tokens] = 1.0 / len(row[tokens])
        return row

    def border(self) -> Tensor:
        """(P,) bool, True for patches of the outermost rows and columns."""
        outermost = torch.ones(self.rows, self.cols, dtype=torch.bool)
        outermost[1:-1, 1:-1] = False
        return outermost.flatten()

    def image_map(self, values: Tensor) -> Tensor:
        """(…, rows, cols) values of the patches, from (…, T) values of all tokens."""
        return values[..., self.prefix :].unflatten(-1, (self.rows, self.cols))
