"""Studies of choices: one setting changed, what is inside kept, several processes, statistics against references."""

import pickle
import re
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import nbformat
import numpy as np
import pytest
import torch
from scipy.stats import ttest_1samp, ttest_rel
from test_cli import vitlens
from test_studies import KILLED, timeless

from vitlens import plot
from vitlens.data import load
from vitlens.evaluate import features, linear_probe
from vitlens.evaluate.compute import flops
from vitlens.paper import studies
from vitlens.paper.studies import (
    STUDIES,
    Variant,
    against,
    estimate,
    insides,
    lead,
    rates,
    read_insides,
    read_table,
    run_study,
    scales,
    seeds_needed,
    study,
    trained,
    write_insides,
)
from vitlens.paper.studies.spreading import duration
from vitlens.train import fit, recipe, snapshots

CHOICES = [each for each in STUDIES.values() if any(network.settings for network in each.networks)]
TINY = replace(study("positions-cpu").tiny(), seeds=(0,), sizes=(40,))
TINY = replace(TINY, networks=TINY.networks[:2], recipe=replace(TINY.recipe, image_size=8, patch_size=2))
MASKED = replace(study("masked-cpu").tiny(), seeds=(0,), sizes=(40,))
MASKED = replace(
    MASKED, networks=MASKED.networks[:2],
    recipe=replace(MASKED.recipe, image_size=8, patch_size=2),
)  # fmt: skip
FIELDS = {
    "positions", "positions_at", "readout", "lr", "attention", "optimizer", "momentum",
    "weight_decay", "schedule", "depth", "width", "heads", "patch_size", "mlp_ratio",
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A small study of two variants that nothing stopped, its folder, and what it said."""
    out, said = tmp_path_factory.mktemp("whole"), []
    return run_study(TINY, "digits", out, device="cpu", say=said.append), out, said


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """The same of a study in which two of three models learn without labels first."""
    out, said = tmp_path_factory.mktemp("pretrained"), []
    return run_study(MASKED, "digits", out, device="cpu", say=said.append), out, said


@pytest.mark.parametrize("each", CHOICES, ids=lambda each: each.name)
def test_variants_differ_in_what_they_name_and_in_nothing_else(each):
    plans = {}
    for network in each.networks:
        cell = studies.Cell(network, each.sizes[0], each.seeds[0])
        plans[network.name] = each.plan(cell).to_dict()
        named = {setting.partition("=")[0] for setting in network.settings}
        base = replace(each.recipe, name=each.name, num_classes=each.classes).to_dict()
        changed = {name for name, value in plans[network.name].items() if value != base[name]}
        assert changed - {"seed", "evaluate_every"} <= named <= FIELDS
    assert all(one != other for one, other in pairwise(plans.values()))
    assert each.baseline in ("", *plans) and each.figure in studies.FIGURES


@pytest.mark.parametrize("each", CHOICES, ids=lambda each: each.name)
def test_every_variant_is_built_and_computes(each):
    small = each.tiny()
    for network in small.networks:
        plan = small.plan(studies.Cell(network, small.sizes[0], 0))
        with torch.no_grad():
            logits = network.build(plan).eval()(torch.randn(2, 3, plan.image_size, plan.image_size))
        assert logits.shape == (2, small.classes) and logits.isfinite().all()


def test_what_it_takes_is_said_before_the_first_training(whole):
    records, _, said = whole
    assert said[0].startswith("2 trainings of 6 steps are left: ")
    work = sum(record["exaflops"] for record in records)
    assert float(re.search(r": (\S+) exaFLOPs", said[0])[1]) == pytest.approx(work, rel=0.05)
    assert len(said) == 3 and said[1].startswith("none, 40 images, seed 0: ")


def test_an_estimate_grows_with_the_work_and_is_shared(monkeypatch):
    monkeypatch.setattr(studies.spreading, "seconds_a_step", lambda model, plan, images, device: images * 0.1)
    cells = list(TINY.cells())
    told = estimate(TINY, cells, valid=360, device=torch.device("cpu"), processes=2)
    seconds = 2 * 0.1 * (6 * 20 + 1 * 360 / 3)  # two trainings; a validation costs a third of as many training images
    assert "2 at a time: " in told and f"about {duration(seconds / 2)} here" in told
    assert [duration(s) for s in (0.2, 89, 91, 5399, 5401, 172801)] == [
        "1 seconds", "89 seconds", "2 minutes", "90 minutes", "1.5 hours", "2.0 days"
    ]  # fmt: skip


@pytest.mark.parametrize("k", [1])
def test_what_was_learned_without_labels_is_where_labels_begin(pretrained, k):
    """Both trainings by hand: all images without labels, then the trunk, with a new head, on the labeled ones."""
    records, out, _ = pretrained
    (cell,) = [cell for cell in MASKED.cells() if cell.network == MASKED.networks[k]]
    splits = [studies.running._chosen(load("digits", split, size=8), MASKED, "digits") for split in ("train", "valid")]
    name = "masked-patches"
    plan = MASKED.plan(cell)
    first = replace(
        recipe(name), **{field: getattr(plan, field) for field in ("image_size", "patch_size", "width", "depth")},
        num_classes=5, epochs=0, steps=4, batch_size=20, precision=records[k]["precision"],
    )  # fmt: skip
    learner, model = first.build(), plan.build()
    assert [step.step for step in fit(learner, splits, first)] == [1, 2, 3, 4]
    state = model.state_dict()
    trunk = {name for name in state if not name.startswith("head.")}
    assert trunk < set(learner.state_dict())
    model.load_state_dict(state | {name: learner.state_dict()[name] for name in trunk})
    seen = snapshots.record(model, snapshots.probe(splits[1], plan, studies.trial.PROBED))
    found, _ = insides(MASKED, out)
    before = found[f"{cell.network.name}, before tuning"]
    assert np.array_equal(before["filters"][0], seen["filters"])
    assert np.array_equal(before["distances"][0], seen["distances"])
    few = splits[0].chosen(studies.trial.subset(splits[0].labels, 40, 5, 0))
    assert records[k]["probe"] == pytest.approx(linear_probe(*(features(model, s) for s in (few, splits[1]))), abs=1e-3)
    assert len(list(fit(model, (few, splits[1]), plan))) == 6
    kept = trained(out / "cells" / f"{cell.name}.safetensors").state_dict()
    assert all(torch.equal(kept[name], each.half().float()) for name, each in model.state_dict().items())


def test_records_and_insides_tell_of_both_trainings(pretrained):
    records, out, said = pretrained
    assert said[0].startswith("2 trainings of at most 10 steps are left: ")
    work = sum(record["exaflops"] for record in records)
    assert float(re.search(r": (\S+) exaFLOPs", said[0])[1]) == pytest.approx(work, rel=0.05)
    assert [(r["pretraining"], r["pretraining_steps"], r["unlabeled"]) for r in records] == [
        ("", 0, 0), ("masked-patches", 4, 726)
    ]  # fmt: skip
    scratch, patches = records
    assert scratch["exaflops"] == pytest.approx(3 * scratch["flops"] * 6 * 20 / 1e18)
    extra = (patches["exaflops"] - scratch["exaflops"]) * 1e18 / (3 * 4 * 20)
    width, tokens = MASKED.recipe.width, 16
    head = scratch["flops"] + 2 * width * 512 * tokens - 2 * width * MASKED.classes
    assert extra == pytest.approx(head)  # all patches and a head of 512 colors for each
    found, _ = insides(MASKED, out)
    names = [network.name for network in MASKED.networks]
    assert list(found) == [title for name in names for title in (name, f"{name}, before tuning")]
    blank = MASKED.plan(next(MASKED.cells())).build()
    fresh = snapshots.record(blank, torch.zeros(1, 3, 8, 8))["filters"]
    assert np.array_equal(found["random weights, before tuning"]["filters"][0], fresh)
    for name in names:
        after, before = (found[title]["filters"] for title in (name, f"{name}, before tuning"))
        assert after.shape == before.shape == (1, 28, 2, 2, 3) and not np.array_equal(after, before)


def test_a_study_that_is_killed_without_labels_or_with_goes_on_to_the_same_table(tmp_path):
    slow = replace(MASKED, networks=MASKED.networks[1:2], baseline="", recipe=replace(MASKED.recipe, save_every=0.0))
    (network,) = slow.networks
    slow = replace(slow, networks=(replace(network, pretraining=(*network.pretraining, "save_every=0")),))
    for training in (1, 2):  # without labels, then with them
        asked = pickle.dumps((slow, tmp_path / "out", torch.get_num_threads(), training))
        assert subprocess.run([sys.executable, "-c", KILLED], input=asked).returncode == -signal.SIGKILL
        assert not list(tmp_path.glob("out/cells/*.json"))
        assert bool(list(tmp_path.glob("out/runs/*/checkpoints/step-*.json"))) == (training == 2)
        assert list(tmp_path.glob("out/runs/*/before/checkpoints/step-*.json"))
    gone_on, whole = (run_study(slow, "digits", tmp_path / name, device="cpu") for name in ("out", "whole"))
    assert timeless(gone_on) == timeless(whole) and not list(tmp_path.glob("*/runs/*"))


def test_several_processes_that_are_stopped_go_on_to_the_same_table(tmp_path):
    slow, said = replace(TINY, recipe=replace(TINY.recipe, steps=20)), []
    options = {"device": "cpu", "processes": 2, "say": said.append}
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # each of several processes has its share of them, and a study keeps its number
    try:
        alone = run_study(slow, "digits", tmp_path / "one", device="cpu")
        assert not run_study(slow, "digits", tmp_path / "two", **options, max_minutes=1e-9)
        assert "the same command goes on" in said[-1] and list(tmp_path.glob("two/runs/*/checkpoints/step-*.json"))
        together = run_study(slow, "digits", tmp_path / "two", **options)
    finally:
        torch.set_num_threads(before)
    assert timeless(together) == timeless(alone) and not list(tmp_path.glob("*/runs/*"))
    for cell in slow.cells():
        paths = [tmp_path / name / "cells" / f"{cell.name}.safetensors" for name in ("one", "two")]
        one, two = (trained(path).state_dict() for path in paths)
        assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_training_that_fails_in_another_process_is_told(tmp_path):
    recipe = replace(TINY.recipe, lr=1e29, muon_lr=1e29, clip=0.0)
    with pytest.raises(FloatingPointError):
        run_study(replace(TINY, networks=TINY.networks[:1], recipe=recipe), "digits", tmp_path, processes=2)


def test_what_is_inside_is_kept_of_every_variant(whole, tmp_path):
    _, out, _ = whole
    found, picture = insides(TINY, out)
    assert list(found) == ["none", "learned, 1-D"] and picture.shape == (8, 8, 3) and picture.dtype == np.uint8
    assert "positions" not in found["none"] and found["learned, 1-D"]["positions"].shape == (1, 4, 4, 4, 4)
    assert found["none"]["distances"].shape == (1, 2, 3) and found["none"]["rollout"].shape == (1, 1, 4, 4)
    valid = load("digits", "valid", size=8)
    kept = torch.randperm(10, generator=torch.Generator().manual_seed(0))[:5].sort().values
    valid = valid.chosen(torch.isin(valid.labels, kept).nonzero()[:, 0])
    for cell in TINY.cells():
        model = trained(out / "cells" / f"{cell.name}.safetensors")
        again = snapshots.record(model, snapshots.probe(valid, TINY.plan(cell), studies.trial.PROBED))
        mine = found[cell.network.name]
        assert np.allclose(mine["distances"][0], again["distances"], atol=0.02), "weights are kept in half precision"
        assert np.allclose(mine["rollout"][0, 0], again["rollout"][0], atol=0.02)
    write_insides(tmp_path / "a.npz", found, picture)
    again, same = read_insides(tmp_path / "a.npz")
    assert np.array_equal(same, picture) and again.keys() == found.keys()
    assert all(np.array_equal(again[m][n], a) for m, arrays in found.items() for n, a in arrays.items())
    with pytest.raises(ValueError, match="No seed of positions-cpu is complete"):
        insides(TINY, tmp_path)


def test_the_grid_shows_what_there_is(whole):
    found, picture = insides(TINY, whole[1])
    first = {model: {name: a[0] for name, a in arrays.items()} for model, arrays in found.items()}
    figure = plot.variants(first, picture=picture, uniform=4.0)
    rows = np.array(figure.axes[:10]).reshape(2, 5)
    words = [text.get_text() for ax in rows[:, 0] for text in ax.texts]
    assert words == ["none", "learned, 1-D"]
    assert [text.get_text() for text in rows[0, 2].texts] == ["none"] and len(rows[1, 2].images) == 16
    tile = np.asarray(rows[1, 2].images[5].get_array())
    assert np.allclose(tile, first["learned, 1-D"]["positions"][1, 1].astype(np.float32), atol=1e-3)
    with pytest.raises(ValueError, match="No models to draw"):
        plot.variants({}, picture=picture)


RNG = np.random.default_rng(0)
VALUES = {name: RNG.normal(60 + 3 * k, 1, 5) for k, name in enumerate(("a, 0.1", "a, 0.2", "b, 0.1"))}
RECORDS = [
    {"model": model, "images": 40, "seed": seed, "lr": float(model[3:]), "top1": value}
    for model, values in VALUES.items() for seed, value in enumerate(values)
]  # fmt: skip


def test_differences_are_those_of_a_paired_test():
    for model, mean, low, high, _ in against(RECORDS, "a, 0.1"):
        wanted = ttest_rel(VALUES[model], VALUES["a, 0.1"]).confidence_interval(0.95)
        assert (low, high) == pytest.approx((wanted.low, wanted.high))
        assert mean == pytest.approx(np.mean(VALUES[model] - VALUES["a, 0.1"]))
    with pytest.raises(ValueError, match="the table has 2. Choose one"):
        against([*RECORDS, {**RECORDS[0], "images": 80}], "a, 0.1")


@pytest.mark.parametrize("size, seeds", [(0.2, 199), (0.5, 34), (0.8, 15), (1.5, 6)])
def test_how_many_seeds_it_takes_is_what_power_tables_say(size, seeds):
    """Two-sided paired t-test, 5 %, power 0.8: Faul et al. 2007 (G*Power)."""
    differences = np.array([1.0, -1.0, 1.0, -1.0])
    differences = differences / differences.std(ddof=1) + size
    assert seeds_needed(differences) == seeds == seeds_needed(-differences)


@pytest.mark.parametrize("size", [2.0, 3.0, 4.7, 5.5, 8.3, 15.0, 1e6])
def test_how_many_seeds_large_differences_take_is_what_draws_say(size):
    """One tail of SciPy's noncentral t is no number for some of these."""
    seeds = seeds_needed([size - 1, size, size + 1])  # a standard deviation of 1
    rng = np.random.default_rng(0)
    found = [np.mean(ttest_1samp(rng.normal(size, 1, (50_000, n)), 0, axis=1).pvalue < 0.05) for n in (seeds - 1, seeds)
             if n > 1]  # fmt: skip
    assert found[-1] >= 0.8 and all(share < 0.8 for share in found[:-1])


def test_edges_of_the_number_of_seeds():
    assert seeds_needed([1.0, -1.0]) == 10_000 and seeds_needed([2.0, 2.0, 2.0]) == 2
    with pytest.raises(ValueError, match="two differences or more, got 1"):
        seeds_needed([1.0])


def test_a_sweep_is_read_by_rate():
    found = rates(RECORDS)
    assert [row[0] for row in found["a"]] == [0.1, 0.2] and len(found["b"]) == 1
    assert found["a"][1][1] == pytest.approx(VALUES["a, 0.2"].mean())


def test_what_is_scaled_is_read_by_compute():
    records = [{**record, "flops": 100 * record["lr"]} for record in RECORDS]
    found = scales([{**r, "model": r["model"].replace("b, 0.1", "base")} for r in records], "base")
    base, smaller, larger = (VALUES[name].mean() for name in ("b, 0.1", "a, 0.1", "a, 0.2"))
    assert list(found) == ["a"] and [row[0] for row in found["a"]] == [1, 1, 2]
    assert sorted(row[1] for row in found["a"][:2]) == pytest.approx(sorted((base, smaller)))
    assert found["a"][2][1] == pytest.approx(larger) and found["a"][2][2] < larger < found["a"][2][3]
    with pytest.raises(ValueError, match="'base', which has no finished training"):
        scales(records, "base")


def test_what_is_scaled_costs_what_formulas_say():
    """2·T·D·(4D + 2·ratio·D) + 4·T²·D operations a layer for T tokens of width D; 2·64²·3·D in the stem, 400·D in the
    head."""
    each = study("scaling")

    def operations(patch=16, width=96, depth=6, ratio=2):
        tokens = (64 // patch) ** 2 + 1
        layer = 2 * tokens * (4 + 2 * ratio) * width**2 + 4 * tokens**2 * width
        return depth * layer + 2 * 64**2 * 3 * width + 400 * width

    wanted = {
        "base": {}, "depth, 2": {"depth": 24}, "patch size, 2": {"patch": 4}, "MLP width, 2": {"ratio": 8},
        "width, 2": {"width": 384}, "all, 1": {"depth": 12, "patch": 8, "width": 192, "ratio": 4},
    }  # fmt: skip
    for name, sizes in wanted.items():
        (network,) = [network for network in each.networks if network.name == name]
        model = each.plan(studies.Cell(network, 100_000, 0)).build()
        assert flops(model, 64) == pytest.approx(operations(**sizes), rel=0.01)


@pytest.mark.parametrize("name", studies.FIGURES)
def test_every_study_has_a_figure(name):
    each = replace(TINY, figure=name, baseline="none" if name in ("models", "scaling") else "")
    records = [{**record, "model": record["model"].replace("a, 0.1", "none"), "flops": 1e6} for record in RECORDS]
    records = RECORDS if name == "rates" else records
    figure = studies.figure(each, records)
    ax = figure.axes[0]
    drawn = {round(float(x), 6) for line in ax.lines for x in (*line.get_xdata(), *line.get_ydata())}
    assert round(float(VALUES["b, 0.1"].mean()), 6) in drawn
    with pytest.raises(ValueError, match="at least one finished training"):
        studies.figure(each, [])


@pytest.mark.parametrize("arguments, sentence", [
    ("positions-cpu --data digits --out OUT --processes 0", "--processes must be 1 or more, got 0"),
    ("positions-cpu --data digits --out OUT --figure OUT", "must be a file"),
    ("positions-cpu --data digits --out OUT --inside OUT", "must be a file"),
])  # fmt: skip
def test_wrong_wishes_end_with_one_sentence(arguments, sentence, tmp_path):
    done = vitlens("study", *(tmp_path if a == "OUT" else a for a in arguments.split()), expect=2)
    assert sentence in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("pretraining, sentence", [
    (("digits", "epochs=0", "steps=4"), "learns without labels first, .* got digits with objective=labels"),
    (("masked-patches",), "masked-patches with objective=mean-color and steps=0"),
    (("masked-patch", "steps=4"), "no recipe 'masked-patch'"),
])  # fmt: skip
def test_pretraining_is_checked(pretraining, sentence):
    with pytest.raises(ValueError, match=sentence):
        replace(MASKED, networks=(Variant("mine", pretraining=pretraining),), baseline="")


def test_baselines_and_settings_are_checked():
    with pytest.raises(ValueError, match="'nothing' is none of the study's networks"):
        replace(TINY, baseline="nothing")
    with pytest.raises(ValueError, match="depht"):
        replace(TINY, networks=(Variant("deep", ("depht=3",)),), baseline="")
    with pytest.raises(ValueError, match="readout=mean"):
        replace(TINY, networks=(Variant("crossed", ("attention=axial",)),), baseline="")


RESULTS = Path(__file__).parent.parent / "data" / "results"


def test_notebook_13_says_what_the_committed_tables_say():
    (path,) = RESULTS.parents[1].glob("notebooks/13_*.ipynb")
    cells = nbformat.read(path, as_version=4).cells
    outputs = [output.get("data", {}).get("text/plain", "") for cell in cells for output in cell.get("outputs", [])]
    positions, readout, scaling, bias = (
        read_table(RESULTS / f"{name}-cpu.csv") for name in ("positions", "readout", "scaling", "bias")
    )
    known = set()
    turning = read_table(RESULTS / "equivariance-cpu.csv")
    for rows, baseline, column in (
        (positions, "none", "ahead of none (points)"), (positions, "learned, 1-D", "ahead of learned, 1-D (points)"),
        (scaling, "base", "ahead of base (points)"), (turning, "plain", "ahead of plain (points)"),
        (bias, "plain", "ahead of plain  "),
    ):  # fmt: skip
        (shown,) = [text for text in outputs if column in text]
        for model, *numbers, _ in against(rows, baseline):
            (line,) = re.findall(rf"^{re.escape(model)} {{2,}}.*", shown.split("\n\n")[0], re.M)
            assert [f"{number:.1f}" for number in numbers] == re.findall(r"-?\d+\.\d\b", line)[-3:]
            known |= {f"{abs(number):.1f}" for number in numbers}
    pairs = [("width, 1", "depth, 2"), ("all, 1", "width, 2"), ("all, 1", "depth, 2")]
    sweep = [(f"mean of patches, {rate}", f"class token, {rate}") for rate in (0.008, 0.016)]
    for rows, some in ((scaling, pairs), (readout, sweep)):
        for ahead in (lead(rows, *pair)[0][1:] for pair in some):
            assert any(re.search(r" +".join(f"{n:.1f}" for n in ahead), text) for text in outputs)
            known |= {f"{abs(number):.1f}" for number in ahead}
    flops = {row["model"]: row["flops"] for row in scaling}
    known |= {f"{each / flops['base']:.1f}" for each in flops.values()}
    best = {name: max(curve, key=lambda row: row[1])[0] for name, curve in rates(readout).items()}
    assert best == {"class token": 0.008, "mean of patches": 0.008}, "Both have the same best rate"
    (said,) = [cell.source for cell in cells if cell.source.startswith("Much of Fig. 8")]
    assert len(numbers := re.findall(r"\d+\.\d", said)) > 8 and set(numbers) <= known
    clear = [model for model, _, low, high, _ in against(scaling, "base") if low > 0 or high < 0]
    assert clear == [model for model in flops if not model.startswith(("base", "MLP"))]
    assert not any(low > 0 or high < 0 for _, _, low, high, _ in against(bias, "plain")), "no interval leaves zero out"
    (said,) = [cell.source for cell in cells if cell.source.startswith("*After* averaging")]
    (_, *flips, _), (_, *rotations, _) = against(turning, "plain")
    assert "Flips gain {:.1f} points [{:.1f}, {:.1f}]".format(*flips) in said.replace("−", "-")
    assert flips[1] < 0 < flips[2]
    mean, low, high = (-number for number in rotations)
    assert f"rotations cost {mean:.1f} [{high:.1f}, {low:.1f}]" in said and high > 0
    assert max(value for row in turning for name, value in row.items() if name.endswith("_after")) < 1e-6
    moved = {
        (model, group): np.mean([r[f"{group}_classes_before"] for r in turning if r["model"] == model])
        for model in ("plain", "averaged over rotations") for group in ("flips", "rotations")
    }  # fmt: skip
    assert re.findall(r"\d+(?= %)", said) == [f"{100 * moved[key]:.0f}" for key in (
        ("plain", "flips"), ("plain", "rotations"), ("averaged over rotations", "rotations")
    )]  # fmt: skip
    optimizers = read_table(RESULTS / "optimizers-cpu.csv")
    (said,) = [cell.source for cell in cells if cell.source.startswith("Adam leads SGD")]
    known = set()
    for name in ("ResNet", "ViT, patch 4"):
        for other in ("SGD", "SGD, rate × 10", "Muon"):
            ahead = lead(optimizers, f"{name}, {other}", f"{name}, Adam")[0][1:]
            assert any(re.search(r" +".join(f"{n:.1f}" for n in ahead), text) for text in outputs)
            assert ahead[2] < 0 if other.startswith("SGD") else ahead[1] > 0, "all intervals leave zero out"
            known |= {f"{abs(number):.1f}" for number in ahead}
    assert (numbers := re.findall(r"\d+\.\d", said)) and set(numbers) <= known
