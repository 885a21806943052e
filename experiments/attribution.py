"""Memory and time of class-specific maps through fused attention, beside the same map from materialized attention.

    python -m experiments.attribution --out data/results/attribution-memory-cpu.csv

One image, ViT-B/16 with random weights, on a CPU. Memory is the growth of the process's peak resident size beyond the
model, the image and one forward without gradients; every measurement runs in a process of its own, since a process
keeps what it once had. "materialized" is Chefer's relevance by autograd through timm's unfused path, with all maps and
their gradients held; `difference` is how far the relevance of vitlens lies from it, relative to its largest value.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import timm
import torch

from experiments.attention import peak_since_reset, reset_peak
from experiments.results import about, write
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


def measured(size: int, way: str) -> dict:
    """What one map takes. Runs in a process of its own."""
    torch.manual_seed(0)
    model = timm.create_model(MODEL, img_size=size).eval()
    image = torch.randn(1, 3, size, size)
    with torch.no_grad():
        model(image)
    reset_peak()
    before, start = peak_since_reset(), time.perf_counter()
    found = materialized(model, image) if way == "materialized" else METHODS[way](model, image, TARGET)[0]
    seconds, peak = time.perf_counter() - start, peak_since_reset() - before
    row = {"pixels": size, "tokens": (size // 16) ** 2 + 1, "way": way, "seconds": seconds, "mib": peak}
    if way == "materialized":
        for block in model.blocks:
            block.attn.fused_attn = True
            block.attn.attn_drop._forward_hooks.clear()
        own = METHODS["relevance"](model, image.detach(), TARGET)[0]
        row["difference"] = ((own - found).abs().max() / found.abs().max()).item()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="CSV to write")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        return print(json.dumps(measured(options.sizes[0], options.only)))
    rows = []
    how = {"model": MODEL, **about("python -m experiments.attribution")}
    for size in options.sizes:
        for way in (*WAYS, "materialized") if size <= LARGEST else WAYS:
            command = [sys.executable, __file__, "--out", str(options.out), "--sizes", str(size), "--only", way]
            row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            row |= {"seconds": round(row["seconds"], 2), "mib": round(row["mib"], 1)}
            rows.append(row | how)
            print(row, flush=True)
    write(options.out, rows)


if __name__ == "__main__":
    main()
