"""The forward that is explained: in eval mode, with autograd on, and with the model's parameters as constants.

Parameters enter every function detached. So autograd keeps nothing for their sake, frozen models work like any other,
no `.grad` and no `requires_grad` is touched, and threads do not meet.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitlens.arguments import require_images, taking
from vitlens.capture import Attention, capture
from vitlens.support import attention_modules, evaluating, model_name, switched_off, unwrap
from vitlens.target import Target, asked, require_classes


def checked(model: nn.Module, images: Tensor) -> tuple[nn.Module, Tensor]:
    """The bare model, and the images where its parameters are. Raises for what cannot be explained."""
    model = unwrap(model)
    attention_modules(model)
    require_classes(model)
    require_images(images, model)
    with torch.inference_mode(False):
        images = images.clone() if images.is_inference() else images.detach()
        return model, images.to(next(model.parameters()))


@contextlib.contextmanager
def explaining(model: nn.Module) -> Iterator[None]:
    """Run and differentiate the model in this block; afterwards it is as it was."""
    # Checkpointing would run the blocks again, in the threads of the backward pass.
    checkpointing = switched_off([model] if hasattr(model, "grad_checkpointing") else [], "grad_checkpointing")
    modes = torch.inference_mode(False), torch.enable_grad()
    with taking(model), evaluating(model), checkpointing, modes[0], modes[1], _Constants(model):
        yield


def differentiated(model: nn.Module, images: Tensor, target, against, names) -> Attention:
    """A capture of the forward in which every layer knows the gradient of its image's score."""
    model, images = checked(model, images)
    with explaining(model):
        with capture(model, gradients=True) as attn:
            logits = model(images)
        chosen = asked(model, logits, target, against, names)
        attn.differentiate(score(logits, chosen))
        require_gradient(model, chosen, [layer.gradient for layer in attn])
    return attn


def score(logits: Tensor, chosen: Target) -> Tensor:
    """The sum over the batch of each image's score: images do not meet, so its gradients are theirs."""
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
        self.parameters = set(map(id, model.parameters()))  # captum fits models of its own, whose parameters change

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*map(self._constant, args), **{k: self._constant(value) for k, value in (kwargs or {}).items()})

    def _constant(self, value):
        if type(value) in (list, tuple):
            return type(value)(map(self._constant, value))
        return value.detach() if id(value) in self.parameters else value
