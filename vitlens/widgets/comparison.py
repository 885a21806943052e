"""Two models side by side, looking from the same place of the same image, or one model and the patches that two images
have in common."""

from __future__ import annotations

import colorsys
from dataclasses import replace

import torch
from torch import nn

from vitlens import tokens
from vitlens.recorder.supported import attention_modules, unwrap
from vitlens.widgets.panels import panel, view_control
from vitlens.widgets.pictured import LARGEST, PAINT, Pictured
from vitlens.widgets.stage import Control, Panel
from vitlens.widgets.subjects import Photograph, Subject, subject
from vitlens.widgets.views import HOLDS, MEAN, VIEWS, Choice, Map, View, number, query_words

SIDES = ("left", "right")
OTHER, SAME = "the other picture given", "same"
MARKED = 40
"""The most pairs of patches that are marked."""


def compare(model_a: nn.Module, model_b: nn.Module | None = None, image=None, other=None) -> Compare:
    """Two models side by side with one image and one query. A patch is the same place in what each model saw of the
    image, whatever their grids are; layers and heads are chosen for each model.

    With one model and two images, the view "correspondences" finds for a patch of one its nearest in the other, and
    marks pairs of patches that are each other's nearest: `compare(model, image="cat.jpg", other="dog.jpg")`.

    model_b: by default `model_a`. image, other: what `load_image` takes, for the left and the right side; by default a
    sample photograph, and the same on the right. Raises UnsupportedModelError for models that `capture` refuses and
    ImageError for what is no image.
    """
    return Compare(model_a, model_a if model_b is None else model_b, image, other)


class Compare(Pictured):
    """What `compare` returns. Row and column are those of the left model's grid."""

    def __init__(self, model_a: nn.Module, model_b: nn.Module, image, other):
        self.models = dict(zip(SIDES, (model_a, model_b), strict=True))
        layers = [len(attention_modules(unwrap(model))) for model in self.models.values()]
        state = {f"layer_{side}": count - 1 for side, count in zip(SIDES, layers, strict=True)}
        self._right: tuple[int, int] | None = None  # the patch clicked on the right, in its own grid
        given = {} if other is None else {OTHER: Photograph.read(other)}
        state |= {"head_left": MEAN, "head_right": MEAN, "other": OTHER if given else SAME}
        super().__init__(model_a, image, model_b, more=given, view="attention", **state, **PAINT)

    def take(self, content, buffers):
        if "pick" not in content:
            return super().take(content, buffers)
        place = (int(content["row"]), int(content["col"]))
        self._right = place if content["pick"] == "right" else None
        self.look_from(*moved(place, self.subjects[content["pick"]], self.subjects["left"]))
        return ""

    def draw(self, wanted):
        subjects = self.subjects
        self.fit(subjects["left"])
        panels = self._paired(subjects) if self.state["view"] == "correspondences" else self._maps(subjects, wanted)
        notes = dict.fromkeys(self._photograph_of(side).note for side in SIDES)
        return {
            "pictures": {side: each.png for side, each in subjects.items()},
            "panels": panels,
            "about": " ".join(filter(None, notes)),
            "uploads": LARGEST,
        }

    def _maps(self, subjects: dict[str, Subject], wanted) -> list[Panel]:
        """The same view of both sides."""
        view, panels = VIEWS[self.state["view"]], []
        for side, each in subjects.items():
            head = view.fitted(self.state[f"head_{side}"])
            choice = Choice(self.state[f"layer_{side}"], head, self._query_of(each))
            shown = view.make(each, choice, wanted)
            panels.append(panel(each, view, choice, shown, self.state, name=side, title=_title(side, each)))
        return panels

    def _paired(self, subjects: dict[str, Subject]) -> list[Panel]:
        """For the patch that was clicked its nearest on the other side, and the mutual pairs of all patches."""
        left, right = subjects.values()
        if left.model is not right.model:
            raise ValueError(
                f"Patches correspond within one model, because each has directions of its own, and {left.name} and "
                f"{right.name} are two. Open `compare(model, image=…, other=…)` with one of them."
            )
        query, layer = self._query_of(left), self.state["layer_left"]
        if not isinstance(query, tuple):
            query = self.state["row"], self.state["column"]
        of, to, place = ("right", "left", self._right) if self._from_right(query) else ("left", "right", query)
        patches = {side: each.tokens[layer][0, each.grid.prefix :].float().cpu() for side, each in subjects.items()}
        pairs = tokens.correspondences(patches[of], patches[to])
        cols = left.grid.cols
        asked = place[0] * cols + place[1]
        nearest = divmod(pairs.nearest[asked].item(), cols)
        back = tokens.correspondences(patches[to], patches[of]).nearest[pairs.nearest[asked]].item()
        if pairs.mutual[asked]:
            mutual = "Each is the nearest of the other: a mutual pair"
        else:
            mutual = f"It is not mutual: nearest to that one is {query_words(subjects[of], divmod(back, cols))}"
        nearness = f"is {query_words(subjects[to], nearest)} on the {to} (cosine {number(pairs.similarity[asked])})"
        found = pairs.mutual.nonzero().flatten()
        marked = found[pairs.similarity[found].argsort(descending=True)][:MARKED].tolist()
        points = {side: [] for side in SIDES}
        for patch in marked:
            start = divmod(patch, cols)
            color = _color(start, left.grid.rows, cols)
            points[of].append((*start, color))
            points[to].append((*divmod(pairs.nearest[patch].item(), cols), color))
        which = "All" if len(marked) == len(found) else f"The {len(marked)} nearest of"
        of_all = f"{which} {len(found)} mutual pairs have dots, of one color each"
        if left is right:
            of_all += ". Both sides show one picture, where each patch is its own nearest: choose another on the right"
        view = COMPARED["correspondences"]
        like = torch.cosine_similarity(patches[to], patches[of][asked], dim=-1)
        maps = {
            of: (pairs.similarity, place, f"Cosine of each patch with its nearest on the {to}, after layer {layer}. "
                 f"Nearest to {query_words(subjects[of], place)} {nearness}. {mutual}"),
            to: (like, nearest, f"Cosine of each patch with the one framed on the {of}, after layer {layer}. {of_all}"),
        }  # fmt: skip
        panels = []
        for side, each in subjects.items():
            values, selected, words = maps[side]
            shape = each.grid.rows, each.grid.cols
            shown = Map(values.unflatten(0, shape).numpy(), words, limit=1.0, unit="cosine")
            made = panel(each, view, Choice(layer), shown, self.state, name=side, title=_title(side, each))
            panels.append(
                replace(made, selected=selected, picks="the patch to find on the other side", points=points[side])
            )
        return panels

    def _from_right(self, query: tuple[int, int]) -> bool:
        """Whether the query is the patch that was clicked on the right."""
        subjects = self.subjects
        return bool(self._right) and moved(self._right, subjects["right"], subjects["left"]) == query

    @property
    def subjects(self) -> dict[str, Subject]:
        """The photographs as each model saw them."""
        return {side: subject(model, self._photograph_of(side)) for side, model in self.models.items()}

    def _photograph_of(self, side: str) -> Photograph:
        name = self.state["other"]
        return self.photograph if side == "left" or name == SAME else self.photographs[name]

    def controls(self):
        name, subjects = self.state["view"], self.subjects
        view = COMPARED[name]
        others = (("the same", SAME), *((each, each) for each in self.photographs))
        found = [
            replace(self.photograph_control(), label="Photograph, left"),
            Control("other", "Photograph, right", "select", self.state["other"], others),
            view_control(name, COMPARED),
        ]
        for side, each in subjects.items():
            layer = self.layer_control(each, f"layer_{side}", f"Layer, {side}")
            found.append(replace(layer, disabled=name == "correspondences" and side == "right"))
            found.append(self.head_control(each, view, f"head_{side}", f"Head, {side}"))
        readable = subjects["right"].grid.readout is not None
        queries = self.query_controls(subjects["left"], not view.query, readable)
        return [*found, *queries, *self.paint_controls(name)]

    def _query_of(self, each: Subject) -> str | int | tuple[int, int]:
        """The query in the grid of one of the models."""
        query, left = self.query, self.subjects["left"]
        if isinstance(query, tuple):
            if each is not left and self._right and moved(self._right, each, left) == query:
                return self._right
            return moved(query, left, each)
        if isinstance(query, int) and each is not left:
            if left.prefix[query] not in each.prefix:
                raise ValueError(
                    f"{each.name} has no {left.prefix[query]} to look from. Choose a patch, or a token that both have."
                )
            return each.prefix.index(left.prefix[query])
        return query


def moved(place: tuple[int, int], of: Subject, to: Subject) -> tuple[int, int]:
    """The patch of another grid that holds the center of a patch, as a share of the pixels of the image; the nearest
    one where no patch does."""
    a, b = of.grid, to.grid
    row, col = (
        min((2 * k + 1) * a.patch[i] * b.image[i] // (2 * a.image[i] * b.patch[i]), (b.rows, b.cols)[i] - 1)
        for i, k in enumerate(place)
    )
    return row, col


def _title(side: str, subject: Subject) -> str:
    return f"{side.capitalize()}: {subject.name}, {subject.grid.rows} × {subject.grid.cols} patches"


def _color(place: tuple[int, int], rows: int, cols: int) -> str:
    """A color that differs from patch to patch, for CSS."""
    rgb = colorsys.hls_to_rgb(place[1] / cols, 0.35 + 0.4 * place[0] / rows, 0.95)
    return "#" + "".join(f"{round(255 * each):02x}" for each in rgb)


COMPARED = VIEWS | {
    "correspondences": View("Nearest patches of two pictures", lambda *_: None, HOLDS, query=True),
}
"""The views of two sides."""
