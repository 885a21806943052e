"""Studies in miniature: kinds of models, subsets, records, intervals and the committed tables."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import ttest_1samp
from timm.layers import HybridEmbed, StdConv2d

from experiments import studies
from experiments.designs import STUDIES, study
from experiments.networks import Network
from experiments.studies import (
    against,
    curves,
    lead,
    rates,
    read_insides,
    read_table,
    run_study,
    scales,
    seeds_needed,
)
from vitlens import load_model
from vitlens.data import load
from vitlens.recorder.supported import token_grid
from vitlens.scores import proportion
from vitlens_paper.evaluate import compute

RESULTS = Path(__file__).parent.parent / "data" / "results"
DIGITS = replace(study("data-size-digits").tiny(), seeds=(0,), sizes=(40,))
VALUES = {
    "a, 0.1": np.array([40.0, 50, 45]),
    "a, 0.2": np.array([60.0, 62, 70]),
    "b, 0.1": np.array([30.0, 33, 39]),
}
RECORDS = [
    {
        "model": name,
        "images": 10,
        "seed": seed,
        "lr": float(name[3:]),
        "top1": value,
        "flops": 1000 * float(name[3:]),
    }
    for name, values in VALUES.items()
    for seed, value in enumerate(values)
]


def test_networks_equal_paper_kinds():
    for name in ("data-size-cpu", "data-size", "hybrid-cpu", "data-size-digits"):
        grids = {}
        for title, variant in study(name).models.items():
            plan = study(name).plan(studies.Cell(title, study(name).sizes[0], 0))
            model = variant.build(plan)
            assert any(isinstance(m, StdConv2d) for m in model.modules()) == (variant.kind != "ViT")
            assert hasattr(model, "blocks") == (variant.kind != "ResNet")
            assert isinstance(getattr(model, "patch_embed", None), HybridEmbed) == (
                variant.kind == "hybrid"
            )
            with torch.no_grad():
                assert model(torch.randn(2, 3, plan.image_size, plan.image_size)).shape == (
                    2,
                    study(name).classes,
                )
            if variant.kind != "ResNet":
                grids[variant.kind] = token_grid(model, (plan.image_size,) * 2)
        assert len(set(grids.values())) == 1, "a hybrid has the tokens of the ViT"


def test_network_weights_depend_on_the_seed_and_open_again(tmp_path):
    plan = study("hybrid-cpu").plan(studies.Cell("R10+ViT/8", 100_000, 0))
    network = Network(width=24, depth=2, heads=3, stages=(1, 1, 1), channels=32)
    model, again, other = (network.build(replace(plan, seed=seed)).eval() for seed in (0, 0, 1))
    x = torch.randn(2, 3, 64, 64)
    network.save(model, tmp_path, plan, [str(k) for k in range(200)])
    with torch.no_grad():
        assert torch.equal(model(x), again(x)) and not torch.equal(model(x), other(x))
        torch.testing.assert_close(load_model(tmp_path)(x), model(x), atol=2e-3, rtol=0.02)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A small study and its folder."""
    out = tmp_path_factory.mktemp("whole")
    return run_study(DIGITS, "digits", out, device="cpu"), out


def test_study_records_equal_measurements(whole):
    records, out = whole
    valid = studies.chosen(load("digits", "valid"), DIGITS.classes)
    for record, cell in zip(records, DIGITS.cells(), strict=True):
        model = DIGITS.models[cell.model].build(DIGITS.plan(cell))
        assert (record["model"], record["images"], record["seed"]) == (
            cell.model,
            cell.images,
            cell.seed,
        )
        assert (record["flops"], record["parameters"]) == (
            compute.flops(model, 8),
            compute.parameters(model),
        )
        assert record["exaflops"] == pytest.approx(3 * record["flops"] * 6 * 20 / 1e18)
        right = round(record["top1"] * len(valid) / 100)
        assert (record["top1"], record["low"], record["high"]) == pytest.approx(
            proportion(right, len(valid)), abs=1e-3
        )
    assert run_study(DIGITS, "digits", out, device="cpu") == records and not list(
        out.glob("runs/*")
    )
    found, picture = studies.insides(DIGITS, out)
    studies.write_insides(out / "i.npz", found, picture)
    again, image = read_insides(out / "i.npz")
    assert list(again) == ["ViT, patch 2"] and again["ViT, patch 2"]["distances"].shape == (1, 2, 3)
    assert image.shape == (8, 8, 3)
    arrays = {name: {key: array[0] for key, array in each.items()} for name, each in found.items()}
    assert len(studies.variants(arrays | {"none": {}}, picture=picture, uniform=4.0).axes) >= 10


def test_stopped_study_continues_to_the_same_record(whole, tmp_path, monkeypatch):
    """Stopped in the second training, after a checkpoint."""
    fit, begun = studies.fit, []

    def stopping(*args, **kwargs):
        begun.append(1)
        for step in fit(*args, **kwargs):
            yield step
            if len(begun) == 2 and step.step == 3:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(studies, "fit", stopping)
        run_study(DIGITS, "digits", tmp_path, device="cpu")
    keys = ("model", "top1", "five_shot", "flops", "exaflops")
    again = run_study(DIGITS, "digits", tmp_path, device="cpu")
    assert [[r[k] for k in keys] for r in again] == [[r[k] for k in keys] for r in whole[0]]


def test_study_starts_from_pretrained_weights(tmp_path):
    small = study("masked-cpu-short").tiny()
    small = replace(
        small, seeds=(0,), sizes=(40,), recipe=replace(small.recipe, image_size=16, patch_size=4)
    )
    small = replace(small, models={name: small.models[name] for name in list(small.models)[:2]})
    scratch, tuned = run_study(small, "digits", tmp_path, device="cpu")
    assert (scratch["pretraining"], scratch["unlabeled"]) == ("", 0) and tuned[
        "pretraining"
    ] == "masked-patches"
    assert tuned["exaflops"] > scratch["exaflops"] and tuned["pretraining_steps"] == 4
    found, _ = studies.insides(small, tmp_path)
    before = [found[f"{name}, before tuning"]["filters"] for name in small.models]
    assert len(found) == 4 and not np.array_equal(*before)


def test_subsets_are_nested_and_renumbered():
    digits = load("digits", "train")
    few, more = (set(studies.support(digits.labels, n, 0).tolist()) for n in (5, 20))
    assert len(few) == 50 and few < more
    some = studies.chosen(digits, 5)
    kept = torch.isin(digits.labels, torch.tensor([int(name) for name in some.class_names]))
    assert torch.equal(some.images, digits.images[kept])
    assert torch.equal(
        torch.tensor([int(some.class_names[k]) for k in some.labels]), digits.labels[kept]
    )


def test_intervals_equal_student():
    for name in VALUES:
        (row,) = [row for row in curves(RECORDS)[name]]
        interval = ttest_1samp(VALUES[name], 0).confidence_interval(0.95)
        assert row == pytest.approx(
            (10, VALUES[name].mean(), max(0, interval.low), min(100, interval.high))
        )
    difference = VALUES["a, 0.2"] - VALUES["b, 0.1"]
    ((_, *found),) = lead(RECORDS, "a, 0.2", "b, 0.1")
    assert found == pytest.approx(
        (difference.mean(), *ttest_1samp(difference, 0).confidence_interval(0.95))
    )
    assert against(RECORDS, "b, 0.1")[1] == pytest.approx(
        ("a, 0.2", *found, seeds_needed(difference))
    )
    assert [row[0] for row in rates(RECORDS)["a"]] == [0.1, 0.2]
    renamed = [row | {"model": row["model"].replace("b, 0.1", "base")} for row in RECORDS]
    assert [row[0] for row in scales(renamed, "base")["a"]] == pytest.approx([1, 1, 2])


def test_seeds_needed_equals_power_tables():
    values = np.array([-1.0, 1, -1, 1])
    for size, seeds in ((0.2, 199), (0.5, 34), (0.8, 15), (1.5, 6)):
        assert seeds_needed(values / values.std(ddof=1) + size) == seeds


TABLES = [path for path in sorted(RESULTS.glob("*.csv")) if path.stem in STUDIES]


def test_committed_studies_are_complete():
    assert len(TABLES) >= 10
    for path in TABLES:
        rows, each = read_table(path), study(path.stem)
        for row, cell in zip(rows, each.cells(), strict=True):
            assert (row["model"], row["images"], row["seed"]) == (
                cell.model,
                cell.images,
                cell.seed,
            ), path
            assert row["steps"] == each.plan(cell).steps and row["low"] <= row["top1"] <= min(
                row["high"], row["best"]
            )
        assert studies.figure(each, rows).axes


@pytest.mark.slow
@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_committed_studies_record_model_size(path):
    rows, each = read_table(path), study(path.stem)
    for row, cell in zip(rows, each.cells(), strict=True):
        if cell.seed == 0 and cell.images == min(each.sizes):
            plan = each.plan(cell)
            model = each.models[cell.model].build(plan)
            size = compute.parameters(model), compute.flops(model, plan.image_size)
            assert size == (row["parameters"], row["flops"])
