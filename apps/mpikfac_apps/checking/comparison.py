"""Compare a model's layers with autograd and dense solves, and several ranks with a single one."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import mpikfac
from mpikfac.preconditioners import Inverse
from mpikfac_apps.checking import reference
from mpikfac_apps.checking.inside import as_modules
from mpikfac_apps.checking.model import Batch, Subject, loss
from mpikfac_apps.planning.facts import strategy_of

TOLERANCE = 1e-9  # relative, in float64
OF_WEIGHTS = 1e-6  # larger than TOLERANCE, because parts of a model can compute in float32
DAMPING = 0.03
STRATEGIES = ("comm-opt", "mem-opt", "hybrid", "sharded-optimizer", "deferred-sharded")
PLAIN = "sgd"  # the name of training with averaged gradients, without K-FAC
STEPS = 2
LARGEST_ORDER = 5000  # maximum order of a factor in the reference computation
LARGEST_CALL = 2**26  # maximum number of elements in a layer's vectors `a`, over all calls
LARGEST_PRODUCT = 2500  # maximum order of a Kronecker product that is computed in full


@dataclass
class Finding:
    """The results for a covered layer.

    Attributes:
        parts: the layer; for a product inside a module, a separate layer per group.
        vectors: the number of vectors from which the factors are estimated; 0 for a layer that the
            batch does not use.
        large: whether the layer is too large for the reference computation.
        errors: the relative error of each compared quantity, by the name of the quantity.
    """

    parts: Sequence[mpikfac.Layer]
    vectors: int
    large: bool
    errors: dict[str, float] = field(default_factory=dict)

    @property
    def wrong(self) -> list[str]:
        """The names of the quantities whose errors are too large to be due to rounding."""
        return [name for name, error in self.errors.items() if not good(error)]


@dataclass(frozen=True)
class CheckedStep:
    """K-FAC's results for a batch: the factors, gradient and direction of each layer."""

    factors: Mapping[str, Mapping[str, Tensor]]
    gradients: Mapping[str, Tensor]
    directions: Mapping[str, Tensor]


def findings_of(subject: Subject, comm: mpikfac.comm.Comm, examples: int) -> dict[str, Finding]:
    """Compare the results of each covered layer with autograd and dense solves, on one batch.

    Collective over: comm.
    """
    model, batch = subject.copied(), subject.batch(examples, seed=0)
    layers, _ = mpikfac.layers.cover(model, subject.coverage)
    uses = reference.calls(layers, lambda: loss(model, batch))
    module_of = {layer.name: layer.modules[0] for layer in layers}
    findings = {layer.name: survey(as_modules(layer), uses.get(layer.name, ())) for layer in layers}
    twice = reference.calls(layers, lambda: loss(model, subject.batch(2 * examples, seed=0)))
    for layer in (layer for layer in layers if layer.of_batch and layer.name in uses):
        first, double = (examples_of(each[layer.name]) for each in (uses, twice))
        if double != 2 * first:
            findings[layer.name].errors["examples"] = abs(double / (2 * first) - 1)
    compared = {
        name: finding.parts
        for name, finding in findings.items()
        if finding.vectors and not finding.large
    }
    compared = {name: compared[name] for name in with_all_layers(compared, module_of)}
    step = one_step(subject, comm, batch, "inverse", compared)
    for name, parts in compared.items():
        findings[name].errors.update(autograd_errors(name, parts, uses[name], step))
    shapes = {name: parts[0].shape for name, parts in compared.items()}
    orders = {name: shape.inputs * shape.outputs for name, shape in shapes.items()}
    small = with_all_layers(
        [n for n, order in orders.items() if order <= LARGEST_PRODUCT], module_of
    )
    for preconditioner in reference.SOLVES:
        step = one_step(subject, comm, batch, preconditioner, small)
        for name in small:
            findings[name].errors[preconditioner] = solve_error(name, preconditioner, step)
    return findings


def examples_of(uses: Sequence[Sequence[reference.Call]]) -> int:
    """Return the number of examples in the first use of a layer."""
    return next(len(call.x) for calls in uses for call in calls)


def with_all_layers(names: Collection[str], module_of: Mapping[str, nn.Module]) -> list[str]:
    """Return `names` without the layers whose module also has layers that are not in `names`."""
    left = {id(module) for name, module in module_of.items() if name not in names}
    return [name for name in names if id(module_of[name]) not in left]


def survey(parts: Sequence[mpikfac.Layer], uses: Sequence[Sequence[reference.Call]]) -> Finding:
    """Return a finding that contains only the layer's size, without any comparison."""
    vectors = [sum(part.positions(c.g) for c in calls) for part, calls in zip(parts, uses)]
    shape, most = parts[0].shape, max(vectors, default=0)
    elements = sum(vectors) * shape.groups * shape.inputs
    order = max(shape.inputs, shape.outputs)
    return Finding(parts, most, large=elements > LARGEST_CALL or order > LARGEST_ORDER)


def one_step(
    subject: Subject,
    comm: mpikfac.comm.Comm,
    batch: Batch,
    preconditioner: str,
    names: Container[str],
) -> CheckedStep:
    """Return what K-FAC computes from a batch for the layers in `names`.

    Collective over: comm.
    """
    model = subject.copied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    skip = [*subject.coverage.skip, *others(subject, model, names)]
    coverage = dataclasses.replace(subject.coverage, skip=skip)
    with without_warnings():  # K-FAC would warn about layers that are skipped on purpose
        kfac = mpikfac.KFAC(
            model,
            optimizer,
            comm,
            damping=DAMPING,
            preconditioner=preconditioner,
            grafting=mpikfac.NoGrafting(),
            coverage=coverage,
            budget=None,  # the dense solves use undivided factors
        )
    loss(model, batch).backward()
    gradients = {layer.name: reference.gradient_of(layer) for layer in kfac.layers}
    kfac.precondition()
    directions = {layer.name: reference.gradient_of(layer) for layer in kfac.layers}
    state = kfac.state_dict()  # contains all factors, because there is only one process
    factors = {layer.name: recorded(state, layer.shape) for layer in kfac.layers}
    return CheckedStep(factors, gradients, directions)


@contextmanager
def without_warnings() -> Iterator[None]:
    """Suppress the library's warnings in this context."""
    log = logging.getLogger("mpikfac")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def others(subject: Subject, model: nn.Module, names: Container[str]) -> list[str]:
    """Return the names of all modules whose weights belong to a layer that is not in `names`."""
    layers, _ = mpikfac.layers.cover(model, subject.coverage)
    name_of = {id(module): name for name, module in model.named_modules()}
    left = [layer for layer in layers if layer.name not in names]
    return [name_of[id(module)] for layer in left for module in layer.modules]


def recorded(state: Mapping[str, Tensor], form: mpikfac.LayerShape) -> dict[str, Tensor]:
    """Return a layer's factors `[groups, order, order]` from a trainer's state."""
    factors = {}
    for side in form.sides:
        (factor,) = form.side(side)
        matrix = mpikfac.numerics.unfold_triangle(state[f"kfac/factors/{factor.name}"])
        if side in form.diagonal:
            matrix = matrix.view(form.groups, -1).diag_embed()
        factors[side] = matrix.view(form.groups, *matrix.shape[-2:])
    return factors


def autograd_errors(
    name: str,
    parts: Sequence[mpikfac.Layer],
    uses: Sequence[Sequence[reference.Call]],
    step: CheckedStep,
) -> dict[str, float]:
    """Return the relative errors of a layer's factors and gradient, which is the sum of `g a^T`."""
    both = list(zip(parts, uses))
    expected = [reference.factors(part, calls) for part, calls in both]
    errors = {
        side: error(step.factors[name][side], torch.cat([factors[side] for factors in expected]))
        for side in expected[0]
    }
    gradients = [
        torch.cat([reference.gradients(part, call) for call in calls]) for part, calls in both
    ]
    size = max((gradient.abs().amax() for gradient in gradients), key=Tensor.item)
    off = error(torch.cat([gradient.sum(0) for gradient in gradients]), step.gradients[name], size)
    if not reference.is_norm(parts[0]):
        for gradient, (part, calls) in zip(gradients, both):
            alone = torch.cat([reference.gradients_alone(part, call) for call in calls])
            off = max(off, error(gradient, alone, size))
    return {**errors, "gradient": off}


def solve_error(name: str, preconditioner: str, step: CheckedStep) -> float:
    """Return the relative error of a layer's direction, compared with a dense solve."""
    expected = reference.solve(preconditioner, step.gradients[name], step.factors[name], DAMPING)
    return error(step.directions[name], expected)


def error(actual: Tensor, expected: Tensor, size: Tensor | None = None) -> float:
    """Return the largest difference, relative to `size` or to the largest expected value."""
    off = (actual - expected).abs().max().item()
    scale = (expected.abs().max() if size is None else size).item()
    return off / scale if off else 0.0


def good(error: float) -> bool:
    """Return whether an error of a layer's results can be due to rounding."""
    return error <= TOLERANCE


def alike(difference: float) -> bool:
    """Return whether a difference between weights can be due to rounding."""
    return difference <= OF_WEIGHTS


# -- training on several ranks -------------------------------------------------------------------


def differences(
    comm: mpikfac.comm.Comm,
    alone: mpikfac.comm.Comm,
    subject: Subject,
    examples: int,
    strategies: Sequence[str] = STRATEGIES,
    steps: int = STEPS,
) -> dict[str, float]:
    """Return, for each strategy, how much the weights differ from those of a single process.

    The single process trains on all examples. Each result is the largest difference on any rank
    after a few steps, relative to the largest change of a weight. The first entry is for averaged
    gradients without K-FAC: if it is large, the model itself causes the differences.

    Collective over: comm.
    """
    total = examples * comm.size
    first, *_ = strategies
    references = {name: trained(alone, subject, name, total, steps) for name in (PLAIN, first)}
    errors = {}
    for name in (PLAIN, *strategies):
        expected, before = references.get(name, references[first])
        after, _ = trained(comm, subject, name, total, steps)
        off = error(after, expected, (expected - before).abs().max())
        errors[name] = max(comm.allgather(off))
    return errors


def trained(
    comm: mpikfac.comm.Comm, subject: Subject, name: str, examples: int, steps: int
) -> tuple[Tensor, Tensor]:
    """Return all parameters after and before `steps` steps on the rank's shards of batches.

    Only covered layers are in training mode, because batch statistics and random draws would differ
    between the shards of different ranks.

    Collective over: comm.
    """
    model = subject.copied().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = (
        mpikfac.FirstOrderTrainer(model, optimizer, comm)
        if name == PLAIN
        else distributed(comm, subject, name, model, optimizer)
    )
    before = nn.utils.parameters_to_vector(model.parameters()).detach()
    for step in range(steps):
        images, labels = (p.chunk(comm.size)[comm.rank] for p in subject.batch(examples, step))
        optimizer.zero_grad()
        loss(model, (images, labels)).backward()
        trainer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach(), before


def distributed(
    comm: mpikfac.comm.Comm,
    subject: Subject,
    name: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> mpikfac.KFAC:
    """Return K-FAC with the strategy `name`; covered layers are in training mode, without dropout.

    Collective over: comm.
    """
    kinds = subject.coverage.covers.items()
    covers = {k: by for k, by in kinds if isinstance(k, str) or not issubclass(k, _BatchNorm)}
    coverage = dataclasses.replace(subject.coverage, covers=covers)
    strategy, preconditioner = strategy_of(name, comm.size, Inverse())
    kfac = mpikfac.KFAC(
        model,
        optimizer,
        comm,
        strategy,
        damping=DAMPING,
        inv_update_steps=1,
        preconditioner=preconditioner,
        # Without a clip, grafting to Adam's steps would magnify rounding errors of zero gradients.
        clip=mpikfac.KLClip(kl_clip=0.001),
        coverage=coverage,
    )
    for layer in kfac.layers:
        for module in layer.modules:
            module.train()
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0
    return kfac
