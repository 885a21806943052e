"""Vision models of Hugging Face's transformers, with `attn_implementation="sdpa"`.

To add one, say in `TOWERS` where its kind of model keeps its parts, and in `MODELS`, for every class made of such a
tower, where the tower is and what is read of its tokens: that belongs to the whole class. Names are those of
transformers 5.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from vitlens.recorder.grid import TokenGrid
from vitlens.recorder.supported import texts
from vitlens.recorder.supported.protocol import Family, qualified_name, readout, refuse

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALF = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
OPENAI = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class Tower:
    """Where a kind of model keeps its parts, which tokens come before the patches, and how the published weights of
    this kind want pictures to be normalized: (means, standard deviations)."""

    normalized: tuple
    prefix: tuple[str, ...] = ("class token",)
    blocks: str = "layers"
    attention: str = "attention"
    norm: str = "layernorm"
    projection: str = "embeddings.patch_embeddings.projection"
    positions: str | None = "embeddings.position_embeddings"
    interpolates: bool = False
    """Whether other sizes need interpolate_pos_encoding=True."""


_CLIP = dict(blocks="encoder.layers", attention="self_attn", norm="post_layernorm",
             projection="embeddings.patch_embedding", positions="embeddings.position_embedding.weight")  # fmt: skip
_DINO = Tower(IMAGENET, blocks="encoder.layer")
TOWERS = {
    "vit": Tower(HALF, interpolates=True),
    "deit": Tower(IMAGENET, ("class token", "distillation token"), interpolates=True),
    "vit_mae": Tower(IMAGENET, interpolates=True),
    "beit": Tower(HALF),
    "ijepa": Tower(IMAGENET, (), interpolates=True),
    "dinov2": _DINO,
    "dinov2_with_registers": _DINO,
    "dinov3_vit": replace(_DINO, blocks="model.layer", norm="norm", projection="embeddings.patch_embeddings",
                          positions=None),
    "clip": Tower(OPENAI, **_CLIP, interpolates=True),
    "siglip": Tower(HALF, (), **_CLIP, interpolates=True),
    "siglip2": Tower(HALF, (), **_CLIP),
}  # fmt: skip


@dataclass(frozen=True)
class Whole:
    """kind: of the tower. reads: of `READS`. path: where the tower is. output: what it returns that is taken."""

    kind: str
    reads: str
    path: str = ""
    output: str = "pooler_output"


READS = ("class token", "class and distillation token", "patches", "class token beside patches", "pool", "BEiT's")
"""What is read: a token, the mean of two heads' outputs, the mean of all patches, a token and the mean side by side
(which is no single row), the attention pool, or the class token or the patches as BEiT's configuration says."""

_MODELS = {
    "vit.ViTModel": Whole("vit", "class token"),
    "vit.ViTForImageClassification": Whole("vit", "class token", "vit", "logits"),
    "deit.DeiTModel": Whole("deit", "class token"),
    "deit.DeiTForImageClassification": Whole("deit", "class token", "deit", "logits"),
    "deit.DeiTForImageClassificationWithTeacher": Whole("deit", "class and distillation token", "deit", "logits"),
    "vit_mae.ViTMAEModel": Whole("vit_mae", "class token"),
    "beit.BeitModel": Whole("beit", "BEiT's"),
    "beit.BeitForImageClassification": Whole("beit", "BEiT's", "beit", "logits"),
    "ijepa.IJepaModel": Whole("ijepa", "patches"),
    "ijepa.IJepaForImageClassification": Whole("ijepa", "patches", "ijepa", "logits"),
    "dinov2.Dinov2Model": Whole("dinov2", "class token"),
    "dinov2.Dinov2ForImageClassification": Whole("dinov2", "class token beside patches", "dinov2", "logits"),
    "dinov2_with_registers.Dinov2WithRegistersModel": Whole("dinov2_with_registers", "class token"),
    "dinov2_with_registers.Dinov2WithRegistersForImageClassification": Whole(
        "dinov2_with_registers", "class token beside patches", "dinov2_with_registers", "logits"
    ),
    "dinov3_vit.DINOv3ViTModel": Whole("dinov3_vit", "class token"),
    "clip.CLIPVisionModel": Whole("clip", "class token"),
    "clip.CLIPVisionModelWithProjection": Whole("clip", "class token", "vision_model", "image_embeds"),
    "clip.CLIPForImageClassification": Whole("clip", "patches", "vision_model", "logits"),
    "clip.CLIPModel": Whole("clip", "class token", "vision_model"),
    "siglip.SiglipVisionModel": Whole("siglip", "pool"),
    "siglip.SiglipForImageClassification": Whole("siglip", "patches", "vision_model", "logits"),
    "siglip.SiglipModel": Whole("siglip", "pool", "vision_model"),
    "siglip2.Siglip2VisionModel": Whole("siglip2", "pool"),
    "siglip2.Siglip2ForImageClassification": Whole("siglip2", "patches", "vision_model", "logits"),
    "siglip2.Siglip2Model": Whole("siglip2", "pool", "vision_model"),
}
MODELS = {
    f"transformers.models.{kind}.modeling_{kind}.{name}": whole
    for (kind, name), whole in ((key.split("."), whole) for key, whole in _MODELS.items())
}


class Transformers(Family):
    """A vision model of transformers."""

    norms = r"norm[12]|layernorm_(before|after)|layer_norm[12]"

    def __init__(self, model: nn.Module):
        super().__init__(model)
        self.whole = MODELS[qualified_name(model)]
        self.parts = TOWERS[self.whole.kind]
        self.tower = model.get_submodule(self.whole.path)
        self.config = self.tower.config

    def attention(self) -> list[list[tuple[str, nn.Module]]]:
        if (kind := self.config._attn_implementation) != "sdpa":
            raise refuse(
                self.model, f'it runs with attn_implementation="{kind}", whose calls cannot be seen; call '
                'model.set_attn_implementation("sdpa") first'
            )  # fmt: skip
        if ratio := getattr(self.config, "mask_ratio", 0):
            raise refuse(
                self.model, f"it leaves out {ratio:.0%} of the patches at random; set model.config.mask_ratio = 0 first"
            )  # fmt: skip
        where = ".".join(filter(None, (self.whole.path, self.parts.blocks)))
        layers = [
            [(f"{where}.{number}.{self.parts.attention}", getattr(block, self.parts.attention))]
            for number, block in enumerate(self.blocks)
        ]
        if not layers:
            raise refuse(self.model, "it has no layers")
        for ((name, module),) in layers:
            if not qualified_name(module).startswith(f"transformers.models.{self.whole.kind}."):
                raise refuse(self.model, f"{name} is {qualified_name(module)}, which vitlens does not know")
        if len({id(module) for ((_, module),) in layers}) < len(layers):
            raise refuse(self.model, "its layers share one attention module, so its calls cannot be told apart")
        return layers

    @property
    def chance(self) -> str | None:
        """In training mode DINOv3 shifts, jitters and rescales its positions at random."""
        moved = [n for n in ("shift", "jitter", "rescale") if getattr(self.config, f"pos_embed_{n}", None)]
        if self.tower.training and moved:
            return "in training mode it moves the positions of its patches at random; call model.eval() first"
        return None

    def watch(self) -> list:
        """ViTMAE shuffles the patches, also where it leaves out none."""
        if self.whole.kind != "vit_mae":
            return []

        def compare(_, args: tuple, output: tuple) -> None:
            places = output[2]
            if not torch.equal(places, torch.arange(places.shape[1], device=places.device).expand_as(places)):
                raise refuse(
                    self.model, "it shuffles the patches at random; give it noise that rises from patch to patch "
                    "(model(images, noise=torch.arange(patches).expand(len(images), -1))), or use "
                    "vitlens.models.run(model, images), which does"
                )  # fmt: skip

        return [self.tower.embeddings.register_forward_hook(compare)]

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return self.tower.get_submodule(self.parts.blocks)

    @property
    def norm(self) -> nn.Module:
        return self.tower.get_submodule(self.parts.norm)

    @property
    def reads(self) -> str:
        reads = self.whole.reads
        if reads == "BEiT's":
            pooled = self.config.use_mean_pooling and self.tower.pooler is not None
            return "patches" if pooled else "class token"
        return "patches" if reads == "pool" and not self.tower.use_head else reads

    @property
    def pool(self) -> nn.Module | None:
        return self.tower.head.attention if self.reads == "pool" else None

    @property
    def apart(self) -> str | None:
        if self.whole.output == "pooler_output" and hasattr(getattr(self.tower, "pooler", None), "activation"):
            return "its pooler ends in a nonlinear function; set model.pooler = None to explain the token that it reads"
        return super().apart

    @property
    def pool_parts(self) -> nn.Module | None:
        return self.tower.head if self.reads == "pool" else None

    def pool_readout(self, weights, grid: TokenGrid) -> Tensor | None:
        return weights().mean((1, 2))

    @property
    def embedding(self) -> nn.Module:
        return self.tower.get_submodule(self.parts.projection)

    @property
    def channels(self) -> int:
        return self.config.num_channels

    @property
    def prefix(self) -> list[str]:
        registers = getattr(self.config, "num_register_tokens", 0)
        return [*self.parts.prefix, *(f"register {i + 1}" for i in range(registers))]

    @property
    def patch(self) -> tuple[int, int]:
        return _pair(self.config.patch_size)

    def grid(self, image: tuple[int, int]) -> TokenGrid:
        """Patches are cut out from the top left; what is left at the bottom and at the right is not seen."""
        rows, cols = (side // length for side, length in zip(image, self.patch, strict=True))
        grid = TokenGrid(rows, cols, self.patch, len(self.prefix), tuple(image))
        row = {
            "class token": lambda: readout(grid, slice(0, 1)),
            "class and distillation token": lambda: readout(grid, slice(0, 2)),
            "patches": lambda: readout(grid, slice(grid.prefix, None)),
        }.get(self.reads, lambda: None)()
        return replace(grid, readout=row)

    @property
    def whole_patches(self) -> tuple[int, int] | None:
        return self.patch if self.whole.kind == "siglip2" else None

    @property
    def built_size(self) -> tuple[int, int] | None:
        if self.whole.kind == "siglip2":  # for a number of patches, in whatever shape
            side = int(self.config.num_patches**0.5)
            return side * self.patch[0], side * self.patch[1]
        return _pair(self.config.image_size)

    @property
    def any_size(self) -> bool:
        return True

    @property
    def preprocessing(self) -> dict:
        """As `pretrained_cfg` says, which `vitlens.load_model` writes; else as the published weights of its kind."""
        mean, std = self.parts.normalized
        said = {"mean": mean, "std": std, "input_size": (self.channels, *self.built_size), "interpolation": "bicubic",
                "crop_pct": 1.0, "crop_mode": "center"}  # fmt: skip
        said |= getattr(self.model, "pretrained_cfg", None) or {}
        return {key: said[key] for key in ("mean", "std", "input_size", "interpolation", "crop_pct", "crop_mode")}

    @property
    def classes(self) -> int | None:
        if self.whole.output != "logits":
            return 0
        return getattr(self.classifier, "out_features", 0)

    @property
    def classifier(self) -> nn.Module | None:
        """A distilled DeiT has two; this is the one that reads the class token."""
        return getattr(self.model, "classifier", None) or getattr(self.model, "cls_classifier", None)

    @property
    def label_names(self) -> list[str] | None:
        """transformers calls classes without names LABEL_0, LABEL_1 …"""
        if (given := super().label_names) is not None:
            return given
        names = self.model.config.id2label or {}
        numbered = all(re.fullmatch(r"LABEL_\d+", name) for name in names.values())
        return None if numbered or set(names) != set(range(len(names))) else [names[i] for i in range(len(names))]

    def run(self, images: Tensor) -> Tensor:
        model, given = self.model, {"return_dict": True}
        if self.parts.interpolates and tuple(images.shape[-2:]) != self.built_size:
            given["interpolate_pos_encoding"] = True
        if self.whole.kind == "vit_mae":
            given["noise"] = torch.arange(self.grid(images.shape[-2:]).patches, device=images.device).expand(
                len(images), -1
            )
        if self.whole.kind == "siglip2":
            given |= self._cut(images)
            images = given.pop("patches")
        run = model.get_image_features if hasattr(model, "get_image_features") else model
        output = run(pixel_values=images, **given)
        found = getattr(output, self.whole.output, None)
        return self._pooled(output.last_hidden_state) if found is None else found

    def _cut(self, images: Tensor) -> dict:
        """What SigLIP 2 takes: patches (B, P, p·q·C), and the rows and columns of each image."""
        (p, q), grid = self.patch, self.grid(images.shape[-2:])
        patches = images.unflatten(-1, (grid.cols, q)).unflatten(-3, (grid.rows, p))  # B, C, rows, p, cols, q
        shapes = torch.tensor([[grid.rows, grid.cols]] * len(images), device=images.device)
        patches = patches.permute(0, 2, 4, 3, 5, 1).flatten(1, 2).flatten(2)
        return {"patches": patches, "pixel_attention_mask": None, "spatial_shapes": shapes}

    def _pooled(self, tokens: Tensor) -> Tensor:
        return tokens[:, len(self.prefix) :].mean(1) if self.reads == "patches" else tokens[:, 0]

    def head(self, tokens: Tensor) -> Tensor:
        model, tower = self.model, self.tower
        if self.whole.kind == "clip" and self.whole.output == "logits":  # it reads tokens that are not normalized
            return model.classifier(self._pooled(tokens))
        tokens = self.norm(tokens)
        if self.reads == "class and distillation token":
            return (model.cls_classifier(tokens[:, 0]) + model.distillation_classifier(tokens[:, 1])) / 2
        if self.reads == "class token beside patches":
            pooled = torch.cat([tokens[:, 0], tokens[:, len(self.prefix) :].mean(1)], 1)
        elif self.reads == "pool":
            pooled = tower.head(tokens)
        elif getattr(tower, "pooler", None) is not None:
            pooled = tower.pooler(tokens)
        else:
            pooled = self._pooled(tokens)
        last = getattr(model, "visual_projection", None) or getattr(model, "classifier", None)
        return pooled if last is None else last(pooled)

    @property
    def reads_text(self) -> bool:
        return hasattr(self.model, "get_text_features")

    def texts(self, prompts: list[str], tokenizer: Callable | None = None) -> Tensor:
        if not self.reads_text:
            return super().texts(prompts, tokenizer)
        return texts.by_transformers(self.model, prompts, tokenizer, filled=self.whole.kind != "clip")

    def filters(self) -> Tensor:
        weight = self.embedding.weight.detach()
        if weight.dim() == 4:
            return weight.permute(0, 2, 3, 1)
        return weight.unflatten(1, (*self.patch, self.channels))

    def positions(self) -> Tensor | None:
        if self.parts.positions is None:
            return None
        table = self.tower
        for name in self.parts.positions.split("."):
            table = getattr(table, name)
        if table is None:
            return None
        rows, cols = (side // length for side, length in zip(self.built_size, self.patch, strict=True))
        return table.detach().flatten(0, -2)[-rows * cols :].unflatten(0, (rows, cols))


def _pair(size: int | Sequence[int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else tuple(size)
