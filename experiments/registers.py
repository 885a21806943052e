"""Registers at test time: an extra token that takes over the outlier activations of patches, without training.

    python -m experiments.registers --data tiny-imagenet --out data/results/registers.csv

After Jiang, Dravid, Efros and Gandelsman (2025, "Vision Transformers Don't Need Trained Registers"): a few neurons in
the MLPs make the outliers. Their activations are moved from the patches to a token that is appended for them.

    neurons = register_neurons(model, images)
    other = with_register(model, neurons)       # an ordinary timm model with one more prefix token

The table: `register_neurons` finds --neurons neurons of the specimen on --finding validation images. On --images
others: accuracy, and its change from the model itself in points, with a paired 95 % interval; how often the prediction
stays. By layer, the mean over images of the largest ratio of a patch's norm to the median, of the share of patches
above --times the median, in per cent, and of the roughness of the map of norms; in the last layer, the roughness of the
map of received attention. All with the half width of a 95 % interval (Student's t), and for roughness the change from
the model itself, paired by image. Then the register's norm over the median. Controls, on the first --controls images: a
register that nothing is moved to, and one that takes over as many random neurons of the same layers. Their changes are
from the model on the same images, which has separate rows if these are fewer.

Shapes: B batch, L layers, T tokens = R prefix + P patches, D width.
"""

import contextlib
import copy
from collections.abc import Mapping, Sequence

import torch
from timm.models import VisionTransformer
from torch import Tensor, nn
from tqdm import tqdm

from experiments.results import SPECIMEN, about, command, labeled, parser, write
from experiments.sinks import TIMES, outliers, ratios
from vitlens import capture, load_model, tokens
from vitlens.scores import paired, proportion, student


@torch.no_grad()
def register_neurons(
    model: VisionTransformer,
    images: Tensor,
    count: int = 10,
    *,
    times: float = TIMES,
    layer: int | None = None,
) -> dict[int, list[int]]:
    """The neurons that make the outliers, by layer: those whose mean activation at the outlier patches of all images is
    farthest above that at the other patches.

    images: (B, C, height, width), as the model takes them. count: number of neurons, over all layers. times: see
    `outliers`. layer: outliers are those after it, and it is the last layer whose neurons are compared; by default the
    first after which there are at least half as many as after any. Raises ValueError where no patch is an outlier, as
    in small models.
    """
    hidden: list[Tensor] = []
    with contextlib.ExitStack() as hooks:
        for block in model.blocks:
            hooks.enter_context(
                block.mlp.fc2.register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
            )
        layers, _ = tokens.features(model, images)
    prefix = model.num_prefix_tokens
    norms = torch.stack([tokens.norms(each)[:, prefix:] for each in layers])
    found = outliers(norms, times)
    shares = found.flatten(1).float().mean(1)
    if layer is None:
        layer = int((shares >= shares.max() / 2).nonzero()[0])
    where = found[layer]
    if not where.any():
        raise ValueError(
            f"No patch of these images has a norm above {times:g} times the median (largest: {ratios(norms).max():.2f} "
            "times), so a register has nothing to take over. Lower `times`, or take a larger model."
        )
    above = [
        each[:, prefix:][where].mean(0) - each[:, prefix:][~where].mean(0)
        for each in hidden[: layer + 1]
    ]
    neurons: dict[int, list[int]] = {}
    for number in sorted(torch.cat(above).topk(min(count, sum(map(len, above)))).indices.tolist()):
        neurons.setdefault(number // len(above[0]), []).append(number % len(above[0]))
    return neurons


@torch.no_grad()
def with_register(
    model: VisionTransformer, neurons: Mapping[int, Sequence[int]]
) -> VisionTransformer:
    """A copy of a plain Vision Transformer of timm with one more register, its last prefix token, for these neurons.

    The register begins as zeros, without a position. In each MLP it gets the largest activation of each of the neurons
    over all tokens, and the other tokens get none. neurons: numbers of hidden units by layer, as from
    `register_neurons`; without any, nothing is moved to the register. Raises ValueError for a head that reads all
    prefix tokens.
    """
    if model.pool_include_prefix:
        raise ValueError(
            "The head reads all prefix tokens, so it would read the register too. Take another model."
        )
    other = copy.deepcopy(model)
    place = other.num_prefix_tokens  # behind the other prefix tokens
    empty = other.pos_embed.new_zeros(1, 1, other.embed_dim)
    other.reg_token = nn.Parameter(
        empty if other.reg_token is None else torch.cat([other.reg_token, empty], 1)
    )
    if not other.no_embed_class:
        other.pos_embed = nn.Parameter(
            torch.cat([other.pos_embed[:, :place], empty, other.pos_embed[:, place:]], 1)
        )
    other.num_reg_tokens += 1
    other.num_prefix_tokens += 1
    for layer, numbers in neurons.items():
        other.blocks[layer].mlp.fc2.register_forward_pre_hook(_Moved(list(numbers), place))
    return other


class _Moved:
    """A hook that moves the activations (B, T, hidden) of some neurons from all tokens to one token."""

    def __init__(self, neurons: list[int], place: int):
        self.neurons, self.place = neurons, place

    def __call__(self, _, args: tuple[Tensor]) -> tuple[Tensor]:
        hidden = args[0].clone()
        largest = hidden[..., self.neurons].amax(1)
        hidden[..., self.neurons] = 0
        hidden[:, self.place, self.neurons] = largest
        return (hidden,)


def roughness(maps: Tensor) -> Tensor:
    """(…) how little neighboring patches of maps (…, rows, cols) have in common: Geary's C (1954), the mean squared
    difference of patches that share a side, over that of any two patches.

    Near 0 for a smooth map, 1 on average for noise, almost 2 for a checkerboard; NaN for a constant map.
    """
    steps = torch.cat([maps.diff(dim=-1).flatten(-2), maps.diff(dim=-2).flatten(-2)], -1)
    return steps.square().mean(-1) / (2 * maps.flatten(-2).var(-1))


@torch.no_grad()
def looked_at(model: nn.Module, images: Tensor, labels: Tensor, times: float) -> dict[str, Tensor]:
    """(B,) the prediction and whether it is correct, and (B, L) of each quantity."""
    with capture(model) as attn:
        layers, logits = tokens.features(model, images)
        received = attn[-1].weights().mean((1, 2)).double()
    norms = torch.stack([tokens.norms(layer) for layer in layers], 1).double()
    prefix, patches = attn.grid.prefix, norms[..., attn.grid.prefix :]
    middle, last = (
        patches.quantile(0.5, -1),
        torch.full(patches.shape[:2], torch.nan, dtype=torch.float64),
    )
    last[:, -1] = roughness(attn.grid.image_map(received))
    return {
        "answer": logits.argmax(1),
        "right": logits.argmax(1) == labels,
        "largest_ratio": patches.amax(-1) / middle,
        "above": 100 * outliers(patches, times).double().mean(-1),
        "rough_norms": roughness(attn.grid.image_map(norms)),
        "rough_received": last,
        "register_ratio": norms[..., prefix - 1] / middle,
    }


def rows(
    name: str, each: Mapping[str, Tensor], own: Mapping[str, Tensor], neurons: Mapping, how: dict
) -> list[dict]:
    """A row for each layer of a variant, compared with the model itself on the same images."""
    count = len(each["right"])
    own = {quantity: values[:count] for quantity, values in own.items()}
    lost, gained = (int((a["right"] & ~b["right"]).sum()) for a, b in ((own, each), (each, own)))
    row = {"variant": name, "images": count}
    row["neurons"] = " ".join(f"{layer}.{n}" for layer, many in neurons.items() for n in many)
    scores = {
        "accuracy": proportion(int(each["right"].sum()), count),
        "change": paired(lost, gained, count),
    }
    for score, values in scores.items():
        row |= dict(zip((score, f"{score}_low", f"{score}_high"), values, strict=True))
    row["same_answer"] = 100 * (each["answer"] == own["answer"]).double().mean().item()
    means = {
        quantity: each[quantity]
        for quantity in ("largest_ratio", "above", "rough_norms", "rough_received")
    }
    means |= {
        f"{quantity}_change": each[quantity] - own[quantity]
        for quantity in ("rough_norms", "rough_received")
    }
    result = []
    for layer in range(each["above"].shape[1]):
        more = {"layer": layer}
        for quantity, values in means.items():
            known = values[:, layer].isfinite().all()
            more[quantity] = values[:, layer].mean().item() if known else ""
            more[f"{quantity}_95"] = student(values[:, layer].numpy()) if known else ""
        ratio = each["register_ratio"][:, layer].mean().item()
        result.append(
            row | more | {"register_ratio": "" if name.startswith("the model") else ratio} | how
        )
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__, data=True)
    options.add_argument("--images", type=int, default=9900)
    options.add_argument(
        "--controls", type=int, default=1000, help="images of them for the controls"
    )
    options.add_argument(
        "--finding", type=int, default=100, help="other images that the neurons are found on"
    )
    options.add_argument("--neurons", type=int, default=5)
    options.add_argument(
        "--times", type=float, default=2.0, help="norm of an outlier, as a multiple of the median"
    )
    options = options.parse_args(arguments)
    if options.tiny:
        options.images, options.controls, options.finding, options.times = 8, 4, 4, 1.2
    model, how = load_model(SPECIMEN), about(command("experiments.registers", arguments))
    finding = torch.cat([images for images, _ in labeled(model, options.data, 0, options.finding)])
    neurons = register_neurons(model, finding, options.neurons, times=options.times)
    rng = torch.Generator().manual_seed(0)
    chance = {
        layer: torch.randperm(model.blocks[layer].mlp.fc2.in_features, generator=rng)[
            : len(numbers)
        ].tolist()
        for layer, numbers in neurons.items()
    }
    moved = {"empty register": {}, "register": neurons, "register, random neurons": chance}
    variants = {"the model": model} | {
        name: with_register(model, each) for name, each in moved.items()
    }
    parts, seen = {name: [] for name in variants}, 0
    for images, labels in tqdm(
        labeled(model, options.data, options.finding, options.finding + options.images)
    ):
        for name, each in variants.items():
            if name in ("the model", "register") or seen < options.controls:
                parts[name].append(looked_at(each, images, labels, options.times))
        seen += len(images)
    found = {
        name: {k: torch.cat([part[k] for part in each]) for k in each[0]}
        for name, each in parts.items()
    }
    own, table = found.pop("the model"), []
    few = len(found["empty register"]["right"])
    models = {"the model": own}
    if few < len(own["right"]):
        models[f"the model, first {few:,}"] = {
            quantity: values[:few] for quantity, values in own.items()
        }
    for name, each in (models | found).items():
        table += rows(name, each, own, moved.get(name, {}), how)
    write(options.out, table, digits=4)


if __name__ == "__main__":
    main()
