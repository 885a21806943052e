"""Balanced gradients, and a forward with fixed multipliers, in which a logit is an exact sum.

The weights of attention, the deviations by which norms divide and, for balanced gradients, the gates of activations are
constants for autograd. All values stay those of the model, bit for bit. Nothing is patched: a mode sees PyTorch's
functions, and hooks cut the graph or begin it.

How the second half of this file works. `_LinearMode` sees each call of a PyTorch function while the model runs:

* Fused attention gets a detached query, key and mask, so that only the value has a gradient.
* A function in the tables `NORMS` and `ACTIVATIONS` equals scale·(x − its mean over some axes) + bias, with a scale
  that depends on x. This `LinearForm`, with the scale detached, gives the gradient.
* The result of a function in `LENGTHS` and `SIGMOIDS` is detached.
* A bias that `F.linear` or `+` adds is multiplied by 1 + zeros, with one zero for each image. So the gradient by the
  zeros is the sum of all biases.

`_StandIn` joins the two halves: the result that the model computed, and the gradient of the linear form. The form's own
value is never computed, so the logits cannot change by rounding. To support one more function, add it to a table.
`require_sum` fails if a function is missing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlens.attribution.maps import (
    Constants,
    Hook,
    explanation_mode,
    prepare_inputs,
    require_layers,
    run_with_capture,
)
from vitlens.attribution.target import of_features, resolve_target
from vitlens.recorder.hooks import thread_hooks
from vitlens.recorder.intervention import replaced_places
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
    model, images, target, against = prepare_inputs(model, images, target, against)
    about = family(transformer(model))
    tokens = []
    hooks = [
        *_hooks_on_tokens(about.blocks, tokens),
        *_hooks_on_gates(model),
    ]
    with linear_forward(model, images, hooks, activations=True) as zeros:
        with about.calling_blocks():
            attn, output = run_with_capture(model, images, of_features(target))
        target = resolve_target(model, output, target, against, names)
        *by_tokens, by_zeros = torch.autograd.grad(
            target.score(output).sum(), [*tokens, zeros], allow_unused=True, materialize_grads=True
        )
    reached = torch.stack([gradient.flatten(1).any(1) for gradient in by_tokens])
    require_layers(model, target, reached)
    products = [product(x, gradient) for x, gradient in zip(tokens, by_tokens, strict=True)]
    parts = torch.cat([products[0], by_zeros[:, None]], 1)
    require_sum(model, parts, target.score(output.detach()))
    return attn.grid.image_map(torch.stack(products).sum(0))


def _hooks_on_tokens(blocks: Sequence[nn.Module], tokens: list[Tensor]) -> Iterator[Hook]:
    """Hooks that append the input of each block. That of the first block becomes a leaf of the graph."""

    def begin(_, args: tuple) -> tuple:
        return (leaf(args[0], tokens), *args[1:])

    def append(_, args: tuple) -> None:
        tokens.append(args[0])

    first, *others = blocks
    yield first.register_forward_pre_hook, begin
    for block in others:
        yield block.register_forward_pre_hook, append


def _hooks_on_gates(model: nn.Module) -> Iterator[Hook]:
    """Hooks that make the activations in GLUs constant. A GLU multiplies one half of its input by this gate."""

    def detach_output(_, args: tuple, output: Tensor) -> Tensor:
        return detach(output)

    for module in model.modules():
        if "glu" in type(module).__name__.lower() and hasattr(module, "act"):
            yield module.act.register_forward_hook, detach_output


@contextlib.contextmanager
def linear_forward(
    model: nn.Module, images: Tensor, hooks: Sequence[Hook], *, activations: bool = False
) -> Iterator[Tensor]:
    """In this block, a forward is linear for autograd. Yields the (B,) zeros that stand for biases.

    hooks: as in `thread_hooks`. activations: make the gates of activations constant too.
    """
    with torch.inference_mode(False):  # zeros made in that mode have no gradient
        zeros = images.new_zeros(len(images), requires_grad=True)
    mode = _LinearMode(model, zeros, activations)
    with (
        explanation_mode(model, constants=mode),
        full_precision(images.device),
        thread_hooks(hooks),
    ):
        yield zeros


def product(values: Tensor, gradient: Tensor) -> Tensor:
    """Gradient × input, summed over the last axis, in at least float32."""
    wide = torch.promote_types(values.dtype, torch.float32)
    return (values.detach().to(wide) * gradient.to(wide)).sum(-1)


def require_sum(model: nn.Module, parts: Tensor, logits: Tensor) -> None:
    """Raise UnsupportedModelError unless the parts, (B, parts), sum to the logits, (B,), up to rounding."""
    size = parts.abs().sum(1).clamp_min(torch.finfo(parts.dtype).tiny)
    error = (parts.sum(1) - logits).abs() / size
    if not (error <= torch.finfo(logits.dtype).eps ** 0.5).all():
        reason = "a part is neither linear nor a known norm, attention or MLP."
        if replaced := replaced_places():
            reason = (
                f"`intervene` writes values of its own in place of {replaced}. "
                'Replace with "zero", which adds up, or ask outside of its block.'
            )
        raise UnsupportedModelError(
            f"vitlens cannot take the logits of {model_name(model)} apart: its parts miss the logit by "
            f"{error.max():.2g} of their size, as {reason}"
        )


def detach(tensor: Tensor) -> Tensor:
    """The tensor, detached. Hidden from the capture, which refuses a graph that is cut."""
    with torch._C.DisableTorchFunction():
        return tensor.detach()


def leaf(tensor: Tensor, leaves: list[Tensor]) -> Tensor:
    """The tensor as a new leaf of autograd's graph, which is appended to `leaves`."""
    with torch._C.DisableTorchFunction():
        leaves.append(tensor.detach().requires_grad_())
    return leaves[-1]


@dataclass(frozen=True)
class LinearForm:
    """The function scale·(x − its mean over `axes`) + bias, whose gradient replaces that of a call with input x.

    scale: detached, or None for 1. axes: () to subtract no mean. bias: detached or not, or None.
    """

    x: Tensor
    scale: Tensor | None = None
    axes: tuple[int, ...] = ()
    bias: Tensor | None = None


def _layer_norm(
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> LinearForm:
    """A layer norm with a constant standard deviation."""
    axes = tuple(range(-len(shape), 0))
    scale = (detach(x).var(axes, correction=0, keepdim=True) + eps).rsqrt()
    if weight is not None:
        scale = scale * detach(weight)
    return LinearForm(x, scale, axes, bias)


def _rms_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> LinearForm:
    """A root-mean-square norm with a constant root mean square."""
    if eps is None:
        eps = torch.finfo(x.dtype).eps
    axes = tuple(range(-len(shape), 0))
    square = detach(x).square().mean(axes, keepdim=True)
    scale = (square + eps).rsqrt()
    if weight is not None:
        scale = scale * detach(weight)
    return LinearForm(x, scale)


NORMS = {F.layer_norm: _layer_norm, F.rms_norm: _rms_norm}
"""Functions of the arguments of a norm that return its linear form."""

LENGTHS = {Tensor.norm}
"""Functions by whose result a cosine divides. Their results are detached."""

SIGMOIDS = {torch.sigmoid, Tensor.sigmoid}
"""Gates, whose results are detached for balanced gradients."""

ACTIVATIONS = {F.gelu, F.silu}
"""Activations x·gate(x), whose linear form for balanced gradients is x times the constant gate(x)."""

SUMS = {Tensor.add, Tensor.__add__, Tensor.__iadd__}
"""Functions that add their second argument to the first. It is a bias if it has fewer dimensions than the result."""


class _LinearMode(Constants):
    """Make attention weights and the deviations in norms constants for autograd, too, so that its graph is linear.

    All values are those of the model, bit for bit. Biases and other added vectors are multiplied by 1 + zeros, so the
    gradient by the zeros is the sum of all biases, for each image. See the docstring of the file.
    """

    def __init__(self, model: nn.Module, zeros: Tensor, activations: bool):
        super().__init__(model)
        self.zeros = zeros
        self.activations = activations

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (F.scaled_dot_product_attention, explicit_attention):
            query, key, value, *rest = args
            rest = [detach(each) if isinstance(each, Tensor) else each for each in rest]
            args = (detach(query), detach(key), value, *rest)
            # Relative positions in the mask depend on the queries.
            if isinstance(kwargs.get("attn_mask"), Tensor):
                kwargs = {**kwargs, "attn_mask": detach(kwargs["attn_mask"])}
            return super().__torch_function__(func, types, args, kwargs)
        result = super().__torch_function__(func, types, args, kwargs)
        with torch._C.DisableTorchFunction():  # hide the replacement of the call from outer modes
            if not isinstance(result, Tensor) or not result.requires_grad:
                return result
            if func in LENGTHS or (self.activations and func in SIGMOIDS):
                return detach(result)
            form = self._linear_form(func, result, args, kwargs)
            return result if form is None else self._stand_in(result, form)

    def _linear_form(
        self, func: Callable, result: Tensor, args: tuple, kwargs: dict
    ) -> LinearForm | None:
        """The linear form of a call, or None if the call is linear itself and adds no bias."""
        if func in NORMS:
            return NORMS[func](*args, **kwargs)
        if func in ACTIVATIONS and self.activations:
            x = detach(args[0])
            gate = torch.where(x == 0, 0.5, detach(result) / x)
            return LinearForm(args[0], gate)
        bias = _added_bias(func, result, args, kwargs)
        return None if bias is None else LinearForm(result, bias=bias)

    def _stand_in(self, result: Tensor, form: LinearForm) -> Tensor:
        """A tensor with the values of the result and the gradient of the form."""
        added = None
        if form.bias is not None:
            added = self._zeros_like(result) * detach(form.bias)
        values = result.data  # without the graph, which may have saved the result
        return _StandIn.apply(values, form.x, form.scale, form.axes, added)

    def _zeros_like(self, result: Tensor) -> Tensor:
        """The zeros in a shape that broadcasts to (B, …), or (T, B, D) or (T·B, D) in torch.nn.MultiheadAttention."""
        images = len(self.zeros)
        if len(result) == images:
            return self.zeros.view(-1, *[1] * (result.dim() - 1))
        if result.dim() == 2:
            return self.zeros.repeat(len(result) // images)[:, None]
        return self.zeros.view(1, -1, *[1] * (result.dim() - 2))


def _added_bias(func: Callable, result: Tensor, args: tuple, kwargs: dict) -> Tensor | None:
    """The vector that a call adds for all images, or None."""
    if func is F.linear:
        return kwargs.get("bias", args[2] if len(args) > 2 else None)
    if func in SUMS and isinstance(args[1], Tensor) and args[1].dim() < result.dim():
        return args[1]
    return None


class _StandIn(torch.autograd.Function):
    """Values with the gradient of the linear function scale·(x − its mean over `axes`) + added, which equals them.

    This is the one place where the graph does not follow the values: forward returns the given values, and backward
    differentiates the linear function by x and by `added`.
    """

    @staticmethod
    def forward(
        ctx,
        values: Tensor,
        x: Tensor,
        scale: Tensor | None,
        axes: tuple[int, ...],
        added: Tensor | None,
    ):
        ctx.mark_dirty(values)  # or it would be a view, which a model may not change in place
        ctx.save_for_backward(scale)
        ctx.axes = axes
        ctx.added_shape = None if added is None else added.shape
        return values

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple:
        (scale,) = ctx.saved_tensors
        by_x = gradient
        by_added = None
        with torch._C.DisableTorchFunction():
            if scale is not None:
                by_x = by_x * scale
            if ctx.axes:
                by_x = by_x - by_x.mean(ctx.axes, keepdim=True)
            if ctx.added_shape is not None:
                by_added = gradient.sum_to_size(ctx.added_shape)
        return None, by_x, None, None, by_added
