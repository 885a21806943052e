"""Input of models: modules that change images, image processors of any settings, and image sources of any kind."""

import collections
import json
import os

import numpy as np
import pandas as pd
import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from forms import form
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from torchvision.transforms import v2

import vitlens
from vitlens import report
from vitlens.attribution import like, occlusion
from vitlens.images import ImageError, named_sources, rgb
from vitlens.models import crop_box, data_config, pixels, preprocess, restore
from vitlens.recorder.supported.card import write_card
from vitlens_explorer import in_page

SIDE = 32
MEAN = torch.tensor((0.485, 0.456, 0.406)).view(3, 1, 1)
STD = torch.tensor((0.229, 0.224, 0.225)).view(3, 1, 1)


def timm_vit(**options):
    torch.manual_seed(0)
    model = timm.models.VisionTransformer(
        img_size=SIDE, patch_size=8, embed_dim=24, depth=1, num_heads=3, num_classes=5, **options
    )
    channels = options.get("in_chans", 3)
    model.pretrained_cfg = {
        "input_size": (channels, SIDE, SIDE),
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "crop_pct": 1.0,
        "interpolation": "bilinear",
    }
    return model.eval()


def photograph(mode="RGB", size=(50, 40)):
    generator = np.random.default_rng(0)
    width, height = size
    image = Image.fromarray(generator.integers(0, 256, (height, width, 4), dtype=np.uint8), "RGBA")
    return image.convert(mode)


def normalized(x):
    return (x - MEAN) / STD


class Wrapper(nn.Module):
    """Changes images, and runs the Vision Transformer on them, by its features or as a whole."""

    def __init__(self, model, change, by_features=False):
        super().__init__()
        self.net = model
        self.change = change
        self.by_features = by_features

    def forward(self, x):
        x = self.change(x)
        if self.by_features:
            return self.net.forward_head(self.net.forward_features(x))
        return self.net(x)


class Buffers(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.register_buffer("mean", MEAN.clone())
        self.register_buffer("std", STD.clone())
        self.backbone = model

    def forward(self, pixel_values):
        return self.backbone((pixel_values - self.mean) / self.std)


def checked(x):
    assert x.min() >= 0 and x.max() <= 1
    return normalized(x)


def scaled_if_bytes(x):
    return normalized(x / 255 if x.max() > 1 else x)


SELF_NORMALIZING = {
    "Sequential(Normalize, model)": lambda m: nn.Sequential(
        v2.Normalize(MEAN.flatten().tolist(), STD.flatten().tolist()), m
    ),
    "buffers": Buffers,
    "forward_features": lambda m: Wrapper(m, normalized, by_features=True),
    "clamped": lambda m: Wrapper(m, lambda x: normalized(x.clamp(0, 1))),
    "checked range": lambda m: Wrapper(m, checked),
    "0 … 255": lambda m: Wrapper(m, lambda x: normalized(x / 255)),
    "either range": lambda m: Wrapper(m, scaled_if_bytes),
    "−1 … 1": lambda m: Wrapper(m, lambda x: normalized((x + 1) / 2)),
    "resized": lambda m: Wrapper(m, lambda x: normalized(F.interpolate(x, (SIDE, SIDE)))),
    "compiled": lambda m: torch.compile(Wrapper(m, normalized), backend="eager"),
    "compiled inside": lambda m: Wrapper(torch.compile(m, backend="eager"), normalized),
    "DataParallel": lambda m: nn.DataParallel(Wrapper(m, normalized)),
    "two modules": lambda m: Wrapper(Wrapper(m, lambda x: x - MEAN / STD), lambda x: x / STD),
}


@form(
    6,
    door="Python: preprocess, a module around a model",
    case="the module normalizes, in 13 ways",
    right="logits of the model on its own preprocessing",
)
@pytest.mark.parametrize("name", list(SELF_NORMALIZING))
@pytest.mark.filterwarnings("ignore")
def test_preprocess_gives_a_module_the_images_that_it_normalizes(name):
    model = timm_vit()
    wrapper = SELF_NORMALIZING[name](model)
    image = photograph()
    notes = []
    batch = preprocess(wrapper, image, on_note=notes.append)
    own = preprocess(model, image)
    with torch.no_grad():
        torch.testing.assert_close(wrapper(batch), model(own), rtol=1e-4, atol=1e-5)
    assert "normalizes images itself" in notes[0]
    np.testing.assert_array_equal(restore(wrapper, batch), restore(model, own))
    assert torch.equal(pixels(wrapper)(image), pixels(model)(image))
    assert crop_box(wrapper, image) == pytest.approx(crop_box(model, image), abs=0.1)


CHANGES = {
    "twice": (lambda x: x * 2 - 1, "it changes them"),
    "divided": (lambda x: x / 255, "it changes them"),
    "BGR": (lambda x: x.flip(1), "reverses the order of the channels"),
    "BGR, normalized": (lambda x: normalized(x.flip(1)), "reverses the order of the channels"),
    "standardized": (lambda x: (x - x.mean()) / x.std(), "it changes them"),
    "gray": (lambda x: x.mean(1, keepdim=True).expand(-1, 3, -1, -1), "it changes them"),
    "error": (lambda x: x.pixel_values, "cannot be run on a test image"),
}


@form(
    6,
    door="Python: preprocess, a module that changes colors",
    case="x·2 − 1, x/255, BGR, per-image statistics, gray, an error",
    right="refused with the declaration",
)
@pytest.mark.parametrize("name", list(CHANGES))
def test_preprocess_refuses_a_module_that_changes_images(name):
    change, words = CHANGES[name]
    wrapper = Wrapper(timm_vit(), change)
    with pytest.raises(ValueError, match=words) as caught:
        preprocess(wrapper, photograph())
    assert 'model.pretrained_cfg = {"input_size": (3, 32, 32), "mean": (0, 0, 0)' in str(
        caught.value
    )
    wrapper.pretrained_cfg = {"input_size": (3, SIDE, SIDE), "mean": (0,) * 3, "std": (1,) * 3}
    batch = preprocess(wrapper, photograph())
    assert batch.min() >= 0 and batch.max() <= 1


@form(
    6,
    door="Python: preprocess, a forward pre-hook on a known model",
    case="the hook normalizes",
    right="logits of the model without the hook",
)
def test_preprocess_sees_a_hook_that_normalizes():
    model = timm_vit()
    image = photograph()
    with torch.no_grad():
        right = model(preprocess(model, image))
        model.register_forward_pre_hook(lambda module, args: (normalized(args[0]),))
        torch.testing.assert_close(model(preprocess(model, image)), right, rtol=1e-4, atol=1e-5)


@form(
    6,
    door="Python: preprocess, a module that flips or pads",
    case="colors unchanged, pixels moved",
    right="the same batch, and a note",
)
def test_preprocess_notes_a_module_that_moves_pixels():
    model = timm_vit()
    notes = []
    batch = preprocess(Wrapper(model, lambda x: x.flip(-1)), photograph(), on_note=notes.append)
    assert torch.equal(batch, preprocess(model, photograph()))
    assert "moves, crops or resizes images" in notes[0]


@form(
    6,
    door="Python: preprocess, modules with no or two Vision Transformers",
    case="an own module, and teacher and student",
    right="refused",
)
def test_preprocess_refuses_modules_without_a_declared_input():
    pair = nn.ModuleDict({"teacher": timm_vit(), "student": timm_vit()})
    for model, words in (
        (pair, r"2 Vision Transformers \(teacher, student\)"),
        (nn.Conv2d(3, 4, 3), "no input"),
    ):
        with pytest.raises(ValueError, match=words):
            preprocess(model, photograph())


def test_preprocess_leaves_a_module_and_the_random_state_unchanged():
    class Counting(Wrapper):
        def forward(self, x):
            x = F.dropout(x, 0.5, self.training)
            return super().forward(x)

    wrapper = Counting(timm_vit(), normalized).train()
    before = torch.get_rng_state()
    preprocess(wrapper, photograph())
    assert wrapper.training and wrapper.net.training
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(module._forward_pre_hooks for module in wrapper.modules())


@form(
    6,
    door="Python: preprocess inside a capture",
    case="a module that normalizes",
    right="the maps of the model itself",
)
def test_preprocess_inside_a_capture_is_not_its_forward():
    model = timm_vit()
    wrapper = Wrapper(model, normalized)
    with torch.no_grad(), vitlens.capture(model) as right:
        model(preprocess(model, photograph()))
    with torch.no_grad(), vitlens.capture(wrapper) as attn:
        wrapper(preprocess(wrapper, photograph()))
    torch.testing.assert_close(attn[0].weights(), right[0].weights(), rtol=1e-4, atol=1e-6)


def open_transformers(folder, processor, **config):
    """A ViT of transformers in a folder, with an image processor."""
    transformers = pytest.importorskip("transformers")
    settings = dict(
        hidden_size=24,
        num_hidden_layers=1,
        num_attention_heads=3,
        intermediate_size=24,
        image_size=SIDE,
        patch_size=8,
    )
    torch.manual_seed(0)
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**settings, **config))
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return vitlens.load_model(folder)


def sources():
    deep = np.random.default_rng(1).integers(0, 65536, (40, 50)).astype(np.uint16)
    return {
        "gray": photograph("L"),
        "RGBA": photograph("RGBA"),
        "palette": photograph().quantize(16),
        "16 bits": Image.fromarray(deep),
        "tiny": photograph(size=(3, 2)),
    }


PROCESSORS = {
    "one channel": (1, dict(image_mean=[0.5], image_std=[0.5])),
    "one channel, not normalized": (1, dict(do_normalize=False)),
    "not rescaled": (3, dict(do_rescale=False)),
    "not normalized": (3, dict(do_normalize=False)),
    "one mean": (3, dict(image_mean=[0.4], image_std=[0.2])),
    "nearest": (3, dict(resample=0)),
    "Lanczos": (3, dict(resample=1)),
}


@form(
    6,
    door="folder of transformers",
    case="one channel, do_rescale, do_normalize, one mean, resample 0 and 1",
    right="transformers' own processor, to 0.0",
)
@pytest.mark.parametrize("name", list(PROCESSORS))
@pytest.mark.parametrize("source", list(sources()))
def test_preprocess_equals_the_processor_of_transformers(name, source, tmp_path):
    transformers = pytest.importorskip("transformers")
    channels, settings = PROCESSORS[name]
    size = {"height": SIDE, "width": SIDE}
    processor = transformers.ViTImageProcessor(size=size, **settings)
    model = open_transformers(tmp_path, processor, num_channels=channels)
    image = sources()[source]
    batch = preprocess(model, image)
    given = rgb(image).convert("L" if channels == 1 else "RGB")
    assert torch.equal(batch, processor(images=given, return_tensors="pt")["pixel_values"])
    model(batch)
    assert restore(model, batch).shape == (1, SIDE, SIDE, 3)


@form(
    6,
    door="folder of transformers, processor that does not fit",
    case="one channel with three means, CLIP's processor in RGB for one channel, four means",
    right="refused",
)
@pytest.mark.parametrize("case", ["three means", "RGB", "four means"])
def test_load_model_refuses_a_processor_with_other_channels(case, tmp_path):
    transformers = pytest.importorskip("transformers")
    size = {"height": SIDE, "width": SIDE}
    means = dict(image_mean=[0.5] * 3, image_std=[0.5] * 3)
    channels = 1
    processor = transformers.ViTImageProcessor(size=size, **means)
    if case == "RGB":
        processor = transformers.CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size=SIDE)
    if case == "four means":
        channels = 3
        processor = transformers.ViTImageProcessor(
            size=size, image_mean=[0.5] * 4, image_std=[0.5] * 4
        )
    with pytest.raises(ValueError, match="The image processor of .* cannot be used"):
        open_transformers(tmp_path, processor, num_channels=channels)


@form(
    6,
    door="folder of transformers, processor that keeps the shape",
    case="do_resize=False, do_center_crop=False",
    right="transformers' own processor for one image, and the size that was asked for",
)
@pytest.mark.parametrize("kind", ["ViT", "CLIP"])
def test_preprocess_keeps_the_shape_that_the_processor_keeps(kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    processor = transformers.ViTImageProcessor(do_resize=False)
    if kind == "CLIP":
        processor = transformers.CLIPImageProcessor(
            size={"shortest_edge": SIDE}, do_center_crop=False
        )
    model = open_transformers(tmp_path, processor)
    image = photograph()
    notes = []
    batch = preprocess(model, image, on_note=notes.append)
    assert torch.equal(batch, processor(images=image, return_tensors="pt")["pixel_values"])
    assert any("does not resize images to one size" in note for note in notes)
    several = [image, photograph(size=(64, 200))]
    with pytest.raises(ImageError, match="several sizes"):
        preprocess(model, several)
    assert preprocess(model, several, size=(SIDE, SIDE)).shape == (2, 3, SIDE, SIDE)
    assert vitlens.models.built_size(model) == (SIDE, SIDE)


@form(
    6,
    door="Python: timm, in_chans=1 and 4",
    case="gray input, and four channels",
    right="gray levels by hand, and a sentence",
)
def test_preprocess_of_timm_models_with_other_channels():
    batch = preprocess(timm_vit(in_chans=1), Image.new("RGB", (SIDE, SIDE), (51, 51, 51)))
    expected = (0.2 - MEAN.mean()) / STD.mean()
    torch.testing.assert_close(batch, expected.expand(1, 1, SIDE, SIDE))
    with pytest.raises(ImageError, match="1 or 3 input channels, got one with 4"):
        preprocess(timm_vit(in_chans=4), photograph())


@form(
    6,
    door="Python: preprocess, a model in half precision",
    case="bfloat16 and float16",
    right="the model's forward",
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_preprocess_returns_the_dtype_of_the_model(dtype):
    model = timm_vit().to(dtype)
    batch = preprocess(model, photograph())
    assert batch.dtype == dtype
    with torch.no_grad():
        assert model(batch).shape == (1, 5)
    wrapper = Wrapper(model, lambda x: normalized(x).to(dtype))
    assert preprocess(wrapper, photograph()).min() >= 0


def test_data_config_of_a_module_is_that_of_its_images():
    config = data_config(Wrapper(timm_vit(), normalized))
    assert config["mean"] == (0, 0, 0) and config["std"] == (1, 1, 1)
    assert config["interpolation"] == "bilinear"


@pytest.fixture
def photographs(tmp_path):
    """Paths of three photographs, with a different level each, not in the order of their names."""
    paths = []
    for name, level in (("b.png", 60), ("a.png", 120), ("c.png", 180)):
        Image.new("RGB", (40, 40), (level, level, level)).save(tmp_path / name)
        paths.append(tmp_path / name)
    return paths


COLLECTIONS = {
    "list": list,
    "tuple": tuple,
    "generator": lambda paths: (path for path in paths),
    "iterator of str": lambda paths: iter([str(path) for path in paths]),
    "NumPy array of str": lambda paths: np.array([str(path) for path in paths]),
    "NumPy array of objects": lambda paths: np.array(paths, dtype=object),
    "Series": lambda paths: pd.Series([str(path) for path in paths], index=[7, 3, 5]),
    "deque": collections.deque,
    "dict": lambda paths: {path.stem: path for path in paths},
    "dict values": lambda paths: {path.stem: path for path in paths}.values(),
    "pairs": lambda paths: [(path.stem, path) for path in paths],
    "bytes of paths": lambda paths: [os.fsencode(path) for path in paths],
    "bytes of files": lambda paths: [path.read_bytes() for path in paths],
    "open files": lambda paths: [path.open("rb") for path in paths],
}


@form(
    8,
    door="Python: preprocess, several images",
    case="14 kinds of collections of three paths",
    right="levels by hand, in the order given",
)
@pytest.mark.parametrize("kind", list(COLLECTIONS))
@pytest.mark.filterwarnings("ignore:unclosed file")
def test_preprocess_reads_collections_in_order(kind, photographs):
    model = timm_vit()
    batch = preprocess(model, COLLECTIONS[kind](photographs))
    levels = restore(model, batch)[:, 0, 0, 0].tolist()
    assert levels == [60, 120, 180]


@form(
    8,
    door="Python: preprocess and report.inspect, a set or a table",
    case="a set, a frozenset, a DataFrame",
    right="refused",
)
@pytest.mark.parametrize("kind", [set, frozenset, lambda paths: pd.DataFrame({"path": paths})])
def test_collections_without_an_order_are_refused(kind, photographs):
    model = timm_vit()
    for read in (preprocess, report.inspect):
        with pytest.raises(ImageError, match="no order|several columns"):
            read(model, kind(photographs))


@form(
    8,
    door="Python: load_image, a collection",
    case="a list, a set, a Series, a generator, a number",
    right="a sentence with what it is",
)
def test_load_image_names_a_collection(photographs):
    for several in (photographs, set(photographs), pd.Series(photographs), iter(photographs)):
        with pytest.raises(ImageError, match="several images or none.*`preprocess`"):
            vitlens.load_image(several)
    for other in (3, None, object()):
        with pytest.raises(ImageError, match="is not an image"):
            vitlens.load_image(other)
    assert vitlens.load_image(os.fsencode(photographs[1])).getpixel((0, 0)) == (120, 120, 120)


@form(
    8,
    door="Python: report.inspect and its writers",
    case="a list of paths, a str as the folder",
    right="names of the files",
)
def test_inspect_takes_paths_and_writes_to_a_str(photographs, tmp_path):
    inspection = report.inspect(timm_vit(), photographs)
    assert [picture.name for picture in inspection.pictures] == ["b.png", "a.png", "c.png"]
    paths = report.write_inspection(inspection, str(tmp_path / "figures"))
    assert paths[0] == tmp_path / "figures" / "summary.json" and paths[0].is_file()


@form(
    8,
    door="Python: save_page, several images",
    case="a list of paths, two of one name",
    right="a name for each file",
)
def test_named_sources_names_files_of_one_name(photographs, tmp_path):
    other = tmp_path / "other" / "a.png"
    other.parent.mkdir()
    photographs[1].rename(other)
    twice = tmp_path / "a.png"
    Image.new("RGB", (8, 8)).save(twice)
    named = list(named_sources([twice, other, photographs[0], photograph(), other]))
    names = [name for name, _ in named]
    assert names == ["a.png", str(other), "b.png", "image 4", f"{other} (5)"]
    by_name = in_page._photographs([twice, other])
    sizes = {name: photo.image.size for name, photo in by_name.items()}
    assert sizes == {"a.png": (8, 8), str(other): vitlens.load_image(other).size}


@form(
    8,
    door="Python: attribution.like",
    case="a generator of paths",
    right="the same target by a list",
)
def test_like_takes_a_generator(photographs):
    model = timm_vit()
    x = preprocess(model, photographs[:1])
    by_list = occlusion(model, x, like(photographs[1:]))
    by_generator = occlusion(model, x, like(path for path in photographs[1:]))
    assert torch.equal(by_list, by_generator)


@form(
    6,
    door="folder of open_clip",
    case="preprocess_cfg with squash and an own mean",
    right="open_clip's own transform, to 0.0",
)
@pytest.mark.parametrize("source", list(sources()))
def test_preprocess_equals_the_transform_of_an_open_clip_folder(source, tmp_path):
    open_clip = pytest.importorskip("open_clip")
    vision = dict(layers=1, width=32, head_width=16, image_size=SIDE, patch_size=8)
    words = dict(context_length=8, vocab_size=49408, width=32, heads=2, layers=1)
    cfg = dict(embed_dim=24, vision_cfg=vision, text_cfg=words)
    own = dict(mean=[0.1, 0.2, 0.3], std=[0.4, 0.5, 0.6], interpolation="bilinear")
    own["resize_mode"] = "squash"
    model = open_clip.model.CLIP(24, vision, words)
    config = json.dumps({"model_cfg": cfg, "preprocess_cfg": own})
    (tmp_path / "open_clip_config.json").write_text(config)
    save_file(model.state_dict(), tmp_path / "open_clip_model.safetensors")
    opened = vitlens.load_model(f"open_clip:local-dir:{tmp_path}")
    image = sources()[source]
    _, transform = open_clip.create_model_from_pretrained(f"local-dir:{tmp_path}")
    assert torch.equal(preprocess(opened, image)[0], transform(rgb(image)))


@form(
    6,
    door="torchvision: weights' transforms",
    case="a ViT with the transforms of its weights",
    right="torchvision's transforms, to 0.0",
)
@pytest.mark.parametrize("source", list(sources()))
def test_preprocess_equals_the_transforms_of_torchvision(source):
    transform = torchvision.models.ViT_B_32_Weights.DEFAULT.transforms()
    model = torchvision.models.VisionTransformer(224, 32, 1, 3, 24, 24)
    write_card(model, transform=transform)
    image = sources()[source]
    assert torch.equal(preprocess(model, image)[0], transform(rgb(image)))
