"""A model whose evidence is known, and its images, for the tests of the audit's command and page."""

import base64
import gzip
import json
import re

import torch
from PIL import Image
from test_evidence import color_model, marked
from timm.models import save_for_hf


def save_model(folder, outputs=3, blind=False):
    """The folder of the model of `color_model`. blind: with a constant logit of class 0."""
    arguments = {"img_size": 64, "patch_size": 8, "embed_dim": 8, "depth": 2, "num_heads": 1}
    model = color_model(outputs)
    if blind:
        torch.nn.init.zeros_(model.head.weight[0])
    model.pretrained_cfg = {**model.pretrained_cfg, "input_size": (3, 64, 64), "crop_pct": 1.0}
    config = {"pretrained_cfg": model.pretrained_cfg}
    save_for_hf(model, folder, model_config=config, model_args=arguments, safe_serialization=True)
    return folder


def write_images(folder, count=150, classes=3, labeled=True):
    """Images of `marked` as files, in a folder for each class if they are labeled."""
    data = marked(count)
    for number, (pixels, label) in enumerate(zip(data.images, data.labels.tolist(), strict=True)):
        place = folder / f"class {label}" if labeled else folder
        if label < classes:
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(place / f"{number}.png")
    return folder


def content_of(page):
    """What the file of a page holds, with byte strings in place of {"$": number}."""
    (data,) = re.findall(r'id="data">([^<]+)<', page.read_text())
    message = gzip.decompress(base64.b64decode(data))
    length = int.from_bytes(message[:4], "little")
    at = 4 + length
    parts = []
    for size in json.loads(message[4:at])["sizes"]:
        parts.append(message[at : at + size])
        at += size

    def part(found):
        return parts[found["$"]] if "$" in found else found

    return json.loads(message[4 : 4 + length], object_hook=part)["value"]
