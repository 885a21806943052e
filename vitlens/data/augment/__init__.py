"""Augmentation of whole batches on the device that holds them."""

from vitlens.data.augment.batch import Augment, augmented, normalized
from vitlens.data.augment.draws import Draws, draws, generator, seed_of
from vitlens.data.augment.mixing import Targets

__all__ = ["Augment", "Draws", "Targets", "augmented", "draws", "generator", "normalized", "seed_of"]
