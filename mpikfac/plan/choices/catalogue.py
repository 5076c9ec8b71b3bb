"""Published ways to distribute training over ranks and over time, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from mpikfac.plan.choices.checks import one_of
from mpikfac.plan.choices.strategy import Strategy


@dataclass(frozen=True)
class Named:
    """A published way to distribute training, with K-FAC or without.

    Attributes:
        what: the way, in a sentence.
        source: the publication, as in docs/reference/references.md.
        cost: bytes sent by a rank in a ring, in float32: on steps with new factors + in a refresh +
            on every step, on top of averaging gradients. `P` ranks, `w` workers; 4F, 4T and 4V
            bytes of all factors as squares, triangles and vectors, 4N of all gradients, 4R of the
            matrices in their place.
        same: whether the estimator is the same: the numbers of a single process with the joined
            batch, with the same `delay`, `stagger` and `tolerance`, for equal shards or all
            examples (`subsample=1`).
        choices: choices of a `Strategy`; "all" workers are all ranks.
        settings: settings of `KFAC` beside the strategy.
    """

    what: str
    source: str
    cost: str
    same: bool = True
    choices: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def make(self, ranks: int, **choices: Any) -> Strategy:
        """Return the strategy for `ranks` ranks; `choices` replace the way's own choices.

        Raises:
            ValueError: the choices do not fit together, or not the number of ranks.
        """
        chosen = {**self.choices, **choices}
        if chosen.get("workers") == "all":
            chosen["workers"] = ranks
        strategy = Strategy().changed(**chosen)
        strategy.check_ranks(ranks)
        return strategy


_EIGEN = {"solver": "eigen"}
_PUBLISHED = {"packing": "square", "fusion": 1}
_COMM_OPT = "2 (P-1)/P 4T + (P-1)/P 4F + 0"
_COPIES = {"workers": "all", "exchanged": "weights"}

NAMED: Mapping[str, Named] = {
    "kfac-opt": Named(
        "Factors are averaged everywhere and decomposed one by one on their owners; every rank "
        "gets all bases and preconditions every layer",
        "SC20",
        "2 (P-1)/P 4F + (P-1)/P 4F + 0",
        choices={"workers": "all", "colocate_factors": False, **_PUBLISHED},
        settings=_EIGEN,
    ),
    "kfac-lw": Named(
        "Factors are averaged everywhere; a layer's owner decomposes and preconditions it and "
        "sends the result to all",
        "SC20",
        "2 (P-1)/P 4F + 0 + (P-1)/P 4N",
        choices={"workers": 1, **_PUBLISHED},
        settings=_EIGEN,
    ),
    "comm-opt": Named(
        "K-FAC-opt with triangles and one message per stage",
        "TPDS22",
        _COMM_OPT,
        choices={"workers": "all"},
    ),
    "mem-opt": Named(
        "K-FAC-lw with triangles and one message per stage",
        "TPDS22",
        "2 (P-1)/P 4T + 0 + (P-1)/P 4N",
        choices={"workers": 1},
    ),
    "hybrid": Named(
        "A grid of ranks: some workers per layer get its bases, and each sends the preconditioned "
        "gradient to some ranks; `workers` says how many",
        "KAISA, SC21",
        "2 (P-1)/P 4T + (w-1)/P 4F + (P-w)/P 4N",
    ),
    "sharded-optimizer": Named(
        "Gradients and factors are reduced to a layer's owner, which decomposes, preconditions and "
        "steps it; weights are gathered",
        "CVPR19",
        "(P-1)/P 4T + 0 + 0",
        choices={"workers": 1, "reduction": "owners", "update": "owner"},
    ),
    "spd-kfac": Named(
        "Factors are averaged beside the backward pass in messages of three layers, and small ones "
        "decomposed everywhere",
        "SPD-KFAC",
        "2 (P-1)/P 4T + (P-1)/P 4F of the large ones + 0",
        choices={
            **{"workers": "all", "fusion": 3, "overlap": True},
            **{"replicate_below": 128, "colocate_factors": False},
        },
    ),
    "dp-kfac": Named(
        "An owner makes factors of its own share of the batch; nothing of them is sent",
        "DP-KFAC",
        "0 + 0 + (P-1)/P 4N",
        same=False,
        choices={"workers": 1, "reduction": "none"},
    ),
    "deferred-allreduce": Named(
        "COMM-OPT in which each rank averages factors of its own share over time; they are "
        "averaged over ranks only before they are decomposed",
        "mpikfac",
        "0 + 2 (P-1)/P 4T + (P-1)/P 4F + 0",
        choices={"workers": "all", "reduce_at": "bases"},
    ),
    "deferred-sharded": Named(
        "`sharded-optimizer`, and factors are averaged over ranks only before they are decomposed",
        "mpikfac",
        "0 + (P-1)/P 4T + 0",
        choices={
            **{"workers": 1, "reduction": "owners", "update": "owner"},
            "reduce_at": "bases",
        },
    ),
    "balanced-shards": Named(
        "`deferred-sharded`, but sums and gathers are of equal shards, which pass numbers on to "
        "owners and take weights from owners; `ranks_per_node` says how many ranks a node has",
        "mpikfac",
        "0 + (P-1)/P 4T + 0",
        choices={
            **{"workers": 1, "reduction": "owners", "update": "owner"},
            **{"reduce_at": "bases", "shards": True},
        },
    ),
    "staggered": Named(
        "`deferred-sharded`, and each of five steps refreshes a share of the layers: no spike",
        "mpikfac",
        "0 + (P-1)/P 4T + 0",
        choices={
            **{"workers": 1, "reduction": "owners", "update": "owner"},
            **{"reduce_at": "bases", "stagger": 5},
        },
    ),
    "stale-inverse": Named(
        "COMM-OPT that decomposes in the background and uses bases one step later",
        "LBANN",
        _COMM_OPT,
        choices={"workers": "all", "delay": 1},
    ),
    "comm-opt-bf16": Named(
        "COMM-OPT in which factors, bases and gradients travel in bfloat16",
        "mpikfac",
        "2 (P-1)/P 2T + (P-1)/P 2F - 2 (P-1)/P 2N",
        same=False,
        choices={
            **{"workers": "all", "factor_wire": "bfloat16", "basis_wire": "bfloat16"},
            "gradient_wire": "bfloat16",
        },
    ),
    "comm-opt-int8": Named(
        "COMM-OPT in which factors and gradients travel in 8 bits with error feedback, and bases "
        "in bfloat16",
        "mpikfac",
        "2 (P-1)/P 1.06T + (P-1)/P 2F - 2 (P-1)/P 2.94N",
        same=False,
        choices={
            **{"workers": "all", "factor_wire": "int8", "basis_wire": "bfloat16"},
            "gradient_wire": "int8",
        },
    ),
    "dgc": Named(
        "COMM-OPT in which a rank sends a thousandth of the gradients, the largest ones; the "
        "others wait and gather momentum, and the optimizer has no momentum",
        "DGC, Lin et al. 2018",
        "2 (P-1)/P 4T + (P-1)/P 4F + (P-1) 0.008N - 2 (P-1)/P 4N",
        same=False,
        choices={
            **{"workers": "all", "gradient_wire": "top-k"},
            **{"top_share": 0.001, "top_momentum": 0.9},
        },
    ),
    "power-sgd": Named(
        "COMM-OPT in which gradients are added up as products of two matrices with two columns, "
        "with error feedback",
        "PowerSGD, Vogels et al. 2019",
        "2 (P-1)/P 4T + (P-1)/P 4F + 2 (P-1)/P (4R - 4N)",
        same=False,
        choices={"workers": "all", "gradient_wire": "power-sgd", "power_rank": 2},
    ),
    "local-sgd": Named(
        "Each rank takes eight steps of a copy of the model, and the mean of all copies takes the "
        "place of each copy",
        "Stich 2019",
        "2 (P-1)/P 4T + (P-1)/P 4F - 7/8 2 (P-1)/P 4N",
        same=False,
        choices={**_COPIES, "sync_every": 8},
    ),
    "post-local-sgd": Named(
        "Local SGD with 16 steps between two means, after 1000 steps of averaged gradients",
        "Lin et al. 2020",
        "2 (P-1)/P 4T + (P-1)/P 4F - 15/16 2 (P-1)/P 4N",
        same=False,
        choices={**_COPIES, "sync_every": 16, "exchange_from": 1000},
    ),
    "diloco": Named(
        "Local SGD with 50 steps between two exchanges; the mean change of the copies is the "
        "gradient of a step with Nesterov's momentum",
        "DiLoCo, Douillard et al. 2023",
        "2 (P-1)/P 4T + (P-1)/P 4F - 49/50 2 (P-1)/P 4N",
        same=False,
        choices={**_COPIES, "sync_every": 50, "outer_lr": 0.7, "outer_momentum": 0.9},
    ),
    "downpour": Named(
        "Clients push gradients to a server and fetch weights, and no client waits for a second; "
        "the server steps the weights in order of arrival; `P` clients train",
        "Downpour, Dean et al. 2012",
        "0 + 0 + 4N to the server and 4N back - 2 (P-1)/P 4N",
        same=False,
        choices={"exchanged": "updates"},
    ),
    "streaming-diloco": Named(
        "DiLoCo in five parts of the model, of which one is sent every ten steps; a mean is used "
        "five steps later, half and half with the copy",
        "Streaming DiLoCo, Douillard et al. 2025",
        "2 (P-1)/P 4T + (P-1)/P 4F - 49/50 2 (P-1)/P 4N",
        same=False,
        choices={
            **{**_COPIES, "sync_every": 50, "outer_lr": 0.7, "outer_momentum": 0.9},
            **{"fragments": 5, "lateness": 5, "local_share": 0.5},
        },
    ),
    "daso": Named(
        "The ranks of a node average gradients at every step; after every fourth step, one rank of "
        "each node by turns sends weights, and the mean is mixed in one step later; "
        "`ranks_per_node` says how many ranks a node has, 1 if not given",
        "DASO, Coquelin et al. 2022",
        "2 (P-1)/P 4T + (P-1)/P 4F + one sum in four steps - 2 (P-1)/P 4N",
        same=False,
        choices={
            **{**_COPIES, "copies_of": "node", "ranks_per_node": 1, "sync_every": 4},
            **{"lateness": 1, "local_share": None},
        },
    ),
    "lsgd": Named(
        "Each rank steps a copy of the model, which the copy of the rank with the least loss pulls "
        "a little at each step, and more at every eighth step",
        "LSGD, Teng et al. 2019",
        "2 (P-1)/P 4T + (P-1)/P 4F - 15/16 2 (P-1)/P 4N",
        same=False,
        choices={**_COPIES, "sync_every": 8, "merge": "leader"},
    ),
    "parle": Named(
        "Each rank steps a copy of the model; after 25 steps a copy moves to the average of its "
        "steps and towards the mean of all averages",
        "Parle, Chaudhari et al. 2018",
        "2 (P-1)/P 4T + (P-1)/P 4F - 24/25 2 (P-1)/P 4N",
        same=False,
        choices={**_COPIES, "sync_every": 25, "merge": "elastic"},
    ),
    "median": Named(
        "The median of each number of all ranks' gradients takes the place of the mean",
        "Yin et al. 2018",
        _COMM_OPT,
        same=False,
        choices={"workers": "all", "combine": "median"},
    ),
    "trimmed-mean": Named(
        "The mean of each number of all ranks' gradients, without the largest and the smallest",
        "Yin et al. 2018",
        _COMM_OPT,
        same=False,
        choices={"workers": "all", "combine": "trimmed-mean", "num_byzantine": 1},
    ),
    "krum": Named(
        "The gradient of the rank whose neighbours are nearest takes the place of the mean",
        "Blanchard et al. 2017",
        _COMM_OPT,
        same=False,
        choices={"workers": "all", "combine": "krum", "num_byzantine": 1},
    ),
    "geometric-median": Named(
        "The vector with the least sum of distances from all ranks' gradients",
        "Chen et al. 2017",
        _COMM_OPT,
        same=False,
        choices={"workers": "all", "combine": "geometric-median"},
    ),
    "centered-clipping": Named(
        "The last gradient, moved by the mean difference of all ranks' gradients from it, after "
        "long differences are cut",
        "Karimireddy et al. 2021",
        _COMM_OPT,
        same=False,
        choices={"workers": "all", "combine": "centered-clipping"},
    ),
    "safeguard": Named(
        "COMM-OPT in which a rank is left out for good when its gradients, summed over 300 steps "
        "or over 50, are twice as far from a median rank's as most ranks' are",
        "SafeguardSGD, Allen-Zhu et al. 2021",
        _COMM_OPT,
        same=False,
        choices={"workers": "all", "combine": "safeguard"},
    ),
    "event-driven": Named(
        "COMM-OPT in which a factor is decomposed anew only if its inverse is off by more than "
        "10 %, or its eigenvectors leave as much off the diagonal",
        "mpikfac",
        _COMM_OPT,
        choices={"workers": "all", "tolerance": 0.1},
    ),
    "eva": Named(
        "Factors are squares of mean vectors, averaged everywhere; every rank preconditions every "
        "layer and nothing is decomposed",
        "Eva",
        "2 (P-1)/P 4V + 0 + 0",
        same=False,
        choices={"workers": "all"},
        settings={"solver": "rank-one", "inv_update_steps": 1},
    ),
    "curvature-servers": Named(
        "COMM-OPT on all ranks but one, to which owners send factors and which sends back their "
        "bases, to be used one step later; `P` ranks train",
        "LBANN",
        "2 (P-1)/P 4T + (4T/P + (P-1)/P 4F) + 0",
        choices={"workers": "all", "delay": 1, "curvature_servers": 1},
    ),
}
"""Published ways to distribute training, and combinations of theirs."""


def strategy_of(strategy: Strategy | str | None, ranks: int) -> tuple[Strategy, dict[str, Any]]:
    """Return a strategy, also of a name, and the settings of `KFAC` that belong to the name.

    Args:
        strategy: None for COMM-OPT.

    Raises:
        ValueError: no strategy has the name, or the object is no strategy.
    """
    if isinstance(strategy, str):
        if strategy not in NAMED and (near := get_close_matches(strategy, NAMED, n=1)):
            raise ValueError(f"strategy={strategy!r} is unknown; did you mean {near[0]!r}?")
        return get_strategy(strategy, ranks)
    strategy = Strategy.comm_opt(ranks) if strategy is None else strategy
    if not isinstance(strategy, Strategy):
        raise ValueError(f"strategy={strategy!r} must be a Strategy, the name of one, or None")
    return strategy, {}


def get_strategy(name: str, ranks: int, **choices: Any) -> tuple[Strategy, dict[str, Any]]:
    """Return the strategy of a name for `ranks` ranks, and further arguments of `KFAC`.

        strategy, settings = mpikfac.get_strategy("kfac-opt", comm.size)
        mpikfac.KFAC(model, optimizer, comm, strategy, **settings)

    Raises:
        ValueError: there is no such strategy, or `choices` do not fit.
    """
    one_of("strategy", name, tuple(NAMED))
    return NAMED[name].make(ranks, **choices), dict(NAMED[name].settings)
