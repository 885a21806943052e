"""Free photographs: a labeled folder of five kinds, and 24 drawn at random for the paper's Fig. 14.

    python -m experiments.photographs --packages DIR --out data --samples vitlens_explorer/photos

DIR holds the unpacked Debian packages that `data/photographs.csv` names (`dpkg-deb -x PACKAGE.deb DIR`). The table has
a row for each photograph, with author and license. Those with a kind are written to OUT/photographs/KIND, with a
shorter side of 160 pixels. Of those in the column `listed`, 24 are drawn with seed 14, whatever they show, and the
middle square of each is written to OUT/figure14 with 224 pixels. The samples of live pages, which their table of
photos names, are written to --samples as middle squares of 320 pixels.
"""

import argparse
import io
import random
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd
import skimage
import sklearn.datasets
from PIL import Image, ImageOps

from vitlens_explorer.photos import SAMPLES

TABLE = Path(__file__).parents[1] / "data" / "photographs.csv"
INSTALLED = {
    "scikit-image": Path(skimage.__file__).parent / "data",
    "scikit-learn": Path(sklearn.datasets.__file__).parent / "images",
}
"""Folders of photographs in Python packages."""
SIDE, SQUARE, SAMPLE = 160, 224, 320
DRAWN, SEED = 24, 14
DIRECTORY, COMPRESSED = 2, 1
"""Flags of an entry in a file of Qt resources."""


def read_table() -> pd.DataFrame:
    """The rows of `data/photographs.csv`, with empty texts for empty cells."""
    return pd.read_csv(TABLE, dtype=str, keep_default_na=False)


def drawn(table: pd.DataFrame) -> list[str]:
    """Names of the photographs that are drawn for Fig. 14, in the order of the draw."""
    names = sorted(table["name"][table["listed"] == "yes"])
    return random.Random(SEED).sample(names, DRAWN)


def resources(file: Path) -> Iterator[tuple[str, bytes]]:
    """(path, content) of each file in a compiled file of Qt resources (.rcc)."""
    content = file.read_bytes()
    if content[:4] != b"qres":
        raise ValueError(f"{file} must be a file of Qt resources, which begins with qres.")
    version, tree, data, names = struct.unpack(">4I", content[4:20])
    entry_size = 14 if version == 1 else 22

    def name_at(offset: int) -> str:
        start = names + offset
        (length,) = struct.unpack(">H", content[start : start + 2])
        return content[start + 6 : start + 6 + 2 * length].decode("utf-16-be")

    def content_at(offset: int, flags: int) -> bytes:
        start = data + offset
        (length,) = struct.unpack(">I", content[start : start + 4])
        stored = content[start + 4 : start + 4 + length]
        return zlib.decompress(stored[4:]) if flags & COMPRESSED else stored

    def entries(number: int, folder: str) -> Iterator[tuple[str, bytes]]:
        entry = tree + number * entry_size
        name, flags = struct.unpack(">IH", content[entry : entry + 6])
        path = f"{folder}/{name_at(name)}" if number else ""
        if flags & DIRECTORY:
            count, first = struct.unpack(">II", content[entry + 6 : entry + 14])
            for child in range(first, first + count):
                yield from entries(child, path)
            return
        (offset,) = struct.unpack(">I", content[entry + 10 : entry + 14])
        yield path, content_at(offset, flags)

    return entries(0, "")


def open_photographs(table: pd.DataFrame, packages: Path) -> dict[str, Image.Image]:
    """The photographs of the table by name, as RGB. Raises FileNotFoundError for a missing one."""
    files = {path.name: path for path in packages.rglob("*.jpg")}
    in_resources = {}
    for file in sorted(packages.rglob("*.rcc")):
        in_resources.update(resources(file))
    photographs = {}
    for row in table.itertuples():
        package = row.package.split()[0]
        if package in INSTALLED:
            content = (INSTALLED[package] / row.path).read_bytes()
        elif row.path in files:
            content = files[row.path].read_bytes()
        elif f"/gcompris/src/activities/{row.path}" in in_resources:
            content = in_resources[f"/gcompris/src/activities/{row.path}"]
        else:
            raise FileNotFoundError(f"{packages} lacks {row.path} of {row.package}.")
        photographs[row.name] = Image.open(io.BytesIO(content)).convert("RGB")
    return photographs


def write_labeled(photographs: dict[str, Image.Image], table: pd.DataFrame, out: Path) -> None:
    """Write the photographs that have a kind, with a shorter side of `SIDE` pixels."""
    for row in table[table["kind"] != ""].itertuples():
        image = photographs[row.name]
        scale = SIDE / min(image.size)
        size = [round(scale * side) for side in image.size]
        folder = out / row.kind
        folder.mkdir(parents=True, exist_ok=True)
        smaller = image.resize(size, Image.Resampling.BICUBIC)
        smaller.save(folder / f"{row.name}.jpg", quality=78, optimize=True)


def write_drawn(photographs: dict[str, Image.Image], names: Sequence[str], out: Path) -> None:
    """Write the middle squares of the photographs that were drawn, numbered in the order of the draw."""
    out.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names):
        square = ImageOps.fit(photographs[name], (SQUARE, SQUARE), Image.Resampling.BICUBIC)
        square.save(out / f"{number:02d}-{name}.jpg", quality=85, optimize=True)


def write_samples(photographs: dict[str, Image.Image], out: Path) -> None:
    """Write the middle squares of the sample photographs of live pages that have a file."""
    for sample in SAMPLES:
        if sample.listed:
            square = ImageOps.fit(
                photographs[sample.listed], (SAMPLE, SAMPLE), Image.Resampling.BICUBIC
            )
            square.save(out / f"{sample.name}.jpg", quality=82, optimize=True)


def main(arguments: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--packages", type=Path, required=True, help="unpacked Debian packages")
    options.add_argument("--out", type=Path, required=True, help="folder to write to")
    options.add_argument("--samples", type=Path, help="folder for the samples of live pages")
    options = options.parse_args(arguments)
    table = read_table()
    photographs = open_photographs(table, options.packages)
    write_labeled(photographs, table, options.out / "photographs")
    write_drawn(photographs, drawn(table), options.out / "figure14")
    if options.samples:
        write_samples(photographs, options.samples)


if __name__ == "__main__":
    main()
