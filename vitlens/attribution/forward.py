"""The forward that is explained: in eval mode, with autograd on, and with the model's parameters as constants.

Parameters enter every function detached. So autograd keeps nothing for their sake, frozen models work like any other,
no `.grad` and no `requires_grad` is touched, and threads do not meet.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitlens.attribution.target import Target, asked
from vitlens.models import require_classes
from vitlens.recorder.families import attention_modules, model_name, transformer, unwrap
from vitlens.recorder.graph import Graph, require_gradients, tensors_of
from vitlens.recorder.grid import patch_embedding
from vitlens.recorder.recording import Attention, capture
from vitlens.recorder.running import evaluating, require_images, switched_off, taking


def checked(model: nn.Module, images: Tensor, *, gradients: bool = True) -> tuple[nn.Module, Tensor]:
    """The bare model, and the images where its parameters are. Raises for what cannot be explained, or not by a method
    that needs gradients."""
    model = unwrap(model)
    attention_modules(transformer(model))
    require_classes(model)
    require_images(images, model)
    if gradients:
        require_gradients(model)
    if next(model.parameters()).is_meta:
        raise ValueError(
            f"The weights of {model_name(model)} are on the meta device, where nothing is computed, so no class can be "
            "explained. Load it with its weights, on a CPU or GPU."
        )
    with torch.inference_mode(False):
        images = images.clone() if images.is_inference() else images.detach()
        return model, images.to(next(model.parameters()))


def captured(model: nn.Module, images: Tensor, **options) -> tuple[Attention, Tensor]:
    """A capture of the Vision Transformer that `model` is, or that it wraps, and the (B, classes) logits of `model`.

    options: those of `capture`. Where a wrapper pools the tokens itself, nobody knows what it reads of them, and the
    grid has no read-out. Raises ValueError where a wrapper shows it images of another size, whose patches are others.
    """
    inner, thread, said = transformer(model), threading.get_ident(), []

    def hear(_, args, output):
        if threading.get_ident() == thread:
            said.append(output)

    with inner.register_forward_hook(hear), capture(inner, **options) as attn:
        logits = model(images)
    if inner is model:
        return attn, logits
    if said and said[-1] is logits:
        require_classes(inner)
    if not said:
        attn.grid = replace(attn.grid, readout=None)
    if attn.grid.image != tuple(images.shape[-2:]):
        came, shown = (" × ".join(map(str, size)) for size in (images.shape[-2:], attn.grid.image))
        raise ValueError(
            f"{model_name(model)} makes images of {shown} pixels out of {came} for the Vision Transformer in it, so "
            f"its patches are not those of the images. Give images of {shown} pixels, or explain the inner model."
        )
    return attn, logits


@contextlib.contextmanager
def explaining(model: nn.Module) -> Iterator[None]:
    """Run and differentiate the model in this block; afterwards it is as it was."""
    # Checkpointing would run the blocks again, in the threads of the backward pass.
    inner = transformer(model)
    checkpointing = switched_off([inner] if hasattr(inner, "grad_checkpointing") else [], "grad_checkpointing")
    modes = torch.inference_mode(False), torch.enable_grad()
    with taking(model), evaluating(model), checkpointing, modes[0], modes[1], _Constants(model):
        yield


def differentiated(model: nn.Module, images: Tensor, target, against, names) -> Attention:
    """A capture of the forward in which every layer knows the gradient of its image's score."""
    model, images = checked(model, images)
    with explaining(model):
        attn, logits = captured(model, images, gradients=True)
        chosen = asked(model, logits, target, against, names)
        attn.differentiate(score(logits, chosen))
        require_gradient(model, chosen, [layer.gradient for layer in attn])
    return attn


def score(logits: Tensor, chosen: Target) -> Tensor:
    """The sum over the batch of each image's score: images do not meet, so its gradients are theirs."""
    if not logits.requires_grad:
        raise ValueError(
            "The logits have no gradients, as the model's head cuts them off (by no_grad or detach). Let autograd see "
            "the whole forward, or use a method without gradients, such as occlusion."
        )
    return chosen.logits(logits).sum()


def require_gradient(model: nn.Module, chosen: Target, gradients: list[Tensor]) -> None:
    """Raise ValueError where the score of an image depends on nothing: an all-zero map would look like a finding."""
    reached = torch.stack([g.flatten(1).any(1) for g in gradients]).any(0)
    if not reached.all():
        number = chosen.numbers[~reached][0].item()
        raise ValueError(
            f"No gradient of class {number} reaches the attention of {model_name(model)}, so there is nothing to show: "
            "its weights in the head are zero, as before training, or a layer on the way passes nothing on."
        )


class _Constants(TorchFunctionMode):
    """Enter this before a capture, which knows layers by their parameters and has to see those themselves."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.graph = Graph(model, patch_embedding(transformer(model)))
        self.parameters = self.graph.names  # by their ids: captum fits models of its own, whose parameters change

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*map(self._constant, args), **{k: self._constant(value) for k, value in kwargs.items()})
        self.graph.look(func, tensors_of(args, kwargs), result)
        return result

    def _constant(self, value):
        if type(value) in (list, tuple):
            return type(value)(map(self._constant, value))
        return value.detach() if id(value) in self.parameters else value
