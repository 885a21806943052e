"""Findings in the prose of the chapters, recomputed from the committed models and tables."""

import copy
import itertools
import json
import re
from inspect import signature
from pathlib import Path

import nbformat
import numpy as np
import pandas as pd
import pytest
import torch
from claims import cells_of
from PIL import Image, ImageOps
from safetensors.torch import load_file
from scipy.stats import spearmanr, ttest_1samp
from sklearn.datasets import load_digits
from sklearn.metrics.pairwise import cosine_similarity
from sklearn.model_selection import StratifiedKFold
from support import CHECKPOINTS, SPECIMEN

from experiments import planted
from experiments.registers import register_neurons, with_register
from vitlens import (
    TokenGrid,
    attribution,
    capture,
    intervene,
    load_model,
    preprocess,
    samples,
    stream,
    tokens,
)
from vitlens.evidence import blanks_of
from vitlens.train import snapshots

FOLDER = Path(__file__).parent.parent / "notebooks"
DATA = FOLDER.parent / "data"


def told(chapter: str) -> tuple[str, str]:
    """The prose of a chapter in one line, and its printed lines and tables."""
    (path,) = FOLDER.glob(f"{chapter}_*.ipynb")
    cells = nbformat.read(path, as_version=4).cells
    shown = [
        each.get("text", "") or each.get("data", {}).get("text/plain", "")
        for cell in cells
        for each in cell.get("outputs", [])
    ]
    prose = " ".join(cell.source for cell in cells if cell.cell_type == "markdown")
    return " ".join(prose.split()), "\n".join(shown)


@pytest.fixture(scope="module")
def specimen():
    return load_model(SPECIMEN)


@pytest.fixture(scope="module")
def photos(specimen):
    return preprocess(specimen, list(samples().values()))


@pytest.fixture(scope="module")
def weights(specimen, photos):
    """(images, layers, heads, tokens, tokens) attention of the specimen on the six samples."""
    with torch.no_grad(), capture(specimen) as attn:
        specimen(photos)
    return torch.stack([layer.weights() for layer in attn], 1)


def test_chapter_00_sinks_take_half_of_the_last_attention(weights):
    received = weights[:, -1].mean((1, 2)).double().numpy()
    sinks = sinks_of(received, 1)
    count = sinks.sum(1).mean()
    share = 100 * (received[:, 1:] * sinks).sum(1).mean()
    prose, shown = told("00")
    assert f"on average {count:.1f} of 196 patches get {share:.0f}%" in shown
    words = f"{count:.1f} of 196 patches {{}} {share:.0f} % of the"
    assert words.format("get") in prose and words.format("take") in prose


@torch.no_grad()
def test_chapters_00_and_08_most_gray_patches_are_sinks(specimen, photos, weights):
    sinks = sinks_of(weights[:, -1].double().mean((1, 2)).numpy(), 1)
    norms = tokens.features(specimen, photos)[0][10][:, 1:].norm(dim=2).numpy()
    gray = norms > 1.5 * np.median(norms, axis=1, keepdims=True)
    assert (gray.sum(), (gray & sinks).sum(), sinks.sum()) == (61, 42, 49)
    assert "42 of 61 gray patches are [sinks]" in told("08")[0]


def test_chapter_00_nearest_and_farthest_heads(weights):
    places = torch.cartesian_prod(torch.arange(14.0), torch.arange(14.0)) * 16
    distance = (weights[..., 1:, 1:] * torch.cdist(places, places)).sum(-1).mean((0, -1))
    assert round(distance.min().item()) == 19 and round(distance.max().item()) == 111


def test_chapter_01_order_enters_by_positions_alone(specimen, photos):
    cat, order = photos[1:2], torch.randperm(196, generator=torch.Generator().manual_seed(0))
    bag = copy.deepcopy(specimen)
    bag.pos_embed.data.zero_()

    def shuffled(model):
        hook = model.patch_embed.register_forward_hook(lambda *passed: passed[-1][:, order])
        result = model(cat)
        hook.remove()
        return result

    with torch.no_grad():
        logits, without = specimen(cat), bag(cat)
        assert (shuffled(specimen) - logits).abs().max().item() == pytest.approx(5.374, abs=0.0006)
        assert (without - logits).abs().max().item() == pytest.approx(9.333, abs=0.0006)
        assert torch.allclose(shuffled(bag), without, atol=1e-5)


def test_chapter_01_root_keeps_softmax_from_one_key(weights):
    rows = weights[1, 0].double()
    assert round(rows.amax(-1).mean().item(), 2) == 0.20
    sharper = (
        rows.log().mul(64**0.5).softmax(-1)
    )  # log-weights are the scaled products up to a constant
    assert round(sharper.amax(-1).mean().item(), 2) == 0.83


def test_chapter_01_layers_add_to_the_class_token(specimen, photos):
    lengths, hooks = [], []

    def keep(_, args, output):
        lengths.append(output[0, 0].norm().item())

    for block in specimen.blocks:
        hooks += [part.register_forward_hook(keep) for part in (block.attn, block.mlp, block)]
    with torch.no_grad():
        specimen(photos[1:2])
    for hook in hooks:
        hook.remove()
    attention, mlp, token = torch.tensor(lengths).view(12, 3)[1:-1].T
    shares = torch.stack([attention / token, mlp / token])
    assert round(shares.min().item(), 2) == 0.15 and round(shares.max().item(), 2) == 0.67


def test_chapter_02_nearest_neighbor_equals_the_recipe():
    prose, shown = told("02")
    data = load_digits()
    pixels, accuracy = data.images.reshape(-1, 64), []
    for seen, new in StratifiedKFold(5, shuffle=True, random_state=0).split(pixels, data.target):
        squared = (pixels[new, None] - pixels[seen]) ** 2
        accuracy.append(
            100 * (data.target[seen][squared.sum(-1).argmin(1)] == data.target[new]).mean()
        )
    recipe = pd.read_csv(DATA / "results" / "digits.csv")["top1"][:5]
    mean, spread = np.mean(accuracy), np.std(accuracy, ddof=1)
    assert re.search(rf"^mean +{mean:.1f} +{recipe.mean():.1f}$", shown, re.M)
    assert re.search(rf"^std +{spread:.1f} +{recipe.std():.1f}$", shown, re.M)
    assert f"They are tied: {mean:.1f} and {recipe.mean():.1f} %" in prose


def test_chapters_03_and_04_local_heads_and_equal_rows(photos):
    """From the softmax of timm itself, with fused attention off."""
    model, maps = load_model(SPECIMEN), {}
    for k, block in enumerate(model.blocks):
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_hook(lambda _, __, out, k=k: maps.update({k: out}))
    with torch.no_grad():
        model(photos)
    row, col = torch.arange(196) // 14, torch.arange(196) % 14
    for (layer, head), step in {
        (1, 2): (0, -1),
        (2, 0): (1, 0),
        (2, 1): (0, 1),
        (3, 2): (-1, 0),
    }.items():
        peak = maps[layer][:, head, 1:, 1:].argmax(-1)
        share = ((row[peak] - row == step[0]) & (col[peak] - col == step[1])).double().mean()
        assert share > 0.7, "the largest weight is on one neighbor"
        if (layer, head) == (2, 0):
            assert round(share.item(), 3) == 0.923
    pairs = torch.ones(196, 196).triu(1).bool()
    last = np.array(
        [[torch.corrcoef(m)[pairs].mean() for m in image] for image in maps[11][:, :, 1:, 1:]]
    )
    assert round(float(last.min()), 2) == 0.88 and 0.985 < last[1].min() < last[1].max() < 1
    eye = 1 + 5 * 14 + 4
    assert round(maps[8][1, 2, eye, 1 + 6 * 14 + 11].item(), 3) == 0.076, "the other eye"
    assert round(maps[2][1, 0, eye, eye + 14].item(), 3) == 0.612


def test_chapter_04_scratch_could_have_local_heads_on_its_grid():
    """A head that reads one neighbor has a quarter of uniform attention there, and its nearest head 0.7."""

    def uniform_in_patches(side):
        steps = np.abs(np.subtract.outer(np.arange(side), np.arange(side)))
        total = sum(np.hypot(a, b) for a in steps.ravel() for b in steps.ravel())
        return total / side**2 / (side**2 + 1)

    assert (
        round(1 / uniform_in_patches(8), 2) == 0.25 and round(1 / uniform_in_patches(14), 2) == 0.14
    )
    scratch = load_model(CHECKPOINTS / "vit_tiny_patch8_64")
    weights = attention_of(scratch, preprocess(scratch, list(samples().values())))
    row, col = np.divmod(np.arange(64), 8)
    apart = np.hypot(np.subtract.outer(row, row), np.subtract.outer(col, col))
    nearest = (weights[..., 1:, 1:] * apart).sum(-1).mean((1, 3)).min()
    assert 2.5 < nearest < 3 and 0.6 < nearest / uniform_in_patches(8) < 0.75


@pytest.mark.parametrize(
    ("name", "expected"),
    [("specimen", (0.47, 0.29, 0.07)), ("vit_tiny_patch8_64", (0.70, -0.06, -0.08))],
)
def test_chapter_05_columns_count_little_at_equal_distances(name, expected):
    """By a curve of degree four through all pairs in other directions, in place of lines through the nearest ones."""
    weights = load_file(CHECKPOINTS / name / "model.safetensors")
    table = torch.nn.functional.normalize(weights["pos_embed"][0, 1:].double(), dim=1)
    side = round(len(table) ** 0.5)

    def above(places):
        cosine = (table[places] @ table[places].T).numpy()
        row, col = np.divmod(places, side)
        down = np.abs(np.subtract.outer(row, row))
        across = np.abs(np.subtract.outer(col, col))
        steps = np.arange(2, down.max() + 1)
        offsets = itertools.product(range(1, down.max() + 1), range(1, across.max() + 1))
        near = [each for each in offsets if np.hypot(*each) <= steps[-1] + 1]
        means = [cosine[(down == a) & (across == b)].mean() for a, b in near]
        curve = np.polyfit([np.hypot(*each) for each in near], means, 4)
        in_row = [cosine[(down == 0) & (across == step)].mean() for step in steps]
        in_column = [cosine[(down == step) & (across == 0)].mean() for step in steps]
        return [np.mean(each - np.polyval(curve, steps)) for each in (in_row, in_column)]

    everywhere = np.arange(side**2)
    whole, upper = above(everywhere), above(everywhere[: side * (side // 2)])
    assert np.allclose([*whole, upper[1]], expected, atol=0.04)


def sinks_of(received: np.ndarray, prefix: int) -> np.ndarray:
    """(B, P) sinks by their definition, from the attention (B, T) that each token receives in a layer."""
    patches = received[:, prefix:]
    middle = (patches.shape[1] - 1) // 2
    median = np.sort(patches)[:, [middle]]
    return (patches > 20 * median) & (patches > 5 / received.shape[1])


def attention_of(model: torch.nn.Module, images: torch.Tensor) -> np.ndarray:
    """(L, B, H, T, T) attention of timm's own code, which forms the weights without the fused kernel."""
    weights = []
    for block in model.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_hook(
            lambda _, args, output: weights.append(output.double())
        )
    with torch.no_grad():
        model(images)
    return torch.stack(weights).numpy()


def bundled(**options) -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = load_model(SPECIMEN, **options)
    return model, preprocess(model, list(samples().values()))


def brightest_tenth(maps: np.ndarray) -> np.ndarray:
    """Ten times the share of maps (…, 196) on the 19.6 patches of the largest values."""
    largest = np.sort(maps)[..., ::-1]
    on_tenth = largest[..., :19].sum(-1) + 0.6 * largest[..., 19]
    return 10 * on_tenth / maps.sum(-1)


def test_chapter_06_numbers_of_rollout():
    prose, shown = told("06")
    falls = {}
    for name in ("random weights", "trained"):
        weights = attention_of(*bundled(pretrained=name == "trained"))
        steps = (weights.mean(2) + np.eye(197)) / 2
        rows, through = np.eye(197)[None].repeat(6, 0), []
        for step in steps[::-1]:
            rows = rows @ step
            through.append(rows[:, 0, 1:])
        through = np.stack(through)
        falls[name] = brightest_tenth(through).mean(1)
    trained, untrained = falls["trained"], falls["random weights"]
    assert (np.diff(trained) < 0).all() and untrained.max() < 1.2
    words = "{:.2f} through the last layer alone, then {:.2f}, {:.2f}, {:.2f}, and {:.2f} through all twelve"
    assert words.format(*trained[:4], trained[-1]) in prose
    printed = float(re.search(r"[Ww]ith random weights it is (\d\.\d+)", prose)[1])
    assert abs(untrained[-1] - printed) < 0.02, "another draw"
    similar = []
    for each in (rows[:, :, 1:], weights[-1].mean(1)[:, :, 1:]):
        values = np.stack([np.corrcoef(image)[0] for image in each])
        similar += [values.mean(), values.min()]
    words = (
        "by {:.2f} on average and by {:.2f} at least; in the last layer alone by {:.2f} and {:.2f}"
    )
    assert words.format(*similar) in prose
    most = weights[-1].mean((1, 2))[:, 1:].argsort(1)[:, -8:]
    shares = [
        np.take_along_axis(each, most, 1).sum(1) / each.sum(1) for each in (through[0], through[-1])
    ]
    words = "{:.0f} to {:.0f} % of the last layer's map, and {:.0f} to {:.0f} % of the full rollout"
    assert (
        words.format(*(100 * end for each in shares for end in (each.min(), each.max()))) in prose
    )


def test_chapter_06_rollout_through_six_layers_is_on_the_subject():
    prose, _ = told("06")
    (cell,) = (each for each in cells_of("6").values() if each.id == "boxes")
    boxes = eval(re.search(r"BOXES = (\{.*?\n\})", cell.source, re.S)[1])
    weights = attention_of(*bundled()).mean(2)
    maps = {}
    for count in (1, 6, 12):
        row = np.eye(197)[:1].repeat(6, 0)[:, None]
        for layer in weights[::-1][:count]:
            row = (row + row @ layer) / 2
        maps[count] = row[:, 0, 1:].reshape(6, 14, 14)
    lifts = {count: [] for count in maps}
    for count, each in maps.items():
        for name, values in zip(samples(), each, strict=True):
            left, top, right, bottom = (round(14 * share) for share in boxes[name])
            inside = values[top:bottom, left:right].mean()
            lifts[count].append(inside / values.mean())
    means = {count: np.mean(each) for count, each in lifts.items()}
    words = "the mean on the subject is {:.2f}, where the full rollout has {:.2f} and the last layer alone {:.2f}"
    assert words.format(means[6], means[12], means[1]) in prose
    higher = sum(a > b for a, b in zip(lifts[6], lifts[12], strict=True))
    assert f"above the full rollout in {higher} of 6 photos" in prose
    contrast = brightest_tenth(maps[6].reshape(6, 196)).mean()
    assert f"Contrast is {contrast:.2f}" in prose
    assert f"the rocket has {max(lifts[6]):.2f}" in prose
    assert f"the median is {np.median(lifts[6]):.2f}" in prose


@pytest.mark.slow
def test_chapter_07_numbers_of_three_tests():
    prose, shown = told("07")
    found = 100 * pd.read_csv(DATA / "results" / "planted.csv", index_col="method")["two"]
    words = f"at a time here, finds {found['occlusion']:.1f} %, gradient rollout {found['gradient_rollout']:.1f} %, "
    assert words + f"relevance {found['relevance']:.1f} %" in prose
    single = found[["grad_cam", "attention_gradient"]]
    assert f"one layer find {single.min():.1f} to {single.max():.1f} %" in prose
    photos = pd.read_csv(DATA / "results" / "explanations.csv", index_col="method")
    for method in ("balanced_gradients", "gradient_rollout", "grad_cam", "integrated_gradients"):
        mean, half = photos.loc[method, ["difference", "difference_95"]].astype(float).round(3)
        assert f"{mean:.3f} ± {half:.3f}" in prose
    model, images = bundled()
    with torch.no_grad():
        target = model(images).argmax(1)
    maps = {
        name: [getattr(attribution, name)(model, images, target)]
        for name in ("rollout", "relevance", "grad_cam")
    }
    for seed in (10, 11):  # other draws than the chapter's
        generator = torch.Generator().manual_seed(seed)
        for weight in model.head.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.data = weight.data.mean() + weight.data.std() * noise
        for name, each in maps.items():
            each.append(getattr(attribution, name)(model, images, target))
    kept = {
        name: np.mean(
            [
                abs(spearmanr(a.flatten(), b.flatten()).statistic)
                for later in each[1:]
                for a, b in zip(each[0], later, strict=True)
            ]
        )
        for name, each in maps.items()
    }
    for name, value in kept.items():
        title = {"grad_cam": "Grad-CAM"}.get(name, name)
        printed = float(re.search(rf"^{title} +([\d.]+) +[\d.]+ +[\d.]+ ", shown, re.M)[1])
        assert abs(value - printed) < 0.1, name
    assert kept["rollout"] == 1 and "**Relevance keeps 0.67.**" in prose


def test_chapter_07_occlusion_is_weak_on_photographs_and_names_are_titles():
    prose, shown = told("07")
    photos = pd.read_csv(DATA / "results" / "explanations.csv", index_col="method")["difference"]
    assert (photos > photos["occlusion"]).sum() == 7 and photos["occlusion"] > 0.2 > 0.01 > photos[
        "random"
    ]
    assert "Occlusion, with a square of 3 × 3 patches here in place of one, gets 0.247" in prose
    assert planted.SETTINGS["occlusion"] == {"window": 1}
    assert signature(attribution.occlusion).parameters["window"].default == 3
    names = [name for name in attribution.METHODS if "_" in name]
    assert not any(name in shown for name in names)


@pytest.mark.slow
def test_chapter_07_random_models_share_little_with_the_trained_one():
    """With all weights random, by other draws: a little more than with the map of another photo."""
    prose, shown = told("07")
    model, images = bundled()
    with torch.no_grad():
        target = model(images).argmax(1)
    methods = {"rollout": "rollout", "relevance": "relevance", "direct": "direct contributions"}
    trained = {name: getattr(attribution, name)(model, images, target) for name in methods}
    same, other = ({name: [] for name in methods} for _ in range(2))
    generator = torch.Generator().manual_seed(7)
    for _ in range(4):
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.data = weight.data.mean() + weight.data.std(correction=0) * noise
        for name, maps in trained.items():
            drawn = getattr(attribution, name)(model, images, target)
            both = torch.cat([maps, drawn]).flatten(1).detach().numpy()
            found = np.abs(spearmanr(both, axis=1).statistic[:6, 6:])
            same[name].append(np.diag(found).mean())
            other[name].append(found[~np.eye(6, dtype=bool)].mean())
    for name, title in methods.items():
        numbers = re.search(rf"^{title} +(?:[\d.]+ +)?[\d.]+ +[\d.]+ +([\d.]+) ", shown, re.M)
        assert abs(np.mean(same[name]) - float(numbers[1])) < 0.08, name
        assert np.mean(same[name]) > np.mean(other[name]) + 0.02, name
        assert np.mean(other[name]) > 0.06, "more than noise"
    assert "Every method is above its control, by little" in prose


def test_chapter_11_order_depends_on_the_measure():
    prose, shown = told("11")
    folder = DATA / "checkpoints" / "vit_tiny_patch8_64"
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    scored = {0: 0.5} | {
        record["step"]: record["metrics"]["top1"] for record in records if record["metrics"]
    }
    steps, half = list(scored), (0.5 + scored[11700]) / 2
    after = next(step for step in steps if scored[step] >= half)
    before = steps[steps.index(after) - 1]
    middle = np.interp(half, list(scored.values()), steps)
    measured = f"half-way between steps {before:,} and {after:,}, two measurements with {scored[before]:.1f} % and"
    assert (
        f"{measured} {scored[after]:.1f} %. On a straight line that is step {middle:,.0f}." in prose
    )
    run = snapshots.load(folder / "snapshots.npz")
    distances, rollout = (run[name].astype(float) for name in ("distances", "rollout"))
    flat = np.sort(rollout.reshape(*rollout.shape[:2], 64))[..., ::-1]
    on_tenth = flat[..., :6].sum(-1) + 0.4 * flat[..., 6]
    by_chapter = dict(re.findall(r"^([a-z]+: \w+) +\d+ +\d+ +\d+ +(\d+) +\d+$", shown, re.M))
    by = {}
    for name, values in {
        "distance: mean": distances.mean((1, 2)),
        "distance: nearest": distances.min((1, 2)),
        "distance: spread": np.ptp(distances, axis=2).mean(1),
        "rollout: contrast": (10 * on_tenth / flat.sum(-1)).mean(1),
        "rollout: SD": (flat.std(-1) / flat.mean(-1)).mean(1),
        "filters: variance": run["filters_variance"].astype(float).sum(1),
        "confidence": run["top1_confidence"].mean(1, dtype=float),
    }.items():
        reached = ((values - values[0]) / (values[-1] - values[0]) >= 0.5).argmax()
        by[name] = int(run["steps"][reached])
        assert name == "confidence" or by[name] == int(by_chapter[name]), name
    assert by["rollout: contrast"] == by["rollout: SD"] == 909 < middle
    assert by["distance: spread"] == 1392 < middle < by["distance: mean"] == 3262
    assert f"Confidence is half-way only by step {by['confidence']:,}" in prose
    low, high = run["top1_confidence"].mean(1, dtype=float)[-2:]
    rise = scored[11700] - np.interp(run["steps"][-2], steps, list(scored.values()))
    assert f"jumps from {low:.3f} to {high:.3f} between the last two moments" in prose
    assert f"while accuracy rises by {rise:.1f} points" in prose


def paired(
    file: str, first: str, second: str, metric: str = "top1", images: int | None = None
) -> tuple[float, float]:
    """Mean difference of two models within seeds and half of Student's 95 % interval, by SciPy."""
    table = pd.read_csv(DATA / "results" / f"{file}.csv")
    table = table if images is None else table[table["images"] == images]
    one, other = (
        table[table["model"] == name].set_index("seed")[metric] for name in (first, second)
    )
    found = ttest_1samp((one - other).dropna(), 0)
    low, high = found.confidence_interval(0.95)
    return (low + high) / 2, (high - low) / 2


def test_chapter_12_layer_decay_falls_behind_less_after_twenty_epochs():
    prose, shown = told("12")
    table = pd.read_csv(DATA / "results" / "finetune-digits.csv", keep_default_na=False)
    (probe,) = table.loc[table["method"] == "linear probe", "top1"]
    runs = table[table["method"] != "linear probe"].astype({"lr": float, "epochs": int})
    assert set(runs["seed"].astype(int)) == {0, 1} and set(runs["epochs"]) == {10, 20}
    top1 = runs.groupby(["method", "lr", "epochs"])["top1"].mean()
    gaps = {}
    for rate in (0.03, 0.06):
        ahead = top1["plain", 0.03] - top1["layer decay 0.75", rate]
        gaps[rate] = ahead
        line = (
            f"rate {rate}: {ahead[10]:.1f} points at 10 epochs, {ahead[20]:.1f} points at 20 epochs"
        )
        assert line in shown and ahead[10] > 2 * ahead[20] > 0
    plain = top1["plain", 0.03]
    assert f"from {gaps[0.03][10]:.1f} to {gaps[0.03][20]:.1f} points" in prose
    assert f"to {gaps[0.06][20]:.1f} points" in prose
    assert f"{probe:.1f} % for the probe" in prose
    assert f"{plain[10]:.1f} % after 10 epochs and {plain[20]:.1f} % after 20" in prose


def test_appendix_c_leads_without_labels_and_filters_at_the_border():
    prose, shown = told("C")
    clear = []
    for file, epochs in (("masked-cpu-short", 10), ("masked-cpu", 40)):
        for name in pd.read_csv(DATA / "results" / f"{file}.csv")["model"].unique()[1:]:
            mean, half = paired(file, name, "random weights")
            assert re.search(rf"{name}, tuned for {epochs} e.* {mean:.1f} +{half:.1f} ", shown)
            clear += [(name, epochs)] if mean > half else []
    assert clear == [
        ("masked patches, 1,000 steps", 10),
        ("masked autoencoder, 1,000 steps", 10),
        ("masked autoencoder, 8,000 steps", 40),
    ]
    inside = np.load(DATA / "results" / "masked-cpu.npz")
    for name, said in (("masked patches", "81"), ("masked autoencoder", "89")):
        squares = inside[f"{name}, 8,000 steps, before tuning/filters"][:, :8].astype(float) ** 2
        inner = squares[:, :, 1:-1, 1:-1].sum((2, 3, 4)) / squares.sum((2, 3, 4))
        assert f"{100 * (1 - inner.mean()):.0f}" == said
    assert "81 and 89 % of the filters' squares" in prose


def test_chapter_13_leads_of_miniatures():
    prose, shown = told("13")
    for kind, file in (("steps", "data-size-cpu"), ("epochs", "data-size-cpu-epochs")):
        for images in (2_500, 7_500, 25_000):
            table = (
                "data-size-cpu" if images == 7_500 else file
            )  # both studies share the middle size
            mean, half = paired(table, "ViT, patch 4", "ResNet", images=images)
            (line,) = re.findall(rf"equal {kind}, ViT over ResNet:.*", shown)
            assert f"{images:,} images {mean:+.1f} ± {half:.1f}" in line
            assert (mean > half) == ((kind, images) != ("steps", 2_500)), "a tie in one case only"
    assert "2.4 ± 3.0 points ahead at equal steps" in prose and "4.1 ± 1.8 at equal epochs" in prose


def test_appendix_c_verdicts_equal_the_committed_tables():
    prose, shown = told("C")
    names = {
        "positions": "learned, 1-D",
        "scaling": "base",
        "bias": "plain",
        "equivariance": "plain",
    }
    verdicts = {}
    for study, baseline in names.items():
        models = pd.read_csv(DATA / "results" / f"{study}-cpu.csv")["model"].unique()
        for name in set(models) - {baseline}:
            mean, half = paired(f"{study}-cpu", name, baseline)
            assert re.search(rf"^{re.escape(name)} .* {mean:.1f} +{half:.1f}\b", shown, re.M), (
                study,
                name,
            )
            verdicts[study, name] = 0 if abs(mean) < half else np.sign(mean)
    ahead = {
        name for (study, name), verdict in verdicts.items() if study == "scaling" and verdict > 0
    }
    assert ahead == {
        "depth, 1",
        "depth, 2",
        "patch size, 1",
        "patch size, 2",
        "width, 1",
        "width, 2",
        "all, 1",
    }
    assert not any(verdict for (study, _), verdict in verdicts.items() if study == "bias")
    assert (
        verdicts["equivariance", "averaged over rotations"] < 0
        and "costs 2.6 ± 1.1 points" in prose
    )
    assert [n for (s, n), v in verdicts.items() if s == "positions" and v > 0] == [
        "learned, 2-D, every layer"
    ]


@torch.no_grad()
def test_chapter_08_partners_are_found_best_after_layer_2(specimen, photos):
    prose, shown = told("08")
    closer = preprocess(specimen, list(samples().values()), size=(336, 336))[..., 56:280, 56:280]
    places = np.array([(row, column) for row in range(14) for column in range(14)])
    ends = 1.5 * (places + 0.5) - 3.5 - 0.5  # in patches of the crop
    inside, shares = ((ends > -0.5) & (ends < 13.5)).all(1), []
    for whole, crop in zip(
        *(tokens.features(specimen, images)[0] for images in (photos, closer)), strict=True
    ):
        nearest = [
            cosine_similarity(a[1:], b[1:]).argmax(1) for a, b in zip(whole, crop, strict=True)
        ]
        shares.append(
            100 * np.mean([np.linalg.norm(places[n] - ends, axis=1)[inside] <= 1 for n in nearest])
        )
    assert np.argmax(shares) == 2 and shares[-1] < shares[2] - 25
    assert re.search(r"^trained +" + " +".join(f"{share:.1f}" for share in shares), shown, re.M)
    chance = re.findall(r"^random weights +[\d.]+ +[\d.]+ +([\d.]+)", shown, re.M)[-1]
    assert (
        f"finds {shares[2]:.1f} % of the partners after layer 2, and a model with random weights {chance} %"
        in prose
    )


def test_chapter_08_tokens_know_row_and_column_alike(photos):
    """Sums of squares of a layout without replication, on tokens of timm's own blocks."""
    prose, _ = told("08")
    model = load_model(SPECIMEN)
    stream_after = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, __, out: stream_after.append(out[:, 1:].double()))
    with torch.no_grad():
        model(photos)
    early = stream_after[1].numpy().reshape(6, 14, 14, 192)

    def shares(tokens):
        centered = tokens - tokens.mean((0, 1, 2))
        total = (centered**2).mean((0, 1, 2)).sum()
        averaged = {"row": (0, 2), "column": (0, 1), "position": 0, "image": (1, 2)}
        groups = {name: centered.mean(axes) for name, axes in averaged.items()}
        return {
            name: 100 * (mean.reshape(-1, mean.shape[-1]) ** 2).mean(0).sum() / total
            for name, mean in groups.items()
        }

    of = shares(early)
    assert (
        f"the row explains {of['row']:.1f} % of the variance and the column {of['column']:.1f} %"
        in prose
    )
    words = f"The position as a whole explains {of['position']:.1f} %, where chance gives {100 * 195 / 1175:.1f} %"
    assert f"{words}, and the image {of['image']:.1f} %" in prose
    flat = early.reshape(-1, 192) - early.mean((0, 1, 2))
    values, vectors = np.linalg.eigh(flat.T @ flat)
    held = 100 * values[::-1] / values.sum()
    drawn = []
    for vector in (vectors[:, -2:-1], vectors[:, -3:-2]):
        drawn.append(shares(early @ vector)["row"])
    words = "are {:.1f} and {:.1f} % row, but they hold {:.1f} and {:.1f} % of the variance"
    assert words.format(*drawn, *held[1:3]) in prose


@torch.no_grad()
def test_chapter_08_pixels_and_places_are_controls(photos, specimen):
    prose, _ = told("08")
    closer = preprocess(specimen, list(samples().values()), size=(336, 336))[..., 56:280, 56:280]
    cut = [
        images.reshape(6, 3, 14, 16, 14, 16).permute(0, 2, 4, 1, 3, 5).reshape(6, 196, -1)
        for images in (photos, closer)
    ]
    places = np.array([(row, column) for row in range(14) for column in range(14)])
    ends = 1.5 * (places + 0.5) - 3.5 - 0.5
    inside = ((ends > -0.5) & (ends < 13.5)).all(1)
    near = np.linalg.norm(places[None] - ends[:, None], axis=2)[inside] <= 1
    pixels = np.mean(
        [
            near[range(len(near)), cosine_similarity(a, b).argmax(1)[inside]].mean()
            for a, b in zip(*cut, strict=True)
        ]
    )
    same = near[:, inside].diagonal().mean()
    words = "by chance is {:.1f} %, the same place in both images {:.1f} %, and the most similar raw pixels "
    told_pixels = prose.split(words.format(100 * near.mean(), 100 * same))[1].split(" %")[0]
    assert abs(float(told_pixels) - 100 * pixels) < 0.5, "rounding decides between equal patches"


def test_chapter_08_gap_between_the_lenses():
    prose, _ = told("08")
    table = (
        pd.read_csv(DATA / "results" / "lens.csv")
        .set_index(["model", "reader", "lens", "layer"])
        .sort_index()
    )
    own = table.loc["specimen", "class token"]
    assert (own.loc["tuned", "low"][1:9] > own.loc["plain", "high"][1:9]).all(), (
        "a gap after layers 1 to 8"
    )
    low, high = own.loc[("tuned", 5), ["low", "high"]]
    assert (
        f"{own.loc[('tuned', 5), 'accuracy']:.1f} % (95-percent interval: {low:.1f} to {high:.1f})"
        in prose
    )
    chance = table.loc["specimen", "wrong label"]["accuracy"]
    assert (
        max(
            chance.max(),
            table.loc["specimen, untrained", "class token"]["accuracy"].max(),
        )
        < 0.85
    )


@torch.no_grad()
def test_chapter_09_dull_head_writes_a_constant():
    prose, shown = told("09")
    model = load_model(DATA / "checkpoints" / "vit_tiny_patch8_64")
    crops = [
        image.crop((k, k, k + 200, k + 200))
        for image in samples().values()
        for k in range(0, 100, 10)
    ]
    images, seen, layer = preprocess(model, crops), [], model.blocks[0].attn
    hook = layer.proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    before = model(images).argmax(1)
    hook.remove()
    written, changed = seen[0].unflatten(2, (layer.num_heads, -1))[:, :, 3], []
    for rows in (slice(None), slice(1), slice(1, None)):
        silent = written.clone()
        silent[:, rows] = 0
        with intervene(model, heads={(0, 3): silent}):
            changed.append(100 * (model(images).argmax(1) != before).double().mean())
    assert changed[0] > 50 and abs(changed[0] - changed[1]) < 10 and changed[2] < changed[1] / 3
    assert f"a vector of norm {written[:, 0].norm(dim=1).mean():.1f}" in prose
    assert written[:, 0].std(0).mean() < 0.01 < written[:, 1:].std(0).mean() / 5
    for name in ("all rows", "the class token's row", "the patches' rows"):
        assert re.search(rf"^zero in {name}: ([\d.]+) %", shown, re.M)[1] + " %" in prose


def test_chapter_09_losses_together_exceed_their_sum_from_twelve_heads():
    prose, _ = told("09")
    steps, heads = (pd.read_csv(DATA / "results" / f"{name}.csv") for name in ("pruning", "heads"))
    alone = heads[heads["way"] == "mean"].set_index(["layer", "head"])
    greedy = steps[steps["order"] == "greedy"].set_index("removed")
    assert "the first 50 to choose by" in greedy["command"][0]
    assert "The order was chosen on 50 images" in prose
    order = [tuple(pair) for pair in greedy.loc[1:, ["layer", "head"]].astype(int).values]
    assert order.index((9, 1)) == 5 and "Remember the sixth, head 1 of layer 9." in prose
    decided = {}
    for count, words in {
        4: "for {:.2f} points** [−0.90, {:.2f}]. Their single losses sum to {:.2f}",
        8: "{:.2f} points [4.41, {:.2f}] are lost together, and the sum is {:.2f}",
        12: "{:.2f} points [11.92, {:.2f}] against {:.2f} ± 2.79",
        20: "{:.2f} [34.63, {:.2f}] against {:.2f} ± 4.03 at twenty",
    }.items():
        ends = greedy["accuracy"][0] - greedy.loc[count, ["accuracy", "high", "low"]].astype(float)
        single = alone.loc[order[:count]]
        half = np.sqrt(((single["change_high"] - single["change_low"]) ** 2).sum()) / 2
        assert words.format(ends["accuracy"], ends["low"], -single["change"].sum()) in prose
        assert re.search(rf"\[−?{abs(ends['high']):.2f}, {ends['low']:.2f}\]", prose)
        assert count == 4 or f"± {half:.2f}" in prose
        decided[count] = ends["high"] > -single["change"].sum() + half
    assert decided == {4: False, 8: False, 12: True, 20: True}


def output_on_class_token(
    model, images: torch.Tensor, layer: int, means: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """Outputs of all heads and the last layer's (B, D), both on the class token, and the logits.

    means: (B, tokens, 64) that head 1 of the layer puts out.
    """
    seen, hooks = [], []

    def replace(_, args):
        args[0][..., 64:128] = means
        return args

    if means is not None:
        hooks.append(model.blocks[layer].attn.proj.register_forward_pre_hook(replace))
    for block in model.blocks:
        keep = block.attn.proj.register_forward_pre_hook(
            lambda _, args: seen.append(args[0].unflatten(2, (3, 64)).clone())
        )
        hooks.append(keep)
    hooks.append(model.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0][:, 0])))
    logits = model(images)
    for hook in hooks:
        hook.remove()
    return torch.stack(seen[:-1]), seen[-1], logits


def logits_without_head_91(model, images: torch.Tensor, means: torch.Tensor) -> torch.Tensor:
    """(6, B) logits of each image's class: intact, with later parts held, then as 10.2, 10.1 and 11.1 change, and all.

    means: (1 or B, tokens, 64) that head 9.1 puts out. What heads write is a product with the output projection, where
    the chapter runs the model without an MLP.
    """
    intact, last, logits = output_on_class_token(model, images, 9)
    silent, _, missing = output_on_class_token(model, images, 9, means)
    ends = [last]
    for layer, head in ((9, 1), (10, 2), (10, 1), (11, 1)):
        weight = model.blocks[layer].attn.proj.weight.view(192, 3, 64)[:, head]
        change = (silent - intact)[layer, :, 0, head]
        ends.append(ends[-1] + change @ weight.T)
    at = torch.arange(len(images)), logits.argmax(1)
    through_head = [model.head(model.norm(end))[at] for end in ends]
    return torch.stack([*through_head, missing[at]]).double()


@torch.no_grad()
def test_chapter_09_later_heads_make_up_for_head_91():
    prose, shown = told("09")
    model = load_model(SPECIMEN)
    photos = preprocess(model, list(samples().values()))
    outputs = output_on_class_token(model, photos, 9)[0][9][:, :, 1]
    others, all_six = outputs[[0, 2, 3, 4, 5]].mean(0, keepdim=True), outputs.mean(0, keepdim=True)
    steps = logits_without_head_91(model, photos[1:2], others)[:, 0].tolist()
    intact, held, second, pair, later, missing = (f"{value:.2f}" for value in steps)
    assert f"the logit falls from {intact} to {held}." in prose
    words = f"brings it to {second}, and head 10.1 to {pair}, above where it was."
    assert words in prose and steps[3] > steps[0]
    assert re.search(rf"head 11.1 changes +{later}\n.* +{missing}\n?", shown)
    assert f"the logit *rises* by {steps[5] - steps[0]:.2f}. (A mean over all six" in prose
    with_cat = logits_without_head_91(model, photos[1:2], all_six)[:, 0]
    assert f"With it, the logit rises by {(with_cat[5] - with_cat[0]).item():.2f}.)" in prose
    _, last, logits = output_on_class_token(model, photos[1:2], 9)
    row = model.head.weight[logits.argmax()] * model.norm.weight
    write = model.blocks[9].attn.proj.weight[:, 64:128] @ (outputs[1, 0] - others[0, 0])
    centered = write - write.mean()
    lost = (centered @ row / last.std(unbiased=False)).item()
    assert f"the logit is {steps[0] - lost:.2f}, which is {lost:.2f} less.)" in prose


@pytest.mark.slow
@torch.no_grad()
def test_chapter_09_later_heads_make_up_on_120_photographs():
    prose, _ = told("09")
    model = load_model(SPECIMEN)
    files = sorted((DATA / "photographs").glob("*/*.jpg"))
    photos = preprocess(model, [ImageOps.fit(Image.open(file), (160, 160)) for file in files])
    outputs = torch.cat(
        [output_on_class_token(model, part, 9)[0][9][:, :, 1] for part in photos.split(30)]
    )
    means = (outputs.sum(0) - outputs) / 119
    steps = torch.cat(
        [
            logits_without_head_91(model, part, each)
            for part, each in zip(photos.split(30), means.split(30), strict=True)
        ],
        1,
    ).numpy()

    def interval(values):
        low, high = ttest_1samp(values, 0).confidence_interval(0.95)
        return f"{values.mean():.2f} ± {(high - low) / 2:.2f}"

    held = steps[0] - steps[1]
    back = steps[3] - steps[1]
    fall = steps[0] - steps[5]
    mammals = np.array([file.parent.name == "mammal" for file in files])
    assert f"silencing head 9.1 costs {interval(held)} of the logit" in prose
    assert f"In fact it costs {interval(fall)}, which may be nothing" in prose
    assert f"Heads 10.1 and 10.2 give back {interval(back)}." in prose
    words = (
        f"mammals, {interval(held[mammals])}, and there the two give back {interval(back[mammals])}"
    )
    assert words in prose


@torch.no_grad()
def test_chapter_09_head_that_writes_most_reads_the_face(specimen, photos):
    """From rows of attention and values, without gradients: a patch adds A_0j (v_j · direction)."""
    prose, _ = told("09")
    seen, block = {}, specimen.blocks[9]
    hooks = [
        block.attn.qkv.register_forward_hook(lambda _, __, out: seen.update(qkv=out[0])),
        specimen.norm.register_forward_pre_hook(lambda _, args: seen.update(end=args[0][0, 0])),
    ]
    row = specimen.head.weight[specimen(photos[1:2]).argmax()] * specimen.norm.weight
    for hook in hooks:
        hook.remove()
    query, key, value = seen["qkv"].unflatten(1, (3, 3, 64))[:, :, 1].unbind(1)
    attention = (query[0] @ key.T / 8).softmax(0)
    direction = (row - row.mean()) @ block.attn.proj.weight[:, 64:128]
    written = attention * (value @ direction) / seen["end"].std(unbiased=False)
    assert round(written.sum().item(), 2) == 3.66
    support = written[1:].clamp(min=0).view(14, 14)
    for reach, words in ((1, "{} % of the area and hold {} %"), (2, "{} % and hold {} %")):
        eyes = torch.zeros(14, 14, dtype=torch.bool)
        for line, column in ((5, 4), (6, 11)):
            rows = slice(line - reach, line + reach + 1)
            columns = slice(column - reach, column + reach + 1)
            eyes[rows, columns] = True
        share = support[eyes].sum() / support.sum()
        assert (
            words.format(round(100 * eyes.double().mean().item()), round(100 * share.item()))
            in prose
        )


def test_chapter_10_sinks_name_the_class():
    prose, _ = told("10")
    table = pd.read_csv(DATA / "results" / "sinks-lens.csv").set_index(["model", "class", "layer"])
    own, other = (table.loc["specimen", name] for name in ("answer", "other"))
    for layer, words in (
        (10, "{:.2f} times after layer 10 [{:.2f}, {:.2f}], in {:.1f} % of {:,} images"),
        (11, "{:.2f} times after layer 11 [{:.2f}, {:.2f}], in {:.1f} %"),
    ):
        row = own.round(2).loc[layer]
        assert words.format(*row[["ratio", "ratio_low", "ratio_high", "above", "images"]]) in prose
        assert row["ratio_low"] > 1.9
    assert own["ratio_high"][[8, 9]].max() < 1
    controls = pd.concat([other["ratio"], table.loc["specimen, untrained", "answer"]["ratio"]])
    assert controls.between(0.85, 1.1).all(), "near 1"


@torch.no_grad()
def test_chapter_10_patch_on_the_bridge_of_the_nose_is_a_sink(specimen, photos, weights):
    received = weights[1, -1].mean((0, 1))[1:].unflatten(0, (14, 14))
    assert int((received >= received[7, 8]).sum()) == 7
    logits, by_token = stream.lens(specimen, photos[1:2])
    named = by_token.softmax(-1)[0, 1:, logits.argmax()].unflatten(0, (14, 14))
    assert int((named >= named[7, 8]).sum()) == 2
    assert (
        "(row 7, column 8) is second in naming the class and 7th in attention received"
        in told("10")[0]
    )


def test_chapter_10_sinks_are_not_the_outliers(specimen, photos, weights):
    prose, _ = told("10")
    received = weights[:, -1].double().mean((1, 2)).numpy()
    sinks = sinks_of(received, 1)
    with torch.no_grad():
        lengths = specimen.forward_intermediates(photos, indices=[10], return_prefix_tokens=True)
    norms = lengths[1][0][0].norm(dim=1).flatten(1).numpy()
    outliers = norms > 2 * np.median(norms, axis=1, keepdims=True)
    assert f"{sinks.sum()} of 1,176 patches are sinks of the last layer" in prose
    share = 100 * (received[:, 1:] * sinks).sum(1).mean()
    assert f"they receive {share:.1f} % of its attention" in prose
    assert not (outliers & ~sinks).any() and f"**All {outliers.sum()} outliers are sinks" in prose
    others = (sinks & ~outliers).sum()
    assert f"and the other {others} sinks have ordinary norms" in prose
    assert sinks[1].sum() == 8 and not outliers[1].any(), "the cat"
    tiles = photos.reshape(6, 3, 14, 16, 14, 16).transpose(3, 4).flatten(4)
    plainness = tiles.std(-1).mean(1).flatten(1).numpy()
    plain = plainness < np.sort(plainness)[:, [49]]
    assert f"{(plain & sinks).sum()} of {sinks.sum()} are in the quarter of" in prose


def test_chapter_10_row_of_layer_11_has_the_outliers_that_enter_it():
    prose, shown = told("10")
    table = pd.read_csv(DATA / "results" / "sinks.csv").set_index(["model", "layer"])
    own = table.loc["specimen"]
    entering = own["above_twice"][10]
    assert entering * 196 / 197 == pytest.approx(own["even_share"][11], abs=1e-3)
    assert re.search(rf"^outliers before the layer \(%\) .* {entering:.1f}$", shown, re.M)
    row = own.loc[11]
    words = "{:.1f} ± {:.1f} % of all attention goes to the outliers, {:.1f} % of the patches, and"
    assert words.format(row["to_above_twice"], row["to_above_twice_95"], entering) in prose
    words = "and {:.1f} ± {:.1f} % to the sinks, {:.1f} %.**"
    assert words.format(row["to_sinks"], row["to_sinks_95"], row["sinks"]) in prose
    assert f"{row['sinks_above_twice']:.1f} % were outliers before the layer" in prose
    assert table.loc["specimen, untrained", "sinks"].max() == 0
    by_image = own["sinks"] * 196 / 100
    assert by_image[9] < 0.5 < by_image[10] < 1.5 < 4.5 < by_image[11] < 5.5


def test_chapter_10_former_sinks_keep_half_of_their_attention_with_a_register(photos):
    model = load_model(SPECIMEN)
    other = with_register(model, register_neurons(model, photos, 5, times=2.0))
    before, after = (attention_of(each, photos)[-1].mean((1, 2)) for each in (model, other))
    sinks = sinks_of(before, 1)
    had = 100 * (before[:, -196:] * sinks).sum(1).mean()
    has = 100 * (after[:, -196:] * sinks).sum(1).mean()
    assert has > 5 * 100 * sinks.sum(1).mean() / 198
    words = "receive {:.1f} % of the last layer's attention, where it was {:.1f} %, and the register {:.1f} %"
    assert words.format(has, had, 100 * after[:, 1].mean()) in told("10")[0]


def test_chapter_10_register_and_its_controls():
    prose, _ = told("10")
    table = pd.read_csv(DATA / "results" / "registers.csv")
    rows = table[table["layer"] == 10].set_index("variant")
    first, empty, chance = (
        rows.loc[name]
        for name in ("the model, first 1,000", "empty register", "register, random neurons")
    )
    assert first["images"] == empty["images"] == chance["images"] == 1000
    assert (
        "{:.2f} % are outliers, and {:.2f} % with a token of zeros".format(
            first["above"], empty["above"]
        )
        in prose
    )
    lines = table.pivot(index="layer", columns="variant", values="largest_ratio")
    assert (lines["empty register"] - lines["register, random neurons"]).abs().max() < 0.002, (
        "one line for both"
    )
    change = rows.loc["register", ["change", "change_low", "change_high"]]
    assert "−{:.2f} points [−{:.2f}, {:.2f}]".format(*change.abs()) in prose


def leads(table: str, of: str, over: str) -> pd.Series:
    """Top-1 of a model less that of another, by seed."""
    top1 = pd.read_csv(DATA / "results" / table).pivot(index="seed", columns="model", values="top1")
    return top1[of] - top1[over]


@pytest.mark.parametrize(
    "over, words", [("ViT", "−0.3 ± 1.7"), ("ViT, twice the layers", "−0.1 ± 2.4")]
)
def test_axial_attention_leads_neither_model(over, words):
    lead = leads("axial-cpu.csv", "axial ViT", over)
    low, high = ttest_1samp(lead, 0).confidence_interval(0.95)
    assert low < 0 < high and len(lead) == 3
    assert words == f"{lead.mean():.1f} ± {(high - low) / 2:.1f}".replace("-", "−")
    assert words in told("14")[0]


@pytest.mark.parametrize("change, points", [("mean of the patches", 2.5), ("milder crops", 1.9)])
def test_recipe_took_changes_beyond_two_standard_errors(change, points):
    lead = leads("recipe-pilot-cpu.csv", change, "tiny-imagenet-2min")
    assert lead.mean() > 2 * lead.sem() and round(lead.mean(), 1) == points
    for text in ("docs/training.md", "vitlens/train/recipes.py"):
        assert f"{points} points" in (DATA.parent / text).read_text()


def test_chapter_15_planted_cues_and_their_effects():
    table = pd.read_csv(DATA / "results" / "plants.csv")
    cues = table[table["plant"].notna() & (table["kind"] != "tint")]
    prose, _ = told("15")
    assert f"{cues['found'].sum()} of {len(cues)} cues that patches can hold" in prose
    chosen_on = cues["model"].isin(["planted-0", "planted-1", "planted-2"])
    first = cues[chosen_on]["found"]
    others = cues[~chosen_on & ~cues["kept"]]["found"]
    kept = cues[cues["kept"]]["found"]
    assert f"finds {first.sum()} of {len(first)}. On three others" in prose
    assert f"On three others it finds {others.sum()} of {len(others)}, and" in prose
    assert f"the three that were kept for the end {kept.sum()} of {len(kept)}." in prose
    at_places = cues[cues["kind"].isin(["fixed", "two", "shared"])]["found"]
    assert at_places.all() and f"all {len(at_places)} marks at fixed places" in prose
    missed = cues[~cues["found"].astype(bool)]["kind"].value_counts().to_dict()
    assert missed == {"anywhere": 4, "fifth": 3, "border": 2}
    fixed = cues[cues["kind"] == "fixed"][["effect", "true_effect"]].mean()
    assert "{:.2f} against {:.2f} for marks at a fixed place".format(*fixed) in prose
    assert not table["false_suspects"].fillna(0).any(), "no suspect is off the cues"


def test_audits_of_controls_find_nothing():
    """Without cues no suspect, and with shuffled labels no used group."""
    table = pd.read_csv(DATA / "results" / "plants-controls.csv")
    clean, shuffled = (table[table["kind"] == kind] for kind in ("clean", "shuffled"))
    assert len(clean) == len(shuffled) == table["model"].nunique() / 2 == 20
    assert clean["suspects"].sum() == 0 and shuffled["used"].sum() == 0
    assert (
        shuffled["tested"].min() > 0 and shuffled["accuracy"].max() < 0.2 < clean["accuracy"].min()
    )
    assert f"{1 - 0.05 ** (1 / 20):.0%}" == "14%"
    prose = " ".join((DATA.parent / "docs/explaining.md").read_text().split())
    assert "of twenty models that were trained without cues none had a suspect" in prose
    assert "of twenty that were trained with shuffled labels none had a used group" in prose


def test_layers_and_maps_of_an_audit_find_as_many_cues_as_the_docs_say():
    table = pd.read_csv(DATA / "results" / "plants-choices.csv").set_index(["layer", "method"])
    found = table["found"].to_dict()
    false = table["false_suspects"].to_dict()
    usual = "balanced_gradients"
    assert [(found[layer, usual], false[layer, usual]) for layer in range(4)] == [
        (12, 2),
        (13, 0),
        (12, 1),
        (13, 0),
    ]
    assert (found[1, "relevance"], false[1, "relevance"]) == (12, 1)
    assert (found[1, "grad_cam"], false[1, "grad_cam"]) == (9, 1)
    assert set(table["cues"]) == {18}
    prose = " ".join((DATA.parent / "docs/explaining.md").read_text().split())
    for words in (
        "layers 1 and 3 of four find 13 of 18 cues and no suspect beside them",
        "layer 0 finds 12 with two such suspects, and layer 2 finds 12 with one",
        "relevance finds 12 and Grad-CAM 9, each with one",
    ):
        assert words in prose


def test_chapter_15_mark_covers_four_patches_and_a_tint_survives_covering():
    grid = TokenGrid(6, 6, (4, 4))
    image = torch.full((3, 24, 24), -1.0)
    image[:, 18:22, 18:22] = 1
    changed = (image > 0).any(0).unflatten(0, (6, 4)).unflatten(2, (6, 4)).any(3).any(1)
    assert changed.sum() == 4 and "the mark touches 4 of 36 patches" in told("15")[1]
    tint = torch.tensor([0.2, 0.2, 0.6])[:, None, None]
    blanks = blanks_of(0.75 * image + 0.25 * tint, image, grid)
    hue = (blanks.mean((2, 3)) @ torch.tensor([-0.5, -0.5, 1.0])).tolist()
    assert min(hue[:2]) > 0.09 and abs(hue[2]) < 1e-6, "border and blur keep it, another image not"
