"""Ablation over data: the same as intervening by hand, cheaper, and resumed to the same bytes."""

import csv
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import timm
import torch
from PIL import Image
from scipy.stats import t as student
from test_cli import saved, vitlens

from vitlens import UnsupportedModelError, ablation, intervene, load_model
from vitlens.data import ImageSet
from vitlens.data.augment import normalized
from vitlens.evaluate import passage, scores


def small(name="vit_tiny_patch16_224", **more):
    torch.manual_seed(0)
    sizes = dict(img_size=32, patch_size=8, embed_dim=24, depth=3, num_heads=2, num_classes=4) | more
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


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_base_patch16_siglip_224", "beit_base_patch16_224"])
def test_effects_equal_interventions_by_hand(name):
    model, data = small(name), labeled()
    found = ablation.effects(model, data, batch=5, seed=3, **QUIET)
    rows = torch.randperm(11, generator=torch.Generator().manual_seed(3))
    x = normalized(data.images[rows], model.pretrained_cfg["mean"], model.pretrained_cfg["std"])
    labels = data.labels[rows]
    before = torch.cat([model(part) for part in x.tensor_split(2)]).detach().double()
    heads = [(layer, head) for layer in range(3) for head in range(2)]
    heads += [("pool", head) for head in range(2)] if "siglip" in name else []
    assert len(found) == 2 * len(heads) and set(found.images) == {11}
    for row in found.to_dict("records"):
        reference = {"zero": None, "mean": x}[row["way"]]
        with torch.no_grad(), intervene(model, heads={(row["layer"], row["head"]): row["way"]}, reference=reference):
            after = model(x).double()
        right, was = after.argmax(1) == labels, before.argmax(1) == labels
        assert row["accuracy"] == pytest.approx(100 * right.double().mean().item())
        assert row["change"] == pytest.approx(100 * (right.double() - was.double()).mean().item())
        assert row["flipped"] == pytest.approx(100 * (after.argmax(1) != before.argmax(1)).double().mean().item())
        p, q = before.softmax(1), after.softmax(1)
        each = (p * (p / q).log()).sum(1)
        half = student.ppf(0.975, 10) * each.std().item() / math.sqrt(11)
        assert row["kl"] == pytest.approx(each.mean().item(), rel=1e-4, abs=1e-9)
        assert row["kl_high"] - row["kl"] == pytest.approx(half, rel=1e-4, abs=1e-9)
        margins = []
        for logits in (after, before):
            rest = [logits[i, [c for c in range(4) if c != label]].max() for i, label in enumerate(labels.tolist())]
            margins.append(logits[range(11), labels] - torch.stack(rest))
        assert row["margin"] == pytest.approx((margins[0] - margins[1]).mean().item(), rel=1e-4, abs=1e-6)


def stopped_after(monkeypatch, runs):
    """A kill in the middle of a batch."""
    count, again = [0], passage.Passage.again

    def counted(self, *args, **kwargs):
        count[0] += 1
        if count[0] > runs:
            raise KeyboardInterrupt
        return again(self, *args, **kwargs)

    monkeypatch.setattr(passage.Passage, "again", counted)
    return count


@pytest.mark.parametrize("function, runs", [("effects", 30), ("pruning", 17), ("pruning", 40), ("step", 17)])
def test_a_killed_table_is_continued_to_the_same_bytes(tmp_path, monkeypatch, function, runs):
    model, data = small(), labeled(14)
    more = {"pruning": dict(choose=6, orders=2), "step": dict(choose=6, orders=2, step=2)}.get(function, {})
    function = "pruning" if function == "step" else function
    call = lambda out: getattr(ablation, function)(model, data, batch=3, out=tmp_path / out, **more, **QUIET)  # noqa: E731
    whole = call("whole.csv")
    with monkeypatch.context() as patch:
        stopped_after(patch, runs)
        with pytest.raises(KeyboardInterrupt):
            call("killed.csv")
    assert (tmp_path / "killed.csv").read_bytes() != (tmp_path / "whole.csv").read_bytes()
    with monkeypatch.context() as patch:
        count = stopped_after(patch, 10**6)
        again = call("killed.csv")
        rest = count[0]
        call("killed.csv")
        assert count[0] == rest, "nothing is left to do"
    assert (tmp_path / "killed.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()
    pd.testing.assert_frame_equal(again, whole)


def test_a_table_of_something_else_is_not_continued(tmp_path):
    model, data = small(), labeled()
    ablation.effects(model, data, ways=["zero"], out=tmp_path / "heads.csv", **QUIET)
    with torch.no_grad():
        other = small()
        other.head.bias += 1
    for call in (
        lambda out: ablation.effects(other, data, ways=["zero"], out=out, **QUIET),
        lambda out: ablation.effects(model, labeled(10), ways=["zero"], out=out, **QUIET),
        lambda out: ablation.effects(model, replace(data, pictures="others"), ways=["zero"], out=out, **QUIET),
        lambda out: ablation.effects(model, data, ways=["mean"], out=out, **QUIET),
        lambda out: ablation.pruning(model, data, choose=3, out=out, **QUIET),
    ):
        with pytest.raises(ValueError, match=r"heads.csv is of another model, other images or other settings"):
            call(tmp_path / "heads.csv")


def test_pruning_takes_the_head_next_that_moves_the_probabilities_least():
    model, data = small(), labeled(14)
    found = ablation.pruning(model, data, way="zero", choose=6, orders=2, batch=4, **QUIET)
    rows = torch.randperm(14, generator=torch.Generator().manual_seed(0))
    x = normalized(data.images[rows], model.pretrained_cfg["mean"], model.pretrained_cfg["std"])
    labels, removed = data.labels[rows], []

    def without(heads, images):
        with torch.no_grad(), intervene(model, heads=dict.fromkeys(heads, "zero")):
            return model(images).double()

    before = without([], x[:6])
    greedy = found[found.order == "greedy"]
    for step, row in enumerate(greedy.to_dict("records")):
        if step:
            left = [(layer, head) for layer in range(3) for head in range(2) if (layer, head) not in removed]
            moved = [
                torch.nn.functional.kl_div(
                    without([*removed, head], x[:6]).log_softmax(1),
                    before.log_softmax(1),
                    reduction="batchmean",
                    log_target=True,
                )
                for head in left
            ]
            removed.append(left[int(torch.stack(moved).argmin())])
            assert (row["layer"], row["head"]) == removed[-1]
        right = (without(removed, x[6:]).argmax(1) == labels[6:]).sum().item()
        assert (row["removed"], row["images"]) == (step, 8)
        assert (row["accuracy"], row["low"], row["high"]) == pytest.approx(scores.proportion(right, 8))
    assert list(found.order.unique()) == ["greedy", "random 0", "random 1"]
    last = found[found.removed == 6].accuracy
    assert len(last) == 3 and last.nunique() == 1, "at the end all are removed, in whatever order"
    for name in ("random 0", "random 1"):
        assert len(found[(found.order == name) & (found.removed > 0)][["layer", "head"]].drop_duplicates()) == 6


def test_pruning_several_heads_at_once_takes_those_that_move_least_alone():
    model, data = small(), labeled(14)
    whole = ablation.pruning(model, data, way="zero", choose=6, orders=1, batch=4, **QUIET)
    found = ablation.pruning(model, data, way="zero", choose=6, orders=1, step=4, batch=4, **QUIET)
    measured = found[found.images > 0]
    assert measured.removed.tolist() == [0, 4, 6] * 2 and (found[found.images == 0].accuracy == "").all()
    same = whole[(whole.order == "random 0") & whole.removed.isin([0, 4, 6])]
    assert measured[measured.order == "random 0"].accuracy.tolist() == same.accuracy.tolist()
    x = normalized(
        data.images[torch.randperm(14, generator=torch.Generator().manual_seed(0))[:6]],
        model.pretrained_cfg["mean"],
        model.pretrained_cfg["std"],
    )
    before, moved = model(x).double(), {}
    for head in [(layer, head) for layer in range(3) for head in range(2)]:
        with torch.no_grad(), intervene(model, heads={head: "zero"}):
            moved[head] = float(ablation.divergence(before, model(x).double()).mean())
    first = found[(found.order == "greedy") & found.removed.between(1, 4)]
    assert list(zip(first.layer, first["head"], strict=True)) == sorted(moved, key=moved.get)[:4]


@pytest.mark.parametrize("way", ["zero", "mean"])
def test_the_layers_below_are_not_run_again(way):
    """All heads of twelve layers cost at most 0.6 of as many forwards, counted in blocks that run."""
    model, data, runs = small(depth=12, num_heads=3), labeled(40), []
    for block in model.blocks:
        block.register_forward_hook(lambda *_: runs.append(1))
    ablation.effects(model, data, ways=way, batch=2, **QUIET)
    batches, heads = 20, 36
    expected = batches * (12 + 3 * sum(range(1, 13))) + 12  # once from the first block to see that this is the model
    assert len(runs) == expected + (batches * 12 if way == "mean" else 0)
    assert len(runs) <= 0.6 * batches * heads * 12


def test_the_interval_of_a_change_is_agresti_and_mins():
    """Table 2 of their paper's kind: 150 and 86 of 1600 changed."""
    found = scores.paired(lost=150, gained=86, images=1600)
    n, b, c = 1602, 150.5, 86.5
    half = 1.959963985 * math.sqrt((b + c) - (b - c) ** 2 / n) / n
    assert found == pytest.approx((-4.0, 100 * ((c - b) / n - half), 100 * ((c - b) / n + half)))
    none = scores.paired(0, 0, 1000)
    assert none.value == 0 and 0.19 < none.high < 0.2 and none.low == -none.high
    assert scores.half_width(2.0, 25) == pytest.approx(student.ppf(0.975, 24) * 2 / 5)


def colored(folder):
    """Pictures whose color is their class, by number, with some noise."""
    for label, color in enumerate(((0, 0, 255), (0, 255, 0), (255, 0, 0))):
        (folder / str(label)).mkdir(parents=True)
        for i in range(8):
            noise = np.random.default_rng(i).integers(-60, 60, (36, 40, 3))
            Image.fromarray(np.clip(np.array(color) + noise, 0, 255).astype(np.uint8)).save(folder / f"{label}/{i}.png")
    (folder / "2" / "damaged.png").write_bytes(b"no picture")
    return folder


def test_the_command(tmp_path, monkeypatch):
    model, data = saved(tmp_path / "model"), colored(tmp_path / "data")
    common = ("ablate", model, "--data", data, "--batch", 6, "--workers", 0)
    said = vitlens(*common, "--out", tmp_path / "heads.csv")
    head, columns, *rows = (tmp_path / "heads.csv").read_text().splitlines()
    assert head.startswith("# vitlens ablate ") and str(tmp_path) not in head and head.endswith("; 4 of 4 batches")
    assert len(rows) == 2 * 3 * 2 and {row["images"] for row in csv.DictReader([columns, *rows])} == {"24"}
    assert "ten largest by KL" in said.stdout and "have no names" in said.stderr
    ablation.effects(load_model(model), str(data), batch=6, workers=0, out=tmp_path / "again.csv", **QUIET)
    assert (tmp_path / "again.csv").read_text().splitlines()[1:] == [columns, *rows]
    pruned = ("--prune", "--choose", 6, "--orders", 1, "--images", 20, "--out", tmp_path / "pruning.csv")
    assert "random 0" in vitlens(*common, *pruned).stdout
    assert len((tmp_path / "pruning.csv").read_text().splitlines()) == 2 + 2 * 7
    zero = vitlens(*common, *pruned[:-1], tmp_path / "new" / "zero.csv", "--ways", "zero")
    assert "random 0" in zero.stdout and ", zero, the first 6" in (tmp_path / "new" / "zero.csv").read_text()
    refused = vitlens(*common, *pruned[:-1], tmp_path / "y.csv", "--ways", "zero,mean", expect=2)
    assert "'mean' or to 'zero', got 'zero,mean'" in refused.stderr
    assert "Add --prune" in vitlens(*common, "--choose", 6, "--out", tmp_path / "x.csv", expect=2).stderr
    assert "needs --data" in vitlens("ablate", model, "--out", tmp_path / "x.csv", expect=2).stderr
    assert "other settings" in vitlens(*common, "--seed", 1, "--out", tmp_path / "heads.csv", expect=2).stderr
    with pytest.raises(UnsupportedModelError, match="a single class, so its answer is always the same"):
        ablation.effects(small(num_classes=1), labeled(), **QUIET)
    with pytest.raises(UnsupportedModelError, match="convolutions"):
        ablation.effects(timm.create_model("resnet18"), labeled(), **QUIET)


@pytest.mark.parametrize("call, options", [(ablation.effects, {}), (ablation.pruning, dict(choose=3, orders=1))])
def test_a_damaged_table_is_refused_and_left(tmp_path, call, options):
    model, data, out = small(), labeled(), tmp_path / "heads.csv"
    call(model, data, out=out, **options, **QUIET)
    whole = out.read_bytes()
    head, columns, *rows = whole.splitlines(keepends=True)
    assert call(model, data, out=out, **options, **QUIET).shape[0] == len(rows)
    for damaged in (
        head, head + columns, whole[:-30], whole[:-1], head + columns + b"".join(rows[:-1]),
        head + columns.replace(b"accuracy", b"right") + b"".join(rows), head + columns + rows[0][:9] + b"\n",
        head + columns + b"1," + b"".join(rows), head + columns + b"".join(rows[:3] + rows[4:]),
        head + columns + b"".join(rows[:6] + rows[7:]),  # of pruning, the last of the greedy order
    ):  # fmt: skip
        out.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"heads.csv is damaged: some of it is missing. Delete it"):
            call(model, data, out=out, **options, **QUIET)
        assert out.read_bytes() == damaged
    for other in (b"", b"\xff\xfe\x00", b"layer,head\n0,0\n"):
        out.write_bytes(other)
        with pytest.raises(ValueError, match="heads.csv is of another model, other images or other settings"):
            call(model, data, out=out, **options, **QUIET)


@pytest.mark.parametrize(
    "more, match",
    [
        (dict(ways=["average"]), "zero, mean; got 'average'"),
        (dict(ways="average"), "got 'average'"),
        (dict(ways=[]), "zero, mean"),
        (dict(images=1), "at least 2 images, got 1"),
        (dict(batch=0), "batch must be a whole number of at least 1"),
    ],
)
def test_wrong_use(more, match):
    with pytest.raises(ValueError, match=match):
        ablation.effects(small(), labeled(), **more, **QUIET)
    with pytest.raises(ValueError, match="'mean' or to 'zero', got 'resample'"):
        ablation.pruning(small(), labeled(), way="resample", **QUIET)
    with pytest.raises(ValueError, match="at least 102 images, got 11"):
        ablation.pruning(small(), labeled(), **QUIET)


def test_effects_of_models_in_other_precisions():
    """The rounding of the weights, not that of the computation, makes the difference."""
    data, columns = labeled(), ["kl", "margin"]
    expected = ablation.effects(small().double(), data, batch=5, seed=3, **QUIET)[columns]
    for precision, close in {torch.float32: 1e-5, torch.float16: 0.01, torch.bfloat16: 0.1}.items():
        found = ablation.effects(small().to(precision), data, batch=5, seed=3, **QUIET)[columns]
        np.testing.assert_allclose(found, expected, rtol=0, atol=close * expected.abs().to_numpy().max())
