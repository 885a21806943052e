"""Which layer calls fused attention, on which grid, and whether it is a call that can be shown.

`torch.nn.functional.scaled_dot_product_attention` is watched for the length of a `with` block by a
`torch.overrides.TorchFunctionMode`, of one thread, and no module is patched. `capture` and `intervene` live on this.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitlens.recorder.grid import TokenGrid
from vitlens.recorder.multihead import MULTIHEAD, opened, spelled_out
from vitlens.recorder.supported import family, refuse

POOL = -1  # where the layers are numbered, the number of the attention pool


class _Thread(threading.local):
    """What is at work in this thread."""

    def __init__(self):
        self.interventions: list[TorchFunctionMode] = []
        """Those of `vitlens.intervene`, the outermost first."""
        self.alone: TorchFunctionMode | None = None
        """The interception that alone sees the forwards run at the moment."""


THREAD = _Thread()


@contextlib.contextmanager
def alone(interception: TorchFunctionMode) -> Iterator[None]:
    """In this block no other interception of this thread sees, or changes, what runs."""
    before, THREAD.alone = THREAD.alone, interception
    try:
        yield
    finally:
        THREAD.alone = before


def tensors_of(values: object) -> list[Tensor]:
    """All tensors among values, including those in lists, tuples and dictionaries."""
    if isinstance(values, Tensor):
        return [values]
    inside = values.values() if isinstance(values, dict) else values if isinstance(values, list | tuple) else ()
    return [tensor for value in inside for tensor in tensors_of(value)]


@contextlib.contextmanager
def watching_graph(model: nn.Module, report: Callable[[str], object]) -> Iterator[None]:
    """In this block, call `report` with the name of every module of the model, run by this thread, whose input requires
    gradients while its output does not: by no_grad, detach or quantized weights. Autograd would return the gradients of
    another function."""
    names, thread = {module: name for name, module in model.named_modules()}, threading.get_ident()

    def look(module: nn.Module, args: tuple, output: object) -> None:
        if threading.get_ident() != thread or module not in names:
            return
        with torch._C.DisableTorchFunction():
            outputs = [t for t in tensors_of(output) if t.is_floating_point()]
            lost = outputs and not any(t.requires_grad for t in outputs) or ".quantized" in type(module).__module__
            given = [t for t in tensors_of(args) if not isinstance(t, nn.Parameter)]
            if lost and any(t.requires_grad for t in given):
                report(names[module] or type(module).__name__)

    hook = nn.modules.module.register_module_forward_hook(look)
    try:
        yield
    finally:
        hook.remove()


class Interception(TorchFunctionMode):
    """Sees every torch function: the parameters used last tell the layer, the embedding's input is the image.

    A subclass says in `attend` what becomes of a call of fused attention: (layer, call, name), the function and its
    arguments; what it returns goes on into the model. grid: known from before, for a model that is run from a block on.
    """

    def __init__(self, model: nn.Module, modules: list, grid: TokenGrid | None = None):
        super().__init__()
        self.model, self.grid, self.family = model, grid, family(model)
        self.layer: tuple[int, int, str] | None = None  # whose parameters were used last: (layer, call, name)
        self.parameters = {id(p): p for p in model.parameters()}  # held, or the ids of freed ones would be others' soon
        self.owner = dict.fromkeys(self.parameters)  # None: not an attention's
        self.owner |= {
            id(p): (i, j, name)
            for i, layer in enumerate(modules)
            for j, (name, module) in enumerate(layer)
            for p in module.parameters()
        }
        if (pool := self.family.pool) is not None:
            for module in (*self.family.before_pool, pool):
                self.owner |= {id(p): (POOL, 0, "attn_pool") for p in module.parameters()}
        self.embed = {id(p) for p in self.family.embedding.parameters()}
        self.pads, self.channels = self.family.pads, self.family.channels
        self.image: Tensor | None = None
        self.padded: dict[int, tuple[Tensor, Tensor]] = {}
        self.begun = False  # the first layer was seen: from now on the grid stays

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if THREAD.alone not in (None, self):
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention or func is spelled_out:
            return self._attention(func, *args, **kwargs)
        tensors = tensors_of([*args, *kwargs.values()])
        for tensor in tensors:
            if type(tensor) is not Tensor and isinstance(tensor, nn.Parameter):
                self.layer = self.owner.get(id(tensor))  # one of another model, which runs in between, ends the layer
        if not self.begun:
            with torch._C.DisableTorchFunction():
                self._look_for_image(tensors, args[0] if args else None)
        within = func is MULTIHEAD and self.layer is not None
        result = opened(self._attention, *args, **kwargs) if within else func(*args, **kwargs)
        if func is F.pad and self.pads and not self.begun:
            self.padded[id(result)] = (args[0], result)  # held, so that no other tensor takes its id
        return result

    def _look_for_image(self, tensors: list[Tensor], subject) -> None:
        """The image is the last (B, C, H, W) activation acted upon, before the embedding's own padding, when the
        embedding's parameters meet activations."""
        subject, _ = self.padded.get(id(subject), (subject, None))
        activation = isinstance(subject, Tensor) and not isinstance(subject, nn.Parameter)
        if activation and subject.dim() == 4 and subject.shape[1] == self.channels:
            self.image = subject
        parameters = {id(t) for t in tensors} & self.embed
        if self.image is not None and parameters and len(parameters) < len(tensors):
            self.grid = self.family.grid(tuple(self.image.shape[-2:]))

    def _attention(self, func, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **kwargs):
        where, self.layer = self.layer, None
        if where is None:  # somebody else's attention, or one that this interception, entered twice, handles above
            return func(query, key, value, attn_mask, dropout_p, is_causal, **kwargs)
        with torch._C.DisableTorchFunction():  # what is looked at here is no call of the model, for outer modes to see
            self.check(*where[:2], query, key, attn_mask, dropout_p, is_causal)
        self.image = None
        self.padded.clear()
        return self.attend(where, func, query, key, value, attn_mask, **kwargs)

    def check(self, index: int, call: int, query, key, mask: Tensor | None, dropout_p: float, is_causal: bool) -> None:
        """Raise UnsupportedModelError if a call is not one whose map can be shown."""
        grid, where = self.grid, "attention pool" if index == POOL else f"layer {index}"
        if grid is not None:
            expected = {grid.tokens, grid.patches} if index == POOL else {grid.tokens}
            keys = key.shape[-2]
            fits = query.dim() == 4 and keys in expected and (index == POOL or query.shape[-2] == keys)
        if len(query) == 0:
            reason = "the batch holds no images"
        elif torch._C._functorch.is_functorch_wrapped_tensor(query):
            reason = "it runs inside of a transform of torch.func (vmap, grad, jacrev); give it all images as one batch"
        elif dropout_p > 0:
            reason = f"{where} drops attention weights at random (dropout {dropout_p:g}); call model.eval() first"
        elif is_causal:
            reason = f"{where} was called with a causal mask, so later patches are hidden"
        elif mask is not None and not mask.is_meta and hides_all(mask):
            reason = (
                f"the mask of {where} hides all tokens from one of them, whose attention is then no distribution; let "
                "every token attend to one at least, itself for example"
            )
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
    """Whether the attention mask hides every key from some query."""
    seen = mask.any(-1) if mask.dtype == torch.bool else mask.amax(-1) > -torch.inf
    return not seen.all()
