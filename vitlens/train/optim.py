"""Optimizers: AdamW, SGD and Muon over a vision transformer's parameters."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import timm.optim
import torch
from torch import Tensor, nn

from vitlens.train.settings import Recipe

# Quintic that drives singular values toward 1: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
PRODUCTS = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Data types of matrix products by a recipe's precision. Others compute in fp32."""
UNDECAYED = (
    "pos_embed",
    "cls_token",
    "dist_token",
    "reg_token",
    "mask_token",
    "latent",
    "relative_position_bias_table",
)


def optimizers(model: nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """The recipe's optimizers, without frozen parameters. The schedule multiplies each group's `peak_lr`.

    Muon updates the matrices inside the blocks. AdamW updates embeddings, the stem, the head and vectors, and decays
    matrices except embeddings of tokens and positions.
    """
    if recipe.optimizer != "muon":
        return [_single_optimizer(model, recipe)]
    groups = {"hidden": [], "stacked": [], "decayed": [], "rest": []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups[group_of(name, parameter)].append(parameter)
    others = [
        {"params": groups["decayed"], "weight_decay": recipe.weight_decay, "peak_lr": recipe.lr},
        {"params": groups["rest"], "weight_decay": 0.0, "peak_lr": recipe.lr},
    ]
    matrices = [{"params": groups["hidden"], "parts": 1}, {"params": groups["stacked"], "parts": 3}]
    products = PRODUCTS.get(recipe.precision, torch.float32)
    return [
        Muon(matrices, recipe.muon_lr, recipe.momentum, recipe.weight_decay, products),
        torch.optim.AdamW(others, lr=recipe.lr, betas=recipe.betas, fused=True),
    ]


def group_of(name: str, parameter: Tensor) -> str:
    """Group of a parameter: "hidden" and "stacked" are Muon's, "decayed" and "rest" AdamW's.

    "stacked" is q, k and v in one matrix.
    """
    if parameter.ndim < 2 or name.endswith(UNDECAYED):
        return "rest"
    in_block = ".blocks." in f".{name}"
    if not in_block or parameter.ndim not in (2, 4):
        return "decayed"
    return "stacked" if name.endswith("qkv.weight") else "hidden"


def _single_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """AdamW or SGD over all parameters."""
    undecayed = [name for name, _ in model.named_parameters() if name.endswith(UNDECAYED)]
    groups = timm.optim.param_groups_layer_decay(
        model,
        recipe.weight_decay,
        undecayed,
        layer_decay=recipe.layer_decay,
        weight_decay_exclude_1d=True,
    )
    for group in groups:
        group["peak_lr"] = recipe.lr * group["lr_scale"]
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas, fused=True)
    sgd = torch.optim.SGD(groups, lr=recipe.lr, momentum=recipe.momentum, fused=True)
    if recipe.precision == "fp16" and recipe.momentum:
        # A first step that is skipped would leave PyTorch's buffers uninitialized.
        for group in sgd.param_groups:
            for p in group["params"]:
                sgd.state[p]["momentum_buffer"] = torch.zeros_like(p)
    return sgd


def set_rates(optimizer: list[torch.optim.Optimizer], factor: float) -> None:
    """Set every learning rate to `factor` times its peak."""
    for o in optimizer:
        for group in o.param_groups:
            group["lr"] = factor * group["peak_lr"]


@torch.no_grad()
def update_average(
    average: Sequence[Tensor],
    now: Sequence[Tensor],
    decay: float,
    step: int,
    taken: Tensor | None = None,
) -> None:
    """Update an exponential moving average in place. Its decay grows at first, to forget the random start.

    taken: 1, or 0 to leave it unchanged without a wait for the device.
    """
    decay = min(decay, (1 + step) / (10 + step))
    if taken is None:
        torch._foreach_lerp_(average, now, 1 - decay)
        return
    changes = torch._foreach_sub(now, average)
    torch._foreach_mul_(changes, (1 - decay) * taken)
    torch._foreach_add_(average, changes)


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalized by Newton-Schulz iteration (Jordan et al. 2024), with Nesterov's look-ahead.

    The update of an m×n matrix is scaled by 0.2·√max(m, n), to the root mean square of AdamW's updates (Liu et al.
    2025, arXiv 2502.16982). Equal to `torch.optim.Muon(adjust_lr_fn="match_rms_adamw")`, but orthogonalizes matrices of
    one shape together. timm's Muon iterates in bf16 only, matrix by matrix, and treats a fused qkv as one matrix. The
    committed models and tables were made with this one.

    Convolution kernels become matrices of output channels × all other dimensions. Groups with `parts` = 3 hold
    matrices that stack q, k and v along their rows. `products` is the precision of the iteration. As in PyTorch's fused
    optimizers, a step with the attribute `found_inf`, a tensor, at 1 changes nothing.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        products: torch.dtype = torch.bfloat16,
    ):
        defaults = {
            "lr": lr,
            "peak_lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "parts": 1,
        }
        super().__init__(params, defaults)
        self.products = products

    @torch.no_grad()
    def step(self, closure=None):
        skipped = getattr(self, "found_inf", None)
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            for p in parameters:
                if "momentum_buffer" not in self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            gradients = [p.grad for p in parameters]
            buffers = [self.state[p]["momentum_buffer"] for p in parameters]
            decay = group["lr"] * group["weight_decay"]
            if skipped is not None:
                # A buffer in place of its gradient leaves the buffer unchanged.
                pairs = zip(buffers, gradients, strict=True)
                gradients = [torch.where(skipped > 0, buffer, g) for buffer, g in pairs]
                decay = decay * (1 - skipped)
            torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
            ahead = torch._foreach_lerp(gradients, buffers, group["momentum"])
            torch._foreach_mul_(parameters, 1 - decay)
            self._add_orthogonal(parameters, ahead, group["lr"], group["parts"], skipped)

    def _add_orthogonal(
        self,
        parameters: list[Tensor],
        updates: Iterable[Tensor],
        lr: float,
        parts: int,
        skipped: Tensor | None,
    ) -> None:
        """Subtract the orthogonalized updates from the parameters, matrices of one shape together."""
        stacks = defaultdict(list)
        for parameter, update in zip(parameters, updates, strict=True):
            for target, part in zip(parameter.chunk(parts), update.chunk(parts), strict=True):
                matrix = part.flatten(1)  # kernels: input channels and positions together
                stacks[matrix.shape].append((target, matrix))
        for shape, pairs in stacks.items():
            targets, matrices = zip(*pairs, strict=True)
            stack = torch.stack(matrices)
            if self.products == torch.float16:
                stack = unit(stack)  # before the conversion, in which small gradients become 0
            orthogonal = orthogonalize(stack.to(self.products)).to(targets[0].dtype)
            if skipped is not None:
                orthogonal = orthogonal * (1 - skipped)
            steps = [step.view_as(t) for step, t in zip(orthogonal, targets, strict=True)]
            alpha = -lr * 0.2 * math.sqrt(max(shape))
            torch._foreach_add_(list(targets), steps, alpha=alpha)


def unit(matrices: Tensor) -> Tensor:
    """Each matrix in (n, rows, columns) divided by its norm."""
    return matrices / matrices.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)


def orthogonalize(matrices: Tensor) -> Tensor:
    """Approximate U·Vᵀ of each matrix U·S·Vᵀ in (n, rows, columns), with singular values in about 0.7…1.2."""
    a, b, c = NEWTON_SCHULZ
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = unit(x)
    for _ in range(5):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if tall else x
