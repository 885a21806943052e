"""The explorer: every view of one image, for every layer and head, from any patch, for any class or likeness."""

from __future__ import annotations

import difflib
import functools
import io
import json
from dataclasses import replace
from functools import partial

import numpy as np
from torch import nn

from vitlens.recorder.supported import attention_modules, embeds_texts, unwrap
from vitlens.widgets.drawing import captioned
from vitlens.widgets.heads_off import AVERAGE, ZERO, listed, means, off_words, switches
from vitlens.widgets.lanes import LARGEST, Job
from vitlens.widgets.page import Control, Later, Panel
from vitlens.widgets.photographs import EARLIER, PAINT, UPLOADED, Forward, Pictured, size_for
from vitlens.widgets.views import (
    EVERY,
    MEAN,
    Choice,
    Likeness,
    Map,
    View,
    head_control,
    map_panel,
    possible,
    score,
    view_control,
    views,
)

PREDICTED, NO_OTHER, PICTURE, TEXT = "predicted", "none", "picture", "text"
BARS = 5
TYPED = 10
"""The menus offer the likeliest classes, and the last classes and texts that were typed, up to this number."""


class Explorer(Pictured):
    """The page of `explore`, and of `vitlens app`.

    In its state, `target` is PREDICTED, a class number, (PICTURE, name of a photograph) or (TEXT, prompt), `against`
    NO_OTHER or a class number, and `off` the (layer, head) of heads that are switched off.
    """

    plain = Pictured.plain | {"layer"}

    def __init__(self, model: nn.Module, image=None, *, size: tuple[int, int] | None = None):
        layers = len(attention_modules(unwrap(model)))  # refuses models without maps
        super().__init__(
            model, image, size=size, whole=False, view="attention", layer=layers - 1, head=MEAN, target=PREDICTED,
            against=NO_OTHER, another="", typed=(), off=(), way=AVERAGE, **PAINT,
        )  # fmt: skip

    def take(self, content, buffers):
        if "pick" in content:
            self.change(row=int(content["row"]), column=int(content["col"]))
        elif "why" in content:
            explaining = [name for name, view in possible(self.forward).items() if view.explains and not view.layered]
            self.change(view=self.state["view"] if self.row.explains else explaining[0], target=content["why"])
        elif content.get("press") == "save":
            try:
                files = self._saved()
            except Later:
                raise ValueError("This map is still being computed. Save it once it is shown.") from None
            self._files.append((content.get("number", 0), files))
        else:
            return super().take(content, buffers)
        return ""

    def draw(self, check):
        whole = self._seen_by(False, check)
        forward = self._seen_by(True, check)
        self.fit(forward)
        shown = self.view(check)
        return {
            "pictures": {"picture": whole.png},
            "panels": [self._panel(shown)],
            "bars": self._bars(forward, whole),
            "dots": None if self.row.explains else self._dots(),
            "score": self._score(),
            "parts": None,
            "lens": None,
            **shown.beside,
            "about": self.photograph.note,
            "uploads": LARGEST,
            "saves": True,
        }

    def job(self):
        forward, choice = self.forward, self.choice
        jobs = [Job(("distance", forward.key), forward.mean_distance)]
        if self._scored and (shown := self.results.get(self._key)):
            random = self.results.get(("random", forward.key, choice.goal(forward)))
            jobs.append(Job(("score", *self._key), partial(score, forward, choice, shown.values, random)))
        return next((job for job in jobs if not {job.key, ("failed", *job.key)} & self.results.keys()), None)

    def keep(self, key, value):
        random = value.pop("random", None) if key[0] == "score" else None
        forward = self._forwards.get(key[1])  # that of the score, whose photograph may not be shown now
        if random is not None and forward is not None:
            super().keep(("random", key[1], key[3].goal(forward)), {"curves": random})
        return super().keep(key, value)

    @property
    def row(self) -> View:
        """The row of the view that is shown."""
        return views()[self.state["view"]]

    @property
    def choice(self) -> Choice:
        """The layer, head, query and classes on which the view depends."""
        state, target = self.state, self.state["target"]
        if target == PREDICTED or (isinstance(target, tuple) and not self.row.likes):
            target = None
        elif isinstance(target, tuple):
            photograph = self.photographs[target[1]] if target[0] == PICTURE else None
            target = Likeness(target[1], *([photograph.number, photograph.image] if photograph else []))
        against = None if state["against"] == NO_OTHER or isinstance(target, Likeness) else state["against"]
        choice = Choice(state["layer"], self.row.fitted(state["head"]), self.query, target, against)
        return self.row.matters(choice)

    @property
    def forward(self) -> Forward:
        """The forward of the photograph, at the size that was chosen, with some heads off."""
        return self._seen_by(True, lambda: None)

    def view(self, check=lambda: None) -> Map:
        """The map that is shown. Raises `Later` for a map of the long lane."""
        make = partial(self.row.make, self.forward, self.choice)
        if self.row.slow and self._key not in self.results:
            raise Later(Job(self._key, make))
        return self.once(self._key, lambda: make(check))

    @property
    def _key(self) -> tuple:
        """Equal for equal maps."""
        return self.forward.key, self.state["view"], self.choice

    def _seen_by(self, switched: bool, check) -> Forward:
        """The forward with all heads on, or with those off that are switched off."""
        whole, off, way = self.state["whole"], self.state["off"] if switched else (), self.state["way"]
        size = size_for(self.model, self.photograph) if whole and not self.size else self.size

        def values() -> dict:
            if not off or way == ZERO:
                return dict.fromkeys(off, ZERO)
            batch = self._seen_by(False, check).batch
            key = ("means", self._weights[id(self.model)], tuple(batch.shape))
            given = self.once(key, lambda: means(self.model, batch, check))
            return {head: given[head] for head in off}

        switches = (off, way) if off else ()
        return self.forward_of(self.model, self.photograph, size=size, whole=whole, off=switches, values=values)

    def change(self, **values):
        """As in `Page`. `target`, `against` and `another` take any class of the model, by number or name; `another` a
        text, if the model reads texts."""
        before = self.state
        if "off" in values:
            values["off"] = listed(self.model, values["off"])
        if isinstance(another := values.get("another"), str) and another.strip():
            values["target"] = (TEXT, another.strip()) if self._reads_text else another.strip()
        elif "target" in values:
            self.state = self.state | {"another": ""}
        try:
            for name, nothing in (("target", PREDICTED), ("against", NO_OTHER)):
                value = values.get(name, nothing)
                if isinstance(value, list | tuple) and len(value) == 2:
                    values[name] = tuple(value)  # the browser sends lists
                    if value[0] == TEXT:
                        self._offer(values[name])
                elif value not in (None, nothing):
                    values[name] = class_number(self.forward, value)
                    self._offer(values[name])
                elif name in values:
                    values[name] = nothing
            super().change(**values)
        except ValueError:
            self.state = before
            raise
        if self.state["target"] == (PICTURE, self.state["photograph"]):  # the two change places
            self.state = self.state | {"target": (PICTURE, before["photograph"])}

    def _offer(self, target: object) -> None:
        """Add a class or a text to the menus."""
        if isinstance(target, tuple) and not self._reads_text:
            raise ValueError(f"{self.forward.name} has no text tower, so a text cannot be its target.")
        if target not in (*self.forward.likeliest, *self.state["typed"]):
            self.state = self.state | {"typed": (target, *self.state["typed"])[:TYPED]}
            self._renew_controls()

    def upload(self, name, data):
        note = super().upload(name, data)
        if self.state["target"] == (PICTURE, UPLOADED):
            self.state = self.state | {"target": (PICTURE, EARLIER)}
        return note

    @property
    def _reads_text(self) -> bool:
        return embeds_texts(self.model)

    def fit(self, forward):
        super().fit(forward)
        target, against = self.state["target"], self.state["against"]
        if target == PREDICTED and not forward.likeliest:
            target = next((PICTURE, name) for name in self.photographs if name != self.state["photograph"])
        if isinstance(target, tuple) and target[0] == PICTURE and target[1] not in self.photographs:
            target = PREDICTED if forward.likeliest else target
        if against == (forward.likeliest[:1] or [None])[0] if target == PREDICTED else against == target:
            against = NO_OTHER
        self.state = self.state | {"target": target, "against": against}

    def menus(self):
        return super().menus(), len(views())

    def controls(self) -> list[Control]:
        row, forward, state = self.row, self.forward, self.state
        head = head_control(forward, row, state["head"])
        whole = size_for(self.model, self.photograph) is not None and not self.size
        layer = self.layer_control(
            forward, hidden=not row.layered, disabled=row.head == "added" and head.value == EVERY
        )
        return [
            self.photograph_control(),
            *([Control("whole", "Whole image, in its shape", "check", state["whole"])] if whole else []),
            view_control(state["view"], possible(forward)),
            layer,
            head,
            *self.query_controls(forward, hidden=not row.query),
            *(replace(control, hidden=control.hidden or not row.explains) for control in self._targets(forward)),
            *self.paint_controls(state["view"] == "components"),
            *switches(self.model, state["off"], state["way"]),
        ]

    def _targets(self, forward: Forward) -> list[Control]:
        state, target = self.state, self.state["target"]
        typed = (*state["typed"], target, state["against"])
        known = dict.fromkeys([*forward.likeliest, *(k for k in typed if isinstance(k, int))])
        classes = [(f"{forward.label(k)} ({forward.score_words(forward.share(k))})", k) for k in known]
        offered = {"A class": [("the predicted class", PREDICTED), *classes] if forward.likeliest else []}
        if self.row.likes or not self.row.explains:
            texts = dict.fromkeys(each for each in typed if isinstance(each, tuple) and each[0] == TEXT)
            others = [name for name in self.photographs if name != state["photograph"]]
            offered["Likeness to a text"] = [(f"like “{each[1]}”", each) for each in texts]
            offered["Likeness to an image"] = [(f"like {name}", (PICTURE, name)) for name in others]
        elif isinstance(target, tuple):
            target = PREDICTED
        groups = tuple((name, len(options)) for name, options in offered.items() if options)
        explained = forward.likeliest[0] if target == PREDICTED and forward.likeliest else target
        rather = [("–", NO_OTHER), *((name, k) for name, k in classes if k != explained)]
        label, hint = ("Any text", "a photo of a cat") if self._reads_text else ("Any class", "name or number")
        any_class = [Control("another", label, "text", state["another"], hint=hint)]
        return [
            Control("target", "Explain", "select", target, tuple(sum(offered.values(), [])), groups),
            *(any_class if self._reads_text or forward.likeliest else []),
            Control("against", "Rather than", "select", state["against"], tuple(rather),
                    hidden=not self.row.contrasts or isinstance(target, tuple)),
        ]  # fmt: skip

    def _bars(self, forward: Forward, whole: Forward) -> list[dict]:
        """The likeliest classes, and their probabilities with all heads on."""
        target = self.choice.goal(forward)[0] if self.row.explains else None
        bars = [
            {"number": k, "name": forward.label(k), "share": forward.share(k), "now": k == target,
             "plain": forward.outputs == "value"}
            for k in dict.fromkeys([*forward.likeliest[:BARS], *whole.likeliest[:1]])
        ]  # fmt: skip
        return [bar | {"before": whole.share(bar["number"])} for bar in bars] if forward.off else bars

    def _panel(self, shown: Map) -> Panel:
        """The panel of a map, with a note where the photograph is too long for its own shape."""
        forward = self.forward
        made = map_panel(forward, self.row, self.choice, shown, self.state)
        note = off_words(self.state["off"], self.state["way"]) if forward.off else ""
        if self.state["whole"]:
            (across, down), (height, width) = self.photograph.size, forward.grid.image
            squeezed = max(across * height / (down * width), down * width / (across * height))
            note += f" The image is squeezed {squeezed:.1f} times." if squeezed > 1.2 else ""
        return replace(made, words=made.words + note)

    @property
    def _scored(self) -> bool:
        """Whether the map that is shown has a score."""
        return self.row.explains and not self.row.layered

    def _score(self) -> dict | None:
        failed = self.results.get(("failed", "score", *self._key)) if self._scored else None
        waiting = {"title": "How far to trust it", "words": failed or "Covering and showing patches …"}
        return self.results.get(("score", *self._key), waiting) if self._scored else None

    def _dots(self) -> dict | None:
        forward, head = self.forward, self.state["head"]
        if (distances := self.results.get(("distance", forward.key))) is None:
            return None
        goes = self.row.head == "each"
        return {
            "title": "Mean attention distance (pixels)", "values": distances.tolist(),
            "uniform": forward.grid.uniform_distance(), "layer": self.state["layer"],
            "head": head if goes and isinstance(head, int) else None, "picks": goes,
        }  # fmt: skip

    def _saved(self) -> dict[str, bytes]:
        """Files: the figure with its caption, and all numbers."""
        shown = self.view()
        panel = self._panel(shown)
        if measured := self._score():
            panel = replace(panel, words=f"{panel.words} {measured['words']}")
        visible = {c.name: c.value for c in self.shown.values() if not (c.hidden or c.disabled or c.kind == "text")}
        about = {"model": self.forward.name, "words": panel.words, **visible}
        for name in () if self.state["off"] else ("off", "way"):
            about.pop(name, None)
        name = f"vitlens-{about['view']}" + (f"-layer{about['layer']}" if "layer" in about else "")
        arrays = {"values": shown.values, "pixels": self.forward.pixels, "about": json.dumps(about), **shown.arrays}
        np.savez_compressed(file := io.BytesIO(), **arrays)
        return {f"{name}.png": captioned(self.forward, panel), f"{name}.npz": file.getvalue()}


def class_number(forward: Forward, target: object) -> int:
    """The number of a class given by number or name, a name first. Raises ValueError if it does not exist."""
    if not forward.classes:
        raise ValueError(f"{forward.name} has no classifier head, so no class can be its target.")
    names = by_name(tuple(forward.names or ()))
    text = str(target).strip()
    if not isinstance(target, bool | float) and text.lower() in names:
        return names[text.lower()]
    if isinstance(target, int | str) and text.isdigit() and int(text) < forward.classes:
        return int(text)
    near = difflib.get_close_matches(text.lower(), names, 3)
    hint = f" Did you mean {', '.join(near)}?" if near else ""
    raise ValueError(
        f"{forward.name} has no class {target!r}; its classes are numbered from 0 to {forward.classes - 1}.{hint}"
    )


@functools.lru_cache(8)
def by_name(names: tuple[str, ...]) -> dict[str, int]:
    """The number of each class by its name, and by each synonym that a single class has, in lower case."""
    numbers: dict[str, set[int]] = {}
    for number, name in enumerate(names):
        for each in (name, *name.split(",")):
            numbers.setdefault(each.strip().lower(), set()).add(number)
    return {name: min(found) for name, found in numbers.items() if len(found) == 1}
