"""Open pictures of any kind as RGB."""

from __future__ import annotations

import io
import os
import re
import threading
import warnings
from collections.abc import Callable
from contextlib import contextmanager, nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageCms, ImageOps, UnidentifiedImageError

MAX_PIXELS = 80_000_000
"""The largest picture accepted unless told otherwise: a 50-megapixel phone photograph and some more. It lies below
Pillow's own limit (`PIL.Image.MAX_IMAGE_PIXELS`, 89 megapixels), which is respected and never changed."""

MAX_ELONGATION = 100
"""Largest ratio of the sides of a picture to crop: resizing the short side of a strip takes memory without bound."""


class ImageError(ValueError):
    """Something is not a picture that can be used. The message says why, and what to do."""

    @classmethod
    def about(cls, name: str, problem: str) -> ImageError:
        return cls(f"Expected an image, but {name} {problem}.")


_ROUNDING = 1e-4  # floats may leave [0, 1] by this much, as they do after a bicubic resize
_DRAWINGS = {"EPS", "WMF"}  # to decode these, Pillow runs another program on them
_DAMAGED = "is incomplete or damaged; download or export it again"
_BY_ERROR = {
    FileNotFoundError: "does not exist; check its name and the folder it is looked for in",
    IsADirectoryError: "is a folder; give one of the pictures in it",
    PermissionError: "may not be read by this user; change its permissions or copy it",
    MemoryError: "does not fit into memory; make it smaller",
    (Image.DecompressionBombError, Image.DecompressionBombWarning): "has more pixels than Pillow's own limit; make it "
    "smaller, or, if you trust it, raise both PIL.Image.MAX_IMAGE_PIXELS and max_pixels",
}
_BY_FIRST_BYTES = {
    rb"$": "is empty; download or export it again",
    rb"....ftyp(hei|hev|mif1|msf1)": "is HEIC, which Pillow cannot read alone, or is damaged; install the package "
    "pillow-heif and call pillow_heif.register_heif_opener() first, or export it as JPEG",
    rb"....ftypavi": "is AVIF, which this Pillow cannot read, or is damaged; install Pillow 11.3 or later (or "
    "pillow-heif before 1.0), or export it as JPEG",
    rb"%PDF": "is a PDF document; export the page as PNG",
    rb"[^<]{0,9}<(svg|\?xml.*<svg|!--.*<svg|!doctype svg)": "is an SVG drawing; export it as PNG",
    rb"[^<]{0,9}<(!doctype|html|head|\?xml|!--)": "is a web page (HTML); download the picture itself",
    rb"version https://git-lfs": "is only a Git LFS pointer; run git lfs pull to have the picture itself",
    rb"\xff\xd8|\x89PNG|GIF8|RIFF|II\*\0|MM\0\*|BM.{4}\0": _DAMAGED,
    rb"[\t\n\r -~][\t\n\r -~\x80-\xff]*$": "is a text file; give a picture such as a JPEG or PNG file",
    rb"": "is in no format that can be read here, or is damaged; give a JPEG, PNG, WebP, GIF, BMP or TIFF file",
}
_SAMPLES = {
    "astronaut": ("skimage", "data/astronaut.png"),
    "chelsea": ("skimage", "data/chelsea.png"),
    "coffee": ("skimage", "data/coffee.png"),
    "rocket": ("skimage", "data/rocket.jpg"),
    "china": ("sklearn", "datasets/images/china.jpg"),
    "flower": ("sklearn", "datasets/images/flower.jpg"),
}
# `warnings.catch_warnings` swaps process-wide state: two threads inside it at once could leave warnings off for good.
_WARNINGS = threading.RLock()


def load_image(source, *, max_pixels: int = MAX_PIXELS, on_note: Callable[[str], None] | None = None) -> Image.Image:
    """The picture in `source` as a new, fully loaded RGB image: upright, opaque, in sRGB, without metadata.

    `source` is a path, the bytes of a file, a binary file object (read from its beginning, left open), a PIL image
    (left as it is), a numpy array (H, W), (H, W, 1), (H, W, 3) or (H, W, 4) of bool, uint8, uint16 or floats in
    [0, 1], or a torch tensor of the same kinds, channels last or first.

    The EXIF orientation is applied (an EXIF block that makes no sense counts as upright). Transparency is laid over
    white. Gray of 16 bits (PIL modes `I;16` and `I`) is divided by 257 and floats (mode `F`) are multiplied by 255,
    both rounded and never clipped or stretched. Of animations and multi-page files the first frame is taken, of a PIL
    image the current one. Colors are converted from an embedded color profile to sRGB. `on_note`
    is called with a sentence about what was done to the picture, or is to be known of it, if there is anything.

    Raises `ImageError`, and nothing else, for everything that is not such a picture and for more than `max_pixels`
    pixels or Pillow's own limit; both are compared with the size in the header, before anything is decoded.
    """
    name, head = _name(source), None
    notes: list[str] = []
    try:
        if isinstance(source, np.ndarray) or hasattr(source, "requires_grad"):
            found = rgb(_from_array(source, name, max_pixels, notes), name, notes)
        elif isinstance(source, Image.Image):
            _check_size(source.size, name, max_pixels)
            with _quiet():
                found = rgb(source, name, notes, profiles=True)
        else:
            with _opened(source, name) as file:
                file, head = _rewound(file, name)
                with _quiet(), Image.open(file) as image:
                    _check_size(image.size, name, max_pixels)
                    if image.format in _DRAWINGS:
                        raise ImageError.about(name, f"is a drawing ({image.format}); export it as PNG")
                    _note_depth(image, notes)
                    found = rgb(image, name, notes, profiles=True)
                    with suppress(Exception):  # the picture is there, whatever else the file holds
                        if on_note and image.format != "MPO" and image.n_frames > 1:  # telephones add previews
                            notes.append(f"holds {image.n_frames} pictures; the first is shown")
    except ImageError:
        raise
    except Exception as error:  # decoders raise a dozen unrelated types on damaged files
        raise ImageError.about(name, _problem(error, head)) from error
    if notes and on_note is not None:
        on_note(f"{name[0].upper()}{name[1:]} {'; '.join(notes)}.")
    return found


def samples() -> dict[str, Image.Image]:
    """Six photographs by name, always in the same order, from the files that scikit-image and scikit-learn install.

    Nothing is downloaded; one that an installed version does not ship is left out. Color profiles are not applied, as
    those packages do not apply them. `skimage.data` tells where the first four come from,
    `sklearn.datasets.load_sample_images` where "china" and "flower" do.
    """
    files = {name: Path(find_spec(package).origin).parent / path for name, (package, path) in _SAMPLES.items()}
    return {name: rgb(Image.open(file)) for name, file in files.items() if file.is_file()}


def _name(source) -> str:
    """What to call `source` in a message: its file name if it has one, never its contents."""
    if isinstance(source, (bytes, bytearray, memoryview)):
        return "the content of the bytes given"
    image = isinstance(source, Image.Image)
    path = source if isinstance(source, (str, os.PathLike)) else getattr(source, "filename" if image else "name", None)
    if isinstance(path, (str, os.PathLike)) and (path or path is source):
        text = os.fsdecode(path)
        return repr(text if len(text) <= 100 else f"{text[:60]}…{text[-39:]}")
    return f"the {'PIL image' if image else type(source).__name__} given"


def _problem(error: Exception, head: bytes | None) -> str:
    """What is wrong and what to do, from the error and the first bytes of the file (None if they were never read)."""
    if known := [problem for kind, problem in _BY_ERROR.items() if isinstance(error, kind)]:
        return known[0]
    if head is None:
        return "cannot be read; check that it is what you meant to give, complete and not closed"
    if not isinstance(error, UnidentifiedImageError):
        return _DAMAGED
    return next(text for start, text in _BY_FIRST_BYTES.items() if re.match(start, head, re.DOTALL | re.IGNORECASE))


@contextmanager
def _quiet():
    """Silence warnings in this block, but turn Pillow's warning of too many pixels into an error."""
    with _WARNINGS, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield


def _opened(source, name: str):
    """A context manager of `source` as a binary file object, which closes it if it was opened here."""
    if isinstance(source, (bytes, bytearray, memoryview)):
        return io.BytesIO(source)
    if hasattr(source, "read") and not isinstance(source, os.PathLike):
        return nullcontext(source)
    if not isinstance(source, (str, os.PathLike)):
        raise ImageError.about(name, "is no picture; give a path, bytes, a binary file object, an array or a PIL image")
    if re.match(r"\w{2,}:/|data:", os.fsdecode(source)):
        raise ImageError.about(name, "is an address and not a file; download it first and give the file")
    return open(source, "rb")


def _rewound(file, name: str) -> tuple[io.IOBase, bytes]:
    """`file`, or a copy in memory of one that cannot go back (a pipe, a download), and its first bytes."""
    try:
        file.seek(0)
    except (AttributeError, io.UnsupportedOperation):
        file = io.BytesIO(file.read())
    head = "" if isinstance(file, io.TextIOBase) else file.read(1024)
    if isinstance(head, str):
        raise ImageError.about(name, 'is open as text; open it in binary mode, "rb"')
    return file, head


def _check_size(size: tuple[int, int], name: str, max_pixels: int) -> None:
    width, height = size
    if width * height == 0:
        raise ImageError.about(name, f"is {width} × {height} and so has no pixels; give one that has some")
    if width * height > max_pixels:
        limit = f"over the limit of {max_pixels:,} pixels"
        raise ImageError.about(name, f"is {width} × {height}, {limit}; make it smaller or raise max_pixels")


def _from_array(source, name: str, max_pixels: int, notes: list[str]) -> Image.Image:
    """An array or tensor as a PIL image of mode L, RGB or RGBA."""
    values = source if isinstance(source, np.ndarray) else _tensor_values(source, name)
    if values.ndim not in (2, 3) or values.shape[2:] not in ((), (1,), (3,), (4,)):
        wanted = "give one picture of shape (H, W), (H, W, 1), (H, W, 3) or (H, W, 4)"
        raise ImageError.about(name, f"has shape {values.shape}; {wanted}")
    _check_size(values.shape[1::-1], name, max_pixels)
    if values.dtype == np.uint16:
        _note_dark(values, notes)
    return Image.fromarray(_eight_bits(values[..., 0] if values.shape[2:] == (1,) else values, name))


def _tensor_values(tensor, name: str) -> np.ndarray:
    """A torch tensor as an array, its channels moved from first to last."""
    tensor = tensor.detach().cpu()
    values = (tensor.float() if tensor.is_floating_point() else tensor).numpy()
    if values.ndim != 3 or values.shape[0] not in (1, 3, 4):
        return values
    if values.shape[2] in (1, 3, 4):
        both = "so its channels may be first or last; give a numpy array with channels last"
        raise ImageError.about(name, f"has shape {values.shape}, {both}")
    return np.moveaxis(values, 0, -1)


def _eight_bits(values: np.ndarray, name: str) -> np.ndarray:
    """bool, uint8, uint16 or floats in [0, 1] as uint8, rounded to the nearest."""
    match values.dtype.kind, values.dtype.itemsize:
        case "u", 1:
            return values
        case "b", _:
            return values * np.uint8(255)
        case "u", 2:
            return ((values.astype(np.uint32) + 128) // 257).astype(np.uint8)
        case "f", _:
            low, high = values.min(), values.max()
            if low >= -_ROUNDING and high <= 1 + _ROUNDING:  # false for NaN as well
                return np.rint(values.astype(np.float32) * 255).astype(np.uint8)
            problem = f"has values from {low:g} to {high:g}; floats must be finite and between 0 and 1"
        case _:
            problem = f"has values of type {values.dtype}; give uint8, uint16, bool, or floats between 0 and 1"
    raise ImageError.about(name, problem)


def _note_depth(image: Image.Image, notes: list[str]) -> None:
    """Add a note if opening this file reduces it from 16 to 8 bits. The image must not be decoded yet."""
    if any(";16" in str(tile) for tile in image.tile):
        notes.append("was reduced from 16 to 8 bits a channel")
        if not image.mode.startswith("I"):  # of which Pillow keeps all
            _note_dark(np.asarray(image.convert("RGB")).astype(np.uint16) * 256 + 255, notes)


def _note_dark(levels: np.ndarray, notes: list[str]) -> None:
    """Add a note if 16-bit levels look like 8- to 14-bit data. They are never stretched: their scale is unknown."""
    brightest = int(levels.max())
    bits = next((bits for bits in (8, 10, 12, 14) if brightest < 2**bits), 16)
    if bits < 16 and brightest:
        notes.append(
            f"has levels up to {brightest:,} of 65,535, as {bits}-bit data in 16 bits have, and is as dark as that; "
            f"if it should be brighter, multiply its levels by {2 ** (16 - bits)} first"
        )


def _with_alpha(image: Image.Image) -> Image.Image | None:
    """The picture as RGBA, or None if it is fully opaque."""
    if image.mode[-1] not in "Aa" and "transparency" not in image.info and getattr(image.palette, "mode", "") != "RGBA":
        return None
    own = image.convert("LA") if image.mode == "La" else image.copy()  # converting writes into a palette's alpha
    return own.convert("RGBA")


def rgb(
    image: Image.Image, name: str = "the picture", notes: list[str] | None = None, *, profiles: bool = False
) -> Image.Image:
    """Any PIL image as a new, upright RGB image over white, as `load_image` describes it.

    notes: gets what was done. profiles: convert embedded color profiles; data sets do not, as timm and torchvision.
    """
    notes = [] if notes is None else notes
    image.load()
    if profiles and "icc_profile" in image.info:
        colors, note = _in_srgb(image, _with_alpha(image))
        notes += [note] if note else []
    else:
        colors = image
    if colors.mode.startswith(("I", "F")):
        plain = _from_deep_gray(colors, name, notes)
    elif (rgba := _with_alpha(colors)) is not None:
        plain = Image.alpha_composite(Image.new("RGBA", colors.size, "white"), rgba).convert("RGB")
        if rgba.getchannel("A").getextrema()[0] < 255:
            notes.append("was laid over white where it is transparent")
    else:
        plain = colors.convert("RGB")
    plain.info.clear()
    with suppress(Exception):  # whatever is wrong with the metadata, the picture itself is still one
        orientation = image.getexif().get(ExifTags.Base.Orientation)
        if orientation in range(2, 9):
            plain.getexif()[ExifTags.Base.Orientation] = orientation
            ImageOps.exif_transpose(plain, in_place=True)
            notes.append("was turned upright, as its EXIF orientation says")
    return plain


def _from_deep_gray(image: Image.Image, name: str, notes: list[str]) -> Image.Image:
    """Gray of 16 bits or floats as RGB, a transparent level (PNG) as white."""
    values = np.asarray(image)
    if image.mode == "I" and (values.min() < 0 or values.max() > 65535):
        problem = f"has levels from {values.min()} to {values.max()}; rescale it to 0 … 65535"
        raise ImageError.about(name, problem)
    if image.mode != "F":  # in the machine's own order of bytes: NumPy 2.1 crashes in comparing others with −1
        values = values.astype(np.uint16)
        _note_dark(values, notes)
    levels = _eight_bits(values, name)
    levels[values == image.info.get("transparency", -1)] = 255
    return Image.fromarray(levels).convert("RGB")


def _in_srgb(image: Image.Image, alpha: Image.Image | None) -> tuple[Image.Image, str]:
    """A loaded image in sRGB, converted from its embedded color profile, and a note on that, or "".

    alpha: its transparency, which is kept. An image is left as it is if its profile is damaged, does not fit its pixels
    or is sRGB by any name.
    """
    try:
        profile = ImageCms.ImageCmsProfile(io.BytesIO(image.info["icc_profile"]))
        title = ImageCms.getProfileDescription(profile).strip() or "without a name"
        space = profile.profile.xcolor_space.strip()
        mode = {"RGB": "RGB", "GRAY": "L", "CMYK": "CMYK"}.get(space)
        own = {"L": "GRAY", "LA": "GRAY", "La": "GRAY", "1": "GRAY", "CMYK": "CMYK"}.get(image.mode, "RGB")
        fits = space == own or (space, own) == ("RGB", "GRAY")
        if mode is None or not fits or image.mode[0] in "IF":
            return image, f"has a color profile, “{title}”, that does not fit its kind of pixels and was ignored"
        convert = ImageCms.buildTransform(
            profile, ImageCms.createProfile("sRGB"), mode, "RGB", ImageCms.Intent.RELATIVE_COLORIMETRIC,
            ImageCms.Flags.BLACKPOINTCOMPENSATION,
        )  # fmt: skip
        if mode != "CMYK" and _changes_nothing(convert, mode):
            return image, ""
        converted = ImageCms.applyTransform((alpha or image).convert(mode), convert)
    except Exception:  # whatever is wrong with the profile, the picture itself is still one
        return image, "has a color profile that is damaged or that this Pillow cannot apply, and was ignored"
    if alpha is not None:
        converted.putalpha(alpha.getchannel("A"))
    return converted, f"was converted from the color profile “{title}” to sRGB"


def _changes_nothing(convert: ImageCms.ImageCmsTransform, mode: str) -> bool:
    """Whether a conversion changes every color by two levels (of 255) at most."""
    steps = np.linspace(0, 255, 256 if mode == "L" else 18).round().astype(np.uint8)
    colors = steps[None] if mode == "L" else np.stack(np.meshgrid(steps, steps, steps), -1).reshape(1, -1, 3)
    found = np.asarray(ImageCms.applyTransform(Image.fromarray(colors), convert)).astype(int)
    return np.abs(found - (colors[..., None] if mode == "L" else colors)).max() <= 2
