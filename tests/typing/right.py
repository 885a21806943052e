"""Calls of a user, with the types that a type checker must see. `python -m tests types` checks them without a run."""

from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor, nn
from typing_extensions import assert_type

import vitlens
import vitlens_explorer
import vitlens_paper
from vitlens import attribution, plot
from vitlens.attention import Summary
from vitlens.data import ImageSet, ImageStream
from vitlens.recorder.layer import Layer
from vitlens.recorder.record import Attention

model = vitlens.load_model("vit_tiny_patch16_224", pretrained=False, img_size=64)
assert_type(model, nn.Module)
assert_type(vitlens.load_model(Path("runs/mine")), nn.Module)
assert_type(vitlens.load_image("cat.jpg"), Image.Image)
assert_type(vitlens.samples(), dict[str, Image.Image])
images = vitlens.preprocess(model, ["cat.jpg", Path("dog.jpg"), np.zeros((64, 64), np.uint8)])
assert_type(images, Tensor)

with torch.no_grad(), vitlens.capture(model, values=True) as attn:
    logits = model(images)
assert_type(attn, Attention)
assert_type(attn[0], Layer)
assert_type(attn[-3:], list[Layer])
assert_type([layer for layer in attn], list[Layer])
assert_type(attn[0].weights(head=2, query=(3, 4)), Tensor)
assert_type(attn[0].mask, Tensor | None)
summary = vitlens.attention.summary(attn)
assert_type(summary, Summary)
assert_type(vitlens.attention.rollout(attn, query=(3, 4)), Tensor)
plot.attention_distance(summary.mean_distance, uniform=attn.grid.uniform_distance())
assert_type(vitlens.overlay("cat.jpg", summary.rollout[0], model=model), Axes)

with vitlens.intervene(model, heads={(0, 2): "zero"}):
    model(images)

assert_type(attribution.relevance(model, images, target="tabby"), Tensor)
assert_type(attribution.rollout(model, images), Tensor)
assert_type(plot.gallery({"rollout": [np.zeros((4, 4))]}, titles=["cat"]), Figure)
assert_type(vitlens.data.load("digits"), ImageSet | ImageStream)
assert_type(vitlens_explorer.save_page(model, "cat.jpg", "cat.html"), Path)
assert_type(
    vitlens_explorer.save_audit_page(model, ["a.jpg"], vitlens.audit(model, ["a.jpg"]), "a.html"),
    Path,
)
vitlens_explorer.explore(model, "cat.jpg")
assert_type(vitlens_paper.build("ViT-B/16"), nn.Module)
assert_type(vitlens.train.recipe("digits"), vitlens.train.Recipe)
