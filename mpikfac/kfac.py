"""Distributed K-FAC: a trainer with a preconditioner, and methods specific to K-FAC.

To read the code, begin with `Trainer.step` (trainer.py), and then read
`DistributedPreconditioner.learn` and `DistributedPreconditioner.direct`
(engine/curvature/distributed.py).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpikfac.comm import Comm, SplitComm, agree, together
from mpikfac.engine import DistributedPreconditioner, Graft, Part, PreconditionerFactory
from mpikfac.layers import Coverage, Layer, offers
from mpikfac.model import (
    check_habits,
    check_kind,
    check_momentum,
    check_optimizer,
    check_plain,
    check_synchronous,
    fully_sharded,
    report_uncovered,
)
from mpikfac.numerics import LOSSES, Loss, Scaler, check_outputs, without_autocast
from mpikfac.plan import Clip, Grafting, Strategy, one_of, strategy_of
from mpikfac.plan.names import OF_KFAC, SEEN
from mpikfac.preconditioners import Preconditioner, PreconditionerName, preconditioners_by_name
from mpikfac.settings import (
    Damping,
    Estimator,
    LevenbergMarquardt,
    Precision,
    Schedule,
    Settings,
    budget_of,
    seen_in,
)
from mpikfac.trace import Trace
from mpikfac.trainer import Trainer

SHARDED_OPTIMIZER = "sharded-optimizer"
"""The default strategy for a model that `fully_shard` has sharded."""

log = logging.getLogger("mpikfac")


class KFAC(Trainer):
    """Precondition the steps of a torch optimizer with distributed K-FAC.

    Statistics, factors and directions have the model's dtype, or float32 for a model in bfloat16.

    Collective over: world. All ranks get rank 0's model, and its layers get forward hooks.

    Args:
        model: the model; the log lists the parameters that K-FAC does not cover.
        optimizer: any torch optimizer over the model's parameters whose `step` needs no closure.
        comm: the communicator of the ranks or, with curvature servers, the `SplitComm` that
            `split_comm` returns; all ranks of the job if None.
        strategy: which ranks compute and send what: a `Strategy`, or a name listed by `mpikfac
            strategies`. A name also sets the preconditioner and the intervals that belong to it,
            unless you pass others. None: every rank preconditions every layer (COMM-OPT) or, if the
            model is sharded with `fully_shard`, each layer's owner does ("sharded-optimizer").
        damping: a number, a schedule (a function of the step), a `Damping`, or a
            `LevenbergMarquardt`, which `update_damping` adapts. None: `Damping()`, or 0.003 for the
            preconditioner "eva".
        factor_update_steps: steps between two updates of the factors, or a schedule. None: 10, but
            fewer during the first 160 steps (`schedule.growing`).
        inv_update_steps: steps between two decompositions, or a schedule; a multiple of `stagger`.
            None: 50, but fewer during the first 160 steps.
        preconditioner: a `Preconditioner`, such as `Eigen(dtype=torch.bfloat16)` or an instance of
            your own class, or the name of one, which uses its defaults. None: "inverse".

            - "inverse": damped inverses, with the damping split between A and G; a change of the
              damping takes effect at the next decomposition. `Inverse(split_damping=False)` adds
              all of the damping to each factor, as published implementations do.
            - "eigen": eigenbases, with the damping added to the products of eigenvalues.
            - "ekfac": the same, with eigenvalues estimated from per-example gradients [George et
              al. 2018].
            - "eva": mean vectors, whose outer products replace A and G [Zhang et al. 2023, Eva].
              The paper uses `inv_update_steps=1`.
            - "newton-muon": only A; directions are orthogonalised [Newton-Muon].
            - "shampoo": inverse roots of factors of the averaged gradient [Gupta et al. 2018].
            - "kl-shampoo": the same, with each factor whitened by the other [Lin et al. 2025].
            - "soap": Adam in the eigenbases of Shampoo's factors [SOAP].
            - "muon": no factors; the averaged gradient is orthogonalised [Muon].
            - "normuon": the same, with rows scaled to about equal length [NorMuon].
        grafting: determines the length of each layer's direction: `NoGrafting`, `SGDGrafting`,
            `AdamGrafting`, or `mpikfac.lab.QuadraticModel`. None: the preconditioner's default,
            which is `AdamGrafting()` for most preconditioners, or `NoGrafting()` if a clip is set.
        clip: a joint bound on the directions of all layers: `KLClip`, `FisherClip`, `NormClip`,
            or None.
        estimator: how factors are estimated.
        coverage: the layers to cover, and the structure of their factors.
        budget: the maximum number of operations for statistics and decompositions, averaged over
            steps, as a fraction of the operations of the forward and backward passes; the fraction
            is at least 1 during the first 160 steps. To stay within the budget, intervals are
            lengthened after the first batch with statistics, and factors are split into blocks of
            at most 128 rows, or half as many rows as the batch has vectors, whichever is more. If
            `budget` is None, or if you set an interval, intervals and factors stay unchanged; if
            you set `Coverage.rule`, only factors do. The budget never splits factors with "eva",
            "ekfac", a preconditioner of the averaged gradient, curvature servers or local steps.
        matmul_precision: how the products that precondition gradients and orthogonalise directions
            round their operands. "float32": not at all; on a GPU, torch's settings apply. "tf32":
            to 10 bits of mantissa. "bfloat16": to 7 bits. Results are accumulated in float32, and
            models in float64 are never rounded. Only the tensor cores of NVIDIA GPUs compute this
            faster; other devices round without saving time. None: "tf32" on an NVIDIA GPU without
            staleness, otherwise "float32".
        cuda_graph: whether to record the computation of directions as a CUDA graph, and replay it
            with a single call in steps whose settings have not changed. Requires an NVIDIA GPU, but
            has not been tested on one yet.
        trace: records the time, calls and bytes of every stage; a new `Trace` if None.

    Raises:
        ValueError: a choice or a layer is not supported; raised before any communication.
        UserError: ranks disagree on the model, the plan, settings or versions.

    Attributes:
        plan: the communication plan.
        steps: the number of completed steps.
        votes: `[16]`, in the dtype of the statistics. Values that a rank writes before a step are
            sent with the gradients; after the step, they are the means over all ranks. The
            last eight are reserved for K-FAC.
        nonfinite: counts of non-finite values.
        is_consistent: whether the rank's state is exactly the state after `steps` steps, without
            anything from a later step.
        trace: seconds and bytes of every stage.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        comm: Comm | SplitComm | None = None,
        strategy: Strategy | str | None = None,
        *,
        damping: float | Schedule | Damping | LevenbergMarquardt | None = None,
        factor_update_steps: int | Schedule | None = None,
        inv_update_steps: int | Schedule | None = None,
        preconditioner: PreconditionerName | Preconditioner | None = None,
        grafting: Grafting | None = None,
        clip: Clip | None = None,
        estimator: Estimator | None = None,
        coverage: Coverage | None = None,
        budget: float | None = 0.3,
        matmul_precision: Precision | None = None,
        cuda_graph: bool = False,
        trace: Trace | None = None,
    ) -> None:
        check_optimizer(optimizer, model)
        check_kind("grafting", grafting, Grafting)
        check_kind("clip", clip, Clip)
        check_kind("estimator", estimator, Estimator)
        check_kind("coverage", coverage, Coverage)
        if damping is not None and not isinstance(damping, Damping):
            damping = Damping(damping)
        coverage = coverage or Coverage()
        team = SplitComm.of(comm)
        usual = SHARDED_OPTIMIZER if fully_sharded(model) else None
        strategy, of_strategy = strategy_of(usual if strategy is None else strategy)
        check_synchronous(strategy)
        named = of_strategy.pop("preconditioner", "inverse")
        preconditioners = preconditioners_by_name(preconditioner or named)
        run = next(iter(preconditioners.values()))
        chosen = run.defaults.override(**of_strategy).override(
            clip,
            damping=damping,
            factor_update_steps=factor_update_steps,
            inv_update_steps=inv_update_steps,
            grafting=grafting,
            estimator=estimator,
            matmul_precision=matmul_precision,
        )
        if chosen.grafting.needs_batch:
            check_plain(optimizer)
        by_hand = chosen.factor_update_steps, chosen.inv_update_steps
        limits = budget_of(budget, by_hand, run.form, coverage.rule, strategy)
        self.estimator = chosen.estimator
        self.settings = Settings(
            chosen.damping,
            *chosen.intervals(limits, strategy.refresh.stagger),
            self.estimator.factor_decay,
            grafting=chosen.grafting,
            clip=clip,
            matmul_precision=chosen.matmul_precision,
            cuda_graph=cuda_graph,
            budget=limits,
        )
        factory = PreconditionerFactory(self.settings, self.estimator, preconditioners, coverage)
        super().__init__(model, optimizer, team, strategy, factory, trace)
        if team.trains.rank == 0:
            uncovered = self.built.gradients.uncovered
            ways = offers(model, uncovered, coverage)
            report_uncovered(model, self.layers, uncovered, optimizer, ways)
            fisher_type = self.estimator.fisher_type
            for warning in check_habits(optimizer, self.settings, fisher_type, run.form):
                log.warning("%s", warning)

    def __repr__(self) -> str:
        """Return a summary: the covered layers, the strategy and the number of steps."""
        uncovered = self.built.gradients.uncovered
        first_order = sum(bool(tensor.parameters) for tensor in uncovered)
        return (
            f"KFAC({len(self.layers)} layers covered, {first_order} tensors trained first-order, "
            f"{self.plan.grid.count} ranks, {self.plan.grid.workers} workers per layer, "
            f"preconditioner {self.plan.preconditioner}, step {self.steps})"
        )

    @property
    def preconditioner(self) -> DistributedPreconditioner:
        """This rank's preconditioner, which computes factors, decompositions and directions."""
        return cast(DistributedPreconditioner, self.built.method)

    @property
    def layers(self) -> list[Layer]:
        """The covered layers."""
        return list(self.built.gradients.layers)

    @property
    def grafting(self) -> Graft:
        """The graft, which sets the lengths of directions.

        Its method `set_batch` is needed only with `QuadraticModel`.
        """
        return self.preconditioner.directions.graft

    @property
    def kl_scale(self) -> Tensor:
        """The factor by which `clip` scaled the last step's directions; 1 without a clip.

        Its shape is `[1]`, and it is on the model's device.
        """
        return self.preconditioner.directions.scale

    @without_autocast
    def record(
        self, outputs: Tensor | Sequence[Tensor], loss: Loss | Sequence[Loss] = "cross-entropy"
    ) -> None:
        """Record statistics for labels from the model's distribution, if `fisher_type` needs them.

            outputs = model(images)
            kfac.record(outputs)
            torch.nn.functional.cross_entropy(outputs, labels).backward()
            kfac.step()

        Runs one backward pass per sampled label or, with fisher_type="type-2", per output. The
        gradients of parameters do not change. Does nothing if `fisher_type` is "empirical" or
        "forward-only", and in steps that do not update factors.

        Collective over: world with `overlap`, like the backward pass itself; otherwise, none.

        Args:
            outputs: the model's outputs, `[batch, outputs]` or `[batch, outputs, *positions]`; or
                one row per term of the loss, `[rows, outputs]`, such as one per token that a mask
                keeps. For several heads, a list of outputs: the loss is the sum of the heads'
                losses.
            loss: "cross-entropy", "squared-error" or "logistic", averaged over the batch and the
                other dimensions as torch does: `F.cross_entropy`, `F.mse_loss`,
                `F.binary_cross_entropy_with_logits`. For several heads, either one loss for all
                heads, or a list with one loss per head.

        Raises:
            ValueError: the loss is unknown; heads have different numbers of rows; outputs are not
                logits, or have no output dimension; or, with fisher_type="type-2", outputs have
                positions, or a number of rows that is not the number of examples.
        """
        heads = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        losses = [loss] * len(heads) if isinstance(loss, str) else list(loss)
        for each in losses:
            one_of("loss", each, LOSSES)
        hooks = self.preconditioner.hooks
        if self.estimator.of_loss or not hooks.recording:
            return
        check_outputs(heads, losses)
        parameters = [p for layer in self.layers for p in layer.parameters if p.requires_grad]
        for turn, gradients in self.estimator.turns(heads, losses):
            with hooks.standing_for(turn):
                torch.autograd.grad(
                    heads, parameters, gradients, retain_graph=True, allow_unused=True
                )

    @without_autocast
    def precondition(self, scaler: Scaler | None = None) -> None:
        """Precondition the averaged gradients of covered layers; the caller then takes the step.

        Before this call, the caller averages buffers and all gradients over ranks. With
        `AdamGrafting`, the default, Adam's steps replace the gradients of uncovered parameters.

        Collective over: world.

        Args:
            scaler: the `torch.amp.GradScaler` that scaled the loss and whose `unscale_` has already
                unscaled the averaged gradients; this method unscales the statistics. If any
                gradient is not finite, the gradients are left unchanged: the scaler's `step` skips
                the update, and the batch is ignored. All ranks must agree on whether the gradients
                are finite.

        Raises:
            ValueError: the set of trained parameters has changed, or the strategy has
                `shard_optimizer` (the owner of a layer must update it), `overlap` (gradients are
                sent before the caller can average them), `virtual_ranks` (K-FAC adds their
                gradients in order) or local steps (each rank updates a replica), or the grafting is
                `QuadraticModel` (only `step` uses the batch).
        """
        self._check_preconditions()
        self._warn_of_unfinished()
        method, gradients = self.preconditioner, self.built.gradients
        numbers = method.numbers(self.steps)
        method.begin_step()
        if gradients.look(self._compared(numbers)):
            raise ValueError(
                "the trained parameters have changed, and precondition() cannot adopt the change; "
                "construct KFAC again, or call step()"
            )
        gradients.read()
        if scaler is not None and scaler.is_enabled():
            if not gradients.finite:  # the same on all ranks
                self._skip()
                return
            method.unscale(scaler)
        method.learn(numbers)
        gradients.check(self.steps)
        method.make_directions(numbers)
        gradients.write([*method.directions.slots, *self.grafting.uncovered])
        gradients.keep()
        self._guard.allow_once()
        self._begin_batch(self.steps + 1)
        self._take_up_cuts()

    def _check_preconditions(self) -> None:
        """Check that the caller can average the gradients and take the step.

        Raises:
            ValueError: the strategy or the grafting requires a call of `step` instead, or momentum
                would be applied twice.
        """
        strategy = self.plan.strategy
        if strategy.sync.local_steps:
            raise ValueError(
                f"with sync={strategy.sync.name!r} each rank updates a replica; call step()"
            )
        if self.settings.grafting.needs_batch:
            raise ValueError(
                "with grafting=QuadraticModel(), call grafting.set_batch(inputs, loss) and step()"
            )
        transport = strategy.transport
        sharded = strategy.assignment.shard_optimizer
        if sharded or transport.overlap or transport.virtual_ranks:
            raise ValueError(
                "with shard_optimizer=True, overlap=True or virtual_ranks, the caller cannot "
                "average gradients or take the step; call step()"
            )
        check_momentum(self.optimizer, strategy, self.settings.grafting.momentum)

    def accumulate(self) -> None:
        """Accumulate a part of the local batch; see `FirstOrderTrainer.accumulate`."""
        super().accumulate()
        self.preconditioner.accumulate()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state; see `FirstOrderTrainer.load_state_dict`.

        Factors are split into the same blocks as in the state.

        Collective over: world.
        """
        self._load_blocks(state)
        super().load_state_dict(state)

    def _load_blocks(self, state: Mapping[str, Any]) -> None:
        """Load the first batch's vector counts from the state, by which factors are split.

        The trainer's parts are rebuilt if the plan changes.

        Raises:
            UserError: a rank cannot read the counts, or ranks disagree on them.
        """
        world = self.grid.world
        with together(world, "loading state", untrusted=True):
            text = state.get(OF_KFAC + SEEN, "")
            seen = seen_in(text)
        agree(world, {"kfac/seen": text})
        if text:
            self.settings.budget.seen = seen
            if self._draw(self.built.gradients.votes).plan.digest() != self.plan.digest():
                self._take_up("factors are cut as in the state")

    def _names_for(self, part: Part, state: Mapping[str, Any]) -> Collection[str]:
        """Return the names of a state's items that a part can load."""
        return self.preconditioner.known(state) if part.PREFIX else state.keys()

    def _detach_parts(self) -> None:
        self.preconditioner.hooks.close()
        super()._detach_parts()

    def close(self) -> None:
        """Finish pending messages, remove hooks, free communicators; no further step is possible.

        On curvature servers, this makes `run_curvature_server` return.

        Collective over: world.
        """
        self.preconditioner.close()
        super().close()

    def update_damping(self, loss_before: float, loss_after: float) -> float:
        """Adapt the damping to the reduction ratio of the last step; return the ratio.

            if damping.due(kfac.steps):
                with torch.no_grad():
                    kfac.update_damping(loss.item(), criterion(model(images), labels).item())

        The ratio is the change in the loss, averaged over ranks, relative to the change that
        K-FAC's damped quadratic model predicts for `delta = -lr direction`:
        `<gradient, delta> + 1/2 <delta, C delta>`, where `C` is the damped curvature. `C direction`
        is the gradient, up to the scale of the step, so no product with `C` is computed. Everything
        outside this model contributes only to the actual change in the loss: momentum, weight
        decay, uncovered parameters, and, in a layer with several learning rates, the coupling of
        its parameters. With `QuadraticModel`, the full quadratic model predicts the full step. With
        inverses, the new damping takes effect at the next decomposition. Call `update_damping`
        before `state_dict`, which does not store the prediction.

        Collective over: world.

        Args:
            loss_before: the mean loss of the rank's shard of the batch, before the step.
            loss_after: the mean loss of the same examples with the new weights.

        Returns:
            The ratio; NaN, with the damping unchanged, if no step was taken.

        Raises:
            ValueError: the damping is not a `LevenbergMarquardt`.
        """
        if (adapted := self.settings.damping.adapted) is None:
            raise ValueError(
                f"update_damping() needs damping=LevenbergMarquardt(...), "
                f"not {self.settings.damping.number!r}"
            )
        directions = self.preconditioner.directions
        ratio = directions.reduction_ratio(loss_before, loss_after)
        if ratio is None:
            return math.nan
        adapted.follow(ratio)
        return ratio

    @contextmanager
    def no_recording(self) -> Iterator[None]:
        """Exclude forward and backward passes inside the context from the batch's statistics.

            with kfac.no_recording():
                attack = fast_gradient_sign(model, images, labels)  # or the first pass of SAM

        Remove the gradients of such passes with `zero_grad`. Even outside of
        `no_recording`, a backward pass is not counted if its gradients are removed before the next
        one.

        Collective over: none.

        Raises:
            ValueError: `overlap` is used, so every backward pass sends gradients.
        """
        if self.plan.strategy.transport.overlap:
            raise ValueError(
                "no_recording() needs overlap=False, because a backward pass sends gradients"
            )
        with self.preconditioner.hooks.pausing():
            yield
