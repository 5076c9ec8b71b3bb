"""Compare the numbers, messages and states of two checkouts of mpikfac, bit for bit.

    python benchmarks/checkouts.py OLD NEW [--ranks 1 2 3 4] [--only WORD ...] [--keep FOLDER]

Every case trains a small network for some steps: all named strategies, with each preconditioner and
without, and many combinations of choices. Each checkout runs the cases of its own copy of this
file, with its own names, at each number of ranks. Then digests of weights after every step and of
all items of the state, the messages in order (stage, primitive, communicator, bytes), the bytes
counted by the trace, and the texts of errors are compared, case by case. A case that restarts
writes its state in OLD, and NEW continues from that state. The exit code is 1 if anything differs.

--keep keeps the records of OLD in a folder, where the next comparison finds them. `NAMES` maps the
names of OLD, in records and in states, to those of NEW.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import json
import logging
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mpikfac
from mpikfac import (
    AdamGrafting,
    BFloat16,
    CommOpt,
    Compression,
    FisherClip,
    HybridOpt,
    Int8,
    Inverse,
    KLClip,
    MemOpt,
    NoGrafting,
    NormClip,
    SGDGrafting,
    Strategy,
)
from mpikfac.comm import Grid
from mpikfac.lab import LSGD, LocalSGD, Median, NearestMajority, QuadraticModel, TopK

STEPS = 7
EXAMPLES = 24  # of a batch of all ranks together: whole shards at 1 to 4 ranks

Record = dict[str, Any]

NAMES = {
    **{"factor_every": "factor_update_steps", "basis_every": "inv_update_steps"},
    **{
        "late": "deferred-allreduce",
        "late-owner": "deferred-sharded",
        "sharded": "balanced-shards",
    },
    **{"owner-stepped": "sharded-optimizer", "delayed": "stale-inverse", "a-sgd": "downpour"},
    **{"curvature-ranks": "curvature-servers", "curvature_ranks": "curvature_servers"},
    **{"centred-clip": "centered-clipping", "liars": "num_byzantine"},
    **{"colocate": "colocate_factors", "exchange_every": "sync_every"},
    **{"DataParallel": "FirstOrderTrainer", "Asynchronous": "AsyncSGD"},
    **{"rank-one": "eva", "solver": "preconditioner"},
    "basis_dtype": "preconditioner.dtype",
    "preconditioner unsplit-inverse": "preconditioner inverse",
    **{f"{word}'unsplit-inverse'": f"{word}'inverse'" for word in ("preconditioner=", "not ")},
    # of refusals
    **{"needs workers": "needs grad_workers", "needs packing": "needs transport.packing"},
    **{"needs delay": "needs refresh.staleness", "needs tolerance": "needs refresh.tolerance"},
    **{"needs factor_wire": "needs compression.factors", "and overlap": "and transport.overlap"},
    "needs replicate_below": "needs assignment.replicate_below",
    "reduction='everyone'": "assignment.factor_reduction='allreduce'",
    "or 'owners', not 'none'": "or 'reduce_scatter', not 'local'",
    "reduction='everyone', not 'none'": "assignment.factor_reduction='allreduce', not 'local'",
    "update='everyone'": "assignment.shard_optimizer=False",
    "reduce_at='factors'": "transport.reduce_factors_at='factors'",
    "reduce_at='bases'": "transport.reduce_factors_at='inverses'",
    "not 'bases'": "not 'inverses'",
    "not 'owners' and 'owner'": "not 'reduce_scatter' and True",
    "not 'owners' and 'owner' and 'bases'": "not 'reduce_scatter' and True and 'inverses'",
    "exchanged='gradients', not 'weights'": "sync.local_steps=False, not True",
    "exchanged='weights' needs": "sync.local_steps=True needs",
    **{f"combine={rule!r}": f"sync.aggregation={rule!r}" for rule in ("krum", "trimmed-mean")},
    "top_momentum=0.9": "compression.gradients.momentum=0.9",
    "ValueError: ranks_per_node": "ValueError: transport.ranks_per_node",
}
"""Names in an older checkout's records, and the names that have replaced them."""


@dataclass(frozen=True)
class Case:
    """A training to compare.

    Attributes:
        choices: of the strategy, by dotted name.
        workers: of a strategy without a name: "all", "half" or a number.
        settings: arguments of `KFAC`, as functions of the package where they are objects.
        trainer: "KFAC", "FirstOrderTrainer" or "AsyncSGD".
        program: how the steps are taken, a key of `PROGRAMS`.
        dtype: of the model.
    """

    name: str
    choices: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    trainer: str = "KFAC"
    program: str = "plain"
    dtype: str = "float32"
    named: str = ""
    lr: float = 0.01
    momentum: float = 0.9
    workers: int | str = 1


PRECONDITIONERS = (
    *("eigen", "ekfac", "inverse", "unsplit-inverse", "eva"),
    *("shampoo", "kl-shampoo", "soap", "muon", "normuon", "newton-muon"),
)
UNSPLIT = "unsplit-inverse"
"""The name in cases of `Inverse(split_damping=False)`."""
WITH_MOMENTUM = "soap", "muon", "normuon", "newton-muon"
"""Preconditioners by whose defaults the momentum is taken before gradients are preconditioned."""
SERVED = "eigen", "ekfac", "inverse", "unsplit-inverse"
"""Preconditioners that curvature servers support; with others, servers would wait forever."""
LENGTHS: dict[str, dict[str, Any]] = {
    "orthogonal": {"grafting": AdamGrafting()},
    "adam": {"grafting": AdamGrafting(orthogonalize=False)},
    "sgd": {"grafting": SGDGrafting()},
    "own": {"grafting": NoGrafting()},
}
CLIPS: dict[str, dict[str, Any]] = {
    "fisher": {"clip": FisherClip(max_norm=1e-3)},
    "kl": {"clip": KLClip(kl_clip=1e-3)},
    "norm": {"clip": NormClip(max_norm=1e-3)},
}
SHORTER: dict[str, dict[str, Any]] = {
    "local-sgd": {"sync.sync_every": 3},
    "post-local-sgd": {"sync.sync_every": 2, "sync.warmup_steps": 2},
    "diloco": {"sync.sync_every": 3},
    "streaming-diloco": {"sync.sync_every": 4, "sync.fragments": 2, "sync.delay": 1},
    "daso": {"sync.sync_every": 2},
    "lsgd": {"sync.sync_every": 3},
    "parle": {"sync.sync_every": 3},
    "dgc": {"compression.gradients.ratio": 0.1},
    "krum": {"sync.aggregation.num_byzantine": 0},
    "hybrid": {"assignment": HybridOpt(grad_workers=1)},
}
"""Choices that replace those of named strategies, so that seven steps cover all of a strategy."""
OF_NODES = {"sync.sync_every": 3, "sync.replicas": "node", "transport.ranks_per_node": 2}
FURTHER: dict[str, dict[str, dict[str, Any]]] = {
    "dgc": {
        "warm-up": {"compression.gradients": TopK(ratio=0.1, momentum=0.9, warmup_steps=3)},
        "bound": {"compression.gradients": TopK(ratio=0.1, momentum=0.9, clip_norm=0.1)},
    },
    "downpour": {
        "intervals": {"sync.push_interval": 2, "sync.fetch_interval": 3},
        "warm-up": {"sync.warmup_updates": 3},
        "two servers": {"sync.servers": 2},
    },
    "safeguard": {
        "windows": {
            **{"sync.aggregation.long_window": 4, "sync.aggregation.short_window": 2},
            **{"sync.aggregation.threshold": 1.1, "sync.aggregation.floor": 1.0},
        },
        "before": {"sync.aggregation.mean_of": "before", "sync.aggregation.reset_interval": 3},
        "noise": {"sync.aggregation.noise_std": 0.01},
    },
    "lsgd": {"of nodes": OF_NODES},
    "parle": {
        "of nodes": OF_NODES,
        "growth": {
            **{"sync.sync_every": 2, "sync.growth": 0.5, "sync.max_gamma": 0.02},
            "sync.outer_lr": 0.9,
        },
    },
    "staggered": {"tolerance": {"refresh.tolerance": 0.2}},
}
"""Additional choices of named strategies."""
STEPPED = {"assignment": MemOpt(shard_optimizer=True)}
SHARDED = MemOpt(factor_reduction="reduce_scatter", shard_optimizer=True)
TRANSPORTS: dict[str, dict[str, Any]] = {
    "overlap": {"transport.overlap": True},
    "overlap owner": {"transport.overlap": True, "assignment": SHARDED},
    "overlap delay": {"transport.overlap": True, "refresh.staleness": 1},
    "parts": {"transport.virtual_ranks": 12},
    "stagger": {"refresh.stagger": 3},
    "delay": {"refresh.staleness": 2},
    "tolerance": {"refresh.tolerance": 0.2},
    "square": {"transport.packing": "square", "transport.fusion": 1},
    "replicated": {"assignment.replicate_below": 20},
    "alltoall": {"transport.owner_sums": "alltoall", "assignment": SHARDED},
    "near": {"sync.factor_aggregation": NearestMajority()},
    "wires": {"compression": Compression(factors=Int8(), inverses=BFloat16(), gradients=Int8())},
    "top-k": {"compression.gradients": TopK(ratio=0.1)},
    "wire owner": {"compression.gradients": BFloat16(), **STEPPED},
    "wire bases": {"compression.factors": BFloat16(), "transport.reduce_factors_at": "inverses"},
    "nodes": {"transport.ranks_per_node": 1},
    "copies nodes": {
        "sync": LocalSGD(sync_every=3, replicas="node"),
        "transport.ranks_per_node": 1,
    },
    "copies median": {"sync": LocalSGD(sync_every=2, aggregation=Median())},
    "copies top-k": {
        "sync": LocalSGD(sync_every=2),
        "compression.gradients": TopK(ratio=0.2),
    },
}
ESTIMATORS: dict[str, dict[str, Any]] = {
    "mc": {"fisher_type": "mc", "mc_samples": 2},
    "exact": {"fisher_type": "type-2"},
    "forward-only": {"fisher_type": "forward-only"},
    "identity": {"initial_factor": "identity"},
    "bfloat16 factors": {"factor_dtype": "bfloat16"},
    "bfloat16 statistics": {"statistics_dtype": "bfloat16"},
    "sc20": {"normalization": "sc20"},
    "subsample": {"subsample": 2},
}


def cases() -> Iterator[Case]:
    """Yield all cases."""
    yield from named_cases()
    yield from preconditioned_cases()
    yield from preconditioner_cases()
    yield from placed_cases()
    yield from transport_cases()
    yield from setting_cases()
    yield from program_cases()


def named_cases() -> Iterator[Case]:
    """Yield all named strategies, with K-FAC and without."""
    for name in mpikfac.plan.NAMED:
        shorter = SHORTER.get(name, {})
        settings = {"inv_update_steps": 5} if name == "staggered" else {}
        momentum = 0.0 if name == "dgc" else 0.9
        for trainer in ["AsyncSGD"] if name == "downpour" else ["KFAC", "FirstOrderTrainer"]:
            case = f"{name} {trainer}"
            yield Case(case, shorter, settings, trainer, named=name, momentum=momentum)
        if name in ("local-sgd", "lsgd", "parle", "diloco", "power-sgd", "staggered"):
            yield Case(f"{name} float64", shorter, settings, "KFAC", "frozen", "float64", name)


def preconditioned_cases() -> Iterator[Case]:
    """Yield all named strategies with each preconditioner, and additional choices of some."""

    def settings(name: str, **more: Any) -> dict[str, Any]:
        return more | {"inv_update_steps": 5 if name == "staggered" else 3}

    for name, preconditioner in itertools.product(mpikfac.plan.NAMED, PRECONDITIONERS):
        served = name == "curvature-servers" and preconditioner not in SERVED
        if name != "downpour" and not served:
            momentum = 0.0 if name == "dgc" or preconditioner in WITH_MOMENTUM else 0.9
            shorter = SHORTER.get(name, {})
            own = settings(name, preconditioner=preconditioner)
            yield Case(f"{name} {preconditioner}", shorter, own, named=name, momentum=momentum)
    for name, variants in FURTHER.items():
        trainer, momentum = "AsyncSGD" if name == "downpour" else "KFAC", 0.9 * (name != "dgc")
        for variant, choices in variants.items():
            case = f"{name} {variant}"
            yield Case(case, choices, settings(name), trainer, named=name, momentum=momentum)


def preconditioner_cases() -> Iterator[Case]:
    """Yield all preconditioners with all lengths, and programs of steps."""
    for preconditioner in PRECONDITIONERS:
        momentum = 0.0 if preconditioner in WITH_MOMENTUM else 0.9
        of_preconditioner = functools.partial(Case, momentum=momentum, workers="all")
        for name, length in LENGTHS.items():
            settings = {"preconditioner": preconditioner, **length}
            yield of_preconditioner(f"{preconditioner} {name}", {}, settings)
        for name, clip in CLIPS.items():
            settings = {"preconditioner": preconditioner, **clip}
            case = f"{preconditioner} {name}"
            yield of_preconditioner(case, {}, settings, dtype="float64", workers="half")
        settings = {"preconditioner": preconditioner, "damping": 0.003}
        yield of_preconditioner(f"{preconditioner} absolute", {}, settings, workers=1)
        programs = "scaled", "frozen", "resumed", "bounded", "uneven", "accumulated"
        for program in (*programs, "precondition"):
            yield of_preconditioner(
                f"{preconditioner} {program}",
                {},
                {"preconditioner": preconditioner},
                program=program,
            )
        delayed = {"refresh.staleness": 2}
        yield of_preconditioner(
            f"two steps later {preconditioner}",
            delayed,
            {"preconditioner": preconditioner},
            program="resumed",
        )


def placed_cases() -> Iterator[Case]:
    """Yield all placements."""
    reductions = {"everyone": "allreduce", "owners": "reduce_scatter", "none": "local"}
    updates = {"everyone": False, "owner": True}
    whens = {"factors": "factors", "bases": "inverses"}
    for choice in itertools.product((1, "half", "all"), reductions, updates, whens):
        workers, reduction, update, late = choice
        placed = {
            "assignment.factor_reduction": reductions[reduction],
            "assignment.shard_optimizer": updates[update],
            "transport.reduce_factors_at": whens[late],
        }
        name = f"placed {workers} {reduction} {update} {late}"
        yield Case(name, placed, {"preconditioner": "eigen"}, program="frozen", workers=workers)


def transport_cases() -> Iterator[Case]:
    """Yield the ways to send, with K-FAC and without."""
    for name, choices in TRANSPORTS.items():
        for trainer, program in itertools.product(
            ("KFAC", "FirstOrderTrainer"), ("plain", "frozen", "resumed")
        ):
            case = f"{name} {trainer} {program}"
            yield Case(case, choices, {}, trainer, program, workers="all")
        of_eigen: dict[str, Any] = {"settings": {"preconditioner": "eigen"}, "program": "bounded"}
        yield Case(f"{name} eigen", choices, **of_eigen, dtype="float64", workers="all")


def setting_cases() -> Iterator[Case]:
    """Yield estimators, momenta, adapted damping and the quadratic model."""
    everyone = functools.partial(Case, workers="all")
    half = functools.partial(Case, workers="half")
    for (name, estimator), preconditioner in itertools.product(
        ESTIMATORS.items(), ("eigen", "inverse")
    ):
        settings = {"preconditioner": preconditioner, "estimator": estimator}
        yield half(f"{name} {preconditioner}", {}, settings, program="resumed")
    momentum = {"grafting": AdamGrafting(momentum=0.9)}
    yield everyone("momentum", {}, momentum, momentum=0.0, program="resumed")
    yield Case("momentum frozen", {}, momentum, momentum=0.0, program="frozen")
    yield Case("momentum owner", STEPPED, momentum, momentum=0.0)
    adapted = {"damping": "adapted", "grafting": NoGrafting()}
    yield everyone("adapted", {}, adapted)
    rest: dict[str, Any] = {"program": "quadratic", "lr": 1.0, "momentum": 0.0}
    for dtype in ("float32", "float64"):
        quadratic = {"grafting": QuadraticModel(), "damping": {"value": 0.01}}
        yield half(f"quadratic {dtype}", {}, quadratic, dtype=dtype, **rest)
        quadratic = quadratic | {"damping": "adapted value"}
        yield everyone(f"quadratic adapted {dtype}", {}, quadratic, dtype=dtype, **rest)


def program_cases() -> Iterator[Case]:
    """Yield split layers, codistillation, and what a program can do between steps."""
    everyone, eigen = functools.partial(Case, workers="all"), {"preconditioner": "eigen"}
    yield everyone("split", program="split")
    yield Case("split first-order", trainer="FirstOrderTrainer", program="split")
    yield Case("split owner", STEPPED, eigen, program="split")
    yield everyone("split ekfac", settings={"preconditioner": "ekfac"}, program="split")
    yield everyone("discarded", settings=eigen, program="discarded")
    yield everyone("not finite", settings=eigen, program="not finite")
    yield Case("codistillation", trainer="FirstOrderTrainer", program="codistillation")
    yield everyone("optimizer", program="optimizer")
    usual = {"factor_update_steps": None, "inv_update_steps": None}
    yield everyone("usual intervals everyone", settings=usual, program="wide")
    yield Case("usual intervals owner", STEPPED, usual, program="wide")


# -- one checkout, under MPI -----------------------------------------------------------------------


class Recorder:
    """What a case does: messages in order, and digests."""

    def __init__(self) -> None:
        self.record: Record = {"messages": [], "weights": [], "states": [], "notes": []}

    def listen(self) -> None:
        """Record every message that a grid sends from now on."""
        exchange, in_order, overlapped = Grid.exchange, Grid.sum_in_order, Grid.overlapped

        def note(kind: str, messages: Sequence[Any], flat: Any) -> None:
            for m in messages:
                spans = hashlib.sha256(repr(m.spans).encode()).hexdigest()[:8]
                self.record["messages"].append(
                    [kind, m.stage, m.primitive, m.over, m.bytes, m.root, spans, flat.numel()]
                )

        def heard_exchange(grid: Any, messages: Any, flat: Any) -> Any:
            note("exchange", messages, flat)
            return exchange(grid, messages, flat)

        def heard_in_order(grid: Any, parts: Any, flat: Any, stage: str) -> Any:
            self.record["messages"].append(["in order", stage, list(parts.shape), flat.numel()])
            return in_order(grid, parts, flat, stage)

        def heard_overlapped(
            grid: Any, messages: Any, layout: Any, flat: Any, *more: Any, **named: Any
        ) -> Any:
            note("overlapped", messages, flat)
            return overlapped(grid, messages, layout, flat, *more, **named)

        Grid.exchange, Grid.sum_in_order, Grid.overlapped = (  # type: ignore[method-assign]
            heard_exchange,
            heard_in_order,
            heard_overlapped,
        )


def digest(value: Any) -> str:
    """Return a digest of a tensor's bits, or the text of another value."""
    if torch.is_tensor(value):
        bits = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return f"{value.dtype} {list(value.shape)} {hashlib.sha256(bits).hexdigest()[:16]}"
    return repr(value)


def network(dtype: str, width: int) -> Any:
    """Return a small network with convolutions, two normalisations and linear layers."""
    torch.manual_seed(7)
    model = nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 8, 3, stride=2, groups=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(72, width),
        nn.LayerNorm(width),
        nn.ReLU(),
        nn.Linear(width, 5),
    )
    return model.to(getattr(torch, dtype))


def batch(step: int, comm: Any, dtype: str) -> Any:
    """Return the rank's shard of the images and labels of a step."""
    generator = torch.Generator().manual_seed(100 + step)
    images = torch.randn(EXAMPLES, 2, 8, 8, generator=generator).to(getattr(torch, dtype))
    labels = torch.randint(0, 5, (EXAMPLES,), generator=generator)
    return images.chunk(comm.size)[comm.rank], labels.chunk(comm.size)[comm.rank]


def settings_of(case: Case, named: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `KFAC`."""
    settings = {"factor_update_steps": 2, "inv_update_steps": 3} | named | case.settings
    if settings.get("preconditioner") == UNSPLIT:
        settings["preconditioner"] = Inverse(split_damping=False)
    if isinstance(settings.get("damping"), dict):
        settings["damping"] = mpikfac.Damping(**settings["damping"])
    if settings.get("damping") == "adapted":
        settings["damping"] = mpikfac.Damping(
            relative=mpikfac.LevenbergMarquardt(damping_adaptation_interval=2)
        )
    if settings.get("damping") == "adapted value":
        settings["damping"] = mpikfac.Damping(
            mpikfac.LevenbergMarquardt(damping_adaptation_interval=2)
        )
    if isinstance(settings.get("estimator"), dict):
        values = {
            name: getattr(torch, value) if name.endswith("dtype") else value
            for name, value in settings["estimator"].items()
        }
        settings["estimator"] = mpikfac.Estimator(**values)
    return settings


def workers_of(workers: int | str, ranks: int) -> CommOpt | MemOpt | HybridOpt:
    """Return the assignment with a number of workers, all ranks, or half of an even number."""
    if workers == "half":
        return HybridOpt(grad_workers=max(1, ranks // 2) if ranks % 2 == 0 else 1)
    return CommOpt() if workers == "all" else MemOpt()


def changed(value: Any, choices: Mapping[str, Any]) -> Any:
    """Return a dataclass with other choices, by dotted name; a whole part comes first."""
    parts: dict[str, dict[str, Any]] = {}
    for name, choice in choices.items():
        head, _, rest = name.partition(".")
        parts.setdefault(head, {})[rest] = choice
    fields = {}
    for head, inside in parts.items():
        part = inside.pop("") if "" in inside else getattr(value, head)
        fields[head] = changed(part, inside) if inside else part
    return replace(value, **fields)


def made(case: Case, comm: Any, model: Any) -> tuple[Any, Any]:
    """Return the case's trainer and the ranks that train; no trainer for a rank that has served."""
    choices = dict(case.choices)
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=case.lr,
        momentum=case.momentum,
        weight_decay=0.0 if case.lr == 1 else 1e-3,
    )
    apart = {"curvature-servers": 1, "downpour": choices.get("sync.servers", 1)}.get(case.named, 0)
    team = mpikfac.split_comm(comm, apart) if apart else comm
    if apart and team.comm is None:
        if case.trainer == "AsyncSGD":
            mpikfac.lab.run_parameter_server(model, optimizer, team)
        else:
            mpikfac.lab.run_curvature_server(team)
        return None, comm
    ranks, trains = comm.size - apart, team.trains if apart else comm
    if case.named == "downpour":
        choices["sync.ranks_per_client"] = ranks
    strategy, named = Strategy(workers_of(case.workers, ranks)), dict[str, Any]()
    if case.named:
        strategy, named = mpikfac.get_strategy(case.named)
    strategy = changed(strategy, choices)
    strategy.check_ranks(ranks)
    if case.trainer == "AsyncSGD":
        return mpikfac.lab.AsyncSGD(model, optimizer, team, strategy), trains
    if case.trainer == "FirstOrderTrainer":
        return mpikfac.FirstOrderTrainer(model, optimizer, trains, strategy), trains
    kfac = mpikfac.KFAC(model, optimizer, team, strategy, **settings_of(case, named))
    return kfac, trains


class Run:
    """A case under way.

    Attributes:
        ranks: the communicator of the ranks that train.
        trainer: None on a rank that does not train.
    """

    def __init__(self, case: Case, comm: Any, recorder: Recorder, folder: str) -> None:
        self.case, self.recorder, self.folder = case, recorder, folder
        self.model, self.pupils = self._network(), None
        if case.program == "codistillation":
            groups = 2 if comm.size % 2 == 0 else 1
            settings = {"burn_in": 2, "groups": groups, "every": 2}
            self.pupils = mpikfac.lab.Codistillation(self.model, comm, **settings)
            comm = self.pupils.group
        if case.program == "split":
            split = mpikfac.TensorParallelPlan(comm.size, {"6": "outputs", "9": "inputs"})
            mpikfac.lab.split_layers(self.model, comm, split)
        self.scaler = None
        if case.program == "scaled":
            self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        self.comm = comm
        self.trainer, self.ranks = made(case, comm, self.model)

    def _network(self) -> Any:
        """Return the network; a wide one has factors that the budget cuts."""
        return network(self.case.dtype, width=300 if self.case.program == "wide" else 16)

    def train(self) -> None:
        """Take all steps, and note digests."""
        record = self.recorder.record
        for step in range(STEPS):
            self._prepare(step)
            loss, images, labels = self._passes(step)
            self._step(loss, images, labels)
            self._adapt(loss, images, labels)
            values = [v.detach().double().flatten() for v in self.model.state_dict().values()]
            record["weights"].append(digest(torch.cat(values)))
        trainer = self.trainer
        if self.case.trainer == "AsyncSGD":
            record["notes"].append(["staleness", dict(trainer.staleness), trainer.version])
        trainer.average_replicas()
        record["states"].append({n: digest(v) for n, v in sorted(trainer.state_dict().items())})
        record["notes"].append(repr(trainer) if self.case.trainer == "KFAC" else "")
        record["sent"] = dict(sorted(trainer.trace.sent.items()))
        record["decompositions"] = trainer.trace.calls["decompositions"]
        record["nonfinite"] = dict(trainer.nonfinite.counts)
        record["steps"] = trainer.steps
        trainer.close()

    def _prepare(self, step: int) -> None:
        """Freeze a layer, restart, or discard a pass, as the program requires."""
        program = self.case.program
        if program == "frozen" and step in (3, 5):
            self.model[3].requires_grad_(step == 5)
        if program == "resumed" and step == 4:
            self._restart()
        self.trainer.optimizer.zero_grad()
        if program == "discarded" and step in (1, 2):
            images, labels = batch(step, self.ranks, self.case.dtype)
            F.cross_entropy(self.model(images), labels).backward()
            self.trainer.clear_statistics()
            self.trainer.optimizer.zero_grad()

    def _restart(self) -> None:
        """Continue with another trainer, from the state of all ranks."""
        trainer, record, case = self.trainer, self.recorder.record, self.case
        trainer.average_replicas()
        state = trainer.state_dict()
        share = {n: v.cpu().clone() if torch.is_tensor(v) else v for n, v in state.items()}
        whole = {n: v for part in self.ranks.allgather(share) for n, v in part.items()}
        record["states"].append({n: digest(v) for n, v in sorted(share.items())})
        record["notes"].append(["missing", sorted(trainer.missing(whole.keys()))])
        file = Path(self.folder, f"{case.name}.{self.comm.size}.pkl".replace("/", "_"))
        if file.exists():  # the older checkout has written the state
            older = pickle.loads(file.read_bytes())
            whole = {renamed(name): value for name, value in older.items()}
        self.ranks.Barrier()
        if self.ranks.rank == 0:
            file.write_bytes(pickle.dumps(whole))
        trainer.close()
        self.model = self._network()
        self.trainer, self.ranks = made(case, self.comm, self.model)
        self.trainer.load_state_dict(whole)

    def _passes(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Run the passes of a step; return the mean loss, and the rank's batch."""
        images, labels = batch(step, self.ranks, self.case.dtype)
        if self.case.program == "uneven" and self.ranks.rank == 0:
            images, labels = images[: len(images) // 2], labels[: len(labels) // 2]
        parts = self.trainer.plan.strategy.transport.virtual_ranks
        if parts is not None:
            return self._collect(images, labels, parts // self.ranks.size), images, labels
        if self.case.program == "accumulated":
            for half_images, half_labels in zip(images.chunk(2), labels.chunk(2)):
                (F.cross_entropy(self.model(half_images), half_labels) / 2).backward()
            return F.cross_entropy(self.model(images), labels), images, labels
        outputs = self.model(images)
        if self.case.trainer == "KFAC":
            torch.manual_seed(1000 * step + self.ranks.rank)
            self.trainer.record(outputs)
        loss = F.cross_entropy(outputs, labels)
        total = loss + (self.pupils.term(images, outputs) if self.pupils else 0.0)
        if self.case.program == "not finite" and step in (2, 3) and self.ranks.rank == 0:
            total = total * float("nan")
        (self.scaler.scale(total) if self.scaler else total).backward()
        return loss, images, labels

    def _collect(self, images: Tensor, labels: Tensor, count: int) -> Tensor:
        """Run the passes of `count` parts; return the last loss."""
        for part_images, part_labels in zip(images.chunk(count), labels.chunk(count)):
            self.trainer.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(part_images), part_labels)
            loss.backward()
            self.trainer.accumulate()
        return loss

    def _step(self, loss: Tensor, images: Tensor, labels: Tensor) -> None:
        """Take the step, with the arguments of the program."""
        trainer, program = self.trainer, self.case.program
        arguments: dict[str, Any] = {"scaler": self.scaler} if self.scaler else {}
        if program == "bounded":
            arguments["max_norm"] = 0.05
        if program == "uneven":
            arguments["examples"] = len(images)
        if program == "quadratic":
            criterion = functools.partial(F.cross_entropy, target=labels)
            trainer.grafting.set_batch(images, criterion)
        if isinstance(trainer.plan.strategy.sync, LSGD):
            trainer.exchange.report_loss(loss.detach())
        self._take(arguments)
        if self.pupils:
            self.pupils.end_step()

    def _take(self, arguments: dict[str, Any]) -> None:
        """Call the trainer as the program does."""
        trainer = self.trainer
        if self.case.program == "optimizer":
            mpikfac.Optimizer(trainer, max_norm=0.5).step()
        elif self.case.program.startswith("precondition"):
            for parameter in self.model.parameters():
                self.ranks.Allreduce(sys.modules["mpi4py.MPI"].IN_PLACE, parameter.grad.numpy())
                parameter.grad /= self.ranks.size
            trainer.precondition()
            trainer.optimizer.step()
        else:
            trainer.step(**arguments)

    def _adapt(self, loss: Tensor, images: Tensor, labels: Tensor) -> None:
        """Adapt the damping every other step, if the damping is adapted."""
        adapted = str(self.case.settings.get("damping")).startswith("adapted")
        if adapted and self.trainer.steps % 2 == 0:
            with torch.no_grad():
                after = F.cross_entropy(self.model(images), labels)
            ratio = self.trainer.update_damping(loss.item(), after.item())
            self.recorder.record["notes"].append(["ratio", ratio])


def run_cases(out: str, words: Sequence[str], folder: str) -> None:
    """Run all cases in this process's checkout; rank 0 writes the records of all ranks."""
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    comm, found = mpikfac.world(), {}
    recorder = Recorder()
    recorder.listen()
    for case in cases():
        if words and not any(word in case.name for word in words):
            continue
        if case.named in ("curvature-servers", "downpour") and comm.size <= case.choices.get(
            "sync.servers", 1
        ):
            continue
        if case.named == "curvature-servers" and case.trainer != "KFAC":
            continue
        recorder.record = {"messages": [], "weights": [], "states": [], "notes": []}
        torch.manual_seed(5)
        try:
            run = Run(case, comm, recorder, folder)
            if run.trainer is not None:
                run.train()
        except (ValueError, RuntimeError, mpikfac.UserError) as error:
            recorder.record["refused"] = f"{type(error).__name__}: {error}"
        records = comm.gather(recorder.record)
        found[case.name] = records
        if comm.rank == 0 and os.environ.get("VERBOSE"):
            print(case.name, records[0].get("refused", ""), flush=True)
    if comm.rank == 0:
        Path(out).write_text(json.dumps(found, default=str))


# -- two checkouts ---------------------------------------------------------------------------------


def recorded(checkout: Path, ranks: int, words: Sequence[str], records: Path, states: Path) -> str:
    """Return the records of a checkout at a number of ranks, as text, and write them if missing."""
    if not records.exists():
        states.mkdir(parents=True, exist_ok=True)
        more = ["--record", str(records), "--states", str(states), "--only", *words]
        run_in(checkout, ranks, str(checkout / "benchmarks" / "checkouts.py"), *more)
    return records.read_text()


def run_in(
    checkout: Path, ranks: int, *program: str, output: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run a program with the library of a checkout, and return the job, with its output if asked.

    Raises:
        subprocess.CalledProcessError: if the job fails.
    """
    env = os.environ | {
        "PYTHONPATH": f"{checkout}:{checkout / 'apps'}",
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    launcher = [os.environ.get("MPIRUN", str(Path(sys.executable).with_name("mpirun")))]
    flags = os.environ.get("MPIRUN_FLAGS", "--oversubscribe").split()
    command = [*launcher, *flags, "-n", str(ranks), sys.executable, "-m", "mpi4py", *program]
    stdout = subprocess.PIPE if output else None
    return subprocess.run(
        command,
        env=env,
        cwd=checkout,
        check=True,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        text=True,
    )


def differences(old: Record, new: Record) -> Iterator[str]:
    """Yield what differs between two records of a rank, in short."""
    for name in sorted(old.keys() | new.keys()):
        before, after = old.get(name), new.get(name)
        if before == after:
            continue
        if isinstance(before, list) and isinstance(after, list):
            place = next(
                (i for i, (a, b) in enumerate(zip(before, after)) if a != b),
                min(len(before), len(after)),
            )
            before, after = before[place : place + 1], after[place : place + 1]
            if name == "states" and before and after:
                items = [
                    n for n in {**before[0], **after[0]} if before[0].get(n) != after[0].get(n)
                ]
                before, after = [items[:3], len(items)], [len(after[0])]
            yield f"{name}[{place}]: {before} -> {after}"
        else:
            yield f"{name}: {before} -> {after}"


def renamed(text: str) -> str:
    """Return a text of an older checkout with the names of this one."""
    if not NAMES:
        return text
    words = "|".join(map(re.escape, sorted(NAMES, key=len, reverse=True)))
    return re.sub(rf"(?<![\w-])({words})(?![\w-])", lambda word: NAMES[word[0]], text)


def compare(old: Path, new: Path, ranks: Sequence[int], words: Sequence[str], kept: Path) -> int:
    """Print a line for each case that differs; return the number of such cases.

    Args:
        kept: the folder of the older checkout's records.
    """
    differ = 0
    for count in ranks:
        states = kept / f"states {count}"
        records = recorded(old, count, words, kept / f"records {count}.json", states)
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "records.json")
            after = json.loads(recorded(new, count, words, out, states))
        before = {
            name: record
            for name, record in json.loads(renamed(records)).items()
            if not words or any(word in name for word in words)
        }
        refused = sum("refused" in records[0] for records in before.values())
        for name in sorted(before.keys() | after.keys()):
            pairs = zip(before.get(name, [{}] * count), after.get(name, [{}] * count))
            lines = [
                f"rank {r}: {line}" for r, pair in enumerate(pairs) for line in differences(*pair)
            ]
            differ += bool(lines)
            for line in lines[:4]:
                print(f"{count} ranks, {name}: {line[:400]}")
        print(
            f"{count} ranks: {len(before)} cases, {refused} of them refused, compared", flush=True
        )
    return differ


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare two checkouts; or with --record, run the cases of one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkouts", nargs="*", type=Path)
    parser.add_argument("--ranks", nargs="*", type=int, default=[1, 2, 3, 4])
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--record", default="", help="run the cases of this process's checkout")
    parser.add_argument("--states", default="", help="a folder for the states of --record")
    parser.add_argument("--keep", type=Path, help="a folder for the records of OLD")
    options = parser.parse_args(arguments)
    if options.record:
        with tempfile.TemporaryDirectory() as alone:
            run_cases(options.record, options.only, options.states or alone)
        return 0
    old, new = (path.resolve() for path in options.checkouts)
    with tempfile.TemporaryDirectory() as folder:
        return bool(compare(old, new, options.ranks, options.only, options.keep or Path(folder)))


if __name__ == "__main__":
    sys.exit(main())
