"""Write sentences about the numbers of a study."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import mpikfac
from mpikfac_apps.options.options import Options
from mpikfac_apps.study.results import Measured
from mpikfac_apps.text import brief_mib, listed, ms, number, percent

BUSY = 0.1  # share of the cores that foreign work may use without a warning


def findings(
    cells: Sequence[Measured], target: float | None, letters: Mapping[str, str]
) -> Iterator[str]:
    """Return sentences about the numbers; fewer numbers give fewer sentences."""
    done = [cell for cell in cells if cell.complete and cell.step]
    if not done:
        yield "No cell is complete yet."
        return
    most = max(cell.cell.ranks for cell in done)
    kfac = [c for c in done if c.cell.options.optimizer == "kfac" and c.cell.ranks == most]
    if len({cell.cell.variant for cell in kfac}) > 1:
        yield from _about_pace(done, kfac)
        yield from _about_size(kfac)
    if target:
        yield from _about_learning(done, target)
    yield from _about_numbers(done, letters)
    yield from _about_bytes(done)
    crowded = [cell for cell in done if cell.crowded]
    if crowded:
        ranks = sorted({cell.cell.ranks for cell in crowded})
        cores = distinct(cell.result.cores for cell in crowded if cell.result)
        yield (
            f"On {listed(map(str, ranks))} ranks, the machine has fewer cores than ranks "
            f"({cores}): times grow with the ranks because ranks wait for cores, more than for "
            "messages. Compare strategies on the same number of ranks. To measure scaling, use a "
            "core for each rank."
        )
    others = [(cell.result.others or 0.0) if cell.result else 0.0 for cell in done]
    busy = [share for share in others if share > BUSY]
    if busy:
        yield (
            f"While {len(busy)} of {len(done)} cells ran, other work took over {percent(BUSY, 0)} "
            f"of the machine's cores, up to {percent(max(busy), 0)}: "
            "the times of these cells are not reliable."
        )
    if len({(cell.cell.variant, cell.cell.ranks) for cell in cells}) == len(cells):
        yield "Each cell was run once: differences within the ranges of the table are noise."


def _about_pace(done: Sequence[Measured], kfac: Sequence[Measured]) -> Iterator[str]:
    """Name the quickest and the slowest variant, by the median over seeds."""
    paces: dict[str, list[float]] = {}
    for cell in kfac:
        paces.setdefault(cell.cell.variant, []).append(cell.step or 0.0)
    middle = {variant: median(steps) for variant, steps in paces.items()}
    quick, slow = (f(middle, key=lambda variant: middle[variant]) for f in (min, max))
    bases = [baseline(done, cell) for cell in kfac if cell.cell.variant == quick]
    steps = [base.step for base in bases if base and base.step]
    ratio = f", {middle[quick] / median(steps):.2f} times SGD's" if steps else ""
    yield (
        f"On {number(kfac[0].cell.ranks, 'rank')}, {quick} has the quickest K-FAC step "
        f"({ms(middle[quick])} ms{ratio}) and {slow} the slowest ({ms(middle[slow])} ms)."
    )


def _about_size(kfac: Sequence[Measured]) -> Iterator[str]:
    if kfac[0].cell.ranks > 1:
        least, most = (f(kfac, key=lambda cell: cell.wire) for f in (min, max))
        yield (
            f"On these ranks, {least.cell.variant} sends least ({brief_mib(least.wire)} MiB per "
            f"rank and step) and {most.cell.variant} most ({brief_mib(most.wire)} MiB)."
        )
        least, most = (f(kfac, key=lambda cell: cell.memory) for f in (min, max))
        yield (
            f"{least.cell.variant} holds least ({brief_mib(least.memory)} MiB on the fullest "
            f"rank), {most.cell.variant} most ({brief_mib(most.memory)} MiB)."
        )


def _about_learning(done: Sequence[Measured], target: float) -> Iterator[str]:
    reached = [(cell.curve.reached(target), cell) for cell in done]
    times = sorted(((when[1], c) for when, c in reached if when), key=lambda pair: pair[0])
    if not times:
        yield f"No cell reached a test accuracy of {percent(target)}."
        return
    seconds, first = times[0]
    text = f"{first.cell.label} was first at {percent(target)}, after {seconds:.1f} s of training"
    sgd = [(s, c) for s, c in times if c.cell.options.optimizer == "sgd"]
    if sgd and sgd[0][1] is not first:
        text += f"; of SGD, {sgd[0][1].cell.label} after {sgd[0][0]:.1f} s"
    missing = len(done) - len(times)
    short = f" {missing} of {len(done)} cells did not reach the target." if missing else ""
    yield f"{text}.{short}"


def _about_numbers(done: Sequence[Measured], letters: Mapping[str, str]) -> Iterator[str]:
    """Compare the losses of cells that compute the same numbers."""
    alike: dict[Any, list[float]] = {}
    for cell in done:
        if cell.train_loss is not None:
            place = (letters[cell.cell.variant], cell.cell.ranks, cell.cell.options.seed)
            alike.setdefault(place, []).append(cell.train_loss)
    spreads = [max(v) / min(v) - 1 for v in alike.values() if len(v) > 1 and min(v) > 0]
    if spreads:
        apart = f"differ by at most {max(spreads):.0e} of their value"
        yield (
            f"Except for rounding, the same numbers come from {_alike(letters)}. The mean training "
            "losses of the first epoch "
            f"{apart if any(spreads) else 'are equal in all six saved digits'}. "
            "Accuracy differs between groups by design."
        )
    others = [c.cell.variant for c in done if _other_estimator(c.cell.options)]
    if others:
        yield (
            f"A different estimator of the curvature, by design: {listed(dict.fromkeys(others))}; "
            "see the table of variants."
        )


def _other_estimator(options: Options) -> bool:
    asked = options.kfac.distribution
    named = mpikfac.plan.NAMED.get(asked.strategy)  # "auto" chooses no different estimator
    known = named is not None and not named.same
    return options.optimizer == "kfac" and (known or asked.change.get("reduction") == "none")


def _alike(letters: Mapping[str, str]) -> str:
    groups: dict[str, list[str]] = {}
    for variant, letter in letters.items():
        groups.setdefault(letter, []).append(variant)
    several = {letter: names for letter, names in groups.items() if len(names) > 1}
    return "; from ".join(f"{listed(names)} ({letter})" for letter, names in several.items())


def _about_bytes(done: Sequence[Measured]) -> Iterator[str]:
    traced = [cell for cell in done if cell.counted is not None]
    other = [c for c in traced if abs((c.counted or 0) - c.handed) > 1e-6 * c.handed]
    if traced:
        text = "Without overlapped messages, bytes counted in traced steps equal the plan's bytes"
        names = listed(cell.cell.label for cell in other) if other else ""
        yield f"{text}, but not in {names}." if other else f"{text} in all cells."


def baseline(cells: Iterable[Measured], cell: Measured) -> Measured | None:
    """Return complete training with SGD on as many ranks with the same axes; None if missing."""
    for other in cells:
        alike = (other.cell.ranks, other.cell.axes) == (cell.cell.ranks, cell.cell.axes)
        if alike and other.cell.options.optimizer == "sgd" and other.complete:
            return other
    return None


def distinct(values: Iterable[Any]) -> str:
    """Return the distinct values, of a dict the keys, separated by commas."""
    flat: dict[str, None] = {}
    for value in values:
        for word in value if isinstance(value, dict) else [value]:
            flat |= {str(word): None} if word is not None else {}
    return ", ".join(flat)
