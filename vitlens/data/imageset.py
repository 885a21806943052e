"""Images that fit in memory: one uint8 tensor.

Small data sets fit: Tiny-ImageNet is 1.35 GB. Held on the device, a batch is an index, so the sample order is a
function of (seed, epoch) and a run can be resumed in the middle of an epoch at no cost.

Shapes: N images, b of them in a batch, C = 3 channels, H × W pixels.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vitlens.data.augment import Augment
from vitlens.data.decode import decoded
from vitlens.data.samples import Listing, fingerprint


@dataclass(frozen=True)
class ImageSet:
    """Images and labels of one split.

    `images` is uint8 (N, 3, H, W), `labels` int64 (N,), `class_names` one name per label, in label order. `damaged`
    names the samples that could not be decoded and were left out, each with the reason. `note` says what a user should
    know about how the split came about; mostly there is nothing. `pictures` is the `samples.fingerprint` of what was
    loaded.
    """

    images: Tensor
    labels: Tensor
    class_names: tuple[str, ...]
    damaged: tuple[str, ...] = ()
    note: str = ""
    pictures: str = ""

    def __post_init__(self):
        if self.images.dtype != torch.uint8 or self.images.ndim != 4 or self.images.shape[1] != 3:
            raise ValueError(
                f"Expected uint8 images of shape (N, 3, H, W), got {self.images.dtype} of shape "
                f"{tuple(self.images.shape)}. Convert them to RGB and stack them first."
            )
        check_labels(self.labels, len(self.images), self.class_names)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return tuple(self.images.shape[2:])

    def to(self, device: torch.device | str) -> ImageSet:
        """The same set with its tensors on `device`."""
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))

    def subset(self, n: int, seed: int = 0) -> ImageSet:
        """`n` of the images, drawn without replacement; which ones depends on `seed` alone."""
        return self.chosen(drawn(len(self), n, seed))

    def chosen(self, rows: Tensor) -> ImageSet:
        """The images at the places `rows`, int64 (n,)."""
        rows = rows.to(self.labels.device)
        return replace(self, images=self.images[rows], labels=self.labels[rows])

    def stand_ins(self) -> Tensor:
        """Whether each image stands in for a damaged one, bool (N,): never, since damaged ones are left out."""
        return torch.zeros(len(self), dtype=torch.bool)

    def batches(
        self, rows: Iterable[Tensor], augment: Augment | None = None, key: tuple[int, ...] = ()
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """For each index tensor (b,) in `rows`: images uint8 (b, 3, H, W) and labels int64 (b,), on the set's device.

        Only an index, so the host never waits; all of `augment` is left to the caller, as `remaining` says.
        """
        for row in rows:
            row = row.to(self.labels.device, non_blocking=True)
            yield self.images[row], self.labels[row]

    def remaining(self, augment: Augment) -> Augment:
        """What is still to be done to the batches: all of `augment`."""
        return augment


def check_labels(labels: Tensor, n: int, class_names: tuple[str, ...]) -> None:
    """Raise `ValueError` unless there are `n` int64 labels, each the number of a class."""
    if labels.dtype != torch.int64 or labels.shape != (n,):
        raise ValueError(
            f"Expected one int64 label for each of {n} images, got {labels.dtype} of shape {tuple(labels.shape)}."
        )
    if n and not 0 <= int(labels.min()) <= int(labels.max()) < len(class_names):
        raise ValueError(
            f"Labels must lie in 0…{len(class_names) - 1}, one for each of {len(class_names)} classes, but these run "
            f"from {int(labels.min())} to {int(labels.max())}."
        )


def drawn(size: int, n: int, seed: int) -> Tensor:
    """`n` different numbers below `size`, int64 (n,), that depend on `seed` alone."""
    if not 0 < n <= size:
        raise ValueError(f"A subset of {size} images has between 1 and {size} of them, got {n}.")
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))[:n]


def held(
    listing: Listing, what: str, size: int | None, shape: Callable | None, on_damaged: str, workers: int
) -> ImageSet:
    """The samples of `listing` decoded, all at once and in order; `what` they are goes into messages."""
    labels = torch.as_tensor(listing.labels, dtype=torch.int64)
    n = len(listing.samples)
    check_labels(labels, n, listing.class_names)  # before minutes of decoding
    # Filled in place where the size is known: a list of images, stacked, would take the memory twice.
    images = [None] * n if size is None else torch.empty(n, 3, size, size, dtype=torch.uint8)
    damaged: dict[int, str] = {}

    def decode_chunk(chunk: Iterable[int]) -> None:
        for i in chunk:
            image = decoded(listing.samples, i)
            if isinstance(image, str):
                damaged[i] = image
            else:
                images[i] = shape(image) if shape else image

    # In threads: torchvision's decoders leave Python's lock; a core does some 9,000 64-px JPEGs a second.
    chunks = [range(i, min(i + 256, n)) for i in range(0, n, 256)]
    with warnings.catch_warnings(), ThreadPoolExecutor(max(1, workers)) as pool:
        warnings.simplefilter("ignore", DeprecationWarning)  # torchvision ≥ 0.29 means to give its decoders away
        list(pool.map(decode_chunk, chunks))
    reasons = tuple(damaged[i] for i in sorted(damaged))
    if damaged and on_damaged == "raise":
        raise ValueError(
            f"{len(damaged)} of {n} samples cannot be decoded, the first being {reasons[0]}. Repair them, or leave "
            "them out (--skip-damaged, in Python on_damaged='skip')."
        )
    kept = [i for i in range(n) if i not in damaged]
    if not kept:
        raise ValueError(f"No image of {what} can be decoded.")
    if size is None:
        images = _stacked([images[i] for i in kept], what)
    elif damaged:
        images = images[kept]
    return ImageSet(images, labels[kept], listing.class_names, reasons, listing.note, fingerprint(listing.samples))


def _stacked(images: list[Tensor], what: str) -> Tensor:
    shapes = {tuple(image.shape) for image in images}
    if len(shapes) > 1:
        sizes = ", ".join(f"{w}×{h}" for _, h, w in sorted(shapes)[:3])
        raise ValueError(
            f"The images of {what} have {len(shapes)} sizes ({sizes}, …), but one tensor holds one size. Pass size=…, "
            "the side in pixels to which they are resized and cropped."
        )
    return torch.stack(images)
