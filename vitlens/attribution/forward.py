"""The one forward and backward that all methods share: in eval mode, with the model's parameters as constants.

Parameters enter every function detached. So autograd keeps nothing for their sake, frozen models work like any other,
no `.grad` and no `requires_grad` is touched, and threads do not meet.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitlens.attribution.target import Target, asked, bound, of_features
from vitlens.models import require_classes
from vitlens.recorder.arguments import layer_number
from vitlens.recorder.grid import TokenGrid
from vitlens.recorder.interception import watching_graph
from vitlens.recorder.recording import Attention, capture, cut_graph, no_gradient
from vitlens.recorder.running import evaluating, require_images, run, switched_off, taking
from vitlens.recorder.supported import (
    UnsupportedModelError,
    attention_modules,
    family,
    found_in,
    known,
    model_name,
    transformer,
    unwrap,
)


@dataclass(frozen=True)
class Inputs:
    """What the attention of layer `layer` of `layers` is given, (B, T, C), and the gradient of the score by it."""

    grid: TokenGrid
    layers: int
    layer: int
    activation: Tensor
    gradient: Tensor


@dataclass(frozen=True)
class Explained:
    """The results of one forward and one backward pass, for all methods that need nothing more of the model.

    said: (B, classes) logits, or (B, D) features where the target is about these. captures: for each of
    `registry.NEEDS` that was asked for, what the functions take first.
    """

    said: Tensor
    target: Target
    grid: TokenGrid
    captures: dict[str, Attention | Inputs]


def explained(
    model: nn.Module,
    images: Tensor,
    target: object = None,
    *,
    against: object = None,
    names: Sequence[str] | None = None,
    needs: Collection[str] = ("gradients",),
    layer: int = -1,
) -> Explained:
    """Run the model once, and differentiate it once where `needs` say so.

    model, images, target, against, names: as in `vitlens.attribution`; target may be a `Target`, known from before.
    needs: of `vitlens.attribution.registry.NEEDS`; "model" asks for nothing. layer: whose "inputs" are recorded.
    """
    needs = set(needs)
    differentiable = needs & {"gradients", "readings", "inputs"}
    model, images = checked(model, images, target)
    target, against = bound(model, target, against)
    features = of_features(target)
    inner = transformer(model)
    modules = attention_modules(inner)
    layer = layer_number(len(modules), layer)
    given, keep_given = _keeper()
    tokens, keep_tokens = _keeper()
    with explaining(model, gradients=bool(differentiable)):
        with contextlib.ExitStack() as hooks:
            if "inputs" in needs:
                hooks.enter_context(_inputs(family(inner).blocks[layer], modules[layer], keep_given))
            for block in family(inner).blocks if "readings" in needs else []:
                hooks.enter_context(block.register_forward_hook(lambda _, args, output: keep_tokens(output)))
            attn, output = captured(model, images, features, gradients=bool(needs & {"gradients", "readings"}))
        chosen = asked(model, output, target, against, names)
        captures = {"capture": attn}
        if "readings" in needs:
            more = bool(needs & {"gradients", "inputs"})
            captures["readings"] = _read(model, attn, tokens, output, chosen, keep_graph=more)
        if "gradients" in needs:
            captures["gradients"] = attn
            by_inputs = attn.differentiate(score(output, chosen), also=given)
            require_layers(model, chosen, attn)
        elif given:
            by_inputs = torch.autograd.grad(score(output, chosen), given)
        if given:
            require_gradient(model, chosen, by_inputs)
            parts = torch.cat([each.detach() for each in given], -1), torch.cat(by_inputs, -1)
            captures["inputs"] = Inputs(attn.grid, len(modules), layer, *parts)
    return Explained(output.detach(), chosen, attn.grid, captures)


def _read(
    model: nn.Module, attn: Attention, tokens: list[Tensor], output: Tensor, chosen: Target, *, keep_graph: bool
) -> Attention:
    """A twin of the capture whose layers know the gradient of the score that is read right after each of them: by the
    model's own final norm, pooling and head."""
    inner, readings = transformer(model), attn.twin()
    about = family(inner)
    read = [about.pooling(each) if chosen.of_features else about.head(each) for each in tokens]
    if inner is not model and not torch.equal(read[-1], output):
        raise ValueError(
            f"LeGrad reads every layer with the Vision Transformer's own head, but {model_name(model)} gives other "
            "logits than the one in it. Use another method, such as relevance or grad_cam."
        )
    readings.differentiate([score(each, chosen) for each in read], keep_graph=keep_graph)
    require_layers(model, chosen, readings)
    return readings


def checked(model: nn.Module, images: Tensor, target: object = None) -> tuple[nn.Module, Tensor]:
    """The unwrapped model, and the images on its device and in its dtype. Raises for a model or images that cannot be
    explained, or that has not what the target is about."""
    model = unwrap(model)
    attention_modules(transformer(model))
    require_said(model, target)
    require_images(images, model)
    if next(model.parameters()).is_meta:
        raise ValueError(
            f"The weights of {model_name(model)} are on the meta device, where nothing is computed. Load it with its "
            "weights, on a CPU or GPU."
        )
    with torch.inference_mode(False):
        images = images.clone() if images.is_inference() else images.detach()
        return model, images.to(next(model.parameters()))


def require_said(model: nn.Module, target: object) -> None:
    """Raise ValueError unless a model has classes, or features where the target is about these."""
    if not of_features(target):
        require_classes(model)
    elif not known(model):
        inside = ", ".join(f"`{path}`" for path in found_in(model)) or "a model that vitlens knows"
        raise ValueError(
            f"Features are those of a Vision Transformer itself, and {model_name(model)} is none that vitlens knows. "
            f"Explain {inside} instead."
        )


def answered(model: nn.Module, images: Tensor, features: bool) -> Tensor:
    """(B, classes) logits; or (B, D) features, which are what the classifier reads, or the output of a model without
    one."""
    return family(unwrap(model)).pooled(images) if features else run(model, images)


def captured(model: nn.Module, images: Tensor, features: bool = False, **options) -> tuple[Attention, Tensor]:
    """A capture of the Vision Transformer that `model` is or wraps, and the (B, classes) logits of `model`, or its
    features.

    options: those of `capture`. Where a wrapper pools the tokens itself, it is unknown what it reads, so the grid has
    no read-out. Raises ValueError where a wrapper resizes the images, because their patches would be others.
    """
    inner, (said, keep) = transformer(model), _keeper()
    with inner.register_forward_hook(lambda _, args, output: keep(output)), capture(inner, **options) as attn:
        output = answered(model, images, features)
    if inner is model:
        return attn, output
    alone = said and isinstance(said[-1], Tensor)  # what a wrapper can read of it
    whole = said and getattr(said[-1], "logits", said[-1]) is output
    if whole:
        require_classes(inner)
    if not alone and not whole:
        attn.grid = replace(attn.grid, readout=None)
    if attn.grid.image != tuple(images.shape[-2:]):
        came, shown = (" × ".join(map(str, size)) for size in (images.shape[-2:], attn.grid.image))
        raise ValueError(
            f"{model_name(model)} makes images of {shown} pixels out of {came} for the Vision Transformer in it, so "
            f"the map would not lie on the images. Give images of {shown} pixels, or explain the inner model."
        )
    return attn, output


@contextlib.contextmanager
def explaining(model: nn.Module, *, gradients: bool = True, constants: Constants | None = None) -> Iterator[None]:
    """In this block the model can be run, and differentiated unless told otherwise; afterwards it is as it was.

    constants: the mode that makes them so, plainly `Constants(model)`.
    """
    with taking(model), evaluating(model), contextlib.ExitStack() as modes:
        if gradients:
            # Checkpointing would run the blocks again, in the threads of the backward pass.
            modules = family(transformer(model)).recomputing
            for mode in (switched_off(modules, "grad_checkpointing"), torch.inference_mode(False), torch.enable_grad()):
                modes.enter_context(mode)
            modes.enter_context(constants or Constants(model))
            if constants is None:  # others may detach what they hold fixed
                modes.enter_context(watching_graph(model, partial(_refuse_cut, model)))
        else:
            modes.enter_context(torch.no_grad())
        yield


def score(output: Tensor, chosen: Target, *, linear: bool = False) -> Tensor:
    """The sum of the images' scores. Images do not meet, so its gradient by an image is that of the image's score.

    linear: as a linear function of the output.
    """
    if not output.requires_grad:
        raise ValueError(
            "The logits have no gradients, because the model's head cuts them off (by no_grad or detach). Let autograd "
            "see the whole forward, or use a method without gradients, such as occlusion."
        )
    if linear:
        return chosen.linear(output).sum()
    chosen.require_slope(output.detach())
    return chosen.score(output).sum()


def _refuse_cut(model: nn.Module, where: str) -> None:
    raise UnsupportedModelError(cut_graph(model_name(model), where))


def require_layers(model: nn.Module, chosen: Target, attn: Attention) -> None:
    """Raise ValueError if the gradient of an image is all zero in a layer: its map would look like a finding."""
    for layer, image in (~attn.reached()).nonzero()[:1].tolist():
        raise ValueError(no_gradient(model_name(model), chosen.called(image), layer))


def require_gradient(model: nn.Module, chosen: Target, gradients: list[Tensor]) -> None:
    """Raise ValueError if all gradients of an image are zero: an all-zero map would look like a finding."""
    reached = torch.stack([g.flatten(1).any(1) for g in gradients]).any(0)
    if not reached.all():
        first = (~reached).nonzero()[0].item()
        raise ValueError(
            f"No gradient of {chosen.called(first)} reaches the attention of {model_name(model)}, so there is nothing "
            "to show. The weights of its head are zero, as before training, or a layer on the way passes nothing on."
        )


@contextlib.contextmanager
def _inputs(block: nn.Module, modules: list[tuple[str, nn.Module]], keep: Callable[[Tensor], None]) -> Iterator[None]:
    """In this block, keep what the attention is given. Autograd's graph begins with the model's block at the latest."""
    thread = threading.get_ident()

    def begin(_, args: tuple) -> tuple:
        if threading.get_ident() != thread or args[0].requires_grad:
            return args
        return (args[0].detach().requires_grad_(), *args[1:])

    def given(_, args: tuple, named: dict) -> None:  # some pass it by name
        keep(args[0] if args else named["hidden_states"])

    with contextlib.ExitStack() as hooks:
        hooks.enter_context(block.register_forward_pre_hook(begin))
        for _, module in modules:
            if hasattr(module, "in_norm"):
                # A ParallelScalingBlock is its own attention, which does not read what the block is given.
                hook = module.in_norm.register_forward_hook(lambda _, args, output: keep(output))
            else:
                hook = module.register_forward_pre_hook(given, with_kwargs=True)
            hooks.enter_context(hook)
        yield


def _keeper() -> tuple[list[Tensor], Callable[[Tensor], None]]:
    """A list, and a function that appends to it what this thread gives."""
    kept, thread = [], threading.get_ident()

    def keep(tensor: Tensor) -> None:
        if threading.get_ident() == thread:
            kept.append(tensor)

    return kept, keep


class Constants(TorchFunctionMode):
    """Detach the parameters in this block. Enter it before a capture, which names layers by the parameters."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.parameters = {id(p): p for p in model.parameters()}  # and no others': captum fits models of its own

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        return func(*map(self._constant, args), **{k: self._constant(value) for k, value in kwargs.items()})

    def _constant(self, value):
        if type(value) in (list, tuple):
            return type(value)(map(self._constant, value))
        return value.detach() if id(value) in self.parameters else value
