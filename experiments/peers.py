"""The same task with vitlens and with the library that people reach for first: lines of code and agreement.

    python -m experiments.peers --out data/results/peers.csv

Each row runs a function of `TASKS` on one image and the bundled model, opened by timm. `lines` are those of the
function's body, from an open model, a normalized image and a class number to a (rows, cols) array. `correlation` is
Pearson's, with the array of the other library. It is below 1 for Grad-CAM, because pytorch-grad-cam enlarges its maps
to pixels. `fused_attention` is True where the model still runs fused attention.
"""

import inspect
from collections.abc import Sequence
from importlib.metadata import version

import numpy as np
import timm
import torch
from captum.attr import IntegratedGradients
from pytorch_grad_cam import GradCAM
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
from timm.layers import set_fused_attn
from timm.utils.attention_extract import AttentionExtract
from torch import nn

import vitlens
from experiments.results import SPECIMEN, about, command, parser, write
from vitlens import attention, attribution, capture

LIBRARIES = {"timm": "timm", "captum": "captum", "cam": "grad-cam", "vitlens": "vitlens"}
"""Name of each library's distribution by the last word of a function's name."""


def opened() -> nn.Module:
    return timm.create_model(f"local-dir:{SPECIMEN}", pretrained=True).eval()


def head_vitlens(model, images, target):
    with torch.no_grad(), capture(model) as attn:
        model(images)
    return attn.grid.image_map(attn[5].weights(attn.grid.index(3, 4))[0, 2])


def head_timm(model, images, target):
    set_fused_attn(False)
    model = opened()
    name = "blocks.5.attn.softmax"
    weights = AttentionExtract(model, names=[name])(images)[name]
    set_fused_attn(True)
    return weights[0, 2, 1 + 3 * 14 + 4, 1:].reshape(14, 14)


def rollout_vitlens(model, images, target):
    with torch.no_grad(), capture(model) as attn:
        model(images)
    return attention.rollout(attn)[0]


def rollout_timm(model, images, target):
    set_fused_attn(False)
    model = opened()
    rollout = torch.eye(197)
    for weights in AttentionExtract(model)(images).values():
        rollout = (weights[0].mean(0) + torch.eye(197)) / 2 @ rollout
    set_fused_attn(True)
    return rollout[0, 1:].reshape(14, 14)


def grad_cam_vitlens(model, images, target):
    return attribution.grad_cam(model, images, target)[0]


def grad_cam_cam(model, images, target):
    def grid(tokens):
        return tokens[:, 1:].reshape(len(tokens), 14, 14, -1).permute(0, 3, 1, 2)

    cam = GradCAM(model, [model.blocks[-1].norm1], reshape_transform=grid)
    return cam(images, [ClassifierOutputTarget(target)])[0, 8::16, 8::16]


def integrated_gradients_vitlens(model, images, target):
    return attribution.integrated_gradients(model, images, target)[0]


def integrated_gradients_captum(model, images, target):
    method = IntegratedGradients(model)
    values = method.attribute(images, torch.zeros_like(images), target, internal_batch_size=16)
    return values.sum(1).reshape(14, 16, 14, 16).sum((1, 3))


TASKS = {
    "attention of head 2 in layer 5 from the patch in row 3, column 4": (head_vitlens, head_timm),
    "attention rollout": (rollout_vitlens, rollout_timm),
    "Grad-CAM of a class": (grad_cam_vitlens, grad_cam_cam),
    "Integrated Gradients of a class, summed over each patch": (
        integrated_gradients_vitlens,
        integrated_gradients_captum,
    ),
}


def lines_of(function) -> int:
    """Number of lines of a function's body, without blank ones."""
    return sum(bool(line.strip()) for line in inspect.getsource(function).splitlines()) - 1


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__).parse_args(arguments)
    images, rows = vitlens.preprocess(opened(), vitlens.samples()["chelsea"]), []
    with torch.no_grad():
        target = opened()(images).argmax().item()
    for task, functions in TASKS.items():
        maps = [
            np.asarray(torch.as_tensor(f(opened(), images, target)).detach()).ravel()
            for f in functions
        ]
        for function in functions:
            library = LIBRARIES[function.__name__.rpartition("_")[2]]
            rows.append(
                {
                    "task": task,
                    "library": library,
                    "version": version(library),
                    "lines": lines_of(function),
                    "correlation": np.corrcoef(maps)[0, 1],
                    "fused_attention": "set_fused_attn" not in inspect.getsource(function),
                    **about(command("experiments.peers", arguments)),
                }
            )
    write(options.out, rows, digits=8)


if __name__ == "__main__":
    main()
