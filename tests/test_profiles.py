"""What is done to a picture when it is read, from every door the same, and that it is said."""

import io
import struct

import numpy as np
import pytest
import torch
from data_support import saved
from PIL import Image, ImageCms
from test_explorer import PICTURE, browser
from test_images import RAMP, corners, flat

from vitlens import load_image, widgets
from vitlens.images import rgb
from vitlens.models import preprocess, restore
from vitlens.reports import inspection
from vitlens.widgets import pictured


def s15(value):
    return struct.pack(">i", round(value * 65536))


def profile(primaries, gamma, name="Wide"):
    """An ICC profile (version 2) by hand: three primaries in XYZ under D50, and one gamma for all."""
    xyz = lambda x, y, z: b"XYZ \0\0\0\0" + s15(x) + s15(y) + s15(z)  # noqa: E731
    curve = b"curv\0\0\0\0" + struct.pack(">IH", 1, round(gamma * 256)) + b"\0\0"
    text = name.encode() + b"\0"
    description = b"desc\0\0\0\0" + struct.pack(">I", len(text)) + text + bytes(4 + 4 + 2 + 1 + 67)
    description += bytes(-len(description) % 4)
    parts = {b"desc": description, b"wtpt": xyz(0.9642, 1.0, 0.8249)}
    parts |= {b"cprt": b"text\0\0\0\0none\0\0\0\0"}
    parts |= dict(zip((b"rXYZ", b"gXYZ", b"bXYZ"), (xyz(*each) for each in primaries), strict=True))
    parts |= dict.fromkeys((b"rTRC", b"gTRC", b"bTRC"), curve)
    table, data, at = struct.pack(">I", len(parts)), b"", 128 + 4 + 12 * len(parts)
    for tag, content in parts.items():
        table += tag + struct.pack(">II", at + len(data), len(content))
        data += content
    size = 128 + len(table) + len(data)
    head = struct.pack(">I4sI4s4s4s", size, bytes(4), 0x02100000, b"mntr", b"RGB ", b"XYZ ") + bytes(12) + b"acsp"
    head += bytes(28) + s15(0.9642) + s15(1.0) + s15(0.8249)
    return head + bytes(128 - len(head)) + table + data


# Primaries of Display P3 and of sRGB under D50, as their published matrices have them.
P3 = ((0.51512, 0.24120, -0.00105), (0.29198, 0.69225, 0.04189), (0.15710, 0.06657, 0.78407))
SRGB = ((0.43607, 0.22249, 0.01392), (0.38515, 0.71687, 0.09708), (0.14307, 0.06061, 0.71410))
WIDE = profile(P3, 1.8)


def by_hand(values, primaries, gamma):
    """RGB in these primaries as sRGB, by the formulas of IEC 61966-2-1."""
    linear = (values / 255.0) ** gamma
    linear = (linear @ np.array(primaries) @ np.linalg.inv(np.array(SRGB))).clip(0, 1)
    return 255 * np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)


def ramp(icc_profile, kind="PNG", **options):
    return saved(Image.fromarray(RAMP), kind, icc_profile=icc_profile, **options)


def told(source):
    notes = []
    return np.asarray(load_image(source, on_note=notes.append)).astype(int), " ".join(notes)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP"])
def test_colors_are_converted_to_srgb(kind):
    found, note = told(ramp(WIDE, kind, **{"lossless": True} if kind == "WEBP" else {}))
    assert np.abs(found - by_hand(RAMP, P3, 1.8)).max() <= 2 and np.abs(found - RAMP).max() > 20
    assert note == "The content of the bytes given was converted from the color profile “Wide” to sRGB."


def test_srgb_by_any_name_changes_nothing():
    for same in (ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes(), None):
        found, note = told(ramp(same))
        assert (found == RAMP).all() and note == ""


def test_what_is_transparent_is_laid_over_white_in_srgb():
    alpha = np.full((*RAMP.shape[:2], 1), 128, np.uint8)
    found, note = told(saved(Image.fromarray(np.concatenate([RAMP, alpha], -1)), "PNG", icc_profile=WIDE))
    share = 128 / 255
    assert np.abs(found - (share * by_hand(RAMP, P3, 1.8) + (1 - share) * 255)).max() <= 2
    assert "to sRGB; was laid over white where it is transparent." in note


def test_profiles_that_are_damaged_or_do_not_fit_are_ignored_and_said():
    for bad in (b"nonsense" * 40, WIDE[:300]):
        found, note = told(ramp(bad))
        assert (found == RAMP).all() and "has a color profile that is damaged" in note
    gray = Image.fromarray(RAMP[..., 0])
    found, note = told(saved(gray.convert("I;16"), "TIFF", icc_profile=WIDE))
    assert "“Wide”, that does not fit its kind of pixels and was ignored" in note
    found, note = told(saved(gray, "PNG", icc_profile=WIDE))  # gray, in the tone curve of the profile
    expected = by_hand(np.repeat(RAMP[..., :1], 3, -1), P3, 1.8)
    assert np.abs(found - expected).max() <= 2 and "to sRGB" in note


def test_a_profile_with_damaged_bytes_never_ends_in_more_than_a_note(capfd):
    rng = np.random.default_rng(0)
    for _ in range(300):
        broken = bytearray(WIDE)
        for place in rng.integers(0, len(WIDE), 4):
            broken[place] = rng.integers(256)
        image = Image.fromarray(RAMP)
        image.info["icc_profile"] = bytes(broken)
        assert told(image)[0].shape == RAMP.shape
    assert capfd.readouterr() == ("", "")


def phone(wide=1500, high=1100):
    """A photograph of over 700 kB that lies on its side, in the colors of a wide profile."""
    pixels = np.random.default_rng(1).integers(0, 256, (high, wide, 3), np.uint8)
    exif = Image.Exif()
    exif[274] = 6
    return saved(Image.fromarray(pixels), "JPEG", quality=90, icc_profile=WIDE, exif=exif)


def parts(page, name, data, number, order=1, size=2**19, **more):
    for at in [*range(0, len(data), size)][::order]:
        last = {"number": number} if at + size >= len(data) else {}
        message = {"upload": name, "file": number, "at": at, "of": len(data), **last, **more}
        page._receive(page, message, [memoryview(data[at : at + size])])


@pytest.fixture
def shown(vit, monkeypatch):
    """A page, and the list of what it sends."""
    page, sent = widgets.explore(vit(), PICTURE), []
    monkeypatch.setattr(page, "send", lambda content, *_: sent.append(content))
    return page, sent


@pytest.mark.parametrize("order", [1, -1])
def test_the_same_pixels_from_every_door(vit, shown, tmp_path, order):
    data, model, (page, sent) = phone(), vit(), shown
    assert len(data) > 1_400_000
    (file := tmp_path / "phone.jpg").write_bytes(data)
    notes = []
    wanted = load_image(file, on_note=notes.append)
    assert wanted.size == (1100, 1500)
    assert notes == [f"{str(file)!r} was converted from the color profile “Wide” to sRGB; was turned upright, as its "
                     "EXIF orientation says."]  # fmt: skip
    parts(page, "phone.jpg", data, 7, order)
    assert page.wait(60) and page.frame["answers"] == 7 and page.frame["message"] == ""
    assert page.photograph.image.tobytes() == wanted.tobytes(), "to the bit"
    assert [each["received"] for each in sent][-1] == len(data) and len(sent) == -(-len(data) // 2**19)
    assert page.frame["about"] == notes[0].replace(str(file), "phone.jpg")
    given = widgets.explore(model, file)
    assert given.photograph.image.tobytes() == wanted.tobytes() and given.frame["about"] == notes[0]
    seen = restore(model, preprocess(model, wanted, size=(64, 64)))[0]
    found = inspection.inspect(model, [("phone.jpg", file)])
    assert np.array_equal(found.pictures[0].pixels, seen) and np.array_equal(page.subject.pixels, seen)
    assert notes[0] in found.notes


def test_a_later_upload_replaces_an_unfinished_one_and_says_so(shown):
    page, sent = shown
    first, second = phone(), saved(Image.fromarray(RAMP), "PNG")
    begun = {"upload": "first.jpg", "file": 1, "of": len(first)}
    page._receive(page, begun | {"at": 0}, [first[: 2**19]])
    assert sent.pop() == {"file": 1, "received": 2**19} and "your picture" not in page.photographs
    parts(page, "second.png", second, 2)
    assert page.wait(60) and (np.asarray(page.photograph.image) == RAMP).all()
    page._receive(page, begun | {"at": 2**19}, [first[2**19 :]])
    assert sent[-1] == {"file": 1, "problem": "first.jpg was replaced by a later upload."}
    assert page.wait(60) and (np.asarray(page.photograph.image) == RAMP).all()


def test_the_limit_of_uploads_holds_in_python_too(shown):
    page, sent = shown
    assert page.frame["uploads"] == pictured.LARGEST == 64 * 2**20
    page._receive(page, {"upload": "a.png", "file": 1, "at": 0, "of": 64 * 2**20 + 1}, [b"x"])
    assert all(word in sent[-1]["problem"] for word in ("a.png", "64 MB", "smaller"))
    assert not page._coming.parts


def test_what_was_done_is_said():
    exif = Image.Exif()
    exif[274] = 3
    animation = saved(flat((9, 9, 9)), "GIF", save_all=True, append_images=[flat((200, 0, 0))])
    cases = {
        "was turned upright": saved(corners(), "PNG", exif=exif),
        "holds 2 pictures; the first is shown": animation,
        "was laid over white": saved(Image.new("RGBA", (8, 6), (1, 2, 3, 4)), "PNG"),
    }
    for words, data in cases.items():
        assert words in told(data)[1]
    for plain in (flat((1, 2, 3)), Image.new("RGBA", (8, 6), (1, 2, 3, 255))):
        assert told(saved(plain, "PNG"))[1] == ""


@pytest.mark.parametrize("bits", [8, 10, 12, 14])
def test_few_bits_in_sixteen_are_never_stretched_and_always_said(bits):
    most = 2**bits - 1
    levels = np.linspace(0, most, 48).round().astype(np.uint16).reshape(6, 8)
    words = f"has levels up to {most:,} of 65,535, as {bits}-bit data in 16 bits have, and is as dark as that; if it " \
            f"should be brighter, multiply its levels by {2 ** (16 - bits)} first."  # fmt: skip
    for source in (levels, torch.from_numpy(levels), Image.fromarray(levels), saved(Image.fromarray(levels), "PNG"),
                   saved(Image.fromarray(levels), "TIFF")):  # fmt: skip
        found, note = told(source)
        assert (found == ((levels.astype(int) + 128) // 257)[..., None]).all() and note.endswith(words)
    full = (levels.astype(int) * 65535 // most).astype(np.uint16)
    assert told(full)[1] == "" and "levels" not in told(saved(Image.fromarray(full), "PNG"))[1]
    assert told(np.zeros((4, 4), np.uint16))[1] == ""


def test_data_sets_are_read_as_timm_reads_them():
    image = Image.open(io.BytesIO(ramp(WIDE)))
    assert (np.asarray(rgb(image)) == RAMP).all()


def test_a_small_file_in_one_message_is_an_upload_too(vit):
    page = widgets.explore(vit(), PICTURE)
    assert browser(page, {"upload": "a.png"}, ramp(WIDE)) == ""
    assert "“Wide” to sRGB" in page.frame["about"]
