"""Open models by name, from folders and from checkpoints, of timm, transformers, open_clip and torchvision."""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

import timm
import torch
from torch import nn

from vitlens import files, waiting
from vitlens.digests import TrainedOn, read_trained_on
from vitlens.images import is_image
from vitlens.models.architecture_guess import fitting_architectures
from vitlens.models.checkpoint_heads import is_pretraining_part
from vitlens.models.checkpoint_settings import quickgelu_twin
from vitlens.models.checkpoints import (
    fill,
    grouped,
    print_note,
    require_arrival,
    require_same_values,
    require_usable,
    weights_digest,
)
from vitlens.models.classes import OUTPUTS
from vitlens.models.patch_sizes import require_patches
from vitlens.models.preprocessing import (
    TransformersProcessor,
    data_config,
    measure_preprocessing,
)
from vitlens.models.weight_files import SUFFIXES, flat_tensors, read_weights, require_file
from vitlens.names import require_known, suggestion
from vitlens.plugins import load_plugins
from vitlens.recorder.forward import run as run
from vitlens.recorder.supported import attention_modules, family, input_channels, unwrap
from vitlens.recorder.supported import title as title
from vitlens.recorder.supported.card import card_of, write_card

BUNDLED = "bundled"
"""Name of the bundled model: DeiT-Tiny, trained on ImageNet-1k."""
_PACKAGE = Path(__file__).parent.parent
BUNDLED_FOLDERS = (
    _PACKAGE / "bundled",
    _PACKAGE.parent / "data" / "checkpoints" / "deit_tiny",
)
"""Folders that the bundled model may be in: of an installed package, or of a clone."""

_FILES = ("config.json", "model.safetensors", "model.safetensors.index.json")
"""Names of files that stand for the model in their folder."""

_PREPROCESSING = ("input_size", "interpolation", "crop_pct", "mean", "std")


def load_model(
    name_or_path: str | os.PathLike | None = None,
    *,
    pretrained: bool = True,
    checkpoint: str | os.PathLike | None = None,
    head: str | None = None,
    outputs: str | None = None,
    **kwargs,
) -> nn.Module:
    """A model in eval mode, by default the bundled one, DeiT-Tiny trained on ImageNet-1k.

    name_or_path: "bundled", a timm name such as "vit_tiny_patch16_224" (weights come from timm's hub, unless
    `pretrained=False`), a folder with `config.json` and `model.safetensors` in timm's or transformers' layout, or a
    name in another library: "hf:facebook/dinov2-small", "open_clip:ViT-B-32/openai" (architecture/weights),
    "torchvision:vit_b_16".
    checkpoint: a file with the weights of the model, as training programs and authors publish them (.pth, .safetensors,
    Google's .npz), or a folder with it. Averaged (EMA) weights are preferred. The choice, and all that is left out, is
    printed.
    head: name of the classifier in the checkpoint, if it has several, or "none" for the features.
    outputs: one of `OUTPUTS`, if the model does not state it. kwargs: arguments of the model's constructor
    (`dynamic_img_size=True`, or `img_size=…`, for which timm resamples learned positions).

    Raises ValueError for an unknown name, a folder that is not a model, or weights that do not fit, and ConnectionError
    if weights cannot be downloaded.

    >>> vitlens.load_model("vit_small_patch16_224", pretrained=False, img_size=64)(torch.zeros(1, 3, 64, 64)).shape
    torch.Size([1, 1000])
    """
    name = os.fspath(BUNDLED if name_or_path is None else name_or_path).removeprefix("local-dir:")
    is_bundled = name == BUNDLED
    if is_bundled:
        name = str(bundled_folder())
    names_file = Path(name).name in _FILES
    folder = Path(name).parent if names_file else Path(name)
    if names_file and not Path(name).exists() and not (folder / _FILES[0]).exists():
        raise ValueError(f"{name} does not exist. Give the folder of a model, or a name.")
    try:
        if head is not None and checkpoint is None:
            raise ValueError(
                "head= (--head) names a classifier in a checkpoint. Give checkpoint=, too."
            )
        if checkpoint is not None and not str(checkpoint):
            raise ValueError("checkpoint= (--checkpoint) is empty. Give a file, or leave it out.")
        with _announced(name, may_download=pretrained and checkpoint is None):
            model = _open(name, folder, pretrained, checkpoint, head, kwargs)
    except (ValueError, ModuleNotFoundError):
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:400].rstrip(".!")
        sentence = f"{name} cannot be opened ({type(error).__name__}: {text})."
        sentence += _argument_hint(name, text)
        if not Path(name).exists() and _is_hub_error(error):
            raise ConnectionError(f"{sentence} Check the network, or open a folder") from error
        raise ValueError(sentence) from error
    card = card_of(model)
    kind = outputs or (card.outputs if card else None)
    if kind is not None:
        require_known(kind, OUTPUTS, f"outputs of {name}")
    place = str(folder) if folder.is_dir() else name
    opened_as = BUNDLED if is_bundled else short(place)
    if checkpoint is not None:
        opened_as += f", {Path(checkpoint).name}"
    source = checkpoint or (folder if folder.is_dir() else _folder_in_name(name))
    write_card(
        model,
        name=opened_as,
        title=_title_of(model, pretrained, checkpoint),
        outputs=kind,
        trained_on=_record_of(model, source, folder) if pretrained or checkpoint else None,
        published=pretrained and checkpoint is None and not Path(source).exists(),
    )
    return model.eval()


def bundled_folder() -> Path:
    """The folder of the bundled model. Raises ValueError if this installation lacks it.

    >>> sorted(path.name for path in vitlens.models.opening.bundled_folder().iterdir())
    ['LICENSE', 'config.json', 'model.safetensors']
    """
    for folder in BUNDLED_FOLDERS:
        if (folder / "model.safetensors").is_file():
            if Path(BUNDLED).exists():
                print_note(
                    f"{BUNDLED} is the bundled model. The file or folder here is ./{BUNDLED}."
                )
            return folder
    places = " and ".join(map(str, BUNDLED_FOLDERS))
    raise ValueError(
        f"The bundled model is missing from this installation: {places} lack its model.safetensors. Install vitlens "
        "again, or name a model, such as vit_tiny_patch16_224."
    )


def _announced(name: str, may_download: bool) -> AbstractContextManager:
    """Context that announces the download of weights. Files of this machine are read without a word."""
    if not may_download or Path(name).exists():
        return nullcontext()
    return waiting.fetching(
        f"the weights of {name}",
        "They are downloaded, or read from a cache. Ctrl-C ends it, and a folder needs no network.",
    )


def _title_of(model: nn.Module, pretrained: bool, checkpoint: str | os.PathLike | None) -> str:
    """The title in the configuration of the model's folder, if the weights are that folder's, else ""."""
    card = card_of(model)
    if card is None or checkpoint is not None:
        return ""
    if card.title and not pretrained:
        return f"{card.title}, random weights"
    return card.title


def _record_of(model: nn.Module, source: str | os.PathLike, folder: Path) -> TrainedOn | None:
    """The record of the training images that comes with `source`.

    A file of weights without one has that of its own folder, of the model there, or of `folder`, if the weights are
    equal.
    """
    record = read_trained_on(source)
    source = Path(source)
    if record is not None or not source.is_file():
        return record
    for place in (folder, source.parent, source.parent / "model"):
        if not (place / "config.json").is_file():
            continue
        record = read_trained_on(place)
        if record is None:
            continue
        with suppress(ValueError):
            if weights_digest(load_model(place)) == weights_digest(model):
                return record
    return None


def load_vit(
    name: str | os.PathLike | None = None,
    *,
    checkpoint: str | os.PathLike | None = None,
    head: str | None = None,
    outputs: str | None = None,
) -> nn.Module:
    """`load_model` for commands that show attention: a class without it is refused before its weights are downloaded.

    Raises UnsupportedModelError for such a class, and the errors of `load_model`.
    """
    require_attention(name)
    return load_model(name, checkpoint=checkpoint, head=head, outputs=outputs)


def require_attention(name: str | os.PathLike | None) -> None:
    """Raise UnsupportedModelError for the name of a class without attention, before its weights are downloaded."""
    if name in (None, BUNDLED) or Path(name).exists() or os.fspath(name).startswith("hf:"):
        return
    skeleton = None
    with suppress(Exception), torch.device("meta"):  # `load_model` reports errors
        skeleton = load_model(name, pretrained=False)
    if skeleton is not None:
        attention_modules(skeleton)


_ARGUMENTS = {"size": "img_size", "image_size": "img_size", "input_size": "img_size"}
"""Names of timm's arguments by names in other libraries."""


def _argument_hint(library: str, message: str) -> str:
    """The name of the library's own argument, if a message is about an unknown one, else ""."""
    unknown = re.search(r"unexpected keyword argument '(\w+)'", message)
    if not unknown:
        return ""
    if library.startswith("torchvision:"):
        return " Did you mean image_size?" if "size" in unknown[1] else ""
    options = ("img_size", "patch_size", "num_classes", "in_chans", "dynamic_img_size")
    if unknown[1] in _ARGUMENTS:
        return f" Did you mean {_ARGUMENTS[unknown[1]]}?"
    return suggestion(unknown[1], options)


def _folder_in_name(name: str) -> Path:
    """The folder that a name such as hf:runs/vit would have. C: is a drive of Windows and not a library."""
    library, _, rest = name.partition(":")
    return Path(rest if rest and len(library) > 1 else name)


def _is_path(name: str) -> bool:
    """True for a name with the separator of folders. Windows has two of them."""
    return "/" in name or os.sep in name


def _open(
    name: str,
    folder: Path,
    pretrained: bool,
    checkpoint: str | os.PathLike | None,
    head: str | None,
    kwargs: dict,
) -> nn.Module:
    """A model by the library that its name begins with, from its folder, or of timm."""
    library, _, rest = name.partition(":")
    if checkpoint is not None:
        if library == "open_clip":
            build = functools.partial(_from_open_clip, rest, False)
        else:
            build = functools.partial(load_model, name, pretrained=False)
        build = functools.partial(build, **kwargs)
        return fill(build(), Path(checkpoint), kwargs, head=head, build=build)
    if library == "open_clip":
        return _from_open_clip(rest, pretrained, **kwargs)
    if library == "hf":
        return _from_transformers(rest, pretrained, **kwargs)
    if folder.is_dir() and _is_transformers(folder):
        return _from_transformers(str(folder), pretrained, **kwargs)
    if library == "torchvision":
        return _from_torchvision(rest, pretrained, **kwargs)
    if name and folder.is_dir():
        return _from_folder(folder, pretrained, **kwargs)
    return _from_timm(name, pretrained, **kwargs)


def is_checkpoint(path: str | os.PathLike) -> bool:
    """True for a file of weights, or a folder with them alone.

    False for the folder of a model or a run, a name, and the files that stand for the model in their folder.
    """
    file = Path(path)
    if file.is_dir():
        described = ("config.json", "adapter_config.json", "recipe.json")
        names = {each.name for each in file.iterdir()}
        return names.isdisjoint(described) and any(name.endswith(SUFFIXES) for name in names)
    stands_for_folder = file.name in _FILES and (file.parent / "config.json").is_file()
    return file.is_file() and not stands_for_folder


def same_model(model: nn.Module, other: nn.Module) -> bool:
    """True for two models with equal weights, layers and preprocessing, whatever their names are.

    >>> vitlens.models.opening.same_model(model, vitlens.load_model())
    True
    """
    if str(unwrap(model)) != str(unwrap(other)) or data_config(model) != data_config(other):
        return False
    return weights_digest(model) == weights_digest(other)


def load_beside(model: str, beside: str, first: nn.Module, **options) -> nn.Module:
    """The second model of a comparison, in eval mode. A file of weights is a checkpoint of the first.

    model: name of `first`. options: `head`, for a checkpoint, and `outputs`, as of `load_vit`. Raises ValueError if
    both models are the same.
    """
    if is_checkpoint(beside):
        other = load_vit(model, checkpoint=beside, **options)
    else:
        options.pop("head", None)
        other = load_vit(beside, **options)
    if same_model(first, other):
        raise ValueError(
            f"{model or 'The bundled model'} and {beside} are the same model: their weights and settings are equal. "
            "Name another one after --beside."
        )
    return other


def short(name: str) -> str:
    """The last part of a path, or RUN/model for the model of a run, so that results contain no local paths.

    >>> vitlens.models.opening.short("vit_tiny_patch16_224"), vitlens.models.opening.short("/home/me/runs/digits/model")
    ('vit_tiny_patch16_224', 'digits/model')
    """
    path = Path(name)
    is_path = path.exists() or path.is_absolute()
    if not name or not is_path:  # Path("") is the current folder
        return name
    path = path.resolve()
    return f"{path.parent.name}/model" if path.name == "model" else path.name


def _is_hub_error(error: BaseException | None) -> bool:
    """True if an error, or its cause, comes from downloading weights."""
    libraries = ("huggingface_hub", "requests", "httpx", "urllib", "urllib3", "httpcore")
    while error is not None:
        if isinstance(error, ConnectionError) or type(error).__module__.split(".")[0] in libraries:
            return True
        error = error.__cause__ or error.__context__
    return False


def _from_timm(name: str, pretrained: bool, **kwargs) -> nn.Module:
    """A model of timm by its name."""
    elsewhere = _is_path(name) or name.startswith((".", "hf-hub:", "hf_hub:"))
    if elsewhere or not timm.is_model(name.split(".")[0]):
        raise _unknown_name(name)
    name = _with_activation(name, pretrained, kwargs)
    model = timm.create_model(name, pretrained=pretrained, **kwargs)
    if pretrained and "patch_size" in kwargs:
        others = {k: v for k, v in kwargs.items() if k not in ("patch_size", "img_size")}
        with torch.device("meta"):
            published = timm.create_model(name, **others)
        shapes = {key: value.shape for key, value in published.named_parameters()}
        require_patches(shapes, model, name)
    return model


def _with_activation(name: str, pretrained: bool, kwargs: dict) -> str:
    """The name of the architecture with the activation of published weights, if timm's notes name another one."""
    config = timm.get_pretrained_cfg(name, allow_unregistered=True)
    notes = [str(note) for note in (config.notes or ()) if note] if config else []
    names_weights = pretrained or "." in name
    if not notes or not names_weights or "quickgelu" in name:
        return name
    twin = quickgelu_twin(name)
    for_quickgelu = any("quickgelu" in note.lower() for note in notes)
    if twin and for_quickgelu and "act_layer" not in kwargs:
        _, dot, tag = name.partition(".")
        print_note(
            f"The weights {name} were trained with QuickGELU, so {twin} is opened. act_layer in Python changes it."
        )
        return f"{twin}{dot}{tag}"
    print_note(f"timm notes about {name}: {'; '.join(notes)}.")
    return name


def _unknown_name(name: str) -> ValueError:
    """Error for an unknown model name, with similar names."""
    from torchvision.models import list_models

    path = Path(name)
    if path.is_file():
        return ValueError(
            f"{name} is a file, not a model. Weights need the name of their model, too: {_model_of(path)} with "
            f"checkpoint={name} (on the command line --checkpoint)."
        )
    if path.suffix in SUFFIXES and not path.exists() and not path.is_symlink():
        return ValueError(
            f"{name} does not exist. Check the path. A file of weights alone goes to checkpoint= (--checkpoint), with "
            "the name of its model."
        )
    if is_image(path) and not path.exists():
        return ValueError(f"{name} does not exist. Check the path of the image, or name a model.")
    if not path.is_dir() and (path.exists() or path.is_symlink()):
        require_file(path)
    owner, _, rest = name.removeprefix("hf-hub:").removeprefix("hf_hub:").partition("/")
    if name in list_models():
        hint = f" Did you mean torchvision:{name}?"
    elif owner == "timm" and timm.is_model(rest.split(".")[0]):
        hint = f" Did you mean {rest}?"
    elif re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", f"{owner}/{rest}"):
        library = "open_clip" if owner.startswith("ViT-") else "hf"
        hint = f" Did you mean {library}:{owner}/{rest}?"
    elif _is_path(name):
        hint = ""
    else:
        hint = suggestion(name, sorted(timm.list_models(), key=len))
    return ValueError(
        f"{name!r} matches no file or folder, and timm {timm.__version__} has no model of that name."
        f"{hint}"
    )


def _model_of(file: Path) -> str:
    """Name of a timm model that a file of weights may be for, by its name or its tensors."""
    if timm.is_model(file.stem):
        return file.stem
    with suppress(ValueError):
        names = fitting_architectures(dict(flat_tensors(read_weights(file))), 1)
        if names:
            return names[0]
    return "such as vit_small_patch16_224"


def _from_folder(folder: Path, pretrained: bool, **kwargs) -> nn.Module:
    """A model in timm's hub layout."""
    config_file = folder / "config.json"
    weights_file = folder / "model.safetensors"
    _require_model_folder(folder, config_file, weights_file)
    try:
        config = json.loads(files.read_text(config_file))
        settings = config.get("pretrained_cfg") or config
        architecture = str(config["architecture"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{config_file} is not a model's configuration ({type(error).__name__}: {error})."
        ) from error
    script = config.get("built_by")
    if script:
        raise ValueError(
            f"{folder} holds a model built by {script}. Build it there, then load model.safetensors."
        )
    if not timm.is_model(architecture):
        load_plugins("models")
    _, path_in_timm, *_ = timm.models.parse_model_name(f"local-dir:{folder}")
    if path_in_timm != str(folder):  # before 1.0.30 it reads an address
        raise ValueError(
            f"timm {timm.__version__} opens no folder with # or ? in its path, as in {folder}. Rename it."
        )

    # Named, because timm before 1.0.29 may take other weights in the folder for the model's, pickled ones too.
    overlay = kwargs.pop("pretrained_cfg_overlay", {})
    overlay |= {"source": "", "file": str(weights_file), "custom_load": False}
    missing = [key for key in _PREPROCESSING if settings.get(key) is None]
    default = timm.get_pretrained_cfg(architecture, allow_unregistered=True)
    if default is None:
        default = timm.models.PretrainedCfg()
    overlay |= {key: getattr(default, key) for key in missing}
    if "input_size" in missing:
        overlay["fixed_input_size"] = default.fixed_input_size
    model = timm.create_model(
        f"local-dir:{folder}", pretrained, pretrained_cfg_overlay=overlay, **kwargs
    )
    if pretrained:
        require_patches(_shapes(weights_file), model, weights_file)
        require_arrival(model, weights_file, kwargs)
    if missing:
        size = family(model).built_size
        if "input_size" in missing and size:
            model.pretrained_cfg["input_size"] = (input_channels(model), *size)
        guess = (
            f"{config_file} has no {', '.join(missing)}; those of timm's {architecture} are used."
        )
        write_card(model, guess=guess)
        print_note(guess)
    names = _listed_names(config.get("label_names") or settings.get("label_names"))
    # Names for another number of classes are ignored if the caller asked for that number.
    if names and ("num_classes" not in kwargs or len(names) == model.num_classes):
        if not isinstance(names, list) or len(names) != model.num_classes:
            raise ValueError(
                f"label_names in {config_file} must be a list of {model.num_classes} names."
            )
        described = config.get("label_descriptions") or settings.get("label_descriptions")
        write_card(model, label_names=_described_names(names, described))
    write_card(model, outputs=config.get("outputs"), title=str(config.get("title") or ""))
    return model


def _require_model_folder(folder: Path, config_file: Path, weights_file: Path) -> None:
    """Raise ValueError for a folder without a model in timm's layout: an adapter, a run, or one with missing files."""
    adapter = folder / "adapter_config.json"
    if adapter.is_file() and not config_file.is_file():
        base = json.loads(files.read_text(adapter)).get("base_model_name_or_path")
        base = base or "the model that it was trained on"
        raise ValueError(
            f"{folder} holds a LoRA adapter of {base}, not a model. Open {base} with its library and "
            "peft, call merge_and_unload(), and save the result."
        )
    if (folder / "recipe.json").is_file() and not config_file.is_file():
        model = folder / "model"
        if (model / "config.json").is_file():
            advice = f"Its model is {model}."
        else:
            advice = (
                f"It has no model yet: `vitlens train --resume --out {folder}` continues the run, and "
                "--export writes the model of a stopped one."
            )
        raise ValueError(f"{folder} is the folder of a training run. {advice}")
    for file in (config_file, weights_file):
        if not file.is_file():
            raise ValueError(
                f"The folder {folder} has no {file.name}. A model folder holds config.json and "
                "model.safetensors. A file of weights alone goes to checkpoint= (--checkpoint), with the name "
                "of its model."
            )


def _shapes(weights_file: Path) -> dict[str, list[int]]:
    """Shapes of the weights in a file of safetensors, by name."""
    from safetensors import safe_open

    with safe_open(weights_file, "pt") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118


def _listed_names(names):
    """Names of classes as a list, from one or from {"0": "tench", …}. Other values are returned unchanged."""
    if not isinstance(names, dict):
        return names
    numbers = [str(number) for number in range(len(names))]
    if set(names) != set(numbers):
        return names
    return [names[number] for number in numbers]


def _described_names(names: list, descriptions: object) -> list[str]:
    """Names of classes by timm's descriptions of short names, such as "n01440764", as far as they have one."""
    texts = [str(name) for name in names]
    if not isinstance(descriptions, dict):
        return texts
    return [str(descriptions.get(name, name)) for name in texts]


def _is_transformers(folder: Path) -> bool:
    with suppress(OSError, ValueError, TypeError):
        config = json.loads(files.read_text(folder / "config.json"))
        return "model_type" in config and "architecture" not in config
    return False


def _from_transformers(name: str, pretrained: bool, **kwargs) -> nn.Module:
    """A vision model of transformers from the hub or a folder, with safetensors weights and its image processor."""
    _require_library("transformers", "transformers", name)
    import transformers

    from vitlens.recorder.supported.transformers import MODELS

    config, unused = _here_first(
        transformers.AutoConfig.from_pretrained, name, return_unused_kwargs=True, **kwargs
    )
    class_name = (config.architectures or [""])[0].replace("ViTMAEForPreTraining", "ViTMAEModel")
    known = sorted(key.rsplit(".", 1)[-1] for key in MODELS)
    if class_name not in known or unused:
        wrong = f"the class {class_name or '(none in config.json)'}"
        if unused:
            setting = next(iter(unused))
            wrong = f"the setting {setting}"
            if "size" in setting:
                wrong += " (image_size sets the size of images)"
        raise ValueError(
            f"vitlens does not support {wrong} of {name}. It supports {', '.join(known)} of transformers."
        )
    if hasattr(config, "mask_ratio"):
        config.mask_ratio = 0.0
    kind = getattr(transformers, class_name)
    model = _build_transformers(kind, name, config, pretrained)
    write_card(model, architecture=Path(name).name)
    try:
        processor = _here_first(transformers.AutoImageProcessor.from_pretrained, name)
        transform = TransformersProcessor(processor)
        channels = input_channels(model)
        if channels in (1, 3):  # with others, `preprocess` refuses
            measure_preprocessing(transform, channels)
        write_card(model, transform=transform)
    except Exception as error:
        if not isinstance(error, OSError) or (Path(name) / "preprocessor_config.json").is_file():
            text = " ".join(str(error).split())[:300]
            raise ValueError(f"The image processor of {name} cannot be used: {text}") from error
        guess = f"{name} has no image processor; the usual one of {class_name} is used."
        write_card(model, guess=guess)
        print_note(guess)
    return model


def _build_transformers(kind: type, name: str, config, pretrained: bool) -> nn.Module:
    """A model of a class of transformers, with random weights or with those of its name, which must be complete."""
    if not pretrained:
        return kind._from_config(config, attn_implementation="sdpa")
    quantization = getattr(config, "quantization_config", None)
    if quantization:
        raise ValueError(
            f"The weights of {name} are quantized (quantization_config in its config.json). Open the model before "
            "quantization."
        )
    folder = Path(name)
    if folder.is_dir() and not any((folder / file).is_file() for file in _FILES[1:]):
        raise ValueError(
            f"{name} has no model.safetensors. Weights in another file go to checkpoint= (--checkpoint)."
        )
    if folder.is_dir() and (folder / "adapter_config.json").is_file():
        raise ValueError(
            f"{name} holds an adapter (adapter_config.json) beside the model, which transformers would add to it. Call "
            "merge_and_unload() of peft and save the result, or move the adapter elsewhere."
        )
    weights = require_usable(folder) if folder.is_dir() else None
    options = {
        "config": config,
        "attn_implementation": "sdpa",
        "use_safetensors": True,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # refused below, with the names
    }
    model, info = _here_first(kind.from_pretrained, name, **options)
    missing = info["missing_keys"]
    if missing and all(key.startswith("pooler.") for key in missing):
        options["add_pooling_layer"] = False
        model, info = _here_first(kind.from_pretrained, name, **options)
    base = f"{kind.base_model_prefix}."  # a model without a head may get weights with one
    roots = {key.removeprefix(base).split(".")[0] for key in model.state_dict()}
    unexpected = sorted(info["unexpected_keys"])
    beyond = [
        key
        for key in unexpected
        if key.removeprefix(base).split(".")[0] in roots and not is_pretraining_part(key)
    ]
    unused = [key for key in unexpected if key not in beyond]
    if unused:
        print_note(f"{kind.__name__} of {name} leaves out: {grouped(unused)}.")
    for key, in_file, in_model in sorted(info["mismatched_keys"]):
        raise ValueError(
            f"The weights of {name} do not fit its settings: {key} has the shape {tuple(in_file)}, and the settings "
            f"describe {tuple(in_model)}."
        )
    wrong = sorted(info["missing_keys"]) + beyond
    if wrong:
        raise ValueError(
            f"The weights of {name} do not fit its config.json: {len(wrong)} are missing or have no "
            f"place, such as {wrong[0]}."
        )
    if weights is None:
        weights = _downloaded_weights(name)
    require_same_values(model, weights, name)
    return model


def _downloaded_weights(name: str) -> dict:
    """The tensors in the downloaded file of a model of transformers, or none if it has another name or parts."""
    from transformers.utils import cached_file

    file = None
    with suppress(Exception):
        file = cached_file(name, "model.safetensors", local_files_only=True)
    return require_usable(Path(file)) if file else {}


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


def _from_open_clip(name: str, pretrained: bool, **kwargs) -> nn.Module:
    """A CLIP of open_clip by the name of its architecture and, after a slash, of its weights."""
    _require_library("open_clip", "openclip", name)
    import open_clip

    in_folder = name.startswith("local-dir:")
    weights = {}
    tag = ""
    if in_folder:
        folder = Path(name.removeprefix("local-dir:"))
        if not (folder / "open_clip_config.json").is_file():
            raise ValueError(
                f"{folder} has no open_clip_config.json, which open_clip's folders have."
            )
        if pretrained:
            file = folder / "open_clip_model.safetensors"
            weights = require_usable(file if file.is_file() else folder)
    else:
        name, _, tag = name.partition("/")
    if not in_folder and name not in open_clip.list_models():
        hint = suggestion(name, open_clip.list_models())
        raise ValueError(f"open_clip has no architecture {name!r}.{hint}")
    if pretrained and not in_folder:
        tags = [f"{name}/{known}" for known in open_clip.list_pretrained_tags_by_model(name)]
        if f"{name}/{tag}" not in tags:
            listed = ", ".join(tags) or "no such model"
            raise ValueError(f"open_clip has no weights {name}/{tag}. It has {listed}.")
    published = open_clip.get_pretrained_cfg(name, tag) or {}
    options = {
        "device": torch.empty(0).device,  # also the meta device
        "force_quick_gelu": bool(published.get("quick_gelu")),
    } | kwargs
    if pretrained:
        model, transform = open_clip.create_model_from_pretrained(name, tag or None, **options)
        require_same_values(model, weights, name)
    else:
        logging.disable(logging.WARNING)  # about random weights
        try:
            model, _, transform = open_clip.create_model_and_transforms(name, **options)
        finally:
            logging.disable(logging.NOTSET)
    write_card(model, architecture=name, transform=transform)
    return model


def _from_torchvision(name: str, pretrained: bool, **kwargs) -> nn.Module:
    """A Vision Transformer of torchvision with its default weights, or the weights after a slash in its name."""
    from torchvision import models

    name, _, tag = name.partition("/")
    weights = models.get_model_weights(name)[tag or "DEFAULT"] if pretrained else None
    model = models.get_model(name, weights=weights, **kwargs)
    write_card(model, architecture=name)
    if weights is not None:
        write_card(model, label_names=weights.meta["categories"], transform=weights.transforms())
    return model
