"""Run notebooks in clean kernels and write them back with their outputs, and with nothing that changes by itself.

    python notebooks/execute.py 03 05     # some; without numbers all of them, which is `make notebooks`
    python notebooks/execute.py --check   # write nothing, and fail if an output differs from the file's

A thumbnail for the index is made of the picture in the cell that is tagged "thumbnail".
"""

import base64
import io
import os
import sys
import tempfile
from pathlib import Path

import matplotlib.font_manager  # noqa: F401  (the first import anywhere builds a cache, and says so on stderr)
import nbformat
from nbclient import NotebookClient
from PIL import Image

FOLDER = Path(__file__).parent
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def notebooks(chosen: list[str]) -> list[Path]:
    """The numbered notebooks, or those whose names begin with one of `chosen`."""
    return [p for p in sorted(FOLDER.glob("[0-9]*.ipynb")) if not chosen or p.name.startswith(tuple(chosen))]


def executed(path: Path, tiny: bool = False) -> nbformat.NotebookNode:
    """The notebook, run from the first cell to the last in a kernel of its own; `tiny` makes it do less work."""
    book = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as profile:  # nobody's own IPython settings
        environment = os.environ | {"VITLENS_TINY": "1" if tiny else "", "IPYTHONDIR": profile}
        client = NotebookClient(book, timeout=1800, kernel_name="python3", record_timing=False, coalesce_streams=True)
        client.resources, client.extra_arguments = {"metadata": {"path": str(FOLDER)}}, ["--log-level=ERROR"]
        client.execute(env=environment)
    return normalised(book)


def normalised(book: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The notebook without widget state, random identifiers and foreign metadata. RuntimeError if stderr was used."""
    book.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": {"name": "python"}})
    book.nbformat, book.nbformat_minor = 4, 5
    for number, cell in enumerate(book.cells, 1):
        cell.id = f"cell-{number:02d}"
        cell.metadata = nbformat.from_dict({k: v for k, v in cell.metadata.items() if k == "tags"})
        for output in cell.get("outputs", []):
            if output.get("name") == "stderr":
                raise RuntimeError(f"Cell {number} writes to stderr: {output.text}")
            if "metadata" in output:
                output.metadata = nbformat.from_dict({})
    return book


def thumbnail(book: nbformat.NotebookNode) -> bytes:
    """A small PNG of the figure in the cell tagged "thumbnail"."""
    tagged = [cell for cell in book.cells if "thumbnail" in cell.metadata.get("tags", [])]
    data = next(o.data["image/png"] for cell in tagged for o in cell.outputs if "image/png" in o.get("data", {}))
    picture = Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")
    picture.thumbnail((300, 225), Image.Resampling.LANCZOS)
    picture.quantize(256, Image.Quantize.MAXCOVERAGE).save(file := io.BytesIO(), "PNG", optimize=True)
    return file.getvalue()


def main(arguments: list[str]) -> int:
    check, different = "--check" in arguments, 0
    if not (chosen := notebooks([a for a in arguments if a != "--check"])):
        sys.exit(f"No notebook begins with {' or '.join(arguments)}; give numbers such as 03.")
    for path in chosen:
        text = nbformat.writes(book := executed(path)) + "\n"
        same = text == path.read_text(encoding="utf-8")
        different += not same
        print(f"{path.name}: {'unchanged' if same else 'DIFFERENT' if check else 'written'}, {len(text) // 1000} kB")
        if not check:
            path.write_text(text, encoding="utf-8")
            (FOLDER / "thumbnails" / f"{path.stem}.png").write_bytes(thumbnail(book))
    return int(check and different > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
