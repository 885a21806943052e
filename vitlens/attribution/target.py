"""Targets: the score of each image that a map explains.

A target is a class, a name or a function. A class is a number, a name, a sequence with one for each image, or None for
the predicted class. Its score is its logit. A function takes the model's output, (B, outputs), and returns (B,) scores.
A function with a true attribute `of_features`, as `like` and `text` return, takes the features instead: the input of
the classifier (in timm `forward_head(…, pre_logits=True)`), or the output of a model without one.

Shapes: B batch, D width of the features.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlens.models import built_size, label_names, output_kind, preprocess, scores
from vitlens.models.classes import require_classes
from vitlens.names import suggestion
from vitlens.recorder.forward import eval_mode, pooled_features, require_finite
from vitlens.recorder.supported import embed_texts, model_name


class NothingToExplain(ValueError):
    """Error for a target without slope: a class contrasted with itself, or an image compared with itself."""


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
            return {"similarity": f"{self.called(0)} ({self.function.unit})"}
        if self.function is not None:
            return {"score": self.called(0)}
        among, less = (
            ("", "") if self.against is None else (" among the two", " less that of the other")
        )
        if self.outputs == "value":
            return {"value": f"the value of the output{less}"}
        logit = {"logit": f"the logit of the class{less}"}
        if self.outputs == "independent" and self.against is not None:
            return logit
        return {"probability": f"the probability of the class{among}"} | logit

    def score(self, output: Tensor) -> Tensor:
        """(B,) logits of the classes minus those of the contrast, or scores of the function."""
        if self.function is not None:
            return self.function(output)
        score = output.gather(-1, self.numbers[:, None])[:, 0]
        return (
            score
            if self.against is None
            else score - output.gather(-1, self.against[:, None])[:, 0]
        )

    def measured(self, output: Tensor, measure: str) -> Tensor:
        """(B,) values of one of the `measures`. With a contrast, the probability is that among the two classes."""
        if measure != "probability":
            return self.score(output)
        if self.against is not None:
            return self.score(output).sigmoid()
        return scores(self.outputs, output).gather(-1, self.numbers[:, None])[:, 0]

    def require_slope(self, output: Tensor) -> None:
        """Raise NothingToExplain if a similarity is at its maximum."""
        if isinstance(self.function, Similarity):
            self.function.require_slope(output)

    def of(self, images: Tensor) -> Target:
        """The targets of the images with these numbers, (N,)."""
        numbers, against = (
            part if part is None else part[images] for part in (self.numbers, self.against)
        )
        return replace(self, numbers=numbers, against=against)

    def called(self, image: int) -> str:
        if self.function is None:
            return f"class {self.numbers[image].item()}"
        return getattr(self.function, "name", None) or getattr(
            self.function, "__name__", "the score"
        )


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
        return f"the similarity to {self.to}{f' minus that to {self.than}' if self.than else ''}"

    def bound(self, model: nn.Module) -> Similarity:
        """The same function with its vector in the features of this model."""
        if self.vector is not None:
            return self
        with eval_mode(model), torch.inference_mode(False), torch.no_grad():
            vector = self.embed(model)
        if not (vector.isfinite().all() and vector.any()):
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
        unit, vector = _unit(features), self.vector.to(_wide(features))
        across = vector - (unit @ vector)[:, None] * unit
        if (across.norm(dim=-1) <= torch.finfo(features.dtype).eps ** 0.5 * vector.norm()).any():
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
    sources = images if isinstance(images, list | tuple) else [images]
    count = sum(len(source) if isinstance(source, Tensor) else 1 for source in sources)
    if not name and count > 1:
        name = f"the mean of {count} images"
    elif not name:
        name = Path(sources[0]).name if isinstance(sources[0], str | Path) else "the given image"

    def embed(model: nn.Module) -> Tensor:
        size, to = built_size(model), next(model.parameters())
        batches = [
            image if isinstance(image, Tensor) else preprocess(model, image, size=size)
            for image in sources
        ]
        return _unit(
            torch.cat(
                [_unit(pooled_features(model, batch.detach().to(to))) for batch in batches]
            ).mean(0)
        )

    shown = [(Path(each).name if isinstance(each, str | Path) else name, each) for each in sources]
    return Similarity(
        name, embed, images=tuple(pair for pair in shown if not isinstance(pair[1], Tensor))
    )


def text(prompt: str, *, tokenizer: Callable | None = None) -> Similarity:
    """Similarity to a text: the cosine of the image embedding and the text embedding, as a target.

    >>> vitlens.attribution.text("a photo of a cat").name
    'the similarity to “a photo of a cat”'

    For models with a text tower: CLIP and SigLIP of open_clip and transformers. tokenizer: a function from a list of
    prompts to the input of the text tower, by default the model's own. Raises ValueError for a model without a text
    tower, and OSError without a tokenizer.
    """
    return Similarity(
        f"“{prompt}”", lambda model: _unit(embed_texts(model, [prompt], tokenizer))[0]
    )


def _wide(features: Tensor) -> Tensor:
    return features.to(torch.promote_types(features.dtype, torch.float32))


def _unit(features: Tensor) -> Tensor:
    return F.normalize(_wide(features), dim=-1)


def of_features(target: object) -> bool:
    """True for a target that is computed from features, so that the model needs no classes."""
    return getattr(target, "of_features", False)


def bound(model: nn.Module, target: object, against: object = None) -> tuple[object, object]:
    """target and against, with a function and its contrast as one `Target`. Classes are returned unchanged.

    Raises ValueError for classes of a model without a classifier.
    """
    if isinstance(target, Target):
        return target, against
    if not callable(target):
        require_classes(model)
        return target, against
    one, other = (f.bound(model) if isinstance(f, Similarity) else f for f in (target, against))
    if other is None:
        return Target(function=one), None
    if not callable(other) or of_features(one) != of_features(other):
        raise ValueError(
            "A contrast is between two classes or between two functions of the same input."
        )
    if isinstance(one, Similarity) and isinstance(other, Similarity):
        return Target(function=one - other), None

    def difference(output: Tensor) -> Tensor:
        return one(output) - other(output)

    difference.of_features = of_features(one)
    return Target(function=difference), None


def resolved(
    model: nn.Module,
    output: Tensor,
    target: object,
    against: object = None,
    names: Sequence[str] | None = None,
) -> Target:
    """The `Target` for the output (or features) of a model. target, against: as `bound` returns them.

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
    others = None if against is None else classes(model, output, against, names)
    if others is not None and (same := numbers == others).any():
        raise NothingToExplain(
            f"Class {numbers[same][0].item()} cannot be contrasted with itself. Give another class."
        )
    kind = output_kind(model)
    return Target(numbers, others, "value" if kind == "classes" and output.shape[1] == 1 else kind)


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
    target = (
        target.tolist() if hasattr(target, "tolist") else target
    )  # tensors, NumPy's arrays and numbers
    targets = target if isinstance(target, list | tuple) else [target]
    if names is None and any(isinstance(label, str) for label in targets):
        names = label_names(model, total)
    known = [
        _number(model, label, names, total) if isinstance(label, str) else label
        for label in targets
    ]
    try:
        numbers = [operator.index(number) for number in known]
    except TypeError as error:
        raise ValueError(f"target must be a class number or name, got {target!r}.") from error
    if len(numbers) not in (1, count):
        raise ValueError(
            f"target must be one class or one for each of {count} images, got {len(numbers)}."
        )
    if outside := [number for number in numbers if not 0 <= number < total]:
        raise ValueError(f"{model_name(model)} has classes 0 to {total - 1}, got {outside[0]}.")
    return torch.tensor(numbers, device=logits.device).expand(count)


def _number(model: nn.Module, name: str, names: Sequence[str] | None, total: int) -> int:
    """The number of a class by its whole name, one of its synonyms, or its number as a string."""
    key = name.strip().lower()
    labels = [label.lower() for label in names or ()]
    synonyms = [[part.strip() for part in label.split(",")] for label in labels]
    numbers = [i for i, label in enumerate(labels) if label == key]
    numbers = numbers or [i for i, parts in enumerate(synonyms) if key in parts]
    if len(numbers) == 1:
        return numbers[0]
    if not numbers and key.removeprefix("-").isdecimal():
        return int(key)
    problem = (
        f"has several classes called {name!r}, {numbers}"
        if numbers
        else f"has no class called {name!r}"
    )
    close = [] if numbers else [part.strip() for label in names or () for part in label.split(",")]
    hint = suggestion(name, close) or f" Give a number from 0 to {total - 1}."
    unnamed = "" if names else " Its classes have no names."
    raise ValueError(f"{model_name(model)} {problem}.{unnamed}{hint}")
