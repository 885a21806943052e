"""Open models, name their classes, turn logits into scores, and prepare images for them.

A model is the name of a timm model, a name in another library ("hf:facebook/dinov2-small"), or a local folder in timm's
or transformers' layout. Pickled code is never run. The library of a model prepares its images, and `restore` inverts
its normalization.

Shapes: B batch, C channels, H height and W width in pixels.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import logging
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import timm
import torch
from PIL import Image
from timm.data import create_transform
from torch import Tensor, nn

from vitlens.images import MAX_ELONGATION, ImageError, ModelInput, image_files, load_image
from vitlens.names import reject, require_known, suggestion
from vitlens.plugins import load_plugins
from vitlens.recorder import supported
from vitlens.recorder.forward import run as run
from vitlens.recorder.supported import channels, family, model_name, unwrap, within
from vitlens.recorder.supported import title as title

__all__ = [
    "OUTPUTS",
    "built_size",
    "class_count",
    "crop_box",
    "data_config",
    "guessed",
    "label_names",
    "load_model",
    "output_kind",
    "pixels",
    "preprocess",
    "restore",
    "run",
    "scores",
    "title",
    "top_classes",
]
__dir__ = __all__.copy

SPECIMEN = Path(__file__).parent.parent / "data" / "checkpoints" / "vit_tiny_patch16_224"
"""Folder of the bundled model, in a clone of the project."""

OUTPUTS = ("classes", "independent", "value")
"""Meanings of a model's outputs: classes that compete (softmax), independent labels (sigmoid), or plain values."""

_PREPROCESSING = ("input_size", "interpolation", "crop_pct", "mean", "std")
_PROBLEMS = {"multi_label_classification": "independent", "regression": "value"}
_KERNELS = (
    r"((patch_embed|embeds|patchifier|vision_embed)\.proj|visual\.conv1)\.weight$|embedding/kernel$"
)


def load_model(
    name_or_path: str | os.PathLike | None = None,
    *,
    pretrained: bool = True,
    checkpoint: str | os.PathLike | None = None,
    outputs: str | None = None,
    **kwargs,
) -> nn.Module:
    """A model in eval mode, by default the bundled one.

    name_or_path: a timm name such as "vit_tiny_patch16_224" (weights come from timm's hub, unless `pretrained=False`),
    a folder with `config.json` and `model.safetensors` in timm's or transformers' layout, or a name in another library:
    "hf:facebook/dinov2-small", "open_clip:ViT-B-32/openai" (architecture/weights), "torchvision:vit_b_16".
    checkpoint: a file with the weights of a timm or open_clip model, as training programs and authors publish them
    (.pth, .safetensors, Google's .npz). Averaged (EMA) weights are preferred, and the choice is printed.
    outputs: one of `OUTPUTS`, if the model does not state it. kwargs: arguments of the model's constructor
    (`dynamic_img_size=True`, `img_size=…`).

    Raises ValueError for an unknown name, a folder that is not a model, or weights that do not fit, and ConnectionError
    if weights cannot be downloaded.

    >>> vitlens.load_model("vit_small_patch16_224", pretrained=False, img_size=64)(torch.zeros(1, 3, 64, 64)).shape
    torch.Size([1, 1000])
    """
    if name_or_path is None and not SPECIMEN.is_dir():
        raise ValueError(
            "The bundled model is in the data folder of a clone, which this installation lacks. Name a "
            "model, such as vit_tiny_patch16_224."
        )
    name = str(SPECIMEN if name_or_path is None else name_or_path).removeprefix("local-dir:")
    is_file = Path(name).name in (
        "config.json",
        "model.safetensors",
        "model.safetensors.index.json",
    )
    folder = Path(name).parent if is_file else Path(name)
    library, _, rest = name.partition(":")
    try:
        if library == "open_clip":
            model = _open_clip(rest, pretrained, checkpoint, **kwargs)
        elif checkpoint is not None:
            model = _fill(
                load_model(name_or_path, pretrained=False, **kwargs), Path(checkpoint), kwargs
            )
        elif library == "hf" or folder.is_dir() and _is_transformers(folder):
            model = _transformers(rest if library == "hf" else str(folder), pretrained, **kwargs)
        elif library == "torchvision":
            model = _torchvision(rest, pretrained, **kwargs)
        elif name and folder.is_dir():
            model = _folder(folder, pretrained, **kwargs)
        else:
            model = _timm(name, pretrained, **kwargs)
    except (ValueError, ModuleNotFoundError):
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:400].rstrip(".!")
        kind = ConnectionError if not Path(name).exists() and _is_hub_error(error) else ValueError
        advice = " Check the network, or open a folder" if kind is ConnectionError else ""
        raise kind(f"{name} cannot be opened ({type(error).__name__}: {text}).{advice}") from error
    if (kind := outputs or getattr(model, "outputs", None)) is not None:
        require_known(kind, OUTPUTS, f"outputs of {name}")
        model.outputs = kind
    model.opened_as = short(str(folder) if folder.is_dir() else name)
    if checkpoint is not None:
        model.opened_as += f", {Path(checkpoint).name}"
    return model.eval()


def short(name: str) -> str:
    """The last part of a path, or RUN/model for the model of a run, so that results contain no local paths.

    >>> vitlens.models.short("vit_tiny_patch16_224"), vitlens.models.short("/home/me/runs/digits/model")
    ('vit_tiny_patch16_224', 'digits/model')
    """
    if not name or not (
        Path(name).exists() or Path(name).is_absolute()
    ):  # Path("") is the current folder
        return name
    path = Path(name).resolve()
    return f"{path.parent.name}/model" if path.name == "model" else path.name


def _is_hub_error(error: BaseException | None) -> bool:
    """True if an error, or its cause, comes from downloading weights."""
    libraries = ("huggingface_hub", "requests", "httpx", "urllib", "urllib3", "httpcore")
    while error is not None:
        if isinstance(error, ConnectionError) or type(error).__module__.split(".")[0] in libraries:
            return True
        error = error.__cause__ or error.__context__
    return False


def _report(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


def _timm(name: str, pretrained: bool, **kwargs) -> nn.Module:
    if (
        os.sep in name
        or name.startswith((".", "hf-hub:", "hf_hub:"))
        or not timm.is_model(name.split(".")[0])
    ):
        from torchvision.models import list_models

        if Path(name).is_file():
            known = stem if timm.is_model(stem := Path(name).stem) else "vit_tiny_patch16_224"
            raise ValueError(
                f"{name} is a file, not a model. Weights need the name of their model, too: {known} with "
                f"checkpoint={name} (on the command line --checkpoint)."
            )
        owner, _, rest = name.removeprefix("hf-hub:").removeprefix("hf_hub:").partition("/")
        if name in list_models():
            hint = f" Did you mean torchvision:{name}?"
        elif owner == "timm" and timm.is_model(rest.split(".")[0]):
            hint = f" Did you mean {rest}?"
        elif re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", f"{owner}/{rest}"):
            hint = (
                f" Did you mean {'open_clip' if owner.startswith('ViT-') else 'hf'}:{owner}/{rest}?"
            )
        else:
            hint = "" if os.sep in name else suggestion(name, sorted(timm.list_models(), key=len))
        raise ValueError(
            f"{name!r} matches no file or folder, and timm {timm.__version__} has no model of that name."
            f"{hint}"
        )
    model = timm.create_model(name, pretrained=pretrained, **kwargs)
    if pretrained and "patch_size" in kwargs:
        with torch.device("meta"):
            plain = timm.create_model(
                name, **{k: v for k, v in kwargs.items() if k not in ("patch_size", "img_size")}
            )
        _require_patches({key: value.shape for key, value in plain.named_parameters()}, model, name)
    return model


def _folder(folder: Path, pretrained: bool, **kwargs) -> nn.Module:
    """A model in timm's hub layout."""
    config_file, weights_file = folder / "config.json", folder / "model.safetensors"
    adapter = folder / "adapter_config.json"
    if adapter.is_file() and not config_file.is_file():
        base = json.loads(adapter.read_text(encoding="utf-8")).get("base_model_name_or_path")
        raise ValueError(
            f"{folder} holds a LoRA adapter of {base}, not a model. Open {base} with its library and "
            "peft, call merge_and_unload(), and save the result."
        )
    if (folder / "recipe.json").is_file() and not config_file.is_file():
        found = (folder / "model" / "config.json").is_file()
        raise ValueError(
            f"{folder} is the folder of a training run. "
            + (
                f"Its model is {folder / 'model'}."
                if found
                else f"It has no model yet: `vitlens train --resume --out {folder}` continues the run, and "
                "--export writes the model of a stopped one."
            )
        )
    if absent := [file.name for file in (config_file, weights_file) if not file.is_file()]:
        raise ValueError(
            f"The folder {folder} has no {absent[0]}. A model folder holds config.json and "
            "model.safetensors. A file of weights alone goes to checkpoint= (--checkpoint), with the name "
            "of its model."
        )
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
        settings, architecture = config.get("pretrained_cfg") or config, str(config["architecture"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{config_file} is not a model's configuration ({type(error).__name__}: {error})."
        ) from error
    if script := config.get("built_by"):
        raise ValueError(
            f"{folder} holds a model built by {script}. Build it there, then load model.safetensors."
        )
    if not timm.is_model(architecture):
        load_plugins("models")
    if timm.models.parse_model_name(f"local-dir:{folder}")[1] != str(
        folder
    ):  # before 1.0.30 it reads an address
        raise ValueError(
            f"timm {timm.__version__} opens no folder with # or ? in its path, as in {folder}. Rename it."
        )
    # Named, because timm before 1.0.29 may take other weights in the folder for the model's, pickled ones too.
    overlay = kwargs.pop("pretrained_cfg_overlay", {})
    overlay |= {"source": "", "file": str(weights_file), "custom_load": False}
    missing = [key for key in _PREPROCESSING if settings.get(key) is None]
    default = (
        timm.get_pretrained_cfg(architecture, allow_unregistered=True)
        or timm.models.PretrainedCfg()
    )
    overlay |= {key: getattr(default, key) for key in missing}
    if "input_size" in missing:
        overlay["fixed_input_size"] = default.fixed_input_size
    model = timm.create_model(
        f"local-dir:{folder}", pretrained, pretrained_cfg_overlay=overlay, **kwargs
    )
    if pretrained:
        from safetensors import safe_open

        with safe_open(weights_file, "pt") as file:
            names = file.keys()
            shapes = {name: file.get_slice(name).get_shape() for name in names}
            _require_patches(shapes, model, weights_file)
    if missing:
        if "input_size" in missing and (size := family(model).built_size):
            model.pretrained_cfg["input_size"] = (channels(model), *size)
        model.guessed_preprocessing = (
            f"{config_file} has no {', '.join(missing)}; those of timm's {architecture} are used."
        )
        _report(model.guessed_preprocessing)
    names = config.get("label_names") or settings.get("label_names")
    if isinstance(names, dict) and set(names) == {
        str(i) for i in range(len(names))
    }:  # {"0": "tench", …}
        names = [names[str(i)] for i in range(len(names))]
    if names and (
        "num_classes" not in kwargs or len(names) == model.num_classes
    ):  # not those of another head
        if not isinstance(names, list) or len(names) != model.num_classes:
            raise ValueError(
                f"label_names in {config_file} must be a list of {model.num_classes} names."
            )
        model.label_names = [str(name) for name in names]
    model.outputs = config.get("outputs")
    return model


def _fill(model: nn.Module, file: Path, kwargs: dict) -> nn.Module:
    """A timm model with the weights in a file, which must be complete."""
    if not file.is_file():
        raise ValueError(f"Found no checkpoint {file}.")
    if file.suffix == ".npz":
        return _fill_from_google(model, file, kwargs)
    with torch.serialization.safe_globals([argparse.Namespace]):
        try:
            state = timm.models.load_state_dict(str(file), use_ema=True, weights_only=True)
        except Exception as error:
            reason = f"{type(error).__name__}: it is damaged, or holds pickled code"
            raise ValueError(
                f"{file} cannot be read ({reason}). Save the model's state_dict()."
            ) from error
        inside = state.keys()
        with suppress(Exception):  # names only: the weights are read above
            inside = torch.load(file, map_location="cpu", weights_only=True, mmap=True).keys()
    taken = [
        name for name in ("state_dict_ema", "model_ema", "state_dict", "model") if name in inside
    ][:1]
    if isinstance(state.get("teacher"), dict):  # DINO saves a student and its average, the teacher
        state, taken = state["teacher"], ["teacher"]
    convert = next(
        (
            f
            for kind in type(model).__mro__
            if (f := getattr(sys.modules.get(kind.__module__), "checkpoint_filter_fn", None))
        ),
        lambda weights, _: weights,
    )
    heads = tuple(
        f"{name}." for name in np.atleast_1d(model.pretrained_cfg.get("classifier") or "head")
    )
    _require_patches(
        {name: value.shape for name, value in state.items() if hasattr(value, "shape")}, model, file
    )
    last = next((name for name in reversed(model.state_dict()) if "blocks." in name), "")
    prefixes = {name.removesuffix(last) for name in state if name.endswith(f".{last}")}
    prefix = next((p for p in prefixes if "teacher." in p), min(prefixes, default=""))
    part = {
        name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
    }
    beside = (
        [n for n in state if not n.startswith(tuple(prefixes)) and not _is_head(n)]
        if prefix
        else []
    )
    names = ", ".join(sorted({name.split(".")[0] for name in inside})[:12])
    holds = f"{file} does not hold the weights of {model_name(model)}: it holds {names}"
    try:
        weights = convert(part, model)
        count = len(weights.get(f"{heads[0]}weight", ()))
        holds += f", and its head has {count} classes" if count else ", and no head"
        model = _with_head(model, count, kwargs, file)
        missing, unexpected = model.load_state_dict(weights, strict=False)
    except (RuntimeError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{holds}. {' '.join(str(error).split())[:300]}") from error
    if wrong := [*missing, *(name for name in unexpected if not _is_head(name)), *beside]:
        raise ValueError(f"{holds}. {len(wrong)} names do not fit, such as {wrong[0]}.")
    taken += [f"without the prefix {prefix}"] if prefix else []
    _report(
        f"Took {', '.join(taken) or 'the weights'} of {file}; "
        f"{f'its head has {count} classes' if count else 'it has no head'}."
    )
    return model


def _fill_from_google(model: nn.Module, file: Path, kwargs: dict) -> nn.Module:
    """A timm model with the weights of the paper's authors, in NumPy arrays."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            shapes = {name: arrays[name].shape for name in arrays.files}
        _require_patches(shapes, model, file)
        blocks = {match[1] for name in shapes if (match := re.search(r"encoderblock_(\d+)/", name))}
        stacked = [
            shape[0]
            for name, shape in shapes.items()
            if name.endswith("encoderblock/LayerNorm_0/scale")
        ]
        depth = len(blocks) or max(stacked, default=0)
        if depth != len(model.blocks):
            raise ValueError(f"it has {depth} layers, and the model has {len(model.blocks)}")
        count = next(
            (shape[0] for name, shape in shapes.items() if re.search(r"(^|/)head/bias$", name)), 0
        )
        if any("pre_logits" in name for name in shapes):
            count = 0  # timm drops this layer, whose output the head reads
        model = _with_head(model, count, kwargs, file)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(torch.nan)  # timm copies the arrays of the file and skips others
        model.load_pretrained(str(file))
        if missing := [
            name for name, parameter in model.named_parameters() if parameter.isnan().any()
        ]:
            raise ValueError(f"it lacks {', '.join(missing[:3])}")
    except Exception as error:
        raise ValueError(
            f"{file} does not hold the weights of {model_name(model)}: {error}."
        ) from error
    _report(
        f"Took the weights of {file}; {f'its head has {count} classes' if count else 'without a head'}."
    )
    return model


def _is_head(name: str) -> bool:
    return re.fullmatch(r"(\w+_)?heads?(_\w+)?|classifier|fc", name.split(".")[0]) is not None


def _with_head(model: nn.Module, count: int, kwargs: dict, file: Path) -> nn.Module:
    """The model with as many classes as the file, because a random head predicts random classes."""
    if (number := kwargs.get("num_classes")) not in (None, 0, count):
        raise ValueError(
            f"{file}: its head has {count} classes, not {number}. Leave num_classes out."
        )
    if number != 0 and count != class_count(model):
        model.reset_classifier(count)
    return model


def _require_patches(shapes: dict, model: nn.Module, source: object) -> None:
    """Raise ValueError if weights have another patch size than the model, because timm would resample the filters."""
    built = None
    for name, shape in shapes.items():
        if not re.search(_KERNELS, str(name)) or len(shape) not in (2, 4):
            continue
        built = built or tuple(family(model).embedding.patch_size)
        if len(shape) == 2:  # NaFlex: (D, p·q·C)
            patch = (round((shape[1] / channels(model)) ** 0.5),) * 2
        else:
            patch = tuple(shape[:2] if name.endswith("kernel") else shape[2:])
        if patch != built:
            sizes = " and the model ".join(f"{p} × {q}" for p, q in (patch, built))
            raise ValueError(
                f"{source} has patches of {sizes} pixels. Use the architecture of the weights, because "
                "resampled filters differ."
            )


def _is_transformers(folder: Path) -> bool:
    with suppress(OSError, ValueError, TypeError):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return "model_type" in config and "architecture" not in config
    return False


def _transformers(name: str, pretrained: bool, **kwargs) -> nn.Module:
    """A vision model of transformers from the hub or a folder, with safetensors weights and its image processor."""
    _require_library("transformers", "transformers", name)
    import transformers

    from vitlens.recorder.supported.transformers import MODELS

    config, unused = _here_first(
        transformers.AutoConfig.from_pretrained, name, return_unused_kwargs=True, **kwargs
    )
    kind = (config.architectures or [""])[0].replace("ViTMAEForPreTraining", "ViTMAEModel")
    known = sorted(key.rsplit(".", 1)[-1] for key in MODELS)
    if kind not in known or unused:
        wrong = (
            f"the setting {next(iter(unused))}"
            if unused
            else f"the class {kind or '(none in config.json)'}"
        )
        raise ValueError(
            f"vitlens does not support {wrong} of {name}. It supports {', '.join(known)} of transformers."
        )
    if hasattr(config, "mask_ratio"):
        config.mask_ratio = 0.0
    kind = getattr(transformers, kind)
    if not pretrained:
        model = kind._from_config(config, attn_implementation="sdpa")
    else:
        options = dict(
            config=config,
            attn_implementation="sdpa",
            use_safetensors=True,
            output_loading_info=True,
        )
        model, info = _here_first(kind.from_pretrained, name, **options)
        if (missing := info["missing_keys"]) and all(key.startswith("pooler.") for key in missing):
            model, info = _here_first(
                kind.from_pretrained, name, **options, add_pooling_layer=False
            )
        base = f"{kind.base_model_prefix}."  # a model without a head may get weights with one
        lists = tuple(
            f"{path}.".removeprefix(base)
            for path, part in model.named_modules()
            if isinstance(part, nn.ModuleList)
        )
        beyond = [
            key for key in info["unexpected_keys"] if key.removeprefix(base).startswith(lists)
        ]
        if wrong := sorted(info["missing_keys"]) + sorted(beyond):
            raise ValueError(
                f"The weights of {name} do not fit its config.json: {len(wrong)} are missing or have no "
                f"place, such as {wrong[0]}."
            )
    model.pretrained_cfg = {"architecture": Path(name).name}
    try:
        processor = _here_first(transformers.AutoImageProcessor.from_pretrained, name)
        model.image_transform = _Processor(processor)
        _measured(model.image_transform)
    except Exception as error:
        if not isinstance(error, OSError) or (Path(name) / "preprocessor_config.json").is_file():
            text = " ".join(str(error).split())[:300]
            raise ValueError(f"The image processor of {name} cannot be used: {text}") from error
        model.guessed_preprocessing = (
            f"{name} has no image processor; the usual one of {kind.__name__} is used."
        )
        _report(model.guessed_preprocessing)
    return model


def _here_first(from_pretrained: Callable, name: str, **options):
    """A file of the hub, from this disk if present, because transformers contacts the hub for every file."""
    if not Path(name).exists():
        with suppress(OSError):
            return from_pretrained(name, local_files_only=True, **options)
    return from_pretrained(name, **options)


def _require_library(package: str, extra: str, name: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(
            f'{name} is a model of {package}: pip install "vitlens[{extra}]".'
        )


def _open_clip(name: str, pretrained: bool, checkpoint=None, **kwargs) -> nn.Module:
    """A CLIP of open_clip by the name of its architecture and, after a slash, of its weights."""
    _require_library("open_clip", "openclip", name)
    import open_clip

    name, _, tag = name.partition("/")
    if pretrained and checkpoint is None:
        tags = [f"{name}/{known}" for known in open_clip.list_pretrained_tags_by_model(name)]
        listed = ", ".join(tags) or "no such model"
        reject(
            [
                (
                    f"{name}/{tag}" not in tags,
                    f"open_clip has no weights {name}/{tag}. It has {listed}.",
                )
            ]
        )
    quick = bool((open_clip.get_pretrained_cfg(name, tag) or {}).get("quick_gelu"))
    options = {
        "device": torch.empty(0).device,
        "force_quick_gelu": quick,
    } | kwargs  # also the meta device
    if pretrained or checkpoint is not None:
        source = tag if checkpoint is None else str(checkpoint)
        model, transform = open_clip.create_model_from_pretrained(name, source, **options)
    else:
        logging.disable(logging.WARNING)  # about random weights
        try:
            model, _, transform = open_clip.create_model_and_transforms(name, **options)
        finally:
            logging.disable(logging.NOTSET)
    model.image_transform, model.pretrained_cfg = transform, {"architecture": name}
    return model


def _torchvision(name: str, pretrained: bool, **kwargs) -> nn.Module:
    """A Vision Transformer of torchvision with its default weights, or the weights after a slash in its name."""
    from torchvision import models

    name, _, tag = name.partition("/")
    weights = models.get_model_weights(name)[tag or "DEFAULT"] if pretrained else None
    model = models.get_model(name, weights=weights, **kwargs)
    model.pretrained_cfg = {"architecture": name}
    if weights is not None:
        model.label_names = weights.meta["categories"]
        vars(model)["image_transform"] = (
            weights.transforms()
        )  # a module, which must not become a part of the model
    return model


def _stating(model: nn.Module, *attributes: str) -> nn.Module:
    """The model if it has one of these attributes itself, else the only Vision Transformer inside it."""
    model = unwrap(model)
    return model if any(name in vars(model) for name in attributes) else within(model)


def class_count(model: nn.Module) -> int | None:
    """Number of classes: the outputs of the head, or `num_classes` without a head, 0 for features, None if unknown.

    >>> vitlens.models.class_count(model)
    200
    """
    return family(unwrap(model)).classes


def require_classes(model: nn.Module) -> None:
    """Raise ValueError for a model without a classifier, whose output is features."""
    if class_count(model) == 0:
        raise ValueError(
            f"{model_name(unwrap(model))} has no classifier head, so its output is features."
        )


def label_names(model: nn.Module, count: int | None = None) -> list[str] | None:
    """Names of the classes in the model's folder, else ImageNet's for a model of 1,000 classes, else None.

    count: number of logits, by default the outputs of the head. Names for another number of classes are not returned,
    because the head was replaced.

    >>> vitlens.models.label_names(model)[6]
    'trilobite'
    """
    model = _stating(model, "label_names")
    names, classes = supported.label_names(model), class_count(model)
    count = classes if count is None else count
    if names is None and count == classes == 1000:
        names = [*_imagenet_names()]
    return names if names is not None and count in (None, len(names)) else None


@functools.cache
def _imagenet_names() -> list[str]:
    info = timm.data.ImageNetInfo()
    return [info.index_to_description(number) for number in range(1000)]


def output_kind(model: nn.Module) -> str:
    """Meaning of a model's outputs, one of `OUTPUTS`.

    It comes from `load_model(outputs=…)`, a folder's config.json or transformers' `problem_type`. Otherwise it is
    "value" for a single output and "classes" for several.

    >>> vitlens.models.output_kind(model)
    'classes'
    """
    model = _stating(model, "outputs", "config")
    if (kind := getattr(model, "outputs", None)) in OUTPUTS:
        return kind
    problem = getattr(getattr(model, "config", None), "problem_type", None)
    return _PROBLEMS.get(problem, "value" if class_count(model) == 1 else "classes")


def scores(model: nn.Module | str, logits: Tensor) -> Tensor:
    """Scores of logits (…, classes), in float32 or wider.

    Softmax for classes, sigmoid for independent labels, else the values. model: the model, or one of `OUTPUTS`.

    >>> vitlens.models.scores(model, logits).sum(-1)
    tensor([1.0000, 1.0000])
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    kind = model if isinstance(model, str) else output_kind(model)
    if kind == "classes" and logits.shape[-1] > 1:
        return logits.softmax(-1)
    return logits.sigmoid() if kind == "independent" else logits


def top_classes(model: nn.Module, logits: Tensor, k: int = 5) -> list[list[tuple[str, float]]]:
    """The k highest outputs for each row of (B, classes) logits, as (name or number, score).

    Raises ValueError for a model without a classifier, and for logits of another shape.

    >>> [(name, round(score, 2)) for name, score in vitlens.models.top_classes(model, logits, k=2)[0]]
    [('Egyptian cat', 0.56), ('tabby, tabby cat', 0.41)]
    """
    require_classes(model)
    if logits.dim() != 2:
        raise ValueError(f"Expected logits of shape (B, classes), got {tuple(logits.shape)}.")
    names = label_names(model, logits.shape[-1])
    values, classes = scores(model, logits).topk(min(k, logits.shape[-1]))
    labels = [[names[c] if names else str(c) for c in row] for row in classes.tolist()]
    return [[*zip(*pair, strict=True)] for pair in zip(labels, values.tolist(), strict=True)]


class _Processor:
    """An image processor of transformers as a function from an RGB image to (C, H, W)."""

    def __init__(self, processor):
        self.processor, self.interpolation = (
            processor,
            Image.Resampling(processor.resample).name.lower(),
        )

    def __call__(self, image: Image.Image) -> Tensor:
        if hasattr(
            self.processor, "max_num_patches"
        ):  # SigLIP 2: one square, so that images make a batch
            side = int(self.processor.max_num_patches**0.5) * self.processor.patch_size
            image = image.resize((side, side), self.processor.resample)
        inputs = self.processor(images=image, return_tensors="pt")
        values = inputs["pixel_values"][0]
        if "spatial_shapes" in inputs:  # SigLIP 2: patches (P, p·q·C)
            (rows, cols), side = inputs["spatial_shapes"][0].tolist(), self.processor.patch_size
            patches = (
                values[: rows * cols].unflatten(1, (side, side, -1)).unflatten(0, (rows, cols))
            )
            values = patches.permute(4, 0, 2, 1, 3).flatten(3, 4).flatten(1, 2)
        return values


def _crop_box(
    transform: Callable[[Image.Image], Tensor], size: tuple[int, int], mode: str = "RGB"
) -> tuple[float, float, float, float]:
    """(left, top, right, bottom) of the part that a transform crops from an image of `size` = (width, height) pixels.

    Measured on images whose levels are coordinates. With padding it extends beyond the image. Raises ImageError for
    an aspect ratio over 100, and if the image fills too few rows or columns of the input.
    """

    def transformed(levels) -> np.ndarray:
        image = Image.fromarray(
            np.broadcast_to(np.round(levels).astype(np.uint8), size[::-1]).copy()
        )
        return transform(image.convert(mode))[0].double().numpy()

    width, height = size
    _require_compact(width, height)
    x, y = (np.linspace(0, 1, side, dtype=np.float32) for side in size)
    y = y[:, None]
    low, high = transformed(0), transformed(255)
    inside = high - low > 0.99 * (high - low).max()  # padding is the same in both
    # each ramp has a small perpendicular one, which averages out the rounding to 8 bits
    ramps = (240 * a + 15 * b for a, b in ((x, y), (y, x)))
    one, other = (255 * (transformed(ramp) - low)[inside] / (high - low)[inside] for ramp in ramps)
    rows, cols = np.nonzero(inside)
    middle = np.ones(len(rows), bool)
    for places in (rows, cols):  # filters have less support at the edges
        middle &= np.abs(places - (places.min() + places.max()) / 2) <= np.ptp(places) / 4
    places = np.column_stack([cols + 0.5, rows + 0.5, np.ones(len(rows))])[middle]
    seen = np.stack(
        [(240 * one - 15 * other) * (width - 1), (240 * other - 15 * one) * (height - 1)], 1
    )
    seen = seen[middle] / (240**2 - 15**2)
    slopes, _, rank, _ = np.linalg.lstsq(places, seen + 0.5, rcond=None)
    if rank < 3:
        raise ImageError(
            f"The model's input shows too little of an image of {width} × {height} pixels. Crop it first."
        )
    edges = np.array([[0, 0, 1], [inside.shape[1], inside.shape[0], 1]]) @ slopes
    return tuple(edges.ravel().tolist())


def _require_compact(width: int, height: int) -> None:
    """Raise ImageError for an image with an aspect ratio over `MAX_ELONGATION`."""
    if max(width, height) > MAX_ELONGATION * min(width, height):
        raise ImageError(
            f"Expected an image, got a strip of {width} × {height} pixels. Crop it first."
        )


@functools.lru_cache(maxsize=32)
def _measured(transform: Callable[[Image.Image], Tensor]) -> dict:
    """Preprocessing of a library in timm's settings, measured on images.

    Uniform images give the mean and the standard deviation. Images of coordinates give `crop_pct` and `crop_mode`.
    """

    def level(value: int) -> Tensor:
        flat = transform(Image.new("RGB", (256, 256), (value,) * 3)).double()
        return flat[:, flat.shape[1] // 2, flat.shape[2] // 2]

    black, gray, white = level(0), level(51), level(255)
    if not torch.allclose(
        gray, black + (white - black) / 5, atol=1e-3 * float((white - black).abs().max())
    ):
        raise ValueError("Its outputs are not a linear function of the levels of an image.")
    mean, std = -black / (white - black), 1 / (white - black)
    width, height = 320, 240
    channels, rows, cols = transform(Image.new("RGB", (width, height))).shape
    left, top, right, bottom = _crop_box(transform, (width, height))
    across, down = (right - left) / cols, (bottom - top) / rows
    shares = (right - left) / width, (bottom - top) / height
    mode = (
        "squash"
        if abs(across - down) > 0.02 * down
        else "border"
        if max(shares) > 1.02
        else "center"
    )
    name = getattr(transform, "interpolation", "bicubic")
    return {
        "input_size": (channels, rows, cols),
        "mean": tuple(mean.tolist()),
        "std": tuple(std.tolist()),
        "interpolation": getattr(name, "value", name),
        "crop_mode": mode,
        "crop_pct": 1.0 if mode == "border" else min(1.0, round(max(shares) * 200) / 200),
    }


def _own_transform(model: nn.Module) -> Callable[[Image.Image], Tensor] | None:
    """Preprocessing by the library of a model, from an RGB image to (C, H, W). None for timm models."""
    model = _stating(model, "image_transform", "pretrained_cfg")
    if "image_transform" in vars(model) or vars(model).get("pretrained_cfg"):
        return vars(model).get("image_transform")
    tower = getattr(model, "visual", model)
    if isinstance(settings := getattr(tower, "preprocess_cfg", None), dict):  # open_clip
        from open_clip.transform import PreprocessCfg, image_transform_v2

        model.image_transform = image_transform_v2(PreprocessCfg(**settings), is_train=False)
        return model.image_transform
    if origin := getattr(getattr(model, "config", None), "name_or_path", None):
        with suppress(Exception):  # without a processor on this disk, use that of its class
            from transformers import AutoImageProcessor

            model.image_transform = _Processor(
                AutoImageProcessor.from_pretrained(origin, local_files_only=True)
            )
            return model.image_transform
    return None


def guessed(model: nn.Module) -> str:
    """Warning if the preprocessing of a model is a guess, else "".

    >>> vitlens.models.guessed(model)
    ''
    """
    model = _stating(model, "image_transform", "pretrained_cfg")
    if hasattr(model, "guessed_preprocessing"):
        return model.guessed_preprocessing
    if _own_transform(model) is not None or vars(model).get("pretrained_cfg"):
        return ""
    return f"{model_name(model)} has no pretrained_cfg, so its preprocessing is a guess: {data_config(model)}."


def built_size(model: nn.Module) -> tuple[int, int] | None:
    """(height, width) in pixels of the images that a model was built for, or None if it takes any size.

    >>> vitlens.models.built_size(model)
    (224, 224)
    """
    transform = _own_transform(model)
    return (
        family(within(model)).built_size
        if transform is None
        else _measured(transform)["input_size"][1:]
    )


def data_config(model: nn.Module, size: tuple[int, int] | None = None) -> dict:
    """Preprocessing of `model` in timm's settings, with the model's channels.

    size: (H, W) in pixels, in place of the configured size. Raises ImageError unless the model has one or three input
    channels and as many means and deviations.

    >>> vitlens.models.data_config(model)["interpolation"]
    'bilinear'
    """
    own = _own_transform(model)
    model = _stating(model, "pretrained_cfg")
    config = dict(family(model).preprocessing if own is None else _measured(own))
    channels, height, width = config["input_size"]
    if channels not in (1, 3):
        raise ImageError(f"Expected a model with 1 or 3 input channels, got one with {channels}.")
    height, width = size or (height, width)
    if channels == 1:
        config.update({key: (float(np.mean(config[key])),) for key in ("mean", "std")})
    for key in ("mean", "std"):
        if np.size(config[key]) not in (1, channels):
            raise ImageError(
                f"Expected {channels} numbers as the {key} of {model_name(model)}, got {config[key]!r}."
            )
    return config | {"input_size": (channels, height, width)}


def _transform(
    model: nn.Module, size: tuple[int, int] | None = None, whole: bool = False
) -> Callable:
    """A function from a PIL image to the model's input (C, H, W)."""
    config, own = data_config(model, size), _own_transform(model)
    squashed = config["crop_mode"] == "squash" and config["crop_pct"] == 1
    if (
        own is not None
        and config["input_size"] == _measured(own)["input_size"]
        and (squashed or not whole)
    ):
        return own
    if whole:
        config.update(crop_mode="squash", crop_pct=1.0)
    return create_transform(**config, is_training=False)


def preprocess(
    model: nn.Module,
    images,
    *,
    size: tuple[int, int] | None = None,
    whole: bool = False,
    on_note: Callable[[str], None] | None = None,
) -> Tensor:
    """Model input from an image, a folder, or a list or dictionary of images: float32 (B, C, H, W) on the CPU.

    Models of transformers, open_clip and torchvision use their library's preprocessing. All others, and all other
    sizes, use timm's evaluation transform with the model's `pretrained_cfg`. A module without one gets the images of
    the only Vision Transformer that it contains, whatever it does to them. For models with one input channel images are
    converted to gray.

    images: sources of `load_image`. size: (H, W) in pixels, in place of the configured size. After
    `timm.create_model(…, img_size=…)`, pass `built_size(model)`. whole: resize the whole image without a crop. on_note:
    called with a sentence for each image that `load_image` changed or that is cropped to less than half of its area,
    and if the preprocessing is a guess.

    Raises ImageError for sources that `load_image` refuses, images with an aspect ratio over 100, and models of neither
    one nor three channels.

    >>> vitlens.models.preprocess(model, [cat, cat]).shape
    torch.Size([2, 3, 224, 224])
    """
    transform, config = _transform(model, size, whole), data_config(model, size)
    channels, *sides = config["input_size"]
    images = [*images.values()] if isinstance(images, dict) else images
    if isinstance(images, str | os.PathLike) and os.path.isdir(images):
        images = [file for _, file in image_files(Path(images), on_note)]
    sources = images if isinstance(images, (list, tuple)) else [images]
    if not sources:
        raise ImageError("Expected an image or several, got none.")
    loaded = [load_image(source, on_note=on_note) for source in sources]
    for source, image in zip(sources, loaded, strict=True):
        width, height = image.size
        _require_compact(width, height)
        scales = [length / side for length, side in zip((height, width), sides, strict=True)]
        seen = (min(scales) * config["crop_pct"]) ** 2 / (
            scales[0] * scales[1]
        )  # share of the image
        if on_note is not None and seen < 0.5 and config["crop_mode"] == "center" and not whole:
            name = Path(source).name if isinstance(source, str | os.PathLike) else "An image"
            on_note(
                f"{name} of {width} × {height} pixels is cropped: the model sees the middle {seen:.0%} of it."
            )
    if on_note is not None and (sentence := guessed(model)):
        on_note(sentence)
    return torch.stack(
        [transform(image.convert("L" if channels == 1 else "RGB")) for image in loaded]
    )


def crop_box(
    model: nn.Module, image, *, size: tuple[int, int] | None = None, whole: bool = False
) -> tuple[float, float, float, float]:
    """(left, top, right, bottom) of the part of an image that `preprocess` passes to the model, in pixels of the image.

    With padding it extends beyond the image. image: a source of `load_image`. size, whole: as for `preprocess`. Raises
    ImageError as `preprocess` does, and for an image that fills too few rows or columns of the input.

    >>> [round(edge) for edge in vitlens.models.crop_box(model, cat)]
    [75, 0, 376, 300]
    """
    config = data_config(model, size)
    mode = "L" if config["input_size"][0] == 1 else "RGB"
    return _crop_box(_transform(model, size, whole), load_image(image).size, mode)


def pixels(model: nn.Module) -> Callable[[Image.Image], Tensor]:
    """`preprocess` without normalization, as a function from an RGB image to uint8 (C, H, W).

    For data sets, which store images as bytes and normalize them later.

    >>> vitlens.models.pixels(model)(cat).shape
    torch.Size([3, 224, 224])
    """
    config = data_config(model)
    if (own := _own_transform(model)) is not None:
        return functools.partial(_unnormalized, own, config["mean"], config["std"])
    return create_transform(**config, is_training=False, use_prefetcher=True)


def _unnormalized(transform: Callable, mean: tuple, std: tuple, image: Image.Image) -> Tensor:
    return _levels(transform(image)[None], mean, std)[0]


def restore(model: nn.Module, batch: Tensor) -> np.ndarray:
    """The images in a preprocessed `batch` (B, C, H, W) without normalization, as uint8 (B, H, W, 3).

    They stay resized and cropped. Gray is repeated over the three channels, and values outside 0 to 255, as in a
    perturbed batch, are clamped. Raises ImageError if the shape does not fit the model.

    >>> vitlens.models.restore(model, images).shape
    (2, 224, 224, 3)
    """
    config = data_config(model)
    if batch.ndim != 4 or batch.shape[1] != config["input_size"][0]:
        raise ImageError(
            f"Expected a batch (B, {config['input_size'][0]}, H, W), got {tuple(batch.shape)}."
        )
    levels = _levels(batch.detach().cpu().float(), config["mean"], config["std"])
    return ModelInput(levels.expand(-1, 3, -1, -1).permute(0, 2, 3, 1).contiguous().numpy())


def _levels(batch: Tensor, mean: tuple, std: tuple) -> Tensor:
    """uint8 (B, C, H, W) levels of a normalized batch."""
    mean, std = (torch.tensor(part, dtype=torch.float32).view(1, -1, 1, 1) for part in (mean, std))
    return ((batch * std + mean) * 255).round().clamp(0, 255).to(torch.uint8)
