"""Thumbnails of all heads of all layers, with one head enlarged."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from torch import nn

from vitlens.recorder.supported import attention_modules, unwrap
from vitlens_explorer.drawing import mosaic
from vitlens_explorer.lanes import LARGEST
from vitlens_explorer.page import Control, Panel, scale_of
from vitlens_explorer.photographs import MORE, PAINT, Pictured
from vitlens_explorer.views import VIEWS, Choice, map_panel, query_row, query_words
from vitlens_explorer.words import number


class AllHeads(Pictured):
    """The page of `heads`."""

    plain = Pictured.plain | {"layer", "head", "own"}

    def __init__(self, model: nn.Module, image=None):
        layers = len(attention_modules(unwrap(model)))
        super().__init__(model, image, layer=layers - 1, head=0, own=True, **PAINT)

    def take(self, content, buffers):
        if content.get("pick") == "heads":
            self.change(layer=content["col"], head=content["row"])
        elif "pick" in content:
            self.change(row=content["row"], column=content["col"])
        else:
            super().take(content, buffers)

    def draw(self, check):
        forward = self.forward
        self.fit(forward)
        row = query_row(forward, self.query)
        maps = np.stack([forward.grid.image_map(layer.read(row)[0]).cpu().numpy() for layer in forward.attn], 1)
        count, layers = maps.shape[:2]
        flat = maps.reshape(count * layers, *maps.shape[2:])
        scales = [scale_of(tile if self.state["own"] else maps, cmap=self.state["colors"]) for tile in flat]
        scope = "each scaled to its largest value" if self.state["own"] else f"one scale, 0 to {number(maps.max())}"
        tiles = Panel(
            name="heads", title="All heads: a column for each layer, a row for each head", picture="heads", rows=count,
            cols=layers, cell=(1 / count, 1 / layers), axes=("head", "layer"), values=maps.max((2, 3)),
            selected=(self.state["head"], self.state["layer"]), picks="the head to enlarge",
            words=f"Attention from {query_words(forward, self.query)}; {scope}. "
            "Pointing at a head shows its largest weight on a patch.",
        )  # fmt: skip
        choice = Choice(self.state["layer"], self.state["head"], self.query)
        shown = VIEWS["attention"].make(forward, choice, check)
        title = f"Layer {choice.layer}, head {choice.head}"
        enlarged = map_panel(forward, VIEWS["attention"], choice, shown, self.state, title=title)
        enlarged = replace(enlarged, tokens=self.tiles(forward, shown.prefix))
        tile = max(24, 900 // max(layers, count))
        return {
            "pictures": {"heads": mosaic(maps, scales, tile), "picture": forward.png},
            "panels": [tiles, enlarged],
            "about": self.photograph.note,
            "uploads": LARGEST,
        }

    def controls(self):
        return [
            self.photograph_control(),
            Control("own", "Separate color scale per head", "check", self.state["own"]),
            *self.paint_controls(),
            self.layer_control(self.forward, place=MORE),
            Control("head", "Head", "range", self.state["head"], high=self.forward.heads - 1, place=MORE),
            *self.query_controls(self.forward),
        ]
