"""Write the findings of a study as sentences about the results of complete cells."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from mpikfac_apps.lab.study.results import BUSY, Measured, other_estimator
from mpikfac_apps.lab.study.seeds import LEAST, NAMED, SeedMean, doubt, leaders, mean_of
from mpikfac_apps.text import brief, brief_mib, listed, ms, number, percent

MARK = "*"
"""The mark after a time of a cell that shared the machine with other work."""
CROWDED = ", more ranks than cores"
"""Follows a number of ranks that shared cores."""
TEST_IMAGES = {"digits": 360, "cifar10": 10_000, "cifar100": 10_000}
"""The number of test images of data sets of fixed size."""


def findings(
    cells: Sequence[Measured], target: float | None, letters: Mapping[str, str]
) -> Iterator[str]:
    """Yield sentences about complete cells; those that limit what the results show come first."""
    done = [cell for cell in cells if cell.complete and cell.step]
    if not done:
        yield "No cell is complete yet."
        return
    yield from _about_missing(cells, done)
    yield from _about_machine(done)
    yield from _about_seeds(done)
    yield from _about_test(done)
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
    """Return the complete K-FAC cells on the largest number of ranks that has no pending cells."""
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
    if dirty := sum(str(cell.environment.get("commit")).endswith("-dirty") for cell in done):
        yield (
            f"{dirty} of {number(len(done), 'cell')} ran in a checkout with uncommitted changes: "
            "the commit below does not fully describe their code."
        )


def _about_machine(done: Sequence[Measured]) -> Iterator[str]:
    if busy := [cell.others for cell in done if cell.busy]:
        yield (
            f"While {len(busy)} of {len(done)} cells ran, other work took over {percent(BUSY, 0)} "
            f"of the machine's cores, up to {percent(max(busy), 0)}: the times of these cells are "
            f"not reliable. Tables and pictures mark them with {MARK}."
        )
    crowded = [cell for cell in done if cell.crowded]
    if crowded:
        ranks = sorted({cell.cell.ranks for cell in crowded})
        cores = distinct(cell.result.cores for cell in crowded if cell.result)
        yield (
            f"On {listed(map(str, ranks))} ranks, the machine has fewer cores than ranks "
            f"({cores}): the times include waiting for cores, which cannot be told from waiting "
            "for messages. Compare strategies on the same number of ranks. To measure scaling, "
            "use a core for each rank."
        )


def _about_seeds(done: Sequence[Measured]) -> Iterator[str]:
    """Yield sentences about variants without an interval, and about noise between seeds."""
    seeds = Counter((cell.cell.variant, cell.cell.ranks) for cell in done)
    once = sum(count == 1 for count in seeds.values())
    if once == len(seeds):
        yield "Each cell was run once: differences within the ranges of the table are noise."
    elif few := sum(count < LEAST for count in seeds.values()):
        yield (
            f"{few} of {len(seeds)} variants have fewer than {LEAST} complete seeds, and therefore "
            "a range instead of a 95 % interval."
        )
    steps: dict[str, list[float]] = defaultdict(list)
    for cell in done:
        if cell.step and not cell.busy:
            steps[_place(cell)].append(cell.step)
    differences = {place: max(times) / min(times) - 1 for place, times in steps.items()}
    if any(differences.values()):
        worst = max(differences, key=differences.__getitem__)
        yield (
            "Seeds of a variant do the same work in a step, but their times differ by up to "
            f"{percent(differences[worst], 0)} ({worst}): such a difference between two cells says "
            "nothing about their variants."
        )


def _about_test(done: Sequence[Measured]) -> Iterator[str]:
    """State how much a single test image changes an accuracy, if the number of images is known."""
    counts = {
        cell.cell.options.data.test_images or TEST_IMAGES.get(cell.cell.options.data.name)
        for cell in done
    }
    (count,) = counts if len(counts) == 1 else (None,)
    if count and done[0].curve.measure.name == "accuracy":
        yield (
            f"The test has {number(count, 'image')}: each of them changes the accuracy by "
            f"{100 / count:.2g} percentage points."
        )


# -- what the results show -----------------------------------------------------------------------


def _about_pace(done: Sequence[Measured], kfac: Sequence[Measured]) -> Iterator[str]:
    """Compare the step times of variants by their means over seeds, as the table does."""
    steps: dict[str, list[float | None]] = defaultdict(list)
    ratios: dict[str, list[float | None]] = defaultdict(list)
    for cell in kfac:
        steps[cell.cell.variant].append(cell.step)
        ratios[cell.cell.variant].append(against_sgd(done, cell))
    means = _means(steps)
    best, *near = leaders(means)
    ranks = number(kfac[0].cell.ranks, "rank")
    if near:
        claim = "no variant is shown to have the fastest K-FAC step"
    else:
        claim = f"{best} has the fastest K-FAC step"
    yield f"On {ranks}, {claim}: steps take {_range(means, ms)} ms on average.{doubt(means)}"
    if relative := _means(ratios):
        yield (
            f"Relative to SGD's, these steps take {_range(relative, '{:.2f}'.format)} times as "
            f"long on average.{unclear(relative)}"
        )


def _means(values: Mapping[str, Sequence[float | None]]) -> dict[str, SeedMean]:
    """Return the means over seeds of the variants for which all seeds have a value."""
    means = {name: mean_of(of_seeds) for name, of_seeds in values.items() if None not in of_seeds}
    return {name: mean for name, mean in means.items() if mean is not None}


def _range(means: Mapping[str, SeedMean], show: Callable[[float], str]) -> str:
    """Return the lowest and the highest of several means as text."""
    low, high = (show(f(mean.mean for mean in means.values())) for f in (min, max))
    return low if low == high else f"{low} to {high}"


def against_sgd(cells: Iterable[Measured], cell: Measured) -> float | None:
    """Return a cell's step time relative to that of SGD, with the same ranks and matrix values.

    The result is None if there is no complete SGD cell with these values.
    """
    base = baseline(cells, cell)
    return cell.step / base.step if base and base.step and cell.step else None


def unclear(ratios: Mapping[str, SeedMean]) -> str:
    """Return a sentence about ratios to SGD whose intervals include 1; "" if there are none."""
    names = [name for name, ratio in ratios.items() if ratio.count > 1 and ratio.covers(1.0)]
    if not names:
        return ""
    spread = ratios[names[0]].spread
    return f" No difference from SGD is shown for {_labels(names)}: {spread} cover 1."


def _about_size(kfac: Sequence[Measured]) -> Iterator[str]:
    if kfac[0].cell.ranks > 1:
        sent = {cell.cell.variant: cell.wire for cell in kfac}
        kept = {cell.cell.variant: cell.memory for cell in kfac}
        yield f"MiB sent per rank and step on these ranks: {_sizes(sent)}."
        yield f"MiB kept on the rank with the largest arenas: {_sizes(kept)}."


def _sizes(sizes: Mapping[str, float]) -> str:
    """Return the smallest and the largest size as text, each with its variants."""
    names: dict[str, list[str]] = {}
    for name in sorted(sizes, key=sizes.__getitem__):
        names.setdefault(brief_mib(sizes[name]), []).append(name)
    if len(names) == 1:
        return f"{next(iter(names))} for all variants"
    least, *_, most = (f"{size} ({_labels(who)})" for size, who in names.items())
    return f"from {least} to {most}"


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
    times: dict[str, list[float | None]] = defaultdict(list)
    for cell in done:
        when = reached[cell.cell.label]
        times[_place(cell)].append(when.seconds if when else None)
    if means := _means(times):
        sgd = {_place(cell) for cell in done if _is_sgd(cell)}
        yield _first(means, sgd, measure.text(target))


def _first(means: Mapping[str, SeedMean], sgd: Collection[str], target: str) -> str:
    """State which variant reached the target first, if the seeds show it, and how long SGD took."""
    best, *near = leaders(means)
    claim = "no variant is shown to be" if near else f"{best} was"
    text = f"In seconds of training, {claim} first at {target}. "
    text += f"Variants needed {_range(means, brief)} s on average"
    if baselines := {name: mean for name, mean in means.items() if name in sgd}:
        text += f", and SGD {_range(baselines, brief)} s"
    return f"{text}.{doubt(means)}"


def _place(cell: Measured) -> str:
    """Return a cell's variant and number of ranks, the same for all seeds."""
    return f"{cell.cell.variant} on {number(cell.cell.ranks, 'rank')}"


def _is_sgd(cell: Measured) -> bool:
    return cell.cell.options.optimizer == "sgd"


def _about_numbers(done: Sequence[Measured], letters: Mapping[str, str]) -> Iterator[str]:
    """Compare the training losses of cells that compute the same results, except for rounding."""
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
            f"Between groups, {done[0].curve.measure.name} may differ."
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
    """Return whether the bytes counted in a cell's trace differ from the bytes of its plan."""
    return cell.counted is not None and abs(cell.counted - cell.handed) > 1e-6 * cell.handed


def _labels(labels: Sequence[str]) -> str:
    """Return the names of cells or variants as text, shortened if there are many."""
    if len(labels) <= NAMED:
        return listed(labels)
    return f"{', '.join(labels[:NAMED])} and {len(labels) - NAMED} more"


def baseline(cells: Iterable[Measured], cell: Measured) -> Measured | None:
    """Return the complete SGD cell with the ranks and matrix values of `cell`, or None."""
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
