"""Scripts of `experiments/`: the tables that they write."""

import datetime
import importlib
import importlib.util
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file

from experiments import bundle, results, training
from experiments.gpu.__main__ import CHOICES
from vitlens import load_model
from vitlens.images import samples
from vitlens.train import hardware

ROOT = Path(__file__).parent.parent


def test_table_records_its_command(tmp_path):
    how = results.about("python -m experiments.some")
    assert how == {
        "device": hardware("cpu"),
        "python": sys.version.split()[0],
        "torch": str(torch.__version__),
        "timm": timm.__version__,
        "date": datetime.date.today().isoformat(),
        "command": "python -m experiments.some",
    }
    path = tmp_path / "new" / "table.csv"
    results.write(path, ({"a": k} | ({"b": "one, two"} if k else {}) | how for k in range(2)))
    assert path.read_bytes().startswith(b"a,device,") and b"\r" not in path.read_bytes()
    rows = pd.read_csv(path, keep_default_na=False)
    assert list(rows) == ["a", *how, "b"] and rows["b"].tolist() == ["", "one, two"]


def test_table_keeps_rows_of_other_methods(tmp_path):
    path = tmp_path / "table.csv"
    assert results.kept(path, ["b"], {"images": 5}) == []
    results.write(
        path,
        [{"method": name, "images": 5, "score": score} for name, score in (("a", 1), ("b", 2))],
    )
    assert results.kept(path, [], {"images": 6}) == [], "all methods are measured again"
    assert results.kept(path, ["b", "c"], {"images": 5}) == [
        {"method": "a", "images": "5", "score": "1"}
    ]
    with pytest.raises(ValueError, match="table.csv has images 5, and new rows have 6"):
        results.kept(path, ["b"], {"images": 6})


def test_committed_tables_are_csv_with_command():
    tables = sorted(ROOT.glob("data/results/*.csv"))
    assert len(tables) > 10 and not [path.name for path in tables if b"\r" in path.read_bytes()]
    assert all(pd.read_csv(path)["command"].notna().all() for path in tables)


def test_training_script_measures_all_loops(monkeypatch):
    monkeypatch.setitem(
        training.SQUARE, "cpu", 64
    )  # 2048³ in bf16 takes half a minute a product without its hardware
    monkeypatch.setitem(training.WIDTHS, "ViT-Ti", 64)
    case = training.Case("ViT-Ti", 32, 8, 4, "bf16")
    rows = training.measured(case, torch.device("cpu"), turns=2, steps=1)
    assert [row["loop"] for row in rows] == ["vitlens", "timm"] and rows[0]["vitlens_ratio"] == 1
    assert all(row["images_per_second"] > 0 and row["share_of_matmul"] > 0 for row in rows)

    def full(*_):
        raise MemoryError("the device is full")

    monkeypatch.setattr(training, "ours", full)
    (row,) = training.measured(case, torch.device("cpu"), turns=2, steps=1)
    assert row["loop"] == "timm" and row["vitlens_ratio"] == ""


@pytest.mark.parametrize("has", [True, False])
def test_training_script_measures_device_precisions(monkeypatch, has):
    monkeypatch.setattr(training, "computes_bf16", lambda device: has)
    found = {case.precision for case in training.cases(torch.device("cpu"), tiny=False, batch=None)}
    assert found == ({"fp32", "bf16"} if has else {"fp32"})


SMALL = "data/checkpoints/vit_tiny_patch8_64"
RUNS = {
    "attention": ([], "attention-cpu"),
    "attribution": ([], "attribution-memory-cpu"),
    "digits": ([], "digits"),
    "explain_cost": ([], "explain-cost"),
    "explanations": (
        ["--model", SMALL, "--data", "PARQUET", "--rows", "OUT/rows.csv"],
        "explanations",
    ),
    "explorer": ([], "explorer"),
    "finetune": (["--model", results.SPECIMEN, "--data", "FOLDER"], "finetune-flowers5"),
    "finetune_digits": ([], "finetune-digits"),
    "kills": ([], "kills"),
    "lens": (["--data", "FOLDER"], "lens"),
    "page": ([], "page"),
    "page_models": ([], "page-models"),
    "peers": ([], "peers"),
    "planted": ([], "planted"),
    "plants": (["audit", "--data", "textures", "--runs", "OUT/runs"], "plants"),
    "pruning": (["--data", "FOLDER"], "pruning"),
    "registers": (["--data", "FOLDER"], "registers"),
    "sinks": (["--data", "FOLDER"], "sinks"),
    "sinks_lens": (["--data", "FOLDER"], "sinks-lens"),
    "specimen": (["--data", "FOLDER"], "specimen"),
    "stream": ([], "stream-cpu"),
    "studies": (["data-size-digits", "--data", "digits", "--runs", "OUT/runs"], "data-size-cpu"),
    "support": ([], "support"),
    "timm_support": ([], "timm-support"),
    "uniform": ([], "uniform"),
    "watermark": (["--model", results.SPECIMEN, "--data", "digits"], "watermark"),
    "time_to_accuracy": (["--data", "digits", "--set", "num_classes=10"], ""),
    "training": ([], "throughput-cpu"),
}
"""By script: its arguments beside --tiny and --out, and the table of data/results that it makes."""


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """Crops of the sample photographs: a folder with three classes of the specimen, and a Parquet file."""
    folder, encoded = tmp_path_factory.mktemp("photographs"), []
    crops = [
        image.crop((k, k, k + 160, k + 160))
        for image in samples().values()
        for k in range(0, 80, 20)
    ]
    for number, crop in enumerate(crops[:24]):
        place = (
            folder
            / ("valid" if number % 2 else "train")
            / ("trilobite", "scorpion", "tarantula")[number // 2 % 3]
        )
        place.mkdir(parents=True, exist_ok=True)
        crop.convert("RGB").save(path := place / f"{number}.png")
        encoded.append({"bytes": path.read_bytes(), "path": path.name})
    pq.write_table(pa.table({"image": encoded}), folder.with_suffix(".parquet"))
    return folder


def test_scripts_are_all_tested():
    scripts = {
        ".".join(path.relative_to(ROOT / "experiments").with_suffix("").parts)
        for path in ROOT.glob("experiments/**/*.py")
        if "\ndef main(" in path.read_text(encoding="utf-8")
    }
    # test_speed.py runs speed, and test_photographs.py tests photographs
    assert scripts == {*RUNS, "bundle", "gpu.__main__", "photographs", "readme_picture", "speed"}


def main(name, arguments):
    """Run a script in a new thread: in this one, another test's browser may be running, beside which none can start."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(importlib.import_module(f"experiments.{name}").main, arguments).result()


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_script_writes_the_columns_of_the_committed_table(name, photographs, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    places = {
        "OUT": str(tmp_path),
        "FOLDER": str(photographs),
        "PARQUET": str(photographs.with_suffix(".parquet")),
    }
    arguments, table = RUNS[name]
    for word, place in places.items():
        arguments = [argument.replace(word, place) for argument in arguments]
    main(name, [*arguments, "--tiny", "--out", str(tmp_path / "table.csv")])
    rows = pd.read_csv(tmp_path / "table.csv")
    assert len(rows) and rows["command"].str.startswith(f"python -m experiments.{name} ").all()
    if table:
        assert set(rows) >= set(pd.read_csv(ROOT / "data" / "results" / f"{table}.csv"))


@pytest.mark.slow
def test_readme_picture_draws(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    main("readme_picture", ["--out", str(tmp_path)])
    assert Image.open(tmp_path / "inspection.jpg").width > 1000
    assert Image.open(tmp_path / "explorer.webp").n_frames == 8


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_gpu_statistics_are_measured_in_the_interpreter(tmp_path):
    measure_on_cpu(1, tmp_path / "table.csv")
    rows = pd.read_csv(tmp_path / "table.csv")
    assert rows["way"].tolist()[:2] == ["rows", "fewer passes"] and len(rows) == 7
    assert "problem" not in rows and (rows["together/forward"] > 0).all()
    assert (rows.filter(like="_error") < 1e-5).all(axis=None)
    assert rows["command"].str.startswith("python -m experiments.gpu 1 --tiny").all()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU tests run on this machine")
def test_gpu_tests_are_recorded_without_a_gpu(tmp_path):
    measure_on_cpu(2, tmp_path / "tests.json")
    record = json.loads((tmp_path / "tests.json").read_text(encoding="utf-8"))
    assert record["device"] is None and not record["failures"] and not record["exit_code"]
    assert set(record["outcomes"]) == {path.name for path in ROOT.glob("tests/gpu/test_*.py")}


@pytest.mark.slow
def test_gpu_table_of_attention_is_measured_on_a_cpu(tmp_path):
    measure_on_cpu(3, tmp_path / "table.csv")
    (row,) = pd.read_csv(tmp_path / "table.csv").to_dict("records")
    committed = pd.read_csv(ROOT / "data" / "results" / "attention-h200.csv").columns
    assert {name for name in committed if "MiB" not in name} <= set(row)
    assert row["compiled_difference"] < 1e-5 and row["summary_alone/forward"] > 0


@pytest.mark.slow
def test_training_rows_of_a_gpu_run_on_a_cpu(tmp_path):
    measure_on_cpu(4, tmp_path / "speed.csv")
    assert set(pd.read_csv(tmp_path / "speed.csv")["loop"]) >= {"vitlens", "timm"}
    settings = ["--set", "num_classes=10", "--set", "batch_size=32"]
    measure_on_cpu(5, tmp_path / "choice.csv", "--data", "digits", *settings)
    table = pd.read_csv(tmp_path / "choice.csv")
    assert table["settings"].nunique() == len(CHOICES) and (table["top1"] >= 0).all()
    assert [path.name for path in tmp_path.glob("choice*")] == ["choice.csv"]


@pytest.mark.slow
def test_longer_rows_of_a_gpu_run_on_a_cpu(tmp_path):
    settings = ["--set", "batch_size=32", "--set", "train_images=64", "--set", "valid_images=32"]
    for _ in range(2):  # a second call finds the finished run
        measure_on_cpu(7, tmp_path / "run", "--data", "digits", *settings)
    assert json.loads((tmp_path / "run/training.json").read_text())["finished"]
    assert load_model(tmp_path / "run/model").num_classes == 10
    measure_on_cpu(9, tmp_path / "sizes.csv", "--data", "digits")
    assert pd.read_csv(tmp_path / "sizes.csv")["kind"].unique().tolist() == [
        "ViT",
        "hybrid",
        "ResNet",
    ]


def measure_on_cpu(row, out, *options):
    command = [sys.executable, "-m", "experiments.gpu", str(row), "--tiny", "--out", str(out)]
    subprocess.run([*command, *options], cwd=ROOT, check=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the measurement would start")
def test_gpu_measurements_need_a_device(tmp_path):
    with pytest.raises(SystemExit, match="PyTorch finds no CUDA device here. Add --tiny"):
        importlib.import_module("experiments.gpu.__main__").main(["1", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="Row 6 trains on images. Add --data"):
        importlib.import_module("experiments.gpu.__main__").main(["6", "--out", str(tmp_path)])


def test_bundle_stores_weights_in_half_precision(tmp_path):
    model = timm.create_model(bundle.ARCHITECTURE)
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    out = tmp_path / "model"
    bundle.main(["--weights", str(tmp_path / "weights.pth"), "--out", str(out)])
    stored = load_file(out / "model.safetensors")
    for name, tensor in model.state_dict().items():
        assert torch.equal(stored[name], tensor.half())
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    committed = json.loads(
        (ROOT / "data/checkpoints/deit_tiny" / "config.json").read_text(encoding="utf-8")
    )
    assert config == committed
