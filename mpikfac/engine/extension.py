"""Attachments: what a method adds to the steps of a trainer, without a branch in the step.

The type of a method makes its part of the trainer, and imports the part's module when a run asks
for it: no part of a step knows a method of the laboratory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from mpikfac.engine.gradients import Gradients
from mpikfac.engine.part import Part
from mpikfac.engine.site import Site


class OneModel(Part):
    """The base of all exchanges: all ranks step one model, and exchange nothing but sums.

    An extension in its place has hooks in a step: `begin_step`, `before_update` (not in a step that
    ranks skip), `end_step`.

    Attributes:
        heard: whether votes are of all ranks.
    """

    PREFIX = ""

    def __init__(self, site: Site, gradients: Gradients) -> None:
        super().__init__(site)
        self.gradients = gradients
        self.heard = True

    @property
    def follows(self) -> bool:
        """Whether the trainer's ranks follow the votes of the step."""
        return self.heard

    def report_loss(self, loss: float | Tensor) -> None:
        """Take the mean loss of the rank's share of the batch, before the step.

        Raises:
            ValueError: the exchange takes no loss.
        """
        raise ValueError(
            "exchange.report_loss(loss) is for sync=LSGD(...); other exchanges take no loss"
        )

    def begin_step(self, step: int) -> None:
        """Begin a step, before gradients are averaged."""

    def before_update(self, step: int) -> None:
        """Change the gradients of the model before the optimizer takes them."""

    def end_step(self, step: int) -> None:
        """End a step, after the optimizer.

        Collective over: world, if an exchange is due.
        """

    def average_replicas(self) -> None:
        """Make all copies of the model equal; here copies never differ.

        Collective over: world.
        """

    def check_combined(self) -> None:
        """Return if all ranks hold the same model.

        Raises:
            ValueError: copies may differ.
        """

    def shared(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the rank's share of the state, with names of the rank for what ranks differ in."""
        return state

    def of_rank(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the part of a state for the rank's copy of the model."""
        return state


def exchange_of(site: Site, gradients: Gradients) -> OneModel:
    """Return the exchange that the strategy asks for."""
    strategy = site.plan.strategy
    chosen: OneModel | None = strategy.sync.attach(site, gradients)
    if chosen is None and (compressor := strategy.compression.gradients):
        chosen = compressor.attach(site, gradients)
    return chosen or OneModel(site, gradients)


def attached(site: Site, gradients: Gradients, model: nn.Module) -> Iterable[Part]:
    """Yield the further parts that methods need; a part may replace the sender of gradients."""
    for module in model.modules():  # of split layers, the first one attaches for all
        attach = getattr(vars(module).get("forward"), "attach", None)
        if attach is not None:
            yield from attach(site, gradients, model)
            break
    yield from site.plan.strategy.sync.aggregation.attach(site)
