"""What choices require of each other, as a table that is checked in code and shown in the docs.

The choices are those of a `Strategy`, with dotted names such as "transport.overlap", the
preconditioner, and the settings of `KFAC`. A name can also be a property of a method, such as
"sync.local_steps", so that no row here names a method from the lab. What a method requires is
declared in its own file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import reduce
from typing import TYPE_CHECKING, Any

from mpikfac.plan.choices.choice import Choice

if TYPE_CHECKING:
    from mpikfac.plan.choices.strategy import Strategy


class Choices:
    """The choices of a run: those of its strategy by dotted name, and other settings by name."""

    def __init__(self, strategy: Strategy, settings: Mapping[str, Any] | None = None) -> None:
        self._strategy, self._settings = strategy, settings or {}

    def __or__(self, settings: Mapping[str, Any]) -> Choices:
        """Return the choices with the given settings added or replaced."""
        return Choices(self._strategy, {**self._settings, **settings})

    def __contains__(self, name: str) -> bool:
        """Return whether there is a choice called `name`."""
        try:
            self[name]
        except (AttributeError, KeyError):
            return False
        return True

    def __getitem__(self, name: str) -> Any:
        """Return the value of a choice; for a method, its name.

        Raises:
            AttributeError, KeyError: there is no such choice.
        """
        if name in self._settings:
            return self._settings[name]
        if "." not in name and name not in vars(self._strategy):
            raise KeyError(name)
        value = reduce(getattr, name.split("."), self._strategy)
        return value.name if isinstance(value, Choice) else value

    def of_method(self, name: str) -> str:
        """Return the method that has the property `name`, as "sync='parle'"; "" for other names."""
        joint, _, field = name.rpartition(".")
        if name in self._settings or not joint:
            return ""
        method = reduce(getattr, joint.split("."), self._strategy)
        is_field = field in [each.name for each in fields(method)]
        return "" if is_field else f"{joint}={getattr(method, 'name', '')!r}"


@dataclass(frozen=True)
class AtLeast:
    """A requirement: a number >= `least`."""

    least: int


@dataclass(frozen=True)
class Above:
    """A requirement: a number above `least`."""

    least: float


@dataclass(frozen=True)
class OneOf:
    """A requirement: one of several values."""

    values: tuple[object, ...]


@dataclass(frozen=True)
class Same:
    """A requirement: the value of another choice."""

    name: str


@dataclass(frozen=True)
class Combination:
    """A choice and what it requires.

    Attributes:
        choice: the name of the choice.
        values: the values that have requirements; None for all values except `default`.
        needs: the required values of other choices, by name; a value can also be an `AtLeast`,
            `Above`, `OneOf` or `Same`.
        why: the reason, as the end of a sentence.
        default: the value without requirements, if `values` is None.
        any_of: whether it is enough to meet one of the requirements.
    """

    choice: str
    values: tuple[object, ...] | None
    needs: Mapping[str, object]
    why: str
    default: object = None
    any_of: bool = False

    def applies(self, choices: Choices) -> bool:
        """Return whether the value of `choice` constrains another choice that is in `choices`.

        Requirements on choices that are not in `choices` cannot be checked.
        """
        if self.choice not in choices or not any(name in choices for name in self.needs):
            return False
        value = choices[self.choice]
        return value != self.default if self.values is None else value in self.values

    def unmet(self, choices: Choices) -> list[str]:
        """Return the names of unmet requirements; none if `any_of` is set and one is met."""
        checked = [name for name in self.needs if name in choices]
        unmet = [name for name in checked if not _fits(self.needs[name], choices[name], choices)]
        return [] if self.any_of and len(unmet) < len(checked) else unmet


def check(table: Iterable[Combination], choices: Choices, of: str = "") -> None:
    """Check that `choices` meets the requirements in `table`.

    Requirements on choices that `choices` does not contain are not checked.

    Args:
        of: the layer that the choices belong to, such as " of layer 'conv1'".

    Raises:
        ValueError: requirements are not met; the message states all of them, the values and the
            reason.
    """
    for row in table:
        if row.applies(choices) and (unmet := row.unmet(choices)):
            joint = " or " if row.any_of else " and "
            needed = joint.join(shown(name, row.needs[name], choices) for name in unmet)
            given = " and ".join(choices.of_method(name) or repr(choices[name]) for name in unmet)
            choice = choices.of_method(row.choice) or f"{row.choice}={choices[row.choice]!r}"
            raise ValueError(f"{choice}{of} needs {needed}, not {given}: {row.why}")


def shown(name: str, need: object, choices: Choices | None = None) -> str:
    """Return a requirement as text: "delay >= 1", "reduction='owners'"."""
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


_EVERYWHERE = {"assignment.factor_reduction": "allreduce", "assignment.shard_optimizer": False}
_AT_ONCE = {"transport.virtual_ranks": None, "transport.overlap": False}

STRATEGY: tuple[Combination, ...] = (
    Combination(
        "transport.virtual_ranks",
        None,
        {**_EVERYWHERE, "transport.packing": "triangle"},
        "an ordered sum passes through all ranks and accumulates triangles",
    ),
    Combination(
        "assignment.replicate_below",
        None,
        _EVERYWHERE,
        "all gradient workers of a layer decompose its small factors",
        default=0,
    ),
    Combination(
        "transport.overlap",
        (True,),
        {"transport.virtual_ranks": None, "transport.packing": "triangle"},
        "each layer is sent as soon as the backward pass has recorded it",
    ),
    Combination(
        "transport.ranks_per_node",
        None,
        _AT_ONCE,
        "ordered sums and overlapped messages support only one level",
    ),
    Combination(
        "transport.owner_sums",
        ("alltoall",),
        {"assignment.factor_reduction": "reduce_scatter", "assignment.shard_optimizer": True},
        "only owners can sum the parts that ranks send",
        any_of=True,
    ),
    Combination(
        "transport.owner_sums",
        ("alltoall",),
        {"transport.fusion": None, "transport.overlap": False},
        "the parts are exchanged in one message",
    ),
    Combination(
        "transport.balanced_shards",
        (True,),
        {
            **{"transport.fusion": None, "transport.overlap": False},
            **{"refresh.stagger": 1, "transport.virtual_ranks": None},
        },
        "the shards of all layers are sent in one message",
    ),
    Combination(
        "transport.balanced_shards",
        (True,),
        {"transport.owner_sums": "reduce"},
        "equal shards are reduced by MPI",
    ),
    Combination(
        "transport.reduce_factors_at",
        ("inverses",),
        {
            "transport.virtual_ranks": None,
            "assignment.factor_reduction": OneOf(("allreduce", "reduce_scatter")),
        },
        "averages over time are summed over ranks in an arbitrary order",
    ),
    Combination(
        "sync.local_steps",
        (True,),
        {"assignment.shard_optimizer": False, **_AT_ONCE},
        "each rank updates the whole model with its own gradient",
    ),
    Combination(
        "sync.waits_for_all",
        (False,),
        {
            **{"assignment.shard_optimizer": False, "transport.virtual_ranks": None},
            "refresh.servers": 0,
        },
        "a server applies one update after another to its weights",
    ),
    Combination(
        "sync.aggregation.sums",
        (False,),
        {
            **{"assignment.shard_optimizer": False, **_AT_ONCE},
            **{"transport.ranks_per_node": None, "compression.gradients": None},
        },
        "a rule needs the uncompressed vectors of all ranks at once",
    ),
    Combination(
        "sync.factor_aggregation.sums",
        (False,),
        {
            **{"assignment.factor_reduction": "allreduce", **_AT_ONCE},
            **{"transport.ranks_per_node": None, "compression.factors": None},
            "transport.packing": "triangle",
        },
        "a rule needs the uncompressed factors of all ranks at once",
    ),
)
"""What the choices of a `Strategy` require of each other; methods add their own rows."""
