"""Which precision a run takes if nobody says: bf16 where it is computed in hardware, and never where it crawls."""

import json
import multiprocessing
import os
import platform
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vitlens.data import load
from vitlens.train import World, accuracy, fit, precision, runs
from vitlens.train.precision import computes_bf16, settled
from vitlens.train.recipes import RECIPES, Recipe, recipe

torch.set_num_threads(1)
ROOT = Path(__file__).parent.parent
LIMITS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")
OPEN = ["precision=auto"]


@pytest.fixture
def chip(monkeypatch):
    """A machine with bf16 (`chip(True)`), or without, which takes 30 times as long for it."""

    def make(has: bool):
        monkeypatch.setattr(precision, "computes_bf16", lambda device: has)
        monkeypatch.setattr(precision, "seconds", lambda device, of: {"fp32": 1.0, "bf16": 0.5 if has else 30.0}[of])

    return make


class Kinds(TorchDispatchMode):
    """Notes which products of matrices were made in bf16."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.bfloat16:
            self.found.add(func.overloadpacket.__name__)
        return result


def test_recipes_leave_the_precision_to_the_device():
    said = {name for name, each in RECIPES.items() if each.precision != "auto"}
    assert Recipe("mine").precision == "auto" and said == {"digits"}


@pytest.mark.parametrize("has", [True, False])
@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_step_and_a_validation_take_bf16_where_it_is_fast_and_nothing_of_it_elsewhere(chip, has, optimizer):
    chip(has)
    r = recipe("digits").tiny().override(*OPEN, f"optimizer={optimizer}")
    data = load("digits", "train").subset(64), load("digits", "valid").subset(64)
    model, kinds = r.build(), Kinds()
    with kinds:
        next(fit(model, data, r, device="cpu"))
    assert bool(kinds.found) == has
    assert ("baddbmm" in kinds.found) == (has and optimizer == "muon"), "Muon's products are in the run's precision"
    with Kinds() as kinds:
        accuracy(model, data[1], r)
    assert bool(kinds.found) == has
    with Kinds() as kinds:
        next(fit(model, data, replace(r, precision="fp32"), device="cpu"))
    assert not kinds.found


def test_which_graphics_processors_have_bf16(monkeypatch):
    for capability, has in (((7, 5), False), ((8, 0), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert computes_bf16(torch.device("cuda")) == has
    assert computes_bf16(torch.device("mps"))


def found(environment: dict, answer) -> None:
    """Send what a process finds that was started with these variables and without others that limit processors."""
    for name in LIMITS:
        os.environ.pop(name, None)
    os.environ |= environment
    answer.send(computes_bf16(torch.device("cpu")))


@pytest.fixture
def found_with(forked):
    def start(**environment: str) -> bool:
        answer, sender = multiprocessing.Pipe(duplex=False)
        forked(found, environment, sender)
        assert answer.poll(60)
        return answer.recv()

    return start


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="limits of x86 processors")
@pytest.mark.parametrize("name, limit", [
    ("ATEN_CPU_CAPABILITY", "avx2"), ("ATEN_CPU_CAPABILITY", "default"), ("ONEDNN_MAX_CPU_ISA", "AVX2"),
    ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE"),
])  # fmt: skip
def test_a_processor_that_is_limited_counts_as_one_without_bf16(found_with, name, limit):
    assert not found_with(**{name: limit})


@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="reads /proc/cpuinfo")
def test_what_the_processor_says_of_itself_is_believed(found_with):
    assert found_with() == ("avx512_bf16" in Path("/proc/cpuinfo").read_text().split())


@pytest.mark.parametrize("has", [True, False])
def test_what_was_chosen_is_kept_on_another_machine_which_says_what_it_costs(chip, has, tmp_path, capsys):
    """Named recipes that say nothing of it: `mnist`, on digits of 8 pixels."""
    chosen, settings = "bf16" if has else "fp32", ["image_size=8", "patch_size=2", "batch_size=64"]
    options = {"tiny": True, "watch": 0, "device": "cpu"}
    chip(has)
    cut = runs.run("mnist", "digits", tmp_path, overrides=settings, max_minutes=1e-9, **options)
    assert cut["recipe"]["precision"] == chosen and f"--set precision={chosen}" in cut["command"]
    assert "times as long" not in capsys.readouterr().err
    chip(not has)
    kinds = Kinds()
    with kinds:
        account = runs.run("mnist", "digits", tmp_path, resume=True, **options)
    assert account["finished"] and bool(kinds.found) == has
    for kept in (tmp_path / "training.json", tmp_path / "model/training.json"):
        assert json.loads(kept.read_text())["recipe"]["precision"] == chosen
    assert Recipe.from_json((tmp_path / "recipe.json").read_text()).precision == chosen
    cost = "30.0 times as long for a product of matrices in bf16 as in fp32" if has else (
        "2.0 times as long for a product of matrices in fp32 as in bf16"
    )  # fmt: skip
    assert f"This CPU takes {cost}; the run keeps to what it was begun in." in capsys.readouterr().err


def test_a_precision_that_is_asked_for_is_taken_and_its_cost_told_where_it_is_slow(chip, tmp_path, capsys):
    options = {"tiny": True, "watch": 0, "device": "cpu", "max_minutes": 1e-9}
    chip(False)
    account = runs.run("digits", "digits", tmp_path / "a", overrides=["precision=bf16"], **options)
    assert account["recipe"]["precision"] == "bf16"
    assert "in bf16 as in fp32; --set precision=auto takes what is faster." in capsys.readouterr().err
    runs.run("digits", "digits", tmp_path / "b", **options)
    chip(True)
    runs.run("digits", "digits", tmp_path / "c", **options)
    runs.run("digits", "digits", tmp_path / "c", resume=True, **options | {"max_minutes": None})
    assert "times as long" not in capsys.readouterr().err, "the recipe is in fp32 on purpose"


def test_recipes_of_runs_before_there_was_a_choice_are_as_they_were(chip):
    chip(False)
    trained = json.loads((ROOT / "data/checkpoints/vit_tiny_patch8_64/training.json").read_text())["recipe"]
    assert settled(Recipe.from_dict(trained), World()).precision == trained["precision"] == "bf16"


def test_processes_agree(monkeypatch, chip):
    """What a process computes in hardware and another does not is fp32 in both."""
    world = World(device=torch.device("cpu"))
    chip(True)
    assert settled(recipe("mnist"), world).precision == "bf16"
    object.__setattr__(world, "size", 2)
    monkeypatch.setattr(World, "total", lambda self, value: float(value))  # the other one has none
    assert settled(recipe("mnist"), world).precision == "fp32"


def test_products_are_timed_in_both_precisions():
    assert all(0 < precision.seconds(torch.device("cpu"), of) < 60 for of in ("fp32", "bf16"))
