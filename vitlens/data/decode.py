"""From the content of a sample to pixels: decode, fit to a square, cut at random.

An image is uint8 (3, H, W), RGB: upright, opaque and of 8 bits as `load_image` makes it, so that a model learns from
what is shown of it.
"""

from __future__ import annotations

import io
import math
from contextlib import suppress

import numpy as np
import torch
import torch.nn.functional as F
import torchvision.io
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torchvision.transforms.functional import resize

from vitlens.data.samples import Samples
from vitlens.images import MAX_ELONGATION, rgb

JPEG = b"\xff\xd8\xff"
TRIES = 10  # of a random box that fits into the image, as in torchvision


def decoded(samples: Samples, i: int) -> Tensor | str:
    """Sample `i` as an image, or its name and what is wrong with it, such as sides beyond `MAX_ELONGATION`."""
    try:
        content = samples.content(i)
        if isinstance(content, Tensor):
            return content
        image = _from_pillow(content) if isinstance(content, Image.Image) else _from_bytes(content)
    except UnidentifiedImageError:
        return f"{samples.name(i)} (no image of a known format)"
    except Exception as problem:  # a decoder may raise anything on untrusted bytes
        return f"{samples.name(i)} ({type(problem).__name__}: {problem})"
    _, h, w = image.shape
    strip = max(h, w) > MAX_ELONGATION * min(h, w)
    return f"{samples.name(i)} (a strip of {w} × {h} pixels)" if strip else image


def _from_bytes(encoded: bytes) -> Tensor:
    if encoded.startswith(JPEG):
        with suppress(RuntimeError, ValueError, AttributeError):  # AttributeError: a torchvision without decoders
            return torchvision.io.decode_image(
                torch.frombuffer(bytearray(encoded), dtype=torch.uint8),
                mode=torchvision.io.ImageReadMode.RGB,
                apply_exif_orientation=True,
            )
    # Pillow knows more formats, and has the last word on what is damaged.
    with Image.open(io.BytesIO(encoded)) as picture:
        return _from_pillow(picture)


def _from_pillow(picture: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(rgb(picture))).permute(2, 0, 1).contiguous()


def shaped(image: Tensor, side: int, squash: bool) -> Tensor:
    """The image as `side` × `side` pixels: squashed, or its short side resized and the center cut out.

    torchvision's `center_crop` rounds the corner of odd margins the other way, so the cut is made here.
    """
    _, h, w = image.shape
    if (h, w) == (side, side):
        return image
    if squash:
        return resize(image, [side, side])
    scale = side / min(h, w)
    image = resize(image, [max(side, round(h * scale)), max(side, round(w * scale))])
    top, left = (image.shape[1] - side) // 2, (image.shape[2] - side) // 2
    return image[:, top : top + side, left : left + side]


def random_box(
    h: int, w: int, scale: tuple[float, float], ratio: tuple[float, float], rng: torch.Generator
) -> tuple[int, int, int, int]:
    """Top, left, height and width in pixels of a random crop of an `h` × `w` image (Szegedy et al. 2015).

    Its share of the area is uniform in `scale`, its width by height log-uniform in `ratio`. If no draw fits, it is
    the largest centered box whose ratio is in range. torchvision's `RandomResizedCrop` draws from the global generator.
    """
    for area, log_ratio, y, x in torch.rand(TRIES, 4, generator=rng, dtype=torch.float64).tolist():
        area = h * w * (scale[0] + (scale[1] - scale[0]) * area)
        wanted = ratio[0] * (ratio[1] / ratio[0]) ** log_ratio
        height, width = round(math.sqrt(area / wanted)), round(math.sqrt(area * wanted))
        if 0 < height <= h and 0 < width <= w:
            return int(y * (h - height + 1)), int(x * (w - width + 1)), height, width
    wanted = min(max(w / h, ratio[0]), ratio[1])
    height, width = min(h, max(1, round(w / wanted))), min(w, max(1, round(h * wanted)))
    return (h - height) // 2, (w - width) // 2, height, width


def cut(image: Tensor, box: tuple[int, int, int, int], side: int) -> Tensor:
    """The pixels in `box` (top, left, height, width), resized to `side` × `side` (bilinear, antialiased)."""
    top, left, height, width = box
    # In integers, seven times as fast as in floats and within one level of them.
    return F.interpolate(image[None, :, top : top + height, left : left + width], (side, side), mode="bilinear",
                         antialias=True)[0]  # fmt: skip
