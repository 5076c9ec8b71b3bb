"""EKFAC: eigenbases with eigenvalues estimated from gradients of examples [George et al. 2018]."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from mpikfac.numerics import Side, from_right, product
from mpikfac.plan import Combination, Form, OneOf, Same
from mpikfac.preconditioners.eigen import RENEWED, Eigen

EVERYWHERE = Combination(
    "preconditioner",
    ("ekfac",),
    {
        **{"grad_workers": Same("ranks"), "assignment.factor_reduction": "allreduce"},
        **{"assignment.shard_optimizer": False, "assignment.replicate_below": 0},
        **{"transport.virtual_ranks": None, "transport.reduce_factors_at": "factors"},
        "transport.overlap": False,
    },
    "every rank rotates gradients into the bases of all layers when statistics are recorded",
)
AS_THEY_ARE = Combination(
    "preconditioner",
    ("ekfac",),
    {"normalization": "expand", "fisher_type": OneOf(("empirical", "mc", "type-2"))},
    "scales are second moments of the gradients of single examples, as the gradients are",
)


@dataclass(frozen=True)
class EKFAC(Eigen):
    """Eigenbases, with eigenvalues of `G (x) A` estimated from gradients of single examples.

    `mpikfac.engine.Scales` keeps the estimates.
    """

    form: ClassVar[Form] = Form(
        "ekfac",
        {"vectors": 2, "values": 1},
        denominators=True,
        rescaled=True,
        products=2,
        timed_as="eigen",
        needs=(EVERYWHERE, AS_THEY_ARE, replace(RENEWED, choice="ekfac.iterations")),
    )


def squares_in_bases(a: Tensor, g: Tensor, input_vectors: Side, output_vectors: Side) -> Tensor:
    """Return `sum((Q_G^T sum(g a^T) Q_A)^2)` `[outputs, inputs]`, elementwise, over examples.

    The inner sum is over positions. A side's vectors are rotated before the inner sum, or the sum's
    rows after: the fewer of both.

    Args:
        a: `[batch, shared, inputs]`; with groups `[groups, batch, shared, inputs]`, as the sum.
        g: `[batch, shared, outputs]`, alike.
        input_vectors: Q_A, as a gradient's side; empty for the identity.
        output_vectors: Q_G.
    """
    shared, a_first, g_first = a.shape[-2], a.shape[-2] <= g.shape[-1], a.shape[-2] <= a.shape[-1]
    a = _rotated(a, input_vectors) if a_first else a
    g = _rotated(g, output_vectors) if g_first else g
    if shared == 1:
        return product(g.squeeze(-2).square().mT, a.squeeze(-2).square())
    gradients = g.mT @ a
    gradients = gradients if a_first else _rotated(gradients, input_vectors)
    gradients = gradients if g_first else _rotated(gradients.mT, output_vectors).mT
    return gradients.square().sum(-3)


def _rotated(rows: Tensor, vectors: Side) -> Tensor:
    """Return `rows Q` `[batch, rows, n]`, or of several groups."""
    if not vectors:
        return rows
    return from_right(rows.flatten(-3, -2), vectors).view(rows.shape)
