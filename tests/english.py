"""Count riddles in the project's English: `make english`, with every place by `python tests/english.py -v [PATH …]`.

An item is a docstring, a block of comments, the text of a raise, an option's help, a test name, or a paragraph of the
README and docs. It is a riddle if a pattern matches. Semicolons and long parentheses are counted beside that.
"""

import argparse
import ast
import re
import subprocess
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from test_docstrings import public, without_example

ROOT = Path(__file__).parent.parent
RIDDLES = {
    "begins with a question word": r"\A(What|Whether|How|Why|Where|Which)\b(?![^.]*\?)",
    "is no": r"(?<!here )\b(is|are|was|were|be) no\b(?! (longer|more|larger|smaller|less)\b)",
    "is none": r"\b(is|are|was|were|be) none\b",
    "software speaks": r"(?<!paper )(?<!author )(?<!authors )\b(says?|said|tells?|told|asked|heeds|knows|answers)\b",
    "where there is": r"\b[Ww]here there (is|are)\b",
    "as it is": r"\bas (it is|it was|they are|they were)\b(?! \w+(ed|en|wn)\b)",
    "of its own": r"\bof (its|their) own\b",
    "vague amount": r"\b(hardly|nearly|much|a little)\b",
}
NAMES = r"(^|_)(what|whatever|told|tells?|says?|said|none|nobody|asked|heeds|knows|answers|hardly)(_|$)|_(is|are)_no_"
COLUMNS = ("items", "riddles", "semicolons", "long (…)")
PARENTHESIS = r"\((?:[^\s()]+\s+){5,}[^()]*\)"


def text_of(node: ast.AST) -> str:
    """The string constants below a node, in the order of the source, with … for what is filled in."""
    if isinstance(node, ast.FormattedValue):
        return "…"
    own = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
    return own + "".join(map(text_of, ast.iter_child_nodes(node)))


def python_items(path: Path) -> Iterator[tuple[str, int, str]]:
    """(kind, line, text) of each item of a Python file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield "docstring", node.lineno, re.sub(r"(?m)^\s*(>>>|\.\.\.).*$", "", node.value.value)
        elif isinstance(node, ast.Raise) and node.exc is not None:
            yield "error", node.lineno, text_of(node.exc)
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            texts = [k.value for k in node.keywords if k.arg == "help"] + node.args[1:2] * (
                name == "setting"
            )
            yield from (("help", text.lineno, text_of(text)) for text in texts)
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield "test name", node.lineno, node.name
    yield from comments(path)


def comments(path: Path) -> Iterator[tuple[str, int, str]]:
    """Blocks of comments on consecutive lines."""
    block, start, last = [], 0, -1
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT and not re.match(
                r"# (noqa|fmt:|type:)|#!", token.string
            ):
                if token.start[0] != last + 1:
                    yield "comment", start, " ".join(block)
                    block, start = [], token.start[0]
                block.append(token.string.lstrip("# "))
                last = token.start[0]
    yield "comment", start, " ".join(block)


def page_items(path: Path) -> Iterator[tuple[str, int, str]]:
    """Paragraphs without code, headings and tables' rules."""
    page = re.sub(
        r"(?ms)^```.*?^```",
        lambda code: "\n" * code[0].count("\n"),
        path.read_text(encoding="utf-8"),
    )
    for part in re.finditer(r"(?:^(?!#).*\S.*\n?)+", page, re.MULTILINE):
        yield "page", page.count("\n", 0, part.start()) + 1, part[0]


def hits(kind: str, text: str) -> list[str]:
    """Names of the patterns that a text matches."""
    patterns = {"test name": NAMES} if kind == "test name" else RIDDLES
    text = " ".join(re.sub(r"`[^`]*`", "`", text).split())
    return [name for name, pattern in patterns.items() if re.search(pattern, text)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "paths", nargs="*", default=["vitlens", "experiments", "tests", "README.md", "docs"]
    )
    parser.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="print each riddle and each name without example",
    )
    options, counts = parser.parse_args(), defaultdict(Counter)
    tracked = subprocess.check_output(
        ["git", "ls-files", *options.paths], cwd=ROOT, text=True
    ).splitlines()
    for name in (
        name for name in tracked if name.endswith((".py", ".md")) and name != "tests/english.py"
    ):
        room = "/".join(Path(name).parts[:-1][:2]) or "README"
        for kind, line, text in (python_items if name.endswith(".py") else page_items)(ROOT / name):
            matches = hits(kind, text)
            for row in ((0, room), (1, "all"), (2, kind)):
                flags = (
                    bool(text.strip()),
                    bool(matches),
                    ";" in text,
                    bool(re.search(PARENTHESIS, text)),
                )
                counts[row].update(dict(zip(COLUMNS, map(int, flags), strict=True)))
            if options.verbose and matches:
                print(
                    f"{name}:{line}: {kind}: {', '.join(matches)}: {' '.join(text.split())[:160]}"
                )
    print(f"\n{'':20}{''.join(f'{column:>12}' for column in COLUMNS)}{'riddles %':>12}")
    for row in sorted(counts):
        share = 100 * counts[row]["riddles"] / max(counts[row]["items"], 1)
        print(
            f"{row[1]:20}{''.join(f'{counts[row][column]:12,}' for column in COLUMNS)}{share:12.1f}"
        )
    print(f"\n{len(without_example())} of {len(public())} public callables have no example")
    print(*without_example() * options.verbose, sep="\n")


if __name__ == "__main__":
    main()
