"""The tests' small training problem, in float64: about 12 images of 2 x 8 x 8 at every step.

MPIKFAC_TEST_DEVICE names the device of the problem, by default the CPU.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpikfac import (
    KFAC,
    AdamGrafting,
    Coverage,
    Damping,
    Estimator,
    FisherClip,
    KLClip,
    NoGrafting,
    NormClip,
    Strategy,
    world,
)
from mpikfac.lab import LSGD
from mpikfac.plan import Grafting, divisors
from mpikfac.preconditioners import named_preconditioner
from support import inside
from support.oracles import UNSPLIT  # noqa: F401 (for tests)
from support.strategies import assigned

SETTINGS = {
    **{
        "damping": 0.01,
        "factor_update_steps": 2,
        "inv_update_steps": 3,
        "factor_decay": 0.8,
        "kl_clip": 0.001,
    },
    "preconditioner": "eigen",
}
DEVICE = torch.device(os.environ.get("MPIKFAC_TEST_DEVICE", "cpu"))
STEPS = 4  # factors at 0 and 2, decompositions at 0 and 3: all four kinds of steps
EXAMPLES = world().size * max(1, 12 // world().size)  # equal shards; 12 on 1 to 4 ranks


CLIPS = {
    "kl_clip": lambda bound: KLClip(kl_clip=bound),
    "fisher_clip": lambda bound: FisherClip(max_norm=bound),
    "norm_clip": lambda bound: NormClip(max_norm=bound),
}
BY_ADAM = (
    AdamGrafting(orthogonalize=False),
    AdamGrafting(),
    AdamGrafting(normalize_rows=True),
)


def kfac(model, optimizer, comm, strategy=None, **settings) -> KFAC:
    """Return a `KFAC`, after grouping settings that are given by name.

    Without `grafting`, directions keep the length that preconditioning gives them.
    """
    values = {}
    if "basis_dtype" in settings:
        preconditioner = named_preconditioner(settings.get("preconditioner", "inverse"))
        settings["preconditioner"] = dataclasses.replace(
            preconditioner, dtype=settings.pop("basis_dtype")
        )
    if "relative_damping" in settings:
        kind = "relative" if settings.pop("relative_damping") else "value"
        values["damping"] = Damping(**{kind: settings.pop("damping")})
    values["grafting"] = settings.pop("grafting", NoGrafting())
    bounds = {name: settings.pop(name, None) for name in CLIPS}
    clips = [CLIPS[name](bound) for name, bound in bounds.items() if bound is not None]
    (values["clip"],) = clips or [None]
    for name, value in (("estimator", Estimator), ("coverage", Coverage)):
        names = [field.name for field in dataclasses.fields(value)]
        values[name] = value(**{n: settings.pop(n) for n in names if n in settings})
    return KFAC(model, optimizer, comm, strategy, **values, **settings)


def train_on_shards(kfac, comm, ranks, batches) -> None:
    """Take a step on the rank's shard of each batch, of `ranks` shards; then close."""
    for batch in batches:
        images, labels = (part.chunk(ranks)[comm.rank % ranks] for part in batch)
        kfac.optimizer.zero_grad()
        outputs = kfac.model(images)
        kfac.record(outputs)
        F.cross_entropy(outputs, labels).backward()
        kfac.step()
    kfac.close()


def network() -> nn.Module:
    """Return Conv - fixed BatchNorm - in-place ReLU - strided Conv - Linear."""
    torch.manual_seed(1)
    with torch.device("cpu"):  # the same values on any device
        norm = nn.BatchNorm2d(9)
        norm.running_mean.uniform_(-0.5, 0.5)
        norm.running_var.uniform_(0.5, 2.0)
        model = nn.Sequential(
            nn.Conv2d(2, 9, 3, padding=1, bias=False),
            norm.eval(),
            nn.ReLU(inplace=True),
            nn.Conv2d(9, 4, 3, stride=2),
            nn.Flatten(),
            nn.Linear(36, 5),
        )
    return model.to(DEVICE, torch.float64)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD with momentum and weight decay; the last layer has its own learning rate."""
    groups = [{"params": model[:4].parameters()}, {"params": model[5].parameters(), "lr": 0.03}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=1e-3)


def sgd_all(model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD with the same momentum and weight decay for all layers of any network."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD without momentum and weight decay."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return the images and labels of all ranks together."""
    generator = torch.Generator().manual_seed(step)
    with torch.device("cpu"):
        images = torch.randn(EXAMPLES, 2, 8, 8, generator=generator).double()
        labels = torch.randint(0, 5, (EXAMPLES,), generator=generator)
    return images.to(DEVICE), labels.to(DEVICE)


def shards(step: int, ranks: int) -> list[tuple[Tensor, Tensor]]:
    """Return `batch(step)`, divided among ranks."""
    images, labels = batch(step)
    return list(zip(images.tensor_split(ranks), labels.tensor_split(ranks)))


def strategies(
    ranks: int, reductions: Sequence[str] = ("allreduce", "reduce_scatter", "local")
) -> list[Strategy]:
    """Return all strategies for distributing K-FAC over `ranks` ranks."""
    choices = itertools.product(divisors(ranks), reductions, (False, True), (True, False))
    return [
        Strategy(
            assigned(
                workers,
                ranks,
                factor_reduction=reduction,
                shard_optimizer=shards,
                colocate_factors=together,
            )
        )
        for workers, reduction, shards, together in choices
    ]


def label(value: object) -> str | None:
    """Return a strategy or a grafting as a part of a test's name."""
    if isinstance(value, AdamGrafting):
        return "rows" if value.normalize_rows else "orthogonal" if value.orthogonalize else "adam"
    if isinstance(value, Grafting):
        return value.name
    if not isinstance(value, Strategy):
        return None
    assignment = value.assignment
    updates = "owner" if assignment.shard_optimizer else "everyone"
    owners = "together" if assignment.colocate_factors else "apart"
    return f"{assignment.name}-{assignment.factor_reduction}-{updates}-{owners}"


def whole_state(trainer, comm) -> dict[str, Any]:
    """Return the parts of all ranks as a single state, on the host."""
    mine = {n: v.cpu() if torch.is_tensor(v) else v for n, v in trainer.state_dict().items()}
    return {n: value for share in comm.allgather(mine) for n, value in share.items()}


def run(trainer, comm, steps: Sequence[int] = range(STEPS)) -> Tensor:
    """Train on the rank's shards; return the model's full state as a vector."""
    for step in steps:
        images, labels = shards(step, comm.size)[comm.rank]
        trainer.optimizer.zero_grad()
        loss = F.cross_entropy(trainer.model(images), labels)
        loss.backward()
        take_step(trainer, loss)
    return state(trainer.model)


def take_step(trainer, loss: Tensor | float) -> None:
    """Take a step; if the sync needs the rank's loss, report `loss`."""
    if isinstance(trainer.plan.strategy.sync, LSGD):
        trainer.exchange.report_loss(loss)
    trainer.step()


def by_one_process(train: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that returns the result of `train(comm, ...)` on one rank, on all ranks.

    Rank 0 trains while the other ranks wait. Results are cached by arguments.
    """

    @functools.cache
    def once(*given: Any, **settings: Any) -> Any:
        comm = world()
        own = comm.Split(comm.rank)
        return comm.bcast(train(own, *given, **settings) if comm.rank == 0 else None)

    return once


def planned(kfac, step: int) -> collections.Counter[str]:
    """Return the planned bytes of a step, by stage."""
    statistics, refresh, share = inside.due(kfac, step)
    found: collections.Counter[str] = collections.Counter()
    messages = kfac.plan.messages(inside.grid(kfac).world.rank, statistics, refresh, True, share)
    for message in messages:
        found[message.stage] += message.bytes
    return +found


def state(model: nn.Module) -> Tensor:
    """Return all parameters and buffers as a vector, on the host."""
    return torch.cat([value.double().reshape(-1) for value in model.state_dict().values()]).cpu()
