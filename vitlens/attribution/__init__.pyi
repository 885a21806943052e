from .balanced import balanced_gradients
from .maps import (
    Explainable,
    Explained,
    attention_gradient,
    explained,
    grad_cam,
    gradient_rollout,
    legrad,
    relevance,
    rollout,
)
from .pixels import integrated_gradients, occlusion
from .registry import METHODS, Method, methods, register
from .target import like, text

__all__ = [
    "Explainable",
    "Explained",
    "METHODS",
    "Method",
    "attention_gradient",
    "balanced_gradients",
    "explained",
    "grad_cam",
    "gradient_rollout",
    "integrated_gradients",
    "legrad",
    "like",
    "methods",
    "occlusion",
    "register",
    "relevance",
    "rollout",
    "text",
]
