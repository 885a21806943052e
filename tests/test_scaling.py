"""Figures 2 to 5 by their artists: numbers of the tables at the right places, without overlaps."""

import numpy as np
import pytest
from matplotlib.colors import to_hex
from support import assert_tidy, refuses

import vitlens_paper as paper
from vitlens_paper import TABLE_5, TABLE_6

CURVES = {
    "ViT-B/32": [(9e6, 20, 18, 22), (3e7, 33, 31, 35), (9e7, 52, 50.5, 53.5)],
    "ViT-L/32": [(9e7, 53), (9e6, 17), (3e7, 34)],
    "R50x1": [(9e6, 30), (3e7, 38), (9e7, 44)],
    "R152x1": [(9e6, 27), (3e7, 42), (9e7, 52.5)],
}
FIGURES = {
    "transfer": paper.transfer,
    "vtab": paper.vtab,
    "size": paper.pretraining_size,
    "few-shot": lambda: paper.few_shot(CURVES),
    "few-shot, crowded": lambda: paper.few_shot(
        {f"model no. {k}": [(10, 5), (90, 50 + k / 9)] for k in range(9)}
    ),
}


@pytest.fixture(scope="module")
def drawn():
    return {name: draw() for name, draw in FIGURES.items()}


def test_scaling_figures_have_no_overlapping_texts(drawn):
    for figure in drawn.values():
        assert_tidy(figure)
        assert figure.get_size_inches()[0] * figure.dpi == 900
        for ax in figure.axes:
            for line in (line for line in ax.lines if line.get_marker() != "None"):
                inside = ax.bbox.padded(-2)
                assert all(
                    inside.contains(x, y)
                    for x, y in line.get_transform().transform(line.get_xydata())
                ), line


def dots(ax):
    return sorted(
        (float(x), float(y)) for line in ax.lines for x, y in zip(*line.get_data(), strict=True)
    )


def test_transfer_draws_table_6(drawn):
    average, imagenet = drawn["transfer"].axes
    assert dots(average) == sorted((r.exaflops, r.average) for r in TABLE_6)
    assert dots(imagenet) == sorted((r.exaflops, r.accuracy["ImageNet"]) for r in TABLE_6)
    assert average.get_xscale() == imagenet.get_xscale() == "log"
    assert len({(line.get_marker(), to_hex(line.get_color())) for line in average.lines}) == 3
    for ax in (average, imagenet):
        assert sorted(t.get_text() for t in ax.texts) == sorted(
            r.model.replace("ViT-", "") for r in TABLE_6
        )


def test_vtab_draws_a_panel_for_each_group(drawn):
    figure = drawn["vtab"]
    assert figure.axes[0].get_yticklabels()[0].get_text() == "ViT-H/14, JFT-300M"
    groups = ["VTAB", "Natural", "Specialized", "Structured"]
    for ax, group in zip(figure.axes, groups, strict=True):
        drawn = {round(float(line.get_ydata()[0])): float(line.get_xdata()[0]) for line in ax.lines}
        for k, row in enumerate(paper.TABLE_9):
            assert drawn[k] == paper.groups(row.accuracy)[group]
        assert drawn[3] == paper.BIT_M_VTAB[group]
        assert f"{drawn[0]:.1f}" in {t.get_text() for t in ax.texts}
        assert all(ax.get_xlim()[0] < x < ax.get_xlim()[1] for x in drawn.values())


def test_pretraining_size_draws_table_5(drawn):
    ax = drawn["size"].axes[0]
    drawn = {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in ax.lines}
    for model in ("ViT-B/16", "ViT-B/32", "ViT-L/16", "ViT-L/32", "ViT-H/14"):
        assert drawn[model] == [
            (paper.IMAGES[r.data], r.accuracy["ImageNet"]) for r in TABLE_5 if r.model == model
        ]
    assert drawn["BiT R152x4"] == [(1_300_000, 81.3), (14_000_000, 85.39), (303_000_000, 87.54)]


def test_few_shot_draws_curves_with_intervals(drawn):
    ax = drawn["few-shot"].axes[0]
    assert [list(line.get_ydata()) for line in ax.lines] == [
        [20, 33, 52],
        [17, 34, 53],
        [30, 38, 44],
        [27, 42, 52.5],
    ]
    assert [line.get_label() for line in ax.lines] == list(CURVES)
    assert [t.get_text() for t in ax.get_legend().get_texts()] == [
        "ViT-L/32",
        "R152x1",
        "ViT-B/32",
        "R50x1",
    ]
    (bars,) = ax.collections
    assert [part[:, 1].tolist() for part in bars.get_segments()] == [
        [18, 22],
        [31, 35],
        [50.5, 53.5],
    ]
    (band,) = paper.few_shot({"a": [(9, 10, 8, 12), (90, 50, 45, 55)]}).axes[0].collections
    assert {tuple(corner) for corner in band.get_paths()[0].vertices} == {
        (9, 8),
        (9, 12),
        (90, 45),
        (90, 55),
    }


def test_few_shot_colors_curves_by_kind():
    """Vision Transformers are blue and ResNets gray in all figures, as in Fig. 5."""

    def looks(*names):
        (ax,) = paper.few_shot({name: [(9, 10), (90, 50)] for name in names}).axes
        return [(to_hex(line.get_color()), line.get_linestyle()) for line in ax.lines]

    blue, gray, green = "#0173b2", to_hex("0.45"), "#029e73"
    assert looks("ResNet, equal steps", "ViT, patch 4", "ResNet, equal epochs", "R50+ViT-B/16") == [
        (gray, "-"),
        (blue, "-"),
        (gray, "--"),
        (green, "-"),
    ]
    assert looks("BiT-M", "R152x4", "DeiT-ViT")[:2] == [(gray, "-"), (gray, "--")]
    unknown = looks("ViT", "ResNet", "Mixer")
    assert len({color for color, _ in unknown}) == 3, "a name that tells no kind"
    assert len({color for color, _ in looks(*(f"ViT-{k}" for k in range(6)))}) == 6


def test_few_shot_ticks_are_sizes_or_round_numbers():
    def ticks(*sizes):
        axis = paper.few_shot({"a": [(n, 50) for n in sizes]}).axes[0].xaxis
        low, high = axis.get_view_interval()
        places = [place for place in axis.get_majorticklocs() if low <= place <= high]
        return axis.get_major_formatter().format_ticks(places)

    assert ticks(0.0005, 0.004, 0.032) == ["0.0005", "0.004", "0.032"]
    assert ticks(2_500, 7_500, 25_000) == ["2.5 k", "7.5 k", "25 k"]
    assert ticks(1, 1.37, 1.86, 1.56, 3.47, 9.08, 12.8, 15) == [
        "1",
        "1.5",
        "2",
        "3",
        "5",
        "7",
        "10",
        "15",
    ]
    assert ticks(5.9e5, 6.1e5, 2.1e6) == ["700 k", "1 M", "1.5 M", "2 M"]


@pytest.mark.parametrize("point", [(0, 50), (9, np.nan)])
def test_few_shot_refuses_missing_points(point):
    refuses("finite, .* above 0", paper.few_shot, {"a": [point]})
