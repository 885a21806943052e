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

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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


class Attention(Sequence):
    """The layers of one forward, first to last, the `grid` of its tokens, and the `pool` if it pools by attention.

    gated: attention outputs pass a learned gate afterwards, which the maps leave out. cuts: modules and layers that cut
    autograd's graph, so that `differentiate` raises.
    """

    def __init__(self, model: nn.Module, modules: list[list[tuple[str, nn.Module]]]):
        self.model_name = model_name(model)
        self.gated = has_gate(modules)
        self.grid: TokenGrid | None = None
        self.pool: Layer | None = None
        self._calls: list[list[Layer | None]] = [[None] * len(layer) for layer in modules]
        self.cuts: list[str] = []
        self._replaced: set[int] = set()

    @property
    def complete(self) -> bool:
        """True once the attention of every block is recorded."""
        return all(call is not None for calls in self._calls for call in calls)

    def __len__(self) -> int:
        return len(self._calls)

    def __getitem__(self, index):
        if not self.complete:
            raise RuntimeError(
                f"Nothing is recorded: no forward of {self.model_name} was completed inside the `with` block."
            )
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return join_heads(self._calls[layer_number(len(self), index)])

    def __getattr__(self, name: str):
        inside = name in {*dir(Layer), *Layer.__dataclass_fields__}
        of_layers = f" Its layers do, such as `attn[-1].{name}`." if inside else ""
        raise AttributeError(f"A capture has no attribute {name!r}.{of_layers}")

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
            parts = list(zip(score, ([calls] for calls in self._calls), strict=True))
        else:
            parts = [(score, [*self._calls, pool])]
        for number, groups in parts:
            outputs = [call.output for calls in groups for call in calls]
            gradients = torch.autograd.grad(
                number,
                [*outputs, *also],
                retain_graph=keep_graph,
                allow_unused=True,
                materialize_grads=True,
            )
            left = iter(gradients)
            for calls in groups:
                calls[:] = [
                    replace(call, output=call.output.detach(), gradient=next(left))
                    for call in calls
                ]
        self.pool = pool[0] if pool else None
        for number in (~self.reached().any(1)).nonzero()[:1].flatten().tolist():
            raise ValueError(no_gradient(self.model_name, "the score", number))
        return list(left)

    def reached(self) -> Tensor:
        """(L, B) booleans, False where a layer's gradient is all zero for an image and no head of it was replaced."""
        pairs = [(number in self._replaced, layer.gradient) for number, layer in enumerate(self)]
        return torch.stack([gradient.flatten(1).any(1) | replaced for replaced, gradient in pairs])

    def twin(self) -> Attention:
        """Copy of the layers, to be differentiated by another score."""
        other = copy.copy(self)
        other._calls = [list(calls) for calls in self._calls]
        return other

    def __repr__(self) -> str:
        state = f"{self.grid}" if self.complete else "no forward yet"
        return f"Attention({self.model_name}, {len(self)} layers, {state})"


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
    given, model = unwrap(model), transformer(model)
    modules = attention_modules(model)
    attn = Attention(model, modules)
    require_capturable(model)
    with (
        eager_mode(),
        _Recorder(model, modules, attn, values, gradients, wrapped=given is not model) as recorder,
        contextlib.ExitStack() as above,
    ):
        for hook in family(model).forward_checks():
            above.callback(hook.remove)
        if given is not model:
            above.enter_context(thread_hooks([(model.register_forward_hook, recorder.returned)]))
        for (
            intervention
        ) in THREAD.interventions:  # inside, so the recorder gets their masks and not their outputs
            above.enter_context(intervention)
        if gradients:
            above.enter_context(report_cuts(model, attn.cuts.append))
        yield attn
    if not attn.complete:
        reason = "it was not run to its last block inside the `with` block, in its thread and with its own parameters"
        raise refuse(model, replaced_forward(model, modules) or reason)


def replaced_forward(model: nn.Module, modules: list[list[tuple[str, nn.Module]]]) -> str | None:
    """Message for an attention module or a block whose `forward` is not its class's, or None."""
    blocks = [(f"block {number}", block) for number, block in enumerate(family(model).blocks)]
    for name, module in [*(pair for layer in modules for pair in layer), *blocks]:
        forward = getattr(module.forward, "__func__", module.forward)
        own = {kind.__module__ for kind in type(module).__mro__}
        if "forward" in vars(module) or getattr(forward, "__module__", None) not in own:
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
        self.attn, self.values, self.gradients = attn, values or gradients, gradients
        self.wrapped = wrapped

    def returned(self, _, args: tuple, output: object) -> None:
        if isinstance(getattr(output, "logits", output), Tensor):
            self.attn.grid = self.grid

    def check(self, index: int, call: int, *arguments) -> None:
        recorded = self.attn.pool if index == POOL else self.attn._calls[index][call]
        if recorded is not None:
            raise UnsupportedModelError(
                f"One capture holds one forward, but {self.attn.model_name} ran a second time inside the same `with` "
                "block. Open a new `with capture(model)` for each forward, or pass all images in one batch."
            )
        super().check(index, call, *arguments)

    def attend(self, where, func, query, key, value, mask, **kwargs) -> Tensor:
        index, call, name = where
        self.begun = True
        output = func(query, key, value, mask, **kwargs)
        if self.gradients and not output.requires_grad:
            if index != 0:
                self.attn.cuts.append(f"the attention of layer {index}")
            output.requires_grad_()  # the graph of a frozen model begins at its first layer
        if any(
            place[:2] == ("head", index) for mode in THREAD.interventions for place in mode.places
        ):
            self.attn._replaced.add(index)
        own = (
            torch.Tensor.detach if self.gradients else _compact_copy
        )  # autograd keeps q, k and v anyway
        scale = query.shape[-1] ** -0.5 if kwargs.get("scale") is None else float(kwargs["scale"])
        with torch._C.DisableTorchFunction():
            layer = Layer(
                name,
                own(query),
                own(all_heads(key, query)),
                scale,
                None if mask is None else mask.detach(),
                own(all_heads(value, query)) if self.values else None,
                output if self.gradients else own(output) if self.values else None,
                grid=None if index == POOL else self.grid,
            )
            if index == POOL:
                self.attn.pool, queries = layer, self.family.pool.queries
                row = None if queries is None else layer.weights(queries).mean((1, 2))
                readout = None if row is None else F.pad(row, (self.grid.tokens - row.shape[-1], 0))
                self.grid = replace(self.grid, readout=readout)
            else:
                self.attn._calls[index][call] = layer
            self.attn.grid = replace(self.grid, readout=None) if self.wrapped else self.grid
        return output


def _compact_copy(tensor: Tensor) -> Tensor:
    """The tensor, detached. A view is copied, because it would keep a larger tensor, such as a fused qkv, in memory."""
    tensor = tensor.detach()
    if (
        tensor.device.type == "meta"
        or tensor.untyped_storage().nbytes() <= tensor.numel() * tensor.element_size()
    ):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
