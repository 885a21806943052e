"""The images of an audit as its page shows them: plain, with the map, and with what covers the patches of a group.

The page draws a covered image from the plain one and a blank: one color, a blurred image or another image, of which
only the patches of the group are seen. A blank is stored once for all groups of an image. Shapes: W ways to cover.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image
from torch import Tensor, nn

from vitlens import models
from vitlens.evidence import blanks_of, predicted_map
from vitlens.recorder.supported import token_grid

SIDE = 224
"""Longest side of a stored image in pixels."""
QUALITY = 82
"""JPEG quality of a stored image."""
SMALL = 112
"""Longest side of an image whose color is stored in blocks of 8 pixels, as its light, and not of 16."""
BLURRED = 4
"""Pixels of a stored blurred image for each patch along a side. Its blur is as wide as a patch."""
LEVELS = 255
"""Levels of a stored map."""


@dataclass(frozen=True)
class Pictures:
    """Images of an audit by number. inputs: of `vitlens.evidence.inputs_of`. method: of the map."""

    model: nn.Module
    inputs: Callable[[int], Tensor | None]
    method: str

    def pixels(self, number: int) -> np.ndarray | None:
        """Pixels (H, W, 3) uint8 of an image as the model gets it, or None for an unreadable one."""
        image = self.inputs(number)
        if image is None:
            return None
        return np.asarray(models.restore(self.model, image[None]))[0]

    def blanks(self, number: int) -> dict:
        """Map of the predicted class as bytes from 0 to `LEVELS`, border color, and JPEG file of the blurred image.

        Empty for an image that cannot be read any more.
        """
        image = self.inputs(number)
        if image is None:
            return {}
        grid = token_grid(self.model, tuple(image.shape[-2:]))
        values = predicted_map(self.model, image, self.method).clamp_min(0).flatten()
        levels = LEVELS * values / values.max().clamp_min(1e-30)
        blanks = blanks_of(image, image, grid)
        filled, blurred, _ = np.asarray(models.restore(self.model, blanks))
        size = (BLURRED * grid.cols, BLURRED * grid.rows)
        return {
            "map": levels.round().byte().numpy().tobytes(),
            "color": "#" + bytes(filled[0, 0].tolist()).hex(),
            "blurred": jpeg(blurred, size),
        }


def jpeg(pixels: np.ndarray, size: tuple[int, int] = (SIDE, SIDE)) -> bytes:
    """JPEG file of an image (H, W, 3) uint8, at most `size` (width, height) large.

    Small images have small patches, whose color would be seen around them in blocks of 16 pixels.
    """
    image = Image.fromarray(np.ascontiguousarray(pixels))
    subsampling = "4:4:4" if max(image.size) <= SMALL else "4:2:0"
    image.thumbnail(size, Image.Resampling.LANCZOS)
    file = io.BytesIO()
    image.save(file, format="jpeg", quality=QUALITY, subsampling=subsampling, optimize=True)
    return file.getvalue()
