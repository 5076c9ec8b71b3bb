"""Preconditioned gradients: made by workers, sent to all ranks, and bounded."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpikfac.comm import summed
from mpikfac.engine.bases import Bases
from mpikfac.engine.checks import groups_of
from mpikfac.engine.gradients import Gradients, slots_in
from mpikfac.engine.site import Part, take_over
from mpikfac.engine.state import MOMENTUM
from mpikfac.errors import UserError
from mpikfac.layers import Layer
from mpikfac.numerics import (
    AdamSteps,
    Batch,
    Direction,
    all_finite,
    inner_products,
    lowest,
    nesterov,
    not_finite,
    orthogonalised,
    slopes_and_curvatures,
)
from mpikfac.plan import LayerShape, count_of, lay_out
from mpikfac.settings import Settings
from mpikfac.solvers import Held, Solver

log = logging.getLogger("mpikfac")


@dataclass(frozen=True)
class Job:
    """A layer to precondition on the rank.

    Attributes:
        held: the layer's decompositions.
        gradient: the layer's gradient, a view of the gradients' arena.
        direction: the layer's direction, a view of the directions' arena.
        matrix: whether the layer maps vectors to vectors, and a direction has singular values.
    """

    name: str
    solver: Solver
    held: Held
    gradient: Tensor
    direction: Tensor
    matrix: bool


class Directions(Part):
    """The directions on the rank.

    Attributes:
        arena: directions by layer.
        slots: the layers with directions in the arena.
        slots_beside: the uncovered parameters with directions, which lie in the arena of gradients.
        scale: the multiplier of the last step's directions, `[1]`.
        expected: the change of the loss of all ranks by the quadratic model, `[1]`; only the part
            of layers with directions on the rank.
    """

    def __init__(
        self, gradients: Gradients, bases: Bases, optimizer: Optimizer, settings: Settings
    ) -> None:
        self.site, self.plan = gradients.site, gradients.plan
        self.gradients, self.bases, self.optimizer = gradients, bases, optimizer
        self.settings = settings
        self.arena = self.site.arena(self.plan.layouts.directions)
        self.slots = slots_in(self.arena, gradients.layers, self.site)
        self._layers = [layer for layer in gradients.layers if layer.name in self.arena]
        self._jobs = [self._job(layer.shape) for layer in self.plan.preconditioned]
        stepped = (slot for slot in gradients.of_others if slot.block.parameters and slot.steps)
        adam = settings.length.by_adam
        self.slots_beside = list(stepped) if adam else []
        beside = [slot.block.name for slot in self.slots_beside]
        self._adam_of_layers = AdamSteps(gradients.arena, [j.name for j in self._jobs if adam])
        self._adam_beside = AdamSteps(gradients.arena, beside)
        names = [*(job.name for job in self._jobs), *beside] if settings.length.momentum else []
        shapes = [(name, tuple(gradients.arena[name].shape)) for name in names]
        self._momenta = self.site.arena(lay_out([shapes]))
        self._groups = groups_of(gradients.layers, optimizer)
        self._messages = self.plan.publish_directions()
        self._bound = self.plan.clip()
        self.scale = self.arena.flat.new_ones(1)
        self.expected = self.arena.flat.new_zeros(1)
        self._compared = False  # whether slopes of the quadratic model have been compared

    def _job(self, shape: LayerShape) -> Job:
        name = shape.name
        solver, held = self.bases.solver_of[name], self.bases.held[name]
        places = self.gradients.arena[name], self.arena[name]
        return Job(name, solver, held, *places, matrix=shape.maps_vectors)

    @property
    def _averages(self) -> dict[str, Tensor]:
        """The averages of grafting and the momenta, of all directions that the rank makes."""
        averages = {**self._adam_of_layers, **self._adam_beside}
        return {
            **{f"graft/{name}": average for name, average in averages.items()},
            **{f"momentum/{name}": momentum for name, momentum in self._momenta.items()},
        }

    def precondition(self, step: int) -> None:
        """Precondition the gradients of the rank's layers."""
        with self.site.trace.stage("precondition"):
            self.bases.damp(self.settings.at("damping", step))
            gradients = self._with_momentum()
            for job in self._jobs:
                gradient = gradients.get(job.name, job.gradient)
                job.direction.copy_(job.solver.direction(gradient, job.held))
            if self.settings.length.source == "orthogonal":
                self._orthogonalise()
            if self._jobs and self.settings.length.grafted:
                self._graft(gradients)
            self._step_beside(gradients)

    def publish(self) -> None:
        """Send directions to the ranks that lack the directions.

        Collective over: row.
        """
        self.site.grid.exchange(self._messages, self.arena.flat)

    def check(self) -> None:
        """Replace a direction with NaN or infinity, of a layer without bases, by the gradient."""
        if not all_finite(self.arena.flat):
            for name in not_finite(self.arena):
                gradient = self.gradients.arena[name]
                usable = gradient if all_finite(gradient) else torch.zeros_like(gradient)
                self.arena[name].copy_(usable)

    def clip(self, step: int) -> None:
        """Bound the Fisher norm of the direction or of the step, or the direction's norm.

        Collective over: world if no rank holds all directions, else none.
        """
        kind = self.settings.length.bound
        if not kind or not self.gradients.layers:
            return
        squares = {
            "fisher_clip": lambda: self._along_gradient(0),
            "kl_clip": lambda: self._along_gradient(2),
            "norm_clip": self._square,
        }
        square = squares[kind]()
        self.site.grid.exchange(self._bound, square)
        bound = self.settings.at(kind, step)
        self.scale = clip_scale(square, bound if kind == "kl_clip" else bound**2)
        self.arena.flat *= self.scale

    def predict(self) -> None:
        """Predict by K-FAC's quadratic model how the step changes the loss."""
        slope = self._along_gradient(1) / self.gradients.shortened
        self.expected = self.scale * self._along_gradient(2) / 2 - slope

    def descend(self, model: nn.Module, batch: Batch, weight: float, step: int) -> None:
        """Make the gradients the step at the minimum of the batch's damped quadratic model.

        The step is a sum of multiples of the layers' directions, of the gradients of uncovered
        parameters, and of the last step. The optimizer's state keeps the step, as momentum.

        Collective over: world.

        Args:
            batch: the rank's share of the batch, or a part of the share.
            weight: of the rank's loss, where the mean weight of the ranks is 1.
        """
        known = {p for group in self.optimizer.param_groups for p in group["params"]}
        parameters = {name: p for name, p in model.named_parameters() if p in known}
        with self.site.trace.stage("quadratic model"):
            if not (directions := self._spanning(parameters)):
                self.expected.zero_()
                return
            self.gradients.write(slot for slot in self.gradients.slots if slot.block.parameters)
            gradients = gradients_of(parameters)  # of all ranks
            slopes = inner_products(directions, [gradients])[:, 0].cpu()
            found, curvatures = self._measured(model, batch, weight, directions)
            of_loss = slopes / float(self.gradients.shortened)  # before a bound on the norm
            self._compare(found[0].item(), of_loss[0].item())
            lengths = inner_products(directions, directions).cpu()
            curvatures += self.settings.at("damping", step) * lengths
            multiples = lowest(slopes, curvatures)
            self.expected.fill_(multiples @ (curvatures @ multiples / 2 - of_loss))
            for name, gradient in gradients.items():
                terms = [x * v[name] for x, v in zip(multiples.tolist(), directions) if name in v]
                gradient.copy_(torch.stack(terms).sum(0))
                self.optimizer.state[parameters[name]][MOMENTUM] = gradient.clone()

    def reduction_ratio(self, loss_before: float, loss_after: float) -> float | None:
        """Return the change of the mean loss over ranks, relative to the prediction.

        None if the prediction is 0.

        Collective over: world.
        """
        ranks = self.plan.grid.count
        # A prediction that every rank has counts in part on each rank.
        mine = self.expected.item() / (1 if self.plan.owner_updates else ranks)
        change = (loss_after - loss_before) / ranks
        change, expected = summed(self.site.grid.world, [change, mine])
        return change / expected if expected else None

    def take_over(self, before: Directions) -> None:
        """Take over averages and momenta of layers that have the same gradient as before.

        Collective over: world.
        """
        take_over(before._averages, self._averages, self.site.grid)

    # -- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return averages of grafting, momenta, and the damping if the damping is adapted."""
        kept: dict[str, Any] = self._averages
        adaptive = self.settings.damping.adapted
        return kept | ({"damping": adaptive.damping} if adaptive else {})

    def complete(self, names: Collection[str]) -> set[str]:
        """Return the names of a complete state of all ranks, as far as `names` tell."""
        length = self.settings.length
        if not length.by_adam:
            return set()
        others = [other.name for other in self.gradients.others if other.parameters]
        names = [*(layer.name for layer in self.plan.layers), *others]
        whole = {f"graft/{n}" for name in names for n in (name, count_of(name))}
        return whole | {f"momentum/{name}" for name in names if length.momentum}

    def needed(self, names: Collection[str]) -> dict[str, Any]:
        """Return the items to load from a state with `names`, with values of the expected kind."""
        kinds, kept = _kinds(names), self.state_dict().items()
        return {name: value for name, value in kept if name.partition("/")[0] in kinds}

    def load_state_dict(self, state: Mapping[str, Any], names: Collection[str]) -> None:
        """Load the `needed` items of a state; averages that the state lacks start anew."""
        self.expected.zero_()
        kinds = _kinds(names)
        for name, value in self._averages.items():
            value.copy_(state[name]) if name.partition("/")[0] in kinds else value.zero_()
        if self.settings.damping.adapted and "damping" in names:
            self.settings.damping.adapted.damping = state["damping"]

    # -- details ---------------------------------------------------------------------------------

    def _spanning(self, parameters: Mapping[str, nn.Parameter]) -> list[Direction]:
        """Return copies of the directions to combine, by names of parameters."""
        covered = {p for layer in self.gradients.layers for p in layer.parameters}
        steps = {n: step.clone() for n, step in gradients_of(parameters).items()}
        inside = {n: step for n, step in steps.items() if parameters[n] in covered}
        outside = {n: step for n, step in steps.items() if parameters[n] not in covered}
        kept = {n: self.optimizer.state.get(parameters[n], {}) for n in steps}
        last = {n: state[MOMENTUM] for n, state in kept.items() if MOMENTUM in state}
        return [direction for direction in (inside, outside, last) if direction]

    def _measured(
        self, model: nn.Module, batch: Batch, weight: float, directions: Sequence[Direction]
    ) -> tuple[Tensor, Tensor]:
        """Return slopes and curvatures of the mean loss of all ranks, alike on all ranks.

        Collective over: world.
        """
        shape = 1 + len(directions), len(directions)
        numbers = torch.zeros(shape, dtype=torch.float64, device="cpu")
        if weight:  # a mean over no example is NaN
            try:
                found = slopes_and_curvatures(model, batch, directions)
            except NotImplementedError as error:
                why = str(error).partition(" because")[0]
                raise UserError(
                    f"length='quadratic' needs forward-mode derivatives: {why}"
                ) from error
            numbers = torch.vstack(found).cpu() * weight / self.plan.grid.count
        mean = summed(self.site.grid.world, numbers.flatten().tolist())
        numbers = torch.tensor(mean, dtype=torch.float64, device="cpu").view_as(numbers)
        return numbers[0], numbers[1:]

    def _compare(self, slope: float, expected: float) -> None:
        """Warn at the first step if the model's loss is not the loss of the gradients."""
        if not (self._compared or 0.1 * expected <= slope <= 10 * expected):
            log.warning(
                "the loss of step(inputs=..., loss=...) has slope %g along the directions, and "
                "the gradients have slope %g: give step the loss of backward()",
                *(slope, expected),
            )
        self._compared = True

    def _orthogonalise(self) -> None:
        """Make all singular values of a layer's direction about equal."""
        if matrices := [job.direction for job in self._jobs if job.matrix]:
            torch._foreach_copy_(matrices, orthogonalised(matrices))

    def _graft(self, means: Mapping[str, Tensor]) -> None:
        """Give directions the lengths of grafting [Agarwal et al. 2020]; zeros stay zeros.

        The gradient replaces a direction that is not finite, see `check`.

        Args:
            means: the gradients with momentum, by name; empty without momentum.
        """
        directions = [job.direction for job in self._jobs]
        gradients = [means.get(job.name, job.gradient) for job in self._jobs]
        own, of_gradients = norms(directions), norms(gradients)
        usable = own.isfinite()
        for direction, gradient, sound in zip(directions, gradients, usable):
            torch.where(sound, direction, gradient, out=direction)
        own = torch.where(usable, own, of_gradients)
        lengths = of_gradients
        if self._adam_of_layers:
            lengths = norms(self._adam_of_layers.take(self.gradients.broken))
        scales = torch.where(own > 0, lengths / own, 1.0)
        torch._foreach_mul_(directions, list(scales))

    def _with_momentum(self) -> dict[str, Tensor]:
        """Take gradients into the momenta; return means of gradients by Nesterov's momentum.

        Means begin with momenta of 0: the first steps beside the layers are shorter than Adam's.
        """
        if not self._momenta:
            return {}
        momentum, broken = self.settings.length.momentum, self.gradients.broken
        gradients = [self.gradients.arena[name] for name in self._momenta]
        means = dict(zip(self._momenta, torch._foreach_mul(gradients, 1 - momentum)))
        if sound := [name for name in means if name not in broken]:
            momenta = [self._momenta[name] for name in sound]
            nesterov([means[name] for name in sound], momenta, momentum)
        return means

    def _step_beside(self, gradients: Mapping[str, Tensor]) -> None:
        """Turn gradients of uncovered parameters into Adam's steps, for the same learning rate.

        Args:
            gradients: the gradients with momentum, by name; empty without momentum.
        """
        names = [slot.block.name for slot in self.slots_beside]
        if names:
            scaled = [gradients[name] for name in names] if gradients else None
            steps = self._adam_beside.take(self.gradients.broken, scaled)
            torch._foreach_copy_([self.gradients.arena[name] for name in names], steps)

    def _along_gradient(self, power: int) -> Tensor:
        """Return `sum lr^power <direction, gradient>` `[1]` over the rank's layers."""
        sums, factors = [], []
        for layer in self._finite():
            products = self.arena[layer.name] * self.gradients.arena[layer.name]
            groups = self._groups[layer.name]
            parts = layer.parts(products) if len(set(groups)) > 1 else [products]
            sums += [part.sum() for part in parts]
            rates = [self.optimizer.param_groups[group]["lr"] for group in groups]
            factors += [rate**power for rate in rates[: len(parts)]]
        return weighted_sum(sums, factors, self.arena.flat)

    def _square(self) -> Tensor:
        """Return `sum <direction, direction>` `[1]` over the same layers."""
        squares = [self.arena[layer.name].square().sum() for layer in self._finite()]
        return weighted_sum(squares, [1.0] * len(squares), self.arena.flat)

    def _finite(self) -> list[Layer]:
        """Return the layers with directions in the arena and finite gradients.

        Layers without finite gradients are not stepped, and would make sums NaN.
        """
        broken = self.gradients.broken
        return [layer for layer in self._layers if layer.name not in broken]


def gradients_of(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return the gradients of the parameters that have gradients, by name."""
    return {name: p.grad for name, p in parameters.items() if p.grad is not None}


def _kinds(names: Collection[str]) -> set[str]:
    """Return the kinds of items of a state, such as "graft"."""
    return {name.partition("/")[0] for name in names}


def weighted_sum(numbers: Sequence[Tensor], weights: Sequence[float], like: Tensor) -> Tensor:
    """Return the sum `[1]` of numbers times weights, 0 for no number, where `like` lies."""
    if not numbers:
        return like.new_zeros(1)
    factors = torch.tensor(weights, dtype=like.dtype).to(like.device, non_blocking=True)
    return (torch.stack(list(numbers)) * factors).sum(0, keepdim=True)


def norms(tensors: list[Tensor]) -> Tensor:
    """Return the norms of tensors, `[tensors]`."""
    return torch.stack(torch._foreach_norm(tensors))


def clip_scale(square: Tensor, bound: float) -> Tensor:
    """Return the multiplier `[1]` to keep the square of a step's norm at `bound` at most.

    Args:
        square: of a norm, `[1]`, over layers: `sum <direction, direction>`, or the squared Fisher
            norm `sum <direction, gradient>`, times `lr^2` for the KL clip [SC20, eq. 18]. Rounding
            may make the Fisher norm negative.
    """
    return torch.sqrt(bound / square.abs()).clamp_(max=1.0)
