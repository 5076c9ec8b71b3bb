"""What has to be right about a model, its optimizer and K-FAC's choices before training."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mpikfac.plan import Solver, one_of
from mpikfac.settings.damping import LevenbergMarquardt
from mpikfac.settings.estimator import Estimator
from mpikfac.settings.length import GRAFTS


def check_damping(
    damping: object, relative: bool, solvers: Mapping[Solver, str], graft: str | None
) -> None:
    """Returns if the damping, and what it is relative to, suit `solvers_of` layers and grafting.

    Raises:
        ValueError: they do not.
    """
    one_of("relative_damping", relative, (False, True))
    one_of("graft", graft, GRAFTS)
    if graft and isinstance(damping, LevenbergMarquardt):
        raise ValueError(
            f"graft={graft!r} leaves nothing of the length that damping=LevenbergMarquardt(...) "
            f"adapts; use one of them"
        )
    if relative and (whose := solvers.get("rank-one")) is not None:
        raise ValueError(
            f"relative_damping=True is relative to mean eigenvalues, which "
            f"solver='rank-one'{whose} does not know; use another solver or relative_damping=False"
        )


def check_solvers(
    solvers: Mapping[Solver, str],
    estimator: Estimator,
    factor_dtype: torch.dtype | None,
    basis_dtype: torch.dtype | None,
) -> None:
    """Returns if `solvers_of` layers can do with what factors are estimated from, and such dtypes.

    Raises:
        ValueError: one cannot.
    """
    one_of("factor_dtype", factor_dtype, (None, torch.bfloat16))
    one_of("basis_dtype", basis_dtype, (None, torch.bfloat16))
    rank_one, ekfac = solvers.get("rank-one"), solvers.get("ekfac")
    if rank_one is not None and not estimator.of_loss:
        raise ValueError(
            f"solver='rank-one'{rank_one} takes mean gradients, which are 0 at labels that the "
            f"model gives; it needs fisher='empirical' or 'forward-only', not {estimator.fisher!r}"
        )
    dtypes = (estimator.statistics_dtype, factor_dtype, basis_dtype)
    if rank_one is not None and (estimator.start, *dtypes) != ("first", None, None, None):
        raise ValueError(
            f"solver='rank-one'{rank_one} has no matrices to start at the identity or to round: it "
            f"needs start='first' and statistics_dtype, factor_dtype and basis_dtype None, not "
            f"{estimator.start!r}, {', '.join(map(str, dtypes))}"
        )
    if ekfac is not None and (
        estimator.normalization != "expand" or estimator.fisher == "forward-only"
    ):
        raise ValueError(
            f"solver='ekfac'{ekfac} takes gradients of single examples as they are: it needs "
            f"normalization='expand' and fisher='empirical', 'sampled' or 'exact', not "
            f"{estimator.normalization!r} and {estimator.fisher!r}"
        )


def check_rounding(
    basis_dtype: torch.dtype | None, low_ranks: Mapping[str, int], wire: str | None
) -> None:
    """Returns if decompositions, some of low rank, may be kept in that dtype, and travel so.

    Raises:
        ValueError: they may not.
    """
    if basis_dtype is None:
        return
    if low_ranks:
        raise ValueError(
            f"basis_dtype={basis_dtype} rounds eigenvectors, which have to be orthogonal where "
            f"only some are kept, as of {next(iter(low_ranks))!r}; use None, or rank=None"
        )
    if wire is not None:
        raise ValueError(
            f"basis_dtype={basis_dtype} leaves nothing to round for basis_wire={wire!r}; use one "
            f"of both"
        )
