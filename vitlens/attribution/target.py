"""Targets: the score of each image that a map explains.

A target is a class, a name or a function. A class is a number, a name, a sequence with one for each image, or None for
the predicted class. Its score is its logit. A function takes the model's output, (B, outputs), and returns (B,) scores.
A function with a true attribute `of_features`, as `like` and `text` return, takes the features instead: the input of
the classifier (in timm `forward_head(…, pre_logits=True)`), or the output of a model without one.

Shapes: B batch, D width of the features.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlens.images import ImageError, Readable, named_sources
from vitlens.models import built_size, label_names, output_kind, preprocess, scores
from vitlens.models.classes import require_classes
from vitlens.names import suggestion
from vitlens.recorder.forward import eval_mode, pooled_features, require_finite
from vitlens.recorder.supported import embed_texts, model_name


class NothingToExplain(ValueError):
    """Error for a score with zero gradient: a class minus itself, or an image's similarity to itself."""


@dataclass(frozen=True)
class Target:
    """The class of each image of a batch, or a function of the output or the features.

    numbers: (B,) class numbers. against: (B,) numbers of the contrasted classes, or None. outputs: meaning of the
    model's outputs, one of `vitlens.models.OUTPUTS`. function: in place of the numbers.
    """

    numbers: Tensor | None = None
    against: Tensor | None = None
    outputs: str = "classes"
    function: Callable[[Tensor], Tensor] | None = None

    @property
    def of_features(self) -> bool:
        return of_features(self.function)

    @property
    def measures(self) -> Mapping[str, str]:
        """Scores that insertion and deletion may measure, with descriptions. The first is the default."""
        if isinstance(self.function, Similarity):
            return {"similarity": f"{self.label(0)} ({self.function.unit})"}
        if self.function is not None:
            return {"score": self.label(0)}
        less = "" if self.against is None else " less that of the other"
        if self.outputs == "value":
            return {"value": f"the value of the output{less}"}
        logit = f"the logit of the class{less}"
        if self.against is None:
            return {"probability": "the probability of the class", "logit": logit}
        if self.outputs == "independent":
            return {"logit": logit}
        return {"probability": "the probability of the class among the two", "logit": logit}

    def score(self, output: Tensor) -> Tensor:
        """(B,) logits of the classes minus those of the contrast, or scores of the function."""
        if self.function is not None:
            return self.function(output)
        score = _of_classes(output, self.numbers)
        if self.against is None:
            return score
        return score - _of_classes(output, self.against)

    def measure(self, output: Tensor, name: str) -> Tensor:
        """(B,) values of one of the `measures`. With a contrast, the probability is that among the two classes."""
        if name != "probability":
            return self.score(output)
        if self.against is not None:
            return self.score(output).sigmoid()
        return _of_classes(scores(self.outputs, output), self.numbers)

    def require_slope(self, output: Tensor) -> None:
        """Raise NothingToExplain if a similarity is at its maximum."""
        if isinstance(self.function, Similarity):
            self.function.require_slope(output)

    def of(self, images: Tensor) -> Target:
        """The targets of the images with these numbers, (N,)."""
        if self.numbers is None:  # a function is the same for all images
            return self
        against = None if self.against is None else self.against[images]
        return replace(self, numbers=self.numbers[images], against=against)

    def label(self, image: int) -> str:
        """The class of an image, or the name of the function, for messages and figures."""
        if self.function is None:
            return f"class {self.numbers[image].item()}"
        name = getattr(self.function, "name", None)
        return name or getattr(self.function, "__name__", "the score")


def _of_classes(values: Tensor, numbers: Tensor) -> Tensor:
    """(B,) values of the classes with these numbers, (B,), from (B, classes) values."""
    return values.gather(-1, numbers[:, None])[:, 0]


@dataclass(frozen=True)
class Similarity:
    """A function of features: their cosine with those of another image or of a text.

    to: name of that image or text. embed: model → unit vector, (D,). vector: result of `embed`, or the difference of
    two such vectors. unit: the unit of the score. than: name of the contrasted image or text. images: (name, source) of
    the compared images.
    """

    to: str
    embed: Callable[[nn.Module], Tensor] | None = None
    vector: Tensor | None = None
    unit: str = "a cosine, at most 1"
    than: str = ""
    images: tuple[tuple[str, object], ...] = ()

    of_features = True

    @property
    def name(self) -> str:
        name = f"the similarity to {self.to}"
        return f"{name} minus that to {self.than}" if self.than else name

    def bind(self, model: nn.Module) -> Similarity:
        """The same function with its vector in the features of this model."""
        if self.vector is not None:
            return self
        with eval_mode(model), torch.inference_mode(False), torch.no_grad():
            vector = self.embed(model)
        if not vector.isfinite().all() or not vector.any():
            raise ValueError(
                f"The features of {self.to} are zero or not finite, so nothing is similar to them."
            )
        return replace(self, vector=vector)

    def __sub__(self, other: Similarity) -> Similarity:
        with torch.inference_mode(False):  # tensors made in that mode have no gradient
            vector = self.vector - other.vector
        if not vector.any():
            raise NothingToExplain(
                f"{self.to} cannot be contrasted with itself. Give another image or text."
            )
        images = self.images + other.images
        return Similarity(self.to, None, vector, "a difference of two cosines", other.to, images)

    def __call__(self, features: Tensor) -> Tensor:
        features = _wide(features)
        return features @ self.vector.to(features) / features.norm(dim=-1)

    def require_slope(self, features: Tensor) -> None:
        """Raise NothingToExplain at a cosine of ±1, whose gradient consists of rounding errors."""
        unit = _unit(features)
        vector = self.vector.to(unit)
        across = vector - (unit @ vector)[:, None] * unit
        rounding = torch.finfo(features.dtype).eps ** 0.5 * vector.norm()
        if (across.norm(dim=-1) <= rounding).any():
            raise NothingToExplain(
                f"{self.name} is at its maximum, so every gradient is zero: the image is compared with itself. Give "
                "another image, or use a method without gradients, such as occlusion."
            )


def like(images: object, *, name: str = "") -> Similarity:
    """Similarity to an image: the cosine of the two images' features in the same model, as a target.

    >>> vitlens.attribution.relevance(model, images[1:], vitlens.attribution.like(cat)).shape
    torch.Size([1, 14, 14])

    images: a source of `load_image`, which `preprocess` prepares for the model, or a prepared batch (1, C, H, W). For
    several, a list or a batch (N, C, H, W), the cosine with the mean of their unit features. name: for titles, by
    default that of the file. A method raises ImageError for a file that is not an image.
    """
    sources = [source for _, source in named_sources(images)]
    if not sources:
        raise ImageError("Expected an image to compare with, or several, got none.")
    name = name or _name_of_images(sources)

    def embed(model: nn.Module) -> Tensor:
        size = built_size(model)
        parameter = next(model.parameters())
        units = []
        readable = Readable()
        for source in sources:
            try:
                batch = source if _is_batch(source) else preprocess(model, source, size=size)
            except ImageError as error:
                readable.leave_out(source, error)
                continue
            units.append(_unit(pooled_features(model, batch.detach().to(parameter))))
        readable.total(len(units))
        return _unit(torch.cat(units).mean(0))

    shown = []
    for source in sources:
        if not _is_batch(source):
            shown.append((_file_name(source) or name, source))
    return Similarity(name, embed, images=tuple(shown))


def _is_batch(source: object) -> bool:
    """True for a prepared batch, (N, C, H, W)."""
    return isinstance(source, Tensor) and source.ndim == 4


def _name_of_images(sources: Sequence[object]) -> str:
    """The name of a file, or words for an image without a file or for several images."""
    count = sum(len(source) if _is_batch(source) else 1 for source in sources)
    if count > 1:
        return f"the mean of {count} images"
    return _file_name(sources[0]) or "the given image"


def _file_name(source: object) -> str:
    """The name of a file without its directory, or "" for an image from memory."""
    return Path(source).name if isinstance(source, str | os.PathLike) else ""


def text(prompt: str, *, tokenizer: Callable | None = None) -> Similarity:
    """Similarity to a text: the cosine of the image embedding and the text embedding, as a target.

    >>> vitlens.attribution.text("a photo of a cat").name
    'the similarity to “a photo of a cat”'

    For models with a text tower: CLIP and SigLIP of open_clip and transformers. tokenizer: a function from a list of
    prompts to the input of the text tower, by default the model's own. Raises ValueError for a model without a text
    tower, and OSError without a tokenizer.
    """

    def embed(model: nn.Module) -> Tensor:
        return _unit(embed_texts(model, [prompt], tokenizer))[0]

    return Similarity(f"“{prompt}”", embed)


def _wide(features: Tensor) -> Tensor:
    """The features in float32 or wider."""
    return features.to(torch.promote_types(features.dtype, torch.float32))


def _unit(features: Tensor) -> Tensor:
    """The features scaled to length 1, in float32 or wider."""
    return F.normalize(_wide(features), dim=-1)


def of_features(target: object) -> bool:
    """True for a target that is computed from features, so that the model needs no classes."""
    return getattr(target, "of_features", False)


def bind_target(model: nn.Module, target: object, against: object = None) -> tuple[object, object]:
    """target and against, with a function and its contrast as one `Target`. Classes are returned unchanged.

    Raises ValueError for classes of a model without a classifier.
    """
    if isinstance(target, Target):
        return target, against
    if not callable(target):
        require_classes(model)
        return target, against
    if isinstance(target, Similarity):
        target = target.bind(model)
    if isinstance(against, Similarity):
        against = against.bind(model)
    if against is None:
        return Target(function=target), None
    if not callable(against) or of_features(target) != of_features(against):
        raise ValueError(
            "A contrast is between two classes or between two functions of the same input."
        )
    if isinstance(target, Similarity) and isinstance(against, Similarity):
        return Target(function=target - against), None

    def difference(output: Tensor) -> Tensor:
        return target(output) - against(output)

    difference.of_features = of_features(target)
    return Target(function=difference), None


def resolve_target(
    model: nn.Module,
    output: Tensor,
    target: object,
    against: object = None,
    names: Sequence[str] | None = None,
) -> Target:
    """The `Target` for the output (or features) of a model. target, against: as `bind_target` returns them.

    Raises ValueError for an output that is not finite, and NothingToExplain for a class contrasted with itself.
    """
    if not isinstance(output, Tensor) or output.dim() != 2:
        shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(
            f"{model_name(model)} must give one row of outputs for each image, got {shape}. Give a model that pools "
            'its tokens (in timm: `global_pool="token"` or "avg").'
        )
    require_finite(model, output)
    if isinstance(target, Target):
        return target
    numbers = classes(model, output, target, names)
    others = None
    if against is not None:
        others = classes(model, output, against, names)
        same = numbers[numbers == others]
        if len(same):
            raise NothingToExplain(
                f"Class {same[0].item()} cannot be contrasted with itself. Give another class."
            )
    kind = output_kind(model)
    if kind == "classes" and output.shape[1] == 1:
        kind = "value"
    return Target(numbers, others, kind)


def classes(
    model: nn.Module, logits: Tensor, target: object = None, names: Sequence[str] | None = None
) -> Tensor:
    """(B,) class numbers for (B, classes) logits.

    target: None for the predicted class, one class for all images, or a sequence or 1-D tensor with one for each. A
    class is a number, a name, or one of several synonyms separated by commas as in ImageNet, in any case. names: of all
    classes in order, by default the model's own. Raises ValueError for unknown classes and for a wrong number of them.
    """
    count, total = logits.shape
    if target is None:
        return logits.argmax(-1)
    if hasattr(target, "tolist"):  # tensors, NumPy's arrays and numbers
        target = target.tolist()
    targets = target if isinstance(target, list | tuple) else [target]
    if names is None and any(isinstance(label, str) for label in targets):
        names = label_names(model, total)
    known = []
    for label in targets:
        known.append(_number(model, label, names, total) if isinstance(label, str) else label)
    try:
        numbers = [operator.index(number) for number in known]
    except TypeError as error:
        raise ValueError(f"target must be a class number or name, got {target!r}.") from error
    if len(numbers) not in (1, count):
        raise ValueError(
            f"target must be one class or one for each of {count} images, got {len(numbers)}."
        )
    for number in numbers:
        if not 0 <= number < total:
            raise ValueError(f"{model_name(model)} has classes 0 to {total - 1}, got {number}.")
    return torch.tensor(numbers, device=logits.device).expand(count)


def _number(model: nn.Module, name: str, names: Sequence[str] | None, total: int) -> int:
    """The number of a class by its whole name, one of its synonyms, or its number as a string."""
    key = name.strip().lower()
    labels = names or ()
    numbers = [number for number, label in enumerate(labels) if label.lower() == key]
    if not numbers:
        numbers = [number for number, label in enumerate(labels) if key in _synonyms(label.lower())]
    if len(numbers) == 1:
        return numbers[0]
    numeric = f" Give a number from 0 to {total - 1}."
    if numbers:
        raise ValueError(
            f"{model_name(model)} has several classes called {name!r}, {numbers}.{numeric}"
        )
    if key.removeprefix("-").isdecimal():
        return int(key)
    known = [synonym for label in labels for synonym in _synonyms(label)]
    unnamed = "" if names else " Its classes have no names."
    hint = suggestion(name, known) or numeric
    raise ValueError(f"{model_name(model)} has no class called {name!r}.{unnamed}{hint}")


def _synonyms(label: str) -> list[str]:
    """The names of a class, which ImageNet separates by commas."""
    return [synonym.strip() for synonym in label.split(",")]
