"""The positions of strategies on the axes of two surveys."""

from __future__ import annotations

import pytest

from mpikfac import Strategy, Transport
from mpikfac.lab import ParameterServer
from mpikfac.plan import NAMED, axes

AXES = ("synchronisation", "architecture", "compression", "overlap", "combination")
PLACES = {
    "comm-opt": ("gradients at every step", "all ranks", "none", "none", "mean"),
    "sharded-optimizer": ("gradients at every step", "owners of layers", "none", "none", "mean"),
    "curvature-servers": (
        *("gradients at every step", "all ranks, curvature servers", "none"),
        *("decompositions", "mean"),
    ),
    "spd-kfac": ("gradients at every step", "all ranks", "none", "backward pass", "mean"),
    "comm-opt-int8": ("gradients at every step", "all ranks", "int8 values", "none", "mean"),
    "dgc": ("gradients at every step", "all ranks", "the largest 0.1 %", "none", "mean"),
    "power-sgd": ("gradients at every step", "all ranks", "rank 2", "none", "mean"),
    "post-local-sgd": (
        *("weights every 16 steps, after 1000 steps of gradients", "all ranks"),
        *("none", "none", "mean"),
    ),
    "downpour": ("asynchronous, updates of a batch", "servers: 1", "none", "none", "mean"),
    "diloco": ("weights every 50 steps by an outer step", "all ranks", "none", "none", "mean"),
    "lsgd": (
        *("weights every 8 steps", "all ranks", "none", "none"),
        "towards the copy with the lowest loss",
    ),
    "streaming-diloco": (
        "weights every 50 steps by an outer step, in 5 parts one after another",
        *("all ranks", "none", "steps after an exchange", "mean"),
    ),
    "daso": (
        *("weights every 4 steps", "nodes, two levels", "none"),
        *("steps after an exchange", "mean"),
    ),
    "parle": (
        *("weights every 25 steps", "all ranks", "none", "none"),
        "towards the mean of averages of steps",
    ),
    "krum": ("gradients at every step", "all ranks", "none", "none", "krum"),
}


@pytest.mark.parametrize("name", PLACES)
def test_a_named_strategy_has_its_place_on_every_axis(name):
    """Oracle: the places by hand."""
    assert tuple(axes(NAMED[name].strategy).items()) == tuple(zip(AXES, PLACES[name]))


def test_clients_and_servers_are_an_architecture():
    """Oracle: by hand."""
    servers = ParameterServer(servers=2, push_interval=3, ranks_per_client=4)
    found = axes(Strategy(sync=servers))
    assert found["architecture"] == "servers: 2, clients of 4 ranks"
    assert found["synchronisation"] == "asynchronous, updates of 3 batches"


def test_two_levels_are_an_architecture():
    """Oracle: by hand."""
    found = axes(Strategy(transport=Transport(ranks_per_node=4)))
    assert found["architecture"] == "all ranks, two levels"
