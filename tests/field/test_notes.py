"""Changes of pixels on the way to RGB, counted and reported at every door that reads images."""

import io
import json
import struct
import zlib

import numpy as np
import pytest
import torch
from forms import cannot_occur, form
from PIL import ExifTags, Image, ImageCms
from support import encoded, parquet, profile, saved, saved_model, tar, vitlens, write

from vitlens import report
from vitlens.data import Samples, load, sources
from vitlens.images import ImageError, Remark, load_image
from vitlens.models import load_model
from vitlens_explorer import app, in_page
from vitlens_explorer.explorer import Explorer

SIDE = 32
DARK = "of 40 images have levels that use less than a quarter of 16 bits, so they may look dark"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return saved_model(tmp_path_factory.mktemp("model"), num_classes=2)


def plain(seed, kind="PNG"):
    return encoded(seed, kind, size=(SIDE, SIDE))


def dark(seed):
    """A PNG file with levels of 12 of its 16 bits."""
    levels = np.random.default_rng(seed).integers(1, 4096, (SIDE, SIDE))
    return saved(levels.astype(np.uint16))


def turned(seed):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    pixels = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3)).astype(np.uint8)
    return saved(pixels, "JPEG", exif=exif)


def clear(seed, level=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 4)).astype(np.uint8)
    pixels[..., 3] = level
    return saved(pixels)


def animated(seed):
    frames = [Image.new("RGB", (SIDE, SIDE), (seed + k, 0, 0)) for k in (0, 100, 200)]
    return saved(frames[0], "GIF", save_all=True, append_images=frames[1:])


def data_folder(root, special, count=40, every=4):
    """Two classes of images in train and in val, of which each fourth is special."""
    content = {}
    for i in range(count):
        data = special(i) if i % every == 0 else plain(i)
        for split in ("train", "val"):
            content[f"{split}/{'ab'[i % 2]}/{i:03d}.png"] = data
    return write(root, content)


@form(
    6,
    door="Python: data.load, class folders in memory",
    case="ten of 40 images with 12 of 16 bits",
    right="count by hand: 10; pixels by load_image",
)
def test_dark_images_of_a_folder_are_counted(tmp_path):
    folder = data_folder(tmp_path, dark)
    found = load(folder, size=SIDE)
    assert found.note == f"10 {DARK}."
    first = np.asarray(load_image(dark(0)))
    assert np.array_equal(found.images[0].permute(1, 2, 0).numpy(), first)


@form(
    6,
    door="Python: data.load, stream with workers",
    case="ten of 40 images turned by EXIF, read twice",
    right="count by hand: 10 of 40",
)
def test_a_stream_counts_the_images_that_it_has_read(tmp_path):
    stream = load(data_folder(tmp_path, turned), size=SIDE, stream=True, workers=2)
    assert "of 16 images read so far were turned upright" in stream.note
    for _ in range(2):
        for _ in stream.batches(torch.arange(40).split(16)):
            pass
    assert stream.note == "10 of 40 images were turned upright by their EXIF orientation."


@form(
    6,
    door="Python: data.load, Parquet",
    case="animations among PNG files",
    right="Pillow's n_frames: 2 files with 3 frames",
)
def test_animations_in_parquet_files_are_counted(tmp_path):
    pytest.importorskip("datasets")
    images = [animated(1), plain(2), animated(3), plain(4)]
    parquet(tmp_path / "train-0.parquet", images, [0, 1, 0, 1], ["a", "b"])
    note = load(tmp_path, root=tmp_path / "cache").note
    assert note == "2 of 4 images hold several images, of which the first is read."


@form(
    6,
    door="Python: data.load, WebDataset",
    case="transparent and opaque files with an alpha channel",
    right="count by hand: 3 have an alpha below 255",
)
def test_transparent_images_in_tar_files_are_counted(tmp_path):
    pytest.importorskip("datasets")
    content = {}
    for i in range(4):
        content |= {f"{i}.png": clear(i, 255 if i == 3 else 90), f"{i}.cls": str(i % 2).encode()}
    tar(tmp_path / "train-0.tar", content)
    note = load(tmp_path).note
    assert note == "3 of 4 images were laid over white where they are transparent."


@form(
    6,
    door="Python: data.register, named data",
    case="Pillow images of 16 bits from a function",
    right="count by hand: 2",
)
def test_images_of_a_registered_set_are_counted(monkeypatch):
    levels = np.full((SIDE, SIDE), 4000, np.uint16)

    def opens(name, split, root, fold):
        images = [Image.fromarray(levels), Image.new("RGB", (SIDE, SIDE)), Image.fromarray(levels)]
        return Samples(images, [0, 1, 0], ("a", "b"), range(3))

    monkeypatch.setattr(sources, "SOURCES", {"mine": ("mine", opens)})
    assert load("mine", size=SIDE).note.startswith("2 of 3 images have levels")


@form(
    6,
    door="Python: data.load, color profiles",
    case="a wide profile, an sRGB profile, no profile",
    right="Pillow's convert without a profile, bit by bit",
)
def test_data_sets_keep_pixels_and_count_profiles(tmp_path):
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    wide = profile([[0.7, 0.3, 0.0], [0.2, 0.7, 0.1], [0.1, 0.0, 0.9]], 1.8)
    pixels = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3)).astype(np.uint8)
    content = {}
    for i, icc in enumerate((wide, srgb, None)):
        content[f"train/a/{i}.png"] = saved(pixels, icc_profile=icc)
    found = load(write(tmp_path, content), size=SIDE)
    for image in found.images:
        assert np.array_equal(image.permute(1, 2, 0).numpy(), pixels)
    assert found.note == (
        "1 of 3 images have a color profile other than sRGB, which data sets do not apply."
    )


@form(
    6,
    door="command: train, in memory and streamed",
    case="ten of 40 images with 12 of 16 bits",
    right="count by hand: 10",
)
@pytest.mark.parametrize("way", ["--hold", "--stream"])
def test_training_reports_dark_images(tmp_path, way):
    folder = data_folder(tmp_path / "data", dark)
    done = vitlens(
        *("train", "--recipe", "digits", "--tiny", "--device", "cpu", way, "--workers", 0),
        *("--watch", 0, "--set", "epochs=1", "--set", "batch_size=8", "--set", "augment.scale=1,1"),
        *("--data", folder, "--out", tmp_path / "run"),
    )
    assert f"10 {DARK}" in done.stderr


@form(
    6,
    door="command: evaluate --out",
    case="ten of 40 images with 12 of 16 bits",
    right="count by hand: 10, in the record",
)
def test_evaluation_keeps_the_count_in_its_record(model_folder, tmp_path):
    folder = data_folder(tmp_path / "data", dark)
    out = tmp_path / "results.json"
    options = "--protocol", "knn", "--neighbors", 1, "--workers", 0, "--device", "cpu"
    vitlens("evaluate", model_folder, "--data", folder, *options, "--out", out)
    for record in json.loads(out.read_text()):
        assert record["note"].count(f"10 {DARK}.") == 1
        assert str(tmp_path) not in record["note"]


@form(
    6,
    door="command: inspect, images and --data",
    case="five turned photos drawn, four more measured",
    right="count by hand: 9 of 10",
)
def test_inspect_counts_what_it_does_not_list(model_folder, tmp_path):
    drawn = {f"{i}.jpg": turned(i) for i in range(5)} | {"x.png": plain(9)}
    write(tmp_path / "f", drawn)
    write(tmp_path / "more", {f"m{i}.jpg": turned(50 + i) for i in range(4)})
    out = tmp_path / "out"
    done = vitlens(
        "inspect", model_folder, tmp_path / "f", "--data", tmp_path / "more", "--out", out
    )
    notes = json.loads((out / "summary.json").read_text())["notes"]
    about = [note for note in notes if "turned upright" in note]
    assert len(about) == 4
    assert about[-1] == "9 of 10 images were turned upright by their EXIF orientation."
    assert done.stdout.count("turned upright") == 4


@form(
    6,
    door="command: explain, images and --like",
    case="five transparent images, explained by a turned one",
    right="count by hand: 5 of 5",
)
def test_explain_counts_what_it_does_not_list(model_folder, tmp_path):
    write(tmp_path / "f", {f"{i}.png": clear(i) for i in range(5)} | {"like.jpg": turned(9)})
    images = [tmp_path / "f" / f"{i}.png" for i in range(5)]
    done = vitlens(
        *("explain", model_folder, *images, "--like", tmp_path / "f" / "like.jpg"),
        *("--methods", "rollout", "--out", tmp_path / "out"),
    )
    assert "5 of 5 images were laid over white where they are transparent." in done.stdout
    assert done.stdout.count("over white") == 4
    assert "like.jpg' was turned upright" in done.stderr


@form(
    6,
    door="Python: save_page and live page",
    case="a dark and a plain photo",
    right="load_image's own sentence",
)
def test_pages_have_the_notes_of_their_photos(model_folder, tmp_path):
    folder = write(tmp_path, {"dark.png": dark(0), "plain.png": plain(1)})
    files = {name: folder / name for name in ("dark.png", "plain.png")}
    page = in_page.explorer_of(load_model(str(model_folder)), files)
    notes = {name: photograph.note for name, photograph in page.photographs.items()}
    assert "of 65,535, so it may look dark" in notes["dark.png"] and notes["plain.png"] == ""


@form(
    6,
    door="command: app",
    case="a dark first image",
    right="load_image's own sentence",
)
def test_app_keeps_the_note_of_its_first_image(model_folder, tmp_path, monkeypatch):
    class Stop(Exception):
        pass

    def start(model, photograph, *_):
        raise Stop(photograph)

    monkeypatch.setattr(app, "App", start)
    file = write(tmp_path, {"dark.png": dark(0)}) / "dark.png"
    with pytest.raises(Stop) as stopped:
        app.serve(None, file)
    (photograph,) = stopped.value.args
    page = Explorer(load_model(str(model_folder)), photograph)
    assert "so it may look dark" in page.photograph.note


@form(
    6,
    door="Python: report.prepared(on_note=)",
    case="several changes of one image",
    right="Pillow's n_frames and the alpha channel",
)
def test_remarks_name_all_changes_of_an_image(model_folder, tmp_path):
    frames = [Image.new("RGBA", (SIDE, SIDE), (k, 0, 0, 9)) for k in range(3)]
    file = tmp_path / "a.png"
    frames[0].save(file, save_all=True, append_images=frames[1:])
    notes = []
    list(report.prepared(load_model(str(model_folder)), [("a", file)], on_note=notes.append))
    (note,) = (note for note in notes if isinstance(note, Remark))
    assert note.kinds == ("transparent", "frames") and "holds 3 images" in note


def png_of_gray(depth, row, *chunks):
    """A PNG file of 8 × 8 gray pixels of some bits, and further chunks, as (name, content)."""
    size = struct.pack(">IIBBBBB", 8, 8, depth, 0, 0, 0, 0)
    parts = [(b"IHDR", size), *chunks, (b"IDAT", zlib.compress(8 * (b"\0" + row))), (b"IEND", b"")]
    data = b"\x89PNG\r\n\x1a\n"
    for name, content in parts:
        data += struct.pack(">I", len(content)) + name + content
        data += struct.pack(">I", zlib.crc32(name + content))
    return data


@form(
    6,
    door="Python: load_image, TIFF and PNG",
    case="TIFF turned by EXIF, which Pillow turns itself, and a PNG file of a gamma of 1",
    right="the same pixels, transposed by Pillow, and the count of the notes",
)
def test_tiff_and_gamma_are_noted():
    pixels = np.random.default_rng(0).integers(0, 256, (8, 12, 3)).astype(np.uint8)
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    notes = []
    image = load_image(saved(pixels, "TIFF", exif=exif.tobytes()), on_note=notes.append)
    assert np.array_equal(image, np.rot90(pixels, -1))
    linear = png_of_gray(8, bytes(range(8)), (b"gAMA", struct.pack(">I", 100_000)))
    load_image(linear, on_note=notes.append)
    load_image(png_of_gray(8, bytes(8), (b"gAMA", struct.pack(">I", 45_455))), on_note=notes.append)
    assert [note.kinds for note in notes] == [("turned",), ("gamma",)]


@form(
    6,
    door="Python: load_image, bytes of a PNG file",
    case="a transparent level in gray of 4, 2 and 1 bits",
    right="the PNG specification by hand: the level is white, the others are scaled to 255",
)
@pytest.mark.parametrize("depth, row", [(4, b"\x01\x23\x45\x67"), (2, b"\x1b\x1b"), (1, b"\x55")])
def test_transparent_levels_of_few_bits_become_white(depth, row):
    bits = np.unpackbits(np.frombuffer(row, np.uint8)).reshape(8, depth)
    levels = bits @ (1 << np.arange(depth)[::-1])
    expected = levels * 255 // (2**depth - 1)
    expected[levels == 1] = 255
    notes = []
    image = load_image(png_of_gray(depth, row, (b"tRNS", b"\0\1")), on_note=notes.append)
    assert np.array_equal(np.asarray(image)[0, :, 0], expected)
    assert notes[0].kinds == ("transparent",)


@form(
    6,
    door="Python: load_image, bytes of a damaged file",
    case="a CMYK JPEG that was cut and closed, and a header of 3.6 billion pixels",
    right="the level with which libjpeg fills in, and the product of the sides",
)
def test_cut_cmyk_and_huge_header_are_reported():
    pixels = np.random.default_rng(0).integers(0, 256, (200, 200, 4)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels, "CMYK").save(file, "JPEG")
    data = file.getvalue()
    notes = []
    load_image(data, on_note=notes.append)
    load_image(data[: len(data) // 2] + b"\xff\xd9", on_note=notes.append)
    assert [note.kinds for note in notes] == [("cut",)]
    huge = png_of_gray(8, bytes(8)).replace(
        b"IHDR" + struct.pack(">II", 8, 8), b"IHDR" + struct.pack(">II", 60_000, 60_000)
    )
    start = huge.index(b"IHDR")
    huge = (
        huge[: start + 17]
        + struct.pack(">I", zlib.crc32(huge[start : start + 17]))
        + huge[start + 21 :]
    )
    with pytest.raises(ImageError, match="has 3600000000 pixels and is not decoded"):
        load_image(huge)


cannot_occur(
    6,
    door="torch/NAME",
    reason="torchvision decodes these published files itself, and they have none of the changes",
)
