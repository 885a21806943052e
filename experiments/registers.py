"""A register at test time: do the outliers leave the patches, and what does it cost in accuracy?

    python -m experiments.registers --data tiny-imagenet --out data/results/registers.csv

`vitlens.tokens.register_neurons` names --neurons neurons of the specimen on --finding validation images, and
`with_register` moves what they give to a new token. On --images others: accuracy, and its change from the model itself
in points, with a paired 95 % interval; how often the answer stays. By layer, the mean over images of the largest ratio
of a patch's norm to the median, of the share of patches above --times the median, in per cent, and of how rough the map
of norms is (`vitlens.tokens.roughness`); in the last layer, how rough the map of the attention is that patches receive.
All with the half width of a 95 % interval (Student's t), and for roughness the change from the model itself, paired by
image. Then the register's norm over the median. Controls, on the first --controls images: a register that nothing is
moved to, and one that takes over as many random neurons of the same layers. Their changes are from the model on the
same images, which has rows of its own if there are fewer of these.
"""

import argparse
from pathlib import Path

import torch
from tqdm import tqdm

from experiments.results import rounded, sentence, write
from vitlens import capture, load_model, tokens
from vitlens.evaluate import proportion, student
from vitlens.evaluate.passage import Pictures, generator
from vitlens.evaluate.scores import paired
from vitlens.tokens.sinks import median

MODEL, BATCH = "data/checkpoints/vit_tiny_patch16_224", 10


def looked_at(model, images, labels, times: float) -> dict[str, torch.Tensor]:
    """(B,) the answer and whether it is right, and (B, L) of each quantity."""
    with torch.inference_mode(), capture(model) as attn:
        layers, logits = tokens.features(model, images)
        received = attn[-1].weights().mean((1, 2)).double()
    lengths = torch.stack([tokens.norms(layer) for layer in layers], 1).double()
    prefix, patches = attn.grid.prefix, lengths[..., attn.grid.prefix :]
    middle, last = median(patches), torch.full(patches.shape[:2], torch.nan, dtype=torch.float64)
    last[:, -1] = tokens.roughness(attn.grid.image_map(received))
    return {
        "answer": logits.argmax(1),
        "right": logits.argmax(1) == labels,
        "largest_ratio": patches.amax(-1) / middle,
        "above": 100 * tokens.outliers(patches, times).double().mean(-1),
        "rough_norms": tokens.roughness(attn.grid.image_map(lengths)),
        "rough_received": last,
        "register_ratio": lengths[..., prefix - 1] / middle,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", required=True, help="a data set with validation images")
    parser.add_argument("--images", type=int, default=9900)
    parser.add_argument("--controls", type=int, default=3000, help="images of them that the controls see")
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
    seen = 0
    for _, (images, labels) in tqdm(pictures.read(range(len(pictures.batches))), unit="batch", disable=None):
        for name, each in variants.items():
            if name in ("the model", "register") or seen < options.controls:
                found[name].append(looked_at(each, images, labels, options.times))
        seen += len(images)
    found = {name: {k: torch.cat([part[k] for part in each]) for k in each[0]} for name, each in found.items()}
    if options.controls < options.images:
        seen = len(found["empty register"]["right"])
        first = {k: values[:seen] for k, values in found["the model"].items()}
        found = {"the model": found.pop("the model"), f"the model, first {seen:,}": first, **found}
    rows = []
    for name, each in found.items():
        count = len(each["right"])
        own = {k: values[:count] for k, values in found["the model"].items()}
        lost, gained = (int((a["right"] & ~b["right"]).sum()) for a, b in ((own, each), (each, own)))
        scores = {"accuracy": proportion(int(each["right"].sum()), count), "change": paired(lost, gained, count)}
        row = {"variant": name, "images": count}
        row["neurons"] = " ".join(f"{layer}.{n}" for layer, many in named.get(name, {}).items() for n in many)
        for score, values in scores.items():
            row |= dict(zip((score, f"{score}_low", f"{score}_high"), values, strict=True))
        row["same_answer"] = 100 * (each["answer"] == own["answer"]).double().mean().item()
        means = {k: each[k] for k in ("largest_ratio", "above", "rough_norms", "rough_received")}
        means |= {f"{k}_change": each[k] - own[k] for k in ("rough_norms", "rough_received")}
        for layer in range(len(model.blocks)):
            more = {"layer": layer}
            for quantity, values in means.items():
                values = values[:, layer]
                known = values.isfinite().all()
                more[quantity] = values.mean().item() if known else ""
                more[f"{quantity}_95"] = student(values.numpy()) if known else ""
            ratio = each["register_ratio"][:, layer].mean().item()
            more["register_ratio"] = "" if name.startswith("the model") else ratio
            rows.append(row | more)
    sizes = f"--data {Path(options.data).name} --images {options.images} --controls {options.controls}"
    command = f"python -m experiments.registers {sizes} --out {options.out}"
    write(options.out, [rounded(row, lambda value: f"{value:.4g}") for row in rows], sentence(command))
    for row in rows:
        print(*row.values())


if __name__ == "__main__":
    main()
