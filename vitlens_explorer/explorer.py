"""The explorer: all views of one image by layer, head, query patch, and class or similarity target."""

from __future__ import annotations

import copy
import io
import json
import re
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePath

import numpy as np
import torch
from torch import Tensor, nn

from vitlens import __version__
from vitlens.attribution import METHODS
from vitlens.attribution.target import classes
from vitlens.models import preprocess, weights_digest
from vitlens.recorder.interception import POOL
from vitlens.recorder.intervention import head_places, mean_outputs
from vitlens.recorder.supported import attention_modules, has_text_tower, unwrap
from vitlens_explorer import details
from vitlens_explorer.drawing import figure_png
from vitlens_explorer.lanes import LARGEST, Job
from vitlens_explorer.page import CANCELED, Check, Control, Panel, Scale, unchecked
from vitlens_explorer.photographs import (
    MORE,
    PAINT,
    PAINTING,
    READOUT,
    Forward,
    Pictured,
    sample_photographs,
    size_for,
)
from vitlens_explorer.views import (
    EVERY,
    MAX,
    MEAN,
    ORDERS,
    SUM,
    Choice,
    Likeness,
    Map,
    View,
    covering,
    curve_forwards,
    curves,
    head_control,
    head_maps,
    map_panel,
    mean_distance,
    possible,
    query_words,
    score,
    sinks,
    view_control,
    views,
)
from vitlens_explorer.words import say

PREDICTED, NO_OTHER, PICTURE, TEXT = "predicted", "none", "picture", "text"
BARS = 5
LOOKING = ("attention", "received", "rollout")
"""Views that mark sinks."""
TILES = Scale("viridis", 0, 1).table().tobytes()  # colors of the mosaic
TYPED = 10
"""Largest number of typed classes and texts in the menus."""
ZERO, AVERAGE = "zero", "mean"
WAYS = AVERAGE, ZERO
Head = tuple[int | str, int]
"""(layer, head); the attention pool is the layer "pool"."""


class Explorer(Pictured):
    """The page of `explore`, and of `vitlens app`.

    In its state, `target` is PREDICTED, a class number, (PICTURE, name of a photograph) or (TEXT, prompt), `against`
    NO_OTHER or a class number, and `off` the (layer, head) of heads that are switched off. guided: the front end shows
    the tour in place of the explorer.
    """

    plain = Pictured.plain | {"layer", "hover", "sinks"}
    write_page: Callable | None = None
    """`in_page.write_page`, where the page can be saved as a file, as in the app."""
    saving: Job | None = None
    """The page that is being saved."""

    def __init__(
        self,
        model: nn.Module,
        image=None,
        *,
        size: tuple[int, int] | None = None,
        guided: bool = False,
    ):
        layers = len(attention_modules(unwrap(model)))  # raises for models without maps
        super().__init__(
            model,
            image,
            size=size,
            whole=False,
            view="attention",
            layer=2 * layers // 3,
            head=MEAN,
            target=PREDICTED,
            against=NO_OTHER,
            another="",
            typed=(),
            off=(),
            way=AVERAGE,
            sinks=False,
            hover=True,
            **PAINT,
        )
        self.guided = guided
        self._reads_text = has_text_tower(self.model)
        self._pool = sum(
            layer == "pool" for layer, _ in _places(self.model)
        )  # heads of the attention pool

    def take(self, content, buffers):
        if "pick" in content:
            self.change(row=content["row"], column=content["col"])
        elif "why" in content:
            explaining = [name for name, view in possible(self.forward).items() if view.attributes]
            self.change(
                view=self.state["view"] if self.row.explains else explaining[0],
                target=content["why"],
            )
        elif content.get("press") == "page" and self.write_page:
            forward, number = self.forward, content.get("number", 0)
            forwards = curve_forwards(forward, ORDERS) + curve_forwards(forward, len(METHODS))
            self.saving = Job(("page", number), self._page(), "Page", forwards)
        elif content.get("press") == "save":
            if isinstance(shown := self.view(), Job):
                raise ValueError("This map is still being computed. Save it after it is shown.")
            if (
                self.row.attributes
                and self.job()
                and any(key not in self.results for key in self._scores)
            ):
                raise ValueError(
                    "The score of this map is still being computed. Save the map after it, or cancel it."
                )
            self.files.append((content.get("number", 0), self._saved(shown)))
        else:
            super().take(content, buffers)

    def look_up(self, content, check):
        forward, choice = self.forward, self.choice
        if content["ask"] == "look":  # the map from a patch under the pointer
            choice = replace(choice, query=(content["row"], content["col"]))
            panel = self._panel(self.row.make(forward, choice, check), choice).message()
            scale = panel["scale"]
            return panel | {"values": None, "scale": scale | {"colors": None}}, [
                panel["values"],
                scale["colors"],
            ]
        layer = content.get("layer", self.state["layer"])
        colors = [Scale("viridis", 0, 1).table(0.9, "value").tobytes()]  # of small maps
        if content["ask"] == "tour":
            head = self.state["head"] if isinstance(self.state["head"], int) else MEAN
            return details.tour(
                forward, layer, head, self.state["row"], self.state["column"]
            ), colors
        head, query = content.get("head", choice.head), content.get("query", self.query)
        query = tuple(query) if isinstance(query, list) else query
        return details.value(forward, layer, head, query, content.get("key")), colors

    def draw(self, check):
        whole, forward = (
            self._forward_without((), check),
            self._forward_without(self.state["off"], check),
        )
        self.fit(forward)
        if isinstance(shown := self.view(check), Job):
            return shown
        return {
            "pictures": {"picture": whole.png},
            "panels": [self._panel(shown)],
            "bars": self._bars(forward, whole),
            "mosaic": self._mosaic(check),
            "six": self._six(),
            "score": self._score(),
            "parts": None,
            "lens": None,
            **shown.beside,
            "about": self.photograph.note,
            "model": forward.name,
            "pages": self.write_page is not None,
            "uploads": LARGEST,
            "saves": True,
            "asks": self.asks,
            "tour": self.guided,
        }

    def job(self):
        forward, choice, shown = self.forward, self.choice, self.results.get(self._key)
        jobs = [
            Job(
                ("distance", forward.key),
                partial(mean_distance, forward),
                "Mean attention distance",
            )
        ]
        if self.row.attributes and shown:
            random, quick = self._scores[0], self._quick
            jobs += [
                Job(
                    ("map", forward.key, name, choice),
                    partial(view.make, forward, choice),
                    view.entry,
                    1,
                )
                for name, view in quick.items()
                if self._made(name) is None
            ]
            forwards = curve_forwards(forward, ORDERS)
            jobs.append(
                Job(
                    random,
                    partial(curves, forward, choice, None),
                    "Score of random orders",
                    forwards,
                )
            )
            scored = (
                {} if isinstance(self.results.get(random), str) else {self.state["view"]: shown}
            )
            scored |= {name: self._made(name) for name in quick if scored}
            for name, found in scored.items():
                if isinstance(found, Map):
                    job = partial(curves, forward, choice, torch.from_numpy(found.values)[None])
                    key, forwards = ("score", forward.key, name, choice), curve_forwards(forward, 1)
                    jobs.append(Job(key, job, f"Score of {views()[name].entry}", forwards))
        if self.saving and self.saving.key not in self.results:
            return self.saving
        canceled = self._canceled and self.row.attributes
        return next((job for job in jobs if not canceled and job.key not in self.results), None)

    @property
    def asks(self) -> list[str]:
        """Questions that the current view answers."""
        looks = self.row.query and not self.row.explains
        return ["tour", *["look"] * looks, *["value"] * (self.state["view"] == "attention")]

    @property
    def row(self) -> View:
        """The current view."""
        return views()[self.state["view"]]

    @property
    def choice(self) -> Choice:
        """Layer, head, query and classes of the current view."""
        state, row, forward = self.state, self.row, self.forward
        target = against = None
        if row.explains:
            target = state["target"]
            if target == PREDICTED or (isinstance(target, tuple) and not row.attributes):
                target = forward.likeliest[0]
            elif isinstance(target, tuple):
                photograph = self.photographs[target[1]] if target[0] == PICTURE else None
                target = Likeness(
                    target[1], *([photograph.number, photograph.image] if photograph else [])
                )
            if row.contrasts and state["against"] != NO_OTHER and not isinstance(target, Likeness):
                against = state["against"]
        return Choice(
            layer=state["layer"] if row.layered else 0,
            head=row.fitted(state["head"], forward.heads) if row.head else MEAN,
            query=self.query if row.query else READOUT,
            target=target,
            against=against,
        )

    @property
    def forward(self) -> Forward:
        """Forward of the photograph at the chosen size without the switched-off heads."""
        return self._forward_without(self.state["off"], unchecked)

    def view(self, check: Check = unchecked) -> Map | Job:
        """The current map, or its job for the long lane."""
        key, make = self._key, partial(self.row.make, self.forward, self.choice)
        if self.row.slow and key not in self.results:
            return Job(key, make, self.row.entry, self.row.forwards(self.forward))
        made = self._made(self.state["view"])
        return made if isinstance(made, Map) else self.once(key, lambda: make(check))

    @property
    def _canceled(self) -> bool:
        """True if the user canceled a map or a score in the background: the others are not computed either."""
        return any(result is CANCELED for key, result in self.results.items() if key[0] != "page")

    @property
    def _quick(self) -> dict[str, View]:
        """Six quick methods, which are shown side by side."""
        methods = {
            name: view
            for name, view in possible(self.forward).items()
            if view.attributes and not view.slow
        }
        return {
            name: methods[name]
            for name in [name for name in methods if METHODS[name].depends_on_target][:6]
        }

    def _made(self, name: str) -> Map | str | None:
        """The map of a view for the current choice, or the message of its failure."""
        key = (self.forward.key, name, self.choice)
        return self.results.get(key) or self.results.get(("map", *key))

    @property
    def _key(self) -> tuple:
        """Key of the current map."""
        return self.forward.key, self.state["view"], self.choice

    def _forward_without(self, off: tuple, check) -> Forward:
        """Forward without the heads in `off`."""
        whole, way = self.state["whole"], self.state["way"]
        size = size_for(self.model, self.photograph) if whole and not self.size else self.size

        def values() -> dict:
            if not off or way == ZERO:
                return dict.fromkeys(off, ZERO)
            batch = self._forward_without((), check).batch
            key = ("means", self._weights[id(self.model)], tuple(batch.shape))
            values = self.once(key, lambda: means(self.model, batch, check))
            return {head: values[head] for head in off}

        switches = (off, way) if off else ()
        return self.forward_of(
            self.model, self.photograph, size=size, whole=whole, off=switches, values=values
        )

    def change(self, **values):
        """As in `Page`. `target`, `against` and `another` take a class number or name, `another` also a text if the
        model has a text tower."""
        if "off" in values:
            values["off"] = listed(self.model, values["off"])
        if isinstance(another := values.get("another"), str) and another.strip():
            values["target"] = (TEXT, another.strip()) if self._reads_text else another.strip()
        typed, cleared = (
            [],
            {"another": ""} if "target" in values and "another" not in values else {},
        )
        for name, nothing in (("target", PREDICTED), ("against", NO_OTHER)):
            if (value := values.get(name, nothing)) in (None, nothing):
                values |= {name: nothing} if name in values else {}
            elif isinstance(value, list | tuple):  # the browser sends lists
                values[name] = tuple(value)
                typed += [values[name]] if value[0] == TEXT else []
            else:
                if not self.forward.likeliest:
                    raise ValueError(
                        f"{self.forward.name} has no classifier head for images, so no class {value!r}."
                    )
                values[name] = self._class(value)
                typed.append(values[name])
        if any(isinstance(value, tuple) for value in typed) and not self._reads_text:
            raise ValueError(
                f"{self.forward.name} has no text tower, so a text cannot be its target."
            )
        before = self.state
        known = (*self.forward.likeliest, *before["typed"])
        typed = (*(value for value in typed if value not in known), *before["typed"])
        self.state = before | cleared | {"typed": typed[:TYPED]}
        try:
            super().change(**values)
        except ValueError:
            self.state = before
            raise

    def _class(self, value: int | str) -> int:
        """The number of a class by its number or name, or of the likeliest class whose name has these whole words."""
        forward = self.forward
        try:
            return classes(self.model, forward.logits[None], value).item()
        except ValueError:
            asked = set(re.findall(r"\w+", str(value).lower()))
            found = [
                k
                for k, name in enumerate(forward.names or ())
                if asked <= set(re.findall(r"\w+", name.lower()))
            ]
            if not asked or not found:
                raise
            return max(found, key=forward.share)

    def fit(self, forward):
        super().fit(forward)
        target, against = self.state["target"], self.state["against"]
        others = [(PICTURE, name) for name in self.photographs if name != self.state["photograph"]]
        gone = isinstance(target, tuple) and target[0] == PICTURE and target not in others
        if gone or (target == PREDICTED and not forward.likeliest):
            target = PREDICTED if forward.likeliest else others[0]
        if against == (forward.likeliest[0] if target == PREDICTED else target):
            against = NO_OTHER
        self.state = self.state | {"target": target, "against": against}

    def menus(self):
        return super().menus(), len(views())

    def controls(self) -> list[Control]:
        row, forward, state = self.row, self.forward, self.state
        head = head_control(forward, row, state["head"], place=MORE)
        whole = size_for(self.model, self.photograph) is not None and not self.size
        layer = self.layer_control(
            forward,
            hidden=not row.layered,
            disabled=row.head == "added" and head.value == EVERY,
            place=MORE,
        )
        not_looking, not_asked = state["view"] not in LOOKING, "look" not in self.asks
        return [
            self.photograph_control(),
            *(
                [Control("whole", "Whole photo, no cropping", "check", state["whole"])]
                if whole
                else []
            ),
            view_control(state["view"], possible(forward)),
            Control(
                "sinks", "Hide sinks", "check", state["sinks"], hidden=not_looking, place="picture"
            ),
            *self._targets(forward),
            *self.paint_controls(state["view"] == "components"),
            Control(
                "hover",
                "Map follows the pointer",
                "check",
                state["hover"],
                hidden=not_asked,
                place=PAINTING,
            ),
            layer,
            head,
            *self.query_controls(forward, hidden=not row.query),
            *switches(self.model, state["off"], state["way"]),
        ]

    def _targets(self, forward: Forward) -> list[Control]:
        state, row, target = self.state, self.row, self.state["target"]
        typed = (*state["typed"], target, state["against"])
        known = dict.fromkeys([*forward.likeliest, *(k for k in typed if isinstance(k, int))])
        scored = lambda k: forward.score_words(forward.share(k))  # noqa: E731
        named = [(say("named", name=forward.label(k), score=scored(k)), k) for k in known]
        offered = {
            say("a class"): [(say("predicted"), PREDICTED), *named] if forward.likeliest else []
        }
        if row.attributes or not row.explains:
            texts = dict.fromkeys(
                value for value in typed if isinstance(value, tuple) and value[0] == TEXT
            )
            others = [name for name in self.photographs if name != state["photograph"]]
            offered[say("to a text")] = [(say("like a text", name=text[1]), text) for text in texts]
            offered[say("to an image")] = [
                (say("like an image", name=name), (PICTURE, name)) for name in others
            ]
        elif isinstance(target, tuple):
            target = PREDICTED
        groups = tuple((name, len(options)) for name, options in offered.items() if options)
        explained = forward.likeliest[0] if target == PREDICTED and forward.likeliest else target
        rather = [(say("nothing"), NO_OTHER), *((name, k) for name, k in named if k != explained)]
        label, hint = (
            ("Any text", "a photo of a cat")
            if self._reads_text
            else ("Any class", "class name or number")
        )
        hidden, single = not row.explains, not row.contrasts or isinstance(target, tuple)
        another = Control("another", label, "text", state["another"], hint=hint, hidden=hidden)
        return [
            Control(
                "target",
                "Explain",
                "select",
                target,
                tuple(sum(offered.values(), [])),
                groups,
                hidden=hidden,
            ),
            *([another] if self._reads_text or forward.likeliest else []),
            Control(
                "against",
                "Contrast with",
                "select",
                state["against"],
                tuple(rather),
                hidden=hidden or single,
            ),
        ]

    def _bars(self, forward: Forward, whole: Forward) -> list[dict]:
        """Bars of the most probable classes, with their probabilities before heads were switched off."""
        target = self.choice.target
        bars = [
            {
                "number": k,
                "name": forward.label(k),
                "full": forward.full(k),
                "share": forward.share(k),
                "now": k == target,
                "plain": forward.outputs == "value",
            }
            for k in dict.fromkeys([*forward.likeliest[:BARS], *whole.likeliest[:1]])
        ]
        return (
            [bar | {"before": whole.share(bar["number"])} for bar in bars] if forward.off else bars
        )

    def _panel(self, shown: Map, choice: Choice | None = None) -> Panel:
        """Panel of a map, with notes on switched-off heads and a distorted aspect ratio."""
        forward = self.forward
        made = map_panel(forward, self.row, choice or self.choice, self._marked(shown), self.state)
        note = off_words(self.state["off"], self.state["way"]) if forward.off else ""
        if self.state["whole"]:
            (across, down), (height, width) = self.photograph.image.size, forward.grid.image
            squeezed = max(across * height / (down * width), down * width / (across * height))
            note += say("squeezed", times=f"{squeezed:.1f}") if squeezed > 1.2 else ""
        tiles = self.tiles(forward, shown.prefix) if self.row.query else ()
        return replace(made, words=made.words + note, tokens=tiles)

    @property
    def _scores(self) -> tuple[tuple, tuple]:
        """Keys of the curves of random orders and of the map."""
        forward, choice = self.forward, self.choice
        return ("random", forward.key, choice.target, choice.against), ("score", *self._key)

    def _score(self) -> dict | None:
        if not self.row.attributes:
            return None
        random, own = map(self.results.get, self._scores)
        messages = (CANCELED if self._canceled and own is None else None, random, own)
        failed = next((message for message in messages if isinstance(message, str)), None)
        done = failed is None and own is not None and random is not None
        if not done:
            return {"title": say("trust"), "words": failed or say("scoring")}
        forward, choice, shown = self.forward, self.choice, self._made(self.state["view"])
        return {
            "title": say("trust"),
            **covering(forward, choice, shown.values),
            **score(forward, choice, own, random),
        }

    def _marked(self, shown: Map) -> Map:
        """A map of attention with the sinks of its layer."""
        if self.state["view"] not in LOOKING:
            return shown
        key = ("sinks", self.forward.key, self.choice.layer)
        found = self.once(key, lambda: sinks(self.forward, self.choice.layer, unchecked))
        return replace(shown, sinks=tuple(found))

    def _six(self) -> dict | None:
        """The maps of the quick methods, each with its score when it has come."""
        if not self.row.attributes:
            return None
        forward, choice, tiles = self.forward, self.choice, []
        random = self.results.get(self._scores[0])
        for name, view in self._quick.items():
            found, own = self._made(name), self.results.get(("score", forward.key, name, choice))
            tile = {
                "view": name,
                "title": view.entry.split(" (")[0],
                "now": name == self.state["view"],
                "words": "",
            }
            if isinstance(found, Map):
                panel = map_panel(forward, view, choice, found, self.state).message()
                tile |= {
                    key: panel[key]
                    for key in ("rows", "cols", "cell", "values", "scale", "strength", "smooth")
                }
            if isinstance(own, np.ndarray) and isinstance(random, np.ndarray):
                tile["words"] = score(forward, choice, own, random)["short"]
            elif message := next(
                (message for message in (found, own) if isinstance(message, str)), ""
            ):
                tile["failed"] = message
            tiles.append(tile)
        title = say("six unscored" if all("failed" in tile for tile in tiles) else "six")
        return {"title": title, "picture": "picture", "tiles": tiles}

    def _mosaic(self, check: Check) -> dict | None:
        """The maps of all heads from the query, by which layer, head and switched-off heads are chosen."""
        forward, row, choice = self.forward, self.row, self.choice
        if not row.layered:
            return None
        key = ("mosaic", forward.key, self.query)
        maps, tops = self.once(key, lambda: head_maps(forward, self.query, check))
        distances = self.results.get(("distance", forward.key))
        heads = range(forward.heads)
        single = heads if row.head in ("each", "added") else [None] * forward.heads
        picks = {"": [None, None], "added": [SUM, None]}.get(row.head, [MEAN, MAX])
        return {
            "titles": [say("mosaic", source=query_words(forward, self.query)), say("distances")],
            "layers": maps.shape[0],
            "rows": maps.shape[2],
            "cols": maps.shape[3],
            "maps": maps.tobytes(),
            "tops": tops.tolist(),
            "colors": TILES,
            "names": [say("mean row"), say("max row"), say("head", head=0), *map(str, heads[1:])],
            "picks": [*picks, *single],
            "layer": None if choice.head == EVERY else choice.layer,
            "head": choice.head if row.head else None,
            "distances": distances.tolist() if isinstance(distances, np.ndarray) else None,
            "uniform": forward.grid.uniform_distance(),
            "off": self.state["off"],
            "pool": self._pool,
        }

    @property
    def _stem(self) -> str:
        """Beginning of the names of saved files."""
        return "vitlens-" + re.sub(r"\W+", "-", PurePath(self.state["photograph"]).stem).strip("-")

    def _page(self) -> Callable[[Check], dict[str, bytes]]:
        """Function for the long lane that writes the photograph and its maps as a page, by its file name."""
        page, name = copy.copy(self), f"{self._stem}.html"
        page.results, page._forwards = (
            {},
            self._forwards.copy(),
        )  # the quick lane goes on with its own

        def write(check: Check) -> dict[str, bytes]:
            with tempfile.TemporaryDirectory() as folder:
                path = self.write_page(
                    page, [page.state["photograph"]], Path(folder, name), check=check
                )
                return {path.name: path.read_bytes()}

        return write

    def _finish(self, key, value):
        if key[0] == "page" and not isinstance(value, Exception):
            self.files.append((key[1], value))
            value = None
        super()._finish(key, value)

    def _saved(self, shown: Map) -> dict[str, bytes]:
        """A zip file by its name, with the figure and its score, all numbers, and the settings."""
        panel, arrays = (
            self._panel(shown),
            {"values": shown.values, "pixels": self.forward.pixels, **shown.arrays},
        )
        score = measured if (measured := self._score()) and "curves" in measured else None
        if score:
            panel = replace(panel, words=f"{panel.words} {score['words']}")
            arrays |= {"shares": score["shares"], **score["curves"]}
        visible = {
            c.name: c.value
            for c in self.controls()
            if not (c.hidden or c.disabled or c.kind == "text")
        }
        about = {
            "model": self.forward.name,
            "weights": weights_digest(self.model),
            "vitlens": __version__,
        }
        about |= {"words": panel.words, **visible}
        for name in ("hover", *(() if self.state["off"] else ("off", "way"))):
            about.pop(name, None)
        name = f"{self._stem}-{about['view']}" + (
            f"-layer{about['layer']}" if "layer" in about else ""
        )
        with zipfile.ZipFile(file := io.BytesIO(), "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(f"{name}.png", figure_png(self.forward, panel, score))
            archive.writestr(f"{name}.json", json.dumps(about, indent=2, ensure_ascii=False))
            with archive.open(f"{name}.npz", "w") as numbers:
                np.savez_compressed(numbers, **arrays)
        return {f"{name}.zip": file.getvalue()}


def instead(way: str) -> str:
    """Label of the output of a switched-off head."""
    return say(f"by {way}", count=len(sample_photographs()))


def off_words(heads: tuple[Head, ...], way: str) -> str:
    """Sentence about switched-off heads with a leading space, or ""."""
    if not heads:
        return ""
    names = [say("head of", head=head, layer=_layer(layer)) for layer, head in heads]
    which = ", ".join(names) if len(names) <= 4 else say("count of heads", count=len(names))
    return say(
        "off" if len(names) == 1 else "all off",
        heads=which,
        way=instead(way).replace("their", "its"),
    )


def _layer(layer: int | str) -> str:
    return say("the pool") if layer == "pool" else say("layer", layer=layer)


def _places(model: nn.Module) -> dict[Head, object]:
    """Places of all heads by layer, with the attention pool last."""
    places = head_places(model, attention_modules(model))
    return {("pool" if place.layer == POOL else place.layer, place.part): place for place in places}


def listed(model: nn.Module, heads: object) -> tuple[Head, ...]:
    """Heads in the order of layers. Raises ValueError for unknown heads."""
    pairs, every = {(layer, head) for layer, head in heads}, [*_places(model)]
    if unknown := pairs.difference(every):
        raise ValueError(
            f"(layer, head) must be from {every[0]} to {every[-1]}, got {unknown.pop()!r}."
        )
    return tuple(head for head in every if head in pairs)


def switches(model: nn.Module, off: tuple[Head, ...], way: str) -> list[Control]:
    """Controls that switch heads off."""
    every = tuple(
        (f"{_layer(layer)}, head {head}", (layer, head)) for layer, head in _places(model)
    )
    ways = tuple((instead(way), way) for way in WAYS)
    return [
        Control("off", "Heads that are off", "switches", off, every),
        Control("way", "Replace with", "select", way, ways, hidden=not off, place="heads"),
    ]


def means(model: nn.Module, batch: Tensor, check: Check) -> dict[Head, Tensor]:
    """Mean output (T, K) of each head over the sample photographs, at the image size of `batch`."""
    places = _places(model)

    def batches() -> Iterator[Tensor]:
        for photograph in sample_photographs().values():
            check()
            yield preprocess(model, photograph.image, size=tuple(batch.shape[-2:])).to(batch)

    values = mean_outputs(model, attention_modules(model), places.values(), batches())
    return {head: values[place].to(batch.dtype) for head, place in places.items()}
