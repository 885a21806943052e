"""Open images of any kind as RGB: upright, opaque, of 8 bits, in sRGB."""

from __future__ import annotations

import functools
import io
import os
import re
import struct
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageCms, ImageOps, UnidentifiedImageError

from vitlens import files
from vitlens.names import unknown_name
from vitlens.texts import natural_key, shown
from vitlens.walk import list_names, walk

__all__ = ["ImageError", "image_files", "is_image", "load_image", "rgb", "samples"]
__dir__ = __all__.copy
__getattr__ = unknown_name(__name__, __all__)

MAX_PIXELS = 80_000_000
"""Default limit of the pixels of an image, above a 50-megapixel phone photograph."""

MAX_ELONGATION = 100
"""Largest ratio of the sides of an image, because resizing the short side of a strip takes unbounded memory."""

_GAMMA = 0.45455
"""Gamma of PNG files that needs no correction: that of sRGB, approximately."""
_ROUNDING = 1e-4  # floats may exceed [0, 1] by this, as after a bicubic resize
_DRAWINGS = {"EPS", "WMF"}  # Pillow runs other programs to decode these
_UNREADABLE = {"BUFR", "GRIB", "HDF5", "MPEG", "PDF"}  # Pillow opens but cannot decode these
_NO_IMAGES = _DRAWINGS | _UNREADABLE
_SAMPLES = (
    "skimage/data/astronaut.png",
    "skimage/data/chelsea.png",
    "skimage/data/coffee.png",
    "skimage/data/rocket.jpg",
    "sklearn/datasets/images/china.jpg",
    "sklearn/datasets/images/flower.jpg",
)


class ImageError(ValueError):
    """A source that cannot be read as an image. The message names the source and the reason.

    >>> issubclass(vitlens.ImageError, ValueError)
    True
    """


class Change(str):
    """A change of an image on the way to RGB, as the end of a sentence about it. kind: key of `_OF_SEVERAL`."""

    kind: str

    def __new__(cls, kind: str, text: str):
        new = super().__new__(cls, text)
        new.kind = kind
        return new

    def __getnewargs__(self):
        """Arguments of `__new__` for a copy in another process."""
        return self.kind, str(self)


_OF_SEVERAL = {
    "dark": "have levels that use less than a quarter of 16 bits, so they may look dark",
    "transparent": "were laid over white where they are transparent",
    "turned": "were turned upright by their EXIF orientation",
    "cut": "end in an even gray, as files that were cut",
    "frames": "hold several images, of which the first is read",
    "profile": "were converted from a color profile to sRGB",
    "bad profile": "have a color profile that is damaged or does not fit their pixels, which was ignored",
    "unused profile": "have a color profile other than sRGB, which data sets do not apply",
    "gamma": "have a gamma other than that of sRGB, which was not applied",
    "crop": "are cropped: the model sees less than half of their area",
}
"""The end of a sentence about several images, by the kind of their `Change`."""


class Remark(str):
    """A sentence about one image. kinds: those of its changes."""

    parts: tuple[str, list[Change]]
    kinds: tuple[str, ...]

    def __new__(cls, subject: str, changes: Iterable[Change]):
        changes = list(changes)
        new = super().__new__(cls, f"{subject} {'; '.join(changes)}.")
        new.parts = subject, changes
        new.kinds = tuple(change.kind for change in changes)
        return new

    def __getnewargs__(self):
        """Arguments of `__new__` for a copy in another process."""
        return self.parts


class Remarks:
    """Function for `on_note` that passes on the first three remarks of a kind, and counts all. `total` gives the sum.

    >>> remarks = vitlens.images.Remarks(print)
    >>> for file in ("a", "b", "c", "d"):
    ...     remarks(vitlens.images.Remark(file, [vitlens.images.Change("turned", "was turned")]))
    a was turned.
    b was turned.
    c was turned.
    >>> remarks.total(9)
    4 of 9 images were turned upright by their EXIF orientation.
    """

    def __init__(self, on_note: Callable[[str], None], first: int = 3):
        self.on_note = on_note
        self.first = first
        self.counts: Counter[str] = Counter()

    def __call__(self, note: str) -> None:
        kinds = getattr(note, "kinds", None)
        if kinds is None:
            self.on_note(note)
            return
        self.counts.update(kinds)
        if any(self.counts[kind] <= self.first for kind in kinds):
            self.on_note(note)

    def total(self, images: int) -> None:
        """Pass on a sentence for each kind with more remarks than were passed on. images: number of all images."""
        counts = {kind: n for kind, n in self.counts.items() if n > self.first}
        text = count_changes(counts, images)
        if text:
            self.on_note(text)


def count_changes(counts: Mapping[str, int], images: int, title: str = "images") -> str:
    """Sentences about a number of changed images of each kind among `images` images, or ""."""
    sentences = []
    for kind, ending in _OF_SEVERAL.items():
        if counts.get(kind):
            sentences.append(f"{counts[kind]:,} of {images:,} {title} {ending}.")
    return " ".join(sentences)


class ModelInput(np.ndarray):
    """Images (B, H, W, 3), or one (H, W, 3), with the pixels that a model received, as `models.restore` returns them.

    A map fits such an image without a crop. The type guards against a map over another part of the image: an image that
    is cropped, flipped, rotated or transposed is not `unmoved`, and results of computations are ordinary arrays. NumPy
    moves pixels by changing the shape or the strides (the bytes from a pixel to the next ones), so both are compared.

    layout: (shape, strides) of each image as received, or None after pixels have moved.
    """

    def __new__(cls, images: np.ndarray):
        new = images.view(cls)
        new.layout = (images.shape[1:], images.strides[1:])
        return new

    @property
    def unmoved(self) -> bool:
        """True for one image as the model received it."""
        return (self.shape, self.strides) == self.layout

    def __array_finalize__(self, source):
        """Called by NumPy for every array made from another: a view, a copy or the result of an index."""
        self.layout = None
        if source is not None and self.strides[-3:] == source.strides[-3:]:
            self.layout = getattr(source, "layout", None)

    def __array_function__(self, *call):
        """Called by NumPy for its functions. New arrays, such as np.roll's, have other pixels at the same strides."""
        result = super().__array_function__(*call)
        if isinstance(result, ModelInput) and result.base is None:
            return np.asarray(result)
        return result

    def __array_wrap__(self, result, *_):
        """Called by NumPy for results of arithmetic, which are ordinary arrays or numbers."""
        return np.asarray(result)[()]


def load_image(
    source, *, max_pixels: int = MAX_PIXELS, on_note: Callable[[str], None] | None = None
) -> Image.Image:
    """Read a source as a new, fully loaded PIL image in RGB: upright, opaque, in sRGB, without metadata.

    >>> vitlens.load_image(np.zeros((60, 80, 4), np.uint8)).getpixel((0, 0))  # transparent
    (255, 255, 255)

    source: a path, the bytes of a file or of its path, a binary file object (read from its beginning, not closed), a
    PIL image (not changed), a NumPy array (H, W), (H, W, 1), (H, W, 3) or (H, W, 4) of bool, uint8, uint16 or floats in
    [0, 1], or a torch tensor of the same kinds, channels last or first.

    The EXIF orientation is applied, transparency is blended with white, 16-bit levels are divided by 257 (of 16-bit
    colors Pillow reads the upper 8 bits) and floats multiplied by 255, without clipping or stretching, and colors are
    converted from an embedded profile to sRGB. Of several frames the first is read. on_note: called with a sentence
    about these changes, if any. Raises ImageError for other sources, and for images of over `max_pixels` by their
    header, before decoding.
    """
    notes: list[Change] = []
    name = _name_of(source)
    try:
        with _open(source, notes) as image:
            limit = min(max_pixels, Image.MAX_IMAGE_PIXELS or max_pixels)
            pixels = image.width * image.height
            if not 0 < pixels <= limit:
                raise ImageError(
                    f"has {image.width} × {image.height} pixels and must have 1 to {limit:,} (max_pixels)"
                )
            from_file = image is not source
            if from_file and image.format in _DRAWINGS:
                raise ImageError(f"is a drawing ({image.format}). Export it as PNG")
            result = rgb(image, notes, profiles=True)
            if from_file:
                note_file(image, notes)
    except Exception as error:  # decoders raise many types on damaged files
        raise ImageError(f"Expected an image, but {name} {_reason(error)}.") from error
    if notes and on_note is not None:
        subject = name[0].upper() + name[1:]
        on_note(Remark(subject, notes))
    return result


def note_file(image: Image.Image, notes: list[Change]) -> None:
    """Add changes for a decoded file that was cut, or has several images, of which the first is read."""
    with suppress(Exception):  # the first image is read, so the others may be damaged
        if image.format == "JPEG" and _ends_gray(image):
            notes.append(Change("cut", "ends in an even gray, as a file that was cut"))
        has_previews = image.format == "MPO"  # of phones
        if not has_previews and getattr(image, "is_animated", False):
            number = image.n_frames
            notes.append(Change("frames", f"holds {number} images; the first is shown"))


def _ends_gray(image: Image.Image) -> bool:
    """True if the last block of 8 × 8 pixels has the level with which a decoder fills in missing blocks."""
    width, height = image.size
    block = image.crop((max(0, width - 8), max(0, height - 8), width, height))
    if image.mode == "CMYK":  # stored inverted by Adobe's programs
        return all(ends in ((127, 127), (128, 128)) for ends in block.getextrema())
    return block.convert("RGB").getextrema() == ((128, 128),) * 3


class InFolder(str):
    """Path of a file in a folder that was given. Such a file is left out if it cannot be read (`Readable`)."""


class Readable:
    """The images among sources: those of folders that cannot be read are left out and counted, others are errors.

    >>> readable = vitlens.images.Readable(print)
    >>> readable.leave_out("cat.jpg", ValueError("cat.jpg is damaged."))
    cat.jpg is damaged.

    on_error: function for the message of any image that cannot be read, which is then left out.
    """

    def __init__(self, on_error: Callable[[str], None] | None = None):
        self.on_error = on_error
        self.errors: list[Exception] = []

    def leave_out(self, source: object, error: Exception) -> None:
        """Leave a source out, or raise its error unless it is a file of a folder or there is `on_error`."""
        if self.on_error is not None:
            self.on_error(str(error))
        elif not isinstance(source, InFolder):
            raise error
        self.errors.append(error)

    def total(self, readable: int, on_note: Callable[[str], None] | None = None) -> None:
        """Pass a sentence about the images left out to `on_note`, by default as a warning. Raises if none is left."""
        if self.on_error is not None or not self.errors:
            return
        if not readable:
            raise self.errors[0]
        number = len(self.errors)
        words = (
            f"{number:,} of {readable + number:,} images of the folder are left out. The first: "
            f"{self.errors[0]}"
        )
        if on_note is None:
            warnings.warn(words, stacklevel=3)
        else:
            on_note(words)


def named_sources(
    images: object, on_note: Callable[[str], None] | None = None
) -> Iterator[tuple[str, object]]:
    """Yield (name, source of `load_image`) of each image in an argument that may hold one or several.

    >>> [name for name, _ in vitlens.images.named_sources(["a/cat.png", "b/cat.png", "dog.png"])]
    ['cat.png', 'b/cat.png', 'dog.png']

    images: one source, a folder, a mapping by name, or an iterable of sources or of (name, source) pairs, such as a
    list, a generator, a NumPy array of paths or a pandas Series. A folder among them stands for its images. Without a
    given name, an image has that of its file, and its path if several files have that name. on_note: as for
    `image_files`. Raises ImageError for a set, which has no order, and for a table of several columns.
    """
    if isinstance(images, (set, frozenset)):
        raise ImageError("A set of images has no order. Pass a list, such as sorted(images).")
    if hasattr(images, "columns") and hasattr(images, "iloc"):
        raise ImageError("A table has several columns. Pass the one with the images, table[name].")
    if isinstance(images, Mapping):
        yield from images.items()
        return
    if _is_folder(images):
        for name, path in image_files(images, on_note):
            yield name, InFolder(path)
        return
    items = [images] if _is_single(images) else _items(images)
    items = _with_files_of_folders(items, on_note)
    names: set[str] = set()
    for number, item in enumerate(items):
        if _is_pair(item):
            yield item
            continue
        name = _file_name(item) or f"image {number + 1}"
        if name in names and isinstance(item, str | os.PathLike):
            name = os.fspath(item)
        if name in names:
            name = f"{name} ({number + 1})"
        names.add(name)
        yield name, item


def _is_single(source: object) -> bool:
    """True for one source of `load_image`, and for whatever holds no other sources."""
    if isinstance(source, np.ndarray):
        return source.dtype.kind not in "USO"
    if isinstance(source, (str, bytes, bytearray, memoryview, os.PathLike, Image.Image)):
        return True
    if hasattr(source, "read") or hasattr(source, "requires_grad"):
        return True
    return not hasattr(source, "__iter__")


def _items(images: Iterable) -> Iterable:
    """The items of an iterable. An array of strings has one dimension then."""
    return images.ravel().tolist() if isinstance(images, np.ndarray) else images


def _is_folder(source: object) -> bool:
    return isinstance(source, str | os.PathLike) and os.path.isdir(source)


def _with_files_of_folders(
    items: Iterable, on_note: Callable[[str], None] | None
) -> Iterator[object]:
    """The items, with the images of a folder in its place."""
    for item in items:
        if _is_folder(item):
            for _, path in image_files(item, on_note):
                yield InFolder(path)
        else:
            yield item


def _is_pair(item: object) -> bool:
    """True for a (name, source) pair."""
    return isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str | int)


def _file_name(source: object) -> str:
    """Name of the file of a source, or "" for an image from memory."""
    path = source
    if not isinstance(source, str | os.PathLike):
        path = getattr(source, "filename", "") or getattr(source, "name", "")
    return Path(os.fsdecode(path)).name if isinstance(path, str | os.PathLike) else ""


def _name_of(source) -> str:
    """Path or kind of a source, for messages."""
    path = source
    if isinstance(source, Image.Image):
        path = getattr(source, "filename", None)
    elif not isinstance(source, (str, os.PathLike)):
        path = getattr(source, "name", None)
    if isinstance(path, (str, os.PathLike)) and (path or path is source):
        text = os.fsdecode(path)
        return repr(text[-200:])
    return f"the {type(source).__name__} given"


def _open(source, notes: list[Change]) -> AbstractContextManager[Image.Image]:
    """A context with the image of a source. It closes files that it opened, and no image of the caller."""
    if isinstance(source, np.ndarray) or hasattr(source, "requires_grad"):
        return nullcontext(_from_array(source, notes))
    if isinstance(source, Image.Image):
        return nullcontext(source)
    if not _is_single(source) or isinstance(source, (set, frozenset, dict)):
        raise ImageError("holds several images or none. Pass one of them, or all to `preprocess`")
    if isinstance(source, bytes) and _names_file(source):
        source = os.fsdecode(source)
    if isinstance(source, (bytes, bytearray, memoryview)):
        source = io.BytesIO(source)
    elif isinstance(source, (str, os.PathLike)) and not files.is_file_or_missing(source):
        source = io.BytesIO(files.read(source))  # open() would wait for a pipe without a word
    if not isinstance(source, str | os.PathLike) and not hasattr(source, "read"):
        raise ImageError("is not an image. Pass a path, the bytes of a file, an image or an array")
    return Image.open(source)


def _names_file(content: bytes) -> bool:
    """True for bytes that are the path of a file and not the content of one."""
    return len(content) < 4096 and b"\0" not in content and os.path.isfile(content)


def _reason(error: Exception) -> str:
    """The reason why an image cannot be read, as the end of a sentence."""
    if isinstance(error, ImageError):
        return str(error)
    if isinstance(error, Image.DecompressionBombError):
        size = " ".join(re.findall(r"\d+ pixels", str(error))[:1])
        return f"has {size or 'too many pixels'} and is not decoded. Make it smaller"
    if isinstance(error, UnidentifiedImageError):
        return "is damaged or in no format that Pillow reads (HEIC needs pillow-heif); export it as JPEG or PNG"
    if isinstance(error, FileNotFoundError) and re.match(r"\w+://", str(error.filename)):
        return "is an address. Download the image, and give its file"
    if getattr(error, "strerror", None):
        return f"cannot be read ({error.strerror})"
    words = str(error).split()
    text = " ".join(words)[:200]
    kind = type(error).__name__
    return f"cannot be read ({kind}: {text}); it is incomplete or damaged, or not an image"


def is_image(path: str | os.PathLike) -> bool:
    """True for files that Pillow opens, by their extension, or by their first bytes if it is unknown.

    >>> vitlens.images.is_image("cat.jpg"), vitlens.images.is_image("cat.pdf")
    (True, False)
    """
    _, extension = os.path.splitext(path)
    kinds = Image.registered_extensions()
    kind = kinds.get(extension.lower())
    if kind in Image.OPEN:
        return kind not in _NO_IMAGES
    if not files.is_file_or_missing(path):
        return False
    try:
        with Image.open(path) as image:
            return image.format not in _NO_IMAGES
    except Exception:  # Pillow raises many types
        return False


def image_files(
    folder: str | os.PathLike, on_note: Callable[[str], None] | None = None
) -> list[tuple[str, Path]]:
    """(name, path) of all image files in a folder and below it, in natural order: 2.png before 10.png.

    >>> cat.save("cat.png"), vitlens.images.image_files(".")
    (None, [('cat.png', PosixPath('cat.png'))])

    Each real file is read once, under one of its names, also in linked folders. on_note: called with sentences that
    count and name what is left out. Raises ValueError without image files.
    """
    folder = Path(folder)
    walked = walk(folder, is_image)
    left_out = walked.sentences()
    others = walked.others
    if not walked.names:
        reasons = f" {left_out}" if left_out else ""
        raise ValueError(f"The folder {shown(folder)} holds no images that Pillow opens.{reasons}")
    if others:
        total = len(others) + len(walked.names)
        names = list_names(others, " …")
        left_out = (
            f"{len(others):,} of {total:,} files in {shown(folder)} are not images: {names}. "
            f"{left_out}"
        )
    if left_out and on_note is not None:
        prefix = "" if others else f"In {shown(folder)}: "
        on_note(f"{prefix}{left_out}".strip())
    names = sorted(walked.names, key=_natural_order)
    return [(name, folder / name) for name in names]


def _natural_order(name: str) -> tuple[list[tuple[bool, int | str]], str]:
    """Key of the natural order, in which names of equal numbers are sorted by code points."""
    return natural_key(name), name


def samples() -> dict[str, Image.Image]:
    """Six photographs by name, in a fixed order, from the files of scikit-image and scikit-learn.

    >>> list(vitlens.samples())
    ['astronaut', 'chelsea', 'coffee', 'rocket', 'china', 'flower']
    """
    images = {}
    for name in _SAMPLES:
        package, _, _ = name.partition("/")
        root = Path(find_spec(package).origin).parent.parent
        file = root / name
        if file.is_file():
            images[file.stem] = rgb(Image.open(file))
    return images


def rgb(
    image: Image.Image, notes: list[Change] | None = None, *, profiles: bool = False
) -> Image.Image:
    """A PIL image as a new, upright RGB image over white, as in `load_image`.

    >>> vitlens.images.rgb(Image.new("LA", (4, 4))).getpixel((0, 0))
    (255, 255, 255)

    notes: list to which changes are added. profiles: convert embedded color profiles, which data sets do not, like timm
    and torchvision.
    """
    notes = [] if notes is None else notes
    _require_checksums(image)
    was_deep = _has_deep_colors(image)
    level = _level_size(image)
    orientation = _orientation(image)
    _decode(image)
    if was_deep:
        _note_dark_colors(image, notes)
    colors = image
    if level > 1 and "transparency" in image.info:
        colors = image.copy()
        colors.info["transparency"] *= level
    if image.info.get("icc_profile"):
        if profiles:
            colors = _in_srgb(colors, notes)
        elif not _is_srgb(image.info["icc_profile"]):
            words = "has a color profile other than sRGB, which data sets do not apply"
            notes.append(Change("unused profile", words))
    elif abs(image.info.get("gamma", _GAMMA) - _GAMMA) > 0.02 and "srgb" not in image.info:
        notes.append(
            Change("gamma", f"has a gamma of {image.info['gamma']:.3g}, which was not applied")
        )
    if colors.mode.startswith(("I", "F")):
        plain = _from_deep_gray(colors, notes)
    elif colors.has_transparency_data:
        rgba = _with_alpha(colors)
        white = Image.new("RGBA", colors.size, "white")
        plain = Image.alpha_composite(white, rgba).convert("RGB")
        lowest, _ = rgba.getchannel("A").getextrema()
        if lowest < 255:
            notes.append(Change("transparent", "was laid over white where it is transparent"))
    else:
        plain = colors.convert("RGB")
    plain.info.clear()
    remaining = _orientation(image)  # Pillow turns TIFF files while it decodes them
    if remaining:
        plain.getexif()[ExifTags.Base.Orientation] = remaining
        ImageOps.exif_transpose(plain, in_place=True)
    if orientation:
        notes.append(Change("turned", "was turned upright by its EXIF orientation"))
    return plain


def _orientation(image: Image.Image) -> int | None:
    """EXIF orientation of an image that is not upright, or None."""
    with suppress(Exception):  # damaged metadata do not matter
        orientation = image.getexif().get(ExifTags.Base.Orientation)
        if orientation in range(2, 9):
            return orientation
    return None


def _raw_modes(image: Image.Image) -> list[str]:
    """The kinds of pixels in an opened file, in Pillow's names, or [] after decoding."""
    raw_modes = []
    for tile in getattr(image, "tile", []):
        arguments = tile[3]
        raw_modes.append(str(arguments[0] if isinstance(arguments, tuple) else arguments))
    return raw_modes


def _has_deep_colors(image: Image.Image) -> bool:
    """True for an opened file with several channels of 16 bits, of which Pillow reads the upper 8 bits."""
    return any(re.match("(RGB|LA).*;16", raw_mode) for raw_mode in _raw_modes(image))


def _level_size(image: Image.Image) -> int:
    """Levels of 8 bits per level of an opened PNG file in gray of 2 or 4 bits, else 1.

    Pillow scales the pixels of such a file to 8 bits, but not its transparent level.
    """
    if image.format != "PNG" or image.mode != "L":
        return 1
    sizes = {"L;2": 85, "L;4": 17}
    return max([sizes.get(raw_mode, 1) for raw_mode in _raw_modes(image)], default=1)


def _note_dark_colors(image: Image.Image, notes: list[Change]) -> None:
    """Add the change of colors of 16 bits that use less than a quarter of them."""
    colors = [
        band for name, band in zip(image.getbands(), image.split(), strict=True) if name != "A"
    ]
    highest = max(band.getextrema()[1] for band in colors)
    if 0 < highest < 2**6:
        words = f"has levels up to {256 * highest + 255:,} of 65,535, so it may look dark"
        notes.append(Change("dark", words))


def _require_checksums(image: Image.Image) -> None:
    """Raise ImageError for an opened PNG file with changed pixels, whose checksums Pillow does not compare."""
    file = getattr(image, "fp", None)
    if image.format != "PNG" or file is None:
        return
    position = file.tell()
    file.seek(8)
    while len(header := file.read(8)) == 8:
        length, kind = struct.unpack(">I4s", header)
        content = file.read(length)
        checksum = file.read(4)
        is_whole = len(content) == length and len(checksum) == 4
        if (
            kind == b"IDAT"
            and is_whole
            and zlib.crc32(kind + content) != int.from_bytes(checksum, "big")
        ):
            raise ImageError("is damaged: the checksum of its pixels differs")
        if kind == b"IEND":
            break
    file.seek(position)


def _decode(image: Image.Image) -> None:
    """Read the pixels of an opened file.

    Pillow 13.0 maps uncompressed TIFF files into memory with the sides of the turned image, if EXIF turns it, and so
    mixes the rows. Without the file's name it reads them instead.
    """
    if image.format != "TIFF":
        image.load()
        return
    filename = image.filename
    image.filename = ""
    try:
        image.load()
    finally:
        image.filename = filename


def _from_array(source, notes: list[Change]) -> Image.Image:
    """PIL image of mode L, RGB or RGBA from an array or tensor."""
    if np.ma.is_masked(source):
        raise ImageError("has masked values. Fill them, such as by array.filled(0)")
    values = source
    if not isinstance(source, np.ndarray):
        tensor = source.detach().cpu()
        if tensor.is_floating_point():
            tensor = tensor.float()
        values = tensor.numpy()
        if values.ndim == 3 and values.shape[0] in (1, 3, 4):
            if values.shape[2] in (1, 3, 4):
                raise ImageError(
                    f"has shape {values.shape}, whose channels may be first or last. Pass a NumPy array"
                )
            values = np.moveaxis(values, 0, -1)
    if values.ndim not in (2, 3) or values.shape[2:] not in ((), (1,), (3,), (4,)):
        raise ImageError(
            f"has shape {values.shape} and must be one image, (H, W), (H, W, 1), (H, W, 3) or (H, W, 4)"
        )
    if values.shape[2:] == (1,):
        values = values[..., 0]
    levels = _eight_bits(values, notes)
    return Image.fromarray(levels)


def _eight_bits(values: np.ndarray, notes: list[Change]) -> np.ndarray:
    """Values as uint8, rounded to the nearest, from bool, uint8, uint16 or floats in [0, 1]."""
    if values.dtype == np.uint8:
        return values
    if values.dtype.kind == "b":
        return values * np.uint8(255)
    if values.dtype.newbyteorder("=") == np.uint16:
        highest = int(values.max())
        if 0 < highest < 2**14:
            words = f"has levels up to {highest:,} of 65,535, so it may look dark"
            notes.append(Change("dark", words))
        levels = (values.astype(np.uint32) + 128) // 257
        return levels.astype(np.uint8)
    got = str(values.dtype)
    if values.dtype.kind == "f":
        low = values.min()
        high = values.max()
        if low >= -_ROUNDING and high <= 1 + _ROUNDING:  # false for NaN
            levels = np.rint(values.astype(np.float32) * 255)
            return levels.astype(np.uint8)
        got = f"{got} from {low:g} to {high:g}"
    raise ImageError(
        f"has values of {got}. Pass uint8, uint16, bool, or finite floats between 0 and 1"
    )


def _from_deep_gray(image: Image.Image, notes: list[Change]) -> Image.Image:
    """RGB image from gray of 16 bits or floats, with a transparent level (PNG) in white."""
    values = np.asarray(image)
    if image.mode != "F":
        low = values.min()
        high = values.max()
        if low < 0 or high > 65535:
            raise ImageError(f"has levels from {low} to {high}. Rescale it to 0 … 65535")
        values = values.astype(np.uint16)
    levels = _eight_bits(values, notes)
    transparent = image.info.get("transparency", -1)
    levels[values == transparent] = 255
    return Image.fromarray(levels).convert("RGB")


def _with_alpha(image: Image.Image) -> Image.Image:
    if image.mode == "La":
        return image.convert("LA").convert("RGBA")
    copy = image.copy()  # converting changes a palette's alpha in place
    return copy.convert("RGBA")


@functools.lru_cache(64)
def _is_srgb(profile: bytes) -> bool:
    """True for a color profile that is called sRGB."""
    try:
        stored = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        return "srgb" in ImageCms.getProfileDescription(stored).lower()
    except Exception:  # damaged
        return False


def _in_srgb(image: Image.Image, notes: list[Change]) -> Image.Image:
    """Image converted to sRGB from its color profile, or unchanged if the profile is damaged, misfits or is sRGB."""
    colors = _with_alpha(image) if image.has_transparency_data else image
    own = "RGB"
    if image.mode == "CMYK":
        own = "CMYK"
    elif image.mode in ("1", "L", "LA", "La"):
        own = "GRAY"
    try:
        stored = io.BytesIO(image.info["icc_profile"])
        profile = ImageCms.ImageCmsProfile(stored)
        title = ImageCms.getProfileDescription(profile).strip()
        space = profile.profile.xcolor_space.strip()
        fits = space == own or (space, own) == ("RGB", "GRAY")
        if image.mode[0] in "IF" or not fits:
            raise ValueError("it does not fit the pixels")
        mode = "L" if space == "GRAY" else space
        before = colors.convert(mode)
        after = ImageCms.profileToProfile(
            before,
            profile,
            ImageCms.createProfile("sRGB"),
            ImageCms.Intent.RELATIVE_COLORIMETRIC,
            "RGB",
            flags=ImageCms.Flags.BLACKPOINTCOMPENSATION,
        )
    except Exception:  # a damaged profile is ignored
        words = "has a color profile that is damaged or does not fit its pixels, which was ignored"
        notes.append(Change("bad profile", words))
        return image
    if own != "CMYK":
        levels_before = np.asarray(before.convert("RGB"), np.int16)
        levels_after = np.asarray(after, np.int16)
        change = np.abs(levels_after - levels_before)
        if change.max() <= 2:
            return image
    if colors is not image:
        after.putalpha(colors.getchannel("A"))
    words = f"was converted from the color profile “{title}” to sRGB"
    notes.append(Change("profile", words))
    return after
