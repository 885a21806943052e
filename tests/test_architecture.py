"""The book's drawing of a model, `architecture`."""

import base64
import io
import re
from xml.etree import ElementTree

import architecture
import matplotlib as mpl
import numpy as np
import pytest
import timm
from PIL import Image, ImageFont
from support import photo, refuses
from timm.models.vision_transformer import ParallelScalingBlock

from vitlens.models import preprocess, restore

ARCHITECTURES = {
    "class token": (
        {},
        [
            "0",
            "196",
            "768 → 192",
            "197 × 64",
            "192 → 768 → 192",
            "Self-attention, 3 heads",
            "GELU in between",
            "the head reads the class token",
        ],
    ),
    "registers": (
        {"reg_tokens": 4, "img_size": 128, "num_classes": 10, "init_values": 1.0},
        [
            "reg. 4",
            "68",
            "8 × 8",
            "69 × 64",
            "192 → 10 logits",
            "scaled, added",
            "the head reads the class token",
        ],
    ),
    "mean": (
        {
            "class_token": False,
            "global_pool": "avg",
            "patch_size": 32,
            "num_classes": 0,
            "pos_embed": "none",
        },
        [
            "0",
            "48",
            "3072 → 192",
            "49 × 192",
            "192 features",
            "no table",
            "the head reads the mean of the patches",
        ],
    ),
    "many registers": (
        {"reg_tokens": 12, "depth": 2},
        ["reg. 12", "208", "2 encoder layers", "209 × 192"],
    ),
    "parallel": (
        {"block_fn": ParallelScalingBlock, "patch_size": 16},
        ["0", "196", "12 encoder layers"],
    ),
}


def label_boxes(svg):
    """(words, (left, top, right, bottom)) of each text of an SVG, in the wide font of Matplotlib."""
    font = str(mpl.get_data_path()) + "/fonts/ttf/DejaVuSans.ttf"
    for group in ElementTree.fromstring(svg).iter():
        for text in (each for each in group if each.tag.endswith("text")):
            x, y, size = (float(text.get(name)) for name in ("x", "y", "font-size"))
            width = ImageFont.truetype(font, 100).getlength(text.text) * size / 100
            x -= width * {"start": 0, "middle": 0.5, "end": 1}[text.get("text-anchor")]
            box = x, y - size, x + width, y
            if turned := group.get("transform"):  # translate(a b) rotate(-90)
                a, b = map(float, re.findall(r"\d+", turned)[:2])
                box = a + box[1], b - box[2], a + box[3], b - box[0]
            yield text.text, box


@pytest.mark.parametrize("case", ARCHITECTURES)
def test_architecture_shows_the_models_numbers_without_overlaps(case):
    options, words = ARCHITECTURES[case]
    model = timm.create_model("vit_tiny_patch16_224", **options).eval()
    drawing = architecture.architecture(model, photo())
    labels = list(label_boxes(drawing.svg))
    texts = [text for text, _ in labels]
    assert all(
        any(word == text or len(word) > 3 and word in text for text in texts) for word in words
    ), texts
    assert ("One of the" in drawing.svg) == (case != "parallel")
    width, height = map(float, ElementTree.fromstring(drawing.svg).get("viewBox").split()[2:])
    for number, (text, box) in enumerate(labels):
        assert box[0] >= 0 and box[1] >= 0 and box[2] <= width and box[3] <= height, text
        for other, (left, top, right, bottom) in labels[:number]:
            apart = box[2] <= left or right <= box[0] or box[3] <= top or bottom <= box[1]
            assert apart, f"{text!r} overlaps {other!r}"


def test_architecture_draws_the_patches_of_the_image():
    model = timm.create_model("vit_tiny_patch16_224", img_size=(64, 96), num_classes=3).eval()
    pixels = np.asarray(Image.fromarray(photo(4, 6)).resize((96, 64)))
    root = ElementTree.fromstring(architecture.architecture(model, pixels).svg)
    views = [each.get("viewBox") for each in root if each.tag.endswith("svg")]
    assert views[:3] == ["0 0 96 64", "0 0 16 16", "16 0 16 16"] and views[-1] == "80 48 16 16"
    data = next(
        value for each in root.iter() if each.tag.endswith("image") for value in [each.get("href")]
    )
    drawn = np.asarray(Image.open(io.BytesIO(base64.b64decode(data.partition(",")[2]))), float)
    expected = restore(model, preprocess(model, pixels, size=(64, 96)))[0].astype(float)
    assert (
        drawn.shape == expected.shape and np.corrcoef(drawn.ravel(), expected.ravel())[0, 1] > 0.99
    )


def test_architecture_highlights_one_part_and_refuses_others():
    model = timm.create_model("vit_tiny_patch16_224", depth=3, num_classes=7).eval()
    drawing = architecture.architecture(model, photo(), highlight="mlp")
    fills = [
        each.get("fill")
        for each in ElementTree.fromstring(drawing.svg).iter()
        if each.tag.endswith("rect")
    ]
    assert (
        fills.count("#e3d5ee") == 1
        and "× 3" in drawing.svg
        and repr(drawing).endswith("Highlighted: mlp.")
    )
    refuses(
        "highlight must be one of image, patches",
        architecture.architecture,
        model,
        photo(),
        highlight="norm",
    )
