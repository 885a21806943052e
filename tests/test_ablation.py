"""Ablation of single heads over data equals interventions by hand, and pruning removes heads in the right order."""

import math

import numpy as np
import pandas as pd
import pytest
import timm
import torch
from scipy.stats import t as student
from support import colors, refuses, saved_model, vitlens

from experiments import pruning
from vitlens import UnsupportedModelError, intervene, load_model, scores
from vitlens.data import ImageSet
from vitlens.data.augment import normalize
from vitlens_paper.evaluate import ablation


def small(name="vit_tiny_patch16_224", **more):
    torch.manual_seed(0)
    sizes = (
        dict(img_size=32, patch_size=8, embed_dim=24, depth=3, num_heads=2, num_classes=4) | more
    )
    model = timm.create_model(name, **sizes).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def labeled(n=11, seed=0):
    rng = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (n, 3, 32, 32), dtype=torch.uint8, generator=rng)
    return ImageSet(images, torch.arange(n) % 4, ("0", "1", "2", "3"))


QUIET = dict(progress=False, say=lambda text: None)


@pytest.mark.parametrize("name", ["vit_base_patch16_siglip_224", "beit_base_patch16_224"])
def test_effects_equal_interventions_by_hand(name):
    model, data = small(name), labeled()
    found = ablation.effects(model, data, batch=5, seed=3, **QUIET)
    rows = torch.randperm(11, generator=torch.Generator().manual_seed(3))
    x = normalize(data.images[rows], model.pretrained_cfg["mean"], model.pretrained_cfg["std"])
    labels = data.labels[rows]
    before = torch.cat([model(part) for part in x.tensor_split(2)]).detach().double()
    heads = [(layer, head) for layer in range(3) for head in range(2)]
    heads += [("pool", head) for head in range(2)] if "siglip" in name else []
    assert len(found) == 2 * len(heads) and set(found.images) == {11}
    for row in found.to_dict("records"):
        reference = {"zero": None, "mean": x}[row["way"]]
        with (
            torch.no_grad(),
            intervene(model, heads={(row["layer"], row["head"]): row["way"]}, reference=reference),
        ):
            after = model(x).double()
        right, was = after.argmax(1) == labels, before.argmax(1) == labels
        assert row["accuracy"] == pytest.approx(100 * right.double().mean().item())
        assert row["change"] == pytest.approx(100 * (right.double() - was.double()).mean().item())
        assert row["flipped"] == pytest.approx(
            100 * (after.argmax(1) != before.argmax(1)).double().mean().item()
        )
        p, q = before.softmax(1), after.softmax(1)
        each = (p * (p / q).log()).sum(1)
        half = student.ppf(0.975, 10) * each.std().item() / math.sqrt(11)
        assert row["kl"] == pytest.approx(each.mean().item(), rel=1e-4, abs=1e-9)
        assert row["kl_high"] - row["kl"] == pytest.approx(half, rel=1e-4, abs=1e-9)
        margins = []
        for logits in (after, before):
            rest = [
                logits[i, [c for c in range(4) if c != label]].max()
                for i, label in enumerate(labels.tolist())
            ]
            margins.append(logits[range(11), labels] - torch.stack(rest))
        assert row["margin"] == pytest.approx(
            (margins[0] - margins[1]).mean().item(), rel=1e-4, abs=1e-6
        )


def test_paired_interval_equals_agresti_and_min():
    """Table 2 of their paper's kind: 150 and 86 of 1600 changed."""
    found = scores.paired(lost=150, gained=86, images=1600)
    n, b, c = 1602, 150.5, 86.5
    half = 1.959963985 * math.sqrt((b + c) - (b - c) ** 2 / n) / n
    assert found == pytest.approx((-4.0, 100 * ((c - b) / n - half), 100 * ((c - b) / n + half)))
    none = scores.paired(0, 0, 1000)
    assert none.value == 0 and 0.19 < none.high < 0.2 and none.low == -none.high
    values = np.random.default_rng(0).normal(size=25)
    assert scores.student(values) == pytest.approx(student.ppf(0.975, 24) * values.std(ddof=1) / 5)


def test_divergence_ignores_excluded_classes():
    before, after = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    more = [torch.cat([logits, torch.full((5, 1), -torch.inf)], 1) for logits in (before, after)]
    torch.testing.assert_close(ablation.divergence(*more), ablation.divergence(before, after))


def test_effects_in_half_precision():
    """The rounding of the weights, not that of the computation, makes the difference."""
    data, columns = labeled(), ["kl", "margin"]
    expected = ablation.effects(small().double(), data, batch=5, seed=3, **QUIET)[columns]
    for precision, close in {torch.float32: 1e-5, torch.bfloat16: 0.1}.items():
        found = ablation.effects(small().to(precision), data, batch=5, seed=3, **QUIET)[columns]
        np.testing.assert_allclose(
            found, expected, rtol=0, atol=close * expected.abs().to_numpy().max()
        )


def test_effects_written_until_interrupt(tmp_path, monkeypatch):
    model, data, out = small(), labeled(14), tmp_path / "new" / "heads.csv"
    whole = ablation.effects(model, data, batch=7, out=out, **QUIET)
    pd.testing.assert_frame_equal(pd.read_csv(out), whole, check_dtype=False)
    measures, calls = ablation._measures, []

    def stopped(*arguments):
        calls.append(1)
        if len(calls) > 20:
            raise KeyboardInterrupt
        return measures(*arguments)

    monkeypatch.setattr(ablation, "_measures", stopped)
    refuses("heads.csv already exists", ablation.effects, model, data, batch=7, out=out, **QUIET)
    out = tmp_path / "stopped.csv"
    with pytest.raises(KeyboardInterrupt):
        ablation.effects(model, data, batch=7, out=out, **QUIET)
    table = pd.read_csv(out)
    assert (
        set(table["images"]) == {7}
        and len(table) == len(whole)
        and table["command"][0] == "ablation.effects"
    )


def test_ablate_command_writes_csv(tmp_path):
    model, data = saved_model(tmp_path / "model"), tmp_path / "data"
    colors(data, 8, "012")
    out = tmp_path / "heads.csv"
    done = vitlens("ablate", model, "--data", data, "--batch", 6, "--workers", 0, "--out", out)
    table = pd.read_csv(out)
    assert (
        len(table) == 2 * 3 * 2
        and set(table["images"]) == {24}
        and "ten largest by KL" in done.stdout
    )
    assert (
        table["command"][0].startswith("vitlens ablate ") and str(tmp_path) not in out.read_text()
    )
    quiet = ablation.effects(load_model(model), str(data), batch=6, workers=0, **QUIET)
    pd.testing.assert_frame_equal(
        table.drop(columns="command"), quiet.drop(columns="command"), check_dtype=False
    )


REFUSALS = (
    (
        lambda: ablation.effects(small(), labeled(), ways="average"),
        ValueError,
        "zero, mean, got 'average'",
    ),
    (
        lambda: ablation.effects(timm.create_model("resnet18"), labeled()),
        UnsupportedModelError,
        "convolutions",
    ),
)
"""A call, its error and decisive words."""


@pytest.mark.parametrize("call, error, words", REFUSALS)
def test_ablation_refuses(call, error, words):
    refuses(words, call, error=error)


def test_pruning_removes_least_effective_head():
    model, data = small(), labeled(14)
    x = normalize(data.images, model.pretrained_cfg["mean"], model.pretrained_cfg["std"])
    table = pd.DataFrame(
        pruning.pruned(model, [x[:6]], [(x[6:], data.labels[6:])], orders=2, way="zero")
    )
    greedy, removed = table[table["order"] == "greedy"], []

    def without(heads, images):
        with torch.no_grad(), intervene(model, heads=dict.fromkeys(heads, "zero")):
            return model(images).double()

    for step, row in enumerate(greedy.to_dict("records")):
        if step:
            left = [
                (layer, head)
                for layer in range(3)
                for head in range(2)
                if (layer, head) not in removed
            ]
            moved = [
                torch.nn.functional.kl_div(
                    without([*removed, head], x[:6]).log_softmax(1),
                    without([], x[:6]).log_softmax(1),
                    reduction="batchmean",
                    log_target=True,
                )
                for head in left
            ]
            removed.append(left[int(torch.stack(moved).argmin())])
            assert (row["layer"], row["head"]) == removed[-1]
        right = (without(removed, x[6:]).argmax(1) == data.labels[6:]).sum().item()
        assert (row["accuracy"], row["low"], row["high"]) == pytest.approx(
            scores.proportion(right, 8)
        )
    assert list(table["order"].unique()) == ["greedy", "random 0", "random 1"]
    assert table[table["removed"] == 6]["accuracy"].nunique() == 1, (
        "with all heads removed the order does not matter"
    )
