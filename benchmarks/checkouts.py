"""Compare the numbers, messages and states of two checkouts of mpikfac, bit for bit.

    python benchmarks/checkouts.py OLD NEW [--ranks 1 2 3 4] [--only WORD ...] [--states DIR]

Every case trains a small network for some steps: all named strategies, with K-FAC and without, and
many combinations of choices. Each checkout runs all cases at each number of ranks; then digests of
weights after every step and of all items of the state, the messages in order (stage, primitive,
communicator, bytes), the bytes that the trace has counted, and the texts of refusals are compared.
With --states DIR, the states that OLD has written are also loaded by NEW, at one rank more.
The exit code is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STEPS = 7
EXAMPLES = 24  # of a batch of all ranks together: whole shards at 1 to 4 ranks

Record = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A training to compare.

    Attributes:
        choices: of the strategy; "workers": "all", "half" or a number.
        settings: arguments of `KFAC`, as functions of the package where they are objects.
        trainer: "KFAC", "DataParallel" or "Asynchronous".
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


def cases() -> Iterator[Case]:
    """Yield all cases."""
    import mpikfac

    shorter = {
        "local-sgd": {"exchange_every": 3},
        "post-local-sgd": {"exchange_every": 2, "exchange_from": 2},
        "diloco": {"exchange_every": 3},
        "streaming-diloco": {"exchange_every": 4, "fragments": 2, "lateness": 1},
        "daso": {"exchange_every": 2},
        "lsgd": {"exchange_every": 3},
        "parle": {"exchange_every": 3},
        "dgc": {"top_share": 0.1},
        "krum": {"liars": 0},
    }
    every = {"staggered": {"basis_every": 5}}
    for name in mpikfac.plan.NAMED:
        plain = 0.0 if name == "dgc" else 0.9
        more = shorter.get(name, {})
        trainers = ["Asynchronous"] if name == "a-sgd" else ["KFAC", "DataParallel"]
        for trainer in trainers:
            yield Case(
                f"{name} {trainer}", more, every.get(name, {}), trainer, named=name, momentum=plain
            )
        if name in ("local-sgd", "lsgd", "parle", "diloco", "power-sgd", "staggered"):
            yield Case(
                f"{name} float64", more, every.get(name, {}), "KFAC", "frozen", "float64", name
            )
    solvers = "eigen", "ekfac", "inverse", "unsplit-inverse", "rank-one"
    for solver in solvers:
        for source in ("orthogonal", "adam", "sgd", "own"):
            yield Case(
                f"{solver} {source}",
                {"workers": "all"},
                {"solver": solver, "length": {"source": source}},
            )
        for kind in ("fisher", "kl", "norm"):
            yield Case(
                f"{solver} {kind}",
                {"workers": "half"},
                {"solver": solver, "length": {kind: 1e-3}},
                dtype="float64",
            )
        yield Case(f"{solver} relative off", {"workers": 1}, {"solver": solver, "damping": 0.003})
        for program in ("scaled", "frozen", "resumed", "bounded", "uneven", "accumulated"):
            yield Case(
                f"{solver} {program}", {"workers": "all"}, {"solver": solver}, program=program
            )
    for workers in (1, "half", "all"):
        for reduction in ("everyone", "owners", "none"):
            for update in ("everyone", "owner"):
                for late in ("factors", "bases"):
                    placed = dict(
                        workers=workers, reduction=reduction, update=update, reduce_at=late
                    )
                    yield Case(
                        f"placed {workers} {reduction} {update} {late}",
                        placed,
                        {"solver": "eigen"},
                        program="frozen",
                    )
    choices: dict[str, dict[str, Any]] = {
        "overlap": {"overlap": True},
        "overlap owner": {"overlap": True, "update": "owner", "workers": 1, "reduction": "owners"},
        "overlap delay": {"overlap": True, "delay": 1},
        "parts": {"parts": 12},
        "stagger": {"stagger": 3},
        "delay": {"delay": 2},
        "tolerance": {"tolerance": 0.2},
        "square": {"packing": "square", "fusion": 1},
        "replicated": {"replicate_below": 20},
        "alltoall": {"sums": "alltoall", "reduction": "owners", "update": "owner", "workers": 1},
        "near": {"combine_factors": "near"},
        "wires": {"factor_wire": "int8", "basis_wire": "bfloat16", "gradient_wire": "int8"},
        "top-k": {"gradient_wire": "top-k", "top_share": 0.1},
        "wire owner": {"gradient_wire": "bfloat16", "update": "owner", "workers": 1},
        "wire late": {"factor_wire": "bfloat16", "reduce_at": "bases"},
        "nodes": {"ranks_per_node": 1},
        "copies nodes": {
            "exchanged": "weights",
            "exchange_every": 3,
            "copies_of": "node",
            "ranks_per_node": 1,
        },
        "copies median": {"exchanged": "weights", "exchange_every": 2, "combine": "median"},
        "copies top-k": {
            "exchanged": "weights",
            "exchange_every": 2,
            "gradient_wire": "top-k",
            "top_share": 0.2,
        },
    }
    for name, chosen in choices.items():
        chosen = {"workers": "all"} | chosen
        for trainer in ("KFAC", "DataParallel"):
            for program in ("plain", "frozen", "resumed"):
                yield Case(f"{name} {trainer} {program}", chosen, {}, trainer, program)
        yield Case(f"{name} eigen", chosen, {"solver": "eigen"}, program="bounded", dtype="float64")
    estimators = {
        "sampled": {"fisher": "sampled", "samples": 2},
        "exact": {"fisher": "exact"},
        "forward-only": {"fisher": "forward-only"},
        "identity": {"start": "identity"},
        "bfloat16 factors": {"factor_dtype": "bfloat16"},
        "bfloat16 statistics": {"statistics_dtype": "bfloat16"},
        "sc20": {"normalization": "sc20"},
        "subsample": {"subsample": 2},
    }
    for name, estimator in estimators.items():
        for solver in ("eigen", "inverse"):
            settings = {"solver": solver, "estimator": estimator}
            yield Case(f"{name} {solver}", {"workers": "half"}, settings, program="resumed")
    momentum = {"length": {"momentum": 0.9}}
    yield Case("momentum", {"workers": "all"}, momentum, momentum=0.0, program="resumed")
    yield Case("momentum frozen", {"workers": 1}, momentum, momentum=0.0, program="frozen")
    yield Case("momentum owner", {"workers": 1, "update": "owner"}, momentum, momentum=0.0)
    adapted = {"damping": "adapted", "length": {"source": "own"}}
    yield Case("adapted", {"workers": "all"}, adapted, program="adapted")
    for dtype in ("float32", "float64"):
        quadratic = {"length": {"source": "quadratic"}, "damping": {"value": 0.01}}
        yield Case(
            f"quadratic {dtype}",
            {"workers": "half"},
            quadratic,
            program="quadratic",
            dtype=dtype,
            lr=1.0,
            momentum=0.0,
        )
        quadratic = quadratic | {"damping": "adapted value"}
        yield Case(
            f"quadratic adapted {dtype}",
            {"workers": "all"},
            quadratic,
            program="quadratic",
            dtype=dtype,
            lr=1.0,
            momentum=0.0,
        )
    for solver in solvers:
        yield Case(
            f"precondition {solver}", {"workers": "all"}, {"solver": solver}, program="precondition"
        )
        yield Case(
            f"delayed {solver}",
            {"workers": "all", "delay": 2},
            {"solver": solver},
            program="resumed",
        )
    yield Case("split", {"workers": "all"}, {}, program="split")
    yield Case("split first-order", {}, {}, "DataParallel", program="split")
    yield Case(
        "split owner", {"workers": 1, "update": "owner"}, {"solver": "eigen"}, program="split"
    )
    yield Case("split ekfac", {"workers": "all"}, {"solver": "ekfac"}, program="split")
    yield Case("discarded", {"workers": "all"}, {"solver": "eigen"}, program="discarded")
    yield Case("not finite", {"workers": "all"}, {"solver": "eigen"}, program="not finite")
    yield Case("codistillation", {}, {}, "DataParallel", program="codistillation")
    yield Case("optimizer", {"workers": "all"}, {}, program="optimizer")


# -- one checkout, under MPI -----------------------------------------------------------------------


class Recorder:
    """What a case does: messages in order, and digests."""

    def __init__(self) -> None:
        self.record: Record = {"messages": [], "weights": [], "states": [], "notes": []}

    def listen(self) -> None:
        """From now on, note every message that a grid sends."""
        from mpikfac.comm import Grid

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
    import torch

    if torch.is_tensor(value):
        bits = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return f"{value.dtype} {list(value.shape)} {hashlib.sha256(bits).hexdigest()[:16]}"
    return repr(value)


def network(dtype: str) -> Any:
    """Return a small network with convolutions, two normalisations, an embedding's kind and a head."""
    import torch
    from torch import nn

    torch.manual_seed(7)
    model = nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 8, 3, stride=2, groups=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(72, 16),
        nn.LayerNorm(16),
        nn.ReLU(),
        nn.Linear(16, 5),
    )
    return model.to(getattr(torch, dtype))


def batch(step: int, comm: Any, dtype: str) -> Any:
    """Return the rank's share of the images and labels of a step."""
    import torch

    generator = torch.Generator().manual_seed(100 + step)
    images = torch.randn(EXAMPLES, 2, 8, 8, generator=generator).to(getattr(torch, dtype))
    labels = torch.randint(0, 5, (EXAMPLES,), generator=generator)
    return images.chunk(comm.size)[comm.rank], labels.chunk(comm.size)[comm.rank]


def settings_of(case: Case, named: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `KFAC`."""
    import torch

    import mpikfac

    settings = {"factor_every": 2, "basis_every": 3} | named | case.settings
    if isinstance(settings.get("length"), dict):
        settings["length"] = mpikfac.Length(**settings["length"])
    if isinstance(settings.get("damping"), dict):
        settings["damping"] = mpikfac.Damping(**settings["damping"])
    if settings.get("damping") == "adapted":
        settings["damping"] = mpikfac.Damping(relative=mpikfac.LevenbergMarquardt(every=2))
    if settings.get("damping") == "adapted value":
        settings["damping"] = mpikfac.Damping(mpikfac.LevenbergMarquardt(every=2))
    if isinstance(settings.get("estimator"), dict):
        values = {
            name: getattr(torch, value) if name.endswith("dtype") else value
            for name, value in settings["estimator"].items()
        }
        settings["estimator"] = mpikfac.Estimator(**values)
    return settings


def made(case: Case, comm: Any, model: Any) -> tuple[Any, Any]:
    """Return the case's trainer and the ranks that train; no trainer for a rank that has served."""
    import torch

    import mpikfac

    named: dict[str, Any] = {}
    choices = dict(case.choices)
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=case.lr,
        momentum=case.momentum,
        weight_decay=0.0 if case.lr == 1 else 1e-3,
    )
    apart = {"curvature-ranks": 1, "a-sgd": 1}.get(case.named, 0)
    team = mpikfac.split(comm, apart) if apart else comm
    if apart and team.comm is None:
        if case.trainer == "Asynchronous":
            mpikfac.serve_updates(model, optimizer, team)
        else:
            mpikfac.serve(team)
        return None, comm
    ranks, trains = comm.size - apart, team.trains if apart else comm
    if "workers" in choices:
        half = max(1, ranks // 2) if ranks % 2 == 0 else 1
        choices["workers"] = {"all": ranks, "half": half}.get(
            choices["workers"], choices["workers"]
        )
    if case.named == "a-sgd":
        choices["client_ranks"] = ranks
    if case.named:
        strategy, named = mpikfac.named(case.named, ranks, **choices)
    else:
        strategy = mpikfac.Strategy().changed(**choices)
    if case.trainer == "Asynchronous":
        return mpikfac.Asynchronous(model, optimizer, team, strategy), trains
    if case.trainer == "DataParallel":
        return mpikfac.DataParallel(model, optimizer, trains, strategy), trains
    kfac = mpikfac.KFAC(model, optimizer, team, strategy, **settings_of(case, named))
    return kfac, trains


def stepped(trainer: Any, mean_loss: Any, arguments: dict[str, Any]) -> None:
    """Take a step, with the mean loss for a rule that asks for the loss."""
    exchange = trainer.plan.strategy.exchange
    leads = exchange.of_copies and exchange.merging.merge == "leader"
    if "mean_loss" in inspect.signature(trainer.step).parameters:
        trainer.step(**arguments, **({"mean_loss": mean_loss} if leads else {}))
        return
    if leads:
        trainer.exchange.hear(mean_loss)
    trainer.step(**arguments)


def train(case: Case, comm: Any, recorder: Recorder, folder: str) -> None:
    """Train as the case says, and note digests."""
    import torch
    import torch.nn.functional as F

    import mpikfac

    record, program = recorder.record, case.program
    model = network(case.dtype)
    pupils = None
    if program == "codistillation":
        pupils = mpikfac.Codistillation(
            model, comm, burn_in=2, groups=2 if comm.size % 2 == 0 else 1, every=2
        )
        comm = pupils.group
    if program == "split":
        ways = comm.size
        mpikfac.split_layers(
            model, comm, mpikfac.Distribution(ways, {"6": "outputs", "9": "inputs"})
        )
    trainer, world = made(case, comm, model)
    if trainer is None:
        return
    scaler = (
        torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        if program == "scaled"
        else None
    )
    optimizer = (
        mpikfac.Optimizer(trainer, max_norm=0.5) if program == "optimizer" else trainer.optimizer
    )
    step = 0
    while step < STEPS:
        if program == "frozen" and step in (3, 5):
            model[3].weight.requires_grad_(step == 5)
            model[3].bias.requires_grad_(step == 5)
        if program == "resumed" and step == 4:
            trainer.combine()
            mine = {
                n: v.cpu().clone() if torch.is_tensor(v) else v
                for n, v in trainer.state_dict().items()
            }
            shares = world.allgather(mine)
            whole = {n: v for share in shares for n, v in share.items()}
            record["states"].append({n: digest(v) for n, v in sorted(mine.items())})
            record["notes"].append(["missing", sorted(trainer.missing(whole.keys()))])
            if folder and world.rank == 0:
                with open(
                    Path(folder) / f"{case.name}.{comm.size}.pkl".replace("/", "_"), "wb"
                ) as file:
                    pickle.dump(whole, file)
            trainer.close()
            model = network(case.dtype)
            trainer, world = made(case, comm, model)
            trainer.load_state_dict(whole)
            optimizer = trainer.optimizer
        images, labels = batch(step, world, case.dtype)
        optimizer.zero_grad()
        if program == "discarded" and step in (1, 2):
            F.cross_entropy(model(images), labels).backward()
            trainer.discard()
            optimizer.zero_grad()
        if program == "uneven" and world.rank == 0:
            images, labels = images[: len(images) // 2], labels[: len(labels) // 2]
        parts = trainer.plan.strategy.transport.parts
        if parts is not None:
            each = parts // world.size
            losses = []
            for some_images, some_labels in zip(images.chunk(each), labels.chunk(each)):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(some_images), some_labels)
                loss.backward()
                trainer.collect()
                losses.append(loss)
        elif program == "accumulated":
            for some_images, some_labels in zip(images.chunk(2), labels.chunk(2)):
                (F.cross_entropy(model(some_images), some_labels) / 2).backward()
            loss = F.cross_entropy(model(images), labels)
        else:
            outputs = model(images)
            if case.trainer == "KFAC":
                torch.manual_seed(1000 * step + world.rank)
                trainer.record(outputs)
            loss = F.cross_entropy(outputs, labels)
            total = loss
            if pupils is not None:
                total = loss + pupils.term(images, outputs)
            if program == "not finite" and step in (2, 3) and world.rank == 0:
                total = total * float("nan")
            (scaler.scale(total) if scaler else total).backward()
        arguments: dict[str, Any] = {}
        if scaler:
            arguments["scaler"] = scaler
        if program == "bounded":
            arguments["max_norm"] = 0.05
        if program == "uneven":
            arguments["examples"] = len(images)
        if program == "quadratic":
            if "inputs" in inspect.signature(trainer.step).parameters:
                arguments |= {
                    "inputs": images,
                    "loss": lambda outputs: F.cross_entropy(outputs, labels),
                }
            else:
                trainer.length.batch(images, lambda outputs: F.cross_entropy(outputs, labels))
        if program == "precondition":
            for p in model.parameters():
                world.Allreduce(sys.modules["mpi4py.MPI"].IN_PLACE, p.grad.numpy())
                p.grad /= world.size
            trainer.precondition()
            optimizer.step()
        elif program == "optimizer":
            optimizer.step()
        else:
            stepped(trainer, loss.detach(), arguments)
        if case.settings.get("damping") in ("adapted", "adapted value") and trainer.steps % 2 == 0:
            with torch.no_grad():
                after = F.cross_entropy(model(images), labels)
            record["notes"].append(["ratio", trainer.adapt(loss.item(), after.item())])
        if pupils is not None:
            pupils.end_step()
        everything = torch.cat([v.detach().double().flatten() for v in model.state_dict().values()])
        record["weights"].append(digest(everything))
        step += 1
    if case.trainer == "Asynchronous":
        record["notes"].append(["staleness", dict(trainer.staleness), trainer.version])
    trainer.combine()
    state = trainer.state_dict()
    record["states"].append({n: digest(v) for n, v in sorted(state.items())})
    record["notes"].append(["repr", repr(trainer) if case.trainer == "KFAC" else ""])
    record["sent"] = {n: b for n, b in sorted(trainer.trace.sent.items())}
    record["decompositions"] = trainer.trace.calls["decompositions"]
    record["nonfinite"] = dict(trainer.nonfinite.counts)
    record["steps"] = trainer.steps
    trainer.close()


def run_cases(out: str, words: Sequence[str], folder: str) -> None:
    """Run all cases in this process's checkout; rank 0 writes the records of all ranks."""
    import logging

    import torch

    import mpikfac

    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    comm, found = mpikfac.world(), {}
    recorder = Recorder()
    recorder.listen()
    for case in cases():
        if words and not any(word in case.name for word in words):
            continue
        if case.named in ("curvature-ranks", "a-sgd") and comm.size == 1:
            continue
        if case.named == "curvature-ranks" and case.trainer != "KFAC":
            continue
        recorder.record = {"messages": [], "weights": [], "states": [], "notes": []}
        torch.manual_seed(5)
        try:
            train(case, comm, recorder, folder)
        except (ValueError, RuntimeError, mpikfac.UserError) as error:
            recorder.record["refused"] = f"{type(error).__name__}: {error}"
        records = comm.gather(recorder.record)
        found[case.name] = records
        if comm.rank == 0 and os.environ.get("VERBOSE"):
            print(case.name, records[0].get("refused", ""), flush=True)
    if comm.rank == 0:
        Path(out).write_text(json.dumps(found, default=str))


# -- two checkouts ---------------------------------------------------------------------------------


def recorded(checkout: Path, ranks: int, words: Sequence[str], folder: str) -> dict[str, Any]:
    """Return the records of a checkout at a number of ranks."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "records.json"
        env = os.environ | {
            "PYTHONPATH": f"{checkout}:{checkout / 'apps'}",
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        launcher = [os.environ.get("MPIRUN", str(Path(sys.executable).with_name("mpirun")))]
        flags = os.environ.get("MPIRUN_FLAGS", "--oversubscribe").split()
        command = [*launcher, *flags, "-n", str(ranks), sys.executable, "-m", "mpi4py", __file__]
        more = ["--record", str(out), "--states", folder, "--only", *words]
        subprocess.run([*command, *more], env=env, check=True, stdin=subprocess.DEVNULL)
        return dict(json.loads(out.read_text()))


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


def compare(old: Path, new: Path, ranks: Sequence[int], words: Sequence[str], states: str) -> int:
    """Print a line for each case that differs; return the number of such cases."""
    differ = 0
    for count in ranks:
        before = recorded(old, count, words, states)
        after = recorded(new, count, words, "")
        refused = sum("refused" in records[0] for records in before.values())
        for name in before.keys() | after.keys():
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
    parser.add_argument("--states", default="")
    parser.add_argument("--record", default="")
    options = parser.parse_args(arguments)
    if options.record:
        run_cases(options.record, options.only, options.states)
        return 0
    old, new = (path.resolve() for path in options.checkouts)
    return bool(compare(old, new, options.ranks, options.only, options.states))


if __name__ == "__main__":
    sys.exit(main())
