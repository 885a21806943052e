"""The layers of the package: which room may import which, and what start-up may import."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "vitlens"

NEVER = {
    "recorder": {"attention", "attribution", "data", "evaluate", "faithfulness", "filters", "paper", "plot", "tokens",
                 "report", "train"},
    "plot": {"attribution", "data", "models", "report", "train", "recorder.record"},
    "data": {"attention", "attribution", "evaluate", "faithfulness", "models", "plot", "recorder", "report", "train"},
    "train": {"attribution", "evaluate", "faithfulness", "plot", "report"},
    "faithfulness": {"plot", "report"}, "attribution": {"plot", "report", "faithfulness"},
}  # fmt: skip
"""What each room does without. Besides, nothing but `cli` imports the widgets, and nothing imports `cli`."""

FILES = sorted(PACKAGE.rglob("*.py"))


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else module


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path) for path in FILES}


def imported(path: Path) -> set[str]:
    """The modules of the package that a file names in its imports, also in those within functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vitlens":
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in MODULES}
    return found - {"vitlens"}


def test_rooms_do_not_import_the_rooms_above_them():
    for path in FILES:
        check_imports(path)


def test_package_does_not_import_experiments():
    assert not [path for path in FILES if re.search(r"^\s*(from|import) experiments\b", path.read_text(), re.M)]


def check_imports(path: Path) -> None:
    here = room(module_of(path))
    never = NEVER.get(here, set()) | {"widgets"} - {here} | {"cli"} - {here}
    if here in ("cli", "__main__"):
        never = set()
    for module in imported(path):
        assert room(module) not in never and module.removeprefix("vitlens.") not in never, f"{path} imports {module}"


LIBRARIES = ("transformers", "open_clip", "torchvision.models", "timm.models", "timm.layers")
"""Whose classes `recorder.supported` names. `vitlens.train` builds models out of timm's parts."""


def test_only_supported_names_classes_of_libraries():
    """Nothing else asks whether a model is one of a library's classes."""
    for path in FILES:
        if "supported" not in path.parts and path.parent.name != "train":
            check_classes(path)


def check_classes(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    known = {
        alias.asname or alias.name
        for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(LIBRARIES)
        for alias in node.names
    }  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass"):
            asked = ast.unparse(node.args[1])
            assert not known & set(re.findall(r"\w+", asked)), f"{path} asks for {asked}"
            assert not re.search(r"\b(timm|transformers|open_clip|torchvision)\.", asked), f"{path} asks for {asked}"


def test_there_are_no_circles():
    above = {module_of(path): imported(path) for path in FILES}
    while above:
        free = {module for module, needs in above.items() if not needs & above.keys() - {module}}
        assert free, f"These modules import each other: {sorted(above)}"
        above = {module: needs for module, needs in above.items() if module not in free}


def test_the_grid_knows_no_list_of_models():
    needed, seen = {"vitlens.recorder.grid"}, set()
    while new := needed - seen:
        seen |= new
        needed |= set().union(*(imported(path) for path in FILES if module_of(path) in new))
    assert "vitlens.recorder.supported" not in needed


HEAVY = ("torch", "timm", "torchvision", "numpy", "PIL", "matplotlib", "sklearn", "skimage", "scipy", "pandas")


HELPED = ("inspect", "app", "train", "evaluate", "ablate")


@pytest.mark.parametrize("words", [(), ("paper", "models"), *((command, "--help") for command in HELPED)])
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
    assert ("ViT-H/14" if words == ("paper", "models") else "Usage") in found.stdout


def test_every_public_name_is_there():
    import vitlens

    assert {"capture", "load_model", "attention", "plot"} <= set(vitlens.__all__) <= set(dir(vitlens))
    for name in vitlens.__all__:
        assert getattr(vitlens, name) is not None
    assert not hasattr(vitlens, "nothing_of_this_name")


def test_plot_is_imported_when_asked_for_and_training_needs_no_notebook_and_no_captum():
    code = (
        "import sys, vitlens\n"
        "assert 'matplotlib' not in sys.modules\n"
        "vitlens.plot.overlay\n"
        "assert 'matplotlib' in sys.modules\n"
        "for name in ('captum', 'IPython', 'ipywidgets', 'jupyterlab', 'anywidget', 'accelerate'):\n"
        "    sys.modules[name] = None\n"
        "import vitlens.train, vitlens.cli"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_inspect_and_explain_do_not_reach_training():
    needed, seen = {"vitlens.report"}, set()
    while new := needed - seen:
        seen |= new
        needed |= set().union(*(imported(path) for path in FILES if module_of(path) in new))
    assert not [module for module in needed if room(module) == "train"]
