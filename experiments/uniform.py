"""How far maps of models with random weights depart from uniform, beside those of the two trained models.

    python -m experiments.uniform --out data/results/uniform.csv

A row is a kind of map of a model: attention of single heads from the read-out and from a patch, attention received in a
layer, rollouts, and each quick method of `explain` for class 0, on four photographs of scikit-image. `departure` is
that of `vitlens.plot.scales`, the largest |v − mean| / |mean| of a map, and `contrast` that of `vitlens.attention`.
Both are given as the least, median and largest of all maps of a row. `init`: normal weights with standard deviation
0.02, as timm and transformers draw them, or Xavier's uniform ones, as torchvision's attention does. `UNIFORM` and
`ATTENTION` are read from this table.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import timm
import torch
from skimage import data
from torch import Tensor, nn

from experiments.results import MODELS, about, command, parser, write
from vitlens import attention, capture, load_model, preprocess
from vitlens.attribution import METHODS
from vitlens.models import built_size
from vitlens.plot.scales import ATTENTION, UNIFORM, departure

SIZES = {  # width: heads, depth, (image size, patch size) pairs
    128: (4, 6, ((32, 4),)),
    192: (3, 12, ((224, 16), (512, 16))),
    384: (6, 12, ((224, 16),)),
    768: (12, 12, ((224, 16),)),
}
INITS = "normal 0.02", "xavier"
SLOW = "pixels", "patches"
PATCH = 20
"""Number of the patch that is a query, after the prefix tokens."""


def models(tiny: bool) -> Iterator[tuple[str, str, nn.Module]]:
    """Name, kind of weights and model of each row."""
    for name in MODELS[:1] if tiny else MODELS:
        yield name.split("/")[-1], "trained", load_model(name)
    for width, (heads, depth, inputs) in SIZES.items():
        if tiny and width > 128:
            return
        for size, patch in inputs:
            for init in INITS:
                torch.manual_seed(0)
                model = timm.models.vision_transformer.VisionTransformer(
                    img_size=size,
                    patch_size=patch,
                    embed_dim=width,
                    num_heads=heads,
                    depth=depth,
                    num_classes=10,
                )
                if init == "xavier":
                    for part in model.modules():
                        if isinstance(part, nn.Linear):
                            nn.init.xavier_uniform_(part.weight)
                yield f"width {width}, {(size // patch) ** 2} patches", init, model.eval()


@torch.no_grad()
def maps_of_attention(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """(n, rows, cols) maps by name."""
    with capture(model) as attn:
        model(images)
    grid = attn.grid
    readout = grid.readout.float().reshape(-1, grid.tokens)[0]
    patch = torch.zeros(grid.tokens)
    patch[grid.prefix + PATCH] = 1
    maps = {}
    for name, row in (("head, read-out", readout), ("head, patch", patch)):
        heads = torch.stack([grid.image_map(layer.read(row)) for layer in attn])
        maps[name] = heads.flatten(0, 2)
    received = torch.stack(list(attention.received(attn, prefix=True)))
    maps["received"] = grid.image_map(received).flatten(0, -3)
    maps["rollout"] = attention.rollout(attn)
    return maps


def rows(name: str, init: str, model: nn.Module, photos: Sequence[np.ndarray]) -> Iterator[dict]:
    """The rows of a model."""
    size = built_size(model)
    images = torch.cat([preprocess(model, photo, size=size) for photo in photos])
    maps = maps_of_attention(model, images)
    for method in METHODS.values():
        if method.needs not in SLOW and method.depends_on_target:
            maps[method.name] = method(model, images, 0).detach()
    for kind, values in maps.items():
        departures = [departure(each.numpy()) for each in values]
        row = {"model": name, "init": init, "map": kind, "maps": len(values)}
        row |= summary("departure", np.array(departures))
        bound = UNIFORM if kind in ("rollout", *METHODS) else ATTENTION
        row["drawn_as_uniform"] = np.mean(np.array(departures) <= bound).item()
        if (values >= 0).all():
            row |= summary("contrast", attention.contrast(values).numpy())
        yield row


def summary(name: str, values: np.ndarray) -> dict[str, float]:
    return {
        f"{name}_least": values.min().item(),
        f"{name}_median": np.median(values).item(),
        f"{name}_largest": values.max().item(),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__).parse_args(arguments)
    photos = [data.chelsea(), data.astronaut(), data.coffee(), data.rocket()]
    how = about(command("experiments.uniform", arguments))
    table = []
    for name, init, model in models(options.tiny):
        table += [row | how for row in rows(name, init, model, photos[: 1 if options.tiny else 4])]
    write(options.out, table, digits=3)


if __name__ == "__main__":
    main()
