"""Distributed K-FAC: the main path of a step, from local gradients to identical new weights.

Read `KFAC.step` first: each line is a stage, and each stage is a method below it, in order.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from mpikfac.comm import Grid, agree, broadcast, together
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
from mpikfac.layers import KINDS, Kinds, Layer, Rule, Votes, cover
from mpikfac.numerics import LOSSES, Fisher, Loss, Normalization, all_finite, without_autocast
from mpikfac.plan import Solver, Strategy, forward_only, make_plan, one_of, solvers_of, usual_rule
from mpikfac.settings import (
    Estimator,
    Graft,
    LevenbergMarquardt,
    Schedule,
    Settings,
    check_damping,
    check_rounding,
    check_solvers,
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
        model: its layers of the kinds in `covers` are covered; the log lists what is not.
        optimizer: any torch optimizer over the model's parameters whose step needs no closure.
        comm: the communicator of all ranks, but for curvature ranks.
        strategy: who computes what; every rank preconditions every layer if None (COMM-OPT).
        damping: Tikhonov damping, or a `LevenbergMarquardt` that follows `adapt`. It and the
            intervals, decay and clips may be functions of the step.
        factor_every: interval in steps between statistics.
        basis_every: interval in steps between decompositions; a multiple of `stagger`.
        decay: of the running average of factors, in [0, 1).
        kl_clip: bound on a step's squared Fisher norm; None for no bound.
        norm_clip: bound on the norm of all layers' directions together instead; None for no bound.
        graft: "sgd" gives each layer's direction the length of its gradient [Agarwal et al. 2020],
            "adam" that of Adam's step but for momentum, before any bound; None leaves it as it is.
        solver: "inverse", damped inverses with the damping split between A and G, in which a change
            of damping takes effect at the next decomposition; "eigen", eigenbases and all of the
            damping; "ekfac", the same with eigenvalues of examples' gradients [George et al. 2018],
            see `scales`; "unsplit-inverse", inverses with all of it added to each, as published
            codes do; "rank-one", mean vectors whose squares stand for A and G, another estimator
            [Zhang et al. 2023, Eva]: nothing is decomposed, and `basis_every=1` is the paper's.
        relative_damping: the damping of each layer is `damping` times the mean eigenvalue of its
            `G (x) A`; of each block, where factors fall into blocks.
        normalization: scaling of factors, see `moments`.
        start: an average starts at the "first" factor or at the "identity".
        fisher: whose gradients make up G: those of the loss at the data's labels ("empirical"); at
            labels that the model gives, drawn ones ("sampled") or all of them ("exact"), for which
            `record` has to be called; or none, the identity is taken ("forward-only").
        samples: how often labels are drawn.
        subsample: estimate a batch's factors from every n-th of its examples.
        statistics_dtype: round inputs of convolutions to it before they are multiplied.
        factor_dtype: keep running averages of factors in it; sums over a batch stay as they are.
        basis_dtype: keep decompositions in it, send them so, and multiply gradients by them in it.
        skip: names of modules that are trained first-order.
        covers: what each type of module is covered by, see `layers`: linear layers, convolutions
            and embeddings; with `NORMS` normalisations, too; and modules of your own.
        rule: from the whole factors of a layer to those that are kept: only their diagonals, or
            blocks along these, or one of both; how positions that share a weight count; and which
            solver a layer has, if not the run's.
        curvature: what joins `comm` to curvature ranks, of `split`, if the strategy has some.
        trace: what stages are timed by; a new one if None.

    Raises:
        ValueError: a choice or a layer that cannot work, before any communication.
        UserError: ranks that disagree on model, plan, settings or versions.

    Attributes:
        plan: the communication plan.
        steps: completed steps.
        votes: `[16]`, in the dtype of sums. What a rank writes there before a step travels beside
            the gradients: after the step, all ranks find its mean over ranks. The last one is
            taken by `step(scaler)`.
        troubles: what was not finite.
        intact: whether this rank's state is that after `steps` steps, and no later one's in part.
        trace: seconds and bytes of every stage.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        comm: Any,
        strategy: Strategy | None = None,
        *,
        damping: float | Schedule | LevenbergMarquardt = 0.003,
        factor_every: int | Schedule = 1,
        basis_every: int | Schedule = 10,
        decay: float | Schedule = 0.95,
        kl_clip: float | Schedule | None = 0.001,
        norm_clip: float | Schedule | None = None,
        graft: Graft | None = None,
        solver: Solver = "inverse",
        relative_damping: bool = False,
        normalization: Normalization = "expand",
        start: Literal["first", "identity"] = "first",
        fisher: Fisher = "empirical",
        samples: int = 1,
        subsample: int = 1,
        statistics_dtype: torch.dtype | None = None,
        factor_dtype: torch.dtype | None = None,
        basis_dtype: torch.dtype | None = None,
        skip: Iterable[str] = (),
        covers: Kinds = KINDS,
        rule: Rule = usual_rule,
        curvature: Any = None,
        trace: Trace | None = None,
    ) -> None:
        strategy = strategy or Strategy.comm_opt(comm.size)
        self.model, self.optimizer = model, optimizer
        self.trace = trace or Trace()
        self.settings = Settings(damping, factor_every, basis_every, decay, kl_clip, norm_clip)
        self.settings.due("basis_every", 0, strategy.stagger)  # refused here, not at some step
        self.estimator = Estimator(
            normalization, start, fisher, samples, subsample, statistics_dtype
        )
        self._adaptive = damping if isinstance(damping, LevenbergMarquardt) else None

        kept = (lambda layer: forward_only(rule(layer))) if fisher == "forward-only" else rule
        self.layers, self.others = cover(model, skip, statistics_dtype, covers, kept)
        shapes = [layer.shape for layer in self.layers]
        solvers = solvers_of(shapes, solver)
        check_damping(damping, relative_damping, solvers, graft)
        check_solvers(solvers, self.estimator, factor_dtype, basis_dtype)
        dtype, device = common_type([*self.layers, *self.others])
        self.others.append(votes := Votes(dtype, device))
        self.votes = votes.tensor
        self.plan = make_plan(
            shapes,
            comm.size,
            strategy,
            [(other.name, tuple(other.tensor.shape)) for other in self.others],
            solver,
            dtype.itemsize,
            (factor_dtype or dtype).itemsize,
            (basis_dtype or dtype).itemsize,
        )
        check_rounding(basis_dtype, self.plan.low_ranks(self.plan.factors), strategy.basis_wire)
        check_joins(curvature, self.plan.strategy.curvature_ranks)
        groups_of(self.layers, optimizer)  # refused here, before any communication

        self._check_agreement(
            comm,
            relative_damping=relative_damping,
            graft=graft,
            adaptation=self._adaptive,
            factor_dtype=factor_dtype,
            basis_dtype=basis_dtype,
        )
        broadcast(comm, [*model.parameters(), *model.buffers()])
        self.grid = Grid(comm, self.plan.rows, self.trace, self.plan.strategy.ranks_per_node)
        self.curvature = (
            Curvature(self.plan, comm.rank, curvature, self.trace) if curvature else None
        )
        self._build(dtype, device, factor_dtype, basis_dtype, relative_damping, graft)
        self._forget_curvature()
        self._begin(0)
        if comm.rank == 0:
            report_others(self.others, optimizer)

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
        if self.gradients.owner_updates or strategy.overlap or strategy.parts is not None:
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
        if self.plan.strategy.overlap:
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
        steps, stagger = self.steps, self.plan.strategy.stagger
        return not self.bases.ready or self.settings.due("basis_every", steps, stagger)

    def _share(self) -> int | None:
        """The share of the layers that this step refreshes; None for all."""
        if not self.bases.ready or self.plan.strategy.stagger == 1:
            return None
        return self.settings.turn("basis_every", self.steps, self.plan.strategy.stagger)

    def _forget_curvature(self) -> None:
        """No statistics, no bases, and averages at their start."""
        # Once no thread adds them up any more.
        self.factors.forget(self.estimator.start == "identity")
        self.recorder.clear()
        self.bases.forget()
        self.scales.forget()
        self.grid.encoded.forget()

    def _check_agreement(self, comm: Any, **choices: object) -> None:
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
