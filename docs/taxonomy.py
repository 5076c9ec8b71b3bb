"""Write the page that places all named strategies on the axes of two surveys, without MPI.

    python docs/taxonomy.py > docs/extensions/taxonomy.md

A strategy's place follows from its choices and from the messages in its plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import mpikfac.lab  # its strategies are listed, too
from mpikfac.plan import NAMED, LayerShape, Plan, Strategy, axes
from mpikfac.plan import names as stages

RANKS = 8
LAYERS = [LayerShape(f"layer{order}", order, order) for order in range(200, 280, 5)]
OF_WEIGHTS = (
    *(stages.REDUCE_GRADIENTS, stages.EXCHANGE_WEIGHTS),
    *(stages.PUBLISH_DIRECTIONS, stages.PUBLISH_WEIGHTS),
)
"""Stages whose messages turn all ranks' gradients into the same weights."""

HEAD = """\
# Named strategies on the axes of surveys

This page classifies the named strategies according to two published taxonomies.
`python docs/taxonomy.py` generates it from the catalogue that `mpikfac strategies` prints.

## Parallelism, optimisation, scheduling, exchange

This table uses the axes of [[Langer et al. 2020](../reference/references.md)]:

- All strategies are data parallel. *By layers* lists the work that the ranks divide by layers in
  each step, as in model parallelism. [Split layers](split_layers.md) divide individual layers, and
  can be combined with most strategies.
- *Centralised*: all ranks train one model, wherever it is stored. *Decentralised*: each rank, or
  each node, updates its own replica between exchanges.
- *Synchronous*: ranks wait for each other at an exchange. *Asynchronous*: no rank waits for
  another.
- *Exchange*: the collectives that send gradients or weights, but not those that send curvature.
"""
MIDDLE = """
## Communication

This table uses the axes of [[Tang et al. 2020](../reference/references.md)], and lists the rule
that combines the gradients or weights of all ranks. A strategy counts as compressed only if it
compresses gradients:
"""


def main() -> None:
    """Print the page."""
    print("\n".join(page()))


def page() -> Iterator[str]:
    """Yield the lines of the page."""
    yield HEAD
    yield from table(langer)
    yield MIDDLE
    yield from table(lambda name: axes(NAMED[name].strategy))


def langer(name: str) -> dict[str, str]:
    """Return a named strategy's place on the axes of [Langer et al. 2020]."""
    strategy = NAMED[name].strategy
    sync = strategy.sync
    return {
        "by layers": by_layers(name, strategy),
        "optimisation": "decentralised" if sync.local_steps else "centralised",
        "scheduling": "synchronous" if sync.waits_for_all else "asynchronous",
        "exchange": exchanged(name, strategy),
    }


def by_layers(name: str, strategy: Strategy) -> str:
    """Return the work that ranks divide by layers in each step."""
    if not strategy.sync.waits_for_all:
        return "none"
    factors = plan_of(name, strategy).factors.values()
    work = [] if all(factor.preconditioner.vector for factor in factors) else ["decompositions"]
    work += ["directions"] if strategy.assignment.workers(RANKS) < RANKS else []
    work += ["steps"] if strategy.assignment.shard_optimizer else []
    return ", ".join(work) or "none"


def exchanged(name: str, strategy: Strategy) -> str:
    """Return the MPI primitives that turn all ranks' gradients into the same weights."""
    if not strategy.sync.waits_for_all:
        return "Send to a server, and back"
    sent = plan_of(name, strategy).messages(0, False, False)
    of_weights = (message.primitive for message in sent if message.stage in OF_WEIGHTS)
    return ", ".join(dict.fromkeys(name for names in of_weights for name in names.split(", ")))


def plan_of(name: str, strategy: Strategy) -> Plan:
    """Return the plan of a named strategy for `LAYERS`."""
    preconditioner = NAMED[name].settings.get("preconditioner", "inverse")
    return mpikfac.make_plan(LAYERS, RANKS, strategy, preconditioner=preconditioner)


def table(place: Callable[[str], Mapping[str, str]]) -> Iterator[str]:
    """Yield a table with one row per place, which lists the strategies at this place."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name in NAMED:
        names.setdefault(tuple(place(name).values()), []).append(f"`{name}`")
    head = "strategies", *place(next(iter(NAMED)))
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for cells, alike in names.items():
        yield f"| {', '.join(alike)} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
