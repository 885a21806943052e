"""Two models side by side with the same query and image, or one model with two images."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from vitlens.recorder.supported import attention_modules, unwrap
from vitlens_explorer.captions import map_panel
from vitlens_explorer.controls import (
    PAINT,
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
from vitlens_explorer.lanes import LARGEST_UPLOAD, Check
from vitlens_explorer.page import Change, Page
from vitlens_explorer.panels import Panel
from vitlens_explorer.photographs import READOUT, Forward, Gallery, Photograph, fit_place
from vitlens_explorer.views import (
    HOLDS,
    MEAN,
    VIEWS,
    Choice,
    Map,
    View,
    farthest,
    head_control,
    query_words,
    view_control,
)
from vitlens_explorer.words import number

SIDES = ("left", "right")
OTHER, SAME, NEAREST = "the other image given", "same", "correspondences"
COMPARED = VIEWS | {NEAREST: View("Matching patches", lambda *_: None, HOLDS, query=True)}
"""Views of a comparison."""


class Comparison(Page):
    """The page of `compare`.

    In its state, `row` and `column` refer to the left model's grid, and `right` is the patch clicked on the right, in
    its own grid, or None.
    """

    plain = PLAIN | {"right"}

    def __init__(self, model_a: nn.Module, model_b: nn.Module, image=None, other=None):
        left_layers, right_layers = (
            len(attention_modules(unwrap(model))) for model in (model_a, model_b)
        )
        self.gallery = Gallery(model_a, model_b)
        given = {} if other is None else {OTHER: Photograph.read(other)}
        super().__init__(
            **self.gallery.first_state(image, given),
            view="attention",
            layer_left=left_layers - 1,
            layer_right=right_layers - 1,
            head_left=MEAN,
            head_right=MEAN,
            other=OTHER if given else SAME,
            right=None,
            **PAINT,
        )

    def begin(self) -> None:
        self.gallery.begin(self.state["photographs"])

    def requested(self, content: dict, buffers: list) -> Change:
        if "upload" in content:
            return Change(others=self.gallery.with_upload(self.state, content, buffers[0]))
        if "pick" not in content:
            return Change(with_query(content.get("set", {})))
        side = content["pick"]
        place = (content["row"], content["col"])
        forwards = self.forwards
        row, column = matching_patch(place, forwards[side], forwards["left"])
        values = with_query({"row": row, "column": column})
        return Change(values, others={"right": place if side == "right" else None})

    def photographs_by_side(self) -> dict[str, Photograph]:
        photographs = self.state["photographs"]
        left, right = self.state["photograph"], self.state["other"]
        if right == SAME:
            right = left
        return {"left": photographs[left], "right": photographs[right]}

    @property
    def forwards(self) -> dict[str, Forward]:
        """The forward of each side."""
        photographs = self.photographs_by_side()
        return {
            side: self.gallery.forward_of(model, photographs[side])
            for side, model in zip(SIDES, self.gallery.models, strict=True)
        }

    def draw(self, check: Check) -> dict:
        forwards = self.forwards
        self.state = self.state | fit_place(self.state, forwards["left"])
        notes = [photograph.note for photograph in self.photographs_by_side().values()]
        notes += [forward.cropped for forward in forwards.values()]
        return {
            "pictures": {side: forward.png for side, forward in forwards.items()},
            "panels": self._panels(forwards, check),
            "about": " ".join(filter(None, dict.fromkeys(notes))),
            "uploads": LARGEST_UPLOAD,
        }

    def controls_depend_on(self) -> list[tuple]:
        return [forward.key for forward in self.forwards.values()]

    def make_controls(self) -> list[Control]:
        state, forwards = self.state, self.forwards
        name = state["view"]
        left_model, right_model = self.gallery.models
        others = (("same as left", SAME), *((name, name) for name in state["photographs"]))
        controls = [
            view_control(name, COMPARED if left_model is right_model else VIEWS),
            photograph_control(state, "Left photo", place="left"),
            Control("other", "Right photo", "select", state["other"], others, place="right"),
        ]
        for side, forward in forwards.items():
            title = side.capitalize()
            fixed = name == NEAREST and side == "right"
            layer, head = f"layer_{side}", f"head_{side}"
            controls += [
                layer_control(state, forward, layer, f"{title} layer", place=side, disabled=fixed),
                head_control(
                    forward, COMPARED[name], state[head], head, f"{title} head", place=side
                ),
            ]
        readable = forwards["right"].grid.readout is not None
        return [
            *controls,
            *paint_controls(state, colored=name == "components"),
            *query_controls(
                state, forwards["left"], hidden=not COMPARED[name].query, readable=readable
            ),
        ]

    def _panels(self, forwards: dict[str, Forward], check: Check) -> list[Panel]:
        if self.state["view"] == NEAREST:
            return self._nearest(forwards)
        return self._maps(forwards, check)

    def _maps(self, forwards: dict[str, Forward], check: Check) -> list[Panel]:
        """The same view of both sides."""
        state = self.state
        view = VIEWS[state["view"]]
        panels = []
        for side, forward in forwards.items():
            choice = Choice(
                layer=state[f"layer_{side}"],
                head=view.head_or_first(state[f"head_{side}"], forward.heads),
                query=self._query_on(side, forwards),
            )
            shown = view.make(forward, choice, check)
            title = _title(side, forward)
            panel = map_panel(forward, view, choice, shown, state, name=side, title=title)
            if side == "left" and view.query:
                panel = replace(panel, tokens=query_tiles(state, forward, shown.prefix))
            panels.append(panel)
        return panels

    def _nearest(self, forwards: dict[str, Forward]) -> list[Panel]:
        """Cosines of both images' patches with the clicked patch, and the most similar patch on the other side."""
        state = self.state
        layer = state["layer_left"]
        place = (state["row"], state["column"])
        clicked = "right" if state["right"] == place else "left"
        position = place[0] * forwards["left"].grid.cols + place[1]
        query_token = _patches(forwards[clicked], layer)[position]
        words = f"Cosine of each patch with the one framed on the {clicked}, after layer {layer}"
        panels = []
        for side, forward in forwards.items():
            cosines = torch.cosine_similarity(_patches(forward, layer), query_token, dim=-1)
            values = cosines.unflatten(0, (forward.grid.rows, forward.grid.cols)).numpy()
            if side == clicked:
                shown = Map(values, words, farthest(values, place), "cosine", bound=0)
                selected = place
            else:
                selected = divmod(int(cosines.argmax()), forward.grid.cols)
                cosine = number(cosines.max().item())
                nearest = f"Nearest is {query_words(forward, selected)} (cosine {cosine})"
                shown = Map(
                    values, f"{words}. {nearest}", farthest(values, READOUT), "cosine", bound=0
                )
            panel = map_panel(
                forward,
                COMPARED[NEAREST],
                Choice(layer),
                shown,
                state,
                name=side,
                title=_title(side, forward),
            )
            picks = "the patch to find on the other side"
            panels.append(replace(panel, selected=selected, picks=picks))
        return panels

    def _query_on(self, side: str, forwards: dict[str, Forward]) -> str | int | tuple[int, int]:
        """The query in the grid of a side."""
        query = query_of(self.state)
        left, forward = forwards["left"], forwards[side]
        if query == READOUT or forward is left:
            return query
        if isinstance(query, tuple):
            clicked = self.state["right"]
            if clicked and matching_patch(clicked, forward, left) == query:
                return clicked
            return matching_patch(query, left, forward)
        name = left.prefix[query]
        if name not in forward.prefix:
            raise ValueError(
                f"{forward.name} has no {name} as a query. Choose a patch, or a token of both models."
            )
        return forward.prefix.index(name)


def _patches(forward: Forward, layer: int) -> Tensor:
    """Patch tokens (P, D) after a layer."""
    return forward.tokens[layer][0, forward.grid.prefix :].float().cpu()


def matching_patch(place: tuple[int, int], of: Forward, to: Forward) -> tuple[int, int]:
    """The patch (row, column) of another grid at the center of a patch, relative to the image size, or the nearest."""
    a, b = of.grid, to.grid
    last = (b.rows - 1, b.cols - 1)
    row, col = (
        min(
            (2 * index + 1) * a.patch[i] * b.image[i] // (2 * a.image[i] * b.patch[i]),
            last[i],
        )
        for i, index in enumerate(place)
    )
    return row, col


def _title(side: str, forward: Forward) -> str:
    return f"{side.capitalize()}: {forward.name}, {forward.grid.rows} × {forward.grid.cols} patches"
