"""Figures are tested by their artists (data, colors, limits, words, boxes), and maps by closed forms, not by pixels."""

import re
from functools import partial

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
import timm
import torch
from support import CUT, photo, refuses

mpl.use("Agg")

import book
import matplotlib.pyplot as plt
from matplotlib.collections import LineCollection
from matplotlib.colors import ListedColormap, to_rgb, to_rgba
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from support import RNG, assert_tidy, cosines, heads_of, history, snapshots, tile

import vitlens_paper as paper
from vitlens import capture, plot
from vitlens.attention import summary as summarize
from vitlens.images import ModelInput
from vitlens.recorder.grid import TokenGrid
from vitlens.report import Inspection, Picture


def attention(heads, rows, cols):
    return RNG.dirichlet(np.full(rows * cols, 0.1), heads).reshape(heads, rows, cols)


def inspection(grid=CUT, layers=12, heads=3, pictures=6, **lacks):
    """An inspection of random numbers. lacks: reasons for missing filters, positions or rollout."""
    height, width = grid.image
    maps = torch.from_numpy(RNG.dirichlet(np.full(grid.patches, 5.0), pictures)).unflatten(
        1, (grid.rows, -1)
    )
    maps = [None] * pictures if "rollout" in lacks else maps
    shown = [
        Picture("", photo(height, width), [(f"class number {k}, or so", 0.5)], m)
        for k, m in enumerate(maps)
    ]
    return Inspection(
        "vit",
        grid,
        torch.from_numpy(RNG.uniform(10, 30, (layers, heads))),
        pictures,
        shown,
        None if "filters" in lacks else torch.from_numpy(RNG.normal(size=(28, 8, 8, 3))),
        torch.full((28,), 0.02),
        None if "positions" in lacks else torch.from_numpy(cosines(grid.rows, grid.cols)),
        [],
        lacks,
    )


@pytest.fixture(autouse=True)
def nothing_stays_open():
    assert plt.get_fignums() == []
    RNG.bit_generator.state = np.random.default_rng(
        0
    ).bit_generator.state  # the same images in any order of tests
    yield
    plt.close("all")


WHY = "VisionTransformerRelPos has no table of learned position embeddings. Use a model that adds one vector per patch."
METHODS = ("relevance", "gradient_rollout", "legrad", "attention_gradient", "grad_cam", "rollout")
CURVES = pd.DataFrame(
    {"one": np.arange(1, 7), "two": np.arange(6) ** 2 + 1}, [1, 4, 9, 100, 1000, 10_000]
)
ALONE = {
    "lines": lambda ax=None: plot.lines(
        CURVES, dotted=CURVES + 2, log="x", palette="viridis", level=3, ax=ax
    ),
    "intervals": lambda ax=None: plot.intervals(
        {f"method no. {k}": k for k in range(9)},
        {f"method no. {k}": 0.5 for k in range(9)},
        level=2,
        ax=ax,
    ),
    "filters": lambda ax=None: plot.filters(RNG.normal(size=(7, 8, 8, 3)), cols=4, ax=ax),
    "positions": lambda ax=None: plot.position_similarity(cosines(4, 16), ax=ax),
    "all heads": lambda ax=None: plot.all_heads(attention(12, 4, 4).reshape(6, 2, 4, 4), ax=ax),
    "few-shot": lambda ax=None: paper.few_shot({"a": [(9, 10), (90, 50)]}, ax=ax),
    "pre-training": lambda ax=None: paper.pretraining_size(ax=ax),
    "overlay": lambda ax=None: plot.overlay(
        photo(), attention(1, 14, 20)[0], grid=CUT, style="heat", ax=ax
    ),
    "distance": lambda ax=None: plot.attention_distance(
        RNG.uniform(0, 99, (24, 16)), uniform=90, title="A", ax=ax
    ),
}
"""Figures of one Axes."""
PAGES = {
    "filters": lambda: plot.filters(RNG.normal(size=(28, 16, 16, 3)), np.full(28, 1 / 28)),
    "positions": lambda: plot.position_similarity(cosines(14, 20)),
    "rollouts 1": lambda: plot.rollouts(
        [photo()], attention(1, 14, 20), grid=CUT, captions=["a cat"]
    ),
    "rollouts 8": lambda: plot.rollouts(
        [ModelInput(photo(60, 40 + 15 * i)[None])[0] for i in range(8)],
        attention(8, 6, 8),
        captions=["a word " * i for i in range(8)],
    ),
    "contributions": lambda: plot.contributions(
        {f"{k}.jpg: a class": RNG.normal(size=(6, 7)) for k in range(5)}
    ),
    "heads": lambda: plot.heads(attention(6, 14, 20), image=photo(), grid=CUT, query=(13, 0)),
    "heads, many": lambda: plot.heads(attention(16, 14, 20)),
    "heads, own scales": lambda: plot.heads(
        attention(12, 14, 20), image=photo(), grid=CUT, shared=False
    ),
    "all heads, image": lambda: plot.all_heads(
        attention(36, 14, 20).reshape(12, 3, 14, 20), image=photo(), grid=CUT, framed=[(3, 1)]
    ),
    "positions, enlarged": lambda: plot.position_similarity(cosines(14, 20), enlarged=(13, 0)),
    "filters, untrained": lambda: plot.filters(
        RNG.normal(size=(28, 16, 16, 3)),
        np.full(28, 1 / 28),
        untrained=RNG.normal(size=(28, 16, 16, 3)),
    ),
    "patches": lambda: book.patches(photo(), grid=CUT),
    "attributions": lambda: plot.attributions(
        photo(),
        dict(zip(METHODS, attention(6, 14, 20), strict=True)),
        grid=CUT,
        title="Why “bull mastiff” (41.4 %)? deit_tiny_patch16_224",
        captions=dict.fromkeys(
            METHODS, "rank 1, +3.9 σ from random\ndeletion 0.017, insertion 0.332"
        ),
        note="Areas under the probability of the class.\nRandom orders: 0.111 ± 0.037.",
    ),
    "overlays": lambda: plot.overlays(
        photo(),
        {f"map no. {k}": attention(1, 14, 20)[0] - k / 2 for k in range(5)},
        grid=CUT,
        query=(13, 19),
    ),
    "all heads": lambda: plot.all_heads(
        attention(384, 16, 16).reshape(24, 16, 16, 16) / 100, query=(0, 9)
    ),
    "training": lambda: plot.training(history(90), marks={"mixing off": 81}),
    "snapshot": lambda: plot.snapshot(snapshots(3)),
    "snapshot, small": lambda: plot.snapshot(snapshots(1, grid=2, patch=32, images=1)),
    "film strip": lambda: plot.film_strip(
        snapshots(7, patch=16, layers=24, heads=16), labels=["a step"] * 7
    ),
    "inspected": lambda: plot.inspected(
        {"deit_tiny_patch16_224": inspection(TokenGrid(14, 14, (16, 16)))}
    ),
    "inspected, two": lambda: plot.inspected(
        {"one": inspection(filters=WHY, positions=WHY), "other": inspection(heads=16, rollout=WHY)}
    ),
    "gallery": lambda: plot.gallery(
        {"": list(attention(6, 8, 8))}, titles=[f"last {k} of 6" for k in range(6)]
    ),
    "gallery, three rows": lambda: plot.gallery(
        {"picture": [photo(64, 64)] * 7, "before": attention(7, 8, 8), "after": attention(7, 8, 8)},
        shared=False,
    ),
} | {f"{name}, alone": draw for name, draw in ALONE.items()}


@pytest.mark.parametrize("name", PAGES)
def test_plots_are_tidy_and_fit_a_notebook(name):
    figure = PAGES[name]()
    figure = getattr(figure, "figure", None) or figure
    width, height = figure.get_size_inches() * figure.dpi
    assert figure.dpi == 100 and width <= 901 and height <= 1400
    assert_tidy(figure)


def test_plots_draw_into_axes_or_return_unheld_figures():
    for draw in ALONE.values():
        figure, axes = plt.subplots(1, 2)
        assert draw(ax=axes[1]) is axes[1] and axes[1].has_data() and not axes[0].has_data()
        plt.close(figure)
    assert isinstance(ALONE["lines"](), plt.Figure) and plt.get_fignums() == []


def test_filters_scales_each_tile_about_zero_in_reading_order():
    components = RNG.normal(size=(9, 4, 6, 3)) * np.logspace(-3, 3, 9)[:, None, None, None]
    components[4] = 0
    shares = np.linspace(0.2, 0.001, 9)
    ax = plot.filters(torch.tensor(components, requires_grad=True), shares, cols=4).axes[0]
    assert [text.get_text() for text in ax.texts][-2:] == ["2.6%", "0.10%"] and ax.get_aspect() == 1
    for text, component in zip(ax.texts, components, strict=True):
        shown = tile(ax, text.xy[0], text.xy[1] - 2, 4, 6)
        assert np.allclose(shown, 0.5 + 0.5 * component / (np.abs(component).max() or 1))
    xs, ys = np.transpose([text.xy for text in ax.texts])
    assert (np.diff(xs)[[0, 1, 2, 4, 5, 6]] > 6).all() and (ys[4:] > np.repeat(ys[:4], 2)[:5]).all()
    assert ax.get_title("left") == "RGB embedding filters (first 9 principal components)"


def test_filters_draws_untrained_ones_pale_in_the_last_line():
    components, untrained = RNG.normal(size=(2, 5, 4, 6, 3))
    ax = plot.filters(
        components, np.full(5, 0.2), cols=3, untrained=untrained, names={1: "stripes"}
    ).axes[0]
    *shares, words = [text.get_text() for text in ax.texts]
    assert (
        shares[:2] == ["20.0%", "stripes, 20.0%"] and len(shares) == 5 and "random weights" in words
    )
    x, y = ax.texts[-1].xy
    for column, component in enumerate(untrained[:3]):
        shown = tile(ax, ax.texts[column].xy[0], y - 2, 4, 6)
        assert np.allclose(shown, 0.45 + 0.55 * (0.5 + 0.5 * component / np.abs(component).max()))
    assert x == ax.texts[0].xy[0] - 3 and np.allclose(
        tile(ax, ax.texts[2].xy[0], ax.texts[3].xy[1] - 2, 4, 6), 1
    )


@pytest.mark.parametrize(("rows", "cols", "every"), [(3, 5, 1), (14, 20, 2), (40, 12, 5)])
def test_position_similarity_places_tiles_by_row_and_column(rows, cols, every):
    values = cosines(rows, cols)
    values[-1, -1, 1, 2] = np.nan
    ax = plot.position_similarity(values).axes[0]
    down, across = (
        range((rows - 1) % every // 2, rows, every),
        range((cols - 1) % every // 2, cols, every),
    )
    for y, row in zip(ax.get_yticks(), down, strict=True):
        for x, col in zip(ax.get_xticks(), across, strict=True):
            expected = mpl.colormaps["RdBu_r"]((values[row, col] + 1) / 2)
            expected[np.isnan(values[row, col])] = to_rgba("0.65")
            np.testing.assert_allclose(tile(ax, x, y, rows, cols), expected[..., :3], atol=0.01)
    words = {1: "", 2: " (every 2nd)", 5: " (every 5th)"}[every]
    assert (
        ax.get_xlabel() == f"Input patch column{words}"
        and ax.get_ylabel() == f"Input patch row{words}"
    )
    assert [t.get_text() for t in ax.get_xticklabels()] == [str(c) for c in across]
    assert [t.get_text() for t in ax.get_yticklabels()] == [str(r) for r in down]
    assert ax.child_axes[0].get_ylim() == (-1, 1)


@pytest.mark.parametrize(
    ("rows", "cols", "enlarged", "shown"), [(3, 5, (2, 1), (2, 1)), (14, 20, (3, 17), (2, 16))]
)
def test_position_similarity_enlarges_the_framed_tile(rows, cols, enlarged, shown):
    values = cosines(rows, cols)
    (ax,) = plot.position_similarity(values, enlarged=enlarged).axes
    mosaic, large = ax.images
    expected = mpl.colormaps["RdBu_r"]((values[shown] + 1) / 2)
    np.testing.assert_allclose(large.get_array(), expected, atol=0.01)
    x, y = ax.patches[0].get_center()
    np.testing.assert_allclose(tile(ax, x, y, rows, cols), expected[..., :3], atol=0.01)
    assert ax.texts[0].get_text() == f"Row {shown[0]}, column {shown[1]}"
    assert large.get_extent()[0] > mosaic.get_extent()[1] and ax.get_xlim() == (
        0,
        large.get_extent()[1],
    )


def test_all_heads_places_heads_by_layer_and_head():
    weights = attention(6, 4, 5).reshape(3, 2, 4, 5)
    weights[2, 1] /= weights[2, 1].max()
    (ax,) = plot.all_heads(weights, query=(3, 1)).axes
    xs, ys = ax.get_xticks(), ax.get_yticks()
    above, beside = (
        {tuple(np.round(segment.mean(0), 6)) for segment in ticks.get_segments()}
        for ticks in ax.collections
    )
    for layer, head in np.ndindex(3, 2):
        weight = weights[layer, head]
        expected = mpl.colormaps["viridis"](weight / weight.max())[..., :3]
        np.testing.assert_allclose(tile(ax, xs[layer], ys[head], 4, 5), expected, atol=0.01)
        assert any(np.isclose(x, xs[layer] - 1) and 0 < ys[head] - 2 - y < 0.5 for x, y in above)
        assert any(
            np.isclose(y, ys[head] + 1.5) and 0 < xs[layer] - 2.5 - x < 0.5 for x, y in beside
        )
        percent = ax.texts[3 * head + layer].get_text()
        assert abs(float(percent) - 100 * weight.max()) <= 0.5 and "e" not in percent
    assert [t.get_text() for t in ax.get_xticklabels()] == ["0", "1", "2"]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["head 0", "head 1"]


def test_all_heads_draws_maps_over_the_gray_image():
    weights = np.zeros((2, 1, 14, 20))
    weights[1, 0, 3, 17], weights[1, 0, 9, 2] = 0.4, 0.2
    (ax,) = plot.all_heads(weights, image=photo(), grid=CUT, framed=[(1, 0)], query=(5, 4)).axes
    xs, ys = ax.get_xticks(), ax.get_yticks()
    frame, fine = ax.patches[0], ax.patches[0].get_width() / 20
    assert frame.get_center() == pytest.approx(
        (xs[1], ys[0])
    ) and fine == frame.get_height() / 14 == round(fine)
    without, marked = (tile(ax, x, ys[0], 14 * int(fine), 20 * int(fine)) for x in xs)
    assert np.allclose(without[..., 0], without[..., 2]) and without.std() > 0.01, "a gray image"
    for row, col, share in ((3, 17, 1.0), (9, 2, 0.5)):
        place = tuple(slice(int(k * fine), int((k + 1) * fine)) for k in (row, col))
        color, alpha = np.array(mpl.colormaps["inferno"](share)[:3]), 0.92 * share**0.6
        assert np.allclose(marked[place], alpha * color + (1 - alpha) * without[place], atol=1e-6)
    assert np.isclose(marked, without).all(-1).sum() == (14 * 20 - 2) * int(fine) ** 2
    (left, _), _ = ax.collections[0].get_segments()[1]
    assert left == pytest.approx(frame.get_x() + 4.5 * fine)


def test_patches_cuts_and_numbers_in_reading_order():
    image, grid = photo(24, 40), TokenGrid(3, 5, (8, 8), prefix=2)
    left, right, below = book.patches(image, grid=grid).axes
    assert np.array_equal(left.images[0].get_array(), image)
    assert [t.get_text() for t in right.get_yticklabels()] == ["2", "7", "12"]
    assert [t.get_text() for t in below.get_xticklabels()] == [str(n) for n in range(17)]
    for number, x in enumerate(below.get_xticks()):
        row, col = divmod(number - 2, 5)
        expected = image[8 * row : 8 * row + 8, 8 * col : 8 * col + 8] if number >= 2 else 205
        assert (tile(below, x, 4, 8, 8) == expected).all()
    assert np.array_equal(tile(right, 4, right.get_yticks()[1], 8, 8), image[8:16, :8])
    *_, below = book.patches(photo(), grid=CUT).axes
    assert [t.get_text() for t in below.get_xticklabels()][-4:] == ["14", "…", "279", "280"]


def test_attention_distance_draws_every_head_of_every_layer():
    values = RNG.uniform(5, 100, (4, 12, 3))
    ax = plot.attention_distance(
        torch.tensor(values).bfloat16().double(), uniform=116.492, image_size=224, title="A"
    )
    line, drawn = ax.lines[-1], heads_of(ax)
    assert np.allclose(drawn[..., 1], torch.tensor(values).bfloat16().double().mean(0))
    assert (np.diff(drawn[..., 0]) > 0.1).all() and np.allclose(drawn[..., 0].mean(1), range(12)), (
        "side by side"
    )
    assert list(line.get_ydata()) == [116.492] * 2 and line.get_linestyle() == "--"
    (local,) = ax.patches
    assert local.get_y() == 0 and local.get_height() == pytest.approx(116.492 / 3)
    assert (
        ax.get_ylim()[0] == 0
        and ax.get_ylim()[1] > 116.5
        and ax.get_xlim()[0] < 0
        and ax.get_xlim()[1] > 11
    )
    assert list(ax.get_xticks()) == list(range(12)) and ax.get_title("left") == "A"
    assert ax.get_ylabel() == "Mean attention distance (pixels of 224 × 224)"


def test_attention_distances_share_one_scale():
    values = {"Trained": RNG.uniform(size=(4, 3)), "Untrained": 5 * np.ones((4, 3))}
    controls, uniform = {"Trained": np.ones((4, 3))}, {"Trained": 2, "Untrained": 3}
    figure = plot.attention_distances(values, uniform=uniform, controls=controls)
    assert [ax.get_title("left") for ax in figure.axes] == list(values)
    assert [ax.lines[-1].get_ydata()[0] for ax in figure.axes] == [2, 3]
    assert [ax.get_ylim() for ax in figure.axes] == [(0, 1.08 * 5)] * 2
    (crosses,) = [line for line in figure.axes[0].lines if line.get_marker() == "x"]
    assert np.array_equal(crosses.get_ydata(), np.ones(12))
    assert_tidy(figure)


def test_rollouts_pairs_each_image_with_its_map():
    pictures = [photo(230, 330), photo(224, 224), photo(300, 200), photo(64, 64)]
    grids = [
        CUT,
        TokenGrid(14, 14, (16, 16)),
        TokenGrid(18, 12, (16, 16), image=(300, 200)),
        TokenGrid(8, 8, (8, 8)),
    ]
    maps = [torch.rand(grid.rows, grid.cols) for grid in grids]
    figure = plot.rollouts(pictures, maps, grid=grids, captions=["d", "e", "f", "g"], style="mask")
    assert len(figure.axes) == 8
    figure.draw_without_rendering()
    for i, grid in enumerate(grids):
        left, right = figure.axes[2 * i : 2 * i + 2]
        assert np.array_equal(
            left.images[0].get_array(), pictures[i]
        ) and left.get_xlabel().startswith("defg"[i] + "\nAttention: black ")
        assert "stretched" in left.get_xlabel()
        expected = pictures[i] * plot.mask(maps[i], grid)[..., None]
        assert np.abs(np.asarray(right.images[0].get_array(), float) - expected).max() <= 0.5
        assert left.bbox.height == pytest.approx(figure.axes[i // 2 * 4].bbox.height, rel=0.05), (
            "a line has one height"
        )


def test_heads_draws_every_head_on_one_scale():
    weights = attention(12, 14, 20)
    figure = plot.heads(weights, image=photo(), query=(3, 17), grid=CUT)
    (ax,) = figure.axes
    whole, *images = ax.images
    grays, maps = images[::2], images[1::2]
    assert np.array_equal(whole.get_array(), photo()) and len(maps) == 12
    for gray, image in zip(grays, maps, strict=True):
        assert gray.get_extent() == image.get_extent() and gray.get_array().shape == (224, 320)
        assert image.cmap(0.0)[3] == 0 and image.cmap(1.0)[3] == pytest.approx(0.92)
        assert image.cmap(0.5)[3] == pytest.approx(0.92 * 0.5**0.6, abs=0.01)
    names = {text.get_text(): text.xy for text in ax.texts}
    frames = [patch for patch in ax.patches if isinstance(patch, Rectangle)]
    for head, (image, frame) in enumerate(zip(maps, frames[1:], strict=True)):
        left, right, bottom, top = image.get_extent()
        assert np.array_equal(image.get_array(), weights[head]) and image.get_clim() == (
            0,
            weights.max(),
        )
        assert (right - left, bottom - top) == pytest.approx((320, 224))
        assert names[f"Head {head}"] == pytest.approx((left, top))
        assert (frame.get_x() - left, frame.get_y() - top) == pytest.approx((17 * 16, 3 * 16))
        assert (frame.get_width(), frame.get_height()) == (16, 16)
    _, right, bottom, _ = whole.get_extent()
    patch = frames[0].get_x() / right * 330, frames[0].get_y() / bottom * 230
    assert patch == pytest.approx((17 * 16, 3 * 16)) and maps[-1].get_extent()[2] == pytest.approx(
        bottom * 224 / 230
    )
    assert "from patch (row 3, column 17)" in ax.get_title("left")
    assert ax.child_axes[0].get_ylim() == (0, weights.max())


def test_heads_draws_named_maps_on_scales_of_their_own():
    weights = attention(3, 4, 5)
    (ax,) = plot.heads(weights, shared=False, names=["a", "b", "c"]).axes
    assert [image.get_clim()[1] for image in ax.images] == [
        each.max() for each in weights
    ] and not ax.child_axes
    words = [text.get_text() for text in ax.texts]
    assert words[::2] == ["a", "b", "c"]
    assert words[1::2] == [f"largest {100 * each.max():.3g} %" for each in weights]


def test_tiles_have_separate_scales():
    small, large = np.linspace(-0.002, 0.001, 12).reshape(3, 4), np.linspace(0, 7, 6).reshape(2, 3)
    figure = plot.tiles({"small": small, "large": torch.from_numpy(large)})
    images = [ax.images[0] for ax in figure.axes if ax.images]
    np.testing.assert_array_equal(images[0].get_array(), small)
    np.testing.assert_array_equal(images[1].get_array(), large)
    assert [(image.cmap.name, image.get_clim()) for image in images] == [
        ("RdBu_r", (-0.002, 0.002)),
        ("viridis", (0, 7)),
    ]
    assert [ax.get_title("left") for ax in figure.axes if ax.images] == ["small", "large"]
    labels = [
        [tick.get_text() for tick in ax.get_xticklabels()] for ax in figure.axes if not ax.images
    ]
    assert labels == [["−0.002", "0", "0.002"], ["0", "7"]]
    assert plot.tiles({"large": large}, signed=True).axes[0].images[0].get_clim() == (-7, 7)


def test_tiles_writes_values_of_labeled_matrices():
    figure = plot.tiles(
        {"A": np.array([[0.25, -1], [0, 1]]), "B": np.eye(2)}, labels=["cat", "sky"]
    )
    assert [[text.get_text() for text in ax.texts] for ax in figure.axes] == [
        ["0.25", "−1", "0", "1"],
        [*"1001"],
    ]
    assert [text.get_position() for text in figure.axes[0].texts] == [
        (0, 0),
        (1, 0),
        (0, 1),
        (1, 1),
    ], "column, row"
    assert [[tick.get_text() for tick in ax.get_xticklabels()] for ax in figure.axes] == 2 * [
        ["cat", "sky"]
    ]
    assert [tick.get_text() for tick in figure.axes[0].get_yticklabels()] == ["cat", "sky"]


def test_overlays_draws_maps_over_one_image():
    maps = {
        "one": attention(1, 14, 20)[0],
        "two": RNG.normal(size=(14, 20)),
        "paint": RNG.uniform(size=(14, 20, 3)),
    }
    figure = plot.overlays(
        photo(), maps, grid=CUT, query=(3, 17), limits={"two": (1, 9)}, smooth=False, note="A"
    )
    beside, one, two, paint = [ax for ax in figure.axes if ax.images]
    assert np.array_equal(beside.images[0].get_array(), photo())
    for ax, values in zip((one, two, paint), maps.values(), strict=True):
        heat = ax.images[1]
        assert np.allclose(heat.get_array(), values.repeat(16, 0).repeat(16, 1))
        assert heat.get_extent() == [0, 320, 224, 0]
    assert one.images[1].get_clim() == (0, maps["one"].max()) and two.images[1].get_clim() == (1, 9)
    assert [ax.get_title("left") for ax in (beside, one, two, paint)] == ["Input", *maps]
    assert [text.get_text() for text in figure.texts] == ["A"]
    bars = [ax for ax in figure.axes if not ax.images and ax.get_visible()]
    labels = [[tick.get_text() for tick in ax.get_xticklabels()] for ax in bars]
    assert labels == [["0", f"{maps['one'].max():.2g}"], ["1", "9"]], "colors have no bar"
    for ax in (beside, one, two, paint):
        (frame,) = [patch for patch in ax.patches if isinstance(patch, Rectangle)]
        assert (*frame.get_xy(), frame.get_width(), frame.get_height()) == (17 * 16, 3 * 16, 16, 16)
    figure = plot.overlays(photo(), maps, grid=CUT, query={"one": (0, 1), "paint": (2, 3)})
    frames = [[frame.get_xy() for frame in ax.patches] for ax in figure.axes if ax.images]
    assert frames == [[], [(16, 0)], [], [(48, 32)]], "each map has its own"


def test_attributions_draws_every_map_with_its_caption():
    maps = {
        "first": RNG.uniform(size=(14, 20)),
        "second": RNG.normal(size=(14, 20)),
        "third": np.zeros((14, 20)),
    }
    maps["first"][3, 4], maps["second"][5, 6] = 12.34, -50_000
    captions = {"first": "rank 1\ndeletion 0.1", "third": "rank 3"}
    figure = plot.attributions(
        photo(), maps, grid=CUT, title="Why?", captions=captions, note="A\nB", cols=3
    )
    assert [ax.get_subplotspec().rowspan.start for ax in figure.axes] == [0, 0, 0, 1]
    scale = "Colors: each map has its own scale, from 0 (clear) to its max (yellow)"
    signed = ", or from −max (blue) to max (red) where some values are negative."
    assert [ax.get_title("left") for ax in figure.axes] == ["Input", *maps]
    below = [text.get_text() for ax in figure.axes for text in ax.texts]
    times = f"{maps['first'].max() / maps['first'].mean():.3g}\xa0×\xa0mean"
    assert below == [f"max 12.3, {times}\nrank 1\ndeletion 0.1", "±5e+04", "max 0\nrank 3"]
    assert [text.get_text() for text in figure.texts] == ["Why?", f"A\nB\n{scale}{signed}"]
    alone = plot.attributions(photo(), {"first": 1e-5 * maps["first"]}, grid=CUT, title="")
    assert (
        alone.axes[1].texts[0].get_text() == f"max 0.000123, {times}"
        and alone.texts[-1].get_text() == f"{scale}."
    )
    shown = [ax.images[-1] for ax in figure.axes]
    assert len(shown) == 4 and shown[2].get_clim() == (-50_000, 50_000)
    expected = plot.overlay(photo(), maps["first"], grid=CUT, style="heat").images[1]
    assert np.array_equal(shown[1].get_array(), expected.get_array())


def test_attributions_draws_the_compared_images():
    pair = [("samoyed.jpg", photo(30, 40)), ("horses.jpg", photo(40, 30))]
    title = (
        "Why is this image less similar to samoyed.jpg than to horses.jpg? The cosines differ by 0.00263. "
        * 2
    )
    figure = plot.attributions(
        photo(), {"a": np.ones((14, 20))}, grid=CUT, title=title, compared=pair
    )
    shown = figure.axes[0].child_axes
    assert [ax.texts[0].get_text() for ax in shown] == ["samoyed.jpg", "horses.jpg"]
    assert all(
        np.array_equal(ax.images[0].get_array(), image)
        for ax, (_, image) in zip(shown, pair, strict=True)
    )
    assert_tidy(figure)


@pytest.mark.parametrize("shared", [True, False])
def test_gallery_has_a_row_for_each_name(shared):
    rows = {"picture": [photo(8, 8), photo(8, 8)], "map": [np.eye(4), 120 * np.eye(4)]}
    rows |= {"difference": [np.eye(4), -2 * np.eye(4)]}
    axes = plot.gallery(
        rows, titles=["left", "right"], captions={"map": ["1", "120"]}, shared=shared
    ).axes
    for ax, image in zip(axes, sum(rows.values(), []), strict=False):
        assert np.array_equal(ax.images[0].get_array(), image)
    assert [ax.get_title("left") for ax in axes[:6]] == ["left", "right", "", "", "", ""]
    assert [ax.get_ylabel() for ax in axes[:6]] == ["picture", "", "map", "", "difference", ""]
    texts = ["", "", "1", "120", "", ""]
    if not shared:
        times = ", 4\xa0×\xa0mean"
        texts = ["", "", f"1\nmax 1{times}", f"120\nmax 120{times}", f"max 1{times}", "±2"]
    assert ["".join(text.get_text() for text in ax.texts) for ax in axes[:6]] == texts
    limits = (
        [(0, 120), (0, 120), (-2, 2), (-2, 2)] if shared else [(0, 1), (0, 120), (0, 1), (-2, 2)]
    )
    assert [ax.images[0].get_clim() for ax in axes[2:6]] == limits
    bars = [[tick.get_text() for tick in ax.get_yticklabels()] for ax in axes[6:]]
    assert sorted(bars) == ([["0", "120"], ["−2", "0", "2"]] if shared else [])


def test_gallery_circles_patches():
    patches = np.zeros((4, 2), dtype=bool)
    patches[3, 1] = True
    rows = {"image": [photo(80, 40)] * 2, "map": [np.eye(4)] * 2}
    axes = plot.gallery(rows, circles={"image": torch.tensor(np.stack([patches, ~patches]))}).axes
    assert [len(ax.patches) for ax in axes[:4]] == [1, 7, 0, 0]
    assert tuple(axes[0].patches[0].center) == (29.5, 69.5) and axes[0].patches[0].radius == 15
    both = {"circles": {"image": [patches, patches]}, "dashed": {"image": [patches, ~patches]}}
    ring, outer = plot.gallery(rows, **both).axes[0].patches
    assert outer.center == ring.center and outer.radius == 22
    assert (ring.get_linestyle(), outer.get_linestyle()) == ("-", "--")


def test_gallery_draws_maps_over_the_image_of_their_column():
    images, maps = [photo(), 255 - photo()], [RNG.uniform(size=(14, 20)), RNG.normal(size=(14, 20))]
    figure = plot.gallery(
        {"photo": images, "map": maps}, over=images, grid=CUT, captions={"map": ["1", "2"]}, size=14
    )
    for ax, image, values in zip(figure.axes[2:], images, maps, strict=True):
        expected = plot.overlay(image, values, grid=CUT, colorbar=False)
        for drawn, other in zip(ax.images, expected.images, strict=True):
            assert (
                np.array_equal(drawn.get_array(), other.get_array())
                and drawn.get_clim() == other.get_clim()
            )
    plt.close("all")
    below = [text for ax in figure.axes[2:] for text in ax.texts]
    first, second = (text.get_text() for text in below)
    assert first.startswith("1\nmax ") and first.endswith("× mean".replace(" ", "\xa0"))
    assert second == f"2\n±{np.abs(maps[1]).max():.3g}"
    assert [text.get_size() for text in below] == [14, 14]
    assert [ax.get_ylabel() for ax in figure.axes] == ["photo", "", "map", ""]
    assert_tidy(figure)


def test_lines_names_curves_at_their_ends():
    table = pd.DataFrame(
        {"a": [5.0, 4, np.nan], "b": [5.0, 4, 4], "c": 0.0, "d": 0.0, "e": 9.0, "high": [5.0, 8, 9]}
    )
    ax = plot.lines(table).axes[0]
    labels, colors = {text.get_text(): text for text in ax.texts}, plot.style.SERIES
    assert [labels[name].get_color() for name in table] == list(colors[:6])
    high = (ax.transData + ax.transAxes.inverted()).transform((2, 9))[1]
    assert max(text.xy for text in labels.values()) == (1, pytest.approx(high, abs=1e-6))
    boxes = sorted((text.get_window_extent() for text in labels.values()), key=lambda box: box.y0)
    assert all(low.y1 <= next.y0 + 2 for low, next in zip(boxes, boxes[1:], strict=False)), (
        "no label on another"
    )
    assert boxes[0].y0 > ax.bbox.y0 - 8 and boxes[0].x0 > ax.bbox.x1


def test_lines_draws_the_columns_of_a_table():
    ax = plot.lines(CURVES, dotted=CURVES.rename(columns={"two": "three"}), level=7, log="xy").axes[
        0
    ]
    one, two, again, three, level = ax.lines
    for line, column in zip((one, two, again, three), ("one", "two") * 2, strict=True):
        assert np.array_equal(line.get_xydata(), np.c_[CURVES.index, CURVES[column]])
    assert [line.get_linestyle() for line in ax.lines] == [
        "-",
        "-",
        ":",
        ":",
        "--",
    ] and level.get_ydata()[0] == 7
    assert (
        [one.get_color(), two.get_color()]
        == [again.get_color(), three.get_color()]
        == list(plot.style.SERIES[:2])
    )
    assert not ax.get_legend() and {text.get_text() for text in ax.texts} == {"one", "two", "three"}
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log") and list(ax.get_xticks()) == list(
        CURVES.index
    )
    shaded = plot.lines(CURVES, bands=(CURVES - 2, CURVES + 1)).axes[0].collections
    for band, color, column in zip(shaded, plot.style.SERIES, CURVES, strict=False):
        corners = {tuple(corner) for corner in band.get_paths()[0].vertices}
        assert corners == {(x, y + end) for x, y in CURVES[column].items() for end in (-2, 1)}
        assert np.allclose(band.get_facecolor(), to_rgba(color, 0.25))
    assert len(shaded) == len(CURVES.columns)


def test_intervals_keeps_the_order_and_draws_measurements():
    values, errors = pd.Series({"b": 3.0, "a": 1.0, "c": 2.0}), {"a": 0.25, "b": 0.5, "c": 1.0}
    points = pd.Series({"b": [2, 4], "c": [2]})
    ax = plot.intervals(values, errors, points=points, level=0, xlabel="Accuracy (%)").axes[0]
    assert [label.get_text() for label in ax.get_yticklabels()] == [
        "b",
        "a",
        "c",
    ] and ax.yaxis_inverted()
    (bars,) = [each for each in ax.collections if isinstance(each, LineCollection)]
    ends = [(line[0, 0], line[1, 0]) for line in bars.get_segments()]
    assert ends == [(2.5, 3.5), (0.75, 1.25), (1.0, 3.0)]
    single = [
        dot for each in ax.collections if each is not bars for dot in each.get_offsets().tolist()
    ]
    assert sorted(single) == [[2, 0], [2, 2], [4, 0]]
    (bars,) = plot.intervals({"a": 4.0}, {"a": (1.0, 2.5)}).axes[0].collections
    assert bars.get_segments()[0][:, 0].tolist() == [3.0, 6.5]


def test_correspondences_joins_the_centers_of_patches():
    grids = [TokenGrid(2, 4, (10, 20)), TokenGrid(3, 3, (8, 8))]
    figure = plot.correspondences([photo(20, 80), photo(24, 24)], [[5, 8], [0, 1]], grids=grids)
    left, right = (image.get_extent()[:2] for image in figure.axes[0].images)
    for line, expected in zip(
        figure.axes[0].lines[::2], [((30, 15), (20, 20)), ((10, 5), (12, 4))], strict=True
    ):
        (x, y), (other_x, other_y) = line.get_xydata()
        assert np.allclose(((x - left[0]) * 20, y * 20), expected[0])
        assert np.allclose(((other_x - right[0]) * 24, other_y * 24), expected[1])
    assert left[1] == 4 and right[1] - right[0] == 1 and right[0] > 4


REFUSED = [
    (lambda: plot.position_similarity(np.ones((14, 20, 20, 14))), r"\(14, 20, 20, 14\)"),
    (lambda: plot.position_similarity(5 * np.ones((2, 2, 2, 2))), "up to 5"),
    (lambda: plot.attention_distance(np.ones(12)), r"\(12,\)"),
    (lambda: plot.mask(np.ones((20, 14)), CUT), "14 × 20 patches, the map 20 × 14"),
    (lambda: plot.mask(np.full((14, 20), np.nan), CUT), "finite"),
    (lambda: plot.overlay(photo(224, 224), np.ones((14, 20)), grid=CUT), "230 × 330 .* 224 × 224"),
    (lambda: plot.overlay(photo(), np.ones((14, 20)), style="jet"), "jet"),
    (lambda: plot.overlay(photo(), np.full((14, 20), np.nan), grid=CUT), "smooth=False"),
    (lambda: plot.overlay(photo(), 2 * np.ones((14, 20, 3)), style="heat"), "from 2 to 2"),
    (lambda: book.patches(photo(224, 224), grid=CUT), "230 × 330 .* 224 × 224"),
    (lambda: plot.overlays(photo(), {"a": np.ones((4, 4))}, grid=CUT), "14 × 20 patches"),
    (lambda: plot.correspondences([photo()] * 2, [[280, 0]], grids=[CUT] * 2), "below 280"),
    (
        lambda: plot.overlay(photo(224, 224), np.ones((14, 14))),
        "part of this image of 224 × 224 .*`model=`.*restore",
    ),
    (
        lambda: plot.overlay(ModelInput(photo()[None])[0, 9:], np.ones((14, 20))),
        "part of this image of 221 × 330",
    ),
    (lambda: plot.heads(attention(3, 14, 20), image=photo()), "vitlens.restore"),
    (lambda: plot.heads(attention(3, 14, 20), query=(14, 0)), "outside the 14 × 20 grid"),
    (
        lambda: plot.overlays(photo(), {"a": np.ones((14, 20))}, grid=CUT, query={"a": (0, 20)}),
        "outside the 14",
    ),
    (
        lambda: plot.all_heads(attention(6, 4, 5).reshape(3, 2, 4, 5), query=(4, 0)),
        "outside the 4 × 5 grid",
    ),
    *(
        (
            lambda crop=crop: plot.overlay(photo(100, 200), np.zeros((4, 4)), crop=crop),
            "crop must .* 200 × 100",
        )
        for crop in ((0, 0, 0, 0), (200, 0, 300, 100), (50, 80, 150, 20))
    ),
]


@pytest.mark.parametrize("draw, words", REFUSED)
def test_plots_refuse_wrong_arrays(draw, words):
    refuses(words, draw, error=(ValueError, IndexError))


def maps_of_every_function(cmap):
    """Figures of all plot functions that take a color map, of maps without negative values."""
    image, grid = np.zeros((8, 8, 3), np.uint8), TokenGrid(2, 2, (4, 4), image=(8, 8))
    values = np.arange(4.0).reshape(2, 2)
    both = values - 2
    figures = {
        "overlay": plot.overlay(image, values, grid=grid, cmap=cmap).figure,
        "rollouts": plot.rollouts([image], [values], grid=grid, cmap=cmap),
        "tiles": plot.tiles({"a": values, "signed": both}, cmap=cmap),
        "overlays": plot.overlays(image, {"a": values, "signed": both}, grid=grid, cmap=cmap),
        "attributions": plot.attributions(
            image, {"a": values, "signed": both}, grid=grid, title="", cmap=cmap
        ),
        "gallery": plot.gallery({"a": [values], "signed": [both]}, cmap=cmap),
        "heads": plot.heads(values[None], cmap=cmap),
        "contributions": plot.contributions({"a": both}, cmap=cmap),
    }
    plt.close("all")
    return figures


@pytest.mark.parametrize("cmap", ["magma", ListedColormap(["k", "r"], "mine")])
def test_maps_take_a_color_map_and_signed_ones_stay_red_and_blue(cmap):
    name = cmap if isinstance(cmap, str) else cmap.name
    for function, figure in maps_of_every_function(cmap).items():
        used = [
            image.get_cmap().name
            for image in figure.findobj(AxesImage)
            if image.get_array().ndim == 2 and image.get_cmap().name != "gray"
        ]
        assert used[0] == name, function
        assert used[1:] in ([], ["RdBu_r"]), function


def test_unknown_color_maps_are_refused_with_similar_names():
    refuses("Did you mean viridis", plot.tiles, {"a": np.eye(2)}, cmap="viridi")
    refuses("Did you mean magma", plot.tiles, {"a": -np.eye(2)}, cmap="magmma")


def drawn_in_dark_axes():
    """Axes of all functions that take `ax`, by their name, in a dark style."""
    distances = np.linspace(5, 90, 24).reshape(6, 4)
    similarity = np.linspace(-1, 1, 16).reshape(2, 2, 2, 2)
    table = pd.DataFrame({"a": [1.0, 2.0], "b": [2.0, 1.0]}, index=[1, 2])
    grid = TokenGrid(2, 2, (4, 4), image=(8, 8))
    image = np.zeros((8, 8, 3), np.uint8)
    functions = {
        "distance": partial(plot.attention_distance, distances, uniform=80.0, control=distances),
        "filters": partial(
            plot.filters,
            np.ones((3, 2, 2, 3)),
            [0.5, 0.3, 0.1],
            cols=2,
            untrained=np.ones((3, 2, 2, 3)),
        ),
        "positions": partial(plot.position_similarity, similarity),
        "enlarged": partial(plot.position_similarity, similarity, enlarged=(0, 1)),
        "lines": partial(plot.lines, table, level=1.5),
        "intervals": partial(
            plot.intervals, {"a": 1.0}, {"a": 0.5}, points={"a": [1.0]}, level=1.0
        ),
        "heads": partial(plot.heads, np.ones((2, 2, 2)), shared=False),
        "all heads": partial(plot.all_heads, np.ones((2, 2, 2, 2)), query=(0, 1)),
        "overlay": partial(plot.overlay, image, np.eye(2), grid=grid, colorbar=False),
        "correspondences": partial(
            plot.correspondences, [image] * 2, [[0, 1]], grids=[grid] * 2, note="note"
        ),
        "contributions": partial(plot.contributions, {"a": np.eye(3)}),
    }
    with plt.style.context("dark_background"), plt.rc_context({"font.size": 8}):
        for name, draw in functions.items():
            figure = plt.figure(figsize=(3.3, 2.4), layout="constrained")
            ax = draw(ax=figure.subplots())
            figure.draw_without_rendering()
            yield name, ax
            plt.close(figure)


def test_plots_follow_dark_axes():
    for name, ax in drawn_in_dark_axes():
        for text in ax.figure.findobj(Text):
            if text.get_text().strip() and text.get_visible():
                color = to_rgb(text.get_color())
                assert np.mean(color) > 0.3, (name, text.get_text())
            patch = text.get_bbox_patch()
            if patch is not None:
                assert np.mean(patch.get_facecolor()[:3]) < 0.2, name
        for patch in ax.patches:
            if patch.get_fill():
                assert np.mean(patch.get_facecolor()[:3]) < 0.2, name
        for line in ax.xaxis.get_gridlines() + ax.yaxis.get_gridlines():
            if line.get_visible():
                assert np.mean(to_rgb(line.get_color())) < 0.3, name
        if name in ("filters", "positions", "all heads"):
            pixels = np.asarray(ax.images[0].get_array(), float)
            assert (pixels == 0).all(-1).any(), f"{name}: gaps have the color of the axes"


def test_attention_distance_fits_small_axes():
    distances = np.linspace(5, 90, 12 * 6).reshape(12, 6)
    with plt.rc_context({"font.family": "serif", "font.size": 8}):
        figure, ax = plt.subplots(figsize=(3.3, 2.2), layout="constrained")
        plot.attention_distance(distances, uniform=80.0, ax=ax)
        figure.draw_without_rendering()
        small = ax.lines[0].get_markersize()
        assert small < 4.5
        for text in figure.findobj(Text):
            if text.get_text() and text.get_visible():
                box = text.get_window_extent()
                assert box.x0 >= -1 and box.y0 >= -1 and box.x1 <= figure.bbox.x1 + 1
        plt.close(figure)
    with plt.rc_context({"lines.markersize": 2}):
        assert plot.attention_distance(distances).lines[0].get_markersize() == 6
        figure, ax = plt.subplots()
        assert plot.attention_distance(distances, ax=ax).lines[0].get_markersize() == 2
    plt.close("all")


def test_attention_distances_names_the_source_of_uniform():
    panels = {"a": np.ones((2, 2)), "b": np.ones((2, 2))}
    with pytest.raises(TypeError, match=r"attn.grid.uniform_distance\(\)"):
        plot.attention_distances(panels)
    refuses("lacks 'b'", plot.attention_distances, panels, uniform={"a": 1.0})


def test_plots_name_the_call_that_gives_their_arrays():
    options = {"img_size": 32, "depth": 1, "num_classes": 3}
    vit = timm.create_model("vit_tiny_patch16_224", **options).eval()
    images = torch.zeros(1, 3, 32, 32)
    with capture(vit) as attn:
        vit(images)
    summary = summarize(attn)
    for given, kind in ((attn, "Attention"), (vit, "VisionTransformer"), (summary, "Summary")):
        for draw, call in (
            (plot.attention_distance, "vitlens.attention.mean_distance(attn)"),
            (plot.filters, "vitlens.filters.principal(model)"),
            (plot.position_similarity, "vitlens.positions.similarity(model)"),
            (plot.heads, "attn.grid.image_map"),
            (plot.all_heads, "attn.grid.image_map"),
            (partial(plot.overlay, np.zeros((32, 32, 3), np.uint8)), "vitlens.attention.rollout"),
        ):
            refuses(rf"got {kind}. Give an array, such as .*{re.escape(call)}", draw, given)
