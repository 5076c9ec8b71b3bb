"""The needs of choices, as a table: code refuses by the table, and a page prints the table.

Choices are a flat mapping from names to values: the fields of `Strategy` and of the values inside
it, the solver, the settings of `KFAC`. No name stands for two choices. The needs of a solver stand
in the solver's file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Choices = Mapping[str, Any]


@dataclass(frozen=True)
class AtLeast:
    """A need: a number of at least `least`."""

    least: int


@dataclass(frozen=True)
class Above:
    """A need: a number above `least`."""

    least: float


@dataclass(frozen=True)
class OneOf:
    """A need: any of some values."""

    values: tuple[object, ...]


@dataclass(frozen=True)
class Same:
    """A need: the value of a second choice."""

    name: str


@dataclass(frozen=True)
class Combination:
    """A choice and its needs.

    Attributes:
        choice: the name of the choice.
        values: the values with the needs; None for all values but `default`.
        needs: by name, the required value of a choice, or an `AtLeast`, `Above`, `OneOf`,
            `Same`.
        why: the reason, as the end of a sentence.
        default: the value without needs, where `values` is None.
        any_of: a single met need is enough.
    """

    choice: str
    values: tuple[object, ...] | None
    needs: Mapping[str, object]
    why: str
    default: object = None
    any_of: bool = False

    def applies(self, choices: Choices) -> bool:
        """Return whether the choice has a value with needs, and the needs can be looked up."""
        if self.choice not in choices or not self.needs.keys() & choices.keys():
            return False
        value = choices[self.choice]
        return value != self.default if self.values is None else value in self.values

    def unmet(self, choices: Choices) -> list[str]:
        """Return the names of unmet needs; none if a met need is enough."""
        checked = [name for name in self.needs if name in choices]
        unmet = [name for name in checked if not _fits(self.needs[name], choices[name], choices)]
        return [] if self.any_of and len(unmet) < len(checked) else unmet


def check(table: Iterable[Combination], choices: Choices, of: str = "") -> None:
    """Return if `choices` meet the needs of `table`.

    A need of a choice that `choices` do not name is not checked.

    Args:
        of: the layer that the choices belong to, as " of layer 'conv1'".

    Raises:
        ValueError: a choice with a need that is not met; the needs, the values, the reason.
    """
    for row in table:
        if row.applies(choices) and (unmet := row.unmet(choices)):
            joint = " or " if row.any_of else " and "
            needed = joint.join(shown(name, row.needs[name], choices) for name in unmet)
            values = " and ".join(repr(choices[name]) for name in unmet)
            raise ValueError(
                f"{row.choice}={choices[row.choice]!r}{of} needs {needed}, not {values}: {row.why}"
            )


def shown(name: str, need: object, choices: Choices | None = None) -> str:
    """Return a need in words: "delay >= 1", "reduction='owners'"."""
    if isinstance(need, AtLeast):
        return f"{name} >= {need.least}"
    if isinstance(need, Above):
        return f"{name} > {need.least:g}"
    if isinstance(need, OneOf):
        return f"{name}=" + " or ".join(map(repr, need.values))
    if isinstance(need, Same):
        return f"{name}={need.name}" if choices is None else f"{name}={choices[need.name]!r}"
    return f"{name}={need!r}"


def _fits(need: object, value: Any, choices: Choices) -> bool:
    if isinstance(need, AtLeast):
        return bool(value is not None and value >= need.least)
    if isinstance(need, Above):
        return bool(value > need.least)
    if isinstance(need, OneOf):
        return value in need.values
    return bool(value == (choices[need.name] if isinstance(need, Same) else need))


_ENCODED = {"parts": None, "sums": "reduce", "shards": OneOf((None, False))}
_COMPRESSED = "compressed messages are sent by all ranks at once, as one buffer"

STRATEGY: tuple[Combination, ...] = (
    Combination(
        "parts",
        None,
        {"reduction": "everyone", "update": "everyone", "packing": "triangle"},
        "an ordered sum passes through all ranks and adds up triangles",
    ),
    Combination(
        "replicate_below",
        None,
        {"reduction": "everyone", "update": "everyone"},
        "all workers of a layer decompose its small factors",
        default=0,
    ),
    Combination(
        "overlap",
        (True,),
        {"parts": None, "packing": "triangle"},
        "layers are sent as the backward pass records them",
    ),
    Combination(
        "ranks_per_node",
        None,
        {"parts": None, "overlap": False},
        "an ordered sum and an overlapped message have one level",
    ),
    Combination(
        "sums",
        ("alltoall",),
        {"reduction": "owners", "update": "owner"},
        "only owners add up the parts that ranks send",
        any_of=True,
    ),
    Combination(
        "sums",
        ("alltoall",),
        {"fusion": None, "overlap": False},
        "an exchange of parts is one message",
    ),
    Combination(
        "shards",
        (True,),
        {"fusion": None, "overlap": False, "stagger": 1, "parts": None},
        "shards are of all layers, in one message",
    ),
    Combination("shards", (True,), {"sums": "reduce"}, "MPI adds up shards"),
    Combination(
        "reduce_at",
        ("bases",),
        {"parts": None, "reduction": OneOf(("everyone", "owners"))},
        "averages over time are summed over ranks, in no order",
    ),
    Combination(
        "curvature_servers",
        None,
        {"delay": AtLeast(1), "replicate_below": 0, "tolerance": 0},
        "curvature servers work while the training ranks go on, for one owner of a factor",
        default=0,
    ),
    Combination(
        "exchanged",
        ("weights",),
        {"update": "everyone", "parts": None, "overlap": False},
        "each rank steps the whole model by the gradient of the rank alone",
    ),
    Combination(
        "sync_every",
        None,
        {"exchanged": "weights"},
        "gradients are averaged at every step",
        default=1,
    ),
    Combination(
        "exchange_from",
        None,
        {"exchanged": "weights"},
        "gradients are averaged from the first step on",
        default=0,
    ),
    Combination(
        "exchanged",
        ("updates",),
        {"update": "everyone", "parts": None, "combine": "mean", "curvature_servers": 0},
        "a server steps its weights by one update after the other",
    ),
    *(
        Combination(name, None, {"exchanged": "updates"}, "only servers take updates", default)
        for name, default in (
            *(("servers", 1), ("push_every", 1), ("fetch_every", None)),
            *(("warm_updates", 0), ("client_ranks", 1)),
        )
    ),
    Combination(
        "merge",
        ("leader",),
        {
            **{"exchanged": "weights", "sync_every": AtLeast(2), "outer_lr": 1.0},
            **{"outer_momentum": 0.0, "combine": "mean", "gradient_wire": None},
        },
        "the leader sends plain weights, and the copies never become one",
    ),
    *(
        Combination(
            name, None, {"exchanged": "weights"}, "a mean of gradients has no outer step", default
        )
        for name, default in (("outer_lr", 1.0), ("outer_momentum", 0.0))
    ),
    *(
        Combination(name, None, {"merge": "leader"}, "no other exchange has a leader", 0.1)
        for name in ("leader_step", "leader_pull")
    ),
    Combination(
        "node_every",
        None,
        {"merge": "leader", "ranks_per_node": AtLeast(2), "copies_of": "rank"},
        "only a node of several copies has a leader",
    ),
    Combination(
        "merge",
        ("elastic",),
        {
            **{"exchanged": "weights", "sync_every": AtLeast(2)},
            **{"combine": "mean", "gradient_wire": None},
        },
        "ranks exchange averages of the steps of copies, which never become one",
    ),
    *(
        Combination(name, None, {"merge": "elastic"}, "no other exchange is elastic", default)
        for name, default in (
            *(("anchor_pull", 0.01), ("mean_pull", 0.1)),
            *(("pull_growth", 0.0), ("average_decay", 0.75)),
            *(("anchor_most", 1.0), ("mean_most", 10.0)),
        )
    ),
    *(
        Combination(
            name,
            None,
            {
                **{"exchanged": "weights", "sync_every": AtLeast(2), "merge": "mean"},
                **{"combine": "mean", "gradient_wire": None},
            },
            "plain sums of parts of the model run beside the steps",
            default,
        )
        for name, default in (("fragments", 1), ("lateness", 0), ("local_share", 0.0))
    ),
    *(
        Combination(
            name,
            None,
            {"ranks_per_node": None, "copies_of": "node"},
            "a sum beside the steps has one level: between ranks, or between nodes",
            default,
            any_of=True,
        )
        for name, default in (("fragments", 1), ("lateness", 0), ("local_share", 0.0))
    ),
    Combination(
        "copies_of",
        ("node",),
        {
            **{"exchanged": "weights", "sync_every": AtLeast(2)},
            **{"ranks_per_node": AtLeast(1), "combine": "mean"},
        },
        "the ranks of a node step one copy by the mean of their gradients",
    ),
    Combination(
        "combine",
        None,
        {
            **{"update": "everyone", "parts": None, "overlap": False},
            **{"ranks_per_node": None, "gradient_wire": None},
        },
        "a rule takes the plain vectors of all ranks at once",
        default="mean",
    ),
    Combination(
        "num_byzantine",
        None,
        {"combine": OneOf(("trimmed-mean", "krum"))},
        "the other rules have no number of wrong ranks",
        default=0,
    ),
    *(
        Combination(name, None, {"combine": "safeguard"}, "no other rule has windows", default)
        for name, default in (
            *(("long_window", 300), ("short_window", 50), ("readmit_every", 0)),
            *(("safe_floor", 3.0), ("safe_of", "after"), ("safe_noise", 0.0)),
        )
    ),
    Combination(
        "safe_factor",
        None,
        {"combine": "safeguard", "combine_factors": "near"},
        "no other rule compares distances",
        default=2.0,
        any_of=True,
    ),
    Combination(
        "combine_factors",
        ("near",),
        {
            **{"reduction": "everyone", "parts": None, "overlap": False},
            **{"ranks_per_node": None, "factor_wire": None, "packing": "triangle"},
        },
        "a rule takes the plain factors of all ranks at once",
    ),
    Combination("factor_wire", None, _ENCODED, _COMPRESSED),
    Combination("basis_wire", None, _ENCODED, _COMPRESSED),
    Combination("gradient_wire", None, _ENCODED, _COMPRESSED),
    Combination(
        "top_momentum",
        None,
        {"gradient_wire": "top-k", "exchanged": "gradients"},
        "the momentum is of gradients that wait to be sent",
        default=0.0,
    ),
    *(
        Combination(
            name,
            None,
            {
                **{"gradient_wire": "top-k", "exchanged": "gradients"},
                **{"update": "everyone", "overlap": False},
            },
            "a sum of the largest gradients begins when a rank has all its gradients",
            default,
        )
        for name, default in (("top_warmup", 0), ("top_clip", None))
    ),
    Combination(
        "power_rank",
        None,
        {"gradient_wire": "power-sgd"},
        "no other wire makes thin matrices",
        default=2,
    ),
)
"""The needs of the choices of a `Strategy`."""
