"""Choices in a Vision Transformer that a recipe can make, and how they become timm's keywords.

What timm builds by keywords is left to it; the rest is `vitlens_vit`, whose parts are in `vitlens.train.parts`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

SIZES = {
    "img_size": "image_size", "patch_size": "patch_size", "embed_dim": "width", "depth": "depth", "num_heads": "heads",
    "mlp_ratio": "mlp_ratio",
}  # fmt: skip
RATES = {"drop_path_rate": "drop_path", "patch_drop_rate": "patch_drop", "pos_drop_rate": "dropout",
         "proj_drop_rate": "dropout"}  # fmt: skip
"""timm's keywords for what a recipe has settings of its own for."""
NAME = "vitlens_vit"
"""The architecture with parts that timm has no keywords for."""
PLAIN = re.compile(rf"vit_(tiny|small|base|large|huge)_patch\d+_\d+|{NAME}")
"""Architectures of timm that are nothing but their sizes, so that a choice is all that changes."""


@dataclass(frozen=True)
class Choice:
    """One of the values of a setting; the first of each setting changes nothing."""

    setting: str
    """The recipe's field."""
    name: str | int
    """The value, as in `--set positions=rotary`."""
    title: str
    """For people, in figures and tables."""
    changes: str
    """What it does to the model."""
    source: str
    """The publication that defines it."""
    keywords: dict = field(default_factory=dict)
    """What timm is told."""
    own: bool = False
    """Whether timm has no keyword for it, so that `vitlens_vit` is told, too."""


PAPER = "Dosovitskiy et al. 2021"
NO_TABLE, NO_CLASS_TOKEN = {"pos_embed": "none"}, {"class_token": False}
# fmt: off
CHOICES = (
    Choice("positions", "learned-1d", "learned, 1-D", "One learned vector for each token, added to it.",
           f"{PAPER}, section 3.1"),
    Choice("positions", "none", "none", "The image is a bag of patches.", f"{PAPER}, D.4 and Table 8", NO_TABLE),
    Choice("positions", "learned-2d", "learned, 2-D",
           "Half of the vector is that of the column, half that of the row; prefix tokens have none.",
           f"{PAPER}, D.4 and Table 8", NO_TABLE, own=True),
    Choice("positions", "sinusoidal", "sines and cosines, 2-D",
           "Fixed sines and cosines of row and column; prefix tokens have none.",
           "Vaswani et al. 2017; in two dimensions Beyer et al. 2022", NO_TABLE, own=True),
    Choice("positions", "relative-1d", "relative, 1-D",
           "In every layer, query · learned vector of the offset in the sequence is added to the logit of two patches.",
           f"{PAPER}, D.4 and Table 8; Shaw et al. 2018", NO_TABLE, own=True),
    Choice("positions", "relative-2d", "relative, 2-D",
           "In every layer and head, a learned number for the offset in rows and columns is added to the logit.",
           "Liu et al. 2021 (Swin)", NO_TABLE, own=True),
    Choice("positions", "rotary", "rotary",
           "In every layer, queries and keys of patches are rotated by angles that grow with row and column.",
           "Su et al. 2021; in two dimensions Heo et al. 2024 (RoPE-Axial)", NO_TABLE, own=True),
    Choice("positions_at", "stem", "at the stem", "Positions are added once.", f"{PAPER}, section 3.1"),
    Choice("positions_at", "every-layer", "in every layer", "Every layer adds a learned table of its own to its input.",
           f"{PAPER}, D.4 and Table 8", own=True),
    Choice("positions_at", "every-layer-shared", "in every layer, shared",
           "Every layer adds the same learned table to its input.", f"{PAPER}, D.4 and Table 8", own=True),
    Choice("readout", "class-token", "class token", "The head reads a learned token beside the patches.",
           f"{PAPER}, section 3.1"),
    Choice("readout", "mean", "mean of patches", "The head reads the mean of the patches; there is no class token.",
           f"{PAPER}, D.3 and Fig. 9", {"global_pool": "avg", "fc_norm": False} | NO_CLASS_TOKEN),
    Choice("readout", "attention-pool", "attention pool",
           "The head reads what a learned query attends to after the last layer; there is no class token.",
           "Zhai et al. 2022 (Scaling Vision Transformers)", {"global_pool": "map"} | NO_CLASS_TOKEN),
    Choice("registers", 0, "no registers", "There are no tokens beside the patches and the class token.",
           f"{PAPER}, section 3.1"),
    Choice("registers", 4, "4 registers", "Four learned tokens that no head reads are beside the patches.",
           "Darcet et al. 2024", {"reg_tokens": 4}),
    Choice("tokenizer", "patches", "patches", "A patch becomes a token by one linear map of its pixels.",
           f"{PAPER}, section 3.1"),
    Choice("tokenizer", "conv-stem", "convolution stem",
           "3 × 3 convolutions of stride 2, with batch normalization and ReLU, halve the image down to the grid.",
           "Xiao et al. 2021 (Early Convolutions)", own=True),
    Choice("tokenizer", "shifted-patches", "shifted patches",
           "A token comes from its patch and four copies of it, shifted by half a patch along the diagonals.",
           "Lee et al. 2021 (SPT)", own=True),
    Choice("attention", "plain", "plain attention", "Every token attends to all tokens.", f"{PAPER}, section 3.1"),
    Choice("attention", "locality", "locality attention",
           "Logits are divided by a learned temperature of the head, and no token attends to itself.",
           "Lee et al. 2021 (LSA)", own=True),
    Choice("attention", "axial", "axial attention",
           "Every layer becomes two, with an MLP each: patches attend along their row, then along their column. The "
           "second's map times the first's is a map over the image.",
           f"{PAPER}, D.6 and Fig. 13; Ho et al. 2019", own=True),
    Choice("equivariance", "none", "one copy", "A picture is seen as it is.", f"{PAPER}, section 3.1"),
    Choice("equivariance", "flips", "averaged over flips",
           "Tokens are the mean of those of the picture and of its mirror image, turned back.",
           "Puny et al. 2022 (Frame Averaging), with all of the group", own=True),
    Choice("equivariance", "rotations", "averaged over rotations",
           "Tokens are the mean of those of the picture in four quarter turns, turned back.",
           "Puny et al. 2022 (Frame Averaging), with all of the group", own=True),
)
# fmt: on
SETTINGS = {setting: {c.name: c for c in CHOICES if c.setting == setting} for setting in [c.setting for c in CHOICES]}
"""All choices, keyed by (setting, name)."""
TABLES = ("learned-1d", "learned-2d")
"""Positions that are a learned table, which every layer can have."""
IN_LAYERS = ("relative-1d", "relative-2d", "rotary")
"""Choices of `positions` that attention itself adds, rather than the tokens."""


def chosen(recipe) -> list[Choice]:
    """The choices of a recipe that change something."""
    picked = [(names, names[getattr(recipe, setting)]) for setting, names in SETTINGS.items()]
    return [choice for names, choice in picked if choice is not next(iter(names.values()))]


def architecture(recipe) -> str:
    """The name of the architecture that timm builds: the recipe's, or `vitlens_vit`."""
    return NAME if any(choice.own for choice in chosen(recipe)) else recipe.architecture


def arguments(recipe) -> dict:
    """Keywords for `timm.create_model(architecture(recipe), …)`, without those that only training needs."""
    found = {} if recipe.init else {keyword: getattr(recipe, name) for keyword, name in SIZES.items()}
    for choice in chosen(recipe):
        found |= choice.keywords | ({choice.setting: choice.name} if choice.own else {})
    classes = recipe.num_classes if recipe.objective == "labels" else 0  # 0: no head for classes
    return {**found, **recipe.model_kwargs, "num_classes": classes}


def check_model(r) -> None:
    """Raise ValueError for sizes, choices and keywords of a recipe that no model can be built of."""
    if r.image_size < r.patch_size or r.image_size % r.patch_size and not (r.init or r.continues):
        raise ValueError(
            f"{r.image_size} pixels do not divide into patches of {r.patch_size}; the rest would never be seen. Choose "
            "an image_size that is a multiple of patch_size."
        )
    if r.width % r.heads:
        raise ValueError(f"A width of {r.width} does not divide among {r.heads} heads. Choose a multiple of {r.heads}.")
    taken = {**RATES, "num_classes": "num_classes", **({} if r.init else SIZES)}
    for keyword, value in r.model_kwargs.items():
        if keyword in taken or keyword in SETTINGS and not r.init:
            raise ValueError(f"model.{keyword} has a setting of its own; set {taken.get(keyword, keyword)} instead.")
        if value is None and not r.init:
            raise ValueError(
                f"model.{keyword} is null, which timm takes for its default; leave it out, or set a value."
            )
    if r.init and (r.head != "linear" or r.patch_drop):
        raise ValueError("A run that starts from a model (init) has a linear head and drops no patches.")
    for choice in chosen(r):
        what = f"{choice.setting}={choice.name}"
        if r.init:
            raise ValueError(f"{choice.setting} comes with the model that the run starts from, and cannot be set.")
        for keyword in choice.keywords:
            if keyword in r.model_kwargs:
                raise ValueError(f"model.{keyword} is a part of {what}; set one of the two.")
        if choice.own and not PLAIN.fullmatch(r.architecture):
            raise ValueError(
                f"{what} is for timm's plain Vision Transformers, such as vit_tiny_patch16_224, and the architecture "
                f"{r.architecture} is none of them. Choose another one, or leave the setting out."
            )
    if architecture(r) == NAME:
        check({**arguments(r), "patch_drop_rate": r.patch_drop})


def check(asked: dict) -> None:
    """Raise ValueError for keywords that `vitlens_vit` cannot be built with."""
    asked = {"embed_dim": 768, "num_heads": 12, "img_size": 224, "patch_size": 16} | asked
    own = {setting: asked.get(setting, next(iter(names))) for setting, names in SETTINGS.items()}
    for setting, name in own.items():
        if name not in SETTINGS[setting]:
            raise ValueError(f"{setting} must be one of {', '.join(map(str, SETTINGS[setting]))}, got {name!r}.")
    _check_positions(asked, own["positions"], own["positions_at"])
    _check_tokenizer(asked, own["tokenizer"])
    _check_attention(asked, own["attention"])
    _check_equivariance(asked, own["equivariance"])
    for keyword in ("dynamic_img_size", "dynamic_img_pad", "no_embed_class"):
        if asked.get(keyword):
            raise ValueError(f"{NAME} is built for images of one size and adds positions to all tokens: no {keyword}.")


def _check_positions(asked: dict, positions: str, at: str) -> None:
    width = asked["embed_dim"]
    if at != "stem" and (positions not in TABLES or positions == "learned-1d" and asked.get("pos_embed") == "none"):
        raise ValueError(f"positions_at={at} is for learned tables; set positions to {' or '.join(TABLES)}.")
    if positions != "learned-1d" and asked.get("pos_embed", "none") != "none":
        raise ValueError(
            f"pos_embed={asked['pos_embed']} adds a learned table beside positions={positions}; leave pos_embed out."
        )
    per, what = {"learned-2d": (2, "width"), "sinusoidal": (4, "width"), "rotary": (4, "head width")}.get(
        positions, (1, "width")
    )
    size = width // asked["num_heads"] if what == "head width" else width
    if size % per:
        raise ValueError(f"positions={positions} needs the {what} to be a multiple of {per}, got {size}.")
    if asked.get("patch_drop_rate") and (at != "stem" or positions in IN_LAYERS):
        raise ValueError(
            "patch_drop leaves patches out after the stem, and these positions need all of them in every layer; set "
            "patch_drop=0 and patch_drop_until=0."
        )


def _check_tokenizer(asked: dict, tokenizer: str) -> None:
    image, patch, width = asked["img_size"], asked["patch_size"], asked["embed_dim"]
    sides = image if isinstance(image, (tuple, list)) else (image,)
    if tokenizer != "patches" and any(side % patch for side in sides):
        raise ValueError(f"tokenizer={tokenizer} needs an image_size that patch_size {patch} divides, got {image}.")
    if tokenizer == "conv-stem" and (patch < 2 or patch & (patch - 1)):
        raise ValueError(f"tokenizer=conv-stem halves the image, so patch_size must be a power of 2, got {patch}.")
    if tokenizer == "conv-stem" and (2 * width % patch or 2 * width < 4 * patch):  # 3 would pass for an image's
        raise ValueError(
            "tokenizer=conv-stem starts with 2 · width / patch_size channels, which must be a whole number from 4 up; "
            f"got width {width} and patch_size {patch}."
        )
    if tokenizer == "shifted-patches" and patch % 2:
        raise ValueError(f"tokenizer=shifted-patches shifts by half a patch, so patch_size must be even, got {patch}.")


def _check_attention(asked: dict, attention: str) -> None:
    beside = asked.get("class_token", True) + asked.get("reg_tokens", 0)
    if attention == "axial" and beside:
        raise ValueError(
            "attention=axial is along rows and columns, in which class token and registers have no place; set "
            "readout=mean and registers=0."
        )
    if attention == "axial" and asked.get("patch_drop_rate"):
        raise ValueError("attention=axial needs whole rows and columns; set patch_drop=0 and patch_drop_until=0.")
    if attention == "locality" and not beside and asked["img_size"] == asked["patch_size"]:
        raise ValueError("attention=locality hides a token from itself, and one patch has no other to see; use more.")


def _check_equivariance(asked: dict, equivariance: str) -> None:
    image = asked["img_size"]
    if equivariance != "none" and asked.get("patch_drop_rate"):
        raise ValueError(
            f"equivariance={equivariance} needs all patches of every copy; set patch_drop=0 and patch_drop_until=0."
        )
    if equivariance == "rotations" and isinstance(image, (tuple, list)) and image[0] != image[1]:
        raise ValueError(f"equivariance=rotations needs square images, got {image[0]} × {image[1]}.")
