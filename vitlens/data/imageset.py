"""Images that fit in memory: one uint8 tensor.

Small data sets fit: Tiny-ImageNet is 1.35 GB. Held on the device, a batch is an index, so the sample order is a
function of (seed, epoch) and a run can be resumed in the middle of an epoch at no cost.

Shapes: N images, b of them in a batch, C = 3 channels, H × W pixels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vitlens.data.augment import Augment


@dataclass(frozen=True)
class ImageSet:
    """Images and labels of one split.

    ``images`` is uint8 (N, 3, H, W), ``labels`` int64 (N,), ``class_names`` one name per label, in label order.
    ``damaged`` names the samples that could not be decoded and were left out, each with the reason. ``note`` says what
    a user should know about how the split came about; mostly there is nothing.
    """

    images: Tensor
    labels: Tensor
    class_names: tuple[str, ...]
    damaged: tuple[str, ...] = ()
    note: str = ""

    def __post_init__(self):
        if self.images.dtype != torch.uint8 or self.images.ndim != 4 or self.images.shape[1] != 3:
            raise ValueError(
                f"An image set wants uint8 images of shape (N, 3, H, W); these are {self.images.dtype} of shape "
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
        """The same set with its tensors on ``device``."""
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))

    def subset(self, n: int, seed: int = 0) -> ImageSet:
        """``n`` of the images, drawn without replacement as a function of ``seed`` alone."""
        return self.chosen(drawn(len(self), n, seed))

    def chosen(self, rows: Tensor) -> ImageSet:
        """The images at the places ``rows``, int64 (n,)."""
        rows = rows.to(self.labels.device)
        return replace(self, images=self.images[rows], labels=self.labels[rows])

    def stand_ins(self) -> Tensor:
        """Whether each image is a stand-in for a damaged one, bool (N,): none is, damaged ones are left out."""
        return torch.zeros(len(self), dtype=torch.bool)

    def batches(
        self, rows: Iterable[Tensor], augment: Augment | None = None, key: tuple[int, ...] = ()
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """For each index tensor (b,) in ``rows``: images uint8 (b, 3, H, W) and labels int64 (b,), on the set's device.

        An index and nothing else, so the host never waits; what ``augment`` asks for is all left to ``remaining``.
        """
        for row in rows:
            row = row.to(self.labels.device, non_blocking=True)
            yield self.images[row], self.labels[row]

    def remaining(self, augment: Augment) -> Augment:
        """What is still to be done to the batches: all of ``augment``."""
        return augment


def check_labels(labels: Tensor, n: int, class_names: tuple[str, ...]) -> None:
    """Raise ``ValueError`` unless there are ``n`` int64 labels, each the number of a class."""
    if labels.dtype != torch.int64 or labels.shape != (n,):
        raise ValueError(
            f"An image set wants one int64 label for each of its {n} images; these labels are "
            f"{labels.dtype} of shape {tuple(labels.shape)}."
        )
    if n and not 0 <= int(labels.min()) <= int(labels.max()) < len(class_names):
        raise ValueError(
            f"Labels must lie in 0…{len(class_names) - 1}, one for each of {len(class_names)} classes; "
            f"these run from {int(labels.min())} to {int(labels.max())}."
        )


def drawn(size: int, n: int, seed: int) -> Tensor:
    """``n`` different numbers below ``size``, int64 (n,), as a function of ``seed`` alone."""
    if not 0 < n <= size:
        raise ValueError(f"A subset holds between 1 and {size} images, the size of the set; {n} were wanted.")
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))[:n]
