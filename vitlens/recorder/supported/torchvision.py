"""torchvision's Vision Transformers, `vit_b_16` to `vit_h_14`: their attention is in torch.nn.MultiheadAttention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from vitlens.recorder.grid import TokenGrid
from vitlens.recorder.supported.protocol import Family, multihead, readout

MODELS = {"torchvision.models.vision_transformer.VisionTransformer"}


class TorchVision(Family):
    """A Vision Transformer of torchvision. It takes images of the one size that it was built for."""

    norms = r"ln_[12]"

    def attention(self) -> list[list[tuple[str, nn.Module]]]:
        return multihead(self.model, "encoder.layers", "self_attention")

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return self.model.encoder.layers

    @property
    def embedding(self) -> nn.Module:
        return self.model.conv_proj

    @property
    def enters(self) -> list[nn.Parameter]:
        return list(self.embedding.parameters())[:1]

    @property
    def prefix(self) -> list[str]:
        return ["class token"]

    @property
    def patch(self) -> tuple[int, int]:
        return self.model.patch_size, self.model.patch_size

    def grid(self, image: tuple[int, int]) -> TokenGrid:
        rows, cols = (side // self.model.patch_size for side in image)
        grid = TokenGrid(rows, cols, self.patch, 1, tuple(image))
        return replace(grid, readout=readout(grid, slice(0, 1)))

    @property
    def built_size(self) -> tuple[int, int]:
        return self.model.image_size, self.model.image_size

    @property
    def takes_only(self) -> tuple[int, int]:
        return self.built_size

    @property
    def preprocessing(self) -> dict:
        """As `pretrained_cfg` says, which `vitlens.load_model` writes; else that of most of its weights."""
        size = self.model.image_size
        said = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225), "input_size": (self.channels, size, size),
                "interpolation": "bilinear", "crop_pct": 0.875, "crop_mode": "center"}  # fmt: skip
        return said | (getattr(self.model, "pretrained_cfg", None) or {})

    @property
    def classes(self) -> int:
        widths = [layer.out_features for layer in self.model.heads.modules() if isinstance(layer, nn.Linear)]
        return widths[-1] if widths else 0

    @property
    def classifier(self) -> nn.Module:
        return self.model.heads[-1]

    def head(self, tokens: Tensor) -> Tensor:
        return self.model.heads(self.model.encoder.ln(tokens)[:, 0])

    def filters(self) -> Tensor:
        if not isinstance(self.embedding, nn.Conv2d):
            raise ValueError("Its patches come from several convolutions, so its filters are no pictures. Use a model "
                             "that embeds patches of pixels.")  # fmt: skip
        return self.embedding.weight.detach().permute(0, 2, 3, 1)

    def positions(self) -> Tensor:
        rows = self.model.image_size // self.model.patch_size
        return self.model.encoder.pos_embedding.detach()[0, 1:].unflatten(0, (rows, rows))
