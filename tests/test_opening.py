"""Models of other libraries by name and from folders: names, weights and refusals."""

import json

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
    refuses("cannot be opened", load_model, tmp_path)


def test_load_model_refuses_folders_and_names_of_libraries(tmp_path, monkeypatch):
    import transformers

    def refused(name, word, error=ValueError, **kwargs):
        refuses(word, load_model, name, error=error, **kwargs)

    small("ViTForImageClassification").save_pretrained(tmp_path)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    good, settings = weights.read_bytes(), config.read_text()
    for content in (b"", good[:3000], good[:-300]):
        weights.write_bytes(content)
        refused(tmp_path, "cannot be opened .*header")
    weights.write_bytes(good)
    for changed in (
        {"image_size": "64"},
        {"hidden_act": "none"},
        {"architectures": 5},
        {"hidden_size": 64},
    ):
        edited(config, **changed)
        refused(tmp_path, str(tmp_path))
        config.write_text(settings)
    refused(f"hf:{tmp_path}", "cannot be opened", num_labels=3)
    refused(f"hf:{tmp_path}", "the setting nonsense", nonsense=1)
    for text in (
        "{broken",
        '{"image_processor_type": "ViTImageProcessor", "size": "big"}',
        '{"image_processor_type": "ViTImageProcessor", "image_mean": "x"}',
    ):
        (tmp_path / "preprocessor_config.json").write_text(text)
        refused(tmp_path, str(tmp_path))
    bert = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    transformers.BertModel(bert).save_pretrained(tmp_path / "bert")
    refused(tmp_path / "bert", "BertModel.*Dinov2Model")
    timm.models.save_for_hf(
        timm.create_model("test_vit"), tmp_path / "timm", safe_serialization=True
    )
    refused(f"hf:{tmp_path / 'timm'}", "vitlens does not support the class")
    refused("torchvision:vit_b_32", "nonsense", pretrained=False, nonsense=1)
    refused("torchvision:vit_b_16/NONE", "NONE")
    refused("open_clip:ViT-B-32", "nonsense", pretrained=False, nonsense=1)
    refused("open_clip:none", "open_clip has no weights")
    refused("open_clip:ViT-B-32", "ViT-B-32/openai")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(
        "huggingface_hub.constants.HF_HUB_OFFLINE", True
    )  # avoid a minute of retries
    refused("hf:", "cannot be opened", (ValueError, ConnectionError))
    for name in ("hf:facebook/dinov2-small", "open_clip:ViT-B-32/openai", "torchvision:vit_b_16"):
        refused(name, f"{name} cannot be opened .*Check the network", ConnectionError)


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
    refuses("cannot be opened", load_model, tmp_path)


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


def test_load_model_names_the_missing_extra(monkeypatch):
    """Without a library, the message names the extra that installs it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name, extra in (("hf:a/b", "transformers"), ("open_clip:ViT-B-32/openai", "openclip")):
        refuses(rf'pip install "vitlens\[{extra}\]"', load_model, name, error=ModuleNotFoundError)
