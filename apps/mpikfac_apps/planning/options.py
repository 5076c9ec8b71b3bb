"""The options of the planning programs; printing the help does not import torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from mpikfac.plan import Sharding
from mpikfac_apps.options.command_line import CommandLine
from mpikfac_apps.options.fields import (
    bounded,
    inline,
    listed,
    positional,
    read_by,
    required,
    section,
)
from mpikfac_apps.options.options import (
    MODELS,
    PRESETS,
    KfacOptions,
    StrategyOptions,
    usual_values,
)
from mpikfac_apps.planning.facts import UNPLANNED
from mpikfac_apps.text import MOST

PLAN_BASIC = (
    *(
        "model",
        "classes",
        "ranks",
        "strategy",
        "assignment.type",
        "sync.type",
        "preconditioner.type",
        "skip",
    ),
    *("refresh.staleness", "transport.overlap", "transport.ranks_per_node"),
    *("fully_shard", "replicas"),
)
MOST_SHARDS = 512
"""The maximum number of ranks in a plan with shards, which lists a size for each pair of ranks."""


def json_file(text: str) -> Path:
    """Return the path of a file to write; a missing folder is reported before any work is done.

    Raises:
        ValueError: the path is a folder, or the folder of the file does not exist.
    """
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"{path} must be a file in an existing folder")
    return path


def trace_files(text: str) -> Path:
    """Return the path FILE, with which the names of traces begin, from the text chakra:FILE.

    Raises:
        ValueError: the text is not of the form chakra:FILE, FILE is a folder, or the folder of FILE
            does not exist.
    """
    form, _, file = text.partition(":")
    if form != "chakra" or not file:
        raise ValueError(f"{text} must be chakra:FILE")
    return json_file(file)


@dataclass(frozen=True)
class ShardOptions:
    """How parameters are sharded.

    Args:
        fully_shard: each rank holds some rows of every parameter, as with `fully_shard` of torch
            (FSDP2), whose own messages are not counted. It needs a strategy with
            assignment.shard_optimizer, such as sharded-optimizer.
        replicas: the number of replicas of the shards (HSDP): the rows of a replica are
            distributed over ranks / replicas ranks.
    """

    fully_shard: bool = section("fully_shard", field(default=False))
    replicas: int = bounded(1, ">= 1")

    def of(self, parameters: Iterable[tuple[str, tuple[int, ...]]], ranks: int) -> Sharding | None:
        """Return the shards of parameters, given by block and shape; None for whole parameters.

        Raises:
            ValueError: there are replicas without shards, there are too many ranks for a plan of
                all messages between them, or the number of replicas does not divide the ranks.
        """
        if not self.fully_shard:
            if self.replicas > 1:
                raise ValueError(f"replicas={self.replicas} needs fully_shard=true, not false")
            return None
        if ranks > MOST_SHARDS:
            raise ValueError(f"fully_shard=true needs at most {MOST_SHARDS} ranks, not {ranks}")
        return Sharding.of(parameters, ranks, self.replicas)


@dataclass(frozen=True)
class PlanOptions:
    """Print the communication plan of a model: who computes and sends what. MPI is not needed.

    Args:
        model: FILE.py:FUNCTION for your own model, timm:NAME for a network from timm, or the name
            of a network.
        ranks: the number of ranks that train.
        classes: the number of classes. null: 1000 for most timm networks and those for ImageNet,
            the number that your own model has, and 10 for all other networks.
        batch_per_rank: the number of images per step on each rank, for the predictions of
            `machine`.
        export: chakra:FILE writes Chakra execution traces, one for each rank and kind of step, such
            as FILE.ordinary.0.et; null for none. With `machine`, traces also contain the computing
            stages.
    """

    model: str = listed(MODELS)
    ranks: int = required(">= 1", f"<= {MOST}")
    classes: int | None = bounded(None, ">= 1")
    batch_per_rank: int = bounded(32, ">= 1")
    export: Path | None = read_by(trace_files, None)
    sharding: ShardOptions = inline(ShardOptions)
    distribution: StrategyOptions = inline(StrategyOptions, without=UNPLANNED)
    kfac: KfacOptions = inline(KfacOptions)


@dataclass(frozen=True)
class StrategiesOptions:
    """List the published strategies, or describe one of them. MPI is not needed.

    Args:
        name: the strategy to describe, with its computation, messages and source; null to list all.
    """

    name: str | None = positional(default=None)


PLAN = CommandLine("mpikfac plan", PlanOptions, PLAN_BASIC, usual=usual_values, presets=PRESETS)
LIST = CommandLine("mpikfac strategies", StrategiesOptions)
