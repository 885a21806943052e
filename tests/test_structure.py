"""The layers of the package: allowed imports between rooms and at start-up."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch

import vitlens
import vitlens_explorer
import vitlens_paper.evaluate

ROOT = Path(__file__).parent.parent
PACKAGES = ("vitlens", "vitlens_explorer", "vitlens_paper")

NEVER = {
    "recorder": {
        "attention",
        "attribution",
        "data",
        "faithfulness",
        "filters",
        "plot",
        "tokens",
        "report",
        "train",
    },
    "plot": {
        "attribution",
        "data",
        "report",
        "train",
        "recorder.record",
    },  # `overlay` measures a model's crop
    "data": {
        "attention",
        "attribution",
        "faithfulness",
        "models",
        "plot",
        "recorder",
        "report",
        "train",
    },
    "train": {"attribution", "faithfulness", "plot", "report"},
    "faithfulness": {"plot", "report"},
    "attribution": {"plot", "report", "faithfulness"},
}
"""Rooms of `vitlens` that each room must not import. No room imports `cli`."""

FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else module


def package(module: str) -> str:
    return module.split(".")[0]


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path) for path in FILES}


def imported(path: Path) -> set[str]:
    """The modules of the package that a file names in its imports, also in those within functions."""
    found = set()
    for node in NODES[path]:
        if isinstance(node, ast.ImportFrom) and package(node.module or "") in PACKAGES:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in MODULES}
    return found - {*PACKAGES}


NODES = {path: list(ast.walk(ast.parse(path.read_text(encoding="utf-8")))) for path in FILES}
IMPORTED = {path: imported(path) for path in FILES}


def reached(module: str) -> set[str]:
    """The modules of the package that one imports, and those that they import, and so on."""
    needed, seen = {module}, set()
    while new := needed - seen:
        seen |= new
        needed |= set().union(*(IMPORTED[path] for path in FILES if module_of(path) in new))
    return needed


def test_vitlens_knows_neither_of_the_packages_built_on_it():
    """Not even by a string, except in the list of modules that have moved there."""
    for path in (path for path in FILES if package(module_of(path)) == "vitlens"):
        text = path.read_text(encoding="utf-8")
        if path == ROOT / "vitlens" / "moved.py":
            continue
        assert not re.search(
            "vitlens_(explorer|paper|vit)|PaperTransformer|masked-patches|mean-color", text
        ), path


@pytest.mark.parametrize(
    "here, other", [("vitlens_explorer", "vitlens_paper"), ("vitlens_paper", "vitlens_explorer")]
)
def test_packages_built_on_vitlens_do_not_know_each_other(here, other):
    for path in (ROOT / here).rglob("*"):
        if path.suffix in (".py", ".js"):
            assert other not in path.read_text(encoding="utf-8"), path


@pytest.mark.parametrize(
    "statement",
    [
        "vitlens.widgets.explore",
        "from vitlens import widgets",
        "import vitlens.widgets",
        "from vitlens.widgets import explore",
        "from vitlens.widgets.explorer import Explorer",
        "from vitlens import load_model, evaluate",
        "import vitlens.evaluate.protocols as protocols",
        "importlib.import_module('vitlens.paper')",
        "from vitlens.variants import SETTINGS",
        "vitlens.ablation",
    ],
)
def test_moved_modules_name_their_new_place(statement):
    name = re.search("widgets|evaluate|paper|variants|ablation", statement)[0]
    with pytest.raises((AttributeError, ImportError)) as error:
        exec(statement, {"vitlens": vitlens, "importlib": importlib})
    assert str(error.value).startswith(f"vitlens.{name} has moved. Use `")
    exec(str(error.value).split("`")[1], {})
    assert not hasattr(vitlens, name)


@pytest.mark.parametrize(
    "stub", [path for package in PACKAGES for path in (ROOT / package).rglob("*.pyi")], ids=str
)
def test_stubs_list_the_public_names(stub):
    """Editors complete the names that a stub imports, and Python imports those when they are used."""
    tree = ast.parse(stub.read_text(encoding="utf-8"))
    imported = {
        alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    listed = next(
        ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign)
    )
    module = importlib.import_module(module_of(stub))
    declared = {node.target.id for node in tree.body if isinstance(node, ast.AnnAssign)} - {
        "__version__"
    }
    assert {*listed} == imported | declared
    assert {*listed} <= {*module.__all__}
    for name in listed:
        assert getattr(module, name) is not None


def test_only_commands_import_the_command_line():
    above = {module_of(path) for path in FILES if "vitlens.cli" in IMPORTED[path]}
    assert above == {"vitlens.__main__", "vitlens_explorer.cli", "vitlens_paper.cli"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    [
        "plugin",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("recipes", "tasks", "variants", "masked")
        ),
    ],
)
def test_plugins_register_whatever_is_imported_first(first):
    code = (
        f"import vitlens_paper.{first}, vitlens.train, vitlens.data\n"
        "assert 'finetune-vtab' in vitlens.train.RECIPES and 'vtab/' in vitlens.data.SOURCES\n"
        "model = vitlens.train.recipe('masked-patches').override('model.positions=learned-2d').build()\n"
        "assert vitlens.recorder.supported.is_known(model) and hasattr(model, 'objective')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_rooms_import_lower_rooms_only():
    for path in (path for path in FILES if package(module_of(path)) == "vitlens"):
        here = room(module_of(path))
        never = set() if here in ("cli", "__main__") else NEVER.get(here, set()) | {"cli"}
        for module in IMPORTED[path]:
            assert not {room(module), module.removeprefix("vitlens.")} & never, (
                f"{path} imports {module}"
            )
        assert not re.search(r"^\s*(from|import) experiments\b", path.read_text(), re.M)


LIBRARIES = ("transformers", "open_clip", "torchvision.models", "timm.models", "timm.layers")
"""Whose classes `recorder.supported` names. `vitlens.train` builds models out of timm's parts."""


def test_only_supported_names_classes_of_libraries():
    """Nothing else asks whether a model is one of a library's classes."""
    for path in (
        each for each in FILES if "supported" not in each.parts and each.parent.name != "train"
    ):
        known = {
            alias.asname or alias.name
            for node in NODES[path]
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(LIBRARIES)
            for alias in node.names
        }
        for node in NODES[path]:
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in (
                "isinstance",
                "issubclass",
            ):
                asked = ast.unparse(node.args[1])
                assert not known & set(re.findall(r"\w+", asked)), f"{path} asks for {asked}"
                assert not re.search(r"\b(timm|transformers|open_clip|torchvision)\.", asked), (
                    f"{path}: {asked}"
                )


def test_imports_are_acyclic():
    above = {module_of(path): IMPORTED[path] for path in FILES}
    while above:
        free = {module for module, needs in above.items() if not needs & above.keys() - {module}}
        assert free, f"These modules import each other: {sorted(above)}"
        above = {module: needs for module, needs in above.items() if module not in free}


def test_grid_and_reports_import_allowed_rooms():
    assert "vitlens.recorder.supported" not in reached("vitlens.recorder.grid")
    assert "train" not in {room(module) for module in reached("vitlens.report")}


WRITES = {
    *("dump", "hardlink_to", "mkdtemp", "mkstemp", "move", "copyfile", "copytree", "rmdir"),
    *("rmtree", "save", "save_file", "save_pretrained", "savefig", "savetxt", "savez"),
    *("savez_compressed", "symlink_to", "to_csv", "to_parquet", "touch", "truncate"),
    *("unlink", "write_bytes", "write_text", "NamedTemporaryFile", "TemporaryDirectory"),
}
"""Names of functions that write or remove files."""
WRITES_OF_OS = {"os.remove", "os.rename", "os.replace", "os.link", "os.symlink", "os.removedirs"}
WRITTEN_ELSEWHERE = {
    ("vitlens/digests.py", "np.save"): "into a buffer",
    ("vitlens/finished.py", "np.savez"): "into a buffer",
    ("vitlens/plot/style.py", "figure.savefig"): "into a buffer",
    ("vitlens/report.py", "content.to_csv"): "returns text",
    ("vitlens/train/loop.py", "folder.save"): "a checkpoint, by run_folder",
    ("vitlens/train/run_folder.py", "safetensors.torch.save"): "returns bytes",
    ("vitlens/train/run_folder.py", "self.save"): "a checkpoint, by save_checkpoint",
    ("vitlens/train/snapshots.py", "save"): "by `vitlens.files.update`",
    ("vitlens/train/snapshots.py", "np.savez_compressed"): "into a buffer",
    ("vitlens_explorer/audit.py", "table.to_csv"): "returns text",
    ("vitlens_explorer/audit_page/pictures.py", "image.save"): "into a buffer",
    ("vitlens_explorer/app.py", "small.save"): "into a buffer",
    ("vitlens_explorer/app.py", "tempfile.mkdtemp"): "a folder for this user only",
    ("vitlens_explorer/drawing.py", "figure.savefig"): "into a buffer",
    ("vitlens_explorer/drawing.py", "image.save"): "into a buffer",
    ("vitlens_explorer/drawing.py", "page.save"): "into a buffer",
    ("vitlens_explorer/explorer.py", "tempfile.TemporaryDirectory"): "read into a download",
    ("vitlens/plot/glyphs.py", "super().savefig"): "the savefig that a person calls",
    ("vitlens_explorer/live/__init__.py", "image.save"): "into a buffer",
    (
        "vitlens_explorer/live/model_files.py",
        "model.save_pretrained",
    ): "into a folder that is read at once",
    ("vitlens_explorer/live/model_files.py", "safetensors.torch.save"): "returns bytes",
    ("vitlens_explorer/live/model_files.py", "tempfile.TemporaryDirectory"): "read into a page",
    ("vitlens_explorer/saving.py", "np.savetxt"): "into a buffer",
    ("vitlens_explorer/training_slider.py", "first.save"): "into a buffer",
    ("vitlens_paper/cli.py", "rows.to_csv"): "returns text",
    ("vitlens_paper/evaluate/ablation.py", "table.to_csv"): "returns text",
}
"""Calls by file that write no result file although their name is one of `WRITES`, with the reason."""


def written_by(path: Path) -> set[str]:
    """Calls in a file that may write or remove a file."""
    calls = set()
    for node in (node for node in NODES[path] if isinstance(node, ast.Call)):
        name = ast.unparse(node.func)
        modes = [argument for argument in node.args[:2] if isinstance(argument, ast.Constant)]
        modes += [keyword.value for keyword in node.keywords if keyword.arg == "mode"]
        texts = [str(mode.value) for mode in modes if isinstance(mode, ast.Constant)]
        opens = name.rpartition(".")[2] == "open" and any(
            re.fullmatch("[rwaxbt+]+", text) and re.search("[wax+]", text) for text in texts
        )
        if opens or name in WRITES_OF_OS or name.rpartition(".")[2] in WRITES:
            calls.add(name)
    return calls


def test_one_module_writes_and_removes_files():
    """`vitlens.files`. Else a full disk, a kill or a second process would lose results."""
    calls = set()
    for path in FILES:
        here = path.relative_to(ROOT).as_posix()
        if here != "vitlens/files.py":
            calls |= {(here, name) for name in written_by(path)}
    assert calls == WRITTEN_ELSEWHERE.keys()


HEAVY = (
    "torch",
    "timm",
    "torchvision",
    "numpy",
    "PIL",
    "matplotlib",
    "sklearn",
    "skimage",
    "scipy",
    "pandas",
)


def test_help_imports_no_pytorch():
    """PyTorch and timm take seconds to import."""
    code = (
        "import sys\n"
        f"for name in {HEAVY}: sys.modules[name] = None\n"
        "import vitlens\n"
        "from vitlens.cli import run\n"
        "names = 'inspect app audit train ablate'.split()\n"
        "for words in ([], ['paper', 'models'], *([name, '--help'] for name in names)):\n"
        "    sys.argv = ['vitlens', *words]\n"
        "    try: run()\n"
        "    except SystemExit as stop: assert not stop.code\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert "ViT-H/14" in found.stdout and found.stdout.count("Usage") == 6


def test_inspect_loads_no_other_commands():
    code = (
        "import sys\n"
        "from vitlens.cli import run\n"
        "sys.argv = ['vitlens', 'inspect', '--nothing']\n"
        "try: run()\n"
        "except SystemExit: pass\n"
        "others = ['vitlens_paper', 'vitlens_explorer', 'vitlens.attribution', 'vitlens.data.sources']\n"
        "print(*(name for name in others if name in sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "No such option: --nothing" in done.stderr and done.stdout.strip() == ""


def test_dir_shows_public_names_alone():
    assert (
        {"capture", "load_model", "attention", "plot"}
        <= {*vitlens.__all__}
        == {*dir(vitlens)} - {"__version__"}
    )
    assert not hasattr(vitlens, "nothing_of_this_name")
    modules = [
        getattr(vitlens, name) for name in vitlens.__all__ if not callable(getattr(vitlens, name))
    ]
    for module in [vitlens, vitlens_explorer, vitlens_paper, vitlens_paper.evaluate, *modules]:
        for name in module.__all__:
            assert getattr(module, name) is not None
        assert {*dir(module)} <= {*module.__all__, "__version__"}, f"dir({module.__name__})"


def test_lines_of_scripts_and_styles_fit():
    """Scripts and styles are not minified: no line has more than 120 characters."""
    files = [
        path for kind in ("js", "css") for path in (ROOT / "vitlens_explorer").rglob(f"*.{kind}")
    ]
    wide = [
        f"{path.name}:{number}"
        for path in files
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if len(line) > 120
    ]
    assert len(files) > 20 and wide == []


def test_dir_of_objects_shows_public_fields_alone():
    """A completion by tab offers what a person uses, not what the classes below have."""
    model = timm.create_model("test_vit")
    images = torch.zeros(1, 3, 160, 160)
    with torch.no_grad(), vitlens.capture(model) as attn:
        model(images)
    explorer = vitlens_explorer.explore(model.eval())
    summary = vitlens.attention.summary(attn, "entropy")
    split = vitlens.data.load("digits")
    expected = [
        (attn, "differentiate gated grid model_name pool"),
        (explorer, "close layout save_page set wait"),
        (summary, "by_head entropy images to_pandas values"),
        (
            split,
            "batches class_names images labels note remaining select_classes select_rows size subset to",
        ),
    ]
    for thing, names in expected:
        assert " ".join(name for name in dir(thing) if not name.startswith("_")) == names
        for name in names.split():
            getattr(thing, name)
