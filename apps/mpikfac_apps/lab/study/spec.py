"""Read a study from a file: list all of its runs, and check every option of the runs.

Every combination of the values in a matrix is a cell, which is one run of the training program.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mpikfac
from mpikfac import files
from mpikfac.plan import BASIS_EVERY
from mpikfac_apps.lab.study.measures import MEASURES, Measure, common
from mpikfac_apps.options import joints
from mpikfac_apps.options.by_epoch import ByEpoch, at_start
from mpikfac_apps.options.conflicts import pixels
from mpikfac_apps.options.documents import flattened, loaded, unknown
from mpikfac_apps.options.fields import TYPE, flat, possible
from mpikfac_apps.options.options import JOINTS, KfacOptions, Options
from mpikfac_apps.options.parse import parse
from mpikfac_apps.options.strategy import (
    coverage,
    for_machine,
    lasting_inv_update_steps,
    make_plan,
    make_strategy,
    preconditioner_of,
    skippable,
    training_ranks,
)
from mpikfac_apps.planning.budget import calls_of, foreseen
from mpikfac_apps.problems import datasets, models
from mpikfac_apps.text import MOST, number

KEYS = (
    *("name", "base", "options", "matrix", "strategies", "machine", "predict_ranks", "launcher"),
    "target",
)
LAUNCHERS = ("mpirun", "slurm")
OWN = ("run_dir", "resume", "exit_code")  # options that only the study itself sets
LEAST_SHOWN = 10  # minimum number of steps for a line of metrics
STOPPED = 75  # exit code of a run that stopped on request before it was complete

INTERVALS = ("kfac.factor_update_steps", "kfac.inv_update_steps")

OPTIONS = possible(Options)
OF_KFAC = joints.fields_of(KfacOptions)
NAMED: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd"},
    **{name: {"strategy": name} for name in mpikfac.plan.NAMED},
    "downpour": {"strategy": "downpour", "optimizer": "sgd"},
}
"""Options of the strategies that a study can name without an entry in `strategies`."""


@dataclass(frozen=True)
class Cell:
    """One run of a study.

    Attributes:
        axes: the cell's values from the matrix, other than strategy and ranks, by option.
        variant: the strategy, and the axes that differ within the study, without the seed.
        label: the cell's name in tables: variant, ranks and, in a study with several seeds, the
            seed.
        chosen: the options that the cell's strategy and axes set.
        arguments: the command line with all options of the cell, without the study's own options.
        options: the parsed and checked arguments.
        plan: the planned messages of the run.
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
    def measure(self) -> Measure:
        """The metric that the run's tests compute."""
        return MEASURES[models.network(self.options.model).task.measure]

    @property
    def directory(self) -> str:
        """A directory name that changes with any option, so different runs never share one.

        Cells without K-FAC that differ only in K-FAC's settings are the same run, except for
        `kfac.inv_update_steps`, on which the intervals of the metrics depend.
        """
        values, usual = flat(self.options), flat(Options())
        unused = ("run_dir",) if self.options.optimizer == "kfac" else ("run_dir", "kfac.")
        chosen = {
            key: value
            for key, value in values.items()
            if (key, value) not in usual.items() and not key.startswith(unused)
        }
        digest = hashlib.sha256(json.dumps([self.ranks, chosen], sort_keys=True).encode())
        return f"{slug(self.strategy)}-{self.ranks}-{digest.hexdigest()[:8]}"


@dataclass(frozen=True)
class Study:
    """A study as described by its file.

    Attributes:
        machine: the machine for which step times are predicted; None for no predictions.
        predict_ranks: the numbers of ranks for which the time to the target is predicted.
        measure: the metric that the tests of all cells compute.
        target: the test result for which times are reported; None for the value that all complete
            cells reached.
        left_out: for each combination that cannot run on its number of ranks, its label and the
            reason.
        text: the text of the file.
    """

    name: str
    launcher: str
    machine: mpikfac.predict.Machine | None
    predict_ranks: tuple[int, ...]
    measure: Measure
    target: float | None
    cells: tuple[Cell, ...]
    left_out: tuple[tuple[str, str], ...]
    text: str


def read(path: Path) -> Study:
    """Return the study that a file describes.

    Raises:
        ValueError: the file is invalid; the message is one line with the wrong value and its
            location.
    """
    try:
        text = files.read_text(path, links=True)
        content = _checked(loaded(text))
        machine = (
            mpikfac.predict.load_machine(str(content["machine"])) if content["machine"] else None
        )
        cells, left_out = _expanded(content)
        measure, target = common(cell.measure for cell in cells), content["target"]
        target = None if target is None else measure.target(target)
    except (ValueError, OSError) as error:
        raise ValueError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    return Study(
        name=str(content["name"] or path.stem),
        launcher=content["launcher"] or LAUNCHERS[0],
        machine=machine,
        predict_ranks=tuple(content["predict_ranks"] or ()),
        measure=measure,
        target=target,
        cells=tuple(cells),
        left_out=tuple(left_out),
        text=text,
    )


def slug(name: str) -> str:
    """Return a name that can be part of a path."""
    return re.sub(r"[^\w.+-]+", "-", name).strip("-.") or "study"


# -- the file ------------------------------------------------------------------------------------


def _checked(content: Any) -> dict[str, Any]:
    """Return the content of a study's file, with all keys, and with values of the right types."""
    if not isinstance(content, dict):
        raise ValueError("the file must have lines of the form `key: value`")
    for key in content:
        if key not in KEYS:
            raise ValueError(unknown(str(key), KEYS))
    for key in ("options", "strategies"):
        if not isinstance(content.setdefault(key, {}), dict):
            raise ValueError(f"{key}={content[key]} must have lines of the form `key: value`")
    for key in ("name", "base", "machine", "launcher", "target"):
        content.setdefault(key, None)
    if content["launcher"] not in (None, *LAUNCHERS):
        raise ValueError(f"launcher={content['launcher']} must be one of {', '.join(LAUNCHERS)}")
    target = content["target"]
    if target is not None and not (files.has_form(target, float) and target > 0):
        raise ValueError(f"target={target} must be a number above 0")
    if content["base"] is not None and not Path(str(content["base"])).is_file():
        raise ValueError(f"base={content['base']} is not a file")
    content["options"] = _options("options", content["options"])
    content["strategies"] = {
        str(name): _options(f"strategies.{name}", options or {})
        for name, options in content["strategies"].items()
    }
    strategies = {**NAMED, **content["strategies"]}
    content["matrices"] = [
        _axes(*named, strategies) for named in _matrices(content.get("matrix", {}))
    ]
    if content.setdefault("predict_ranks", None) is not None:
        _check_predicted(content["predict_ranks"], content["machine"])
    return content


def _options(where: str, options: Any) -> dict[str, Any]:
    if not isinstance(options, dict):
        raise ValueError(f"{where}={options} must have lines of the form `key: value`")
    chosen = flattened(options)
    for key in chosen:
        _check_option(f"{where}: ", key)
    return chosen


def _check_option(where: str, key: str) -> None:
    if key in OWN:
        raise ValueError(f"{where}{key} is set by the study itself; leave it out")
    chosen = str(key).split(".")
    of_type = chosen[0] in JOINTS or (chosen[0] == "kfac" and chosen[1:2] and chosen[1] in OF_KFAC)
    if key not in OPTIONS and not of_type:  # which keys exist in these groups depends on the type
        raise ValueError(f"{where}{unknown(str(key), OPTIONS)}")


def _check_predicted(ranks: Any, machine: Any) -> None:
    _check_list("predict_ranks", ranks)
    _check_ranks("predict_ranks", ranks)
    if not machine:
        raise ValueError(
            "predict_ranks needs machine: a file from mpikfac calibrate, or a published machine"
        )


def _matrices(content: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the name of each matrix, for use in messages, and the matrix."""
    matrices = content if isinstance(content, list) and content else [content]
    for place, matrix in enumerate(matrices, start=1):
        name = "matrix" if matrix is content else f"matrix {place}"
        if not isinstance(matrix, dict):
            raise ValueError(f"{name}={matrix} must have lines of the form `key: value`")
        yield name, matrix


def _axes(
    where: str, matrix: Mapping[str, Any], strategies: Mapping[str, Any]
) -> dict[str, list[Any]]:
    """Return a matrix's axes, strategy and ranks first, after checking every value on its own."""
    axes = {"strategy": matrix.get("strategy"), "ranks": matrix.get("ranks"), **matrix}
    for key, values in axes.items():
        _check_list(f"{where}.{key}", values)
        if key not in ("strategy", "ranks"):
            _check_option(f"{where}: ", key)
    for name in axes["strategy"]:
        if not isinstance(name, str) or name not in strategies:
            raise ValueError(f"{where}.strategy: unknown strategy {name}{_hint(name, strategies)}")
    _check_ranks(f"{where}.ranks", axes["ranks"])
    return axes


def _check_list(where: str, values: Any) -> None:
    if not isinstance(values, list) or not values:
        raise ValueError(f"{where}={values} must be a list of at least one value")
    if any(values.count(value) > 1 for value in values):
        raise ValueError(f"{where}={values} must not contain a value twice")


def _check_ranks(where: str, ranks: list[Any]) -> None:
    for count in ranks:
        if type(count) is not int or not 1 <= count <= MOST:
            raise ValueError(f"{where}: {count} must be a whole number from 1 to {MOST:,}")


def _hint(name: object, names: Mapping[str, Any] | Sequence[str]) -> str:
    close = difflib.get_close_matches(str(name), list(names), n=1)
    return f"; did you mean {close[0]}?" if close else f"; known are {', '.join(names)}"


# -- the cells -----------------------------------------------------------------------------------


def _expanded(content: Mapping[str, Any]) -> tuple[list[Cell], list[tuple[str, str]]]:
    """Return the cells, and the labels of combinations that cannot run, with the reasons.

    Raises:
        ValueError: a strategy with some values cannot run on any number of ranks in its matrix, or
            two cells have the same name.
    """
    cells: list[Cell] = []
    left_out: list[tuple[str, str]] = []
    several = _several(content["matrices"])
    for matrix in content["matrices"]:
        usable, refused = _cells_of(content, matrix, several)
        cells += usable
        left_out += refused
    labels = [cell.label for cell in cells]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise ValueError(
            f"matrix: two cells are named {twice[0]!r}; remove one, or set every key in which they "
            "differ for both cells"
        )
    return cells, left_out


def _cells_of(
    content: Mapping[str, Any], matrix: Mapping[str, list[Any]], several: Collection[str]
) -> tuple[list[Cell], list[tuple[str, str]]]:
    """Return the cells of a matrix, and combinations that cannot run, as `_expanded` does."""
    cells: list[Cell] = []
    left_out: list[tuple[str, str]] = []
    for strategy, axes in _combinations(matrix):
        usable, refused = [], []
        for ranks in matrix["ranks"]:
            variant, label = _labels(several, strategy, ranks, axes)
            own = content["strategies"].get(strategy, {})
            chosen = {**NAMED.get(strategy, {}), **own, **axes}
            try:
                run = _run_of(content, chosen, ranks)
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
    """Yield each strategy with each combination of values on the axes other than ranks."""
    others = {key: values for key, values in matrix.items() if key not in ("strategy", "ranks")}
    for strategy, *values in itertools.product(matrix["strategy"], *others.values()):
        yield strategy, dict(zip(others, values))


def _run_of(
    content: Mapping[str, Any], chosen: Mapping[str, Any], ranks: int
) -> tuple[tuple[str, ...], Options, mpikfac.plan.Plan]:
    """Return the arguments, options and plan of a run; metrics and traces cover whole intervals.

    Raises:
        ValueError: the training program would reject the options.
    """
    values = content["options"] | chosen
    arguments = [f"--config={content['base']}"] if content["base"] else []
    arguments += [f"--{key}={_word(value)}" for key, value in values.items()]
    first = parse(arguments, ranks)
    growing = [key for key in INTERVALS if key in values and values[key] is None]
    arguments += _lasting_intervals(first, ranks, growing)
    interval = shown_interval(first, ranks)
    traced = [] if growing else [f"--trace_steps={interval}"]  # a trace covers whole intervals
    arguments = [f"--log_every={interval}", *traced, *arguments]
    options = parse(arguments, ranks)
    options = replace(options, lr=options.rate)  # a report prints the rate
    if isinstance(options.batch, ByEpoch):
        raise ValueError(f"batch={options.batch} must be a single number, so steps can be compared")
    return tuple(arguments), options, plan_of(options, ranks)


def _lasting_intervals(options: Options, ranks: int, growing: Collection[str]) -> list[str]:
    """Return arguments that set K-FAC's default intervals to their final values from the start.

    By default, intervals are shorter in the first steps of a run, but a study compares whole
    intervals. The intervals in `growing`, which the study sets to null, are left as they are.
    """
    if options.optimizer != "kfac":
        return []
    kfac, arguments = options.kfac, []
    if kfac.factor_update_steps is None and "kfac.factor_update_steps" not in growing:
        arguments.append(f"--kfac.factor_update_steps={kfac.lasting_factor_update_steps}")
    if kfac.inv_update_steps is None and "kfac.inv_update_steps" not in growing:
        arguments.append(f"--kfac.inv_update_steps={inv_update_steps(options, ranks)}")
    return arguments


def plan_of(options: Options, ranks: int) -> mpikfac.plan.Plan:
    """Return the plan of a run's messages, after the first batch.

    Raises:
        ValueError: no plan exists for the options.
    """
    channels, classes = datasets.form(options.data.name, options.data.path)
    channels = channels or pixels(options.data) or 0  # for text, the number of tokens in a window
    model = models.skeleton(options.model, options.data.classes or classes, channels)
    if options.optimizer != "kfac":
        modules = [name for name, module in model.named_modules() if not any(module.children())]
        layers, others = mpikfac.layers.covered_shapes(model, mpikfac.Coverage(skip=modules))
        chosen, _ = make_strategy(options.distribution, options.kfac, ranks)
        return mpikfac.make_plan(layers, ranks, chosen.first_order(), others)
    covers = models.network(options.model).covers
    with skippable():
        layers, others = mpikfac.layers.covered_shapes(model, coverage(options.kfac, covers))
    training = training_ranks(options, ranks)
    strategy, settings = make_strategy(options.distribution, options.kfac, training)
    _, strategy = for_machine(options, (layers, others), training, strategy, settings)
    preconditioner = preconditioner_of(settings)
    plan = make_plan(options.kfac, layers, others, training, strategy, preconditioner)
    passes = (options.virtual_ranks or training) * options.accumulate
    calls = calls_of(
        *(options.model, model, options.kfac), _image(options), options.step_batch // passes
    )
    shapes = layers, others
    return foreseen(options.kfac, preconditioner, settings, shapes, plan, calls, passes).plan


def _image(options: Options) -> tuple[int, ...] | None:
    """Return the shape of an image or a window of the data; None if it is unknown."""
    usual, size = models.network(options.model).image, pixels(options.data)
    if usual is None or size is None:
        return usual
    if len(usual) == 1:
        return (size,)
    channels, _ = datasets.form(options.data.name, options.data.path)
    return (channels or usual[0], *[size] * (len(usual) - 1))


def shown_interval(options: Options, ranks: int) -> int:
    """Return the steps per line of metrics and per trace, a multiple of both K-FAC intervals."""
    interval = math.lcm(options.kfac.lasting_factor_update_steps, inv_update_steps(options, ranks))
    return interval * max(1, math.ceil(LEAST_SHOWN / interval))


def inv_update_steps(options: Options, ranks: int) -> int:
    """Return the number of steps between refreshes: set by the option, the strategy or the default.

    If the option is a schedule by epoch, its value at epoch 0 is returned.
    """
    if options.optimizer != "kfac":
        return at_start(options.kfac.inv_update_steps) or BASIS_EVERY
    training = training_ranks(options, ranks)
    strategy, settings = make_strategy(options.distribution, options.kfac, training)
    return lasting_inv_update_steps(settings, strategy)


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _several(matrices: Sequence[Mapping[str, list[Any]]]) -> set[str]:
    """Return the axes with several values in the study, or with values in only some matrices."""
    values: dict[str, list[Any]] = {}
    for matrix in matrices:
        for key, entries in matrix.items():
            distinct = values.setdefault(key, [])
            distinct += [value for value in entries if value not in distinct]
    return {
        key
        for key, distinct in values.items()
        if len(distinct) > 1 or not all(key in matrix for matrix in matrices)
    }


def _labels(
    several: Collection[str], strategy: str, ranks: int, axes: Mapping[str, Any]
) -> tuple[str, str]:
    shown = {key: value for key, value in axes.items() if key in several}
    seed = shown.pop("seed", None)
    variant = ", ".join([strategy, *(f"{short(key)} {value}" for key, value in shown.items())])
    label = f"{variant} on {number(ranks, 'rank')}"
    return variant, label if seed is None else f"{label}, seed {seed}"


def short(key: str) -> str:
    """Return an option's name without its group; for the name of a type, the group's name."""
    return key.removesuffix(f".{TYPE}").rpartition(".")[2]
