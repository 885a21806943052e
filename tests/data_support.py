"""Small data sets of every kind, in the layouts of published ones."""

import io
import json
import pickle
import struct
import tarfile
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

from vitlens.data import load

KINDS = {"ant": "JPEG", "bee": "PNG", "cat": "JPEG"}


def encoded(seed: int, kind: str = "PNG", size=(12, 10), mode: str = "RGB") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return saved(Image.fromarray(pixels).convert(mode), kind)


def saved(image: Image.Image | np.ndarray, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(
        buffer, kind, **options
    )
    return buffer.getvalue()


def png(width, height, *chunks, depth=8, color=2):
    """Bytes of a PNG file with this header (RGB of 8 bits), which may declare more data than the chunks hold."""

    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        chunk(*c) for c in ((b"IHDR", header), *chunks, (b"IEND", b""))
    )


def shown(data: bytes) -> torch.Tensor:
    """uint8 (3, H, W) pixels of an encoded image, by Pillow."""
    return torch.from_numpy(np.array(Image.open(io.BytesIO(data)).convert("RGB"))).permute(2, 0, 1)


def files(per_class: int) -> dict[str, bytes]:
    """Encoded images by path below the folder of a split."""
    return {
        f"{name}/{i:03d}.{kind.lower()}": encoded(1000 * n + i, kind)
        for n, (name, kind) in enumerate(KINDS.items())
        for i in range(per_class)
    }


def colors(folder: Path, count: int, names=("blue", "green", "red")) -> None:
    """Write `count` images for each of three classes, whose color is their class, with some noise."""
    for channel, name in zip((2, 1, 0), names, strict=True):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            noise = np.random.default_rng(i).integers(-60, 60, (36, 40, 3))
            pixels = (255 * np.eye(3)[channel] + noise).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.png")


def write(folder: Path, content: dict[str, bytes]) -> Path:
    for name, data in content.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def tar(path: Path, content: dict[str, bytes], mode: str = "w") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as archive:
        for name, data in content.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def parquet(path: Path, images: list[bytes], labels, names: list[str] | None = None) -> pa.Table:
    """Write a shard in Hugging Face's format, with the class `names` in its metadata."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [data if data is None else {"bytes": data, "path": None} for data in images]
    table = pa.table({"image": rows, "label": labels})
    if names:
        info = {"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(info)})
    pq.write_table(table, path)
    return table


def unreachable(*_, **__):
    """Replacement for functions that use a network."""
    raise OSError("no route to host")


def assert_streams(source: str | Path, root: Path) -> None:
    """Assert that a stream of `source`, also after pickling, yields the images of its `ImageSet`."""
    held, stream = (
        load(source, size=8, root=root),
        load(source, size=8, root=root, stream=True, workers=1),
    )
    rows = [torch.arange(len(held)).flip(0)]
    for samples in (stream.samples, pickle.loads(pickle.dumps(stream.samples))):
        images, labels = next(replace(stream, samples=samples).batches(rows))
        assert images.equal(held.images.flip(0)) and labels.equal(held.labels.flip(0))
    assert (stream.class_names, stream.note) == (held.class_names, held.note)
