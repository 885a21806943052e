"""One list of dependencies: conda, pip and the Makefile install the same."""

import re
from pathlib import Path

import yaml

try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib

ROOT = Path(__file__).parent.parent
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


def test_readme_commands_exist():
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"\bmake ([a-z-]+)", readme)):
        assert re.search(rf"^{target}:", makefile, re.M), f"README names `make {target}`, which the Makefile lacks"


def test_readme_python_runs_as_written(tmp_path, monkeypatch):
    import matplotlib.pyplot as plt

    from vitlens.images import samples

    readme = (ROOT / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", readme, re.S)
    samples()["chelsea"].save(tmp_path / "cat.jpg")
    monkeypatch.chdir(tmp_path)
    space = {}
    exec(compile(code.replace("data/checkpoints", str(ROOT / "data" / "checkpoints")), "README.md", "exec"), space)
    assert space["summary"].mean_distance.shape == (1, 6, 6) and space["logits"].shape == (1, 200)
    plt.close("all")  # Axes that are asked for without one stay open, as pyplot's do
