"""Photographs that the chapter on training takes: crops, classes of Tiny-ImageNet, folders, and no network."""

import pytest
import torch
import training_photos
from PIL import Image
from training_photos import open_training_photos

from vitlens.data import ImageSet
from vitlens.train.recipes import recipe

SMALL = recipe("photos-t4").override("image_size=16", "resize=24", "patch_size=8")


@pytest.fixture(autouse=True)
def no_real_data(monkeypatch):
    monkeypatch.delenv("VITLENS_REAL_DATA", raising=False)


def test_without_a_source_crops_of_twenty_photographs_are_the_classes():
    training, held_out, sentence = open_training_photos(None, SMALL)
    assert training.images.shape == (20 * 250, 3, 24, 24), "stored as the recipe crops them"
    assert held_out.images.shape == (20 * 50, 3, 16, 16)
    assert len(set(training.class_names)) == 20 and training.class_names == held_out.class_names
    assert training.labels.bincount().tolist() == [250] * 20
    assert "stand-in" in sentence


def test_crops_to_train_on_and_to_validate_with_share_no_pixel():
    photograph = Image.new("RGB", (300, 200), "red")
    photograph.paste("blue", (200, 0, 300, 200))
    for split, color in (("train", [255, 0, 0]), ("valid", [0, 0, 255])):
        crops = training_photos._crops({"two colors": photograph}, split, 8).images
        expected = torch.tensor(color)[:, None, None]
        # bicubic resizing reads a border of a pixel or two beyond the box
        assert (crops[..., 2:-2, 2:-2] == expected).all()


def test_crops_are_equal_in_every_run():
    first, again = (open_training_photos(None, SMALL)[0] for _ in range(2))
    assert torch.equal(first.images, again.images)


def test_every_tenth_class_is_numbered_from_zero():
    labels = torch.arange(200).repeat(2)
    names = tuple(f"n{k}" for k in range(200))
    pixels = labels.to(torch.uint8)[:, None, None, None].expand(-1, 3, 2, 2)
    chosen = training_photos._every_tenth_class(ImageSet(pixels, labels, names))
    assert chosen.class_names == names[::10]
    assert torch.equal(chosen.images[:, 0, 0, 0].long(), 10 * chosen.labels)
    assert chosen.labels.bincount().tolist() == [2] * 20


def test_a_folder_of_class_folders_is_read(tmp_path):
    for name, color in (("cats", "red"), ("dogs", "blue")):
        for k in range(12):
            file = tmp_path / name / f"{k}.png"
            file.parent.mkdir(exist_ok=True)
            Image.new("RGB", (40 + k, 30), color).save(file)
    training, held_out, sentence = open_training_photos(str(tmp_path), SMALL)
    assert training.class_names == ("cats", "dogs") and str(tmp_path) in sentence
    assert len(training) + len(held_out) == 24 and len(held_out) >= 2
    assert training.images.shape[2:] == (24, 24) and held_out.images.shape[2:] == (16, 16)


def test_a_download_that_fails_is_replaced_by_crops_and_reported(monkeypatch):
    def refuse(source, *arguments, **options):
        raise ValueError(f"{source} cannot be downloaded (no network).")

    monkeypatch.setattr(training_photos, "load", refuse)
    training, _, sentence = open_training_photos("torch/imagenette160", SMALL)
    assert len(training.class_names) == 20
    assert sentence.startswith("torch/imagenette160 cannot be downloaded (no network).")
    assert "stand-in" in sentence
    with pytest.raises(ValueError, match="no network"):
        open_training_photos("my photos", SMALL)
