"""Helpers of tests: small data sets, images, maps, models with scores in closed form, and checks."""

import asyncio
import contextlib
import functools
import io
import json
import pickle
import queue
import struct
import sys
import tarfile
import threading
import urllib.request
import zlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import timm
import torch
import torch.nn.functional as F
from matplotlib.text import Text
from PIL import Image
from timm.models import save_for_hf
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from tornado.httpclient import HTTPRequest
from tornado.websocket import websocket_connect

from vitlens import TokenGrid, capture, cli
from vitlens.data import load
from vitlens.images import samples
from vitlens.models import preprocess
from vitlens.train import Step
from vitlens.train.recipes import Recipe, recipe
from vitlens_explorer.app import App, listening_sockets


class Headed(torch.nn.Module):
    """Scales images, and classifies by features of a backbone, or by its class token."""

    def __init__(self, backbone, pools, scale=1.0):
        super().__init__()
        self.backbone, self.pools, self.scale = backbone, pools, scale
        self.head = torch.nn.Linear(backbone.embed_dim, 5)

    def forward(self, x):
        x = x * self.scale
        return self.head(
            self.backbone.forward_features(x)[:, 0] if self.pools else self.backbone(x)
        )


CHECKPOINTS = Path(__file__).parent.parent / "data" / "checkpoints"
SPECIMEN = CHECKPOINTS / "specimen"
"""Folder of the model of the book."""
CHUNKS = 16
"""Number of tests that share a sweep over all models, for parallel processes."""


def captured(model, images, **options):
    with torch.no_grad(), capture(model, **options) as attn:
        model(images)
    return attn


def chunk(names, number):
    """Names in one of the `CHUNKS`, the same in every process."""
    return [name for name in names if zlib.crc32(name.encode()) % CHUNKS == number]


def check_all(check, names):
    """Call `check` with every name, and fail with all failures in one message."""
    failed = []
    for name in names:
        try:
            check(name)
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {error}")
    assert not failed, "\n\n".join(failed)


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
    for opened in (stream.samples, pickle.loads(pickle.dumps(stream.samples))):
        images, labels = next(replace(stream, samples=opened).batches(rows))
        assert images.equal(held.images.flip(0)) and labels.equal(held.labels.flip(0))
    assert (stream.class_names, stream.note) == (held.class_names, held.note)


GRID = TokenGrid(4, 6, (16, 16), prefix=0)
SMALL = TokenGrid(4, 6, (4, 4), prefix=0)


def images(batch=2, size=(64, 96), seed=0, dtype=torch.float64):
    return (
        torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(seed), dtype=dtype)
        + 0.3
    )


def maps(*shape, seed=1, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def linear(size=(64, 96), classes=5, seed=2):
    """Logits that are a weighted sum of all pixels, so every patch adds a term that is independent of the others."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * size[0] * size[1], classes)).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        model[1].weight.copy_(torch.randn(model[1].weight.shape, generator=generator) / 50)
    return model


def tiles(values):
    """(B, 3, H, W) → (B, 24), summed over each patch of a grid of 4 × 6."""
    batch, channels, height, width = values.shape
    return values.reshape(batch, channels, 4, height // 4, 6, width // 6).sum((1, 3, 5)).flatten(1)


def gains(model, x, blank, target):
    """(B, 24) change of a linear model's logit when a patch of the image replaces the baseline's."""
    return tiles(model[1].weight.detach()[target].reshape(-1, *x.shape[1:]) * (x - blank))


def refuses(message, call, *args, error=ValueError, **kwargs):
    """Assert that the call raises the error with a message that matches a regular expression."""
    with pytest.raises(error, match=message):
        call(*args, **kwargs)


class Largest(TorchDispatchMode):
    """The numbers in the storage of the largest tensor that an operation returns."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numbers = max(
                self.numbers, result.untyped_storage().nbytes() // result.element_size()
            )
        return result


@contextlib.contextmanager
def left_as_found(model, *tensors):
    """Assert that the block leaves the model, the tensors, autograd and the random generators unchanged."""
    model.head.bias.grad = torch.ones_like(model.head.bias)
    kept = model.state_dict(keep_vars=True)
    before = {
        name: (value, value.detach().clone(), value.requires_grad, value.grad)
        for name, value in kept.items()
    }
    modes, copies = (
        [module.training for module in model.modules()],
        [tensor.detach().clone() for tensor in tensors],
    )
    states = torch.get_rng_state(), np.random.get_state()[1].copy()
    yield
    assert (
        torch.equal(torch.get_rng_state(), states[0])
        and (np.random.get_state()[1] == states[1]).all()
    )
    assert [module.training for module in model.modules()] == modes and torch.is_grad_enabled()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not torch.overrides._get_current_function_mode_stack()
    assert all(block.attn.fused_attn for block in model.blocks)
    assert all(t.grad is None and torch.equal(t, c) for t, c in zip(tensors, copies, strict=True))
    for name, value in model.state_dict(keep_vars=True).items():
        same, copy, requires, grad = before[name]
        assert (
            value is same
            and torch.equal(value, copy)
            and value.requires_grad == requires
            and value.grad is grad
        )
    assert (model.head.bias.grad == 1).all()


QUICK = [
    "vit_tiny_patch16_224",
    "vit_base_patch16_clip_224",
    "deit_tiny_distilled_patch16_224",
    "vit_small_patch16_18x2_224",
    "vit_base_patch16_xp_224",
    "vit_small_patch14_reg4_dinov2",
    "eva02_tiny_patch14_224",
    "vit_medium_patch16_rope_reg1_gap_256",
    "beit_base_patch16_224",
    "vit_base_patch16_siglip_224",
    "naflexvit_base_patch16_gap",
    "vit_relpos_base_patch16_clsgap_224",
    "vit_tiny_r_s16_p8_224",
    "aimv2_large_patch14_224",
]


PICTURE = samples()["chelsea"]


def given(model, picture=PICTURE):
    return preprocess(model, picture, size=model.patch_embed.img_size)


def values(widget, name="picture"):
    panel = next(panel for panel in widget.frame["panels"] if panel["name"] == name)
    found = np.frombuffer(panel["values"], "<f4").reshape(panel["rows"], panel["cols"], -1)
    return found[..., 0] if found.shape[-1] == 1 else found


def s15(value):
    return struct.pack(">i", round(value * 65536))


NOISE = np.random.default_rng(0)


RAMP = NOISE.integers(0, 256, (24, 32, 3), np.uint8)


# Primaries of Display P3 and of sRGB under D50, as their published matrices have them.
P3 = ((0.51512, 0.24120, -0.00105), (0.29198, 0.69225, 0.04189), (0.15710, 0.06657, 0.78407))


def profile(primaries, gamma, name="Wide"):
    """ICC profile (version 2) made by hand, with three primaries in XYZ under D50 and one gamma."""
    xyz = lambda x, y, z: b"XYZ \0\0\0\0" + s15(x) + s15(y) + s15(z)  # noqa: E731
    curve = b"curv\0\0\0\0" + struct.pack(">IH", 1, round(gamma * 256)) + b"\0\0"
    text = name.encode() + b"\0"
    description = b"desc\0\0\0\0" + struct.pack(">I", len(text)) + text + bytes(4 + 4 + 2 + 1 + 67)
    description += bytes(-len(description) % 4)
    parts = {b"desc": description, b"wtpt": xyz(0.9642, 1.0, 0.8249)}
    parts |= {b"cprt": b"text\0\0\0\0none\0\0\0\0"}
    parts |= dict(
        zip((b"rXYZ", b"gXYZ", b"bXYZ"), (xyz(*primary) for primary in primaries), strict=True)
    )
    parts |= dict.fromkeys((b"rTRC", b"gTRC", b"bTRC"), curve)
    table, data, at = struct.pack(">I", len(parts)), b"", 128 + 4 + 12 * len(parts)
    for tag, content in parts.items():
        table += tag + struct.pack(">II", at + len(data), len(content))
        data += content
    size = 128 + len(table) + len(data)
    head = (
        struct.pack(">I4sI4s4s4s", size, bytes(4), 0x02100000, b"mntr", b"RGB ", b"XYZ ")
        + bytes(12)
        + b"acsp"
    )
    head += bytes(28) + s15(0.9642) + s15(1.0) + s15(0.8249)
    return head + bytes(128 - len(head)) + table + data


WIDE = profile(P3, 1.8)


RED, GREEN, BLUE, YELLOW = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0)


def assert_close(actual, expected, tolerance):
    assert actual.shape == np.shape(expected)
    assert np.abs(actual - np.asarray(expected, float)).max() <= tolerance


def flat(color, size=(8, 6)):
    return Image.new("RGB", size, color)


def digits(**options):
    return load("digits", "train", **options).subset(256), load(
        "digits", "valid", **options
    ).subset(100)


def tiny(**changes) -> Recipe:
    """8 steps an epoch, 16 in all, everything random switched on."""
    return replace(
        recipe("digits").tiny(), drop_path=0.2, patch_drop=0.5, patch_drop_until=0.5, **changes
    )


def unfused_maps(model, x):
    """Attention maps of timm's own unfused path: the input of attn_drop."""
    maps, handles = [], []
    for block in model.blocks:
        block.attn.fused_attn = False
        handles.append(
            block.attn.attn_drop.register_forward_hook(lambda m, args, out: maps.append(args[0]))
        )
    with torch.no_grad():
        model(x)
    for block, handle in zip(model.blocks, handles, strict=True):
        block.attn.fused_attn = True
        handle.remove()
    return maps


class Materialized(TorchFunctionMode):
    """Explicit attention that stores the maps."""

    def __init__(self):
        super().__init__()
        self.maps = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        (q, k, v), mask = args, (kwargs or {}).get("attn_mask")
        logits = q @ k.mT * q.shape[-1] ** -0.5
        self.maps.append((logits if mask is None else logits + mask).softmax(-1))
        return self.maps[-1] @ v


RNG = np.random.default_rng(0)


def cosines(rows, cols, rng=RNG):
    unit = rng.normal(size=(rows, cols, 8))
    unit /= np.linalg.norm(unit, axis=-1, keepdims=True)
    return np.einsum("rcd,ijd->rcij", unit, unit)


def snapshots(count, grid=8, patch=8, layers=6, heads=6, images=8):
    rng = np.random.default_rng(2)
    return {
        "steps": 10 * np.arange(count) ** 2,
        "filters": rng.normal(size=(count, 28, patch, patch, 3)),
        "positions": np.stack([cosines(grid, grid, rng) for _ in range(count)]),
        "distances": rng.uniform(0, grid * patch / 2, (count, layers, heads)),
        "rollout": rng.uniform(0, 2 / grid**2, (count, images, grid, grid)),
    }


def heads_of(ax):
    """Dots (L, H, 2) of the heads."""
    dots = ax.lines[0].get_xydata()
    return dots.reshape(len(np.unique(dots[:, 0].round())), -1, 2)


def history(steps, every=10):
    """A run with a reading at every `every`-th step and a validation at every third reading."""
    for step in range(1, steps + 1):
        metrics = {"top1": 98.0 * step / steps, "top1_average": 99.0 * step / steps}
        rate, loss = 1 - step / steps, 2.3 / step if step % every == 0 else None
        yield Step(
            step,
            steps,
            0,
            0.001 * rate,
            rate,
            loss,
            None,
            metrics if step % (3 * every) == 0 else {},
        )


def tile(ax, x, y, height, width):
    """Colors of the cells of the tile of a mosaic with its center at (x, y)."""
    pixels, (_, _, bottom, _) = np.asarray(ax.images[0].get_array()), ax.images[0].get_extent()
    rows, cols = (
        ((middle + np.arange(count) + 0.5 - count / 2) * len(pixels) / bottom).astype(int)
        for middle, count in ((y, height), (x, width))
    )
    return pixels[rows][:, cols]


def assert_tidy(figure):
    """Assert that all artists are inside the page and no texts overlap."""
    figure.draw_without_rendering()
    hidden = {t for ax in figure.axes if not ax.axison for t in ax.findobj(Text)}
    for axis in [axis for ax in figure.axes for axis in (ax.xaxis, ax.yaxis)]:
        low, high = sorted(axis.get_view_interval())
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
            if not low <= tick.get_loc() <= high:
                hidden |= {tick.label1, tick.label2}
    texts = [
        t
        for t in figure.findobj(Text)
        if t not in hidden and t.get_visible() and t.get_text().strip()
    ]
    boxes = np.array([t.get_window_extent().extents for t in texts])
    whole = figure.get_tightbbox().transformed(figure.dpi_scale_trans).extents
    for low, high in (
        (each[:2].min(), (each[2:] - figure.bbox.max).max()) for each in (whole, *boxes)
    ):
        assert low >= -0.5 and high <= 0.5
    low, high = boxes[:, :2] + 0.5, boxes[:, 2:] - 0.5
    touch = np.triu((low[:, None] < high).all(-1) & (low < high[:, None]).all(-1), 1)
    assert not touch.any(), [
        (texts[i].get_text(), texts[j].get_text()) for i, j in np.argwhere(touch)
    ]


def saved_model(folder, name="vit_tiny_patch16_224", **kwargs):
    torch.manual_seed(0)
    usual = {} if name.startswith("naflex") else {"img_size": 32, "patch_size": 8}
    arguments = usual | dict(embed_dim=48, depth=2, num_heads=3, num_classes=10) | kwargs
    model = timm.create_model(name, **arguments)
    model.pretrained_cfg = model.pretrained_cfg | {"input_size": (3, 32, 32), "crop_pct": 1.0}
    save_for_hf(model, folder, model_args=arguments, safe_serialization=True)
    return folder


def vitlens(*arguments, expect=0):
    """Run the command in this process, because starting Python takes most of the time."""
    out, err = io.StringIO(), io.StringIO()
    argv = mock.patch.object(sys, "argv", ["vitlens", *map(str, arguments)])
    with (
        argv,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as stop,
    ):
        cli.run()
    assert (stop.value.code or 0) == expect, err.getvalue()
    assert "Traceback" not in err.getvalue()
    return SimpleNamespace(stdout=out.getvalue(), stderr=err.getvalue())


PIXELS = [encoded(i, size=(8, 8)) for i in range(7)]


WEBP = [saved(shown(image).permute(1, 2, 0).numpy(), "WEBP", lossless=True) for image in PIXELS]


def clip_benchmark(root: Path, task, train=1020, test=30) -> Path:
    """Write a copy like CLIP benchmark's: numbered shards in train/ and test/, `nshards.txt`, `classnames.txt`."""
    folder, raw = root / task.source.removeprefix("wds/"), task.raw_classes or task.classes
    for split, n in (("train", train), ("test", test)):
        for shard in range(2):
            content = {}
            for i in range(shard * n // 2, (shard + 1) * n // 2):
                content |= {f"s{i:07d}.webp": WEBP[i % 7], f"s{i:07d}.cls": str(i % raw).encode()}
            tar(folder / split / f"{shard}.tar", content)
        (folder / split / "nshards.txt").write_text("2\n")
    (folder / "classnames.txt").write_text("".join(f"class {i}\n" for i in range(raw)))
    return folder


def imagenet(root: Path, per_class=1, first=1) -> None:
    """Write torchvision's layout of unpacked ImageNet: `meta.bin`, and train/ and val/ by WordNet id."""
    wnids = {"n01440764": ("tench", "Tinca tinca"), "n01443537": ("goldfish", "Carassius auratus")}
    torch.save((wnids, []), root / "meta.bin")
    numbers = iter(range(first, 10**6))
    for wnid in wnids:
        names = [f"ILSVRC2012_val_{next(numbers):08d}.JPEG" for _ in range(per_class)]
        write(
            root / "val" / wnid, {name: encoded(i, "JPEG", (8, 8)) for i, name in enumerate(names)}
        )
        write(root / "train" / wnid, {f"{wnid}_1.JPEG": encoded(5, "JPEG", (8, 8))})


def clouds(n, seed, classes=3, width=20, noise=2.0):
    """Features of classes around separate centers, one feature on another scale, and their labels."""
    centers = torch.randn(classes, width, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(n) % classes
    x = centers[labels] + noise * torch.randn(
        n, width, generator=torch.Generator().manual_seed(seed)
    )
    x[:, 0] = 1000 * x[:, 0] + 5000
    return x, labels


PATIENCE = 60


class Served:
    """An app in a thread. opening: its address with the token. error: of the model."""

    def __init__(self, model):
        addresses = queue.SimpleQueue()
        self.app, self.error = App(str(model)), None
        self.thread = threading.Thread(target=self._run, args=(addresses.put,))
        self.thread.start()
        self.opening = addresses.get(timeout=PATIENCE)
        self.address = self.opening.split("?")[0]

    def _run(self, began):
        try:
            asyncio.run(self.app.run(listening_sockets(0), began))
        except Exception as error:
            self.error = error

    def end(self):
        self.app.end()
        self.thread.join(PATIENCE)

    def cookie(self):
        header = urllib.request.urlopen(self.opening).headers["Set-Cookie"]
        assert (
            "HttpOnly" in header
            and "SameSite=Strict" in header
            and self.opening.split("=")[1] not in header
        )
        return header.split(";")[0]

    async def socket(self, cookie, origin=None):
        headers = {"Cookie": cookie, "Origin": origin or self.address.rstrip("/")}
        return await websocket_connect(
            HTTPRequest(self.address.replace("http", "ws") + "socket", headers=headers)
        )


def photo(height=230, width=330):
    return np.random.default_rng(1).integers(1, 256, (height, width, 3), dtype=np.uint8)


CUT = TokenGrid(14, 20, (16, 16), image=(230, 330))


assert_near = functools.partial(np.testing.assert_allclose, atol=1e-6)


def caption(widget):
    return " ".join(panel["words"] for panel in widget.frame["panels"])


def selected(widget):
    return [panel["selected"] for panel in widget.frame["panels"]]


def send(widget, content, *buffers):
    """Send a message of the browser, and return the message that the page shows."""
    widget.connection.receive(content, buffers)
    assert widget.wait(60)
    return widget.frame["message"]


def reference_attention(model, picture=PICTURE, size=None, **kwargs):
    """Attention (L, H, T, T) by timm's unfused path, the outputs of the blocks (L, T, D), and the logits."""
    seen = []
    handles = [
        block.register_forward_hook(lambda _, __, output: seen.append(output[0]))
        for block in model.blocks
    ]
    x = preprocess(model, picture, size=size or model.patch_embed.img_size, **kwargs)
    with torch.no_grad():
        logits = model(x)[0]
    for handle in handles:
        handle.remove()
    return torch.cat(unfused_maps(model, x)).numpy(), torch.stack(seen).numpy(), logits


def vit_of_transformers(image_size: int, patch_size: int, layers: int = 2) -> torch.nn.Module:
    """A small ViT of transformers for ten classes, with random weights, in eval mode."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=48,
        num_hidden_layers=layers,
        num_attention_heads=3,
        intermediate_size=96,
        image_size=image_size,
        patch_size=patch_size,
        num_labels=10,
    )
    return transformers.ViTForImageClassification(config).eval()
