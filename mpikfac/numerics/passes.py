"""Ask autograd about the backward pass that runs now, and listen to passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

# Views of a product with the same elements in the same order: an operation in place on a view
# takes the view's own node out of the graph.
RESHAPED = ("ViewBackward0", "SqueezeBackward1")


def in_backward() -> bool:
    """Return whether the thread is inside a backward pass, as where a checkpoint computes again."""
    return torch._C._current_graph_task_id() != -1


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call `function` when the backward pass that runs now has ended, and was not interrupted."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def in_transform() -> bool:
    """Return whether the thread is inside a transform of `torch.func`."""
    return torch._C._functorch.maybe_current_level() is not None


def makes_gradients(parameters: Iterable[Tensor]) -> bool:
    """Return whether the backward pass that runs now makes the gradient of a parameter.

    A pass inside a transform of `torch.func` is one of the transform's own arguments.
    """
    if in_transform():
        return False
    for parameter in parameters:
        if parameter.requires_grad:
            try:
                if torch._C._will_engine_execute_node(get_gradient_edge(parameter).node):
                    return True
            except RuntimeError:  # `torch.autograd.grad` asks for this parameter
                return True
    return False


def outside_of_transforms(tensor: Tensor) -> Tensor:
    """Return a tensor as the program's own graph has it, outside all transforms of `torch.func`."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def listen(output: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Call `hook` with the gradient of `output` that makes the gradient of a layer's weight.

    The program's own hooks on `output` come before. Inside a transform of `torch.func`, an output
    may have no node: autograd then makes no gradient of it.
    """
    node, number, shape = output.grad_fn, output.output_nr, output.shape
    while node is not None and node.name() in RESHAPED:
        node, number = node.next_functions[0]

    def on_gradients(gradients: Sequence[Tensor | None]) -> None:
        if (gradient := gradients[number]) is not None:
            hook(gradient.reshape(shape))

    if node is not None:
        node.register_prehook(on_gradients)
