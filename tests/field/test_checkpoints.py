"""Forms of faults 5, 6 and 8 at the doors of checkpoints: heads, tensors, settings, and sentences about files."""

import argparse
import collections
import datetime
import json
import os
import pathlib
import pickle
import re
import types

import numpy as np
import pytest
import timm
import torch
import torchvision
from forms import cannot_occur, form
from safetensors.torch import load_file, save_file
from support import encoded, refuses, vitlens
from torch import nn
from torch.nn.utils import prune

from vitlens import load_model
from vitlens.models import class_count, data_config, label_names
from vitlens.models.conversion import compare

NAME = "vit_tiny_patch16_224"
SMALL = dict(img_size=32, embed_dim=48, depth=2, num_heads=2)
CLIP = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 64, "patch_size": 16},
    "text_cfg": {"context_length": 8, "vocab_size": 64, "width": 32, "heads": 2, "layers": 1},
}


def made(name=NAME, classes=5, seed=0, **changes):
    """A small timm model whose weights are all different."""
    torch.manual_seed(seed)
    model = timm.create_model(name, num_classes=classes, **SMALL | changes).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def split(model, prefix="backbone."):
    """The weights of a model without its head, with a prefix, and those of the head."""
    state = model.state_dict()
    head = {k.removeprefix("head."): v for k, v in state.items() if k.startswith("head.")}
    return {prefix + k: v for k, v in state.items() if not k.startswith("head.")}, head


def saved(content, path):
    torch.save(content, path)
    return path


def same_outputs(first, second, size=32):
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return torch.equal(first(images), second(images))


def picture(folder):
    path = folder / "cat.png"
    path.write_bytes(encoded(1, size=(32, 32)))
    return path


def under(prefix, weights):
    return {f"{prefix}.{name}": value for name, value in weights.items()}


# Kind 5: several heads in a file


@form(
    5,
    door="Python: load_model(checkpoint=), a single head under another name",
    case="fc, head.1, classifier.1, model.fc beside model.backbone, a nested dictionary",
    right="logits of the model that was saved",
)
def test_load_model_attaches_the_only_head(tmp_path, capsys):
    model = made()
    bare, head = split(model, "")
    nested = {"encoder": bare, "clf": head, "epoch": 3}
    cases = (
        under("backbone", bare) | under("fc", head),
        bare | under("head.1", head),
        under("backbone", bare) | under("classifier.1", head),
        under("model.backbone", bare) | under("model.fc", head),
        under("module.net", bare) | under("module.linear", head),
        nested,
    )
    for content in cases:
        opened = load_model(NAME, checkpoint=saved(content, tmp_path / "w.pth"), **SMALL)
        assert same_outputs(opened, model)
        assert "its head has 5 classes" in capsys.readouterr().err


@form(
    5,
    door="Python: load_model(checkpoint=, head=), several heads",
    case="linear evaluation with four classifiers, two of another width",
    right="logits of timm's forward_features by each classifier",
)
def test_load_model_asks_for_one_of_several_heads(tmp_path):
    model = made(classes=0)
    heads = {
        f"classifiers.classifier_{n}_lr_{rate}.linear": nn.Linear(48 * n, 7)
        for n in (1, 2)
        for rate in ("0_1", "0_01")
    }
    content = under("backbone", model.state_dict())
    for name, layer in heads.items():
        content |= under(name, layer.state_dict())
    file = saved(content, tmp_path / "w.pth")
    refuses(r"4 heads: .*head= \(--head\)", load_model, NAME, checkpoint=file, **SMALL)
    wanted = "classifiers.classifier_1_lr_0_01.linear"
    opened = load_model(NAME, checkpoint=file, head="classifier_1_lr_0_01.linear", **SMALL)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        features = model.forward_features(images)[:, 0]
        assert torch.allclose(opened(images), heads[wanted](features), atol=1e-6)
    wide = "classifiers.classifier_2_lr_0_1.linear"
    refuses("reads 96 numbers", load_model, NAME, checkpoint=file, head=wide, **SMALL)
    refuses("no head 'fc'", load_model, NAME, checkpoint=file, head="fc", **SMALL)
    assert class_count(load_model(NAME, checkpoint=file, head="none", **SMALL)) == 0
    refuses("head= .*checkpoint=", load_model, head="fc")


@form(
    5,
    door="Python: load_model(checkpoint=), copies of a model",
    case="two copies of equal rank with other values",
    right="counted by hand: one of them is named, or neither",
)
def test_load_model_refuses_one_of_two_unlike_copies(tmp_path):
    first, second = (made(seed=seed).state_dict() for seed in (1, 2))
    file = saved({"net_a": first, "net_b": second}, tmp_path / "w.pth")
    refuses("several copies .*net_a, net_b", load_model, NAME, checkpoint=file, **SMALL)
    same = saved({"net_a": first, "net_b": first}, tmp_path / "w.pth")
    assert load_model(NAME, checkpoint=same, **SMALL).num_classes == 5


@form(
    5,
    door="command: inspect --checkpoint --head",
    case="head and head_aux in one file",
    right="exit codes and the sentence",
)
def test_inspect_asks_for_a_head(tmp_path):
    model = timm.create_model("test_vit", num_classes=3)
    state = model.state_dict()
    other = {"head_aux.weight": state["head.weight"] + 1, "head_aux.bias": state["head.bias"]}
    file = saved(state | other, tmp_path / "two.pth")
    command = (
        "inspect",
        "test_vit",
        picture(tmp_path),
        "--checkpoint",
        file,
        "--out",
        tmp_path / "out",
    )
    result = vitlens(*command, expect=2)
    assert "head (3 classes), head_aux (3 classes)" in result.stderr
    vitlens(*command, "--head", "head_aux")


@form(
    5,
    door="Python: load_model(checkpoint=), heads of several layers",
    case="batch norm before the classifier, an MLP, the representation layer of ViT-in21k",
    right="no logits: the classifier alone is another function than the saved one",
)
def test_a_head_of_several_layers_is_left_out_and_named(tmp_path, capsys):
    bare, head = split(made(), "")
    norm = {"head.0.running_mean": torch.ones(48), "head.0.running_var": torch.ones(48)}
    hidden = {"head.0.weight": torch.eye(48), "head.0.bias": torch.zeros(48)}
    for more in (norm, hidden):
        content = bare | more | under("head.2", head)
        opened = load_model(NAME, checkpoint=saved(content, tmp_path / "w.pth"), **SMALL)
        assert class_count(opened) == 0
        assert "the head head, which has several layers" in capsys.readouterr().err
    layer = {"pre_logits.fc.weight": torch.eye(48), "pre_logits.fc.bias": torch.zeros(48)}
    file = saved(bare | layer | under("head", head), tmp_path / "w.pth")
    refuses('reads the layer pre_logits.*head="none"', load_model, NAME, checkpoint=file, **SMALL)
    assert class_count(load_model(NAME, checkpoint=file, head="none", **SMALL)) == 0


@form(
    5,
    door="Python: evaluate(checkpoint=, head=)",
    case="two classifiers for the same classes, of which one is right",
    right="accuracy by hand: the second head is the first with its classes reversed",
)
def test_evaluate_uses_the_named_head(tmp_path):
    from vitlens_paper.evaluate.options import Evaluation
    from vitlens_paper.evaluate.session import open_session

    model = timm.create_model("test_vit", num_classes=10)
    bare, head = split(model, "")
    other = {key: value.flip(0) for key, value in head.items()}
    file = saved(bare | under("head", head) | under("other", other), tmp_path / "w.pth")
    evaluation = Evaluation(model="test_vit", data="digits", checkpoint=file, head="other")
    network = open_session(evaluation, device="cpu").network
    images = torch.randn(2, 3, 160, 160)
    with torch.no_grad():
        assert torch.allclose(network(images), model.eval()(images).flip(1), atol=1e-6)


# Kind 6: tensors


@pytest.mark.slow
@form(
    6,
    door="Python: load_model(checkpoint=), torchvision",
    case="weights of torchvision's own training program, in model_ema with a counter",
    right="torchvision's own forward",
)
def test_torchvision_checkpoint_arrives(tmp_path, capsys):
    from torchvision.models import vit_b_16

    sizes = dict(image_size=32)
    with torch.device("meta"):
        model = vit_b_16(num_classes=4, **sizes)
    shapes = {key: value.shape for key, value in model.state_dict().items()}
    state = {key: torch.full(shape, float(i)) for i, (key, shape) in enumerate(shapes.items())}
    content = {"model": {}, "model_ema": under("module", state) | {"n_averaged": torch.tensor(3)}}
    file = saved(content, tmp_path / "ema.pth")
    opened = load_model("torchvision:vit_b_16", checkpoint=file, **sizes)
    assert all(torch.equal(value, state[key]) for key, value in opened.state_dict().items())
    printed = capsys.readouterr().err
    assert "Took model_ema.module" in printed and "n_averaged" in printed


@form(
    6,
    door="Python: load_model(checkpoint=), transformers",
    case="a Lightning file of a ViT, and the folder's own file with the names on disk",
    right="transformers' own forward",
)
def test_transformers_checkpoint_arrives(tmp_path):
    from experiments.support import small

    model = small("ViTForImageClassification", num_labels=4)
    model.save_pretrained(tmp_path / "vit")
    images = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        expected = model(images).logits
    lightning = saved({"state_dict": under("model", model.state_dict())}, tmp_path / "last.ckpt")
    for file in (lightning, tmp_path / "vit" / "model.safetensors", tmp_path / "vit"):
        opened = load_model(f"hf:{tmp_path / 'vit'}", checkpoint=file)
        with torch.no_grad():
            assert torch.equal(opened(images).logits, expected)


@form(
    6,
    door="Python: load_model(checkpoint=), open_clip",
    case="positions of another size, a text tower of another length, QuickGELU",
    right="open_clip's tensors, compared one by one",
)
def test_open_clip_checkpoint_is_not_resampled(tmp_path, capsys):
    model = load_model("open_clip:ViT-B-32", pretrained=False, **CLIP)
    state = model.state_dict()
    file = saved({"state_dict": under("module", state)}, tmp_path / "clip.pt")
    opened = load_model("open_clip:ViT-B-32", checkpoint=file, **CLIP)
    assert all(torch.equal(value, state[key]) for key, value in opened.state_dict().items())
    assert "ViT-B-32-quickgelu" in capsys.readouterr().err
    longer = state | {"positional_embedding": torch.zeros(16, 32)}
    file = saved(longer, tmp_path / "clip.pt")
    refuses(
        r"positional_embedding has the shape \(16, 32\)",
        load_model,
        "open_clip:ViT-B-32",
        checkpoint=file,
        **CLIP,
    )


@form(
    6,
    door="Python: load_model(checkpoint=), positions",
    case="weights for 64 pixels in a model for 224, in timm's families",
    right="the tensors of the file, and timm's own forward at 64 pixels",
)
@pytest.mark.parametrize(
    "name", ["vit_tiny_patch16_224", "beit_base_patch16_224", "vit_tiny_r_s16_p8_224"]
)
def test_positions_are_not_resampled_without_a_request(tmp_path, capsys, name):
    model = made(name, img_size=64)
    file = saved(model.state_dict(), tmp_path / "w.pth")
    more = {key: value for key, value in SMALL.items() if key != "img_size"}
    opened = load_model(name, checkpoint=file, **more)
    assert same_outputs(opened, model, 64)
    assert data_config(opened)["input_size"] == (3, 64, 64)
    assert "images of 64 × 64 pixels" in capsys.readouterr().err
    load_model(name, checkpoint=file, img_size=32, **more)
    assert "resampled" in capsys.readouterr().err


@form(
    6,
    door="Python: load_model(folder)",
    case="config.json describes a model for 32 pixels, and the weights are for 64",
    right="the tensors of the file",
)
def test_folder_with_weights_of_another_size_is_refused(tmp_path):
    timm.models.save_for_hf(
        made(), tmp_path, model_args=SMALL | {"num_classes": 5}, safe_serialization=True
    )
    load_model(tmp_path)
    save_file(made(img_size=64).state_dict(), tmp_path / "model.safetensors")
    refuses(r"pos_embed has the shape \(1, 17, 48\).*config.json", load_model, tmp_path)


@form(
    6,
    door="Python: load_model(hf folder), from_pretrained",
    case="a classifier, a register token and a decoder beside the model's weights",
    right="the keys of the file without those of the model, counted by hand",
)
def test_transformers_names_what_from_pretrained_leaves_out(tmp_path, capsys):
    from experiments.support import small

    model = small("ViTModel")
    model.save_pretrained(tmp_path)
    from safetensors.torch import load_file

    weights = load_file(tmp_path / "model.safetensors")
    more = {"classifier.weight": torch.zeros(3, 32), "classifier.bias": torch.zeros(3)}
    save_file(weights | more, tmp_path / "model.safetensors", {"format": "pt"})
    load_model(tmp_path)
    assert "leaves out: classifier (2 tensors)" in capsys.readouterr().err
    tokens = {"embeddings.register_tokens": torch.zeros(1, 4, 32)}
    save_file(weights | tokens, tmp_path / "model.safetensors", {"format": "pt"})
    refuses("embeddings.register_tokens", load_model, tmp_path)


@form(
    6,
    door="command: inspect --checkpoint, index of parts",
    case="safetensors in two parts, and one part lost",
    right="exit codes and the sentence",
)
def test_inspect_reads_weights_in_parts(tmp_path):
    state = timm.create_model("test_vit", num_classes=3).state_dict()
    names = list(state)
    parts = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    for file, keys in parts.items():
        save_file({key: state[key] for key in keys}, tmp_path / file)
    index = {"weight_map": {key: file for file, keys in parts.items() for key in keys}}
    file = tmp_path / "model.safetensors.index.json"
    file.write_text(json.dumps(index))
    command = (
        "inspect",
        "test_vit",
        picture(tmp_path),
        "--checkpoint",
        file,
        "--out",
        tmp_path / "out",
    )
    assert "its head has 3 classes" in vitlens(*command).stderr
    (tmp_path / "b.safetensors").unlink()
    assert "its part b.safetensors is missing" in vitlens(*command, expect=2).stderr


@pytest.mark.slow
@form(
    6,
    door="command: inspect --beside FILE",
    case="a second checkpoint of the same model, with the same file name",
    right="both names in the tables",
)
def test_inspect_takes_a_checkpoint_beside_another(tmp_path):
    files = []
    for number in (0, 9):
        folder = tmp_path / f"ep{number}"
        folder.mkdir()
        torch.manual_seed(number)
        model = timm.create_model("test_vit", num_classes=3)
        files.append(saved(model.state_dict(), folder / "w.pth"))
    first, second = files
    result = vitlens(
        "inspect",
        "test_vit",
        picture(tmp_path),
        "--checkpoint",
        first,
        "--beside",
        second,
        "--out",
        tmp_path / "out",
    )
    assert str(second) in result.stdout and (tmp_path / "out" / "beside.png").is_file()


@form(
    6,
    door="Python: load_model(checkpoint=), precision",
    case="float16, float64 that rounds, int8, a value that is not finite",
    right="torch's own conversion",
)
def test_precision_of_a_checkpoint_is_named(tmp_path, capsys):
    state = made().state_dict()
    half = {key: value.half() for key, value in state.items()}
    opened = load_model(NAME, checkpoint=saved(half, tmp_path / "w.pth"), **SMALL)
    assert torch.equal(opened.norm.weight, half["norm.weight"].float())
    assert "float16" in capsys.readouterr().err
    double = {key: value.double() + 1e-12 for key, value in state.items()}
    load_model(NAME, checkpoint=saved(double, tmp_path / "w.pth"), **SMALL)
    assert "rounded to float32" in capsys.readouterr().err
    whole = {key: (100 * value).to(torch.int8) for key, value in state.items()}
    file = saved(whole, tmp_path / "w.pth")
    refuses("int8.*quantized", load_model, NAME, checkpoint=file, **SMALL)
    load_model(
        NAME, checkpoint=saved(state | {"norm.bias": torch.full((48,), torch.nan)}, file), **SMALL
    )
    assert "not finite, such as norm.bias" in capsys.readouterr().err


@form(
    6,
    door="Python: load_model(checkpoint=), parts of pretraining",
    case="DINOv2's rank file, MoCo's two encoders, MAE's decoder, iBOT's masked_embed",
    right="timm's own features, and the names counted by hand",
)
def test_parts_of_pretraining_are_named(tmp_path, capsys):
    model = made(classes=0)
    state = model.state_dict()
    other = {key: value + 1 for key, value in state.items()}
    rank = under("teacher.backbone", state) | under("student.backbone", other)
    rank |= {
        f"{side}.dino_head.last_layer.weight": torch.ones(9, 5) for side in ("teacher", "student")
    }
    moco = under("module.base_encoder", state) | under("module.momentum_encoder", other)
    moco |= {"module.predictor.0.weight": torch.ones(7, 9)}
    mae = state | {"mask_token": torch.ones(1, 1, 8), "decoder_pred.weight": torch.ones(9, 8)}
    ibot = {"teacher": under("backbone", state | {"masked_embed": torch.ones(1, 48)})}
    cases = (
        ({"model": rank}, "dino_head", "student.backbone"),
        ({"state_dict": moco}, "predictor.0.weight", "momentum_encoder"),
        ({"model": mae}, "mask_token, decoder_pred.weight", ""),
        (ibot, "masked_embed", ""),
    )
    for content, left_out, copy in cases:
        opened = load_model(NAME, checkpoint=saved(content, tmp_path / "w.pth"), **SMALL)
        assert same_outputs(opened, model)
        printed = capsys.readouterr().err
        assert left_out in printed and copy in printed and "Left out" in printed


@form(
    6,
    door="timm's filter: DINOv2 with registers, EVA, DINOv3",
    case="published names: register_tokens, w12, mask_token, a third bias of zeros",
    right="the tokens summed by hand, and the multiset of all values",
)
def test_conversions_keep_all_values(tmp_path, capsys):
    name = "vit_small_patch14_reg4_dinov2"
    model = made(name, classes=0, img_size=56)
    state = model.state_dict()
    first = torch.randn(1, 1, 48)
    published = {key: value for key, value in state.items() if key != "reg_token"}
    published["register_tokens"] = state["reg_token"]
    published["cls_token"] = state["cls_token"] - first
    published["pos_embed"] = torch.cat([first, state["pos_embed"]], 1)
    published["mask_token"] = torch.ones(1, 48)
    file = saved(published, tmp_path / "w.pth")
    opened = load_model(name, checkpoint=file, **SMALL | {"img_size": 56})
    expected = published["cls_token"] + first
    assert torch.equal(opened.cls_token, expected)
    assert torch.equal(opened.reg_token, state["reg_token"])
    printed = capsys.readouterr().err
    assert "position of its class token is added" in printed and "Left out: mask_token" in printed

    q, k, v = torch.randn(3, 6, 4)
    zeros = torch.zeros(6, 4)
    joined = compare({"blocks.0.q": q, "blocks.0.k": k}, {"blocks.0.qk": torch.cat([k, q]).T})
    assert joined.arrived == {"blocks.0.qk"} and not joined.changed and not joined.lost
    bias = {"blocks.0.qkv": torch.cat([q, zeros, v])}
    parted = compare(bias, {"blocks.0.q": q.clone(), "blocks.0.v": v.clone()})
    assert parted.arrived == {"blocks.0.q", "blocks.0.v"} and not parted.lost
    dropped = compare(
        {"blocks.0.qkv": torch.cat([q, k, v])}, {"blocks.0.q": q.clone(), "blocks.0.v": v.clone()}
    )
    assert dropped.lost == ["blocks.0.qkv"]


@form(
    6,
    door="Python: load_model(checkpoint=), settings in args",
    case="argparse.Namespace and dictionaries with size, mean, heads, pool, names of classes",
    right="the settings themselves",
)
def test_settings_of_a_checkpoint_are_compared(tmp_path, capsys):
    args = argparse.Namespace(
        img_size=384, mean=(0.485, 0.456, 0.406), crop_pct=1.0, num_heads=12, global_pool="avg"
    )
    names = {"dog": 1, "ant": 0, "cat": 2, "eel": 4, "emu": 3}
    content = {"state_dict": made().state_dict(), "args": args, "class_to_idx": names}
    opened = load_model(NAME, checkpoint=saved(content, tmp_path / "w.pth"), **SMALL)
    printed = capsys.readouterr().err
    for setting in (
        "img_size 384",
        "mean (0.485",
        "crop_pct 1.0",
        "num_heads 12",
        "global_pool avg",
    ):
        assert f"states {setting}" in printed
    assert label_names(opened) == ["ant", "dog", "cat", "emu", "eel"]
    args = argparse.Namespace(
        img_size=32, mean=None, num_heads=2, arch="vit_tiny", best=np.float64(1)
    )
    content = {"state_dict": made().state_dict(), "args": args, "best_acc": np.float64(81.5)}
    load_model(NAME, checkpoint=saved(content, tmp_path / "w.pth"), **SMALL)
    assert len(capsys.readouterr().err.splitlines()) == 1


@form(
    6,
    door="Python: load_model(timm's name), notes of published weights",
    case="17 names whose weights were trained with QuickGELU",
    right="timm's pretrained_cfg.notes",
)
def test_notes_of_published_weights_choose_the_activation(capsys):
    small = dict(embed_dim=48, depth=1, num_heads=2, img_size=28)
    names = [
        name
        for name in timm.list_pretrained("vit_*_clip_*")
        if "QuickGELU" in str(timm.get_pretrained_cfg(name).notes) and "quickgelu" not in name
    ]
    assert len(names) == 17
    for name in names[:4]:
        opened = load_model(name, pretrained=False, **small | {"patch_size": 14})
        assert type(opened.blocks[0].mlp.act).__name__ == "QuickGELU"
        assert "QuickGELU" in capsys.readouterr().err
    plain = load_model(names[0].split(".")[0], pretrained=False, **small | {"patch_size": 14})
    assert isinstance(plain.blocks[0].mlp.act, nn.GELU)


@form(
    6,
    door="Google's arrays (.npz)",
    case="positions of another grid",
    right="the array in the file",
)
def test_positions_of_arrays_are_not_resampled(tmp_path):
    file = tmp_path / "vit.npz"
    np.savez(file, **{"Transformer/posembed_input/pos_embedding": np.ones((1, 18, 48), np.float32)})
    refuses("does not hold", load_model, NAME, checkpoint=file, **SMALL)


cannot_occur(
    6,
    door="command: train --checkpoint",
    reason="train has no such option; it starts from a model folder or a name of timm",
)

# Kind 8: sentences

HTML = b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 22\n"
SENTENCES = (
    ("w.pth", HTML, "it is a web page"),
    ("w.safetensors", POINTER, "pointer of Git LFS.*git lfs pull"),
    ("w.pth", b"", "it is empty"),
    ("w.bin", b'{"error": "not found"}', "it is JSON"),
    ("w.pth", b"\x1f\x8b\x08\x00" + bytes(40), "compressed"),
    ("w.h5", b"\x89HDF\r\n\x1a\n" + bytes(40), "HDF5"),
    ("w.gguf", b"GGUF" + bytes(40), "GGUF"),
    ("w.msgpack", b"\x83\xa5model" + bytes(40), "Flax"),
    ("w.npz", b"\x93NUMPY" + bytes(60), "single NumPy array"),
    ("w.pth", b"\xef\xbb\xbf" + HTML, "it is a web page"),
    ("w.pth", b"<Error><Code>AccessDenied</Code></Error>", "it is a web page"),
    ("w.tar", b"w.pth".ljust(257, b"\0") + b"ustar" + bytes(250), "an archive. Unpack it"),
    ("w.pth", b"MZ\x90\x00" + bytes(60), "not a file of PyTorch"),
)


@form(
    8,
    door="Python: load_model(checkpoint=), files without weights",
    case="web page, LFS pointer, JSON, compressed, HDF5, GGUF, Flax, one array, a program",
    right="the first bytes of the file",
)
@pytest.mark.parametrize("name, content, words", SENTENCES)
def test_a_file_without_weights_is_named_by_its_content(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    refuses(words, load_model, NAME, checkpoint=tmp_path / name, **SMALL)


@form(
    8,
    door="Python: load_model(checkpoint=), cut files and other programs",
    case="half a ZIP, half a safetensors, a pickled model, TorchScript, an optimizer, a list",
    right="how the file was made",
)
def test_a_damaged_file_is_named_by_its_damage(tmp_path):
    state = made().state_dict()
    file = saved(state, tmp_path / "w.pth")
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    refuses("ends after .* bytes", load_model, NAME, checkpoint=file, **SMALL)
    save_file(state, tmp_path / "w.safetensors")
    whole = (tmp_path / "w.safetensors").read_bytes()
    for length in (40, len(whole) // 2):
        file.write_bytes(whole[:length])
        refuses("ends after .* bytes", load_model, NAME, checkpoint=file, **SMALL)
    saved(made(), file)
    refuses("whole pickled model", load_model, NAME, checkpoint=file, **SMALL)
    saved([1, 2], file)
    refuses("holds a list", load_model, NAME, checkpoint=file, **SMALL)
    saved({"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 1}]}, file)
    refuses("an optimizer alone", load_model, NAME, checkpoint=file, **SMALL)


@form(
    8,
    door="Python: load_model(checkpoint=), another architecture",
    case="distilled and plain, norms, registers, depth, and the name that fits",
    right="the architecture that was saved",
)
def test_another_architecture_is_named(tmp_path):
    distilled = timm.create_model("deit_tiny_distilled_patch16_224")
    file = saved(distilled.state_dict(), tmp_path / "w.pth")
    words = "distilled model.*Its tensors fit deit_tiny_distilled_patch16_224"
    refuses(words, load_model, "deit_tiny_patch16_224", checkpoint=file)
    saved(made().state_dict(), file)
    refuses("plain model", load_model, "deit_tiny_distilled_patch16_224", checkpoint=file, **SMALL)
    saved(made(global_pool="avg", fc_norm=True).state_dict(), file)
    refuses('global_pool="avg"', load_model, NAME, checkpoint=file, **SMALL)
    saved(made(reg_tokens=4).state_dict(), file)
    refuses("4 register tokens", load_model, NAME, checkpoint=file, **SMALL)
    saved(made().state_dict() | {"blocks.0.attn.logit_scale": torch.tensor(2.0)}, file)
    refuses("blocks.0.attn.logit_scale", load_model, NAME, checkpoint=file, **SMALL)
    saved(made(depth=3).state_dict(), file)
    refuses("has 3 layers, and .* has 2", load_model, NAME, checkpoint=file, **SMALL)


@form(
    8,
    door="Python: load_model(checkpoint=FOLDER)",
    case="two files of weights, a sharded DeepSpeed and a distributed checkpoint, an adapter",
    right="the files in the folder",
)
def test_a_folder_as_a_checkpoint_is_named_by_its_files(tmp_path):
    cases = (
        (("ep0.pth", "ep9.pth"), "several files of weights: ep0.pth, ep9.pth"),
        (("mp_rank_00_model_states.pt",), "DeepSpeed.*zero_to_fp32"),
        (("__0_0.distcp", ".metadata"), "distributed checkpoint.*dcp_to_torch"),
        (("adapter_config.json", "adapter_model.safetensors"), "LoRA adapter"),
        (("notes.txt",), "no file of weights"),
    )
    for number, (names, words) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name in names:
            (folder / name).write_bytes(b"x")
        refuses(words, load_model, NAME, checkpoint=folder, **SMALL)


@pytest.mark.slow
@form(
    8,
    door="command: inspect FILE, without the model's name",
    case="a DeiT-S with distillation under the name of an epoch",
    right="the architecture that was saved",
)
def test_a_file_in_place_of_a_model_names_its_architecture(tmp_path):
    with torch.device("meta"):
        model = timm.create_model("deit_small_distilled_patch16_224")
    state = {key: torch.zeros(value.shape) for key, value in model.state_dict().items()}
    file = saved(state, tmp_path / "ep9.pth")
    result = vitlens("inspect", file, "--out", tmp_path / "out", expect=2)
    assert re.search(r"deit_small_distilled_patch16_224 with\s+checkpoint=", result.stderr)


@form(
    6,
    door="Python: load_model(checkpoint=), sparse, NumPy and big-endian weights",
    case="COO and CSR tensors, a dictionary of arrays in .pth, .npz with slashes and in big-endian order",
    right="logits of the model that was saved",
)
def test_load_model_reads_weights_in_other_layouts(tmp_path):
    model = made()
    state = model.state_dict()
    arrays = {name: value.numpy() for name, value in state.items()}
    file = tmp_path / "w.pth"
    layouts = (
        {name: value.to_sparse() if value.ndim == 2 else value for name, value in state.items()},
        {
            name: value.to_sparse_csr() if value.ndim == 2 else value
            for name, value in state.items()
        },
        arrays,
    )
    for content in layouts:
        opened = load_model(NAME, checkpoint=saved(content, file), **SMALL)
        assert same_outputs(opened, model)
    np.savez(tmp_path / "w.npz", **{f"params/{name}": value for name, value in arrays.items()})
    assert same_outputs(load_model(NAME, checkpoint=tmp_path / "w.npz", **SMALL), model)
    np.savez(tmp_path / "w.npz", **{name: value.astype(">f4") for name, value in arrays.items()})
    assert same_outputs(load_model(NAME, checkpoint=tmp_path / "w.npz", **SMALL), model)


@form(
    6,
    door="Python: load_model(checkpoint=), objects of training programs beside the weights",
    case="paths, dates, defaultdict, SimpleNamespace, NumPy's random state, param_groups, losses, FSDP's optimizer",
    right="logits of the model that was saved",
)
def test_load_model_reads_weights_beside_plain_objects(tmp_path, capsys):
    model = made()
    state = model.state_dict()
    moments = {name: {"exp_avg": torch.ones_like(value)} for name, value in state.items()}
    beside = (
        {"path": pathlib.Path("runs"), "date": datetime.datetime(2026, 1, 1)},
        {"history": collections.defaultdict(list), "cfg": types.SimpleNamespace(lr=0.1)},
        {"rng": np.random.get_state(), "param_groups": [{"lr": 0.1}]},
        {"criterion": {"weight": torch.ones(5)}, "optim": {"state": moments}},
    )
    for objects in beside:
        file = saved({"model": state, **objects}, tmp_path / "w.pth")
        assert same_outputs(load_model(NAME, checkpoint=file, **SMALL), model)
    assert f"Left out: criterion.weight, optim ({len(state)} tensors)." in capsys.readouterr().err


@form(
    6,
    door="Python: load_model(checkpoint=), chunks of layers",
    case="blocks.0.0 and blocks.1.1 of DINOv2's training",
    right="features of the model that was saved",
)
def test_load_model_reads_chunks_of_layers(tmp_path):
    model = made(classes=0)
    state = {
        re.sub(r"blocks\.(\d)", r"blocks.\1.\1", name): value
        for name, value in model.state_dict().items()
    }
    file = saved({"teacher": under("backbone", state)}, tmp_path / "w.pth")
    assert same_outputs(load_model(NAME, checkpoint=file, **SMALL), model)


@form(
    6,
    door="Python: load_model(checkpoint=), a head of more than a linear layer",
    case="a learned scale of a cosine classifier, as a scalar and as a vector",
    right="the names of the tensors in the file",
)
@pytest.mark.parametrize("scale", [torch.tensor(10.0), torch.tensor([10.0])])
def test_load_model_names_the_scale_of_a_head(tmp_path, capsys, scale):
    file = saved(made().state_dict() | {"head.scale": scale}, tmp_path / "w.pth")
    opened = load_model(NAME, checkpoint=file, **SMALL)
    assert class_count(opened) == 0
    assert "Left out: the head head, which has more than a linear layer (head.scale)" in (
        capsys.readouterr().err
    )


@form(
    6,
    door="Python: load_model(checkpoint=), a damaged byte",
    case="one changed byte in the middle of a file of torch.save",
    right="the checksum in the ZIP archive",
)
def test_load_model_warns_about_a_changed_byte(tmp_path, capsys):
    file = saved(made().state_dict(), tmp_path / "w.pth")
    load_model(NAME, checkpoint=file, **SMALL)
    assert "checksums" not in capsys.readouterr().err
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    load_model(NAME, checkpoint=file, **SMALL)
    assert "1 parts of" in capsys.readouterr().err


@form(
    8,
    door="Python: load_model(checkpoint=), tensors that hold no usable values",
    case="meta, complex, weight_norm, pruned, a list of weights, numbers for names, an empty dictionary",
    right="how the file was made",
)
def test_unusable_tensors_are_named(tmp_path):
    state = made().state_dict()
    normed, pruned = made(), made()
    nn.utils.parametrizations.weight_norm(normed.head)
    prune.l1_unstructured(pruned.blocks[0].mlp.fc1, "weight", 0.3)
    cases = (
        (
            {name: value.to("meta") for name, value in state.items()},
            "cls_token is on the meta device",
        ),
        ({name: value.to(torch.cfloat) for name, value in state.items()}, "complex numbers"),
        (normed.state_dict(), "a part from which a parametrization"),
        (pruned.state_dict(), "fc1.weight_orig is a part"),
        ({"models": [state]}, f"{len(state)} tensors are in lists"),
        ({0: state}, f"{len(state)} tensors are in lists or have numbers"),
        ({}, "holds no tensors"),
    )
    for content, words in cases:
        file = saved(content, tmp_path / "w.pth")
        refuses(words, load_model, NAME, checkpoint=file, **SMALL)


@form(
    8,
    door="Python: load_model(checkpoint=), paths that are no file",
    case="a pipe, a device, a dangling link, an address, a pickle of another program",
    right="what is at the path",
)
def test_a_checkpoint_that_is_no_file_is_named(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("gone.pth")
    (tmp_path / "w.pkl").write_bytes(pickle.dumps({"weight": [1.0]}))
    cases = (
        (tmp_path / "pipe", "a pipe or a device"),
        ("/dev/null", "a pipe or a device"),
        (tmp_path / "link", "a link to gone.pth, which is missing"),
        ("https://example.org/w.pth", "is an address. Download it"),
        (tmp_path / "w.pkl", "a pickle that torch.save did not write"),
    )
    for path, words in cases:
        refuses(words, load_model, NAME, checkpoint=path, **SMALL)
    refuses("a pipe or a device", load_model, tmp_path / "pipe")


def test_the_bundled_model_opens_without_notes(capsys):
    load_model()
    assert capsys.readouterr().err == ""


def saved_vit(folder, edit=None, dtype=torch.float32, **config):
    """A small ViT of transformers in a folder, with edited weights and settings, and the model itself."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    settings = transformers.ViTConfig(image_size=32, patch_size=16, **sizes)
    model = transformers.ViTForImageClassification(settings).to(dtype).eval()
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    if edit:
        state = edit(load_file(file))
        save_file(state, file, {"format": "pt"})
    if config:
        stated = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(stated | config))
    return model


FOLDERS = (
    ({"edit": lambda state: {k: v.to(torch.int8) for k, v in state.items()}}, "holds integers"),
    ({"edit": lambda state: {k: v.to(torch.float8_e4m3fn) for k, v in state.items()}}, "quantized"),
    ({"image_size": 48}, r"position_embeddings has the shape \(1, 5, 16\)"),
    ({"id2label": {str(n): str(n) for n in range(7)}}, r"\(2,\), and the settings describe \(7,"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config in its config.json"),
)


@form(
    6,
    door="Python: load_model(FOLDER) of transformers",
    case="integer and 8-bit floats, another image size, other classes, a quantization in config.json",
    right="the tensors and settings of the folder",
)
@pytest.mark.parametrize("changes, words", FOLDERS)
def test_folder_of_transformers_with_other_values_is_refused(tmp_path, changes, words):
    saved_vit(tmp_path, **changes)
    refuses(words, load_model, tmp_path)


@form(
    6,
    door="Python: load_model(FOLDER) of transformers, precision",
    case="float16 weights for a float32 model, a float16 model, NaN",
    right="the dtypes and values in the file",
)
def test_folder_of_transformers_names_its_precision(tmp_path, capsys):
    saved_vit(tmp_path / "file", lambda state: {k: v.half() for k, v in state.items()})
    load_model(tmp_path / "file")
    assert (
        "weights are float16. The model computes with them in float32." in capsys.readouterr().err
    )
    saved_vit(tmp_path / "half", dtype=torch.float16)
    load_model(tmp_path / "half")
    assert "The model computes in float16." in capsys.readouterr().err
    saved_vit(tmp_path / "nan", lambda state: {k: v * torch.nan for k, v in state.items()})
    load_model(tmp_path / "nan")
    assert "values that are not finite" in capsys.readouterr().err


@form(
    6,
    door="Python: load_model(FOLDER), a library that changes values",
    case="from_pretrained returns a weight of other values",
    right="the tensors of the folder",
)
def test_values_that_transformers_changes_are_named(tmp_path, monkeypatch):
    kind = type(saved_vit(tmp_path))
    original = kind.from_pretrained

    def changed(*args, **kwargs):
        model, info = original(*args, **kwargs)
        with torch.no_grad():
            model.classifier.weight.mul_(1.01)
        return model, info

    monkeypatch.setattr(kind, "from_pretrained", changed)
    refuses("1 weights of .* such as classifier.weight", load_model, tmp_path)


@form(
    8,
    door="Python: load_model(FOLDER) of transformers, files without weights",
    case="half a file, an LFS pointer, weights of another name, an adapter beside the model",
    right="the files in the folder",
)
def test_folder_of_transformers_names_the_cause(tmp_path):
    saved_vit(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    (tmp_path / "adapter_config.json").write_text("{}")
    refuses("an adapter .* beside the model", load_model, tmp_path)
    (tmp_path / "adapter_config.json").unlink()
    file.write_bytes(whole[:4000])
    refuses("ends after 4,000 bytes", load_model, tmp_path)
    file.write_bytes(POINTER)
    refuses("pointer of Git LFS", load_model, tmp_path)
    file.rename(tmp_path / "pytorch_model.bin")
    refuses("has no model.safetensors", load_model, tmp_path)


@form(
    6,
    door="Python: load_model(FOLDER) of timm, values",
    case="integers and NaN in model.safetensors",
    right="the tensors of the folder",
)
def test_folder_of_timm_names_unusable_values(tmp_path, capsys):
    state = made().state_dict()
    config = {"architecture": NAME, "num_classes": 5, "pretrained_cfg": {}, "model_args": SMALL}
    (tmp_path / "config.json").write_text(json.dumps(config))
    file = tmp_path / "model.safetensors"
    save_file({name: value * torch.nan for name, value in state.items()}, file)
    load_model(tmp_path)
    assert "values that are not finite" in capsys.readouterr().err
    save_file({name: value.to(torch.int8) for name, value in state.items()}, file)
    refuses("holds integers", load_model, tmp_path)


@form(
    8,
    door="Python: load_model(torchvision:NAME, checkpoint=), another depth and width",
    case="a smaller ViT of torchvision, an unknown architecture of open_clip, an empty path",
    right="the model that was saved",
)
def test_a_checkpoint_of_torchvision_names_its_depth(tmp_path):
    small = torchvision.models.VisionTransformer(32, 16, 2, 2, 16, 32, num_classes=3)
    file = saved(small.state_dict(), tmp_path / "w.pth")
    words = "heads. The file has 2 layers, and .*vit_b_16 has 12"
    refuses(words, load_model, "torchvision:vit_b_16", checkpoint=file)
    words = "open_clip has no architecture 'ViT-B-33'. Did you mean ViT-B-32"
    refuses(words, load_model, "open_clip:ViT-B-33", checkpoint=file)
    refuses("--checkpoint. is empty", load_model, NAME, checkpoint="")


@form(
    6,
    door="Python: load_model(open_clip:local-dir:FOLDER)",
    case="float16, NaN, integers, an LFS pointer, no weights",
    right="the tensors in the folder",
)
def test_folder_of_open_clip_names_its_values(tmp_path, capsys, monkeypatch):
    open_clip = pytest.importorskip("open_clip")
    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, "tiny-clip", CLIP)
    state = open_clip.create_model("tiny-clip").state_dict()
    config = {"model_cfg": CLIP, "preprocess_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    name = f"open_clip:local-dir:{tmp_path}"
    file = tmp_path / "open_clip_model.safetensors"
    refuses("no file of weights", load_model, name)
    save_file({key: value.half() for key, value in state.items()}, file)
    load_model(name)
    assert "weights are float16" in capsys.readouterr().err
    save_file({key: value * torch.nan for key, value in state.items()}, file)
    load_model(name)
    assert "values that are not finite" in capsys.readouterr().err
    save_file({key: value.to(torch.int8) for key, value in state.items()}, file)
    refuses("integers", load_model, name)
    file.write_bytes(POINTER)
    refuses("pointer of Git LFS", load_model, name)
