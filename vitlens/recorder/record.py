"""Record the queries and keys that a model passes to fused attention, without changing the model or its outputs.

In a `with` block, a `torch.overrides.TorchFunctionMode` intercepts the calls of
`torch.nn.functional.scaled_dot_product_attention` in one thread. No module is patched and attention stays fused. Rotary
embeddings, query-key norms, grouped queries, attention biases and masks need no code here, because they are already in
q, k and mask.

Shapes: B batch, L layers, H heads, T tokens = R prefix + P patches, K head width.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlens.names import listed_names
from vitlens.recorder.forward import eager_mode
from vitlens.recorder.graph import cut_graph, no_gradient, report_cuts
from vitlens.recorder.grid import TokenGrid
from vitlens.recorder.hooks import thread_hooks
from vitlens.recorder.interception import POOL, THREAD, Interception
from vitlens.recorder.layer import Layer, all_heads, join_heads, layer_number
from vitlens.recorder.supported import (
    UnsupportedModelError,
    attention_modules,
    family,
    has_gate,
    model_name,
    refuse,
    require_capturable,
    transformer,
    unwrap,
)


class Attention(Sequence[Layer]):
    """A capture: the layers of one forward, first to last, each a `Layer`, by their numbers. `capture` makes it.

    >>> len(attn), attn[5].q.shape, attn.grid.patches
    (12, torch.Size([2, 3, 197, 64]), 196)

    model_name: the model's architecture and class. grid: the `TokenGrid` of the forward. pool: the `Layer` of an
    attention pool, or None. gated: True if attention outputs pass a learned gate afterwards, which the maps leave out.
    cuts: modules and layers that cut autograd's graph, so that `differentiate` raises.
    """

    def __init__(self, model: nn.Module, modules: list[list[tuple[str, nn.Module]]]):
        self.model_name = model_name(model)
        self.gated = has_gate(modules)
        self.grid: TokenGrid | Any = None  # Any stands for None, before the forward
        self.pool: Layer | None = None
        # by layer, its attention calls, several in a parallel block, None before they ran
        self._calls: list[list[Layer | None]] = [[None] * len(layer) for layer in modules]
        self.cuts: list[str] = []
        # layers in which an intervention replaced the output of a head
        self._replaced: set[int] = set()

    @property
    def complete(self) -> bool:
        """True once the attention of every block is recorded."""
        return not self.missing

    @property
    def missing(self) -> list[tuple[int, int]]:
        """(layer, number in the layer) of each attention module that is not recorded yet."""
        missing = []
        for index, calls in enumerate(self._calls):
            missing += [(index, call) for call, layer in enumerate(calls) if layer is None]
        return missing

    def __len__(self) -> int:
        return len(self._calls)

    @overload
    def __getitem__(self, index: int) -> Layer: ...

    @overload
    def __getitem__(self, index: slice) -> list[Layer]: ...

    def __getitem__(self, index):
        if not self.complete:
            raise RuntimeError(
                f"Nothing is recorded: no forward of {self.model_name} was completed inside the `with` block."
            )
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return join_heads(self._calls[layer_number(len(self), index)])

    if not TYPE_CHECKING:  # to a type checker, it would be an attribute of any name

        def __getattr__(self, name: str):
            message = f"A capture has no attribute {name!r}."
            if name in dir(Layer) or name in Layer.__dataclass_fields__:
                message += f" Its layers do, such as `attn[-1].{name}`."
            raise AttributeError(message)

    def differentiate(
        self,
        score: Tensor | Sequence[Tensor],
        *,
        also: Sequence[Tensor] = (),
        keep_graph: bool = False,
    ) -> list[Tensor]:
        """Set the `gradient`, ∂score/∂output, of every layer and of an attention pool. `.grad` stays unchanged.

        score: one number computed from the output of the forward that `capture(model, gradients=True)` recorded, such
        as `logits[:, 3].sum()`, or one number for each layer. also: other tensors of the graph, whose gradients of the
        last number are returned. keep_graph: keep the graph for another score of a `twin`. By default it is freed, so
        `differentiate` works once. Raises ValueError for a layer whose gradient is missing or all zero,
        UnsupportedModelError for a forward that cut autograd's graph, and RuntimeError for a score that autograd cannot
        trace back to the attention.
        """
        if not (self.complete and getattr(self[-1].output, "requires_grad", False)):
            raise RuntimeError(
                f"The score does not lead back to the attention of {self.model_name}. Run the model with autograd on, "
                "inside `with capture(model, gradients=True) as attn:`, and differentiate what it returned, once."
            )
        if self.cuts:
            raise UnsupportedModelError(cut_graph(self.model_name, self.cuts[0]))
        pool = [self.pool] if self.pool is not None else []
        if isinstance(score, Sequence):
            for number, calls in zip(score, self._calls, strict=True):
                gradients = _set_gradients(number, [calls], also, keep_graph)
        else:
            gradients = _set_gradients(score, [*self._calls, pool], also, keep_graph)
        self.pool = pool[0] if pool else None
        for number, reached in enumerate(self.has_gradient().any(1).tolist()):
            if not reached:
                raise ValueError(no_gradient(self.model_name, "the score", number))
        return gradients

    def has_gradient(self) -> Tensor:
        """(L, B) booleans, False where a layer's gradient is all zero for an image and no head of it was replaced."""
        layers = []
        for number, layer in enumerate(self):
            nonzero = layer.gradient.flatten(1).any(1)
            layers.append(nonzero | (number in self._replaced))
        return torch.stack(layers)

    def twin(self) -> Attention:
        """Copy of the layers, to be differentiated by another score."""
        other = copy.copy(self)
        other._calls = [list(calls) for calls in self._calls]
        return other

    def __dir__(self) -> list[str]:
        return listed_names(self, ("differentiate", "gated", "grid", "model_name", "pool"))

    def __repr__(self) -> str:
        state = self.grid if self.complete else "no forward yet"
        return f"Attention({self.model_name}, {len(self)} layers, {state})"


def _set_gradients(
    score: Tensor, groups: list[list[Layer]], also: Sequence[Tensor], keep_graph: bool
) -> list[Tensor]:
    """Replace the layers in the lists by those with their gradients. Returns the gradients of the tensors in `also`."""
    outputs = [layer.output for layers in groups for layer in layers]
    gradients = torch.autograd.grad(
        score,
        [*outputs, *also],
        retain_graph=keep_graph,
        allow_unused=True,
        materialize_grads=True,
    )
    remaining = iter(gradients)
    for layers in groups:
        for index, layer in enumerate(layers):
            output = layer.output.detach()
            layers[index] = replace(layer, output=output, gradient=next(remaining))
    return list(remaining)


@contextlib.contextmanager
def capture(
    model: nn.Module, *, values: bool = False, gradients: bool = False
) -> Iterator[Attention]:
    """Record the attention of one forward of a Vision Transformer.

    >>> with torch.no_grad(), vitlens.capture(model) as attn:
    ...     logits = model(images)  # equal to those without a capture, bit for bit
    >>> attn[5].weights(head=2, query=(3, 4)).shape  # attention of one patch to all tokens, in each image
    torch.Size([2, 197])

    model: a supported model, or a module that contains exactly one and runs it. If such a module pools the tokens
    itself, the grid has no read-out. The grid lies on the images that the Vision Transformer receives, which the module
    may have cropped or flipped.
    values: also keep v and the fused output of every layer. gradients: keep them with the outputs in autograd's graph,
    for `attn.differentiate(score)`. In a frozen model the graph begins at the first of these outputs. Raises
    UnsupportedModelError for a model or call whose attention cannot be shown exactly, and for a second forward in the
    same block. In this block compiled models run eagerly, in all threads. Several threads may each have their own
    block. Memory grows linearly with the tokens, except for dense attention biases (BEiT, relative positions), which
    are as large as the maps.
    """
    outer = unwrap(model)
    model = transformer(model)
    wrapped = outer is not model
    modules = attention_modules(model)
    attn = Attention(model, modules)
    require_capturable(model)
    recorder = _Recorder(model, modules, attn, values, gradients, wrapped)
    with eager_mode(), recorder.witness.watching(), recorder, contextlib.ExitStack() as inner:
        for hook in family(model).forward_checks():
            inner.callback(hook.remove)
        if wrapped:
            inner.enter_context(
                thread_hooks([(model.register_forward_hook, recorder.restore_readout)])
            )
        for intervention in THREAD.interventions:
            # inside the recorder, so that it gets their masks and not their outputs
            inner.enter_context(intervention)
        if gradients:
            inner.enter_context(report_cuts(model, attn.cuts.append))
        yield attn
    if not attn.complete:
        reason = _replaced_forward(model, modules) or recorder.witness.reason(attn.missing)
        raise refuse(model, reason)


def _replaced_forward(model: nn.Module, modules: list[list[tuple[str, nn.Module]]]) -> str | None:
    """Message for an attention module or a block whose `forward` is not its class's, or None."""
    named = [pair for layer in modules for pair in layer]
    for number, block in enumerate(family(model).blocks):
        named.append((f"block {number}", block))
    for name, module in named:
        forward = getattr(module.forward, "__func__", module.forward)
        files = {kind.__module__ for kind in type(module).__mro__}
        if "forward" in vars(module) or getattr(forward, "__module__", None) not in files:
            return (
                f"the forward of {name} was replaced, and the new one does not call scaled_dot_product_attention with "
                "its own parameters; put back the class's own (`del module.forward`), or let the new one call it"
            )
    return None


class _Recorder(Interception):
    """Stores the layers of one forward in `attn`.

    wrapped: the model is a part of a module that may pool the tokens itself. Its grid then has no read-out, unless the
    forward of the part returns one tensor, its own logits or features.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: list,
        attn: Attention,
        values: bool,
        gradients: bool,
        wrapped: bool,
    ):
        super().__init__(model, modules)
        self.attn = attn
        self.values = values or gradients
        self.gradients = gradients
        self.wrapped = wrapped

    def restore_readout(self, module: nn.Module, args: tuple, output: object) -> None:
        """Hook of a model inside a module, called with its own output."""
        if isinstance(getattr(output, "logits", output), Tensor):
            self.attn.grid = self.grid

    def require_first(self, index: int, call: int) -> None:
        recorded = self.attn.pool if index == POOL else self.attn._calls[index][call]
        if recorded is not None:
            raise UnsupportedModelError(
                f"One capture holds one forward, but {self.attn.model_name} ran a second time inside the same `with` "
                "block. Open a new `with capture(model)` for each forward, or pass all images in one batch."
            )

    def attend(self, where, func, query, key, value, mask, **kwargs) -> Tensor:
        index, call, name = where
        self.begun = True
        output = func(query, key, value, mask, **kwargs)
        if self.gradients and not output.requires_grad:
            if index != 0:
                self.attn.cuts.append(f"the attention of layer {index}")
            output.requires_grad_()  # the graph of a frozen model begins at its first layer
        places = [place for intervention in THREAD.interventions for place in intervention.places]
        if any((place.kind, place.layer) == ("head", index) for place in places):
            self.attn._replaced.add(index)
        scale = kwargs.get("scale")
        with torch._C.DisableTorchFunction():
            layer = Layer(
                name,
                self._detach(query),
                self._detach(all_heads(key, query)),
                query.shape[-1] ** -0.5 if scale is None else float(scale),
                None if mask is None else mask.detach(),
                grid=None if index == POOL else self.grid,
            )
            if self.values:
                layer = replace(
                    layer,
                    v=self._detach(all_heads(value, query)),
                    output=output if self.gradients else self._detach(output),
                )
            if index == POOL:
                self.attn.pool = layer
                self.grid = replace(self.grid, readout=self._pool_readout(layer))
            else:
                self.attn._calls[index][call] = layer
            self.attn.grid = replace(self.grid, readout=None) if self.wrapped else self.grid
        return output

    def _detach(self, tensor: Tensor) -> Tensor:
        """The tensor as a capture stores it. Autograd keeps q, k and v anyway, so their copies would save nothing."""
        return tensor.detach() if self.gradients else _compact_copy(tensor)

    def _pool_readout(self, pool: Layer) -> Tensor | None:
        """(B, T) read-out of an attention pool, 0 at prefix tokens that are not pooled. None without a single row."""
        queries = self.family.pool.queries
        if queries is None:
            return None
        row = pool.weights(queries).mean((1, 2))
        skipped = self.grid.tokens - row.shape[-1]
        return F.pad(row, (skipped, 0))


def _compact_copy(tensor: Tensor) -> Tensor:
    """The tensor, detached. A view is copied, because it would keep a larger tensor, such as a fused qkv, in memory."""
    tensor = tensor.detach()
    if tensor.device.type == "meta":
        return tensor
    own_bytes = tensor.numel() * tensor.element_size()
    if tensor.untyped_storage().nbytes() <= own_bytes:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
