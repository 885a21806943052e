"""Targets: the score of each image that a map explains.

A target is a class or a function. A class is a number, a name, a sequence with one for each image, or None for the
predicted class; its score is its logit. A function takes the model's output, (B, outputs), and returns (B,) scores. A
function with a true attribute `of_features`, as `like` and `text` return, takes the features instead: the input of the
classifier (in timm `forward_head(…, pre_logits=True)`), or the output of a model without one.

Shapes: B batch, D width of the features.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from vitlens.models import built_size, label_names, output_kind, preprocess, scores
from vitlens.recorder.forward import evaluating
from vitlens.recorder.supported import embed_texts, model_name, pooled


class NothingToExplain(ValueError):
    """The target has no slope: a class contrasted with itself, or an image compared with itself."""


@dataclass(frozen=True)
class ClassTarget:
    """(B,) class numbers, and (B,) numbers of the classes that they are contrasted with, or None."""

    numbers: Tensor
    against: Tensor | None = None
    outputs: str = "classes"
    """Meaning of the model's outputs, one of `vitlens.models.OUTPUTS`."""

    of_features = False

    @property
    def measures(self) -> Mapping[str, str]:
        """Scores that insertion and deletion may measure, with descriptions. The first is the default."""
        among, less = ("", "") if self.against is None else (" among the two", " less that of the other")
        return {"probability": f"the probability of the class{among}", "logit": f"the logit of the class{less}"}

    def score(self, logits: Tensor) -> Tensor:
        """(B,) logits of the classes, less those of the contrast."""
        score = logits.gather(-1, self.numbers[:, None])[:, 0]
        return score if self.against is None else score - logits.gather(-1, self.against[:, None])[:, 0]

    linear = score

    def measured(self, logits: Tensor, measure: str) -> Tensor:
        """(B,) the score, or the probability among all classes, or among the two of a contrast."""
        if measure == "logit":
            return self.score(logits)
        if self.against is not None:
            return self.score(logits).sigmoid()
        return scores(self.outputs, logits).gather(-1, self.numbers[:, None])[:, 0]

    def of(self, images: Tensor) -> ClassTarget:
        """The target of some images, by their (N,) numbers."""
        against = None if self.against is None else self.against[images]
        return ClassTarget(self.numbers[images], against, self.outputs)

    def called(self, image: int) -> str:
        return f"class {self.numbers[image].item()}"

    def require_slope(self, logits: Tensor) -> None:
        """A logit has no maximum."""


@dataclass(frozen=True)
class FunctionTarget:
    """The score of a function, the same for all images. See `ClassTarget` for the methods."""

    function: Callable[[Tensor], Tensor]

    @property
    def of_features(self) -> bool:
        return getattr(self.function, "of_features", False)

    @property
    def name(self) -> str:
        return getattr(self.function, "name", None) or getattr(self.function, "__name__", "the score")

    @property
    def measures(self) -> Mapping[str, str]:
        if isinstance(self.function, Similarity):
            return {"similarity": f"{self.name} ({self.function.unit})"}
        return {"score": self.name}

    def score(self, output: Tensor) -> Tensor:
        return self.function(output)

    def linear(self, output: Tensor) -> Tensor:
        """(B,) the same scores, as a linear function of the output for autograd."""
        return getattr(self.function, "linear", self.function)(output)

    def measured(self, output: Tensor, measure: str) -> Tensor:
        return self.function(output)

    def of(self, images: Tensor) -> FunctionTarget:
        return self

    def called(self, image: int) -> str:
        return self.name

    def require_slope(self, output: Tensor) -> None:
        if isinstance(self.function, Similarity):
            self.function.require_slope(output)


Target = ClassTarget | FunctionTarget


@dataclass(frozen=True)
class Similarity:
    """A target: the cosine of the features of an image with those of another image or of a text.

    to: what is compared, in words. embed: model → unit vector, (D,). vector: that vector, once the model is known, or
    the difference of two such vectors. unit: the unit of the score.
    """

    to: str
    embed: Callable[[nn.Module], Tensor] | None = None
    vector: Tensor | None = None
    unit: str = "a cosine, at most 1"

    of_features = True

    @property
    def name(self) -> str:
        return f"the similarity to {self.to}"

    def bound(self, model: nn.Module) -> Similarity:
        """The same target, with its vector in the space of this model's features."""
        return self if self.vector is not None else replace(self, vector=self.embed(model))

    def __sub__(self, other: Similarity) -> Similarity:
        with torch.inference_mode(False):  # tensors made in that mode have no gradient
            vector = self.vector - other.vector
        if not vector.any():
            raise NothingToExplain(f"{self.to} cannot be contrasted with itself. Give another image or text.")
        return Similarity(f"{self.to} less that to {other.to}", None, vector, "a difference of two cosines")

    def __call__(self, features: Tensor) -> Tensor:
        features = _wide(features)
        return features @ self.vector.to(features) / features.norm(dim=-1)

    def linear(self, features: Tensor) -> Tensor:
        features = _wide(features)
        with torch._C.DisableTorchFunction():
            length = features.detach().norm(dim=-1)
        return features @ self.vector.to(features) / length

    def require_slope(self, features: Tensor) -> None:
        """Raise NothingToExplain at a cosine of ±1: its gradient is nothing but rounding errors."""
        unit = _wide(features) / _wide(features).norm(dim=-1, keepdim=True)
        vector = self.vector.to(unit)
        across = vector - (unit @ vector)[:, None] * unit
        if (across.norm(dim=-1) <= torch.finfo(features.dtype).eps ** 0.5 * vector.norm()).any():
            raise NothingToExplain(
                f"{self.name} is at its maximum, so every gradient is zero: the image is compared with itself. Give "
                "another image, or use a method without gradients, such as occlusion."
            )


def like(images: object, *, name: str = "") -> Similarity:
    """Similarity to an image: the cosine of the two images' features in the same model.

    images: what `load_image` takes, shown to the model as `preprocess` does, or a prepared batch (1, C, H, W). Of
    several, a list or a batch (N, C, H, W), it is the cosine with the mean of their unit features. name: what to call
    them, by default the name of the file. Raises ImageError, once the model is known, for a file that is not an image.
    """
    several = isinstance(images, list | tuple) or (isinstance(images, Tensor) and len(images) > 1)
    sources = list(images) if isinstance(images, list | tuple) else [images]
    if len(sources) == 1:
        named = Path(sources[0]).name if isinstance(sources[0], str | Path) else "the given image"
    count = sum(len(source) if isinstance(source, Tensor) else 1 for source in sources)
    name = name or (f"the mean of {count} images" if several and count > 1 else named)

    def embed(model: nn.Module) -> Tensor:
        units = []
        for source in sources:
            batch = source if isinstance(source, Tensor) else preprocess(model, source, size=built_size(model))
            with evaluating(model), torch.inference_mode(False), torch.no_grad():
                units.append(_unit(pooled(model, batch.detach().to(next(model.parameters()))), name))
        return _unit(torch.cat(units).mean(0), name)

    return Similarity(name, embed)


def text(prompt: str, *, tokenizer: Callable | None = None) -> Similarity:
    """Similarity to a text: the cosine of the image embedding and the text embedding.

    For models with a text tower: CLIP and SigLIP of open_clip and transformers. tokenizer: a function from a list of
    prompts to the input of the text tower, by default the model's own. Raises ValueError for a model without a text
    tower, and OSError without a tokenizer.
    """

    def embed(model: nn.Module) -> Tensor:
        with evaluating(model), torch.inference_mode(False), torch.no_grad():
            return _unit(embed_texts(model, [prompt], tokenizer), prompt)[0]

    return Similarity(f"“{prompt}”", embed)


def _wide(features: Tensor) -> Tensor:
    return features.to(torch.promote_types(features.dtype, torch.float32))


def _unit(features: Tensor, name: str) -> Tensor:
    """Features (…, D) divided by their lengths. Raises ValueError for features that are zero or not finite."""
    unit = _wide(features) / _wide(features).norm(dim=-1, keepdim=True)
    if not unit.isfinite().all():
        raise ValueError(f"The features of {name} are zero or not finite, so no image is similar to it.")
    return unit


def of_features(target: object) -> bool:
    """True for a target that is computed from features, so that the model needs no classes."""
    return getattr(target, "of_features", False)


def of_classes(target: object) -> bool:
    """True for a target that is a class, so that the model needs classes."""
    return not (callable(target) or isinstance(target, FunctionTarget))


def bound(model: nn.Module, target: object, against: object = None) -> tuple[object, object]:
    """target and against, with a function (and its contrast) as one `FunctionTarget`. Classes are returned as given."""
    if not callable(target):
        return target, against
    if against is not None and not (callable(against) and of_features(target) == of_features(against)):
        raise ValueError("A contrast is between two classes or between two functions of the same input.")
    target, against = (f.bound(model) if isinstance(f, Similarity) else f for f in (target, against))
    if against is None:
        return FunctionTarget(target), None
    if isinstance(target, Similarity) and isinstance(against, Similarity):
        return FunctionTarget(target - against), None

    def difference(output: Tensor) -> Tensor:
        return target(output) - against(output)

    difference.of_features = of_features(target)
    return FunctionTarget(difference), None


def resolved(
    model: nn.Module, output: Tensor, target: object, against: object = None, names: Sequence[str] | None = None
) -> Target:
    """The `Target` for the output (or features) of a model. target, against: `bound`, or a `Target`.

    Raises ValueError for an output that is not finite, so that no map of it is shown, and NothingToExplain for a class
    contrasted with itself.
    """
    if not isinstance(output, Tensor) or output.dim() != 2:
        shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(
            f"{model_name(model)} must give one row of outputs for each image, got {shape}. Give a model that pools "
            'its tokens (in timm: `global_pool="token"` or "avg").'
        )
    if not (output < torch.inf).all():  # −∞ is the logit of a class that is excluded
        raise ValueError(
            f"The outputs of {model_name(model)} are not finite. Its weights may be damaged, its precision too low, or "
            "the images not normalized."
        )
    if isinstance(target, Target):
        return target
    numbers = classes(model, output, target, names)
    if against is None:
        return ClassTarget(numbers, outputs=output_kind(model))
    others = classes(model, output, against, names)
    if (same := numbers == others).any():
        raise NothingToExplain(f"Class {numbers[same][0].item()} cannot be contrasted with itself. Give another class.")
    return ClassTarget(numbers, others, output_kind(model))


def classes(model: nn.Module, logits: Tensor, target: object = None, names: Sequence[str] | None = None) -> Tensor:
    """(B,) class numbers for (B, classes) logits.

    target: None for the predicted class, one class for all images, or a sequence or 1-D tensor with one for each. A
    class is a number or a name. names: of all classes in order, by default the model's own. Of a name with synonyms,
    separated by commas as in ImageNet, one is enough; case is ignored. Raises ValueError for a class that the model
    does not have.
    """
    count, total = logits.shape
    if target is None:
        return logits.argmax(-1)
    target = target.tolist() if hasattr(target, "tolist") else target  # tensors, NumPy's arrays and numbers
    each = list(target) if isinstance(target, list | tuple) else [target] * count
    if len(each) != count:
        raise ValueError(f"Expected one class, or one for each of {count} images, got {len(each)}.")
    if any(isinstance(t, str) for t in each) and names is None:
        names = label_names(model, total)
    numbers = [_by_name(model, t, names, total) if isinstance(t, str) else operator.index(t) for t in each]
    if wrong := [number for number in numbers if not 0 <= number < total]:
        raise ValueError(f"{model_name(model)} has classes 0 to {total - 1}, got {wrong[0]}.")
    return torch.tensor(numbers, device=logits.device)


def _by_name(model: nn.Module, target: str, names: Sequence[str] | None, total: int) -> int:
    wanted = target.strip().lower()
    synonyms = [[name.lower(), *(part.strip() for part in name.lower().split(","))] for name in names or ()]
    numbers = [i for i, parts in enumerate(synonyms) if parts[0] == wanted]
    numbers = numbers or [i for i, parts in enumerate(synonyms) if wanted in parts]
    if len(numbers) > 1:
        raise ValueError(f"Several classes are called {target!r}: {numbers}. Give the number of one.")
    if numbers:
        return numbers[0]
    if wanted.removeprefix("-").isdecimal():
        return int(wanted)
    known = {word: part for parts in synonyms for part in parts[1:] for word in (*part.split(), part)}
    close = {known[word]: None for word in difflib.get_close_matches(wanted, known, n=3)}
    hint = f"Did you mean {', '.join(close)}?" if close else f"Give a number from 0 to {total - 1}."
    unnamed = "" if names else " Its classes have no names."
    raise ValueError(f"{model_name(model)} has no class called {target!r}.{unnamed} {hint}")
