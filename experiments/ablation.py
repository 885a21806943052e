"""What it costs to switch off every head alone, beside as many whole forwards of the same pictures.

    python -m experiments.ablation --data tiny-imagenet --out data/results/ablation-cpu.csv

Each quarter of the pictures is run through the model whole, then through `ablation.effects`, and then whole again.
Seconds are those that the processor spent, as other work on the machine does not count; reading and decoding pictures
are not among them. `forwards` is what a whole forward of the pictures costs on average, times the number of heads.
"mean", the default, costs one forward more than "zero": that of the means.
"""

import argparse
import time
from pathlib import Path

import torch

from experiments.results import about, write
from vitlens import ablation, load_model
from vitlens.data import ImageSet
from vitlens.data.augment import normalized
from vitlens.evaluate.passage import Pictures

MODEL, BATCH, PARTS = "data/checkpoints/vit_tiny_patch16_224", 20, 4


def spent(do) -> float:
    """Seconds of the processor, of all threads together."""
    start = time.process_time()
    do()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", required=True, help="a data set with validation images")
    parser.add_argument("--model", default=MODEL, help="a folder in timm's hub layout")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--ways", nargs="+", choices=("zero", "mean"), default=("mean",))
    parser.add_argument("--out", type=Path, required=True, help="CSV to write")
    options = parser.parse_args()
    model = load_model(options.model)
    drawn = Pictures(model, options.data, options.images, 0, BATCH, False, {"workers": 1})
    images, labels = map(torch.cat, zip(*drawn.data.batches(drawn.batches), strict=True))
    held = ImageSet(images, labels, drawn.data.class_names)
    config, whole, taken = model.pretrained_cfg, 0.0, dict.fromkeys(options.ways, 0.0)
    command = f"python -m experiments.ablation --data tiny-imagenet --images {options.images} --ways"

    def forwards(part: ImageSet) -> None:
        with torch.no_grad():
            for each in part.images.split(BATCH):
                model(normalized(each, config["mean"], config["std"]))

    forwards(held.chosen(torch.arange(2 * BATCH)))  # the first ones warm up
    for number, rows in enumerate(torch.arange(len(held)).tensor_split(PARTS)):
        part = held.chosen(rows)
        whole += spent(lambda part=part: forwards(part)) / 2
        for way in options.ways:
            quiet = {"progress": False, "say": lambda text: None}
            taken[way] += spent(
                lambda part=part, way=way, quiet=quiet: ablation.effects(model, part, ways=[way], batch=BATCH, **quiet)
            )
        whole += spent(lambda part=part: forwards(part)) / 2
        rows = [
            {
                "model": Path(options.model).name, "heads": len(drawn.heads), "images": int(rows[-1]) + 1, "way": way,
                "seconds": round(seconds, 1), "forwards": round(len(drawn.heads) * whole, 1),
                "of_the_forwards": round(seconds / (len(drawn.heads) * whole), 3),
            }
            | about(f"{command} {' '.join(options.ways)}")
            for way, seconds in taken.items()
        ]  # fmt: skip
        print(f"{number + 1} of {PARTS}", *rows, sep="\n", flush=True)
        write(options.out, rows)


if __name__ == "__main__":
    main()
