"""The picture at the head of the README: the four figures of the bundled model on the sample photographs.

    python -m experiments.readme_picture

It has two pixels for each of the page's, so the README shows it at half its width.
"""

import argparse
import io
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from vitlens import load_model, plot, report
from vitlens.images import samples
from vitlens.report import SHARP


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="data/checkpoints/vit_tiny_patch16_224")
    parser.add_argument("--out", type=Path, default=Path("data/results/inspection.jpg"))
    options = parser.parse_args(arguments)
    found = report.inspect(load_model(options.model), samples().items())
    figure = plot.inspected({Path(options.model).name: found})
    figure.savefig(pixels := io.BytesIO(), dpi=SHARP)
    picture = Image.open(pixels).convert("RGB")
    picture.save(options.out, quality=85, subsampling=0, optimize=True, progressive=True)  # a quarter of a PNG
    print(f"Wrote {options.out}, {picture.width} × {picture.height}, {options.out.stat().st_size // 1000} kB.")


if __name__ == "__main__":
    main()
