"""The explorer: one picture, every view of it, every layer and head, from any patch."""

from __future__ import annotations

import json
from collections.abc import Callable

from torch import nn

from vitlens.support import attention_modules, unwrap
from vitlens.widgets.paint import scale_of
from vitlens.widgets.pictured import PAINT, Pictured
from vitlens.widgets.saving import captioned, numbers
from vitlens.widgets.stage import Control, Panel
from vitlens.widgets.subject import Subject, size_for, subject
from vitlens.widgets.views import HAS_HEAD, HAS_QUERY, MAX, MEAN, VIEWS, Choice, View, number


def explore(model: nn.Module, image=None, *, size: tuple[int, int] | None = None) -> Explorer:
    """A page to look into a model through one picture: choose a view, a layer and a head, and click on a patch.

    model: any timm Vision Transformer that `capture` takes. image: what `load_image` takes; without it one of six
    sample photographs, and others can be uploaded. size: (height, width) in pixels to show it at, for models that take
    other sizes than their own. Raises UnsupportedModelError for other models and ImageError for what is no picture.
    """
    return Explorer(model, image, size=size)


class Explorer(Pictured):
    """What `explore` returns. `set(view="rollout", layer=3, row=2, column=5)` moves its controls, `view()` is the map
    that is shown, `subject` the picture as the model saw it."""

    def __init__(self, model: nn.Module, image=None, *, size: tuple[int, int] | None = None):
        self.model, self.size, self._view = model, size, None
        layers = len(attention_modules(unwrap(model)))  # refuses what cannot be shown
        super().__init__(model, image, size=size, whole=False, view="attention", layer=layers - 1, head=MEAN, **PAINT)

    def take(self, content, buffers):
        if "pick" in content:
            self.look_from(content["row"], content["col"])
        elif content.get("press") == "save":
            self._save(content.get("number", 0))
        else:
            return super().take(content, buffers)
        return ""

    def draw(self, wanted):
        shown = self.subject
        self.fit(shown)
        return {
            "pictures": {"picture": shown.png},
            "panels": [panel(shown, self.state["view"], self.choice, self.view(wanted), self.state)],
            "bars": shown.top5,
            "dots": self._dots(),
            "uploads": True,
            "saves": True,
        }

    def afterwards(self, wanted):
        shown = self.subject
        if shown.has("distance"):
            return False
        shown.mean_distance(wanted)
        return True

    @property
    def subject(self) -> Subject:
        """The picture as the model saw it. Not kept here, so that forgotten pages hold no captures."""
        whole = self.state["whole"]
        size = size_for(self.model, self.photograph) if whole and not self.size else self.size
        return subject(self.model, self.photograph, size=size, whole=whole)

    @property
    def choice(self) -> Choice:
        """Layer, head and query as they are set."""
        return Choice(self.state["layer"], self.state["head"], self.query)

    def view(self, wanted: Callable[[], bool] = lambda: True) -> View:
        """The map that is shown, with its words."""
        shown = self.subject
        key = (shown.number, self.state["view"], self.choice)
        if self._view is None or self._view[0] != key:
            self._view = key, VIEWS[self.state["view"]].make(shown, self.choice, wanted)
        return self._view[1]

    def controls(self) -> list[Control]:
        view = self.state["view"]
        whole = size_for(self.model, self.photograph) is not None and not self.size
        return [
            self.photograph_control(),
            *([Control("whole", "Whole picture, in its shape", "check", self.state["whole"])] if whole else []),
            view_control(view),
            self.layer_control(self.subject),
            self.head_control(self.subject, view),
            *self.query_controls(self.subject, disabled=view not in HAS_QUERY),
            *self.paint_controls(view),
        ]

    def _dots(self) -> dict | None:
        if not self.subject.has("distance"):
            return None
        head, goes = self.state["head"], self.state["view"] in HAS_HEAD and self.state["view"] != "rollout"
        return {
            "title": "Mean attention distance (pixels)",
            "values": self.subject.mean_distance().tolist(),
            "uniform": self.subject.grid.uniform_distance(),
            "layer": self.state["layer"],
            "head": head if goes and isinstance(head, int) else None,
            "picks": goes,
        }

    def _save(self, asked: int) -> None:
        """Send the picture with its words as a PNG, and all numbers as .npz, for the page that asked to save."""
        shown = panel(self.subject, self.state["view"], self.choice, self.view(), self.state)
        name = f"vitlens-{self.state['view']}-layer{self.state['layer']}"
        about = {"model": self.subject.name, "words": shown.words, **self.state}
        if self.state["view"] not in HAS_HEAD:
            del about["head"]
        elif self.state["view"] == "rollout" and about["head"] != MAX:
            about["head"] = MEAN
        if self.state["view"] not in HAS_QUERY:
            del about["query"], about["row"], about["column"]
        files = {
            f"{name}.png": captioned(self.subject, shown),
            f"{name}.npz": numbers(values=shown.values, pixels=self.subject.pixels, about=json.dumps(about)),
        }
        self.send({"download": list(files), "asked": asked}, list(files.values()))


def view_control(view: str) -> Control:
    return Control("view", "View", "select", view, tuple((each.title, name) for name, each in VIEWS.items()))


def panel(
    subject: Subject, view: str, choice: Choice, shown: View, state: dict, *, name: str = "picture", title: str = ""
) -> Panel:
    """A view of a subject over its picture, with its words."""
    grid, values, scale, words = subject.grid, shown.values, None, shown.words + "."
    if values.ndim == 2:
        scale = scale_of(values, cmap=state["colours"], stretch=state["stretch"], limit=shown.limit)
        words += f" Patches have {number(values.min())} to {number(values.max())}."
    words += f" The model saw {grid.image[0]} × {grid.image[1]} pixels."
    for count, where in zip(grid.cut, ("at the bottom", "at the right"), strict=True):
        words += f" No patch covers the last {count} pixels {where}." if count else ""
    for count, where in zip(grid.padded, ("at the bottom", "at the right"), strict=True):
        words += f" The last patches {where} reach {count} pixels beyond the picture." if count else ""
    asks = view in HAS_QUERY
    return Panel(
        name=name,
        title=title or VIEWS[view].title,
        picture=name,
        rows=grid.rows,
        cols=grid.cols,
        cell=(grid.patch[0] / grid.image[0], grid.patch[1] / grid.image[1]),
        words=words,
        selected=choice.query if asks and isinstance(choice.query, tuple) else None,
        picks="the patch to look from" if asks else "",
        values=values,
        scale=scale,
        strength=state["strength"],
        smooth=state["smooth"],
        lines=state["lines"],
        ends=scale and (number(scale.low), number(scale.high)),
    )
