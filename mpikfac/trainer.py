"""The trainer: one step, from local gradients to identical new weights on every rank.

Read `Trainer.step` first; `Trainer._step` calls the stages in order. `FirstOrderTrainer` trains
with first-order methods; `KFAC` (kfac.py) is the same trainer with a preconditioner. `Built` holds
the parts of a step.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from mpikfac.comm import Comm, Grid, SplitComm, WatchedSteps, agree, broadcast, together
from mpikfac.engine import (
    CoveredModel,
    Everyone,
    Flags,
    Gradients,
    Method,
    MethodFactory,
    Nonfinite,
    OneModel,
    Part,
    Site,
    attached,
    average_scaled,
    check_weighable,
    usable_scaler,
)
from mpikfac.errors import RanksDifferError
from mpikfac.layers import Layer, Other, Votes, leave_model, take_model
from mpikfac.model import (
    Descent,
    Joined,
    StepGuard,
    check_equal,
    check_foreign,
    check_loaded_momentum,
    check_momentum,
    check_optimizer,
    check_owned,
    check_replicas,
    check_synchronous,
    check_tensors,
    check_wrappers,
    check_written,
    checksums,
    common_type,
    describe,
    describe_tensors,
    fitting,
    group_settings,
    hand_over_state,
    load_model_state,
    members,
    missing_state,
    model_state,
    needed_state,
    sharding_of,
    taking_up,
    unstored_settings,
)
from mpikfac.numerics import Scaler, is_sharded, without_autocast
from mpikfac.plan import Plan, Split, Strategy, check_size, strategy_of
from mpikfac.plan.names import STEPS
from mpikfac.settings import Numbers
from mpikfac.trace import Trace

COMPARE_EVERY = 100
"""The number of steps between two comparisons of weights and buffers across ranks."""

log = logging.getLogger("mpikfac")


@dataclass(frozen=True)
class Drawn:
    """The covered model and its plan, which a rank determines without communication."""

    model: CoveredModel
    plan: Plan


@dataclass(frozen=True)
class Built:
    """The parts of a step on one rank, for the model's current layers.

    Attributes:
        method: turns averaged gradients into directions.
        exchange: the exchanges between ranks, apart from reductions.
        parts: the parts whose items are stored in the state.
        stepped: the parameters that the rank's optimizer updates, by name.
    """

    plan: Plan
    grid: Grid
    gradients: Gradients
    method: Method
    exchange: OneModel
    update: Everyone
    parts: Sequence[Part]
    stepped: Mapping[str, nn.Parameter]


class Trainer:
    """Train a model on all ranks: average gradients, compute directions, and take identical steps.

    Collective over: world. All ranks get rank 0's model.

    Attributes:
        steps: the number of completed steps.
        nonfinite: counts of non-finite values.
        trace: seconds and bytes of every stage.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        team: SplitComm,
        strategy: Strategy,
        factory: MethodFactory,
        trace: Trace | None,
    ) -> None:
        check_synchronous(strategy)
        self.model, self._optimizer, self._team = model, optimizer, team
        self._strategy, self._factory = strategy, factory
        self.trace = trace or Trace()
        self.nonfinite = Nonfinite(team.trains.rank)
        self.steps = 0
        self._guard = StepGuard(optimizer, self)
        self._unequal: set[str] = set()  # buffers that can differ between ranks
        self._whole = True  # the value of `is_consistent` when the batch began
        drawn = self._draw()
        self._steps = WatchedSteps(team.trains, type(self).__name__)
        self.built = self._build(drawn)
        self._begin_batch(0)
        take_model(model, self)
        unstored = ", ".join(unstored_settings(optimizer))
        if unstored and team.trains.rank == 0:
            log.warning(
                "the optimizer's groups hold %s: these values are not compared across ranks and "
                "not stored in states; use numbers, or tuples of numbers",
                unstored,
            )

    # -- a step ----------------------------------------------------------------------------------

    @without_autocast
    def step(
        self,
        scaler: Scaler | None = None,
        *,
        max_norm: float | None = None,
        examples: int | None = None,
    ) -> None:
        """Take a step from local gradients to new weights, which are identical on all ranks.

        A parameter without a gradient is treated as if its gradient were 0. Parameters that were
        frozen, unfrozen, added or replaced since the last step do not change in this step; from the
        next step on, the trainer trains the changed model.

        Collective over: world.

        Args:
            scaler: a `torch.amp.GradScaler` whose `scale(loss)` was used for the backward pass.
                First, gradients and statistics are unscaled. If any of them is not finite on some
                rank, all ranks skip the step: it is counted in `steps`, but the batch is ignored,
                and updates of factors and bases that are due in this step are left out. Then the
                scale is reduced or, after enough steps, increased, identically on all ranks. Do not
                call the scaler's `unscale_`, `step` and `update`: this method replaces all three.
            max_norm: the maximum norm of the averaged gradient of all parameters; a longer gradient
                is scaled down before K-FAC preconditions it. None for no bound. Must be equal on
                all ranks.
            examples: the number of examples over which the rank's loss is a mean, if this differs
                between ranks; passed by all ranks or by none. Averages of gradients, statistics and
                factors over ranks are weighted by it; the passes of a rank with 0 examples are
                ignored. None: all ranks have the same weight.

        Raises:
            ValueError: a scaler is passed with `overlap` or local steps; `examples` is passed with
                `overlap` or `virtual_ranks`; a gradient was changed after `overlap` had sent it;
                the model was converted or moved; `max_norm` is negative; the batch was not passed
                to `QuadraticModel` by `grafting.set_batch(inputs, loss)`; the optimizer or a
                scheduler sets a momentum in addition to the momentum of the grafting or the
                compression; or a parameter with a gradient is in the optimizer but not in the
                model.
            UserError: ranks disagree on the model, learning rates or settings; or the trainer
                cannot adopt a change in the trained parameters.
            RanksDifferError: ranks disagree on an argument, or on weights, which are compared every
                100 steps.
        """
        scaler = self._checked(scaler, max_norm, examples)
        self._warn_of_unfinished()
        arguments = {
            "max_norm": None if max_norm is None else float(max_norm),
            "examples": None if examples is None else "given",
            "scaler": None if scaler is None else "given",
        }
        with self._steps.taking(self.steps, arguments):
            self._step(scaler, max_norm, examples, arguments)

    def _step(
        self,
        scaler: Scaler | None,
        max_norm: float | None,
        examples: int | None,
        arguments: Mapping[str, object],
    ) -> None:
        """Take a step; `arguments` are the arguments of `step` that must be equal on all ranks.

        Collective over: world.
        """
        gradients, method, exchange = self.built.gradients, self.built.method, self.built.exchange
        numbers = method.numbers(self.steps)
        method.begin_step(scaled=scaler is not None)
        exchange.begin_step(self.steps)
        compared = self._compared(numbers, arguments) | self._tensors()
        if gradients.sender.in_parts:  # `accumulate` has read the gradients
            gradients.look_at_parts(compared)
        else:
            gradients.look(compared)
            gradients.read()
        if examples is not None:
            gradients.weigh(examples, method.examples)
            if not examples:
                method.abort_batch()  # this also drops passes in which all labels were ignored
        if scaler is not None and not average_scaled(gradients, scaler, method.unscale(scaler)):
            self._skip(arguments)
            return
        method.learn(numbers)
        if scaler is None:
            gradients.average()
        gradients.check(self.steps)
        if max_norm is not None:
            self.built.update.bound(max_norm)
        method.direct(numbers)
        exchange.before_update(self.steps)
        with self._guard.stepping():
            self.built.update.step(self.optimizer)
        self._end(arguments)

    def _checked(
        self, scaler: Scaler | None, max_norm: float | None, examples: int | None
    ) -> Scaler | None:
        """Check the arguments of a step, and return the scaler, or None if it is disabled.

        Nothing has changed yet: after an error, the program can call `step` again.
        """
        if max_norm is not None:
            check_size("max_norm", max_norm)
        if examples is not None:
            check_weighable(examples, self.built.plan)
        if unknown := self.built.gradients.unknown(members(self.optimizer)):
            check_foreign(unknown, self.model)
        check_momentum(self.optimizer, self._strategy, self._factory.momentum)
        self.built.grid.check_open()
        if scaler is None:
            return None
        return usable_scaler(self.built.gradients, scaler, self.optimizer)

    def _compared(
        self, numbers: Numbers, arguments: Mapping[str, object] = MappingProxyType({})
    ) -> dict[str, object]:
        """Return the hyperparameters and arguments of a step that must be equal on all ranks."""
        groups = list(group_settings(self.optimizer))
        of_method = self.built.method.compared(numbers)
        return {"steps": numbers.step, "optimizer": groups, **of_method, **arguments}

    def _tensors(self) -> dict[str, object]:
        """Return checksums of weights that the program has written, and those in `_all_tensors`."""
        writes, written = self.built.update.writes, {}
        if writes is not None:
            writes.look(self.steps)
            written = {"written": dict(writes.recent)}
        return written | self._all_tensors()

    def _all_tensors(self) -> dict[str, object]:
        """Return checksums of weights and buffers; empty if this step does not compare them."""
        if self.steps % COMPARE_EVERY or self._strategy.sync.local_steps:
            return {}
        return {"tensors": checksums(self.model, self._own_tensors())}

    def _own_tensors(self) -> list[Tensor]:
        """Return the tensors that can differ between ranks before a step."""
        unequal = [buffer for n, buffer in self.model.named_buffers() if n in self._unequal]
        unequal += [parameter for parameter in self.model.parameters() if is_sharded(parameter)]
        return unequal + [statistic.tensor for statistic in self.built.gradients.statistics]

    def _skip(self, arguments: Mapping[str, object] = MappingProxyType({})) -> None:
        """Drop, on all ranks, a batch whose gradients are not finite."""
        self.built.method.abort_batch()
        self.built.update.abort_batch()
        self._end(arguments)

    def _begin_batch(self, step: int) -> None:
        """Begin a new batch; the state is now that after `step` steps."""
        self.steps = step
        self.built.method.begin_batch(step)
        self._whole = self.is_consistent

    def _warn_of_unfinished(self) -> None:
        """Warn if a step was interrupted and is now taken again."""
        if self._whole and not self.is_consistent:
            log.warning(
                "step %d was started before and did not finish: averages and momenta include its "
                "batch twice, or two batches; to undo this, load a checkpoint",
                self.steps,
            )

    def _end(self, arguments: Mapping[str, object]) -> None:
        """End the step, and act on the votes if they are means over all ranks."""
        self.built.exchange.end_step(self.steps)
        self._begin_batch(self.steps + 1)
        if self.built.exchange.follows:
            self._follow_votes(arguments)

    def _follow_votes(self, arguments: Mapping[str, object]) -> None:
        """Report what differs between ranks, if anything, and adopt a change to any rank's model.

        Collective over: world.

        Raises:
            UserError: ranks disagree on the model, or on hyperparameters or arguments of a step.
        """
        changed, alike = self.built.gradients.votes.read()
        if not alike:
            numbers = self.built.method.numbers(self.steps)
            agree(self.built.grid.world, self._compared(numbers, arguments))
            if not self._strategy.sync.local_steps:
                world, own = self.built.grid.world, self._own_tensors()
                self._unequal |= {*check_equal(world, self.model, own)}
                if (writes := self.built.update.writes) is not None:
                    check_written(world, writes)
        if changed:
            self._take_up("the trained parameters have changed")
        else:
            self._take_up_cuts()

    def _take_up_cuts(self) -> None:
        """Rebuild the trainer's parts if the first batch shows that factors should be split.

        Collective over: world.
        """
        if self.built.method.outgrown:
            self._take_up("factors are cut into blocks, because a batch has few vectors")

    def accumulate(self) -> None:
        """Accumulate a part of the local batch; call this after the part's backward pass.

        Requires `virtual_ranks=n`. A rank processes `n / ranks` parts, each with the mean loss of
        its examples and fresh gradients, and then calls `step`.

        Collective over: none.

        Raises:
            ValueError: all parts of the rank have already been accumulated.
        """
        gradients, method = self.built.gradients, self.built.method
        gradients.look(self._compared(method.numbers(self.steps)))
        gradients.accumulate()

    def clear_statistics(self) -> None:
        """Drop the statistics of the passes since the last step, for a batch that no step will use.

        Running statistics of normalisation layers are reset to those after the last step. Clear the
        gradients with `zero_grad`.

        Collective over: none.

        Raises:
            ValueError: `overlap` is used, so the backward pass has sent the gradients.
        """
        self.built.gradients.check_unsent()
        self._abort_batch()

    def _abort_batch(self) -> None:
        """Drop the passes since the last step.

        Collective over: world with `overlap`, otherwise none.
        """
        self.built.gradients.abort_batch()
        self.built.method.abort_batch()

    # -- properties of a run ---------------------------------------------------------------------

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer passed to the constructor; a different optimizer needs a new trainer."""
        return self._optimizer

    @property
    def plan(self) -> Plan:
        """The communication plan."""
        return self.built.plan

    @property
    def grid(self) -> Grid:
        """The grid of ranks, with the communicators that steps use."""
        return self.built.grid

    @property
    def communicators(self) -> list[Comm]:
        """All communicators that steps use."""
        return self.built.grid.communicators

    @property
    def votes(self) -> Tensor:
        """A tensor `[16]`, in the dtype of the statistics, that a rank can write before a step.

        Its values are sent with the gradients; after the step, they are the means over all
        ranks. The last eight are reserved for the trainer.
        """
        return self.built.gradients.votes.tensor

    @property
    def is_consistent(self) -> bool:
        """Whether the rank's state is exactly the state after `steps` steps.

        False while the state includes anything from a later step.
        """
        return self.built.method.is_consistent

    @property
    def exchange(self) -> OneModel:
        """The object for exchanges other than reductions; with `LSGD`, call its `report_loss`."""
        return self.built.exchange

    @property
    def combined(self) -> bool:
        """Whether votes are means over all ranks; False only between two exchanges of weights.

        If exchanges make all replicas equal, the value also shows whether all ranks have the same
        model.
        """
        return self.built.exchange.heard

    def average_replicas(self) -> None:
        """Average the replicas of the model now, if they can differ.

        With local steps, ranks have different replicas of the model between two exchanges. Call
        this method before evaluating the model, and before `state_dict`. Training continues as if
        the exchange had been due.

        Collective over: world.

        Raises:
            UserError: a rank's weights are not finite.
        """
        self.built.exchange.average_replicas()

    # -- changes of the model --------------------------------------------------------------------

    def _draw(self, votes: Votes | None = None) -> Drawn:
        """Cover the model, and plan its communication.

        Args:
            votes: the votes of the run; None to start with zeros.

        Raises:
            ValueError: a choice or a layer is not supported.
        """
        factory, strategy = self._factory, self._strategy
        check_wrappers(self.model)
        check_tensors(self.model)
        layers, uncovered = factory.cover(self.model)
        dtype, device = common_type([*layers, *uncovered])
        uncovered = [*uncovered, votes or Votes(dtype, device)]
        split = _split_of(self.model, [*layers, *uncovered], self._team.trains.size)
        sharding = sharding_of(self.model, [*layers, *uncovered], self._team.trains)
        if votes is not None and bool(sharding) != bool(self.plan.sharding):
            raise ValueError("fully_shard must be called before the trainer is created")
        covered = CoveredModel(layers, uncovered, dtype, device, split, sharding)
        plan = factory.plan(covered, strategy, self.optimizer, self._team)
        check_owned(self.optimizer, [*layers, *uncovered], plan.strategy)
        check_momentum(self.optimizer, strategy, factory.momentum)
        return Drawn(covered, plan)

    def _build(self, drawn: Drawn) -> Built:
        """Check that ranks agree, create the communicators, and build the parts of a step.

        Collective over: world.

        Raises:
            UserError: ranks disagree.
        """
        comm, model, plan = self._team.trains, self.model, drawn.plan
        factory, covered = self._factory, drawn.model
        choices = factory.choices()
        strategy = {"strategy": plan.strategy} if choices else {}  # else, comparing plans is enough
        digest = {"plan": plan.digest()}
        try:
            agree(comm, {**describe(model, self.optimizer), **strategy, **digest, **choices})
        except RanksDifferError:
            agree(comm, describe_tensors(model))  # names the tensor if models differ
            raise
        whole = [parameter for parameter in model.parameters() if not is_sharded(parameter)]
        broadcast(comm, [*whole, *model.buffers()])
        check_replicas(comm, model, plan.sharding)
        per_node = self._strategy.transport.ranks_per_node
        grid = Grid(comm, plan.grid.workers, self.trace, per_node, plan.split.tp_plan)
        kind = covered.dtype, covered.device
        site = Site(plan.of(comm.rank), grid, self.trace, *kind, self.nonfinite, Flags())
        gradients = Gradients(site, model, covered.layers, covered.uncovered)
        exchange = factory.exchange(site, gradients)
        attachments = list(attached(site, gradients, model))
        method = factory.build(gradients, model, self.optimizer, self._team, plan)
        return Built(
            plan,
            grid,
            gradients,
            method,
            exchange,
            factory.update(gradients, exchange),
            [*method.parts, exchange, *attachments],
            gradients.stepped(model),
        )

    def _take_up(self, reason: str) -> None:
        """Rebuild the trainer's parts for the changed model; keep averages of unchanged layers."""
        before = self.built
        before.method.prepare_change()
        before.exchange.average_replicas()
        with taking_up():
            drawn = self._draw(before.gradients.votes)
        self._detach_parts()
        before.grid.free()
        self.built = self._build(drawn)
        self.built.method.take_over(before.method)
        self.built.exchange.take_over(before.exchange)
        steps = before.stepped, self.built.stepped
        hand_over_state(self.built.grid.world, self.model, self.optimizer, *steps)
        self._begin_batch(self.steps)
        log.info("step %d: %s; adopted", self.steps, reason)

    def detach(self) -> None:
        """Remove the hooks; only the weights then differ from those of the original model."""
        self._guard.remove()
        leave_model(self.model, self)
        self._detach_parts()

    def _detach_parts(self) -> None:
        self.built.gradients.detach()

    def close(self) -> None:
        """Remove the hooks, and free the communicators. No further step is possible.

        Collective over: world.

        Raises:
            UserError: with `overlap`, other ranks have not taken part in a message of this rank for
                60 s.
        """
        self.detach()
        self.built.grid.free()

    # -- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the state, by name; all ranks' parts form the complete state.

        It contains the model, the optimizer, the number of steps and, with K-FAC, factors as packed
        triangles (or vectors), weights of factors, bases and pending bases, scales, the averages of
        the grafting, and an adapted damping: everything needed to resume exactly, even between two
        decompositions. Compression errors are dropped, as in a restart.

        With local steps, the complete state contains every rank's optimizer state.

        Collective over: world with `reduce_factors_at="inverses"` or `overlap`, otherwise none.

        Raises:
            ValueError: ranks have different replicas of the model; call `average_replicas` first.
        """
        self.built.exchange.check_combined()
        state = model_state(self.model, self.optimizer, self.built.stepped)
        for part in self.built.parts:
            state |= {part.PREFIX + name: value for name, value in part.state_dict().items()}
        self.built.grid.reset()  # safe now that no message is in flight
        return self.built.exchange.shared(state | {STEPS: self.steps})

    def missing(self, names: Collection[str]) -> set[str]:
        """Return the names of a complete state that are missing from `names`."""
        complete = {
            part.PREFIX + name
            for part in self.built.parts
            for name in part.complete(_without(part.PREFIX, names))
        }
        return missing_state(self.model, names) | complete.difference(names)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the rank's part of `state`, saved with any strategy on any number of ranks.

        Either all ranks load a state, or none does. The state of a first-order run is accepted, and
        so is the state of a run with another estimator for some or all layers: the next step
        computes the statistics of those layers, and all bases. The state must contain the same
        sides and blocks of each layer's factors: a state saved with fisher_type="forward-only" has
        no G, which other types need.

        Collective over: world.

        Raises:
            UserError: on some rank, an item is missing, its dtype or shape does not match the
                model, or it cannot be read.
        """
        built, optimizer = self.built, self.optimizer
        with together(built.grid.world, "loading state", untrusted=True):
            state = Joined(built.exchange.of_rank(state))
            items = needed_state(self.model, optimizer, built.stepped, state)
            descends = isinstance(optimizer, Descent)
            momentum = self._factory.momentum
            check_loaded_momentum(items, state, self._strategy, momentum, descends)
            names = {part: self._names_for(part, state) for part in built.parts}
            needed = {
                part.PREFIX + name: value
                for part in built.parts
                for name, value in part.needed(names[part]).items()
            }
            values = fitting(state, needed, rounded=True)
        self._abort_batch()
        load_model_state(self.model, optimizer, built.stepped, items)
        built.gradients.keep()
        for part in built.parts:
            part.reset()
        built.grid.reset()
        for part in built.parts:
            of_part = {n.removeprefix(part.PREFIX): v for n, v in values.items()}
            part.load_state_dict(of_part, names[part])
        self._begin_batch(int(items[STEPS]))
        if built.update.writes is not None:
            built.update.writes.reset()

    def _names_for(self, part: Part, state: Mapping[str, Any]) -> Collection[str]:
        """Return the names of a state's items that a part can load."""
        return state.keys()


class FirstOrderTrainer(Trainer):
    """Train with a first-order optimizer: average gradients over ranks, then step the optimizer.

    It is the baseline for comparisons with K-FAC, and uses the same arena and collectives.

    Args:
        comm: the communicator of the ranks; all ranks of the job if None.
        strategy: what ranks exchange, and how: the parts `sync`, `compression`, `transport` and
            `assignment` of a `Strategy`, whose choices about factors and decompositions have no
            effect; or a name listed by `mpikfac strategies`. None: ranks average gradients with a
            single all-reduce.

    Collective over: world. All ranks get rank 0's model.

    Raises:
        ValueError: a choice is not supported; raised before any communication.
        UserError: ranks disagree on the model.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        comm: Comm | None = None,
        strategy: Strategy | str | None = None,
        trace: Trace | None = None,
    ) -> None:
        check_optimizer(optimizer, model)
        team = SplitComm.of(comm)
        strategy, _ = strategy_of(strategy)
        super().__init__(model, optimizer, team, strategy.first_order(), MethodFactory(), trace)


def _split_of(model: nn.Module, blocks: Sequence[Layer | Other], ranks: int) -> Split:
    """Return what a plan needs to know about split layers; the first of them describes all.

    Raises:
        ValueError: the layers are split for another number of ranks.
    """
    for module in model.modules():
        describe_split = getattr(vars(module).get("forward"), "describe", None)
        if describe_split is not None:
            split: Split = describe_split(model, blocks, ranks)
            return split
    return Split()


def _without(prefix: str, names: Collection[str]) -> set[str]:
    """Return the names that begin with the prefix, with the prefix removed."""
    return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
