"""What attention statistics cost on a GPU, beside plain inference: ViT-B/16 in bfloat16 at 224, 1024 and 2048 pixels.

    python -m experiments.attention_gpu --out data/results/attention-h200.csv
    python -m experiments.attention_gpu --quick        # a tiny pass, on a CPU too (without the fused kernels)
    python -m experiments.attention_gpu --tune         # times other tile sizes of the kernels, too

Times are medians of repeated runs between CUDA events after a warm-up. Memory is the peak beyond that of inference;
for the statistics alone, the peak beyond the capture they are taken of.
Statistics are all of `vitlens.attention.summary`; "rows" goes through blocks of rows, "kernels" uses the kernels.
The two must agree. Images are random; the attention of the untrained model is sharpened, so that it is not uniform.
"""

import argparse
import datetime
import importlib.metadata
import statistics
import sys
import time
from pathlib import Path

import timm
import torch

from experiments.results import rounded, write
from vitlens import attention, capture
from vitlens.recorder import kernels

COLUMNS = [
    "dtype", "pixels", "tokens", "images", "what", "ms", "images_per_s", "share_of_inference", "mb_per_image", "runs",
]  # fmt: skip
# dtype, pixels, images in a batch, images of it for the row blocks
SIZES = [
    (torch.bfloat16, 224, 256, 256), (torch.bfloat16, 1024, 8, 8), (torch.bfloat16, 2048, 2, 1),
    (torch.float32, 224, 256, 256), (torch.float32, 1024, 8, 8),
]  # fmt: skip
TILES = [(128, 64, 8, 3), (128, 64, 8, 2), (128, 32, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3), (128, 64, 4, 3)]
TOLERANCE = 1e-4  # of the difference of kernels and row blocks, relative to the norm


class Clock:
    """Times functions on the device, and their peak of memory."""

    def __init__(self, device: str, seconds: float):
        self.cuda, self.seconds = device == "cuda", seconds

    def once(self, function) -> float:
        """Seconds of one run."""
        if not self.cuda:
            start = time.perf_counter()
            function()
            return time.perf_counter() - start
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000

    def __call__(self, function) -> tuple[float, int]:
        """(median seconds, runs): three runs or more in about `seconds`; a very long first run stays the only one."""
        first = self.once(function)
        if first > self.seconds:
            return first, 1
        typical = self.once(function)  # the first one compiled
        times = [self.once(function) for _ in range(max(3, min(30, int(self.seconds / typical))))]
        return statistics.median(times), len(times)

    def peak(self, function) -> float:
        """Most bytes held at a time beyond what was held before, in MB."""
        if not self.cuda:
            return float("nan")
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 1e6


def ceilings(clock: Clock) -> str:
    """What this device does at best: a large matrix product, and a large copy counting bytes read and written."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    matmul, _ = clock(lambda: a @ b)
    source = torch.randn(2**30, device="cuda")
    target = torch.empty_like(source)
    copy, _ = clock(lambda: target.copy_(source))
    return f"8192³ bf16 matmul {2 * 8192**3 / matmul / 1e12:.0f} TFLOP/s, copy {2 * 4 * 2**30 / copy / 1e12:.2f} TB/s"


def build(name: str, pixels: int, device: str, dtype: torch.dtype):
    torch.manual_seed(0)
    with torch.device(device):
        model = timm.create_model(name, img_size=pixels).to(dtype).eval()
    for block in model.blocks:
        block.attn.qkv.weight.data.mul_(6)
    return model


def difference(a: attention.Summary, b: attention.Summary) -> float:
    """Largest ‖a − b‖ / ‖b‖ over the statistics; never NaN."""
    pairs = [(getattr(a, name), getattr(b, name)) for name in ("mean_distance", "entropy", "received", "rollout")]
    return max(((x - y).norm() / y.norm()).nan_to_num(torch.inf).item() for x, y in pairs)


def measure(model, images: torch.Tensor, few: int, clock: Clock) -> list[dict]:
    """The rows of the table for one image size; `few` images go through the blocks of rows."""

    def captured(count):
        with capture(model) as attn:
            model(images[:count])
        return attn

    rows, plain = [], {}

    def add(what, function, count):
        seconds, runs = clock(function)
        rate, peak = count / seconds, clock.peak(function) / count
        plain.setdefault("rate", rate)
        plain.setdefault("peak", peak)
        share = rate / plain["rate"]
        extra = peak if what.startswith("statistics") else peak - plain["peak"]  # a forward needs memory anyway
        dtype = str(images.dtype).removeprefix("torch.")
        row = [dtype, images.shape[-1], grid.tokens, count, what, seconds * 1e3, rate, share, extra, runs]
        rows.append(dict(zip(COLUMNS, row, strict=True)))
        text = "{:8} {:5} px {:6} tokens {:4} images  {:38}{:9.2f} ms {:9.1f} images/s {:6.3f} of inference"
        text += " {:7.1f} MB/image"
        print(text.format(*row[:-1]), flush=True)

    everything = len(images)
    attn = captured(1)
    grid = attn.grid
    add("inference", lambda: model(images), everything)
    add("forward + capture", lambda: captured(everything), everything)
    attn = captured(everything)
    if images.is_cuda:
        kernels.enabled = True
        fused = attention.summary(attn)
        add("forward + capture + statistics, kernels", lambda: attention.summary(captured(everything)), everything)
        add("statistics alone, kernels", lambda: attention.summary(attn), everything)
        assert kernels.enabled, "the fused kernels failed; see the warning above"
    kernels.enabled = False
    if few < everything:
        attn = captured(few)
    add("statistics alone, rows", lambda: attention.summary(attn), few)
    add("forward + capture + statistics, rows", lambda: attention.summary(captured(few)), few)
    if images.is_cuda:
        if few < everything:  # other batch sizes may run other matrix kernels: compare on the same q and k
            kernels.enabled = True
            fused = attention.summary(attn)
            kernels.enabled = False
        worst = difference(fused, attention.summary(attn))
        print(f"{images.shape[-1]:5} px  kernels and rows differ by {worst:.1e} of the norm at most")
        assert worst < TOLERANCE
    return rows


def tune(model, images: torch.Tensor, clock: Clock) -> None:
    """Time one layer's kernels with several tile sizes."""
    with capture(model) as attn:
        model(images)
    layer, chosen = attn[0], kernels._tile
    kernels.enabled = True
    row = torch.rand(layer.q.shape[0], attn.grid.tokens, device="cuda")
    for sizes in TILES:
        tile = dict(zip(("TILE", "STEP", "num_warps", "num_stages"), sizes, strict=True))
        kernels._tile = lambda *_, tile=tile: tile
        try:
            rows, _ = clock(lambda: kernels._launch(layer, attn.grid, False, None))
            both, _ = clock(lambda: kernels._launch(layer, attn.grid, True, row))
            figures = f"rows {rows * 1e3:7.3f} ms, columns {(both - rows) * 1e3:7.3f} ms a layer"
        except Exception as error:  # too large for this device
            figures = type(error).__name__
        print(tile, figures, flush=True)
    kernels._tile = chosen


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="where to save the table (CSV; lines that begin with # say how)")
    parser.add_argument("--date", default=datetime.date.today().isoformat(), help="date to write beside the results")
    parser.add_argument("--seconds", type=float, default=1.0, help="about how long to repeat each measurement")
    parser.add_argument("--quick", action="store_true", help="vit_tiny at 64 pixels, on a CPU if there is no GPU")
    parser.add_argument("--tune", action="store_true", help="time other tile sizes at 1024 pixels at the end")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.quick:
        parser.error("There is no CUDA device, and on a CPU this would take hours; try --quick.")

    name, sizes = "vit_base_patch16_224", SIZES
    if options.quick:
        name, options.seconds = "vit_tiny_patch16_224", 0.05
        sizes = [(torch.bfloat16, 64, 4, 2), (torch.float32, 64, 4, 2)]
    clock = Clock(device, options.seconds)
    machine = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    versions = ", ".join(f"{package} {version(package)}" for package in ("torch", "triton", "timm"))
    notes = [f"{name} on {machine}; {versions}; {options.date}"]
    notes += [f"command: python -m experiments.attention_gpu {' '.join(sys.argv[1:])}".rstrip()]
    if device == "cuda":
        notes += [f"measured in the same run: {ceilings(clock)}"]
    print(*notes, sep="\n", flush=True)

    rows = []
    for dtype, pixels, batch, few in sizes:
        model = build(name, pixels, device, dtype)
        images = torch.randn(batch, 3, pixels, pixels, device=device, dtype=dtype)
        rows += measure(model, images, few, clock)
        if options.out:  # after every size, so that a failure later loses nothing
            write(options.out, [rounded(row, "{:.4g}".format) for row in rows], "\n".join(notes))
        del model, images
    if options.tune and device == "cuda":
        pixels, batch = (64, 4) if options.quick else (1024, 8)
        model = build(name, pixels, device, torch.bfloat16)
        tune(model, torch.randn(batch, 3, pixels, pixels, device=device, dtype=torch.bfloat16), clock)


if __name__ == "__main__":
    main()
