"""The site that `docs/website.py` builds, in Chromium, and the addresses that it writes into the book."""

import base64
import functools
import http.server
import io
import json
import re
import shutil
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from urllib.parse import unquote

import pytest
from axe_playwright_python.sync_playwright import Axe
from PIL import Image

from browser.fronts import MARKS

try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "docs"))
import website  # noqa: E402

BOOK, COLAB = (
    "https://example.github.io/vitlens",
    "https://colab.research.google.com/github/example/vitlens",
)
LIMIT = 1_500_000  # bytes of the front page before the live page is opened


def addressed(root: Path, repository: str, site: str) -> list[str]:
    """Names of the files that changed when these addresses were written into the book below `root`."""
    text = (root / "pyproject.toml").read_text()
    for name, address in (("repository", repository), ("site", site)):
        text = re.sub(rf'^{name} = "[^"]*"', f'{name} = "{address}"', text, flags=re.M)
    (root / "pyproject.toml").write_text(text)
    return sorted(path.name for path in website.write_links(root))


def test_write_links_fills_in_and_removes_addresses(tmp_path):
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "notebooks").mkdir()
    names = ["00_one.ipynb", "A_two.ipynb"]
    texts = {
        "00_one.ipynb": '{"cells": [{"source": ["import os; REPOSITORY = \\"\\"  # the address"]}]}\n',
        "A_two.ipynb": '{"cells": [{"source": "import os; REPOSITORY = \\"\\""}]}\n',
        "README.md": "| [0](00_one.ipynb) | 1 |\n- [A](A_two.ipynb), not [0](00_one.ipynb)\n\nSee [0](00_one.ipynb)\n",
    }
    for name, text in texts.items():
        (tmp_path / "notebooks" / name).write_text(text)
    readme = (tmp_path / "README.md").read_text()
    assert addressed(tmp_path, "", "") == []
    changed = addressed(tmp_path, "https://github.com/example/vitlens", BOOK)
    assert (
        changed == sorted([*names, "README.md", "README.md", "pyproject.toml"])
        and website.write_links(tmp_path) == []
    )
    for name in names:
        written = (tmp_path / "notebooks" / name).read_text()
        assert written == texts[name].replace('\\"\\"', '\\"https://github.com/example/vitlens\\"')
    index = (tmp_path / "notebooks/README.md").read_text().splitlines()
    badge = " [![Open in Colab](../docs/_static/colab.svg)](" + COLAB + "/blob/main/notebooks/{})"
    assert index[0] == f"| [0](00_one.ipynb){badge.format('00_one.ipynb')} | 1 |"
    assert index[1] == f"- [A](A_two.ipynb){badge.format('A_two.ipynb')}, not [0](00_one.ipynb)"
    assert index[3] == "See [0](00_one.ipynb)"
    assert f"]({BOOK})" in (tmp_path / "README.md").read_text().split("## ")[0]
    metadata = (tmp_path / "pyproject.toml").read_text()
    urls = tomllib.loads(metadata)["project"]["urls"]
    assert urls["Homepage"] == urls["Documentation"] == BOOK
    assert urls["Source"] == "https://github.com/example/vitlens"
    addressed(tmp_path, "https://codeberg.org/example/vitlens", BOOK)
    assert (tmp_path / "notebooks/README.md").read_text() == texts[
        "README.md"
    ]  # Colab opens GitHub only
    addressed(tmp_path, "", "")
    assert (tmp_path / "README.md").read_text() == readme
    assert (tmp_path / "pyproject.toml").read_text() == (ROOT / "pyproject.toml").read_text()
    assert all((tmp_path / "notebooks" / name).read_text() == text for name, text in texts.items())
    with pytest.raises(ValueError, match="https://… without a slash"):
        addressed(tmp_path, "https://github.com/example/vitlens/", "")


def test_addresses_are_written_into_the_book():
    """`make links` was called after the last change of pyproject.toml and of the chapters."""
    assert set(website.addresses()) == {"repository", "site"}
    repository, site = website.addresses().values()
    for path in website.chapters():
        assert f'REPOSITORY = \\"{repository}\\"' in path.read_text(), path.name
    assert bool(site) == ("![Read the book]" in (ROOT / "README.md").read_text())


def test_site_has_every_page_of_docs():
    assert {*website.DOCS} == {path.stem for path in (ROOT / "docs").glob("*.md")}


def test_notebook_offers_the_live_page_above_each_widget(tmp_path):
    still = {"data": {"text/html": ["<img alt='A map.' ", "src='data:,'>"], "text/plain": "A map."}}
    live, call = {"tags": ["live"]}, 'page = widgets.explore(model)\npage.set(view="norms")\npage'
    cells = [
        {
            "metadata": live | {"page": "view=rollout&layer=8"},
            "source": call,
            "outputs": [{"text": "1"}, still],
        },
        {"metadata": {"tags": ["opening"]}, "source": call, "outputs": [still]},
        {"metadata": live, "source": "widgets.training(snapshots)", "outputs": [still]},
        {"metadata": live, "source": [call], "outputs": [still]},
    ]
    (tmp_path / "a.ipynb").write_text(
        json.dumps({"metadata": {"language_info": {}}, "cells": cells})
    )
    changed = json.loads(website.notebook(tmp_path / "a.ipynb"))["cells"]
    shown = changed[0]["outputs"][1]["data"]["text/html"]
    assert "<img alt='A map.' src='data:,'>" in shown.partition("</button>")[2]
    assert (
        re.findall('(?:href|data-page)="(.*?)"', shown)
        == ["../live.html#view=rollout&amp;layer=8"] * 2
    )
    assert changed[0]["outputs"][0] == {"text": "1"} and changed[1:3] == cells[1:3]
    assert 'live.html#view=norms"' in changed[3]["outputs"][0]["data"]["text/html"]


def test_notebook_shows_drawings_with_alt_text(tmp_path):
    data = {"image/svg+xml": ["<svg>", "…"], "text/plain": "A, B."}
    cell = {"metadata": {}, "source": "", "outputs": [{"data": data}]}
    (tmp_path / "a.ipynb").write_text(
        json.dumps({"metadata": {"language_info": {}}, "cells": [cell]})
    )
    (changed,) = json.loads(website.notebook(tmp_path / "a.ipynb"))["cells"]
    shown = changed["outputs"][0]["data"]
    assert "image/svg+xml" not in shown
    assert unquote(shown["text/html"]) == '<img alt="A, B." src="data:image/svg+xml,<svg>…">'


@pytest.mark.parametrize("start", [BOOK + "/", "../"])
def test_page_has_tags_for_previews(start):
    page = "<html><head><title>Rollout &#8212; vitlens</title></head><body></head></body></html>"
    head, _, rest = website.with_preview(page, start).partition("</head>")
    tags = dict(re.findall(r'<meta property="og:(\w+)" content="([^"]+)">', head))
    assert tags["title"] == "Rollout &#8212; vitlens"
    assert "Vision Transformer" in tags["description"]
    assert tags["image"] == start + "_static/preview.jpg"
    assert rest == "<body></head></body></html>"


def test_preview_is_a_small_part_of_the_still_image(tmp_path):
    """Its upper square. A still image is 675 pixels wide."""
    still = Image.effect_noise((675, 944), 20).convert("RGB")
    still.paste((255, 0, 0), (0, 675, 675, 944))
    jpeg = io.BytesIO()
    still.save(jpeg, "JPEG", quality=75)
    source = base64.b64encode(jpeg.getvalue()).decode()
    page = f'<div class="opening"><p></p><img alt="A map." src="data:image/jpeg;base64,{source}"></div>'
    (tmp_path / "live.html").write_text(page)
    (tmp_path / "_static").mkdir()
    website.write_preview(tmp_path)
    preview = Image.open(tmp_path / website.PREVIEW)
    assert preview.size == (630, 630)
    red, green, _ = preview.crop((0, 600, 630, 620)).resize((1, 1)).getpixel((0, 0))
    assert abs(red - green) < 20, "the red part below was cut off"


def test_dead_links_names_each_dead_link(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "file.csv").touch()
    alive = '<a href="../b.html#here">b</a> <a href="../file.csv">c</a> <a href="https://arxiv.org/abs/2010.11929">d</a>'
    dead = ["../b.html#there", "b.html", "http://arxiv.org", "https://example.org/x", "../file.txt"]
    links = " ".join(f'<a href="{address}">x</a>' for address in dead)
    (tmp_path / "a/a.html").write_text(
        f'{alive} {links} <img src="data:image/png;base64,A"><div data-page="x.html#v">'
    )
    (tmp_path / "b.html").write_text('<h1 id="here">b</h1>')
    assert website.dead_links(tmp_path) == [
        f"a/a.html: {address}" for address in [*dead, "x.html#v"]
    ]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The address of the site, built without warnings of Sphinx and without dead links, and its folder."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, ROOT / "docs/website.py", "build", "--out", folder]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=folder)
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", folder
    server.shutdown()


@pytest.fixture(scope="module")
def visit(site, browser):
    """Visit a page of the site: the page, and every address that it requested with the size of the answer."""
    address, folder = site

    def visit(name: str, scheme: str = "light", width: int = 1440):
        page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
        page.set_default_timeout(60_000)
        requests = {}
        page.on("request", lambda request: requests.setdefault(request.url, 0))
        page.goto(f"{address}/{name}", wait_until="networkidle")
        for url in requests:
            file = folder / url.removeprefix(address).partition("?")[0].lstrip("/")
            requests[url] = file.stat().st_size if file.is_file() else 0
        return page, requests

    return visit


PAGES = ["index.html", "search.html?q=rollout", "docs/models.html", "data/README.html"]
PAGES += [f"notebooks/{website.chapters()[k].stem}.html" for k in (1, 3)]
PAGES += ["docs/reference.html", "reference/vitlens.html", "reference/vitlens.train.html"]
WIDE = """lines => lines.filter((each) => each.checkVisibility() && each.scrollWidth > each.clientWidth)
    .map((each) => each.innerText)"""


@MARKS
@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_pages_request_nothing_from_outside_and_are_accessible(site, visit, name):
    for scheme, width in (("light", 1440), ("dark", 1440), ("light", 390), ("dark", 390)):
        page, requests = visit(name, scheme, width)
        outside = [url for url in requests if not url.startswith((site[0], "data:"))]
        assert not outside, outside
        assert page.evaluate("document.documentElement.dataset.theme") == scheme
        page.emulate_media(
            reduced_motion="reduce"
        )  # colors that change slowly have low contrast on the way
        found = Axe().run(page).response["violations"]
        faults = [each for each in found if each["impact"] in ("serious", "critical")]
        assert not [
            f"{fault['id']}: {node['html'][:200]} {node['failureSummary']}"
            for fault in faults
            for node in fault["nodes"]
        ]
        assert "<!--" not in page.inner_text("main")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert width < 1440 or not page.locator("article pre").evaluate_all(WIDE), (
            "lines of code have 120 characters"
        )
        alts = page.locator("article img").evaluate_all(
            "images => images.map((each) => each.getAttribute('alt'))"
        )
        assert not [alt for alt in alts if alt is None or alt.endswith((".svg", ".png"))]
        page.close()


@MARKS
@pytest.mark.slow
def test_front_page_is_small_until_the_live_page_is_opened(site, visit):
    page, requests = visit("index.html")
    assert site[0] + "/live.html" not in requests
    chapters = page.locator(".chapters a").evaluate_all("links => links.map(({href}) => href)")
    assert chapters == [f"{site[0]}/notebooks/{path.stem}.html" for path in website.chapters()]
    preview = page.locator("meta[property='og:image']").get_attribute("content")
    assert 10_000 < (site[1] / preview).stat().st_size <= 60_000
    total = sum(requests.values())
    assert 100_000 < total < LIMIT, f"{total:,} bytes"
    page.locator(".live button").click()
    live = page.frame_locator(".live iframe")
    live.locator("img, canvas").first.wait_for()
    page.close()


@MARKS
@pytest.mark.slow
def test_live_page_opens_in_the_view_and_the_colors_of_the_cell(visit):
    page, _ = visit("notebooks/06_rollout.html")
    assert page.locator(".live").get_attribute("data-page").startswith("../live.html#view=rollout")
    page.evaluate("document.documentElement.dataset.theme = 'dark'")
    page.locator(".live button").click()
    live = page.frame_locator(".live iframe")
    live.get_by_text("Rollout from the query").first.wait_for()
    color = "element => getComputedStyle(element).color"
    assert live.locator("body").evaluate(color) == "rgb(255, 255, 255)"
    page.evaluate("document.documentElement.dataset.theme = 'light'")
    assert live.locator("body").evaluate(color) == "rgb(0, 0, 0)"
    page.close()


@MARKS
@pytest.mark.slow
def test_a_tap_enlarges_a_figure_on_a_narrow_screen(visit):
    page, _ = visit("notebooks/03_looking_at_attention.html", width=390)
    figure = page.locator(".cell_output img").first
    widths = []
    for _ in range(3):
        widths.append(figure.bounding_box()["width"])
        figure.click()
    assert widths[0] == widths[2] < 390 and widths[1] > 850
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.close()


@MARKS
@pytest.mark.slow
def test_search_finds_chapters_and_docs(visit):
    for word, found in (
        ("registers", "docs/"),
        ("registers", "10_sinks"),
        ("softmax", "01_what"),
        ("rollout", "06_"),
    ):
        page, _ = visit(f"search.html?q={word}")
        page.locator(f"#search-results li a[href*='{found}']").first.wait_for()
        page.locator("#search-results .context").first.wait_for()
        assert "System Settings" not in page.inner_text("#search-results")
        page.close()


SEARCHES = {
    "attention distance": "plot.attention_distance |attention.mean_distance |04_how_far_heads_look",
    "grad cam": "attribution.grad_cam ",
    "rollout": "attention.rollout |06_rollout",
    "own images": "12_your_own_images",
    "head importance": "09_which_heads_matter|docs/intervening",
    "position embeddings": "reference/vitlens.positions.html |B_resizing_positions|05_what_the_first",
    "checkpoint": "docs/models.html#checkpoints",
    "fine-tune": "12_your_own_images.html#second-fine-tune|docs/training",
    "attention sink": "10_sinks_and_registers",
    "logit lens": "stream.lens |docs/intervening",
    # words of the package, in the order of a question
    "load model": "vitlens.load_model ",
    "switch off a head": "vitlens.intervene |docs/intervening",
    "attribution map": "reference/vitlens.attribution.html |docs/explaining",
    "few-shot": "few_shot ",
}
"""Pages and names that a stranger looks for, by the words of the search. A space ends an address."""


@MARKS
@pytest.mark.slow
def test_first_result_of_a_search_is_the_page_for_it(visit):
    wrong = {}
    for words, right in SEARCHES.items():
        page, _ = visit(f"search.html?q={words}")
        first = page.locator("#search-results ul.search > li a").first
        first.wait_for()
        address = re.sub(r"\?highlight=[^#]*", "", first.get_attribute("href")) + " "
        if not re.search(right.replace(".", r"\."), address):
            wrong[words] = address
        page.close()
    assert len(wrong) <= len(SEARCHES) // 10, wrong


@MARKS
@pytest.mark.slow
def test_reference_has_each_name_once_and_links_to_it(site):
    import reference

    anchors = Counter()
    for path in site[1].glob("reference/*.html"):
        anchors.update(re.findall(r'<dt class="sig[^>]* id="([^"]+)"', path.read_text()))
    assert set(anchors.values()) == {1}
    assert {*reference.places().values()} <= {*anchors}
    text = (site[1] / "reference/vitlens.attention.html").read_text()
    for link in (
        "https://docs.python.org/3/library/stdtypes.html#tuple",
        "vitlens.recorder.html#vitlens.recorder.Attention",
        "#vitlens.attention.Summary",
    ):
        assert f'href="{link}"' in text
    assert re.search(r'class="highlight-pycon.*?<span class="go">torch.Size', text, re.S)
    assert "Tensor" in text and "pytorch.org" not in text and "[source]" not in text
    for page in ("docs/intervening.html", "docs/paper.html", "notebooks/A_capture.html"):
        assert '="../reference/vitlens' in (site[1] / page).read_text(), page
