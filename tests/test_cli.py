"""The command line: files written, sentences on standard error, exit codes."""

import dataclasses
import gc
import importlib.metadata
import json
import re
import shutil
import socket
import subprocess
import sys
from inspect import signature
from unittest import mock

import numpy as np
import pandas as pd
import pytest
import timm
import torch
import typer
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from safetensors.torch import load_file, save_file
from support import encoded, parquet, saved_model, vitlens

from vitlens import (
    attention,
    attribution,
    capture,
    cli,
    faithfulness,
    files,
    filters,
    load_model,
    positions,
    report,
    stream,
)
from vitlens.data import load
from vitlens.data.augment import Augment
from vitlens.images import samples
from vitlens.models import preprocess
from vitlens.train.model import VARIANTS
from vitlens.train.recipes import FROM_MODEL, RECIPES, Recipe
from vitlens_paper.evaluate import PROTOCOLS


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return saved_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photographs")
    for name in ("chelsea", "coffee", "rocket"):
        samples()[name].save(folder / f"{name}.png")
    return folder


def summary_in(folder):
    return json.loads((folder / "summary.json").read_text())


VERSION = f"vitlens {importlib.metadata.version('vitlens')}\n"


@pytest.mark.parametrize(
    "words, code, text", [("--version", 0, VERSION), ("inspect --nothing", 2, "--help`")]
)
def test_main_keeps_output_and_exit_code(words, code, text):
    done = subprocess.run(
        [sys.executable, "-m", "vitlens", *words.split()], capture_output=True, text=True
    )
    assert done.returncode == code and text in done.stdout + done.stderr


def test_importing_pauses_the_garbage_collector(monkeypatch):
    with pytest.raises(ImportError), cli.importing():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled() and gc.get_freeze_count() == 0
    monkeypatch.delitem(sys.modules, "torch")
    with cli.importing():
        pass
    assert gc.isenabled() and gc.get_freeze_count() > 0
    gc.unfreeze()


def test_inspect_writes_figures_and_numbers(model_folder, photographs, tmp_path):
    out, paths = tmp_path / "new" / "figures", sorted(photographs.iterdir())
    done = vitlens("inspect", model_folder, *paths, "--out", out)
    names = {
        "summary.json",
        "inspection.png",
        "distance.png",
        "filters.png",
        "positions.png",
        "rollout.png",
    }
    assert {p.name for p in out.iterdir()} == names and all(
        str(out / n) in done.stdout for n in names
    )
    assert all(np.asarray(Image.open(png)).std() > 5 for png in out.glob("*.png"))
    assert Image.open(out / "distance.png").size == (
        1280,
        840,
    )  # twice the 640 × 420 pixels that a page has for it
    summary, model = summary_in(out), load_model(model_folder)
    with torch.no_grad(), capture(model) as attn:
        logits = model(preprocess(model, [str(p) for p in paths]))
    expected = attention.summary(attn)
    distance = expected.mean_distance.mean(0)
    np.testing.assert_allclose(summary["mean_distance"], distance, rtol=1e-4)
    assert (summary["layers"], summary["heads"]) == (2, 3)
    assert (summary["grid"]["rows"], summary["grid"]["cols"], summary["grid"]["prefix"]) == (
        4,
        4,
        1,
    )
    assert summary["uniform_distance"] == pytest.approx(attn.grid.uniform_distance())
    np.testing.assert_allclose(
        summary["explained_variance"], filters.principal(model)[1], rtol=1e-5
    )
    rank = positions.rank_correlation(positions.similarity(model))
    assert summary["position_rank_correlation"] == pytest.approx(rank)
    assert summary["filter_variance"] == pytest.approx(filters.principal(model)[1].sum().item())
    layer, head = summary["nearest_head_at"]
    assert distance[layer, head] == distance.min()
    assert summary["nearest_head"] == pytest.approx(
        distance.min().item() / attn.grid.uniform_distance(), rel=1e-4
    )
    top = (
        expected.rollout.flatten(1).sort(descending=True).values
    )  # a tenth of 16 patches: 1.6 of them
    top = (top[:, 0] + 0.6 * top[:, 1]) / top.sum(1)
    assert summary["rollout_contrast"] == pytest.approx(10 * top.mean().item(), rel=1e-4)
    for words in (
        f"{rank:.2f}".replace("-", "−"),
        f"(layer {layer}, head {head})",
        f"holds {top.mean():.1%}",
    ):
        assert words in done.stdout
    for i, entry in enumerate(summary["images"]):
        np.testing.assert_allclose(entry["rollout"], expected.rollout[i], rtol=1e-4)
        assert (
            entry["top5"][0]["class"] == str(logits[i].argmax().item()) and len(entry["top5"]) == 5
        )


def test_inspect_writes_contributions_of_heads(model_folder, photographs, tmp_path):
    paths = [photographs / "coffee.png", photographs / "chelsea.png"]
    done = vitlens("inspect", model_folder, *paths, "--heads", "--out", tmp_path / "out")
    assert str(tmp_path / "out" / "heads.png") in done.stdout
    table, model = pd.read_csv(tmp_path / "out" / "heads.csv"), load_model(model_folder)
    x = preprocess(model, [str(p) for p in paths])
    contributions = stream.contributions(model, x)
    assert table["part"].tolist() == contributions.names * 2
    np.testing.assert_allclose(table["added"], contributions.parts.flatten(), rtol=1e-3, atol=1e-5)
    logits = table.groupby("image", sort=False)["logit"].first()
    np.testing.assert_allclose(logits, model(x).amax(1).detach(), rtol=1e-4)
    assert np.asarray(Image.open(tmp_path / "out" / "heads.png")).std() > 5


def test_inspect_beside_another_model_with_a_data_set_and_damaged_images(
    model_folder, photographs, tmp_path
):
    (tmp_path / "broken.jpg").write_text("nonsense")
    Image.new("RGB", (4000, 20)).save(tmp_path / "strip.png")
    paths = [photographs / "coffee.png", tmp_path / "broken.jpg", tmp_path / "strip.png"]
    other, out = saved_model(tmp_path / "other", "vit_relpos_small_patch16_224"), tmp_path / "out"
    done = vitlens(
        "inspect",
        model_folder,
        *paths,
        "--beside",
        other,
        "--data",
        photographs,
        "--out",
        out,
        expect=1,
    )
    assert done.stderr.count("broken.jpg") == done.stderr.count("strip.png") == 1
    both, summary = json.loads((out / "beside.json").read_text()), summary_in(out)
    assert both[model_folder.name] == summary
    assert [entry["image"] for entry in summary["images"]] == ["coffee.png"]
    assert summary["images_in_mean_distance"] == 3
    assert (
        all(heading in done.stdout for heading in both)
        and "no table of learned position" in done.stdout
    )
    assert np.asarray(Image.open(out / "beside.png")).std() > 5


def test_inspect_calls_models_of_one_architecture_by_their_folders(
    model_folder, photographs, tmp_path, monkeypatch
):
    headings, again = [], saved_model(tmp_path / "again", num_classes=11)
    monkeypatch.setattr(report, "write_inspection", lambda *_: [])
    monkeypatch.setattr(
        report, "write_beside", lambda inspections, *_: headings.extend(inspections) or []
    )
    vitlens(
        "inspect",
        model_folder,
        photographs / "coffee.png",
        "--beside",
        again,
        "--out",
        tmp_path / "out",
    )
    assert headings == [model_folder.name, "again"]
    headings.clear()
    other = saved_model(tmp_path / "b" / "again", num_classes=12)
    vitlens(
        "inspect", again, photographs / "coffee.png", "--beside", other, "--out", tmp_path / "out"
    )
    assert headings == [str(again), str(other)]
    headings.clear()
    weights = tmp_path / "weights"
    weights.mkdir()
    changed = load_file(other / "model.safetensors")
    prefixed = {f"module.{key}": value + 0.01 for key, value in changed.items()}
    torch.save({"state_dict": prefixed}, weights / "last.pth")
    vitlens("inspect", other, photographs / "coffee.png", "--beside", weights, "--out", tmp_path)
    assert headings[1] == f"{other.name}, weights"


def test_inspect_takes_a_folder_in_natural_order_and_names_other_files_once(
    model_folder, photographs, tmp_path
):
    for name in ("10", "9", "a/2"):
        (tmp_path / "photos" / name).parent.mkdir(exist_ok=True, parents=True)
        shutil.copy(photographs / "coffee.png", tmp_path / "photos" / f"{name}.png")
    Image.new("RGB", (1546, 200)).save(tmp_path / "photos" / "panorama.png")
    (tmp_path / "photos" / "notes.txt").write_text("x")
    (tmp_path / "photos" / ".hidden.png").write_text("x")
    done = vitlens("inspect", model_folder, tmp_path / "photos", "--out", tmp_path / "out")
    summary = summary_in(tmp_path / "out")
    assert [entry["image"] for entry in summary["images"]] == [
        "9.png",
        "10.png",
        "2.png",
        "panorama.png",
    ]
    assert (
        done.stderr.count("1 of 5 files in") == done.stderr.count("are not images: notes.txt.") == 1
    )
    (note,) = (note for note in summary["notes"] if "panorama.png" in note)
    assert "the model sees the middle 13% of it" in note and done.stdout.count(note) == 1


@pytest.mark.slow
def test_commands_without_a_model_use_the_bundled_one(
    model_folder, photographs, tmp_path, monkeypatch
):
    monkeypatch.setattr("vitlens.models.opening.BUNDLED_FOLDERS", [model_folder])
    for arguments, images in (
        ([photographs / "rocket.png"], 1),
        ([photographs], 3),
        ([], len(samples())),
    ):
        done = vitlens("inspect", *arguments, "--out", tmp_path)
        assert "the bundled one is used" in done.stderr and "\nbundled\n" in done.stdout
        assert len(summary_in(tmp_path)["images"]) == images
    served = []
    monkeypatch.setattr(
        "vitlens_explorer.app.serve",
        lambda *arguments, **options: served.append((arguments, options)),
    )
    vitlens("app", photographs)
    vitlens(
        "app",
        model_folder,
        photographs / "rocket.png",
        "--checkpoint",
        model_folder / "model.safetensors",
    )
    assert [arguments for arguments, _ in served] == [
        (None, photographs / "chelsea.png"),
        (str(model_folder), photographs / "rocket.png"),
    ]
    assert served[1][1]["checkpoint"] == model_folder / "model.safetensors"
    monkeypatch.setattr("vitlens.models.opening.BUNDLED_FOLDERS", [tmp_path / "absent"])
    for arguments in ([photographs / "rocket.png"], []):
        done = vitlens("inspect", *arguments, "--out", tmp_path, expect=2)
        assert "such as vit_tiny_patch16_224" in done.stderr.splitlines()[-1]


def test_model_and_images_distinguish_models_from_folders_of_images(
    model_folder, photographs, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    labeled = tmp_path / "labeled"
    shutil.copytree(photographs, labeled / "cats")
    assert cli.model_and_images(str(labeled), None) == (None, [labeled])
    for name in ("config.json", "adapter_config.json", "model.safetensors", "recipe.json"):
        shutil.copytree(photographs, folder := tmp_path / f"with {name}")
        (folder / name).touch()
        assert cli.model_and_images(str(folder), None) == (str(folder), [])
    shutil.copytree(photographs, "vit_small_patch16_224")
    with pytest.raises(typer.BadParameter, match="Write ./vit_small_patch16_224 for images"):
        cli.model_and_images("vit_small_patch16_224", None)
    assert cli.model_and_images("./vit_small_patch16_224", None)[0] is None


def test_inspect_opens_a_checkpoint_by_the_name_of_its_model(photographs, tmp_path):
    torch.save(timm.create_model("test_vit").state_dict(), tmp_path / "mine.pth")
    arguments = (
        "test_vit",
        photographs / "coffee.png",
        "--checkpoint",
        tmp_path / "mine.pth",
        "--out",
        tmp_path,
    )
    assert "\ntest_vit, mine.pth\n" in vitlens("inspect", *arguments).stdout
    assert summary_in(tmp_path)["model"] == "test_vit, mine.pth"


def test_inspect_shows_validation_images_of_a_run(tmp_path):
    vitlens(
        "train",
        "--recipe",
        "digits",
        "--data",
        "digits",
        "--out",
        tmp_path / "run",
        "--tiny",
        "--watch",
        0,
    )
    done = vitlens("inspect", tmp_path / "run" / "model", "--out", tmp_path / "out")
    summary, valid = summary_in(tmp_path / "out"), load("digits", "valid")
    assert (
        "6 validation images of digits are used" in done.stderr and summary["model"] == "run/model"
    )
    names = [entry["image"] for entry in summary["images"]]
    assert len(names) == 6 and all(name[-1] in valid.class_names for name in names)
    shown = cli.run_images(tmp_path / "run" / "model")
    pixels = np.stack([np.asarray(image) for _, image in shown])
    first = [valid.labels.tolist().index(label) for label in valid.labels.unique()]
    held = valid.select_rows(torch.tensor(sorted(first)[:6]))
    assert len(set(held.labels.tolist())) == 6
    assert np.array_equal(pixels, held.images.permute(0, 2, 3, 1)) and names == [
        name for name, _ in shown
    ]
    assert [int(name[-1]) for name in names] == held.labels.tolist()


def test_inspect_notes_missing_figures(tmp_path):
    for name, options, note, lacks in (
        ("vit_tiny_patch16_224", {"num_classes": 0}, "no classifier", {"top5"}),
        (
            "vit_tiny_patch16_224",
            {"global_pool": ""},
            "classifies every token",
            {"top5", "rollout"},
        ),
        ("vit_tiny_patch16_224", {"global_pool": "max"}, "no rollout", {"rollout"}),
        ("vit_tiny_patch16_224", {"pos_embed": "none"}, "has no ", set()),
        (
            "naflexvit_base_patch16_gap",
            {"attn_gated": True, "rope_type": "axial"},
            "gate, which the rollout",
            set(),
        ),
    ):
        model = load_model(saved_model(tmp_path / "model", name, **options))
        inspection = report.inspect(model, list(samples().items())[:1])
        numbers = inspection.to_dict()
        assert any(note in words for words in numbers["notes"])
        assert {part for part in ("top5", "rollout") if not numbers["images"][0][part]} == lacks
        if note in ("no rollout", "has no "):
            for figure in ("positions", "rollout"):  # left by another model
                mark = PngInfo()
                mark.add_text("Software", files.MARK)
                Image.new("L", (1, 1)).save(tmp_path / f"{figure}.png", pnginfo=mark)
            report.write_inspection(inspection, tmp_path)
            assert (tmp_path / "rollout.png").exists() == ("rollout" not in lacks)
            assert (tmp_path / "positions.png").exists() == (options.get("pos_embed") != "none")
    single = report.inspect(
        load_model(saved_model(tmp_path / "one", patch_size=32)), list(samples().items())[:1]
    )
    assert (
        "too few positions" in single.sentences["positions"]
        and single.sentences["distance"] == "a single patch"
    )


def test_explain_writes_figures_and_a_table(model_folder, photographs, tmp_path):
    (tmp_path / "broken.png").write_text("no image")
    files = [photographs / "chelsea.png", tmp_path / "broken.png", photographs / "coffee.png"]
    out, options = (
        tmp_path / "out",
        ("--target", 3, "--against", 1, "--methods", "relevance, rollout"),
    )
    scoring = "--scores", "--orders", 2, "--baseline", "zero"
    done = vitlens("explain", model_folder, *files, *options, *scoring, "--out", out, expect=1)
    assert "broken.png" in done.stderr and "forward" in done.stderr
    lines = done.stdout.splitlines()
    assert lines[::2] == [
        str(out / name) for name in ("00-chelsea.png", "01-coffee.png", "scores.csv")
    ]
    assert Image.open(out / "00-chelsea.png").width > 900
    rows = pd.read_csv(out / "scores.csv")
    for line, (_, row) in zip(lines[1::2], rows[::2].iterrows(), strict=True):
        share, other = f"{row.target_score:.1%}", f"{row.predicted_score:.1%}"
        beside = f" The model predicts “{row.predicted}” ({other})."
        beside = "" if row.predicted == row.target else beside
        assert line == f"  Why “3” ({share}) rather than “1”?{beside}"
    assert rows["method"].tolist() == 2 * ["relevance", "rollout"]
    assert rows["image"].unique().tolist() == ["chelsea.png", "coffee.png"]
    about = rows[["target", "against", "baseline", "steps"]].drop_duplicates()
    assert about.values.tolist() == [[3, 1, "zero", 8]]
    model = load_model(model_folder)
    x = preprocess(model, photographs / "chelsea.png")
    maps = attribution.relevance(model, x, 3, against=1)
    curves = faithfulness.curves(model, x, maps, 3, against=1, baseline="zero", step=2)
    assert rows["deletion"][0] == pytest.approx(curves.deletion_area.item(), rel=1e-4)
    scored = (out / "00-chelsea.png").read_bytes()
    done = vitlens("explain", model_folder, *files[::2], *options, "--out", out)
    assert done.stdout.splitlines()[::2] == [
        str(out / name) for name in ("00-chelsea.png", "01-coffee.png")
    ]
    assert "removed scores.csv" in done.stderr and not (out / "scores.csv").exists()
    assert (out / "00-chelsea.png").read_bytes() != scored


def test_commands_write_figures_in_another_format(model_folder, photographs, tmp_path):
    image, out = photographs / "coffee.png", tmp_path / "out"
    options = "--format", "svg", "--methods", "rollout", "--out", out
    done = vitlens("explain", model_folder, image, *options)
    assert done.stdout.splitlines()[0] == str(out / "00-coffee.svg")
    done = vitlens("inspect", model_folder, image, "--heads", "--format", "pdf", "--out", out)
    names = [line for line in done.stdout.splitlines() if line.startswith(str(out))]
    figures = [name for name in names if not name.endswith((".json", ".csv"))]
    assert len(figures) == 6 and all(name.endswith(".pdf") for name in figures)
    assert not list(out.glob("*.png"))


def test_explain_keeps_finished_maps_when_interrupted(
    model_folder, photographs, tmp_path, monkeypatch
):
    """Ctrl-C during the second map, and during the scores of the second image."""
    files = photographs / "coffee.png", photographs / "chelsea.png"
    figures = ["00-coffee.png", "01-chelsea.png"]

    def interrupted(module, name, at):
        calls, function = [], getattr(module, name)

        def call(*arguments, **options):
            calls.append(1)
            if len(calls) == at:
                raise KeyboardInterrupt
            return function(*arguments, **options)

        return mock.patch.object(module, name, call)

    for module, name, at, options, names in (
        (faithfulness, "Curves", 7, ("--scores", "--orders", 2), [*figures, "scores.csv"]),
        (report, "Explanation", 2, (), figures[:1]),
    ):
        out = tmp_path / name
        with interrupted(module, name, at):
            done = vitlens(
                "explain",
                model_folder,
                *files,
                "--methods",
                "rollout",
                *options,
                "--out",
                out,
                expect=130,
            )
        lines = done.stdout.splitlines()
        assert lines[::2] == [str(out / name) for name in names if name.endswith("png")]
        assert all(line.startswith("  Why “") for line in lines[1::2])
        assert "vitlens: stopped; the maps of" in done.stderr and str(out) in done.stderr
        assert sorted(path.name for path in out.iterdir()) == names
        if options:
            assert pd.read_csv(out / "scores.csv")["image"].tolist() == ["coffee.png"]
            assert "the maps of 2 of 2 images and the scores so far" in done.stderr


def test_train_passes_every_option(monkeypatch, tmp_path):
    passed = {}
    monkeypatch.setattr(
        "vitlens.train.runs.run",
        lambda *args, **options: passed.update(options, args=args) or {"stopped_by": 0},
    )
    vitlens(
        "train",
        "--recipe",
        "digits",
        "--data",
        "torch/mnist",
        "--out",
        tmp_path,
        "--root",
        tmp_path / "sets",
        "--stream",
        "--workers",
        3,
        "--image-key",
        "left",
        "--label-key",
        "kind",
        "--model",
        "m",
        "--resume",
        "--max-minutes",
        4,
        "--set",
        "lr=1",
        "--set",
        "clip=2",
        "--device",
        "cpu",
        "--seed",
        6,
        "--deterministic",
        "--watch",
        7,
        "--export",
        "--tiny",
    )
    assert passed == {
        "args": ("digits", "torch/mnist", tmp_path),
        "root": tmp_path / "sets",
        "stream": True,
        "workers": 3,
        "image_key": "left",
        "label_key": "kind",
        "model": "m",
        "resume": True,
        "max_minutes": 4.0,
        "overrides": ["lr=1", "clip=2", "deterministic=true"],
        "device": "cpu",
        "seed": 6,
        "watch": 7,
        "export": True,
        "tiny": True,
    }
    monkeypatch.setattr("vitlens.train.runs.run", lambda *_, **__: {"stopped_by": 15})
    vitlens("train", "--recipe", "digits", "--data", "d", "--out", tmp_path, expect=143)


def test_train_lists_every_setting(tmp_path):
    for name in ("digits", "vit-l16-imagenet21k", "finetune-small"):
        lines, recipe = (
            vitlens("train", "--list", "--recipe", name).stdout.splitlines(),
            RECIPES[name],
        )
        fields = {f.name for f in dataclasses.fields(Recipe)} - {"augment"}
        fields |= {f"augment.{f.name}" for f in dataclasses.fields(Augment)}
        variants = {f"model.{name}" for row in VARIANTS.values() for name in row.values}
        of_model = {*FROM_MODEL, "model_kwargs"} if recipe.continues else set()
        fields |= set() if recipe.continues else variants
        assert {line.partition("=")[0] for line in lines} == fields - of_model
        settings = [line.split()[0] for line in lines if not line.startswith("model_kwargs")]
        assert recipe.override(*settings) == recipe
    (tmp_path / "mine.json").write_text(recipe.to_json())
    assert (
        vitlens("train", "--list", "--recipe", tmp_path / "mine.json").stdout.splitlines() == lines
    )
    changed = vitlens("train", "--list", "--recipe", name, "--set", "augment.flip=0.125").stdout
    assert "augment.flip=0.125 " in changed


def test_paper_models_and_compute(tmp_path):
    shown = vitlens("paper", "models", "l/16").stdout
    assert (
        "ViT-L/16" in shown and "304.3 M" in shown and "vit_large_patch16_224.augreg_in21k" in shown
    )
    out = tmp_path / "new" / "counts.csv"
    done = vitlens(
        "paper",
        "compute",
        "ViT-B/16",
        "ViT-B/32",
        "torchvision:vit_b_32",
        "--sizes",
        224,
        "--out",
        out,
    )
    rows = pd.read_csv(out).set_index("model")
    assert rows["parameters"]["ViT-B/16"] == 86_567_656 and "35.1" in done.stdout  # GFLOPs
    assert rows["flops"]["torchvision:vit_b_32"] == pytest.approx(
        rows["flops"]["ViT-B/32"], rel=1e-3
    )


REFUSED = [
    ("evaluate", "argument 'model'"),
    ("ablate MODEL --out OUT/a.csv", "--data"),
    ("audit MODEL --out OUT/a", "--data"),
    ("audit MODEL --data nowhere --out OUT/a", "nowhere"),
    ("audit MODEL --data digits --out FILE/a", "give another --out"),
    ("trian", "No such command 'trian'"),
    ("inspect MODEL --nonsense", "No such option"),
    ("inspect nonsense_model", "has no model called nonsense_model|no model of that name"),
    ("inspect MODEL missing.png", "missing.png"),
    ("inspect MODEL MODEL/config.json", "config.json"),
    ("inspect MODEL MODEL", "holds no images"),
    ("inspect MODEL --data nowhere", "nowhere"),
    ("inspect MODEL --data MODEL", "holds no images"),
    ("inspect MODEL/model.safetensors --checkpoint missing.pth", "missing.pth"),
    ("inspect vit_tiny_patch16_224 --checkpoint MODEL/model.safetensors", "patches of 8 × 8"),
    ("inspect FILE", "--checkpoint"),
    ("inspect nomodel.safetensors", "nomodel.safetensors does not exist. Check the path."),
    ("inspect NAN/none/nomodel.pth", "NAN/none/nomodel.pth does not exist. Check the path."),
    ("explain nomodel.npz", "nomodel.npz does not exist. Check the path."),
    ("inspect MODEL --beside missing.bin", "missing.bin does not exist. Check the path."),
    ("inspect missing.jpg", "missing.jpg does not exist. Check the path of the image"),
    ("inspect some/model", "'some/model' matches no file or folder"),
    ("explain MODEL --methods chefer", "Did you mean relevance?"),
    ("train --recipe finetune-smal --data digits --out OUT", "Did you mean finetune-small?"),
    ("train --resume", "needs --out"),
    ("train --resume --out OUT", "no run to resume"),
    (
        "evaluate MODEL --data digits --protocol finetune --checkpoint FILE",
        "trains from a timm name",
    ),
    ("inspect MODEL --device abacus", "'abacus'"),
    ("inspect MODEL --device meta", "'meta'"),
    ("inspect MODEL/..", "has no config.json"),
    ("inspect MODEL --beside MODEL/", "Name another one after --beside"),
    ("inspect MODEL --beside nonsense_model", "nonsense_model"),
    ("inspect MODEL --out FILE", "FILE"),
    ("inspect nonsense_model --out FILE/out", "give another --out"),
    ("inspect NAN", "not finite"),
    ("explain nonsense_model --out FILE/out", "give another --out"),
    ("explain nonsense_model --methods relevanz", "one of relevance, gradient_"),
    ("explain MODEL IMAGE --target 10", "has classes 0 to 9, got 10"),
    ("explain MODEL IMAGE --target tabby", "no class called 'tabby'"),
    ("explain MODEL IMAGE --target 3 --against 3", "contrasted with itself"),
    ("explain MODEL --target 3 --text cat", "--target, --like and --text"),
    ("explain MODEL --text a --text b --against c", "Give --text twice"),
    ("explain MODEL --like missing.png", "missing.png"),
    ("explain MODEL --baseline gray", "must be one of mean, blur, zero, got 'gray'"),
    (
        "inspect nonsense_model --format pgn",
        "got 'pgn'. Did you mean png? It must be one of png, pdf, svg",
    ),
    ("explain MODEL --scores --baseline blurr", "Did you mean blur?"),
    ("page MODEL --outputs independant", "Did you mean independent?"),
    ("evaluate MODEL --data digits --protocol top2", "Did you mean top1?"),
    ("evaluate MODEL --data digits --classes naturl", "Did you mean natural?"),
    ("ablate MODEL --data digits --out OUT/a.csv --ways zeros", "Did you mean zero?"),
    ("inspect MODEL --device cdua", "Did you mean cuda?"),
    ("train --recipe digits --data digits --out OUT --device gpu", "Did you mean cuda?"),
    ("explain MODEL --scores --orders -1", "--orders"),
    ("explain nonsense_model --orders 9", "Give --orders only with --scores"),
    ("explain nonsense_model --baseline blur", "Give --baseline only with --scores"),
    ("explain nonsense_model --device tpu", "The device 'tpu' does not work here"),
    ("app MODEL missing.png", "missing.png"),
    ("app MODEL --port 70000", "--port"),
    ("app MODEL --port TAKEN --no-browser", "TAKEN"),
    ("train --recipe digits", "needs --data"),
    ("train --recipe x --data digits --out OUT", "got 'x'"),
    ("train --recipe digits --data digits --out FILE/out", "FILE/out"),
    ("train --max-minutes soon", "--max-minutes"),
    ("train --epoch 3", "No such option: --epoch. Write --set epochs=3; see"),
    ("train --fp16", "No such option: --fp16. Write --set precision=fp16; see"),
    ("train --half", "Write --set precision=fp16; see"),
    ("train --bf16=1", "Write --set precision=bf16; see"),
    ("train --amp", "Write --set precision=auto, the default; see"),
    ("train --mixed-precision fp16", "Write --set precision=fp16; see"),
    ("train --mixed-precision --tiny", "Write --set precision=auto, the default; see"),
    ("train --mixed-precision=no", "Write --set precision=fp32; see"),
    ("train --precision bf16-mixed", "Write --set precision=bf16; see"),
    ("train --fp32", "Write --set precision=fp32; see"),
    ("train --no-amp", "Write --set precision=fp32; see"),
    ("train --tf32", "Write --set tf32=true; see"),
    ("train --batch-size 64", "Write --set batch_size=64; see"),
    ("train --batch-size=64", "Write --set batch_size=64; see"),
    ("train --batch-size", "Write --set batch_size=VALUE; see"),
    ("train -b 64", "Write --set batch_size=64; see"),
    ("train --lr 0.1", "Write --set lr=0.1; see"),
    ("train --learning-rate 1e-3", "Write --set lr=1e-3; see"),
    ("train --epochs 3", "Write --set epochs=3; see"),
    ("train --gradient-accumulation-steps 4", "Write --set accumulate=4; see"),
    ("train --mixup 0.2", "Write --set augment.mixup=0.2; see"),
    ("train --augment.flip 0", "Write --set augment.flip=0; see"),
    ("train --no-compile", "Write --set compile=off; see"),
    ("train --output-dir x", "Write --out DIRECTORY; see"),
    ("train --gpus 2", "Write torchrun --nproc-per-node GPUS -m vitlens train; see"),
    ("train --gibberish 2", "No such option: --gibberish"),
    ("train --recipe digits --data digits --out OUT --device cuda:99", "The device 'cuda:99'"),
    ("train --recipe digits --data digits --out OUT --device 0", "Did you mean cuda?"),
    ("evaluate MODEL --protocol best", "best"),
    ("evaluate MODEL --protocol fewshot --data digits --shots 1,many", "1,many"),
    ("evaluate MODEL --data digits --out FILE/a.json", "give another --out"),
    ("ablate MODEL --data digits --out OUT/a.csv --ways half", "half"),
    ("paper models nonsense", "nonsense"),
    ("paper models L/16 more", "more"),
    ("paper table missing.json", "missing.json"),
    ("paper compute no_such_model", "no_such_model"),
    ("paper compute test_vit --sizes 64,8", "8 × 8"),
    ("paper compute test_vit --sizes 0", "0"),
]
"""Command lines, and words of their error line."""


DAMAGED = re.compile(r"Warning: \d+ tensors hold values that are not finite")
"""Warning that comes before the error of a model whose weights are NaN."""


@pytest.mark.parametrize("command", ["inspect", "explain", "train", "other"])
def test_commands_refuse_wrong_options_in_one_line(model_folder, photographs, tmp_path, command):
    (tmp_path / "file").write_text("mine")
    weights = load_file(saved_model(nan := tmp_path / "nan") / "model.safetensors")
    save_file({k: v * float("nan") for k, v in weights.items()}, nan / "model.safetensors")
    rows = [
        row
        for row in REFUSED
        if (kind := row[0].split()[0]) == command
        or command == "other"
        and kind not in ("inspect", "explain", "train")
    ]
    assert len(rows) > 4
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        places = {
            "MODEL": model_folder,
            "OUT": tmp_path / "out",
            "FILE": tmp_path / "file",
            "NAN": nan,
            "IMAGE": photographs / "coffee.png",
            "TAKEN": other.getsockname()[1],
        }
        for arguments, words in rows:
            for name, place in places.items():
                arguments, words = (
                    arguments.replace(name, str(place)),
                    words.replace(name, str(place)),
                )
            if arguments.startswith(("inspect", "explain")) and "--out" not in arguments:
                arguments += f" --out {tmp_path / 'out'}"
            done = vitlens(*arguments.split(), expect=2)
            assert any(word.lower() in done.stderr.lower() for word in words.split("|")), (
                done.stderr
            )
            *warnings, message = done.stderr.strip().splitlines()
            assert message.startswith("vitlens: ")
            assert [line for line in warnings if not DAMAGED.match(line)] == []
            assert not (tmp_path / "out").exists() or arguments.startswith("ablate")
            shutil.rmtree(tmp_path / "out", ignore_errors=True)


def test_commands_end_with_one_line_after_errors(monkeypatch, tmp_path):
    for error, code, words in (
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 2, "Memory ran out"),
        (KeyboardInterrupt(), 130, "vitlens: stopped."),
        (ChildProcessError("The worker has ended."), 2, "The worker has ended."),
        (FloatingPointError("The loss is nan."), 2, "The loss is nan."),
    ):
        monkeypatch.setattr("vitlens.train.runs.run", mock.Mock(side_effect=error))
        done = vitlens(
            "train", "--recipe", "digits", "--data", "digits", "--out", tmp_path, expect=code
        )
        assert words in done.stderr and done.stderr.count("\n") == 1


def test_help_lists_the_registered_names():
    assert "train" in vitlens().stdout
    lists = {
        "explain": attribution.METHODS,
        "evaluate": PROTOCOLS,
        "train": ["digits", "torch/NAME"],
        "audit": ["digits", "torch/NAME", "--no-labels"],
    }
    for command, names in lists.items():
        shown = "".join(vitlens(command, "--help").stdout.split())
        assert all(name in shown for name in names)


def _photographs(folder):
    """Twelve images in two class folders, and a damaged one."""
    for number in range(12):
        file = folder / ("daisy" if number % 2 else "rose") / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        levels = np.random.default_rng(number).integers(0, 256, (32, 32, 3), np.uint8)
        Image.fromarray(levels).save(file)
    (folder / "rose" / "damaged.jpg").write_bytes(b"no image")
    return folder


def test_inspect_csv_equals_a_loop_over_the_images(tmp_path):
    model, photos = saved_model(tmp_path / "model"), _photographs(tmp_path / "photos")
    file = tmp_path / "heads.csv"
    options = ("--data", photos, "--csv", file, "--out", tmp_path / "out")
    done = vitlens("inspect", model, *options, expect=1)
    assert "damaged.jpg" in done.stderr and "1 of 13 images were left out." in done.stderr
    table = pd.read_csv(file)
    assert [*table] == ["image", "class", "layer", "head", "mean_distance", "entropy"]
    assert len(table) == 12 * 2 * 3 and (table["class"] == table.image.str.split("/").str[0]).all()
    opened = load_model(model)
    for name, rows in table.groupby("image"):
        with torch.no_grad(), capture(opened) as attn:
            opened(preprocess(opened, photos / name))
        distance, entropy = attention.mean_distance(attn)[0], attention.entropy(attn)[0]
        for row in rows.itertuples():
            assert row.mean_distance == pytest.approx(
                distance[row.layer, row.head].item(), rel=1e-5
            )
            assert row.entropy == pytest.approx(entropy[row.layer, row.head].item(), rel=1e-5)
    before = file.read_bytes()
    again = vitlens("inspect", model, *options, expect=2)
    assert "holds the rows of 12 images" in again.stderr and file.read_bytes() == before


def test_inspect_csv_keeps_finished_images_after_an_interrupt(tmp_path):
    model, photos = saved_model(tmp_path / "model"), _photographs(tmp_path / "photos")
    file = tmp_path / "heads.csv"
    add, calls = report.HeadTable.add, []

    def interrupted(table, rows):
        calls.append(rows)
        if len(calls) == 2:
            raise KeyboardInterrupt
        add(table, rows)

    options = ("--data", photos, "--csv", file, "--out", tmp_path / "out")
    with mock.patch.object(report.HeadTable, "add", interrupted):
        done = vitlens("inspect", model, *options, expect=130)
    assert "holds the rows of 8 of 13 images" in done.stderr
    assert pd.read_csv(file).image.nunique() == 8 and [*tmp_path.glob(".*lock")] == []


def test_inspect_csv_reads_tables(tmp_path):
    """With the names of their classes, and with the images that are named on the command line."""
    model = saved_model(tmp_path / "model")
    photo = tmp_path / "photo.png"
    Image.new("RGB", (32, 32)).save(photo)
    images = [encoded(number, size=(32, 32)) for number in range(4)]
    parquet(tmp_path / "tables" / "test.parquet", images, [0, 1, 0, 1], ["daisy", "rose"])
    file = tmp_path / "heads.csv"
    options = ("--data", tmp_path / "tables", "--csv", file, "--out", tmp_path / "out")
    vitlens("inspect", model, photo, *options)
    table = pd.read_csv(file, keep_default_na=False)
    assert table.groupby("class").image.nunique().to_dict() == {"": 1, "daisy": 2, "rose": 2}


def test_answers_to_options_of_other_programs_name_settings_and_options():
    settings = {field.name for field in dataclasses.fields(Recipe)}
    assert set(cli.SYNONYMS.values()) <= settings
    assert not settings & set(cli.SYNONYMS), "a setting's own name needs no synonym"
    precisions = {value.partition(",")[0] for value in cli.PRECISIONS.values()}
    for precision in precisions:
        assert RECIPES["digits"].override(f"precision={precision}").precision == precision
    assert RECIPES["digits"].override("compile=off").compile == "off"
    (train,) = [c for c in cli.app.registered_commands if c.callback.__name__ == "train"]
    parameters = signature(train.callback).parameters
    for answer in cli.OWN_OPTIONS.values():
        option = answer.split()[0]
        assert not option.startswith("--") or option in ("--set",) or option[2:] in parameters
