"""All maps of an image in one table, beside what random orders score."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vitlens.faithfulness._scores import curves
from vitlens.faithfulness.covering import checked_maps, patch_grid
from vitlens.faithfulness.orders import random_maps
from vitlens.recorder.arguments import whole
from vitlens.recorder.grid import TokenGrid

if TYPE_CHECKING:
    from pandas import DataFrame


def table(
    model: nn.Module,
    images: Tensor,
    maps: Mapping[str, Tensor],
    target=None,
    *,
    orders: int = 10,
    seed: int = 0,
    grid: TokenGrid | None = None,
    **options,
) -> DataFrame:
    """A DataFrame with one row for each image and map, and two for the control: mean and spread of random orders.

    maps: (B, rows, cols) by the name of their method. orders: how many random orders are scored (`random_maps`), at
    least 2; the same for all images. options: those of `curves` (against, baseline, step, score,
    internal_batch_size).

    Columns: image, its number in the batch; method; deletion and insertion, the areas; difference, insertion −
    deletion; rank, 1 for the map of this image with the largest difference (equal ones share the better rank);
    deletion_sigmas, insertion_sigmas, difference_sigmas, how many standard deviations of the random orders each lies
    above their mean (a good deletion lies below), not finite where all orders score alike. The rows "random mean" and
    "random std" hold the orders' mean and standard deviation (n − 1) and have no rank.
    """
    import pandas as pd

    if whole(orders) is None or orders < 2:
        raise ValueError(f"Expected at least 2 random orders, because their spread is reported, got orders={orders}.")
    if not isinstance(maps, Mapping) or not maps:
        came = "none" if isinstance(maps, Mapping) else type(maps).__name__
        raise ValueError(f"Expected at least one map, by the name of its method, got {came}.")
    grid = patch_grid(model, images, grid)
    each = [checked_maps(values, grid, len(images), f"The map {name!r}") for name, values in maps.items()]
    if wrong := [name for name, values in zip(maps, each, strict=True) if values.dim() != 3]:
        raise ValueError(f"Expected one map for each image by a name, but {wrong[0]!r} names several.")
    control = random_maps(grid, orders, seed)[:, None].expand(-1, len(images), -1, -1)
    stacked = torch.cat([torch.stack([values.cpu().double() for values in each]), control])
    found = curves(model, images, stacked, target, seed=seed, grid=grid, **options)
    deletion, insertion = found.deletion_area.cpu().double(), found.insertion_area.cpu().double()
    own, chance = torch.stack([deletion, insertion, insertion - deletion], -1).split([len(each), orders])
    mean, std = chance.mean(0), chance.std(0)
    columns = ["deletion", "insertion", "difference"]
    parts = []
    for image in range(len(images)):
        values = torch.cat([own[:, image], mean[None, image], std[None, image]])
        frame = pd.DataFrame(values.numpy(), columns=columns)
        frame.insert(0, "method", [*maps, "random mean", "random std"])
        frame.insert(0, "image", image)
        frame["rank"] = frame["difference"][: len(each)].rank(ascending=False, method="min").astype("Int64")
        sigmas = (own[:, image] - mean[image]) / std[image]
        frame[[f"{name}_sigmas" for name in columns]] = pd.DataFrame(sigmas.numpy()).reindex(frame.index)
        parts.append(frame)
    return pd.concat(parts, ignore_index=True)
