"""Choices for small data that are not the paper's: how they are built, trained and opened.

    from experiments import small_data
    train.run("digits", "digits", "out", build=partial(small_data.build, tokenizer="conv-stem"))

positions: "sinusoidal" (Vaswani et al. 2017), "relative-2d" (Liu et al. 2021), "rotary" (Heo et al. 2024, RoPE-Axial).
tokenizer: "conv-stem" (Xiao et al. 2021), "shifted-patches" (Lee et al. 2021, SPT).
attention: "locality" (Lee et al. 2021, LSA): a learned temperature of each head, and no token attends to itself.
equivariance: "flips" or "rotations" (Puny et al. 2022): tokens averaged over copies of the image, turned back.
Registers and an attention pool are timm's own: `--set model.reg_tokens=4`, `--set model.global_pool=map`.

Shapes: B batch, H heads, T tokens, D width, K head width.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
import torch.nn.functional as F
from timm.layers import (
    ConvNormAct,
    HybridEmbed,
    PatchEmbed,
    RelPosBias,
    RotaryEmbeddingCat,
    apply_rot_embed_cat,
    build_sincos2d_pos_embed,
)
from timm.models import VisionTransformer
from torch import Tensor, nn

from vitlens.recorder import supported
from vitlens.recorder.forward import eval_mode
from vitlens.recorder.supported import timm as timm_adapter
from vitlens.train import Recipe
from vitlens_paper.variants import PlacedAttention

GROUPS = {"flips": 2, "rotations": 4}
"""Number of copies of an image: mirrored left to right, or all quarter turns."""


def turned(images: Tensor, group: str, number: int) -> Tensor:
    """(…, rows, cols) copy `number` of images; −number turns it back, 0 is the image itself."""
    if group == "rotations":
        return torch.rot90(images, number % 4, (-2, -1))
    return images.flip(-1) if number % 2 else images


def conv_stem(patch_size: int, in_chans: int, embed_dim: int, **kwargs) -> HybridEmbed:
    """timm's embedding of a feature map of stride-2 convolutions, whose channels double up to the width."""
    halvings = patch_size.bit_length() - 1
    if (
        patch_size != 2**halvings
        or embed_dim % 2 ** (halvings - 1)
        or embed_dim < 4 * 2 ** (halvings - 1)
    ):
        raise ValueError(
            "conv-stem needs a patch_size that is a power of 2 and a width that 2 · patch_size divides."
        )
    channels = [in_chans, *(embed_dim // 2 ** (halvings - 1 - i) for i in range(halvings))]
    layers = [ConvNormAct(a, b, 3, stride=2) for a, b in itertools.pairwise(channels)]
    return HybridEmbed(
        nn.Sequential(*layers), patch_size=1, in_chans=in_chans, embed_dim=embed_dim, **kwargs
    )


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
        super().__init__(
            patch_size=patch_size, in_chans=in_chans, embed_dim=embed_dim, bias=bias, **kwargs
        )
        self.proj = ShiftedPixels(patch_size, in_chans, embed_dim, bias)


class SmallDataAttention(PlacedAttention):
    """Attention with rotary or relative positions of patches, or with locality. Prefix tokens have no place."""

    def prepare(self, positions: str, attention: str, grid: tuple[int, int], layer: int) -> None:
        super().prepare(positions, attention, grid, layer)
        self.rel_pos = self.rope = self.temperature = None
        if attention == "locality":
            self.temperature = nn.Parameter(torch.full((self.num_heads,), self.head_dim**0.5))
        if positions == "relative-2d":
            self.rel_pos = RelPosBias(grid, self.num_heads)
        elif positions == "rotary":  # as timm's vit_small_patch16_rope_224
            self.rope = RotaryEmbeddingCat(
                self.head_dim,
                temperature=100.0,
                in_pixels=False,
                feat_shape=list(grid),
                grid_indexing="xy",
            )

    def place(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, float]:
        if self.rope is not None:
            q, k = self.rotated(q).type_as(q), self.rotated(k).type_as(k)
        if self.temperature is None:
            return q, k, self.scale
        return (q / self.temperature[:, None, None]).type_as(k), k, 1.0

    def rotated(self, x: Tensor) -> Tensor:
        """(B, H, T, K) queries or keys, those of patches rotated by angles that grow with row and column."""
        angles = self.rope.get_embed()
        prefix = x.shape[2] - len(angles)
        return torch.cat([x[:, :, :prefix], apply_rot_embed_cat(x[:, :, prefix:], angles)], 2)

    def visible(self, q: Tensor) -> Tensor | None:
        if self.attention != "locality":
            return super().visible(q)
        return ~torch.eye(q.shape[2], dtype=torch.bool, device=q.device)

    def bias(self, q: Tensor, scale: float) -> Tensor | None:
        if self.rel_pos is None:
            return super().bias(q, scale)
        bias = self.rel_pos.get_bias()
        prefix = q.shape[2] - bias.shape[-1]
        return F.pad(bias, (prefix, 0, prefix, 0)).to(q.dtype)


class SmallDataTransformer(VisionTransformer):
    """timm's Vision Transformer with the choices of this module."""

    def __init__(
        self,
        positions: str = "learned-1d",
        tokenizer: str = "patches",
        attention: str = "plain",
        equivariance: str = "none",
        **kwargs,
    ):
        varied = positions in ("relative-2d", "rotary") or attention == "locality"
        if positions != "learned-1d":
            kwargs["pos_embed"] = "none"
        if tokenizer != "patches":
            kwargs["embed_layer"] = {"conv-stem": conv_stem, "shifted-patches": ShiftedPatches}[
                tokenizer
            ]
        super().__init__(**kwargs | ({"attn_layer": SmallDataAttention} if varied else {}))
        self.equivariance = equivariance
        grid, prefix = self.patch_embed.grid_size, self.num_prefix_tokens
        if positions == "sinusoidal":
            fixed = F.pad(build_sincos2d_pos_embed(list(grid), self.embed_dim), (0, 0, prefix, 0))
            del self.pos_embed  # timm's None
            self.register_buffer("pos_embed", fixed[None], persistent=False)
        for index, block in enumerate(self.blocks if varied else ()):
            block.attn.prepare(positions, attention, grid, index)

    def forward_features(self, x: Tensor, **masks) -> Tensor:
        """(B, T, D) tokens after the last norm, averaged over the copies of the images, which turn with them."""
        group = self.equivariance
        if group == "none":
            return super().forward_features(x, **masks)
        copies = torch.cat([turned(x, group, number) for number in range(GROUPS[group])])
        tokens = super().forward_features(copies, **masks).unflatten(0, (GROUPS[group], len(x)))
        prefix, patches = tokens.split(
            [self.num_prefix_tokens, tokens.shape[2] - self.num_prefix_tokens], 2
        )
        maps = patches.mT.unflatten(-1, self.patch_embed.grid_size)
        maps = torch.stack([turned(copy, group, -number) for number, copy in enumerate(maps)]).mean(
            0
        )
        return torch.cat([prefix.mean(0), maps.flatten(2).mT], 1)


supported.FAMILIES[f"{__name__}.SmallDataTransformer"] = timm_adapter.Timm
timm_adapter.ATTENTION.add(f"{__name__}.SmallDataAttention")


def build(recipe: Recipe, **choices: str) -> SmallDataTransformer:
    """The model of a recipe with choices, in training mode: for `train.run(…, build=partial(build, …))`."""
    rates = {
        "patch_drop_rate": recipe.patch_drop,
        "pos_drop_rate": recipe.dropout,
        "proj_drop_rate": recipe.dropout,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = SmallDataTransformer(
            **recipe.arguments(), **rates, drop_path_rate=recipe.drop_path, **choices
        )
    model.pretrained_cfg = {
        "architecture": "SmallDataTransformer",
        "classifier": "head",
        **recipe.pixels(),
    }
    return model.train()


def load(folder: Path | str, **choices: str) -> SmallDataTransformer:
    """The model that a run with `build=partial(build, …)` wrote to OUT/model, for the same choices, in eval mode."""
    folder = Path(folder)
    model = build(Recipe.from_json((folder / "recipe.json").read_text(encoding="utf-8")), **choices)
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    model.load_state_dict({name: weight.float() for name, weight in weights.items()})
    model.label_names = json.loads((folder / "config.json").read_text(encoding="utf-8"))[
        "label_names"
    ]
    return model.eval()


@contextlib.contextmanager
def one_copy(model: nn.Module) -> Iterator[None]:
    """Let a model that averages over copies see each image once in this block, so that it can be captured."""
    group = getattr(model, "equivariance", "none")
    model.equivariance = "none"
    try:
        yield
    finally:
        model.equivariance = group


@dataclass(frozen=True)
class Change:
    """Change of a model's output when images are flipped or rotated; all zeros for an equivariant model.

    logits: ‖turned − straight‖ / ‖straight‖, where logits are centered over the classes. classes: share of the images
    whose top class changes. maps: half the sum of absolute differences of two rollouts, once turned back; None for
    models without one. All are means over images and turns.
    """

    logits: float
    classes: float
    maps: float | None


def change_under(group: str, model: nn.Module, images: Tensor) -> dict[str, Change]:
    """The `Change` of a model under "flips" or "rotations": "before", one copy of an image at a time, and "after", its
    logits and rollouts averaged over the group. images: (B, C, H, W), normalized; square for rotations."""
    copies = [turned(images, group, number) for number in range(GROUPS[group])]
    with eval_mode(model), torch.no_grad():
        with one_copy(model):
            before = [_output(model, copy) for copy in copies]
            after = [_averaged(model, copy, group) for copy in copies]
        if getattr(model, "equivariance", "none") == group:
            after = [(model(copy), maps) for copy, (_, maps) in zip(copies, after, strict=True)]
    return {"before": _change(before, group), "after": _change(after, group)}


def _output(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor | None]:
    """(B, classes) logits and (B, rows, cols) rollouts of images, or None for models without one."""
    from vitlens import attention, capture

    try:
        with capture(model) as attn:
            logits = model(images)
        maps = attention.rollout(attn)
    except ValueError:
        return model(images), None
    return logits, maps / maps.sum((1, 2), keepdim=True)


def _averaged(model: nn.Module, images: Tensor, group: str) -> tuple[Tensor, Tensor | None]:
    """`_output` averaged over all flipped or rotated copies, with their maps turned back."""
    outputs = [_output(model, turned(images, group, number)) for number in range(GROUPS[group])]
    logits = torch.stack([each for each, _ in outputs]).mean(0)
    if outputs[0][1] is None:
        return logits, None
    return logits, torch.stack(
        [turned(maps, group, -number) for number, (_, maps) in enumerate(outputs)]
    ).mean(0)


def _change(outputs: list[tuple[Tensor, Tensor | None]], group: str) -> Change:
    logits = torch.stack([each - each.mean(1, keepdim=True) for each, _ in outputs])
    moved = ((logits[1:] - logits[0]).norm(dim=-1) / logits[0].norm(dim=-1)).mean()
    other = (logits[1:].argmax(-1) != logits[0].argmax(-1)).float().mean()
    if outputs[0][1] is None:
        return Change(moved.item(), other.item(), None)
    back = torch.stack([turned(maps, group, -number) for number, (_, maps) in enumerate(outputs)])
    return Change(
        moved.item(), other.item(), (back[1:] - back[0]).abs().sum((-1, -2)).mean().item() / 2
    )
