"""One list of dependencies: conda, pip and the Makefile install the same, and the installed package runs."""

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import dist
import nbformat
import pytest
import torchvision
import typer
import yaml
from support import vitlens

from vitlens import cli
from vitlens.images import samples
from vitlens.plugins import load_plugins
from vitlens.train.recipes import RECIPES

try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib

ROOT = Path(__file__).parent.parent
NOTEBOOKS = (ROOT / "notebooks").glob("*.ipynb")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]


def test_environment_lists_python_pip_and_project():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["name"] == PROJECT["name"]
    *conda, pip = environment["dependencies"]
    assert conda == ["python" + PROJECT["requires-python"], "pip"]
    (install,) = pip["pip"]
    extras = re.fullmatch(r"-e \.\[(.+)\]", install).group(1).split(",")
    # The environment is a reader's. The Makefile's has the extras of the developers, too.
    developers = ["site", "dev"]
    assert {*extras, *developers} == set(PROJECT["optional-dependencies"])
    assert not {*extras} & {*developers}
    every = ",".join([*extras, *developers])
    assert f'--editable ".[{every}]"' in (ROOT / "Makefile").read_text()


def test_requirements_are_lower_bounds():
    every = PROJECT["dependencies"] + sum(PROJECT["optional-dependencies"].values(), [])
    for requirement in every:
        assert re.fullmatch(r"[a-z0-9-]+>=[\d.]+(,<\d+)?", requirement), requirement
    # Before 23.3, pip did not find an extra whose name changes when it is normalized, and only warned.
    assert all(re.fullmatch("[a-z0-9]+", extra) for extra in PROJECT["optional-dependencies"])
    asked = {
        "torch",
        "timm",
        "jupyterlab",
        "matplotlib",
        "seaborn",
        "scikit-learn",
        "ipywidgets",
        "captum",
    }
    assert asked <= {requirement.split(">=")[0] for requirement in every}


CONDA_NAMES = {
    "torch": "pytorch",
    "huggingface-hub": "huggingface_hub",
    "matplotlib": "matplotlib-base",
}
"""Names of packages that differ between PyPI and conda-forge."""


def test_conda_recipe_has_the_requirements_of_the_project():
    recipe = yaml.safe_load((ROOT / "conda" / "meta.yaml").read_text())
    expected = [f"python {PROJECT['requires-python']}"]
    for requirement in PROJECT["dependencies"]:
        name, floor = requirement.split(">=")
        expected.append(f"{CONDA_NAMES.get(name, name)} >={floor}")
    assert recipe["requirements"]["run"] == expected
    assert recipe["package"] == {"name": PROJECT["name"], "version": PROJECT["version"]}
    scripts = [f"{name} = {target}" for name, target in PROJECT["scripts"].items()]
    assert recipe["build"]["entry_points"] == scripts


def test_citation_names_the_version_and_the_license():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] in PROJECT["license"].split(" AND ")
    names = [author["name"] for author in PROJECT["authors"]]
    assert [author["name"] for author in citation["authors"]] == names


def test_package_data_is_complete():
    declared = SETUPTOOLS["package-data"]
    packages = [ROOT / name for name in ("vitlens", "vitlens_explorer", "vitlens_paper")]
    folders = {path.parent for package in packages for path in package.rglob("*.py")}
    own = {".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert own | {*SETUPTOOLS["package-dir"]} == {*SETUPTOOLS["packages"]}
    for path in (path for package in packages for path in package.rglob("*")):
        if path.is_file() and path.suffix not in (".py", ".pyc"):
            package = ".".join(path.parent.relative_to(ROOT).parts)
            assert any(path.match(pattern) for pattern in declared.get(package, ())), path


def test_readme_commands_exist():
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"\bmake ([a-z-]+)", readme)):
        assert re.search(rf"^{target}:", makefile, re.M), (
            f"README names `make {target}`, which the Makefile lacks"
        )


def test_space_is_a_static_page_that_make_writes(tmp_path):
    """The settings of docs/space/README.md, and the page of the Makefile's line."""
    space = ROOT / "docs" / "space"
    start, settings, text = (space / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    settings = yaml.safe_load(settings)
    assert start == "" and settings["sdk"] == "static"
    assert len(settings["short_description"]) <= 60, "the limit of the hub"
    assert {settings["colorFrom"], settings["colorTo"]} <= SPACE_COLORS
    assert "make space" in text and "://" not in text, "no address"
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (command,) = re.findall(r"^space: .*\n\t\$\(BIN\)/vitlens (.+)$", makefile, re.M)
    *words, out = command.split()
    assert ROOT / out == space / settings["app_file"]
    page = tmp_path / settings["app_file"]
    vitlens(*words, page)
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


SPACE_COLORS = {"red", "yellow", "green", "blue", "indigo", "purple", "pink", "gray"}
"""Values of colorFrom and colorTo."""
DOCS = sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
READMES = ("README.md", "data/README.md", "notebooks/README.md")
TEXTS = sorted({*READMES, *DOCS, *(f"notebooks/{path.name}" for path in NOTEBOOKS)})


def test_docs_commands_have_valid_options(tmp_path, monkeypatch):
    """Every `vitlens COMMAND …` in a text is understood, up to its doing anything."""
    words = (
        r"((?:inspect|explain|app|page|audit|train|evaluate|ablate|paper [a-z]+)(?: [^`\n#|]+)?)"
    )
    content = (
        "\n".join((ROOT / text).read_text() for text in TEXTS)
        .replace('\\"', '"')
        .replace("\\n", "\n")
    )
    found = re.findall(rf"(?:`|-m |bin/|^\W*)vitlens {words}", content, re.M)
    assert len(found) > 40
    monkeypatch.chdir(tmp_path)
    load_plugins("commands", cli.app)
    Path("photos").mkdir()
    for command in dict.fromkeys(found):
        name, *arguments = shlex.split(command.strip('", &'))
        if arguments:  # else it is only named
            for file in (word for word in arguments if "/" not in word and Path(word).suffix):
                Path(file).touch()  # typer looks whether images exist
            command_line = typer.main.get_command(cli.command_line()).commands[name]
            if name == "paper":
                command_line, arguments = command_line.commands[arguments[0]], arguments[1:]
            try:
                given = command_line.make_context(name, arguments).params
            except typer.Exit:  # --list
                continue
            assert not given.get("recipe") or given["recipe"] in RECIPES, command


ELSEWHERE = {
    "docs/models.md",
    "docs/recipes.md",
    "docs/questions.md",
    "docs/migration.md",
    "docs/reference.md",
}


def test_docs_python_runs(tmp_path, monkeypatch):
    """The docs continue with the README's names.

    docs/models.md needs a checkpoint and a model of the reader's own, and test_recipes_page.py runs docs/recipes.md.
    test_docs.py runs docs/questions.md and docs/migration.md, and test_docstrings.py docs/reference.md.
    """
    import matplotlib.pyplot as plt

    samples()["chelsea"].save(tmp_path / "cat.jpg")
    monkeypatch.chdir(tmp_path)
    space = {}
    for text in ("README.md", *(text for text in DOCS if text not in ELSEWHERE)):
        code = "".join(re.findall(r"```python\n(.*?)```", (ROOT / text).read_text(), re.S))
        exec(compile(code, text, "exec"), space)
    assert space["summary"].mean_distance.shape == (1, 12, 3) and space["logits"].shape == (1, 1000)
    plt.close("all")  # figures made without ax= stay open, as in pyplot


def test_docs_links_exist():
    for text in (*READMES, "CONTRIBUTING.md", *DOCS):
        content = (ROOT / text).read_text()
        for link in re.findall(r"\]\(([^)#]+)(?:#[\w-]+)?\)|(?:src|href)=\"([^\"]+)\"", content):
            target = "".join(link)
            assert "://" in target or ((ROOT / text).parent / target).exists(), (
                f"{text} links to {target}"
            )


WITHOUT = """
import sys
blocked, commands, finders = {blocked}, {commands}, list(sys.meta_path)

class Filter:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] not in blocked:
            return next(filter(None, (finder.find_spec(name, path, target) for finder in finders)), None)

sys.meta_path[:] = [Filter]
from vitlens.cli import run
for command in commands:
    sys.argv = ["vitlens", *command.split()]
    try:
        run()
    except SystemExit as stop:
        assert not stop.code, command
"""


@pytest.mark.slow
def test_commands_run_without_extras(tmp_path):
    """In one process, training a model and looking into it."""
    blocked = {
        "captum",
        "jupyterlab",
        "IPython",
        "ipykernel",
        "ipywidgets",
        "anywidget",
        "transformers",
        "open_clip",
        "datasets",
        "accelerate",
    }
    samples()["chelsea"].save(tmp_path / "cat.jpg")
    commands = [
        "train --recipe digits --data digits --out run --tiny",
        "inspect run/model --out figures",
        "explain run/model cat.jpg --scores --orders 2 --out maps",
    ]
    code = WITHOUT.format(blocked=blocked, commands=commands)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0 and "leaked" not in done.stderr, done.stderr
    assert (tmp_path / "figures" / "rollout.png").exists() and (
        tmp_path / "maps" / "scores.csv"
    ).exists()
    assert len(json.loads((tmp_path / "figures" / "summary.json").read_text())["images"]) == len(
        samples()
    )


IN_WHEEL = """
import vitlens
print(vitlens.__file__)
assert vitlens.models.title(vitlens.load_model()) == "DeiT-Tiny, ImageNet-1k"
assert len(vitlens.samples()) == 6
"""


def fresh_environment(folder: Path) -> tuple[Path, Path]:
    """Python and the packages' folder of a new environment, which has the libraries of this one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    libraries = [path for path in sys.path if path.endswith("site-packages")]
    (site / "libraries.pth").write_text("\n".join(libraries))
    return folder / "bin" / "python", site


def readme_commands(program: str) -> list[list[str]]:
    """Command lines of the README that begin with a program, as lists of words without it, in their order."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = "\n".join(re.findall(r"```sh\n(.*?)```", readme, re.S)).splitlines()
    commands = [shlex.split(line, comments=True) for line in lines]
    return [words[1:] for words in commands if words[:1] == [program]]


def class_folders(folder: Path) -> None:
    """Squares of two photographs, a class and a folder each, in train/ and valid/."""
    for split, count in {"train": 20, "valid": 20}.items():
        for label in ("chelsea", "coffee"):
            (folder / split / label).mkdir(parents=True)
            photo = samples()[label]
            for number in range(count):
                left = 4 * number + (2 if split == "valid" else 0)
                square = photo.crop((left, 0, left + 200, 200))
                square.save(folder / split / label / f"{number}.png")


def imagenette(root: Path) -> None:
    """Squares of a photograph, in the folders of ten classes into which torchvision unpacks a small Imagenette."""
    photo = samples()["coffee"]
    for split, count in {"train": 4, "val": 1}.items():
        for number, wnid in enumerate(torchvision.datasets.Imagenette._WNID_TO_CLASS):
            folder = root / "imagenette2-160" / split / wnid
            folder.mkdir(parents=True)
            for k in range(count):
                left = 20 * number + 4 * k + (2 if split == "val" else 0)
                photo.crop((left, 0, left + 160, 160)).save(folder / f"{k}.JPEG")


@pytest.mark.slow
def test_readme_runs_from_the_wheel_in_an_empty_folder_without_a_network(tmp_path):
    wheel, _ = dist.build(tmp_path / "dist")
    python, site = fresh_environment(tmp_path / "environment")
    empty = tmp_path / "empty"
    (empty / "photos").mkdir(parents=True)
    offline = {"PIP_NO_INDEX": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": "", "MPLBACKEND": "agg"}
    environ = os.environ | offline

    def run(*arguments) -> str:
        command = [str(argument) for argument in (python, *arguments)]
        done = subprocess.run(command, cwd=empty, env=environ, capture_output=True, text=True)
        assert done.returncode == 0, f"{arguments}: {done.stderr[-3000:]}"
        return done.stdout

    run("-m", "pip", "install", "--quiet", "--no-deps", wheel)
    assert run("-c", IN_WHEEL).startswith(str(site)), "not the wheel"
    samples()["chelsea"].save(empty / "cat.jpg")
    samples()["coffee"].save(empty / "photos" / "coffee.jpg")
    class_folders(empty / "FOLDER")
    imagenette(tmp_path / "downloaded")
    environ["VITLENS_DATA"] = str(tmp_path / "downloaded")
    commands = readme_commands("vitlens")
    assert {words[0] for words in commands} == {
        *("app", "inspect", "explain", "page", "train", "evaluate", "audit"),
    }
    for words in commands:
        if words[0] == "app":
            check_app([python, "-u", "-m", "vitlens", *words, "--no-browser"], empty, environ)
            continue
        shorter = ["--tiny"] if words[0] == "train" else []
        run("-m", "vitlens", *words, *shorter)
        results = [words[i + 1] for i, word in enumerate(words) if word in ("--out", "--csv")]
        assert results and all((empty / name).exists() for name in results), words
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", readme, re.S)
    run("-c", code)


def check_app(command: list, folder: Path, environ: dict[str, str]) -> None:
    """Start an app, load its page, and end it."""
    app = subprocess.Popen(command, cwd=folder, env=environ, stdout=subprocess.PIPE, text=True)
    try:
        line = next(line for line in app.stdout if "http://" in line)
        address = re.search(r"http://\S+", line)[0]
        with urlopen(address) as page:
            assert "<html" in page.read().decode()
    finally:
        app.terminate()
        app.wait()


@pytest.mark.slow
def test_make_figures_of_the_readme_runs_in_a_copy_of_the_clone(tmp_path):
    """With the environment of these tests. `make test` of the README is what runs this test."""
    copy = tmp_path / "copy"
    copy_of_the_clone(copy)
    environment = copy / ".venv" / "bin"
    environment.mkdir(parents=True)
    (environment / "vitlens").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m vitlens "$@"\n')
    (environment / "vitlens").chmod(0o755)
    (copy / ".venv" / ".ready").touch()
    environ = os.environ | {"PYTHONPATH": str(copy), "HF_HUB_OFFLINE": "1"}
    commands = readme_commands("make")
    assert commands == [["figures"], ["test"]]
    subprocess.run(["make", "figures"], cwd=copy, env=environ, check=True)
    assert (copy / "figures" / "inspection.png").is_file()
    assert "DeiT-Tiny, ImageNet-1k" in (copy / "figures" / "summary.json").read_text()


def copy_of_the_clone(folder: Path) -> None:
    """Copy the tracked files of this repository."""
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in filter(None, tracked.split("\0")):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


RUN = """
import sys, nbformat
from nbclient import NotebookClient
path, folder = sys.argv[1:]
book = nbformat.read(path, as_version=4)
book.cells.append(nbformat.v4.new_code_cell("import vitlens; print(vitlens.__file__)"))
NotebookClient(book, timeout=900, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
print(book.cells[-1].outputs[0].text)
"""


@pytest.mark.slow
def test_notebooks_run_in_fresh_environment(tmp_path):
    """The first chapter clones and installs a copy of this repository; libraries are those of this environment."""
    copy = tmp_path / "copy"
    copy_of_the_clone(copy)
    identity = ["-c", "user.name=me", "-c", "user.email=me@example.org"]
    for command in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-qm", "copy"]):
        subprocess.run(["git", *command], cwd=copy, check=True)
    python, site = fresh_environment(tmp_path / "environment")
    offline = {
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",
        "PYTHONPATH": "",
        "IPYTHONDIR": str(tmp_path / "ipython"),
    }
    clone, prepared = (
        tmp_path / "v" / "notebooks",
        runpy.run_path(str(ROOT / "notebooks" / "execute.py"))["prepared"],
    )
    for number in ("05", "12"):  # one of figures and one of training; test_book.py runs all of them
        (chapter,) = (ROOT / "notebooks").glob(f"{number}_*.ipynb")
        colab = {} if clone.exists() else {"COLAB_RELEASE_TAG": "1"}
        book = prepared(chapter, tiny=True)
        book.cells[1].source = book.cells[1].source.replace(
            'REPOSITORY = ""', f"REPOSITORY = {str(copy)!r}"
        )
        nbformat.write(book, tmp_path / chapter.name)
        arguments = [tmp_path / chapter.name, tmp_path if colab else clone]
        environ = os.environ | offline | colab
        done = subprocess.run(
            [python, "-c", RUN, *arguments], env=environ, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.startswith(str(site)), "not the clone"
