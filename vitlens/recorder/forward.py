"""A forward: the images that a model takes, its outputs, and the mode in which it runs."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from vitlens.recorder.supported import family, is_known, model_name


def require_images(images: object, model: nn.Module | None = None) -> None:
    """Raise ValueError unless images are floats (B, C, height, width) of a size that a known model takes."""
    if not isinstance(images, torch.Tensor):
        raise _images_error(type(images).__name__)
    shape = tuple(images.shape)
    if len(shape) != 4 or len(images) == 0 or not images.is_floating_point():
        raise _images_error(f"{images.dtype} of shape {shape}")
    if model is not None and is_known(model):
        family(model).grid(shape[-2:])


def _images_error(got: str) -> ValueError:
    return ValueError(
        f"Expected images as a floating-point tensor of shape (B, C, height, width), got {got}. "
        "`vitlens.models.preprocess(model, pictures)` makes one."
    )


def require_finite(model: nn.Module, outputs: torch.Tensor) -> None:
    """Raise ValueError for outputs of a model that are NaN or ∞. −∞ is the logit of a class that is excluded."""
    if not (outputs < torch.inf).all():
        raise ValueError(
            f"The outputs of {model_name(model)} are not finite. Its weights may be damaged, its precision too low, or "
            "the images not normalized."
        )


def cast(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Images on the device and in the dtype of the parameters that they enter."""
    first = family(model).embedding if is_known(model) else model
    for parameter in first.parameters():
        if parameter.is_floating_point():
            return images.to(parameter)
    return images


def run(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """(B, classes) logits of a model of any library, or (B, D) features of a model without classes.

    `model(images)` returns a tensor in timm and torchvision, an object with `.logits` in transformers, and image and
    text features in open_clip. The features of a CLIP are those of its image tower.

    >>> vitlens.run(model, images).equal(model(images))
    True

    model: a supported model, or a module around one (`DataParallel`, `torch.compile`, your own), whose own output is
    returned if it has no logits. images: (B, C, H, W), as from `preprocess`.

    Gradients flow and autocast applies, as in a call of the model. Raises ValueError for images that are not a tensor.
    """
    if not isinstance(images, torch.Tensor):
        raise _images_error(type(images).__name__)
    if is_known(model):
        return family(model).run(images)
    output = model(images)
    if isinstance(output, Mapping) and "logits" in output:
        return output["logits"]
    return getattr(output, "logits", output)


def pooled_features(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """(B, D) features: the input of the classifier, or the output of a model without one."""
    return family(model).pooled_features(images)


@dataclass
class _Switch:
    """An active switch: the function that restores the former state, and the number of blocks that hold the switch."""

    restore: Callable[[], object]
    blocks: int = 0


_LOCK = threading.Lock()
_ACTIVE: dict[object, _Switch] = {}


@contextlib.contextmanager
def _hold(switches: dict[object, Callable[[], Callable | None]]) -> Iterator[None]:
    """Apply switches in this block. Where blocks of several threads overlap, the last one to end restores.

    switches: by key, a function that applies a switch and returns its restore function, or None if nothing changed.
    """
    keys = []
    with _LOCK:
        for key, switch in switches.items():
            restore = switch()
            if key not in _ACTIVE:
                if restore is None:
                    continue
                _ACTIVE[key] = _Switch(restore)
            _ACTIVE[key].blocks += 1
            keys.append(key)
    try:
        yield
    finally:
        with _LOCK:
            for key in keys:
                _ACTIVE[key].blocks -= 1
                if _ACTIVE[key].blocks == 0:
                    _ACTIVE.pop(key).restore()


def switch_off(
    modules: Sequence[nn.Module], attribute: str
) -> contextlib.AbstractContextManager[None]:
    """Set a boolean attribute of modules to False in this block, and restore it afterwards."""

    def switch(module: nn.Module) -> Callable | None:
        before = getattr(module, attribute)
        if before is False:
            return None
        setattr(module, attribute, False)
        return functools.partial(setattr, module, attribute, before)

    switches = {(module, attribute): functools.partial(switch, module) for module in modules}
    return _hold(switches)


def without_checkpointing(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Switch off gradient checkpointing (timm's and open_clip's `grad_checkpointing`) in this block."""
    attribute = "grad_checkpointing"
    modules = [module for module in model.modules() if hasattr(module, attribute)]
    return switch_off(modules, attribute)


def eval_mode(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Put a model into eval mode in this block, and restore the mode of every module afterwards."""
    return switch_off(list(model.modules()), "training")


def eager_mode() -> contextlib.AbstractContextManager[None]:
    """Run compiled models eagerly in this block, because a compiled graph hides its calls from a capture."""

    def switch() -> Callable:
        stance = torch.compiler.set_stance("force_eager")
        stance.__enter__()
        return functools.partial(stance.__exit__, None, None, None)

    return _hold({"stance": switch})
