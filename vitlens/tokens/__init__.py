"""What tokens are like after every layer: similarity, principal components, norms, sinks, and a register for them.

layers, logits = vitlens.tokens.features(model, images)     # (B, T, D) after each layer
vitlens.tokens.sinks(model, images).outliers()              # (B, L, P) patches with norms far above the others'
"""

from vitlens.tokens.pictures import Colored, Pairs, colored, colors, components, correspondences
from vitlens.tokens.registers import register_neurons, with_register
from vitlens.tokens.residual import features, norms, similarity
from vitlens.tokens.sinks import Sinks, outliers, roughness, sinks

__all__ = [
    "Colored",
    "Pairs",
    "Sinks",
    "colored",
    "colors",
    "components",
    "correspondences",
    "features",
    "norms",
    "outliers",
    "register_neurons",
    "roughness",
    "similarity",
    "sinks",
    "with_register",
]
