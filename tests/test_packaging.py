"""One list of dependencies: conda, pip and the Makefile install the same."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml

from vitlens import cli
from vitlens.train.recipes import RECIPES

try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib

ROOT = Path(__file__).parent.parent
NOTEBOOKS = (ROOT / "notebooks").glob("*.ipynb")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_environment_is_python_pip_and_this_project():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["name"] == PROJECT["name"]
    *conda, pip = environment["dependencies"]
    assert conda == ["python" + PROJECT["requires-python"], "pip"]
    (install,) = pip["pip"]
    extras = re.fullmatch(r"-e \.\[(.+)\]", install).group(1).split(",")
    assert set(extras) == set(PROJECT["optional-dependencies"])
    assert f'--editable ".[{",".join(extras)}]"' in (ROOT / "Makefile").read_text()


def test_every_pip_finds_the_extras():
    """Before 23.3, pip did not find an extra whose name changes when it is normalized, and only warned."""
    assert all(re.fullmatch("[a-z0-9]+", extra) for extra in PROJECT["optional-dependencies"])


def test_floors_not_pins():
    every = PROJECT["dependencies"] + sum(PROJECT["optional-dependencies"].values(), [])
    for requirement in every:
        assert re.fullmatch(r"[a-z0-9-]+>=[\d.]+(,<\d+)?", requirement), requirement


def test_what_the_user_asked_for_is_installed():
    every = " ".join(PROJECT["dependencies"] + sum(PROJECT["optional-dependencies"].values(), []))
    for name in ("torch", "timm", "jupyterlab", "matplotlib", "seaborn", "scikit-learn", "ipywidgets", "captum"):
        assert re.search(rf"(^| ){name}>=", every), name


def test_what_is_no_python_is_packed_too():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    for path in (ROOT / "vitlens").rglob("*"):
        if path.is_file() and path.suffix not in (".py", ".pyc"):
            package = ".".join(path.parent.relative_to(ROOT).parts)
            assert any(path.match(pattern) for pattern in declared.get(package, ())), path


def test_a_test_that_hangs_is_ended_and_the_slowest_are_named(tmp_path):
    """By the project's own settings; only the limit is shorter here."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_hangs.py").write_text("import time\ndef test_hangs():\n    time.sleep(200)\n")
    command = [sys.executable, "-m", "pytest", "-o", "timeout=1", "-p", "no:cacheprovider"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout
    assert "Timeout" in said and "1 failed" in said and "slowest 20 durations" in said
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert 0 < settings["timeout"] <= 300


def test_readme_commands_exist():
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"\bmake ([a-z-]+)", readme)):
        assert re.search(rf"^{target}:", makefile, re.M), f"README names `make {target}`, which the Makefile lacks"


DOCS = sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
READMES = ("README.md", "data/README.md", "notebooks/README.md")
TEXTS = sorted({*READMES, *DOCS, *(f"notebooks/{path.name}" for path in NOTEBOOKS)})


@pytest.mark.parametrize("text", TEXTS)
def test_commands_in_texts_have_the_options_they_are_given(text, tmp_path, monkeypatch):
    """Every `vitlens COMMAND …` in a text is understood, up to its doing anything."""
    content = (ROOT / text).read_text().replace('\\"', '"').replace("\\n", "\n")
    words = r"((?:inspect|explain|app|train|evaluate|ablate|paper [a-z]+)(?: [^`\n#|]+)?)"
    found = re.findall(rf"(?:`|-m |bin/|^\W*)vitlens {words}", content, re.M)
    assert found or text != "README.md"
    monkeypatch.chdir(tmp_path)
    for command in found:
        name, *arguments = shlex.split(command.strip('", '))
        if arguments:  # else it is only named
            for file in (word for word in arguments if "/" not in word and Path(word).suffix):
                Path(file).touch()  # typer looks whether images exist
            command_line = typer.main.get_command(cli.app).commands[name]
            if name == "paper":
                command_line, arguments = command_line.commands[arguments[0]], arguments[1:]
            try:
                given = command_line.make_context(name, arguments).params
            except typer.Exit:  # --list
                continue
            assert not given.get("recipe") or given["recipe"] in RECIPES, command


def test_python_in_the_readme_and_docs_runs_as_written(tmp_path, monkeypatch):
    """The docs continue with the README's names; docs/models.md needs a checkpoint and a model of the reader's own."""
    import matplotlib.pyplot as plt

    from vitlens.images import samples

    samples()["chelsea"].save(tmp_path / "cat.jpg")
    monkeypatch.chdir(tmp_path)
    space = {}
    for text in ("README.md", *(text for text in DOCS if text != "docs/models.md")):
        code = "".join(re.findall(r"```python\n(.*?)```", (ROOT / text).read_text(), re.S))
        exec(compile(code, text, "exec"), space)
    assert space["summary"].mean_distance.shape == (1, 12, 3) and space["logits"].shape == (1, 200)
    plt.close("all")  # Axes that are asked for without one stay open, as pyplot's do


def test_links_in_the_readme_and_docs_lead_somewhere():
    for text in (*READMES, "CONTRIBUTING.md", *DOCS):
        content = (ROOT / text).read_text()
        for link in re.findall(r"\]\(([^)#]+)(?:#[\w-]+)?\)|(?:src|href)=\"([^\"]+)\"", content):
            target = "".join(link)
            assert "://" in target or ((ROOT / text).parent / target).exists(), f"{text} links to {target}"
