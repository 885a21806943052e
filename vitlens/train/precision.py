"""Precision of training: bf16 where the device multiplies it in hardware, else fp32, unless the recipe says."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import replace

import torch

from vitlens.train.processes import World
from vitlens.train.recipes import RECIPES
from vitlens.train.settings import Recipe

NARROW = ("DEFAULT", "NO AVX", "AVX2")  # of PyTorch's names for what it uses of an x86 processor
EMULATED = ("AVX512_CORE", "AVX512_CORE_VNNI")  # what oneDNN can be limited to, and then still takes bf16


def computes_bf16(device: torch.device) -> bool:
    """Whether the device multiplies bf16 in hardware. A CPU with only AVX2 is many times slower in bf16 than in fp32.

    On a CPU, oneDNN takes bf16 wherever there is AVX512, with or without instructions for it. What limits PyTorch or
    oneDNN (`ATEN_CPU_CAPABILITY`, `ONEDNN_MAX_CPU_ISA`) counts as if the processor had no more.
    """
    if device.type != "cpu":
        return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)
    try:
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        if platform.machine() not in ("x86_64", "AMD64"):
            return True
        limited = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper() in EMULATED
        limited |= torch.backends.cpu.get_cpu_capability() in NARROW
        return not limited and torch.cpu._is_avx512_bf16_supported()
    except (AttributeError, RuntimeError):  # a PyTorch without oneDNN
        return False


def trains_in_bf16(recipe: Recipe, device: torch.device) -> bool:
    """Whether the recipe's products are made in bf16 on this device: the one place that "auto" is decided."""
    return recipe.precision == "bf16" or (recipe.precision == "auto" and computes_bf16(device))


def settled(recipe: Recipe, world: World) -> Recipe:
    """The recipe as a run keeps it: "auto" is bf16 if all its processes compute that in hardware, else fp32."""
    if recipe.precision != "auto":
        return recipe
    everywhere = world.total(trains_in_bf16(recipe, world.device)) == world.size
    return replace(recipe, precision="bf16" if everywhere else "fp32")


def said_of(recipe: Recipe, device: torch.device, resumed: bool) -> str:
    """A sentence on what the recipe's precision costs on this device, or "" if there is nothing to say.

    bf16 is reported wherever it is the slower one. fp32 is the more exact one, so it is reported only in a resumed run
    whose recipe left the choice open: then the run was begun on a device without bf16.
    """
    faster = "bf16" if computes_bf16(device) else "fp32"
    elsewhere = resumed and recipe.name in RECIPES and RECIPES[recipe.name].precision == "auto"
    if recipe.precision == faster or not (faster == "fp32" or elsewhere):
        return ""
    ratio = seconds(device, recipe.precision) / seconds(device, faster)
    kept = "the run keeps to what it was begun in" if resumed else "--set precision=auto takes what is faster"
    return (
        f"This {'CPU' if device.type == 'cpu' else 'GPU'} takes {ratio:.1f} times as long for a product of matrices in "
        f"{recipe.precision} as in {faster}; {kept}."
    )


def seconds(device: torch.device, precision: str) -> float:
    """Seconds for one matrix product in a precision, the fastest of five."""
    n, synchronize = (256, int) if device.type == "cpu" else (4096, getattr(torch, device.type).synchronize)
    a = torch.ones(n, n, device=device, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
    taken = []
    for _ in range(6):
        synchronize()
        start = time.perf_counter()
        a @ a
        synchronize()
        taken.append(time.perf_counter() - start)
    return min(taken[1:])
