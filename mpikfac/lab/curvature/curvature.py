"""The curvature of the loss at a run's weights, from the factors that K-FAC keeps.

The Kronecker factors of a layer estimate the Fisher matrix of its parameters as `G (x) A`
[Martens & Grosse 2015], which is block-diagonal over layers. In the eigenbasis of a block, all
functions of it are elementwise: its inverse, its roots, its log-determinant and samples.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from mpikfac.checkpoint import Checkpoint, latest_checkpoint, read_checkpoint
from mpikfac.errors import UserError
from mpikfac.kfac import KFAC
from mpikfac.lab.curvature.eigenbasis import Eigenbasis, Function
from mpikfac.lab.curvature.matrices import ParameterMatrices
from mpikfac.layers import Coverage, Layer, cover
from mpikfac.numerics import unfold_triangle
from mpikfac.plan.names import FACTORS, OF_KFAC, OF_MODEL, WEIGHTS
from mpikfac.settings import Damping, in_force

USUAL = Damping(relative=0.1)
"""A tenth of each layer's mean eigenvalue, as in studies of influence [Grosse et al. 2023]."""
MANIFEST = "manifest.json"
REPLICAS = "copies/"  # items of runs whose ranks have different weights


class Curvature:
    """The mean curvature C of an example's loss at the weights of a run, from its factors.

        curvature = mpikfac.lab.Curvature.load("runs/a", model)
        directions = curvature.solve(gradients, damping=mpikfac.Damping(relative=0.1))

    C is block-diagonal; the block of a layer is `G (x) A` of the running averages. It estimates
    the mean over examples of the Fisher matrix of a single example. That of N examples is N C.

    Vectors are dictionaries with a tensor for each covered parameter, by the parameter's name, such
    as `{name: parameter.grad for name, parameter in model.named_parameters()}`. Tensors have the
    parameters' shapes, or an additional first dimension of examples. Results have the same form.
    Arithmetic is in float64.

    Attributes:
        layers: the names of the covered layers.
        damping: the damping of the run at its last step; None if it is not known.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        items: Mapping[str, Any],
        skip: Collection[str] = (),
        damping: Damping | None = None,
    ) -> None:
        """Decompose the factors of the layers.

        Args:
            items: a state with factors and their weights, such as a checkpoint.
        """
        self.layers = [layer.name for layer in layers]
        self.damping = damping
        self._matrices = ParameterMatrices(model, layers, skip)
        factors = {layer.name: factor_names(layer, items) for layer in layers}
        self._bases = {layer.name: _basis(layer, factors[layer.name], items) for layer in layers}

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: nn.Module,
        *,
        coverage: Coverage | None = None,
        skip: Collection[str] = (),
    ) -> Curvature:
        """Load the weights of a checkpoint into the model, and return the curvature at them.

        Args:
            path: the directory of a checkpoint, or of a run, whose newest checkpoint is used.
            model: of the run's architecture. Freeze what the run froze.
            coverage: that of the run, if it was not the default.
            skip: names of parameters or modules that the factors do not cover; vectors may contain
                them, and results leave them out.

        Raises:
            UserError: there is no complete checkpoint, or a file is damaged.
            ValueError: the checkpoint is not that of the model, has no factors, or does not cover a
                trained parameter that is not in `skip`.
        """
        checkpoint = read_checkpoint(_newest(Path(path)))
        _load_weights(model, checkpoint)
        layers, _ = cover(model, coverage)
        return cls(model, layers, checkpoint, skip)

    @classmethod
    def of(cls, trainer: KFAC, skip: Collection[str] = ()) -> Curvature:
        """Return the curvature at the trainer's weights, from its factors after its last step.

        Args:
            skip: see `load`.

        Collective over: world.

        Raises:
            ValueError: the trainer's factors are not those of a Fisher matrix, or see `load`.
        """
        estimator, damping = trainer.estimator, trainer.settings.damping
        if estimator.fisher_type == "forward-only" or estimator.normalization != "expand":
            raise ValueError(
                f"fisher_type={estimator.fisher_type!r} with "
                f"normalization={estimator.normalization!r} estimates no Fisher matrix of an "
                f"example; train with another fisher_type, and normalization='expand'"
            )
        number = in_force("damping", damping.number, trainer.steps)
        run = Damping(relative=number) if damping.is_relative else Damping(number)
        state = trainer.preconditioner.factors.state_dict()
        items = {OF_KFAC + name: value for name, value in state.items()}
        return cls(trainer.model, trainer.layers, items, skip, run)

    # -- functions of the curvature --------------------------------------------------------------

    def apply(self, vectors: Mapping[str, Tensor], function: Function) -> dict[str, Tensor]:
        """Return `f(C) v`, where `f(C)` has C's eigenvectors and the function's values.

        Args:
            function: maps a layer's eigenvalues `[groups, outputs, inputs]` to values of this
                shape.

        Raises:
            ValueError: a covered parameter is missing, or a name is unknown.
        """
        matrices = self._matrices.matrices(vectors)
        applied = {name: self._bases[name].apply(function, m) for name, m in matrices.items()}
        return self._matrices.tensors(applied, vectors)

    def solve(
        self, vectors: Mapping[str, Tensor], damping: float | Damping = USUAL
    ) -> dict[str, Tensor]:
        """Return `(C + damping I)^-1 v`; a relative damping is a multiple of mean eigenvalues."""
        return self.power(vectors, -1.0, damping)

    def power(
        self, vectors: Mapping[str, Tensor], exponent: float, damping: float | Damping = USUAL
    ) -> dict[str, Tensor]:
        """Return `(C + damping I)^exponent v`, such as whitened gradients for -0.5."""
        return self.apply(vectors, damped_power(exponent, damping))

    def quadratic(self, vectors: Mapping[str, Tensor], damping: float | Damping = USUAL) -> Tensor:
        """Return `v^T (C + damping I)^-1 v`, `[]` or `[examples]`, in float64."""
        matrices = self._matrices.matrices(vectors)
        function = damped_power(-1.0, damping)
        applied = {name: self._bases[name].apply(function, m) for name, m in matrices.items()}
        products = [(m * applied[name]).flatten(1).sum(1) for name, m in matrices.items()]
        total = torch.stack(products).sum(0)
        return total if self._matrices.has_examples(vectors) else total.squeeze(0)

    # -- values of the whole curvature -----------------------------------------------------------

    def eigenvalues(self, layer: str) -> Tensor:
        """Return a layer's eigenvalues in ascending order, in float64."""
        if layer not in self._bases:
            raise ValueError(f"layer={layer!r} must be one of {', '.join(self.layers)}")
        return self._bases[layer].values.flatten().sort().values

    def trace(self) -> float:
        """Return the trace of C."""
        return sum(self._totals(lambda values: values).values())

    def logdet(self, scale: float, prior: float) -> float:
        """Return the log-determinant of `scale C + prior I`.

        Args:
            scale: the number of examples, for the posterior of all of them.
            prior: the precision of a Gaussian prior of the weights, above 0.
        """
        _check(scale, prior)
        return sum(self._totals(lambda values: (scale * values + prior).log()).values())

    def effective(self, scale: float, prior: float) -> dict[str, float]:
        """Return each layer's effective number of parameters, `tr scale C (scale C + prior I)^-1`.

        It is the gamma of [MacKay 1992]: how many parameters the data determines.
        """
        _check(scale, prior)
        return self._totals(lambda values: scale * values / (scale * values + prior))

    def sample(
        self, scale: float, prior: float, generator: torch.Generator, count: int = 1
    ) -> dict[str, Tensor]:
        """Draw deviations from the weights of the posterior `N(0, (scale C + prior I)^-1)`.

        Args:
            generator: on the host.
            count: the number of samples.

        Returns:
            Tensors `[count, *shape]` in float64, by the parameter's name.
        """
        _check(scale, prior)
        seed = int(torch.randint(2**62, (), generator=generator))
        drawn = {}
        for number, (name, basis) in enumerate(self._bases.items()):
            own = torch.Generator().manual_seed(seed + number)  # independent of other layers
            shape = count, *basis.values.shape
            noise = torch.randn(shape, generator=own, dtype=torch.float64)
            drawn[name] = basis.rotate_back(noise * (scale * basis.values + prior).rsqrt())
        return self._matrices.tensors(drawn)

    def _totals(self, function: Function) -> dict[str, float]:
        """Return the sums of the function's values over the eigenvalues of each layer."""
        return {name: function(b.values).sum().item() for name, b in self._bases.items()}


def damped_power(exponent: float, damping: float | Damping) -> Function:
    """Return the function `(values + damping)^exponent`.

    Args:
        damping: a number, 0 only if no factor is singular, or a `Damping` with a number. A relative
            one is a multiple of the mean eigenvalue of a layer, or of each of its groups.

    Raises:
        ValueError: the damping is a schedule, or negative.
    """
    number = damping.number if isinstance(damping, Damping) else damping
    relative = isinstance(damping, Damping) and damping.is_relative
    if not isinstance(number, (int, float)) or not 0 <= number < math.inf:
        raise ValueError(f"damping={damping!r} must be a number of at least 0")

    def function(values: Tensor) -> Tensor:
        unit = values.mean((-2, -1), keepdim=True) if relative else 1.0
        return (values + number * unit) ** exponent

    return function


def _check(scale: float, prior: float) -> None:
    if not (scale >= 0 and 0 < prior < math.inf):
        raise ValueError(f"scale={scale!r} must be at least 0, and prior={prior!r} above 0")


# -- items of a state ----------------------------------------------------------------------------


def factor_names(layer: Layer, items: Collection[str]) -> dict[str, list[str]]:
    """Return the names of the items of a layer's factors, block by block, for "A" and "G".

    Raises:
        ValueError: the items lack a factor of the layer.
    """
    prefix = re.escape(f"{OF_KFAC}{FACTORS}{layer.name}.")
    blocks = [re.fullmatch(f"{prefix}([AG])([0-9]*)", name) for name in items]
    found = sorted((b[1], int(b[2] or 0), b[0]) for b in blocks if b)
    names = {side: [name for own, _, name in found if own == side] for side in "AG"}
    if missing := [side for side in layer.shape.sides if not names[side]]:
        raise ValueError(
            f"factor {layer.name}.{missing[0]} is not in the state: its run took no step, or trained "
            f"the layer without factors of a Fisher matrix; to leave the layer out, pass "
            f"coverage=mpikfac.Coverage(skip=[{layer.path!r}]) and skip=[{layer.path!r}]"
        )
    return names


def _basis(
    layer: Layer, names: Mapping[str, Sequence[str]], items: Mapping[str, Any]
) -> Eigenbasis:
    """Decompose the factors of a layer.

    Raises:
        ValueError: an average contains no batch.
    """
    for name in (name for of_side in names.values() for name in of_side):
        if not items[OF_KFAC + WEIGHTS + name.removeprefix(OF_KFAC + FACTORS)]:
            raise ValueError(f"{name!r} contains no batch; take a later checkpoint")
    factors = {side: [unfold_triangle(items[n]) for n in names[side]] for side in names}
    return Eigenbasis.of_factors(layer.shape, factors)


def _newest(path: Path) -> Path:
    """Return the directory of a checkpoint: the path itself, or the newest one of a run.

    Raises:
        UserError: there is none.
    """
    if (path / MANIFEST).exists():
        return path
    for root in (path / "checkpoints", path):
        if root.is_dir() and (newest := latest_checkpoint(root)):
            return newest
    raise UserError(f"{path} has no complete checkpoint; give the directory of one or of a run")


def _load_weights(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Load the weights and buffers of a checkpoint.

    Raises:
        ValueError: they are not those of the model, or they differ between ranks.
    """
    if any(name.startswith(REPLICAS) for name in checkpoint):
        raise ValueError(
            f"{checkpoint.path} has a model for each rank, and factors of none of them; train "
            f"with a sync that keeps one model"
        )
    names = [name for name in checkpoint if name.startswith(OF_MODEL)]
    tensors = {name.removeprefix(OF_MODEL): checkpoint[name] for name in names}
    model.load_state_dict(cast(dict[str, Any], tensors))
