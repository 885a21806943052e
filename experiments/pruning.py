"""Accuracy as heads are removed one after the other, in a greedy order and in random ones.

    python -m experiments.pruning --data tiny-imagenet --out data/results/pruning.csv

Greedy: the head is removed next whose loss moves the probabilities least from those of the whole model (mean KL
divergence over --choose images, with the heads that are already removed). Those images, over which the mean outputs of
heads are taken too, are not among the ones that accuracy is measured on.
"""

from collections.abc import Sequence

import torch

from experiments.results import SPECIMEN, about, command, labeled, parser, write
from vitlens import intervene, load_model
from vitlens.scores import proportion
from vitlens_paper.evaluate.ablation import divergence, mean_outputs


def pruned(
    model, chosen: list, measured: list, step: int = 1, orders: int = 3, way: str = "mean"
) -> list[dict]:
    """Rows (order, removed, layer, head, images, accuracy, low, high) of a greedy order and of random ones.

    chosen: batches of images by which the next `step` heads are chosen. measured: batches of images and labels that
    accuracy, in percent with Wilson's interval, is measured on.
    """
    means = {(head.layer, head.part): mean for head, mean in mean_outputs(model, chosen).items()}
    heads = list(means)

    def without(removed, images):
        values = {head: means[head] if way == "mean" else "zero" for head in removed}
        with torch.no_grad(), intervene(model, heads=values):
            return model(images).double()

    greedy: list = []
    whole = [without([], images) for images in chosen]
    while len(greedy) < len(heads):
        moved = {
            head: sum(
                float(divergence(before, without([*greedy, head], images)).sum())
                for before, images in zip(whole, chosen, strict=True)
            )
            for head in heads
            if head not in greedy
        }
        greedy += sorted(moved, key=moved.get)[:step]
    rows = []
    for name in ("greedy", *(f"random {seed}" for seed in range(orders))):
        order = greedy
        if name != "greedy":
            rng = torch.Generator().manual_seed(1 + int(name.split()[1]))
            order = [heads[i] for i in torch.randperm(len(heads), generator=rng).tolist()]
        for removed in sorted({*range(0, len(heads), step), len(heads)}):
            right = sum(
                int((without(order[:removed], x).argmax(1) == y).sum()) for x, y in measured
            )
            images = sum(len(y) for _, y in measured)
            layer, head = order[removed - 1] if removed else ("", "")
            score = dict(zip(("accuracy", "low", "high"), proportion(right, images), strict=True))
            rows.append(
                {
                    "order": name,
                    "removed": removed,
                    "layer": layer,
                    "head": head,
                    "images": images,
                    **score,
                }
            )
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__, data=True)
    options.add_argument("--model", default=SPECIMEN, help="a folder in timm's hub layout")
    options.add_argument(
        "--images", type=int, default=2000, help="images that accuracy is measured on"
    )
    options.add_argument("--choose", type=int, default=50, help="images by which heads are chosen")
    options.add_argument("--step", type=int, default=4, help="heads removed at once")
    options.add_argument("--orders", type=int, default=2, help="random orders")
    options = options.parse_args(arguments)
    if options.tiny:
        options.images, options.choose, options.step, options.orders = 10, 4, 18, 1
    model = load_model(options.model).eval()
    chosen = [images for images, _ in labeled(model, options.data, 0, options.choose)]
    measured = list(labeled(model, options.data, options.choose, options.choose + options.images))
    how = about(command("experiments.pruning", arguments))
    write(
        options.out,
        (row | how for row in pruned(model, chosen, measured, options.step, options.orders)),
    )


if __name__ == "__main__":
    main()
