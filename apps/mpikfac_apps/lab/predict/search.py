"""Search for the Pareto-optimal choices of a strategy. Runs without MPI.

    mpikfac simulate --search true --model resnet50 --ranks 1024 --machine a100-hdr

A choice consists of a strategy, the number of workers, the number of levels of messages (one or
two), the compression, and the intervals.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import mpikfac
from mpikfac_apps.cli import write_picture
from mpikfac_apps.lab.predict.options import PredictionOptions
from mpikfac_apps.lab.predict.predictions import (
    NetworkShapes,
    Row,
    job_in_words,
    machine_in_words,
    network_of,
    predicted,
    without_factors,
)
from mpikfac_apps.text import MIB, NONE, mib, number, table


def _compressed(sums: str, inverses: str) -> dict[str, str]:
    sent = {"gradients": sums, "factors": sums, "inverses": inverses}
    return {f"compression.{what}.type": name for what, name in sent.items()}


WIRES: Mapping[str, Mapping[str, str]] = {
    "": {},
    "bfloat16": _compressed("bfloat16", "bfloat16"),
    "int8": _compressed("int8", "bfloat16"),
}
"""The compression options to try, by name, from the most to the least precise."""
STEP = 1.03  # costs are rounded to powers of this ratio, about the accuracy of predictions
COST = ("seconds", "sent", "memory")
PER_NODE = "transport.ranks_per_node"
Options = TypeVar("Options", bound=PredictionOptions)
# the parts of a choice that change results
TRAINED = ("factor_update_steps", "inv_update_steps", "wires")


def search(options: PredictionOptions, machine: mpikfac.predict.Machine) -> list[Row]:
    """Return a row for every choice and number of ranks; `best` marks Pareto-optimal choices.

    Only choices that compute the same results are compared, by seconds, bytes sent and memory.

    Raises:
        ValueError: no choice can be predicted, or strategies would have different preconditioners.
    """
    if options.preconditioner is None:
        raise ValueError(
            "search=true compares strategies with the same preconditioner, so preconditioner must "
            "not be null"
        )
    network, groups = network_of(options), dict[Hashable, list[Row]]()
    every = dict.fromkeys(options.ranks)
    rows = [row for ranks in every for row in variants(options, network, ranks, machine, WIRES)]
    if all("left_out" in row for row in rows):
        none = (
            "search=true needs a strategy with the same results as a single process on all images; "
            "hybrid also needs a number of ranks that is not prime"
        )
        raise ValueError(rows[0]["left_out"] if rows else none)
    for row in rows:
        for choice in at_intervals(row, options):
            numbers = row["ranks"], *(choice[name] for name in TRAINED)
            groups.setdefault(numbers, []).append(choice)
    found: list[Row] = []
    for rows in groups.values():
        best = front([costs(row) for row in rows])
        flagged = [row | {"best": place in best} for place, row in enumerate(rows)]
        found += sorted(flagged, key=lambda row: float(row["seconds"]))
    return found


def front(points: Sequence[Sequence[float]]) -> set[int]:
    """Return the indices of the Pareto-optimal points; lower coordinates are better.

    A point is better than another if it is at least as good in every coordinate, and either differs
    from it or comes first.
    """
    kept: list[int] = []
    # A better point comes first in this order.
    for place in sorted(range(len(points)), key=lambda place: tuple(points[place])):
        if not any(all(a <= b for a, b in zip(points[k], points[place])) for k in kept):
            kept.append(place)
    return set(kept)


def costs(row: Row) -> tuple[int, ...]:
    """Return a row's seconds, bytes sent and memory, as rounded logarithms to base `STEP`."""
    return tuple(round(math.log(row[name] or 1, STEP)) for name in COST)


# -- the choices -----------------------------------------------------------------------------------


def variants(
    options: PredictionOptions,
    network: NetworkShapes,
    ranks: int,
    machine: mpikfac.predict.Machine,
    wires: Mapping[str, Mapping[str, str]],
) -> list[Row]:
    """Return a row with the prediction for each variant of each strategy, on `ranks` ranks.

    Strategies that do not give the results of a single process are left out. In a row, `change`
    contains the choices that the variant adds to the options, and `wires` is the name of its
    compression.

    Args:
        wires: the choices of compression to try, by name.
    """
    rows = []
    for name in filter(alike, dict.fromkeys(options.strategy)):
        for wire, change in changes(options, name, ranks, machine, wires):
            row = predicted(changed(options, change), network, name, ranks, machine)
            rows.append(row | {"change": change, "wires": wire})
    return rows


def changed(options: Options, change: Mapping[str, Any]) -> Options:
    """Return the options with additional choices of a strategy, as if the user had set them."""
    return replace(options, given={**options.given, **change})


def alike(name: str) -> bool:
    """Return whether a strategy gives the results of a single process with the global batch."""
    way = mpikfac.plan.NAMED.get(name)
    return way is not None and way.same and way.strategy.refresh == mpikfac.Refresh()


def changes(
    options: PredictionOptions,
    name: str,
    ranks: int,
    machine: mpikfac.predict.Machine,
    wires: Mapping[str, Mapping[str, str]],
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the compression's name and the additional choices of each variant of a strategy.

    Choices that the user has set do not vary.
    """
    given, per_node = options.change, machine.ranks_per_node
    workers: list[dict[str, Any]] = [{}]
    if name == "hybrid" and not any(key.startswith("assignment.") for key in given):
        counts = mpikfac.plan.divisors(ranks)[1:-1]
        workers = [{"assignment.grad_workers": count} for count in counts]
    levels: list[dict[str, Any]] = [{}]
    if machine.between and per_node and per_node < ranks and PER_NODE not in given:
        levels.append({PER_NODE: per_node})
    if any(key.startswith("compression.") for key in given):
        wires = {"": {}}
    for rows, level, wire in itertools.product(workers, levels, wires):
        yield wire, {**rows, **level, **wires[wire]}


def at_intervals(row: Row, options: PredictionOptions) -> Iterator[Row]:
    """Yield a variant's costs, also at other intervals if its compression is as requested.

    Nothing is yielded for a variant without a prediction. If the preconditioner has no factors,
    there are no other intervals.
    """
    if "left_out" in row:
        return
    given = row["factor_update_steps"], row["inv_update_steps"]
    stagger = options.change.get("refresh.stagger", 1)
    of_choice = {
        "strategy": row["strategy"],
        "ranks": row["ranks"],
        "workers": row["workers"],
        "ranks_per_node": row["change"].get(PER_NODE),
        "wires": row["wires"],
    }
    alone = row["wires"] or without_factors(options)
    pairs = [given] if alone else intervals(*given, stagger)
    for factors, bases in pairs:
        job = mpikfac.predict.Job(options.model, options.batch_per_rank, factors, bases)
        parts = mpikfac.predict.shares(job, stagger)
        asked = (factors, bases) == given
        cost = {name: row["mean"][name] if asked else mean(row, parts, name) for name in COST[:2]}
        cost |= {"memory": row["memory"], "factor_update_steps": factors, "inv_update_steps": bases}
        yield of_choice | cost | {"asked": asked and not row["wires"]}


def intervals(
    factor_update_steps: int, inv_update_steps: int, stagger: int = 1
) -> list[tuple[int, int]]:
    """Return the intervals of factors and of bases, and pairs with one of them halved or doubled.

    In an additional pair, bases are computed only in steps that also compute new factors.
    """
    further = [
        *((factors, inv_update_steps) for factors in _around(factor_update_steps)),
        *((factor_update_steps, bases) for bases in _around(inv_update_steps)),
    ]
    whole = [(factors, bases) for factors, bases in further if not bases % (factors * stagger)]
    return [(factor_update_steps, inv_update_steps), *whole]


def _around(interval: int) -> list[int]:
    """Return half of an interval, if it is a whole number, and twice the interval."""
    return [2 * interval] if interval % 2 else [interval // 2, 2 * interval]


def mean(row: Row, parts: Mapping[tuple[bool, bool], float], name: str) -> float:
    """Return the mean over all steps of a predicted value, given each kind's fraction of steps."""
    kinds = {(False, False): "ordinary", (True, False): "factors", (True, True): "refresh"}
    return sum(parts[kind] * float(row[step][name]) for kind, step in kinds.items())


# -- the page --------------------------------------------------------------------------------------


def heading(options: PredictionOptions, machine: mpikfac.predict.Machine) -> list[str]:
    """Return lines that describe the job, the machine and the columns of the tables."""
    return [
        job_in_words(options),
        *machine_in_words(machine),
        "The choices that no other choice with the same intervals and compression beats:",
        "  ms of a mean step, MiB sent by a rank in a mean step, and maximum MiB kept by a rank;",
        f"  values that differ by less than {STEP - 1:.0%} can count as equal",
        "* its results differ from those requested; predictions do not show how well it trains",
    ]


def section(ranks: int, rows: Sequence[Row]) -> list[str]:
    """Return a table of the Pareto-optimal choices for a number of ranks."""
    same = [row for row in rows if row["ranks"] == ranks]
    best = [row for row in same if row["best"]]
    head = ("strategy", "workers", "per node", "wires", "factors", "bases", "mean", "sent", "MiB")
    lines = table([head, *map(cells, best)])
    return [f"{number(ranks, 'rank')}: {len(best)} of {len(same)} choices", *lines]


def cells(row: Row) -> tuple[str, ...]:
    """Return the cells of a choice in the table of Pareto-optimal choices."""
    return (
        row["strategy"] + ("" if row["asked"] else "*"),
        *(str(row[name] or NONE) for name in ("workers", "ranks_per_node", "wires")),
        *(str(row[name]) for name in ("factor_update_steps", "inv_update_steps")),
        f"{row['seconds'] * 1e3:.1f}",
        *(mib(row[name]) for name in COST[1:]),
    )


def draw(rows: Sequence[Row], path: Path) -> None:
    """Plot the Pareto-optimal choices: ms per step against MiB sent, a panel per number of ranks.

    The area of a marker grows linearly with a rank's memory. Markers are hollow for choices whose
    results differ from those requested.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    best = [row for row in rows if row["best"]]
    ranks = list(dict.fromkeys(row["ranks"] for row in best))
    names = list(dict.fromkeys(row["strategy"] for row in best))
    most = max(row["memory"] for row in best)
    figure = Figure(figsize=(7 * len(ranks), 5), layout="constrained")
    panels = dict(zip(ranks, figure.subplots(1, len(ranks), squeeze=False)[0]))
    for row in best:
        colour = f"C{names.index(row['strategy'])}"
        face, area = colour if row["asked"] else "none", 20 + 200 * row["memory"] / most
        at = row["sent"] / MIB, 1e3 * row["seconds"]
        panels[row["ranks"]].scatter(*at, s=area, facecolors=face, edgecolors=colour)
    for count, panel in panels.items():
        panel.set(title=number(count, "rank"), xlabel="MiB sent by a rank", ylabel="ms per step")
        panel.grid(alpha=0.3)
    keys = [Patch(color=f"C{place}") for place in range(len(names))]
    words = "hollow: results other than those requested; area: maximum memory of a rank"
    figure.legend(keys, names, loc="outside lower center", ncols=5, title=words)
    write_picture(figure, path)
