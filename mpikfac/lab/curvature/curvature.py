"""The curvature of the loss at a run's weights, from the factors that K-FAC keeps.

The Kronecker factors of a layer estimate the Fisher matrix of its parameters as `G (x) A`; the
estimate for the whole model has one such block per layer [Martens & Grosse 2015]. With
fisher_type="empirical", the factors are computed from gradients for the labels of the data, rather
than for labels drawn from the model's distribution; these gradients vanish as examples are fitted.
In the eigenbasis of a block, its inverse, roots, log-determinant and samples only require its
eigenvalues.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from mpikfac.comm import Comm, SplitComm, handed_over, together
from mpikfac.kfac import KFAC
from mpikfac.lab.curvature import states
from mpikfac.lab.curvature.eigenbasis import Eigenbasis, Function
from mpikfac.lab.curvature.matrices import ParameterMatrices
from mpikfac.lab.curvature.measured import Eigenvalues, Fisher, Passes, factors_of, values_of
from mpikfac.lab.curvature.owners import Owners
from mpikfac.lab.curvature.records import Outputs
from mpikfac.layers import Coverage, Layer, cover
from mpikfac.numerics import LOSSES, Loss, damping_unit
from mpikfac.plan import one_of
from mpikfac.plan.names import OF_KFAC
from mpikfac.settings import Damping, in_force
from mpikfac.trace import Trace

USUAL = Damping(relative=0.1)
"""The default damping: a tenth of a layer's mean eigenvalue, as in [Grosse et al. 2023].

In a layer with groups, each group has its own mean; normalisation layers have a group per channel.
"""


class Curvature:
    """The curvature C of an example's loss at a run's weights, averaged over examples.

        curvature = mpikfac.lab.Curvature.load("runs/a", model)
        directions = curvature.solve(gradients, damping=mpikfac.Damping(relative=0.1))

    C is block-diagonal; a layer's block is `G (x) A`, computed from the running averages of its
    factors. C estimates the per-example Fisher matrix, averaged over examples. For
    fisher_type="empirical", the default of trainers, it estimates the empirical Fisher matrix.
    The curvature of N examples is N C.

    Vectors are dictionaries from the names of the covered parameters to tensors, such as
    `{name: parameter.grad for name, parameter in model.named_parameters()}`. The tensors have the
    parameters' shapes, optionally with a leading dimension of examples. Results have the same form.
    All computations are in float64.

    Each layer is owned by a rank. Vectors can differ between ranks: they are sent to the owners of
    the layers, which send the results back. All other results are equal on all ranks.

    Attributes:
        model: the model.
        layers: the covered layers, by name.
        damping: the damping of the trainer's next step; None after `load` and `measured`.
        bases: the eigenbases and eigenvalues of the layers that this rank owns.
        owners: distributes the layers over the ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        bases: Mapping[str, Eigenbasis],
        owners: Owners,
        skip: Collection[str] = (),
        damping: Damping | None = None,
    ) -> None:
        """Use eigenbases of this rank's layers, which `load`, `of` or `measured` has computed."""
        self.model, self.damping = model, damping
        self.layers = {layer.name: layer for layer in layers}
        self.bases, self.owners = bases, owners
        self._matrices = ParameterMatrices(model, layers, skip)
        self._skip = skip

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: nn.Module,
        comm: Comm | None = None,
        *,
        coverage: Coverage | None = None,
        skip: Collection[str] = (),
        trace: Trace | None = None,
    ) -> Curvature:
        """Load a checkpoint's weights into the model, and return the curvature at these weights.

        The number of ranks can differ from the run's; each rank decomposes its layers' factors.

        Collective over: comm.

        Args:
            path: the directory of a checkpoint, or of a run, whose newest checkpoint is used.
            model: a model with the run's architecture. Freeze the parameters that the run froze.
            comm: the communicator; None for all ranks.
            coverage: the run's coverage, if it was not the default.
            skip: names of parameters or modules that the factors do not cover; vectors may contain
                them, and results leave them out.
            trace: records the seconds and bytes of the messages.

        Raises:
            UserError: no complete checkpoint exists; or the checkpoint is damaged, does not match
                the model, lacks a layer's factors, or has different weights for each rank; or the
                factors do not cover a trained parameter that is not in `skip`.
        """
        comm = SplitComm.of(comm).trains
        checkpoint = states.find(comm, Path(path))
        doing = f"computing the curvature of {checkpoint.path}"
        with together(comm, doing, untrusted=True):
            states.load_weights(model, checkpoint)
            layers, _ = cover(model, coverage)
        owners = _owners_of(layers, model, comm, trace)
        with together(comm, doing, untrusted=True):
            return cls(model, layers, _bases(layers, checkpoint, owners, model), owners, skip)

    @classmethod
    def of(
        cls, trainer: KFAC, *, skip: Collection[str] = (), trace: Trace | None = None
    ) -> Curvature:
        """Return the curvature at the trainer's weights, computed from its current factors.

        Collective over: world.

        Args:
            skip: see `load`.
            trace: see `load`.

        Raises:
            UserError: the trainer's factors do not estimate a Fisher matrix; see also `load`.
        """
        comm, model, layers = trainer.grid.world, trainer.model, trainer.layers
        owners = _owners_of(layers, model, comm, trace)
        doing = "computing the curvature of a trainer"
        with together(comm, doing):
            _check_trainer(trainer)
        state = trainer.preconditioner.factors.state_dict()
        held = {OF_KFAC + name: value for name, value in state.items()}
        names = {name for of_rank in comm.allgather([*held]) for name in of_rank}
        with together(comm, doing):
            own = [layer for layer in layers if layer.name in owners.own]
            needed = [name for layer in own for name in states.item_names(layer, names)]
        items = handed_over(comm, held, needed)
        with together(comm, doing):
            bases = _bases(layers, items, owners, model)
            return cls(model, layers, bases, owners, skip, _damping_of(trainer))

    @classmethod
    def measured(
        cls,
        model: nn.Module,
        outputs: Outputs,
        batches: Collection[Any],
        loss: Loss = "cross-entropy",
        comm: Comm | None = None,
        *,
        fisher_type: Fisher = "type-2",
        eigenvalues: Eigenvalues = "squares",
        coverage: Coverage | None = None,
        skip: Collection[str] = (),
        trace: Trace | None = None,
    ) -> Curvature:
        """Return the curvature at the model's weights, computed in passes over data.

            curvature = mpikfac.lab.Curvature.measured(
                model.eval(), lambda model, batch: model(batch[0]), batches
            )

        The factors are computed at these weights, rather than taken from a run's running averages.
        With "squares", each rank stores the eigenbases of all layers, a batch's rotated inputs (at
        most 128 MiB per layer), and up to 128 MiB of one layer's per-example gradients at a time.

        Collective over: comm. Each rank passes any number of its own batches. A `ValueError`,
        `OSError` or `UserError` in `outputs` or `batches` is raised on all ranks; after any other
        error on a single rank, the others hang, unless `python -m mpi4py` ends the job.

        Args:
            model: in `eval()` mode, with the same weights on all ranks.
            outputs: returns the outputs of a batch, `[examples, outputs]`.
            batches: the rank's batches, without augmentation; with "squares", they are read twice.
            loss: "cross-entropy", "squared-error" or "logistic"; see `KFAC.record`.
            comm: see `load`.
            fisher_type: "type-2" takes one backward pass per output, for the exact Fisher matrix;
                "mc" takes one per batch, for labels sampled from the model's distribution.
            eigenvalues: "squares": the means of squared gradients in the eigenbases of the factors,
                as in EKFAC; "products": the products of the factors' eigenvalues.
            coverage: the layers to cover; None for the default.
            skip: see `load`.
            trace: see `load`.

        Raises:
            UserError: a module is in training mode; some layer is not called for any batch on any
                rank; see also `load`.
        """
        comm = SplitComm.of(comm).trains
        one_of("loss", loss, LOSSES)
        one_of("fisher_type", fisher_type, get_args(Fisher))
        one_of("eigenvalues", eigenvalues, get_args(Eigenvalues))
        doing = "measuring the curvature"
        with together(comm, doing):
            layers, _ = cover(model, coverage)
            ParameterMatrices(model, layers, skip)
        owners = _owners_of(layers, model, comm, trace)
        passes = Passes(model, layers, outputs, batches, loss, fisher_type)
        with together(comm, doing):
            own = passes.factors()
        sums = owners.sum(own)
        with together(comm, doing):
            bases = {
                x.name: Eigenbasis.of_factors(x.shape, factors_of(x, sums[x.name]), device(model))
                for x in layers
                if x.name in sums
            }
        curvature = cls(model, layers, bases, owners, skip)
        if eigenvalues == "products":
            return curvature
        everywhere = curvature.replicate().bases
        with together(comm, doing):
            own = passes.squares(everywhere)
        for name, total in owners.sum(own).items():
            values = values_of(curvature.layers[name], total)
            bases[name] = dataclasses.replace(bases[name], values=values)
        return cls(model, layers, bases, owners, skip)

    def replicate(self) -> Curvature:
        """Return the same curvature with the eigenbases of all layers on every rank.

        The result's methods are not collective. Use it for many vectors, which then stay on their
        ranks instead of being sent to the layers' owners.

        Collective over: comm.
        """
        layers = list(self.layers.values())
        parts = {f"{n}/{key}": t for n, b in self.bases.items() for key, t in b.parts().items()}
        found = self.owners.hand_over(parts)
        bases = {name: Eigenbasis.of_parts(_of_layer(found, name)) for name in self.layers}
        owners = _owners_of(layers, self.model, None, None)
        return Curvature(self.model, layers, bases, owners, self._skip, self.damping)

    def close(self) -> None:
        """Free the communicator that connects the owners of the layers.

        Collective over: comm.
        """
        self.owners.close()

    # -- functions of the curvature --------------------------------------------------------------

    def apply(self, vectors: Mapping[str, Tensor], function: Function) -> dict[str, Tensor]:
        """Return `f(C) v`, where `f` is applied to the eigenvalues of C.

        Collective over: comm.

        Args:
            function: maps a layer's eigenvalues `[groups, outputs, inputs]` to values of the same
                shape.

        Raises:
            ValueError: a covered parameter is missing, or a name is unknown.
        """
        matrices = self._matrices.matrices(vectors)
        return self._matrices.tensors(self.apply_to_matrices(matrices, function), vectors)

    def solve(
        self, vectors: Mapping[str, Tensor], damping: float | Damping = USUAL
    ) -> dict[str, Tensor]:
        """Return `(C + damping I)^-1 v`; see `damping_of` for the damping.

        Collective over: comm.
        """
        return self.power(vectors, -1.0, damping)

    def power(
        self, vectors: Mapping[str, Tensor], exponent: float, damping: float | Damping = USUAL
    ) -> dict[str, Tensor]:
        """Return `(C + damping I)^exponent v`; an exponent of -0.5 whitens gradients, for example.

        Collective over: comm.
        """
        return self.apply(vectors, damped_power(exponent, damping))

    def quadratic(self, vectors: Mapping[str, Tensor], damping: float | Damping = USUAL) -> Tensor:
        """Return `v^T (C + damping I)^-1 v`, `[]` or `[examples]`, in float64.

        Collective over: comm.
        """
        matrices = self._matrices.matrices(vectors)
        solved = self.apply_to_matrices(matrices, damped_power(-1.0, damping))
        total = sum((m * solved[name]).flatten(1).sum(1) for name, m in matrices.items())
        assert isinstance(total, Tensor)
        return total if self._matrices.has_examples(vectors) else total.squeeze(0)

    def apply_to_matrices(
        self, matrices: Mapping[str, Tensor], function: Function
    ) -> dict[str, Tensor]:
        """Return `f(C)` applied to vectors that are given as matrices.

        Collective over: comm.

        Args:
            matrices: `[examples, groups, outputs, inputs]` in float64, by layer.
            function: see `apply`.
        """
        return self.owners.ask(matrices, lambda n, rows: self.bases[n].apply(function, rows))

    # -- values of the whole curvature -----------------------------------------------------------

    def eigenvalues(self, layer: str) -> Tensor:
        """Return a layer's eigenvalues in ascending order, in float64.

        Collective over: comm.
        """
        if layer not in self.layers:
            raise ValueError(f"layer={layer!r} must be one of {', '.join(self.layers)}")
        values = {name: basis.values for name, basis in self.bases.items()}
        found = self.owners.publish(values, {layer: self.owners.shapes[layer]})
        return found[layer].flatten().sort().values

    def trace(self) -> float:
        """Return the trace of C.

        Collective over: comm.
        """
        return sum(self._totals(lambda values: values).values())

    def logdet(self, scale: float, prior: float) -> float:
        """Return the log-determinant of `scale C + prior I`.

        Collective over: comm.

        Args:
            scale: the factor of C; for a posterior, the number of examples on all ranks.
            prior: the precision of a Gaussian prior of the weights, > 0.

        Raises:
            RanksDifferError: arguments differ between ranks.
        """
        self._check(scale=scale, prior=prior)
        return sum(self._totals(lambda values: (scale * values + prior).log()).values())

    def effective(self, scale: float, prior: float) -> dict[str, float]:
        """Return each layer's effective number of parameters, `tr scale C (scale C + prior I)^-1`.

        This is gamma in [MacKay 1992], the number of parameters that the data determine.

        Collective over: comm.

        Args:
            scale: see `logdet`.
            prior: see `logdet`.
        """
        self._check(scale=scale, prior=prior)
        return self._totals(lambda values: scale * values / (scale * values + prior))

    def sample(
        self, scale: float, prior: float, generator: torch.Generator, count: int = 1
    ) -> dict[str, Tensor]:
        """Draw deviations of the weights from the posterior `N(0, (scale C + prior I)^-1)`.

        Samples are `(scale C + prior I)^(-1/2)` times standard normal noise. They do not depend on
        the number of ranks.

        Collective over: comm.

        Args:
            scale: see `logdet`.
            prior: see `logdet`.
            generator: a CPU generator, in the same state on all ranks.
            count: the number of samples.

        Returns:
            Tensors `[count, *shape]` in float64, by the parameter's name.
        """
        seed = int(torch.randint(2**62, (), generator=generator, device="cpu"))
        self._check(scale=scale, prior=prior, count=count, seed=seed)
        drawn = {}
        for number, name in enumerate(self.layers):
            if name in self.bases:
                basis = self.bases[name]
                own = torch.Generator("cpu").manual_seed(seed + number)  # independent of the owner
                shape = count, *basis.values.shape
                noise = torch.randn(shape, generator=own, dtype=torch.float64, device="cpu")
                # Rounding determines the signs of eigenvectors and the basis of a null space, but
                # the symmetric root depends on neither.
                root = lambda values: (scale * values + prior).rsqrt()  # noqa: E731
                drawn[name] = basis.apply(root, noise.to(basis.values))
        shapes = {name: (count, *shape) for name, shape in self.owners.shapes.items()}
        return self._matrices.tensors(self.owners.publish(drawn, shapes))

    def _check(self, scale: float, prior: float, **others: int) -> None:
        """Check that the arguments are valid and are the same on all ranks."""
        self.owners.agree({"scale": scale, "prior": prior, **others})
        if not (0 <= scale < math.inf and 0 < prior < math.inf):
            raise ValueError(f"scale={scale!r} must be at least 0, and prior={prior!r} above 0")

    def _totals(self, function: Function) -> dict[str, float]:
        """Return, for each layer, the sum of the function's values over its eigenvalues."""
        own = {name: function(basis.values).sum() for name, basis in self.bases.items()}
        totals = self.owners.publish(own, dict.fromkeys(self.layers, ()))
        return {name: total.item() for name, total in totals.items()}


def damped_power(exponent: float, damping: float | Damping) -> Function:
    """Return the function `(values + damping)^exponent`; see `damping_of`."""
    return lambda values: (values + damping_of(damping, values)) ** exponent


def damping_of(damping: float | Damping, values: Tensor) -> Tensor | float:
    """Return the value that damping adds to a layer's eigenvalues `[groups, outputs, inputs]`.

    Args:
        damping: a number, or a `Damping` without a schedule; 0 is possible only if no factor is
            singular. Relative damping is multiplied by the mean eigenvalue of the layer, or of each
            of its groups (by 1 if all eigenvalues are 0). A K-FAC run, in contrast, damps each
            block of a block-diagonal factor relative to the mean eigenvalue of the block.

    Raises:
        ValueError: the damping is a schedule, or negative.
    """
    number = damping.number if isinstance(damping, Damping) else damping
    if not isinstance(number, (int, float)) or not 0 <= number < math.inf:
        raise ValueError(f"damping={damping!r} must be a finite number >= 0")
    relative = isinstance(damping, Damping) and damping.is_relative
    return number * damping_unit(values.mean((-2, -1), keepdim=True)) if relative else number


def _bases(
    layers: Sequence[Layer], items: Mapping[str, Any], owners: Owners, model: nn.Module
) -> dict[str, Eigenbasis]:
    """Decompose the factors of the layers that this rank owns."""
    return {
        layer.name: Eigenbasis.of_factors(layer.shape, states.factors(layer, items), device(model))
        for layer in layers
        if layer.name in owners.own
    }


def _of_layer(tensors: Mapping[str, Tensor], layer: str) -> dict[str, Tensor]:
    """Return a layer's tensors, such as "a0", from all layers' tensors, such as "conv1/a0"."""
    named = ((name.rpartition("/"), tensor) for name, tensor in tensors.items())
    return {own: tensor for (of_layer, _, own), tensor in named if of_layer == layer}


def _owners_of(
    layers: Sequence[Layer], model: nn.Module, comm: Comm | None, trace: Trace | None
) -> Owners:
    shapes = [layer.shape for layer in layers]
    return Owners(shapes, comm, trace or Trace(), device(model))


def device(model: nn.Module) -> torch.device:
    """Return the device of a model's parameters."""
    return next(model.parameters()).device


def _check_trainer(trainer: KFAC) -> None:
    """Check that the trainer's factors estimate a Fisher matrix at weights shared by all ranks.

    Raises:
        ValueError: the factors do not estimate a Fisher matrix, or weights differ between ranks.
    """
    estimator, sync = trainer.estimator, trainer.plan.strategy.sync
    if estimator.fisher_type == "forward-only" or estimator.normalization != "expand":
        raise ValueError(
            f"fisher_type={estimator.fisher_type!r} with "
            f"normalization={estimator.normalization!r} does not estimate a Fisher matrix per "
            f"example; train with a different fisher_type, and with normalization='expand'"
        )
    if sync.local_steps:
        raise ValueError(f"with sync={sync.name!r}, ranks have different weights; average them")


def _damping_of(trainer: KFAC) -> Damping:
    """Return the current value of the trainer's damping, as a `Damping` without a schedule."""
    damping = trainer.settings.damping
    number = in_force("damping", damping.number, trainer.steps)
    return Damping(relative=number) if damping.is_relative else Damping(number)
