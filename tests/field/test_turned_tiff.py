"""TIFF files that EXIF turns: Pillow maps them into memory with the sides of the turned image."""

from pathlib import Path

import numpy as np
import pytest
from forms import form
from PIL import ExifTags, Image

from vitlens import load_image
from vitlens.data import load
from vitlens.data.imageset import Samples, decode

LEVELS = np.arange(15, dtype=np.uint8).reshape(3, 5) * 16
TURNED = {5: LEVELS.T, 6: np.rot90(LEVELS, -1), 7: np.rot90(LEVELS, 2).T, 8: np.rot90(LEVELS)}


def turned(path: Path, orientation: int) -> Path:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    Image.fromarray(LEVELS).save(path, exif=exif)
    return path


def opened_file(path):
    return open(path, "rb")


SOURCES = (Path, str, Path.read_bytes, Image.open, opened_file)


@form(6, door="Python: load_image(path, file, PIL image)", case="gray TIFF", right="NumPy's turns")
@pytest.mark.parametrize("orientation", TURNED)
@pytest.mark.parametrize("source", SOURCES)
def test_load_image_turns_tiff(tmp_path, source, orientation):
    path = turned(tmp_path / "scan.tiff", orientation)
    given = source(path)
    found = np.asarray(load_image(given))
    np.testing.assert_array_equal(found[..., 0], TURNED[orientation])
    if hasattr(given, "close"):
        given.close()


@form(6, door="Python: Samples of PIL images", case="gray TIFF, opened", right="NumPy's turns")
def test_data_turn_tiff(tmp_path):
    images = [Image.open(turned(tmp_path / f"{number}.tiff", number)) for number in TURNED]
    samples = Samples(images, [0] * 4, ("scan",), list(TURNED))
    for index, expected in enumerate(TURNED.values()):
        np.testing.assert_array_equal(np.asarray(decode(samples, index))[..., 0], expected)


@form(6, door="folder", case="TIFF of two orientations", right="the same image, turned by NumPy")
def test_folders_turn_tiff(tmp_path):
    for number in TURNED:
        (tmp_path / "scan").mkdir(exist_ok=True)
        square = np.kron(np.eye(4, dtype=np.uint8), np.full((2, 2), 255, np.uint8))
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = number
        Image.fromarray(square).save(tmp_path / "scan" / f"{number}.tiff", exif=exif)
    images = load(tmp_path, "whole", size=8).images
    for index, number in enumerate(TURNED):
        expected = square.T if number in (5, 7) else square[:, ::-1]
        np.testing.assert_array_equal(images[index, 0], expected)
