"""Tokens after every layer: features, similarity, principal components, norms and nearest patches.

layers, logits = vitlens.tokens.features(model, images)     # (B, T, D) after each layer
vitlens.tokens.norms(layers[-1])                            # (B, T)
"""

from vitlens.tokens.pictures import Colored, Pairs, colored, colors, components, correspondences
from vitlens.tokens.residual import features, median, norms, similarity

__all__ = [
    "Colored",
    "Pairs",
    "colored",
    "colors",
    "components",
    "correspondences",
    "features",
    "median",
    "norms",
    "similarity",
]
