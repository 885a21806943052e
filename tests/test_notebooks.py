"""The results in the prose of the notebooks, computed anew."""

import functools
import json
import re
import runpy
from pathlib import Path

import nbformat
import numpy as np
import pandas as pd
import pytest
import torch

from experiments import studies
from vitlens import attention, capture, intervene, load_model
from vitlens.evaluate import student
from vitlens.images import samples
from vitlens.models import preprocess
from vitlens.train import snapshots

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("old_*.ipynb"))
INDEX = FOLDER / "README.md"
@functools.cache
def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def sources(path: Path, kind: str) -> list[str]:
    return [cell.source for cell in read(path).cells if cell.cell_type == kind]


def outputs(path: Path) -> list[nbformat.NotebookNode]:
    return [output for cell in read(path).cells for output in cell.get("outputs", [])]


def pictures(path: Path) -> list[bytes]:
    return list(script("pictures")(read(path).cells))


def script(name: str):
    """A function of notebooks/execute.py."""
    return runpy.run_path(str(FOLDER / "execute.py"))[name]


RESULTS = FOLDER.parent / "data" / "results"


def told(number: str) -> tuple[str, str]:
    """The prose of a notebook, and its tables and printed lines as text."""
    (path,) = FOLDER.glob(f"old_{number}_*.ipynb")
    tables = [output.get("data", {}).get("text/plain", output.get("text", "")) for output in outputs(path)]
    return "\n".join(sources(path, "markdown")), "\n".join(tables)


def test_notebook_14_numbers_equal_committed_tables():
    prose, shown = told("14")
    tables = {epochs: studies.read_table(RESULTS / f"masked-{name}.csv")
              for epochs, name in (("10 epochs", "cpu-short"), ("40 epochs", "cpu"))}  # fmt: skip
    runs = pd.concat({epochs: pd.DataFrame(rows) for epochs, rows in tables.items()}, names=["tuned for"])
    means = runs.groupby(["tuned for", "model"], sort=False)[["unlabeled", "images", "probe", "top1"]].mean()
    ahead = {(model, epochs): found for epochs, rows in tables.items()
             for model, *found in studies.against(rows, "random weights")}  # fmt: skip
    gains = pd.DataFrame({f"{model}, {epochs}": found for (model, epochs), found in ahead.items()},
                         ["points ahead", "low", "high", "seeds it would take"]).T.rename_axis("")  # fmt: skip
    gains["seeds it would take"] = gains["seeds it would take"].astype(int)
    with pd.option_context("display.width", 80, "display.max_columns", 20):
        assert str(means.round(1)) in shown and str(gains.round(1)) in shown
    quick, old, new = (f"masked {name} steps" for name in ("patches, 1,000", "patches, 8,000", "autoencoder, 8,000"))
    assert 4.5 < ahead[quick, "10 epochs"][0] < 5 and ahead[quick, "10 epochs"][1] > 0, "nearly five points"
    assert round(ahead[new.replace("8", "1"), "10 epochs"][0]) == 3 and ahead[new.replace("8", "1"), "10 epochs"][1] > 0
    for name in (quick, old, new.replace("8", "1")):
        assert ahead[name, "40 epochs"][1] < 0 < ahead[name, "40 epochs"][2], "gone, or no gain"
    assert f"ends {ahead[new, '40 epochs'][0]:.1f} points ahead" in prose and ahead[new, "40 epochs"][1] > 0
    assert round(ahead[old, "40 epochs"][0], 1) == 0.5 and 45 < ahead[old, "40 epochs"][3] < 60, "some fifty seeds"
    probes = means["probe"] / means.loc["10 epochs", "random weights"]["probe"]
    assert all(1.9 < probes[epochs, model] < 2.5 for model, epochs in ahead), "twice as much"
    seen, _ = studies.read_insides(RESULTS / "masked-cpu.npz")
    names = {"random weights, before tuning": (0.43, 0.46), f"{old}, before tuning": (0.78, 0.83),
             f"{new}, before tuning": (0.86, 0.9), "random weights": (0.5, 0.6)}  # fmt: skip
    for name, (low, high) in names.items():
        squares = seen[name]["filters"][:, :8].astype(float) ** 2
        inner = squares[:, :, 1:-1, 1:-1].sum((2, 3, 4)) / squares.sum((2, 3, 4))
        assert ((1 - inner).mean(1) > low).all() and ((1 - inner).mean(1) < high).all(), "in every seed"
        assert f"{100 * (1 - inner).mean():.1f}" in shown
    near = seen[f"{old}, before tuning"]["distances"].astype(float).mean((0, 2))
    assert near.argmin() == 2 and f"those of layer 2 to {near[2]:.1f}\npixels" in prose
    assert f"at least {100 * (1 - near[2] / 8):.0f} %" in prose


def test_notebooks_11_and_15_numbers_equal_committed_tables():
    prose, _ = told("11")
    table = pd.read_csv(RESULTS / "explanations.csv").set_index("method")
    for method in ("direct", "gradient_rollout"):
        assert "{difference:.3f} ± {difference_95:.3f}".format(**table.loc[method]) in prose
    prose, _ = told("15")
    heads = pd.read_csv(RESULTS / "heads.csv")
    best = heads.loc[heads.groupby(["layer", "way"])["kl"].idxmax()].set_index(["way", "layer"])
    for way, early in (("zero", range(1, 5)), ("mean", range(1, 5)), ("resample", range(5))):
        kl = best["kl"][way]
        assert kl[list(early)].min() > kl.drop(list(early)).max(), f"{way} is highest in layers {early}"
    kl, low, high = (best[name].unstack("way") for name in ("kl", "kl_low", "kl_high"))
    assert kl.index[kl["resample"] < kl["zero"]].tolist() == [3]
    assert low.index[low["resample"] < high["zero"]].tolist() == [3, 4], "of zero and resampling overlap"
    milder = low.index[high["mean"] < low["zero"]].tolist()
    assert f"in layers {', '.join(map(str, milder[:-1]))} and {milder[-1]};" in prose


def test_notebook_17_numbers_equal_committed_table():
    prose, shown = told("17")
    table = pd.read_csv(RESULTS / "registers.csv")
    rows = table[table["layer"] == 10].set_index("variant")
    whole, first, empty, chance = (
        rows.loc[name] for name in ("the model", "the model, first 1,000", "empty register", "register, random neurons")
    )
    assert whole["images"] == rows.loc["register", "images"] == 9900
    assert first["images"] == empty["images"] == chance["images"] == 1000
    for control in (empty, chance):  # both are compared with the model on the same pictures
        assert control["accuracy"] - control["change"] == pytest.approx(first["accuracy"])
        assert 0.5 < control["above"] / first["above"] < 0.55, "hardly more than half"
    plain = " ".join(prose.split())
    assert f"pictures {first['above']:.2f} % of the patches are outliers, and with a token of zeros alone" in plain
    assert f"alone {empty['above']:.2f} %, hardly more than half" in plain
    lines = table.pivot(index="layer", columns="variant", values="largest_ratio")
    gap = lines["empty register"] - lines["register, random neurons"]
    assert gap.abs().max() < 0.002, "their two lines lie on each other"
    taken = table[table["variant"] == "register"]
    assert taken["above"].max() < 0.04, "hardly any patch, after any layer"
    assert (
        "the accuracy changes by −{:.2f} points [−{:.2f}, {:.2f}]".format(
            *rows.loc["register", ["change", "change_low", "change_high"]].abs()
        )
        in plain
    )
    assert f"{first['accuracy']:.2f}" in shown


def test_notebook_12_numbers_equal_committed_tables():
    prose, shown = told("12")
    rows = studies.read_table(RESULTS / "data-size-cpu.csv")
    vit, hybrid, resnet = dict.fromkeys(row["model"] for row in rows)
    epochs = studies.read_table(RESULTS / "data-size-cpu-epochs.csv")
    equal, known = [row for row in rows if row["images"] == 7_500] + epochs, set()
    for found, metric in ((rows, "top1"), (equal, "top1"), (rows, "five_shot")):
        columns = ["images", f"ViT over ResNet, {metric}", "low", "high"]
        ahead = pd.DataFrame(studies.lead(found, vit, resnet, metric), columns=columns)
        table = pd.DataFrame(found).pivot_table(metric, "images", "model").join(ahead.set_index("images"))
        with pd.option_context("display.width", 80):
            assert str(table.round(1)) in shown
        means = [row[1] for curve in studies.curves(found, metric).values() for row in curve]
        pairs = (vit, resnet), (hybrid, resnet), (vit, hybrid)
        leads = [row[1:] for pair in pairs for row in studies.lead(found, *pair, metric)]
        known |= {f"{abs(value):.1f}" for value in (*means, *np.ravel(leads))}
    top1 = pd.DataFrame(rows).pivot_table("top1", ["seed", "images"], "model")
    leads = (top1[vit] - top1[resnet]).unstack()
    for fewer, more in ((2_500, 7_500), (7_500, 25_000)):
        grown = leads[more] - leads[fewer]
        by, half = grown.mean(), student(grown)
        (line,) = re.findall(rf"^{more} .*", shown.split("the lead grows by")[1], re.M)[:1]
        assert line.split()[1:] == [f"{by:.1f}", f"{half:.1f}"]
        known |= {f"{abs(value):.1f}" for value in (by, by - half, by + half)}
    speed = pd.read_csv(RESULTS / "speed-cpu.csv").query("image_size == 224").set_index("model")
    known |= {f"{value:.1f}" for value in (*speed["images_per_second"], *speed["bytes_per_image"] / 1e6)}
    measured = [text for text in sources(NOTEBOOKS[11], "markdown") if text.startswith("**Measured.**")]
    assert len(measured) == 4 and set(re.findall(r"\d+\.\d+", "".join(measured))) <= known
    batches = speed["largest_batch"].filter(items=["ViT-B/32", "R50x1", "R50x2", "ViT-L/32"])
    assert all(str(batch) in measured[-1].split("With speed")[0] for batch in batches)


def test_notebook_13_numbers_equal_committed_tables():
    _, shown = told("13")
    prose = sources(NOTEBOOKS[12], "markdown")
    names = ("positions", "readout", "scaling", "bias", "equivariance", "optimizers")
    tables = {name: studies.read_table(RESULTS / f"{name}-cpu.csv") for name in names}
    known = {"scaling": set(), "optimizers": set()}
    rates = [(f"mean of patches, {rate}", f"class token, {rate}") for rate in (0.008, 0.016)]
    pairs = [("scaling", *pair) for pair in (("width, 1", "depth, 2"), ("all, 1", "width, 2"), ("all, 1", "depth, 2"))]
    pairs += [("readout", *pair) for pair in rates]
    pairs += [("optimizers", f"{name}, {other}", f"{name}, Adam")
              for name in ("ResNet", "ViT, patch 4") for other in ("SGD", "SGD, rate × 10", "Muon")]  # fmt: skip
    for name, first, second in pairs:
        ahead = studies.lead(tables[name], first, second)[0][1:]
        assert re.search(r" +".join(f"{number:.1f}" for number in ahead), shown)
        known["optimizers" if name == "optimizers" else "scaling"] |= {f"{abs(number):.1f}" for number in ahead}
        if name == "optimizers":
            assert ahead[2] < 0 if "SGD" in first else ahead[1] > 0, "all intervals leave zero out"
    for name, baseline in (("positions", "none"), ("positions", "learned, 1-D"), ("scaling", "base"), ("bias", "plain"),
                           ("equivariance", "plain")):  # fmt: skip
        for model, *numbers, _ in studies.against(tables[name], baseline):
            numbers = [f"{number:.1f}" for number in numbers]
            assert re.search(rf"^{re.escape(model)} {{2,}}.*{' +'.join(numbers)}", shown, re.M), model
            known["scaling"] |= {number.lstrip("-") for number in numbers}
    flops = {row["model"]: row["flops"] for row in tables["scaling"]}
    known["scaling"] |= {f"{each / flops['base']:.1f}" for each in flops.values()}
    for start, name in (("Much of Fig. 8", "scaling"), ("Adam leads SGD", "optimizers")):
        (text,) = [text for text in prose if text.startswith(start)]
        assert re.findall(r"\d+\.\d", text) and set(re.findall(r"\d+\.\d", text)) <= known[name]
    clear = [model for model, _, low, high, _ in studies.against(tables["scaling"], "base") if low > 0 or high < 0]
    assert clear == [model for model in flops if not model.startswith(("base", "MLP"))]
    assert not any(low > 0 or high < 0 for _, _, low, high, _ in studies.against(tables["bias"], "plain"))
    (text,) = [text for text in prose if text.startswith("*After* averaging")]
    (_, *flips, _), (_, *rotations, _) = studies.against(tables["equivariance"], "plain")
    assert "Flips gain {:.1f} points [{:.1f}, {:.1f}]".format(*flips) in text.replace("−", "-")
    mean, low, high = (-number for number in rotations)
    assert f"rotations cost {mean:.1f} [{high:.1f}, {low:.1f}]" in text and high > 0


CHECKPOINTS = FOLDER.parent / "data" / "checkpoints"


def in_words(number: str) -> str:
    """The prose of a notebook in one line."""
    return " ".join(told(number)[0].split())


@torch.no_grad()
def test_notebook_15_head_writes_a_constant():
    prose, (_, shown) = in_words("15"), told("15")
    model = load_model(CHECKPOINTS / "vit_tiny_patch8_64")
    crops = [image.crop((k, k, k + 200, k + 200)) for image in samples().values() for k in range(0, 100, 10)]
    images, seen, layer = preprocess(model, crops), [], model.blocks[0].attn
    hook = layer.proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with capture(model) as attn:
        before = model(images).argmax(1)
    hook.remove()
    written, changed = seen[0].unflatten(2, (layer.num_heads, -1))[:, :, 3], []
    for rows in (slice(None), slice(1), slice(1, None)):
        silent = written.clone()
        silent[:, rows] = 0
        with intervene(model, heads={(0, 3): silent}):
            changed.append(100 * (model(images).argmax(1) != before).double().mean())
    assert changed[0] > 50 and abs(changed[0] - changed[1]) < 10 and changed[2] < changed[1] / 3
    deviation = written[:, 0].std(0).mean()
    assert f"of norm {written[:, 0].norm(dim=1).mean():.1f}" in prose
    assert deviation < 0.01 < written[:, 1:].std(0).mean() / 5
    kept = 100 * attn[0].weights()[:, 3, 1:, 1:].diagonal(dim1=1, dim2=2).mean()
    assert f"a patch attends to itself with {kept:.1f} %, near the {100 / 65:.1f} % of uniform attention" in prose
    every, first, rest = (re.search(rf"^{name} +([\d.]+)$", shown, re.M)[1]
                          for name in ("all rows", "the class token's row", "the rows of the patches"))  # fmt: skip
    assert f"Zeroing this row alone changes {first} % of the answers, and zeroing the whole head {every} %" in prose
    assert f"zeroing these rows changes {rest} %" in prose
    vary = re.search(r"of one of its 32 values: ([\d.]+);", shown)[1]
    assert f"vary by {vary} from crop to crop" in prose and float(vary) < 0.01
    table = pd.read_csv(RESULTS / "heads-scratch.csv").set_index(["layer", "head", "way"]).loc[0, 3]
    assert f"changes {table.loc['zero', 'flipped']:.0f} % of the answers" in prose
    assert f"Setting it to its mean changes {table.loc['mean', 'flipped']:.0f} %" in prose


def test_notebook_15_losses_add_up_for_four_heads():
    prose = in_words("15")
    steps, heads = (pd.read_csv(RESULTS / f"{name}.csv") for name in ("pruning", "heads"))
    alone = heads[heads["way"] == "mean"].set_index(["layer", "head"])["change"]
    greedy = steps[steps["order"] == "greedy"].set_index("removed")
    order = greedy.loc[1:, ["layer", "head"]].astype(int).itertuples(index=False, name=None)
    single = -np.cumsum([alone[key] for key in order])
    lost = {count: (greedy["accuracy"][0] - greedy["accuracy"][count], single[count - 1]) for count in (4, 8, 12, 20)}
    assert "cost {:.2f} points together, and {:.2f} as the sum".format(*lost[4]) in prose
    assert "{:.2f} against {:.2f} points".format(*lost[8]) in prose
    assert "{:.2f} against {:.2f} at twelve heads".format(*lost[12]) in prose
    assert "{:.2f} against {:.2f} at twenty".format(*lost[20]) in prose
    for count, (together, total) in lost.items():
        assert (greedy["accuracy"][0] - greedy["high"][count] > total) == (count > 4), "outside of the band"
        assert together > total


@torch.no_grad()
def test_notebook_06_contrast_falls_with_every_layer():
    prose, (_, shown) = in_words("06"), told("06")
    folder, lines = CHECKPOINTS / "vit_tiny_patch16_224", []
    for learned in (True, False):
        torch.manual_seed(0)
        model = load_model(folder, pretrained=learned)
        with capture(model) as attn:
            model(preprocess(model, list(samples().values())))
        row, contrasts = attn.grid.readout.expand(len(samples()), -1), []
        for layer in reversed(list(attn)):
            row = (row + torch.einsum("bt,btk->bk", row, layer.weights().mean(1))) / 2
            each = attn.grid.image_map(row).flatten(1)
            contrasts.append(float((each.amax(1) / each.mean(1)).mean()))
        lines.append(contrasts)
        torch.testing.assert_close(attention.rollout(attn).flatten(1), each)
    trained, untrained = lines
    assert all(np.diff(trained) < 0) and trained[-1] < trained[0] / 5 and max(untrained) < 1.2
    told_as = "{:.1f} through the last layer alone, {:.1f} through the last two, then {:.1f}, and {:.2f} through all"
    assert told_as.format(*trained[:3], trained[-1]) in prose
    assert re.search(rf"^trained +{trained[0]:.2f} +{trained[1]:.2f} ", shown, re.M)
    largest = re.search(r"^untrained +([\d.]+) ", shown, re.M)[1]
    assert f"its contrast is {largest} at most" in prose


def test_notebook_08_accuracy_is_half_way_between_filters_and_distance():
    prose, (_, shown) = in_words("08"), told("08")
    folder = CHECKPOINTS / "vit_tiny_patch8_64"
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    scored = {0: 0.5} | {record["step"]: record["metrics"]["top1"] for record in records if record["metrics"]}
    steps, half = list(scored), (0.5 + scored[11700]) / 2
    after = next(step for step in steps if scored[step] >= half)
    before = steps[steps.index(after) - 1]
    middle = np.interp(half, list(scored.values()), steps)
    assert f"half-way between steps {before:,} and {after:,}, the two measurements around {half:.1f} %" in prose
    assert f"that is step {middle:,.0f}" in prose
    assert f"{scored[before]:.1f} % at step {before} and {scored[after]:.1f} % at step {after}" in shown
    run = snapshots.load(folder / "snapshots.npz")
    distance = run["distances"].mean((1, 2), dtype=float)
    way = (distance - distance[0]) / (distance[-1] - distance[0])
    reached = (way >= 0.5).argmax()
    moments = run["steps"][reached - 1], run["steps"][reached]
    assert "which gets there between steps {:,} and {:,}".format(*moments) in prose
    assert re.search(r"^filters +\d+ +1392 ", shown, re.M) and 1392 < middle < moments[0]
    low, high = run["top1_confidence"].mean(1, dtype=float)[-2:]
    assert f"confidence rises from {low:.3f} to {high:.3f} between the last two moments" in prose
    rise = scored[11700] - np.interp(run["steps"][-2], steps, list(scored.values()))
    assert f"the accuracy rises by {rise:.1f} points" in prose


@torch.no_grad()
def test_notebook_10_mean_of_heads_shows_the_rocket():
    prose, (_, shown) = in_words("10"), told("10")
    model = load_model(CHECKPOINTS / "vit_tiny_patch16_224")
    with capture(model) as attn:
        model(preprocess(model, samples()["rocket"]))
    maps = attn.grid.image_map(attn[-1].weights([attn.grid.index(7, 7)])[0, :, 0])
    share = 100 * maps[:, 4:13, 6:8].sum((1, 2))
    mean = re.search(r"^mean of the heads +(\d+) +(\d+)$", shown, re.M)
    assert int(mean[1]) == round(float(share.mean())) and abs(int(mean[1]) - int(mean[2])) < 4
    assert f"Their mean gives the rocket {mean[1]} % and the long tokens {mean[2]} %" in prose
    assert f"gives the rocket {mean[1]} % of its attention and the patches with long tokens {mean[2]} %" in prose
    assert re.findall(r"^head \d +(\d+) ", shown, re.M) == [f"{each:.0f}" for each in share]


def test_notebook_17_sinks_name_the_class():
    prose, (_, shown) = in_words("17"), told("17")
    table = pd.read_csv(RESULTS / "sinks-lens.csv").set_index(["model", "class", "layer"])
    own, other = (table.loc["vit_tiny_patch16_224", name] for name in ("answer", "other"))
    for layer, words in ((10, "{:.1f} times as strongly after layer 10 [{:.1f}, {:.1f}], in {:.0f} % of {:,} images"),
                         (11, "{:.1f} times after layer 11 [{:.1f}, {:.1f}], in {:.0f} %")):  # fmt: skip
        row = own.loc[layer]
        assert words.format(*row[["ratio", "ratio_low", "ratio_high", "above", "images"]]) in prose
        assert row["ratio_low"] > 1.9 and f"{row['ratio']:.2f}" in shown
    assert "named {:.2f} and {:.2f} times as strongly".format(*other["ratio"][[10, 11]]) in prose
    assert "after layers 8 and 9 the ratios are {:.2f} and {:.2f}".format(*own["ratio"][[8, 9]]) in prose
    assert own["ratio_high"][[8, 9]].max() < 1
    shares = own.loc[11, ["most", "others"]]
    assert "are {:.1f} % in the six patches and {:.1f} % in the others".format(*shares) in prose
    controls = pd.concat([other["ratio"], table.loc["vit_tiny_patch16_224, untrained", "answer"]["ratio"]])
    assert controls.between(0.85, 1.1).all(), "near 1"
    ends = "the image's class {:.1f} and {:.1f} times as strongly as the other patches"
    assert ends.format(*own["ratio"][[10, 11]]) in prose
