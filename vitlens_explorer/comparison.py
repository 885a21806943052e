"""Two models side by side with the same query and image, or one model with two images."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from vitlens.recorder.supported import attention_modules
from vitlens_explorer.lanes import LARGEST
from vitlens_explorer.page import Control, Panel
from vitlens_explorer.photographs import PAINT, READOUT, Forward, Photograph, Pictured, unwrap
from vitlens_explorer.views import (
    HOLDS,
    MEAN,
    VIEWS,
    Choice,
    Map,
    View,
    farthest,
    head_control,
    map_panel,
    query_words,
    view_control,
)
from vitlens_explorer.words import number

SIDES = ("left", "right")
OTHER, SAME, NEAREST = "the other image given", "same", "correspondences"
COMPARED = VIEWS | {NEAREST: View("Matching patches", lambda *_: None, HOLDS, query=True)}
"""Views of a comparison."""


class Comparison(Pictured):
    """The page of `compare`. Row and column refer to the left model's grid."""

    def __init__(self, model_a: nn.Module, model_b: nn.Module, image=None, other=None):
        layers = [len(attention_modules(unwrap(model))) for model in (model_a, model_b)]
        state = {f"layer_{side}": count - 1 for side, count in zip(SIDES, layers, strict=True)}
        self._right: tuple[int, int] | None = (
            None  # the patch clicked on the right, in its own grid
        )
        given = {} if other is None else {OTHER: Photograph.read(other)}
        state |= {"head_left": MEAN, "head_right": MEAN, "other": OTHER if given else SAME}
        super().__init__(model_a, image, model_b, more=given, view="attention", **state, **PAINT)

    def take(self, content, buffers):
        if "pick" not in content:
            super().take(content, buffers)
            return
        place, side = (content["row"], content["col"]), content["pick"]
        row, column = moved(place, self.forwards[side], self.forwards["left"])
        self.change(row=row, column=column)
        self._right = place if side == "right" else None

    @property
    def forwards(self) -> dict[str, Forward]:
        """The forward of each side."""
        name = self.state["other"]
        right = self.photograph if name == SAME else self.photographs[name]
        sides = zip(SIDES, self.models, (self.photograph, right), strict=True)
        return {side: self.forward_of(model, photograph) for side, model, photograph in sides}

    def draw(self, check):
        forwards, name = self.forwards, self.state["view"]
        self.fit(forwards["left"])
        panels = self._nearest(forwards) if name == NEAREST else self._maps(forwards, check)
        notes = dict.fromkeys([self.photograph.note])
        if self.state["other"] != SAME:
            notes[self.photographs[self.state["other"]].note] = None
        return {
            "pictures": {side: forward.png for side, forward in forwards.items()},
            "panels": panels,
            "about": " ".join(filter(None, notes)),
            "uploads": LARGEST,
        }

    def menus(self):
        return super().menus(), self.forwards["right"].key

    def controls(self):
        name, forwards = self.state["view"], self.forwards
        others = (("same as left", SAME), *((name, name) for name in self.photographs))
        controls = [
            view_control(name, COMPARED if self.models[0] is self.models[1] else VIEWS),
            replace(self.photograph_control("Left photo"), place="left"),
            Control("other", "Right photo", "select", self.state["other"], others, place="right"),
        ]
        for side, forward in forwards.items():
            head, one = (
                f"head_{side}",
                {"place": side, "disabled": name == NEAREST and side == "right"},
            )
            controls.append(
                self.layer_control(forward, f"layer_{side}", f"{side.capitalize()} layer", **one)
            )
            label, head_now = f"{side.capitalize()} head", self.state[head]
            controls.append(
                head_control(forward, COMPARED[name], head_now, head, label, place=side)
            )
        readable = forwards["right"].grid.readout is not None
        queries = self.query_controls(forwards["left"], not COMPARED[name].query, readable)
        return [*controls, *self.paint_controls(name == "components"), *queries]

    def _maps(self, forwards: dict[str, Forward], check) -> list[Panel]:
        """The same view of both sides."""
        view, panels = VIEWS[self.state["view"]], []
        for side, forward in forwards.items():
            head = view.fitted(self.state[f"head_{side}"], forward.heads)
            choice = Choice(
                self.state[f"layer_{side}"], head, self._query_of(forward, forwards["left"])
            )
            shown = view.make(forward, choice, check)
            title = _title(side, forward)
            panel = map_panel(forward, view, choice, shown, self.state, name=side, title=title)
            tiles = self.tiles(forward, shown.prefix) if side == "left" and view.query else ()
            panels.append(replace(panel, tokens=tiles))
        return panels

    def _nearest(self, forwards: dict[str, Forward]) -> list[Panel]:
        """Cosines of both images' patches with the clicked patch, and the most similar patch on the other side."""
        left, query, layer = forwards["left"], self.query, self.state["layer_left"]
        place = query if isinstance(query, tuple) else (self.state["row"], self.state["column"])
        of, to = ("right", "left") if self._right == place else ("left", "right")
        patches = {
            side: f.tokens[layer][0, f.grid.prefix :].float().cpu() for side, f in forwards.items()
        }
        query_token = patches[of][place[0] * left.grid.cols + place[1]]
        panels, words = (
            {},
            f"Cosine of each patch with the one framed on the {of}, after layer {layer}",
        )
        for side, forward in forwards.items():
            cosines = torch.cosine_similarity(patches[side], query_token, dim=-1)
            best = divmod(int(cosines.argmax()), forward.grid.cols)
            chosen = place if side == of else best
            about = (
                words
                if side == of
                else (
                    f"{words}. Nearest is {query_words(forward, best)} (cosine {number(cosines.max().item())})"
                )
            )
            values = cosines.unflatten(0, (forward.grid.rows, forward.grid.cols)).numpy()
            shown = Map(values, about, farthest(values, place if side == of else READOUT), "cosine")
            made = map_panel(
                forward,
                COMPARED[NEAREST],
                Choice(layer),
                shown,
                self.state,
                name=side,
                title=_title(side, forward),
            )
            panels[side] = replace(
                made, selected=chosen, picks="the patch to find on the other side"
            )
        return [panels[side] for side in SIDES]

    def _query_of(self, forward: Forward, left: Forward) -> str | int | tuple[int, int]:
        """The query in the grid of one of the models."""
        query = self.query
        if isinstance(query, tuple):
            if forward is not left and self._right and moved(self._right, forward, left) == query:
                return self._right
            return moved(query, left, forward)
        if isinstance(query, int) and forward is not left:
            if left.prefix[query] not in forward.prefix:
                raise ValueError(
                    f"{forward.name} has no {left.prefix[query]} as a query. Choose a patch, or a token of both models."
                )
            return forward.prefix.index(left.prefix[query])
        return query


def moved(place: tuple[int, int], of: Forward, to: Forward) -> tuple[int, int]:
    """The patch (row, column) of another grid at the center of a patch, relative to the image size, or the nearest."""
    a, b = of.grid, to.grid
    row, col = (
        min(
            (2 * k + 1) * a.patch[i] * b.image[i] // (2 * a.image[i] * b.patch[i]),
            (b.rows, b.cols)[i] - 1,
        )
        for i, k in enumerate(place)
    )
    return row, col


def _title(side: str, forward: Forward) -> str:
    return f"{side.capitalize()}: {forward.name}, {forward.grid.rows} × {forward.grid.cols} patches"
