"""Snapshots equal the analysis functions, and training with them is bit-identical."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support import vit_of_transformers

from vitlens import attention, filters, positions
from vitlens.data import load
from vitlens.recorder.record import capture
from vitlens.train import fit, snapshots
from vitlens.train.recipes import recipe

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def data():
    return load("digits", "train").subset(256), load("digits", "valid").subset(100)


def tiny():
    return replace(recipe("digits").tiny(), drop_path=0.2)


def test_schedule_is_logarithmic_with_both_ends():
    steps = snapshots.schedule(15_000, 24)
    assert steps[0] == 0 and steps[1] == 1 and steps[-1] == 15_000 and len(steps) <= 24
    gaps = np.diff(steps)
    assert (gaps[1:] >= gaps[:-1]).mean() > 0.85 and len(steps) >= 18
    assert snapshots.schedule(1, 24) == [0, 1]


def test_changes_compare_first_and_last_snapshot():
    near = positions.TokenGrid(3, 3, (1, 1)).distances(dtype=torch.float64, device="cpu")
    table = near.reshape(3, 3, 3, 3).numpy()
    distances = np.array([[[9.0, 8.0]], [[1.0, 1.0]], [[7.0, 2.5]]])
    arrays = {"positions": np.stack([table, table, -table]), "distances": distances}
    assert snapshots.changes(arrays) == [
        "Position embeddings: rank correlation of similarity with distance 1.00 → −1.00.",
        "Nearest head: mean attention distance 8.0 → 2.5 px (layer 0, head 1).",
    ]
    assert snapshots.changes({"distances": np.full((2, 1, 2), np.nan)}) == []
    assert snapshots.changes({"positions": np.zeros((2, 1, 2, 1, 2))}) == []


def test_record_equals_analysis_functions(data):
    model, r = tiny().build(), tiny()
    images = snapshots.probe(data[1], r, n=12)
    assert len(images) == 12 and len(snapshots.probe(data[1], r)) == r.batch_size < 64
    model.blocks[0].eval()
    calls = []
    handle = model.head.register_forward_hook(lambda *_: calls.append(1))
    arrays = snapshots.record(model, images)
    handle.remove()
    assert len(calls) == 1, "one forward pass for all figures"
    assert [b.training for b in model.blocks] == [False, True] and model.training
    model.eval()
    with torch.no_grad(), capture(model) as attn:
        logits = model(images)
    expected = {
        "top1_confidence": logits.softmax(-1).amax(-1),
        "distances": attention.mean_distance(attn).mean(0),
        "rollout": attention.rollout(attn)[:8],
        "positions": positions.similarity(model),
        "prefix": torch.tensor(1),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(arrays[name], value.detach().numpy(), rtol=1e-3, atol=1e-3)
    components, variance = filters.principal(model, 12)  # a patch of 2×2×3 has twelve values
    assert arrays["filters"].shape == (28, 2, 2, 3) and not arrays["filters"][12:].any()
    np.testing.assert_allclose(arrays["filters"][:12], components, atol=1e-3)
    np.testing.assert_allclose(arrays["filters_variance"][:12], variance, atol=1e-3)
    assert arrays.pop("prefix").dtype == np.int64
    assert all(a.dtype == np.float16 and np.isfinite(a).all() for a in arrays.values())


def test_record_keeps_integers_and_halves_fractions(data):
    """float16 cannot represent odd numbers above 2,048."""
    model, source = tiny().build(), torch.tensor([[[2049, -1], [0, 4097]]])
    model.objective = SimpleNamespace(
        predict_pictures=lambda model, images: {"source": source, "predicted": source / 5000}
    )
    arrays = snapshots.record(model, snapshots.probe(data[1], tiny(), n=2))
    assert np.array_equal(arrays["source"], source) and arrays["predicted"].dtype == np.float16


def test_record_keeps_training_bit_identical(data):
    r, results = tiny(), []
    for watched in (False, True):
        model = r.build()
        images = snapshots.probe(data[1], r)
        for _ in fit(model, data, r, device="cpu"):
            if watched:
                snapshots.record(model, images)
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*results)


def test_record_takes_models_of_transformers():
    model = vit_of_transformers(image_size=32, patch_size=8)
    arrays = snapshots.record(model, torch.randn(2, 3, 32, 32))
    assert arrays["distances"].shape == (2, 3) and arrays["rollout"].shape == (2, 4, 4)
    assert arrays["positions"].shape == (4, 4, 4, 4)


def test_save_replaces_a_run_of_other_shapes(tmp_path):
    path = tmp_path / "snapshots.npz"
    for step in (0, 5):
        snapshots.save(path, step, {"rollout": np.zeros((6, 8, 8))})
    snapshots.save(path, 0, {"rollout": np.ones((1, 4, 4)), "distances": np.ones((2, 3))})
    arrays = snapshots.load(path)
    assert arrays["steps"].tolist() == [0]
    assert arrays["rollout"].shape == (1, 1, 4, 4) and arrays["distances"].shape == (1, 2, 3)


def test_save_appends_and_drops_later_steps(data, tmp_path):
    path, arrays = tmp_path / "s.npz", {"a": np.arange(3, dtype=np.float16)}
    for step in (0, 1, 4, 9):
        snapshots.save(path, step, {"a": arrays["a"] + step})
    snapshots.save(path, 4, {"a": arrays["a"] - 1})  # resumed from a checkpoint before step 4
    stored = snapshots.load(path)
    assert stored["steps"].tolist() == [0, 1, 4]
    assert stored["a"].tolist() == [[0, 1, 2], [1, 2, 3], [-1, 0, 1]]
    assert list(tmp_path.iterdir()) == [path]
