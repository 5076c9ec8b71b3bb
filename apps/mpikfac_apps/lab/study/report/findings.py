"""Write the findings of a study as sentences about the results of complete cells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from mpikfac_apps.lab.study.results import Measured, other_estimator
from mpikfac_apps.lab.study.seeds import LEAST, SeedMean, doubt, mean_of
from mpikfac_apps.text import brief_mib, listed, ms, number, percent

BUSY = 0.1  # fraction of the cores that other work can use without a warning
NAMED = 4  # cells named in a sentence; the others are counted


def findings(
    cells: Sequence[Measured], target: float | None, letters: Mapping[str, str]
) -> Iterator[str]:
    """Yield sentences about complete cells; sentences that qualify the others come first."""
    done = [cell for cell in cells if cell.complete and cell.step]
    if not done:
        yield "No cell is complete yet."
        return
    yield from _about_missing(cells, done)
    yield from _about_machine(done)
    yield from _about_seeds(done)
    if bound := [cell.cell.label for cell in done if cell.curve.bound]:
        yield (
            f"A clip shortened nearly all steps of {_labels(bound)}, so it determines their length."
        )
    if target:
        yield from _about_learning(cells, done, target)
    kfac = _compared(cells)
    if len({cell.cell.variant for cell in kfac}) > 1:
        yield from _about_pace(done, kfac)
        yield from _about_size(kfac)
    yield from _about_numbers(done, letters)
    yield from _about_bytes(done)


def _compared(cells: Sequence[Measured]) -> list[Measured]:
    """Return the complete K-FAC cells on the largest number of ranks without a pending cell."""
    waiting = {cell.cell.ranks for cell in cells if cell.pending}
    kfac = [c for c in cells if c.complete and c.step and c.cell.options.optimizer == "kfac"]
    kfac = [cell for cell in kfac if cell.cell.ranks not in waiting]
    most = max((cell.cell.ranks for cell in kfac), default=0)
    return [cell for cell in kfac if cell.cell.ranks == most]


# -- what limits the results ---------------------------------------------------------------------


def _about_missing(cells: Sequence[Measured], done: Sequence[Measured]) -> Iterator[str]:
    if pending := sum(cell.pending for cell in cells):
        yield (
            f"{number(pending, 'cell')} of {len(cells)} did not run to the end: the sentences "
            "below are only about complete cells, and compare variants only on numbers of ranks "
            "where all cells have ended."
        )
    if failed := [cell.cell.label for cell in cells if cell.state == "failed"]:
        count = number(len(failed), "cell")
        yield f"{count} failed and are ignored below: {_labels(failed)}."
    if differing := [cell.cell.label for cell in done if _counts_differ(cell)]:
        yield (
            "The bytes counted in traced steps differ from the plan's bytes in "
            f"{_labels(differing)}: the plan does not describe these runs."
        )
    versions = {str(cell.environment.get("packages")) for cell in done}
    if len(versions) > 1:
        yield "Not all cells were run with the same package versions."


def _about_machine(done: Sequence[Measured]) -> Iterator[str]:
    others = [(cell.result.others or 0.0) if cell.result else 0.0 for cell in done]
    busy = [share for share in others if share > BUSY]
    if busy:
        yield (
            f"While {len(busy)} of {len(done)} cells ran, other work took over {percent(BUSY, 0)} "
            f"of the machine's cores, up to {percent(max(busy), 0)}: "
            "the times of these cells are not reliable."
        )
    crowded = [cell for cell in done if cell.crowded]
    if crowded:
        ranks = sorted({cell.cell.ranks for cell in crowded})
        cores = distinct(cell.result.cores for cell in crowded if cell.result)
        yield (
            f"On {listed(map(str, ranks))} ranks, the machine has fewer cores than ranks "
            f"({cores}): times grow with the number of ranks mainly because ranks wait for cores, "
            "not for messages. Compare strategies on the same number of ranks. To measure scaling, "
            "use a core for each rank."
        )


def _about_seeds(done: Sequence[Measured]) -> Iterator[str]:
    """Yield sentences about cells without an interval over seeds."""
    seeds = Counter((cell.cell.variant, cell.cell.ranks) for cell in done)
    once = sum(count == 1 for count in seeds.values())
    if once == len(seeds):
        yield "Each cell was run once: differences within the ranges of the table are noise."
    elif few := sum(count < LEAST for count in seeds.values()):
        yield (
            f"{few} of {len(seeds)} variants have fewer than {LEAST} complete seeds, and therefore "
            "a range instead of a 95 % interval."
        )


# -- what the results show -----------------------------------------------------------------------


def _about_pace(done: Sequence[Measured], kfac: Sequence[Measured]) -> Iterator[str]:
    """Name the fastest and the slowest variant, by the median over seeds."""
    paces: dict[str, list[float]] = {}
    for cell in kfac:
        paces.setdefault(cell.cell.variant, []).append(cell.step or 0.0)
    middle = {variant: median(steps) for variant, steps in paces.items()}
    quick, slow = (f(middle, key=lambda variant: middle[variant]) for f in (min, max))
    bases = [baseline(done, cell) for cell in kfac if cell.cell.variant == quick]
    ratio = against_sgd(paces[quick], [base.step for base in bases if base and base.step])
    yield (
        f"On {number(kfac[0].cell.ranks, 'rank')}, {quick} has the fastest K-FAC step "
        f"({ms(middle[quick])} ms{ratio}) and {slow} the slowest ({ms(middle[slow])} ms)."
        f"{doubt(quick, {name: mean_of(steps) for name, steps in paces.items()})}"
    )


def against_sgd(steps: Sequence[float], sgd: Sequence[float]) -> str:
    """Return the ratio of median steps, with a note if seeds differ by more; "" without SGD.

    Args:
        steps: seconds by seed.
        sgd: seconds of SGD by seed.
    """
    own, base = mean_of(steps), mean_of(sgd)
    if own is None or base is None:
        return ""
    ratio = f", {median(steps) / median(sgd):.2f} times SGD's"
    several = min(own.count, base.count) > 1
    return f"{ratio}, but seeds differ by more" if several and own.overlaps(base) else ratio


def _about_size(kfac: Sequence[Measured]) -> Iterator[str]:
    if kfac[0].cell.ranks > 1:
        least, most = (f(kfac, key=lambda cell: cell.wire) for f in (min, max))
        if least.wire == most.wire:
            yield (
                f"On these ranks, all variants send {brief_mib(most.wire)} MiB per rank and step."
            )
        else:
            yield (
                f"On these ranks, {least.cell.variant} sends the least ({brief_mib(least.wire)} "
                f"MiB per rank and step) and {most.cell.variant} sends the most "
                f"({brief_mib(most.wire)} MiB)."
            )
        least, most = (f(kfac, key=lambda cell: cell.memory) for f in (min, max))
        if least.memory == most.memory:
            yield f"All variants keep at most {brief_mib(most.memory)} MiB per rank in memory."
        else:
            yield (
                f"{least.cell.variant} keeps the least in memory (at most "
                f"{brief_mib(least.memory)} MiB per rank) and {most.cell.variant} keeps the most "
                f"({brief_mib(most.memory)} MiB)."
            )


def _about_learning(
    cells: Sequence[Measured], done: Sequence[Measured], target: float
) -> Iterator[str]:
    measure = done[0].curve.measure
    reached = {cell.cell.label: cell.curve.reached(target) for cell in done}
    missing = sum(when is None for when in reached.values())
    if missing == len(done):
        yield f"No complete cell reached a test {measure.name} of {measure.text(target)}."
        return
    if missing:
        yield f"{missing} of {len(done)} complete cells did not reach {measure.text(target)}."
    if any(cell.pending for cell in cells):
        return  # a pending cell might be faster
    times: dict[str, list[float | None]] = {}
    for cell in done:
        when = reached[cell.cell.label]
        times.setdefault(_place(cell), []).append(when.seconds if when else None)
    means = {
        name: mean
        for name, seconds in times.items()
        if None not in seconds and (mean := mean_of(seconds)) is not None
    }
    order = sorted(means, key=lambda name: means[name].mean)
    if order:
        sgd = {_place(cell) for cell in done if _is_sgd(cell)}
        yield _first(order, means, sgd, measure.text(target))


def _first(
    order: Sequence[str], means: Mapping[str, SeedMean], sgd: Collection[str], target: str
) -> str:
    """Name the variant that reached the target first, and the first SGD variant."""

    def after(name: str) -> str:
        mean = means[name]
        seeds = f" (mean of {mean.count} seeds)" if mean.count > 1 else ""
        return f"after {mean.mean:.1f} s{seeds}"

    text = f"{order[0]} was first at {target}, {after(order[0])} of training"
    baselines = [name for name in order if name in sgd]
    if baselines and baselines[0] != order[0]:
        text += f"; the first SGD variant, {baselines[0]}, {after(baselines[0])}"
    return f"{text}.{doubt(order[0], means)}"


def _place(cell: Measured) -> str:
    """Return a cell's variant and number of ranks, the same for all seeds."""
    return f"{cell.cell.variant} on {number(cell.cell.ranks, 'rank')}"


def _is_sgd(cell: Measured) -> bool:
    return cell.cell.options.optimizer == "sgd"


def _about_numbers(done: Sequence[Measured], letters: Mapping[str, str]) -> Iterator[str]:
    """Compare the losses of cells that compute the same results."""
    places: dict[Any, dict[str, float]] = {}
    for cell in done:
        if cell.train_loss is not None:
            place = (letters[cell.cell.variant], cell.cell.ranks, cell.cell.options.seed)
            places.setdefault(place, {})[cell.cell.variant] = cell.train_loss
    alike = {place: losses for place, losses in places.items() if len(losses) > 1}
    spreads = [max(v.values()) / min(v.values()) - 1 for v in alike.values() if min(v.values()) > 0]
    if spreads:
        groups: dict[str, dict[str, None]] = {}
        for (letter, *_), losses in alike.items():
            groups.setdefault(letter, {}).update(dict.fromkeys(losses))
        names = "; from ".join(f"{listed(names)} ({letter})" for letter, names in groups.items())
        apart = f"differ by at most {max(spreads):.0e} of their value"
        yield (
            f"Except for rounding, the same results come from {names}. The mean training losses of "
            f"the first epoch {apart if any(spreads) else 'are equal in all six saved digits'}. "
            f"{done[0].curve.measure.name.capitalize()} differs between groups by design."
        )
    others = [c.cell.variant for c in done if other_estimator(c.cell.options)]
    if others:
        yield (
            f"A different estimator of the curvature, by design: {listed(dict.fromkeys(others))}; "
            "see the table of variants."
        )


def _about_bytes(done: Sequence[Measured]) -> Iterator[str]:
    traced = [cell for cell in done if cell.counted is not None]
    if traced and not any(map(_counts_differ, traced)):
        yield (
            "In all complete cells without overlapped messages, the bytes counted in traced steps "
            "equal the plan's bytes."
        )


def _counts_differ(cell: Measured) -> bool:
    """Return whether the bytes of a trace differ from the bytes of the plan."""
    return cell.counted is not None and abs(cell.counted - cell.handed) > 1e-6 * cell.handed


def _labels(labels: Sequence[str]) -> str:
    """Return the names of cells as text, shortened if there are many."""
    if len(labels) <= NAMED:
        return listed(labels)
    return f"{', '.join(labels[:NAMED])} and {number(len(labels) - NAMED, 'more cell')}"


def baseline(cells: Iterable[Measured], cell: Measured) -> Measured | None:
    """Return the complete SGD cell with the same ranks and axes; None if there is none."""
    for candidate in cells:
        alike = (candidate.cell.ranks, candidate.cell.axes) == (cell.cell.ranks, cell.cell.axes)
        if alike and candidate.cell.options.optimizer == "sgd" and candidate.complete:
            return candidate
    return None


def distinct(values: Iterable[Any]) -> str:
    """Return the distinct values, or the distinct keys of dicts, separated by commas."""
    flat: dict[str, None] = {}
    for value in values:
        for word in value if isinstance(value, dict) else [value]:
            flat |= {str(word): None} if word is not None else {}
    return ", ".join(flat)
