"""Cover the projections of `MultiheadAttention`, computed without modules of their own.

The inputs of a projection and the gradient of the product are found in autograd's graph: at the
node that multiplies by the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mpikfac.layers.layer import Attached, Call, Layer

Node = Any  # of autograd's graph
VIEWS = ("TBackward0", "ToCopyBackward0")  # a weight on its way to a product


class ProjectionLayer(Layer):
    """Cover a linear layer inside an attention; all inputs of the layer come from a single tensor.

    Raises:
        TypeError: in a forward pass, query, key and value are not the same tensor.
    """

    dimensions = 3
    module: nn.MultiheadAttention

    def __init__(
        self, name: str, module: nn.MultiheadAttention, weight: Tensor, bias: Tensor | None
    ) -> None:
        super().__init__(name, module, (weight, bias))
        self._weight = weight

    def attach(self, module: nn.Module, hook: Callable[..., None]) -> list[Attached]:
        """Call `hook` after each forward call; `torch.compile` leaves the module out."""
        return [Uncompiled(module), *super().attach(module, hook)]

    def watch(self, given: Sequence[Any], named: dict[str, Any], output: Any) -> Call | None:
        """Return the product's rows and a hook on the gradient, example by example."""
        result, inputs = output[0], [*given, *named.values()]
        if not result.requires_grad:
            return None
        node = _product_with(self._weight, result.grad_fn, inputs)
        if node is None:
            raise TypeError(
                f"layer {self.name!r}: attention of a query to other keys or values is not "
                f"covered; add the attention to skip to train it first-order"
            )
        rows = node._saved_mat1 if hasattr(node, "_saved_mat1") else node._saved_self
        query = given[0] if given else named["query"]
        examples = query.shape[0 if self.module.batch_first else 1] if query.dim() == 3 else 1

        def of_examples(values: Tensor) -> Tensor:
            return values.view(-1, examples, values.shape[-1]).transpose(0, 1)

        def listen(hook: Callable[[Tensor], None]) -> None:
            node.register_prehook(lambda gradients: hook(of_examples(gradients[0])))

        return of_examples(rows), listen


class Uncompiled:
    """Keep `torch.compile` away from a module: a compiled graph hides the products inside.

    Copies of the module are compiled again.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        module._compiled_call_impl = torch.compiler.disable(module._call_impl)

    def remove(self) -> None:
        """Let the module be compiled again."""
        self._module._compiled_call_impl = None


def attention_layers(name: str, module: nn.Module) -> list[Layer]:
    """Return an attention's trained projections: the joint input projection, the output's."""
    assert isinstance(module, nn.MultiheadAttention)
    out = module.out_proj
    inputs = "in_proj", module.in_proj_weight, module.in_proj_bias
    given = inputs, ("out_proj", out.weight, out.bias)
    return [
        ProjectionLayer(f"{name}.{part}".lstrip("."), module, weight, bias)
        for part, weight, bias in given
        if weight is not None and weight.requires_grad
    ]


def _product_with(weight: Tensor, last: Node, inputs: Iterable[Any]) -> Node | None:
    """Find the node that multiplies by the weight's transpose, between module output and inputs."""
    seen = {value.grad_fn for value in inputs if isinstance(value, Tensor)}
    ahead = [last]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        before = [function for function, _ in node.next_functions]
        if any(map(partial(_is_only, weight), before)):
            return node
        ahead += before
    return None


def _is_only(weight: Tensor, node: Node) -> bool:
    """Return whether a node passes on the weight, transposed and perhaps converted."""
    transposed = False
    while node is not None and node.name() in VIEWS:
        transposed |= node.name() == VIEWS[0]
        ((node, _),) = node.next_functions
    return transposed and getattr(node, "variable", None) is weight
