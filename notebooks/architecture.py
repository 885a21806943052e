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
    about = family(model := unwrap(model))
    batch = preprocess(model, image, size=about.built_size)
    with torch.no_grad():
        layers, logits = features(model, batch)
    grid, channels, depth, width = (
        about.grid(tuple(batch.shape[-2:])),
        batch.shape[1],
        len(layers),
        layers[0].shape[-1],
    )
    values, length = round(grid.patch[0] * grid.patch[1] * channels), f"{grid.tokens} × {width}"
    size, classes = f"{grid.image[0]} × {grid.image[1]}", class_count(model)
    if highlight:
        shapes = (
            f"{size} × {channels}",
            f"{grid.patches} × {values}",
            f"{grid.patches} × {width}",
            *[length] * 3,
        )
        return _strip(
            title(model),
            dict(zip(PARTS, (*shapes, str(classes or width)), strict=True)),
            highlight,
            depth,
        )

    draw = _Pen(restore(model, batch)[0])
    (high, wide), (tall, broad) = grid.patch, grid.image
    lines = [f"M0,{k * high:g} H{grid.cols * wide:g}" for k in range(grid.rows + 1)]
    lines += [f"M{k * wide:g},0 V{grid.rows * high:g}" for k in range(grid.cols + 1)]
    draw.photo(16, 440, 140, (0, 0, broad, tall), "".join(lines))
    draw.text(16, 600, f"Image: {size} pixels × {channels}", 13, "start")
    draw.text(
        16, 618, f"{grid.rows} × {grid.cols} patches of {high:g} × {wide:g} pixels", 13, "start"
    )
    ahead = [*range(grid.prefix)] if grid.prefix <= 5 else [0, 1, 2, None, grid.prefix - 1]
    room = 8 - len(ahead)
    behind = [*range(grid.prefix, grid.prefix + min(room, grid.patches))]
    behind += [None, grid.tokens - 1] if grid.patches > room else []
    shown = [*ahead, *behind]
    xs = [LEFT + (RIGHT - LEFT) / len(shown) * (k + 0.5) for k in range(len(shown))]
    read, words = _readout(about, grid)
    for x, token in zip(xs, shown, strict=True):
        if token is None:
            draw.text(x, 494, "…", 18)
            continue
        draw.text(x, 522, str(token), 11)
        if token < grid.prefix:
            draw.box(x - 19, 470, 38, 38, PARTS["patches"])
            draw.text(
                x,
                493,
                about.prefix[token]
                .replace(" token", "")
                .replace("distillation", "dist.")
                .replace("register", "reg."),
                10.5,
            )
            draw.arrow(x, 468, x, 380)
        else:
            row, col = divmod(token - grid.prefix, grid.cols)
            draw.photo(x - 19, 470, 38, (col * wide, row * high, wide, high))
            draw.arrow(x, 468, x, 444)
            draw.arrow(x, 402, x, 380)
        draw.arrow(x, 340, x, 318)
        if token in read:
            draw.arrow(min(x, RIGHT - 30), 194, min(x, RIGHT - 30), 176)
    first, middle = xs[len(ahead)] - 19, (LEFT + RIGHT) / 2
    draw.path(f"M160,540 H{(first + RIGHT) / 2:.0f} V530", head=True)
    if grid.prefix:
        draw.text(
            LEFT - 2,
            426,
            "learned vectors →" if grid.prefix > 1 else "a learned vector →",
            12.5,
            "end",
        )
    kinds = [
        w
        for w in about.embedding.parameters()
        if w.ndim > 1 and w[0].numel() == values and len(w) == width
    ]
    draw.box(first, 404, RIGHT - first, 36, PARTS["projection"])
    how = "linear projection" if kinds else type(about.embedding).__name__
    draw.text((first + RIGHT) / 2, 427, f"{how}: {values} → {width}")
    table = about.positions()
    draw.box(LEFT, 342, RIGHT - LEFT, 34, PARTS["positions"] if table is not None else "none")
    draw.text(
        middle,
        364,
        "no table of position embeddings"
        if table is None
        else f"+ position embeddings: {table.shape[0]} × {table.shape[1]} places × {width}",
    )
    for shift in (12, 6, 0):
        draw.box(
            LEFT + shift, 210 - shift, RIGHT - LEFT - 12, 104, "#ffffff" if shift else "#eef3fa"
        )
    draw.text(middle - 6, 236, f"{depth} encoder layers", 15, weight="bold")
    lines = (
        "attention: tokens read from each other",
        "MLP: each token on its own",
        f"{length} in, {length} out",
    )
    for k, line in enumerate(lines):
        draw.text(middle - 6, 259 + 21 * k, line)
    draw.box(LEFT, 124, RIGHT - LEFT, 48, PARTS["head"])
    draw.text(middle, 144, words)
    draw.text(
        middle,
        163,
        f"head: {width} → {classes} logits" if classes else f"{logits.shape[-1]} features",
    )
    draw.arrow(LEFT + 176, 120, LEFT + 176, 98)
    probable = output_kind(model) != "value"
    for k, (name, score) in enumerate(
        top_classes(model, logits, 3)[0] if classes and logits.dim() == 2 else []
    ):
        y, name, long = 34 + 25 * k, name.split(",")[0], 160 * score if probable else 0
        draw.text(LEFT + 170, y, name if len(name) < 22 else name[:20] + "…", anchor="end")
        draw.box(LEFT + 182, y - 12, long, 15, "#0173b2", 0)
        draw.text(LEFT + 190 + long, y, f"{score:.0%}" if probable else f"{score:.3g}", 13, "start")
    opened = _layer(draw, about, grid.tokens, width)
    alt = (
        f"{title(model)}: {grid.rows} × {grid.cols} patches of an image become {grid.tokens} tokens of {width} "
        f"numbers, pass {depth} layers. {words.capitalize()}, {classes or width} outputs. {opened}"
    )
    alt = alt.strip()
    return Drawing(draw.page(960 if opened else 620, 632, alt), alt)


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
    mlp = [
        each for name, part in parts.items() if re.fullmatch(MLPS, name) for each in part.modules()
    ]
    ends = [
        end
        for each in mlp
        if isinstance(each, nn.Linear)
        for end in (each.in_features, each.out_features)
    ]
    plain = len(ends) == 4 and ends[1] == ends[2]
    hidden = f"{width} → {ends[1]} → {width}" if plain else type(mlp[0]).__name__
    bend = [name for each in mlp for name in re.findall("GELU|SiLU|ReLU|Tanh", type(each).__name__)]
    heads = head_count(attention)
    each = (
        getattr(attention, "head_dim", None)
        or getattr(attention, "attention_head_size", None)
        or width // heads
    )
    scaled = any(type(part).__name__ == "LayerScale" for part in parts.values())
    draw.box(640, 24, 306, 594, "none")
    draw.path("M604,200 L640,40 M592,314 L640,600", dash=True)
    draw.text(793, 52, f"One of the {len(about.blocks)} layers", 15, weight="bold")
    draw.path("M690,584 V78", head=True, wide=3)
    draw.text(652, 606, f"tokens: {tokens} × {width}", 13, "start")
    draw.svg.append('<g transform="translate(668 330) rotate(-90)">')
    draw.text(0, 0, "residual stream: results are added", 12.5)
    draw.svg.append("</g>")
    attends = (
        f"q, k, v: {tokens} × {each} in each head",
        f"A = softmax(q kᵀ / √{each})",
        "A v, then one matrix for all heads",
    )
    for low, norm, fill, lines in (
        (556, norms[0], "attention", (f"Self-attention, {heads} heads", *attends)),
        (
            322,
            norms[1],
            "mlp",
            ("MLP, each token on its own", hidden, *[f"{name} in between" for name in bend[:1]]),
        ),
    ):
        high = low - 74 - 21 * len(lines)  # top of the box
        draw.path(f"M690,{low} H820 V{low - 10}", head=True)
        draw.box(740, low - 40, 160, 28, "#f2f2f2")
        draw.text(820, low - 21, norm)
        draw.arrow(820, low - 42, 820, low - 60)
        draw.box(708, high, 228, low - 62 - high, PARTS[fill])
        for k, line in enumerate(lines):
            draw.text(822, high + 21 + 21 * k, line, 13, weight="normal" if k else "bold")
        draw.path(f"M820,{high - 2} V{high - 22} H704", head=True)
        draw.text(834, high - 18, "scaled, added" if scaled else "added", 12, "start")
        draw.svg.append(
            f'<circle cx="690" cy="{high - 22}" r="11" fill="white" stroke="#333" stroke-width="2"/>'
        )
        draw.path(f"M684,{high - 22} H696 M690,{high - 28} V{high - 16}", wide=2)
    return f"A layer: {norms[0]}, self-attention with {heads} heads, added; {norms[1]}, MLP {hidden}, added."


def _strip(name: str, shapes: dict[str, str], highlight: str, depth: int) -> Drawing:
    """The parts in a line, each with the shape that leaves it."""
    draw = _Pen()
    for k, (part, shape) in enumerate(shapes.items()):
        x, chosen = 12 + 127 * k, part == highlight
        draw.box(x, 30, 106, 32, PARTS[part] if chosen else "#ffffff")
        draw.text(
            x + 53, 51, "MLP" if part == "mlp" else part, weight="bold" if chosen else "normal"
        )
        draw.text(x + 53, 80, shape, 12)
        if k:
            draw.arrow(x - 19, 46, x - 3, 46)
    draw.box(510, 20, 251, 70, "none")
    draw.text(635, 14, f"× {depth}", 12)
    words = ", ".join(f"{part}: {shape}" for part, shape in shapes.items())
    alt = f"Parts of {name}: {words}. Highlighted: {highlight}."
    return Drawing(draw.page(888, 96, alt), alt)


class _Pen:
    """Elements of an SVG file. Coordinates in pixels."""

    def __init__(self, picture=None):
        self.svg, self.defined, self.name = [], "", ""
        if picture is not None:
            Image.fromarray(picture).save(file := io.BytesIO(), "JPEG", quality=88)
            data, self.name = (
                base64.b64encode(file.getvalue()).decode(),
                f"p{zlib.crc32(file.getvalue()):08x}",
            )
            size = 'width="{1}" height="{0}"'.format(*picture.shape)
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
