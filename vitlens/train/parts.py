"""Parts of a Vision Transformer that timm has no keywords for, and `vitlens_vit`, the architecture made with them.

It is registered with timm when this module is imported. Such a model is saved as any other, and `vitlens.load_model`
opens its folder; timm alone refuses it, because it knows no architecture of this name.

Shapes: B batch, H heads, T tokens = R prefix + P patches, D width, K head width.
"""

from __future__ import annotations

import functools
import itertools

import torch
import torch.nn.functional as F
from timm.layers import (
    Attention,
    ConvNormAct,
    HybridEmbed,
    PatchEmbed,
    RelPosBias,
    RotaryEmbeddingCat,
    apply_rot_embed_cat,
    build_sincos2d_pos_embed,
    trunc_normal_,
)
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from vitlens.train.choices import IN_LAYERS, NAME, check
from vitlens.train.turns import GROUPS, turned


class Table(nn.Module):
    """Learned positions, a vector for each token. () → (1, T, D)."""

    def __init__(self, grid: tuple[int, int], prefix: int, width: int):
        super().__init__()
        self.pos_embed = nn.Parameter(trunc_normal_(torch.empty(1, prefix + grid[0] * grid[1], width), std=0.02))

    def forward(self) -> Tensor:
        return self.pos_embed


class FactoredTable(nn.Module):
    """Learned positions: half a vector for each column, half for each row, zeros for prefix tokens. () → (1, T, D)."""

    def __init__(self, grid: tuple[int, int], prefix: int, width: int):
        super().__init__()
        self.prefix = prefix
        self.row_pos_embed, self.col_pos_embed = (
            nn.Parameter(trunc_normal_(torch.empty(count, width // 2), std=0.02)) for count in grid
        )

    def forward(self) -> Tensor:
        rows, cols = len(self.row_pos_embed), len(self.col_pos_embed)
        halves = self.col_pos_embed.expand(rows, -1, -1), self.row_pos_embed[:, None].expand(-1, cols, -1)
        return F.pad(torch.cat(halves, -1).flatten(0, 1), (0, 0, self.prefix, 0))[None]


def conv_stem(patch_size: int, in_chans: int, embed_dim: int, **kwargs) -> HybridEmbed:
    """timm's embedding of a feature map, here that of stride-2 convolutions, whose channels double up to the width."""
    halvings = patch_size.bit_length() - 1
    channels = [in_chans, *(embed_dim // 2 ** (halvings - 1 - i) for i in range(halvings))]
    layers = [ConvNormAct(a, b, 3, stride=2) for a, b in itertools.pairwise(channels)]
    return HybridEmbed(nn.Sequential(*layers), patch_size=1, in_chans=in_chans, embed_dim=embed_dim, **kwargs)


class ShiftedPixels(nn.Module):
    """(B, C, height, width) images → (B, D, rows, cols): the pixels of a patch in five images, normalized together,
    and a linear map of them. The images are the given one and four shifted along the diagonals, zeros outside."""

    def __init__(self, patch_size: int, in_chans: int, embed_dim: int, bias: bool):
        super().__init__()
        self.patch_size, pixels = patch_size, 5 * in_chans * patch_size**2
        self.norm = nn.LayerNorm(pixels, eps=1e-6)
        self.linear = nn.Linear(pixels, embed_dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        half = (self.patch_size // 2, -(self.patch_size // 2))
        x = torch.cat([x, *(F.pad(x, (dx, -dx, dy, -dy)) for dy in half for dx in half)], 1)
        x = F.pixel_unshuffle(x, self.patch_size)
        return self.linear(self.norm(x.flatten(2).mT)).mT.unflatten(-1, x.shape[-2:])


class ShiftedPatches(PatchEmbed):
    """timm's patch embedding with `ShiftedPixels` in place of its convolution."""

    def __init__(self, patch_size: int, in_chans: int, embed_dim: int, bias: bool = True, **kwargs):
        super().__init__(patch_size=patch_size, in_chans=in_chans, embed_dim=embed_dim, bias=bias, **kwargs)
        self.proj = ShiftedPixels(patch_size, in_chans, embed_dim, bias)


TOKENIZERS = {"conv-stem": conv_stem, "shifted-patches": ShiftedPatches}


class VariedAttention(Attention):
    """timm's attention that knows where patches lie. Prefix tokens have no place: they are not rotated, and nothing is
    added to their logits.

    Axial attention is that over all patches, with the others hidden: its maps are exact, and its cost is not lower.
    """

    def prepare(self, positions: str, attention: str, grid: tuple[int, int], layer: int) -> None:
        """Add the parts of choices. layer: from 0; axial attention is along rows in even ones, else along columns."""
        self.attention, self.grid, self.layer = attention, grid, layer
        self.offset_pos_embed = self.rel_pos = self.rope = self.temperature = None
        if attention == "locality":
            self.temperature = nn.Parameter(torch.full((self.num_heads,), self.head_dim**0.5))
        if positions == "relative-1d":
            offsets = torch.empty(2 * grid[0] * grid[1] - 1, self.head_dim)
            self.offset_pos_embed = nn.Parameter(trunc_normal_(offsets, std=0.02))
        elif positions == "relative-2d":
            self.rel_pos = RelPosBias(grid, self.num_heads)
        elif positions == "rotary":  # as timm's vit_small_patch16_rope_224
            self.rope = RotaryEmbeddingCat(
                self.head_dim, temperature=100.0, in_pixels=False, feat_shape=list(grid), grid_indexing="xy"
            )

    def forward(self, x: Tensor, attn_mask: Tensor = None, is_causal: bool = False) -> Tensor:
        if attn_mask is not None or is_causal:
            raise ValueError(f"{NAME} takes no mask.")
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None:
            q, k = self._rotated(q).type_as(v), self._rotated(k).type_as(v)
        scale = self.scale
        if self.temperature is not None:
            q, scale = (q / self.temperature[:, None, None]).type_as(v), 1.0
        mask, drop = self._mask(q, scale), self.attn_drop.p if self.training else 0.0
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=drop, scale=scale)
        return self.proj_drop(self.proj(self.norm(x.transpose(1, 2).flatten(2))))

    def _rotated(self, x: Tensor) -> Tensor:
        """(B, H, T, K) queries or keys, those of patches rotated."""
        angles = self.rope.get_embed()
        prefix = x.shape[2] - len(angles)
        return torch.cat([x[:, :, :prefix], apply_rot_embed_cat(x[:, :, prefix:], angles)], 2)

    def _mask(self, q: Tensor, scale: float) -> Tensor | None:
        """What a token sees, (T, T) booleans; or, with −∞ for the rest, what is added to the logits, (…, T, T)."""
        seen, bias = self._seen(q), self._bias(q, scale)
        if seen is None or bias is None:
            return seen if bias is None else bias
        return bias.masked_fill(~seen, -torch.inf)

    def _seen(self, q: Tensor) -> Tensor | None:
        """(T, T) whether a query sees a key, or None where it sees all."""
        if self.attention == "plain":
            return None
        place = torch.arange(q.shape[2], device=q.device)
        if self.attention == "locality":
            return place[:, None] != place
        line = place % self.grid[1] if self.layer % 2 else place // self.grid[1]
        return line[:, None] == line

    def _bias(self, q: Tensor, scale: float) -> Tensor | None:
        """(B or 1, H, T, T) what positions add to the logits, or None."""
        if self.rel_pos is not None:
            bias = self.rel_pos.get_bias()
        elif self.offset_pos_embed is not None:
            patches = (len(self.offset_pos_embed) + 1) // 2
            place = torch.arange(patches, device=q.device)
            offset = place[:, None] - place + patches - 1
            bias = (q[:, :, -patches:] * scale) @ self.offset_pos_embed.mT
            bias = bias.gather(-1, offset.expand(*bias.shape[:2], -1, -1))
        else:
            return None
        prefix = q.shape[2] - bias.shape[-1]
        return F.pad(bias, (prefix, 0, prefix, 0)).to(q.dtype)


class PlacedBlock(Block):
    """timm's block that adds positions to its input; the first has them from the stem."""

    def forward(self, x: Tensor, **masks) -> Tensor:
        return super().forward(x if self.positions is None else x + self.positions(), **masks)


class VariedTransformer(VisionTransformer):
    """timm's Vision Transformer with the parts of some `Choice`s."""

    def __init__(
        self, positions: str = "learned-1d", positions_at: str = "stem", tokenizer: str = "patches",
        attention: str = "plain", equivariance: str = "none", **kwargs,
    ):  # fmt: skip
        check({
            **kwargs, "positions": positions, "positions_at": positions_at, "tokenizer": tokenizer,
            "attention": attention, "equivariance": equivariance,
        })  # fmt: skip
        varied = positions in IN_LAYERS or attention != "plain"
        if positions != "learned-1d":
            kwargs["pos_embed"] = "none"
        if tokenizer in TOKENIZERS:
            kwargs["embed_layer"] = TOKENIZERS[tokenizer]
        if varied:
            kwargs["attn_layer"] = VariedAttention
        if positions_at != "stem":
            kwargs["block_fn"] = PlacedBlock
        if attention == "axial":
            kwargs["depth"] = 2 * kwargs.get("depth", 12)
        super().__init__(**kwargs)
        self.equivariance = equivariance
        """The group of `turns.GROUPS` over which tokens are averaged; "none" lets it see each picture once."""
        grid, prefix, width = self.patch_embed.grid_size, self.num_prefix_tokens, self.embed_dim
        if positions == "sinusoidal":
            fixed = F.pad(build_sincos2d_pos_embed(list(grid), width), (0, 0, prefix, 0))
            del self.pos_embed  # timm's None
            self.register_buffer("pos_embed", fixed[None], persistent=False)
        factored = positions == "learned-2d"
        table = functools.partial(FactoredTable if factored else Table, grid, prefix, width)
        if factored:
            self.positions = table()
        for index, block in enumerate(self.blocks):
            if varied:
                block.attn.prepare(positions, attention, grid, index)
            if positions_at != "stem":  # what is no module is not saved: a shared table belongs to the stem
                shared = functools.partial(getattr, self, "pos_embed")
                block.positions = None if index == 0 else table() if positions_at == "every-layer" else shared

    def forward_features(self, x: Tensor, **masks) -> Tensor:
        """(B, T, D) tokens after the last norm, averaged over the copies of the pictures, which turn with them."""
        group = self.equivariance
        if group == "none":
            return super().forward_features(x, **masks)
        copies = torch.cat([turned(x, group, number) for number in range(GROUPS[group])])
        tokens = super().forward_features(copies, **masks).unflatten(0, (GROUPS[group], len(x)))
        prefix, patches = tokens.split([self.num_prefix_tokens, tokens.shape[2] - self.num_prefix_tokens], 2)
        maps = patches.mT.unflatten(-1, self.patch_embed.grid_size)
        maps = torch.stack([turned(each, group, -number) for number, each in enumerate(maps)]).mean(0)
        return torch.cat([prefix.mean(0), maps.flatten(2).mT], 1)

    def group_matcher(self, coarse: bool = False) -> dict:
        groups = super().group_matcher(coarse)
        return {**groups, "stem": groups["stem"] + r"|positions"}


class FactoredTransformer(VariedTransformer):
    """A Vision Transformer whose table of positions is made of one for columns and one for rows."""

    @property
    def pos_embed(self) -> Tensor | None:
        """(1, T, D) the table, put together anew each time."""
        return self.positions() if "positions" in self._modules else None

    @pos_embed.setter
    def pos_embed(self, nothing: None) -> None:
        """timm sets this to None where a model has no table of positions, which is what it does here."""


default_cfgs = generate_default_cfgs({NAME: {
    "num_classes": 1000, "input_size": (3, 224, 224), "fixed_input_size": True, "first_conv": "patch_embed.proj",
    "classifier": "head",
}})  # fmt: skip


@register_model
def vitlens_vit(pretrained: bool = False, **kwargs) -> VariedTransformer:
    """timm's plain Vision Transformer with choices: `timm.create_model("vitlens_vit", positions="rotary")`.

    Raises ValueError for choices that do not go together.
    """
    kind = FactoredTransformer if kwargs.get("positions") == "learned-2d" else VariedTransformer
    return build_model_with_cfg(kind, NAME, pretrained, **kwargs)
