"""Refuse models whose autograd graph is cut inside, by `no_grad`, `detach` or a quantized layer.

Autograd would silently give the gradients of another function there.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from vitlens.recorder.supported import refuse

VALUELESS = {
    torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like, torch.rand_like, torch.randn_like,
    Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full, Tensor.new_tensor,
}  # fmt: skip
"""Functions that use only the shape of their argument."""


def tensors_of(args: tuple, kwargs: dict) -> list[Tensor]:
    """All tensors among the arguments of a torch function, including those in lists."""
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    for a in args:
        if isinstance(a, list | tuple):
            tensors += [t for t in a if isinstance(t, Tensor)]
    return tensors


def require_gradients(model: nn.Module) -> None:
    """Raise UnsupportedModelError if a layer of the model cannot pass gradients on: quantized layers cannot, nor those
    made in inference mode."""
    if any(p.is_inference() for p in model.parameters()):
        raise refuse(
            model,
            "its weights were made within `torch.inference_mode()`, so gradients do not pass them; make or open the "
            "model outside of that block, or use a method without gradients",
        )
    for name, module in model.named_modules():
        if ".quantized" in type(module).__module__:
            raise refuse(
                model,
                f"{name} ({type(module).__module__}.{type(module).__name__}) is quantized, so gradients do not pass "
                "it; use the model as it was before, or a method without gradients",
            )


class Graph:
    """Finds where a forward leaves autograd's graph, from the torch functions that a mode sees one by one.

    A value is cut if an input required gradients and the value does not, or if it was computed from a cut value. That
    is harmless (somebody looks at a probability) until the model's weights or attention use the cut value or cut it
    themselves: then it is refused. Exceptions: a cut value that became a new leaf with gradients was cut on purpose,
    and a forward that starts with autograd off has no graph. parameters: all of the model's, by id. enters: those
    that meet the image.
    """

    def __init__(self, model: nn.Module, parameters: dict[int, nn.Parameter], enters: list[nn.Parameter]):
        self.model = model
        self.parameters = parameters  # held, or ids would be used again
        self.begins = set(map(id, enters))
        self.cut = WeakIdKeyDictionary()
        self.on = False

    def look(self, func, given: list[Tensor], result: object, name: str = "") -> None:
        """Look at one call of a torch function, by the attention `name` if any. Raises UnsupportedModelError."""
        with torch._C.DisableTorchFunction():  # or each attribute that is read here would pass all outer modes
            self._look(func, given, result, name)

    def _look(self, func, given: list[Tensor], result: object, name: str) -> None:
        own = next((t for t in given if id(t) in self.parameters), None)
        begins = id(own) in self.begins
        if own is not None:
            self.on = torch.is_grad_enabled() or self.on and not begins
        if not self.on or func in VALUELESS:
            return
        given = [t for t in given if id(t) not in self.parameters]
        attached = any(t.requires_grad for t in given)
        if not attached and not self.cut:
            return
        found = result if isinstance(result, tuple | list) else [result]
        found = [t for t in found if isinstance(t, Tensor) and t.is_floating_point()]
        lost = attached and found and not any(t.requires_grad for t in found)
        if not lost and not (self.cut and any(t in self.cut and not (t.requires_grad and t.is_leaf) for t in given)):
            return
        if (own is not None or name) and not begins:
            where = name or next(path for path, p in self.model.named_parameters() if p is own)
            raise refuse(
                self.model,
                f"autograd's graph is cut inside of it, before {where} or there (no_grad, detach, a layer without "
                "gradients); let the whole forward be part of the graph",
            )
        if not begins:
            for tensor in found:
                self.cut[tensor] = True
