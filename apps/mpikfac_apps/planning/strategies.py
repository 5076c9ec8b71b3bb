"""List the strategies by name, or describe the computation, messages and source of one.

mpikfac strategies
mpikfac strategies spd-kfac
"""

from __future__ import annotations

import textwrap

import mpikfac
from mpikfac_apps import cli
from mpikfac_apps.options.choices import differences
from mpikfac_apps.planning.options import LIST
from mpikfac_apps.text import show, table

WIDTH = 96
SHORT = 72  # maximum characters of a description in the list


def main(argv: list[str] | None = None) -> int:
    """Print strategies and return 0, or print a one-line error about an option and return 2."""
    return cli.run(LIST.program, lambda: print_strategies(argv))


def print_strategies(argv: list[str] | None) -> int:
    """Print the list or a strategy; return 0.

    Raises:
        ValueError: an option is invalid, or the strategy is unknown.
    """
    name = LIST.read(argv).name
    if name is None:
        show([listing()])
    else:
        mpikfac.get_strategy(name)  # the error about an unknown name suggests similar names
        show([paragraph(name), legend()])
    return 0


def listing() -> list[str]:
    """Return a table of all strategies, one line each."""
    heading = "strategy", "source", "estimator", "what it does"
    rows = [
        (
            name,
            way.source,
            "same" if way.same else "different",
            textwrap.shorten(way.what, SHORT, placeholder=" ..."),
        )
        for name, way in mpikfac.plan.NAMED.items()
    ]
    about = (
        "With the same estimator, results equal those of one process that trains on the joint "
        "batch with the same `refresh`. mpikfac strategies NAME describes a strategy in full."
    )
    return [*table([heading, *rows], left=4), "", *textwrap.wrap(about, WIDTH)]


def legend() -> list[str]:
    """Return lines that explain how the costs of strategies are written."""
    text = (
        '"Sends" lists the bytes that a rank sends in a ring, in addition to averaging gradients: '
        "in steps with new factors + in a refresh + in every step. P ranks, w workers. 4F, 4T and "
        "4V are the bytes of all factors as full matrices, as triangles and as vectors; 4N those "
        "of all gradients, and 4R those of the thin matrices that replace them. K-FAC is one of "
        "several preconditioners that use these plans: shampoo, kl-shampoo and soap do not send "
        "factors (the first term); muon and normuon do not send bases (the second) either."
    )
    return textwrap.wrap(text, WIDTH)


def paragraph(name: str) -> list[str]:
    """Return lines that describe the strategy `name`."""
    way = mpikfac.plan.NAMED[name]
    kind = "the same estimator" if way.same else "a different estimator"
    settings = [f"{key}={value}" for key, value in way.settings.items()]
    choices = ", ".join([differences(way.strategy), *settings])
    places = ", ".join(
        f"{axis}: {place}" for axis, place in mpikfac.plan.axes(way.strategy).items()
    )
    parts = [
        f"{way.what} [{way.source}]; {kind}.",
        f"Sends {way.cost}.",
        f"Is {choices}.",
        f"{places}.",
    ]
    return [
        name,
        *(
            line
            for part in parts
            for line in textwrap.wrap(part, WIDTH, initial_indent="  ", subsequent_indent="  ")
        ),
    ]
