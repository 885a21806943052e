"""Maps of random weights through every door: none looks like a finding, and a strong peak still does."""

import io
import json
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from matplotlib.image import AxesImage
from matplotlib.text import Text
from PIL import Image
from support import saved_model, vitlens

import vitlens_explorer as widgets
from vitlens import attention, capture, plot, report
from vitlens.models import preprocess, restore
from vitlens.plot import scales
from vitlens.recorder.grid import TokenGrid
from vitlens.train import snapshots
from vitlens_explorer import drawing
from vitlens_explorer.explorer import Explorer
from vitlens_explorer.panels import scale_of
from vitlens_explorer.views import head_maps

GRAY = np.full((64, 64, 3), 128, np.uint8)
SIZE, PATCH, ROWS = 64, 8, 8
GRID = TokenGrid(ROWS, ROWS, (PATCH, PATCH))


@pytest.fixture(scope="module")
def random():
    """A model with timm's random weights, its capture of two photographs, and its maps of attention."""
    torch.manual_seed(0)
    model = timm.models.vision_transformer.VisionTransformer(
        img_size=SIZE, patch_size=PATCH, embed_dim=96, depth=3, num_heads=3, num_classes=5
    ).eval()
    model.pretrained_cfg = {"input_size": (3, SIZE, SIZE), "crop_pct": 1.0}
    photos = np.random.default_rng(0).integers(0, 256, (2, SIZE, SIZE, 3), dtype=np.uint8)
    batch = torch.cat([preprocess(model, photo) for photo in photos])
    with torch.no_grad(), capture(model) as attn:
        model(batch)
    rows = attn.grid.readout.float().reshape(-1, attn.grid.tokens)[0]
    heads = torch.stack([attn.grid.image_map(layer.read(rows)[0]) for layer in attn])
    rollouts = attention.rollout(attn).float()
    pixels = restore(model, batch)
    return SimpleNamespace(
        model=model, photos=photos, pixels=pixels, heads=heads, rollouts=rollouts
    )


def peaked(background=0.01, top=0.5):
    """A map with one strong peak in row 2, column 5."""
    values = np.full((ROWS, ROWS), background)
    values[2, 5] = top
    return values


def maps_drawn(figure):
    """(n, h, w) shares of their scale that the maps of a figure have, of images with one channel that are not gray."""
    drawn = []
    for image in figure.findobj(AxesImage):
        values = np.asarray(image.get_array(), float)
        if values.ndim == 2 and image.cmap.name != "gray":
            low, high = image.get_clim()
            drawn.append((values - low) / (high - low))
    return drawn


def texts_of(figure):
    return "\n".join(text.get_text() for text in figure.findobj(Text)).replace("\xa0", " ")


def inspection(random, maps, name="model"):
    """An Inspection of given rollouts."""
    pictures = []
    for k, values in enumerate(maps):
        pictures.append(report.Picture(str(k), random.pixels[k % 2], [], torch.as_tensor(values)))
    lacks = {"filters": "none", "positions": "none"}
    distances = torch.ones(3, 3)
    return report.Inspection(
        name, GRID, distances, len(maps), pictures, None, None, None, [], lacks
    )


FIGURES = {
    "overlay": lambda random, maps: plot.overlay(random.pixels[0], maps[0], grid=GRID).figure,
    "overlay, patches": lambda random, maps: (
        plot.overlay(random.pixels[0], maps[0], grid=GRID, smooth=False, opacity="even").figure
    ),
    "overlays": lambda random, maps: plot.overlays(random.pixels[0], {"a": maps[0]}, grid=GRID),
    "rollouts": lambda random, maps: plot.rollouts(random.pixels, maps, grid=GRID),
    "inspected": lambda random, maps: plot.inspected(inspection(random, maps)),
    "inspected beside": lambda random, maps: plot.inspected(
        {"a": inspection(random, maps), "b": inspection(random, maps)}
    ),
    "attributions": lambda random, maps: plot.attributions(
        random.pixels[0], {"a": maps[0], "b": maps[1]}, grid=GRID, title="Why?"
    ),
    "gallery": lambda random, maps: plot.gallery({"a": maps}),
    "gallery, own scales": lambda random, maps: plot.gallery({"a": maps}, shared=False),
    "gallery, over images": lambda random, maps: plot.gallery(
        {"a": maps}, over=list(random.pixels), grid=GRID
    ),
    "tiles": lambda random, maps: plot.tiles({"a": maps[0]}),
    "heads": lambda random, maps: plot.heads(np.stack(maps)),
    "heads, own scales": lambda random, maps: plot.heads(
        np.stack(maps), image=random.pixels[0], grid=GRID, shared=False
    ),
}
"""Figures of two maps, by the name of their door."""


@pytest.mark.parametrize("door", FIGURES)
def test_figures_draw_rollouts_of_random_weights_as_uniform(random, door):
    maps = [values.numpy() for values in random.rollouts]
    assert 0 < max(map(scales.departure, maps)) < scales.UNIFORM
    figure = FIGURES[door](random, maps)
    drawn = maps_drawn(figure)
    assert drawn and all(np.ptp(values) < 1e-6 for values in drawn)
    assert all(values.min() > 0.9 for values in drawn)  # from 0: the mean is close to the end
    assert "uniform" in texts_of(figure).lower()


@pytest.mark.parametrize("door", FIGURES)
def test_figures_show_a_strong_peak_from_zero_with_its_end(random, door):
    maps = [peaked(), peaked(top=0.4)]
    figure = FIGURES[door](random, maps)
    figure.draw_without_rendering()
    for values in maps_drawn(figure):
        assert values.max() > 0.75 and values.min() == pytest.approx(0.02, abs=0.015)
    words = texts_of(figure)
    assert "0.5" in words or "50 %" in words, "the end of the scale"
    assert "stretched" not in words and scales.uniform_words() not in words


@pytest.mark.parametrize("door", [name for name in FIGURES if name != "inspected beside"])
@pytest.mark.parametrize("kind", ["constant", "zeros", "outlier", "negative"])
def test_figures_draw_extreme_maps_without_nan(random, door, kind):
    values = {
        "constant": np.full((ROWS, ROWS), 0.25),
        "zeros": np.zeros((ROWS, ROWS)),
        "outlier": peaked(1e-3, 1e6),
        "negative": peaked() - 0.2,
    }[kind]
    if kind == "negative" and ("heads" in door or "inspected" in door):
        return  # attention is never negative
    figure = FIGURES[door](random, [values, values])
    figure.draw_without_rendering()
    words = texts_of(figure)
    for drawn in maps_drawn(figure):
        assert np.isfinite(drawn).all() and -1e-6 <= drawn.min() <= drawn.max() <= 1 + 1e-6
        if kind in ("constant", "zeros"):
            assert np.ptp(drawn) < 1e-6 and drawn.max() == pytest.approx(float(kind == "constant"))
        if kind == "outlier":
            assert np.median(drawn) < 1e-6
        if kind == "negative":
            assert 0.05 < drawn.min() < 0.5 < drawn.max(), "0 is in the middle"
    if kind == "outlier" and "heads" not in door and door != "gallery":
        assert "64 × mean" in words or "64 × the mean" in words


def test_bars_name_their_stretch(random):
    values = np.linspace(0.6, 1.0, ROWS * ROWS).reshape(ROWS, ROWS)
    arguments = {"grid": GRID, "limits": (0.6, 1.0)}
    with_bar = plot.overlay(random.pixels[0], values, **arguments).figure
    without = plot.overlay(random.pixels[0], values, colorbar=False, **arguments).figure
    several = plot.overlays(random.pixels[0], {"a": values}, grid=GRID, limits={"a": (0.6, 1.0)})
    for figure in (with_bar, without, several):
        assert texts_of(figure).count("stretched 2.5 times") == 1


def test_masks_of_random_weights_are_uniform_and_others_name_their_stretch(random):
    flat = random.rollouts[0].numpy()
    assert plot.mask(flat, GRID).min() == 1
    figure = plot.overlay(random.pixels[0], flat, grid=GRID, style="mask").figure
    assert "uniform within 10%" in texts_of(figure)
    values = np.linspace(0.6, 1.0, ROWS * ROWS).reshape(ROWS, ROWS)
    figure = plot.overlay(random.pixels[0], values, grid=GRID, style="mask", smooth=False).figure
    assert "stretched 2.5 times" in texts_of(figure)
    figure = plot.rollouts(random.pixels, [flat, values], grid=GRID, style="mask")
    assert "uniform within 10%" in texts_of(figure) and "stretched" in texts_of(figure)


def test_all_heads_of_random_weights_are_uniform(random):
    departures = [scales.departure(each.numpy()) for each in random.heads.flatten(0, 1)]
    assert max(departures) < scales.ATTENTION
    for image in (None, GRAY):
        figure = plot.all_heads(random.heads, image=image, grid=GRID)
        (shown,) = figure.axes[0].images
        pixels = np.asarray(shown.get_array(), float)
        colors = np.unique(pixels[~(pixels == 1).all(-1)], axis=0)
        assert len(colors) <= 9, "one color for each head"
        assert "u: drawn as uniform" in texts_of(figure)


def test_snapshots_of_random_weights_have_uniform_rollouts(random):
    before = snapshots.record(random.model, preprocess(random.model, random.photos[0]))
    trained = {name: np.array(values) for name, values in before.items()}
    trained["rollout"] = peaked()[None].astype(np.float32)
    run = {name: np.stack([before[name], trained[name]]) for name in before} | {"steps": [0, 9]}
    for figure in (plot.snapshot(run, 0), plot.film_strip(run)):
        for ax in figure.axes:
            if ax.get_title() == "Attention rollout" or ax.get_ylabel() == "Attention\nrollout":
                pixels = np.asarray(ax.images[0].get_array(), float)[..., :3]
                colors = np.unique(pixels[~(pixels == 1).all(-1)], axis=0)
                assert len(colors) <= 2, "the mean, or the two values of the peaked map"


def painted(panel):
    """(H, W) brightness of a panel over a gray image, as the front end paints it."""
    return drawing.paint_panel(panel, Image.fromarray(GRAY)).sum(-1)


@pytest.mark.parametrize("stretch", [False, True])
@pytest.mark.parametrize("view", ["attention", "received", "rollout"])
def test_explorer_paints_random_weights_as_uniform(random, view, stretch):
    widget = Explorer(random.model, random.photos[0])
    widget.begin()
    for head in ("mean", 1):
        widget.state = widget.state | {"view": view, "layer": 2, "stretch": stretch, "head": head}
        frame = widget.draw(lambda *_: None)
        panel = frame["panels"][0]
        assert np.ptp(painted(panel.message())) < 1e-6
        assert "Drawn as uniform" in panel.words and "times their mean" in panel.words
        assert panel.ends[0] == "0" and float(panel.ends[1]) == pytest.approx(
            panel.values.max(), rel=0.01
        )


def test_explorer_still_and_saved_figure_paint_one_color(random):
    widget = Explorer(random.model, GRAY)
    widget.begin()
    widget.state = widget.state | {"view": "rollout"}
    panel = widget.draw(lambda *_: None)["panels"][0]
    still = drawing._paint_marked(panel.message(), Image.fromarray(GRAY), (200, 200))
    assert len(still.getcolors()) == 1
    file = drawing.figure_png(widget.forward, panel)
    assert single_color(Image.open(io.BytesIO(file))) > 0.7  # the others are the color bar's


def test_explorer_mosaic_of_random_weights_is_uniform(random):
    widget = Explorer(random.model, random.photos[0])
    widget.begin()
    maps, tops = head_maps(widget.forward, "readout", lambda *_: None)
    assert np.ptp(maps.reshape(-1, ROWS * ROWS), axis=-1).max() == 0
    assert (maps.min() > 150) and (tops > 0).all()


def test_explorer_stretches_only_with_a_factor(random):
    values = np.linspace(0.5, 1.0, 64).reshape(8, 8)
    scale = scale_of(values, stretch=True)
    assert (scale.low, scale.high, scale.uniform, scale.stretching) == (0.5, 1.0, None, 2.0)
    widget = Explorer(random.model, random.photos[0])
    widget.begin()
    widget.state = widget.state | {"view": "norms", "stretch": True}
    panel = widget.draw(lambda *_: None)["panels"][0]
    is_uniform = panel.scale.uniform is not None
    words = "Drawn as uniform" if is_uniform else "Colors are stretched: differences look "
    assert words in panel.words
    positions = widgets.positions(random.model)
    positions.set(stretch=True)
    (_, one) = positions.frame["panels"]
    assert "Colors are stretched: differences look " in one["words"]


def test_comparison_paints_random_weights_as_uniform(random):
    page = widgets.compare(random.model, random.model, random.photos[0])
    page.set(view="rollout")
    for panel in page.frame["panels"]:
        assert np.ptp(painted(panel)) < 1e-6 and "Drawn as uniform" in panel["words"]


def single_color(image):
    """Share of the most frequent color among the colorful pixels of a figure."""
    pixels = np.asarray(image.convert("RGB"))
    colorful = pixels[np.ptp(pixels.astype(int), axis=-1) > 60]
    _, counts = np.unique(colorful, axis=0, return_counts=True)
    return counts.max() / len(colorful)


@pytest.mark.slow
def test_commands_draw_rollouts_of_random_weights_in_one_color(tmp_path):
    folder = saved_model(tmp_path / "model")
    other = saved_model(tmp_path / "other", num_classes=4)
    image = tmp_path / "gray.png"
    Image.new("RGB", (32, 32), "gray").save(image)
    vitlens("inspect", folder, image, "--beside", other, "--out", tmp_path / "figures")
    vitlens("explain", folder, image, "--methods", "rollout", "--out", tmp_path / "maps")
    assert single_color(Image.open(tmp_path / "figures" / "rollout.png")) > 0.98
    assert single_color(Image.open(tmp_path / "maps" / "00-gray.png")) > 0.98
    summary = json.loads((tmp_path / "figures" / "summary.json").read_text())
    rollout = np.array(summary["images"][0]["rollout"])
    assert np.ptp(rollout) > 0, "numbers stay as they are"


def test_departure_equals_its_formula():
    assert scales.departure(peaked(1, 3)) == pytest.approx(3 / (66 / 64) - 1)
    assert scales.departure(np.array([[-1.0, 1.0]])) == np.inf
    assert scales.departure(np.zeros((2, 2))) == scales.departure(np.full((2, 2), -3.0)) == 0
    assert scales.departure(np.array([[1.0, np.nan]])) == 0
    large = np.full((64, 64), 0.01)
    large[3, 3] = 0.02  # a single patch decides on a grid of any size
    assert scales.uniform_value(large) is None
    with_nan = scales.as_drawn(np.array([[1.0, 1.05, np.nan]]))
    assert np.allclose(with_nan, [[1.025, 1.025, np.nan]], equal_nan=True)
