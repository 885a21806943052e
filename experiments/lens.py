"""Accuracy of plain and tuned lenses on the class token and on the patches after each layer.

    python -m experiments.lens --data tiny-imagenet --out data/results/lens.csv

--images validation images are scored; --tuning others, drawn with the same seed, tune the lens (`tune`,
without labels, until it gains no more on a fifth of them). The rows of each model and lens: the layer; `class token`,
what the model would answer after that layer; `mean of patches`, the class that the patches' logits name on average;
`one patch`, the share of all patches that name the class by themselves; `wrong label`, the first of these scored by
labels that were shuffled, which is chance. `agrees` is how often the answer is that of the whole model, and `kl` how
far, in nats, the probabilities of the first of these lie from the model's own. Controls: the model from scratch, and
the first one with random weights. Intervals (95 %) are Wilson's, those of `one patch` and `kl` Student's over images.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from experiments.results import about, command, labeled, opened_models, parser, write
from vitlens import tokens
from vitlens.attribution.maps import explanation_mode, prepare_inputs
from vitlens.recorder.supported import family, transformer
from vitlens.scores import proportion, student
from vitlens.stream import read_out
from vitlens_paper.evaluate.ablation import divergence

LENS = "lens/tuned.safetensors"  # in a subdirectory, because timm 1.0.28 rejects directories with two .safetensors


@dataclass(frozen=True)
class TunedLens:
    """One affine map a layer, x + x·W + b, which moves tokens to where the final norm and head can read them.

    weights: (L, D, D) and biases: (L, D), both 0 for the last layer.
    """

    weights: Tensor
    biases: Tensor

    def moved(self, tokens: Tensor, layer: int) -> Tensor:
        """(B, T, D) tokens after a layer, moved."""
        weights, biases = (part[layer].to(tokens) for part in (self.weights, self.biases))
        return tokens + tokens @ weights + biases

    def save(self, folder: Path) -> Path:
        """Write `lens/tuned.safetensors`, in half precision, into the folder of the model."""
        tensors = {
            name: getattr(self, name).half().cpu().contiguous() for name in ("weights", "biases")
        }
        (path := folder / LENS).parent.mkdir(parents=True, exist_ok=True)
        safetensors.torch.save_file(tensors, path)
        return path

    @classmethod
    def load(cls, folder: Path) -> "TunedLens":
        return cls(
            **{
                name: part.float()
                for name, part in safetensors.torch.load_file(folder / LENS).items()
            }
        )


def tune(
    model: nn.Module,
    batches: Iterable[Tensor],
    *,
    lr: float = 1e-3,
    on_layer: Callable[[int, float], None] = lambda *_: None,
) -> TunedLens:
    """A `TunedLens` of a model (Belrose et al. 2023, "Eliciting Latent Predictions from Transformers with the Tuned
    Lens"): the logits after a layer, of the read-out and of each token, are fitted to those after the last layer.

    The loss is the KL divergence of the read-out plus the mean one of the tokens, so that a class token keeps its
    weight. A fifth of the images is held out. Each layer begins with the plain lens, takes steps of
    Adam with 64 images each, again and again through all images, until the loss on those held out has not fallen by
    0.001 nats in five passes, and keeps the map of the last such fall; zeros are the plain lens. No labels are used.

    batches: (B, C, H, W) images each, normalized as the model expects, read once. Held in memory are prefix tokens and
    eight patches of each image, or all patches if the head reads them. on_layer: called with each layer's number and
    its loss on the images held out. Raises ValueError for a loss that is not finite.
    """
    kept, generator = [], torch.Generator().manual_seed(0)
    for images in batches:
        model, images, *_ = prepare_inputs(model, images)
        with explanation_mode(model), torch.no_grad():
            layers = torch.stack(tokens.features(model, images)[0], 1)
        grid = family(transformer(model)).grid(tuple(images.shape[-2:]))
        if grid.readout is not None and not grid.readout[grid.prefix :].any():
            some = grid.prefix + torch.randperm(grid.patches, generator=generator)[:8]
            layers = layers[:, :, [*range(grid.prefix), *some.tolist()]]
        kept.append(layers)
    layers = torch.cat(kept).transpose(0, 1)
    shape = len(layers), layers.shape[-1], layers.shape[-1]
    lens = TunedLens(layers.new_zeros(shape).float(), layers.new_zeros(shape[:2]).float())
    with explanation_mode(model):
        for number in range(len(layers) - 1):
            on_layer(number, _fit(model, lens, number, layers, lr))
    return lens


def _fit(model: nn.Module, lens: TunedLens, number: int, layers: Tensor, lr: float) -> float:
    """Fit the map of one layer of (L, B, T, D), in place. Returns its loss on the images held out."""
    generator = torch.Generator().manual_seed(0)
    weight, bias = (part[number].clone().requires_grad_() for part in (lens.weights, lens.biases))
    optimizer = torch.optim.Adam([weight, bias], lr=lr)
    held, rest = torch.randperm(count := layers.shape[1], generator=generator).tensor_split(
        [max(1, count // 5)]
    )
    best, since = torch.inf, 0

    def loss(chosen: Tensor) -> Tensor:
        moved = TunedLens(weight[None], bias[None]).moved(layers[number, chosen], 0)
        both = zip(read_out(model, moved), read_out(model, layers[-1, chosen]), strict=True)
        pairs = [[part.float().log_softmax(-1) for part in pair] for pair in both]
        return sum(
            F.kl_div(*pair, log_target=True, reduction="none").sum(-1).mean() for pair in pairs
        )

    while since <= 5:
        if not (now := loss(held)).isfinite():
            raise ValueError(
                f"The loss is {now:g}: the weights of the model are damaged, or lr={lr:g} is too large."
            )
        if now < best - 1e-3:
            best, since = now.item(), 0
            lens.weights[number], lens.biases[number] = weight.detach(), bias.detach()
        for chosen in rest[torch.randperm(len(rest), generator=generator)].split(64):
            optimizer.zero_grad()
            loss(chosen).backward()
            optimizer.step()
        since += 1
    return best


def scored(model, batches, ways):
    """For each way, by layer and reader: whether each image, (N,), is right, agrees with the model's own answer, and by
    how many nats it differs from that."""
    found = [[defaultdict(list) for _ in model.blocks] for _ in ways]
    labels = torch.cat([labels for _, labels in batches])
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    shuffled = iter(labels[order].split([len(b) for _, b in batches]))
    for images, labels in tqdm(batches, unit="batch", disable=None):
        with torch.inference_mode():
            layers, logits = tokens.features(model, images)
            last, wrong = logits.argmax(1), next(shuffled)
            for (way, tuned), (number, layer) in itertools.product(
                enumerate(ways), enumerate(layers)
            ):
                own, each = read_out(model, layer if tuned is None else tuned.moved(layer, number))
                far, patches, own = (
                    divergence(logits, own),
                    each[:, model.num_prefix_tokens :],
                    own.argmax(1),
                )
                mean, alone = patches.mean(1).argmax(1), patches.argmax(2)
                unknown = far.new_full(far.shape, torch.nan)
                for reader, right, agrees, kl in (
                    ("class token", own == labels, own == last, far),
                    ("mean of patches", mean == labels, mean == last, unknown),
                    (
                        "one patch",
                        (alone == labels[:, None]).double().mean(1),
                        alone == last[:, None],
                        unknown,
                    ),
                    ("wrong label", own == wrong, own == last, unknown),
                ):
                    found[way][number][reader].append((right, agrees.double(), kl.double()))
    return [
        [
            {
                name: [torch.cat(part) for part in zip(*each, strict=True)]
                for name, each in layer.items()
            }
            for layer in way
        ]
        for way in found
    ]


def rows(name: str, lens: str, found) -> list[dict]:
    result = []
    for layer, readers in enumerate(found):
        for reader, (right, agrees, kl) in readers.items():
            if reader == "one patch":
                share, half = 100 * right.mean().item(), 100 * student(right.numpy())
                score = share, max(0.0, share - half), share + half
            else:
                score = proportion(int(right.sum()), len(right))
            row = {
                "model": name,
                "lens": lens,
                "layer": layer,
                "reader": reader,
                "images": len(right),
            }
            row |= dict(zip(("accuracy", "low", "high"), score, strict=True))
            row["agrees"] = 100 * agrees.double().mean().item()
            known = reader == "class token"
            row |= {
                "kl": kl.mean().item() if known else "",
                "kl_95": student(kl.numpy()) if known else "",
            }
            result.append(row)
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__, data=True, images=2000, control=500)
    options.add_argument("--tuning", type=int, default=2000, help="other images that tune the lens")
    options.add_argument("--save", type=Path, help="folder for the tuned lens of the first model")
    options = options.parse_args(arguments)
    if options.tiny:
        options.images, options.control, options.tuning = 4, 2, 6
    table, how = [], about(command("experiments.lens", arguments))
    for number, (title, model, images) in enumerate(opened_models(options)):
        lenses = {"plain": None}
        if not title.endswith("untrained"):
            tuning = labeled(model, options.data, 0, options.tuning)
            lenses["tuned"] = tune(model, (images for images, _ in tqdm(tuning, disable=None)))
        if number == 0 and options.save:
            lenses["tuned"].save(options.save)
            lenses["tuned"] = TunedLens.load(options.save)
        batches = list(labeled(model, options.data, options.tuning, options.tuning + images))
        for way, found in zip(lenses, scored(model, batches, lenses.values()), strict=True):
            table += [row | how for row in rows(title, way, found)]
    write(options.out, table, digits=4)


if __name__ == "__main__":
    main()
