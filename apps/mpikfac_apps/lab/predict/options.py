"""The options of the programs that predict and measure; printing the help does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import mpikfac
from mpikfac.preconditioners import Inverse, Preconditioner
from mpikfac_apps.cli import picture
from mpikfac_apps.options.command_line import CommandLine
from mpikfac_apps.options.fields import bounded, inline, listed, read_by, required
from mpikfac_apps.options.options import (
    COMM_OPT,
    JOINTS,
    MODELS,
    KfacOptions,
    StrategyOptions,
    preset,
    usual_values,
)
from mpikfac_apps.options.sources import Presets
from mpikfac_apps.planning.facts import UNPLANNED
from mpikfac_apps.planning.options import ShardOptions, json_file
from mpikfac_apps.text import counts

STRATEGIES = ("sgd", *mpikfac.plan.NAMED)  # "sgd" is plain data parallelism
SGD = "sgd:"  # prefix of the name of a strategy for training without K-FAC
# K-FAC's options that have a different meaning here
OWN = ("strategy", "preconditioner", "inv_update_steps", "machine")
SIMULATE_BASIC = (
    *(
        "machine",
        "model",
        "classes",
        "ranks",
        "strategy",
        "preconditioner.type",
        "batch_per_rank",
        "stragglers",
    ),
    *("factor_update_steps", "inv_update_steps", "json"),
    *("fully_shard", "replicas"),
)
SEARCH = ("search", "picture")


def strategy_names(text: str) -> tuple[str, ...]:
    """Return the strategies in a list such as "sgd,comm-opt,sgd:local-sgd", or "all".

    Raises:
        ValueError: a name is unknown.
    """
    chosen = STRATEGIES if text == "all" else tuple(map(str.strip, text.split(",")))
    for name in chosen:
        if name.removeprefix(SGD) not in STRATEGIES:
            raise ValueError(f"{name!r} is unknown; try all, or some of {', '.join(STRATEGIES)}")
    return chosen


@dataclass(frozen=True)
class PredictionOptions:
    """The strategies, the machine and the training to predict.

    Args:
        machine: the machine: a file written by `mpikfac calibrate`, or a published machine.
        model: FILE.py:FUNCTION for your own model, timm:NAME for a network from timm, or the name
            of a network.
        ranks: the numbers of ranks to predict for, separated by commas: 16,64,256.
        classes: the number of classes. null: 1000 for most timm networks and for networks for
            ImageNet, the number that your own model has, and 10 for all other networks.
        strategy: the names of strategies, separated by commas: comm-opt,mem-opt. "all": all names
            that `mpikfac strategies` lists, and "sgd", which is training without K-FAC.
            "sgd:local-sgd": training without K-FAC, with a strategy.
        preconditioner: the preconditioner of every strategy with factors; a strategy with vectors
            keeps its own. null: the preconditioner with which each strategy was published.
        inv_update_steps: the number of steps between two decompositions of the factors. null: 50
            with every strategy, or more to stay within the budget.
        batch_per_rank: the number of images per step on each rank.
        stragglers: the spread of the ranks' computing times, as a standard deviation of the
            logarithm; 0.05 for 5 %.
        json: a file for the predictions; null for none.
        given: the values of the options that the user sets, by key.
        distribution: choices that replace those of each strategy.
    """

    machine: str = listed(mpikfac.predict.published_machines())
    model: str = listed(MODELS)
    ranks: tuple[int, ...] = required(read=counts)
    classes: int | None = bounded(None, ">= 1")
    strategy: tuple[str, ...] = read_by(strategy_names, "all")
    preconditioner: Preconditioner | None = field(default_factory=Inverse)
    inv_update_steps: int | None = bounded(None, ">= 1")
    batch_per_rank: int = bounded(32, ">= 1")
    stragglers: float = bounded(0.0, ">= 0")
    json: Path | None = read_by(json_file, None)
    sharding: ShardOptions = inline(ShardOptions)
    distribution: StrategyOptions = inline(StrategyOptions, without=(*OWN, *UNPLANNED))
    kfac: KfacOptions = inline(KfacOptions, without=OWN)
    given: Mapping[str, Any] = field(default_factory=dict, metadata={"given": True})

    @property
    def change(self) -> dict[str, Any]:
        """The choices that replace those of each strategy, by key."""
        return {k: value for k, value in self.given.items() if k.partition(".")[0] in JOINTS}


@dataclass(frozen=True)
class SimulateOptions(PredictionOptions):
    """Predict step times of strategies on any number of ranks. Runs without MPI.

    Args:
        search: print the Pareto-optimal choices: strategies, workers, two levels, intervals and
            compression; see docs/extensions/search.md.
        picture: a file for a plot of the choices of `search`, .pdf, .png or .svg; null for none.
    """

    search: bool = False
    picture: Path | None = read_by(picture, None)


@dataclass(frozen=True)
class AdviseOptions(PredictionOptions):
    """Recommend a batch size, servers and a strategy that hide messages. Runs without MPI.

    Args:
        efficiency: print the largest number of ranks, up to the largest of `ranks`, that has at
            least this efficiency, such as 0.8; null for none.
    """

    efficiency: float | None = bounded(None, "> 0", "<= 1")


def model_names(text: str) -> tuple[str, ...]:
    """Return the models in a list such as "resnet20,my_models.py:build".

    Raises:
        ValueError: a name is unknown.
    """
    names = tuple(text.split(","))
    if not set(names) <= set(MODELS):
        from mpikfac_apps.problems import models

        for name in names:
            models.network(name)
    return names


@dataclass(frozen=True)
class CalibrateOptions:
    """Measure this machine for `mpikfac simulate`; start the program under mpirun or srun.

    Args:
        out: the file to write, in JSON.
        model: the models to measure, separated by commas:
            resnet20,timm:resnet18,my_models.py:build.
        input: the shape of an example, such as 3,32,32, instead of a network's default shape;
            required for your own model.
        tokens: if set, examples for your own model are integers below `tokens`; null for real
            numbers.
        batch_per_rank: the numbers of images per step on each rank, separated by commas: 8,32,128.
            Predictions for numbers in between are interpolated linearly.
        device: the device of each rank; "auto" uses a GPU if there is one.
    """

    out: Path = required()
    model: tuple[str, ...] = read_by(model_names, "resnet20")
    input: tuple[int, ...] | None = read_by(counts, None)
    tokens: int | None = bounded(None, ">= 1")
    batch_per_rank: tuple[int, ...] = read_by(counts, "32")
    device: Literal["auto", "cpu", "cuda", "xpu"] = "auto"


def first_preset(names: str) -> dict[str, Any]:
    """Return the options of the first strategy in a list, or of COMM-OPT for "sgd" and "all"."""
    return preset(names.partition(",")[0].strip().removeprefix(SGD)) or preset(COMM_OPT)


FIRST = Presets("strategy", first_preset)
SIMULATE = CommandLine(
    *("mpikfac simulate", SimulateOptions, (*SIMULATE_BASIC, *SEARCH)),
    usual=usual_values,
    presets=FIRST,
)
ADVISE = CommandLine(
    *("mpikfac advise", AdviseOptions, (*SIMULATE_BASIC, "efficiency")),
    usual=usual_values,
    presets=FIRST,
)
CALIBRATE = CommandLine("mpikfac calibrate", CalibrateOptions)
