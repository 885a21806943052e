"""Pictures of every format and mode, made here, against expectations worked out by hand."""

import io
import itertools
import re
import socket
import struct
import subprocess
import sys
import time
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from data_support import png, saved
from PIL import ExifTags, Image, ImageFile
from timm.data import create_transform, resolve_model_data_config
from torch import nn

from vitlens import images
from vitlens.images import ImageError, load_image, samples
from vitlens.models import preprocess, restore

RED, GREEN, BLUE, YELLOW = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0)
CORNERS = {"A": RED, "B": GREEN, "C": BLUE, "D": YELLOW}
NOISE = np.random.default_rng(0)
RAMP = NOISE.integers(0, 256, (24, 32, 3), np.uint8)


def flat(color, size=(8, 6)):
    return Image.new("RGB", size, color)


def corners(letters="ABCD", width=64, height=32):
    """Four flat quadrants: upper left, upper right, lower left, lower right."""
    colors = np.array([CORNERS[letter] for letter in letters], np.uint8).reshape(2, 2, 3)
    return Image.fromarray(colors.repeat(height // 2, 0).repeat(width // 2, 1))


def pixels(source, **options):
    image = load_image(source, **options)
    assert image.mode == "RGB" and type(image) is Image.Image and not image.info
    return np.asarray(image).astype(int)


def gray(levels):
    return np.repeat(np.asarray(levels)[..., None], 3, -1)


def assert_close(actual, expected, tolerance):
    assert actual.shape == np.shape(expected)
    assert np.abs(actual - np.asarray(expected, float)).max() <= tolerance


def refused(source, *words, **options):
    with pytest.raises(ImageError) as caught:
        load_image(source, **options)
    sentence = str(caught.value)
    assert re.fullmatch(r"Expected an image, but [^\n]+[;,] [^\n]+\.", sentence), sentence
    assert not re.search(r"0x[0-9a-f]{4}|<_io|<PIL|Traceback", sentence), sentence
    assert len(sentence) < 350
    for word in words:
        assert word in sentence, sentence
    return caught.value


# --- orientation

UPRIGHT = {1: "ABCD", 2: "BADC", 3: "DCBA", 4: "CDAB", 5: "ACBD", 6: "CADB", 7: "DBCA", 8: "BDAC"}
ORIENTED = {"JPEG": {"quality": 95, "subsampling": 0}, "PNG": {}, "TIFF": {}, "WEBP": {"lossless": True}}


def oriented(format, orientation):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    return saved(corners(), format, exif=exif, **ORIENTED[format])


@pytest.mark.parametrize("format", ORIENTED)
@pytest.mark.parametrize("orientation", UPRIGHT)
def test_exif_orientation(format, orientation):
    """The EXIF standard says where the first row and the first column of the file are to be seen."""
    width, height = (64, 32) if orientation < 5 else (32, 64)
    expected = np.asarray(corners(UPRIGHT[orientation], width, height))
    data = oriented(format, orientation)
    for source in (data, Image.open(io.BytesIO(data))):
        once = load_image(source)
        assert_close(pixels(source), expected, 8)
        assert (pixels(once) == np.asarray(once)).all(), "turned twice"


def test_nonsense_in_exif_counts_as_upright():
    for exif in (b"Exif\0\0garbage", b"Exif\0\0II*\0\x08\0\0\0\xff\xff", b"Exif\0\0MM\0*\xff\xff\xff\xff"):
        assert_close(pixels(saved(corners(), "PNG", exif=exif)), np.asarray(corners()), 0)
    for orientation in (0, 9, 65535):
        assert_close(pixels(oriented("PNG", orientation)), np.asarray(corners()), 0)


# --- modes

LEVELS = np.array([[0, 1, 127], [128, 254, 255]], np.uint8)
COLORS = np.array([[RED, GREEN, BLUE], [YELLOW, (10, 20, 30), (200, 100, 50)]], np.uint8)
ALPHA = np.array([[0, 255, 128], [1, 254, 64]], np.uint8)
DEEP = np.array([[0, 128, 129], [1000, 40000, 65535]], np.uint16)


def over_white(values, alpha=ALPHA):
    return values * (alpha[..., None] / 255) + 255 * (1 - alpha[..., None] / 255)


def with_alpha(mode):
    return Image.fromarray(np.dstack([COLORS, ALPHA])).convert(mode)


def palette(mode="RGB"):
    image = Image.fromarray(np.arange(6, dtype=np.uint8).reshape(2, 3)).convert("L")
    colors = COLORS.reshape(6, 3)
    if mode == "RGBA":
        colors = np.hstack([colors, ALPHA.reshape(6, 1)])
    image = image.convert("P")
    image.putpalette(colors.tobytes(), mode)
    return image


def palette_alpha():
    image = palette().convert("PA")
    image.putalpha(Image.fromarray(ALPHA))
    return image


def noted(image, **info):
    image.info.update(info)
    return image


def gray_alpha(mode):
    return Image.merge("LA", (Image.fromarray(LEVELS), Image.fromarray(ALPHA))).convert(mode)


def flat_mode(mode, *colors):
    """One row of pixels of these colors."""
    image = Image.new(mode, (len(colors), 1))
    for x, color in enumerate(colors):
        image.putpixel((x, 0), color)
    return image


def cmyk_as_rgb(c, m, y, k):
    return [(255 - ink) * (255 - k) / 255 for ink in (c, m, y)]


def deep_png(level):
    """`DEEP` as gray of 16 bits with one level transparent."""
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in DEEP)
    return png(3, 2, (b"tRNS", struct.pack(">H", level)), (b"IDAT", zlib.compress(rows)), depth=16, color=0)


OPAQUE_BUT_FIRST = np.where(np.arange(6).reshape(2, 3) == 0, 0, 255)
MODES = {
    "1": (lambda: Image.fromarray(LEVELS > 127), gray([[0, 0, 0], [255, 255, 255]]), 0),
    "L": (lambda: Image.fromarray(LEVELS), gray(LEVELS), 0),
    "L, one level transparent": (
        lambda: noted(Image.fromarray(LEVELS), transparency=127),
        gray([[0, 1, 255], [128, 254, 255]]),
        0,
    ),
    "LA": (lambda: gray_alpha("LA"), over_white(gray(LEVELS)), 1),
    "La": (lambda: gray_alpha("La"), over_white(gray(LEVELS)), 2),
    "P": (palette, COLORS, 0),
    "P, one index transparent": (lambda: noted(palette(), transparency=0), over_white(COLORS, OPAQUE_BUT_FIRST), 0),
    "P, alpha in bytes": (lambda: noted(palette(), transparency=ALPHA.tobytes()), over_white(COLORS), 1),
    "P, palette of RGBA": (lambda: palette("RGBA"), over_white(COLORS), 1),
    "PA": (palette_alpha, over_white(COLORS), 1),
    "RGB": (lambda: Image.fromarray(COLORS), COLORS, 0),
    "RGB, one color transparent": (
        lambda: noted(Image.fromarray(COLORS), transparency=RED),
        over_white(COLORS, OPAQUE_BUT_FIRST),
        0,
    ),
    "RGBA": (lambda: with_alpha("RGBA"), over_white(COLORS), 1),
    "RGBa": (lambda: with_alpha("RGBa"), over_white(COLORS), 2),
    "RGBX": (lambda: Image.fromarray(COLORS).convert("RGBX"), COLORS, 0),
    "CMYK": (
        lambda: flat_mode("CMYK", (0, 0, 0, 0), (255, 0, 0, 0), (10, 100, 200, 60)),
        [[(255, 255, 255), (0, 255, 255), cmyk_as_rgb(10, 100, 200, 60)]],
        1,
    ),
    "YCbCr": (lambda: flat_mode("YCbCr", (200, 128, 128), (76, 85, 255)), [[(200, 200, 200), RED]], 2),
    "HSV": (
        lambda: flat_mode("HSV", (0, 255, 255), (85, 255, 255), (170, 255, 255), (0, 0, 99)),
        [[RED, GREEN, BLUE, (99, 99, 99)]],
        0,
    ),
    "LAB": (lambda: flat_mode("LAB", (255, 128, 128), (0, 128, 128)), [[(255, 255, 255), (0, 0, 0)]], 2),
    "I;16": (lambda: Image.fromarray(DEEP), gray(DEEP / 257), 0.5),
    "I;16B": (lambda: Image.frombytes("I;16B", (3, 2), DEEP.astype(">u2").tobytes()), gray(DEEP / 257), 0.5),
    "I;16, one level transparent": (
        lambda: Image.open(io.BytesIO(deep_png(1000))),
        gray(np.where(DEEP == 1000, 65535, DEEP) / 257),
        0.5,
    ),
    "I": (lambda: Image.fromarray(DEEP.astype(np.int32)), gray(DEEP / 257), 0.5),
    "F": (lambda: Image.fromarray((LEVELS / 255).astype(np.float32)), gray(LEVELS), 0),
}
FILES = {
    "PNG": ["1", "L", "L, one level transparent", "LA", "P", "P, one index transparent", "P, alpha in bytes", "RGB"]
    + ["RGB, one color transparent", "RGBA", "I;16"],
    "TIFF": ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "I;16B", "I", "F", "LAB"],
    "BMP": ["1", "L", "P", "RGB"],
    "GIF": ["1", "L", "P", "P, one index transparent"],
    "PPM": ["1", "L", "RGB"],
    "TGA": ["L", "LA", "P", "RGB", "RGBA"],
    "WEBP": ["RGB", "RGBA"],
    "ICO": ["RGBA"],
}
SAVING = {"WEBP": {"lossless": True, "exact": True}, "ICO": {"bitmap_format": "bmp", "sizes": [(3, 2)]}}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode(mode):
    make, expected, tolerance = MODES[mode]
    image = make()
    image.load()

    def state():
        colors = image.im.getpalette("RGBA", "RGBA") if image.palette else None
        return image.mode, image.tobytes(), dict(image.info), colors

    before = state()
    assert_close(pixels(image), expected, tolerance)
    assert state() == before


@pytest.mark.parametrize(("format", "mode"), [(format, mode) for format, modes in FILES.items() for mode in modes])
def test_every_mode_through_a_file(format, mode):
    make, expected, tolerance = MODES[mode]
    image = make()
    options = {key: image.info[key] for key in ("transparency",) if key in image.info}
    assert_close(pixels(saved(image, format, **options, **SAVING.get(format, {}))), expected, tolerance)


def test_alpha_over_white_at_every_level():
    alpha, level = np.meshgrid(np.arange(256, dtype=np.uint8), np.arange(0, 256, 5, dtype=np.uint8))
    image = np.dstack([level, level // 2, 255 - level, alpha])
    assert_close(pixels(image), over_white(image[..., :3].astype(float), alpha), 1)


def test_sixteen_bits_at_every_level():
    levels = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    expected = gray(np.floor(levels / 257 + 0.5))
    for source in (levels, Image.fromarray(levels), saved(Image.fromarray(levels), "PNG"), levels.astype(">u2")):
        assert (pixels(source) == expected).all()


@pytest.mark.parametrize(
    ("mode", "level", "words"),
    [("I", 65536, "0 … 65535"), ("I", -1, "0 … 65535"), ("F", 255, "0 and 1"), ("F", -1, "0 and 1")],
)
def test_deep_levels_are_never_clipped(mode, level, words):
    refused(Image.new(mode, (2, 2), level), "PIL image", f"from {level} to {level}", words)


def test_adobe_cmyk_is_inverted_back():
    image = Image.new("CMYK", (16, 16), (10, 100, 200, 60))
    data = saved(image, "JPEG", quality=100)
    assert b"Adobe" in data
    assert_close(pixels(data), np.broadcast_to(cmyk_as_rgb(10, 100, 200, 60), (16, 16, 3)), 4)


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "TIFF"])
def test_first_frame(format):
    data = saved(flat(RED), format, save_all=True, append_images=[flat(BLUE), flat(GREEN)])
    assert Image.open(io.BytesIO(data)).n_frames == 3
    assert_close(pixels(data), np.asarray(flat(RED)), 3)


# --- sources


class Pipe(io.RawIOBase):
    """A stream that cannot go back."""

    def __init__(self, data):
        self.inner = io.BytesIO(data)

    def readable(self):
        return True

    def readinto(self, buffer):
        return self.inner.readinto(buffer)


class Reader:
    """The least a file object can be."""

    def __init__(self, data):
        self.read = io.BytesIO(data).read


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview, io.BytesIO, Pipe, Reader])
@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_bytes_and_file_objects(wrap, format):
    assert (pixels(wrap(saved(Image.fromarray(RAMP), format))) == RAMP).all()


def test_paths_and_open_files(tmp_path):
    path = tmp_path / "Grüße 1.png"
    Image.fromarray(RAMP).save(path)
    misnamed = tmp_path / "really a png.jpg"
    misnamed.write_bytes(path.read_bytes())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all((pixels(source) == RAMP).all() for source in (path, str(path), misnamed))
    with open(path, "rb") as file:
        file.seek(0, io.SEEK_END)
        assert (pixels(file) == RAMP).all()
        assert not file.closed
        assert (pixels(file) == RAMP).all()


def test_no_file_stays_open(tmp_path, monkeypatch):
    opened = []

    def watched(*arguments):
        opened.append(open(*arguments))  # noqa: SIM115
        return opened[-1]

    monkeypatch.setattr(images, "open", watched, raising=False)
    (tmp_path / "frames.gif").write_bytes(saved(flat(RED), "GIF", save_all=True, append_images=[flat(BLUE)]))
    (tmp_path / "cut.tif").write_bytes(saved(Image.fromarray(RAMP), "TIFF")[:-100])
    load_image(tmp_path / "frames.gif")
    refused(tmp_path / "cut.tif", "cut.tif")
    assert [file.closed for file in opened] == [True, True]


ARRAYS = {
    "(H, W)": (RAMP[..., 0], gray(RAMP[..., 0])),
    "(H, W, 1)": (RAMP[..., :1], gray(RAMP[..., 0])),
    "(H, W, 3)": (RAMP, RAMP),
    "(H, W, 4)": (np.dstack([COLORS, OPAQUE_BUT_FIRST]).astype(np.uint8), over_white(COLORS, OPAQUE_BUT_FIRST)),
    "(1, 1)": (np.array([[7]], np.uint8), [[[7, 7, 7]]]),
    "bool": (RAMP > 127, (RAMP > 127) * 255),
    "uint16": (RAMP.astype(np.uint16) * 257, RAMP),
    "uint16, (H, W, 4)": (
        np.dstack([COLORS, OPAQUE_BUT_FIRST]).astype(np.uint16) * 257,
        over_white(COLORS, OPAQUE_BUT_FIRST),
    ),
    "float16": ((RAMP / 255).astype(np.float16), RAMP),
    "float32": ((RAMP / 255).astype(np.float32), RAMP),
    "float64": (RAMP / 255, RAMP),
    "a rounding error outside [0, 1]": (np.array([[-1e-7, 1 + 1e-7]]), [[[0] * 3, [255] * 3]]),
    "views": (RAMP[::-1, ::2], RAMP[::-1, ::2]),
    "columns first": (np.asfortranarray(RAMP), RAMP),
    "tensor, channels first": (torch.from_numpy(RAMP).permute(2, 0, 1), RAMP),
    "tensor, channels last": (torch.from_numpy(RAMP), RAMP),
    "tensor, (1, H, W)": (torch.from_numpy(RAMP[..., 0])[None], gray(RAMP[..., 0])),
    "tensor, (H, W)": (torch.from_numpy(RAMP[..., 0]), gray(RAMP[..., 0])),
    "tensor of floats that needs a gradient": (torch.tensor(RAMP / 255, requires_grad=True), RAMP),
    "tensor of bfloat16": (torch.ones(3, 5, 7, dtype=torch.bfloat16), np.full((5, 7, 3), 255)),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_arrays_and_tensors(kind):
    source, expected = ARRAYS[kind]
    assert_close(pixels(source), expected, 0)


def test_the_result_is_a_copy():
    array, image = RAMP.copy(), Image.fromarray(RAMP)
    from_array, from_image = load_image(array), load_image(image)
    array[:] = 0
    image.paste((0, 0, 0), (0, 0, *image.size))
    assert (np.asarray(from_array) == RAMP).all() and (np.asarray(from_image) == RAMP).all()


# --- refusals

NOT_PICTURES = {
    "nothing": (b"", "the bytes given", "empty"),
    "text": ("Größe: a line\n".encode() * 200, "text file"),
    "html": (b"\xef\xbb\xbf\n<!DOCTYPE html><html><body>404</body></html>", "web page", "download"),
    "svg": (b"<?xml version='1.0'?>\n<!-- by hand --><svg xmlns='x'></svg>", "SVG", "PNG"),
    "pdf": (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3", "PDF", "PNG"),
    "eps": (saved(flat(RED), "EPS"), "EPS", "PNG"),
    "heic": (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(90), "HEIC", "pillow-heif"),
    "heif": (b"\0\0\0\x18ftypmif1\0\0\0\0mif1heic" + bytes(90), "HEIC", "pillow-heif"),
    "avif": (b"\0\0\0\x18ftypavif\0\0\0\0avifmif1" + bytes(90), "AVIF", "pillow-heif"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
    "noise": (NOISE.bytes(4000), "format"),
    "zeros": (bytes(4000), "format"),
    "jpeg begun": (b"\xff\xd8", "incomplete"),
    "png without data": (png(5, 5), "incomplete"),
    "png of no pixels": (png(0, 5, (b"IDAT", zlib.compress(b""))), "incomplete"),
    "png with nonsense": (png(5, 5, (b"IDAT", b"nonsense")), "incomplete"),
    "address": ("https://example.org/cat.jpg", "https://example.org/cat.jpg", "download it first"),
    "data address": ("data:image/png;base64,AAAA", "address"),
    "missing": ("missing.png", "'missing.png'", "does not exist"),
    "empty name": ("", "does not exist"),
    "nul": ("a\0b.png", "check"),
    "contents as a name": ("x" * 100_000, "check"),
    "none": (None, "NoneType", "path"),
    "number": (3, "int", "path"),
    "list": ([[1, 2], [3, 4]], "list", "array"),
    "text stream": (io.StringIO("P1 1 1 1"), "text", "binary"),
    "reads text": (type("Odd", (), {"read": lambda self, n=-1: "text"})(), "cannot be read"),
    "(0, 5, 3)": (np.zeros((0, 5, 3), np.uint8), "no pixels"),
    "(5, 0)": (np.zeros((5, 0)), "no pixels"),
    "(5,)": (np.zeros(5), "(5,)", "shape"),
    "()": (np.array(1.0), "shape"),
    "(5, 5, 2)": (np.zeros((5, 5, 2)), "(5, 5, 2)", "shape"),
    "(3, 20, 30)": (np.zeros((3, 20, 30)), "(3, 20, 30)", "shape"),
    "a batch": (torch.zeros(2, 3, 8, 8), "(2, 3, 8, 8)", "one picture"),
    "either end": (torch.zeros(3, 8, 4), "(3, 8, 4)", "first or last"),
    "nan": (np.array([[0.0, np.nan]]), "nan", "finite"),
    "inf": (np.array([[0.0, np.inf]]), "inf", "finite"),
    "above 1": (np.array([[0.0, 1.01]]), "1.01", "0 and 1"),
    "below 0": (np.array([[-0.01, 1.0]]), "-0.01", "0 and 1"),
    "int64": (np.zeros((5, 5), int), "int64", "uint8"),
    "complex": (np.zeros((5, 5), complex), "complex128"),
    "objects": (np.full((5, 5), None), "object"),
    "PIL image of no pixels": (Image.new("RGB", (0, 5)), "0 × 5", "no pixels"),
}


@pytest.mark.parametrize("case", NOT_PICTURES)
def test_refusals(case):
    refused(*NOT_PICTURES[case])


def test_refusals_by_the_file_system(tmp_path, monkeypatch):
    refused(tmp_path, "folder")
    with open(__file__) as file:
        refused(file, "test_images.py", "binary")
    refused(file, "closed")
    (tmp_path / "a.png").write_bytes(saved(flat(RED), "PNG"))
    image = Image.open(tmp_path / "a.png")
    image.close()
    refused(image, "a.png", "closed")
    image = Image.open(io.BytesIO(saved(flat(RED), "PNG")))
    image.close()
    refused(image, "the PIL image given", "closed")
    page = io.BytesIO(b"<html>")
    page.seek(0, io.SEEK_END)
    refused(page, "web page")

    def forbidden(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(images, "open", forbidden, raising=False)
    error = refused(tmp_path / "a.png", "a.png", "permissions")
    assert isinstance(error.__cause__, PermissionError)


@pytest.mark.parametrize("size", [(9_000, 9_000), (9_500, 9_500), (20_000, 20_000), (2**31 - 1, 2**31 - 1)])
def test_too_many_pixels_are_refused_by_the_header(size):
    """The files hold no data, so only the header can be the reason; Pillow warns at 90 and raises at 179 megapixels."""
    before = Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES, list(warnings.filters)
    with warnings.catch_warnings(record=True) as leaked:
        warnings.simplefilter("always")
        refused(png(*size), "pixels", "smaller", "max_pixels")
    assert not leaked
    assert before == (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES, list(warnings.filters))


@pytest.mark.parametrize("side", [12, 20])
def test_pillows_own_limit_holds_as_well(side, monkeypatch):
    """Over the limit Pillow warns, over twice the limit it raises."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    refused(saved(flat(RED, (side, side)), "PNG"), "Pillow's own limit", "PIL.Image.MAX_IMAGE_PIXELS")


def test_the_limit_is_the_callers():
    picture = flat(RED, (10, 10))
    for source in (picture, saved(picture, "PNG"), np.asarray(picture), torch.zeros(3, 10, 10)):
        refused(source, "10 × 10", "99 pixels", max_pixels=99)
        assert load_image(source, max_pixels=100).size == (10, 10)


def test_a_phone_photograph_of_fifty_megapixels():
    data = saved(Image.new("L", (8160, 6120), 99), "JPEG")
    assert load_image(data).size == (8160, 6120)


ERRORS = [SyntaxError, OSError, ValueError, TypeError, struct.error, EOFError, MemoryError, IndexError, KeyError]
ERRORS += [OverflowError, zlib.error, RecursionError, AttributeError, NotImplementedError, Image.DecompressionBombError]


@pytest.mark.parametrize("kind", ERRORS)
def test_whatever_a_decoder_raises(kind, monkeypatch):
    def broken(*_):
        raise kind("at <_io.BytesIO object at 0x7f00deadbeef>")

    monkeypatch.setattr(ImageFile.ImageFile, "load", broken)
    for source in (saved(flat(RED), "BMP"), Image.open(io.BytesIO(saved(flat(RED), "BMP")))):
        assert isinstance(refused(source).__cause__, kind)


def test_an_interrupt_is_not_an_image_error(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(ImageFile.ImageFile, "load", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_image(saved(flat(RED), "BMP"))


# --- damaged files

SMOOTH = Image.fromarray(np.kron(RAMP[:6, :8], np.ones((4, 4, 1))).astype(np.uint8))
EXIF = Image.Exif()
EXIF[ExifTags.Base.Orientation] = 6
VICTIMS = {
    "jpeg": saved(SMOOTH, "JPEG", exif=EXIF),
    "progressive jpeg": saved(SMOOTH, "JPEG", progressive=True),
    "cmyk jpeg": saved(SMOOTH.convert("CMYK"), "JPEG"),
    "png": saved(Image.fromarray(np.dstack([RAMP, RAMP[..., 0]])), "PNG", exif=EXIF),
    "palette png": saved(palette(), "PNG", transparency=ALPHA.tobytes()),
    "deep png": deep_png(1000),
    "animated png": saved(flat(RED), "PNG", save_all=True, append_images=[flat(BLUE)]),
    "gif": saved(SMOOTH, "GIF", save_all=True, append_images=[flat(BLUE, SMOOTH.size)]),
    "bmp": saved(SMOOTH, "BMP"),
    "tiff": saved(SMOOTH, "TIFF", exif=EXIF),
    "tiff lzw": saved(SMOOTH, "TIFF", compression="tiff_lzw"),
    "webp": saved(SMOOTH, "WEBP", exif=EXIF),
    "lossless webp": saved(SMOOTH.convert("RGBA"), "WEBP", lossless=True),
}


def outcome(data):
    """The pixels or the refusal: anything else is raised."""
    try:
        image = load_image(data, max_pixels=1_000_000)
    except ImageError as error:
        return str(error)
    assert image.mode == "RGB" and image.width * image.height > 0
    return image.tobytes()


def damaged(data):
    """Cut short at sixty places; with all eight bits, and with one, of up to 160 bytes turned over."""
    for length in np.linspace(0, len(data) - 1, 60).astype(int):
        yield data[:length]
    for step, position in enumerate([*range(100), *np.linspace(100, len(data) - 1, 60).astype(int)]):
        for mask in (0xFF, 1 << step % 8):
            broken = bytearray(data)
            broken[min(position, len(data) - 1)] ^= mask
            yield bytes(broken)


@pytest.mark.parametrize("victim", VICTIMS)
def test_damaged_files_give_rgb_or_an_image_error(victim, capfd):
    with warnings.catch_warnings(record=True) as leaked:
        warnings.simplefilter("always")
        outcomes = [outcome(data) for data in damaged(VICTIMS[victim])]
    refusals = [one for one in outcomes if isinstance(one, str)]
    assert len(outcomes) == 380 and refusals
    assert all(one.endswith(".") and "\n" not in one for one in refusals)
    assert not leaked
    if victim != "tiff lzw":  # libtiff itself writes to the standard error
        assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("victim", sorted(VICTIMS.keys() - {"gif", "animated png"}))
def test_half_a_file_is_refused(victim):
    """Half of the two animations may hold their whole first frame."""
    refused(VICTIMS[victim][: len(VICTIMS[victim]) // 2], "incomplete or damaged")


def test_threads_leave_the_warnings_as_they_were(monkeypatch):
    """Every thread lingers where it has the warnings off, so that without a lock they would leave out of order."""
    opened, before = Image.open, list(warnings.filters)
    monkeypatch.setattr(Image, "open", lambda file: time.sleep(next(pauses)) or opened(file))
    pauses = itertools.cycle([0.002, 0, 0.001])
    work = [VICTIMS["jpeg"], VICTIMS["palette png"], VICTIMS["tiff"][:-9], VICTIMS["animated png"]] * 25
    with ThreadPoolExecutor(6) as pool:
        done = list(pool.map(outcome, work))
    assert done == [outcome(data) for data in work]
    assert list(warnings.filters) == before


# --- preprocessing


def model_with(**config):
    """Stands for any timm model: only its `pretrained_cfg` and its number of channels are asked for."""
    model = nn.Identity()
    model.pretrained_cfg = {"input_size": (3, 64, 64), **config}
    return model


CONFIGS = {
    "timm's vit": timm.get_pretrained_cfg("vit_tiny_patch16_224.augreg_in21k_ft_in1k").to_dict(),
    "timm's deit": timm.get_pretrained_cfg("deit_tiny_patch16_224.fb_in1k").to_dict(),
    "timm's resnet": timm.get_pretrained_cfg("resnet18.tv_in1k").to_dict(),
    "squash": {"crop_mode": "squash", "crop_pct": 0.9},
    "border": {"crop_mode": "border", "crop_pct": 1.0, "mean": (0.4, 0.5, 0.6)},
    "not square": {"input_size": (3, 48, 96), "interpolation": "bilinear", "crop_pct": 0.8},
}


@pytest.mark.parametrize("config", CONFIGS)
def test_preprocess_is_timms_own_transform(config):
    model = model_with(**CONFIGS[config])
    transform = create_transform(**resolve_model_data_config(model), is_training=False)
    photographs = [Image.fromarray(NOISE.integers(0, 256, (h, w, 3), np.uint8)) for h, w in ((70, 90), (300, 201))]
    batch = preprocess(model, photographs)
    assert batch.dtype == torch.float32
    assert torch.equal(batch, torch.stack([transform(photograph) for photograph in photographs]))
    assert torch.equal(preprocess(model, saved(photographs[1], "PNG")), batch[1:])


def test_preprocess_feeds_a_model():
    model = timm.create_model("test_vit").eval()
    with torch.inference_mode():
        assert model(preprocess(model, [RAMP, Image.fromarray(RAMP)])).shape == (2, 1000)


def test_preprocess_of_the_whole_picture_squeezes_it_and_cuts_nothing_off():
    model = timm.create_model("vit_tiny_patch16_224", embed_dim=48, depth=1)
    picture = samples()["chelsea"]
    squeezed = np.asarray(picture.resize((80, 48), Image.Resampling.BICUBIC)) / 127.5 - 1
    batch = preprocess(model, picture, size=(48, 80), whole=True)
    np.testing.assert_allclose(batch[0].permute(1, 2, 0), squeezed, atol=1e-5)


def test_preprocess_without_a_configuration_takes_timms_defaults():
    transform = create_transform((3, 224, 224), interpolation="bicubic", crop_pct=0.875)
    assert torch.equal(preprocess(nn.Identity(), RAMP)[0], transform(Image.fromarray(RAMP)))


def test_another_size_covers_and_crops():
    """Linear ramps stay linear: output pixel i shows the source at (i + cut + ½) · scale − ½."""
    y, x = np.mgrid[:160, :240]
    ramps = np.dstack([x, y, x * 0]).astype(np.uint8)
    seen = restore(model := model_with(crop_pct=0.8), preprocess(model, ramps, size=(40, 80)))[0].astype(float)
    assert seen.shape == (40, 80, 3)
    # covers 40/0.8 × 80/0.8 = 50 × 100 at scale 240/100, so 160/2.4 = 66.7 rows; 67 − 40 and 100 − 80 are cut off
    assert_close(seen[..., 0], np.tile((np.arange(80) + 10 + 0.5) * 2.4 - 0.5, (40, 1)), 1)
    assert_close(seen[..., 1], np.tile((np.arange(40) + 14 + 0.5)[:, None] * 160 / 67 - 0.5, (1, 80)), 1)


def test_another_size_that_stands_upright():
    halves = corners("ABAB", 200, 100)
    model = model_with(crop_pct=1.0)
    seen = restore(model, preprocess(model, halves, size=(56, 28)))[0]
    assert (seen[:, :12] == RED).all() and (seen[:, 16:] == GREEN).all()


def test_another_square_size_is_timms_as_well():
    model = model_with(crop_pct=0.9)
    transform = create_transform(**resolve_model_data_config(model) | {"input_size": (3, 96, 96)})
    assert torch.equal(preprocess(model, RAMP, size=(96, 96))[0], transform(Image.fromarray(RAMP)))


@pytest.mark.parametrize(
    ("mean", "std"), [((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), ((0.5,) * 3, (0.5,) * 3), ((0,) * 3, (1,) * 3)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_restore_inverts_preprocess(mean, std, dtype):
    model = model_with(crop_pct=1.0, mean=mean, std=std)
    levels = np.arange(64 * 64 * 3, dtype=np.int64).reshape(64, 64, 3).astype(np.uint8)
    restored = restore(model, preprocess(model, levels).to(dtype).requires_grad_())
    assert restored.shape == (1, 64, 64, 3) and restored.dtype == np.uint8
    assert_close(restored[0].astype(int), levels, 1)
    assert restore(model, torch.full((2, 3, 5, 7), 99.0)).min() == 255


def test_models_of_one_channel_see_gray():
    model = timm.create_model("test_vit", in_chans=1)
    model.in_chans = 1  # timm writes this down since 1.0.25
    config = resolve_model_data_config(model)
    mean, std = np.mean(config["mean"]), np.mean(config["std"])
    batch = preprocess(model, [np.full((200, 300), 99, np.uint8), flat((200, 100, 50), (200, 200))])
    assert batch.shape == (2, 1, *config["input_size"][1:])
    luma = 0.299 * 200 + 0.587 * 100 + 0.114 * 50
    for picture, level in zip(batch, (99, luma), strict=True):
        assert_close(picture.numpy(), np.full(picture.shape, (level / 255 - mean) / std), 0.5 / 255 / std + 1e-6)
    assert_close(restore(model, batch)[0].astype(int), np.full((*batch.shape[2:], 3), 99), 1)
    mnist = model_with(input_size=(1, 28, 28), mean=(0.13,), std=(0.31,), crop_pct=1.0)
    assert_close(preprocess(mnist, np.zeros((28, 28))).numpy(), np.full((1, 1, 28, 28), -0.13 / 0.31), 1e-6)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: preprocess(model_with(), []), "empty"),
        (lambda: preprocess(model_with(), [RAMP, "missing.png"]), "missing.png"),
        (lambda: preprocess(model_with(), flat(RED, (1001, 10))), "1001 × 10"),
        (lambda: preprocess(model_with(input_size=(4, 8, 8)), RAMP), "4"),
        (lambda: preprocess(model_with(), RAMP, size=224), "224"),
        (lambda: preprocess(model_with(), RAMP, size=(224, 0)), "(224, 0)"),
        (lambda: preprocess(model_with(), RAMP, size=(3, 224, 224)), "(3, 224, 224)"),
        (lambda: restore(model_with(), torch.zeros(3, 8, 8)), "(3, 8, 8)"),
        (lambda: restore(model_with(), torch.zeros(1, 1, 8, 8)), "(1, 1, 8, 8)"),
    ],
)
def test_preprocessing_refusals(call, words):
    with pytest.raises(ImageError, match=re.escape(words)) as caught:
        call()
    assert re.fullmatch(r"Expected [^\n]+\.", str(caught.value))


# --- samples and imports


def test_samples_are_the_installed_photographs(monkeypatch):
    def offline(*_):
        raise AssertionError("the network was asked for")

    monkeypatch.setattr(socket, "socket", offline)
    photographs = samples()
    assert list(photographs) == ["astronaut", "chelsea", "coffee", "rocket", "china", "flower"]
    assert all(p.mode == "RGB" and min(p.size) >= 300 and np.asarray(p).std() > 20 for p in photographs.values())
    from skimage import data
    from sklearn.datasets import load_sample_image

    for name in ("astronaut", "chelsea", "coffee", "rocket"):
        assert (np.asarray(photographs[name]) == getattr(data, name)()).all()
    for name in ("china", "flower"):
        assert (np.asarray(photographs[name]) == load_sample_image(f"{name}.jpg")).all()


def test_the_module_alone_imports_nothing_heavy():
    code = f"import runpy, sys; runpy.run_path({str(Path(images.__file__))!r}); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "torchvision", "timm", "skimage", "sklearn", "matplotlib"} & set(loaded)
