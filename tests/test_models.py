"""Opening models in timm's layout, their names and preprocessing, and errors for everything else."""

import copy
import json
import pickle
import re
import shutil

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from support import NOISE, RAMP, RED, assert_close, flat, refuses, saved
from timm.data import create_transform, resolve_model_data_config
from timm.models import save_for_hf
from torch import nn

from vitlens import capture, load_model
from vitlens.images import ImageError, samples
from vitlens.models import (
    class_count,
    label_names,
    output_kind,
    preprocess,
    preprocessing_warning,
    restore,
    title,
    top_classes,
    weights_digest,
)
from vitlens.names import suggestion


@pytest.fixture
def folder(tmp_path):
    """A model in timm's hub layout."""
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=48, depth=2, num_classes=3
    )
    arguments = dict(img_size=32, patch_size=8, embed_dim=48, depth=2)
    config = {"label_names": ["cat", "dog", "owl"]}
    save_for_hf(model, tmp_path, model_config=config, model_args=arguments, safe_serialization=True)
    return tmp_path


def test_load_model_opens_the_layout_of_timm(folder):
    model = load_model(folder)
    reference = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    assert not model.training and label_names(model) == ["cat", "dog", "owl"]
    x = torch.randn(1, 3, 32, 32)
    assert torch.equal(model(x), reference(x))
    with capture(model) as attn:
        model(x)
    assert (attn.grid.rows, len(attn)) == (4, 2)
    assert load_model(str(folder / "config.json")).num_classes == 3


def rewritten(folder, file, content):
    (folder / file).write_bytes(content)
    return folder


def cut_in_half(folder):
    good = (folder / "model.safetensors").read_bytes()
    return rewritten(folder, "model.safetensors", good[: len(good) // 2])


def with_other_weights(folder):
    save_file({"cls_token": torch.zeros(1, 1, 7)}, folder / "model.safetensors")
    return folder


def pickled(folder):
    (folder / "model.safetensors").unlink()
    return rewritten(folder, "pytorch_model.bin", pickle.dumps({"boom": 1}))


def with_config(folder, text):
    return rewritten(folder, "config.json", text.encode())


def with_settings(folder, **settings):
    known = json.loads((folder / "config.json").read_text())
    return with_config(folder, json.dumps(known | settings))


def weights_alone(folder):
    return (folder / "model.safetensors").rename(folder / "vit_small_patch16_224.pth")


LETTERS = {"a": "cat", "b": "dog", "c": "owl"}
FOLDERS = (
    (lambda folder: folder / "empty", {}, "no file or folder"),
    # weights
    (lambda folder: rewritten(folder, "model.safetensors", b""), {}, "SafetensorError"),
    (cut_in_half, {}, "cannot be opened"),
    (
        lambda folder: rewritten(folder, "model.safetensors", b"garbage" * 100),
        {},
        "cannot be opened",
    ),
    (with_other_weights, {}, "cannot be opened"),
    (pickled, {}, r"no model\.safetensors.*checkpoint="),
    (weights_alone, {}, "vit_small_patch16_224 with checkpoint="),
    # config.json
    (lambda folder: with_config(folder, "{"), {}, "configuration"),
    (lambda folder: with_config(folder, "[]"), {}, "configuration"),
    (lambda folder: with_config(folder, "{}"), {}, "configuration"),
    (lambda folder: with_config(folder, '{"architecture": 5}'), {}, "cannot"),
    (
        lambda folder: with_config(folder, '{"architecture": "vit_enormous"}'),
        {},
        "cannot be opened",
    ),
    (lambda folder: with_settings(folder, label_names=["cat"]), {}, "list of 3 names"),
    (lambda folder: with_settings(folder, label_names=LETTERS), {}, "list of 3 names"),
    (lambda folder: with_settings(folder, outputs="many"), {}, "outputs .* one of classes"),
    (lambda folder: folder, {"outputs": "many"}, "outputs .* one of"),
)
"""A change of the folder of a model, which returns the name to open, options, and decisive words."""


@pytest.mark.parametrize("change, options, words", FOLDERS)
def test_load_model_refuses_folders(folder, change, options, words):
    refuses(words, load_model, change(folder), **options)


def test_load_model_sorts_numbered_label_names(folder):
    with_settings(folder, label_names={"2": "owl", "0": "cat", "1": "dog"})
    assert label_names(load_model(folder)) == ["cat", "dog", "owl"]


MISSPELT = {"pretrained": False, "embed_dimension": 3}
HUB = "hf-hub:timm/vit_tiny_patch16_224.augreg_in21k"
NAMES = (
    ("vit_tiny_patch16_223", {}, ValueError, "Did you mean .*vit_tiny_patch16_224"),
    (HUB, {}, ValueError, r"no file or folder"),
    (HUB, {}, ValueError, r"Did you mean vit_tiny_patch16_224.augreg_in21k\?"),
    ("", {}, ValueError, "no file or folder"),
    ("./nowhere/at/all", {}, ValueError, "no file or folder"),
    ("vit_base_patch16_xp_224", {"depth": 1}, ValueError, "No pretrained weights"),
    ("vit_tiny_patch16_224", MISSPELT, ValueError, "embed_dimension"),
    ("vit_tiny_patch16_224", {}, ConnectionError, "Check the network"),
)
"""A name, options, the error and decisive words."""


@pytest.mark.parametrize("name, options, error, words", NAMES)
def test_load_model_refuses_names(tmp_path, monkeypatch, name, options, error, words):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # no minute of retries
    refuses(words, load_model, name, error=error, **options)


def test_data_config_needs_a_number_for_each_channel(folder):
    model = load_model(folder)
    model.pretrained_cfg["std"] = [0.5, 0.5]
    refuses(
        r"3 numbers as the std of .*got \[0\.5, 0\.5\]",
        preprocess,
        model,
        samples()["chelsea"],
        error=ImageError,
    )
    model.pretrained_cfg["std"] = [0.5]
    assert preprocess(model, samples()["chelsea"]).shape[1] == 3


def test_load_model_describes_short_label_names(folder):
    descriptions = {"n1": "cat, puss", "n3": "owl"}
    with_settings(folder, label_names=["n1", "n2", "n3"], label_descriptions=descriptions)
    assert label_names(load_model(folder)) == ["cat, puss", "n2", "owl"]


def test_label_names_come_from_the_folder_or_imagenet(folder):
    assert label_names(load_model(folder)) == ["cat", "dog", "owl"]
    imagenet = label_names(timm.create_model("vit_tiny_patch16_224", depth=1))
    assert len(imagenet) == 1000 and re.match("tench", imagenet[0])
    assert label_names(timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=7)) is None
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    ((best, *_),) = top_classes(load_model(folder), logits)
    assert best[0] == "dog" and best[1] == pytest.approx(logits.softmax(-1).max().item())


def test_label_names_fit_the_head(folder):
    for classes in (0, 7):
        model = load_model(folder, num_classes=classes)
        assert model.num_classes == classes and label_names(model) is None
    model = load_model(folder, num_classes=3)
    assert label_names(torch.nn.DataParallel(model)) == ["cat", "dog", "owl"]
    model.reset_classifier(2)
    assert label_names(model) is None
    assert [name for name, _ in top_classes(model, torch.tensor([[0.0, 1.0]]))[0]] == ["1", "0"]


def test_weights_digest_depends_on_names_and_values(folder):
    first, second = load_model(folder), load_model(folder)
    assert weights_digest(first) == weights_digest(nn.DataParallel(second))
    assert re.fullmatch("[0-9a-f]{12}", weights_digest(first))
    with torch.no_grad():
        second.head.bias[0] += 1e-6
    assert weights_digest(first) != weights_digest(second)
    assert weights_digest(first) != weights_digest(load_model(folder).bfloat16())
    second.head = nn.Sequential(load_model(folder).head)
    assert weights_digest(first) != weights_digest(second)


def test_class_count_of_a_custom_head(folder):
    """The number of classes is that of the head, not the original `num_classes`."""
    imagenet = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=32).eval()
    x = torch.randn(1, 3, 32, 32)
    for head in (
        torch.nn.Linear(192, 3),
        torch.nn.Sequential(torch.nn.Linear(192, 1000), torch.nn.GELU(), torch.nn.Linear(1000, 3)),
    ):
        imagenet.head = head
        assert class_count(imagenet) == 3 and label_names(imagenet) is None
    imagenet.head = torch.nn.Linear(192, 3)
    assert sorted(name for name, _ in top_classes(imagenet, imagenet(x))[0]) == ["0", "1", "2"]
    imagenet.label_names = ["cat", "dog", "owl"]
    assert sorted(name for name, _ in top_classes(imagenet, imagenet(x))[0]) == [
        "cat",
        "dog",
        "owl",
    ]
    for head in (
        torch.nn.Identity(),
        torch.nn.Sequential(torch.nn.Dropout(0.1), torch.nn.Identity()),
    ):
        imagenet.head = head
        assert class_count(imagenet) == 0
        refuses("has no classifier head", top_classes, imagenet, imagenet(x))
    model = load_model(folder, num_classes=0)
    model.head = torch.nn.Linear(48, 2)
    assert class_count(model) == 2 and len(top_classes(model, model(x))[0]) == 2
    distilled = timm.create_model("deit_tiny_distilled_patch16_224", depth=1, num_classes=4)
    assert class_count(distilled) == 4
    distilled.reset_classifier(0)
    assert class_count(distilled) == 0


def model_with(**config):
    """A stand-in for a timm model, with a `pretrained_cfg` and a number of channels."""
    model = nn.Identity()
    model.pretrained_cfg = {"input_size": (3, 64, 64), **config}
    return model


CONFIGS = {
    "timm's vit": timm.get_pretrained_cfg("vit_tiny_patch16_224.augreg_in21k_ft_in1k").to_dict(),
    "timm's deit": timm.get_pretrained_cfg("deit_tiny_patch16_224.fb_in1k").to_dict(),
    "timm's resnet": timm.get_pretrained_cfg("resnet18.tv_in1k").to_dict(),
    "squash": {"crop_mode": "squash", "crop_pct": 0.9},
    "border": {"crop_mode": "border", "crop_pct": 1.0, "mean": (0.4, 0.5, 0.6)},
    "not square": {"input_size": (3, 48, 96), "interpolation": "bilinear", "crop_pct": 0.8},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_preprocess_equals_the_transform_of_timm(name):
    model = model_with(**CONFIGS[name])
    transform = create_transform(**resolve_model_data_config(model), is_training=False)
    photographs = [
        Image.fromarray(NOISE.integers(0, 256, (h, w, 3), np.uint8))
        for h, w in ((70, 90), (300, 201))
    ]
    batch = preprocess(model, photographs)
    assert batch.dtype == torch.float32
    assert torch.equal(batch, torch.stack([transform(photograph) for photograph in photographs]))
    assert torch.equal(preprocess(model, saved(photographs[1], "PNG")), batch[1:])


def test_preprocess_whole_resizes_without_a_crop():
    model = timm.create_model("vit_tiny_patch16_224", embed_dim=48, depth=1)
    picture = samples()["chelsea"]
    squeezed = np.asarray(picture.resize((80, 48), Image.Resampling.BICUBIC)) / 127.5 - 1
    batch = preprocess(model, picture, size=(48, 80), whole=True)
    np.testing.assert_allclose(batch[0].permute(1, 2, 0), squeezed, atol=1e-5)


def test_preprocess_without_a_configuration_uses_defaults_of_timm():
    transform = create_transform((3, 224, 224), interpolation="bicubic", crop_pct=0.875)
    model = timm.models.VisionTransformer(depth=1)
    with pytest.warns(UserWarning, match="its preprocessing is a guess"):
        batch = preprocess(model, RAMP)
    assert torch.equal(batch[0], transform(Image.fromarray(RAMP)))


def test_preprocess_size_covers_and_crops():
    """Linear ramps stay linear: output pixel i shows the source at (i + cut + ½) · scale − ½."""
    y, x = np.mgrid[:160, :240]
    ramps = np.dstack([x, y, x * 0]).astype(np.uint8)
    seen = restore(model := model_with(crop_pct=0.8), preprocess(model, ramps, size=(40, 80)))[
        0
    ].astype(float)
    assert seen.shape == (40, 80, 3)
    # covers 40/0.8 × 80/0.8 = 50 × 100 at scale 240/100, so 160/2.4 = 66.7 rows; 67 − 40 and 100 − 80 are cut off
    assert_close(seen[..., 0], np.tile((np.arange(80) + 10 + 0.5) * 2.4 - 0.5, (40, 1)), 1)
    assert_close(
        seen[..., 1], np.tile((np.arange(40) + 14 + 0.5)[:, None] * 160 / 67 - 0.5, (1, 80)), 1
    )


def test_restore_inverts_preprocess():
    levels = np.arange(64 * 64 * 3, dtype=np.int64).reshape(64, 64, 3).astype(np.uint8)
    for mean, std in (((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), ((0,) * 3, (1,) * 3)):
        model = model_with(crop_pct=1.0, mean=mean, std=std)
        for dtype in (torch.float32, torch.float64):
            restored = restore(model, preprocess(model, levels).to(dtype).requires_grad_())
            assert restored.shape == (1, 64, 64, 3) and restored.dtype == np.uint8
            assert_close(restored[0].astype(int), levels, 1)
    assert restore(model, torch.full((2, 3, 5, 7), 99.0)).min() == 255


def test_preprocess_converts_to_gray_for_one_channel():
    model = timm.create_model("test_vit", in_chans=1)
    model.in_chans = 1  # timm writes this down since 1.0.25
    config = resolve_model_data_config(model)
    mean, std = np.mean(config["mean"]), np.mean(config["std"])
    batch = preprocess(model, [np.full((200, 300), 99, np.uint8), flat((200, 100, 50), (200, 200))])
    assert batch.shape == (2, 1, *config["input_size"][1:])
    luma = 0.299 * 200 + 0.587 * 100 + 0.114 * 50
    for picture, level in zip(batch, (99, luma), strict=True):
        assert_close(
            picture.numpy(),
            np.full(picture.shape, (level / 255 - mean) / std),
            0.5 / 255 / std + 1e-6,
        )
    assert_close(restore(model, batch)[0].astype(int), np.full((*batch.shape[2:], 3), 99), 1)
    mnist = model_with(input_size=(1, 28, 28), mean=(0.13,), std=(0.31,), crop_pct=1.0)
    assert_close(
        preprocess(mnist, np.zeros((28, 28))).numpy(), np.full((1, 1, 28, 28), -0.13 / 0.31), 1e-6
    )


IMAGES = (
    (lambda: preprocess(model_with(), flat(RED, (1001, 10))), "1001 × 10"),
    (lambda: preprocess(model_with(input_size=(4, 8, 8)), RAMP), "4"),
    (lambda: restore(model_with(), torch.zeros(1, 1, 8, 8)), r"\(1, 1, 8, 8\)"),
)
"""A call that raises ImageError, and decisive words."""


@pytest.mark.parametrize("call, words", IMAGES)
def test_preprocess_refuses_images(call, words):
    refuses(words, call, error=ImageError)


def test_load_model_opens_the_bundled_model_by_default(folder, monkeypatch):
    monkeypatch.setattr("vitlens.models.opening.BUNDLED_FOLDERS", [folder / "none", folder])
    assert label_names(load_model()) == ["cat", "dog", "owl"]
    monkeypatch.setattr("vitlens.models.opening.BUNDLED_FOLDERS", [folder / "none"])
    refuses("Install vitlens again, or name a model", load_model)


def test_load_model_reads_the_named_weights_only(folder):
    before = load_model(folder)
    state = {name: torch.zeros_like(value) for name, value in before.state_dict().items()}
    save_file(state, folder / "another.safetensors")
    torch.save(state, folder / "pytorch_model.bin")
    assert (
        torch.equal(load_model(folder).head.weight, before.head.weight) and before.head.weight.any()
    )


def test_load_model_reads_a_folder_with_a_hash_or_refuses_it(folder, tmp_path_factory):
    place = tmp_path_factory.mktemp("places")
    shutil.copytree(folder, place / "run#2")
    shutil.copytree(folder, place / "run")
    weights = load_model(folder).state_dict()
    save_file(
        {name: torch.zeros_like(value) for name, value in weights.items()},
        place / "run" / "model.safetensors",
    )
    try:
        assert torch.equal(load_model(place / "run#2").head.weight, weights["head.weight"])
    except ValueError as error:  # timm before 1.0.30
        assert "opens no folder with # or ? in its path" in str(error)


def test_title_names_changed_sizes():
    for name in (
        "vit_tiny_patch16_224",
        "deit_tiny_distilled_patch16_224",
        "vit_base_patch16_dinov3",
    ):
        assert title(timm.create_model(name, depth=1)) == name
    small = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=64, patch_size=8)
    assert title(small) == "vit_tiny_patch16_224, patch 8, 64 px"
    oblong = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=(96, 160))
    assert title(oblong) == "vit_tiny_patch16_224, 96 × 160 px"


def test_title_is_the_name_by_which_a_model_was_opened(folder, tmp_path):
    run = shutil.copytree(folder, tmp_path / "digits" / "model")
    checkpoint = tmp_path / "mine.pth"
    torch.save(timm.create_model("test_vit").state_dict(), checkpoint)
    assert (
        title(load_model(folder / "config.json")) == folder.name
        and title(load_model(run)) == "digits/model"
    )
    assert title(load_model("test_vit", checkpoint=checkpoint)) == "test_vit, mine.pth"
    assert (
        title(load_model("vit_small_patch16_224", pretrained=False, img_size=64))
        == "vit_small_patch16_224, 64 px"
    )


def test_facts_about_a_model_survive_copies_and_wrappers(folder, tmp_path):
    model = load_model(folder, outputs="independent")
    torch.save(model, tmp_path / "whole.pt")
    saved_whole = torch.load(tmp_path / "whole.pt", weights_only=False)
    wrapped = nn.DataParallel(model)
    inside = nn.Sequential(model, nn.Identity())
    for same in (copy.deepcopy(model), saved_whole, wrapped, inside):
        assert label_names(same, 3) == ["cat", "dog", "owl"]
        assert output_kind(same) == "independent" and preprocessing_warning(same) == ""
    assert title(saved_whole) == title(copy.deepcopy(model)) == folder.name
    assert "vitlens_card" not in model.state_dict()


CATS = ["bear cat", "polecat", "tabby cat", "catamount", "Egyptian cat"]


@pytest.mark.parametrize(
    ("word", "names", "expected"),
    [
        ("cat", CATS, "bear cat, tabby cat, Egyptian cat, catamount"),
        ("taby", ["tabby", "dog"], "tabby"),
        ("pole", CATS, "polecat"),
        ("deit_tiny", ["rdnet_tiny", "deit_tiny_patch16_224"], "deit_tiny_patch16_224"),
        ("gradcam", ["rollout", "grad_cam"], "grad_cam"),
        ("finetune-smal", ["finetune-pets", "finetune-small"], "finetune-small"),
        ("-", CATS, None),
        ("xylophone", CATS, None),
    ],
)
def test_suggestion_prefers_whole_words_then_beginnings(word, names, expected):
    assert suggestion(word, names) == ("" if expected is None else f" Did you mean {expected}?")


def test_preprocess_notes_crops_of_more_than_half(folder):
    """The noted share equals the share of the distinct columns of an image in the model's input."""
    model, notes = load_model(folder), []
    rows, cols = 40, 320
    ramp = np.broadcast_to(
        np.linspace(0, 255, cols, dtype=np.float32)[None, :, None] / 255, (rows, cols, 3)
    ).copy()
    seen = restore(model, preprocess(model, ramp, size=(32, 32), on_note=notes.append))[
        0, 16, :, 0
    ].astype(float)
    columns = (seen[24] - seen[8]) / 255 * (cols - 1) / 16 * 32
    measured = columns * columns / (rows * cols)
    (note,) = notes
    assert "An image of 320 × 40 pixels is cropped" in note
    assert float(re.search(r"middle (\d+)%", note)[1]) / 100 == pytest.approx(measured, abs=0.01)
    preprocess(model, [ramp[:, :60], ramp], whole=True, on_note=notes.append)
    preprocess(model, ramp[:, :60], on_note=notes.append)
    assert len(notes) == 1


def test_preprocess_equals_the_transform_of_torchvision(monkeypatch):
    import torchvision

    weights = (
        torchvision.models.ViT_B_16_Weights.IMAGENET1K_SWAG_LINEAR_V1
    )  # bicubic, where the usual is bilinear
    small = torchvision.models.VisionTransformer(224, 16, 1, 2, 32, 64)
    monkeypatch.setattr(torchvision.models, "get_model", lambda *_, **__: small)
    model, image = (
        load_model("torchvision:vit_b_16/IMAGENET1K_SWAG_LINEAR_V1"),
        samples()["chelsea"],
    )
    torch.testing.assert_close(
        preprocess(model, image)[0], weights.transforms()(image), atol=1e-4, rtol=0
    )
    assert not any(isinstance(part, type(weights.transforms())) for part in model.modules())
