"""The class that the patches with the most attention name, compared with the other patches, by layer.

    python -m experiments.sinks_lens --data tiny-imagenet --out data/results/sinks-lens.csv

The logit lens reads the probability of a class from every patch after a layer. The ratio of an image is the mean
probability in its MOST patches that receive the most attention in that layer, over the mean in its other patches. A row
for each model and layer: the geometric mean of the ratios over --images validation images with a 95 % interval
(Student's t of the logarithms over images), the share of images with a ratio above 1 (Wilson's interval), and both mean
probabilities in percent. Twice: for the class that the model names for the image (`answer`), and as a control for the
class that it names for the image before, where that is another one (`other`). A second control is the first model with
random weights, on --control images.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from tqdm import tqdm

from experiments.results import write_by_model
from vitlens import attention, capture, tokens
from vitlens.scores import proportion, student
from vitlens.stream import read_out

MOST = 6
"""Patches of an image with the most attention, of 196."""


@torch.no_grad()
def named(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean probabilities in the MOST patches and in the others, (B, L, 2, 2), and the answers (B,).

    The third dimension: the model's answer for the image, and for the image before it (for the first one, the last).
    """
    with capture(model) as attn:
        layers, logits = tokens.features(model, images)
    answers, result = logits.argmax(-1), []
    classes = torch.stack([answers, answers.roll(1)], -1)[:, None]  # (B, 1, 2)
    for layer, received in zip(layers, attention.received(attn).mean(2).unbind(1), strict=True):
        each = read_out(model, layer)[1][:, attn.grid.prefix :].softmax(-1)  # (B, P, classes)
        each = each.gather(-1, classes.expand(-1, each.shape[1], -1))
        most = torch.zeros_like(received).scatter(-1, received.topk(MOST).indices, 1)
        sides = torch.stack([most / MOST, (1 - most) / (most.shape[1] - MOST)], -1)  # (B, P, 2)
        result.append(each.mT @ sides)
    return torch.stack(result, 1).double(), answers


def rows(title: str, model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> list[dict]:
    """Two rows for each layer of a model, `answer` and `other`."""
    found, differ = [], []
    for images, _ in tqdm(batches, unit="batch", disable=None):
        means, answers = named(model, images)
        found.append(means)
        differ.append(answers != answers.roll(1))
    found, differ, result = torch.cat(found), torch.cat(differ), []
    for number, (name, pairs) in enumerate({"answer": found, "other": found[differ]}.items()):
        for layer, sides in enumerate(pairs[:, :, number].unbind(1)):
            logs = (sides[:, 0] / sides[:, 1]).log()
            middle, half = logs.mean().item(), student(logs.numpy())
            ratio = torch.tensor([middle, middle - half, middle + half]).exp().tolist()
            above = proportion(int((logs > 0).sum()), len(logs))
            row = {"model": title, "class": name, "layer": layer, "images": len(logs)}
            row |= dict(zip(("ratio", "ratio_low", "ratio_high"), ratio, strict=True))
            row |= dict(zip(("above", "above_low", "above_high"), above, strict=True))
            result.append(
                row | dict(zip(("most", "others"), (100 * sides.mean(0)).tolist(), strict=True))
            )
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    write_by_model("experiments.sinks_lens", __doc__, rows, arguments, images=1000, control=200)


if __name__ == "__main__":
    main()
