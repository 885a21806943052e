"""Memory and time of class-specific maps through fused attention, compared with materialized attention.

    python -m experiments.attribution --out data/results/attribution-memory-cpu.csv

One image, ViT-B/16 with random weights, on a CPU. Memory is the growth of the process's peak resident size beyond the
model, the image and one forward without gradients, in a separate process for each measurement. "materialized" is
Chefer's relevance by autograd through timm's unfused path, with all maps and their gradients stored. `difference` is
the largest deviation of vitlens' relevance from it, relative to its largest value.
"""

import time
from collections.abc import Sequence

import timm
import torch

from experiments.results import about, command, in_own_process, memory, parser, write
from vitlens.attribution import METHODS

MODEL, TARGET = "vit_base_patch16_224", 3
WAYS = ("relevance", "gradient_rollout", "legrad", "attention_gradient", "grad_cam")
SIZES = (384, 512, 768, 1024)
LARGEST = 768  # of the materialized way: at 1,024 pixels it would need some 25 GiB


def materialized(model: torch.nn.Module, image: torch.Tensor) -> torch.Tensor:
    """(rows, cols) relevance of the class token, the plain way."""
    maps = []
    for block in model.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_hook(lambda module, args, output: maps.append(output))
    image.requires_grad_()
    logits = model.requires_grad_(False)(image)
    gradients = torch.autograd.grad(logits[0, TARGET], maps)
    relevance = torch.eye(maps[0].shape[-1])
    for weights, gradient in zip(maps, gradients, strict=True):
        relevance = relevance + (weights.detach() * gradient).clamp(min=0).mean(1)[0] @ relevance
    side = round((len(relevance) - 1) ** 0.5)
    return relevance[0, 1:].unflatten(0, (side, side))


def measured(name: str, size: int, way: str) -> dict:
    """Memory and time of one map. Runs in a separate process."""
    torch.manual_seed(0)
    model = timm.create_model(name, img_size=size).eval()
    image = torch.randn(1, 3, size, size)
    with torch.no_grad():
        model(image)
    start = time.perf_counter()
    found, peak = memory(
        lambda: (
            materialized(model, image)
            if way == "materialized"
            else METHODS[way](model, image, TARGET)[0]
        )
    )
    row = {"pixels": size, "tokens": (size // 16) ** 2 + 1, "way": way}
    row |= {"seconds": round(time.perf_counter() - start, 2), "mib": round(peak, 1)}
    if way == "materialized":
        for block in model.blocks:
            block.attn.fused_attn = True
            block.attn.attn_drop._forward_hooks.clear()
        own = METHODS["relevance"](model, image.detach(), TARGET)[0]
        row["difference"] = ((own - found).abs().max() / found.abs().max()).item()
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    options = options.parse_args(arguments)
    name, ways, rows = MODEL, WAYS, []
    if options.tiny:
        name, ways, options.sizes = "vit_tiny_patch16_224", WAYS[:1], [64]
    how = {"model": name, **about(command("experiments.attribution", arguments))}
    for size in options.sizes:
        for way in (*ways, "materialized") if size <= LARGEST else ways:
            rows.append(in_own_process(measured, name, size, way) | how)
            print(rows[-1], flush=True)
    write(options.out, rows)


if __name__ == "__main__":
    main()
