"""Time and memory of attention statistics: `summary`, a plain forward, and materialized maps.

    python -m experiments.attention --out data/results/attention-cpu.csv
    python -m experiments.attention --device cuda --out data/results/attention-h100.csv

On a CPU, time is the median of several runs of one image, memory the growth of the process's peak resident size in a
separate process. On a GPU, ViT-B/16 in bf16 on batches, with the statistics in float32 from the model's bf16 queries
and keys, as `summary` computes them and with a row block in one graph of `torch.compile`. Memory is PyTorch's peak
beyond the model, the images, and the stored queries and keys. Ratios are within one run of this script. The maps of one
image of ViT-B at 1024 px take 9.7 GB in float32, at 2048 px 155 GB.
"""

import math
import statistics
import time
from collections.abc import Sequence
from functools import partial

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
    distances = grid.distances(device=maps[0].device)
    distance = torch.stack(
        [(a[:, :, prefix:, prefix:] * distances).sum(-1).mean(-1) for a in maps], 1
    )
    entropy = torch.stack([torch.special.entr(a).sum(-1).mean(-1) for a in maps], 1)
    received = torch.stack([a.mean(-2)[..., prefix:] for a in maps], 1)
    product = same = torch.eye(grid.tokens, device=maps[0].device)
    for a in maps:
        product = (0.5 * a.mean(1) + 0.5 * same) @ product
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
    difference = max(
        ((a - b).abs().max() / b.abs().max()).item() for a, b in zip(ours, naive, strict=True)
    )
    stored = sum(t.numel() * t.element_size() for layer in attn for t in (layer.q, layer.k)) / 2**20
    mib = {way: in_own_process(extra, name, size, way) for way in ("summary", "materialized")}
    return {
        "model": name,
        "image_px": size,
        "tokens": (size // 16) ** 2 + 1,
        "forward_s": forward,
        "summary_s": streamed,
        "materialized_s": held,
        "summary/forward": streamed / forward,
        "summary/materialized": streamed / held,
        "stored_q_k_MiB": stored,
        "summary_extra_MiB": mib["summary"],
        "materialized_extra_MiB": mib["materialized"],
        "materialized/summary_memory": mib["materialized"] / mib["summary"],
        "relative_difference": difference,
    }


# images on a GPU: (pixels, batch)
BATCHES = (224, 256), (1024, 8), (2048, 1), (224, 64), (1024, 2)


def row_block(q, k, scale: float, row, distances, prefix: int):
    """The statistics' sums over one block of query rows, in one graph: distance, entropy, received, rollout."""
    logits = (q.float() * scale) @ k.float().mT
    weights = logits.softmax(-1)
    entropy = logits.logsumexp(-1) - (weights * logits).sum(-1)
    pulled = torch.einsum("bq,bhqk->bk", row, weights) / q.shape[1]
    return (weights[..., prefix:] * distances).sum(-1), entropy, weights.sum(-2), pulled


def compiled_summary(attn, step, rows: int):
    """Distance and entropy (B, L, H), received (B, L, H, P) and rollout (B, rows, cols) by compiled blocks of rows."""
    grid, prefix, layers = attn.grid, attn.grid.prefix, []
    row = attention.read_row(attn)
    padded = torch.cat(
        [
            grid.distances(device=row.device).new_zeros(prefix, grid.tokens - prefix),
            grid.distances(dtype=row.dtype, device=row.device),
        ]
    )  # prefix queries have no distance
    for layer in reversed(list(attn)):
        sums, pulled = [], torch.zeros_like(row)
        for start in range(0, grid.tokens, rows):
            part = slice(start, start + rows)
            *found, moved = step(
                layer.q[:, :, part], layer.k, layer.scale, row[:, part], padded[part], prefix
            )
            sums.append(found)
            pulled += moved
        distance, entropy, received = zip(*sums, strict=True)
        layers.append(
            (
                torch.cat(distance, -1)[..., prefix:].mean(-1),
                torch.cat(entropy, -1).mean(-1),
                sum(received)[..., prefix:] / grid.tokens,
            )
        )
        row = (row + pulled) / 2
    distance, entropy, received = (
        torch.stack(values[::-1], 1) for values in zip(*layers, strict=True)
    )
    return distance, entropy, received, grid.image_map(row)


def waited(call, device: torch.device):
    """The call, followed by waiting for its work on the device."""

    def both():
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()

    return both


def peak(call) -> int:
    """Bytes by which the peak of CUDA memory grows in a call."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def write_gpu(out, how: dict, tiny: bool = False) -> None:
    """Write the table of a GPU after each of its rows. tiny: one row on any device."""
    rows = []
    for size, batch in ((48, 2),) if tiny else BATCHES:
        repeats = 1 if tiny else 7
        rows.append(measure_gpu(size, batch, tiny, repeats) | how)
        write(out, rows, digits=4)


def measure_gpu(size: int, batch: int, tiny: bool, repeats: int) -> dict:
    """Images per second and peak memory per image of a forward, with statistics by rows, compiled, and materialized.

    Ratios to the forward include it, except "summary_alone/forward". tiny: the same on any device, uncompiled.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = timm.create_model(MODELS["ViT-B/16"], img_size=size, depth=2 if tiny else 12)
    model = model.eval().to(device)
    images = torch.randn(batch, 3, size, size, device=device)

    def forward():
        with torch.autocast(device.type, torch.bfloat16):
            return model(images)

    def captured(statistics):
        with capture(model) as attn:
            forward()
        return statistics(attn)

    step = row_block if tiny else torch.compile(row_block, dynamic=False)
    with torch.inference_mode(), attention.full_precision(images.device):
        with capture(model) as attn:
            forward()
        rows = max(8, attention.BLOCK["cuda"] // (batch * len(attn[0].q[0]) * attn.grid.tokens))
        compiled = partial(compiled_summary, step=step, rows=min(rows, attn.grid.tokens))
        ways = {
            "forward": forward,
            "summary": partial(captured, attention.summary),
            "summary_alone": partial(attention.summary, attn),
            "compiled": partial(captured, compiled),
            "materialized": partial(captured, materialized),
        }
        needed = 4 * batch * len(attn) * attn[0].q.shape[1] * attn.grid.tokens**2
        free = torch.cuda.mem_get_info()[0] if device.type == "cuda" else math.inf
        if 3 * needed > free:  # the maps, and two copies to compute with
            del ways["materialized"]
        summary = attention.summary(attn)
        ours = (summary.mean_distance, summary.entropy, summary.received, summary.rollout)
        row = {
            "model": "ViT-B/16",
            "image_px": size,
            "tokens": attn.grid.tokens,
            "batch": batch,
            "materialized_GiB_per_image": needed / batch / 2**30,
        }
        seen = compiled(attn)
        row["compiled_difference"] = max(
            ((a - b).abs().max() / a.abs().max()).item() for a, b in zip(ours, seen, strict=True)
        )
        del attn, seen, summary
        for way, call in ways.items():
            call()
            row[f"{way}_images_per_second"] = batch / seconds(waited(call, device), repeats)
            if device.type == "cuda":
                row[f"{way}_MiB_per_image"] = peak(call) / batch / 2**20
    for way in list(ways)[1:]:
        row[f"{way}/forward"] = row["forward_images_per_second"] / row[f"{way}_images_per_second"]
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    options.add_argument("--sizes", nargs="*", type=int, default=SIZES)
    options.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = options.parse_args(arguments)
    if options.device == "cuda":
        write_gpu(options.out, about(command("experiments.attention", arguments), "cuda"))
        return
    if options.tiny:
        options.models, options.sizes = ["ViT-S/16"], [224]
    rows = []
    for name in options.models:
        for size in options.sizes:
            rows.append(measure(name, size))
            print(
                {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in rows[-1].items()},
                flush=True,
            )
        first, last = rows[-len(options.sizes)], rows[-1]
        if len(options.sizes) > 1:
            grown = math.log(last["summary_extra_MiB"] / first["summary_extra_MiB"])
            slope = grown / math.log(last["tokens"] / first["tokens"])
            print(f"{name}: slope of log extra memory against log N: {slope:.2f}")
    how = about(command("experiments.attention", arguments))
    write(options.out, (row | how for row in rows), digits=4)


if __name__ == "__main__":
    main()
