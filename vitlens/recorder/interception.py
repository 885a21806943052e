"""Interception of a model's attention calls, in one thread.

Shapes: B batch, H heads, T tokens = R prefix + P patches, K head width.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitlens.recorder.grid import TokenGrid
from vitlens.recorder.multihead import MULTIHEAD, explicit_attention, multihead_attention
from vitlens.recorder.supported import family, input_channels, refuse

POOL = -1  # layer number of the attention pool


class _Thread(threading.local):
    """The thread's interventions, outermost first, and its only active interception, or None if all are active."""

    def __init__(self):
        self.interventions: list[TorchFunctionMode] = []
        self.alone: TorchFunctionMode | None = None


THREAD = _Thread()


@contextlib.contextmanager
def deactivate_others(interception: TorchFunctionMode) -> Iterator[None]:
    """Deactivate all other interceptions of this thread in this block."""
    before, THREAD.alone = THREAD.alone, interception
    try:
        yield
    finally:
        THREAD.alone = before


def tensors_of(values: object) -> list[Tensor]:
    """All tensors among values, including those in lists, tuples and dictionaries."""
    if isinstance(values, Tensor):
        return [values]
    inside = (
        values.values()
        if isinstance(values, dict)
        else values
        if isinstance(values, list | tuple)
        else ()
    )
    return [tensor for value in inside for tensor in tensors_of(value)]


class Interception(TorchFunctionMode):
    """Intercepts every torch function: the last used parameters identify the layer, the embedding's input the image.

    A subclass's `attend` takes a call of fused attention, (layer, call, name), the function and its arguments, and
    returns the output that the model gets.
    """

    def __init__(self, model: nn.Module, modules: list):
        super().__init__()
        self.model, self.family = model, family(model)
        self.grid: TokenGrid | None = None
        self.layer: tuple[int, int, str] | None = (
            None  # (layer, call, name) of the last used parameters
        )
        self.parameters = {
            id(p): p for p in model.parameters()
        }  # kept, because ids of freed tensors are reused
        self.owner = dict.fromkeys(self.parameters)  # None: outside attention
        self.owner |= {
            id(p): (i, j, name)
            for i, layer in enumerate(modules)
            for j, (name, module) in enumerate(layer)
            for p in module.parameters()
        }
        if (pool := self.family.pool) is not None:
            for module in filter(None, (pool.norm, pool.module)):
                self.owner |= {id(p): (POOL, 0, "attn_pool") for p in module.parameters()}
        embedding = self.family.embedding
        self.embed = {id(p) for p in embedding.parameters()}
        self.pads = hasattr(embedding, "backbone") or getattr(embedding, "dynamic_img_pad", False)
        self.channels = input_channels(model)
        self.image: Tensor | None = None
        self.padded: dict[int, tuple[Tensor, Tensor]] = {}
        self.begun = False  # True from the first layer on, when the grid is fixed

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if THREAD.alone not in (None, self):
            return func(*args, **kwargs)
        if func in (F.scaled_dot_product_attention, explicit_attention):
            return self._attention(func, *args, **kwargs)
        tensors = tensors_of([*args, *kwargs.values()])
        for tensor in tensors:
            if type(tensor) is not Tensor and isinstance(tensor, nn.Parameter):
                self.layer = self.owner.get(id(tensor))  # None for one of another model
        if not self.begun:
            with torch._C.DisableTorchFunction():
                self._find_image(tensors, args[0] if args else None)
        if func is MULTIHEAD and self.layer is not None:
            return multihead_attention(self._attention, *args, **kwargs)
        result = func(*args, **kwargs)
        if func is F.pad and self.pads and not self.begun:
            self.padded[id(result)] = (args[0], result)  # kept, so that its id stays unique
        return result

    def _find_image(self, tensors: list[Tensor], subject) -> None:
        """Set the image: the last (B, C, H, W) activation, before the embedding's own padding, that a function took
        before the embedding's parameters were used."""
        subject, _ = self.padded.get(id(subject), (subject, None))
        activation = isinstance(subject, Tensor) and not isinstance(subject, nn.Parameter)
        if activation and subject.dim() == 4 and subject.shape[1] == self.channels:
            self.image = subject
        parameters = {id(t) for t in tensors} & self.embed
        if self.image is not None and parameters and len(parameters) < len(tensors):
            self.grid = self.family.grid(tuple(self.image.shape[-2:]))

    def _attention(
        self, func, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **kwargs
    ):
        where, self.layer = self.layer, None
        if where is None:  # another model's, or handled above by this interception, entered twice
            return func(query, key, value, attn_mask, dropout_p, is_causal, **kwargs)
        with torch._C.DisableTorchFunction():  # outer modes must not see these calls
            self.check(*where[:2], query, key, attn_mask, dropout_p, is_causal)
        self.image = None
        self.padded.clear()
        return self.attend(where, func, query, key, value, attn_mask, **kwargs)

    def check(
        self,
        index: int,
        call: int,
        query,
        key,
        mask: Tensor | None,
        dropout_p: float,
        is_causal: bool,
    ) -> None:
        """Raise UnsupportedModelError unless the call attends over all tokens of one image, without randomness."""
        grid, where, keys = (
            self.grid,
            "attention pool" if index == POOL else f"layer {index}",
            key.shape[-2],
        )
        if grid is not None and index == POOL:
            fits = keys in (grid.tokens, grid.patches)
        elif grid is not None:
            fits = query.dim() == 4 and query.shape[-2] == keys == grid.tokens
        if dropout_p > 0:
            reason = f"{where} drops attention weights at random (dropout {dropout_p:g}); call model.eval() first"
        elif is_causal:
            reason = f"{where} was called with a causal mask, so later patches are hidden"
        elif mask is not None and not mask.is_meta and hides_all(mask):
            reason = f"the mask of {where} leaves a query without a visible key, so its attention is undefined"
        elif grid is None:
            reason = (
                f"its input was not an image of shape (B, {self.channels}, height, width), so the grid of its "
                "patches is unknown; pass images, not patches or tokens"
            )
        elif not fits:
            reason = (
                f"{where} attends from {query.shape[-2]} to {keys} tokens, but an input of {grid.image[0]} × "
                f"{grid.image[1]} pixels has {grid.prefix} prefix tokens and {grid.rows} × {grid.cols} patches"
            )
        else:
            return
        raise refuse(self.model, reason)


def hides_all(mask: Tensor) -> bool:
    """True if the attention mask hides every key from a query."""
    seen = mask.any(-1) if mask.dtype == torch.bool else mask.amax(-1) > -torch.inf
    return not seen.all()
