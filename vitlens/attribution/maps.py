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
from vitlens.attribution.target import Target, bind_target, of_features, resolve_target
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

    >>> vitlens.attribution.explained(model, images).attn[5].gradient.shape
    torch.Size([2, 3, 197, 64])
    """

    attn: Attention
    output: Tensor | None = None
    target: Target | None = None
    readings: Attention | None = None
    inputs: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    __repr__ = repr_with_shapes


Explainable = nn.Module | Attention | Explained
"""First argument, `model`, of a method that can share its forward:

* A model. The method also takes images and a target, and runs the model.
* A capture with `gradients=True`, after `attn.differentiate(score)`. The method takes nothing else.
* The result of `explained`, which made all that the method needs. The method takes nothing else.
"""


def explained(
    model: Explainable,
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
    needs = set(needs)
    if isinstance(model, Attention):
        if model[-1].gradient is None and needs != {"capture"}:
            raise ValueError(
                "The capture has no gradients. Run `with capture(model, gradients=True) as attn: "
                "logits = model(images)` and `attn.differentiate(logits[:, 3].sum())`, or pass model and images."
            )
        return Explained(model)
    backward = bool(needs & {"gradients", "readings", "inputs"})
    model, images, target, against = prepare_inputs(model, images, target, against)
    inner = transformer(model)
    about = family(inner)
    blocks = about.blocks
    modules = attention_modules(inner)
    layer = layer_number(len(modules), layer)
    hooks = []
    tokens = []
    layer_inputs = []
    if "readings" in needs:
        hooks += _hooks_on_outputs(blocks, tokens)
    if "inputs" in needs:
        hooks += _hooks_on_inputs(blocks[layer], modules[layer], layer_inputs)
    readings = None
    inputs = {}
    with explanation_mode(model, gradients=backward):
        calling = about.calling_blocks() if "readings" in needs else contextlib.nullcontext()
        with calling, thread_hooks(hooks):
            attn, output = run_with_capture(model, images, of_features(target), gradients=backward)
        target = resolve_target(model, output, target, against, names)
        if backward:
            target.require_slope(output.detach())
        if "readings" in needs:
            keep_graph = needs != {"readings"}
            readings = _read_layers(model, attn, tokens, output, target, keep_graph=keep_graph)
        if needs & {"gradients", "inputs"}:
            by_inputs = attn.differentiate(target.score(output).sum(), also=layer_inputs)
            require_layers(model, target, attn.has_gradient())
            if layer_inputs:
                activation = torch.cat(layer_inputs, -1).detach()
                inputs[layer] = (activation, torch.cat(by_inputs, -1))
    return Explained(attn, output.detach(), target, readings, inputs)


def _hooks_on_outputs(blocks: Sequence[nn.Module], outputs: list[Tensor]) -> Iterator[Hook]:
    """Hooks that append the output of each block."""

    def append(_, args: tuple, output: Tensor) -> None:
        outputs.append(output)

    for block in blocks:
        yield block.register_forward_hook, append


def _hooks_on_inputs(
    block: nn.Module, modules: list[tuple[str, nn.Module]], inputs: list[Tensor]
) -> Iterator[Hook]:
    """Hooks that append the inputs of a block's attention, in a graph that begins with the block at the latest."""

    def begin(_, args: tuple) -> tuple:
        if args[0].requires_grad:
            return args
        return (args[0].detach().requires_grad_(), *args[1:])

    def append_input(_, args: tuple, named: dict) -> None:
        inputs.append(args[0] if args else named["hidden_states"])

    def append_output(_, args: tuple, output: Tensor) -> None:
        inputs.append(output)

    yield block.register_forward_pre_hook, begin
    for _, module in modules:
        if hasattr(module, "in_norm"):
            # A ParallelScalingBlock is the attention, and its input is its norm's output.
            yield module.in_norm.register_forward_hook, append_output
        else:
            yield partial(module.register_forward_pre_hook, with_kwargs=True), append_input


def _read_layers(
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
    head = family(transformer(model)).head
    readings = attn.twin()
    outputs = [head(leaving, pre_logits=target.of_features) for leaving in tokens]
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


def prepare_inputs(
    model: nn.Module, images: Tensor, target: object = None, against: object = None
) -> tuple[nn.Module, Tensor, object, object]:
    """The unwrapped model, the images on its device and in its dtype, and target and contrast as of `bind_target`.

    Raises for a model or images that cannot be explained.
    """
    model = unwrap(model)
    attention_modules(model if of_features(target) else transformer(model))
    target, against = bind_target(model, target, against)
    require_images(images, model)
    with torch.inference_mode(False):
        images = images.clone() if images.is_inference() else images.detach()
        return model, images.to(next(model.parameters())), target, against


def outputs_of(model: nn.Module, images: Tensor, features: bool) -> Tensor:
    """(B, classes) logits, or (B, D) features: the input of the classifier, or the output of a model without one."""
    return pooled_features(unwrap(model), images) if features else run(model, images)


def run_with_capture(
    model: nn.Module, images: Tensor, features: bool = False, *, gradients: bool = False
) -> tuple[Attention, Tensor]:
    """A capture of the Vision Transformer that `model` is or wraps, and the outputs of `model`.

    features, gradients: as in `outputs_of` and `capture`. Raises ValueError if a wrapper resizes the images, because
    maps would not fit them.
    """
    inner = transformer(model)
    if inner is model:
        with capture(model, gradients=gradients) as attn:
            output = outputs_of(model, images, features)
        return attn, output
    inner_outputs = [None]

    def append(_, args: tuple, output: object) -> None:
        inner_outputs.append(getattr(output, "logits", output))

    with (
        thread_hooks([(inner.register_forward_hook, append)]),
        capture(model, gradients=gradients) as attn,
    ):
        output = outputs_of(model, images, features)
    if inner_outputs[-1] is output:
        require_classes(inner)
    if attn.grid.image != tuple(images.shape[-2:]):
        raise ValueError(
            f"{model_name(model)} resizes images of {tuple(images.shape[-2:])} to {attn.grid.image} pixels, so the map "
            "would not lie on them. Resize the images first."
        )
    return attn, output


@contextlib.contextmanager
def explanation_mode(
    model: nn.Module, *, gradients: bool = True, constants: Constants | None = None
) -> Iterator[None]:
    """Run the model in eval mode in this block, with gradients by activations. Restores its mode afterwards.

    constants: the mode that makes its parameters constants, by default `Constants(model)` with the check that a forward
    stays in autograd's graph.
    """

    def refuse(where: str) -> None:
        raise UnsupportedModelError(cut_graph(model_name(model), where))

    with contextlib.ExitStack() as stack:
        stack.enter_context(eval_mode(model))
        # Checkpointing would run the blocks again, in the threads of the backward pass.
        stack.enter_context(without_checkpointing(transformer(model)))
        stack.enter_context(torch.inference_mode(False))
        if not gradients:
            stack.enter_context(torch.no_grad())
        else:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(constants or Constants(model))
            if constants is None:
                stack.enter_context(report_cuts(model, refuse))
        yield


def require_layers(model: nn.Module, target: Target, reached: Tensor) -> None:
    """Raise ValueError if the gradient of an image is all zero in a layer, because its map would be wrong.

    reached: (L, B), as `attn.has_gradient()`.
    """
    for layer, image in (~reached).nonzero()[:1].tolist():
        raise ValueError(no_gradient(model_name(model), target.label(image), layer))


class Constants(TorchFunctionMode):
    """Detach the parameters in this block. Enter it before a capture, which names layers by the parameters."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.parameters = {id(p): p for p in model.parameters()}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        args = [self._detach(value) for value in args]
        kwargs = {name: self._detach(value) for name, value in (kwargs or {}).items()}
        return func(*args, **kwargs)

    def _detach(self, value: object) -> object:
        """A parameter detached, also within lists and tuples. Any other value unchanged."""
        if type(value) in (list, tuple):
            return type(value)(map(self._detach, value))
        return value.detach() if id(value) in self.parameters else value


def rollout(
    model: Explainable,
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
    model: Explainable,
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
    formed. Without I, paths made only of residual connections are excluded. Otherwise mean pooling would add a constant
    to every patch. For a class token this changes nothing. An attention pool is one more layer. Prefix tokens are
    dropped without rescaling.

    >>> vitlens.attribution.relevance(model, images, "Egyptian cat", against="tabby").shape
    torch.Size([2, 14, 14])

    model, images, target, against, names: as in `help(vitlens.attribution)`. query: (row, column) of a patch, to start
    from instead of the read-out.
    """
    attn = explained(model, images, target, against=against, names=names).attn
    read, moved = _readout(attn, query)
    for layer in reversed(attn):
        moved = moved + _pull_back(layer, read + moved)
    return attn.grid.image_map(moved)


def gradient_rollout(
    model: Explainable,
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

    Paths made only of residual connections are excluded. Otherwise mean pooling would add a constant to every patch. An
    attention pool is one more layer, without identity. Prefix tokens are dropped without rescaling.

    >>> vitlens.attribution.gradient_rollout(model, images, "Egyptian cat").shape
    torch.Size([2, 14, 14])

    model, images, target, against, names: as in `help(vitlens.attribution)`. query: as in `relevance`.
    """
    fuse = {"mean": _positive_mean, "positive": _mean_of_positive}[head_fusion]
    attn = explained(model, images, target, against=against, names=names).attn
    still, moved = _readout(attn, query)  # `still` has passed identities only
    moved /= moved.sum(-1, keepdim=True).clamp_min_(torch.finfo(moved.dtype).tiny)
    for layer in reversed(attn):
        row = still + moved
        pulled = torch.zeros_like(moved)
        for queries, product in attention_times_gradient(layer, row):
            fused = fuse(product)
            total = fused.sum(-1) + 1
            with full_precision(row.device):
                pulled += torch.einsum("bq,bqk->bk", row[:, queries] / total, fused)
            pulled[:, queries] += moved[:, queries] / total
            still[:, queries] /= total
        moved = pulled
    return attn.grid.image_map(moved)


def attention_gradient(
    model: Explainable,
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
    number = -1 if layer is None else layer
    row = _pull_back(attn[number], read + pooled)
    return attn.grid.image_map(row)


def legrad(
    model: Explainable, images=None, target=None, *, against=None, names=None, first: int = 0
) -> Tensor:
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
    run = explained(model, images, target, against=against, names=names, needs=("readings",))
    attn = run.readings
    numbers = range(layer_number(len(attn), first), len(attn))
    total = torch.stack([_gradient_received(attn[number]) for number in numbers])
    return attn.grid.image_map(total.mean(0))


def grad_cam(
    model: Explainable, images=None, target=None, *, against=None, names=None, layer: int = -1
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
    grid = run.attn.grid
    activation, gradient = run.inputs[layer_number(len(run.attn), layer)]
    wide = torch.promote_types(activation.dtype, torch.float32)
    activation = activation[:, grid.prefix :].to(wide)
    gradient = gradient[:, grid.prefix :].to(wide)
    values = (activation * gradient.mean(1, keepdim=True)).sum(-1).clamp_(min=0)
    return values.unflatten(-1, (grid.rows, grid.cols))


def _readout(attn: Attention, query: tuple[int, int] | None) -> tuple[Tensor, Tensor]:
    """The row from which a map starts, as two (B, T) parts: the weights of the read-out and those of an attention pool.

    The first part is one-hot for a patch `query`, (row, column), else the grid's read-out. An attention pool is one
    more layer, with its latents as queries. Its part is (A ⊙ ∂score/∂A)⁺, mean over heads, and depends on the target.
    """
    read = attention.read_row(attn, query)
    pooled = torch.zeros_like(read)
    if query is None and attn.pool is not None:
        product = attn.pool.weights() * attn.pool.weights_gradient()
        first = attn.grid.tokens - product.shape[-1]
        # The sum is over the latents. Those that the head does not read have no gradient.
        pooled[:, first:] = _mean_of_positive(product).sum(1)
        read = torch.zeros_like(read)
    return read, pooled


def _blocks(layer: Layer, selected: Tensor) -> Iterator[Tensor]:
    """Yield the positions of the selected queries in blocks of rows. selected: (T,) bool."""
    batch, heads, tokens, _ = layer.k.shape
    block = attention.BLOCK.get(selected.device.type, attention.BLOCK["cpu"])
    size = max(8, block // (batch * heads * tokens))
    yield from selected.nonzero().flatten().split(size)


def attention_times_gradient(layer: Layer, row: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (queries (Q,), A ⊙ ∂score/∂A (B, H, Q, T)) for all queries with a nonzero weight in row, (B, T)."""
    for queries in _blocks(layer, row.ne(0).any(0)):
        weights = layer.logits(queries).softmax(-1)
        yield queries, weights.mul_(layer.weights_gradient(queries))


def _positive_mean(product: Tensor) -> Tensor:
    """(B, Q, T) positive part of the mean over heads, of (B, H, Q, T)."""
    return product.mean(1).clamp_(min=0)


def _mean_of_positive(product: Tensor) -> Tensor:
    """(B, Q, T) mean over heads of the positive parts, of (B, H, Q, T). Overwrites its argument."""
    return product.clamp_(min=0).mean(1)


def _pull_back(layer: Layer, row: Tensor) -> Tensor:
    """(B, T) row · mean over heads of (A ⊙ ∇A)⁺."""
    pulled = torch.zeros_like(row)
    for queries, product in attention_times_gradient(layer, row):
        with full_precision(row.device):
            pulled += torch.einsum("bq,bqk->bk", row[:, queries], _mean_of_positive(product))
    return pulled


def _gradient_received(layer: Layer) -> Tensor:
    """(B, T) positive gradient of the attention to each token, mean over heads and queries."""
    total = torch.zeros_like(layer.k[:, 0, :, 0], dtype=layer.wide)
    reached = layer.gradient.any(-1).any(1).any(0)  # the other queries' gradient is zero
    for queries in _blocks(layer, reached):
        total += _mean_of_positive(layer.weights_gradient(queries)).sum(1)
    return total / layer.q.shape[-2]
