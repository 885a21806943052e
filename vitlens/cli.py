"""The command line: `vitlens inspect`, `explain`, `train`, and the commands of installed plugins.

A wrong option, path or file ends a command with one line on stderr and exit code 2. If only some of several images
cannot be read, the command skips them and exits with 1. Heavy libraries are imported inside the commands, so that help
does not wait for them.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer
from typer import Argument, Option
from typer.core import TyperCommand

from vitlens import launcher
from vitlens.names import require_known, suggestion
from vitlens.plugins import load_plugins
from vitlens.texts import visible

if TYPE_CHECKING:
    from vitlens.data import Samples
    from vitlens.data.sources import Columns

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

# click's UsageError, wherever the installed typer has it from
WrongCommandLine = typer.BadParameter.__base__


def main() -> None:
    """Run the `vitlens` command and end the process before Python frees PyTorch's modules, which takes two seconds."""
    code = 1  # after an exception
    os.environ["MPLBACKEND"] = (
        "agg"  # commands write files, and a notebook's backend may be missing here
    )

    def end() -> None:
        for stream in filter(None, (sys.stdout, sys.stderr)):  # None where closed
            stream.flush()
        os._exit(code)

    atexit.register(end)  # functions run in reverse order of registration
    try:
        run()
    except SystemExit as stop:
        code = stop.code or 0
        raise


def command_line() -> typer.Typer:
    """The application with the commands of installed plugins."""
    load_plugins("commands", app)
    return app


def command_line_for(arguments: list[str]) -> typer.Typer:
    """The application for these arguments, without plugins if the first one names a command of this file."""
    own = [command.callback.__name__ for command in app.registered_commands]
    if arguments and arguments[0] in own:
        return app
    return command_line()


def run() -> None:
    """Run the `vitlens` command and raise SystemExit with its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # escape characters that the terminal's encoding lacks
            stream.reconfigure(errors="backslashreplace")
    if not sys.stderr.isatty():
        # seconds between the updates of a progress bar in a file
        os.environ.setdefault("TQDM_MININTERVAL", "60")
    arguments = sys.argv[1:] or ["--help"]
    stopped = "stopped."
    signals: list[int] = []
    try:
        with launcher.terminable() as signals:
            command = command_line_for(arguments)
            code = command(arguments, prog_name="vitlens", standalone_mode=False)
    except WrongCommandLine as error:
        path = error.ctx.command_path if error.ctx else "vitlens"
        message = error.format_message().rstrip(".")
        option = getattr(error, "option_name", None)
        advice = ""
        if option and path.endswith(" train"):
            advice = setting_for(option, arguments)
        if advice:
            message = error.message.rstrip(".")  # without options that are spelled similarly
        code = _fail(f"{message}{advice}; see `{path} --help`.")
    except (ValueError, OSError, MemoryError, FloatingPointError, ModuleNotFoundError) as error:
        code = _fail(" ".join(_sentence(error).split()))
    except Stopped as stop:
        code = 130
        stopped = str(stop)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except RuntimeError as error:
        from vitlens.recorder.memory import is_out_of_memory

        if not is_out_of_memory(error):
            raise
        code = _fail("Memory ran out; take smaller batches or images, or --stream them.")
    if code == 130 and signals:  # of several processes, of which any may be the last
        code = 128 + signals[0]
        _fail(launcher.TERMINATED)
    elif code == 130 and launcher.is_first():
        _fail(stopped)
    raise SystemExit(code)


class Stopped(Exception):
    """End of a command by Ctrl-C. The message names the results that are kept."""


PRECISIONS = {
    **dict.fromkeys(("fp16", "half", "float16", "16", "16_mixed"), "fp16"),
    **dict.fromkeys(("bf16", "bfloat16", "bf16_mixed"), "bf16"),
    **dict.fromkeys(("fp32", "float32", "float", "32", "no_amp", "no"), "fp32"),
    **dict.fromkeys(("amp", "use_amp", "autocast", "mixed_precision"), "auto, the default"),
}
"""Precisions of training by the options of other programs, and by the values of such options."""
PRECISION_OPTIONS = ("precision", "mixed_precision", "amp_dtype", "dtype", "torch_dtype")
SYNONYMS = {
    **dict.fromkeys(("b", "bs", "batch", "train_batch_size"), "batch_size"),
    **dict.fromkeys(("learning_rate", "base_lr"), "lr"),
    **dict.fromkeys(("epoch", "num_epochs", "num_train_epochs", "max_epochs"), "epochs"),
    **dict.fromkeys(("max_steps", "num_steps", "iterations"), "steps"),
    **dict.fromkeys(("img_size", "imgsz", "input_size", "resolution"), "image_size"),
    **dict.fromkeys(("gradient_accumulation_steps", "accumulate_grad_batches"), "accumulate"),
    **dict.fromkeys(("grad_accum_steps", "accum_iter"), "accumulate"),
    **dict.fromkeys(("clip_grad", "max_grad_norm", "gradient_clip_val"), "clip"),
    **dict.fromkeys(("wd", "decay"), "weight_decay"),
    **dict.fromkeys(("model_ema_decay", "ema", "ema_decay"), "average"),
    "opt": "optimizer",
    "smoothing": "label_smoothing",
    "torch_compile": "compile",
}
"""Settings of a recipe by the options of other programs."""
OWN_OPTIONS = {
    **dict.fromkeys(("output", "output_dir", "save_dir"), "--out DIRECTORY"),
    **dict.fromkeys(("data_dir", "data_path", "dataset"), "--data FOLDER"),
    **dict.fromkeys(("pretrained", "finetune", "init"), "--model MODEL"),
    **dict.fromkeys(("gpu", "cuda"), "--device cuda"),
    "gpus": "torchrun --nproc-per-node GPUS -m vitlens train",
    "num_workers": "--workers NUMBER",
    "no_compile": "--set compile=off",
}
"""Options of `train`, or commands, by the options of other programs that are not settings of a recipe."""


def setting_for(option: str, words: list[str]) -> str:
    """End of a message about an unknown option of `train`: what to write in its place, or "".

    words: the command line, in which the option has a value or none.
    """
    from dataclasses import fields

    from vitlens.data.augment import Augment
    from vitlens.train.settings import Recipe

    name = option.lstrip("-").replace("-", "_")
    value = value_of(option, words)
    if name in OWN_OPTIONS:
        return f". Write {OWN_OPTIONS[name]}"
    if name in PRECISION_OPTIONS:
        name = value.lower().replace("-", "_") or name
    if name in PRECISIONS:
        return f". Write --set precision={PRECISIONS[name]}"
    setting = SYNONYMS.get(name, name)
    if setting in {field.name for field in fields(Augment)}:
        setting = f"augment.{setting}"
    is_grouped = setting.startswith(("augment.", "model."))
    types = {field.name: field.type for field in fields(Recipe)}
    if not is_grouped and setting not in types:
        return ""
    if not value and types.get(setting) == "bool":
        value = "true"
    return f". Write --set {setting}={value or 'VALUE'}"


def value_of(option: str, words: list[str]) -> str:
    """Value of an option in a command line, as `--lr 0.1` or `--lr=0.1`, or "" if it has none."""
    for word, after in zip(words, [*words[1:], "-"], strict=True):
        name, equals, value = word.partition("=")
        if name != option:
            continue
        if equals:
            return value
        return "" if after.startswith("-") else after
    return ""


def _sentence(error: Exception) -> str:
    """The message of an error, without the number of an error of the operating system."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    if error.filename is None:
        try:
            os.getcwd()
        except FileNotFoundError:
            return "The current folder has been removed. Change to another one, and repeat the command."
        return f"The operating system reports: {error.strerror}."
    from vitlens.files import shortened

    return f"{shortened(error.filename)} cannot be used ({error.strerror}). Give another path."


def _fail(message: str) -> int:
    """Print why the command ends, once for all processes. Returns its exit code."""
    if launcher.reports_error():
        print(f"vitlens: {visible(message)}", file=sys.stderr)
    return 2


def names_in(text: str | tuple) -> tuple[str, ...]:
    """The names in a text such as "a, b, c"."""
    if isinstance(text, tuple):
        return text
    parts = [part.strip() for part in text.split(",")]
    return tuple(part for part in parts if part)


def result_file(path: Path | None) -> Path | None:
    """The file of results, after its folder is made. Raises ValueError for a folder that cannot be written to."""
    if path is not None:
        from vitlens.files import check_file

        check_file(path, "--out")
        path.parent.mkdir(parents=True, exist_ok=True)
    return path


def one_of(names: tuple[str, ...]) -> dict:
    """Arguments of an `Option` that takes one of the names, and suggests similar ones for another value."""

    def known(text: str) -> str:
        try:
            require_known(text, names, "The value")
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        return text

    return {"parser": known, "metavar": f"<{'|'.join(names)}>"}


FILE_OPTIONS = {"dir_okay": False, "writable": True, "callback": result_file}
# Choices of options. Their modules import PyTorch or take time, so these names stand here, and tests compare them.
DEVICES = ("cpu", "cuda", "mps")
BASELINES = ("mean", "blur", "zero")
FORMATS = ("png", "pdf", "svg")
OUTPUTS = ("classes", "independent", "value")

_MODEL = (
    "Name of a timm model, hf:REPOSITORY, open_clip:MODEL/WEIGHTS, torchvision:MODEL, a folder, or "
    "bundled, the model that comes with vitlens."
)
Model = Annotated[str, Argument(help=_MODEL)]
AnyModel = Annotated[
    str | None, Argument(help=f"{_MODEL} It may be left out: bundled is the default.")
]
Images = Annotated[
    list[Path] | None,
    Argument(
        exists=True,
        help="Images or folders of images. By default validation images of a run, or six samples.",
    ),
]
Checkpoint = Annotated[
    Path | None,
    Option(
        exists=True,
        help="File with the weights of the model (.pth, .safetensors, .npz), or a folder with it.",
    ),
]
Head = Annotated[
    str | None,
    Option(
        "--head",
        metavar="NAME",
        help="With --checkpoint: name of its classifier, if it has several, or none for the features.",
    ),
]
Outputs = Annotated[
    str | None,
    Option(
        **one_of(OUTPUTS),
        help="Meaning of the model's outputs: classes that compete, independent labels (multi-label), or values "
        "(regression). By default what the model states.",
    ),
]
Classes = Annotated[
    str,
    Option(
        help="Classes of a model without class names: a file of its class names in order, or the order of the data's "
        "classes in its training: text, natural, case-blind, timm, explorer, "
        "locale or value."
    ),
]
LABELED = "Labeled images: a folder with a subfolder for each class, or {sources}."
Data = Annotated[str, Option(help=LABELED)]
FigureFormat = Annotated[
    str,
    Option(
        "--format",
        **one_of(FORMATS),
        help="Format of the figures. PDF files embed TrueType fonts. SVG files hold text as text.",
    ),
]
Folder = Annotated[Path, Option(file_okay=False, help="Folder for the results.")]
Device = Annotated[str, Option(help="Device to compute on: cpu, cuda, cuda:1 or mps.")]
AnyDevice = Annotated[
    str | None,
    Option(
        help="Device to compute on: cpu, cuda, cuda:1 or mps. By default a GPU if there is one."
    ),
]
Root = Annotated[
    Path | None,
    Option(
        file_okay=False,
        help="Folder of named data sets and of downloads. By default ~/.cache/vitlens.",
    ),
]
ImageKey = Annotated[
    str,
    Option(
        help="Column of the images in tables, or their field in WebDataset samples, if there are several."
    ),
]
LabelKey = Annotated[str, Option(help="Column or field of the labels, such as cls or json.label.")]
Workers = Annotated[
    int | None, Option(min=0, help="Processes that read images. By default one for each core.")
]
Settings = Annotated[
    list[str] | None,
    Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a setting of the recipe, such as lr=0.01. It can be repeated.",
    ),
]


def registered_names() -> dict[str, str]:
    """Names of sources of data and of methods, by the placeholder for them in help texts."""
    from vitlens.attribution import METHODS
    from vitlens.data.sources import source_names

    quick = [name for name, method in METHODS.items() if method.quick]
    others = [name for name, method in METHODS.items() if not method.quick]
    return {
        "{sources}": source_names(),
        "{quick_methods}": ", ".join(quick),
        "{other_methods}": ", ".join(others),
    }


class ListingCommand(TyperCommand):
    """A command that fills the registered names into its help texts when help is printed."""

    def format_help(self, ctx: typer.Context, formatter) -> None:
        for placeholder, names in registered_names().items():
            for parameter in self.params:
                parameter.help = (parameter.help or "").replace(placeholder, names)
        super().format_help(ctx, formatter)


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import in this block without the garbage collector, and exempt the imported objects from it.

    Collecting the objects of PyTorch and timm repeatedly takes seconds.
    """
    first = "torch" not in sys.modules
    gc.disable()
    try:
        yield
    finally:
        if first:
            gc.freeze()
        gc.enable()


def echo(message: str, file: TextIO | None = None) -> None:
    """Print a line above the progress bar, to stderr by default. Only the first of several processes prints."""
    if not launcher.is_first():
        return
    from tqdm import tqdm

    file = file or sys.stderr
    tqdm.write(visible(message), file=file)
    file.flush()


def note(message: str) -> None:
    """Print a note to stderr."""
    echo(f"Note: {message}")


def complaints() -> tuple[list[str], Callable[[str], None]]:
    """List of messages about single images, and a function that prints a new message and adds it."""
    failures: list[str] = []

    def complain(message: str) -> None:
        if message not in failures:
            failures.append(message)
            echo(f"vitlens: {message}")

    return failures, complain


def count_failures(failures: list[str], images: int) -> int:
    """Exit code of a command, 1 if images were left out. They are counted in a line."""
    if failures and images > 1:
        echo(f"vitlens: {len(failures):,} of {images:,} images were left out.")
    return int(bool(failures))


def model_and_images(model: str | None, images: list[Path] | None) -> tuple[str | None, list[Path]]:
    """The model and the images of a command line.

    The model is None, for the bundled one, without arguments or if the first is an image or a folder without a model.
    """
    images = images or []
    if model and not _names_images(Path(model)):
        return model, images
    if model:
        import timm

        from vitlens.models.opening import BUNDLED

        if model == BUNDLED or timm.is_model(model.partition(".")[0]):
            raise typer.BadParameter(
                f"{model} is the name of a model and a folder of images. Write ./{model} for images."
            )
        images = [Path(model), *images]
    note("No model is named, so the bundled one is used.")
    return None, images


def _names_images(path: Path) -> bool:
    """True for an image, and for a folder that holds no model, also not in its folders."""
    from vitlens.images import is_image

    if path.is_dir():
        files = ("config.json", "adapter_config.json", "model.safetensors", "recipe.json")
        patterns = [place + file for file in files for place in ("", "*/")]
        return not any(any(path.glob(pattern)) for pattern in patterns)
    return path.is_file() and is_image(path)


def named_images(paths: list[Path], model: str | None = None) -> list[tuple[str, object]]:
    """(name, source) of each image, also of those in folders. By default images of the run of `model`, or the samples.

    Files with the same name get their whole path as name. A file that is given several times is read once.
    """
    from vitlens.images import image_files, samples
    from vitlens.walk import unique_files

    if not paths:
        images = run_images(Path(model)) if model else []
        return images or list(samples().items())
    files = []
    for path in paths:
        if path.is_dir():
            files += [file for _, file in image_files(path, note)]
        else:
            files.append(path)
    files, repeated = unique_files(files)
    if repeated.left_out:
        note(repeated.sentences())
    count = Counter(file.name for file in files)
    return [(file.name if count[file.name] == 1 else str(file), file) for file in files]


def images_of_data(
    data: str, columns: Columns, root: Path | None
) -> tuple[Collection[tuple[str, object]], dict[str, str]]:
    """(name, source) of each image of --data, and the classes by name: of a folder of images, or what `load` opens.

    In a folder of images the class is the folder around an image, "" at the top.
    """
    from vitlens.data.sources import open_samples
    from vitlens.images import image_files

    folder = Path(data)
    if folder.is_dir() and not any(columns):
        tables = (path for end in ("parquet", "tar") for path in folder.rglob(f"*.{end}"))
        try:
            images = image_files(folder, note)
        except ValueError:
            if not any(tables):
                raise
        else:
            return images, {name: Path(name).parent.name for name, _ in images}
    samples = open_samples(data, "whole", root, columns=columns)
    images = _Stored(samples)
    labels = [samples.class_names[label] for label in list(samples.labels)]
    return images, dict(zip(images.names, labels, strict=True))


class _Stored:
    """(name, function that returns the source) of each image of samples, which are read when they are needed."""

    def __init__(self, samples: Samples):
        self.samples = samples
        self.names = [samples.name(number) for number in range(len(samples))]

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[tuple[str, object]]:
        for number, name in enumerate(self.names):
            yield name, partial(self.samples.source, number)


def _move(bar, read: int, left_out: int) -> None:
    """Move a bar by the images that were read, of all but those that cannot be read."""
    bar.total -= left_out
    bar.update(read)


def _without(
    images: Collection[tuple[str, object]], others: list[tuple[str, object]]
) -> Collection[tuple[str, object]]:
    """The images that are not among others, under any name. A note counts those left out.

    An image with the name of another file has its path as name.
    """
    from vitlens.walk import unique_files

    if isinstance(images, _Stored):
        return images
    files = [source for _, source in others if isinstance(source, Path)]
    known = len(files)
    files, _ = unique_files([*files, *(file for _, file in images)])
    rest = set(files[known:])
    if len(rest) < len(images):
        note(f"{len(images) - len(rest):,} images of --data are also drawn. They count once.")
    return [(name, file) for name, file in images if file in rest]


def run_images(model: Path, count: int = 6) -> list[tuple[str, object]]:
    """(name, image) of some validation images of the run of a model folder, or an empty list without them."""
    import torch

    from vitlens.data import load
    from vitlens.data.imageset import decode
    from vitlens.files import read_text

    try:
        about = json.loads(read_text(model.parent / "data.json"))
        keys = {name: about.get(name, "") for name in ("image_key", "label_key")}
        options = {"size": 8, "stream": True, "workers": 0, "root": about["root"], **keys}
        split = load(about["data"], "valid", **options)
        rows = _of_different_classes(split.labels.tolist())[:count]
        split = split.select_rows(torch.tensor(rows))
        images = []
        for i, label in enumerate(split.labels.tolist()):
            title = f"{split.samples.name(i)}, {split.class_names[label]}"
            images.append((title, decode(split.samples, i)))
    except (OSError, ValueError, KeyError, TypeError):
        return []
    note(f"No image is named, so {len(images)} validation images of {about['data']} are used.")
    return [(title, image) for title, image in images if not isinstance(image, str)]


def _of_different_classes(labels: list[int]) -> list[int]:
    """All rows, the first of every class before the second of any."""
    seen = Counter()
    rounds = []
    for row, label in enumerate(labels):
        rounds.append((seen[label], row))
        seen[label] += 1
    return [row for _, row in sorted(rounds)]


def working_device(name: str | None):
    """The `torch.device` of a name, or None for None. Raises ValueError for a device that does not work."""
    import torch

    try:
        device = None if name is None else torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        kind = name.partition(":")[0]
        meant = "cuda" if kind == "gpu" or kind.isdecimal() else kind
        hint = "" if kind in DEVICES else suggestion(meant, DEVICES[1:])
        if hint:
            raise ValueError(
                f"The device {name!r} is unknown.{hint} It must be one of {', '.join(DEVICES)}."
            ) from error
        reason = str(error).splitlines()[0].rstrip(".")
        raise ValueError(
            f"The device {name!r} does not work here ({reason}). Use --device cpu."
        ) from error
    return device


def print_version(requested: bool) -> None:
    """Print the version and end the command."""
    if requested:
        from vitlens import __version__

        print(f"vitlens {__version__}")
        raise typer.Exit


SHARING = ("train", "evaluate", "inspect")
"""Commands whose images several processes share."""


@app.callback()
def options(
    context: typer.Context,
    version: Annotated[
        bool,
        Option(
            "--version", is_eager=True, callback=print_version, help="Print the version and stop."
        ),
    ] = False,
) -> None:
    """A microscope for Vision Transformers."""
    command = context.invoked_subcommand
    processes = launcher.process_count()
    if processes > 1 and command not in SHARING:
        raise ValueError(
            f"{command} runs in one process, got {processes} (WORLD_SIZE={processes}). Start it without "
            f"torchrun, or unset WORLD_SIZE. Several processes share the images of {', '.join(SHARING)}."
        )


@app.command()
def inspect(
    model: AnyModel = None,
    images: Images = None,
    out: Folder = Path("figures"),
    data: Annotated[
        str,
        Option(
            help="More images, for the statistics of attention only: a folder of images or of tables, or a named data "
            "set. Of divided data, the test split."
        ),
    ] = "",
    root: Root = None,
    image_key: ImageKey = "",
    label_key: LabelKey = "",
    table: Annotated[
        Path | None,
        Option(
            "--csv",
            dir_okay=False,
            help="New file for a row per image, layer and head: mean distance (pixels) and entropy (nats). It is "
            "written after each batch.",
        ),
    ] = None,
    checkpoint: Checkpoint = None,
    head: Head = None,
    beside: Annotated[
        str,
        Option(
            help="Second model, drawn next to the first in the figure beside. A file is a checkpoint of the first."
        ),
    ] = "",
    outputs: Outputs = None,
    figure_format: FigureFormat = "png",
    heads: Annotated[
        bool, Option("--heads", help="Write the contribution of each head to the logit, too.")
    ] = False,
    device: Device = "cpu",
) -> int:
    """Write the figures of "An Image is Worth 16x16 Words" for a model: filters, positions, distance, rollout."""
    with importing():
        from tqdm import tqdm

        import vitlens.report as report
        from vitlens import files
        from vitlens.data.sources import Columns
        from vitlens.models.opening import load_beside, load_vit
        from vitlens.processes import join

    model, images = model_and_images(model, images)
    if model and beside and not checkpoint and Path(model) == Path(beside):
        raise typer.BadParameter(f"Both models are {model}. Name another one after --beside.")
    if beside and table:
        raise typer.BadParameter("--csv holds one model. Run the command again for the other one.")
    failures, complain = complaints()
    world = join(working_device(device))
    more, classes = images_of_data(data, Columns(image_key, label_key), root) if data else ([], {})
    shown = named_images(images, model)
    more = _without(more, shown)
    world.require_same([[name for name, _ in images] for images in (shown, more)], "images")
    writes = world.rank == 0
    if writes:
        files.check_writable(out, "--out")
        result_file(table)
    vits = [load_vit(model, checkpoint=checkpoint, head=head, outputs=outputs)]
    if beside:
        same_head = head if checkpoint else None
        vits.append(load_beside(model, beside, vits[0], head=same_head, outputs=outputs))
    vits = [vit.to(world.device) for vit in vits]
    on_error = complain if len(shown) + len(more) > 1 else None
    inspections = []
    rows = report.HeadTable(table, classes) if table and writes else None
    drawn_only = [name for name, _ in shown] if data and not images else []
    number = len(more) + len(shown) - len(drawn_only)

    def add_rows(statistics) -> None:
        named = statistics[~statistics["image"].isin(drawn_only)]
        if rows and len(named):
            rows.add(named)

    with files.lock(table, "--csv", waits=False) if rows else contextlib.nullcontext():
        for vit in vits:
            hidden = len(more) < 12 or not writes
            with tqdm(total=len(more), unit="image", disable=hidden) as bar:
                try:
                    made = report.inspect(
                        vit,
                        shown,
                        more,
                        on_error=on_error,
                        on_rows=add_rows if table else None,
                        on_batch=partial(_move, bar),
                        world=world,
                    )
                except KeyboardInterrupt:
                    if not (rows and rows.images):
                        raise
                    raise Stopped(
                        f"stopped; {table} holds the rows of {rows.images:,} of {number:,} images."
                    ) from None
            inspections.append(made)
    if not writes:
        return 0
    paths = report.write_inspection(inspections[0], out, figure_format)
    names = [inspection.model for inspection in inspections]
    if beside and names[0] == names[1]:
        names = [str(checkpoint or model or "bundled model"), beside]
    headings = dict(zip(names, inspections, strict=True))
    if beside:
        paths += report.write_beside(headings, out, figure_format)
    if heads:
        added = report.heads(vits[0], shown, on_error=on_error)
        paths += report.write_heads(added, out, figure_format)
    paths += [table] if table else []
    print(*paths, sep="\n")
    for heading, inspection in headings.items():
        print(f"\n{heading}")
        for name, words in inspection.sentences.items():
            print(f"  {name:11}{report.PAPER_FIGURES[name]:15}{words}")
        for words in inspection.notes:
            print(f"  Note: {words}")
    print("\nChapter 14 of the book compares these figures with the paper's claims.")
    return count_failures(failures, number)


@app.command(cls=ListingCommand)
def explain(
    model: AnyModel = None,
    images: Images = None,
    target: Annotated[
        str, Option(help="Class to explain, a number or a name. By default the predicted class.")
    ] = "",
    against: Annotated[
        str,
        Option(
            help="Contrast the target with this class, with --like this image, or with --text this text."
        ),
    ] = "",
    like: Annotated[
        list[Path] | None,
        Option(
            exists=True,
            dir_okay=False,
            help="Explain the similarity to this image. Repeated: to several images.",
        ),
    ] = None,
    text: Annotated[
        list[str] | None,
        Option(
            help="Explain the similarity to this text. Given twice: the contrast of the first with the second."
        ),
    ] = None,
    methods: Annotated[
        tuple,
        Option(
            parser=names_in,
            metavar="NAMES",
            help="Methods. By default {quick_methods}. The others are {other_methods}.",
        ),
    ] = (),
    out: Folder = Path("explanations"),
    scores: Annotated[
        bool,
        Option(
            "--scores",
            help="Score each map by insertion and deletion, in about 400 forwards an image.",
        ),
    ] = False,
    baseline: Annotated[
        str | None,
        Option(
            **one_of(BASELINES),
            help="With --scores: replacement of covered patches. By default mean, the mean color.",
        ),
    ] = None,
    orders: Annotated[
        int | None,
        Option(
            min=0, help="With --scores: number of random orders. By default 8. Fewer give no σ."
        ),
    ] = None,
    checkpoint: Checkpoint = None,
    head: Head = None,
    outputs: Outputs = None,
    figure_format: FigureFormat = "png",
    device: Device = "cpu",
) -> int:
    """Explain a class, or the similarity to an image or a text: a map by each method, and its scores with --scores."""
    with importing():
        from tqdm import tqdm

        import vitlens.report as report
        from vitlens import attribution, files
        from vitlens.files import check_writable
        from vitlens.images import Remarks
        from vitlens.models.opening import load_vit

    options = {"orders": orders, "baseline": baseline}
    options = {name: value for name, value in options.items() if value is not None}
    if options and not scores:
        raise typer.BadParameter(f"Give --{' and --'.join(options)} only with --scores.")
    failures, complain = complaints()
    model, images = model_and_images(model, images)
    shown = named_images(images, model)
    check_writable(out, "--out")
    parts = len(attribution.methods(methods or None))
    goal, contrast = _targets(target, against, like or [], text or [])
    torch_device = working_device(device)
    if scores:
        report.check_folder(out, ["scores.csv"])
    had_scores = (out / "scores.csv").exists()
    vit = load_vit(model, checkpoint=checkpoint, head=head, outputs=outputs)
    vit = vit.to(torch_device)
    explained, scored = [], []
    current = []  # the explanation that is written

    def collecting(explanations: Iterator, done: list) -> Iterator:
        """The explanations. Each is added to `done` after it is written, when the next one is requested."""
        for explanation in explanations:
            current[:] = [explanation]
            yield explanation
            done.append(explanation)

    def on_forwards(number: int, total: int) -> None:
        bar.total = len(explained) * total
        bar.update(len(scored) * total + number - bar.n)

    out.mkdir(parents=True, exist_ok=True)
    writing = contextlib.ExitStack()
    try:
        # until the end, because the table replaces that of an earlier run
        writing.enter_context(files.lock(out / "scores.csv", "--out", waits=False))
        with tqdm(total=len(shown) * parts, unit="map", delay=1) as bar:
            remarks = Remarks(lambda words: echo(f"Note: {words}", sys.stdout))
            made = report.explain(
                vit,
                shown,
                goal,
                against=contrast,
                names=methods or None,
                on_error=complain if len(shown) > 1 else None,
                on_part=lambda _: bar.update(),
                on_note=remarks,
            )
            for path in report.write_explanations(collecting(made, explained), out, figure_format):
                echo(str(path), sys.stdout)
                echo(f"  {current[-1].sentence}", sys.stdout)
            remarks.total(len(explained))
        if had_scores and not scores and not (out / "scores.csv").exists():
            note(f"removed scores.csv, which an earlier run left in {out}.")
        if scores:
            with tqdm(unit="forward", delay=1) as bar:
                made = report.score(vit, explained, on_forwards=on_forwards, **options)
                for path in report.write_explanations(collecting(made, scored), out, figure_format):
                    if path.suffix == ".csv":  # the paths of the figures are printed above
                        echo(str(path), sys.stdout)
    except KeyboardInterrupt:
        if not explained:
            raise
        results = f"the maps of {len(explained)} of {len(shown)} images"
        if scored:
            results += " and the scores so far"
        raise Stopped(f"stopped; {results} are in {out}.") from None
    finally:
        writing.close()
        files.remove_folder(out)
    return count_failures(failures, len(shown))


def _targets(target: str, against: str, like: list[Path], text: list[str]) -> tuple[object, object]:
    """target and against of `report.explain`."""
    from vitlens.attribution import target as targets

    if bool(target) + bool(like) + bool(text) > 1:
        raise typer.BadParameter("Give only one of --target, --like and --text.")
    if len(text) + bool(text and against) > 2:
        raise typer.BadParameter("A contrast is between two texts, got more. Give --text twice.")
    if text:
        goal, *others = [targets.text(each) for each in text]
        if against:
            others = [targets.text(against)]
        return goal, others[0] if others else None
    if like:
        from vitlens.images import load_image

        for path in (*like, *filter(None, [against])):
            load_image(path, on_note=note)
        goal = targets.like(like)
        return goal, targets.like(Path(against)) if against else None
    return target or None, against or None


@app.command(cls=ListingCommand)
def train(
    recipe: Annotated[
        str, Option(help="Name of a recipe (see --list), or a JSON file. Required for a new run.")
    ] = "",
    data: Annotated[str, Option(help=f"{LABELED} Required for a new run.")] = "",
    root: Root = None,
    stream: Annotated[
        bool | None,
        Option(
            "--stream/--hold",
            help="Read images while training, or hold them in memory. By default, hold what fits.",
        ),
    ] = None,
    workers: Workers = None,
    image_key: ImageKey = "",
    label_key: LabelKey = "",
    out: Annotated[
        Path | None,
        Option(
            file_okay=False, help="Folder for the log, the checkpoints and the model. Required."
        ),
    ] = None,
    model: Annotated[
        str,
        Option(
            help="Trained model to start from: bundled, a timm name or a folder. By default random weights."
        ),
    ] = "",
    resume: Annotated[
        bool,
        Option(
            "--resume",
            help="Continue the run in --out. Its recipe, data and settings need not be repeated.",
        ),
    ] = False,
    max_minutes: Annotated[
        float | None, Option(help="Stop after this time with a checkpoint.")
    ] = None,
    settings: Settings = None,
    device: AnyDevice = None,
    seed: Annotated[
        int | None, Option(help="Seed of all randomness. By default the recipe's.")
    ] = None,
    deterministic: Annotated[
        bool,
        Option("--deterministic", help="Make repeated runs on CUDA bit-identical, at lower speed."),
    ] = False,
    watch: Annotated[
        int, Option(min=0, help="Number of snapshots of the inspection figures, 0 for none.")
    ] = 24,
    export: Annotated[
        bool, Option("--export", help="Write OUT/model also if the run is stopped.")
    ] = False,
    tiny: Annotated[
        bool,
        Option("--tiny", help="Try the run out in seconds: a small model, 256 images, 2 epochs."),
    ] = False,
    list_recipes: Annotated[
        bool,
        Option("--list", help="List the recipes, or with --recipe the settings of one, and stop."),
    ] = False,
) -> int:
    """Train a Vision Transformer by a recipe, with snapshots of its attention, and save it in timm's hub layout."""
    from vitlens.train.recipes import RECIPES
    from vitlens.train.runs import read_recipe, run

    settings = settings or []
    if list_recipes and recipe:
        _print_settings(read_recipe(recipe).override(*settings))
        return 0
    if list_recipes:
        for row in RECIPES.values():
            print(_recipe_line(row))
        return 0
    needed = {"recipe": recipe, "data": data, "out": out}
    if resume:
        needed = {"out": out}
    for name, value in needed.items():
        if not value:
            raise typer.BadParameter(f"Training needs --{name}.")
    working_device(device)
    if deterministic:
        settings = [*settings, "deterministic=true"]
    account = run(
        recipe,
        data,
        out,
        model=model,
        resume=resume,
        max_minutes=max_minutes,
        overrides=settings,
        device=device,
        seed=seed,
        export=export,
        tiny=tiny,
        watch=watch,
        root=root,
        stream=stream,
        workers=workers,
        image_key=image_key,
        label_key=label_key,
    )
    signal = account["stopped_by"]
    return 128 + signal if signal else 0


def _print_settings(recipe) -> None:
    """Print a line for each setting of a recipe."""
    for key, value, meaning in recipe.describe():
        if isinstance(value, tuple):
            value = ",".join(map(str, value))
        setting = f"{key}={value}"
        print(f"{setting:<36} {meaning}")


def _recipe_line(recipe) -> str:
    """Summary of a recipe in a line."""
    model = (
        f"patch {recipe.patch_size}, width {recipe.width}, depth {recipe.depth}, "
        f"{recipe.heads} heads"
    )
    if recipe.continues:
        model = "your --model"
    length = f"{recipe.epochs} epochs" if recipe.epochs else f"{recipe.steps:,} steps"
    return (
        f"{recipe.name}: {model}, {recipe.image_size} px, {length} of "
        f"{recipe.batch_size} images, {recipe.optimizer}"
    )
