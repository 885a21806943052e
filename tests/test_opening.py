"""Models of other libraries by name and from folders: names, weights and refusals."""

import json

import pytest
import timm
import torch
from safetensors.torch import save_file
from support import refuses

from experiments.support import small
from vitlens import capture
from vitlens.models import class_count, label_names, load_model, title
from vitlens.recorder.forward import run


def test_load_model_opens_names_of_other_libraries(tmp_path):
    model = small("ViTForImageClassification")
    assert (
        class_count(model) == 7
        and label_names(model) is None
        and title(model) == "ViTForImageClassification"
    )
    assert class_count(small("ViTForImageClassification", num_labels=0)) == 0
    model.config.id2label = dict(enumerate("abcdefg"))
    assert label_names(model) == list("abcdefg")
    model.save_pretrained(tmp_path / "mine")
    opened = load_model(tmp_path / "mine")
    assert (
        label_names(opened) == list("abcdefg") and title(opened) == "mine" and not opened.training
    )
    assert not torch.equal(
        load_model(tmp_path / "mine", pretrained=False).classifier.weight, model.classifier.weight
    )


def test_load_model_drops_poolers_without_weights(tmp_path):
    from safetensors.torch import load_file

    small("ViTModel").save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    save_file(
        {k: v for k, v in state.items() if "pooler" not in k},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    model = load_model(tmp_path)
    assert model.pooler is None
    with torch.no_grad():
        images = torch.randn(1, 3, 32, 32)
        assert torch.equal(run(model, images), model(images).last_hidden_state[:, 0])
    last = sorted(k for k in state if "pooler" not in k)[-1]
    save_file(
        {k: v for k, v in state.items() if k != last},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    refuses("do not fit its config.json: 1 are missing", load_model, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    refuses("has no model.safetensors", load_model, tmp_path)


def edited(file, **settings):
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def test_load_model_refuses_weights_of_more_layers(tmp_path):
    """Weights of a head that the class lacks are left out."""
    for name, opened in (
        ("ViTForImageClassification", "ViTForImageClassification"),
        ("ViTForImageClassification", "ViTModel"),
        ("CLIPVisionModel", "CLIPVisionModel"),
    ):
        small(name).save_pretrained(tmp_path)
        edited(tmp_path / "config.json", architectures=[opened])
        assert type(load_model(tmp_path)).__name__ == opened
        edited(tmp_path / "config.json", num_hidden_layers=1)
        refuses(r"have no place, such as .*layers\.1\.", load_model, tmp_path)


def test_load_model_reads_weights_in_several_files(tmp_path):
    model = small("Dinov2Model")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (
        len([*tmp_path.glob("model-*.safetensors")]) > 2
        and not (tmp_path / "model.safetensors").exists()
    )
    for where in (tmp_path, tmp_path / "model.safetensors.index.json"):
        opened = load_model(where).state_dict()
        assert opened.keys() == model.state_dict().keys()
        assert all(torch.equal(opened[key], value) for key, value in model.state_dict().items())
    next(tmp_path.glob("model-00002*")).unlink()
    refuses("its part .* is missing", load_model, tmp_path)


def test_load_model_opens_mae_without_mask_and_decoder(tmp_path):
    import transformers

    config = transformers.ViTMAEConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
        decoder_hidden_size=32,
        decoder_num_hidden_layers=1,
        decoder_num_attention_heads=2,
        decoder_intermediate_size=32,
    )
    transformers.ViTMAEForPreTraining(config).save_pretrained(tmp_path)
    model = load_model(tmp_path)
    with torch.no_grad(), capture(model) as attn:
        run(model, torch.randn(1, 3, 32, 32))
    assert type(model).__name__ == "ViTMAEModel" and attn.grid.patches == 16


@pytest.mark.parametrize(
    "name, extra",
    [("hf:a/b", "transformers"), ("open_clip:ViT-B-32/openai", "openclip")],
)
def test_load_model_names_the_missing_extra(monkeypatch, name, extra):
    """Without a library, the message names the extra that installs it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refuses(rf'pip install "vitlens\[{extra}\]"', load_model, name, error=ModuleNotFoundError)


def cut(folder, end):
    """Cut the weights of a folder off."""
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:end])
    return folder


def configured(folder, **settings):
    edited(folder / "config.json", **settings)
    return folder


def processed(folder, text):
    """Add a configuration of preprocessing."""
    (folder / "preprocessor_config.json").write_text(text)
    return folder


def bert(folder):
    import transformers

    sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    transformers.BertModel(transformers.BertConfig(**sizes)).save_pretrained(folder / "bert")
    return folder / "bert"


def of_timm(folder):
    model = timm.create_model("test_vit")
    timm.models.save_for_hf(model, folder / "timm", safe_serialization=True)
    return f"hf:{folder / 'timm'}"


VIT_PROCESSOR = '{"image_processor_type": "ViTImageProcessor", '
FOLDERS = (
    # weights
    (lambda folder: cut(folder, 0), {}, "cannot be read: it is empty"),
    (lambda folder: cut(folder, 3000), {}, "ends after 3,000 bytes"),
    (lambda folder: cut(folder, -300), {}, "ends after .* bytes"),
    # settings
    (lambda folder: configured(folder, image_size="64"), {}, "/mine"),
    (lambda folder: configured(folder, hidden_act="none"), {}, "/mine"),
    (lambda folder: configured(folder, architectures=5), {}, "/mine"),
    (lambda folder: configured(folder, hidden_size=64), {}, "/mine"),
    (lambda folder: f"hf:{folder}", {"num_labels": 3}, r"shape \(7,\), and .* \(3,\)"),
    (lambda folder: f"hf:{folder}", {"nonsense": 1}, "setting nonsense"),
    # preprocessing
    (lambda folder: processed(folder, "{broken"), {}, "/mine"),
    (lambda folder: processed(folder, VIT_PROCESSOR + '"size": "big"}'), {}, "/mine"),
    (lambda folder: processed(folder, VIT_PROCESSOR + '"image_mean": "x"}'), {}, "/mine"),
    # models of other kinds
    (bert, {}, "BertModel.*Dinov2Model"),
    (of_timm, {}, "does not support the class"),
)
"""A change of the folder of a model, which returns the name to open, options, and decisive words."""


@pytest.mark.parametrize("change, options, words", FOLDERS)
def test_opening_refuses_folders(tmp_path, change, options, words):
    folder = tmp_path / "mine"
    small("ViTForImageClassification").save_pretrained(folder)
    refuses(words, load_model, change(folder), **options)


NAMES = (
    ("torchvision:vit_b_32", {"pretrained": False, "nonsense": 1}, ValueError, "nonsense"),
    ("torchvision:vit_b_16/NONE", {}, ValueError, "NONE"),
    ("open_clip:ViT-B-32", {"pretrained": False, "nonsense": 1}, ValueError, "nonsense"),
    ("open_clip:none", {}, ValueError, "open_clip has no architecture"),
    ("open_clip:ViT-B-32", {}, ValueError, "ViT-B-32/openai"),
    # without a network
    ("hf:", {}, (ValueError, ConnectionError), "cannot be opened"),
    ("hf:facebook/dinov2-small", {}, ConnectionError, "dinov2-small .*Check the network"),
    ("open_clip:ViT-B-32/openai", {}, ConnectionError, "ViT-B-32/openai .*Check the network"),
    ("torchvision:vit_b_16", {}, ConnectionError, "torchvision:vit_b_16 .*Check the network"),
)
"""A name, options, the error and decisive words."""


@pytest.mark.parametrize("name, options, error, words", NAMES)
def test_opening_refuses_names(tmp_path, monkeypatch, name, options, error, words):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # no minute of retries
    refuses(words, load_model, name, error=error, **options)
