"""torchvision's Vision Transformers, `vit_b_16` to `vit_h_14`: their attention is in torch.nn.MultiheadAttention."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from vitlens.recorder.grid import TokenGrid
from vitlens.recorder.supported import PlainPatches, multihead_layers, require_size

MODELS = {"torchvision.models.vision_transformer.VisionTransformer"}


class TorchVision(PlainPatches):
    """A Vision Transformer of torchvision. It takes images of the one size that it was built for."""

    usual = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225), "interpolation": "bilinear",
             "crop_pct": 0.875}  # fmt: skip

    def attention(self) -> list[list[tuple[str, nn.Module]]]:
        return multihead_layers(self.model, "encoder.layers", "self_attention")

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return self.model.encoder.layers

    @property
    def embedding(self) -> nn.Module:
        return self.model.conv_proj

    @property
    def patch(self) -> tuple[int, int]:
        return self.model.patch_size, self.model.patch_size

    @property
    def table(self) -> Tensor:
        return self.model.encoder.pos_embedding

    def grid(self, image: tuple[int, int]) -> TokenGrid:
        require_size(self.model, image, only=self.built_size)
        return super().grid(image)

    @property
    def built_size(self) -> tuple[int, int]:
        return self.model.image_size, self.model.image_size

    @property
    def classes(self) -> int:
        widths = [layer.out_features for layer in self.model.heads.modules() if isinstance(layer, nn.Linear)]
        return widths[-1] if widths else 0

    def head(self, tokens: Tensor, *, pre_logits: bool = False) -> Tensor:
        heads = self.model.heads[:-1] if pre_logits and self.classes else self.model.heads
        return heads(self.model.encoder.ln(tokens)[:, 0])


adapter = TorchVision
