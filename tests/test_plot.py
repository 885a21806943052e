"""Figures are tested by their artists (data, colors, limits, words, boxes), and maps by closed forms, not by pixels."""

import base64
import io
import re
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
import timm
import torch
from support import refuses

mpl.use("Agg")

import architecture
import book
import matplotlib.pyplot as plt
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgba
from matplotlib.patches import Rectangle
from PIL import Image, ImageFilter, ImageFont
from support import RNG, assert_tidy, cosines, heads_of, history, snapshots, tile
from timm.models.vision_transformer import ParallelScalingBlock
from torch import nn
from torchvision.transforms import v2

import vitlens_paper as paper
from vitlens import plot
from vitlens.images import ImageError, ModelInput
from vitlens.models import crop_box, preprocess, restore
from vitlens.plot.painting import is_input, paint
from vitlens.recorder.grid import TokenGrid
from vitlens.recorder.supported.card import write_card
from vitlens.report import Inspection, Picture

CUT = TokenGrid(14, 20, (16, 16), image=(230, 330))
PADDED = TokenGrid(15, 21, (16, 16), image=(230, 330))


def photo(height=230, width=330):
    return np.random.default_rng(1).integers(1, 256, (height, width, 3), dtype=np.uint8)


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


def test_upsample_nearest_is_a_kronecker_product_and_keeps_constants():
    values = RNG.normal(size=(14, 20))
    large = plot.upsample(values, (224, 320), method="nearest")
    assert np.array_equal(large, np.kron(values, np.ones((16, 16))).astype(np.float32))
    for method in ("nearest", "bilinear", "bicubic", "lanczos"):
        large = plot.upsample(torch.full((14, 20), 1 / 280), (230, 330), method=method)
        assert (
            large.shape == (230, 330)
            and large.dtype == np.float32
            and np.allclose(large, 1 / 280, rtol=1e-5)
        )


def test_upsample_bilinear_is_exact_on_a_ramp():
    ramp = np.add.outer(2.0 * np.arange(6), 3.0 * np.arange(8))
    large = plot.upsample(ramp, (60, 80), method="bilinear")
    y, x = np.meshgrid(
        (np.arange(60) + 0.5) / 10 - 0.5, (np.arange(80) + 0.5) / 10 - 0.5, indexing="ij"
    )
    assert np.allclose(large[5:-5, 5:-5], (2 * y + 3 * x)[5:-5, 5:-5], atol=1e-4)


def test_mask_agrees_with_the_authors_8_bit_rendering():
    values = np.random.default_rng(2).uniform(size=(14, 20)) ** 3
    grid = TokenGrid(14, 20, (16, 16))
    shown = plot.mask(values, grid)
    assert shown.shape == (224, 320) and shown.min() == 0 and shown.max() == 1
    assert np.allclose(shown, plot.mask(1000 * values, grid), atol=1e-5)
    levels = Image.fromarray((values / values.max() * 255).astype(np.float32))
    large = levels.resize((320, 224), Image.Resampling.LANCZOS).convert("L")
    blurred = np.asarray(large.filter(ImageFilter.GaussianBlur(16)), dtype=float)
    theirs = (blurred - blurred.min()) / np.ptp(
        blurred
    )  # Pillow's Gaussian is three box blurs, rougher at the edges
    assert (
        np.abs(shown - theirs).mean() < 0.03
        and np.corrcoef(shown.ravel(), theirs.ravel())[0, 1] > 0.99
    )


def test_mask_places_a_bright_patch():
    for row, col in ((0, 0), (3, 17), (13, 5)):
        values = np.zeros((14, 20))
        values[row, col] = 1
        exact = plot.mask(values, CUT, smooth=False)
        assert (
            exact[16 * row : 16 * row + 16, 16 * col : 16 * col + 16].min() == 1
            and exact.sum() == 256
        )
        smooth = plot.mask(values, CUT)
        y, x = np.unravel_index(smooth.argmax(), smooth.shape)
        assert abs(y - 16 * row - 8) <= 8 and abs(x - 16 * col - 8) <= 8


def test_mask_leaves_cut_borders_black_and_padding_out():
    few, many = RNG.uniform(size=(14, 20)), RNG.uniform(size=(15, 21))
    for smooth in (True, False):
        cut = plot.mask(few, CUT, smooth=smooth)
        assert cut.shape == (230, 330) and not cut[224:].any() and not cut[:, 320:].any()
        assert np.array_equal(
            cut[:224, :320], plot.mask(few, TokenGrid(14, 20, (16, 16)), smooth=smooth)
        )
        padded = plot.mask(many, PADDED, smooth=smooth)
        whole = plot.mask(many, TokenGrid(15, 21, (16, 16)), smooth=smooth)
        assert padded.shape == (230, 330) and (padded.min(), padded.max()) == (0, 1)
        assert np.corrcoef(padded.ravel(), whole[:230, :330].ravel())[0, 1] == pytest.approx(1)


def test_mask_of_a_constant_map_is_one_or_zero():
    for level in (1 / 280, 7.0):
        cut = plot.mask(np.full((14, 20), level) * (1 + 1e-8 * RNG.normal(size=(14, 20))), CUT)
        assert (cut[:224, :320] == 1).all() and not cut[224:].any() and not cut[:, 320:].any()
    for level in (0.0, -7.0):
        assert not plot.mask(np.full((14, 20), level), CUT).any()


def test_overlay_mask_is_the_image_times_the_mask():
    image, values = photo(), RNG.uniform(size=(14, 20))
    for smooth in (True, False):
        ax = plot.overlay(Image.fromarray(image), values, grid=CUT, smooth=smooth, style="mask")
        (shown,) = ax.images
        expected = image * plot.mask(values, CUT, smooth=smooth)[..., None]
        assert np.abs(np.asarray(shown.get_array(), float) - expected).max() <= 0.5
        assert (
            shown.get_extent() == [0, 330, 230, 0]
            and ax.get_xlim() == (0, 330)
            and ax.get_ylim() == (230, 0)
        )


def test_overlay_heat_draws_the_values_on_the_patches():
    values = RNG.uniform(1, 2, size=(14, 20))
    ax = plot.overlay(photo(), values, grid=CUT, style="heat", smooth=False, alpha=0.4)
    below, heat = ax.images
    assert np.asarray(below.get_array()).shape == (230, 330)  # in gray
    assert np.allclose(
        heat.get_array(), np.kron(values, np.ones((16, 16)))
    ) and heat.get_extent() == [0, 320, 224, 0]
    assert heat.cmap.name == "viridis" and heat.get_clim() == (0, values.max())
    bar = ax.figure.axes[1]
    assert bar.get_ylim() == pytest.approx((0, values.max()))
    limited = plot.overlay(photo(), values, grid=CUT, style="heat", limits=(-1, 3)).images[1]
    assert limited.get_clim() == (-1, 3) and limited.cmap.name == "viridis"
    even = plot.overlay(photo(), values, grid=CUT, style="heat", limits=(-3, 3)).images[1]
    assert even.get_clim() == (-3, 3) and even.cmap.name == "RdBu_r"
    ax = plot.overlay(
        photo(), RNG.uniform(size=(15, 21)), grid=PADDED, style="heat", colorbar=False
    )
    assert ax.images[1].get_extent() == [0, 330, 230, 0] and len(ax.figure.axes) == 1
    assert ax.get_xlim() == (0, 330) and ax.get_ylim() == (230, 0)
    values = RNG.normal(size=(14, 20))
    smooth = plot.overlay(photo(), values, grid=CUT, style="heat").images[1]
    assert smooth.cmap.name == "RdBu_r" and smooth.get_clim() == pytest.approx(
        (-(high := abs(values).max()), high)
    )
    assert np.abs(smooth.get_array()).max() <= high + 1e-6  # no value outside the color scale


SIGNED = RNG.normal(size=(14, 20))
OVER = {  # values, options, and the share of the largest opacity that each value has
    "positive": (SIGNED**2, {}, lambda v: v / v.max()),
    "signed": (SIGNED, {}, lambda v: (np.abs(v) / np.abs(v).max()).clip(1 / 3)),
    "negative": (
        -(SIGNED**2),
        {"cmap": "viridis"},
        lambda v: (np.abs(v) / np.abs(v).max()).clip(1 / 3),
    ),
    "limits about 0": (
        SIGNED,
        {"limits": (-1, 3)},
        lambda v: (np.abs(v.clip(-1, 3)) / 3).clip(1 / 3),
    ),
    "limits above 0": (SIGNED, {"limits": (1, 2)}, lambda v: v.clip(1, 2) - 1),
    "limits below 0": (SIGNED, {"limits": (-2, -1)}, lambda v: -1 - v.clip(-2, -1)),
    "faint": (SIGNED**2, {"alpha": 0.2}, lambda v: v / v.max()),
    "even": (SIGNED, {"opacity": "even"}, np.ones_like),
    "constant": (np.full((14, 20), 0.005), {}, np.ones_like),
    "nothing": (np.zeros((14, 20)), {}, np.zeros_like),
    "colors": (RNG.uniform(size=(14, 20, 3)), {}, lambda v: np.ones((14, 20))),
}


TRANSFORMS = {
    "crop": {"crop_pct": 0.8},
    "squash": {"crop_mode": "squash"},
    "padding": {"crop_mode": "border"},
    "not square": {"input_size": (3, 32, 64), "crop_pct": 0.9},
    "gray": {"input_size": (1, 64, 64), "crop_pct": 0.9},
    "padding of another library": v2.Compose(
        [
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Resize(None, max_size=64),
            v2.Pad((0, 8)),
            v2.CenterCrop(64),
        ]
    ),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("size", [(640, 400), (300, 620)])
def test_overlay_places_the_map_on_the_crop_of_the_model(name, size):
    """The map is one bright square of the image, and its hottest patch is on the square."""
    settings, (width, height) = TRANSFORMS[name], size
    model = nn.Module()
    if isinstance(settings, dict):
        model.pretrained_cfg = {"input_size": (3, 64, 64), "crop_pct": 1.0} | settings
    else:
        write_card(model, transform=settings)
    x, y = width // 2 + 40, height // 2 - 60  # the upper left corner of the square
    image = np.zeros((height, width, 3), np.uint8)
    image[y : y + 60, x : x + 60] = 255
    batch = preprocess(model, image)
    grid = TokenGrid(batch.shape[2] // 4, batch.shape[3] // 4, (4, 4))
    values = nn.functional.avg_pool2d(batch.mean(1, keepdim=True), 4)[0, 0]
    below, heat = plot.overlay(
        image, (values - values.min()).numpy(), model=model, grid=grid, smooth=False
    ).images
    left, right, bottom, top = heat.get_extent()
    hot = heat.get_array() > 0.5 * heat.get_array().max()
    shown = np.asarray(below.get_array()).shape
    rows, cols = (np.flatnonzero(hot.any(axis)) for axis in (1, 0))
    across, down = (right - left) / hot.shape[1], (bottom - top) / hot.shape[0]
    edges = (
        left + across * cols[0],
        left + across * (cols[-1] + 1),
        top + down * rows[0],
        top + down * (rows[-1] + 1),
    )
    assert (
        shown == (height, width)
        and heat.axes.get_xlim() == (0, width)
        and heat.axes.get_ylim() == (height, 0)
    )
    assert np.abs(np.subtract(edges, (x, x + 60, y, y + 60))).max() <= 4 * max(
        across, down
    )  # a patch has 4 pixels
    center = (edges[0] + edges[1]) / 2 - x - 30, (edges[2] + edges[3]) / 2 - y - 30
    assert np.abs(center).max() <= 2 * max(across, down)
    seen = crop_box(model, image)
    assert np.allclose((left, top, right, bottom), seen)
    masked = (
        plot.overlay(image, values, crop=seen, grid=grid, style="mask", smooth=False)
        .images[0]
        .get_array()
    )
    assert masked[y : y + 60, x : x + 60].max() > 200


def test_crop_box_equals_the_crop_of_timm():
    """620 × 400 pixels at 0.8: the short side becomes 80 pixels, and the middle 64 of them are 320 of 400."""
    model = nn.Module()
    model.pretrained_cfg = {"input_size": (3, 64, 64), "crop_pct": 0.8}
    assert crop_box(model, photo(400, 620)) == pytest.approx((150, 40, 470, 360), abs=1.5)
    model.pretrained_cfg["crop_mode"] = "border"
    model.pretrained_cfg["crop_pct"] = 1.0
    assert crop_box(model, photo(400, 620)) == pytest.approx(
        (0, -110, 620, 510), abs=10
    )  # to a pixel of 64
    assert crop_box(model, photo(400, 620), whole=True) == pytest.approx((0, 0, 620, 400), abs=1.5)
    for size, match in (
        ((31, 3000), "shows too little of an image of 3000 × 31"),
        ((6, 700), "a strip of 700 × 6"),
    ):
        with pytest.raises(ImageError, match=match):  # of 31 × 3000, 0.7 of 64 rows are left
            crop_box(model, photo(*size))


def test_overlay_dims_the_image_outside_of_the_crop():
    image = np.full((100, 200, 3), 200, np.uint8)
    below = plot.overlay(image, np.zeros((4, 4)), crop=(50, 0, 150, 100)).images[0].get_array()
    assert (
        (below[:, 50:150] == 200).all()
        and (below[:, :50] == 70).all()
        and (below[:, 150:] == 70).all()
    )
    restored = ModelInput(image[None])[0]
    grid = TokenGrid(4, 4, (25, 50), image=(100, 200))
    ax = plot.overlay(restored, np.zeros((4, 4)), model=nn.Identity(), grid=grid)  # cropped before
    assert ax.images[1].get_extent() == [0, 200, 100, 0]
    ax = plot.overlay(restored, np.zeros((4, 4)), crop=np.array([10, 20, 100, 90]))
    assert ax.images[1].get_extent() == [10, 100, 90, 20] and ax.images[0].get_array()[19, 10] == 70


def test_overlay_lays_padded_patches_of_a_restored_image():
    """13 patches of 16 pixels reach beyond 200 pixels, so the last column begins at pixel 192."""
    padded = {"img_size": 200, "dynamic_img_size": True, "dynamic_img_pad": True}
    model = timm.create_model("vit_tiny_patch16_224", depth=1, **padded)
    restored = restore(model, torch.zeros(1, 3, 200, 200))[0]
    heat = plot.overlay(
        restored, np.tile(np.arange(13.0), (13, 1)), model=model, smooth=False
    ).images[1]
    assert heat.get_extent() == [0, 200, 200, 0]
    assert np.array_equal(heat.get_array()[0], np.arange(200) // 16)


MOVED = (
    lambda x: np.flip(x, 1),
    lambda x: np.flip(x, 0).copy(),
    np.rot90,
    lambda x: np.rot90(x, 2),
    lambda x: np.roll(x, 3, 1),
    lambda x: x.transpose(1, 0, 2),
    lambda x: x.transpose(1, 0, 2).copy(),
    lambda x: x[::-1],
    lambda x: x[1:],
)


def test_is_input_ends_with_moved_pixels():
    batch = ModelInput(np.stack([photo(64, 64)] * 2))
    for image in (batch[0], batch[[1, 0]][1], batch[1].copy(), [*batch][1], batch[0][None][0]):
        assert is_input(image)
    for moved in MOVED:
        assert not is_input(moved(batch[0]))
        refuses("`model=`.*restore", plot.overlay, moved(batch[0]), np.ones((4, 4)))


def test_overlay_heat_blends_image_and_color():
    """image · (1 − a) + color · a, in the pixels of the drawn figure, and the image alone outside of patches."""
    image = photo()
    for name, (values, options, share) in OVER.items():
        figure = plt.figure(figsize=(3.3, 2.3), dpi=100)
        how = {
            "grid": CUT,
            "ax": figure.add_axes((0, 0, 1, 1)),
            "style": "heat",
            "smooth": False,
            "colorbar": False,
        }
        heat = plot.overlay(image, values, **how, **options).images[1]
        color = (
            values
            if name == "colors"
            else mpl.colormaps[heat.cmap.name](heat.norm(values))[..., :3]
        )
        figure.canvas.draw()
        drawn = np.asarray(figure.canvas.buffer_rgba())[..., :3]
        gray = np.asarray(Image.fromarray(image).convert("L"))
        expected = gray.astype(float)[..., None].repeat(3, -1)
        a = options.get("alpha", 0.75) * share(values)[..., None]
        a, color = (each.repeat(16, 0).repeat(16, 1) for each in (a, color))
        assert a.shape[:2] == (224, 320)
        painted = paint(gray, 255 * color, a)
        expected[:224, :320] = expected[:224, :320] * (1 - a) + 255 * color * a
        assert np.abs(painted - expected).max() < 1e-9
        # of 255: colors and opacities come from a table of 256
        assert np.abs(drawn - expected).max() <= 3, name


def test_overlay_draws_nan_in_opaque_gray():
    values = np.where(np.eye(14, 20), np.nan, SIGNED)
    for options in ({}, {"opacity": "even", "alpha": 0.3}):
        heat = plot.overlay(
            photo(), values, grid=CUT, style="heat", smooth=False, **options
        ).images[1]
        assert np.allclose(heat.cmap(heat.norm(heat.get_array()))[5, 5], to_rgba("0.65"))
        assert heat.get_clim()[1] == np.nanmax(np.abs(values))


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
        assert (
            np.array_equal(left.images[0].get_array(), pictures[i])
            and left.get_xlabel() == "defg"[i]
        )
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
    assert below == ["max 12.3\nrank 1\ndeletion 0.1", "±5e+04", "max 0\nrank 3"]
    assert [text.get_text() for text in figure.texts] == ["Why?", f"A\nB\n{scale}{signed}"]
    alone = plot.attributions(photo(), {"first": 1e-5 * maps["first"]}, grid=CUT, title="")
    assert (
        alone.axes[1].texts[0].get_text() == "max 0.000123"
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
    assert [[text.get_text() for text in ax.texts] for ax in axes[:6]] == [
        [],
        [],
        ["1"],
        ["120"],
        [],
        [],
    ]
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
    assert [(text.get_text(), text.get_size()) for ax in figure.axes[2:] for text in ax.texts] == [
        ("1", 14),
        ("2", 14),
    ]
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


ARCHITECTURES = {
    "class token": (
        {},
        [
            "0",
            "196",
            "768 → 192",
            "197 × 64",
            "192 → 768 → 192",
            "Self-attention, 3 heads",
            "GELU in between",
            "the head reads the class token",
        ],
    ),
    "registers": (
        {"reg_tokens": 4, "img_size": 128, "num_classes": 10, "init_values": 1.0},
        [
            "reg. 4",
            "68",
            "8 × 8",
            "69 × 64",
            "192 → 10 logits",
            "scaled, added",
            "the head reads the class token",
        ],
    ),
    "mean": (
        {
            "class_token": False,
            "global_pool": "avg",
            "patch_size": 32,
            "num_classes": 0,
            "pos_embed": "none",
        },
        [
            "0",
            "48",
            "3072 → 192",
            "49 × 192",
            "192 features",
            "no table",
            "the head reads the mean of the patches",
        ],
    ),
    "many registers": (
        {"reg_tokens": 12, "depth": 2},
        ["reg. 12", "208", "2 encoder layers", "209 × 192"],
    ),
    "parallel": (
        {"block_fn": ParallelScalingBlock, "patch_size": 16},
        ["0", "196", "12 encoder layers"],
    ),
}


def label_boxes(svg):
    """(words, (left, top, right, bottom)) of each text of an SVG, in the wide font of Matplotlib."""
    font = str(mpl.get_data_path()) + "/fonts/ttf/DejaVuSans.ttf"
    for group in ElementTree.fromstring(svg).iter():
        for text in (each for each in group if each.tag.endswith("text")):
            x, y, size = (float(text.get(name)) for name in ("x", "y", "font-size"))
            width = ImageFont.truetype(font, 100).getlength(text.text) * size / 100
            x -= width * {"start": 0, "middle": 0.5, "end": 1}[text.get("text-anchor")]
            box = x, y - size, x + width, y
            if turned := group.get("transform"):  # translate(a b) rotate(-90)
                a, b = map(float, re.findall(r"\d+", turned)[:2])
                box = a + box[1], b - box[2], a + box[3], b - box[0]
            yield text.text, box


@pytest.mark.parametrize("case", ARCHITECTURES)
def test_architecture_shows_the_models_numbers_without_overlaps(case):
    options, words = ARCHITECTURES[case]
    model = timm.create_model("vit_tiny_patch16_224", **options).eval()
    drawing = architecture.architecture(model, photo())
    labels = list(label_boxes(drawing.svg))
    texts = [text for text, _ in labels]
    assert all(
        any(word == text or len(word) > 3 and word in text for text in texts) for word in words
    ), texts
    assert ("One of the" in drawing.svg) == (case != "parallel")
    width, height = map(float, ElementTree.fromstring(drawing.svg).get("viewBox").split()[2:])
    for number, (text, box) in enumerate(labels):
        assert box[0] >= 0 and box[1] >= 0 and box[2] <= width and box[3] <= height, text
        for other, (left, top, right, bottom) in labels[:number]:
            apart = box[2] <= left or right <= box[0] or box[3] <= top or bottom <= box[1]
            assert apart, f"{text!r} overlaps {other!r}"


def test_architecture_draws_the_patches_of_the_image():
    model = timm.create_model("vit_tiny_patch16_224", img_size=(64, 96), num_classes=3).eval()
    pixels = np.asarray(Image.fromarray(photo(4, 6)).resize((96, 64)))
    root = ElementTree.fromstring(architecture.architecture(model, pixels).svg)
    views = [each.get("viewBox") for each in root if each.tag.endswith("svg")]
    assert views[:3] == ["0 0 96 64", "0 0 16 16", "16 0 16 16"] and views[-1] == "80 48 16 16"
    data = next(
        value for each in root.iter() if each.tag.endswith("image") for value in [each.get("href")]
    )
    drawn = np.asarray(Image.open(io.BytesIO(base64.b64decode(data.partition(",")[2]))), float)
    expected = restore(model, preprocess(model, pixels, size=(64, 96)))[0].astype(float)
    assert (
        drawn.shape == expected.shape and np.corrcoef(drawn.ravel(), expected.ravel())[0, 1] > 0.99
    )


def test_architecture_highlights_one_part_and_refuses_others():
    model = timm.create_model("vit_tiny_patch16_224", depth=3, num_classes=7).eval()
    drawing = architecture.architecture(model, photo(), highlight="mlp")
    fills = [
        each.get("fill")
        for each in ElementTree.fromstring(drawing.svg).iter()
        if each.tag.endswith("rect")
    ]
    assert (
        fills.count("#e3d5ee") == 1
        and "× 3" in drawing.svg
        and repr(drawing).endswith("Highlighted: mlp.")
    )
    refuses(
        "highlight must be one of image, patches",
        architecture.architecture,
        model,
        photo(),
        highlight="norm",
    )
