"""The zip file of a saved map: figure, model input, numbers as CSV, and settings."""

from __future__ import annotations

import csv
import io
import json
import re
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePath

import numpy as np
from PIL import Image

from vitlens import __version__
from vitlens.models import weights_digest
from vitlens.texts import file_name
from vitlens_explorer.controls import Control
from vitlens_explorer.drawing import figure_png, png
from vitlens_explorer.lanes import never_cancel
from vitlens_explorer.panels import Panel
from vitlens_explorer.photographs import Forward
from vitlens_explorer.views import Map, heads_table


def file_stem(photograph: str) -> str:
    """Beginning of the names of the files of a photograph."""
    words = re.sub(r"\W+", "-", PurePath(photograph).stem).strip("-")
    return file_name(words, before="vitlens-")


def settings_of(controls: Sequence[Control]) -> dict[str, object]:
    """Values of the visible controls that change the map."""
    settings = {}
    for control in controls:
        if not (control.hidden or control.disabled or control.kind == "text"):
            settings[control.name] = control.value
    settings.pop("hover", None)
    if not settings.get("off"):
        settings.pop("off", None)
        settings.pop("way", None)
    return settings


def zip_map(
    stem: str, forward: Forward, panel: Panel, shown: Map, score: dict | None, settings: dict
) -> dict[str, bytes]:
    """A zip file by its name. score: of the map, with its curves, or None. settings: values of the controls by name."""
    name = f"{stem}-{settings['view']}"
    if "layer" in settings:
        name += f"-layer{settings['layer']}"
    tables = {**shown.tables, "heads": heads_table(forward, never_cancel)}
    if score:
        panel = replace(panel, words=f"{panel.words} {score['words']}")
        tables["score"] = {"share": score["shares"], **score["curves"]}
    about = {
        "model": forward.name,
        "weights": weights_digest(forward.model),
        "vitlens": __version__,
        "words": panel.words,
        **settings,
    }
    files = {
        f"{name}.png": figure_png(forward, panel, score),
        f"{name}-input.png": png(Image.fromarray(forward.pixels)),
        f"{name}.csv": map_as_csv(shown.values),
        f"{name}.json": json.dumps(about, indent=2, ensure_ascii=False),
    }
    for title, columns in tables.items():
        files[f"{name}-{title}.csv"] = columns_as_csv(columns)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in files.items():
            archive.writestr(path, content)
    return {f"{name}.zip": file.getvalue()}


def map_as_csv(values: np.ndarray) -> str:
    """A map (rows, cols) or (rows, cols, 3) as CSV, a line for each row of patches, without a header.

    Nine digits give the same float32 when they are read.
    """
    file = io.StringIO()
    np.savetxt(file, values.reshape(len(values), -1), fmt="%.9g", delimiter=",")
    return file.getvalue()


def columns_as_csv(columns: dict[str, Sequence]) -> str:
    """Columns of equal length by name as CSV."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    return file.getvalue()
