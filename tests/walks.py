"""The files that common calls pass through, found by tracing the calls of functions.

A way turns back if a function calls one in a file that already waits, further down, for the result of another file.
Methods that PyTorch or Python call by themselves, such as `__torch_function__`, do not count as turning back.
"""

import contextlib
import io
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType

import torch

from vitlens import attribution, cli, data, load_model, preprocess, samples, train
from vitlens_explorer.explorer import Explorer
from vitlens_explorer.lanes import never_cancel

ROOT = Path(__file__).parent.parent


class Trace:
    """The files of the packages that calls enter, in order, and the calls that turn back."""

    def __init__(self):
        self.files: dict[str, None] = {}
        self.turns: dict[str, None] = {}

    def __call__(self, frame: FrameType, event: str, _) -> None:
        if event != "call" or not self.place(frame.f_code) or frame.f_code.co_name == "<module>":
            return
        place = self.place(frame.f_code)
        self.files[place] = None
        waiting = self.waiting(frame.f_back)
        name = frame.f_code.co_name
        if not waiting or waiting[0][0] == place or name.startswith("__"):
            return
        if place in [file for file, _ in waiting]:
            file, function = waiting[0]
            self.turns[f"{file} {function} → {place} {name}"] = None

    def waiting(self, frame: FrameType | None) -> list[tuple[str, str]]:
        """(file, function) of the frames of the packages below, innermost first."""
        found = []
        while frame is not None:
            if place := self.place(frame.f_code):
                found.append((place, frame.f_code.co_name))
            frame = frame.f_back
        return found

    @staticmethod
    def place(code: CodeType) -> str | None:
        """The file of a function, relative to the repository, or None outside of the packages."""
        path = Path(code.co_filename)
        parts = path.parts[len(ROOT.parts) :]
        if path.parts[: len(ROOT.parts)] != ROOT.parts or not parts[0].startswith("vitlens"):
            return None
        return "/".join(parts)


@contextlib.contextmanager
def traced(trace: Trace):
    sys.setprofile(trace)
    try:
        yield
    finally:
        sys.setprofile(None)


def inspect(trace: Trace) -> None:
    photo = Path(tempfile.mkdtemp()) / "cat.png"
    samples()["chelsea"].save(photo)
    arguments = sys.argv
    sys.argv = ["vitlens", "inspect", str(photo), "--out", str(photo.parent / "figures")]
    silent = io.StringIO()
    redirected = contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent)
    with redirected[0], redirected[1], contextlib.suppress(SystemExit), traced(trace):
        cli.run()
    sys.argv = arguments


def click(trace: Trace) -> None:
    page = Explorer(load_model(), samples()["chelsea"])
    page.first(never_cancel)
    message = {"pick": True, "row": 3, "column": 4}
    with traced(trace):
        page.answer([(message, [])], never_cancel)


def training_step(trace: Trace) -> None:
    recipe = train.recipe("digits").tiny()
    images = tuple(data.load("digits", split, size=8) for split in ("train", "valid"))
    steps = train.fit(recipe.build(), images, recipe, device="cpu")
    for _ in range(6):
        next(steps)
    with traced(trace):
        next(steps)
    steps.close()


def relevance(trace: Trace) -> None:
    model = load_model()
    images = preprocess(model, samples()["chelsea"])
    with traced(trace):
        attribution.relevance(model, images, 0)


def opening_transformers(trace: Trace) -> None:
    import transformers

    folder = tempfile.mkdtemp()
    small = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    transformers.ViTForImageClassification(small).save_pretrained(folder)
    transformers.ViTImageProcessor().save_pretrained(folder)
    with traced(trace):
        load_model(f"hf:{folder}")


WALKS: dict[str, Callable[[Trace], None]] = {
    "vitlens inspect cat.png": inspect,
    "a click in the explorer": click,
    "a training step": training_step,
    "attribution.relevance": relevance,
    "opening a transformers model": opening_transformers,
}


def walk(name: str) -> tuple[list[str], list[str]]:
    """The files that a call enters, and the calls by which it turns back."""
    trace = Trace()
    torch.manual_seed(0)
    WALKS[name](trace)
    return list(trace.files), list(trace.turns)
