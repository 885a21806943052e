"""Precision and determinism that a program has set before it trains or measures."""

import pytest
import timm
import torch

from vitlens import attention, capture
from vitlens.data import load
from vitlens.recorder.precision import _precisions
from vitlens.train import build_criterion, fit, recipe

newer = pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="PyTorch before 2.9"
)


def set_precision(path: str, value: str) -> None:
    place = torch.backends
    for name in path.split("."):
        place = getattr(place, name)
    place.fp32_precision = value


def all_backends():
    torch.backends.fp32_precision = "tf32"


def two_backends():
    torch.backends.cudnn.fp32_precision = "tf32"
    torch.backends.mkldnn.fp32_precision = "bf16"


def products_of_cuda():
    set_precision("cuda.matmul", "tf32")


def products_of_the_cpu():
    set_precision("mkldnn.matmul", "bf16")


def exact_convolutions():
    set_precision("cudnn.conv", "ieee")


def both_kinds_of_settings():
    torch.set_float32_matmul_precision("medium")
    set_precision("cuda.matmul", "ieee")


def older_functions():
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.allow_tf32 = False


def strict_determinism():
    torch.use_deterministic_algorithms(True)


def determinism_that_warns():
    torch.use_deterministic_algorithms(True, warn_only=True)


SWITCHES = (
    pytest.param(all_backends, marks=newer),
    pytest.param(two_backends, marks=newer),
    pytest.param(products_of_cuda, marks=newer),
    pytest.param(products_of_the_cpu, marks=newer),
    pytest.param(exact_convolutions, marks=newer),
    pytest.param(both_kinds_of_settings, marks=newer),
    older_functions,
    strict_determinism,
    determinism_that_warns,
)


def read(setting):
    """Value of a setting, or None where PyTorch refuses to read it."""
    try:
        return setting()
    except RuntimeError:
        return None


def settings() -> dict:
    """All settings of the process."""
    return _precisions() | {
        "products": read(torch.get_float32_matmul_precision),
        "convolutions": read(lambda: torch.backends.cudnn.allow_tf32),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "only warns": torch.is_deterministic_algorithms_warn_only_enabled(),
    }


@pytest.fixture
def defaults():
    """PyTorch's defaults come back after the test."""
    before = _precisions()
    yield
    if before:
        for backend in (torch.backends, torch.backends.cudnn, torch.backends.mkldnn):
            backend.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True
    for (backend, name), value in before.items():
        set_precision(f"{backend}.{name}", value)
    torch.use_deterministic_algorithms(False)
    assert _precisions() == before


def one_step() -> list[torch.Tensor]:
    """Parameters after a step in fp32, whose settings are checked within it, and the program's after it."""
    digits = recipe("digits").tiny()
    torch.manual_seed(0)
    model = digits.build()
    images = [load("digits", split, size=8) for split in ("train", "valid")]
    program = settings()
    criterion = build_criterion(model, digits, "cpu")

    def checked(x, y):
        products = {value for (_, name), value in _precisions().items() if name == "matmul"}
        assert products <= {"ieee"}
        # torch.compile reads the older settings.
        assert torch.get_float32_matmul_precision() == "highest"
        assert torch.backends.cudnn.allow_tf32 is False
        return criterion(x, y)

    steps = fit(model, images, digits, device="cpu", criterion=checked)
    next(steps)
    assert settings() == program
    steps.close()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("switch", SWITCHES)
def test_fit_restores_the_settings_of_the_program(defaults, switch):
    expected = one_step()
    switch()
    before = settings()
    trained = one_step()
    assert settings() == before
    for ours, reference in zip(trained, expected, strict=True):
        assert torch.equal(ours, reference)


@pytest.mark.parametrize("switch", SWITCHES)
def test_maps_are_exact_under_any_settings(defaults, switch):
    torch.manual_seed(0)
    vit = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=3
    ).eval()
    with torch.no_grad(), capture(vit) as attn:
        vit(torch.randn(1, 3, 32, 32))
    expected = attention.rollout(attn)
    switch()
    before = settings()
    assert torch.equal(attention.rollout(attn), expected)
    assert settings() == before
