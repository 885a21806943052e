"""Autograd's graph of a forward: where it is cut."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from vitlens.recorder.interception import tensors_of
from vitlens.recorder.supported import Registered, family, inner_transformer, is_known


@contextlib.contextmanager
def report_cuts(model: nn.Module, report: Callable[[str], object]) -> Iterator[None]:
    """Call `report` with the name of each module in which autograd's graph is cut, by no_grad, detach or quantized
    weights, so that autograd would return the gradients of another function.

    Only modules of the model that run in this block and thread count. A module cuts the graph if its input requires
    gradients and its output does not, or if it is a pre-norm block whose output is not its input plus the outputs of
    attention and MLP.
    """
    names = {module: name for name, module in model.named_modules()}
    thread = threading.get_ident()
    residual = {id(block) for block in _pre_norm_blocks(model)}

    def check(module: nn.Module, args: tuple, output: object) -> None:
        if threading.get_ident() != thread or module not in names:
            return
        with torch._C.DisableTorchFunction():
            if _cuts_graph(module, args, output, id(module) in residual):
                report(names[module] or type(module).__name__)

    with nn.modules.module.register_module_forward_hook(check):
        yield


def _pre_norm_blocks(model: nn.Module) -> Sequence[nn.Module]:
    """Blocks of the Vision Transformer inside a model whose output is their input plus terms, () if unknown."""
    inner = inner_transformer(model)
    if not is_known(inner):
        return ()
    adapter = family(inner)
    if isinstance(adapter, Registered) or adapter.stream_problem is not None:
        return ()
    return adapter.blocks


def _cuts_graph(module: nn.Module, args: tuple, output: object, residual: bool) -> bool:
    """True if gradients do not pass completely from the output of a module to its input.

    residual: the module adds terms to its input, which all belong to the graph.
    """
    inputs = [t for t in tensors_of(args) if t.requires_grad and not isinstance(t, nn.Parameter)]
    outputs = [t for t in tensors_of(output) if t.is_floating_point()]
    if not inputs:
        return False
    if ".quantized" in type(module).__module__:
        return True
    if outputs and not any(t.requires_grad for t in outputs):
        return True
    return residual and not _is_sum_with(inputs[0], outputs[0])


def _is_sum_with(tokens: Tensor, output: Tensor) -> bool:
    """True if the output is the tokens plus terms that are all in autograd's graph."""
    start = torch.autograd.graph.get_gradient_edge(tokens).node
    nodes = [output.grad_fn]
    reached = False
    while nodes:
        node = nodes.pop()
        if node is None:
            return False
        if node is start:
            reached = True
        elif node.name() in ("AddBackward0", "ToCopyBackward0"):
            nodes += [following for following, _ in node.next_functions]
    return reached


def cut_graph(model: str, where: str) -> str:
    """Message for a module or layer that cuts autograd's graph."""
    return (
        f"Autograd's graph of {model} is cut in {where} (no_grad, detach or quantized weights), so gradients would be "
        "those of another function. Use a method without gradients, such as occlusion."
    )


def no_gradient(model: str, score: str, layer: int) -> str:
    """Message for a layer whose gradient is missing or all zero."""
    return (
        f"No gradient of {score} reaches the attention of layer {layer} of {model}, so its map would be blank: weights "
        "on the way are zero, as before training, or autograd's graph is cut (no_grad, detach). Use trained weights, "
        "or a method without gradients, such as occlusion."
    )
