"""Run a model: whether it takes these images, in which mode and precision, and whether its memory sufficed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from vitlens.recorder.families import MODELS, model_name, qualified_name


def require_images(images: object, model: nn.Module | None = None) -> None:
    """Raise ValueError unless images are what a model takes: a batch (B, C, height, width) of finite floats.

    C is looked at where the model is one of timm's that vitlens knows.
    """
    if not isinstance(images, torch.Tensor) or images.dim() != 4 or not images.is_floating_point() or len(images) == 0:
        came = (
            f"{images.dtype} of shape {tuple(images.shape)}"
            if isinstance(images, torch.Tensor)
            else type(images).__name__
        )
        raise ValueError(
            f"Images are a floating-point tensor (B, channels, height, width), normalized as the model wants them, but "
            f"{came} came. `vitlens.models.preprocess(model, pictures)` makes one."
        )
    if model is not None and qualified_name(model) in MODELS and images.shape[1] != (wanted := channels(model)):
        raise ValueError(
            f"{model_name(model)} takes images of {wanted} channels, but the shape {tuple(images.shape)} came."
        )
    embed = getattr(model, "embeds", None)
    whole_patches = getattr(embed, "is_linear", False) and not embed.dynamic_img_pad  # NaFlex's cuts no pixels off
    if whole_patches and any(n % p for n, p in zip(images.shape[-2:], embed.patch_size, strict=True)):
        size, patch = (" × ".join(map(str, sides)) for sides in (images.shape[-2:], embed.patch_size))
        raise ValueError(
            f"{model_name(model)} does not take this size: patches of {patch} pixels do not divide images of {size}."
        )
    if not images.isfinite().all():
        wrong = (~images.isfinite()).flatten(1).sum(1).tolist()
        raise ValueError(
            f"Images are finite numbers, but {sum(wrong)} values are not, the first of them in image "
            f"{[*map(bool, wrong)].index(True)}; look for what damaged them before they came here."
        )


def channels(model: nn.Module) -> int:
    """Of the images that it takes; the first convolution reads them. NaFlex has none and says it."""
    first = next((each for each in model.modules() if isinstance(each, nn.Conv2d)), None)
    return model.in_chans if first is None else first.in_channels


@contextlib.contextmanager
def taking(model: nn.Module) -> Iterator[None]:
    """In this block, what timm asserts of an image's size is a ValueError with a sentence."""
    try:
        yield
    except AssertionError as error:
        if "Input" not in str(error):  # timm's word for sizes
            raise
        raise ValueError(f"{model_name(model)} does not take this size: {str(error).rstrip('.')}.") from error


_SWITCHING = threading.Lock()
_SWITCHED: dict[tuple[nn.Module, str], list] = {}
"""For each module and attribute that is switched off: its former value, and how many blocks hold it off."""


@contextlib.contextmanager
def switched_off(modules: Sequence[nn.Module], attribute: str) -> Iterator[None]:
    """Set a boolean attribute of modules to False in this block, and restore it afterwards.

    If blocks of several threads overlap, the last one to end restores it.
    """
    with _SWITCHING:
        for module in modules:
            _SWITCHED.setdefault((module, attribute), [getattr(module, attribute), 0])[1] += 1
            setattr(module, attribute, False)
    try:
        yield
    finally:
        with _SWITCHING:
            for module in modules:
                before = _SWITCHED[module, attribute]
                before[1] -= 1
                if not before[1]:
                    setattr(module, attribute, _SWITCHED.pop((module, attribute))[0])


def evaluating(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Eval mode for the length of a `with` block; afterwards every module is in the mode it was in."""
    return switched_off([*model.modules()], "training")


_stance_lock, _stance_users, _stance = threading.Lock(), 0, None


@contextlib.contextmanager
def uncompiled():
    """Let compiled models run eagerly while any capture is open (a compiled graph would hide its calls)."""
    global _stance_users, _stance
    with _stance_lock:
        _stance_users += 1
        if _stance_users == 1:
            _stance = torch.compiler.set_stance("force_eager")
            _stance.__enter__()
    try:
        yield
    finally:
        with _stance_lock:
            _stance_users -= 1
            if _stance_users == 0:
                _stance.__exit__(None, None, None)


@contextlib.contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Matrix products in the precision of their factors, also inside of autocast and where a GPU may round to TF32."""
    autocast = torch.amp.is_autocast_available(device.type)
    products = torch.backends.cuda.matmul
    # PyTorch's newer name for the setting does not raise where a program has set it by both.
    name, exact = ("fp32_precision", "ieee") if hasattr(products, "fp32_precision") else ("allow_tf32", False)
    before = getattr(products, name)
    with torch.autocast(device.type, enabled=False) if autocast else contextlib.nullcontext():
        if before not in ("tf32", True):
            yield
            return
        setattr(products, name, exact)
        try:
            yield
        finally:
            setattr(products, name, before)


def float64(tensor: torch.Tensor) -> torch.Tensor:
    """In float64; on the CPU where the tensor's device has none (Apple's)."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()


def out_of_memory(error: Exception) -> bool:
    """Whether PyTorch raised ``error`` for want of memory; its CPU allocator has no type of its own for that."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
