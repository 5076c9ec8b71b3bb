"""Which settings of K-FAC need which other choices, as a table."""

from __future__ import annotations

from mpikfac.plan import AtLeast, Combination, OneOf, Same

SETTINGS: tuple[Combination, ...] = (
    Combination(
        "adapted",
        None,
        {"length": OneOf(("own", "quadratic"))},
        "grafting replaces the length that an adapted damping changes",
    ),
    Combination(
        "length",
        ("quadratic",),
        {"assignment.shard_optimizer": False},
        "the quadratic model multiplies the whole step by derivatives of the outputs",
    ),
    Combination(
        "length",
        ("quadratic",),
        {"transport.virtual_ranks": None},
        "sums of products over ranks would depend on the number of ranks",
    ),
    Combination(
        "length",
        ("quadratic",),
        {"relative": False},
        "the quadratic model has the same damping for all parameters",
    ),
    Combination(
        "sync.local_steps",
        (True,),
        {
            "grad_workers": Same("ranks"),
            "adapted": None,
            "length": OneOf(("own", "orthogonal", "rows", "adam", "sgd")),
        },
        "between two exchanges, a rank preconditions all layers without further messages",
    ),
    Combination(
        "basis_dtype",
        None,
        {"compression.inverses": None},
        "decompositions that are kept in a dtype also travel in the dtype",
    ),
    Combination(
        "precision",
        ("tf32",),
        {"refresh.staleness": 0, "refresh.servers": AtLeast(1)},
        "TF32 is a setting of the process, and a thread that decomposes would round by chance",
        any_of=True,
    ),
)
"""The needs of the settings of `KFAC`; the needs of a solver stand in the solver's file."""
