"""Run batches of labeled images through a model, and again from the first changed layer on.

The layers below a changed head give what they gave, so they are not computed again.

Shapes: B batch, T tokens, K head width.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from tqdm.auto import tqdm

from vitlens.evaluate.classes import class_numbers, matched
from vitlens.evaluate.protocols import Evaluation
from vitlens.evaluate.reading import normalized_for
from vitlens.models import class_count, require_classes
from vitlens.recorder.intervention import Intervention, Place, head_places, outputs
from vitlens.recorder.record import POOL, alone
from vitlens.recorder.running import evaluating, float64, require_count, run, uncompiled
from vitlens.recorder.supported import attention_modules, family, refuse, require_capturable


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Pictures:
    """Labeled images in shuffled order, and the model to run on them."""

    def __init__(self, model, data, images, seed, batch, progress, settings, first: int = 0):
        require_count(batch=batch, **({} if images is None else {"images": images}))
        known = isinstance(data, str | Path)
        question = Evaluation(model, str(data) if known else "images", **settings)
        self.model, self.progress = question.network, progress
        self.modules = attention_modules(self.model)
        require_capturable(self.model)
        require_classes(self.model)
        if class_count(self.model) == 1:
            raise refuse(self.model, "it has a single class, so its answer is always the same")
        self.data = (question.images("whole") if known else data).to(question.world.device)
        numbers = class_numbers(self.model, self.data.class_names)
        question.note(matched(self.model, self.data.class_names))
        self.numbers = numbers
        self.heads = head_places(self.model, self.modules)
        rows = torch.randperm(len(self.data), generator=generator(seed))[:images]
        if len(rows) < first + 2:
            chosen = f": heads are chosen by the first {first} of them. Lower `choose`, or give more" if first else ""
            raise ValueError(f"Expected at least {first + 2} images, got {len(rows)}{chosen}.")
        split = lambda part: part.tensor_split(max(1, len(part) // batch))  # noqa: E731
        self.first = split(rows[:first]) if first else ()
        self.batches = split(rows[first:])  # of two images at least
        drawn = repr((self.data.class_names, self.data.labels[rows].tolist(), self.data.pictures))
        drawn = hashlib.sha256(drawn.encode()).hexdigest()[:8]
        self.about = (
            f"weights {question.weights}, {len(rows)} of {len(self.data)} images (checksum {drawn}), seed {seed}, "
            f"batches of {batch}"
        )

    @contextlib.contextmanager
    def running(self, work: int, title: str) -> Iterator[None]:
        """In this block the model is run, alone, with a bar for all runs of a batch."""
        self.mode = Intervention(self.model, self.modules, self.heads, self._act)
        self.changes: Mapping[Place, Tensor] = {}
        self.checked = False
        with (
            torch.no_grad(), evaluating(self.model), uncompiled(), alone(self.mode), self.mode.working(),
            tqdm(total=work, desc=title, unit="batch", disable=not self.progress) as self.bar,
        ):  # fmt: skip
            yield

    def _act(self, place: Place, output: Tensor) -> Tensor | None:
        return self.changes.get(place)

    def read(self, numbers: Sequence[int]) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
        """Normalized images (b, 3, S, S) and the model's labels (b,) of batches, negative ones being the first; damaged
        images are left out."""
        rows = [self.first[number] if number < 0 else self.batches[number] for number in numbers]
        for number, row, (images, labels) in zip(numbers, rows, self.data.batches(rows), strict=True):
            sound = ~self.data.stand_ins()[row].to(labels.device)
            if sound.any():
                yield number, (normalized_for(self.model, images[sound]), self.numbers[labels[sound].cpu()])

    def means(self, numbers: Sequence[int]) -> dict[Place, Tensor]:
        """(T, K) the mean output of each head over batches."""
        sums, count = dict.fromkeys(self.heads, 0), 0
        for _, (images, _) in self.read(numbers):
            for place, output in outputs(self.model, self.modules, self.heads, images).items():
                sums[place] = sums[place] + float64(output).sum(0)
            count += len(images)
            self.bar.update()
        return {place: each / count for place, each in sums.items()}


class Passage:
    """A batch on its way through a model, which can be run again from any block on."""

    def __init__(self, pictures: Pictures, images: Tensor, changes: Mapping[Place, Tensor] | None = None):
        self.pictures, self.model = pictures, pictures.model
        self.calls: list[tuple[tuple, dict]] = []
        thread = threading.get_ident()

        def note(_, args: tuple, kwargs: dict) -> None:
            if threading.get_ident() == thread:
                self.calls.append((args, kwargs))

        pictures.changes = changes or {}
        self.attended = pictures.mode.keep = {}
        with contextlib.ExitStack() as hooks:
            for block in family(self.model).blocks:
                hooks.enter_context(block.register_forward_pre_hook(note, with_kwargs=True))
            self.logits = self._finite(run(self.model, images))
        pictures.mode.keep = None
        if not pictures.checked:
            error = (self.again(pictures.changes, start=0) - self.logits).abs().max()
            if error > 1e-3 * self.logits.abs().max():
                raise refuse(self.model, "its blocks, norm and head, one after the other, do not give its logits")
            pictures.checked = True

    def again(self, changes: Mapping[Place, Tensor], start: int | None = None) -> Tensor:
        """(B, classes) float64 logits with these changes, on the CPU; run from the lowest changed layer, or `start`."""
        if start is None:
            if not changes:
                return self.logits
            start = min(len(self.calls) - 1 if place.layer == POOL else place.layer for place in changes)
        start = len(self.calls) - 1 if start == POOL else start
        self.pictures.changes = changes
        self.pictures.mode.known = {key: output for key, output in self.attended.items() if key[0] == start}
        (x, *_), _ = self.calls[start]
        for block, (args, kwargs) in zip(family(self.model).blocks[start:], self.calls[start:], strict=True):
            x = block(x, *args[1:], **kwargs)
        self.pictures.mode.known = {}
        self.pictures.bar.update()
        return self._finite(family(self.model).head(x))

    def _finite(self, logits: Tensor) -> Tensor:
        if not logits.isfinite().all():
            raise ValueError("Some logits are no finite numbers, so nothing can be said of heads. Check the weights.")
        return float64(logits).cpu()
