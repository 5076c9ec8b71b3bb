"""Distributed K-FAC: the main path of a step, from local gradients to identical new weights.

Read `KFAC.step` first: each line is a stage, and each stage is a method below it, in order.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from mpikfac.comm import Comm, Grid, Team, agree, broadcast, together
from mpikfac.engine import (
    Bases,
    Block,
    Curvature,
    Directions,
    Factors,
    Gradients,
    Recorder,
    Scales,
    Troubles,
    check_joins,
    common_type,
    describe,
    fitting,
    groups_of,
    load_model_state,
    missing_state,
    model_state,
    needed_state,
    report_others,
)
from mpikfac.layers import Coverage, Layer, Votes, cover
from mpikfac.numerics import LOSSES, Loss, all_finite, without_autocast
from mpikfac.plan import (
    SOLVERS,
    Solver,
    Strategy,
    check_layers,
    forward_only,
    make_plan,
    one_of,
)
from mpikfac.settings import (
    SETTINGS,
    Clip,
    Damping,
    Estimator,
    Graft,
    LevenbergMarquardt,
    Schedule,
    Settings,
)
from mpikfac.trace import Trace

log = logging.getLogger("mpikfac")

# Names of items of the state.
OWN = "kfac/"
OF_SOLVER = {"solver", "due", "bases", "decompositions", "scales", "scale-weights"}


class KFAC:
    """A torch optimizer preconditioned by distributed K-FAC.

    Sums, factors and directions have the model's dtype, or float32 for one in bfloat16.

    Collective over: world. The model becomes rank 0's; forward hooks are added to its layers.

    Args:
        model: the log lists the parameters that K-FAC does not cover.
        optimizer: any torch optimizer over the model's parameters whose step needs no closure.
        comm: the communicator of all ranks, or the `Team` of `split`, with curvature ranks.
        strategy: who computes and sends what; every rank preconditions every layer if None
            (COMM-OPT).
        damping: a number, a schedule (a function of the step), a `Damping`, or a
            `LevenbergMarquardt` that `adapt` changes.
        factor_every: interval in steps between statistics, or a schedule.
        basis_every: interval in steps between decompositions, or a schedule; a multiple of
            `stagger`.
        solver: "inverse": damped inverses with the damping split between A and G; a change of
            damping takes effect at the next decomposition. "eigen": eigenbases and all of the
            damping. "ekfac": the same with eigenvalues of the gradients of examples
            [George et al. 2018]. "unsplit-inverse": inverses with all of the damping added to
            each, as published codes do. "rank-one": mean vectors whose squares stand for A and G,
            another estimator [Zhang et al. 2023, Eva]; `basis_every=1` is the paper's.
        clip: the length of a step: a `Clip`, the KL clip as a number, or None for no bound.
        estimator: how factors are estimated.
        coverage: the layers that K-FAC covers, and in what form.
        basis_dtype: keep and send decompositions in the dtype, and multiply gradients in it.
        trace: times the stages; a new trace if None.

    Raises:
        ValueError: a choice or a layer that cannot work, before any communication.
        UserError: ranks that disagree on model, plan, settings or versions.

    Attributes:
        plan: the communication plan.
        steps: completed steps.
        votes: `[16]`, in the dtype of sums. A rank writes numbers before a step; the numbers travel
            with the gradients, and after the step all ranks find the mean over ranks.
            `step(scaler)` takes the last number.
        troubles: counts of numbers that were not finite.
        intact: whether the state of this rank is the state after `steps` steps, and no part of the
            state is of a later step.
        trace: seconds and bytes of every stage.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        comm: Comm | Team,
        strategy: Strategy | None = None,
        *,
        damping: float | Schedule | Damping | LevenbergMarquardt = 0.003,
        factor_every: int | Schedule = 1,
        basis_every: int | Schedule = 10,
        solver: Solver = "inverse",
        clip: Clip | float | None = 0.001,
        estimator: Estimator | None = None,
        coverage: Coverage | None = None,
        basis_dtype: torch.dtype | None = None,
        trace: Trace | None = None,
    ) -> None:
        team = comm if isinstance(comm, Team) else Team(comm)
        if team.comm is None:
            raise ValueError("this rank does not train; call mpikfac.serve(team) on it")
        world = team.comm
        strategy = strategy or Strategy.comm_opt(world.size)
        self.model, self.optimizer = model, optimizer
        self.trace = trace or Trace()
        self.estimator = estimator or Estimator()
        damping = damping if isinstance(damping, Damping) else Damping(damping)
        clip = clip if isinstance(clip, Clip) else Clip(clip)
        self.settings = Settings(
            damping.value, factor_every, basis_every, self.estimator.decay, clip.kl, clip.norm
        )
        self.settings.due("basis_every", 0, strategy.refresh.stagger)  # refused before step 0
        self._adaptive = damping.adapted

        self.layers, self.others = cover(
            model, self._formed(coverage), self.estimator.statistics_dtype
        )
        shapes = [layer.shape for layer in self.layers]
        factor_dtype = self.estimator.factor_dtype
        one_of("basis_dtype", basis_dtype, (None, torch.bfloat16))
        choices = {
            **strategy.choices(),
            **vars(self.estimator),
            **{"ranks": world.size, "solver": solver, "basis_dtype": basis_dtype},
            **{"relative": damping.relative, "adapted": damping.adapted, "graft": clip.graft},
        }
        check_layers([*SETTINGS, *SOLVERS], shapes, choices)
        dtype, device = common_type([*self.layers, *self.others])
        self.others.append(votes := Votes(dtype, device))
        self.votes = votes.tensor
        self.plan = make_plan(
            shapes,
            world.size,
            strategy,
            [(other.name, tuple(other.tensor.shape)) for other in self.others],
            solver,
            dtype.itemsize,
            (factor_dtype or dtype).itemsize,
            (basis_dtype or dtype).itemsize,
        )
        check_joins(team.link, strategy.refresh.curvature_ranks)
        groups_of(self.layers, optimizer)  # refused here, before any communication

        self._check_agreement(
            world,
            relative=damping.relative,
            graft=clip.graft,
            adapted=damping.adapted,
            basis_dtype=basis_dtype,
        )
        broadcast(world, [*model.parameters(), *model.buffers()])
        self.grid = Grid(world, self.plan.rows, self.trace, strategy.transport.ranks_per_node)
        self.curvature = (
            Curvature(self.plan, world.rank, team.link, self.trace) if team.link else None
        )
        self._build(dtype, device, factor_dtype, basis_dtype, damping.relative, clip.graft)
        self._forget_curvature()
        self._begin(0)
        if world.rank == 0:
            report_others(self.others, optimizer)

    def _formed(self, coverage: Coverage | None) -> Coverage:
        """Return the coverage, with layers without G where nothing estimates G."""
        coverage = coverage or Coverage()
        if self.estimator.fisher != "forward-only":
            return coverage
        rule = coverage.rule
        return dataclasses.replace(coverage, rule=lambda layer: forward_only(rule(layer)))

    def _build(
        self,
        dtype: torch.dtype,
        device: torch.device,
        factor_dtype: torch.dtype | None,
        basis_dtype: torch.dtype | None,
        relative_damping: bool,
        graft: Graft | None,
    ) -> None:
        """What a step goes through, in its order."""
        plan, grid, rank = self.plan, self.grid, self.grid.world.rank
        self.troubles = Troubles(rank)
        blocks: list[Block] = [*self.layers, *self.others]
        self.gradients = Gradients(blocks, plan, grid, dtype, device)
        self._stepped = self.gradients.stepped(self.model)
        self.factors = Factors(plan, grid, dtype, factor_dtype or dtype, device, self.troubles)
        self.recorder = Recorder(
            self.model,
            self.layers,
            self.factors.statistics,
            self.trace,
            self.estimator,
            plan.vectors,
        )
        if self.factors.overlap:
            self.recorder.before_first = self.factors.settle
            self.recorder.after_each = self._send_statistics
        self.bases = Bases(
            plan,
            rank,
            dtype,
            basis_dtype or dtype,
            device,
            self.troubles,
            self.curvature,
            relative_damping,
        )
        self.scales = Scales(plan, grid, self.bases, dtype, device, self.troubles)
        if plan.rescaled:
            self.recorder.after_call = self.scales.record
        self._messages = {share: plan.publish_bases(rank, share) for share in plan.shares}
        self.directions = Directions(
            self.layers,
            plan,
            grid,
            self.gradients,
            self.bases,
            self.optimizer,
            self.settings,
            graft,
        )
        self._stateful = (self.factors, self.bases, self.scales, self.directions)

    @property
    def kl_scale(self) -> Tensor:
        """What the last step was multiplied by, `[1]`, on the model's device."""
        return self.directions.scale

    @property
    def communicators(self) -> list[Comm]:
        """All communicators that steps use."""
        return self.grid.communicators

    # -- the main path ---------------------------------------------------------------------------

    @without_autocast
    def step(self, scaler: GradScaler | None = None) -> None:
        """From local gradients to identical new weights on every rank.

        A parameter without a gradient counts as one with gradient 0.

        Collective over: world.

        Args:
            scaler: a `torch.amp.GradScaler` whose `scale(loss)` was the loss. The scale is taken
                out of gradients and statistics before anything else sees them. Where one of them is
                not finite, on whatever rank, all ranks skip the step: but in `steps`, its batch
                counts for nothing, and what was due is made when it is next due. Then the scale is
                reduced or, after enough steps, grows, on all ranks alike. This stands for the
                scaler's `unscale_`, `step` and `update`, which are not to be called.

        Raises:
            ValueError: a scaler with `overlap`, or with `update="owner"` and a rank that has
                nothing to step.
        """
        scaler = self.gradients.checked(scaler)
        if not self.gradients.parts:
            self.gradients.read()
        if scaler is not None and not self._reduce_scaled(scaler):
            self._skip()
            return
        self._refresh_curvature()
        if scaler is None:
            self.gradients.reduce()
        self.gradients.check(self.troubles, self.steps)
        self._make_directions()
        self.gradients.write(self.layers, self.directions)
        self.gradients.write(self.others, self.gradients.arena)
        self.intact = False
        self.gradients.update(self.optimizer)
        self._begin(self.steps + 1)

    @without_autocast
    def record(self, outputs: Tensor, loss: Loss = "cross-entropy") -> None:
        """Takes a batch's statistics at labels that the model gives, where `fisher` asks for them.

            outputs = model(images)
            kfac.record(outputs)
            torch.nn.functional.cross_entropy(outputs, labels).backward()
            kfac.step()

        A backward pass for each drawn label, or for each output. Gradients of parameters stay as
        they are. Otherwise, and at steps without new factors, it does nothing.

        Collective over: world with `overlap`, as is the backward pass itself; else none.

        Args:
            outputs: the model's, `[batch, outputs]` or `[batch, outputs, *positions]`.
            loss: "cross-entropy" or "squared-error", as torch averages them over batch and rest.

        Raises:
            ValueError: another loss, or outputs with positions and fisher="exact".
        """
        if self.estimator.of_loss or not self.recorder.recording:
            one_of("loss", loss, LOSSES)
            return
        parameters = [p for layer in self.layers for p in layer.parameters]
        for turn, gradient in self.estimator.turns(outputs, loss):
            with self.recorder.standing_for(turn):
                torch.autograd.grad(
                    outputs, parameters, gradient, retain_graph=True, allow_unused=True
                )

    def collect(self) -> None:
        """Takes one part of this rank's share of a batch: call it after each part's backward pass.

        Only with `Strategy(parts=n)`: a rank takes `n / ranks` parts one after the other, each with
        the mean loss of its own examples and fresh gradients, and then calls `step`.

        Collective over: none.

        Raises:
            ValueError: there are more parts than this rank's.
        """
        self.gradients.collect()
        if self.recorder.recording:
            self.recorder.finish()
            self.factors.parts.add()
            self.factors.statistics.flat.zero_()

    @without_autocast
    def precondition(self, scaler: GradScaler | None = None) -> None:
        """Preconditions covered layers' gradients, which the caller has averaged and will step.

        Parameters and buffers that no layer covers are left to the caller as well.

        Collective over: world.

        Args:
            scaler: a `torch.amp.GradScaler` whose `scale(loss)` was the loss, and which has
                unscaled the gradients after they were averaged: their scale is taken out of the
                statistics, too. Where gradients are not finite, then on all ranks, they are left to
                the scaler's `step`, which skips them, and the batch counts for nothing.

        Raises:
            ValueError: with `update="owner"`, where the owner of a layer has to step it, with
                `overlap`, where gradients are sent before the caller can average them, or with
                `parts`, which are added up in order here.
        """
        strategy = self.plan.strategy
        if (
            self.gradients.owner_updates
            or strategy.transport.overlap
            or strategy.transport.parts is not None
        ):
            raise ValueError(
                "with update='owner', overlap=True or parts gradients are not the caller's; "
                "call step()"
            )
        self.gradients.read()
        if scaler is not None and scaler.is_enabled():
            if not all_finite(self.gradients.arena.flat):  # nor on any other rank
                self._skip()
                return
            self._unscale_statistics(scaler)
        self._refresh_curvature()
        self.gradients.check(self.troubles, self.steps)
        self._make_directions()
        self.gradients.write(self.layers, self.directions)
        self.gradients.keep()
        self._begin(self.steps + 1)

    def adapt(self, loss_before: float, loss_after: float) -> float:
        """The reduction ratio of the last step, which the damping then follows.

            if damping.due(kfac.steps):
                with torch.no_grad():
                    kfac.adapt(loss.item(), criterion(model(images), labels).item())

        That is what the mean loss over ranks changed by, relative to what K-FAC's damped quadratic
        model says of `delta = -lr direction`: `<gradient, delta> + 1/2 <delta, C delta>`. As
        `C direction` is the gradient, but for what the step was scaled by, it takes no product
        with C. What the model does not know of counts as the loss's doing: momentum, weight decay,
        parameters that no layer covers, and of a layer with several learning rates, what couples
        their parameters. With inverses, new damping waits for the next decomposition.

        Collective over: world.

        Args:
            loss_before: mean loss of this rank's share of the batch that the step was taken with.
            loss_after: the same examples' with the new weights.

        Returns:
            The ratio; NaN, and the damping stays, where nothing was stepped.

        Raises:
            ValueError: the damping is not a `LevenbergMarquardt`.
        """
        if self._adaptive is None:
            raise ValueError(
                f"adapt() needs damping=LevenbergMarquardt(...), not {self.settings.damping!r}"
            )
        ratio = self.directions.reduction_ratio(loss_before, loss_after)
        if ratio is None:
            return math.nan
        self._adaptive.follow(ratio)
        return ratio

    def discard(self) -> None:
        """Forgets the passes since the last step, of a batch that is not to be stepped with.

        Raises:
            ValueError: with `overlap`, where the backward pass has sent what it made.
        """
        if self.plan.strategy.transport.overlap:
            raise ValueError("with overlap=True a batch is sent as it is made; call step()")
        self.recorder.clear()
        self.scales.clear()
        self.factors.parts.clear()
        self.gradients.discard()

    def detach(self) -> None:
        """Removes the hooks from the model, which is then as before, but for its weights."""
        self.recorder.detach()
        self.gradients.detach()

    def close(self) -> None:
        """Ends the thread that sends, and lets curvature ranks go: there, `serve` returns.

        What is on its way is sent and kept first. No step may follow.

        Collective over: world.
        """
        self.factors.settle()
        self.grid.close()
        if self.curvature:
            self.curvature.close()

    def _begin(self, step: int) -> None:
        self.steps, self.intact = step, not self.plan.late and self.factors.settled
        due = self.settings.due("factor_every", step)
        self.recorder.recording = due or self.factors.lacking

    def _refresh_curvature(self) -> None:
        if self.recorder.recording:
            self._average_statistics()
        if self._refreshes():
            self._publish_bases()  # of the interval before, if they are still on their way
            self._decompose_owned()
        if self.bases.due(self.steps):
            self._publish_bases()
        self.factors.discard()

    def _reduce_scaled(self, scaler: GradScaler) -> bool:
        """Averages gradients of a scaled loss, before anything else; whether to go on."""
        return self.gradients.reduce_scaled(scaler, self._unscale_statistics(scaler))

    def _unscale_statistics(self, scaler: GradScaler) -> bool:
        """Takes a loss's scale out of a batch's statistics; whether they are finite."""
        if not (self.recorder.recording and self.estimator.of_loss):
            return True
        scale = scaler.get_scale()
        finite = self.factors.unscale(self.recorder.of_gradients, scale)
        return self.scales.unscale(scale) and finite

    def _skip(self) -> None:
        """Leaves all as it was before this batch."""
        self.recorder.clear()
        self.scales.clear()
        self.factors.parts.clear()
        self.gradients.skip()
        self.directions.expected.zero_()
        self._begin(self.steps + 1)

    def _average_statistics(self) -> None:
        """Averages the batch's factors, and its scales, over ranks and over time."""
        if not self.factors.parts:
            self.recorder.finish()
            self.factors.finish()
        decay = self.settings.at("decay", self.steps)
        self.scales.reduce(self.factors.statistics, self.estimator.of_loss)
        self.factors.average(decay, self.steps)
        self.intact = False  # only now: a sum that fails leaves averages as they were
        self.scales.merge(decay, self.steps)

    def _send_statistics(self, layer: Layer) -> None:
        """Sends what the backward pass has just recorded of a layer."""
        self.recorder.finish_layer(layer)
        self.factors.ready(layer.name)

    def _decompose_owned(self) -> None:
        """Starts to decompose the factors that this rank owns, all or a share of them.

        Here, at once or in the background, or on a curvature rank.
        """
        share = self._share()
        damping = self.settings.at("damping", self.steps)
        factors = self.factors.whole(share)
        self.intact = False  # a state from here on would hold what this step began
        self.bases.decompose(factors, self.steps, damping, share)

    def _publish_bases(self) -> None:
        """Sends decompositions to the other workers of their layers."""
        if not self.bases.pending:
            return
        self.intact = False
        with self.trace.stage("decompose"):
            self.trace.calls["decompositions"] += self.bases.take(self.steps)
        self.grid.exchange(self._messages[self.bases.share], self.bases.arena.flat)
        self.bases.refresh()
        self.scales.restart(self.factors.weights, self.bases.share)

    def _make_directions(self) -> None:
        """Preconditions gradients, sends the directions to all, and bounds the step."""
        self.intact = self.intact and self.directions.graft != "adam"  # whose averages go on here
        self.directions.precondition(self.steps)
        self.directions.publish()
        self.directions.check()
        self.directions.clip(self.steps)
        if self._adaptive:
            self.directions.predict()

    # -- details of the stages -------------------------------------------------------------------

    def _refreshes(self) -> bool:
        """Whether this step decomposes: all factors or a share of them."""
        steps, stagger = self.steps, self.plan.strategy.refresh.stagger
        return not self.bases.ready or self.settings.due("basis_every", steps, stagger)

    def _share(self) -> int | None:
        """The share of the layers that this step refreshes; None for all."""
        if not self.bases.ready or self.plan.strategy.refresh.stagger == 1:
            return None
        return self.settings.turn("basis_every", self.steps, self.plan.strategy.refresh.stagger)

    def _forget_curvature(self) -> None:
        """No statistics, no bases, and averages at their start."""
        # Once no thread adds them up any more.
        self.factors.forget(self.estimator.start == "identity")
        self.recorder.clear()
        self.bases.forget()
        self.scales.forget()
        self.grid.encoded.forget()

    def _check_agreement(self, comm: Comm, **choices: Any) -> None:
        agree(
            comm,
            {
                **describe(self.model, self.optimizer),
                "strategy": self.plan.strategy,
                "plan": self.plan.digest(),
                **dataclasses.asdict(self.estimator),
                **choices,
                **self.settings.described(),
            },
        )

    # -- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's share of the state, by name; shares of all ranks make the whole.

        Model, optimizer, factors as packed triangles (or vectors), their weights, bases and those
        on their way, scales, what grafting averages, adapted damping, and the number of steps: what
        a run needs to go on exactly, also between two decompositions.
        What encoding lost is dropped, here as by a restart.

        Collective over: world with `reduce_at="bases"` or `overlap`, else none.
        """
        self.grid.encoded.forget()
        state = model_state(self.model, self.optimizer, self._stepped)
        kept = {n: value for part in self._stateful for n, value in part.state_dict().items()}
        return state | {"trainer/steps": self.steps} | {OWN + n: v for n, v in kept.items()}

    def missing(self, names: Collection[str]) -> set[str]:
        """What is not among `names`, of those that the shares of all ranks make up."""
        own = {name.removeprefix(OWN) for name in names if name.startswith(OWN)}
        whole = {OWN + name for part in self._stateful for name in part.complete(own)}
        return missing_state(self.model, names) | whole.difference(names)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes from `state` what this rank needs, whatever strategy and ranks it was saved from.

        All of it on all ranks, or nothing. A first-order run's state is taken too, and that of
        another estimator, of all layers or of some: their statistics, and all bases, are then made
        at the next step.

        Collective over: world.

        Raises:
            UserError: on some rank an item is missing, of another dtype or shape than the model's,
                or cannot be read.
        """
        with together(self.grid.world, "loading state"):
            found = needed_state(self.model, self.optimizer, self._stepped, state)
            names = self._own_names(state)
            needed = {n: v for part in self._stateful for n, v in part.needed(names).items()}
            own = {OWN + name: value for name, value in needed.items()}
            kept = fitting(state, own, rounded=True)
        load_model_state(self.model, self.optimizer, self._stepped, found)
        self.gradients.keep()
        self.gradients.discard()
        self._forget_curvature()
        for part in self._stateful:
            part.load_state_dict({n.removeprefix(OWN): v for n, v in kept.items()}, names)
        self._begin(int(found["trainer/steps"]))

    def _own_names(self, state: Mapping[str, Any]) -> set[str]:
        """Names of K-FAC's own items, but for decompositions if any is another solver's."""
        names = {name.removeprefix(OWN) for name in state if name.startswith(OWN)}
        if state.get(f"{OWN}solver") == self.plan.all_solvers:
            return names
        return {name for name in names if name.partition("/")[0] not in OF_SOLVER}
