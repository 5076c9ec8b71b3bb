"""A model that K-FAC covers: the plan, the parts of a step, and the state of all parts."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mpikfac.comm import Comm, Grid, Team, agree, broadcast, together
from mpikfac.engine import (
    Bases,
    Curvature,
    Directions,
    Factors,
    Flags,
    Gradients,
    Nonfinite,
    Part,
    Recorder,
    Replicas,
    Scales,
    Site,
    check_joins,
    check_loaded_momentum,
    check_momentum,
    common_type,
    describe,
    fitting,
    groups_of,
    hand_over_state,
    load_model_state,
    missing_state,
    model_state,
    needed_state,
    of_copies,
    taking_up,
)
from mpikfac.errors import UserError
from mpikfac.hybrid import split_of
from mpikfac.layers import Coverage, Votes, cover
from mpikfac.plan import Plan, Strategy, check_layers, forward_only, plan_for
from mpikfac.settings import SETTINGS, Estimator, Settings
from mpikfac.solvers import Solver
from mpikfac.trace import Trace

log = logging.getLogger("mpikfac")

GOLDEN_RATIO = (5**0.5 - 1) / 2  # multiples, modulo 1, lie evenly between 0 and 1
# Names of items of the state.
OWN = "kfac/"
OF_SOLVER = {"solver", "due", "bases", "decompositions", "scales", "scale-weights"}


class Assembly:
    """The base of `KFAC`: the plan and the parts, made for the model as it is; and their state.

    Args:
        solvers: the run's solver, and the solvers that rules name.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        team: Team,
        solvers: Mapping[str, Solver],
        settings: Settings,
        estimator: Estimator,
        coverage: Coverage,
        trace: Trace,
    ) -> None:
        self.model, self._optimizer, self._team, self.trace = model, optimizer, team, trace
        self.settings, self.estimator = settings, estimator
        self._solvers, self._coverage = solvers, coverage
        self.nonfinite = Nonfinite(team.trains.rank)

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer that was given; another optimizer needs another `KFAC`."""
        return self._optimizer

    @property
    def communicators(self) -> list[Comm]:
        """All communicators that steps use."""
        return self.grid.communicators

    @property
    def _momentum(self) -> tuple[Strategy, float]:
        """The choices that give momentum: the strategy, and the momentum of gradients."""
        return self.plan.strategy, self.settings.length.momentum

    # -- parts -----------------------------------------------------------------------------------

    def _prepare(self, strategy: Strategy) -> tuple[torch.dtype, torch.device]:
        """Cover the model, and make the plan; return the dtype to compute in, and the device.

        Raises:
            ValueError: a choice or a layer cannot work.
        """
        dtype, device = self._cover(self._coverage)
        self.plan = self._planned(strategy, self._team.size, dtype)
        check_joins(self._team.link, self.plan.strategy.refresh.curvature_ranks)
        groups_of(self.layers, self.optimizer)
        check_momentum(self.optimizer, *self._momentum)
        return dtype, device

    def _connect(self, dtype: torch.dtype, device: torch.device) -> None:
        """Compare ranks, make the communicators, and build the parts of a step.

        Collective over: world.

        Raises:
            UserError: ranks disagree.
        """
        team, model = self._team, self.model
        self._check_agreement(team.trains)
        broadcast(team.trains, [*model.parameters(), *model.buffers()])
        per_node = self.plan.strategy.transport.ranks_per_node
        rows, groups = self.plan.grid.workers, self.plan.split.distribution
        self.grid = Grid(team.trains, rows, self.trace, per_node, groups)
        of_rank = self.plan.of(team.trains.rank)
        self._build(
            Site(of_rank, self.grid, self.trace, dtype, device, self.nonfinite, Flags()), team
        )

    def _cover(self, coverage: Coverage) -> tuple[torch.dtype, torch.device]:
        """Find the layers to cover; return the dtype to compute in, and the device."""
        if self.estimator.fisher == "forward-only":  # nothing estimates G
            rule = coverage.rule
            coverage = dataclasses.replace(coverage, rule=lambda layer: forward_only(rule(layer)))
        rounded_to = self.estimator.statistics_dtype
        self.layers, self.others = cover(self.model, coverage, rounded_to)
        dtype, device = common_type([*self.layers, *self.others])
        if not hasattr(self, "_votes"):
            self._votes = Votes(dtype, device)
        self.others.append(self._votes)
        self.votes = self._votes.tensor
        return dtype, device

    def _planned(self, strategy: Strategy, ranks: int, dtype: torch.dtype) -> Plan:
        """Return the plan, if all choices fit together.

        Raises:
            ValueError: two choices cannot work together.
        """
        self.settings.due("basis_every", 0, strategy.refresh.stagger)  # refused before step 0
        forms = tuple(solver.form for solver in self._solvers.values())
        run = next(iter(self._solvers.values()))
        shapes = [layer.shape for layer in self.layers]
        choices = {
            **strategy.choices(),
            **vars(self.estimator),
            **self.settings.described(),
            **{"ranks": ranks, "solver": run.name, "basis_dtype": run.dtype},
        }
        needs = [need for form in forms for need in form.needs]
        check_layers([*SETTINGS, *needs], shapes, choices)
        others = [(other.name, tuple(other.tensor.shape)) for other in self.others]
        kept = (self.estimator.factor_dtype or dtype).itemsize, (run.dtype or dtype).itemsize
        means = [other.name for other in self.others if not other.parameters]
        split = split_of(self.model, [*self.layers, *self.others], ranks)
        sizes = dtype.itemsize, *kept
        return plan_for(shapes, ranks, strategy, others, forms, *sizes, means, split)

    def _build(self, site: Site, team: Team) -> None:
        """Make the parts of a step, in order."""
        self.gradients = Gradients(site, self.model, self.layers, self.others)
        self.replicas = Replicas(site, self.gradients)
        self._stepped = self.gradients.stepped(self.model)
        at_identity = self.estimator.start == "identity"
        self.factors = Factors(site, self.estimator.factor_dtype or site.dtype, at_identity)
        self.recorder = Recorder(self.model, self.layers, self.factors, self.estimator)
        self.curvature = Curvature(self.plan, site, team.link, self._solvers) if team.link else None
        relative = self.settings.damping.is_relative
        self.bases = Bases(site, self._solvers, relative, self.curvature)
        self.scales = Scales(site, self.bases)
        if site.plan.rescaled:
            self.recorder.after_call = self.scales.record
        self._messages = {share: site.plan.publish_bases(share) for share in site.plan.shares}
        self.directions = Directions(self.gradients, self.bases, self.optimizer, self.settings)
        # Factors first: no thread may add up statistics that are forgotten.
        self._parts: tuple[Part, ...] = (
            *(self.factors, self.recorder, self.bases, self.scales, self.directions),
        )
        self._forget()

    def _check_agreement(self, comm: Comm) -> None:
        agree(
            comm,
            {
                **describe(self.model, self.optimizer),
                "strategy": self.plan.strategy,
                "plan": self.plan.digest(),
                "solver": next(iter(self._solvers.values())),
                **dataclasses.asdict(self.estimator),
                **self.settings.described(),
            },
        )

    def _begin(self, step: int) -> None:
        """Begin a step: from here on, the state is the state after `step` steps."""
        self.steps = step
        self.intact = not self.factors.plan.late and self.factors.settled
        due = self.settings.due("factor_every", step)
        self.recorder.recording = due or self.factors.lacking
        # With whole intervals between factors, all beginnings take turns: no position of a batch
        # whose examples are frames or windows of few images is left out for ever.
        self.recorder.begin = step * GOLDEN_RATIO % 1

    def _leave_state(self) -> None:
        """Note a change of the state: until `_begin`, a part of the state is of a later step."""
        self.intact = False

    def _forget(self) -> None:
        """Forget statistics and bases, and start averages anew."""
        for part in (*self._parts, self.replicas):
            part.forget()
        self.grid.forget()

    def _take_up(self) -> None:
        """Build the parts anew, for the model as it is now; averages of unchanged layers stay."""
        if self.curvature:
            raise UserError(
                "the parameters that require a gradient have changed; with curvature ranks, close "
                "K-FAC and make it anew"
            )
        factors, directions, stepped = self.factors, self.directions, self._stepped
        replicas = self.replicas
        replicas.combine()
        factors.state_dict()  # settles; with reduce_at="bases", averages move to their owners
        with taking_up():
            prepared = self._prepare(self.plan.strategy)
        self.detach()
        self.grid.free()
        self._connect(*prepared)
        self.factors.take_over(factors)
        self.directions.take_over(directions)
        self.replicas.take_over(replicas)
        hand_over_state(self.grid.world, self.model, self.optimizer, stepped, self._stepped)
        self._begin(self.steps)
        log.info("step %d: the trained parameters have changed; taken up", self.steps)

    def detach(self) -> None:
        """Remove the hooks; the model is as before, except for the weights."""
        self.recorder.detach()
        self.gradients.detach()

    def close(self) -> None:
        """Free the communicators, and let curvature ranks go: on curvature ranks, `serve` returns.

        Pending messages are sent and kept first, and hooks are removed. No step may follow.

        Collective over: world.
        """
        self.factors.settle()
        self.detach()
        self.grid.free()
        if self.curvature:
            self.curvature.close()
            self.curvature = None  # a second call lets nobody go

    # -- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the rank's share of the state, by name; shares of all ranks make the whole.

        Model, optimizer, factors as packed triangles (or vectors), weights of factors, bases and
        pending bases, scales, averages of grafting, adapted damping, and the number of steps:
        everything needed to resume exactly, also between two decompositions. Losses of encoding are
        dropped, as in a restart.

        With `exchanged="weights"`, the optimizer's state of each rank.

        Collective over: world with `reduce_at="bases"` or `overlap`, else none.

        Raises:
            ValueError: ranks hold different copies of the model; `combine` comes first.
        """
        self.replicas.check_combined()
        state = model_state(self.model, self.optimizer, self._stepped)
        kept = {n: value for part in self._parts for n, value in part.state_dict().items()}
        self.grid.forget()  # now that no message is on its way
        state |= {"trainer/steps": self.steps} | {OWN + n: v for n, v in kept.items()}
        state |= self.replicas.state_dict()
        rank, exchange = self._team.trains.rank, self.plan.strategy.exchange
        return of_copies(state, rank) if exchange.of_copies else state

    def missing(self, names: Collection[str]) -> set[str]:
        """Return the names of a complete state that `names` lack."""
        own = {name.removeprefix(OWN) for name in names if name.startswith(OWN)}
        whole = {OWN + name for part in self._parts for name in part.complete(own)}
        whole |= self.replicas.complete(names)
        return missing_state(self.model, names) | whole.difference(names)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the rank's part of `state`, from any strategy and any number of ranks.

        All ranks load the state, or no rank does. A first-order run's state is accepted, and a
        state of a different estimator, of all layers or of some: statistics of layers with a
        different estimator, and all bases, are made at the next step.

        Collective over: world.

        Raises:
            UserError: on some rank an item is missing, has another dtype or shape than the model,
                or cannot be read.
        """
        with together(self.grid.world, "loading state", untrusted=True):
            state = self.replicas.copy_in(state)
            found = needed_state(self.model, self.optimizer, self._stepped, state)
            names = self._own_names(state)
            check_loaded_momentum(found, state, *self._momentum)
            needed = {n: v for part in self._parts for n, v in part.needed(names).items()}
            own = {OWN + name: value for name, value in needed.items()}
            kept = fitting(state, own | self.replicas.needed(state.keys()), rounded=True)
        self.gradients.recall()
        self.factors.recall()
        load_model_state(self.model, self.optimizer, self._stepped, found)
        self.gradients.keep()
        self.gradients.discard()
        self._forget()
        for part in self._parts:
            part.load_state_dict({n.removeprefix(OWN): v for n, v in kept.items()}, names)
        self.replicas.load_state_dict(kept, names)
        self._begin(int(found["trainer/steps"]))

    def _own_names(self, state: Mapping[str, Any]) -> set[str]:
        """Return names of K-FAC's own items, without decompositions of a different solver."""
        names = {name.removeprefix(OWN) for name in state if name.startswith(OWN)}
        if state.get(f"{OWN}solver") == self.plan.all_solvers:
            return names
        return {name for name in names if name.partition("/")[0] not in OF_SOLVER}
