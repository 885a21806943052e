"""Variants that the paper compares and timm lacks, as the timm architecture `vitlens_vit`.

Positions (D.4 and Table 8), the mean of patches as read-out (D.3 and Fig. 9) and axial attention (D.6 and Fig. 13).
Importing this module registers `vitlens_vit` with timm. `vitlens_paper.plugin` adds the variants to recipes, as
`--set model.positions=none`, and to the models that vitlens opens and captures.

Shapes: B batch, H heads, T tokens = R prefix + P patches, D width, K head width.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from timm.layers import Attention, trunc_normal_
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from vitlens.names import require_known

__all__ = []  # timm's register_model appends vitlens_vit
__dir__ = __all__.copy

NAME = "vitlens_vit"
SETTINGS = {
    "positions": ("learned-1d", "none", "learned-2d", "relative-1d"),
    "positions_at": ("stem", "every-layer", "every-layer-shared"),
    "readout": ("class-token", "mean"),
    "attention": ("plain", "axial"),
}
"""Values of each setting, the plain model's first."""
MEANINGS = {
    "positions": (
        'Position embedding: "learned-1d", as in the paper; "none"; "learned-2d", half a vector for the column and '
        'half for the row; or "relative-1d" within attention (Table 8).'
    ),
    "positions_at": 'Place of learned positions: "stem", "every-layer" with a table for each, or "every-layer-shared".',
    "readout": (
        'Input of the head: "class-token", as in the paper, or "mean" of the patches after the last norm, as good in '
        "the paper at a lower rate (Fig. 9)."
    ),
    "attention": (
        '"plain", as in the paper, or "axial", along rows and then along columns, which doubles the layers and takes '
        "the time of both (Fig. 13)."
    ),
}
"""Meaning of each setting."""
KEYWORDS = {
    "none": {"pos_embed": "none"},
    "learned-2d": {"pos_embed": "none"},
    "relative-1d": {"pos_embed": "none"},
    "mean": {"global_pool": "avg", "fc_norm": False, "class_token": False},
}
"""timm's keywords for a value."""
BY_TIMM = ("none", "mean")
"""Values that timm's keywords cover. All others need `vitlens_vit`."""


def settings_that_differ(settings: Mapping) -> dict[str, str]:
    """Settings that differ from the plain model."""
    variants = {}
    for name, (plain, *_) in SETTINGS.items():
        if name in settings and settings[name] != plain:
            variants[name] = settings[name]
    return variants


def keywords(settings: Mapping) -> dict:
    """Keywords of timm or `vitlens_vit` for the variants in settings."""
    words, own = {}, {}
    for name, value in settings_that_differ(settings).items():
        words |= KEYWORDS.get(value, {})
        if value not in BY_TIMM:
            own[name] = value
    return {**words, **own}


def resolve(architecture: str, settings: Mapping) -> tuple[str, dict]:
    """Architecture and keywords for timm of an architecture's keywords with variants among them.

    The architecture is `vitlens_vit` if timm lacks a variant. Raises ValueError for a keyword that a variant sets.
    """
    variants = settings_that_differ(settings)
    words = keywords(variants)
    rest = {name: value for name, value in settings.items() if name not in SETTINGS}
    for name in rest:
        if name in words:
            choices = [f"model.{setting}={value}" for setting, value in variants.items()]
            raise ValueError(
                f"model.{name} is set by {' and '.join(choices)}. Leave model.{name} out."
            )
    by_timm = all(value in BY_TIMM for value in variants.values())
    return architecture if by_timm else NAME, {**words, **rest}


def check_former(settings: Mapping) -> None:
    """Raise ValueError for a variant among the settings of a recipe, where earlier versions had it."""
    for name in SETTINGS:
        if name in settings:
            raise ValueError(
                f"{name} is a keyword of the model. Set model.{name}={settings[name]}."
            )


def upgrade(settings: Mapping) -> dict:
    """Settings of a recipe with the variants of an earlier version moved to `model_kwargs`.

    Files that earlier versions wrote hold all of `SETTINGS`. Raises ValueError for a file with some of them, which a
    person wrote.
    """
    if not all(name in settings for name in SETTINGS):
        check_former(settings)
        return {**settings}
    upgraded = {name: value for name, value in settings.items() if name not in SETTINGS}
    model_kwargs = upgraded.get("model_kwargs", {})
    upgraded["model_kwargs"] = {**model_kwargs, **settings_that_differ(settings)}
    return upgraded


def check(settings: Mapping) -> None:
    """Raise ValueError for invalid combinations of keywords of `vitlens_vit`."""
    for name, values in SETTINGS.items():
        require_known(settings.get(name, values[0]), values, name)
    variants = settings_that_differ(settings)
    _check_positions(settings, variants)
    _check_attention(settings, variants)
    unsupported = ("dynamic_img_size", "dynamic_img_pad", "no_embed_class")
    if any(settings.get(name) for name in unsupported):
        raise ValueError(
            f"{NAME} takes images of one size, with positions for all tokens. Leave dynamic_img_size and "
            "no_embed_class out."
        )


def _check_positions(settings: Mapping, variants: Mapping) -> None:
    positions = variants.get("positions", "learned-1d")
    has_table = positions in ("learned-1d", "learned-2d")
    if positions == "learned-1d" and settings.get("pos_embed") == "none":
        has_table = False
    if "positions_at" in variants and not has_table:
        raise ValueError("positions_at is for learned tables: learned-1d, learned-2d.")
    if positions != "learned-1d" and settings.get("pos_embed", "none") != "none":
        raise ValueError(
            f"pos_embed={settings['pos_embed']} would add a second table to positions={positions}. Leave pos_embed out."
        )
    if positions == "learned-2d" and settings.get("embed_dim", 768) % 2:
        raise ValueError("positions=learned-2d needs an even width.")


def _check_attention(settings: Mapping, variants: Mapping) -> None:
    prefix = settings.get("class_token", True) or settings.get("reg_tokens", 0)
    if "attention" in variants and prefix:
        raise ValueError(
            "attention=axial excludes prefix tokens. Set readout=mean and reg_tokens=0."
        )
    needs_all = (
        "attention" in variants
        or "positions_at" in variants
        or variants.get("positions") == "relative-1d"
    )
    if needs_all and settings.get("patch_drop_rate"):
        raise ValueError(
            f"{NAME} needs all patches in every layer. Set patch_drop=0 and patch_drop_until=0."
        )


class Table(nn.Module):
    """Learned positions. () → (1, T, D).

    Holds a vector for each token. If `factored`, half a vector for each column and half for each row, and zeros for
    prefix tokens.
    """

    def __init__(self, grid: tuple[int, int], prefix: int, width: int, factored: bool = False):
        super().__init__()
        rows, cols = grid
        self.prefix = prefix
        sizes = {"pos_embed": (1, prefix + rows * cols, width)}
        if factored:
            sizes = {"row_pos_embed": (rows, width // 2), "col_pos_embed": (cols, width // 2)}
        for name, size in sizes.items():
            setattr(self, name, nn.Parameter(trunc_normal_(torch.empty(size), std=0.02)))

    def forward(self) -> Tensor:
        if "pos_embed" in self._parameters:
            return self.pos_embed
        rows, cols = len(self.row_pos_embed), len(self.col_pos_embed)
        by_column = self.col_pos_embed.expand(rows, -1, -1)
        by_row = self.row_pos_embed[:, None].expand(-1, cols, -1)
        patches = torch.cat((by_column, by_row), -1).flatten(0, 1)
        return F.pad(patches, (0, 0, self.prefix, 0))[None]


class PlacedAttention(Attention):
    """timm's attention with relative positions, without a bias for prefix tokens, or with axial attention.

    Axial attention computes attention over all patches with a mask. Its maps are exact, at the same cost.
    """

    def prepare(self, positions: str, attention: str, grid: tuple[int, int], layer: int) -> None:
        """Add the parts of a variant. layer: from 0. Axial attention is along rows in even layers, else columns."""
        self.attention, self.grid, self.layer = attention, grid, layer
        self.offset_pos_embed = None
        if positions == "relative-1d":
            offsets = torch.empty(2 * grid[0] * grid[1] - 1, self.head_dim)
            self.offset_pos_embed = nn.Parameter(trunc_normal_(offsets, std=0.02))

    def forward(self, x: Tensor, attn_mask: Tensor = None, is_causal: bool = False) -> Tensor:
        if attn_mask is not None or is_causal:
            raise ValueError(f"{NAME} does not support attention masks.")
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        q, k, scale = self.place(self.q_norm(q), self.k_norm(k))
        x = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=self.mask(q, scale),
            dropout_p=self.attn_drop.p if self.training else 0.0,
            scale=scale,
        )
        x = self.norm(x.transpose(1, 2).flatten(2))
        return self.proj_drop(self.proj(x))

    def place(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, float]:
        """Queries, keys and the scale of their dot products. Subclasses put positions into them."""
        return q, k, self.scale

    def mask(self, q: Tensor, scale: float) -> Tensor | None:
        """Mask or bias for the attention logits: the visible keys, the bias, or the bias of visible keys."""
        visible = self.visible(q)
        bias = self.bias(q, scale)
        if bias is None:
            return visible
        if visible is None:
            return bias
        return bias.masked_fill(~visible, -torch.inf)

    def visible(self, q: Tensor) -> Tensor | None:
        """Mask (T, T), True for visible keys of a query, or None if all keys are visible."""
        if self.attention != "axial":
            return None
        place = torch.arange(q.shape[2], device=q.device)
        line = place % self.grid[1] if self.layer % 2 else place // self.grid[1]
        return line[:, None] == line

    def bias(self, q: Tensor, scale: float) -> Tensor | None:
        """Bias (B, H, T, T) on the attention logits for the relative positions of two patches, or None."""
        if self.offset_pos_embed is None:
            return None
        patches = (len(self.offset_pos_embed) + 1) // 2
        place = torch.arange(patches, device=q.device)
        offset = place[:, None] - place + patches - 1
        bias = (q[:, :, -patches:] * scale) @ self.offset_pos_embed.mT
        bias = bias.gather(-1, offset.expand(*bias.shape[:2], -1, -1))
        prefix = q.shape[2] - patches
        return F.pad(bias, (prefix, 0, prefix, 0)).to(q.dtype)


class PlacedBlock(Block):
    """timm's block that adds positions to its input, except the first block, whose input has them from the stem."""

    def forward(self, x: Tensor, **masks) -> Tensor:
        if self.positions is not None:
            x = x + self.positions()
        return super().forward(x, **masks)


class PaperTransformer(VisionTransformer):
    """timm's Vision Transformer with variants of the paper. Raises ValueError for invalid combinations."""

    def __init__(
        self,
        positions: str = "learned-1d",
        positions_at: str = "stem",
        attention: str = "plain",
        **kwargs,
    ):
        check(
            {**kwargs, "positions": positions, "positions_at": positions_at, "attention": attention}
        )
        placed = positions == "relative-1d" or attention == "axial"
        if positions != "learned-1d":
            kwargs["pos_embed"] = "none"
        if placed:
            kwargs["attn_layer"] = PlacedAttention
        if positions_at != "stem":
            kwargs["block_fn"] = PlacedBlock
        if attention == "axial":
            kwargs["depth"] = 2 * kwargs.get("depth", 12)
        super().__init__(**kwargs)
        grid, prefix, width = self.patch_embed.grid_size, self.num_prefix_tokens, self.embed_dim
        factored = positions == "learned-2d"
        table = functools.partial(Table, grid, prefix, width, factored)
        if factored:
            self.positions = table()
        for index, block in enumerate(self.blocks):
            if placed:
                block.attn.prepare(positions, attention, grid, index)
            if positions_at == "stem":
                continue
            if index == 0:
                block.positions = None
            elif positions_at == "every-layer":
                block.positions = table()
            else:  # a shared table is not a module of the block, so it is saved once
                block.positions = functools.partial(getattr, self, "pos_embed")

    def group_matcher(self, coarse: bool = False) -> dict:
        groups = super().group_matcher(coarse)
        return {**groups, "stem": groups["stem"] + r"|positions"}


class FactoredTransformer(PaperTransformer):
    """A Vision Transformer with a position table factored into columns and rows."""

    @property
    def pos_embed(self) -> Tensor | None:
        """The table (1, T, D), computed from its factors."""
        return self.positions() if "positions" in self._modules else None

    @pos_embed.setter
    def pos_embed(self, nothing: None) -> None:
        """Ignored: timm sets None for pos_embed="none"."""


DEFAULTS = {
    "num_classes": 1000,
    "input_size": (3, 224, 224),
    "fixed_input_size": True,
    "first_conv": "patch_embed.proj",
    "classifier": "head",
}
default_cfgs = generate_default_cfgs({NAME: DEFAULTS})


@register_model
def vitlens_vit(pretrained: bool = False, **kwargs) -> PaperTransformer:
    """timm's plain Vision Transformer with a variant of the paper.

    positions, positions_at, attention: see `SETTINGS`. Further keywords are timm's. Raises ValueError for invalid
    combinations.

    >>> vitlens_paper.variants.vitlens_vit(positions="learned-2d", depth=1).pos_embed.shape
    torch.Size([1, 197, 768])
    """
    kind = FactoredTransformer if kwargs.get("positions") == "learned-2d" else PaperTransformer
    return build_model_with_cfg(kind, NAME, pretrained, **kwargs)
