"""Open a model by its name or from a folder: timm's, or that of another library. No pickled code is ever run."""

from __future__ import annotations

import difflib
import json
import os
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import timm
import torch
from torch import nn

from vitlens.data.files import announce, quiet, reach
from vitlens.recorder.supported.opening import LIBRARIES, require_settings

SPECIMEN = Path(__file__).parent.parent.parent / "data" / "checkpoints" / "vit_tiny_patch16_224"
"""Folder of the bundled model, in a clone of the project."""


def load_model(
    name_or_path: str | os.PathLike | None = None,
    *,
    pretrained: bool = True,
    checkpoint: str | os.PathLike | None = None,
    **kwargs,
) -> nn.Module:
    """A model in eval mode; without a name, the bundled one.

    name_or_path: a timm name such as "vit_tiny_patch16_224" (weights come from timm's hub, unless
    `pretrained=False`), or a folder with `config.json` and `model.safetensors` in timm's hub layout, as `vitlens train`
    and timm's `push_to_hf_hub` write it. Other libraries' models are named "hf:facebook/dinov2-small" (transformers; a
    folder in its layout needs no prefix), "open_clip:ViT-B-32/laion2b_s34b_b79k" (architecture/weights) and
    "torchvision:vit_b_16". checkpoint: for a timm name, a file with its weights as its authors publish them, such as
    those of DINO and DINOv2 for torch.hub; only tensors are read of it. kwargs go to the model's constructor
    (`dynamic_img_size=True`, `img_size=…`). Class names, where the folder has them, are the model's `label_names`.

    Raises ValueError for an unknown name, a folder that is not a model or whose settings are wrong, or weights that do
    not fit; ConnectionError where the hub cannot be reached.
    """
    if name_or_path is None and not SPECIMEN.is_dir():
        raise ValueError(
            "The bundled model lies in the data folder of a clone, and this installation has none. Give the name of a "
            "timm model or a folder, or install from a clone with pip install -e."
        )
    name = str(SPECIMEN if name_or_path is None else name_or_path).removeprefix("local-dir:")
    if checkpoint is not None:
        return _filled(load_model(name_or_path, pretrained=False, **kwargs), Path(checkpoint))
    library, colon, rest = name.partition(":")
    if colon and library in LIBRARIES:
        return _open_by_library(library, rest, pretrained, kwargs)
    if not name or name.startswith(("hf-hub:", "hf_hub:", "timm/")):
        raise ValueError(
            f"Expected a timm name such as vit_tiny_patch16_224.augreg_in21k_ft_in1k, or a folder, got {name!r}. "
            "For a model of the hub give its timm name, or download its folder."
        )
    path = Path(name)
    if path.is_dir() or path.name in ("config.json", "model.safetensors", "model.safetensors.index.json"):
        return _open_folder(path if path.is_dir() else path.parent, pretrained, kwargs)
    if os.sep in name or name.startswith(".") or name.endswith((".safetensors", ".pth", ".pt", ".bin")):
        raise ValueError(
            f"There is no model folder {name}. Give a folder with config.json and model.safetensors, or a timm name."
        )
    if not timm.is_model(name.split(".")[0]):
        close = difflib.get_close_matches(name, timm.list_models(), n=3, cutoff=0.5)
        hint = f" Did you mean {', '.join(close)}?" if close else ""
        raise ValueError(f"timm {timm.__version__} has no model called {name}, and there is no such folder.{hint}")
    try:
        place = _place_to_fetch_to(name) if pretrained else None
        model = timm.create_model(name, pretrained=pretrained, **kwargs)
    except Exception as error:
        raise _creation_error(name, pretrained, error) from error
    if place:
        announce(f"Fetched the weights of {name}", place)
    return model.eval()


def _filled(model: nn.Module, file: Path) -> nn.Module:
    """A model of timm with the weights in a file, by timm's own conversion of what authors publish."""
    convert = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    if convert is None or not file.is_file():
        came = f"there is no file {file}" if convert else f"timm converts none for {type(model).__name__}"
        raise ValueError(f"A checkpoint is a file with the weights of a model of timm, but {came}.")
    try:
        weights = torch.load(file, map_location="cpu", weights_only=True)
    except PermissionError:
        raise
    except Exception as error:
        raise ValueError(
            f"{file} could not be read ({type(error).__name__}): it is not a whole file of weights, or a pickled "
            "model, which could run code. Download it again, or save the model's state_dict() instead of the model."
        ) from error
    try:
        model.load_state_dict(convert(weights, model))
    except (RuntimeError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{file} does not hold the weights of {type(model).__name__}: {_one_line(error)}.") from error
    return model


def _open_by_library(key: str, name: str, pretrained: bool, kwargs: dict) -> nn.Module:
    """A model of another library than timm, from this disk if it is there."""
    from huggingface_hub import constants

    library, said = LIBRARIES[key], f"{key}:{name}"
    if not name:
        raise ValueError(
            f"Expected the name of a model of {library.name} after {said}, as in hf:facebook/dinov2-small, "
            "open_clip:ViT-B-32/laion2b_s34b_b79k or torchvision:vit_b_16."
        )
    if find_spec(library.name) is None:
        raise ImportError(
            f"{said} is a model of {library.name}, which is not installed. Install it with pip install "
            f'"vitlens[{library.extra}]".'
        )

    here = key == "hf" and Path(name).exists()
    said_already = (ValueError, ImportError) if here else (ValueError, ImportError, OSError)

    def opened(local: bool) -> nn.Module:
        try:
            return library.open(name, pretrained, local=local, **kwargs).eval()
        except said_already:
            raise
        except Exception as error:
            where = f"the folder {name}" if here else said
            raise ValueError(f"{library.name} cannot open {where}: {_one_line(error)}.") from error

    with quiet():
        with suppress(OSError):
            return opened(local=True)
        try:
            reach()
            model = opened(local=False)
        except OSError as error:
            raise ConnectionError(
                f"{said} is not on this disk, and could not be fetched ({type(error).__name__}). Check the name and "
                "the network, or give a folder with config.json and model.safetensors."
            ) from error
    announce(f"Fetched {said}", torch.hub.get_dir() if key == "torchvision" else constants.HF_HUB_CACHE)
    return model


def _open_folder(folder: Path, pretrained: bool, kwargs: dict) -> nn.Module:
    if _of_transformers(folder / "config.json"):
        return _open_by_library("hf", str(folder), pretrained, kwargs)
    for file in (folder / "config.json", folder / "model.safetensors"):
        if not file.is_file():
            raise ValueError(
                f"The folder {folder} is not a model: it has no {file.name}. A model folder holds config.json and "
                "model.safetensors; pickled weights (.bin, .pth) are not opened."
            )
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        settings = config.get("pretrained_cfg") or config
        names = config.get("label_names") or settings.get("label_names")
        architecture = config["architecture"]
        if not isinstance(architecture, str):
            raise TypeError(f"architecture must be a name, but is {architecture!r}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{folder / 'config.json'} is not a model's configuration, which names at least an architecture "
            f"({type(error).__name__}: {error})."
        ) from error
    if script := config.get("built_by"):
        raise ValueError(f"{folder} holds a model built by {script}. Build it there, then load model.safetensors.")
    require_settings(settings, folder / "config.json")
    if timm.models.parse_model_name(f"local-dir:{folder}")[1] != str(folder):  # before 1.0.30 it reads an address
        raise ValueError(f"timm {timm.__version__} opens no folder with # or ? in its path, as in {folder}; rename it.")
    # Named, because timm before 1.0.29 may take other weights in the folder for the model's, pickled ones too.
    weights = {"source": "", "file": str(folder / "model.safetensors"), "custom_load": False}
    weights = kwargs.pop("pretrained_cfg_overlay", {}) | weights
    if not timm.is_model(architecture):
        import vitlens.variants  # noqa: F401  registers vitlens_vit with timm
    try:
        model = timm.create_model(f"local-dir:{folder}", pretrained, pretrained_cfg_overlay=weights, **kwargs)
    except Exception as error:
        reason = _one_line(error)
        raise ValueError(f"timm {timm.__version__} cannot open {architecture} from {folder}: {reason}.") from error
    count = len(names) if isinstance(names, list | dict) else None
    if names and ("num_classes" not in kwargs or count == model.num_classes):  # not those of another head
        model.label_names = _ordered(names, model.num_classes, folder)
    return model.eval()


def _of_transformers(config: Path) -> bool:
    """Whether a config.json is one of transformers."""
    try:
        said = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(said, dict) and "model_type" in said and "architecture" not in said


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())[:300].rstrip(".!")
    return text if text and not isinstance(error, KeyError) else f"{type(error).__name__} {text}".strip()


def _ordered(names: list | dict, count: int, folder: Path) -> list[str]:
    """Class names in the order of the classes; some publishers write {"0": "tench", …}."""
    if isinstance(names, dict) and set(names) == {str(i) for i in range(len(names))}:
        names = [names[str(i)] for i in range(len(names))]
    if not isinstance(names, list) or len(names) != count:
        came = f"{type(names).__name__} of length {len(names)}" if hasattr(names, "__len__") else repr(names)
        raise ValueError(
            f"label_names in {folder / 'config.json'} must be a list of {count} names, one for each class, but is "
            f"{came}. Correct it, or leave it out."
        )
    return [str(name) for name in names]


def _place_to_fetch_to(name: str) -> str | None:
    """The hub's cache if the weights are not in it yet. Raises OSError at once if the hub is out of reach."""
    from huggingface_hub import constants, try_to_load_from_cache

    config = timm.models.get_pretrained_cfg(name, allow_unregistered=True)
    repository = (config.hf_hub_id or "") if config else ""
    if not repository or config.file:
        return None
    repository = f"timm/{config.architecture}.{config.tag}" if repository == "timm/" else repository
    if isinstance(try_to_load_from_cache(repository, "model.safetensors"), str):
        return None
    reach()
    return constants.HF_HUB_CACHE


def _creation_error(name: str, pretrained: bool, error: Exception) -> Exception:
    """What timm or the hub raised, as one sentence that says what to do."""
    text = _one_line(error)
    if pretrained and isinstance(error, OSError) or _is_hub_error(error):
        return ConnectionError(
            f"The pre-trained weights of {name} could not be fetched from the hub ({type(error).__name__}). Check the "
            "network, open a folder on disk, or in Python ask for random weights with pretrained=False."
        )
    if pretrained and ("No pretrained weights" in text or "Invalid pretrained tag" in text):
        tags = ", ".join(timm.list_pretrained(name.split(".")[0] + "*")[:4])
        remedy = f"There are: {tags}." if tags else "In Python, pretrained=False gives random ones."
        return ValueError(f"timm has no pre-trained weights called {name}. {remedy}")
    return ValueError(f"timm could not build {name}: {text}.")


def _is_hub_error(error: BaseException | None) -> bool:
    """Whether an error, or one that caused it, comes from the libraries that fetch weights."""
    libraries = ("huggingface_hub", "requests", "httpx", "urllib", "urllib3", "httpcore")
    while error is not None:
        if type(error).__module__.split(".")[0] in libraries:
            return True
        error = error.__cause__ or error.__context__
    return False
