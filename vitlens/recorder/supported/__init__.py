"""Supported models. Refusal is the default, because a plausible but wrong image is worse than an error.

A model is supported if its class is known and every block holds attention modules of a known class: a softmax over all
tokens of one whole image. The capture checks the calls that the model makes. Each library has a file here, with an
adapter that implements `Family`. The rest of vitlens uses `family(model)`.
"""

from __future__ import annotations

import contextlib
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from vitlens.plugins import load_plugins
from vitlens.recorder.grid import TokenGrid

LIBRARIES = ("timm", "transformers", "open_clip", "torchvision")
"""Libraries with a module here, which has the full names of the classes in `MODELS`, and their `adapter`."""

NORMS = r"norm[12]|ln_[12]|layer_norm[12]|layernorm_(before|after)|in_norm|(attns|ffns)\.\d+\.norm"
"""Pattern of names: the modules of a block that normalize the input of attention and MLP."""
MLPS = r"mlp|mlp_drop|ffns\.\d+\.mlp"
"""Pattern of names: the MLPs of a block, whose outputs are added to the residual stream."""

HARMLESS = {
    "__init__",
    "init_weights",
    "_init_weights",
    "fix_init_weight",
    "no_weight_decay",
    "group_matcher",
    "load_pretrained",
    "get_classifier",
    "reset_classifier",
    "set_grad_checkpointing",
}
"""Methods of timm's models without an effect on the forward."""


class UnsupportedModelError(ValueError):
    """Error for a model or a forward whose attention cannot be shown exactly. The message gives the reason.

    >>> isinstance(vitlens.UnsupportedModelError("…"), ValueError)
    True
    """


@dataclass(frozen=True)
class Pool:
    """Attention pool after the last layer.

    module: the attention with the norm and MLP that follow it. queries: the queries whose mean attention is the
    read-out, or None without a single row. norm: the norm before a pool without parameters.
    """

    module: nn.Module
    queries: slice | None
    norm: nn.Module | None = None


class Family(ABC):
    """Adapter of one model. Shapes: B batch, T tokens, D width, C channels, sizes (height, width)."""

    def __init__(self, model: nn.Module):
        self.model = model

    @abstractmethod
    def attention(self) -> list[list[tuple[str, nn.Module]]]:
        """Per layer the (name, module) of its attention, in the order of the calls. Raises UnsupportedModelError."""

    @property
    def capture_problem(self) -> str | None:
        """Reason why the attention cannot be captured in the model's mode and settings, or None. `require_capturable`
        checks dropout."""
        return None

    def forward_checks(self) -> list[RemovableHandle]:
        """Hooks that raise UnsupportedModelError in a forward whose attention cannot be shown."""
        return []

    @property
    @abstractmethod
    def blocks(self) -> Sequence[nn.Module]:
        """The layers, from tokens (B, T, D) to tokens (B, T, D)."""

    @property
    def stream_problem(self) -> str | None:
        """Reason why the outputs of attention and MLPs are inseparable (blocks that are not pre-norm), or None."""
        for number, block in enumerate(self.blocks):
            names = [name for name, _ in block.named_modules()]
            if not all(any(re.fullmatch(parts, name) for name in names) for parts in (NORMS, MLPS)):
                return (
                    f"layer {number} ({type(block).__name__}) has other parts than a pre-norm block"
                )
        return None

    @property
    def pool(self) -> Pool | None:
        """The attention pool, or None."""
        return None

    @property
    @abstractmethod
    def embedding(self) -> nn.Module:
        """The module that turns pixels into tokens."""

    @property
    @abstractmethod
    def prefix(self) -> list[str]:
        """Names of the R prefix tokens: "class token", "distillation token", "register 1" …"""

    @abstractmethod
    def grid(self, image: tuple[int, int]) -> TokenGrid:
        """The token grid of an image of this size, with the read-out. Raises ValueError for a size that the model does
        not take. The read-out of an attention pool depends on the image: None here, and set by a capture."""

    @property
    def built_size(self) -> tuple[int, int] | None:
        """Image size that the model was built for, or None for any."""
        return None

    @property
    @abstractmethod
    def preprocessing(self) -> dict:
        """`input_size` (C, H, W), `mean`, `std`, `interpolation`, `crop_pct` and `crop_mode`, as
        `timm.data.create_transform` takes them."""

    @property
    @abstractmethod
    def classes(self) -> int | None:
        """Number of classes, 0 for a model whose output is features, or None if unknown."""

    def run(self, images: Tensor) -> Tensor:
        """(B, classes) logits, or (B, D) features of a model without classes, without other outputs."""
        return self.model(images)

    @abstractmethod
    def head(self, tokens: Tensor, *, pre_logits: bool = False) -> Tensor:
        """Output of `run` for these tokens (B, T, D) of the last layer.

        pre_logits: return the (B, D) input of the classifier instead, or the same without a classifier.
        """

    @abstractmethod
    def positions(self) -> Tensor | None:
        """(rows, cols, D) learned position embeddings of the patches, or None."""


class PlainPatches(Family):
    """Adapter of a model whose patches begin at the top left. Margins at the bottom and right belong to no patch.

    paths: names of the list of blocks in the model, of the attention in a block, and of the embedding in the model.
    attends: the beginning of the full name of the attention's class. patch: (height, width) in pixels. only: True for a
    model that takes only the image size it was built for. read: the tokens whose mean the head reads, or None. table:
    learned position embeddings (…, T, D), those of the patches last, or None. usual: preprocessing of most published
    weights, the default for a model that declares none.
    """

    paths: tuple[str, str, str]
    attends = "torch.nn.modules.activation.MultiheadAttention"
    patch: tuple[int, int]
    built_size: tuple[int, int] = (0, 0)
    prefix: list[str] = ["class token"]
    only = True
    read: slice | None = slice(0, 1)
    table: Tensor | None = None
    usual: dict

    def attention(self) -> list[list[tuple[str, nn.Module]]]:
        layers, (path, name, _) = [], self.paths
        for number, block in enumerate(self.blocks):
            full, module = f"{path}.{number}.{name}", dict(block.named_modules()).get(name)
            if module is None or not qualified_name(module).startswith(self.attends):
                raise refuse(
                    self.model,
                    f"{full} is {qualified_name(module)}, which vitlens does not support",
                )
            layers.append([(full, module)])
        return layers

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return self.model.get_submodule(self.paths[0])

    @property
    def embedding(self) -> nn.Module:
        return self.model.get_submodule(self.paths[2])

    def grid(self, image: tuple[int, int]) -> TokenGrid:
        if self.only:
            require_size(self.model, image, only=self.built_size)
        grid = TokenGrid(*self._counts(image), self.patch, len(self.prefix), tuple(image))
        return grid if self.read is None else replace(grid, readout=mean_of(grid, self.read))

    def _counts(self, image: tuple[int, int]) -> list[int]:
        return [side // length for side, length in zip(image, self.patch, strict=True)]

    @property
    def preprocessing(self) -> dict:
        """From `pretrained_cfg`, else `usual`."""
        config = {
            "input_size": (3, *self.built_size),
            "interpolation": "bicubic",
            "crop_pct": 1.0,
            "crop_mode": "center",
        } | self.usual
        own = getattr(self.model, "pretrained_cfg", None) or {}
        return config | {key: own[key] for key in config if key in own}

    def positions(self) -> Tensor | None:
        if self.table is None:
            return None
        rows, cols = self._counts(self.built_size)
        return self.table.detach().flatten(0, -2)[-rows * cols :].unflatten(0, (rows, cols))


def mean_of(grid: TokenGrid, tokens: slice) -> Tensor:
    """(T,) read-out of a head that reads the mean of some tokens."""
    row = torch.zeros(grid.tokens, dtype=torch.float32, device="cpu")
    row[tokens] = 1.0 / len(row[tokens])
    return row


READOUTS = {
    "class token": lambda prefix: slice(0, 1),
    "patches": lambda prefix: slice(prefix, None),
    "tokens": lambda prefix: slice(None),
}
"""Functions from the number of prefix tokens to the tokens whose mean the head of a registered model reads."""


class Registered(PlainPatches):
    """Adapter of a registered class. `register_model` sets its attributes."""

    attends, only = "", False

    @property
    def classes(self) -> int | None:
        return getattr(self.model, "num_classes", None)

    def head(self, tokens: Tensor, *, pre_logits: bool = False) -> Tensor:
        if self.logits is None or pre_logits:
            raise ValueError(
                f"The head of {type(self.model).__name__} is unknown. Pass `register_model` a function as head=, from "
                "the model and the tokens (B, T, D) of its last layer to the logits."
            )
        return type(self).logits(self.model, tokens)


def register_model(
    kind: type[nn.Module],
    *,
    blocks: str,
    attention: str,
    embedding: str,
    patch: int | tuple[int, int],
    size: int | tuple[int, int],
    prefix: Sequence[str] = ("class token",),
    readout: str | None = "class token",
    mean: Sequence[float] = (0.5, 0.5, 0.5),
    std: Sequence[float] = (0.5, 0.5, 0.5),
    head: Callable[[nn.Module, Tensor], Tensor] | None = None,
) -> None:
    """Register the class of a Vision Transformer that you wrote, so that captures, statistics and maps support it.

    >>> class MyViT(torch.nn.Module): ...
    >>> vitlens.register_model(MyViT, blocks="blocks", attention="attn", embedding="patch_embed", patch=16, size=224)

    Its attention must call `torch.nn.functional.scaled_dot_product_attention`, once in each block, on all tokens. Its
    forward must take images (B, C, height, width) and return logits (B, classes).

    kind: the class. blocks: path of the list of blocks in the model. attention: path of the attention module in a
    block. embedding: path of the module that turns pixels into tokens. patch: side or (height, width) of a patch.
    size: side or (height, width) of the images that the model was built for. prefix: names of the tokens before the
    patches. readout: the tokens whose mean the head reads, "class token", "patches" or "tokens" (all). With None,
    `rollout` and `relevance` need a query. mean, std: of the input's normalization, one number per channel. head:
    logits from (model, tokens of the last layer), for `legrad` and the lens.
    """
    pair = lambda sides: (sides, sides) if isinstance(sides, int) else tuple(sides)  # noqa: E731
    settings = dict(
        paths=(blocks, attention, embedding),
        patch=pair(patch),
        built_size=pair(size),
        prefix=list(prefix),
        read=READOUTS[readout](len(prefix)) if readout else None,
        logits=head and staticmethod(head),
        usual={"input_size": (len(mean), *pair(size)), "mean": tuple(mean), "std": tuple(std)},
    )
    FAMILIES[f"{kind.__module__}.{kind.__qualname__}"] = type(
        f"Registered{kind.__name__}", (Registered,), settings
    )


FAMILIES: dict[str, Callable[[nn.Module], Family]] = {}
"""Adapters of registered classes, by full name."""


def _library(name: str):
    return import_module(f"{__name__}.{name}")


def _adapter(kind: type) -> Callable[[nn.Module], Family] | None:
    """Adapter of a class, or None for an unknown one, also after the other packages have added theirs."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    library = kind.__module__.split(".")[0]
    if library in LIBRARIES and name in _library(library).MODELS:
        return _library(library).adapter
    if name not in FAMILIES:
        load_plugins("models")
    return FAMILIES.get(name)


def _is_timm(kind: type) -> bool:
    """True for timm's classes, and for those of other packages that extend them and have their adapter."""
    return kind.__module__.startswith("timm.") or _adapter(kind) is _library("timm").Timm


def extended(model: nn.Module) -> tuple[type | None, list[str]]:
    """The known class that a model has or extends, or None, and the methods that it overrides."""
    kinds = type(model).__mro__
    for number, kind in enumerate(kinds):
        if _adapter(kind) and (number == 0 or _is_timm(kind)):
            own = {
                name
                for subclass in kinds[:number]
                for name, value in vars(subclass).items()
                if callable(value)
            }
            if not own:
                return kind, []
            forward = {*dir(kind)} - {*dir(nn.Module)} | {"forward", "__call__"}
            return kind, sorted(own & forward - HARMLESS)
    return None, []


def known(model: nn.Module) -> bool:
    """True if the model's class is known, or extends a class of timm without changing its forward."""
    kind, overridden = extended(model)
    return kind is not None and not overridden


def family(model: nn.Module) -> Family:
    """Adapter for a model's class. Unknown classes get the timm adapter."""
    kind, overridden = extended(model)
    return _library("timm").Timm(model) if kind is None or overridden else _adapter(kind)(model)


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside a wrapper of torch.compile, DataParallel or DistributedDataParallel. Raises TypeError for
    anything but a model."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"Expected a torch.nn.Module, got {type(model).__name__}. `vitlens.load_model` opens one."
        )
    if hasattr(model, "_orig_mod"):
        return unwrap(model._orig_mod)
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return unwrap(model.module)
    return model


def transformers_in(model: nn.Module) -> dict[str, nn.Module]:
    """Known Vision Transformers inside a model, by name. The model itself has the name ""."""
    inner: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if known(module) and not any(
            outer == "" or name.startswith(f"{outer}.") for outer in inner
        ):
            inner[name] = module
    return inner


def within(model: nn.Module) -> nn.Module:
    """The only Vision Transformer inside a model. With zero or several, the model itself."""
    if known(model := unwrap(model)):
        return model
    inner = list(transformers_in(model).values())
    return inner[0] if len(inner) == 1 else model


def transformer(model: nn.Module) -> nn.Module:
    """The Vision Transformer to analyze: the model itself, or the only one inside it.

    Raises UnsupportedModelError if it contains zero or several.
    """
    return _require_known(within(model), model)


def attention_modules(model: nn.Module) -> list[list[tuple[str, nn.Module]]]:
    """Per layer the (name, module) of its attention, in the order of the calls. Raises UnsupportedModelError."""
    layers = family(_require_known(model, model)).attention()
    modules = [id(module) for layer in layers for _, module in layer]
    if len(set(modules)) < len(modules):
        raise refuse(
            model,
            "its layers share one attention module, so its calls cannot be assigned to layers",
        )
    return layers


def require_capturable(model: nn.Module) -> None:
    """Raise UnsupportedModelError if the model's settings hide its attention, or its mode makes it random: dropout,
    stochastic depth or patch dropout is active."""
    if reason := family(model).capture_problem:
        raise refuse(model, reason)
    for name, module in model.named_modules():
        if not (module.training and "drop" in type(module).__name__.lower()):
            continue
        rate = next(
            (getattr(module, a) for a in ("p", "drop_prob", "prob") if hasattr(module, a)), 0
        )
        if rate and rate > 0:
            layer = f"{name} ({type(module).__name__}, {rate:g})"
            raise refuse(
                model,
                f"in training mode {layer} drops parts of it at random; call model.eval() first",
            )


def _require_known(inner: nn.Module, model: nn.Module) -> nn.Module:
    """The inner module. Raises UnsupportedModelError about the whole model if its class is not supported."""
    if not known(inner):
        raise refuse(model, _why_not(model))
    return inner


def _why_not(model: nn.Module) -> str:
    """Reason why a model's class is refused."""
    timm = _library("timm")
    if (reason := timm.REASONS.get(type(model).__name__)) is not None:
        return reason
    inner = list(transformers_in(model))
    if not inner and any(isinstance(m, nn.MultiheadAttention) for m in model.modules()):
        return "it uses torch.nn.MultiheadAttention, and its class is not supported, so its tokens are unknown"
    if len(inner) == 1:
        return f"it wraps a Vision Transformer; capture that one instead (`model.get_submodule({inner[0]!r})`)"
    if inner:
        named = ", ".join(map(repr, inner))
        return f"it contains {len(inner)} Vision Transformers ({named}); pass the one that the forward runs"
    kind, overridden = extended(model)
    register = f"register it by `vitlens.register_model({type(model).__name__}, …)`"
    if kind is not None:
        return (
            f"it extends timm's {kind.__name__} and overrides {', '.join(overridden)}, so its tokens and read-out are "
            f"unknown; use timm's own class, or {register}"
        )
    return (
        "its class is not among those known to attend with a softmax over the patches of the image "
        f"({timm.KNOWN}); if it does, {register}"
    )


def refuse(model: nn.Module, reason: str) -> UnsupportedModelError:
    """Error for a model that is refused for a reason."""
    return UnsupportedModelError(
        f"vitlens cannot show the attention of {model_name(model)}: {reason}."
    )


def require_size(
    model: nn.Module,
    image: tuple[int, int],
    *,
    only: tuple[int, int] | None = None,
    patch: tuple[int, int] = (1, 1),
) -> None:
    """Raise ValueError unless the image has the `only` (height, width), and patches divide it."""
    got, built, sides = (" × ".join(map(str, size or ())) for size in (image, only, patch))
    refused = f"{model_name(model)} does not take this size"
    if only is not None and tuple(image) != tuple(only):
        raise ValueError(f"{refused}: it was built for {built}, got {got}.")
    if any(side % length for side, length in zip(image, patch, strict=True)):
        raise ValueError(f"{refused}: patches of {sides} pixels do not divide images of {got}.")


def gated(modules: list[list[tuple[str, nn.Module]]]) -> bool:
    """True if attention outputs pass a learned gate, as in Eva and NaFlex, which the maps leave out."""
    return any(
        getattr(module, "gate", None) is not None for layer in modules for _, module in layer
    )


def head_count(attention: nn.Module) -> int:
    """Number of heads of an attention module or pool."""
    for module in attention.modules():
        if count := getattr(module, "num_heads", None) or getattr(
            module, "num_attention_heads", None
        ):
            return count
    raise ValueError(f"{type(attention).__name__} has no number of heads (num_heads).")


def token_grid(model: nn.Module, image: tuple[int, int]) -> TokenGrid:
    """The `TokenGrid` of a supported model for an input of (height, width) pixels."""
    return family(model).grid(image)


def pooled(model: nn.Module, images: Tensor) -> Tensor:
    """(B, D) features: the input of the classifier, or the output of a model without one."""
    adapter = family(model)
    if type(adapter) is _library("timm").Timm:
        return model.forward_head(model.forward_features(images), pre_logits=True)
    if adapter.classes == 0:
        return adapter.run(images)
    tokens = []
    with hooked(
        [(adapter.blocks[-1].register_forward_hook, lambda _, args, output: tokens.append(output))]
    ):
        adapter.run(images)
    return adapter.head(tokens[-1], pre_logits=True)


def qualified_name(thing: object) -> str:
    """Module and class of an object, as in 'timm.models.beit.Beit'."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def short_name(model: nn.Module) -> str:
    """Name by which `load_model` opened a model, or else its architecture by its configuration, the origin of its
    weights (transformers), or its class."""
    if name := vars(model).get("opened_as"):
        return name
    architecture = (getattr(model, "pretrained_cfg", None) or {}).get("architecture")
    origin = getattr(getattr(model, "config", None), "name_or_path", None)
    return architecture or (
        Path(origin).name if isinstance(origin, str) and origin else type(model).__name__
    )


def model_name(model: nn.Module) -> str:
    """Architecture and class of a model, for messages."""
    name, kind = short_name(model), type(model).__name__
    return kind if name == kind else f"{name} ({kind})"


def title(model: nn.Module) -> str:
    """Name of a model for figures: `short_name`, with the sizes that differ from those in it, as in
    "vit_tiny_patch16_224, patch 8".

    >>> vitlens.models.title(model)
    'vit_tiny_patch16_224'
    """
    model = family(model).model
    name, embed = short_name(model), getattr(model, "patch_embed", None)
    sizes = ((r"patch(\d+)", "patch_size", "patch {}"), (r"_(\d{2,4})$", "img_size", "{} px"))
    parts = [name]
    for pattern, attribute, words in sizes:
        named, built = re.search(pattern, name.split(".")[0]), getattr(embed, attribute, None)
        if named and built and tuple(built) != (int(named[1]),) * 2:
            parts.append(words.format(" × ".join(map(str, dict.fromkeys(built)))))
    return ", ".join(parts)


@contextlib.contextmanager
def hooked(hooks: Iterable[tuple[Callable, Callable]]) -> Iterator[None]:
    """Register hooks, (method of a module that registers one, hook), for this block and this thread."""
    thread = threading.get_ident()

    def here(hook: Callable) -> Callable:
        return lambda *args: hook(*args) if threading.get_ident() == thread else None

    with contextlib.ExitStack() as stack:
        for register, hook in hooks:
            stack.enter_context(register(here(hook)))
        yield


def read_tokens(grid: TokenGrid, prefix: Sequence[str]) -> tuple[list[int], list[str]]:
    """Positions of the tokens whose mean the head reads, and their names: prefix tokens, or one name for all others."""
    read = grid.readout.nonzero().flatten().tolist()
    if read[-1] < grid.prefix:
        return read, [prefix[position] for position in read]
    return read, ["mean of the patches" if read[0] >= grid.prefix else "mean of all tokens"]


def states_preprocessing(model: nn.Module) -> bool:
    """False if the preprocessing is a guess: for timm's and unknown models without a `pretrained_cfg`."""
    return hasattr(model, "pretrained_cfg") or type(family(model)) is not _library("timm").Timm


def label_names(model: nn.Module) -> list[str] | None:
    """Names of the classes, or None. transformers numbers classes without names: LABEL_0, LABEL_1 …"""
    names = getattr(model, "label_names", None)
    numbered = getattr(getattr(model, "config", None), "id2label", None) or {}
    if names is not None or not known(model) or set(numbered) != set(range(len(numbered))):
        return names
    names = [numbered[number] for number in range(len(numbered))]
    return None if all(re.fullmatch(r"LABEL_\d+", name) for name in names) else names


def embeds_texts(model: nn.Module) -> bool:
    """True if the model has a text tower with embeddings in the space of `pooled`."""
    return hasattr(model, "get_text_features") or hasattr(model, "encode_text")


def embed_texts(model: nn.Module, prompts: list[str], tokenizer: Callable | None = None) -> Tensor:
    """(N, D) embeddings of prompts, in the space of `pooled`. tokenizer: makes the input of the text tower, by default
    the model's own. Raises ValueError for a model without a text tower, and OSError without a tokenizer."""
    if not embeds_texts(model):
        raise ValueError(
            f"{model_name(model)} has no text tower to embed a text. Open a CLIP or SigLIP model with both towers, or "
            "compare with an image."
        )
    library = "transformers" if hasattr(model, "get_text_features") else "open_clip"
    return _library(library).embed_texts(model, prompts, tokenizer)
