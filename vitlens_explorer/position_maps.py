"""Page of the similarity of position embeddings."""

from __future__ import annotations

import numpy as np
from PIL import Image
from torch import nn

from vitlens.positions import similarity
from vitlens_explorer.controls import STRETCH, Control
from vitlens_explorer.drawing import png, tiles_png
from vitlens_explorer.lanes import Check
from vitlens_explorer.page import Change, Page
from vitlens_explorer.panels import Panel, Scale
from vitlens_explorer.words import number, say

MOST = 24  # largest number of rows or columns for showing all maps


class PositionMaps(Page):
    """The page of `positions`. similarity: (rows, cols, rows, cols) cosines."""

    plain = frozenset(("row", "column", "stretch", "smooth"))

    def __init__(self, model: nn.Module):
        self.similarity = similarity(model).cpu().numpy()
        rows, cols = self.similarity.shape[:2]
        super().__init__(row=rows // 3, column=cols // 3, stretch=False, smooth=False)

    def requested(self, content: dict, buffers: list) -> Change:
        if "pick" in content:
            return Change({"row": content["row"], "column": content["col"]})
        return Change(content.get("set", {}))

    def draw(self, check: Check) -> dict:
        rows, cols = self.similarity.shape[:2]
        place = (self.state["row"], self.state["column"])
        values = self.similarity[place]
        others = np.delete(values.ravel(), place[0] * cols + place[1])
        scale = Scale("RdBu_r", -1.0, 1.0)
        if self.state["stretch"]:
            scale = Scale("viridis", float(values.min()), float(others.max()))
        side = max(1, 448 // max(rows, cols))
        pictures = {"one": png(Image.new("RGB", (cols * side, rows * side), "gray"))}
        common = {
            "rows": rows,
            "cols": cols,
            "cell": (1 / rows, 1 / cols),
            "selected": place,
            "picks": "the position",
        }
        words = f"Cosine similarity of its embedding to all others: {number(others.min())} to {number(others.max())}"
        more = ""
        if scale.stretching > 1.001:
            more = say("stretched", times=number(scale.stretching))
        one = Panel(
            name="one",
            title=f"Position in row {place[0]}, column {place[1]}",
            picture="one",
            words=f"{words}, and 1 to itself.{more}",
            values=values,
            scale=scale,
            strength=1.0,
            smooth=self.state["smooth"],
            ends=(number(scale.low), number(scale.high)),
            **common,
        )
        panels = [one]
        if max(rows, cols) <= MOST:
            scales = [Scale("RdBu_r", -1.0, 1.0)] * (rows * cols)
            pictures["all"] = tiles_png(self.similarity, scales, max(rows + 2, 640 // rows))
            words = (
                "Every tile is the map of the position in its place, in red and blue from −1 to 1."
            )
            every = Panel(name="all", title="All positions", picture="all", words=words, **common)
            panels.insert(0, every)
        return {"pictures": pictures, "panels": panels}

    def make_controls(self) -> list[Control]:
        rows, cols = self.similarity.shape[:2]
        return [
            Control("row", "Row", "range", self.state["row"], high=rows - 1),
            Control("column", "Column", "range", self.state["column"], high=cols - 1),
            Control("stretch", STRETCH, "check", self.state["stretch"]),
            Control("smooth", "Interpolate", "check", self.state["smooth"]),
        ]
