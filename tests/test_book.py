"""The chapters of the book run, offline and on a CPU, and keep the form that makes them pleasant to read."""

import base64
import copy
import functools
import io
import json
import re
import runpy
from html.parser import HTMLParser
from pathlib import Path

import book as chapters
import claims
import nbformat
import numpy as np
import pytest
import timm
import torch
from nbclient import NotebookClient
from nbconvert import HTMLExporter
from notebook_cells import fresh_processes, run
from PIL import Image
from support import vit_of_transformers
from timm.models import save_for_hf

from vitlens import UnsupportedModelError, load_model, positions, train
from vitlens.plot import alt_text
from vitlens_explorer.outputs import hidden_by
from vitlens_paper.evaluate import compute

FOLDER = Path(__file__).parent.parent / "notebooks"
CHAPTERS = claims.chapters()
INDEX = FOLDER / "README.md"
DAILY = ("00",)
"""Chapters that run in `make test`; `make test-all` runs all of them."""

each_chapter = pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
run_chapters = pytest.mark.parametrize(
    "path",
    [
        pytest.param(p, marks=() if p.name[:2] in DAILY else pytest.mark.slow, id=p.stem)
        for p in CHAPTERS
    ],
)


@functools.cache
def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def sources(path: Path, kind: str) -> list[str]:
    return [cell.source for cell in read(path).cells if cell.cell_type == kind]


def outputs(path: Path) -> list[nbformat.NotebookNode]:
    return [output for cell in read(path).cells for output in cell.get("outputs", [])]


@functools.cache
def script(name: str):
    """A name of notebooks/execute.py."""
    return runpy.run_path(str(FOLDER / "execute.py"))[name]


def pictures(path: Path) -> list[bytes]:
    return list(script("pictures")(read(path).cells))


def saved(folder: Path, name: str, **arguments) -> Path:
    torch.manual_seed(0)
    save_for_hf(
        timm.create_model(name, **arguments), folder, model_args=arguments, safe_serialization=True
    )
    return folder


def code(path: Path, **own) -> list[str]:
    return [
        cell.source
        for cell in script("prepared")(path, tiny=True, **own).cells
        if cell.cell_type == "code"
    ]


@pytest.fixture(scope="module")
def processes():
    with pytest.MonkeyPatch.context() as patch, fresh_processes() as pool:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield pool


@run_chapters
def test_chapters_and_answers_run_offline(path, processes):
    cells = code(path) + script("answers")(script("prepared")(path, tiny=True))
    assert processes.apply(run, (cells, FOLDER)) == [], "nothing goes to stderr"


def with_registers(folder: Path) -> None:
    saved(folder, "vit_small_patch14_reg4_dinov2", img_size=112, num_classes=10)


def of_chapter_2b(folder: Path) -> None:
    """The model that chapter 2b trains on a CPU, before its first step."""
    smaller = ["width=96", "heads=3", "depth=6", "image_size=64", "resize=0", "num_classes=20"]
    settings = train.recipe("photos-t4").override(*smaller)
    train.export(settings.build(), folder, settings, [f"class {k}" for k in range(20)])


@pytest.mark.slow
@each_chapter
@pytest.mark.parametrize("write", [with_registers, of_chapter_2b])
def test_chapters_run_with_own_model_and_image(path, write, processes, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / write.__name__
    if not folder.exists():
        write(folder)
        noise = np.random.default_rng(0).integers(0, 255, (12, 16, 3), np.uint8)
        Image.fromarray(noise).resize((640, 480), Image.Resampling.BICUBIC).save(
            folder / "my photo.jpg"
        )
    cells = code(path, model=str(folder), images=[folder / "my photo.jpg"])
    assert "my photo.jpg" in "".join(cells) and str(folder) in "".join(cells)
    assert processes.apply(run, (cells, FOLDER)) == []


DAILY_TRANSFORMERS = ("00", "01")
REFUSES_TRANSFORMERS = ("01", "12", "B_")


@pytest.fixture(scope="module")
def transformers_folder(tmp_path_factory):
    """A folder of `save_pretrained` with random weights and a photo beside it."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("transformers") / "saved"
    vit_of_transformers(image_size=112, patch_size=16, layers=4).save_pretrained(folder)
    processor = transformers.ViTImageProcessor(size={"height": 112, "width": 112})
    processor.save_pretrained(folder)
    noise = np.random.default_rng(0).integers(0, 255, (12, 16, 3), np.uint8)
    photo = Image.fromarray(noise).resize((640, 480), Image.Resampling.BICUBIC)
    photo.save(folder / "my photo.jpg")
    return folder


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(
            path,
            marks=() if path.name[:2] in DAILY_TRANSFORMERS else pytest.mark.slow,
            id=path.stem,
        )
        for path in CHAPTERS
    ],
)
def test_chapters_run_with_a_transformers_folder_or_refuse_it_at_once(
    path, processes, transformers_folder
):
    folder = transformers_folder
    cells = code(path, model=str(folder), images=[folder / "my photo.jpg"])
    number = path.stem.split("_")[0].lstrip("0") or "0"
    if path.name[:2] in REFUSES_TRANSFORMERS:
        words = rf"^Chapter {number} .*, got saved \(ViTForImageClassification\)\. Set MODEL to "
        setup_and_subject = cells[:2]
        with pytest.raises(UnsupportedModelError, match=words):
            processes.apply(run, (setup_and_subject, FOLDER))
        return
    lines = processes.apply(run, (cells, FOLDER))
    others = [line for line in lines if line.strip() and "Loading weights" not in line]
    assert others == [], "only the progress bar of transformers goes to stderr"


@pytest.mark.parametrize(
    ("name", "arguments", "refused"),
    [
        ("vit_tiny_patch16_224", {}, []),
        ("vit_small_patch14_reg4_dinov2", {"num_classes": 10}, []),
        ("vit_tiny_patch16_224", {"num_classes": 0}, ["0", "1", "6", "7", "8", "9", "10", "15"]),
        ("vit_base_patch16_clip_quickgelu_224", {"num_classes": 10}, ["1"]),
        ("vit_base_patch16_siglip_224", {"num_classes": 10}, ["1"]),
        ("beit_base_patch16_224", {}, ["1", "5", "B"]),
        ("vit_base_patch16_xp_224", {}, ["1"]),
        ("vit_base_resnet26d_224", {}, ["1"]),
    ],
)
def test_require_parts_refuses_models_that_lack_a_part(name, arguments, refused):
    model = timm.create_model(name, depth=1, **arguments).eval()
    for chapter in chapters.NEEDS:
        if chapter not in refused:
            chapters.require_parts(model, chapter)
            continue
        with pytest.raises(
            UnsupportedModelError, match=rf"^Chapter {chapter} .*got .*Set MODEL to"
        ):
            chapters.require_parts(model, chapter)


def test_every_chapter_with_needs_requires_them_in_its_second_cell():
    for path in CHAPTERS:
        number = path.stem.split("_")[0].lstrip("0") or "0"
        subject = sources(path, "code")[1]
        assert (f'require_parts(model, "{number}")' in subject) == (
            number in chapters.NEEDS and number != "11"
        )
        assert ('require_parts(load_model(MODEL), "11")' in subject) == (number == "11")


def test_affordable_cuts_rounds_to_the_limit_and_prints_the_cost(monkeypatch, capsys):
    model = timm.create_model("test_vit", num_classes=3).eval()
    images = torch.zeros(2, 3, 160, 160)
    operations = compute.flops(model, (160, 160))
    assert 0 < chapters._seconds_of_a_forward(model, images[:1]) < 60
    monkeypatch.setattr(chapters, "_seconds_of_a_forward", lambda *_: 0.3)
    monkeypatch.setattr(chapters, "UNANNOUNCED", 400 * operations)
    monkeypatch.setattr(chapters, "LIMIT", 1000 * operations)

    def affordable(forwards: int) -> tuple[int, str]:
        return chapters.affordable(model, images, 4, forwards, "draws"), capsys.readouterr().out

    assert affordable(100) == (4, "")
    assert affordable(200) == (4, "800 forwards of one image, about 4.0 minutes here.\n")
    cut = "because all of them take too long"
    two = f"2 of 4 draws, {cut}: 1,000 forwards of one image, about 5.0 minutes here.\n"
    one = f"1 of 4 draws, {cut}: 9,000 forwards of one image, about 45.0 minutes here.\n"
    assert affordable(500) == (2, two)
    assert affordable(9000) == (1, one)


@each_chapter
def test_chapters_have_the_form_of_the_book(path):
    cells = read(path).cells
    number = path.stem.split("_")[0]
    title, setup, subject = cells[:3]
    assert [cell.id for cell in cells[:3]] == ["title", "setup", "subject"] and cells[
        -1
    ].id == "next"
    assert len({cell.id for cell in cells}) == len(cells)
    assert title.source.startswith(f"# {number.lstrip('0') or '0'} · ")
    (opening,) = re.findall(rf"^!\[([^\]]+)\]\((pictures/{path.stem}\.\w+)\)", title.source, re.M)
    assert len(opening[0]) > 20 and 0 < (FOLDER / opening[1]).stat().st_size <= 130_000
    assert len(title.source.split("\n\n")) <= 5
    address = re.search('REPOSITORY = (".*?")', setup.source)[1]
    assert setup.source == script("SETUP").replace('""', address, 1)
    assert setup.metadata == script("FOLDED")
    assert re.search(r"^MODEL = ", subject.source, re.M) and re.search(
        r"^IMAGES = None", subject.source, re.M
    )
    prose = "\n".join(sources(path, "markdown"))
    assert number == "D" or "## What we saw" in prose
    tasks = re.findall("^### Exercise ", prose, re.M)
    answers = script("answers")(read(path))
    assert len(tasks) == len(answers) >= (1 if number.isalpha() else 3)
    for answer in answers:
        assert re.search(r"^assert .", answer, re.M)
    for source in sources(path, "code")[1:]:
        assert len(source.splitlines()) <= 14 and max(map(len, source.splitlines())) <= 120
        assert not re.search(r"TINY|VITLENS|try:", source)


def tries(path: Path) -> dict[str, nbformat.NotebookNode]:
    """The cells for the answers of readers, by the number of the exercise."""
    return {cell.id[4:]: cell for cell in read(path).cells if cell.id.startswith("try-")}


@pytest.mark.parametrize(
    "path", [path for path in CHAPTERS if tries(path)], ids=lambda path: path.stem
)
def test_exercises_have_minutes_a_cell_a_hint_and_an_answer(path):
    cells = {cell.id: cell for cell in read(path).cells}
    order = list(cells)
    chapter = path.stem.split("_")[0].lstrip("0") or "0"
    for number, cell in tries(path).items():
        task, answer = cells[f"exercise-{number}"], cells[f"answer-{number}"]
        place = order.index(cell.id)
        assert order[place - 1 : place + 2] == [task.id, cell.id, answer.id]
        title = rf"^### Exercise {chapter}\.{number} ★{{1,3}} · \d+ minutes?$"
        assert re.search(title, task.source, re.M)
        assert re.findall("<summary>(.*?)</summary>", answer.source) == ["Hint", "Answer"]
        given = re.findall(r"^# (assert .+)", cell.source, re.M)
        assert given and all(each in answer.source for each in given), "the answer passes it"
        assert not re.search("^assert", cell.source, re.M), "the cell runs without an answer"
    assert "### An open study" in "\n".join(sources(path, "markdown"))


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("", "write the address of your copy of vitlens between the quotes of REPOSITORY"),
        ("nowhere", "git clone nowhere failed. Check the address."),
    ],
)
def test_first_cell_on_colab_says_what_is_missing(address, words, tmp_path, monkeypatch):
    monkeypatch.setenv("COLAB_RELEASE_TAG", "1")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.chdir(tmp_path)
    cell = script("SETUP").replace('""', repr(address), 1)
    with pytest.raises(AssertionError, match=words):
        exec(cell, {})
    for path in CHAPTERS:
        assert "On Colab, write the address" in read(path).cells[0].source


@each_chapter
def test_chapters_show_images_with_alt_text(path):
    html, _ = HTMLExporter().from_notebook_node(read(path))
    drawn = [
        image for image in images(html) if not image["src"].startswith("data:image/svg")
    ]  # SVG has its own title
    shown = [image for image in drawn if image["src"].startswith("data:")]
    assert len(shown) >= len(pictures(path)) > 0
    for image in drawn:
        assert (
            len(image["alt"] or "") > 20 and "No description has been provided" not in image["alt"]
        )
    assert len({image["alt"] for image in shown}) == len(shown), (
        "each image has a description of its own"
    )
    for cell in read(path).cells:
        data = [output.get("data", {}) for output in cell.get("outputs", [])]
        for svg in (each for each in data if "image/svg+xml" in each):
            assert "<title>" in svg["image/svg+xml"] and len(svg["text/plain"]) > 20
        live = "live" in cell.metadata.get("tags", [])
        assert not any(
            "image/jpeg" in each or "image/png" in each for each in data[: -1 if live else None]
        )
        if live:
            assert data[-1]["text/html"].startswith("<img alt="), "a still image of the widget"
            assert Image.open(io.BytesIO(base64.b64decode(data[-1]["image/png"]))).format == "PNG"


@each_chapter
def test_chapter_outputs_are_clean(path):
    assert path.stat().st_size <= 1_500_000
    code = [cell for cell in read(path).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), (
        "run `make notebooks`"
    )
    for output in outputs(path):
        assert output.output_type != "error" and output.get("name") != "stderr"
        data = output.get("data", {})
        text = output.get("text", "") + "".join(v for k, v in data.items() if k.startswith("text/"))
        assert not re.search(r"\b0x[0-9a-f]{6,}", text), (
            f"an address in memory changes with each run: {text}"
        )
        assert not re.search(r"/(home|root|work|tmp|Users|site-packages)/", text), (
            f"a path of one machine: {text}"
        )
        assert not any("widget" in kind for kind in data)
    html = "".join(output.get("data", {}).get("text/html", "") for output in outputs(path))
    widths = [int(image["width"]) for image in images(html)]
    for width, file in zip(widths, pictures(path), strict=True):
        figure = Image.open(io.BytesIO(file))
        assert width <= 1000 and figure.width / width in (1, 1.5, 2)
    assert len([cell for cell in code if "opening" in cell.metadata.get("tags", [])]) == 1


@each_chapter
def test_results_in_prose_are_printed_or_cited(path):
    assert list(claims.problems(path)) == []


def test_claims_report_numbers_that_no_cell_prints(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "FOLDER", tmp_path)
    cell = nbformat.v4.new_code_cell("print()", id="loss")
    cell.outputs = [
        nbformat.v4.new_output("stream", name="stdout", text="loss 0.6549 at step 1860\n")
    ]

    def reported(prose: str) -> list[str]:
        book = nbformat.v4.new_notebook(cells=[cell, nbformat.v4.new_markdown_cell(prose)])
        nbformat.write(book, tmp_path / "04_test.ipynb")
        return [
            problem.split("…” ")[-1].split("…”: ")[-1]
            for problem in claims.problems(tmp_path / "04_test.ipynb")
        ]

    assert reported("The loss is 0.65 at step 1,860, 65 to 66 % of it. <!-- 4:loss -->") == [
        "66% not in its cells"
    ]
    assert reported("The loss is 0.65 at step 1,860, 65 % of it. <!-- 4:loss -->") == []
    assert (
        reported("16 × 16 patches, Section 4.5, head 5.1, `0.3`, $0.4$, 12 layers.\n\n## 0.5") == []
    )
    assert reported("- It is 2.5.\n- It is 3 times as large.") == [
        "2.5 has no reference",
        "3 has no reference",
    ]
    assert reported("It is 0.7 [A 2021](D_reference.ipynb#a2021).") == []
    assert reported("It is 0.66. <!-- 4:loss -->") == ["0.66 not in its cells"]
    assert reported("It is 0.65. <!-- 4:lost -->")[0] == "the cell 4:lost does not exist"


def images(html: str) -> list[dict[str, str | None]]:
    """Attributes of the images of a page."""
    found = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: (
        found.append(dict(attributes)) if tag == "img" else None
    )
    parser.feed(html)
    return found


def links(text: str) -> list[str]:
    """Targets of links and images in the repository, with anchors."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    targets = re.findall(r"\]\(([^)]+)\)|(?:src|href)=\"([^\"]+)\"", text)
    return [t for t in map("".join, targets) if "://" not in t]


def test_notebooks_store_stills_without_live_widgets():
    Image.new("RGB", (9, 8), "red").save(file := io.BytesIO(), "PNG")
    Image.new("RGB", (9, 8), "red").save(still := io.BytesIO(), "JPEG")
    live = {"application/vnd.jupyter.widget-view+json": {"model_id": "1"}}
    outputs = [
        live | {"text/plain": "VBox()"},
        hidden_by("name", alt_text.bundle(file.getvalue(), "A red still.", 6, still.getvalue())),
        live,
        alt_text.bundle(file.getvalue(), "9 × 8 pixels", 4),
    ]
    outputs = [nbformat.v4.new_output("display_data", data) for data in outputs]
    book = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell("training(run)", outputs=outputs)]
    )
    book.metadata.widgets = {"state": {}}
    book = script("normalized")(book)
    kept, figure = (output.data for output in book.cells[0].outputs)
    assert "widgets" not in book.metadata
    png = Image.open(io.BytesIO(base64.b64decode(kept.pop("image/png"))))
    assert png.size == (5, 4), "half of the still"
    assert png.convert("RGB").getpixel((2, 2))[0] > 240
    assert kept == {
        "text/html": alt_text.image(still.getvalue(), "A red still.", 6),
        "text/plain": "A red still.",
    }
    assert (
        list(figure) == ["text/html", "text/plain"]
        and 'alt="9 × 8 pixels" width="5"' in figure["text/html"]
    )
    (_, padded) = script("pictures")(book.cells)
    assert Image.open(io.BytesIO(padded)).size == (10, 8)
    book.cells[0].metadata.alt = "A <red> square."
    data = script("normalized")(book).cells[0].outputs[1].data
    assert data["text/html"].startswith('<img alt="A &lt;red&gt; square." width="5"')
    assert data["text/plain"] == "A <red> square."


def test_figures_have_alt_text_in_notebooks(tmp_path):
    cells = [
        "import matplotlib.pyplot as plt\nfrom vitlens import overlay, plot\nimport numpy as np",
        "plot.tiles({'ramp': np.arange(6).reshape(2, 3)})",  # the value of the cell
        "plt.plot([3, 1, 2], label='loss')\nplt.title('By hand');",  # shown at its end
        "overlay(np.zeros((4, 4, 3), np.uint8), np.eye(2), grid=plot.on_images.TokenGrid(2, 2, (2, 2)));",
        "%config InlineBackend.figure_format = 'png'",
        "fig = plot.tiles({'ramp': np.arange(6).reshape(2, 3)})\nfig.set_label('A \"ramp\".')\nfig",
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(
        book, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    data = [output.data for cell in book.cells for output in cell.outputs]
    ramp = "Ramp. map of 2 × 3 values from 0 to 5, the largest in row 1, column 2."
    identity = "Map of 2 × 2 values from 0 to 1, the largest in row 0, column 0, over an image."
    for each, alt in zip(
        data, [ramp, "By hand. loss from 3 to 2.", identity, 'A "ramp".'], strict=True
    ):
        png = base64.b64decode(each["image/png"])
        (shown,) = images(each["text/html"])
        assert shown["alt"] == each["text/plain"] == alt
        assert base64.b64decode(shown["src"].removeprefix("data:image/png;base64,")) == png
        assert Image.open(io.BytesIO(png)).width == int(shown["width"])


def test_links_between_chapters_exist():
    index = links(INDEX.read_text(encoding="utf-8"))
    anchors = {
        p.name: set(re.findall(r'<a (?:id|name)="([^"]+)"', "\n".join(sources(p, "markdown"))))
        for p in CHAPTERS
    }
    pages = {p.name: links("\n".join(sources(p, "markdown"))) for p in CHAPTERS}
    for name, targets in (pages | {"README.md": index}).items():
        for target in targets:
            file, _, anchor = target.partition("#")
            assert (FOLDER / file).exists(), f"{name}: {target} does not exist"
            assert not anchor or file not in anchors or anchor in anchors[file], (
                f"{name}: no anchor {target}"
            )
    for path, following in zip(CHAPTERS, CHAPTERS[1:], strict=False):
        assert following.name in sources(path, "markdown")[-1], (
            "the last cell links to the next chapter"
        )
    assert {path.name for path in CHAPTERS} <= set(index)


@pytest.mark.slow
def test_execute_writes_figures_of_own_model_and_image(tmp_path):
    small = dict(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, num_classes=10)
    model, out = (
        saved(tmp_path / "small", "vit_tiny_patch16_224", **small),
        tmp_path / "new" / "figures",
    )
    Image.new("RGB", (60, 40), "red").save(tmp_path / "own.png")
    before = {p: p.read_bytes() for p in FOLDER.glob("**/*.*[bdg]")}
    own = ["--model", str(model), "--images", str(tmp_path / "own.png"), "--figures", str(out)]
    assert script("main")(["05", *own]) == 0
    assert {p: p.read_bytes() for p in FOLDER.glob("**/*.*[bdg]")} == before and len(before) > len(
        CHAPTERS
    )
    (path,) = FOLDER.glob("05_*.ipynb")
    names = [f"05-{n}" for n in range(1, len(pictures(path)) + 1)]
    assert {p.stem for p in out.iterdir()} == {*names, "summary"}
    assert not {file.read_bytes() for file in out.glob("05-*")} & {*pictures(path)}, (
        "figures of the chapter's model"
    )
    text = (out / "summary.json").read_text(encoding="utf-8")
    summary = json.loads(text)
    command = "python notebooks/execute.py 05 --model small --images own.png --figures DIR"
    assert summary["command"] == command and str(tmp_path) not in text
    assert summary["model"] == "small" and (summary["layers"], summary["heads"]) == (2, 3)
    rank = positions.rank_correlation(positions.similarity(load_model(model)))
    assert summary["position_rank_correlation"] == pytest.approx(rank)


def test_normalized_allows_notes_of_own_models_only():
    cell = nbformat.v4.new_code_cell("model")
    cell.outputs = [nbformat.v4.new_output("stream", name="stderr", text="no image processor")]
    book = nbformat.v4.new_notebook(cells=[cell])
    with pytest.raises(RuntimeError, match="Cell 1 writes to stderr: no image processor"):
        script("normalized")(copy.deepcopy(book))
    assert script("normalized")(book, keeps_notes=True).cells[0].outputs == cell.outputs


def test_execute_rejects_unsupported_models(tmp_path):
    small = dict(embed_dim=24, depths=(1, 1, 1, 1), num_heads=(1, 2, 2, 2))
    swin, out = (
        saved(tmp_path / "swin", "swin_tiny_patch4_window7_224", **small),
        tmp_path / "figures",
    )
    with pytest.raises(SystemExit, match="stays inside windows of the image") as refusal:
        script("main")(["05", "--model", str(swin), "--figures", str(out)])
    assert "\n" not in refusal.value.code and not out.exists()
