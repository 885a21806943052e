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
from vitlens.attribution import METHODS, methods
from vitlens.images import samples
from vitlens.preprocessing import preprocess
from vitlens.reports import explanation, inspection


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = saved(tmp_path_factory.mktemp("model"))
    return path


def pictures(*names):
    return [(name, samples()[name]) for name in names]


def test_maps_and_scores_are_those_of_the_methods(folder):
    model = load_model(folder)
    (first, second) = explanation.explain(
        model, pictures("chelsea", "coffee"), 3, names=("relevance", "legrad"), orders=3
    )
    x = preprocess(model, samples()["coffee"])
    torch.testing.assert_close(second.maps["relevance"], METHODS["relevance"](model, x, 3)[0])
    torch.testing.assert_close(second.maps["legrad"], METHODS["legrad"](model, x, 3)[0])
    assert second.target == "3" and second.probability == pytest.approx(model(x).softmax(-1)[0, 3].item())
    assert list(first.scores["method"]) == ["relevance", "legrad", "random mean", "random std"]
    assert sorted(first.scores["rank"].dropna()) in ([1, 2], [1, 1])
    # Deletion of the best map by hand: the class's probability with the patches covered one after the other.
    order = second.maps["legrad"].flatten().argsort(descending=True)
    covered, scores = x.clone(), [second.probability]
    for patch in order.tolist():
        row, col = divmod(patch, 4)
        mean = x.mean((2, 3))[0, :, None, None]
        covered[0, :, 8 * row : 8 * row + 8, 8 * col : 8 * col + 8] = mean
        with torch.no_grad():
            scores.append(model(covered).softmax(-1)[0, 3].item())
    area = second.scores.set_index("method").deletion["legrad"]
    assert area == pytest.approx(torch.trapezoid(torch.tensor(scores), dx=1 / 16).item(), abs=1e-6)


def test_names_are_those_of_the_head_that_answers():
    """ImageNet's are not those of a head of one's own, which is a classifier on a model without one too."""
    torch.manual_seed(0)
    for classes in (1000, 0):
        model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=classes).eval()
        model.head = torch.nn.Linear(192, 3)
        (found,) = explanation.explain(model, pictures("chelsea"), names=("relevance",), orders=2)
        seen = inspection.inspect(model, pictures("chelsea"))
        assert found.target in "012" and sorted(name for name, _ in seen.pictures[0].top5) == ["0", "1", "2"]
        assert not any("no classifier" in note for note in seen.notes)
        with pytest.raises(ValueError, match="names of vit_tiny.* unknown, so 'tench' cannot be found"):
            METHODS["relevance"](model, preprocess(model, samples()["chelsea"], size=(32, 32)), "tench")
        explorer = widgets.explore(model, samples()["chelsea"])
        explorer.set(view="relevance", target=2)
        assert sorted(bar["name"] for bar in explorer.frame["bars"]) == ["0", "1", "2"]
    model.head = torch.nn.Identity()
    assert inspection.inspect(model, pictures("chelsea")).pictures[0].top5 == []
    with pytest.raises(ValueError, match="its output is features"):
        explanation.explain(model, pictures("chelsea"))


def test_the_command_writes_figures_and_a_table(folder, tmp_path):
    for name in ("chelsea", "coffee"):
        samples()[name].save(tmp_path / f"{name}.png")
    (tmp_path / "broken.png").write_text("no picture")
    files = [tmp_path / f"{name}.png" for name in ("chelsea", "broken", "coffee")]
    out = tmp_path / "out"
    done = vitlens("explain", folder, *files, "--methods", "relevance, rollout", "--orders", 2, "--out", out, expect=1)
    assert "broken.png" in done.stderr and "is a text file" in done.stderr
    assert done.stdout.split() == [str(out / name) for name in ("00-chelsea.png", "01-coffee.png", "scores.csv")]
    assert Image.open(out / "00-chelsea.png").width > 900
    rows = list(csv.DictReader((out / "scores.csv").read_text().splitlines()))
    assert [row["method"] for row in rows] == 2 * ["relevance", "rollout", "random mean", "random std"]
    assert {row["image"] for row in rows} == {"chelsea.png", "coffee.png"} and float(rows[0]["deletion"]) < 1


def test_a_class_rather_than_another(folder, tmp_path):
    samples()["coffee"].save(tmp_path / "coffee.png")
    out, options = tmp_path / "out", ("--methods", "relevance", "--orders", 2, "--baseline", "zero")
    vitlens("explain", folder, tmp_path / "coffee.png", "--target", 3, "--against", 1, *options, "--out", out)
    rows = list(csv.DictReader((out / "scores.csv").read_text().splitlines()))
    assert {(row["target"], row["against"], row["baseline"], row["step"]) for row in rows} == {("3", "1", "zero", "1")}
    model = load_model(folder)
    x = preprocess(model, samples()["coffee"])
    chosen = METHODS["relevance"](model, x, 3, against=1)
    found = faithfulness.curves(model, x, chosen, 3, against=1, baseline="zero")
    assert float(rows[0]["deletion"]) == pytest.approx(found.deletion_area.item(), rel=1e-4)
    (alone,) = explanation.explain(model, pictures("coffee"), 3, names=("relevance",), orders=2)
    assert alone.against == "" and not torch.allclose(alone.maps["relevance"], chosen[0])


@pytest.mark.parametrize(
    ("score", "against", "words"),
    [
        ("probability", None, "Areas under the probability of the class while patches are covered"),
        ("probability", 1, "Areas under the probability of the class among the two while patches are covered"),
        ("logit", None, "Areas under the logit of the class while patches are covered"),
        ("logit", 1, "Areas under the logit of the class less that of the other while patches are covered"),
    ],
)
def test_what_the_areas_are_under_is_kept_and_told(folder, tmp_path, monkeypatch, score, against, words):
    model, draw, figures = load_model(folder), plot.explained, []
    monkeypatch.setattr(plot, "explained", lambda *a, **kwargs: figures.append(draw(*a, **kwargs)) or figures[0])
    found = explanation.explain(
        model, pictures("coffee"), 3, against=against, names=("relevance",), orders=2, score=score, baseline="zero"
    )
    explanation.write(found, model, tmp_path)
    assert_tidy(figures[0])
    written = [text.get_text() for text in (*figures[0].texts, *(t for ax in figures[0].axes for t in ax.texts))]
    assert not any("-" in text for text in written), "a minus is a minus"
    note = figures[0].texts[-1].get_text()
    assert note.startswith(words) and "\nCovered by the color that is zero to the model. Random orders: " in note
    with open(tmp_path / "scores.csv") as file:
        row, *_ = csv.DictReader(file)
    assert [*row] == [
        "image", "target", "against", "method", "deletion", "insertion", "difference", "rank", "deletion_sigmas",
        "insertion_sigmas", "difference_sigmas", "score", "baseline", "step",
    ]  # fmt: skip
    assert row["score"] == score and row["image"] == "coffee" and row["target"] == "3"
    x = preprocess(model, samples()["coffee"])
    curves = faithfulness.curves(
        model, x, METHODS["relevance"](model, x, 3, against=against), 3, against=against, score=score, baseline="zero"
    )
    assert float(row["deletion"]) == pytest.approx(curves.deletion_area.item(), rel=1e-4)


def test_a_picture_whose_class_is_the_other_is_left_out():
    model, said = timm.create_model("vit_tiny_patch16_224", patch_size=32, embed_dim=48, depth=1, num_heads=3), []
    with torch.no_grad():
        logits = torch.cat([model.eval()(preprocess(model, samples()[name])) for name in ("chelsea", "coffee")])
        model.head.bias -= logits.mean(0)  # now one has the more of what the other has the less
    first = (logits[0] - logits[1]).argmax().item()
    both, options = pictures("chelsea", "coffee"), {"names": ("relevance",), "orders": 2}
    (found,) = explanation.explain(model, both, against=first, on_error=said.append, **options)
    assert found.name == "coffee" and said[0].startswith("chelsea is left out. A contrast is between two classes")
    with pytest.raises(ValueError, match="contrast"):
        explanation.explain(model, both, against=first, **options)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--methods", "relevanz"], "There is no method 'relevanz'; there are relevance, gradient_rollout"),
        (["--target", "10"], "has 10 classes, numbered from 0 to 9, but class 10 was asked for"),
        (["--target", "tabby"], "names of"),
        (["--baseline", "gray"], "A baseline is one of mean, blur, zero"),
        (["--target", "3", "--against", "3"], "rather than itself; give another one to `against`"),
        (["--orders", "1"], "at least 2 random orders"),
    ],
)
def test_bad_options_are_one_sentence(folder, tmp_path, options, sentence):
    samples()["coffee"].save(tmp_path / "cup.png")
    message = vitlens("explain", folder, tmp_path / "cup.png", *options, "--out", tmp_path / "out", expect=2).stderr
    assert sentence in message and not (tmp_path / "out").exists()


def test_each_picture_is_written_as_it_is_done(folder, tmp_path, monkeypatch):
    """Ctrl-C in the second picture: what is known of the first stays, and the last lines say where."""
    table, scored = faithfulness.table, []

    def interrupted(*arguments, **options):
        scored.append(table(*arguments, **options))
        if len(scored) == 2:
            raise KeyboardInterrupt
        return scored[-1]

    monkeypatch.setattr(faithfulness, "table", interrupted)
    files = []
    for name, picture in pictures("coffee", "chelsea"):
        files.append(tmp_path / f"{name}.png")
        picture.save(files[-1])
    out = tmp_path / "out"
    done = vitlens(
        "explain", folder, *files, "--methods", "relevance,rollout", "--orders", 2, "--out", out, expect=130
    )
    assert done.stdout.split() == [str(out / "00-coffee.png")]
    assert f"vitlens: stopped after 1 of 2 pictures, which are in {out}." in done.stderr.splitlines()
    assert sorted(path.name for path in out.iterdir()) == ["00-coffee.png", "scores.csv"]
    with open(out / "scores.csv") as file:
        assert {row["image"] for row in csv.DictReader(file)} == {"coffee.png"}


def test_progress_is_told_part_by_part(folder):
    parts = []
    seen = [each.name for each in explanation.explanations(
        load_model(folder), pictures("coffee", "chelsea"), names=("relevance", "rollout"), orders=2,
        on_part=parts.append,
    )]  # fmt: skip
    assert seen == ["coffee", "chelsea"]
    assert parts == [f"{name}, {part}" for name in seen for part in ("relevance", "rollout", "scores")]


def test_names_are_understood_and_nearest_ones_offered():
    model = timm.create_model("vit_tiny_patch16_224", patch_size=32, embed_dim=48, depth=1, num_heads=3)
    (found,) = explanation.explain(model, pictures("chelsea"), "tabby", names=("relevance",), orders=2)
    assert "tabby" in found.target
    with pytest.raises(ValueError, match="no class called 'taby'. Did you mean tabby"):
        explanation.explain(model, pictures("chelsea"), "taby", names=("relevance",), orders=2)


def wide_vit(**kwargs):
    """Made for 224 pixels by its configuration, and built for others."""
    torch.manual_seed(0)
    small = dict(img_size=96, embed_dim=48, depth=2, num_heads=3, num_classes=10)
    model = timm.create_model("vit_tiny_patch16_224.augreg_in21k", **small | kwargs).eval()
    torch.nn.init.normal_(model.head.weight)
    return model


@pytest.mark.parametrize("kwargs", [{}, {"dynamic_img_size": True}])
def test_pictures_are_shown_at_the_size_that_the_model_was_built_for(kwargs):
    model, cat = wide_vit(**kwargs), [("cat", samples()["chelsea"])]
    assert inspection.inspect(model, cat).grid.image == (96, 96)
    assert explanation.explain(model, cat, names=["relevance"], step=9, orders=2)[0].grid.image == (96, 96)


def test_a_wrapped_model_is_shown_what_the_model_is_shown():
    """Its own normalization and crop, and not ImageNet's."""
    model, cat = wide_vit(), samples()["chelsea"]
    wrapped = torch.nn.DataParallel(model)
    assert torch.equal(preprocess(wrapped, cat), preprocess(model, cat))
    one, other = (
        explanation.explain(m, [("cat", cat)], names=["relevance"], step=9, orders=2)[0] for m in (model, wrapped)
    )
    assert torch.equal(one.maps["relevance"], other.maps["relevance"]) and one.scores.equals(other.scores)
    one, other = (inspection.inspect(m, [("cat", cat)]) for m in (model, wrapped))
    assert one.to_dict() == other.to_dict() and one.similarity is not None


def test_outputs_that_are_not_pooled_are_told():
    model = wide_vit(global_pool="")
    with pytest.raises(ValueError, match=r"of shape \(B, classes\), but .* gives outputs of shape \(1, 37, 10\)"):
        explanation.explain(model, [("cat", samples()["chelsea"])], names=["relevance"])


def test_a_method_of_captum_without_captum_is_one_sentence(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "captum", None)
    monkeypatch.setitem(sys.modules, "captum.attr", None)
    samples()["chelsea"].save(tmp_path / "cat.png")
    done = vitlens("explain", folder, tmp_path / "cat.png", "--methods", "occlusion", "--out", tmp_path / "o", expect=2)
    assert done.stderr.startswith("vitlens: This map is made by captum, which is not installed")


def test_a_wrapper_is_explained_once_it_is_known_how_pictures_are_prepared_for_it(folder):
    inner = load_model(folder)
    head = torch.nn.Sequential(inner, torch.nn.Softmax(-1)).eval()
    (found,) = explanation.explain(head, pictures("chelsea"), 3, orders=2)
    assert list(found.maps) == [name for name in methods() if name != "legrad"]
    x = preprocess(inner, samples()["chelsea"])
    torch.testing.assert_close(found.maps["relevance"], METHODS["relevance"](head, x, 3)[0])

    class Normalized(torch.nn.Module):
        def forward(self, x):
            mean, std = (torch.tensor(inner.pretrained_cfg[key])[:, None, None] for key in ("mean", "std"))
            return (x - mean) / std

    wrapped = torch.nn.Sequential(Normalized(), inner).eval()
    with pytest.raises(ValueError, match="Sequential changes images before the Vision Transformer in it sees them"):
        explanation.explain(wrapped, pictures("chelsea"))
    wrapped.pretrained_cfg = {**inner.pretrained_cfg, "mean": (0.0,) * 3, "std": (1.0,) * 3}
    (found,) = explanation.explain(wrapped, pictures("chelsea"), 3, names=("legrad", "rollout"), orders=2)
    (expected,) = explanation.explain(inner, pictures("chelsea"), 3, names=("legrad", "rollout"), orders=2)
    for name, values in found.maps.items():
        torch.testing.assert_close(values, expected.maps[name])
