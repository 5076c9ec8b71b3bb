"""Compute on tensors by pure functions, and hold tensors in flat buffers."""

from __future__ import annotations

from mpikfac.numerics.arena import Arena, Copies, Parts, alike, copy_all
from mpikfac.numerics.finite import all_finite, each_finite, not_finite
from mpikfac.numerics.fisher import (
    FISHERS,
    LOSSES,
    Fisher,
    Loss,
    check_outputs,
    exact,
    sampled,
)
from mpikfac.numerics.messages import (
    BY_COORDINATE,
    BY_VECTOR,
    ByVector,
    Near,
    add_decoded,
    by_vector,
    combined,
    encode,
    matrix_in,
    orthonormal,
    renewed,
)
from mpikfac.numerics.moments import (
    NORMALIZATIONS,
    Normalization,
    factor_scales,
    linear_input_sum,
    linear_input_vector,
    linear_output_sum,
    linear_output_vector,
    squares,
    vector_scales,
    with_bias,
    with_count,
)
from mpikfac.numerics.orthogonal import orthogonalised
from mpikfac.numerics.precision import end_step, is_unscaled, without_autocast
from mpikfac.numerics.products import (
    Side,
    from_left,
    from_right,
    of_coordinates,
    product,
)
from mpikfac.numerics.steps import AdamSteps, elastic_step, nesterov
from mpikfac.numerics.triangles import add_identity, add_triangle, triangle_trace, unfold_triangle

__all__ = [
    "BY_COORDINATE",
    "BY_VECTOR",
    "FISHERS",
    "LOSSES",
    "NORMALIZATIONS",
    "AdamSteps",
    "Arena",
    "ByVector",
    "Copies",
    "Fisher",
    "Loss",
    "Near",
    "Normalization",
    "Parts",
    "Side",
    "add_decoded",
    "add_identity",
    "add_triangle",
    "alike",
    "all_finite",
    "by_vector",
    "check_outputs",
    "combined",
    "copy_all",
    "each_finite",
    "elastic_step",
    "encode",
    "end_step",
    "exact",
    "factor_scales",
    "from_left",
    "from_right",
    "is_unscaled",
    "linear_input_sum",
    "linear_input_vector",
    "linear_output_sum",
    "linear_output_vector",
    "matrix_in",
    "nesterov",
    "not_finite",
    "of_coordinates",
    "orthogonalised",
    "orthonormal",
    "product",
    "renewed",
    "sampled",
    "squares",
    "triangle_trace",
    "unfold_triangle",
    "vector_scales",
    "with_bias",
    "with_count",
    "without_autocast",
]
