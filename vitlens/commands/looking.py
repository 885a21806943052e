"""`vitlens inspect`, `explain` and `app`: from a model and images to figures, maps or a web page."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from vitlens.attribution import METHODS
from vitlens.attribution import methods as rows
from vitlens.commands import options
from vitlens.data.files import writable

_QUICK, _OTHERS = (
    ", ".join(name for name, method in METHODS.items() if method.quick is quick) for quick in (True, False)
)
LISTED = f"{_QUICK} (the default), {_OTHERS}"


def inspect(
    model: options.Model,
    images: options.Images = None,
    out: Annotated[Path, typer.Option(help="Folder for the figures and summary.json.")] = Path("figures"),
    dataset: Annotated[Path | None, typer.Option(help="A folder of images for the mean attention distance.")] = None,
    beside: Annotated[str, typer.Option(help="A second model to draw next to the first, in beside.png.")] = "",
    heads: Annotated[bool, typer.Option("--heads", help="Write what each head adds to the logit, too.")] = False,
    device: options.Device = "cpu",
) -> None:
    """Write the figures of "An Image is Worth 16x16 Words" for a model: filters, positions, distance, rollout."""
    with options.importing():
        from tqdm import tqdm

        from vitlens.models import load_model
        from vitlens.recorder.supported import attention_modules
        from vitlens.reports import inspection
        from vitlens.reports.pictures import image_files

    names = [model, beside] if beside else [model]
    if beside and Path(model) == Path(beside):
        raise ValueError(f"Both models are {model}. Name another one after --beside.")
    failures, complain = options.complaints()
    more = image_files(dataset) if dataset else []
    shown = options.named_images(images)
    writable(out, "--out")
    vits = [load_model(name).to(options.checked_device(device)) for name in names]
    for vit in vits:
        attention_modules(vit)  # raises here what would else end the work on the second one
    count = len(shown) + len(more)
    found = []
    with tqdm(total=count * len(vits), unit="image", disable=count < 12) as bar:

        def counted(sources):
            for source in sources:
                yield source
                bar.update()

        def once(message: str) -> None:
            if message not in failures:
                complain(message)

        for vit in vits:
            found.append(inspection.inspect(vit, counted(shown), counted(more), on_error=once if count > 1 else None))
    if heads:
        from vitlens.reports import heads as parts

        added = parts.write(parts.written(vits[0], shown, on_error=once if count > 1 else None), out)
    alike = len({each.model for each in found}) < len(found)
    headings = dict(zip(names if alike else [each.model for each in found], found, strict=True))
    more_paths = [*(inspection.write_beside(headings, out) if beside else ()), *(added if heads else ())]
    for path in [*inspection.write(found[0], out), *more_paths]:
        print(path)
    for heading, each in headings.items():
        print(f"\n{heading}")
        for name, words in each.sentences.items():
            print(f"  {name:11}{words}")
        for note in each.notes:
            print(f"  Note: {note}")
    if failures:
        raise SystemExit(1)


def explain(
    model: options.Model,
    images: options.Images = None,
    target: Annotated[str, typer.Option(help="A class number or name; by default the predicted class.")] = "",
    against: Annotated[str, typer.Option(help="Explain why the target and not this class (picture, text).")] = "",
    like: Annotated[list[Path] | None, typer.Option(help="Explain the similarity to a picture, or to several.")] = None,
    text: Annotated[list[str] | None, typer.Option(help="Explain the similarity to a text; twice: contrast.")] = None,
    methods: Annotated[str, typer.Option(help=f"Names, separated by commas: {LISTED}.")] = "",
    out: Annotated[Path, typer.Option(help="Folder for the figures and scores.csv.")] = Path("explanations"),
    baseline: Annotated[str, typer.Option(help="What replaces covered patches: mean, blur or zero.")] = "mean",
    orders: Annotated[int, typer.Option(help="Number of random orders to compare the maps with.")] = 10,
    device: options.Device = "cpu",
) -> None:
    """Explain a class, or what makes a picture like another or like a text, and score each map by insertion and
    deletion."""
    with options.importing():
        from tqdm import tqdm

        from vitlens.models import load_model
        from vitlens.reports import explanation

    failures, complain = options.complaints()
    shown = options.named_images(images)
    writable(out, "--out")
    names = options.comma_separated(methods) or None
    parts = len(rows(names)) + 1
    question, other = _question(target, against, like or [], text or [])
    vit = load_model(model).to(options.checked_device(device))
    done: list[Path] = []
    with tqdm(total=len(shown) * parts, unit="map", delay=1) as bar:

        def advance(part: str) -> None:
            bar.set_description(part, refresh=False)
            bar.update()

        def written(path: Path) -> None:
            done.append(path)
            options.echo(str(path), sys.stdout)

        found = explanation.explanations(
            vit, shown, question, against=other, names=names, baseline=baseline, orders=orders,
            on_error=complain if len(shown) > 1 else None, on_part=advance,
            on_note=lambda note: options.echo(f"Note: {note}", sys.stdout),
        )  # fmt: skip
        try:
            paths = explanation.write(found, vit, out, on_written=written)
        except KeyboardInterrupt:
            if not done:
                raise
            options.echo(f"vitlens: stopped after {len(done)} of {len(shown)} images, which are in {out}.")
            raise SystemExit(130) from None
    print(paths[-1])
    if failures:
        raise SystemExit(1)


def _question(target: str, against: str, like: list[Path], text: list[str]) -> tuple[object, object]:
    """target and against as `vitlens.reports.explanation` takes them."""
    from vitlens.attribution import target as targets

    if bool(target) + bool(like) + bool(text) > 1:
        raise ValueError("One thing is explained at a time. Give one of --target, --like and --text.")
    if len(text) > 2 or (len(text) == 2 and against):
        raise ValueError("A contrast is between two texts, but more were given. Give --text twice.")
    if text:
        texts = [*text, *([against] if against else [])]
        return (*map(targets.text, texts), None)[:2]
    if like:
        return targets.like(like), targets.like(Path(against)) if against else None
    return target or None, against or None


def explorer(
    model: options.Model,
    image: Annotated[Path | None, typer.Argument(help="A photograph to begin with; others can be uploaded.")] = None,
    port: Annotated[int, typer.Option(help="Port on this machine; by default a free one.")] = 0,
    browser: Annotated[bool, typer.Option(help="Open the page in the browser.")] = True,
) -> None:
    """Serve the explorer as a web page for this machine only, protected by a token, until Ctrl-C."""
    try:
        from vitlens.widgets.app import serve
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"The page needs {error.name}: run `pip install {error.name}`.") from error

    serve(model, image, port=port, browser=browser)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not interrupt the exit
