"""Explanations as a user meets them: the command, its figures and its table."""

import csv
import sys

import pytest
import timm
import torch
from PIL import Image
from test_cli import saved, vitlens
from test_plot import assert_tidy

from vitlens import faithfulness, load_model, plot, widgets
from vitlens.attribution import methods, relevance
from vitlens.images import samples
from vitlens.models import preprocess
from vitlens.reports import explanation, inspection

CAT, CUP = samples()["chelsea"], samples()["coffee"]
BOTH = [("chelsea", CAT), ("coffee", CUP)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder)


@pytest.fixture
def cup(tmp_path):
    CUP.save(tmp_path / "coffee.png")
    return tmp_path / "coffee.png"


def explained(model, picture=CAT, target=None, **options):
    """The explanation of one picture, by relevance unless told otherwise."""
    options = dict(names=["relevance"], orders=2) | options
    (found,) = explanation.explain(model, [("picture", picture)], target, **options)
    return found


def rows_of(path):
    with open(path, encoding="utf-8") as file:
        return list(csv.DictReader(file))


def small(**kwargs):
    kwargs = dict(patch_size=32, embed_dim=48, depth=1, num_heads=3) | kwargs
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", **kwargs).eval()


def test_maps_and_scores_are_those_of_the_methods(model):
    first, second = explanation.explain(model, BOTH, 3, names=("relevance", "legrad"), orders=3)
    x = preprocess(model, CUP)
    for name, method in methods(["relevance", "legrad"]).items():
        torch.testing.assert_close(second.maps[name], method(model, x, 3)[0])
    assert second.target == "3" and second.value == pytest.approx(model(x).softmax(-1)[0, 3].item())
    assert list(first.scores["method"]) == ["relevance", "legrad", "random mean", "random std"]
    assert sorted(first.scores["rank"].dropna()) in ([1, 2], [1, 1])
    # Deletion of the best map by hand: the class's probability with the patches covered one after the other.
    covered, scores = x.clone(), [second.value]
    for patch in second.maps["legrad"].flatten().argsort(descending=True).tolist():
        row, col = 8 * (patch // 4), 8 * (patch % 4)
        covered[0, :, row : row + 8, col : col + 8] = x.mean((2, 3))[0, :, None, None]
        with torch.no_grad():
            scores.append(model(covered).softmax(-1)[0, 3].item())
    area = second.scores.set_index("method").deletion["legrad"]
    assert area == pytest.approx(torch.trapezoid(torch.tensor(scores), dx=1 / 16).item(), abs=1e-6)


@pytest.mark.parametrize("classes", [1000, 0])
def test_names_are_those_of_the_head_that_answers(classes):
    """ImageNet's are not those of a head of one's own, which is a classifier on a model without one too."""
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=classes).eval()
    model.head = torch.nn.Linear(192, 3)
    seen = inspection.inspect(model, [("cat", CAT)])
    assert explained(model).target in "012" and sorted(name for name, _ in seen.pictures[0].top5) == ["0", "1", "2"]
    assert not any("no classifier" in note for note in seen.notes)
    with pytest.raises(ValueError, match="no class called .tench.. Its classes have no names"):
        relevance(model, preprocess(model, CAT, size=(32, 32)), "tench")
    explorer = widgets.explore(model, CAT)
    explorer.set(view="relevance", target=2)
    assert sorted(bar["name"] for bar in explorer.frame["bars"]) == ["0", "1", "2"]
    model.head = torch.nn.Identity()
    assert inspection.inspect(model, [("cat", CAT)]).pictures[0].top5 == []
    with pytest.raises(ValueError, match="its output is features"):
        explained(model)


def test_the_command_writes_figures_and_a_table(folder, cup, tmp_path):
    CAT.save(tmp_path / "chelsea.png")
    (tmp_path / "broken.png").write_text("no picture")
    files, out = [tmp_path / "chelsea.png", tmp_path / "broken.png", cup], tmp_path / "out"
    done = vitlens("explain", folder, *files, "--methods", "relevance, rollout", "--orders", 2, "--out", out, expect=1)
    assert "broken.png" in done.stderr and "is damaged or in no format" in done.stderr
    assert done.stdout.split() == [str(out / name) for name in ("00-chelsea.png", "01-coffee.png", "scores.csv")]
    assert Image.open(out / "00-chelsea.png").width > 900
    rows = rows_of(out / "scores.csv")
    assert [row["method"] for row in rows] == 2 * ["relevance", "rollout", "random mean", "random std"]
    assert {row["image"] for row in rows} == {"chelsea.png", "coffee.png"} and float(rows[0]["deletion"]) < 1


def test_a_class_rather_than_another(folder, model, cup, tmp_path):
    options = ("--methods", "relevance", "--orders", 2, "--baseline", "zero", "--out", tmp_path)
    vitlens("explain", folder, cup, "--target", 3, "--against", 1, *options)
    rows = rows_of(tmp_path / "scores.csv")
    assert {(row["target"], row["against"], row["baseline"], row["step"]) for row in rows} == {("3", "1", "zero", "1")}
    x = preprocess(model, CUP)
    chosen = relevance(model, x, 3, against=1)
    found = faithfulness.curves(model, x, chosen, 3, against=1, baseline="zero")
    assert float(rows[0]["deletion"]) == pytest.approx(found.deletion_area.item(), rel=1e-4)
    alone = explained(model, CUP, 3)
    assert alone.against == "" and not torch.allclose(alone.maps["relevance"], chosen[0])


@pytest.mark.parametrize("score, against, words", [
    ("probability", None, "the probability of the class while"),
    ("probability", 1, "the probability of the class among the two while"),
    ("logit", None, "the logit of the class while"),
    ("logit", 1, "the logit of the class less that of the other while"),
])  # fmt: skip
def test_what_the_areas_are_under_is_kept_and_told(model, tmp_path, monkeypatch, score, against, words):
    draw, figures = plot.attributions, []
    monkeypatch.setattr(plot, "attributions", lambda *a, **kwargs: figures.append(draw(*a, **kwargs)) or figures[0])
    found = explained(model, CUP, 3, against=against, score=score, baseline="zero")
    explanation.write([found], model, tmp_path)
    assert_tidy(figures[0])
    written = [text.get_text() for text in (*figures[0].texts, *(t for ax in figures[0].axes for t in ax.texts))]
    assert not any("-" in text for text in written), "a minus is a minus"
    note = figures[0].texts[-1].get_text()
    assert note.startswith(f"Areas under {words} patches are covered")
    assert "\nCovered by the color that is zero to the model. Random orders: " in note
    row = rows_of(tmp_path / "scores.csv")[0]
    assert [*row] == [
        "image", "target", "against", "method", "deletion", "insertion", "difference", "rank", "deletion_sigmas",
        "insertion_sigmas", "difference_sigmas", "score", "baseline", "step",
    ]  # fmt: skip
    assert row["score"] == score and row["image"] == "picture" and row["target"] == "3"
    x, asked = preprocess(model, CUP), dict(target=3, against=against)
    curves = faithfulness.curves(model, x, relevance(model, x, **asked), **asked, score=score, baseline="zero")
    assert float(row["deletion"]) == pytest.approx(curves.deletion_area.item(), rel=1e-4)


def test_a_picture_whose_class_is_the_other_is_left_out():
    model, said = small(), []
    with torch.no_grad():
        logits = torch.cat([model(preprocess(model, picture)) for _, picture in BOTH])
        model.head.bias -= logits.mean(0)  # now one has the more of what the other has the less
    options = dict(against=(logits[0] - logits[1]).argmax().item(), names=["relevance"], orders=2)
    (found,) = explanation.explain(model, BOTH, on_error=said.append, **options)
    assert found.name == "coffee" and said[0].startswith("chelsea is left out. Class")
    with pytest.raises(ValueError, match="contrast"):
        explanation.explain(model, BOTH, **options)


@pytest.mark.parametrize("options, sentence", [
    (["--methods", "relevanz"], "There is no method 'relevanz'; there are relevance, gradient_rollout"),
    (["--target", "10"], "has classes 0 to 9, got 10"),
    (["--target", "tabby"], "no class called 'tabby'"),
    (["--baseline", "gray"], "mean, blur, zero"),
    (["--target", "3", "--against", "3"], "contrasted with itself"),
    (["--orders", "1"], "needs at least 2 of them"),
])  # fmt: skip
def test_bad_options_are_one_sentence(folder, cup, tmp_path, options, sentence):
    message = vitlens("explain", folder, cup, *options, "--out", tmp_path / "out", expect=2).stderr
    assert sentence in message and not (tmp_path / "out").exists()


def test_each_picture_is_written_as_it_is_done(folder, cup, tmp_path, monkeypatch):
    """Ctrl-C in the second picture: what is known of the first stays, and the last lines say where."""
    table, scored, out = faithfulness.table, [], tmp_path / "out"

    def interrupted(*arguments, **options):
        scored.append(table(*arguments, **options))
        if len(scored) == 2:
            raise KeyboardInterrupt
        return scored[-1]

    monkeypatch.setattr(faithfulness, "table", interrupted)
    CAT.save(tmp_path / "chelsea.png")
    options = ("--methods", "relevance,rollout", "--orders", 2, "--out", out)
    done = vitlens("explain", folder, cup, tmp_path / "chelsea.png", *options, expect=130)
    assert done.stdout.split() == [str(out / "00-coffee.png")]
    assert "stopped after 1 of 2" in done.stderr and str(out) in done.stderr
    assert sorted(path.name for path in out.iterdir()) == ["00-coffee.png", "scores.csv"]
    assert {row["image"] for row in rows_of(out / "scores.csv")} == {"coffee.png"}


def test_progress_is_told_part_by_part(model):
    parts, names = [], ("relevance", "rollout")
    found = explanation.explanations(model, BOTH, names=names, orders=2, on_part=parts.append)
    assert [each.name for each in found] == ["chelsea", "coffee"]
    assert parts == [f"{name}, {part}" for name, _ in BOTH for part in (*names, "scores")]


def test_names_are_understood_and_nearest_ones_offered():
    assert "tabby" in explained(small(), target="tabby").target
    with pytest.raises(ValueError, match="no class called 'taby'. Did you mean tabby"):
        explained(small(), target="taby")


def wide_vit(**kwargs):
    """Made for 224 pixels by its configuration, and built for others."""
    torch.manual_seed(0)
    sizes = dict(img_size=96, embed_dim=48, depth=2, num_heads=3, num_classes=10)
    model = timm.create_model("vit_tiny_patch16_224.augreg_in21k", **sizes | kwargs).eval()
    torch.nn.init.normal_(model.head.weight)
    return model


@pytest.mark.parametrize("kwargs", [{}, {"dynamic_img_size": True}])
def test_pictures_are_shown_at_the_size_that_the_model_was_built_for(kwargs):
    model = wide_vit(**kwargs)
    assert inspection.inspect(model, [("cat", CAT)]).grid.image == (96, 96)
    assert explained(model, step=9).grid.image == (96, 96)


def test_a_wrapped_model_is_shown_what_the_model_is_shown():
    """Its own normalization and crop, and not ImageNet's."""
    model = wide_vit()
    wrapped = torch.nn.DataParallel(model)
    assert torch.equal(preprocess(wrapped, CAT), preprocess(model, CAT))
    one, other = (explained(each, step=9) for each in (model, wrapped))
    assert torch.equal(one.maps["relevance"], other.maps["relevance"]) and one.scores.equals(other.scores)
    one, other = (inspection.inspect(each, [("cat", CAT)]) for each in (model, wrapped))
    assert one.to_dict() == other.to_dict() and one.similarity is not None


def test_outputs_that_are_not_pooled_are_told():
    with pytest.raises(ValueError, match=r"of shape \(B, classes\), but .* gives outputs of shape \(1, 37, 10\)"):
        explained(wide_vit(global_pool=""))


def test_pictures_that_are_no_pairs_are_told(model):
    for report in (explanation.explain, inspection.inspect):
        with pytest.raises(ValueError, match=r"pairs \(name, picture\).* got 'cat.jpg'"):
            report(model, ["cat.jpg"])


def test_a_method_of_captum_without_captum_is_one_sentence(folder, cup, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "captum", None)
    monkeypatch.setitem(sys.modules, "captum.attr", None)
    done = vitlens("explain", folder, cup, "--methods", "occlusion", "--out", tmp_path / "o", expect=2)
    assert done.stderr.startswith("vitlens: This map is made by captum, which is not installed")


def test_a_wrapper_is_explained_once_it_is_known_how_pictures_are_prepared_for_it(model):
    head = torch.nn.Sequential(model, torch.nn.Softmax(-1)).eval()
    found = explained(head, target=3, names=None)
    assert list(found.maps) == [name for name in methods() if name != "legrad"]
    torch.testing.assert_close(found.maps["relevance"], relevance(head, preprocess(model, CAT), 3)[0])

    class Normalized(torch.nn.Module):
        def forward(self, x):
            mean, std = (torch.tensor(model.pretrained_cfg[key])[:, None, None] for key in ("mean", "std"))
            return (x - mean) / std

    wrapped = torch.nn.Sequential(Normalized(), model).eval()
    with pytest.raises(ValueError, match="Sequential changes images before the Vision Transformer in it sees them"):
        explained(wrapped)
    wrapped.pretrained_cfg = {**model.pretrained_cfg, "mean": (0.0,) * 3, "std": (1.0,) * 3}
    found, expected = (explained(each, target=3, names=("legrad", "rollout")) for each in (wrapped, model))
    for name, values in found.maps.items():
        torch.testing.assert_close(values, expected.maps[name])
