"""What tokens know after each layer: accuracy of a lens on the class token and on the patches, plain and tuned.

    python benchmarks/lens.py --data tiny-imagenet --out data/results/lens.csv

--images validation images are scored; --tuning others, drawn with the same seed, tune the lens (`vitlens.stream.tune`,
one pass, without labels). The rows of each model and lens: the layer; `class token`, what the model would answer after
that layer; `mean of patches`, the class that the patches' logits name on average; `one patch`, the share of all patches
that name the class by themselves; `wrong label`, the first of these scored by labels that were shuffled, which is
chance. `agrees` is how often the answer is that of the whole model. Controls: the model from scratch, and the first one
with random weights. Intervals (95 %) are Wilson's, those of `one patch` Student's over images.
"""

import argparse
import itertools
import time
from collections import defaultdict
from pathlib import Path

import torch
from results import rounded, sentence, write
from tqdm import tqdm

from vitlens import load_model, tokens
from vitlens.evaluate import proportion, student
from vitlens.evaluate.passage import Pictures, generator
from vitlens.stream import TunedLens, read_out, tune

MODELS = "data/checkpoints/vit_tiny_patch16_224", "data/checkpoints/vit_tiny_patch8_64"
BATCH = 10


def scored(model, batches, ways):
    """For each way, by layer and reader: whether each image, (N,), is right, and agrees with the model's own answer."""
    found = [[defaultdict(list) for _ in model.blocks] for _ in ways]
    labels = torch.cat([labels for _, labels in batches])
    shuffled = iter(labels[torch.randperm(len(labels), generator=generator(0))].split([len(b) for _, b in batches]))
    for images, labels in tqdm(batches, unit="batch", disable=None):
        with torch.inference_mode():
            layers, logits = tokens.features(model, images)
            last, wrong = logits.argmax(1), next(shuffled)
            for (way, tuned), (number, layer) in itertools.product(enumerate(ways), enumerate(layers)):
                own, each = read_out(model, layer if tuned is None else tuned.moved(layer, number))
                patches, own = each[:, model.num_prefix_tokens :], own.argmax(1)
                mean, alone = patches.mean(1).argmax(1), patches.argmax(2)
                for reader, right, agrees in (
                    ("class token", own == labels, own == last),
                    ("mean of patches", mean == labels, mean == last),
                    ("one patch", (alone == labels[:, None]).double().mean(1), alone == last[:, None]),
                    ("wrong label", own == wrong, own == last),
                ):
                    found[way][number][reader].append((right, agrees.double()))
    return [
        [{name: [torch.cat(part) for part in zip(*each, strict=True)] for name, each in layer.items()} for layer in way]
        for way in found
    ]


def rows(name: str, lens: str, found) -> list[dict]:
    result = []
    for layer, readers in enumerate(found):
        for reader, (right, agrees) in readers.items():
            if reader == "one patch":
                share, half = 100 * right.mean().item(), 100 * student(right.numpy())
                score = share, max(0.0, share - half), share + half
            else:
                score = proportion(int(right.sum()), len(right))
            row = {"model": name, "lens": lens, "layer": layer, "reader": reader, "images": len(right)}
            row |= dict(zip(("accuracy", "low", "high"), score, strict=True))
            result.append(row | {"agrees": 100 * agrees.double().mean().item()})
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", required=True, help="a data set with validation images")
    parser.add_argument("--models", nargs="+", default=MODELS, help="folders in timm's hub layout")
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--tuning", type=int, default=1000, help="other images that tune the lens")
    parser.add_argument("--control", type=int, default=500, help="images for the untrained model")
    parser.add_argument("--out", type=Path, required=True, help="CSV to write")
    parser.add_argument("--save", type=Path, help="folder for the tuned lens of the first model")
    options = parser.parse_args()
    table = []
    for name in options.models:
        start, model, title = time.perf_counter(), load_model(name), Path(name).name
        drawn = options.images + options.tuning
        pictures = Pictures(model, options.data, drawn, 0, BATCH, False, {"workers": 1}, first=options.tuning)
        batches = [batch for _, batch in pictures.read(range(len(pictures.batches)))]
        tuning = [images for _, (images, _) in pictures.read(range(-len(pictures.first), 0))]
        losses = []
        lens = tune(model, tqdm(tuning, unit="step", disable=None), on_step=losses.append)
        tenth = max(1, len(losses) // 10)
        print(f"{title}: KL of the first tenth of the steps {sum(losses[:tenth]) / tenth:.3f}, "
              f"of the last {sum(losses[-tenth:]) / tenth:.3f}", flush=True)  # fmt: skip
        if options.save and name == options.models[0]:
            lens.save(options.save)
            lens = TunedLens.load(options.save)
        for way, found in zip(("plain", "tuned"), scored(model, batches, (None, lens)), strict=True):
            table += rows(title, way, found)
        if name == options.models[0]:
            torch.manual_seed(0)
            untrained = load_model(name, pretrained=False)
            (found,) = scored(untrained, batches[: options.control // BATCH], (None,))
            table += rows(f"{title}, untrained", "plain", found)
        print(f"{title}: {time.perf_counter() - start:.0f} s", flush=True)
    models = f" --models {' '.join(options.models)}" if tuple(options.models) != MODELS else ""
    save = f" --save {options.save}" if options.save else ""
    command = f"python benchmarks/lens.py --data tiny-imagenet --images {options.images}{models} --out {options.out}"
    write(options.out, [rounded(row, lambda value: f"{value:.4g}") for row in table], sentence(command + save))
    for row in table:
        if row["reader"] != "wrong label":
            print(*(f"{v:.1f}" if isinstance(v, float) else v for v in row.values()))


if __name__ == "__main__":
    main()
