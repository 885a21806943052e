"""Optimisers and schedules: AdamW and Muon over a vision transformer's parameters."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from vitlens.recipes import Recipe

# Quintic that drives singular values towards 1: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def rate(progress: float, warmup: float, schedule: str) -> float:
    """Multiplier of the peak learning rate at ``progress`` in [0, 1]: linear up to 1, then down to 0."""
    if progress < warmup:
        return progress / warmup
    remaining = (1 - progress) / (1 - warmup)
    return 0.5 * (1 - math.cos(math.pi * remaining)) if schedule == "cosine" else remaining


def optimizers(model: nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """The recipe's optimisers. Each group carries ``peak_lr``, which the schedule multiplies.

    Muon takes the matrices inside the blocks; a fused ``qkv`` counts as three. Embeddings, the head and everything of
    one dimension go to AdamW, which decays matrices but neither norms, biases, tokens nor positions.
    """
    hidden, stacked, decayed, rest = [], [], [], []
    for name, parameter in model.named_parameters():
        inside = ".blocks." in f".{name}" and parameter.ndim == 2
        if recipe.optimizer == "muon" and inside:
            (stacked if name.endswith("qkv.weight") else hidden).append(parameter)
        elif parameter.ndim >= 2 and not name.endswith(("pos_embed", "cls_token", "reg_token")):
            decayed.append(parameter)
        else:
            rest.append(parameter)
    adamw = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": recipe.weight_decay, "peak_lr": recipe.lr},
            {"params": rest, "weight_decay": 0.0, "peak_lr": recipe.lr},
        ],
        lr=recipe.lr,
        betas=recipe.betas,
        fused=True,
    )
    if recipe.optimizer == "adamw":
        return [adamw]
    groups = [{"params": hidden, "parts": 1}, {"params": stacked, "parts": 3}]
    return [Muon(groups, recipe.muon_lr, recipe.momentum, recipe.weight_decay), adamw]


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised by Newton-Schulz iteration (Jordan et al. 2024), with Nesterov's look-ahead.

    The update of an m×n matrix is scaled by 0.2·√max(m, n), which gives it the root mean square of AdamW's
    (Liu et al. 2025, arXiv 2502.16982). Equal to ``torch.optim.Muon(adjust_lr_fn="match_rms_adamw")``, but matrices of
    one shape are orthogonalised together: some 30 launches a step for a whole ViT rather than more than a thousand.

    A group with ``parts`` = 3 holds matrices that are three stacked along their rows (q, k and v).
    """

    def __init__(self, params: Iterable, lr: float, momentum: float = 0.95, weight_decay: float = 0.0):
        super().__init__(
            params, {"lr": lr, "peak_lr": lr, "momentum": momentum, "weight_decay": weight_decay, "parts": 1}
        )

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            for p in parameters:
                if "momentum_buffer" not in self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            gradients = [p.grad for p in parameters]
            buffers = [self.state[p]["momentum_buffer"] for p in parameters]
            torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
            ahead = torch._foreach_lerp(gradients, buffers, group["momentum"])
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            stacks = defaultdict(list)
            for parameter, update in zip(parameters, ahead, strict=True):
                for pair in zip(parameter.chunk(group["parts"]), update.chunk(group["parts"]), strict=True):
                    stacks[pair[0].shape].append(pair)
            for shape, pairs in stacks.items():
                targets, updates = zip(*pairs, strict=True)
                orthogonal = orthogonalised(torch.stack(updates)).to(targets[0].dtype)
                scale = 0.2 * math.sqrt(max(shape))
                torch._foreach_add_(list(targets), list(orthogonal.unbind()), alpha=-group["lr"] * scale)


def orthogonalised(matrices: Tensor, steps: int = 5) -> Tensor:
    """Approximately U·Vᵀ of each matrix U·S·Vᵀ in (n, rows, columns): bf16, singular values in about 0.7…1.2."""
    a, b, c = NEWTON_SCHULZ
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
