"""`vitlens train`: a recipe and images in, a model out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vitlens.commands.shared import checked_device
from vitlens.data.sources import source_names


def train(
    recipe: Annotated[str, typer.Option(help="Name of a recipe (see --list), or a JSON file with one.")] = "",
    data: Annotated[str, typer.Option(help=f"A folder or tar file, or {source_names()}.")] = "",
    root: Annotated[Path | None, typer.Option(help="Where data sets with a name lie, or are fetched to.")] = None,
    stream: Annotated[bool | None, typer.Option("--stream/--hold", help="By default, hold what fits.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that read images; by default one a core.")] = None,
    skip_damaged: Annotated[bool, typer.Option("--skip-damaged", help="Name damaged images and go on.")] = False,
    out: Annotated[Path | None, typer.Option(help="Where log, checkpoints and the model go.")] = None,
    model: Annotated[str, typer.Option(help="Start from this model: a timm name or a folder.")] = "",
    resume: Annotated[bool, typer.Option("--resume", help="Go on where the run in --out stopped.")] = False,
    max_minutes: Annotated[float | None, typer.Option(help="Stop and save after this time.")] = None,
    fit_minutes: Annotated[float | None, typer.Option(help="Choose the epochs so that it takes this long.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change the recipe.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, …; by default a GPU if there is one.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of all randomness.")] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Repeat to the bit on CUDA too; says what it costs.")
    ] = False,
    watch: Annotated[int, typer.Option(help="Snapshots of the inspection figures; 0 for none.")] = 24,
    export: Annotated[bool, typer.Option("--export", help="Write OUT/model also if the run is stopped.")] = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write for TensorBoard too.")] = False,
    tiny: Annotated[bool, typer.Option("--tiny", help="The same path in a few seconds.")] = False,
    list_recipes: Annotated[
        bool, typer.Option("--list", help="Show the recipes, or all settings of the one named, and stop.")
    ] = False,
) -> None:
    """Train a Vision Transformer by a recipe, watched from the inside; write it in timm's hub layout."""
    from vitlens.train.recipes import RECIPES
    from vitlens.train.runs import read_recipe, run

    if list_recipes and recipe:
        for key, value, meaning in read_recipe(recipe).override(*(settings or ())).described():
            shown = ",".join(map(str, value)) if isinstance(value, tuple) else value
            print(f"{f'{key}={shown}':<36} {meaning}")
        return
    if list_recipes:
        for each in RECIPES.values():
            sizes = f"patch {each.patch_size}, width {each.width}, depth {each.depth}, {each.heads} heads"
            length = f"{each.epochs} epochs" if each.epochs else f"{each.steps:,} steps"
            print(
                f"{each.name}: {'your --model' if each.continues else sizes}, {each.image_size} px, {length} of "
                f"{each.batch_size} images, {each.optimizer}"
            )
        return
    for name, value in (("--recipe", recipe), ("--data", data), ("--out", out)):
        if not value:
            raise ValueError(f"Training needs {name}. `vitlens train --list` shows the recipes, --help all options.")
    if device is not None:
        checked_device(device)
    account = run(
        recipe, data, out, model=model, resume=resume, max_minutes=max_minutes, fit_minutes=fit_minutes,
        overrides=[*(settings or ()), *(["deterministic=true"] if deterministic else ())], device=device, seed=seed,
        tensorboard=tensorboard, export=export, tiny=tiny, watch=watch, root=root, stream=stream, workers=workers,
        on_damaged="skip" if skip_damaged else "raise",
    )  # fmt: skip
    if account["stopped_by"]:
        raise SystemExit(128 + account["stopped_by"])
