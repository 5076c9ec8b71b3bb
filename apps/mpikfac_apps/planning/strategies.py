"""List the strategies by name: computation, messages, source. No MPI.

mpikfac strategies
"""

from __future__ import annotations

import textwrap

import mpikfac
from mpikfac_apps import cli
from mpikfac_apps.options.choices import differences
from mpikfac_apps.planning.options import LIST
from mpikfac_apps.text import show

WIDTH = 96


def main(argv: list[str] | None = None) -> int:
    """Print the list; return 0, or 2 after one line about invalid options."""
    return cli.run(LIST.program, lambda: print_list(argv))


def print_list(argv: list[str] | None) -> int:
    """Print the list; return 0.

    Raises:
        ValueError: an option is invalid.
    """
    LIST.read(argv)
    show([introduction(), *map(paragraph, mpikfac.plan.NAMED)])
    return 0


def introduction() -> list[str]:
    """Return lines about the units of costs."""
    text = (
        "'Sent' lists the bytes that a rank sends in a ring, in addition to averaging gradients: "
        "in steps with new factors + in a refresh + in every step. P ranks, w workers. 4F, 4T and "
        "4V are the bytes of all factors as squares, as triangles and as vectors; 4N those of all "
        "gradients, and 4R those of the thin matrices that replace them. K-FAC is one of several "
        "preconditioners under these plans: shampoo, kl-shampoo and soap do not send factors (the "
        "first term); muon and normuon do not send bases (the second) either. With the same "
        "estimator, results equal those of one process that trains on the joined batch with the "
        "same `refresh`."
    )
    return textwrap.wrap(text, WIDTH)


def paragraph(name: str) -> list[str]:
    """Return lines about a strategy."""
    way = mpikfac.plan.NAMED[name]
    kind = "the same estimator" if way.same else "another estimator"
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
