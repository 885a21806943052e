"""Sample photographs of live pages."""

import csv
from pathlib import Path

import pytest
from support import SPECIMEN

from vitlens import load_model, preprocess, run, samples
from vitlens.models import top_classes
from vitlens_explorer import photos
from vitlens_explorer.in_page import explorer_of

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("folder", ["bundled", SPECIMEN])
def test_live_pages_show_photos_that_their_model_names_right(folder):
    model = load_model(str(folder))
    page = explorer_of(model, None, live=True)
    shown = page.photographs
    assert next(iter(shown)) == page.state["photograph"] == "chelsea"
    assert len(shown) == (7 if folder == "bundled" else 5)
    answers = {sample.name: sample.classes for sample in photos.SAMPLES}
    for name, photograph in shown.items():
        logits = run(model, preprocess(model, photograph.image, on_note=lambda note: None))
        likeliest = top_classes(model, logits, 1)[0][0][0]
        assert likeliest.split(",")[0] in answers[name], (name, likeliest)


def test_model_that_names_none_shows_the_first_three(vit):
    shown = explorer_of(vit(img_size=64), None, live=True).photographs
    assert list(shown) == ["chelsea", "coffee", "panda"]


def test_each_photo_has_an_author_and_a_license():
    """The same as in the table of all free photographs."""
    with (ROOT / "data" / "photographs.csv").open(encoding="utf-8") as file:
        listed = {row["name"]: row for row in csv.DictReader(file)}
    files = {path.stem for path in photos.FOLDER.glob("*.jpg")}
    assert files == {sample.name for sample in photos.SAMPLES if sample.listed}
    for sample in photos.SAMPLES:
        assert sample.author
        assert sample.license in ("public domain", "CC0-1.0")
        if sample.listed:
            row = listed[sample.listed]
            told = sample.author, sample.license, sample.source
            assert told == (row["author"], row["license"], row["source"])
        else:
            assert sample.name in samples()
