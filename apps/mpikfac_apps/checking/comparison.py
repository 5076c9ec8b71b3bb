"""What is found of a model's layers by autograd, dense solves, and training on several ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import mpikfac
from mpikfac_apps.checking import reference
from mpikfac_apps.checking.model import Batch, Subject, loss
from mpikfac_apps.planning.facts import strategy_of

TOLERANCE = 1e-9  # relative, in float64
DAMPING = 0.03
STRATEGIES = ("comm-opt", "mem-opt", "hybrid", "owner-stepped", "late-owner")
PLAIN = "sgd"  # averaged gradients
STEPS = 2
LARGEST_ORDER = 5000  # of a factor that is computed densely
LARGEST_CALL = 2**26  # elements of all vectors a of a layer
LARGEST_PRODUCT = 2500  # order of a Kronecker product that is written out


@dataclass
class Finding:
    """What is found of a covered layer.

    Attributes:
        vectors: how many vectors it is estimated from; 0 if it took no part in the batch.
        large: whether it is too large for the oracle.
        errors: relative errors of what is compared.
    """

    layer: Any
    vectors: int
    large: bool
    errors: dict[str, float] = field(default_factory=dict)

    @property
    def wrong(self) -> list[str]:
        """What is wrong."""
        return [name for name, error in self.errors.items() if not good(error)]


@dataclass(frozen=True)
class Step:
    """What K-FAC makes of a batch: by layer its factors, gradient and direction."""

    factors: Mapping[str, Mapping[str, Tensor]]
    gradients: Mapping[str, Tensor]
    directions: Mapping[str, Tensor]


def findings_of(asked: Subject, comm: Any, examples: int) -> dict[str, Finding]:
    """Each covered layer's numbers against autograd and dense solves, on one batch.

    Collective over: comm.
    """
    model, batch = asked.copied(), asked.batch(examples, seed=0)
    layers, _ = mpikfac.layers.cover(model, asked.coverage)
    uses = reference.calls(layers, lambda: loss(model, batch))
    module_of = {layer.name: layer.modules[0] for layer in layers}
    alone = [reference.as_module(layer) for layer in layers]
    found = {layer.name: survey(layer, uses.get(layer.name, ())) for layer in alone}
    kept = {name: one.layer for name, one in found.items() if one.vectors and not one.large}
    kept = {name: kept[name] for name in whole(kept, module_of)}
    step = one_step(asked, comm, batch, "inverse", kept)
    for name, layer in kept.items():
        found[name].errors.update(autograd_errors(layer, uses[name], step))
    orders = {name: layer.shape.inputs * layer.shape.outputs for name, layer in kept.items()}
    small = whole([n for n, order in orders.items() if order <= LARGEST_PRODUCT], module_of)
    for solver in reference.SOLVES:
        step = one_step(asked, comm, batch, solver, small)
        for name in small:
            found[name].errors[solver] = solve_error(name, solver, step)
    return found


def whole(names: Collection[str], module_of: Mapping[str, nn.Module]) -> list[str]:
    """Of these layers, those of whose module all are among them: others are left out together."""
    left = {id(module) for name, module in module_of.items() if name not in names}
    return [name for name in names if id(module_of[name]) not in left]


def survey(layer: Any, uses: Sequence[reference.Call]) -> Finding:
    """How large a layer is, before anything is compared."""
    vectors = sum(layer.positions(call.g) for call in uses)
    elements = vectors * layer.shape.groups * layer.shape.inputs
    order = max(layer.shape.inputs, layer.shape.outputs)
    return Finding(layer, vectors, large=elements > LARGEST_CALL or order > LARGEST_ORDER)


def one_step(asked: Subject, comm: Any, batch: Batch, solver: str, names: Container[str]) -> Step:
    """Factors, gradients and directions of a batch, of the layers of these names.

    Collective over: comm.
    """
    model = asked.copied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    skip = [*asked.refused, *others(asked, model, names)]
    coverage = dataclasses.replace(asked.coverage, skip=skip)
    settings = {"damping": DAMPING, "clip": None, "solver": solver, "coverage": coverage}
    kfac = mpikfac.KFAC(model, optimizer, comm, **settings)
    loss(model, batch).backward()
    gradients = {layer.name: reference.gradient_of(layer) for layer in kfac.layers}
    kfac.precondition()
    directions = {layer.name: reference.gradient_of(layer) for layer in kfac.layers}
    factors = {layer.name: recorded(kfac.factors.averages, layer.shape) for layer in kfac.layers}
    return Step(factors, gradients, directions)


def others(asked: Subject, model: nn.Module, names: Container[str]) -> list[str]:
    """All modules, those that share weights included, of layers that have other names."""
    layers, _ = mpikfac.layers.cover(model, asked.coverage)
    name_of = {id(module): name for name, module in model.named_modules()}
    left = [layer for layer in layers if layer.name not in names]
    return [name_of[id(module)] for layer in left for module in layer.modules]


def recorded(averages: Mapping[str, Tensor], form: mpikfac.LayerShape) -> dict[str, Tensor]:
    """A layer's factors `[groups, order, order]`, of those that it has."""
    found = {}
    for side in form.sides:
        (factor,) = form.side(side)
        matrix = mpikfac.numerics.unfold_triangle(averages[factor.name])
        if side in form.diagonal:
            matrix = matrix.view(form.groups, -1).diag_embed()
        found[side] = matrix.view(form.groups, *matrix.shape[-2:])
    return found


def autograd_errors(layer: Any, uses: Sequence[reference.Call], step: Step) -> dict[str, float]:
    """Relative errors of factors and gradients, where these are sums of `g a^T` over examples."""
    expected = reference.factors(layer, uses)
    found = step.factors[layer.name]
    errors = {side: error(found[side], matrix) for side, matrix in expected.items()}
    made = torch.cat([reference.gradients(layer, call) for call in uses])
    size = made.abs().amax()
    off = error(made.sum(0), step.gradients[layer.name], size)
    if not reference.is_norm(layer):
        alone = torch.cat([reference.gradients_alone(layer, call) for call in uses])
        off = max(off, error(made, alone, size))
    return {**errors, "gradient": off}


def solve_error(name: str, solver: str, step: Step) -> float:
    """How far a layer's direction is off that of the dense solve, relative."""
    expected = reference.solve(solver, step.gradients[name], step.factors[name], DAMPING)
    return error(step.directions[name], expected)


def error(found: Tensor, expected: Tensor, size: Tensor | None = None) -> float:
    """The largest difference, relative to `size`, or to the largest of what is expected."""
    off = (found - expected).abs().max().item()
    scale = (expected.abs().max() if size is None else size).item()
    return off / scale if off else 0.0


def good(error: float) -> bool:
    """Whether an error is one of rounding."""
    return error <= TOLERANCE


# -- the same on several ranks -------------------------------------------------------------------


def differences(comm: Any, alone: Any, asked: Subject, examples: int) -> dict[str, float]:
    """How far each strategy's weights are off those of one process on the joined batches.

    After some steps, the largest difference on any rank, relative to the largest change. Before
    them, that of averaged gradients without K-FAC: where it is large, the model is to blame.

    Collective over: comm.
    """
    total = examples * comm.size
    first, *_ = STRATEGIES
    one = {name: trained(alone, asked, name, total) for name in (PLAIN, first)}
    found = {}
    for name in (PLAIN, *STRATEGIES):
        expected, before = one.get(name, one[first])
        after, _ = trained(comm, asked, name, total)
        off = error(after, expected, (expected - before).abs().max())
        found[name] = max(comm.allgather(off))
    return found


def trained(comm: Any, asked: Subject, name: str, examples: int) -> tuple[Tensor, Tensor]:
    """All parameters after some steps on this rank's shards, and before.

    Covered layers alone are in training mode: batch statistics and what is drawn at random would
    differ from shard to shard.

    Collective over: comm.
    """
    model = asked.copied().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = (
        mpikfac.DataParallel(model, optimizer, comm)
        if name == PLAIN
        else distributed(comm, asked, name, model, optimizer)
    )
    before = nn.utils.parameters_to_vector(model.parameters()).detach()
    for step in range(STEPS):
        images, labels = (p.chunk(comm.size)[comm.rank] for p in asked.batch(examples, step))
        optimizer.zero_grad()
        loss(model, (images, labels)).backward()
        trainer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach(), before


def distributed(
    comm: Any, asked: Subject, name: str, model: nn.Module, optimizer: torch.optim.Optimizer
) -> mpikfac.KFAC:
    """K-FAC with the strategy of that name; the layers that it covers are in training mode.

    Collective over: comm.
    """
    kinds = asked.coverage.covers.items()
    covers = {kind: by for kind, by in kinds if not issubclass(kind, _BatchNorm)}
    coverage = dataclasses.replace(asked.coverage, covers=covers)
    strategy, solver = strategy_of(name, comm.size, "inverse")
    settings = {"damping": DAMPING, "basis_every": 1, "solver": solver, "coverage": coverage}
    kfac = mpikfac.KFAC(model, optimizer, comm, strategy, **settings)
    for layer in kfac.layers:
        for module in layer.modules:
            module.train()
    return kfac
