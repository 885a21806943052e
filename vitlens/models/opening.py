"""Open models by name, from folders and from checkpoints, of timm, transformers, open_clip and torchvision."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import timm
import torch
from torch import nn

from vitlens.models.checkpoints import fill, print_note, require_patches
from vitlens.models.classes import OUTPUTS
from vitlens.models.preprocessing import TransformersProcessor, measure_preprocessing
from vitlens.names import reject, require_known, suggestion
from vitlens.plugins import load_plugins
from vitlens.recorder.forward import run as run
from vitlens.recorder.supported import family, input_channels
from vitlens.recorder.supported import title as title
from vitlens.recorder.supported.card import card_of, write_card

SPECIMEN = Path(__file__).parent.parent.parent / "data" / "checkpoints" / "vit_tiny_patch16_224"
"""Folder of the bundled model, in a clone of the project."""

_PREPROCESSING = ("input_size", "interpolation", "crop_pct", "mean", "std")


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
            model = fill(
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
    card = card_of(model)
    kind = outputs or (card.outputs if card else None)
    if kind is not None:
        require_known(kind, OUTPUTS, f"outputs of {name}")
    opened_as = short(str(folder) if folder.is_dir() else name)
    if checkpoint is not None:
        opened_as += f", {Path(checkpoint).name}"
    write_card(model, name=opened_as, outputs=kind)
    return model.eval()


def short(name: str) -> str:
    """The last part of a path, or RUN/model for the model of a run, so that results contain no local paths.

    >>> vitlens.models.opening.short("vit_tiny_patch16_224"), vitlens.models.opening.short("/home/me/runs/digits/model")
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
        require_patches({key: value.shape for key, value in plain.named_parameters()}, model, name)
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
            require_patches(shapes, model, weights_file)
    if missing:
        if "input_size" in missing and (size := family(model).built_size):
            model.pretrained_cfg["input_size"] = (input_channels(model), *size)
        guess = (
            f"{config_file} has no {', '.join(missing)}; those of timm's {architecture} are used."
        )
        write_card(model, guess=guess)
        print_note(guess)
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
        write_card(model, label_names=[str(name) for name in names])
    write_card(model, outputs=config.get("outputs"))
    return model


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
    write_card(model, architecture=Path(name).name)
    try:
        processor = _here_first(transformers.AutoImageProcessor.from_pretrained, name)
        transform = TransformersProcessor(processor)
        measure_preprocessing(transform)
        write_card(model, transform=transform)
    except Exception as error:
        if not isinstance(error, OSError) or (Path(name) / "preprocessor_config.json").is_file():
            text = " ".join(str(error).split())[:300]
            raise ValueError(f"The image processor of {name} cannot be used: {text}") from error
        guess = f"{name} has no image processor; the usual one of {kind.__name__} is used."
        write_card(model, guess=guess)
        print_note(guess)
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
    write_card(model, architecture=name, transform=transform)
    return model


def _torchvision(name: str, pretrained: bool, **kwargs) -> nn.Module:
    """A Vision Transformer of torchvision with its default weights, or the weights after a slash in its name."""
    from torchvision import models

    name, _, tag = name.partition("/")
    weights = models.get_model_weights(name)[tag or "DEFAULT"] if pretrained else None
    model = models.get_model(name, weights=weights, **kwargs)
    write_card(model, architecture=name)
    if weights is not None:
        write_card(model, label_names=weights.meta["categories"], transform=weights.transforms())
    return model
