"""Distributed K-FAC: the main path of a step, from local gradients to identical new weights.

Read `KFAC.step` first: each line is a stage, and each stage is a method below it, in order.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpikfac import kron
from mpikfac.arena import Arena
from mpikfac.bases import Bases
from mpikfac.checks import common_type, describe, groups_of, report_others
from mpikfac.comm import Grid, agree, broadcast, together
from mpikfac.curvature import Curvature, check_joins
from mpikfac.data_parallel import Gradients
from mpikfac.factors import Factors
from mpikfac.layers import Layer, Votes, cover
from mpikfac.messages import Message
from mpikfac.moments import NORMALIZATIONS, Normalization
from mpikfac.plan import Solver, make_plan
from mpikfac.recorder import Recorder
from mpikfac.schedule import Schedule, Settings
from mpikfac.state import (
    fitting,
    load_model_state,
    missing_state,
    model_state,
    needed_state,
)
from mpikfac.strategy import Strategy, check_count, one_of
from mpikfac.trace import Trace
from mpikfac.troubles import Troubles, all_finite, not_finite

log = logging.getLogger("mpikfac")


class KFAC:
    """A torch optimizer preconditioned by distributed K-FAC.

    Collective over: world. The model becomes rank 0's; forward hooks are added to its layers.

    Args:
        model: its `Linear` and `Conv2d` layers are covered; the log lists what is not.
        optimizer: any torch optimizer over the model's parameters whose step needs no closure.
        comm: the communicator of all ranks, but for curvature ranks.
        strategy: who computes what; every rank preconditions every layer if None (COMM-OPT).
        damping: Tikhonov damping. This and the next four may be functions of the step.
        factor_every: interval in steps between statistics.
        basis_every: interval in steps between decompositions; a multiple of `stagger`.
        decay: of the running average of factors, in [0, 1).
        kl_clip: bound on a step's squared Fisher norm; None for no bound.
        solver: "inverse", damped inverses with the damping split between A and G, in which a change
            of damping takes effect at the next decomposition; "eigen", eigenbases and all of the
            damping; "unsplit-inverse", inverses with all of it added to each, as published codes
            do; "rank-one", mean vectors whose squares stand for A and G, another estimator
            [Zhang et al. 2023, Eva]: nothing is decomposed, and `basis_every=1` is the paper's.
        normalization: scaling of factors, see `moments`.
        start: an average starts at the "first" factor or at the "identity".
        subsample: estimate a batch's factors from every n-th of its examples.
        statistics_dtype: round inputs of convolutions to it before they are multiplied.
        precondition_dtype: round gradients and decompositions to it to precondition.
        skip: names of modules that are trained first-order.
        curvature: what joins `comm` to curvature ranks, of `split`, if the strategy has some.

    Raises:
        ValueError: a choice or a layer that cannot work, before any communication.
        UserError: ranks that disagree on model, plan, settings or versions.

    Attributes:
        plan: the communication plan.
        steps: completed steps.
        votes: `[16]`, of the model's dtype. What a rank writes there before a step travels beside
            the gradients: after the step, all ranks find its mean over ranks.
        troubles: what was not finite.
        intact: whether this rank's state is that after `steps` steps, and no later one's in part.
        kl_scale: what the last step was multiplied by, `[1]`, on the model's device.
        trace: seconds and bytes of every stage.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        comm: Any,
        strategy: Strategy | None = None,
        *,
        damping: float | Schedule = 0.003,
        factor_every: int | Schedule = 1,
        basis_every: int | Schedule = 10,
        decay: float | Schedule = 0.95,
        kl_clip: float | Schedule | None = 0.001,
        solver: Solver = "inverse",
        normalization: Normalization = "expand",
        start: Literal["first", "identity"] = "first",
        subsample: int = 1,
        statistics_dtype: torch.dtype | None = None,
        precondition_dtype: torch.dtype | None = None,
        skip: Iterable[str] = (),
        curvature: Any = None,
        trace: Trace | None = None,
    ) -> None:
        strategy = strategy or Strategy.comm_opt(comm.size)
        self.model = model
        self.optimizer = optimizer
        self.settings = Settings(damping, factor_every, basis_every, decay, kl_clip)
        self.settings.due("basis_every", 0, strategy.stagger)  # refused here, not at some step
        self.normalization = normalization
        self.start = start
        self.trace = trace or Trace()
        dtypes = statistics_dtype, precondition_dtype
        _check_choices(solver, normalization, start, subsample, *dtypes)

        self.layers, self.others = cover(model, skip, statistics_dtype)
        dtype, device = common_type([*self.layers, *self.others])
        self.others.append(votes := Votes(dtype, device))
        self.votes = votes.tensor
        self.plan = make_plan(
            [layer.shape for layer in self.layers],
            comm.size,
            strategy,
            [(other.name, tuple(other.tensor.shape)) for other in self.others],
            solver,
            dtype.itemsize,
        )
        check_joins(curvature, self.plan.strategy.curvature_ranks)
        self._groups = groups_of(self.layers, optimizer)
        self._check_agreement(
            comm,
            subsample=subsample,
            statistics_dtype=statistics_dtype,
            precondition_dtype=precondition_dtype,
        )
        broadcast(comm, [*model.parameters(), *model.buffers()])

        self.grid = Grid(comm, self.plan.rows, self.trace, self.plan.strategy.ranks_per_node)
        rank = comm.rank
        self.troubles = Troubles(rank)
        self.gradients = Gradients([*self.layers, *self.others], self.plan, self.grid)
        self._stepped = self.gradients.stepped(model)
        self.factors = Factors(self.plan, self.grid, dtype, device, self.troubles)
        joined = Curvature(self.plan, rank, curvature, self.trace) if curvature else None
        self.curvature = joined
        self.bases = Bases(
            self.plan, rank, dtype, device, precondition_dtype, self.troubles, joined
        )
        self.directions = Arena(self.plan.directions(rank), dtype, device)
        self.kl_scale = torch.ones(1, dtype=dtype, device=device)
        self._messages = self._planned(rank)
        statistics = self.factors.statistics
        self.recorder = Recorder(
            model, self.layers, statistics, self.trace, subsample, self.plan.vectors
        )
        if self.factors.overlap:
            self.recorder.before_first = self.factors.settle
            self.recorder.after_each = self._send_statistics
        self._forget_curvature()
        self._begin(0)
        if comm.rank == 0:
            report_others(self.others, optimizer)

    # -- the main path ---------------------------------------------------------------------------

    def step(self) -> None:
        """From local gradients to identical new weights on every rank.

        A parameter without a gradient counts as one with gradient 0.

        Collective over: world.
        """
        if not self.gradients.parts:
            self.gradients.read()
        self._refresh_curvature()
        self.gradients.reduce()
        self.gradients.check(self.troubles, self.steps)
        self._precondition()
        self._publish_directions()
        self._check_directions()
        self._clip()
        self.gradients.write(self.layers, self.directions)
        self.gradients.write(self.others, self.gradients.arena)
        self.intact = False
        self.gradients.update(self.optimizer)
        self._begin(self.steps + 1)

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
            self.recorder.finish(self.normalization, len(self.factors.parts) * self.plan.ranks)
            self.factors.parts.add()
            self.factors.statistics.flat.zero_()

    def precondition(self) -> None:
        """Preconditions covered layers' gradients, which the caller has averaged and will step.

        Parameters and buffers that no layer covers are left to the caller as well.

        Collective over: world.

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
        self._refresh_curvature()
        self.gradients.check(self.troubles, self.steps)
        self._precondition()
        self._publish_directions()
        self._check_directions()
        self._clip()
        self.gradients.write(self.layers, self.directions)
        self.gradients.keep()
        self._begin(self.steps + 1)

    def discard(self) -> None:
        """Forgets the passes since the last step, of a batch that is not to be stepped with.

        Raises:
            ValueError: with `overlap`, where the backward pass has sent what it made.
        """
        if self.plan.strategy.overlap:
            raise ValueError("with overlap=True a batch is sent as it is made; call step()")
        self.recorder.clear()
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
        self.recorder.recording = due or self.factors.weight == 0

    def _refresh_curvature(self) -> None:
        if self.recorder.recording:
            self._average_statistics()
        if self._refreshes():
            self._publish_bases()  # of the interval before, if they are still on their way
            self._decompose_owned()
        if self.bases.due(self.steps):
            self._publish_bases()
        self.factors.discard()

    def _average_statistics(self) -> None:
        """Averages the batch's factors over ranks and over time."""
        if not self.factors.parts:
            alone = self.plan.strategy.reduction == "none"
            self.recorder.finish(self.normalization, 1 if alone else self.plan.ranks)
        self.factors.average(self.settings.at("decay", self.steps), self.steps)
        self.intact = False  # only now: a sum that fails leaves averages as they were

    def _send_statistics(self, layer: Layer) -> None:
        """Sends what the backward pass has just recorded of a layer."""
        self.recorder.finish_layer(layer, self.normalization, self.plan.ranks)
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
        self.grid.exchange(self._messages["bases", self.bases.share], self.bases.arena.flat)
        self.bases.refresh()

    def _precondition(self) -> None:
        """Preconditions the gradients of the layers that this rank works on."""
        with self.trace.stage("precondition"):
            self.bases.damp(self.settings.at("damping", self.steps))
            for name in self.plan.preconditioned(self.grid.world.rank):
                direction = self.bases.precondition(name, self.gradients.arena[name])
                self.directions[name].copy_(direction)

    def _publish_directions(self) -> None:
        """Sends preconditioned gradients to the ranks that did not compute them."""
        self.grid.exchange(self._messages["directions"], self.directions.flat)

    def _check_directions(self) -> None:
        """A direction that is not finite, as its layer has no bases, becomes the gradient."""
        if not all_finite(self.directions.flat):
            for name in not_finite(self.directions):
                gradient = self.gradients.arena[name]
                usable = gradient if all_finite(gradient) else torch.zeros_like(gradient)
                self.directions[name].copy_(usable)

    def _clip(self) -> None:
        """Bounds the step by the KL clip."""
        if self.settings.kl_clip is None or not self.layers:
            return
        divergence = self._divergence()
        self.grid.exchange(self._messages["clip"], divergence)
        clip = self.settings.at("kl_clip", self.steps)
        self.kl_scale = kron.kl_scale(divergence, clip)
        self.directions.flat *= self.kl_scale

    # -- details of the stages -------------------------------------------------------------------

    def _divergence(self) -> Tensor:
        """`sum lr^2 <direction, gradient>` `[1]` over the layers whose directions are here."""
        total = self.directions.flat.new_zeros(1)
        for layer in self.layers:
            # A gradient that is not finite is not stepped with, and would make the sum so.
            if layer.name in self.directions and layer.name not in self.gradients.broken:
                products = self.directions[layer.name] * self.gradients.arena[layer.name]
                for part, group in zip(layer.parts(products), self._groups[layer.name]):
                    total += part.sum() * self.optimizer.param_groups[group]["lr"] ** 2
        return total

    def _refreshes(self) -> bool:
        """Whether this step decomposes: all factors or a share of them."""
        steps, stagger = self.steps, self.plan.strategy.stagger
        return not self.bases.ready or self.settings.due("basis_every", steps, stagger)

    def _share(self) -> int | None:
        """The share of the layers that this step refreshes; None for all."""
        if not self.bases.ready or self.plan.strategy.stagger == 1:
            return None
        return self.settings.turn("basis_every", self.steps, self.plan.strategy.stagger)

    def _planned(self, rank: int) -> dict[Any, list[Message]]:
        """What this rank sends in each stage but those of `factors` and `gradients`."""
        plan = self.plan
        bases = {("bases", share): plan.publish_bases(rank, share) for share in plan.shares}
        return {**bases, "directions": plan.publish_directions(rank), "clip": plan.clip()}

    def _forget_curvature(self) -> None:
        """No statistics, no bases, and averages at their start."""
        self.factors.forget(self.start == "identity")  # once no thread adds them up any more
        self.recorder.clear()
        self.bases.forget()
        self.grid.encoded.forget()

    def _check_agreement(self, comm: Any, **choices: object) -> None:
        agree(
            comm,
            {
                **describe(self.model, self.optimizer),
                "strategy": self.plan.strategy,
                "plan": self.plan.digest(),
                "normalization": self.normalization,
                "start": self.start,
                **choices,
                **self.settings.described(),
            },
        )

    # -- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's share of the state, by name; shares of all ranks make the whole.

        Model, optimizer, factors as packed triangles (or vectors), bases, the averages' weight, and
        the number of steps: what a run needs to go on exactly, also between two decompositions.
        What encoding lost is dropped, here as by a restart.

        Collective over: world with `reduce_at="bases"` or `overlap`, else none.
        """
        self.grid.encoded.forget()
        state = model_state(self.model, self.optimizer, self._stepped)
        kept = self.factors.state_dict() | self.bases.state_dict()
        return state | {"trainer/steps": self.steps} | {f"kfac/{n}": v for n, v in kept.items()}

    def missing(self, names: Collection[str]) -> set[str]:
        """What is not among `names`, of those that the shares of all ranks make up."""
        whole = {f"kfac/{self.factors.kind}/{name}" for name in self.plan.orders}
        if "kfac/solver" in names:
            for rank in range(self.plan.ranks):
                made = self.plan.decompositions(self.plan.decomposed(rank))
                whole |= {f"kfac/bases/{name}" for name, _ in made}
        return missing_state(self.model, names) | whole.difference(names)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes from `state` what this rank needs, whatever strategy and ranks it was saved from.

        All of it on all ranks, or nothing. A first-order run's state is taken too, and that of
        another estimator: statistics and bases are then made at the next step.

        Collective over: world.

        Raises:
            UserError: on some rank an item is missing, of another dtype or shape than the model's,
                or cannot be read.
        """
        with together(self.grid.world, "loading state"):
            found = needed_state(self.model, self.optimizer, self._stepped, state)
            found |= self._needed_curvature(state)
        load_model_state(self.model, self.optimizer, self._stepped, found)
        self.gradients.keep()
        self.gradients.discard()
        self._forget_curvature()
        kept = {n.removeprefix("kfac/"): v for n, v in found.items() if n.startswith("kfac/")}
        if "average_weight" in kept:
            self.factors.load_state_dict(kept)
        self.bases.load_state_dict(kept)
        self._begin(int(found["trainer/steps"]))

    def _needed_curvature(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """What there is of factors, and of bases if they are this solver's."""
        like: dict[str, Any] = {}
        prefix = f"kfac/{self.factors.kind}/"
        if any(name.startswith(prefix) for name in state):
            averages = self.factors.averages
            like = {f"{prefix}{name}": averages[name] for name in self.factors.kept()}
            like["kfac/average_weight"] = self.factors.weight
        if state.get("kfac/solver") == self.plan.solver:
            kept = {name.removeprefix("kfac/") for name in state if name.startswith("kfac/")}
            like |= {f"kfac/{name}": value for name, value in self.bases.needed(kept).items()}
        return fitting(state, like)


def _check_choices(
    solver: str,
    normalization: str,
    start: str,
    subsample: int,
    statistics_dtype: torch.dtype | None,
    precondition_dtype: torch.dtype | None,
) -> None:
    one_of("normalization", normalization, NORMALIZATIONS)
    one_of("start", start, ("first", "identity"))
    one_of("statistics_dtype", statistics_dtype, (None, torch.bfloat16))
    one_of("precondition_dtype", precondition_dtype, (None, torch.bfloat16))
    check_count("subsample", subsample, 1)
    plain = (start, statistics_dtype, precondition_dtype) == ("first", None, None)
    if solver == "rank-one" and not plain:
        raise ValueError(
            f"solver='rank-one' has no matrices to start at the identity or to round: it needs "
            f"start='first', statistics_dtype=None and precondition_dtype=None, not {start!r}, "
            f"{statistics_dtype} and {precondition_dtype}"
        )
