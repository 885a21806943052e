"""Run notebooks in clean kernels and write them back with their outputs, and with nothing that changes by itself.

    python notebooks/execute.py 03 A      # some; without names all of them, which is `make notebooks`
    python notebooks/execute.py --check   # write nothing, and fail if an output differs from the file's
    python notebooks/execute.py --model deit_tiny_patch16_224 --images cat.jpg --figures DIR   # figures of your own

The figure of the cell tagged "opening" becomes the picture at the top of the chapter and in the index.
"""

import argparse
import base64
import datetime
import io
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import matplotlib.font_manager  # noqa: F401  (the first import anywhere builds a cache, and says so on stderr)
import nbformat
import numpy as np
from book import open_images
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from PIL import Image, ImageOps

from vitlens import load_model, report
from vitlens.plot.alt_text import image
from vitlens.train.runs import versions

FOLDER = Path(__file__).parent
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
INSTALL = "git clone -q {REPOSITORY} v; {sys.executable} -m pip install -q ./v captum anywidget"
NO_ADDRESS = "On Colab, write the address of your copy of vitlens between the quotes of REPOSITORY in this cell."
NO_CLONE = "git clone {REPOSITORY} failed. Check the address."
SETUP = f"""\
import os, sys
REPOSITORY = ""  # on Colab, the address of the repository, which is then installed
if os.getenv("COLAB_RELEASE_TAG"):
    assert REPOSITORY, "{NO_ADDRESS}"
    os.system(f"{INSTALL}")
    assert os.path.isdir("v/notebooks"), f"{NO_CLONE}"
    os.chdir("v/notebooks")
from book import *"""
FOLDED = {"tags": ["setup", "hide-input"], "jupyter": {"source_hidden": True}}
KEPT = ("alt", "jupyter", "page", "tags", "tiny")  # of the metadata of a cell
LIVE = "application/vnd.jupyter.widget-view+json"
STILL = re.compile(r'<style class="vitlens-still">.*?</style><div[^>]*>(<img.*>)</div>')
FIGURE = re.compile(r'<img alt="[^"]+" width="([0-9]+)" src="data:image/[a-z]+;base64,([^"]+)">')
UNSEEN = 12  # of 255 levels of a color, as a JPEG is off by several times around letters
EDGES = 0.25  # of the pixels


def notebooks(chosen: list[str]) -> list[Path]:
    """The chapters, or those whose names begin with one of `chosen`."""
    paths = sorted(FOLDER.glob("[0-9A-D]*_*.ipynb"))
    if not chosen:
        return paths
    return [path for path in paths if path.name.startswith(tuple(chosen))]


def prepared(
    path: Path, tiny: bool = False, model: str = "", images: Sequence[str] = ()
) -> nbformat.NotebookNode:
    """The notebook before it is run.

    `tiny` applies the replacements in the metadata of its cells, for less work; `model`, a name or a folder, and the
    files `images` take the places of its MODEL and IMAGES.
    """
    book = nbformat.read(path, as_version=4)
    if model and Path(model).is_dir():
        model = str(Path(model).resolve())
    own = {"MODEL": model, "IMAGES": [str(Path(file).resolve()) for file in images]}
    for cell in book.cells:
        if cell.id == "setup":
            address = re.search('REPOSITORY = (".*?")', cell.source)
            cell.source = SETUP.replace('""', address[1], 1) if address else SETUP
            cell.metadata = nbformat.from_dict(FOLDED)
        replacements = cell.metadata.get("tiny", {}) if tiny else {}
        for old, new in replacements.items():
            if old not in cell.source:
                raise ValueError(
                    f"Cell {cell.id} of {path.name} has no {old!r}, which its metadata replace."
                )
            cell.source = cell.source.replace(old, new)
        if cell.id == "subject":
            for name, value in own.items():
                if value:
                    cell.source = assign(cell.source, name, value)
    return book


def assign(code: str, name: str, value: object) -> str:
    """Code with another value in the line that assigns a name."""
    line = f"{name} = {value!r}".replace("\\", r"\\")  # a backslash is special in a replacement
    return re.sub(rf"^{name} = .*", line, code, flags=re.M)


def answers(book: nbformat.NotebookNode) -> list[str]:
    """The code in the folded answers to the exercises."""
    text = "\n".join(cell.source for cell in book.cells)
    codes = []
    for answer in re.findall("<details>.*?</details>", text, re.S):
        codes += re.findall(r"^```python\n(.*?)^```", answer, re.S | re.M)
    return codes


def executed(path: Path, **own) -> nbformat.NotebookNode:
    """The notebook, run from the first cell to the last in a kernel of its own; arguments as of `prepared`."""
    book = prepared(path, **own)
    with tempfile.TemporaryDirectory() as profile:  # nobody's own IPython settings
        environment = os.environ | {"IPYTHONDIR": profile, "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
        client = NotebookClient(
            book, timeout=1800, kernel_name="python3", record_timing=False, coalesce_streams=True
        )
        client.resources = {"metadata": {"path": str(FOLDER)}}
        client.extra_arguments = [
            "--log-level=ERROR",
            "--InlineBackend.figure_format=retina",  # twice the pixels, shown at the same size
        ]
        client.execute(env=environment)
    return normalized(book, keeps_notes=bool(own.get("model")))


def normalized(book: nbformat.NotebookNode, keeps_notes: bool = False) -> nbformat.NotebookNode:
    """The notebook without live widgets, random identifiers and foreign metadata. RuntimeError if stderr was used.

    keeps_notes: stderr is allowed, because a model of the reader may need notes, and stays in the outputs.
    A widget lives as long as its kernel, so only its still image is kept, as HTML and PNG. Figures are HTML alone, so
    that none is in the file twice. A cell's "alt" in its metadata replaces the alt text of its figure.
    """
    book.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": {"name": "python"}})
    book.nbformat, book.nbformat_minor = 4, 5
    for number, cell in enumerate(book.cells, 1):
        cell.metadata = nbformat.from_dict({k: v for k, v in cell.metadata.items() if k in KEPT})
        if cell.cell_type == "code":
            cell.outputs = [each for each in cell.outputs if LIVE not in each.get("data", {})]
        for output in cell.get("outputs", []):
            if output.get("name") == "stderr" and not keeps_notes:
                raise RuntimeError(f"Cell {number} writes to stderr: {output.text}")
            if "metadata" in output:
                output.metadata = nbformat.from_dict({})
            still = STILL.fullmatch(output.get("data", {}).get("text/html", ""))
            if still:
                output.data["text/html"] = still[1]
            figure = FIGURE.fullmatch(output.get("data", {}).get("text/html", ""))
            if figure:
                alt = cell.metadata.get("alt", output.data["text/plain"])
                width, file = int(figure[1]), base64.b64decode(figure[2])
                small = compact(file)
                ratio = open_image(small).width / open_image(file).width
                html = image(small, alt, math.ceil(width * ratio))
                output.data = nbformat.from_dict({"text/html": html, "text/plain": alt})
                if still:
                    output.data["image/png"] = base64.b64encode(fallback(small)).decode()
    return book


def fallback(still: bytes) -> bytes:
    """A still as PNG at half its size, for readers that show no HTML."""
    picture = open_image(still).convert("RGB").reduce(2)
    return encoded(picture.quantize(256, Image.Quantize.MAXCOVERAGE), "PNG", optimize=True)


def open_image(file: bytes) -> Image.Image:
    return Image.open(io.BytesIO(file))


def compact(png: bytes) -> bytes:
    """A figure, in even numbers of pixels, in a small file. JPEG and WebP, of stills and animations, stay as they are.

    Every pixel is kept, in a lossless WebP, except where a JPEG whose losses nobody sees is a fifth smaller, as with
    photographs. In a chart, whose other colors are edges of letters and shades of bands, up to
    EDGES of the pixels may be UNSEEN off in a palette. Dithering would put dots into maps that no model made.
    """
    picture = open_image(png)
    if picture.format in ("JPEG", "WEBP"):
        return png
    picture = picture.convert("RGB")
    picture = ImageOps.expand(picture, (0, 0, picture.width % 2, picture.height % 2), "white")
    method = None if picture.getcolors(256) else Image.Quantize.MAXCOVERAGE
    few = picture.quantize(256, method)
    off = np.abs(np.asarray(picture, int) - np.asarray(few.convert("RGB"), int)).max(2)
    like_the_picture = off.max() <= UNSEEN and (off > 0).mean() <= EDGES
    kept = few.convert("RGB") if like_the_picture else picture
    exact = encoded(kept, "WEBP", lossless=True, exact=True, quality=100, method=6)
    jpeg = encoded(picture, "JPEG", quality=78, subsampling=0, optimize=True, progressive=True)
    return jpeg if 5 * len(jpeg) < 4 * len(exact) else exact


def encoded(picture: Image.Image, kind: str, **options) -> bytes:
    """A picture as a file of a kind, with Pillow's options for it."""
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def pictures(cells: list[nbformat.NotebookNode]) -> Iterator[bytes]:
    """The files of the figures among the outputs of cells."""
    for cell in cells:
        for output in cell.get("outputs", []):
            figure = FIGURE.fullmatch(output.get("data", {}).get("text/html", ""))
            if figure:
                yield base64.b64decode(figure[2])


def opening(book: nbformat.NotebookNode) -> tuple[str, bytes]:
    """Kind and file of the picture of a chapter: the drawing or figure in the cell tagged "opening"."""
    tagged = [cell for cell in book.cells if "opening" in cell.metadata.get("tags", [])]
    for cell in tagged:
        for output in cell.outputs:
            drawing = output.get("data", {}).get("image/svg+xml")
            if drawing:
                return "svg", drawing.encode()
    picture = open_image(next(pictures(tagged))).convert("RGB")
    picture.thumbnail((1200, 1200), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    picture.save(file, "WEBP", quality=80, method=6)
    return "webp", file.getvalue()


def write(paths: list[Path], check: bool) -> int:
    """Run notebooks and write them and their pictures, or with `check` only print which would differ."""
    different = 0
    for path in paths:
        book = executed(path)
        kind, picture = opening(book)
        name = f"pictures/{path.stem}.{kind}"
        book.cells[0].source = re.sub(rf"pictures/{path.stem}\.\w+", name, book.cells[0].source)
        text = nbformat.writes(book) + "\n"
        same = text == path.read_text(encoding="utf-8")
        different += not same
        result = "unchanged"
        if not same:
            result = "DIFFERENT" if check else "written"
        print(f"{path.name}: {result}, {len(text) // 1000} kB")
        if not check:
            path.write_text(text, encoding="utf-8")
            (FOLDER / name).write_bytes(picture)
    return int(check and different > 0)


def show(paths: list[Path], options: argparse.Namespace) -> int:
    """Run notebooks on another model and other images; write summary.json of `vitlens inspect` and each figure.

    A notebook with a reason not to show this model is skipped with that sentence; then 1 is returned.
    """
    found = report.inspect(load_model(options.model), open_images(options.images).items())
    words = ["python notebooks/execute.py", *options.numbers, "--model", Path(options.model).name]
    words += ["--images", *(Path(file).name for file in options.images)] if options.images else []
    words += ["--figures DIR"]
    made = {
        "command": " ".join(words),
        "versions": versions(),
        "date": datetime.date.today().isoformat(),
    }
    summary = json.dumps(made | found.to_dict(), indent=1, allow_nan=False)
    options.figures.mkdir(parents=True, exist_ok=True)
    (options.figures / "summary.json").write_text(summary + "\n", encoding="utf-8")
    passed_over = 0
    for path in paths:
        try:
            figures = list(
                pictures(executed(path, model=options.model, images=options.images or ()).cells)
            )
        except CellExecutionError as error:
            if error.ename not in ("ValueError", "UnsupportedModelError"):
                raise
            passed_over += 1
            print(f"{path.name}: {error.evalue}")
            continue
        for number, figure in enumerate(figures, 1):
            kind = Image.open(io.BytesIO(figure)).format.lower()
            (options.figures / f"{path.stem.split('_')[0]}-{number}.{kind}").write_bytes(figure)
        print(f"{path.name}: {len(figures)} figures, {sum(map(len, figures)) // 1000} kB")
    return int(passed_over > 0)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("numbers", nargs="*", help="such as 03 A; all without any")
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing, fail if an output differs from the file's",
    )
    parser.add_argument(
        "--model", help="a timm name or a folder, in place of MODEL; no notebook is written"
    )
    parser.add_argument("--images", nargs="+", help="files in place of the samples, with --model")
    parser.add_argument("--figures", type=Path, help="where figures and summary.json of --model go")
    options = parser.parse_args(arguments)
    if not (chosen := notebooks(options.numbers)):
        sys.exit(
            f"No notebook begins with {' or '.join(options.numbers)}; give names such as 03 or A."
        )
    if not (options.model or options.images or options.figures):
        return write(chosen, options.check)
    if not options.model or not options.figures or options.check:
        sys.exit(
            "Figures of your own need both --model and --figures, and nothing to --check them against."
        )
    try:
        return show(chosen, options)
    except (ValueError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
