"""Uploads reach the page with the same pixels as files given in Python."""

import numpy as np
import pytest
from PIL import Image
from support import PICTURE, RAMP, WIDE, saved

import vitlens_explorer as widgets
from vitlens import load_image, report
from vitlens.models import preprocess, restore
from vitlens_explorer.lanes import LARGEST_UPLOAD


def phone(wide=1500, high=1100):
    """A photograph of over 700 kB that lies on its side, in the colors of a wide profile."""
    pixels = np.random.default_rng(1).integers(0, 256, (high, wide, 3), np.uint8)
    exif = Image.Exif()
    exif[274] = 6
    return saved(Image.fromarray(pixels), "JPEG", quality=90, icc_profile=WIDE, exif=exif)


def parts(page, name, data, number, size=2**19, **more):
    for at in range(0, len(data), size):
        last = {"number": number} if at + size >= len(data) else {}
        message = {"upload": name, "file": number, "at": at, "of": len(data), **last, **more}
        page.connection.receive(message, [memoryview(data[at : at + size])])


@pytest.fixture
def shown(vit, monkeypatch):
    """A page and the list of its messages."""
    page, sent = widgets.explore(vit(), PICTURE), []
    monkeypatch.setattr(page.connection, "_send", lambda content, *_: sent.append(content))
    return page, sent


def test_uploads_equal_files_pixels(vit, shown, tmp_path):
    data, model, (page, sent) = phone(), vit(), shown
    assert len(data) > 1_400_000
    (file := tmp_path / "phone.jpg").write_bytes(data)
    notes = []
    wanted = load_image(file, on_note=notes.append)
    assert wanted.size == (1100, 1500)
    assert notes == [
        f"{str(file)!r} was converted from the color profile “Wide” to sRGB; was turned upright by its "
        "EXIF orientation."
    ]
    parts(page, "phone.jpg", data, 7)
    assert page.wait(60) and page.frame["answers"] == 7 and page.frame["message"] == ""
    assert page.page.photograph.image.tobytes() == wanted.tobytes(), "to the bit"
    assert [each["received"] for each in sent][-1] == len(data) and len(sent) == -(
        -len(data) // 2**19
    )
    # the shorter side becomes 71 pixels, of which 64 are cropped
    cropped = " The model sees the middle 992 × 992 of 1,100 × 1,500 pixels."
    assert page.frame["about"] == notes[0].replace(str(file), "phone.jpg") + cropped
    given = widgets.explore(model, file)
    assert (
        given.page.photograph.image.tobytes() == wanted.tobytes()
        and given.frame["about"] == notes[0] + cropped
    )
    seen = restore(model, preprocess(model, wanted, size=(64, 64)))[0]
    found = report.inspect(model, [("phone.jpg", file)])
    assert np.array_equal(found.pictures[0].pixels, seen) and np.array_equal(
        page.page.forward.pixels, seen
    )
    assert notes[0] in found.notes


def test_upload_replaces_unfinished_upload(shown):
    page, sent = shown
    first, second = phone(), saved(Image.fromarray(RAMP), "PNG")
    begun = {"upload": "first.jpg", "file": 1, "of": len(first)}
    page.connection.receive(begun | {"at": 0}, [first[: 2**19]])
    assert sent.pop() == {"file": 1, "received": 2**19} and "first.jpg" not in page.page.photographs
    parts(page, "second.png", second, 2)
    page.connection.receive(begun | {"at": 2**19}, [first[2**19 :]])
    assert page.wait(60) and (np.asarray(page.page.photograph.image) == RAMP).all()


def test_upload_limit_holds_in_python(shown):
    page, sent = shown
    assert page.frame["uploads"] == LARGEST_UPLOAD == 64 * 2**20
    page.connection.receive({"upload": "a.png", "file": 1, "at": 0, "of": 64 * 2**20 + 1}, [b"x"])
    assert all(word in sent[-1]["problem"] for word in ("a.png", "64 MB", "smaller"))
