"""Targets computed from features: similarity to pictures or a text, the product with a direction, the length.

    relevance(model, images, like("tabby.jpg"))                            # which patches make it like this picture
    relevance(model, images, text("a cat"), against=text("a dog"))         # of CLIP and SigLIP

They need no classes, so DINO and `num_classes=0` can be explained, too. The features are the input of the classifier
(in timm `forward_head(…, pre_logits=True)`, as in `vitlens.evaluate`), or the output of a model without one: for CLIP
and SigLIP the image embedding, after its projection. Each function returns a `Question`, which becomes a `Target` once
the model is known; one question holds for all images of a batch.

Shapes: B batch, D width of the features, N pictures or texts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from vitlens.attribution.linear import held
from vitlens.attribution.target import NothingToAsk, Question, Target
from vitlens.models import built_size, preprocess
from vitlens.recorder.running import evaluating, require_images, require_pooled, taking
from vitlens.recorder.supported import family, known, model_name, unwrap

SIMILARITY, PRODUCT, LENGTH = "similarity", "product", "length"


@dataclass(frozen=True)
class FeatureTarget(Target):
    """A score of the features f, (B, D), of each image.

    measure: "similarity" is f·v / |f|, a cosine where v has length 1, and the difference of two cosines where it is the
    difference of two such vectors; "product" is f·v; "length" is |f|. It is measured as it is: insertion and deletion
    plot the cosine itself, which need not be 0 for a covered picture. vector: v, (D,), None for a length. name: the
    score in a sentence. scale: its unit.
    """

    measure: str
    vector: Tensor | None
    name: str
    scale: str

    of_features = True

    @property
    def measures(self) -> Mapping[str, str]:
        return {self.measure: f"{self.name} ({self.scale})"}

    def score(self, said: Tensor) -> Tensor:
        features = _wide(said)
        if self.measure == PRODUCT:
            return features @ self.vector.to(features)
        lengths = _lengths(said)
        return lengths if self.measure == LENGTH else features @ self.vector.to(features) / lengths

    def linear(self, said: Tensor) -> Tensor:
        """(B,) the score, the length (or for a length the direction) of the features a constant, as norms' are."""
        features = _wide(said)
        if self.measure == LENGTH:
            return (features * held(features / _lengths(said)[:, None])).sum(-1)
        product = features @ self.vector.to(features)
        return product if self.measure == PRODUCT else product / held(_lengths(said))

    def measured(self, said: Tensor, measure: str) -> Tensor:
        return self.score(said)

    def of(self, images: Tensor) -> FeatureTarget:
        return self

    def called(self, image: int) -> str:
        return self.name

    def require(self, model: nn.Module, said: Tensor) -> None:
        """Raise ValueError unless the features are finite, (B, D), and as wide as the vector."""
        require_pooled(model, said)
        if not said.isfinite().all():
            raise ValueError(
                f"The features of {model_name(model)} are not finite numbers, so there is nothing to explain. Its "
                "weights may be damaged, its precision too low, or the images not normalized as it wants them."
            )
        if self.vector is not None and len(self.vector) != said.shape[1]:
            raise ValueError(
                f"The features of {model_name(model)} have {said.shape[1]} numbers, but a direction of "
                f"{len(self.vector)} was given. Give one of {said.shape[1]}."
            )

    def require_slope(self, said: Tensor) -> None:
        """Raise NothingToAsk if a cosine is 1 or −1, where its gradient is only rounding error."""
        if self.measure != SIMILARITY:
            return
        features, vector = _wide(said) / _lengths(said)[:, None], self.vector.to(_wide(said))
        across = vector - (features @ vector)[:, None] * features
        flat = across.norm(dim=-1) <= torch.finfo(said.dtype).eps ** 0.5 * vector.norm()
        if flat.any():
            raise NothingToAsk(
                f"{self.name[0].upper()}{self.name[1:]} cannot get any greater: it is that of a picture to itself, and "
                "every gradient is zero. Give another picture, or use a method without gradients, such as occlusion."
            )


def _wide(said: Tensor) -> Tensor:
    return said.to(torch.promote_types(said.dtype, torch.float32))


def _lengths(said: Tensor) -> Tensor:
    """(B,) L2 norms of features. Raises ValueError if one is 0, because its cosine is undefined."""
    lengths = _wide(said).norm(dim=-1)
    if not lengths.all():
        raise ValueError(
            "The features of a picture are all zero, so they cannot be compared with others. Check whether a layer of "
            "the model has weights that are all zero."
        )
    return lengths


@dataclass(frozen=True)
class _Asked(Question):
    """measure: of `FeatureTarget`. vector: model → v, (D,). to: what v is, in words."""

    measure: str
    vector: Callable[[nn.Module], Tensor | None]
    to: str

    def bound(self, model: nn.Module, against: Question | None = None) -> FeatureTarget:
        model = unwrap(model)
        if not known(model):
            raise ValueError(f"vitlens does not know what the features of {model_name(model)} are.")
        if against is None:
            return self.along(self.vector(model))
        if self.measure == LENGTH or self.measure != against.measure:
            name, other = (_NAMED[each.measure][0].format(each.to) for each in (self, against))
            raise ValueError(
                f"{name[0].upper()}{name[1:]} cannot be contrasted with {other}. Contrast two similarities, or two "
                "directions."
            )
        return self.along(self.vector(model), against, against.vector(model))

    def along(self, vector: Tensor | None, against: Question | None = None, other: Tensor | None = None) -> Target:
        """The target for a known vector, or for its contrast with another. Raises NothingToAsk if the two are equal."""
        name, ends = _NAMED[self.measure]
        if against is None:
            return FeatureTarget(self.measure, vector, name.format(self.to), ends[0])
        if not (vector := vector - other).any():
            raise NothingToAsk(f"{self.to[0].upper()}{self.to[1:]} cannot be contrasted with itself. Give another "
                               "picture or text to `against`.")  # fmt: skip
        return FeatureTarget(self.measure, vector, name.format(f"{self.to} less that to {against.to}"), ends[1])


_NAMED = {
    SIMILARITY: ("the similarity to {}", ("a cosine, at most 1", "a difference of two cosines")),
    PRODUCT: ("the product of the features with {}", ("a dot product", "a difference of two dot products")),
    LENGTH: ("the length of the features", ("in the units of the features", "")),
}


def like(picture: object, *, name: str = "") -> Question:
    """Similarity to another picture: the cosine of the two pictures' features in the same model.

    picture: what `load_image` takes, shown to the model as `preprocess` does, or a prepared batch of one, (1, C, H, W).
    name: what to call it; by default the name of its file. Raises ImageError for what is no picture, once a model is
    asked, and ValueError for several pictures and for features that are all zero.
    """
    return _Asked(SIMILARITY, lambda model: _centroid(model, [picture]), name or _file_name(picture))


def centroid(pictures: Iterable[object] | Tensor, *, name: str = "") -> Question:
    """Similarity to several pictures: the cosine with the mean of their features, each scaled to length 1.

    pictures: a list of what `like` takes, or a prepared batch (N, C, H, W). With one picture it is `like`.
    """
    sources = list(pictures.split(1)) if isinstance(pictures, Tensor) else list(pictures)
    if not sources:
        raise ValueError("A centroid needs at least one picture, got none.")
    if len(sources) == 1:
        return like(sources[0], name=name)
    return _Asked(SIMILARITY, lambda model: _centroid(model, sources), name or f"the mean of {len(sources)} pictures")


def direction(vector: Tensor, *, name: str = "the direction") -> Question:
    """Score along a direction: the dot product of the features and a vector, (D,), used as given.

    A row of a linear classifier gives the map of its class. Raises ValueError for a vector that is not finite or zero.
    """
    vector = torch.as_tensor(vector).detach()
    if vector.dim() != 1 or not vector.is_floating_point() or not vector.isfinite().all() or not vector.any():
        raise ValueError(
            f"A direction is a vector of finite numbers, shape (D,), that are not all zero, got {tuple(vector.shape)} "
            f"{vector.dtype}."
        )
    return _Asked(PRODUCT, lambda model: vector.to(next(model.parameters()).device), name)


def norm() -> Question:
    """The length (L2 norm) of the features."""
    return _Asked(LENGTH, lambda model: None, "")


def text(prompt: str, *, tokenizer: Callable | None = None) -> Question:
    """Similarity to a text: the cosine between the image embedding and the text embedding.

    For models with a text tower: CLIP and SigLIP of open_clip and transformers.

    tokenizer: a function from a list of prompts to the input of the text tower; by default the model's own, if its
    files are on this disk. Raises ValueError for a model without a text tower, and OSError if there is no tokenizer.
    """
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError(f'Expected a non-empty text such as "a photo of a cat", got {prompt!r}.')

    def embedded(model: nn.Module) -> Tensor:
        with _running(model):
            return _unit(family(model).texts([prompt], tokenizer), f"“{prompt}”")[0]

    return _Asked(SIMILARITY, embedded, f"“{prompt}”")


def _centroid(model: nn.Module, sources: list) -> Tensor:
    """(D,) the normalized mean of the pictures' normalized features."""
    found = []
    for source in sources:
        if isinstance(source, Tensor) and source.dim() == 4:
            images = source.detach()
        else:
            images = preprocess(model, source, size=built_size(model))
        require_images(images, model)
        if len(images) != 1:
            raise ValueError(
                f"Expected one picture, or a prepared batch of one, (1, C, H, W), got {len(images)} of them. "
                "`centroid` takes several: a list of pictures, or one batch."
            )
        with _running(model):
            features = family(model).pooled(images.to(next(model.parameters())))
        FeatureTarget(LENGTH, None, "", "").require(model, features)
        found.append(_unit(features, _file_name(source)))
    return _unit(torch.cat(found).mean(0, keepdim=True), "the mean of the pictures")[0]


def _unit(features: Tensor, name: str) -> Tensor:
    """(N, D) features divided by their lengths. Raises ValueError if one of them is all zero."""
    lengths = _wide(features).norm(dim=-1, keepdim=True)
    if not lengths.all():
        raise ValueError(f"The features of {name} are all zero, so similarity to it is undefined. Give another one.")
    return _wide(features) / lengths


def _file_name(source: object) -> str:
    return Path(source).name if isinstance(source, str | Path) else "the given picture"


@contextlib.contextmanager
def _running(model: nn.Module) -> Iterator[None]:
    """Run the model in eval mode and without gradients in this block; autograd can use its outputs later."""
    with taking(model), evaluating(model), torch.inference_mode(False), torch.no_grad():
        yield
