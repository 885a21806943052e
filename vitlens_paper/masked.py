"""Masked patch prediction (paper, B.1.2): some patch embeddings are corrupted, and their content is predicted.

From the output token of each corrupted patch the model predicts its mean color in 3 bits per channel, the mean colors
of its 4 × 4 parts, or its pixels. Two choices that the paper leaves open: the head is a linear layer on the last norm,
and "another patch" is drawn uniformly from the same image.

Shapes: B batch, P patches of p × p pixels, D width; S parts of a patch, 1 or 16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from vitlens.train import Recipe

MASKED = 0.8
"""Share of the corrupted patches that get the learned embedding."""
REPLACED = 0.1
"""Share of the corrupted patches that get another patch's embedding. The rest keep their own."""
OBJECTIVES = {
    "mean-color": "of corrupted patches (the paper's B.1.2)",
    "colors-4x4": "of their parts",
    "pixels": "of them",
}
"""Values of a recipe's `objective` for masked patch prediction, with their meanings."""
LEVELS = 8
"""Levels of a channel in 3 bits."""
COLORS = LEVELS**3


def corruption(
    batch: int, patches: int, share: float, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """(corrupted, source), both (B, P), drawn from the global generator, independently for each patch.

    corrupted: bool, True with probability `share`. source: int64, index of the patch that provides the embedding, or −1
    for the learned embedding.
    """
    u = torch.rand(batch, patches, device=device)
    own = torch.arange(patches, device=device).expand(batch, -1)
    offset = torch.randint(1, patches, (batch, patches), device=device)
    other = (own + offset) % patches
    masked = u < MASKED * share
    changed = u < (MASKED + REPLACED) * share
    corrupted = u < share
    source = torch.where(changed, other, own)
    source = torch.where(masked, -1, source)
    return corrupted, source


def in_patches(images: Tensor, patch: int) -> Tensor:
    """Pixels of each patch, row by row: (B, P, p · p, C) from images (B, C, H, W)."""
    in_columns = images.unflatten(3, (-1, patch))
    cut = in_columns.unflatten(2, (-1, patch))  # B C rows p cols p
    pixels = cut.permute(0, 2, 4, 3, 5, 1)  # B rows cols p p C
    return pixels.flatten(3, 4).flatten(1, 2)


def colors(pixels: Tensor, patch: int, side: int = 1) -> Tensor:
    """Mean color 64 r + 8 g + b of each of the `side` × `side` parts of each patch, (B, P, S) int64.

    pixels: (B, 3, H, W) integers from 0 to 255. Each channel is ⌊8 · mean / 256⌋, in exact integer arithmetic.
    """
    part = patch // side
    patches = in_patches(pixels.long(), patch)
    cells = patches.unflatten(2, (side, part, side, part))  # B P side part side part C
    sums = cells.sum(dim=(3, 5)).flatten(2, 3)
    area = part * part
    levels = LEVELS * sums // (256 * area)
    weights = torch.tensor([LEVELS**2, LEVELS, 1], device=pixels.device)
    weighted = levels * weights
    return weighted.sum(-1)


def color_of(ids: Tensor) -> Tensor:
    """Central color of each color number, (…, 3) in 0…1."""
    red = ids // LEVELS**2
    green = ids // LEVELS % LEVELS
    blue = ids % LEVELS
    levels = torch.stack([red, green, blue], -1)
    central = (levels + 0.5) * (256 / LEVELS)
    return central / 255


def restore_pixels(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """8-bit pixels of normalized images, (B, 3, H, W) int64 from 0 to 255."""
    colors = x.float() * std + mean
    levels = (colors * 255).round()
    return levels.clamp(0, 255).long()


def check(recipe: Recipe) -> None:
    """Raise ValueError for settings of a recipe that masked patch prediction does not support."""
    if not recipe.masked:
        raise ValueError(
            f"masked={recipe.masked} must be 0 with objective=labels and a share between 0 and 1 with "
            "objective=mean-color, colors-4x4 or pixels."
        )
    keywords = recipe.model_kwargs
    starts_from_weights = recipe.init or recipe.continues
    needs_labels = recipe.head != "linear" or recipe.loss != "softmax" or recipe.label_smoothing
    mixes_images = recipe.augment.mixup or recipe.augment.cutmix
    leaves_out_patches = recipe.patch_drop or keywords.get("attention") == "axial"
    many_sizes = keywords.get("dynamic_img_size") or keywords.get("dynamic_img_pad")
    if starts_from_weights or needs_labels or mixes_images or leaves_out_patches or many_sizes:
        raise ValueError(
            f"objective={recipe.objective} starts from random weights without labels, on whole images of one size: "
            "leave out init, patch_drop, attention=axial, head, loss, label_smoothing, mixup, cutmix and dynamic sizes."
        )
    if recipe.objective == "colors-4x4" and recipe.patch_size % 4:
        raise ValueError(
            f"objective=colors-4x4 needs a patch_size that is a multiple of 4, got {recipe.patch_size}."
        )


def build(model: nn.Module, recipe: Recipe) -> MaskedPatches:
    """The objective of a recipe for its model, with random weights of the global generator."""
    return MaskedPatches(model, recipe.objective, recipe.masked, recipe.mean, recipe.std)


class MaskedPatches(nn.Module):
    """The head and the learned embedding of masked patch prediction. (model, images) → loss.

    target: "mean-color", "colors-4x4" or "pixels". The loss is the mean over all corrupted patches of the images of the
    cross-entropy with the color of each part, or of the squared error of the normalized pixels.
    """

    def __init__(self, model: nn.Module, target: str, share: float, mean, std):
        super().__init__()
        self.patch = model.patch_embed.patch_size[0]
        self.share = share
        self.side = 4 if target == "colors-4x4" else 1
        self.regresses = target == "pixels"
        if self.regresses:
            outputs = 3 * self.patch**2
        else:
            parts = self.side**2
            outputs = parts * COLORS
        width = model.embed_dim
        self.mask_token = nn.Parameter(torch.empty(1, 1, width))
        self.head = nn.Linear(width, outputs)
        nn.init.trunc_normal_(self.mask_token, std=0.02)
        nn.init.trunc_normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)
        mean = torch.tensor(mean).view(3, 1, 1)
        std = torch.tensor(std).view(3, 1, 1)
        self.register_buffer("mean", mean, persistent=False)
        self.register_buffer("std", std, persistent=False)

    def forward(self, model: nn.Module, x: Tensor) -> Tensor:
        patches = model.patch_embed.num_patches
        corrupted, source = corruption(len(x), patches, self.share, x.device)
        predicted = self.predict(model, x, source)
        return self.loss(predicted, x, corrupted)

    def predict(self, model: nn.Module, x: Tensor, source: Tensor) -> Tensor:
        """Head outputs (B, P, outputs) for every patch, with the patch embeddings replaced by those of `source`."""
        tokens = model.patch_embed(x)
        indices = source.clamp(min=0)
        indices = indices[..., None].expand_as(tokens)
        replaced = tokens.gather(1, indices)
        masked = source < 0
        mask_token = self.mask_token.to(tokens.dtype)
        tokens = torch.where(masked[..., None], mask_token, replaced)
        z = model._pos_embed(tokens)
        z = model.norm_pre(z)
        for block in model.blocks:
            z = block(z)
        z = model.norm(z)
        of_patches = z[:, model.num_prefix_tokens :]
        return self.head(of_patches)

    def loss(self, predicted: Tensor, x: Tensor, corrupted: Tensor) -> Tensor:
        """The mean loss of the corrupted patches."""
        predicted = predicted.float()
        if self.regresses:
            pixels = in_patches(x.float(), self.patch).flatten(2)
            errors = predicted - pixels
            losses = errors.square().mean(-1)
        else:
            pixels = restore_pixels(x, self.mean, self.std)
            target = colors(pixels, self.patch, self.side)
            logits = self._logits(predicted).flatten(0, 2)
            entropies = F.cross_entropy(logits, target.flatten(), reduction="none")
            losses = entropies.view_as(target).mean(-1)
        total = (losses * corrupted).sum()
        count = corrupted.sum().clamp(min=1)
        return total / count

    def _logits(self, predicted: Tensor) -> Tensor:
        """Logits of the colors of each part, (B, P, S, colors), from head outputs."""
        parts = self.side**2
        return predicted.unflatten(-1, (parts, COLORS))

    def predict_pictures(self, model: nn.Module, x: Tensor) -> dict[str, Tensor]:
        """`corrupted` and `source` (B, rows, cols), drawn anew, and `predicted` (B, h, w, 3), colors in 0…1."""
        images = len(x)
        rows, cols = model.patch_embed.grid_size
        corrupted, source = corruption(images, rows * cols, self.share, x.device)
        predicted = self.predict(model, x, source).float()
        if self.regresses:
            normalized = predicted.unflatten(-1, (-1, 3))
            mean = self.mean.flatten()
            std = self.std.flatten()
            pixels = normalized * std + mean
        else:
            ids = self._logits(predicted).argmax(-1)
            pixels = color_of(ids)
        pixels = pixels.clamp(0, 1)
        return {
            "corrupted": corrupted.view(images, rows, cols),
            "source": source.view(images, rows, cols),
            "predicted": assemble_patches(pixels, rows, cols),
        }


def assemble_patches(parts: Tensor, rows: int, cols: int) -> Tensor:
    """Images (B, h, w, 3) assembled from patches (B, P, S, 3) of S pixels each, row by row."""
    side = round(parts.shape[2] ** 0.5)
    patches = parts.unflatten(2, (side, side))
    cut = patches.unflatten(1, (rows, cols))
    by_rows = cut.transpose(2, 3)  # B rows side cols side 3
    return by_rows.flatten(3, 4).flatten(1, 2)
