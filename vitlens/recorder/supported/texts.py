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
    text tower and for a prompt with more tokens than the text tower reads, and OSError without a tokenizer.
    """
    if not has_text_tower(model):
        raise ValueError(
            f"{model_name(model)} has no text tower to embed a text. Open a CLIP or SigLIP model with both towers, or "
            "compare with an image."
        )
    library = "transformers" if hasattr(model, "get_text_features") else "open_clip"
    texts = library_file(library).Texts(model, tokenizer)
    for prompt in prompts:
        _require_whole(model, prompt, texts)
    return texts.embed(prompts)


def _require_whole(model: nn.Module, prompt: str, texts) -> None:
    """Raise ValueError for a prompt whose end the text tower does not read. `texts`: of a library's `Texts`."""
    tokens = texts.tokens(prompt)
    limit = texts.limit
    count = texts.count(prompt)
    lost = max(0, count - limit)
    unit = "tokens"
    if not lost:
        lost = _unread_words(prompt, tokens, texts)
        unit = "words"
    if lost:
        begin = prompt if len(prompt) <= 60 else f"{prompt[:60]}…"
        has = f"has {count} tokens, and " if unit == "tokens" else "is too long: "
        raise ValueError(
            f"The text “{begin}” {has}the text tower of {model_name(model)} reads {limit} tokens, so the last {lost} "
            f"{unit} would be cut. Shorten it."
        )


def _unread_words(prompt: str, tokens: list[int], texts) -> int:
    """Words at the end of a prompt without an effect on its tokens, if these fill the text tower."""
    full = len(tokens) == texts.limit and len(tokens) > 1 and tokens[-1] != tokens[-2]
    words = prompt.split()
    unread = 0
    while full and len(words) > 1 and any(letter.isalnum() for letter in words[-1]):
        words.pop()
        if texts.tokens(" ".join(words)) != tokens:
            break
        unread += 1
    return unread
