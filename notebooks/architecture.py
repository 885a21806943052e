"""A Vision Transformer and one of its layers as a drawing, from a model and one image (paper, Fig. 1)."""

from __future__ import annotations

import base64
import html
import io
import re
import zlib
from dataclasses import dataclass

import torch
from PIL import Image
from torch import nn

from vitlens.models import class_count, output_kind, preprocess, restore, title, top_classes
from vitlens.names import require_known
from vitlens.recorder.grid import TokenGrid
from vitlens.recorder.supported import MLPS, NORMS, family, head_count, read_tokens, unwrap
from vitlens.tokens import features

PARTS = {
    "image": "#eeeeee",
    "patches": "#dddddd",
    "projection": "#fde8cf",
    "positions": "#d9ead3",
    "attention": "#d0e0f4",
    "mlp": "#e3d5ee",
    "head": "#f4cccc",
}
"""Parts that `architecture` can highlight, with their colors."""
LEFT, RIGHT = 190, 604  # edges of the sequence
MIDDLE = (LEFT + RIGHT) / 2
HEAD = 124, 48  # top and height of the boxes, from the outputs down to the tokens
LAYERS = 210, 104
POSITIONS = 342, 34
PROJECTION = 404, 36
TOKENS = 470, 38
GAP = 4  # between an arrow and a box; an arrow starts half as far from its box
IMAGE = 16, 440, 140  # left, top and side of the whole image
MOST_TOKENS, MOST_PREFIX = 9, 5  # that are drawn one by one
SHORT = {" token": "", "distillation": "dist.", "register": "reg."}
STREAM, BRANCH = 690, 820  # x of the residual stream and of the parts of a layer
BAR = 160  # length of the bar of a probability of 1
FONT = "font-family=\"Helvetica, Arial, 'DejaVu Sans', sans-serif\""


@dataclass(frozen=True, repr=False)
class Drawing:
    """A drawing for notebooks: `svg`, the text of an SVG file, and `alt`, its description."""

    svg: str
    alt: str

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return self.alt


def architecture(model: nn.Module, image, *, highlight: str | None = None) -> Drawing:
    """A model with its sizes, its patches of an image and its classes, and one layer in detail (paper, Fig. 1).

    image: a source of `load_image`. highlight: one of `PARTS`, for a small drawing with this part in color. The layer
    is left out if attention and MLP are not added one after the other. Raises UnsupportedModelError for models that
    `capture` refuses, and ValueError for an unknown part.

    >>> figure = architecture.architecture(model, cat)
    """
    if highlight is not None:
        require_known(highlight, PARTS, "highlight")
    model = unwrap(model)
    about = family(model)
    batch = preprocess(model, image, size=about.built_size)
    with torch.no_grad():
        layers, logits = features(model, batch)
    grid = about.grid(tuple(batch.shape[-2:]))
    sizes = _Sizes(
        grid=grid,
        channels=batch.shape[1],
        values=round(grid.patch[0] * grid.patch[1] * batch.shape[1]),
        depth=len(layers),
        width=layers[0].shape[-1],
        classes=class_count(model),
    )
    if highlight:
        return _parts_in_a_line(title(model), sizes, highlight)
    draw = _Pen(restore(model, batch)[0])
    _draw_image(draw, sizes)
    read, words = _readout(about, grid)
    first = _draw_tokens(draw, about, grid, read)
    _draw_embedding(draw, about, sizes, first)
    _draw_layers(draw, sizes)
    _draw_box(draw, HEAD, LEFT, PARTS["head"])
    draw.text(MIDDLE, 144, words)
    outputs = f"{logits.shape[-1]} features"
    if sizes.classes:
        outputs = f"head: {sizes.width} → {sizes.classes} logits"
    draw.text(MIDDLE, 163, outputs)
    draw.arrow(LEFT + 176, 120, LEFT + 176, 98)
    if sizes.classes and logits.dim() == 2:
        is_probability = output_kind(model) != "value"
        _draw_classes(draw, top_classes(model, logits, 3)[0], is_probability)
    opened = _layer(draw, about, grid.tokens, sizes.width)
    alt = (
        f"{title(model)}: {grid.rows} × {grid.cols} patches of an image become {grid.tokens} tokens of {sizes.width} "
        f"numbers, pass {sizes.depth} layers. {words.capitalize()}, {sizes.classes or sizes.width} outputs. {opened}"
    ).strip()
    return Drawing(draw.page(960 if opened else 620, 632, alt), alt)


@dataclass(frozen=True)
class _Sizes:
    """Sizes of a model. values: numbers in a patch. width: numbers in a token."""

    grid: TokenGrid
    channels: int
    values: int
    depth: int
    width: int
    classes: int

    @property
    def image(self) -> str:
        return f"{self.grid.image[0]} × {self.grid.image[1]}"

    @property
    def sequence(self) -> str:
        return f"{self.grid.tokens} × {self.width}"


def _draw_image(draw: _Pen, sizes: _Sizes) -> None:
    """Draw the whole image with the edges of its patches."""
    grid = sizes.grid
    height, width = grid.patch
    lines = [f"M0,{k * height:g} H{grid.cols * width:g}" for k in range(grid.rows + 1)]
    lines += [f"M{k * width:g},0 V{grid.rows * height:g}" for k in range(grid.cols + 1)]
    left, top, side = IMAGE
    draw.photo(left, top, side, (0, 0, grid.image[1], grid.image[0]), "".join(lines))
    draw.text(left, 600, f"Image: {sizes.image} pixels × {sizes.channels}", 13, "start")
    patches = f"{grid.rows} × {grid.cols} patches of {height:g} × {width:g} pixels"
    draw.text(left, 618, patches, 13, "start")


def _tokens_to_draw(grid: TokenGrid) -> tuple[list[int | None], list[int | None]]:
    """Numbers of prefix tokens and of patches to draw, with None for those that are left out."""
    prefix = list(range(grid.prefix))
    if grid.prefix > MOST_PREFIX:
        prefix = [0, 1, 2, None, grid.prefix - 1]
    room = MOST_TOKENS - 1 - len(prefix)
    patches = list(range(grid.prefix, grid.prefix + min(room, grid.patches)))
    if grid.patches > room:
        patches += [None, grid.tokens - 1]
    return prefix, patches


def _draw_tokens(draw: _Pen, about, grid: TokenGrid, read: list[int]) -> float:
    """Draw the sequence of tokens, with arrows up to the head from those it reads. Returns the left of the patches."""
    prefix, patches = _tokens_to_draw(grid)
    tokens = prefix + patches
    top, side = TOKENS
    height, width = grid.patch
    step = (RIGHT - LEFT) / len(tokens)
    for k, token in enumerate(tokens):
        x = LEFT + step * (k + 0.5)
        if token is None:
            draw.text(x, 494, "…", 18)
            continue
        draw.text(x, 522, str(token), 11)
        if token < grid.prefix:
            _draw_prefix(draw, x, about.prefix[token])
        else:
            row, col = divmod(token - grid.prefix, grid.cols)
            view = col * width, row * height, width, height
            draw.photo(x - side / 2, top, side, view)
            _draw_arrow_up(draw, x, TOKENS, PROJECTION)
            _draw_arrow_up(draw, x, PROJECTION, POSITIONS)
        _draw_arrow_up(draw, x, POSITIONS, LAYERS)
        if token in read:
            inside = min(x, RIGHT - 30)
            draw.arrow(inside, 194, inside, 176)
    return LEFT + step * (len(prefix) + 0.5) - side / 2


def _draw_prefix(draw: _Pen, x: float, name: str) -> None:
    """Draw a prefix token, which needs no projection."""
    top, side = TOKENS
    for long, short in SHORT.items():
        name = name.replace(long, short)
    draw.box(x - side / 2, top, side, side, PARTS["patches"])
    draw.text(x, 493, name, 10.5)
    _draw_arrow_up(draw, x, TOKENS, POSITIONS)


def _draw_arrow_up(draw: _Pen, x: float, lower: tuple[int, int], upper: tuple[int, int]) -> None:
    """Draw an arrow between two boxes, each given by its top and its height."""
    draw.arrow(x, lower[0] - GAP / 2, x, sum(upper) + GAP)


def _draw_box(draw: _Pen, place: tuple[int, int], left: float, fill: str) -> None:
    """Draw a box up to the right edge of the sequence."""
    top, height = place
    draw.box(left, top, RIGHT - left, height, fill)


def _draw_embedding(draw: _Pen, about, sizes: _Sizes, first: float) -> None:
    """Draw the projection of the patches, whose left edge is `first`, and the position embeddings."""
    draw.path(f"M160,540 H{(first + RIGHT) / 2:.0f} V530", head=True)
    if sizes.grid.prefix:
        learned = "learned vectors →" if sizes.grid.prefix > 1 else "a learned vector →"
        draw.text(LEFT - 2, 426, learned, 12.5, "end")
    _draw_box(draw, PROJECTION, first, PARTS["projection"])
    shape = sizes.width, sizes.values
    is_linear = any(
        (len(weight), weight[0].numel()) == shape
        for weight in about.embedding.parameters()
        if weight.ndim > 1
    )
    how = "linear projection" if is_linear else type(about.embedding).__name__
    draw.text((first + RIGHT) / 2, 427, f"{how}: {sizes.values} → {sizes.width}")
    table = about.positions()
    if table is None:
        _draw_box(draw, POSITIONS, LEFT, "none")
        draw.text(MIDDLE, 364, "no table of position embeddings")
    else:
        _draw_box(draw, POSITIONS, LEFT, PARTS["positions"])
        rows, cols = table.shape[:2]
        words = f"+ position embeddings: {rows} × {cols} places × {sizes.width}"
        draw.text(MIDDLE, 364, words)


def _draw_layers(draw: _Pen, sizes: _Sizes) -> None:
    """Draw the encoder as a pile of layers."""
    top, height = LAYERS
    for shift in (12, 6, 0):
        fill = "#ffffff" if shift else "#eef3fa"
        draw.box(LEFT + shift, top - shift, RIGHT - LEFT - 12, height, fill)
    draw.text(MIDDLE - 6, 236, f"{sizes.depth} encoder layers", 15, weight="bold")
    lines = (
        "attention: tokens read from each other",
        "MLP: each token on its own",
        f"{sizes.sequence} in, {sizes.sequence} out",
    )
    for k, line in enumerate(lines):
        draw.text(MIDDLE - 6, 259 + 21 * k, line)


def _draw_classes(draw: _Pen, classes: list[tuple[str, float]], is_probability: bool) -> None:
    """Draw the highest outputs, with a bar for each probability."""
    for k, (name, score) in enumerate(classes):
        y = 34 + 25 * k
        name = name.split(",")[0]
        if len(name) >= 22:
            name = name[:20] + "…"
        length = BAR * score if is_probability else 0
        words = f"{score:.0%}" if is_probability else f"{score:.3g}"
        draw.text(LEFT + 170, y, name, anchor="end")
        draw.box(LEFT + 182, y - 12, length, 15, "#0173b2", 0)
        draw.text(LEFT + 190 + length, y, words, 13, "start")


def _readout(about, grid) -> tuple[list[int], str]:
    """The tokens that the head reads, and words for it."""
    if grid.readout is None:
        return [], "an attention pool reads all tokens" if about.pool else "pooling of the tokens"
    read, names = read_tokens(grid, about.prefix)
    return read, "the head reads the " + " and the ".join(names)


def _layer(draw: _Pen, about, tokens: int, width: int) -> str:
    """Draw the parts of the first layer at the right, and return words for them, "" if they are not in a sequence."""
    block, modules = about.blocks[0], about.attention()[0]
    parts, attention = dict(block.named_modules()), modules[0][1]
    norms = [type(part).__name__ for name, part in parts.items() if re.fullmatch(NORMS, name)]
    if about.stream_problem or len(modules) != 1 or attention is block or len(norms) != 2:
        return ""
    hidden, activation = _mlp_words(parts, width)
    heads = head_count(attention)
    head_width = (
        getattr(attention, "head_dim", None)
        or getattr(attention, "attention_head_size", None)
        or width // heads
    )
    is_scaled = any(type(part).__name__ == "LayerScale" for part in parts.values())
    draw.box(640, 24, 306, 594, "none")
    draw.path("M604,200 L640,40 M592,314 L640,600", dash=True)
    draw.text(793, 52, f"One of the {len(about.blocks)} layers", 15, weight="bold")
    draw.path(f"M{STREAM},584 V78", head=True, wide=3)
    draw.text(652, 606, f"tokens: {tokens} × {width}", 13, "start")
    draw.svg.append('<g transform="translate(668 330) rotate(-90)">')
    draw.text(0, 0, "residual stream: results are added", 12.5)
    draw.svg.append("</g>")
    attends = [
        f"Self-attention, {heads} heads",
        f"q, k, v: {tokens} × {head_width} in each head",
        f"A = softmax(q kᵀ / √{head_width})",
        "A v, then one matrix for all heads",
    ]
    mlp = ["MLP, each token on its own", hidden]
    if activation:
        mlp.append(f"{activation} in between")
    added = "scaled, added" if is_scaled else "added"
    _draw_branch(draw, 556, norms[0], PARTS["attention"], attends, added)
    _draw_branch(draw, 322, norms[1], PARTS["mlp"], mlp, added)
    return f"A layer: {norms[0]}, self-attention with {heads} heads, added; {norms[1]}, MLP {hidden}, added."


def _mlp_words(parts: dict[str, nn.Module], width: int) -> tuple[str, str]:
    """Widths of the MLP of a layer, or the name of its class, and the name of its activation or ""."""
    names = [name for name in parts if re.fullmatch(MLPS, name)]
    modules = [module for name in names for module in parts[name].modules()]
    linear = [module for module in modules if isinstance(module, nn.Linear)]
    words = type(modules[0]).__name__
    if len(linear) == 2 and linear[0].out_features == linear[1].in_features:
        words = f"{width} → {linear[0].out_features} → {width}"
    for module in modules:
        if activation := re.search("GELU|SiLU|ReLU|Tanh", type(module).__name__):
            return words, activation[0]
    return words, ""


def _draw_branch(draw: _Pen, low: int, norm: str, fill: str, lines: list[str], added: str) -> None:
    """Draw a branch of the layer, which leaves the residual stream at the height `low` and is added further up."""
    high = low - 74 - 21 * len(lines)  # top of the box
    plus = high - 22
    draw.path(f"M{STREAM},{low} H{BRANCH} V{low - 10}", head=True)
    draw.box(740, low - 40, 160, 28, "#f2f2f2")
    draw.text(BRANCH, low - 21, norm)
    draw.arrow(BRANCH, low - 42, BRANCH, low - 60)
    draw.box(708, high, 228, low - 62 - high, fill)
    for k, line in enumerate(lines):
        draw.text(822, high + 21 + 21 * k, line, 13, weight="normal" if k else "bold")
    draw.path(f"M{BRANCH},{high - 2} V{plus} H704", head=True)
    draw.text(834, high - 18, added, 12, "start")
    draw.svg.append(
        f'<circle cx="{STREAM}" cy="{plus}" r="11" fill="white" stroke="#333" stroke-width="2"/>'
    )
    draw.path(f"M684,{plus} H696 M{STREAM},{plus - 6} V{plus + 6}", wide=2)


def _parts_in_a_line(name: str, sizes: _Sizes, highlight: str) -> Drawing:
    """The parts in a line, each with the shape that leaves it."""
    grid = sizes.grid
    shapes = {
        "image": f"{sizes.image} × {sizes.channels}",
        "patches": f"{grid.patches} × {sizes.values}",
        "projection": f"{grid.patches} × {sizes.width}",
        "positions": sizes.sequence,
        "attention": sizes.sequence,
        "mlp": sizes.sequence,
        "head": str(sizes.classes or sizes.width),
    }
    draw = _Pen()
    for k, (part, shape) in enumerate(shapes.items()):
        x = 12 + 127 * k
        is_chosen = part == highlight
        draw.box(x, 30, 106, 32, PARTS[part] if is_chosen else "#ffffff")
        label = "MLP" if part == "mlp" else part
        draw.text(x + 53, 51, label, weight="bold" if is_chosen else "normal")
        draw.text(x + 53, 80, shape, 12)
        if k:
            draw.arrow(x - 19, 46, x - 3, 46)
    draw.box(510, 20, 251, 70, "none")
    draw.text(635, 14, f"× {sizes.depth}", 12)
    words = ", ".join(f"{part}: {shape}" for part, shape in shapes.items())
    alt = f"Parts of {name}: {words}. Highlighted: {highlight}."
    return Drawing(draw.page(888, 96, alt), alt)


class _Pen:
    """Elements of an SVG file. Coordinates in pixels."""

    def __init__(self, picture=None):
        self.svg, self.defined, self.name = [], "", ""
        if picture is not None:
            file = io.BytesIO()
            Image.fromarray(picture).save(file, "JPEG", quality=88)
            data = base64.b64encode(file.getvalue()).decode()
            self.name = f"p{zlib.crc32(file.getvalue()):08x}"
            height, width = picture.shape[:2]
            size = f'width="{width}" height="{height}"'
            self.defined = f'<image id="{self.name}" {size} href="data:image/jpeg;base64,{data}"/>'

    def text(
        self, x, y, words: str, size: float = 13.5, anchor: str = "middle", weight: str = "normal"
    ) -> None:
        look = f'font-size="{size}" text-anchor="{anchor}" font-weight="{weight}"'
        self.svg.append(f'<text x="{x:g}" y="{y:g}" {look} fill="#222">{html.escape(words)}</text>')

    def box(self, x, y, width, height, fill: str, line: float = 1) -> None:
        where = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self.svg.append(
            f'<rect {where} rx="{5 * line:g}" fill="{fill}" stroke="#777" stroke-width="{line:g}"/>'
        )

    def path(self, steps: str, head: bool = False, wide: float = 1.4, dash: bool = False) -> None:
        ends = ' marker-end="url(#tip)"' * head + ' stroke-dasharray="3 4"' * dash
        self.svg.append(
            f'<path d="{steps}" fill="none" stroke="#555" stroke-width="{wide}"{ends}/>'
        )

    def arrow(self, x1, y1, x2, y2) -> None:
        self.path(f"M{x1:g},{y1:g} L{x2:g},{y2:g}", head=True)

    def photo(self, x, y, side, view: tuple[float, ...], lines: str = "") -> None:
        """A part (left, top, width, height) of the image in a square, with lines over it."""
        where = f'x="{x:g}" y="{y:g}" width="{side}" height="{side}" viewBox="{" ".join(f"{v:g}" for v in view)}"'
        lines = (
            f'<path d="{lines}" stroke="white" stroke-width="{max(view) / 200:g}"/>'
            if lines
            else ""
        )
        self.svg.append(f'<svg {where}><use href="#{self.name}"/>{lines}</svg>')

    def page(self, width: int, height: int, alt: str) -> str:
        """The file."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{min(width, 860)}" '
            f'style="max-width:100%;height:auto" role="img" {FONT}><title>{html.escape(alt)}</title><defs>'
            f'{self.defined}<marker id="tip" markerUnits="userSpaceOnUse" markerWidth="9" markerHeight="9" '
            'refX="7" refY="4" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="#555"/></marker></defs>'
            f'<rect width="{width}" height="{height}" fill="white"/>{"".join(self.svg)}</svg>\n'
        )
