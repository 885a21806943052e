"""Curves of a training run, while it runs or afterwards."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib.pyplot as plt

from vitlens.plot.style import page, panel, styled

COLORS = {"top1": "#0173b2", "top1_average": "#de8f05"}
NAMES = {"top1": "weights", "top1_average": "their moving average"}
TITLES = ("Loss of the batch", "Accuracy on validation images (%)", "Learning rate, share of its peak")


def training(records) -> plt.Figure:
    """Loss, validation accuracy and learning rate of a run against its steps.

    records: in order, what `vitlens.train.fit` yields, or the lines of its `log.jsonl` as dictionaries; those without a
    reading of the loss add to the learning rate only. The axes reach to the last step of the run from the beginning,
    so that a figure that is drawn anew during training stays where it is; without records they are empty. The legend
    gives the last accuracy. Logs without `rate` have it in `lr`.
    """
    records = [record if isinstance(record, Mapping) else vars(record) for record in records]
    losses = [(r["step"], r["loss"]) for r in records if r["loss"] is not None]
    accuracies = {key: [(r["step"], r["metrics"][key]) for r in records if key in r["metrics"]] for key in NAMES}
    with styled():
        figure = page(900, 268)
        loss, accuracy, rate = (panel(figure, 44 + 300 * k, 40, 238, 176, title) for k, title in enumerate(TITLES))
        if records:
            rate.plot([r["step"] for r in records], [r.get("rate", r["lr"]) for r in records], color="0.35")
        if losses:
            loss.plot(*zip(*losses, strict=True), color=COLORS["top1"])
        for key, points in accuracies.items():
            if points:
                label = f"{NAMES[key]}: {points[-1][1]:.1f} %"
                accuracy.plot(*zip(*points, strict=True), "o-", markersize=3, color=COLORS[key], label=label)
                accuracy.legend(loc="best", framealpha=0.9, edgecolor="0.85")  # wherever there are fewest points
        steps = records[-1]["steps"] if records else 1
        for ax in (loss, accuracy, rate):
            ax.set(xlim=(0, steps), xlabel="Step")
        loss.set_ylim(0, 1.08 * max((value for _, value in losses), default=1))
        accuracy.set_ylim(0, 100)
        rate.set_ylim(0, 1.05)
    return figure
