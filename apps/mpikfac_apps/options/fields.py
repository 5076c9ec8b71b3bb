"""Options as fields of dataclasses: a field states name, type, default, bounds and help once.

Dataclasses of the library serve as groups of options. A field may hold a dataclass: the options of
the inner dataclass have the field's name as a prefix ("data.name"), or no prefix (`inline`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import reprlib
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import docstring_parser

from mpikfac import files
from mpikfac_apps.options import by_epoch
from mpikfac_apps.options.by_epoch import ByEpoch

if TYPE_CHECKING:
    import torch
    from _typeshed import DataclassInstance

WORDS = {
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    str: "a text",
    Path: "a path",
    types.NoneType: "null",
}
LISTS = {int: "a list of whole numbers", str: "a list of names", Path: "a list of paths"}
COMPARE = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
DTYPES = ("bfloat16",)
REQUIRED = dataclasses.MISSING

Group = TypeVar("Group", bound="DataclassInstance")


class Dtype:
    """Stand for `torch.dtype` in types of fields: the import of torch takes seconds."""


ANNOTATIONS = {"torch": types.SimpleNamespace(dtype=Dtype)}
"""Names in annotations that are not looked up in the module of a dataclass."""


@dataclass(frozen=True)
class Leaf:
    """An option.

    Attributes:
        key: the name that a user writes, with dots: "kfac.damping".
        path: names of the fields that lead to the value.
        kind: the type.
        default: the value if the option is not given, as a user writes the value; REQUIRED if the
            option must be given.
        usual: the default in words, if the default is null and stands for another value.
        help: the text about the field in the docstring of the dataclass.
        section: the heading above the option in help; by default the first line of the docstring
            of the dataclass.
        bounds: such as ("> 0", "<= 1"); null is never out of bounds.
        positional: whether the value is given without the name.
        scheduled: whether the value may be numbers by epoch.
        read: the function that makes the value from a text; None if the text is the value.
    """

    key: str
    path: tuple[str, ...]
    kind: Any
    default: Any
    usual: str
    help: str
    section: str
    bounds: tuple[str, ...]
    positional: bool
    scheduled: bool
    read: Callable[[str], Any] | None

    @property
    def allowed(self) -> str:
        """The allowed values in words."""
        first, *alternatives = map(_in_words, _alternatives(self.kind))
        alternatives += [f'numbers by epoch such as "{by_epoch.EXAMPLE}"'] if self.scheduled else []
        return " or ".join([" ".join([first, " and ".join(self.bounds)]).strip(), *alternatives])

    @property
    def is_list(self) -> bool:
        """Whether the option has several values."""
        return typing.get_origin(self.kind) in (list, tuple)

    @property
    def is_flag(self) -> bool:
        """Whether the name without a value means true."""
        return bool in _alternatives(self.kind)

    @property
    def is_choice(self) -> bool:
        """Whether the value is one of a few names."""
        return typing.get_origin(self.kind) is Literal

    def check(self, value: Any) -> None:
        """Refuse numbers that are huge or out of bounds, and null for an option without null.

        Raises:
            ValueError: one line with key, value and bounds.
        """
        nullable = self.default is None or type(None) in _alternatives(self.kind)
        if value is None and not nullable:  # a line `lr:` in a file
            raise ValueError(f"{self.key}=null must be {self.allowed}")
        value = value.numbers if isinstance(value, ByEpoch) else value
        for number in value if isinstance(value, list | tuple) else [value]:
            if isinstance(number, int | float):
                limits = (bound.split() for bound in self.bounds)
                inside = (COMPARE[sign](number, float(limit)) for sign, limit in limits)
                if files.HUGE < abs(number) < math.inf:
                    short = reprlib.repr(number)
                    raise ValueError(f"{self.key}={short} must lie within ±{files.HUGE:,}")
                if not abs(number) < math.inf or not all(inside):
                    raise ValueError(f"{self.key}={value} must be {self.allowed}")


# -- fields of a dataclass of options --------------------------------------------------------------


def bounded(default: Any, *bounds: str) -> Any:
    """Return a field whose numbers lie within `bounds`, such as "> 0"."""
    return dataclasses.field(default=default, metadata={"bounds": bounds})


def choice(default: Any, names: Collection[str]) -> Any:
    """Return a field whose value is one of `names`."""
    return dataclasses.field(default=default, metadata={"names": tuple(names)})


def listed(names: Collection[str], default: Any = REQUIRED) -> Any:
    """Return a field for a name; the help lists `names`, and the program checks the name."""
    return dataclasses.field(default=default, metadata={"listed": names})


def required(*bounds: str, read: Callable[[str], Any] | None = None) -> Any:
    """Return a field that must be given; `read` makes the value from a text."""
    return dataclasses.field(metadata={"bounds": bounds, "read": read})


def positional(*bounds: str) -> Any:
    """Return a field that must be given, as a value without a name."""
    return dataclasses.field(metadata={"bounds": bounds, "positional": True})


def read_by(read: Callable[[str], Any], default: str | None) -> Any:
    """Return a field whose value `read` makes from a text; `default` is a text, too, or None."""
    value = None if default is None else read(default)
    return dataclasses.field(default=value, metadata={"read": read, "written": default})


def inline(group: Callable[[], Any], without: Collection[str] = (), **names: str) -> Any:
    """Return a field for a dataclass whose options have no prefix.

    Args:
        without: fields that are not options and keep their defaults.
        names: the name of an option by the name of the field, where the names differ.
    """
    metadata = {"inline": True, "without": frozenset(without), "renamed": names}
    return dataclasses.field(default_factory=group, metadata=metadata)


def changes(
    group: type, usual: str, sections: Mapping[str, str], without: Collection[str] = ()
) -> Any:
    """Return a field for a dict with the fields of a dataclass that a user gives.

    Args:
        group: the dataclass; the options are the fields, and null leaves a field out of the dict.
        usual: the value of a field that is left out, in words.
        sections: the heading in help by the name of the field that holds the option's dataclass;
            "" for the options of the outer dataclass.
        without: fields that are not options.
    """
    metadata = {"changes": group, "usual": usual, "sections": sections}
    return dataclasses.field(default_factory=dict, metadata=metadata | {"without": without})


def section(heading: str, field: Any) -> Any:
    """Return a field that begins a section of help, with a heading.

    A field of a plain value heads all plain values behind the field; a field of a dataclass heads
    the options of the dataclass alone.
    """
    metadata = {**field.metadata, "section": heading}
    field.metadata = types.MappingProxyType(metadata)
    return field


# -- from dataclasses to options, and back ---------------------------------------------------------


@functools.cache
def leaves(group: type) -> tuple[Leaf, ...]:
    """Return the options of a dataclass, in the order of the fields."""
    return tuple(_leaves(group))


def _leaves(group: type) -> Iterator[Leaf]:
    hints = typing.get_type_hints(group, localns=ANNOTATIONS)
    about = docstring_parser.parse(group.__doc__ or "")
    texts = (docstring_parser.parse(base.__doc__ or "") for base in reversed(group.__mro__))
    helps = {param.arg_name: param.description or "" for text in texts for param in text.params}
    heading = (about.short_description or group.__name__).rstrip(".")
    for field in dataclasses.fields(group):
        name, kind, meta = field.name, hints[field.name], field.metadata
        inner = meta.get("changes", kind)
        if dataclasses.is_dataclass(inner):
            for leaf in leaves(typing.cast(type, inner)):
                if leaf.path[-1] not in meta.get("without", ()):
                    yield _inside(name, leaf, meta)
            continue
        heading = meta.get("section", heading)
        default = meta.get("written", field.default)
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        yield Leaf(
            key=name,
            path=(name,),
            kind=str if meta.get("read") else _plain(kind, meta.get("names")),
            scheduled=any(typing.get_origin(k) is Callable for k in _alternatives(kind)),
            default=default,
            usual="",
            help=_help(helps.get(name, ""), meta.get("listed", ())),
            section=heading,
            bounds=meta.get("bounds", ()),
            positional=meta.get("positional", False),
            read=meta.get("read"),
        )


def _help(text: str, names: Collection[str]) -> str:
    """Return a field's docstring as the help of an option."""
    words = text.replace("None", "null").split()
    return " ".join(words) if not names else f"{' '.join(words).rstrip('.')}: {', '.join(names)}"


def _inside(name: str, leaf: Leaf, meta: Mapping[str, Any]) -> Leaf:
    """Return an option of a dataclass that is the field `name` of another dataclass."""
    key, path = leaf.key, (name, *leaf.path)
    if "changes" in meta:  # choices have no prefixes, as in `Strategy.changed`
        *holders, key = leaf.path
        null = {"default": None, "usual": meta["usual"], "kind": leaf.kind | None}
        heading = meta["sections"][holders[-1] if holders else ""]
        return dataclasses.replace(leaf, key=key, path=(name, key), section=heading, **null)
    key = meta["renamed"].get(key, key) if meta.get("inline") else f"{name}.{key}"
    return dataclasses.replace(leaf, key=key, path=path, section=meta.get("section", leaf.section))


def build(group: type[Group], values: Mapping[str, Any]) -> Group:
    """Return a dataclass with the values of options; options without a value have their defaults.

    Raises:
        ValueError: the dataclass refuses a value; one line.
    """
    tree: dict[str, Any] = {}
    for leaf in leaves(group):
        if leaf.key in values:
            node = tree
            for name in leaf.path[:-1]:
                node = node.setdefault(name, {})
            node[leaf.path[-1]] = values[leaf.key]
    return _group_of(group, tree, "")


def _group_of(group: type[Group], tree: Mapping[str, Any], prefix: str) -> Group:
    hints, values = typing.get_type_hints(group, localns=ANNOTATIONS), dict(tree)
    for field in dataclasses.fields(group):
        value = tree.get(field.name)
        if "changes" in field.metadata:
            values[field.name] = {k: v for k, v in (value or {}).items() if v is not None}
        elif isinstance(value, Mapping) and dataclasses.is_dataclass(hints[field.name]):
            inner = prefix if field.metadata.get("inline") else f"{prefix}{field.name}."
            values[field.name] = _group_of(hints[field.name], value, inner)
        elif isinstance(value, str) and Dtype in _alternatives(hints[field.name]):
            values[field.name] = dtype(value)
    try:
        for name, value in values.items():
            if isinstance(value, ByEpoch):  # a group checks the number of epoch 0
                for number in value.numbers[1:]:
                    group(**{**values, name: number})
        return group(**values)
    except ValueError as error:
        raise ValueError(f"{prefix}{error}") from error


def flat(options: DataclassInstance) -> dict[str, Any]:
    """Return the values of the options of a dataclass by key, as texts, numbers and lists."""
    return {leaf.key: _text(_reached(options, leaf.path)) for leaf in leaves(type(options))}


def _reached(value: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else getattr(value, name)
    return value


def _text(value: Any) -> Any:
    if isinstance(value, ByEpoch):
        return str(value)
    if type(value).__module__ == "torch":  # a dtype
        return str(value).removeprefix("torch.")
    return list(value) if isinstance(value, tuple) else value


def dtype(name: str) -> torch.dtype:
    """Return the dtype of a name of `DTYPES`."""
    import torch

    return typing.cast(torch.dtype, getattr(torch, name))


# -- types -----------------------------------------------------------------------------------------


def _plain(hint: Any, names: tuple[str, ...] | None) -> Any:
    """Return a type of the library as the type of an option: dtypes by name, no functions.

    A text is one of `names`, if `names` holds any.
    """
    words: list[str] = []
    members = []
    for member in _alternatives(hint):
        if member is str and names:
            words += names
        elif member is Dtype:
            words += DTYPES
        elif typing.get_origin(member) is Literal:
            words += typing.get_args(member)
        elif typing.get_origin(member) is not Callable and not dataclasses.is_dataclass(member):
            members.append(member)
    members = [Literal[tuple(words)], *members] if words else members
    return typing.Union[tuple(members)]  # noqa: UP007 (members are not known here)


def _alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself if the type is no union."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if union else (hint,)


def _in_words(kind: Any) -> str:
    """Return a type in words."""
    origin, members = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return f"one of {', '.join('false' if value is False else str(value) for value in members)}"
    return LISTS[members[0]] if origin in (list, tuple) else WORDS[kind]
