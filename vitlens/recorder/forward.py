"""A forward: the images that a model takes, and the mode and the precision in which it runs."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from vitlens.recorder.hooks import thread_hooks
from vitlens.recorder.supported import family, is_known, model_name, timm


def require_images(images: object, model: nn.Module | None = None) -> None:
    """Raise ValueError unless images are floats (B, C, height, width) of a size that a known model takes."""
    shape = tuple(getattr(images, "shape", ()))
    if (
        not isinstance(images, torch.Tensor)
        or len(shape) != 4
        or not images.is_floating_point()
        or not len(images)
    ):
        got = (
            f"{images.dtype} of shape {shape}"
            if isinstance(images, torch.Tensor)
            else type(images).__name__
        )
        raise ValueError(
            f"Expected images as a floating-point tensor of shape (B, C, height, width), got {got}. "
            "`vitlens.models.preprocess(model, pictures)` makes one."
        )
    if model is not None and is_known(model):
        family(model).grid(shape[-2:])


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
    return images.to(next((p for p in first.parameters() if p.is_floating_point()), images))


def run(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """(B, classes) logits, or (B, D) features of a model without classes, from the output of a model of any library.

    >>> vitlens.models.run(model, images).shape
    torch.Size([2, 200])
    """
    if is_known(model):
        return family(model).run(images)
    output = model(images)
    return getattr(output, "logits", output)


def pooled_features(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """(B, D) features: the input of the classifier, or the output of a model without one."""
    adapter = family(model)
    if type(adapter) is timm.Timm:
        return model.forward_head(model.forward_features(images), pre_logits=True)
    if adapter.classes == 0:
        return adapter.run(images)
    tokens = []
    with thread_hooks(
        [(adapter.blocks[-1].register_forward_hook, lambda _, args, output: tokens.append(output))]
    ):
        adapter.run(images)
    return adapter.head(tokens[-1], pre_logits=True)


_LOCK = threading.Lock()
_HELD: dict[object, list] = {}
"""Active switches: restore function and number of blocks that hold it."""


@contextlib.contextmanager
def _hold(switches: dict[object, Callable[[], Callable | None]]) -> Iterator[None]:
    """Apply switches in this block. Where blocks of several threads overlap, the last one to end restores.

    switches: by key, a function that applies a switch and returns its restore function, or None if nothing changed.
    """
    keys = []
    with _LOCK:
        for key, switch in switches.items():
            restore = switch()
            if restore is not None or key in _HELD:
                _HELD.setdefault(key, [restore, 0])[1] += 1
                keys.append(key)
    try:
        yield
    finally:
        with _LOCK:
            for key in keys:
                _HELD[key][1] -= 1
                if not _HELD[key][1]:
                    restore, _ = _HELD.pop(key)
                    restore()


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

    return _hold({(module, attribute): functools.partial(switch, module) for module in modules})


def without_checkpointing(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Switch off gradient checkpointing (timm's and open_clip's `grad_checkpointing`) in this block."""
    return switch_off(
        [m for m in model.modules() if hasattr(m, "grad_checkpointing")], "grad_checkpointing"
    )


def eval_mode(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Put a model into eval mode in this block, and restore the mode of every module afterwards."""
    return switch_off([*model.modules()], "training")


def eager_mode() -> contextlib.AbstractContextManager[None]:
    """Run compiled models eagerly in this block, because a compiled graph hides its calls from a capture."""

    def switch() -> Callable:
        stance = torch.compiler.set_stance("force_eager")
        stance.__enter__()
        return functools.partial(stance.__exit__, None, None, None)

    return _hold({"stance": switch})
