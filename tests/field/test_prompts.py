"""Texts that are longer than the text tower of a model reads."""

import pytest
import torch
from forms import cannot_occur, form
from PIL import Image
from support import vitlens
from torch import nn

from vitlens.attribution import relevance, text
from vitlens.attribution.target import bind_target
from vitlens.recorder.forward import pooled_features

transformers = pytest.importorskip("transformers")
open_clip = pytest.importorskip("open_clip")

LIMIT = 16


def word_tokenizer():
    """A tokenizer of transformers of four words, which begins with <s> and ends with </s>."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = {"<pad>": 0, "<s>": 1, "a": 2, "cat": 3, "dog": 4, "</s>": 98}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 98)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", bos_token="<s>"
    )


def of_transformers(kind, folder):
    """A CLIP or SigLIP of transformers with a tokenizer beside its weights."""
    tower = dict(hidden_size=24, intermediate_size=24, num_hidden_layers=1, num_attention_heads=3)
    words = tower | dict(
        vocab_size=99, max_position_embeddings=LIMIT, eos_token_id=98, bos_token_id=1
    )
    config = getattr(transformers, f"{kind}Config")(
        text_config=words, vision_config=tower | dict(image_size=32, patch_size=8)
    )
    torch.manual_seed(0)
    getattr(transformers, f"{kind}Model")(config).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return transformers.AutoModel.from_pretrained(folder).eval()


def of_open_clip():
    from open_clip.model import CLIP

    vision = dict(layers=1, width=32, head_width=16, image_size=32, patch_size=8)
    words = dict(context_length=LIMIT, vocab_size=49408, width=32, heads=2, layers=1)
    torch.manual_seed(0)
    return CLIP(24, vision, words).eval()


def score(model, image, target):
    """Score of a text."""
    target, _ = bind_target(model, target)
    with torch.no_grad():
        return target.score(pooled_features(model, image))


IMAGE = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
FITS = " ".join(["a"] * (LIMIT - 3)) + " cat"  # with the tokens at its ends, LIMIT
LONG = " ".join(["a"] * LIMIT)


@form(
    6,
    door="Python: text, transformers",
    case="CLIP and SigLIP, 16 tokens, prompts of 16 and of 18 or more",
    right="tokens counted by hand",
)
@pytest.mark.parametrize("kind", ["CLIP", "Siglip"])
def test_text_refuses_a_prompt_that_transformers_would_cut(kind, tmp_path):
    model = of_transformers(kind, tmp_path)
    assert score(model, IMAGE, text(FITS)).isfinite().all()
    with pytest.raises(ValueError, match="has 17 tokens, .* reads 16 tokens, so the last 1 tokens"):
        score(model, IMAGE, text(f"a {FITS}"))
    with pytest.raises(ValueError, match="has 20 tokens, .* reads 16 tokens, so the last 4 tokens"):
        relevance(model, IMAGE, text(f"{LONG} cat dog"))


@form(
    6,
    door="Python: text as a contrast, transformers",
    case="two prompts that differ after the last token that is read",
    right="refused, and not as a contrast with itself",
)
def test_contrast_of_prompts_that_would_be_cut_names_the_length(tmp_path):
    model = of_transformers("CLIP", tmp_path)
    for target, against in ((f"{LONG} cat", f"{LONG} dog"), ("a cat", f"{LONG} dog")):
        with pytest.raises(ValueError, match="Shorten it") as caught:
            relevance(model, IMAGE, text(target), against=text(against))
        assert "itself" not in str(caught.value)


@form(
    6,
    door="Python: text, open_clip's own tokenizer",
    case="16 tokens, a prompt of 16 and one of 18",
    right="open_clip's tokens without a limit",
)
def test_text_refuses_a_prompt_that_open_clip_would_cut():
    model = of_open_clip()
    tokenizer = open_clip.SimpleTokenizer(context_length=LIMIT)
    assert len(tokenizer.encode(FITS)) == LIMIT - 2
    assert score(model, IMAGE, text(FITS)).isfinite().all()
    with pytest.raises(ValueError, match="has 18 tokens, .* reads 16 tokens, so the last 2 tokens"):
        score(model, IMAGE, text(LONG))
    long = "an extraordinarily unphotogenic hippopotamus " * 3
    count = len(tokenizer.encode(long)) + 2
    with pytest.raises(ValueError, match=f"has {count} tokens"):
        score(model, IMAGE, text(long))


@form(
    6,
    door="Python: text(tokenizer=), open_clip's tokenizer of transformers",
    case="a tokenizer in a folder, 16 tokens",
    right="tokens counted by hand",
)
def test_text_refuses_a_prompt_that_a_tokenizer_in_a_folder_would_cut(tmp_path):
    word_tokenizer().save_pretrained(tmp_path)
    tokenizer = open_clip.tokenizer.HFTokenizer(str(tmp_path), context_length=LIMIT)
    assert score(of_open_clip(), IMAGE, text("a cat", tokenizer=tokenizer)).isfinite().all()
    with pytest.raises(ValueError, match="reads 16 tokens, so the last 3 tokens"):
        score(of_open_clip(), IMAGE, text(f"{LONG} cat", tokenizer=tokenizer))


@form(
    6,
    door="Python: text(tokenizer=), an own function",
    case="a function that cuts and has no other options",
    right="words counted by hand",
)
def test_text_refuses_words_that_an_own_tokenizer_does_not_read():
    tokenizer = open_clip.SimpleTokenizer(context_length=LIMIT)

    def own(prompts):
        return tokenizer(prompts)

    model = of_open_clip()
    assert score(model, IMAGE, text("a cat", tokenizer=own)).isfinite().all()
    with pytest.raises(ValueError, match="is too long: .*the last 3 words would be cut"):
        score(model, IMAGE, text(f"{LONG} cat", tokenizer=own))


def test_text_of_an_own_module_without_a_text_tower_is_refused():
    with pytest.raises(ValueError, match="has no text tower"):
        score(nn.Identity(), IMAGE, text("a cat"))


cannot_occur(6, door="command: --target, a text", reason="--target takes classes only")
cannot_occur(6, door="timm and torchvision, a text", reason="their models have no text tower")


@form(
    6,
    door="command: explain --text",
    case="a text of 20 tokens for a CLIP that reads 16",
    right="one sentence, and no figure",
)
def test_explain_command_refuses_a_long_text(tmp_path):
    of_transformers("CLIP", tmp_path / "clip")
    Image.new("RGB", (32, 32)).save(tmp_path / "cat.png")
    out = tmp_path / "out"
    options = ["--text", f"{LONG} cat dog", "--out", out]
    result = vitlens("explain", tmp_path / "clip", tmp_path / "cat.png", *options, expect=2)
    assert "reads 16 tokens, so the last 4 tokens" in result.stderr
    assert "Traceback" not in result.stderr and not list(tmp_path.glob("out/*.png"))
