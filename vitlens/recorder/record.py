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
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from vitlens.recorder.forward import uncompiled
from vitlens.recorder.grid import TokenGrid
from vitlens.recorder.hooks import hooked
from vitlens.recorder.layer import Layer, all_heads, joined, layer_number
from vitlens.recorder.supported import (
    Registered,
    UnsupportedModelError,
    attention_modules,
    channels,
    family,
    gated,
    known,
    model_name,
    refuse,
    require_capturable,
    transformer,
    unwrap,
    within,
)

POOL = -1  # layer number of the attention pool


class _Thread(threading.local):
    """The thread's interventions, outermost first, and its only active interception, or None if all are active."""

    def __init__(self):
        self.interventions: list[TorchFunctionMode] = []
        self.alone: TorchFunctionMode | None = None


THREAD = _Thread()


@contextlib.contextmanager
def alone(interception: TorchFunctionMode) -> Iterator[None]:
    """Deactivate all other interceptions of this thread in this block."""
    before, THREAD.alone = THREAD.alone, interception
    try:
        yield
    finally:
        THREAD.alone = before


MULTIHEAD = F.multi_head_attention_forward


def explicit_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *_, scale: float = 1.0
) -> Tensor:
    """(B, H, Q, K) attention as `MULTIHEAD` computes it with need_weights=True, from scaled queries."""
    if has_torch_function((query, key, value)):
        return handle_torch_function(
            explicit_attention, (query, key, value), query, key, value, mask, scale=scale
        )
    return torch.bmm(_weights(query, key, mask), value.flatten(0, 1)).unflatten(0, query.shape[:2])


def _weights(query: Tensor, key: Tensor, mask: Tensor | None = None) -> Tensor:
    """(B·H, Q, T) softmax of the logits of scaled queries."""
    logits = torch.bmm(query.flatten(0, 1), key.flatten(0, 1).transpose(-2, -1))
    if mask is not None:  # an intervention's
        logits = logits.unflatten(0, query.shape[:2]).masked_fill(~mask, -torch.inf).flatten(0, 1)
    return logits.softmax(-1)


def multihead_attention(
    attend: Callable,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    width: int,
    heads: int,
    in_weight: Tensor,
    in_bias: Tensor | None,
    bias_k,
    bias_v,
    add_zero_attn: bool,
    dropout: float,
    out_weight: Tensor,
    out_bias: Tensor | None,
    training: bool = True,
    key_padding_mask=None,
    need_weights: bool = True,
    attn_mask=None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
    **separate,
) -> tuple[Tensor, Tensor | None]:
    """PyTorch's `multi_head_attention_forward` with attention computed by `attend`, the first argument.

    The operations and their order are PyTorch's, so outputs are equal bit for bit. PyTorch disables the fast path of
    `torch.nn.MultiheadAttention` (eval mode, no gradients) inside a mode. Its outputs differ from these by rounding.
    `torch.backends.mha.set_fastpath_enabled(False)` turns it off for good.
    """
    unsupported = (bias_k, bias_v, key_padding_mask, attn_mask)
    if (
        add_zero_attn
        or any(part is not None for part in unsupported)
        or query.dim() != 3
        or key is not value
    ):
        raise UnsupportedModelError(
            "torch.nn.MultiheadAttention is called with a mask, extra keys or without a batch."
        )
    length, batch, _ = query.shape
    if in_weight is None:
        biases = (None,) * 3 if in_bias is None else in_bias.chunk(3)
        matrices = (separate[f"{name}_proj_weight"] for name in "qkv")
        q, k, v = (
            F.linear(*inputs) for inputs in zip((query, key, value), matrices, biases, strict=True)
        )
    elif query is key:
        q, k, v = _unpacked(F.linear(query, in_weight, in_bias), 3, width)
    else:
        (w_q, w_kv), (b_q, b_kv) = in_weight.split([width, 2 * width]), (None, None)
        if in_bias is not None:
            b_q, b_kv = in_bias.split([width, 2 * width])
        q = F.linear(query, w_q, b_q)
        k, v = _unpacked(F.linear(key, w_kv, b_kv), 2, width)
    q, k, v = (
        t.view(len(t), batch * heads, -1).transpose(0, 1).unflatten(0, (batch, heads))
        for t in (q, k, v)
    )
    weights, dropout = None, dropout if training else 0.0
    if need_weights:
        q = q * math.sqrt(1.0 / float(q.shape[-1]))
        output = attend(explicit_attention, q, k, v, None, dropout, is_causal, scale=1.0)
        weights = _weights(q, k).unflatten(0, (batch, heads))
        weights = weights.mean(1) if average_attn_weights else weights
    else:
        output = attend(F.scaled_dot_product_attention, q, k, v, None, dropout, is_causal)
    output = output.permute(2, 0, 1, 3).reshape(batch * length, width)
    return F.linear(output, out_weight, out_bias).view(length, batch, -1), weights


def _unpacked(packed: Tensor, parts: int, width: int) -> Tensor:
    """(parts, T, B, D) projections from (T, B, parts·D)."""
    return (
        packed.unflatten(-1, (parts, width)).unsqueeze(0).transpose(0, -2).squeeze(-2).contiguous()
    )


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


@contextlib.contextmanager
def watching_graph(model: nn.Module, report: Callable[[str], object]) -> Iterator[None]:
    """Call `report` with the name of each module in which autograd's graph is cut, by no_grad, detach or quantized
    weights, so that autograd would return the gradients of another function.

    Only modules of the model that run in this block and thread count. A module cuts the graph if its input requires
    gradients and its output does not, or if it is a pre-norm block whose output is not its input plus the outputs of
    attention and MLP.
    """
    names, thread = {module: name for name, module in model.named_modules()}, threading.get_ident()
    inner = within(model)
    adapter = family(inner) if known(inner) else None
    pre_norm = (
        adapter is not None
        and not isinstance(adapter, Registered)
        and adapter.stream_problem is None
    )
    residual = {id(block) for block in adapter.blocks} if pre_norm else set()

    def check(module: nn.Module, args: tuple, output: object) -> None:
        if threading.get_ident() != thread or module not in names:
            return
        with torch._C.DisableTorchFunction():
            outputs = [t for t in tensors_of(output) if t.is_floating_point()]
            given = [
                t for t in tensors_of(args) if not isinstance(t, nn.Parameter) and t.requires_grad
            ]
            lost = (
                outputs
                and not any(t.requires_grad for t in outputs)
                or ".quantized" in type(module).__module__
            )
            if given and (lost or id(module) in residual and not _adds_to(given[0], outputs[0])):
                report(names[module] or type(module).__name__)

    with nn.modules.module.register_module_forward_hook(check):
        yield


def _adds_to(tokens: Tensor, output: Tensor) -> bool:
    """True if the output is the tokens plus terms that are all in autograd's graph."""
    start, nodes, complete = (
        torch.autograd.graph.get_gradient_edge(tokens).node,
        [output.grad_fn],
        False,
    )
    while nodes:
        node = nodes.pop()
        if node is None:
            return False
        complete |= node is start
        if node is not start and node.name() in ("AddBackward0", "ToCopyBackward0"):
            nodes += [following for following, _ in node.next_functions]
    return complete


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
        self.channels = channels(model)
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


class Attention(Sequence):
    """The layers of one forward, first to last, the `grid` of its tokens, and the `pool` if it pools by attention.

    gated: attention outputs pass a learned gate afterwards, which the maps leave out. cuts: modules and layers that cut
    autograd's graph, so that `differentiate` raises.
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
        return joined(self._calls[layer_number(len(self), index)])

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


def cut_graph(model: str, where: str) -> str:
    """Message for a module or layer that cuts autograd's graph."""
    return (
        f"Autograd's graph of {model} is cut in {where} (no_grad, detach or quantized weights), so gradients would be "
        "those of another function. Use a method without gradients, such as occlusion."
    )


def no_gradient(model: str, score: str, layer: int) -> str:
    """Message for a layer whose gradient is missing or all zero."""
    return (
        f"No gradient of {score} reaches the attention of layer {layer} of {model}, so its map would be blank: weights "
        "on the way are zero, as before training, or autograd's graph is cut (no_grad, detach). Use trained weights, "
        "or a method without gradients, such as occlusion."
    )


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
        uncompiled(),
        _Recorder(model, modules, attn, values, gradients, wrapped=given is not model) as recorder,
        contextlib.ExitStack() as above,
    ):
        for hook in family(model).forward_checks():
            above.callback(hook.remove)
        if given is not model:
            above.enter_context(hooked([(model.register_forward_hook, recorder.returned)]))
        for (
            intervention
        ) in THREAD.interventions:  # inside, so the recorder gets their masks and not their outputs
            above.enter_context(intervention)
        if gradients:
            above.enter_context(watching_graph(model, attn.cuts.append))
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
        own = torch.Tensor.detach if self.gradients else _own  # autograd keeps q, k and v anyway
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


def _own(tensor: Tensor) -> Tensor:
    """The tensor, detached. A view is copied, because it would keep a larger tensor, such as a fused qkv, in memory."""
    tensor = tensor.detach()
    if (
        tensor.device.type == "meta"
        or tensor.untyped_storage().nbytes() <= tensor.numel() * tensor.element_size()
    ):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
