"""The picture at the head of the README: the four figures of the bundled model on the sample photographs.

python benchmarks/readme_picture.py
"""

import argparse
import io
from pathlib import Path

from PIL import Image

from vitlens import load_model, plot
from vitlens.images import samples
from vitlens.reports import inspection


def picture(figure) -> Image.Image:
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=100)
    return Image.open(buffer).convert("RGB")


def scaled(figure: Image.Image, *, width: int = 0, height: int = 0) -> Image.Image:
    """To a width or to a height, in proportion."""
    factor = width / figure.width if width else height / figure.height
    return figure.resize((round(figure.width * factor), round(figure.height * factor)), Image.Resampling.LANCZOS)


def beside(pictures, gap: int = 16) -> Image.Image:
    """Pictures in a row, centered on one line."""
    width = sum(p.width for p in pictures) + gap * (len(pictures) - 1)
    page, x = Image.new("RGB", (width, max(p.height for p in pictures)), "white"), 0
    for p in pictures:
        page.paste(p, (x, (page.height - p.height) // 2))
        x += p.width + gap
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="data/checkpoints/vit_tiny_patch8_64")
    parser.add_argument("--out", type=Path, default=Path("data/results/inspection.png"))
    options = parser.parse_args()
    model = load_model(options.model)
    found = inspection.inspect(model, list(samples().items()))
    uniform = found.grid.uniform_distance()
    filters = picture(plot.filters(found.filters, found.explained_variance))
    positions = picture(plot.position_similarity(found.similarity))
    distance = picture(plot.attention_distance(found.mean_distance, uniform=uniform).figure)
    pictures = found.pictures
    rollout = picture(plot.rollouts([p.pixels for p in pictures], [p.rollout for p in pictures], grid=found.grid))
    upper = beside([scaled(p, height=400) for p in (filters, positions)])
    lower = beside([scaled(p, width=round(upper.width * share)) for p, share in ((distance, 0.41), (rollout, 0.57))])
    page = Image.new("RGB", (max(upper.width, lower.width), upper.height + lower.height + 12), "white")
    page.paste(upper, (0, 0))
    page.paste(lower, ((page.width - lower.width) // 2, upper.height + 12))
    page.save(options.out, optimize=True)
    print(f"Wrote {options.out}, {page.width} × {page.height}.")


if __name__ == "__main__":
    main()
