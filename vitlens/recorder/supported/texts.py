"""What the text towers of CLIP and SigLIP say of prompts, through the tokenizers of their libraries."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from torch import Tensor, nn

from vitlens.recorder.supported.protocol import model_name

CLIP_WORDS = 49408
"""Tokens of CLIP's own tokenizer, which comes with open_clip."""


def by_open_clip(model: nn.Module, prompts: list[str], tokenizer: Callable | None) -> Tensor:
    """(N, D) the embeddings of prompts, by the tokenizer of the model's architecture, else by the one of CLIP."""
    if tokenizer is None:
        import open_clip

        name = (getattr(model, "pretrained_cfg", None) or {}).get("architecture")
        tower = getattr(model, "text", model)
        if name in open_clip.list_models():
            tokenizer = open_clip.get_tokenizer(name)
        elif tower.vocab_size == CLIP_WORDS:
            tokenizer = open_clip.SimpleTokenizer(context_length=tower.context_length)
        else:
            raise ValueError(
                f"The tokenizer of {model_name(model)}, for {tower.vocab_size} tokens, is unknown. Give it, as in "
                "`text(prompt, tokenizer=open_clip.get_tokenizer(…))`."
            )
    return model.encode_text(tokenizer(prompts).to(next(model.parameters()).device))


def by_transformers(model: nn.Module, prompts: list[str], tokenizer: Callable | None, *, filled: bool) -> Tensor:
    """(N, D) the embeddings of prompts. filled: pad to the model's longest text, unmasked, as SigLIP was trained."""
    given = (tokenizer or _beside(model))(
        prompts, padding="max_length" if filled else True, truncation=True, return_tensors="pt",
        max_length=model.config.text_config.max_position_embeddings,
    )  # fmt: skip
    given = given.to(next(model.parameters()).device)
    output = model.get_text_features(**({"input_ids": given["input_ids"]} if filled else given))
    return getattr(output, "pooler_output", output)


def _beside(model: nn.Module) -> Callable:
    """The tokenizer beside the model's weights, on this disk or on the hub."""
    from transformers import AutoTokenizer

    name = model.config.name_or_path
    for local in (True, False) if name else ():
        with contextlib.suppress(OSError, ValueError, KeyError, ImportError):
            return AutoTokenizer.from_pretrained(name, local_files_only=local)
    raise OSError(
        f"The tokenizer of {model_name(model)} is not on this disk, and could not be fetched. Put its files beside the "
        "weights, or give it, as in `text(prompt, tokenizer=AutoTokenizer.from_pretrained(…))`."
    )
