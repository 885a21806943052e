"""Record the queries and keys that a model hands to fused attention, while it runs, changing nothing.

`torch.nn.functional.scaled_dot_product_attention` is watched for the length of a `with` block by a
`torch.overrides.TorchFunctionMode`. No module is patched and attention stays fused; rotary embeddings, query-key norms,
grouped queries, attention biases and masks are right for free, because they are already in q, k and mask.

Shapes: B batch, L layers, H heads, T tokens = R prefix + P patches, K head width.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitlens.recorder.families import (
    UnsupportedModelError,
    attention_modules,
    gated,
    model_name,
    refuse,
    refuse_chance,
    unwrap,
)
from vitlens.recorder.graph import Graph, require_gradients, tensors_of
from vitlens.recorder.grid import TokenGrid, patch_embedding, token_grid
from vitlens.recorder.layer import Layer, all_heads, joined
from vitlens.recorder.running import uncompiled

POOL = -1  # where the layers are numbered, the number of the attention pool


class Attention(Sequence):
    """The layers of one forward, first to last. `grid` tells where the tokens lie, `pool` is an attention pool's call.

    gated: attention outputs pass a learned gate on their way on, which the maps do not include.
    """

    def __init__(self, model: nn.Module, modules: list[list[tuple[str, nn.Module]]]):
        self.model_name = model_name(model)
        self.gated = gated(modules)
        self.grid: TokenGrid | None = None
        self.pool: Layer | None = None
        self._calls: list[list[Layer | None]] = [[None] * len(layer) for layer in modules]

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
        return joined(self._calls[index])

    def differentiate(
        self, score: Tensor | Sequence[Tensor], *, also: Sequence[Tensor] = (), keep_graph: bool = False
    ) -> list[Tensor]:
        """Give every layer, and an attention pool, its `gradient`: ∂score/∂output. Nobody's `.grad` is touched.

        score: one number made of the output of the forward that `capture(model, gradients=True)` recorded, such as
        `logits[:, 3].sum()`; or one number for each layer. also: other tensors of the graph, whose gradients by the
        last number are returned. keep_graph: for another score, of a `twin`; otherwise autograd's graph is released,
        and it can be done once. Raises RuntimeError for a score that autograd cannot trace back to the attention.
        """
        scores = [score] if isinstance(score, Tensor) else list(score)
        groups = [self._calls] if isinstance(score, Tensor) else [[calls] for calls in self._calls]
        if not all(s.requires_grad for s in scores) or not (self.complete and self[-1].output.requires_grad):
            raise RuntimeError(
                f"The score does not lead back to the attention of {self.model_name}. Run the model with autograd on, "
                "inside `with capture(model, gradients=True) as attn:`, and differentiate what it returned, once."
            )
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
        return list(gradients[len(outputs) :])

    def twin(self) -> Attention:
        """The same layers once more, to be differentiated by another score."""
        other = copy.copy(self)
        other._calls = [list(calls) for calls in self._calls]
        return other

    def __repr__(self) -> str:
        state = f"{self.grid}" if self.complete else "no forward yet"
        return f"Attention({self.model_name}, {len(self)} layers, {state})"


@contextlib.contextmanager
def capture(model: nn.Module, *, values: bool = False, gradients: bool = False) -> Iterator[Attention]:
    """Record the attention of one forward of a timm Vision Transformer.

        with capture(model) as attn:
            logits = model(images)          # bit for bit what it is without
        attn[0].weights()                   # (B, H, T, T)

    values: keep v and the fused output of every layer too. gradients: keep them, the outputs as part of autograd's
    graph, for `attn.differentiate(score)`; where nothing requires gradients (a frozen model), the graph begins at the
    first of the outputs, and a graph that is cut inside of the model is refused (`recorder.graph`). Raises
    UnsupportedModelError for a model, or for a call, that cannot be shown truthfully (`recorder.families`), and for a
    second forward in the same block. Compiled models run uncompiled meanwhile, in all threads. Works in several threads
    at once, each with its own block. Kept are q and k, so memory is linear in the tokens, except for models with dense
    attention biases (BEiT, relative positions): their biases are as large as the maps, and are kept too.
    """
    model = unwrap(model)
    modules = attention_modules(model)
    attn = Attention(model, modules)
    refuse_chance(model)
    if gradients:
        require_gradients(model)
    threads = set()
    with (
        modules[0][0][1].register_forward_pre_hook(lambda *_: threads.add(threading.get_ident())),
        uncompiled(),
        _Recorder(model, modules, attn, values, gradients),
    ):
        yield attn
    if not attn.complete:
        if not all(getattr(m, "fused_attn", True) for layer in modules for _, m in layer):
            reason = "fused attention is switched off in it; call timm.layers.set_fused_attn(True) and create it anew"
        elif threads - {threading.get_ident()}:
            reason = (
                "it was run in another thread, and a capture sees the thread that opened it alone; open the `with` "
                "block in the function that runs the model"
            )
        else:
            reason = (
                "it was not run to its last block inside the `with` block, or not with its own parameters "
                "(functional_call, quantized layers)"
            )
        raise refuse(model, reason)


class _Recorder(TorchFunctionMode):
    """Sees every torch function; knows the layer by the parameters seen last, the image by the embedding's input."""

    def __init__(self, model: nn.Module, modules: list, attn: Attention, values: bool, gradients: bool):
        super().__init__()
        self.model, self.attn, self.values, self.gradients = model, attn, values or gradients, gradients
        self.layer: tuple[int, int, str] | None = None  # whose parameters were used last: (layer, call, name)
        self.held = list(model.parameters())  # or ids of those that are freed meanwhile would be others' soon
        self.owner = dict.fromkeys(map(id, model.parameters()))  # None: not an attention's
        self.owner |= {
            id(p): (i, j, name)
            for i, layer in enumerate(modules)
            for j, (name, module) in enumerate(layer)
            for p in module.parameters()
        }
        if getattr(model, "attn_pool", None) is not None:  # the last norm announces a pool without parameters
            for module in (model.norm, model.attn_pool):
                self.owner |= {id(p): (POOL, 0, "attn_pool") for p in module.parameters()}
        embed = patch_embedding(model)
        self.graph = Graph(model, embed) if gradients else None
        self.embed = {id(p) for p in embed.parameters()}
        self.pads = hasattr(embed, "backbone") or getattr(embed, "dynamic_img_pad", False)
        self.image: Tensor | None = None
        self.padded: dict[int, tuple[Tensor, Tensor]] = {}
        self.begun = False  # the first layer was seen: from now on the grid stays

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attention(func, *args, **kwargs)
        tensors = tensors_of(args, kwargs)
        for tensor in tensors:  # a parameter of another model, which runs in between, ends the layer
            self.layer = self.owner.get(id(tensor), None if isinstance(tensor, nn.Parameter) else self.layer)
        if not self.begun:
            self._look_for_image(tensors, args[0] if args else None)
        result = func(*args, **kwargs)
        if self.graph is not None:
            self.graph.look(func, tensors, result)
        if func is F.pad and self.pads and not self.begun:
            self.padded[id(result)] = (args[0], result)  # held, so that no other tensor takes its id
        return result

    def _look_for_image(self, tensors: list[Tensor], subject) -> None:
        """The image is the last (B, C, H, W) activation acted upon, before the embedding's own padding, when the
        embedding's parameters meet activations."""
        subject, _ = self.padded.get(id(subject), (subject, None))
        activation = isinstance(subject, Tensor) and not isinstance(subject, nn.Parameter)
        if activation and subject.dim() == 4 and subject.shape[1] == self.model.in_chans:
            self.image = subject
        parameters = {id(t) for t in tensors} & self.embed
        if self.image is not None and parameters and len(parameters) < len(tensors):
            self.attn.grid = token_grid(self.model, tuple(self.image.shape[-2:]))

    def _attention(self, func, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **kwargs):
        where, self.layer = self.layer, None
        if where is None:  # somebody else's attention
            return func(query, key, value, attn_mask, dropout_p, is_causal, **kwargs)
        index, call, name = where
        self._check(index, call, query, key, attn_mask, dropout_p, is_causal)
        self.begun, self.image = True, None
        self.padded.clear()
        output = func(query, key, value, attn_mask, dropout_p, is_causal, **kwargs)
        if self.graph is not None:
            self.graph.look(func, [query, key, value], output, name)
            output.requires_grad_()
        own = torch.Tensor.detach if self.gradients else _own  # autograd holds q, k and v anyway
        scale = kwargs.get("scale")
        layer = Layer(
            name,
            own(query),
            own(all_heads(key, query)),
            query.shape[-1] ** -0.5 if scale is None else float(scale),
            None if attn_mask is None else attn_mask.detach(),
            own(all_heads(value, query)) if self.values else None,
            output if self.gradients else own(output) if self.values else None,
        )
        if index == POOL:
            self.attn.pool = layer
            self.attn.grid = replace(self.attn.grid, readout=_pool_readout(self.model, self.attn.grid, layer))
        else:
            self.attn._calls[index][call] = layer
        return output

    def _check(self, index: int, call: int, query, key, mask: Tensor | None, dropout_p: float, is_causal: bool) -> None:
        grid, where = self.attn.grid, "attention pool" if index == POOL else f"layer {index}"
        seen = self.attn.pool if index == POOL else self.attn._calls[index][call]
        if seen is not None:
            raise UnsupportedModelError(
                f"One capture holds one forward, but {self.attn.model_name} ran a second time inside the same `with` "
                "block. Open a new `with capture(model)` for each forward, or pass all images in one batch."
            )
        if len(query) == 0:
            raise refuse(self.model, "the batch holds no images")
        if torch._C._functorch.is_functorch_wrapped_tensor(query):
            raise refuse(
                self.model,
                "it runs inside of a transform of torch.func (vmap, grad, jacrev), which nothing can be kept of; give "
                "it all images as one batch, and open the capture around autograd's own functions instead",
            )
        if dropout_p > 0:
            raise refuse(
                self.model,
                f"{where} drops attention weights at random (dropout {dropout_p:g}), so no map is what it used; "
                "call model.eval() first",
            )
        if is_causal:
            raise refuse(self.model, f"{where} was called with a causal mask, so later patches are hidden")
        if mask is not None and not mask.is_meta and _hides_all(mask):
            raise refuse(
                self.model,
                f"the mask of {where} hides all tokens from one of them, whose attention is then no distribution; let "
                "every token attend to one at least, itself for example",
            )
        if grid is None:
            raise refuse(
                self.model,
                f"its input was not an image of shape (B, {self.model.in_chans}, height, width), so the grid of its "
                "patches is unknown; pass images, not ready-made patches or tokens",
            )
        expected = {grid.tokens, grid.patches} if index == POOL else {grid.tokens}
        keys = key.shape[-2]
        if query.dim() != 4 or keys not in expected or (index != POOL and query.shape[-2] != keys):
            raise refuse(
                self.model,
                f"{where} attends from {query.shape[-2]} to {keys} tokens, but an input of {grid.image[0]} × "
                f"{grid.image[1]} pixels has {grid.prefix} prefix tokens and {grid.rows} × {grid.cols} patches",
            )


def _hides_all(mask: Tensor) -> bool:
    """Whether the attention mask hides every key from some query."""
    seen = mask.any(-1) if mask.dtype == torch.bool else mask.amax(-1) > -torch.inf
    return not seen.all()


def _own(tensor: Tensor) -> Tensor:
    """Detached; copied where it is a view of something larger (q is a third of a fused qkv, which would stay alive)."""
    tensor = tensor.detach()
    if tensor.device.type == "meta" or tensor.untyped_storage().nbytes() <= tensor.numel() * tensor.element_size():
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _pool_readout(model: nn.Module, grid: TokenGrid, pool: Layer) -> Tensor | None:
    """(B, T) what an attention pool reads: its own attention, averaged over heads; None if it has T queries (PRR)."""
    if not hasattr(model.attn_pool, "latent_len"):
        return None
    latents = slice(0, 1) if model.attn_pool.pool == "token" else slice(None)
    row = pool.weights(latents).mean((1, 2))
    return F.pad(row, (grid.tokens - row.shape[-1], 0))
