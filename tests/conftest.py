"""Shared fixtures. VITLENS_REAL_DATA is the folder of real data. Tests that need it are skipped without it."""

import multiprocessing
import os
import signal
import sys
from pathlib import Path

if workers := int(
    os.environ.get("PYTEST_XDIST_WORKER_COUNT", 0)
):  # before torch and child processes: share the cores
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))

import pytest
import timm
import torch
from systems import missing

sys.modules.setdefault(
    "rfc3987_syntax", None
)  # jsonschema's check of addresses, which takes 3 s to import
REAL_DATA = os.environ.get("VITLENS_REAL_DATA")

# Background jobs start with Ctrl-C ignored, and those of `nohup` with hang-ups, too. Tests send both.
for number, usual in (("SIGINT", signal.default_int_handler), ("SIGHUP", signal.SIG_DFL)):
    if hasattr(signal, number) and signal.getsignal(getattr(signal, number)) is signal.SIG_IGN:
        signal.signal(getattr(signal, number), usual)


def pytest_report_header(config):
    if REAL_DATA:
        return f"real data: {REAL_DATA}"
    return "real data: ABSENT (set VITLENS_REAL_DATA to run the tests on DeiT-Tiny and real photographs)"


# Seconds for tests that may take longer than pyproject.toml allows: by mark, folder or module.
LONGER = {"slow": 3600, "browser": 900, "test_book": 900}


def pytest_collection_modifyitems(config, items):
    for item in items:
        if reason := missing(item.path, item.originalname):
            item.add_marker(pytest.mark.skip(reason=reason))
    if not config.pluginmanager.hasplugin(
        "timeout"
    ):  # pytest-timeout is among the development tools
        return
    for item in items:
        names = {mark.name for mark in item.iter_markers()} | {
            item.path.parent.name,
            item.path.stem,
        }
        if longer := [seconds for name, seconds in LONGER.items() if name in names]:
            item.add_marker(pytest.mark.timeout(max(longer)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Distribute the tests, but keep those in one process that share a page or a training in two processes."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            for shared in ("tests/browser/", "tests/test_processes.py::test_processes_"):
                if nodeid.startswith(shared):
                    return shared
            return nodeid

    return Scheduling(config, log)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder with real images and weights. Tests that use it are skipped without it."""
    if not REAL_DATA:
        pytest.skip(
            "REAL DATA ABSENT: set VITLENS_REAL_DATA to a folder with deit-tiny, imagenet-samples and photos"
        )
    path = Path(REAL_DATA)
    assert path.is_dir(), f"VITLENS_REAL_DATA names {path}, which is not a folder"
    return path


@pytest.fixture(scope="session")
def forked():
    """`forked(function, *arguments)` starts a function in a process that has imported vitlens.train already.

    It is forked from a server without other state. The function must be in a test module.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["vitlens.train", "accelerate.utils", "sklearn.datasets", "torch._dynamo", "pytest"]
    )

    def start(function, *arguments):
        process = context.Process(target=function, args=arguments, daemon=True)
        process.start()
        return process

    return start


@pytest.fixture(scope="session")
def vit():
    """A small ViT with attention that is not near-uniform: `vit()` or `vit(global_pool="avg", …)`. None: default."""

    def make(seed=0, name="vit_tiny_patch16_224", dtype=torch.float32, **kwargs):
        torch.manual_seed(seed)
        kwargs = dict(img_size=64, embed_dim=96, depth=3, num_heads=3, num_classes=10) | kwargs
        kwargs = {key: value for key, value in kwargs.items() if value is not None}
        model = timm.create_model(name, **kwargs).eval().to(dtype)
        with torch.no_grad():
            for block in model.blocks:
                for parameter in block.parameters():
                    parameter.mul_(3.0)
        return model

    return make


@pytest.fixture
def explorer(vit):
    """The explorer widget of a small ViT on a photo."""
    import vitlens_explorer
    from vitlens.images import samples

    return vitlens_explorer.explore(vit(), samples()["chelsea"])


@pytest.fixture(autouse=True)
def closed_figures():
    """Close the figures that a test has opened in pyplot, as others expect none."""
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")
