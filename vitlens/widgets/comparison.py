"""Two models side by side, looking from the same place of the same image."""

from __future__ import annotations

from torch import nn

from vitlens.recorder.families import attention_modules, unwrap
from vitlens.widgets.explorer import panel, view_control
from vitlens.widgets.pictured import LARGEST, PAINT, Pictured
from vitlens.widgets.subjects import Subject, subject
from vitlens.widgets.views import MEAN, VIEWS, Choice

SIDES = ("left", "right")


def compare(model_a: nn.Module, model_b: nn.Module, image=None) -> Compare:
    """Two models side by side with one image and one query. A patch is the same place in what each model saw of the
    image, whatever their grids are; layers and heads are chosen for each model.

    image: what `load_image` takes; by default a sample photograph. Raises UnsupportedModelError for models that
    `capture` refuses and ImageError for what is no image.
    """
    return Compare(model_a, model_b, image)


class Compare(Pictured):
    """What `compare` returns. Row and column are those of the left model's grid."""

    def __init__(self, model_a: nn.Module, model_b: nn.Module, image):
        self.models = dict(zip(SIDES, (model_a, model_b), strict=True))
        layers = [len(attention_modules(unwrap(model))) for model in self.models.values()]
        state = {f"layer_{side}": count - 1 for side, count in zip(SIDES, layers, strict=True)}
        self._right: tuple[int, int] | None = None  # the patch clicked on the right, in its own grid
        super().__init__(model_a, image, model_b, view="attention", **state, head_left=MEAN, head_right=MEAN, **PAINT)

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
        view, panels = self.state["view"], []
        for side, each in subjects.items():
            choice = Choice(self.state[f"layer_{side}"], self.state[f"head_{side}"], self._query_of(each))
            shown = VIEWS[view].make(each, choice, wanted)
            title = f"{side.capitalize()}: {each.name}, {each.grid.rows} × {each.grid.cols} patches"
            panels.append(panel(each, VIEWS[view], choice, shown, self.state, name=side, title=title))
        return {
            "pictures": {side: each.png for side, each in subjects.items()},
            "panels": panels,
            "about": self.photograph.note,
            "uploads": LARGEST,
        }

    @property
    def subjects(self) -> dict[str, Subject]:
        """The photograph as each model saw it."""
        return {side: subject(model, self.photograph) for side, model in self.models.items()}

    def controls(self):
        view, subjects = self.state["view"], self.subjects
        found = [self.photograph_control(), view_control(view)]
        for side, each in subjects.items():
            found.append(self.layer_control(each, f"layer_{side}", f"Layer, {side}"))
            found.append(self.head_control(each, view, f"head_{side}", f"Head, {side}"))
        readable = subjects["right"].grid.readout is not None
        queries = self.query_controls(subjects["left"], not VIEWS[view].query, readable)
        return [*found, *queries, *self.paint_controls(view)]

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
