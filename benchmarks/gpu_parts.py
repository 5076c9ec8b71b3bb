"""The measurements of gpu.py: a function for each part, which runs in a separate process or job.

    python benchmarks/gpu_parts.py FUNCTION FILE

A function returns rows, most of which `timing.timed` creates. A row with `missing` says what a case
needs that is not available, such as an argument of `KFAC` that an older library does not have.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import logging
import os
import platform
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from timing import Case, Missing, Row, Step, block, timed
from torch import Tensor, nn

import mpikfac
from mpikfac import MemOpt, Refresh, Strategy
from mpikfac_apps import place
from mpikfac_apps.problems import models

NEVER = 10**9
Choices = Callable[[], dict[str, Any]]  # returns arguments of KFAC; the library may lack them
KINDS = {"ordinary": (NEVER, NEVER), "factors": (1, NEVER), "decompositions": (1, 1)}
PRECISIONS: dict[str, Choices] = {
    f"K-FAC, {precision}": lambda precision=precision: {"matmul_precision": precision}
    for precision in ("float32", "tf32", "bfloat16")
}
CAPTURED: Choices = lambda: {"cuda_graph": True}  # noqa: E731
FAST = {"cuda_graph": True, "matmul_precision": "bfloat16"}
FASTEST: Choices = FAST.copy
FASTEST_NAME = "K-FAC, " + ", ".join(f"{name}={value}" for name, value in FAST.items())


class Task(NamedTuple):
    """A network and its batch."""

    name: str
    network: str
    batch: int
    image: tuple[int, int, int]
    classes: int


class Scale(NamedTuple):
    """The sizes of all parts.

    Attributes:
        tasks: the small network, and the large network with a small, a medium and a large batch.
        rounds: samples of each case.
        lengths: steps of a block by kind.
        intervals: of the final table; the first two are also measured as a whole.
        orders: of factors, taken one at a time; `beside` are those measured during SGD.
        backend: of torch.compile.
    """

    tasks: tuple[Task, Task, Task, Task]
    rounds: int
    lengths: dict[str, int]
    intervals: tuple[tuple[int, int], ...]
    orders: tuple[int, ...]
    beside: tuple[int, ...]
    backend: str


RESNET20 = ("resnet20", 128, (3, 32, 32), 10)
DIGITS = ("digits_cnn", 4, (1, 8, 8), 10)
FULL = Scale(
    (
        Task("ResNet-20, 128", *RESNET20),
        *(
            Task(f"ResNet-50, {batch}", "resnet50", batch, (3, 224, 224), 1000)
            for batch in (32, 128, 256)
        ),
    ),
    rounds=7,
    lengths={"SGD": 4, "ordinary": 4, "factors": 2, "decompositions": 1},
    intervals=((10, 100), (1, 10), (50, 500)),
    orders=(64, 256, 512, 576, 1024, 1152, 2048, 2304, 4608),
    beside=(512, 1152, 2304, 4608),
    backend="inductor",
)
TINY = Scale(
    (Task("digits", *DIGITS),) * 4,
    rounds=2,
    lengths=dict.fromkeys(("SGD", *KINDS), 1),
    intervals=((2, 4), (1, 2), (3, 6)),
    orders=(8, 40),
    beside=(8,),
    backend="eager",
)
TRIAL = bool(os.environ.get("TRIAL"))
SCALE = TINY if TRIAL else FULL
SMALL, LITTLE, USUAL, LARGE = SCALE.tasks
SHORT = min(5, SCALE.rounds)  # rounds of long parts


def each(*tasks: Task) -> list[Task]:
    """Return the tasks, each of them once: those of a trial are one."""
    return list(dict.fromkeys(tasks))


def main(function: str, file: str) -> None:
    """Measure, and write the result; nothing is written if the measurement fails.

    Collective over: world.
    """
    if not torch.accelerator.is_available():
        sys.exit("torch finds no GPU")
    versions = {"cuda": torch.version.cuda, "hip": torch.version.hip}
    with suppress(metadata.PackageNotFoundError):
        versions["kfac-pytorch"] = metadata.version("kfac-pytorch")
    comm = mpikfac.world()
    device = mpikfac.device(comm)
    if comm.size > 1:
        from mpi4py import MPI  # only where a launcher has started MPI

        versions["mpi"] = MPI.Get_library_version().splitlines()[0]
    rows = FUNCTIONS[function]()
    for row in rows:
        if "wall_ms" in row:
            row["median_ms"] = median(row["wall_ms"])
    hosts = comm.allgather(platform.node())
    if comm.rank == 0:
        result = {
            "trial": TRIAL,
            "environment": place.environment(hosts, device) | versions,
            "settings": {"function": function, "library": mpikfac.__file__, **SCALE._asdict()},
            "rows": rows,
        }
        path = Path(file)
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(result, indent=1) + "\n")
        fresh.replace(path)


# -- a training ----------------------------------------------------------------------------------


@cache
def network(name: str, classes: int, channels: int) -> nn.Module:
    """Return the network on the host; always with the same weights."""
    torch.manual_seed(0)
    return models.build(name, classes, channels)


class Training:
    """A network, its batch and an SGD with momentum, on the rank's GPU.

    Args:
        plain: in float32 and NCHW; else under autocast to bfloat16, in channels-last.
    """

    def __init__(self, task: Task, plain: bool = False) -> None:
        self.comm, self.plain = mpikfac.world(), plain
        self.device = mpikfac.device(self.comm)
        layout = torch.contiguous_format if plain else torch.channels_last
        model = copy.deepcopy(network(task.network, task.classes, task.image[0]))
        self.model = model.to(self.device).to(memory_format=layout)
        self.optimizer = self.sgd()
        torch.manual_seed(self.comm.rank)
        images = torch.randn(task.batch, *task.image, device=self.device)
        self.images = images.to(memory_format=layout)
        self.labels = torch.randint(task.classes, (task.batch,), device=self.device)

    def sgd(self) -> torch.optim.Optimizer:
        """Return a new SGD of the network."""
        return torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9, weight_decay=5e-4)

    def kfac(
        self, factor_update_steps: int, inv_update_steps: int, choices: Choices = dict
    ) -> mpikfac.KFAC:
        """Return K-FAC of the network; `Missing` if the library does not have the choices."""
        every = {"factor_update_steps": factor_update_steps, "inv_update_steps": inv_update_steps}
        try:
            return mpikfac.KFAC(self.model, self.optimizer, self.comm, **every, **choices())
        except (TypeError, ValueError) as error:
            if choices is dict:
                raise
            raise Missing(str(error)) from error

    def step(self, finish: Callable[[], object], model: nn.Module | None = None) -> Step:
        """Return a training step that ends with `finish`; of a compiled `model`, if given."""
        run = model or self.model

        def step() -> None:
            self.optimizer.zero_grad()
            with torch.autocast(self.device.type, torch.bfloat16, enabled=not self.plain):
                loss = F.cross_entropy(run(self.images), self.labels)
            loss.backward()
            finish()

        return step


def sgd(task: Task, plain: bool = False, name: str = "SGD", **case: Any) -> Case:
    """Return the case of SGD alone: torch's, without mpikfac."""

    def make() -> Step:
        training = Training(task, plain)
        return training.step(training.optimizer.step)

    return Case(
        f"{task.name}: {name}",
        make,
        **{"base": base_of(task), "steps": SCALE.lengths["SGD"], **case},
    )


def kfac(
    task: Task,
    kind: str = "ordinary",
    name: str = "K-FAC",
    choices: Choices = dict,
    plain: bool = False,
) -> Case:
    """Return the case of a kind of step of K-FAC."""

    def make() -> Step:
        training = Training(task, plain)
        return training.step(training.kfac(*KINDS[kind], choices).step)

    return Case(f"{task.name}: {name}, {kind}", make, base_of(task), SCALE.lengths[kind])


def base_of(task: Task) -> str:
    """Return the name of the case that others are compared with."""
    return f"{task.name}: SGD"


def interval(task: Task, every: tuple[int, int], base: str) -> Case:
    """Return the case of all steps between two refreshes, one after the other."""

    def make() -> Step:
        training = Training(task)
        return training.step(training.kfac(*every, FASTEST).step)

    return Case(
        f"{task.name}: {FASTEST_NAME}, {every}, whole", make, base, every[1], profiled=False
    )


# -- the parts -----------------------------------------------------------------------------------


def health() -> list[Row]:
    """Run the tests that compare the GPU with the CPU.

    Collective over: world.
    """
    import pytest

    comm = mpikfac.world()
    chosen = ["-k", "allocate"] if TRIAL else []
    code = pytest.main(["-q", "-rs", "-x", "tests/mpi/test_cuda.py", *chosen])
    if codes := [int(each) for each in comm.allgather(int(code)) if each]:
        raise RuntimeError(f"tests/mpi/test_cuda.py ended with codes {codes}")
    return [{"name": f"tests/mpi/test_cuda.py, {comm.size} ranks", "note": "passed"}]


def ordinary() -> list[Row]:
    """Time ordinary steps by precision: is the step the device's or the host's?"""
    cases: list[Case] = []
    for task in each(USUAL, LITTLE, SMALL):
        cases += [sgd(task), kfac(task)]
        cases += [kfac(task, name=name, choices=choices) for name, choices in PRECISIONS.items()]
    cases.append(kfac(USUAL, name="K-FAC, eigen", choices=lambda: {"preconditioner": "eigen"}))
    return timed(cases, SCALE.rounds)


def compiled_small() -> list[Row]:
    """Time compiled SGD and K-FAC on one compiled network, and count its graphs."""
    return list(compiled_rows(SMALL))


def compiled() -> list[Row]:
    """Do the same with the large network, which takes long to compile."""
    return list(compiled_rows(USUAL))


def compiled_rows(task: Task) -> Iterator[Row]:
    """Yield the rows of a network; all cases share the network and what was compiled.

    K-FAC that records lets all compiled networks of a process run eagerly, so there is one K-FAC at
    a time, made after the first steps of compiled SGD.
    """
    training = Training(task)
    model = torch.compile(training.model, backend=SCALE.backend)
    plain, every, base = training.sgd(), SCALE.intervals[0][0], f"{task.name}: compiled SGD"
    case = partial(Case, base=base, steps=SCALE.lengths["SGD"], shared=True)
    yield from timed(
        [
            case(base, lambda: training.step(plain.step, model)),
            case(f"{task.name}: SGD", lambda: training.step(plain.step)),
        ],
        SCALE.rounds,
    )
    yield graphs_and_breaks(f"{task.name}: graphs, breaks before K-FAC")
    ordinary = training.kfac(NEVER, NEVER)
    yield from timed(
        [
            case(f"{task.name}: K-FAC, ordinary", lambda: training.step(ordinary.step)),
            case(
                f"{task.name}: compiled K-FAC, ordinary",
                lambda: training.step(ordinary.step, model),
            ),
            case(f"{base}, beside K-FAC", lambda: training.step(plain.step, model)),
        ],
        SCALE.rounds,
    )
    ordinary.close()
    mixed = training.kfac(every, NEVER)
    yield from timed(
        [
            case(
                f"{task.name}: compiled K-FAC, factors each {every} steps",
                lambda: training.step(mixed.step, model),
                steps=every,
                profiled=False,
            )
        ],
        SCALE.rounds,
    )
    mixed.close()
    yield graphs_and_breaks(f"{task.name}: graphs, breaks after K-FAC")


def graphs_and_breaks(name: str) -> Row:
    """Return the row of how many graphs torch.compile has made, and how many breaks it has met."""
    from torch._dynamo.utils import counters

    counts = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    return {"name": name, "note": f"{counts[0]}, {counts[1]}", "counts": counts}


def eager() -> list[Row]:
    """Time all kinds of steps of the library in use, which can be an older one."""
    cases = [
        case
        for task in each(USUAL, SMALL)
        for case in (sgd(task), *(kfac(task, kind) for kind in KINDS))
    ]
    return timed(cases, SCALE.rounds)


def captured() -> list[Row]:
    """Time captured directions, and compare the weights with those of eager steps."""
    told = Told()
    logging.getLogger("mpikfac").addHandler(told)
    rows = timed(
        [
            case
            for task in each(USUAL, SMALL)
            for case in (
                sgd(task),
                kfac(task, name="K-FAC, eager"),
                *(kfac(task, kind, "K-FAC, captured", CAPTURED) for kind in KINDS),
                kfac(task, name=FASTEST_NAME, choices=FASTEST),
            )
        ],
        SCALE.rounds,
    )
    torch.backends.cudnn.deterministic = True
    for task in each(USUAL, SMALL):
        name = f"{task.name}: relative difference of weights, captured; a second eager run"
        try:
            by_graph, eagerly, again = (trained(task, c) for c in (CAPTURED, dict, dict))
        except Missing as missing:
            rows.append({"name": name, "missing": str(missing)})
            continue
        apart = [((x - eagerly).norm() / eagerly.norm()).item() for x in (by_graph, again)]
        rows.append({"name": name, "note": f"{apart[0]:.1e}; {apart[1]:.1e}", "apart": apart})
    without = {text for text in told.texts if "without a CUDA graph" in text}
    return [*rows, {"name": "graphs", "note": "; ".join(sorted(without)) or "all recorded"}]


class Told(logging.Handler):
    """Keep the texts of a log."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def trained(task: Task, choices: Choices) -> Tensor:
    """Return the weights after steps of all kinds, on the host."""
    training = Training(task)
    step = training.step(training.kfac(4, 8, choices).step)
    for _ in range(14):
        step()
    weights = [parameter.detach().flatten() for parameter in training.model.parameters()]
    return torch.cat(weights).double().cpu()


def factors() -> list[Row]:
    """Time steps with new factors: by default, captured, in bfloat16, with all examples."""
    variants: dict[str, Choices] = {
        "K-FAC": dict,
        "K-FAC, captured": CAPTURED,
        "K-FAC, directions in bfloat16": PRECISIONS["K-FAC, bfloat16"],
        "K-FAC, statistics in bfloat16": lambda: {
            "estimator": mpikfac.Estimator(statistics_dtype=torch.bfloat16)
        },
        "K-FAC, all examples": lambda: {"estimator": mpikfac.Estimator(subsample=1)},
    }
    cases = []
    for task in each(USUAL, LITTLE, SMALL):
        cases.append(sgd(task))
        cases += [kfac(task, "factors", name, choices) for name, choices in variants.items()]
    return timed(cases, SCALE.rounds)


def orders() -> list[Row]:
    """Time refreshes: one factor at a time, all of an order, during SGD, and by the library."""
    training = Training(USUAL)
    plan = training.kfac(NEVER, NEVER).plan
    counts = Counter(factor.order for factor in plan.of(0).owned)
    cases = [sgd(USUAL, name="SGD", steps=1)]
    for order in SCALE.orders:
        for count in sorted({1, max(1, counts[order])}):
            cases += [
                Case(f"order {order}, {count} at once: {way}", lambda r=refresh: r)
                for way, refresh in refreshes(order, count, training.device)
            ]
    for order in SCALE.beside:
        cases.append(Case(f"SGD beside order {order}", beside(order), base_of(USUAL), 1))
    cases += [
        kfac(USUAL, "decompositions", name, choices) for name, choices in EIGENVECTORS.items()
    ]
    rows = timed(cases, min(3, SCALE.rounds))
    return [*rows, *(refresh_beside(*choice) for choice in REFRESHES)]


EIGENVECTORS: dict[str, Choices] = {
    "K-FAC, eigen": lambda: {"preconditioner": "eigen"},
    "K-FAC, eigen by an iteration": lambda: {
        "preconditioner": mpikfac.Eigen(iterations=1),
        "strategy": Strategy(MemOpt(), refresh=Refresh(tolerance=1e3)),
    },
}
REFRESHES = ((0, 1), (1, 1), (1, 5))
REFRESH_EVERY = 10


def refresh_beside(delay: int, stagger: int) -> Row:
    """Return the row of each step of some intervals: the slowest steps are those with a refresh.

    The host waits for the network's stream after each step, not for a refresh on another stream.
    """
    training = Training(USUAL)
    strategy = Strategy(MemOpt(), refresh=Refresh(staleness=delay, stagger=stagger))
    kfac = training.kfac(NEVER, REFRESH_EVERY, lambda: {"strategy": strategy})
    step = training.step(kfac.step)
    for _ in range(REFRESH_EVERY):
        step()
    choices = f"(never, {REFRESH_EVERY}), delay {delay}, stagger {stagger}"
    steps = REFRESH_EVERY * max(1, SCALE.rounds // 2)
    row: Row = {"name": f"{USUAL.name}: K-FAC {choices}, each step", "base": ""}
    return row | {"wall_ms": [block(step, 1, beside=True) for _ in range(steps)]}


def factor_stack(order: int, count: int, device: torch.device) -> Tensor:
    """Return damped factors `[count, order, order]` of random vectors."""
    vectors = torch.randn(count, order, 2 * order, device=device)
    stack = vectors @ vectors.mT / (2 * order)
    stack.diagonal(dim1=-2, dim2=-1).add_(0.1)
    return stack


def refreshes(order: int, count: int, device: torch.device) -> Iterator[tuple[str, Step]]:
    """Yield ways to decompose a stack of factors.

    An inverse by products is two steps of Newton and Schulz from an older inverse: four products.
    """
    stack = factor_stack(order, count, device)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky_ex(stack).L)
    twice = 2 * torch.eye(order, device=device).expand_as(stack)

    def cholesky() -> None:
        torch.cholesky_inverse(torch.linalg.cholesky_ex(stack).L)

    def by_products() -> None:
        older = inverse
        for _ in range(2):
            older = torch.bmm(older, torch.baddbmm(twice, stack, older, alpha=-1))

    yield "cholesky", cholesky
    yield "products", by_products
    if count == 1 or order <= 576:
        yield "eigh", lambda: torch.linalg.eigh(stack)


def beside(order: int) -> Callable[[], Step]:
    """Return what makes a step of SGD while a second stream inverts a factor of the order."""

    def make() -> Step:
        training = Training(USUAL)
        step, stream = training.step(training.optimizer.step), torch.Stream(training.device)
        _, refresh = next(refreshes(order, 1, training.device))

        def together() -> None:
            stream.wait_stream(torch.accelerator.current_stream())
            with stream:
                refresh()
            step()

        return together

    return make


def peer() -> list[Row]:
    """Time kfac-pytorch for comparison, on the same networks in float32 and NCHW, which it needs.

    "as published" is K-FAC with all that kfac-pytorch computes, and nothing else.
    """
    published: Choices = lambda: {  # noqa: E731
        "preconditioner": "eigen",
        "clip": mpikfac.KLClip(kl_clip=0.001),
        "estimator": mpikfac.Estimator(subsample=1),
    }
    rows = []
    for task in each(SMALL, USUAL):
        cases = [sgd(task, plain=True)]
        for kind in KINDS:
            cases += [
                kfac(task, kind, plain=True),
                kfac(task, kind, "K-FAC as published", published, plain=True),
                peer_case(task, kind),
            ]
        rows += timed(cases, min(SHORT, 3) if task is USUAL else SHORT)  # eigh takes long
    return rows


def peer_case(task: Task, kind: str) -> Case:
    """Return the case of a kind of step of kfac-pytorch."""

    def make() -> Step:
        if importlib.util.find_spec("kfac") is None:
            raise Missing("Python finds no package kfac")
        from kfac.preconditioner import KFACPreconditioner

        training = Training(task, plain=True)
        for module in training.model.modules():  # its hooks allow no ReLU in place behind a layer
            if isinstance(module, nn.ReLU):
                module.inplace = False
        every = dict(zip(("factor_update_steps", "inv_update_steps"), KINDS[kind]))
        preconditioner = KFACPreconditioner(training.model, lr=1e-3, **every)

        def finish() -> None:
            preconditioner.step()
            training.optimizer.step()

        return training.step(finish)

    return Case(f"{task.name}: kfac-pytorch, {kind}", make, base_of(task), SCALE.lengths[kind])


def final() -> list[Row]:
    """Time what users pay: intervals put together from kinds of steps, and whole intervals."""
    base, many = f"{USUAL.name}: SGD, many steps", SCALE.intervals[0][1] // 2
    whole = (interval(USUAL, every, base) for every in SCALE.intervals[:2])
    return [
        *by_kinds(USUAL, {"K-FAC": dict, FASTEST_NAME: FASTEST}),
        *timed([sgd(USUAL, name="SGD, many steps", base=base, steps=many), *whole], SHORT),
        *(
            row
            for task in each(USUAL, LARGE)[1:]
            for row in by_kinds(task, {FASTEST_NAME: FASTEST})
        ),
    ]


def final_small() -> list[Row]:
    """Do the same with the small network."""
    base, many = f"{SMALL.name}: SGD, many steps", SCALE.intervals[0][1] // 2
    whole = interval(SMALL, SCALE.intervals[0], base)
    return [
        *by_kinds(SMALL, {"K-FAC": dict, FASTEST_NAME: FASTEST}),
        *timed([sgd(SMALL, name="SGD, many steps", base=base, steps=many), whole], SHORT),
    ]


def by_kinds(task: Task, variants: dict[str, Choices]) -> Iterator[Row]:
    """Yield rows of kinds of steps by variant, and of intervals put together from kinds."""
    cases = [
        kfac(task, kind, name, choices) for name, choices in variants.items() for kind in KINDS
    ]
    rows = timed([sgd(task), *cases], SHORT)
    yield from rows
    for number, name in enumerate(variants):
        kinds = rows[1 + number * len(KINDS) :][: len(KINDS)]
        for every in SCALE.intervals:
            yield together(f"{task.name}: {name}, {every}, from kinds", base_of(task), kinds, every)


def together(name: str, base: str, kinds: Sequence[Row], every: tuple[int, int]) -> Row:
    """Return the row of the mean step of an interval, from rows of the kinds of steps."""
    factor_update_steps, inv_update_steps = every
    refreshes, updates = 1, inv_update_steps // factor_update_steps - 1
    shares = (inv_update_steps - updates - refreshes, updates, refreshes)

    def mean(of_kinds: Sequence[float]) -> float:
        return sum(share * ms for share, ms in zip(shares, of_kinds)) / inv_update_steps

    if missing := [kind for kind in kinds if "missing" in kind]:
        return {"name": name, "missing": missing[0]["missing"]}
    device = [kind["device_ms"] for kind in kinds]
    return {
        "name": name,
        "base": base,
        "wall_ms": [mean(samples) for samples in zip(*(kind["wall_ms"] for kind in kinds))],
        "device_ms": None if None in device else mean(device),
    }


def ranks() -> list[Row]:
    """Time steps of ranks that share the GPU, by the route of messages, and report the stages.

    Collective over: world.
    """
    ways = {"staged": "0", "direct": "1"}
    takes_device = mpikfac.comm.cuda_aware()
    rows = []
    for task in each(LITTLE, SMALL):
        traces: dict[str, mpikfac.Trace] = {}
        cases = [
            of_ranks(task, way, kind, traces, takes_device or way == "staged", ways[way])
            for way in ways
            for kind in ("SGD", *KINDS)
        ]
        timings = timed(cases, SHORT)
        for row in timings:
            if trace := traces.get(row["name"]):
                row["stages_ms"] = {
                    stage: 1e3 * seconds / trace.calls["optimizer"]
                    for stage, seconds in trace.seconds.items()
                }
        rows += timings
    return rows


def of_ranks(
    task: Task,
    way: str,
    kind: str,
    traces: dict[str, mpikfac.Trace],
    possible: bool,
    direct: str,
) -> Case:
    """Return the case of a kind of step on all ranks, with the trace under the case's name."""
    name = f"{task.name} a rank, {way}: {kind}"

    def make() -> Step:
        if not possible:
            raise Missing("MPI takes no buffers of the GPU")
        os.environ["MPIKFAC_CUDA_AWARE"] = direct
        training = Training(task)
        if kind == "SGD":
            trainer = mpikfac.FirstOrderTrainer(training.model, training.optimizer, training.comm)
        else:
            trainer = training.kfac(*KINDS[kind])
        step = training.step(trainer.step)
        step()  # the first step of K-FAC decomposes; its stages do not count
        trainer.trace.clear()
        if kind != "SGD":
            traces[name] = trainer.trace
        return step

    return Case(name, make, f"{task.name} a rank, {way}: SGD", SCALE.lengths[kind], profiled=False)


FUNCTIONS = {
    function.__name__: function
    for function in (
        *(health, ordinary, compiled_small, compiled, eager, captured),
        *(factors, orders, peer, final, final_small, ranks),
    )
}

if __name__ == "__main__":
    main(*sys.argv[1:])
