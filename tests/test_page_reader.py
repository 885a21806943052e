"""Models that a page opens from their own files, without Python: compared with PyTorch in Node, and hostile files."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import PIL
import pytest
import timm
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from support import CHECKPOINTS
from timm.models import save_for_hf
from torch import nn

from vitlens import attribution, load_model
from vitlens.models.preprocessing import data_config
from vitlens_explorer import live
from vitlens_explorer.live import known
from vitlens_explorer.live.model_files import KNOWN
from vitlens_explorer.words import WORDS, say

JAVASCRIPT = Path(__file__).parent / "javascript"
BOUND = 1e-4
"""Largest difference from PyTorch, as a share of the largest value."""
SMALL = dict(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, num_classes=5)
HUB = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=3, image_size=32, patch_size=8)
LABELS = {"id2label": {0: "ant", 1: "bee", 2: "cat"}, "label2id": {"ant": 0, "bee": 1, "cat": 2}}
PARTS = ("configs", "processors", "processorOf")
METHODS = sorted(live.LIVE_METHODS)
pytestmark = pytest.mark.skipif(not shutil.which("node"), reason="needs Node.js")


def write_scripts(folder: Path) -> None:
    """Write the worker's scripts and what they need from Python."""
    (folder / "worker.js").write_text(live.worker_script(), encoding="utf-8")
    (folder / "words.json").write_text(json.dumps(WORDS), encoding="utf-8")
    shutil.copy(live.LIVE / "kernels.wasm", folder)


def run_node(folder: Path, *tests: str) -> str:
    """Output of `node --test` with files of tests/javascript. Fails if a test fails."""
    files = [JAVASCRIPT / test for test in tests]
    command = ["node", "--test", "--test-reporter=tap", *files]
    environment = os.environ | {"VITLENS_FILES": str(folder)}
    done = subprocess.run(
        command, env=environment, capture_output=True, encoding="utf-8", timeout=300, check=False
    )
    failed = re.findall(r"^not ok .*?^  \.\.\.", done.stdout, re.DOTALL | re.MULTILINE)
    assert not done.returncode, "\n".join(failed) + done.stderr
    return done.stdout


def randomize(model: nn.Module, seed: int = 0) -> nn.Module:
    """Add noise to every parameter, so that no norm, bias or LayerScale is left at its beginning."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def timm_model(name: str, **sizes) -> nn.Module:
    return randomize(timm.create_model(name, **(SMALL | sizes)))


def hub_model(title: str, config: object) -> nn.Module:
    return randomize(getattr(transformers, title)._from_config(config, attn_implementation="eager"))


class Cases:
    """Models written with the outputs of PyTorch, for models.test.mjs."""

    def __init__(self, folder: Path):
        self.folder, self.cases = folder, []

    def store(self, name: str, values: torch.Tensor) -> str:
        """Write float32 values. Returns the name of their file."""
        values.detach().float().contiguous().numpy().tofile(self.folder / name)
        return name

    def add(
        self,
        name: str,
        files: str,
        model: nn.Module,
        *,
        side: int,
        image: tuple[int, int] | None = None,
        maps: bool = False,
        **more,
    ):
        """Add a case. files: directory of the model's files. side: of the model's images, in pixels. image: (height,
        width) of the image, if it is of another size."""
        sides = image or (side, side)
        image = torch.randn(1, 3, *sides, generator=torch.Generator().manual_seed(1))
        number = len(self.cases)
        outputs = {
            part: {k: self.store(f"{number}.{part}{k}.bin", v) for k, v in enumerate(values)}
            for part, values in run_torch(model, image).items()
        }
        outputs = {
            part: list(values.values()) if part == "tokens" else values
            for part, values in outputs.items()
        }
        for part in ("logits", "features", "output"):
            if part in outputs:
                outputs[part] = outputs[part][0]
        outputs["input"] = self.store(f"{number}.input.bin", image)
        methods = METHODS if maps else []
        stored = {
            method: self.store(
                f"{number}.{method}.bin", attribution.METHODS[method](model, image, 1)[0]
            )
            for method in methods
        }
        case = dict(name=name, files=files, outputs=outputs, maps=stored, notes=[], labels=None)
        self.cases.append(case | {"imagenet": False, "image": sides} | more)

    def add_timm(
        self, name: str, architecture: str, *, maps: bool = True, case: dict | None = None, **sizes
    ):
        model = timm_model(architecture, **sizes)
        files = f"model{len(self.cases)}"
        save_for_hf(model, self.folder / files, safe_serialization=True)
        self.add(name, files, model, side=(SMALL | sizes)["img_size"], maps=maps, **(case or {}))

    def add_hub(self, name: str, title: str, config: object, *, side: int = 32, **case):
        model = hub_model(title, config)
        files = f"model{len(self.cases)}"
        model.save_pretrained(self.folder / files, **case.pop("saved", {}))
        if "processor" in case:
            text = json.dumps(case.pop("processor"))
            (self.folder / files / "preprocessor_config.json").write_text(text)
        elif "notes" not in case:
            case["notes"] = [NO_PROCESSOR]
        self.add(name, files, model, side=side, **case)


NO_PROCESSOR = say("no processor", file="preprocessor_config.json")


def run_torch(model: nn.Module, image: torch.Tensor) -> dict[str, list[torch.Tensor]]:
    """Logits or features, tokens after each layer and attention (H, T, T) of a model."""
    kept: dict[str, list[torch.Tensor]] = {"tokens": [], "attention": []}

    def keep(part):
        def hook(module, inputs, output):
            kept[part].append((output[0] if isinstance(output, tuple) else output)[0])

        return hook

    hooks = []
    is_timm = type(model).__module__.startswith("timm.")
    for block in blocks_of(model):
        hooks.append(block.register_forward_hook(keep("tokens")))
        if is_timm:
            block.attn.fused_attn = False
            hooks.append(block.attn.attn_drop.register_forward_hook(keep("attention")))
    with torch.no_grad():
        if is_timm:
            kept["logits" if model.num_classes else "features"] = [model(image)[0]]
        else:
            kept |= run_hub(model, image)
    for hook in hooks:
        hook.remove()
    restore_attention(model)
    return kept


def restore_attention(model: nn.Module) -> None:
    """Use fused attention, which `capture` records."""
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation("sdpa")
    for block in blocks_of(model):
        if hasattr(block, "attn"):
            block.attn.fused_attn = True


def blocks_of(model: nn.Module) -> nn.ModuleList:
    """Layers of a model's image tower."""
    if hasattr(model, "blocks"):
        return model.blocks
    lists = {name: part for name, part in model.named_modules() if isinstance(part, nn.ModuleList)}
    towers = [part for name, part in lists.items() if not name.startswith("text_model")]
    return towers[0]


def run_hub(model: nn.Module, image: torch.Tensor) -> dict[str, list[torch.Tensor]]:
    """Attention, and logits, features and output, of a model of transformers."""
    options = {"output_attentions": True}
    if image.shape[-1] != HUB["image_size"] and not type(model).__name__.startswith("Dinov2"):
        options["interpolate_pos_encoding"] = True
    outputs = model(image, **options)
    kept = {"attention": [weights[0] for weights in outputs.attentions]}
    if hasattr(outputs, "logits"):
        return kept | {"logits": [outputs.logits[0]]}
    if "pooler" in dict(model.named_children()):
        features, output = outputs.last_hidden_state[0, 0], outputs.pooler_output[0]
        return kept | {"features": [features], "output": [output]}
    if hasattr(outputs, "image_embeds"):
        return kept | {"output": [outputs.image_embeds[0]]}
    features = getattr(outputs, "pooler_output", None)
    return kept | {
        "features": [outputs.last_hidden_state[0, 0] if features is None else features[0]]
    }


def add_timm_models(cases: Cases) -> None:
    cases.add_timm("timm ViT", "vit_tiny_patch16_224")
    cases.add_timm("timm DeiT, distilled", "deit_tiny_distilled_patch16_224")
    cases.add_timm("timm DeiT III", "deit3_small_patch16_224")
    cases.add_timm(
        "timm registers, LayerScale, mean", "vit_little_patch16_reg4_gap_256", mlp_ratio=4
    )
    cases.add_timm("timm registers in positions", "test_vit2")
    cases.add_timm("timm DINOv2 with registers", "vit_small_patch14_reg4_dinov2")
    cases.add_timm("timm quick GELU, norm before", "vit_base_patch32_clip_quickgelu_224")
    twin = dict(name="vit_base_patch32_clip_224", twin="vit_base_patch32_clip_quickgelu_224")
    note = {"notes": [say("twin", **twin)]}
    cases.add_timm("timm CLIP", "vit_base_patch32_clip_224", case=note)
    cases.add_timm("timm GELU by tanh", "vit_base_patch32_siglip_gap_256")
    cases.add_timm("timm qkv without bias", "vit_tiny_patch16_224", qkv_bias=False)
    cases.add_timm(
        "timm mean of normalized tokens", "vit_tiny_patch16_224", global_pool="avg", fc_norm=False
    )
    cases.add_timm("timm without head", "vit_small_patch14_dinov2", num_classes=0, maps=False)
    for image in [(24, 40), (72, 16), (8, 128)]:  # 15, 18 and 16 patches in place of 16
        cases.add_timm(
            f"timm ViT, image of {image}",
            "vit_tiny_patch16_224",
            dynamic_img_size=True,
            case={"image": image},
        )
    cases.add_timm(
        "timm mean of patches and registers, another image",
        "vit_small_patch14_reg4_dinov2",
        global_pool="avg",
        dynamic_img_size=True,
        case={"image": (40, 24)},
    )


def add_hub_models(cases: Cases) -> None:
    mlp = {"intermediate_size": 96}
    vit = transformers.ViTConfig(**HUB, **mlp, **LABELS)
    names = ["ant", "bee", "cat"]
    cases.add_hub(
        "ViTForImageClassification", "ViTForImageClassification", vit, labels=names, maps=True
    )
    cases.add_hub("ViTModel", "ViTModel", transformers.ViTConfig(**HUB, **mlp, qkv_bias=False))
    squeezed = {"resized": 40, "squeezed": True, "interpolation": "bilinear", "image": [32, 32]}
    cases.add_hub(
        "DeiT",
        "DeiTForImageClassification",
        transformers.DeiTConfig(**HUB, **mlp),
        processor={"size": 40, "crop_size": 32, "resample": 2},
        about=squeezed,
    )
    teacher = transformers.DeiTConfig(**HUB, **mlp, num_labels=3)
    cases.add_hub("DeiT with teacher", "DeiTForImageClassificationWithTeacher", teacher, maps=True)
    mask = say("unused tensors", count=1, names="embeddings.mask_token")
    moved = say("resized positions", **{"from": 4, "to": 6, "library": "transformers"})
    processor = {"size": {"shortest_edge": 50}, "crop_size": {"height": 48, "width": 48}}
    other = {"processor": processor, "side": 48, "about": {"resized": 50, "squeezed": False}}
    kinds = {
        "Dinov2Model": (transformers.Dinov2Config(**HUB, hidden_act="gelu_pytorch_tanh"), mask),
        "Dinov2WithRegistersModel": (transformers.Dinov2WithRegistersConfig(**HUB), mask),
        "Dinov2ForImageClassification": (
            transformers.Dinov2Config(**HUB, num_labels=3),
            mask.replace("embeddings", "dinov2.embeddings"),
        ),
        "Dinov2WithRegistersForImageClassification": (
            transformers.Dinov2WithRegistersConfig(**HUB, num_labels=3),
            mask.replace("embeddings", "dinov2_with_registers.embeddings"),
        ),
    }
    for title, (config, note) in kinds.items():
        cases.add_hub(f"{title} at another grid", title, config, notes=[moved, note], **other)
    smaller = {"processor": {"size": 24, "crop_size": 24}, "side": 24}
    moved = say("resized positions", **{"from": 4, "to": 3, "library": "transformers"})
    for title in ("Dinov2Model", "Dinov2WithRegistersModel"):
        config, note = kinds[title]
        cases.add_hub(f"{title} at a smaller grid", title, config, notes=[moved, note], **smaller)
    vit = transformers.ViTConfig(**HUB, **mlp, num_labels=3)
    cases.add_hub(
        "ViT at another size",
        "ViTForImageClassification",
        vit,
        side=24,
        size=24,
        notes=[NO_PROCESSOR, moved],
    )
    clip = transformers.CLIPVisionConfig(**HUB, **mlp)
    cases.add_hub(
        "CLIP at another size",
        "CLIPVisionModel",
        clip,
        side=24,
        size=24,
        notes=[NO_PROCESSOR, moved],
    )
    clip = transformers.CLIPVisionConfig(**HUB, **mlp, hidden_act="gelu")
    cases.add_hub("CLIP", "CLIPVisionModel", clip)
    clip = transformers.CLIPVisionConfig(**HUB, **mlp, projection_dim=40)
    cases.add_hub("CLIP with a projection", "CLIPVisionModelWithProjection", clip)
    tower = {"vision_config": HUB | mlp, "num_labels": 3}
    norm = "vision_model.post_layernorm"
    unused = say("unused tensors", count=2, names=f"{norm}.bias, {norm}.weight")
    cases.add_hub(
        "CLIPForImageClassification",
        "CLIPForImageClassification",
        transformers.CLIPConfig(**tower),
        notes=[NO_PROCESSOR, unused],
    )
    siglip = transformers.SiglipConfig(**tower)
    attention = "vision_model.head.attention"
    listed = f"{attention}.in_proj_bias, {attention}.in_proj_weight, {attention}.out_proj.bias"
    unused = say("unused tensors", count=11, names=listed)
    cases.add_hub(
        "SiglipForImageClassification",
        "SiglipForImageClassification",
        siglip,
        notes=[NO_PROCESSOR, unused],
    )


def add_stored_types(cases: Cases) -> None:
    """Half precision, bfloat16 and shards."""
    for dtype in (torch.float16, torch.bfloat16):
        model = timm_model("vit_tiny_patch16_224").to(dtype)
        files = f"model{len(cases.cases)}"
        save_for_hf(model, cases.folder / files, safe_serialization=True)
        cases.add(f"timm {dtype}", files, model.float(), side=32)
    config = transformers.ViTConfig(**HUB, intermediate_size=96, num_labels=3)
    saved = {"max_shard_size": "60KB"}
    cases.add_hub("shards", "ViTForImageClassification", config, saved=saved)
    assert len([*(cases.folder / cases.cases[-1]["files"]).glob("*.safetensors")]) > 2


def add_older_layouts(cases: Cases) -> None:
    """timm's flat configuration, with names in a text file, and what transformers wrote before version 5."""
    files = cases.folder / "flat"
    model = timm_model("vit_tiny_patch16_224")
    save_for_hf(model, files, safe_serialization=True)
    config = json.loads((files / "config.json").read_text())
    pretrained = config.pop("pretrained_cfg")
    flat = {name: pretrained[name] for name in ("input_size", "mean", "std")}
    (files / "config.json").write_text(json.dumps(config | flat))
    (files / "names.txt").write_text("ant\nbee\ncat\ndog\nélan\n", encoding="utf-8")
    note = say("assumed", names="interpolation, crop_pct", library="timm")
    about = {"resized": 36, "interpolation": "bicubic"}
    labels = ["ant", "bee", "cat", "dog", "élan"]
    cases.add("timm flat", "flat", model, side=32, notes=[note], about=about, labels=labels)
    files = cases.folder / "clip"
    model = hub_model("CLIPVisionModel", transformers.CLIPVisionConfig(**HUB, intermediate_size=96))
    model.save_pretrained(files)
    weights = load_file(files / "model.safetensors")
    older = {f"vision_model.{name}": values for name, values in weights.items()}
    older["vision_model.embeddings.position_ids"] = torch.arange(17)[None]
    save_file(older, files / "model.safetensors")
    processor = {"feature_extractor_type": "CLIPFeatureExtractor", "size": 32, "crop_size": 32}
    (files / "preprocessor_config.json").write_text(json.dumps(processor))
    name = "vision_model.embeddings.position_ids"
    note = say("unused tensors", count=1, names=name)
    about = {
        "resized": 32,
        "squeezed": False,
        "interpolation": "bicubic",
        "activation": "quick_gelu",
    }
    cases.add("CLIP of transformers 4", "clip", model, side=32, notes=[note], about=about)


def add_real_sizes(cases: Cases) -> None:
    """The bundled DeiT-Tiny, models of vitlens, and a model for 384 pixels at 224."""
    for name in ("deit_tiny", "planted", "vit_tiny_patch8_64"):
        shutil.copytree(CHECKPOINTS / name, cases.folder / name)
        model = load_model(CHECKPOINTS / name)
        config = data_config(model)
        side = config["input_size"][-1]
        about = {
            "resized": int(side / config["crop_pct"]),
            "interpolation": config["interpolation"],
        }
        labels = json.loads((CHECKPOINTS / name / "config.json").read_text())["label_names"]
        is_imagenet = name == "deit_tiny"
        cases.add(
            name,
            name,
            model,
            side=side,
            about=about,
            labels=labels,
            imagenet=is_imagenet,
            maps=name == "planted",
        )
    files = "vit384"
    model = randomize(timm.create_model("vit_tiny_patch16_384"))
    save_for_hf(model, cases.folder / files, safe_serialization=True)
    model.set_input_size((224, 224))  # resizes the positions
    moved = say("resized positions", **{"from": 24, "to": 14, "library": "timm"})
    cases.add("384 pixels at 224", files, model, side=224, size=224, notes=[moved], imagenet=True)


def test_models_of_both_libraries_equal_torch(tmp_path):
    cases = Cases(tmp_path)
    add_timm_models(cases)
    add_hub_models(cases)
    add_stored_types(cases)
    add_older_layouts(cases)
    add_real_sizes(cases)
    write_scripts(tmp_path)
    text = json.dumps({"bound": BOUND, "cases": cases.cases})
    (tmp_path / "cases.json").write_text(text, encoding="utf-8")
    output = run_node(tmp_path, "models.test.mjs")
    print(output)
    assert f"# pass {len(cases.cases)}\n" in output


def test_worker_moves_records_to_the_page(tmp_path):
    save_for_hf(timm_model("vit_tiny_patch16_224"), tmp_path / "model", safe_serialization=True)
    write_scripts(tmp_path)
    run_node(tmp_path, "worker.test.mjs")


@pytest.mark.parametrize(
    "height, width, first",
    [
        (50, 70, "width"),
        (70, 50, "height"),
        (
            60,
            50,
            "width",
        ),  # 20 of the height and 10 of the width, which is not more than twice as much
        (61, 50, "height"),
        (30, 25, "width"),
    ],
)
def test_squeezed_photos_equal_pillow(tmp_path, height, width, first):
    """DeiT of transformers squeezes a photo before its middle is cut. Pillow 13 changed which side comes first."""
    levels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    mean, std = [0.5, 0.4, 0.3], [0.2, 0.3, 0.4]
    sides = {"width": (40, height), "height": (width, 40)}
    half = Image.fromarray(levels).resize(sides[first], Image.Resampling.BICUBIC)
    photo = half.resize((40, 40), Image.Resampling.BICUBIC)
    if int(PIL.__version__.split(".")[0]) >= 13:
        at_once = Image.fromarray(levels).resize((40, 40), Image.Resampling.BICUBIC)
        assert np.array_equal(np.asarray(at_once), np.asarray(photo))
    seen = np.asarray(photo.crop((4, 4, 36, 36)))
    expected = (
        torch.tensor(seen).permute(2, 0, 1) / 255 - torch.tensor(mean)[:, None, None]
    ) / torch.tensor(std)[:, None, None]
    expected.numpy().tofile(tmp_path / "expected.bin")
    about = dict(
        image=[32, 32], resized=40, squeezed=True, interpolation="bicubic", mean=mean, std=std
    )
    photo = {"width": width, "height": height, "levels": levels.ravel().tolist(), "about": about}
    (tmp_path / "photo.json").write_text(json.dumps(photo))
    write_scripts(tmp_path)
    run_node(tmp_path, "pixels.test.mjs")


@pytest.mark.parametrize("step", [20, pytest.param(1, marks=pytest.mark.slow)])
def test_known_models_equal_the_libraries(step, monkeypatch):
    """Every architecture of known.json that this timm has, or every twentieth group, and all of transformers."""
    stored = json.loads(KNOWN.read_text(encoding="utf-8"))
    groups = stored["timm"][::step]
    names = [name for group in groups for name in group["names"] if timm.is_model(name)]
    monkeypatch.setattr(timm, "list_models", lambda module: names if module == "deit" else [])
    written = json.loads(json.dumps(known.known_models()))
    assert {title: stored[title] for title in PARTS} == {title: written[title] for title in PARTS}
    settings = settings_by_name(stored)
    assert settings_by_name(written) == {name: settings[name] for name in names}


def settings_by_name(content: dict) -> dict:
    return {name: group | {"names": []} for group in content["timm"] for name in group["names"]}


def test_hostile_files_end_in_a_sentence(tmp_path):
    save_for_hf(timm_model("vit_tiny_patch16_224"), tmp_path / "model", safe_serialization=True)
    config = transformers.ViTConfig(**HUB, intermediate_size=96, num_labels=3)
    hub_model("ViTForImageClassification", config).save_pretrained(tmp_path / "hub")
    processor = transformers.ViTImageProcessor(size={"height": 32, "width": 32})
    processor.save_pretrained(tmp_path / "hub")
    write_scripts(tmp_path)
    output = run_node(tmp_path, "hostile.test.mjs")
    assert int(output.split("# pass ")[1].split()[0]) > 100
