"""Read the options of a program from the command line and, for training, from YAML files.

The first mistake ends the reading with a single line: key, value, and the allowed values.
"""

from __future__ import annotations

import argparse
import json
import re
import reprlib
import sys
import textwrap
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import jsonargparse

from mpikfac.files import HUGE
from mpikfac_apps.options import by_epoch
from mpikfac_apps.options.documents import check_file, nested, unknown
from mpikfac_apps.options.fields import REQUIRED, Leaf, build, leaves

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Group = TypeVar("Group", bound="DataclassInstance")
Usual = Callable[[type, Mapping[str, Any]], Mapping[str, Any]]
HELP = ("-h", "--help", "--help_all", "--print_config")


@dataclass(frozen=True)
class CommandLine(Generic[Group]):
    """The command line of a program: the arguments of `read`."""

    program: str
    group: type[Group]
    basic: Collection[str] = ()
    files: bool = False
    usual: Usual | None = None

    def read(self, argv: Sequence[str] | None, kept: Mapping[str, Any] | None = None) -> Group:
        """Return the options of a command line; see `read`."""
        return read(
            *(self.program, self.group, argv),
            basic=self.basic,
            files=self.files,
            usual=self.usual,
            kept=kept,
        )

    def answer(self, arguments: Sequence[str]) -> None:
        """Print help if the arguments ask for help; refuse names of options that do not exist.

        A refusal reads no values and no files.

        Raises:
            ValueError: no option has a name; a single line names the nearest options.
            SystemExit: code 0, after help.
        """
        names = _names(arguments)
        if not set(HELP).isdisjoint(names):
            self.read(arguments)
        options = {leaf.key: leaf for leaf in leaves(self.group)}
        for name in names:
            key = name.removeprefix("--").removesuffix("+")  # --key+ adds to a list
            known = key in options or (self.files and key == "config")
            if name.startswith("--") and not known:
                raise ValueError(_unrecognised(name, options))


class Help(argparse.HelpFormatter):
    """Lay out help without a line break inside a name such as comm-opt."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


def read(
    program: str,
    group: type[Group],
    argv: Sequence[str] | None,
    *,
    basic: Collection[str] = (),
    files: bool = False,
    usual: Usual | None = None,
    kept: Mapping[str, Any] | None = None,
) -> Group:
    """Return the options of a command line as the dataclass `group`.

    Values come from the defaults, then from `usual`, then from `kept`, then from files, then from
    the rest of the command line.

    Args:
        program: the name of the program, such as "mpikfac plan".
        argv: the arguments; None for the arguments of the process.
        basic: the options that --help shows; --help_all shows all options. Without basic options,
            --help shows all options.
        files: whether --config FILE names YAML files of options.
        usual: returns, for `group` and the values that are given by key, the values that replace
            defaults.
        kept: options by key, as in a YAML file; needs `files`.

    Raises:
        ValueError: an option is wrong; a single line names key, value and the allowed values.
        SystemExit: code 0, after help.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    options = {leaf.key: leaf for leaf in leaves(group)}
    if "--help_all" in arguments:
        arguments, basic = ["--help"], ()
    brief = basic and not {"-h", "--help"}.isdisjoint(arguments)
    hidden = [key for key in options if brief and key not in basic]
    parser = _parser(program, group, hidden, files)
    for argument in arguments:
        if re.search(r"\d{300}", argument):  # more digits than a float and a path's name may have
            short = reprlib.repr(argument)
            raise ValueError(f"{short}: a number must lie within ±{HUGE:,}")
    try:
        for path in _config_files(arguments) if files else ():
            check_file(path, options)
        if kept:  # a value that the arguments replace may be wrong
            left = {key: v for key, v in kept.items() if f"--{key}" not in _names(arguments)}
            arguments = [f"--config={json.dumps(nested(left))}", *arguments]
        replaced = usual(group, _given(parser, arguments)) if usual else {}
        parser.set_defaults(dict(replaced))
        values = vars(parser.parse_args(arguments).as_flat())
    except argparse.ArgumentError as error:
        raise ValueError(_explained(str(error), options)) from error
    values |= {key: value for key, value in replaced.items() if values[key] is None}
    return build(group, {key: _value(option, values[key]) for key, option in options.items()})


def _given(parser: jsonargparse.ArgumentParser, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the values by key that command line and files give; null gives nothing."""
    asked = [argument for argument in arguments if argument.partition("=")[0] not in HELP]
    given = vars(parser.parse_args(asked, defaults=False).as_flat())
    return {key: value for key, value in given.items() if value is not None}


def _names(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without values."""
    return [argument.partition("=")[0] for argument in takewhile("--".__ne__, arguments)]


def _value(option: Leaf, raw: Any) -> Any:
    """Return the value of an option, checked.

    Raises:
        ValueError: the value is missing or out of bounds.
    """
    if option.default is REQUIRED and raw in (None, []):
        name = option.key if option.positional else f"--{option.key}"
        raise ValueError(f"{name} is missing: {option.help}")
    try:
        value = option.read(raw) if option.read and isinstance(raw, str) else raw
    except ValueError as error:
        raise ValueError(f"{option.key}: {error}") from error
    if option.scheduled and isinstance(raw, str):
        try:
            value = by_epoch.read(raw, option.kind)
        except ValueError as error:
            raise ValueError(f"{option.key}={raw} must be {option.allowed}") from error
    option.check(value)
    return value


def _parser(
    program: str, group: type, hidden: Collection[str], files: bool
) -> jsonargparse.ArgumentParser:
    about = (group.__doc__ or "").partition("\n")[0]
    named = ["[--key value ...]"] if any(not leaf.positional for leaf in leaves(group)) else []
    parser = jsonargparse.ArgumentParser(
        prog=program,
        usage=" ".join([program, *_placeholders(group), *named]),
        description=about,
        formatter_class=Help,  # types are in words
        exit_on_error=False,
        allow_abbrev=False,
    )
    if files:
        text = "a YAML file of options; options behind --config FILE override the file"
        parser.add_argument("--config", action="config", metavar="FILE", help=text)
        for action in parser._actions:
            if "--print_config" in action.option_strings:
                action.metavar, action.help = "", "print all options as YAML and exit"
    if hidden:
        text = f"show this help message with {len(hidden)} more options and exit"
        parser.add_argument("--help_all", action="store_true", help=text)
    sections: dict[str, Any] = {about.rstrip("."): parser}
    for leaf in leaves(group):
        if leaf.section not in sections:
            sections[leaf.section] = parser.add_argument_group(leaf.section)
        name = leaf.key if leaf.positional else f"--{leaf.key}"
        sections[leaf.section].add_argument(name, **_settings(leaf, leaf.key in hidden))
    return parser


def _placeholders(group: type) -> Iterator[str]:
    """Yield the arguments that must be given, for the line of usage."""
    for leaf in leaves(group):
        if leaf.positional:
            yield leaf.key.upper() + (" ..." if leaf.is_list else "")
        elif leaf.default is REQUIRED:
            yield f"--{leaf.key} {_placeholder(leaf)}"


def _placeholder(leaf: Leaf) -> str:
    """Return the word for an option's value in help."""
    return leaf.key.rpartition(".")[2].upper()


def _settings(leaf: Leaf, hidden: bool) -> dict[str, Any]:
    """Return the arguments of `add_argument`."""
    settings: dict[str, Any] = {"type": leaf.kind | str if leaf.scheduled else leaf.kind}
    if leaf.default is not REQUIRED:
        settings["default"] = leaf.default
    elif leaf.positional and leaf.is_list:
        settings |= {"nargs": "+", "type": typing.get_args(leaf.kind)[0]}
    elif not leaf.positional:
        settings |= {"type": leaf.kind | None, "default": None}  # `_value` says what is missing
    if leaf.is_flag:
        settings |= {"nargs": "?", "const": True}
    elif not (leaf.positional or leaf.is_list or leaf.is_choice):
        settings["metavar"] = _placeholder(leaf)
    allowed = "" if leaf.kind is str or leaf.is_choice else f"{leaf.allowed}; "
    needed = leaf.default is REQUIRED
    default = "required" if needed else f"default: {leaf.usual or _word(settings['default'])}"
    about = f"{leaf.help.rstrip('.')} ({allowed}{default})".replace("%", "%%")
    return settings | {"help": argparse.SUPPRESS if hidden else about}


def _word(value: object) -> str:
    """Return a value in the spelling of the command line."""
    return value if isinstance(value, str) else json.dumps(value)


def _config_files(arguments: Sequence[str]) -> list[str]:
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--config", action="append", default=[])
    return parser.parse_known_args(arguments)[0].config


def _explained(text: str, options: Mapping[str, Leaf]) -> str:
    """Return the parser's message as one line: key, value, and the allowed values."""
    wrong = re.match(r'Parser key "([^"]+)":.*?(?:Got|Given) value: (.*)', text, re.DOTALL)
    if wrong and wrong[1] in options:
        return f"{wrong[1]}={wrong[2]} must be {options[wrong[1]].allowed}"
    if bare := re.match(r"argument --(\S+): expected one argument", text):
        kind = options[bare[1]].allowed if bare[1] in options else "a file of options"
        return f"{bare[1]} is given without a value; it must be {kind}"
    if extra := re.match(r"unrecognized arguments: (\S+)", text):
        return _unrecognised(extra[1], options)
    return " ".join(text.split())


def _unrecognised(argument: str, options: Collection[str]) -> str:
    """Return the message about an argument that is no option."""
    if not argument.startswith("--"):
        return f"{argument!r} belongs to no option; write --key value"
    key = argument.lstrip("-").partition("=")[0]
    if key in options:
        return f"{argument} needs no name; write the value of {key} alone"
    if inside := [option for option in options if option.startswith(f"{key}.")]:
        return f"{key} is a group of options; give one of them, such as --{inside[0]}"
    return unknown(key, options)
