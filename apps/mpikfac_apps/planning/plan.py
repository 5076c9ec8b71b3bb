"""Print the communication plan of a model: who computes and sends what, without MPI.

mpikfac plan --model resnet50 --ranks 64 --assignment hybrid-opt --assignment.grad_workers 8
mpikfac plan --model resnet50 --ranks 64 --strategy sgd     # training without K-FAC
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import mpikfac
from mpikfac.plan import names
from mpikfac_apps import cli
from mpikfac_apps.options.choices import differences
from mpikfac_apps.options.options import COMM_OPT, Options
from mpikfac_apps.options.strategy import (
    coverage,
    for_machine,
    job_of,
    make_plan,
    make_strategy,
    preconditioner_of,
    skippable,
)
from mpikfac_apps.planning import chakra
from mpikfac_apps.planning.budget import Foreseen, calls_of, foreseen
from mpikfac_apps.planning.facts import (
    FIRST_ORDER,
    KINDS_OF_STEP,
    looked_at,
    most_loaded,
    orders_of,
)
from mpikfac_apps.planning.options import PLAN, PlanOptions
from mpikfac_apps.problems import models
from mpikfac_apps.text import in_lines, mib, number, show, table

WIDTH = 96
SLOW = 20_000  # the number of ranks above which planning is slow
TABLE = 60  # maximum number of layers with a line each; in larger models, layers share lines

Kind = tuple[str, str, str]
"""The stage, collective and communicator that messages have in common."""
Sent = tuple[tuple[Kind, tuple[int, int, int]], ...]
"""What a rank sends in a step: the number, bytes and wire bytes of each kind of message."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan and return 0, or print a one-line error about an option and return 2."""
    return cli.run(PLAN.program, lambda: print_plan(PLAN.read(argv)))


def print_plan(options: PlanOptions) -> int:
    """Print the plan that the options describe; return 0.

    Raises:
        ValueError: options cannot be combined.
    """
    if options.ranks > SLOW:
        print(f"planning {options.ranks} ranks takes minutes", file=sys.stderr, flush=True)
    run = foreseen_of(options)
    plan = run.plan
    sections = [[*heading(options.model, plan), *filter(None, [run.line])]]
    sections += [grid(plan), owners(plan), balance(plan)] if plan.layers else []
    job = job_of(run_of(options), options.ranks, 1)
    sections += [memory(plan, job), messages(plan), *steps(plan)]
    if options.export:
        sections.append(export(options, plan, options.export))
    show(sections)
    return 0


def plan_of(options: PlanOptions) -> mpikfac.plan.Plan:
    """Return the plan of a run with the options, after the first batch.

    Raises:
        ValueError: options cannot be combined.
    """
    return foreseen_of(options).plan


def foreseen_of(options: PlanOptions) -> Foreseen:
    """Return the plan, intervals and cost of a run with the options, after the first batch.

    "sgd" is the strategy without K-FAC: only the choices about messages have an effect.

    Raises:
        ValueError: options cannot be combined.
    """
    entry = models.network(options.model)
    covered = coverage(options.kfac, entry.covers)
    with skippable("skip"):
        shapes = models.shapes_of(options.model, options.classes, covered)
    first_order = options.distribution.strategy == FIRST_ORDER
    if first_order:
        covered = mpikfac.Coverage(skip=[layer.name for layer in shapes[0]])
        shapes = models.shapes_of(options.model, options.classes, covered)
        of_name = replace(options.distribution, strategy=COMM_OPT)
        options = replace(options, distribution=of_name)
    model = models.skeleton(options.model, options.classes)
    parameters = mpikfac.layers.trained_shapes(model, covered)
    strategy, settings = make_strategy(options.distribution, options.kfac, options.ranks)
    if first_order:
        strategy = strategy.first_order()
    _, strategy = for_machine(run_of(options), shapes, options.ranks, strategy, settings)
    preconditioner = preconditioner_of(settings)
    sharding = options.sharding.of(parameters, options.ranks)
    plan = make_plan(options.kfac, *shapes, options.ranks, strategy, preconditioner, sharding)
    passes = options.distribution.transport.virtual_ranks or options.ranks
    examples = options.batch_per_rank * options.ranks // passes
    calls = calls_of(options.model, model, options.kfac, entry.image, examples)
    return foreseen(options.kfac, preconditioner, settings, shapes, plan, calls, passes)


def export(options: PlanOptions, plan: mpikfac.plan.Plan, path: Path) -> list[str]:
    """Write the traces of a plan, and return a line about the files.

    Raises:
        ValueError: a message has no counterpart in a trace, or the machine has no times for the
            model.
        OSError: a file cannot be written.
    """
    prediction = None
    if options.distribution.machine:
        machine = mpikfac.predict.load_machine(options.distribution.machine)
        job = job_of(run_of(options), options.ranks, plan.strategy.refresh.stagger or 1)
        prediction = mpikfac.predict.simulate(plan, machine, job)
    traces = chakra.write_traces(plan, path, prediction)
    return [f"Wrote {number(traces, 'trace')}, {path}.KIND.RANK.et, and {path}.groups.json"]


def run_of(options: PlanOptions) -> Options:
    """Return the options of a run that uses the plan."""
    batch = options.batch_per_rank * options.ranks
    return Options(
        model=options.model, batch=batch, distribution=options.distribution, kfac=options.kfac
    )


def heading(model: str, plan: mpikfac.plan.Plan) -> list[str]:
    """Return lines with model, preconditioner, strategy and digest of a plan."""
    strategy, workers = plan.strategy, plan.grid.workers
    choices = textwrap.wrap(differences(strategy), WIDTH, break_on_hyphens=False)
    ranks, last = number(plan.ranks, "rank"), f"plan {plan.digest()}"
    if not plan.layers:
        none = f"{model} on {ranks}, float32; no layer is covered by K-FAC"
        return [none, *shards(plan), *choices, last]
    kind = {1: "MEM-OPT", plan.ranks: "COMM-OPT"}.get(workers, "HYBRID-OPT")
    spared = strategy.refresh.servers
    verb = "decomposes" if spared == 1 else "decompose"
    notes = [f"{number(spared, 'more rank')} {verb} for these ranks"]
    return [
        f"{model} on {ranks}, {plan.preconditioner} preconditioner, float32",
        *(notes if spared else []),
        *shards(plan),
        f"{kind}: {number(workers, 'gradient worker')} per layer",
        *choices,
        last,
    ]


def shards(plan: mpikfac.plan.Plan) -> list[str]:
    """Return a line about the shards of parameters; none if every rank holds whole parameters."""
    if not plan.sharding:
        return []
    count = plan.sharding.shards
    replicas, of_each = number(plan.ranks // count, "replica"), number(count, "shard")
    return [f"fully_shard: {replicas} of {of_each}; its own messages are not listed"]


def grid(plan: mpikfac.plan.Plan) -> list[str]:
    """Return lines about the grid of ranks, with a picture of a small grid."""
    lines = [
        f"Grid: {number(plan.grid.workers, 'row')} x {number(plan.grid.columns, 'column')}; "
        "the ranks of a column are the workers of its layers"
    ]
    if plan.grid.columns > 16 or plan.grid.workers > 16:
        return lines
    columns = range(plan.grid.columns)
    width = max(len(str(plan.ranks)), len(f"c{len(columns)}")) + 2
    lines.append("     " + "".join(f"{f'c{column}':>{width}}" for column in columns))
    for row in range(plan.grid.workers):
        ranks = range(row * plan.grid.columns, (row + 1) * plan.grid.columns)
        lines.append(f"{f'r{row}':>5}" + "".join(f"{rank:>{width}}" for rank in ranks))
    return lines


def owners(plan: mpikfac.plan.Plan) -> list[str]:
    """Return lines about the owners of each layer's factors, or of layers without factors."""
    if not plan.factors:
        columns = [f"{name} c{column}" for name, column in plan.columns_of.items()]
        return [
            "Layers without factors, and the columns that compute their directions",
            *in_lines(columns),
        ]
    if len(plan.layers) > TABLE:
        return ["Owners of factors (layer A:G)", *in_lines(brief_owners(plan))]
    rows: list[tuple[str, ...]] = [("layer", "order A", "order G", "column", "owner A", "owner G")]
    for layer in plan.layers:
        orders = (orders_of(layer.side(side)) for side in "AG")
        owned = (owners_of(plan, layer.side(side)) for side in "AG")
        rows.append((layer.name, *orders, str(plan.columns_of[layer.name]), *owned))
    return ["Owners of factors", *table(rows)]


def owners_of(plan: mpikfac.plan.Plan, factors: Sequence[mpikfac.plan.FactorShape]) -> str:
    """Return the ranks that decompose the factors of a side, as text; "-" for no factors."""
    return "+".join(dict.fromkeys(str(plan.owners[factor.name]) for factor in factors)) or "-"


def brief_owners(plan: mpikfac.plan.Plan) -> Iterator[str]:
    """Yield each layer with the owners of its factors, as text."""
    for layer in plan.layers:
        a, g = (owners_of(plan, layer.side(side)) for side in "AG")
        yield f"{layer.name} {a}" if a == g else f"{layer.name} {a}:{g}"


def balance(plan: mpikfac.plan.Plan) -> list[str]:
    """Return lines about how evenly ranks share the decompositions, and the maximum speed-up."""
    matrices = {n: f for n, f in plan.factors.items() if not f.preconditioner.vector}
    works = {name: f.work(f.preconditioner.work) for name, f in matrices.items()}
    if not works:
        none = "factors are vectors" if plan.factors else "there are no factors"
        return [f"Load of the decompositions: none, because {none}"]
    busiest = most_loaded(plan)
    total, longest = sum(works.values()), plan.load(busiest)
    idle = plan.ranks - len(set(plan.owners.values()))
    largest = max(works, key=works.__getitem__)
    bound = total / works[largest]
    powers = sorted({f.preconditioner.work for f in matrices.values()}, reverse=True)
    low = any(factor.rank for factor in plan.factors.values())
    of_low_rank = " (low rank: 2 n^2 rank)" if low else ""
    return [
        f"Load of the decompositions, as the sum of {' or '.join(map(power_of_n, powers))}"
        f"{of_low_rank}",
        f"  all ranks together     {total:10.3g}",
        f"  most loaded rank       {longest:10.3g}   rank {busiest}",
        f"  ranks that own nothing {idle:10}   of {plan.ranks}",
        f"  longest over mean load {longest * plan.ranks / total:9.2f}x   1 is perfect balance",
        f"  speed-up by spreading  {total / longest:9.2f}x   at most {bound:.2f}x: "
        f"{largest} has order {plan.factors[largest].order}",
    ]


def power_of_n(power: int) -> str:
    """Format a power of a factor's order, such as "n^3"."""
    return "n" if power == 1 else f"n^{power}"


def memory(plan: mpikfac.plan.Plan, job: mpikfac.predict.Job) -> list[str]:
    """Return lines about the memory that a rank needs for the preconditioner."""
    held = [mpikfac.predict.memory(plan, rank, job) for rank in looked_at(plan)]
    held = [{**kinds, "together": sum(kinds.values())} for kinds in held]
    rows = [("", "least", "median", "most")]
    for kind in held[0]:
        if any(sizes := [kinds[kind] for kinds in held]):
            rows.append((kind, *spread(sizes)))
    return [f"Memory of a rank, MiB{sample_note(plan)}", *table(rows)]


def messages(plan: mpikfac.plan.Plan) -> list[str]:
    """Return the lines to print above the tables of collectives."""
    sync, apart = plan.strategy.sync, []
    if sync.local_steps:
        every, in_node = (round(1 / sync.share_of_steps(stage)) for stage in names.EXCHANGES)
        apart = [f"  exchange weights: after every {every} steps; other steps send no gradients"]
        if in_node != every:
            apart.append(f"  exchange weights in node: after every {in_node} steps")
    return [
        f"Collectives of a step, MiB{sample_note(plan)}",
        "  buffer: the bytes that a rank passes to MPI; wire: the maximum bytes that a rank sends",
        "  if MPI uses a ring",
        *apart,
    ]


def steps(plan: mpikfac.plan.Plan) -> Iterator[list[str]]:
    """Yield lines about each kind of step; if several send the same messages, list them once."""
    kinds = KINDS_OF_STEP if plan.factors else [("Every step", False, False)]
    told: dict[tuple[Sent, ...], str] = {}
    for title, *kind in kinds:
        sent = tuple(counted(plan.messages(rank, *kind)) for rank in looked_at(plan))
        before = told.setdefault(sent, title)
        alike = f"{title}: the same messages as {before!r}"
        yield traffic(title, sent) if title == before or not any(sent) else [alike]


def counted(messages: Sequence[mpikfac.plan.Message]) -> Sent:
    """Return the number, bytes and wire bytes of a rank's messages, by kind and in order."""
    kinds: dict[Kind, list[mpikfac.plan.Message]] = {}
    for message in messages:
        kinds.setdefault(kind_of(message), []).append(message)
    return tuple(
        (kind, (len(same), sum(m.bytes for m in same), sum(m.wire for m in same)))
        for kind, same in kinds.items()
    )


def traffic(title: str, steps: Sequence[Sent]) -> list[str]:
    """Return lines about the collectives of a kind of step, in order.

    Args:
        steps: for each rank, what it sends in such a step.
    """
    if not any(steps):
        return [f"{title}: no messages"]
    rows: list[tuple[str, ...]] = [
        ("stage", "collective", "over", "messages", "buffer: least", "median", "most", "wire")
    ]
    longest = max(steps, key=lambda step: sum(count for _, (count, *_) in step))
    for kind, _ in longest:
        # In a column without layers, ranks do not send all kinds of messages.
        counts, sizes, wires = zip(*(dict(step)[kind] for step in steps if kind in dict(step)))
        rows.append((*kind, str(max(counts)), *spread(sizes), mib(max(wires))))
    most = max(sum(wire for _, (_, _, wire) in step) for step in steps)
    rows.append(("together", *[""] * 6, mib(most)))
    return [title, *table(rows, left=3)]


def kind_of(message: mpikfac.plan.Message) -> Kind:
    """Return the stage, collective and communicator, which identify a row of the table."""
    codec = f" ({message.codec.name})" if message.codec else ""
    return message.stage, message.primitive + codec, message.over


def sample_note(plan: mpikfac.plan.Plan) -> str:
    """Return a note about the number of ranks examined if these are not all ranks, or ""."""
    looked = len(looked_at(plan))
    return f" ({looked} of {plan.ranks} ranks)" if looked < plan.ranks else ""


def spread(sizes: Sequence[int]) -> tuple[str, str, str]:
    """Return the minimum, median and maximum of sizes in bytes, as text."""
    return mib(min(sizes)), mib(median(sizes)), mib(max(sizes))
