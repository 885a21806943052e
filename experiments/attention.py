"""Time and memory of attention statistics on a CPU: `summary`, a plain forward, and materialized maps.

    python -m experiments.attention --out data/results/attention-cpu.csv

Time is the median of several runs, memory the growth of the process's peak resident size in a separate
process. Ratios are within one run of this script. The maps of ViT-B at 1024 px take 9.7 GB.
"""

import math
import statistics
import time
from collections.abc import Sequence

import timm
import torch

from experiments.results import about, command, in_own_process, memory, parser, write
from vitlens import attention, capture

MODELS = {"ViT-S/16": "vit_small_patch16_224", "ViT-B/16": "vit_base_patch16_224"}
SIZES = (224, 512, 1024)


def materialized(attn):
    """The statistics from maps that are all held at once, as a hook on every softmax would collect them."""
    maps = [layer.weights(limit=math.inf) for layer in attn]
    grid, prefix = attn.grid, attn.grid.prefix
    distances = grid.distances()
    distance = torch.stack([(a[:, :, prefix:, prefix:] * distances).sum(-1).mean(-1) for a in maps], 1)
    entropy = torch.stack([torch.special.entr(a).sum(-1).mean(-1) for a in maps], 1)
    received = torch.stack([a.mean(-2)[..., prefix:] for a in maps], 1)
    product = torch.eye(grid.tokens)
    for a in maps:
        product = (0.5 * a.mean(1) + 0.5 * torch.eye(grid.tokens)) @ product
    return distance, entropy, received, grid.image_map(product[:, 0])


def prepared(name: str, size: int):
    torch.manual_seed(0)
    model = timm.create_model(MODELS[name], img_size=size).eval()
    images = torch.randn(1, 3, size, size)
    with torch.no_grad(), capture(model) as attn:
        model(images)
    return model, images, attn


def extra(name: str, size: int, way: str) -> float:
    """Extra peak memory in MiB of one way, beyond the model and the stored q and k. Runs in a separate process."""
    *_, attn = prepared(name, size)
    with torch.no_grad():
        return memory(lambda: (attention.summary if way == "summary" else materialized)(attn))[1]


def seconds(call, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(name: str, size: int) -> dict:
    """Time of a plain forward, of `summary` and of the materialized way, taken in turn; agreement; memory."""
    model, images, attn = prepared(name, size)
    repeats = 15 if size <= 224 else 3 if size <= 512 else 2
    with torch.inference_mode():
        forward = seconds(lambda: model(images), repeats)
        streamed = seconds(lambda: attention.summary(attn), repeats)
        held = seconds(lambda: materialized(attn), min(repeats, 3 if size <= 512 else 1))
        summary, naive = attention.summary(attn), materialized(attn)
    ours = (summary.mean_distance, summary.entropy, summary.received, summary.rollout)
    difference = max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(ours, naive, strict=True))
    stored = sum(t.numel() * t.element_size() for layer in attn for t in (layer.q, layer.k)) / 2**20
    mib = {way: in_own_process(extra, name, size, way) for way in ("summary", "materialized")}
    return {
        "model": name, "image_px": size, "tokens": (size // 16) ** 2 + 1,
        "forward_s": forward, "summary_s": streamed, "materialized_s": held,
        "summary/forward": streamed / forward, "summary/materialized": streamed / held,
        "stored_q_k_MiB": stored, "summary_extra_MiB": mib["summary"], "materialized_extra_MiB": mib["materialized"],
        "materialized/summary_memory": mib["materialized"] / mib["summary"], "relative_difference": difference,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    options.add_argument("--sizes", nargs="*", type=int, default=SIZES)
    options = options.parse_args(arguments)
    if options.tiny:
        options.models, options.sizes = ["ViT-S/16"], [224]
    rows = []
    for name in options.models:
        for size in options.sizes:
            rows.append(measure(name, size))
            print({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
        first, last = rows[-len(options.sizes)], rows[-1]
        if len(options.sizes) > 1:
            grown = math.log(last["summary_extra_MiB"] / first["summary_extra_MiB"])
            slope = grown / math.log(last["tokens"] / first["tokens"])
            print(f"{name}: slope of log extra memory against log N: {slope:.2f}")
    how = about(command("experiments.attention", arguments))
    write(options.out, (row | how for row in rows), digits=4)


if __name__ == "__main__":
    main()
