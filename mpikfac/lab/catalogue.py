"""The lab's named strategies for distributing training over ranks and steps."""

from __future__ import annotations

from mpikfac.lab.curvature_servers.config import CurvatureServers
from mpikfac.lab.local_sgd.config import DASO, DiLoCo, LocalSGD
from mpikfac.lab.lsgd.config import LSGD
from mpikfac.lab.parameter_server.config import ParameterServer
from mpikfac.lab.parle.config import Parle
from mpikfac.lab.power_sgd.config import PowerSGD
from mpikfac.lab.robust.config import (
    CenteredClipping,
    GeometricMedian,
    Krum,
    Median,
    Safeguard,
    TrimmedMean,
)
from mpikfac.lab.top_k.config import TopK
from mpikfac.plan import (
    COMM_OPT_COST,
    NAMED,
    Aggregation,
    CommOpt,
    Compression,
    MemOpt,
    Named,
    Strategy,
    Synchronous,
    Transport,
)


def _robust(aggregation: Aggregation) -> Strategy:
    return Strategy(CommOpt(), sync=Synchronous(aggregation=aggregation))


NAMED |= {
    "dgc": Named(
        "COMM-OPT in which each rank sends only the largest 0.1 % of its gradient elements; the "
        "others accumulate locally with momentum, which replaces the optimizer's",
        "DGC, Lin et al. 2018",
        "2 (P-1)/P 4T + (P-1)/P 4F + (P-1) 0.008N - 2 (P-1)/P 4N",
        Strategy(CommOpt(), compression=Compression(gradients=TopK(ratio=0.001, momentum=0.9))),
        same=False,
    ),
    "power-sgd": Named(
        "COMM-OPT in which gradients are reduced as products of two matrices with two columns, "
        "with error feedback",
        "PowerSGD, Vogels et al. 2019",
        "2 (P-1)/P 4T + (P-1)/P 4F + 2 (P-1)/P (4R - 4N)",
        Strategy(
            CommOpt(), compression=Compression(gradients=PowerSGD(matrix_approximation_rank=2))
        ),
        same=False,
    ),
    "local-sgd": Named(
        "Each rank takes eight steps on its own replica of the model, and then all replicas are "
        "replaced by their mean",
        "Stich 2019",
        "2 (P-1)/P 4T + (P-1)/P 4F - 7/8 2 (P-1)/P 4N",
        Strategy(CommOpt(), sync=LocalSGD(sync_every=8)),
        same=False,
    ),
    "post-local-sgd": Named(
        "Local SGD with 16 steps between two means, after 1000 steps of averaged gradients",
        "Lin et al. 2020",
        "2 (P-1)/P 4T + (P-1)/P 4F - 15/16 2 (P-1)/P 4N",
        Strategy(CommOpt(), sync=LocalSGD(sync_every=16, warmup_steps=1000)),
        same=False,
    ),
    "diloco": Named(
        "Local SGD with 50 steps between two exchanges; a step with Nesterov momentum uses the "
        "replicas' mean change as its gradient",
        "DiLoCo, Douillard et al. 2023",
        "2 (P-1)/P 4T + (P-1)/P 4F - 49/50 2 (P-1)/P 4N",
        Strategy(CommOpt(), sync=DiLoCo(sync_every=50, outer_lr=0.7, outer_momentum=0.9)),
        same=False,
    ),
    "downpour": Named(
        "Clients push gradients to a server and fetch weights, and no client waits for another; "
        "the server applies the gradients in order of arrival; `P` clients train",
        "Downpour, Dean et al. 2012",
        "0 + 0 + 4N to the server and 4N back - 2 (P-1)/P 4N",
        Strategy(MemOpt(), sync=ParameterServer()),
        same=False,
    ),
    "streaming-diloco": Named(
        "DiLoCo with the model divided into five parts, one of which is sent every ten steps; the "
        "result is used five steps later, averaged with the replica's current weights",
        "Streaming DiLoCo, Douillard et al. 2025",
        "2 (P-1)/P 4T + (P-1)/P 4F - 49/50 2 (P-1)/P 4N",
        Strategy(CommOpt(), sync=DiLoCo(fragments=5, delay=5, mixing=0.5)),
        same=False,
    ),
    "daso": Named(
        "The ranks of a node average gradients in every step; after every fourth step, one rank "
        "per node, in round-robin order, sends weights, whose mean is mixed in one step later; "
        "`ranks_per_node` is the number of ranks per node, 1 by default",
        "DASO, Coquelin et al. 2022",
        "2 (P-1)/P 4T + (P-1)/P 4F + one reduction in four steps - 2 (P-1)/P 4N",
        Strategy(CommOpt(), sync=DASO(), transport=Transport(ranks_per_node=1)),
        same=False,
    ),
    "lsgd": Named(
        "Each rank trains a replica of the model, which is pulled towards the replica with the "
        "lowest loss, a little in each step, and more in every eighth step",
        "LSGD, Teng et al. 2019",
        "2 (P-1)/P 4T + (P-1)/P 4F - 15/16 2 (P-1)/P 4N",
        Strategy(CommOpt(), sync=LSGD()),
        same=False,
    ),
    "parle": Named(
        "Each rank trains a replica of the model; every 25 steps, each replica moves to the "
        "average of its weights over these steps, and towards the mean of all averages",
        "Parle, Chaudhari et al. 2018",
        "2 (P-1)/P 4T + (P-1)/P 4F - 24/25 2 (P-1)/P 4N",
        Strategy(CommOpt(), sync=Parle()),
        same=False,
    ),
    "median": Named(
        "The coordinate-wise median of all ranks' gradients replaces the mean",
        "Yin et al. 2018",
        COMM_OPT_COST,
        _robust(Median()),
        same=False,
    ),
    "trimmed-mean": Named(
        "The coordinate-wise mean of all ranks' gradients, excluding the largest and the smallest",
        "Yin et al. 2018",
        COMM_OPT_COST,
        _robust(TrimmedMean(num_byzantine=1)),
        same=False,
    ),
    "krum": Named(
        "Among all ranks' gradients, the one closest to its nearest neighbours replaces the mean",
        "Blanchard et al. 2017",
        COMM_OPT_COST,
        _robust(Krum(num_byzantine=1)),
        same=False,
    ),
    "geometric-median": Named(
        "The vector with the smallest sum of distances to all ranks' gradients replaces the mean",
        "Chen et al. 2017",
        COMM_OPT_COST,
        _robust(GeometricMedian()),
        same=False,
    ),
    "centered-clipping": Named(
        "The previous result plus the mean of all ranks' differences from it, where long "
        "differences are clipped",
        "Karimireddy et al. 2021",
        COMM_OPT_COST,
        _robust(CenteredClipping()),
        same=False,
    ),
    "safeguard": Named(
        "COMM-OPT in which a rank is permanently excluded when its gradients, summed over 300 or "
        "over 50 steps, are more than twice as far from a median rank's as most ranks' gradients",
        "SafeguardSGD, Allen-Zhu et al. 2021",
        COMM_OPT_COST,
        _robust(Safeguard()),
        same=False,
    ),
    "curvature-servers": Named(
        "COMM-OPT on all ranks but one, which decomposes the factors that owners send to it and "
        "returns the bases, which are used one step later; `P` ranks train",
        "LBANN",
        "2 (P-1)/P 4T + (4T/P + (P-1)/P 4F) + 0",
        Strategy(CommOpt(), refresh=CurvatureServers()),
    ),
}
