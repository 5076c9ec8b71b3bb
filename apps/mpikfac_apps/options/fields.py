"""Options as fields of dataclasses: a field declares name, type, default, bounds and help text.

Dataclasses of the library serve as groups of options. A field can be a dataclass itself: the
options of the inner dataclass have the field's name as a prefix ("data.name"), or no prefix
(`inline`).

A field whose type is derived from `Choice` is a joint: the option "sync.type" names a type, and the
type has its own options ("sync.rho"). The options of a dataclass therefore depend on these types.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import os
import reprlib
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import docstring_parser

from mpikfac import files
from mpikfac.plan import Choice, named_types
from mpikfac_apps.options import by_epoch, joints
from mpikfac_apps.options.by_epoch import ByEpoch
from mpikfac_apps.options.joints import alternatives

if TYPE_CHECKING:
    import torch
    from _typeshed import DataclassInstance

WORDS = {
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    str: "a string",
    Path: "a path",
    types.NoneType: "null",
}
LISTS = {int: "a list of whole numbers", str: "a list of names", Path: "a list of paths"}
COMPARE = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
DTYPES = ("bfloat16",)
REQUIRED = dataclasses.MISSING
TYPE = "type"
"""The last part of the key that names a joint's type."""
Types = Mapping[str, str | None]
"""The names of types by key: {"sync.type": "parle"}; missing joints have their default types."""

Group = TypeVar("Group", bound="DataclassInstance")


class Dtype:
    """A placeholder for `torch.dtype` in types of fields, because importing torch takes seconds."""


ANNOTATIONS = {"torch": types.SimpleNamespace(dtype=Dtype)}
"""Names in annotations that are looked up here, not in the module of a dataclass."""


@dataclass(frozen=True)
class Leaf:
    """An option.

    Attributes:
        key: the name that a user writes, with dots: "kfac.damping".
        path: the names of the fields that lead to the value.
        kind: the type.
        default: the value if the option is not set, as a user would write it; REQUIRED if the
            option must be set.
        help: the description of the field in the dataclass's docstring.
        section: the heading above the option in help; by default, the first line of the dataclass's
            docstring.
        bounds: the bounds of a number, such as ("> 0", "<= 1"); they do not apply to null.
        positional: whether the value is given without the name.
        scheduled: whether the value can change with the epoch.
        read: the function that converts a string to the value; None if the string is the value.
        joint: the base class of the types that the option can name; None if it names no type.
        without: the fields of the types of a joint that are not options.
    """

    key: str
    path: tuple[str, ...]
    kind: Any
    default: Any
    help: str
    section: str
    bounds: tuple[str, ...]
    positional: bool
    scheduled: bool
    read: Callable[[str], Any] | None
    joint: type[Choice] | None = None
    without: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name of the option in messages and help: the key; for a joint, without ".type"."""
        return self.key.removesuffix(f".{TYPE}") if self.joint else self.key

    @property
    def allowed(self) -> str:
        """A description of the allowed values."""
        first, *others = map(_in_words, alternatives(self.kind))
        first = joints.allowed(self.joint) if self.joint else first
        others += [f'a schedule such as "{by_epoch.EXAMPLE}"'] if self.scheduled else []
        return " or ".join([" ".join([first, " and ".join(self.bounds)]).strip(), *others])

    @property
    def nullable(self) -> bool:
        """Whether the value can be null."""
        return self.default is None or type(None) in alternatives(self.kind)

    @property
    def is_list(self) -> bool:
        """Whether the option takes several values."""
        return typing.get_origin(self.kind) in (list, tuple)

    @property
    def is_flag(self) -> bool:
        """Whether the name without a value means true."""
        return bool in alternatives(self.kind)

    @property
    def is_choice(self) -> bool:
        """Whether the value is one of a few names."""
        return typing.get_origin(self.kind) is Literal

    def check(self, value: Any) -> None:
        """Check that numbers are within bounds and not huge, and that a null is allowed.

        Raises:
            ValueError: one line with key, value and bounds.
        """
        if value is None and not self.nullable:  # for example, from a line `lr:` in a file
            raise ValueError(f"{self.key}=null must be {self.allowed}")
        value = value.numbers if isinstance(value, ByEpoch) else value
        for number in value if isinstance(value, list | tuple) else [value]:
            if isinstance(number, int | float):
                limits = (bound.split() for bound in self.bounds)
                inside = (COMPARE[sign](number, float(limit)) for sign, limit in limits)
                if files.HUGE < abs(number) < math.inf:
                    short = reprlib.repr(number)
                    raise ValueError(f"{self.key}={short} must be within ±{files.HUGE:,}")
                if not abs(number) < math.inf or not all(inside):
                    raise ValueError(f"{self.key}={value} must be {self.allowed}")


# -- fields of a dataclass of options --------------------------------------------------------------


def bounded(default: Any, *bounds: str) -> Any:
    """Return a field for numbers that must satisfy `bounds`, such as "> 0"."""
    return dataclasses.field(default=default, metadata={"bounds": bounds})


def choice(default: Any, names: Collection[str]) -> Any:
    """Return a field whose value is one of `names`."""
    return dataclasses.field(default=default, metadata={"names": tuple(names)})


def listed(names: Collection[str], default: Any = REQUIRED) -> Any:
    """Return a field for a name; help lists `names`, and the program checks the name."""
    return dataclasses.field(default=default, metadata={"listed": names})


def required(*bounds: str, read: Callable[[str], Any] | None = None) -> Any:
    """Return a field that must be set; `read` converts a string to the value."""
    return dataclasses.field(metadata={"bounds": bounds, "read": read})


def positional(*bounds: str, default: Any = dataclasses.MISSING) -> Any:
    """Return a field that is given as a value without a name; without `default`, it is required."""
    return dataclasses.field(default=default, metadata={"bounds": bounds, "positional": True})


def read_by(read: Callable[[str], Any], default: str | None) -> Any:
    """Return a field whose value `read` converts from a string; `default` is a string or None."""
    value = None if default is None else read(default)
    return dataclasses.field(default=value, metadata={"read": read, "written": default})


def in_home(default: str | None) -> Any:
    """Return a field for a path as text, with "~" replaced by the home directory."""
    metadata = {"read": os.path.expanduser, "written": default, "keeps_type": True}
    return dataclasses.field(default=default, metadata=metadata)


def inline(group: Callable[[], Any], without: Collection[str] = (), **names: str) -> Any:
    """Return a field for a dataclass whose options have no prefix.

    Args:
        without: fields that are not options and keep their defaults.
        names: the names of options by the names of their fields, where they differ.
    """
    metadata = {"inline": True, "without": frozenset(without), "renamed": names}
    return dataclasses.field(default_factory=group, metadata=metadata)


def section(heading: str, field: Any) -> Any:
    """Return a field that begins a new section of the help text, under the given heading.

    For a field with a plain value, the section includes all following plain values; for a
    dataclass, only its own options.
    """
    metadata = {**field.metadata, "section": heading}
    field.metadata = types.MappingProxyType(metadata)
    return field


# -- from dataclasses to options, and back ---------------------------------------------------------


def leaves(group: type, types: Types | None = None) -> tuple[Leaf, ...]:
    """Return the options of a dataclass, in the order of the fields.

    Args:
        types: the types of joints; the default types if None.

    Raises:
        ValueError: a joint has no type with the given name; the message is one line.
    """
    return _leaves_with(group, frozenset((types or {}).items()))


@functools.cache
def _leaves_with(group: type, types: frozenset[tuple[str, str | None]]) -> tuple[Leaf, ...]:
    return tuple(_leaves(group, dict(types)))


def possible(group: type, within: Collection[type] = ()) -> dict[str, Leaf]:
    """Return the options that a dataclass has for any choice of known types, by key.

    Args:
        within: base classes of types that contain the dataclass; their joints are not expanded
            again.
    """
    found: dict[str, Leaf] = {}
    for leaf in leaves(group):
        found.setdefault(leaf.key, leaf)
        if leaf.joint and leaf.joint not in within:
            for kind in named_types(leaf.joint).values():
                for key, inner in possible(kind, (*within, leaf.joint)).items():
                    if key in leaf.without:
                        continue
                    full, path = f"{leaf.name}.{key}", (*leaf.path[:-1], *inner.path)
                    found.setdefault(full, dataclasses.replace(inner, key=full, path=path))
    return found


def _leaves(group: type, types: Types, like: Any = None) -> Iterator[Leaf]:
    """Yield the options of a dataclass.

    Args:
        like: an instance whose values are the defaults; None for the defaults of the dataclass.
    """
    heading, helps, hints = _described(group)
    for field in dataclasses.fields(group):
        name, kind, meta = field.name, hints[field.name], field.metadata
        base = joints.base_of(kind)
        usual = _default_of(field) if like is None else getattr(like, name)
        below = types if meta.get("inline") else _inside_of(name, types)
        if dataclasses.is_dataclass(kind) and not base:
            within = None if like is None else usual
            try:
                for leaf in _below(typing.cast(type, kind), below, within):
                    if {leaf.path[0], leaf.path[-1]}.isdisjoint(meta.get("without", ())):
                        yield _inside(name, leaf, meta)
            except ValueError as error:  # the name of a joint's type is wrong
                raise ValueError(f"{'' if meta.get('inline') else f'{name}.'}{error}") from error
        if (dataclasses.is_dataclass(kind) and not base) or "given" in meta:
            continue
        heading = meta.get("section", heading)
        reads = meta.get("read") and "keeps_type" not in meta
        option = Leaf(
            key=name,
            path=(name,),
            kind=str if reads or base else _plain(kind, meta.get("names")),
            scheduled=any(typing.get_origin(k) is Callable for k in alternatives(kind)),
            default=meta.get("written", usual),
            help=_help(helps.get(name, ""), meta.get("listed", ())),
            section=heading,
            bounds=meta.get("bounds", ()),
            positional=meta.get("positional", False),
            read=meta.get("read"),
        )
        yield from _of_joint(option, kind, base, below, meta) if base else [option]


def _below(group: type, types: Types, like: Any) -> Iterable[Leaf]:
    """Return the options of an inner dataclass, with defaults from `like` if it is not None."""
    return leaves(group, types) if like is None else _leaves(group, types, like)


@functools.cache
def _described(group: type) -> tuple[str, dict[str, str], dict[str, Any]]:
    """Return the first line of a dataclass's docstring, and its fields' help and types."""
    about = docstring_parser.parse(group.__doc__ or "")
    texts = (docstring_parser.parse(base.__doc__ or "") for base in reversed(group.__mro__))
    helps = {param.arg_name: param.description or "" for text in texts for param in text.params}
    heading = (about.short_description or group.__name__).rstrip(".").replace("None", "null")
    return heading, helps, _hints(group)


def _hints(group: type) -> dict[str, Any]:
    """Return the types of the fields; annotations of other attributes can name unknown types."""
    names = {field.name for field in dataclasses.fields(group)}
    hints: dict[str, Any] = {}
    for base in reversed(group.__mro__):
        texts = {k: v for k, v in vars(base).get("__annotations__", {}).items() if k in names}
        of_fields = type(
            base.__name__, (), {"__annotations__": texts, "__module__": base.__module__}
        )
        try:
            hints |= typing.get_type_hints(of_fields, localns=ANNOTATIONS)
        except NameError as error:  # in a user's file
            raise ValueError(
                f"{base.__name__} has an unknown annotation: {error}; the file must import the name"
            ) from error
    return hints


def _inside_of(name: str, types: Types) -> dict[str, str | None]:
    """Return the types of the joints inside the field `name`."""
    prefix = f"{name}."
    return {k.removeprefix(prefix): kind for k, kind in types.items() if k.startswith(prefix)}


def _default_of(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a field; REQUIRED if there is none."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _of_joint(
    option: Leaf, hint: Any, base: type[Choice], types: Types, meta: Mapping[str, Any]
) -> Iterator[Leaf]:
    """Yield the option that names the type of a joint, and the options of that type.

    If the joint's default is of this type, its values are the defaults of these options.
    """
    name, usual = option.key, option.default
    kind = str | None if type(None) in alternatives(hint) else str
    default = REQUIRED if usual is REQUIRED else joints.name_of(usual)
    named: dict[str, Any] = {
        "key": f"{name}.{TYPE}",
        "path": (name, TYPE),
        "kind": kind,
        "default": default,
    }
    yield dataclasses.replace(option, joint=base, without=meta.get("without", ()), **named)
    chosen = types.get(TYPE, default)
    if not isinstance(chosen, str):
        return
    group = joints.type_of(name, base, chosen)
    for leaf in _below(group, types, usual if type(usual) is group else None):
        if leaf.path[-1] in meta.get("without", ()):
            continue
        own = leaf.path[1:] in ((), (TYPE,))
        section = f"{name}={chosen}: {leaf.section}" if own else leaf.section
        yield _inside(name, dataclasses.replace(leaf, section=section), {})


def _help(text: str, names: Collection[str]) -> str:
    """Return a field's docstring as the help of an option."""
    words = text.replace("None", "null").split()
    return " ".join(words) if not names else f"{' '.join(words).rstrip('.')}: {', '.join(names)}"


def _inside(name: str, leaf: Leaf, meta: Mapping[str, Any]) -> Leaf:
    """Convert an option of the dataclass in field `name` to an option of the outer dataclass."""
    key, path = leaf.key, (name, *leaf.path)
    key = meta["renamed"].get(key, key) if meta.get("inline") else f"{name}.{key}"
    return dataclasses.replace(leaf, key=key, path=path, section=meta.get("section", leaf.section))


def build(group: type[Group], values: Mapping[str, Any], given: Collection[str] = ()) -> Group:
    """Return a dataclass with the given option values, and defaults for missing options.

    Args:
        given: the keys that a user sets.

    Raises:
        ValueError: the dataclass rejects a value; the message is one line.
    """
    fields = dataclasses.fields(group)
    chosen = {key: value for key, value in values.items() if key in given}
    tree: dict[str, Any] = {field.name: chosen for field in fields if "given" in field.metadata}
    types = {key: value for key, value in values.items() if key.endswith(f".{TYPE}")}
    for leaf in leaves(group, types):
        if leaf.key in values:
            node = tree
            for name in leaf.path[:-1]:
                node = node.setdefault(name, {})
            node[leaf.path[-1]] = values[leaf.key]
    return _group_of(group, tree, "")


def _group_of(
    group: type[Group], tree: Mapping[str, Any], prefix: str, like: Group | None = None
) -> Group:
    """Return a dataclass with the values of a tree; missing values come from `like` or defaults."""
    (_, _, hints), values = _described(group), dict(tree)
    for field in dataclasses.fields(group):
        value, hint = tree.get(field.name), hints[field.name]
        if like is not None and field.init:
            values.setdefault(field.name, getattr(like, field.name))
        if isinstance(value, Mapping) and (base := joints.base_of(hint)):
            usual = getattr(like, field.name) if like is not None else _default_of(field)
            inner = f"{prefix}{field.name}"
            values[field.name] = _typed(base, value, inner, usual)
        elif isinstance(value, Mapping) and dataclasses.is_dataclass(hint):
            inner = prefix if field.metadata.get("inline") else f"{prefix}{field.name}."
            values[field.name] = _group_of(typing.cast(Any, hint), value, inner)
        elif isinstance(value, str) and Dtype in alternatives(hint):
            values[field.name] = dtype(value)
        elif isinstance(value, list) and _takes_tuples(hint):
            values[field.name] = tuple(value)
    try:
        for name, value in values.items():
            if isinstance(value, ByEpoch):  # a dataclass checks the value at epoch 0
                for number in value.numbers[1:]:
                    group(**{**values, name: number})
        return group(**values)
    except ValueError as error:
        raise ValueError(f"{prefix}{str(error).removeprefix(prefix)}") from error


def _typed(base: type[Choice], tree: Mapping[str, Any], joint: str, usual: Any) -> Choice | None:
    """Return the value of a field with a choice of types, called a joint.

    Args:
        tree: the name of the type, and the values of its fields.
        usual: the default, whose values are kept if the tree does not name another type.
    """
    values = dict(tree)
    name = values.pop(TYPE, None) if TYPE in values or usual is REQUIRED else joints.name_of(usual)
    if name is None:
        return None
    kind: Any = joints.type_of(joint, base, name)
    return typing.cast(
        Choice, _group_of(kind, values, f"{joint}.", usual if type(usual) is kind else None)
    )


def flat(options: DataclassInstance) -> dict[str, Any]:
    """Return a dataclass's option values by key, as strings, numbers and lists."""
    found = leaves(type(options), types_of(options))
    return {leaf.key: _value_of(options, leaf) for leaf in found}


def types_of(options: Any, prefix: str = "") -> dict[str, str | None]:
    """Return the type chosen for each field that has a choice of types, by the key of the field."""
    types: dict[str, str | None] = {}
    group: type = type(options)
    _, _, hints = _described(group)
    for field in dataclasses.fields(options):
        value, inline = getattr(options, field.name), field.metadata.get("inline")
        below = prefix if inline else f"{prefix}{field.name}."
        if joints.base_of(hints[field.name]):
            types[f"{below}{TYPE}"] = joints.name_of(value)
        if dataclasses.is_dataclass(value):
            types |= types_of(value, below)
    return types


def _value_of(options: Any, leaf: Leaf) -> Any:
    """Return the value of an option as a string, a number, a list or null."""
    *holders, last = leaf.path
    for name in holders:
        options = getattr(options, name)
    if leaf.joint:
        return joints.name_of(options)
    value = getattr(options, last)
    if isinstance(value, ByEpoch):
        return str(value)
    if type(value).__module__ == "torch":  # a dtype
        return str(value).removeprefix("torch.")
    return list(value) if isinstance(value, tuple) else value


def dtype(name: str) -> torch.dtype:
    """Return the dtype with the given name in `DTYPES`."""
    import torch

    return typing.cast(torch.dtype, getattr(torch, name))


# -- types -----------------------------------------------------------------------------------------


def _plain(hint: Any, names: tuple[str, ...] | None) -> Any:
    """Return the type of a library field as an option's type, with dtypes given by name.

    Functions are left out. A string is one of `names`, unless `names` is empty.
    """
    words: list[str] = []
    members = []
    for member in alternatives(hint):
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


def _takes_tuples(hint: Any) -> bool:
    """Return whether a field of this type accepts tuples."""
    return any(typing.get_origin(member) is tuple for member in alternatives(hint))


def _in_words(kind: Any) -> str:
    """Return a description of the values of a type, for messages and help."""
    origin, members = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return f"one of {', '.join('false' if value is False else str(value) for value in members)}"
    return LISTS[members[0]] if origin in (list, tuple) else WORDS[kind]
