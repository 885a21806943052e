"""Training throughput at 224 px beside timm's own training step, and as a share of the machine's matmul ceiling.

    python benchmarks/training.py --out data/results/throughput-h200.csv
    python benchmarks/training.py --quick --out throughput.csv        # a CPU, one small model

Ours: a batch drawn from a uint8 data set on the device, augmented there, forward, backward, optimiser; compiled.
timm's: the loop of timm's train.py reduced to its step (autocast, loss, backward, optimiser from timm) on one fixed,
normalised batch, so that no data path slows it down; as it is and compiled. FLOP = 2 × multiply-add, a step is 3 ×
forward. Prints and writes one row per model and loop.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import gc
import time
from collections.abc import Callable
from pathlib import Path

import timm
import timm.optim
import torch
from torch import nn

from vitlens.augment import Augment
from vitlens.datasets import ImageSet
from vitlens.recipes import Recipe
from vitlens.runs import hardware, versions
from vitlens.train import World, compiled, fit

MODELS = {"vit_tiny_patch16_224": (192, 3, 1024), "vit_small_patch16_224": (384, 6, 1024),
          "vit_base_patch16_224": (768, 12, 512)}  # fmt: skip
AUGMENT = Augment(flip=0.5, scale=(0.35, 1.0), ratio=(3 / 4, 4 / 3), jitter=0.3, cutmix=0.5, mixup=0.2)


def step_flops(width: int, depth: int = 12, tokens: int = 197, patch: int = 16) -> float:
    """FLOP of a training step for one image: 12·D² + 2·T·D multiply-adds a token and layer, and the embedding."""
    forward = depth * tokens * (24 * width**2 + 4 * tokens * width) + 2 * (tokens - 1) * 3 * patch**2 * width
    return 3 * forward


def timed(step: Callable[[], object], warmup: int, steps: int, device: torch.device) -> float:
    """Seconds a step."""
    for _ in range(warmup):
        step()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize(device)
    return (time.perf_counter() - start) / steps


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def ceiling(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of one large square matrix product: 8192³ on CUDA, 2048³ on a CPU."""
    n = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return 2 * n**3 / timed(lambda: a @ b, 5, 20, device)


def ours(recipe: Recipe, data: tuple[ImageSet, ImageSet], device: torch.device, warmup: int, steps: int) -> float:
    """Seconds a step of ``vitlens.train.fit``."""
    model = recipe.build().to(device)
    training = fit(model, data, recipe, device=device, criterion=compiled(model, recipe, device))
    return timed(lambda: next(training), warmup, steps, device)


def timms(
    recipe: Recipe, data: tuple[ImageSet, ImageSet], device: torch.device, warmup: int, steps: int, compile: bool
) -> float:
    """Seconds a step of timm's loop."""
    model = recipe.build().to(device)
    optimizer = timm.optim.create_optimizer_v2(model, opt="adamw", lr=recipe.lr, weight_decay=recipe.weight_decay)
    run = torch.compile(model) if compile else model
    criterion = nn.CrossEntropyLoss(label_smoothing=recipe.label_smoothing)
    x, y = data[0].images[: recipe.batch_size].float() / 255, data[0].labels[: recipe.batch_size]

    def step():
        with torch.autocast(device.type, torch.bfloat16, enabled=recipe.precision == "bf16" and device.type == "cuda"):
            loss = criterion(run(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        optimizer.zero_grad()

    return timed(step, warmup, steps, device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="CSV to write")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="ViT-Ti, small batch, few steps: for a CPU")
    parser.add_argument("--batch", type=int, help="batch size, instead of the largest that is known to be fast")
    options = parser.parse_args()
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    top = ceiling(device, dtype)
    print(f"{hardware(World(device=device))}: matmul ceiling {top / 1e12:.2f} TFLOP/s in {str(dtype)[6:]}", flush=True)

    warmup, steps = (1, 2) if options.quick else (5, 30)
    rows = []
    for name in list(MODELS)[:1] if options.quick else MODELS:
        width, heads, batch = MODELS[name]
        batch = options.batch or (8 if options.quick else batch)
        recipe = Recipe(
            name="throughput", architecture=name, image_size=224, patch_size=16, width=width, heads=heads, epochs=10**6,
            num_classes=1000, batch_size=batch, augment=AUGMENT, label_smoothing=0.1, log_every=10**6,
            evaluate_every=10**6, precision="bf16" if device.type == "cuda" else "fp32",
        )  # fmt: skip
        pixels = torch.randint(0, 256, (2 * batch, 3, 224, 224), dtype=torch.uint8, device=device)
        labels = torch.randint(0, 1000, (2 * batch,), device=device)
        data = (ImageSet(pixels, labels, tuple(map(str, range(1000)))),) * 2
        for loop, seconds in {
            "vitlens": lambda r=recipe, d=data: ours(r, d, device, warmup, steps),
            "timm": lambda r=recipe, d=data: timms(r, d, device, warmup, steps, False),
            "timm compiled": lambda r=recipe, d=data: timms(r, d, device, warmup, steps, True),
        }.items():
            if loop == "timm compiled" and device.type == "cpu":
                continue  # ours does not compile there either
            torch._dynamo.reset()  # the model of the row before is not needed any more
            start = time.perf_counter()
            try:
                speed = batch / seconds()
            except torch.OutOfMemoryError:
                print(f"{name} {loop}: out of memory at batch {batch}", flush=True)
                continue
            finally:
                gc.collect()
            flops = speed * step_flops(width)
            rows.append({
                "model": name, "loop": loop, "batch": batch, "precision": recipe.precision,
                "images_per_second": round(speed, 1), "tflops": round(flops / 1e12, 3),
                "share_of_matmul": round(flops / top, 4), "matmul_tflops": round(top / 1e12, 2),
                "seconds_with_compilation": round(time.perf_counter() - start, 1),
                "device": hardware(World(device=device)), **versions(), "date": datetime.date.today().isoformat(),
                "command": "python benchmarks/training.py" + (" --quick" if options.quick else ""),
            })  # fmt: skip
            print({k: rows[-1][k] for k in ("model", "loop", "images_per_second", "share_of_matmul")}, flush=True)
            write(options.out, rows)  # after every row: what is measured stays, whatever happens to the next


def write(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)


if __name__ == "__main__":
    main()
