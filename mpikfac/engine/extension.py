"""Attach the parts that methods add to a trainer, without branches in the trainer's step.

The setting that selects a method, such as `LSGD`, creates the method's part of the trainer, and
imports the part's module only when a run uses the method, so the step does not depend on the
methods in `lab`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from mpikfac.engine.gradients import Gradients
from mpikfac.engine.part import Part
from mpikfac.engine.site import Site


class OneModel(Part):
    """Base class for exchanges between ranks other than reductions; it exchanges nothing itself.

    With this class, all ranks train one model, so reductions are sufficient. Subclasses override
    the hooks of a step: `begin_step`, `before_update` (not called in steps that ranks skip) and
    `end_step`.

    Attributes:
        heard: whether the votes are means over all ranks.
    """

    PREFIX = ""

    def __init__(self, site: Site, gradients: Gradients) -> None:
        super().__init__(site)
        self.gradients = gradients
        self.heard = True

    @property
    def follows(self) -> bool:
        """Whether the trainer's ranks act on the votes after a step."""
        return self.heard

    def report_loss(self, loss: float | Tensor) -> None:
        """Report the mean loss of the local batch, before the step.

        Raises:
            ValueError: the exchange does not use the loss.
        """
        raise ValueError(
            "exchange.report_loss(loss) is for sync=LSGD(...); leave it out with other exchanges"
        )

    def begin_step(self, step: int) -> None:
        """Begin a step, before gradients are averaged."""

    def before_update(self, step: int) -> None:
        """Change the gradients of the model before the optimizer uses them."""

    def end_step(self, step: int) -> None:
        """End a step, after the optimizer.

        Collective over: world, if an exchange is due.
        """

    def average_replicas(self) -> None:
        """Make all replicas of the model equal; in the base class, they never differ.

        Collective over: world.
        """

    def check_combined(self) -> None:
        """Check that all ranks have the same model.

        Raises:
            ValueError: replicas can differ.
        """

    def shared(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the rank's part of the state; names of per-rank items contain the rank."""
        return state

    def of_rank(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the part of a state for the rank's copy of the model."""
        return state


def exchange_of(site: Site, gradients: Gradients) -> OneModel:
    """Return the exchange that the strategy selects."""
    strategy = site.plan.strategy
    chosen: OneModel | None = strategy.sync.attach(site, gradients)
    if chosen is None and (compressor := strategy.compression.gradients):
        chosen = compressor.attach(site, gradients)
    return chosen or OneModel(site, gradients)


def attached(site: Site, gradients: Gradients, model: nn.Module) -> Iterable[Part]:
    """Yield the parts that the chosen methods add; a part can replace the gradients' sender."""
    for module in model.modules():  # the first split layer attaches the parts for all split layers
        attach = getattr(vars(module).get("forward"), "attach", None)
        if attach is not None:
            yield from attach(site, gradients, model)
            break
    yield from site.plan.strategy.sync.aggregation.attach(site)
