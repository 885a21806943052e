"""What is explained where it is no class: how like another picture, or a text, a model finds a picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vitlens.attribution.target import Similarity, like, text
from vitlens.models import built_size, preprocess
from vitlens.recorder.running import evaluating
from vitlens.recorder.supported import pooled
from vitlens.widgets.subjects import Subject
from vitlens.widgets.switches import switched
from vitlens.widgets.views import Choice, asked, number, percent, until

PICTURE, TEXT = "picture", "text"


@dataclass(frozen=True)
class Likeness:
    """A target of the page: similarity to a text, or to a picture. name: the text, or what the page calls the picture.
    key: equal for equal pictures; image: the picture itself. size: (height, width) for the model, if not its own."""

    name: str
    key: tuple | None = None
    image: Image.Image | None = field(default=None, compare=False, repr=False)
    size: tuple[int, int] | None = None

    def target(self, shown: object = None) -> Similarity:
        """The same as a target of any method. shown: the picture, as it is or as the model's input."""
        return text(self.name) if self.image is None else like(shown, name=f"“{self.name}”")


def goal(subject: Subject, choice: Choice, wanted: Callable[[], bool]) -> tuple[object, object]:
    """target and against, as every method takes them."""
    return tuple(
        replace(each.target(each.image), vector=_vector(subject, each, wanted)) if isinstance(each, Likeness) else each
        for each in asked(subject, choice)
    )


def called(subject: Subject, asked_for: int | Likeness, wanted: Callable[[], bool]) -> str:
    """A class with its probability, or a picture or text with its cosine: "“tabby” (54 %)"."""
    if isinstance(asked_for, Likeness):
        cosine = F.cosine_similarity(_features(subject, wanted), _vector(subject, asked_for, wanted), dim=0)
        return f"“{asked_for.name}” (cosine {number(cosine.item())})"
    return f"“{subject.label(asked_for)}” ({percent(subject.share(asked_for))})"


def _features(subject: Subject, wanted: Callable[[], bool]) -> Tensor:
    """(D,) features of the picture that is shown."""

    def made() -> Tensor:
        model = subject.model
        with until(model, wanted), evaluating(model), subject.switched(), torch.no_grad():
            return pooled(model, subject.batch)[0]

    return subject.once(("features",), made)


def _vector(subject: Subject, liked: Likeness, wanted: Callable[[], bool]) -> Tensor:
    """(D,) the direction of the other picture or text among the features, with the same heads off."""

    def made() -> Tensor:
        model = subject.model
        if liked.image is None:
            return liked.target().bound(model).vector
        batch = preprocess(model, liked.image, size=liked.size or built_size(model)).to(subject.batch)
        with until(model, wanted), switched(model, subject.off, batch, subject.weights):
            return liked.target(batch).bound(model).vector

    return subject.once(("direction", liked), made).clone()  # made in inference mode, where autograd takes none
