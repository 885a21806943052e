"""Reason why the attention of a block was not recorded, from what was seen of the forward.

A recorder sees the torch calls of its own thread. Hooks see modules run in any thread. Both together separate a model
that did not run from one whose blocks ran without a call of fused attention.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from vitlens.recorder.supported import family
from vitlens.recorder.supported.registration import Registered

ONE_LINE = "x = torch.nn.functional.scaled_dot_product_attention(q, k, v)"
"""The line that replaces an attention that is written out."""

_SOFTMAX = ("softmax", "_softmax", "softmax_", "masked_softmax", "sparse_softmax")

Name = tuple[int, int]
"""An attention module: its layer and its number in the layer."""

Call = tuple[int, int, str]
"""An attention module, as an interception names it: its layer, its number in the layer, and its path."""


class Witness:
    """Observations of a model's forward. Here `modules` are as `attention_modules` returns them.

    used: attention modules whose own parameters were used in this thread. softmax: those after whose parameters a
    softmax was computed. unassigned: calls of fused attention in a block that followed the parameters of no attention
    module. traced: kind of tensors if a compiler traced the forward, else "".
    """

    def __init__(self, model: nn.Module, modules: Sequence[Sequence[tuple[str, nn.Module]]]):
        self.model = model
        self.modules = modules
        self.blocks = list(family(model).blocks)
        self.thread = threading.get_ident()
        self.used: set[Name] = set()
        self.softmax: set[Name] = set()
        self.unassigned = 0
        self.traced = ""
        self._begun: set[nn.Module] = set()
        self._ended: set[nn.Module] = set()
        self._elsewhere: set[nn.Module] = set()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the model, its blocks and their attention run, in all threads, by hooks."""
        attention = [module for layer in self.modules for _, module in layer]
        watched = dict.fromkeys([self.model, *self.blocks, *attention])
        hooks = []
        for module in watched:
            hooks.append(module.register_forward_pre_hook(self._begin))
            hooks.append(module.register_forward_hook(self._end))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _begin(self, module: nn.Module, args: tuple) -> None:
        if threading.get_ident() == self.thread:
            self._begun.add(module)
        else:
            self._elsewhere.add(module)

    def _end(self, module: nn.Module, args: tuple, output: object) -> None:
        if threading.get_ident() == self.thread:
            self._ended.add(module)

    def note_call(self, function: object, tensors: Sequence[Tensor], where: Call | None) -> None:
        """Remember a torch call that follows the parameters of an attention module.

        A parameter alone, as in a copy of the model, is not used.
        """
        if where is None:
            return
        index, call, _ = where
        activations = [tensor for tensor in tensors if not isinstance(tensor, nn.Parameter)]
        if activations:
            self.used.add((index, call))
        if getattr(function, "__name__", "") in _SOFTMAX:
            self.softmax.add((index, call))

    def note_unassigned(self, query: Tensor) -> None:
        """Remember a call of fused attention in a block that followed the parameters of no attention module."""
        running = self._begun - self._ended
        if not running.isdisjoint(self.blocks):
            self.unassigned += 1
            if isinstance(query, FakeTensor):
                self.traced = "tensors without values, as torch.export does"

    def reason(self, missing: Sequence[Name]) -> str:
        """Reason why the attention of these modules was not recorded, and how to change that."""
        if not self._begun and not self.softmax:
            return self._not_run()
        if self.traced:
            return f"it was traced with {self.traced}, not run; run the model itself on images"
        broken = self._broken()
        if broken:
            return f"its forward ended with an error {broken}; run it without the error"
        idle = [name for name in missing if not self._ran(name)]
        if idle:
            return self._unfinished(idle)
        foreign = [name for name in missing if name not in self.used]
        if foreign:
            return self._other_parameters(foreign)
        return self._own_attention(missing)

    def _ran(self, name: Name) -> bool:
        return name in self.used or self._module(name) in self._begun

    def _broken(self) -> str:
        """Place at which the forward ended with an error, or ""."""
        open_modules = self._begun - self._ended
        for number, block in enumerate(self.blocks):
            if block in open_modules:
                return f"in block {number}"
        return "outside its blocks" if self.model in open_modules else ""

    def _module(self, name: Name) -> nn.Module:
        index, call = name
        _, module = self.modules[index][call]
        return module

    def _path(self, name: Name) -> str:
        index, call = name
        path, _ = self.modules[index][call]
        return path

    def _not_run(self) -> str:
        if self._elsewhere:
            return (
                "it ran in another thread, and a block records the forwards of its own thread; open the `with` block "
                "in the function that runs the model"
            )
        return (
            "it was not run inside the `with` block; run this very model there, because a copy of it (deepcopy, "
            "torch.jit, torch.export, torch.fx) is another model with its own parameters"
        )

    def _unfinished(self, idle: Sequence[Name]) -> str:
        """Reason for attention modules that did not run."""
        layers = sorted({index for index, _ in idle})
        count = len(self.blocks)
        if count != len(self.modules):  # every attention module is a layer
            count = len(self.modules)
            began = []
        else:
            began = [n for n, block in enumerate(self.blocks) if block in self._begun]
        entered = [index for index in layers if index in began]
        if entered:
            path = self._path(next(name for name in idle if name[0] == entered[0]))
            return f"its block {entered[0]} ran without its attention module {path}; {self._advice_on_path()}"
        if self._elsewhere and not began:
            return (
                "its blocks ran in another thread, and a block records the forwards of its own thread; open the "
                "`with` block in the function that runs the model"
            )
        ran = count - len(layers)
        if ran == 0:
            return "none of its blocks ran inside the `with` block; run the whole model there, not a part of it"
        return (
            f"{ran} of its {count} blocks ran, and {_numbers(layers)} did not, because the forward skips blocks or "
            "ends early; run all of them"
        )

    def _other_parameters(self, foreign: Sequence[Name]) -> str:
        """Reason for attention modules that ran without their own parameters."""
        name = foreign[0]
        module = self._module(name)
        path = self._path(name)
        for part in module.modules():
            kind = type(part)
            if "quantized" in kind.__module__ or "bitsandbytes" in kind.__module__:
                return (
                    f"{path} has quantized weights ({kind.__module__}.{kind.__name__}), by which its calls cannot be "
                    "assigned to a layer; use the model before quantization"
                )
        if not any(True for _ in module.parameters()):
            return f"{path} has no parameters, by which its calls are assigned to a layer; {self._advice_on_path()}"
        return (
            f"{path} ran without its own parameters, as in torch.func.functional_call, so its calls cannot be assigned "
            "to a layer; load the parameters into the model"
        )

    def _own_attention(self, missing: Sequence[Name]) -> str:
        """Reason for attention modules that ran without a call of fused attention."""
        path = self._path(missing[0])
        if self.unassigned:
            return (
                f"its blocks ran, but the {self.unassigned} calls of scaled_dot_product_attention came after the "
                f"parameters of other modules than {path}; {self._advice_on_path()}"
            )
        total = sum(len(layer) for layer in self.modules)
        without = "none of them" if len(missing) == total else f"not all of them (not {path})"
        instead = ""
        if missing[0] in self.softmax:
            instead = f", and {path} computes a softmax itself"
        return (
            f"its {len(self.blocks)} blocks ran, but {without} called scaled_dot_product_attention, from which vitlens "
            f"reads the attention{instead}. Replace the attention that is written out by `{ONE_LINE}`"
        )

    def _advice_on_path(self) -> str:
        if isinstance(family(self.model), Registered):
            return (
                "give `register_model` as attention= the module with the projections of q, k and v"
            )
        return "run the attention module itself"


def _numbers(layers: Sequence[int]) -> str:
    """Blocks as in "block 3" or "blocks 3, 5 and 7"."""
    if len(layers) == 1:
        return f"block {layers[0]}"
    *first, last = layers
    if last - first[0] == len(first) and len(first) > 1:
        return f"blocks {first[0]} to {last}"
    return f"blocks {', '.join(map(str, first))} and {last}"
