"""Asynchronous training in which a client is killed; the others train on, and print their updates.

Arguments: the client, and the step at which it dies.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
from torch import nn

import mpikfac
from mpikfac import MemOpt, Strategy
from mpikfac.lab import ParameterServer

STEPS = 20
lost, last = map(int, sys.argv[1:])
comm = mpikfac.world()
torch.manual_seed(0)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
team = mpikfac.split_comm(comm, 1)
if team.comm is None:
    counts = mpikfac.lab.run_parameter_server(model, optimizer, team)
    print("served", *(sum(count.values()) for count in counts), flush=True)
else:
    strategy = Strategy(MemOpt(), sync=ParameterServer())
    trainer = mpikfac.lab.AsyncSGD(model, optimizer, team, strategy)
    for step in range(STEPS):
        if (team.comm.rank, step) == (lost, last):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model(torch.ones(3, 4)).square().sum().backward()
        trainer.step()
        time.sleep(0.01)
    trainer.average_replicas()
    print("met at", trainer.version, flush=True)
    trainer.close()
sys.exit(mpikfac.comm.leaving(0))
