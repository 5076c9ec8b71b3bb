"""The types of choices and of preconditioners: frozen dataclasses of settings."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, fields

import pytest

from mpikfac.plan import Choice
from mpikfac.preconditioners import Preconditioner


def derived(base: type) -> Iterator[type]:
    """Return the concrete types of the core that derive from `base` and have settings."""
    for kind in base.__subclasses__():
        core = kind.__module__.startswith("mpikfac.") and "lab" not in kind.__module__.split(".")
        if "name" in vars(kind) and fields(kind) and core:
            yield kind
        yield from derived(kind)


def required(kind: type) -> dict[str, float]:
    """Return values for the settings without defaults."""
    settings = inspect.signature(kind).parameters.values()
    return {each.name: 0.5 for each in settings if each.default is inspect.Parameter.empty}


KINDS = {kind.__name__: kind for base in (Choice, Preconditioner) for kind in derived(base)}


@pytest.mark.parametrize("name", KINDS)
def test_settings_are_given_by_name(name):
    """Oracle: the signature; a position would bind programs to the order of the settings."""
    kinds = {each.kind for each in inspect.signature(KINDS[name]).parameters.values()}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize("name", KINDS)
def test_default_settings_are_not_printed(name):
    """Oracle: the call with the settings that have no defaults."""
    given = required(KINDS[name])
    call = ", ".join(f"{each}={value}" for each, value in given.items())
    assert repr(KINDS[name](**given)) == f"{name}({call})"


@pytest.mark.parametrize("name", KINDS)
def test_settings_cannot_change(name):
    """Oracle: the error of frozen dataclasses."""
    choice = KINDS[name](**required(KINDS[name]))
    with pytest.raises(FrozenInstanceError):
        setattr(choice, fields(choice)[0].name, None)
