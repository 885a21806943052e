"""A register at test time: do the outliers leave the patches, and what does it cost in accuracy?

    python benchmarks/registers.py --data tiny-imagenet --out data/results/registers.csv

`vitlens.tokens.register_neurons` names --neurons neurons of the specimen on --finding validation images, and
`with_register` moves what they give to a new token. On --images others: accuracy, and its change from the model itself
in points, with a paired 95 % interval; how often the answer stays. By layer, the mean over images of the largest ratio
of a patch's norm to the median, and of the share of patches above --times the median, in per cent, both with the half
width of a 95 % interval (Student's t); and the register's norm over that median. Controls: a register that nothing is
moved to, and one that takes over as many random neurons of the same layers.
"""

import argparse
from pathlib import Path

import torch
from results import rounded, sentence, write
from tqdm import tqdm

from vitlens import load_model, tokens
from vitlens.evaluate import proportion, student
from vitlens.evaluate.passage import Pictures, generator
from vitlens.evaluate.scores import paired

MODEL, BATCH = "data/checkpoints/vit_tiny_patch16_224", 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", required=True, help="a data set with validation images")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--finding", type=int, default=100, help="other images that the neurons are found on")
    parser.add_argument("--neurons", type=int, default=5)
    parser.add_argument("--times", type=float, default=2.0, help="times the median norm that make an outlier")
    parser.add_argument("--out", type=Path, required=True, help="CSV to write")
    options = parser.parse_args()
    model = load_model(MODEL)
    pictures = Pictures(
        model, options.data, options.images + options.finding, 0, BATCH, False, {"workers": 1}, first=options.finding
    )
    finding = torch.cat([images for _, (images, _) in pictures.read(range(-len(pictures.first), 0))])
    neurons = tokens.register_neurons(model, finding, options.neurons, times=options.times)
    print(neurons, flush=True)
    rng = generator(0)
    chance = {
        layer: torch.randperm(model.blocks[layer].mlp.fc2.in_features, generator=rng)[: len(found)].tolist()
        for layer, found in neurons.items()
    }
    variants = {
        "the model": model,
        "empty register": tokens.with_register(model, {}),
        "register": tokens.with_register(model, neurons),
        "register, random neurons": tokens.with_register(model, chance),
    }
    named = {"register": neurons, "register, random neurons": chance}
    found = {name: [] for name in variants}
    for _, (images, labels) in tqdm(pictures.read(range(len(pictures.batches))), unit="batch", disable=None):
        for name, each in variants.items():
            with torch.inference_mode():
                layers, logits = tokens.features(each, images)
            lengths = torch.stack([tokens.norms(layer) for layer in layers], 1).double()
            prefix, answer = each.num_prefix_tokens, logits.argmax(1)
            median = lengths[..., prefix:].median(-1).values
            above = 100 * tokens.outliers(lengths[..., prefix:], options.times).double().mean(-1)
            largest, register = lengths[..., prefix:].amax(-1) / median, lengths[..., prefix - 1] / median
            found[name].append((answer, answer == labels, largest, above, register))
    found = {name: [torch.cat(part) for part in zip(*each, strict=True)] for name, each in found.items()}
    own, correct, *_ = found["the model"]
    rows = []
    for name, (answer, right, largest, above, register) in found.items():
        lost, gained = int((correct & ~right).sum()), int((~correct & right).sum())
        scores = {"accuracy": proportion(int(right.sum()), len(right)), "change": paired(lost, gained, len(right))}
        row = {"variant": name, "images": len(right)}
        row["neurons"] = " ".join(f"{layer}.{n}" for layer, each in named.get(name, {}).items() for n in each)
        for score, values in scores.items():
            row |= dict(zip((score, f"{score}_low", f"{score}_high"), values, strict=True))
        row["same_answer"] = 100 * (answer == own).double().mean().item()
        for layer in range(len(model.blocks)):
            more = {"layer": layer}
            for quantity, values in (("largest_ratio", largest), ("above", above)):
                more |= {quantity: values[:, layer].mean().item(), f"{quantity}_95": student(values[:, layer].numpy())}
            more["register_ratio"] = "" if name == "the model" else register[:, layer].mean().item()
            rows.append(row | more)
    command = f"python benchmarks/registers.py --data tiny-imagenet --out {options.out}"
    write(options.out, [rounded(row, lambda value: f"{value:.4g}") for row in rows], sentence(command))
    for row in rows:
        print(*row.values())


if __name__ == "__main__":
    main()
