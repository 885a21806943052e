"""Text towers of CLIP and SigLIP models."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from vitlens.recorder.supported.lookup import library_file
from vitlens.recorder.supported.names import model_name


def has_text_tower(model: nn.Module) -> bool:
    """True if the model has a text tower with embeddings in the space of `pooled_features`."""
    return hasattr(model, "get_text_features") or hasattr(model, "encode_text")


def embed_texts(model: nn.Module, prompts: list[str], tokenizer: Callable | None = None) -> Tensor:
    """(N, D) embeddings of prompts, in the space of `pooled_features`.

    tokenizer: makes the input of the text tower, by default the model's own. Raises ValueError for a model without a
    text tower, and OSError without a tokenizer.
    """
    if not has_text_tower(model):
        raise ValueError(
            f"{model_name(model)} has no text tower to embed a text. Open a CLIP or SigLIP model with both towers, or "
            "compare with an image."
        )
    library = "transformers" if hasattr(model, "get_text_features") else "open_clip"
    return library_file(library).embed_texts(model, prompts, tokenizer)
