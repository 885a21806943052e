"""Subjects: an image as a model saw it, with all that views need, kept so that controls only index and redraw."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from vitlens import attention, tokens
from vitlens.images import load_image
from vitlens.models import architecture, built_size, class_count, label_names, preprocess, restore, scores
from vitlens.recorder.layer import Layer
from vitlens.recorder.record import Attention, capture
from vitlens.recorder.running import evaluating, taking
from vitlens.recorder.supported import family, unwrap
from vitlens.widgets.paint import enlarged
from vitlens.widgets.switches import ALL_ON, Off, switched
from vitlens.widgets.worker import RUNNING, Superseded

LIKELIEST = 10
"""Number of classes that the menus offer."""
CACHE = 2**30
"""Bytes of captures to keep in all. The two used last are always kept, because a comparison needs both."""
REMEMBERED = 20
"""Number of subjects whose small tensors are kept, even if their capture had to go."""
_ELONGATION = 16  # the most columns per row, or rows per column, for an image in its own shape


class Layers(Sequence):
    """Some layers of a capture. Asking for one raises Superseded once the statistic is no longer wanted."""

    def __init__(self, attn: Attention, chosen: slice, wanted: Callable[[], bool]):
        self.layers, self.grid, self.model_name, self.wanted = attn[chosen], attn.grid, attn.model_name, wanted

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, index: int) -> Layer:
        if not self.wanted():
            raise Superseded
        return self.layers[index]


class Photograph:
    """An image with a note about what `load_image` did to it, or ""."""

    def __init__(self, image: Image.Image, note: str = ""):
        self.image, self.size, self.note = image, image.size, note

    @classmethod
    def read(cls, source) -> Photograph:
        """Read an image with `load_image`. Raises ImageError if it is none."""
        notes: list[str] = []
        return cls(load_image(source, on_note=notes.append), " ".join(notes))

    @functools.cached_property
    def key(self) -> tuple:
        """Equal for equal images."""
        return self.size, hashlib.sha256(self.image.tobytes()).hexdigest()


class Subject:
    """An image as a model saw it.

    batch: (1, C, H, W), the model's input. pixels: (H, W, 3) uint8, the same for people. attn: its capture. tokens: one
    (1, T, D) per layer. logits: (classes,) on the CPU. classes: their number, 0 without a classifier. likeliest:
    numbers of the likeliest ones. off: the heads that were switched off. number: unique. small: tensors computed from
    it, by key.
    """

    numbers = itertools.count()

    def __init__(
        self, model: nn.Module, image: Image.Image, size: tuple[int, int] | None, whole: bool, off: Off = ALL_ON
    ):  # fmt: skip
        self.weights, self.off = weights(model), off
        batch = preprocess(model, image, size=size or built_size(model), whole=whole)
        self.pixels = restore(model, batch)[0]
        self.batch = batch.to(next(model.parameters()))
        self._model = weakref.ref(model)  # a subject goes with its model
        with evaluating(model), self.switched(), torch.inference_mode(), capture(model) as attn, taking(model):
            self.tokens, logits = tokens.features(model, self.batch)
        if not logits.isfinite().all():
            raise ValueError(
                "The model's outputs for this picture are not finite numbers, so its attention means nothing. Its "
                "weights are damaged, or its precision is too low."
            )
        self.attn, self.grid = attn, attn.grid
        classed = class_count(model) != 0 and logits.dim() == 2  # without pooling there is one row for each token
        self.classes = logits.shape[-1] if classed else 0
        self.logits = logits[0].float().cpu()
        self._names, self._shares = label_names(model, logits.shape[-1]), scores(model, self.logits)
        self.likeliest = self._shares.topk(min(LIKELIEST, self.classes)).indices.tolist() if classed else []
        self.prefix = family(model).prefix
        self.name = architecture(model)
        self.number = next(self.numbers)
        self.small: dict[tuple, Tensor] = {}

    @property
    def model(self) -> nn.Module:
        """The model that saw the image."""
        return self._model()

    def switched(self) -> contextlib.AbstractContextManager[None]:
        """A block in which the model runs as it ran for this subject."""
        return switched(self.model, self.off, self.batch, self.weights)

    def label(self, number: int) -> str:
        """The name of a class, or its number."""
        return self._names[number] if self._names else str(number)

    def share(self, number: int) -> float:
        """The probability of a class."""
        return self._shares[number].item()

    @property
    def bytes(self) -> int:
        """Memory held by the capture and the tokens."""
        held = [t for layer in self.attn for t in (layer.q, layer.k, layer.mask) if t is not None]
        return sum(t.numel() * t.element_size() for t in (*held, *self.tokens))

    @functools.cached_property
    def png(self) -> bytes:
        """What the model saw, as a PNG file for the browser."""
        return enlarged(self.pixels)

    def received(self, layer: int, wanted: Callable[[], bool]) -> Tensor:
        """(H, P) attention that each patch receives in a layer, the mean over all queries."""
        chosen = slice(layer, layer + 1)
        return self.once(("received", layer), lambda: attention.received(Layers(self.attn, chosen, wanted))[0, 0])

    def rollout(self, layer: int, query: int | None, fusion: str, wanted: Callable[[], bool]) -> Tensor:
        """(rows, cols) rollout from a token, or from the read-out, through layers 0 to `layer`."""
        layers = Layers(self.attn, slice(0, layer + 1), wanted)
        key = ("rollout", layer, query, fusion)
        return self.once(key, lambda: attention.rollout(layers, query=query, head_fusion=fusion)[0])

    def mean_distance(self, wanted: Callable[[], bool] = lambda: True) -> Tensor:
        """(L, H) mean attention distance in input pixels."""
        every = slice(None)
        return self.once(("distance",), lambda: attention.mean_distance(Layers(self.attn, every, wanted))[0])

    def has(self, *key) -> bool:
        """Whether a small tensor is there already."""
        return key in self.small

    def once(self, key: tuple, make: Callable[[], Tensor]) -> Tensor:
        """A small float32 tensor on the CPU, computed now or kept from before. Raises Superseded if the weights of the
        model changed meanwhile, while others had their turn."""
        if key not in self.small:
            if len(self.small) > 200:  # somebody may click all day
                self.small.pop(next(k for k in self.small if k != ("distance",)))
            turn = RUNNING.number
            with torch.inference_mode():
                made = make().float().cpu()
            if turn != RUNNING.number and weights(self.model) != self.weights:
                raise Superseded
            self.small[key] = made
        return self.small[key]


def size_for(model: nn.Module, photograph: Photograph) -> tuple[int, int] | None:
    """(height, width) in pixels for a whole photograph in its own shape, with about as many patches as the model was
    built for; None if the model takes one size only."""
    about = family(unwrap(model))
    height, width = about.built_size or about.preprocessing["input_size"][1:]
    patch = about.grid((height, width)).patch
    try:
        about.grid((height + patch[0], width))
    except ValueError:
        return None
    shape = float(np.clip((photograph.size[1] / photograph.size[0]) ** 0.5, _ELONGATION**-0.5, _ELONGATION**0.5))
    area = (height * width) ** 0.5
    return tuple(max(1, round(side / p)) * p for side, p in zip((area * shape, area / shape), patch, strict=True))


def weights(model: nn.Module) -> tuple:
    """A fingerprint of the weights of a model: the tensors, their version counters, and sums over them, because changes
    of `.data` do not count as a version. Taken once a turn, so that a page is of one set of weights throughout."""
    turn, found = _looked_at.get(model, (None, ()))
    if turn != RUNNING.number:
        every = [*model.parameters(), *model.buffers()]
        known = [(id(t), t.data_ptr(), 0 if t.is_inference() else t._version) for t in every]
        with torch.no_grad():
            flat = [t.reshape(-1) for t in every]
            sums = [part.sum(dtype=torch.float32) for t in flat for part in (t, t[::97])]  # the second sees their order
            digest = torch.stack([each.to(sums[0].device) for each in sums]).cpu().numpy().tobytes()
        found = (*known, digest, getattr(model, "global_pool", None))
        _looked_at[model] = RUNNING.number, found
    return found


_looked_at: weakref.WeakKeyDictionary[nn.Module, tuple[int, tuple]] = weakref.WeakKeyDictionary()
_subjects: OrderedDict[tuple, Subject] = OrderedDict()
_small: OrderedDict[tuple, dict] = OrderedDict()  # kept longer, or pages that push each other out would never end
_forgotten: deque[int] = deque()  # ids of models that are gone


def subject(
    model: nn.Module, photograph: Photograph, *, size: tuple[int, int] | None = None, whole: bool = False,
    off: Off = ALL_ON,
) -> Subject:  # fmt: skip
    """The `Subject` of a model and a photograph, with some heads off, made now or kept from before.

    At most `CACHE` bytes are kept, or the two used last. Changed weights make it anew. One thread at a time.
    """
    model = unwrap(model)
    with RUNNING:
        now = weights(model)
        key = (id(model), now, photograph.key, size, whole, off)
        while _forgotten:
            gone = _forgotten.popleft()
            _drop(lambda known, gone=gone: known[0] == gone)
        if key not in _subjects:
            made = Subject(model, photograph.image, size, whole, off)
            _drop(lambda known: known[1] != now and (known[0], *known[2:]) == (key[0], *key[2:]))
            if not any(known[0] == id(model) for known in _small):
                weakref.finalize(model, _forgotten.append, id(model))
            made.small = _small.setdefault(key, made.small)
            _small.move_to_end(key)
            _subjects[key] = made
            while len(_subjects) > 2 and sum(each.bytes for each in _subjects.values()) > CACHE:
                _subjects.popitem(last=False)
            while len(_small) > REMEMBERED:
                _small.popitem(last=False)
        _subjects.move_to_end(key)
        return _subjects[key]


def _drop(gone: Callable[[tuple], bool]) -> None:
    for kept in (_subjects, _small):
        for known in [known for known in kept if gone(known)]:
            del kept[known]
