"""Direct feedback: the error of a model's outputs is passed to each block directly.

Back-propagation passes an error from block to block. With direct feedback alignment, the error at
the output of block k is `e B_k`, where e is the gradient of the loss with respect to the model's
outputs, and B_k is a fixed random matrix [Nøkland 2016]. Here, the entries of B_k are
`+-1 / sqrt(n)` if an example's output has n elements, which preserves the length of the error on
average. Inside a block, gradients are back-propagated; the gradient of the last block is exact [Han
& Yoo 2019].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mpikfac.layers import Hook
from mpikfac.trainer import Trainer

SPREAD = 2_654_435_761  # a prime, so that blocks and neighbouring seeds get different signs


class DirectFeedback:
    """Train the blocks of a trainer's model with direct feedback.

        trainer = mpikfac.FirstOrderTrainer(model, optimizer)
        mpikfac.lab.DirectFeedback(trainer, ["layer1", "layer2"], seed=0)

    The training loop stays the same: the backward pass of the loss computes the gradients of all
    blocks. Under `torch.no_grad`, the model works as before. The signs of the random matrices'
    entries depend only on the seed and on the positions and shapes of the blocks, so checkpoints do
    not store them.

    Collective over: none; use the same arguments on all ranks.

    Args:
        ends: the names of the modules at which blocks end, except for the last block.
        seed: the seed of the random signs.

    Raises:
        ValueError: an element of `ends` is not the name of a module in the model, or the trainer
            needs the true gradients with respect to layers' outputs.
    """

    def __init__(self, trainer: Trainer, ends: Sequence[str], seed: int = 0) -> None:
        check_feedback(trainer)
        model = trainer.model
        inner = {name for name, _ in model.named_modules() if name}
        for name in ends:
            if name not in inner:
                raise ValueError(
                    f"direct feedback: the end of a block must be a module of the model, not "
                    f"{name!r}"
                )
        self._seed = seed
        self._outputs: list[tuple[int, Tensor]] = []  # blocks' outputs in the current forward pass
        self._signs: dict[int, Tensor] = {}
        hooks = [
            model.get_submodule(name).register_forward_hook(Hook(self._end_block, number))
            for number, name in enumerate(ends)
        ]
        begin = model.register_forward_pre_hook(Hook(self._begin))
        self._hooks = [begin, *hooks, model.register_forward_hook(Hook(self._connect))]

    def detach(self) -> None:
        """Remove the hooks, which restores back-propagation."""
        for hook in self._hooks:
            hook.remove()

    def _begin(self, *_: Any) -> None:
        self._outputs.clear()

    def _end_block(self, number: int, _module: nn.Module, _inputs: Any, output: Any) -> Any:
        """Stop gradients from flowing from the next block to this one."""
        if not torch.is_grad_enabled():
            return output
        if not torch.is_tensor(output):
            form = type(output).__name__
            raise ValueError(f"direct feedback needs tensors between blocks, not {form}")
        if output.requires_grad:
            self._outputs.append((number, output))
        return output.detach()

    def _connect(self, _module: nn.Module, _inputs: Any, outputs: Any) -> Any:
        """Pass the gradient of the model's outputs to the outputs of all blocks."""
        ends = list(self._outputs)
        self._outputs.clear()
        if not ends:
            return outputs
        if not torch.is_tensor(outputs) or outputs.dim() != 2:
            form = list(outputs.shape) if torch.is_tensor(outputs) else type(outputs).__name__
            raise ValueError(
                f"direct feedback needs a model with outputs [batch, classes], not {form}"
            )
        if any(len(y) != len(outputs) for _, y in ends):
            raise ValueError(
                "direct feedback needs the same number of examples in the outputs of all blocks"
            )
        if len(outputs) and any(outputs.data_ptr() == y.data_ptr() for _, y in ends):
            raise ValueError("direct feedback: the end of the model must not be in ends; remove it")
        signs = [self._signs_of(number, y, outputs.shape[1]) for number, y in ends]
        return _Connect.apply(outputs, signs, *(y for _, y in ends))  # type: ignore[no-untyped-call]

    def _signs_of(self, number: int, output: Tensor, classes: int) -> Tensor:
        """Return a block's signs, `[classes, elements per example]`, as 8-bit integers."""
        shape = classes, output.shape[1:].numel()
        kept = self._signs.get(number)
        if kept is None or kept.shape != shape or kept.device != output.device:
            generator = torch.Generator("cpu").manual_seed(self._seed + number * SPREAD)
            drawn = torch.randint(0, 2, shape, generator=generator, dtype=torch.int8, device="cpu")
            kept = self._signs[number] = (2 * drawn - 1).to(output.device)
        return kept


class _Connect(torch.autograd.Function):
    """Return a model's outputs, and pass their gradient to the outputs of blocks as well."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, signs: list[Tensor], *ends: Tensor) -> Tensor:
        ctx.signs, ctx.forms = signs, [(y.shape, y.dtype) for y in ends]
        return outputs.view_as(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, error: Tensor) -> Any:
        ends = zip(ctx.signs, ctx.forms)
        return error, None, *(fed_back(error, s).view(shape).to(d) for s, (shape, d) in ends)


def fed_back(error: Tensor, signs: Tensor) -> Tensor:
    """Return the error at the output of a block, `[batch, n]`.

    Args:
        error: the error at the model's outputs, `[batch, classes]`.
        signs: the block's signs, `[classes, n]`.
    """
    return error @ signs.to(error.dtype) / math.sqrt(signs.shape[1])


def check_feedback(trainer: Trainer) -> None:
    """Check that the trainer does not need the true gradients with respect to layers' outputs.

    Raises:
        ValueError: the trainer estimates G, or uses a quadratic model of the loss.
    """
    plan, settings = trainer.plan, getattr(trainer, "settings", None)
    made = [] if plan.of(0).of_gradient else plan.factors.values()
    if of_outputs := [factor.name for factor in made if factor.side == "G"]:
        raise ValueError(
            f"direct feedback needs Estimator(fisher_type='forward-only'), or a preconditioner of "
            f"the averaged gradient: factor {of_outputs[0]} would be computed from fed-back errors"
        )
    if settings is not None and settings.grafting.needs_batch:
        raise ValueError(
            "direct feedback needs a grafting other than QuadraticModel(), which requires the true "
            "gradient of the loss"
        )
