"""Reports in Python: inspections and explanations of images by models of every kind."""

import base64
import io
import math
import re
import zlib
from unittest import mock
from xml.etree import ElementTree

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import timm
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from PIL import Image
from support import assert_tidy, refuses, saved_model
from timm.models import save_for_hf

import vitlens
import vitlens_explorer as widgets
from vitlens import faithfulness, files, load_model, plot, report
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


@pytest.mark.parametrize(
    "outputs, bias, target, sentence",
    [
        ("classes", [3, 0, 0, 0, 0], 1, "Why “1” (4.2%)? The model predicts “0” (83.4%)."),
        ("classes", [3, 0, 0, 0, 0], 0, "Why “0” (83.4%)?"),
        ("classes", [3, 0, 0, 0, 0], None, "Why “0” (83.4%)?"),
        (
            "independent",
            [3, 1, -1, -1, -1],
            4,
            "Why “4” (26.9%)? The model predicts “0” (95.3%), “1” (73.1%).",
        ),
        (
            "independent",
            [3, 1, -1, -1, -1],
            "1",
            "Why “1” (73.1%)? The model also predicts “0” (95.3%).",
        ),
        (
            "independent",
            [4, 3, 2, 1, 5],
            1,
            "Why “1” (95.3%)? The model also predicts “4” (99.3%), “0” (98.2%), “2” (88.1%) and 1 more.",
        ),
        (
            "independent",
            [-1, -2, -2, -2, -2],
            1,
            "Why “1” (11.9%)? No label is above 50%. The highest is “0” (26.9%).",
        ),
        ("independent", [-1, -2, -2, -2, -2], 0, "Why “0” (26.9%)? No label is above 50%."),
        ("value", [3, 1, 0, 0, 0], 1, "Why “1” (1)?"),
        ("value", [3], 0, "Why 3?"),
    ],
)
def test_explain_states_the_prediction_beside_the_target(outputs, bias, target, sentence, tmp_path):
    model = small(img_size=32, num_classes=len(bias))
    model.outputs = outputs
    model.head.weight.data *= 1e-6  # with zeros no gradient would reach the attention
    model.head.bias.data = torch.tensor(bias, dtype=torch.float)
    made = list(report.explain(model, BOTH, target, names=["legrad"]))
    assert [explanation.sentence for explanation in made] == [sentence] * 2
    assert all(each.title.startswith(f"{sentence} ") for each in made)


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
            columns[:3] == ["image", "target", "target_score"]
            and columns[3:7] == ["predicted", "predicted_score", "against", "method"]
            and len(columns) == 22
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


@pytest.mark.slow
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


@pytest.mark.slow
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


HOSTILE = "<b>&\"'$x^$ 漢\u202e\x1b]]>.png"


@pytest.fixture(scope="module")
def inspected():
    model = small(img_size=32, patch_size=8, num_classes=3)
    return model, report.inspect(model, [(HOSTILE, CAT)])


@pytest.fixture(scope="module", params=["pdf", "svg"])
def figures(request, inspected, tmp_path_factory):
    """Paths of the figures of an image with a hostile name."""
    model, inspection = inspected
    out, form = tmp_path_factory.mktemp(request.param), request.param
    paths = report.write_inspection(inspection, out, form)
    paths += report.write_beside({"before": inspection, HOSTILE: inspection}, out, form)
    paths += report.write_heads(report.heads(model, [(HOSTILE, CAT)]), out, form)
    explanations = report.explain(model, [(HOSTILE, CAT)], 1, names=["legrad"])
    paths += report.write_explanations(explanations, out, form)
    assert all(report.is_ours(path) for path in paths)
    drawn = [path for path in paths if path.suffix == f".{form}"]
    assert len(drawn) == 8
    return drawn


@pytest.mark.parametrize("count", [1, 3, 4])
def test_captions_of_rollouts_are_inside_the_page(inspected, count):
    model, _ = inspected
    figure = plot.inspected(report.inspect(model, [(f"cat {k}", CAT) for k in range(count)]))
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    captions = [text for text in figure.findobj(Text) if "\nmax " in text.get_text()]
    assert len(captions) == count
    for caption in captions:
        assert caption.get_window_extent(canvas.get_renderer()).y0 >= 0


@pytest.mark.parametrize("form", files.FORMATS)
def test_files_of_equal_figures_are_equal(inspected, form):
    _, inspection = inspected
    first, second = (plot.style.figure_file(plot.inspected(inspection), form) for _ in range(2))
    assert first == second


def check_pdf(paths):
    """TrueType fonts, and images that are not blurred."""
    for path in paths:
        data = path.read_bytes()
        streams = [
            zlib.decompressobj().decompress(each)
            for each in re.findall(rb"FlateDecode.*?stream\r?\n(.*?)endstream", data, re.DOTALL)
        ]
        text = b"\n".join([data, *streams])
        assert b"/Type3" not in text and b"/FontFile2" in text
        assert b"/Interpolate" not in text and b"/CreationDate" not in text
        assert len(data) < 400_000


def check_svg(paths):
    """Names as text, and the pixels of the model's input."""
    for path in paths:
        text = path.read_text(encoding="utf-8")
        assert len(text) < 400_000 and "<dc:date>" not in text
        root = ElementTree.fromstring(text)
        words = " ".join("".join(node.itertext()) for node in root.iter() if "text" in node.tag)
        if path.stem.startswith(("00", "beside")):
            assert "<b>&\"'$x^$" in words and "]]>" in words
            assert "\u202e" not in text and "\x1b" not in text
        sizes = set()
        for node in root.iter("{http://www.w3.org/2000/svg}image"):
            if not node.get("transform").startswith("matrix"):
                continue  # a color bar
            assert "image-rendering:pixelated" in node.get("style")
            source = node.get("{http://www.w3.org/1999/xlink}href").partition(",")[2]
            sizes.add(Image.open(io.BytesIO(base64.b64decode(source))).size)
        if path.stem == "rollout":
            assert sizes == {(32, 32)}


def test_vector_figures_hold_fonts_names_and_pixels(figures):
    check = check_pdf if figures[0].suffix == ".pdf" else check_svg
    check(figures)


def test_vector_files_reduce_images_of_more_pixels_than_are_drawn():
    ax = plot.overlay(
        Image.fromarray(np.zeros((2000, 2000, 3), np.uint8)), np.eye(4), crop=(0, 0, 2000, 2000)
    )
    interpolations = [image.get_interpolation() for image in ax.images]
    svg = plot.style.figure_file(ax.figure, "svg", 100).decode()
    assert max(map(int, re.findall(r'<image [^>]*width="(\d+)', svg))) < 600
    assert [image.get_interpolation() for image in ax.images] == interpolations


@pytest.mark.slow
def test_another_format_replaces_only_figures_of_vitlens(tmp_path):
    model = small(img_size=32, patch_size=8, num_classes=3)
    inspection = report.inspect(model, BOTH)
    first = {path.name for path in report.write_inspection(inspection, tmp_path, "pdf")}
    edited = tmp_path / "filters.pdf"
    edited.write_bytes(edited.read_bytes() + b"% edited")
    (tmp_path / "rollout.svg").write_text("<svg>mine</svg>")
    second = {path.name for path in report.write_inspection(inspection, tmp_path, "png")}
    assert "distance.pdf" in first and "distance.png" in second
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == second | {"filters.pdf", "rollout.svg"}
    refuses(
        "is not known as a file of vitlens", report.write_inspection, inspection, tmp_path, "pdf"
    )
    refuses(
        "must be one of png, pdf, svg, got 'eps'",
        report.write_inspection,
        inspection,
        tmp_path,
        "eps",
    )
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_explanations_in_another_format_replace_those_before(tmp_path):
    model = small(img_size=32, patch_size=8, num_classes=3)
    images = [("a.csv.png", CAT), ("b.json", CUP)]  # names that end as those of tables
    for form in files.FORMATS:
        explanations = report.explain(model, images, names=["legrad"])
        paths = list(report.write_explanations(explanations, tmp_path, form))
        assert paths == [tmp_path / f"00-a-csv.{form}", tmp_path / f"01-b.{form}"]
        assert sorted(tmp_path.iterdir()) == paths


def test_figures_save_truetype_fonts_from_python(tmp_path):
    figure = plot.lines(pd.DataFrame({"accuracy": [50.0, 80.0]}, index=[1, 2]), xlabel="Epoch")
    figure.savefig(tmp_path / "lines.pdf")
    data = (tmp_path / "lines.pdf").read_bytes()
    assert b"/FontFile2" in data and b"/Type3" not in data
