"""A study as a value: the runs that a file asks for, each with all of its options checked.

Every combination of the values in `matrix` is a cell: one run of the training program.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

import mpikfac
from mpikfac_apps.options.options import OPTIONS, Options
from mpikfac_apps.options.parse import composed, parse
from mpikfac_apps.options.strategy import (
    USUAL,
    coverage,
    for_machine,
    make_strategy,
    training_ranks,
)
from mpikfac_apps.problems import models
from mpikfac_apps.text import number

KEYS = ("name", "base", "options", "matrix", "strategies", "machine", "launcher", "target")
LAUNCHERS = ("mpirun", "slurm")
OWN = ("run_dir", "resume", "stop_code")  # options that the study itself gives each run
LEAST_SHOWN = 10  # steps, of which one line of metrics tells
STOPPED = 75  # exit code of a run that was asked to stop before its end

NAMED: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd"},
    **{name: {"kfac.strategy": name} for name in mpikfac.plan.NAMED},
    "hybrid": {"kfac.strategy": "hybrid", "kfac.fraction": 0.5},
}
"""Options of the strategies that a study may name without saying what they are."""


@dataclass(frozen=True)
class Cell:
    """One run of a study.

    Attributes:
        axes: values of the matrix beside strategy and ranks, by option.
        variant: strategy and those axes in which the study's cells differ, but for the seed.
        label: the cell's name in tables: variant, ranks and, if there are several, the seed.
        chosen: options that its strategy and its axes set.
        arguments: the command line of all its options, but for the study's own.
        options: the same, checked.
        plan: how it communicates.
    """

    strategy: str
    ranks: int
    axes: Mapping[str, Any]
    variant: str
    label: str
    chosen: Mapping[str, Any]
    arguments: tuple[str, ...]
    options: Options
    plan: mpikfac.plan.Plan

    @property
    def directory(self) -> str:
        """A name that changes with any option: whatever is there belongs to this cell.

        Cells without K-FAC that differ in its settings are one run, but for `kfac.basis_every`,
        which its metrics go by.
        """
        given, usual = (flattened(dataclasses.asdict(o)) for o in (self.options, Options()))
        unused = ("run_dir",) if self.options.optimizer == "kfac" else ("run_dir", "kfac.")
        chosen = {
            key: value
            for key, value in given.items()
            if value != usual[key] and not key.startswith(unused)
        }
        digest = hashlib.sha256(json.dumps([self.ranks, chosen], sort_keys=True).encode())
        return f"{slug(self.strategy)}-{self.ranks}-{digest.hexdigest()[:8]}"


@dataclass(frozen=True)
class Study:
    """What a file asks for.

    Attributes:
        machine: to predict step times for; None for no predictions.
        target: test accuracy (0 to 1) whose time is reported; None: what every cell reached.
        left_out: labels of combinations that cannot run on their number of ranks, and why.
        text: the file.
    """

    name: str
    launcher: str
    machine: mpikfac.predict.Machine | None
    target: float | None
    cells: tuple[Cell, ...]
    left_out: tuple[tuple[str, str], ...]
    text: str


def read(path: Path) -> Study:
    """The study of a file.

    Raises:
        ValueError: something is wrong; one line that says what and where.
    """
    try:
        text = path.read_text()
        asked = _checked(_loaded(text))
        machine = mpikfac.predict.load_machine(str(asked["machine"])) if asked["machine"] else None
        cells, left_out = _expanded(asked)
    except (ValueError, OSError) as error:
        raise ValueError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    return Study(
        name=str(asked["name"] or path.stem),
        launcher=asked["launcher"] or LAUNCHERS[0],
        machine=machine,
        target=asked["target"],
        cells=tuple(cells),
        left_out=tuple(left_out),
        text=text,
    )


def flattened(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Options with dotted keys, from mappings within mappings."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping):
            flat |= flattened(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def slug(name: str) -> str:
    """A name as a part of a path."""
    return re.sub(r"[^\w.+-]+", "-", name).strip("-.") or "study"


# -- the file ------------------------------------------------------------------------------------


def _loaded(text: str) -> Any:
    composed(text)
    return yaml.safe_load(text)


def _checked(asked: Any) -> dict[str, Any]:
    """What the file says, all keys there and of the right kind."""
    if not isinstance(asked, dict):
        raise ValueError("the file must hold lines of the form `key: value`")
    for key in asked:
        if key not in KEYS:
            raise ValueError(f"unknown key {key}{_hint(str(key), KEYS)}")
    for key in ("options", "matrix", "strategies"):
        if not isinstance(asked.setdefault(key, {}), dict):
            raise ValueError(f"{key}={asked[key]} must hold lines of the form `key: value`")
    for key in ("name", "base", "machine", "launcher", "target"):
        asked.setdefault(key, None)
    if asked["launcher"] not in (None, *LAUNCHERS):
        raise ValueError(f"launcher={asked['launcher']} must be one of {', '.join(LAUNCHERS)}")
    target = asked["target"]
    if target is not None and not (isinstance(target, int | float) and 0 < target <= 1):
        raise ValueError(f"target={target} must be a fraction above 0 and at most 1")
    if asked["base"] is not None and not Path(str(asked["base"])).is_file():
        raise ValueError(f"base={asked['base']} is no file")
    asked["options"] = _options("options", asked["options"])
    asked["strategies"] = {
        name: _options(f"strategies.{name}", options or {})
        for name, options in asked["strategies"].items()
    }
    asked["matrix"] = _axes(asked["matrix"], {**NAMED, **asked["strategies"]})
    return asked


def _options(where: str, given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise ValueError(f"{where}={given} must hold lines of the form `key: value`")
    flat = flattened(given)
    for key in flat:
        _check_option(f"{where}: ", key)
    return flat


def _check_option(where: str, key: str) -> None:
    if key in OWN:
        raise ValueError(f"{where}{key} is given by the study itself; leave it out")
    if key not in OPTIONS:
        raise ValueError(f"{where}unknown key {key}{_hint(key, OPTIONS)}")


def _axes(matrix: Mapping[str, Any], strategies: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The matrix with strategy and ranks first, every value checked that can be by itself."""
    axes = {"strategy": matrix.get("strategy"), "ranks": matrix.get("ranks"), **matrix}
    for key, values in axes.items():
        if not isinstance(values, list) or not values:
            raise ValueError(f"matrix.{key}={values} must be a list of at least one value")
        if any(values.count(value) > 1 for value in values):
            raise ValueError(f"matrix.{key}={values} must not name a value twice")
        if key not in ("strategy", "ranks"):
            _check_option("matrix: ", key)
    for name in axes["strategy"]:
        if name not in strategies:
            raise ValueError(f"matrix.strategy: unknown strategy {name}{_hint(name, strategies)}")
    for ranks in axes["ranks"]:
        if type(ranks) is not int or ranks < 1:
            raise ValueError(f"matrix.ranks: {ranks} must be a whole number, at least 1")
    return axes


def _hint(name: object, known: Mapping[str, Any] | Sequence[str]) -> str:
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f"; did you mean {close[0]}?" if close else f"; known are {', '.join(known)}"


# -- the cells -----------------------------------------------------------------------------------


def _expanded(asked: Mapping[str, Any]) -> tuple[list[Cell], list[tuple[str, str]]]:
    """The cells, and what was left out.

    Raises:
        ValueError: options that no number of ranks of the study can use.
    """
    cells: list[Cell] = []
    left_out: list[tuple[str, str]] = []
    for strategy, axes in _combinations(asked["matrix"]):
        usable, refused = [], []
        for ranks in asked["matrix"]["ranks"]:
            variant, label = _labels(asked["matrix"], strategy, ranks, axes)
            chosen = _chosen(strategy, asked["strategies"].get(strategy, {}) | axes)
            try:
                run = _run_of(asked, chosen, ranks)
            except ValueError as error:
                refused.append((label, str(error)))
                continue
            usable.append(Cell(strategy, ranks, axes, variant, label, chosen, *run))
        if not usable:
            label, why = refused[-1]
            raise ValueError(f"{label}: {why}")
        cells += usable
        left_out += refused
    return cells, left_out


def _combinations(matrix: Mapping[str, list[Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each strategy with each combination of the axes beside the ranks."""
    others = {key: values for key, values in matrix.items() if key not in ("strategy", "ranks")}
    for strategy, *values in itertools.product(matrix["strategy"], *others.values()):
        yield strategy, dict(zip(others, values))


def _chosen(strategy: str, own: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a strategy: what is known by its name, where the study does not say otherwise."""
    known = dict(NAMED.get(strategy, {}))
    if "kfac.workers" in own:
        known.pop("kfac.fraction", None)
    return known | own


def _run_of(
    asked: Mapping[str, Any], chosen: Mapping[str, Any], ranks: int
) -> tuple[tuple[str, ...], Options, mpikfac.plan.Plan]:
    """Arguments, options and plan of a run; its metrics and trace are over whole intervals.

    Raises:
        ValueError: the training program would refuse them.
    """
    given = asked["options"] | chosen
    arguments = [f"--config={asked['base']}"] if asked["base"] else []
    arguments += [f"--{key}={_word(value)}" for key, value in given.items()]
    interval = shown_interval(parse(arguments, ranks), ranks)
    arguments = [f"--log_every={interval}", f"--trace_steps={interval}", *arguments]
    options = parse(arguments, ranks)
    return tuple(arguments), options, _plan_of(options, ranks)


def _plan_of(options: Options, ranks: int) -> mpikfac.plan.Plan:
    """The plan by which a run communicates.

    Raises:
        ValueError: there is none.
    """
    channels = 1 if options.data.name == "digits" else 3
    with torch.device("meta"):  # shapes without numbers
        model = models.build(options.model, options.data.classes or 10, channels)
    if options.optimizer != "kfac":
        every = [name for name, module in model.named_modules() if not any(module.children())]
        layers, others = mpikfac.layers.covered_shapes(model, mpikfac.Coverage(skip=every))
        strategy = mpikfac.Strategy.mem_opt(parts=options.parts)
        return mpikfac.make_plan(layers, ranks, strategy, others)
    layers, others = mpikfac.layers.covered_shapes(model, coverage(options.kfac))
    training = training_ranks(options, ranks)
    strategy, settings = make_strategy(options.kfac, training, options.parts)
    _, strategy = for_machine(options, model, training, strategy, settings)
    return mpikfac.make_plan(layers, training, strategy, others, settings["solver"])


def shown_interval(options: Options, ranks: int) -> int:
    """Steps of a line of metrics and of a trace: whole intervals between two decompositions."""
    every = basis_every(options, ranks)
    return every * max(1, math.ceil(LEAST_SHOWN / every))


def basis_every(options: Options, ranks: int) -> int:
    """Steps between two decompositions, by option, strategy or, without K-FAC, as usual."""
    if options.optimizer != "kfac":
        return options.kfac.basis_every or USUAL["basis_every"]
    training = training_ranks(options, ranks)
    return make_strategy(options.kfac, training, options.parts)[1]["basis_every"]


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _labels(
    matrix: Mapping[str, list[Any]], strategy: str, ranks: int, axes: Mapping[str, Any]
) -> tuple[str, str]:
    several = {key: value for key, value in axes.items() if len(matrix[key]) > 1}
    seed = several.pop("seed", None)
    variant = ", ".join([strategy, *(f"{short(key)} {value}" for key, value in several.items())])
    label = f"{variant} on {number(ranks, 'rank')}"
    return variant, label if seed is None else f"{label}, seed {seed}"


def short(key: str) -> str:
    """An option's name without its group."""
    return key.rpartition(".")[2]
