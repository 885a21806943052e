"""What all browser tests start from: a small model with notebooks that open it, and a browser."""

import pytest
import timm
import torch
from playwright.sync_api import sync_playwright
from timm.models import save_for_hf

from browser.fronts import chromium, notebook

CELLS = (
    "import vitlens\nfrom vitlens import widgets\nmodel = vitlens.load_model('vit')",
    "explorer = widgets.explore(model)\nexplorer",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model with attention that differs from patch to patch, as a folder that the notebooks open."""
    torch.manual_seed(0)
    made = timm.create_model("vit_tiny_patch16_224", img_size=128, embed_dim=96, depth=4, num_heads=3, num_classes=10)
    with torch.no_grad():
        for block in made.blocks:
            for parameter in block.parameters():
                parameter.mul_(3.0)
    made.pretrained_cfg = {**made.pretrained_cfg, "input_size": (3, 128, 128), "crop_pct": 1.0}
    folder = tmp_path_factory.mktemp("pages") / "vit"
    arguments = {"img_size": 128, "embed_dim": 96, "depth": 4, "num_heads": 3}
    save_for_hf(
        made,
        folder,
        model_config={"pretrained_cfg": made.pretrained_cfg},
        model_args=arguments,
        safe_serialization=True,
    )
    for name, cells in {"explorer": CELLS, "heads": (CELLS[0], "widgets.heads(model)")}.items():
        (folder.parent / f"{name}.ipynb").write_text(notebook(*cells))
    return folder


@pytest.fixture(scope="module")
def playwright():
    with sync_playwright() as started:
        yield started


@pytest.fixture(scope="module")
def browser(playwright):
    try:
        started = chromium(playwright)
    except Exception as error:
        pytest.fail(
            "No browser could be started; run `make browser` to install one, set CHROMIUM to one that exists, or set "
            f"NO_BROWSER=1 to leave these tests out ({str(error).splitlines()[0]})."
        )
    yield started
    started.close()
