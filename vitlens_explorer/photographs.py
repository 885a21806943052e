"""Photographs as model inputs, with a cached forward each, so that a click only indexes and redraws."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import itertools
import os
from collections import Counter, OrderedDict
from collections.abc import Callable
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
    data_config,
    label_names,
    output_kind,
    preprocess,
    restore,
    scores,
    title,
)
from vitlens.models.classes import prediction_beside
from vitlens.recorder.forward import eval_mode, require_finite
from vitlens.recorder.intervention import intervene
from vitlens.recorder.record import capture
from vitlens.recorder.supported import family, read_tokens, unwrap
from vitlens.texts import shown
from vitlens_explorer.drawing import enlarged_png
from vitlens_explorer.words import number, percent, say

GIVEN, FIRST = "the image given", "chelsea"
EYE = 0.37, 0.33
"""(y, x) of an eye of the first photograph, as shares of its middle square."""
READOUT, PATCH = "readout", "patch"
"""Queries besides the positions of prefix tokens: what the classifier head reads, and the patch in a row and column."""
LIKELIEST = 10
"""Number of classes that the menus offer."""
STANDS_OUT = 0.3
"""Smallest probability of the likeliest class without a remark that none stands out."""
SHARED = 0.5
"""Smallest probability of the three likeliest classes together with which the remark names it."""
KEPT = 256 * 2**20
"""Largest number of bytes of uploads and captures of a page. The `LATEST` captures are always kept."""
LATEST = 2
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
        notes = list(
            filter(None, [getattr(source, "note", "")])
        )  # of an image that the app has read
        return cls(load_image(source, on_note=notes.append), " ".join(notes), uploaded)


@functools.cache
def sample_photographs() -> dict[str, Photograph]:
    """The sample photographs by name, the first one first, opened once for all pages."""
    images = samples()
    names = [FIRST, *(name for name in images if name != FIRST)]
    return {name: Photograph(images[name]) for name in names}


class Forward:
    """One forward of a model on a photograph.

    batch: (1, C, H, W), the model's input. pixels: (H, W, 3) uint8, the input as an image. attn: captured layers.
    heads: number of heads in a layer. tokens: one (1, T, D) per layer. classes: number of classes, 0 without a
    classifier head. likeliest: numbers of the most probable classes. cropped: sentence about the part of the photograph
    that the model sees, or "". off: replacements of the switched-off heads for
    `intervene`. key: equal for equal weights, photographs, sizes and switches. weights: equal for equal weights.
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
        self.model = model
        self.off = off or {}
        self.key = key
        self.weights = key[:2]
        size = size or built_size(model)
        batch = preprocess(model, image, size=size, whole=whole, on_note=shown_by_the_page)
        self.cropped = "" if whole else crop_words(model, image, size)
        self.pixels = restore(model, batch)[0]
        self.batch = batch.to(next(model.parameters()))
        with eval_mode(model), self.switched(), torch.inference_mode(), capture(model) as attn:
            self.tokens, logits = tokens.features(model, self.batch)
        require_finite(model, logits)
        self.attn = [*attn]
        self.grid = attn.grid
        self.gated = attn.gated
        self.heads = attn[0].q.shape[1]
        self.prefix = family(model).prefix
        self.name = title(model)
        self.outputs = output_kind(model)
        self.logits = logits[0].float().cpu()
        self.names = label_names(model, logits.shape[-1])
        self.labels = short_names(tuple(self.names or ()))
        self._shares = scores(model, self.logits)
        pooled = logits.dim() == 2  # without pooling, logits have a row for each token
        self.classes = logits.shape[-1] if pooled and class_count(model) != 0 else 0
        self.likeliest: list[int] = []
        if self.classes:
            count = min(LIKELIEST, self.classes)
            self.likeliest = self._shares.topk(count).indices.tolist()
        self.contributions: dict[tuple, tuple] = {}  # by (target, contrast)

    def switched(self) -> contextlib.AbstractContextManager[None]:
        """Context with the same heads switched off, in this thread."""
        if not self.off:
            return contextlib.nullcontext()
        return intervene(self.model, heads=self.off)

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

    def class_words(self, number: int) -> str:
        """Short name of a class and its score, for captions."""
        return say("class", name=self.label(number), score=self.score_words(self.share(number)))

    def prediction_beside(self, target: int) -> str:
        """A sentence with the prediction, or "" if it is the target alone."""
        return prediction_beside(self.outputs, self._shares, target, self.class_words)

    @property
    def doubt(self) -> str:
        """A sentence if no class stands out, or ""."""
        if not self.likeliest or self.outputs == "value":
            return ""
        if self.share(self.likeliest[0]) >= STANDS_OUT:
            return ""
        together = sum(map(self.share, self.likeliest[:3]))
        if self.outputs == "classes" and together >= SHARED:
            return say("doubt shared", share=percent(together))
        return say("doubt", count=f"{self.classes:,}")

    @property
    def bytes(self) -> int:
        """Bytes of the capture and the tokens."""
        tensors = [*self.tokens]
        for layer in self.attn:
            tensors += [layer.q, layer.k]
            if layer.mask is not None:
                tensors.append(layer.mask)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

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
        if names[0] in self.prefix:
            return " and ".join(names)
        return f"the {names[0]}"


def shown_by_the_page(note: str) -> None:
    """Ignore a note of `preprocess`, because the page shows it (`crop_words`), or has it from `load_image`."""


def crop_words(model: nn.Module, image: Image.Image, size: tuple[int, int] | None) -> str:
    """Sentence about the middle of a photograph that the model sees, or "" if that is all of it."""
    config = data_config(model, size)
    if config["crop_mode"] != "center":
        return ""
    _, height, width = config["input_size"]
    scale = min(image.height / height, image.width / width)
    rows = round(scale * height**2 / int(height / config["crop_pct"]))
    cols = round(scale * width**2 / int(width / config["crop_pct"]))
    if rows >= image.height and cols >= image.width:
        return ""
    numbers = {"rows": rows, "cols": cols, "width": image.width, "height": image.height}
    return say("cropped", **{name: f"{value:,}" for name, value in numbers.items()})


@functools.lru_cache(4)
def short_names(names: tuple[str, ...]) -> list[str]:
    """The first synonym of each name, such as "tabby" of "tabby, tabby cat", unless another name has it, too."""
    synonyms = [[synonym.strip() for synonym in name.split(",")] for name in names]
    counts = Counter(itertools.chain.from_iterable(map(set, synonyms)))
    return [
        first if counts[first] == 1 else name
        for name, (first, *_) in zip(names, synonyms, strict=True)
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
    elongation = float(np.clip(down / across, 1 / _ELONGATION, _ELONGATION)) ** 0.5
    side = (height * width) ** 0.5  # of a square with the same area
    sides = side * elongation, side / elongation
    rows, cols = (max(1, round(length / step)) for length, step in zip(sides, patch, strict=True))
    return rows * patch[0], cols * patch[1]


def weights_version(model: nn.Module) -> tuple:
    """Identity and version of all parameters and buffers. In-place changes such as optimizer steps raise the version,
    changes through `.data` do not."""
    tensors = [*model.parameters(), *model.buffers()]
    return tuple((id(t), t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors)


def name_of(image) -> str:
    """File name of an argument of `load_image`, or GIVEN."""
    path = image if isinstance(image, str | os.PathLike) else getattr(image, "filename", "")
    return shown(os.path.basename(path)) or GIVEN


class Gallery:
    """The forwards of models on photographs, of which the latest are kept.

    models: one for each side of a page. size: (height, width) of their input in pixels.
    """

    def __init__(self, *models: nn.Module, size: tuple[int, int] | None = None):
        self.models = [unwrap(model) for model in models]
        self.size = size
        self.forwards: OrderedDict[tuple, Forward] = OrderedDict()  # the oldest first
        self.begin({})

    def begin(self, photographs: dict[str, Photograph]) -> None:
        """Notice changes of the weights and of the photographs of a page."""
        self._versions = {id(model): weights_version(model) for model in self.models}
        self._uploaded = upload_bytes(photographs)

    def copy(self) -> Gallery:
        """A gallery for another thread, with the same forwards at first."""
        gallery = copy.copy(self)
        gallery.forwards = self.forwards.copy()
        return gallery

    def first_state(self, image, more: dict[str, Photograph] | None = None) -> dict:
        """State of a new page: its photographs, and the query. more: photographs besides the image and the samples."""
        given = {} if image is None else {name_of(image): Photograph.read(image)}
        photographs = given | sample_photographs() | (more or {})
        name = next(iter(photographs))
        grids = [self.forward_of(model, photographs[name]).grid for model in self.models]
        y, x = EYE if name == FIRST else (0.5, 0.5)
        readable = all(grid.readout is not None for grid in grids)
        return {
            "photographs": photographs,
            "photograph": name,
            "query": READOUT if readable and name != FIRST else PATCH,
            "row": int(y * grids[0].rows),
            "column": int(x * grids[0].cols),
        }

    def forward_of(
        self,
        model: nn.Module,
        photograph: Photograph,
        *,
        whole: bool = False,
        off: tuple = (),
        outputs: Callable[[], dict] = dict,
    ) -> Forward:
        """Cached forward of a model on a photograph, computed if missing. whole: the photograph in its aspect ratio.
        off: switched-off heads. outputs(): their outputs."""
        size = self.size
        if whole and size is None:
            size = size_for(model, photograph)
        key = (id(model), self._versions[id(model)], photograph.number, size, whole, off)
        if key not in self.forwards:
            self.forwards[key] = Forward(model, photograph.image, size, whole, outputs(), key)
            self._limit_captures()
        self.forwards.move_to_end(key)
        return self.forwards[key]

    def _limit_captures(self) -> None:
        """Drop the oldest captures while these and the uploads hold more than `KEPT` bytes."""
        room = KEPT - self._uploaded
        while len(self.forwards) > LATEST and self._captured() > room:
            self.forwards.popitem(last=False)

    def _captured(self) -> int:
        return sum(forward.bytes for forward in self.forwards.values())

    def with_upload(self, state: dict, content: dict, data: bytes) -> dict:
        """Parts of a page's state after an upload, in which the oldest uploads are dropped while these and the latest
        captures hold more than `KEPT` bytes."""
        name = str(content["upload"])
        file = io.BytesIO(data)
        file.name = name
        photographs = {name: Photograph.read(file, uploaded=True)}
        photographs |= {other: p for other, p in state["photographs"].items() if other != name}
        latest = [*self.forwards.values()][-LATEST:]
        room = KEPT - sum(forward.bytes for forward in latest)
        for other in reversed([*photographs]):
            if upload_bytes(photographs) <= room:
                break
            if photographs[other].uploaded and other not in (name, state.get("other")):
                del photographs[other]
        self._uploaded = upload_bytes(photographs)
        return {"photographs": photographs, "photograph": name}


def upload_bytes(photographs: dict[str, Photograph]) -> int:
    """Bytes of the uploaded photographs."""
    sizes = [p.image.size for p in photographs.values() if p.uploaded]
    return sum(3 * width * height for width, height in sizes)


def fit_place(state: dict, forward: Forward) -> dict:
    """Row and column of a state, clipped to the grid of a forward."""
    return {
        "row": min(state["row"], forward.grid.rows - 1),
        "column": min(state["column"], forward.grid.cols - 1),
    }
