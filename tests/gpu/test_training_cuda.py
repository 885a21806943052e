"""Training on CUDA agrees with the CPU, and resumes to the bit with deterministic algorithms."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from vitlens.data import load
from vitlens.data.augment import Targets
from vitlens.train import World, accuracy, build_criterion, fit
from vitlens.train.loop import FIRST
from vitlens.train.recipes import recipe

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="NO CUDA DEVICE: nothing of this file was tested"
)


@pytest.fixture(scope="module")
def digits():
    return load("digits", "train"), load("digits", "valid")


def plain(**changes):
    """A short digits recipe without randomness in the model."""
    return replace(
        recipe("digits").tiny(),
        drop_path=0.0,
        train_images=0,
        valid_images=0,
        compile="off",
        **changes,
    )


@pytest.mark.parametrize("precision, tolerance", [("fp32", 1e-5), ("bf16", 3e-2), ("fp16", 3e-2)])
@pytest.mark.parametrize("compile", ["off", "default"])
def test_one_step_on_cuda_agrees_with_the_cpu(digits, precision, tolerance, compile):
    r = replace(plain(precision=precision), compile=compile)
    x, labels = digits[0].images[:64].float() / 255, digits[0].labels[:64]
    gradients = {}
    for device in ("cpu", "cuda"):
        model = r.build().to(device)
        y = Targets(
            labels.to(device), labels.flip(0).to(device), torch.full((64,), 0.7, device=device)
        )
        build_criterion(model, r, device)(x.to(device), y).backward()
        gradients[device] = torch.cat([p.grad.flatten().cpu() for p in model.parameters()])
    difference = (gradients["cuda"] - gradients["cpu"]).norm() / gradients["cpu"].norm()
    assert difference < tolerance


def test_a_short_run_learns_the_same_on_both_devices(digits):
    top1 = {}
    for device in ("cpu", "cuda"):
        r = replace(recipe("digits"), epochs=8, compile="off")
        *_, last = fit(r.build(), digits, r, device=device)
        top1[device] = last.metrics["top1"]
    assert (
        abs(top1["cuda"] - top1["cpu"]) < 4
    )  # augmentation differs: the devices have different generators


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_resuming_with_deterministic_algorithms_is_equal_to_the_bit(digits, tmp_path, precision):
    r = plain(precision=precision, deterministic=True, average=0.9, save_every=1e9)
    whole, first, second = r.build(), r.build(), r.build()
    losses = [s.loss for s in fit(whole, digits, r, device="cuda")]
    for step in fit(first, digits, r, device="cuda", out=tmp_path):
        if step.step == 30:  # in the middle of an epoch
            break
    resumed = list(fit(second, digits, r, device="cuda", out=tmp_path, resume=True))
    assert resumed[0].step == 31
    assert [s.loss for s in resumed] == losses[30:]
    assert all(
        torch.equal(p, q) for p, q in zip(whole.parameters(), second.parameters(), strict=True)
    )


@pytest.mark.parametrize("compile", ["off", "default"])
def test_the_command_resumes_in_another_process_to_the_bit(tmp_path, compile):
    command = [
        sys.executable,
        "-m",
        "vitlens",
        "train",
        "--recipe",
        "digits",
        "--data",
        "digits",
        "--tiny",
        "--device",
        "cuda",
        "--deterministic",
        "--set",
        f"compile={compile}",
        "--out",
    ]
    subprocess.run([*command, tmp_path / "a"], check=True)
    subprocess.run([*command, tmp_path / "b", "--max-minutes", "1e-9"], check=True)
    subprocess.run([*command, tmp_path / "b", "--resume"], check=True)
    a, b = ((tmp_path / f"{run}/model/model.safetensors").read_bytes() for run in "ab")
    assert a == b


def test_patch_drop_stages_and_validation_between_compiled_steps(digits):
    r = replace(
        plain(precision="bf16", patch_drop=0.5, patch_drop_until=0.5, evaluate_every=1),
        compile="default",
    )
    model = r.build()
    *_, last = fit(model, digits, r, device="cuda")
    assert last.step == last.steps and model.patch_drop.prob == 0.0
    assert last.metrics["top1"] == accuracy(model, digits[1].to("cuda"), r)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_host_does_not_wait_for_the_device_between_readings(digits, precision):
    r = plain(precision=precision, average=0.9, log_every=10**6, evaluate_every=10**6)
    world = World(device=torch.device("cuda"))
    training = fit(r.build(), digits, replace(r, compile="off"), world=world)
    for _ in range(max(FIRST)):  # whose losses are read
        next(training)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            next(training)
            world.first(0.0)  # as in `vitlens train` after each step
    finally:
        torch.cuda.set_sync_debug_mode("default")
