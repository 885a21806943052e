"""What tokens know after each layer: accuracy of a lens on the class token and on the patches, plain and tuned.

    python -m experiments.lens --data tiny-imagenet --out data/results/lens.csv

--images validation images are scored; --tuning others, drawn with the same seed, tune the lens (`vitlens.stream.tune`,
without labels, until it gains no more on a fifth of them). The rows of each model and lens: the layer; `class token`,
what the model would answer after that layer; `mean of patches`, the class that the patches' logits name on average;
`one patch`, the share of all patches that name the class by themselves; `wrong label`, the first of these scored by
labels that were shuffled, which is chance. `agrees` is how often the answer is that of the whole model, and `kl` how
far, in nats, the probabilities of the first of these lie from the model's own. Controls: the model from scratch, and
the first one with random weights. Intervals (95 %) are Wilson's, those of `one patch` and `kl` Student's over images.
"""

import itertools
import time
from collections import defaultdict
from pathlib import Path

import torch
from tqdm import tqdm

from experiments.results import rounded, write
from experiments.specimens import arguments, note, specimens
from vitlens import tokens
from vitlens.evaluate import proportion, student
from vitlens.evaluate.ablation import divergence
from vitlens.evaluate.passage import generator
from vitlens.stream import TunedLens, read_out, tune


def scored(model, batches, ways):
    """For each way, by layer and reader: whether each image, (N,), is right, agrees with the model's own answer, and by
    how many nats it differs from that."""
    found = [[defaultdict(list) for _ in model.blocks] for _ in ways]
    labels = torch.cat([labels for _, labels in batches])
    shuffled = iter(labels[torch.randperm(len(labels), generator=generator(0))].split([len(b) for _, b in batches]))
    for images, labels in tqdm(batches, unit="batch", disable=None):
        with torch.inference_mode():
            layers, logits = tokens.features(model, images)
            last, wrong = logits.argmax(1), next(shuffled)
            for (way, tuned), (number, layer) in itertools.product(enumerate(ways), enumerate(layers)):
                own, each = read_out(model, layer if tuned is None else tuned.moved(layer, number))
                far, patches, own = divergence(logits, own), each[:, model.num_prefix_tokens :], own.argmax(1)
                mean, alone = patches.mean(1).argmax(1), patches.argmax(2)
                unknown = far.new_full(far.shape, torch.nan)
                for reader, right, agrees, kl in (
                    ("class token", own == labels, own == last, far),
                    ("mean of patches", mean == labels, mean == last, unknown),
                    ("one patch", (alone == labels[:, None]).double().mean(1), alone == last[:, None], unknown),
                    ("wrong label", own == wrong, own == last, unknown),
                ):
                    found[way][number][reader].append((right, agrees.double(), kl.double()))
    return [
        [{name: [torch.cat(part) for part in zip(*each, strict=True)] for name, each in layer.items()} for layer in way]
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
            row = {"model": name, "lens": lens, "layer": layer, "reader": reader, "images": len(right)}
            row |= dict(zip(("accuracy", "low", "high"), score, strict=True))
            row["agrees"] = 100 * agrees.double().mean().item()
            known = reader == "class token"
            row |= {"kl": kl.mean().item() if known else "", "kl_95": student(kl.numpy()) if known else ""}
            result.append(row)
    return result


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tuning", type=int, default=2000, help="other images that tune the lens")
    parser.add_argument("--save", type=Path, help="folder for the tuned lens of the first model")
    options = parser.parse_args()
    table, saved = [], options.save
    for title, model, batches, tuning in specimens(options, options.tuning):
        start, lenses = time.perf_counter(), {"plain": None}
        if tuning:
            said = lambda layer, loss, title=title: print(f"{title}, layer {layer}: loss {loss:.3f}", flush=True)  # noqa: E731
            lens = tune(model, tqdm(tuning, unit="batch", disable=None), on_layer=said)
            if saved:
                lens.save(saved)
                lens, saved = TunedLens.load(saved), None
            lenses["tuned"] = lens
        for way, found in zip(lenses, scored(model, batches, lenses.values()), strict=True):
            table += rows(title, way, found)
        print(f"{title}: {time.perf_counter() - start:.0f} s", flush=True)
    save = f" --save {options.save}" if options.save else ""
    write(options.out, [rounded(row, lambda value: f"{value:.4g}") for row in table], note("lens.py", options, save))
    for row in table:
        if row["reader"] != "wrong label":
            print(*(f"{v:.1f}" if isinstance(v, float) else v for v in row.values()))


if __name__ == "__main__":
    main()
