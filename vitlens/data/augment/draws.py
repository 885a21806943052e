"""Random numbers that are functions of a key, usually (seed, epoch, step), and of nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


def seed_of(*key: int) -> int:
    """One well-mixed seed from several non-negative numbers, usually (seed, epoch, step)."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0]) >> 1  # torch's seeds are signed


def generator(device: torch.device | str, *key: int) -> torch.Generator:
    """A generator on ``device`` whose seed is a function of ``key``."""
    return torch.Generator(device).manual_seed(seed_of(*key))


@dataclass(frozen=True)
class Draws:
    """Uniform numbers for part ``part`` of ``parts`` equal parts of a batch.

    They are drawn for the whole batch and cut, so that a batch augmented in parts, one after the other or by several
    processes, is the batch augmented at once.
    """

    generator: torch.Generator
    part: int = 0
    parts: int = 1

    def uniform(self, n: int, samples: int) -> Tensor:
        """(n, samples) numbers in [0, 1): n for each sample of this part."""
        whole = torch.rand(n, samples * self.parts, generator=self.generator, device=self.generator.device)
        return whole[:, self.part * samples : (self.part + 1) * samples]


def draws(device: torch.device | str, *key: int, part: int = 0, parts: int = 1) -> Draws:
    """``Draws`` on ``device`` whose seed is a function of ``key``."""
    return Draws(generator(device, *key), part, parts)
