"""The house keeps its shape: imports go strictly downwards, files stay short, start-up stays quick."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "vitlens"

LEVELS = {
    "files": -2, "profiles": -2, "support": -2, "hub": -2, "arguments": -1, "fused": -1, "graph": -1, "records": -1,
    "grid": 0, "images": 0, "layer": 0, "paper": 0,
    "kernels": 1, "models": 1, "preprocessing": 1, "positions": 1, "filters": 1, "datasets": 1,
    "recorder": 1, "plot": 1, "augment": 0, "changes": 1,
    "attention": 2, "tokens": 2, "recipes": 2, "target": 2,
    "attribution": 3, "faithfulness": 3, "train": 3, "compute": 3,
    "inspection": 4, "explanation": 4, "snapshots": 4, "widgets": 4, "runs": 5, "server": 4, "app": 5,
    "evaluate": 6, "studies": 7, "commands": 8, "cli": 9, "__main__": 10, "__init__": 10,
}  # fmt: skip


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_to_a_lower_level(path):
    here = LEVELS[room(path)]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vitlens":
            parts = node.module.split(".")
            names = [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [a.name.split(".")[1] for a in node.names if a.name.startswith("vitlens.")]
        for name in names:
            if name != room(path):
                assert LEVELS.get(name, 10) < here, (
                    f"{path.name} (level {here}) imports {name} (level {LEVELS.get(name)})"
                )


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_module_outgrows_one_idea(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 320
    assert path.name != "utils.py"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_article_stands_before_what_is_only_known_later(path):
    """ "a {name}" becomes "a EfficientNet", and "a {n}" "a 8"."""
    assert not re.findall(r"\b[Aa]n? \{(?!')[^}]+\}", path.read_text(encoding="utf-8"))


HEAVY = ("torch", "timm", "torchvision", "numpy", "PIL", "matplotlib", "sklearn", "skimage", "scipy", "pandas")


@pytest.mark.parametrize("words", [(), ("models",), *((c, "--help") for c in ("inspect", "app", "train", "evaluate"))])
def test_help_and_the_papers_models_need_nothing_heavy(words):
    """PyTorch and timm take seconds to import."""
    code = (
        "import sys\n"
        f"for name in {HEAVY}: sys.modules[name] = None\n"
        "import vitlens\n"
        "from vitlens.cli import main\n"
        f"sys.argv = ['vitlens', *{words}]\n"
        "main()"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert ("ViT-H/14" if words == ("models",) else "Usage") in found.stdout


def test_every_public_name_is_there():
    import vitlens

    assert {"capture", "load_model", "attention", "plot"} <= set(vitlens.__all__) <= set(dir(vitlens))
    for name in vitlens.__all__:
        assert getattr(vitlens, name) is not None
    assert not hasattr(vitlens, "nothing_of_this_name")


def test_plot_is_imported_when_asked_for():
    code = (
        "import sys, vitlens; assert 'matplotlib' not in sys.modules; vitlens.plot; assert 'matplotlib' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_training_needs_no_notebook_and_no_captum():
    code = (
        "import sys\n"
        "for name in ('captum', 'IPython', 'ipywidgets', 'jupyterlab', 'anywidget', 'accelerate'):\n"
        "    sys.modules[name] = None\n"
        "import vitlens.train, vitlens.cli"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
