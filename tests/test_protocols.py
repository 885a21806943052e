"""Classifiers on features, scores and intervals equal other libraries, closed forms and hand counts."""

import dataclasses
import math

import numpy as np
import pytest
import timm
import torch
from sklearn.metrics import top_k_accuracy_score
from support import clouds, encoded, refuses, write
from timm.data import ImageNetInfo, RealLabelsImagenet
from timm.models import save_for_hf

from vitlens.classes import class_numbers, describe_match
from vitlens.scores import (
    Score,
    mean_of,
    over_seeds,
    proportion,
    real,
    real_labels,
    top_k,
    validation_numbers,
)
from vitlens_paper.evaluate import evaluate, few_shot, nearest, support, supports
from vitlens_paper.evaluate.classifiers import least_squares
from vitlens_paper.evaluate.options import Evaluation
from vitlens_paper.evaluate.protocols import TunedScore, group_means, vtab_tasks
from vitlens_paper.evaluate.session import open_session
from vitlens_paper.tasks import VTAB


@pytest.mark.parametrize("images, penalty", [(30, 1.0), (200, 2.0**10)])
def test_least_squares_minimizes_penalized_squares(images, penalty):
    """By numpy's least squares, in which the penalty is D + 1 more images: √λ in one feature each, with target 0."""
    (x, y), (new, _) = clouds(images, 1, classes=4, width=60), clouds(50, 2, classes=4, width=60)
    mean, deviation = x.double().numpy().mean(0), x.double().numpy().std(0) + 1e-5
    z, w = (
        np.hstack([(a.double().numpy() - mean) / deviation, np.full((len(a), 1), 100.0)])
        for a in (x, new)
    )
    equations, targets = (
        np.vstack([z, np.sqrt(penalty) * np.eye(61)]),
        np.vstack([2 * np.eye(4)[y] - 1, np.zeros((61, 4))]),
    )
    expected = np.linalg.lstsq(equations, targets, rcond=None)[0]
    ours = least_squares(x, y, 4, penalty)
    assert ours.weights.dtype == torch.float64
    np.testing.assert_allclose(ours.weights, expected, rtol=1e-4, atol=1e-9)
    np.testing.assert_allclose(ours.values(new), w @ expected, rtol=1e-4, atol=1e-7)


def test_support_is_balanced_nested_and_seeded():
    labels = torch.randint(0, 7, (400,), generator=torch.Generator().manual_seed(1))
    few, many, other = support(labels, 5, 0), support(labels, 25, 0), support(labels, 5, 1)
    assert (
        torch.bincount(labels[few]).tolist() == [5] * 7
        and torch.bincount(labels[many]).tolist() == [25] * 7
    )
    few_rows, many_rows, other_rows = (set(rows.tolist()) for rows in (few, many, other))
    assert len(many_rows) == 175 and few_rows < many_rows and few_rows != other_rows
    assert torch.equal(few, support(labels, 5, 0))


def test_few_shot_accuracy_of_separated_classes():
    train, test = clouds(300, 1, noise=0.5), clouds(90, 2, noise=0.5)
    drawn = supports(train[1], (1, 25), range(3))
    found = few_shot(train, test, drawn, 3)
    assert (
        set(found) == {1, 25}
        and len(found[1]) == 3
        and min(found[25]) > 95
        and np.mean(found[1]) > 50
    )
    x, y = (part[drawn[25][1]] for part in train)
    by_hand = (least_squares(x, y, 3).values(test[0]).argmax(1) == test[1]).double().mean() * 100
    torch.testing.assert_close(
        least_squares(x, y, 3).weights, least_squares(x, y, 3, 1024.0).weights
    )
    assert found[25][1] == pytest.approx(by_hand.item())
    assert few_shot(train, (test[0], (test[1] + 1) % 3), drawn, 3)[25][0] < 5


def test_nearest_votes_by_cosine():
    train, (x, y) = clouds(120, 1, classes=5, noise=4.0), clouds(2100, 2, classes=5, noise=4.0)
    (known, x) = (
        each[:, 1:].double().numpy() for each in (train[0], x)
    )  # the first would settle every cosine
    cosines = (x @ known.T) / np.linalg.norm(x, axis=1)[:, None] / np.linalg.norm(known, axis=1)
    for k in (1, 7, 20, 500):
        last = np.sort(cosines, 1)[:, -min(k, 120), None]
        votes = np.where(cosines >= last, np.exp(cosines / 0.07), 0) @ np.eye(5)[train[1]]
        ours = nearest((torch.from_numpy(known), train[1]), torch.from_numpy(x), k)
        assert (ours.numpy() == votes.argmax(1)).mean() > 0.999
        assert (ours == y).float().mean() > 0.25  # of five classes


def test_nearest_weights_votes_by_cosine():
    far, near = torch.tensor([1.0, 1.0]), torch.tensor([1.0, 0.05])
    train = torch.stack([near, far, far, far]), torch.tensor([1, 0, 0, 0])
    x = torch.tensor([[2.0, 0.0]])
    assert nearest(train, x, 4).tolist() == [1] and nearest(
        train, x, 4, temperature=100.0
    ).tolist() == [0]
    assert nearest((-train[0], train[1]), x, 4, temperature=0.001).tolist() == [
        0
    ]  # no weight overflows or vanishes


def test_top_k_counts_labels():
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(500, 8)), rng.integers(0, 8, 500)
    classes = torch.from_numpy(logits).topk(5).indices
    for k in (1, 5):
        found = top_k(classes, torch.from_numpy(labels), k)
        assert found.value == pytest.approx(100 * top_k_accuracy_score(labels, logits, k=k))


def test_proportion_equals_wilson():
    for right, n in ((0, 10), (7, 10), (10, 10), (4368, 10_000)):
        p, z = right / n, 1.959963984540054
        center, half = p + z**2 / 2 / n, z * math.sqrt(p * (1 - p) / n + z**2 / 4 / n**2)
        expected = (p, (center - half) / (1 + z**2 / n), (center + half) / (1 + z**2 / n))
        assert proportion(right, n) == pytest.approx([100 * max(x, 0) for x in expected], abs=1e-9)


def test_over_seeds_adds_squared_widths():
    seeds = 4.302653 * math.sqrt(13 / 3)  # Student's: deviation √13, t of 2 degrees 4.302653
    assert over_seeds([70.0, 72.0, 77.0], 10**12) == pytest.approx(
        (73, 73 - seeds, 73 + seeds), abs=1e-4
    )
    assert over_seeds([99.0, 100.0], 50).high == 100
    for values in ([80.0], [80.0, 80.0, 80.0]):
        assert over_seeds(values, 50) == pytest.approx(proportion(40, 50))
    value, low, high = over_seeds([70.0, 72.0, 77.0], 200)
    below, above = (abs(end - 73) for end in proportion(146, 200)[1:])
    assert (73 - low, high - 73) == pytest.approx(
        (math.hypot(seeds, below), math.hypot(seeds, above)), abs=1e-5
    )


def test_mean_of_adds_squared_widths():
    found = mean_of([Score(80.0, 77.0, 81.0), Score(60.0, 56.0, 65.0)])
    assert found == pytest.approx((70, 70 - math.sqrt(9 + 16) / 2, 70 + math.sqrt(1 + 25) / 2))
    assert mean_of([Score(99.0, 97.0, 100.0), Score(100.0, 90.0, 100.0)]).high == 100


def test_real_equals_timm_on_all_images():
    labels = real_labels()
    assert (
        len(labels) == 50_000
        and sum(map(bool, labels)) == 46_837
        and sum(len(x) == 1 for x in labels) == 39_394
    )
    rng = np.random.default_rng(0)
    classes = torch.from_numpy(rng.integers(0, 1000, (50_000, 5)))
    for i in range(0, 50_000, 2):  # half of them right
        classes[i, 0] = labels[i][-1] if labels[i] else 0
    names = [f"ILSVRC2012_val_{i + 1:08d}.JPEG" for i in range(50_000)]
    timms = RealLabelsImagenet(names)
    for part in classes[:, :1].split(5000):
        timms.add_result(torch.nn.functional.one_hot(part[:, 0], 1000).half())
    found, scored = real(classes, validation_numbers(names))
    assert (
        scored == 46_837
        and found.value == pytest.approx(timms.get_accuracy(1))
        and 49 < found.value < 53
    )


def test_real_of_a_subset_in_any_order():
    labels = real_labels()
    names = [
        "val/n01/ILSVRC2012_val_00000003.JPEG",
        "0.tar: ILSVRC2012_val_00000001.jpg",
        "elsewhere.jpg",
    ]
    numbers = validation_numbers(names)
    assert numbers.tolist() == [2, 0, -1]
    empty, (one, other) = (
        labels.index([]),
        [i for i, each in enumerate(labels) if len(each) == 2][:2],
    )
    wrong = next(c for c in range(1000) if c not in labels[other])
    score, scored = real(
        torch.tensor([[labels[one][1]], [wrong], [0]]), torch.tensor([one, other, empty])
    )
    assert scored == 2 and score.value == 50


def test_class_numbers_match_by_name(vit):
    model, info = vit(num_classes=1000, depth=1), ImageNetInfo()
    assert class_numbers(model, ("n02123045", "n01440764")).tolist() == [281, 0]
    assert class_numbers(model, ("tabby", "Tinca_tinca", "tench, Tinca tinca")[:2]).tolist() == [
        281,
        0,
    ]
    every = tuple(info.index_to_description(i) for i in range(1000))
    apart = [
        i for i in range(1000) if every.count(every[i]) == 1
    ]  # two classes are called sunglasses
    assert (
        class_numbers(model, tuple(every[i] for i in apart)).tolist() == apart and len(apart) > 990
    )
    assert class_numbers(model, every).tolist() == list(range(1000))  # all of them, in order
    assert class_numbers(model, ("partridge",)).tolist() == [
        every.index("partridge")
    ]  # and not the ruffed grouse
    assert class_numbers(model, ("0", "995", "17")).tolist() == [0, 995, 17]


def test_class_numbers_of_other_models(vit):
    model = vit(num_classes=3, depth=1)
    assert class_numbers(model, ("daisy", "rose", "tulip")).tolist() == [0, 1, 2]
    model.label_names = ["10", "2", "9"]  # as folders are sorted: names, though they are numbers
    assert class_numbers(model, ("10", "2", "9")).tolist() == [0, 1, 2]
    assert class_numbers(model, ("2", "9")).tolist() == [1, 2]
    model.label_names = ["0", "1", "10"]
    assert class_numbers(model, ("1", "10")).tolist() == [1, 2]
    model.label_names = ["tulip", "daisy", "rose"]
    assert class_numbers(model, ("daisy", "Tulip")).tolist() == [1, 0]
    digits = tuple("0123456789")
    named = vit(num_classes=12, depth=1)
    named.label_names = list("abcdefghijkl")
    assert class_numbers(vit(num_classes=12, depth=1), digits).tolist() == list(range(10))
    assert describe_match(named, ("a", "b")) == "" and "numbers are taken as" in describe_match(
        named, ("3", "7")
    )
    unnamed = vit(num_classes=14, depth=1)
    assert describe_match(unnamed, tuple("abcdefghijklmn")).endswith(
        "by position, because the model has no class names."
    )
    numbered = sorted(
        f"class {i}" for i in range(14)
    )  # where the order departs from the natural one is shown
    assert describe_match(unnamed, numbered).endswith(
        "class 7, …; in the order natural, number 2 would be class 2."
    )
    assert "number 0 would be a" in describe_match(
        unnamed, ("b", "a")
    ) and "number 0 would" in describe_match(unnamed, ("1b", "1a"))


def test_matched_prints_order_of_classes(vit, tmp_path):
    """F10, also where few classes change places, so that the accuracy does not show it."""
    model = vit(img_size=16, patch_size=8, depth=1, num_classes=3)
    model.pretrained_cfg = {**model.pretrained_cfg, "input_size": (3, 16, 16)}
    for names, differ in ((("a1", "a2", "a10"), True), (("a1", "a2", "a3"), False)):
        folder = write(
            tmp_path / names[-1],
            {f"{name}/{i}.png": encoded(i) for name in names for i in range(3)},
        )
        printed = []
        if differ:
            refuses(
                r"a1, a10, a2 \(text\); a1, a2, a10 \(natural\)", list, evaluate(model, str(folder))
            )
        order = {"classes": "text"} if differ else {}
        (record,) = evaluate(model, str(folder), "top1", workers=0, say=printed.append, **order)
        for text in (" ".join(printed), record.note):
            assert "matched by position" in text and ("order text" in text) == differ


def test_group_means_need_complete_groups():
    found = {
        t.name: TunedScore(proportion(80 + i, 100), 100)
        for i, t in enumerate(VTAB)
        if t.group != "structured"
    }
    means = group_means(found)
    assert set(means) == {"vtab natural", "vtab specialized"}
    assert (
        means["vtab natural"].score.value == pytest.approx(83)
        and means["vtab natural"].images == 700
    )
    assert (
        group_means({t.name: TunedScore(proportion(50, 100), 100) for t in VTAB})[
            "vtab"
        ].score.value
        == 50
    )
    assert [t.name for t in vtab_tasks(["vtab/dtd", "pcam"])] == ["vtab/dtd", "vtab/pcam"] and len(
        vtab_tasks([])
    ) == 19


def test_evaluate_module_equals_folder(vit, tmp_path):
    model = vit(img_size=8, patch_size=4, embed_dim=24, depth=1)
    model.pretrained_cfg = {**model.pretrained_cfg, "input_size": (3, 8, 8), "crop_pct": 1.0}
    save_for_hf(
        model,
        tmp_path,
        model_args=dict(img_size=8, patch_size=4, embed_dim=24, depth=1, num_heads=3),
        safe_serialization=True,
    )
    model.train()
    found = [*evaluate(model, "digits", "knn", workers=0)] + [
        *evaluate(str(tmp_path), "digits", "knn", workers=0)
    ]
    one, other = (dataclasses.asdict(each) for each in found)
    assert (
        model.training
        and one.pop("model") == "vit_tiny_patch16_224"
        and other.pop("model") == tmp_path.name
    )
    assert (
        {**one, "when": ""} == {**other, "when": ""} and one["images"] == 360 and one["value"] > 50
    )


def test_evaluation_measures_the_weights_of_a_checkpoint(tmp_path):
    model = timm.create_model("test_vit")
    torch.save(model.state_dict(), tmp_path / "mine.pth")
    evaluation = Evaluation(model="test_vit", data="digits", checkpoint=tmp_path / "mine.pth")
    session = open_session(evaluation, device="cpu")
    assert session.name == "test_vit, mine.pth"
    assert all(
        torch.equal(value, session.network.state_dict()[name])
        for name, value in model.state_dict().items()
    )


def named(vit, names):
    """A model of one layer with these classes."""
    model = vit(num_classes=len(names), depth=1)
    model.label_names = names
    return model


DIGITS = tuple("0123456789")  # as numbers they would be tench, goldfish, great white shark …
FLOWERS = ["tulip", "daisy", "rose"]
PAIR = torch.eye(2), torch.tensor([0, 1])
REFUSALS = (
    # classifiers on features
    (
        lambda vit: support(torch.tensor([0] * 5 + [1]), 5, 0, ("daisy", "rose")),
        "5 shots .* rose has 1",
    ),
    (
        lambda vit: support(torch.tensor([0, 1]), 1, 0, ("daisy", "rose", "tulip")),
        "tulip has 0",
    ),
    (lambda vit: nearest(PAIR, PAIR[0], 2, temperature=0), "temperature .* 0, got 0"),
    # classes by name and number
    (
        lambda vit: real(
            torch.zeros(1, 1, dtype=torch.int64), torch.tensor([real_labels().index([])])
        ),
        "ReaL labels are missing",
    ),
    (
        lambda vit: class_numbers(vit(num_classes=1000, depth=1), ("tabby", "unicorn")),
        r"1000, but 'unicorn' is not\. The model's classes are 'tench, Tinca tinca', .* and 997 more",
    ),
    (lambda vit: class_numbers(vit(num_classes=1000, depth=1), ("crane",)), "1000, but .*'crane'"),
    (
        lambda vit: class_numbers(vit(num_classes=1000, depth=1), ("tench", "n01440764")),
        "1000, but 'tench' and 'n01440764' match the same class, number 0",
    ),
    (lambda vit: class_numbers(vit(num_classes=1000, depth=1), ("1000",)), "1000, but .*'1000'"),
    (
        lambda vit: class_numbers(vit(num_classes=1000, depth=1), DIGITS),
        r"0 to 9 .*1,000 .*\(tench",
    ),
    (lambda vit: class_numbers(vit(num_classes=0, depth=1), ("a",)), "classifier head"),
    (
        lambda vit: class_numbers(vit(num_classes=3, depth=1), ("daisy", "rose")),
        "3, but 'daisy', 'rose' are not. The model has no class names",
    ),
    (lambda vit: class_numbers(named(vit, ["0", "1", "10"]), ("0", "1", "2")), "'2' is not"),
    (
        lambda vit: class_numbers(named(vit, FLOWERS), ("cat", "daisy", "rose")),
        r"3, but 'cat' is not\. The model's classes are 'tulip', 'daisy', 'rose'\. Name",
    ),
    (
        lambda vit: class_numbers(named(vit, FLOWERS), ("daisies", "ROSE")),
        r"'daisies' is not\. .* Did you mean daisy\? Name",
    ),
    (
        lambda vit: class_numbers(named(vit, FLOWERS), ("1", "2", "3")),
        r"'1', '2', '3' are not\. The model's classes are 'tulip'",
    ),
    (
        lambda vit: class_numbers(named(vit, FLOWERS), ("a", "b", "c", "daisy", "d")),
        r"5\) must be .* 'a', 'b', 'c' and 1 more are not",
    ),
    (
        lambda vit: class_numbers(named(vit, FLOWERS), ("daisy", "Daisy")),
        "'daisy' and 'Daisy' match the same class",
    ),
    (lambda vit: class_numbers(named(vit, list("abcdefghijkl")), DIGITS), "classes 0 to 9"),
    # names and arguments of evaluations
    (lambda vit: vtab_tasks(["dttd"]), "got 'dttd'. Did you mean dtd.*caltech101"),
    (lambda vit: evaluate(vit(), "digits", "finetune"), "finetune .*, got a module"),
    (lambda vit: evaluate("test_vit"), "data set or a folder .* data"),
    (lambda vit: evaluate("test_vit", "digits", "knn", seeds=2), "knn .* seeds, .* fewshot"),
    (
        lambda vit: evaluate("test_vit", "digits", "knn", neighbours=2),
        "got 'neighbours'. Did you mean neighbors",
    ),
    (
        lambda vit: evaluate("test_vit", "digits", "finetune", checkpoint="mine.pth"),
        "argument checkpoint. Name one",
    ),
)
"""A call that raises ValueError, and decisive words."""


@pytest.mark.parametrize("call, words", REFUSALS)
def test_protocols_refuse(vit, call, words):
    refuses(words, call, vit)
