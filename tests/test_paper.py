"""The paper as data: its models built and counted by timm, and its tables compared with each other."""

from dataclasses import replace

import pytest
import timm
import torch
from support import refuses

import vitlens_paper as paper
from vitlens import UnsupportedModelError, attention, capture
from vitlens_paper import (
    MODELS,
    TABLE_1,
    TABLE_2,
    TABLE_3,
    TABLE_5,
    TABLE_6,
    TABLE_7,
    TABLE_8,
    TABLE_9,
)
from vitlens_paper.variants import SETTINGS

SMALL = {"embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 10}


def on_meta(build, *args, **kwargs):
    with torch.device("meta"):
        return build(*args, **kwargs)


def parameters(model):
    return sum(p.numel() for p in model.parameters())


def shapes(model):
    return {name: tuple(t.shape) for name, t in model.state_dict().items()}


def shrunk(name):
    """The model with few narrow layers, and the size of its images; EfficientNet's smallest for its largest."""
    model = MODELS[name]
    torch.manual_seed(0)
    if model.kind == "EfficientNet":
        return paper.build(replace(model, timm="tf_efficientnet_b0"), num_classes=10), 64
    if model.kind == "ResNet":
        return paper.build(model, layers=(1, 2, 1, 1), channels=(128,) * 4, num_classes=10), 64
    size = 64 if model.kind == "hybrid" else 3 * int(name.partition("/")[2])
    return paper.build(name, img_size=size, **SMALL), size


def test_table_1_parameters_equal_timm():
    """Parameters within 1.5 % of the printed ones, with a head of 1,000 classes; those of B/32 by their difference."""
    for variant in TABLE_1:
        for name in (name for name in MODELS if name.startswith(f"ViT-{variant.name[4]}/")):
            model, patch = on_meta(paper.build, name), int(name.partition("/")[2])
            count = parameters(model)
            if name == "ViT-B/32":  # 88.2 million: Table 1 prints those of B/16
                count -= 768 * (3 * (32**2 - 16**2) - (14**2 - 7**2))
            assert count / 1e6 == pytest.approx(variant.parameters, rel=0.015)
            block = model.blocks[0]
            found = (
                len(model.blocks),
                model.embed_dim,
                block.attn.num_heads,
                block.mlp.fc1.out_features,
            )
            assert found == (variant.layers, variant.width, variant.heads, variant.mlp)
            assert model.patch_embed.patch_size == (patch, patch)
            assert variant.tokens(patch) == model.pos_embed.shape[1]


def test_halved_vit_equals_vit_small():
    assert shapes(on_meta(paper.build, "ViT-b/32")) == shapes(
        on_meta(timm.create_model, "vit_small_patch32_224")
    )
    half, base = on_meta(paper.build, "ViT-b/32"), on_meta(paper.build, "ViT-B/32")
    assert (2 * half.embed_dim, len(half.blocks)) == (base.embed_dim, len(base.blocks))


SOME = "ViT-b/32", "R50x1", "R50+ViT-B/32"
"""Models that are built in every run; all others are slow."""
both = pytest.mark.parametrize(
    "names",
    [SOME, pytest.param([n for n in MODELS if n not in SOME], marks=pytest.mark.slow)],
    ids=["some", "others"],
)


@both
def test_build_matches_shapes_of_public_weights(names):
    """The reference is timm's model for the weights. All shapes except positions and head are equal."""
    for name in names:
        model = MODELS[name]
        built = shapes(on_meta(paper.build, model))
        for weights in model.weights:
            assert weights.timm in timm.list_pretrained(weights.timm.split(".")[0] + "*")
            reference = shapes(
                on_meta(timm.create_model, weights.timm.split(".")[0], num_classes=1000)
            )
            reference.pop("pos_embed", None)
            assert {name: built[name] for name in reference} == reference


def test_build_resnet_equals_timm():
    built, named = paper.build("R50x1").eval(), timm.create_model("resnetv2_50x1_bit").eval()
    torch.manual_seed(0)
    for weight in named.parameters():  # small, so that the smallness of what divides them matters
        weight.data.mul_(1e-3)
    built.load_state_dict(named.state_dict())
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(built.forward_features(images), named.forward_features(images))


def test_build_hybrids_and_resnets_without_weights():
    """R50x2 is between its relatives, and stage 4's three blocks stand in stage 3 where the stride is 16."""
    wide, plain = (on_meta(paper.build, name) for name in ("R50x2", "R50x1"))
    assert all(
        a.shape[0] == 2 * b.shape[0]
        for a, b in zip(wide.stages.parameters(), plain.stages.parameters(), strict=True)
    )
    assert [len(s.blocks) for s in on_meta(paper.build, "R200x3").stages] == [3, 24, 36, 3]
    assert [len(s.blocks) for s in on_meta(paper.build, "R152x1").stages] == [3, 8, 36, 3]
    for name, grid, blocks in (("R50+ViT-L/16", 14, [3, 4, 9]), ("R50+ViT-B/32", 7, [3, 4, 6, 3])):
        embed = on_meta(paper.build, name).patch_embed
        assert embed.grid_size == (grid, grid)
        assert [len(s.blocks) for s in embed.backbone.stages] == blocks


@both
def test_build_models_run_and_inspect(names):
    for name in names:
        model, size = shrunk(name)
        images = torch.randn(2, 3, size, size)
        model.eval()
        if MODELS[name].kind in ("ViT", "hybrid"):
            with torch.no_grad(), capture(model) as attn:
                assert model(images).shape == (2, 10)
            found = attention.summary(attn)
            assert attn.grid.rows == attn.grid.cols == size // int(name.rpartition("/")[2])
            assert found.mean_distance.shape == (2, 2, 3)
            assert (found.mean_distance <= 1.01 * attn.grid.distances().max()).all()
        else:
            with torch.no_grad():
                assert model(images).shape == (2, 10)
            with (
                pytest.raises(UnsupportedModelError, match="vitlens cannot show .*: its? .*\\."),
                capture(model),
            ):
                pass


def test_build_overrides_arguments():
    assert paper.build("R50x1+ViT-B/32", img_size=64, **SMALL).num_classes == 10


def test_table_7_averages_equal_rows_and_table_6():
    for row in TABLE_7:
        assert round(row.average, 2) == row.accuracy["Average"]
        if row.optimizer == "Adam":
            same = next(r for r in TABLE_6 if (r.model, r.epochs) == (row.model, 7))
            assert {name: same.accuracy[name] for name in paper.FIVE} == {
                n: row.accuracy[n] for n in paper.FIVE
            }


def test_average_equals_figure_5():
    """By hand from Table 6, in its order; ViT-L/32 has reached R152x2 with a sixth of its exaFLOPs."""
    assert [round(row.average, 2) for row in TABLE_6] == [
        92.50,
        94.08,
        94.27,
        95.12,
        95.44,
        95.82,
        89.33,
        92.01,
        91.67,
        92.41,
        94.01,
        94.24,
        95.09,
        94.27,
        94.68,
        94.85,
        95.17,
        95.36,
    ]


def test_table_9_means_equal_table_2():
    """The last column of Table 9 is the mean over its 19 tasks, and the VTAB of Table 2 to a tenth."""
    for row in TABLE_9:
        assert len(row.accuracy) == 20
        means = paper.groups(row.accuracy)
        best = next(r for r in TABLE_2 if (r.model, r.data) == (row.model, row.data))
        assert means["VTAB"] == pytest.approx(row.accuracy["VTAB"], abs=0.051)
        assert means["VTAB"] == pytest.approx(best.accuracy["VTAB"], abs=0.02)
    assert [round(v, 2) for v in paper.groups(TABLE_9[0].accuracy).values()] == [
        77.63,
        86.69,
        87.0,
        65.03,
    ]


def test_table_5_equals_table_6():
    """JFT's columns of Table 5 are rows of Table 6, but for ViT-H/14, which the paper gives twice."""
    for row in TABLE_5:
        if row.data == "JFT-300M" and row.model != "ViT-H/14":
            assert row.accuracy in [r.accuracy for r in TABLE_6 if r.model == row.model]


def test_tables_name_known_models():
    rows = [row for table in (TABLE_2, TABLE_5, TABLE_6, TABLE_7, TABLE_9) for row in table]
    assert {row.model for row in rows} <= set(MODELS)
    assert {name for row in TABLE_3 for name in row.models} - {"ViT-*"} <= set(MODELS)


def test_table_8_positions_exceed_no_positions():
    """D.4: 0.61382 without, 0.64206 with the default; places and kinds are those of a recipe."""
    assert (TABLE_8["none"], TABLE_8["learned-1d"]["stem"]) == ({"stem": 61.382}, 64.206)
    rest = [value for kind, row in TABLE_8.items() if kind != "none" for value in row.values()]
    assert (
        len(rest) == 7 and max(rest) - min(rest) < 0.4 < 2.5 < min(rest) - TABLE_8["none"]["stem"]
    )
    for kind, row in TABLE_8.items():
        assert kind in SETTINGS["positions"] and row.keys() <= set(SETTINGS["positions_at"])


REFUSALS = (
    (lambda: paper.build("ViT-G/14"), ValueError, "got 'ViT-G/14'.*ViT-B/16"),
    (
        lambda: paper.build("ViT-b/32", nonsense=3),
        ValueError,
        "build ViT-b/32 .*'nonsense': 3.*: .*nonsense",
    ),
    (lambda: paper.build("R50x1", img_size=64), ValueError, "cannot build R50x1"),
    (lambda: paper.groups({}), KeyError, "Caltech101"),
    (lambda: TABLE_2[-1].average, KeyError, "CIFAR-10"),
)
"""A call, its error and decisive words."""


@pytest.mark.parametrize("call, error, words", REFUSALS)
def test_paper_refuses(call, error, words):
    refuses(words, call, error=error)
