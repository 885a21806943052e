"""Compare the tensors of a checkpoint before and after a library has converted them."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

_CHUNK = 2**17
"""Numbers whose sum is taken at once, so that they stay in the processor's cache."""

_PIECES = 4
"""Largest number of tensors that are joined into one, or that one is split into."""


@dataclass(frozen=True)
class Arrival:
    """Where the values of tensors went in a conversion.

    arrived: names after the conversion of tensors whose values all come from the file, renamed, permuted, reshaped,
    split or joined. changed: names after the conversion of tensors with other values. lost: names before the conversion
    of tensors whose values are in none after it.
    """

    arrived: set[str]
    changed: list[str]
    lost: list[str]


def values_sum(tensor: Tensor) -> int:
    """Number that depends on the values of a tensor, not on their order, shape or precision. Zeros count nothing.

    The sum for joined tensors is the sum of theirs, modulo 2⁶⁴.
    """
    values = tensor.detach().cpu()
    total = 0
    for chunk in values.reshape(-1).split(_CHUNK):
        if chunk.is_floating_point():
            wide = chunk.dtype == torch.float64
            chunk = (chunk if wide else chunk.float()) + 0.0  # no negative zeros
            chunk = chunk.view(torch.int64 if wide else torch.int32)
        bits = chunk.to(torch.int64, copy=True)
        bits.mul_(-7046029254386353131)
        bits.bitwise_xor_(bits >> 32)
        bits.mul_(-4658895280553007687)
        total += int(bits.sum())
    return total % 2**64


def compare(before: dict[str, Tensor], after: dict[str, Tensor]) -> Arrival:
    """Where the values of the tensors `before` a conversion are `after` it."""
    left = {name: value for name, value in before.items() if value.numel()}
    new = dict(after)
    arrived = set()
    for name, value in before.items():
        same = new.get(name)
        if same is not None and same.dtype == value.dtype and torch.equal(same.cpu(), value.cpu()):
            left.pop(name, None)
            del new[name]
            arrived.add(name)
    by_place = {_place(value): name for name, value in left.items()}
    for name, value in list(new.items()):
        source = by_place.get(_place(value))
        if source in left:
            del left[source], new[name]
            arrived.add(name)

    sums = {name: values_sum(value) for name, value in left.items()}
    new_sums = {name: values_sum(value) for name, value in new.items()}
    sources = defaultdict(list)
    for name in left:
        sources[sums[name]].append(name)
    for name in list(new):
        same = sources[new_sums[name]]
        same = [source for source in same if left[source].numel() == new[name].numel()]
        if same:
            source = name if name in same else same[0]
            sources[new_sums[name]].remove(source)
            del left[source], new[name]
            arrived.add(name)

    for pieces, whole in _joined(left, new, sums, new_sums):
        for piece in pieces:
            left.pop(piece, None)
        new.pop(whole, None)
        arrived.add(whole)
    for pieces, whole in _joined(new, left, new_sums, sums):
        for piece in pieces:
            new.pop(piece, None)
        left.pop(whole, None)
        arrived.update(pieces)
    changed = [name for name in new if new_sums[name] != 0]
    return Arrival(arrived, changed, list(left))


def _place(tensor: Tensor) -> tuple:
    """Memory that a tensor occupies, and how it is read."""
    return (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def _joined(
    parts: dict[str, Tensor], wholes: dict[str, Tensor], sums: dict, whole_sums: dict
) -> list[tuple[tuple[str, ...], str]]:
    """(names of parts, name of a whole) for wholes with the values of several parts of the same layer."""
    by_layer = defaultdict(list)
    for name in parts:
        by_layer[layer_number(name)].append(name)
    found = []
    for whole in wholes:
        names = by_layer[layer_number(whole)]
        if len(names) > 40:
            continue
        pieces = _summing_to(names, whole_sums[whole], sums)
        if pieces and whole_sums[whole] != 0:
            found.append((pieces, whole))
            by_layer[layer_number(whole)] = [name for name in names if name not in pieces]
    return found


def _summing_to(names: Iterable[str], total: int, sums: dict) -> tuple[str, ...]:
    """Two to four names whose sums add up to a total, or no names."""
    with_values = [name for name in names if sums[name] != 0]
    for count in range(1, _PIECES + 1):
        for pieces in itertools.combinations(with_values, count):
            if sum(sums[name] for name in pieces) % 2**64 == total:
                return pieces
    return ()


def layer_number(name: str) -> str:
    """First number between dots in the name of a weight, which is the number of its layer, or ""."""
    number = re.search(r"(?:^|\.)(\d+)\.", name)
    return number[1] if number else ""
