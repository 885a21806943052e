"""The explorer: all views of one image by layer, head, query patch, and class or similarity target."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from vitlens.attribution import METHODS
from vitlens.recorder.supported import attention_modules, has_text_tower, unwrap
from vitlens_explorer import details
from vitlens_explorer.captions import map_panel
from vitlens_explorer.controls import (
    MORE,
    PAINT,
    PAINTING,
    PLAIN,
    Control,
    layer_control,
    paint_controls,
    photograph_control,
    query_controls,
    query_of,
    query_tiles,
    with_query,
)
from vitlens_explorer.heads_off import (
    AVERAGE,
    ZERO,
    head_switches,
    heads_words,
    mean_head_outputs,
    off_words,
    pool_heads,
    sort_heads,
)
from vitlens_explorer.lanes import LARGEST_UPLOAD, Check, Job, never_cancel
from vitlens_explorer.page import Change, Download, Page
from vitlens_explorer.panels import Panel, Scale
from vitlens_explorer.photographs import READOUT, Forward, Gallery, Photograph, fit_place, size_for
from vitlens_explorer.results import CANCELED, Key, Results
from vitlens_explorer.saving import file_stem, settings_of, zip_map
from vitlens_explorer.targets import (
    NO_OTHER,
    PREDICTED,
    change_of_targets,
    explained_target,
    fit_targets,
    target_controls,
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
    curve_forwards,
    curves,
    head_control,
    head_maps,
    head_statistics,
    order_of_covering,
    query_words,
    score,
    sinks,
    supported_views,
    view_control,
    views,
)
from vitlens_explorer.words import percent, say

BARS = 5
LOOKING = ("attention", "received", "rollout")
"""Views that mark sinks."""
TILES = Scale("viridis", 0, 1).table().tobytes()  # colors of the mosaic


class Explorer(Page):
    """The page of `explore`, and of `vitlens app`.

    In its state, `target`, `against` and `typed` are those of `targets.py`, and `off` is the (layer, head) of heads
    that are switched off. guided: the front end shows the tour in place of the explorer.
    """

    plain = PLAIN | {"layer", "hover", "sinks"}
    write_page: Callable | None = None
    """`in_page.write_page`, where the page can be saved as a file, as in the app."""

    def __init__(
        self,
        model: nn.Module,
        image=None,
        *,
        size: tuple[int, int] | None = None,
        guided: bool = False,
    ):
        layers = len(attention_modules(unwrap(model)))  # raises for models without maps
        self.gallery = Gallery(model, size=size)
        super().__init__(
            **self.gallery.first_state(image),
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
        self.model = self.gallery.models[0]
        self.reads_text = has_text_tower(self.model)
        self._pool_heads = pool_heads(self.model)
        self._page_job: Job | None = None  # the page that is being saved

    # ---------------------------------------------------------------- messages

    def begin(self) -> None:
        self.gallery.begin(self.photographs)

    def requested(self, content: dict, buffers: list) -> Change:
        if "set" in content:
            return self._change_of(content["set"])
        if "pick" in content:
            return self._change_of({"row": content["row"], "column": content["col"]})
        if "why" in content:
            name = self.state["view"]
            if not self.row.explains:
                name = self._first_method()
            return self._change_of({"view": name, "target": content["why"]})
        if "upload" in content:
            return Change(others=self.gallery.with_upload(self.state, content, buffers[0]))
        if content.get("press") == "page" and self.write_page:
            self._page_job = self._job_of_page(content.get("number", 0))
        if content.get("press") == "save":
            self.downloads.append(Download(content.get("number", 0), self._zip()))
        return Change()

    def _change_of(self, values: dict) -> Change:
        """Change by values of controls. `target`, `against` and `another` take a class number or name, `another` also a
        text if the model has a text tower."""
        if "off" in values:
            values = values | {"off": sort_heads(self.model, values["off"])}
        values = with_query(values)
        return change_of_targets(self.model, self.forward, self.state, values, self.reads_text)

    def _first_method(self) -> str:
        """Name of the first attribution method that the model supports."""
        supported = supported_views(self.forward)
        return next(name for name, view in supported.items() if view.attributes)

    # ---------------------------------------------------------------- state

    @property
    def photographs(self) -> dict[str, Photograph]:
        return self.state["photographs"]

    @property
    def photograph(self) -> Photograph:
        """The current photograph."""
        return self.photographs[self.state["photograph"]]

    @property
    def note(self) -> str:
        """Notes on the file of the current photograph, and on the part of it that the model sees."""
        return " ".join(filter(None, [self.photograph.note, self.forward.cropped]))

    @property
    def forward(self) -> Forward:
        """Forward of the photograph at the chosen size without the switched-off heads."""
        return self._forward_without(self.state["off"], never_cancel)

    def _forward_without(self, off: tuple, check: Check) -> Forward:
        """Forward without the heads in `off`."""
        way = self.state["way"]
        return self.gallery.forward_of(
            self.model,
            self.photograph,
            whole=self.state["whole"],
            off=(off, way) if off else (),
            outputs=partial(self._outputs_of_heads, off, way, check),
        )

    def _outputs_of_heads(self, off: tuple, way: str, check: Check) -> dict:
        """Outputs of the heads in `off` for `intervene`."""
        if not off or way == ZERO:
            return dict.fromkeys(off, ZERO)
        whole = self._forward_without((), check)
        key = Key("mean head outputs", (whole.weights, tuple(whole.batch.shape)))
        make = partial(mean_head_outputs, self.model, whole.batch, check)
        means = self.results.once(key, make)
        return {head: means[head] for head in off}

    @property
    def row(self) -> View:
        """The current view."""
        return views()[self.state["view"]]

    @property
    def choice(self) -> Choice:
        """Layer, head, query and classes of the current view."""
        state, row, forward = self.state, self.row, self.forward
        target = explained_target(state, forward, row) if row.explains else None
        against = None
        if row.contrasts and state["against"] != NO_OTHER and not isinstance(target, Likeness):
            against = state["against"]
        return Choice(
            layer=state["layer"] if row.layered else 0,
            head=row.head_or_first(state["head"], forward.heads) if row.head else MEAN,
            query=query_of(state) if row.query else READOUT,
            target=target,
            against=against,
        )

    @property
    def asks(self) -> list[str]:
        """Questions that the current view answers."""
        questions = ["tour"]
        if self.row.query and not self.row.explains:
            questions.append("look")
        if self.state["view"] == "attention":
            questions.append("value")
        return questions

    # ---------------------------------------------------------------- controls

    def controls_depend_on(self) -> tuple:
        return self.forward.key, len(views())

    def make_controls(self) -> list[Control]:
        state, row, forward = self.state, self.row, self.forward
        head = head_control(forward, row, state["head"], place=MORE)
        all_layers = row.head == "added" and head.value == EVERY
        controls = [photograph_control(state)]
        if not self.gallery.size and size_for(self.model, self.photograph):
            controls.append(Control("whole", "Whole photo, no cropping", "check", state["whole"]))
        return [
            *controls,
            view_control(state["view"], supported_views(forward)),
            Control(
                "sinks",
                "Hide sinks",
                "check",
                state["sinks"],
                hidden=state["view"] not in LOOKING,
                place="picture",
            ),
            *target_controls(state, forward, row, self.reads_text),
            *paint_controls(state, colored=state["view"] == "components"),
            Control(
                "hover",
                "Map follows the pointer",
                "check",
                state["hover"],
                hidden="look" not in self.asks,
                place=PAINTING,
            ),
            layer_control(state, forward, hidden=not row.layered, disabled=all_layers, place=MORE),
            head,
            *query_controls(state, forward, hidden=not row.query),
            *head_switches(self.model, state["off"], state["way"]),
        ]

    # ---------------------------------------------------------------- maps and jobs

    def _map_key(self, name: str, needed: bool = False) -> Key:
        """Key of the map of a view for the current choice."""
        return Key("map", (self.forward.key, name, self.choice), needed)

    def _score_key(self, name: str) -> Key:
        """Key of the curves of the map of a view."""
        return Key("score", (self.forward.key, name, self.choice))

    def _random_key(self) -> Key:
        """Key of the curves of random orders."""
        choice = self.choice
        return Key("random", (self.forward.key, choice.target, choice.against))

    def _statistics_key(self) -> Key:
        """Key of the distances and entropies of all heads."""
        return Key("statistics", (self.forward.key,))

    def view(self, check: Check = never_cancel) -> Map | Job:
        """The current map, or its job for the long lane."""
        name = self.state["view"]
        key = self._map_key(name, needed=True)
        make = partial(self.row.make, self.forward, self.choice)
        if self.row.slow and key not in self.results:
            return Job(key, make, self.row.entry, self.row.forwards(self.forward))
        found = self._computed_map(name)
        if isinstance(found, Map):
            return found
        return self.results.once(key, partial(make, check))

    def _computed_map(self, name: str) -> Map | str | None:
        """The map of a view for the current choice, or the message of its failure."""
        needed, optional = self._map_key(name, needed=True), self._map_key(name)
        return self.results.get(needed) or self.results.get(optional)

    def _six_methods(self) -> dict[str, View]:
        """Six quick methods, which are shown side by side."""
        methods = {}
        for name, view in supported_views(self.forward).items():
            if view.attributes and not view.slow and METHODS[name].depends_on_target:
                methods[name] = view
        return dict([*methods.items()][:6])

    def job(self) -> Job | None:
        if self._page_job and self._page_job.key not in self.results:
            return self._page_job
        if self.row.attributes and self._map_canceled():
            return None
        missing = (job for job in self._background_jobs() if job.key not in self.results)
        return next(missing, None)

    def _background_jobs(self) -> list[Job]:
        """Jobs for the parts besides the current map, in order."""
        forward, choice = self.forward, self.choice
        statistics = partial(head_statistics, forward)
        jobs = [Job(self._statistics_key(), statistics, "Distance and entropy of all heads")]
        current = self._computed_map(self.state["view"])
        if not (self.row.attributes and isinstance(current, Map)):
            return jobs
        methods = self._six_methods()
        for name, view in methods.items():
            if self._computed_map(name) is None:
                make = partial(view.make, forward, choice)
                jobs.append(Job(self._map_key(name), make, view.entry, 1))
        random = partial(curves, forward, choice, None)
        forwards = curve_forwards(forward, ORDERS)
        jobs.append(Job(self._random_key(), random, "Score of random orders", forwards))
        if isinstance(self.results.get(self._random_key()), str):
            return jobs
        maps = {self.state["view"]: current}
        maps |= {name: self._computed_map(name) for name in methods}
        for name, found in maps.items():
            if isinstance(found, Map):
                make = partial(curves, forward, choice, torch.from_numpy(found.values)[None])
                what = f"Score of {views()[name].entry}"
                jobs.append(Job(self._score_key(name), make, what, curve_forwards(forward, 1)))
        return jobs

    def _map_canceled(self) -> bool:
        """True if the user canceled a map or a score in the background: the others are not computed either."""
        return any(result is CANCELED for key, result in self.results.items() if key.kind != "page")

    # ---------------------------------------------------------------- drawing

    def draw(self, check: Check) -> dict | Job:
        whole = self._forward_without((), check)
        forward = self._forward_without(self.state["off"], check)
        self.state = self.state | fit_place(self.state, forward)
        self.state = self.state | fit_targets(self.state, forward)
        shown = self.view(check)
        if isinstance(shown, Job):
            return shown
        return {
            "pictures": {"picture": whole.png},
            "panels": [self._panel(shown)],
            "bars": self._bars(forward, whole),
            "challenge": self._challenge(forward, whole),
            "mosaic": self._mosaic(check),
            "six": self._six(),
            "score": self._score(),
            "parts": None,
            "lens": None,
            **shown.beside,
            "about": self.note,
            "model": forward.name,
            "headline": say("headline"),
            "lead": say("lead"),
            "doubt": forward.doubt,
            "knows": self._knows(),
            "pages": self.write_page is not None,
            "uploads": LARGEST_UPLOAD,
            "saves": True,
            "asks": self.asks,
            "tour": self.guided,
        }

    def _knows(self) -> str:
        """The heading of the list of classes, or "" for a model without names of classes."""
        forward = self.forward
        if not (forward.classes and forward.names):
            return ""
        return say("knows", count=f"{forward.classes:,}")

    def _challenge(self, forward: Forward, whole: Forward) -> dict | None:
        """What switched-off heads did to the likeliest class, or the question which do. None without probabilities."""
        if forward.outputs != "classes" or whole.classes < 2:
            return None
        seen = whole.likeliest[0]
        now = forward.likeliest[0]
        before = percent(whole.share(seen))
        after = percent(forward.share(seen))
        fields = {"name": whole.label(seen), "before": before, "after": after}
        sentence = "challenge"
        if forward.off:
            fields |= {"heads": heads_words(self.state["off"])}
            sentence = "challenge on"
        if now != seen:
            fields |= {"other": forward.label(now), "share": percent(forward.share(now))}
            sentence = "challenge won"
        return {
            "words": say(sentence, **fields),
            "change": f"{before} → {after}" if forward.off else "",
            "won": now != seen,
        }

    def _bars(self, forward: Forward, whole: Forward) -> list[dict]:
        """Bars of the most probable classes, with their probabilities before heads were switched off."""
        target = self.choice.target
        bars = []
        for number in dict.fromkeys([*forward.likeliest[:BARS], *whole.likeliest[:1]]):
            bar = {
                "number": number,
                "name": forward.label(number),
                "full": forward.full(number),
                "share": forward.share(number),
                "now": number == target,
                "plain": forward.outputs == "value",
            }
            if forward.off:
                bar["before"] = whole.share(number)
            bars.append(bar)
        return bars

    def _panel(self, shown: Map, choice: Choice | None = None) -> Panel:
        """Panel of a map, with notes on switched-off heads and a distorted aspect ratio."""
        forward, row = self.forward, self.row
        panel = map_panel(forward, row, choice or self.choice, self._with_sinks(shown), self.state)
        note = off_words(self.state["off"], self.state["way"]) if forward.off else ""
        if self.state["whole"]:
            across, down = self.photograph.image.size
            height, width = forward.grid.image
            squeezed = max(across * height / (down * width), down * width / (across * height))
            if squeezed > 1.2:
                note += say("squeezed", times=f"{squeezed:.1f}")
        tiles = query_tiles(self.state, forward, shown.prefix) if row.query else ()
        plain = panel.plain and panel.plain + note
        return replace(panel, words=panel.words + note, plain=plain, tokens=tiles)

    def _with_sinks(self, shown: Map) -> Map:
        """A map of attention with the sinks of its layer."""
        if self.state["view"] not in LOOKING:
            return shown
        layer = self.choice.layer
        key = Key("sinks", (self.forward.key, layer))
        find = partial(sinks, self.forward, layer, never_cancel)
        return replace(shown, sinks=tuple(self.results.once(key, find)))

    def _score(self) -> dict | None:
        """The score of the current map, or a sentence in its place."""
        if not self.row.attributes:
            return None
        name = self.state["view"]
        random = self.results.get(self._random_key())
        own = self.results.get(self._score_key(name))
        title = say("trust")
        if self._map_canceled() and own is None:
            return {"title": title, "words": CANCELED}
        for result in (random, own):
            if isinstance(result, str):
                return {"title": title, "words": result}
        if random is None or own is None:
            return {"title": title, "words": say("scoring")}
        forward, choice = self.forward, self.choice
        values = self._computed_map(name).values
        measures = score(forward, choice, own, random)
        return {"title": title, **order_of_covering(forward, choice, values), **measures}

    def _six(self) -> dict | None:
        """The maps of the quick methods, each with its score when it has come."""
        if not self.row.attributes:
            return None
        tiles = [self._tile(name, view) for name, view in self._six_methods().items()]
        unscored = all("failed" in tile for tile in tiles)
        title = say("six unscored" if unscored else "six")
        return {"title": title, "picture": "picture", "tiles": tiles}

    def _tile(self, name: str, view: View) -> dict:
        """A map of `_six`."""
        forward, choice = self.forward, self.choice
        found = self._computed_map(name)
        random = self.results.get(self._random_key())
        own = self.results.get(self._score_key(name))
        tile = {
            "view": name,
            "title": view.entry.split(" (")[0],
            "now": name == self.state["view"],
            "words": "",
        }
        if isinstance(found, Map):
            panel = map_panel(forward, view, choice, found, self.state).message()
            fields = ("rows", "cols", "cell", "values", "scale", "strength", "smooth", "ends")
            tile |= {field: panel[field] for field in fields}
        messages = [result for result in (found, own) if isinstance(result, str)]
        if isinstance(own, np.ndarray) and isinstance(random, np.ndarray):
            tile["words"] = score(forward, choice, own, random)["short"]
        elif messages and messages[0]:
            tile["failed"] = messages[0]
        return tile

    def _mosaic(self, check: Check) -> dict | None:
        """The maps of all heads from the query, by which layer, head and switched-off heads are chosen."""
        forward, row, choice = self.forward, self.row, self.choice
        if not row.layered:
            return None
        query = query_of(self.state)
        key = Key("mosaic", (forward.key, query))
        maps, tops = self.results.once(key, partial(head_maps, forward, query, check))
        statistics = self.results.get(self._statistics_key())
        distances, entropies = None, None
        if isinstance(statistics, np.ndarray):
            distances, entropies = statistics.tolist()
        heads = range(forward.heads)
        combined = {"": [None, None], "added": [SUM, None]}.get(row.head, [MEAN, MAX])
        single = heads if row.head in ("each", "added") else [None] * forward.heads
        return {
            "titles": [say("mosaic", source=query_words(forward, query)), say("distances")],
            "layers": maps.shape[0],
            "rows": maps.shape[2],
            "cols": maps.shape[3],
            "maps": maps.tobytes(),
            "tops": tops.tolist(),
            "colors": TILES,
            "names": [say("mean row"), say("max row"), say("head", head=0), *map(str, heads[1:])],
            "picks": [*combined, *single],
            "layer": None if choice.head == EVERY else choice.layer,
            "head": choice.head if row.head else None,
            "distances": distances,
            "entropies": entropies,
            "uniform": forward.grid.uniform_distance(),
            "off": self.state["off"],
            "pool": self._pool_heads,
        }

    # ---------------------------------------------------------------- questions

    def look_up(self, content: dict, check: Check) -> tuple[dict, list[bytes]]:
        if content["ask"] == "look":
            return self._look((content["row"], content["col"]), check)
        state, choice = self.state, self.choice
        layer = content.get("layer", state["layer"])
        if content["ask"] == "tour":
            answer = self._tour(layer, content.get("head", state["head"]), content.get("key"))
        elif content["ask"] == "names":
            answer = {"names": [self.forward.full(k) for k in range(self.forward.classes)]}
        else:
            head = content.get("head", choice.head)
            query = content.get("query", query_of(state))
            if isinstance(query, list):
                query = tuple(query)
            answer = details.value(self.forward, layer, head, query, content.get("key"))
        colors = Scale("viridis", 0, 1).table(0.9, "value")  # of small maps
        return answer, [colors.tobytes()]

    def _tour(self, layer: int, head: int | str, key: list[int] | None = None) -> dict:
        """The numbers of the tour for the chosen patch in a layer. key: another patch, default its strongest one."""
        state = self.state
        single = head if isinstance(head, int) else MEAN
        return details.tour(self.forward, layer, single, state["row"], state["column"], key)

    def tour_steps(self) -> list[str]:
        """The sentences of the tour if the front end shows it in place of the explorer."""
        if not self.guided:
            return []
        return self._tour(self.state["layer"], self.state["head"])["sentences"]

    def _look(self, patch: tuple[int, int], check: Check) -> tuple[dict, list[bytes]]:
        """The map from a patch under the pointer."""
        choice = replace(self.choice, query=patch)
        shown = self.row.make(self.forward, choice, check)
        panel = self._panel(shown, choice).message()
        buffers = [panel["values"], panel["scale"]["colors"]]
        return panel | {"values": None, "scale": panel["scale"] | {"colors": None}}, buffers

    # ---------------------------------------------------------------- files

    def _zip(self) -> dict[str, bytes]:
        """The zip file of the current map by its name."""
        shown = self.view()
        if isinstance(shown, Job):
            raise ValueError("This map is still being computed. Save it after it is shown.")
        keys = (self._random_key(), self._score_key(self.state["view"]))
        unscored = any(key not in self.results for key in keys)
        if self.row.attributes and unscored and self.job():
            raise ValueError(
                "The score of this map is still being computed. Save the map after it, or cancel it."
            )
        measured = self._score()
        if measured and "curves" not in measured:
            measured = None
        stem = file_stem(self.state["photograph"])
        settings = settings_of(self.make_controls())
        return zip_map(stem, self.forward, self._panel(shown), shown, measured, settings)

    def _job_of_page(self, number: int) -> Job:
        """Job that writes the photograph and its maps as a page."""
        page = copy.copy(self)  # the quick lane goes on with its own results and forwards
        page.results = Results()
        page.gallery = self.gallery.copy()
        photograph = self.state["photograph"]
        name = f"{file_stem(photograph)}.html"

        def write(check: Check) -> Download:
            with tempfile.TemporaryDirectory() as folder:
                path = self.write_page(page, [photograph], Path(folder, name), check=check)
                return Download(number, {name: path.read_bytes()})

        forward = self.forward
        forwards = curve_forwards(forward, ORDERS) + curve_forwards(forward, len(METHODS))
        return Job(Key("page", (number,)), write, "Page", forwards)
