"""Find products with a weight in autograd's graph, and record them as linear layers.

A module such as `MultiheadAttention` uses its weights directly, without submodules. In the graph of
the forward pass, these products are the nodes that use the transposed weight. A hook on such a node
receives the gradient of the product. It affects neither other layers nor the module's results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mpikfac.layers.layer import Call, Layer, place_of, skipping
from mpikfac.numerics import in_transform

Node = Any  # a node of autograd's graph
TRANSPOSED = "TBackward0"
SPLIT = ("SplitBackward0", "SplitWithSizesBackward0")
PASSED_ON = (TRANSPOSED, "ToCopyBackward0", *SPLIT)  # nodes between a weight and its product


class InnerLayer(Layer):
    """Cover a linear layer inside a module; its product's graph node receives the gradient.

    A module can multiply by the whole weight in one product, or by parts of it in several products.

    Args:
        source: the module's argument that is the layer's input; "" if there is none.
        watched: the weight whose products are to be found in autograd's graph.
        part: the index of the layer's first row in `watched`, in units of the layer's outputs.

    Raises:
        TypeError: the autograd graph of a forward pass has no product with the weight.
    """

    dimensions = 1  # `watch` always returns a batch
    arguments: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        name: str,
        module: nn.Module,
        tensors: Sequence[Tensor | None],
        source: str,
        watched: Tensor,
        part: int = 0,
    ) -> None:
        super().__init__(name, module, tensors)
        self.source, self._part = source, part
        self._watched = place_of(module, watched)

    def watch(self, positional: Sequence[Any], named: dict[str, Any], output: Any) -> Call | None:
        """Return a product's input, and a function that registers a hook on its output's gradient.

        The first dimension of the input and the gradient is the batch.
        """
        result = output[0] if isinstance(output, tuple) else output
        weight = getattr(*self._watched)  # during a pass, `fully_shard` replaces the shards
        if not (result.requires_grad and weight.requires_grad):
            return None
        products = products_with(weight, result.grad_fn, _tensors([positional, named]))
        if not products:
            if in_transform():  # the hidden state may have a separate graph
                return None
            raise TypeError(
                f"layer {self.name!r}: autograd's graph contains no product with the weight; train "
                f"the module first-order with {skipping([self.path])}"
            )
        # The last product uses all remaining rows of the weight.
        number, outputs = min(self._part, len(products) - 1), self.shape.outputs
        start = (self._part - number) * outputs
        x = self.input_of(dict(zip(self.arguments, positional)) | named, products[number])
        kind = x.device.type
        autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        if autocast:  # autograd saves a copy, so x may be overwritten
            x = x.detach().to(torch.get_autocast_dtype(kind))

        def listen(hook: Callable[[Tensor], None]) -> None:
            def on_gradient(gradients: Sequence[Tensor | None]) -> None:
                if gradients[0] is not None:
                    rows = gradients[0][..., start : start + outputs]
                    hook(of_examples(rows, len(x)))

            products[number].register_prehook(on_gradient)

        return x, listen

    def input_of(self, arguments: Mapping[str, Any], product: Node) -> Tensor:
        """Return the input of the product, `[batch, inputs]` or `[batch, shared, inputs]`."""
        raise NotImplementedError


def of_examples(rows: Tensor, batch: int) -> Tensor:
    """Return rows `[shared * batch, n]`, ordered by position first, as `[batch, shared, n]`."""
    shared = rows.shape[:-1].numel() // max(1, batch)
    return rows.reshape(shared, batch, rows.shape[-1]).transpose(0, 1)


def saved_input(product: Node) -> Tensor:
    """Return the left operand of a product, as saved for the backward pass."""
    left: Tensor = product._saved_mat1 if hasattr(product, "_saved_mat1") else product._saved_self
    return left


def products_with(weight: Tensor, last: Node, inputs: Iterable[Tensor]) -> list[Node]:
    """Return the nodes that multiply by the weight's transpose, in the order of the weight's rows.

    Args:
        last: the node of a module's output.
        inputs: the tensors passed to the module, at which the search ends.
    """
    products: dict[int, Node] = {}
    seen = {value.grad_fn for value in inputs}
    ahead = [last]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for before, output in node.next_functions:
            part = _part_of(weight, before, output)
            if part is None:
                ahead.append(before)
            else:
                products[part] = node
    return [products[part] for part in sorted(products)]


def _part_of(weight: Tensor, node: Node, output: int) -> int | None:
    """Return the index of the part of the transposed weight that a node passes on; None if none."""
    transposed, part = False, 0
    while node is not None and node.name() in PASSED_ON:
        transposed |= node.name() == TRANSPOSED
        part = output if node.name() in SPLIT else part
        ((node, output),) = node.next_functions
    return part if transposed and getattr(node, "variable", None) is weight else None


def _tensors(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in the arguments of a call, which can be nested."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)
