"""The images that a module takes, found from those that arrive at the Vision Transformer inside it.

A module may normalize, resize or reorder images before it runs its Vision Transformer, which declares the input. Test
images are passed to the module, and a hook reads what arrives.

Shapes: B batch, C channels, H height and W width in pixels.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from vitlens.models.classes import module_with_facts
from vitlens.recorder.forward import cast, eager_mode, eval_mode
from vitlens.recorder.hooks import thread_hooks
from vitlens.recorder.interception import tensors_of
from vitlens.recorder.supported import family, inner_transformer, is_known, model_name, unwrap

LEVELS = (
    ("0 … 1", 0.0, 1.0),
    ("0 … 255", 0.0, 1 / 255),
    ("−1 … 1", 0.5, 0.5),
)
"""Usual inputs of modules that normalize images themselves: the range, and its mean and standard deviation."""

_TOLERANCE = 2e-3  # of a standard deviation; one level of 255 is at least 0.015
_COLORS = ((0.2, 0.5, 0.7), (0.6, 0.1, 0.3))


@dataclass(frozen=True)
class Given:
    """Normalization of the images that a module takes, one number per channel, and a sentence if it is not that of the
    Vision Transformer inside, else "". normalizes: the module normalizes images itself."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    note: str = ""
    normalizes: bool = False


class _Arrived(BaseException):
    """Ends a forward once the images have arrived. No module catches it."""


def may_change(model: nn.Module) -> bool:
    """True for a module without an own declaration of its input, and for a model whose forward was changed: both may
    change images before the Vision Transformer sees them."""
    model = unwrap(model)
    if module_with_facts(model, "pretrained_cfg") is not model:
        return True
    if not is_known(model):
        return False
    embedding = family(model).embedding
    for part in model.modules():
        changed = part._forward_pre_hooks or "forward" in vars(part)
        if changed and embedding in set(part.modules()):
            return True
    return False


def given(model: nn.Module, config: dict) -> Given:
    """Normalization of the images that a module takes.

    config: preprocessing of the Vision Transformer inside. Raises ValueError if neither that normalization nor one of
    `LEVELS` arrives as the Vision Transformer takes it.
    """
    outer = unwrap(model)
    channels = config["input_size"][0]
    own = Given(_per_channel(config["mean"], channels), _per_channel(config["std"], channels))
    if not may_change(outer):
        return own
    inner = inner_transformer(outer)
    images = _test_images(config["input_size"])
    expected = _normalize(images, own.mean, own.std)
    batch = cast(inner, expected)
    if batch.is_meta:
        return own
    rounding = 4 * torch.finfo(batch.dtype).eps
    tolerance = max(_TOLERANCE, rounding) * float(expected.abs().max())
    name = type(outer).__name__
    first = None
    reversed_colors = (expected.flip(1), _normalize(images.flip(1), own.mean, own.std))
    reverses = False
    for levels, mean, std in (("", own.mean, own.std), *LEVELS):
        means = _per_channel(mean, channels)
        deviations = _per_channel(std, channels)
        arrived, error = _pass(outer, inner, _normalize(images, means, deviations))
        first = first or (arrived, error)
        notes = []
        if levels:
            notes = [f"{name} normalizes images itself, so they are given to it in {levels}."]
        if _same_pixels(arrived, _reference(inner, expected, arrived), tolerance):
            return Given(means, deviations, " ".join(notes), bool(levels))
        if _same_colors(arrived, expected, tolerance):
            notes.append(f"{name} moves, crops or resizes images before {model_name(inner)}.")
            return Given(means, deviations, " ".join(notes), bool(levels))
        for colors in reversed_colors:
            reverses = reverses or _same_pixels(arrived, colors.double(), tolerance)
    raise ValueError(_refusal(outer, inner, expected, *first, reverses))


def _per_channel(values: float | Sequence[float], channels: int) -> tuple[float, ...]:
    """One number per channel, from one for all or one per channel."""
    numbers = np.broadcast_to(values, channels)
    return tuple(numbers.tolist())


def _refusal(
    outer: nn.Module,
    inner: nn.Module,
    expected: Tensor,
    arrived: Tensor | None,
    error: str,
    reverses: bool,
) -> str:
    """Message for a module whose input is unknown."""
    name = type(outer).__name__
    part = model_name(inner)
    size = tuple(expected.shape[1:])
    if error:
        why = f"it cannot be run on a test image ({error})"
    elif arrived is None:
        why = f"its forward does not run {part}"
    elif reverses:
        why = f"it reverses the order of the channels (RGB to BGR) before {part}"
    elif arrived.shape != expected.shape:
        why = f"images {size} arrive at {part} as {tuple(arrived.shape[1:])} with other colors"
    else:
        low, high = expected.min(), expected.max()
        got_low, got_high = arrived.min(), arrived.max()
        why = (
            f"it changes them, so that values of {low:.2f} to {high:.2f} arrive at {part} as {got_low:.2f} to "
            f"{got_high:.2f}, and images in 0 … 1, 0 … 255 and −1 … 1 do not arrive with the normalization of {part}"
        )
    return (
        f"The images that {name} takes are unknown: {why}. Declare them, such as images in 0 … 1, by "
        f'`model.pretrained_cfg = {{"input_size": {size}, "mean": (0, 0, 0), "std": (1, 1, 1)}}`.'
    )


def _test_images(size: tuple[int, int, int]) -> Tensor:
    """(3, C, H, W) images in 0 … 1: noise, and two uniform colors."""
    channels, height, width = size
    generator = torch.Generator("cpu").manual_seed(0)
    noise = torch.randint(256, (channels, height, width), generator=generator, device="cpu") / 255
    images = [noise]
    for color in _COLORS:
        levels = torch.tensor(color[:channels], device="cpu")
        images.append(levels.view(-1, 1, 1).expand(channels, height, width))
    return torch.stack(images)


def _normalize(images: Tensor, mean: tuple, std: tuple) -> Tensor:
    means = torch.tensor(mean, dtype=torch.float32, device="cpu").view(-1, 1, 1)
    deviations = torch.tensor(std, dtype=torch.float32, device="cpu").view(-1, 1, 1)
    return (images - means) / deviations


def _pass(outer: nn.Module, inner: nn.Module, images: Tensor) -> tuple[Tensor | None, str]:
    """Input of the inner model's embedding, as a float64 tensor or None, and the error of the forward or ""."""
    embedding = family(inner).embedding
    arrived = []

    def stop(module: nn.Module, args: tuple, kwargs: dict) -> None:
        arrived.extend(tensors_of([*args, *kwargs.values()])[:1])
        raise _Arrived

    register = functools.partial(embedding.register_forward_pre_hook, with_kwargs=True)
    batch = cast(inner, images)
    calls = [functools.partial(outer, batch), functools.partial(outer, pixel_values=batch)]
    if hasattr(outer, "get_image_features"):
        calls.append(functools.partial(outer.get_image_features, pixel_values=batch))
    errors = []
    with (
        torch.no_grad(),
        _restored_state(outer),
        eval_mode(outer),
        eager_mode(),
        thread_hooks([(register, stop)]),
        torch._C.DisableTorchFunction(),  # captures of this thread must not see these calls
    ):
        for call in calls:
            try:
                call()
            except _Arrived:
                break
            except Exception as error:  # a module's own, about the values or shape of its input
                errors.append(f"{type(error).__name__}: {error}"[:200])
    if arrived:
        return arrived[0].detach().cpu().double(), ""
    return None, errors[0] if errors else ""


@contextlib.contextmanager
def _restored_state(model: nn.Module) -> Iterator[None]:
    """Restore the buffers of a model and all random states after this block, because hooks may change them."""
    buffers = [
        (buffer, buffer.detach().clone()) for buffer in model.buffers() if not buffer.is_meta
    ]
    python, numpy = random.getstate(), np.random.get_state()
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    try:
        with torch.random.fork_rng(devices=sorted(device.index for device in devices)):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        with torch.no_grad():
            for buffer, before in buffers:
                # An equal copy would end a backward that reads the buffer.
                if not torch.equal(buffer, before):
                    buffer.copy_(before)


def _reference(inner: nn.Module, images: Tensor, arrived: Tensor | None) -> Tensor | None:
    """Input of the inner model's embedding for these images: the images, or their patches."""
    if arrived is None or arrived.dim() == images.dim():
        return images.double()
    patches, _ = _pass(inner, inner, images)
    return patches


def _same_pixels(arrived: Tensor | None, expected: Tensor | None, tolerance: float) -> bool:
    if arrived is None or expected is None or arrived.shape != expected.shape:
        return False
    return bool((arrived - expected).abs().max() <= tolerance)


def _same_colors(arrived: Tensor | None, expected: Tensor, tolerance: float) -> bool:
    """True if uniform images arrive with the right color in their middle, in any size."""
    if arrived is None or arrived.dim() != 4 or arrived.shape[:2] != expected.shape[:2]:
        return False
    *_, height, width = arrived.shape
    middle = arrived[1:, :, height // 2, width // 2]
    return bool((middle - expected[1:, :, 0, 0]).abs().max() <= tolerance)
