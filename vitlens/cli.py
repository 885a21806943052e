"""The same functions from a shell: `vitlens inspect`, `train`, `explain`, `app`.

A wrong option, path or file ends with one sentence and exit code 2; if some images of several could not be read, the
rest is done and the exit code is 1.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__.split("\n")[0]
)


@app.callback()
def _vitlens() -> None:
    """A microscope for Vision Transformers."""


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(help="A timm name, or a folder with config.json and model.safetensors.")],
    images: Annotated[list[Path] | None, typer.Argument(help="Photographs; without any, bundled samples.")] = None,
    out: Annotated[Path, typer.Option(help="Where the figures and summary.json go.")] = Path("figures"),
    dataset: Annotated[Path | None, typer.Option(help="A folder of images for the mean attention distance.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps.")] = "cpu",
) -> None:
    """Write the figures of "An Image is Worth 16x16 Words" for a model: filters, positions, distance, rollout."""
    from tqdm import tqdm

    from vitlens import inspection
    from vitlens.models import load_model

    failures, complain = _failures()
    more = inspection.image_files(dataset) if dataset else []
    pictures = _pictures(images)
    _require_folder(out)
    vit = load_model(model).to(_device(device))
    count = len(pictures) + len(more)
    with tqdm(total=count, unit="image", disable=count < 12) as bar:
        found = inspection.inspect(
            vit, _counted(pictures, bar), _counted(more, bar), on_error=complain if count > 1 else None
        )
    for path in inspection.write(found, out):
        print(path)
    for note in found.notes:
        print(f"Note: {note}")
    if failures:
        raise SystemExit(1)


@app.command()
def train(
    recipe: Annotated[str, typer.Option(help="Name of a recipe (see --list), or a JSON file with one.")] = "",
    data: Annotated[str, typer.Option(help="A folder or tar file, or digits, torch/NAME, hfds/NAME, wds/NAME.")] = "",
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
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write for TensorBoard too.")] = False,
    tiny: Annotated[bool, typer.Option("--tiny", help="The same path in a few seconds.")] = False,
    list_recipes: Annotated[bool, typer.Option("--list", help="Show the recipes and stop.")] = False,
) -> None:
    """Train a Vision Transformer by a recipe, watched from the inside; write it in timm's hub layout."""
    from vitlens.recipes import RECIPES
    from vitlens.runs import run

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
        _device(device)
    account = run(
        recipe, data, out, model=model, resume=resume, max_minutes=max_minutes, fit_minutes=fit_minutes,
        overrides=[*(settings or ()), *(["deterministic=true"] if deterministic else ())], device=device, seed=seed,
        tensorboard=tensorboard, tiny=tiny, watch=watch, root=root, stream=stream, workers=workers,
        on_damaged="skip" if skip_damaged else "raise",
    )  # fmt: skip
    if account["stopped_by"]:
        raise SystemExit(128 + account["stopped_by"])


@app.command()
def explain(
    model: Annotated[str, typer.Argument(help="A timm name, or a folder with config.json and model.safetensors.")],
    images: Annotated[list[Path] | None, typer.Argument(help="Photographs; without any, bundled samples.")] = None,
    target: Annotated[str, typer.Option(help="A class number or name; by default what is predicted.")] = "",
    against: Annotated[str, typer.Option(help="Another class: why the target rather than this one?")] = "",
    methods: Annotated[str, typer.Option(help="Names, divided by commas; by default the quick ones.")] = "",
    out: Annotated[Path, typer.Option(help="Where the figures and scores.csv go.")] = Path("explanations"),
    baseline: Annotated[str, typer.Option(help="What covers a patch: mean, blur or zero.")] = "mean",
    orders: Annotated[int, typer.Option(help="Random orders that the maps are compared with.")] = 10,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps.")] = "cpu",
) -> None:
    """Why a class: the maps of several methods, each with what insertion and deletion say of it."""
    from vitlens import explanation
    from vitlens.models import load_model

    failures, complain = _failures()
    pictures = _pictures(images)
    _require_folder(out)
    names = [name.strip() for name in methods.split(",")] if methods else explanation.QUICK
    vit = load_model(model).to(_device(device))
    found = explanation.explain(
        vit, pictures, _class(target), against=_class(against), names=names, baseline=baseline, orders=orders,
        on_error=complain if len(pictures) > 1 else None,
    )  # fmt: skip
    for path in explanation.write(found, vit, out):
        print(path)
    if failures:
        raise SystemExit(1)


@app.command(name="app")
def explorer(
    model: Annotated[str, typer.Argument(help="A timm name, or a folder with config.json and model.safetensors.")],
    image: Annotated[Path | None, typer.Argument(help="A photograph; more can be uploaded.")] = None,
    port: Annotated[int, typer.Option(help="Port on this machine; by default a free one.")] = 0,
    browser: Annotated[bool, typer.Option(help="Open the page in the browser.")] = True,
) -> None:
    """Serve the explorer as a web page, on this machine alone and behind a token, until Ctrl-C."""
    from vitlens.app import serve
    from vitlens.images import load_image
    from vitlens.models import load_model
    from vitlens.support import attention_modules

    attention_modules(load_model(model))  # refuses here what the page would refuse
    if image is not None:
        load_image(image)
    raise SystemExit(serve(model, image, port=port, browser=browser))


def _class(given: str) -> int | str | None:
    """A class's number or name; None for the predicted one."""
    return int(given) if given.isdecimal() else given or None


def _failures() -> tuple[list[str], Callable[[str], None]]:
    """Sentences about single pictures, and the function that says one and remembers it."""
    failures: list[str] = []

    def complain(sentence: str) -> None:
        failures.append(sentence)
        print(f"vitlens: {sentence}", file=sys.stderr)

    return failures, complain


def _pictures(images: list[Path] | None) -> list[tuple[str, object]]:
    """(name, source) of the photographs given, or of the samples."""
    from vitlens.images import samples

    return [(_name(path, images), path) for path in images] if images else list(samples().items())


def _require_folder(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise ValueError(f"The figures need a folder, but {out} is a file. Give another --out.")


def _name(path: Path, among: list[Path]) -> str:
    """The file's name, or its whole path where two files have the same name."""
    return path.name if sum(other.name == path.name for other in among) == 1 else str(path)


def _counted(pairs, bar):
    for pair in pairs:
        yield pair
        bar.update()


def _device(name: str):
    import torch

    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda", "mps", "xpu"):
        raise ValueError(f"There is no device called {name!r}; the usual ones are cpu, cuda and mps.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"The device {name} was asked for, but PyTorch sees no CUDA GPU here; use --device cpu.")
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"The device {name} does not work here ({reason}); use --device cpu.") from None
    return device


def main() -> None:
    """The `vitlens` command."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that cannot print a name shows its code instead
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except (ValueError, OSError, MemoryError, FloatingPointError, ModuleNotFoundError) as error:
        print(f"vitlens: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None
    except RuntimeError as error:
        from vitlens.support import out_of_memory

        if not out_of_memory(error):
            raise
        print("vitlens: Memory ran out; take smaller batches or images, or --stream them.", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("vitlens: stopped.", file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
