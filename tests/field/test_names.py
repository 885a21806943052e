"""File, class and model names of any bytes, length and script, at every door that writes or draws them."""

import csv
import html
import io
import json
import os
import re
import unicodedata
import zipfile

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from forms import cannot_occur, form
from PIL import Image
from support import encoded, parquet, saved_model, vitlens, write

from vitlens import files, plot, report, texts
from vitlens.data import load
from vitlens.models import load_model
from vitlens.plot import glyphs
from vitlens.recorder.grid import TokenGrid
from vitlens.texts import encode, file_name, shown, visible
from vitlens_explorer import drawing, in_page
from vitlens_explorer.saving import file_stem
from vitlens_paper.evaluate import Record, read_results
from vitlens_paper.evaluate import write as write_records
from vitlens_paper.evaluate.protocols import _directory_name

BYTES = os.fsdecode(b"caf\xe9.png")
NAMES = [
    BYTES,
    "猫" * 83 + ".png",
    "a\nb\tc.png",
    "\x1b[31mred.png",
    "$x^2$_{i}.png",
    "%s {} {0}.png",
    "back\\slash'\"quote.png",
    "<script>alert(1)</script>".replace("/", "∕") + "&amp;.png",
    "=1+1,b.png",
    "-rf.png",
    "aux.png",
    "🦊 кошка قط חתול.png",
    "\u202egnp.cat.png",
    "zero\u200bwidth.png",
    unicodedata.normalize("NFD", "café.png"),
    unicodedata.normalize("NFC", "café.png"),
    "nan.png",
    "1e5.png",
    "٣².png",
    "trailing. .png",
]


FEW = [NAMES[k] for k in (0, 1, 2, 3, 4, 8, 14, 15)]
"""Names in the folder of the tests of commands."""


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return saved_model(tmp_path_factory.mktemp("model"), num_classes=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("names")
    for i, name in enumerate(FEW):
        (root / name).write_bytes(encoded(i, size=(32, 32)))
    return root


@pytest.fixture
def no_warnings(recwarn):
    yield
    glyph = [str(w.message) for w in recwarn if "lyph" in str(w.message)]
    assert not glyph


@pytest.mark.slow
@form(
    7,
    door="command: explain --scores, image folder",
    case="eight names: bytes, 249 bytes long, control characters, formulas, markup, NFC and NFD",
    right="csv's own parser: the exact names, except that bytes are escapes",
)
def test_explain_writes_a_figure_for_every_name(
    model_folder, folder, tmp_path, no_warnings, monkeypatch
):
    out = tmp_path / "out"
    monkeypatch.setattr(report, "STEPS", 2)
    options = "--methods", "rollout", "--scores", "--orders", 0
    done = vitlens("explain", model_folder, folder, *options, "--out", out)
    figures = sorted(out.glob("*.png"))
    assert len(figures) == len(FEW)
    assert all(len(os.fsencode(figure.name)) <= 200 for figure in figures)
    rows = list(csv.DictReader(io.StringIO((out / "scores.csv").read_bytes().decode(), newline="")))
    expected = {"caf\\udce9.png" if name == BYTES else name for name in FEW}
    assert {row["image"] for row in rows} == expected
    assert "\x1b" not in done.stdout + done.stderr
    table = pd.read_csv(out / "scores.csv", keep_default_na=False)
    assert set(table["image"]) == expected


@pytest.mark.slow
@form(
    7,
    door="command: inspect --heads, image folder",
    case="the same names",
    right="json's own parser: the exact names, also bytes",
)
def test_inspect_keeps_every_name(model_folder, folder, tmp_path, no_warnings):
    out = tmp_path / "out"
    done = vitlens("inspect", model_folder, folder, "--heads", "--out", out)
    summary = json.loads((out / "summary.json").read_text("utf-8"))
    assert sorted(entry["image"] for entry in summary["images"]) == sorted(FEW)
    heads = csv.DictReader(io.StringIO((out / "heads.csv").read_bytes().decode(), newline=""))
    assert len({row["image"] for row in heads}) == len(FEW)
    assert "\x1b" not in done.stdout + done.stderr


@form(
    7,
    door="command: page, image folder",
    case="bytes and markup",
    right="html's own parser and the message of the page",
)
def test_page_is_utf_8_and_escapes_names(model_folder, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(
        in_page, "_content", lambda *_: {"model": "<b>m", "hash": "0", "versions": ""}
    )
    out = tmp_path / "page.html"
    vitlens("page", model_folder, folder, "--out", out)
    text = out.read_bytes().decode()
    title = re.search("<title>(.*?)</title>", text, re.DOTALL)[1]
    assert "<" not in title and "caf\\xe9.png" in title and "\n" not in title
    for name in FEW:
        assert shown(name) in html.unescape(title)


@form(
    7,
    door="Python: data.load and train, class folders",
    case="class names of bytes, formulas, CJK, commas, digits of other scripts",
    right="os.listdir",
)
def test_training_keeps_class_names(tmp_path, no_warnings):
    names = [os.fsdecode(b"caf\xe9"), "$a$ $b$", "猫, cat", "٣", "nan", "_private", "<b>"]
    content = {f"{name}/{i}.png": encoded(i, size=(8, 8)) for name in names for i in range(3)}
    data = write(tmp_path / "data", content)
    split = load(data, "valid", size=8)
    assert sorted(split.class_names) == sorted(os.listdir(data))
    run = tmp_path / "run"
    vitlens(
        *("train", "--recipe", "digits", "--tiny", "--device", "cpu", "--watch", 2),
        *("--set", "epochs=1", "--set", "batch_size=4", "--data", data, "--out", run),
    )
    model = load_model(str(run / "model"))
    assert list(model.pretrained_cfg["label_names"]) == sorted(names)
    vitlens("inspect", run / "model", "--out", tmp_path / "figures")
    vitlens("explain", run / "model", "--methods", "rollout", "--out", tmp_path / "maps")


@form(
    7,
    door="Python: data.load, train and val folders",
    case="a class called café in NFC in train and in NFD in val",
    right="count by hand: one class",
)
def test_class_names_are_compared_in_one_unicode_form(tmp_path):
    composed, decomposed = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))
    image = encoded(0)
    write(tmp_path, {f"train/{composed}/0.png": image, f"val/{decomposed}/0.png": image})
    for split in ("train", "valid"):
        assert load(tmp_path, split, size=8).class_names == (composed,)
    write(tmp_path, {f"train/{decomposed}/1.png": image})
    with pytest.raises(ValueError, match="two folders whose names look the same"):
        load(tmp_path, "train", size=8)


@form(
    7,
    door="Python: plot functions, names of models and classes",
    case="names with underscore, dollars, CJK, control characters and bytes",
    right="Matplotlib's own legend and texts",
)
def test_figures_draw_all_names_as_they_are(capsys, no_warnings, monkeypatch):
    monkeypatch.setattr(glyphs, "_announced", [])
    table = pd.DataFrame({"_mine": [1.0, 2.0], "$x$ $y$": [2.0, 3.0], "猫\x1b": [3.0, 4.0]})
    figure = plot.lines(table, xlabel=os.fsdecode(b"caf\xe9"), log="x")
    plot.style.png(figure)
    plot.style.png(plot.lines(table))
    (ax,) = figure.axes
    drawn = [text.get_text().strip() for text in ax.texts]
    letters = glyphs.drawable("猫")
    assert sorted(drawn) == sorted(["_mine", "$x$ $y$", f"{letters}\\x1b"])
    assert ax.get_xlabel() == "caf\\xe9" and not any(t.get_parse_math() for t in ax.texts)
    if letters == "□":
        assert capsys.readouterr().err.count("installed fonts lack") == 1


ODD = [os.fsdecode(b"caf\xe9"), "猫\x1b", "$x_1$ $\\bad{", "w" * 400]


@form(
    7,
    door="Python: plot functions, labels of ticks",
    case="bytes, CJK, dollars and 400 letters, also in axes of the caller",
    right="the texts that Matplotlib draws",
)
@pytest.mark.filterwarnings("ignore:Glyph")
@pytest.mark.parametrize("own", [True, False])
def test_ticks_have_names_as_they_are(own):
    ax = None if own else plt.figure().add_subplot()
    numbers = dict.fromkeys(ODD, 0.1)
    result = plot.intervals(numbers, numbers, points={name: [0.1] for name in ODD}, ax=ax)
    figure = result if own else result.figure
    plot.style.png(figure)
    labels = [tick.get_text() for tick in figure.axes[0].get_yticklabels()]
    long = f"{30 * 'w'}…{30 * 'w'}" if own else ODD[3]
    letters = glyphs.drawable("猫") if own else "猫"
    assert labels == ["caf\\xe9", f"{letters}\\x1b", ODD[2], long]
    plt.close("all")


@form(
    7,
    door="Python: plot functions, ax=",
    case="formulas, bytes and control characters in a legend, at logarithmic axes",
    right="the texts that Matplotlib draws, with the powers of its own formatter",
)
def test_axes_of_the_caller_get_names_as_they_are():
    ax = plt.figure().add_subplot(yscale="log")
    summaries = {name: np.ones((2, 3)) for name in ("$x_1$ $\\bad{", "a\x1b")}
    plot.attention_distance(summaries, image_size=32, title="b\x07", ax=ax)
    ax.figure.canvas.draw()
    drawn = [text.get_text() for text in ax.get_legend().get_texts()]
    assert drawn[:2] == ["$x_1$ $\\bad{", "a\\x1b"]
    assert "b\\x07" in [ax.get_title(loc) for loc in ("left", "center")]
    assert all(tick.label1.get_parse_math() for tick in ax.yaxis.get_major_ticks())
    plt.close("all")


@form(
    7,
    door="Python: overlay, and still images of a notebook",
    case="CJK in a title of the caller, and a letter of one fallback font",
    right="Matplotlib's warnings of missing letters, and the letters of the font file",
)
def test_titles_use_fonts_that_have_the_letters(no_warnings, monkeypatch):
    monkeypatch.setattr(glyphs, "installed_fallbacks", lambda: ("STIXGeneral",))
    image = np.zeros((32, 32, 3), np.uint8)
    rare = chr(min(glyphs.characters(("STIXGeneral",)) - glyphs.characters(("DejaVu Sans",))))
    ax = plot.overlay(image, np.ones((4, 4)), grid=TokenGrid(4, 4, (8, 8)))
    ax.set_title(f"{rare}\ue000猫")
    plot.style.png(ax.figure)
    assert ax.get_title() == f"{rare}\\ue000□"
    path, words = drawing._drawable(f"{rare}\x1b")
    assert "STIXGeneral" in path and words == f"{rare}\\x1b"
    assert "DejaVuSans.ttf" in drawing._drawable("a − “b”")[0]
    plt.close("all")


@form(
    7,
    door="Python: data.load, Parquet with classnames.txt",
    case="Unicode's line separators, a byte order mark, \\r\\n, empty last lines, another encoding",
    right="the three names, as written",
)
def test_class_names_are_divided_at_line_breaks_only(tmp_path):
    names = ["a\u2028b", "c\x85d", "\x0be"]
    parquet(tmp_path / "train-0.PARQUET", [encoded(k) for k in range(3)], [0, 1, 2])
    file = tmp_path / "classnames.txt"
    file.write_bytes(b"\xef\xbb\xbf" + "\r\n".join([*names, "", ""]).encode())
    assert load(tmp_path, "train", size=8, workers=0).class_names == tuple(names)
    file.write_bytes(b"caf\xe9\nb\nc")
    with pytest.raises(ValueError, match="classnames.txt must be text in UTF-8"):
        load(tmp_path, "train", size=8, workers=0)
    file.write_text("\n".join(names), "utf-8")
    assert texts.lines(files.read_names(file)) == names


@form(
    7,
    door="command: page, progress bar",
    case="an escape sequence in the name of an image, 1,000 letters in that of a class",
    right="the text that the bar gets",
)
def test_progress_has_no_control_characters(model_folder, folder, tmp_path, monkeypatch):
    steps = []
    monkeypatch.setattr("tqdm.tqdm.set_description_str", lambda _, step: steps.append(step))

    def save_page(vit, shown, out, progress, **_):
        progress("\x1b]0;a: " + 1000 * "b")
        out.write_text("")

    monkeypatch.setattr(in_page, "save_page", save_page)
    vitlens("page", model_folder, folder / BYTES, "--out", tmp_path / "page.html")
    assert steps[0].startswith("\\x1b]0;a: b") and len(steps[0]) < 250


@form(
    7,
    door="notebook: saved map",
    case="bytes, CJK, 249 bytes",
    right="zipfile and Pillow read them",
)
def test_saved_maps_have_names_that_file_systems_take(tmp_path):
    for name in NAMES:
        stem = file_stem(name)
        assert len(stem.encode()) <= 200 and re.fullmatch(r"[\w-]+", stem)
        with zipfile.ZipFile(tmp_path / "map.zip", "w") as archive:
            archive.writestr(f"{stem}.png", b"")
        (tmp_path / f"{stem}-attention-layer11-score.csv").write_text("")


@form(
    7,
    door="command: evaluate --out, data of any name",
    case="a data folder whose name is not UTF-8, or long in CJK",
    right="json's own parser",
)
def test_records_keep_names(tmp_path):
    name = os.fsdecode(b"donn\xe9es")
    record = Record("猫 $m$", name, "knn", "top1", 50.0, 40.0, 60.0, 10, "2026", {}, note="=1+1")
    path = tmp_path / "r.json"
    write_records(path, [record])
    (back,) = read_results(path)
    assert back.model == record.model and back.note == record.note
    assert shown(back.data) == shown(name)
    for long in ("猫" * 99, name, "猫" * 300):
        directory = tmp_path / _directory_name(long)
        directory.mkdir()
    assert len(list(tmp_path.iterdir())) == 4


@form(
    7,
    door="Python: files.write, text of paths",
    case="bytes that are not UTF-8 in a CSV file",
    right="Python's strict decoder",
)
def test_written_text_is_utf_8(tmp_path):
    file = tmp_path / "a.csv"
    files.write(file, f"image\n{BYTES}\n猫\n")
    assert file.read_bytes().decode() == "image\ncaf\\udce9.png\n猫\n"
    assert encode("é") == "é".encode()


@form(
    7,
    door="terminal: messages of commands",
    case="a missing file whose name has an escape sequence",
    right="no control character on the terminal",
)
def test_messages_have_no_control_characters(model_folder, tmp_path):
    folder = write(tmp_path, {"\x1b[2Ja.png": b"no image", "b.png": encoded(1), "c\r.txt": b""})
    done = vitlens("inspect", model_folder, folder, "--out", tmp_path / "out", expect=1)
    assert "\x1b" not in done.stderr and "\r" not in done.stderr.replace("\r\n", "")
    assert "\\x1b[2Ja.png" in done.stderr and "c\\r.txt" in done.stderr


def test_output_names_are_unique_and_short():
    pairs = [file_name("猫" * 83 + end) for end in ("a", "b")]
    assert len(set(pairs)) == 2 and all(len(name.encode()) <= 160 for name in pairs)
    assert file_name(unicodedata.normalize("NFD", "é")) == file_name("é") == "é"
    assert file_name("../a b.c", before="01-", suffix=".png") == "01----a-b-c.png"


def test_shown_is_one_printable_line():
    for name in NAMES:
        text = shown(name)
        assert "\n" not in text and text.encode() and len(text) <= 400
    assert visible("a\nb\x07") == "a\nb\\x07" and shown("قط 👩‍👩‍👧") == "قط 👩‍👩‍👧"


cannot_occur(7, door="app: uploads", reason="browsers give names as valid Unicode, kept as text")
cannot_occur(
    7, door="checkpoint folders of a run", reason="their files are named by numbers of steps"
)


@form(
    7, door="Python: data.load, a damaged file", case="a class with a line break", right="one line"
)
def test_messages_about_files_are_one_line(tmp_path):
    folder = tmp_path / "a\nb"
    folder.mkdir()
    for number in range(3):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(folder / f"{number}.png")
    (folder / "2.png").write_bytes(b"")
    with pytest.raises(ValueError) as refused:
        load(tmp_path, "whole", size=8)
    assert "a\\nb/2.png" in str(refused.value) and "\n" not in str(refused.value)
