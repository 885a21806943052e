"""A study is what it says: subsets nest, kinds are kinds, what was stopped goes on to the same table."""

import json
import pickle
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import nbformat
import numpy as np
import pandas as pd
import pytest
import safetensors.torch
import torch
from PIL import Image
from safetensors import safe_open
from scipy.stats import ttest_1samp
from test_cli import vitlens
from timm.layers import HybridEmbed, StdConv2d

from vitlens import plot
from vitlens.data import load
from vitlens.evaluate import compute, features, proportion, student
from vitlens.paper import studies
from vitlens.paper.studies import STUDIES, Network, curves, five_shot, lead, read_table, run_study, study, trained
from vitlens.paper.studies.running import _chosen as chosen
from vitlens.paper.studies.trial import exaflops, subset
from vitlens.recorder.supported import token_grid
from vitlens.train import precision
from vitlens.train.validation import accuracy

TABLE = Path(__file__).parent.parent / "data" / "results" / "data-size-cpu.csv"
EPOCHS = TABLE.with_name("data-size-cpu-epochs.csv")
COMMITTED = [path for path in sorted(TABLE.parent.glob("*.csv")) if path.stem in STUDIES]
TIMES = ("seconds", "date")
SMALL = replace(study("data-size-digits").tiny(), seeds=(0,))


def cells(each, kind):
    return [cell for cell in each.cells() if cell.network.kind == kind]


def timeless(records):
    return [{k: v for k, v in record.items() if k not in TIMES} for record in records]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A small study that nothing stopped, and its folder."""
    out = tmp_path_factory.mktemp("whole")
    return run_study(SMALL, "digits", out, device="cpu"), out


def test_subsets_nest_are_balanced_and_follow_the_seed():
    digits = load("digits", "train")
    for seed in (0, 1):
        few, more, most = (subset(digits.labels, n, 10, seed) for n in (50, 200, 1000))
        assert set(few.tolist()) < set(more.tolist()) < set(most.tolist())
        for rows, each in ((few, 5), (more, 20), (most, 100)):
            assert torch.equal(torch.bincount(digits.labels[rows]), torch.full((10,), each))
        assert torch.equal(few, subset(digits.labels, 50, 10, seed))
    assert set(subset(digits.labels, 50, 10, 0).tolist()) != set(subset(digits.labels, 50, 10, 1).tolist())


def test_all_trainings_have_the_same_classes_numbered_anew():
    digits = load("digits", "train")
    few = chosen(digits, SMALL, "digits")
    assert len(few.class_names) == 5 and few.class_names == chosen(load("digits", "valid"), SMALL, "digits").class_names
    kept = torch.isin(digits.labels, torch.tensor([int(name) for name in few.class_names]))
    assert torch.equal(few.images, digits.images[kept])
    assert torch.equal(torch.tensor([int(few.class_names[k]) for k in few.labels]), digits.labels[kept])


@pytest.mark.parametrize(
    "each", [each for each in STUDIES.values() if isinstance(each.networks[0], Network)], ids=lambda each: each.name
)
def test_kinds_are_what_the_paper_calls_them(each):
    for cell in {cell.network: cell for cell in each.cells()}.values():
        plan = each.plan(cell)
        model = cell.network.build(plan)
        convolutions = [m for m in model.modules() if isinstance(m, StdConv2d)]
        assert bool(convolutions) == (cell.network.kind != "ViT")
        assert hasattr(model, "blocks") == (cell.network.kind != "ResNet")
        assert not any(isinstance(m, torch.nn.BatchNorm2d) for m in model.modules())
        assert all(m.num_channels > m.num_groups for m in model.modules() if isinstance(m, torch.nn.GroupNorm))
        assert isinstance(getattr(model, "patch_embed", None), HybridEmbed) == (cell.network.kind == "hybrid")
        with torch.no_grad():
            logits = model(torch.randn(2, 3, plan.image_size, plan.image_size))
        assert logits.shape == (2, each.classes)
        narrow = cell.network.tiny()
        one, again, other = (narrow.build(replace(plan, seed=seed)).state_dict() for seed in (0, 0, 9))
        assert all(torch.equal(one[name], again[name]) for name in one)
        assert not all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(("name", "fewer"), [("data-size", 3), ("data-size-cpu", 1), ("hybrid-cpu", 0)])
def test_a_hybrid_has_the_tokens_of_the_vit_and_its_layers(name, fewer):
    """As many of them, or fewer where both are to cost the same."""
    each = study(name)
    hybrids = {cell.network: cell for cell in cells(each, "hybrid")}
    assert hybrids
    for cell in hybrids.values():
        vit = next(n for n in each.networks if n.kind == "ViT" and n.width == cell.network.width)
        models = [n.build(each.plan(cell)) for n in (vit, cell.network)]
        assert models[0].pos_embed.shape == models[1].pos_embed.shape
        assert len({compute.parameters(block) for m in models for block in m.blocks}) == 1
        assert len(models[0].blocks) - len(models[1].blocks) == fewer
        grids = [token_grid(m, (each.recipe.image_size,) * 2) for m in models]
        assert grids[0] == grids[1] and grids[1].patch == (vit.patch, vit.patch)
        for stage in models[1].patch_embed.backbone.feature_info:
            stage["reduction"] *= 2  # as timm says it, for a backbone with a pool in its stem
        assert token_grid(models[1], (each.recipe.image_size,) * 2) == grids[0], "seen to be untrue"


def test_the_large_study_and_its_one_recipe():
    big = study("data-size")
    assert [n.kind for n in big.networks] == ["ViT", "ViT", "hybrid", "ResNet"]
    assert (big.sizes, big.seeds, big.classes) == ((5000, 10000, 30000, 100000), (0, 1, 2), 200)
    assert big.recipe.image_size == 64
    assert len(list(big.cells())) == 48 and len({cell.name for cell in big.cells()}) == 48
    shared = [{**big.plan(cell).to_dict(), "seed": 0, "evaluate_every": 0} for cell in big.cells()]
    assert all(plan == shared[0] for plan in shared)


def test_with_equal_epochs_fewer_images_are_fewer_steps(tmp_path):
    large = study("data-size-epochs")
    steps = {cell.images: large.plan(cell).steps for cell in large.cells()}
    assert steps == {5_000: 150, 10_000: 300, 30_000: 900, 100_000: 3_000}  # 15.36 epochs of each
    short, said = replace(SMALL, equal="epochs", networks=SMALL.networks[:1]), []
    records = run_study(short, "digits", tmp_path, device="cpu", say=said.append)
    assert said[0].startswith("2 trainings of at most 6 steps are left: ")
    assert [(r["images"], r["steps"], r["epochs"]) for r in records] == [(40, 3, 1.5), (80, 6, 1.5)]
    work = sum(record["exaflops"] for record in records)
    assert float(re.search(r": (\S+) exaFLOPs", said[0])[1]) == pytest.approx(work, rel=0.05)
    with pytest.raises(ValueError, match="equal steps or equal epochs, got equal='images'"):
        replace(SMALL, equal="images")


def test_records_hold_what_was_measured(whole):
    records, out = whole
    assert [(r["model"], r["images"], r["seed"]) for r in records] == [
        (c.network.name, c.images, c.seed) for c in SMALL.cells()
    ]
    valid = chosen(load("digits", "valid"), SMALL, "digits")
    for record, cell in zip(records, SMALL.cells(), strict=True):
        plan = SMALL.plan(cell)
        fresh = cell.network.build(plan)
        assert record["flops"] == compute.flops(fresh, 8) and record["parameters"] == compute.parameters(fresh)
        assert record["exaflops"] == pytest.approx(3 * record["flops"] * 6 * 20 / 1e18)
        assert record["epochs"] == 120 / cell.images and record["validation_images"] == len(valid)
        right = record["top1"] * len(valid) / 100
        assert right == pytest.approx(round(right), abs=0.01) and record["best"] >= record["top1"]
        shares = proportion(round(right), len(valid))
        assert (record["top1"], record["low"], record["high"]) == pytest.approx(tuple(shares), abs=1e-3)
    assert not list(out.glob("runs/*/checkpoints/*")), "checkpoints of finished trainings are not kept"


def forward(row, width, layers, patches):
    """A forward with half of the patches kept behind the embedding, by hand, from that with all of them."""
    costs = [2 * tokens * 12 * width**2 + 4 * tokens**2 * width for tokens in (patches + 1, patches // 2 + 1)]
    return row["flops"] - layers * (costs[0] - costs[1])


def test_patches_that_are_dropped_are_not_paid_for(tmp_path):
    """Steps 0 to 2 of 6 see 8 of 16 patches."""
    vits = tuple(n for n in SMALL.networks if n.kind == "ViT")
    plan = replace(SMALL.recipe, patch_drop=0.5, patch_drop_until=0.5)
    (row,) = run_study(replace(SMALL, networks=vits, sizes=(40,), recipe=plan), "digits", tmp_path, device="cpu")
    assert row["exaflops"] == pytest.approx(3 * 20 * (3 * forward(row, 24, 2, 16) + 3 * row["flops"]) / 1e18, rel=1e-12)


def test_the_committed_pair_has_its_dropped_patches_left_out():
    """819 of 1,170 steps see 32 of 64 patches; convolutions see all of them."""
    each = study("hybrid-cpu")
    assert (each.recipe.patch_drop, each.recipe.patch_drop_until, each.recipe.batch_size) == (0.5, 0.7, 256)
    for row in read_table(HYBRID):
        steps = 256 * (819 * forward(row, 128, 6, 64) + 351 * row["flops"])
        assert row["exaflops"] == pytest.approx(3 * steps / 1e18, rel=1e-12)
        network = next(n for n in each.networks if n.name == row["model"])
        plan = replace(each.recipe, num_classes=each.classes)
        assert exaflops(network.build(plan), plan) == row["exaflops"]


def test_the_weights_of_every_training_are_kept(whole):
    records, out = whole
    valid = chosen(load("digits", "valid"), SMALL, "digits")
    for record, cell in zip(records, SMALL.cells(), strict=True):
        path = out / "cells" / f"{cell.name}.safetensors"
        model = trained(path)
        assert not model.training and model.label_names == list(valid.class_names)
        assert compute.parameters(model) == record["parameters"]
        found = accuracy(model, valid, SMALL.plan(cell))
        assert found == pytest.approx(record["top1"], abs=150 / len(valid)), "one image may fall to the other side"
        fresh = cell.network.build(SMALL.plan(cell)).state_dict()
        before = trained(path, weights=False).state_dict()
        assert all(torch.equal(before[name], fresh[name]) for name in fresh)
        assert not all(torch.equal(model.state_dict()[name], fresh[name]) for name in fresh)


def test_five_shot_is_of_images_that_it_did_not_learn_from(monkeypatch):
    valid = chosen(load("digits", "valid"), SMALL, "digits")
    cell = cells(SMALL, "ResNet")[0]
    model = cell.network.build(SMALL.plan(cell))
    order = torch.randperm(len(valid), generator=torch.Generator().manual_seed(0))
    shuffled = replace(valid, labels=valid.labels[order])
    assert five_shot(model, shuffled, 5) < 30 < 50 < five_shot(model, valid, 5)
    seen = []
    monkeypatch.setattr(studies.trial, "few_shot", lambda _, test, drawn, k: seen.append((test, drawn)) or {5: [1]})
    five_shot(model, valid, 5)
    x = features(model, valid)[0]
    for test, drawn in seen:
        learned = set(drawn[5][0].tolist())
        assert len(learned) == 25 and torch.equal(test[0], x[[i for i in range(len(x)) if i not in learned]])
    assert len({tuple(drawn[5][0].tolist()) for _, drawn in seen}) == 3


KILLED = """
import os, pickle, signal, sys, torch
from vitlens.paper.studies import run_study, trial
study, out, threads, last = pickle.load(sys.stdin.buffer)
torch.set_num_threads(threads)  # as many as the process that goes on: the table names them
fit, begun = trial.fit, []

def dying(*args, **kwargs):
    begun.append(1)
    for step in fit(*args, **kwargs):
        yield step
        if len(begun) == last and step.step == 3:
            os.kill(os.getpid(), signal.SIGKILL)

trial.fit = dying
run_study(study, "digits", out, device="cpu")
"""


def test_a_killed_study_goes_on_to_the_same_table(tmp_path):
    """Killed in its first training, and then in its second."""
    slow = replace(SMALL, sizes=(40,), recipe=replace(SMALL.recipe, save_every=0.0))  # a checkpoint after every step
    for training in (1, 2):  # of those that are left
        asked = pickle.dumps((slow, tmp_path / "out", torch.get_num_threads(), training))
        assert subprocess.run([sys.executable, "-c", KILLED], input=asked).returncode == -signal.SIGKILL
        assert len(list(tmp_path.glob("out/cells/*.json"))) == training - 1
        assert list(tmp_path.glob("out/runs/*/checkpoints/step-*.json"))
    gone_on, whole = (run_study(slow, "digits", tmp_path / name, device="cpu") for name in ("out", "whole"))
    assert timeless(gone_on) == timeless(whole)


def test_a_study_keeps_the_threads_and_the_precision_that_it_was_begun_with(tmp_path, monkeypatch):
    """Also on a machine with more cores, and one that would have chosen another precision."""
    trainings, threads, before = [], [], torch.get_num_threads()
    open_ = replace(SMALL, networks=SMALL.networks[:1], sizes=(40, 80), recipe=replace(SMALL.recipe, precision="auto"))

    def noted(model, data, recipe, **options):
        trainings.append(recipe.precision)
        threads.append(torch.get_num_threads())
        return fit(model, data, recipe, **options)

    fit = studies.trial.fit
    monkeypatch.setattr(studies.trial, "fit", noted)
    monkeypatch.setattr(precision, "seconds", lambda device, of: {"fp32": 1.0, "bf16": 9.0}[of])
    monkeypatch.setattr(precision, "computes_bf16", lambda device: True)
    try:
        torch.set_num_threads(1)
        first = run_study(replace(open_, sizes=(40,)), "digits", tmp_path, device="cpu")
        monkeypatch.setattr(precision, "computes_bf16", lambda device: False)
        torch.set_num_threads(3)
        said = []
        both = run_study(open_, "digits", tmp_path, device="cpu", say=said.append)
        assert torch.get_num_threads() == 3, "left as found"
    finally:
        torch.set_num_threads(before)
    assert both[0] == first[0] and trainings == ["bf16"] * 2 and threads == [1, 1]
    assert [(r["device"][:13], r["precision"]) for r in both] == [("1 CPU threads", "bf16")] * 2
    assert said[0].startswith("This CPU takes 9.0 times as long") and "keeps to what it was begun in" in said[0]
    noted_down = json.loads((tmp_path / "study.json").read_text())
    assert noted_down["threads"] == 1 and noted_down["recipe"]["precision"] == "bf16"
    for cell in open_.cells():
        with safe_open(tmp_path / "cells" / f"{cell.name}.safetensors", "pt") as file:
            assert json.loads(file.metadata()["recipe"])["precision"] == "bf16"


def test_a_study_begun_before_recipes_left_the_precision_open_goes_on(whole, tmp_path):
    """Its recipe said bf16, its note had no threads, and its records no precision."""
    for path in (*whole[1].glob("cells/*.json"), whole[1] / "study.json"):
        content = json.loads(path.read_text())
        content.pop("precision", None), content.pop("threads", None)
        if "recipe" in content:
            content["recipe"]["precision"] = "bf16"
        (tmp_path / path.relative_to(whole[1])).parent.mkdir(exist_ok=True)
        (tmp_path / path.relative_to(whole[1])).write_text(json.dumps(content))
    open_ = replace(SMALL, seeds=(0, 1), sizes=SMALL.sizes[:1], recipe=replace(SMALL.recipe, precision="auto"))
    records = run_study(open_, "digits", tmp_path, device="cpu")
    assert [r.get("precision") for r in records] == [None, None, "bf16", "bf16"]
    studies.write_table(tmp_path / "t.csv", records)
    assert [row["precision"] for row in read_table(tmp_path / "t.csv")] == ["", "", "bf16", "bf16"]


@pytest.mark.parametrize(("name", "size", "mega"), [("data-size", 64, 734), ("data-size-cpu", 24, 16.2)])
def test_models_are_compared_at_equal_compute(name, size, mega):
    each = study(name)
    plan = each.plan(next(each.cells()))
    compared = [network for network in each.networks if network.name != "ViT-S/8"]
    models = [network.build(plan) for network in compared]
    assert [network.kind for network in compared] == ["ViT", "hybrid", "ResNet"]
    assert [compute.flops(model, size) for model in models] == pytest.approx([mega * 1e6] * 3, rel=0.04)
    assert len({token_grid(model, (size, size)) for model in models[:2]}) == 1


def test_the_models_of_digits_are_compared_at_equal_compute():
    each = study("data-size-digits")
    plan = each.plan(next(each.cells()))
    models = [network.build(plan) for network in each.networks]
    vit, resnet = (compute.flops(model, 8) for model in models)
    assert resnet == pytest.approx(vit, rel=0.1)
    (path,) = TABLE.parents[2].glob("notebooks/12_*.ipynb")
    told = "".join(cell.source for cell in nbformat.read(path, as_version=4).cells).replace("\n", " ")
    thousands = [compute.parameters(model) / 1000 for model in models]
    assert f"{vit / 1e6:.1f} MFLOPs a picture for the ViT and {resnet / 1e6:.1f} for the ResNet" in told
    assert f"has {thousands[1]:.0f} thousand weights to the ViT's {thousands[0]:.0f}" in told


def test_what_is_finished_is_not_done_again(whole, monkeypatch):
    records, out = whole
    monkeypatch.setattr(studies.trial, "fit", None)
    assert run_study(SMALL, "digits", out, device="cpu") == records


def test_more_seeds_go_on_in_the_same_folder(whole, tmp_path):
    shutil.copytree(whole[1], tmp_path, dirs_exist_ok=True)
    more = run_study(replace(SMALL, seeds=(0, 1), sizes=SMALL.sizes[:1]), "digits", tmp_path, device="cpu")
    assert more[:2] == whole[0][:2] and [r["seed"] for r in more] == [0, 0, 1, 1]


@pytest.mark.parametrize("content", ["", "[1]", '{"name": ', "\xff"])
@pytest.mark.parametrize("damaged", ["study.json", "cells/*.json"])
def test_what_is_damaged_is_named_and_done_again_once_it_is_deleted(whole, tmp_path, damaged, content):
    shutil.copytree(whole[1], tmp_path, dirs_exist_ok=True)
    path = min(tmp_path.glob(damaged))
    path.write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=f"{path.name} is damaged. Delete it"):
        run_study(SMALL, "digits", tmp_path, device="cpu")
    path.unlink()
    assert timeless(run_study(SMALL, "digits", tmp_path, device="cpu")) == timeless(whole[0])


def test_two_processes_do_not_share_a_folder(tmp_path):
    """The second is refused in a sentence; once the first has ended, it goes on where that stopped."""
    wait = (
        "import sys, pathlib; from vitlens.data.files import locked\n"
        f"with locked(pathlib.Path({str(tmp_path)!r})): print('mine', flush=True); sys.stdin.read()"
    )
    command = ["study", "data-size-digits", "--data", "digits", "--tiny", "--out", tmp_path, "--max-minutes", 1e-9]
    with subprocess.Popen([sys.executable, "-c", wait], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"mine\n"
        done = vitlens(*command, expect=2)
        assert f"Another process is at work in {tmp_path}. Wait for it" in done.stderr
        assert not (tmp_path / "cells").exists()
        other.kill()
    assert "Stopped in ViT" in vitlens(*command, expect=1).stdout


def test_time_is_up(tmp_path):
    said = []
    records = run_study(SMALL, "digits", tmp_path, device="cpu", max_minutes=1e-9, say=said.append)
    assert not records and "the same command goes on" in said[-1]


def test_the_command_shows_a_bar_writes_the_table_and_goes_on(tmp_path):
    out, table = tmp_path / "out", tmp_path / "new" / "table.csv"
    arguments = ("study", "data-size-digits", "--data", "digits", "--out", out, "--tiny", "--device", "cpu")
    stopped = vitlens(*arguments, "--max-minutes", "1e-9", "--table", table, expect=1)
    assert "the same command goes on" in stopped.stdout and not table.exists()
    assert all("step" in line for line in stopped.stderr.splitlines() if line.strip()), "the bar and nothing else"
    done = vitlens(*arguments, "--table", table)
    rows = read_table(table)
    assert len(rows) == 8 and "step/s" not in done.stdout
    said = done.stdout.splitlines()
    assert len(said) == 9 and said[0].startswith("8 trainings of 6 steps are left: ")
    assert "1 of 8: ViT, patch 2, 40 images, seed 0" in done.stderr and "48/48" in done.stderr
    again = vitlens(*arguments)
    assert "48/48" in again.stderr and not again.stdout
    assert rows[0]["command"].startswith("vitlens study data-size-digits --data digits") and rows[0]["torch"]
    assert str(tmp_path) not in table.read_text()
    names = [cell.name for cell in study("data-size-digits").tiny().cells()]
    assert rows == [json.loads((out / "cells" / f"{name}.json").read_text()) for name in names]


def test_the_large_study_takes_the_same_path_tiny(tmp_path):
    for split, each in (("train", 16), ("val", 6)):
        for label in range(5):
            (tmp_path / "data" / split / str(label)).mkdir(parents=True)
            for i in range(each):
                pixels = np.random.default_rng(i).integers(0, 80, (70, 64, 3)) + 40 * label
                Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / "data" / split / str(label) / f"{i}.png")
    (tmp_path / "data" / "train" / "3" / "broken.png").write_bytes(b"no picture")
    arguments = ("study", "data-size", "--data", tmp_path / "data", "--out", tmp_path / "out", "--tiny")
    assert "--skip-damaged" in vitlens(*arguments, expect=2).stderr
    done = vitlens(*arguments, "--skip-damaged", "--device", "cpu", "--table", tmp_path / "t.csv")
    assert done.stdout.startswith("Left out: train/3/broken.png")
    rows = read_table(tmp_path / "t.csv")
    assert [r["kind"] for r in rows] == ["ViT", "ViT", "hybrid", "ResNet"] * 4
    assert {r["model"] for r in rows} == {n.name for n in study("data-size").networks}


def test_a_study_is_added_as_a_row():
    """The command lists it, and its title is no part of what it is: notes of studies under other titles stay valid."""
    mine = studies.register(replace(SMALL, name="mine", title="my own"))
    try:
        assert study("mine") is mine and "mine: " in vitlens("study", "--list").stdout
        assert mine.to_dict() == replace(mine, title="another").to_dict()
    finally:
        del STUDIES["mine"]
    with pytest.raises(ValueError, match="no study 'mine'. The studies are: data-size,"):
        study("mine")


def test_the_command_lists_the_studies():
    shown = vitlens("study", "--list").stdout
    assert all(f"{name}: {each.title}" in shown for name, each in STUDIES.items())
    assert "R23x0.75" in shown and "100,000 images" in shown and "at most 3,000 steps" in shown


@pytest.mark.parametrize("arguments, sentence", [
    ("", "A study needs a name"),
    ("data-size", "A study needs --data"),
    ("data-size --data digits", "A study needs --out"),
    ("nonsense --data digits --out OUT", "There is no study 'nonsense'. The studies are: data-size,"),
    ("data-size --data NOWHERE --out OUT", "is not a folder"),
    ("data-size --data digits --out OUT", "takes 200 classes, but digits has 10"),
    ("data-size-digits --data digits --out FILE", "cannot be written to (Not a directory)"),
    ("data-size-digits --data digits --out FILE/OUT", "cannot be written to (Not a directory)"),
    ("data-size-digits --data digits --out OUT --max-minutes -1", "a positive number"),
    ("data-size-digits --data digits --out OTHER", "other networks and recipe and classes and data"),
    ("data-size-digits --data NOWHERE --out OUT --table FILE/a.csv", "give another --table"),
    ("data-size-digits --data NOWHERE --out OUT --table OTHER", "is a folder. Give another"),
    ("data-size-digits --data NOWHERE --out OUT --figure a.foo", "must end in a file type that Matplotlib writes ("),
])  # fmt: skip
def test_wrong_wishes_end_with_one_sentence(arguments, sentence, tmp_path, whole):
    (tmp_path / "file").write_text("")
    places = {"OUT": tmp_path / "out", "FILE": tmp_path / "file", "NOWHERE": tmp_path / "none", "OTHER": whole[1],
              "FILE/OUT": tmp_path / "file" / "out", "FILE/a.csv": tmp_path / "file" / "a.csv"}  # fmt: skip
    done = vitlens("study", *(places.get(a, a) for a in arguments.split()), expect=2)
    assert sentence in done.stderr and len(done.stderr.splitlines()) == 1


def test_data_that_is_too_small_is_refused(tmp_path):
    large = replace(SMALL, sizes=(5 * 400,))
    with pytest.raises(ValueError, match="takes 400 training images of each class, but digits has a class of 1"):
        run_study(large, "digits", tmp_path, device="cpu")


def test_contradictions_are_refused():
    with pytest.raises(ValueError, match="7 is no multiple"):
        replace(SMALL, sizes=(7,))
    with pytest.raises(ValueError, match="Give its recipe steps"):
        replace(SMALL, recipe=replace(SMALL.recipe, steps=0, epochs=3))
    same = replace(SMALL.networks[0], name=SMALL.networks[0].name.replace(",", "/"), width=48)
    with pytest.raises(ValueError, match="Two trainings .* ViT-patch-2_40_0"):  # one would be taken for the other
        replace(SMALL, networks=(*SMALL.networks, same))
    with pytest.raises(ValueError, match="odd cannot be built"):
        Network("odd", patch=2, width=7, depth=1, heads=2).build(SMALL.recipe)


@pytest.mark.parametrize("kind", ["ViT", "hybrid", "ResNet"])
def test_a_network_takes_settings_of_training_and_none_of_the_model(kind):
    network = cells(study("data-size-cpu"), kind)[0].network
    plan = replace(network, settings=("optimizer=sgd", "lr=0.3", "mean=0.5,0.5,0.5")).plan(SMALL.recipe)
    assert (plan.optimizer, plan.lr, plan.mean) == ("sgd", 0.3, (0.5, 0.5, 0.5))
    for setting in ("positions=none", "readout=mean", "dropout=0.5", "mlp_ratio=2", "depth=3", "model.qk_norm=true"):
        with pytest.raises(ValueError, match=f"would ignore {setting.partition('=')[0]}. Use a Variant"):
            replace(network, settings=("lr=0.3", setting))


def test_weights_that_half_precision_cannot_hold_are_kept_whole(tmp_path):
    cell = cells(SMALL, "ViT")[0]
    model = cell.network.build(SMALL.plan(cell))
    with torch.no_grad():
        model.head.weight[0, 0] = 1e5
    studies.networks.save(tmp_path / "a.safetensors", model, cell.network, SMALL.plan(cell), list("abcde"))
    assert torch.equal(trained(tmp_path / "a.safetensors").head.weight, model.head.weight)


def test_a_study_needs_a_batch_of_images():
    with pytest.raises(ValueError, match="A batch of 64 exceeds 40 training images. Lower batch_size"):
        replace(SMALL, sizes=(40, 80), recipe=replace(SMALL.recipe, batch_size=64))
    few = replace(study("data-size-digits"), classes=2, sizes=(50, 200)).tiny()
    assert few.recipe.batch_size == 16 == min(few.sizes) and few.plan(next(few.cells())).evaluate_every >= 1


def test_what_is_no_model_of_a_study_is_told_in_a_sentence(tmp_path):
    cases = {"missing": None, "text": b"not weights", "foreign": safetensors.torch.save({"a": torch.zeros(1)})}
    for name, content in cases.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name} is not a model of a study .*`vitlens study` writes such files"):
            trained(tmp_path / name)


def test_curves_and_leads_by_student(tmp_path):
    rng = np.random.default_rng(0)
    values = {(m, n, s): rng.uniform(20, 80) for m in "ab" for n in (10, 30) for s in range(3)}
    records = [{"model": m, "images": n, "seed": s, "top1": v} for (m, n, s), v in values.items()]
    studies.write_table(tmp_path / "t.csv", records[::-1])
    records = read_table(tmp_path / "t.csv")
    for images, mean, low, high in curves(records)["a"]:
        wanted = ttest_1samp([values["a", images, s] for s in range(3)], 0)
        interval = wanted.confidence_interval(0.95)
        assert mean == pytest.approx(np.mean([values["a", images, s] for s in range(3)]))
        assert (low, high) == pytest.approx((max(0, interval.low), min(100, interval.high)))
    for images, mean, low, high in lead(records, "a", "b"):
        found = [values["a", images, s] - values["b", images, s] for s in range(3)]
        assert (mean, low, high) == pytest.approx((np.mean(found), *ttest_1samp(found, 0).confidence_interval(0.95)))
    with pytest.raises(ValueError, match="'images' of five_shot"):
        curves(records, "five_shot", over="images")
    assert lead(records[:1], "b", "b")[0][1:] == (0, -np.inf, np.inf)
    with pytest.raises(ValueError, match="name two models"):
        lead(records, "a", "c")
    bounds = {n: dict(zip(("low", "high"), proportion(n, 100)[1:], strict=True)) for n in (10, 30)}
    whole = [record | bounds[record["images"]] for record in records]
    for n, mean, low, high in curves(whole, over="images")["a"]:
        assert mean == pytest.approx(np.mean([values["a", n, s] for s in range(3)]))
        assert (low, high) == pytest.approx(tuple(bounds[n].values()))
    ax = plot.few_shot(curves(records), ylabel="Top-1 (%)").axes[0]
    assert ax.get_ylabel() == "Top-1 (%)" and len(ax.lines) == 2


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_the_committed_tables_are_whole_studies(path):
    rows, each = read_table(path), study(path.stem)
    size = each.recipe.image_size
    assert all(r["device"] and r["torch"] and r["timm"] and r["date"] for r in rows)
    assert all(r["command"].startswith(f"vitlens study {each.name} --data ") for r in rows)
    for row, cell in zip(rows, each.cells(), strict=True):
        model = cell.network.build(each.plan(cell))
        assert (row["model"], row["images"], row["seed"]) == (cell.network.name, cell.images, cell.seed)
        assert row["steps"] == each.steps(cell) and row["validation_images"] >= 2_500
        assert (row["parameters"], row["flops"]) == (compute.parameters(model), compute.flops(model, size))
        assert row["low"] <= row["top1"] <= min(row["high"], row["best"])


@pytest.mark.parametrize("path", [TABLE, TABLE.with_name("hybrid-cpu.csv")], ids=lambda p: p.stem)
def test_a_table_that_is_read_and_written_is_the_same(path, tmp_path):
    rows = read_table(path)
    studies.write_table(tmp_path / "t.csv", rows)
    assert (tmp_path / "t.csv").read_bytes() == path.read_bytes()
    kinds = {"model": str, "images": int, "top1": float, "exaflops": float, "date": str, "timm": str}
    assert all(type(row[name]) is kind for row in rows for name, kind in kinds.items())
    studies.write_table(tmp_path / "t.csv", [{"model": "NA", "command": "", "top1": 0.1 + 0.2}])
    assert read_table(tmp_path / "t.csv") == [{"model": "NA", "command": "", "top1": 0.1 + 0.2}]


HYBRID = TABLE.with_name("hybrid-cpu.csv")
PAIR = TABLE.parents[1] / "checkpoints" / "hybrid-cpu"


def test_the_committed_pair_is_that_of_its_study():
    each, rows = study("hybrid-cpu"), read_table(HYBRID)
    assert [r["kind"] for r in rows] == ["ViT", "hybrid"]
    for row, cell, name in zip(rows, each.cells(), ("ViT", "hybrid"), strict=True):
        model = trained(PAIR / f"{name}.safetensors")
        fresh = cell.network.build(each.plan(cell))
        assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in fresh.named_parameters()}
        assert (row["parameters"], row["flops"]) == (compute.parameters(model), compute.flops(model, 64))
        assert len(model.label_names) == 200 and row["images"] == 100_000
    (path,) = TABLE.parents[2].glob("notebooks/05_*.ipynb")
    (told,) = [c.outputs[0].text for c in nbformat.read(path, as_version=4).cells if "hybrid-cpu.csv" in c.source]
    assert re.findall(r"\d+\.\d(?= %)", told) == [f"{row['top1']:.1f}" for row in rows]


@pytest.mark.slow
def test_the_committed_pair_is_as_accurate_as_is_recorded(real_data):
    valid = load(str(real_data / "tiny-imagenet"), "valid", size=64, stream=False)
    for row, name in zip(read_table(HYBRID), ("ViT", "hybrid"), strict=True):
        plan = study("hybrid-cpu").recipe
        assert accuracy(trained(PAIR / f"{name}.safetensors"), valid, plan) == pytest.approx(row["top1"], abs=0.2)


def test_notebook_12_says_what_the_committed_tables_say():
    (path,) = TABLE.parents[2].glob("notebooks/12_*.ipynb")
    cells, rows = nbformat.read(path, as_version=4).cells, read_table(TABLE)
    vit, hybrid, resnet = dict.fromkeys(row["model"] for row in rows)
    equal = [row for row in rows if row["images"] == 7_500] + read_table(EPOCHS)
    outputs = [output.get("data", {}) for cell in cells for output in cell.get("outputs", [])]
    shown, known = "\n".join(data.get("text/plain", "") for data in outputs), set()
    for found, metric in ((rows, "top1"), (equal, "top1"), (rows, "five_shot")):
        columns = ["images", f"ViT over ResNet, {metric}", "low", "high"]
        ahead = pd.DataFrame(lead(found, vit, resnet, metric), columns=columns)
        table = pd.DataFrame(found).pivot_table(metric, "images", "model").join(ahead.set_index("images"))
        with pd.option_context("display.width", 80):
            assert str(table.round(1)) in shown
        means = [row[1] for curve in curves(found, metric).values() for row in curve]
        pairs = (vit, resnet), (hybrid, resnet), (vit, hybrid)
        leads = [row[1:] for pair in pairs for row in lead(found, *pair, metric)]
        known |= {f"{abs(value):.1f}" for value in (*means, *np.ravel(leads))}
    top1 = pd.DataFrame(rows).pivot_table("top1", ["seed", "images"], "model")
    leads = (top1[vit] - top1[resnet]).unstack()
    for fewer, more in ((2_500, 7_500), (7_500, 25_000)):
        grown = leads[more] - leads[fewer]
        by, half = grown.mean(), student(grown)
        (line,) = re.findall(rf"^{more} .*", shown.split("the lead grows by")[1], re.M)[:1]
        assert line.split()[1:] == [f"{by:.1f}", f"{half:.1f}"]
        known |= {f"{abs(value):.1f}" for value in (by, by - half, by + half)}
    speed = pd.read_csv(TABLE.with_name("speed-cpu.csv")).query("image_size == 224").set_index("model")
    known |= {f"{value:.1f}" for value in (*speed["images_per_second"], *speed["bytes_per_image"] / 1e6)}
    told = [c.source for c in cells if c.source.startswith("**Measured.**")]
    assert len(told) == 4
    of_batches = told[-1].split("With speed")[0]
    for model, batch in speed["largest_batch"].filter(items=["ViT-B/32", "R50x1", "R50x2", "ViT-L/32"]).items():
        assert str(batch) in of_batches, f"the largest batch of {model} is {batch}"
    for number in re.findall(r"\d+\.\d+", "".join(told)):
        assert number in known, f"{number} is said, and is not in the tables"
