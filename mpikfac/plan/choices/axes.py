"""Classify strategies on the axes that surveys of distributed training use."""

from __future__ import annotations

from mpikfac.plan.choices.strategy import Strategy


def axes(strategy: Strategy) -> dict[str, str]:
    """Classify a strategy on the axes of a survey of communication [Tang et al. 2020].

    The axes are synchronisation, architecture, compression of gradients, overlap of communication
    with computation, and the rule that combines the ranks' values.
    """
    sync, compressor = strategy.sync.described(), strategy.compression.gradients
    return {
        "synchronisation": sync.get("synchronisation", "gradients at every step"),
        "architecture": _architecture(strategy, sync.get("architecture")),
        "compression": "none" if compressor is None else compressor.described(),
        "overlap": _overlap(strategy, sync.get("overlap")),
        "combination": sync.get("combination", strategy.sync.aggregation.name),
    }


def _architecture(strategy: Strategy, of_sync: str | None) -> str:
    usual = "owners of layers" if strategy.assignment.shard_optimizer else "all ranks"
    parties = [of_sync or usual]
    if strategy.transport.ranks_per_node is not None:
        parties.append("two levels")
    if strategy.refresh.servers:
        parties.append("curvature servers")
    return ", ".join(parties)


def _overlap(strategy: Strategy, of_sync: str | None) -> str:
    computations = ["backward pass"] if strategy.transport.overlap else []
    computations += [of_sync] if of_sync else []
    computations += ["decompositions"] if strategy.refresh.staleness else []
    return " and ".join(computations) or "none"
