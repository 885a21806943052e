"""Widgets beside the explorer, and the still images of all of them."""

import base64
import html
import io
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from IPython.core.formatters import DisplayFormatter
from matplotlib import colormaps
from PIL import Image
from sklearn.metrics.pairwise import cosine_similarity
from support import (
    PICTURE,
    assert_near,
    caption,
    given,
    reference_attention,
    selected,
    send,
    snapshots,
    values,
)

import vitlens_explorer as widgets
from vitlens import (
    TokenGrid,
    plot,
    tokens,
)
from vitlens.images import samples
from vitlens.plot.style import png
from vitlens_explorer import details
from vitlens_explorer.comparison import matching_patch


def test_compare_maps_query_between_grids(vit):
    fine, coarse = vit(img_size=128), vit(seed=1, depth=2)
    page = widgets.compare(fine, coarse, PICTURE)
    send(page, {"pick": "left", "row": 5, "col": 2})
    assert selected(page) == [(5, 2), (2, 1)]
    maps, _, _ = reference_attention(coarse)
    assert_near(values(page, "right"), maps[1].mean(0)[1 + 9, 1:].reshape(4, 4))
    send(page, {"pick": "right", "row": 3, "col": 0})
    assert selected(page) == [(7, 1), (3, 0)]
    page.set(layer_left=0, head_right=1, layer_right=0)
    assert_near(values(page, "right"), maps[0, 1, 1 + 12, 1:].reshape(4, 4))
    assert "got 'correspondences'" in send(page, {"set": {"view": "correspondences"}}), (
        "it needs one model"
    )
    places = {each["name"]: each["place"] for each in page.frame["controls"]}
    assert [places[name] for name in ("view", "layer_left", "head_right", "other")] == [
        "top",
        "left",
        "right",
        "right",
    ]
    assert page.page.state["view"] == "attention"


def test_compare_nearest_patches_equal_scikit_learn(vit):
    model, other = vit(img_size=128), samples()["coffee"]
    page = widgets.compare(model, image=PICTURE, other=other)
    page.set(view="correspondences", layer_left=1, row=2, column=5)
    with torch.no_grad():
        left, right = (
            tokens.features(model, given(model, each))[0][1][0, 1:].double()
            for each in (PICTURE, other)
        )
    known = cosine_similarity(left, right)
    assert selected(page) == [(2, 5), divmod(int(known[21].argmax()), 8)]
    assert_near(values(page, "right"), known[21].reshape(8, 8), atol=1e-5)
    assert_near(values(page, "left"), cosine_similarity(left)[21].reshape(8, 8), atol=1e-5)
    send(page, {"pick": "right", "row": 7, "col": 1})
    assert selected(page) == [divmod(int(known[:, 57].argmax()), 8), (7, 1)]


GRIDS = (
    TokenGrid(4, 4, (16, 16)),
    TokenGrid(8, 12, (8, 8)),
    TokenGrid(5, 5, (16, 16), image=(66, 74)),
    TokenGrid(4, 5, (14, 14), image=(69, 82)),  # 13 and 12 pixels that no patch sees
    TokenGrid(3, 9, (20, 6), image=(64, 59)),
)


def test_matching_patch_keeps_pixel_position():
    for a in GRIDS:
        for b in GRIDS:
            shares = a.centers(dtype=torch.float64) / torch.tensor(a.image)
            pixels = (
                (shares * torch.tensor(b.image) + 1e-9).long().minimum(torch.tensor(b.image) - 1)
            )
            expected = b.pixel_patches()[pixels[:, 0], pixels[:, 1]].tolist()
            of, to = (SimpleNamespace(grid=grid) for grid in (a, b))
            found = [matching_patch((r, c), of, to) for r in range(a.rows) for c in range(a.cols)]
            assert [r * b.cols + c for r, c in found] == expected


def test_positions_equal_similarity(vit):
    model = vit(img_size=(48, 80))
    page = widgets.positions(model)
    table = model.pos_embed[0, 1:].detach().numpy()
    unit = table / np.linalg.norm(table, axis=1, keepdims=True)
    page.set(row=2, column=3)
    assert_near(values(page, "one"), (unit @ unit[13]).reshape(3, 5))
    send(page, {"pick": "all", "row": 0, "col": 4})
    assert_near(values(page, "one"), (unit @ unit[4]).reshape(3, 5))


def test_training_slider_shows_snapshot():
    run = snapshots(3)
    controls, picture = widgets.training(run).children
    _, slider = controls.children
    assert (slider.min, slider.max, slider.value) == (0, 2, 2)
    slider.value = 1
    expected = png(plot.snapshot(run, 1))
    assert base64.b64encode(expected).decode() in picture.value
    assert f'alt="Step {run["steps"][1]:,}. Embedding filters. ' in picture.value


def still_bundle(widget) -> dict:
    """The still image of a cell that ends with a widget, an output of its own before that of the live view."""
    with mock.patch("IPython.display.display") as display:
        assert DisplayFormatter().format(widget) == ({}, {})
    still, view = (output for (output,), _ in display.call_args_list)
    live = {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}
    assert view == {"application/vnd.jupyter.widget-view+json": live}
    assert sorted(still) == ["image/png", "text/html", "text/plain"]
    assert f'<img alt="{html.escape(still["text/plain"])}" width="' in still["text/html"]
    assert f"vitlens-{widget.model_id}" in widget._dom_classes
    return still


def test_widgets_show_a_still_image_without_a_kernel(vit):
    model = vit()
    explorer = widgets.explore(model, PICTURE)
    for layer in (0, 1):  # the image is that of the state when it is displayed
        explorer.set(layer=layer, strength=1.0, opacity="even", smooth=False, row=1, column=2)
        data = still_bundle(explorer)
        still = np.asarray(Image.open(io.BytesIO(base64.b64decode(data["image/png"]))))[
            34 : 34 + 430, 10 : 10 + 430
        ]
        weights = reference_attention(model)[0][layer].mean(0)[1 + 6, 1:].reshape(4, 4)
        expected = 255 * colormaps["viridis"](weights / weights.max())[..., :3]
        corners = still[20::107, 20::107][:4, :4]  # away from the frame of the query
        assert np.abs(corners - expected).max() <= 2
        assert data["text/plain"] == f"{explorer.frame['panels'][0]['title']}. {caption(explorer)}"
        assert f"row 1, column 2, layer {layer}, mean over heads" in data["text/plain"]


def test_tour_shows_its_steps_without_a_kernel(vit):
    model = vit()
    plain = still_bundle(widgets.explore(model, PICTURE))
    widget = widgets.tour(model, PICTURE)
    widget.set(layer=1, row=2, column=3)
    told = still_bundle(widget)
    steps = details.tour(widget.page.forward, 1, "mean", 2, 3)["sentences"]
    numbered = [f"{number}. {step}" for number, step in enumerate(steps, 1)]
    assert told["text/plain"] == " ".join(["The tour in its steps:", *numbered])
    assert "The tour" not in plain["text/plain"]
    sizes = [
        Image.open(io.BytesIO(base64.b64decode(each["image/png"]))).width for each in (plain, told)
    ]
    assert sizes == [450, 900]


def test_widgets_show_all_panels_without_a_kernel(vit):
    model, width = vit(), {}
    pages = {
        "compare": widgets.compare(model, image=PICTURE),
        "positions": widgets.positions(model),
    }
    for name, page in pages.items():
        data = still_bundle(page)
        assert all(
            f"{panel['title']}. {panel['words']}" in data["text/plain"]
            for panel in page.frame["panels"]
        )
        width[name] = Image.open(io.BytesIO(base64.b64decode(data["image/png"]))).width
    assert width == {"compare": 900, "positions": 900}
    run = snapshots(4)
    slider = widgets.training(run)
    slider.children[0].children[1].value = 2
    data = still_bundle(slider)
    assert data["text/plain"].startswith(f"Step {run['steps'][2]:,}. Embedding filters. ")
    source = data["text/html"].partition("data:image/webp;base64,")[2].partition('"')[0]
    film = Image.open(io.BytesIO(base64.b64decode(source)))
    for index, file in enumerate(files := [io.BytesIO() for _ in range(4)]):
        plot.snapshot(run, index).savefig(file, format="png")
    drawn = [np.asarray(Image.open(file).convert("RGB"), int) for file in files]
    order = []
    for frame in range(film.n_frames):
        film.seek(frame)
        order.append(
            np.argmin(
                [np.abs(np.asarray(film.convert("RGB"), int) - each).mean() for each in drawn]
            )
        )
    assert order == [2, 1, 3], "the current one, then every second one up to the last"
