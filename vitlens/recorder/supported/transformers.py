"""Vision models of Hugging Face's transformers, with `attn_implementation="sdpa"`.

To support one, add the parts of its model type to `TOWERS`, and to `_MODELS` each class with such a tower, with the
tokens that it reads and the tower's path. Names are those of transformers 5.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from vitlens.recorder.grid import TokenGrid
from vitlens.recorder.supported.adapter import PlainPatches, Pool, pair
from vitlens.recorder.supported.names import model_name, qualified_name
from vitlens.recorder.supported.refusal import (
    CONVOLUTIONS,
    MASK_UNITS,
    POOLED,
    SHRINKS,
    WINDOWS,
    refuse,
    require_size,
)

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
OPENAI = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))


@dataclass(frozen=True)
class Tower:
    """Parts of an image tower: paths, prefix tokens, and (means, standard deviations) of the input of most published
    weights. interpolates: other image sizes need interpolate_pos_encoding=True.
    """

    normalized: tuple
    prefix: tuple[str, ...] = ("class token",)
    blocks: str = "layers"
    attention: str = "attention"
    norm: str = "layernorm"
    projection: str = "embeddings.patch_embeddings.projection"
    positions: str | None = "embeddings.position_embeddings"
    interpolates: bool = False


_CLIP = dict(
    blocks="encoder.layers",
    attention="self_attn",
    norm="post_layernorm",
    projection="embeddings.patch_embedding",
    positions="embeddings.position_embedding.weight",
)
_DINO = Tower(IMAGENET, blocks="encoder.layer")
TOWERS = {
    "vit": Tower(HALF, interpolates=True),
    "deit": Tower(IMAGENET, ("class token", "distillation token"), interpolates=True),
    "vit_mae": Tower(IMAGENET, interpolates=True),
    "beit": Tower(HALF),
    "ijepa": Tower(IMAGENET, (), interpolates=True),
    "dinov2": _DINO,
    "dinov2_with_registers": _DINO,
    "dinov3_vit": replace(
        _DINO,
        blocks="model.layer",
        norm="norm",
        projection="embeddings.patch_embeddings",
        positions=None,
    ),
    "clip": Tower(OPENAI, **_CLIP, interpolates=True),
    "siglip": Tower(HALF, (), **_CLIP, interpolates=True),
    "siglip2": Tower(HALF, (), **_CLIP),
}


@dataclass(frozen=True)
class Whole:
    """A model class: one of `READS`, the path of its tower, the name of its output and its key in `TOWERS`."""

    reads: str
    path: str = ""
    output: str = "pooler_output"
    kind: str = ""

    def at(self, path: str) -> str:
        """Path in the whole model of a path in the tower."""
        return f"{self.path}.{path}" if self.path else path


READS = (
    "class token",
    "class and distillation token",
    "patches",
    "class token beside patches",
    "pool",
    "BEiT's",
)
"""Tokens that a class reads. "class and distillation token" averages the outputs of two heads. "class token beside
patches" concatenates the token and the patches' mean, so no single row exists. BEiT's configuration selects the class
token or the patches."""

_MODELS = {
    "vit.ViTModel": Whole("class token"),
    "vit.ViTForImageClassification": Whole("class token", "vit", "logits"),
    "deit.DeiTModel": Whole("class token"),
    "deit.DeiTForImageClassification": Whole("class token", "deit", "logits"),
    "deit.DeiTForImageClassificationWithTeacher": Whole(
        "class and distillation token", "deit", "logits"
    ),
    "vit_mae.ViTMAEModel": Whole("class token"),
    "beit.BeitModel": Whole("BEiT's"),
    "beit.BeitForImageClassification": Whole("BEiT's", "beit", "logits"),
    "ijepa.IJepaModel": Whole("patches"),
    "ijepa.IJepaForImageClassification": Whole("patches", "ijepa", "logits"),
    "dinov2.Dinov2Model": Whole("class token"),
    "dinov2.Dinov2ForImageClassification": Whole("class token beside patches", "dinov2", "logits"),
    "dinov2_with_registers.Dinov2WithRegistersModel": Whole("class token"),
    "dinov2_with_registers.Dinov2WithRegistersForImageClassification": Whole(
        "class token beside patches", "dinov2_with_registers", "logits"
    ),
    "dinov3_vit.DINOv3ViTModel": Whole("class token"),
    "clip.CLIPVisionModel": Whole("class token"),
    "clip.CLIPVisionModelWithProjection": Whole("class token", "vision_model", "image_embeds"),
    "clip.CLIPForImageClassification": Whole("patches", "vision_model", "logits"),
    "clip.CLIPModel": Whole("class token", "vision_model"),
    "siglip.SiglipVisionModel": Whole("pool"),
    "siglip.SiglipForImageClassification": Whole("patches", "vision_model", "logits"),
    "siglip.SiglipModel": Whole("pool", "vision_model"),
    "siglip2.Siglip2VisionModel": Whole("pool"),
    "siglip2.Siglip2ForImageClassification": Whole("patches", "vision_model", "logits"),
    "siglip2.Siglip2Model": Whole("pool", "vision_model"),
}


def _by_full_name() -> dict[str, Whole]:
    models = {}
    for key, whole in _MODELS.items():
        kind, name = key.split(".")
        full_name = f"transformers.models.{kind}.modeling_{kind}.{name}"
        models[full_name] = replace(whole, kind=kind)
    return models


MODELS = _by_full_name()
"""Model classes by full name."""


KNOWN = ", ".join(sorted(name.rsplit(".", 1)[-1] for name in MODELS))
"""Names of the supported classes."""

_VIDEO = "its tokens are parts of a video, not patches of an image"
_DETECTS = (
    "its output is read from object queries, and its attention sees the features of another network, not patches of "
    "the image"
)
_PACKED = "its image tower takes the patches of all images as one sequence, not a batch of images"
_REASONS = {
    "Swin": WINDOWS,
    "Donut": WINDOWS,
    "Sam": WINDOWS,
    "Hiera": MASK_UNITS,
    "VideoMAE": _VIDEO,
    "VJEPA": _VIDEO,
    "Vivit": _VIDEO,
    "Timesformer": _VIDEO,
    "Pvt": POOLED,
    "Segformer": POOLED,
    "Levit": SHRINKS,
    "Detr": _DETECTS,
    "ConditionalDetr": _DETECTS,
    "DabDetr": _DETECTS,
    "DeformableDetr": _DETECTS,
    "RTDetr": _DETECTS,
    "Yolos": "its output is read from detection tokens behind the patches, which vitlens does not know",
    "DPTFor": "its output is assembled from the tokens of several layers, so no token is its read-out",
    "Qwen2VL": _PACKED,
    "Qwen2VisionTransformer": _PACKED,
    "Qwen2_5_V": _PACKED,
    "Qwen3VL": _PACKED,
    "ResNet": CONVOLUTIONS,
    "ConvNext": CONVOLUTIONS,
}
"""Reason for refusing a class, by the beginning of its name."""


def why_not(name: str) -> str:
    """Reason why a class of transformers is refused."""
    reason = f"{name} is not among the classes that it supports"
    for begin, known in _REASONS.items():
        if name.startswith(begin):
            reason = known
    return f"{reason}; of transformers, vitlens supports {KNOWN}"


class Transformers(PlainPatches):
    """Adapter of the vision models of transformers."""

    only = False

    def __init__(self, model: nn.Module):
        super().__init__(model)
        self.whole = MODELS[qualified_name(model)]
        self.parts = TOWERS[self.whole.kind]
        self.tower = model.get_submodule(self.whole.path)
        self.config = self.tower.config
        self.patch = pair(self.config.patch_size)
        self.paths = (
            self.whole.at(self.parts.blocks),
            self.parts.attention,
            self.whole.at(self.parts.projection),
        )
        self.attends = f"transformers.models.{self.whole.kind}."

    @property
    def capture_problem(self) -> str | None:
        implementation = self.config._attn_implementation
        if implementation != "sdpa":
            return (
                f'it runs with attn_implementation="{implementation}", whose calls cannot be captured; call '
                'model.set_attn_implementation("sdpa") first'
            )
        ratio = getattr(self.config, "mask_ratio", 0)
        if ratio:
            return f"it leaves out {ratio:.0%} of the patches at random; set model.config.mask_ratio = 0 first"
        augmentations = ("pos_embed_shift", "pos_embed_jitter", "pos_embed_rescale")
        moves = any(getattr(self.config, name, None) for name in augmentations)
        if self.tower.training and moves:
            return "in training mode it moves the positions of its patches at random; call model.eval() first"
        return None

    def forward_checks(self) -> list:
        """A hook for ViTMAE, which shuffles the patches even with mask_ratio = 0."""
        if self.whole.kind != "vit_mae":
            return []

        def require_order(module: nn.Module, args: tuple, output: tuple) -> None:
            order = output[2]
            unchanged = torch.arange(order.shape[1], device=order.device).expand_as(order)
            if not torch.equal(order, unchanged):
                raise refuse(
                    self.model,
                    "it shuffles the patches at random; pass increasing noise, as in "
                    "model(images, noise=torch.arange(patches).expand(len(images), -1)), or call "
                    "vitlens.run(model, images), which does so",
                )

        return [self.tower.embeddings.register_forward_hook(require_order)]

    @property
    def stream_problem(self) -> str | None:
        pooler = getattr(self.tower, "pooler", None)
        if self.whole.output == "pooler_output" and hasattr(pooler, "activation"):
            return "its pooler ends in a nonlinear function; set model.pooler = None to explain the input of the pooler"
        return super().stream_problem

    @property
    def reads(self) -> str:
        """One of `READS`, without BEiT's."""
        reads = self.whole.reads
        if reads == "BEiT's":
            pooled = self.config.use_mean_pooling and self.tower.pooler is not None
            return "patches" if pooled else "class token"
        if reads == "pool" and not self.tower.use_head:
            return "patches"
        return reads

    @property
    def pool(self) -> Pool | None:
        return Pool(self.tower.head, slice(None)) if self.reads == "pool" else None

    @property
    def prefix(self) -> list[str]:
        registers = getattr(self.config, "num_register_tokens", 0)
        names = list(self.parts.prefix)
        return names + [f"register {number + 1}" for number in range(registers)]

    def grid(self, image: tuple[int, int]) -> TokenGrid:
        if self.whole.kind == "siglip2":
            require_size(self.model, image, patch=self.patch)
        return super().grid(image)

    @property
    def read(self) -> slice | None:
        slices = {
            "class token": slice(0, 1),
            "class and distillation token": slice(0, 2),
            "patches": slice(len(self.prefix), None),
        }
        return slices.get(self.reads)

    @property
    def built_size(self) -> tuple[int, int] | None:
        if self.whole.kind == "siglip2":  # built for a number of patches, in any shape
            side = int(self.config.num_patches**0.5)
            return side * self.patch[0], side * self.patch[1]
        return pair(self.config.image_size)

    @property
    def usual(self) -> dict:
        mean, std = self.parts.normalized
        return {
            "mean": mean,
            "std": std,
            "input_size": (self.config.num_channels, *self.built_size),
        }

    @property
    def classes(self) -> int | None:
        """Outputs of the classifier. Both classifiers of a distilled DeiT have the same number."""
        if self.whole.output != "logits":
            return 0
        classifier = getattr(self.model, "classifier", None) or self.model.cls_classifier
        return getattr(classifier, "out_features", 0)

    def run(self, images: Tensor) -> Tensor:
        options: dict = {"return_dict": True}
        if self.parts.interpolates and tuple(images.shape[-2:]) != self.built_size:
            options["interpolate_pos_encoding"] = True
        if self.whole.kind == "vit_mae":
            patches = self.grid(images.shape[-2:]).patches
            options["noise"] = torch.arange(patches, device=images.device).expand(len(images), -1)
        if self.whole.kind == "siglip2":
            images, options["spatial_shapes"] = self._patches(images)
            options["pixel_attention_mask"] = None
        run = getattr(self.model, "get_image_features", self.model)
        outputs = run(pixel_values=images, **options)
        output = getattr(outputs, self.whole.output, None)
        return self._mean_or_class_token(outputs.last_hidden_state) if output is None else output

    def _patches(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Input of SigLIP 2: patches (B, P, p·q·C), and the (B, 2) rows and columns of each image."""
        p, q = self.patch
        grid = self.grid(images.shape[-2:])
        patches = images.unflatten(-1, (grid.cols, q))
        patches = patches.unflatten(-3, (grid.rows, p))  # B, C, rows, p, cols, q
        patches = patches.permute(0, 2, 4, 3, 5, 1)  # B, rows, cols, p, q, C
        sizes = torch.tensor([[grid.rows, grid.cols]] * len(images), device=images.device)
        return patches.flatten(1, 2).flatten(2), sizes

    def _mean_or_class_token(self, tokens: Tensor) -> Tensor:
        if self.reads == "patches":
            return self._patch_mean(tokens)
        return tokens[:, 0]

    def _patch_mean(self, tokens: Tensor) -> Tensor:
        return tokens[:, len(self.prefix) :].mean(1)

    def head(self, tokens: Tensor, *, pre_logits: bool = False) -> Tensor:
        model = self.model
        clip_classifier = self.whole.kind == "clip" and self.whole.output == "logits"
        if not clip_classifier:  # which has no norm
            tokens = self.tower.get_submodule(self.parts.norm)(tokens)
        if self.reads == "class and distillation token" and not pre_logits:
            by_class_token = model.cls_classifier(tokens[:, 0])
            return (by_class_token + model.distillation_classifier(tokens[:, 1])) / 2
        features = self._pool_tokens(tokens)
        if hasattr(model, "visual_projection"):
            return model.visual_projection(features)
        if pre_logits or not hasattr(model, "classifier"):
            return features
        return model.classifier(features)

    def _pool_tokens(self, tokens: Tensor) -> Tensor:
        """(B, D) input of the classifier or projection, from normalized tokens."""
        if self.reads == "class token beside patches":
            return torch.cat([tokens[:, 0], self._patch_mean(tokens)], 1)
        if self.reads == "pool":
            return self.tower.head(tokens)
        if getattr(self.tower, "pooler", None) is not None:
            return self.tower.pooler(tokens)
        return self._mean_or_class_token(tokens)

    @property
    def table(self) -> Tensor | None:
        if self.parts.positions is None:
            return None
        table = self.tower
        for name in self.parts.positions.split("."):
            table = getattr(table, name, None)
        return table


class Texts:
    """The text tower of a model and its tokenizer. limit: tokens that the tower reads.

    SigLIP's prompts are padded to its longest text, without a mask, as in its training.
    """

    def __init__(self, model: nn.Module, tokenizer: Callable | None):
        self.model = model
        self.tokenizer = tokenizer or _tokenizer(model)
        self.siglip = "siglip" in model.config.model_type
        self.limit = model.config.text_config.max_position_embeddings

    def _tokenize(self, prompts: list[str]):
        return self.tokenizer(
            prompts,
            padding="max_length" if self.siglip else True,
            truncation=True,
            return_tensors="pt",
            max_length=self.limit,
        )

    def tokens(self, prompt: str) -> list[int]:
        """Tokens of a prompt that the text tower reads, with padding."""
        return self._tokenize([prompt])["input_ids"][0].tolist()

    def count(self, prompt: str) -> int:
        """Number of all tokens of a prompt."""
        tokens = self.tokenizer([prompt], padding=False, truncation=False)
        return len(tokens["input_ids"][0])

    def embed(self, prompts: list[str]) -> Tensor:
        """(N, D) embeddings of prompts."""
        tokens = self._tokenize(prompts).to(next(self.model.parameters()).device)
        inputs = {"input_ids": tokens["input_ids"]} if self.siglip else tokens
        output = self.model.get_text_features(**inputs)
        return getattr(output, "pooler_output", output)


def _tokenizer(model: nn.Module) -> Callable:
    """The tokenizer stored with the model's weights, on the disk or on the hub."""
    from transformers import AutoTokenizer

    name = model.config.name_or_path
    if name:
        for local in (True, False):
            with contextlib.suppress(OSError, ValueError, KeyError, ImportError):
                return AutoTokenizer.from_pretrained(name, local_files_only=local)
    raise OSError(
        f"The tokenizer of {model_name(model)} is not on the disk and could not be downloaded. Put its files next to "
        "the weights, or pass it, as in `text(prompt, tokenizer=AutoTokenizer.from_pretrained(…))`."
    )


adapter = Transformers
