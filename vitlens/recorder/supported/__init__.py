"""Supported models. Refusal is the default, because a plausible but wrong image is worse than an error.

A model is supported if its class is known and every block holds attention modules of a known class: a softmax over all
tokens of one whole image. The capture checks the calls that the model makes. Each library has a file here, with an
adapter that implements `Family`. The rest of vitlens uses `family(model)`.
"""

from vitlens.recorder.supported.acceptance import attention_modules, require_capturable, transformer
from vitlens.recorder.supported.adapter import MLPS, NORMS, Family, PlainPatches, Pool
from vitlens.recorder.supported.lookup import (
    LIBRARIES,
    family,
    inner_transformer,
    is_known,
    known_base,
    transformers_in,
    unwrap,
)
from vitlens.recorder.supported.metadata import (
    has_gate,
    head_count,
    input_channels,
    label_names,
    read_tokens,
    states_preprocessing,
    title,
    token_grid,
)
from vitlens.recorder.supported.names import model_name, qualified_name, short_name
from vitlens.recorder.supported.refusal import UnsupportedModelError, refuse, require_size
from vitlens.recorder.supported.registration import FAMILIES, Registered, register_model
from vitlens.recorder.supported.texts import embed_texts, has_text_tower

__all__ = [
    "FAMILIES",
    "LIBRARIES",
    "MLPS",
    "NORMS",
    "Family",
    "PlainPatches",
    "Pool",
    "Registered",
    "UnsupportedModelError",
    "attention_modules",
    "input_channels",
    "embed_texts",
    "has_text_tower",
    "known_base",
    "family",
    "has_gate",
    "head_count",
    "is_known",
    "label_names",
    "model_name",
    "qualified_name",
    "read_tokens",
    "refuse",
    "register_model",
    "require_capturable",
    "require_size",
    "short_name",
    "states_preprocessing",
    "title",
    "token_grid",
    "transformer",
    "transformers_in",
    "unwrap",
    "inner_transformer",
]
