"""A user's program, for type checkers alone: a wrong call is an error, a right call is none.

mypy and pyright report an ignore comment without an error below it (`.ci/run`).
"""

# pyright: reportUnnecessaryTypeIgnoreComment=error

from dataclasses import replace

import torch

import mpikfac
from mpikfac import (
    AdamGrafting,
    Coverage,
    Damping,
    Estimator,
    MemOpt,
    NormClip,
    Refresh,
    Strategy,
    Transport,
)
from mpikfac.lab import CurvatureServers

comm = mpikfac.world()
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

kfac = mpikfac.KFAC(
    model, optimizer, comm, damping=0.03, factor_update_steps=1, inv_update_steps=10
)
kfac.step()
steps: int = kfac.steps
scheduled = mpikfac.KFAC(model, optimizer, comm, damping=lambda step: 0.1 / (1 + step))
strategy = Strategy(MemOpt(), refresh=Refresh(staleness=1), transport=Transport(overlap=True))
mpikfac.KFAC(
    model,
    optimizer,
    mpikfac.split_comm(comm, curvature_servers=1),
    replace(strategy, refresh=CurvatureServers(servers=1)),
    damping=Damping(relative=0.1),
    preconditioner=mpikfac.Eigen(dtype=torch.bfloat16),
    clip=NormClip(max_norm=1.0),
    estimator=Estimator(factor_decay=0.9, subsample=2),
    coverage=Coverage(skip=["0"]),
)
mpikfac.KFAC(model, optimizer, comm, grafting=AdamGrafting(momentum=0.9))
whole: torch.optim.Optimizer = mpikfac.KFACOptimizer(model, strategy="mem-opt", damping=0.03)
muon: torch.optim.Optimizer = mpikfac.DistributedMuon(model, 0.01, momentum=0.9, comm=comm)
like_torch: torch.optim.Optimizer = mpikfac.Optimizer(kfac, max_norm=1.0)
like_torch.step()
torch.optim.lr_scheduler.StepLR(like_torch, 3)

mpikfac.KFAC(model, optimizer, comm, nonsense=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
mpikfac.KFAC(model, optimizer, comm, preconditioner=3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
mpikfac.KFAC(model, optimizer, 4)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
mpikfac.Optimizer(optimizer)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
Strategy(staleness=1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
mpikfac.SGDGrafting(momentum=0.9)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
mpikfac.KFAC(model, optimizer, comm, grafting="adam")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
kfac.stepp()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
