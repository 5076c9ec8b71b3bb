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
        "decompositions that are kept in a dtype are also sent in it",
    ),
    Combination(
        "matmul_precision",
        ("tf32",),
        {"refresh.staleness": 0, "refresh.servers": AtLeast(1)},
        "TF32 is a setting of the process, so a background thread would round at random times",
        any_of=True,
    ),
)
"""The needs of the settings of `KFAC`; those of a preconditioner are in its file."""
