"""Pictures for a report: listed from folders, and prepared as a model wants them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from torch import Tensor, nn

from vitlens.images import ImageError, hidden, is_image, load_image
from vitlens.models import built_size, preprocess

SHARP = 200
"""Dots per inch of a figure in a file: twice the pixels that it is shown at."""


def image_files(folder: Path) -> list[tuple[str, Path]]:
    """(name, path) of all image files in a folder and below it, sorted. Raises ValueError if there are none."""
    if not folder.is_dir():
        raise ValueError(f"There is no folder {folder} to read images from.")
    files = sorted(p for p in folder.rglob("*") if p.is_file() and not hidden(p.relative_to(folder)) and is_image(p))
    if not files:
        raise ValueError(f"The folder {folder} holds no images that Pillow opens.")
    return [(str(p.relative_to(folder)), p) for p in files]


def prepared(
    model: nn.Module,
    images: Iterable[tuple[str, object]],
    on_error: Callable[[str], None] | None = None,
    on_note: Callable[[str], None] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, (1, C, H, W)) of each picture, on the model's device and in its dtype.

    images: (name, source) pairs; a source is anything that `load_image` takes. on_error: called with a message for a
    picture that cannot be used, which is then left out; without it the ImageError is raised. on_note: see `load_image`.
    """
    like, size = next(model.parameters()), built_size(model)
    for pair in images:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ValueError(f"Expected pairs (name, picture), as in [('cat', 'cat.jpg')], got {pair!r:.80}.")
        name, source = pair
        try:
            yield name, _prepared(model, name, load_image(source, on_note=on_note), size).to(like)
        except ImageError as error:
            if on_error is None:
                raise
            on_error(str(error))


def _prepared(model: nn.Module, name: str, picture, size) -> Tensor:
    try:
        return preprocess(model, picture, size=size)
    except ImageError as error:
        raise ImageError(f"{name} cannot be used. {error}") from error
