"""Models of other libraries by name and from folders, compared with the same weights in timm."""

import json

import pytest
import timm
import torch
from safetensors.torch import save_file

import vitlens
from experiments.support import small
from vitlens import attention, attribution, capture
from vitlens.models import class_count, label_names, load_model, preprocess, title
from vitlens.recorder.forward import run
from vitlens.recorder.supported import family

BLOCK = {"norm1": "layernorm_before", "norm2": "layernorm_after", "attn.proj": "attention.o_proj",
         "mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2"}  # fmt: skip
STEM = {"cls_token": "embeddings.cls_token", "pos_embed": "embeddings.position_embeddings",
        "dist_token": "embeddings.distillation_token", "patch_embed.proj": "embeddings.patch_embeddings.projection",
        "norm": "layernorm"}  # fmt: skip


def converted(model, name: str, **settings):
    """A model of timm with the same weights in transformers."""
    import transformers

    embed, block = model.patch_embed, model.blocks[0]
    config = dict(
        hidden_size=model.embed_dim, num_hidden_layers=len(model.blocks), num_attention_heads=block.attn.num_heads,
        intermediate_size=block.mlp.fc1.out_features, image_size=embed.img_size[0], patch_size=embed.patch_size[0],
        layer_norm_eps=model.norm.eps, num_labels=max(2, model.num_classes),
    ) | settings  # fmt: skip
    kind = getattr(transformers, name)
    other = kind(kind.config_class(**config)).eval()
    heads = {"head": "classifier" if hasattr(other, "classifier") else "cls_classifier",
             "head_dist": "distillation_classifier"}  # fmt: skip
    dino, state = "Dinov2" in name, {}
    inner = f"{other.base_model_prefix}." if hasattr(other, other.base_model_prefix) else ""
    for key, value in model.state_dict().items():
        parts = key.split(".")
        where, leaf = ".".join(parts[:-1]), parts[-1]
        if parts[0] == "blocks":
            to = f"{inner}{'encoder.layer' if dino else 'layers'}.{parts[1]}."
            part = ".".join(parts[2:-1])
            if part == "attn.qkv":
                for letter, each in zip("qkv", value.chunk(3), strict=True):
                    state[f"{to}attention.{letter}_proj.{leaf}"] = each
            elif part in ("ls1", "ls2"):
                state[f"{to}layer_scale{part[-1]}.lambda1"] = value
            else:
                state[f"{to}{part if dino and part.startswith('norm') else BLOCK[part]}.{leaf}"] = value
        elif where in heads:
            state[f"{heads[where]}.{leaf}"] = value
        elif key in STEM:
            state[inner + STEM[key]] = value
        else:
            state[f"{inner}{STEM[where]}.{leaf}"] = value
    missing, unexpected = other.load_state_dict(state, strict=False)
    assert not unexpected and all("mask_token" in key or "pooler" in key for key in missing)
    return other


SAME = {
    "ViT": ("vit_tiny_patch16_224", {}, "ViTForImageClassification"),
    "DeiT": ("deit_tiny_distilled_patch16_224", {}, "DeiTForImageClassificationWithTeacher"),
    "DINOv2": ("vit_small_patch14_dinov2", dict(num_classes=0), "Dinov2Model"),
}


@pytest.mark.parametrize("kind", SAME)
def test_load_model_gives_equal_maps_in_timm_and_transformers(kind, tmp_path):
    """Maps, statistics and class-specific maps are equal, also after writing and opening the models again."""
    name, settings, other = SAME[kind]
    torch.manual_seed(0)
    size = 56 if kind == "DINOv2" else 64
    model = timm.create_model(name, **dict(embed_dim=64, depth=3, num_heads=2, img_size=size, num_classes=7) | settings)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.eval()
    converted(model, other).save_pretrained(tmp_path)
    theirs = load_model(tmp_path)
    images = torch.randn(2, 3, size, size)
    results = []
    for each in (model, theirs):
        with torch.no_grad(), capture(each) as attn:
            output = run(each, images)
        assert family(each).prefix == family(model).prefix and attn.grid == family(model).grid((size, size))
        numbers = attention.summary(attn, "mean_distance", "entropy", "received")
        results.append([output, *(layer.weights() for layer in attn), attention.rollout(attn), attn.grid.readout,
                      numbers.mean_distance, numbers.entropy, numbers.received])  # fmt: skip
        results[-1] += [vitlens.filters.kernels(each), vitlens.positions.table(each)]
        if class_count(each):
            for method in ("relevance", "gradient_rollout", "legrad", "grad_cam", "balanced_gradients", "occlusion"):
                results[-1].append(attribution.METHODS[method](each, images, [2, 5]))
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-4)


def test_load_model_opens_deit_tiny_in_transformers_layout(real_data, tmp_path):
    """Preprocessing, class names, logits and maps are timm's."""
    from safetensors.torch import load_file

    model = timm.create_model("deit_tiny_patch16_224").eval()
    model.load_state_dict(load_file(real_data / "deit-tiny" / "deit_tiny_patch16_224.safetensors"))
    converted(model, "ViTForImageClassification").save_pretrained(tmp_path)
    processor = {
        "do_center_crop": True, "crop_size": {"height": 224, "width": 224}, "size": {"shortest_edge": 248},
        "resample": 3, "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225],
    }  # fmt: skip
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    theirs = load_model(str(tmp_path))
    assert label_names(theirs) == label_names(model) and class_count(theirs) == 1000
    images = preprocess(model, vitlens.images.samples()["chelsea"])
    difference = preprocess(theirs, vitlens.images.samples()["chelsea"]) - images  # the libraries resize differently
    assert difference.abs().max() < 0.02
    for method in ("relevance", "gradient_rollout", "legrad", "grad_cam"):
        mine, other = (attribution.METHODS[method](each, images) for each in (model, theirs))
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-3)


def test_load_model_opens_names_of_other_libraries(tmp_path):
    model = small("ViTForImageClassification")
    assert class_count(model) == 7 and label_names(model) is None and title(model) == "ViTForImageClassification"
    model.config.id2label = dict(enumerate("abcdefg"))
    assert label_names(model) == list("abcdefg")
    model.save_pretrained(tmp_path / "mine")
    opened = load_model(tmp_path / "mine")
    assert label_names(opened) == list("abcdefg") and title(opened) == "mine" and not opened.training
    assert not torch.equal(load_model(tmp_path / "mine", pretrained=False).classifier.weight, model.classifier.weight)


def test_load_model_drops_poolers_without_weights(tmp_path):
    from safetensors.torch import load_file

    small("ViTModel").save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    save_file({k: v for k, v in state.items() if "pooler" not in k}, tmp_path / "model.safetensors", {"format": "pt"})
    model = load_model(tmp_path)
    assert model.pooler is None
    with torch.no_grad():
        images = torch.randn(1, 3, 32, 32)
        assert torch.equal(run(model, images), model(images).last_hidden_state[:, 0])
    last = sorted(k for k in state if "pooler" not in k)[-1]
    save_file({k: v for k, v in state.items() if k != last}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="do not fit its config.json: 1 are missing"):
        load_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="cannot be opened"):
        load_model(tmp_path)


def test_load_model_refuses_folders_and_names_of_libraries(tmp_path, monkeypatch):
    import transformers

    def refused(name, word, error=ValueError, **kwargs):
        with pytest.raises(error, match=word):
            load_model(name, **kwargs)

    small("ViTForImageClassification").save_pretrained(tmp_path)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    good, settings = weights.read_bytes(), config.read_text()
    for content in (b"", good[:3000], good[:-300]):
        weights.write_bytes(content)
        refused(tmp_path, "cannot be opened .*header")
    weights.write_bytes(good)
    for changed in ({"image_size": "64"}, {"hidden_act": "none"}, {"architectures": 5}, {"hidden_size": 64}):
        edited(config, **changed)
        refused(tmp_path, str(tmp_path))
        config.write_text(settings)
    refused(f"hf:{tmp_path}", "cannot be opened", num_labels=3)
    refused(f"hf:{tmp_path}", "the setting nonsense", nonsense=1)
    for text in ("{broken", '{"image_processor_type": "ViTImageProcessor", "size": "big"}',
                 '{"image_processor_type": "ViTImageProcessor", "image_mean": "x"}'):  # fmt: skip
        (tmp_path / "preprocessor_config.json").write_text(text)
        refused(tmp_path, str(tmp_path))
    bert = transformers.BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    transformers.BertModel(bert).save_pretrained(tmp_path / "bert")
    refused(tmp_path / "bert", "BertModel.*Dinov2Model")
    timm.models.save_for_hf(timm.create_model("test_vit"), tmp_path / "timm", safe_serialization=True)
    refused(f"hf:{tmp_path / 'timm'}", "vitlens does not support the class")
    refused("torchvision:vit_b_32", "nonsense", pretrained=False, nonsense=1)
    refused("torchvision:vit_b_16/NONE", "NONE")
    refused("open_clip:ViT-B-32", "nonsense", pretrained=False, nonsense=1)
    refused("open_clip:none", "open_clip has no weights")
    refused("open_clip:ViT-B-32", "ViT-B-32/openai")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # avoid a minute of retries
    refused("hf:", "cannot be opened", (ValueError, ConnectionError))
    for name in ("hf:facebook/dinov2-small", "open_clip:ViT-B-32/openai", "torchvision:vit_b_16"):
        refused(name, f"{name} cannot be opened .*Check the network", ConnectionError)


def edited(file, **settings):
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def test_load_model_refuses_weights_of_more_layers(tmp_path):
    """Weights of a head that the class lacks are left out."""
    for name, opened in (
        ("ViTForImageClassification", "ViTForImageClassification"), ("ViTForImageClassification", "ViTModel"),
        ("CLIPVisionModel", "CLIPVisionModel"),
    ):  # fmt: skip
        small(name).save_pretrained(tmp_path)
        edited(tmp_path / "config.json", architectures=[opened])
        assert type(load_model(tmp_path)).__name__ == opened
        edited(tmp_path / "config.json", num_hidden_layers=1)
        with pytest.raises(ValueError, match=r"have no place, such as .*layers\.1\."):
            load_model(tmp_path)


def test_load_model_reads_weights_in_several_files(tmp_path):
    model = small("Dinov2Model")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len([*tmp_path.glob("model-*.safetensors")]) > 2 and not (tmp_path / "model.safetensors").exists()
    for where in (tmp_path, tmp_path / "model.safetensors.index.json"):
        opened = load_model(where).state_dict()
        assert opened.keys() == model.state_dict().keys()
        assert all(torch.equal(opened[key], value) for key, value in model.state_dict().items())
    next(tmp_path.glob("model-00002*")).unlink()
    with pytest.raises(ValueError, match="cannot be opened"):
        load_model(tmp_path)


def test_load_model_opens_mae_without_mask_and_decoder(tmp_path):
    import transformers

    config = transformers.ViTMAEConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
                                       image_size=32, patch_size=8, decoder_hidden_size=32, decoder_num_hidden_layers=1,
                                       decoder_num_attention_heads=2, decoder_intermediate_size=32)  # fmt: skip
    transformers.ViTMAEForPreTraining(config).save_pretrained(tmp_path)
    model = load_model(tmp_path)
    with torch.no_grad(), capture(model) as attn:
        run(model, torch.randn(1, 3, 32, 32))
    assert type(model).__name__ == "ViTMAEModel" and attn.grid.patches == 16


def test_load_model_names_the_missing_extra(monkeypatch):
    """Without a library, the message names the extra that installs it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name, extra in (("hf:a/b", "transformers"), ("open_clip:ViT-B-32/openai", "openclip")):
        with pytest.raises(ModuleNotFoundError, match=rf'pip install "vitlens\[{extra}\]"'):
            load_model(name)
