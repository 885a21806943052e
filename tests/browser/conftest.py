"""A small model with a notebook for each widget, and a browser, shared by all browser tests."""

import numpy as np
import pytest
import timm
import torch
from playwright.sync_api import sync_playwright
from support import unfused_maps
from timm.models import save_for_hf

from browser.fronts import Fronts, chromium, notebook, opened_model
from vitlens.images import samples
from vitlens.models import preprocess

CELLS = (
    "import numpy as np, vitlens\nimport vitlens_explorer as widgets\nmodel = vitlens.load_model('vit')",
    "explorer = widgets.explore(model)\nexplorer",
    "widgets.compare(model, vitlens.load_model('vit', pretrained=False))",
    "widgets.positions(model)",
    "widgets.training(dict(np.load('run.npz')))",
)


def write_model(folder, side, **more):
    """The folder of a new model for side × side pixels, whose attention differs from patch to patch."""
    torch.manual_seed(0)
    arguments = {"img_size": side, "embed_dim": 96, "depth": 4, "num_heads": 3} | more
    made = timm.create_model("vit_tiny_patch16_224", num_classes=10, **arguments)
    with torch.no_grad():
        for parameter in made.blocks.parameters():
            parameter.mul_(3.0)
    made.pretrained_cfg = {**made.pretrained_cfg, "input_size": (3, side, side), "crop_pct": 1.0}
    config = {"pretrained_cfg": made.pretrained_cfg}
    save_for_hf(made, folder, model_config=config, model_args=arguments, safe_serialization=True)
    return folder


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """The folder of a model with 8 × 8 patches, with a notebook of all widgets beside it."""
    from support import snapshots

    folder = write_model(tmp_path_factory.mktemp("pages") / "vit", 128)
    np.savez(folder.parent / "run.npz", **snapshots(3))
    # A file for each application: a save over what another one saved asks in a dialog.
    for front in ("lab", "notebook"):
        (folder.parent / f"{front}.ipynb").write_text(notebook(*CELLS))
    return folder


@pytest.fixture(scope="session")
def large_model(tmp_path_factory):
    """The folder of a model with 32 × 32 patches, whose occlusion takes 58 forwards."""
    return write_model(tmp_path_factory.mktemp("large") / "vit", 512)


@pytest.fixture(scope="session")
def browser():
    with sync_playwright() as started:
        try:
            browser = chromium(started)
        except Exception as error:
            pytest.fail(
                "No browser could be started; run `make browser` to install one, set CHROMIUM to one that exists, or "
                f"set NO_BROWSER=1 to leave these tests out ({str(error).splitlines()[0]})."
            )
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def fronts(browser, model):
    """The explorer of the small model in each front end, shared by all files of tests. Asserts that none has errors."""
    fronts = Fronts(browser, model)
    yield fronts
    for name in [*fronts.opened]:
        fronts.close(name)
    if fronts.app:
        fronts.app.end()
        assert fronts.app.error is None
    assert fronts.errors == []


@pytest.fixture(scope="session")
def maps(model):
    """Attention (L, H, T, T) of the small model on the sample photo, by timm's unfused path."""
    vit = opened_model(model)
    return torch.cat(unfused_maps(vit, preprocess(vit, samples()["chelsea"]))).numpy()


@pytest.fixture
def served(fronts):
    """An app in this process."""
    return fronts.served
