"""The calls, numbers and refusals that pages of docs/ state."""

import csv
import functools
import re
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import torchvision

import vitlens
from vitlens import UnsupportedModelError, capture
from vitlens.images import samples
from vitlens.recorder.supported import registration

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def blocks(text, kind="python"):
    """The blocks of code of a language in a file."""
    return re.findall(rf"```{kind}\n(.*?)```", (ROOT / text).read_text(encoding="utf-8"), re.S)


def small_model(**options):
    """A narrow model of six layers with the size and classes of the bundled one."""
    torch.manual_seed(0)
    size = options.pop("img_size", 224)
    model = timm.create_model(
        "deit_tiny_patch16_224", depth=6, embed_dim=24, img_size=size, num_classes=1000
    )
    model.pretrained_cfg = dict(config())
    return model.eval()


@functools.cache
def config():
    """The configuration of the bundled model, which names its classes."""
    return vitlens.load_model().pretrained_cfg


@pytest.fixture
def readme(tmp_path, monkeypatch):
    """The names that the lines of the README make, in an empty folder with a photo, of a small model."""
    import matplotlib.pyplot as plt

    config()
    opened = vitlens.load_model

    def load_model(name=None, **options):
        return small_model(**options) if name is None else opened(name, **options)

    monkeypatch.setattr(vitlens, "load_model", load_model)
    samples()["chelsea"].save(tmp_path / "cat.jpg")
    monkeypatch.chdir(tmp_path)
    names = {}
    exec("".join(blocks("README.md")), names)
    yield names
    plt.close("all")


def calls():
    """The call of every row of docs/questions.md."""
    text = (DOCS / "questions.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .+? \| `([^`]+)` \| \[.+\]\(.+\) \|$", text, re.M)
    assert len(rows) == 30
    return rows


SLOW = ("runs/digits", "report.inspect", "save_page")
"""Parts of the calls that train a model, draw every figure or compute every view."""


def is_slow(call):
    return any(part in call for part in SLOW)


def run_all(chosen, names, monkeypatch):
    monkeypatch.setattr(registration, "FAMILIES", dict(registration.FAMILIES))
    exec("".join(blocks("docs/questions.md")), names)
    failed = []
    for call in chosen:
        try:
            exec(call, names)
        except Exception as error:
            failed.append(f"{call}: {type(error).__name__}: {error}")
    assert not failed, "\n".join(failed)


def test_calls_of_the_questions_run(readme, monkeypatch):
    run_all([call for call in calls() if not is_slow(call)], readme, monkeypatch)


@pytest.mark.slow
def test_calls_of_the_questions_that_train_and_draw_run(readme, monkeypatch):
    chosen = [call for call in calls() if is_slow(call)]
    assert len(chosen) == 5
    run_all(chosen, readme, monkeypatch)


def pairs():
    """(heading, code of the other library, code with vitlens) of docs/migration.md."""
    text = (DOCS / "migration.md").read_text(encoding="utf-8")
    pattern = r"^## (\S+?):?\b.*?```py\n(.*?)```.*?```python\n(.*?)```"
    return re.findall(pattern, text, re.S | re.M)


@pytest.mark.parametrize(
    "library, module", [("timm", "timm"), ("pytorch", "pytorch_grad_cam"), ("captum", "captum")]
)
def test_migration_gives_the_same_numbers(readme, library, module):
    pytest.importorskip(module)
    (theirs, ours) = {name: code for name, *code in pairs()}[library]
    exec(theirs, readme)
    exec(ours, readme)
    theirs, ours = readme["theirs"], readme["ours"].float()
    assert theirs.shape == ours.shape
    if library == "pytorch":
        assert np.corrcoef(theirs.ravel(), ours.ravel())[0, 1] > 0.99
        return
    assert (theirs - ours).abs().max() < 1e-5 * max(1, ours.abs().max())
    if library == "timm":
        torch.testing.assert_close(readme["extracted"], theirs, atol=1e-6, rtol=0)


def of_transformers(name, config, **small):
    transformers = pytest.importorskip("transformers")
    tiny = dict(hidden_size=24, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24)
    return getattr(transformers, name)(getattr(transformers, config)(**(tiny | small)))


def of_timm(name):
    return timm.create_model(name)


REFUSED = {
    "Swin": lambda: of_timm("swin_tiny_patch4_window7_224"),
    "SAM": lambda: of_timm("samvit_base_patch16_224"),
    "MViT": lambda: of_timm("mvitv2_tiny"),
    "LeViT": lambda: of_timm("levit_128s"),
    "PiT": lambda: of_timm("pit_ti_224"),
    "Hiera": lambda: of_timm("hiera_tiny_224"),
    "XCiT": lambda: of_timm("xcit_nano_12_p16_224"),
    "CaiT": lambda: of_timm("cait_xxs24_224"),
    "ConViT": lambda: of_timm("convit_tiny"),
    "VOLO": lambda: of_timm("volo_d1_224"),
    "CoaT": lambda: of_timm("coat_lite_tiny"),
    "CoAtNet": lambda: of_timm("coatnet_nano_rw_224"),
    "MobileViT": lambda: of_timm("mobilevit_xxs"),
    "ResNet": lambda: of_timm("resnet18"),
    "MLP-Mixer": lambda: of_timm("mixer_s32_224"),
    "Differential Transformer": lambda: of_timm("vit_dwee_patch16_reg1_gap_256"),
    "VideoMAE": lambda: of_transformers("VideoMAEModel", "VideoMAEConfig"),
    "ViViT": lambda: of_transformers("VivitModel", "VivitConfig"),
    "TimeSformer": lambda: of_transformers("TimesformerModel", "TimesformerConfig"),
    "DETR": lambda: of_transformers(
        "DetrModel",
        "DetrConfig",
        d_model=24,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
    ),
    "YOLOS": lambda: of_transformers("YolosModel", "YolosConfig"),
    "DPT": lambda: of_transformers("DPTForDepthEstimation", "DPTConfig"),
    "SegFormer": lambda: of_transformers(
        "SegformerModel", "SegformerConfig", num_attention_heads=[1, 2, 5, 8]
    ),
    "Qwen2.5-VL": lambda: of_transformers(
        "Qwen2_5_VLModel",
        "Qwen2_5_VLConfig",
        vision_config=dict(depth=1, hidden_size=24, num_heads=2, out_hidden_size=24),
        text_config=dict(
            hidden_size=24, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24
        ),
    ),
}
"""A model of a row of docs/limits.md, on the meta device."""


def reasons():
    """Reason by the name of a model, from the table of docs/limits.md."""
    text = (DOCS / "limits.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (?!models|-)(.+?) \| (.+?) \|$", text, re.M)
    return {name.split(" (")[0]: reason for names, reason in rows for name in names.split(", ")}


@pytest.mark.parametrize("name", REFUSED)
def test_limits_give_the_reason_of_the_refusal(name):
    with torch.device("meta"):
        model = REFUSED[name]()
    with (
        pytest.raises(UnsupportedModelError, match=re.escape(reasons()[name]) + "[.;]"),
        capture(model),
    ):
        pass


def test_limits_have_a_model_for_each_reason():
    tested = {reasons()[name] for name in REFUSED}
    assert set(reasons().values()) == tested


def results(name):
    with (ROOT / "data" / "results" / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_limits_state_the_measured_scores():
    text = " ".join((DOCS / "limits.md").read_text(encoding="utf-8").split())
    scores = {row["method"]: row for row in results("explanations")}
    planted = {row["method"]: row for row in results("planted")}
    for method in ("rollout", "random", "balanced_gradients"):
        score = abs(float(scores[method]["difference"]))
        assert f"{score:.2f} ± {float(scores[method]['difference_95']):.2f}" in text
    for method in ("rollout", "gradient_rollout"):
        assert f"{float(scores[method]['clear_of_random']):.0%}".replace("%", " %") in text
    assert f"{float(planted['rollout']['two']):.0%}".replace("%", " %") in text
    assert f"relevance in {float(planted['relevance']['two']):.0%}".replace("%", " %") in text
    best = max(planted.values(), key=lambda row: float(row["contrast"]))
    assert best["method"] == "integrated_gradients"
    assert f"{float(best['contrast']):.1%}".replace("%", " %") in text
    order = sorted(scores, key=lambda name: -float(scores[name]["difference"]))
    assert order.index("integrated_gradients") == 8
    table = results("timm-support")
    for captured in ("yes", "no"):
        count = sum(row["captured"] == captured for row in table)
        assert f"{count:,} are" in text


def test_limits_state_the_error_of_lower_precision():
    images = None
    weights = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = vitlens.load_model().to(dtype)
        images = vitlens.preprocess(model, samples()["chelsea"]).to(dtype)
        with torch.no_grad(), capture(model) as attn:
            model(images)
        weights[dtype] = torch.stack([layer.weights() for layer in attn])
    exact = weights[torch.float32]
    for dtype, largest, mean in ((torch.bfloat16, 0.05, 0.013), (torch.float16, 0.005, 0.0014)):
        error = (weights[dtype] - exact).abs()
        assert error.max() < largest
        assert error.sum() / exact.sum() == pytest.approx(mean, rel=0.3)


def test_torchvision_gives_the_same_reason_for_swin():
    with torch.device("meta"):
        model = torchvision.models.swin_t()
    with (
        pytest.raises(UnsupportedModelError, match=re.escape(reasons()["Swin"]) + "[.;]"),
        capture(model),
    ):
        pass
