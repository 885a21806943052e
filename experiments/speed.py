"""Images per second and the largest training batch of models on this machine (paper, Fig. 12).

    python -m experiments.speed --out data/results/speed-cpu.csv

A row for each model and image size, with random weights and random images, in bf16 on a GPU and fp32 on a CPU.
`images_per_second` of a forward pass is that of the fastest `batch`. At the peak of a training step an image adds
`bytes_per_image`. `bytes_fixed` are those of weights, gradients, Adam's two averages and workspace. `largest_batch` is
what both leave room for in `memory` GiB.
"""

import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib.pyplot as plt
import pandas as pd
import torch
from matplotlib.ticker import NullLocator, StrMethodFormatter
from torch import Tensor, nn

from experiments.results import about, command, parser, write
from vitlens.plot.style import SERIES, charts, use_style
from vitlens.recorder.forward import eval_mode, run
from vitlens.recorder.memory import is_out_of_memory
from vitlens_paper.evaluate import compute

MODELS = "ViT-B/32", "ViT-B/16", "ViT-L/32", "ViT-L/16", "R50x1", "R50x2"


def throughput(model: nn.Module, image: Tensor, seconds: float = 0.5) -> tuple[float, int]:
    """Images per second of a forward pass at the fastest batch size, and that size.

    image: (1, C, height, width). Batches double until two in a row gain less than 2 %, or memory runs out.
    """
    from torch.utils.benchmark import Timer  # the import prints a warning without a GPU

    best, fastest, slower, batch = 0.0, 0, 0, 1
    while slower < 2:
        try:
            names = {"run": run, "model": model, "x": image.repeat(batch, 1, 1, 1)}
            timer = Timer("run(model, x)", globals=names, num_threads=torch.get_num_threads())
            with torch.inference_mode():
                speed = batch / timer.blocked_autorange(min_run_time=seconds).median
        except RuntimeError as error:
            if not (fastest and is_out_of_memory(error)):
                raise
            break
        slower = 0 if speed > 1.02 * best else slower + 1
        best, fastest = max((best, fastest), (speed, batch))
        batch *= 2
    return best, fastest


def training_memory(model: nn.Module, image: Tensor) -> tuple[int, int]:
    """Peak memory of a training step: (bytes per image, bytes independent of the batch).

    Small batches may peak at the gradient of a large matrix, so batches double until the bytes per image change by less
    than 1 %, and all images take more than the rest.
    """
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    fixed = 4 * sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())
    slope, last, batch = 0, peak(model, image), 2
    while True:
        most = peak(model, image.repeat(batch, 1, 1, 1))
        slope, former = (most - last) * 2 // batch, slope
        if abs(slope - former) <= 0.01 * slope and 2 * batch * slope >= most:
            return slope, most - batch * slope + fixed
        last, batch = most, 2 * batch


def peak(model: nn.Module, x: Tensor) -> int:
    """Peak memory in bytes of the batch and of its forward and backward pass."""
    run(
        model, x
    ).float().sum().backward()  # allocates permanent workspaces and handles of libraries
    if x.is_cuda:
        torch.cuda.reset_peak_memory_stats(x.device)
        before = torch.cuda.memory_allocated(x.device)
        run(model, x).float().sum().backward()
        return torch.cuda.max_memory_allocated(x.device) - before + x.nbytes
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        run(model, x).float().sum().backward()
    with TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    events = sorted(
        (event for event in events if event.get("name") == "[memory]"),
        key=lambda event: event["ts"],
    )
    return max(itertools.accumulate(event["args"]["Bytes"] for event in events)) + x.nbytes


def figure(table: pd.DataFrame) -> plt.Figure:
    """Images per second, and the largest batch of a training step, against the side of the image; logarithmic axes."""
    shown = {
        "images_per_second": "Images per second",
        "largest_batch": "Largest batch of a training step",
    }
    look = {"style": "o-", "color": SERIES, "ms": 5, "mec": "white", "mew": 0.6, "loglog": True}
    with use_style():
        page, axes = charts(tuple(shown.values()), 900, 380)
        for ax, column in zip(axes, shown, strict=True):
            lines = table[table[column] > 0].pivot(
                index="image_size", columns="model", values=column
            )
            lines[table["model"].unique()].plot(
                ax=ax, xlabel="Side of the image (pixels)", legend=False, **look
            )
            ax.set_xticks(lines.index, lines.index)
            ax.xaxis.set_minor_locator(NullLocator())
            ax.yaxis.set_major_formatter(StrMethodFormatter("{x:,.6g}"))
        axes[1].legend(framealpha=0.9, edgecolor="0.85")
    return page


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument(
        "--models", nargs="+", default=MODELS, help="names of the paper or of vitlens.load_model"
    )
    options.add_argument(
        "--sizes", nargs="+", type=int, default=(64, 128, 224, 384), help="sides in pixels"
    )
    options = options.parse_args(arguments)
    if options.tiny:
        options.models, options.sizes = ["test_vit"], [32]
    gpu, memory = (
        torch.cuda.is_available(),
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )
    if gpu:
        memory = torch.cuda.get_device_properties(0).total_memory
    device = "cuda" if gpu else "cpu"
    how, table = about(command("experiments.speed", arguments), device), []
    for name, size in itertools.product(options.models, options.sizes):
        model, image = (
            compute.build_untrained(name, size).to(device),
            torch.randn(1, 3, size, size, device=device),
        )
        with eval_mode(model), torch.autocast(device, torch.bfloat16, enabled=gpu):
            speed, batch = throughput(model, image, 0.01 if options.tiny else 0.5)
            per_image, fixed = training_memory(model, image)
        table.append(
            {
                "model": name,
                "image_size": size,
                "parameters": compute.parameters(model),
                "flops": compute.flops(model, size),
                "images_per_second": speed,
                "batch": batch,
                "bytes_per_image": per_image,
                "bytes_fixed": fixed,
                "largest_batch": max(0, memory - fixed) // per_image,
                "precision": "bf16" if gpu else "fp32",
                "memory": memory / 2**30,
                **how,
            }
        )
    write(options.out, table)


if __name__ == "__main__":
    main()
