"""The one place that knows about tokens: which are patches, where they lie, and which ones the model reads.

Shapes: T tokens = R prefix (class, distillation, register) + P patches (P = rows·cols); distances in input pixels.
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

    rows, cols: the patch grid. patch: (height, width) in input pixels from one token to the next, for a hybrid the
    patch size times the reduction of its backbone. prefix: R, the tokens before the first patch. image: (height,
    width) of the input in pixels. readout: what the head reads, a probability row over the tokens, (T,) or (B, T)
    where it depends on the image (attention pooling); None where no such row exists (max pooling and the like).
    """

    rows: int
    cols: int
    patch: tuple[int, int]
    prefix: int = 1
    image: tuple[int, int] | None = None
    readout: Tensor | None = field(default=None, compare=False, repr=False)

    def __post_init__(self):
        if self.image is None:
            object.__setattr__(self, "image", (self.rows * self.patch[0], self.cols * self.patch[1]))

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
        """Pixels at the bottom and at the right that no patch sees, as the patch size does not divide the image."""
        return max(0, self.image[0] - self.rows * self.patch[0]), max(0, self.image[1] - self.cols * self.patch[1])

    @property
    def padded(self) -> tuple[int, int]:
        """Pixels by which the last patches reach beyond the image, at the bottom and at the right."""
        return max(0, self.rows * self.patch[0] - self.image[0]), max(0, self.cols * self.patch[1] - self.image[1])

    def index(self, row: int, col: int) -> int:
        """Position in the sequence of the patch at (row, col), both counted from 0. Raises IndexError outside."""
        if not (0 <= row < self.rows and 0 <= col < self.cols):
            raise IndexError(f"Patch (row {row}, column {col}) lies outside the {self.rows} × {self.cols} grid.")
        return self.prefix + row * self.cols + col

    def position(self, query: tuple[int, int] | int) -> int:
        """Position in the sequence of a patch (row, column), or of a token given by its position. Raises IndexError
        outside."""
        query = query.tolist() if hasattr(query, "tolist") else query  # NumPy's and torch's
        if isinstance(query, tuple | list):
            return self.index(*map(operator.index, query))
        if not 0 <= operator.index(query) < self.tokens:
            raise IndexError(f"Token {query} lies outside the sequence of {self.tokens} tokens, counted from 0.")
        return query

    def centers(self, *, dtype=torch.float32, device=None) -> Tensor:
        """(P, 2) centers of the patches in input pixels, as (y, x), in the order of the sequence."""
        y = (torch.arange(self.rows, dtype=dtype, device=device) + 0.5) * self.patch[0]
        x = (torch.arange(self.cols, dtype=dtype, device=device) + 0.5) * self.patch[1]
        return torch.cartesian_prod(y, x)

    def pixel_patches(self, device=None) -> Tensor:
        """(height, width) number row·cols + col of the patch that each input pixel lies in, or else is next to."""
        y = (torch.arange(self.image[0], device=device) // self.patch[0]).clamp(max=self.rows - 1)
        x = (torch.arange(self.image[1], device=device) // self.patch[1]).clamp(max=self.cols - 1)
        return y[:, None] * self.cols + x

    def distances(self, start: int = 0, stop: int | None = None, *, dtype=torch.float32, device=None) -> Tensor:
        """(stop − start, P) Euclidean distances in input pixels from patches start…stop to all patches (paper, D.7)."""
        y, x = self.centers(dtype=dtype, device=device).T
        return torch.sqrt((y[start:stop, None] - y).square_() + (x[start:stop, None] - x).square_())

    def uniform_distance(self, renormalize: bool = False) -> float:
        """Mean distance of attention spread evenly over all tokens, to compare `attention.mean_distance` with.

        Attention to prefix tokens counts as distance 0, or not at all if renormalized. In closed form: a step of
        (dy, dx) rows and columns joins (rows − dy)·(cols − dx) pairs in each direction.
        """
        dy, dx = (torch.arange(n, dtype=torch.float64, device="cpu") for n in (self.rows, self.cols))
        pairs_y, pairs_x = 2 * (self.rows - dy), 2 * (self.cols - dx)
        pairs_y[0], pairs_x[0] = self.rows, self.cols
        distance = torch.hypot((dy * self.patch[0])[:, None], dx * self.patch[1])
        attended = self.patches if renormalize else self.tokens
        return (distance * pairs_y[:, None] * pairs_x).sum().item() / (self.patches * attended)

    def border(self) -> Tensor:
        """(P,) bool, the patches of the outermost rows and columns."""
        outermost = torch.ones(self.rows, self.cols, dtype=torch.bool)
        outermost[1:-1, 1:-1] = False
        return outermost.flatten()

    def image_map(self, values: Tensor) -> Tensor:
        """(…, rows, cols) the values of the patches, from (…, T) values of all tokens."""
        return values[..., self.prefix :].unflatten(-1, (self.rows, self.cols))
