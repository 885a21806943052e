"""torchvision's Vision Transformers, `vit_b_16` to `vit_h_14`: their attention is in torch.nn.MultiheadAttention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from vitlens.recorder.grid import TokenGrid
from vitlens.recorder.supported.protocol import Family, mean_of, multihead_layers, require_size

MODELS = {"torchvision.models.vision_transformer.VisionTransformer"}


class TorchVision(Family):
    """A Vision Transformer of torchvision. It takes images of the one size that it was built for."""

    def attention(self) -> list[list[tuple[str, nn.Module]]]:
        return multihead_layers(self.model, "encoder.layers", "self_attention")

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return self.model.encoder.layers

    @property
    def embedding(self) -> nn.Module:
        return self.model.conv_proj

    @property
    def prefix(self) -> list[str]:
        return ["class token"]

    def grid(self, image: tuple[int, int]) -> TokenGrid:
        require_size(self.model, image, self.built_size)
        patch = self.model.patch_size
        grid = TokenGrid(image[0] // patch, image[1] // patch, (patch, patch), 1, tuple(image))
        return replace(grid, readout=mean_of(grid, slice(0, 1)))

    @property
    def built_size(self) -> tuple[int, int]:
        return self.model.image_size, self.model.image_size

    @property
    def preprocessing(self) -> dict:
        """From `pretrained_cfg`, which `vitlens.load_model` writes; else that of most of torchvision's weights."""
        usual = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225), "input_size": (3, *self.built_size),
                 "interpolation": "bilinear", "crop_pct": 0.875, "crop_mode": "center"}  # fmt: skip
        return usual | (getattr(self.model, "pretrained_cfg", None) or {})

    @property
    def classes(self) -> int:
        widths = [layer.out_features for layer in self.model.heads.modules() if isinstance(layer, nn.Linear)]
        return widths[-1] if widths else 0

    def head(self, tokens: Tensor, *, pre_logits: bool = False) -> Tensor:
        heads = self.model.heads[:-1] if pre_logits and self.classes else self.model.heads
        return heads(self.model.encoder.ln(tokens)[:, 0])

    def positions(self) -> Tensor:
        rows = self.model.image_size // self.model.patch_size
        return self.model.encoder.pos_embedding.detach()[0, 1:].unflatten(0, (rows, rows))
