"""Distributed K-FAC: the main path of a step, from local gradients to identical new weights.

Read `KFAC.step` first: each line is a stage, and each stage is a method below it, in order.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import mpikfac
from mpikfac import kron
from mpikfac.arena import Arena
from mpikfac.comm import Grid, agree, broadcast
from mpikfac.data_parallel import (
    Block,
    Gradients,
    common_type,
    describe,
    load_model_state,
    model_state,
)
from mpikfac.layers import Layer, cover
from mpikfac.moments import NORMALIZATIONS, Normalization, factor_scales
from mpikfac.plan import Solver, Strategy, make_plan
from mpikfac.schedule import Schedule, evaluate, every
from mpikfac.trace import Trace

log = logging.getLogger("mpikfac")


class KFAC:
    """A torch optimizer preconditioned by distributed K-FAC.

    Collective over: world. The model becomes rank 0's; forward hooks are added to its layers.

    Args:
        model: its `Linear` and `Conv2d` layers are covered; the log lists what is not.
        optimizer: any torch optimizer over the model's parameters.
        comm: the communicator of all ranks.
        strategy: who computes what; every rank preconditions every layer if None (COMM-OPT).
        damping: Tikhonov damping. This and the next four may be functions of the step.
        factor_every: interval in steps between statistics.
        basis_every: interval in steps between decompositions.
        decay: of the running average of factors, in [0, 1).
        kl_clip: bound on a step's squared Fisher norm; None for no bound.
        solver: "eigen"; "inverse", damped inverses with the damping split between A and G, in
            which a change of damping takes effect at the next decomposition; "unsplit-inverse",
            the same with all of the damping added to each, as published codes do.
        normalization: scaling of factors, see `moments`.
        start: an average starts at the "first" factor or at the "identity".
        skip: names of modules that are trained first-order.

    Raises:
        ValueError: a choice or a layer that cannot work, before any communication.
        UserError: ranks that disagree on model, plan, settings or versions.

    Attributes:
        plan: the communication plan.
        steps: completed steps.
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
        solver: Solver = "eigen",
        normalization: Normalization = "expand",
        start: Literal["first", "identity"] = "first",
        skip: Iterable[str] = (),
        trace: Trace | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.damping = damping
        self.factor_every = factor_every
        self.basis_every = basis_every
        self.decay = decay
        self.kl_clip = kl_clip
        self.normalization = normalization
        self.trace = trace or Trace()
        self._check_settings(start)

        self.layers, others = cover(model, skip)
        blocks: list[Block] = [*self.layers, *others]
        dtype, device = common_type(blocks)
        self.plan = make_plan(
            [layer.shape for layer in self.layers],
            comm.size,
            strategy or Strategy.comm_opt(comm.size),
            [(other.name, tuple(other.tensor.shape)) for other in others],
            solver,
            dtype.itemsize,
        )
        self._check_optimizer()
        self._check_agreement(comm, start)
        broadcast(comm, list(model.state_dict().values()))

        self.grid = Grid(comm, self.plan.rows, self.trace)
        rank = comm.rank
        self.gradients = Gradients(blocks, self.plan, self.grid)
        self.statistics = Arena(self.plan.statistics(rank), dtype, device)
        self.averages = Arena(self.plan.averages(rank), dtype, device)
        self.bases = Arena(self.plan.bases(rank), dtype, device)
        self.directions = Arena(self.plan.directions(rank), dtype, device)
        self.kl_scale = torch.ones(1, dtype=dtype, device=device)
        self._average_weight = 0.0
        self._has_bases = False
        if start == "identity":
            self._start_at_identity()
        self._watch(model)
        self._begin(0)
        if comm.rank == 0 and others:
            names = ", ".join(other.name for other in others if other.parameters)
            log.info("trained first-order, as no layer covers them: %s", names or "none")

    # -- the main path ---------------------------------------------------------------------------

    def step(self) -> None:
        """From local gradients to identical new weights on every rank.

        Collective over: world.
        """
        self.gradients.read()
        self._refresh_curvature()
        self.gradients.reduce()
        self._precondition()
        self._publish_directions()
        self._clip_and_write_back()
        self.gradients.update(self.optimizer)
        self._begin(self.steps + 1)

    def precondition(self) -> None:
        """Preconditions gradients that the caller has averaged and will step with.

        Collective over: world.

        Raises:
            ValueError: with `update="owner"`, where the owner of a layer has to step it.
        """
        if self.gradients.owner_updates:
            raise ValueError("update='owner' steps the model itself; call step()")
        self.gradients.read()
        self._refresh_curvature()
        self._precondition()
        self._publish_directions()
        self._clip_and_write_back()
        self._begin(self.steps + 1)

    def _begin(self, step: int) -> None:
        self.steps = step
        due = every(self.factor_every, step, "factor_every")
        self._recording = due or self._average_weight == 0

    def _refresh_curvature(self) -> None:
        if self._recording:
            self._reduce_statistics()
        if every(self.basis_every, self.steps, "basis_every") or not self._has_bases:
            self._decompose_owned()
            self._publish_bases()

    def _reduce_statistics(self) -> None:
        """Averages the batch's factors over ranks and over time."""
        self._scale_statistics()
        flat = self.statistics.flat
        if self.plan.strategy.reduction == "owners":
            self.grid.sum_to_owners(flat, self.statistics.layout.bounds, "reduce statistics")
            flat = self.statistics.segment(self.grid.world.rank)
        elif self.plan.strategy.reduction == "everyone":
            self.grid.sum_everywhere(flat, "reduce statistics")
        decay = evaluate(self.decay, self.steps, "decay")
        self._average_weight = decay * self._average_weight + 1 - decay
        self.averages.flat.lerp_(flat, (1 - decay) / self._average_weight)
        self.statistics.flat.zero_()

    def _decompose_owned(self) -> None:
        """Decomposes the factors that this rank owns."""
        with self.trace.stage("decompose"):
            for name in self.plan.owned(self.grid.world.rank):
                factor = kron.unfold_triangle(self.averages[name])
                if self.plan.solver != "eigen":
                    self.bases[f"{name}.inverse"].copy_(self._damped_inverse(name, factor))
                else:
                    values, vectors = kron.eigenbasis(factor)
                    self.bases[f"{name}.values"].copy_(values)
                    self.bases[f"{name}.vectors"].copy_(vectors)
        self._has_bases = True

    def _publish_bases(self) -> None:
        """Sends decompositions to the other workers of their layers."""
        self.grid.gather(self.bases.flat, self.bases.layout.bounds, "column", "publish bases")

    def _precondition(self) -> None:
        """Preconditions the gradients of the layers that this rank works on."""
        damping = evaluate(self.damping, self.steps, "damping")
        with self.trace.stage("precondition"):
            for name in self.plan.preconditioned(self.grid.world.rank):
                gradient, out = self.gradients.arena[name], self.directions[name]
                if self.plan.solver != "eigen":
                    a, g = self.bases[f"{name}.A.inverse"], self.bases[f"{name}.G.inverse"]
                    kron.precondition_by_inverse(gradient, a, g, out)
                else:
                    a_basis, g_basis = self._eigenbasis(f"{name}.A"), self._eigenbasis(f"{name}.G")
                    kron.precondition(gradient, a_basis, g_basis, damping, out)

    def _publish_directions(self) -> None:
        """Sends preconditioned gradients to the ranks that did not compute them."""
        if not self.gradients.owner_updates:
            bounds = self.directions.layout.bounds
            self.grid.gather(self.directions.flat, bounds, "row", "publish gradients")

    def _clip_and_write_back(self) -> None:
        """Bounds the step and makes the directions the model's gradients."""
        with self.trace.stage("write back"):
            mine = [layer for layer in self.layers if layer.name in self.directions]
            if self.kl_clip is not None and self.layers:
                self.kl_scale = self._kl_scale(mine)
                self.directions.flat *= self.kl_scale
            for layer in mine:
                layer.write_gradient(self.directions[layer.name])
        self.gradients.write(self.gradients.blocks[len(self.layers) :])

    # -- statistics: hooks record, nothing is sent -----------------------------------------------

    def _watch(self, model: nn.Module) -> None:
        """Adds the hooks that record the statistics this rank has to."""
        self._passes = 0
        self._counts: dict[str, _Count] = {}
        model.register_forward_pre_hook(self._on_pass)
        for layer in self.layers:
            if any(name in self.statistics for name, _ in layer.shape.factors):
                layer.module.register_forward_hook(partial(self._on_forward, layer))

    def _on_pass(self, *_: object) -> None:
        self._passes += 1

    def _on_forward(self, layer: Layer, module: nn.Module, inputs: Any, output: Tensor) -> None:
        # The hook sits on the output tensor, not on the module: an in-place activation behind a
        # layer breaks module backward hooks, and a pass without a backward records nothing.
        if self._recording and module.training and output.requires_grad:
            if output.dtype != self.statistics.flat.dtype:
                raise TypeError(
                    f"layer {layer.name!r} computes in {output.dtype}, its weight is "
                    f"{self.statistics.flat.dtype}; mixed precision is not covered, turn it off"
                )
            x = inputs[0].detach()
            output.register_hook(partial(self._record, layer, x, self._passes))

    def _record(self, layer: Layer, x: Tensor, forward_pass: int, g: Tensor) -> None:
        """Adds one call's `sum(a a^T)` and `sum(g g^T)` to the statistics."""
        with self.trace.stage("statistics"), torch.no_grad():
            if x.dim() < (4 if layer.spatial else 2):  # one example without a batch dimension
                x, g = x[None], g[None]
            (a_name, _), (g_name, _) = layer.shape.factors
            if a_name in self.statistics:
                kron.add_triangle(self.statistics[a_name], layer.input_sum(x))
            if g_name in self.statistics:
                kron.add_triangle(self.statistics[g_name], layer.output_sum(g))
            count = self._counts.setdefault(layer.name, _Count())
            count.add(len(x), layer.positions(g), forward_pass)

    def _scale_statistics(self) -> None:
        """Turns sums over this rank's batch into its share of the factors."""
        sharers = 1 if self.plan.strategy.reduction == "none" else self.plan.ranks
        for layer in self.layers:
            names = [name for name, _ in layer.shape.factors]
            if not any(name in self.statistics for name in names):
                continue
            if layer.name not in self._counts:
                raise RuntimeError(
                    f"layer {layer.name!r} took no part in the passes before step {self.steps}, "
                    f"so it has no statistics; add it to skip"
                )
            count = self._counts.pop(layer.name)
            for name, scale in zip(names, count.factor_scales(self.normalization, layer.spatial)):
                if name in self.statistics:
                    self.statistics[name].mul_(scale / sharers)

    # -- details of the stages -------------------------------------------------------------------

    def _eigenbasis(self, factor: str) -> tuple[Tensor, Tensor]:
        return self.bases[f"{factor}.values"], self.bases[f"{factor}.vectors"]

    def _damped_inverse(self, name: str, factor: Tensor) -> Tensor:
        damping = evaluate(self.damping, self.steps, "damping")
        if self.plan.solver == "unsplit-inverse":
            return kron.damped_inverse(factor, damping)
        layer, _, kind = name.rpartition(".")
        other = kron.unfold_triangle(self.averages[f"{layer}.{'G' if kind == 'A' else 'A'}"])
        return kron.damped_inverse(factor, kron.tikhonov_share(factor, other, damping))

    def _kl_scale(self, layers: list[Layer]) -> Tensor:
        """The KL clip's factor `[1]`, from the directions that this rank holds."""
        divergence = self.directions.flat.new_zeros(1)
        for layer in layers:
            lr = self.optimizer.param_groups[self._groups[layer.name]]["lr"]
            direction, gradient = self.directions[layer.name], self.gradients.arena[layer.name]
            divergence += torch.dot(direction.view(-1), gradient.view(-1)) * lr**2
        if self.gradients.owner_updates:
            self.grid.sum_everywhere(divergence, "clip")
        kl_clip = evaluate(self.kl_clip, self.steps, "kl_clip")  # type: ignore[arg-type]
        return kron.kl_scale(divergence, kl_clip)

    def _start_at_identity(self) -> None:
        for name, average in self.averages.items():
            kron.add_triangle(average, torch.eye(self.plan.orders[name]).to(average))
        self._average_weight = 1.0

    # -- checks ----------------------------------------------------------------------------------

    def _check_settings(self, start: str) -> None:
        if self.normalization not in NORMALIZATIONS:
            allowed = ", ".join(map(repr, NORMALIZATIONS))
            raise ValueError(f"normalization={self.normalization!r} must be one of {allowed}")
        if start not in ("first", "identity"):
            raise ValueError(f"start={start!r} must be 'first' or 'identity'")
        if not 0 <= evaluate(self.decay, 0, "decay") < 1:
            raise ValueError(f"decay={self.decay!r} must be at least 0 and below 1")
        for name in ("damping", "kl_clip"):
            value = getattr(self, name)
            if value is not None and evaluate(value, 0, name) == 0:
                raise ValueError(f"{name}={value!r} must be positive")
        every(self.factor_every, 0, "factor_every")
        every(self.basis_every, 0, "basis_every")

    def _check_optimizer(self) -> None:
        group_of = {
            id(parameter): index
            for index, group in enumerate(self.optimizer.param_groups)
            for parameter in group["params"]
        }
        self._groups: dict[str, int] = {}
        for layer in self.layers:
            index = group_of.get(id(layer.parameters[0]))
            if index is None:
                raise ValueError(
                    f"layer {layer.name!r} is covered but its weight is not in the optimizer; "
                    f"give it to the optimizer or add it to skip"
                )
            self._groups[layer.name] = index

    def _check_agreement(self, comm: Any, start: str) -> None:
        names = ("damping", "factor_every", "basis_every", "decay", "kl_clip", "normalization")
        settings = {name: getattr(self, name) for name in names}
        agree(
            comm,
            {
                "mpikfac version": mpikfac.__version__,
                "torch version": torch.__version__,
                "model": describe(self.model),
                "strategy": self.plan.strategy,
                "plan": self.plan.digest(),
                "start": start,
                **{n: "a schedule" if callable(v) else v for n, v in settings.items()},
            },
        )

    # -- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's share of the state, by name; shares of all ranks make the whole.

        Model, optimizer, factors as packed triangles, bases, the averages' weight, and the number
        of steps: what a run needs to go on exactly, also between two decompositions.
        """
        state = model_state(self.model, self.optimizer, self.gradients)
        state |= {"trainer/steps": self.steps, "kfac/average_weight": self._average_weight}
        state |= {f"kfac/factors/{name}": average for name, average in self.averages.items()}
        if self._has_bases:
            state |= {f"kfac/bases/{name}": basis for name, basis in self.bases.items()}
            state["kfac/solver"] = self.plan.solver
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes from `state` what this rank needs, whatever strategy and ranks it was saved from.

        A first-order run's state is taken too: statistics and bases are then made at the next step.
        """
        load_model_state(self.model, self.optimizer, self.gradients, state)
        if "kfac/average_weight" in state:
            self._average_weight = float(state["kfac/average_weight"])
            for name, average in self.averages.items():
                average.copy_(state[f"kfac/factors/{name}"])
        self._has_bases = "kfac/solver" in state and state["kfac/solver"] == self.plan.solver
        if self._has_bases:
            for name, basis in self.bases.items():
                basis.copy_(state[f"kfac/bases/{name}"])
        self._begin(int(state["trainer/steps"]))


@dataclass
class _Count:
    """How many examples and vectors went into a layer's sums since the last step."""

    batch: int = 0
    positions: int = 0
    last_pass: int = -1

    def add(self, batch: int, positions: int, forward_pass: int) -> None:
        # A layer called again in the same pass sees the same examples at more positions.
        if forward_pass != self.last_pass:
            self.batch += batch
        self.positions += positions
        self.last_pass = forward_pass

    def factor_scales(self, normalization: Normalization, spatial: bool) -> tuple[float, float]:
        batch = self.batch if spatial or normalization == "expand" else self.positions
        return factor_scales(normalization, batch, self.positions / batch)
