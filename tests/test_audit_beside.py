"""`vitlens audit --beside` and its part of the page, on two models whose difference is known."""

import json
import re
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from audited import content_of, save_model, write_images
from support import vitlens
from test_changes import random_model
from timm.models import save_for_hf

from vitlens import evidence, load_model
from vitlens.digests import FILE, Digests, stored_digest
from vitlens.models import weights_digest
from vitlens_explorer import audit_changes


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """(folder of the model of `color_model`, folder of it with a constant logit of class 0)."""
    root = tmp_path_factory.mktemp("models")
    return save_model(root / "colors"), save_model(root / "blind", blind=True)


@pytest.fixture(scope="module")
def audited(models, tmp_path_factory):
    """(finished command, its folder, the folder of images)."""
    root = tmp_path_factory.mktemp("audited")
    data, out = write_images(root / "data"), root / "audit"
    first, second = models
    done = vitlens(
        "audit", first, "--data", data, "--out", out, "--device", "cpu", "--beside", second
    )
    return done, out, data


def test_audit_command_beside_writes_tables_and_record(audited, models):
    done, out, _ = audited
    assert "150 images take at most 3,000 forwards of both models" in done.stderr
    assert re.search(r"Changed groups: [12] of 3\. Changed heads: 0 of 2\.", done.stdout)
    groups, heads = pd.read_csv(out / "beside.csv"), pd.read_csv(out / "heads.csv")
    assert list(groups.columns) == list(evidence.CHANGE_COLUMNS)
    assert list(heads.columns) == list(evidence.HEAD_COLUMNS)
    assert groups["class"].iloc[0] == 0
    assert groups["changed"].iloc[0]
    assert len(heads) == 4
    assert str(out / "beside.csv") in done.stdout
    record = json.loads((out / "audit.json").read_text())
    weights = weights_digest(load_model(models[1]))
    assert record["beside"] == {"model": "blind", "weights": weights}
    assert not (out / "unfinished").exists()


def test_audit_page_beside_shows_the_lost_mark_first(audited):
    _, out, _ = audited
    page = content_of(out / "audit.html")
    part = page["beside"]
    table = pd.read_csv(out / "beside.csv")
    assert part["title"] == "Beside blind"
    assert part["lead"][0].startswith("colors is the first model, blind the second.")
    assert "100.0 % of the first model, 100.0 % of the second" in part["lead"][2]
    assert [row["group"] for row in part["groups"]] == table["group"].tolist()
    first = part["groups"][0]
    assert page["groups"][first["group"]]["name"] == "class 0"
    assert first["effect"] == pytest.approx(table["difference"][0], rel=1e-4)
    assert (first["low"], first["high"]) == pytest.approx(
        (table["low"][0], table["high"][0]), rel=1e-4
    )
    assert first["words"].endswith(", changed.")
    assert [chart["title"] for chart in part["charts"]] == [
        "Mean attention distance",
        "Entropy of attention",
    ]
    assert all(bar["effect"] == 0 for chart in part["charts"] for bar in chart["bars"])
    assert part["heads"][0].startswith(
        "Layer 0, head 0: the mean attention distance is 32.6 pixels"
    )


def test_audit_page_beside_words_are_plain(audited):
    _, out, _ = audited
    words = json.dumps(content_of(out / "audit.html")["beside"])
    assert not re.search(r"\b(cheat|bias(ed)?|shortcut|spurious)", words, re.I)


def test_audit_page_without_second_model_has_no_comparison(audited, models):
    """The same folder again: the tables of the comparison go, and the files of the audit are replaced."""
    _, out, data = audited
    copy = shutil.copytree(out, out.parent / "again")
    (copy / "notes.txt").write_text("mine")
    vitlens("audit", models[0], "--data", data, "--out", copy, "--device", "cpu")
    names = {path.name for path in copy.iterdir()}
    assert names.isdisjoint({"beside.csv", "heads.csv"})
    assert "notes.txt" in names
    assert content_of(copy / "audit.html")["beside"] is None
    assert "beside" not in json.loads((copy / "audit.json").read_text())


def test_audit_command_beside_reads_a_checkpoint_of_the_first(models, audited, tmp_path):
    _, out, data = audited
    weights = tmp_path / "blind.pth"
    torch.save(load_model(models[1]).state_dict(), weights)
    vitlens("audit", models[0], "--data", data, "--out", tmp_path / "audit", "--device", "cpu",
            "--beside", weights)  # fmt: skip
    for name in ("beside.csv", "heads.csv"):
        assert (tmp_path / "audit" / name).read_bytes() == (out / name).read_bytes()


def save_random(folder, **options):
    """The folder of a model of `random_model`."""
    model = random_model(**options)
    config = {"pretrained_cfg": {**model.pretrained_cfg, "crop_pct": 1.0}}
    sizes = {"img_size": 64, "patch_size": 8, "embed_dim": 16, "depth": 3, "num_heads": 2}
    arguments = sizes | {name: options[name] for name in sizes if name in options}
    save_for_hf(model, folder, model_config=config, model_args=arguments, safe_serialization=True)
    return folder


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_classes": 5}, "same classes, got 3 and 5"),
        ({"patch_size": 16}, "same patch grid, got 8 × 8 and 4 × 4"),
        ({"img_size": 128}, "images of one size, got 64 × 64"),
    ],
)
def test_audit_command_beside_refuses_other_models(models, audited, tmp_path, options, message):
    _, _, data = audited
    other = save_random(tmp_path / "other", **options)
    done = vitlens("audit", models[0], "--data", data, "--out", tmp_path / "out", "--device", "cpu",
                   "--beside", other, expect=2)  # fmt: skip
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out" / "audit.html").exists()


def test_audit_command_beside_refuses_the_same_and_missing_models(models, audited, tmp_path):
    _, _, data = audited
    for other, message in [(models[0], "are the same model"), ("missing.pth", "does not exist")]:
        done = vitlens("audit", models[0], "--data", data, "--out", tmp_path / "out",
                       "--beside", other, expect=2)  # fmt: skip
        assert message in done.stderr
        assert done.stderr.strip().count("\n") == 0


def test_audit_command_beside_of_other_head_counts_compares_groups(models, audited, tmp_path):
    _, _, data = audited
    other = save_random(tmp_path / "other")
    out = tmp_path / "audit"
    done = vitlens("audit", models[0], "--data", data, "--out", out, "--device", "cpu",
                   "--beside", other)  # fmt: skip
    words = "the first model has 2 layers of 1 heads, the second 3 layers of 2 heads."
    assert words in done.stderr
    assert "Changed heads" not in done.stdout
    part = content_of(out / "audit.html")["beside"]
    assert words in part["notes"][0]
    assert part["charts"] == part["heads"] == []
    assert pd.read_csv(out / "heads.csv").empty


@pytest.mark.parametrize("labeled", [True, False])
def test_audit_command_beside_leaves_out_training_images(models, tmp_path, labeled):
    data, out = write_images(tmp_path / "data", 90, labeled=labeled), tmp_path / "audit"
    paths = sorted(data.rglob("*.png"))
    second = shutil.copytree(models[1], tmp_path / "second")
    stored = np.array([stored_digest(path) for path in paths[:40]], dtype=np.uint64)
    (second / FILE).write_bytes(Digests(stored, np.zeros_like(stored)).to_bytes())
    done = vitlens("audit", models[0], "--data", data, "--out", out, "--device", "cpu",
                   "--beside", second)  # fmt: skip
    assert done.stderr.count("Second model: 40 of 90 images are left out") == 1
    assert "50 images take at most 1,000 forwards of both models" in done.stderr
    assert json.loads((out / "audit.json").read_text())["images"] == 50
    if not labeled:
        assert "no group is called changed" in done.stderr
        assert not pd.read_csv(out / "beside.csv")["changed"].any()


def test_changes_of_a_page_are_at_most_eight_of_a_kind():
    measures = torch.rand(20, 2, 6, 4, 2, generator=torch.Generator().manual_seed(0))
    heads = evidence.head_changes(measures, 0)
    groups = pd.DataFrame(columns=list(evidence.CHANGE_COLUMNS))
    found = evidence.Audit(*[None] * 6, changes=evidence.Changes(groups, heads, (0.5, 0.25)))
    part = audit_changes.content(found, "a", "b", labeled=True)
    assert [len(chart["bars"]) for chart in part["charts"]] == [8, 8]
    assert len(part["heads"]) == 8
    assert "50.0 % of the first model, 25.0 % of the second" in part["lead"][2]
    bar = part["charts"][0]["bars"][0]
    row = heads[heads["measure"] == "mean_distance"].iloc[0]
    assert bar["effect"] == row["difference"] / max(row["mean"], row["mean_beside"])


def test_page_beside_an_equal_model_says_that_nothing_changed():
    one = torch.rand(20, 1, 6, 4, 2, generator=torch.Generator().manual_seed(0))
    heads = evidence.head_changes(one.expand(-1, 2, -1, -1, -1), 0)
    groups = pd.DataFrame(columns=list(evidence.CHANGE_COLUMNS))
    found = evidence.Audit(*[None] * 6, changes=evidence.Changes(groups, heads, (0.5, 0.5)))
    part = audit_changes.content(found, "a", "b", labeled=True)
    assert part["lead"][3] == audit_changes.NOTHING
    assert "Changed heads: 0 of 24." in part["lead"][1]
