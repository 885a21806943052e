"""Balanced gradients, and a forward with fixed multipliers, in which a logit is an exact sum.

The weights of attention, the deviations by which norms divide and, for balanced gradients, the gates of activations are
constants for autograd. All values stay those of the model, bit for bit. Nothing is patched: a mode sees PyTorch's
functions, and hooks cut the graph or begin it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlens.attribution.maps import Constants, Hook, captured, checked, explaining, require_layers
from vitlens.attribution.target import of_features, resolved
from vitlens.recorder.hooks import thread_hooks
from vitlens.recorder.multihead import explicit_attention
from vitlens.recorder.precision import full_precision
from vitlens.recorder.supported import UnsupportedModelError, family, model_name, transformer


def balanced_gradients(
    model: nn.Module, images: Tensor, target=None, *, against=None, names=None
) -> Tensor:
    """(B, rows, cols) gradient × input, summed over the inputs of all layers, with all multipliers held fixed.

    LibraGrad (Mehri et al., CVPR 2025): gradients flow as if the weights of attention, the deviations by which norms
    divide and the gates of the activations (Φ(x) in GELU's x·Φ(x), the gating half of a GLU) were constants, as in
    CP-LRP (Ali et al. 2022). So the model is a linear function of each layer's tokens, and gradient × input, summed
    over all tokens, is the logit minus the additions of the biases. This sum is checked for the first layer.

    >>> vitlens.attribution.balanced_gradients(model, images, "Egyptian cat").shape
    torch.Size([2, 14, 14])

    model, images, target, against, names: as in `help(vitlens.attribution)`.
    """
    model, images, target, against = checked(model, images, target, against)
    first, *others = family(transformer(model)).blocks
    tokens = []
    hooks = [(first.register_forward_pre_hook, lambda _, args: (leaf(args[0], tokens), *args[1:]))]
    hooks += [
        (block.register_forward_pre_hook, lambda _, args: tokens.append(args[0]))
        for block in others
    ]
    for mlp in model.modules():
        if "glu" in type(mlp).__name__.lower() and hasattr(
            mlp, "act"
        ):  # one half is a gate of the other
            hooks.append((mlp.act.register_forward_hook, lambda _, args, out: held(out)))
    with held_fixed(model, images, hooks, activations=True) as zeros:
        attn, output = captured(model, images, of_features(target))
        target = resolved(model, output, target, against, names)
        *by_tokens, by_zeros = torch.autograd.grad(
            target.score(output).sum(), [*tokens, zeros], allow_unused=True, materialize_grads=True
        )
    require_layers(
        model, target, torch.stack([gradient.flatten(1).any(1) for gradient in by_tokens])
    )
    products = [product(x, gradient) for x, gradient in zip(tokens, by_tokens, strict=True)]
    require_sum(
        model, torch.cat([products[0], by_zeros[:, None]], 1), target.score(output.detach())
    )
    return attn.grid.image_map(torch.stack(products).sum(0))


@contextlib.contextmanager
def held_fixed(
    model: nn.Module, images: Tensor, hooks: list[Hook], *, activations: bool = False
) -> Iterator[Tensor]:
    """In this block, a forward is linear for autograd. Yields the (B,) zeros that stand for biases.

    hooks: as in `thread_hooks`. activations: hold the gates of activations fixed too.
    """
    with torch.inference_mode(False):  # zeros made in that mode have no gradient
        zeros = images.new_zeros(len(images), requires_grad=True)
    fixed = _Fixed(model, zeros, activations)
    with explaining(model, constants=fixed), full_precision(images.device), thread_hooks(hooks):
        yield zeros


def product(values: Tensor, gradient: Tensor) -> Tensor:
    """Gradient × input, summed over the last axis, in at least float32."""
    wide = torch.promote_types(values.dtype, torch.float32)
    return (values.detach().to(wide) * gradient.to(wide)).sum(-1)


def require_sum(model: nn.Module, parts: Tensor, logits: Tensor) -> None:
    """Raise UnsupportedModelError unless the parts, (B, parts), sum to the logits, (B,), up to rounding."""
    off = (parts.sum(1) - logits).abs() / parts.abs().sum(1).clamp_min(
        torch.finfo(parts.dtype).tiny
    )
    if not (off <= torch.finfo(logits.dtype).eps ** 0.5).all():
        raise UnsupportedModelError(
            f"vitlens cannot take the logits of {model_name(model)} apart: its parts miss the logit by {off.max():.2g} "
            "of their size, so a part is neither linear nor a known norm, attention or MLP."
        )


def held(tensor: Tensor) -> Tensor:
    """The tensor, detached. Hidden from the capture, which refuses a graph that is cut."""
    with torch._C.DisableTorchFunction():
        return tensor.detach()


def leaf(tensor: Tensor, leaves: list[Tensor]) -> Tensor:
    """The tensor as a new leaf of autograd's graph, which is appended to `leaves`."""
    with torch._C.DisableTorchFunction():
        leaves.append(tensor.detach().requires_grad_())
    return leaves[-1]


class _Fixed(Constants):
    """Make attention weights and the deviations in norms constants for autograd, too, so that its graph is linear.

    All values are those of the model, bit for bit. Biases and other added vectors are multiplied by 1 + zeros, so the
    gradient by the zeros is the sum of all biases, for each image.
    """

    def __init__(self, model: nn.Module, zeros: Tensor, activations: bool):
        super().__init__(model)
        self.zeros, self.activations = zeros, activations

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (F.scaled_dot_product_attention, explicit_attention):
            query, key, value, *rest = args
            query, key, *rest = (
                held(t) if isinstance(t, Tensor) else t for t in (query, key, *rest)
            )
            if isinstance(
                kwargs.get("attn_mask"), Tensor
            ):  # relative positions depend on the queries
                kwargs = {**kwargs, "attn_mask": held(kwargs["attn_mask"])}
            return super().__torch_function__(func, types, (query, key, value, *rest), kwargs)
        result = super().__torch_function__(func, types, args, kwargs)
        with torch._C.DisableTorchFunction():  # hide the replacement of the call from outer modes
            return self._linear(func, result, *args, **kwargs)

    def _linear(self, func: Callable, result: object, *args, **kwargs):
        """The result of a call, or a tensor of the same values with a linear graph."""
        if not (isinstance(result, Tensor) and result.requires_grad):
            return result
        if func in _NORMS:
            factor, axes, bias = _NORMS[func](*args, **kwargs)
            return self._stand_in(result, args[0], factor, axes, bias)
        if func in _LENGTHS or (self.activations and func in _SIGMOIDS):
            return held(result)
        if self.activations and func in _ACTIVATIONS:
            x = held(args[0])
            return self._stand_in(result, args[0], torch.where(x == 0, 0.5, held(result) / x))
        bias = None
        if func is F.linear:
            bias = kwargs.get("bias", args[2] if len(args) > 2 else None)
        elif func in _SUMS and isinstance(args[1], Tensor) and args[1].dim() < result.dim():
            bias = args[1]
        return result if bias is None else self._stand_in(result, result, bias=bias)

    def _stand_in(
        self, result: Tensor, x: Tensor, factor=None, axes: tuple[int, ...] = (), bias=None
    ) -> Tensor:
        added = None if bias is None else self._zeros_like(result) * held(bias)
        return _StandIn.apply(
            result.data, x, factor, axes, added
        )  # .data: autograd may have saved the result

    def _zeros_like(self, result: Tensor) -> Tensor:
        """The zeros in a shape that broadcasts to (B, …), or (T, B, D) or (T·B, D) in torch.nn.MultiheadAttention."""
        images = len(self.zeros)
        if len(result) != images and result.dim() == 2:
            return self.zeros.repeat(len(result) // images)[:, None]
        if len(result) != images:
            return self.zeros.view(1, -1, *[1] * (result.dim() - 2))
        return self.zeros.view(-1, *[1] * (result.dim() - 1))


class _StandIn(torch.autograd.Function):
    """Values with the gradient of the linear function factor·(x − its mean over `axes`) + added, which equals them."""

    @staticmethod
    def forward(
        ctx,
        values: Tensor,
        x: Tensor,
        factor: Tensor | None,
        axes: tuple[int, ...],
        added: Tensor | None,
    ):
        ctx.mark_dirty(values)  # or it would be a view, which a model may not change in place
        ctx.save_for_backward(factor)
        ctx.axes, ctx.added = axes, None if added is None else added.shape
        return values

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple:
        (factor,), by_x = ctx.saved_tensors, gradient
        with torch._C.DisableTorchFunction():
            if factor is not None:
                by_x = by_x * factor
            if ctx.axes:
                by_x = by_x - by_x.mean(ctx.axes, keepdim=True)
            return (
                None,
                by_x,
                None,
                None,
                None if ctx.added is None else gradient.sum_to_size(ctx.added),
            )


def _layer_norm(
    x: Tensor, shape: Sequence[int], weight=None, bias=None, eps: float = 1e-5
) -> tuple:
    """Factor, axes of the mean and bias of a layer norm with a constant standard deviation."""
    axes = tuple(range(-len(shape), 0))
    scale = (held(x).var(axes, correction=0, keepdim=True) + eps).rsqrt()
    return scale if weight is None else scale * held(weight), axes, bias


def _rms_norm(x: Tensor, shape: Sequence[int], weight=None, eps: float | None = None) -> tuple:
    square = held(x).square().mean(tuple(range(-len(shape), 0)), keepdim=True)
    scale = (square + (torch.finfo(x.dtype).eps if eps is None else eps)).rsqrt()
    return scale if weight is None else scale * held(weight), (), None


_NORMS = {F.layer_norm: _layer_norm, F.rms_norm: _rms_norm}
_ACTIVATIONS = {F.gelu, F.silu}
_LENGTHS = {Tensor.norm}  # by which a cosine divides
_SIGMOIDS = {torch.sigmoid, Tensor.sigmoid}
_SUMS = {Tensor.add, Tensor.__add__, Tensor.__iadd__}
