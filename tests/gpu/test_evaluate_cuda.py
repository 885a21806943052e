"""On a GPU, features of images and predicted classes equal those of the CPU."""

import pytest
import timm
import torch

from vitlens.data import load
from vitlens.train import World
from vitlens_paper.evaluate import features
from vitlens_paper.evaluate.reading import open_images, read, top_classes

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="NO CUDA DEVICE: the GPU tests were not run"
)


def test_features_and_classes_agree_with_the_cpu():
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=96, depth=2, num_heads=3
    )
    model.pretrained_cfg = {**model.pretrained_cfg, "input_size": (3, 32, 32)}
    data = open_images(model, "digits", "test", workers=1)
    here, labels = features(model, data)
    named, _ = read(model, data, top_classes(model))
    model.cuda()
    there, same = features(model, data, world=World(device=torch.device("cuda")))
    torch.testing.assert_close(there, here, rtol=1e-3, atol=1e-3)
    assert torch.equal(labels, same)
    moved, _ = read(model, data, top_classes(model))
    assert (moved[:, 0] == named[:, 0]).float().mean() > 0.99
    held = load("digits", "valid", size=32, device="cuda")
    assert features(model, held)[0].device.type == "cpu"
