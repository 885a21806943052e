"""Validation accuracy against seconds of training: a pure ViT on Tiny-ImageNet, no test-time augmentation.

    python -m experiments.time_to_accuracy --data tiny-imagenet --out data/results/time-to-accuracy.csv
    python -m experiments.time_to_accuracy --data DIR --out t.csv --tiny        # seconds on a CPU

Runs one recipe for several seeds with the images already on the device. One row per validation: seconds since the start
of training, and the same without the compilation and the trial that sets the number of epochs, which happen once,
before the first seed. Validation itself is inside the seconds.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice

import torch
from torch import nn

from experiments.results import about, command, parser, write
from vitlens import data as datasets
from vitlens.data import ImageSet
from vitlens.train import World, build_criterion, fit
from vitlens.train.criteria import validate
from vitlens.train.recipes import Recipe, recipe

MARGIN = 0.97  # planned share of the seconds; noise takes the rest


def fitted(
    model: nn.Module,
    data: tuple[ImageSet, ImageSet],
    plan: Recipe,
    seconds: float,
    world: World,
    criterion: Callable,
) -> Recipe:
    """The plan with the number of epochs that fit into `seconds`, measured by a short trial.

    The trial compiles, trains some steps with and without patch dropout, validates, and restores the weights.
    """
    trial = replace(
        plan,
        epochs=1_000_000,
        steps=0,
        log_every=4,
        evaluate_every=1_000_000,
        warmup=plan.warmup or 0.1,
        warmup_steps=0,
        patch_drop=0.0,
        patch_drop_until=0.0,
    )
    before = {name: t.clone() for name, t in model.state_dict().items()}
    whole = dropped = _speed(model, data, trial, world, criterion)
    if plan.patch_drop:
        trial = replace(trial, patch_drop=plan.patch_drop, patch_drop_until=1.0)
        dropped = _speed(model, data, trial, world, criterion)
    validate(model, {}, data[1], plan, world)  # warm-up
    tick = time.perf_counter()
    validate(model, {}, data[1], plan, world)
    validating = (2 if plan.average else 1) * (time.perf_counter() - tick)
    model.load_state_dict(before)
    model.zero_grad()
    images = len(data[0]) // plan.batch_size * plan.batch_size
    epoch = images * (plan.patch_drop_until / dropped + (1 - plan.patch_drop_until) / whole)
    left = seconds * MARGIN - validating
    epochs = int(world.first(left / (epoch + validating / plan.evaluate_every)))
    if epochs < 1:
        raise ValueError(
            f"An epoch takes about {epoch:.0f} s, longer than the {seconds:.0f} s given. Give more --seconds."
        )
    return replace(plan, epochs=epochs, steps=0)


def _speed(model, data, trial: Recipe, world: World, criterion: Callable) -> float:
    """Images per second: median of the later half of eight readings."""
    with closing(fit(model, data, trial, world=world, criterion=criterion)) as training:
        steps = (
            step
            for step in islice(training, 8 * trial.log_every)
            if step.step % trial.log_every == 0
        )
        speeds = [step.images_per_second for step in steps]
    return statistics.median([speed for speed in speeds if speed is not None][4:])


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__, data=True)
    options.add_argument("--recipe", default="tiny-imagenet-2min")
    options.add_argument(
        "--seconds", type=float, default=118, help="time to fit the epochs to; 0: as in the recipe"
    )
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = options.parse_args(arguments)
    device = torch.device(options.device)
    how = about(command("experiments.time_to_accuracy", arguments), device)
    if options.tiny:
        options.seconds, options.seeds = 0, 2
    world = World(device=device)
    plan = recipe(options.recipe)
    plan = (plan.tiny() if options.tiny else plan).override(*options.set)
    train, valid = (
        datasets.load(options.data, s, size=plan.image_size).to(device) for s in ("train", "valid")
    )
    if options.tiny:
        train, valid = train.subset(plan.train_images), valid.subset(plan.valid_images)

    begin = time.perf_counter()
    model = plan.build().to(device)
    criterion = build_criterion(model, plan, device)
    if options.seconds:
        plan = fitted(model, (train, valid), plan, options.seconds, world, criterion)
    else:  # compile all the same
        fitted(model, (train, valid), plan, 1e9, world, criterion)
    before = time.perf_counter() - begin
    print(f"{plan.epochs} epochs; {before:.0f} s for compilation and trial", flush=True)

    rows, finals = [], []
    for seed in range(options.seeds):
        seeded = replace(plan, seed=seed)
        model.load_state_dict(
            seeded.build().state_dict()
        )  # the same module, so nothing is compiled again
        start = time.perf_counter()
        for step in fit(model, (train, valid), seeded, device=device, criterion=criterion):
            if step.metrics:
                seconds = time.perf_counter() - start
                rows.append(
                    {
                        "recipe": plan.name,
                        "seed": seed,
                        "epoch": step.epoch + 1,
                        "epochs": plan.epochs,
                        "seconds": round(seconds, 2),
                        "seconds_with_compilation": round(seconds + before, 2),
                        "top1": round(step.metrics["top1"], 2),
                        "top1_average": round(step.metrics.get("top1_average", float("nan")), 2),
                        "loss": None if step.loss is None else round(step.loss, 4),
                        "settings": " ".join(options.set),
                        **how,
                    }
                )
                write(options.out, rows)
        finals.append(max(step.metrics.values()))
        print(f"seed {seed}: {finals[-1]:.2f} % after {rows[-1]['seconds']:.1f} s", flush=True)
    spread = statistics.stdev(finals) if len(finals) > 1 else 0.0
    print(
        f"{plan.name}: {statistics.mean(finals):.2f} ± {spread:.2f} % top-1 over {len(finals)} seeds",
        flush=True,
    )


if __name__ == "__main__":
    main()
