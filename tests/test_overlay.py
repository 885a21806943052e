"""Maps over images: `mask`, `upsample`, `overlay` and the crop of a model."""

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
import timm
import torch
from matplotlib.colors import to_rgba
from PIL import Image, ImageFilter
from support import (
    CUT,
    RNG,
    photo,
    refuses,
)
from torch import nn
from torchvision.transforms import v2

from vitlens import plot
from vitlens.images import ImageError, ModelInput
from vitlens.models import crop_box, preprocess, restore
from vitlens.plot.painting import is_input, paint
from vitlens.recorder.grid import TokenGrid
from vitlens.recorder.supported.card import write_card

PADDED = TokenGrid(15, 21, (16, 16), image=(230, 330))


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
