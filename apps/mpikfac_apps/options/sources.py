"""The sources of a program's options, in order; the last one wins.

A value can determine which other options exist: the type of a joint, or the name of a preset. If a
later source chooses another type, the options that earlier sources set for the former type are
dropped, and so are the values of a preset.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from mpikfac.plan import named_types
from mpikfac_apps.options import documents, joints
from mpikfac_apps.options.fields import TYPE, Leaf, Types, leaves, possible
from mpikfac_apps.text import is_own

CONFIG = "--config"
NULLS = ("null", "~")


@dataclass(frozen=True)
class Presets:
    """Sets of option values that have a name, such as the named strategies.

    Attributes:
        key: the option that names a preset.
        values: returns the values of a preset by key, given its name; none for an unknown name.
    """

    key: str
    values: Callable[[str], Mapping[str, Any]]


class OptionSource:
    """A source of option values by key; subclasses read the command line and YAML.

    Attributes:
        values: the values, as a user writes them.
        trusted: whether the program may execute the files of user-defined types in the values.
    """

    trusted = True

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = dict(values)

    def rename(self, short: str, key: str) -> None:
        """Move the value of `short` to `key`: `sync` is short for `sync.type`."""
        if short in self.values:
            self.values[key] = self.values.pop(short)

    def leave_out(self, groups: Collection[str]) -> None:
        """Drop the options of groups such as "sync"."""
        inside = tuple(f"{group}." for group in groups)
        self.discard({key for key in self.values if key in groups or key.startswith(inside)})

    def discard(self, keys: Collection[str]) -> None:
        """Drop the values of these keys."""
        self.values = {k: v for k, v in self.values.items() if k not in keys}

    def check(self, options: Mapping[str, Leaf], explain: Callable[[str], str]) -> None:
        """Check a file for unknown keys; the parser checks the command line."""

    def arguments(self) -> list[str]:
        """Return the command-line arguments for the values."""
        return []


class Words(OptionSource):
    """An option on the command line with its value, or a value without a name."""

    def __init__(self, words: list[str]) -> None:
        self._words = words
        name, sign, value = words[0].partition("=")
        text: str | bool = value
        if not sign:
            text = words[1] if words[1:] else True
        key = name.removeprefix("--").removesuffix("+")  # --key+ adds to a list
        given = {key: None if text in NULLS else text}
        super().__init__(given if name.startswith("--") else {})

    def rename(self, short: str, key: str) -> None:
        """Move the value of `short` to `key`."""
        if short in self.values:
            self._words[0] = self._words[0].replace(short, key, 1)
        super().rename(short, key)

    def leave_out(self, groups: Collection[str]) -> None:
        """Keep everything, because users intend whatever they type."""

    def arguments(self) -> list[str]:
        """Return the option's words on the command line, after any renaming."""
        return self._words


class Document(OptionSource):
    """YAML text.

    Args:
        path: the file that holds the text; "" for no file.
    """

    def __init__(self, text: str, path: str = "") -> None:
        self._path = path
        self._document = documents.composed(text, f"config={path}, ")
        self._nodes = documents.values_of(self._document)
        self._left_out: set[str] = set()
        content = documents.loaded(text)
        super().__init__(documents.flattened(content) if isinstance(content, dict) else {})

    def rename(self, short: str, key: str) -> None:
        """Move the value of `short` to `key`."""
        if short in self.values:
            self._nodes[key] = self._nodes.pop(short)
        super().rename(short, key)

    def discard(self, keys: Collection[str]) -> None:
        """Drop the values of these keys, which `check` still accepts."""
        self._left_out |= {*keys}
        super().discard(keys)

    def arguments(self) -> list[str]:
        """Return a command-line argument with the values."""
        return [f"{CONFIG}={documents.written({key: self._nodes[key] for key in self.values})}"]

    def check(self, options: Mapping[str, Leaf], explain: Callable[[str], str]) -> None:
        """Check for unknown keys, and values for groups.

        Args:
            explain: returns the message about an unknown key.

        Raises:
            ValueError: a key is unknown; the message is one line with file, line and key.
        """
        if not self._path:
            return
        short = {leaf.name for leaf in options.values()}
        known = {*options, *short, *self._left_out}
        documents.check_keys(self._document, self._path, known, explain)


class Kept(Document):
    """Options stored in a run; a file that they name runs only if the user names it again."""

    trusted = False


def of_arguments(arguments: Sequence[str], files: bool) -> list[OptionSource]:
    """Return the sources of a command line, in order.

    Args:
        files: whether --config FILE names a file of options.

    Raises:
        ValueError: a file cannot be read, or is not YAML; the message is one line.
    """
    sources: list[OptionSource] = []
    named = list(takewhile("--".__ne__, arguments))
    rest = [[word] for word in arguments[len(named) :]]
    while named:
        words = [named.pop(0)]
        if words[0].startswith("--") and "=" not in words[0] and named and named[0][:2] != "--":
            words.append(named.pop(0))
        name, _, path = "=".join(words).partition("=")
        of_file = files and name == CONFIG and path
        sources.append(Document(documents.read(path), path) if of_file else Words(words))
    return [*sources, *map(Words, rest)]


def kept_options(values: Mapping[str, Any]) -> Kept:
    """Return a source for stored options, given as a mapping from keys to values."""
    return Kept(json.dumps(documents.nested(values)))


def settled(
    group: type, sources: Sequence[OptionSource], presets: Presets | None = None
) -> tuple[Types, Mapping[str, Any]]:
    """Return the types that the sources choose, and the values of the chosen preset.

    Options of types that a later source replaces are removed from the sources.

    Raises:
        ValueError: a joint has no type with the given name; the message is one line.
    """
    preset = OptionSource(_preset(group, sources, presets) if presets else {})
    sources = [preset, *sources]
    types: dict[str, str | None] = {}
    while joint := _unsettled(group, types):
        for source in sources:
            source.rename(joint.name, joint.key)
        chosen = _last(joint.key, joint.default, [joint.name], sources)
        types[joint.key] = _checked(joint, chosen)
        _check_trust(joint, chosen, sources)
    return types, preset.values


def _unsettled(group: type, types: Types) -> Leaf | None:
    """Return the first joint without a type in `types`."""
    open_joints = (leaf for leaf in leaves(group, types) if leaf.joint and leaf.key not in types)
    return next(open_joints, None)


def _preset(group: type, sources: Sequence[OptionSource], presets: Presets) -> Mapping[str, Any]:
    """Return the values of the preset that the sources choose."""
    usual = next(leaf.default for leaf in leaves(group) if leaf.key == presets.key)
    groups = {key.partition(".")[0] for key in presets.values(usual)}
    chosen = _last(presets.key, usual, groups, sources)
    return presets.values(chosen) if isinstance(chosen, str) else {}


def _last(key: str, usual: Any, groups: Collection[str], sources: Sequence[OptionSource]) -> Any:
    """Return a key's last value; if a source changes it, drop `groups` from earlier sources."""
    chosen, since = usual, None
    for number, source in enumerate(sources):
        if key not in source.values:
            continue
        if since is not None and source.values[key] != chosen:
            for earlier in sources[since:number]:
                earlier.leave_out(groups)
        chosen, since = source.values[key], number
    return chosen


def _checked(joint: Leaf, chosen: Any) -> str | None:
    """Return the name of a joint's type.

    Raises:
        ValueError: the value is not a name, or is null for a joint that requires a type.
    """
    if isinstance(chosen, str) or (chosen is None and joint.nullable):
        return chosen
    raise ValueError(f"{joint.name}={json.dumps(chosen)} must be {joint.allowed}")


def _check_trust(joint: Leaf, chosen: Any, sources: Sequence[OptionSource]) -> None:
    """Raise ValueError instead of executing a file that only a run's stored options name."""
    naming = [source for source in sources if source.values.get(joint.key) == chosen]
    if isinstance(chosen, str) and is_own(chosen) and not any(s.trusted for s in naming):
        raise ValueError(
            f"{joint.name}={chosen} would run {chosen.rpartition(':')[0]}; if you trust the file, "
            f"pass --{joint.name}={chosen}"
        )


def given(sources: Sequence[OptionSource]) -> dict[str, Any]:
    """Return the values that the sources set, by key, without nulls."""
    values = {key: value for source in sources for key, value in source.values.items()}
    return {key: value for key, value in values.items() if value is not None}


def keys_of(sources: Sequence[OptionSource]) -> set[str]:
    """Return the keys that sources set, including those set to null."""
    return {key for source in sources for key in source.values}


def belongs(group: type, types: Types, key: str) -> str:
    """Explain which types have the option `key`, which the chosen types lack; "" if none has it."""
    for joint in leaves(group, types):
        rest = key.removeprefix(f"{joint.name}.")
        if joint.joint is None or rest == key:
            continue
        chosen = types.get(joint.key, joint.default)
        if isinstance(chosen, str):
            kind = joints.type_of(joint.name, joint.joint, chosen)
            if _has(kind, rest):  # a type inside this type lacks the option
                continue
        owners = [name for name, k in named_types(joint.joint).items() if _has(k, rest)]
        if owners:
            *most, last = owners
            words = f"{', '.join(most)} or {last}" if most else last
            return f"{key} belongs to {joint.name}={words}, not to {joint.name}={chosen or 'null'}"
    return ""


def _has(group: type, key: str) -> bool:
    """Return whether a dataclass can have an option or a joint named `key`, for some types."""
    return not {key, f"{key}.{TYPE}"}.isdisjoint(possible(group))
