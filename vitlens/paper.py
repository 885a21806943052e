"""The paper as data: "An Image is Worth 16x16 Words", Dosovitskiy et al., ICLR 2021, arXiv 2010.11929v2."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Variant:
    """One row of Table 1, and the timm model built like it.

    width, mlp: hidden dimensions. parameters: in millions, as printed. timm: name of the model with 224-pixel images.
    """

    name: str
    layers: int
    width: int
    mlp: int
    heads: int
    parameters: int
    timm: str

    def tokens(self, patch: int, image: int = 224) -> int:
        """Length of the sequence for square images, class token included; a rest smaller than a patch is cut."""
        return (image // patch) ** 2 + 1


TABLE_1 = (
    Variant("ViT-Base", 12, 768, 3072, 12, 86, "vit_base_patch16_224"),
    Variant("ViT-Large", 24, 1024, 4096, 16, 307, "vit_large_patch16_224"),
    Variant("ViT-Huge", 32, 1280, 5120, 16, 632, "vit_huge_patch14_224"),
)
