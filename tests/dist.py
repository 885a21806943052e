"""Build the wheel and the source distribution, and check them.

python tests/dist.py [--out dist]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
LARGEST = 20 * 2**20
"""Bytes of a distribution."""
REQUIRED = (
    "vitlens/__init__.py",
    "vitlens/__init__.pyi",
    "vitlens/py.typed",
    "vitlens/bundled/config.json",
    "vitlens/bundled/model.safetensors",
    "vitlens/bundled/LICENSE",
    "vitlens_explorer/app.js",
    "vitlens_explorer/live/kernels.wasm",
    "vitlens_explorer/live/known.json",
    "vitlens_explorer/py.typed",
    "vitlens_paper/table_5.csv",
    "vitlens_paper/py.typed",
)
"""Some files of the wheel, of each kind."""
TOP_LEVEL = ("vitlens", "vitlens_explorer", "vitlens_paper")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    out = parser.parse_args(arguments).out.resolve()
    for path in build(out):
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


def build(out: Path) -> tuple[Path, Path]:
    """The wheel and the source distribution, built in a temporary folder and checked, then moved to `out`.

    Raises subprocess.CalledProcessError if building or twine's check fails, and ValueError for a wrong content.
    """
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as folder:
        run("build", "--no-isolation", "--outdir", folder, str(ROOT))
        (wheel,) = Path(folder).glob("*.whl")
        (source,) = Path(folder).glob("*.tar.gz")
        run("twine", "check", "--strict", str(wheel), str(source))
        check_size(wheel)
        check_size(source)
        check_wheel(wheel)
        check_source(source)
        return wheel.replace(out / wheel.name), source.replace(out / source.name)


def run(module: str, *arguments: str) -> None:
    """Run a module of this Python, and print what it printed only if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], capture_output=True, text=True
    )
    if done.returncode:
        print(done.stdout + done.stderr)
    done.check_returncode()


def check_size(path: Path) -> None:
    size = path.stat().st_size
    if size > LARGEST:
        raise ValueError(f"{path.name} has {size} bytes, expected at most {LARGEST}.")


def check_wheel(path: Path) -> None:
    """Raise ValueError if a wheel lacks a file of the three packages, or holds another one."""
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    expected = {*REQUIRED}
    for package in TOP_LEVEL:
        files = (file for file in (ROOT / package).rglob("*") if file.is_file())
        expected |= {file.relative_to(ROOT).as_posix() for file in files if file.suffix != ".pyc"}
    missing = sorted(expected - {*names})
    if missing:
        raise ValueError(f"{path.name} lacks {', '.join(missing)}.")
    others = [name for name in names if name not in expected]
    if others:
        raise ValueError(f"{path.name} also holds {', '.join(others)}.")


def check_source(path: Path) -> None:
    """Raise ValueError if a source distribution lacks what its wheel is built from."""
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    required = {"pyproject.toml", "README.md", "LICENSE"}
    required.add("data/checkpoints/deit_tiny/model.safetensors")
    missing = sorted(required - names)
    if missing:
        raise ValueError(f"{path.name} lacks {', '.join(missing)}.")


if __name__ == "__main__":
    main()
