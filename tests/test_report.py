"""Reports in Python: inspections and explanations of images by models of every kind."""

import math
from unittest import mock

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import timm
import torch
from matplotlib.text import Text
from PIL import Image
from support import assert_tidy, refuses, saved_model
from timm.models import save_for_hf

import vitlens
import vitlens_explorer as widgets
from vitlens import faithfulness, load_model, plot, report
from vitlens.attribution import methods, relevance
from vitlens.images import ImageError, samples
from vitlens.models import preprocess
from vitlens_explorer.live import save_live_page

CAT, CUP = samples()["chelsea"], samples()["coffee"]
BOTH = [("chelsea", CAT), ("coffee", CUP)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(saved_model(tmp_path_factory.mktemp("model")))


def explained(model, image=CAT, target=None, *, against=None, names=("relevance",), **scoring):
    """The explanation of one image, with scores if there are options of `report.score`."""
    explanations = report.explain(model, [("image", image)], target, against=against, names=names)
    (explanation,) = report.score(model, explanations, **scoring) if scoring else explanations
    return explanation


def small(**kwargs):
    torch.manual_seed(0)
    kwargs = dict(patch_size=32, embed_dim=48, depth=1, num_heads=3) | kwargs
    return timm.create_model("vit_tiny_patch16_224", **kwargs).eval()


def test_explain_gives_the_maps_and_scores_of_the_methods(model):
    parts, names = [], ("relevance", "legrad")
    made = list(report.explain(model, BOTH, 3, names=names, on_part=parts.append))
    assert (
        parts == [f"{name}, {part}" for name, _ in BOTH for part in names]
        and made[0].scores is None
    )
    first, second = report.score(model, made, orders=3, steps=16)
    x = preprocess(model, CUP)
    for name, method in methods(names).items():
        torch.testing.assert_close(second.maps[name], method(model, x, 3)[0])
    assert second.target == "3" and second.value == pytest.approx(model(x).softmax(-1)[0, 3].item())
    assert list(first.scores["method"]) == ["relevance", "legrad"] and sorted(
        first.scores["rank"]
    ) in ([1, 2], [1, 1])
    assert set(first.scores["steps"]) == {16} and set(first.scores["random_orders"]) == {3}
    area = faithfulness.curves(
        model, x, second.maps["legrad"][None], 3, step=1
    ).deletion_area.item()
    assert second.scores.set_index("method").deletion["legrad"] == pytest.approx(area, abs=1e-6)


@pytest.mark.parametrize("classes", [1000, 0])
def test_explain_uses_class_names_of_the_current_head(classes):
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, depth=1, num_classes=classes
    ).eval()
    model.head = torch.nn.Linear(192, 3)
    inspection = report.inspect(model, [("cat", CAT)])
    assert explained(model).target in "012"
    assert sorted(name for name, _ in inspection.pictures[0].top5) == ["0", "1", "2"]
    assert not any("no classifier" in note for note in inspection.notes)
    with pytest.raises(ValueError, match="no class called .tench.. Its classes have no names"):
        relevance(model, preprocess(model, CAT, size=(32, 32)), "tench")
    explorer = widgets.explore(model, CAT)
    explorer.set(view="relevance", target=2)
    assert sorted(bar["name"] for bar in explorer.frame["bars"]) == ["0", "1", "2"]
    model.head = torch.nn.Identity()
    assert report.inspect(model, [("cat", CAT)]).pictures[0].top5 == []
    refuses("its output is features", explained, model)


def test_write_explanations_names_the_measured_quantity(model, tmp_path, monkeypatch):
    draw, figures = plot.attributions, []
    monkeypatch.setattr(
        plot, "attributions", lambda *a, **kwargs: figures.append(draw(*a, **kwargs)) or figures[-1]
    )
    for score, against, words in (
        ("probability", None, "the probability of the class in 8 steps"),
        ("logit", 1, "the logit of the class less that of the other in 8 steps"),
    ):
        explanation = explained(
            model, CUP, 3, against=against, score=score, baseline="zero", orders=8
        )
        paths = list(report.write_explanations([explanation], tmp_path))
        assert paths == [tmp_path / "00-image.png", tmp_path / "scores.csv"]
        assert_tidy(figures[-1])
        texts = [text.get_text() for text in figures[-1].findobj(Text)]
        assert not any("-" in text for text in texts), "a minus sign is not a hyphen"
        assert any(
            text.startswith(f"Areas under {words},\nwhile patches are covered") for text in texts
        )
        assert any("rank 1" in text and "σ from random" in text for text in texts)
        columns = list(pd.read_csv(tmp_path / "scores.csv"))
        assert (
            columns[:5] == ["image", "target", "against", "method", "deletion"]
            and len(columns) == 19
        )
        x, question = preprocess(model, CUP), dict(target=3, against=against)
        curves = faithfulness.curves(
            model,
            x,
            relevance(model, x, **question),
            **question,
            score=score,
            baseline="zero",
            step=2,
        )
        assert explanation.scores["deletion"][0] == pytest.approx(
            curves.deletion_area.item(), rel=1e-4
        )


def test_write_explanations_without_scores_removes_old_ones(model, tmp_path, monkeypatch):
    draw, figures = plot.attributions, []
    monkeypatch.setattr(
        plot, "attributions", lambda *a, **kwargs: figures.append(draw(*a, **kwargs)) or figures[-1]
    )
    (tmp_path / "scores.csv").write_text(",".join(report.COLUMNS["scores.csv"]) + "\n")
    assert list(report.write_explanations([explained(model)], tmp_path)) == [
        tmp_path / "00-image.png"
    ]
    assert not (tmp_path / "scores.csv").exists()
    assert_tidy(figures[-1])
    texts = " ".join(text.get_text() for text in figures[-1].findobj(Text))
    assert "max " in texts and not any(word in texts for word in ("deletion", "rank", "σ"))


@pytest.mark.parametrize("orders", [0, 1, 7, 8])
def test_score_omits_the_deviation_of_fewer_than_8_orders(model, tmp_path, monkeypatch, orders):
    draw, notes = plot.attributions, []

    def attributions(*arguments, **options):
        notes.append(f"{options['note']} {options['captions']}")
        return draw(*arguments, **options)

    monkeypatch.setattr(plot, "attributions", attributions)
    list(report.write_explanations([explained(model, orders=orders)], tmp_path))
    (row,) = pd.read_csv(tmp_path / "scores.csv").to_dict("records")
    spread = [name for name in row if name.endswith(("_std", "_z_score"))]
    assert row["random_orders"] == orders and len(spread) == 4
    assert all(math.isnan(row[name]) == (orders < 8) for name in spread)
    assert math.isnan(row["random_deletion_mean"]) == (orders == 0)
    assert ("σ" in notes[0]) == ("±" in notes[0]) == (orders >= 8) and ("andom" in notes[0]) == (
        orders > 0
    )


def test_explain_and_score_run_few_forwards():
    """Images in forwards of the bundled model, counted by a hook, and runs of autograd's engine."""
    model, forwards, progress = load_model(), [], []
    run = torch.autograd._engine_run_backward
    model.register_forward_hook(lambda _, args, output: forwards.append(args[0].clone()))
    with mock.patch("torch.autograd._engine_run_backward", wraps=run) as backward:
        (explanation,) = report.explain(model, BOTH[:1])
    assert list(explanation.maps) == list(methods()) and "balanced_gradients" in explanation.maps
    assert sum(map(len, forwards)) == 2
    assert backward.call_count == len(model.blocks) + 2, (
        "LeGrad reads each layer, and two backwards"
    )
    list(report.score(model, [explanation], on_forwards=lambda *numbers: progress.append(numbers)))
    assert sum(map(len, forwards)) - 2 == 2 + (7 + 8) * 2 * 13 <= 444
    assert progress[-1] == (392, 392) and [number for number, _ in progress] == [*range(8, 393, 8)]
    seen = torch.cat(forwards[2:])
    covered = explanation.input.mean((2, 3), keepdim=True).expand_as(explanation.input)
    for end in (explanation.input, covered):  # once for all maps, orders and both curves
        assert (seen == end).flatten(1).all(1).sum() == 1


def test_score_yields_finished_scores_when_interrupted(model):
    made = list(report.explain(model, BOTH, 3, names=["relevance", "rollout"]))
    complete = [each.scores for each in report.score(model, made, orders=9)]

    def scored(stop):
        """Scores and whether the interrupt was passed on, if it comes after `stop` forwards of the second image."""
        images = []

        def interrupt(done, total):
            images.append(1) if done == total else None
            if len(images) == 1 and done != total and done >= stop:
                raise KeyboardInterrupt

        results = []
        with pytest.raises(KeyboardInterrupt):
            for each in report.score(model, made, orders=9, on_forwards=interrupt):
                results.append(each.scores)
        return results

    areas = ["method", "deletion", "insertion", "difference"]
    for stop, methods_known, orders in (
        (1, 0, 0),
        (2 + 14, 1, 0),
        (2 + 2 * 14, 2, 0),
        (2 + 10 * 14, 2, 8),
    ):
        first, *second = scored(stop)
        pd.testing.assert_frame_equal(first, complete[0])
        assert len(second) == (methods_known > 0)
        for rows in second:
            pd.testing.assert_frame_equal(rows[areas], complete[1][areas][:methods_known])
            assert rows["rank"].notna().all() == (methods_known == 2)
            assert set(rows["random_orders"]) == {orders} and rows[
                "difference_z_score"
            ].notna().all() == (orders == 8)


EARLY_REFUSALS = (
    ({"target": 10}, "0 to 9, got 10"),
    ({"target": "dog"}, "no class called 'dog'"),
    ({"against": -1}, "0 to 9, got -1"),
    ({"target": 3, "against": "3"}, "with itself"),
    ({"names": ["relevanz"]}, "got 'relevanz'"),
)
"""Options of `report.explain`, and decisive words."""


@pytest.mark.parametrize("options, words", EARLY_REFUSALS)
def test_explain_refuses_before_the_first_forward(model, options, words):
    hook = model.register_forward_pre_hook(lambda *_: pytest.fail("a forward"))
    try:
        refuses(words, next, report.explain(model, BOTH, **options))
    finally:
        hook.remove()


def test_explain_skips_an_image_whose_class_is_the_contrast():
    model, messages = small(), []
    with torch.no_grad():
        logits = torch.cat([model(preprocess(model, image)) for _, image in BOTH])
        model.head.bias -= logits.mean(0)  # now the highest classes of the two images differ
    options = dict(against=(logits[0] - logits[1]).argmax().item(), names=["relevance"])
    (explanation,) = report.explain(model, BOTH, on_error=messages.append, **options)
    assert explanation.name == "coffee" and messages[0].startswith("chelsea is left out. Class")
    refuses("contrast", list, report.explain(model, BOTH, **options))


def built_for_96(**kwargs):
    """Configured for 224 pixels, and built for others."""
    torch.manual_seed(0)
    sizes = dict(img_size=96, embed_dim=48, depth=2, num_heads=3, num_classes=10)
    model = timm.create_model("vit_tiny_patch16_224.augreg_in21k", **sizes | kwargs).eval()
    torch.nn.init.normal_(model.head.weight)
    return model


def test_prepared_has_the_built_size_of_the_model():
    for kwargs in ({}, {"dynamic_img_size": True}):
        model = built_for_96(**kwargs)
        assert (
            report.inspect(model, [("cat", CAT)]).grid.image
            == explained(model).grid.image
            == (96, 96)
        )


def test_explain_refuses_targets_that_a_model_lacks():
    refuses("no class called 'taby'. Did you mean tabby", explained, small(), target="taby")
    refuses(r"\(1, 37, 10\)", explained, built_for_96(global_pool=""))


def test_reports_of_data_parallel_models_are_equal():
    model = built_for_96()
    wrapped = torch.nn.DataParallel(model)
    one, other = (explained(each, steps=4) for each in (model, wrapped))
    assert torch.equal(one.maps["relevance"], other.maps["relevance"]) and one.scores.equals(
        other.scores
    )
    one, other = (report.inspect(each, [("cat", CAT)]) for each in (model, wrapped))
    assert one.to_dict() == other.to_dict() and one.similarity is not None


def test_explain_runs_a_registered_method(vit):
    """Run the example in the docstring of `vitlens.attribution` unchanged."""
    import textwrap

    from vitlens import attribution
    from vitlens.attribution import METHODS, Method, explained, register

    lines = attribution.__doc__.split("adds a method:\n")[1].split("Raises")[0]
    names = {"explained": explained, "register": register, "Method": Method}
    try:
        exec(textwrap.dedent(lines), names)
        model = vit(img_size=32)
        (explanation,) = report.explain(
            model, [("chelsea", samples()["chelsea"])], 3, names=["mine", "occlusion"]
        )
        assert explanation.maps["mine"].shape == explanation.maps["occlusion"].shape == (2, 2)
    finally:
        METHODS.pop("mine", None)


class _PathLike:
    """A path of another class, as libraries of file systems have it."""

    def __init__(self, path):
        self.path = str(path)

    def __fspath__(self):
        return self.path


@pytest.mark.parametrize("kind", [str, _PathLike])
def test_functions_take_paths_of_any_kind(tmp_path, kind):
    model = timm.create_model("test_vit").eval()
    save_for_hf(model, tmp_path / "model", safe_serialization=True)
    Image.fromarray(np.zeros((40, 40, 3), np.uint8)).save(tmp_path / "black.png")
    model = vitlens.load_model(kind(tmp_path / "model"))
    inspection = report.inspect(model, kind(tmp_path / "black.png"))
    report.write_inspection(inspection, kind(tmp_path / "out"))
    report.write_beside({"a": inspection, "b": inspection}, kind(tmp_path / "out"))
    assert (tmp_path / "out" / "beside.png").is_file()
    assert [name for name, _ in vitlens.images.image_files(kind(tmp_path))][0] == "black.png"
    arrays = vitlens.train.snapshots.record(model, torch.zeros(1, 3, 160, 160))
    vitlens.train.snapshots.save(kind(tmp_path / "snapshots.npz"), 1, arrays)
    assert vitlens.train.snapshots.load(kind(tmp_path / "snapshots.npz"))["steps"].tolist() == [1]
    with pytest.raises(TypeError, match="snapshots.load"):
        vitlens.plot.film_strip(kind(tmp_path / "snapshots.npz"))
    (tmp_path / "log.jsonl").write_text('{"step": 1, "steps": 2, "loss": 2.3, "rate": 1.0}\n')
    vitlens.plot.training(kind(tmp_path / "log.jsonl"))
    recipe = vitlens.train.recipe("finetune-small")
    assert vitlens.train.starting_from(recipe, kind(tmp_path / "model")).init
    plt.close("all")


FORMS = {
    "preprocess": lambda model, images, out: len(vitlens.preprocess(model, images)),
    "inspect": lambda model, images, out: report.inspect(model, images).images,
    "explain": lambda model, images, out: len([*report.explain(model, images, names=["legrad"])]),
    "heads": lambda model, images, out: len(report.heads(model, images)),
    "save_page": lambda model, images, out: _photos(widgets.save_page, model, images, out),
    "save_live_page": lambda model, images, out: _photos(save_live_page, model, images, out),
    "like": lambda model, images, out: vitlens.attribution.like(images).bind(model) and 2,
}
"""Number of the images that each function reads, by its name."""


def _photos(save, model, images, out):
    save(model, images, out / "page.html")
    return 2


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.filterwarnings("error")
def test_functions_of_images_leave_out_bad_files_of_a_folder(tmp_path, name):
    """Also of a folder in a list. A bad file that is named is an error, and so is an empty list."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for level, file in ((0, "a.png"), (200, "c.png")):
        Image.fromarray(np.full((160, 160, 3), level, np.uint8)).save(folder / file)
    (folder / "b.jpg").write_bytes(b"\xff\xd8\xff damaged")
    model = timm.create_model("test_vit", num_classes=9).eval()
    for images in (str(folder), [folder]):
        with pytest.warns(UserWarning, match="1 of 3 images of the folder are left out.*b.jpg"):
            assert FORMS[name](model, images, tmp_path) == 2
    with pytest.raises(ImageError, match="b.jpg"):
        FORMS[name](model, [folder / "a.png", folder / "b.jpg"], tmp_path)
    if name != "heads":
        with pytest.raises(ImageError, match="image"):
            FORMS[name](model, [], tmp_path)
