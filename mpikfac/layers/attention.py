"""The projections of `MultiheadAttention`, which it computes without modules of their own.

What they multiply, and the gradient of the product, is found in autograd's graph: at the node that
multiplies by the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from mpikfac.layers.layer import Call, Layer

Node = Any  # of autograd's graph
VIEWS = ("TBackward0", "ToCopyBackward0")  # a weight on its way to a product


class ProjectionLayer(Layer):
    """A linear layer inside an attention: one that takes all of its inputs from one tensor.

    Raises:
        TypeError: in a forward pass, query, key and value are not the same.
    """

    dimensions = 3
    module: nn.MultiheadAttention

    def __init__(
        self, name: str, module: nn.MultiheadAttention, weight: Tensor, bias: Tensor | None
    ) -> None:
        super().__init__(name, module, (weight, bias))
        self._weight = weight

    def watch(self, given: Sequence[Any], named: dict[str, Any], output: Any) -> Call | None:
        """The product's rows and gradient, example by example."""
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


def attention_layers(name: str, module: nn.Module) -> list[Layer]:
    """The projections of a `MultiheadAttention`: its inputs', if it has one, and its output's."""
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
    """The node that multiplies by the weight's transpose, between a module's output and inputs."""
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
    """Whether a node hands on that weight, turned over or converted."""
    turned = False
    while node is not None and node.name() in VIEWS:
        turned |= node.name() == VIEWS[0]
        ((node, _),) = node.next_functions
    return turned and getattr(node, "variable", None) is weight
