"""Reads the options of a run from the command line and YAML files, and checks them.

The first thing that is wrong ends the reading with one line: key, value, what is allowed.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import jsonargparse
import yaml

from mpikfac_apps.options.conflicts import check_bounds, check_conflicts, check_parts, global_batch
from mpikfac_apps.options.options import (
    OPTIONS,
    DataOptions,
    KfacOptions,
    Options,
    allowed,
    unknown,
)
from mpikfac_apps.options.strategy import training_ranks


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
    check_bounds(options)
    training = training_ranks(options, ranks)
    check_conflicts(options, training)
    options.batch = global_batch(options, training)
    check_parts(options, training)
    return options


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
            raise ValueError(f"config={path}, line {line}: {unknown(key)}")


def _explained(text: str) -> str:
    """The parser's message as one line: key, value, what is allowed."""
    wrong = re.match(r'Parser key "([^"]+)":.*?(?:Got|Given) value: (.*)', text, re.DOTALL)
    if wrong and wrong[1] in OPTIONS:
        return f"{wrong[1]}={wrong[2]} must be {allowed(wrong[1])}"
    if group := re.match(r'Parser key "(\w+)":\s*Unable to load config (.*)', text):
        return f"{group[1]}={group[2]} must be a file of options"
    if bare := re.match(r"argument --(\S+): expected one argument", text):
        kind = allowed(bare[1]) if bare[1] in OPTIONS else "a file of options"
        return f"{bare[1]} is given without a value; it must be {kind}"
    if extra := re.match(r"unrecognized arguments: (\S+)", text):
        if not extra[1].startswith("--"):
            return f"{extra[1]!r} belongs to no option; write --key value"
        return unknown(extra[1].lstrip("-").partition("=")[0])
    return " ".join(text.split())
