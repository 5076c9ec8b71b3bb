"""What has to be right about a model, its optimizer and K-FAC's choices before training."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import mpikfac
from mpikfac.adaptation import LevenbergMarquardt
from mpikfac.comm import SUMMABLE
from mpikfac.estimator import Estimator
from mpikfac.grafting import GRAFTS
from mpikfac.layers import Layer, Other
from mpikfac.shapes import Solver
from mpikfac.state import group_settings
from mpikfac.strategy import one_of

Block = Layer | Other
HERE = Path(__file__).parent

log = logging.getLogger("mpikfac")


def common_type(blocks: Sequence[Block]) -> tuple[torch.dtype, torch.device]:
    """The dtype to compute in, and the device, of tensors that share a dtype and the device.

    It is their dtype; of bfloat16, which has too few digits for sums, float32.

    Raises:
        ValueError: nothing is trained, or a tensor that differs from the first.
    """
    tensors = [(block.name, tensor) for block in blocks for tensor in _tensors(block)]
    if not tensors:
        raise ValueError("the model has no parameter that requires a gradient")
    name, first = tensors[0]
    dtype = torch.float32 if first.dtype == torch.bfloat16 else first.dtype
    if dtype not in SUMMABLE:
        allowed = " or ".join(map(str, (torch.bfloat16, *SUMMABLE)))
        raise ValueError(f"{name} is {first.dtype}; parameters must be {allowed}")
    for other, tensor in tensors:
        if (tensor.dtype, tensor.device) != (first.dtype, first.device):
            raise ValueError(
                f"{other} is {tensor.dtype} on {tensor.device} but {name} is {first.dtype} on "
                f"{first.device}; all trained parameters and buffers must share both"
            )
    return dtype, first.device


def describe(model: nn.Module, optimizer: Optimizer) -> dict[str, str]:
    """What ranks that train together must share: versions, model and optimizer, in short."""
    names = {id(p): name for name, p in model.named_parameters()}
    tensors = [*model.named_parameters(), *model.named_buffers()]
    shapes = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors]
    groups = [
        [names.get(id(p), "a parameter of another model") for p in group["params"]]
        for group in optimizer.param_groups
    ]
    numbers = dict(group_settings(optimizer))
    return {
        "mpikfac version": mpikfac.__version__,
        "mpikfac's code": _digest([path.read_bytes() for path in sorted(HERE.rglob("*.py"))]),
        "torch version": torch.__version__,
        "model": _digest(shapes),
        "optimizer": f"{type(optimizer).__name__} {numbers}",
        "optimizer's parameters": _digest(groups),
    }


def groups_of(layers: Iterable[Layer], optimizer: Optimizer) -> dict[str, list[int]]:
    """The optimizer's parameter groups that hold each layer's weight and bias.

    Raises:
        ValueError: none holds one of them.
    """
    group_of = {
        id(parameter): index
        for index, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    groups = {}
    for layer in layers:
        if any(id(parameter) not in group_of for parameter in layer.parameters):
            raise ValueError(
                f"layer {layer.name!r} is covered but not all of it is in the optimizer; "
                f"give it to the optimizer or add it to skip"
            )
        groups[layer.name] = [group_of[id(parameter)] for parameter in layer.parameters]
    return groups


def report_others(others: Iterable[Other], optimizer: Optimizer) -> None:
    """Lists once what is trained without K-FAC, and what is not trained at all."""
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    parameters = [other for other in others if other.parameters]
    names = ", ".join(other.name for other in parameters if id(other.tensor) in stepped)
    log.info("trained first-order, as no layer covers them: %s", names or "none")
    forgotten = ", ".join(other.name for other in parameters if id(other.tensor) not in stepped)
    if forgotten:
        log.warning("not trained, as the optimizer does not have them: %s", forgotten)


def _digest(content: object) -> str:
    return hashlib.sha256(repr(content).encode()).hexdigest()[:16]


def _tensors(block: Block) -> Sequence[Tensor]:
    return block.parameters if isinstance(block, Layer) else [block.tensor]


def check_damping(
    damping: object, relative: bool, solvers: Mapping[Solver, str], graft: str | None
) -> None:
    """Returns if the damping, and what it is relative to, suit `solvers_of` layers and grafting.

    Raises:
        ValueError: they do not.
    """
    one_of("relative_damping", relative, (False, True))
    one_of("graft", graft, GRAFTS)
    if graft and isinstance(damping, LevenbergMarquardt):
        raise ValueError(
            f"graft={graft!r} leaves nothing of the length that damping=LevenbergMarquardt(...) "
            f"adapts; use one of them"
        )
    if relative and (whose := solvers.get("rank-one")) is not None:
        raise ValueError(
            f"relative_damping=True is relative to mean eigenvalues, which "
            f"solver='rank-one'{whose} does not know; use another solver or relative_damping=False"
        )


def check_solvers(
    solvers: Mapping[Solver, str],
    estimator: Estimator,
    factor_dtype: torch.dtype | None,
    basis_dtype: torch.dtype | None,
) -> None:
    """Returns if `solvers_of` layers can do with what factors are estimated from, and such dtypes.

    Raises:
        ValueError: one cannot.
    """
    one_of("factor_dtype", factor_dtype, (None, torch.bfloat16))
    one_of("basis_dtype", basis_dtype, (None, torch.bfloat16))
    rank_one, ekfac = solvers.get("rank-one"), solvers.get("ekfac")
    if rank_one is not None and not estimator.of_loss:
        raise ValueError(
            f"solver='rank-one'{rank_one} takes mean gradients, which are 0 at labels that the "
            f"model gives; it needs fisher='empirical' or 'forward-only', not {estimator.fisher!r}"
        )
    dtypes = (estimator.statistics_dtype, factor_dtype, basis_dtype)
    if rank_one is not None and (estimator.start, *dtypes) != ("first", None, None, None):
        raise ValueError(
            f"solver='rank-one'{rank_one} has no matrices to start at the identity or to round: it "
            f"needs start='first' and statistics_dtype, factor_dtype and basis_dtype None, not "
            f"{estimator.start!r}, {', '.join(map(str, dtypes))}"
        )
    if ekfac is not None and (
        estimator.normalization != "expand" or estimator.fisher == "forward-only"
    ):
        raise ValueError(
            f"solver='ekfac'{ekfac} takes gradients of single examples as they are: it needs "
            f"normalization='expand' and fisher='empirical', 'sampled' or 'exact', not "
            f"{estimator.normalization!r} and {estimator.fisher!r}"
        )


def check_rounding(
    basis_dtype: torch.dtype | None, low_ranks: Mapping[str, int], wire: str | None
) -> None:
    """Returns if decompositions, some of low rank, may be kept in that dtype, and travel so.

    Raises:
        ValueError: they may not.
    """
    if basis_dtype is None:
        return
    if low_ranks:
        raise ValueError(
            f"basis_dtype={basis_dtype} rounds eigenvectors, which have to be orthogonal where "
            f"only some are kept, as of {next(iter(low_ranks))!r}; use None, or rank=None"
        )
    if wire is not None:
        raise ValueError(
            f"basis_dtype={basis_dtype} leaves nothing to round for basis_wire={wire!r}; use one "
            f"of both"
        )
