"""Attention of the pre-trained specimen and of a model trained from scratch, on many photographs.

    python -m experiments.specimen --data tiny-imagenet --out data/results/specimen.csv

--data: a source of `vitlens.data.load`. --images of its validation images are drawn with seed 0, the same for every
model. The table has one row for each head: its mean attention distance in pixels of the model's input, that as a share
of uniform attention, and the same share with the rows renormalized after the class token is dropped. Then, for each
model, the rank correlation of position similarity with distance, the share of the filters' variance in 28 components,
and the contrast of its rollouts (`vitlens.attention.contrast`) on its own grid, and averaged onto the coarsest
grid of all models. At the end the difference of the first model's contrast from the other's on the same photographs.
Each mean over photographs has the half width of its 95 % interval for other photographs (Student's t).
"""

import itertools
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from experiments.results import about, command, parser, write
from vitlens import attention, capture, data, load_model, report
from vitlens.report import prepared
from vitlens.scores import student

BATCH = 10


def looked_at(model, images):
    """(N, L, H) mean distances, the same renormalized, and (N, rows, cols) rollouts of photographs (N, 3, H, W)."""
    found = []
    for part in tqdm(images.split(BATCH), unit="batch", disable=None):
        batch = torch.cat([x for _, x in prepared(model, (("", image) for image in part))])
        with torch.inference_mode(), capture(model) as attn:
            model(batch)
        seen = attention.summary(attn, "mean_distance", "rollout")
        found.append(
            (seen.mean_distance, attention.mean_distance(attn, renormalize=True), seen.rollout)
        )
    return [torch.cat(each).double() for each in zip(*found, strict=True)]


def coarser(maps, rows: int, cols: int):
    """(N, rows, cols) the means of maps (N, h, w) over the parts of a coarser grid, by area."""
    fine = maps.repeat_interleave(rows, 1).repeat_interleave(cols, 2)
    return fine.unflatten(1, (rows, -1)).unflatten(3, (cols, -1)).mean((2, 4))


def mean(name: str, values) -> dict[str, float]:
    return {name: values.mean().item(), f"{name}_95": student(values.numpy())}


def of_model(name: str, model, images, shape: tuple[int, int]):
    """The rows of one model, and the contrast of its rollouts on a grid of `shape` for each photograph."""
    found = report.inspect(model, [("", images[0])])
    grid, (layers, heads) = found.grid, found.mean_distance.shape
    near, renormalized, rollouts = looked_at(model, images)
    rows = []
    for layer, head in itertools.product(range(layers), range(heads)):
        one = (slice(None), layer, head)
        rows.append(
            {"model": name, "quantity": "mean_distance", "layer": layer, "head": head}
            | mean("pixels", near[one])
            | mean("of_uniform", near[one] / grid.uniform_distance())
            | mean("renormalized", renormalized[one] / grid.uniform_distance(renormalize=True))
        )
    for quantity in ("position_rank_correlation", "filter_variance"):
        rows.append({"model": name, "quantity": quantity, "value": found.measures[quantity]})
    alike = attention.contrast(coarser(rollouts, *shape))
    own = {f"rollout_contrast, {grid.rows} × {grid.cols}": attention.contrast(rollouts)}
    for quantity, values in (own | {"rollout_contrast, {} × {}".format(*shape): alike}).items():
        rows.append({"model": name, "quantity": quantity} | mean("value", values))
    return rows, alike


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__, data=True, images=1000).parse_args(arguments)
    images = (
        data.load(options.data, "valid", stream=False)
        .subset(4 if options.tiny else options.images)
        .images
    )
    models = {Path(name).name: load_model(name) for name in options.models}
    shape = min(tuple(model.patch_embed.grid_size) for model in models.values())
    rows, contrasts = [], {}
    for name, model in models.items():
        more, contrasts[name] = of_model(name, model, images, shape)
        rows += more
    first, *others = contrasts
    for other in others:
        above = {
            "model": f"{first} − {other}",
            "quantity": "rollout_contrast, {} × {}".format(*shape),
        }
        rows.append(above | mean("value", contrasts[first] - contrasts[other]))
    how = about(command("experiments.specimen", arguments))
    write(options.out, ({"images": len(images)} | row | how for row in rows), digits=4)


if __name__ == "__main__":
    main()
