"""The settings of K-FAC that require other choices, as a table."""

from __future__ import annotations

from mpikfac.plan import AtLeast, Combination, OneOf, Same

SETTINGS: tuple[Combination, ...] = (
    Combination(
        "adapted",
        None,
        {"grafting.prescribes": False},
        "grafting replaces the length that an adapted damping changes",
    ),
    Combination(
        "sync.local_steps",
        (True,),
        {
            "grad_workers": Same("ranks"),
            "adapted": None,
            "grafting": OneOf(("none", "sgd", "adam")),
        },
        "between two exchanges, a rank preconditions all layers without further messages",
    ),
    Combination(
        "preconditioner.dtype",
        None,
        {"compression.inverses": None},
        "decompositions are also sent in the dtype in which they are kept",
    ),
    Combination(
        "matmul_precision",
        ("tf32",),
        {"refresh.staleness": 0, "refresh.servers": AtLeast(1)},
        "TF32 is a process-wide setting, so background threads would also use it at times",
        any_of=True,
    ),
)
"""What settings of `KFAC` require of others; a preconditioner's requirements are in its file."""
