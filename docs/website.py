"""Build the site from the notebooks and the documentation, or write its address into them.

    python docs/website.py build    # site/, with the live page, by Sphinx: `make site`
    python docs/website.py links    # badges and REPOSITORY of the notebooks from [tool.vitlens] in pyproject.toml

Sphinx reads a copy of the pages in a folder for this run, in which widgets have a button for the live page.
"""

import argparse
import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

ROOT = Path(__file__).resolve().parent.parent
MATHJAX = "mathjax@3.2.2"
CHAPTERS, APPENDICES = "[0-9][0-9]_*.ipynb", "[A-Z]_*.ipynb"
DOCS = [
    "explaining",
    "intervening",
    "explorer",
    "models",
    "training",
    "evaluation",
    "paper",
    "costs",
    "front-end",
]
PROJECT = ["CONTRIBUTING.md", "CHANGELOG.md", "data/README.md"]
LINK = re.compile(r"(\]\(|(?:src|href)=\\?\")([^()\s:\"\\#]+)(?=[)#\"\\\\])")
HOSTS = {
    "arxiv.org",
    "colab.research.google.com",
    "github.com",
    "kellerjordan.github.io",
    "transformer-circuits.pub",
    "www.lesswrong.com",
}
"""Hosts that pages may link to, besides those of the two addresses in pyproject.toml."""


def addresses(root: Path = ROOT) -> dict[str, str]:
    """The addresses of the repository and the site in pyproject.toml, empty where no one has filled them in."""
    text = (root / "pyproject.toml").read_text(encoding="utf-8").partition("[tool.vitlens]")[2]
    found = dict(re.findall(r'^(repository|site) = "([^"]*)"', text, re.M))
    for name, address in found.items():
        if address and not re.fullmatch(r"https://[\w.-]+(/[\w.~-]+)*", address):
            raise ValueError(
                f"{name} of [tool.vitlens] must be https://… without a slash at its end, got {address!r}."
            )
    return found


def chapters(root: Path = ROOT) -> list[Path]:
    """The notebooks in reading order: numbered chapters, then appendices with letters."""
    return [
        path for kind in (CHAPTERS, APPENDICES) for path in sorted((root / "notebooks").glob(kind))
    ]


def source(cell: dict) -> str:
    return "".join(cell["source"])


def heading(path: Path) -> tuple[str, str, str]:
    """Title, opening picture and question of a chapter, from its first cell. Empty where it has none."""
    text = source(json.loads(path.read_text(encoding="utf-8"))["cells"][0])
    parts = (r"^# (.+)$", r"!\[[^\]]*\]\(([^)]+)\)", r"\*\*([^*]+)\*\*")
    return tuple(
        found[1].replace("\n", " ") if (found := re.search(part, text, re.M)) else ""
        for part in parts
    )


# The pages, as Sphinx reads them.


def live(page: str, still: str, state: str = "") -> str:
    """A button that puts the live page in the place of a still image, above the image."""
    address = html.escape(f"{page}#{state}" if state else page)
    return (
        f'<div class="live" data-page="{address}"><p><button type="button">Try it here</button> '
        f'<a href="{address}">Open it on a page of its own</a> <span>17 MB, a few seconds to start. '
        f"On sample photos, or yours.</span></p>{still}</div>"
    )


def notebook(path: Path) -> str:
    """A notebook with the live page offered above each widget that shows what the page does."""
    book = json.loads(path.read_text(encoding="utf-8"))
    book["metadata"]["language_info"]["pygments_lexer"] = (
        "ipython3"  # which reads lines with % and !
    )
    for cell in book["cells"]:
        code = source(cell)
        for data in (output.get("data", {}) for output in cell.get("outputs", [])):
            if drawing := data.pop(
                "image/svg+xml", None
            ):  # Sphinx would give it its path as alt text
                alt = html.escape("".join(data["text/plain"]))
                data["text/html"] = (
                    f'<img alt="{alt}" src="data:image/svg+xml,{quote("".join(drawing))}">'
                )
        if "live" in cell["metadata"].get("tags", []) and re.search(
            r"widgets\.(explore|tour)", code
        ):
            view = re.search(r"view=\"(\w+)\"", code)
            state = cell["metadata"].get("page") or (f"view={view[1]}" if view else "")
            stills = [
                output["data"]
                for output in cell["outputs"]
                if "text/html" in output.get("data", {})
            ]
            for data in stills[-1:]:
                still = "".join(data["text/html"])
                data["text/html"] = live("../live.html", still, state)
    return json.dumps(book)


def card(path: Path, folder: Path) -> str:
    """A link to a chapter with its question and the left of its opening picture, or the middle if the left is empty."""
    from PIL import Image, ImageOps, ImageStat

    title, picture, question = heading(path)
    shown = ""
    if (file := path.parent / picture).is_file():
        small = folder / (file.name if file.suffix == ".svg" else f"{path.stem}.webp")
        if file.suffix == ".svg":
            shutil.copy(file, small)
        else:
            image = Image.open(file).convert("RGB")
            left, middle = (ImageOps.fit(image, (440, 330), centering=(x, 0.5)) for x in (0, 0.5))
            ink, more = (ImageStat.Stat(part.convert("L")).stddev[0] for part in (left, middle))
            (left if more < 1.1 * ink else middle).save(small, quality=72)
        shown = f'<img src="_static/cards/{small.name}" alt="" loading="lazy" width="240">'
    question = re.sub("`(.+?)`", r"<code>\1</code>", html.escape(question))
    inside = f"{shown}<b>{html.escape(title)}</b><span>{question}</span>"
    return f'<a class="chapter" href="notebooks/{path.stem}.html">{inside}</a>'


def front_page(folder: Path) -> str:
    """The README with the live page in place of its picture, and the chapters below their heading."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    picture = re.search(r"^!\[([^\]]+)\]\((\S+)\)$", text, re.M)
    still = (
        f'<img src="_static/{Path(picture[2]).name}" alt="{html.escape(picture[1])}" class="best">'
    )
    shutil.copy(ROOT / picture[2], folder / "_static")
    text = text.replace(picture[0], live("live.html", still))
    (cards := folder / "_static/cards").mkdir()
    grid = f'<div class="chapters">{"".join(card(path, cards) for path in chapters())}</div>\n\n'
    text = re.sub(
        r"(?<=^## The book\n).*?(?=^## )", lambda part: f"{part[0]}{grid}", text, flags=re.M | re.S
    )
    pages = {
        "The book": [
            f"notebooks/{path.stem}" for path in sorted((ROOT / "notebooks").glob(CHAPTERS))
        ],
        "Appendices": [
            f"notebooks/{path.stem}" for path in sorted((ROOT / "notebooks").glob(APPENDICES))
        ],
        "The package": [f"docs/{name}" for name in DOCS],
        "The project": [
            "About the book <notebooks/README>",
            *(name.removesuffix(".md") for name in PROJECT),
        ],
    }
    trees = (
        "\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *names, "```"])
        for caption, names in pages.items()
        if names
    )
    return "\n\n".join([text, *trees, ""])


def stage(folder: Path) -> None:
    """Copy pages, and the files that they link to, into an empty folder with the layout of the repository."""
    shutil.copytree(ROOT / "docs/_static", folder / "_static")
    (folder / "_extra").mkdir()
    texts = {path.relative_to(ROOT): notebook(path) for path in chapters()}
    names = [f"docs/{name}.md" for name in DOCS] + ["notebooks/README.md", *PROJECT]
    texts |= {Path(name): (ROOT / name).read_text(encoding="utf-8") for name in names}
    pages = texts.keys() | {Path("README.md")}
    texts[Path("index.md")] = front_page(folder)
    for name, text in texts.items():

        def linked(link: re.Match, here: Path = (ROOT / name).parent) -> str:
            start, address = link[1], link[2]
            target = (here / address).resolve()
            if not target.is_relative_to(ROOT) or not target.is_file():
                return link[0]
            html = not start.startswith("]")  # Sphinx leaves the links of HTML as they are
            if (path := target.relative_to(ROOT)) not in pages:
                for copy in [folder / path, folder / "_extra" / path][: 1 + html]:
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(target, copy)
                return link[0]
            if path == Path("README.md"):
                address = address.replace("README", "index")
            return start + (re.sub(r"\.\w+$", ".html", address) if html else address)

        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(LINK.sub(linked, text), encoding="utf-8")


def mathjax(folder: Path) -> None:
    """MathJax from npm, as one script and the extensions that it loads when a formula needs them."""
    if not (npm := shutil.which("npm")):
        sys.exit(
            "npm was not found. Install Node.js, whose npm fetches MathJax for the formulas of the site."
        )
    with tempfile.TemporaryDirectory() as place:
        subprocess.run(
            [npm, "pack", "--silent", MATHJAX], cwd=place, check=True, stdout=subprocess.DEVNULL
        )
        shutil.unpack_archive(next(Path(place).glob("*.tgz")), place, filter="data")
        es5 = Path(place, "package/es5")
        for part in ("tex-svg.js", "input/tex/extensions", "a11y/assistive-mml.js"):
            copy = shutil.copytree if (es5 / part).is_dir() else shutil.copy
            (folder / part).parent.mkdir(parents=True, exist_ok=True)
            copy(es5 / part, folder / part)


def trim(site: Path) -> None:
    """Leave out what no page needs: a script of 1.5 MB with icons that a font has as well, source maps and templates.

    Images of the front page and of the index are loaded when they come near the window.
    """
    for file in (*site.glob("_static/*.html"), *site.glob("_static/**/*.map")):
        file.unlink()
    for page in site.glob("**/*.html"):
        if page.name != "live.html":
            text = re.sub(
                r"<(link|script)[^>]*fontawesome\.js[^>]*>(</script>)?",
                "",
                page.read_text(encoding="utf-8"),
            )
            text = re.sub(
                "<title>vitlens .*?<", "<title>vitlens: a microscope for Vision Transformers<", text
            )
            if page.name in ("index.html", "README.html"):
                text = re.sub(r"<img (?![^>]*loading=)", '<img loading="lazy" ', text)
            page.write_text(text, encoding="utf-8")
    (site / "_static/scripts/fontawesome.js").unlink()
    search = (
        site / "_static/searchtools.js"
    )  # whose summaries shall not begin with the buttons of a page
    search.write_text(
        search.read_text(encoding="utf-8").replace('[role="main"]', "article"), encoding="utf-8"
    )


def build(site: Path, model: str) -> None:
    """Write the site, and its live page unless there is one. Exit with the warnings or dead links if there are any."""
    site.mkdir(exist_ok=True)
    if not (site / "live.html").exists():
        page = ["vitlens", "page", model, "--live", "--out", site / "live.html"]
        subprocess.run([sys.executable, "-m", *page], check=True)
    with tempfile.TemporaryDirectory() as place:
        stage(folder := Path(place))
        mathjax(folder / "_static/mathjax")
        options = [
            "-b",
            "html",
            "-c",
            ROOT / "docs",
            "-d",
            folder / ".doctrees",
            "-E",
            "-q",
            "-W",
            "--keep-going",
        ]
        options += [
            "-D",
            f"html_static_path={folder / '_static'}",
            "-D",
            f"html_extra_path={folder / '_extra'}",
        ]
        if subprocess.run(
            [sys.executable, "-m", "sphinx", *options, folder, folder / ".html"]
        ).returncode:
            sys.exit("Sphinx printed warnings. Change the pages that they name, and build again.")
        for part in (
            folder / ".html"
        ).iterdir():  # in place of an older site, whose other pages must not stay
            old = site / part.name
            shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
            shutil.move(part, old)
    trim(site)
    for path in chapters():
        shutil.copy(
            path, site / "_sources/notebooks" / path.name
        )  # a download is the notebook as committed
    if dead := dead_links(site):
        sys.exit("\n".join([f"{len(dead)} links are dead:", *dead]))


# Links.


class Links(HTMLParser):
    """The ids of a page and the addresses that it names."""

    def __init__(self, page: Path):
        super().__init__()
        self.ids, self.named = {""}, []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name in ("id", "name"):
                self.ids.add(value)
            elif name in ("href", "src", "data-page"):
                self.named.append(value)


def dead_links(site: Path) -> list[str]:
    """A line for each address of the pages that leads nowhere in the site, or outside to an unknown host."""
    pages = {path: Links(path) for path in site.rglob("*.html") if path.name != "live.html"}
    hosts = HOSTS | {urlsplit(address).hostname for address in addresses().values()}
    dead = []
    for page, links in pages.items():
        for address in dict.fromkeys(links.named):
            parts = urlsplit(address)
            if parts.scheme == "data":
                continue
            if parts.scheme or parts.netloc:
                alive = parts.scheme == "https" and parts.hostname in hosts
            else:
                target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
                alive = target.is_file() and (
                    target not in pages or unquote(parts.fragment) in pages[target].ids
                )
            if not alive:
                dead.append(f"{page.relative_to(site)}: {address}")
    return dead


def write_links(root: Path = ROOT) -> list[Path]:
    """Write the addresses of pyproject.toml into notebooks and READMEs. Returns the files that changed."""
    repository, site = (addresses(root)[name] for name in ("repository", "site"))
    texts = {path: path.read_text(encoding="utf-8") for path in chapters(root)}
    changed = {
        path: re.sub(r'(?<=REPOSITORY = )(\\?")[^"\\]*', rf"\g<1>{repository}", texts[path])
        for path in texts
    }

    def colab(line: re.Match) -> str:
        address = f"{repository}/blob/main/notebooks/{line[2]}"
        address = address.replace("https://github.com", "https://colab.research.google.com/github")
        return line[1] + f" [![Open in Colab](../docs/_static/colab.svg)]({address})" * (
            "colab" in address
        )

    for name, pattern, badge in (
        (
            "notebooks/README.md",
            r"^([|*-].*?\]\((\w+\.ipynb)\))(?: \[!\[Open in Colab\]\(.*?\)\]\(.*?\))?",
            colab,
        ),
        (
            "README.md",
            r"(?<=^# vitlens\n)(?:\n\[!\[Read the book\].*\n)?",
            f"\n[![Read the book](docs/_static/book.svg)]({site})\n" * bool(site),
        ),
    ):
        texts[root / name] = (root / name).read_text(encoding="utf-8")
        changed[root / name] = re.sub(pattern, badge, texts[root / name], flags=re.M)
    written = [path for path, text in changed.items() if text != texts[path]]
    for path in written:
        path.write_text(changed[path], encoding="utf-8")
    return written


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("command", choices=["build", "links"])
    parser.add_argument("--out", type=Path, default=ROOT / "site", help="folder of the site")
    parser.add_argument(
        "--model", default="data/checkpoints/vit_tiny_patch16_224", help="model of the live page"
    )
    options = parser.parse_args(arguments)
    if options.command == "links":
        print(
            "\n".join(f"{path.relative_to(ROOT)}: written" for path in write_links())
            or "Nothing changed."
        )
    else:
        build(options.out.resolve(), options.model)


if __name__ == "__main__":
    main(sys.argv[1:])
