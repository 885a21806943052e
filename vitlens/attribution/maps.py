"""Maps of a target from one forward and one backward, and the functions that all methods share.

Parameters enter every torch function detached. So autograd stores nothing for them, frozen models work like any other,
`.grad` and `requires_grad` do not change, and threads do not interfere.

Shapes: B batch, L layers, H heads, T tokens, Q queries of one block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitlens import attention
from vitlens.attribution.target import Target, bound, of_features, resolved
from vitlens.models.classes import require_classes
from vitlens.recorder.forward import (
    eval_mode,
    pooled_features,
    require_images,
    run,
    without_checkpointing,
)
from vitlens.recorder.graph import cut_graph, no_gradient, report_cuts
from vitlens.recorder.hooks import thread_hooks
from vitlens.recorder.layer import Layer, layer_number
from vitlens.recorder.precision import full_precision
from vitlens.recorder.record import Attention, capture
from vitlens.recorder.shapes import repr_with_shapes
from vitlens.recorder.supported import (
    UnsupportedModelError,
    attention_modules,
    family,
    model_name,
    transformer,
    unwrap,
)

Hook = tuple[Callable, Callable]
"""(method of a module that registers hooks, hook)."""


@dataclass(frozen=True)
class Explained:
    """One forward and one backward, from which the quick methods make their maps: `relevance(explained(…))`.

    attn: the capture, with the gradient of the score in each layer. output: (B, classes) logits, or (B, D) features.
    target: the explained class or function. readings: the same capture, with the gradient in each layer of the score
    read right after it. inputs: by layer, the input (B, T, C) of its attention, and the score's gradient by it.
    """

    attn: Attention
    output: Tensor | None = None
    target: Target | None = None
    readings: Attention | None = None
    inputs: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    __repr__ = repr_with_shapes


def explained(
    model: nn.Module | Attention | Explained,
    images: Tensor | None = None,
    target: object = None,
    *,
    against: object = None,
    names: Sequence[str] | None = None,
    needs: Collection[str] = ("gradients",),
    layer: int = -1,
) -> Explained:
    """`Explained`: one forward and one backward, from which several methods make their maps.

    >>> run = vitlens.attribution.explained(model, images, needs={"gradients", "readings"})
    >>> vitlens.attribution.relevance(run).shape, vitlens.attribution.legrad(run).shape
    (torch.Size([2, 14, 14]), torch.Size([2, 14, 14]))

    model, images, target, against, names: as in `help(vitlens.attribution)`. model may also be a capture that was
    differentiated, or an `Explained`, which is returned. needs: any of "capture", "gradients", "readings" and "inputs"
    (fields of `Explained`). layer: the layer of the inputs. Raises ValueError for a capture without gradients.
    """
    if isinstance(model, Explained):
        return model
    if isinstance(model, Attention):
        if model[-1].gradient is None and {*needs} != {"capture"}:
            raise ValueError(
                "The capture has no gradients. Run `with capture(model, gradients=True) as attn: "
                "logits = model(images)` and `attn.differentiate(logits[:, 3].sum())`, or pass model and images."
            )
        return Explained(model)
    needs = set(needs)
    backward = bool(needs & {"gradients", "readings", "inputs"})
    model, images, target, against = checked(model, images, target, against)
    blocks, modules = family(transformer(model)).blocks, attention_modules(transformer(model))
    layer = layer_number(len(modules), layer)
    tokens, given, hooks = [], [], []
    if "readings" in needs:
        hooks += [
            (block.register_forward_hook, lambda _, args, output: tokens.append(output))
            for block in blocks
        ]
    if "inputs" in needs:
        hooks += _keep_inputs(blocks[layer], modules[layer], given)
    readings, inputs = None, {}
    with explaining(model, gradients=backward):
        with thread_hooks(hooks):
            attn, output = captured(model, images, of_features(target), gradients=backward)
        target = resolved(model, output, target, against, names)
        if backward:
            target.require_slope(output.detach())
        if "readings" in needs:
            readings = _read(model, attn, tokens, output, target, keep_graph=needs != {"readings"})
        if needs & {"gradients", "inputs"}:
            by_given = attn.differentiate(target.score(output).sum(), also=given)
            require_layers(model, target, attn.has_gradient())
            if given:
                inputs[layer] = torch.cat(given, -1).detach(), torch.cat(by_given, -1)
    return Explained(attn, output.detach(), target, readings, inputs)


def _keep_inputs(
    block: nn.Module, modules: list[tuple[str, nn.Module]], given: list[Tensor]
) -> Iterator[Hook]:
    """Hooks that append the inputs of a block's attention, in a graph that begins with the block at the latest."""

    def begin(_, args: tuple) -> tuple:
        return args if args[0].requires_grad else (args[0].detach().requires_grad_(), *args[1:])

    yield block.register_forward_pre_hook, begin
    for _, module in modules:
        if hasattr(
            module, "in_norm"
        ):  # a ParallelScalingBlock is the attention, and its input is its norm's output
            yield module.in_norm.register_forward_hook, lambda _, args, output: given.append(output)
        else:
            with_names = partial(module.register_forward_pre_hook, with_kwargs=True)
            yield (
                with_names,
                lambda _, args, named: given.append(args[0] if args else named["hidden_states"]),
            )


def _read(
    model: nn.Module,
    attn: Attention,
    tokens: list[Tensor],
    output: Tensor,
    target: Target,
    *,
    keep_graph: bool,
) -> Attention:
    """A twin of the capture with the gradients, layer by layer, of the score read right after the layer by the model's
    final norm, pooling and head."""
    inner, readings = transformer(model), attn.twin()
    outputs = [family(inner).head(leaving, pre_logits=target.of_features) for leaving in tokens]
    require_own_head(model, outputs[-1], output)
    readings.differentiate([target.score(read).sum() for read in outputs], keep_graph=keep_graph)
    require_layers(model, target, readings.has_gradient())
    return readings


def require_own_head(model: nn.Module, read: Tensor, output: Tensor) -> None:
    """Raise ValueError for a module with another head than its Vision Transformer's."""
    if transformer(model) is not model and not torch.equal(read, output):
        raise ValueError(
            f"Every layer is read with the Vision Transformer's own head, but {model_name(model)} has another one. "
            "Give the Vision Transformer itself, or use another method, such as relevance or grad_cam."
        )


def checked(
    model: nn.Module, images: Tensor, target: object = None, against: object = None
) -> tuple[nn.Module, Tensor, object, object]:
    """The unwrapped model, the images on its device and in its dtype, and the `bound` target and contrast.

    Raises for a model or images that cannot be explained.
    """
    model = unwrap(model)
    attention_modules(model if of_features(target) else transformer(model))
    target, against = bound(model, target, against)
    require_images(images, model)
    with torch.inference_mode(False):
        images = images.clone() if images.is_inference() else images.detach()
        return model, images.to(next(model.parameters())), target, against


def outputs_of(model: nn.Module, images: Tensor, features: bool) -> Tensor:
    """(B, classes) logits, or (B, D) features: the input of the classifier, or the output of a model without one."""
    return pooled_features(unwrap(model), images) if features else run(model, images)


def captured(
    model: nn.Module, images: Tensor, features: bool = False, **options
) -> tuple[Attention, Tensor]:
    """A capture of the Vision Transformer that `model` is or wraps, and the outputs of `model`.

    options: those of `capture`. Raises ValueError if a wrapper resizes the images, because maps would not fit them.
    """
    inner, returned = transformer(model), [None]
    keep = (
        inner.register_forward_hook,
        lambda _, args, output: returned.append(getattr(output, "logits", output)),
    )
    with thread_hooks([keep]), capture(model, **options) as attn:
        output = outputs_of(model, images, features)
    if inner is model:
        return attn, output
    if returned[-1] is output:
        require_classes(inner)
    if attn.grid.image != tuple(images.shape[-2:]):
        raise ValueError(
            f"{model_name(model)} resizes images of {tuple(images.shape[-2:])} to {attn.grid.image} pixels, so the map "
            "would not lie on them. Resize the images first."
        )
    return attn, output


@contextlib.contextmanager
def explaining(
    model: nn.Module, *, gradients: bool = True, constants: Constants | None = None
) -> Iterator[None]:
    """Run the model in eval mode in this block, with gradients by activations. Restores its mode afterwards.

    constants: the mode that makes its parameters constants, by default `Constants(model)` with the check that a forward
    stays in autograd's graph.
    """

    def refuse(where: str) -> None:
        raise UnsupportedModelError(cut_graph(model_name(model), where))

    # Checkpointing would run the blocks again, in the threads of the backward pass.
    modes = [
        eval_mode(model),
        without_checkpointing(transformer(model)),
        torch.inference_mode(False),
    ]
    modes.append(torch.enable_grad() if gradients else torch.no_grad())
    if gradients:
        modes += [constants] if constants else [Constants(model), report_cuts(model, refuse)]
    with contextlib.ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        yield


def require_layers(model: nn.Module, target: Target, reached: Tensor) -> None:
    """Raise ValueError if the gradient of an image is all zero in a layer, because its map would be wrong.

    reached: (L, B), as `attn.has_gradient()`.
    """
    for layer, image in (~reached).nonzero()[:1].tolist():
        raise ValueError(no_gradient(model_name(model), target.called(image), layer))


class Constants(TorchFunctionMode):
    """Detach the parameters in this block. Enter it before a capture, which names layers by the parameters."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.parameters = {id(p): p for p in model.parameters()}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = {name: self._constant(value) for name, value in (kwargs or {}).items()}
        return func(*map(self._constant, args), **kwargs)

    def _constant(self, value):
        if type(value) in (list, tuple):
            return type(value)(map(self._constant, value))
        return value.detach() if id(value) in self.parameters else value


def rollout(
    model,
    images=None,
    target=None,
    *,
    against=None,
    names=None,
    query: tuple[int, int] | None = None,
    head_fusion: str = "mean",
    discard: float = 0.0,
) -> Tensor:
    """(B, rows, cols) attention rollout (Abnar and Zuidema 2020), the same for every target.

    >>> vitlens.attribution.rollout(model, images).shape
    torch.Size([2, 14, 14])

    model, images: as in `help(vitlens.attribution)`. target, against and names have no effect. query, head_fusion,
    discard: as in `vitlens.attention.rollout`.
    """
    attn = explained(model, images, target, against=against, names=names, needs=("capture",)).attn
    return attention.rollout(attn, query, head_fusion, discard)


def relevance(
    model,
    images=None,
    target=None,
    *,
    against=None,
    names=None,
    query: tuple[int, int] | None = None,
) -> Tensor:
    """(B, rows, cols) relevance of each patch to the read-out, after Chefer, Gur and Wolf (ICCV 2021, eq. 5, 6).

    R starts as the identity and every layer adds R ← R + Ā·R, with Ā = mean over heads of (A ⊙ ∇A)⁺ and ∇A the gradient
    of the target's logit. The map is the read-out's row of R − I, pulled back from the top, r ← r + r·Ā, so R is never
    formed. I is left out because a mean over patches reads the patches themselves. For a class token this changes
    nothing. An attention pool is one more layer. Prefix tokens are dropped without rescaling.

    >>> vitlens.attribution.relevance(model, images, "Egyptian cat", against="tabby").shape
    torch.Size([2, 14, 14])

    model, images, target, against, names: as in `help(vitlens.attribution)`. query: (row, column) of a patch, to start
    from instead of the read-out.
    """
    attn = explained(model, images, target, against=against, names=names).attn
    read, moved = _readout(attn, query)
    for layer in reversed(attn):
        moved = moved + _pulled(layer, read + moved)
    return attn.grid.image_map(moved)


def gradient_rollout(
    model,
    images=None,
    target=None,
    *,
    against=None,
    names=None,
    query: tuple[int, int] | None = None,
    head_fusion: str = "mean",
) -> Tensor:
    """(B, rows, cols) rollout of attention × gradient, from the read-out to the patches.

    Abnar and Zuidema's rollout (2020), the read-out's row of Â_L ⋯ Â_1 with Â = (G + I) / row sum, in which G takes the
    place of the attention A. With ∇A the gradient of the target's logit,

    * head_fusion="mean": G = (mean over heads of A ⊙ ∇A)⁺, as in Gildenblat's vit-explain (2020), but each layer is
      paired with its own gradient.
    * head_fusion="positive": G = mean over heads of (A ⊙ ∇A)⁺, the average of Chefer, Gur and Wolf (CVPR 2021, eq. 13).

    The part that reaches a patch through identities alone is left out, because a mean over patches reads the patches
    themselves. An attention pool is one more layer, without identity. Prefix tokens are dropped without rescaling.

    >>> vitlens.attribution.gradient_rollout(model, images, "Egyptian cat").shape
    torch.Size([2, 14, 14])

    model, images, target, against, names: as in `help(vitlens.attribution)`. query: as in `relevance`.
    """
    mean_first = {"mean": True, "positive": False}[head_fusion]
    attn = explained(model, images, target, against=against, names=names).attn
    still, moved = _readout(attn, query)  # `still` has passed identities only
    moved /= moved.sum(-1, keepdim=True).clamp_min_(torch.finfo(moved.dtype).tiny)
    for layer in reversed(attn):
        row, pulled = still + moved, torch.zeros_like(moved)
        for queries, product in attention_times_gradient(layer, row):
            fused = product.mean(1).clamp_(min=0) if mean_first else product.clamp_(min=0).mean(1)
            total = fused.sum(-1) + 1
            with full_precision(row.device):
                pulled += torch.einsum("bq,bqk->bk", row[:, queries] / total, fused)
            pulled[:, queries] += moved[:, queries] / total
            still[:, queries] /= total
        moved = pulled
    return attn.grid.image_map(moved)


def attention_gradient(
    model,
    images=None,
    target=None,
    *,
    against=None,
    names=None,
    layer: int | None = None,
    query: tuple[int, int] | None = None,
) -> Tensor:
    """(B, rows, cols) attention × gradient of one layer: the read-out row of the mean over heads of (A ⊙ ∇A)⁺.

    The product of Barkan et al.'s Grad-SAM (2021). ∇A is the gradient of the target's logit.

    >>> vitlens.attribution.attention_gradient(model, images, "Egyptian cat", layer=5).shape
    torch.Size([2, 14, 14])

    model, images, target, against, names: as in `help(vitlens.attribution)`. layer: its number, −1 for the last block.
    The default is the last attention before the head, which is an attention pool's if the model has one. query: as in
    `relevance`. The map of a query is zero if no gradient reaches it, as for the patches in the last layer of a model
    that reads its class token.
    """
    attn = explained(model, images, target, against=against, names=names).attn
    read, pooled = _readout(attn, query)
    if layer is None and query is None and attn.pool is not None:
        return attn.grid.image_map(pooled)
    return attn.grid.image_map(_pulled(attn[-1 if layer is None else layer], read + pooled))


def legrad(model, images=None, target=None, *, against=None, names=None, first: int = 0) -> Tensor:
    """(B, rows, cols) LeGrad (Bousselham et al., ICCV 2025, arXiv 2404.03214).

    The tokens Z_l that leave layer l are read as if it were the last, by the model's final norm, pooling and head:
    s_l = head(pool(norm(Z_l))), the logit of the target. The map is the mean over layers of (∂s_l/∂A_l)⁺, averaged over
    heads and over all T queries. It is not multiplied by A_l. The authors sum over layers and stretch to 0…1. For
    models with an attention pool they take the gradient of the pool's map, while here every model is read through its
    layers.

    >>> vitlens.attribution.legrad(model, images, "Egyptian cat", first=-2).shape
    torch.Size([2, 14, 14])

    model, images, target, against, names: as in `help(vitlens.attribution)`. first: the first layer of the mean. The
    authors' code takes the last two, −2.
    """
    attn = explained(
        model, images, target, against=against, names=names, needs=("readings",)
    ).readings
    total = [_received(attn[number]) for number in range(layer_number(len(attn), first), len(attn))]
    return attn.grid.image_map(torch.stack(total).mean(0))


def grad_cam(
    model, images=None, target=None, *, against=None, names=None, layer: int = -1
) -> Tensor:
    """(B, rows, cols) Grad-CAM (Selvaraju et al. 2017, eq. 1 and 2) of the input tokens of one layer's attention.

    (Σ_c w_c·a_pc)⁺, with w_c the mean over the patches of ∂y/∂a_pc and y the target's logit. The activation a_pc of
    patch p is the input of the attention: the output of the block's `norm1`, as in pytorch-grad-cam's example for ViTs,
    or the input of a block that normalizes afterwards. Behind the last attention the class token reads no patch, so
    every patch's gradient is zero there. Blocks with two parallel attentions have the channels of both. ∂y/∂a_pc
    includes all paths from the activation to the logit, also those around the attention.

    >>> vitlens.attribution.grad_cam(model, images, "Egyptian cat").shape
    torch.Size([2, 14, 14])

    model, images, target, against, names: as in `help(vitlens.attribution)`. layer: its number, −1 for the last.
    """
    run = explained(
        model, images, target, against=against, names=names, needs=("inputs",), layer=layer
    )
    grid, parts = run.attn.grid, run.inputs[layer_number(len(run.attn), layer)]
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    activation, gradient = (part[:, grid.prefix :].to(wide) for part in parts)
    values = (activation * gradient.mean(1, keepdim=True)).sum(-1).clamp_(min=0)
    return values.unflatten(-1, (grid.rows, grid.cols))


def _readout(attn: Attention, query: tuple[int, int] | None) -> tuple[Tensor, Tensor]:
    """The row from which a map starts, as two (B, T) parts: the weights of the read-out and those of an attention pool.

    The first part is one-hot for a patch `query`, (row, column), else the grid's read-out. An attention pool is one
    more layer, with its latents as queries. Its part is (A ⊙ ∂score/∂A)⁺, mean over heads, and depends on the target.
    """
    read = attention.read_row(attn, query)
    pooled = torch.zeros_like(read)
    if (
        query is None and attn.pool is not None
    ):  # latents that the head does not read have no gradient
        product = attn.pool.weights() * attn.pool.weights_gradient()
        pooled[:, attn.grid.tokens - product.shape[-1] :] = product.clamp_(min=0).mean(1).sum(1)
        read = torch.zeros_like(read)
    return read, pooled


def _blocks(layer: Layer, selected: Tensor) -> Iterator[Tensor]:
    """Yield the positions of the selected queries in blocks of rows. selected: (T,) bool."""
    batch, heads, tokens, _ = layer.k.shape
    size = max(
        8,
        attention.BLOCK.get(selected.device.type, attention.BLOCK["cpu"])
        // (batch * heads * tokens),
    )
    yield from selected.nonzero().flatten().split(size)


def attention_times_gradient(layer: Layer, row: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (queries (Q,), A ⊙ ∂score/∂A (B, H, Q, T)) for all queries with a nonzero weight in row, (B, T)."""
    for queries in _blocks(layer, row.ne(0).any(0)):
        yield queries, layer.logits(queries).softmax(-1).mul_(layer.weights_gradient(queries))


def _pulled(layer: Layer, row: Tensor) -> Tensor:
    """(B, T) row · mean over heads of (A ⊙ ∇A)⁺."""
    pulled = torch.zeros_like(row)
    for queries, product in attention_times_gradient(layer, row):
        with full_precision(row.device):
            pulled += torch.einsum("bq,bqk->bk", row[:, queries], product.clamp_(min=0).mean(1))
    return pulled


def _received(layer: Layer) -> Tensor:
    """(B, T) positive gradient of the attention to each token, mean over heads and queries."""
    total = torch.zeros_like(layer.k[:, 0, :, 0], dtype=layer.wide)
    for queries in _blocks(
        layer, layer.gradient.any(-1).any(1).any(0)
    ):  # the others' gradient is zero
        total += layer.weights_gradient(queries).clamp_(min=0).mean(1).sum(1)
    return total / layer.q.shape[-2]
