"""Autograd's graph of a forward: where it is cut."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

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
    names, thread = {module: name for name, module in model.named_modules()}, threading.get_ident()
    inner = inner_transformer(model)
    adapter = family(inner) if is_known(inner) else None
    pre_norm = (
        adapter is not None
        and not isinstance(adapter, Registered)
        and adapter.stream_problem is None
    )
    residual = {id(block) for block in adapter.blocks} if pre_norm else set()

    def check(module: nn.Module, args: tuple, output: object) -> None:
        if threading.get_ident() != thread or module not in names:
            return
        with torch._C.DisableTorchFunction():
            outputs = [t for t in tensors_of(output) if t.is_floating_point()]
            given = [
                t for t in tensors_of(args) if not isinstance(t, nn.Parameter) and t.requires_grad
            ]
            lost = (
                outputs
                and not any(t.requires_grad for t in outputs)
                or ".quantized" in type(module).__module__
            )
            if given and (
                lost or id(module) in residual and not _is_sum_with(given[0], outputs[0])
            ):
                report(names[module] or type(module).__name__)

    with nn.modules.module.register_module_forward_hook(check):
        yield


def _is_sum_with(tokens: Tensor, output: Tensor) -> bool:
    """True if the output is the tokens plus terms that are all in autograd's graph."""
    start, nodes, complete = (
        torch.autograd.graph.get_gradient_edge(tokens).node,
        [output.grad_fn],
        False,
    )
    while nodes:
        node = nodes.pop()
        if node is None:
            return False
        complete |= node is start
        if node is not start and node.name() in ("AddBackward0", "ToCopyBackward0"):
            nodes += [following for following, _ in node.next_functions]
    return complete


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
