"""Recommend a batch size, servers, ranks and a strategy for training. Runs without MPI.

    mpikfac advise --model resnet50 --ranks 64 --machine v100-edr --factor_update_steps 10

The advice applies two lemmas, on the mini-batch and on parameter servers, whose assumptions
docs/extensions/advice.md states.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import mpikfac
from mpikfac import files
from mpikfac.preconditioners import Preconditioner
from mpikfac_apps import cli
from mpikfac_apps.lab.predict.options import ADVISE, SGD, AdviseOptions
from mpikfac_apps.lab.predict.predictions import (
    BOUNDED,
    OVERLAP,
    WIDTH,
    Row,
    intervals_in_words,
    job_in_words,
    machine_in_words,
    network_of,
    predictions,
)
from mpikfac_apps.lab.predict.search import PER_NODE, changed, variants
from mpikfac_apps.options import joints
from mpikfac_apps.options.fields import flat
from mpikfac_apps.options.strategy import preconditioner_of
from mpikfac_apps.planning.facts import strategy_of
from mpikfac_apps.text import MIB, number, show, table

PASSES = ("forward", "backward")
FLOAT32 = 4  # bytes


def main(argv: Sequence[str] | None = None) -> int:
    """Print the advice; return 0, or print a one-line error and return 2 if options are invalid."""
    return cli.run(ADVISE.program, lambda: advise(ADVISE.read(argv)))


def advise(options: AdviseOptions) -> int:
    """Print the advice for each number of ranks; return 0.

    Raises:
        ValueError: no strategy can be predicted.
        OSError: a file cannot be read or written.
    """
    machine = mpikfac.predict.load_machine(options.machine)
    choices = overlap_choices(options)
    rows = [
        row | needs(row, choice) | {"overlap": choice.given[OVERLAP]}
        for choice in choices
        for row in predictions(choice, machine)
    ]
    sections = [heading(options, machine)]
    for ranks in dict.fromkeys(options.ranks):
        candidates = [row for row in rows if row["ranks"] == ranks]
        if any("left_out" not in row for row in candidates):
            candidates += (row for choice in choices for row in further(ranks, choice, machine))
            row = best(candidates)
            rows += [row] if row not in rows else []
            shown = [row for row in rows if row["ranks"] == ranks]
            sections += [overview(ranks, shown), of_batch(row, options)]
            sections += [of_servers(ranks, options, machine), of_rate(row, options)]
    if options.efficiency:
        sections += [of_ranks(rows, options, machine)]
    show(sections)
    if options.json:
        files.write_text(options.json, json.dumps(rows, indent=1) + "\n", named=True)
    return 0


# -- the lemmas ------------------------------------------------------------------------------------


def images_to_cover(messages: float, per_image: float) -> int:
    """Return the fewest images per rank whose computation takes at least as long as the messages.

    Args:
        messages: the time of the messages, in seconds.
        per_image: the computing time of an image, in seconds.
    """
    return max(1, math.ceil(messages / per_image - 1e-9))


def servers_to_hide(size: float, clients: int, bandwidth: float, computing: float) -> int:
    """Return the minimum number of servers for which the clients' computing time hides messages.

    Every client pushes gradients and fetches weights, `size` bytes each, in equal parts to and from
    all servers. A server moves `bandwidth` bytes per second, and a client computes for `computing`
    seconds per step.
    """
    return max(1, math.ceil(2 * size * clients / (bandwidth * computing) - 1e-9))


def efficient(steps: Mapping[int, float], least: float) -> int:
    """Return the largest number of ranks whose efficiency is at least `least`.

    The efficiency on n ranks is the step time on a single rank divided by the step time on n ranks,
    with the same number of images per rank. In other words, it is the fraction of a single rank's
    throughput that each rank retains.

    Args:
        steps: the time of a step, in seconds, by number of ranks, including a single rank.
    """
    return max(ranks for ranks, seconds in steps.items() if steps[1] / seconds >= least)


def growing(options: AdviseOptions) -> tuple[str, ...]:
    """Return the names of the stages of a step whose time grows with the batch size.

    The time for the statistics does not depend on it if factors are computed from gradients.
    """
    chosen = options.preconditioner
    of_gradient = chosen is not None and chosen.form.of == "gradient"
    return PASSES if of_gradient else (*PASSES, "statistics")


def overlap_choices(options: AdviseOptions) -> list[AdviseOptions]:
    """Return the options with and without overlapped messages, or only as given if they choose."""
    values = [options.given[OVERLAP]] if OVERLAP in options.given else [True, False]
    return [replace(options, given={**options.given, OVERLAP: value}) for value in values]


def needs(row: Row, options: AdviseOptions) -> Row:
    """Return a row's computing time per image, and how many images hide its overlapped messages.

    The result is empty for a row without a prediction.
    """
    if "left_out" in row:
        return {}
    stages = row["mean"]["stages"]
    computing = sum(stages.get(stage, 0.0) for stage in growing(options))
    per_image = computing / options.batch_per_rank
    return {
        "per_image": per_image,
        "images": images_to_cover(row["mean"]["overlapped"], per_image),
    }


def further(ranks: int, options: AdviseOptions, machine: mpikfac.predict.Machine) -> Iterator[Row]:
    """Yield predictions for other numbers of gradient workers and message levels.

    They only cover strategies that give the same results as a single process.
    """
    for row in variants(options, network_of(options), ranks, machine, {"": {}}):
        if row["change"]:
            yield row | needs(row, options) | {"overlap": options.given[OVERLAP]}


def best(rows: Sequence[Row]) -> Row:
    """Return the row of the fastest strategy of the most preferred kind that has a prediction.

    Strategies that compute the results of a single process are preferred, then those with a
    different estimator or with only an upper bound as prediction, and finally training without
    K-FAC.
    """
    candidates = [row for row in rows if "left_out" not in row]
    rank = min(_place(row["strategy"]) for row in candidates)
    candidates = [row for row in candidates if _place(row["strategy"]) == rank]
    return min(candidates, key=lambda row: float(row["mean"]["seconds"]))


def _place(name: str) -> int:
    if name.startswith("sgd"):
        return 2
    return 0 if mpikfac.plan.NAMED[name].same and name not in BOUNDED else 1


# -- the page --------------------------------------------------------------------------------------


def heading(options: AdviseOptions, machine: mpikfac.predict.Machine) -> list[str]:
    """Return lines that describe the job, the machine and the columns of the tables."""
    return [
        job_in_words(options),
        *machine_in_words(machine),
        "Milliseconds of a mean step. overlapped: messages sent while ranks compute; blocking: all",
        "  other messages, which no batch hides; step, exposed: the step as simulated,",
        "  and the part in which a rank does nothing but communicate.",
        "overlap: whether messages are sent during the backward pass; the faster way is advised",
        "images: the minimum number of images per rank whose computation takes as long as the "
        "overlapped messages",
    ]


def overview(ranks: int, rows: Sequence[Row]) -> list[str]:
    """Return a table of the predictions for all strategies on a number of ranks."""
    lines: list[tuple[str, ...]] = [
        ("strategy", "overlap", "overlapped", "blocking", "images", "step", "exposed")
    ]
    for row in rows:
        if "left_out" not in row:
            step = row["mean"]
            times = step["overlapped"], blocking(row), step["seconds"], step["exposed"]
            overlapped, blocked, *played = map(ms, times)
            overlap = "yes" if row["overlap"] else "no"
            lines.append((label(row), overlap, overlapped, blocked, str(row["images"]), *played))
    shown = {row["strategy"] for row in rows if "left_out" not in row}
    left_out = dict.fromkeys(row["strategy"] for row in rows if row["strategy"] not in shown)
    words = f"Left out: {', '.join(left_out)}; mpikfac simulate --{OVERLAP} true prints the reasons"
    notes = textwrap.wrap(words, WIDTH, break_on_hyphens=False) if left_out else []
    return [number(ranks, "rank"), *intervals_in_words(rows), *table(lines), *notes]


def of_batch(row: Row, options: AdviseOptions) -> list[str]:
    """Return lines that apply the mini-batch lemma to a strategy and show the arithmetic."""
    step, images, batch = row["mean"], row["images"], options.batch_per_rank
    parts = [f"{stage} {ms(step['stages'].get(stage, 0.0))}" for stage in growing(options)]
    least = step["overlapped"] / row["per_image"]
    taken = max(images, batch)
    choice = {"strategy": (row["strategy"],), "ranks": (row["ranks"],), "batch_per_rank": taken}
    machine = mpikfac.predict.load_machine(options.machine)
    change = {OVERLAP: row["overlap"], **row.get("change", {})}
    chosen = changed(replace(options, **choice), change)
    played, *_ = predictions(chosen, machine)
    return [
        f"Batch per rank, with {label(row)}",
        f"  computing time of an image = ({' + '.join(parts)}) ms / {number(batch, 'image')} = "
        f"{ms(row['per_image'], 3)} ms",
        f"  images >= overlapped messages / computing time of an image = "
        f"{ms(step['overlapped'])} ms / {ms(row['per_image'], 3)} ms = {least:.1f}: {images}",
        f"  Use {words_for(row, options)} --batch_per_rank {taken}",
        f"  A step is then {ms(played['mean']['seconds'])} ms, of which "
        f"{ms(played['mean']['exposed'])} ms are exposed, including {ms(blocking(played))} ms of "
        f"blocking messages",
    ]


def label(row: Row) -> str:
    """Return a row's strategy, and the choices that the search has changed, as text."""
    change = row.get("change", {})
    return ", ".join([row["strategy"], *(f"{key}={value}" for key, value in change.items())])


def words_for(row: Row, options: AdviseOptions) -> str:
    """Return the command-line options with which the training program uses a row's strategy."""
    first_order, name = row["strategy"].startswith("sgd"), row["strategy"].removeprefix(SGD)
    words = ["--optimizer sgd"] if first_order else []
    words += [f"--strategy {name}"] if name != "sgd" else []
    if not first_order:
        _, preconditioner = strategy_of(name, row["ranks"], options.preconditioner)
        usual = preconditioner_of(mpikfac.plan.NAMED[name].settings)
        words += words_of(preconditioner) if preconditioner != usual else []
    words += [f"--assignment.grad_workers {row['workers']}"] if name == "hybrid" else []
    change = row.get("change", {})
    words += [f"--{PER_NODE} {change[PER_NODE]}"] if PER_NODE in change else []
    return " ".join([*words, f"--{OVERLAP} {str(row['overlap']).lower()}"])


def words_of(preconditioner: Preconditioner) -> list[str]:
    """Return the command-line options with which the training program uses a preconditioner."""
    now, usual = flat(preconditioner), flat(type(preconditioner)())
    own = [f"--kfac.preconditioner.{k} {json.dumps(v)}" for k, v in now.items() if v != usual[k]]
    return [f"--kfac.preconditioner {joints.name_of(preconditioner)}", *own]


def of_servers(ranks: int, options: AdviseOptions, machine: mpikfac.predict.Machine) -> list[str]:
    """Return lines that apply the parameter-server lemma and show the arithmetic."""
    _, others = network_of(options).bare
    size = FLOAT32 * sum(math.prod(shape) for _, shape in others)
    network = machine.network(options.model, options.batch_per_rank)
    computing = network.forward + network.backward
    bandwidth = (machine.between or machine.inside).bandwidth
    least = 2 * size * ranks / (bandwidth * computing)
    servers = servers_to_hide(size, ranks, bandwidth, computing)
    return [
        f"Parameter servers, for {number(ranks, 'client')} without K-FAC",
        "  servers >= 2 x bytes of the model x clients / (bandwidth of a server x computing time)",
        f"  = 2 x {size / MIB:.2f} MiB x {ranks} / "
        f"({bandwidth / 1e9:.2f} GB/s x {ms(computing)} ms) = {least:.1f}: "
        f"{servers}",
        f"  Use --strategy downpour --optimizer sgd --sync.servers {servers} on {ranks + servers} "
        f"ranks",
    ]


def of_rate(row: Row, options: AdviseOptions) -> list[str]:
    """Return lines with the learning rates for the global batch: linear and square-root scaling."""
    ranks, images = row["ranks"], max(row["images"], options.batch_per_rank)
    return [
        f"Learning rate for {number(ranks * images, 'image')}, instead of {images} on one rank",
        f"  --scale_lr linear: lr x {ranks}",
        f"  --scale_lr sqrt: lr x {math.sqrt(ranks):.2f}",
    ]


def of_ranks(
    rows: Sequence[Row], options: AdviseOptions, machine: mpikfac.predict.Machine
) -> list[str]:
    """Return lines with a strategy's efficiency on 1, 2, 4 ... ranks, and how many ranks to use.

    The strategy is the best one on the largest number of ranks, without choices that the search has
    changed, because these apply to a single number of ranks.

    Raises:
        ValueError: the strategy, or one of the chosen options, cannot be used on a single rank.
    """
    assert options.efficiency, "it is set"
    named = [row for row in rows if "left_out" not in row and not row.get("change")]
    most = max(row["ranks"] for row in named)
    row = best([row for row in named if row["ranks"] == most])
    ranks = (*(2**power for power in range(most.bit_length()) if 2**power < most), most)
    doubled = replace(options, strategy=(row["strategy"],), ranks=ranks)
    found = predictions(changed(doubled, {OVERLAP: row["overlap"]}), machine)
    if "left_out" in found[0]:
        raise ValueError(
            f"efficiency={options.efficiency:g} is relative to a single rank, "
            f"which cannot be predicted: {found[0]['left_out']}"
        )
    steps = {row["ranks"]: row["mean"]["seconds"] for row in found if "left_out" not in row}
    lines = [("ranks", "step", "efficiency")]
    lines += [(f"{n:,}", ms(seconds), f"{steps[1] / seconds:.2f}") for n, seconds in steps.items()]
    count = efficient(steps, options.efficiency)
    return [
        f"Ranks for an efficiency of {options.efficiency:g}, with {row['strategy']}",
        *table(lines),
        f"  efficiency = step time of 1 rank / step time; {options.batch_per_rank} images per rank",
        f"  Use {words_for(row, options)} on {number(count, 'rank')}",
    ]


def blocking(row: Row) -> float:
    """Return the time of blocking messages per step, averaged over steps, in seconds."""
    step = row["mean"]
    sent = (step["stages"].get(stage, 0.0) for stage in mpikfac.trace.COMMUNICATION)
    return max(0.0, sum(sent) - step["overlapped"])


def ms(seconds: float, digits: int = 1) -> str:
    """Format seconds as milliseconds."""
    return f"{1e3 * seconds:,.{digits}f}"
