"""Build the site from the notebooks and the documentation, or write its address into them.

    python docs/website.py build    # site/, with the live page, by Sphinx: `make site`
    python docs/website.py links    # badges and REPOSITORY of the notebooks from [tool.vitlens] in pyproject.toml

Sphinx reads a copy of the pages in a folder for this run, in which widgets have a button for the live page.
"""

import argparse
import base64
import html
import io
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
CHAPTERS, APPENDICES = "[0-9][0-9]*_*.ipynb", "[A-Z]_*.ipynb"
DOCS = [
    "questions",
    "explaining",
    "intervening",
    "explorer",
    "models",
    "recipes",
    "training",
    "evaluation",
    "paper",
    "costs",
    "limits",
    "migration",
    "front-end",
    "reference",
]
PROJECT = ["CONTRIBUTING.md", "CHANGELOG.md", "data/README.md"]
LINK = re.compile(r"(\]\(|(?:src|href)=\\?\")([^()\s:\"\\#]+)(?=[)#\"\\\\])")
HOSTS = {
    "arxiv.org",
    "colab.research.google.com",
    "creativecommons.org",
    "docs.python.org",
    "doi.org",
    "github.com",
    "kellerjordan.github.io",
    "transformer-circuits.pub",
    "www.lesswrong.com",
}
"""Hosts that pages may link to, besides those of the two addresses in pyproject.toml."""

PREVIEW = "_static/preview.jpg"
"""Image that other sites show beside a link to a page."""


def addresses(root: Path = ROOT) -> dict[str, str]:
    """The addresses of the repository and the site in pyproject.toml, empty where no one has filled them in."""
    text = (root / "pyproject.toml").read_text(encoding="utf-8").partition("[tool.vitlens]")[2]
    by_name = dict(re.findall(r'^(repository|site) = "([^"]*)"', text, re.M))
    for name, address in by_name.items():
        if address and not re.fullmatch(r"https://[\w.-]+(/[\w.~-]+)*", address):
            raise ValueError(
                f"{name} of [tool.vitlens] must be https://… without a slash at its end, got {address!r}."
            )
    return by_name


def chapters(root: Path = ROOT) -> list[Path]:
    """The notebooks in reading order: numbered chapters, then appendices with letters."""
    folder = root / "notebooks"
    return sorted(folder.glob(CHAPTERS)) + sorted(folder.glob(APPENDICES))


def source(cell: dict) -> str:
    return "".join(cell["source"])


def heading(path: Path) -> tuple[str, str, str]:
    """Title, opening picture and question of a chapter, from its first cell. Empty where it has none."""
    text = source(json.loads(path.read_text(encoding="utf-8"))["cells"][0])

    def first(pattern: str) -> str:
        match = re.search(pattern, text, re.M)
        return match[1].replace("\n", " ") if match else ""

    title = first(r"^# (.+)$")
    picture = first(r"!\[[^\]]*\]\(([^)]+)\)")
    question = first(r"\*\*([^*]+)\*\*")
    return title, picture, question


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
    # the lexer that reads lines with % and !
    book["metadata"]["language_info"]["pygments_lexer"] = "ipython3"
    for cell in book["cells"]:
        outputs = [output["data"] for output in cell.get("outputs", []) if "data" in output]
        for data in outputs:
            if "image/svg+xml" in data:
                data["text/html"] = svg_image(data)
        stills = [data for data in outputs if "text/html" in data]
        if stills and has_widget(cell):
            still = "".join(stills[-1]["text/html"])
            stills[-1]["text/html"] = live("../live.html", still, page_state(cell))
    return json.dumps(book)


def svg_image(data: dict) -> str:
    """HTML of an output's drawing, which it loses. Sphinx would give it its path as alt text."""
    alt = html.escape("".join(data["text/plain"]))
    drawing = quote("".join(data.pop("image/svg+xml")))
    return f'<img alt="{alt}" src="data:image/svg+xml,{drawing}">'


def has_widget(cell: dict) -> bool:
    """True for a cell with a widget that shows what the live page does."""
    tagged = "live" in cell["metadata"].get("tags", [])
    return tagged and bool(re.search(r"widgets\.(explore|tour)", source(cell)))


def page_state(cell: dict) -> str:
    """State of the live page for the widget of a cell."""
    state = cell["metadata"].get("page")
    if state:
        return state
    view = re.search(r"view=\"(\w+)\"", source(cell))
    return f"view={view[1]}" if view else ""


def card(path: Path, folder: Path) -> str:
    """A link to a chapter with its question and a part of its opening picture."""
    title, picture, question = heading(path)
    image = ""
    file = path.parent / picture
    if file.is_file():
        name = file.name if file.suffix == ".svg" else f"{path.stem}.webp"
        if file.suffix == ".svg":
            shutil.copy(file, folder / name)
        else:
            write_card_image(file, folder / name)
        image = f'<img src="_static/cards/{name}" alt="" loading="lazy" width="240">'
    question = re.sub("`(.+?)`", r"<code>\1</code>", html.escape(question))
    inside = f"{image}<b>{html.escape(title)}</b><span>{question}</span>"
    return f'<a class="chapter" href="notebooks/{path.stem}.html">{inside}</a>'


def write_card_image(file: Path, card: Path) -> None:
    """Write the left of a picture, or its middle if the left is empty."""
    from PIL import Image, ImageOps, ImageStat

    image = Image.open(file).convert("RGB")
    left = ImageOps.fit(image, (440, 330), centering=(0, 0.5))
    middle = ImageOps.fit(image, (440, 330), centering=(0.5, 0.5))
    left_contrast = ImageStat.Stat(left.convert("L")).stddev[0]
    middle_contrast = ImageStat.Stat(middle.convert("L")).stddev[0]
    fuller = left if middle_contrast < 1.1 * left_contrast else middle
    fuller.save(card, quality=58, method=6)


def front_page(folder: Path) -> str:
    """The README with the live page in place of its picture, and the chapters below their heading."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    picture = re.search(r"^!\[([^\]]+)\]\((\S+)\)$", text, re.M)
    still = (
        f'<img src="_static/{Path(picture[2]).name}" alt="{html.escape(picture[1])}" class="best">'
    )
    shutil.copy(ROOT / picture[2], folder / "_static")
    text = text.replace(picture[0], live("live.html", still))
    folder_of_cards = folder / "_static/cards"
    folder_of_cards.mkdir()
    cards = [card(path, folder_of_cards) for path in chapters()]
    grid = f'<div class="chapters">{"".join(cards)}</div>\n\n'
    book = re.search(r"(?<=^## The book\n).*?(?=^## )", text, re.M | re.S)
    text = text[: book.end()] + grid + text[book.end() :]
    notebooks = {
        kind: [f"notebooks/{path.stem}" for path in sorted((ROOT / "notebooks").glob(kind))]
        for kind in (CHAPTERS, APPENDICES)
    }
    project = [name.removesuffix(".md") for name in PROJECT]
    pages = {
        "The book": notebooks[CHAPTERS],
        "Appendices": notebooks[APPENDICES],
        "The package": [f"docs/{name}" for name in DOCS],
        "The project": ["About the book <notebooks/README>", *project],
    }
    parts = [text]
    for caption, names in pages.items():
        if names:
            lines = ["```{toctree}", ":hidden:", f":caption: {caption}", "", *names, "```"]
            parts.append("\n".join(lines))
    return "\n\n".join([*parts, ""])


def stage(folder: Path) -> None:
    """Copy pages, and the files that they link to, into an empty folder with the layout of the repository."""
    import reference  # needs Sphinx and PyTorch, which links do not need

    shutil.copytree(ROOT / "docs/_static", folder / "_static")
    (folder / "_extra").mkdir()
    texts = {path.relative_to(ROOT): notebook(path) for path in chapters()}
    names = [f"docs/{name}.md" for name in DOCS] + ["notebooks/README.md", *PROJECT]
    texts |= {Path(name): (ROOT / name).read_text(encoding="utf-8") for name in names}
    pages = texts.keys() | {Path("README.md")}
    texts[Path("index.md")] = front_page(folder)
    texts[Path("docs/reference.md")] += "\n" + reference.contents()
    for name, text in texts.items():
        here = (ROOT / name).parent
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with_links = LINK.sub(lambda link, here=here: staged_link(link, here, pages, folder), text)
        (folder / name).write_text(with_links, encoding="utf-8")
    reference.write(folder / "reference")


def staged_link(link: re.Match, here: Path, pages: set[Path], folder: Path) -> str:
    """A link of a page in `here`, for the copy of the page in `folder`. Copies a linked file that is not a page."""
    start, address = link[1], link[2]
    target = (here / address).resolve()
    if not target.is_relative_to(ROOT) or not target.is_file():
        return link[0]
    path = target.relative_to(ROOT)
    in_html = not start.startswith("]")
    if path not in pages:
        copy_into(folder, target, path)
        if in_html:  # Sphinx copies only the files that Markdown links to
            copy_into(folder / "_extra", target, path)
        return link[0]
    if path == Path("README.md"):
        address = address.replace("README", "index")
    if in_html:  # Sphinx leaves the links of HTML as they are
        address = re.sub(r"\.\w+$", ".html", address)
    return start + address


def copy_into(folder: Path, file: Path, path: Path) -> None:
    """Copy a file to a path in a folder."""
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(file, folder / path)


def mathjax(folder: Path) -> None:
    """MathJax from npm, as one script and the extensions that it loads when a formula needs them."""
    npm = shutil.which("npm")
    if not npm:
        sys.exit(
            "npm was not found. Install Node.js, whose npm fetches MathJax for the formulas of the site."
        )
    with tempfile.TemporaryDirectory() as place:
        command = [npm, "pack", "--silent", MATHJAX]
        subprocess.run(command, cwd=place, check=True, stdout=subprocess.DEVNULL)
        shutil.unpack_archive(next(Path(place).glob("*.tgz")), place, filter="data")
        es5 = Path(place, "package/es5")
        for part in ("tex-svg.js", "input/tex/extensions", "a11y/assistive-mml.js"):
            (folder / part).parent.mkdir(parents=True, exist_ok=True)
            if (es5 / part).is_dir():
                shutil.copytree(es5 / part, folder / part)
            else:
                shutil.copy(es5 / part, folder / part)


def write_preview(site: Path) -> None:
    """Write the image of links: the upper part of the still image in the live page."""
    from PIL import Image, ImageOps

    page = (site / "live.html").read_text(encoding="utf-8")
    still = re.search(r'<div class="opening">.*?src="data:image/jpeg;base64,([^"]+)"', page, re.S)
    image = Image.open(io.BytesIO(base64.b64decode(still[1]))).convert("RGB")
    square = ImageOps.fit(image, (630, 630), centering=(0.5, 0))
    square.save(site / PREVIEW, quality=70, optimize=True)


def with_preview(text: str, start: str) -> str:
    """A page with the tags from which other sites make the preview of a link.

    start: the address of the site with a slash, or the path to its folder while it has no address.
    """
    title = re.search("<title>(.*?)</title>", text, re.S)[1].strip()
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    description = html.escape(re.search('^description = "(.*)"', project, re.M)[1])
    by_name = {"title": title, "description": description, "image": start + PREVIEW}
    tags = [f'<meta property="og:{name}" content="{value}">' for name, value in by_name.items()]
    return text.replace("</head>", "".join(tags) + "</head>", 1)


def trim(site: Path) -> None:
    """Leave out what no page needs: a script of 1.5 MB with icons that a font has as well, source maps and templates.

    Images of the front page and of the index are loaded when they come near the window.
    """
    for file in (*site.glob("_static/*.html"), *site.glob("_static/**/*.map")):
        file.unlink()
    for page in site.glob("**/*.html"):
        if page.name == "live.html":
            continue
        text = page.read_text(encoding="utf-8")
        text = re.sub(r"<(link|script)[^>]*fontawesome\.js[^>]*>(</script>)?", "", text)
        title = "<title>vitlens: a microscope for Vision Transformers<"
        text = re.sub("<title>vitlens .*?<", title, text)
        text = accessible(text)
        address = addresses()["site"]
        to_site = "../" * (len(page.relative_to(site).parts) - 1)
        text = with_preview(text, f"{address}/" if address else to_site)
        if page.name in ("index.html", "README.html"):
            text = re.sub(r"<img (?![^>]*loading=)", '<img loading="lazy" ', text)
        page.write_text(text, encoding="utf-8")
    (site / "_static/scripts/fontawesome.js").unlink()
    # Summaries in the results of the search begin with the text of a page, not with its buttons.
    search = site / "_static/searchtools.js"
    script = search.read_text(encoding="utf-8").replace('[role="main"]', "article")
    search.write_text(script, encoding="utf-8")


def accessible(text: str) -> str:
    """A page in which the button of the list of pages has a name, and signatures are plain elements and not lists."""
    label = '<summary aria-label="Pages of this part">'
    text = text.replace(
        '<summary><span class="toctree-toggle"', f'{label}<span class="toctree-toggle"'
    )

    def without_lists(signature: re.Match) -> str:
        plain = signature[0].replace("<dl>", '<div class="parameters">').replace("</dl>", "</div>")
        return plain.replace("<dd>", "<div>").replace("</dd>", "</div>")

    return re.sub(r'<dt class="sig.*?</dt>', without_lists, text, flags=re.S)


def build(site: Path, model: str) -> None:
    """Write the site, and its live page unless there is one. Exit with the warnings or dead links if there are any."""
    site.mkdir(exist_ok=True)
    if not (site / "live.html").exists():
        page = ["vitlens", "page", model, "--live", "--out", site / "live.html"]
        subprocess.run([sys.executable, "-m", *page], check=True)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        stage(folder)
        mathjax(folder / "_static/mathjax")
        command = [sys.executable, "-m", "sphinx", "-b", "html", "-c", ROOT / "docs"]
        command += ["-d", folder / ".doctrees", "-E", "-q", "-W", "--keep-going"]
        command += ["-D", f"html_static_path={folder / '_static'}"]
        command += ["-D", f"html_extra_path={folder / '_extra'}"]
        sphinx = subprocess.run([*command, folder, folder / ".html"])
        if sphinx.returncode:
            sys.exit("Sphinx printed warnings. Change the pages that they name, and build again.")
        # The pages replace those of an older site.
        for part in (folder / ".html").iterdir():
            old = site / part.name
            if old.is_dir():
                shutil.rmtree(old)
            else:
                old.unlink(missing_ok=True)
            shutil.move(part, old)
    trim(site)
    write_preview(site)
    for path in chapters():  # a download is the notebook as committed
        shutil.copy(path, site / "_sources/notebooks" / path.name)
    dead = dead_links(site)
    if dead:
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
            if not leads_somewhere(address, page, pages, hosts):
                dead.append(f"{page.relative_to(site)}: {address}")
    return dead


def leads_somewhere(address: str, page: Path, pages: dict[Path, Links], hosts: set[str]) -> bool:
    """True for an address of a known host, of data, or of an existing file, with an id that its page has."""
    parts = urlsplit(address)
    if parts.scheme == "data":
        return True
    if parts.scheme or parts.netloc:
        return parts.scheme == "https" and parts.hostname in hosts
    target = page
    if parts.path:
        target = (page.parent / unquote(parts.path)).resolve()
    if target in pages:
        return unquote(parts.fragment) in pages[target].ids
    return target.is_file()


def write_links(root: Path = ROOT) -> list[Path]:
    """Write the addresses of pyproject.toml into notebooks and READMEs. Returns the files that changed."""
    repository, site = addresses(root)["repository"], addresses(root)["site"]
    index, readme = root / "notebooks/README.md", root / "README.md"
    texts = {path: path.read_text(encoding="utf-8") for path in (*chapters(root), index, readme)}
    changed = {}
    for path in chapters(root):
        pattern = r'(?<=REPOSITORY = )(\\?")[^"\\]*'
        changed[path] = re.sub(pattern, rf"\g<1>{repository}", texts[path])

    def with_colab_badge(line: re.Match) -> str:
        address = f"{repository}/blob/main/notebooks/{line[2]}"
        address = address.replace("https://github.com", "https://colab.research.google.com/github")
        if "colab" not in address:
            return line[1]
        return f"{line[1]} [![Open in Colab](../docs/_static/colab.svg)]({address})"

    pattern = r"^([|*-].*?\]\((\w+\.ipynb)\))(?: \[!\[Open in Colab\]\(.*?\)\]\(.*?\))?"
    changed[index] = re.sub(pattern, with_colab_badge, texts[index], flags=re.M)
    badge = f"\n[![Read the book](docs/_static/book.svg)]({site})\n" if site else ""
    pattern = r"(?<=^# vitlens\n)(?:\n\[!\[Read the book\].*\n)?"
    changed[readme] = re.sub(pattern, badge, texts[readme], flags=re.M)
    metadata = root / "pyproject.toml"
    texts[metadata] = metadata.read_text(encoding="utf-8")
    changed[metadata] = with_project_urls(texts[metadata], repository, site)
    written = [path for path, text in changed.items() if text != texts[path]]
    for path in written:
        path.write_text(changed[path], encoding="utf-8")
    return written


def with_project_urls(text: str, repository: str, site: str) -> str:
    """The text of pyproject.toml with the addresses that are set in [project.urls], before [project.scripts]."""
    urls = {"Homepage": site or repository}
    if site:
        urls["Documentation"] = site
    if repository:
        urls |= {
            "Source": repository,
            "Issues": f"{repository}/issues",
            "Changelog": f"{repository}/blob/main/CHANGELOG.md",
        }
    lines = [f'{name} = "{address}"\n' for name, address in urls.items() if address]
    section = "".join(["[project.urls]\n", *lines, "\n"]) if lines else ""
    before, start, after = text.partition("[project.scripts]\n")
    before = re.sub(r"\[project\.urls\]\n(?:\w+ = .*\n)*\n", "", before)
    return before + section + start + after


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("command", choices=["build", "links"])
    parser.add_argument("--out", type=Path, default=ROOT / "site", help="folder of the site")
    parser.add_argument("--model", default="bundled", help="model of the live page")
    options = parser.parse_args(arguments)
    if options.command == "links":
        lines = [f"{path.relative_to(ROOT)}: written" for path in write_links()]
        print("\n".join(lines) or "Nothing changed.")
    else:
        build(options.out.resolve(), options.model)


if __name__ == "__main__":
    main(sys.argv[1:])
