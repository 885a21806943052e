"""The front end's drawings by themselves, in a browser, against NumPy."""

import base64

import numpy as np
import pytest

from browser.fronts import MARKS
from vitlens_explorer import front

pytestmark = MARKS
PAINT = """([width, height, pixels, panel]) => {
    const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    const view = (text) => new DataView(bytes(text).buffer);
    const base = { width, height, data: new Uint8ClampedArray(bytes(pixels)) };
    const scale = panel.scale && { ...panel.scale, colors: view(panel.scale.colors) };
    return [...paintMap(base, { ...panel, scale, values: view(panel.values) }).data];
}"""


@pytest.fixture(scope="module")
def drawings(browser):
    """A page in which the functions of the scripts are global."""
    page = browser.new_page()
    page.add_script_tag(content=front.join_modules(front.FRONT / "page.js"))
    yield page
    page.close()


def sent(array):
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()


def between(length, count, smooth):
    middle = (np.arange(length) + 0.5) * count / length
    place = np.clip(middle - 0.5, 0, count - 1) if smooth else middle
    first = np.floor(place).astype(int)
    return first, np.minimum(first + 1, count - 1), (place - first if smooth else 0 * place)


def overlay(pixels, values, cell, scale, strength, smooth):
    """Independent overlay in float64, rounded as the browser rounds."""
    (height, width), (rows, cols, channels) = pixels.shape[:2], values.shape
    gray = (pixels[..., :3].astype(int) @ [19595, 38470, 7471] + 32768) >> 16
    out = np.dstack([gray] * 3 + [pixels[..., 3]])
    (left, right, u), (top, bottom, v) = (
        between(round(count * size * side), count, smooth)
        for count, size, side in ((cols, cell[1], width), (rows, cell[0], height))
    )
    x, y = min(width, len(left)), min(height, len(top))
    u, v = u[:x, None], v[:y, None, None]
    across = [values.astype(float)[:, part[:x]] for part in (left, right)]
    across = across[0] * (1 - u) + across[1] * u
    map_ = across[top[:y]] * (1 - v) + across[bottom[:y]] * v
    color, opacity = map_ * 255, strength
    if channels == 1:
        low, high, table = scale
        place = np.clip((map_[..., 0] - low) / (high - low) * 255, 0, 255)
        color = np.dstack([np.interp(place, np.arange(256), table[:, k]) for k in range(4)])
        color, opacity = color[..., :3], color[..., 3:] / 255
    shown = gray[:y, :x, None] * (1 - opacity) + color * opacity
    out[:y, :x, :3] = np.rint(shown.clip(0, 255))
    return out


@pytest.mark.parametrize("channels", (1, 3))
@pytest.mark.parametrize("shape", ((96, 96, 6, 6, 1 / 6, 1 / 6), (60, 90, 4, 5, 1 / 4.1, 1 / 5.2)))
def test_painted_equals_numpy(drawings, shape, channels):
    """Also where pixels at the right and at the bottom belong to no patch."""
    height, width, rows, cols, *cell = shape
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (height, width, 4), np.uint8)
    values = rng.random((rows, cols, channels), np.float32)
    table = rng.integers(0, 256, (256, 4), np.uint8)
    for strength, smooth in ((0.75, True), (0.75, False)):
        scale = {"low": 0.1, "high": 0.8, "colors": sent(table)} if channels == 1 else None
        panel = {
            "rows": rows,
            "cols": cols,
            "cell": cell,
            "strength": strength,
            "smooth": smooth,
            "scale": scale,
        }
        found = drawings.evaluate(
            PAINT, [width, height, sent(pixels), panel | {"values": sent(values)}]
        )
        wanted = overlay(pixels, values, cell, (0.1, 0.8, table), strength, smooth)
        off = np.abs(np.reshape(found, (height, width, 4)) - wanted)
        assert off.max() <= 1 and (off > 0).mean() < 1e-3, "they may differ where a half is rounded"
    panel = panel | {"strength": 0, "values": sent(values)}
    assert drawings.evaluate(PAINT, [width, height, sent(pixels), panel]) == pixels.ravel().tolist()
