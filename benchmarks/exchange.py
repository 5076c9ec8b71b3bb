"""Compare exchanges of gradients and weights: epochs, bytes and seconds to a target.

    bash jobs/emulated_cluster.sh up 4 --rate 1gbit
    bash jobs/emulated_cluster.sh run -n 4 mpikfac calibrate --out 1gbit.json \
        --model digits_cnn --batch_per_rank 16
    bash jobs/emulated_cluster.sh run -n 4 python -m mpi4py benchmarks/exchange.py --network 1gbit \
        --machine 1gbit.json --out runs/exchange

A small network learns handwritten digits, 64 images per step on all ranks together, with three
seeds for each method; or with `--images cifar10 --path DIR`, 10,000 images of CIFAR-10, 128 per
step. `--straggler 0.02` makes the last rank slower by 20 ms in each step. Bytes are those that a
rank passes to MPI. Predictions of a step take messages from the machine file, and the network's
computing times after the run, because the speed of a shared machine changes. Results are kept in
`results/exchange.json`; runs in the file are not repeated.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import time
from pathlib import Path
from statistics import mean
from typing import Any

import torch

import mpikfac
from mpikfac_apps.guard.ranks import watched
from mpikfac_apps.lab.predict import calibrate
from mpikfac_apps.lab.study import spec
from mpikfac_apps.options.by_epoch import at_start
from mpikfac_apps.options.options import Options
from mpikfac_apps.options.parse import parse
from mpikfac_apps.text import table
from mpikfac_apps.training import train
from mpikfac_apps.training.run import Run

RESULTS = Path(__file__).parent / "results" / "exchange.json"
SEEDS = (0, 1, 2)
VISITS = 1  # measurements of the network's computing times after a run
COMMON = (
    *("--model=digits_cnn", "--log_every=22", "--threads=1"),
    *("--checkpoint_minutes=null", "--device=cpu"),
)
CIFAR = ("--data.name=cifar10", "--data.train_images=10000", "--data.test_images=2000")
IMAGES = {
    "digits": (("--batch=64", "--epochs=12"), 0.97, (1, 8, 8)),
    "cifar10": ((*CIFAR, "--batch=128", "--epochs=8"), 0.55, (3, 32, 32)),
}
"""Options, the test accuracy to reach, and the shape of an image."""
SGD = ("--optimizer=sgd", "--lr=0.05", "--weight_decay=0.005")
BARE = (*SGD, "--momentum=0")  # momentum is applied to the messages
ADAMW = ("--optimizer=adamw", "--lr=0.003")
KFAC = (
    "--kfac.factor_update_steps=5",
    "--kfac.inv_update_steps=10",
    "--kfac.momentum_of=directions",
)
WAYS: dict[str, tuple[str, ...]] = {
    "SGD": SGD,
    "SGD, overlapped": (*SGD, "--transport.overlap=true", "--transport.fusion=[2]"),
    "SGD, stepped by owners": (*SGD, "--strategy=sharded-optimizer"),
    "SGD, 8 bits": (*SGD, "--compression.gradients.type=int8"),
    "SGD, top-k": (*SGD, "--compression.gradients.type=top-k"),
    "SGD, dgc": (*BARE, "--strategy=dgc", "--compression.gradients.ratio=0.01"),
    "SGD, power-sgd": (*SGD, "--strategy=power-sgd"),
    "SGD, local-sgd": (*SGD, "--strategy=local-sgd"),
    "SGD, post-local-sgd": (*SGD, "--strategy=post-local-sgd", "--sync.warmup_steps=110"),
    "SGD, diloco": (*SGD, "--strategy=diloco", "--sync.sync_every=22"),
    "SGD, streaming-diloco": (
        *(*SGD, "--strategy=streaming-diloco", "--sync.sync_every=20", "--sync.fragments=2"),
        "--sync.delay=2",
    ),
    "SGD, lsgd": (*SGD, "--strategy=lsgd"),
    "SGD, parle": (*SGD, "--strategy=parle", "--sync.sync_every=11"),
    "SGD, safeguard": (*SGD, "--strategy=safeguard"),
    "SGD, median": (*SGD, "--strategy=median"),
    "SGD, trimmed-mean": (*SGD, "--strategy=trimmed-mean"),
    "SGD, geometric-median": (*SGD, "--strategy=geometric-median"),
    "SGD, centered-clipping": (*SGD, "--strategy=centered-clipping"),
    "AdamW": ADAMW,
    "AdamW, diloco": (*ADAMW, "--strategy=diloco", "--sync.sync_every=22"),
    "K-FAC, comm-opt": KFAC,
    "K-FAC, mem-opt": (*KFAC, "--strategy=mem-opt"),
    "K-FAC, deferred-sharded": (*KFAC, "--strategy=deferred-sharded"),
    "K-FAC, power-sgd": (*KFAC, "--strategy=power-sgd"),
    "K-FAC, local": (*KFAC, "--strategy=local-sgd", "--transport.reduce_factors_at=inverses"),
}


class Watched(Run):
    """A run that leaves its trainer behind, and whose last rank can be slow."""

    last: Run
    straggler = 0.0  # seconds in a step

    def train(self) -> int:
        """Take all steps; see `Run.train`."""
        Watched.last = self
        return super().train()

    def step(self, *given: Any) -> None:
        """Take a step; see `Run.step`."""
        if self.comm.rank == self.comm.size - 1:
            time.sleep(self.straggler)
        super().step(*given)


def main() -> None:
    """Run all missing runs, then print the table.

    Collective over: world.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", required=True, help="the name of the network in the results")
    parser.add_argument("--machine", required=True, help="a file of mpikfac calibrate")
    parser.add_argument("--straggler", type=float, default=0.0)
    parser.add_argument("--images", default="digits", choices=list(IMAGES))
    parser.add_argument("--path", help="the directory of CIFAR-10")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    comm = mpikfac.world()
    train.Run, Watched.straggler = Watched, options.straggler  # type: ignore[misc]
    of_images, target, shape = IMAGES[options.images]
    common = (*COMMON, *of_images, *([f"--data.path={options.path}"] if options.path else []))
    place = f"{options.images}, {options.network}, {comm.size} ranks"
    place += f", straggler {options.straggler:g} s"
    machine = mpikfac.predict.load_machine(options.machine)
    for way in options.ways:
        for seed in options.seeds:
            results = comm.bcast(known() if comm.rank == 0 else None)
            if f"{place}, {way}, seed {seed}" in results:
                continue
            run_dir = options.out / f"{options.network} {options.images} {way} {seed}"
            found = trained(comm, (*common, *WAYS[way], f"--seed={seed}"), target, run_dir)
            found["predicted"] = predicted(comm, found.pop("options"), shape, machine)
            if comm.rank == 0:
                results[f"{place}, {way}, seed {seed}"] = found
                RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    if comm.rank == 0:
        report(place, target, options.ways, options.seeds)


def known() -> dict[str, Any]:
    """Return the results of all finished runs."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def trained(comm: Any, given: tuple[str, ...], target: float, run_dir: Path) -> dict[str, Any]:
    """Train, and return what the run has cost.

    Collective over: comm.
    """
    if comm.rank == 0:
        shutil.rmtree(run_dir, ignore_errors=True)
    asked = parse([*given, f"--run_dir={run_dir}"], comm.size)
    with watched(comm) as watchdog:
        train.train(comm, asked, watchdog)
    run = Watched.last
    sent = comm.allreduce(sum(run.trainer.trace.sent.values())) / comm.size
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    tests = [row for row in rows if "test_accuracy" in row]
    reached = next((row for row in tests if row["test_accuracy"] >= target), None)
    return {
        "options": asked,
        "accuracy": tests[-1]["test_accuracy"],
        "accuracies": [row["test_accuracy"] for row in tests],
        "epochs": reached and reached["epoch"],
        "seconds": reached and reached["seconds"],
        "step": tests[-1]["seconds"] / run.steps,
        "bytes": sent / run.steps,
    }


def predicted(
    comm: Any, options: Options, shape: tuple[int, ...], machine: mpikfac.predict.Machine
) -> float:
    """Return the predicted seconds of a mean step, with the network's present computing times.

    Collective over: comm.
    """
    ranks, batch = comm.size, options.step_batch // comm.size
    network = calibrate.Network(options.model, batch, shape, None, torch.device("cpu"))
    for _ in range(VISITS):
        calibrate.visit(comm, [network])
    machine = dataclasses.replace(machine, networks=(network.seconds(comm),))
    every = int(at_start(options.kfac.factor_update_steps)), spec.inv_update_steps(options, ranks)
    job = mpikfac.predict.Job(options.model, batch, *every)
    plan = spec.plan_of(options, ranks)
    return mpikfac.predict.simulate(plan, machine, job).mean.seconds + Watched.straggler


def report(place: str, target: float, ways: list[str], seeds: list[int]) -> None:
    """Print a line for each way: means over seeds."""
    results = known()
    lines = [("way", "accuracy", "epochs", "seconds", "ms a step", "predicted", "off", "KB a step")]
    for way in ways:
        runs = [results[f"{place}, {way}, seed {seed}"] for seed in seeds]
        step, guess = (mean(run[key] for run in runs) for key in ("step", "predicted"))
        reached = [run for run in runs if run["epochs"] is not None]
        never = f"{len(runs) - len(reached)} never" if len(reached) < len(runs) else ""
        epochs, seconds = (
            never or f"{mean(run[key] for run in runs):.1f}" for key in ("epochs", "seconds")
        )
        lines.append(
            (
                *(way, f"{mean(run['accuracy'] for run in runs):.2%}", epochs, seconds),
                *(f"{1e3 * step:.1f}", f"{1e3 * guess:.1f}", f"{guess / step - 1:+.0%}"),
                f"{mean(run['bytes'] for run in runs) / 1e3:.1f}",
            )
        )
    print(f"{place}: target {target:.0%}, means of {len(seeds)} seeds")
    print("\n".join(table(lines)), flush=True)


if __name__ == "__main__":
    main()
