"""Contrasts and similarity of features as targets, compared with autograd and closed forms."""

import copy

import numpy as np
import pandas as pd
import pytest
import timm
import torch
import torch.nn.functional as F
from support import images, refuses, vitlens

from experiments.support import small
from vitlens import UnsupportedModelError, capture, faithfulness, report
from vitlens.attribution import METHODS, explained, like, relevance, text
from vitlens.attribution.target import NothingToExplain, bind_target
from vitlens.images import ImageError, samples
from vitlens.models import load_model, preprocess
from vitlens.recorder.forward import pooled_features
from vitlens.recorder.supported import family
from vitlens.stream import contributions

KWARGS = {"integrated_gradients": dict(n_steps=2)}
CLASSY = [name for name, method in METHODS.items() if method.depends_on_target]
GRADIENT = [
    name for name, method in METHODS.items() if method.needs in ("gradients", "readings", "inputs")
]


@pytest.fixture
def model(vit):
    """A model in float64 with classes and a large head."""
    made = vit(dtype=torch.float64, img_size=(64, 96), embed_dim=48, depth=2)
    with torch.no_grad():
        made.head.weight.normal_(generator=torch.Generator().manual_seed(1))
        made.head.bias.normal_(generator=torch.Generator().manual_seed(2))
    return made


def pooled(model, x):
    return model.forward_head(model.forward_features(x), pre_logits=True)


def cosine_by_hand(model, x, others):
    """(B,) cosine with the mean of the others' unit features, by NumPy."""
    with torch.no_grad():
        here, there = pooled(model, x).numpy(), pooled(model, others).numpy()
    mean = (there / np.linalg.norm(there, axis=1, keepdims=True)).mean(0)
    return here @ mean / np.linalg.norm(here, axis=1) / np.linalg.norm(mean)


def score(model, x, target, against=None):
    """(B,) scores of a target of features."""
    target, _ = bind_target(model, target, against)
    with torch.no_grad():
        return target.score(pooled_features(model, x))


def test_similarity_by_hand(model):
    x, others = images(), images(3, seed=1)
    np.testing.assert_allclose(
        score(model, x, like(others)), cosine_by_hand(model, x, others), rtol=1e-12
    )
    np.testing.assert_allclose(
        score(model, x, like(list(others.split(1)))), cosine_by_hand(model, x, others)
    )
    torch.testing.assert_close(score(model, x[:1], like(x[:1])), torch.ones(1, dtype=torch.float64))
    a, b = like(others[:1]), like(others[1:2])
    one, other = score(model, x, a, b), score(model, x, b, a)
    torch.testing.assert_close(one, -other, rtol=1e-12, atol=0)
    torch.testing.assert_close(one, score(model, x, a) - score(model, x, b), rtol=1e-9, atol=1e-15)


def test_methods_explain_classes_and_functions_equally(model):
    """A class, its logit as a function of the output, and the product of the features with a row have equal maps."""
    x = images(1)

    def direction(number):
        along = lambda features: features @ model.head.weight[number].detach()  # noqa: E731
        along.of_features = True
        return along

    for name in CLASSY:
        method, kwargs = METHODS[name], KWARGS.get(name, {})
        expected = method(model, x, 3, against=7, **kwargs)
        for one, other in (
            (direction(3), direction(7)),
            (lambda out: out[:, 3], lambda out: out[:, 7]),
        ):
            values = method(model, x, one, against=other, **kwargs)
            torch.testing.assert_close(values, expected, rtol=1e-6, atol=1e-9, msg=name)
    curves = [
        faithfulness.curves(model, x, expected, target, score=measure, step=6).deletion
        for target, measure in ((3, "logit"), (direction(3), None))
    ]
    torch.testing.assert_close(curves[0] - model.head.bias[3], curves[1])


def test_against_explains_the_difference(vit):
    """The map equals that of a head with the difference of two rows in place of the first, for both heads of DeiT."""
    size = dict(img_size=(64, 96), embed_dim=48, depth=2)
    model = vit(name="deit_tiny_distilled_patch16_224", dtype=torch.float64, **size)
    difference = copy.deepcopy(model)
    with torch.no_grad():
        for mine, other in ((model.head, difference.head), (model.head_dist, difference.head_dist)):
            for name, p in mine.named_parameters():
                p.normal_(generator=torch.Generator().manual_seed(p.dim()))
                other.get_parameter(name).copy_(p)
                other.get_parameter(name)[3] -= p[7]
    for name in CLASSY:
        method, kwargs = METHODS[name], KWARGS.get(name, {})
        values = method(model, images(1), 3, against=7, **kwargs)
        expected = method(difference, images(1), 3, **kwargs)
        torch.testing.assert_close(values, expected, rtol=1e-9, atol=0, msg=name)
        assert (
            values - method(model, images(1), 3, **kwargs)
        ).abs().max() > 0.1 * values.abs().max()


def test_methods_explain_similarity_without_classes(vit):
    bare = vit(img_size=(64, 96), embed_dim=48, depth=2, num_classes=0, dtype=torch.float64)
    x, other = images(), like(images(1, seed=1))
    for name in CLASSY:
        values = METHODS[name](bare, x, other, **KWARGS.get(name, {}))
        assert values.shape == (2, 4, 6) and values.isfinite().all() and values.any(), name
        alone = METHODS[name](bare, x[1:], other, **KWARGS.get(name, {}))
        torch.testing.assert_close(values[1:], alone, rtol=1e-7, atol=1e-12)
    values = METHODS["integrated_gradients"](bare, x[:1], other, n_steps=100)
    gained = score(bare, x[:1], other) - score(bare, torch.zeros_like(x[:1]), other)
    torch.testing.assert_close(values.sum((1, 2)), gained, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(
        contributions(bare, x, other).parts.sum(1), score(bare, x, other), rtol=1e-9, atol=1e-12
    )


def small_clip():
    """A CLIP that reads a text at the token 98, the last one."""
    made = small("CLIPModel")
    made.config.text_config.eos_token_id = made.text_model.eos_token_id = 98
    return made


def test_text_of_a_clip_equals_autograd():
    clip, x = small_clip().double(), images(2, size=(32, 32))
    prompts = [torch.tensor([[0, 5, 9, 98]]), torch.tensor([[0, 7, 98, 98]])]
    a, b = (
        text("words", tokenizer=lambda *_, ids=ids, **__: Tokens(input_ids=ids)) for ids in prompts
    )
    with torch.no_grad():
        rows = torch.cat([clip.get_text_features(input_ids=ids).pooler_output for ids in prompts])
        rows = F.normalize(rows, dim=-1)
    with capture(clip, gradients=True) as attn:
        features = clip.get_image_features(pixel_values=x).pooler_output
    cosines = F.normalize(features, dim=-1) @ rows.T
    torch.testing.assert_close(score(clip, x, a), cosines[:, 0].detach(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(
        score(clip, x, a, b), (cosines[:, 0] - cosines[:, 1]).detach(), rtol=1e-9, atol=1e-12
    )
    attn.differentiate((cosines[:, 0] - cosines[:, 1]).sum())
    layers = explained(clip, x, a, against=b).attn
    for mine, theirs in zip(layers, attn, strict=True):
        torch.testing.assert_close(mine.gradient, theirs.gradient, rtol=1e-9, atol=1e-12)


class Tokens(dict):
    def to(self, device):
        return self


def write_tokenizer(folder):
    """A tokenizer of a few words, in a folder in transformers' layout, as a downloaded model has it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "a": 2, "cat": 3, "dog": 4, "</s>": 98}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 98)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", bos_token="<s>"
    )
    fast.save_pretrained(folder)
    return fast


def test_text_uses_the_tokenizer_beside_the_weights(tmp_path):
    from transformers import AutoModel

    small_clip().save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    clip, x = (
        AutoModel.from_pretrained(tmp_path).eval(),
        images(1, dtype=torch.float32, size=(32, 32)),
    )
    with torch.no_grad():
        there = clip.get_text_features(input_ids=torch.tensor([[1, 2, 3, 98]])).pooler_output
        expected = F.cosine_similarity(clip.get_image_features(pixel_values=x).pooler_output, there)
    torch.testing.assert_close(score(clip, x, text("a cat")), expected)
    assert METHODS["relevance"](clip, x, text("a cat"), against=text("a dog")).any()


def test_text_of_siglip_is_padded_without_a_mask(tmp_path):
    """As in training: padded to the length of the text tower, and padding is attended."""
    x = images(1, dtype=torch.float32, size=(32, 32))
    ids = torch.tensor([[1, 2, 3, 98] + [0] * 12])
    for name in ("SiglipModel", "Siglip2Model"):
        small(name).save_pretrained(tmp_path / name)
        fast = write_tokenizer(tmp_path / name)
        model = load_model(tmp_path / name)
        with torch.no_grad():
            there = model.get_text_features(input_ids=ids).pooler_output
            shorter = model.get_text_features(input_ids=ids[:, :4]).pooler_output
            expected, other = (
                F.cosine_similarity(pooled_features(model, x), each) for each in (there, shorter)
            )
        # The tokenizer of SigLIP 2 is Gemma's, with more words than these.
        cat = text("a cat", tokenizer=fast if name == "Siglip2Model" else None)
        torch.testing.assert_close(score(model, x, cat), expected)
        assert abs(other - expected) > 1e-3, "or else the padding would not matter here"


def test_text_uses_the_tokenizer_of_open_clip():
    import open_clip
    from open_clip.model import CLIP

    torch.manual_seed(0)
    vision = dict(layers=2, width=32, head_width=16, image_size=32, patch_size=8)
    words = dict(context_length=12, vocab_size=49408, width=32, heads=2, layers=2)
    clip, x = CLIP(24, vision, words).eval(), images(2, dtype=torch.float32, size=(32, 32))
    ids = open_clip.SimpleTokenizer(context_length=12)(["a photo of a cat"])
    with torch.no_grad():
        expected = F.cosine_similarity(clip.encode_image(x), clip.encode_text(ids))
    torch.testing.assert_close(score(clip, x, text("a photo of a cat")), expected)
    assert METHODS["relevance"](clip, x, text("a photo of a cat")).shape == (2, 4, 4)


def test_like_with_models_of_other_libraries():
    for name in ("Dinov2Model", "SiglipModel", "open_clip, pool", "open_clip, timm", "torchvision"):
        model = small(name)
        x, other = (
            images(n, seed=n, dtype=torch.float32, size=family(model).built_size) for n in (2, 1)
        )
        for method in GRADIENT:
            values = METHODS[method](model, x, like(other))
            assert values.shape[0] == 2 and values.isfinite().all(), (name, method)


def test_occlusion_explains_a_similarity_at_its_maximum(model):
    """The gradient there consists of rounding errors, which occlusion does not read."""
    x = images()
    assert METHODS["occlusion"](model, x, like(x[:1])).any()


def test_randomization_keeps_the_target(model):
    targets = []

    def method(model, images, target):
        targets.append(target)
        return relevance(model, images, target)

    result = faithfulness.randomization(model, images(), method, like(images(1, seed=1)))
    assert len(result.parts) > 4 and all(target is targets[0] for target in targets)
    assert (result.rank_correlation[0] == 1).all()  # features precede the head


def test_explain_command_without_classes(tmp_path, monkeypatch):
    """num_classes=0, end to end: figures, scores, and the compared image left out."""
    torch.manual_seed(0)
    bare = timm.create_model(
        "vit_tiny_patch16_224", img_size=64, embed_dim=96, depth=2, num_heads=3, num_classes=0
    )
    monkeypatch.setattr("vitlens.models.opening.load_vit", lambda name, **_: bare.eval())
    paths = [tmp_path / "0.jpg", tmp_path / "1.jpg"]
    for path, picture in zip(paths, samples().values(), strict=False):
        picture.save(path)
    options = "--like", paths[0], "--scores", "--orders", 2, "--out", tmp_path / "o"
    assert "0.jpg is left out" in vitlens("explain", "bare", *paths, *options, expect=1).stderr
    table = pd.read_csv(tmp_path / "o" / "scores.csv")
    assert set(table.image) == {"1.jpg"} and set(table.target) == {"the similarity to 0.jpg"}
    assert set(table.quantity) == {"similarity to 0.jpg (a cosine, at most 1)"}
    assert (tmp_path / "o" / "00-1.png").exists()


def test_curves_of_independent_outputs(vit):
    """Scores are the value of one output, and the sigmoid of independent labels."""
    x, m = images(1), torch.rand(1, 4, 6)
    for outputs, count, function in (
        (None, 1, torch.Tensor.double),
        ("independent", 3, torch.sigmoid),
    ):
        model = vit(img_size=(64, 96), depth=2, num_classes=count, dtype=torch.float64)
        model.outputs = outputs
        with torch.no_grad():
            model.head.weight.mul_(100)
            whole, empty = (function(model(each))[0, 0].item() for each in (x, torch.zeros_like(x)))
        curves = faithfulness.curves(model, x, m, 0, baseline="zero")
        for curve in (curves.deletion, curves.insertion.flip(-1)):
            assert [curve[0, 0].item(), curve[0, -1].item()] == pytest.approx(
                [whole, empty], rel=1e-4
            )
    contrast = faithfulness.curves(model, x, m, 0, against=1)
    logits = [faithfulness.curves(model, x, m, k, score="logit").deletion for k in (0, 1)]
    torch.testing.assert_close(contrast.deletion, logits[0] - logits[1], rtol=1e-3, atol=1e-4)


def test_score_names_its_quantity(vit, tmp_path):
    model = vit(img_size=224)
    one, two = list(samples().items())[:2]
    explanations = report.explain(model, [one], like(two[1], name="tabby.jpg"), names=["relevance"])
    (scored,) = report.score(model, explanations)
    with torch.no_grad():
        x = [preprocess(model, each[1]) for each in (one, two)]
        expected = F.cosine_similarity(pooled(model, x[0]), pooled(model, x[1])).item()
    assert (
        scored.value == pytest.approx(expected, rel=1e-5)
        and scored.target == "the similarity to tabby.jpg"
    )
    assert f"{expected:.3g}".replace("-", "−") in scored.title and "%" not in scored.title
    row = scored.scores.set_index("method").loc["relevance"]
    assert row.quantity == "similarity to tabby.jpg (a cosine, at most 1)"


def own(vit, **options):
    return vit(dtype=torch.float64, img_size=(64, 96), **options)


def headed(vit):
    return torch.nn.Sequential(own(vit), torch.nn.Linear(10, 2).double())


def scored(model, target, score):
    """Curves of a constant map."""
    return faithfulness.curves(model, images(), torch.ones(2, 4, 6), target, score=score)


X, ITSELF = images(), like(images()[:1])
REFUSALS = (
    # texts and images
    (
        lambda model, vit: relevance(model, X, text("a cat")),
        ValueError,
        "vit_tiny_patch16_224.* no text tower",
    ),
    (
        lambda model, vit: score(
            small("open_clip"), images(2, dtype=torch.float32, size=(32, 32)), text("a cat")
        ),
        ValueError,
        "99 tokens.*tokenizer",
    ),
    (lambda model, vit: relevance(model, X, like("none.jpg")), ImageError, "none.jpg"),
    # contrasts
    (
        lambda model, vit: relevance(model, X, ITSELF, against=3),
        ValueError,
        "contrast .*two classes or",
    ),
    (
        lambda model, vit: relevance(model, X, ITSELF, against=ITSELF),
        NothingToExplain,
        "with itself",
    ),
    (
        lambda model, vit: relevance(model, X, [0, 3], against=3),
        NothingToExplain,
        "Class 3 .* with itself",
    ),
    *(
        (
            lambda model, vit, name=name: METHODS[name](model, X, ITSELF),
            NothingToExplain,
            "at its maximum",
        )
        for name in (*GRADIENT, "integrated_gradients")
    ),
    # features and outputs
    (
        lambda model, vit: relevance(
            own(vit, num_classes=0, global_pool=""), X, lambda output: output.sum(1)
        ),
        ValueError,
        r"\(2, 25, 96\)",
    ),
    (lambda model, vit: relevance(headed(vit), X, ITSELF), UnsupportedModelError, "Sequential"),
    # scores of curves
    (lambda model, vit: scored(model, ITSELF, "logit"), ValueError, "one of similarity"),
    (
        lambda model, vit: scored(own(vit, depth=2, num_classes=1), 0, "probability"),
        ValueError,
        "one of value, got 'probability'",
    ),
)
"""A call, its error and decisive words."""


@pytest.mark.parametrize("call, error, words", REFUSALS)
def test_targets_refuse(model, vit, call, error, words):
    refuses(words, call, model, vit, error=error)
