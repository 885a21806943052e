"""Numbers behind one attention weight, and the numbers of the tour, as JSON for the front end.

Shapes: L layers, H heads, T tokens = R prefix + P patches, K head width, D width.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import Tensor, nn

from vitlens.recorder.forward import eval_mode, run
from vitlens.recorder.hooks import thread_hooks
from vitlens.recorder.layer import Layer
from vitlens.recorder.supported import family
from vitlens_explorer.lanes import never_cancel
from vitlens_explorer.photographs import READOUT, Forward
from vitlens_explorer.views import MAX, MEAN, by_layer, query_row
from vitlens_explorer.words import fine_percent, number, percent, say

AFTER_ATTENTION = r"norm2|ln_2|layer_norm2|layernorm_after"
"""Pattern of names: the norms of a pre-norm block whose input is the residual stream between attention and MLP."""
STEPS = ("pixels", "patches", "tokens", "product", "softmax", "heads", "stream", "depth")
"""Steps of the tour."""


def value(
    forward: Forward, layer: int, head: int | str, query: str | int | tuple, key: int | tuple | None
) -> dict:
    """The numbers behind the attention weight from a query to a key.

    head: a number. If it is "mean" or "max", the head with the largest weight is used. query: as in `Choice`. If the
    read-out averages tokens, the token that adds most to the weight is used. key: a patch (row, column) or a position,
    default the other patch with the largest weight.

    The result has `q` and `k` (K), `scale`, `mask` (added to the product), `logits` (T) of the query, with None for
    hidden keys, and `weight`, softmax(logits)[key]. `query` and `key` are positions, `heads` (H) the weights of all
    heads, `largest` is True for a head and `averaged` the number of queries that were combined.
    """
    record, grid = forward.attn[layer], forward.grid
    row = query_row(forward, query)
    combined = head in (MEAN, MAX)
    weights = record.read(row)[0].cpu()
    if key is None:
        by_key = weights.mean(0) if combined else weights[head]
        others = by_key - row.eq(1).to(by_key)
        key = grid.prefix + others[grid.prefix :].argmax().item()
    elif isinstance(key, list):
        key = tuple(key)
    key = grid.position(key)
    if combined:
        head = weights[:, key].argmax().item()
    queries = row.nonzero().squeeze(-1)
    shares = row[queries] * record.weights(queries, head=head)[0, :, key].cpu()
    position = queries[shares.argmax()].item()
    q = record.q[0, head, position].to(record.wide).cpu()
    k = record.k[0, head, key].to(record.wide).cpu()
    logits = record.logits([position])[0, head, 0].cpu()
    return {
        **_grid_fields(forward),
        "layer": layer,
        "head": head,
        "largest": combined,
        "averaged": len(queries),
        "query": position,
        "key": key,
        "heads": round_digits(weights[:, key]),
        "q": round_digits(q),
        "k": round_digits(k),
        "scale": record.scale,
        "mask": 0 if record.mask is None else round_digits(logits[key] - q @ k * record.scale),
        "logits": round_digits(logits),
        "weight": round_digits(logits.softmax(-1)[key]),
    }


@torch.inference_mode()
def tour(
    forward: Forward,
    layer: int,
    head: int | str,
    row: int,
    col: int,
    key: tuple[int, int] | None = None,
) -> dict:
    """The numbers of the tour for a patch, a layer and a head.

    `value`: that of the patch and a key, default its strongest one. `pixels` (h, w, 3) of the patch, `token` (D) that
    enters the first layer, `position` (D) or None, `lengths` (L + 1) of the token before and after each layer, `added`
    (L, 2) lengths of what attention and MLP add, or (L, 1) of the whole change. `heads` (H, P): weights of the patch
    in the layer, `depth` (L, P): in each layer, the mean over heads. `lens`: (class, probability) of the read-out
    after each layer, empty without a classifier. `plain`: the outputs are values instead of probabilities.
    `sentences`: one for each step. `simply`: for the harder steps, the same in plain words, "" for others.
    """
    grid = forward.grid
    position = grid.index(row, col)
    stream, added = _stream(forward, position)
    weights = [_patch_weights(forward, record, position) for record in forward.attn]
    height, width = grid.patch
    pixels = forward.pixels[row * height : (row + 1) * height, col * width : (col + 1) * width]
    table = family(forward.model).positions()
    places = _positions(forward)
    place = None if places is None else round_digits(places[row, col], 4)
    lens = []
    if forward.classes and not any(part == "pool" for part, _ in forward.off):
        with eval_mode(forward.model):
            lens = by_layer(forward, READOUT, never_cancel)
    about = {
        **_grid_fields(forward),
        "layer": layer,
        "row": row,
        "col": col,
        "pixels": pixels.tolist(),
        "value": value(forward, layer, head, (row, col), key),
        "channels": forward.batch.shape[1],
        "token": round_digits(stream[0], 4),
        "table": table is not None,
        "position": place,
        "lengths": [round_digits(vector.norm()) for vector in stream],
        "added": [[round_digits(vector.norm()) for vector in vectors] for vectors in added],
        "heads": round_digits(weights[layer], 3),
        "depth": round_digits(torch.stack([by_head.mean(0) for by_head in weights]), 3),
        "lens": [[forward.label(target), share] for share, target in lens],
        "plain": forward.outputs == "value",
    }
    sentences = _sentences(read=forward.readout, **about)
    return about | {"sentences": sentences, "simply": _plain_sentences(**about)}


@torch.inference_mode()
def streams(forward: Forward) -> dict:
    """The numbers of the tour that follow from no attention, for all patches.

    `tokens` (P, D) that enter the first layer, `positions` (P, D) or None, `lengths` (L + 1, P) of the tokens before
    and after each layer, `added` (L, P, 2) lengths of what attention and MLP add, or (L, P, 1) of the whole change.
    `channels` of the input, and `table`: True for a model with a position table.
    """
    stream, added = _stream(forward, slice(forward.grid.prefix, None))
    places = _positions(forward)
    changes = [torch.stack([part.norm(dim=-1) for part in parts], -1) for parts in added]
    return {
        "tokens": stream[0],
        "positions": None if places is None else places.flatten(0, 1),
        "lengths": torch.stack([tokens.norm(dim=-1) for tokens in stream]),
        "added": torch.stack(changes),
        "channels": forward.batch.shape[1],
        "table": family(forward.model).positions() is not None,
    }


def _positions(forward: Forward) -> Tensor | None:
    """Position vectors (rows, cols, D), or None for a model without a table or with one of another grid."""
    table = family(forward.model).positions()
    if table is None or table.shape[:2] != (forward.grid.rows, forward.grid.cols):
        return None
    return table.detach().float().cpu()


def _sentences(
    read,
    image,
    patch,
    rows,
    cols,
    channels,
    pixels,
    token,
    table,
    prefix,
    layer,
    value,
    heads,
    lengths,
    added,
    lens,
    plain,
    **_,
) -> list[str]:
    """A sentence for each step of the tour, from its numbers."""
    middle = pixels[len(pixels) // 2][len(pixels[0]) // 2][:channels]
    extra = ""
    if len(prefix) == 1:
        extra = f" with the {prefix[0]}"
    elif prefix:
        extra = f" with {len(prefix)} prefix tokens"
    largest = [max(weights) for weights in heads]
    reach = f"{number(min(largest))} to {number(max(largest))}"
    if len(heads) <= 4:
        reach = ", ".join(map(number, largest))
    before, changes = number(lengths[layer]), [number(length) for length in added[layer]]
    if len(changes) == 2:
        first, second = changes
        change = say("tour parts", before=before, first=first, second=second)
    else:
        change = say("tour layer", before=before, first=changes[0])
    fields = {
        "image": f"{image[0]} × {image[1]}",
        "channels": "1 number" if channels == 1 else f"{channels} numbers",
        "middle": ", ".join(map(str, middle)),
        "rows": rows,
        "cols": cols,
        "patches": rows * cols,
        "patch": f"{patch[0]} × {patch[1]}",
        "size": patch[0] * patch[1] * channels,
        "width": len(token),
        "table": "a" if table else "no",
        "extra": extra,
        **_pair_fields(cols, prefix, layer, value),
        "weight": number(value["weight"]),
        "heads": len(heads),
        "reach": reach,
        "answer": _answer_words(lens, plain, read),
        "added": change,
        "after": number(lengths[layer + 1]),
    }
    return [say(f"tour {step}", **fields) for step in STEPS]


def _plain_sentences(cols, token, table, prefix, layer, value, lengths, added, **_) -> list[str]:
    """Sentences in plain words for the steps that need them, "" for others."""
    fields = {
        "width": len(token),
        "place": say("plain tour place" if table else "plain tour no place"),
        "summary": say("plain tour summary", token=prefix[0]) if len(prefix) == 1 else "",
        **_pair_fields(cols, prefix, layer, value),
        "rank": _rank_words(value),
        "share": fine_percent(value["weight"]),
        "even": fine_percent(1 / len(value["logits"])),
    }
    sentences = dict.fromkeys(STEPS, "")
    for step in ("tokens", "product", "softmax"):
        sentences[step] = say(f"plain tour {step}", **fields)
    sentences["stream"] = _plain_change(layer, lengths[layer], added[layer])
    return list(sentences.values())


def _pair_fields(cols: int, prefix: list[str], layer: int, value: dict) -> dict[str, object]:
    """Fields of the sentences about a query and a key."""
    key = value["key"] - len(prefix)
    return {
        "tokens": len(value["logits"]),
        "layer": layer,
        "head": value["head"],
        "row": key // cols,
        "column": key % cols,
        "products": len(value["q"]),
        "logit": number(value["logits"][value["key"]]),
    }


def _rank_words(value: dict) -> str:
    """Place of a logit among those of the query."""
    logits, key = value["logits"], value["key"]
    below = sum(logit is None or logit < logits[key] for logit in logits)
    others = len(logits) - 1
    if below == others:
        return say("plain tour first", tokens=len(logits))
    return say("plain tour rank", below=below, others=others)


def _plain_change(layer: int, before: float, added: list[float]) -> str:
    """Sentence about the vectors that a layer adds to a token, "" for a token of length 0."""
    if not before:
        return ""
    shares = [percent(length / before) for length in added]
    if len(shares) == 1:
        return say("plain tour layer", layer=layer, first=shares[0])
    return say("plain tour parts", layer=layer, first=shares[0], second=shares[1])


def _answer_words(lens: list, plain: bool, read: str) -> str:
    """The classes that the head reads after the first and the last layer. plain: scores are values.

    read: `Forward.readout`.
    """
    if not lens:
        return say("tour no answer")

    def words(score: float) -> str:
        return number(score) if plain else f"{100 * score:.1f}%"

    first, before = lens[0]
    last, after = lens[-1]
    if not read.startswith(("the ", "what ", "no ")):
        read = f"the {read}"
    scores = {"before": words(before), "after": words(after)}
    return say("tour answer", readout=read, first=first, last=last, **scores)


def _patch_weights(forward: Forward, record: Layer, position: int) -> Tensor:
    """Weights (H, P) of the patches for a query."""
    weights = record.weights([position])[0, :, 0].cpu()
    return forward.grid.image_map(weights).flatten(1)


def _grid_fields(forward: Forward) -> dict:
    grid = forward.grid
    return {
        "prefix": forward.prefix,
        "rows": grid.rows,
        "cols": grid.cols,
        "patch": grid.patch,
        "image": grid.image,
    }


def _stream(forward: Forward, position: int | slice) -> tuple[list[Tensor], list[list[Tensor]]]:
    """The token (D,) at a position before and after each layer, and what each layer adds: by attention and by MLP, or
    as one vector. A slice of positions gives tokens (N, D)."""
    before, between = _tokens_within_layers(forward, position)
    stream = [*before, *(tokens[0, position].float().cpu() for tokens in forward.tokens)]
    added = []
    for layer, (start, end) in enumerate(zip(stream, stream[1:], strict=False)):
        if len(between) < len(forward.tokens):
            added.append([end - start])
        else:
            added.append([between[layer] - start, end - between[layer]])
    return stream, added


def _tokens_within_layers(
    forward: Forward, position: int | slice
) -> tuple[list[Tensor], list[Tensor]]:
    """The token (D,) at a position that enters the first layer, and after the attention of each pre-norm layer."""
    about = family(forward.model)
    before: list[Tensor] = []
    between: list[Tensor] = []

    def keep(module: nn.Module, tokens: list[Tensor]) -> tuple[Callable, Callable]:
        def keep_input(_, args: tuple[Tensor]) -> None:
            tokens.append(args[0][0, position].float().cpu())

        return module.register_forward_pre_hook, keep_input

    hooks = [keep(about.blocks[0], before)]
    for block in about.blocks if not about.stream_problem else ():
        for name, module in block.named_modules():
            if re.fullmatch(AFTER_ATTENTION, name):
                hooks.append(keep(module, between))
    with eval_mode(forward.model), forward.switched(), thread_hooks(hooks):
        run(forward.model, forward.batch)
    return before, between


def round_digits(values: Tensor, digits: int = 8) -> list | float | None:
    """Numbers with this many significant digits, as lists. None for infinite ones."""
    if values.dim():
        return [round_digits(row, digits) for row in values]
    if not values.isfinite():
        return None
    return float(f"{values:.{digits}g}")
