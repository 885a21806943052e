"""Check that each number in the prose of the book is printed by a cell or cited: `make claims`.

    python tests/claims.py 04 A     # some chapters; without names all of them

A paragraph with results names the cells that print them: `<!-- 9:tail-loss -->` is the cell `tail-loss` of chapter 9.
Several may be named. Every result of that paragraph must be among the numbers that these cells print, rounded as in the
prose. Published numbers are in a paragraph that links to its reference in D_reference.ipynb instead.

Results are numbers with a decimal point or a comma for thousands, and those before %, ×, "times" and "points".
"""

import functools
import re
import sys
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path

import nbformat

FOLDER = Path(__file__).parent.parent / "notebooks"
NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?"
UNIT = r" ?%| ?×(?! ?\d)| times\b| points?\b"
RESULT = re.compile(
    rf"(?<![\w.,]){NUMBER}(?![\d\w])(?=((?:(?:,| and| to| or| ±|–|,? and) ?{NUMBER})*(?:{UNIT}))?)"
)
REFERENCES = re.compile(r"<!--((?: [0-9A-D]+b?:[a-z0-9-]+)+) -->")
CITED = re.compile(r"\]\(D_reference\.ipynb#[a-z-]+\d{4}[a-z]?\)")
NO_RESULTS = re.compile(
    r"^#[^\n]*$|^```.*?^```|<details>.*?</details>|<!--.*?-->|\$\$.*?\$\$|\$[^$\n]+\$|`[^`]+`"
    r"|(?:[Ss]ections?|Figs?\.|Figures?|Tables?|Eqs?\.|[Aa]ppendix|arXiv:?|[Hh]eads?|[Cc]hapters?|Exercises?) "
    r"[A-D]?\.?\d+(?:\.\d+)*(?:(?:,|,? and| to|–) ?[A-D]?\.?\d+(?:\.\d+)*)*",
    re.M | re.S,
)


def chapters(chosen: Sequence[str] = ()) -> list[Path]:
    """The chapters, or those whose names begin with one of `chosen`."""
    return [
        p
        for p in sorted(FOLDER.glob("[0-9A-D]*_*.ipynb"))
        if not chosen or p.name.startswith(tuple(chosen))
    ]


def cells_of(chapter: str) -> dict[str, nbformat.NotebookNode]:
    """The cells of a chapter, such as "9", "2b" or "A", by their ids. Empty for an unknown chapter."""
    number = chapter.removesuffix("b")
    letter = chapter.removeprefix(number)
    name = number.zfill(2) if number.isdigit() else number
    paths = chapters([f"{name}{letter}_"])
    return {cell.id: cell for path in paths for cell in nbformat.read(path, as_version=4).cells}


def paragraphs(text: str) -> list[str]:
    """The paragraphs and items of lists of a markdown cell, with comments, but without code, formulas and headings."""
    text = NO_RESULTS.sub(lambda cut: cut[0] if REFERENCES.fullmatch(cut[0]) else "", text)
    text = re.sub(r"(?<=\])\((?!D_reference)[^)]*\)", "", text)
    return [
        " ".join(each.split())
        for each in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text)
        if each.strip()
    ]


def results(paragraph: str) -> list[str]:
    """The numbers of a paragraph that are results, those in percent with their sign."""
    text = REFERENCES.sub("", paragraph)
    found = [match for match in RESULT.finditer(text) if match[1] or re.search(r"[.,]", match[0])]
    return [match[0] + "%" * (match[1] or "").endswith("%") for match in found]


def printed(cell: nbformat.NotebookNode) -> set[Decimal]:
    """The numbers that a cell prints, in text and tables."""
    texts = []
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        figure = data.get("text/html", "").startswith("<img") or any(
            kind.startswith("image/") for kind in data
        )
        texts.append("" if figure else output.get("text", "") + data.get("text/plain", ""))
    numbers = re.findall(
        r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?(?!\w)", "\n".join(texts)
    )
    return {Decimal(number.replace(",", "")) for number in numbers}


def agrees(result: str, number: Decimal) -> bool:
    """True if the number, or its hundredfold for percentages, rounds to the result."""
    value = Decimal(result.strip("%").replace(",", ""))
    half = Decimal(5).scaleb(value.as_tuple().exponent - 1)
    return any(
        abs(each - value) <= half
        for each in ((number, 100 * number) if "%" in result else (number,))
    )


def problems(path: Path) -> Iterator[str]:
    """Sentences about the results of a chapter that no named cell prints and no reference covers."""
    cells = functools.cache(cells_of)  # for this chapter: each named one is read once
    for cell in nbformat.read(path, as_version=4).cells:
        for paragraph in paragraphs(cell.source) if cell.cell_type == "markdown" else ():
            numbers, start = set(), f"{path.name}, cell {cell.id}, “{paragraph[:60]}…”"
            for reference in " ".join(REFERENCES.findall(paragraph)).split():
                chapter, name = reference.split(":")
                if named := cells(chapter).get(name):
                    numbers |= printed(named)
                else:
                    yield f"{start}: the cell {reference} does not exist"
            lacking = [
                each
                for each in results(paragraph)
                if not any(agrees(each, number) for number in numbers)
            ]
            if lacking and not CITED.search(paragraph):
                yield f"{start}: {', '.join(lacking)} {'not in its cells' if numbers else 'has no reference'}"


def main(chosen: list[str]) -> int:
    paths = chapters(chosen)
    found = [problem for path in paths for problem in problems(path)]
    print("\n".join(found) or f"The results in {len(paths)} chapters are printed or cited.")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
