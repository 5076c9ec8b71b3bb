"""Reads the options of a run from the command line and YAML files, and checks them.

The first thing that is wrong ends the reading with one line: key, value, what is allowed.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib.util
import math
import operator
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import jsonargparse
import yaml
from torch import nn

from mpikfac import (
    KINDS,
    NAMED,
    NORMS,
    Job,
    LayerShape,
    Strategy,
    choose,
    covered_shapes,
    forward_only,
    load_machine,
    named,
    schedule,
    tuned,
    usual_rule,
)
from mpikfac_apps.options.options import DataOptions, KfacOptions, Options
from mpikfac_apps.problems.models import MODELS

COMPARE = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
CHOICES = (  # of a strategy
    *("reduction", "update", "balance", "colocate", "replicate_below", "reduce_at", "packing"),
    *("stagger", "delay", "tolerance", "sums", "ranks_per_node", "curvature_ranks"),
    *("overlap", "factor_wire", "basis_wire", "gradient_wire", "top_share"),
)
USUAL = {"solver": "inverse", "basis_every": 10}  # settings of `KFAC` that a strategy may change
WORDS = {
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    str: "a text",
    list[int]: "a list of whole numbers",
    list[str]: "a list of names",
    types.NoneType: "null",
}


def parse(argv: Sequence[str] | None, ranks: int) -> Options:
    """The checked options of a command line, for a job of `ranks` ranks; `batch` is filled in.

    Values come from the defaults, then `--config FILE`, then the rest of the command line.

    Raises:
        ValueError: something is wrong; one line that names key, value and what is allowed.
        SystemExit: code 0, after --help or --print_config.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = jsonargparse.ArgumentParser(
        prog="train_cnn.py", exit_on_error=False, allow_abbrev=False
    )
    parser.add_argument("--config", action="config", help="A YAML file of options.")
    parser.add_class_arguments(Options)
    try:
        for path in _config_files(arguments):
            _check_file(path)
        given = parser.parse_args(arguments).as_dict()
    except argparse.ArgumentError as error:
        raise ValueError(_explained(str(error))) from error
    del given["config"]
    groups = {"data": DataOptions(**given.pop("data")), "kfac": KfacOptions(**given.pop("kfac"))}
    options = Options(**given, **groups)
    _check_bounds(options)
    training = training_ranks(options, ranks)
    _check_conflicts(options, training)
    options.batch = _global_batch(options, training)
    _check_parts(options, training)
    return options


def curvature_ranks(options: Options) -> int:
    """How many of the job's ranks do not train but decompose for the others."""
    chosen, way = options.kfac.curvature_ranks, NAMED.get(options.kfac.strategy)
    if options.optimizer != "kfac" or way is None:
        return 0
    return way.choices.get("curvature_ranks", 0) if chosen is None else chosen


def training_ranks(options: Options, ranks: int) -> int:
    """How many of a job's ranks train.

    Raises:
        ValueError: none is left, or the job is to go on without some.
    """
    spared = curvature_ranks(options)
    if spared >= ranks:
        raise ValueError(
            f"kfac: curvature_ranks={spared} must be less than the number of ranks ({ranks})"
        )
    if spared and options.shrink:
        raise ValueError(f"shrink=true needs kfac.curvature_ranks=0, not {spared}")
    return ranks - spared


def strategy(
    options: KfacOptions, ranks: int, parts: int | None = None
) -> tuple[Strategy, dict[str, Any]]:
    """How K-FAC is distributed over the ranks that train, and settings that a strategy may change.

    Raises:
        ValueError: choices that do not fit together or the number of ranks.
    """
    given = {key: getattr(options, key) for key in USUAL if getattr(options, key) is not None}
    choices = {key: getattr(options, key) for key in CHOICES if getattr(options, key) is not None}
    if options.fusion is not None:
        choices["fusion"] = tuple(options.fusion) if len(options.fusion) != 1 else options.fusion[0]
    if parts is not None:
        choices["parts"] = parts
    if options.strategy == "hybrid":
        choices["workers"] = _workers(options, ranks)
    else:
        for key in ("workers", "fraction"):
            if getattr(options, key) is not None:
                raise ValueError(
                    f"{key}={getattr(options, key)} needs strategy=hybrid, not {options.strategy}"
                )
    if options.strategy == "auto":
        if options.machine is None or choices:
            raise ValueError(
                f"strategy=auto needs machine, and none of its own choices; machine is "
                f"{options.machine}, choices are {', '.join(choices) or 'none'}"
            )
        choices["workers"] = ranks  # until the model is known: see `for_machine`
        return Strategy(**choices), {**USUAL, **given}
    chosen, settings = named(options.strategy, ranks, **choices)
    settings = {**USUAL, **settings, **given}
    if settings["basis_every"] % chosen.stagger:
        raise ValueError(
            f"basis_every={settings['basis_every']} must be a multiple of stagger={chosen.stagger}"
        )
    if options.top_share is not None and chosen.gradient_wire != "top-k":
        raise ValueError(
            f"top_share={options.top_share} needs gradient_wire=top-k, not {chosen.gradient_wire}"
        )
    return chosen, settings


def for_machine(
    options: Options, model: nn.Module, ranks: int, strategy: Strategy, settings: dict[str, Any]
) -> tuple[str, Strategy]:
    """The strategy as the machine would have it where nothing else is asked, and its name.

    Raises:
        ValueError: the file is no machine, or the machine was not measured with this network.
    """
    if options.kfac.machine is None:
        return options.kfac.strategy, strategy
    machine = load_machine(options.kfac.machine)
    every, solver = (options.kfac.factor_every, settings["basis_every"]), settings["solver"]
    job = Job(options.model, (options.batch or ranks) // ranks, *every)
    layers, others = covered_shapes(model, options.kfac.skip, **covering(options.kfac))
    if options.kfac.strategy == "auto":
        return choose(layers, others, ranks, machine, job, solver)
    chosen = tuned(strategy, layers, others, ranks, machine, job, solver)
    asked = {
        key: getattr(strategy, key)
        for key in ("fusion", "replicate_below")
        if getattr(options.kfac, key) is not None
    }
    return options.kfac.strategy, dataclasses.replace(chosen, **asked)


def covering(options: KfacOptions) -> dict[str, Any]:
    """What K-FAC covers, and in what form, by the names of `KFAC`'s settings."""

    def rule(layer: LayerShape) -> LayerShape:
        chosen = {key: getattr(options, key) for key in ("sharing", "largest", "rank")}
        layer = dataclasses.replace(usual_rule(layer), **chosen)
        return forward_only(layer) if options.fisher == "forward-only" else layer

    return {"covers": {**KINDS, **(NORMS if options.norms else {})}, "rule": rule}


def _workers(options: KfacOptions, ranks: int) -> int:
    return Strategy.hybrid(ranks, options.workers, options.fraction).workers


def learning_rate(options: Options, steps_per_epoch: int, ranks: int) -> Callable[[int], float]:
    """The learning rate as a function of the step, for a run that began on `ranks` ranks."""
    peak = options.lr * (ranks if options.scale_lr else 1)
    rate = schedule.constant(peak)
    if options.schedule == "step":
        at = [epoch * steps_per_epoch for epoch in options.decay_epochs]
        rate = schedule.step_decay(peak, at, options.decay_factor)
    elif options.schedule == "linear":
        rate = schedule.linear(peak, 0.0, options.epochs * steps_per_epoch)
    warm = round(options.warmup_epochs * steps_per_epoch)
    if warm:
        rate = schedule.warmup(rate, warm, 1 / ranks if options.scale_lr else 1 / (warm + 1))
    return rate


def _config_files(arguments: Sequence[str]) -> list[str]:
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--config", action="append", default=[])
    return parser.parse_known_args(arguments)[0].config


def _check_file(path: str) -> None:
    """Refuses what the YAML parser would let pass: duplicate keys, and groups that are values."""
    try:
        document = composed(Path(path).read_text(), f"config={path}, ")
    except OSError as error:
        raise ValueError(f"config={path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"config={path} is no YAML: {error.reason}") from error
    _check_keys(document, path, "")


def composed(text: str, where: str = "") -> yaml.Node | None:
    """A YAML document in which every key is given once, nested or dotted.

    Raises:
        ValueError: it is none; one line that begins with `where`.
    """
    try:
        document = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ValueError(f"{where}line {line} is no YAML: {error.problem}") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ValueError(f"{where}line {line} is no YAML: {error.reason}") from error
    seen = set()
    for key, line in _keys(document):
        if key in seen:
            raise ValueError(f"{where}line {line}: {key} is given twice; give it once")
        seen.add(key)
    return document


def _keys(node: yaml.Node | None, group: str = "") -> Iterator[tuple[str, int]]:
    """Dotted key and line of all that a document gives, groups included."""
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            key = f"{group}{name.value}"
            yield key, name.start_mark.line + 1
            yield from _keys(value, f"{key}.")


def _check_keys(node: yaml.Node | None, path: str, group: str) -> None:
    if not isinstance(node, yaml.MappingNode):
        name = group.rstrip(".") or "the file"
        raise ValueError(f"config={path}: {name} must hold lines of the form `key: value`")
    for name, value in node.value:
        key = group + str(name.value)
        if any(known.startswith(f"{key}.") for known in OPTIONS):
            _check_keys(value, path, f"{key}.")
        elif key not in OPTIONS:
            line = name.start_mark.line + 1
            raise ValueError(f"config={path}, line {line}: {_unknown(key)}")


def _unknown(key: str) -> str:
    close = difflib.get_close_matches(key, OPTIONS, n=1, cutoff=0.8)
    if close:
        return f"unknown key {key}; did you mean {close[0]}?"
    group = key.rpartition(".")[0]
    inside = [known for known in OPTIONS if known.rpartition(".")[0] == group]
    return f"unknown key {key}; known are {', '.join(inside or OPTIONS)}"


def _explained(text: str) -> str:
    """The parser's message as one line: key, value, what is allowed."""
    wrong = re.match(r'Parser key "([^"]+)":.*?(?:Got|Given) value: (.*)', text, re.DOTALL)
    if wrong and wrong[1] in OPTIONS:
        return f"{wrong[1]}={wrong[2]} must be {_allowed(wrong[1])}"
    if group := re.match(r'Parser key "(\w+)":\s*Unable to load config (.*)', text):
        return f"{group[1]}={group[2]} must be a file of options"
    if bare := re.match(r"argument --(\S+): expected one argument", text):
        kind = _allowed(bare[1]) if bare[1] in OPTIONS else "a file of options"
        return f"{bare[1]} is given without a value; it must be {kind}"
    if extra := re.match(r"unrecognized arguments: (\S+)", text):
        if not extra[1].startswith("--"):
            return f"{extra[1]!r} belongs to no option; write --key value"
        return _unknown(extra[1].lstrip("-").partition("=")[0])
    return " ".join(text.split())


def _options(group: type, prefix: str = "") -> Iterator[tuple[str, Any, Sequence[str]]]:
    """Dotted key, type and bounds of every option."""
    hints = typing.get_type_hints(group)
    for option in dataclasses.fields(group):
        kind = hints[option.name]
        if dataclasses.is_dataclass(kind):
            yield from _options(kind, f"{prefix}{option.name}.")
        else:
            yield prefix + option.name, kind, option.metadata.get("bounds", ())


OPTIONS = {key: (kind, bounds) for key, kind, bounds in _options(Options)}


def _allowed(key: str) -> str:
    """What an option may be, in words."""
    kind, bounds = OPTIONS[key]
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    first, *others = (
        f"one of {', '.join(typing.get_args(k))}" if typing.get_origin(k) is Literal else WORDS[k]
        for k in kinds
    )
    return " or ".join([" ".join([first, " and ".join(bounds)]).strip(), *others])


def _check_bounds(options: Options) -> None:
    for key, (_, bounds) in OPTIONS.items():
        value = operator.attrgetter(key)(options)
        for number in value if isinstance(value, list) else [value]:
            if not isinstance(number, int | float):
                continue
            inside = (COMPARE[sign](number, float(limit)) for sign, limit in map(str.split, bounds))
            if not math.isfinite(number) or not all(inside):
                raise ValueError(f"{key}={value} must be {_allowed(key)}")


def _check_conflicts(options: Options, ranks: int) -> None:
    """Refuses values that are right by themselves but not together."""
    if options.model not in MODELS:
        raise ValueError(f"model={options.model} is unknown; try one of {', '.join(MODELS)}")
    if options.data.name == "cifar10" and options.data.path is None:
        raise ValueError(
            "data.path=null: cifar10 needs the directory in which its archive was unpacked"
        )
    for key, name in (("path", "cifar10"), ("size", "synthetic"), ("classes", "synthetic")):
        value = getattr(options.data, key)
        if value is not None and options.data.name != name:
            raise ValueError(f"data.{key}={value} needs data.name={name}, not {options.data.name}")
    _check_schedule(options)
    if options.optimizer == "kfac":
        try:
            strategy(options.kfac, ranks, options.parts)
        except ValueError as error:
            raise ValueError(f"kfac: {error}") from error
    if options.resume not in ("never", "auto") and not Path(options.resume).is_dir():
        raise ValueError(f"resume={options.resume} must be never, auto or a checkpoint's directory")
    if options.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ValueError("tensorboard=true needs the package tensorboard, which is not installed")


def _check_parts(options: Options, ranks: int) -> None:
    parts, batch = options.parts, options.batch
    if parts and parts % ranks:
        raise ValueError(f"parts={parts} must be a multiple of the number of ranks ({ranks})")
    if parts and batch and batch % parts:
        raise ValueError(f"parts={parts} must divide batch={batch}")


def _check_schedule(options: Options) -> None:
    epochs = options.decay_epochs
    if (options.schedule == "step") != bool(epochs):
        raise ValueError(
            f"decay_epochs={epochs} with schedule={options.schedule}: step needs epochs at which "
            "to decay, and the other schedules take []"
        )
    if options.schedule != "step" and options.decay_factor != Options.decay_factor:
        raise ValueError(
            f"decay_factor={options.decay_factor} needs schedule=step, not {options.schedule}"
        )
    if any(later <= earlier for earlier, later in zip(epochs, epochs[1:])):
        raise ValueError(f"decay_epochs={epochs} must increase")
    if options.warmup_epochs >= options.epochs:
        raise ValueError(
            f"warmup_epochs={options.warmup_epochs} must be less than epochs={options.epochs}"
        )


def _global_batch(options: Options, ranks: int) -> int:
    batch, per_rank = options.batch, options.batch_per_rank
    if (batch is None) == (per_rank is None):
        raise ValueError(
            f"batch={batch} and batch_per_rank={per_rank}: give one of them, and null for the other"
        )
    total = batch or ranks * (per_rank or 0)
    if total % ranks:
        lower = total // ranks * ranks
        raise ValueError(
            f"batch={total} must be a multiple of the number of ranks ({ranks}); "
            f"try {lower or ranks} or {lower + ranks}"
        )
    return total
