"""The audit of a classifier as files: a page, tables, and a figure for each class. `vitlens audit` calls it.

`open_images` lists the images of a data set with their labels, and `write_audit` writes what `vitlens.audit` returns.
"""

from __future__ import annotations

import io
import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.ticker import MaxNLocator
from PIL import Image
from torch import nn

from vitlens import evidence, files, models
from vitlens.classes import class_numbers
from vitlens.data import load
from vitlens.data.folders import subfolders
from vitlens.evidence import CHANGE_COLUMNS, GROUP_COLUMNS, HEAD_COLUMNS, WAYS, Audit
from vitlens.images import image_files
from vitlens.models.classes import require_classes
from vitlens.plot import style
from vitlens.plot.style import figure_file
from vitlens.texts import file_name, shown
from vitlens.unseen import as_samples, unseen, unseen_rows
from vitlens_explorer import audit_page, in_page
from vitlens_explorer.audit_page import About

PAGE, RECORD, FIGURES, UNFINISHED = "audit.html", "audit.json", "figures", "unfinished"
"""Names of the page, of the record of a run, and of the folders of figures and of an audit that has not ended."""
RECORD_KEYS = ["command", "versions", "model", "weights", "data", "images", "settings", "notes"]
CHANGE_TABLES = ("beside.csv", "heads.csv")
"""Tables of the comparison with a second model."""
EFFECT_COLUMNS = ["group", "way", "effect", "low", "high", "p"]
IMAGE_COLUMNS = ["image", "name", "half", "label", "predicted", "probability"]
CROPS = 8
"""Crops of a group in a figure."""
ROW, WIDTH = 165, 1100
"""Height of a group and width of a figure in pixels."""
DPI = 150

Note = Callable[[str], None]


# Images


@dataclass(frozen=True)
class Images:
    """Images to audit.

    pairs: (name, source) of each. labels: class numbers of the model, or None. names: of the data's classes, by number.
    note: of `vitlens.unseen.unseen_rows`.
    """

    pairs: list[tuple[str, object]]
    labels: list[int] | None
    names: dict[int, str] = field(default_factory=dict)
    note: str = ""


def open_images(
    model: nn.Module,
    data: str,
    *,
    root: Path | None = None,
    classes: str = "",
    labeled: bool = True,
    image_key: str = "",
    label_key: str = "",
    beside: nn.Module | None = None,
    on_note: Note = lambda note: None,
) -> Images:
    """The images of a folder or a data set that a model was not trained on, with the model's numbers of their classes.

    A folder of images without subfolders has no labels. labeled: False to ignore labels. Of divided data, the test
    split. classes: as for `vitlens.classes.class_numbers`. beside: a second model that was not trained on them. Raises
    ValueError for a model without classes, for classes that the model lacks, for labels of one class, and if one of the
    models was trained on all images.
    """
    require_classes(model)
    others = [] if beside is None else [beside]
    if not (image_key or label_key) and _is_flat(data):
        return _open_flat(model, others, data, on_note)
    keys = {"image_key": image_key, "label_key": label_key}
    stream = load(data, "whole", size=32, stream=True, workers=0, root=root, **keys)
    if stream.samples.note:
        on_note(stream.samples.note)
    kept, note = unseen(model, stream, *others)
    if note:
        on_note(note)
    samples = kept.samples
    is_files = samples.root is not None
    pairs = []
    for number in range(len(samples)):
        source = samples.source(number) if is_files else partial(samples.source, number)
        pairs.append((samples.name(number), source))
    if not labeled:
        return Images(pairs, None, note=note)
    if len(kept.labels.unique()) < 2:
        name = shown(kept.class_names[int(kept.labels[0])])
        raise ValueError(
            f"An audit with labels needs images of at least two classes, got those of {name} alone. Add images of "
            "other classes, or give --no-labels."
        )
    numbers = class_numbers(model, kept.class_names, classes, stored=kept.stored_classes)
    labels = numbers[kept.labels].tolist()
    names = dict(zip(numbers.tolist(), kept.class_names, strict=True))
    return Images(pairs, labels, names, note)


def _open_flat(model: nn.Module, others: Sequence[nn.Module], folder: str, on_note: Note) -> Images:
    """The images of a folder without subfolders that no model was trained on, without labels."""
    pairs = image_files(folder, on_note)
    names, paths = zip(*pairs, strict=True)
    rows, note = unseen_rows(model, as_samples(names, paths), *others)
    if note:
        on_note(note)
    return Images([pairs[row] for row in rows], None, note=note)


def _is_flat(data: str) -> bool:
    """True for a folder of images without subfolders."""
    if not os.path.isdir(data) or subfolders(data):
        return False
    try:
        return bool(image_files(data))
    except ValueError:  # a folder of tables
        return False


def forwards(count: int, beside: bool = False) -> int:
    """Most forwards of an audit of a number of images: one each, and those with covered patches in the testing half.

    beside: True to add those of a comparison: the covered patches of the second model, and one more for each model.
    """
    tested = count // 2
    covered = tested * evidence.GROUPS_PER_IMAGE * 2 * len(WAYS)
    if beside:
        return count + 2 * covered + 2 * tested
    return count + covered


# Files


def check_out(out: Path, data: str) -> None:
    """Raise ValueError for a folder that cannot be written to, is part of the data, or holds files of others."""
    files.check_writable(out, "--out")
    folder = Path(data)
    if folder.is_dir() and out.resolve().is_relative_to(folder.resolve()):
        raise ValueError(
            f"--out {out} is in the folder of the images, so the next audit would read the figures. Give a folder "
            f"outside of {shown(data)}."
        )
    checks = {out / PAGE: _is_page, out / RECORD: _is_record}
    for name in ("groups.csv", "effects.csv", "images.csv", *CHANGE_TABLES):
        checks[out / name] = _is_table
    figures = out / FIGURES
    if figures.is_dir():
        checks |= {
            path: files.is_figure for path in figures.iterdir() if not path.name.startswith(".")
        }
    files.require_ours(checks)


def _is_page(path: Path) -> bool:
    try:
        with open(path, encoding="utf-8") as file:
            beginning = file.read(2000)
    except (OSError, UnicodeDecodeError):
        return False
    return '<meta name="generator" content="vitlens' in beginning


def _is_record(path: Path) -> bool:
    keys = list(files.read_object(path))
    return keys in (RECORD_KEYS, [*RECORD_KEYS, "beside"])


def _is_table(path: Path) -> bool:
    columns = {
        "groups.csv": list(GROUP_COLUMNS),
        "effects.csv": EFFECT_COLUMNS,
        "beside.csv": list(CHANGE_COLUMNS),
        "heads.csv": list(HEAD_COLUMNS),
    }
    header = files.read_header(path)
    if path.name == "images.csv":
        return header == [name for name in IMAGE_COLUMNS if name != "label" or "label" in header]
    return header == columns[path.name]


def write_audit(
    found: Audit,
    model: nn.Module,
    images: Images,
    out: Path,
    about: About,
    *,
    command: Sequence[str] = (),
    on_image: Callable[[], None] = lambda: None,
) -> list[Path]:
    """Write the page, the tables, the record and the figures of an audit, and return their paths.

    images: as they were audited. command: words of the command line, for the record. on_image: called after each image
    that is put into the page. Figures, and tables of a comparison, of an earlier audit in the folder are removed.
    """
    page, html = audit_page.page_of(found, model, images.pairs, about, on_image)
    record = {
        "command": shlex.join(command),
        "versions": in_page.versions(),
        "model": about.model,
        "weights": models.weights_digest(model),
        "data": about.data,
        "images": len(found.images),
        "settings": found.settings,
        "notes": found.notes,
    }
    contents: dict[str, bytes | str] = {
        PAGE: html,
        "groups.csv": _csv(found.groups),
        "effects.csv": _csv(found.effects),
        "images.csv": _csv(found.images),
    }
    if found.changes is not None:
        record["beside"] = {"model": about.beside, "weights": about.beside_weights}
        tables = found.changes.groups, found.changes.heads
        contents |= {name: _csv(table) for name, table in zip(CHANGE_TABLES, tables, strict=True)}
    contents[RECORD] = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
    for group_class in page["classes"]:
        name = file_name(group_class["name"], before=f"{group_class['number']:04d}-", suffix=".png")
        contents[f"{FIGURES}/{name}"] = figure_of(page, group_class)
    (out / FIGURES).mkdir(parents=True, exist_ok=True)
    with files.lock(out / "audit", "--out"):
        for path in (out / FIGURES).glob("*.png"):
            if f"{FIGURES}/{path.name}" not in contents:
                files.remove_ours(path, files.is_figure)
        for name in CHANGE_TABLES:
            if name not in contents:
                files.remove_ours(out / name, _is_table)
        for name, content in contents.items():
            files.write(out / name, content)
    return [out / name for name in contents]


def _csv(table) -> str:
    return table.to_csv(index=False, float_format="%.6g", lineterminator="\n")


def commands(images: Images, model: str, options: Mapping[str, object]) -> dict[int, str]:
    """By number of an image, the command that opens it in the explorer. Images in tables have none.

    options: of the model, by name, such as {"checkpoint": "weights.pth"}.
    """
    words = []
    for name, value in options.items():
        if value:
            words += [f"--{name}", str(value)]
    lines = {}
    for number, (_, source) in enumerate(images.pairs):
        if isinstance(source, Path):
            lines[number] = shlex.join(["vitlens", "app", model, str(source), *words])
    return lines


# Figures


def figure_of(page: dict, group_class: dict) -> bytes:
    """PNG file of the groups of a class: crops in a row, with the effects beside them."""
    groups = [page["groups"][number] for number in group_class["groups"]]
    with style.use_style():
        figure = style.page(WIDTH, ROW * len(groups) + 40)
        axes = figure.subplots(len(groups), 2, width_ratios=[2.2, 1], squeeze=False)
        for group, (left, right) in zip(groups, axes, strict=True):
            left.set_title(f"Group {group['group']}: {group['verdict']}", fontsize=9)
            _draw_crops(left, page, group)
            _draw_effects(right, group)
        _share_axis(axes[:, 1], groups)
        figure.suptitle(
            f"{group_class['name']}, {group_class['images']} tested images", x=0.01, ha="left"
        )
    return figure_file(figure, "png", DPI)


def _draw_crops(ax, page: dict, group: dict) -> None:
    """Draw crops of a group side by side."""
    ax.set_axis_off()
    ax.set_xlim(0, CROPS * 1.06)
    ax.set_ylim(1, 0)
    ax.set_aspect("equal")
    for number, member in enumerate(group["members"][:CROPS]):
        crop = _crop(page["images"][member["image"]]["file"], member["box"], page["grid"])
        left = 1.06 * number
        ax.imshow(crop, extent=(left, left + 1, 1, 0), interpolation="bilinear")
    ax.set_xlim(0, CROPS * 1.06)
    ax.set_ylim(1, 0)


def _crop(file: bytes, box: Sequence[int], grid: Mapping[str, int]) -> np.ndarray:
    """Pixels of a box [x, y, width, height] of the model's input, from the stored image, which may be smaller."""
    image = Image.open(io.BytesIO(file))
    factor = image.width / grid["width"], image.height / grid["height"]
    x, y, width, height = box
    corners = (x * factor[0], y * factor[1], (x + width) * factor[0], (y + height) * factor[1])
    return np.asarray(image.crop([round(corner) for corner in corners]).convert("RGB"))


def _draw_effects(ax, group: dict) -> None:
    """Draw the effect of each way with its interval, and the band of random patches."""
    ways = group["ways"]
    if not ways:
        ax.set_axis_off()
        ax.text(0, 0.5, "too few images for a test", transform=ax.transAxes)
        return
    ax.axvline(0, color="0.5", linewidth=0.8)
    for number, way in enumerate(ways):
        ax.barh(number, 2 * way["band"], left=-way["band"], height=0.8, color="0.85")
        ax.barh(number, way["effect"], height=0.45, color=style.SERIES[0])
        ax.plot([way["low"], way["high"]], [number, number], color="0.1", linewidth=1.5)
    ax.set_yticks(range(len(ways)), [way["name"] for way in ways])
    ax.set_ylim(len(ways) - 0.4, -0.6)
    ax.set_xlabel("fall of the probability with it covered,\nbeyond random patches (gray)")


def _share_axis(axes: Sequence, groups: Sequence[dict]) -> None:
    """Give the effects of all groups the same limits."""
    ends = [-0.05, 0.1]
    for group in groups:
        for way in group["ways"]:
            ends += [way["low"], way["high"], way["band"], -way["band"]]
    for ax in axes:
        ax.set_xlim(min(ends) - 0.02, max(ends) + 0.02)
        ax.xaxis.set_major_locator(MaxNLocator(4))
