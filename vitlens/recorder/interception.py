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

from vitlens.recorder.diagnosis import Witness
from vitlens.recorder.grid import TokenGrid
from vitlens.recorder.multihead import MULTIHEAD, explicit_attention, multihead_attention
from vitlens.recorder.supported import family, input_channels, refuse

POOL = -1  # layer number of the attention pool


class _Thread(threading.local):
    """State of one thread.

    interventions: the active ones, outermost first. alone: the only interception that acts, or None if all act.
    """

    def __init__(self):
        self.interventions: list[TorchFunctionMode] = []
        self.alone: TorchFunctionMode | None = None


THREAD = _Thread()


@contextlib.contextmanager
def deactivate_others(interception: TorchFunctionMode) -> Iterator[None]:
    """Deactivate all other interceptions of this thread in this block."""
    before = THREAD.alone
    THREAD.alone = interception
    try:
        yield
    finally:
        THREAD.alone = before


def tensors_of(values: object) -> list[Tensor]:
    """All tensors among values, including those in lists, tuples and dictionaries."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, list | tuple):
        return []
    return [tensor for value in values for tensor in tensors_of(value)]


class Interception(TorchFunctionMode):
    """Receives every torch call in its block. The layer that is running is the one whose parameters were used last. The
    image is the input of the embedding.

    A subclass's `attend` takes a call of fused attention, (layer, call, name), the function and its arguments, and
    returns the output that the model gets.

    layer: (layer, call, name) of the parameters used last, or None outside attention and in another model. grid: set
    before the first layer from the size of the image. before_padding: by the id of a padded tensor, the tensor before
    padding. begun: True from the first layer on, when the grid is fixed. witness: what was seen of the forward.
    """

    def __init__(self, model: nn.Module, modules: list):
        super().__init__()
        self.model = model
        self.family = family(model)
        self.grid: TokenGrid | None = None
        self.layer: tuple[int, int, str] | None = None
        self.parameters = list(model.parameters())  # kept, because ids of freed tensors are reused
        self.owner = self._owners(modules)
        embedding = self.family.embedding
        self.embed = {id(parameter) for parameter in embedding.parameters()}
        self.pads = hasattr(embedding, "backbone") or getattr(embedding, "dynamic_img_pad", False)
        self.channels = input_channels(model)
        self.image: Tensor | None = None
        self.before_padding: dict[int, tuple[Tensor, Tensor]] = {}
        self.begun = False
        self.witness = Witness(model, modules)

    def _owners(self, modules: list) -> dict[int, tuple[int, int, str]]:
        """(layer, call, name) of the attention that each parameter belongs to, by the parameter's id."""
        owners = {}
        for index, layer in enumerate(modules):
            for call, (name, module) in enumerate(layer):
                for parameter in module.parameters():
                    owners[id(parameter)] = (index, call, name)
        pool = self.family.pool
        if pool is None:
            return owners
        for module in (pool.norm, pool.module):
            if module is not None:
                for parameter in module.parameters():
                    owners[id(parameter)] = (POOL, 0, "attn_pool")
        return owners

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if THREAD.alone not in (None, self):
            return func(*args, **kwargs)
        if func in (F.scaled_dot_product_attention, explicit_attention):
            return self._attention(func, *args, **kwargs)
        tensors = tensors_of([*args, *kwargs.values()])
        for tensor in tensors:
            if type(tensor) is not Tensor and isinstance(tensor, nn.Parameter):
                self.layer = self.owner.get(id(tensor))
        if not self.begun:
            with torch._C.DisableTorchFunction():
                self._find_image(tensors, args[0] if args else None)
        if func is MULTIHEAD and self.layer is not None:
            self.witness.note_call(func, tensors, self.layer)
            return multihead_attention(self._attention, *args, **kwargs)
        self.witness.note_call(func, tensors, self.layer)
        result = func(*args, **kwargs)
        if func is F.pad and self.pads and not self.begun:
            self.before_padding[id(result)] = (args[0], result)  # kept, so its id stays unique
        return result

    def _find_image(self, tensors: list[Tensor], subject) -> None:
        """Set the image: the last (B, C, H, W) activation, before the embedding's own padding, that a function took
        before the embedding's parameters were used."""
        if id(subject) in self.before_padding:
            subject, _ = self.before_padding[id(subject)]
        activation = isinstance(subject, Tensor) and not isinstance(subject, nn.Parameter)
        if activation and subject.dim() == 4 and subject.shape[1] == self.channels:
            self.image = subject
        parameters = {id(tensor) for tensor in tensors} & self.embed
        if self.image is not None and parameters and len(parameters) < len(tensors):
            self.grid = self.family.grid(tuple(self.image.shape[-2:]))

    def _attention(
        self, func, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **kwargs
    ):
        where = self.layer
        self.layer = None
        if where is None:  # another model's, or handled above by this interception, entered twice
            self.witness.note_unassigned(query)
            return func(query, key, value, attn_mask, dropout_p, is_causal, **kwargs)
        index, call, _ = where
        with torch._C.DisableTorchFunction():  # outer modes must not see these calls
            self.require_first(index, call)
            self._check(index, query, key, attn_mask, dropout_p, is_causal)
        self.image = None
        self.before_padding.clear()
        return self.attend(where, func, query, key, value, attn_mask, **kwargs)

    def require_first(self, index: int, call: int) -> None:
        """Raise UnsupportedModelError if this call has run before and a subclass takes only one forward."""

    def _check(
        self,
        index: int,
        query,
        key,
        mask: Tensor | None,
        dropout_p: float,
        is_causal: bool,
    ) -> None:
        """Raise UnsupportedModelError unless the call attends over all tokens of one image, without randomness."""
        where = "attention pool" if index == POOL else f"layer {index}"
        if dropout_p > 0:
            raise refuse(
                self.model,
                f"{where} drops attention weights at random (dropout {dropout_p:g}); call model.eval() first",
            )
        if is_causal:
            raise refuse(
                self.model, f"{where} was called with a causal mask, so later patches are hidden"
            )
        if mask is not None and not mask.is_meta and hides_all(mask):
            raise refuse(
                self.model,
                f"the mask of {where} leaves a query without a visible key, so its attention is undefined",
            )
        grid = self.grid
        if grid is None:
            raise refuse(
                self.model,
                f"its input was not an image of shape (B, {self.channels}, height, width), so the grid of its "
                "patches is unknown; pass images, not patches or tokens",
            )
        queries = query.shape[-2]
        keys = key.shape[-2]
        if index == POOL:
            fits = keys in (grid.tokens, grid.patches)
        else:
            fits = query.dim() == 4 and queries == keys == grid.tokens
        if not fits:
            height, width = grid.image
            raise refuse(
                self.model,
                f"{where} attends from {queries} to {keys} tokens, but an input of {height} × {width} pixels has "
                f"{grid.prefix} prefix tokens and {grid.rows} × {grid.cols} patches",
            )


def hides_all(mask: Tensor) -> bool:
    """True if the attention mask hides every key from a query."""
    visible = mask.any(-1) if mask.dtype == torch.bool else mask.amax(-1) > -torch.inf
    return not visible.all()
