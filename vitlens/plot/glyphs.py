"""Figures that draw names of any script: with fonts that have the letters, or with a box for each missing one."""

from __future__ import annotations

import functools
import sys
import unicodedata
from collections.abc import Callable, Iterator, Sequence

from matplotlib import rc_context, rcParams
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, fontManager
from matplotlib.ft2font import FT2Font
from matplotlib.text import Text
from matplotlib.ticker import LogFormatter

from vitlens.texts import shorten, visible

BOX = "□"
LONGEST_TICK = 60
"""Letters of the label of a tick. The middle of longer ones is left out."""
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
TRUE_TYPE = {"pdf.fonttype": 42, "ps.fonttype": 42}
"""Settings that embed TrueType fonts, because publishers refuse Matplotlib's Type 3 fonts."""
_announced: list[str] = []


class Page(Figure):
    """A figure whose texts are made drawable before each drawing.

    Texts are literal, without formulas between dollar signs, except for the powers at logarithmic axes.
    """

    def savefig(self, *args, **kwargs) -> None:
        """Save, as in Matplotlib, with TrueType fonts in PDF and PostScript files."""
        with rc_context(TRUE_TYPE):
            super().savefig(*args, **kwargs)

    def draw(self, renderer) -> None:
        """Draw, as in Matplotlib."""
        _clean_ticks(self.axes, _tick_label)
        panels = _panels_of_titles(self.axes)
        for text in self.findobj(Text):
            words = text.get_text()
            letters = int(self.get_figwidth() * 72 / (0.5 * text.get_fontsize()))
            letters = max(LONGEST_TICK * 2 // 3, letters // panels.get(text, 1))
            if len(words) > letters:
                words = "\n".join(shorten(line, letters) for line in words.split("\n"))
                text.set_text(words)
            if words.isascii() and visible(words) == words:
                continue
            families = with_fallbacks(text.get_fontproperties().get_family())
            new = drawable(words, families)
            if new != words:
                text.set_text(new)
            if not characters(families[:1]).issuperset(map(ord, new)):
                text.set_fontfamily(families)
        super().draw(renderer)


def _panels_of_titles(axes: Sequence[Axes]) -> dict[Text, int]:
    """Number of panels beside each other, by the titles of axes."""
    panels = {}
    for ax in axes:
        place = ax.get_subplotspec()
        number = place.get_gridspec().ncols if place else 1
        for title in (ax.title, ax._left_title, ax._right_title):
            panels[title] = number
    return panels


def _tick_label(text: str) -> str:
    return drawable(shorten(text, LONGEST_TICK))


def escape_texts(ax: Axes) -> None:
    """Put escapes in place of invisible characters in the texts of a figure of the caller, of which `ax` is a part."""
    figure = ax.figure
    _clean_ticks(figure.axes, visible)
    for text in figure.findobj(Text):
        words = text.get_text()
        if visible(words) != words:
            text.set_text(visible(words))


def _clean_ticks(axes: Sequence[Axes], clean: Callable[[str], str]) -> None:
    """Apply a function to the labels of all ticks, which Matplotlib writes anew in each drawing."""
    for axis in _axes_of(axes):
        for formatter in (axis.get_major_formatter(), axis.get_minor_formatter()):
            if vars(formatter).get("vitlens_clean") is not clean:
                formatter.format_ticks = functools.partial(_cleaned, clean, formatter.format_ticks)
                formatter.vitlens_clean = clean
        if isinstance(axis.get_major_formatter(), LogFormatter):
            for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
                tick.label1.set_parse_math(True)


def _cleaned(
    clean: Callable[[str], str], labels_of: Callable[[object], list[str]], locations
) -> list[str]:
    return [clean(str(label)) for label in labels_of(locations)]


def _axes_of(axes: Sequence[Axes]) -> Iterator[Axis]:
    for ax in axes:
        yield ax.xaxis
        yield ax.yaxis


@functools.cache
def installed_fallbacks() -> tuple[str, ...]:
    """The fallback fonts that are installed."""
    return tuple(name for name in FALLBACKS if name in _installed())


@functools.cache
def _installed() -> frozenset[str]:
    return frozenset(font.name for font in fontManager.ttflist)


def with_fallbacks(families: Sequence[str]) -> tuple[str, ...]:
    """Names of fonts, in place of those such as "sans-serif" the fonts of Matplotlib's settings, and the fallbacks."""
    names: list[str] = []
    for family in families:
        names += rcParams.get(f"font.{family}", [family])
    installed = _installed()
    known = [name for name in names if name in installed] or ["DejaVu Sans"]
    return tuple(dict.fromkeys([*known, *installed_fallbacks()]))


def font_file(text: str) -> tuple[str, str]:
    """Path of an installed font with the letters of a text, and the text, for programs that draw with one font."""
    families = ("DejaVu Sans", *installed_fallbacks())
    wanted = set(map(ord, visible(text))) - {ord("\n"), ord("\t")}
    best = min(families, key=functools.partial(_number_missing, wanted))
    path = findfont(FontProperties(family=[best]))
    return path, drawable(text, (best,))


def _number_missing(wanted: set[int], family: str) -> int:
    return len(wanted - characters((family,)))


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


def drawable(text: str, families: Sequence[str] = ()) -> str:
    """Text in letters that fonts have, by default those of this package's figures.

    Invisible characters become escapes, missing ones a box, said once on stderr.
    """
    if text.isascii() and text.isprintable():
        return text
    families = tuple(families) or ("DejaVu Sans", *installed_fallbacks())
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
