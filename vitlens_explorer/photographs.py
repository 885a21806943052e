"""Photographs as model inputs, with a cached forward each, so that a click only indexes and redraws."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from PIL import Image
from torch import nn

from vitlens import tokens
from vitlens.images import load_image, samples
from vitlens.models import (
    built_size,
    class_count,
    label_names,
    output_kind,
    preprocess,
    restore,
    scores,
    title,
)
from vitlens.recorder.forward import eval_mode, require_finite
from vitlens.recorder.intervention import intervene
from vitlens.recorder.record import capture
from vitlens.recorder.supported import family, read_tokens, unwrap
from vitlens_explorer.drawing import enlarged_png
from vitlens_explorer.page import MAPS, Control, Page
from vitlens_explorer.words import number, percent

GIVEN, FIRST = "the image given", "chelsea"
EYE = 0.37, 0.33
"""(y, x) of an eye of the first photograph, as shares of its middle square."""
READOUT, PATCH = "readout", "patch"
OPACITIES = ("by value", "value"), ("uniform", "even")
PAINTING, MORE = "Appearance", "More"
"""Names of the closed groups of controls."""
PAINT = {
    "strength": 0.75,
    "opacity": "value",
    "colors": "",
    "stretch": False,
    "smooth": True,
    "lines": False,
}
LIKELIEST = 10
"""Number of classes that the menus offer."""
KEPT = 256 * 2**20
"""Largest number of bytes of uploads and captures of a page. The two latest captures are always kept."""
_ELONGATION = 16  # largest aspect ratio of the grid for a whole image


@dataclass(frozen=True, eq=False)
class Photograph:
    """An image with the notes of `load_image`, or "". number: unique."""

    image: Image.Image
    note: str = ""
    uploaded: bool = False
    number: int = field(default_factory=itertools.count().__next__)

    @classmethod
    def read(cls, source, uploaded: bool = False) -> Photograph:
        """Read an image with `load_image`. Raises ImageError for other files."""
        notes: list[str] = []
        return cls(load_image(source, on_note=notes.append), " ".join(notes), uploaded)


@functools.cache
def sample_photographs() -> dict[str, Photograph]:
    """The sample photographs by name, the first one first, opened once for all pages."""
    images = samples()
    return {
        name: Photograph(images[name]) for name in sorted(images, key=lambda name: name != FIRST)
    }


class Forward:
    """One forward of a model on a photograph.

    batch: (1, C, H, W), the model's input. pixels: (H, W, 3) uint8, the input as an image. attn: captured layers.
    heads: number of heads in a layer. tokens: one (1, T, D) per layer. classes: number of classes, 0 without a
    classifier head. likeliest: numbers of the most probable classes. off: replacements of the switched-off heads for
    `intervene`. key: equal for equal weights, photographs, sizes and switches.
    """

    def __init__(
        self,
        model: nn.Module,
        image: Image.Image,
        size: tuple[int, int] | None,
        whole: bool = False,
        off: dict | None = None,
        key: tuple = (),
    ):
        self.model, self.off, self.key = model, off or {}, key
        batch = preprocess(model, image, size=size or built_size(model), whole=whole)
        self.pixels = restore(model, batch)[0]
        self.batch = batch.to(next(model.parameters()))
        with eval_mode(model), self.switched(), torch.inference_mode(), capture(model) as attn:
            self.tokens, logits = tokens.features(model, self.batch)
        require_finite(model, logits)
        self.attn, self.grid, self.gated, self.heads = (
            [*attn],
            attn.grid,
            attn.gated,
            attn[0].q.shape[1],
        )
        classed = (
            class_count(model) != 0 and logits.dim() == 2
        )  # without pooling, logits have a row for each token
        self.classes = logits.shape[-1] if classed else 0
        self.logits = logits[0].float().cpu()
        self.names, self._shares = label_names(model, logits.shape[-1]), scores(model, self.logits)
        self.labels = short(tuple(self.names or ()))
        self.likeliest = (
            self._shares.topk(min(LIKELIEST, self.classes)).indices.tolist() if classed else []
        )
        self.prefix, self.name, self.outputs = (
            family(model).prefix,
            title(model),
            output_kind(model),
        )
        self.written: dict[tuple, tuple] = {}  # contributions by (target, contrast)

    def switched(self) -> contextlib.AbstractContextManager[None]:
        """Context with the same heads switched off, in this thread."""
        return intervene(self.model, heads=self.off) if self.off else contextlib.nullcontext()

    def label(self, number: int) -> str:
        """Short name of a class, or its number."""
        return self.labels[number] if self.labels else str(number)

    def full(self, number: int) -> str:
        """Name of a class with all synonyms, or its number."""
        return self.names[number] if self.names else str(number)

    def share(self, number: int) -> float:
        """Probability of a class, or its value if `outputs` is "value"."""
        return self._shares[number].item()

    def score_words(self, score: float) -> str:
        """A probability in percent, such as "12%" or "< 0.5%", or a value with three significant digits."""
        return number(score) if self.outputs == "value" else percent(score)

    @property
    def bytes(self) -> int:
        """Bytes of the capture and the tokens."""
        held = [t for layer in self.attn for t in (layer.q, layer.k, layer.mask) if t is not None]
        return sum(t.numel() * t.element_size() for t in (*held, *self.tokens))

    @functools.cached_property
    def png(self) -> bytes:
        """The model's input as a PNG file for the browser."""
        return enlarged_png(self.pixels)

    @functools.cached_property
    def readout(self) -> str:
        """Name of the classifier head's input."""
        if self.grid.readout is None:
            return "no sum of tokens"
        if self.grid.readout.dim() == 2:
            return "what the attention pool reads"
        _, names = read_tokens(self.grid, self.prefix)
        return " and ".join(names) if names[0] in self.prefix else f"the {names[0]}"


@functools.lru_cache(4)
def short(names: tuple[str, ...]) -> list[str]:
    """The first synonym of each name, such as "tabby" of "tabby, tabby cat", unless another name has it, too."""
    synonyms = Counter(
        part for name in names for part in {each.strip() for each in name.split(",")}
    )
    first = [name.split(",")[0].strip() for name in names]
    return [
        begin if synonyms[begin] == 1 else name for begin, name in zip(first, names, strict=True)
    ]


def size_for(model: nn.Module, photograph: Photograph) -> tuple[int, int] | None:
    """(height, width) in pixels for a whole photograph in its aspect ratio, with about the model's number of patches.
    None if the model takes one size only."""
    about = family(unwrap(model))
    height, width = about.built_size or about.preprocessing["input_size"][1:]
    patch = about.grid((height, width)).patch
    try:
        about.grid((height + patch[0], width))
    except ValueError:
        return None
    across, down = photograph.image.size
    shape = float(np.clip(down / across, 1 / _ELONGATION, _ELONGATION)) ** 0.5
    area = (height * width) ** 0.5
    return tuple(
        max(1, round(side / p)) * p
        for side, p in zip((area * shape, area / shape), patch, strict=True)
    )


def weights(model: nn.Module) -> tuple:
    """Identity and version of all parameters and buffers. In-place changes such as optimizer steps raise the version,
    changes through `.data` do not."""
    tensors = [*model.parameters(), *model.buffers()]
    return tuple((id(t), t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors)


def name_of(image) -> str:
    """File name of an argument of `load_image`, or GIVEN."""
    path = image if isinstance(image, str | os.PathLike) else getattr(image, "filename", "")
    return os.path.basename(path) or GIVEN


class Pictured(Page):
    """A page with photographs and a query. Its state has `photographs` by name, `photograph`, `query`, `row` and
    `column`.

    others: further models. size: (height, width) of the input in pixels. more: photographs in addition to the samples,
    by name.
    """

    plain = frozenset(("query", "row", "column", *PAINT))

    def __init__(
        self,
        model: nn.Module,
        image,
        *others: nn.Module,
        size: tuple[int, int] | None = None,
        more: dict[str, Photograph] | None = None,
        **state,
    ):
        self.model, self.size = unwrap(model), size
        self.models = [self.model, *map(unwrap, others)]
        given = {} if image is None else {name_of(image): Photograph.read(image)}
        photographs = given | sample_photographs() | (more or {})
        super().__init__(photographs=photographs, photograph=next(iter(photographs)), **state)
        self._forwards: OrderedDict[tuple, Forward] = OrderedDict()
        self._weights = {id(model): weights(model) for model in self.models}
        grids = [self.forward_of(model, self.photograph, size=size).grid for model in self.models]
        patch = self.state["photograph"] == FIRST or any(grid.readout is None for grid in grids)
        y, x = EYE if self.state["photograph"] == FIRST else (0.5, 0.5)
        place = {"row": int(y * grids[0].rows), "column": int(x * grids[0].cols)}
        self.state = self.state | {"query": PATCH if patch else READOUT} | place

    @property
    def photographs(self) -> dict[str, Photograph]:
        return self.state["photographs"]

    @property
    def photograph(self) -> Photograph:
        """The current photograph."""
        return self.photographs[self.state["photograph"]]

    @property
    def forward(self) -> Forward:
        """Forward of the current photograph."""
        return self.forward_of(self.model, self.photograph, size=self.size)

    def forward_of(
        self,
        model: nn.Module,
        photograph: Photograph,
        *,
        size: tuple[int, int] | None = None,
        whole: bool = False,
        off: tuple = (),
        values: Callable[[], dict] = dict,
    ) -> Forward:
        """Cached forward of a model on a photograph, computed if missing. off: switched-off heads. values(): their
        outputs."""
        key = (id(model), self._weights[id(model)], photograph.number, size, whole, off)
        if key not in self._forwards:
            self._forwards[key] = Forward(model, photograph.image, size, whole, values(), key)
            self._forget()
        self._forwards.move_to_end(key)
        return self._forwards[key]

    def _forget(self) -> None:
        """Drop the oldest captures, and then the oldest uploads, while they hold more than `KEPT` bytes."""
        shown = (self.state["photograph"], self.state.get("other"))
        uploads = {
            name: np.prod((3, *p.image.size)) for name, p in self.photographs.items() if p.uploaded
        }
        hidden = [name for name in uploads if name not in shown]  # the newest first

        def full() -> bool:
            return (
                sum(uploads.values()) + sum(forward.bytes for forward in self._forwards.values())
                > KEPT
            )

        while full() and len(self._forwards) > 2:
            self._forwards.popitem(last=False)
        while full() and hidden:
            del uploads[name := hidden.pop()]
            self.state = self.state | {
                "photographs": {k: v for k, v in self.photographs.items() if k != name}
            }

    def answer(self, messages, check):
        self._weights = {id(model): weights(model) for model in self.models}
        return super().answer(messages, check)

    def menus(self):
        return super().menus(), self.forward.key

    def take(self, content, buffers):
        if "upload" in content:
            (file := io.BytesIO(buffers[0])).name = name = str(content["upload"])
            uploaded = {name: Photograph.read(file, uploaded=True)}
            others = {
                other: photograph for other, photograph in self.photographs.items() if other != name
            }
            self.state = self.state | {"photographs": uploaded | others, "photograph": name}
        else:
            super().take(content, buffers)

    def change(self, **values):
        if {"row", "column"} & values.keys() and "query" not in values:
            values["query"] = PATCH
        super().change(**values)

    def fit(self, forward: Forward) -> None:
        """Clip row and column to the grid."""
        row, col = (
            min(self.state["row"], forward.grid.rows - 1),
            min(self.state["column"], forward.grid.cols - 1),
        )
        self.state = self.state | {"row": row, "column": col}

    @property
    def query(self) -> str | int | tuple[int, int]:
        """READOUT, the position of a prefix token, or (row, column) of a patch."""
        return (
            (self.state["row"], self.state["column"])
            if self.state["query"] == PATCH
            else self.state["query"]
        )

    def photograph_control(self, label: str = "Photo") -> Control:
        names = tuple((name, name) for name in self.photographs)
        return Control("photograph", label, "select", self.state["photograph"], names)

    def query_controls(
        self, forward: Forward, hidden: bool = False, readable: bool = True
    ) -> list[Control]:
        grid, state = forward.grid, self.state
        readable = readable and grid.readout is not None
        queries = [(f"{forward.readout} (read-out)", READOUT)] if readable else []
        queries += [
            (n, i) for i, n in enumerate(forward.prefix) if not (readable and n == forward.readout)
        ]
        more = {"hidden": hidden, "place": MORE}
        return [
            Control(
                "query", "Query", "select", state["query"], (*queries, ("patch", PATCH)), **more
            ),
            Control("row", "Row", "range", state["row"], high=grid.rows - 1, **more),
            Control("column", "Column", "range", state["column"], high=grid.cols - 1, **more),
        ]

    def tiles(self, forward: Forward, shares: Sequence[float] = ()) -> tuple[dict, ...]:
        """Tiles of the queries besides patches, for a panel. shares: weight of each prefix token."""
        readable, tiles = forward.grid.readout is not None, []
        for position, name in enumerate(forward.prefix):
            read = readable and name == forward.readout
            share = percent(shares[position]) if len(shares) else ""
            tiles.append({"query": READOUT if read else position, "name": name, "share": share})
        if readable and forward.readout not in forward.prefix:
            tiles.insert(0, {"query": READOUT, "name": forward.readout, "share": ""})
        return tuple(tile | {"now": tile["query"] == self.state["query"]} for tile in tiles)

    def layer_control(
        self, forward: Forward, name: str = "layer", label: str = "Layer", **more
    ) -> Control:
        return Control(name, label, "range", self.state[name], high=len(forward.attn) - 1, **more)

    def paint_controls(self, colored: bool = False) -> list[Control]:
        """Controls of colors and opacity. colored: True for RGB values."""
        state = self.state
        maps = (("auto", ""), *((name, name) for name in MAPS))
        return [
            Control(
                "strength",
                "Overlay strength",
                "range",
                state["strength"],
                high=1,
                step=0.05,
                place=PAINTING,
            ),
            Control(
                "opacity",
                "Opacity",
                "select",
                state["opacity"],
                OPACITIES,
                disabled=colored,
                place=PAINTING,
            ),
            Control(
                "colors",
                "Color map",
                "select",
                state["colors"],
                maps,
                disabled=colored,
                place=PAINTING,
            ),
            Control(
                "stretch",
                "Start the color scale at the minimum",
                "check",
                state["stretch"],
                disabled=colored,
                place=PAINTING,
            ),
            Control("smooth", "Interpolate", "check", state["smooth"], place=PAINTING),
            Control("lines", "Patch grid", "check", state["lines"], place=PAINTING),
        ]
