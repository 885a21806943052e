"""One's own results beside the published ones, and the two commands that print the paper's models and tables."""

import json

import pytest
from test_cli import vitlens

from vitlens import paper
from vitlens.data.tasks import VTAB as EVALUATED
from vitlens.paper import MODELS, TABLE_2, TABLE_5, VTAB, records
from vitlens.paper.measured import TEST_IMAGES
from vitlens.paper.tables import VTAB_NAMES

RESULT = {
    "model": "vit_base_patch16_384.orig_in21k_ft_in1k", "data": "imagenet", "protocol": "top1", "metric": "top1",
    "value": 84.2, "low": 83.88, "high": 84.51, "images": 50_000, "when": "2026-01-02T03:04:05+00:00",
    "versions": {"torch": "2.9", "timm": "1.0.31"},
}  # fmt: skip


def written(path, *results):
    path.write_text(json.dumps(results[0] if len(results) == 1 else results), encoding="utf-8")
    return path


def lines(text):
    return {line[:28].strip(): line for line in text.splitlines()}


@pytest.mark.parametrize("row, measured", [
    ("ImageNet", "imagenet top1 top1"),
    ("ImageNet ReaL", "torch/imagenet top1 real"),
    ("ImageNet ReaL", "imagenet-real top1 real"),
    ("Oxford-IIIT Pets", "torch/oxford_iiit_pet finetune top1"),
    ("Oxford Flowers-102", "flowers102 finetune top1"),
    ("CIFAR-100", "CIFAR-100 finetune top1"),
    ("VTAB", "vtab vtab mean"),
    ("VTAB Natural", "vtab natural vtab mean"),
    ("VTAB CIFAR-100", "vtab/cifar100 vtab top1"),  # a thousand of its images: not the row CIFAR-100
    ("VTAB Camelyon", "vtab/pcam finetune top1"),
    *((None, words) for words in (
        "vtab800/pcam finetune top1", "vtab/pets knn top1", "imagenet top1 top5", "imagenet-real top1 top1",
        "cifar10 top1 real", "imagenet knn top1", "cifar10 fewshot top1", "my-photographs top1 top1",
    )),
])  # fmt: skip
def test_what_is_a_row_of_the_tables(tmp_path, row, measured):
    data, protocol, metric = measured.rsplit(" ", 2)
    images = TEST_IMAGES.get(row, 50_000)
    record = RESULT | {"data": data, "protocol": protocol, "metric": metric, "images": images}
    fewer = [record | {"images": round(share * images)} for share in (0.995, 0.9)]  # some damaged, and a folder's own
    found = records.read(written(tmp_path / "r.json", record, *fewer))
    assert [paper.row_of(each) for each in found] == [row, row, row if row and row.startswith("VTAB") else None]


def test_models_of_one_name_have_columns_of_their_own(tmp_path):
    both = [RESULT | {"value": value, "weights": weights} for value, weights in ((84.2, "a1"), (84.0, "b2"))]
    tuned = [RESULT | {"protocol": "finetune", "value": 84.1, "recipe": "epochs=1"}]
    printed = paper.table_2(records.read(written(tmp_path / "r.json", *both, *tuned)))
    assert all(f"{value:.2f} [" in printed for value in (84.2, 84.0, 84.1)) and "(3) vit_base_patch16_384" in printed
    assert "SHA-256 a1" in printed and "SHA-256 b2" in printed and "protocol finetune, epochs=1;" in printed


@pytest.mark.parametrize("model, words", [
    ("vit_base_patch16_224.orig_in21k", "ViT-B/16 pre-trained on ImageNet-21k, the paper's own weights"),
    ("vit_base_patch16_224.dino", "ViT-B/16 with the weights dino of timm, which are not the paper's"),
    ("vit_base_patch16_224", "ViT-B/16 by its name, which does not tell the weights"),
    ("runs/mine", "not a model of the paper"),
])  # fmt: skip
def test_a_name_is_told_for_what_it_is(tmp_path, model, words):
    assert f": {words}\n" in paper.table_2(records.read(written(tmp_path / "r.json", RESULT | {"model": model})))


def test_table_2_keeps_what_was_printed_and_adds_a_column(tmp_path):
    other = RESULT | {"model": "runs/mine", "data": "cifar10", "images": 10_000, "protocol": "finetune"}
    other |= {"value": 91.234, "low": 90.0}
    nothing = RESULT | {"data": "imagenet", "protocol": "knn"}
    later = RESULT | {"value": 84.1, "when": "2026-02-02T00:00:00+00:00"}
    text = paper.table_2(records.read(written(tmp_path / "r.json", later, RESULT, other | {"high": 92}, nothing)))
    found = lines(text)
    imagenet, cifar = found["ImageNet            88.55 ±"], found["CIFAR-10            99.50 ±"]
    for published in TABLE_2:
        assert f"{published.accuracy['ImageNet']:.2f}" in imagenet
    assert "88.55 ± 0.04" in imagenet and imagenet.endswith("88.40             –")
    assert cifar.endswith("91.23 [90.00, 92.00]")
    assert "\n          measured\n          (2)\nImageNet  84.10 [83.88, 84.51]\n\n" in text, "the next one below"
    assert "published" in text and "measured" in text and "BiT-L R152x4" in text
    assert f"(2) {RESULT['model']}: ViT-B/16 pre-trained on ImageNet-21k, the paper's own weights" in text
    assert "    protocol top1; ImageNet: 50,000 images; 2026-02-02; timm 1.0.31, torch 2.9" in text
    assert "(1) runs/mine: not a model of the paper" in text
    assert text.endswith("imagenet, knn, top1: 84.20 [83.88, 84.51]")


def test_table_5_puts_a_model_with_the_data_that_it_was_pre_trained_on(tmp_path):
    names = ("ViT-B/16", "tf_efficientnet_l2.ns_jft_in1k", RESULT["model"], "vit_base_patch32_384.augreg_in1k")
    columns = (None, "JFT-300M", "ImageNet-21k", "ImageNet")
    text = paper.table_5(records.read(written(tmp_path / "r.json", *(RESULT | {"model": n} for n in names))))
    first, below = text.split("pre-trained on  ")[1:]
    printed = [line.split() for line in first.splitlines() if line.startswith("  ImageNet  ")]
    assert len(printed) == 4
    for line, data in zip(printed, ("ImageNet", "ImageNet-21k", "JFT-300M", None), strict=True):
        values = [p.accuracy["ImageNet"] for p in TABLE_5 if p.data == data]
        assert line[1:6] == [f"{v:.2f}" for v in values] + ["–"] * (5 - len(values))
        mine = " ".join(line[6:]).replace("84.20 [83.88, 84.51]", "here").split()
        assert mine == ["here" if data == each else "–" for each in columns[:2]]
    rest = [
        " ".join(line.split()).replace("84.20 [83.88, 84.51]", "here") for line in below.split("\n\n")[0].split("\n")
    ]
    assert rest == ["(3) (4)", "ImageNet", "ImageNet – here", "ImageNet-21k", "ImageNet here –"]
    assert "weights of AugReg, not the paper's" in text and "which does not tell the weights" in text
    assert "CIFAR" not in text.split("not told by the name\n")[1]


BASE = {"model": "vit_large_patch16_224.orig_in21k", "weights": "a1", "value": 60.0, "low": 59.0, "high": 61.0}
SYSTEM = [
    RESULT | BASE | {"protocol": "finetune", "data": "cifar10", "images": 10_000, "value": 60.1},
    RESULT | BASE | {"protocol": "finetune", "data": "flowers102", "images": 6_149, "value": 60.2, "recipe": "lr=1"},
    RESULT | BASE | {"protocol": "vtab", "data": "vtab", "metric": "mean", "value": 60.3},
    RESULT | BASE | {"protocol": "vtab", "data": "vtab natural", "metric": "mean", "value": 60.4},
    RESULT | BASE | {"protocol": "vtab", "data": "vtab/sun397", "value": 60.5},
    RESULT | {"model": "other", "weights": "b2", "value": 84.6},
    RESULT | {"model": "other", "weights": "b2", "value": 84.7, "high": 85, "metric": "real", "images": 46_837},
]


def test_results_of_one_system_stand_in_one_column(tmp_path):
    """Fine-tuning, VTAB and top-1, whatever the protocol; of several models, where they are given one name."""
    by_model = vitlens("table", written(tmp_path / "r.json", *[r | {"high": 85} for r in SYSTEM])).stdout
    assert "(2)" in by_model and "(3)" not in by_model
    text = vitlens("table", tmp_path / "r.json", "--as", f"ViT-L/16 mine={BASE['model']}, b2").stdout
    assert "(2)" not in text
    found = {line[:18].strip(): line for line in text.split("The first submission")[0].splitlines()}
    for row, value in (("CIFAR-10", "60.10 ["), ("Oxford Flowers-102", "60.20 ["), ("VTAB", "60.30 ["),
                       ("ImageNet", "84.60 ["), ("ImageNet ReaL", "84.70 [")):  # fmt: skip
        assert value in found[row], row
    assert "(1) ViT-L/16 mine\n" in text and f"    {BASE['model']}: ViT-L/16 pre-trained on ImageNet-21k" in text
    assert "protocol finetune, lr=1; Oxford Flowers-102: 6,149 images" in text
    for wrong, sentence in ((f"x={BASE['model']},nowhere", "No result is of 'nowhere', which 'x' is to be made of."),
                            ("nothing", "--as NAME=MODEL,MODEL")):  # fmt: skip
        assert sentence in vitlens("table", tmp_path / "r.json", "--as", wrong, expect=2).stderr


def test_two_manners_of_one_model_stay_apart(tmp_path):
    """What was measured twice, by two recipes, has two columns; the rest of each stays with it."""
    other = {"recipe": "epochs=1", "value": 59.5}
    found = [SYSTEM[0], SYSTEM[0] | other, SYSTEM[0] | other | {"data": "cifar100"}]
    text = paper.table_2(records.read(written(tmp_path / "r.json", *found)))
    assert "CIFAR-10   59.50 [59.00, 61.00]\nCIFAR-100  59.50 [59.00, 61.00]\n" in text


def test_groups_and_tasks_of_vtab_have_a_table(tmp_path):
    found = records.read(written(tmp_path / "r.json", *SYSTEM[:5]))
    text = paper.table_9(found)
    rows = {line[:13].strip(): line.split() for line in text.splitlines()}
    assert rows["Natural"] == ["Natural", "86.7", "85.6", "83.3", "60.40", "[59.00,", "61.00]"]
    assert rows["Specialized"][1:] == ["87.0", "86.7", "84.7", "–"]
    assert rows["Structured"][1:] == ["65.0", "63.0", "57.5", "–"]
    assert rows["Sun397"][1:5] == ["65.0", "63.5", "61.0", "60.50"]
    assert rows["all 19"][2:6] == ["77.6", "76.3", "72.7", "60.30"]
    assert "Table 9: " not in vitlens("table", written(tmp_path / "s.json", RESULT)).stdout, (
        "nothing of it was measured"
    )


def test_tasks_of_vtab_are_those_that_are_evaluated():
    tasks = [name for name in VTAB_NAMES if name.startswith("vtab/")]
    assert [(task.name, task.group) for task in EVALUATED] == [
        (name, group.lower()) for name, group in zip(tasks, (g for g in VTAB for _ in VTAB[g]), strict=True)
    ]


def test_tables_fit_a_terminal(tmp_path):
    """120 characters, however many models and however long their names and recipes."""
    many = [
        r | {"model": f"{'runs/a-name-' * n}{n}", "recipe": "key=value, " * n + "z"} for n in range(14) for r in SYSTEM
    ]
    text = vitlens("table", written(tmp_path / "r.json", *[r | {"high": 85} for r in many])).stdout
    assert max(map(len, text.splitlines())) <= 120 and text.count("60.10 [59.00, 85.00]") == 2 * 14


def test_what_is_in_no_table_says_its_shots(tmp_path):
    few = [RESULT | {"data": "flowers5", "protocol": "fewshot", "shots": shots, "seeds": 3} for shots in (1, 5)]
    near = RESULT | {"data": "flowers5", "protocol": "knn", "neighbors": 20}
    text = " ".join(paper.table_2(records.read(written(tmp_path / "r.json", *few, near))).split())
    for manner in ("fewshot, 1 shot", "fewshot, 5 shots", "knn, 20 neighbors"):
        assert f"on flowers5, {manner}, top1: 84.20" in text


def test_the_first_submission_stands_beside_as_such():
    """Numbers of the first version of the paper, which the published one replaced."""
    found = {p.model: p for p in paper.FIRST_SUBMISSION}
    huge, large = found["ViT-H/14"], found["ViT-L/16"]
    assert dict(huge.accuracy) == {"ImageNet": 88.36, "ImageNet ReaL": 90.77, "VTAB": 77.16}
    assert dict(large.accuracy) == {"ImageNet": 87.61, "ImageNet ReaL": 90.24, "VTAB": 75.91}
    assert huge.spread == {"VTAB": 0.29} and large.spread == {"ImageNet": 0.03, "ImageNet ReaL": 0.03, "VTAB": 0.18}
    for older in paper.FIRST_SUBMISSION:
        (published,) = [p for p in TABLE_2 if (p.model, p.data) == (older.model, older.data)]
        assert all(published.accuracy[row] != value for row, value in older.accuracy.items())
        assert older not in paper.results(older.model).get("Table 2", ())
    text = " ".join(paper.table_2([]).split())
    assert (
        "first submission of the paper (October 2020) has other numbers, which these replaced: ViT-H/14 ImageNet 88.36,"
        in text
    )
    assert text.index("TPUv3-core-days") < text.index("88.36")


@pytest.mark.parametrize("text, words", [
    ("{", "cannot be read as JSON"),
    ("3", "a result has model, data, .* is missing"),
    (json.dumps({k: v for k, v in RESULT.items() if k not in ("low", "when")}), "but low, when is missing"),
    *((json.dumps(RESULT | change), words) for change, words in (
        ({"value": 0.842}, "high ≤ 100, in per cent, .* has 83.88, 0.842 and 84.51"),
        ({"value": 101, "high": 102}, "0 ≤ low ≤ value ≤ high ≤ 100, .* has 83.88, 101 and 102"),
        ({"low": 84.3}, "has 84.3, 84.2 and 84.51 for vit_base"),
        ({"value": float("nan")}, "has 83.88, nan and"),
        ({"value": "84"}, "value = '84'; expected int . float"),
        ({"images": 0}, "images = 0; expected 1 or more"),
        ({"images": True}, "images = True; expected int"),
        ({"model": None}, "model = None; expected str"),
        ({"weights": None}, "weights = None; expected str"),
        ({"recipe": ["a"]}, "recipe = .'a'.; expected str . None"),
        ({"note": 3}, "note = 3; expected str . None"),
        ({"shots": "5"}, "shots = '5'; expected int . None"),
        ({"versions": "2.9"}, "versions = '2.9'; expected dict"),
    )),
])  # fmt: skip
def test_what_is_no_result_is_told(tmp_path, text, words):
    path = tmp_path / "r.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=words):
        records.read(path)
    told = vitlens("table", path, expect=2)
    assert told.stderr.startswith("vitlens: ") and told.stderr.count("\n") == 1 and not told.stdout


def test_the_command_prints_both_tables(tmp_path):
    one = written(tmp_path / "a.json", RESULT)
    two = written(tmp_path / "b.json", RESULT | {"metric": "real", "extra": 1}, RESULT | {"model": "x"})
    text = vitlens("table", one, two).stdout
    assert text.index("Table 2: ") < text.index("Table 5: ")
    assert text.count("84.20 [83.88, 84.51]") == 6
    assert "No such file" in vitlens("table", tmp_path / "none.json", expect=2).stderr


def test_models_lists_those_whose_name_matches():
    text = vitlens("models", "b/32").stdout
    assert [line.split()[0] for line in text.splitlines()[1:4]] == ["ViT-B/32", "ViT-b/32", "R50+ViT-B/32"]
    line = text.splitlines()[1]
    assert line.split()[1:7] == ["88.2", "M", "8.8", "7:", "56", "(55)"]
    assert line.endswith("vit_base_patch32_224.orig_in21k and 5 more")
    assert text.splitlines()[3].endswith("none")
    assert text.splitlines()[2].split()[4] == "–" and "– where its Table 6 has none" in text
    weights = vitlens("models", "R50x1", "--weights").stdout
    assert "    resnetv2_50x1_bit.goog_in21k: ImageNet-21k, BiT-M, as pre-trained\n" in weights
    assert "goog_in21k_ft_in1k: ImageNet-21k, BiT-M, ImageNet's classes\n" in weights
    assert vitlens("models", "BiT-L").stdout.splitlines()[1].startswith("R152x4 ")
    told = vitlens("models", "swin", expect=2).stderr
    assert told.startswith("vitlens: No model of the paper has 'swin' in its name; there are ViT-B/16, ")


@pytest.mark.parametrize("names, texts", [
    (["R152x4"], ["BiT-L", "bit-l r152x4", "BiT-M R152x4"]),
    (["R50x2"], ["BiT R50x2"]),
    (["EfficientNet-L2"], ["Noisy Student"]),
    (["ViT-H/14"], ["ViT-Huge", "ViT-H-14"]),
    (["ViT-L/32", "R50+ViT-L/32"], ["ViT-Large/32"]),
    (["ViT-L/16", "R50+ViT-L/16"], ["vit_l_16"]),
    (["R50+ViT-B/32"], ["R50x1+ViT-B/32"]),
    (["R152x2"], ["ResNet152x2"]),
    ([name for name in MODELS if name.startswith("R50+")], ["hybrid"]),
    ([name for name in MODELS if "/" in name], ["/"]),
    (list(MODELS), [""]),
    ([], ["swin", "?"]),
])  # fmt: skip
def test_models_are_found_by_the_names_that_people_write(names, texts):
    for text in texts:
        assert [model.name for model in paper.matching(text)] == names, text


def test_names_lead_to_models_and_weights():
    for model in MODELS.values():
        assert paper.origin(model.name) == (model, None)
        for weights in model.weights:
            assert paper.origin(weights.timm) == paper.origin(f"timm/{weights.timm}") == (model, weights)
    assert paper.origin("vit_base_patch16_224.mae") == (MODELS["ViT-B/16"], None)
    assert paper.origin("R50x1+ViT-B/32") == (MODELS["R50+ViT-B/32"], None)
    assert paper.origin("runs/digits/model") == (None, None)
