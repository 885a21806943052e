"""One forward under a capture, without gradients."""

import torch

from vitlens import capture


def captured(model, images, **options):
    with torch.no_grad(), capture(model, **options) as attn:
        model(images)
    return attn
