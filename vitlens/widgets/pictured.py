"""What widgets with a photograph share: choosing or uploading one, and the query that maps start from."""

from __future__ import annotations

import io
from contextlib import suppress
from dataclasses import dataclass, field

from PIL import Image
from torch import nn

from vitlens.images import samples
from vitlens.widgets.paint import MAPS
from vitlens.widgets.stage import Control, Stage
from vitlens.widgets.subjects import Photograph, Subject, subject
from vitlens.widgets.views import READOUT, View, readout_words

GIVEN, UPLOADED, EARLIER = "the picture given", "your picture", "your earlier picture"
PATCH = "patch"
OPACITIES = ("by value", "value"), ("even", "even")
LARGEST = 64 * 2**20
"""Largest upload, in bytes."""
PAINT = {"strength": 0.75, "opacity": "value", "colors": "", "stretch": False, "smooth": True, "lines": False}


@dataclass
class Coming:
    """An upload that arrives in parts. number: of the upload; later ones have greater numbers. parts: bytes by offset.
    answers: the greatest number of a message with a part of it."""

    number: int = 0
    parts: dict[int, bytes] = field(default_factory=dict)
    answers: int = 0


class Pictured(Stage):
    """A stage with photographs and a query. Its state has `photograph`, `query`, `row` and `column`.

    others: models to show beside the first. size: (height, width) in pixels to show photographs at. more: photographs
    besides the samples, by name.
    """

    keeps = ("state", "photographs")

    def __init__(
        self, model: nn.Module, image, *others: nn.Module, size: tuple[int, int] | None = None,
        more: dict[str, Photograph] | None = None, **state,
    ):  # fmt: skip
        self.model, self.size = model, size
        self.photographs = {name: Photograph(each) for name, each in samples().items()} | (more or {})
        self._coming = Coming()
        if image is not None:
            self.photographs = {GIVEN: Photograph.read(image), **self.photographs}
        name = next(iter(self.photographs))
        grids = [subject(each, self.photographs[name], size=size).grid for each in (model, *others)]
        grid, query = grids[0], PATCH if any(each.readout is None for each in grids) else READOUT
        super().__init__(photograph=name, query=query, row=grid.rows // 2, column=grid.cols // 2, **state)

    @property
    def subject(self) -> Subject:
        """The photograph as the model saw it. Not kept here, so that forgotten widgets hold no captures."""
        return subject(self.model, self.photograph, size=self.size)

    @property
    def photograph(self) -> Photograph:
        """The photograph that is shown."""
        return self.photographs[self.state["photograph"]]

    def _receive(self, page, content, buffers):
        """Collect the parts of an upload, messages {"upload": name, "file": number, "at": offset, "of": size}, confirm
        each, and handle the complete file as one message. A later upload replaces an unfinished one."""
        if "at" not in content:
            return super()._receive(page, content, buffers)
        number, size, data, problem = content["file"], content["of"], bytes(buffers[0]), ""
        with self._turn:
            if number > self._coming.number:
                self._coming = Coming(number)
            if number < self._coming.number:
                problem = "was replaced by a later upload."
            elif size > LARGEST:
                problem = f"is larger than the {LARGEST >> 20} MB that can be uploaded. Make it smaller."
            else:
                parts = self._coming.parts
                parts[content["at"]] = data
                self._coming.answers = max(self._coming.answers, content.get("number", 0))
                come = sum(map(len, parts.values()))
                if complete := come >= size:
                    file = b"".join(parts[start] for start in sorted(parts))
                    parts.clear()
        if problem:
            self.send({"file": number, "problem": f"{content['upload']} {problem}"})
            return None
        self.send({"file": number, "received": come})
        if complete:
            super()._receive(page, {"upload": content["upload"], "number": self._coming.answers}, [file])

    def take(self, content, buffers):
        if "upload" in content:
            return self.upload(str(content["upload"]), bytes(buffers[0]))
        said = super().take(content, buffers)
        asked = content.get("set", {}).keys()
        if {"row", "column"} & asked and "query" not in asked:
            self.state = self.state | {"query": PATCH}
        return said

    def upload(self, name: str, data: bytes) -> str:
        """Show the image in a file, and keep the one before it; returns a note about it, or "". Raises ImageError if it
        is none."""
        (file := io.BytesIO(data)).name = name
        uploaded = Photograph.read(file)
        frames = 1
        with suppress(Exception), Image.open(file) as opened:  # it was read: what else the file holds matters little
            frames = getattr(opened, "n_frames", 1) if opened.format != "MPO" else 1  # previews of phones
        before = self.photographs
        mine = {UPLOADED: uploaded} | ({EARLIER: before[UPLOADED]} if UPLOADED in before else {})
        self.photographs = mine | {name: each for name, each in before.items() if name not in (UPLOADED, EARLIER)}
        self.state = self.state | {"photograph": UPLOADED}
        return f"{name} holds {frames} pictures; the first is shown." if frames > 1 else ""

    def look_from(self, row: int, col: int) -> None:
        """Make a patch the query. Raises ValueError outside the grid."""
        self.change(row=int(row), column=int(col))
        self.state = self.state | {"query": PATCH}

    def fit(self, subject: Subject) -> None:
        """Move row and column into a grid that may have become smaller."""
        row, col = min(self.state["row"], subject.grid.rows - 1), min(self.state["column"], subject.grid.cols - 1)
        self.state = self.state | {"row": row, "column": col}

    @property
    def query(self) -> str | int | tuple[int, int]:
        """READOUT, the position of a prefix token, or (row, column) of a patch."""
        return (self.state["row"], self.state["column"]) if self.state["query"] == PATCH else self.state["query"]

    def photograph_control(self) -> Control:
        names = tuple((name, name) for name in self.photographs)
        return Control("photograph", "Photograph", "select", self.state["photograph"], names)

    def query_controls(self, subject: Subject, disabled: bool = False, readable: bool = True) -> list[Control]:
        grid, state = subject.grid, self.state
        readable = readable and grid.readout is not None
        queries = [(f"read-out: {readout_words(subject)}", READOUT)] if readable else []
        queries += [(n, i) for i, n in enumerate(subject.prefix) if not (readable and n == readout_words(subject))]
        return [
            Control("query", "Query", "select", state["query"], (*queries, ("patch", PATCH)), disabled=disabled),
            Control("row", "Row", "number", state["row"], high=grid.rows - 1, disabled=disabled),
            Control("column", "Column", "number", state["column"], high=grid.cols - 1, disabled=disabled),
        ]

    def layer_control(self, subject: Subject, name: str = "layer", label: str = "Layer") -> Control:
        return Control(name, label, "range", self.state[name], high=len(subject.attn) - 1)

    def head_control(self, subject: Subject, view: View, name: str = "head", label: str = "Head") -> Control:
        choices = view.heads(subject.attn[0].q.shape[1])
        return Control(name, label, "range", view.fitted(self.state[name]), choices, disabled=not view.head)

    def paint_controls(self, view: str = "") -> list[Control]:
        state, plain = self.state, view == "components"  # its values are colors themselves
        maps = (("automatic", ""), *((name, name) for name in MAPS))
        return [
            Control("strength", "Strength", "range", state["strength"], high=1, step=0.05),
            Control("opacity", "Opacity", "select", state["opacity"], OPACITIES, disabled=plain),
            Control("colors", "Colors", "select", state["colors"], maps, disabled=plain),
            Control("stretch", "Colors from the least value", "check", state["stretch"], disabled=plain),
            Control("smooth", "Smooth", "check", state["smooth"]),
            Control("lines", "Patch grid", "check", state["lines"]),
        ]
