"""Print the size of the project: `make size`."""

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def lines(paths) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def main() -> None:
    tracked = [ROOT / name for name in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()]
    tracked = [path for path in tracked if path.exists()]
    python = {
        room: [path for path in tracked if path.suffix == ".py" and path.relative_to(ROOT).parts[0] == room]
        for room in ("vitlens", "experiments", "tests")
    }
    raises = sum(
        isinstance(node, ast.Raise)
        for path in python["vitlens"] for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    )  # fmt: skip
    front, wat = ([path for path in tracked if path.suffix in kinds and "vitlens" in path.parts]
                  for kinds in ((".js", ".css"), (".wat",)))  # fmt: skip
    collect = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", ""]
    collected = subprocess.run(collect, cwd=ROOT, capture_output=True, text=True).stdout
    tests = re.search(r"(\d+) tests? collected", collected)
    package = python["vitlens"]
    print(f"vitlens/       {lines(package):6,} lines of Python in {len(package)} files, {raises} raises")
    print(f"               {lines(front):6,} lines of JavaScript and CSS, {lines(wat)} of WebAssembly")
    print(f"experiments/   {lines(python['experiments']):6,} lines")
    print(f"tests/         {lines(python['tests']):6,} lines, {tests[1] if tests else '?'} tests")
    print(f"tracked files  {sum(path.stat().st_size for path in tracked) / 2**20:6.1f} MiB")


if __name__ == "__main__":
    main()
