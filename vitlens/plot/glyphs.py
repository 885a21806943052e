"""Figures that draw names of any script: with fonts that have the letters, or with a box for each missing one."""

from __future__ import annotations

import functools
import sys
import unicodedata
from collections.abc import Iterator, Sequence

from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, fontManager
from matplotlib.ft2font import FT2Font
from matplotlib.text import Text
from matplotlib.ticker import LogFormatter

from vitlens.texts import visible

BOX = "□"
FALLBACKS = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Noto Sans CJK KR",
    "Source Han Sans SC",
    "WenQuanYi Micro Hei",
    "WenQuanYi Zen Hei",
    "Droid Sans Fallback",
    "IPAexGothic",
    "Microsoft YaHei",
    "Yu Gothic",
    "Malgun Gothic",
    "PingFang SC",
    "Hiragino Sans",
    "Apple SD Gothic Neo",
    "Arial Unicode MS",
    "Noto Sans Devanagari",
    "Noto Sans Thai",
    "Noto Emoji",
    "Symbola",
    "Segoe UI Symbol",
)
"""Fonts of further scripts that are used if they are installed. Matplotlib cannot draw fonts with colors."""
_announced: list[str] = []


class Page(Figure):
    """A figure whose texts are made drawable before each drawing.

    Texts are literal, without formulas between dollar signs, except for the powers at logarithmic axes.
    """

    def draw(self, renderer) -> None:
        """Draw, as in Matplotlib."""
        for axis in _axes_of(self):
            formatter = axis.get_major_formatter()
            if isinstance(formatter, LogFormatter):
                for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
                    tick.label1.set_parse_math(True)
        for text in self.findobj(Text):
            words = text.get_text()
            if words.isascii() and visible(words) == words:
                continue
            new = drawable(words, tuple(text.get_fontproperties().get_family()))
            if new != words:
                text.set_text(new)
        super().draw(renderer)


def _axes_of(figure: Figure) -> Iterator[Axis]:
    for ax in figure.axes:
        yield ax.xaxis
        yield ax.yaxis


@functools.cache
def installed_fallbacks() -> tuple[str, ...]:
    """The fallback fonts that are installed."""
    installed = {font.name for font in fontManager.ttflist}
    return tuple(name for name in FALLBACKS if name in installed)


@functools.cache
def characters(families: Sequence[str]) -> frozenset[int]:
    """The characters that some fonts have."""
    covered: set[int] = set()
    for family in families:
        try:
            path = findfont(FontProperties(family=[family]), fallback_to_default=False)
        except ValueError:
            continue
        covered.update(FT2Font(path).get_charmap())
    return frozenset(covered)


def drawable(text: str, families: Sequence[str] = ("DejaVu Sans",)) -> str:
    """Text in letters that fonts have. Invisible characters become escapes, missing ones a box, said once on stderr."""
    text = unicodedata.normalize("NFC", visible(text))
    covered = characters(families)
    missing = {c for c in text if ord(c) not in covered and c not in "\n\t"}
    if not missing:
        return text
    letters = []
    for character in text:
        if character not in missing:
            letters.append(character)
        elif not unicodedata.category(character).startswith(("M", "Cf")):
            letters.append(BOX)  # marks without their letter are left out
    _announce(missing)
    return "".join(letters)


def _announce(missing: set[str]) -> None:
    """Print once that letters are missing."""
    if _announced:
        return
    _announced.append("".join(sorted(missing)))
    some = " ".join(sorted(missing)[:5])
    print(
        f"Note: the installed fonts lack some letters of names, such as {some}. Figures show {BOX} in their place. "
        "Install a font that has them, such as Noto Sans CJK or Noto Emoji.",
        file=sys.stderr,
    )
