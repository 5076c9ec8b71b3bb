"""The forward pass of a split layer on a rank of a group."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpikfac.comm import Group
from mpikfac.engine import Gradients, Part, Site
from mpikfac.lab.tensor_parallel.transfers import gather, sum_parts, turn
from mpikfac.numerics import listen
from mpikfac.plan import CHANNELS, Place, Split, TensorParallelPlan, names, span, split_layers

Hook = Callable[[Tensor], None]


@dataclass(frozen=True)
class SplitForward:
    """Compute a layer on a slice of the channels, for all examples of the group.

    An instance replaces the module's `forward`. Under `torch.no_grad`, each rank computes the whole
    layer by itself. A copy of the module is an ordinary module.

    Attributes:
        place: which channels are split, and whether inputs and outputs are slices.
        tp_plan: the plan for all split layers of the model.
        ranks: the total number of ranks in all groups.
        describe: returns what a plan needs to know about the model's split layers.
    """

    name: str
    module: Any
    group: Group
    place: Place
    tp_plan: TensorParallelPlan
    ranks: int
    describe: Callable[..., Split]

    def __call__(self, input: Tensor) -> Tensor:
        """Return the output for the rank's examples, or a slice of the channels for all examples.

        Collective over: group, forward and backward.

        Raises:
            UserError: ranks of the group call different layers, or pass inputs of different shapes.
        """
        if not torch.is_grad_enabled():
            alone: Tensor = type(self.module).forward(self.module, input)
            return alone
        self.group.check_alike(self.name, input)
        self._check_batch(input)
        return self._by_outputs(input) if self.place.axis == "outputs" else self._by_inputs(input)

    def __reduce__(self) -> Any:
        # A copied or pickled module keeps its attributes, but uses its class's `forward`.
        return getattr, (self.module, "forward")

    def watch(self, x: Tensor, output: Tensor) -> tuple[Tensor, Callable[[Hook], object]]:
        """Return the rank's examples of the input, and a function that registers gradient hooks.

        Collective over: group, if the input is a slice, and in the backward pass if the output is a
        slice.
        """

        def on_gradient(hook: Hook) -> None:
            listen(output, lambda g: hook(self._of_examples(g, self.place.gives)))

        return self._of_examples(x.detach(), self.place.takes), on_gradient

    @property
    def channels(self) -> int:
        """The channel dimension of inputs and outputs."""
        return -1 if isinstance(self.module, nn.Linear) else 1

    def slice_of(self, parameter: Tensor, dim: int) -> Tensor:
        """Return the rank's slice of a parameter."""
        start, stop = span(parameter.shape[dim], self.group.member, self.group.size)
        return parameter.narrow(dim, start, stop - start)

    def attach(self, site: Site, gradients: Gradients, model: nn.Module) -> Iterable[Part]:
        """Return the trainer's part that averages slices of gradients, if any are sent."""
        from mpikfac.lab.tensor_parallel.slices import SlicedGradients

        in_slices = split_layers.in_slices(site.plan).parameters
        return [SlicedGradients(site, gradients, model)] if in_slices else ()

    def _by_outputs(self, x: Tensor) -> Tensor:
        module = self.module
        gathered = gather(x, self.group, self.channels if self.place.takes else 0)
        bias = None if module.bias is None else self.slice_of(module.bias, 0)
        output = self._multiplied(gathered, self.slice_of(module.weight, 0), bias)
        return output if self.place.gives else turn(output, self.group, 0, self.channels)

    def _by_inputs(self, x: Tensor) -> Tensor:
        module = self.module
        if not self.place.takes:
            x = turn(x, self.group, self.channels, 0)
        bias = module.bias
        if bias is not None:  # each rank adds its slice of the bias, and computes its gradient
            start, stop = span(len(bias), self.group.member, self.group.size)
            bias = F.pad(bias[start:stop], (start, len(bias) - stop))
        sums = self._multiplied(x, self.slice_of(module.weight, 1), bias)
        return sum_parts(sums, self.group, self.channels if self.place.gives else 0)

    def _multiplied(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if isinstance(self.module, nn.Linear):
            return F.linear(x, weight, bias)
        output: Tensor = self.module._conv_forward(x, weight, bias)
        return output

    def _of_examples(self, x: Tensor, in_slices: bool) -> Tensor:
        """Convert slices of channels to the rank's examples with all channels, if `in_slices`."""
        stage = names.EXCHANGE_SPLIT_STATISTICS
        return self.group.turn(x, 0, self.channels, stage) if in_slices else x

    def _check_batch(self, x: Tensor) -> None:
        least = 2 if isinstance(self.module, nn.Linear) else self.module.weight.dim()
        channels = self.module.weight.shape[CHANNELS.index("inputs")]
        if self.place.takes:
            channels //= self.group.size
        if x.dim() < least or x.shape[self.channels] != channels:
            raise ValueError(
                f"split layer {self.name!r} needs batches of {channels} channels with at least "
                f"{least} dimensions, not {list(x.shape)}"
            )


def split_forward(module: nn.Module) -> SplitForward | None:
    """Return the forward pass of a split layer, or None for other modules."""
    forward = vars(module).get("forward")
    return forward if isinstance(forward, SplitForward) else None
