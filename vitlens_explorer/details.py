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
from vitlens.recorder.supported import family
from vitlens_explorer.controls import READOUT
from vitlens_explorer.lanes import never_cancel
from vitlens_explorer.photographs import Forward
from vitlens_explorer.views import MAX, MEAN, by_layer, query_row
from vitlens_explorer.words import number, say

AFTER_ATTENTION = r"norm2|ln_2|layer_norm2|layernorm_after"
"""Pattern of names: the norms of a pre-norm block whose input is the residual stream between attention and MLP."""
STEPS = ("pixels", "patches", "tokens", "product", "softmax", "heads", "stream", "depth")
"""Steps of the tour."""


def value(
    forward: Forward, layer: int, head: int | str, query: str | int | tuple, key: int | tuple | None
) -> dict:
    """The numbers behind the attention weight from a query to a key.

    head: a number. Of the mean or maximum over heads, the head with the largest weight is opened. query: as in
    `Choice`. Of a read-out that averages tokens, the one that adds most to the weight is opened. key: a patch (row,
    column) or a position, default the other patch with the largest weight.

    The result has `q` and `k` (K), `scale`, `mask` (added to the product), `logits` (T) of the query, with None for
    hidden keys, and `weight`, softmax(logits)[key]. `query` and `key` are positions, `heads` (H) the weights of all
    heads, `largest` is True for a head and `averaged` the number of queries that were combined.
    """
    record, grid, row = forward.attn[layer], forward.grid, query_row(forward, query)
    weights = record.read(row)[0].cpu()
    if key is None:
        others = weights[head] if isinstance(head, int) else weights.mean(0)
        key = grid.prefix + (others - row.eq(1).to(others))[grid.prefix :].argmax().item()
    key = grid.position(tuple(key) if isinstance(key, list) else key)
    opened = head if isinstance(head, int) else weights[:, key].argmax().item()
    queries = row.nonzero().squeeze(-1)
    shares = row[queries] * record.weights(queries, head=opened)[0, :, key].cpu()
    position = queries[shares.argmax()].item()
    q, k = (
        t[0, opened, p].to(record.wide).cpu() for t, p in ((record.q, position), (record.k, key))
    )
    logits = record.logits([position])[0, opened, 0].cpu()
    return {
        **_tokens(forward),
        "layer": layer,
        "head": opened,
        "largest": head in (MEAN, MAX),
        "averaged": len(queries),
        "query": position,
        "key": key,
        "heads": rounded(weights[:, key]),
        "q": rounded(q),
        "k": rounded(k),
        "scale": record.scale,
        "mask": 0 if record.mask is None else rounded(logits[key] - q @ k * record.scale),
        "logits": rounded(logits),
        "weight": rounded(logits.softmax(-1)[key]),
    }


@torch.inference_mode()
def tour(forward: Forward, layer: int, head: int | str, row: int, col: int) -> dict:
    """The numbers of the tour for a patch, a layer and a head.

    `value`: that of the patch and its strongest key. `pixels` (h, w, 3) of the patch, `token` (D) that enters the
    first layer, `position` (D) or None, `lengths` (L + 1) of the token before and after each layer, `added` (L, 2)
    lengths of what attention and MLP add, or (L, 1) of the whole change. `heads` (H, P): weights of the patch in the
    layer, `depth` (L, P): in each layer, the mean over heads. `lens`: (class, probability) of the read-out after each
    layer, empty without a classifier. `plain`: the outputs are values instead of probabilities. `sentences`: one for
    each step.
    """
    grid, position = forward.grid, forward.grid.index(row, col)
    stream, between = _stream(forward, position)
    stream += [tokens[0, position].float().cpu() for tokens in forward.tokens]
    added = [
        [after - before]
        if len(between) < len(forward.tokens)
        else [between[k] - before, after - between[k]]
        for k, (before, after) in enumerate(zip(stream, stream[1:], strict=False))
    ]
    weights = [
        grid.image_map(each.weights([position])[0, :, 0].cpu()).flatten(1) for each in forward.attn
    ]
    table, (height, width) = family(forward.model).positions(), grid.patch
    pixels = forward.pixels[row * height : (row + 1) * height, col * width : (col + 1) * width]
    readable = forward.classes and not any(layer == "pool" for layer, _ in forward.off)
    with eval_mode(forward.model):
        lens = by_layer(forward, READOUT, never_cancel) if readable else []
    about = {
        **_tokens(forward),
        "layer": layer,
        "row": row,
        "col": col,
        "pixels": pixels.tolist(),
        "value": value(forward, layer, head, (row, col), None),
        "channels": forward.batch.shape[1],
        "token": rounded(stream[0], 4),
        "table": table is not None,
        "position": None
        if table is None or table.shape[:2] != (grid.rows, grid.cols)
        else rounded(table[row, col].detach().float().cpu(), 4),
        "lengths": [rounded(vector.norm()) for vector in stream],
        "added": [[rounded(vector.norm()) for vector in vectors] for vectors in added],
        "heads": rounded(weights[layer], 3),
        "depth": rounded(torch.stack([each.mean(0) for each in weights]), 3),
        "lens": [[forward.label(target), share] for share, target in lens],
        "plain": forward.outputs == "value",
    }
    return about | {"sentences": _sentences(**about)}


def _sentences(
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
    count, key = f"{channels} number{'s' * (channels > 1)}", value["key"] - len(prefix)
    middle = pixels[len(pixels) // 2][len(pixels[0]) // 2][:channels]
    some = ["", f" with the {prefix[0]}" if prefix else "", f" with {len(prefix)} prefix tokens"]
    logit, tops = number(value["logits"][value["key"]]), [max(weights) for weights in heads]
    reach = (
        ", ".join(map(number, tops))
        if len(tops) <= 4
        else f"{number(min(tops))} to {number(max(tops))}"
    )
    steps = dict(zip(("first", "second"), map(number, added[layer]), strict=False)) | {
        "before": number(lengths[layer])
    }
    score = number if plain else lambda share: f"{100 * share:.1f}%"
    answer = say("tour no answer")
    if lens:
        (first, before), (last, after) = lens[0], lens[-1]
        answer = say(
            "tour answer", first=first, before=score(before), last=last, after=score(after)
        )
    fields = {
        "image": f"{image[0]} × {image[1]}",
        "channels": count,
        "middle": ", ".join(map(str, middle)),
        "rows": rows,
        "cols": cols,
        "patches": rows * cols,
        "patch": f"{patch[0]} × {patch[1]}",
        "size": patch[0] * patch[1] * channels,
        "width": len(token),
        "table": "a" if table else "no",
        "tokens": len(value["logits"]),
        "extra": some[min(len(prefix), 2)],
        "layer": layer,
        "head": value["head"],
        "row": key // cols,
        "column": key % cols,
        "products": len(value["q"]),
        "logit": logit,
        "weight": number(value["weight"]),
        "heads": len(heads),
        "reach": reach,
        "answer": answer,
        "added": say("tour parts" if len(steps) == 3 else "tour layer", **steps),
        "after": number(lengths[layer + 1]),
    }
    return [say(f"tour {step}", **fields) for step in STEPS]


def _tokens(forward: Forward) -> dict:
    grid = forward.grid
    return {
        "prefix": forward.prefix,
        "rows": grid.rows,
        "cols": grid.cols,
        "patch": grid.patch,
        "image": grid.image,
    }


def _stream(forward: Forward, position: int) -> tuple[list[Tensor], list[Tensor]]:
    """The token (D,) at a position that enters the first layer, and after the attention of each pre-norm layer."""
    about, before, between = family(forward.model), [], []

    def keep(module: nn.Module, tokens: list[Tensor]) -> tuple[Callable, Callable]:
        return module.register_forward_pre_hook, lambda _, args: tokens.append(
            args[0][0, position].float().cpu()
        )

    hooks = [keep(about.blocks[0], before)]
    for block in about.blocks if not about.stream_problem else ():
        norms = [
            module for name, module in block.named_modules() if re.fullmatch(AFTER_ATTENTION, name)
        ]
        hooks += [keep(norm, between) for norm in norms]
    with eval_mode(forward.model), forward.switched(), thread_hooks(hooks):
        run(forward.model, forward.batch)
    return before, between


def rounded(values: Tensor, digits: int = 8) -> list | float | None:
    """Numbers with this many significant digits, as lists. None for infinite ones."""
    if values.dim():
        return [rounded(each, digits) for each in values]
    return float(f"{values:.{digits}g}") if values.isfinite() else None
