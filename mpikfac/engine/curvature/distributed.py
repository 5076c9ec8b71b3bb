"""A trainer's K-FAC preconditioner: statistics, factors, decompositions, directions.

Read `DistributedPreconditioner.learn` and `DistributedPreconditioner.direct` first: each of their
lines is a stage, and the methods of the stages follow in order.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from mpikfac.comm import SplitComm, summed
from mpikfac.engine.curvature.bases import Bases, Decomposer
from mpikfac.engine.curvature.decomposers import AtOnce, InBackground
from mpikfac.engine.curvature.directions import Directions
from mpikfac.engine.curvature.factors import FACTORS, Factors
from mpikfac.engine.curvature.recording import DeferredMoments, Moments, RecordingHooks
from mpikfac.engine.curvature.scales import Scales
from mpikfac.engine.gradients import Gradients
from mpikfac.engine.method import CoveredModel, Method, MethodFactory
from mpikfac.engine.nonfinite import Cautions
from mpikfac.engine.part import Part, PreconditionerPart
from mpikfac.layers import Coverage, Layer, Other, check_any_covered, cover
from mpikfac.model import check_rates, groups_of
from mpikfac.numerics import Scaler
from mpikfac.plan import (
    SHARDED,
    Choices,
    Plan,
    PlannedLayer,
    Seen,
    Strategy,
    check_layers,
    forward_only,
    plan_for,
)
from mpikfac.plan.names import (
    BASES,
    DECOMPOSE,
    DECOMPOSITIONS,
    DUE,
    GRADIENT_FACTORS,
    GRADIENT_WEIGHTS,
    LEARNED,
    PRECONDITIONER,
    SCALE_WEIGHTS,
    SCALES,
)
from mpikfac.preconditioners import Preconditioner
from mpikfac.settings import SETTINGS, Estimator, Numbers, Settings, cost

log = logging.getLogger("mpikfac")

OF_PRECONDITIONER = (
    *(PRECONDITIONER, DUE, BASES, DECOMPOSITIONS, SCALES, SCALE_WEIGHTS),
    *(LEARNED, GRADIENT_FACTORS, GRADIENT_WEIGHTS),
)
"""Kinds of items that can only be used with the preconditioner that wrote them."""


class DistributedPreconditioner(Method):
    """Precondition averaged gradients with distributed K-FAC.

    Attributes:
        factors: averages of factors over ranks and over time.
        hooks: decide which passes belong to the batch.
        moments: the contributions of the batch's passes to its statistics.
        bases: the decompositions that the rank computes or holds.
        directions: preconditioned gradients.
        of_preconditioner: parts that belong to a preconditioner, such as EKFAC's scales.
    """

    FACTORS: ClassVar[Mapping[str, type[Factors]]] = FACTORS
    MOMENTS: ClassVar[Mapping[bool, type[Moments]]] = {True: Moments, False: DeferredMoments}
    """The classes of moments, by whether the moments of a call are added immediately."""

    def __init__(
        self,
        gradients: Gradients,
        model: nn.Module,
        optimizer: Optimizer,
        settings: Settings,
        estimator: Estimator,
        preconditioners: Mapping[str, Preconditioner],
        team: SplitComm,
        plan: Plan,
    ) -> None:
        super().__init__(gradients)
        site = gradients.site
        self.site, self.plan, self.settings, self.estimator = site, site.plan, settings, estimator
        transport, refresh = self.plan.strategy.transport, self.plan.strategy.refresh
        dtype, at_identity = (
            estimator.factor_dtype or site.dtype,
            estimator.initial_factor == "identity",
        )
        self.factors: Factors = self.FACTORS[transport.reduce_factors_at](site, dtype, at_identity)
        usual: Decomposer = InBackground if refresh.staleness else AtOnce
        decomposer = refresh.attach(plan, preconditioners, team) or usual
        self.bases = Bases(site, preconditioners, settings.damping.is_relative, decomposer)
        self.of_preconditioner = list(_parts_of_preconditioners(preconditioners, self.bases))
        layers = gradients.layers
        at_once = site.device.type == "cpu" or self.factors.sender.early
        self.moments = self.MOMENTS[at_once](
            layers, self.factors, estimator, self.of_preconditioner
        )
        self.hooks = RecordingHooks(model, self.moments)
        self.directions = Directions(gradients, self.bases, model, optimizer, settings)
        self._cautions = Cautions()
        # Factors come first, so that no thread reduces the statistics of a dropped batch.
        self.parts: Sequence[Part] = (
            *(self.factors, self.moments, self.hooks),
            *(self.bases, *self.of_preconditioner, self.directions),
        )
        for part in self.parts:
            part.reset()
        self._count()
        if self.settings.budget.seen and site.plan.rank == 0:
            report_cost(self.settings, self.plan.layers)

    @property
    def examples(self) -> int:
        """The number of examples in the statistics of the local batch."""
        return self.moments.examples

    def numbers(self, step: int) -> Numbers:
        """Return the hyperparameters for a step."""
        return self.settings.at(step, self.plan.strategy.refresh.stagger)

    def compared(self, numbers: Numbers) -> dict[str, object]:
        """Return the hyperparameters of a step that must be equal on all ranks."""
        bound = self.settings.bound
        return {
            **{
                "damping": numbers.damping,
                "factor_decay": numbers.decay,
                "momentum": numbers.momentum,
            },
            **({bound: numbers.bound} if bound else {}),
            **{
                "factor_update_steps": numbers.factor_update_steps,
                "inv_update_steps": numbers.inv_update_steps,
            },
        }

    def begin_batch(self, step: int) -> None:
        """Begin the batch of a step; its passes are recorded if factors are due."""
        self.is_consistent = not self.plan.late and self.factors.settled
        due = self.settings.due("factor_update_steps", step)
        self.moments.begin = self.settings.begin(step)
        if due or self.factors.lacking:
            self.hooks.attach()
        else:
            self.hooks.detach()

    def begin_step(self, scaled: bool = False) -> None:
        """Begin a step, and discard the change in the loss predicted for the previous step.

        Raises:
            ValueError: a scaler is used with local steps, or `QuadraticModel` has no batch.
        """
        if scaled and self.plan.strategy.sync.local_steps:
            raise ValueError(
                "step(scaler) needs sync='synchronous', because a rank could otherwise skip a step "
                "alone, although factors are reduced over all ranks"
            )
        self.directions.graft.begin_step()
        self.directions.expected.zero_()

    def accumulate(self) -> None:
        """Store the statistics of the passes since the last call, as a part of the local batch."""
        if self.hooks.recording:
            self._finish_statistics()
            self.factors.accumulate()

    # -- the stages, in order --------------------------------------------------------------------

    def learn(self, numbers: Numbers) -> None:
        """Average the batch's factors, and refresh decompositions if a refresh is due.

        Collective over: world and column.
        """
        if self.hooks.recording:
            self._average_statistics(numbers)
            self._see()
        if numbers.refreshes or not self.bases.ready:
            self._publish_bases(numbers.step)  # those of the previous interval, if not in use yet
            self._decompose_owned(numbers)
        if self.bases.due(numbers.step):
            self._publish_bases(numbers.step)
        self.factors.release()

    def _average_statistics(self, numbers: Numbers) -> None:
        """Average the batch's statistics over ranks and over time."""
        weight = self.gradients.weight_of_statistics
        # Skipped if `accumulate` has done this for every part, or if the rank has no examples.
        if not self.factors.sender.in_parts and self.gradients.weight:
            self._finish_statistics()
            self.factors.send_rest()
        for part in self.of_preconditioner:
            part.reduce(self.factors.statistics, self.estimator.of_loss, weight)
        if weight != 1.0:
            self.factors.statistics.flat.mul_(weight)
        self.factors.average(numbers.decay, numbers.step)
        self.is_consistent = False  # not earlier: a failed reduction leaves the averages unchanged
        for part in self.of_preconditioner:
            part.merge(numbers.decay, numbers.step)

    def _see(self) -> None:
        """Record how many vectors each layer has in the first batch with statistics.

        Collective over: world, once per run.
        """
        budget, layers = self.settings.budget, self.plan.layers
        vectors, chosen = self.moments.vectors, self.moments.chosen
        if not self.plan.factors or {layer.name for layer in layers} <= budget.seen.keys():
            return
        numbers = [n for layer in layers for n in (vectors[layer.name], chosen[layer.name])]
        vectors.clear()
        chosen.clear()
        of_all = summed(self.site.grid.world, numbers)
        local = self.plan.strategy.assignment.factor_reduction == "local"
        if local:  # only the owner of a layer records it
            of_all = [self.plan.grid.count * n for n in of_all]
        pairs = zip(of_all[::2], of_all[1::2])
        budget.seen = {x.name: Seen(*map(int, pair)) for x, pair in zip(layers, pairs)}
        self._count()
        whole = [dataclasses.replace(layer.shape, largest=None) for layer in layers]
        cut = [budget.cut(shape) for shape in whole]
        self.outgrown = budget.cuts and cut != [layer.shape for layer in layers]
        if self.site.plan.rank == 0 and not self.outgrown:
            report_cost(self.settings, layers)

    def _count(self) -> None:
        """Count the operations of the layers, if a batch has been recorded."""
        self.settings.budget.count(self.plan.layers, self.settings.grafting.orthogonalize)

    def _finish_statistics(self) -> None:
        """Turn a batch's sums into factors; warn about layers without sums or gradients."""
        self.hooks.check_ended()
        seen = self.moments.finish()
        layers = self.gradients.layers
        for layer in layers:
            if not seen.get(layer.name, True) and self.gradients.reader.nonzero(layer):
                self._cautions.unseen(layer)
        self._cautions.without_gradient(
            [x.name for x in layers if seen.get(x.name) and x.parameters[0].grad is None]
        )

    def _decompose_owned(self, numbers: Numbers) -> None:
        """Start decomposing the rank's factors: all, or those of one slot of the refresh."""
        step, damping = numbers.step, numbers.damping
        in_float32 = self.gradients.arena.flat.dtype == torch.float32
        if in_float32 and not self.settings.damping.is_relative:
            self._cautions.little_damping(damping, step)
        turn = numbers.turn if self.bases.ready else None
        factors = self.factors.whole(turn)
        self.is_consistent = False  # the state now includes what this step has started
        warn = partial(self._cautions.large_factors, damping=damping, step=step)
        self.bases.decompose(factors, step, damping, turn, warn)

    def _publish_bases(self, step: int) -> None:
        """Send decompositions to the workers of their layers."""
        if not self.bases.pending:
            return
        self.is_consistent = False
        with self.site.trace.stage(DECOMPOSE):
            self.site.trace.calls["decompositions"] += self.bases.take(step)
        self.bases.publish()
        for part in self.of_preconditioner:
            part.restart(self.factors.weights, self.bases.turn)

    def direct(self, numbers: Numbers) -> None:
        """Precondition averaged gradients, and write the directions to the model.

        Collective over: row; also world if the step is clipped or uses a `QuadraticModel`.
        """
        self.make_directions(numbers)
        self.gradients.write(self.directions.slots)
        self.gradients.write(self.gradients.uncovered_slots)
        self.is_consistent = False
        with self.hooks.pausing():
            self.directions.descend(numbers.damping)

    def make_directions(self, numbers: Numbers) -> None:
        """Precondition gradients, send the directions to all ranks, and clip the step."""
        if self.settings.grafting.by_adam:
            self.is_consistent = False  # grafting updates its averages of gradients
        self.directions.make(numbers)

    # -- batches without a step ------------------------------------------------------------------

    def unscale(self, scaler: Scaler) -> bool:
        """Divide a batch's statistics by the loss scale; return whether they are finite."""
        if not (self.hooks.recording and self.estimator.of_loss):
            return True
        scale = scaler.get_scale()
        # A list, so that all parts are unscaled even if the first one is not finite.
        finite = [self.factors.unscale(self.moments.of_gradients, scale)]
        finite += [part.unscale(scale) for part in self.of_preconditioner]
        return all(finite)

    # -- changes of the model, and the state -----------------------------------------------------

    def known(self, state: Mapping[str, Any]) -> set[str]:
        """Return the names of K-FAC's items in `state`, except items of another preconditioner."""
        prefix = Part.PREFIX
        names = {name.removeprefix(prefix) for name in state if name.startswith(prefix)}
        if state.get(prefix + PRECONDITIONER) == self.plan.preconditioners:
            return names
        return {name for name in names if not name.startswith(OF_PRECONDITIONER)}

    def prepare_change(self) -> None:
        """Finish messages; with reduce_factors_at="inverses", move averages to their owners.

        Collective over: world.

        Raises:
            UserError: there are curvature servers, with which the trained parameters must not
                change.
        """
        self.bases.decomposer.check_same_model()
        self.factors.state_dict()

    def take_over(self, before: Any) -> None:
        """Adopt the averages of layers that have not changed.

        Collective over: world.
        """
        self._cautions = before._cautions
        self.factors.take_over(before.factors)
        self.directions.take_over(before.directions)

    def close(self) -> None:
        """Finish messages, and release the curvature servers.

        Collective over: world.
        """
        self.factors.settle()
        self.bases.decomposer.close()


class PreconditionerFactory(MethodFactory):
    """The choices of K-FAC: settings, estimator, preconditioners and coverage.

    Args:
        preconditioners: the run's preconditioner, followed by all others that rules can select for
            layers, by name.
    """

    def __init__(
        self,
        settings: Settings,
        estimator: Estimator,
        preconditioners: Mapping[str, Preconditioner],
        coverage: Coverage,
    ) -> None:
        self.settings, self.estimator = settings, estimator
        self.preconditioners, self.coverage = preconditioners, coverage
        self.momentum = settings.grafting.momentum

    def cover(self, model: nn.Module) -> tuple[list[Layer], list[Other]]:
        """Return the layers that K-FAC covers, and the uncovered tensors."""
        coverage, cut = self.coverage, self.settings.budget.cut
        if self.estimator.fisher_type == "forward-only":  # no gradients to estimate G from
            rule = coverage.rule
            coverage = dataclasses.replace(coverage, rule=lambda layer: forward_only(rule(layer)))
        layers, others = cover(model, coverage, self.estimator.statistics_dtype)
        check_any_covered(model, layers, coverage)
        for layer in layers:
            layer.shape = cut(layer.shape, layer.spatial)
        return layers, others

    def plan(
        self, model: CoveredModel, strategy: Strategy, optimizer: Optimizer, team: SplitComm
    ) -> Plan:
        """Plan the communication, and check that choices, ranks and optimizer are compatible.

        Raises:
            ValueError: two choices exclude each other, the number of curvature servers
                differs from the strategy's, a layer is not in the optimizer, or the optimizer
                lacks a learning rate that a choice needs.
        """
        plan = self._planned(model, strategy, team.trains.size)
        check_joins(team.intercomm, plan.strategy.refresh.servers)
        groups_of(model.layers, optimizer)
        if self.settings.clip is not None and self.settings.clip.of_step:
            check_rates(optimizer, f"clip={self.settings.clip!r}")
        if self.settings.damping.adapted:
            check_rates(optimizer, "damping=LevenbergMarquardt(...)")
        return plan

    def _planned(self, model: CoveredModel, strategy: Strategy, ranks: int) -> Plan:
        # This raises an error before step 0 if the interval is invalid.
        self.settings.due("inv_update_steps", 0, strategy.refresh.stagger)
        forms = tuple(preconditioner.form for preconditioner in self.preconditioners.values())
        run = next(iter(self.preconditioners.values()))
        layer_shapes = [layer.shape for layer in model.layers]
        settings = {
            **{f"preconditioner.{field}": value for field, value in vars(run).items()},
            **vars(self.estimator),
            **self.settings.described(),
            **{"ranks": ranks, "grad_workers": strategy.assignment.workers(ranks)},
            "preconditioner": run.form.name,
            "fully_shard": bool(model.sharding),
        }
        needs = [need for form in forms for need in form.needs]
        check_layers(
            [*SETTINGS, *SHARDED, *self.settings.grafting.needs, *needs],
            layer_shapes,
            Choices(strategy, settings),
        )
        averages, bases = self.estimator.factor_dtype, run.dtype
        itemsize = model.dtype.itemsize
        of_averages = averages.itemsize if averages else itemsize
        sizes = itemsize, of_averages, bases.itemsize if bases else itemsize
        shapes, means = model.of_uncovered()
        distributed = model.split, model.sharding
        return plan_for(layer_shapes, ranks, strategy, shapes, forms, *sizes, means, *distributed)

    def choices(self) -> dict[str, object]:
        """Return the choices that must be equal on all ranks."""
        return {
            "preconditioner": next(iter(self.preconditioners.values())),
            **dataclasses.asdict(self.estimator),
            **self.settings.described(),
        }

    def build(
        self,
        gradients: Gradients,
        model: nn.Module,
        optimizer: Optimizer,
        team: SplitComm,
        plan: Plan,
    ) -> DistributedPreconditioner:
        """Return the preconditioner for the model's current layers."""
        values = self.settings, self.estimator, self.preconditioners
        kind = DistributedPreconditioner
        if next(iter(self.preconditioners.values())).form.of == "gradient":
            from mpikfac.engine.curvature.gradient_factors import OfGradient

            kind = OfGradient
        return kind(gradients, model, optimizer, *values, team, plan)


def report_cost(settings: Settings, layers: Sequence[PlannedLayer]) -> None:
    """Log what a step costs; warn if that is more than twice the cost of a first-order step."""
    budget, shapes = settings.budget, {layer.name: layer.shape for layer in layers}
    times, line = cost(
        budget.operations, shapes, settings.factor_update_steps, settings.inv_update_steps
    )
    if line:
        log.log(logging.WARNING if times > 2 else logging.INFO, line)


def check_joins(link: Any, ranks: int) -> None:
    """Check that `link` connects the rank to `ranks` curvature servers; None means no servers.

    Raises:
        ValueError: the number of curvature servers is not `ranks`.
    """
    joined = link.remote_size if link else 0
    if joined != ranks:
        raise ValueError(
            f"refresh.servers={ranks}, but comm has {joined} curvature servers; pass the result of "
            f"mpikfac.split_comm(comm, {ranks})"
        )


def _parts_of_preconditioners(
    preconditioners: Mapping[str, Preconditioner], bases: Bases
) -> Iterable[PreconditionerPart]:
    """Yield the parts that belong to the preconditioners of the layers."""
    used = dict.fromkeys(layer.preconditioner.name for layer in bases.plan.layers)
    if any(layer.rescaled for layer in bases.plan.layers):
        yield Scales(bases)
    for name in sorted(used):
        yield from preconditioners[name].attach(bases)
