"""Query autograd about the current backward pass, and add hooks to passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

# Nodes of views that keep all elements in order. Hooks go to the node of the product below them,
# because an in-place operation on a view replaces the view's own node in the graph.
RESHAPED = ("ViewBackward0", "SqueezeBackward1")


def in_backward() -> bool:
    """Return whether the thread is in a backward pass, as when a checkpoint recomputes outputs."""
    return torch._C._current_graph_task_id() != -1


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call `function` at the end of the current backward pass, unless the pass is interrupted."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def in_transform() -> bool:
    """Return whether the thread is inside a transform of `torch.func`."""
    return torch._C._functorch.maybe_current_level() is not None


def in_capture() -> bool:
    """Return whether the thread captures a model with `torch.jit.trace` or `torch.export`."""
    tracing: bool = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    return tracing or torch.compiler.is_exporting()


def makes_gradients(parameters: Iterable[Tensor]) -> bool:
    """Return whether the current backward pass computes the gradient of any of the parameters.

    A pass inside a transform of `torch.func` computes gradients only of the transform's arguments.
    """
    if in_transform():
        return False
    for parameter in parameters:
        if parameter.requires_grad:
            try:
                if torch._C._will_engine_execute_node(get_gradient_edge(parameter).node):
                    return True
            except RuntimeError:  # `torch.autograd.grad` requests the gradient of this parameter
                return True
    return False


def accumulates(parameters: Iterable[Tensor]) -> bool:
    """Return whether the current backward pass adds to `.grad`, unlike `torch.autograd.grad`."""
    try:
        return any(
            torch._C._will_engine_execute_node(get_gradient_edge(parameter).node)
            for parameter in parameters
            if parameter.requires_grad
        )
    except RuntimeError:  # as in `makes_gradients`
        return False


def outside_of_transforms(tensor: Tensor) -> Tensor:
    """Return a tensor without the wrappers of `torch.func`, as in the program's own graph."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def listen(output: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Call `hook` with the gradient of `output` from which the weight's gradient is computed.

    The program's own hooks on `output` run first. Inside a transform of `torch.func`, an output may
    have no `grad_fn`; autograd then does not compute its gradient.
    """
    node, number, shape = output.grad_fn, output.output_nr, output.shape
    while node is not None and node.name() in RESHAPED:
        node, number = node.next_functions[0]

    def on_gradients(gradients: Sequence[Tensor | None]) -> None:
        if (gradient := gradients[number]) is not None:
            hook(gradient.reshape(shape))

    if node is not None:
        node.register_prehook(on_gradients)
