"""The explorer: every view of one picture, for every layer and head, from any patch, for any class or likeness."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from vitlens.attribution.target import classes
from vitlens.models import require_classes
from vitlens.recorder.supported import attention_modules, embeds_texts, unwrap
from vitlens.widgets.likeness import PICTURE, TEXT, Likeness
from vitlens.widgets.panels import panel, view_control
from vitlens.widgets.pictured import EARLIER, LARGEST, PAINT, UPLOADED, Pictured
from vitlens.widgets.reasons import LONGEST, is_scored, long, possible, scored, seconds, views
from vitlens.widgets.saving import captioned, numbers
from vitlens.widgets.stage import Control, Panel
from vitlens.widgets.subjects import Subject, size_for, subject
from vitlens.widgets.switches import ALL_ON, AVERAGE, Off, known, listed, means, switches
from vitlens.widgets.views import EVERY, MEAN, Choice, Map, View, asked, percent
from vitlens.widgets.worker import RUNNING, pause


def explore(model: nn.Module, image=None, *, size: tuple[int, int] | None = None) -> Explorer:
    """An interactive page for one image: choose a view, a layer and a head, and click a patch to look from it, or a
    class to see what speaks for it and how far to trust that map. What is explained may also be a likeness, to another
    picture or, for models with a text tower, to a text.

    model: any Vision Transformer that `capture` takes. image: what `load_image` takes; by default one of six
    sample photographs. Others can be uploaded. size: (height, width) in pixels to show it at, for models that take
    several sizes. Raises UnsupportedModelError for other models and ImageError for what is no image.
    """
    return Explorer(model, image, size=size)


PREDICTED, NO_OTHER = "predicted", "none"
BARS = 5
TYPED = 10
"""The menus offer the likeliest classes, and the last classes and texts that were typed, up to this number."""
CLASS, KINDS = "class", {"class": "A class", TEXT: "Likeness to a text", PICTURE: "Likeness to a picture"}
"""What can be explained, and the groups of the menu."""


def kind(asked_for: object) -> str:
    """Of PREDICTED, the number of a class, or a pair such as (PICTURE, "coffee") or (TEXT, "a cup of coffee")."""
    return asked_for[0] if isinstance(asked_for, tuple) else CLASS


class Explorer(Pictured):
    """What `explore` returns.

    `set(view="rollout", layer=3, row=2, column=5)` or `set(view="relevance", target=281)` moves its controls. A class
    is a number or a name; `target=("picture", "coffee")` is the likeness to a photograph of the menu, and
    `target=("text", "a cup of coffee")` that to a text; `against` is another of the same kind.
    `set(off=[(0, 2), (3, 1)], way="zero")` switches heads off, by (layer, head). `view()` is the map that is shown, and
    `subject` the image as the model saw it.
    """

    def __init__(self, model: nn.Module, image, *, size: tuple[int, int] | None):
        layers = len(attention_modules(unwrap(model)))  # refuses models without maps
        self._view, self._switching = None, False
        super().__init__(
            model, image, size=size, whole=False, view="attention", layer=layers - 1, head=MEAN, target=PREDICTED,
            against=NO_OTHER, another="", typed=(), off=(), way=AVERAGE, **PAINT,
        )  # fmt: skip

    def take(self, content, buffers):
        if "pick" in content:
            self.look_from(content["row"], content["col"])
        elif "why" in content:
            explaining = [name for name, view in possible(self.subject).items() if view.explains and not view.layered]
            view = self.state["view"] if self.row.explains else explaining[0]
            self.change(view=view, target=content["why"])
        elif content.get("press") == "switches":  # they are in sight now
            self._switching = True
        elif content.get("press") == "save":
            self._save(content.get("number", 0))
        else:
            return super().take(content, buffers)
        return ""

    def draw(self, wanted):
        whole = self._seen_by(ALL_ON)
        if self.state["off"] and self.state["way"] == AVERAGE:
            means(unwrap(self.model), whole.batch, whole.weights, wanted)
        shown = self.subject
        self.fit(shown)
        view = self.view(wanted)
        return {
            "pictures": {"picture": whole.png},
            "panels": [self._panel(view)],
            "bars": self._bars(shown, whole),
            "dots": None if self.row.explains else self._dots(),
            "score": self._score(),
            "parts": None,
            "lens": None,
            **view.beside,
            "about": self.photograph.note,
            "uploads": LARGEST,
            "saves": True,
        }

    def _bars(self, shown: Subject, whole: Subject) -> list[dict]:
        """The likeliest classes, and what they were with all heads on."""
        target = asked(shown, self.choice)[0] if self.row.explains else None
        bars = [
            {"number": k, "name": shown.label(k), "share": shown.share(k), "now": k == target}
            for k in dict.fromkeys([*shown.likeliest[:BARS], *whole.likeliest[:1]])
        ]
        return [bar | {"before": whole.share(bar["number"])} for bar in bars] if shown.off.heads else bars

    def change(self, **values):
        """As in `Stage`. `target`, `against` and `another` take any class of the model, by number or name; `another`
        and `rather` a text, where the model reads texts. Once the picture that the photograph is to be like is chosen
        as the photograph, the two change places."""
        before = self.state
        asks = {"target": PREDICTED, "against": NO_OTHER}
        try:
            if "off" in values:
                values["off"] = listed(unwrap(self.model), values["off"])
            if self._reads_text and isinstance(rather := values.get("rather"), str):
                del values["rather"]
                values["against"] = (TEXT, rather.strip()) if rather.strip() else NO_OTHER
            if isinstance(another := values.get("another"), str) and another.strip():
                values["target"] = (TEXT, another.strip()) if self._reads_text else another.strip()
            elif "target" in values:
                self.state = self.state | {"another": ""}
            for name in asks.keys() & values.keys():
                values[name] = asks[name] if values[name] is None else values[name]
                if isinstance(values[name], list | tuple) and len(values[name]) == 2:
                    values[name] = tuple(values[name])  # the browser sends lists
                elif values[name] != asks[name]:
                    values[name] = self._class(values[name])
                if values[name] != asks[name] and kind(values[name]) != PICTURE:
                    self._remember(values[name])
            super().change(**values)
        except ValueError:
            self.state = before
            raise
        if self.state["target"] == (PICTURE, self.state["photograph"]):
            self.state = self.state | {"target": (PICTURE, before["photograph"])}

    def _remember(self, asked_for: object) -> None:
        """Keep a class or a text in the menus."""
        if kind(asked_for) == TEXT and not self._reads_text:
            raise ValueError(f"{self.subject.name} has no text tower, so it cannot be asked about a text.")
        if asked_for not in (*self.subject.likeliest, *self.state["typed"]):
            self.state = self.state | {"typed": (asked_for, *self.state["typed"])[:TYPED]}

    def upload(self, name, data):
        note = super().upload(name, data)
        renamed = {(PICTURE, UPLOADED): (PICTURE, EARLIER)}
        asks = {each: self.state[each] for each in ("target", "against")}
        self.state = self.state | {each: renamed.get(value, value) for each, value in asks.items()}
        return note

    @property
    def _reads_text(self) -> bool:
        return embeds_texts(unwrap(self.model))

    def _class(self, asked: object) -> int:
        """The number of a class given by number or name. Raises ValueError if there is none."""
        model = unwrap(self.model)
        require_classes(model)
        try:
            return classes(model, torch.zeros(1, self.subject.classes), [asked])[0].item()
        except TypeError as error:
            raise ValueError(str(error)) from error

    def fit(self, subject):
        super().fit(subject)
        here, target = (PICTURE, self.state["photograph"]), self.state["target"]
        if target == here or (target == PREDICTED and not subject.likeliest):
            target = next((PICTURE, name) for name in self.photographs if name != here[1])
        named = subject.likeliest[:1] if target == PREDICTED else [target]
        against = self.state["against"]
        if against in (*named, here) or kind(against) != kind(target):
            against = NO_OTHER
        self.state = self.state | {"target": target, "against": against}

    def afterwards(self, wanted):
        shown, view, choice = self.subject, self.state["view"], self.choice
        if not shown.has("distance"):
            shown.mean_distance(wanted)
            return True
        if self._switching and not known(unwrap(self.model), shown.batch, shown.weights):
            means(unwrap(self.model), shown.batch, shown.weights, wanted)
            return True
        if not self._scores or is_scored(shown, view, choice):
            return False
        if not shown.has("seconds"):
            seconds(shown, wanted)
        elif long(shown, choice) <= LONGEST:
            scored(shown, view, choice, wanted)
        else:
            return False
        return True

    @property
    def subject(self) -> Subject:
        """The photograph as the model saw it, at the size that was chosen, with some heads off."""
        return self._seen_by(Off(self.state["off"], self.state["way"]) if self.state["off"] else ALL_ON)

    def _seen_by(self, off: Off) -> Subject:
        whole = self.state["whole"]
        size = size_for(self.model, self.photograph) if whole and not self.size else self.size
        return subject(self.model, self.photograph, size=size, whole=whole, off=off)

    @property
    def row(self) -> View:
        """The row of the view that is shown."""
        return views()[self.state["view"]]

    @property
    def choice(self) -> Choice:
        """The layer, head, query and classes that are chosen."""
        asks = (self._named(self.state[each]) for each in ("target", "against"))
        return Choice(self.state["layer"], self.row.fitted(self.state["head"]), self.query, *asks)

    def _named(self, asked_for: object) -> int | Likeness | None:
        """What is chosen in a menu, as views take it; None where a view is about classes alone."""
        if kind(asked_for) == CLASS:
            return asked_for if isinstance(asked_for, int) else None
        if not self.row.likes:
            return None
        of, name = asked_for
        if of == TEXT:
            return Likeness(name)
        return Likeness(name, self.photographs[name].key, self.photographs[name].image, self.size)

    def view(self, wanted: Callable[[], bool] = pause) -> Map:
        """The map that is shown."""
        with RUNNING:
            shown = self.subject
            key = (shown.number, self.state["view"], self.choice)
            if (kept := self._view) is None or kept[0] != key:
                self._view = kept = key, self.row.make(shown, key[2], wanted)
            return kept[1]

    def _panel(self, shown: Map) -> Panel:
        """The panel of a map. It is said where the photograph is too long to be shown in its own shape."""
        made = panel(self.subject, self.row, self.choice, shown, self.state)
        made = replace(made, words=made.words + self.subject.off.words)
        if not self.state["whole"]:
            return made
        (across, down), (height, width) = self.photograph.size, self.subject.grid.image
        squeezed = max(across * height / (down * width), down * width / (across * height))
        note = f" The picture is squeezed {squeezed:.1f} times." if squeezed > 1.2 else ""
        return replace(made, words=made.words + note)

    def controls(self) -> list[Control]:
        row, shown = self.row, self.subject
        about = row.explains  # its menus hold only what the view depends on
        inside = [replace(self.layer_control(shown), disabled=row.head == "added" and self.choice.head == EVERY)]
        inside.append(replace(self.head_control(shown, row), hidden=about and not row.head))
        query = self.query_controls(shown, disabled=not row.query)
        inside += [replace(control, hidden=about and not row.query) for control in query]
        whole = size_for(self.model, self.photograph) is not None and not self.size
        return [
            self.photograph_control(),
            *([Control("whole", "Whole picture, in its shape", "check", self.state["whole"])] if whole else []),
            view_control(self.state["view"], possible(shown)),
            *(inside if row.layered else (replace(control, hidden=True) for control in inside)),
            *(replace(control, hidden=control.hidden or not about) for control in self._asking_controls(shown)),
            *self.paint_controls(self.state["view"]),
            *switches(unwrap(self.model), self.state["off"], self.state["way"]),
        ]

    def _asking_controls(self, shown: Subject) -> list[Control]:
        target, against, row = self.state["target"], self.state["against"], self.row
        if row.explains and not row.likes:  # which is about a class, whatever is chosen elsewhere
            target, against = (PREDICTED if kind(each) != CLASS else each for each in (target, against))
        asked, photograph = (*self.state["typed"], target, against), self.state["photograph"]
        known = dict.fromkeys([*shown.likeliest, *(k for k in asked if isinstance(k, int))])
        offered = {
            CLASS: [(f"{shown.label(k)} ({percent(shown.share(k))})", k) for k in known],
            TEXT: [(f"like “{each[1]}”", each) for each in dict.fromkeys(asked) if kind(each) == TEXT],
            PICTURE: [(f"like {name}", (PICTURE, name)) for name in self.photographs if name != photograph],
        }
        if row.explains and not row.likes:
            offered = {CLASS: offered[CLASS]}
        named = shown.likeliest[:1] if target == PREDICTED else [target]
        others = [(name, each) for name, each in offered[kind(target)] if each not in named]
        if shown.likeliest:
            offered[CLASS] = [("the predicted class", PREDICTED), *offered[CLASS]]
        groups = tuple((KINDS[each], len(options)) for each, options in offered.items() if options)
        reads, about_text = self._reads_text, kind(target) == TEXT
        controls = [Control("target", "Explain", "select", target, tuple(sum(offered.values(), [])), groups)]
        if reads or shown.likeliest:
            label, hint = ("Any text", "a photo of a cat") if reads else ("Any class", "name or number")
            controls.append(Control("another", label, "text", self.state["another"], hint=hint))
        controls.append(
            Control("against", "Rather than", "select", against, (("–", NO_OTHER), *others),
                    hidden=not row.contrasts or about_text)
        )  # fmt: skip
        if reads:
            value, hidden = against[1] if kind(against) == TEXT else "", not row.contrasts or not about_text
            controls.append(Control("rather", "Rather than", "text", value, hint="a photo of a dog", hidden=hidden))
        return controls

    @property
    def _scores(self) -> bool:
        """Whether the map that is shown is scored."""
        return self.row.explains and not self.row.layered

    def _score(self) -> dict | None:
        shown, view, choice = self.subject, self.state["view"], self.choice
        if not self._scores:
            return None
        if is_scored(shown, view, choice):
            return scored(shown, view, choice, lambda: True).message()
        if (taking := long(shown, choice)) > LONGEST:
            words = f"Not scored here: it would take about {taking / 60:.0f} minutes. `vitlens explain` does it."
        else:
            words = "Covering and showing patches …"
        return {"title": "How far to trust it", "words": words}

    def _dots(self) -> dict | None:
        if not self.subject.has("distance"):
            return None
        head, goes = self.state["head"], self.row.head == "each"
        return {
            "title": "Mean attention distance (pixels)",
            "values": self.subject.mean_distance().tolist(),
            "uniform": self.subject.grid.uniform_distance(),
            "layer": self.state["layer"],
            "head": head if goes and isinstance(head, int) else None,
            "picks": goes,
        }

    def _save(self, asked: int) -> None:
        """Send the figure with its caption as a PNG, and all numbers as .npz, to the page that asked."""
        shown = self._panel(self.view())
        if score := self._score():
            shown = replace(shown, words=f"{shown.words} {score['words']}")
        set_to = {c.name: c.value for c in self.controls() if not (c.hidden or c.disabled or c.kind == "text")}
        about = {"model": self.subject.name, "words": shown.words, **set_to}
        for name in () if self.state["off"] else ("off", "way"):
            about.pop(name, None)
        name = f"vitlens-{about['view']}" + (f"-layer{about['layer']}" if "layer" in about else "")
        files = {
            f"{name}.png": captioned(self.subject, shown),
            f"{name}.npz": numbers(
                values=shown.values, pixels=self.subject.pixels, about=json.dumps(about), **self.view().arrays
            ),
        }
        self.send({"download": list(files), "asked": asked}, list(files.values()))
