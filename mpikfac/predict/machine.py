"""A machine as a value: how long its messages and computations take, measured or published.

JSON to and from. A point is a pair: bytes or order, and what was found for it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

Point = tuple[float, float]
PRIMITIVES = (
    *("Allreduce", "Reduce_scatter", "Alltoall", "Allgatherv", "Reduce", "Bcast", "Send"),
    *("Allgather", "Alltoall, Allgather"),
)
"""What `Sample` knows of, by their names in `Message`."""
OPTIONAL = ("precondition", "vector_statistics", "vector_precondition")


@dataclass(frozen=True)
class Level:
    """A level of the network: seconds of the smallest message, bytes per second of large ones.

    Inside a node the bandwidth is a rank's, between nodes a whole node's, in each direction.
    """

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Sample:
    """Measured seconds of one collective, while all ranks take part in one like it.

    Attributes:
        ranks: members of the communicator.
        nodes: nodes that they sit on.
        sharing: communicators of the same kind that leave a node at once.
        points: bytes of the whole buffer, ascending, and median seconds of the slowest rank.
        codec: how numbers were encoded, which is part of the seconds.
    """

    primitive: str
    ranks: int
    nodes: int
    sharing: int
    points: tuple[Point, ...]
    codec: str | None = None


@dataclass(frozen=True)
class Network:
    """Seconds of a rank's computations in a training step while all ranks compute.

    Attributes:
        batch: images per rank.
        backward: without statistics.
        statistics: what a step with new factors takes in addition.
        gradients: they are read, checked, clipped and written back.
        precondition: all layers on one rank, with inverses; None: `Machine.products` says it.
        vector_statistics: like statistics, of factors that are squares of vectors.
        vector_precondition: like precondition, with such factors; None: not known.
    """

    model: str
    batch: int
    forward: float
    backward: float
    statistics: float
    gradients: float
    optimizer: float
    precondition: float | None = None
    vector_statistics: float | None = None
    vector_precondition: float | None = None


@dataclass(frozen=True)
class Machine:
    """What a step's cost is computed from.

    Attributes:
        about: versions, date, hosts; free text for people.
        sources: where each number is from, by its key ("between.bandwidth"); empty if measured.
        ranks_per_node: consecutive ranks share a node; None if all of them do.
        between: None where there is one node.
        samples: collectives as measured; levels say what was not.
        decompositions: by solver: order and seconds of one factor, ascending.
        hidden: which part of the seconds of a message beside computations these do not feel; less
            than 1 where ranks have no core to spare, below 0 if it costs more than in turn.
        products: order and rate of a matrix product, in operations per second, ascending; empty
            where preconditioning was measured.
    """

    name: str
    inside: Level
    networks: tuple[Network, ...]
    decompositions: Mapping[str, tuple[Point, ...]]
    products: tuple[Point, ...] = ()
    ranks_per_node: int | None = None
    hidden: float = 1.0
    between: Level | None = None
    samples: tuple[Sample, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """The text that `machine_from_json` reads."""
        return json.dumps(asdict(self), indent=1) + "\n"

    def network(self, model: str, batch: int) -> Network:
        """A model's seconds at `batch` images per rank: in proportion from the nearest batch.

        Raises:
            ValueError: nothing is known of that model.
        """
        known = [network for network in self.networks if network.model == model]
        if not known:
            models = ", ".join(sorted({network.model for network in self.networks})) or "none"
            raise ValueError(
                f"machine {self.name!r} has no times of model={model!r}, only of: {models}; "
                f"measure them with mpikfac calibrate --model {model}"
            )
        nearest = min(known, key=lambda network: abs(math.log(network.batch / batch)))
        ratio = batch / nearest.batch
        values = asdict(nearest) | {"batch": batch}
        for part in ("forward", "backward", "statistics", "vector_statistics"):
            if values[part] is not None:
                values[part] *= ratio
        return Network(**values)

    def decomposition(self, solver: str, order: int) -> float:
        """Seconds to decompose one factor; with the cube of the order past the largest known.

        Raises:
            ValueError: nothing is known of that solver.
        """
        # Both kinds of inverse are one computation, of matrices that are damped differently.
        kind = {"unsplit-inverse": "inverse", "ekfac": "eigen"}.get(solver, solver)
        points = self.decompositions.get(kind)
        if not points:
            raise ValueError(
                f"machine {self.name!r} has no times of solver={solver!r}, only of: "
                f"{', '.join(self.decompositions) or 'none'}"
            )
        largest = points[-1][0]
        return interpolated(points, order) * max(1.0, order / largest) ** 3


def machine_from_json(text: str) -> Machine:
    """The machine that `Machine.to_json` wrote.

    Raises:
        ValueError: the text is no machine; which key is wrong, and what it should be.
    """
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno} is no JSON: {error.msg}") from error
    values = _checked(content, Machine, "the file")
    values["inside"] = _level(values["inside"], "inside")
    if values.get("between") is not None:
        values["between"] = _level(values["between"], "between")
    per_node = values.get("ranks_per_node")
    if per_node is not None:
        _check_count("ranks_per_node", per_node)
    if (per_node is None) != (values.get("between") is None):
        raise ValueError(
            f"ranks_per_node={per_node} and between={values.get('between')} go together: give both "
            f"where there are several nodes, else neither"
        )
    hidden = values.get("hidden", 1.0)
    if type(hidden) not in (int, float) or not -10 <= hidden <= 1:
        raise ValueError(f"hidden={hidden!r} must be a number from -10 to 1")
    values["networks"] = tuple(_network(entry) for entry in _list(values, "networks"))
    values["samples"] = tuple(_sample(entry) for entry in _list(values, "samples"))
    if values.get("products"):
        values["products"] = _points(values["products"], "products")
    if not isinstance(values["decompositions"], dict):
        raise ValueError(f"decompositions is {values['decompositions']!r}, not an object by solver")
    values["decompositions"] = {
        solver: _points(points, f"decompositions.{solver}")
        for solver, points in values["decompositions"].items()
    }
    for network in values["networks"]:
        if network.precondition is None and not values.get("products"):
            raise ValueError(f"give products, or precondition of model={network.model!r}")
    return Machine(**values)


def load_machine(name: str) -> Machine:
    """The machine of a JSON file, or one of those that come with the package.

    Raises:
        ValueError: there is no such file, or it holds no machine.
    """
    shipped = resources.files("mpikfac.predict") / "machines" / f"{name}.json"
    try:
        text = shipped.read_text() if name in published_machines() else Path(name).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"machine={name} is no file that can be read; give one that mpikfac calibrate wrote, "
            f"or one of {', '.join(published_machines())}"
        ) from error
    try:
        return machine_from_json(text)
    except ValueError as error:
        raise ValueError(f"machine={name}: {error}") from error


def published_machines() -> list[str]:
    """Names of the machines that come with the package."""
    found = (resources.files("mpikfac.predict") / "machines").iterdir()
    return sorted(file.name.removesuffix(".json") for file in found if file.name.endswith(".json"))


def interpolated(points: Sequence[Point], at: float) -> float:
    """The value at `at`: straight between points in logarithms, constant beyond their ends."""
    x, y = np.log(np.asarray(points, float)).T
    return float(np.exp(np.interp(math.log(at), x, y)))


def fitted(points: Sequence[Point]) -> Level:
    """The level whose `latency + bytes / bandwidth` is nearest to `points`, in relative terms."""
    size, seconds = np.asarray(points, float).T
    terms = np.stack([1 / seconds, size / seconds], axis=1)
    latency, per_byte = np.linalg.lstsq(terms, np.ones(len(size)), rcond=None)[0]
    if latency <= 0:  # noise: the smallest message bounds it from above, a line through it is best
        latency = min(seconds)
        per_byte = max((seconds - latency) @ size, 0.0) / (size @ size)
    # Where latency is all that is seen: no more than a thousand times that of the largest message.
    per_byte = max(per_byte, seconds[-1] / size[-1] * 1e-3)
    return Level(float(latency), float(1 / per_byte))


def _level(entry: Any, key: str) -> Level:
    values = _checked(entry, Level, key)
    for name, value in values.items():
        if not _is_number(value) or value == 0:
            raise ValueError(f"{key}.{name}={value!r} must be a finite number above 0")
    return Level(**values)


def _network(entry: Any) -> Network:
    values = _checked(entry, Network, "networks")
    for key, value in values.items():
        left_out = key in OPTIONAL and value is None
        if key not in ("model", "batch") and not left_out and not _is_number(value):
            raise ValueError(f"networks.{key}={value!r} must be a finite number of at least 0")
    _check_count("networks.batch", values["batch"])
    return Network(**values)


def _sample(entry: Any) -> Sample:
    values = _checked(entry, Sample, "samples")
    values["points"] = _points(values["points"], f"samples.{values['primitive']}")
    for key in ("ranks", "nodes", "sharing"):
        _check_count(f"samples.{key}", values[key])
    if values["primitive"] not in PRIMITIVES:
        known = ", ".join(PRIMITIVES)
        raise ValueError(f"samples.primitive={values['primitive']!r} must be one of {known}")
    return Sample(**values)


def _list(values: Mapping[str, Any], key: str) -> Sequence[Any]:
    found = values.get(key, ())
    if not isinstance(found, (list, tuple)):
        raise ValueError(f"{key} is {found!r}, not a list")
    return found


def _check_count(key: str, value: Any) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{key}={value!r} must be a whole number of at least 1")


def _checked(entry: Any, kind: Any, key: str) -> dict[str, Any]:
    """A JSON object with the keys of `kind`, those with defaults perhaps left out."""
    if not isinstance(entry, dict):
        raise ValueError(f"{key} is {entry!r}, not an object of keys and values")
    names = [one.name for one in fields(kind)]
    if extra := set(entry) - set(names):
        raise ValueError(f"{key} has the unknown key {min(extra)!r}; known are {', '.join(names)}")
    for one in fields(kind):
        if one.name not in entry and one.default is one.default_factory is MISSING:
            raise ValueError(f"{key} lacks the key {one.name!r}")
    return dict(entry)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


def _points(pairs: Any, key: str) -> tuple[Point, ...]:
    """Pairs of positive numbers, the first ones ascending."""
    try:
        points = tuple((float(x), float(y)) for x, y in pairs)
    except (TypeError, ValueError):
        raise ValueError(f"{key} must be a list of pairs of numbers") from None
    rising = all(a < b for (a, _), (b, _) in zip(points, points[1:]))
    if not points or not rising or not all(0 < v < math.inf for pair in points for v in pair):
        raise ValueError(f"{key} must be pairs of positive numbers, the first ones ascending")
    return points
