"""Results in JSON files, and Tables 2, 5 and 9 with them beside the published numbers."""

import json

import pytest
from support import refuses

import vitlens_paper as paper
from vitlens_paper import MODELS, TABLE_2, VTAB
from vitlens_paper.evaluate import records
from vitlens_paper.result_tables import TEST_IMAGES
from vitlens_paper.tables import VTAB_NAMES
from vitlens_paper.tasks import VTAB as EVALUATED

RESULT = {
    "model": "vit_base_patch16_384.orig_in21k_ft_in1k",
    "data": "imagenet",
    "protocol": "top1",
    "metric": "top1",
    "value": 84.2,
    "low": 83.88,
    "high": 84.51,
    "images": 50_000,
    "when": "2026-01-02T03:04:05+00:00",
    "versions": {"torch": "2.9", "timm": "1.0.31"},
}


def written(path, *results):
    path.write_text(json.dumps(list(results)), encoding="utf-8")
    return path


def of(tmp_path, *changes):
    return records.read_results(
        written(tmp_path / "r.json", *(RESULT | change for change in changes))
    )


def cells(text, row):
    """The cells of every line of a row, in all blocks of columns."""
    return [
        cell
        for line in text.splitlines()
        if line.startswith(row)
        for cell in line[len(row) :].split()
    ]


ROWS = {
    "imagenet top1 top1": "ImageNet",
    "torch/imagenet top1 real": "ImageNet ReaL",
    "torch/oxford_iiit_pet finetune top1": "Oxford-IIIT Pets",
    "CIFAR-100 finetune top1": "CIFAR-100",
    "vtab vtab mean": "VTAB",
    "vtab/cifar100 vtab top1": "VTAB CIFAR-100",  # a thousand of its images, which is not the row CIFAR-100
    **dict.fromkeys(
        (
            "vtab800/pcam finetune top1",
            "vtab/pets knn top1",
            "imagenet top1 top5",
            "cifar10 top1 real",
            "imagenet knn top1",
            "my-photographs top1 top1",
        )
    ),
}


def test_row_of_records(tmp_path):
    for measured, row in ROWS.items():
        data, protocol, metric = measured.split(" ")
        whole = TEST_IMAGES.get(row, 50_000)
        record = {"data": data, "protocol": protocol, "metric": metric}
        some_damaged, another_split = round(0.995 * whole), round(0.9 * whole)
        found = of(
            tmp_path,
            *(record | {"images": images} for images in (whole, some_damaged, another_split)),
        )
        assert [paper.row_of(each) for each in found] == [
            row,
            row,
            row if row and row.startswith("VTAB") else None,
        ]


def test_table_2_adds_latest_records(tmp_path):
    text = paper.table_2(
        of(
            tmp_path,
            {"value": 84.1, "when": "2026-02-02T00:00:00+00:00"},
            {"weights": "b2", "value": 84.0},
            {},
            {"protocol": "finetune", "recipe": "epochs=1", "value": 84.3},
            {
                "model": "runs/mine",
                "data": "cifar10",
                "images": 10_000,
                "protocol": "finetune",
                "value": 84.25,
            },
            {"protocol": "knn"},
        )
    )
    assert max(map(len, text.split("\n(1)")[0].splitlines())) <= 120
    imagenet = cells(text, "ImageNet  ")
    for published in TABLE_2:
        assert f"{published.accuracy['ImageNet']:.2f}" in imagenet
    assert [cell for cell in imagenet if cell.startswith("84.") and "]" not in cell] == [
        "84.10",
        "84.30",
        "84.00",
    ]
    assert (
        "84.25" in cells(text, "CIFAR-10  ") and "84.20 [" not in text.split("Not in this table")[0]
    )
    assert "(1) runs/mine: not a model of the paper; finetune\n" in text
    assert "ViT-B/16 pre-trained on ImageNet-21k, the paper's weights, SHA-256 b2; top1" in text
    assert "images: CIFAR-10: 10,000; 2026-01-02; timm 1.0.31, torch 2.9" in text
    assert text.endswith("on imagenet, knn, top1: 84.20 [83.88, 84.51]")
    assert "ViT-H/14 ImageNet 88.36, ImageNet ReaL 90.77, VTAB 77.16 ± 0.29" in text


def test_table_5_separates_pretraining_data(tmp_path):
    names = "tf_efficientnet_l2.ns_jft_in1k", "vit_base_patch32_384.augreg_in1k", "runs/mine"
    text = paper.table_5(
        of(tmp_path, *({"model": name, "value": 84.1 + n / 10} for n, name in enumerate(names)))
    )
    source, places = "", {}
    for line in text.splitlines():
        source = next(
            (
                name
                for name in ("ImageNet-21k", "ImageNet", "JFT-300M", "unknown data")
                if line.startswith(name + " ")
            ),
            source,
        )
        places |= {value: source for value in ("84.10", "84.20", "84.30") if f"{value} [" in line}
    assert places == {"84.10": "JFT-300M", "84.20": "ImageNet", "84.30": "unknown data"}
    assert "weights of AugReg, not the paper's" in text


def test_table_9_has_groups_and_tasks(tmp_path):
    vtab = {"protocol": "vtab", "value": 60.4, "low": 60, "high": 61}
    text = paper.table_9(
        of(
            tmp_path,
            vtab | {"data": "vtab natural", "metric": "mean"},
            vtab | {"data": "vtab/sun397", "value": 60.5},
        )
    )
    assert cells(text, "VTAB Natural ")[:4] == ["86.7", "85.6", "83.3", "60.40"]
    assert cells(text, "VTAB Specialized ") == ["87.0", "86.7", "84.7", "–"]
    assert cells(text, "VTAB Sun397 ")[:4] == ["65.0", "63.5", "61.0", "60.50"]


def test_vtab_names_equal_tasks():
    tasks = [name for name in VTAB_NAMES if name.startswith("vtab/")]
    assert [(task.name, task.group) for task in EVALUATED] == [
        (name, group.lower())
        for name, group in zip(tasks, (g for g in VTAB for _ in VTAB[g]), strict=True)
    ]
    for older in paper.FIRST_SUBMISSION:
        (published,) = [p for p in TABLE_2 if (p.model, p.data) == (older.model, older.data)]
        assert all(published.accuracy[row] != value for row, value in older.accuracy.items())


OTHER_FILES = [
    "{",
    "3",
    json.dumps({name: value for name, value in RESULT.items() if name != "low"}),
    json.dumps(RESULT | {"value": 0.842}),
    json.dumps(RESULT | {"value": 101, "high": 102}),
    json.dumps(RESULT | {"value": float("nan")}),
    json.dumps(RESULT | {"value": "84"}),
    json.dumps(RESULT | {"images": 0}),
]


@pytest.mark.parametrize("text", OTHER_FILES)
def test_read_refuses_other_files(tmp_path, text):
    path = tmp_path / "r.json"
    path.write_text(text, encoding="utf-8")
    refuses(r"r\.json must be a file of", records.read_results, path)


def test_write_replaces_same_key(tmp_path):
    path = written(tmp_path / "r.json", RESULT, RESULT | {"model": "other", "unknown field": 1})
    records.write(
        path, [records.Record(**(RESULT | change)) for change in ({"value": 84.4}, {"seeds": 3})]
    )
    entries = json.loads(path.read_text(encoding="utf-8"))
    assert [(e["model"], e["value"], e.get("seeds")) for e in entries] == [
        ("other", 84.2, None),
        (RESULT["model"], 84.4, None),
        (RESULT["model"], 84.2, 3),
    ]
    assert entries[0]["unknown field"] == 1


def test_origin_by_name():
    for model in MODELS.values():
        assert paper.origin(model.name) == (model, None)
        for weights in model.weights:
            assert (
                paper.origin(weights.timm)
                == paper.origin(f"timm/{weights.timm}")
                == (model, weights)
            )
    assert paper.origin("vit_base_patch16_224.mae") == (MODELS["ViT-B/16"], None)
    assert paper.origin("runs/digits/model") == (None, None)
