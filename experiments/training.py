"""Training throughput of ``vitlens.train.fit``, timm's training step and a plain DataLoader loop, in one run.

    python -m experiments.training --out data/results/throughput-h200.csv    # a GPU: 224 px, ViT-Ti/S/B, bf16
    python -m experiments.training --out data/results/throughput-cpu.csv     # a CPU: fp32 and, if it has it, bf16

A speed is given in images a second and as a share of the device's own matmul ceiling, measured in the same run and
precision. FLOP = 2 × multiply-add, a step is 3 × forward.

* vitlens: the whole loop, with random crops, flips, jitter, cutmix and mixup on the device; on a CPU in fp32 also
  compiled (``compile_cpu``).
* timm: the model with timm's AdamW on one fixed, normalized batch, without a data path, on CUDA uncompiled and
  compiled.
* DataLoader (on a CPU at 64 px): timm's step behind torchvision's random resized crop, flip and normalization of JPEGs
  in memory, decoded in one worker process.

The loops of a case take turns, so that a busy machine slows all of them. A speed is the median of its turns; a ratio of
two loops, or a share of the ceiling, that of the ratios within each turn.
"""

from __future__ import annotations

import gc
import io
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import timm.optim
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from experiments.results import about, command, parser, write
from vitlens.data import ImageSet
from vitlens.data.augment import Augment
from vitlens.train import build_criterion, fit
from vitlens.train.criteria import computes_bf16
from vitlens.train.recipes import Recipe

AUGMENT = Augment(
    flip=0.5, scale=(0.35, 1.0), ratio=(3 / 4, 4 / 3), jitter=0.3, cutmix=0.5, mixup=0.2
)
SQUARE = {"cuda": 8192, "cpu": 2048}  # side of the product that is the ceiling
WIDTHS = {"ViT-Ti": 192, "ViT-S": 384, "ViT-B": 768}
Step = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A model at a resolution; heads are 64 wide, layers 12."""

    model: str
    pixels: int
    patch: int
    batch: int
    precision: str

    def recipe(self) -> Recipe:
        width = WIDTHS[self.model]
        return Recipe(
            name="throughput",
            image_size=self.pixels,
            patch_size=self.patch,
            width=width,
            heads=width // 64,
            depth=12,
            num_classes=1000,
            epochs=10**6,
            batch_size=self.batch,
            augment=AUGMENT,
            label_smoothing=0.1,
            log_every=10**6,
            evaluate_every=10**6,
            precision=self.precision,
        )

    def flops(self) -> float:
        """FLOP of a training step for one image: 12·D² + 2·T·D multiply-adds a token and layer, and the embedding."""
        d, tokens = WIDTHS[self.model], (self.pixels // self.patch) ** 2 + 1
        return 3 * (
            12 * tokens * (24 * d**2 + 4 * tokens * d) + 2 * (tokens - 1) * 3 * self.patch**2 * d
        )


TINY = Case("ViT-Ti", 32, 8, 4, "bf16")


class Jpegs(Dataset):
    """Encoded images in memory, decoded and transformed on access, as in torchvision's tutorials."""

    def __init__(self, images: torch.Tensor):
        self.encoded = []
        for image in images:
            Image.fromarray(image.permute(1, 2, 0).numpy()).save(
                buffer := io.BytesIO(), "JPEG", quality=90
            )
            self.encoded.append(buffer.getvalue())
        self.transform = transforms.Compose(
            [
                transforms.RandomResizedCrop(images.shape[-1], scale=AUGMENT.scale),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
            ]
        )

    def __len__(self) -> int:
        return len(self.encoded)

    def __getitem__(self, i: int):
        return self.transform(Image.open(io.BytesIO(self.encoded[i])).convert("RGB")), i % 1000


def pictures(n: int, side: int) -> torch.Tensor:
    """uint8 (n, 3, side, side) of smooth noise, which JPEG compresses about as a photograph."""
    coarse = (
        np.random.default_rng(0).integers(0, 256, (n, 3, side // 8, side // 8)).astype(np.float32)
    )
    return (
        torch.nn.functional.interpolate(torch.from_numpy(coarse), (side, side), mode="bicubic")
        .clamp(0, 255)
        .byte()
    )


def ours(recipe: Recipe, data: tuple[ImageSet, ImageSet], device: torch.device) -> Step:
    model = recipe.build().to(device)
    training = fit(
        model, data, recipe, device=device, criterion=build_criterion(model, recipe, device)
    )
    return lambda: next(training)


def timms(
    recipe: Recipe,
    data: tuple[ImageSet, ImageSet],
    device: torch.device,
    compile: bool = False,
    loader: DataLoader | None = None,
) -> Step:
    """A step on one fixed batch, or on the batches of ``loader``."""
    model = recipe.build().to(device)
    optimizer = timm.optim.create_optimizer_v2(
        model, opt="adamw", lr=recipe.lr, weight_decay=recipe.weight_decay
    )
    run = torch.compile(model) if compile else model
    criterion = nn.CrossEntropyLoss(label_smoothing=recipe.label_smoothing)
    fixed = data[0].images[: recipe.batch_size].float() / 255, data[0].labels[: recipe.batch_size]
    batches = (
        (batch for _ in iter(int, 1) for batch in loader) if loader else None
    )  # epoch after epoch

    def step() -> None:
        x, y = next(batches) if batches else fixed
        with torch.autocast(device.type, torch.bfloat16, enabled=recipe.precision == "bf16"):
            loss = criterion(run(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        optimizer.zero_grad()

    return step


def seconds(step: Step, steps: int, device: torch.device) -> float:
    """Seconds a step."""
    synchronize = partial(torch.cuda.synchronize, device) if device.type == "cuda" else int
    synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize()
    return (time.perf_counter() - start) / steps


def ceiling(device: torch.device, dtype: torch.dtype, side: int) -> Step:
    """One large square matrix product."""
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return lambda: a @ b


def measured(case: Case, device: torch.device, turns: int, steps: int) -> list[dict]:
    """A row for each loop of ``case``."""
    recipe, n = case.recipe(), 2 * case.batch if case.pixels > 64 else max(2000, 2 * case.batch)
    pixels = pictures(n, case.pixels)
    data = (ImageSet(pixels, torch.arange(n) % 1000, tuple(map(str, range(1000)))).to(device),) * 2
    loops = {
        "vitlens": lambda: ours(recipe, data, device),
        "timm": lambda: timms(recipe, data, device),
    }
    if device.type == "cuda":
        loops["timm compiled"] = lambda: timms(recipe, data, device, compile=True)
    elif case.precision == "fp32":  # bf16 loses by it
        loops["vitlens compiled"] = lambda: ours(replace(recipe, compile_cpu=True), data, device)
    if device.type == "cpu" and case.pixels == 64:
        loader = DataLoader(
            Jpegs(pixels),
            case.batch,
            shuffle=True,
            num_workers=1,
            drop_last=True,
            persistent_workers=True,
        )
        loops["DataLoader"] = lambda: timms(recipe, data, device, loader=loader)

    ready, speeds, began = {}, {name: [] for name in loops}, {}
    side = 64 if case == TINY else SQUARE[device.type]
    product = ceiling(device, torch.bfloat16 if case.precision == "bf16" else torch.float32, side)
    torch._dynamo.reset()
    for name, make in loops.items():
        start = time.perf_counter()
        try:
            step = make()
            seconds(step, 3, device)
        except (torch.OutOfMemoryError, MemoryError):
            print(f"{case} {name}: out of memory", flush=True)
            gc.collect()
            continue
        ready[name], began[name] = step, time.perf_counter() - start
    tops = []
    for _ in range(turns):
        tops.append(2 * side**3 / seconds(product, 20, device))
        for name, step in ready.items():
            speeds[name].append(case.batch / seconds(step, steps, device))
    speed = {name: statistics.median(values) for name, values in speeds.items() if values}
    reference = speeds["vitlens"]
    return [
        {
            "model": case.model,
            "pixels": case.pixels,
            "patch": case.patch,
            "batch": case.batch,
            "precision": case.precision,
            "loop": name,
            "images_per_second": round(value, 1),
            "vitlens_ratio": round(ratio(reference, speeds[name]), 3) if reference else "",
            "tflops": round(value * case.flops() / 1e12, 3),
            "share_of_matmul": round(case.flops() * ratio(speeds[name], tops), 4),
            "matmul_tflops": round(statistics.median(tops) / 1e12, 3),
            "seconds_to_start": round(began[name], 1),
        }
        for name, value in speed.items()
    ]


def ratio(ours: list[float], theirs: list[float]) -> float:
    """The median over turns of one speed by another."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def cases(device: torch.device, tiny: bool, batch: int | None) -> list[Case]:
    if device.type == "cuda":
        found = [
            Case(model, 224, 16, 512 if model == "ViT-B" else 1024, "bf16") for model in WIDTHS
        ]
    else:
        precisions = ("fp32", "bf16") if computes_bf16(device) else ("fp32",)
        found = [
            Case("ViT-Ti", pixels, patch, size, precision)
            for pixels, patch, size in ((64, 8, 64), (224, 16, 16))
            for precision in precisions
        ]
        found += [Case("ViT-S", 224, 16, 16, precision) for precision in precisions]
    found = [replace(case, batch=batch) for case in found] if batch else found
    return [TINY] if tiny else found


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument(
        "--batch", type=int, help="batch size, instead of one that is known to be fast"
    )
    options.add_argument("--model", choices=WIDTHS, help="this model alone")
    options = options.parse_args(arguments)
    device, rows = torch.device(options.device), []
    turns, steps = (2, 2) if options.tiny else (3, 20) if device.type == "cuda" else (10, 4)
    how = about(command("experiments.training", arguments), device)
    for case in cases(device, options.tiny, options.batch):
        if options.model and case.model != options.model:
            continue
        rows += [row | how for row in measured(case, device, turns, steps)]
        for row in rows:
            print(
                {
                    k: row[k]
                    for k in (
                        "model",
                        "pixels",
                        "precision",
                        "loop",
                        "images_per_second",
                        "vitlens_ratio",
                        "share_of_matmul",
                    )
                },
                flush=True,
            )
        write(options.out, rows)  # after every case, because the next may fail
        gc.collect()


if __name__ == "__main__":
    main()
