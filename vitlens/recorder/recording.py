"""Record the queries and keys that a model hands to fused attention, while it runs, changing nothing.

Its calls are seen by an `Interception`. No module is patched and attention stays fused; rotary embeddings, query-key
norms, grouped queries, attention biases and masks are right for free, because they are already in q, k and mask.

Shapes: B batch, L layers, H heads, T tokens = R prefix + P patches, K head width.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from vitlens.recorder.arguments import layer_number
from vitlens.recorder.grid import TokenGrid
from vitlens.recorder.interception import POOL, THREAD, Interception, watching_graph
from vitlens.recorder.layer import Layer, all_heads, joined
from vitlens.recorder.running import uncompiled
from vitlens.recorder.supported import (
    UnsupportedModelError,
    attention_modules,
    family,
    gated,
    model_name,
    refuse,
    refuse_chance,
    unwrap,
)


class Attention(Sequence):
    """The layers of one forward, first to last, the `grid` of its tokens, and the `pool` if it pools by attention.

    gated: attention outputs pass a learned gate afterwards, which the maps do not include. cuts: modules and layers in
    which the forward left autograd's graph, which `differentiate` refuses.
    """

    def __init__(self, model: nn.Module, modules: list[list[tuple[str, nn.Module]]]):
        self.model_name = model_name(model)
        self.gated = gated(modules)
        self.grid: TokenGrid | None = None
        self.pool: Layer | None = None
        self._calls: list[list[Layer | None]] = [[None] * len(layer) for layer in modules]
        self.cuts: list[str] = []
        self._replaced: set[int] = set()

    @property
    def complete(self) -> bool:
        """True once every block's attention has been seen."""
        return all(call is not None for calls in self._calls for call in calls)

    def __len__(self) -> int:
        return len(self._calls)

    def __getitem__(self, index):
        if not self.complete:
            raise RuntimeError(
                f"Nothing to show yet: no forward of {self.model_name} was completed inside the `with` block. "
                "Write `with capture(model) as attn: model(images)`, then use `attn`."
            )
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return joined(self._calls[layer_number(len(self), index)])

    def differentiate(
        self, score: Tensor | Sequence[Tensor], *, also: Sequence[Tensor] = (), keep_graph: bool = False
    ) -> list[Tensor]:
        """Set the `gradient`, ∂score/∂output, of every layer and of an attention pool. No `.grad` is touched.

        score: one number computed from the output of the forward that `capture(model, gradients=True)` recorded, such
        as `logits[:, 3].sum()`; or one number for each layer. also: other tensors of the graph, whose gradients of the
        last number are returned. keep_graph: keep the graph for another score of a `twin`; by default it is freed, so
        this can be done once. Raises ValueError for what is no such score and for a layer whose gradient is missing or
        all zero, UnsupportedModelError for a forward that left autograd's graph on the way, and RuntimeError for a
        score that autograd cannot trace back to the attention.
        """
        each = isinstance(score, Sequence)
        scores = list(score) if each else [score]
        groups = [[calls] for calls in self._calls] if each else [self._calls]
        if len(scores) != len(groups) or not all(isinstance(s, Tensor) and s.numel() == 1 for s in scores):
            came = f"shape {tuple(score.shape)}" if isinstance(score, Tensor) else f"{score!r:.80}"
            raise ValueError(
                f"A score is a tensor of one number, such as `logits[:, 3].sum()`, or a list of {len(self)}, one for "
                f"each layer, got {came}."
            )
        attached = self.complete and getattr(self[-1].output, "requires_grad", False)
        if not attached or not all(s.requires_grad for s in scores):
            raise RuntimeError(
                f"The score does not lead back to the attention of {self.model_name}. Run the model with autograd on, "
                "inside `with capture(model, gradients=True) as attn:`, and differentiate what it returned, once."
            )
        if self.cuts:
            raise UnsupportedModelError(cut_graph(self.model_name, self.cuts[0]))
        for number, group in zip(scores, groups, strict=True):
            found = [call for calls in group for call in calls]
            pool = [self.pool] if self.pool is not None and len(groups) == 1 else []
            outputs = [call.output for call in found + pool]
            gradients = torch.autograd.grad(
                number, [*outputs, *also], retain_graph=keep_graph, allow_unused=True, materialize_grads=True
            )
            done = iter(
                replace(call, output=call.output.detach(), gradient=gradient)
                for call, gradient in zip(found + pool, gradients, strict=False)
            )
            for calls in group:
                calls[:] = [next(done) for _ in calls]
            self.pool = next(done, self.pool)
        for number in (~self.reached().any(1)).nonzero()[:1].flatten().tolist():
            raise ValueError(no_gradient(self.model_name, "the score", number))
        return list(gradients[len(outputs) :])

    def reached(self) -> Tensor:
        """(L, B) False where a layer's gradient is all zero for an image. Layers with heads off count as reached."""
        pairs = [(number in self._replaced, layer.gradient) for number, layer in enumerate(self)]
        return torch.stack([gradient.flatten(1).any(1) | replaced for replaced, gradient in pairs])

    def twin(self) -> Attention:
        """The same layers once more, to be differentiated by another score."""
        other = copy.copy(self)
        other._calls = [list(calls) for calls in self._calls]
        return other

    def __repr__(self) -> str:
        state = f"{self.grid}" if self.complete else "no forward yet"
        return f"Attention({self.model_name}, {len(self)} layers, {state})"


def cut_graph(model: str, where: str) -> str:
    """Message for a forward that left autograd's graph in a module or layer."""
    return (
        f"Autograd's graph of {model} is cut in {where} (no_grad, detach or quantized weights), so gradients would be "
        "those of another function. Let the whole forward be part of the graph, or use a method without gradients."
    )


def no_gradient(model: str, score: str, layer: int) -> str:
    """Message for a layer whose gradient is missing or all zero."""
    return (
        f"No gradient of {score} reaches the attention of layer {layer} of {model}, so its map would be blank. The "
        "weights of the head or of the layer's projection are zero, as before training, or autograd's graph is cut on "
        "the way (no_grad, detach). Use trained weights, or a method without gradients, such as occlusion."
    )


@contextlib.contextmanager
def capture(model: nn.Module, *, values: bool = False, gradients: bool = False) -> Iterator[Attention]:
    """Record the attention of one forward of a Vision Transformer.

        with capture(model) as attn:
            logits = model(images)          # bit for bit what it is without
        attn[0].weights()                   # (B, H, T, T)

    values: keep v and the fused output of every layer too. gradients: keep them, the outputs as part of autograd's
    graph, for `attn.differentiate(score)`; where nothing requires gradients (a frozen model), the graph begins at the
    first of the outputs, and `differentiate` refuses a graph that is cut inside of the model. Raises
    UnsupportedModelError for a model, or for a call, that cannot be shown truthfully (`recorder.supported`), and for a
    second forward in the same block. Compiled models run uncompiled meanwhile, in all threads. Works in several threads
    at once, each with its own block. Kept are q and k, so memory is linear in the tokens, except for models with dense
    attention biases (BEiT, relative positions): their biases are as large as the maps, and are kept too.
    """
    model = unwrap(model)
    modules = attention_modules(model)
    attn = Attention(model, modules)
    refuse_chance(model)
    threads = set()
    with (
        modules[0][0][1].register_forward_pre_hook(lambda *_: threads.add(threading.get_ident())),
        uncompiled(),
        _Recorder(model, modules, attn, values, gradients),
        contextlib.ExitStack() as above,
    ):
        for hook in family(model).watch():
            above.callback(hook.remove)
        for intervention in THREAD.interventions:  # above the recorder: it sees their masks, and not their outputs
            above.enter_context(intervention)
        if gradients:
            above.enter_context(watching_graph(model, attn.cuts.append))
        yield attn
    if not attn.complete:
        elsewhere = "it was run in another thread; open the capture in the thread that runs the model"
        other = (
            "it was not run to its last block inside the `with` block, or not with its own parameters "
            "(functional_call, quantized layers)"
        )
        raise refuse(model, family(model).blind or (elsewhere if threads - {threading.get_ident()} else other))


class _Recorder(Interception):
    """Keeps the layers of one forward in `attn`."""

    def __init__(self, model: nn.Module, modules: list, attn: Attention, values: bool, gradients: bool):
        super().__init__(model, modules)
        self.attn, self.values, self.gradients = attn, values or gradients, gradients

    def check(self, index: int, call: int, *arguments) -> None:
        seen = self.attn.pool if index == POOL else self.attn._calls[index][call]
        if seen is not None:
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
        if any(place[:2] == ("head", index) for mode in THREAD.interventions for place in mode.places):
            self.attn._replaced.add(index)
        with torch._C.DisableTorchFunction():
            layer = self._layer(name, query, key, value, mask, kwargs.get("scale"), output)
        if index == POOL:
            self.attn.pool = layer
            self.attn.grid = replace(self.grid, readout=self.family.pool_readout(layer.weights, self.grid))
        else:
            self.attn.grid = self.grid
            self.attn._calls[index][call] = layer
        return output

    def _layer(self, name: str, query, key, value, mask: Tensor | None, scale: float | None, output: Tensor) -> Layer:
        own = torch.Tensor.detach if self.gradients else _own  # autograd holds q, k and v anyway
        return Layer(
            name,
            own(query),
            own(all_heads(key, query)),
            query.shape[-1] ** -0.5 if scale is None else float(scale),
            None if mask is None else mask.detach(),
            own(all_heads(value, query)) if self.values else None,
            output if self.gradients else own(output) if self.values else None,
        )


def _own(tensor: Tensor) -> Tensor:
    """Detached, and copied if it is a view of something larger: q is a third of a fused qkv, which would stay alive."""
    tensor = tensor.detach()
    if tensor.device.type == "meta" or tensor.untyped_storage().nbytes() <= tensor.numel() * tensor.element_size():
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
