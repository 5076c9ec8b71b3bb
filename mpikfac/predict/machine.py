"""Describe a machine by the times of messages and computations, measured or published.

Machines are stored as JSON. A point is a pair: a number of bytes or an order, and the value
measured for it.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from importlib import resources
from typing import Any

import numpy as np

from mpikfac import files
from mpikfac.predict.algorithms import LIBRARIES

Point = tuple[float, float]
LARGEST = 1e30
"""The maximum of any value; beyond it, products of values can overflow."""
PRIMITIVES = (
    *("Allreduce", "Reduce_scatter", "Alltoall", "Allgatherv", "Reduce", "Bcast", "Send"),
    *("Allgather", "Alltoall, Allgather"),
)
"""Collectives that a `Sample` can measure, by their names in `Message`."""
GROWING = ("forward", "backward", "statistics", "vector_statistics")
"""The fields of `Network` that grow with the batch size."""
OPTIONAL = ("precondition", "vector_statistics", "vector_precondition")


@dataclass(frozen=True)
class Level:
    """Describe a level of the network by latency and bandwidth.

    The latency is the time of the smallest message. The bandwidth is the rate of large messages, in
    bytes per second and direction: per rank within a node, and per node between nodes.
    """

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Sample:
    """Store the times of a collective, measured while all ranks run the same collective.

    Attributes:
        ranks: the number of members of the communicator.
        nodes: the number of nodes on which the members run.
        sharing: the number of communicators that use a node's link at the same time.
        points: pairs, in ascending order, of the bytes of the whole buffer and the median time of
            the slowest rank.
        codec: the encoding; the seconds include encoding and decoding.
    """

    primitive: str
    ranks: int
    nodes: int
    sharing: int
    points: tuple[Point, ...]
    codec: str | None = None


@dataclass(frozen=True)
class Network:
    """Store the seconds of a rank's computations in a training step while all ranks compute.

    Attributes:
        batch: the number of images per rank.
        backward: the time of the backward pass without statistics.
        statistics: the additional time of a step with new factors.
        gradients: the time to read, check, clip and write back gradients.
        precondition: the time to precondition all layers on a single rank, with inverses; None: it
            is computed from `Machine.products`.
        vector_statistics: like `statistics`, for factors that are squares of vectors.
        vector_precondition: like `precondition`, for squares of vectors; None if unknown.
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
    """Store the properties of a machine from which the time of a step is predicted.

    Attributes:
        about: information for people, such as versions, date and hosts.
        sources: the sources of values that were not measured, by key ("between.bandwidth").
        ranks_per_node: the number of consecutive ranks on a node; None if all ranks share a node.
        inside: the network level inside a node.
        between: the network level between nodes; None for a single node.
        samples: measured collectives; other collectives are computed from the levels.
        decompositions: the orders of factors, ascending, and the times to decompose them, by
            preconditioner.
        hidden: the fraction of an overlapped message's time that does not slow the computation;
            less than 1 if ranks have no spare core, and negative if overlapping costs more than it
            saves.
        products: the orders of square matrices, ascending, and the rates of their products, in
            operations per second; empty if unknown.
        library: the MPI library, which determines the algorithms of collectives.
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
    library: str = "Open MPI"

    @property
    def estimated(self) -> list[str]:
        """The keys of values that were derived from other values, according to `sources`."""
        return [key for key, source in self.sources.items() if "derived" in source]

    def to_json(self) -> str:
        """Return the machine as JSON text, which `machine_from_json` can read."""
        return json.dumps(asdict(self), indent=1) + "\n"

    def network(self, model: str, batch: int) -> Network:
        """Return a model's times at `batch` images per rank, interpolated linearly.

        Beyond the measured batches, the parts of the step that grow with the batch are scaled.

        Raises:
            ValueError: the machine has no times for the model.
        """
        networks = sorted(
            (network for network in self.networks if network.model == model),
            key=lambda network: network.batch,
        )
        if not networks:
            models = ", ".join(sorted({network.model for network in self.networks})) or "none"
            raise ValueError(
                f"machine {self.name!r} has no times for model={model!r}, only for: {models}; "
                f"measure them with mpikfac calibrate --model {model}"
            )
        batches = [network.batch for network in networks]
        within = min(max(batch, batches[0]), batches[-1])
        values: dict[str, Any] = {}
        for part in asdict(networks[0]).keys() - {"model", "batch"}:
            seconds = [getattr(network, part) for network in networks]
            if None not in seconds:
                grows = batch / within if part in GROWING else 1.0
                values[part] = grows * float(np.interp(within, batches, seconds))
        return Network(model, batch, **values)

    def decomposition(self, preconditioner: str, order: int) -> float:
        """Return the seconds to decompose a factor, which grow cubically beyond the largest order.

        Raises:
            ValueError: the machine has no times for the preconditioner.
        """
        points = self.decompositions.get(preconditioner)
        if not points:
            raise ValueError(
                f"machine {self.name!r} has no times for preconditioner={preconditioner!r}, only "
                f"for: {', '.join(self.decompositions) or 'none'}"
            )
        largest = points[-1][0]
        return interpolated(points, order) * max(1.0, order / largest) ** 3


def machine_from_json(text: str | bytes) -> Machine:
    """Return the machine that a JSON text from `Machine.to_json` describes.

    Raises:
        ValueError: the text does not describe a machine; the message names the wrong key and a
            valid value.
    """
    values = _checked(files.json_of(text), Machine, "the file")
    _check_types(values, Machine)
    if (library := values.get("library", "Open MPI")) not in LIBRARIES:
        libraries = ", ".join(LIBRARIES)
        raise ValueError(f"library={reprlib.repr(library)} must be one of {libraries}")
    values["inside"] = _level(values["inside"], "inside")
    if values.get("between") is not None:
        values["between"] = _level(values["between"], "between")
    per_node = values.get("ranks_per_node")
    if per_node is not None:
        _check_count("ranks_per_node", per_node)
    if (per_node is None) != (values.get("between") is None):
        raise ValueError(
            f"ranks_per_node={per_node} and between={values.get('between')} belong together: set "
            f"both if there are several nodes, otherwise neither"
        )
    hidden = values.get("hidden", 1.0)
    if type(hidden) not in (int, float) or not -10 <= hidden <= 1:
        raise ValueError(f"hidden={reprlib.repr(hidden)} must be a number from -10 to 1")
    values["networks"] = tuple(_network(entry) for entry in _list(values, "networks"))
    values["samples"] = tuple(_sample(entry) for entry in _list(values, "samples"))
    if values.get("products"):
        values["products"] = _points(values["products"], "products")
    if not isinstance(values["decompositions"], dict):
        content = reprlib.repr(values["decompositions"])
        raise ValueError(f"decompositions is {content}, not an object with preconditioners as keys")
    values["decompositions"] = {
        preconditioner: _points(points, f"decompositions.{preconditioner}")
        for preconditioner, points in values["decompositions"].items()
    }
    for network in values["networks"]:
        if network.precondition is None and not values.get("products"):
            raise ValueError(
                f"the entry for model={network.model!r} in networks lacks 'precondition', and the "
                f"machine lacks 'products'; add one of the two"
            )
    return Machine(**values)


def load_machine(name: str) -> Machine:
    """Load the published machine called `name` or, if there is none, the JSON file of that path.

    Raises:
        ValueError: the file cannot be read, or does not describe a machine.
    """
    shipped = resources.files("mpikfac.predict") / "machines" / f"{name}.json"
    try:
        if name in published_machines():
            return machine_from_json(shipped.read_text())
        text = files.read_bytes(name, files.LIMIT, links=True)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(
            f"machine={name} is not a readable file; use one written by mpikfac calibrate, "
            f"or one of {', '.join(published_machines())}"
        ) from error
    except OSError as error:
        raise ValueError(f"machine={name} cannot be read: {files.why(error)}") from error
    try:
        return machine_from_json(text)
    except ValueError as error:
        raise ValueError(f"machine={name}: {error}") from error


def published_machines() -> list[str]:
    """Return the names of the machines that come with the package."""
    paths = (resources.files("mpikfac.predict") / "machines").iterdir()
    return sorted(file.name.removesuffix(".json") for file in paths if file.name.endswith(".json"))


def interpolated(points: Sequence[Point], at: float) -> float:
    """Return the value at `at`: linear on log-log axes between points, constant beyond."""
    x, y = np.log(np.asarray(points, float)).T
    return float(np.exp(np.interp(math.log(at), x, y)))


def fitted(points: Sequence[Point]) -> Level:
    """Fit a level's `latency + bytes / bandwidth` to `points`, minimising relative errors."""
    size, seconds = np.asarray(points, float).T
    terms = np.stack([1 / seconds, size / seconds], axis=1)
    latency, per_byte = np.linalg.lstsq(terms, np.ones(len(size)), rcond=None)[0]
    if latency <= 0:  # noise: start the line at the smallest message's time, an upper bound
        latency = min(seconds)
        per_byte = max((seconds - latency) @ size, 0.0) / (size @ size)
    # If points show only latency, the bandwidth is at most 1000 times the largest message's rate.
    per_byte = max(per_byte, seconds[-1] / size[-1] * 1e-3)
    return Level(float(latency), float(1 / per_byte))


def _level(entry: Any, key: str) -> Level:
    values = _checked(entry, Level, key)
    for name, value in values.items():
        if not _is_number(value) or value == 0:
            raise ValueError(f"{key}.{name}={reprlib.repr(value)} must be a finite number above 0")
    return Level(**values)


def _network(entry: Any) -> Network:
    values = _checked(entry, Network, "networks")
    _check_types(values, Network, "networks.")
    for key, value in values.items():
        left_out = key in OPTIONAL and value is None
        if key not in ("model", "batch") and not left_out and not _is_number(value):
            raise ValueError(f"networks.{key}={reprlib.repr(value)} must be a finite number >= 0")
    _check_count("networks.batch", values["batch"])
    return Network(**values)


def _sample(entry: Any) -> Sample:
    values = _checked(entry, Sample, "samples")
    _check_types(values, Sample, "samples.")
    values["points"] = _points(values["points"], f"samples.{values['primitive']}")
    for key in ("ranks", "nodes", "sharing"):
        _check_count(f"samples.{key}", values[key])
    if values["primitive"] not in PRIMITIVES:
        primitives = ", ".join(PRIMITIVES)
        primitive = reprlib.repr(values["primitive"])
        raise ValueError(f"samples.primitive={primitive} must be one of {primitives}")
    return Sample(**values)


def _list(values: Mapping[str, Any], key: str) -> Sequence[Any]:
    entries = values.get(key, ())
    if not isinstance(entries, (list, tuple)):
        raise ValueError(f"{key} is {reprlib.repr(entries)}, not a list")
    return entries


def _check_count(key: str, value: Any) -> None:
    if type(value) is not int or not 1 <= value <= LARGEST:
        raise ValueError(f"{key}={reprlib.repr(value)} must be a whole number >= 1")


def _checked(entry: Any, kind: Any, key: str) -> dict[str, Any]:
    """Return a JSON object with the keys of `kind`; keys with defaults can be missing."""
    if not isinstance(entry, dict):
        raise ValueError(f"{key} is {reprlib.repr(entry)}, not an object of keys and values")
    names = [spec.name for spec in fields(kind)]
    if extra := set(entry) - set(names):
        first, known_keys = reprlib.repr(min(extra)), ", ".join(names)
        raise ValueError(f"{key} has the unknown key {first}; known keys are {known_keys}")
    for spec in fields(kind):
        if spec.name not in entry and spec.default is spec.default_factory is MISSING:
            raise ValueError(f"{key} lacks the key {spec.name!r}")
    return dict(entry)


def _check_types(values: Mapping[str, Any], kind: Any, key: str = "") -> None:
    """Check the fields of a JSON object whose type is string, string or null, or object."""
    types: dict[str, tuple[Any, str]] = {
        "str": (str, "a string"),
        "str | None": ((str, type(None)), "a string or null"),
        "Mapping[str, Any]": (dict, "an object of keys and values"),
        "Mapping[str, str]": (dict, "an object of keys and values"),
    }
    for spec in fields(kind):
        expected, what = types.get(str(spec.type), (object, ""))
        if spec.name in values and not isinstance(values[spec.name], expected):
            raise ValueError(f"{key}{spec.name}={reprlib.repr(values[spec.name])} must be {what}")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= LARGEST


def _points(pairs: Any, key: str) -> tuple[Point, ...]:
    """Return pairs of positive numbers, with the first numbers in ascending order."""
    try:
        points = tuple((float(x), float(y)) for x, y in pairs)
    except (OverflowError, TypeError, ValueError):
        raise ValueError(f"{key} must be a list of pairs of numbers") from None
    rising = all(a < b for (a, _), (b, _) in zip(points, points[1:]))
    if not points or not rising or not all(0 < v <= LARGEST for pair in points for v in pair):
        raise ValueError(f"{key} must be pairs of positive numbers, with ascending first numbers")
    return points
