"""Distributed K-FAC: the main path of a step, from local gradients to identical new weights.

Read `KFAC.step` first: a line is a stage, and the stages are methods below the step, in order.
`Assembly` makes the parts of a step, and keeps the state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from mpikfac.assembly import Assembly
from mpikfac.comm import Comm, Team, agree
from mpikfac.engine import (
    Cautions,
    check_kind,
    check_momentum,
    check_optimizer,
    check_plain,
    check_synchronous,
    group_settings,
    reduce_scaled,
    report_others,
    usable_scaler,
)
from mpikfac.layers import Coverage, offers, take_model
from mpikfac.numerics import (
    LOSSES,
    Batch,
    Criterion,
    Loss,
    check_outputs,
    without_autocast,
)
from mpikfac.plan import Strategy, one_of
from mpikfac.settings import (
    FOR_VECTORS,
    Damping,
    Estimator,
    Length,
    LevenbergMarquardt,
    Schedule,
    Settings,
)
from mpikfac.solvers import Solver, SolverName, solvers_by_name
from mpikfac.trace import Trace


class KFAC(Assembly):
    """A torch optimizer preconditioned by distributed K-FAC.

    Sums, factors and directions have the model's dtype, or float32 for a model in bfloat16.

    Collective over: world. The model becomes rank 0's; forward hooks are added to its layers.

    Args:
        model: the log lists the parameters that K-FAC does not cover.
        optimizer: any torch optimizer over the model's parameters, with steps that need no closure.
        comm: the communicator of all ranks, or the `Team` of `split`, with curvature ranks.
        strategy: who computes and sends what; every rank preconditions every layer if None
            (COMM-OPT).
        damping: a number, a schedule (a function of the step), a `Damping`, or a
            `LevenbergMarquardt` that `adapt` changes. None: `Damping()`, or 0.003 with the solver
            "rank-one".
        factor_every: interval in steps between statistics, or a schedule.
        basis_every: interval in steps between decompositions, or a schedule; a multiple of
            `stagger`.
        solver: a name, or an object as `Eigen(dtype=torch.bfloat16)` or a `Solver` of your own.
            "inverse": damped inverses with the damping split between A and G; a change of damping
            takes effect at the next decomposition. "eigen": eigenbases and all of the damping.
            "ekfac": the same with eigenvalues of the gradients of examples [George et al. 2018].
            "unsplit-inverse": inverses with all of the damping added to each, as published codes
            do. "rank-one": mean vectors, with A and G as squares of vectors, a different estimator
            [Zhang et al. 2023, Eva]; `basis_every=1` is the paper's.
        length: the length of a step; `Length()` if None.
        estimator: how factors are estimated.
        coverage: the layers to cover, and the form of factors.
        trace: times the stages; a new trace if None.

    Raises:
        ValueError: a choice or a layer cannot work; raised before any communication.
        UserError: ranks disagree on model, plan, settings or versions.

    Attributes:
        plan: the communication plan.
        steps: completed steps.
        votes: `[16]`, in the dtype of sums. A rank writes numbers before a step; the numbers travel
            with the gradients, and after the step all ranks find the mean over ranks. The last
            eight numbers are K-FAC's own.
        nonfinite: counts of numbers that were not finite.
        intact: whether the state of the rank is the state after `steps` steps, without parts of a
            later step.
        trace: seconds and bytes of every stage.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        comm: Comm | Team,
        strategy: Strategy | None = None,
        *,
        damping: float | Schedule | Damping | LevenbergMarquardt | None = None,
        factor_every: int | Schedule = 1,
        basis_every: int | Schedule = 10,
        solver: SolverName | Solver = "inverse",
        length: Length | None = None,
        estimator: Estimator | None = None,
        coverage: Coverage | None = None,
        trace: Trace | None = None,
    ) -> None:
        check_optimizer(optimizer, model)
        check_kind("length", length, Length)
        check_kind("estimator", estimator, Estimator)
        check_kind("coverage", coverage, Coverage)
        if strategy is not None:
            check_synchronous(strategy)
        length, estimator = length or Length(), estimator or Estimator()
        if length.source == "quadratic":
            check_plain(optimizer)
        team = comm if isinstance(comm, Team) else Team(comm)
        solvers, coverage = solvers_by_name(solver), coverage or Coverage()
        if damping is None and next(iter(solvers.values())).form.vector:
            damping = FOR_VECTORS
        damping = damping if isinstance(damping, Damping) else Damping(damping)
        settings = Settings(damping, factor_every, basis_every, estimator.decay, length)
        trace = trace or Trace()
        super().__init__(model, optimizer, team, solvers, settings, estimator, coverage, trace)
        self._connect(*self._prepare(strategy or Strategy.comm_opt(team.size)))
        self._begin(0)
        take_model(model, self)
        self._cautions = Cautions()
        if team.trains.rank == 0:
            found = offers(model, self.others, coverage)
            report_others(model, self.layers, self.others, optimizer, found)

    def __repr__(self) -> str:
        """Return the covered layers, the strategy and the number of steps in short."""
        first_order = sum(bool(other.parameters) for other in self.others)
        return (
            f"KFAC({len(self.layers)} layers covered, {first_order} tensors trained first-order, "
            f"{self.plan.grid.count} ranks, {self.plan.strategy.workers} workers per layer, "
            f"solver {self.plan.solver}, step {self.steps})"
        )

    @property
    def combined(self) -> bool:
        """Whether votes are of all ranks; False only between two exchanges of weights.

        If exchanges make all copies equal, then also whether all ranks hold the same model.
        """
        return self.replicas.heard

    @property
    def kl_scale(self) -> Tensor:
        """The multiplier of the last step, `[1]`, on the model's device."""
        return self.directions.scale

    # -- the main path ---------------------------------------------------------------------------

    @without_autocast
    def step(
        self,
        scaler: GradScaler | None = None,
        *,
        max_norm: float | None = None,
        examples: int | None = None,
        mean_loss: float | Tensor | None = None,
        inputs: Tensor | tuple[Any, ...] | None = None,
        loss: Criterion | None = None,
    ) -> None:
        """Go from local gradients to identical new weights on every rank.

        A parameter without a gradient counts as a parameter with gradient 0. Parameters that were
        frozen, unfrozen, added or replaced since the last step stay as they are in this step; from
        the next step on, K-FAC trains the model as the model is now.

        Collective over: world.

        Args:
            scaler: a `torch.amp.GradScaler` whose `scale(loss)` was the loss. The scale is taken
                out of gradients and statistics before anything else. If a gradient or a statistic
                is not finite on some rank, all ranks skip the step: the step counts in `steps`, the
                batch is ignored, due updates wait for their next turn. Then the scale is reduced
                or, after enough steps, grows, alike on all ranks. Do not call the scaler's
                `unscale_`, `step` and `update`: `KFAC.step` replaces all three.
            max_norm: the largest norm of the averaged gradient of all parameters; a longer gradient
                is scaled before K-FAC preconditions the gradient. None for no bound.
            examples: the number of examples of the rank's mean loss, if shards are uneven: the
                average over ranks weighs ranks by the number. None: ranks weigh the same.
            mean_loss: with `merge="leader"`, the mean loss of the rank's share of the batch,
                without the factor of a scaler; other rules of exchanges take no loss.
            inputs: with `Length("quadratic")` only: the model's argument for the rank's share of
                the batch, or for a part of the share; or a tuple of arguments.
            loss: with `Length("quadratic")` only: the mean loss of `inputs` as a function of the
                model's outputs, without the factor of a scaler.

        Raises:
            ValueError: a scaler with `overlap`, with `exchanged="weights"`, or with
                `update="owner"` and a rank that has nothing to step; `examples` with `overlap` or
                `parts`; a gradient that was changed after `overlap` had sent the gradient; a
                converted or moved model; a negative `max_norm`; `inputs` and `loss` without
                `Length("quadratic")`, or the reverse; a second momentum, also from a scheduler.
            UserError: ranks disagree on the model, learning rates or settings; or a change of the
                trained parameters cannot be taken up.
        """
        scaler, batch = self._checked(scaler), self._batch(inputs, loss)
        alone = self.replicas.begin_step(self.steps, mean_loss)
        if not self.gradients.parts:
            self.gradients.look(self._in_force())
            self.gradients.read()
        weight = 1.0 if examples is None else self.gradients.weigh(examples)
        if scaler is not None and not self._reduce_scaled(scaler, alone):
            self._skip()
            self._end()
            return
        self._refresh_curvature()
        if scaler is None:
            self.gradients.reduce(alone)
        self.gradients.check(self.steps)
        if max_norm is not None:
            self.gradients.clip(max_norm)
        self._make_directions()
        self.gradients.write(self.directions.slots)
        self.gradients.write(self.gradients.of_others)
        self._leave_state()
        if batch is not None:
            with self.recorder.pausing():
                self.directions.descend(self.model, batch, weight, self.steps)
        self.replicas.before_update(self.steps)
        self.gradients.update(self.optimizer)
        self._end()

    def _end(self) -> None:
        """End the step, and follow votes if the votes are of all ranks."""
        self.replicas.end_step(self.steps)
        self._begin(self.steps + 1)
        if self.combined:
            self._follow_votes()

    def combine(self) -> None:
        """Combine the copies of the model now, if copies may differ.

        With `exchanged="weights"`, ranks hold different copies of the model between two exchanges.
        Call `combine` before a test of the model, and before `state_dict`. Steps go on as if the
        exchange had been due.

        Collective over: world.

        Raises:
            UserError: a rank's weights are not finite.
        """
        self.replicas.combine()

    @without_autocast
    def record(self, outputs: Tensor, loss: Loss = "cross-entropy") -> None:
        """Take a batch's statistics at labels of the model, if `fisher` asks for such labels.

            outputs = model(images)
            kfac.record(outputs)
            torch.nn.functional.cross_entropy(outputs, labels).backward()
            kfac.step()

        Runs a backward pass per drawn label, or per output. Gradients of parameters do not change.
        With `fisher` "empirical" or "forward-only", and at steps without new factors, nothing runs.

        Collective over: world with `overlap`, as is the backward pass itself; else none.

        Args:
            outputs: the model's, `[batch, outputs]` or `[batch, outputs, *positions]`.
            loss: "cross-entropy", "squared-error" or "logistic", as torch averages the loss over
                batch and rest: `F.cross_entropy`, `F.mse_loss`,
                `F.binary_cross_entropy_with_logits`.

        Raises:
            ValueError: another loss; outputs with positions and fisher="exact"; outputs without a
                dimension of outputs, or outputs that are no logits.
        """
        if self.estimator.of_loss or not self.recorder.recording:
            one_of("loss", loss, LOSSES)
            return
        check_outputs(outputs, loss)
        parameters = [p for layer in self.layers for p in layer.parameters if p.requires_grad]
        for turn, gradient in self.estimator.turns(outputs, loss):
            with self.recorder.standing_for(turn):
                torch.autograd.grad(
                    outputs, parameters, gradient, retain_graph=True, allow_unused=True
                )

    def collect(self) -> None:
        """Take a part of the rank's share of a batch; call after the part's backward pass.

        Only with `parts=n`: a rank takes `n / ranks` parts in turn, with the mean loss of the
        part's examples and fresh gradients, and then calls `step`.

        Collective over: none.

        Raises:
            ValueError: the rank has fewer parts.
        """
        self.gradients.look(self._in_force())
        self.gradients.collect()
        if self.recorder.recording:
            self._finish_statistics()
            self.factors.collect()

    @without_autocast
    def precondition(self, scaler: GradScaler | None = None) -> None:
        """Precondition covered layers' gradients; the caller averages before, and steps after.

        The caller also averages and steps uncovered parameters and buffers. With
        `Length("orthogonal")`, the default, and `Length("adam")`, gradients of uncovered parameters
        become Adam's steps.

        Collective over: world.

        Args:
            scaler: a `torch.amp.GradScaler` whose `scale(loss)` was the loss, after `unscale_` of
                averaged gradients: the scale is taken out of the statistics, too. If gradients are
                not finite, on all ranks alike, the gradients do not change: the scaler's `step`
                skips the gradients, and the batch is ignored.

        Raises:
            ValueError: with `update="owner"`, as the owner of a layer has to step the layer; with
                `overlap`, as gradients are sent before the caller can average them; with `parts`,
                as K-FAC adds parts up in order; with `exchanged="weights"`, as the caller averages
                gradients; with `Length("quadratic")`, as only `step` takes the batch; or other
                parameters are trained than before.
        """
        transport = self.plan.strategy.transport
        if self.plan.strategy.exchange.of_copies:
            raise ValueError("with exchanged='weights' each rank steps a copy; call step()")
        if self.settings.length.source == "quadratic":
            raise ValueError("with length='quadratic', call step(inputs=..., loss=...)")
        if self.gradients.owner_updates or transport.overlap or transport.parts is not None:
            raise ValueError(
                "with update='owner', overlap=True or parts gradients are not the caller's; "
                "call step()"
            )
        check_momentum(self.optimizer, *self._momentum)
        if self.gradients.look(self._in_force()):
            raise ValueError(
                "the trained parameters have changed, and precondition() cannot take up a change; "
                "make K-FAC anew, or call step()"
            )
        self.gradients.read()
        if scaler is not None and scaler.is_enabled():
            if not self.gradients.finite:  # nor on any other rank
                self._skip()
                self._end()
                return
            self._unscale_statistics(scaler)
        self._refresh_curvature()
        self.gradients.check(self.steps)
        self._make_directions()
        self.gradients.write([*self.directions.slots, *self.directions.slots_beside])
        self.gradients.keep()
        self._begin(self.steps + 1)

    def adapt(self, loss_before: float, loss_after: float) -> float:
        """Return the reduction ratio of the last step, and let the damping follow the ratio.

            if damping.due(kfac.steps):
                with torch.no_grad():
                    kfac.adapt(loss.item(), criterion(model(images), labels).item())

        The ratio is the change of the mean loss over ranks, relative to the prediction of K-FAC's
        damped quadratic model for `delta = -lr direction`:
        `<gradient, delta> + 1/2 <delta, C delta>`. `C direction` is the gradient, up to the step's
        scale, so no product with C is taken. Everything outside of the model counts as a change of
        the loss: momentum, weight decay, uncovered parameters, and in a layer with several learning
        rates the coupling of parameters. With `Length("quadratic")` the prediction is the whole
        quadratic model's, for the whole step. With inverses, new damping waits for the next
        decomposition. Call `adapt` before `state_dict`: the state does not have the prediction.

        Collective over: world.

        Args:
            loss_before: mean loss of the rank's share of the batch, before the step.
            loss_after: mean loss of the same examples with the new weights.

        Returns:
            The ratio; NaN, and the damping stays, if nothing was stepped.

        Raises:
            ValueError: the damping is not a `LevenbergMarquardt`.
        """
        if (adapted := self.settings.damping.adapted) is None:
            raise ValueError(
                f"adapt() needs damping=LevenbergMarquardt(...), "
                f"not {self.settings.damping.number!r}"
            )
        ratio = self.directions.reduction_ratio(loss_before, loss_after)
        if ratio is None:
            return math.nan
        adapted.follow(ratio)
        return ratio

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, passes are not the batch's: K-FAC records no statistics.

            with kfac.paused():
                attack = fast_gradient_sign(model, images, labels)  # or the first pass of SAM

        The user's program takes the gradients of such passes away, by `zero_grad`.

        Collective over: none.

        Raises:
            ValueError: with `overlap`, as every backward pass sends gradients.
        """
        if self.plan.strategy.transport.overlap:
            raise ValueError("paused() needs overlap=False, as a backward pass sends gradients")
        with self.recorder.pausing():
            yield

    def discard(self) -> None:
        """Forget the passes since the last step, of a batch without a step.

        Raises:
            ValueError: with `overlap`, as the backward pass has sent the sums.
        """
        self.gradients.check_unsent()
        for part in self._parts:
            part.clear()
        self.gradients.discard()

    # -- the stages, in order --------------------------------------------------------------------

    def _refresh_curvature(self) -> None:
        if self.recorder.recording:
            self._average_statistics()
        if self._refreshes():
            self._publish_bases()  # of the interval before, if they are not in use yet
            self._decompose_owned()
        if self.bases.due(self.steps):
            self._publish_bases()
        self.factors.discard()

    def _reduce_scaled(self, scaler: GradScaler, alone: bool) -> bool:
        """Average gradients of a scaled loss, before anything else; return whether to go on."""
        finite = self._unscale_statistics(scaler)
        return reduce_scaled(self.gradients, scaler, finite, alone)

    def _unscale_statistics(self, scaler: GradScaler) -> bool:
        """Take a loss's scale out of a batch's statistics; return whether statistics are finite."""
        if not (self.recorder.recording and self.estimator.of_loss):
            return True
        scale = scaler.get_scale()
        finite = self.factors.unscale(self.recorder.of_gradients, scale)
        return self.scales.unscale(scale) and finite

    def _skip(self) -> None:
        """Leave all as before the batch."""
        for part in self._parts:
            part.clear()
        self.gradients.skip()
        self.directions.expected.zero_()

    def _average_statistics(self) -> None:
        """Average the batch's factors, and the batch's scales, over ranks and over time."""
        if not self.factors.parts:
            self._finish_statistics()
            self.factors.finish()
        decay = self.settings.at("decay", self.steps)
        self.scales.reduce(self.factors.statistics, self.estimator.of_loss)
        self.factors.average(decay, self.steps)
        self._leave_state()  # only now: a sum that fails leaves averages as they were
        self.scales.merge(decay, self.steps)

    def _decompose_owned(self) -> None:
        """Start to decompose the rank's factors, all or a share.

        Factors are decomposed on the rank, at once or in the background, or on a curvature rank.
        """
        share = self._share()
        damping = self.settings.at("damping", self.steps)
        in_float32 = self.gradients.arena.flat.dtype == torch.float32
        if in_float32 and not self.settings.damping.is_relative:
            self._cautions.little_damping(damping, self.steps)
        factors = self.factors.whole(share)
        self._leave_state()  # from here on, the state has what this step has begun
        warn = partial(self._cautions.large_factors, damping=damping, step=self.steps)
        self.bases.decompose(factors, self.steps, damping, share, warn)

    def _publish_bases(self) -> None:
        """Send decompositions to the workers of a layer."""
        if not self.bases.pending:
            return
        self._leave_state()
        with self.trace.stage("decompose"):
            self.trace.calls["decompositions"] += self.bases.take(self.steps)
        self.grid.exchange(self._messages[self.bases.share], self.bases.arena.flat)
        self.bases.refresh()
        self.scales.restart(self.factors.weights, self.bases.share)

    def _make_directions(self) -> None:
        """Precondition gradients, send the directions to all, and bound the step."""
        if self.settings.length.by_adam:
            self._leave_state()  # grafting takes the gradients into averages
        self.directions.precondition(self.steps)
        self.directions.publish()
        self.directions.check()
        self.directions.clip(self.steps)
        if self.settings.damping.adapted and self.settings.length.source != "quadratic":
            self.directions.predict()

    def _checked(self, scaler: GradScaler | None) -> GradScaler | None:
        """Return the scaler if a step can use optimizer and scaler; None for a disabled scaler."""
        check_momentum(self.optimizer, *self._momentum)
        self.grid.check_open()
        scaler = usable_scaler(self.gradients, scaler, self.optimizer)
        if scaler is not None and self.plan.strategy.exchange.of_copies:
            raise ValueError(
                "step(scaler) needs exchanged='gradients', not 'weights': a rank would skip a step "
                "alone, and the sums of factors need all ranks"
            )
        return scaler

    def _batch(self, inputs: Any, loss: Criterion | None) -> Batch | None:
        """Return the batch of a quadratic model, if the length of the step needs the model."""
        quadratic = self.settings.length.source == "quadratic"
        if (inputs is not None, loss is not None) != (quadratic, quadratic):
            raise ValueError(
                "step(inputs=..., loss=...) needs length=Length('quadratic'), and "
                "length='quadratic' needs inputs and loss"
            )
        if loss is None:
            return None
        check_plain(self.optimizer)
        return Batch(inputs if isinstance(inputs, tuple) else (inputs,), loss)

    # -- the model as it is now ------------------------------------------------------------------

    def _in_force(self) -> dict[str, object]:
        """Return the numbers of the step, which are equal on all ranks."""
        names = ("damping", "decay", *filter(None, [self.settings.length.bound]))
        numbers = {name: self.settings.at(name, self.steps) for name in names}
        for name in ("factor_every", "basis_every"):  # of the next step, which needs them at once
            numbers[name] = self.settings.interval(name, self.steps + 1)
        return {"steps": self.steps, "optimizer": list(group_settings(self.optimizer)), **numbers}

    def _follow_votes(self) -> None:
        """Take up a change of the model on any rank.

        Collective over: world.

        Raises:
            UserError: ranks disagree on the model or on the numbers of a step.
        """
        changed, alike = self.gradients.votes.read()
        if not alike:
            agree(self.grid.world, self._in_force())
        if changed:
            self._take_up()

    def _finish_statistics(self) -> None:
        """Turn the batch's sums into factors, and warn of layers that K-FAC cannot see."""
        for name in self.recorder.finish():
            if self.gradients.arena[name].any():
                self._cautions.unseen(name)

    # -- details of the stages -------------------------------------------------------------------

    def _refreshes(self) -> bool:
        """Return whether the step decomposes factors, all or a share."""
        steps, stagger = self.steps, self.plan.strategy.refresh.stagger
        return not self.bases.ready or self.settings.due("basis_every", steps, stagger)

    def _share(self) -> int | None:
        """Return the share of the layers to refresh in the step; None for all."""
        stagger = self.plan.strategy.refresh.stagger
        if not self.bases.ready or stagger == 1:
            return None
        return self.settings.turn("basis_every", self.steps, stagger)
