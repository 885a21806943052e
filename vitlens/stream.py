"""The residual stream, taken apart exactly: what each head, MLP and patch writes into a logit, and what tokens know.

In a pre-norm Vision Transformer every head and every MLP adds a vector to the tokens, and nothing else touches them
before the final norm. Hold fixed what multiplies on the way out (what norms divide by, gates on the outputs of
attention, the weights of an attention pool) and a logit is a sum of what each of them wrote:

    found = contributions(model, images, "tabby")
    found.heads                                 # (B, L, H), and with the MLPs, the embedding and the biases:
    found.parts.sum(1)                          # (B,), the logits of the model
    direct(model, images, "tabby")              # (B, L, H, rows, cols), the heads' share patch by patch

Each function takes `model`, `images`, `target`, `against` and `names` as in `vitlens.attribution`, runs the model once
in eval mode, without autocast or TF32, and leaves it as it was. Autograd follows the residual stream and nothing else:
what the norms of the blocks are given is cut off from the graph. The sum is compared with the logit before anything is
returned. `lens` reads every token after any layer, plainly or `tuned`.

Raises UnsupportedModelError for models that a capture refuses, for blocks that normalize what they add or that vitlens
does not know, and where the parts do not add up to the logit; ValueError as `vitlens.attribution` does.

Shapes: B batch, L layers, H heads, T tokens = R prefix + P patches, D width.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from vitlens.attribution.balanced import held, held_fixed, leaf, product, require_sum
from vitlens.attribution.maps import attention_times_gradient, captured, checked, explaining, require_layers, score
from vitlens.attribution.target import Target, bound, of_features, resolved
from vitlens.data.files import write
from vitlens.recorder.layer import layer_number
from vitlens.recorder.record import Attention
from vitlens.recorder.supported import MLPS, NORMS, UnsupportedModelError, family, model_name, transformer
from vitlens.tokens import features

LENS = "lens/tuned.safetensors"  # in a folder of its own: timm 1.0.28 opens no folder with two .safetensors


@dataclass(frozen=True)
class Contributions:
    """What each part of a model adds to the logit of each image's class, or to the difference of two.

    logits: (B,) the model's own. embedding: (B,) of the tokens that enter the first layer. heads: (B, L, H). mlps:
    (B, L). pool: (B,) of the MLP of an attention pool, 0 where there is none. biases: (B,) of all biases behind the
    heads: those of the outputs of attention, of the final norm and of the head. parts: (B, parts) all of these, in the
    order of `names`; they add up to the logits.
    """

    logits: Tensor
    embedding: Tensor
    heads: Tensor
    mlps: Tensor
    pool: Tensor
    biases: Tensor

    @property
    def parts(self) -> Tensor:
        layers = torch.cat([self.heads, self.mlps[..., None]], -1).flatten(1)
        return torch.cat([self.embedding[:, None], layers, self.pool[:, None], self.biases[:, None]], 1)

    @property
    def names(self) -> list[str]:
        layers, heads = self.heads.shape[1:]
        each = [[*(f"layer {i} head {j}" for j in range(heads)), f"layer {i} MLP"] for i in range(layers)]
        return ["embedding", *sum(each, []), "MLP of the pool", "biases"]


def contributions(
    model: nn.Module,
    images: Tensor,
    target: object = None,
    against: object = None,
    *,
    names: Sequence[str] | None = None,
) -> Contributions:
    """The `Contributions` of every part to the logit of the target, which is their sum (Elhage et al. 2021, "A
    Mathematical Framework for Transformer Circuits"; for ViTs Gandelsman, Efros and Steinhardt 2024).

    What a head adds is read from its output on its way to the read-out; what it does to later layers is theirs. With
    `against`, everything is for the difference of the two logits. An attention pool reads each token by weights that
    are held fixed, like the mean does; its MLP is one more part.
    """
    return _read_directly(model, images, target, against, names)[0]


def direct(
    model: nn.Module,
    images: Tensor,
    target: object = None,
    against: object = None,
    *,
    names: Sequence[str] | None = None,
    tokens: bool = False,
) -> Tensor:
    """(B, L, H, rows, cols) what each patch, through each head of each layer, writes directly into the logit.

    For patch j it is Σ_i A_ij·(g_i·v_j) over the tokens i that are read, with g the gradient of the logit by the head's
    output along the residual stream. Of a class token that is one row of attention a layer. Signed and not rescaled:
    summed over patches and prefix tokens it is what the head contributes.

    tokens: return (B, L, H, T) instead, prefix tokens first.
    """
    _, written, attn = _written(model, images, target, against, names)
    return written if tokens else attn.grid.image_map(written)


def apart(
    model: nn.Module,
    images: Tensor,
    target: object = None,
    against: object = None,
    *,
    names: Sequence[str] | None = None,
) -> tuple[Contributions, Tensor]:
    """What `contributions` returns, and (B, L, H, T) what `direct` does, prefix tokens first, from one forward."""
    found, written, _ = _written(model, images, target, against, names)
    return found, written


def _written(model: nn.Module, images: Tensor, target, against, names) -> tuple[Contributions, Tensor, Attention]:
    """The contributions, (B, L, H, T) of each token through each head, and the capture."""
    found, attn, chosen = _read_directly(model, images, target, against, names)
    require_layers(model, chosen, attn.reached())
    layers = []
    with torch.no_grad():
        for layer in attn:
            written = torch.zeros_like(layer.k[..., 0], dtype=layer.wide)
            for _, read in attention_times_gradient(layer, layer.gradient.any(-1).any(1)):
                written += read.sum(2)
            layers.append(written)
    return found, torch.stack(layers, 1), attn


def direct_map(model: nn.Module, images: Tensor, target=None, *, against=None, names=None) -> Tensor:
    """(B, rows, cols) what each patch writes directly into the logit, through all heads of all layers.

    `vitlens.stream.direct`, summed over layers and heads: a decomposition of what the heads contribute and no gradient
    of the model. What goes through later layers is left out.
    """
    return direct(model, images, target, against, names=names).sum((1, 2))


def _read_directly(model: nn.Module, images: Tensor, target, against, names) -> tuple[Contributions, Attention, Target]:
    """The contributions, a capture whose layers know the gradient along the residual stream, and the target."""
    model, images = checked(model, images, target)
    target, against = bound(model, target, against)
    inner, leaves = transformer(model), defaultdict(list)
    require_pre_norm(inner)
    about = family(inner)
    blocks, pool = about.blocks, about.pool.module if about.pool else nn.Identity()
    hooks = [(blocks[0].register_forward_pre_hook, lambda _, args: (leaf(args[0], leaves["embedding"]), *args[1:]))]
    for where, block in [*enumerate(blocks), ("pool", pool)]:
        for name, module in block.named_modules():
            if re.fullmatch(NORMS, name) or (where == "pool" and name in ("norm", "layernorm")):
                hooks.append((module.register_forward_pre_hook, lambda _, args: held(args[0])))
            elif re.fullmatch(MLPS, name):
                hooks.append((module.register_forward_hook, lambda _, args, out, at=where: leaf(out, leaves[at])))
    with held_fixed(model, images, hooks) as zeros:
        attn, output = captured(model, images, of_features(target), gradients=True)
        attn.cuts.clear()  # the hooks detach what layers read
        chosen = resolved(model, output, target, against, names)
        also = [each for found in leaves.values() for each in found]
        *gradients, by_zeros = attn.differentiate(score(output, chosen, linear=True), also=[*also, zeros])
    with torch.no_grad():
        written = {"pool": torch.zeros_like(by_zeros)}
        for where, found in leaves.items():
            written[where] = sum(product(each, gradients.pop(0)).sum(1) for each in found)
        found = Contributions(
            chosen.score(output.detach()),
            written["embedding"],
            torch.stack([product(layer.output, layer.gradient).sum(-1) for layer in attn], 1),
            torch.stack([written[number] for number in range(len(attn))], 1),
            written["pool"],
            by_zeros,
        )
    require_sum(model, found.parts, found.logits)
    return found, attn, chosen


def require_pre_norm(model: nn.Module) -> None:
    """Raise UnsupportedModelError unless every block adds what attention and MLP make of the normalized tokens."""
    if reason := family(model).stream_problem:
        raise UnsupportedModelError(f"vitlens cannot take the logits of {model_name(model)} apart: {reason}.")


def lens(model: nn.Module, images: Tensor, layer: int = -1, *, tuned: TunedLens | None = None) -> tuple[Tensor, Tensor]:
    """What a model would answer if it ended after a layer (nostalgebraist 2020, "interpreting GPT: the logit lens").

    The tokens after the layer pass the model's own final norm, pooling and head: (B, classes) logits as the model reads
    them, which after the last layer are its own, bit for bit; and (B, T, classes) logits of every token alone, as if it
    were all there is to read. Early layers do not write for this norm and head, so a plain lens may miss what they
    know; nothing trains a model that reads its class token to keep a class in the patches either.

    layer: its number, −1 for the last. tuned: move the tokens by this lens first. Raises IndexError for a layer that
    does not exist, ValueError for the tuned lens of another model, and what `vitlens.tokens.features` raises.
    """
    if not isinstance(tuned, TunedLens | None):
        raise ValueError(f"Expected a `TunedLens`, got {tuned!r}. `tune` makes one, and `TunedLens.load` opens one.")
    model, images = checked(model, images)
    number = layer_number(len(family(transformer(model)).blocks), layer)
    with explaining(model, gradients=False):
        tokens = features(model, images)[0][number]
        if tuned is not None:
            tuned.require(model)
            tokens = tuned.moved(tokens, number)
        return read_out(model, tokens)


def read_out(model: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The logits that `lens` returns, from tokens (B, T, D) such as those of a layer of `vitlens.tokens.features`."""
    return family(model).head(tokens), read_each(model, tokens)


def read_each(model: nn.Module, tokens: Tensor) -> Tensor:
    """(B, T, classes) logits of each of the tokens (B, T, D) after a layer, alone: in all places of a sequence with one
    patch."""
    alone = tokens.flatten(0, 1)[:, None].expand(-1, len(family(model).prefix) + 1, -1)
    return family(model).head(alone).unflatten(0, tokens.shape[:2])


@dataclass(frozen=True)
class TunedLens:
    """One affine map a layer, x + x·W + b, which moves tokens to where the final norm and head can read them.

    weights: (L, D, D) and biases: (L, D), both 0 for the last layer. mark: of the model that it was fitted on.
    """

    weights: Tensor
    biases: Tensor
    mark: str

    def moved(self, tokens: Tensor, layer: int) -> Tensor:
        """(B, T, D) tokens after a layer, moved."""
        weights, biases = (part[layer].to(tokens) for part in (self.weights, self.biases))
        return tokens + tokens @ weights + biases

    def require(self, model: nn.Module) -> None:
        """Raise ValueError unless the lens was fitted on this very model: a copy of it in half precision is another."""
        if self.mark != _mark(model):
            raise ValueError(
                f"This lens was tuned on a model with other weights than {model_name(model)}. Tune one on this model: "
                "`vitlens.stream.tune(model, batches)`."
            )

    def save(self, folder: str | Path) -> Path:
        """Write `lens/tuned.safetensors`, in half precision, into a folder, beside the model."""
        tensors = {name: getattr(self, name).half().cpu().contiguous() for name in ("weights", "biases")}
        (path := Path(folder) / LENS).parent.mkdir(parents=True, exist_ok=True)
        write(path, safetensors.torch.save(tensors, metadata={"mark": self.mark}))
        return path

    @classmethod
    def load(cls, folder: str | Path) -> TunedLens:
        """The lens in a folder. Raises ValueError if there is none."""
        try:
            with safe_open(path := Path(folder) / LENS, "pt") as file:
                weights, biases = (file.get_tensor(name).float() for name in ("weights", "biases"))
                return cls(weights, biases, (file.metadata() or {})["mark"])
        except (OSError, SafetensorError, KeyError) as error:
            raise ValueError(f"{path} is no tuned lens ({error}). `TunedLens.save` writes one.") from error


def tune(
    model: nn.Module,
    batches: Iterable[Tensor],
    *,
    lr: float = 1e-3,
    on_layer: Callable[[int, float], None] = lambda *_: None,
) -> TunedLens:
    """A `TunedLens` of a model (Belrose et al. 2023, "Eliciting Latent Predictions from Transformers with the Tuned
    Lens"): what is read after a layer, by the model and from each token alone, is fitted to what the last one says.

    The loss is the KL divergence of the read-out plus that of the tokens, averaged: in a mean over all of them, a class
    token would hardly count. A fifth of the images is held out. Each layer begins with the plain lens, takes steps of
    Adam with 64 images each, again and again through all images, until the loss on those held out has not fallen by
    0.001 nats in five passes, and keeps the map of the last such fall; zeros are the plain lens. No labels are used.

    batches: (B, C, H, W) images each, normalized as the model wants them, read once. Held in memory are prefix tokens
    and eight patches of each image, or all patches if the head reads them. on_layer: called with each layer's number
    and its loss on the images held out. Raises ValueError for fewer than two images, a loss that is not finite, and
    what `lens` raises.
    """
    if not isinstance(batches, Iterable):
        raise ValueError(f"A lens is tuned on batches of images (B, C, height, width), but got {batches!r}.")
    kept, generator = [], torch.Generator().manual_seed(0)
    for images in batches:
        model, images = checked(model, images)
        with explaining(model), torch.no_grad():
            tokens = torch.stack(features(model, images)[0], 1)
        grid = family(transformer(model)).grid(tuple(images.shape[-2:]))
        if grid.readout is not None and not grid.readout[grid.prefix :].any():
            some = grid.prefix + torch.randperm(grid.patches, generator=generator)[:8]
            tokens = tokens[:, :, [*range(grid.prefix), *some.tolist()]]
        kept.append(tokens)
    if sum(map(len, kept)) < 2:
        raise ValueError("A lens is tuned on two images at least, one of which is held out. Give it more.")
    layers = torch.cat(kept).transpose(0, 1)
    shape = len(layers), layers.shape[-1], layers.shape[-1]
    lens = TunedLens(layers.new_zeros(shape).float(), layers.new_zeros(shape[:2]).float(), _mark(model))
    with explaining(model):
        for number in range(len(layers) - 1):
            on_layer(number, _fit(model, lens, number, layers, lr))
    return lens


def _fit(model: nn.Module, lens: TunedLens, number: int, layers: Tensor, lr: float) -> float:
    """Fit the map of one layer of (L, B, T, D), in place. Returns its loss on the images held out."""
    generator = torch.Generator().manual_seed(0)
    weight, bias = (part[number].clone().requires_grad_() for part in (lens.weights, lens.biases))
    optimizer = torch.optim.Adam([weight, bias], lr=lr)
    held, rest = torch.randperm(count := layers.shape[1], generator=generator).tensor_split([max(1, count // 5)])
    best, since = torch.inf, 0

    def loss(rows: Tensor) -> Tensor:
        moved = TunedLens(weight[None], bias[None], lens.mark).moved(layers[number, rows], 0)
        both = zip(read_out(model, moved), read_out(model, layers[-1, rows]), strict=True)
        pairs = [[part.float().log_softmax(-1) for part in pair] for pair in both]
        return sum(F.kl_div(*pair, log_target=True, reduction="none").sum(-1).mean() for pair in pairs)

    while since <= 5:
        if not (now := loss(held)).isfinite():
            raise ValueError(f"The loss is {now:g}: the weights of the model are damaged, or lr={lr:g} is too large.")
        if now < best - 1e-3:
            best, since = now.item(), 0
            lens.weights[number], lens.biases[number] = weight.detach(), bias.detach()
        for rows in rest[torch.randperm(len(rest), generator=generator)].split(64):
            optimizer.zero_grad()
            loss(rows).backward()
            optimizer.step()
        since += 1
    return best


def _mark(model: nn.Module) -> str:
    """A name for a model's weights: a digest of all of them, bit for bit."""
    digest = hashlib.sha256()
    for name, tensor in transformer(model).state_dict().items():
        digest.update(name.encode() + tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
