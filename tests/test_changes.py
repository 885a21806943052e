"""Two models compared by an audit, with references in float64 and models whose difference is known."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
import timm
import torch
from test_evidence import PATCH, PLACE, SIDE, color_model, marked, trained_on

import vitlens
from experiments import plants
from vitlens import evidence
from vitlens.digests import Digests
from vitlens.recorder.supported.card import write_card

HEADS, LAYERS, WIDTH = 2, 3, 16


def blind_model():
    """The model of `color_model` with a constant logit of class 0, so the mark of class 0 matters less."""
    model = color_model()
    with torch.no_grad():
        model.head.weight[0] = 0
    return model


def random_model(seed=0, heads=HEADS, depth=LAYERS, **options):
    """A ViT with random weights, large enough in its attention that heads differ."""
    torch.manual_seed(seed)
    sizes = {"img_size": PATCH * SIDE, "patch_size": PATCH, "embed_dim": WIDTH} | options
    arguments = {"depth": depth, "num_heads": heads, "num_classes": 3} | sizes
    model = timm.create_model("vit_tiny_patch16_224", **arguments).eval()
    model.pretrained_cfg.update(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.4)
    return model


def swapped(model, layer, first, second):
    """A copy with two heads of a layer exchanged, which leaves the model's function unchanged."""
    other = copy.deepcopy(model)
    order = list(range(HEADS))
    order[first], order[second] = second, first
    width = WIDTH // HEADS
    columns = torch.cat([torch.arange(head * width, (head + 1) * width) for head in order])
    attention = other.blocks[layer].attn
    with torch.no_grad():
        for parameter in (attention.qkv.weight, attention.qkv.bias):
            parts = parameter.unflatten(0, (3, WIDTH))
            parameter.copy_(parts[:, columns].flatten(0, 1))
        attention.proj.weight.copy_(attention.proj.weight[:, columns])
    return other


@pytest.fixture(scope="module")
def models():
    return color_model(), blind_model()


@pytest.fixture(scope="module")
def found(models):
    first, second = models
    return vitlens.audit(first, marked(), beside=second)


def test_audit_beside_ranks_the_lost_mark_first(found):
    rows = found.changes.groups
    assert list(rows.columns) == list(evidence.CHANGE_COLUMNS)
    assert len(rows) == (found.groups["status"] == "tested").sum() == 3
    first = rows.iloc[0]
    assert first["class"] == 0
    assert first["changed"]
    assert first["low"] <= first["difference"] <= first["high"]
    assert first["difference"] > 5 * rows["difference"].iloc[1:].abs().max()
    assert found.changes.accuracy == (1, 1)


def test_audit_beside_leaves_the_audit_unchanged(models, found):
    alone = vitlens.audit(models[0], marked())
    assert alone.changes is None
    assert alone.groups.equals(found.groups)
    assert alone.effects.equals(found.effects)
    assert alone.images.equals(found.images)
    assert alone.settings == found.settings


def test_audit_beside_effects_equal_float64_loop(models):
    """Both models get the same covered images, and the difference is the mean over images and ways."""
    received = ([], [])
    hooks = []
    for model, inputs in zip(models, received, strict=True):
        hooks.append(model.register_forward_pre_hook(lambda _, args, to=inputs: to.append(args[0])))

    def forget(step, done, total):
        if step == "find" and done == total:
            for inputs in received:
                inputs.clear()

    found = vitlens.audit(models[0], marked(), beside=models[1], on_progress=forget)
    for hook in hooks:
        hook.remove()
    received = [[each for each in inputs if len(each) % 6 == 0] for inputs in received]
    wide = [copy.deepcopy(model).double() for model in models]
    rows = found.images.set_index("image")
    differences = {group: [] for group in found.changes.groups["group"]}
    at = 0
    plan = evidence.plan_tests(found.members, len(found.groups), 3)
    for position, number in enumerate(found.tested.tolist()):
        if not plan[position]:
            continue
        covered = received[0][at]
        assert torch.equal(covered, received[1][at])
        label = rows.loc[number, "label"]
        for place, group in enumerate(plan[position]):
            six = covered[6 * place : 6 * place + 6].double()
            effects = []
            for model in wide:
                with torch.no_grad():
                    logits = model(six).numpy()
                exponentials = np.exp(logits - logits.max(1, keepdims=True))
                probabilities = exponentials / exponentials.sum(1, keepdims=True)
                effect = 0.0
                for way in range(3):
                    effect += (probabilities[3 + way, label] - probabilities[way, label]) / 3
                effects.append(effect)
            differences[group].append(effects[0] - effects[1])
        at += 1
    for _, row in found.changes.groups.iterrows():
        own = differences[row["group"]]
        assert row["tested"] == len(own)
        assert row["difference"] == pytest.approx(np.mean(own), abs=1e-4)
        assert row["high"] - row["low"] == pytest.approx(
            3.92 * np.std(own) / len(own) ** 0.5, rel=0.3, abs=1e-3
        )


def test_audit_beside_equal_models_change_nothing():
    model = random_model()
    changes = vitlens.audit(model, marked(), beside=copy.deepcopy(model)).changes
    assert len(changes.heads) == LAYERS * HEADS * len(evidence.HEAD_MEASURES)
    for rows in (changes.groups, changes.heads):
        assert (rows[["difference", "low", "high"]].to_numpy() == 0).all()
        assert (rows["p"] == 1).all()
        assert not rows["changed"].any()


def test_audit_beside_finds_swapped_heads():
    model = random_model()
    other = swapped(model, 1, 0, 1)
    images = (marked(120).images / 255 - 0.5) / 0.5
    with torch.no_grad():
        assert torch.allclose(model(images[:8]), other(images[:8]), atol=1e-4)
    labels = marked(120).labels
    heads = vitlens.audit(model, images, labels, beside=other).changes.heads
    changed = heads[heads["changed"]]
    assert set(zip(changed["layer"], changed["head"], strict=True)) == {(1, 0), (1, 1)}
    assert heads["changed"].iloc[: len(changed)].all()
    row = heads[(heads["layer"] == 1) & (heads["measure"] == "entropy")].set_index("head")
    assert row.loc[0, "mean"] == pytest.approx(row.loc[1, "mean_beside"], rel=1e-4)
    assert row.loc[0, "difference"] == pytest.approx(-row.loc[1, "difference"], rel=1e-3)


def attention_of(model, image, layer, head):
    """(T, T) attention of a head in float64, by its definition."""
    stored = []
    block = model.blocks[layer].attn
    hook = block.register_forward_pre_hook(lambda _, args: stored.append(args[0][0]))
    with torch.no_grad():
        model(image[None])
        hook.remove()
        projected = block.qkv(stored[0]).numpy()
    width = WIDTH // HEADS
    query = projected[:, head * width : (head + 1) * width]
    key = projected[:, WIDTH + head * width : WIDTH + (head + 1) * width]
    logits = query @ key.T / width**0.5
    weights = np.exp(logits - logits.max(1, keepdims=True))
    return weights / weights.sum(1, keepdims=True)


def measures_by_hand(weights):
    """(mean attention distance in pixels, entropy in nats) of attention (T, T), by loops."""
    distance = 0.0
    for i in range(SIDE**2):
        for j in range(SIDE**2):
            apart = np.hypot(i // SIDE - j // SIDE, i % SIDE - j % SIDE)
            distance += weights[1 + i, 1 + j] * apart * PATCH / SIDE**2
    entropy = -(weights * np.log(weights)).sum(1).mean()
    return distance, entropy


def test_audit_beside_head_equals_float64_loop():
    first, second = random_model(), random_model(seed=1)
    data = marked(60)
    images = (data.images / 255 - 0.5) / 0.5
    found = vitlens.audit(first, images, data.labels, beside=second)
    values = np.zeros((2, 2, len(found.tested)))
    for side, model in enumerate((first, second)):
        wide = copy.deepcopy(model).double()
        for i, number in enumerate(found.tested.tolist()):
            weights = attention_of(wide, images[number].double(), layer=2, head=1)
            values[:, side, i] = measures_by_hand(weights)
    heads = found.changes.heads
    for name, (own, other) in zip(evidence.HEAD_MEASURES, values, strict=True):
        (row,) = heads[
            (heads["layer"] == 2) & (heads["head"] == 1) & (heads["measure"] == name)
        ].to_dict("records")
        assert row["mean"] == pytest.approx(own.mean(), rel=1e-4)
        assert row["mean_beside"] == pytest.approx(other.mean(), rel=1e-4)
        assert row["difference"] == pytest.approx((own - other).mean(), rel=1e-3)
        expected = scipy.stats.ttest_rel(own, other)
        assert row["t"] == pytest.approx(expected.statistic, rel=1e-2)
        assert row["p"] >= expected.pvalue * 0.5
        interval = scipy.stats.bootstrap(
            [own - other], np.mean, method="percentile", random_state=0
        ).confidence_interval
        error = (own - other).std() / len(own) ** 0.5
        assert row["low"] == pytest.approx(interval.low, abs=0.3 * error)
        assert row["high"] == pytest.approx(interval.high, abs=0.3 * error)


def test_head_changes_are_ranked_by_standard_errors():
    found = vitlens.audit(random_model(), marked(120), beside=random_model(seed=1))
    heads = found.changes.heads
    assert heads["changed"].any()
    for _, rows in heads.groupby("changed"):
        assert rows["t"].abs().is_monotonic_decreasing
    assert heads["changed"].is_monotonic_decreasing


def test_changed_heads_of_exchangeable_models_are_rare():
    """At most 12 of 100 pairs: more than 12 have a probability of 0.2 % if each has one of 5 %."""
    pairs = 0
    for seed in range(100):
        random = torch.Generator().manual_seed(seed)
        measures = torch.rand(20, 2, 6, 4, 2, generator=random)
        pairs += evidence.head_changes(measures, 0)["changed"].any()
    assert pairs <= 12


def test_audit_beside_converts_normalization(models):
    """A second model with other means, whose first layer takes them back, sees the same images."""
    first = random_model()
    second = copy.deepcopy(first)
    mean, std = torch.tensor([0.2, 0.4, 0.6]), torch.tensor([0.1, 0.2, 0.3])
    second.pretrained_cfg = {
        **first.pretrained_cfg,
        "mean": tuple(mean.tolist()),
        "std": tuple(std.tolist()),
    }
    with torch.no_grad():
        projection = second.patch_embed.proj
        shift = (mean - 0.5) / 0.5
        projection.bias += (projection.weight * shift[:, None, None]).sum((1, 2, 3))
        projection.weight *= (std / 0.5)[:, None, None]
    changes = vitlens.audit(first, marked(120), beside=second).changes
    for rows in (changes.groups, changes.heads):
        assert rows["difference"].abs().max() < 1e-3
        assert not rows["changed"].any()


def test_audit_beside_without_labels_calls_no_group_changed(models):
    pixels = (marked().images / 255 - 0.5) / 0.5
    changes = vitlens.audit(models[0], pixels, beside=models[1]).changes
    assert len(changes.groups)
    assert not changes.groups["changed"].any()
    assert "Without labels" in changes.notes[0]
    assert np.isnan(changes.accuracy).all()


@pytest.mark.parametrize("options", [{"heads": 4}, {"depth": 2}])
def test_audit_beside_of_other_head_counts_leaves_heads_out(options):
    changes = vitlens.audit(random_model(), marked(120), beside=random_model(**options)).changes
    assert changes.heads.empty
    assert list(changes.heads.columns) == list(evidence.HEAD_COLUMNS)
    assert changes.notes[0].startswith("Heads are not compared: the first model has 3 layers of 2")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: color_model(outputs=0), "no classifier head"),
        (lambda: random_model(num_classes=5), "same classes, got 3 and 5"),
        (lambda: random_model(patch_size=16), "same patch grid, got 8 × 8 and 4 × 4"),
        (lambda: random_model(img_size=128), "the second takes 128 × 128"),
        (lambda: random_model(in_chans=1), "same input channels, got 3 and 1"),
        (lambda: random_model(num_classes=1), "one softmax over several classes"),
    ],
)
def test_audit_beside_rejects_models_that_differ(models, other, message):
    with pytest.raises(ValueError, match=message):
        vitlens.audit(models[0], marked(), beside=other())


def test_audit_beside_rejects_other_class_names(models):
    pair = [copy.deepcopy(models[0]) for _ in range(2)]
    write_card(pair[0], label_names=["red", "green", "blue"])
    write_card(pair[1], label_names=["red", "blue", "green"])
    with pytest.raises(ValueError, match="got 'green' and 'blue' as class 1"):
        vitlens.audit(pair[0], marked(), marked().labels, beside=pair[1])


def test_audit_beside_leaves_out_training_images_of_both(models):
    numbers = np.arange(1, 241, dtype=np.uint64)
    images = replace(marked(), digests=Digests(numbers, np.zeros_like(numbers)))
    first, second = trained_on(models[0], numbers[:60]), trained_on(models[1], numbers[60:120])
    found = vitlens.audit(first, images, beside=second)
    assert found.images["image"].tolist() == list(range(120, 240))
    assert found.notes[-1].startswith("60 of 240 images are left out, because the model was")
    assert "Second model: 60 of 240 images are left out" in found.notes[-1]
    third = trained_on(models[1], numbers[60:])
    with pytest.raises(ValueError, match="each of these images"):
        vitlens.audit(first, images, beside=third)


def test_audit_beside_needs_15_images_for_heads():
    rows = evidence.head_changes(None, 0)
    assert rows.empty
    data = marked(40)  # 20 of them are tested
    sources = [pixels.permute(1, 2, 0).numpy() for pixels in data.images]
    labels = data.labels.tolist()
    model, other = random_model(), random_model(seed=1)
    assert len(vitlens.audit(model, sources, labels, beside=other).changes.heads)
    tested = vitlens.audit(model, sources, labels).tested.tolist()
    for number in tested[:6]:
        sources[number] = b"damaged"
    changes = vitlens.audit(model, sources, labels, beside=other).changes
    assert changes.heads.empty
    assert changes.notes == ["Heads are not compared: this needs 15 tested images."]


def test_stopped_audit_beside_goes_on_with_the_same_numbers(models, tmp_path, monkeypatch):
    numbers = np.arange(1, 121, dtype=np.uint64)
    images = replace(marked(120), digests=Digests(numbers, np.zeros_like(numbers)))
    model, other = random_model(), random_model(seed=1)
    whole = vitlens.audit(model, images, beside=other)

    def stop(step, done, total):
        if step == "compare":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        vitlens.audit(model, images, beside=other, partial=tmp_path, on_progress=stop)
    kept = {path.name.split("-")[0] for path in tmp_path.iterdir()}
    computed = []
    true_compare = evidence._Run._compare

    def counted(self, rows, heads):
        computed.append(len(rows))
        return true_compare(self, rows, heads)

    monkeypatch.setattr(evidence._Run, "_compare", counted)
    again = vitlens.audit(model, images, beside=other, partial=tmp_path)
    assert computed == [28]  # the second of two batches
    assert again.changes.groups.equals(whole.changes.groups)
    assert again.changes.heads.equals(whole.changes.heads)
    vitlens.audit(model, images, beside=models[1], partial=tmp_path)
    assert len({path.name.split("-")[0] for path in tmp_path.iterdir()} - kept) == 1


def trained(with_mark):
    """A small ViT trained on `marked`, some of them without their mark, or all of class 0 without it."""
    data = marked(600, seed=1)
    images = data.images / 127.5 - 1
    unmarked = plants.textures(600, 1, 3).images.float().mean(1, keepdim=True).expand(-1, 3, -1, -1)
    hidden = torch.arange(600) % 10 < 3
    if not with_mark:
        hidden |= data.labels == 0
    images[hidden] = unmarked[hidden] / 127.5 - 1
    model = random_model(embed_dim=32).train()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.trunc_normal_(parameter, std=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    random = torch.Generator().manual_seed(0)
    for _ in range(20):
        for rows in torch.randperm(600, generator=random).split(100):
            loss = torch.nn.functional.cross_entropy(model(images[rows]), data.labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


def test_audit_beside_finds_the_mark_that_one_training_saw():
    model, without = trained(with_mark=True), trained(with_mark=False)
    found = vitlens.audit(model, marked(), beside=without)
    rows = found.changes.groups
    first = rows.iloc[0]
    assert first["class"] == 0
    assert first["changed"]
    assert first["difference"] > 0.3
    assert abs(first["effect_beside"]) < 0.1
    assert found.places[first["group"]].argmax() == PLACE
    assert rows["difference"].iloc[1:].abs().max() < first["low"]
    assert found.changes.heads["changed"].any()


def test_two_sided_equals_permutation_test():
    differences = np.random.default_rng(0).normal(-0.4, 1, 12)
    expected = scipy.stats.permutation_test(
        [differences, np.zeros(12)], lambda a, b: (a - b).mean(), permutation_type="samples"
    )
    assert evidence.two_sided(differences) == pytest.approx(expected.pvalue, abs=0.01)
    assert evidence.two_sided(-differences) == pytest.approx(expected.pvalue, abs=0.01)


def test_paired_t_equals_scipy():
    random = np.random.default_rng(0)
    first, second = random.normal(0.2, 1, (30, 2, 3)), random.normal(0, 1, (30, 2, 3))
    t, p = evidence.paired_t(first - second)
    expected = scipy.stats.ttest_rel(first, second)
    assert t == pytest.approx(expected.statistic)
    assert p == pytest.approx(expected.pvalue)
    t, p = evidence.paired_t(np.array([[0.0, 2.0, -2.0]] * 4))
    assert t.tolist() == [0, np.inf, -np.inf]
    assert p.tolist() == [1, 0, 0]
    with pytest.raises(ValueError, match="at least 2 images, got 1"):
        evidence.paired_t(np.ones(1))
