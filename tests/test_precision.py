"""The precision that a run takes by itself: bf16 where the device multiplies it in hardware, else fp32."""

import platform
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vitlens.data import load
from vitlens.train import World, accuracy, criteria, fit, runs
from vitlens.train.criteria import choose_precision, computes_bf16
from vitlens.train.recipes import Recipe, recipe

torch.set_num_threads(1)
ROOT = Path(__file__).parent.parent


@pytest.fixture
def chip(monkeypatch):
    """A machine with bf16 (`chip(True)`), or without."""
    return lambda has: monkeypatch.setattr(criteria, "computes_bf16", lambda device: has)


class Kinds(TorchDispatchMode):
    """The operations that returned bf16."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.bfloat16:
            self.found.add(func.overloadpacket.__name__)
        return result


@pytest.mark.parametrize("has", [True, False])
def test_precision_auto_selects_bf16_in_hardware(chip, has):
    chip(has)
    r = recipe("digits").tiny().override("precision=auto")
    data = load("digits", "train").subset(64), load("digits", "valid").subset(64)
    model, kinds = r.build(), Kinds()
    with kinds:
        next(fit(model, data, r, device="cpu"))
    assert bool(kinds.found) == ("baddbmm" in kinds.found) == has, (
        "Muon's products are in the run's precision"
    )
    with Kinds() as kinds:
        accuracy(model, data[1], r)
    assert bool(kinds.found) == has
    with Kinds() as kinds:
        next(fit(model, data, replace(r, precision="fp32"), device="cpu"))
    assert not kinds.found


def test_computes_bf16_by_device(monkeypatch):
    for capability, has in (((7, 5), False), ((8, 0), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert computes_bf16(torch.device("cuda")) == has
    for has in (True, False):
        monkeypatch.setattr(
            torch.backends.mps, "is_macos_or_newer", lambda major, minor, has=has: has
        )
        assert computes_bf16(torch.device("mps")) == has
    if platform.machine() == "x86_64" and sys.platform == "linux":
        flags = Path("/proc/cpuinfo").read_text().split()
        assert computes_bf16(torch.device("cpu")) == ("avx512_bf16" in flags)


@pytest.mark.parametrize("has", [True, False])
def test_run_keeps_precision_on_another_machine(chip, has, tmp_path):
    chosen, settings = "bf16" if has else "fp32", ["image_size=8", "patch_size=2", "batch_size=64"]
    options = {"tiny": True, "watch": 0, "device": "cpu", "quiet": True}
    chip(has)
    runs.run("mnist", "digits", tmp_path, overrides=settings, max_minutes=1e-9, **options)
    chip(not has)
    with Kinds() as kinds:
        account = runs.run("mnist", "digits", tmp_path, resume=True, **options)
    assert (
        account["finished"]
        and bool(kinds.found) == has
        and account["recipe"]["precision"] == chosen
    )
    assert Recipe.from_json((tmp_path / "recipe.json").read_text()).precision == chosen


def test_choose_precision_is_shared_by_processes(monkeypatch, chip):
    world = World(0, 2, torch.device("cpu"))
    chip(True)
    for others, expected in ((1.0, "bf16"), (0.0, "fp32")):
        monkeypatch.setattr(
            World, "total", lambda self, value, others=others: float(value) + others
        )
        assert choose_precision(recipe("mnist"), world).precision == expected
