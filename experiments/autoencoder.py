"""A masked autoencoder (He et al. 2022, arXiv 2111.06377): encode the patches that are shown, decode the others.

As in the paper and its authors' code, the encoder never sees a hidden patch or a mask token, the decoder is light, and
the target is each hidden patch, normalized by its own mean and deviation. Ours is half as wide as the encoder.

    train.run(RECIPE, DATA, OUT, build=autoencoder.build)

trains one; OUT/model is the encoder, a plain Vision Transformer that `vitlens train --model` fine-tunes.

Shapes: B batch, R prefix tokens, P patches of p × p pixels of which V are visible, D width.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from timm.layers import build_sincos2d_pos_embed
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from vitlens.data.augment import seed_of
from vitlens.train import Recipe, recipe, register
from vitlens_paper.masked import assemble_patches, in_patches

# He et al. hide 75 % and found shallow decoders as good. The rest is that of masked-patches.
RECIPE = register(
    replace(recipe("masked-patches"), name="masked-autoencoder", objective="labels", masked=0.0)
).name


def build(plan: Recipe, share: float = 0.75, depth: int = 2) -> nn.Module:
    """The recipe's model, with a `MaskedAutoencoder` as its objective. share: hidden patches; depth: decoder layers."""
    model = replace(plan, objective="mean-color", masked=0.5).build()  # without a head
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(plan.seed, 1))
        model.objective = MaskedAutoencoder(model, depth, share, plan.mean, plan.std)
    return model


def shuffled(
    batch: int, patches: int, share: float, device: torch.device | str = "cpu"
) -> tuple[Tensor, int]:
    """An order of the patches, int64 (B, P), drawn from the global generator, and how many of its first are visible."""
    return torch.rand(batch, patches, device=device).argsort(dim=1), visible_count(patches, share)


def visible_count(patches: int, share: float) -> int:
    """V, how many patches are left if a `share` of them is hidden."""
    return patches - round(share * patches)


def normalized_patches(x: Tensor, patch: int) -> tuple[Tensor, Tensor, Tensor]:
    """(B, P, 3 · p · p) patches less their mean, by their deviation; and both (B, P, 1). Variance is unbiased."""
    values = in_patches(x.float(), patch).flatten(2)
    mean, deviation = values.mean(-1, keepdim=True), (values.var(-1, keepdim=True) + 1e-6).sqrt()
    return (values - mean) / deviation, mean, deviation


class MaskedAutoencoder(nn.Module):
    """The decoder of a masked autoencoder. (model, images) → mean squared error on the hidden, normalized patches."""

    def __init__(self, model: nn.Module, depth: int, share: float, mean, std):
        super().__init__()
        self.patch, self.share, self.prefix = (
            model.patch_embed.patch_size[0],
            share,
            model.num_prefix_tokens,
        )
        width, heads = model.embed_dim // 2, model.blocks[0].attn.num_heads
        self.embed = nn.Linear(model.embed_dim, width)
        self.mask_token = nn.Parameter(nn.init.trunc_normal_(torch.empty(1, 1, width), std=0.02))
        places = F.pad(
            build_sincos2d_pos_embed(list(model.patch_embed.grid_size), width),
            (0, 0, self.prefix, 0),
        )
        self.register_buffer("places", places[None], persistent=False)
        self.blocks = nn.ModuleList(Block(width, heads, qkv_bias=True) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, 3 * self.patch**2)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        for name, values in {"mean": mean, "std": std}.items():
            self.register_buffer(name, torch.tensor(values), persistent=False)

    def forward(self, model: nn.Module, x: Tensor) -> Tensor:
        order, visible = shuffled(len(x), model.patch_embed.num_patches, self.share, x.device)
        return self.loss(
            self.decoded(self.encoded(model, x, order[:, :visible]), order), x, order[:, visible:]
        )

    def encoded(self, model: nn.Module, x: Tensor, shown: Tensor) -> Tensor:
        """(B, R + V, D) the model's output tokens, from its prefix tokens and the patches `shown` (B, V) alone."""
        tokens = model._pos_embed(model.patch_embed(x))
        prefix, patches = tokens[:, : self.prefix], tokens[:, self.prefix :]
        chosen = patches.gather(1, shown[..., None].expand(-1, -1, patches.shape[-1]))
        z = model.norm_pre(torch.cat([prefix, chosen], dim=1))
        for block in model.blocks:
            z = block(z)
        return model.norm(z)

    def decoded(self, tokens: Tensor, order: Tensor) -> Tensor:
        """(B, P, 3 · p · p) predictions for all patches in order, from the result of `encoded`."""
        z = self.embed(tokens)
        hidden = self.mask_token.to(z.dtype).expand(
            len(z), order.shape[1] + self.prefix - z.shape[1], -1
        )
        z = torch.cat(
            [z[:, : self.prefix], unshuffled(torch.cat([z[:, self.prefix :], hidden], 1), order)], 1
        )
        z = z + self.places
        for block in self.blocks:
            z = block(z)
        return self.head(self.norm(z)[:, self.prefix :])

    def loss(self, predicted: Tensor, x: Tensor, hidden: Tensor) -> Tensor:
        """The mean squared error of the patches `hidden` (B, P − V)."""
        target = normalized_patches(x, self.patch)[0]
        each = (predicted.float() - target).square().mean(-1)
        return each.gather(1, hidden).mean()

    def predict_pictures(self, model: nn.Module, x: Tensor) -> dict[str, Tensor]:
        """As `MaskedPatches.predict_pictures`; predictions get back the mean and the deviation of the true patch."""
        rows, cols = model.patch_embed.grid_size
        order, visible = shuffled(len(x), rows * cols, self.share, x.device)
        found = self.decoded(self.encoded(model, x, order[:, :visible]), order).float()
        _, mean, deviation = normalized_patches(x, self.patch)
        pixels = (found * deviation + mean).unflatten(-1, (-1, 3)) * self.std + self.mean
        corrupted = torch.ones_like(order, dtype=torch.bool).scatter(1, order[:, :visible], False)
        source = torch.where(corrupted, -1, torch.arange(rows * cols, device=x.device))
        grid = {"corrupted": corrupted, "source": source}
        picture = assemble_patches(pixels.clamp(0, 1), rows, cols)
        return {name: each.view(len(x), rows, cols) for name, each in grid.items()} | {
            "predicted": picture
        }


def unshuffled(tokens: Tensor, order: Tensor) -> Tensor:
    """Tokens (B, P, D) that stand in the order `order` (B, P), each put back in its place."""
    return tokens.gather(1, order.argsort(dim=1)[..., None].expand_as(tokens))
