"""`vitlens train`: from a recipe and images to a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from vitlens.commands import options
from vitlens.data.sources import source_names


@dataclass(frozen=True)
class Options:
    """What `vitlens train` is asked."""

    recipe: Annotated[str, Option(help="Name of a recipe (see --list), or a JSON file with one.")] = ""
    data: Annotated[str, Option(help=f"A folder or tar file, or {source_names()}.")] = ""
    root: options.Root = None
    stream: Annotated[bool | None, Option("--stream/--hold", help="By default, hold in memory what fits.")] = None
    workers: options.Workers = None
    skip_damaged: options.SkipDamaged = False
    out: Annotated[Path | None, Option(help="Folder for the log, the checkpoints and the model.")] = None
    model: Annotated[str, Option(help="Start from this model: a timm name or a folder.")] = ""
    resume: Annotated[bool, Option("--resume", help="Continue the run in --out where it stopped.")] = False
    max_minutes: Annotated[float | None, Option(help="Stop and save after this time.")] = None
    fit_minutes: Annotated[float | None, Option(help="Choose the number of epochs that takes this long.")] = None
    settings: options.Settings = None
    device: options.AnyDevice = None
    seed: Annotated[int | None, Option(help="Seed of all randomness.")] = None
    deterministic: Annotated[
        bool, Option("--deterministic", help="Repeat to the bit on CUDA too; prints what it costs.")
    ] = False
    watch: Annotated[int, Option(help="Number of snapshots of the inspection figures; 0 for none.")] = 24
    export: Annotated[bool, Option("--export", help="Write OUT/model even if the run is stopped.")] = False
    tensorboard: Annotated[bool, Option("--tensorboard", help="Write TensorBoard files too.")] = False
    tiny: Annotated[bool, Option("--tiny", help="Run the same path in a few seconds.")] = False
    list_recipes: Annotated[
        bool, Option("--list", help="List the recipes, or all settings of the one named, and stop.")
    ] = False


def train(asked: Options) -> None:
    """Train a Vision Transformer by a recipe, with snapshots of its attention, and save it in timm's hub layout."""
    from vitlens.train.runs import run

    if asked.list_recipes:
        list_recipes(asked)
        return
    options.require("Training", recipe=asked.recipe, data=asked.data, out=asked.out)
    options.checked_device(asked.device)
    account = run(
        asked.recipe, asked.data, asked.out, model=asked.model, resume=asked.resume, max_minutes=asked.max_minutes,
        fit_minutes=asked.fit_minutes, overrides=overrides(asked), device=asked.device, seed=asked.seed,
        tensorboard=asked.tensorboard, export=asked.export, tiny=asked.tiny, watch=asked.watch, root=asked.root,
        stream=asked.stream, workers=asked.workers, on_damaged="skip" if asked.skip_damaged else "raise",
    )  # fmt: skip
    if account["stopped_by"]:
        raise SystemExit(128 + account["stopped_by"])


def overrides(asked: Options) -> list[str]:
    """The changes of the recipe, as key=value."""
    return [*(asked.settings or ()), *(["deterministic=true"] if asked.deterministic else [])]


def list_recipes(asked: Options) -> None:
    """Print every recipe in a line, or every setting of the one named."""
    from vitlens.train.recipes import RECIPES
    from vitlens.train.runs import read_recipe

    if asked.recipe:
        for key, value, meaning in read_recipe(asked.recipe).override(*(asked.settings or ())).described():
            shown = ",".join(map(str, value)) if isinstance(value, tuple) else value
            print(f"{f'{key}={shown}':<36} {meaning}")
        return
    for each in RECIPES.values():
        sizes = f"patch {each.patch_size}, width {each.width}, depth {each.depth}, {each.heads} heads"
        length = f"{each.epochs} epochs" if each.epochs else f"{each.steps:,} steps"
        print(
            f"{each.name}: {'your --model' if each.continues else sizes}, {each.image_size} px, {length} of "
            f"{each.batch_size} images, {each.optimizer}"
        )
