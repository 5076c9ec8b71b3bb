"""The names of the stages of a step, the items of a state, and the kinds of memory of a rank.

The plan, the execution, traces, predictions and reports use the same name for a stage. For a stage
with messages, it is `Message.stage`.
"""

from __future__ import annotations

# -- stages with messages ------------------------------------------------------------------------

REDUCE_SCALES = "reduce scales"
REDUCE_STATISTICS = "reduce statistics"
SEND_FACTORS = "send factors"
RECEIVE_BASES = "receive bases"
PUBLISH_BASES = "publish bases"
REDUCE_GRADIENTS = "reduce gradients"
GATHER_GRADIENTS = "gather gradients"
EXCHANGE_WEIGHTS = "exchange weights"
EXCHANGE_IN_NODE = "exchange weights in node"
EXCHANGES = EXCHANGE_WEIGHTS, EXCHANGE_IN_NODE
PUBLISH_DIRECTIONS = "publish gradients"
CLIP = "clip"
SCATTER_DIRECTIONS = "scatter directions"
PUBLISH_WEIGHTS = "publish weights"

IN_STEP = (
    *(REDUCE_SCALES, REDUCE_STATISTICS, SEND_FACTORS, RECEIVE_BASES, PUBLISH_BASES),
    *(
        REDUCE_GRADIENTS,
        GATHER_GRADIENTS,
        EXCHANGE_IN_NODE,
        EXCHANGE_WEIGHTS,
        PUBLISH_DIRECTIONS,
        CLIP,
        SCATTER_DIRECTIONS,
        PUBLISH_WEIGHTS,
    ),
)
"""The stages of `KFAC.step` with messages, in the order of the messages."""

EXCHANGE_ACTIVATIONS = "exchange activations"
EXCHANGE_ACTIVATION_GRADIENTS = "exchange activation gradients"
EXCHANGE_SPLIT_STATISTICS = "exchange split statistics"
EXCHANGE_UPDATES = "exchange updates"
# Stages of ranks that do not train.
RECEIVE_FACTORS = "receive factors"
SEND_BASES = "send bases"
RECEIVE_UPDATE = "receive update"
SEND_WEIGHTS = "send weights"

# -- stages that compute -------------------------------------------------------------------------

FORWARD = "forward"
BACKWARD = "backward"
STATISTICS = "statistics"
DECOMPOSE = "decompose"
READ_GRADIENTS = "read gradients"
MOMENTS = "moments of gradients"  # in predictions: factors of the averaged gradient
PRECONDITION = "precondition"
QUADRATIC_MODEL = "quadratic model"
WRITE_BACK = "write back"
OPTIMIZER = "optimizer"
GRADIENTS = "gradients"  # in predictions: reading gradients and writing them back
PREDICTIONS_OF_PEERS = "predictions of peers"

# -- memory --------------------------------------------------------------------------------------

MEMORY = (
    *("statistics", "squares", "averages", "bases", "denominators", "scales", "scale sums"),
    *("gradients", "slices", "directions", "copies", "rule", "parts", "wires"),
)
"""The kinds of memory of `Plan.memory`, in order."""

# -- items of the state --------------------------------------------------------------------------

STEPS = "trainer/steps"
OF_MODEL = "model/"
OF_OPTIMIZER = "optimizer/"
OPTIMIZER_NAME = "optimizer/name"
OF_GROUPS = "optimizer/groups/"
PARAM_GROUPS = "param_groups"  # in the state of a torch optimizer; repeats what is in `OF_GROUPS`
OF_OPTIMIZER_STATE = "optimizer/state/"
OF_KFAC = "kfac/"
OF_EXCHANGE = "exchange/"
OWN_MOMENTUM = "own momentum"  # after `OF_EXCHANGE`: the momentum of a replica
OF_RULE = "exchange/rule/{} of {}/"  # the rank, and the number of ranks
OF_COPY = "copies/{}/"  # the rank
VERSION = "asynchronous/version"

# Items of K-FAC: after `OF_KFAC`, a kind, and the name of a factor, block or layer.
STARTED, PRECONDITIONER, DUE, DAMPING = "started", "preconditioner", "due", "damping"
DUE_LAYERS = "due/"  # before the name of a layer whose decompositions are all pending
LEARNED = "learned"
SEEN = "seen"
GRADIENT_FACTORS, GRADIENT_WEIGHTS = "gradient-factors/", "gradient-weights/"
FACTORS, VECTORS, WEIGHTS = "factors/", "vectors/", "weights/"
BASES, DECOMPOSITIONS = "bases/", "decompositions/"
SCALES, SCALE_WEIGHTS = "scales/", "scale-weights/"
GRAFT, MOMENTUM = "graft/", "momentum/"
ROWS, ROTATED = "rows/", "rotated/"
OF_LENGTHS = GRAFT, MOMENTUM, ROWS, ROTATED
