"""The laboratory's ways to distribute training over ranks and over time, by name."""

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
        "COMM-OPT in which a rank sends a thousandth of the gradients, the largest ones; the "
        "others wait and gather momentum, and the optimizer has no momentum",
        "DGC, Lin et al. 2018",
        "2 (P-1)/P 4T + (P-1)/P 4F + (P-1) 0.008N - 2 (P-1)/P 4N",
        Strategy(CommOpt(), compression=Compression(gradients=TopK(ratio=0.001, momentum=0.9))),
        same=False,
    ),
    "power-sgd": Named(
        "COMM-OPT in which gradients are added up as products of two matrices with two columns, "
        "with error feedback",
        "PowerSGD, Vogels et al. 2019",
        "2 (P-1)/P 4T + (P-1)/P 4F + 2 (P-1)/P (4R - 4N)",
        Strategy(
            CommOpt(), compression=Compression(gradients=PowerSGD(matrix_approximation_rank=2))
        ),
        same=False,
    ),
    "local-sgd": Named(
        "Each rank takes eight steps of a copy of the model, and the mean of all copies takes the "
        "place of each copy",
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
        "Local SGD with 50 steps between two exchanges; the mean change of the copies is the "
        "gradient of a step with Nesterov's momentum",
        "DiLoCo, Douillard et al. 2023",
        "2 (P-1)/P 4T + (P-1)/P 4F - 49/50 2 (P-1)/P 4N",
        Strategy(CommOpt(), sync=DiLoCo(sync_every=50, outer_lr=0.7, outer_momentum=0.9)),
        same=False,
    ),
    "downpour": Named(
        "Clients push gradients to a server and fetch weights, and no client waits for a second; "
        "the server steps the weights in order of arrival; `P` clients train",
        "Downpour, Dean et al. 2012",
        "0 + 0 + 4N to the server and 4N back - 2 (P-1)/P 4N",
        Strategy(MemOpt(), sync=ParameterServer()),
        same=False,
    ),
    "streaming-diloco": Named(
        "DiLoCo in five parts of the model, of which one is sent every ten steps; a mean is used "
        "five steps later, half and half with the copy",
        "Streaming DiLoCo, Douillard et al. 2025",
        "2 (P-1)/P 4T + (P-1)/P 4F - 49/50 2 (P-1)/P 4N",
        Strategy(CommOpt(), sync=DiLoCo(fragments=5, delay=5, mixing=0.5)),
        same=False,
    ),
    "daso": Named(
        "The ranks of a node average gradients at every step; after every fourth step, one rank of "
        "each node by turns sends weights, and the mean is mixed in one step later; "
        "`ranks_per_node` says how many ranks a node has, 1 if not given",
        "DASO, Coquelin et al. 2022",
        "2 (P-1)/P 4T + (P-1)/P 4F + one sum in four steps - 2 (P-1)/P 4N",
        Strategy(CommOpt(), sync=DASO(), transport=Transport(ranks_per_node=1)),
        same=False,
    ),
    "lsgd": Named(
        "Each rank steps a copy of the model, which the copy of the rank with the least loss pulls "
        "a little at each step, and more at every eighth step",
        "LSGD, Teng et al. 2019",
        "2 (P-1)/P 4T + (P-1)/P 4F - 15/16 2 (P-1)/P 4N",
        Strategy(CommOpt(), sync=LSGD()),
        same=False,
    ),
    "parle": Named(
        "Each rank steps a copy of the model; after 25 steps a copy moves to the average of its "
        "steps and towards the mean of all averages",
        "Parle, Chaudhari et al. 2018",
        "2 (P-1)/P 4T + (P-1)/P 4F - 24/25 2 (P-1)/P 4N",
        Strategy(CommOpt(), sync=Parle()),
        same=False,
    ),
    "median": Named(
        "The median of each number of all ranks' gradients takes the place of the mean",
        "Yin et al. 2018",
        COMM_OPT_COST,
        _robust(Median()),
        same=False,
    ),
    "trimmed-mean": Named(
        "The mean of each number of all ranks' gradients, without the largest and the smallest",
        "Yin et al. 2018",
        COMM_OPT_COST,
        _robust(TrimmedMean(num_byzantine=1)),
        same=False,
    ),
    "krum": Named(
        "The gradient of the rank whose neighbours are nearest takes the place of the mean",
        "Blanchard et al. 2017",
        COMM_OPT_COST,
        _robust(Krum(num_byzantine=1)),
        same=False,
    ),
    "geometric-median": Named(
        "The vector with the least sum of distances from all ranks' gradients",
        "Chen et al. 2017",
        COMM_OPT_COST,
        _robust(GeometricMedian()),
        same=False,
    ),
    "centered-clipping": Named(
        "The last gradient, moved by the mean difference of all ranks' gradients from it, after "
        "long differences are cut",
        "Karimireddy et al. 2021",
        COMM_OPT_COST,
        _robust(CenteredClipping()),
        same=False,
    ),
    "safeguard": Named(
        "COMM-OPT in which a rank is left out for good when its gradients, summed over 300 steps "
        "or over 50, are twice as far from a median rank's as most ranks' are",
        "SafeguardSGD, Allen-Zhu et al. 2021",
        COMM_OPT_COST,
        _robust(Safeguard()),
        same=False,
    ),
    "curvature-servers": Named(
        "COMM-OPT on all ranks but one, to which owners send factors and which sends back their "
        "bases, to be used one step later; `P` ranks train",
        "LBANN",
        "2 (P-1)/P 4T + (4T/P + (P-1)/P 4F) + 0",
        Strategy(CommOpt(), refresh=CurvatureServers()),
    ),
}
