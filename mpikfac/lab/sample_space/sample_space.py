"""Minimise sums of squared residuals with Gauss-Newton steps, solved for in sample space."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from mpikfac.comm import Comm, SplitComm, agree, broadcast, together
from mpikfac.errors import UserError
from mpikfac.lab.sample_space.messages import NUMBERS, Forms, Ring, form_of
from mpikfac.lab.sample_space.parameters import F64, Parameters
from mpikfac.lab.sample_space.products import along, combine
from mpikfac.lab.sample_space.records import Rows, record
from mpikfac.lab.sample_space.terms import Points, Term
from mpikfac.layers import trainer_of
from mpikfac.model import check_wrappers, describe_tensors, fitting, fully_sharded
from mpikfac.numerics import copy_all
from mpikfac.plan import check_count, check_fraction, check_positive, one_of
from mpikfac.plan.names import OF_MODEL
from mpikfac.trace import Trace

LENGTHS = tuple(0.5**k for k in range(8))
"""The step lengths that are tried, from 1 to 1/128."""
MOST_TRIES = 12
"""The maximum number of solutions per step; the last has 4 million times the first's damping."""
MOST_DAMPING = 1e3
"""Steps do not raise the damping above this multiple of the mean of the diagonal of `J J^T`."""

# Names of the items in the state that `state_dict` returns.
STEPS, DAMPING, MOMENTUM = "sample/steps", "sample/damping", "sample/momentum/"
SAMPLE = "sample/"

RANDOM = nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm

log = logging.getLogger("mpikfac")


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of a step.

    Attributes:
        loss: the loss before the step.
        new_loss: the loss after the step, at the same points.
        length: the length of the step; 0 if no length reduced the loss, in which case the weights
            are unchanged.
        ratio: the decrease of the loss, divided by the decrease that linearised residuals predict.
        damping: the number that was added to the diagonal of `J J^T`.
        relative_damping: the damping, divided by the mean of this diagonal.
        tries: how many times the linear system was solved.
    """

    loss: float
    new_loss: float
    length: float
    ratio: float
    damping: float
    relative_damping: float
    tries: int


class Trial(NamedTuple):
    """A step length, the resulting loss, and the rank's residuals."""

    length: float
    loss: float
    residuals: Tensor


class Trajectory(NamedTuple):
    """The parameters as a function of the step length: a line or a parabola."""

    begin: Tensor
    direction: Tensor
    acceleration: Tensor | None = None

    def at(self, length: float) -> Tensor:
        """Return the parameters for a step length."""
        line = self.begin - length * self.direction
        if self.acceleration is None:
            return line
        return line.sub_(self.acceleration, alpha=length**2 / 2)


class Solution(NamedTuple):
    """A solved system, as seen by a rank.

    Attributes:
        coefficients: the solution for the rank's rows.
        factor: the Cholesky factor of the damped system, on rank 0 only.
        damping: the damping with which the system could be solved.
        mean: the mean of the diagonal of `J J^T`.
        slope: the inner product of the residuals and the change that a step of length 1 subtracts
            from the linearised residuals.
        curvature: the squared norm of this change.
    """

    coefficients: Tensor
    factor: Tensor | None
    damping: float
    mean: float
    slope: float
    curvature: float

    @property
    def relative_damping(self) -> float:
        """The damping, divided by the mean of the diagonal of `J J^T`."""
        return self.damping / self.mean if self.mean else math.inf

    def decrease(self, length: float) -> float:
        """Return the decrease of the loss that linearised residuals predict for a length."""
        return length * self.slope - length**2 / 2 * self.curvature


class SampleSpace:
    """Minimise a sum of squared residuals with damped Gauss-Newton steps.

        def interior(model, x):
            u = model(mpikfac.lab.jet(x))
            return u.second[:, 0] + u.second[:, 1] - f(x)

        def border(model, x):
            return model(x)[:, 0] - g(x)

        terms = [mpikfac.lab.Term(interior, inside), mpikfac.lab.Term(border, edge)]
        steps = mpikfac.lab.SampleSpace(model, terms)
        for _ in range(200):
            report = steps.step()

    The loss is the sum of the terms, `|r|^2 / 2` for the weighted residuals r with the Jacobian J.
    The direction is that of Levenberg and Marquardt, `-J^T (J J^T + damping I)^-1 r`. The linear
    system has one equation per residual, regardless of the number of weights [Guzmán-Cordero et al.
    2025]. `J J^T` is computed from the vectors that linear layers receive; rows of J are stored for
    small layers only. All computations after the passes are in float64.

    The step lengths 1, 1/2, 1/4 ... are tried until the loss rises again. The residuals at the best
    length show how the residuals curve along the step. The same system is then solved for a
    quadratic correction of the step that cancels this curvature, by geodesic acceleration
    [Transtrum & Sethna 2012]. The correction is applied if it reduces the loss further, at the same
    length or at the next longer one.

    Long steps divide the damping by 3, and steps shorter than 1/8 multiply it by 3. If no length
    reduces the loss, the same system is solved with 4 times the damping. If this never succeeds,
    the step has length 0, and the weights do not change: the loss has converged as far as rounding
    allows, or new points are needed.

    Points can be distributed over ranks in any way; apart from rounding, results do not depend on
    it. Rank 0 stores and solves the system.

    Collective over: comm. All ranks get rank 0's parameters.

    Args:
        model: a model whose trained parameters belong to `torch.nn.Linear` modules, in float64, or
            in float32 for a less accurate solution. Dropout and batch normalisation must be in
            eval() mode.
        terms: terms with different names, in the same order on all ranks.
        also: additional trained tensors, such as unknown coefficients of an equation. Each of their
            elements requires a backward pass.
        damping: the damping of the first step.
        lengths: the step lengths to try, in descending order.
        momentum: the factor mu in [0, 1) of the last direction, which is continued in the null
            space of J, as in SPRING [Goldshlager et al. 2024]; use 0 for fixed points.
        acceleration: whether to correct steps, at the cost of one or two loss evaluations and of
            the messages for an additional solution and direction.
        comm: the communicator; None for all ranks.
        trace: records the seconds and bytes of the stages; None for a new trace.

    Raises:
        ValueError: an argument is invalid; raised before any communication.
        UserError: ranks disagree on an argument or on the model's shapes.

    Attributes:
        most_residuals: the maximum number of residuals across all ranks.
        model: the model.
        steps: the number of completed steps.
        damping: the damping of the next step.
        trace: the seconds and bytes of every stage.
    """

    most_residuals: ClassVar[int] = 8192

    def __init__(
        self,
        model: nn.Module,
        terms: Sequence[Term],
        also: Iterable[Tensor] = (),
        *,
        damping: float = 1e-3,
        lengths: Sequence[float] = LENGTHS,
        momentum: float = 0.0,
        acceleration: bool = True,
        comm: Comm | None = None,
        trace: Trace | None = None,
    ) -> None:
        self._comm = SplitComm.of(comm).trains
        check_positive("damping", damping)
        check_fraction("momentum", momentum)
        one_of("acceleration", acceleration, (True, False))
        _check_lengths(lengths)
        _check_terms(terms)
        _check_whole(model)
        self.model, self.damping, self.steps = model, float(damping), 0
        self.trace = trace or Trace()
        self._terms = {term.name: term for term in terms}
        self._lengths, self._mu = tuple(lengths), float(momentum)
        self._acceleration = acceleration
        self._parameters = Parameters(model, also)
        self._unchecked = True
        _check_model(model)
        if self._parameters.dtype != F64 and self._comm.rank == 0:
            log.warning(
                "the model is in %s: residuals are rounded, so a damping below 1e-6 of the mean of "
                "the diagonal has no effect; convert the model with model.double()",
                self._parameters.dtype,
            )
        form = {f"also[{i}]": list(p.shape) for i, p in enumerate(self._parameters.also)}
        numbers = {"damping": damping, "lengths": self._lengths, "momentum": momentum}
        numbers |= {"acceleration": acceleration}
        choices = {**numbers, "terms": [(term.name, term.weight) for term in terms]}
        agree(self._comm, {**choices, **form, **describe_tensors(model)})
        broadcast(self._comm, [*model.parameters(), *model.buffers(), *self._parameters.also])
        device = self._parameters.device
        self._ring = Ring(self._comm, self._parameters.shapes, self.trace, device)
        size = self._parameters.size if momentum else 0
        self._last = torch.zeros(size, dtype=F64, device=device)

    def renew(self, **points: Points) -> None:
        """Replace the rank's points of the named terms from the next step on.

            steps.renew(interior=torch.rand(1000, 2))

        Collective over: none.

        Raises:
            ValueError: there is no term with this name, or the points are not tensors.
        """
        for name in points:
            if name not in self._terms:
                known = ", ".join(self._terms)
                raise ValueError(f"{name!r} is not the name of a term; use one of {known}")
        for name, replaced in points.items():
            self._terms[name] = dataclasses.replace(self._terms[name], points=replaced)

    def close(self) -> None:
        """Free the communicator; no more steps are possible.

        Collective over: comm.
        """
        self._ring.close()

    # -- a step ----------------------------------------------------------------------------------

    def step(self) -> Report:
        """Update the parameters, identically on all ranks, and report the result.

        The first step checks some rows of J, and a combination of all rows, against autograd.

        Collective over: comm. A `ValueError`, `OSError` or `UserError` in a residual function is
        raised on all ranks; after any other error on a single rank, the others hang, unless
        `python -m mpi4py` ends the job.

        Raises:
            UserError: on some rank, a residual function fails or cannot be recorded; a term has no
                points; there are more than `most_residuals` residuals; or residuals are not finite.
        """
        scales = self._scales()
        with together(self._comm, "taking a step"), self.trace.stage("records"):
            _check_model(self.model)
            rows, residuals = self._record(scales)
        self._unchecked = False
        forms = self._comm.allgather([form_of(of_term) for of_term in rows])
        self._check_rows(sum(form.rows for of_rank in forms for form in of_rank))
        begin = self._parameters.read()
        try:
            return self._descend(begin, rows, residuals, forms, scales)
        except BaseException:
            self._parameters.write(begin)
            raise

    def _check_rows(self, rows: int) -> None:
        """Check that there are at most `most_residuals` equations, to bound rank 0's memory.

        Raises:
            UserError: there are more than `most_residuals` equations.
        """
        if rows > self.most_residuals:
            raise UserError(
                f"{rows} residuals need a matrix of {8 * rows**2:,} bytes on rank 0; sample at "
                f"most {self.most_residuals} residuals per step, and change them between steps "
                f"with renew(...)"
            )

    def _scales(self) -> list[float]:
        """Return the factor of each term's residuals, `sqrt(weight / points on all ranks)`.

        Collective over: comm.

        Raises:
            UserError: a term has no points, or the terms have too many points in total.
        """
        own = [term.count for term in self._terms.values()]
        counts = [sum(of_term) for of_term in zip(*self._comm.allgather(own))]
        for name, count in zip(self._terms, counts):
            if not count:
                raise UserError(f"term {name!r} has no points on any rank; pass some, or remove it")
        self._check_rows(sum(counts))  # fail before recording; a point has at least one residual
        return [math.sqrt(term.weight / n) for term, n in zip(self._terms.values(), counts)]

    def _record(self, scales: Sequence[float]) -> tuple[list[Rows], Tensor]:
        """Return this rank's rows of J for each term, and this rank's residuals of all terms."""
        found = [
            record(self.model, self._parameters, term, scale, self._unchecked)
            for term, scale in zip(self._terms.values(), scales)
        ]
        return [rows for rows, _ in found], torch.cat([residuals for _, residuals in found])

    def _descend(
        self,
        begin: Tensor,
        rows: Sequence[Rows],
        residuals: Tensor,
        forms: Sequence[Forms],
        scales: Sequence[float],
    ) -> Report:
        """Solve with increasing damping until some step length reduces the loss; take the step.

        Collective over: comm.
        """
        start = Trial(0.0, self._sum(residuals), residuals)
        damping, mu, tries = self.damping, self._mu, 0
        rounding = torch.finfo(self._parameters.dtype).eps * start.loss
        counts = [sum(form.rows for form in of_rank) for of_rank in forms]
        vectors = [residuals, *([self._along(rows, self._last)] if mu else [])]
        gathered = self._ring.gather(self._ring.products(rows, forms), vectors, counts)
        while True:
            tries += 1
            solution = self._solve(gathered, counts, damping, mu)
            curve = Trajectory(begin, self._direction_of(rows, solution.coefficients, mu))
            trial = self._search(curve, self._lengths, start, scales)
            if trial.length or tries == MOST_TRIES:
                break
            if not mu and solution.decrease(1) <= rounding:
                break
            damping, mu = 4 * solution.damping, 0.0
        if self._acceleration and trial.length:
            found = self._acceleration_of(rows, curve, start, trial, solution.factor, counts)
            bent, at = curve._replace(acceleration=found), self._lengths.index(trial.length)
            further = self._search(bent, self._lengths[max(0, at - 1) : at + 1], trial, scales)
            curve, trial = (curve if further is trial else bent), further
        self._parameters.write(curve.at(trial.length))
        if self._mu:
            self._last.copy_(curve.direction if trial.length else 0 * curve.direction)
        damping = (solution.damping if trial.length else self.damping) * factor_of(trial.length)
        self.damping = min(damping, max(self.damping, MOST_DAMPING * solution.mean))
        self.steps += 1
        decrease = solution.decrease(trial.length)
        ratio = (start.loss - trial.loss) / decrease if decrease > 0 else 0.0
        dampings = solution.damping, solution.relative_damping
        return Report(start.loss, trial.loss, trial.length, ratio, *dampings, tries)

    def _along(self, rows: Sequence[Rows], vector: Tensor) -> Tensor:
        """Return the products of this rank's rows of J with a vector."""
        matrices = self._parameters.split(vector)
        return torch.cat([along(of_term, matrices) for of_term in rows])

    def _solve(
        self,
        gathered: tuple[Tensor, list[Tensor]] | None,
        counts: Sequence[int],
        damping: float,
        mu: float,
    ) -> Solution:
        """Return the solution of the damped system, which rank 0 computes.

        Collective over: comm.

        Raises:
            UserError: residuals or inner products are not finite.
        """
        solved, factor = None, None
        if gathered is not None:
            products, (residuals, *last) = gathered
            with self.trace.stage("decompose"):
                solved, factor = solve(products, residuals, mu * last[0] if mu else None, damping)
        numbers, coefficients = self._ring.scatter(solved, counts)
        solution = Solution(coefficients, factor, *numbers.tolist())
        if not math.isfinite(solution.slope):
            raise UserError(
                "residuals or their derivatives are not finite; check the residual functions at "
                "the points, and the initial weights"
            )
        return solution

    def _direction_of(self, rows: Sequence[Rows], coefficients: Tensor, mu: float) -> Tensor:
        """Return the direction, `J^T coefficients` plus mu times the last direction.

        Collective over: comm.
        """
        total = torch.zeros(self._parameters.size, dtype=F64, device=self._parameters.device)
        matrices = self._parameters.split(total)
        parts = coefficients.split([len(of_term[0].a) for of_term in rows])
        for of_term, part in zip(rows, parts):
            combine(of_term, part, matrices)
        total = self._ring.sum(total)
        return total.add_(self._last, alpha=mu) if mu else total

    def _acceleration_of(
        self,
        rows: Sequence[Rows],
        line: Trajectory,
        start: Trial,
        trial: Trial,
        factor: Tensor | None,
        counts: Sequence[int],
    ) -> Tensor:
        """Return the acceleration that cancels the curvature of the residuals along a step.

        The residuals' second derivative along the line follows from the difference between the
        trial's residuals and the linear prediction, without another pass.

        Collective over: comm.
        """
        linear = start.residuals - trial.length * self._along(rows, line.direction)
        second = 2 / trial.length**2 * (trial.residuals - linear)
        coefficients = self._ring.solve_again(second, factor, counts)
        return self._direction_of(rows, coefficients, 0.0)

    def _search(
        self, curve: Trajectory, lengths: Sequence[float], start: Trial, scales: Sequence[float]
    ) -> Trial:
        """Return the best trial of the given lengths, or `start` if none has a lower loss.

        Afterwards, the parameters are those of the last trial.

        Collective over: comm.
        """
        best = start
        for length in lengths:
            self._parameters.write(curve.at(length))
            trial = Trial(length, *self._loss(scales))
            if trial.loss < best.loss:
                best = trial
            elif best is not start:
                break
        return best

    @torch.enable_grad()  # a residual function may use autograd for other functions of the points
    def _loss(self, scales: Sequence[float]) -> tuple[float, Tensor]:
        """Return the loss at the points of all ranks, and the residuals of this rank's rows.

        Collective over: comm.

        Raises:
            UserError: on some rank, a residual function fails.
        """
        parts = [torch.empty(0, dtype=F64, device=self._parameters.device)]
        with together(self._comm, "trying a length"), self.trace.stage("losses"):
            for term, scale in zip(self._terms.values(), scales):
                if term.count:
                    parts.append(term.values(self.model).detach().T.flatten().to(F64) * scale)
        residuals = torch.cat(parts)
        return self._sum(residuals), residuals

    def _sum(self, residuals: Tensor) -> float:
        """Return half the sum of all ranks' squared residuals.

        Collective over: comm.
        """
        return self._ring.sum_number(residuals.square().sum() / 2)

    # -- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state by name, for `mpikfac.save_checkpoint`; it is equal on all ranks.

        The state contains the model, the tensors in `also`, the damping, the number of steps and,
        with momentum, the last direction. It does not contain the points.

        Collective over: none.
        """
        return {**self._tensors(), DAMPING: self.damping, STEPS: self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state, such as a checkpoint, even if another number of ranks saved it.

        If loading fails on any rank, no rank's state changes.

        Collective over: comm.

        Raises:
            UserError: on some rank, an item is missing or does not match the model.
        """
        tensors = self._tensors()
        with together(self._comm, "loading state", untrusted=True):
            items = fitting(state, {**tensors, DAMPING: 0.0, STEPS: 0}, rounded=True)
            check_positive(f"item {DAMPING!r}", items[DAMPING])
            check_count(f"item {STEPS!r}", items[STEPS], 0)
        copy_all((tensor, items[name]) for name, tensor in tensors.items())
        self.damping, self.steps = float(items[DAMPING]), items[STEPS]

    def _tensors(self) -> dict[str, Tensor]:
        """Return the state's tensors by name; `load_state_dict` copies into them."""
        named = self.model.state_dict().items()
        own = {OF_MODEL + name: value for name, value in named if torch.is_tensor(value)}
        if self._mu:
            views = self._parameters.views(self._last)
            own |= {MOMENTUM + name: view for name, view in views.items()}
        return own | {SAMPLE + n: p.detach() for n, p in self._parameters.outside.items()}


def solve(
    products: Tensor, residuals: Tensor, last: Tensor | None, damping: float
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return a `Solution`'s scalars with the coefficients of all rows, and the Cholesky factor.

    If rounding makes the damped matrix indefinite, the damping is multiplied by 10 until the
    Cholesky factorisation succeeds.

    Args:
        products: `J J^T`.
        last: mu times the products of the rows with the last direction; None without momentum.
    """
    mean = float(products.diagonal().mean())
    if not math.isfinite(mean + float(residuals.sum())):
        return (products.new_full((NUMBERS,), math.nan), residuals), products
    damping = max(damping, torch.finfo(F64).eps * mean)
    factor, failed = _factor(products, damping)
    while failed:
        damping *= 10
        factor, failed = _factor(products, damping)
    target = residuals if last is None else residuals - last
    coefficients = torch.cholesky_solve(target[:, None], factor)[:, 0]
    change = products @ coefficients
    if last is not None:
        change += last
    numbers = [damping, mean, float(residuals @ change), float(change @ change)]
    return (products.new_tensor(numbers), coefficients), factor


def _factor(products: Tensor, damping: float) -> tuple[Tensor, bool]:
    """Return the Cholesky factor of the damped matrix, and whether the factorisation failed."""
    damped = products.clone()
    damped.diagonal().add_(damping)
    factor, info = torch.linalg.cholesky_ex(damped)
    return factor, bool(info)


def factor_of(length: float) -> float:
    """Return the factor by which a step of the given length changes the damping."""
    if length >= 1 / 2:
        return 1 / 3
    return 1.0 if length >= 1 / 8 else 3.0


def _check_lengths(lengths: Sequence[float]) -> None:
    for length in lengths:
        check_positive("each of lengths", length)
    if not lengths or list(lengths) != sorted(set(lengths), reverse=True):
        raise ValueError(f"lengths={lengths!r} must be numbers in descending order")


def _check_terms(terms: Sequence[Term]) -> None:
    if isinstance(terms, Term):
        raise ValueError("terms must be a list of mpikfac.lab.Term, not a Term; pass [Term(...)]")
    if wrong := [term for term in terms if not isinstance(term, Term)]:
        raise ValueError(f"terms must be mpikfac.lab.Term(residual, points), not {wrong[0]!r}")
    if not terms:
        raise ValueError("terms=[] must contain at least one mpikfac.lab.Term(residual, points)")
    name, count = Counter(term.name for term in terms).most_common(1)[0]
    if count > 1:
        raise ValueError(
            f"{count} terms are named {name!r}; give their functions different names, because "
            f"renew() replaces points by name"
        )


def _check_whole(model: nn.Module) -> None:
    """Check that the parameters are not sharded.

    Raises:
        ValueError: the parameters are sharded.
    """
    check_wrappers(model)
    if fully_sharded(model):
        raise ValueError(
            "the model is sharded by fully_shard, but residuals need complete parameters on every "
            "rank; use the plain model"
        )


def _check_model(model: nn.Module) -> None:
    """Check that points are independent, and that no trainer records the passes.

    Raises:
        ValueError: a module draws random numbers or uses batch statistics, or the model has a
            trainer.
    """
    for name, module in model.named_modules():
        if module.training and isinstance(module, RANDOM):
            raise ValueError(
                f"{name or 'the model'} is a {type(module).__name__} in training mode, which makes "
                f"residuals random or dependent on other points; call model.eval()"
            )
    if (trainer := trainer_of(model)) is not None:
        raise ValueError(
            f"the model has a {type(trainer).__name__}, which would record these passes; call its "
            f"close() first"
        )
