"""A strategy on the axes under which surveys file distributed training."""

from __future__ import annotations

from mpikfac.plan.choices.strategy import Strategy


def axes(strategy: Strategy) -> dict[str, str]:
    """Return a strategy on the axes of surveys of communication [Tang et al. 2020].

    The axes are: synchronisation, architecture, compression of gradients, overlap of messages and
    computation, and the rule that combines the numbers of ranks.
    """
    return {
        "synchronisation": _synchronisation(strategy),
        "architecture": _architecture(strategy),
        "compression": _compression(strategy),
        "overlap": _overlap(strategy),
        "combination": _combination(strategy),
    }


def _synchronisation(strategy: Strategy) -> str:
    exchange = strategy.exchange
    if exchange.asynchronous:
        return f"asynchronous, updates of {_batches(exchange.asynchrony.push_every)}"
    if not exchange.of_copies:
        return "gradients at every step"
    outer = " by an outer step" * (exchange.outer.outer_momentum > 0)
    if exchange.stream.fragments > 1:
        outer += f" in {exchange.stream.fragments} parts by turns"
    later = f", after {exchange.exchange_from} steps of gradients" * (exchange.exchange_from > 0)
    return f"weights every {exchange.sync_every} steps{outer}{later}"


def _batches(count: int) -> str:
    return "a batch" if count == 1 else f"{count} batches"


def _combination(strategy: Strategy) -> str:
    match strategy.exchange.merging.merge:
        case "leader":
            return "towards the copy with the least loss"
        case "elastic":
            return "towards the mean of averages of steps"
    return strategy.exchange.robust.combine


def _architecture(strategy: Strategy) -> str:
    exchange = strategy.exchange
    parties = ["owners of layers" if strategy.update == "owner" else "all ranks"]
    if exchange.copies_of == "node":
        parties = ["nodes"]
    if exchange.asynchronous:
        servers, ranks = exchange.asynchrony.servers, exchange.asynchrony.client_ranks
        parties = [f"servers: {servers}"] + [f"clients of {ranks} ranks"] * (ranks > 1)
    if strategy.transport.ranks_per_node is not None:
        parties.append("two levels")
    if strategy.refresh.curvature_servers:
        parties.append("curvature servers")
    return ", ".join(parties)


def _compression(strategy: Strategy) -> str:
    wires = strategy.transport.wires
    match wires.gradient_wire:
        case None:
            return "none"
        case "top-k":
            return f"the largest {100 * wires.top_share:g} %"
        case "power-sgd":
            return f"rank {wires.power_rank}"
    return f"{wires.gradient_wire} numbers"


def _overlap(strategy: Strategy) -> str:
    computations = ["backward pass"] if strategy.transport.overlap else []
    computations += ["steps after an exchange"] if strategy.exchange.stream.lateness else []
    computations += ["decompositions"] if strategy.refresh.delay else []
    return " and ".join(computations) or "none"
