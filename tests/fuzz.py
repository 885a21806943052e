"""Random folders, image files and checkpoints, each against a small model of what is right.

`python -m tests.fuzz --examples 2000` draws that many of each kind, `make test-slow` a hundred with fixed seeds. The
model of a case is made from its description, without reading the files. Right is the same result, or one sentence.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import tempfile
import time
import unicodedata
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import timm
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from PIL import ExifTags, Image
from safetensors.torch import save_file

from vitlens import load_image, load_model
from vitlens.data import load
from vitlens.data.sources import EVERY_SPLIT
from vitlens.images import ImageError
from vitlens.walk import SYSTEM_FOLDERS

LIMIT = 20
"""Seconds that a case may take."""


def sentence(error: Exception) -> str:
    """The message of an error for a person. Fails for other types of errors, and for messages without a sentence."""
    text = str(error)
    assert isinstance(error, ValueError), repr(error)
    assert len(text.split()) >= 4 and text.rstrip().endswith((".", ")", "…")), repr(text)
    assert "Traceback" not in text and "\n" not in text, repr(text)
    return text


# Folders

ENTRIES = (
    "image",
    "deep image",
    "hard link",
    "link",
    "link from outside",
    "folder link from outside",
    "link to own folder",
    "link to parent",
    "dangling link",
    "text",
    "hidden image",
    "wrong extension",
)
FAULTS = ("empty image", "cut image", "link from another class")


@dataclass
class Folders:
    """Class folders: by name, the kinds of their entries in the order in which they are made.

    splits: folders of splits, each with these class folders, or "" for class folders alone.
    """

    classes: dict[str, list[str]]
    splits: tuple[str, ...]

    def expected(self) -> dict[str, int]:
        """Number of distinct images of each class."""
        new = {"image", "deep image", "link from outside", "wrong extension"}
        counts = {}
        for name, entries in self.classes.items():
            images = sum(entry in new for entry in entries)
            folder_links = sum(entry == "folder link from outside" for entry in entries)
            counts[name] = images + 2 * folder_links
        return counts

    def may_be_refused(self) -> bool:
        """True if a person should hear about these folders before anything is computed."""
        entries = [entry for own in self.classes.values() for entry in own]
        names = {unicodedata.normalize("NFC", name).casefold() for name in self.classes}
        too_few = min(self.expected().values()) < 2
        return too_few or len(names) < len(self.classes) or any(e in FAULTS for e in entries)


def is_class_name(name: str) -> bool:
    ordinary = name.strip() == name and not name.startswith(".") and name not in SYSTEM_FOLDERS
    return ordinary and name.lower() not in EVERY_SPLIT and len(os.fsencode(name)) < 200


letters = st.characters(exclude_characters="/\0", exclude_categories=["Cs"])
class_names = st.one_of(
    st.sampled_from(["cat", "Dog", "10", "9", "$x_1$", "café", "cafe\u0301", "猫", "<b>", "a, b"]),
    st.text(letters, min_size=1, max_size=12),
).filter(is_class_name)
entries = st.lists(st.sampled_from(ENTRIES * 3 + FAULTS), max_size=6).map(
    lambda more: ["image", "image", *more]
)
folders = st.builds(
    Folders,
    st.dictionaries(class_names, entries, min_size=1, max_size=4),
    st.sampled_from([("",), ("",), ("train", "val"), ("Training", "valid"), ("train", "test")]),
)


class Writer:
    """Writes the entries of class folders, each image with other pixels."""

    def __init__(self, root: Path):
        self.root = root / "data"
        self.outside = root / "outside"
        self.outside.mkdir()
        self.count = 0

    def image(self, path: Path, file_format: str = "PNG") -> Path:
        self.count += 1
        path.parent.mkdir(parents=True, exist_ok=True)
        values = np.random.default_rng(self.count).integers(0, 255, (9, 8, 3), dtype=np.uint8)
        Image.fromarray(values).save(path, file_format)
        return path

    def write(self, folders: Folders) -> None:
        for split in folders.splits:
            for name, kinds in folders.classes.items():
                folder = self.root / split / name
                folder.mkdir(parents=True)
                for number, kind in enumerate(kinds):
                    self.entry(folder, f"{number}", kind)

    def entry(self, folder: Path, name: str, kind: str) -> None:
        own = next(iter(sorted(folder.glob("[!.]*.png"))), None)
        if kind == "image":
            self.image(folder / f"{name}.png")
        elif kind == "deep image":
            self.image(folder / "a" / "b" / f"{name}.png")
        elif kind == "hard link":
            os.link(own, folder / f"{name}.png")
        elif kind == "link":
            (folder / f"{name}.png").symlink_to(own.name)
        elif kind == "link from outside":
            target = self.image(self.outside / f"{self.count}.png")
            (folder / f"{name}.png").symlink_to(target)
        elif kind == "folder link from outside":
            elsewhere = self.outside / f"folder {self.count}"
            self.image(elsewhere / "one.png")
            self.image(elsewhere / "deep" / "two.png")
            (folder / name).symlink_to(elsewhere)
        elif kind == "link to own folder":
            (folder / name).symlink_to(folder)
        elif kind == "link to parent":
            (folder / name).symlink_to(folder, target_is_directory=True)
        elif kind == "dangling link":
            (folder / f"{name}.png").symlink_to("missing.png")
        elif kind == "text":
            (folder / f"{name}.txt").write_text("notes")
        elif kind == "hidden image":
            self.image(folder / f".{name}.png")
        elif kind == "wrong extension":
            self.image(folder / f"{name}.jpg")
        elif kind == "empty image":
            (folder / f"{name}.png").touch()
        elif kind == "cut image":
            content = own.read_bytes()
            (folder / f"{name}.png").write_bytes(content[: len(content) // 2])
        elif kind == "link from another class":
            others = [path for path in folder.parent.glob("*/*.png") if path.parent != folder]
            if others:
                (folder / f"{name}.png").symlink_to(sorted(others)[0])


def check_folders(case: Folders, directory: Path) -> None:
    Writer(directory).write(case)
    try:
        parts = [load(directory / "data", split, size=8) for split in ("train", "valid")]
    except Exception as error:
        sentence(error)
        assert case.may_be_refused(), f"{case} is refused: {error}"
        return
    names = sorted(case.classes)
    composed = [unicodedata.normalize("NFC", name) for name in names]
    assert list(parts[0].class_names) == composed
    counts = [torch.bincount(part.labels, minlength=len(names)) for part in parts]
    expected = [case.expected()[name] for name in names]
    kinds = [kind for own in case.classes.values() for kind in own]
    if not any(kind in FAULTS for kind in kinds):
        wholes = [sum(counts)] if case.splits == ("",) else counts
        for found in wholes:
            assert found.tolist() == expected, (case, found, expected)
    pixels = [{image.numpy().tobytes() for image in part.images} for part in parts]
    if pixels[0] & pixels[1]:
        assert "link from another class" in kinds, f"{case}: an image is in both splits"
        assert "class" in parts[0].note + parts[1].note, f"{case}: nothing is said"


# Image files

FORMATS = {
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"),
    "TIFF": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16", "CMYK"),
    "BMP": ("L", "P", "RGB"),
    "WEBP": ("RGB", "RGBA"),
    "GIF": ("P",),
}
CHANNELS = {"LA": 2, "RGB": 3, "RGBA": 4, "CMYK": 4}
DAMAGES = {name: ["cut", "empty", "text"] for name in FORMATS}
DAMAGES["PNG"].append("changed byte")  # others have no checksums, so it is another image


@dataclass
class Photo:
    """An image file: its format and mode, its size, its EXIF orientation, the seed of its pixels and its damage."""

    format: str
    mode: str
    width: int
    height: int
    orientation: int
    seed: int
    damage: str | None
    place: float

    def levels(self) -> np.ndarray:
        shape = (self.height, self.width)
        if self.mode in CHANNELS:
            shape += (CHANNELS[self.mode],)
        high = {"1": 2, "I;16": 65536}.get(self.mode, 256)
        dtype = np.uint16 if self.mode == "I;16" else np.uint8
        return np.random.default_rng(self.seed).integers(0, high, shape).astype(dtype)

    def palette(self) -> np.ndarray:
        return np.random.default_rng(self.seed + 1).integers(0, 256, (256, 3)).astype(np.uint8)

    def expected(self) -> np.ndarray:
        """(H, W, 3) levels: gray repeated, transparency over white, upright."""
        values = self.levels().astype(np.float64)
        if self.mode == "P":
            color = self.palette()[self.levels()].astype(np.float64)
        elif self.mode == "CMYK":
            color = (255 - values[..., :3]) * (255 - values[..., 3:]) / 255
        else:
            scale = {"1": 255, "I;16": 1 / 257}.get(self.mode, 1)
            color = values * scale
        if self.mode in ("LA", "RGBA"):
            alpha = color[..., -1:] / 255
            color = color[..., :-1] * alpha + 255 * (1 - alpha)
        if color.ndim == 2:
            color = color[..., None]
        color = np.broadcast_to(color, (self.height, self.width, 3))
        turns = {3: 2, 6: -1, 8: 1, 5: -1, 7: 1, 4: 2}.get(self.orientation, 0)
        mirrored = self.orientation in (2, 4, 5, 7)
        upright = np.rot90(color, turns)
        return upright[:, ::-1] if mirrored else upright

    def encode(self) -> bytes:
        levels = self.levels()
        if self.mode == "P":
            image = Image.fromarray(levels, "P")
            image.putpalette(self.palette().tobytes())
        elif self.mode == "1":
            image = Image.fromarray(levels * np.uint8(255)).convert("1", dither=0)
        elif self.mode in ("CMYK", "LA"):
            image = Image.fromarray(levels, self.mode)
        else:
            image = Image.fromarray(levels)
        options = {"lossless": True, "exact": True} if self.format == "WEBP" else {}
        if self.orientation > 1 and self.format in ("PNG", "TIFF", "WEBP"):
            exif = Image.Exif()
            exif[ExifTags.Base.Orientation] = self.orientation
            options["exif"] = exif
        file = io.BytesIO()
        image.save(file, self.format, **options)
        content = bytearray(file.getvalue())
        position = int(self.place * (len(content) - 1))
        if self.damage == "cut":
            content = content[:position]
        elif self.damage == "changed byte":
            content[position] ^= 0x55
        elif self.damage == "empty":
            content = b""
        elif self.damage == "text":
            content = b"<html>404 Not Found</html>"
        return bytes(content)


@st.composite
def photos(draw) -> Photo:
    file_format = draw(st.sampled_from(sorted(FORMATS)))
    can_turn = file_format in ("PNG", "TIFF", "WEBP")
    return Photo(
        format=file_format,
        mode=draw(st.sampled_from(FORMATS[file_format])),
        width=draw(st.integers(1, 40)),
        height=draw(st.integers(1, 40)),
        orientation=draw(st.integers(1, 8)) if can_turn else 1,
        seed=draw(st.integers(0, 2**16)),
        damage=draw(st.sampled_from([None] * 4 + DAMAGES[file_format])),
        place=draw(st.floats(0, 0.999)),
    )


def check_photo(case: Photo, directory: Path) -> None:
    path = directory / f"image.{case.format.lower()}"
    path.write_bytes(case.encode())
    expected = case.expected()
    try:
        found = np.asarray(load_image(path), np.float64)
    except ImageError as error:
        sentence(error)
        assert case.damage, f"{case} is refused: {error}"
        return
    if case.damage == "changed byte" and found.shape != expected.shape:
        assert found.shape == expected.swapaxes(0, 1).shape  # in the EXIF orientation
        return
    assert found.shape == expected.shape, case
    if case.damage != "changed byte" or case.orientation == 1:
        worst = np.abs(found - expected).max()
        assert worst <= 1.01, f"{case} differs by {worst} levels"


# Checkpoints

ARCHITECTURE = dict(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=2)
CLASSES = 3
WRAPPERS = ("", "state_dict", "model", "model_state_dict", "state_dict_ema", "module", "net")
PREFIXES = ("", "module.", "model.", "_orig_mod.", "module._orig_mod.", "backbone.", "encoder.")
HEADS = ("head", "fc", "classifier", "linear", "head.1")
DTYPES = ("float32", "float16", "bfloat16", "float64")
CHANGES = ("missing", "extra", "other positions", "other shape", "without head")
CHANGES += ("one of another type", "two heads", "two models")


@dataclass
class Checkpoint:
    """A file with the weights of a ViT: where they are, their names and types, and what is wrong with them."""

    seed: int
    wrapper: str
    prefix: str
    head: str
    dtype: str
    safetensors: bool
    change: str
    which: int

    def tensors(self) -> dict[str, torch.Tensor]:
        """The ViT's tensors in the dtype of the file, by timm's names."""
        torch.manual_seed(self.seed)
        model = timm.create_model("vit_tiny_patch16_224", **ARCHITECTURE, num_classes=CLASSES)
        dtype = getattr(torch, self.dtype)
        return {
            name: torch.randn_like(value).to(dtype) for name, value in model.state_dict().items()
        }

    def changed(self) -> str:
        """Name of the tensor that is missing, or of another type or shape."""
        names = sorted(name for name in self.tensors() if not name.startswith("head"))
        return names[self.which % len(names)]

    def content(self) -> dict:
        tensors = self.tensors()
        name = self.changed()
        if self.change == "missing":
            del tensors[name]
        elif self.change == "extra":
            tensors["blocks.0.adapter.weight"] = torch.ones(3, 3)
        elif self.change == "other positions":
            tensors["pos_embed"] = torch.randn(1, 1 + 36, 24).to(tensors["pos_embed"].dtype)
        elif self.change == "one of another type":
            tensors[name] = tensors[name].half()
        elif self.change == "other shape":
            tensors[name] = torch.cat([tensors[name]] * 2)
        stored = {}
        for name, value in tensors.items():
            if not name.startswith("head"):
                stored[self.prefix + name] = value
            elif self.change != "without head":
                prefix = self.prefix if self.head == "head" else ""
                stored[prefix + name.replace("head", self.head)] = value
        if self.change == "two heads":
            stored["head_aux.weight"] = torch.randn(CLASSES, 24)
            stored["head_aux.bias"] = torch.randn(CLASSES)
        elif self.change == "two models":
            copies = {f"copy.{name}": value + 1 for name, value in stored.items()}
            stored = {f"original.{name}": value for name, value in stored.items()} | copies
        return stored

    def write(self, directory: Path) -> Path:
        stored = self.content()
        if self.safetensors:
            path = directory / "model.safetensors"
            save_file({name: value.contiguous() for name, value in stored.items()}, path)
            return path
        path = directory / "model.pth"
        content = {self.wrapper: stored, "epoch": 3} if self.wrapper else stored
        torch.save(content, path)
        return path


checkpoints = st.builds(
    Checkpoint,
    seed=st.integers(0, 2**16),
    wrapper=st.sampled_from(WRAPPERS),
    prefix=st.sampled_from(PREFIXES),
    head=st.sampled_from(HEADS),
    dtype=st.sampled_from(DTYPES),
    safetensors=st.booleans(),
    change=st.sampled_from(CHANGES + ("none",) * 4),
    which=st.integers(0, 100),
)


def check_checkpoint(case: Checkpoint, directory: Path) -> None:
    path = case.write(directory)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            model = load_model("vit_tiny_patch16_224", checkpoint=path, **ARCHITECTURE)
    except Exception as error:
        text = sentence(error)
        changed = case.change not in ("none", "without head", "one of another type")
        assert changed, f"{case} is refused: {text}"
        return
    if case.change == "two models":
        assert "original." in said.getvalue(), f"{case}: which model was taken is not said"
    assert case.change not in ("missing", "other shape"), f"{case} opens, {said.getvalue()}"
    found = model.state_dict()
    expected = case.tensors()
    if case.change == "one of another type":
        name = case.changed()
        expected[name] = expected[name].half()
    for name, value in expected.items():
        is_head = name.startswith("head")
        if is_head and case.change == "without head":
            continue
        arrived = name in found and found[name].shape == value.shape
        same = arrived and torch.equal(found[name].double(), value.double())
        stored = name.replace("head", case.head) if is_head else name
        assert same or stored in said.getvalue(), f"{case}: {name} differs, and nothing is said"
    if case.change == "two heads":
        assert "head_aux" in said.getvalue(), f"{case}: a second head is dropped without a word"
    if case.change == "extra":
        assert "adapter" in said.getvalue(), f"{case}: an extra tensor is dropped without a word"
    if case.change == "other positions":
        assert "pos_embed" in said.getvalue(), f"{case}: positions are resampled without a word"


# Runs

KINDS = {
    "folders": (folders, check_folders),
    "photos": (photos(), check_photo),
    "checkpoints": (checkpoints, check_checkpoint),
}


def run(kind: str, examples: int, number: int = 0) -> None:
    """Draw cases of a kind from a seed and check each. The shortest failing case is in the error."""
    strategy, check = KINDS[kind]

    def check_one(case) -> None:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as directory:
            check(case, Path(directory))
        took = time.monotonic() - began
        assert took < LIMIT, f"{case} took {took:.0f} s"

    test = given(case=strategy)(check_one)
    test = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )(test)
    seed(number)(test)()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    options = parser.parse_args()
    for kind in options.kinds:
        began = time.monotonic()
        run(kind, options.examples, options.seed)
        took = time.monotonic() - began
        print(
            f"{options.examples} {kind}, seed {options.seed}: no fault in {took:.0f} s", flush=True
        )


if __name__ == "__main__":
    main()
