"""The commands `vitlens app`, `vitlens page` and `vitlens audit`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from vitlens import texts
from vitlens.cli import (
    FILE_OPTIONS,
    AnyDevice,
    AnyModel,
    Checkpoint,
    Classes,
    Data,
    Device,
    Folder,
    Head,
    ImageKey,
    LabelKey,
    ListingCommand,
    Model,
    Outputs,
    Root,
    Stopped,
    complaints,
    count_failures,
    importing,
    model_and_images,
    named_images,
    note,
    run_images,
    working_device,
)


def add_commands(app: typer.Typer) -> None:
    """Add `app`, `page` and `audit` to the command line. `pyproject.toml` names this function."""
    app.command("app")(explorer)
    app.command()(page)
    app.command(cls=ListingCommand)(audit)


def explorer(
    model: AnyModel = None,
    image: Annotated[
        Path | None,
        Argument(
            exists=True,
            help="First image, or a folder, whose first image it is. Others can be uploaded.",
        ),
    ] = None,
    checkpoint: Checkpoint = None,
    head: Head = None,
    outputs: Outputs = None,
    port: Annotated[
        int,
        Option(
            min=0, max=65535, show_default=False, help="Port of the page. By default a free one."
        ),
    ] = 0,
    browser: Annotated[bool, Option(help="Open the page in the browser.")] = True,
) -> None:
    """Serve the explorer as a web page for this machine only, protected by a token, until Ctrl-C."""
    try:
        from vitlens_explorer.app import serve
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"The page needs {error.name}: run `pip install {error.name}`."
        ) from error

    model, images = model_and_images(model, [image] if image else [])
    first = _first_readable(named_images(images)) if images else None
    serve(
        model,
        first,
        checkpoint=checkpoint,
        head=head,
        outputs=outputs,
        port=port,
        browser=browser,
    )


def _first_readable(images: list[tuple[str, object]]) -> object:
    """The first image that can be read. Others before it are reported. Raises ImageError if there is none."""
    from vitlens.images import ImageError, load_image

    _, complain = complaints()
    for _, source in images[:-1]:
        try:
            load_image(source)
        except ImageError as error:
            complain(str(error))
        else:
            return source
    return images[-1][1]


def page(
    model: AnyModel = None,
    images: Annotated[
        list[Path] | None,
        Argument(
            exists=True, help="Images or folders of images. By default one of a run, or a sample."
        ),
    ] = None,
    live: Annotated[
        bool,
        Option(
            "--live",
            help="Put the model into the page, which then takes any photo. ViT-Ti and S of timm and transformers.",
        ),
    ] = False,
    blank: Annotated[
        bool,
        Option(
            "--blank",
            help="Write a page without a model, which opens config.json and model.safetensors that are dropped on it.",
        ),
    ] = False,
    out: Annotated[Path, Option(**FILE_OPTIONS, help="HTML file.")] = Path("page.html"),
    scores: Annotated[
        bool,
        Option(
            "--scores",
            help="Score the maps of five classes, not of the likeliest alone. Takes minutes.",
        ),
    ] = False,
    checkpoint: Checkpoint = None,
    head: Head = None,
    outputs: Outputs = None,
    device: Device = "cpu",
) -> int:
    """Write the explorer of some images as one HTML file, which needs neither Python nor a network to open."""
    with importing():
        from tqdm import tqdm

        from vitlens.images import ImageError
        from vitlens.models.opening import load_vit
        from vitlens.report import prepared
        from vitlens_explorer.in_page import photos_sentence, save_page
        from vitlens_explorer.live import save_blank_page, save_live_page

    if blank:
        if model or images or live or scores or checkpoint or head or outputs:
            raise typer.BadParameter(
                "A blank page has no model and no images. Use --blank with --out alone."
            )
        save_blank_page(out)
        print(f"{out}: {out.stat().st_size / 1e6:.1f} MB. Drop a model on it.")
        return 0
    if live and scores:
        raise typer.BadParameter("A live page has no --scores. Leave out --live or --scores.")
    model, images = model_and_images(model, images)
    shown = None  # samples
    if images:
        shown = dict(named_images(images))
    elif model:
        shown = dict(run_images(Path(model), 1)) or None
    vit = load_vit(model, checkpoint=checkpoint, head=head, outputs=outputs)
    vit = vit.to(working_device(device))
    failures, complain = complaints()
    number = len(shown or ())
    if shown and len(shown) > 1:
        readable = [name for name, _ in prepared(vit, shown, complain)]
        if not readable:
            raise ImageError("None of the images could be read, so there is nothing to show.")
        shown = {name: shown[name] for name in readable}
    write = save_live_page if live else save_page
    options = {} if live else {"scores": scores}
    with tqdm(bar_format="{desc} [{elapsed}]", delay=1, disable=None) as bar:  # in a terminal

        def report(step: str) -> None:
            bar.set_description_str(texts.shown(step))

        write(vit, shown, out, progress=report, **options)
    photos = photos_sentence([*shown]) if shown else "Its photos are samples."
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB. {photos}")
    return count_failures(failures, number)


def audit(
    model: Model,
    data: Data,
    out: Folder = Path("audit"),
    labels: Annotated[
        bool,
        Option(
            help="Use the labels of the images. Without them, predicted classes serve, and no group is called used."
        ),
    ] = True,
    batch_size: Annotated[int, Option(min=1, help="Images in a batch.")] = 32,
    seed: Annotated[
        int, Option(help="Seed of the halves, the groups, the random patches and the intervals.")
    ] = 0,
    root: Root = None,
    checkpoint: Checkpoint = None,
    classes: Classes = "",
    image_key: ImageKey = "",
    label_key: LabelKey = "",
    head: Head = None,
    beside: Annotated[
        str,
        Option(
            help="Second model, compared on the same images: which groups and heads differ. A file is a checkpoint of "
            "the first."
        ),
    ] = "",
    device: AnyDevice = None,
) -> int:
    """Find the patches that a classifier goes by over many images, cover them as a test, and write a page."""
    with importing():
        from tqdm import tqdm

        import vitlens
        from vitlens import models
        from vitlens.evidence import require_same_classes
        from vitlens.finished import Finished
        from vitlens.models.opening import load_beside, load_vit, short
        from vitlens.processes import join
        from vitlens_explorer import audit as auditing
        from vitlens_explorer.audit_changes import changed_words
        from vitlens_explorer.audit_page import About

    torch_device = working_device(device)
    auditing.check_out(out, data)
    vit = load_vit(model, checkpoint=checkpoint, head=head)
    other = None
    if beside:
        other = load_beside(model, beside, vit, head=head if checkpoint else None)
        require_same_classes(vit, other)
    place = join(torch_device).device
    vit = vit.to(place)
    other = other if other is None else other.to(place)
    images = auditing.open_images(
        vit,
        data,
        root=root,
        classes=classes,
        labeled=labels,
        image_key=image_key,
        label_key=label_key,
        beside=other,
        on_note=note,
    )
    number = len(images.pairs)
    most = auditing.forwards(number, bool(beside))
    both = " of both models" if beside else ""
    note(
        f"{number:,} images take at most {most:,} forwards{both}, and a backward for half of them."
    )
    about = About(
        short(model),
        short(data),
        labeled=images.labels is not None,
        names=dict(enumerate(models.label_names(vit) or [])) | images.names,
        commands=auditing.commands(images, model, {"checkpoint": checkpoint, "head": head}),
        beside=short(beside),
        beside_weights="" if other is None else models.weights_digest(other),
    )
    partial = out / auditing.UNFINISHED
    options = {
        "batch_size": batch_size,
        "seed": seed,
        "compare": False,
        "partial": partial,
        "beside": other,
    }
    try:
        with _Bars() as bars:
            found = vitlens.audit(
                vit, images.pairs, images.labels, on_progress=bars.move, on_note=note, **options
            )
    except KeyboardInterrupt:
        if not partial.is_dir():
            raise Stopped(f"stopped before the audit ended, so {out} is unchanged.") from None
        raise Stopped(
            f"stopped before the audit ended. Finished batches are in {partial}, and the same command goes on."
        ) from None
    new_notes = list(found.notes)
    if images.note:
        found.notes.append(images.note)  # printed by `open_images`
    command = ["vitlens", *sys.argv[1:]]
    try:
        with tqdm(unit="image", desc="write") as bar:
            paths = auditing.write_audit(
                found, vit, images, out, about, command=command, on_image=bar.update
            )
    except KeyboardInterrupt:
        raise Stopped(
            f"stopped while {out} was written, so files may be missing. The same command writes them."
        ) from None
    Finished(partial).remove()
    print(*paths, sep="\n")
    used, groups = len(found.used), len(found.groups)
    print(f"\nUsed groups: {used:,} of {groups:,}. Open {out / auditing.PAGE}.")
    if found.changes is not None:
        print(changed_words(found.changes))
        new_notes += found.changes.notes
    for words in new_notes:
        note(words)
    return int(len(found.images) < number)


class _Bars:
    """Progress bars of the steps of an audit, one after the other, as a context that closes the last."""

    def __init__(self):
        self.step = ""
        self.bar = None

    def __enter__(self) -> _Bars:
        return self

    def __exit__(self, *_) -> None:
        if self.bar is not None:
            self.bar.close()

    def move(self, step: str, done: int, total: int) -> None:
        """Move the bar of a step to the images done."""
        from tqdm import tqdm

        if step != self.step:
            self.__exit__()
            self.step = step
            self.bar = tqdm(total=total, unit="image", desc=step)
        self.bar.update(done - self.bar.n)
