"""Augmentation of a whole batch at once on its device, from uint8 images to normalized floats and targets.

Every random choice comes from `draws(device, seed, epoch, step)`: the same arguments give the same batch on the same
device, augmented at once or in parts. No global state is read or written. timm's transforms and mixup draw from global
generators, image by image on the CPU. Here 1,024 images take an accelerator about a millisecond. `draw_numbers` draws
all random numbers of a batch first. `transform_batch` is then a function of its arguments, which can be compiled.

Shapes: B batch, C = 3 channels, H × W pixels. Floats lie in [0, 1] until they are normalized.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitlens.fields import check_settings, setting

SHARE = "between 0 and 1"


@dataclass(frozen=True)
class Augment:
    """Settings of the augmentation of a training batch. The defaults change nothing."""

    flip: float = setting(
        0.0, "Probability of a horizontal flip. Use 0 if left and right carry meaning.", SHARE
    )
    pad: int = setting(
        0,
        "Width of a reflected border in pixels. The window is cut from it at random.",
        "0 or more",
    )
    scale: tuple[float, float] = setting(
        (1.0, 1.0),
        """Range of the share of the image's area that a random resized
        crop shows (Szegedy et al. 2015).""",
        "above 0",
    )
    ratio: tuple[float, float] = setting(
        (1.0, 1.0),
        """Range of that crop's aspect ratio, width by height, drawn on a
        logarithmic scale.""",
        "above 0",
    )
    rotate: float = setting(0.0, "Largest rotation in degrees, either way.", "0 or more")
    jitter: float = setting(
        0.0,
        "Brightness, contrast and saturation are each multiplied by a factor from 1 ± jitter.",
        SHARE,
    )
    policy: float = setting(
        0.0,
        """Probability of one of grayscale, solarize and posterize. This is DeiT III's
        3-Augment with posterize instead of blur, which would leave few details at 64 pixels.""",
        SHARE,
    )
    erase: float = setting(
        0.0,
        """Probability of filling a rectangle with the mean color (Zhong et al. 2017). It covers
        2 to 33 % of the area, or less if the border cuts it.""",
        SHARE,
    )
    cutmix: float = setting(
        0.0,
        "Probability per sample of pasting a rectangle of another one (Yun et al. 2019).",
        SHARE,
    )
    mixup: float = setting(
        0.0,
        """Probability per sample of blending with another one (Zhang et al. 2017). λ is
        uniform, Beta(1, 1), as in CutMix.""",
        SHARE,
    )

    def __post_init__(self):
        check_settings(self, "augment.")
        for name in ("scale", "ratio"):
            limits = getattr(self, name)
            smallest, largest = limits
            if smallest > largest:
                raise ValueError(f"augment.{name} must be (smallest, largest), got {limits}.")
        if self.cutmix + self.mixup > 1:
            raise ValueError(
                f"augment.cutmix {self.cutmix} and augment.mixup {self.mixup} are probabilities of one choice and add "
                "up to more than 1. Lower one of them."
            )


def augment_batch(
    images: Tensor,
    labels: Tensor,
    augment: Augment,
    rng: Draws,
    *,
    size: int | None = None,
    mean: Sequence[float],
    std: Sequence[float],
    mix: bool = True,
) -> tuple[Tensor, Targets]:
    """A training batch from uint8 `images` (B, 3, H, W) and `labels` (B,): floats (B, 3, size, size) and `Targets`.

    Larger images are cropped at random. Without `size` the output has the size of the input. `mix=False` switches off
    mixup and cutmix, and leaves all other random choices unchanged.
    """
    numbers = draw_numbers(images.shape, augment, rng, size=size, mix=mix)
    return transform_batch(images, labels, numbers, augment, size=size, mean=mean, std=std)


def draw_numbers(
    shape: Sequence[int], augment: Augment, rng: Draws, *, size: int | None = None, mix: bool = True
) -> dict[str, Tensor]:
    """Uniform random numbers (n, B) for a batch of this shape, by the name of each transformation that takes place."""
    samples, _, *stored = shape
    resamples = _resamples(augment)
    keeps_place = not augment.pad and (resamples or not size or stored == [size, size])
    counts = {
        "window": 0 if keeps_place and not augment.flip else 3,
        "crop": 5 if resamples else 0,
        "jitter": 3 if augment.jitter else 0,
        "policy": 1 if augment.policy else 0,
        "erase": 5 if augment.erase else 0,
        "mix": 4 if mix and (augment.cutmix or augment.mixup) else 0,
    }
    return {name: rng.uniform(n, samples) for name, n in counts.items() if n}


def _resamples(augment: Augment) -> bool:
    """True if images are cropped or rotated by interpolation."""
    unchanged = (1.0, 1.0)
    crops = augment.scale != unchanged or augment.ratio != unchanged
    return crops or augment.rotate > 0


def transform_batch(
    images: Tensor,
    labels: Tensor,
    numbers: dict[str, Tensor],
    augment: Augment,
    *,
    size: int | None = None,
    mean: Sequence[float],
    std: Sequence[float],
) -> tuple[Tensor, Targets]:
    """`augment_batch` with the `numbers` of `draw_numbers`."""
    stored_shape = images.shape[2:]
    shape = (size, size) if size else stored_shape
    window = stored_shape if "crop" in numbers else shape
    x = images
    if "window" in numbers:
        x = shift_and_flip(x, window, augment.pad, augment.flip, numbers["window"])
    x = x.float()
    x = x.div_(255)
    if "crop" in numbers:
        x = random_resized_crop(
            x, shape, augment.scale, augment.ratio, augment.rotate, numbers["crop"]
        )
    if "jitter" in numbers:
        x = color_jitter(x, augment.jitter, numbers["jitter"])
    if "policy" in numbers:
        x = gray_solarize_posterize(x, augment.policy, numbers["policy"])
    x = normalize(x, mean, std)
    if "erase" in numbers:
        x = erase_rectangles(x, augment.erase, numbers["erase"])
    if "mix" in numbers:
        return mix_neighbors(x, labels, augment.cutmix, augment.mixup, numbers["mix"])
    # A copy, because the same tensor twice would cause a second compilation.
    other_labels = labels.clone()
    ones = torch.ones(len(x), device=x.device)
    targets = Targets(labels, other_labels, ones)
    return x, targets


def normalize(x: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """(x − mean) / std by channel. uint8 is first scaled to [0, 1]."""
    if x.dtype == torch.uint8:
        x = x.float() / 255
    channels = []
    # With Python numbers, because making a tensor of them would synchronize the device at every batch.
    for channel, m, s in zip(x.unbind(1), mean, std, strict=True):
        centered = channel - m
        channels.append(centered.div_(s))
    return torch.stack(channels, dim=1)


# Random numbers


def seed_of(*key: int) -> int:
    """Seed from several non-negative numbers, usually (seed, epoch, step)."""
    state = np.random.SeedSequence(key).generate_state(1, np.uint64)
    return int(state[0]) >> 1  # torch's seeds are signed


def generator(device: torch.device | str, *key: int) -> torch.Generator:
    """A generator on `device` whose seed depends on `key` alone."""
    return torch.Generator(device).manual_seed(seed_of(*key))


@dataclass(frozen=True)
class Draws:
    """Uniform random numbers for part `part` of `parts` equal parts of a batch.

    They are drawn for the whole batch and then divided, so a batch augmented in parts, even by several processes,
    equals the batch augmented at once.
    """

    generator: torch.Generator
    part: int = 0
    parts: int = 1

    def uniform(self, n: int, samples: int) -> Tensor:
        """(n, samples) numbers in [0, 1): n for each sample of this part."""
        device = self.generator.device
        total = samples * self.parts
        whole = torch.rand(n, total, generator=self.generator, device=device)
        first = self.part * samples
        end = first + samples
        return whole[:, first:end]


def draws(device: torch.device | str, *key: int, part: int = 0, parts: int = 1) -> Draws:
    """`Draws` on `device` whose seed depends on `key` alone."""
    return Draws(generator(device, *key), part, parts)


# Geometry


def shift_and_flip(
    images: Tensor, size: Sequence[int], pad: int, flip: float, numbers: Tensor
) -> Tensor:
    """Windows of `size` (rows, columns), cut at random positions and mirrored with probability `flip`.

    They extend up to `pad` reflected pixels beyond the image. numbers: (3, B) in [0, 1), as in the functions below.
    Raises `ValueError` for windows larger than the image.
    """
    b, _, h, w = images.shape
    height, width = size
    if height > h or width > w:
        raise ValueError(
            f"A window of {height}×{width} pixels cannot be cut from an image of {h}×{w}."
        )
    check_pad(pad, h, w)
    dy, dx, mirror = numbers[:, :, None]
    mirrors = mirror < flip
    if not pad and (h, w) == (height, width):
        return torch.where(mirrors[..., None, None], images.flip(3), images)
    rows = _window(dy, height, h, pad)
    columns = _window(dx, width, w, pad)
    columns = torch.where(mirrors, columns.flip(1), columns)
    sample = torch.arange(b, device=images.device)
    sample = sample[:, None, None]
    rows = rows[:, :, None]
    columns = columns[:, None, :]
    windows = images[sample, :, rows, columns]
    # The channel slice between advanced indices moves C last: (B, H, W, C).
    return windows.permute(0, 3, 1, 2)


def check_pad(pad: int, h: int, w: int) -> None:
    """Raise `ValueError` if an image of h×w pixels is too small for a reflected border of `pad` pixels."""
    shorter_side = min(h, w)
    if pad >= shorter_side:
        reach = shorter_side - 1
        raise ValueError(
            f"augment.pad is {pad}, but reflection reaches {reach} pixels into an image of {h}×{w}."
        )


def _window(position: Tensor, size: int, n: int, pad: int) -> Tensor:
    """Indices (B, size) of consecutive pixels of n, reflected beyond both ends by up to `pad` pixels.

    position: (B, 1) random numbers, 0 for the first possible window and almost 1 for the last.
    """
    positions = n + 2 * pad - size + 1
    first = (position * positions).long() - pad
    index = first + torch.arange(size, device=position.device)
    index = index.abs()  # reflected at the first pixel
    last = n - 1
    reflected = 2 * last - index
    return torch.where(index > last, reflected, index)


def random_resized_crop(
    x: Tensor,
    size: Sequence[int],
    scale: tuple[float, float],
    ratio: tuple[float, float],
    rotate: float,
    numbers: Tensor,
) -> Tensor:
    """Random resized crop and rotation in one bilinear resampling to `size` (rows, columns).

    In the coordinates of `affine_grid` an image spans [−1, 1]. A crop of width w and height h (shares of the image)
    at center (cx, cy) reads position (cx + w·u, cy + h·v) for the output position (u, v).
    """
    area, log_ratio, angle, cx, cy = numbers
    smallest, largest = scale
    area = smallest + (largest - smallest) * area
    lowest = math.log(ratio[0])
    highest = math.log(ratio[1])
    log_ratio = lowest + (highest - lowest) * log_ratio

    side = area.sqrt()
    stretch = (log_ratio / 2).exp()
    shrink = (-log_ratio / 2).exp()
    # A crop wider than the image is cut to it, so a scale of 1 shows the whole image.
    limit = max(1.0, math.sqrt(largest))
    w = (side * stretch).clamp(max=limit)
    h = (side * shrink).clamp(max=limit)
    cx = (2 * cx - 1) * (1 - w).abs()
    cy = (2 * cy - 1) * (1 - h).abs()
    angle = (2 * angle - 1) * math.radians(rotate)
    cosine = angle.cos()
    sine = angle.sin()

    # The grid of F.affine_grid by rows and columns, because its matrix product per pixel takes longer than sampling.
    center = _grid_vectors(cx, cy)
    across = _grid_vectors(w * cosine, w * sine)
    down = _grid_vectors(-h * sine, h * cosine)
    rows, columns = size
    u = _pixel_centers(columns, x.device)
    v = _pixel_centers(rows, x.device)
    u = u[None, None, :, None]
    v = v[None, :, None, None]
    grid = down * v + (across * u + center)  # (B, rows, columns, 2)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="reflection", align_corners=False)


def _grid_vectors(x: Tensor, y: Tensor) -> Tensor:
    """Vectors (B, 1, 1, 2) in the coordinates of a sampling grid from their components (B,)."""
    vectors = torch.stack([x, y], dim=1)
    return vectors[:, None, None]


def _pixel_centers(n: int, device: torch.device) -> Tensor:
    """Centers (n,) of the pixels along a side that spans [−1, 1]."""
    return torch.arange(1 - n, n, 2, device=device) / n


# Color


def color_jitter(x: Tensor, strength: float, numbers: Tensor) -> Tensor:
    """Images with changed brightness, contrast and saturation, clipped to [0, 1] after each, as in torchvision."""
    factors = 1 + strength * (2 * numbers - 1)
    brightness, contrast, saturation = factors[..., None, None, None]
    x = x * brightness
    x = x.clamp_(0, 1)
    mean = gray(x).mean(dim=(1, 2, 3), keepdim=True)
    x = _blend_in_place(x, mean, contrast)
    return _blend_in_place(x, gray(x), saturation)


def _blend_in_place(x: Tensor, other: Tensor, weight: Tensor) -> Tensor:
    """`x` with this weight and `other` with the rest, clipped to [0, 1] and written into `x`."""
    rest = other * (1 - weight)
    x.mul_(weight)
    x.add_(rest)
    return x.clamp_(0, 1)


def gray(x: Tensor) -> Tensor:
    """(B, 1, H, W) luma of ITU-R BT.601, as in Pillow and torchvision."""
    red = x[:, 0:1]
    green = x[:, 1:2]
    blue = x[:, 2:3]
    return 0.299 * red + 0.587 * green + 0.114 * blue


def gray_solarize_posterize(x: Tensor, probability: float, numbers: Tensor) -> Tensor:
    """Images after one of grayscale, inversion of values above ½, and 3 bits per channel, with `probability`."""
    choice = numbers[0, :, None, None, None]
    third = probability / 3
    two_thirds = probability * 2 / 3
    posterizes = (choice >= two_thirds) & (choice < probability)
    solarizes = (choice >= third) & (choice < two_thirds)
    grays = choice < third
    x = torch.where(posterizes, posterize(x), x)
    x = torch.where(solarizes, solarize(x), x)
    return torch.where(grays, gray(x), x)


def solarize(x: Tensor) -> Tensor:
    """Images with values above ½ inverted."""
    inverted = 1 - x
    return torch.where(x < 0.5, x, inverted)


def posterize(x: Tensor) -> Tensor:
    """Images with the 3 highest of 8 bits."""
    levels = (x * 255 / 32).floor()
    return levels * (32 / 255)


# Erasing and mixing


class Targets(NamedTuple):
    """Soft labels without one-hot rows: class `a` with weight `lam` and class `b` with 1 − `lam`, each (B,)."""

    a: Tensor
    b: Tensor
    lam: Tensor


def erase_rectangles(x: Tensor, probability: float, numbers: Tensor) -> Tensor:
    """Normalized `x` with a rectangle set to 0, the mean color.

    It has 2 to 33 % of the area and an aspect ratio from 0.3 to 3.3, as in the paper, and the border cuts it.
    """
    h, w = x.shape[2:]
    choice, area, log_ratio, cy, cx = numbers
    erases = choice < probability
    area = 0.02 + 0.31 * area
    log_ratio = (2 * log_ratio - 1) * math.log(3.3)
    root = (log_ratio / 2).exp()  # of the aspect ratio
    side = area.sqrt()
    inside = rectangle(cy, cx, side / root, side * root, h, w)
    erased = inside & erases[:, None, None, None]
    return x * ~erased


def rectangle(cy: Tensor, cx: Tensor, height: Tensor, width: Tensor, h: int, w: int) -> Tensor:
    """(B, 1, h, w) booleans: rectangles with center and sides as shares of the image (B,), cut at its border."""
    rows = interval(cy, height, h)
    columns = interval(cx, width, w)
    return rows[:, None, :, None] & columns[:, None, None, :]


def interval(center: Tensor, side: Tensor, n: int) -> Tensor:
    """(B, n) booleans: pixels of n within `side`, a share of n, around `center`."""
    pixel = torch.arange(n, device=center.device)
    half = side / 2
    first = ((center - half) * n).round()
    end = ((center + half) * n).round()
    from_first = pixel >= first[:, None]
    before_end = pixel < end[:, None]
    return from_first & before_end


def mix_neighbors(
    x: Tensor, labels: Tensor, cutmix: float, mixup: float, numbers: Tensor
) -> tuple[Tensor, Targets]:
    """Samples mixed with their neighbors in the batch by cutmix or mixup, with these probabilities.

    Neighbors stay together when a batch is divided into parts of even size. The last sample of an odd batch is not
    mixed. λ is drawn per sample. After cutmix it is the share of pixels that stayed, because the border cuts the box.
    """
    b, _, h, w = x.shape
    kind, lam, cy, cx = numbers
    pastes = kind < cutmix
    mixes = kind < cutmix + mixup
    side = (1 - lam).sqrt()
    box = rectangle(cy, cx, side, side, h, w)
    outside_box = (~box).float()
    blend = torch.where(mixes, lam, torch.ones_like(lam))
    weight = torch.where(pastes[:, None, None, None], outside_box, blend[:, None, None, None])

    neighbor = torch.arange(b, device=x.device) ^ 1
    neighbor = neighbor.clamp(max=b - 1)
    # x·1 + other·0 equals x bit for bit, which lerp does not guarantee.
    images = x * weight
    images = images.addcmul_(x[neighbor], 1 - weight)
    weight_of_image = weight.mean(dim=(1, 2, 3))
    return images, Targets(labels, labels[neighbor], weight_of_image)
