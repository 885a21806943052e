"""The page of an audit as one HTML file: its groups class by class, with crops, effects and the images that have them.

`save_audit_page` writes it. `content` makes everything that the page shows from a `vitlens.evidence.Audit` and its
images, and `html_of` the file. `audit.js` draws it. Shapes: G groups, n tested images, P = rows·cols patches.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch import nn

from vitlens import files, models
from vitlens.classes import class_numbers
from vitlens.evidence import WAYS, Audit, inputs_of
from vitlens.recorder.supported import unwrap
from vitlens.texts import shown
from vitlens_explorer import audit_changes, front, in_page
from vitlens_explorer.audit_page.pictures import LEVELS, Pictures, jpeg

if TYPE_CHECKING:
    from pandas import DataFrame, Series

AUDIT_PAGE = Path(__file__).parent
LIMIT = 10_100_000
"""Most bytes of all stored images with their blanks, besides those that cover others. A file has at most 15 MB."""
BLANKS = 2_000
"""Bytes that are reserved for the map and the blanks of an image."""
SHOWN = 40
"""Most images of a group in a page."""
FIRST = 3
"""Groups on the first screen."""
Z = 1.96
"""Standard errors from the mean to the end of a 95 % interval."""
WAY_NAMES = {"border": "border color", "blur": "blur", "other": "other image"}
"""Short names of the ways to cover, for charts."""
REASONS = {
    "fixed place": "{at_place} of its images have it at the same patch.",
    "border": "{at_border} of its patches are on the border.",
    "few images": "Only {class_share} of the images of the class have it.",
    "below chance without it": "With it covered, the accuracy is below the share of the class among the images.",
}
"""Reasons to look at a group, as sentences with columns of `Audit.groups`."""

Pixels = Callable[[int], "np.ndarray | None"]
"""Pixels (H, W, 3) uint8 of an image by its number, as the model gets it, or None for an unreadable one."""


@dataclass(frozen=True)
class About:
    """Texts of an audit besides its numbers.

    model: name of the model. data: name of the data. labeled: True if the images had labels. names: class names by
    number. commands: by number of an image, the command that opens it, or None to show none. weights: digest of the
    weights. beside, beside_weights: name of a second model, and digest of its weights.
    """

    model: str
    data: str
    labeled: bool
    names: Mapping[int, str]
    commands: Mapping[int, str] | None = field(default_factory=dict)
    weights: str = ""
    beside: str = ""
    beside_weights: str = ""

    def name(self, number: int) -> str:
        """Name of a class, or its number."""
        return shown(self.names.get(number, f"class {number}"))


def percent(share: float | None) -> str:
    """A share in percent, or "–" for a missing one.

    >>> percent(0.123), percent(float("nan"))
    ('12 %', '–')
    """
    return "–" if _plain(share) is None else f"{100 * share:.0f} %"


def _plain(value: object) -> float | None:
    """A number as float, None for NaN and missing values."""
    if value is None or value != value or str(value) == "<NA>":
        return None
    return float(value)


# Sentences


def lead(found: Audit, about: About) -> str:
    """Sentences with the numbers of images and of groups."""
    images, tested = len(found.images), len(found.tested)
    groups = found.groups
    covered = int((groups["status"] == "tested").sum())
    used = len(found.used)
    ending = f"{used:,} used" if about.labeled else "and without labels none is called used"
    return (
        f"The audit read {images:,} images of {shown(about.data)}: {images - tested:,} to find groups of similar "
        f"patches that raise a class, and {tested:,} others to cover each group. Groups: {len(groups):,} found, "
        f"{covered:,} tested, {ending}."
    )


def first_look(found: Audit, about: About) -> dict:
    """Heading, sentence and at most three groups of the first screen."""
    groups = found.groups
    tested = groups[groups["status"] == "tested"]
    if not about.labeled:
        strongest = tested[tested["effect"] > 0].sort_values("effect", ascending=False)
        return {
            "title": "The strongest effects",
            "words": "Without labels, these groups move the output. No group is called used.",
            "groups": strongest["group"].tolist()[:FIRST],
        }
    suspects = found.suspects["group"].tolist()
    others = [group for group in found.used["group"].tolist() if group not in suspects]
    numbers = [*suspects, *others][:FIRST]
    if suspects:
        count = "1 used group has" if len(suspects) == 1 else f"{len(suspects):,} used groups have"
        words = (
            f"{count} a reason for a closer look: a fixed place, the border, few images, or an accuracy below chance "
            "without it. Should the class be recognized by these crops?"
        )
    elif numbers:
        words = (
            "No used group has a reason for a closer look, such as a fixed place. These have the strongest effects. "
            "Should the class be recognized by these crops?"
        )
    elif len(tested):
        words = (
            "Nothing was found: covering a group lowered the probability of the label no more than covering random "
            "patches, up to chance. The model can still go by what this test misses: colors over the whole image, "
            "evidence in few images, and patches that look different each time."
        )
    else:
        words = (
            "No group could be tested, because the images are too few: a class needs 40, and a group 15 tested images "
            "that have it. So the audit has no result about the model. Add images."
        )
    title = "Nothing found" if len(tested) else "Nothing tested"
    return {"title": "What to look at" if numbers else title, "words": words, "groups": numbers}


def sentences(row: Series, labeled: bool) -> list[str]:
    """Sentences on a group, from its row of `Audit.groups`."""
    if row["status"] != "tested":
        return [
            f"Not tested: {row['tested']:,} tested images have it. A test needs 15 of them, and 40 images of the class."
        ]
    effect = row["effect"]
    target = "label" if labeled else "predicted class"
    change = "lowers" if effect >= 0 else "raises"
    words = [
        f"Covering it {change} the probability of the {target} by {abs(effect):.2f} more than covering as many random "
        "patches of the same images."
    ]
    for reason in filter(None, row["reasons"].split(", ")):
        shares = {name: percent(row[name]) for name in ("at_place", "at_border", "class_share")}
        words.append(REASONS.get(reason, f"Reason: {reason}.").format(**shares))
    return words


def verdict(row: Series, labeled: bool) -> str:
    """State of a group in one or two words."""
    if row["status"] != "tested":
        return "not tested"
    if row["used"]:
        return "used"
    return "not used" if labeled else "tested"


# Numbers


def null_band(effect: float, low: float, high: float, count: int) -> float:
    """Half-width of the range that holds 95 % of effects if group and random patches were exchangeable.

    The signs of the differences are then random, so the standard error is the root of their mean square over n. The
    mean square follows from the mean and its interval.

    >>> round(null_band(0.0, -0.1, 0.1, 50), 3)
    0.1
    """
    error = (high - low) / (2 * Z)
    return Z * math.sqrt(error**2 + effect**2 / max(count, 1))


def crop_box(patches: np.ndarray, patch: tuple[int, int]) -> list[int]:
    """[x, y, width, height] in pixels around the largest connected part of patches (rows, cols) bool.

    The part has a patch of context on each side, and the box as many rows as columns where the grid allows it.

    >>> crop_box(np.eye(5, dtype=bool)[[4, 3, 2, 1, 0]] & (np.arange(5) == 2), (10, 10))
    [10, 10, 30, 30]
    """
    from scipy.ndimage import label

    rows, cols = patches.shape
    parts, count = label(patches)
    sizes = np.bincount(parts.ravel(), minlength=count + 1)
    largest = 1 + int(sizes[1:].argmax())
    row, col = np.nonzero(parts == largest)
    side = max(np.ptp(row), np.ptp(col)) + 3
    top, height = _span(row, side, rows)
    left, width = _span(col, side, cols)
    return [left * patch[1], top * patch[0], width * patch[1], height * patch[0]]


def _span(places: np.ndarray, side: int, count: int) -> tuple[int, int]:
    """First place and length of a range of `side` places around the middle of some, within `count`."""
    length = min(side, count)
    middle = (places.min() + places.max() + 1) / 2
    first = int(np.clip(math.floor(middle - length / 2), 0, count - length))
    return first, int(length)


def members_of(found: Audit, group: int) -> list[int]:
    """Positions among the tested images of at most `SHOWN` that have a group, those of its class first."""
    has = (found.members == group).any(1).numpy()
    positions = np.flatnonzero(has)
    numbers = found.tested.numpy()[positions]
    table = found.images.set_index("image")
    column = "label" if "label" in table else "predicted"
    own = table.loc[numbers, column].to_numpy() == found.groups["class"].iloc[group]
    chosen = []
    for part in (positions[own], positions[~own]):
        most = min(len(part), SHOWN - len(chosen))
        spread = np.linspace(0, len(part) - 1, most).round().astype(int)
        chosen += part[spread].tolist()
    return chosen


def stored_images(
    found: Audit, pixels: Pixels, on_image: Callable[[], None] = lambda: None
) -> tuple[dict[int, list[int]], dict[int, bytes], tuple[int, int]]:
    """(positions by group, JPEG files by position, (H, W) of an image) that fit `LIMIT`, in turn from each group.

    on_image: called after each image.
    """
    wanted = {group: members_of(found, group) for group in found.groups["group"].tolist()}
    kept: dict[int, list[int]] = {group: [] for group in wanted}
    stored: dict[int, bytes] = {}
    unreadable: set[int] = set()
    size = (1, 1)
    for rank in range(SHOWN):
        for group, positions in wanted.items():
            if rank >= len(positions):
                continue
            position = positions[rank]
            size_of_files = sum(len(file) for file in stored.values())
            full = size_of_files + BLANKS * len(stored) > LIMIT
            if position not in stored and position not in unreadable and not full:
                image = pixels(int(found.tested[position]))
                on_image()
                if image is None:
                    unreadable.add(position)
                    continue
                size = image.shape[:2]
                stored[position] = jpeg(image)
            if position in stored:
                kept[group].append(position)
    return kept, stored, size


# The file


def save_audit_page(
    model: nn.Module,
    images: object,
    found: Audit,
    path: str | os.PathLike,
    *,
    names: Mapping[int, str] | None = None,
    title: str = "the model",
    data: str = "the data",
    beside: str = "the second model",
    on_image: Callable[[], None] = lambda: None,
) -> Path:
    """Write an audit as one HTML file that opens without Python and network, and return its path.

    The file contains tested images as the model gets them, at most 40 of a group and 15 MB in all.

    >>> found = vitlens.audit(model, "flowers", labels)  # doctest: +SKIP
    >>> vitlens_explorer.save_audit_page(model, "flowers", found, "audit.html")  # doctest: +SKIP
    PosixPath('audit.html')

    model, images: those that were audited. found: what `vitlens.audit` returned. names: class names by number, by
    default those of the images or of the model. title, data, beside: names of the model, of the images, and of a second
    model. on_image: called after each image that is put into the page.
    """
    path = Path(path)
    files.check_writable(path.parent, "The folder of the page")
    names = _names(model, images) if names is None else names
    labeled = "label" in found.images
    about = About(title, data, labeled, names, commands=None, beside=beside)
    _, html = page_of(found, model, images, about, on_image)
    files.write(path, html)
    return path


def _names(model: nn.Module, images: object) -> dict[int, str]:
    """Class names of a model by number, or those of a data set for the model's numbers."""
    own = models.label_names(model)
    if own is not None or not hasattr(images, "class_names"):
        return dict(enumerate(own or ()))
    stored = getattr(images, "stored_classes", False)
    numbers = class_numbers(model, tuple(images.class_names), stored=stored)
    return dict(zip(numbers.tolist(), images.class_names, strict=True))


def page_of(
    found: Audit,
    model: nn.Module,
    images: object,
    about: About,
    on_image: Callable[[], None] = lambda: None,
) -> tuple[dict, str]:
    """(`content`, HTML file) of an audit of a model over images, as they were given to `vitlens.audit`."""
    model = unwrap(model)
    about = replace(about, weights=models.weights_digest(model))
    pictures = Pictures(model, inputs_of(model, images), found.settings["method"])
    page = content(found, about, pictures, on_image)
    return page, html_of(page, about)


def content(
    found: Audit, about: About, pictures: Pictures, on_image: Callable[[], None] = lambda: None
) -> dict:
    """Everything that the page shows."""
    kept, stored, (height, width) = stored_images(found, pictures.pixels, on_image)
    rows, cols = found.places.shape[1:] if len(found.places) else (1, 1)
    patch = (height // rows, width // cols)
    table = found.images.set_index("image")
    images = {}
    for position, file in stored.items():
        number = int(found.tested[position])
        words = _image(table.loc[number], number, about)
        images[position] = words | {"file": file} | pictures.blanks(number)
    covered = covered_members(found)
    groups = []
    for row in found.groups.to_dict("records"):
        group = _group(row, found, about, kept[row["group"]], patch)
        for member in group["members"]:
            number = int(found.tested[member["image"]])
            member["covered"] = covered.get((row["group"], number))
        groups.append(group)
    return {
        "model": about.model,
        "opens": about.commands is not None,
        "levels": LEVELS,
        "others": _others(groups, table, pictures),
        "labeled": about.labeled,
        "lead": lead(found, about),
        "look": first_look(found, about),
        "notes": found.notes,
        "beside": audit_changes.content(found, about.model, about.beside, about.labeled),
        "grid": {"rows": rows, "cols": cols, "patch": patch, "height": height, "width": width},
        "classes": _classes(found, about),
        "without": _without_groups(found, about),
        "groups": groups,
        "images": images,
    }


def _image(row: Series, number: int, about: About) -> dict:
    """Texts of a tested image."""
    label = about.name(int(row["label"])) if about.labeled else None
    return {
        "name": shown(row["name"]),
        "label": label,
        "predicted": about.name(int(row["predicted"])),
        "probability": _plain(row["probability"]),
        "command": (about.commands or {}).get(number),
    }


def covered_members(found: Audit) -> dict[tuple[int, int], dict]:
    """By group and number of an image: the other image, and each way's probability with the group and with random
    patches covered, as the test measured them."""
    covered: dict[tuple[int, int], dict] = {}
    if found.covered is None:
        return covered
    for row in found.covered.to_dict("records"):
        member = covered.setdefault(
            (row["group"], row["image"]), {"other": row["other"], "ways": []}
        )
        member["ways"].append(
            {
                "way": row["way"],
                "words": WAYS[row["way"]],
                "probability": round(row["probability"], 4),
                "control": round(row["control"], 4),
            }
        )
    return covered


def _others(groups: list[dict], table: DataFrame, pictures: Pictures) -> dict[int, dict]:
    """By number, name and file of each image whose patches cover those of others."""
    members = [member for group in groups for member in group["members"]]
    numbers = {member["covered"]["other"] for member in members if member["covered"]}
    others = {}
    for number in sorted(numbers):
        pixels = pictures.pixels(number)
        if pixels is not None:
            others[number] = {"name": shown(table.loc[number, "name"]), "file": jpeg(pixels)}
    return others


def _group(row: dict, found: Audit, about: About, positions: list[int], patch: tuple) -> dict:
    """Numbers, sentences and members of a group."""
    group = row["group"]
    rows, cols = found.places.shape[1:]
    members = []
    for position in positions:
        at = (found.members[position] == group).numpy()
        box = crop_box(at.reshape(rows, cols), patch)
        members.append({"image": position, "patches": np.flatnonzero(at).tolist(), "box": box})
    shared = [about.name(int(number)) for number in row["shared_with"].split()]
    columns = ("share", "class_share", "at_border", "at_place", "effect", "p")
    accuracies = ("accuracy", "accuracy_covered", "accuracy_control", "accuracy_lacking")
    return {
        "group": group,
        "class": row["class"],
        "name": about.name(row["class"]),
        "verdict": verdict(row, about.labeled),
        "suspect": row["suspect"],
        "reasons": row["reasons"],
        "sentences": sentences(row, about.labeled),
        "images": row["images"],
        "tested": row["tested"],
        "shared": shared,
        "ways": _ways(found, group, row["tested"]),
        "place": [round(share, 3) for share in found.places[group].flatten().tolist()],
        "members": members,
        **{name: _plain(row[name]) for name in (*columns, *accuracies)},
    }


def _ways(found: Audit, group: int, count: int) -> list[dict]:
    """Effect, interval and band of each way to cover a group."""
    ways = []
    for row in found.effects[found.effects["group"] == group].to_dict("records"):
        band = null_band(row["effect"], row["low"], row["high"], count)
        ways.append(
            {
                "name": WAY_NAMES[row["way"]],
                "words": WAYS[row["way"]],
                "effect": row["effect"],
                "low": row["low"],
                "high": row["high"],
                "band": band,
            }
        )
    return ways


def _classes(found: Audit, about: About) -> list[dict]:
    """Name, tested images and groups of each class: those with a suspect first, then those with a used group."""
    table = found.images
    tested = table[table["half"] == "tested"]
    column = "label" if about.labeled else "predicted"
    classes = []
    for number, own in found.groups.groupby("class"):
        of_class = tested[tested[column] == number]
        accuracy = (of_class["predicted"] == number).mean() if about.labeled else None
        order = own.assign(last=own["suspect"].replace(0, len(found.groups) + 1))
        order = order.sort_values(["last", "used", "effect"], ascending=[True, False, False])
        classes.append(
            {
                "number": int(number),
                "name": about.name(int(number)),
                "images": len(of_class),
                "accuracy": _plain(accuracy),
                "used": int(own["used"].sum()),
                "suspects": int((own["suspect"] > 0).sum()),
                "groups": order["group"].tolist(),
            }
        )
    classes.sort(key=lambda each: (-each["suspects"], -each["used"], each["number"]))
    return classes


def _without_groups(found: Audit, about: About) -> list[str]:
    """Names of the classes of the images that have no group."""
    column = "label" if about.labeled else "predicted"
    present = set(found.images[column].tolist())
    grouped = set(found.groups["class"].tolist())
    return [about.name(int(number)) for number in sorted(present - grouped)]


def html_of(page: dict, about: About) -> str:
    """The file of a `content`."""
    title = f"Audit of {shown(about.model)} on {shown(about.data)}"
    versions = f"Written by {in_page.versions()}."
    texts = {
        "title": title,
        "description": page["lead"],
        "lead": page["lead"],
        "footer": f"{about.model}, weights {about.weights}. {versions} {stored_sentence(page)}",
    }
    script = front.join_modules(AUDIT_PAGE / "audit.js")
    style = (AUDIT_PAGE / "audit.css").read_text(encoding="utf-8")
    return in_page.as_html(page, script, texts, style=style)


def stored_sentence(page: Mapping[str, Sequence | dict]) -> str:
    """Sentence on the images in a file."""
    count = len(page["images"])
    return f"This file contains {count:,} images." if count != 1 else "This file contains 1 image."
