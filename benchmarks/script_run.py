"""Run a public script in this process, with another optimizer or rate, and watch the training.

The process cannot be used afterwards, as modules of torch stay patched.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import os
import random
import re
import runpy
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import mpikfac

CLASSES = "Adadelta", "Adam", "AdamW", "RMSprop", "SGD"
"""The optimizers of torch that scripts create."""
OPTIMIZERS: dict[str, Callable[[Optimizer], Optimizer]] = {
    "own": lambda own: own,
    "adam": lambda own: torch.optim.Adam(parameters(own)),
    "kfac": lambda own: mpikfac.KFACOptimizer(model_of(own)),
}
"""The replacements of a script's own optimizer."""
SEED_OF_SCRIPTS = 10_000


def parameters(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def model_of(optimizer: Optimizer) -> nn.Module:
    """Return the outermost module that has all parameters of an optimizer."""
    trained = {id(parameter) for parameter in parameters(optimizer)}
    modules = [thing for thing in gc.get_objects() if isinstance(thing, nn.Module)]
    having = [module for module in modules if trained <= {id(p) for p in module.parameters()}]
    return max(having, key=lambda module: len(list(module.modules())))


class Training(io.TextIOBase):
    """The training of a script: sets rates, counts steps and CPU seconds, reads printed scores.

    Seconds begin when the script creates its optimizer, and are not counted while the model is in
    evaluation mode.

    Args:
        optimizer: a name in `OPTIMIZERS`.
        setting: words: "rate=FACTOR" multiplies the script's rate; "falling" lets the initial rate
            decay linearly to 0, instead of the script's schedule.
        steps: steps until the rate is 0.
        score: regular expression of a printed test with a group "score".
        pause: called with the steps and seconds after the optimizer is created, and after each
            step.

    Attributes:
        tests: steps, seconds and the groups of `score` of each test.
        seconds_of_steps: the CPU seconds from the start to the last step.
    """

    def __init__(
        self,
        optimizer: str,
        setting: str,
        steps: int,
        score: str,
        pause: Callable[[int, float], None],
    ) -> None:
        words = dict(word.partition("=")[::2] for word in setting.split())
        self.factor, self.falling = float(words.get("rate", 1)), "falling" in words
        self.make, self.last, self.score, self.pause = OPTIMIZERS[optimizer], steps, score, pause
        self.steps, self.seconds_of_steps = 0, 0.0
        self.tests: list[dict[str, float]] = []
        self.rates: list[float] = []
        self.first_rates: list[float] = []
        self.spent, self.since = 0.0, 0.0
        self.runs = False
        self.line = ""

    # -- the clock ---------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """The CPU seconds of training until now."""
        return self.spent + (time.process_time() - self.since if self.runs else 0)

    def clock(self, runs: bool) -> None:
        """Start or stop the clock."""
        self.spent, self.since, self.runs = self.seconds, time.process_time(), runs

    # -- the optimizer -----------------------------------------------------------------------------

    def patch(self) -> None:
        """Let torch get the optimizer from this object, and notify it of the model's modes."""
        classes = {name: getattr(torch.optim, name) for name in CLASSES}

        def optimizer(name: str, *arguments: Any, **options: Any) -> Optimizer:
            for other, kind in classes.items():  # for the library compares classes
                setattr(torch.optim, other, kind)
            self.clock(True)
            made = self.make(classes[name](*arguments, **options))
            made.register_step_pre_hook(self.before)
            made.register_step_post_hook(self.after)
            self.first_rates = [group["lr"] for group in made.param_groups]
            self.pause(0, self.seconds)
            return made

        for name, kind in classes.items():  # wraps: scripts look at the signature
            setattr(torch.optim, name, functools.wraps(kind)(functools.partial(optimizer, name)))
        change_mode = nn.Module.train

        def train(module: nn.Module, mode: bool = True) -> nn.Module:
            self.clock(mode and bool(self.first_rates))
            return change_mode(module, mode)

        nn.Module.train = train  # type: ignore[method-assign]

    def before(self, optimizer: Optimizer, *_: Any) -> None:
        """Set the rates of a step."""
        self.rates = [group["lr"] for group in optimizer.param_groups]
        left = max(0.0, 1 - self.steps / self.last)
        falling = [left * rate for rate in self.first_rates]
        for group, rate in zip(optimizer.param_groups, falling if self.falling else self.rates):
            group["lr"] = self.factor * rate

    def after(self, optimizer: Optimizer, *_: Any) -> None:
        """Return the rates to the script's schedule, and count the step."""
        for group, rate in zip(optimizer.param_groups, self.rates):
            group["lr"] = rate
        self.steps, self.seconds_of_steps = self.steps + 1, self.seconds
        self.pause(self.steps, self.seconds)

    # -- what the script prints --------------------------------------------------------------------

    def write(self, text: str) -> int:
        """Read the scores of whole lines."""
        *lines, self.line = (self.line + text).split("\n")
        for test in filter(None, (re.search(self.score, line) for line in lines)):
            numbers = {name: float(number) for name, number in test.groupdict().items()}
            self.tests.append({"steps": self.steps, "seconds": self.seconds, **numbers})
        return len(text)


def warm_up() -> None:
    """Let torch import what a first step imports: two seconds that belong to no optimizer."""
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.Adam([weight])
    weight.sum().backward()
    optimizer.step()


def run(training: Training, script: Path, root: Path, arguments: Sequence[str], seed: int) -> None:
    """Run a script in its folder as a program; `training` watches."""
    torch.set_num_threads(1)
    torch.set_printoptions(precision=8)
    manual_seed = torch.manual_seed
    torch.manual_seed = lambda number: manual_seed(number + SEED_OF_SCRIPTS * seed)
    for seeded in (random.seed, np.random.seed, manual_seed):
        seeded(seed)
    os.chdir(script.parent)
    sys.argv = [script.name, *arguments]
    sys.path[:0] = [str(script.parent), str(root)]
    warm_up()
    training.patch()
    with contextlib.redirect_stdout(training), contextlib.redirect_stderr(training):
        runpy.run_path(script.name, run_name="__main__")
