"""Speed and memory of models on this machine: images per second and the largest training batch (paper, Fig. 12)."""

from __future__ import annotations

import datetime
import itertools
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import pandas as pd
import torch
from torch import Tensor, nn

from vitlens import paper
from vitlens.data.files import write
from vitlens.evaluate import compute
from vitlens.models import load_model
from vitlens.recorder.forward import evaluating, out_of_memory, run
from vitlens.recorder.supported import model_name
from vitlens.train.account import hardware, versions
from vitlens.train.precision import computes_bf16

GIB = 2**30
FIGURE_12 = ("R50x1", "R50x2", "ViT-B/32", "ViT-L/32", "ViT-B/16", "ViT-L/16", "ViT-H/14", "R152x4")
"""The models of Fig. 12."""
SMALL = ("R50x1", "ViT-B/32", "ViT-B/16")
"""Those of them that a CPU carries."""


def table(
    models: Sequence[str] | None,
    sizes: Sequence[int],
    *,
    measure: bool = False,
    precision: str = "auto",
    memory: float | None = None,
    seconds: float = 0.5,
    device: torch.device | None = None,
    command: str = "",
    out: Path | None = None,
    done: Callable[[dict], None] = lambda _: None,
) -> pd.DataFrame:
    """Parameters and FLOPs of models at image sizes, a row for each; with `measure`, also what `measured` returns.

    models: names of the paper or of `vitlens.load_model`, built with random weights; by default those of Fig. 12, and
    of these the smaller ones to be measured on a CPU. sizes: sides in pixels. out: a CSV file, written after every
    row. done: called with each row. Raises ValueError for unknown names, and for a size that a model does not take,
    before anything is measured or written.
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    models = models or (SMALL if measure and device.type == "cpu" else FIGURE_12)
    about = {"device": hardware(device), "date": datetime.date.today().isoformat(), **versions(), "command": command}
    counts = [(name, size, counted(name, size)) for name, size in itertools.product(models, sizes)]
    rows = []
    for name, size, found in counts:
        if measure:
            model = opened(name, size)
            found = measured(model, size, device=device, precision=precision, seconds=seconds, memory=memory)
        rows.append({"model": name, "image_size": size, **found, **about})
        done(rows[-1])
        if out is not None:
            write(out, pd.DataFrame(rows).to_csv(index=False, lineterminator="\n").encode())
    return pd.DataFrame(rows)


def counted(name: str, size: int) -> dict[str, int]:
    """Numbers of parameters and FLOPs of a model for images of this size in pixels, counted without its weights."""
    with torch.device("meta"):
        model = opened(name, size)
    return {"parameters": compute.parameters(model), "flops": compute.flops(model, size)}


def opened(name: str, size: int) -> nn.Module:
    """A model with random weights: of the paper by its name there, or by that of `load_model`; timm's ViTs and the
    paper's for this size."""
    if name in paper.MODELS:
        return paper.build(name, **({} if paper.MODELS[name].kind == "ResNet" else {"img_size": size}))
    try:
        return load_model(name, pretrained=False, img_size=size)
    except ValueError:  # a ConvNet, which takes any size, or a model of another library, which has its own
        return load_model(name, pretrained=False)


def measured(
    model: nn.Module,
    image_size: int,
    *,
    device: torch.device | str = "cpu",
    precision: str = "auto",
    seconds: float = 0.5,
    memory: float | None = None,
) -> dict[str, object]:
    """What a model costs on this machine, at one image size, with random pictures.

    image_size: side in pixels; the model must take it. precision: "bf16" (autocast), "fp32", or "auto", which is bf16
    where the device multiplies it in hardware. seconds: how long each batch size is timed, at least. memory: GiB that
    training may fill; by default all of the device's.

    Returns `parameters`; `flops` of one image; `images_per_second`, the highest of all batch sizes tried (1, 2, 4, …
    until two in a row gain nothing), and the `batch` it was reached with; `bytes_per_image` that a forward and
    backward pass holds at its peak, `bytes_fixed` of weights, gradients, Adam's two averages and workspace, and the
    `largest_batch` that both leave room for in `memory`; `precision` and `memory`. Raises ValueError for a size that
    the model does not take, and for a precision or memory that is none.
    """
    device = torch.device(device)
    if precision not in ("auto", "bf16", "fp32"):
        raise ValueError(f"Precision is auto, bf16 or fp32, got {precision!r}.")
    if memory is not None and not memory > 0:
        raise ValueError(f"Memory is a positive number of GiB, got {memory}.")
    flops = compute.flops(model, image_size)
    half = precision == "bf16" or (precision == "auto" and computes_bf16(device))
    memory = memory or total_memory(device) / GIB
    model = model.to(device)

    def images(batch: int) -> Tensor:
        return torch.randn(batch, getattr(model, "in_chans", None) or 3, image_size, image_size, device=device)

    def autocast():
        return torch.autocast(device.type, torch.bfloat16, enabled=half)

    with evaluating(model), autocast():
        speed, batch = throughput(model, images, device, seconds)
        per_image, fixed = training_memory(model, images, device)
    return {
        "parameters": compute.parameters(model), "flops": flops, "images_per_second": speed, "batch": batch,
        "bytes_per_image": per_image, "bytes_fixed": fixed,
        "largest_batch": max(0, int((memory * GIB - fixed) // per_image)),
        "precision": "bf16" if half else "fp32", "memory": memory,
    }  # fmt: skip


def total_memory(device: torch.device) -> int:
    """Bytes of a GPU's memory, or of the machine's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def throughput(
    model: nn.Module, images: Callable[[int], Tensor], device: torch.device, seconds: float
) -> tuple[float, int]:
    """Images per second of a forward pass at the fastest batch size, and that size.

    images: makes a batch of so many. Batches double until two in a row are no faster by 2 %, or memory runs out; each
    is timed for at least `seconds` and three passes, after one that is not, and the median counts.
    """
    best, at, idle = 0.0, 0, 0
    for batch in (2**k for k in itertools.count()):
        try:
            x = images(batch)
            taken, start = [], 0.0
            with torch.inference_mode():
                _timed(model, x, device)
                while len(taken) < 3 or start < seconds:
                    taken.append(_timed(model, x, device))
                    start += taken[-1]
        except RuntimeError as error:
            if not (at and out_of_memory(error)):
                raise
            break
        speed = batch / median(taken)
        idle = 0 if speed > 1.02 * best else idle + 1
        if speed > best:
            best, at = speed, batch
        if idle == 2:
            break
    return best, at


def training_memory(model: nn.Module, images: Callable[[int], Tensor], device: torch.device) -> tuple[int, int]:
    """Bytes that each image of a training step adds to its peak, and those that do not depend on the batch.

    A step is a forward and a backward pass into gradients that are there already; to its peak, by PyTorch's own count,
    come weights, gradients and Adam's two averages. Small batches may peak elsewhere, where a large matrix gets its
    gradient: batches double until an image costs as much as before, within 1 %, and all images more than the rest.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ValueError(f"{model_name(model)} has no weights to train. Set requires_grad of its parameters.")
    weights = sum(p.numel() * p.element_size() for p in trained)
    held = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    before = [p.grad for p in trained]
    try:
        for p in trained:
            p.grad = torch.zeros_like(p)
        slope, (last, batch) = 0, (_step_peak(model, images(1), device), 2)
        while True:
            peak = _step_peak(model, images(batch), device)
            slope, former = (peak - last) * 2 // batch, slope
            if abs(slope - former) <= 0.01 * slope and 2 * batch * slope >= peak:
                return slope, peak - batch * slope + held + 3 * weights
            last, batch = peak, 2 * batch
    finally:
        for p, grad in zip(trained, before, strict=True):
            p.grad = grad


def _timed(model: nn.Module, x: Tensor, device: torch.device) -> float:
    """Seconds of one forward pass."""
    synchronize = getattr(torch, device.type).synchronize if device.type != "cpu" else int
    synchronize()
    start = time.perf_counter()
    run(model, x)
    synchronize()
    return time.perf_counter() - start


def _step_peak(model: nn.Module, x: Tensor, device: torch.device) -> int:
    """The most bytes that the batch and what a forward and backward pass makes of it take at once."""

    def step() -> None:
        run(model, x).float().sum().backward()

    pictures = x.numel() * x.element_size()
    with torch.enable_grad():
        step()  # makes what stays: workspaces, libraries' handles
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            start = torch.cuda.memory_allocated(device)
            step()
            return torch.cuda.max_memory_allocated(device) - start + pictures
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            step()
    with TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        events = [each for each in json.loads(path.read_text())["traceEvents"] if each.get("name") == "[memory]"]
    events.sort(key=lambda each: each["ts"])
    return max(itertools.accumulate(each["args"]["Bytes"] for each in events)) + pictures
