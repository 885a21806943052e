"""What the paper's models cost, counted once by `evaluate.compute.cost` so that `vitlens models` needs no PyTorch."""

from __future__ import annotations

from typing import NamedTuple

from vitlens.paper.training import CLASSES, IMAGES


def exaflops(per_image: float, images: float, epochs: float) -> float:
    """Exa (10¹⁸) FLOPs of a training: forward and backward are three forwards, each of `per_image` FLOPs.

    The rule behind Table 6: it gives the printed numbers of ViTs and hybrids within 3 %, of ResNets within 5 %, with
    `vitlens.evaluate.compute.flops` at 224 pixels and a head of JFT's classes (the paper does not spell it out).
    """
    return 3 * per_image * images * epochs / 1e18


class Cost(NamedTuple):
    """What one model of the paper costs, with a head of 1,000 classes."""

    parameters: int
    flops: int
    """Of one image of `image_size` pixels; a multiply-add is two."""
    image_size: int
    """Side in pixels at pre-training."""
    features: int
    """Input features of the head."""

    def pretraining(self, epochs: float, data: str = "JFT-300M") -> float:
        """ExaFLOPs of so many epochs of pre-training, with a head of that data's classes; data: of `paper.IMAGES`."""
        if data not in IMAGES:
            raise ValueError(f"Pre-training is counted for {', '.join(IMAGES)}, but {data!r} was asked for.")
        head = 2 * self.features * (CLASSES[data] - 1000)
        return exaflops(self.flops + head, IMAGES[data], epochs)


COSTS: dict[str, Cost] = {
    "ViT-B/16": Cost(86_567_656, 35_127_656_448, 224, 768),
    "ViT-B/32": Cost(88_224_232, 8_818_372_608, 224, 768),
    "ViT-L/16": Cost(304_326_632, 123_109_425_152, 224, 1_024),
    "ViT-L/32": Cost(306_535_400, 30_755_078_144, 224, 1_024),
    "ViT-H/14": Cost(632_045_800, 334_590_218_240, 224, 1_280),
    "ViT-b/32": Cost(22_878_952, 2_285_819_904, 224, 384),
    "R50+ViT-B/16": Cost(98_659_112, 43_070_717_952, 224, 768),
    "R50+ViT-B/32": Cost(110_945_832, 16_915_574_784, 224, 768),
    "R50+ViT-L/16": Cost(316_483_624, 131_078_176_768, 224, 1_024),
    "R50+ViT-L/32": Cost(328_994_856, 38_826_590_208, 224, 1_024),
    "R50x1": Cost(25_549_352, 8_178_368_512, 224, 2_048),
    "R50x2": Cost(97_988_712, 32_233_226_240, 224, 4_096),
    "R101x1": Cost(44_541_480, 15_602_810_880, 224, 2_048),
    "R152x1": Cost(60_185_128, 23_027_253_248, 224, 2_048),
    "R152x2": Cost(236_335_208, 91_628_765_184, 224, 4_096),
    "R152x4": Cost(936_533_224, 365_554_565_120, 224, 8_192),
    "R200x3": Cost(568_633_000, 268_693_929_984, 224, 6_144),
    "EfficientNet-L2": Cost(480_309_308, 951_407_306_560, 800, 5_504),
}
"""Costs by model name, with the names of `MODELS`."""
