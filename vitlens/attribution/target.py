"""Targets: the score of each image that a map explains. Here are their base class and targets for classes.

Targets made of features (similarity to a picture or text, a direction, the length) are in
`vitlens.attribution.features`.
"""

from __future__ import annotations

import difflib
import operator
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitlens.models import label_names, probabilities
from vitlens.recorder.supported import model_name


class NothingToAsk(ValueError):
    """This image cannot be asked: a class was to be contrasted with itself, or a picture compared with itself."""


class Target(ABC):
    """What is explained: one score per image, (B,), computed from the model's output or features.

    of_features: whether that is its features, (B, D), or its logits, (B, classes). measures: what insertion and
    deletion may measure, by name, and in words; the first is the usual one.
    """

    of_features: bool
    measures: Mapping[str, str]

    @abstractmethod
    def score(self, said: Tensor) -> Tensor:
        """(B,) the score that is explained and differentiated."""

    @abstractmethod
    def linear(self, said: Tensor) -> Tensor:
        """(B,) the same values, as a linear function of `said` in autograd's eyes."""

    @abstractmethod
    def measured(self, said: Tensor, measure: str) -> Tensor:
        """(B,) values of one of the `measures`."""

    @abstractmethod
    def of(self, images: Tensor) -> Target:
        """The target for some of the images. images: (N,) int64 indices."""

    @abstractmethod
    def called(self, image: int) -> str:
        """The name of what is explained in one image, such as "class 3"."""

    def require_slope(self, said: Tensor) -> None:  # noqa: B027  most scores have no maximum
        """Raise NothingToAsk if the score of an image is at its maximum, where every gradient is rounding error."""

    @property
    def arguments(self) -> tuple[object, object]:
        """target and against, as any method takes them."""
        return self, None


class Question(ABC):
    """What to explain, before the model is known that gives it a meaning: what `like`, `text` and others return."""

    @abstractmethod
    def bound(self, model: nn.Module, against: Question | None = None) -> Target:
        """The `Target` of this question for a model, or of its contrast with another question."""


@dataclass(frozen=True)
class ClassTarget(Target):
    """The class of each image, (B,) numbers, and the class that it is contrasted with, (B,) against or None."""

    numbers: Tensor
    against: Tensor | None = None

    of_features = False

    @property
    def measures(self) -> Mapping[str, str]:
        """With two classes, the probability is of one among these two."""
        if self.against is None:
            return {"probability": "the probability of the class", "logit": "the logit of the class"}
        return {
            "probability": "the probability of the class among the two",
            "logit": "the logit of the class less that of the other",
        }

    def score(self, said: Tensor) -> Tensor:
        """(B,) logit of the class; with `against`, minus the logit of that class."""
        found = said.gather(-1, self.numbers[:, None])[:, 0]
        return found if self.against is None else found - said.gather(-1, self.against[:, None])[:, 0]

    def linear(self, said: Tensor) -> Tensor:
        return self.score(said)

    def measured(self, said: Tensor, measure: str) -> Tensor:
        """(B,) the score, or the probability of the class among all classes, or among the two of a contrast."""
        if measure == "logit":
            return self.score(said)
        if self.against is not None:
            return self.score(said).sigmoid()
        return probabilities(said).gather(-1, self.numbers[:, None])[:, 0]

    def of(self, images: Tensor) -> ClassTarget:
        return ClassTarget(self.numbers[images], None if self.against is None else self.against[images])

    def called(self, image: int) -> str:
        return f"class {self.numbers[image].item()}"

    @property
    def arguments(self) -> tuple[Tensor, Tensor | None]:
        return self.numbers, self.against


def of_features(target: object) -> bool:
    """Whether a target, or what is to become one, is about features, so that it needs no classes."""
    return isinstance(target, Question) or (isinstance(target, Target) and target.of_features)


def bound(model: nn.Module, target: object = None, against: object = None) -> tuple[object, object]:
    """target and against, in which a `Question` has become the `Target` that it means for the model.

    Raises ValueError for a question that is contrasted with something else, and what asking the model raises.
    """
    if against is not None and of_features(target) != of_features(against):
        raise ValueError(
            "A contrast is between two classes or between two questions about features, such as "
            f'`text("a cat")` against `text("a dog")`, got {target!r:.60} against {against!r:.60}.'
        )
    if isinstance(against, Target) or (against is not None and isinstance(target, Target)):
        raise ValueError("A `Target` has its contrast inside. Give the two questions, or the target alone.")
    return (target.bound(model, against), None) if isinstance(target, Question) else (target, against)


def asked(model: nn.Module, said: Tensor, target=None, against=None, names: Sequence[str] | None = None) -> Target:
    """The `Target` that target and against, both `bound`, mean for what a model said; a `Target` is returned as it is.

    Classes are read as in `classes`, but against=None is no class. Raises NothingToAsk, a ValueError, for a class that
    is contrasted with itself, and ValueError for features that are none.
    """
    if isinstance(target, Target):
        if target.of_features:
            target.require(model, said)
        return target
    numbers = classes(model, said, target, names)
    if against is None:
        return ClassTarget(numbers)
    others = classes(model, said, against, names)
    if (same := numbers == others).any():
        raise NothingToAsk(
            f"A contrast is between two classes, but class {numbers[same][0].item()} was to be explained rather than "
            "itself. Give another class to `against`."
        )
    return ClassTarget(numbers, others)


def class_logits(model: nn.Module, output: object) -> Tensor:
    """The model's output, if it is (B, classes) logits. Raises ValueError if not, or if a value is nan or +∞."""
    if isinstance(output, Tensor) and output.dim() == 2:
        if not (output < torch.inf).all():  # −∞ is a class that cannot be
            raise ValueError(
                f"The outputs of {model_name(model)} are not finite numbers, so there is no class to explain. Its "
                "weights may be damaged, its precision too low, or the images not normalized as it wants them."
            )
        return output
    came = f"outputs of shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
    raise ValueError(
        f"Expected logits of shape (B, classes), but {model_name(model)} gives {came}. "
        'Give a model that ends in a classifier and pools its tokens (in timm: `global_pool="token"` or "avg").'
    )


def classes(model: nn.Module, logits: Tensor, target=None, names: Sequence[str] | None = None) -> Tensor:
    """(B,) class numbers for (B, classes) logits.

    target: None for the predicted class, one class for all images, or a sequence or 1-D tensor with one for each. A
    class is a number or a name; digits that are no name are a number. names: the names of all classes in order, by
    default the model's own (`vitlens.models.label_names`). Where a name lists synonyms, separated by commas as in
    ImageNet, one of them is enough; case does not matter. Raises ValueError for what is no class of the model, and
    TypeError for other types.
    """
    count, total = class_logits(model, logits).shape
    if target is None:
        return logits.argmax(-1)
    if hasattr(target, "tolist"):  # tensors, NumPy's arrays and its numbers
        target = target.tolist()
    each = list(target) if isinstance(target, list | tuple) else [target] * count
    if len(each) != count:
        raise ValueError(
            f"Expected one class, or one for each of the {count} images, got {len(each)}. Give one or {count}."
        )
    numbers = [_by_name(model, t, names, total) if isinstance(t, str) else _by_number(model, t, total) for t in each]
    return torch.tensor(numbers, device=logits.device)


def _by_number(model: nn.Module, target, total: int) -> int:
    try:
        number = operator.index(target)
    except TypeError:
        raise TypeError(
            "A target is a class number, a class name, a sequence with one for each image, None for the predicted "
            "class, or a question such as `vitlens.attribution.like(picture)`, got "
            f"{target!r:.80} ({type(target).__name__})."
        ) from None
    if isinstance(target, bool) or not 0 <= number < total:
        raise ValueError(
            f"{model_name(model)} has {total} classes, numbered from 0 to {total - 1}, but class {target} was asked "
            "for. Give one of these."
        )
    return number


def _is_number(name: str) -> bool:
    return name.strip().removeprefix("-").isdecimal()


def _by_name(model: nn.Module, target: str, names: Sequence[str] | None, total: int) -> int:
    names = label_names(model, total) if names is None else names
    if names is None and _is_number(target):
        return _by_number(model, int(target), total)
    if names is None:
        raise ValueError(
            f"The names of {model_name(model)}'s classes are unknown, so {target!r} cannot be found among them. Give "
            f"the class as a number from 0 to {total - 1}, or all names in order (`names=[…]`)."
        )
    if len(names) != total:
        raise ValueError(f"{model_name(model)} has {total} classes, got {len(names)} names. Give one for each class.")
    wanted = target.strip().lower()
    synonyms = [[name.lower(), *(part.strip() for part in name.lower().split(","))] for name in names]
    found = [i for i, parts in enumerate(synonyms) if parts[0] == wanted]
    found = found or [i for i, parts in enumerate(synonyms) if wanted in parts]
    if len(found) > 1:
        raise ValueError(
            f"{len(found)} classes of {model_name(model)} are called {target!r}: "
            f"{', '.join(f'{i} ({names[i]})' for i in found)}. Give the number of one."
        )
    if not found and _is_number(wanted):
        return _by_number(model, int(wanted), total)
    if not found:
        known: dict[str, list[str]] = {}
        for part in (part for parts in synonyms for part in parts[1:]):
            for key in {part, *part.split()}:
                known.setdefault(key, []).append(part)
        keys = difflib.get_close_matches(wanted, known, n=3, cutoff=0.6)
        close = {part for key in keys for part in known[key]}
        nearest = sorted(close, key=lambda part: (-difflib.SequenceMatcher(None, wanted, part).ratio(), part))
        numbers = f"Give another name, or a number from 0 to {total - 1}."
        hint = f"Did you mean {', '.join(nearest[:3])}?" if close else numbers
        raise ValueError(f"{model_name(model)} has no class called {target!r}. {hint}")
    return found[0]
