"""Choose the defaults of K-FAC on ten networks, by the worst result of the ten.

    OMP_NUM_THREADS=1 python benchmarks/defaults.py --data DIR --workers 2
    python benchmarks/defaults.py --known

Ten networks train for 234 to 300 steps with the training program: with SGD, AdamW, Muon and SOAP at
five learning rates each, and with K-FAC. Rates decay linearly to 0; all other options are the
program's defaults. Results are kept in `results/defaults.jsonl` next to this file, one line per
run, and are not repeated, so several sessions or machines can share the work. `--known` prints the
tables of the known runs: K-FAC by default compared to the best other optimizer at its default rate
and at the best rate, and the candidates for the defaults by their largest loss.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import multiprocessing
import os
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpikfac_apps.text import table

Job = tuple[str, str, str, int]
"""Network, optimizer, setting as options of the program, and seed."""

RESULTS = Path(__file__).parent / "results" / "defaults.jsonl"
CIFAR = {
    **{"data.name": "cifar10", "data.train_images": "10000", "data.augment": "true"},
    **{"batch": "128", "epochs": "3"},
}
TEXT = {
    **{"data.name": "text", "data.train_images": "3840", "data.test_images": "512"},
    **{"batch": "16", "epochs": "1"},
}
CURVES = {
    **{"data.name": "curves", "data.train_images": "10240", "data.test_images": "1000"},
    **{"batch": "512", "epochs": "15"},
}
BESIDE = Path(__file__).with_name("networks.py")
NETWORKS: dict[str, dict[str, str]] = {
    **dict.fromkeys(("resnet20", "mobilenet_small", "vit_small", "airbench94"), CIFAR),
    **{name: CIFAR | {"model": f"{BESIDE}:{name}"} for name in ("plain", "group_norm", "convnext")},
    **{"gpt_small": TEXT, "lstm_small": TEXT, "autoencoder": CURVES},
}
LONGER = {
    "resnet20, 5 epochs": CIFAR | {"model": "resnet20", "epochs": "5"},
    "resnet20, all images": CIFAR
    | {"model": "resnet20", "epochs": "7", "data.train_images": "50000"},
}
"""Additional tasks, on which `time_to_accuracy.py` has tuned the other optimizers."""
TASKS = NETWORKS | LONGER
RATES = {
    "sgd": ("0.01", "0.03", "0.1", "0.3", "1"),
    "adamw": ("0.0003", "0.001", "0.003", "0.01", "0.03"),
    "muon": ("0.0025", "0.005", "0.01", "0.02", "0.04"),
    "soap": ("0.0003", "0.001", "0.003", "0.01", "0.03"),
}
USUAL = {"sgd": "lr=0.1", "adamw": "lr=0.001", "muon": "lr=0.0025", "soap": "lr=0.003"}
"""The program's default rates; for Muon's 0.003, the nearest rate tried."""
BY_DEFAULT = ""
MEASURES = {"test_accuracy": 100.0, "test_error": -1.0, "test_bits_per_byte": -1.0}
"""Measures, and the factor to a value that is good if it is large."""
SEEDS = (0, 1, 2)


def main() -> int:
    """Run all missing runs in several processes, or print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder of cifar-10-batches-bin")
    parser.add_argument("--text", default="null", help="a file; by default Python's library")
    parser.add_argument("--out", type=Path, default=Path("runs/defaults"))
    parser.add_argument("--workers", type=int, default=1, help="processes that train at once")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=TASKS)
    parser.add_argument("--optimizers", nargs="+", default=["kfac", *RATES])
    parser.add_argument("--settings", nargs="+", help='such as "lr=0.005 kfac.budget=0.2"')
    parser.add_argument("--known", action="store_true", help="print what is known, run nothing")
    options = parser.parse_args()
    if options.known:
        report(known())
        return 0
    shutil.rmtree(options.out / "claims", ignore_errors=True)  # of an earlier sitting
    spawn = multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=work, args=(options,)) for _ in range(options.workers)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return max(abs(worker.exitcode or 0) for worker in workers)


def jobs(options: argparse.Namespace) -> Iterator[Job]:
    """Yield the selected runs."""
    for seed, optimizer in itertools.product(options.seeds, options.optimizers):
        rates = [f"lr={rate}" for rate in RATES.get(optimizer, ())]
        settings = options.settings or rates or [BY_DEFAULT]
        for setting, network in itertools.product(settings, options.networks):
            yield network, optimizer, setting, seed


def work(options: argparse.Namespace) -> None:
    """Run jobs until none is left; a folder claims a job."""
    for job in jobs(options):
        claim = options.out / "claims" / "+".join(map(str, job)).replace("/", "-")
        if job in known():
            continue
        with contextlib.suppress(FileExistsError):
            claim.mkdir(parents=True)
            train(job, options)


def train(job: Job, options: argparse.Namespace) -> None:
    """Train, and keep the result; a run that diverges has no measure."""
    from mpikfac_apps.training.train import main as program

    network, optimizer, setting, seed = job
    out, task = options.out / f"{os.getpid()}", TASKS[network]
    place = {"cifar10": f"{options.data}", "text": options.text}.get(task["data.name"], "null")
    values = {
        **{"model": network, "optimizer": optimizer, "seed": f"{seed}", "data.path": place},
        **{"threads": "1", "eval_every": task["epochs"], "watchdog_timeout": "null"},
        **{"checkpoint_minutes": "null", "run_dir": f"{out}"},
        **task,
        **dict(text.split("=") for text in setting.split()),
    }
    shutil.rmtree(out, ignore_errors=True)
    start = time.process_time()
    with contextlib.suppress(SystemExit):
        program([f"--{key}={value}" for key, value in values.items()])
    keep(job, measured(out / "metrics.jsonl") | {"seconds": time.process_time() - start})


def measured(metrics: Path) -> dict[str, float]:
    """Return the last test of a run; nothing if the run was not tested."""
    lines = map(json.loads, metrics.read_text().splitlines())
    tests = [line for line in lines if MEASURES.keys() & line.keys()]
    return {name: test[name] for test in tests[-1:] for name in MEASURES.keys() & test.keys()}


def keep(job: Job, result: Mapping[str, float]) -> None:
    """Append a result to the file."""
    with RESULTS.open("a") as file:
        file.write(json.dumps({"job": job, "result": result}) + "\n")
    print(*job, result, flush=True)


def known() -> dict[Job, dict[str, float]]:
    """Return all known results."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    rows: Iterator[Any] = map(json.loads, lines)
    return {tuple(row["job"]): row["result"] for row in rows}


# -- tables ----------------------------------------------------------------------------------------


def report(results: Mapping[Job, Mapping[str, float]]) -> None:
    """Print K-FAC by default compared to the other optimizers, and the candidates."""
    rows = [("network", "K-FAC by default", "best at usual rates", "best of five rates")]
    for network in NETWORKS:
        others = [job for job in results if job[0] == network and job[1] in RATES]
        usual = [job for job in others if job[2] == USUAL[job[1]]]
        mine = network, "kfac", BY_DEFAULT, 0
        rows.append((network, *(cell(results, jobs) for jobs in ([mine], usual, others))))
    print("\n".join(table(rows)))
    print()
    rows = [("setting of K-FAC, seed 0", "largest loss", *NETWORKS)]
    losses = sorted(candidates(results), key=lambda pair: max(pair[1]))
    for setting, loss in losses:
        rows.append((setting, f"{max(loss):.1f} %", *(f"{number:.1f}" for number in loss)))
    print("\n".join(table(rows)))


def good(result: Mapping[str, float]) -> float:
    """Return the measure of a result, as a value that is good if it is large."""
    numbers = (factor * result[name] for name, factor in MEASURES.items() if name in result)
    return next(numbers, -math.inf)


def best(results: Mapping[Job, Mapping[str, float]], tried: Sequence[Job]) -> Job | None:
    """Return the job of seed 0 with the best result."""
    first = [job for job in tried if job[3] == 0 and job in results]
    return max(first, key=lambda job: good(results[job]), default=None)


def cell(results: Mapping[Job, Mapping[str, float]], tried: Sequence[Job]) -> str:
    """Return the mean over seeds of the setting that is best with seed 0, and the seeds."""
    if (chosen := best(results, tried)) is None:
        return ""
    seeds = [(*chosen[:3], seed) for seed in SEEDS]
    ends = [abs(good(results[job])) for job in seeds if job in results]
    each = ", ".join(f"{end:.4g}" for end in ends)
    return f"{statistics.mean(ends):.4g} ({each}) {chosen[1]} {chosen[2]}".strip()


def candidates(
    results: Mapping[Job, Mapping[str, float]],
) -> Iterator[tuple[str, list[float]]]:
    """Yield settings of K-FAC with their loss by network to the best run of the others, in %."""
    for setting in dict.fromkeys(job[2] for job in results if job[1] == "kfac"):
        loss = []
        for network in NETWORKS:
            others = best(results, [j for j in results if j[0] == network and j[1] in RATES])
            job = network, "kfac", setting, 0
            if others is None or job not in results:
                break
            least = good(results[others])
            scale = 1.0 if least > 0 else 100 / abs(least)  # points of accuracy, or a share
            loss.append(scale * (least - good(results[job])))
        if len(loss) == len(NETWORKS):
            yield setting, loss


if __name__ == "__main__":
    sys.exit(main())
