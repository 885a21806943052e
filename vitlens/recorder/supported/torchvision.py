"""torchvision's Vision Transformers, `vit_b_16` to `vit_h_14`, with torch.nn.MultiheadAttention."""

from __future__ import annotations

from torch import Tensor, nn

from vitlens.recorder.supported.adapter import PlainPatches
from vitlens.recorder.supported.refusal import WINDOWS

MODELS = {"torchvision.models.vision_transformer.VisionTransformer"}

_REASONS = {
    "MViT": "its attention pools queries and keys of a video, so they are not the patches of an image",
    "SwinTransformer": WINDOWS,
    "SwinTransformer3d": "its tokens are parts of a video, not patches of an image",
    "MaxVit": "its attention follows convolutions, on grids that shrink between stages or inside windows",
}
"""Reason for refusing a class, by its name."""


def why_not(name: str) -> str:
    """Reason why a class of torchvision is refused."""
    reason = _REASONS.get(name, "it is not a Vision Transformer of torchvision")
    return f"{reason}; of torchvision, vitlens supports VisionTransformer (vit_b_16 to vit_h_14)"


class TorchVision(PlainPatches):
    """Adapter of torchvision's Vision Transformers. They take only the image size that they were built for."""

    usual = {
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "interpolation": "bilinear",
        "crop_pct": 0.875,
    }

    paths = ("encoder.layers", "self_attention", "conv_proj")

    def __init__(self, model: nn.Module):
        super().__init__(model)
        self.patch = (model.patch_size, model.patch_size)
        self.built_size = (model.image_size, model.image_size)
        self.table = model.encoder.pos_embedding

    @property
    def classes(self) -> int:
        widths = [
            layer.out_features
            for layer in self.model.heads.modules()
            if isinstance(layer, nn.Linear)
        ]
        return widths[-1] if widths else 0

    def head(self, tokens: Tensor, *, pre_logits: bool = False) -> Tensor:
        class_token = self.model.encoder.ln(tokens)[:, 0]
        if pre_logits and self.classes:
            return self.model.heads[:-1](class_token)
        return self.model.heads(class_token)


adapter = TorchVision
