"""Images of every format and mode equal pixels computed by hand."""

import io
import struct
import warnings
import zlib

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image, ImageCms, ImageFile
from support import BLUE, GREEN, NOISE, P3, RAMP, RED, WIDE, YELLOW, assert_close, flat, png, saved

from vitlens.images import ImageError, load_image, rgb, samples

CORNERS = {"A": RED, "B": GREEN, "C": BLUE, "D": YELLOW}


def corners(letters="ABCD", width=64, height=32):
    """Four flat quadrants: upper left, upper right, lower left, lower right."""
    colors = np.array([CORNERS[letter] for letter in letters], np.uint8).reshape(2, 2, 3)
    return Image.fromarray(colors.repeat(height // 2, 0).repeat(width // 2, 1))


def pixels(source, **options):
    image = load_image(source, **options)
    assert image.mode == "RGB" and type(image) is Image.Image and not image.info
    return np.asarray(image).astype(int)


def noted_pixels(source):
    notes = []
    return pixels(source, on_note=notes.append), " ".join(notes)


def gray(levels):
    return np.repeat(np.asarray(levels)[..., None], 3, -1)


def refused(source, *words, **options):
    with pytest.raises(ImageError) as caught:
        load_image(source, **options)
    sentence = str(caught.value)
    assert (
        sentence.startswith("Expected an image, but ")
        and len(sentence) < 450
        and "\n" not in sentence
    )
    assert all(word in sentence for word in words), sentence


UPRIGHT = {1: "ABCD", 2: "BADC", 3: "DCBA", 4: "CDAB", 5: "ACBD", 6: "CADB", 7: "DBCA", 8: "BDAC"}
ORIENTED = {
    "JPEG": {"quality": 95, "subsampling": 0},
    "PNG": {},
    "TIFF": {},
    "WEBP": {"lossless": True},
}


def oriented(format, orientation):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    return saved(corners(), format, exif=exif, **ORIENTED[format])


def test_load_image_applies_exif_orientation():
    """The EXIF standard defines the positions of the first row and column of the file."""
    for format in ORIENTED:
        for orientation, letters in UPRIGHT.items():
            width, height = (64, 32) if orientation < 5 else (32, 64)
            expected = np.asarray(corners(letters, width, height))
            data = oriented(format, orientation)
            for source in (data, Image.open(io.BytesIO(data))):
                once = load_image(source)
                assert_close(pixels(source), expected, 8)
                assert (pixels(once) == np.asarray(once)).all(), "turned twice"
    for exif in (
        b"Exif\0\0garbage",
        b"Exif\0\0II*\0\x08\0\0\0\xff\xff",
        b"Exif\0\0MM\0*\xff\xff\xff\xff",
    ):
        assert_close(pixels(saved(corners(), "PNG", exif=exif)), np.asarray(corners()), 0)
    for orientation in (0, 9, 65535):
        assert_close(pixels(oriented("PNG", orientation)), np.asarray(corners()), 0)


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


def cmyk_as_rgb(c, m, y, k):
    return [(255 - ink) * (255 - k) / 255 for ink in (c, m, y)]


def deep_png(level):
    """PNG of `DEEP` in 16-bit gray with one transparent level."""
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in DEEP)
    return png(
        3, 2, (b"tRNS", struct.pack(">H", level)), (b"IDAT", zlib.compress(rows)), depth=16, color=0
    )


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
    "P, one index transparent": (
        lambda: noted(palette(), transparency=0),
        over_white(COLORS, OPAQUE_BUT_FIRST),
        0,
    ),
    "P, alpha in bytes": (
        lambda: noted(palette(), transparency=ALPHA.tobytes()),
        over_white(COLORS),
        1,
    ),
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
    "CMYK": (
        lambda: Image.new("CMYK", (1, 1), (10, 100, 200, 60)),
        [[cmyk_as_rgb(10, 100, 200, 60)]],
        1,
    ),
    "LAB": (lambda: Image.new("LAB", (1, 1), (0, 128, 128)), [[(0, 0, 0)]], 2),
    "I;16": (lambda: Image.fromarray(DEEP), gray(DEEP / 257), 0.5),
    "I;16B": (
        lambda: Image.frombytes("I;16B", (3, 2), DEEP.astype(">u2").tobytes()),
        gray(DEEP / 257),
        0.5,
    ),
    "I;16, one level transparent": (
        lambda: Image.open(io.BytesIO(deep_png(1000))),
        gray(np.where(DEEP == 1000, 65535, DEEP) / 257),
        0.5,
    ),
    "I": (lambda: Image.fromarray(DEEP.astype(np.int32)), gray(DEEP / 257), 0.5),
    "F": (lambda: Image.fromarray((LEVELS / 255).astype(np.float32)), gray(LEVELS), 0),
}
FILES = {
    "PNG": [
        "1",
        "L",
        "L, one level transparent",
        "LA",
        "P",
        "P, one index transparent",
        "P, alpha in bytes",
        "RGB",
    ]
    + ["RGB, one color transparent", "RGBA", "I;16"],
    "TIFF": ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "I;16B", "I", "F", "LAB"],
    "BMP": ["1", "L", "P", "RGB"],
    "GIF": ["1", "L", "P", "P, one index transparent"],
    "PPM": ["1", "L", "RGB"],
    "TGA": ["L", "LA", "P", "RGB", "RGBA"],
    "WEBP": ["RGB", "RGBA"],
    "ICO": ["RGBA"],
}
SAVING = {
    "WEBP": {"lossless": True, "exact": True},
    "ICO": {"bitmap_format": "bmp", "sizes": [(3, 2)]},
}


def test_load_image_reads_every_mode_and_format():
    for make, expected, tolerance in MODES.values():
        image = make()
        image.load()
        before = image.mode, image.tobytes(), dict(image.info)
        assert_close(pixels(image), expected, tolerance)
        assert (image.mode, image.tobytes(), dict(image.info)) == before
    for format, mode in ((format, mode) for format, modes in FILES.items() for mode in modes):
        make, expected, tolerance = MODES[mode]
        image = make()
        options = {key: image.info[key] for key in ("transparency",) if key in image.info}
        assert_close(
            pixels(saved(image, format, **options, **SAVING.get(format, {}))), expected, tolerance
        )


def test_load_image_divides_every_16_bit_level():
    levels = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    expected = gray(np.floor(levels / 257 + 0.5))
    for source in (
        levels,
        Image.fromarray(levels),
        saved(Image.fromarray(levels), "PNG"),
        levels.astype(">u2"),
    ):
        assert (pixels(source) == expected).all()
    dark, note = noted_pixels(levels // 16)
    assert (
        dark == gray(np.floor(levels // 16 / 257 + 0.5))
    ).all() and "levels up to 4,095 of 65,535" in note


def test_load_image_inverts_adobe_cmyk_and_takes_the_first_frame():
    data = saved(Image.new("CMYK", (16, 16), (10, 100, 200, 60)), "JPEG", quality=100)
    assert b"Adobe" in data
    assert_close(pixels(data), np.broadcast_to(cmyk_as_rgb(10, 100, 200, 60), (16, 16, 3)), 4)
    for format in ("GIF", "WEBP", "PNG", "TIFF"):
        data = saved(flat(RED), format, save_all=True, append_images=[flat(BLUE), flat(GREEN)])
        first, note = noted_pixels(data)
        assert_close(first, np.asarray(flat(RED)), 3)
        assert "holds 3 images; the first is shown" in note


def test_load_image_reads_files_and_streams(tmp_path):
    class Pipe(io.RawIOBase):
        """A stream that cannot seek."""

        def __init__(self, data):
            self.readinto = io.BytesIO(data).readinto

        def readable(self):
            return True

    path = tmp_path / "Grüße 1.png"
    Image.fromarray(RAMP).save(path)
    data = path.read_bytes()
    (misnamed := tmp_path / "really a png.jpg").write_bytes(data)
    for source in (
        path,
        str(path),
        misnamed,
        data,
        bytearray(data),
        memoryview(data),
        io.BytesIO(data),
    ):
        assert (pixels(source) == RAMP).all()
    assert (pixels(io.BufferedReader(Pipe(data))) == RAMP).all()
    with open(path, "rb") as file:
        file.seek(0, io.SEEK_END)
        assert (pixels(file) == RAMP).all() and not file.closed and (pixels(file) == RAMP).all()


ARRAYS = {
    "(H, W)": (RAMP[..., 0], gray(RAMP[..., 0])),
    "(H, W, 1)": (RAMP[..., :1], gray(RAMP[..., 0])),
    "(H, W, 3), a view": (RAMP[::-1, ::2], RAMP[::-1, ::2]),
    "(H, W, 4)": (
        np.dstack([COLORS, OPAQUE_BUT_FIRST]).astype(np.uint8),
        over_white(COLORS, OPAQUE_BUT_FIRST),
    ),
    "bool": (RAMP > 127, (RAMP > 127) * 255),
    "uint16": (RAMP.astype(np.uint16) * 257, RAMP),
    "float16": ((RAMP / 255).astype(np.float16), RAMP),
    "float64": (np.asfortranarray(RAMP / 255), RAMP),
    "a rounding error outside [0, 1]": (np.array([[-1e-7, 1 + 1e-7]]), [[[0] * 3, [255] * 3]]),
    "tensor, channels first": (torch.from_numpy(RAMP).permute(2, 0, 1), RAMP),
    "tensor, (1, H, W)": (torch.from_numpy(RAMP[..., 0])[None], gray(RAMP[..., 0])),
    "tensor of floats that needs a gradient": (torch.tensor(RAMP / 255, requires_grad=True), RAMP),
    "tensor of bfloat16": (torch.ones(3, 5, 7, dtype=torch.bfloat16), np.full((5, 7, 3), 255)),
}


def test_load_image_reads_arrays_and_tensors():
    for source, expected in ARRAYS.values():
        assert_close(pixels(source), expected, 0)
    array, image = RAMP.copy(), Image.fromarray(RAMP)
    from_array, from_image = load_image(array), load_image(image)
    array[:] = 0
    image.paste((0, 0, 0), (0, 0, *image.size))
    assert (np.asarray(from_array) == RAMP).all() and (np.asarray(from_image) == RAMP).all(), (
        "copies"
    )


NOT_IMAGES = {
    "nothing": (b"", "the bytes given"),
    "text": ("Größe: a line\n".encode() * 200, "format"),
    "eps": (saved(flat(RED), "EPS"), "EPS", "PNG"),
    "heic": (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(90), "pillow-heif"),
    "jpeg begun": (b"\xff\xd8", "damaged"),
    "png without data": (png(5, 5), "damaged"),
    "png of no pixels": (png(0, 5, (b"IDAT", zlib.compress(b""))), "no format"),
    "address": ("https://example.org/cat.jpg", "https://example.org/cat.jpg"),
    "missing": ("missing.png", "'missing.png'", "No such file"),
    "contents as a name": ("x" * 100_000, "cannot be read"),
    "none": (None, "NoneType"),
    "(0, 5, 3)": (np.zeros((0, 5, 3), np.uint8), "image"),
    "(5, 5, 2)": (np.zeros((5, 5, 2)), "(5, 5, 2)", "shape"),
    "a batch": (torch.zeros(2, 3, 8, 8), "(2, 3, 8, 8)", "one image"),
    "either end": (torch.zeros(3, 8, 4), "(3, 8, 4)", "first or last"),
    "nan": (np.array([[0.0, np.nan]]), "nan", "finite"),
    "above 1": (np.array([[0.0, 1.01]]), "1.01", "0 and 1"),
    "int64": (np.zeros((5, 5), int), "int64", "uint8"),
    "I above": (Image.new("I", (2, 2), 65536), "65536", "0 … 65535"),
    "F above": (Image.new("F", (2, 2), 255), "255", "0 and 1"),
}


def test_load_image_refuses_other_sources(tmp_path):
    for source, *words in NOT_IMAGES.values():
        refused(source, *words)
    refused(tmp_path, "directory")
    image = Image.open(io.BytesIO(saved(flat(RED), "PNG")))
    image.close()
    refused(image, "ImageFile given", "closed")


def test_load_image_refuses_too_many_pixels_by_the_header(monkeypatch):
    """The files hold no data, so only the header can be the reason. Pillow warns at 90 and raises at 179 megapixels."""
    image = flat(RED, (10, 10))
    for source in (image, saved(image, "PNG"), np.asarray(image), torch.zeros(3, 10, 10)):
        refused(source, "10 × 10", "99", max_pixels=99)
        assert load_image(source, max_pixels=100).size == (10, 10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for side in (9_000, 9_500, 20_000, 2**31 - 1):
            refused(png(side, side), "pixels")
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
        refused(saved(flat(RED, (12, 12)), "PNG"), "12 × 12")


def test_load_image_turns_decoder_errors_into_image_errors(monkeypatch):
    for kind in (SyntaxError, struct.error, MemoryError, KeyError, RecursionError):

        def broken(*_, kind=kind):
            raise kind("broken")

        monkeypatch.setattr(ImageFile.ImageFile, "load", broken)
        refused(saved(flat(RED), "BMP"), kind.__name__)


def test_load_image_refuses_half_a_file():
    smooth = Image.fromarray(np.kron(RAMP[:6, :8], np.ones((4, 4, 1))).astype(np.uint8))
    for format in ("JPEG", "PNG", "BMP", "TIFF", "WEBP"):
        whole = saved(smooth, format)
        refused(whole[: len(whole) // 2], "damaged")


SRGB = ((0.43607, 0.22249, 0.01392), (0.38515, 0.71687, 0.09708), (0.14307, 0.06061, 0.71410))


def by_hand(values, primaries, gamma):
    """RGB in these primaries as sRGB, by the formulas of IEC 61966-2-1."""
    linear = (values / 255.0) ** gamma
    linear = (linear @ np.array(primaries) @ np.linalg.inv(np.array(SRGB))).clip(0, 1)
    return 255 * np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)


def ramp(icc_profile, kind="PNG", **options):
    return saved(Image.fromarray(RAMP), kind, icc_profile=icc_profile, **options)


def test_load_image_converts_colors_to_srgb():
    for kind in ("PNG", "TIFF", "WEBP"):
        colors, note = noted_pixels(
            ramp(WIDE, kind, **{"lossless": True} if kind == "WEBP" else {})
        )
        assert (
            np.abs(colors - by_hand(RAMP, P3, 1.8)).max() <= 2 and np.abs(colors - RAMP).max() > 20
        )
        assert "was converted from the color profile “Wide” to sRGB" in note
    same = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    colors, note = noted_pixels(ramp(same))
    assert (colors == RAMP).all() and note == ""
    assert (np.asarray(rgb(Image.open(io.BytesIO(ramp(WIDE))))) == RAMP).all(), (
        "data sets ignore profiles, like timm"
    )
    alpha = np.full((*RAMP.shape[:2], 1), 128, np.uint8)
    colors, note = noted_pixels(
        saved(Image.fromarray(np.concatenate([RAMP, alpha], -1)), "PNG", icc_profile=WIDE)
    )
    share = 128 / 255
    assert np.abs(colors - (share * by_hand(RAMP, P3, 1.8) + (1 - share) * 255)).max() <= 2
    assert "to sRGB; was laid over white where it is transparent." in note


def test_load_image_ignores_damaged_and_misfitting_profiles():
    image = Image.fromarray(RAMP)
    for bad in (b"nonsense" * 40, WIDE[:300]):
        colors, note = noted_pixels(ramp(bad))
        assert (colors == RAMP).all() and "profile that is damaged or does not fit" in note
    for _ in range(50):
        broken = bytearray(WIDE)
        for place in NOISE.integers(0, len(WIDE), 4):
            broken[place] = NOISE.integers(256)
        image.info["icc_profile"] = bytes(broken)
        assert pixels(image).shape == RAMP.shape
    gray_image = Image.fromarray(RAMP[..., 0])
    assert (
        "was ignored"
        in noted_pixels(saved(gray_image.convert("I;16"), "TIFF", icc_profile=WIDE))[1]
    )
    colors, note = noted_pixels(
        saved(gray_image, "PNG", icc_profile=WIDE)
    )  # gray with the tone curve of the profile
    assert (
        np.abs(colors - by_hand(np.repeat(RAMP[..., :1], 3, -1), P3, 1.8)).max() <= 2
        and "to sRGB" in note
    )


def test_samples_equal_the_installed_photographs():
    photographs = samples()
    assert list(photographs) == ["astronaut", "chelsea", "coffee", "rocket", "china", "flower"]
    assert all(
        p.mode == "RGB" and min(p.size) >= 300 and np.asarray(p).std() > 20
        for p in photographs.values()
    )
    from skimage import data
    from sklearn.datasets import load_sample_image

    for name in ("astronaut", "chelsea", "coffee", "rocket"):
        assert (np.asarray(photographs[name]) == getattr(data, name)()).all()
    for name in ("china", "flower"):
        assert (np.asarray(photographs[name]) == load_sample_image(f"{name}.jpg")).all()
