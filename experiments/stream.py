"""Time and memory of `contributions` and `direct_by_head` compared with a plain forward, on one image.

    python -m experiments.stream --out data/results/stream-cpu.csv

Seconds are medians of runs that take turns with the forward; `of_a_forward` is their ratio. Memory is the growth of the
process's peak resident size beyond the model, the image and one forward, in a separate process for each measurement.
Models have random weights, which cost the same.
"""

import statistics
import time
from collections.abc import Sequence

import timm
import torch

from experiments.results import about, command, in_own_process, memory, parser, write
from vitlens.stream import contributions, direct_by_head

MODELS = {
    "ViT-Ti/16": "vit_tiny_patch16_224",
    "ViT-S/16": "vit_small_patch16_224",
    "ViT-B/16": "vit_base_patch16_224",
}
SIZES = (224, 448)
RUNS = 7
WAYS = {
    "forward": lambda model, image: model(image),
    "contributions": lambda model, image: contributions(model, image, 3),
    "direct": lambda model, image: direct_by_head(model, image, 3),
}


def prepared(name: str, size: int) -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = timm.create_model(MODELS[name], img_size=size, num_classes=1000).eval()
    image = torch.randn(1, 3, size, size)
    with torch.no_grad():
        model(image)
    return model, image


def seconds(name: str, size: int) -> dict[str, float]:
    """The median seconds of each way."""
    model, image = prepared(name, size)
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    for run in range(RUNS + 1):
        for way, do in WAYS.items():
            start = time.perf_counter()
            with torch.set_grad_enabled(way != "forward"):
                do(model, image)
            if run:  # the first warms up
                taken[way].append(time.perf_counter() - start)
    return {way: statistics.median(found) for way, found in taken.items()}


def extra(name: str, size: int, way: str) -> float:
    """Peak memory in MiB beyond the model, the image and a forward. Runs in a separate process."""
    model, image = prepared(name, size)
    return memory(lambda: WAYS[way](model, image))[1]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    options = options.parse_args(arguments)
    if options.tiny:
        options.models, options.sizes = ["ViT-Ti/16"], [64]
    rows, how = [], about(command("experiments.stream", arguments))
    for name in options.models:
        for size in options.sizes:
            taken = seconds(name, size)
            for way in WAYS:
                row = {"model": name, "pixels": size, "tokens": (size // 16) ** 2 + 1, "what": way}
                row |= {
                    "seconds": round(taken[way], 4),
                    "of_a_forward": round(taken[way] / taken["forward"], 3),
                }
                if way != "forward":
                    row["mib"] = round(in_own_process(extra, name, size, way), 1)
                rows.append(row | how)
                print(row, flush=True)
    write(options.out, rows)


if __name__ == "__main__":
    main()
