"""Read the options of a program from the command line and, for training, from YAML files.

Reading stops at the first mistake, with a one-line message: key, value, and allowed values.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import reprlib
import sys
import textwrap
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import jsonargparse

from mpikfac.files import HUGE
from mpikfac_apps.options import by_epoch
from mpikfac_apps.options.documents import unknown
from mpikfac_apps.options.fields import REQUIRED, TYPE, Leaf, Types, build, leaves, possible
from mpikfac_apps.options.sources import (
    CONFIG,
    OptionSource,
    Presets,
    belongs,
    given,
    kept_options,
    keys_of,
    of_arguments,
    settled,
)
from mpikfac_apps.text import is_own

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Group = TypeVar("Group", bound="DataclassInstance")
Usual = Callable[[type, Mapping[str, Any]], Mapping[str, Any]]
HELP = ("-h", "--help", "--print_config")
HELP_ALL = {"--help_all": "--help"}
NAME = "NAME"
"""The placeholder for the name of a type in help."""


@dataclass(frozen=True)
class CommandLine(Generic[Group]):
    """The command line of a program.

    Attributes:
        program: the name of the program, such as "mpikfac plan".
        group: the dataclass of the options.
        basic: the options that --help shows, while --help_all shows all of them; if empty, --help
            shows all.
        files: whether --config FILE names YAML files of options.
        usual: a function of `group` and of the values that a user sets; it returns, by full key,
            the values that replace defaults and nulls.
        presets: the sets of values that an option selects by name, such as the named strategies.
    """

    program: str
    group: type[Group]
    basic: Collection[str] = ()
    files: bool = False
    usual: Usual | None = None
    presets: Presets | None = None

    def read(
        self, argv: Sequence[str] | None = None, kept: Mapping[str, Any] | None = None
    ) -> Group:
        """Return the options of a command line.

        Values come from the defaults, `usual`, a preset, `kept`, files, and the rest of the command
        line; later sources override earlier ones (see `sources`).

        Args:
            argv: the arguments; None for those of the process.
            kept: options by key, as in a YAML file; requires `files`.

        Raises:
            ValueError: an option is invalid; the message is a line with key, value and allowed
                values.
            SystemExit: code 0, after help.
        """
        arguments = sys.argv[1:] if argv is None else list(argv)
        _check_digits(arguments)
        sources = of_arguments([HELP_ALL.get(text, text) for text in arguments], self.files)
        if kept:
            sources.insert(0, kept_options(kept))
        settled(self.group, sources, self.presets)  # replaces names such as `sync` by full keys
        usual = self.usual(self.group, given(sources)) if self.usual else {}
        of_usual = OptionSource(usual)
        types, preset = settled(self.group, [of_usual, *sources], self.presets)
        usual = of_usual.values
        if kept:  # a stored value that the arguments replace is not checked
            sources[0].discard(given(sources[1:]))
        options = {leaf.key: leaf for leaf in leaves(self.group, types)}
        parser = self._parser(options, self._hidden(options, arguments))
        parser.set_defaults({k: v for k, v in {**preset, **usual}.items() if k in options})
        values = self._parsed(parser, sources, types)
        values |= {key: v for key, v in usual.items() if key in values and values[key] is None}
        read = {key: _value(leaf, values[key]) for key, leaf in options.items()}
        return build(self.group, read, keys_of(sources))

    def answer(self, arguments: Sequence[str]) -> None:
        """Print help if requested; raise an error for names of options that do not exist.

        Values are not checked, and files are not read.

        Raises:
            ValueError: an option does not exist; the message is one line with similar names.
            SystemExit: code 0, after help.
        """
        names = _names(arguments)
        if not {*HELP, *HELP_ALL}.isdisjoint(names):
            self.read(arguments)
        options = possible(self.group)
        heads = {leaf.name for leaf in options.values() if leaf.joint}
        known = {*options, *heads, *([CONFIG.removeprefix("--")] if self.files else [])}
        of_own = tuple(f"{head}." for head in heads) if any(map(is_own, arguments)) else ()
        for name in names:
            key = name.removeprefix("--").removesuffix("+")  # --key+ adds to a list
            if name.startswith("--") and key not in known and not key.startswith(of_own):
                raise ValueError(_unrecognised(name, options, unknown(key, options)))

    def _hidden(self, options: Iterable[str], arguments: Sequence[str]) -> list[str]:
        """Return the keys of the options that help leaves out."""
        brief = self.basic and not {"-h", "--help"}.isdisjoint(arguments)
        return [key for key in options if brief and key not in self.basic]

    def _parsed(
        self, parser: jsonargparse.ArgumentParser, sources: Sequence[OptionSource], types: Types
    ) -> dict[str, Any]:
        """Return the values of all options by key."""
        options = {leaf.key: leaf for leaf in leaves(self.group, types)}

        def explain(key: str) -> str:
            further = possible(self.group)
            return belongs(self.group, types, key) or unknown(key, options, further)

        for source in sources:
            source.check(options, explain)
        try:
            words = [word for source in sources for word in source.arguments()]
            return vars(parser.parse_args(words).as_flat())
        except argparse.ArgumentError as error:
            raise ValueError(_explained(str(error), options, explain)) from error

    def _parser(
        self, options: Mapping[str, Leaf], hidden: Collection[str]
    ) -> jsonargparse.ArgumentParser:
        about = (self.group.__doc__ or "").partition("\n")[0]
        named = any(not leaf.positional for leaf in options.values())
        placeholders = _placeholders(options.values())
        parser = jsonargparse.ArgumentParser(
            prog=self.program,
            usage=" ".join([self.program, *placeholders, *["[--key value ...]"] * named]),
            description=about,
            formatter_class=Help,  # types are described in the help texts
            exit_on_error=False,
            allow_abbrev=False,
        )
        if self.files:
            text = "a YAML file of options; options after --config FILE override the file"
            parser.add_argument(CONFIG, action="config", metavar="FILE", help=text)
            for action in parser._actions:
                if "--print_config" in action.option_strings:
                    action.metavar, action.help = "", "print all options as YAML, and exit"
        if hidden:
            text = f"show this help message with {len(hidden)} more options, and exit"
            parser.add_argument("--help_all", action="store_true", help=text)
        sections: dict[str, Any] = {about.rstrip("."): parser}
        for leaf in options.values():
            if leaf.section not in sections:
                sections[leaf.section] = parser.add_argument_group(leaf.section)
            name = leaf.key if leaf.positional else f"--{leaf.key}"
            sections[leaf.section].add_argument(name, **_settings(leaf, leaf.key in hidden))
        return parser


class Help(argparse.HelpFormatter):
    """Format help without line breaks inside names such as comm-opt."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """Show `--sync NAME`, which is short for `--sync.type NAME`."""
        return super()._format_action_invocation(action).replace(f".{TYPE} {NAME}", f" {NAME}")


def _check_digits(arguments: Iterable[str]) -> None:
    """Raise ValueError for a number with more digits than a float or a file name can have."""
    for argument in arguments:
        if re.search(r"\d{300}", argument):
            short = reprlib.repr(argument)
            raise ValueError(f"{short}: a number must be within ±{HUGE:,}")


def _names(arguments: Sequence[str]) -> list[str]:
    """Return the arguments before "--", with only the name of each NAME=VALUE."""
    return [argument.partition("=")[0] for argument in takewhile("--".__ne__, arguments)]


def _value(option: Leaf, raw: Any) -> Any:
    """Return the value of an option after checking it; convert a string if the option needs it.

    Raises:
        ValueError: the value is missing, malformed or out of bounds.
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
    return _in_home(value)


def _in_home(value: Any) -> Any:
    """Return a path, or a list of paths, with "~" replaced by the home directory."""
    if isinstance(value, list):
        return [_in_home(each) for each in value]
    return Path(os.path.expanduser(value)) if isinstance(value, Path) else value


def _placeholders(options: Iterable[Leaf]) -> Iterator[str]:
    """Yield placeholders for the positional and the required arguments, for the usage line."""
    for leaf in options:
        if leaf.positional:
            word = leaf.key.upper() + (" ..." if leaf.is_list else "")
            yield word if leaf.default is REQUIRED else f"[{word}]"
        elif leaf.default is REQUIRED:
            yield f"--{leaf.key} {_placeholder(leaf)}"


def _placeholder(leaf: Leaf) -> str:
    """Return the placeholder for an option's value in help."""
    return NAME if leaf.joint else leaf.key.rpartition(".")[2].upper()


def _settings(leaf: Leaf, hidden: bool) -> dict[str, Any]:
    """Return the keyword arguments with which `add_argument` adds an option."""
    settings: dict[str, Any] = {"type": leaf.kind | str if leaf.scheduled else leaf.kind}
    if leaf.default is not REQUIRED:
        settings["default"] = leaf.default
        settings |= {"nargs": "?"} if leaf.positional else {}
    elif leaf.positional and leaf.is_list:
        settings |= {"nargs": "+", "type": typing.get_args(leaf.kind)[0]}
    elif not leaf.positional:
        settings |= {"type": leaf.kind | None, "default": None}  # `_value` reports missing ones
    if leaf.is_flag:
        settings |= {"nargs": "?", "const": True}
    elif not (leaf.positional or leaf.is_list or leaf.is_choice):
        settings["metavar"] = _placeholder(leaf)
    allowed = "" if (leaf.kind is str and not leaf.joint) or leaf.is_choice else f"{leaf.allowed}; "
    needed = leaf.default is REQUIRED
    default = "required" if needed else f"default: {_word(settings['default'])}"
    about = f"{leaf.help.rstrip('.')} ({allowed}{default})".replace("%", "%%")
    return settings | {"help": argparse.SUPPRESS if hidden else about}


def _word(value: object) -> str:
    """Return a value as it is written on the command line."""
    return value if isinstance(value, str) else json.dumps(value)


def _explained(text: str, options: Mapping[str, Leaf], explain: Callable[[str], str]) -> str:
    """Return the parser's message as one line: key, value, and the allowed values.

    Args:
        explain: returns the message about an unknown key.
    """
    wrong = re.match(r'Parser key "([^"]+)":.*?(?:Got|Given) value: (.*)', text, re.DOTALL)
    if wrong and wrong[1] in options:
        return f"{wrong[1]}={wrong[2]} must be {options[wrong[1]].allowed}"
    if bare := re.match(r"argument --(\S+): expected one argument", text):
        kind = options[bare[1]].allowed if bare[1] in options else "a file of options"
        return f"{bare[1]} has no value; it must be {kind}"
    if extra := re.match(r"unrecognized arguments: (\S+)", text):
        key = extra[1].lstrip("-").partition("=")[0]
        return _unrecognised(extra[1], options, explain(key))
    return " ".join(text.split())


def _unrecognised(argument: str, options: Collection[str], unknown_key: str) -> str:
    """Return the message about an argument that is no option; for an unknown key, `unknown_key`."""
    if not argument.startswith("--"):
        return f"{argument!r} is not the value of an option; write --key value"
    key = argument.lstrip("-").partition("=")[0]
    if key in options:
        return f"{argument} is positional; write only the value of {key}"
    if inside := [option for option in options if option.startswith(f"{key}.")]:
        return f"{key} is a group of options; set one of them, such as --{inside[0]}"
    return unknown_key
