"""The model of a live page: its inner loops, and the weights that Python writes for it."""

import re

import numpy as np
import pytest
import torch
import wasmtime
from support import saved_model, vitlens

from vitlens import load_model, samples
from vitlens_explorer import live, save_page

LIVE = live.LIVE


def packed(b: np.ndarray) -> np.ndarray:
    """A matrix (depth, cols) as panels of 8 columns, (cols / 8, depth, 8)."""
    return b.reshape(len(b), -1, 8).swapaxes(0, 1)


def kernels() -> tuple[wasmtime.Store, wasmtime.Memory, dict]:
    """The functions of kernels.wasm, with a memory of 1 MiB."""
    store = wasmtime.Store(engine := wasmtime.Engine())
    memory = wasmtime.Memory(store, wasmtime.MemoryType(wasmtime.Limits(16, None)))
    module = wasmtime.Module(engine, (LIVE / "kernels.wasm").read_bytes())
    return store, memory, wasmtime.Instance(store, module, [memory]).exports(store)


def product(a: np.ndarray, b: np.ndarray, bias: np.ndarray, room: int = 8) -> np.ndarray:
    """a·b + bias by kernels.wasm. The rows of a and of the result lie `room` values apart from each other."""
    store, memory, exports = kernels()
    (rows, depth), cols = a.shape, b.shape[1]
    wide = np.pad(a, ((0, 0), (0, room)), constant_values=np.nan)
    starts = np.cumsum([0, wide.nbytes, b.nbytes, bias.nbytes])
    for start, part in zip(starts, (wide, packed(b), bias), strict=False):
        memory.write(store, np.ascontiguousarray(part).tobytes(), int(start))
    at_a, at_b, at_bias, at_c = map(int, starts)
    c_row = 4 * (cols + room)
    exports["gemm"](store, at_a, 4 * (depth + room), at_b, at_c, c_row, at_bias, rows, cols, depth)
    c = np.frombuffer(memory.read(store, at_c, at_c + rows * c_row), np.float32).reshape(rows, -1)
    assert not c[:, cols:].any()
    return c[:, :cols]


def test_kernels_are_assembled_from_their_source():
    assert (
        bytes(wasmtime.wat2wasm((LIVE / "kernels.wat").read_text()))
        == (LIVE / "kernels.wasm").read_bytes()
    )


@pytest.mark.parametrize(
    ("rows", "depth", "cols"), [(4, 1, 8), (8, 5, 16), (200, 197, 64), (12, 192, 24)]
)
def test_gemm_equals_numpy(rows, depth, cols):
    random = np.random.default_rng(rows + depth)
    a, b, bias = (
        random.standard_normal(s).astype(np.float32) for s in ((rows, depth), (depth, cols), cols)
    )
    exact = a.astype(np.float64) @ b + bias
    assert np.abs(product(a, b, bias) - exact).max() < 1e-6 * depth


def test_gemm_adds_in_the_order_of_depth():
    """Equal bits on every machine, because float32 sums depend on their order."""
    random = np.random.default_rng(0)
    a, b, bias = (random.standard_normal(s).astype(np.float32) for s in ((4, 100), (100, 8), 8))
    expected = np.tile(bias, (4, 1))
    for column, row in zip(a.T, b, strict=True):
        expected = expected + column[:, None] * row
    assert (product(a, b, bias) == expected).all()


def changed(name: str, values: np.ndarray, *arguments) -> np.ndarray:
    """Values after a kernel has changed them in place."""
    store, memory, exports = kernels()
    memory.write(store, values.astype(np.float32).tobytes(), 0)
    exports[name](store, 0, *arguments)
    return np.frombuffer(memory.read(store, 0, 4 * values.size), np.float32).reshape(values.shape)


def test_softmax_equals_numpy():
    scores = np.random.default_rng(0).normal(scale=20, size=(5, 24)).astype(np.float32)
    scores[:, 21:] = -1e30  # keys that do not exist
    powers = np.exp(scores.astype(np.float64) - scores.max(1, keepdims=True))
    np.testing.assert_allclose(
        changed("softmax", scores, 5, 24), powers / powers.sum(1, keepdims=True), atol=3e-7
    )


def test_gelu_equals_torch_with_its_slope():
    values = torch.linspace(-12, 12, 4000, requires_grad=True)
    exact = torch.nn.functional.gelu(values.double())
    (slope,) = torch.autograd.grad(exact.sum(), values)
    x = values.detach().numpy()
    np.testing.assert_allclose(changed("gelu", x, x.size), exact.detach(), atol=2e-6)
    both = changed("gelu_slope", np.concatenate([np.full_like(x, 2), x]), 4 * x.size, x.size)
    np.testing.assert_allclose(both[: x.size], 2 * slope, atol=2e-6)


@pytest.mark.parametrize("scores", [False, True])
def test_save_page_counts_its_steps(tmp_path, scores):
    sizes = dict(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=2, num_classes=4)
    model = load_model("vit_tiny_patch16_224", pretrained=False, **sizes)
    photos = {name: samples()[name] for name in ("chelsea", "coffee")}
    steps = []
    save_page(model, photos, tmp_path / "page.html", scores=scores, progress=steps.append)
    numbers = [re.match(r"(\d+) of (\d+): (chelsea|coffee): \w", step).groups() for step in steps]
    expected = [(str(number), str(len(steps))) for number in range(1, len(steps) + 1)]
    assert [pair[:2] for pair in numbers] == expected
    assert numbers[0][2] == "chelsea" and numbers[-1][2] == "coffee"


def test_page_command_writes_a_live_page(tmp_path, monkeypatch):
    monkeypatch.setattr("vitlens.models.opening.BUNDLED_FOLDERS", [saved_model(tmp_path / "model")])
    out = vitlens("page", "--live", "--out", tmp_path / "page.html").stdout
    assert re.fullmatch(r".*page\.html: \d\.\d MB\. Its photos are samples\.\n", out)
    assert "'wasm-unsafe-eval'" in (tmp_path / "page.html").read_text()
    large = saved_model(
        tmp_path / "large", "vit_base_patch16_224", embed_dim=768, depth=6, num_heads=12
    )
    error = vitlens("page", large, "--live", "--out", tmp_path / "large.html", expect=2).stderr
    assert "parameters" in error and "`vitlens page MODEL IMAGE`" in error
    assert "--scores" in vitlens("page", "--live", "--scores", expect=2).stderr


def test_page_command_writes_a_blank_page(tmp_path):
    out = vitlens("page", "--blank", "--out", tmp_path / "page.html").stdout
    assert re.fullmatch(r".*page\.html: 0\.\d MB\. Drop a model on it\.\n", out)
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "This file contains no model." in text and "connect-src" not in text
    for option in (["--live"], ["--scores"], ["bundled"]):
        error = vitlens("page", *option, "--blank", expect=2).stderr
        assert "Use --blank with --out alone" in error, option


def test_save_page_takes_one_photo_of_a_model_without_classes(tmp_path):
    """There is no other photo whose similarity could be explained."""
    sizes = dict(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=2, num_classes=0)
    model = load_model("vit_tiny_patch16_224", pretrained=False, **sizes)
    path = save_page(model, {"chelsea": samples()["chelsea"]}, tmp_path / "page.html")
    assert "chelsea" in path.read_text(encoding="utf-8")
