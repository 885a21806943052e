"""Images whose colors have 16 bits a channel, of which Pillow reads the upper eight."""

import struct
import zlib

import numpy as np
import pytest
from forms import form

from vitlens import load_image
from vitlens.data import load
from vitlens.images import ImageError
from vitlens.models import preprocess

COLOR_TYPES = {3: 2, 4: 6, 2: 4}
"""PNG's number for colors, colors with opacity, and gray with opacity, by the number of channels."""


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(levels: np.ndarray) -> bytes:
    """A PNG file of 16 bits a channel, written by its specification, because Pillow writes none."""
    height, width, channels = levels.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in levels)
    header = struct.pack(">IIBBBBB", width, height, 16, COLOR_TYPES[channels], 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def levels(bits: int, channels: int) -> np.ndarray:
    values = np.random.default_rng(bits).integers(0, 2**bits, (8, 8, channels)).astype(np.uint16)
    values[0, 0] = 2**bits - 1
    if channels in (2, 4):
        values[..., -1] = 65535  # opaque
    return values


@form(6, door="Python: load_image, bytes", case="12 and 16 bits in RGB, LA, RGBA", right="v / 257")
@pytest.mark.parametrize("channels", COLOR_TYPES)
@pytest.mark.parametrize("bits", [12, 14, 15, 16])
def test_load_image_notes_dark_colors(bits, channels):
    notes = []
    values = levels(bits, channels)
    found = np.asarray(load_image(png(values), on_note=notes.append), float)
    colors = values[..., :1] if channels == 2 else values[..., :3]
    assert np.abs(found - colors / 257).max() <= 1
    assert ["may look dark" in note for note in notes] == ([True] if bits <= 14 else [])


@form(6, door="folder, training", case="12 bits in RGB PNG", right="count by hand")
def test_folder_counts_dark_colors(tmp_path):
    for name, bits in (("scan", 12), ("photo", 16)):
        (tmp_path / name).mkdir()
        for number in range(3):
            (tmp_path / name / f"{number}.png").write_bytes(png(levels(bits, 3)))
    images = load(tmp_path, "whole", size=8)
    assert "3 of 6 images have levels that use less than a quarter of 16 bits" in images.note


@form(8, door="Python: load_image, array", case="masked values", right="a sentence")
def test_masked_arrays_are_refused():
    values = np.ma.masked_less(np.arange(64, dtype=np.uint8).reshape(8, 8), 9)
    with pytest.raises(ImageError, match="masked values. Fill them"):
        load_image(values)
    assert load_image(values.filled(0)).size == (8, 8)


@form(8, door="Python: load_image, text", case="an address", right="a sentence with its cause")
@pytest.mark.parametrize(
    "address", ["https://a.example/cat.jpg", "s3://b/cat.jpg", "file:///a.png"]
)
def test_addresses_are_named_as_such(address):
    with pytest.raises(ImageError, match="is an address. Download the image"):
        load_image(address)


@form(6, door="Python: preprocess without on_note", case="five dark images", right="count by hand")
def test_preprocess_warns_of_dark_images(vit):
    dark = [png(levels(12, 3))] * 5
    with pytest.warns(UserWarning, match="5 of 6 images have levels that use less than") as warned:
        preprocess(vit(), [*dark, png(levels(16, 3))])
    assert len(warned) == 1
    assert str(warned[0].message).count("has levels up to 4,095") == 3
