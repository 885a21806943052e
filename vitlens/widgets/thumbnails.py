"""All heads of all layers at once, and one of them enlarged."""

from __future__ import annotations

import numpy as np
from torch import nn

from vitlens.recorder.supported import attention_modules, unwrap
from vitlens.widgets.paint import mosaic, scale_of
from vitlens.widgets.panels import panel
from vitlens.widgets.pictured import LARGEST, PAINT, Pictured
from vitlens.widgets.stage import Control, Panel
from vitlens.widgets.views import VIEWS, Choice, number, query_row, query_words


def heads(model: nn.Module, image=None) -> Heads:
    """Thumbnails of every head of every layer: its attention from one query. Click one to enlarge it, and click the
    enlarged one to look from another patch.

    image: what `load_image` takes; by default a sample photograph. Raises UnsupportedModelError for models that
    `capture` refuses and ImageError for what is no image.
    """
    return Heads(model, image)


class Heads(Pictured):
    """What `heads` returns."""

    def __init__(self, model: nn.Module, image):
        layers = len(attention_modules(unwrap(model)))
        self._all = None
        super().__init__(model, image, layer=layers - 1, head=0, own=True, **PAINT)

    def take(self, content, buffers):
        if content.get("pick") == "heads":
            self.state = self.state | {"layer": int(content["col"]), "head": int(content["row"])}
        elif "pick" in content:
            self.look_from(content["row"], content["col"])
        else:
            return super().take(content, buffers)
        return ""

    def draw(self, wanted):
        self.fit(self.subject)
        maps = self._maps()
        count, layers = maps.shape[:2]
        flat = maps.reshape(count * layers, *maps.shape[2:])
        scales = [scale_of(each if self.state["own"] else maps, cmap=self.state["colors"]) for each in flat]
        scope = "each up to its own largest" if self.state["own"] else f"one scale, 0 to {number(maps.max())}"
        tiles = Panel(
            name="heads", title="All heads: a column for each layer, a row for each head", picture="heads", rows=count,
            cols=layers, cell=(1 / count, 1 / layers), axes=("head", "layer"), values=maps.max((2, 3)),
            selected=(self.state["head"], self.state["layer"]), picks="the head to enlarge",
            words=f"Attention from {query_words(self.subject, self.query)}; {scope}. "
            "Pointing at a head tells its largest weight on a patch.",
        )  # fmt: skip
        choice = Choice(self.state["layer"], self.state["head"], self.query)
        view = VIEWS["attention"]
        shown = view.make(self.subject, choice, wanted)
        title = f"Layer {choice.layer}, head {choice.head}"
        enlarged = panel(self.subject, view, choice, shown, self.state, title=title)
        return {
            "pictures": {
                "heads": mosaic(maps, scales, max(24, 900 // max(layers, count))),
                "picture": self.subject.png,
            },
            "panels": [tiles, enlarged],
            "about": self.photograph.note,
            "uploads": LARGEST,
        }

    def controls(self):
        count = self.subject.attn[0].q.shape[1]
        return [
            self.photograph_control(),
            self.layer_control(self.subject),
            Control("head", "Head", "range", self.state["head"], high=count - 1),
            *self.query_controls(self.subject),
            Control("own", "A scale for each head", "check", self.state["own"]),
            *self.paint_controls(),
        ]

    def _maps(self) -> np.ndarray:
        """(H, L, rows, cols) attention of all heads from the query."""
        key = (self.subject.number, self.query)
        if self._all is None or self._all[0] != key:
            row = query_row(self.subject, self.query)
            weights = [self.subject.grid.image_map(layer.read(row)[0]).cpu() for layer in self.subject.attn]
            self._all = key, np.stack([w.numpy() for w in weights], 1)
        return self._all[1]
