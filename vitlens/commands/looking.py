"""`vitlens inspect`, `vitlens explain` and `vitlens app`: a model and photographs in, figures or a page out."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from vitlens.attribution import registry
from vitlens.commands.shared import checked_device, complaints, counted, photographs, say
from vitlens.files import writable

_QUICK, _OTHERS = (
    ", ".join(name for name, method in registry.METHODS.items() if method.quick is wanted) for wanted in (True, False)
)
LISTED = f"{_QUICK} (these unless told otherwise), {_OTHERS}"


def inspect(
    model: Annotated[str, typer.Argument(help="A timm name, or a folder with config.json and model.safetensors.")],
    images: Annotated[list[Path] | None, typer.Argument(help="Photographs; without any, bundled samples.")] = None,
    out: Annotated[Path, typer.Option(help="Where the figures and summary.json go.")] = Path("figures"),
    dataset: Annotated[Path | None, typer.Option(help="A folder of images for the mean attention distance.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps.")] = "cpu",
) -> None:
    """Write the figures of "An Image is Worth 16x16 Words" for a model: filters, positions, distance, rollout."""
    from tqdm import tqdm

    from vitlens.models import load_model
    from vitlens.reports import inspection

    failures, complain = complaints()
    more = inspection.image_files(dataset) if dataset else []
    pictures = photographs(images)
    writable(out, "--out")
    vit = load_model(model).to(checked_device(device))
    count = len(pictures) + len(more)
    with tqdm(total=count, unit="image", disable=count < 12) as bar:
        found = inspection.inspect(
            vit, counted(pictures, bar), counted(more, bar), on_error=complain if count > 1 else None
        )
    for path in inspection.write(found, out):
        print(path)
    for note in found.notes:
        print(f"Note: {note}")
    if failures:
        raise SystemExit(1)


def explain(
    model: Annotated[str, typer.Argument(help="A timm name, or a folder with config.json and model.safetensors.")],
    images: Annotated[list[Path] | None, typer.Argument(help="Photographs; without any, bundled samples.")] = None,
    target: Annotated[str, typer.Option(help="A class number or name; by default what is predicted.")] = "",
    against: Annotated[str, typer.Option(help="Another class: why the target rather than this one?")] = "",
    methods: Annotated[str, typer.Option(help=f"Names, divided by commas: {LISTED}.")] = "",
    out: Annotated[Path, typer.Option(help="Where the figures and scores.csv go.")] = Path("explanations"),
    baseline: Annotated[str, typer.Option(help="What covers a patch: mean, blur or zero.")] = "mean",
    orders: Annotated[int, typer.Option(help="Random orders that the maps are compared with.")] = 10,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps.")] = "cpu",
) -> None:
    """Why a class: the maps of several methods, each with what insertion and deletion say of it."""
    from tqdm import tqdm

    from vitlens.models import load_model
    from vitlens.reports import explanation

    failures, complain = complaints()
    pictures = photographs(images)
    writable(out, "--out")
    names = [name.strip() for name in methods.split(",") if name.strip()] or [*registry.methods()]
    vit = load_model(model).to(checked_device(device))
    done: list[Path] = []
    with tqdm(total=len(pictures) * (len(names) + 1), unit="map", delay=1) as bar:

        def advance(part: str) -> None:
            bar.set_description(part, refresh=False)
            bar.update()

        def written(path: Path) -> None:
            done.append(path)
            say(str(path), sys.stdout)

        found = explanation.explanations(
            vit, pictures, target or None, against=against or None, names=names, baseline=baseline, orders=orders,
            on_error=complain if len(pictures) > 1 else None, on_part=advance,
            on_note=lambda note: say(f"Note: {note}", sys.stdout),
        )  # fmt: skip
        try:
            paths = explanation.write(found, vit, out, on_written=written)
        except KeyboardInterrupt:
            if not done:
                raise
            say(f"vitlens: stopped after {len(done)} of {len(pictures)} pictures, which are in {out}.")
            raise SystemExit(130) from None
    print(paths[-1])
    if failures:
        raise SystemExit(1)


def explorer(
    model: Annotated[str, typer.Argument(help="A timm name, or a folder with config.json and model.safetensors.")],
    image: Annotated[Path | None, typer.Argument(help="A photograph; more can be uploaded.")] = None,
    port: Annotated[int, typer.Option(help="Port on this machine; by default a free one.")] = 0,
    browser: Annotated[bool, typer.Option(help="Open the page in the browser.")] = True,
    sessions: Annotated[int, typer.Option(help="How many pages may be open; each holds the model in memory.")] = 8,
) -> None:
    """Serve the explorer as a web page, on this machine alone and behind a token, until Ctrl-C."""
    from vitlens.images import load_image
    from vitlens.models import load_model
    from vitlens.recorder.families import attention_modules
    from vitlens.widgets.app import serve

    attention_modules(load_model(model))  # refuses here what the page would refuse
    if image is not None:
        load_image(image)
    serve(model, image, port=port, browser=browser, sessions=sessions)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process ends: one more Ctrl-C has nothing to say
