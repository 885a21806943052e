"""The code of docs/recipes.md runs, and its results equal those computed another way.

Recipes with a line "Needs" run in `make test-recipes`, in an environment with their packages.
"""

import functools
import importlib.metadata
import os
import re
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import vitlens
from vitlens.recorder.supported import FAMILIES

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
INSTALLED = bool(os.environ.get("VITLENS_RECIPES"))
"""True in the environment of `make test-recipes`."""


def python(text: str) -> str:
    """The Python of a part of the page."""
    return "".join(re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S))


def sections(text: str, level: str) -> dict[str, str]:
    """Texts below the headings of a level, by heading, and the text before the first one under ""."""
    first, *parts = re.split(rf"^{level} ", text, flags=re.M)
    return {"": first} | dict(part.split("\n", 1) for part in parts)


def needs(text: str) -> list[str]:
    """Packages that a part of the page names in its line "Needs"."""
    return re.findall(r"^Needs `pip install ([^`]+)`", text, re.M)


def recipes() -> dict[str, tuple[str, list[str]]]:
    """(code, packages) by title. A recipe below a heading of its own begins with the code above that heading."""
    by_title = {}
    for title, text in sections(PAGE, "##").items():
        parts = sections(text, "###")
        before = parts.pop("")
        if not title:
            continue
        if not parts:
            by_title[title] = python(text), needs(text)
        for name, part in parts.items():
            by_title[name] = python(before) + python(part), needs(part)
    return {title: (code, " ".join(names).split()) for title, (code, names) in by_title.items()}


RECIPES = recipes()


def peaked(tiny_vit):
    """A `tiny_vit` whose attention is far from uniform, so that a rollout has contrast."""

    def build():
        torch.manual_seed(0)
        model = tiny_vit()
        with torch.no_grad():
            for block in model.blocks:
                block.attn.qkv.weight.mul_(20)
        return model

    return build


@functools.cache
def setup() -> dict[str, object]:
    """Names that the first block of the page defines."""
    space = {}
    exec(compile(python(sections(PAGE, "##")[""]), "setup", "exec"), space)
    space["tiny_vit"] = peaked(space["tiny_vit"])
    return space


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A function that runs a recipe by its title in an empty folder, and returns its names."""
    import matplotlib.pyplot as plt

    monkeypatch.chdir(tmp_path)
    families = dict(FAMILIES)

    def run_recipe(title: str) -> dict[str, object]:
        code, packages = RECIPES[title]
        if packages and not INSTALLED:
            pytest.skip(f"needs {', '.join(packages)}: make test-recipes")
        if "overcomplete" in packages and sys.version_info >= (3, 13):
            pytest.skip("overcomplete requires Python 3.12 or older")
        space = dict(setup())
        exec(compile(code, title, "exec"), space)
        return space

    yield run_recipe
    plt.close("all")
    FAMILIES.clear()
    FAMILIES.update(families)


def table() -> dict[str, str]:
    """Versions of packages in the table of the page."""
    return dict(re.findall(r"^\| ([\w-]+) \| ([\d.]+) \|", PAGE, re.M))


def test_every_recipe_has_a_test():
    tested = re.findall(r"run\(\"(.+?)\"\)", Path(__file__).read_text(encoding="utf-8"))
    assert sorted(tested) == sorted(RECIPES)
    assert all(code for code, _ in RECIPES.values())


def test_versions_are_those_of_the_makefile():
    pins = re.search(r"^RECIPE_PACKAGES := (.+)$", (ROOT / "Makefile").read_text(), re.M)[1]
    assert dict(re.findall(r"([\w-]+)==([\d.]+)", pins)) == table()
    named = {name for _, packages in RECIPES.values() for name in packages}
    assert named == set(table())


def test_links_within_the_page_lead_to_headings():
    words = [re.sub(r"[^\w -]", "", title.lower()) for title in re.findall("^#+ (.+)$", PAGE, re.M)]
    headings = {title.replace(" ", "-") for title in words}
    for page in (ROOT / "docs").glob("*.md"):
        text = page.read_text(encoding="utf-8")
        own = r"\]\(#([^)]+)\)" if page.name == "recipes.md" else r"\]\(recipes\.md#([^)]+)\)"
        assert set(re.findall(own, text)) <= headings, page.name


@pytest.mark.skipif(not INSTALLED, reason="make test-recipes")
def test_installed_versions_are_those_of_the_page():
    expected = table()
    if sys.version_info >= (3, 13):
        del expected["overcomplete"]
    assert {name: importlib.metadata.version(name) for name in expected} == expected


def maps_of_layers(model, images):
    """Attention (B, H, T, T) of each layer of a transformers model, by its own unfused path."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        maps = model(images, output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    return maps


def test_llava_tower(run):
    space = run("Where does LLaVA look in the image?")
    maps = maps_of_layers(space["llava"].model.vision_tower, space["pixels"])
    for layer, expected in zip(space["attn"], maps, strict=True):
        torch.testing.assert_close(layer.weights(), expected, rtol=1e-4, atol=1e-6)
    product = torch.eye(17)
    for weights in maps:
        product = (weights[0].mean(0) + torch.eye(17)) / 2 @ product
    expected = product[1 + 1 * 4 + 2, 1:].view(4, 4)
    torch.testing.assert_close(space["rollout"][0], expected, rtol=1e-4, atol=1e-6)


def test_patches_of_a_text(run):
    space = run("Which patches belong to this text?")
    clip, pixels = space["clip"], space["pixels"]
    cat, dog = (text.name.split("“")[1][:-1] for text in (space["cat"], space["dog"]))
    import open_clip

    ids = open_clip.SimpleTokenizer(context_length=12)([cat, dog])
    with torch.no_grad():
        cosine = F.cosine_similarity(clip.encode_image(pixels), clip.encode_text(ids))
    direct = [
        vitlens.attribution.relevance(
            clip, pixels, lambda features: F.cosine_similarity(features, clip.encode_text(ids[:1]))
        ),
        space["toward_cat"],
    ]
    assert cosine[0] != cosine[1]
    torch.testing.assert_close(*direct, rtol=1e-4, atol=1e-7)
    assert space["rather_than_dog"].shape == (1, 8, 8)
    assert not torch.allclose(space["rather_than_dog"], space["toward_cat"])


def test_dicom_window(run):
    space = run("How do I open a DICOM series with a window?")
    import pydicom

    dataset = pydicom.dcmread(space["files"][0])
    units = dataset.pixel_array * float(dataset.RescaleSlope) + float(dataset.RescaleIntercept)
    expected = np.interp(units, [40 - 200, 40 + 200], [0, 1])
    (levels,) = space["slices"]
    np.testing.assert_allclose(levels, expected, atol=1e-6)
    assert (levels > 0).mean() > 0.1 and len(np.unique(levels)) > 50
    assert space["batch"].shape == (1, 3, 224, 224)
    positions = {"a.dcm": 7.5, "b.dcm": -20, "c.dcm": 0}
    for name, position in positions.items():
        dataset.ImagePositionPatient[2] = position
        dataset.save_as(name)
    assert sorted(positions, key=space["height"]) == ["b.dcm", "c.dcm", "a.dcm"]
    dataset.PhotometricInterpretation = "MONOCHROME1"
    dataset.save_as("inverted.dcm")
    inverted = space["windowed"]("inverted.dcm", 40, 400)
    np.testing.assert_allclose(inverted, 1 - expected, atol=1e-6)


def test_tiff_stack(run):
    space = run("Why is my 12-bit TIFF black, and how do I open a stack?")
    pages = []
    with Image.open("stack.tif") as file:
        for page in range(file.n_frames):
            file.seek(page)
            pages.append(np.asarray(file))
    stack = np.stack(pages)
    np.testing.assert_allclose(space["full_scale"], stack / 4095, rtol=1e-6)
    flat = np.sort(stack.flatten())
    assert (space["stretched"][stack <= flat[len(flat) // 200]] == 0).all()
    assert (space["stretched"][stack >= flat[-len(flat) // 200]] == 1).all()
    levels = np.rint(stack / 4095 * 255).astype(np.uint8)
    expected = vitlens.preprocess(space["model"], [Image.fromarray(page) for page in levels])
    torch.testing.assert_close(space["batch"], expected)
    notes = []
    vitlens.load_image("stack.tif", on_note=notes.append)
    assert "dark" in notes[0] and "5" in notes[0]


def rollout_of(maps, row):
    """Rollout by definition from maps (T, T) of one image, means of heads, and a row (T,) to start from."""
    eye = torch.eye(len(row))
    product = eye
    for weights in maps:
        product = (weights + eye) / 2 @ product
    return row @ product


def test_own_vit(run):
    space = run("How do I open my own ViT, whose softmax is written out?")
    written_out, seen = space["written_out"], []
    x = space["pixels"]
    with torch.no_grad():
        x = written_out.embed(x).flatten(2).mT + written_out.positions
        for block in written_out.blocks:
            q, k, _ = block.attn.qkv(block.norm1(x)).unflatten(-1, (3, 3, -1)).unbind(2)
            q, k = q.transpose(1, 2), k.transpose(1, 2)
            seen.append((q @ k.mT / 4).softmax(-1))
            x = block(x)
    for layer, expected in zip(space["attn"], seen, strict=True):
        torch.testing.assert_close(layer.weights(), expected, rtol=1e-4, atol=1e-6)
    row = torch.full((16,), 1 / 16)
    expected = rollout_of([weights[0].mean(0) for weights in seen], row)
    torch.testing.assert_close(space["rollout"][0].flatten(), expected, rtol=1e-4, atol=1e-6)
    refused = pytest.raises(vitlens.UnsupportedModelError, match="scaled_dot_product_attention")
    with refused, vitlens.capture(written_out):
        written_out(space["pixels"])


def test_vit_pytorch(run, monkeypatch):
    if INSTALLED:
        from vit_pytorch import vit

        for kind in (vit.Attention, vit.Transformer):
            monkeypatch.setattr(kind, "forward", kind.forward)  # restored afterwards
        monkeypatch.setattr(vit.Attention, "num_heads", None, raising=False)
    space = run("How do I open a model of vit-pytorch?")
    monkeypatch.undo()
    maps, model = [], space["lucid"]
    hooks = [
        layer[0].attend.register_forward_hook(lambda _, __, output: maps.append(output))
        for layer in model.transformer.layers
    ]
    model(space["batch"])
    for hook in hooks:
        hook.remove()
    for layer, expected in zip(space["attn"], maps, strict=True):
        torch.testing.assert_close(layer.weights(), expected, rtol=1e-4, atol=1e-6)
    for image in range(2):
        row = F.one_hot(torch.tensor(0), 17).float()
        expected = rollout_of([weights[image].mean(0).detach() for weights in maps], row)[1:]
        torch.testing.assert_close(
            space["rollout"][image].flatten(), expected, rtol=1e-4, atol=1e-6
        )
    last = model.mlp_head(model.transformer.norm(space["layers"][-1])[:, 0])
    torch.testing.assert_close(last, space["before"], rtol=1e-4, atol=1e-5)
    assert space["legrad"].shape == (2, 4, 4) and space["legrad"].any()
    with torch.no_grad():  # head 1 of the first block gives 16 of the 48 inputs of the output layer
        model.transformer.layers[0][0].to_out[0].weight[:, 16:32] = 0
        torch.testing.assert_close(model(space["batch"]), space["without_head"])
    assert not torch.allclose(space["without_head"], space["before"])


def test_monai(run):
    space = run("How do I open MONAI's ViT?")
    model = space["net"]
    for block in model.blocks:
        block.attn.use_flash_attention = False
        block.attn.save_attn = True
    with torch.no_grad():
        model(space["batch"])
    for block, layer in zip(model.blocks, space["attn"], strict=True):
        torch.testing.assert_close(layer.weights(), block.attn.att_mat, rtol=1e-4, atol=1e-6)
    row = F.one_hot(torch.tensor(0), 17).float()
    expected = rollout_of([block.attn.att_mat[0].mean(0) for block in model.blocks], row)[1:]
    torch.testing.assert_close(space["rollout"][0].flatten(), expected, rtol=1e-4, atol=1e-6)
    assert vitlens.positions.similarity(model).shape == (4, 4, 4, 4)
    for block in model.blocks:
        block.attn.use_flash_attention = True
        block.attn.save_attn = False
    with torch.no_grad():
        logits, _ = vitlens.stream.lens(model, space["batch"])
    torch.testing.assert_close(logits, space["before"], rtol=1e-4, atol=1e-5)


def by_hand(model, fixed):
    """(mean distance, rollout image) of a model on images, by stored maps of each layer and loops."""
    with torch.no_grad(), vitlens.capture(model.eval()) as attn:
        model(fixed)
    side = torch.arange(64)
    rows, columns = side // 8, side % 8
    apart = ((rows[:, None] - rows) ** 2 + (columns[:, None] - columns) ** 2).sqrt() * 8
    distances = [
        (layer.weights()[..., 1:, 1:] * apart).sum(-1).mean((0, 1, 2)).item() for layer in attn
    ]
    rollouts = []
    for image in range(len(fixed)):
        row = F.one_hot(torch.tensor(0), 65).float()
        rollouts.append(rollout_of([layer.weights()[image].mean(0) for layer in attn], row)[1:])
    rollout = torch.stack(rollouts).mean(0).view(8, 8)
    assert rollout.max() > 1.2 * rollout.min()
    return np.mean(distances), (rollout / rollout.max()).numpy()


def test_log_to_csv(run):
    space = run("In a plain loop, to a CSV")
    rows = pd.read_csv("attention.csv")
    assert rows.step.tolist() == [1, 3] and space["net"].training
    distance, rollout = by_hand(space["net"], space["fixed"])
    assert rows.mean_distance[1] == pytest.approx(distance, rel=1e-4)
    assert rows.mean_distance[0] != rows.mean_distance[1]
    picture = np.asarray(Image.open("rollout-3.png").convert("RGB")).astype(int)
    assert picture.shape == (64, 64, 3)
    colors = setup()["plt"].get_cmap()(np.kron(rollout, np.ones((8, 8))))[..., :3] * 255
    assert np.abs(picture - colors).max() < 3


def test_log_from_trainer(run):
    space = run("In Hugging Face's Trainer")
    rows = pd.read_csv("trainer.csv", names=["step", "distance"])
    assert rows.step.tolist() == [2, 4, 4]
    distance = vitlens.attention.mean_over(space["hf"], [space["fixed"]]).mean_distance.mean()
    assert rows.distance.iloc[-1] == pytest.approx(distance.item(), rel=1e-6)
    assert rows.distance[0] != rows.distance[1]


def events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder))
    board.Reload()
    return board


def logged_image(board) -> np.ndarray:
    """Levels (64, 64) of the last rollout of a TensorBoard log."""
    import io

    encoded = board.Images("attention/rollout")[-1].encoded_image_string
    return np.asarray(Image.open(io.BytesIO(encoded)).convert("L")).astype(int)


def test_log_to_tensorboard(run):
    space = run("To TensorBoard")
    board = events("board")
    distance, rollout = by_hand(space["net"], space["fixed"])
    (scalar,) = board.Scalars("attention/mean_distance")
    assert scalar.value == pytest.approx(distance, rel=1e-4)
    assert np.abs(logged_image(board) - np.kron(rollout, np.ones((8, 8))) * 255).max() < 2


def test_log_to_wandb(run):
    space = run("To Weights & Biases")
    distance, rollout = by_hand(space["net"], space["fixed"])
    (log,) = Path("wandb").glob("offline-run-*/*.wandb")
    content = log.read_bytes()
    logged = re.search(rb"attention/mean_distance\W{1,4}([0-9]+\.[0-9]+)", content)[1]
    assert float(logged) == pytest.approx(distance, rel=1e-4)
    (picture,) = Path("wandb").glob("offline-run-*/files/media/images/attention/*.png")
    levels = np.asarray(Image.open(picture).convert("L")).astype(int)
    assert np.abs(levels - np.kron(rollout, np.ones((8, 8))) * 255).max() < 2


def test_log_from_lightning(run):
    space = run("In Lightning")
    (folder,) = {path.parent for path in Path("lightning").rglob("events.*")}
    board = events(folder)
    distance, rollout = by_hand(space["trainer"].lightning_module.net, space["fixed"])
    scalars = board.Scalars("attention/mean_distance")
    assert len(scalars) == 2 and scalars[-1].value == pytest.approx(distance, rel=1e-4)
    assert np.abs(logged_image(board) - np.kron(rollout, np.ones((8, 8))) * 255).max() < 2


def test_concepts_of_a_sparse_autoencoder(run):
    space = run("Which concepts are in the tokens?")
    codes, flat, sae = space["codes"], space["flat"], space["sae"]
    assert ((codes > 0).sum(-1) <= 5).all() and (codes >= 0).all()
    reconstruction = codes @ sae.get_dictionary()
    error = (flat - reconstruction).pow(2).mean()
    assert error < 0.9 * (flat - flat.mean(0)).pow(2).mean()
    image, strongest = 2, int(space["strongest"])
    row, column = divmod(int(codes[image * 196 : (image + 1) * 196, strongest].argmax()), 14)
    concept = space["maps"][image]
    assert concept[row, column] == concept.max() and space["maps"].max() == codes.max()


def test_nearest_images(run):
    space = run("Which images look alike to the model?")
    model, images = space["model"], space["images"]
    with torch.no_grad():
        features = model.forward_features(images)[:, 0]
    torch.testing.assert_close(space["features"], features, rtol=1e-4, atol=1e-4)
    units = F.normalize(features.double(), dim=-1)
    order = (units @ units.T).argsort(descending=True)
    assert order[:, :3].tolist() == space["neighbors"].tolist()
    names = list(space["photos"])
    assert space["nearest"]["chelsea"] == [names[column] for column in order[1, 1:3]]


def test_quantus(run):
    space = run("How do I score a map with Quantus?")
    few, labels = space["few"], space["labels"]
    assert space["scores"].shape == (2,)
    patches = space["pixel_maps"][:, 0].reshape(2, 14, 16, 14, 16)
    firsts = np.broadcast_to(patches[:, :, :1, :, :1], patches.shape)
    np.testing.assert_array_equal(patches, firsts)
    assert space["falls"].shape == (2, 20)
    for image, label, values, falls in zip(
        few, labels, space["maps"].flatten(1), space["falls"], strict=True
    ):
        covered = image.clone().view(3, 14, 16, 14, 16)
        inputs = [image]
        for patch in values.argsort(descending=True)[:20].tolist():
            covered[:, patch // 14, :, patch % 14] = 0
            inputs.append(covered.reshape(3, 224, 224).clone())
        with torch.no_grad():
            probabilities = space["model"](torch.stack(inputs)).softmax(-1)[:, label]
        expected = probabilities[0] - probabilities[1:]
        np.testing.assert_allclose(falls, expected, rtol=1e-3, atol=1e-5)


def test_fiftyone(run):
    space = run("How do I look at maps in FiftyOne?")
    with torch.no_grad(), vitlens.capture(space["model"]) as attn:
        space["model"](space["images"])
    rollout = vitlens.attention.rollout(attn)
    assert len(space["samples"]) == 6
    for sample, expected in zip(space["samples"], rollout, strict=True):
        np.testing.assert_allclose(sample.rollout.map, expected, rtol=1e-6)
        assert sample.rollout.range == [0, pytest.approx(expected.max().item())]
        assert Image.open(sample.filepath).size == (224, 224)


def test_changed_heads(run):
    space = run("What did fine-tuning or LoRA change?")
    table, model, images = space["table"], space["model"], space["images"][:2]
    heads = [(layer, head) for layer in range(12) for head in range(3)]
    assert sorted(zip(table["layer"], table["head"], strict=True)) == heads
    assert table.moved.is_monotonic_decreasing and table.moved[0] > 0
    import copy

    import peft

    adapters = peft.LoraConfig(r=4, target_modules=["qkv"])
    tuned = peft.get_peft_model(copy.deepcopy(model), adapters).eval()
    assert (space["changed_heads"](model, tuned, images).moved == 0).all(), "LoRA begins at zero"
    torch.manual_seed(0)
    layer = tuned.base_model.model.blocks[7].attn.qkv
    planted = slice(64 * 1, 64 * 2)  # the queries of head 1
    with torch.no_grad():
        layer.lora_B["default"].weight[planted] = torch.randn(64, 4)
    changed = space["changed_heads"](model, tuned, images)
    assert (changed.layer[0], changed["head"][0]) == (7, 1)
    assert (changed.moved[changed.layer < 7] == 0).all()
    untouched = changed[(changed.layer == 7) & (changed["head"] != 1)]
    assert (untouched.moved == 0).all()
    with torch.no_grad(), vitlens.capture(model) as attn:
        model(images)
    before = attn[7].weights()[:, 1]
    with torch.no_grad(), vitlens.capture(tuned) as attn:
        tuned(images)
    kept = torch.minimum(before, attn[7].weights()[:, 1]).sum(-1)
    assert changed.moved[0] == pytest.approx(1 - kept.mean().item(), rel=1e-4)


def test_foreground_before_components(run):
    from sklearn.decomposition import PCA

    space = run("Why does my PCA not look like DINOv2's figure?")
    with torch.no_grad():
        patches = space["model"].forward_features(space["images"])[:, 1:].flatten(0, 1).numpy()
    first = PCA(1, svd_solver="full").fit_transform(patches)[:, 0].reshape(6, 14, 14)
    inner = first[:, 1:-1, 1:-1].sum()
    if first.sum() - inner > 0:
        first = -first
    foreground = space["foreground"].view(6, 14, 14).numpy()
    clear = np.abs(first) > 1e-3
    np.testing.assert_array_equal(foreground[clear], first[clear] > 0)
    scores = PCA(3, svd_solver="full").fit_transform(patches[foreground.flatten()])
    colors = space["colors"].view(-1, 3).numpy()
    assert (colors[~foreground.flatten()] == 0).all()
    stretched = (scores - scores.min(0)) / np.ptp(scores, axis=0)
    drawn = colors[foreground.flatten()]
    for component in range(3):
        expected = stretched[:, component]
        distance = min(
            np.abs(drawn[:, component] - value).max() for value in (expected, 1 - expected)
        )
        assert distance < 1e-3


def test_average_maps_of_classes(run):
    space = run("What is the average map of each class of my folder?")
    model, photos = space["model"], space["photos"]
    assert list(space["averages"]) == ["animals", "things"]
    rollouts = []
    for name in ("coffee", "rocket"):
        with torch.no_grad(), vitlens.capture(model) as attn:
            model(vitlens.preprocess(model, photos[name]))
        row = F.one_hot(torch.tensor(0), 197).float()
        maps = [layer.weights()[0].mean(0) for layer in attn]
        rollouts.append(rollout_of(maps, row)[1:].view(14, 14))
    average = space["averages"]["things"]
    expected = (rollouts[0] + rollouts[1]) / 2
    torch.testing.assert_close(average.rollout.float(), expected, rtol=1e-4, atol=1e-7)
    assert average.images == 2 and space["averages"]["animals"].images == 1
    assert [ax.get_title(loc="left") for ax in space["figure"].axes][:2] == ["animals", "things"]
    drawn = space["figure"].axes[1].images[0].get_array()
    np.testing.assert_allclose(drawn, expected, rtol=1e-4, atol=1e-7)


def test_figure_for_a_paper(run):
    run("How do I make a figure for a paper?")
    content = Path("distance.pdf").read_bytes()
    left, bottom, right, top = map(float, re.search(rb"/MediaBox \[([^\]]+)\]", content)[1].split())
    assert right - left == pytest.approx(3.3 * 72) and top - bottom == pytest.approx(2.2 * 72)
    assert b"/CIDFontType2" in content and b"/Type3" not in content
    drawing = Path("distance.svg").read_text()
    assert f'width="{3.3 * 72:g}pt"' in drawing
    assert re.search(r"<text[^>]*>[^<]*ayer", drawing), "text stays text"
