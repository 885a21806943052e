"""Print the size of the packages, and the files that five common calls pass through: `make size`.

Expressions are the nodes of Python's syntax tree that have a value. Lines of code are those that are not
blank and hold no docstring, comment or import.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

from walks import WALKS, walk

ROOT = Path(__file__).parent.parent
PACKAGES = ("vitlens", "vitlens_explorer", "vitlens_paper")


def line_count(paths: list[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def docstring_lines(tree: ast.AST) -> set[int]:
    """Line numbers of strings that are statements: docstrings, and descriptions below constants."""
    strings = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]
    return {number for node in strings for number in range(node.lineno, node.end_lineno + 1)}


def import_lines(tree: ast.AST) -> set[int]:
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    return {number for node in imports for number in range(node.lineno, node.end_lineno + 1)}


def code_lines(source: str, tree: ast.AST) -> int:
    others = docstring_lines(tree) | import_lines(tree)
    count = 0
    for number, line in enumerate(source.splitlines(), 1):
        text = line.strip()
        if text and not text.startswith("#") and number not in others:
            count += 1
    return count


def measure(paths: list[Path]) -> dict[str, int]:
    """Number of lines, lines of code, expressions and raise statements of Python files."""
    sizes = dict.fromkeys(("lines", "code", "expressions", "raises"), 0)
    for path in paths:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        nodes = list(ast.walk(tree))
        sizes["lines"] += len(source.splitlines())
        sizes["code"] += code_lines(source, tree)
        sizes["expressions"] += sum(isinstance(node, ast.expr) for node in nodes)
        sizes["raises"] += sum(isinstance(node, ast.Raise) for node in nodes)
    return sizes


def tracked_files() -> list[Path]:
    names = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    return [ROOT / name for name in names if (ROOT / name).exists()]


def test_count() -> str:
    collect = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", ""]
    printed = subprocess.run(collect, cwd=ROOT, capture_output=True, text=True).stdout
    match = re.search(r"(\d+) tests? collected", printed)
    return match[1] if match else "?"


def print_sizes() -> None:
    tracked = tracked_files()
    print(f"{'':18}files   lines    code  expressions a line  raises")
    for room in (*PACKAGES, "experiments", "tests"):
        paths = [
            path
            for path in tracked
            if path.suffix == ".py" and path.relative_to(ROOT).parts[0] == room
        ]
        sizes = measure(paths)
        density = sizes["expressions"] / sizes["code"] if sizes["code"] else 0
        counts = (
            f"{len(paths):5}{sizes['lines']:8,}{sizes['code']:8,}{density:20.2f}{sizes['raises']:8}"
        )
        print(f"{room:18}{counts}", flush=True)
    scripts = [path for path in tracked if path.suffix in (".js", ".css")]
    assembly = [path for path in tracked if path.suffix == ".wat"]
    print(
        f"JavaScript and CSS: {line_count(scripts):,} lines; WebAssembly: {line_count(assembly):,} lines"
    )
    print(
        f"tests: {test_count()}; tracked files: {sum(path.stat().st_size for path in tracked) / 2**20:.1f} MiB"
    )


def main() -> None:
    print_sizes()
    for name in WALKS:
        files, turns = walk(name)
        print(f"\n{name}: {len(files)} files, {len(turns)} turns back")
        print("  " + ", ".join(files))
        for turn in turns:
            print(f"  back: {turn}")


if __name__ == "__main__":
    main()
