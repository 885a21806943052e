"""Models, checkpoints and folders as they occur in practice, one function each."""

import argparse
import io
import json
import pathlib
import subprocess
import sys
from dataclasses import replace

import killed_worker
import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from support import encoded, refuses, write
from torch import nn

from vitlens import UnsupportedModelError, attention, capture, load_model, report
from vitlens.attribution.target import resolve_target
from vitlens.data import load
from vitlens.images import samples
from vitlens.models import data_config, pixels, preprocess, restore, scores, top_classes
from vitlens.train import export, recipe, starting_from


def test_capture_takes_subclasses_with_timms_forward():
    timms = timm.models.VisionTransformer
    small = dict(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, num_classes=5)

    class Plain(timms):
        """Another __init__ and more weights, as in RETFound."""

        def __init__(self, **options):
            super().__init__(**options)
            self.extra = "mine"

    class Masked(timms):
        """A forward_features that returns the mean of the patches, as in MAE."""

        def forward_features(self, x):
            return super().forward_features(x)[:, 1:].mean(1, keepdim=True)

    class Distilled(timms):  # another method of the forward
        def _pos_embed(self, x):
            return super()._pos_embed(x).flip(1)

    torch.manual_seed(0)
    images, model = torch.randn(1, 3, 32, 32), Plain(**small).eval()
    same = timms(**small).eval()
    same.load_state_dict(model.state_dict())
    rollouts = []
    for vit in (model, same):
        with torch.no_grad(), capture(vit) as attn:
            vit(images)
        rollouts.append(attention.rollout(attn))
    assert torch.equal(*rollouts)
    for kind, method in ((Masked, "forward_features"), (Distilled, "_pos_embed")):
        with pytest.raises(
            UnsupportedModelError, match=rf"overrides {method}.*register_model\({kind.__name__}"
        ):
            capture(kind(**small)).__enter__()


def test_capture_names_replaced_forwards():
    def unfused(self, x, **_):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(((q @ k.mT * self.scale).softmax(-1) @ v).transpose(1, 2).flatten(2))

    options = dict(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3)
    images = torch.randn(1, 3, 32, 32)
    module = timm.create_model("vit_tiny_patch16_224", **options).eval()
    attention = module.blocks[1].attn
    attention.forward = unfused.__get__(attention)
    match = r"the forward of blocks\.1\.attn was replaced"
    with pytest.raises(UnsupportedModelError, match=match), torch.no_grad(), capture(module):
        module(images)
    del attention.forward
    with torch.no_grad(), capture(module) as attn:
        module(images)
    assert len(attn) == 2
    with pytest.MonkeyPatch.context() as patch:  # the class's forward, for all models
        patch.setattr(type(attention), "forward", unfused)
        match = r"the forward of blocks\.0\.attn was replaced"
        with pytest.raises(UnsupportedModelError, match=match), torch.no_grad(), capture(module):
            module(images)
    block = module.blocks[0]
    block.forward = lambda x, **_: x  # a block that skips its attention
    with (
        pytest.raises(UnsupportedModelError, match="the forward of block 0 was replaced"),
        capture(module),
    ):
        module(images)


def test_load_model_uses_the_activation_of_open_clip_weights(tmp_path):
    """QuickGELU if the tag has it, and GELU for the same architecture with other weights."""
    import open_clip
    from open_clip.transformer import QuickGELU

    def quick(model):
        return any(isinstance(module, QuickGELU) for module in model.visual.modules())

    names = [
        (name, tag)
        for name, tag in open_clip.list_pretrained()
        if open_clip.get_pretrained_cfg(name, tag).get("quick_gelu")
        and not open_clip.get_model_config(name).get("quick_gelu")
    ]
    assert len(names) > 20
    names = dict(names).items()  # a tag of each architecture
    small = {
        "embed_dim": 32,
        "vision_cfg": {"image_size": 32, "layers": 1, "width": 64, "patch_size": 16},
        "text_cfg": {"context_length": 8, "vocab_size": 64, "width": 32, "heads": 2, "layers": 1},
    }
    for name, tag in names:
        if "layers" in open_clip.get_model_config(name)["vision_cfg"] and "RN" not in name:
            assert quick(load_model(f"open_clip:{name}/{tag}", pretrained=False, **small))
    model = load_model("open_clip:ViT-B-32/openai", pretrained=False, **small)
    torch.save(model.state_dict(), tmp_path / "clip.pt")
    for tag, expected in (("openai", True), ("laion2b_s34b_b79k", False)):
        opened = load_model(f"open_clip:ViT-B-32/{tag}", checkpoint=tmp_path / "clip.pt", **small)
        assert quick(opened) is expected
        assert torch.equal(opened.visual.conv1.weight, model.visual.conv1.weight)


def test_preprocess_equals_processors_of_transformers(tmp_path):
    """CLIP with "size": 224, and other settings that timm's preprocessing lacks."""

    import transformers

    from experiments.support import small

    images = [samples()["chelsea"], samples()["astronaut"].crop((0, 0, 200, 500))]
    cases = {
        "CLIPImageProcessor": [
            {"size": 224, "crop_size": 224, "do_center_crop": True},
            {"do_center_crop": False, "size": [32, 48]},
            {"do_normalize": False},
            {"do_rescale": False, "do_normalize": False},
            {"rescale_factor": 1 / 127.5},
            {"size": {"shortest_edge": 40}, "crop_size": {"height": 24, "width": 56}},
        ],
        "ViTImageProcessor": [
            {},
            {"resample": 0},
            {"do_resize": False},
            {"image_std": [0.2, 0.3, 0.4]},
        ],
        "BitImageProcessor": [
            {"size": {"shortest_edge": 256}, "crop_size": 224, "image_mean": [0.485, 0.456, 0.406]}
        ],
        "SiglipImageProcessor": [{"size": {"height": 256, "width": 256}}],
        "BeitImageProcessor": [{}],
        "DeiTImageProcessor": [{"size": {"height": 256, "width": 256}}],
    }
    small("ViTForImageClassification").save_pretrained(tmp_path)
    for kind, settings in cases.items():
        for options in settings:
            text = json.dumps({"image_processor_type": kind, **options})
            (tmp_path / "preprocessor_config.json").write_text(text)
            processor = transformers.AutoImageProcessor.from_pretrained(tmp_path)
            model = load_model(tmp_path)
            for image in images:
                expected = processor(images=image, return_tensors="pt")["pixel_values"]
                batch = preprocess(model, image)
                assert np.abs(batch.numpy() - expected.numpy()).max() <= 1e-4, options
                levels = processor(
                    images=image, return_tensors="np", do_rescale=False, do_normalize=False
                )
                shown = np.moveaxis(levels["pixel_values"][0], 0, -1)
                assert np.abs(restore(model, batch)[0] - shown.astype(float)).max() <= 0.51
                stored = pixels(model)(torch.from_numpy(np.array(image)).permute(2, 0, 1))
                assert np.array_equal(stored.permute(1, 2, 0), restore(model, batch)[0])


def test_load_model_refuses_other_patch_sizes(tmp_path):
    """Weights of another patch size are refused from a checkpoint, a folder, Google's arrays and a timm name."""
    small = dict(embed_dim=48, depth=1, num_heads=2, num_classes=3)
    model = timm.create_model("vit_tiny_patch16_224", **small)
    torch.save(model.state_dict(), tmp_path / "patch16.pth")
    timm.models.save_for_hf(model, tmp_path, model_args=small, safe_serialization=True)
    np.savez(tmp_path / "google.npz", **{"embedding/kernel": np.zeros((32, 32, 3, 48), np.float32)})
    larger = load_model(
        "vit_tiny_patch16_224", checkpoint=tmp_path / "patch16.pth", img_size=64, **small
    )
    assert larger.pos_embed.shape[1] == 17
    assert torch.equal(larger.patch_embed.proj.weight, model.patch_embed.proj.weight)
    for call in (
        lambda: load_model(
            "vit_tiny_patch16_224", checkpoint=tmp_path / "patch16.pth", patch_size=8, **small
        ),
        lambda: load_model(
            "vit_small_patch14_dinov2", checkpoint=tmp_path / "patch16.pth", **small
        ),
        lambda: load_model("vit_tiny_patch16_224", checkpoint=tmp_path / "google.npz", **small),
        lambda: load_model(tmp_path, patch_size=8),
    ):
        refuses("patches of (16 × 16|32 × 32) and the model", call)


def test_scores_of_independent_outputs_are_sigmoids():
    """transformers' problem_type, and a timm model with independent outputs."""
    from experiments.support import small

    logits = torch.tensor([[2.87, 3.31, 3.07, -3.0]])
    model = small("ViTForImageClassification", num_labels=4)
    softmax = [score for _, score in top_classes(model, logits)[0]]
    assert sum(softmax) == pytest.approx(1)
    model.config.problem_type = "multi_label_classification"
    assert [score for _, score in top_classes(model, logits, 3)[0]] == pytest.approx(
        [0.965, 0.956, 0.946], abs=1e-3
    )
    plain = load_model("test_vit", pretrained=False, num_classes=4, outputs="independent")
    assert torch.equal(scores(torch.nn.DataParallel(plain), logits), logits.sigmoid())
    assert torch.equal(
        scores(timm.create_model("test_vit", num_classes=4), logits), logits.softmax(-1)
    )


def test_scores_of_a_single_output_are_values():
    """One output, in the table and in the score of a map, and three values."""
    model = timm.create_model("test_vit")
    model.reset_classifier(1)
    logits = torch.tensor([[62.3]])
    (((_, value),),) = top_classes(model, logits)
    assert abs(value - 62.3) < 1e-5
    assert torch.equal(
        resolve_target(model, logits, 0).measure(logits, "probability"), logits[:, 0]
    )
    several = load_model("test_vit", pretrained=False, num_classes=3, outputs="value")
    assert torch.equal(scores(several, logits.expand(1, 3)), logits.expand(1, 3))
    assert (
        scores(
            load_model("test_vit", pretrained=False, num_classes=1, outputs="independent"), logits
        ).item()
        == 1
    )


def test_load_model_reads_checkpoints_of_training_programs(tmp_path, capsys):
    """Weights inside of arguments, wrappers, Lightning and DINO. Errors name the weights that do not fit."""
    name, small = "vit_tiny_patch16_224", dict(img_size=32, embed_dim=48, depth=2, num_heads=2)
    model = timm.create_model(name, num_classes=5, **small)
    state, file = model.state_dict(), tmp_path / "weights.pth"
    features = {key: value for key, value in state.items() if not key.startswith("head.")}

    def prefixed(prefix, weights=state):
        return {prefix + key: value for key, value in weights.items()}

    projection = {"head.mlp.0.weight": torch.zeros(3, 48)}
    for content, classes in (
        (state, 5),
        ({"state_dict": state, "args": argparse.Namespace(lr=1)}, 5),
        (prefixed("module."), 5),
        ({"model": prefixed("_orig_mod.module.")}, 5),
        ({"state_dict": prefixed("model."), "epoch": 3}, 5),
        (
            {
                "student": prefixed("module.backbone.", {k: v + 1 for k, v in features.items()}),
                "teacher": prefixed("backbone.", features) | projection,
                "epoch": 3,
            },
            0,
        ),
        (
            {
                "model": prefixed("student.backbone.", {k: v + 1 for k, v in features.items()})
                | prefixed("teacher.backbone.", features)
            },
            0,
        ),
        (prefixed("net.vit."), 5),
    ):
        torch.save(content, file)
        opened = load_model(name, checkpoint=file, **small)
        assert opened.num_classes == classes
        assert all(torch.equal(value, opened.state_dict()[key]) for key, value in features.items())
        if classes:
            assert torch.equal(opened.head.weight, model.head.weight)
        assert (
            f"its head has {classes} classes" in (output := capsys.readouterr().err)
            or "it has no head" in output
        )
    torch.save(state, file)
    assert load_model(name, checkpoint=file, num_classes=0, **small).num_classes == 0


NAME, SMALL = "vit_tiny_patch16_224", dict(img_size=32, embed_dim=48, depth=2, num_heads=2)


def made(**changes):
    return timm.create_model(NAME, num_classes=5, **SMALL | changes)


def weights(prefix="", without=" ", **more):
    """The weights of a small model, with a prefix, without those whose names contain a text, and with more."""
    kept = {key: value for key, value in made().state_dict().items() if without not in key}
    return {prefix + key: value for key, value in kept.items()} | more


def stored(content) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


OTHER_STATES = {"student": {"a": torch.zeros(1)}, "predictor": {"b": torch.zeros(1)}}
DECODER, CRITERION = ({f"{name}.weight": torch.zeros(3)} for name in ("decoder", "criterion"))
PICKLED = {"extra": pathlib.PurePosixPath("a")}
CHECKPOINTS = (
    # other weights
    (lambda: stored(OTHER_STATES), {}, "predictor, student"),
    (lambda: stored(weights(without="blocks.1.mlp")), {}, "head has 5 classes"),
    (lambda: stored(timm.create_model(NAME, **SMALL | {"depth": 3}).state_dict()), {}, "not hold"),
    (lambda: stored(weights()), {"num_classes": 7}, "5 classes, not 7"),
    # files that hold something else
    (lambda: stored({"state_dict": weights()} | PICKLED), {}, "cannot be read"),
    (lambda: stored(made()), {}, "cannot be read"),
    (lambda: b"", {}, "cannot be read"),
    (lambda: b"hello", {}, "cannot be read"),
    (lambda: stored(weights())[:3000], {}, "cannot be read"),
)
"""The content of a checkpoint, options, and decisive words."""


@pytest.mark.parametrize("prefix, others", [("", DECODER), ("model.", CRITERION)])
def test_load_model_names_weights_beside_the_model(tmp_path, capsys, prefix, others):
    file = tmp_path / "more.pth"
    file.write_bytes(stored(weights(prefix, **others)))
    model = load_model(NAME, checkpoint=file, **SMALL)
    (name,) = others
    assert name in capsys.readouterr().err
    for key, value in weights().items():
        assert model.state_dict()[key].shape == value.shape


@pytest.mark.parametrize("content, options, words", CHECKPOINTS)
def test_load_model_refuses_checkpoints(tmp_path, content, options, words):
    file = tmp_path / "weights.pth"
    file.write_bytes(content())
    refuses(words, load_model, NAME, checkpoint=file, **SMALL | options)


def test_load_model_refuses_a_checkpoint_that_does_not_exist(tmp_path):
    refuses("no checkpoint", load_model, NAME, checkpoint=tmp_path / "none.pth", **SMALL)


def test_load_model_reads_the_papers_arrays(tmp_path):
    """Google's .npz opens with its head. Another depth and pickled objects are refused."""
    name, small = "vit_tiny_patch16_224", dict(img_size=32, embed_dim=48, depth=2, num_heads=2)
    model = timm.create_model(name, num_classes=5, **small)
    state = {key: value.numpy() for key, value in model.state_dict().items()}
    renamed = {
        "norm1": "LayerNorm_0",
        "norm2": "LayerNorm_2",
        "fc1": "MlpBlock_3/Dense_0",
        "fc2": "MlpBlock_3/Dense_1",
    }
    arrays = {
        "cls": state["cls_token"],
        "Transformer/posembed_input/pos_embedding": state["pos_embed"],
        "embedding/kernel": state["patch_embed.proj.weight"].transpose(2, 3, 1, 0),
        "embedding/bias": state["patch_embed.proj.bias"],
        "head/kernel": state["head.weight"].T,
        "head/bias": state["head.bias"],
        "Transformer/encoder_norm/scale": state["norm.weight"],
        "Transformer/encoder_norm/bias": state["norm.bias"],
    }
    for layer in range(2):
        block = f"Transformer/encoderblock_{layer}/"
        attention = f"{block}MultiHeadDotProductAttention_1/"
        for kind in ("weight", "bias"):
            leaf = "kernel" if kind == "weight" else "bias"
            shape = (48, 2, 24) if kind == "weight" else (2, 24)
            qkv = np.split(state[f"blocks.{layer}.attn.qkv.{kind}"], 3)
            for part, value in zip(("query", "key", "value"), qkv, strict=True):
                arrays[f"{attention}{part}/{leaf}"] = value.T.reshape(shape)
            out = state[f"blocks.{layer}.attn.proj.{kind}"]
            arrays[f"{attention}out/{leaf}"] = out.T.reshape(2, 24, 48) if kind == "weight" else out
            for ours, theirs in renamed.items():
                value = state[f"blocks.{layer}.{'mlp.' if 'fc' in ours else ''}{ours}.{kind}"]
                scale = "scale" if kind == "weight" and "norm" in ours else leaf
                arrays[f"{block}{theirs}/{scale}"] = value.T
    np.savez(tmp_path / "vit.npz", **arrays)
    opened = load_model(name, checkpoint=tmp_path / "vit.npz", **small)
    assert all(
        torch.equal(value, opened.state_dict()[key]) for key, value in model.state_dict().items()
    )
    for wrong, word in (
        ({"depth": 1}, "has 2 layers"),
        ({"init_values": 1e-5}, "it lacks blocks.0.ls1.gamma"),
    ):
        refuses(word, load_model, name, checkpoint=tmp_path / "vit.npz", **small | wrong)
    np.savez(tmp_path / "vit.npz", **arrays | {"pre_logits/kernel": np.zeros((48, 48), np.float32)})
    assert load_model(name, checkpoint=tmp_path / "vit.npz", **small).num_classes == 0
    np.savez(tmp_path / "vit.npz", code=np.array([print], dtype=object))
    refuses("vit.npz", load_model, name, checkpoint=tmp_path / "vit.npz", **small)


def test_load_model_prefers_averaged_weights(tmp_path, capsys):
    small = dict(img_size=32, embed_dim=48, depth=1, num_heads=2, num_classes=3)
    a, b = (timm.create_model("vit_tiny_patch16_224", **small).state_dict() for _ in range(2))
    for plain, averaged in (("state_dict", "state_dict_ema"), ("model", "model_ema")):
        torch.save({plain: a, averaged: b}, tmp_path / "weights.pth")
        opened = load_model("vit_tiny_patch16_224", checkpoint=tmp_path / "weights.pth", **small)
        assert (
            torch.equal(opened.pos_embed, b["pos_embed"])
            and f"Took {averaged}" in capsys.readouterr().err
        )


def test_load_model_names_the_base_of_a_lora_adapter(tmp_path):
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": "google/vit-base"})
    )
    refuses("LoRA adapter of google/vit-base.*merge_and_unload", load_model, tmp_path)


def test_load_model_reports_guessed_preprocessing(tmp_path, capsys):
    """Without preprocessing in config.json the architecture's is used. A model without any gets a guess."""
    model = timm.create_model("test_vit")
    timm.models.save_for_hf(model, tmp_path, safe_serialization=True)
    config = json.loads((tmp_path / "config.json").read_text())
    load_model(tmp_path)
    assert not capsys.readouterr().err
    (tmp_path / "config.json").write_text(
        json.dumps({k: config[k] for k in ("architecture", "num_classes")})
    )
    opened, notes = load_model(tmp_path), []
    assert data_config(opened) == data_config(model) and data_config(opened)["crop_pct"] != 0.875
    preprocess(opened, samples()["chelsea"], on_note=notes.append)
    assert (
        "has no input_size, interpolation, crop_pct, mean, std" in capsys.readouterr().err
        and len(notes) == 1
    )
    undeclared = timm.models.VisionTransformer(depth=1)
    preprocess(undeclared, samples()["chelsea"], on_note=notes.append)
    assert "is a guess" in notes[1]
    refuses("it declares no input", preprocess, nn.Identity(), samples()["chelsea"])


def test_load_reads_images_of_any_extension(tmp_path):
    kinds = {
        "cat": (".jpg", "JPEG"),
        "dog": (".pgm", "PPM"),
        "owl": (".jfif", "JPEG"),
        "pig": ("", "PNG"),
    }
    for name, (ending, kind) in kinds.items():
        write(tmp_path, {f"{name}/{i}{ending}": encoded(i, kind) for i in range(12)})
    assert load(tmp_path, "whole").class_names == tuple(kinds)
    write(tmp_path, {"yak/0.txt": b"text"})
    refuses("yak", load, tmp_path)


def test_reports_show_values_without_percent_sign():
    """A regression, three values and one probability, in the caption, the numbers and the title of reports."""
    images = [("cat", samples()["chelsea"])]

    def reports(count, **attributes):
        torch.manual_seed(0)
        model = timm.create_model("test_vit", num_classes=count).eval()
        torch.nn.init.constant_(model.head.bias, 62.0)
        for name, value in attributes.items():
            setattr(model, name, value)
        (explanation,) = report.explain(model, images, names=["rollout"])
        return report.inspect(model, images), explanation

    inspection, explanation = reports(1)
    assert float(inspection.pictures[0].caption) > 50 and "%" not in explanation.title
    assert (
        explanation.title.startswith(f"Why {inspection.pictures[0].caption}?")
        and explanation.value > 50
    )
    assert inspection.to_dict()["images"][0]["top5"][0]["value"] > 50
    inspection, explanation = reports(3, outputs="value")
    assert (
        "%" not in inspection.pictures[0].caption + explanation.title and "(6" in explanation.title
    )
    inspection, explanation = reports(1, outputs="independent")
    assert inspection.pictures[0].caption == "0 100%" and "(100.0%)" in explanation.title


def test_export_writes_the_kind_of_outputs(tmp_path):
    """`outputs` of a recipe decides it, not a sigmoid loss."""
    plan, logits = recipe("digits").tiny(), torch.linspace(-2, 2, 10)[None]
    for outputs, expected in (("independent", logits.sigmoid()), ("", logits.softmax(-1))):
        plan = replace(plan, loss="sigmoid", outputs=outputs)
        export(plan.build(), tmp_path / f"m{outputs}", plan, list("0123456789"))
        assert torch.equal(scores(load_model(tmp_path / f"m{outputs}"), logits), expected)


def test_starting_from_replaces_every_head(tmp_path):
    """Fine-tuning replaces the head of a folder without `pretrained_cfg`, and both heads of a distilled model."""
    for name in ("deit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"):
        folder = tmp_path / name
        folder.mkdir()
        save_file(timm.create_model(name).state_dict(), folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"architecture": name}))
        model = starting_from(recipe("finetune-small").override("num_classes=5"), folder).build()
        heads = model.get_classifier()
        assert all(h.out_features == 5 for h in (heads if isinstance(heads, tuple) else (heads,)))


@pytest.mark.slow
def test_fit_resumes_bit_for_bit_after_a_killed_worker(tmp_path):
    script = [sys.executable, killed_worker.__file__, str(tmp_path / "killed")]
    ended = subprocess.run(script, capture_output=True, text=True, timeout=240)
    assert ended.returncode and "processes that read images ended" in ended.stderr
    assert [*(tmp_path / "killed" / "checkpoints").iterdir()]
    (tmp_path / "spared").touch()
    resumed, whole = (killed_worker.weights(tmp_path / name) for name in ("killed", "whole"))
    assert all(map(torch.equal, resumed, whole))
