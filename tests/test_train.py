"""`fit` equals a plain PyTorch loop, and a stopped or killed run resumes to the same result."""

import itertools
import json
import math
import multiprocessing
import os
import random
import shutil
import time
import warnings
from dataclasses import replace

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
import torch.nn.functional as F
from support import digits, refuses, tiny
from timm.models import save_for_hf
from torch import Tensor, nn

from vitlens.data.augment import augment_batch, draw_numbers, draws, generator, seed_of
from vitlens.models import load_model
from vitlens.train import World, accuracy, build_criterion, criteria, export, fit, run_folder
from vitlens.train.loop import numerics
from vitlens.train.optim import Muon
from vitlens.train.recipes import Recipe, recipe, starting_from

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def data():
    return digits()


def train(last: int, r: Recipe, data, model=None, **options) -> None:
    """Train until a step, and stop there as a loop over `fit` does that breaks."""
    for step in fit(model or r.build(), data, r, device="cpu", **options):
        if step.step == last:
            break


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def by_singular_values(update: torch.Tensor) -> torch.Tensor:
    """Muon's iteration on the singular values of a matrix: the quintic applied five times, in float64."""
    u, s, vt = torch.linalg.svd(update.double(), full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return ((u * s) @ vt).to(update.dtype)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
def test_fit_equals_plain_loop(data, optimizer):
    r = replace(tiny(), optimizer=optimizer, average=0.0, weight_decay=0.1)
    ours = r.build()
    losses = [
        step.loss for _, step in zip(range(5), fit(ours, data, r, device="cpu"), strict=False)
    ]

    model = r.build()
    model.patch_drop.prob = 0.5
    groups = {"matrices": [], "qkv": [], "decayed": [], "rest": []}
    for name, p in model.named_parameters():
        inside = name.startswith("blocks") and p.ndim == 2 and optimizer == "muon"
        kind = "qkv" if "qkv.weight" in name else "matrices"
        groups[kind if inside else "decayed" if p.ndim in (2, 4) else "rest"].append(p)
    plain = [
        {"params": groups["decayed"], "weight_decay": 0.1},
        {"params": groups["rest"], "weight_decay": 0.0},
    ]
    if optimizer == "sgd":
        first_order = torch.optim.SGD(plain, momentum=r.momentum, fused=True)
    else:
        first_order = torch.optim.AdamW(plain, betas=r.betas, fused=True)
    # q, k and v are three matrices, on the memory of one.
    matrices = groups["matrices"] + [part for p in groups["qkv"] for part in p.detach().chunk(3)]
    momenta = [torch.zeros_like(p) for p in matrices]
    order = torch.randperm(256, generator=generator("cpu", 0, 0))
    for i in range(5):
        rows = order[32 * i : 32 * i + 32]
        x, y = augment_batch(
            data[0].images[rows],
            data[0].labels[rows],
            r.augment,
            draws("cpu", 0, 0, i),
            mean=r.mean,
            std=r.std,
        )
        progress = (i + 1) / 17
        lr = (
            progress / 0.1
            if progress < 0.1
            else 0.5 * (1 + math.cos(math.pi * (progress - 0.1) / 0.9))
        )
        torch.manual_seed(seed_of(0, 0, i, 1))
        log_p = F.log_softmax(model(x), -1)
        loss = -(
            0.9 * (y.lam * log_p[range(32), y.a] + (1 - y.lam) * log_p[range(32), y.b])
            + 0.1 * log_p.mean(-1)
        ).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert loss.item() == pytest.approx(losses[i], rel=1e-6)
        for group in first_order.param_groups:
            group["lr"] = lr * r.lr
        grads = [p.grad for p in groups["matrices"]] + [
            g for p in groups["qkv"] for g in p.grad.chunk(3)
        ]
        for p, momentum, grad in zip(matrices, momenta, grads, strict=True):
            momentum.lerp_(grad, 1 - r.momentum)
            update = by_singular_values(grad.lerp(momentum, r.momentum))
            p.data.mul_(1 - lr * r.muon_lr * 0.1).sub_(
                lr * r.muon_lr * 0.2 * max(p.shape) ** 0.5 * update
            )
        first_order.step()
        model.zero_grad()
    if optimizer == "muon":  # orthogonalized in float64 and another way
        theirs = dict(model.named_parameters())
        for name, p in ours.named_parameters():
            # The same bias for all keys does not change a softmax, so AdamW amplifies rounding errors of its gradient.
            kept = slice(None) if "qkv.bias" not in name else torch.arange(144) // 48 != 1
            torch.testing.assert_close(p[kept], theirs[name][kept], atol=1e-6, rtol=1e-5)
    else:
        assert torch.equal(weights(model), weights(ours))


@pytest.mark.skipif(
    not hasattr(torch.optim, "Muon"), reason="this torch has no Muon to compare with"
)
def test_muon_equals_torch():
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape)) for shape in ((48, 96), (96, 48), (64, 64), (64, 64))]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    a = Muon(ours, 0.01, weight_decay=0.1)
    b = torch.optim.Muon(theirs, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(4):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        a.step()
        b.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, atol=1e-4, rtol=1e-3)


def test_muon_flattens_convolution_kernels():
    for order in (torch.contiguous_format, torch.channels_last):
        kernel = nn.Parameter(torch.randn(16, 8, 3, 3).contiguous(memory_format=order))
        matrix = nn.Parameter(kernel.detach().flatten(1).clone())
        a, b = (Muon([p], 0.01, weight_decay=0.1, products=torch.float32) for p in (kernel, matrix))
        for _ in range(3):
            matrix.grad = torch.randn_like(matrix)
            kernel.grad = matrix.grad.view(kernel.shape).contiguous(memory_format=order)
            a.step()
            b.step()
        torch.testing.assert_close(kernel.flatten(1), matrix, atol=1e-6, rtol=1e-5)


def test_rate_equals_formulas():
    for schedule, warmup, warmup_steps in itertools.product(
        ("cosine", "linear"), (0.2, 0.0), (0, 20)
    ):
        if bool(warmup) == bool(warmup_steps):
            continue
        r = replace(
            recipe("digits"),
            schedule=schedule,
            lr=0.01,
            end_lr=1e-5,
            warmup=warmup,
            warmup_steps=warmup_steps,
        )
        for step in range(99):
            t, end = step + 1, 1e-3  # 20 of 100 intervals lead up, 80 down
            decay = (
                0.5 * (1 + math.cos(math.pi * (t - 20) / 80))
                if schedule == "cosine"
                else (100 - t) / 80
            )
            expected = t / 20 if t < 20 else end + (1 - end) * decay
            assert r.rate(step, 99) == pytest.approx(expected, abs=1e-12)
    # BiT's stairs: 40 epochs of 50 steps; the rate of a step is that at its end.
    r = recipe("digits").override(
        "schedule=stairs", "optimizer=sgd", "lr=0.48", "warmup=0", "warmup_steps=100"
    )
    for step in range(1999):
        epoch = (step + 1) / 50
        falls = sum(epoch >= fall for fall in (10, 23, 30, 37))
        assert r.rate(step, 1999) == pytest.approx(epoch / 2 if epoch < 2 else 10.0**-falls)


def averaged_by_hand(model: nn.Module, data, r: Recipe) -> tuple[list, dict, dict]:
    """The steps of a run, its moving average, and the average of everything in the model's state by its formula."""
    steps, average = [], {}
    shadow = {name: t.clone() for name, t in model.state_dict().items()}
    for step in fit(model, data, r, device="cpu", average=average):
        steps.append(step)
        decay = min(0.9, step.step / (step.step + 9))
        shadow = {
            name: decay * shadow[name] + (1 - decay) * t for name, t in model.state_dict().items()
        }
    return steps, average, shadow


def test_fit_records_and_moving_average(data):
    r = tiny(average=0.9, log_every=4)
    model = r.build()
    steps, average, shadow = averaged_by_hand(model, data, r)
    assert [s.step for s in steps] == list(range(1, 17)) and steps[-1].epoch == 1
    assert [s.step for s in steps if s.loss is not None] == [1, 2, 4, 5, 8, 10, 12, 16]
    assert [s.step for s in steps if s.metrics] == [16]
    torch.testing.assert_close(average, shadow, atol=1e-6, rtol=1e-5)
    metrics = steps[-1].metrics
    assert metrics["top1"] == accuracy(model, data[1], r)
    assert metrics["top1_average"] == accuracy(model, data[1], r, average)
    assert model.training and model.patch_drop.prob == 0.0


@pytest.fixture
def convolutions(tmp_path):
    """A recipe that fine-tunes a small EfficientNet with batch normalization, on digits at 32 pixels, with SGD."""
    torch.manual_seed(0)
    source = timm.create_model("test_efficientnet", num_classes=5)
    save_for_hf(source, tmp_path / "start", model_args={"num_classes": 5}, safe_serialization=True)
    r = recipe("finetune-small").override(
        "image_size=32", "resize=0", "num_classes=10", "batch_size=32", "epochs=2"
    )
    return starting_from(
        replace(r, average=0.9, log_every=1, lr=0.1, precision="fp32"), tmp_path / "start"
    )


@pytest.fixture(scope="module")
def larger():
    return digits(size=32)


def test_export_keeps_batch_norm_statistics(larger, convolutions, tmp_path):
    model = convolutions.build()
    steps, average, shadow = averaged_by_hand(model, larger, convolutions)
    state = model.state_dict()
    assert int(state["bn1.num_batches_tracked"]) == 16 and "bn1.num_batches_tracked" not in average
    assert {name for name in state if "num_batches" not in name} == set(average)
    torch.testing.assert_close(
        average, {name: shadow[name] for name in average}, atol=1e-6, rtol=1e-5
    )
    assert not torch.allclose(
        average["bn1.running_mean"], state["bn1.running_mean"], rtol=0.01, atol=1e-3
    )
    for weights, metric in ((None, "top1"), (average, "top1_average")):
        export(model, tmp_path / metric, convolutions, larger[0].class_names, weights=weights)
        opened = load_model(tmp_path / metric)
        assert accuracy(opened, larger[1], convolutions) == pytest.approx(
            steps[-1].metrics[metric], abs=1
        )
        kept = {**state, **(weights or {})}
        for name, buffer in opened.named_buffers():
            assert torch.equal(buffer, kept[name]), (
                "in half precision a small variance would be lost"
            )
    assert steps[-1].metrics["top1"] > 25, "it has learned something"


def test_rescue_restores_statistics_of_interrupted_step(larger, convolutions, tmp_path):
    """Two steps of two parts; a reader, then another process, ends in the second part of step 2."""
    r = replace(convolutions, accumulate=2, epochs=0, steps=2)
    whole = r.build()
    list(fit(whole, larger, r, device="cpu"))
    for error in (ChildProcessError, ConnectionError):
        model, calls = r.build(), []
        computed = build_criterion(model, r, "cpu")

        def criterion(x, y, computed=computed, calls=calls, error=error):
            calls.append(1)
            if len(calls) == 4:
                raise error("gone")
            return computed(x, y)

        with pytest.raises(error):
            list(
                fit(
                    model,
                    larger,
                    r,
                    device="cpu",
                    out=tmp_path / error.__name__,
                    criterion=criterion,
                )
            )
        model = r.build()
        (step,) = fit(model, larger, r, device="cpu", out=tmp_path / error.__name__, resume=True)
        expected = whole.state_dict()
        assert step.step == 2 and all(
            torch.equal(t, expected[name]) for name, t in model.state_dict().items()
        )


def test_fit_computes_with_its_settings_and_keeps_the_programs(data):
    def settings():
        deterministic = torch.are_deterministic_algorithms_enabled()
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, deterministic

    before, program = torch.get_rng_state(), settings()
    for tf32, expected in ((True, ("high", True, True)), (False, ("highest", False, True))):
        r = tiny(tf32=tf32, deterministic=True)
        model, inside = r.build(), []
        criterion = build_criterion(model, r, "cpu")

        def observed(x, y, criterion=criterion, inside=inside):
            inside.append(settings())
            return criterion(x, y)

        training = fit(model, data, r, device="cpu", criterion=observed)
        for _ in range(2):
            next(training)
            assert torch.equal(torch.get_rng_state(), before) and settings() == program
        training.close()
        assert inside == [expected] * 2
        assert torch.equal(torch.get_rng_state(), before) and settings() == program


def test_fit_and_its_consumer_do_not_change_each_others_numbers(data):
    """Random numbers of three libraries and settings between steps, of a run with dropout and validation."""

    def draw() -> tuple:
        return torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()

    def seed() -> None:
        torch.manual_seed(5)
        np.random.seed(5)
        random.seed(5)

    def follow(consume) -> tuple[list, Tensor]:
        model = tiny().build()
        losses = []
        for step in fit(model, data, tiny(), device="cpu"):
            consume(step)
            losses.append(step.loss)
        return losses, weights(model)

    undisturbed, expected = follow(lambda step: None)
    seed()
    numbers = [draw() for _ in undisturbed]

    def consume(step) -> None:
        torch.set_float32_matmul_precision("medium")
        torch.use_deterministic_algorithms(step.step % 2 == 0)
        drawn.append(draw())

    seed()
    drawn: list = []
    try:
        losses, disturbed = follow(consume)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.use_deterministic_algorithms(False)
    assert drawn == numbers
    assert losses == undisturbed and torch.equal(disturbed, expected)


def test_fit_of_two_runs_in_turn_equals_each_alone(data):
    """Runs of several precisions, whose steps alternate and which are closed in the order of their start."""
    recipes = [tiny(tf32=True), tiny(deterministic=True)]
    alone = []
    for r in recipes:
        model = r.build()
        train(4, r, data, model)
        alone.append(weights(model))
    models = [r.build() for r in recipes]
    runs = [fit(m, data, r, device="cpu") for m, r in zip(models, recipes, strict=True)]
    before = torch.get_rng_state()
    for _ in range(4):
        for training in runs:
            next(training)
    for training in runs:
        training.close()
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.are_deterministic_algorithms_enabled()
    for model, expected in zip(models, alone, strict=True):
        assert torch.equal(weights(model), expected)


LONG = replace(
    tiny(save_every=0.0, average=0.9, precision="bf16"), epochs=8
)  # 64 steps, so that none ends unkilled


def long_run(out, steps) -> None:
    torch.set_num_threads(1)
    for step in fit(LONG.build(), digits(), LONG, device="cpu", out=out, resume=True):
        steps.send(step.step)


@pytest.mark.slow
def test_fit_resumes_bit_exactly_after_kill(data, tmp_path, forked):
    whole, averages = LONG.build(), ({}, {})
    losses = [step.loss for step in fit(whole, data, LONG, device="cpu", average=averages[0])]
    tmp_path.joinpath("checkpoints").mkdir()
    for pause in (0.0, 0.02):  # into a step, or into a save
        steps, sender = multiprocessing.Pipe(duplex=False)
        child = forked(long_run, tmp_path, sender)
        for _ in range(4):
            assert steps.poll(60) and steps.recv() > 0
        time.sleep(pause)
        child.kill()
        child.join()
    model = LONG.build()
    rest = [
        s.loss
        for s in fit(
            model, data, LONG, device="cpu", out=tmp_path, resume=True, average=averages[1]
        )
    ]
    assert (
        len(rest) <= 64 - 2 * 3
        and rest == losses[-len(rest) :]
        and torch.equal(weights(model), weights(whole))
    )
    assert all(torch.equal(averages[0][name], averages[1][name]) for name in averages[0])
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == list(range(1, 65)) and [
        line["loss"] for line in log
    ] == losses
    assert len(list((tmp_path / "checkpoints").glob("step-*"))) == 4  # two checkpoints of two files


@pytest.fixture
def stopped(data, tmp_path):
    """A run with checkpoints of steps 3 and 4, and its recipe."""
    train(4, tiny(save_every=0.0), data, out=tmp_path)
    return tmp_path, tiny(save_every=0.0)


def test_load_checkpoint_skips_damaged_files(stopped, data, capsys, tmp_path):
    out, r = stopped
    r = replace(r, save_every=1e9)

    def resumed(folder):
        return fit(r.build(), data, r, device="cpu", out=folder, resume=True)

    def spoil(folder, step: int, suffix: str, damage) -> None:
        path = folder / f"checkpoints/step-{step:08d}{suffix}"
        content = path.read_bytes()
        path.unlink()
        if damage is not None:
            path.write_bytes(damage(content))

    half, flipped = lambda b: b[: len(b) // 2], lambda b: b[:-9] + bytes([b[-9] ^ 1]) + b[-8:]
    for number, (suffix, damage) in enumerate(
        (
            (".safetensors", half),
            (".json", half),
            (".json", None),
            (".safetensors", flipped),
            (".safetensors", None),
        )
    ):
        folder = shutil.copytree(out, tmp_path / f"copy-{number}")
        never_begun = suffix == ".json" and damage is None  # a checkpoint exists once its JSON does
        spoil(folder, 4, suffix, damage)
        assert next(resumed(folder)).step == 4
        assert never_begun or "step-00000004 is damaged and skipped" in capsys.readouterr().out
        for spare in folder.glob("checkpoints/step-00000004*"):
            spare.unlink()
        spoil(folder, 3, suffix, damage)
        if not never_begun:
            refuses(f"All checkpoints in {folder}.* are damaged", next, resumed(folder))
    # Checkpoints of steps 3, 4 and 5, of which 4 and 5 are damaged: those after a new step 4 are intact.
    folder = out / "checkpoints"
    for number in (4, 5):
        for suffix in (".json", ".safetensors"):
            (folder / f"step-0000000{number}{suffix}").write_bytes(b"")
    steps = resumed(out)
    assert next(steps).step == 4
    steps.close()
    assert sorted(p.name for p in folder.glob("*.json")) == [
        "step-00000003.json",
        "step-00000004.json",
    ]
    assert run_folder.load_checkpoint(folder)[1]["step"] == 4


def test_fit_yields_before_saving(data, tmp_path):
    """So that a snapshot which its reader takes exists whenever the checkpoint does."""
    r = tiny(save_every=0.0)
    for step in fit(r.build(), data, r, device="cpu", out=tmp_path):
        newest = [marker.stem for marker in run_folder.newest_first(tmp_path / "checkpoints")[:1]]
        assert newest == ([f"step-{step.step - 1:08d}"] if step.step > 1 else [])
    assert run_folder.newest_first(tmp_path / "checkpoints")[0].stem == f"step-{step.step:08d}"


KILLED = RuntimeError("DataLoader worker (pid 7) is killed by signal: 9.")
CONVERTED = (
    (
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError,
        "8 images of 8 pixels.*accumulate=4",
    ),
    (KILLED, ChildProcessError, "fewer workers"),
    (RuntimeError("something else"), RuntimeError, "something else"),
)
"""An error in a step, the error raised for it, and decisive words."""


@pytest.mark.parametrize("error, raised, words", CONVERTED)
def test_numerics_converts_memory_and_worker_errors(error, raised, words):
    world = World(0, 4, torch.device("cpu"))
    with pytest.raises(raised, match=words), numerics(tiny(batch_size=64, accumulate=2), world):
        raise error


RESUMPTIONS = (
    (lambda r: replace(r, lr=0.1), lambda train: train, "lr = 0.002, got 0.1"),
    (lambda r: replace(r, average=0.0), lambda train: train, "average = 0.99, got 0.0"),
    (lambda r: r, lambda train: train.subset(200), "256 of them, and the data now 200"),
    (
        lambda r: r,
        lambda train: replace(train, labels=train.labels.flip(0)),
        "labels of the images are others",
    ),
)
"""Changes of the recipe and the training images of a stopped run, and decisive words."""


@pytest.mark.parametrize("change_recipe, change_images, words", RESUMPTIONS)
def test_fit_refuses_to_resume(stopped, data, change_recipe, change_images, words):
    out, r = stopped
    changed = change_images(data[0]), data[1]
    refuse_to_fit(words, r.build(), changed, change_recipe(r), out=out, resume=True)


def test_fit_refuses_a_folder_with_checkpoints(stopped, data):
    out, r = stopped
    refuse_to_fit("already holds checkpoints", r.build(), data, r, out=out)


def refuse_to_fit(words, model, data, r, **options):
    """Assert that `fit` raises before it changes the model."""
    before = weights(model).clone()
    refuses(words, next, fit(model, data, r, device="cpu", **options))
    assert torch.equal(weights(model), before)


def test_fit_reports_loss_of_bit_exactness(stopped, data, capsys, monkeypatch):
    out, r = stopped
    next(fit(r.build(), data, r, device="cpu", out=out, resume=True))
    assert "Resumed with" not in capsys.readouterr().out
    monkeypatch.setattr(torch, "__version__", "9.9")
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        step = next(
            fit(r.build(), data, replace(r, accumulate=2), device="cpu", out=out, resume=True)
        )
    finally:
        torch.set_num_threads(threads)
    assert step.step == 6
    said = capsys.readouterr().out
    assert "Resumed with parts = 2 instead of 1, " in said and "torch = 9.9 instead of " in said
    assert f"threads = {threads + 1} instead of {threads}, " in said and said.count("Resumed") == 1
    assert "pixel_reading" not in said


def test_save_keeps_last_checkpoint_on_failure(stopped, monkeypatch):
    folder = stopped[0] / "checkpoints"
    before = {p: p.read_bytes() for p in folder.iterdir()}

    def full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk, pytest.raises(OSError, match="No space left"):
        disk.setattr(os, "fsync", full)
        run_folder.save_checkpoint(folder, 9, {"model.x": torch.ones(3)}, {})
    assert {p: p.read_bytes() for p in folder.iterdir()} == before
    torn = folder / ".step-00000005.safetensors.tmp"
    torn.write_bytes(b"half")
    (folder / "step-00000009.json").write_text("[]")  # JSON, but no checkpoint
    assert run_folder.load_checkpoint(folder)[1]["step"] == 4
    run_folder.save_checkpoint(folder, 10, {"model.x": torch.ones(3)}, {})
    assert not torn.exists()


def test_fit_stops_at_values_that_are_not_finite(stopped, data):
    out, r = stopped
    model = r.build()
    losses = iter([1.0, 1.0, math.nan])

    def poisoned(
        x, y
    ):  # a finite loss and gradient, but a parameter that takes no part in them is lost
        with torch.no_grad():
            model.head.bias.fill_(math.nan)
        return model.forward_features(x).square().mean()

    for criterion, message, step in (
        (lambda x, y: model(x).sum() * next(losses), "The loss is nan at step 7", 6),
        (poisoned, "Weights are not finite after step 7, so they were not saved", 6),
    ):
        refuses(
            message,
            train,
            16,
            r,
            data,
            model,
            out=out,
            resume=True,
            criterion=criterion,
            error=FloatingPointError,
        )
        tensors, scalars = run_folder.load_checkpoint(out / "checkpoints")
        assert scalars["step"] == step and all(t.isfinite().all() for t in tensors.values())


REFUSALS = (
    (lambda data: begin(data, image_size=16), "training images of 16 pixels"),
    (lambda data: begin(data, num_classes=9), "recipe has 9 classes"),
    (lambda data: begin(data, batch_size=300), "exceeds the 256 training"),
    (lambda data: begin(data, warmup=0.0, warmup_steps=16), "16 steps of"),
    (lambda data: begin(data), "sets patch_drop"),
    (
        lambda data: fit(nn.Identity(), data, tiny(), device="cpu", resume=True),
        "needs the directory",
    ),
    (
        lambda data: export(tiny().build(), "wrong", tiny(), ["a", "b"]),
        "10 class names.* got 2",
    ),
)
"""A call that raises ValueError, and decisive words."""


def begin(data, **changes):
    """Call `fit` with a changed recipe."""
    return fit(nn.Identity(), data, replace(tiny(), **changes), device="cpu")


@pytest.mark.parametrize("call, words", REFUSALS)
def test_train_refuses(data, tmp_path, monkeypatch, call, words):
    monkeypatch.chdir(tmp_path)
    refuses(words, call, data)
    assert not [*tmp_path.iterdir()]


def test_export_opens_in_timm(data, tmp_path):
    r = tiny()
    model = r.build()
    other = {name: p.detach() + 0.01 for name, p in model.named_parameters()}
    export(
        model,
        tmp_path / "m",
        r,
        data[0].class_names,
        weights=other,
        training={"command": "x"},
        dtype=torch.float32,
    )
    opened = timm.create_model(f"local-dir:{tmp_path / 'm'}", pretrained=True).eval()
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(opened(x), torch.func.functional_call(model.eval(), other, (x,)))
    config = opened.pretrained_cfg
    assert config["label_names"] == list("0123456789") and config["crop_pct"] == 1.0
    assert timm.data.resolve_model_data_config(opened)["mean"] == list(r.mean)
    with torch.no_grad():
        model.head.weight[0, 0] = (
            1e5  # more than half precision holds, so this matrix is kept whole
        )
    export(model, tmp_path / "half", r, data[0].class_names)
    stored = safetensors.torch.load_file(tmp_path / "half" / "model.safetensors")
    assert {name for name, t in stored.items() if t.dtype != torch.float16} == {"head.weight"}
    opened = timm.create_model(f"local-dir:{tmp_path / 'half'}", pretrained=True)
    assert torch.equal(opened.head.weight, model.head.weight)
    assert torch.equal(opened.pos_embed, model.pos_embed.half().float())


def one_batch(data, r):
    return augment_batch(
        data[0].images[:32], data[0].labels[:32], r.augment, draws("cpu", 0), mean=r.mean, std=r.std
    )


def test_compiled_falls_back_on_failure(data, monkeypatch):
    def backend(graph, inputs):
        raise RuntimeError("there is no compiler here")

    compile = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda f, *, mode, dynamic: compile(f, backend=backend, dynamic=dynamic)
    )
    r = tiny(compile="default", compile_cpu=True)
    model, batch = r.build().eval(), one_batch(data, r)
    criterion = build_criterion(model, r, "cpu")
    with pytest.warns(
        RuntimeWarning, match="failed on cpu, so training continues uncompiled .*no compiler"
    ):
        loss = criterion(*batch)
    assert torch.equal(loss, build_criterion(model, replace(r, compile="off"), "cpu")(*batch))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(criterion(*batch), loss)


def test_compile_auto_is_off_for_short_runs():
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    r = replace(recipe("digits"), image_size=8, patch_size=2, batch_size=100, epochs=0, steps=1)
    assert r.compile == "auto"
    # 100 images of 16 patches a step
    for steps, mode in ((124_999, "off"), (125_000, "default")):
        short = replace(r, steps=steps)
        assert criteria.choose_compile(short, cuda, 1437).compile == mode
        assert criteria.choose_compile(short, cpu, 1437).compile == "auto"
        explicit = replace(short, compile="default")
        assert criteria.choose_compile(explicit, cuda, 1437) == explicit
    epochs = replace(r, epochs=2, steps=0)
    assert criteria.choose_compile(epochs, cuda, 6_250_000).compile == "default"
    assert criteria.choose_compile(epochs, cuda, 6_249_900).compile == "off"
    on_cpu = replace(r, steps=9)
    assert not criteria.compiles(on_cpu, cpu)
    assert criteria.compiles(replace(on_cpu, compile_cpu=True), cpu)


def test_fit_resumes_compile_default_of_earlier_versions(data, tmp_path):
    r = tiny(save_every=0.0)
    train(2, replace(r, compile="default"), data, out=tmp_path)
    assert next(fit(r.build(), data, r, device="cpu", out=tmp_path, resume=True)).step == 3
    other = replace(r, compile="off", compile_cpu=True)
    training = fit(r.build(), data, other, device="cpu", out=tmp_path, resume=True)
    refuses("compile = 'auto', got 'off'", next, training)


def test_augmentation_is_compiled_on_cuda(data, monkeypatch):
    r = tiny(compile="default", compile_cpu=True)
    settings = r.augment, r.image_size, r.mean, r.std
    chosen = {"cpu": "off", "cuda": "default"}
    for device, mode in chosen.items():
        expected = criteria._augmentation(*settings, mode)
        assert criteria.build_augmentation(r, torch.device(device)) is expected
    off = replace(r, compile="off")
    uncompiled = criteria.build_augmentation(off, torch.device("cuda"))
    assert uncompiled is criteria._augmentation(*settings, "off")

    graphs = []

    def backend(graph, inputs):
        if not graphs:
            graphs.append(graph)
            raise RuntimeError("there is no compiler here")
        graphs.append(graph)
        return graph

    compile = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda f, *, mode, **options: compile(f, backend=backend, **options)
    )
    images, labels = data[0].images[:32], data[0].labels[:32]
    numbers = draw_numbers(images.shape, r.augment, draws("cpu", 0), size=r.image_size)
    expected, _ = uncompiled(images, labels, numbers)
    fails, works = (criteria._augmentation.__wrapped__(*settings, "default") for _ in range(2))
    with pytest.warns(RuntimeWarning, match="so images are augmented uncompiled .*no compiler"):
        x, _ = fails(images, labels, numbers)
    assert torch.equal(x, expected)
    torch.testing.assert_close(works(images, labels, numbers)[0], expected)
    assert len(graphs) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(fails(images, labels, numbers)[0], expected)


def gradient(model: nn.Module, criterion, batch) -> tuple[torch.Tensor, set[str]]:
    """The gradient of all parameters, and the attention kernels that made it."""
    model.zero_grad()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        criterion(*batch).backward()
    names = {event.key.removeprefix("aten::") for event in profile.key_averages()}
    return torch.cat([p.grad.flatten() for p in model.parameters()]), {
        name for name in names if "attention" in name
    }


def test_compiled_uses_unfused_attention_in_bf16(data):
    """… as near to float32 as the fused kernel is, also where heads look at few patches."""
    r = replace(recipe("digits").tiny(), precision="bf16", width=64, heads=2, drop_path=0.0)
    model = r.build()
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight.mul_(8)  # scores of some tens
    batch = one_batch(data, r)
    exact, fused = gradient(
        model, build_criterion(model, replace(r, precision="fp32"), "cpu"), batch
    )
    assert "_scaled_dot_product_flash_attention_for_cpu" in fused
    near, used = gradient(model, build_criterion(model, r, "cpu"), batch)
    assert "_scaled_dot_product_attention_math" in used and not any(
        "flash" in name for name in used
    )
    # More patches, the same model: fused again, as attention's memory would be felt.
    other, used = gradient(model, build_criterion(model, replace(r, image_size=34), "cpu"), batch)
    assert "_scaled_dot_product_flash_attention_for_cpu" in used
    error, usual = ((g - exact).norm() / exact.norm() for g in (near, other))
    assert 0 < error < 0.03 and error < 1.5 * usual, (error, usual)


def test_export_separates_pretraining_head(data, tmp_path):
    r = tiny(head="mlp", loss="sigmoid", head_bias=-2.0)
    model = r.build()
    expected = (
        10 * math.log1p(math.exp(-2.0)) + 2.0
    )  # every logit is −2, and one class of ten is wanted
    assert next(fit(model, data, r, device="cpu")).loss == pytest.approx(expected, rel=0.01)
    export(model, tmp_path, r, data[0].class_names, dtype=torch.float32)
    opened = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    x = torch.randn(2, 3, 8, 8)
    features = opened(x)
    assert opened.num_classes == 0 and features.shape == (2, 48)
    head = safetensors.torch.load_file(tmp_path / "pretraining_head" / "head.safetensors")
    assert set(head) == {
        f"head.{layer}.{kind}" for layer in ("pre_logits", "output") for kind in ("weight", "bias")
    }
    model.head.load_state_dict({name.removeprefix("head."): t for name, t in head.items()})
    torch.testing.assert_close(model.eval()(x), model.head(features))
